"""One matrix of two arrays, side by side or one above the other: what a join of any number of arrays is made of."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import numpy as np

from gemmkit.components import Array, Component, Scalar
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import join
from gemmkit.lang.registers import generate
from gemmkit.lang.values import convert, convert_all
from gemmkit.lang.views import either
from gemmkit.layouts.base import WIDE, GlobalLayout, load_elements
from gemmkit.ptx.words import load_words
from gemmkit.runtime.arrays import ArrayInfo, info_of
from gemmkit.tiling import Tile, translate

GRAIN = 256                            # elements: the longest tile of a block along a boundary


@dataclass(frozen=True)
class Part(Component):
    """An array that a layout holds beside the operand's own: of a stack's products each has a matrix of it
    (`gemmkit.adapters`)."""

    array: Array

    array_names = MappingProxyType({"array": "a part of a Concat or Braid"})

    def __repr__(self) -> str:
        info = info_of(self.array)
        return f"Part(<array of shape {info.shape}>)"

    @property
    def info(self) -> ArrayInfo:
        """The array, or the first matrix of its stack."""
        info = info_of(self.array)
        return info._replace(shape=info.shape[-2:], strides=info.strides[-2:])


@dataclass(frozen=True)
class Joined(GlobalLayout):
    """A matrix whose first ``boundary`` rows (``axis`` 0) or columns (1) are ``first``'s and the others ``second``'s.

    ``first`` reads the operand's own array, ``second`` reads that of ``part``, which is a run-time argument as the operand's
    is. Either may be any layout that can be read, of one dtype; a ``first`` that is joined itself makes a join of three. The
    boundary is a run-time number; what it is a multiple of (``grain``, 1 to 256) is not, since a thread's tile is loaded in
    pieces of so many elements along ``axis``: each lies in one part, aligned as that part's array is. Of a block's tile that
    divides it TMA brings all from one array.

    Raises TypeError for a part that is no layout, and ValueError for dtypes that differ and an ``axis`` other than 0 and 1.
    `gemmkit.Concat` makes one from arrays.

    >>> import numpy as np
    >>> from gemmkit.layouts import RowMajor
    >>> x, h = np.float32([[1, 2]]), np.float32([[3]])
    >>> wide = Joined(RowMajor("float32"), RowMajor("float32"), h, axis=1, boundary=2)
    >>> [float(wide.element(x, 0, k, None)) for k in range(3)]
    [1.0, 2.0, 3.0]
    """

    first: Any
    second: Any
    part: Part
    axis: int
    boundary: Scalar
    grain: int

    def __init__(self, first: GlobalLayout, second: GlobalLayout, array: Any, axis: int, boundary: int):
        for name, part in (("first", first), ("second", second)):
            if not isinstance(part, GlobalLayout):
                raise TypeError(f"Joined({name}={part!r}): a Layout is needed, for example RowMajor('float16')")
        if first.dtype != second.dtype:
            raise ValueError(f"Joined: first has dtype {first.dtype} and second {second.dtype}; convert one of the arrays")
        if axis not in (0, 1):
            raise ValueError(f"Joined(axis={axis!r}): 0 (rows above rows) or 1 (columns beside columns) is needed")
        if isinstance(boundary, bool) or not isinstance(boundary, (int, np.integer)) or boundary < 0:
            raise TypeError(f"Joined(boundary={boundary!r}): a number of rows or columns is needed, 0 or more")
        grain = math.gcd(GRAIN, int(boundary), first.grain if isinstance(first, Joined) else 0)
        fields = dict(dtype=first.dtype, first=first, second=second, part=Part(array), axis=axis, boundary=boundary,
                      grain=grain)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    # -- device methods ---------------------------------------------------------------------------------------------

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        if self.is_alike:
            view = self.view(data, i, j)
            own = self.own(i, j)
            i, j = i - self.rows(own), j - self.columns(own)
            return convert(self.dtype, self.leaf.element(view, i, j, shape))
        if self.is_first(i, j):
            return convert(self.dtype, self.first.element(data, i, j, shape))
        return convert(self.dtype, self.second.element(self.part.array, i - self.rows(self.boundary),
                                                       j - self.columns(self.boundary), shape))

    def load(self, data: Any, tile: Any, shape: Any) -> tuple:
        if self.grain % tile.size[self.axis] == 0:
            return self.load_part(data, tile, shape)
        if tile.size[self.axis] == tile.count and tile.count % self.grain == 0:
            return join(generate(tile.count // self.grain, lambda n: self.load_part(data, self.piece_of(tile, n), shape)))
        return load_elements(self, data, tile, shape)

    def load_part(self, data: Any, tile: Any, shape: Any) -> tuple:
        """What `load` gives, of a tile that lies in one part."""
        i, j = tile.index[0], tile.index[1]
        if self.is_alike:
            own = self.own(i, j)
            return self.leaf.load(self.view(data, i, j), translate(tile, -self.rows(own), -self.columns(own)), shape)
        if self.is_first(i, j):
            return convert_all(self.dtype, self.first.load(data, tile, shape))
        own_tile = translate(tile, -self.rows(self.boundary), -self.columns(self.boundary))
        return convert_all(self.dtype, self.second.load(self.part.array, own_tile, shape))

    def load_packed(self, data: Any, tile: Any, shape: Any) -> tuple:
        """What `load` gives, in 32-bit words, of a tile that it `packs`."""
        i, j = tile.index[0], tile.index[1]
        own = self.own(i, j)
        place = translate(tile, -self.rows(own), -self.columns(own))
        return load_words(self.view(data, i, j), self.line_axis, place.base, place.offset, tile.count)

    def piece_of(self, tile: Any, n: int) -> Any:
        """The ``n``-th piece of a tile that is a line along ``axis``."""
        return translate(self.piece, tile.index[0] + self.rows(n * self.grain), tile.index[1] + self.columns(n * self.grain))

    def found(self, data: Any, i: int, j: int) -> tuple:
        """The array that has an element, where all parts are alike, and the element's row and column in it."""
        own = self.own(i, j)
        return self.view(data, i, j), i - self.rows(own), j - self.columns(own)

    def view(self, data: Any, i: int, j: int) -> Any:
        """The array that has an element, where all parts are alike."""
        if self.is_nested:
            return either(self.is_first(i, j), self.first.view(data, i, j), self.part.array)
        return either(self.is_first(i, j), data, self.part.array)

    def part_of(self, i: int, j: int) -> int:
        """The number of the part that has an element."""
        if self.is_nested:
            return self.first.part_of(i, j) if self.is_first(i, j) else self.last
        return 0 if self.is_first(i, j) else 1

    def own(self, i: int, j: int) -> int:
        """Where along ``axis`` the part begins that has an element."""
        if self.is_nested:
            return self.first.own(i, j) if self.is_first(i, j) else self.boundary
        return 0 if self.is_first(i, j) else self.boundary

    def rows(self, along: int) -> int:
        """A distance along ``axis`` as one of rows."""
        return along if self.is_above else 0

    def columns(self, along: int) -> int:
        return 0 if self.is_above else along

    def is_first(self, i: int, j: int) -> bool:
        return (i if self.is_above else j) < self.boundary

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def is_above(self) -> bool:
        """Whether rows are joined, rather than columns."""
        return self.axis == 0

    @property
    def is_nested(self) -> bool:
        return isinstance(self.first, Joined)

    @property
    def leaf(self) -> GlobalLayout:
        """The layout of the first part's array."""
        return self.first.leaf if isinstance(self.first, Joined) else self.first

    @property
    def is_alike(self) -> bool:
        """Whether one layout reads all parts, so that a choice among arrays stands for one among loads."""
        own = self.first.is_alike and self.first.axis == self.axis if isinstance(self.first, Joined) else self.leaf.is_plain
        return own and self.second.is_plain and type(self.second) is type(self.leaf)

    @property
    def is_found(self) -> bool:
        """Whether `found` finds any element."""
        return self.is_alike

    @property
    def paths(self) -> list[tuple[str, ...]]:
        """The fields to the arrays behind the operand's own."""
        first = self.first.paths if isinstance(self.first, Joined) else []
        return [*(("first", *path) for path in first), ("part", "array")]

    @property
    def last(self) -> int:
        """The number of the last part; the operand's own array is part 0."""
        return 1 + (self.first.last if isinstance(self.first, Joined) else 0)

    @property
    def infos(self) -> list[ArrayInfo]:
        """The arrays behind the operand's own."""
        return [*(self.first.infos if isinstance(self.first, Joined) else ()), self.part.info]

    @property
    def neighbours(self) -> int:
        return min(int(self.grain), WIDE) if self.axis == self.line_axis else WIDE

    def packs(self, tile: Any) -> bool:
        """Whether `load_packed` loads tiles of threads such as this: lines, each in one part."""
        if not self.is_alike or self.grain % tile.extents[self.axis]:
            return False
        is_line = tile.extents[self.line_axis] == tile.count and tile.count * self.dtype.itemsize % 4 == 0
        return bool(is_line and self.dtype.names is None)

    @property
    def line_axis(self) -> int:
        leaf: Any = self.leaf
        return int(leaf.axis)

    @property
    def piece(self) -> Tile:
        return Tile(M=self.grain, N=1) if self.is_above else Tile(M=1, N=self.grain)

    @property
    def vector_axis(self) -> int | None:
        return self.first.vector_axis if self.first.vector_axis == self.second.vector_axis else None

    @property
    def contiguous_axis(self) -> int | None:
        return self.first.contiguous_axis if self.first.contiguous_axis == self.second.contiguous_axis else None

    def dimensions_of(self, array: ArrayInfo) -> int | None:
        return self.first.dimensions_of(array)

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        other = self.second.extents(self.part.info)
        across = other[1 - self.axis]
        along = None if other[self.axis] is None else self.boundary + other[self.axis]
        return (along, across) if self.is_above else (across, along)

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        begin = [rows, columns]
        begin[self.axis] = self.boundary
        rest = [rows, columns]
        rest[self.axis] -= self.boundary
        self.first.check(array, begin[0], begin[1], name)
        self.second.check(self.part.info, rest[0], rest[1], f"the part of {name} behind {self.boundary} "
                          f"{'rows' if self.is_above else 'columns'}")
