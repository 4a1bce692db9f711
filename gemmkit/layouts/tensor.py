"""Tensors as matrices: a hierarchical layout, whose rows and columns are made of several dimensions each.

A contraction is a matrix product in which M, N and K each stand for several dimensions. `Matricised` reads and writes such
an operand in place, so that nothing is transposed beforehand: row i is split into its coordinates by division with the
extents (a multiplication and a shift each), and the array's own strides do the rest.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gemmkit.components import Component, Scalar
from gemmkit.lang.aggregates import fill
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, Numeric, View
from gemmkit.lang.registers import deal, each, generate, interleave, join
from gemmkit.layouts.base import GlobalLayout, ResultLayout, load_elements, store_elements
from gemmkit.ptx.arithmetic import divided, divisor_reciprocal
from gemmkit.ptx.copy_async import offset_of
from gemmkit.ptx.memory import interleave_words, load_global, load_words, near, store_global
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.shapes import span
from gemmkit.tiling import Tile

INDEX = np.dtype(np.int32)
COMBS = 1, 2, 4, 8, 16                  # vectors that a thread's registers can put in order
NEAR = 2**31


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

    def split(self, linear: int) -> tuple[Any, ...]:
        """A row's coordinate in each dimension, the fastest first."""
        if self.is_last:
            return (linear,)                        # the slowest: what is left
        quotient = divided(linear, self.multiplier, self.shift)
        return join(((linear - quotient * self.extent,), self.rest.split(quotient)))

    def nowhere(self) -> tuple[Any, ...]:
        """No step along any of them."""
        return fill(INDEX, self.depth, 0)

    @staticmethod
    def of(extents: tuple[int, ...]) -> Modes:
        """Of run-time extents: others compile nothing."""
        rest = Modes.of(extents[1:]) if len(extents) > 1 else None
        return Modes(int(extents[0]), *divisor_reciprocal(max(1, int(extents[0]))), rest)

    def extents(self) -> tuple[int, ...]:
        return (self.extent, *(() if self.rest is None else self.rest.extents()))


@dataclass(frozen=True)
class Matricised(GlobalLayout, ResultLayout):
    """A matrix that lies in an array of several dimensions: first those of its rows, then those of its columns.

    Row i is ``i = r0 + rows[0] * (r1 + rows[1] * (r2 + ...))``, in the array at ``[r0, r1, ..., c0, c1, ...]``: the first
    dimension of each group is the fastest. Strides may be any; transpose a view to bring its dimensions into this order.
    ``axis`` is 0 or 1 if neighbouring rows or columns are neighbours in memory (the first of their dimensions has stride 1).
    ``vector`` of them, a compile-time number, stay within that dimension, and are moved together.

    With ``comb`` = 2, 4, 8 or 16 the *second* of their dimensions has stride 1, and the first has exactly ``comb`` elements:
    neighbours in memory are ``comb`` apart in the matrix. A thread that moves ``run`` elements along ``axis`` moves vectors,
    and sorts the elements in its registers. With ``near`` all elements lie within 2**31 bytes of the first, so 32 bits are
    enough for their offsets. `Matricised.of` finds all four.

    >>> x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    >>> Matricised("float32", (2, 3), (4,)).element(x, 3, 2, None) == x[1, 1, 2]
    np.True_
    >>> from gemmkit.runtime.arrays import describe
    >>> y = np.arange(32, dtype=np.float32).reshape(4, 8).T.reshape(2, 4, 4)
    >>> layout = Matricised.of(describe(y.transpose(2, 1, 0)), 2)   # strides 8, 2 and 1
    >>> layout, layout.run
    (Matricised('float32', (4, 4), (2,), 0, 4, 4, near=True), 16)
    """

    rows: Any
    columns: Any
    axis: int | None = None
    vector: int = 1
    comb: int = 1
    near: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rows", "columns"):
            given = getattr(self, name)
            if not isinstance(given, Modes):
                fits = isinstance(given, tuple) and given and all(isinstance(n, (int, np.integer)) and n >= 0 for n in given)
                if not fits:
                    raise ValueError(f"Matricised({name}={given!r}): the extents of one dimension or more are needed")
                object.__setattr__(self, name, Modes.of(given))
        if self.axis not in (0, 1, None):
            raise ValueError(f"Matricised(axis={self.axis!r}): 0, 1 or None is needed")
        if self.vector not in (1, 2, 4, 8, 16):
            raise ValueError(f"Matricised(vector={self.vector!r}): 1, 2, 4, 8 or 16 is needed")
        if self.comb not in COMBS:
            raise ValueError(f"Matricised(comb={self.comb!r}): 1, 2, 4, 8 or 16 is needed")
        modes = self.columns if self.axis == 1 else self.rows
        if self.comb > 1 and (self.axis is None or modes.is_last or modes.extent != self.comb):
            raise ValueError(f"Matricised(comb={self.comb}): along axis={self.axis!r} there must be two dimensions or more, "
                             f"of which the first has {self.comb} elements")

    @staticmethod
    def of(array: ArrayInfo, rows: int) -> Matricised:
        """The layout of an array whose first ``rows`` dimensions are the matrix's rows, and the others its columns."""
        groups = ((1, array.shape[rows:], array.strides[rows:]), (0, array.shape[:rows], array.strides[:rows]))
        axis, vector, comb = None, 1, 1
        for at in (0, 1):
            for own, shape, strides in groups:
                fits = len(shape) > at and strides[at] == 1 and shape[at] > 1 and (at == 0 or shape[0] in COMBS[1:])
                if axis is None and fits:
                    axis, vector, comb = own, math.gcd(16, shape[at]), shape[0] if at else 1
        return Matricised(array.dtype, array.shape[:rows], array.shape[rows:], axis, vector, comb, _span(array) < NEAR)

    def __repr__(self) -> str:
        comb = f", {self.comb}" if self.comb > 1 else ""
        near = ", near=True" if self.near else ""
        return (f"Matricised({self.dtype.name!r}, {self.rows.extents()}, {self.columns.extents()}, {self.axis}, "
                f"{self.vector}{comb}{near})")

    # -- device methods ---------------------------------------------------------------------------------------------

    def place(self, i: int, j: int) -> tuple[Any, ...]:
        """Where row i, column j lies in the array."""
        return join((self.rows.split(i), self.columns.split(j)))

    def view(self, data: View) -> Any:
        """The array, as places in it are computed."""
        return near(data) if self.near else data

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        return self.view(data)[self.place(i, j)]

    def store_element(self, data: View, i: int, j: int, value: Numeric, shape: StackShape) -> None:
        self.view(data)[self.place(i, j)] = value

    def load(self, data: Any, tile: Any, shape: Any) -> Elements:
        if (tile.size[self.line_axis] == tile.count and tile.count % self.comb == 0
                and self.longest % tile.count == 0):
            place = self.place(tile.index[0], tile.index[1])
            return interleave(generate(self.comb, lambda n: load_global(
                self.view(data), self.unit, place, _towards(self, n), tile.count // self.comb)))
        return load_elements(self, data, tile, shape)

    def load_packed(self, data: Any, tile: Any, shape: StackShape) -> Elements:
        """What `load` gives, in 32-bit words, of a tile that it `packs`."""
        place = self.place(tile.index[0], tile.index[1])
        vectors = generate(self.comb, lambda n: load_words(self.view(data), self.unit, place, _towards(self, n),
                                                             tile.count // self.comb))
        return interleave_words(vectors) if self.is_narrow else interleave(vectors)

    def store(self, data: Any, tile: Tile, values: Elements, shape: StackShape) -> None:
        if (tile.size[self.line_axis] == tile.count and tile.count % self.comb == 0
                and self.longest % tile.count == 0):
            place = self.place(tile.index[0], tile.index[1])
            each(lambda vector, n: store_global(self.view(data), self.unit, place, _towards(self, n), vector),
                 deal(values, self.comb))
        else:
            store_elements(self, data, tile, values, shape)

    def store_neighbours(self, data: Any, i: int, j: int, values: Elements) -> None:
        """Store what lies next to each other in memory, from row i, column j on: of a comb the elements of one vector."""
        store_global(self.view(data), self.unit, self.place(i, j), _towards(self, 0), values)

    def row_offset(self, data: View, i: int) -> int:
        return offset_of(self.view(data), join((self.rows.split(i), self.columns.nowhere())))

    def column_offset(self, data: View, j: int) -> int:
        return offset_of(self.view(data), join((self.rows.nowhere(), self.columns.split(j))))

    # -- host -------------------------------------------------------------------------------------------------------

    def dimensions_of(self, array: ArrayInfo) -> int:
        return int(self.rows.depth + self.columns.depth)

    @property
    def is_separable(self) -> bool:
        return not self._is_own

    @property
    def neighbours(self) -> int:
        return self.vector if self.comb == 1 else 1

    @property
    def line_axis(self) -> int:
        return self.axis or 0

    @property
    def interleaved_dimension(self) -> int:
        """The array's dimension along which the vectors of a comb lie side by side: the first along ``axis``."""
        return int(self.rows.depth) if self.axis == 1 else 0

    @property
    def unit(self) -> int:
        """The array's dimension along which lines are moved."""
        return self.interleaved_dimension + (self.comb > 1)

    @property
    def longest(self) -> int:
        """The most neighbours along ``axis`` that lie in vectors of one length, all vectors of a comb."""
        return self.comb * self.vector

    @property
    def ndim(self) -> int:
        return int(self.rows.depth + self.columns.depth)

    @property
    def vector_axis(self) -> int | None:
        return self.axis if self.vector > 1 else None

    @property
    def contiguous_axis(self) -> int | None:
        return self.axis

    @property
    def run(self) -> int:
        return self.comb * math.gcd(self.vector, super().run) if self.vector > 1 else super().run

    @property
    def is_narrow(self) -> bool:
        """Whether the vectors of a comb cannot be put in order word by word."""
        return self.comb > 1 and self.dtype.itemsize == 2

    def packs(self, tile: Tile) -> bool:
        """Whether `load_packed` loads tiles of threads such as this."""
        count, size = tile.count // self.comb, self.dtype.itemsize
        is_run = tile.extents[self.line_axis] == tile.count == self.comb * count and self.vector % max(1, count) == 0
        in_words = count * size % 4 == 0 and (self.comb == 1 or size in (2, 4))
        return bool(is_run and in_words and self.dtype.names is None and not self._is_own)

    @property
    def _is_own(self) -> bool:
        """Whether a subclass reads it in a way of its own."""
        return type(self).load is not Matricised.load or type(self).element is not Matricised.element

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
        if self.near and _span(array) >= NEAR:
            raise ValueError(f"{name} has elements {_span(array)} bytes apart, and its layout {self!r} says that it is less "
                             "than 2**31: near=False is needed")
        if (rows, columns) != self.extents(array):
            raise ValueError(f"{name} is {rows} x {columns}, and its layout {self!r} is of a matrix {self.extents(array)}")


def _span(array: ArrayInfo) -> int:
    """How many bytes two of an array's elements lie apart at most."""
    return array.dtype.itemsize * span(zip(array.shape, array.strides))


# -- device code ------------------------------------------------------------------------------------------------------

def _towards(layout: Any, vector: int) -> tuple[Any, ...]:
    """How far vector number ``vector`` lies from the first along each dimension: constants."""
    return generate(layout.ndim, lambda dimension: vector if dimension == layout.interleaved_dimension else 0)
