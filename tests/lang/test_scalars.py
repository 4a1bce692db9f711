"""Scalars in device code have NumPy's types (NEP 50), and on a GPU NumPy's values to the bit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.lang.registers import each
from gemmkit.ptx.special import block_x, thread_index
from tests.support.harness import Out, Runtime, compiled, emulated, leaves_nothing, lines_with, on_device, same_bits
from tests.support.lang.typing import BF16, BOOL, FLOATS, INDEX, INTEGERS, NARROW, WEAK, result

F4, F8 = np.dtype("f4"), np.dtype("f8")

# -- constants are weak ------------------------------------------------------------------------------------------------

#: What a user may write of one number; NumPy says the type.
OF_ONE = {
    "x + 1": lambda x: x + 1, "1 - x": lambda x: 1 - x, "x * 2": lambda x: x * 2, "x / 2": lambda x: x / 2,
    "x // 2": lambda x: x // 2, "x % 3": lambda x: x % 3, "x + 1.5": lambda x: x + 1.5, "2.5 * x": lambda x: 2.5 * x,
    "x / 2.5": lambda x: x / 2.5, "x // 2.5": lambda x: x // 2.5, "x % 2.5": lambda x: x % 2.5,
    "x * math.pi": lambda x: x * math.pi, "x * (2 + 3)": lambda x: x * (2 + 3),
    "abs(x)": lambda x: abs(x), "x == 1": lambda x: x == 1, "x < 1.5": lambda x: x < 1.5, "not x": lambda x: not x,
    "0 < x < 9": lambda x: 0 < x < 9,
}


def numpys(function: Any, *arguments: Any) -> Any:
    """The dtype that NumPy gives for the same function of scalars; bool for Python's own."""
    out = function(*arguments)
    return np.dtype(bool) if isinstance(out, bool) else np.asarray(out).dtype


def device_dtype(ty: Any) -> Any:
    from gemmkit.lang.scalars import numpy_dtype

    return numpy_dtype(ty)


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("function", OF_ONE.values(), ids=OF_ONE.keys())
def test_a_constant_takes_the_type_of_what_it_meets(function: Any, dtype: np.dtype) -> None:
    assert device_dtype(result(function, dtype)) == numpys(function, dtype.type(3))


#: The same where NumPy's scalar result would depend on the value, or Python has a type of its own for it.
KEEPS = {
    "-x": lambda x: -x, "max(x, 0)": lambda x: max(x, 0), "min(1, x)": lambda x: min(1, x),
    "x if x > 0 else 0": lambda x: x if x > 0 else 0, "0 if x < 0 else x": lambda x: 0 if x < 0 else x,
    "x if x > 0 else 0.0": lambda x: x if x > 0 else 0.0, "x ** 2": lambda x: x ** 2,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("function", KEEPS.values(), ids=KEEPS.keys())
def test_floats_stay_what_they_are(function: Any, dtype: np.dtype) -> None:
    assert device_dtype(result(function, dtype)) == dtype


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", ["max(x, 0)", "x if x > 0 else 0", "0 if x < 0 else x"])
def test_integers_stay_what_they_are(name: str, dtype: np.dtype) -> None:
    assert device_dtype(result(KEEPS[name], dtype)) == dtype


def accumulate(x: Any) -> Any:
    total = 0
    for _ in range(4):
        total += x * 0.5
        total *= 2
        total -= 1.0
        total /= 3
    return total


@pytest.mark.parametrize("dtype", [np.dtype("f2"), F4, F8], ids=str)
def test_in_place_operators_and_loops_keep_types(dtype: np.dtype) -> None:
    assert device_dtype(result(accumulate, dtype)) == dtype


@pytest.mark.parametrize("function", [math.exp, math.sqrt, math.log, math.tanh, math.floor, math.fabs, math.erf])
@pytest.mark.parametrize("dtype, wanted", [(np.dtype("f2"), F4), (BF16, F4), (F4, F4), (F8, F8)])
def test_math_is_in_single_precision_at_least(function: Any, dtype: np.dtype, wanted: np.dtype) -> None:
    name = function.__name__
    call = eval(f"lambda x: math.{name}(x)", {"math": math})
    assert device_dtype(result(call, dtype)) == wanted


@pytest.mark.parametrize("function", [
    lambda x: math.pow(x, 2.0), lambda x: math.pow(2.0, x), lambda x: math.fmod(x, 1.5), lambda x: math.atan2(x, 1),
    lambda x: math.copysign(x, -1.0), lambda x: math.hypot(x, 3),
])
def test_math_of_two_takes_constants(function: Any) -> None:
    for dtype, wanted in ((np.dtype("f2"), F4), (F4, F4), (F8, F8)):
        assert device_dtype(result(function, dtype)) == wanted


@pytest.mark.sample(3)
@pytest.mark.parametrize("a", [*FLOATS, np.dtype("i1"), np.dtype("u1"), np.dtype("i4")], ids=str)
@pytest.mark.parametrize("b", FLOATS, ids=str)
def test_two_numbers_give_numpys_type(a: np.dtype, b: np.dtype) -> None:
    for function in (lambda x, y: x + y, lambda x, y: x * y, lambda x, y: x / y, lambda x, y: x - y):
        wanted = numpys(function, np.ones(1, a), np.ones(1, b))
        assert device_dtype(result(function, a, b)) == device_dtype(result(function, b, a)) == wanted
    assert result(lambda x, y: x < y, a, b) == BOOL


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_masks_multiply(dtype: np.dtype) -> None:
    assert device_dtype(result(lambda x: (x > 0) * x, dtype)) == dtype


# -- coordinates ---------------------------------------------------------------------------------------------------------

OF_COORDINATES = [lambda m, n: m + n, lambda m, n: m - 1, lambda m, n: 2 * m, lambda m, n: m // n, lambda m, n: m % 3,
                  lambda m, n: -m, lambda m, n: abs(m), lambda m, n: min(m, n), lambda m, n: max(m, 0),
                  lambda m, n: m & 7, lambda m, n: m << 2, lambda m, n: m >> n, lambda m, n: m ^ n,
                  lambda m, n: m if m < n else n, lambda m, n: m if m > 0 else 5, lambda m, n: (m * n + 3) // 4 % 16]


@pytest.mark.parametrize("number", range(len(OF_COORDINATES)))
def test_coordinates_stay_32_bits_wide(number: int) -> None:
    assert result(OF_COORDINATES[number], INDEX, INDEX) == INDEX


def loop(m: Any) -> Any:
    total = 0
    for i in range(m):
        for j in range(i, m, 2):
            total += i * j - 1
    return total


def test_loop_variables_are_coordinates() -> None:
    assert result(loop, INDEX) == INDEX


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_coordinates_are_weak(dtype: np.dtype) -> None:
    for function in (lambda x, m: x * m, lambda x, m: m - x, lambda x, m: x if x > m else m):
        assert device_dtype(result(function, dtype, INDEX)) == dtype


def test_coordinates_times_fractions_are_fractions() -> None:
    """A Python float in Python, weak as such: ``x * (m * 0.5)`` has the type of x."""
    for function in (lambda m: m * 0.5, lambda m: m / 2, lambda m: 1.5 - m, lambda m: m * math.pi, lambda m: max(m, 0.5),
                     lambda m: 0.25 if m > 2 else 1.0, lambda m: m if m > 2 else 1.0):
        assert result(function, INDEX) == WEAK
    assert device_dtype(result(lambda x, m: x * (m * 0.5) + (1.0 if m > 0 else 2.0), F4, INDEX)) == F4
    assert result(lambda m: m * 0.5 < 3, INDEX) == BOOL


def test_int32_arrays_and_constants() -> None:
    assert device_dtype(result(lambda i: i + 1, np.int32)) == np.dtype("i4")
    assert result(lambda i, m: i + m, np.dtype("i4"), INDEX) == result(lambda i, m: m * i, np.dtype("i4"), INDEX)


# -- run-time Python numbers -----------------------------------------------------------------------------------------------

def test_a_runtime_float_is_weak() -> None:
    for dtype in (np.dtype("f2"), F4, F8):
        assert device_dtype(result(lambda x, alpha: x * alpha + alpha, dtype, WEAK)) == dtype
        assert device_dtype(result(lambda x, alpha: x if x > alpha else alpha, dtype, WEAK)) == dtype
    for function in (lambda a, b: a * b, lambda a, b: a - 1, lambda a, b: 2.0 * b, lambda a, b: -a, lambda a, b: abs(a),
                     lambda a, b: max(a, b), lambda a, b: a if b else b, lambda a, b: a ** 2):
        assert result(function, WEAK, WEAK) == WEAK
    assert result(lambda a, m: a * m, WEAK, INDEX) == WEAK


def test_a_runtime_float_keeps_its_precision_by_itself() -> None:
    """``math`` of it is computed in float64, and is as weak as it is: in NumPy ``x * math.exp(alpha)`` has the type of x."""
    assert result(lambda alpha: math.exp(alpha), WEAK) == WEAK
    assert result(lambda alpha: float(alpha), WEAK) == result(lambda x: x, np.float64)
    assert result(lambda alpha: alpha != 0, WEAK) == BOOL
    assert result(lambda alpha, i: alpha * i, WEAK, np.dtype("i4")) == result(lambda x: x, np.float64)


def test_a_runtime_float_loses_nothing(rng: np.random.Generator) -> None:
    def kernel(out: Any, x: Any, alpha: Any, beta: Any) -> None:
        i = thread_index()
        out[i] = x[i] * (alpha * beta) - alpha

    x = rng.standard_normal(32)
    (there,) = emulated(kernel, Out((32,), "f8"), x, Runtime(0.1), Runtime(0.3))
    assert same_bits(there, x * (0.1 * 0.3) - 0.1)
    assert leaves_nothing(compiled(kernel, Out((32,), "f8"), x, Runtime(0.1), Runtime(0.3)))


# -- conversions by name -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("function, wanted", [
    (lambda x: np.float32(x), "f4"), (lambda x: np.float64(x), "f8"), (lambda x: np.int32(x), "i4"),
    (lambda x: np.float16(x), "f2"), (lambda x: np.float32(x), "f4"), (lambda x: float(x), "f8"), (lambda x: np.int8(x), "i1"),
])
def test_types_convert_when_called(function: Any, wanted: str) -> None:
    for given in (np.dtype("f2"), BF16, F8, np.dtype("i8"), INDEX):
        assert device_dtype(result(function, given)) == np.dtype(wanted)


def test_int_and_bool() -> None:
    for given in (*NARROW, F4, WEAK):
        assert device_dtype(result(lambda x: int(x), given)) == np.dtype("i8")
        assert result(lambda x: bool(x), given) == BOOL
        assert result(lambda x: (x > 0 and x < 1) or not x, given) == BOOL
    assert result(lambda m: int(m), INDEX) == INDEX


# -- the values ----------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Expressions(gk.Component):
    """Many expressions of two narrow floats at once; ``width`` is how many (Numba makes tuples of 30 at most)."""

    width: int = 30


@dataclass(frozen=True)
class Float16(Expressions):
    """Python floats are weak beside a float16."""

    def of(self, x: Any, y: Any, m: int) -> tuple:
        return (x + y, x - y, x * y, x / y, -x, abs(x), x + 1, 2 * x, x / 3, x * y + x, (x + y) * (x - y), min(x, y),
                max(x, y), x if x > y else y, x * m, m - x, x + 1000, x < y, x >= y, x == y, x > 1,
                x if x > 0 else 0, (x > 0) * x, x * x * x, x - 7 * y, x + 0.1, 0.3 * x, x * 0.3 + 0.7, x / 1.7, x < 0.3)


@dataclass(frozen=True)
class BFloat16(Expressions):
    """Python floats make a float32 of a bfloat16 (ml_dtypes)."""

    def of(self, x: Any, y: Any, m: int) -> tuple:
        return (x + y, x - y, x * y, x / y, -x, abs(x), x + 1, 2 * x, x / 3, x * y + x, (x + y) * (x - y), min(x, y),
                max(x, y), x if x > y else y, x * m, m - x, x + 1000, x < y, x >= y, x == y, x > 1,
                x if x > 0 else 0, (x > 0) * x, x * x * x, x - 7 * y, x + 0.1, 0.3 * x, x * 0.3 + 0.7, x / 1.7, x < 0.3)


def evaluate(out: Any, x: Any, y: Any, expressions: Any) -> None:
    i = block_x() * 32 + thread_index()
    each(keep_value, expressions.of(x[i], y[i], i % 50), out, i, expressions)


def keep_value(value: Any, n: int, out: Any, i: int, expressions: Any) -> None:
    out[i * expressions.width + n] = value


def narrow_numbers(rng: np.random.Generator, dtype: np.dtype, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Bit patterns of every kind (no NaNs), and their near neighbours, so that sums cancel."""
    x = rng.integers(0, 2**16, count).astype(np.uint16)
    y = np.where(rng.random(count) < 0.5, x ^ rng.integers(0, 16, count).astype(np.uint16),
                 rng.integers(0, 2**16, count).astype(np.uint16))
    x, y = x.view(dtype), y.view(dtype)
    with np.errstate(invalid="ignore"):
        return tuple(np.where(np.isnan(v.astype(np.float64)), dtype.type(1), v) for v in (x, y))  # type: ignore[return-value]


CASES = [(np.dtype("f2"), Float16()), (BF16, BFloat16())]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype, expressions", CASES, ids=["float16", "bfloat16"])
def test_expressions_have_the_emulators_types(dtype: np.dtype, expressions: Expressions) -> None:
    """Each element of the device's tuple has the type that NumPy's scalars give (bool for a comparison)."""
    there = result(lambda e, x, y, m: e.of(x, y, m), gk.components.freeze(expressions).type, dtype, dtype, INDEX)
    here = expressions.of(dtype.type(3), dtype.type(0.75), 5)
    assert len(there) == len(here) == expressions.width
    for n, (ty, value) in enumerate(zip(there, here)):
        assert device_dtype(ty) == (np.dtype(bool) if isinstance(value, (bool, np.bool_)) else value.dtype), n


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype, expressions", CASES, ids=["float16", "bfloat16"])
def test_narrow_arithmetic_is_numpys_to_the_bit(dtype: np.dtype, expressions: Expressions,
                                               rng: np.random.Generator) -> None:
    count = 4096
    x, y = narrow_numbers(rng, dtype, count)
    (there,) = on_device(evaluate, Out((count * expressions.width,), "f4"), x, y, expressions, blocks=count // 32)
    here = np.array([[np.float32(v) for v in expressions.of(a, b, i % 50)] for i, (a, b) in enumerate(zip(x, y))],
                    np.float32)
    there = there.reshape(count, expressions.width)
    for n in range(expressions.width):
        assert same_bits(np.ascontiguousarray(there[:, n]), np.ascontiguousarray(here[:, n])), f"expression {n}"


def test_narrow_arithmetic_needs_no_library(rng: np.random.Generator) -> None:
    """numba-cuda's own 16-bit floats are calls into a C++ shim."""
    for dtype, expressions in CASES:
        x, y = narrow_numbers(rng, dtype, 32)
        ptx = compiled(evaluate, Out((32 * expressions.width,), "f4"), x, y, expressions)
        assert leaves_nothing(ptx) and not lines_with(ptx, ".f64")


def absolute_values(out: Any, given: Any) -> None:
    i = thread_index()
    size = abs(given[i])
    out[2 * i] = float(size)
    out[2 * i + 1] = 1.0 if size < 0 else 0.0


def lowest(dtype: np.dtype) -> np.ndarray:
    return np.array([np.iinfo(dtype).min, np.iinfo(dtype).min + 1, -1, 0] * 8, dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [d for d in INTEGERS if d.kind == "i"])
def test_no_instruction_leaves_the_lowest_integers_absolute_value_open(dtype: np.dtype) -> None:
    """PTX's ``abs`` does, and ptxas takes ``abs(x) < 0`` for False."""
    ptx = compiled(absolute_values, Out((64,), "f8"), lowest(dtype))
    assert not lines_with(ptx, "abs.s")
    (out,) = emulated(absolute_values, Out((64,), "f8"), lowest(dtype))
    assert out[:2].tolist() == [float(np.iinfo(dtype).min), 1.0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [d for d in INTEGERS if d.kind == "i"])
def test_the_lowest_integers_absolute_value(dtype: np.dtype) -> None:
    (out,) = on_device(absolute_values, Out((64,), "f8"), lowest(dtype))
    assert np.array_equal(out, emulated(absolute_values, Out((64,), "f8"), lowest(dtype))[0])


@dataclass(frozen=True)
class Coordinates(gk.Component):
    width: int = 14

    def of(self, m: int, n: int) -> tuple:
        """Python's integer arithmetic, with its floored division."""
        m, n = m - 40, n - 7
        d = n if n != 0 else 3
        return (m + n, m - n, m * n, m // d, m % d, m // 4, m % 8, -m, abs(m), min(m, n), max(m, n), m >> 2, m & 12,
                m if m < n else n)


def evaluate_coordinates(out: Any, case: Any) -> None:
    i = block_x() * 32 + thread_index()
    each(keep_value, case.of(i % 83, i // 83 % 17), out, i, case)


def expected_coordinates() -> np.ndarray:
    case = Coordinates()
    return np.array([case.of(i % 83, i // 83 % 17) for i in range(1408)], np.int32).reshape(-1)


def test_coordinate_arithmetic_in_the_emulator() -> None:
    (out,) = emulated(evaluate_coordinates, Out((1408 * 14,), "i4"), Coordinates(), blocks=44)
    assert np.array_equal(out, expected_coordinates())


@pytest.mark.gpu
def test_coordinate_arithmetic_is_pythons_on_the_gpu() -> None:
    (out,) = on_device(evaluate_coordinates, Out((1408 * 14,), "i4"), Coordinates(), blocks=44)
    assert np.array_equal(out, expected_coordinates())
