"""Reductions with names: what they are made of, and in which types.

| name | state | combine | result |
|---|---|---|---|
| "sum" | x | a + b | |
| "sumsq" | x x | a + b | |
| "max", "min" | x | the larger, the smaller; NaN where one is | |
| "argmax" | (x, coordinate) | the larger x, of equal ones the first; NaN is larger than all | the coordinate |
| "logsumexp" | (x, 1) | the larger x, and both sums scaled to it | x + log(sum) |

These are NumPy's answers: ``max`` and ``argmax`` of a row with a NaN are NaN and the first NaN's place.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gemmkit.epilogues.combine import Combine, working
from gemmkit.lang.component_class import dataclass

__all__ = ["NAMES", "combine_named"]


@dataclass(frozen=True)
class Named(Combine):
    """A reduction that comes with gemmkit."""

    name: str = ""

    def __repr__(self) -> str:
        return repr(self.name)


@dataclass(frozen=True)
class Extreme(Named):
    """The largest or smallest value: the identity is the type's own."""

    def state(self, accumulator: np.dtype, out: np.dtype) -> np.dtype:
        return working(accumulator, accumulator)


@dataclass(frozen=True)
class Placed(Named):
    """States of a value and a coordinate."""

    has_place = True

    def state(self, accumulator: np.dtype, out: np.dtype) -> np.dtype:
        value = working(accumulator, accumulator)
        return np.dtype([("value", value), ("place", f"i{value.itemsize}")])

    def made(self, state: np.dtype) -> np.dtype | None:
        return state["place"]


@dataclass(frozen=True)
class Scaled(Named):
    """States of the largest value and of a sum relative to it."""

    def state(self, accumulator: np.dtype, out: np.dtype) -> np.dtype:
        value = working(accumulator, out if out.kind == "f" else accumulator)
        return np.dtype([("largest", value), ("total", value)])

    def made(self, state: np.dtype) -> np.dtype | None:
        return state["total"]


def add(a: Any, b: Any) -> Any:
    return a + b


def square(x: Any) -> Any:
    return x * x


def larger(a: Any, b: Any) -> Any:
    return max(a, b)


def smaller(a: Any, b: Any) -> Any:
    return min(a, b)


def first_largest(a: Any, b: Any) -> Any:
    """The state with the larger value, of equal ones that of the first place; a NaN is larger than any number. Without
    branches: of each element there would be several, and Hopper's kernel has no registers left to keep across them."""
    is_earlier = b.place < a.place
    is_larger = (b.value > a.value) | ((b.value == a.value) & is_earlier)
    is_nan = (b.value != b.value) & ((a.value == a.value) | is_earlier)
    takes = is_larger | is_nan
    return b.value if takes else a.value, b.place if takes else a.place


def place(state: Any) -> Any:
    return state.place


def placed_column(x: Any, m: int, n: int) -> Any:
    return x, n


def placed_row(x: Any, m: int, n: int) -> Any:
    return x, m


def one(x: Any) -> Any:
    return x, 1


def scaled_sum(a: Any, b: Any) -> Any:
    """exp(largest) total of both. Equal ones, infinities among them, are not subtracted: that would be NaN."""
    top = max(a.largest, b.largest)
    return top, scaled(a, top) + scaled(b, top)


def scaled(a: Any, top: Any) -> Any:
    if a.largest == top:
        return a.total
    return a.total * math.exp(a.largest - top)


def log_of(state: Any) -> Any:
    """Of no values there is no logarithm to take."""
    if state.total == 0:
        return state.largest
    return state.largest + math.log(state.total)


_PAIR = np.dtype([("value", "f4"), ("place", "i4")])
NAMES = ("sum", "sumsq", "max", "min", "argmax", "logsumexp")


def combine_named(name: str, along_m: bool) -> Combine:
    """One of `NAMES`; ``along_m`` where it runs down columns, so that places are rows."""
    infinity = float("inf")
    if name == "argmax":
        return Placed(first_largest, (-infinity, 2**31 - 1), placed_row if along_m else placed_column, place, _PAIR, name)
    if name == "logsumexp":
        return Scaled(scaled_sum, (-infinity, 0.0), one, log_of, _PAIR, name)
    if name in ("max", "min"):
        return Extreme(*((larger, -infinity) if name == "max" else (smaller, infinity)), name=name)
    return Named(add, 0, square if name == "sumsq" else None, name=name)
