"""What a product should be: float64 values, each with a bound on how far a right result in narrower types may be from it.

Whole numbers that a type can hold have a bound of 0, so most faults show exactly; other values get the roundings of every type
on the way. Integers are int64, wrapped where they are converted. Numbers of an algebra have a last axis of parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.machines import epsilon

FP8_SUM = 2.0**-13                     # what Hopper's tensor cores keep of a sum of 8-bit products
TF32 = 2.0**-10


@dataclass
class Bounded:
    """Values, and a bound on the error of each."""

    value: np.ndarray
    error: np.ndarray

    @staticmethod
    def of(x: np.ndarray) -> Bounded:
        """An operand as it is: without error."""
        if x.dtype.kind == "c":
            raise TypeError("complex numbers are given as parts")
        value = x.astype(np.int64 if x.dtype.kind in "iu" else np.float64)
        return Bounded(value, np.zeros(value.shape))

    @property
    def is_integer(self) -> bool:
        return self.value.dtype.kind == "i"

    @property
    def is_whole(self) -> bool:
        """Whether all are whole numbers without error."""
        with np.errstate(invalid="ignore"):
            return bool((self.error == 0).all() and (np.rint(self.value) == self.value).all())


def rounded(x: Bounded, dtype: Any, size: Any = None, times: float = 1.0, exact: bool = True) -> Bounded:
    """``x`` after ``times`` operations in ``dtype`` with numbers up to ``size`` (its own, if None).

    ``exact``: whole numbers remain whole in these operations.
    """
    dtype = np.dtype(dtype)
    if x.is_integer and dtype.kind in "iu":
        with np.errstate(all="ignore"):
            return Bounded(x.value.astype(dtype).astype(np.int64), x.error)
    value = x.value.astype(np.float64)
    if dtype.kind in "iu":
        raise TypeError("floats are not converted to integers here")
    info, eps = ml_dtypes.finfo(dtype), epsilon(dtype)
    size = np.abs(value) if size is None else np.maximum(np.abs(value), size)
    with np.errstate(all="ignore"):
        error = times * (eps * (size + x.error) + float(info.smallest_subnormal))
        if exact:
            error = np.where((x.error == 0) & (np.rint(value) == value) & (size <= 1 / eps), 0.0, error)
        # an infinity is right at once; where the type may overflow, nothing is known
        error = np.where(np.isinf(value), 0.0, np.where(size + x.error > float(info.max), math.inf, error + x.error))
    return Bounded(value, error)


def through(x: Bounded, f: Any, dtype: Any) -> Bounded:
    """An element-wise function (`tests.support.drawn_functions.Function`, bound to its table) in ``dtype``."""
    with np.errstate(all="ignore"):
        value, size = f.numpy(x.value), f.numpy(np.abs(x.value), True)
    if x.is_integer:
        return rounded(Bounded(value.astype(np.int64), x.error), dtype)
    slopes = f.slope(x.value) if callable(f.slope) else f.slope
    with np.errstate(all="ignore"):
        error = np.where(x.error == 0, 0.0, slopes * x.error)
    return rounded(Bounded(value.astype(np.float64), error), dtype, np.abs(size), f.operations, f.exact)


# -- products -------------------------------------------------------------------------------------------------------------

def product(a: Bounded, b: Bounded, c: Bounded | None, accumulator: Any, tensor: str = "") -> Bounded:
    """A B + C; ``tensor`` is the type of Hopper's operands, where they are less than they seem."""
    if a.is_integer:
        with np.errstate(all="ignore"):
            value = a.value @ b.value + (0 if c is None else c.value)
        return rounded(Bounded(value, np.zeros(value.shape)), accumulator)
    K = a.value.shape[1]
    magnitude = np.abs(a.value) @ np.abs(b.value) + (0 if c is None else np.abs(c.value))
    value = a.value @ b.value + (0 if c is None else c.value)
    error = np.abs(a.value) @ b.error + a.error @ (np.abs(b.value) + b.error) + (0 if c is None else c.error)
    eps = max(epsilon(accumulator), FP8_SUM if tensor == "fp8" else 0)
    whole = a.is_whole and b.is_whole and (c is None or c.is_whole)
    if tensor == "tf32" and not (whole and max(np.abs(x.value).max(initial=0) for x in (a, b)) <= 1 / TF32):
        error, whole = error + 2.5 * TF32 * magnitude, False
    if not (whole and magnitude.max(initial=0) <= 1 / eps):
        error = error + 2 * (K + 4) * eps * magnitude
    top = float(ml_dtypes.finfo(np.dtype(accumulator)).max)
    return Bounded(value, np.where(magnitude > top, math.inf, error))


def algebra_product(a: Bounded, b: Bounded, c: Bounded | None, accumulator: Any, table: Any) -> Bounded:
    """By the table: sums of real products of parts."""
    parts = len(table)
    shape = a.value.shape[0], b.value.shape[1], parts
    out = Bounded(np.zeros(shape), np.zeros(shape))
    for i in range(parts):
        for j in range(parts):
            if not any(table[i][j]):
                continue
            real = product(*(Bounded(np.ascontiguousarray(x.value[..., n]), np.ascontiguousarray(x.error[..., n]))
                             for x, n in ((a, i), (b, j))), None, accumulator)
            for k, coefficient in enumerate(table[i][j]):
                if coefficient:
                    out.value[..., k] += coefficient * real.value
                    out.error[..., k] += abs(coefficient) * (real.error + 4 * epsilon(accumulator) * np.abs(real.value)
                                                             * (real.error > 0))
    if c is not None:
        out = rounded(Bounded(out.value + c.value, out.error + c.error), accumulator, np.abs(out.value) + np.abs(c.value))
    return out


def semiring_product(name: str, a: Bounded, b: Bounded, c: Bounded | None, accumulator: Any) -> Bounded:
    """One k after the other, in float64 or int64."""
    accumulator = np.dtype(accumulator)
    zero: Any = {"min_plus": math.inf, "max_plus": -math.inf, "log_sum_exp": -math.inf}.get(name, 0)
    if accumulator.kind in "iu" and math.isinf(zero):
        zero = int(np.iinfo(accumulator).max if zero > 0 else np.iinfo(accumulator).min)
    shape, kind = (a.value.shape[0], b.value.shape[1]), np.int64 if a.is_integer else np.float64
    value, error = np.full(shape, zero, kind), np.zeros(shape)
    size = np.zeros(shape)
    if c is not None:
        value, error, size = c.value.astype(kind), c.error.copy(), np.abs(c.value)
    for k in range(a.value.shape[1]):
        x, y = a.value[:, k, None], b.value[None, k, :]
        value = _add(name, value, _multiply(name, x, y, zero), accumulator)
        with np.errstate(invalid="ignore"):
            error = np.maximum(error, (a.error[:, k, None] + b.error[None, k, :]) * (np.maximum(1, np.abs(y)) if name == "max_times" else 1))
            size = np.maximum(size, np.abs(x) + np.abs(y) + (np.abs(x * y) if name == "max_times" else 0))
    if a.is_integer:
        return Bounded(value, error)
    if name == "log_sum_exp":
        finite = np.where(np.isfinite(size), size, np.abs(np.where(np.isfinite(value), value, 0)) + 8)
        more = 8 * (a.value.shape[1] + 2) * epsilon(accumulator) * (finite + math.log(a.value.shape[1] + 2))
        return Bounded(value, np.where(np.isinf(value), 0.0, error + more))
    return rounded(Bounded(value, error), accumulator)


def _multiply(name: str, x: np.ndarray, y: np.ndarray, zero: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        if name == "max_times":
            return np.asarray(x * y)
        if name == "widest":
            return np.minimum(x, y)
        if name == "or_and":
            return np.asarray(x & y)
        out = np.asarray(x + y)
    return np.where((x == zero) | (y == zero), zero, out)


def _add(name: str, x: np.ndarray, y: np.ndarray, accumulator: np.dtype) -> np.ndarray:
    if name == "min_plus":
        return np.minimum(x, y)
    if name == "or_and":
        return np.asarray(x | y)
    if name == "log_sum_exp":
        with np.errstate(all="ignore"):
            return np.logaddexp(x, y)
    return np.maximum(x, y)


# -- comparison -----------------------------------------------------------------------------------------------------------

def assert_within(out: np.ndarray, expected: Bounded, what: str) -> None:
    """Each element within its bound; NaN never is, and an infinity only where the same one is expected."""
    value = expected.value
    assert out.shape == value.shape, f"{what} has shape {out.shape}, not {value.shape}"
    if expected.is_integer and out.dtype.kind in "iu":
        wrong = out.astype(np.int64) != value
    else:
        with np.errstate(invalid="ignore"):
            got = out.astype(np.float64)
            wrong = ~((got == value) | (np.abs(got - value) <= expected.error * (1 + 1e-9)) | np.isinf(expected.error))
    if wrong.any():
        at = tuple(int(n) for n in np.argwhere(wrong)[0])
        raise AssertionError(f"{what}: {int(wrong.sum())} of {wrong.size} elements are wrong; the first, {at}, is {out[at]!r} and "
                             f"should be {value[at]!r} within {expected.error[at]:.3g}")


__all__ = ["Bounded", "algebra_product", "assert_within", "product", "rounded", "semiring_product", "through"]
