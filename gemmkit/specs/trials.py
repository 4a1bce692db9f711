"""Variants of a schedule tried: compiled in processes of their own, checked against float64, timed on a GPU.

What runs on the GPU does so in the tuner's process (`gemmkit.tuner.device_process`), which has copies of the matrices.
"""

from __future__ import annotations

import inspect
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.components import ComponentError
from gemmkit.emulator import ExecutionTarget, current_mode
from gemmkit.lang import deferred
from gemmkit.lang.fingerprint import Array, look_again
from gemmkit.runtime import device
from gemmkit.runtime.array_info import ArrayInfo, alignment
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import Failure, forked
from gemmkit.runtime.launch import Launchable
from gemmkit.specs.lower import BlockKernel, Lowered
from gemmkit.specs.run import READ_ONLY, described, prepared
from gemmkit.tuner.measure import (
    Buffers,
    Failed,
    Job,
    Measuring,
    contents_of,
    default_result,
    difference,
    elements,
    job_of,
    memory_of,
    tolerance,
    written,
)
from gemmkit.tuner.tuner import FINAL_PAIRS, FINALISTS, Progress

if TYPE_CHECKING:
    from gemmkit.specs.schedule import Finished

# --------------------------------------------------------------------------------------------------
# What came of trying variants of a schedule: a row each, and the table.

@dataclass(frozen=True)
class Variant:
    """One choice of parameters, and what came of it: a time, or in ``error`` why there is none.

    ``blocks_per_sm`` is how many blocks a multiprocessor has at a time; ``ratio`` is the time of `gemmkit.matmul`, measured
    in turns, by this one's (above 1 it is faster).
    """

    parameters: dict[str, Any]
    schedule: Any = field(default=None, repr=False)
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None
    threads: int | None = None
    blocks_per_sm: int | None = None
    microseconds: float | None = None
    tflops: float | None = None
    ratio: float | None = None
    is_right: bool = False
    error: str | None = None

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.parameters.items())

    def refused(self, why: object) -> Variant:
        """The row of one that has no time."""
        return replace(self, error=str(why))


HEADER = ("variant", "us", "TFLOP/s", "ratio", "registers", "shared", "threads", "blocks/SM")


@dataclass(frozen=True)
class Explored:
    """What was found. ``rows`` has all variants: the timed ones, the fastest first; then those that were compiled and
    checked alone; then those that were refused. ``default`` is the time of `gemmkit.matmul` in microseconds, None where
    nothing was timed."""

    what: str
    rows: tuple[Variant, ...]
    default: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Variant:
        """The fastest variant. Raises RuntimeError where none was timed."""
        if not self.rows or self.rows[0].microseconds is None:
            why = "; ".join(self.notes) or "no variant could be compiled and is right"
            raise RuntimeError(f"{self.what}: no variant was timed ({why})")
        return self.rows[0]

    @property
    def schedule(self) -> Any:
        """The fastest schedule. Raises RuntimeError where none was timed."""
        return self.best.schedule

    def __str__(self) -> str:
        """A table; what was refused stands below it, each with the rule that it breaks."""
        shown = [row for row in self.rows if row.error is None]
        lines = [HEADER, *map(_cells, shown)]
        if self.default is not None:
            lines.append(("gemmkit.matmul", f"{self.default:.2f}", "", "1.000", "", "", "", ""))
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join((first.ljust(widths[0]), *map(str.rjust, rest, widths[1:]))) for first, *rest in lines]
        others = [row for row in self.rows if row.error is not None]
        counts = f"{self.what}: {len(self.rows)} variants, {len(others)} of them refused or wrong"
        refused = [f"{row}: {' '.join(str(row.error).split())}" for row in others]
        return "\n".join([counts, *(line.rstrip() for line in table), *refused, *self.notes])


def _cells(row: Variant) -> tuple[str, ...]:
    def number(value: float | None, text: str) -> str:
        return "-" if value is None else format(value, text)

    registers = number(row.registers, "d") + (f" ({row.spilled_bytes} B spilled)" if row.spilled_bytes else "")
    return (str(row), number(row.microseconds, ".2f"), number(row.tflops, ".2f"), number(row.ratio, ".3f"), registers,
            number(row.shared_bytes, "d"), number(row.threads, "d"), number(row.blocks_per_sm, "d"))


PAIRS, MICROSECONDS = 5, 1000.0        # each variant is timed, in turns with gemmkit.matmul
COMPILE_S = 300.0


class TriedVariant(NamedTuple):
    """A variant that fits the matrices."""

    kernel: BlockKernel
    lowered: Lowered
    launchable: Launchable


class CompileReport(NamedTuple):
    """What a process answers: the assembler's figures, and what is wrong in the emulator."""

    usage: dict[str, Any]
    wrong: str | None


def explored(rows: Sequence[Variant], a: Any, b: Any, out: Any, budget: float, jobs: int | None,
             progress: bool | None) -> Explored:
    """Try the variants: see `gemmkit.specs.trials.Variants`."""
    mode = current_mode()
    on_host = describe(a, "a").device < 0
    if on_host and mode is None:
        raise TypeError("a is a host array (NumPy); explore in the emulator, without times: with gemmkit.emulate(): ...")
    infos, out = described(a, b, out)
    if 0 in (*infos[0].shape, *infos[1].shape):
        raise ValueError(f"a is {infos[0].shape} and b is {infos[1].shape}: there is nothing to compute")
    if len({info.device for info in infos}) != 1:
        raise ValueError("a, b, out are in different places; put them on one GPU")
    target = device.H100 if on_host else device.target(infos[0].device)
    search = _Search(list(rows), infos, target, budget, jobs, mode if on_host else None)
    with Progress(progress) as shown:
        search.fit()
        search.compile(shown)
        if on_host:
            search.notes.append("nothing was timed: this is the emulator. Variants were compiled for an "
                                f"{target.name}, and emulated on small operands")
        else:
            search.time(a, b, out, shown)
    return search.result()


@dataclass
class _Search:
    """The variants of one product; ``mode`` is the emulator's, None on a GPU."""

    rows: list[Variant]
    infos: tuple[ArrayInfo, ...]
    target: Any
    budget: float
    jobs: int | None
    mode: ExecutionTarget | None

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.default: float | None = None
        self._start = time.monotonic()
        self._tried: dict[int, TriedVariant] = {}
        a, b, _ = self.infos
        self.sizes = a.shape[0], b.shape[1], a.shape[1]

    def left(self) -> float:
        """Seconds of the budget."""
        return self._start + self.budget - time.monotonic()

    # -- 1. which fit -----------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Lower each schedule for the matrices: what does not fit is refused here, before anything is compiled."""
        look_again()
        for number, row in enumerate(self.rows):
            if row.schedule is None:
                continue
            try:
                kernel, lowered = prepared(row.schedule, self.infos)
                launchable = kernel.launchable(READ_ONLY, self.infos, self.target, max(0, self.infos[0].device))
            except (ValueError, ComponentError) as error:     # the latter: of a micro-kernel that is no device code
                self.rows[number] = row.refused(error)
                continue
            self._tried[number] = TriedVariant(kernel, lowered, launchable)
            self.rows[number] = replace(row, threads=kernel.threads, shared_bytes=kernel.shared_bytes)

    # -- 2. compiled, and emulated where there is no GPU ----------------------------------------------------------------

    def compile(self, shown: Any) -> None:
        """In a process each. Of the budget half is for measuring."""
        deferred.load()                                          # once, and not in every process
        numbers = list(self._tried)
        tasks = [self._task(number) for number in numbers]
        reserved = 0.0 if self.mode is not None else self.budget / 2
        shown.begin("compiling", len(tasks))
        waiting = set(numbers)
        processes = forked(tasks, self.jobs, COMPILE_S)
        for index, found in processes:
            waiting.discard(numbers[index])
            self._compiled(numbers[index], found)
            shown.advance()
            if self.left() < reserved:
                processes.close()                             # type: ignore[attr-defined]
                break
        for number in waiting:
            self._drop(number, "not compiled within the budget")

    def _task(self, number: int) -> Callable[[], CompileReport]:
        tried, schedule = self._tried[number], self.rows[number].schedule

        def task() -> CompileReport:
            usage = tried.launchable.entry().meta["usage"]
            return CompileReport(usage,
                                 None if self.mode is None else self._emulated(schedule, tried.lowered, self.mode.seed))

        return task

    def _compiled(self, number: int, found: Any) -> None:
        from gemmkit.plans.ahead import occupancy

        if isinstance(found, Failure):
            self._drop(number, f"not compiled: {found}")
            return
        row, usage = self.rows[number], found.usage
        blocks = occupancy(usage["registers"], row.threads, row.shared_bytes, self.target).blocks     # type: ignore[arg-type]
        self.rows[number] = replace(row, registers=usage["registers"], blocks_per_sm=blocks, is_right=found.wrong is None,
                                    spilled_bytes=usage["spill_stores"] + usage["spill_loads"])
        if found.wrong is not None:
            self._drop(number, found.wrong)

    def _drop(self, number: int, why: str) -> None:
        self.rows[number] = replace(self.rows[number].refused(why), is_right=False)
        self._tried.pop(number, None)

    def _emulated(self, schedule: Any, lowered: Lowered, seed: int | None) -> str | None:
        """What is wrong on operands that are as small as the same kernel takes; None if nothing is."""
        import gemmkit

        m, n, k = small_sizes(schedule, lowered, self.sizes)
        rng = np.random.default_rng(0)
        a, b, out = (like(shape, info) for shape, info in zip(((m, k), (k, n), (m, n)), self.infos))
        a[...], b[...] = rng.standard_normal(a.shape), rng.standard_normal(b.shape)
        out[...] = np.nan if out.dtype.kind not in "iu" else 113
        try:
            with gemmkit.emulate(seed):
                schedule(a, b, out=out)
        except Exception as error:                            # the emulator's, or a micro-kernel's own
            return f"wrong: {type(error).__name__}: {error}"
        found = difference(a.astype(np.float64) @ b.astype(np.float64), out, tolerance(out.dtype, out.dtype, k))
        return None if found is None else f"wrong: {found}"

    # -- 3. checked and timed on a GPU ------------------------------------------------------------------------------------

    def time(self, a: Array, b: Array, out: Array, shown: Any) -> None:
        from gemmkit.plans.plan import Plan

        if not self._tried:
            return
        plan = Plan(a, b, None, out, None, {})
        compiled = plan._compiled
        memory = memory_of(compiled)
        jobs = {number: self._job(tried, memory) for number, tried in self._tried.items()}
        default = job_of(compiled, memory, compiled.launchable.entry().cubin)
        contents = contents_of(memory, self.infos[0].device)
        expected = self._expected(memory, contents)
        shown.begin("measuring", len(jobs))
        with Measuring(memory, contents, default.varied, self.infos[0].device) as process:
            process.keep(-1, default)
            _, limit = default_result(process, -1, "gemmkit.matmul, which variants are timed in turns with,")
            for number, job in jobs.items():
                if self.left() <= 0:
                    self._drop(number, "not timed within the budget")
                    continue
                process.keep(number, job)
                self._timed(process, number, memory, expected, PAIRS, limit)
                process.forget(number)
                shown.advance()
            for number in sorted(self._tried, key=lambda n: -(self.rows[n].ratio or 0.0))[:FINALISTS]:
                if self.left() > 0:
                    process.keep(number, jobs[number])
                    self._timed(process, number, memory, expected, FINAL_PAIRS, limit)

    def _job(self, tried: TriedVariant, memory: Buffers) -> Job:
        kernel = tried.launchable
        pointers = [(kernel.slot(n + 1), memory.pointer(info.pointer)) for n, info in enumerate(self.infos)]
        slots = tuple((slot, at) for slot, at in pointers if slot is not None)
        maps: Any = tuple((kernel.slot(1 + len(self.infos) + n), pointers[one.which][1], one.encoder.arguments)
                     for n, one in enumerate(tried.kernel.map_slots(self.infos)))
        return Job(kernel.entry().cubin, kernel.blocks, kernel.threads, kernel.shared_bytes, tuple(kernel.formats),
                   tuple(kernel.values), kernel.cluster, False, False, slots, maps, (),
                   tuple(dict.fromkeys(at.buffer for _, at in pointers)))

    def _expected(self, memory: Buffers, contents: Sequence[bytes]) -> np.ndarray:
        """The product in float64, of the matrices as they are on the GPU."""
        def wide(info: ArrayInfo) -> np.ndarray:
            number = memory.pointer(info.pointer).buffer
            return elements(contents[number], memory.buffers[number].start, info).astype(np.float64)

        return np.asarray(wide(self.infos[0]) @ wide(self.infos[1]))

    def _timed(self, process: Any, number: int, memory: Buffers, expected: np.ndarray, pairs: int, limit: float) -> None:
        out = self.infos[2]
        try:
            found = written(memory, process.result(number, limit), out)
            wrong = difference(expected, found, tolerance(out.dtype, out.dtype, self.sizes[2]))
            if wrong is not None:
                self._drop(number, f"wrong: {wrong}")
                return
            times = process.pairs(-1, number, pairs, MICROSECONDS, limit)
        except Failed as error:
            self._drop(number, f"failed: {error}")
            return
        mine = statistics.median(mine for _, mine in times)
        self.default = statistics.median(default for default, _ in times)
        m, n, k = self.sizes
        self.rows[number] = replace(self.rows[number], microseconds=mine, tflops=2e-6 * m * n * k / mine, is_right=True,
                                    ratio=statistics.median(default / mine for default, mine in times))

    def result(self) -> Explored:
        (m, n, k), (a, _, c) = self.sizes, self.infos
        what = f"{m} x {n} x {k}, {a.dtype} to {c.dtype}, on {self.target.name}"
        right = [row for row in self.rows if row.error is None]
        timed = sorted((row for row in right if row.microseconds is not None), key=lambda row: -(row.ratio or 0.0))
        rest = [row for row in right if row.microseconds is None] + [row for row in self.rows if row.error is not None]
        return Explored(what, (*timed, *rest), self.default, tuple(self.notes))


# -- small operands of the same kind ------------------------------------------------------------------------------------

def small_sizes(schedule: Finished, lowered: Lowered, sizes: tuple[int, int, int]) -> tuple[int, ...]:
    """Sizes of which the same kernel computes one whole tile and what the last one has, along K two steps and the rest.
    Sizes that the schedule says stay."""
    least = (lowered.tile[0], lowered.tile[1], 2 * lowered.depth)
    steps = (*lowered.tile, lowered.depth)
    return tuple(size if said is not None else min(size, whole + size % step)
                 for said, size, whole, step in zip(schedule.sizes, sizes, least, steps))


def like(shape: tuple[int, int], info: ArrayInfo) -> np.ndarray:
    """A host array in the order of a matrix, and aligned as it is: of the same class of kernels."""
    wanted = alignment(info)
    is_by_rows = info.strides[1] == 1 if info.shape[1] > 1 else info.strides[0] != 1
    lines, length = shape if is_by_rows else shape[::-1]
    itemsize = info.dtype.itemsize
    for pitch in range(length, length + 17):
        memory = np.zeros(lines * pitch * itemsize + 64, np.uint8)
        shift = -memory.ctypes.data % 32 + wanted % 16
        held = memory[shift:shift + lines * pitch * itemsize].view(info.dtype).reshape(lines, pitch)[:, :length]
        array = held if is_by_rows else held.T
        if alignment(describe(array, "a")) == wanted:
            return array
    raise AssertionError(f"no host array is aligned to {wanted} bytes")


# --------------------------------------------------------------------------------------------------
# Schedules tried out: a function of parameters makes them, all combinations are compiled, checked and timed, the fastest
# is returned (Fireiron, section 5, hypothesis C: tile sizes explored).
#
# >>> from gemmkit.specs.schedule import *
# >>> def make(rows, columns, k):
# ...     return (MatMul(M, N, K)(GL, GL, GL)(Kernel)
# ...         .tile(rows, columns).to(Block).tile(1, 1).to(Thread)
# ...         .accumulate_in(RF, Init.done, Move.done)
# ...         .split(k).move(A, RF, Move.tile(1, 1).unroll.done).move(B, RF, Move.tile(1, 1).unroll.done)
# ...         .tile(1, 1).unroll.done)
# >>> variants = explore(make, rows=[16, 64], columns=[16], k=[1, 3])
# >>> print(len(variants), variants[3])
# 4 rows=64 columns=16 k=3
#
# ``variants(a, b)`` tries them: on a GPU that gives an `Explored` with times, in the emulator one without.

MOST = 4096                            # variants of an exploration


class Variants(Sequence[Variant]):
    """The schedules that ``make`` returns for all combinations of ``choices``; called with matrices, they are tried.

    A combination for which ``make`` raises ValueError (of which ScheduleError is one) is listed with its reason. Any other
    exception is a fault of ``make``'s, and is not caught.

    Raises TypeError where ``make`` does not take the parameters, or returns no finished schedule; ValueError for a parameter
    without values, or more than `MOST` combinations.
    """

    def __init__(self, make: Callable[..., Any], choices: dict[str, Iterable[Any]]):
        if not callable(make):
            raise TypeError(f"explore({make!r}): give a function of parameters that returns a schedule")
        name = getattr(make, "__name__", "the function")
        values = {parameter: _values(parameter, given) for parameter, given in choices.items()}
        if not values:
            raise ValueError(f"explore({name}): give the values of its parameters, for example tiles=[(64, 64), (128, 64)]")
        try:
            inspect.signature(make).bind(**dict.fromkeys(values))
        except TypeError as error:
            raise TypeError(f"explore: {name}{inspect.signature(make)} cannot be called with {', '.join(values)}: "
                            f"{error}") from None
        if (count := math.prod(map(len, values.values()))) > MOST:
            raise ValueError(f"explore: {count} combinations of {', '.join(values)}; {MOST} at most, give fewer values")
        self._rows = [self._made(make, name, dict(zip(values, one))) for one in itertools.product(*values.values())]

    @staticmethod
    def _made(make: Callable[..., Any], name: str, parameters: dict[str, Any]) -> Variant:
        row = Variant(parameters)
        try:
            schedule = make(**parameters)
        except ValueError as error:
            return row.refused(error)
        if getattr(schedule, "kind", None) != "MatMul" or not callable(schedule):              # a finished one can be called
            raise TypeError(f"explore: {name}({row}) returns {schedule!r}; a schedule of a MatMul that ends with .done is "
                            "needed")
        return replace(row, schedule=schedule)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        return self._rows[number]

    def __call__(self, a: object, b: object, out: object = None, *, budget: float = 300.0, jobs: int | None = None,
                 progress: bool | None = None) -> Explored:
        """Try them on ``a @ b``.

        Each is compiled in a process of its own, ``jobs`` at a time. Arrays of a GPU: one process more, which has a context
        of its own and copies of the matrices, runs each into memory of NaN; the result is compared with float64, and timed
        in turns with `gemmkit.matmul`. A variant that faults or hangs takes nothing with it. NumPy arrays, within ``with
        gemmkit.emulate():``: each is compiled for an H100 and emulated on small operands of the same kind; there are no
        times.

        Args:
            a, b, out: as a schedule takes them; ``out`` says what C is, and is not written.
            budget: seconds, of which compiling may take half; variants that are not reached are listed so.
            jobs: variants that are compiled at a time; None for one a processor.
            progress: whether it is shown on standard error; None where that is a terminal.

        Raises ValueError and TypeError for matrices that do not fit each other, or another budget; RuntimeError where
        `gemmkit.matmul` itself does not run.
        """
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < math.inf:
            raise ValueError(f"budget={budget!r}: a number of seconds above 0 is needed")
        if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1):
            raise ValueError(f"jobs={jobs!r}: a number of processes, 1 or more, or None is needed")
        return explored(self._rows, a, b, out, float(budget), jobs, progress)


def _values(name: str, given: object) -> list[Any]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError(f"explore: {name}={given!r}: give a list of values, for example {name}=[{given!r}]")
    values = list(given)
    if not values:
        raise ValueError(f"explore: {name}=[]: give at least one value")
    return values
