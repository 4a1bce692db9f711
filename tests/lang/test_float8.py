"""8-bit floats, and `//` and `%` of floats, in device code: values are those of ml_dtypes and NumPy, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmkit.lang.aggregates import convert
from gemmkit.ptx.special import block_x, thread_index
from tests.lang.test_scalars import OF_ONE, device_dtype, numpys
from tests.ptx_machine.launch import run_ptx
from tests.support.harness import Out, compiled, emulated, leaves_nothing, lines_with, on_device, same_bits
from tests.support.lang.typing import BF16, BOOL, INDEX, result
from tests.support.machines import E4M3, E5M2

# ==========================================================================================================================
# 8-bit floats in device code: types and values are those of ml_dtypes, on a GPU to the bit.

FLOAT8 = [E4M3, E5M2]
F2, F4, F8 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
every_dtype = pytest.mark.parametrize("dtype", FLOAT8, ids=str)
both_machines = pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)],
                                        ids=["emulator", "gpu"])

OF_TWO = {"x + y": lambda x, y: x + y, "x - y": lambda x, y: x - y, "x * y": lambda x, y: x * y, "x / y": lambda x, y: x / y}


# -- types ------------------------------------------------------------------------------------------------------------

@every_dtype
@pytest.mark.parametrize("name", [name for name in OF_ONE if "//" not in name and "%" not in name])
def test_constants_beside_it(name: str, dtype: np.dtype) -> None:
    assert device_dtype(result(OF_ONE[name], dtype)) == numpys(OF_ONE[name], dtype.type(3))


@every_dtype
@pytest.mark.parametrize("name", OF_TWO)
def test_two_of_a_kind_stay_so(name: str, dtype: np.dtype) -> None:
    assert device_dtype(result(OF_TWO[name], dtype, dtype)) == numpys(OF_TWO[name], dtype.type(3), dtype.type(2)) == dtype


@every_dtype
@pytest.mark.parametrize("other", [F4, F8], ids=str)
def test_wider_floats_widen_it(other: np.dtype, dtype: np.dtype) -> None:
    assert device_dtype(result(OF_TWO["x * y"], dtype, other)) == numpys(OF_TWO["x * y"], dtype.type(3), other.type(2)) == other


@every_dtype
def test_comparisons_and_signs(dtype: np.dtype) -> None:
    for function in (lambda x, y: x < y, lambda x, y: x == y, lambda x, y: x >= y):
        assert result(function, dtype, dtype) == BOOL
    for function in (lambda x: -x, lambda x: abs(x), lambda x: x if x > 0 else 0):
        assert device_dtype(result(function, dtype)) == dtype
    assert device_dtype(result(lambda x, m: x * m, dtype, INDEX)) == dtype


# -- conversions ------------------------------------------------------------------------------------------------------

def every_pattern(dtype: np.dtype) -> np.ndarray:
    return np.arange(256).astype(np.uint8).view(dtype)


def convert_each(out: Any, a: Any, to: Any) -> None:
    i = block_x() * 32 + thread_index()
    out[i] = convert(to, a[i])


def converted(run: Any, a: np.ndarray, to: np.dtype) -> np.ndarray:
    return np.asarray(run(convert_each, Out(a.shape, to), a, to, blocks=a.size // 32)[0])


@both_machines
@every_dtype
@pytest.mark.parametrize("to", [F2, BF16, F4, F8], ids=str)
def test_every_bit_pattern_widens(to: np.dtype, dtype: np.dtype, run: Any) -> None:
    a = every_pattern(dtype)
    assert same_bits(converted(run, a, to), a.astype(to))


@both_machines
@every_dtype
def test_every_bit_pattern_comes_back(dtype: np.dtype, run: Any) -> None:
    """By way of float32, which holds them all: infinities and the sign of zero as well."""
    a = every_pattern(dtype)
    assert same_bits(converted(run, converted(run, a, F4), dtype), a)


def numbers(rng: np.random.Generator, dtype: np.dtype) -> np.ndarray:
    """float32 numbers of every magnitude, all halfway points and their neighbours, overflow, NaN, infinities."""
    values = np.unique(every_pattern(dtype).astype(F4))
    values = values[np.isfinite(values)]
    halfway = (values[1:].astype(F8) + values[:-1]).astype(F4) / 2
    largest = values.max()
    step = values[-1] - values[-2]
    over = np.array([largest + step * x for x in (0.25, 0.49, 0.5, 0.51, 0.75, 1, 1.5, 2, 100)], F4)
    special = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, 1e-30, -1e-30, 1e-45, 3e38, -3e38], F4)
    scattered = (rng.standard_normal(1024) * 2.0 ** rng.integers(-20, 18, 1024)).astype(F4)
    all_ = np.concatenate([values, halfway, np.nextafter(halfway, F4.type(np.inf)), np.nextafter(halfway, F4.type(-np.inf)), over,
                           -over, np.nextafter(over, F4.type(0)), special, scattered]).astype(F4)
    return np.resize(all_, -(-all_.size // 32) * 32)


@both_machines
@every_dtype
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_float32_is_rounded_as_ml_dtypes_does(dtype: np.dtype, run: Any, rng: np.random.Generator) -> None:
    """To nearest, ties to even; what is too large is an infinity of e5m2 and a NaN of e4m3fn, which has none."""
    a = numbers(rng, dtype)
    expected = a.astype(dtype)
    assert np.isnan(expected.astype(F4)).sum() >= 2 and same_bits(converted(run, a, dtype), expected)


@both_machines
@every_dtype
@pytest.mark.parametrize("given", [F2, BF16, F8], ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_other_floats_are_rounded(given: np.dtype, dtype: np.dtype, run: Any, rng: np.random.Generator) -> None:
    a = numbers(rng, dtype).astype(given)
    assert same_bits(converted(run, a, dtype), a.astype(dtype))


def arithmetic(out: Any, a: Any, b: Any) -> None:
    i = block_x() * 32 + thread_index()
    x, y = a[i], b[i]
    out[i, 0] = x + y
    out[i, 1] = x - y
    out[i, 2] = x * y
    out[i, 3] = x / y
    out[i, 4] = -x
    out[i, 5] = abs(y)
    out[i, 6] = x * y + x
    out[i, 7] = x if x > y else y


@pytest.mark.gpu
@every_dtype
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_arithmetic_is_ml_dtypes_to_the_bit(dtype: np.dtype, rng: np.random.Generator) -> None:
    """All bit patterns beside others: rounded after each operation."""
    a = np.tile(every_pattern(dtype), 16)
    b = a[rng.permutation(a.size)]
    out = Out((a.size, 8), dtype)
    (there,), (here,) = (run(arithmetic, out, a, b, blocks=a.size // 32) for run in (on_device, emulated))
    for n in range(8):
        assert same_bits(np.ascontiguousarray(there[:, n]), np.ascontiguousarray(here[:, n])), n


@every_dtype
def test_conversions_are_instructions(dtype: np.dtype) -> None:
    a = every_pattern(dtype)[:32]
    name = {E4M3: "e4m3", E5M2: "e5m2"}[dtype]
    ptx = compiled(convert_each, Out((32,), F4), a, F4)
    assert leaves_nothing(ptx) and len(lines_with(ptx, f"cvt.rn.f16x2.{name}x2")) == 1
    ptx = compiled(convert_each, Out((32,), dtype), a.astype(F4), dtype)
    assert leaves_nothing(ptx) and len(lines_with(ptx, f"cvt.rn.satfinite.{name}x2.f32")) == 1


# ==========================================================================================================================
# ``//`` and ``%`` of floats in compiled code: run as PTX, and NumPy's to the bit, with infinities, zeros and NaN.

SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 7.0, -7.0, 1e-3, -3e5, np.inf, -np.inf, np.nan)
PAIRS = [(x, y) for x in SPECIAL for y in SPECIAL]
COUNT = 32 * -(-len(PAIRS) // 32)


def dividing(out: Any, a: Any, b: Any) -> None:
    i = thread_index()
    out[i] = a[i] // b[i]
    out[i + COUNT] = a[i] % b[i]


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_division_of_floats_is_numpys(dtype: str) -> None:
    rng = np.random.default_rng(0)
    pairs = PAIRS + [tuple(rng.standard_normal(2) * 9) for _ in range(COUNT - len(PAIRS))]
    a, b = (np.array([pair[n] for pair in pairs]).astype(dtype) for n in (0, 1))
    out = np.full(2 * COUNT, np.nan, dtype)
    ptx = compiled(dividing, Out((2 * COUNT,), dtype), a, b, threads=COUNT)
    run_ptx(ptx, COUNT, 1, [out, 2 * COUNT, a, COUNT, b, COUNT], [out, a, b])
    with np.errstate(all="ignore"):
        expected = np.concatenate([a // b, a % b])
    wrong = [(x, y, ours, numpys) for x, y, ours, numpys in zip(np.tile(a, 2), np.tile(b, 2), out, expected)
             if ours.tobytes() != numpys.tobytes() and not (np.isnan(ours) and np.isnan(numpys))]
    assert not wrong, wrong[:8]
