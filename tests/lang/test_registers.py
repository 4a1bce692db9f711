"""Registers: `fold`, `split`, `deal` and `interleave`, inner functions, pairs of 16-bit floats; and that none may leave the
function that makes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.components import Component, freeze
from gemmkit.emulator import machine
from gemmkit.lang import functions as functions_module
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.functions import device
from gemmkit.lang.host import View
from gemmkit.lang.memory import ViewType
from gemmkit.lang.registers import (
    Fragment,
    apply,
    deal,
    each,
    fold,
    generate,
    interleave,
    is_pairwise,
    join,
    outer,
    registers,
    split,
)
from gemmkit.layouts import RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.ptx.special import thread_index
from gemmkit.runtime.compile import to_ptx
from gemmkit.runtime.device import H100
from gemmkit.transforms import Map
from tests.ptx_machine.launch import run_ptx
from tests.support.harness import Out, compiled, constants_stored, emulated, leaves_nothing
from tests.support.lang.typing import BF16, result
from tests.support.machines import on_machines

# ==========================================================================================================================
# `fold`, `split`, `deal` and `interleave`: the same in Python and in device code, and nothing left of them in PTX.


@dataclass(frozen=True)
class Static(gk.Component):
    """Compile-time values for the kernels below."""

    none: int = 0
    five: int = 5
    two: int = 2
    four: int = 4


def check(kernel: Callable[..., None], expected: list[int]) -> None:
    """Run in the emulator, and fold in device code, to the same numbers."""
    out = Out((len(expected),), np.int32)
    assert list(emulated(kernel, out, Static(), threads=1)[0]) == expected
    assert constants_stored(compiled(kernel, out, Static())) == {4 * n: x for n, x in enumerate(expected)}


def digit(value: int, n: int, base: int) -> int:
    return value * base + n


def folding(out: Any, static: Any) -> None:
    out[0] = fold(static.five, digit, 7, 10)
    out[1] = fold(static.none, digit, 7, 10)
    out[2] = fold(3, digit, 1, static.four)


def test_fold_repeats_with_the_turns_number() -> None:
    check(folding, [701234, 7, ((1 * 4 + 0) * 4 + 1) * 4 + 2])


def turned(pair: tuple, n: int, step: int) -> tuple:
    return pair[1] + step * n, pair[0]


def folding_a_tuple(out: Any, static: Any) -> None:
    pair = fold(static.four, turned, (1, 2), 10)
    out[0] = pair[0]
    out[1] = pair[1]


def test_fold_takes_a_tuple_along() -> None:
    pair = (1, 2)
    for n in range(4):
        pair = pair[1] + 10 * n, pair[0]
    check(folding_a_tuple, list(pair))


class Span(NamedTuple):
    begin: Any
    lengths: Any


def moved(spans: tuple, n: int, step: int) -> tuple:
    """Only a named tuple has these names."""
    return spans[1], Span(spans[0].begin + step, (spans[0].lengths[0] + n,))


def folding_named_tuples(out: Any, static: Any) -> None:
    spans = fold(static.four, moved, (Span(1, (2,)), Span(3, (4,))), 10)
    out[0] = spans[0].begin
    out[1] = spans[1].lengths[0]


def test_fold_takes_named_tuples_along() -> None:
    check(folding_named_tuples, [21, 8])


def folding_floats(out: Any, static: Any) -> None:
    out[0] = np.int32(fold(2, halved, 7.0) * 4)
    out[1] = fold(2, doubled, 1, static.none)


def doubled(x: Any, n: int, more: int) -> Any:
    return 2 * x + more


def test_a_constant_may_be_where_fold_begins() -> None:
    """Its type is its value: kept, nothing would ever change."""
    check(folding_floats, [7, 4])


def halved(x: Any, n: int) -> Any:
    return x / 2


def test_the_value_of_fold_keeps_its_type() -> None:
    """What a function makes of it is converted back: else the type would depend on the number of turns."""
    assert result(lambda x: fold(3, halved, x), np.float32) == result(lambda x: x, np.float32)
    assert result(lambda x: fold(3, halved, x), np.int32) == result(lambda x: x, np.int32)


def folding_at_run_time(out: Any, static: Any) -> None:
    out[0] = fold(thread_index(), digit, 7, 10)


def test_fold_wants_a_compile_time_count() -> None:
    with pytest.raises(Exception, match="fold"):
        compiled(folding_at_run_time, Out((1,), np.int32), Static())


def folding_run_time_values(out: Any, a: Any, static: Any) -> None:
    out[thread_index()] = fold(static.five, digit, a[thread_index()], 3)


def test_fold_leaves_no_loop() -> None:
    a = np.arange(32, dtype=np.int32)
    (there,) = emulated(folding_run_time_values, Out((32,), np.int32), a, Static())
    expected = a.copy()
    for n in range(5):
        expected = expected * 3 + n
    assert np.array_equal(there, expected)
    ptx = compiled(folding_run_time_values, Out((32,), np.int32), a, Static())
    assert leaves_nothing(ptx) and "bra" not in ptx


# -- split --------------------------------------------------------------------------------------------------------------

def following(n: int, start: int) -> int:
    return n + start


def splitting(out: Any, static: Any) -> None:
    values = generate(4, following, 5)
    parts = split(values, static.two)
    out[0] = len(parts)
    out[1] = parts[0][0] * 10 + parts[0][1]
    out[2] = parts[1][0] * 10 + parts[1][1]
    out[3] = len(split(values, 1)) * 10 + len(split(values, 4))
    whole = join(parts)
    out[4] = len(whole) * 1000 + whole[0] * 100 + whole[3]


def test_split_is_what_join_puts_together() -> None:
    check(splitting, [2, 56, 78, 41, 4508])


def test_types_of_split() -> None:
    of_two = result(lambda a, b, c, d: split((a, b, c, d), 2), *[np.float32] * 4)
    assert len(of_two) == 2 and [len(part) for part in of_two] == [2, 2]
    assert of_two[0][0] == result(lambda x: x, np.float32)


@pytest.mark.parametrize("size", [3, 0, 8], ids=str)
def test_split_wants_a_divisor(size: int) -> None:
    @dataclass(frozen=True)
    class Sized(Static):
        size: int = 0

    with pytest.raises(Exception, match="split"):
        compiled(splitting_by_size, Out((1,), np.int32), Sized(size=size))


def splitting_by_size(out: Any, static: Any) -> None:
    out[0] = split(generate(4, following, 5), static.size)[0][0]


def splitting_at_run_time(out: Any, static: Any) -> None:
    out[0] = split(generate(4, following, 5), thread_index())[0][0]


def test_split_wants_a_compile_time_size() -> None:
    with pytest.raises(Exception, match="split"):
        compiled(splitting_at_run_time, Out((1,), np.int32), Static())


# -- deal ---------------------------------------------------------------------------------------------------------------

def dealing(out: Any, static: Any) -> None:
    hands = deal(generate(4, following, 5), static.two)
    out[0] = len(hands)
    out[1] = hands[0][0] * 10 + hands[0][1]
    out[2] = hands[1][0] * 10 + hands[1][1]
    whole = interleave(hands)
    out[3] = len(whole) * 10000 + whole[0] * 1000 + whole[1] * 100 + whole[2] * 10 + whole[3]
    out[4] = interleave(split(generate(4, following, 5), 2))[1]
    out[5] = len(deal(whole, 1)) * 10 + len(deal(whole, 4))


def test_deal_is_what_interleave_puts_together() -> None:
    check(dealing, [2, 57, 68, 45678, 7, 14])


def dealing_by_size(out: Any, static: Any) -> None:
    out[0] = deal(generate(4, following, 5), static.five)[0][0]


def dealing_at_run_time(out: Any, static: Any) -> None:
    out[0] = deal(generate(4, following, 5), thread_index())[0][0]


@pytest.mark.parametrize("kernel", [dealing_by_size, dealing_at_run_time])
def test_deal_wants_a_compile_time_divisor(kernel: Any) -> None:
    with pytest.raises(Exception, match="deal"):
        compiled(kernel, Out((1,), np.int32), Static())


def interleaving_what_differs(out: Any, static: Any) -> None:
    out[0] = interleave((generate(4, following, 5), generate(2, following, 5)))[0]


def test_interleave_wants_tuples_of_one_length() -> None:
    with pytest.raises(Exception, match="interleave"):
        compiled(interleaving_what_differs, Out((1,), np.int32), Static())


# ==========================================================================================================================
# Inner functions that captured run-time values, handed to `each`, `apply`, `generate` and `fold`.


@dataclass(frozen=True)
class Captured(gk.Component):
    count: int = 3
    is_odd: bool = True


def store(out: Any, i: int, value: int) -> None:
    out[i] = value


def captures(out: Any, static: Any) -> None:
    zero, scale = static.count - 3, static.count + 7
    made = generate(static.count, lambda i: scale + i)                          # 10 11 12
    moved = apply(lambda x, i: x * static.count + made[i] + zero, made)         # 40 44 48
    each(lambda x, i: store(out, i, x if static.is_odd else x.no_such_attribute), moved)
    out[3] = fold(2, lambda x, n: x + scale * n, 5)
    (out[4],) = outer(lambda c, a, b: c + a * b * scale, (1,), (2,), (3,), 1)
    for step in range(2):
        each(lambda x, i: store(out, 5 + i + step, x + step), (20,))
    out[7] = generate(1, lambda i: generate(2, lambda j: 10 * (i + j) + scale)[1])[0]


EXPECTED = [40, 44, 48, 15, 61, 20, 21, 20]


def test_what_was_captured_is_an_argument() -> None:
    out = Out((len(EXPECTED),), np.int32)
    assert list(emulated(captures, out, Captured(), threads=1)[0]) == EXPECTED
    ptx = compiled(captures, out, Captured())
    assert constants_stored(ptx) == {4 * n: x for n, x in enumerate(EXPECTED)}


def at_run_time(out: Any, x: Any) -> None:
    i = thread_index()
    each(lambda value, n: store(out, i + n, value + x[i]), (1, 2))


def test_values_of_a_thread() -> None:
    assert leaves_nothing(compiled(at_run_time, Out((40,), np.int32), np.zeros(32, np.int32)))


def changed(out: Any, x: Any) -> None:
    scale = x[0]

    def scaled(value: int, n: int) -> int:
        return value * scale

    scale = x[1]
    out[0] = apply(scaled, (1, 2))[0]


def test_a_variable_that_changes_after_it_was_captured_is_refused() -> None:
    """Python reads the later value, and what is captured by value would be the earlier."""
    with pytest.raises(Exception, match="scale"):
        compiled(changed, Out((1,), np.int32), np.zeros(2, np.int32))


# ==========================================================================================================================
# Functions of 16-bit floats computed two at a time: the same values as one by one.

F16 = np.dtype("f2")
PAIRWISE = [lambda x: max(x + 1, 0), lambda x: -x * 3 - x, lambda x: min(2, abs(x)), lambda x: max(0, 1 - x)]
SINGLY = [lambda x: x if x > 0 else 0, lambda x: math.exp(x), lambda x: max(x, x + 1), lambda x: x / 2]


def decided(f: Any, dtype: np.dtype) -> bool:
    """What device code is told of a function."""
    ty: Any = result(lambda t, kind: is_pairwise(t, kind), gk.components.freeze(Map(f)).type,
                     gk.components.freeze(dtype).type)
    return bool(ty.literal_value)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_what_is_computed_in_pairs(dtype: np.dtype) -> None:
    assert all(decided(f, dtype) for f in PAIRWISE)
    assert not any(decided(f, dtype) for f in SINGLY)
    assert not decided(PAIRWISE[0], np.dtype("f4"))
    assert decided(lambda x: x * 0.5, dtype) == (dtype == F16)             # a bfloat16 and a Python float make a float32


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("n", range(len(PAIRWISE)))
def test_pairs_are_rounded_as_single_floats(machine: Any, n: int) -> None:
    """A product with the identity gives back what the transform made, to the bit."""
    f, size = PAIRWISE[n], 64
    rng = np.random.default_rng(n)
    a = rng.standard_normal((size, size)).astype(F16)
    a[0, :4] = 0, -1, 65504, 6e-8
    conf = gk.get_config(operator=WGMMAOp(32), global_a_layout=RowMajor(F16), global_d_layout=RowMajor(F16),
                         transform_global_to_shared_a=Map(f))
    with machine.session():
        d = machine.numpy(gk.matmul(machine.array(a), machine.array(np.eye(size, dtype=F16)), conf=conf))
    with np.errstate(over="ignore"):
        expected = np.array([[f(x) for x in row] for row in a], F16)
    finite = np.isfinite(expected).all(axis=1)                              # an infinity times 0 is no number
    assert finite.sum() >= size - 1 and np.array_equal(d[finite], expected[finite])


# ==========================================================================================================================
# Registers may not leave the function that makes them: they are its stack. The emulator cannot see it; the compiled code's values do.

F32 = np.dtype("f4")
VIEW = ViewType(F32, 2, 1, 16)


@dataclass(frozen=True)
class Spec(Component):
    """What a kernel makes its registers of."""

    @property
    def one(self) -> Fragment:
        return Fragment(F32, 1)

    def made(self):
        return registers(self.one, 4, 1)


def made(spec):
    return registers(spec.one, 4, 1)


def in_a_tuple(spec):
    held = registers(spec.one, 4, 1)
    return 1, (held, 2)


class Pair(NamedTuple):
    left: Any
    right: Any


def in_a_named_tuple(spec):
    return Pair(1, registers(spec.one, 4, 1))


def on_one_path(spec):
    held = registers(spec.one, 4, 1)
    if thread_index() < 16:
        return held
    held[0, 0] = (np.float32(1),)
    return held


def by_another(spec):
    return made(spec)


def of_an_argument(spec):
    return same(registers(spec.one, 4, 1))


def same(held):
    return held


def by_a_method(spec):
    return spec.made()


def compiled_refused(function: Any) -> Any:
    return device(function).compile((freeze(Spec()).type,))


@pytest.mark.compile
@pytest.mark.parametrize("function, name, line", [
    (made, "made", "return registers(spec.one, 4, 1)"), (in_a_tuple, "in_a_tuple", "return 1, (held, 2)"),
    (in_a_named_tuple, "in_a_named_tuple", "return Pair(1, registers(spec.one, 4, 1))"), (on_one_path, "on_one_path", "return held"),
    (by_another, "made", "return registers(spec.one, 4, 1)"), (by_a_method, "Spec.made", "return registers(self.one, 4, 1)"),
    (of_an_argument, "same", "return held")])
def test_a_function_that_returns_registers_is_refused(function: Any, name: str, line: str) -> None:
    with pytest.raises(ComponentError, match="returns registers: they are this function's own stack") as caught:
        compiled_refused(function)
    text = str(caught.value)
    assert text.startswith(f"{name} cannot be compiled as device code\n  File \"{__file__}\", line ") and f"\n    {line}\n" in text


@pytest.mark.compile
def test_registers_can_be_passed_on() -> None:
    def user(spec):
        held = registers(spec.one, 4, 1)
        put(held, 0, np.float32(1))
        return held[0, 0][0]

    assert compiled_refused(user).signature.return_type.bitwidth == 32


# -- what it would compute ------------------------------------------------------------------------------------------------

def put(held, n, x):
    held[n, 0] = (x,)


def fill(held, view, column):
    for n in range(4):
        put(held, n, view[n, column])


def products(spec, a, b, c):
    x, y = made(spec), made(spec)
    t = thread_index()
    fill(x, a, t)
    fill(y, b, t)
    for n in range(4):
        c[n, t] = x[n, 0][0] * y[n, 0][0]


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    out = []
    for n in range(3):
        raw = np.zeros(4 * 32 + 64, F32)
        at = -raw.ctypes.data % 256 // 4
        out.append(raw[at:at + 128].reshape(4, 32))
        out[-1][...] = rng.standard_normal((4, 32)) if n < 2 else np.nan
    return out


@pytest.mark.compile
def test_the_interpreter_finds_what_the_emulator_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the check disabled: the emulated product is right, the compiled one is b * b."""
    a, b, c = arrays()
    views = [View(x, machine.Memory.for_array(x, name, written=name != "c"), 1, 16) for x, name in zip((a, b, c), "abc")]
    machine.launch(products, (Spec(), *views), grid=(1, 1, 1), block=(32, 1, 1), shared_memory=0)
    assert np.array_equal(c, a * b)

    types = freeze(Spec()).type, VIEW, VIEW, VIEW
    with pytest.raises(ComponentError, match="returns registers"):
        to_ptx(products, types, 32, H100)
    with monkeypatch.context() as patch:
        patch.setattr(functions_module, "_looks", [])
        ptx = to_ptx(products, types, 32, H100)
    device(made)._compiled.clear()                                     # what was compiled without the check
    device(products)._compiled.clear()
    c[...] = np.nan
    parameters = [x for array in (a, b, c) for x in (array, 4, 32, 32)]
    run_ptx(ptx, 32, 1, parameters, [a, b, c])
    assert np.array_equal(c, b * b) and not np.array_equal(c, a * b)
