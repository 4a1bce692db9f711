"""Compile-time control and registers: the same in Python and in device code, and nothing left of them in PTX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numba.cuda import types

import gemmkit as gk
from gemmkit.emulator.errors import UninitialisedRead
from gemmkit.lang.aggregates import convert, convert_all, fill
from gemmkit.lang.registers import Fragment, apply, each, generate, join, outer, registers
from gemmkit.ptx.special import thread_index
from tests.support.harness import Out, Runtime, compiled, constants_stored, emulated, leaves_nothing, lines_with, on_device
from tests.support.lang.typing import BF16, INDEX, result

N = 16


@dataclass(frozen=True)
class Static(gk.Component):
    """Compile-time values for the kernels below."""

    yes: bool = True
    no: bool = False
    count: int = 4
    kind: Any = np.dtype("f2")
    integer: Any = np.dtype("i4")
    fragment: Any = Fragment(np.dtype("i4"), 3)
    values: tuple = (5, 6, 7)


def check(kernel: Callable[..., None], expected: list[int], *more: Any) -> None:
    """Run in the emulator, and fold in device code, to the same numbers."""
    out = Out((len(expected),), np.int32)
    assert list(emulated(kernel, out, Static(), *more, threads=1)[0]) == expected
    assert constants_stored(compiled(kernel, out, Static(), *more)) == {4 * n: x for n, x in enumerate(expected)}


# -- each, generate, apply, join -----------------------------------------------------------------------------------------

def store(value: Any, n: int, out: Any, start: int) -> None:
    out[start + n] = value


def square(n: int, plus: int) -> int:
    return n * n + plus


def add_number(value: Any, n: int, factor: int) -> Any:
    return value + n * factor


def pair(n: int) -> tuple:
    return n, 10 * n


def tuples(out: Any, static: Any) -> None:
    each(store, static.values, out, 0)
    each(store, generate(static.count, square, 1), out, 3)
    each(store, apply(add_number, static.values, 100), out, 7)
    each(store, join(generate(3, pair)), out, 10)
    each(store, join((static.values, (1, 2), ())), out, 16)
    out[21] = static.values[-1]
    out[22] = len(static.values)


def test_tuples_are_unrolled() -> None:
    check(tuples, [5, 6, 7, 1, 2, 5, 10, 5, 106, 207, 0, 0, 1, 10, 2, 20, 5, 6, 7, 1, 2, 7, 3])


def test_tuples_may_be_of_several_types() -> None:
    assert result(lambda x, m: apply(add_number, (x, m), 2), np.float32, INDEX) == types.Tuple([types.float32, INDEX])
    assert result(lambda x: generate(2, lambda n, y: y * n, x), np.float32) == types.UniTuple(types.float32, 2)


def test_functions_of_functions_capture() -> None:
    def kernel(out: Any, static: Any) -> None:
        each(lambda x, n, where, by: store(x * by, n, where, 0), static.values, out, three)

    three = 3
    check(kernel, [15, 18, 21])


# -- outer ---------------------------------------------------------------------------------------------------------------

def multiply_add(c: int, a: int, b: int, times: int) -> int:
    return c + times * a * b


def outer_product(out: Any, static: Any) -> None:
    c, a, b = generate(6, lambda i: i + 1), generate(6, lambda i: i + 1), generate(4, lambda i: i + 7)
    each(store, outer(multiply_add, c, a, b, 2, 10), out, 0)


def test_outer_products() -> None:
    """c[i, j] += 10 * sum over k of a[k, i] b[k, j], rows first."""
    a, b = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[7, 8], [9, 10]])
    expected = np.arange(1, 7).reshape(2, 3) + 10 * np.einsum("ki,kj->ji", a, b)
    check(outer_product, [int(x) for x in expected.reshape(-1)])


# -- convert, fill -----------------------------------------------------------------------------------------------------------

def test_convert_is_numpys() -> None:
    assert convert(np.dtype("f2"), 2049) == np.float16(2048) and type(convert(np.dtype("f2"), 1)) is np.float16
    assert convert(np.dtype("i1"), np.int32(300)) == 44 and convert(np.dtype("i4"), -2.9) == -2
    assert convert_all(BF16, (1.0, np.float32(3.14159))) == (BF16.type(1.0), BF16.type(3.140625))
    assert fill(np.dtype("f4"), 3, 2) == (np.float32(2),) * 3
    same = (np.float32(1), np.float32(2))
    assert convert_all(np.dtype("f4"), same) is same


def test_convert_has_the_dtypes_type() -> None:
    static = gk.components.freeze(Static()).type
    half = result(lambda s, x: convert(s.kind, x), static, np.float64)
    assert half == result(lambda x: x, np.dtype("f2"))
    assert result(lambda s, x: convert_all(s.kind, (x, 1, 2.0)), static, np.float32) == types.UniTuple(half, 3)
    assert result(lambda s: fill(s.kind, s.count, 1.5), static) == types.UniTuple(half, 4)
    assert result(lambda s, x: s.kind(x), static, np.float32) == half


def converting(out: Any, x: Any, static: Any) -> None:
    i = thread_index()
    out[i] = convert(static.integer, x[i])


@pytest.mark.gpu
def test_floats_convert_to_integers_alike_on_the_gpu() -> None:
    x = np.array([0.0, -0.5, 0.99, -2.9, 3.5, 1e6, -1e9, 123456.78] * 4, np.float32)
    (there,), (here,) = (run(converting, Out((32,), np.int32), x, Static()) for run in (on_device, emulated))
    assert np.array_equal(there, here) and np.array_equal(here, x.astype(np.int32))


# -- range -----------------------------------------------------------------------------------------------------------------------

def ranges(out: Any, static: Any, n: int) -> None:
    at = 0
    for i in range(n):
        out[at] = i
        at += 1
    for i in range(2, 3 * static.count, 5):
        out[at] = i
        at += 1
    for i in range(3, -4, -3):
        out[at] = i
        at += 1
    for i in range(n, 0):
        out[at] = 99 + i
        at += 1


def test_ranges_run_as_in_python() -> None:
    check(ranges, [0, 1, 2, 2, 7, 3, 0, -3], 3)


@pytest.mark.gpu
def test_ranges_run_as_in_python_on_the_gpu() -> None:
    (out,) = on_device(ranges, Out((8,), np.int32), Static(), Runtime(3), threads=1)
    assert list(out) == [0, 1, 2, 2, 7, 3, 0, -3]


def sum_to(out: Any, n: int) -> None:
    total = 0
    for i in range(n):
        total = total + i * out[i]
    out[0] = total


def test_loops_count_in_32_bits() -> None:
    ptx = compiled(sum_to, Out((64,), np.int32), Runtime(5))
    assert lines_with(ptx, "setp.") and leaves_nothing(ptx)
    assert not [line for line in lines_with(ptx, "setp.") if "64" in line.split()[0]]


# -- registers ---------------------------------------------------------------------------------------------------------------------

def using_registers(out: Any, static: Any) -> None:
    values = registers(static.fragment, 2, static.count)
    line = registers(static.fragment, static.count)
    for i in range(2):
        for j in range(static.count):
            values[i, j] = (i, j, i * 10 + j)
    for j in range(static.count):
        line[j] = values[1, j]
    each(store, values[0, 3], out, 0)
    each(store, values[1, 2], out, 3)
    each(store, line[1], out, 6)
    out[9] = static.fragment.count


def test_registers_hold_what_was_put_there() -> None:
    check(using_registers, [0, 3, 3, 1, 2, 12, 1, 1, 11, 3])


def rotating(out: Any, x: Any, static: Any) -> None:
    values = registers(static.fragment, 4, 4)
    for i in range(4):
        for j in range(4):
            values[i, j] = (x[i], x[j], x[i + j])
    total = 0
    for i in range(4):
        for j in range(4):
            first, second, third = values[j, i]
            total = total + first * second - third
    out[thread_index()] = total


def test_registers_are_registers() -> None:
    """No local memory, though values are put and taken at run time."""
    assert leaves_nothing(compiled(rotating, Out((32,), np.int32), np.arange(8, dtype=np.int32), Static()))
    x = np.arange(8, dtype=np.int32)
    (out,) = emulated(rotating, Out((32,), np.int32), x, Static())
    assert (out == sum(x[i] * x[j] - x[i + j] for i in range(4) for j in range(4))).all()


def test_registers_refuse_what_is_not_there() -> None:
    values = registers(Fragment(np.dtype("f4"), 2), 2, 3)
    for key in ((2, 0), (0, 3), (-1, 0), 0, (0, 0, 0)):
        with pytest.raises(IndexError, match=r"registers of shape \(2, 3\) indexed with"):
            values[key] = (1.0, 2.0)
        with pytest.raises(IndexError, match=r"registers of shape \(2, 3\) indexed with"):
            _ = values[key]
    values[1, 2] = (1.0, 2.0)
    assert values[1, 2] == (1.0, 2.0)


def reading_too_soon(out: Any, static: Any) -> None:
    values = registers(static.fragment, 2)
    out[0] = values[1][0]


def reading_one_of_two_ways(out: Any, x: Any) -> None:
    if x != 7:
        seven = 7
    out[0] = seven


@pytest.mark.parametrize("kernel, given, what, line", [
    (reading_too_soon, Static(), r"registers of shape \(2,\): 1 was read", "out[0] = values[1][0]"),
    (reading_one_of_two_ways, Runtime(7), "local variable 'seven'", "out[0] = seven")])
def test_registers_were_written_before_they_are_read(kernel: Any, given: Any, what: str, line: str) -> None:
    with pytest.raises(UninitialisedRead, match=rf"a register is read before anything has set it: .*{what}") as caught:
        emulated(kernel, Out((1,), np.int32), given, threads=1)
    error = caught.value
    assert error.thread == ((0, 0, 0), 0) and error.kernel_line is not None
    assert error.kernel_line.text == line and error.kernel_line.file == __file__
