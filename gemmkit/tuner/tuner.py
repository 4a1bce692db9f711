"""`gemmkit.tune`: the fastest mapping of a product, found by trying."""

from __future__ import annotations

import datetime
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmkit.emulator import current_mode
from gemmkit.kernels.config import Keywords, names_keywords
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.fingerprint import look_again
from gemmkit.plans.ahead import KernelToCompile, compiled
from gemmkit.plans.launch import forget
from gemmkit.programs.decorated import Program
from gemmkit.tuner.measure import Buffers, Failed, Measuring, contents_of, default_result, difference, written
from gemmkit.tuner.subjects import SUBJECTS, Programmed, Subject, Tried, Tuned, TunedProduct
from gemmkit.tuning import store

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gemmkit.programs.mapping import Mapping

# --------------------------------------------------------------------------------------------------
# The times of a search as a heat map over tile sizes, as of paper 003's exploration.

def tiles(found: Tuned) -> dict[tuple[int, int], float]:
    """The least time of each tile's (M, N), in microseconds."""
    best: dict[tuple[int, int], float] = {}
    for row in found.rows:
        if row.microseconds is not None and row.config is not None:
            block = row.config.block_shape.size
            best[block.M, block.N] = min(row.microseconds, best.get((block.M, block.N), row.microseconds))
    return best


def sweep(found: Tuned, file: Path, flops: float) -> None:
    """Draw ``tiles`` as rates of a product of so many operations. Raises ValueError where nothing was timed."""
    best = tiles(found)
    if not best:
        raise ValueError("no mapping was timed: there is nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = (sorted({tile[axis] for tile in best}) for axis in (0, 1))
    rates = [[flops / best[m, n] / 1e6 if (m, n) in best else float("nan") for n in columns] for m in rows]
    figure = Figure(figsize=(1.6 + 0.9 * len(columns), 1.4 + 0.6 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    image = axes.imshow(rates, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel("columns of a block's tile")
    axes.set_ylabel("rows")
    axes.set_title(found.what, fontsize=9)
    highest = max(rate for row in rates for rate in row if rate == rate)
    for at_row, row in enumerate(rates):
        for at_column, rate in enumerate(row):
            if rate == rate:
                axes.text(at_column, at_row, f"{rate:.1f}", ha="center", va="center", fontsize=8,
                          color="white" if rate < 0.7 * highest else "black")
    figure.colorbar(image, label="Tflop/s")
    figure.savefig(file, dpi=150)


# --------------------------------------------------------------------------------------------------
# Progress of a search, or of compiling ahead: on standard error, or on a console.

class Progress:
    """A bar for each part, where it is to be shown: ``is_shown`` None says where standard error is a terminal. ``console``
    is a `rich.console.Console` in its place, from which bars go when all is done."""

    def __init__(self, is_shown: bool | None = None, console: Any = None):
        self._bars: Any = None
        self._task: Any = None
        if sys.stderr.isatty() if is_shown is None else is_shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            self._bars = Bars(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                              console=console or Console(file=sys.stderr), transient=console is not None)

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, what: str, total: int) -> None:
        if self._bars is not None:
            self._task = self._bars.add_task(what, total=total)

    def advance(self) -> None:
        if self._bars is not None:
            self._bars.advance(self._task)


@dataclass(frozen=True)
class Effort:
    """How many candidates are tried, for how many seconds at most, and how long each is timed: pairs of so many
    microseconds."""

    candidates: int
    seconds: float
    pairs: int
    microseconds: float


EFFORTS = {"quick": Effort(16, 60.0, 5, 1000.0), "full": Effort(160, 1200.0, 9, 3000.0)}
FINALISTS, FINAL_PAIRS = 3, 15         # the fastest are timed again: the first of many is the luckiest, too
WORTH = 1.01                           # times as fast as the default: what a mapping has to be to be kept


class TunedKeywords(Keywords, total=False):
    """What `tune` takes of what it tunes.

    Args:
        c: (M, N), of a product.
        out: where results would go; it is not written, nor are a program's results.
        c_list: matrices (M, N), of a group.
        mappings: those of a program to try.
    """

    c: Any
    out: Any
    c_list: Sequence[Any] | None
    mappings: Iterable[Mapping] | None


def subject_of(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Subject:
    """Of the arguments of `gemmkit.tune`: those of `matmul`, or a function of gemmkit's and its own.

    Raises TypeError for another function.
    """
    if not arguments or not callable(arguments[0]):
        return TunedProduct(*arguments, **keywords)
    function, *given = arguments
    if isinstance(function, Program):
        return Programmed(*arguments, **keywords)
    found = SUBJECTS.get(function)
    if found is None:
        raise TypeError(f"tune({getattr(function, '__name__', function)!r}, ...): matmul, einsum and grouped have mappings "
                        "that are tuned, and programs; give one of these, or the operands of a product")
    return found(*given, **keywords)


@names_keywords
def tune(*arguments: Any, effort: str = "quick", budget: float | None = None, keep: bool = True, jobs: int | None = None,
         progress: bool | None = None, **keywords: Unpack[TunedKeywords]) -> Tuned:
    """Try mappings of a product, and keep the fastest: `gemmkit.matmul`, `plan` and `gemmEx` take it from now on. Also for a
    contraction of `einsum`, a group of `grouped`, or a program (`gemmkit.program`).

    Candidates are compiled in parallel processes. One more process, with its own context and copies of the arrays, runs each
    of them, compares its result with the default mapping's, and times it in turns with the default. The table lists a
    candidate that cannot be compiled, is wrong, faults or hangs, with the reason. Ctrl-C ends the search and keeps what was
    found.

    Args:
        arguments: ``a, b, c``, the operands of `gemmkit.matmul`; or a function (`gemmkit.matmul`, `einsum` of two operands,
            `grouped`) and its arguments; or a program and its arguments.
        effort: "quick" (16 candidates, a minute at most) or "full" (160, 20 minutes).
        budget: seconds in place of the effort's. Half of them may be spent on compiling.
        keep: whether the winner goes to the store of this kind of GPU (`gemmkit.tuning.store`).
        jobs: candidates that are compiled at a time; None for one a processor.
        progress: whether to show it on standard error; None where that is a terminal.
        keywords: those of what is tuned, but for ``conf`` and ``stream``. (``program.tune`` takes a program's arguments by
            name.)

    Returns:
        A `Tuned`: its ``config`` is the fastest configuration, and printed it is a table of all that were tried. Of a
        program a `TunedProgram`, which has a ``mapping``.

    Raises:
        ValueError: another effort, a budget below 0, no time for the default itself; what `matmul` raises.
        TypeError: host arrays: mappings are timed on a GPU; a function that is none of these.
        RuntimeError: the default mapping does not run.

    The arrays' device is awaited once, and their contents are copied to the host. Example, on a GPU::

        a, b = cupy.ones((5000, 5000), "f2"), cupy.ones((5000, 5000), "f2")
        print(gemmkit.tune(a, b))
        d = gemmkit.matmul(a, b)                               # by the fastest of them
        gemmkit.tune(gemmkit.einsum, "ijk,kl->lij", x, y)
        gemmkit.tune(gemmkit.grouped, a_list, b_list)
        gemmkit.tune(program, x, y, out)                       # as program.tune(x, y, out)
    """
    chosen = _effort(effort, budget)
    if current_mode() is not None:
        raise TypeError("tune: mappings are timed on a GPU, and this is the emulator")
    start = time.monotonic()
    search = _Search(subject_of(arguments, dict(keywords)), chosen, start)
    with Progress(progress) as shown:
        return search.run(keep, jobs, shown)


def _effort(name: str, budget: float | None) -> Effort:
    if name not in EFFORTS:
        raise ValueError(f"effort={name!r}: one of {', '.join(EFFORTS)} is needed")
    chosen = EFFORTS[name]
    if budget is None:
        return chosen
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 <= budget < math.inf:
        raise ValueError(f"budget={budget!r}: a number of seconds, 0 or more, is needed")
    return Effort(chosen.candidates, float(budget), chosen.pairs, chosen.microseconds)


@dataclass
class _Ready:
    """A candidate whose kernels are compiled."""

    number: int                                            # 0 is the default
    candidate: Any                                         # None is the default
    compiled: Any                                          # `Compiled`, a `CompiledGroup` or a `ProgramPlan`
    config: Any
    cubins: tuple[bytes, ...] = ()

    @property
    def name(self) -> str:
        return "default" if self.candidate is None else self.candidate.name

    def row(self, **outcome: Any) -> Tried:
        """What came of it: a time and a ratio, or an error."""
        return Tried(self.name, self.config, self.candidate, **outcome)


class _Search:
    """The candidates of a subject, a search that began at ``start``."""

    def __init__(self, subject: Subject, effort: Effort, start: float, measuring: Callable[..., Any] = Measuring):
        self._subject, self._effort, self._start, self._measuring = subject, effort, start, measuring
        self._device, self._ordinal = subject.device, subject.ordinal
        self._default = _Ready(0, None, subject.default, subject.config_of(subject.default))
        self._rows: dict[int, Tried] = {}
        self._limit = 0.0                                      # seconds that a candidate may take, when the default has run
        self.notes: list[str] = []

    # -- the search

    def run(self, keep: bool, jobs: int | None, shown: Any) -> Tuned:
        look_again()
        subject, effort = self._subject, self._effort
        if subject.is_empty:
            raise ValueError(f"{subject.what}: there is nothing to compute")
        if not effort.seconds:
            self.notes.append("a budget of 0 seconds: nothing was tried")
        try:
            listed = list(self._candidates()) if effort.seconds else []
            ready = self._compiled([self._default, *listed], jobs, shown)
            self._measured(ready, shown)
        except KeyboardInterrupt:
            self.notes.append("interrupted: what was measured by then is all there is")
        return self._tuned(subject.what, keep)

    def _left(self) -> float:
        """Seconds of the budget."""
        return self._start + self._effort.seconds - time.monotonic()

    def _candidates(self) -> Iterator[_Ready]:
        """Those that are legal and not the default again; the others are told of. As many as the effort allows."""
        found = 0
        for number, candidate in enumerate(self._subject.candidates(), 1):
            if found >= self._effort.candidates:
                return
            try:
                tried = self._subject.tried(candidate)
            except (ConfigError, ValueError, TypeError) as error:
                self._rows[number] = Tried(candidate.name, None, candidate, error=f"not legal: {error}")
                continue
            if self._subject.is_known(tried):
                continue
            found += 1
            yield _Ready(number, candidate, tried, self._subject.config_of(tried))

    def _compiled(self, listed: Sequence[_Ready], jobs: int | None, shown: Any) -> list[_Ready]:
        """Those whose kernels could be made, the default first. Half of the budget may be spent on it."""
        needs = {one.number: self._subject.kernels(one.compiled) for one in listed}
        kernels: dict[tuple[Any, ...], tuple[KernelToCompile, list[_Ready]]] = {}
        for one in listed:
            for launchable in needs[one.number]:
                kernels.setdefault(launchable.code_key, (KernelToCompile(launchable), []))[1].append(one)
        until = self._left() / 2
        shown.begin("compiling", len(kernels))
        waiting = {one.number: len(needs[one.number]) for one in listed}
        for made in compiled([kernel for kernel, _ in kernels.values()], jobs):
            for one in kernels[made.kernel.launchable.code_key][1]:
                waiting[one.number] -= 1
                if made.error is not None:
                    self._rows[one.number] = one.row(error=f"not compiled: {made.error}")
                elif not waiting[one.number] and one.number not in self._rows:
                    one.cubins = tuple(launchable.entry().cubin for launchable in needs[one.number])
            shown.advance()
            if self._left() < until and self._default.cubins:
                break
        for one in listed:
            if waiting[one.number] and one.number not in self._rows:
                self._rows[one.number] = one.row(error="not compiled within the budget")
        return [one for one in listed if one.cubins]

    def _measured(self, ready: Sequence[_Ready], shown: Any) -> None:
        """Run, check and time what is compiled."""
        if not self._default.cubins:
            raise RuntimeError(f"the default mapping cannot be compiled: {self._rows[0].error}")
        if len(ready) == 1:
            return
        memory = self._subject.memory()
        jobs = {one.number: self._subject.job(one.compiled, memory, one.cubins) for one in ready}
        contents = contents_of(memory, self._ordinal)
        shown.begin("measuring", len(ready) - 1)
        with self._measuring(memory, contents, jobs[0].varied, self._ordinal) as process:
            for number, job in jobs.items():
                process.keep(number, job)
            expected, self._limit = default_result(process, 0, "the default mapping")
            for one in ready[1:]:
                if self._left() <= 0:
                    self._rows[one.number] = one.row(error="not timed within the budget")
                    continue
                self._rows[one.number] = self._tried(process, one, memory, expected, self._effort.pairs)
                process.forget(one.number)
                shown.advance()
            timed = [row for number, row in self._rows.items() if number and row.ratio is not None]
            for row in sorted(timed, key=_slowness)[:FINALISTS] if self._left() > 0 else ():
                one = next(one for one in ready if one.candidate is row.candidate)
                process.keep(one.number, jobs[one.number])
                again = self._tried(process, one, memory, expected, FINAL_PAIRS)
                self._rows[one.number] = again

    def _tried(self, process: Any, one: _Ready, memory: Buffers, expected: list[bytes], pairs: int) -> Tried:
        """A candidate's row."""
        try:
            wrong = self._difference(memory, expected, process.result(one.number, self._limit))
            if wrong is not None:
                return one.row(error=f"wrong: {wrong}")
            times = process.pairs(0, one.number, pairs, self._effort.microseconds, self._limit)
        except Failed as error:
            return one.row(error=f"failed: {error}")
        ratio = statistics.median(default / mine for default, mine in times)
        self._rows[0] = self._default.row(microseconds=statistics.median(default for default, _ in times), ratio=1.0)
        return one.row(microseconds=statistics.median(mine for _, mine in times), ratio=ratio)

    def _difference(self, memory: Buffers, expected: list[bytes], found: list[bytes]) -> str | None:
        for name, info, allowed in self._subject.outputs():
            text = difference(written(memory, expected, info), written(memory, found, info), allowed)
            if text is not None:
                return f"{name}: {text}"
        return None

    # -- the answer

    def _tuned(self, what: str, keep: bool) -> Tuned:
        default = self._rows.setdefault(0, self._default.row())
        timed = sorted((row for row in self._rows.values() if row.ratio is not None), key=_slowness)
        best = next((row for row in timed[:1] if row.ratio is not None and row.ratio >= WORTH), default)
        is_kept = keep and len(timed) > 1 and self._keep(what, best, default)
        rest = [row for row in self._rows.values() if row.ratio is None]
        return self._subject.answer(what, (*timed, *rest), default, best, is_kept, tuple(self.notes))

    def _keep(self, what: str, best: Tried, default: Tried) -> bool:
        kept = store.store_of(self._device)
        if kept is None:
            self.notes.append("nothing is kept on disk (GEMMKIT_CACHE=0, or no home folder)")
            return False
        entry = {"what": what, "mapping": best.candidate and best.candidate.plain(), "name": best.name, "ratio": best.ratio,
                 "microseconds": best.microseconds, "default_microseconds": default.microseconds,
                 "date": datetime.date.today().isoformat()}
        try:
            kept.put(self._subject.key(), entry)
        except OSError as error:
            self.notes.append(f"the result could not be kept: {error}")
            return False
        forget()
        return True


def _slowness(row: Tried) -> float:
    return -(row.ratio or 0.0)
