"""The table of arithmetic is NumPy's on both sides; a variable that several branches assign has one type."""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts, operators, transforms
from gemmkit.emulator.errors import CoordinateError
from gemmkit.emulator.functions import Coordinate, LongCoordinate, Real
from gemmkit.emulator.user_code import arguments
from gemmkit.lang import number_rules as rules
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.number_rules import Weak
from gemmkit.lang.scalars import numba_type
from gemmkit.ptx.special import thread_index
from tests.support.harness import Out, compiled, instructions
from tests.support.lang.typing import BF16, BOOL, FLOATS, INDEX, INTEGERS, NARROW, WEAK, result

# ==========================================================================================================================
# The table of arithmetic is NumPy's, and both sides keep it where Python's or Numba's own rules are others.

DTYPES = [np.dtype(x) for x in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")] + [*rules.OF_ML_DTYPES]
I1, U1, U4, I8, U8, F2, F4, F8 = (np.dtype(x) for x in ("i1", "u1", "u4", "i8", "u8", "f2", "f4", "f8"))
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
             "%": operator.mod, "**": operator.pow, "&": operator.and_, "|": operator.or_, "^": operator.xor,
             "<<": operator.lshift, ">>": operator.rshift, "<": operator.lt, "<=": operator.le, ">": operator.gt,
             ">=": operator.ge, "==": operator.eq, "!=": operator.ne}


# -- the table is NumPy's ----------------------------------------------------------------------------------------------

def rule(op: str, a: Any, b: Any) -> Any:
    try:
        return rules.result(op, rules.BOOL if a is True else a, rules.BOOL if b is True else b)
    except TypeError:
        return "refused"


def numpys(op: str, a: Any, b: Any) -> Any:
    x, y = (k.type(1) if isinstance(k, np.dtype) else k for k in (a, b))
    try:
        return np.asarray(OPERATORS[op](x, y)).dtype
    except (TypeError, OverflowError, ValueError):
        return "refused"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("op", OPERATORS)
def test_two_numbers(op: str) -> None:
    literals = (2, 2.5, -1, 300, 70000, True)
    pairs = [*itertools.product(DTYPES, DTYPES), *itertools.product(DTYPES, literals), *itertools.product(literals, DTYPES)]
    wrong = [(a, b, rule(op, a, b), numpys(op, a, b)) for a, b in pairs if rule(op, a, b) != numpys(op, a, b)]
    assert not wrong


@pytest.mark.parametrize("op", ["neg", "pos", "invert", "abs"])
def test_one_number(op: str) -> None:
    function = {"abs": abs}.get(op) or getattr(operator, op)
    for dtype in DTYPES:
        try:
            numpy: Any = np.asarray(function(dtype.type(1))).dtype
        except TypeError:
            numpy = "refused"
        try:
            ours: Any = rules.unary(op, dtype)
        except TypeError:
            ours = "refused"
        assert ours == numpy, dtype


def test_coordinates_are_weak() -> None:
    """The part of the table that is not NumPy's."""
    m, wide, alpha = Weak.COORDINATE, Weak.LONG_COORDINATE, Weak.FLOAT
    assert [rules.result(op, m, m) for op in ("+", "//", "%", "<<", "max")] == [m] * 5
    assert rules.result("/", m, m) is rules.result("*", m, 0.5) is rules.result("+", m, alpha) is alpha
    assert rules.result("+", m, wide) is rules.result("*", wide, 3) is wide
    for dtype in DTYPES:
        whole = rules.is_integer(dtype)
        assert rules.result("*", dtype, m) == (m if dtype == rules.BOOL or (whole and dtype.itemsize < 4) else dtype)
        assert rules.result("*", dtype, wide) == (wide if dtype == rules.BOOL or (whole and dtype.itemsize < 8) else dtype)
    for refused in (("+", m, 2**31), ("**", m, m), ("**", m, -1), ("&", m, alpha)):
        with pytest.raises(TypeError):
            rules.result(*refused)


# -- what differed --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("function, given, wanted", [
    (lambda x, y: x - y, (U1, U1), "u1"), (lambda x, y: x * y, (U4, U4), "u4"), (lambda x, y: x + y, (U8, I8), "f8"),
    (lambda x, y: x + y, (BOOL, BOOL), "?"), (lambda x: int(x), (U1,), "i8"), (lambda x: float(x), (F4,), "f8"),
    (lambda x, y: divmod(x, y)[1], (I1, U1), "i2"), (lambda x: round(x), (F2,), "i8"), (lambda x: -x, (U1,), "u1"),
    (lambda x: math.exp(x), (I1,), "f8"), (lambda x: x * math.sqrt(2), (F2,), "f2"), (lambda x: abs(x), (I1,), "i1"),
    (lambda x, y, z: max(x, y, z), (I1, U1, F2), "f4"), (lambda x: x**3, (I1,), "i1"), (lambda x, y: x / y, (I1, I1), "f8"),
    (lambda x, y: math.atan2(x, y), (BF16, F4), "f4"), (lambda x: pow(x, 2), (U4,), "u4"), (lambda x: ~x, (BOOL,), "?"),
])
def test_device_types(function: Any, given: Any, wanted: str) -> None:
    from gemmkit.lang.scalars import numpy_dtype

    assert numpy_dtype(result(function, *given)) == np.dtype(wanted)


def test_coordinates_on_the_device() -> None:
    assert result(lambda x, m: x * m, I1, INDEX) == result(lambda x, m: x * m, BOOL, INDEX) == INDEX
    assert result(lambda m: m**2, INDEX) == result(lambda m: math.floor(m), INDEX) == result(lambda m: round(m), INDEX) == INDEX
    assert result(lambda m: math.sqrt(m), INDEX) == result(lambda m, a: math.pow(m, a), INDEX, WEAK) == WEAK


@pytest.mark.parametrize("function, given, message", [
    (lambda x: x + 300, (U1,), "300 beside a uint8"), (lambda x: x * -1, (U4,), "-1 beside a uint32"),
    (lambda x: -x, (BOOL,), "of a boolean"), (lambda x, y: x - y, (BOOL, BOOL), "two booleans"),
    (lambda x, y: x & y, (U8, I8), "no integer type holds"), (lambda x: x & 1, (F4,), "of a float"),
    (lambda m: m * 3000000000, (INDEX,), "beside a coordinate of 32 bits"), (lambda m: 2**m, (INDEX,), "as exponent"),
    (lambda x: x**-1, (I1,), "to the power -1"), (lambda x: round(x, 2), (F4,), "round(x, digits)"),
    (lambda x: ~x, (F4,), "~ of a float"),
])
def test_what_is_refused(function: Any, given: Any, message: str) -> None:
    """When it is compiled, and in the emulator."""
    with pytest.raises(gk.ComponentError) as refused:
        result(function, *given)
    assert message in str(refused.value) and __file__ in str(refused.value)
    (twin,) = arguments([function])
    with pytest.raises((TypeError, OverflowError, ValueError)):
        twin(*[2 if d is INDEX else np.bool_(True) if d is BOOL else d.type(2) for d in given])


# -- in the emulator ---------------------------------------------------------------------------------------------------

def in_emulator(function: Any, *given: Any) -> Any:
    (twin,) = arguments([function])
    with np.errstate(all="ignore"):
        return twin(*given)


@pytest.mark.parametrize("function, given, wanted", [
    (lambda x: int(x), (np.uint8(3),), np.int64(3)), (lambda x: float(x), (np.float32(0.5),), np.float64(0.5)),
    (lambda x, m: x * m, (np.int8(100), 200), Coordinate(20000)), (lambda x: math.exp(x), (np.float16(0),), np.float32(1)),
    (lambda x: max(x, 0), (np.float32(-1),), np.float32(0)), (lambda x: min(1, x), (np.uint8(3),), np.uint8(1)),
    (lambda x, m: x + m, (np.uint32(1), -2), np.uint32(2**32 - 1)), (lambda x: round(x), (np.float32(2.5),), np.int64(2)),
    (lambda m, n: m / n, (1, 2), Real(0.5)), (lambda m: np.uint8(m), (300,), np.uint8(44)),
    (lambda x: math.log(x), (np.float32(0),), np.float32(-np.inf)), (lambda x: math.exp(x), (1000.0,), Real(math.inf)),
    (lambda x: math.floor(x), (np.float32(2.5),), np.float32(2)), (lambda n: sum_to(n), (5,), Coordinate(10)),
    (lambda x, y: (x > 0) + (y > 0), (np.float32(1), np.float32(1)), np.bool_(True)),
])
def test_emulated_functions(function: Any, given: Any, wanted: Any) -> None:
    out = in_emulator(function, *given)
    assert type(out) is type(wanted) and out == wanted


def sum_to(n: Any) -> Any:
    total = 0
    for i in range(n):
        total += i
    return total


def test_long_coordinates() -> None:
    out = LongCoordinate(2**40) * Coordinate(3) + 1
    assert type(out) is LongCoordinate and out == 3 * 2**40 + 1
    assert type(out * np.int32(2)) is LongCoordinate and type(out * np.float32(2)) is np.float32
    with pytest.raises(CoordinateError, match="64 bits"):
        LongCoordinate(2**62) * 2


@dataclass(frozen=True)
class Far(layouts.Layout):
    """A packed triangle that begins beyond 32 bits."""

    def element(self, data, i, j, shape):
        row = max(i, j) + 70000
        return data[row * (row + 1) // 2 + min(i, j)]


def test_coordinates_that_overflow_are_a_fault_with_its_line(rng: np.random.Generator) -> None:
    a = rng.random((16, 16), np.float32)
    with gk.emulate(), pytest.raises(CoordinateError) as fault:
        gk.matmul(a, a, global_a_layout=Far("float32"), gemm_shape=dict(M=16, N=16, K=16))
    assert "data[row * (row + 1) // 2" in str(fault.value) and fault.value.kernel_line.file == __file__


@dataclass(frozen=True)
class Scaled(epilogues.Epilogue):
    """Everything that a kernel gives to an epilogue."""

    by: gk.Scalar

    def __call__(self, x, m, n):
        return helper(x, m) + 0 * int(m * self.by == n)


def helper(x, m):
    return max(x, np.float32(0)) * math.exp(m * 0.0)


def test_users_code_meets_the_rules_wherever_it_is(rng: np.random.Generator) -> None:
    """Helpers, methods and fields: their names are the device's, NaN passes, and numbers are what they were."""
    a = rng.standard_normal((8, 8)).astype(np.float32)
    a[2, 3] = np.nan
    with gk.emulate():
        d = gk.matmul(a, np.eye(8, dtype=np.float32), epilogue=Scaled(3))
    expected = np.where(np.isnan(a @ np.eye(8, dtype=np.float32)), np.nan, np.maximum(a, 0))
    assert np.array_equal(d, expected, equal_nan=True)


# -- NaN -----------------------------------------------------------------------------------------------------------------

EXTREMA = [lambda x: max(x, 0), lambda x: max(0, x), lambda x: min(x, 1), lambda x: min(1.0, max(0.0, x))]


@pytest.mark.parametrize("number", range(len(EXTREMA)))
@pytest.mark.parametrize("dtype", [F2, BF16, F4, F8], ids=str)
def test_max_and_min_pass_nan_on(number: int, dtype: np.dtype) -> None:
    assert np.isnan(np.float64(in_emulator(EXTREMA[number], dtype.type(np.nan))))


def keep_greater(out: Any, x: Any) -> None:
    i = thread_index()
    out[i] = max(x[i], 0)


@pytest.mark.parametrize("dtype, instruction", [(F2, "max.NaN.f16"), (BF16, "max.NaN.bf16"), (F4, "max.NaN.f32")], ids=str)
def test_relu_is_one_instruction(dtype: np.dtype, instruction: str) -> None:
    counts = instructions(compiled(keep_greater, Out((32,), dtype), np.zeros(32, dtype)))
    assert counts[instruction] == 1
    assert not any(name.startswith(("setp", "selp", "cvt.f32", "cvt.rn")) for name in counts)


def test_clamp_and_semirings_pass_nan_on(rng: np.random.Generator) -> None:
    a = rng.random((8, 8), np.float32)
    a[1, 2] = np.nan
    b = rng.random((8, 8), np.float32)
    with gk.emulate():
        clamped = gk.matmul(a, b, epilogue=epilogues.Clamp(0.0, 1.0))
        shortest = gk.matmul(a, b, operator=operators.MIN_PLUS)
        kept = gk.matmul(a, b, transform_regs_to_shared_d=transforms.Map(lambda x: max(0.0, min(1.0, x))))
    for d in (clamped, shortest, kept):
        assert np.isnan(d[1]).all() and not np.isnan(np.delete(d, 1, 0)).any()


# ==========================================================================================================================
# Where ways meet, a number has one type in both worlds, or is refused.

F4_BRANCHES, F8_BRANCHES, I4, I8_BRANCHES, U1_BRANCHES = map(np.dtype, ("f4", "f8", "i4", "i8", "u1"))

# From Python 3.12 on a conditional expression that is returned is two returns.
EITHER = "is .* on one way and .* on another|it returns one of several types"


def chosen(x: Any, y: Any) -> Any:
    return x if x > 0 else y


def assigned(x: Any, y: Any) -> Any:
    if x > 0:
        z = x
    else:
        z = y
    return z


def returned(x: Any, y: Any) -> Any:
    if x > 0:
        return x
    return y


def summed(x: Any, y: Any) -> Any:
    for _ in range(4):
        y += x
    return y


WAYS = [chosen, assigned, returned]
MIXED = [(F4_BRANCHES, F8_BRANCHES), (F8_BRANCHES, F4_BRANCHES), (NARROW[0], F4_BRANCHES), (NARROW[0], BF16), (I4, I8_BRANCHES), (np.dtype("i1"), U1_BRANCHES), (I4, F4_BRANCHES), (F4_BRANCHES, BOOL), (I4, BOOL),
         (U1_BRANCHES, INDEX), (np.dtype("u4"), INDEX), (I4, WEAK), (np.dtype("c8"), F4_BRANCHES), (np.dtype("c8"), np.dtype("c16"))]


@pytest.mark.parametrize("ways", WAYS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("x", "y"), [pair for pair in MIXED if pair[0].kind != "c"], ids=str)
def test_two_types_are_refused(ways: Any, x: Any, y: Any) -> None:
    with pytest.raises(ComponentError, match=EITHER) as caught:
        result(ways, x, y)
    assert ways.__name__ in str(caught.value)


@pytest.mark.parametrize(("x", "y"), [pair for pair in MIXED if pair[0].kind == "c"], ids=str)
def test_two_types_of_complex_numbers_are_refused(x: Any, y: Any) -> None:
    with pytest.raises(ComponentError, match=EITHER):
        result(lambda x, y: x if x.real > 0 else y, x, y)


@pytest.mark.parametrize("x", [*FLOATS, *INTEGERS], ids=str)
def test_a_literal_takes_the_type_of_the_number_that_holds_it(x: np.dtype) -> None:
    assert result(lambda x: x if x > 0 else 0, x) == numba_type(x)
    if x.kind in "iu" and x.itemsize == 1:
        with pytest.raises(ComponentError, match=EITHER):
            result(lambda x: x if x > 0 else 300, x)
    if x.kind == "u":
        with pytest.raises(ComponentError, match=EITHER):
            result(lambda x: x if x > 0 else -1, x)
    if x.kind in "iu":
        with pytest.raises(ComponentError, match=EITHER):
            result(lambda x: x if x > 0 else 0.5, x)
    else:
        assert result(lambda x: x if x > 0 else 0.5, x) == numba_type(x)


def test_what_is_weak_takes_the_type_of_the_number() -> None:
    assert [result(chosen, x, y) for x, y in ((F4_BRANCHES, INDEX), (F4_BRANCHES, WEAK), (I4, INDEX), (I8_BRANCHES, INDEX), (INDEX, WEAK), (F4_BRANCHES, F4_BRANCHES))] == [
        numba_type(F4_BRANCHES), numba_type(F4_BRANCHES), numba_type(I4), numba_type(I8_BRANCHES), WEAK, numba_type(F4_BRANCHES)]
    assert result(lambda x: 1 if x > 0 else 0.5, F4_BRANCHES) == WEAK


def test_a_sum_keeps_its_type() -> None:
    assert result(summed, F4_BRANCHES, F4_BRANCHES) == result(summed, NARROW[0], F4_BRANCHES) == numba_type(F4_BRANCHES)
    with pytest.raises(ComponentError, match=EITHER):
        result(summed, F8_BRANCHES, F4_BRANCHES)


@pytest.mark.parametrize("literal", [2**63, 2**70, -2**63 - 1])
def test_a_literal_of_more_than_64_bits_by_itself_is_refused(literal: int) -> None:
    for returned_alone in (lambda x: literal, lambda x: (x, literal)):
        with pytest.raises(ComponentError, match=f"it returns {literal}, which 64 bits do not hold"):
            result(returned_alone, F4_BRANCHES)
    assert result(lambda x: x * literal, F4_BRANCHES) == result(lambda x: x if x > 0 else literal, F4_BRANCHES) == numba_type(F4_BRANCHES)
    assert result(lambda x: np.float32(literal), F4_BRANCHES) == numba_type(F4_BRANCHES)


def test_the_emulator_refuses_them_as_well() -> None:
    a = np.ones((4, 4), np.float32)
    with gk.emulate(), pytest.raises(ComponentError, match=EITHER):
        gk.matmul(a, a, epilogue=epilogues.Elementwise(lambda x: x if x > 0 else np.float64(1)),
                  operator=operators.FPUOp(M=16, N=16))
