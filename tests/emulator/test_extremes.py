"""Drawn extreme numbers through every function that docs/reference/device_code.md lists: what NumPy gives, and no error of Python's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, operators
from gemmkit import programs as gp
from gemmkit.components import Component, Scalar
from gemmkit.emulator import user_code
from gemmkit.emulator.errors import CoordinateError
from gemmkit.emulator.user_code import arguments, kernel_code
from gemmkit.epilogues import activations, reductions
from gemmkit.epilogues.base import Epilogue
from gemmkit.lang import number_rules
from gemmkit.ptx.special import udiv
from tests.lang.test_dialect import written
from tests.support.emulated import run
from tests.support.patches import Seeded

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float16": np.dtype("f2"), "bfloat16": BF16, "float32": np.dtype("f4"), "float64": np.dtype("f8"), "plain": None}


def power(x: Any, y: Any) -> Any:
    """C's pow. (NumPy's gives NaN or infinity for -inf ** 0.5, by the processor.)"""
    return np.array([_pow(float(a), float(b)) for a, b in zip(x, y)]).astype(x.dtype)


def _pow(x: float, y: float) -> float:
    sign = math.copysign(1, x) if math.isfinite(y) and y % 2 == 1 else 1.0
    try:
        return math.pow(x, y)
    except OverflowError:
        return sign * math.inf
    except ValueError:
        return sign * math.inf if x == 0 else math.nan


NUMPY = {"acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan", "atan2": "arctan2",
         "atanh": "arctanh", "pow": "power"}
MATH = {f"math.{name}": getattr(np, NUMPY.get(name, name), None)
        for name in (*number_rules.MATH_OF_ONE, *number_rules.MATH_OF_TWO, *number_rules.MATH_TO_WHOLE, *number_rules.MATH_TESTS)}
MATH["math.pow"] = power
#: What is written of x and y, and NumPy's function of their common type.
OPERATORS = {"x + y": np.add, "x - y": np.subtract, "x * y": np.multiply, "x / y": np.true_divide, "x // y": np.floor_divide,
             "x % y": np.remainder, "x ** y": power, "pow(x, y)": power, "divmod(x, y)[0]": np.floor_divide,
             "divmod(x, y)[1]": np.remainder, "max(x, y)": np.maximum, "min(x, y)": np.minimum, "abs(x)": np.abs,
             "-x": np.negative, "x < y": np.less, "x <= y": np.less_equal, "x > y": np.greater, "x >= y": np.greater_equal,
             "x == y": np.equal, "x != y": np.not_equal}


def extremes(dtype: np.dtype | None) -> np.ndarray:
    limits: Any = ml_dtypes.finfo(dtype or np.dtype("f8"))
    values = [0.0, -0.0, 1e-7, 0.5, -0.5, 1.0, -1.0, 1.5, -2.0, 3.0, -7.25, 88.8, -104.0, 710.0, -745.5, 1e4, 16777216.0, -1e9,
              1e30, -1e30, float(limits.max), float(limits.min), float(limits.smallest_normal), np.inf, -np.inf, np.nan,
              float(limits.smallest_subnormal), -float(limits.smallest_subnormal)]
    with np.errstate(all="ignore"):
        return np.array(values).astype(dtype or np.dtype("f8"))


def drawn(rng: np.random.Generator, dtype: np.dtype | None, count: int) -> list[Any]:
    """Numbers as a kernel has them: NumPy's scalars, or Python's own floats."""
    values = rng.choice(extremes(dtype), count)
    return [float(x) for x in values] if dtype is None else list(values)


@pytest.fixture
def quick(replaced: Seeded) -> None:
    """Without the compiler, which needs seconds for so many functions."""
    replaced(user_code, "tried", lambda *given: None)


def in_emulator(function: Any) -> Callable[..., Any]:
    (twin,) = arguments([function])
    return twin                                                # type: ignore[no-any-return]


def same(found: Any, wanted: Any, where: str, dtype: np.dtype | None = None) -> None:
    found, wanted = (np.asarray(x).astype("f8") for x in (found, wanted))
    eps = float(ml_dtypes.finfo(dtype or np.dtype("f8")).eps)
    np.testing.assert_allclose(found, wanted, rtol=4 * eps, atol=0, equal_nan=True, err_msg=where)


# -- operators and functions ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("other", DTYPES)
@pytest.mark.parametrize("one", DTYPES)
def test_operators(one: str, other: str, rng: np.random.Generator, quick: None) -> None:
    for form, exact in OPERATORS.items():
        function = in_emulator(written(f"return {form}", f"{form} {one} {other}", "x, y"))
        xs, ys = drawn(rng, DTYPES[one], 30), drawn(rng, DTYPES[other], 30)
        with np.errstate(all="ignore"):
            for x, y in zip(xs, ys):
                given = [x, y][:getattr(exact, "nin", 2)]
                kinds = [number_rules.Weak.FLOAT if isinstance(v, float) and type(v) is float else v.dtype for v in given]
                kind = number_rules.common(*kinds) if len(kinds) == 2 else kinds[0]
                common = np.dtype("f8") if kind is number_rules.Weak.FLOAT else kind
                same(function(x, y), exact(*[np.array([v]).astype(common) for v in given])[0], f"{form} of {x!r}, {y!r}", common)


@pytest.mark.parametrize("of", DTYPES)
def test_math(of: str, rng: np.random.Generator, quick: None) -> None:
    dtype = DTYPES[of]
    out = np.dtype("f4") if dtype is not None and dtype != np.float64 else np.dtype("f8")
    for form, exact in MATH.items():
        count = 2 if form[5:] in number_rules.MATH_OF_TWO else 1
        names = ", ".join("xy"[:count])
        function = in_emulator(written(f"return {form}({names})", f"{form} {of}", names))
        with np.errstate(all="ignore"):
            for _ in range(30):
                given = drawn(rng, dtype, count)
                found = function(*given)                       # those that NumPy has not: no error
                assert np.asarray(found).dtype in (out, np.dtype("?"))
                if exact is not None:
                    same(found, exact(*[np.array([x], np.float64) for x in given])[0].astype(out), f"{form} of {given}", out)


# -- gemmkit's own functions ------------------------------------------------------------------------------------------

def softly(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.float64(x)))


OWN: dict[Callable[..., Any], Callable[..., Any]] = {
    activations.relu: lambda x: np.maximum(np.float64(x), 0), activations.sigmoid: softly,
    activations.tanh: lambda x: np.tanh(np.float64(x)),
    operators.MIN_PLUS.add: np.minimum, operators.MAX_PLUS.add: np.maximum, reductions.larger: np.maximum,
    reductions.smaller: np.minimum, operators.LOG_SUM_EXP.add: np.logaddexp, operators.MAX_PLUS.mul: np.add,
    operators.MAX_TIMES.mul: np.multiply, gk.epilogues.fast.exp2: lambda x: np.exp2(np.float64(x)),
    gk.epilogues.fast.reciprocal: lambda x: 1 / np.float64(x), gk.epilogues.fast.tanh: lambda x: np.tanh(np.float64(x)),
    gk.epilogues.fast.log2: lambda x: np.log2(np.float64(x)), gk.epilogues.fast.maximum: np.fmax}
NEVER_RAISE = (activations.gelu, activations.gelu_tanh, activations.silu)


@pytest.mark.parametrize("of", DTYPES)
def test_own_functions(of: str, rng: np.random.Generator, quick: None) -> None:
    """Called by a kernel, and by a user's function."""
    dtype = DTYPES[of]
    for own in (*OWN, *NEVER_RAISE):
        count = 2 if own in OWN and OWN[own].__class__ is np.ufunc else 1
        calls = own, ((lambda x, f=own: f(x)) if count == 1 else (lambda x, y, f=own: f(x, y)))
        at_least = np.dtype("f4") if own in vars(gk.epilogues.fast).values() else dtype or np.dtype("f8")
        for call in map(in_emulator, calls):
            with np.errstate(all="ignore"):
                for _ in range(20):
                    given = drawn(rng, dtype, count)
                    found = call(*given)
                    if own in NEVER_RAISE:
                        assert np.isnan(np.float64(found)) or not np.isnan(given[0])
                        continue
                    if own in vars(gk.epilogues.fast).values():
                        given = [np.float32(x) for x in given]
                    exact = np.asarray(OWN[own](*[np.float64(x) for x in given])).astype(at_least).astype("f8")
                    eps = float(ml_dtypes.finfo(at_least).eps)
                    np.testing.assert_allclose(np.float64(found), exact, rtol=8 * eps, atol=4 * float(ml_dtypes.finfo(
                        at_least).smallest_normal), err_msg=f"{own} of {given}")


# -- in a product -----------------------------------------------------------------------------------------------------

CAPTURED = 0.0


def of_default(x: Any, nothing: Any = 0.0, *, large: Any = 1e300) -> Any:
    return x + 1 / nothing - large * large


@dataclass(frozen=True)
class Plain(Epilogue):
    """Everything that a plain float may come from."""

    field: float
    run_time: Scalar
    constant, negative = 0.0, -8.0

    def __call__(self, x: Any, m: int, n: int) -> Any:
        if n == 0:
            return x + 1 / self.field
        if n == 1:
            return x + 1 / self.run_time
        if n == 2:
            return 1 / self.constant - x
        if n == 3:
            return 2.5 % CAPTURED * x
        if n == 4:
            return of_default(x)
        if n == 5:
            return math.exp(1e3) - math.pow(1e300, 2.0) * math.e ** 1000 + x
        if n == 6:
            return m / 0.0 + x
        if n == 7:
            return self.negative ** 0.5 + x
        return max(1.0, math.nan) + x


@pytest.mark.parametrize("run_time", [0.0, -0.0, 1e-310])
def test_plain_floats(run_time: float) -> None:
    """Compiled by `tried`, too: literals are folded as the emulator computes them."""
    a, b = np.ones((3, 1), np.float32), np.ones((1, 9), np.float32)
    with gk.emulate():
        found = gk.matmul(a, b, epilogue=Plain(0.0, run_time))
    inf, nan = math.inf, math.nan
    wanted = [inf, math.copysign(inf, run_time), inf, nan, nan, nan, inf, nan, nan]
    np.testing.assert_array_equal(found[1:], [wanted] * 2)
    assert np.isnan(found[0, 6])                               # 0 / 0.0


def product(dtype: Any, x: np.ndarray, epilogue: Any) -> np.ndarray:
    """The epilogue of the matrix x."""
    a, b = np.zeros((x.shape[0], 1), dtype), np.zeros((1, x.shape[1]), dtype)
    with gk.emulate():
        return gk.matmul(a, b, epilogue=epilogues.Elementwise(lambda _, m, n: x[m, n]) | epilogue)  # type: ignore[no-any-return]


REDUCED = {"sum": lambda x: x.sum(1), "sumsq": lambda x: np.square(x).sum(1), "max": lambda x: x.max(1),
           "min": lambda x: x.min(1), "argmax": lambda x: x.argmax(1), "logsumexp": lambda x: np.logaddexp.reduce(x, 1)}


@pytest.mark.parametrize("name", REDUCED)
def test_reductions(name: str, rng: np.random.Generator, quick: None) -> None:
    x = rng.choice(extremes(np.dtype("f4")), (16, 5))
    found = np.zeros(16, np.int64 if name == "argmax" else np.float32)
    product(np.float32, x, epilogues.RowReduce(found, name))
    with np.errstate(all="ignore"):
        exact = REDUCED[name](x if name in ("sum", "sumsq", "argmax") else x.astype("f8"))
    if name in ("sum", "sumsq"):                               # in another order a sum may overflow, or cancel
        assert (np.isnan(found) == np.isnan(exact)).all() or not np.isfinite(x).all()
        return
    same(found, exact.astype(np.float32), name, np.dtype("f4"))


@pytest.mark.parametrize("call", [gk.softmax, gk.log_softmax, gk.layernorm, gk.rmsnorm])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rows(call: Callable[..., Any], dtype: str, rng: np.random.Generator) -> None:
    x = rng.choice(extremes(DTYPES[dtype]), (16, 3))
    with gk.emulate():
        found = call(x)
    held = np.isnan(x).any(1)
    assert np.isnan(found[held]).all()                         # NaN in a row is seen
    if call in (gk.softmax, gk.log_softmax):
        with np.errstate(all="ignore"):
            apart = x.astype("f8") - x.astype("f8").max(1, keepdims=True)
            exact = np.exp(apart) / np.exp(apart).sum(1, keepdims=True) if call is gk.softmax else (
                apart - np.log(np.exp(apart).sum(1, keepdims=True)))
            exact = exact.astype(found.dtype)
        np.testing.assert_allclose(found.astype("f8"), exact.astype("f8"), rtol=4e-3 if dtype == "float16" else 1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["MIN_PLUS", "MAX_PLUS", "MAX_TIMES", "LOG_SUM_EXP"])
def test_semirings(name: str, rng: np.random.Generator) -> None:
    a, b = (rng.choice(extremes(np.dtype("f4")), shape) for shape in ((9, 4), (4, 7)))
    if name == "MAX_TIMES":                                    # of numbers that are not negative: 0 is its zero
        a, b = np.abs(a), np.abs(b)
    add, mul = {"MIN_PLUS": (np.minimum, np.add), "MAX_PLUS": (np.maximum, np.add), "MAX_TIMES": (np.maximum, np.multiply),
                "LOG_SUM_EXP": (np.logaddexp, np.add)}[name]
    with gk.emulate():
        found = gk.matmul(a, b, operator=getattr(operators, name))
    with np.errstate(all="ignore"):
        exact = add.reduce(mul(a[:, :, None], b[None, :, :]), axis=1)
    same(found, exact, name, np.dtype("f4"))


@pytest.mark.parametrize("epilogue", [
    epilogues.GELU(), epilogues.GELU("tanh"), epilogues.SiLU(), epilogues.Tanh(), epilogues.ReLU(), epilogues.Clamp(-1e38, 6.0),
    epilogues.Scale(0.0), epilogues.Scale(3e38), epilogues.Softmax(), epilogues.RMSNorm(), epilogues.LayerNorm(),
    epilogues.CausalMask() | epilogues.Softmax()], ids=repr)
def test_epilogues(epilogue: Any, rng: np.random.Generator, quick: None) -> None:
    x = rng.choice(extremes(np.dtype("f4")), (16, 3))
    found = product(np.float32, x, epilogue)
    assert np.isnan(found[np.isnan(x[:, 0]), 0]).all()         # NaN is passed on: `max` drops none
    if isinstance(epilogue, epilogues.ReLU):
        np.testing.assert_array_equal(found, np.maximum(x, 0))


# -- whole numbers ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("function, words", [
    (lambda x, m, n: x + (m + 3) // n, "divided by zero"), (lambda x, m, n: x + m % n, "divided by zero"),
    (lambda x, m, n: x + int(x / 0), "int of inf"), (lambda x, m, n: x + np.int8(x * 1000), "int8 of 1000"),
    (lambda x, m, n: x + round(x * math.nan), "round of nan"), (lambda x, m, n: np.int32(2) ** np.int32(n - 1), "negative"),
])
def test_whole_numbers_that_no_device_has(function: Any, words: str) -> None:
    one = np.ones((1, 1), np.float32)
    with gk.emulate(), pytest.raises(CoordinateError, match=words) as fault:
        gk.matmul(one, one, epilogue=epilogues.Elementwise(function))
    assert fault.value.thread is not None and fault.value.kernel_line is not None
    assert fault.value.kernel_line.file == __file__


def test_division_in_a_kernel() -> None:
    def kernel() -> None:
        udiv(4, 0)

    with pytest.raises(CoordinateError, match="zero") as fault:
        run(kernel)
    assert fault.value.thread is not None and fault.value.kernel_line.text == "udiv(4, 0)"   # type: ignore[union-attr]


# -- what stays as it is ----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Index(Component):
    places: int


def test_index_arithmetic_stays_pythons() -> None:
    """Of gemmkit's own code that computes places nothing is another: neither functions nor numbers."""
    from gemmkit.kernels.sm80.kernel import multistage
    from gemmkit.kernels.sm90.kernel import warp_specialised

    index = Index(3)
    assert arguments([index, 7]) == [index, 7] and arguments([index])[0] is index
    assert kernel_code(multistage) is multistage and kernel_code(warp_specialised) is warp_specialised


# -- derived kernels --------------------------------------------------------------------------------------------------

@gk.program
def roots(x: Any, y: Any, scale: float) -> None:
    for m in gp.parallel(x.rows):
        y[m] = gp.sqrt(x[m]) / scale + gp.tanh(x[m].max(axis=1))


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_derived_rows(scale: float, rng: np.random.Generator) -> None:
    x = rng.choice(extremes(np.dtype("f4")), (9, 8))
    y = np.full_like(x, 7.0)
    with gk.emulate():
        roots(x, y, scale)
    with np.errstate(all="ignore"):
        exact = np.sqrt(x) / np.float32(scale) + np.tanh(x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(y, exact, rtol=1e-5)
