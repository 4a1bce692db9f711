"""What may come of a drawn program: the float64 interpretation's numbers, or an error of gemmkit's that names a line of the program."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import math
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import gemmkit as gk
from gemmkit.runtime.device import H100, assumed
from tests.drawn_programs.grammar import Case, drawn
from tests.drawn_programs.numbers import Bounded, Unbound, computed
from tests.drawn_programs.pieces import cut_points, table_of
from tests.drawn_programs.syntax import Array, Loop, printed, statements
from tests.ptx_machine.launch import Ptx
from tests.support.jobs import limited
from tests.support.machines import MACHINES
from tests.verifier import Unsound, verify

__all__ = ["LIMIT", "Judged", "Outcome", "arrays_of", "fails_so", "judge_number", "judged", "script"]

ROOT = os.path.dirname(os.path.abspath(gk.__file__)) + os.sep
POISON = 7.75                          # of results before a program runs: what it does not store stays so
LIMIT = 120                            # seconds of the processor
A100 = replace(H100, name="an A100", arch=(8, 0), sm_count=108, shared_memory_per_block=166912, shared_memory_per_sm=167936)
ERRORS = ValueError, TypeError         # ConfigError is a ValueError
#: Of what float32 may lose in ways that no bound of an operation has: what is flushed, and rows whose weights were rounded in another order.
SLACK = 2.0 ** -18
WEAK = 0.1                             # a bound of more than this, of the largest element, shows little


@dataclass
class Outcome:
    """``kind``: right, refused, or fault. ``cause`` is the same for faults of one kind, ``text`` says all. ``weak``: the part of the
    results of which the bounds say little."""

    kind: str
    cause: str = ""
    text: str = ""
    weak: float = 0.0
    said: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind == "fault"


# -- arguments --------------------------------------------------------------------------------------------------------------


def filled(seed, shape, dtype, style, scale, pitch, put=lambda x: x):   # type: ignore[no-untyped-def]
    """An array of drawn elements, whose rows begin at multiples of ``pitch`` elements; of 0 it lies by columns, of -2 every other element
    is another's."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(shape)
    if style == "growing" and len(shape) > 1:
        normal = normal * np.linspace(0.1, 4.0, shape[-2])[:, None] if shape[-2] else normal
    values = {"normal": normal, "growing": normal, "held": normal, "positive": 0.25 + rng.random(shape), "whole": rng.integers(-1, 2, shape) / scale,
              "places": rng.integers(0, 100, shape) / scale, "lengths": rng.choice([0, -3, 1, 7, 20, 33, 64, 100, 400], shape) / scale,
              "result": np.full(shape, 7.75) / scale}[style] * scale
    if pitch == 0 and len(shape) > 1:
        return put(np.ascontiguousarray(values.swapaxes(-1, -2)).astype(dtype)).swapaxes(-1, -2)
    step = 2 if pitch == -2 else 1
    wide = np.zeros((*shape[:-1], step * shape[-1] + -shape[-1] % max(1, pitch)), dtype)
    wide[..., :step * shape[-1]:step] = values
    return put(wide)[..., :step * shape[-1]:step]


def arrays_of(case: Case, put: Callable[[np.ndarray], Any] = lambda x: x) -> dict[str, Any]:
    """The arguments; ``put`` brings them where they are computed with."""
    return {x.name: put(_offsets_of(case, x)).repeat(x.pitch)[::x.pitch] if x.role == "offsets" else put(_offsets_of(case, x)) if x.role == "table"
            else filled(*(*_drawn_by(case, x), put)) for x in case.source.arrays}


def _offsets_of(case: Case, x: Array) -> np.ndarray:
    """Or a table of pages."""
    rng = np.random.default_rng((case.seed, sum(map(ord, x.name))))
    if x.role == "table":
        return table_of(rng, tuple(case.sizes[dim] for dim in x.dims), case.sizes[x.cuts]).astype(x.dtype)
    return cut_points(rng, case.sizes[x.dims[0]], case.sizes[x.cuts], x.style).astype(x.dtype)


def _drawn_by(case: Case, x: Array) -> tuple[Any, ...]:
    dtype = ml_dtypes.bfloat16 if x.dtype == "bfloat16" else np.dtype(x.dtype)
    shape = tuple(case.sizes[dim] for dim in x.dims)
    return (case.seed, sum(map(ord, x.name))), shape, dtype, "result" if x.role == "result" and x.style != "held" else x.style, x.scale, x.pitch


def script(case: Case, outcome: Outcome | None = None) -> str:
    """The case as a program of its own."""
    lines = ["import ml_dtypes", *printed(case.source).splitlines(), "", "", *_unannotated(filled), ""]
    for x in case.source.arrays:
        if x.role in ("offsets", "table"):
            step = "" if x.pitch == 1 or x.role == "table" else f".repeat({x.pitch})[::{x.pitch}]"
            lines.append(f"{x.name} = np.array({_offsets_of(case, x).tolist()}, np.{x.dtype}){step}")
            continue
        seed, shape, _, style, scale, pitch = _drawn_by(case, x)
        dtype = "ml_dtypes.bfloat16" if x.dtype == "bfloat16" else f"np.{x.dtype}"
        lines.append(f"{x.name} = filled({seed}, {shape}, {dtype}, {style!r}, {x.scale}, {pitch})")
    arrays = ", ".join(f"{x.name}={x.name}" for x in case.source.arrays)
    given, told = ("".join(f", {name}={value!r}" for name, value in x.items()) for x in (case.source.numbers, case.source.told or case.source.numbers))
    mapping = "" if case.mapping is None else f", mapping=gk.{case.mapping!r}"
    if case.how == "call" and case.machine == "emulator":
        lines += ["with gk.emulate():", f"    drawn({arrays}{given}{mapping})"]
    elif case.machine == "ptx":
        lines += ["from gemmkit.runtime.device import assumed", "from tests.drawn_programs.judge import A100",
                  "from tests.ptx_machine.launch import Ptx", "with assumed(A100), Ptx().session():",
                  f"    drawn.plan({arrays}{told}{mapping}).run(dict({arrays}{given}))"]
    else:
        lines += [f"plan = drawn.plan({arrays}{told}{mapping})", "with gk.emulate():", f"    plan.run(dict({arrays}{given}))"]
    results = [x.name for x in case.source.arrays if x.role == "result"]
    lines += [f"exact = drawn.reference({arrays}{given})",
              f"for d, x in zip(({', '.join(results)},), exact if isinstance(exact, tuple) else (exact,)):",
              "    print(np.nanmax(np.abs(d.astype(float) - x), initial=0.0), 'off by', np.nanmax(np.abs(x), initial=0.0), 'at most;',",
              "          np.isnan(d.astype(float)).sum(), 'NaN of', np.isnan(x).sum())"]
    said = [] if outcome is None else [f"# {line}" for line in outcome.text.splitlines()[:14]]
    return "\n".join([*said, *lines]) + "\n"


def _unannotated(function: Callable[..., Any]) -> list[str]:
    return [re.sub(r" +# type: ignore.*", "", line) for line in inspect.getsource(function).rstrip().splitlines()]


# -- judgement --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _module(case: Case) -> Iterator[tuple[str, int, Any]]:
    """The program, from source that tracebacks can show; with its file's name and its number of lines."""
    text = printed(case.source)
    name = f"<drawn {case.seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    try:
        held: dict[str, Any] = {"__name__": "drawn"}
        exec(compile(text, name, "exec"), held)
        yield name, len(text.splitlines()), held["drawn"]
    finally:
        linecache.cache.pop(name, None)


def judged(case: Case, machine: Any = None, tamper: Callable[[dict[str, np.ndarray]], None] | None = None,
           interpreted: Callable[..., dict[str, Bounded]] = computed) -> Outcome:
    """Run a case. ``machine``: a GPU's in place of the emulator; ``tamper`` changes results before they are looked at, and
    ``interpreted`` is what they are compared with, for tests of the judge."""
    with warnings.catch_warnings(), _module(case) as (name, lines, program), limited(LIMIT):
        warnings.simplefilter("ignore")
        return _judged(case, machine or MACHINES["emulator"], name, lines, program, tamper, interpreted)


def _judged(case: Case, machine: Any, name: str, lines: int, program: Any, tamper: Any, interpreted: Any) -> Outcome:
    arrays, source = arrays_of(case), case.source
    given = arrays if machine.emulated else arrays_of(case, machine.array)
    captured = program.function.__globals__
    if not machine.emulated and "TABLE" in captured:   # of a function that the program calls
        captured["TABLE"] = machine.array(captured["TABLE"])
    blocks: dict[str, int] = {}
    stage = "plan"
    try:
        with assumed(A100) if case.machine == "ptx" else contextlib.nullcontext():
            plan = program.plan(**given, **(source.told or source.numbers), mapping=case.mapping)
            blocks = dict(plan.mapping.blocks)
            verify(plan)
            stage = "run"
            with Ptx().session() if case.machine == "ptx" else machine.session():
                if case.how == "call" and case.machine != "ptx":
                    program(**given, **source.numbers, mapping=case.mapping)
                else:
                    plan.run({**given, **source.numbers})
    except (KeyboardInterrupt, GeneratorExit, MemoryError):
        raise
    except Unsound as error:
        return Outcome("fault", f"verifier: {_first_words(error)}", _shown(error))
    except BaseException as error:
        if stage == "run" and source.told is not None and isinstance(error, ValueError) and _named(error, case) is not None:
            return Outcome("refused", said=_first_words(error))                 # a plan's numbers may be its own
        fault = _refusal(error, name, lines, case)
        if fault is not None:
            return Outcome("fault", f"{stage}: {fault}", f"{fault}\n{_shown(error)}")
        if stage == "run":
            return Outcome("fault", f"a plan is made, and refused when it runs: {_first_words(error)}", _shown(error))
        return _of_reference(case, program, arrays, name, lines, error, interpreted) if not case.slip else Outcome("refused", said=_first_words(error))
    if case.slip:
        return Outcome("fault", f"a slip is accepted: {case.slip}", f"a slip is accepted: {case.slip}")
    found = {x.name: np.array(machine.numpy(given[x.name])) for x in source.arrays if x.role == "result"}
    if tamper is not None:
        tamper(found)
    before = _held(case)
    arrays |= before                                   # what results have had
    wanted = interpreted(source, case.sizes, arrays, blocks)
    said, weak = _compared(found, wanted, before)
    if said:
        return Outcome("fault", f"wrong numbers ({case.machine})", f"{said}\nmapping {plan.mapping!r}", weak)
    if case.seed % 4 == 0 and not any(x.size == 0 for x in arrays.values()):
        outcome = _of_reference(case, program, arrays, name, lines, None, interpreted, blocks)
        if outcome.is_fault:
            return outcome
    return Outcome("right", weak=weak)


def _of_reference(case: Case, program: Any, arrays: dict[str, np.ndarray], name: str, lines: int, refused: BaseException | None, interpreted: Any,
                  blocks: dict[str, int] | None = None) -> Outcome:
    """What `Program.reference` says of a program, that has a kernel or has none."""
    block = next((size for index, size in (blocks or {}).items() if index in "njk" and not (index == "n" and case_form(case) == "tile")), 37)
    try:
        exact = program.reference(**arrays, **case.source.numbers, block=block)
    except (KeyboardInterrupt, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        fault = _refusal(error, name, lines, case)
        if fault is None and refused is None:
            fault = f"a program with a kernel has no reference: {_first_words(error)}"
        if fault is not None:
            return Outcome("fault", f"reference: {fault}", f"{fault}\n{_shown(error)}")
        return Outcome("refused", said=_first_words(refused or error))
    names = [x.name for x in case.source.arrays if x.role == "result"]
    found = dict(zip(names, exact if isinstance(exact, tuple) else (exact,)))
    wanted = interpreted(case.source, case.sizes, arrays, dict.fromkeys("njk", block))
    said, weak = _compared(found, wanted, {**dict.fromkeys(found, math.nan), **_held(case)})
    if said:
        return Outcome("fault", "reference: wrong numbers", f"the reference is otherwise than the interpretation: {said}", weak)
    return Outcome("refused", said=_first_words(refused)) if refused is not None else Outcome("right", weak=weak)


def case_form(case: Case) -> str:
    return next(x for x in ("tile", "chain", "rows") if x in case.tags)


def _held(case: Case) -> dict[str, np.ndarray]:
    """What results have that are read before they are stored."""
    return {x.name: np.array(filled(*_drawn_by(case, x))) for x in case.source.arrays if x.role == "result" and x.style == "held"}


def _compared(found: dict[str, np.ndarray], wanted: dict[str, Bounded], before: Mapping[str, Any]) -> tuple[str, float]:
    """What is wrong, and the part of elements of which little is known. ``before``: what elements are that nothing is stored in."""
    weak = total = 0
    for name, bound in wanted.items():
        got, exact, kept = found[name].astype(float), np.where(bound.error < 0, before.get(name, POISON), bound.value), bound.error < 0
        finite = np.isfinite(exact) & ~kept
        largest = float(np.abs(exact[finite]).max(initial=0.0))
        most = bound.error + SLACK * largest
        with np.errstate(all="ignore"):
            bad = np.where(finite, ~(np.abs(got - exact) <= most), ~((got == exact) | (np.isnan(got) & np.isnan(exact)) | np.isinf(bound.error)))
            bad &= ~np.isinf(bound.error)
        total += exact.size
        weak += int((finite & ~(most <= WEAK * max(largest, 1e-3))).sum())
        if bad.any():
            at = tuple(int(x) for x in np.argwhere(bad)[0])
            return (f"{name}{list(at)} is {got[at]:.7g}, and {exact[at]:.7g} to {most[at]:.2g} is right; so are {int(bad.sum())} of "
                    f"{bad.size} elements, {int(np.isnan(got[bad]).sum())} of them NaN"), weak / max(1, total)
    return "", weak / max(1, total)


def _named(error: BaseException, case: Case) -> str | None:
    """Which argument, cell or index, or what of the mapping, the text of an error names. What a mapping leaves open must fit."""
    known = [getattr(x, "name", "") for x in statements(case.source.loop)] + [o.index for x in statements(case.source.loop) if isinstance(x, Loop)
                                                                              for o in x.over]
    said = [] if case.mapping is None else ["stages", "blocks", "warpgroups"]
    words = {*case.source.names, *filter(None, known), "Mapping", *said}
    found = re.search(rf"(?<![A-Za-z0-9_])({'|'.join(map(re.escape, sorted(words)))})(?![A-Za-z0-9_])", str(error))
    return found[0] if found else None


def _refusal(error: BaseException, name: str, lines: int, case: Case) -> str | None:
    """What is wrong with an error as a refusal; None if it is one."""
    kind = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f"{os.path.relpath(x.filename, ROOT)}:{x.name}" for x in reversed(frames) if x.filename.startswith(ROOT)), "Python")
    if not isinstance(error, ERRORS) or type(error).__module__.startswith("gemmkit.emulator"):
        return f"{kind} at {where}: {_first_words(error)}"
    last = frames[-1]
    if not last.filename.startswith(ROOT) or last.lineno not in _raises(last.filename):
        return f"{kind} that gemmkit does not raise, at {where}: {_first_words(error)}"
    at = re.search(rf"{re.escape(name)}:(\d+)", str(error))
    if at is not None and 1 <= int(at[1]) <= lines:
        return None
    if _named(error, case) is not None:
        return None
    return f"{kind} that names no line and no argument, at {where}: {_first_words(error)}"


@functools.cache
def _raises(filename: str) -> frozenset[int]:
    """The lines of a file that belong to raise statements."""
    tree = ast.parse("".join(linecache.getlines(filename)))
    return frozenset(line for node in ast.walk(tree) if isinstance(node, ast.Raise)
                     for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _first_words(error: BaseException) -> str:
    """An error's first line without names and numbers."""
    text = re.sub(r"<drawn \d+>:\d+", "", str(error).strip().splitlines()[0] if str(error).strip() else "")
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\{[^}]*\}|\[[^\]]*\]", "...", text)
    text = re.sub(r"0x[0-9a-f]+|-?\d+(\.\d+)?", "0", text)
    return f"{type(error).__name__} {' '.join(text.split()[:11])}"


def _shown(error: BaseException) -> str:
    frames = [x for x in traceback.extract_tb(error.__traceback__) if "drawn_programs" not in x.filename]
    return "\n".join([f"{type(error).__name__}: {error}"[:1500], *(f"  {os.path.relpath(x.filename, ROOT) if x.filename[0] == '/' else x.filename}"
                                                                     f":{x.lineno} {x.name}" for x in frames[-6:])])


# -- cases by their numbers --------------------------------------------------------------------------------------------------


class Judged(NamedTuple):
    number: int
    case: Case
    outcome: Outcome
    seconds: float


def judge_number(seed: int, number: int) -> Judged:
    began = time.process_time()
    case = drawn(seed, number)
    return Judged(number, case, judged(case), time.process_time() - began)


def fails_so(cause: str, case: Case) -> bool:
    """Whether a case fails by this cause. What was shrunk too far has no numbers, and does not."""
    try:
        return judged(case).cause == cause
    except (Unbound, KeyError, AttributeError, ValueError, IndexError):
        return False
