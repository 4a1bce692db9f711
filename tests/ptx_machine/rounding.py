"""Sums, products and fused ones rounded once, in any of IEEE's directions.

A result is first had in float64 *rounded to odd* (towards zero, and then the last bit set if anything was cut off), which rounds to
any type of at most 51 bits as the exact one would. For float64 itself the error of a sum or product is had exactly (Knuth's and
Dekker's transformations), and decides; where those overflow, fractions of Python do.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from tests.ptx_machine.kinds import BF16

F64 = np.dtype("f8")
DIRECTIONS = {"rn": 0, "rna": 0, "rz": 0, "rm": -1, "rp": 1}
SPLIT = 134217729.0                     # 2^27 + 1
SAFE = 2.0**480, 2.0**-440              # magnitudes of factors whose product and its error are normal


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(a + b rounded, what is left)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    p = a * b
    x, y = SPLIT * a, SPLIT * b
    a1, b1 = x - (x - a), y - (y - b)
    a2, b2 = a - a1, b - b1
    return p, a2 * b2 - (((p - a1 * b1) - a2 * b1) - a1 * b2)


def odd(value: np.ndarray, left: np.ndarray) -> np.ndarray:
    """``value + left``, of which ``value`` is the nearest float64, rounded to odd."""
    value = np.atleast_1d(value)
    words = value.view(np.int64)
    is_even = (words & 1) == 0
    toward = np.where((left > 0) == (value > 0), 1, -1)                # one word up is away from zero
    changed = is_even & (left != 0) & np.isfinite(value) & np.isfinite(left)
    return np.where(changed, words + toward, words).view(np.float64)


def fused64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c of float32 or narrower numbers, in float64 rounded to odd."""
    product = a.astype(F64) * b.astype(F64)                            # exact: of 48 bits
    return odd(*two_sum(product, c.astype(F64)))


def narrowed(value: np.ndarray, dtype: np.dtype, mode: str = "rn") -> np.ndarray:
    """A float64 (exact, or rounded to odd) as a narrower float."""
    if dtype == BF16:
        return _bfloat16(value, mode)
    out = value.astype(dtype)
    if mode == "rn":
        return out
    back = out.astype(F64)
    zero = np.zeros_like(out)
    infinite = np.full_like(out, np.inf)
    down, up = np.nextafter(out, -infinite), np.nextafter(out, infinite)
    if mode == "rm":
        return np.where(back > value, down, out)
    if mode == "rp":
        return np.where(back < value, up, out)
    return np.where(np.abs(back) > np.abs(value), np.nextafter(out, zero), out)


def _bfloat16(value: np.ndarray, mode: str) -> np.ndarray:
    """By way of a float32 that is rounded to odd."""
    single = narrowed(value, np.dtype("f4"), "rz")
    words = np.atleast_1d(single).view(np.uint32)
    words = np.where((single.astype(F64) != value) & ~np.isnan(value) & np.isfinite(value), words | 1, words).astype(np.uint32)
    if mode == "rn":
        return words.view(np.float32).astype(BF16)
    up = {"rz": np.zeros_like(words), "rm": words >> 31, "rp": 1 - (words >> 31)}[mode].astype(np.uint32)
    rest = (words & 0xFFFF) != 0
    out = (words >> 16) + np.where(rest & np.isfinite(value), up, 0).astype(np.uint32)
    return np.where(np.isnan(value), 0x7FFF, out).astype(np.uint16).view(BF16)


# -- float64 --------------------------------------------------------------------------------------------------------------

def directed(value: np.ndarray, left: np.ndarray, mode: str) -> np.ndarray:
    """``value + left``, of which ``value`` is the nearest float64, in another direction."""
    if mode == "rn":
        return value
    if mode == "rz":
        return np.where((left != 0) & ((left > 0) != (value > 0)) & np.isfinite(value), np.nextafter(value, 0.0), value)
    step = (left < 0) if mode == "rm" else (left > 0)
    return np.where(step & np.isfinite(value), np.nextafter(value, np.inf * DIRECTIONS[mode]), value)


def add64(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    return directed(*two_sum(a, b), mode) if mode != "rn" else a + b


def multiply64(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    return a * b if mode == "rn" else fma64(a, b, -np.zeros_like(a), mode)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str) -> np.ndarray:
    """a b + c of float64 numbers, rounded once (Boldo and Melquiond's: the sum of the smaller parts is rounded to odd)."""
    a, b, c = (np.atleast_1d(x) for x in np.broadcast_arrays(a, b, c))
    high, low = two_product(a, b)
    total, rest = two_sum(c, low)
    value, error = two_sum(high, total)
    left = odd(*two_sum(rest, error))
    out, below = two_sum(value, left)
    out = directed(out, below, mode)
    out = np.where(np.isfinite(a) & np.isfinite(b) & np.isfinite(c), out, a * b + c)
    trivial = (a == 0) | (b == 0)
    out = np.where(trivial, a * b + c, out)
    sizes = [np.abs(x) for x in (a, b, c)]
    unsafe = np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & ~trivial & (
        (sizes[0] > SAFE[0]) | (sizes[1] > SAFE[0]) | (sizes[2] > SAFE[0]**2) | (sizes[0] < SAFE[1]) | (sizes[1] < SAFE[1])
        | ((out == 0) & (c != 0)))
    for n in np.flatnonzero(unsafe):
        out[n] = _exactly(float(a[n]), float(b[n]), float(c[n]), mode)
    return out


def _exactly(a: float, b: float, c: float, mode: str) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        near = float(exact)
    except OverflowError:
        near = math.inf if exact > 0 else -math.inf
        if mode == "rz" or mode == ("rm" if exact > 0 else "rp"):
            return math.nextafter(near, 0.0)
    if mode == "rn" or math.isinf(near) or Fraction(near) == exact:
        return near
    up = exact > Fraction(near)
    if mode == "rz":
        return math.nextafter(near, 0.0) if up != (near > 0) else near
    if mode == "rp":
        return math.nextafter(near, math.inf) if up else near
    return near if up else math.nextafter(near, -math.inf)


def flushed(x: Any) -> Any:
    """Subnormal numbers as zeros of their sign (``.ftz``)."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(np.zeros_like(x), x), x)


__all__ = ["add64", "flushed", "fma64", "fused64", "multiply64", "narrowed", "odd"]
