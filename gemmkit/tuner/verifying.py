"""Whether a candidate's result is the default mapping's, but for rounding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gemmkit.lang.records import part_dtypes
from gemmkit.runtime.array_info import ArrayInfo, whole


def elements(content: bytes, start: int, info: ArrayInfo) -> np.ndarray:
    """An array's elements in the bytes of a buffer that begins at the address ``start``."""
    info = whole(info)
    return np.ndarray(info.shape, info.dtype, content, info.pointer - start,
                      tuple(stride * info.dtype.itemsize for stride in info.strides))


def tolerance(dtype: np.dtype, accumulator: np.dtype, k: int) -> float:
    """How far results of two orders of summation may lie apart, as a part of the largest: some units of the last place of
    the result, and of the sums as many as a random walk of ``k`` steps makes. 0 for integers.

    >>> tolerance(np.dtype("i4"), np.dtype("i4"), 4096)
    0.0
    >>> 0.003 < tolerance(np.dtype("f2"), np.dtype("f4"), 4096) < 0.005
    True
    """
    return 0.0 if _epsilon(dtype) == 0.0 else 4 * _epsilon(dtype) + 4 * math.sqrt(max(1, k)) * _epsilon(accumulator)


def _epsilon(dtype: np.dtype) -> float:
    part = part_dtypes(dtype)[0]
    if part.kind in "iub":
        return 0.0
    try:
        return float(np.finfo(part).eps)
    except ValueError:                                        # of ml_dtypes
        import ml_dtypes

        return float(ml_dtypes.finfo(part).eps)


def difference(expected: np.ndarray, found: np.ndarray, allowed: float) -> str | None:
    """What differs more than it may, in words; None if nothing does."""
    if expected.dtype.names is not None:
        return next((f"{name}: {text}" for name in expected.dtype.names
                     if (text := difference(expected[name], found[name], allowed)) is not None), None)
    if expected.dtype.kind in "iub":
        wrong = int(np.count_nonzero(expected != found))
        return f"{wrong} of {expected.size} elements differ" if wrong else None
    if expected.dtype.kind == "c":
        return difference(expected.real, found.real, allowed) or difference(expected.imag, found.imag, allowed)
    wide: Any = np.float64 if expected.dtype.itemsize == 8 else np.float32
    one, other = expected.astype(wide), found.astype(wide)
    finite = np.isfinite(one)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    wrong = int(np.count_nonzero(~finite & ~same))
    if wrong:
        return f"{wrong} of {expected.size} elements differ in what is NaN or infinite"
    if not finite.any():
        return None
    largest = float(np.abs(one[finite]).max())
    apart = np.abs(one[finite] - other[finite])
    most = float(apart.max()) if np.isfinite(apart).all() else math.inf
    if most <= allowed * largest:
        return None
    return f"elements differ by up to {most:.3g}, the largest is {largest:.3g}, and {allowed * largest:.3g} is allowed"
