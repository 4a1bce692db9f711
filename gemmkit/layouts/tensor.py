"""Tensors as matrices: a hierarchical layout, whose rows and columns are made of several dimensions each.

A contraction is a matrix product in which M, N and K each stand for several dimensions. `Tensor` reads and writes such an
operand in place, so that nothing is transposed beforehand: row i is split into its coordinates by division with the
extents (a multiplication and a shift each), and the array's own strides do the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmkit.components import Component, Scalar
from gemmkit.lang.control import choose, each, join
from gemmkit.lang.registers import generate
from gemmkit.lang.values import fill
from gemmkit.layouts.base import Layout, element_of_tile, store_element_of_tile
from gemmkit.ptx.copy_async import offset_of
from gemmkit.ptx.division import divided, reciprocal
from gemmkit.ptx.memory import load_global, store_global
from gemmkit.runtime.arrays import ArrayInfo

INDEX = np.dtype(np.int32)


@dataclass(frozen=True)
class Modes(Component):
    """The dimensions that make up the rows (or columns) of a matrix: the fastest, and the ``rest``."""

    extent: Scalar
    multiplier: Scalar
    shift: Scalar
    rest: Any = None

    @property
    def is_last(self) -> bool:
        return self.rest is None

    @property
    def depth(self) -> int:
        """How many dimensions they are."""
        return 1 if self.rest is None else 1 + int(self.rest.depth)

    def split(self, linear: int) -> tuple:
        """A row's coordinate in each dimension, the fastest first."""
        return choose(self.is_last, _last, _more, self, linear)

    def nowhere(self) -> tuple:
        """No step along any of them."""
        return fill(INDEX, self.depth, 0)

    @staticmethod
    def of(extents: tuple[int, ...]) -> Modes:
        """Of run-time extents: others compile nothing."""
        rest = Modes.of(extents[1:]) if len(extents) > 1 else None
        return Modes(int(extents[0]), *reciprocal(max(1, int(extents[0]))), rest)

    def extents(self) -> tuple[int, ...]:
        return (self.extent, *(() if self.rest is None else self.rest.extents()))


@dataclass(frozen=True)
class Tensor(Layout):
    """A matrix that lies in an array of several dimensions: first those of its rows, then those of its columns.

    Row i is ``i = r0 + rows[0] * (r1 + rows[1] * (r2 + ...))``, in the array at ``[r0, r1, ..., c0, c1, ...]``: the first
    dimension of each group is the fastest. Any strides; transpose a view to bring its dimensions into this order.
    ``axis`` is 0 or 1 where neighbouring rows or columns are neighbours in memory (the first of their dimensions has
    stride 1), and ``vector`` of them, a compile-time number, stay within that dimension: then they are moved together.
    `Tensor.of` finds both.

    >>> x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    >>> Tensor("float32", (2, 3), (4,)).element(x, 3, 2, None) == x[1, 1, 2]
    np.True_
    """

    rows: Any
    columns: Any
    axis: int | None = None
    vector: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rows", "columns"):
            given = getattr(self, name)
            if not isinstance(given, Modes):
                fits = isinstance(given, tuple) and given and all(isinstance(n, (int, np.integer)) and n >= 0 for n in given)
                if not fits:
                    raise ValueError(f"Tensor({name}={given!r}): the extents of one dimension or more are needed")
                object.__setattr__(self, name, Modes.of(given))
        if self.axis not in (0, 1, None):
            raise ValueError(f"Tensor(axis={self.axis!r}): 0, 1 or None is needed")
        if self.vector not in (1, 2, 4, 8, 16):
            raise ValueError(f"Tensor(vector={self.vector!r}): 1, 2, 4, 8 or 16 is needed")

    @staticmethod
    def of(array: ArrayInfo, rows: int) -> Tensor:
        """The layout of an array whose first ``rows`` dimensions are the matrix's rows, and the others its columns."""
        firsts = (0, rows)
        axis = next((n for n in (1, 0) if array.strides[firsts[n]] == 1 and array.shape[firsts[n]] > 1), None)
        vector = 1 if axis is None else math.gcd(16, array.shape[firsts[axis]])
        return Tensor(array.dtype, array.shape[:rows], array.shape[rows:], axis, vector)

    def __repr__(self) -> str:
        return f"Tensor({self.dtype.name!r}, {self.rows.extents()}, {self.columns.extents()}, {self.axis}, {self.vector})"

    # -- device methods ---------------------------------------------------------------------------------------------

    def place(self, i: int, j: int) -> tuple:
        """Where row i, column j lies in the array."""
        return join((self.rows.split(i), self.columns.split(j)))

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        return data[self.place(i, j)]

    def store_element(self, data: Any, i: int, j: int, value: Any, shape: Any) -> None:
        data[self.place(i, j)] = value

    def load(self, data: Any, tile: Any, shape: Any) -> tuple:
        return choose(tile.size[self.line_axis] == tile.count, _load_along, _load_block, self, data, tile, shape)

    def store(self, data: Any, tile: Any, values: tuple, shape: Any) -> None:
        choose(tile.size[self.line_axis] == tile.count, _store_along, _store_block, self, data, tile, values, shape)

    def row_offset(self, data: Any, i: int) -> int:
        return offset_of(data, join((self.rows.split(i), self.columns.nowhere())))

    def column_offset(self, data: Any, j: int) -> int:
        return offset_of(data, join((self.rows.nowhere(), self.columns.split(j))))

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def is_separable(self) -> bool:
        return True

    @property
    def run(self) -> int:
        return self.vector

    @property
    def line_axis(self) -> int:
        return self.axis or 0

    @property
    def unit(self) -> int:
        """The array's dimension along which lines are moved."""
        return int(self.rows.depth) if self.axis == 1 else 0

    @property
    def origin(self) -> tuple[int, ...]:
        return (0,) * (self.rows.depth + self.columns.depth)

    @property
    def vector_axis(self) -> int | None:
        return self.axis if self.vector > 1 else None

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return math.prod(self.rows.extents()), math.prod(self.columns.extents())

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        if array is None:
            raise ValueError(f"{name} is None, and {self!r} needs an array")
        wanted = (*self.rows.extents(), *self.columns.extents())
        if array.shape != wanted:
            raise ValueError(f"{name} has shape {array.shape}, and its layout {self!r} is of an array of shape {wanted}")
        if array.dtype != self.dtype:
            raise ValueError(f"{name} has dtype {array.dtype} and its layout is {self!r}; convert the array")
        if (rows, columns) != self.extents(array):
            raise ValueError(f"{name} is {rows} x {columns}, and its layout {self!r} is of a matrix {self.extents(array)}")


# -- device code ------------------------------------------------------------------------------------------------------

def _last(modes: Any, linear: int) -> tuple:
    return (linear,)                                # the slowest: what is left


def _more(modes: Any, linear: int) -> tuple:
    quotient = divided(linear, modes.multiplier, modes.shift)
    return join(((linear - quotient * modes.extent,), modes.rest.split(quotient)))


def _load_along(layout: Any, data: Any, tile: Any, shape: Any) -> tuple:
    return choose(layout.vector % tile.count == 0, _load_line, _load_block, layout, data, tile, shape)


def _load_line(layout: Any, data: Any, tile: Any, shape: Any) -> tuple:
    return load_global(data, layout.unit, layout.place(tile.index[0], tile.index[1]), layout.origin, tile.count)


def _load_block(layout: Any, data: Any, tile: Any, shape: Any) -> tuple:
    return generate(tile.count, element_of_tile, layout, data, tile, shape)


def _store_along(layout: Any, data: Any, tile: Any, values: tuple, shape: Any) -> None:
    choose(layout.vector % tile.count == 0, _store_line, _store_block, layout, data, tile, values, shape)


def _store_line(layout: Any, data: Any, tile: Any, values: tuple, shape: Any) -> None:
    store_global(data, layout.unit, layout.place(tile.index[0], tile.index[1]), layout.origin, values)


def _store_block(layout: Any, data: Any, tile: Any, values: tuple, shape: Any) -> None:
    each(store_element_of_tile, values, layout, data, tile, shape)


__all__ = ["Modes", "Tensor"]
