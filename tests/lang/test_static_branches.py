"""Branches decided when a kernel is compiled: the same in Python and in device code, and the other side is not even typed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba.cuda import types

import gemmkit as gk
from gemmkit import transforms
from gemmkit.components import freeze
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.fingerprint import function_text
from gemmkit.ptx.special import thread_index
from tests.support.harness import Out, Runtime, compiled, constants_stored, emulated, lines_with
from tests.support.lang.typing import INDEX, result
from tests.support.patches import Set


@dataclass(frozen=True)
class Inner(gk.Component):
    depth: int = 3


@dataclass(frozen=True)
class Static(gk.Component):
    """What the functions below ask; ``limit`` is an argument of the kernel."""

    limit: gk.Scalar
    yes: bool = True
    no: bool = False
    count: int = 4
    kind: str = "row"
    nothing: Any = None
    inner: Any = Inner()
    extents: tuple = (8, 16)
    tile: Any = gk.Tile(M=8, N=4)

    @cached_property
    def is_deep(self) -> bool:
        return self.inner.depth > 2

    @cached_property
    def wide(self) -> Any:
        return np.prod(self.extents) > 1000

    @cached_property
    def limited(self) -> bool:
        return bool(self.limit > 3)


class Pair(NamedTuple):
    first: Any
    second: Any


def impossible(x: Any) -> int:
    return x.no_such_attribute + 1


DECIDED: dict[str, tuple[Callable[[Any], Any], int]] = {}


def decided(expected: int) -> Callable[[Any], Any]:
    def enter(f: Any) -> Any:
        DECIDED[f.__name__] = f, expected
        return f
    return enter


@decided(1)
def a_field(s: Any) -> int:
    return 1 if s.yes else impossible(s)


@decided(2)
def a_property(s: Any) -> int:
    if not s.is_deep:
        return impossible(s)
    return 2


@decided(3)
def a_comparison(s: Any) -> int:
    if s.count % 3 + 1 == 2 and s.inner.depth >= s.count - 1:
        return 3
    return impossible(s)


@decided(4)
def alternatives(s: Any) -> int:
    if s.no or s.count < 3:
        return impossible(s)
    elif s.kind == "row":
        return 4
    else:
        return impossible(s)


@decided(5)
def a_name(s: Any) -> int:
    """Known through a side that is gone."""
    if s.yes:
        which = s.no
    else:
        which = impossible(s)
    x = 5
    if which:
        x = impossible(s)
    return x


@decided(6)
def a_value_of_and(s: Any) -> int:
    both = s.yes and s.inner.depth == 3
    return 6 if both else impossible(s)


@decided(7)
def none_and_lengths(s: Any) -> int:
    if s.nothing is None and len(s.extents) == 2:
        return 7
    return impossible(s)


def of_pair(pair: Any) -> int:
    if pair.second.yes:
        return pair.first
    return impossible(pair)


@decided(8)
def a_named_tuple(s: Any) -> int:
    return of_pair(Pair(8, s))


def by_a_literal(s: Any, flag: bool) -> int:
    return 9 if flag else impossible(s)


@decided(9)
def an_argument(s: Any) -> int:
    return by_a_literal(s, s.yes)


def of_tile(tile: Any) -> int:
    if tile.size[0] == 8 and tile.size.N > 1 and tile.count == 32:
        return 11
    return impossible(tile)


@decided(12)
def numpys_truth(s: Any) -> int:
    return impossible(s) if s.wide else 12


@decided(11)
def sizes_and_elements(s: Any) -> int:
    if s.extents[1] == 8:
        return impossible(s)
    return of_tile(s.tile)


@decided(10)
def in_a_loop(s: Any) -> int:
    total = 0
    for n in range(s.count):
        if s.no:
            total = impossible(n)
        elif n > 0:                                            # at run time
            total += n + 1
        if s.kind != "row":
            return impossible(total)
    return total + 1


def frozen(**fields: Any) -> Any:
    return freeze(Static(np.int32(1), **fields)).type


@pytest.mark.parametrize("name", DECIDED)
def test_only_one_side_is_compiled(name: str) -> None:
    function, expected = DECIDED[name]
    assert function(Static(np.int32(1))) == expected           # Python's own, and so the emulator's
    assert isinstance(result(function, frozen()), types.Integer)


def all_of_them(out: Any, s: Any) -> None:
    out[0], out[1], out[2], out[3] = alternatives(s), a_name(s), a_value_of_and(s), in_a_loop(s)


def test_nothing_is_left_of_a_decision() -> None:
    out, static = Out((4,), np.int32), Static(np.int32(1))
    assert list(emulated(all_of_them, out, static, threads=1)[0]) == [4, 5, 6, 10]
    assert constants_stored(compiled(all_of_them, out, static)) == {0: 4, 4: 5, 8: 6, 12: 10}


def both_values(s: Any) -> Any:
    both = s.yes and s.count == 3
    return s.kind.no_such_attribute if both else 1


def test_the_later_value_of_and_counts() -> None:
    assert both_values(Static(np.int32(1))) == 1 and isinstance(result(both_values, frozen()), types.Integer)


def at_run_time(out: Any, s: Any, x: int) -> None:
    out[0] = 1
    if s.limit > 3 and s.yes:
        out[0] = 2
    if x > 5 or s.no:
        out[0] += 4


def test_run_time_values_stay_branches() -> None:
    arguments = Out((1,), np.int32), Static(np.int32(1)), Runtime(1)
    for limit, x, expected in ((1, 1, 1), (4, 1, 2), (4, 6, 6)):
        assert emulated(at_run_time, arguments[0], Static(np.int32(limit)), Runtime(x), threads=1)[0][0] == expected
    assert len(lines_with(compiled(at_run_time, *arguments), "setp.")) == 2


def on_a_thread(s: Any) -> int:
    return impossible(s) if thread_index() == 0 else 1


def test_a_condition_on_a_thread_is_compiled_on_both_sides() -> None:
    with pytest.raises(ComponentError, match="no_such_attribute"):
        result(on_a_thread, frozen())


def limited(s: Any) -> int:
    return 1 if s.limited else 2


def test_a_property_that_reads_a_run_time_field_is_still_refused() -> None:
    with pytest.raises(ComponentError, match="may not depend on the runtime field"):
        result(limited, frozen())


def test_a_weak_constant_stays_weak() -> None:
    """The side that is compiled has its own type, as in Python; not the common one of both sides."""
    def chosen(s: Any, x: Any) -> Any:
        return x if s.yes else 1.5

    assert result(chosen, frozen(), types.float32) == types.float32
    assert result(chosen, frozen(), INDEX) == INDEX


FLAG = True


def by_a_global(s: Any) -> int:
    return 1 if FLAG else impossible(s)


def test_a_global_that_decided_is_bound_anew(rebound: Set) -> None:
    """What decided a branch is in the text by which a kernel is found."""
    before = function_text(by_a_global)
    assert isinstance(result(by_a_global, frozen()), types.Integer)
    rebound(FLAG=False)
    assert function_text(by_a_global) != before
    with pytest.raises(ComponentError, match="no_such_attribute"):
        result(by_a_global, frozen())


@pytest.mark.parametrize("field, value", [("yes", False), ("count", 5), ("kind", "col"), ("inner", Inner(1))])
def test_static_fields_that_decide_make_another_type(field: str, value: Any) -> None:
    one, other = freeze(Static(np.int32(1))), freeze(Static(np.int32(1), **{field: value}))
    assert one.type != other.type and one.fingerprint != other.fingerprint


@dataclass(frozen=True)
class Rounded(transforms.Transform):
    """A user's: one side is for scalars, the other for what has rows."""

    by_row: bool = False

    def __call__(self, x, i, j):
        if self.by_row:
            return x.row(i)
        return x + 1


def test_a_users_component_in_both_worlds() -> None:
    ty = freeze(Rounded()).type
    method = ty.method("__call__")
    assert method is not None and method.compile((ty, types.float32, INDEX, INDEX)).signature.return_type == types.float32
    with pytest.raises(ComponentError, match="row"):
        other = freeze(Rounded(True)).type
        method.compile((other, types.float32, INDEX, INDEX))
    a = np.arange(64, dtype=np.float32).reshape(8, 8)
    with gk.emulate():
        d = gk.matmul(a, np.eye(8, dtype=np.float32), transform_global_to_shared_a=Rounded())
    assert np.array_equal(d, a + 1)


@dataclass(frozen=True)
class Calling(gk.Component):
    f: Any

    def __call__(self, x: Any) -> Any:
        return self.f(x)


def signed(flag: Any) -> Any:
    return lambda x: x + 1 if flag else x - 1


def call(out: Any, x: Any, component: Any) -> None:
    out[0] = component(x[0])


def test_a_captured_scalar_decides_at_run_time() -> None:
    """It is an argument: what the cell of the kept function holds is no constant."""
    ptx = compiled(call, Out((1,), np.float32), np.zeros(1, np.float32), Calling(signed(np.float32(2))))
    assert len(lines_with(ptx, "setp")) == 1
