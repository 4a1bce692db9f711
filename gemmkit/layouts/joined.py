"""One matrix of two arrays, side by side or one above the other: what a join of any number of arrays is made of."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from gemmkit.components import Array, Component, Scalar
from gemmkit.lang.aggregates import convert, convert_all, fill
from gemmkit.lang.checks import check_dtype
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import Elements, View
from gemmkit.lang.memory import either
from gemmkit.lang.registers import generate, join
from gemmkit.layouts.base import WIDE, GlobalLayout, OfArray, ResultLayout, load_elements
from gemmkit.layouts.matrices import Matrix, transposed
from gemmkit.layouts.plain import ColMajor, FoldedColumns, Plain, RowMajor
from gemmkit.layouts.quantised import GroupQuantised
from gemmkit.ptx.memory import load_words
from gemmkit.ptx.special import udiv
from gemmkit.runtime.arrays import ArrayInfo, describe
from gemmkit.tiling import Tile, translate

GRAIN = 256                            # elements: the longest tile of a block along a boundary


@dataclass(frozen=True)
class PartArray(Component):
    """An array that a layout holds beside the operand's own: of a stack's products each has a matrix of it
    (`gemmkit.plans.adapters`)."""

    array: Array

    array_names = MappingProxyType({"array": "a part of a Concat or InterleavedColumns"})

    def __repr__(self) -> str:
        info = describe(self.array)
        return f"PartArray(<array of shape {info.shape}>)"

    @property
    def info(self) -> ArrayInfo:
        """The array, or the first matrix of its stack."""
        info = describe(self.array)
        return info._replace(shape=info.shape[-2:], strides=info.strides[-2:])


@dataclass(frozen=True)
class Joined(GlobalLayout):
    """A matrix whose first ``boundary`` rows (``axis`` 0) or columns (1) are ``first``'s and the others ``second``'s.

    ``first`` reads the operand's own array, ``second`` reads that of ``part``, which is a run-time argument as the operand's
    is. Both may be any readable layout of one dtype; a joined ``first`` makes a join of three. The boundary is a run-time
    number. Its divisor (``grain``, 1 to 256) is a constant, because a thread's tile is loaded in pieces of so many elements
    along ``axis``: each piece lies in one part, aligned as that part's array is. If a block's tile divides the boundary, TMA
    loads it from one array.

    Raises TypeError for a part that is no layout, and ValueError for dtypes that differ and an ``axis`` other than 0 and 1.
    `gemmkit.layouts.Concat` makes one from arrays.

    >>> import numpy as np
    >>> from gemmkit.layouts import RowMajor
    >>> x, h = np.float32([[1, 2]]), np.float32([[3]])
    >>> wide = Joined(RowMajor("float32"), RowMajor("float32"), h, axis=1, boundary=2)
    >>> [float(wide.element(x, 0, k, None)) for k in range(3)]
    [1.0, 2.0, 3.0]
    """

    first: Any
    second: Any
    part: PartArray
    axis: int
    boundary: Scalar
    grain: int

    def __init__(self, first: GlobalLayout, second: GlobalLayout, array: Array, axis: int, boundary: int):
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
        fields = dict(dtype=first.dtype, first=first, second=second, part=PartArray(array), axis=axis, boundary=boundary,
                      grain=grain)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    # -- device methods ---------------------------------------------------------------------------------------------

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        if self.is_alike:
            view = self.view(data, i, j)
            own = self.own(i, j)
            i, j = i - self.rows(own), j - self.columns(own)
            return convert(self.dtype, self.leaf.element(view, i, j, shape))
        if self.is_first(i, j):
            return convert(self.dtype, self.first.element(data, i, j, shape))
        return convert(self.dtype, self.second.element(self.part.array, i - self.rows(self.boundary),
                                                       j - self.columns(self.boundary), shape))

    def load(self, data: View, tile: Tile, shape: StackShape) -> Elements:
        if self.grain % tile.size[self.axis] == 0:
            return self.load_part(data, tile, shape)
        if tile.size[self.axis] == tile.count and tile.count % self.grain == 0:
            return join(generate(tile.count // self.grain, lambda n: self.load_part(data, self.piece_of(tile, n), shape)))
        return load_elements(self, data, tile, shape)

    def load_part(self, data: View, tile: Tile, shape: StackShape) -> Elements:
        """What `load` gives, of a tile that lies in one part."""
        i, j = tile.index[0], tile.index[1]
        if self.is_alike:
            own = self.own(i, j)
            return self.leaf.load(self.view(data, i, j), translate(tile, -self.rows(own), -self.columns(own)), shape)
        if self.is_first(i, j):
            return convert_all(self.dtype, self.first.load(data, tile, shape))
        own_tile = translate(tile, -self.rows(self.boundary), -self.columns(self.boundary))
        return convert_all(self.dtype, self.second.load(self.part.array, own_tile, shape))

    def load_packed(self, data: View, tile: Tile, shape: StackShape) -> Elements:
        """What `load` gives, in 32-bit words, of a tile that it `packs`."""
        i, j = tile.index[0], tile.index[1]
        own = self.own(i, j)
        place = translate(tile, -self.rows(own), -self.columns(own))
        return load_words(self.view(data, i, j), self.line_axis, place.base, place.offset, tile.count)

    def piece_of(self, tile: Tile, n: int) -> Any:
        """The ``n``-th piece of a tile that is a line along ``axis``."""
        return translate(self.piece, tile.index[0] + self.rows(n * self.grain), tile.index[1] + self.columns(n * self.grain))

    def found(self, data: View, i: int, j: int) -> tuple[Any, ...]:
        """The array that has an element, where all parts are alike, and the element's row and column in it."""
        own = self.own(i, j)
        return self.view(data, i, j), i - self.rows(own), j - self.columns(own)

    def view(self, data: View, i: int, j: int) -> Any:
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
            return self.first.own(i, j) if self.is_first(i, j) else self.boundary  # type: ignore[no-any-return]
        return 0 if self.is_first(i, j) else self.boundary

    def rows(self, along: int) -> int:
        """A distance along ``axis`` as one of rows."""
        return along if self.is_above else 0

    def columns(self, along: int) -> int:
        return 0 if self.is_above else along

    def is_first(self, i: int, j: int) -> bool:
        return (i if self.is_above else j) < self.boundary  # type: ignore[no-any-return]

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def is_above(self) -> bool:
        """Whether rows are joined, rather than columns."""
        return self.axis == 0

    @property
    def is_nested(self) -> bool:
        return isinstance(self.first, Joined)

    @property
    def storage(self) -> np.dtype:
        storage: np.dtype = self.first.storage
        return storage

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

    def packs(self, tile: Tile) -> bool:
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
        own: int | None = self.first.dimensions_of(array)
        return own

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


# --------------------------------------------------------------------------------------------------
# Several matrices as one whose columns are interleaved, so that one product computes those of all; and D of such a
# product.
#
# Columns are interleaved eight by eight: eight of the first part, the same eight of the second, and so on, then the next
# eight of the first. Why eight: the accumulators of every tensor-core instruction (mma.sync, wgmma) are fragments of
# eight columns, of which a thread has the same two in each. So the thread that has column j of one part has column j of
# all parts in registers of its own, and a function of them needs no exchange (`gemmkit.epilogues.Fold`). Eight columns
# of 16-bit elements are 16 bytes besides: what a thread loads at a time comes from one part.

WORD = np.dtype(np.uint32)
OCTET = 8                              # neighbouring columns of a part, and of an accumulator's fragment
MOST = 4                               # parts: the smallest tiles have 32 columns, eight of each


@dataclass(frozen=True)
class ColumnInterleaved(OfArray, GlobalLayout):
    """B of ``parts`` matrices of ``columns`` columns each, which ``layout`` has side by side.

    The kernel multiplies by ``slots`` parts, the next power of two, so a tile contains all parts of its columns. Elements
    are 0 in a slot without a part, and in the last eight columns beyond a part's end. `Folded` stores D.

    Raises ValueError for fewer than 2 or more than 4 parts. `gemmkit.layouts.InterleavedColumns` makes one from arrays.

    >>> import numpy as np
    >>> from gemmkit.layouts import RowMajor
    >>> side_by_side = np.float32([[*range(8), *range(100, 108)]])
    >>> interleaved = ColumnInterleaved(RowMajor("float32"), 8, 2)
    >>> [float(interleaved.element(side_by_side, 0, n, None)) for n in (0, 7, 8, 15)]
    [0.0, 7.0, 100.0, 107.0]
    """

    layout: Any
    columns: Scalar
    parts: int
    is_even: bool = False                        # whether the columns are a multiple of eight

    def __init__(self, layout: GlobalLayout, columns: int, parts: int, is_even: bool | None = None):
        if not isinstance(layout, GlobalLayout):
            raise TypeError(f"ColumnInterleaved(layout={layout!r}): a Layout is needed, for example RowMajor('float16')")
        if not isinstance(parts, int) or not 2 <= parts <= MOST:
            raise ValueError(f"ColumnInterleaved(parts={parts!r}): 2 to {MOST} are needed")
        if isinstance(columns, bool) or not isinstance(columns, (int, np.integer)) or columns < 0:
            raise TypeError(f"ColumnInterleaved(columns={columns!r}): give the columns of each part, 0 or more")
        is_even = columns % OCTET == 0 if is_even is None else is_even
        for name, value in dict(dtype=layout.dtype, layout=layout, columns=columns, parts=parts, is_even=is_even).items():
            object.__setattr__(self, name, value)

    # -- device methods ---------------------------------------------------------------------------------------------

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        part, column = self.part_of(j), self.column_of(j)
        if part < self.parts and column < self.columns:
            return convert(self.dtype, self.layout.element(data, i, part * self.columns + column, shape))
        return convert(self.dtype, 0)

    def load(self, data: View, tile: Tile, shape: StackShape) -> Elements:
        if self.begins_anywhere:
            return load_elements(self, data, tile, shape)
        if OCTET % tile.size[1] == 0:
            part, column = self.part_of(tile.index[1]), self.column_of(tile.index[1])
            own = translate(tile, 0, part * self.columns + column - tile.index[1])
            if self.is_full and self.is_even:
                return convert_all(self.dtype, self.layout.load(data, own, shape))
            if part < self.parts and column + tile.size[1] <= self.columns:
                return convert_all(self.dtype, self.layout.load(data, own, shape))
            if self.is_even:
                return fill(self.dtype, tile.count, 0)
        return load_elements(self, data, tile, shape)

    def load_packed(self, data: View, tile: Tile, shape: StackShape) -> Elements:
        """What `load` gives, in 32-bit words, of a tile that it `packs`."""
        part, column = self.part_of(tile.index[1]), self.column_of(tile.index[1])
        own = translate(tile, 0, part * self.columns + column - tile.index[1])
        if self.is_full:
            return self.layout.load_packed(data, own, shape)  # type: ignore[no-any-return]
        if part < self.parts:
            return self.layout.load_packed(data, own, shape)  # type: ignore[no-any-return]
        return fill(WORD, tile.count * self.itemsize // 4, 0)

    def found(self, data: View, i: int, j: int) -> tuple[Any, ...]:
        """The array that has an element, and the element's row and column in it."""
        return self.layout.found(data, i, self.part_of(j) * self.columns + self.column_of(j))  # type: ignore[no-any-return]

    def part_of(self, j: int) -> int:
        """Which part column ``j`` is of: ``parts`` or more where it is of none."""
        return udiv(j, OCTET) % self.slots

    def column_of(self, j: int) -> int:
        """Which of its part's columns it is."""
        return udiv(j, OCTET * self.slots) * OCTET + j % OCTET

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return slots_of(self.parts)

    @property
    def is_found(self) -> bool:
        """Whether `found` finds any element: there is none without a part."""
        return self.is_full and self.is_even and isinstance(self.layout, Joined) and self.layout.is_found

    @property
    def infos(self) -> list[ArrayInfo]:
        return list(self.layout.infos)

    @property
    def paths(self) -> list[tuple[str, ...]]:
        """The fields to the arrays behind the operand's own."""
        return [("layout", *path) for path in self.layout.paths]

    @property
    def line_axis(self) -> int:
        return int(self.layout.line_axis)

    @property
    def neighbours(self) -> int:
        return OCTET

    def packs(self, tile: Tile) -> bool:
        return self.is_even and OCTET % tile.extents[1] == 0 and self.layout.packs(tile)

    @property
    def begins_anywhere(self) -> bool:
        """Whether parts of one array begin where no vector does. (Joined ones know what boundaries are multiples of.)"""
        return not self.is_even and not (isinstance(self.layout, Joined) and self.layout.axis == 1)

    @property
    def itemsize(self) -> int:
        return int(self.dtype.itemsize)

    @property
    def is_full(self) -> bool:
        """Whether every slot has a part."""
        return self.parts == self.slots

    @property
    def run(self) -> int:
        return min(OCTET, super().run) if self.vector_axis == 1 else super().run

    def as_operand(self, name: str, transformed: bool) -> GlobalLayout:
        if name != "b":
            raise ConfigError(f"global_{name}_layout={self!r}: interleaved columns become columns of D: it can be B alone")
        return self

    def of_result(self, layout: ResultLayout) -> ResultLayout:
        return layout if isinstance(layout, Folded) else Folded(layout, self.columns, self.slots)

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return self.layout.extents(array)[0], interleaved_columns(self.columns, self.slots)

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        self.layout.check(array, rows, self.parts * self.columns, name)


@dataclass(frozen=True)
class Folded(FoldedColumns):
    """D of a product by a `ColumnInterleaved` B, of ``columns`` columns in the array; ``folds`` columns are computed for
    each.

    The kernel stores one value for all parts of a column, in the order of ``layout``; coordinates are those of D. A
    configuration with an interleaved B wraps its ``global_d_layout`` in this one.

    Raises TypeError for a layout that is not plain.
    """

    columns: Scalar
    folds: int

    def __init__(self, layout: ResultLayout, columns: int, folds: int):
        if not isinstance(layout, Plain):
            raise TypeError(f"out (global_d_layout={layout!r}) of a folded product: RowMajor or ColMajor is needed")
        for name, value in dict(dtype=layout.dtype, layout=layout, columns=columns, folds=folds).items():
            object.__setattr__(self, name, value)

    @property
    def is_separable(self) -> bool:
        return self.layout.is_separable

    def finished_columns(self, columns: int) -> int:
        return int(self.columns)

    def stored_columns(self, columns: int) -> int:
        return int(self.columns)

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return array.shape[0], interleaved_columns(self.columns, self.folds)


def slots_of(parts: int) -> int:
    """Parts that a tile has room for: the next power of two.

    >>> [slots_of(parts) for parts in (2, 3, 4)]
    [2, 4, 4]
    """
    return 1 << (parts - 1).bit_length()


def interleaved_columns(columns: int, slots: int) -> int:
    """Columns that a kernel computes of parts of ``columns`` each.

    >>> interleaved_columns(5, 2), interleaved_columns(0, 4)
    (16, 0)
    """
    return -(-columns // OCTET) * OCTET * slots


# --------------------------------------------------------------------------------------------------
# Operands of several arrays: matrices joined along an axis (`Concat`), or column by column for a fold
# (`InterleavedColumns`).
#
# Nothing is copied together. The kernel gets all arrays, and the operand's layout says from which of them an element
# comes (`gemmkit.layouts.Joined`), so that every kernel, transform and epilogue takes them as it takes one matrix.

class Concat(Matrix):
    """Matrices side by side (``axis`` 1) or one above the other (``axis`` 0), as `numpy.concatenate` has them, uncopied.

    For A or B of `gemmkit.matmul`, `gemmkit.plan` and `gemmkit.blas.gemmEx`, joined along M, N or K. The parts are arrays of
    any strides, of one library, dtype and device, with equally many rows (or columns) along the other axis. The matrices of
    stacks are joined (``axis`` -2 or -1) if their leading dimensions are equal. ``T`` is the transpose, with views of the
    parts.

    Raises TypeError for a part that is no array, ValueError for fewer than two parts, an ``axis`` that is none of a
    matrix's, and parts of which dtypes, devices, dimensions or extents do not fit each other.

    An LSTM cell's product: ``x w + h u``, with one accumulator.

    >>> import numpy as np, gemmkit as gk
    >>> x, h = np.float32([[1, 2]]), np.float32([[10]])
    >>> w, u = np.float32([[1, 0], [0, 1]]), np.float32([[3, -3]])
    >>> with gk.emulate():
    ...     gk.matmul(Concat(x, h, axis=1), Concat(w, u, axis=0)).tolist()
    [[31.0, -28.0]]
    """

    def __init__(self, *arrays: Array, axis: int):
        infos = _parts(arrays, "Concat")
        self.parts, self.axis = arrays, _axis(axis, infos[0])
        for n, info in enumerate(infos[1:], 1):
            _check_part(info, n, infos[0], 1 - self.axis, "Concat")
        super().__init__(arrays[0], joined(arrays, [_plain(info) for info in infos], infos, self.axis))

    @property
    def T(self) -> Concat:
        return Concat(*(transposed(part) for part in self.parts), axis=-1 - self.axis)


class InterleavedColumns(Matrix):
    """Matrices of one shape as the B of one product: D = Fold(f) of A W, A V, ...

    Takes 2 to 4 arrays of (K, N), or stacks of them, of any strides, and one library, dtype and device; or as many matrices
    of packed integers (`gemmkit.layouts.quantised.quantise`). The kernel interleaves their columns
    (`gemmkit.layouts.ColumnInterleaved` says how), so only ``epilogue=epilogues.Fold(f)`` can use the products: any other
    epilogue is refused. ``Concat(w, v, axis=1)`` gives the products side by side.

    Raises TypeError for a part that is neither, for an array beside packed integers, and for its transpose (interleave the
    transposes), ValueError for a number of parts other than 2 to 4 and for parts of which dtypes, devices or shapes differ.

    A gated linear unit, ``relu(x w) * (x v)``, in one kernel:

    >>> import numpy as np, gemmkit as gk
    >>> x, w, v = np.float32([[1, 2]]), np.float32([[1], [1]]), np.float32([[5], [0]])
    >>> with gk.emulate():
    ...     fold = gk.epilogues.Fold(lambda gate, up: max(gate, 0) * up)
    ...     gk.matmul(x, InterleavedColumns(w, v), epilogue=fold).tolist()
    [[15.0]]
    """

    def __init__(self, *arrays: Array | Matrix):
        packed = [of for of in arrays if isinstance(of, Matrix) and isinstance(of.layout, GroupQuantised)]
        if packed and len(packed) < len(arrays):
            raise TypeError("InterleavedColumns() got packed integers beside another part; quantise all parts, or none")
        infos = [_of_packed(of) for of in packed] if len(packed) > 1 else _parts(arrays, "InterleavedColumns")
        if len(arrays) > MOST:
            raise ValueError(f"InterleavedColumns() got {len(arrays)} arrays; {MOST} are the most")
        for n, info in enumerate(infos):
            for axis in (0, 1):
                _check_part(info, n, infos[0], axis, "InterleavedColumns")
        self.parts, self.columns = arrays, infos[0].shape[-1]
        layouts: list[Any] = [of.layout for of in packed] or [_plain(info) for info in infos]
        side_by_side = joined([of.array for of in packed] or arrays, layouts, infos, 1)
        super().__init__(packed[0].array if packed else arrays[0],
                         ColumnInterleaved(side_by_side, self.columns, len(arrays)))

    def check_place(self, name: str, c: Any) -> None:
        if c is not None:
            raise ConfigError("c is given with an InterleavedColumns, and a folded product has no C; add c after the fold: "
                              "epilogue=Fold(f) | Residual(c)")
        if name != "b":
            raise TypeError(f"{name} is an InterleavedColumns, whose columns become columns of D: it can be b alone")

    @property
    def T(self) -> Matrix:
        raise TypeError("an InterleavedColumns has no transpose, because its columns become columns of D; "
                        "interleave the parts' transposes")

    def __repr__(self) -> str:
        shape = (*self.shape[:-1], self.columns)
        return f"<InterleavedColumns of {len(self.parts)} matrices of shape {shape}, {self.dtype}>"


def joined(arrays: Sequence[Any], layouts: Sequence[GlobalLayout], infos: list[ArrayInfo], axis: int) -> GlobalLayout:
    """The layout of matrices joined along an axis of the last two, from the first on."""
    layout, boundary = layouts[0], infos[0].shape[axis - 2]
    for array, own, info in zip(arrays[1:], layouts[1:], infos[1:]):
        layout = Joined(layout, own, array, axis, boundary)
        boundary += info.shape[axis - 2]
    return layout


def _of_packed(matrix: Matrix) -> ArrayInfo:
    """A matrix of packed integers as one of its elements: what `_check_part` compares."""
    if matrix.dtype.itemsize == 1:
        raise TypeError(f"InterleavedColumns() got packed integers for products of {matrix.dtype}; multiply them one by "
                        "one, or give their layout a dtype of 16 bits")
    return describe(matrix.array)._replace(shape=matrix.shape, dtype=matrix.dtype)


def _plain(info: ArrayInfo) -> GlobalLayout:
    rows, columns = info.strides[-2:]
    return (ColMajor if rows == 1 and columns != 1 else RowMajor)(info.dtype)


# -- checks -----------------------------------------------------------------------------------------------------------

def _parts(arrays: tuple[Any, ...], what: str) -> list[ArrayInfo]:
    """The parts, described."""
    if len(arrays) < 2:
        raise ValueError(f"{what}() got {len(arrays)} arrays; two or more are needed")
    infos = []
    for n, array in enumerate(arrays):
        if isinstance(array, Matrix):
            raise TypeError(f"part {n} of {what} is a {type(array).__name__}; an array is needed")
        info = describe(array, f"part {n} of {what}")
        check_dtype(info.dtype, f"part {n} of {what}")
        if len(info.shape) < 2:
            raise ValueError(f"part {n} of {what} has {len(info.shape)} dimensions; a matrix of 2 is needed (a vector v: "
                             "v[:, None] or v[None, :])")
        infos.append(info)
    return infos


def _axis(axis: Any, info: ArrayInfo) -> int:
    """0 to join rows, 1 to join columns, of an axis counted as NumPy does."""
    ndim = len(info.shape)
    try:
        number = operator.index(axis)
    except TypeError:
        raise TypeError(f"axis={axis!r} of Concat: a whole number is needed") from None
    if not -ndim <= number < ndim or isinstance(axis, bool):
        raise ValueError(f"axis={axis!r} of Concat: its parts have {ndim} dimensions; axis=-2 joins rows, axis=-1 columns")
    if number % ndim < ndim - 2:
        raise ValueError(f"axis={axis!r} of Concat would join stacks of matrices; axis=-2 joins rows, axis=-1 columns")
    return number % ndim - (ndim - 2)


def _check_part(info: ArrayInfo, n: int, first: ArrayInfo, across: int, what: str) -> None:
    """Part ``n`` fits the first one, ``across`` being the axis along which both are as long."""
    said = f"part {n} of {what} has"
    if info.dtype != first.dtype:
        raise ValueError(f"{said} dtype {info.dtype} and part 0 {first.dtype}; convert one of them")
    if info.device != first.device:
        raise ValueError(f"{said} its memory on device {info.device} and part 0 on device {first.device}; all parts must be "
                         "on one device")
    if len(info.shape) != len(first.shape) or info.shape[:-2] != first.shape[:-2]:
        raise ValueError(f"{said} shape {info.shape} and part 0 {first.shape}; the dimensions before the last two must be "
                         "the same")
    if info.shape[across - 2] != first.shape[across - 2]:
        raise ValueError(f"{said} shape {info.shape} and part 0 {first.shape}; both need as many "
                         f"{('rows', 'columns')[across]}")
