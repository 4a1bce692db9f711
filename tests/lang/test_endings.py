"""A function's end is in the code once, from whichever Python: 3.12 and later copy a short one to all that jumps there."""

from __future__ import annotations

import ast
import copy
import dis
import inspect
import linecache
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest

from gemmkit.ptx.barriers import cluster_barrier
from gemmkit.ptx.special import barrier, lane_index, thread_index, warp_barrier
from tests.support.harness import Out, compiled, emulated
from tests.support.patches import Set


def copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as Python 3.12 compiles it: each side of its last ``if`` has a copy of what is behind it, at its lines."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    (found,) = tree.body
    assert isinstance(found, ast.FunctionDef)
    at = max(n for n, statement in enumerate(found.body) if isinstance(statement, ast.If))
    last, behind = found.body[at], found.body[at + 1:]
    assert isinstance(last, ast.If) and behind
    last.body, last.orelse, found.body = last.body + behind, last.orelse + behind, found.body[:at + 1]
    return _made(function, tree)


def _made(function: Callable[..., Any], tree: ast.Module) -> Callable[..., Any]:
    name = f"<copied {function.__qualname__}>"
    linecache.cache[name] = (0, None, inspect.getsource(function).splitlines(keepends=True), name)
    made: dict[str, Any] = {}
    exec(compile(tree, name, "exec"), function.__globals__, made)
    again = made[function.__name__]
    assert isinstance(again, FunctionType)
    again.__module__ = function.__module__
    return again


def meets(out: Any) -> None:
    if thread_index() == 0:
        out[0] = 7
    barrier()


def meets_in_clusters(out: Any) -> None:
    if thread_index() == 0:
        out[0] = 7
    cluster_barrier()


def chosen(out: Any) -> None:
    if thread_index() == 0:
        out[0] = 7
    elif thread_index() == 1:
        out[1] = 8
    barrier()


def stored(out: Any) -> None:
    i = thread_index()
    x = 5
    if i > 3:
        x = 6
    warp_barrier()
    out[i] = x + i


def doubled(x: int) -> int:
    if lane_index() == 0:
        x = x + 1
    return twice(x)


def twice(x: int) -> int:
    barrier()
    return 2 * x


def by_functions(out: Any) -> None:
    out[thread_index()] = doubled(thread_index())


CASES: list[tuple[Callable[..., None], str]] = [
    (meets, "bar.sync"), (meets_in_clusters, "barrier.cluster.arrive"), (chosen, "bar.sync"), (stored, "bar.warp.sync")]


@pytest.mark.parametrize("way", [lambda f: f, copied], ids=["as written", "copied"])
@pytest.mark.parametrize(("function", "barrier_text"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_one_barrier(function: Callable[..., None], barrier_text: str, way: Any) -> None:
    ptx = compiled(way(function), Out((32,), np.int32))
    assert ptx.count(barrier_text) == 1, ptx


BARRIERS = "barrier", "cluster_barrier", "warp_barrier"


@pytest.mark.parametrize("function", [function for function, _ in CASES])
def test_copies_are_there_to_be_joined(function: Callable[..., None]) -> None:
    """Each side of the last ``if`` calls the barrier in the code that the cases make, from whichever Python."""
    code = dis.get_instructions(copied(function))
    assert sum(one.opname == "LOAD_GLOBAL" and one.argval in BARRIERS for one in code) == 2


def test_a_value_that_is_returned(rebound: Set) -> None:
    rebound(doubled=copied(doubled))
    assert compiled(by_functions, Out((32,), np.int32)).count("bar.sync") == 1
    out, *_ = emulated(by_functions, Out((4,), np.int32), threads=4)
    assert list(out) == [2, 2, 4, 6]


def differ(out: Any, x: Any) -> None:
    if thread_index() == 0: out[0] = x[0]; barrier(); return        # noqa: E701, E702
    out[1] = x[1]; barrier()        # noqa: E702


def test_what_is_written_twice_stays() -> None:
    """On lines of their own."""
    assert compiled(differ, Out((2,), np.int32), np.zeros(2, np.int32)).count("bar.sync") == 2


def two_ends(out: Any, x: Any) -> None:
    a, b = x[0], x[1]
    if thread_index() == 0: store(out, a); return                    # noqa: E701, E702
    store(out, b)


def store(out: Any, value: int) -> None:
    out[0] = value


def test_other_values_are_no_copies() -> None:
    tree = inspect.getsource(two_ends).replace("; return                    # noqa: E701, E702\n    store", "; return\n    store")
    code = ast.parse(tree)
    (found,) = code.body
    assert isinstance(found, ast.FunctionDef)
    for statement in ast.walk(found):                                # all on one line, as copies are
        if hasattr(statement, "lineno"):
            statement.lineno = statement.end_lineno = 1              # type: ignore[attr-defined]
    made: dict[str, Any] = {}
    exec(compile(code, __file__, "exec"), globals(), made)
    ptx = compiled(made["two_ends"], Out((1,), np.int32), np.zeros(2, np.int32))
    assert ptx.count("st.global") == 2 or "selp" in ptx


def met(out: Any) -> None:
    i = thread_index()
    out[i] = chosen_in_turn(i)


def chosen_in_turn(i: int) -> int:
    return twice(i + 1 if i < 3 else i)


def copied_choice(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as Python 3.12 compiles it: each side of the choice in its last call has a copy of the call, at its place."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition: Any = tree.body[0]
    last = definition.body[-1]
    choice = last.value.args[0]
    ways = [copy.deepcopy(last) for _ in range(2)]
    for way, value in zip(ways, (choice.body, choice.orelse)):
        way.value.args[0] = value
    definition.body[-1] = ast.copy_location(ast.If(choice.test, [ways[0]], [ways[1]]), last)
    return _made(function, tree)


def of_either(out: Any, x: Any) -> None:
    out[thread_index()] = either(x[0])


def either(x: Any) -> Any:
    return widened(x) if thread_index() == 0 else widened(1.5)


def widened(x: Any) -> Any:
    return float(x) * 2


def test_an_end_takes_what_differs_from_way_to_way(rebound: Set) -> None:
    """A collective whose argument is chosen in front of it, as a row's reductions are."""
    rebound(chosen_in_turn=copied_choice(chosen_in_turn))
    assert compiled(met, Out((32,), np.int32)).count("bar.sync") == 1
    out, *_ = emulated(met, Out((4,), np.int32), threads=4)
    assert list(out) == [2, 4, 6, 6]


def test_two_calls_in_one_line_are_two() -> None:
    """They are no copies, and their arguments are of two types."""
    assert "cvt.rn.f64.s32" in compiled(of_either, Out((32,), np.float64), np.zeros(32, np.int32))
