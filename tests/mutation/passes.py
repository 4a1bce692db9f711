"""Faults in the passes of `gemmkit.programs`, and what finds them: ``python -m tests.mutation --passes [--sample N] [--module NAME]``.

A pass is Python on the host, so its faults are wrong kernels and not wrong threads: a line of a text is left out, a wait comes
behind a release, an offset is another block's. Each statement, comparison, constant, argument and piece of a text in a function of
a pass is a candidate.

A mutant derives the cases that run its line. What it makes of them is compared with what the sound passes make:

| verdict | what |
|---|---|
| refused, accepted | a program that has a kernel has none, or the other way round |
| verifier | `tests.verifier` says what is wrong with the plan |
| tests | no case shows it, and tests of what the pass refuses and proves fail |
| emulator, wrong result | the emulator says so, or the results are not those of the float64 reference |
| another choice | the plan is another mapping's, and the sound passes derive the same text from that mapping: slower, or faster |
| another name | the text is the same but for names, comments, and the order of imports and functions |
| unchanged | every case derives what it did |
| survived | the text is another, and everything is right: an equal text (`EQUAL` says why), or a gap |
"""

from __future__ import annotations

import ast
import contextlib
import copy
import itertools
import os
import pickle
import random
import re
import resource
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest

import gemmkit
import gemmkit as gk
from gemmkit.programs.calls import forget_all
from gemmkit.runtime.device import H100, assumed
from tests.drawn_programs import judge
from tests.drawn_programs.grammar import drawn
from tests.drawn_programs.judge import A100, _module, arrays_of
from tests.mutation import derived, seeding
from tests.mutation.operators import OTHERS, Place, label_of, name_of, statement_dropped
from tests.mutation.running import in_processes
from tests.support import chains, large_scores, row_programs
from tests.support import programs as listing
from tests.verifier import Unsound, verify

ROOT = Path(gemmkit.__file__).parent / "programs"
PASSES = ("trace", "values", "places", "text", "rows", "multistage", "plan", "launches", "mapping", "chains/chain", "chains/algebra",
          "chains/monoids", "chains/merging", "chains/elements", "chains/schedule", "chains/text")
#: Code of `multistage` that runs on the device, where `tests.mutation.seeding` seeds its faults.
ON_DEVICE = frozenset({"CopyRing", "CopiedTile", "Multiplied", "MmaProduct", "HandedMmaProduct", "one_step", "left_of_part", "next_columns", "multiplied",
                       "of_part", "handed_step"})
DERIVED, VERIFIED, EMULATED = 14, 4, 2         # cases that a mutant derives, and of those that it changes, that are looked at
SECONDS = 60                           # of CPU, that a mutant may take,
DERIVING = 5                           # of these until its plans are made and verified: sound passes take up to 0.07 a case to make them
BAR = 0.95


# -- candidates ---------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Seed:
    """``operator`` at the ``number``-th place of a function where it finds something."""

    module: str
    function: str
    operator: str
    number: int
    line: int
    end: int
    before: str

    def __str__(self) -> str:
        return f"{self.module}.{self.function}:{self.line} {self.operator}: {self.before}"


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name not in ON_DEVICE:
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and node.name not in ON_DEVICE:
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name not in ("__repr__", "__str__", "__hash__", "__reduce__"):
                    yield f"{node.name}.{member.name}", member


def places_in(function: ast.FunctionDef) -> Iterator[Place]:
    """All places of a function and of those within it, but for messages of errors, docstrings and annotations."""
    first = int(isinstance(function.body[0], ast.Expr) and isinstance(function.body[0].value, ast.Constant))
    for at in range(first, len(function.body)):
        yield from _below(function, function, "body", at, function.body[at], function.body[at])


def _below(function: ast.FunctionDef, parent: ast.AST, field: str, at: int | None, node: Any, statement: ast.stmt) -> Iterator[Place]:
    if isinstance(node, (ast.Assert, ast.arguments, ast.Global, ast.Nonlocal)):
        return
    statement = node if isinstance(node, ast.stmt) else statement
    yield Place(function, parent, field, at, node, statement)
    if isinstance(node, ast.Raise):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "ctx", "op", "ops", "targets", "target", "decorator_list"):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        for n, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST):
                yield from _below(function, node, name, n if isinstance(value, list) else None, child, statement)


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 3)


def line_dropped(place: Place) -> Iterator[ast.AST]:
    """A line of a text, or a step in a list of them."""
    node, field = place.node, "args" if isinstance(place.node, ast.Call) else "elts"
    values = getattr(node, field, [])
    if isinstance(node, (ast.List, ast.Tuple)) or (isinstance(node, ast.Call) and name_of(node) == "put"):
        for n, value in enumerate(values):
            if len(values) > 1 and (_is_text(value) or isinstance(value, ast.Starred) or (isinstance(value, ast.Call) and isinstance(node, ast.Tuple))):
                changed = copy.copy(node)
                setattr(changed, field, [*values[:n], *values[n + 1:]])
                yield changed


def lines_swapped(place: Place) -> Iterator[ast.AST]:
    node, field = place.node, "args" if isinstance(place.node, ast.Call) else "elts"
    values = getattr(node, field, [])
    if isinstance(node, ast.List) or (isinstance(node, ast.Call) and name_of(node) == "put"):
        for n in range(len(values) - 1):
            if _is_text(values[n]) and _is_text(values[n + 1]):
                changed = copy.copy(node)
                setattr(changed, field, [*values[:n], values[n + 1], values[n], *values[n + 2:]])
                yield changed


def holes_swapped(place: Place) -> Iterator[ast.AST]:
    """Two things that a piece of text names, one after the other."""
    if isinstance(place.node, ast.JoinedStr):
        holes = [n for n, value in enumerate(place.node.values) if isinstance(value, ast.FormattedValue)]
        for one, other in itertools.pairwise(holes):
            values = list(place.node.values)
            if ast.dump(values[one]) != ast.dump(values[other]):
                values[one], values[other] = values[other], values[one]
                yield ast.JoinedStr(values)


WORDS = {" < ": " <= ", " >= ": " > ", " <= ": " < ", " > ": " >= ", " + ": " - ", " - ": " + ", "min(": "max(", "max(": "min(",
         " and ": " or ", "_part": "", " * ": " + ", "column": "row", "row": "column", "before": "slot", "zero + 1": "zero", "True": "False"}


def word_changed(place: Place) -> Iterator[ast.AST]:
    """A sign or a word of a piece of text; a number in it."""
    node = place.node
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and not isinstance(place.parent, (ast.Expr, ast.Dict)):
        for old, new in WORDS.items():
            if old in node.value:
                yield ast.Constant(node.value.replace(old, new, 1))
        if number := re.search(r"(?<![\w.])\d+", node.value):
            yield ast.Constant(f"{node.value[:number.start()]}{int(number[0]) + 1}{node.value[number.end():]}")


SIBLINGS = [{"a", "b"}, {"begins", "ends"}, {"rows", "columns"}, {"row_starts", "column_starts"}, {"inside", "out"}, {"inside", "after"},
            {"out", "after"}, {"before", "after"}, {"offsets", "barriers"}, {"stages", "barriers"}, {"rows", "index"}, {"m", "n"}, {"one", "other"},
            {"body", "end"}, {"stage_bytes", "filled"}, {"carried", "stores"}, {"lines", "columns"}, {"slope", "shift"}, {"row_sums", "column_sums"},
            {"over", "flying"}, {"blocks", "stages"}, {"a_transposed", "b_transposed"}, {"many", "few"}]


def field_changed(place: Place) -> Iterator[ast.AST]:
    """A field in place of one like it."""
    if isinstance(place.node, ast.Attribute):
        for pair in SIBLINGS:
            if place.node.attr in pair:
                (other,) = pair - {place.node.attr}
                yield ast.Attribute(place.node.value, other, place.node.ctx)


def names_swapped(place: Place) -> Iterator[ast.AST]:
    """Two names that follow each other in a call or a tuple."""
    node = place.node
    field = "args" if isinstance(node, ast.Call) else "elts"
    values = getattr(node, field, [])
    if isinstance(node, ast.Tuple) or (isinstance(node, ast.Call) and name_of(node) not in ("min", "max", "isinstance", "refused", "expect")):
        for n in range(len(values) - 1):
            one, other = values[n:n + 2]
            if label_of(one) and label_of(other) and label_of(one) != label_of(other):
                changed = copy.copy(node)
                setattr(changed, field, [*values[:n], other, one, *values[n + 2:]])
                yield changed


def keyword_dropped(place: Place) -> Iterator[ast.AST]:
    if isinstance(place.node, ast.Call):
        for n, _ in enumerate(place.node.keywords):
            yield ast.Call(place.node.func, place.node.args, [*place.node.keywords[:n], *place.node.keywords[n + 1:]])


def filter_dropped(place: Place) -> Iterator[ast.AST]:
    """What a comprehension leaves out."""
    if isinstance(place.node, ast.comprehension) and place.node.ifs:
        yield ast.comprehension(place.node.target, place.node.iter, [], 0)


def side_taken(place: Place) -> Iterator[ast.AST]:
    """One side of a choice, whatever it is asked."""
    if isinstance(place.node, ast.IfExp):
        yield place.node.body
        yield place.node.orelse


def refusal_dropped(place: Place) -> Iterator[ast.AST]:
    if isinstance(place.node, ast.Raise) and place.node.exc is not None:
        yield ast.Pass()


def order_reversed(place: Place) -> Iterator[ast.AST]:
    """What is gone through, from the end."""
    if isinstance(place.node, ast.For) and not isinstance(place.node.iter, ast.Constant):
        changed = copy.copy(place.node)
        changed.iter = ast.parse(f"list({ast.unparse(place.node.iter)})[::-1]", mode="eval").body
        yield changed


OPERATORS: dict[str, Callable[[Place], Iterator[ast.AST]]] = {
    "statement dropped": statement_dropped, "line dropped": line_dropped, "lines swapped": lines_swapped, "holes swapped": holes_swapped,
    "word changed": word_changed, "field changed": field_changed, "names swapped": names_swapped, "keyword dropped": keyword_dropped,
    "filter dropped": filter_dropped, "side taken": side_taken, "refusal dropped": refusal_dropped, "order reversed": order_reversed,
    **{name: OTHERS[name] for name in ("always", "never", "half a condition", "bound shifted", "update dropped", "limit dropped", "term dropped",
                                       "sign changed", "constant changed", "flag changed")}}


def path_of(module: str) -> Path:
    return ROOT / f"{module}.py"


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


def _found(function: ast.FunctionDef, operator: str) -> Iterator[tuple[Place, ast.AST]]:
    for place in places_in(function):
        for node in OPERATORS[operator](place):
            yield place, node


@cache
def seeds(module: str) -> tuple[Seed, ...]:
    """All candidates of a pass."""
    return tuple(Seed(module, name, operator, n, *_lines(place.statement), ast.unparse(place.statement).split("\n")[0][:120])
                 for name, function in functions(tree_of(module)) for operator in OPERATORS
                 for n, (place, _) in enumerate(_found(function, operator)))


def _lines(statement: ast.stmt) -> tuple[int, int]:
    """Of a statement, without what is within it."""
    body = getattr(statement, "body", None)
    return statement.lineno, max(statement.lineno, body[0].lineno - 1) if isinstance(body, list) else statement.end_lineno or statement.lineno


def after_of(seed: Seed) -> str:
    """The statement as it is with the fault."""
    function = copy.deepcopy(dict(functions(tree_of(seed.module)))[seed.function])
    place, node = list(_found(function, seed.operator))[seed.number]
    place.put(node)
    return _shown(place, node)


def _shown(place: Place, node: ast.AST) -> str:
    return " ".join(ast.unparse(node if isinstance(node, ast.stmt) else place.statement).split())


def put_in(seed: Seed) -> str:
    """Puts the fault into this process, for good; returns the statement as it then is."""
    tree = tree_of(seed.module)
    function = dict(functions(tree))[seed.function]
    place, node = list(_found(function, seed.operator))[seed.number]
    place.put(node)
    for inner in ast.walk(function):
        if hasattr(inner, "body") and isinstance(inner.body, list) and not inner.body:
            inner.body = [ast.Pass()]
    ast.fix_missing_locations(tree)
    lines = {function.lineno} | {d.lineno for d in function.decorator_list}
    seeding._replace(f"gemmkit.programs.{seed.module.replace('/', '.')}", compile(tree, str(path_of(seed.module)), "exec"), lines)
    return _shown(place, node)[:300]


# -- cases --------------------------------------------------------------------------------------------------------------------

class Fact(NamedTuple):
    """What a case derives: an ``error``, or a ``print`` of all that a launch needs."""

    error: str
    print: Any


@dataclass
class Case:
    """``lines`` of passes that deriving it runs; ``wanted``: its results by the sound reference; ``seconds`` of CPU that computing them
    takes."""

    name: str
    fact: Fact
    lines: frozenset[tuple[str, int]] = frozenset()
    wanted: Any = None
    seconds: float = 0.0


SEED, DRAWN = 1, 200                   # of drawn programs (tests/drawn_programs), and how many
SLOW = frozenset({195})                # those that take long to emulate
ONE, TWO = (replace(H100, sm_count=count) for count in (1, 2))         # blocks go on from tile to tile


def _by_copies(drawn_case: Callable[[int], Any]) -> Callable[[int], Any]:
    """The same on kernels by cp.async."""
    def made(seed: int) -> Any:
        program, arrays, mapping, more = drawn_case(seed)
        mapping = listing.multistage(mapping)
        return program, arrays, listing.doubled(mapping) if drawn_case is listing.drawn_case and seed % 2 else mapping, more

    return made


def _large(seed: int) -> Any:
    case = large_scores.drawn(seed)
    return case.program, case.arrays, case.mapping, case.components


def _windows(seed: int) -> Any:
    """Attention whose rows see some of the places."""
    rng = np.random.default_rng(seed)
    visible = (chains.causal, chains.window, chains.between, chains.stretched, chains.odd)[seed % 5]
    arrays = [chains.half(rng, 2, 70, 64), chains.half(rng, 2, 150, 64), chains.half(rng, 2, 150, 64), chains.empty(2, 70, 64)]
    mapping = gk.Mapping({"n": (32, 48)[seed % 2]}, warpgroups=1, descending=(None, False, None)[seed % 3], ahead=(None, False)[seed // 5 % 2])
    return listing.attention, arrays, listing.multistage(mapping) if seed % 7 == 3 else mapping, dict(scale=0.125, visible=visible)


def _rows(seed: int) -> Any:
    program, arrays, more = row_programs.drawn_rows(seed)
    return program, arrays, gk.Mapping(), more


#: Programs of the tests with drawn mappings and sizes, and how many of each.
LISTED: dict[str, tuple[Callable[[int], Any], int]] = {
    "grid": (listing.drawn_case, 12), "chains": (chains.drawn_case, 12), "lengths": (chains.drawn_lengths, 6), "shares": (chains.drawn_shares, 8),
    "lazy": (chains.drawn_lazy, 5), "clusters": (chains.drawn_clusters, 5), "rows": (_rows, 10), "copied grid": (_by_copies(listing.drawn_case), 6),
    "copied chains": (_by_copies(chains.drawn_case), 6), "large": (_large, 12),
    "windows": (_windows, 10)}


def names_of_cases() -> list[str]:
    return [*(f"text/{name}" for name in derived.TEXTS), *(f"{kind}/{n}" for kind, (_, count) in LISTED.items() for n in range(count)),
            *(f"drawn/{n}" for n in range(DRAWN) if n not in SLOW)]


def given(name: str) -> tuple[Any, list[np.ndarray], Any, dict[str, Any], Any]:
    """A case that is listed: its program, arrays, mapping, components and device."""
    kind, _, rest = name.partition("/")
    if kind == "text":
        program, runs, mapping, components = derived.TEXTS[rest]
        return program, [np.copy(x) for x in runs[0]], mapping, components, assumed(ONE)
    return *LISTED[kind][0](int(rest)), assumed(TWO if int(rest) % 2 else ONE)         # type: ignore[return-value]


def plan_of(name: str, mapping: Any = None) -> Any:
    """Derive a case anew, or with another mapping."""
    forget_all()
    if not name.startswith("drawn/"):
        program, arrays, own, components, device = given(name)
        with device:
            return program.plan(*arrays, mapping=own if mapping is None else mapping, **components)
    case = drawn(SEED, int(name.removeprefix("drawn/")))
    with _module(case) as (_, _, program), assumed(A100) if case.machine == "ptx" else contextlib.nullcontext():
        return program.plan(**arrays_of(case), **(case.source.told or case.source.numbers), mapping=case.mapping if mapping is None else mapping)


def fact_of(plan: Any) -> Fact:
    def shown(one: Any) -> Any:
        printed = one.printed
        return (one.text, repr(one.mapping), printed.maps, printed.outs, printed.arrays, printed.sizes, printed.tile, printed.scalars, printed.threads,
                printed.operands, sorted(one.extents.items()), one.spare, [(key, info.shape, info.strides, info.pointer if key in one.spare else 0)
                                                                           for key, info in one.infos.items()], one.blocks)

    resizing = plan.resizing
    sizes = resizing.sizes(plan.infos)
    return Fact("", ([shown(one) for one in plan.kernels], str(resizing.form(sizes))))


def derive(name: str) -> tuple[Any, Fact]:
    try:
        plan = plan_of(name)
        return plan, fact_of(plan)
    except Unsound:
        raise
    except Exception as error:
        words = re.sub(r"<drawn \d+>:\d+|0x[0-9a-f]+", "", str(error).split("\n")[0])
        return None, Fact(f"{type(error).__name__}: {words}", None)


class _Emulated:
    """In place of the PTX machine: a mutant's text is another, which would have to be compiled."""

    def session(self) -> Any:
        return gk.emulate()


def compute(case: Case) -> str:
    """What the emulator says of a case, "" where it is right."""
    forget_all()
    if case.name.startswith("drawn/"):
        judge.Ptx = _Emulated          # type: ignore
        outcome = judge.judged(drawn(SEED, int(case.name.removeprefix("drawn/"))))
        return outcome.cause if outcome.is_fault else ""
    program, arrays, mapping, components, device = given(case.name)
    with device:
        plan = program.plan(*arrays, mapping=mapping, **components)
    arguments = program.bound(tuple(arrays), components)
    with gk.emulate(seed=1):
        plan.run(arguments)
    found = [arguments[name] for name in arguments if name in plan.results]
    if case.name.startswith("large/"):
        return "" if large_scores.drawn(int(case.name.removeprefix("large/"))).close(found[0]) else "wrong numbers"
    if len(found) != len(case.wanted):
        return "wrong numbers: other results"
    try:
        chains.check_close(found, case.wanted, lambda got: 2e-2 if components.get("score") else 4e-3 if got.dtype.name != "bfloat16" else 2e-2)
    except AssertionError:
        return "wrong numbers"
    return ""


def known(cases: Iterable[str], jobs: int) -> dict[str, Case]:
    """The cases as the sound passes derive them. Raises RuntimeError for one that cannot be looked at."""
    out = {}
    for name, answer in in_processes(cases, _know, jobs):
        if not isinstance(answer, Case):
            raise RuntimeError(f"{name} needs {answer} s")
        out[name] = answer
    return dict(sorted(out.items()))


def measured(cases: dict[str, Case], jobs: int) -> None:
    """Note what computing takes. Raises RuntimeError for a case that is not right without a fault."""
    def work(name: str) -> tuple[str, float]:
        start = time.process_time()
        wrong = compute(cases[name]) if not cases[name].fact.error else ""
        return wrong, time.process_time() - start

    for name, answer in in_processes(list(cases), work, jobs):
        wrong, cases[name].seconds = answer if isinstance(answer, tuple) else ("does not end", 0.0)
        if wrong:
            raise RuntimeError(f"{name} is not right without a fault: {wrong}")


def _know(name: str) -> Any:
    lines, files = set[tuple[str, int]](), {str(path_of(module)): module for module in PASSES}

    def called(frame: FrameType, event: str, _: Any) -> Any:
        module = files.get(frame.f_code.co_filename)
        if module is None:
            return None

        def ran(frame: FrameType, event: str, _: Any) -> Any:
            lines.add((module, frame.f_lineno))
            return ran

        return ran

    sys.settrace(called)
    plan, fact = derive(name)
    if plan is not None:
        verify(plan)
    sys.settrace(None)
    case = Case(name, fact, frozenset(lines))
    if plan is None:
        return case
    if not name.startswith("drawn/"):
        program, arrays, _, components, _ = given(name)
        wanted = program.reference(*arrays, **components)
        case.wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    return case


# -- mutants ------------------------------------------------------------------------------------------------------------------

class Finding(NamedTuple):
    """``found``: by what, "" of a survivor; ``plan``: of a survivor, the case, its mapping and its text."""

    seed: Seed
    found: str
    message: str
    after: str
    plan: tuple[str, Any, str] | None = None


def run_all(chosen: Iterable[Seed], cases: dict[str, Case], jobs: int, by_tests: bool = True) -> Iterator[Finding]:
    """The findings, as they come. ``by_tests``: what no case shows is judged by tests."""
    def work(seed: Seed) -> Finding:
        _may_take(DERIVING)
        finding = judged(seed, cases)
        _may_take(SECONDS)
        return tested(finding) if by_tests and finding.found in ("unchanged", "not run") else finding

    for seed, answer in in_processes(chosen, work, jobs):
        finding = answer if isinstance(answer, Finding) else Finding(seed, "does not end", "", "")
        yield settled(finding, cases) if finding.plan is not None else finding


def _may_take(seconds: int) -> None:
    """So much of CPU from its beginning on, this process."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def judged(seed: Seed, cases: dict[str, Case]) -> Finding:
    """Of a process of its own."""
    covering = [case for case in cases.values() if any((seed.module, line) in case.lines for line in range(seed.line, seed.end + 1))]
    after = put_in(seed)
    if not covering:
        return Finding(seed, "not run", "", after)
    changed: list[tuple[Case, Any]] = []
    for case in drawn_of(seed, covering):
        try:
            plan, fact = derive(case.name)
        except Unsound as error:
            return Finding(seed, "verifier", str(error), after)
        if fact.error != case.fact.error:
            return Finding(seed, "refused" if fact.error else "accepted", f"{case.name}: {fact.error or case.fact.error}", after)
        if plan is None or fact == case.fact:
            continue
        changed.append((case, plan))
        if len(changed) <= VERIFIED:
            try:
                verify(plan)
            except Exception as error:
                return Finding(seed, "verifier", f"{case.name}: {type(error).__name__} {error}"[:300], after)
    _may_take(SECONDS)
    for case, _ in sorted(changed, key=lambda x: x[0].seconds)[:EMULATED]:
        try:
            wrong = compute(case)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            return Finding(seed, "wrong result" if "wrong numbers" in wrong else "emulator", f"{case.name}: {wrong}"[:300], after)
    if not changed:
        return Finding(seed, "unchanged", "", after)
    case, plan = changed[0]
    return Finding(seed, "", "", after, (case.name, plan.mapping, "\n".join(one.text for one in plan.kernels)))


#: Tests of what a pass refuses and proves, which no case shows.
TESTS = {"trace": ("language", "reference"), "values": ("language", "reference"), "chains/monoids": ("monoids",), "chains/algebra": ("monoids",),
         "chains/merging": ("monoids",), "places": ("language",), "chains/chain": ("language",), "plan": ("language", "plans"), "mapping": ("plans",),
         "launches": ("plans",), "rows": ("row_programs",), "chains/schedule": ("plans",)}


def tested(finding: Finding) -> Finding:
    """What tests say of a mutant that no case shows."""
    names = TESTS.get(finding.seed.module, ())
    if not names:
        return finding
    files = [str(Path(__file__).parent.parent / "programs" / f"test_{name}.py") for name in names]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    failed = pytest.main(["-q", "-x", "-m", "not gpu", "--sample", "-p", "no:cacheprovider", *files])
    return finding._replace(found="tests") if failed else finding


def drawn_of(seed: Seed, covering: list[Case]) -> list[Case]:
    """Cases that differ as much as they can: of each kind one first, and each next one runs most lines that none before has run."""
    left, out, seen = sorted(covering, key=lambda case: (case.seconds, case.name)), [], frozenset[tuple[str, int]]()
    while left and len(out) < DERIVED:
        kinds = {case.name.partition("/")[0] for case in out}
        best = max(left, key=lambda case: (case.name.partition("/")[0] not in kinds, len(case.lines - seen)))
        left.remove(best)
        out.append(best)
        seen |= best.lines
    return out


def settled(finding: Finding, cases: dict[str, Case]) -> Finding:
    """A survivor, by the sound passes: whether they derive its text from its mapping, or its text with other names."""
    assert finding.plan is not None
    name, mapping, text = finding.plan
    sound = cases[name].fact.print[0]
    if plain("\n".join(one[0] for one in sound)) == plain(text):
        return finding._replace(found="another name")
    try:
        plan = plan_of(name, mapping)
        if plain("\n".join(one.text for one in plan.kernels)) == plain(text):
            return finding._replace(found="another choice")
    except Exception as error:
        return finding._replace(message=f"{error}")
    return finding


def plain(text: str) -> str:
    """A text without what is a reader's alone: names in the order in which they come, no comments and docstrings, brackets as few as
    can be, imports and functions in order."""
    tree = ast.parse(text)
    names: dict[str, str] = {}
    imports = sorted(ast.unparse(ast.ImportFrom(node.module, [x], 0)) for node in tree.body if isinstance(node, ast.ImportFrom) for x in node.names)
    own = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)} | {
        x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)} | {x.arg for x in ast.walk(tree) if isinstance(x, ast.arg)}
    functions = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.Module, ast.ClassDef)) and node.body and isinstance(node.body[0], ast.Expr) and isinstance(
                node.body[0].value, ast.Constant):
            node.body = node.body[1:] or [ast.Pass()]
    rest = [x for x in tree.body if not isinstance(x, (ast.Import, ast.ImportFrom, ast.FunctionDef))]
    seen: list[str] = []

    def visit(body: list[Any]) -> str:
        out = []
        for node in body:
            for x in ast.walk(node):
                for field in ("id", "arg", "name"):
                    said = getattr(x, field, None)
                    if isinstance(said, str) and said in own:
                        if said not in names:
                            names[said] = f"_{len(names)}"
                            seen.append(said)
                        setattr(x, field, names[said])
            out.append(ast.unparse(node))
        return "\n".join(out)

    shown = [visit(rest), *[visit([functions[name]]) for name in ("kernel", "tiles", "place") if name in functions]]
    done = {"kernel", "tiles", "place"}
    while (name := next((x for x in seen if x in functions and x not in done), None)) is not None:
        done.add(name)
        shown.append(visit([functions[name]]))
    return "\n".join([*imports, *shown])


# -- the report ---------------------------------------------------------------------------------------------------------------

class Equal(NamedTuple):
    """Survivors of a ``module`` whose statement matches ``pattern`` (as it was, " -> ", as it is), and why their texts are right."""

    module: str
    pattern: str
    reason: str


EQUAL = [
    Equal("chains/monoids", r"^forms, found = \(Forms|forms\.of\(c\.out\) == begin|if x\.dims and self\.chain\.index not in",
          "Less is proved, so that a mask stands where none is needed: slower, the same values."),
    Equal("chains/monoids", r"other\[0\] == 0 or|^found\.add\(c\.inside\) -> found\.add\(c\.out\)", "Less is proved: a maximum is followed, and a mask stands."),
    Equal("chains/algebra", r"^found\.update\(\(\(cell, None\)", "Less is proved, so that a mask stands where none is needed."),
    Equal("chains/chain", r"users\.get\(y, 0\) -> |users\.get\(y, 0\) \+ 1 -> users\[y\] = users\.get\(y, 1\)", "Rounds that only add are waited for in each."),
    Equal("chains/text", r"^tested = x\.args\[1\]|mentions\(x\.args\[1\]", "What is no test is computed in all rounds: slower, the same values."),
    Equal("chains/text", r"^if name in used: -> if True", "Imports that nothing uses."),
    Equal("chains/text", r"^self\.old = .*naming\.of\(c\.after\)", "A cell and what the last round has made of it are the same."),
    Equal("chains/merging", r"in states\[1:\]: -> .*\[::-1\]", "Shares are merged in another order: to rounding."),
    Equal("chains/elements", r"args\[3\].* \* .*args\[4\].* -> .*args\[4\].* \* .*args\[3\]", "A product of two numbers, whose factors may change places."),
    Equal("chains/elements", r"whole=(whole and )?_may_be_whole\(y\)|else self\.of\(y, whole=whole and ", "A whole constant is written 2 and not 2.0, and literals are weak."),
    Equal("rows", r"^(held\.add\(x\) -> pass|places\[x\] \|= )", "A row is computed again where it could be held, or the other way round."),
    Equal("rows", r"^self\.first = self\.first or name", "Any of the rows says where elements are: they lie alike."),
    Equal("rows", r"^for store, root in zip\(program\.stores, roots\): -> .*\[::-1\]", "Results are stored in another order."),
    Equal("rows", r"\[self\.of\(y, True\) for y in x\.args\] if whole", "Places are floats, which are exact up to 2^24."),
    Equal("multistage", r"row_parts == 1 else f', parts=", "A field is said that is the default."),
    Equal("chains/elements", r"^(self\.loop\(|bound = ).*(>= \{free_end\}|> \{self\.first\} and|or \{n\}|<= \{self|> \{n\}_free|<= \{n\}_free|< \{free_end\}|and ' ?$)",
          "A round more is tested, and no round is left out: the loop behind takes those that are left."),
    Equal("chains/chain", r"^chain\.body\.remove\(largest\) -> pass", "The maximum is taken in each round as well, and nothing reads it."),
    Equal("chains/algebra", r"self\.number\(-x\.data\)|^if x\.op == 'neg': -> if False", "A sign is computed in place of being written: the same values."),
    Equal("rows", r"'rowmean', x\.args, like\) if is_mean", "A sum times a constant in place of a mean: to rounding."),
    Equal("rows", r"is_narrow\(x\) and beside is not None", "More is converted to float32, which it is computed in anyway."),
    Equal("rows", r"replaced = any", "A row is held where it could be computed again: registers, and the same values."),
    Equal("chains/schedule", r"reads or x\.op != READ|reads and is_ready", "Loads of columns go earlier or later within their round."),
    Equal("multistage", r"^if any\(\(x\.op == 'load' and len\(x\.dims\) == 2", "A hint: how many blocks a multiprocessor is to have."),
    Equal("multistage", r"RESIDENT|need \+?= ", "A hint: how many blocks a multiprocessor is to have."),
    Equal("chains/text", r"\"\"\"The .* -> ", "A docstring stands before its function."),
    Equal("text", r"^if x not in seen: -> if True", "A value that is used is counted more often, and has a line of its own."),
    Equal("chains/algebra", r"self\.difference\(s, scale.* -> .*self\.difference\(scale, s", "Factors of a product change places."),
    Equal("chains/elements", r"self\.root\.dims\[1\] is not self\.chain", "Bounds of places are computed for each element, and not once a row: slower."),
    Equal("places", r"^if c\.init\.op in \('after', 'const'\): -> ", "A number that a cell begins with is added where the tile ends."),
    Equal("chains/elements", r"^whole = is_whole_number\(x\) and ", "A whole constant is written 2 and not 2.0, and literals are weak."),
    Equal("chains/text", r"asked = self\.rare\.get", "A vote of its own, of the same factors."),
]

#: Of what a mutant makes, that is no fault: nothing, or something as right.
NO_FAULT = "unchanged", "another choice", "another name", "equal", "not run"


def verdict(finding: Finding) -> str:
    if finding.found:
        return finding.found
    return "equal" if reason_of(finding) else "survived"


def reason_of(finding: Finding) -> str | None:
    said = f"{finding.seed.before} -> {finding.after}"
    return next((entry.reason for entry in EQUAL if entry.module == finding.seed.module and re.search(entry.pattern, said)), None)


ONE_IN = 8                             # of the candidates, without `every`


def chosen(sample: int | None, seed: int, only: Iterable[str], every: bool = False) -> list[Seed]:
    """The candidates that are tried; the same in every run, whatever lines they are on."""
    found = [x for module in PASSES for x in seeds(module) if any(text in str(x) for text in only or [""])]
    if sample is None and not only and not every:
        found = [x for x in found if zlib.crc32(f"{x.module}.{x.function} {x.operator} {x.number}".encode()) % ONE_IN == 0]
    if sample is not None:
        found = random.Random(seed).sample(found, min(sample, len(found)))
    return found


def report(only: list[str], jobs: int, sample: int | None = None, seed: int = 0, kept: Path | None = None, every: bool = False) -> int:
    """Prints what became of the mutants of each pass, and the survivors; 0 where the bar is reached."""
    cases = kept_cases(kept, jobs)
    findings, began = list[Finding](), time.monotonic()
    for finding in run_all(chosen(sample, seed, only, every), cases, jobs):
        findings.append(finding)
        if verdict(finding) == "survived":
            print(f"survived: {finding.seed} -> {finding.after} [{finding.plan[0] if finding.plan else ''}] {finding.message}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{len(findings)}", end="", file=sys.stderr, flush=True)
    return show(findings, time.monotonic() - began)


def kept_cases(path: Path | None, jobs: int) -> dict[str, Case]:
    tests = Path(__file__).parent.parent
    texts = [path.read_bytes() for folder in (ROOT, tests / "support", tests / "drawn_programs") for path in sorted(folder.rglob("*.py"))]
    sources = zlib.crc32(b"".join(texts)), names_of_cases()
    if path is not None and path.exists():
        of, cases = pickle.loads(path.read_bytes())
        if of == sources:
            return cases               # type: ignore[no-any-return]
    cases = known(names_of_cases(), jobs)
    measured(cases, jobs)
    if path is not None:
        path.write_bytes(pickle.dumps((sources, cases)))
    return cases


def show(findings: list[Finding], seconds: float) -> int:
    by = defaultdict[str, Counter[str]](Counter)
    for finding in findings:
        by[finding.seed.module][verdict(finding)] += 1
        by["all"][verdict(finding)] += 1
    for module in (*PASSES, "all"):
        counts = by[module]
        found = sum(n for what, n in counts.items() if what not in (*NO_FAULT, "survived"))
        judged_ = found + counts["survived"]
        print(f"{module:18} {sum(counts.values()):5} mutants; found {found} of {judged_} that change what is computed "
              f"({found / max(1, judged_):.1%}): " + ", ".join(f"{what} {n}" for what, n in counts.most_common()))
    total = by["all"]
    found = sum(n for what, n in total.items() if what not in (*NO_FAULT, "survived"))
    print(f"{len(findings)} mutants in {seconds:.0f} s")
    return 0 if found >= BAR * (found + total["survived"]) else 1
