"""Strides, and the modes of one dimension: (extent, stride) pairs, the fastest first.

What `gemmkit.shapes` says of dimensions is computed here: which modes visit every second element of a dimension, and
where tiles of one begin.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Mode = tuple[Any, Any]                                        # (extent, stride)
Modes = tuple[Mode, ...]                                      # of one dimension, the fastest first
NOTHING: Modes = ((1, 0),)                                    # a dimension of one element


class ShapeError(ValueError):
    """Shapes, tiles or coordinates that do not go together."""


class Step(tuple):
    """A stride of several parts: how far one coordinate leads along each dimension of what is indexed.

    >>> Step((1, 0)) * 3 + Step((0, 2))
    (3, 2)
    """

    __slots__ = ()

    def __mul__(self, count: Any) -> Step:
        return Step(0 if is_number(part, 0) else count if is_number(part, 1) else part * count for part in self)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Step:
        return self if is_number(other, 0) else Step(map(plus, self, other))

    __radd__ = __add__


def walk(dim: Modes, i: Any) -> Any:
    """The offset of one dimension's coordinate: its digits, the first the fastest, times their strides."""
    total: Any = 0
    for extent, stride in dim[:-1]:
        total, i = total + stride * (i % extent), i // extent
    return total + (i if is_number(dim[-1][1], 1) else dim[-1][1] * i)        # a Step multiplies, not a number


# -- the algebra of one dimension -----------------------------------------------------------------------------------------

def composed(dim: Modes, inner: Modes) -> Modes:
    return merged([mode for extent, stride in inner for mode in every(dim, extent, stride)])


def every(dim: Modes, count: Any, apart: int) -> list[Mode]:
    """The modes that visit ``count`` coordinates of a dimension, ``apart`` from each other, from the first on."""
    out, refused = [], f"{count} elements {apart} apart are none of its own strides"
    left, skip = count, apart
    for extent, stride in dim:
        if left == 1:
            break
        if extent is not None and skip >= extent:
            if skip % extent:
                raise ShapeError(refused)
            skip //= extent
            continue
        if extent is None:
            out.append((left, stride * skip))
            left = 1
            break
        if extent % skip:
            raise ShapeError(refused)
        there = extent // skip
        take = there if left is None else min(left, there)
        if left is not None and (left % take or (left < there and there % take)):
            raise ShapeError(refused)
        out.append((take, stride * skip))
        left, skip = None if left is None else left // take, 1
    if left not in (1, None):
        raise ShapeError(f"{count} elements {apart} apart are more than there are")
    return out


def complement(tiler: Modes, extent: int | None) -> Modes:
    out, at = [], 1
    for count, stride in sorted((m for m in tiler if m[0] != 1), key=lambda mode: mode[1]):
        if stride < at or stride % at:
            raise ShapeError("such tiles overlap")
        if stride > at:
            out.append((stride // at, at))
        at = count * stride
    if extent is not None and extent % at:
        raise ShapeError(f"{at} elements (a tile, and what lies between its elements) do not divide {extent}")
    return (*out, (None if extent is None else extent // at, at))


def merged(modes: Iterable[Mode]) -> Modes:
    out: list[Mode] = []
    for extent, stride in modes:
        if extent == 1:
            continue
        if out and out[-1][0] is not None and out[-1][1] * out[-1][0] == stride:
            out[-1] = (None if extent is None else out[-1][0] * extent, out[-1][1])
        else:
            out.append((extent, stride))
    return tuple(out) or NOTHING


def span(modes: Iterable[Mode]) -> int:
    """How far the last element lies from the first, whichever way the strides lead; none from no element.

    >>> span([(4, 1), (2, -8)])
    11
    """
    return sum((extent - 1) * abs(stride) for extent, stride in modes if extent > 1)


# -- numbers ----------------------------------------------------------------------------------------------------------

def is_number(value: Any, number: int) -> bool:
    """Whether it is this number, and no run-time number, of which nothing is known."""
    return type(value) is int and value == number


def plus(a: Any, b: Any) -> Any:
    return b if is_number(a, 0) else a if is_number(b, 0) else a + b


def backwards(items: Any) -> tuple:
    return tuple(reversed(items))


def flat(dim: Any, stride: Any) -> Iterable[Mode]:
    if isinstance(dim, tuple):
        if type(stride) is not tuple or len(stride) != len(dim):
            raise ShapeError(f"the dimension {dim} has the strides {stride}; give one for each of its {len(dim)} parts")
        for d, s in zip(dim, stride):
            yield from flat(d, s)
        return
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 1):
        raise ShapeError(f"an extent is {dim!r}; give a whole number of at least 1, or None where it is known at run time")
    if isinstance(stride, tuple) and type(stride) is not Step:
        raise ShapeError(f"the dimension {dim} has the strides {stride}; give one number, or a Step")
    yield dim, stride


def row_major(dims: tuple) -> tuple:
    """Strides with the last dimension fastest; within a hierarchical one the first part is."""
    strides: list[Any] = []
    at = 1
    for dim in reversed(dims):
        made, at = runs(dim, at)
        strides.insert(0, made)
    return tuple(strides)


def runs(dim: Any, at: Any) -> tuple[Any, Any]:
    if not isinstance(dim, tuple):
        if dim is None:
            raise ShapeError("a dimension that is known at run time needs strides")
        return at, at * dim
    made = []
    for part in dim:
        stride, at = runs(part, at)
        made.append(stride)
    return tuple(made), at


def said(numbers: tuple) -> str:
    parts = ["?" if n is None else str(n).replace(" ", "") for n in numbers]
    return parts[0] if len(parts) == 1 else f"({','.join(parts)})"
