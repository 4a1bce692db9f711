"""Tensors as matrices: a hierarchical layout, whose rows and columns are made of several dimensions each.

A contraction is a matrix product in which M, N and K each stand for several dimensions. `Matricised` reads and writes such
an operand in place, so that nothing is transposed beforehand: row i is split into its coordinates by division with the
extents (a multiplication and a shift each), and the array's own strides do the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gemmkit import shapes
from gemmkit.components import Component, Scalar
from gemmkit.lang.aggregates import convert, fill
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, Numeric, View
from gemmkit.lang.registers import deal, each, generate, interleave, join
from gemmkit.layouts.base import GlobalLayout, ResultLayout, load_elements, store_elements
from gemmkit.layouts.plain import Sliding, Swizzled
from gemmkit.ptx.arithmetic import divided, divisor_reciprocal
from gemmkit.ptx.copy_async import offset_of
from gemmkit.ptx.memory import interleave_words, load_global, load_words, near, store_global
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.tensor_maps import Im2colWindow, TensorMapSpec
from gemmkit.shapes import Shape, Step, span
from gemmkit.tiling import Tile

INDEX = np.dtype(np.int32)
COMBS = 1, 2, 4, 8, 16                  # vectors that a thread's registers can put in order
NEAR = 2**31
WORD = np.dtype(np.uint32)


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
    enough for their offsets. `Matricised.of` finds all four. With ``boxes`` TMA may bring boxes of its dimensions.

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
    boxes: bool = False

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
    def of(array: ArrayInfo, rows: int, boxes: bool = False) -> Matricised:
        """The layout of an array whose first ``rows`` dimensions are the matrix's rows, and the others its columns."""
        groups = ((1, array.shape[rows:], array.strides[rows:]), (0, array.shape[:rows], array.strides[:rows]))
        axis, vector, comb = None, 1, 1
        for at in (0, 1):
            for own, shape, strides in groups:
                fits = len(shape) > at and strides[at] == 1 and shape[at] > 1 and (at == 0 or shape[0] in COMBS[1:])
                if axis is None and fits:
                    axis, vector, comb = own, math.gcd(16, shape[at]), shape[0] if at else 1
        near = _span(array) < NEAR
        return Matricised(array.dtype, array.shape[:rows], array.shape[rows:], axis, vector, comb, near, boxes)

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

    def box_at(self, i: int, j: int, columns: int) -> tuple[Any, ...]:
        """Where TMA begins a box at row i, column j: along the contiguous dimension, then from the last to the first."""
        row, column = self.rows.split(i), self.columns.split(j)
        if self.axis == 1:
            return join(((column[0],), column[1:][::-1], row[::-1]))
        return join(((row[0],), column[::-1], row[1:][::-1]))

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def longest_line(self) -> int:                         # type: ignore[override]
        """As that of `Im2col`; 0 where lines are not brought in boxes."""
        modes = self.columns if self.axis == 1 else self.rows
        return int(modes.extent) if self.boxes and not modes.is_last else 0

    @property
    def box_lines(self) -> int:
        """How many lines a box has at most; 0: any number."""
        modes = self.rows if self.axis == 1 else self.columns
        return 0 if modes.is_last else int(modes.extent)

    def box_refusal(self, line: int, lines: int) -> str | None:
        """Why TMA cannot bring boxes of so many elements along `axis`, and lines across; None if it can."""
        along, across = (self.columns, self.rows) if self.axis == 1 else (self.rows, self.columns)
        if not self.boxes or self.axis is None or self.comb > 1:
            return "it is not brought in boxes"
        if self.ndim > 5:
            return f"TMA takes 5 dimensions, not {self.ndim}"
        for modes, count in ((along, line), (across, lines)):
            if not modes.is_last and modes.extent % count:
                return f"a box of {count} reaches beyond a dimension of {modes.extent}"
        return None

    def box(self, line: int, lines: int, swizzle: int) -> TensorMapSpec:
        """The tensor map of such boxes."""
        rows, columns = [1] * self.rows.depth, [1] * self.columns.depth
        (columns if self.axis == 1 else rows)[0], (rows if self.axis == 1 else columns)[0] = line, lines
        order = (*columns[:1], *columns[:0:-1], *rows[::-1]) if self.axis == 1 else (*rows[:1], *columns[::-1], *rows[:0:-1])
        return TensorMapSpec(self.dtype, order, swizzle)

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


# --------------------------------------------------------------------------------------------------
# Modes: the dimensions that make up the rows, columns or terms of a contraction's matrices, and how they are ordered.
#
# Two tensors have each of them. Neighbours in a tensor's memory should be neighbours in the product, or a thread can move
# nothing at once; and a tile should cover whole lines of memory. Where the tensors disagree, a mode is cut in two: a mode
# of extent v w and stride s is one of extent v and stride s, and one of extent w and stride s v.
#
# * One tensor leads: ``v`` elements of its fastest mode, 16 bytes, come first. Its accesses are vectors.
# * Where another mode is the other tensor's fastest (the unit-stride modes conflict: the tensors are *at odds*), as many
#   elements of that come next. Elements contiguous in the second tensor are then v apart in the matrix: a thread that owns
#   all v interleaved vectors accesses both tensors in vectors (`Matricised`, ``comb``). If tensors are
#   equally large, it is two or three such vectors, because memory moves sectors of 32 bytes.
# * Where Hopper's kernel reads more of the leading tensor than it writes of the other, a whole sector of 32 bytes of it
#   comes first, and eight elements of the other: copies of 16 bytes are asked for together where they are neighbours in
#   shared memory, too.
# * Where the other tensor is written, it never leads, and if it is the larger no more than four elements of what leads come
#   first: parts of sectors cost more to write than to read.
# * The rest is in the order of the larger tensor if that is much the larger, else in that of the leading one.

LARGER = 4                             # times as many elements: what a tensor must have to decide over another
WIDE = 16                              # bytes of the widest access of a thread
VECTORS = 8                            # elements of the widest vector: a thread holds as many vectors
FEW, MORE = 4, 1.15                    # or so many, where D is to have whole sectors, because it is so many times as large


class Mode(NamedTuple):
    """One dimension that two tensors have, or several merged: its extent and its strides in the two."""

    extent: int
    first: int
    second: int

    @staticmethod
    def all_of(modes: Iterable[shapes.Mode]) -> list[Mode]:
        """The modes of (extent, stride) pairs, whose strides are `Step`s in the two tensors."""
        return [Mode(extent, *step) for extent, step in modes if extent != 1]

    @property
    def shape(self) -> Shape:
        """From its elements to their places in both tensors."""
        return Shape.of_modes([[(self.extent, Step(self[1:]))]])

    def cut(self, count: int) -> list[Mode]:
        """The ``count`` elements that come first, and the others: a tile, and where the tiles begin."""
        outer, inner = self.shape.tile(count)
        return Mode.all_of((*inner.modes[0], *outer.modes[0]))


def ordered(modes: Sequence[Mode], itemsizes: tuple[int, int], counts: tuple[int, int], stores: bool = False,
            is_little: bool = False, is_reread: bool = False) -> list[Mode]:
    """The modes of two tensors, whose elements have ``itemsizes`` bytes and of which there are ``counts``: the fastest
    first, those merged that lie in each other's stride in both. ``stores`` says that the second is written, ``is_little``
    that it gives way where the first has neighbours: to move it is a small part of the whole. ``is_reread`` says that the
    first is read many times, by copies of 16 bytes, for each time that the second is written.

    >>> [mode.extent for mode in ordered([Mode(16, 1, 48), Mode(48, 16, 1)], (4, 4), (768, 768))]          # at odds
    [4, 8, 4, 6]
    >>> ordered([Mode(16, 1, 16), Mode(48, 16, 256)], (4, 4), (768, 768))
    [Mode(extent=768, first=1, second=16)]
    """
    larger = next((n for n in (0, 1) if counts[n] >= LARGER * max(1, counts[1 - n])), None)
    first, second = (any(x[1 + n] == 1 for x in modes) for n in (0, 1))
    if is_little and first:
        return merged_modes(sorted_by(0, modes))
    lead = 1 if second and (not first or (larger == 1 and not stores)) else 0
    modes = merged_modes(sorted_by(lead, modes))
    decides = lead if larger is None else larger
    pieces = dict(found for n in (lead, 1 - lead) for found in fastest(modes, n, itemsizes[n]))
    if not pieces and (first or second):                     # no vectors: let the lead's neighbours be neighbours at least
        return modes
    by_sectors = is_reread and stores and len(pieces) == 2 and lead == 0
    if stores and len(pieces) == 2 and counts[1] >= MORE * counts[0] and not by_sectors:
        at = next(iter(pieces))
        pieces[at] = math.gcd(pieces[at], FEW)
    order = sorted_by(decides, modes)
    if not pieces or [modes[at] for at in pieces] == order[:1]:
        return merged_modes(order) or [Mode(1, 1, 1)]
    front: list[Mode] = []
    rest = [mode for at, mode in enumerate(modes) if at not in pieces]
    for at, count in pieces.items():
        if by_sectors:                                      # eight elements of D are one, or of float32 two vectors
            is_half = not front or count < VECTORS
            count *= 2 if is_half and modes[at].extent // count % 2 == 0 else 1
        elif front and (stores or larger is None):   # a tile should have whole sectors of the other, too
            count *= next((n for n in (2, 3) if modes[at].extent // count % n == 0), 1)
        piece, *others = modes[at].cut(count)
        front.append(piece)
        rest += others
    return merged_modes([*front, *sorted_by(decides, rest)])


def fastest(modes: Sequence[Mode], which: int, itemsize: int) -> list[tuple[int, int]]:
    """Which mode's elements are neighbours in one tensor, and how many of them a thread moves at once; none if not two."""
    at = next((at for at, mode in enumerate(modes) if mode[1 + which] == 1), None)
    count = 1 if at is None else math.gcd(modes[at].extent, VECTORS, max(1, WIDE // itemsize))
    return [(at, count)] if at is not None and count > 1 else []


def sorted_by(which: int, modes: Sequence[Mode]) -> list[Mode]:
    """The fastest of one tensor first; what does not move in it (or has no stride) last."""
    return sorted(modes, key=lambda x: (abs(x[1 + which]) or np.inf, abs(x[2 - which])))


def merged_modes(modes: Sequence[Mode]) -> list[Mode]:
    """The modes, those made one that follow each other and lie in each other's stride in both tensors."""
    return Mode.all_of(shapes.merged((mode.extent, Step(mode[1:])) for mode in modes))


# --------------------------------------------------------------------------------------------------
# The operand of a convolution that is an implicit matrix: a row for each position, a column for each tap and channel.
#
# No such matrix is written ("im2col"): threads compute where its elements lie in the tensor, and Hopper's TMA walks the
# positions itself (PTX ISA, "im2col mode").

NO_IMAGE = 2**30                       # no tensor has as many
STRIDES = 8                            # the longest step of TMA between positions
#: How far from a tensor's ends TMA may begin and end, and how far a tap may lie from the first, by spatial dimensions.
CORNERS = {1: (-2**15, 2**15 - 1, 2**16 - 1), 2: (-128, 127, 255), 3: (-16, 15, 31)}


@dataclass(frozen=True)
class Windows(Component):
    """Where a convolution reads along one spatial dimension, the fastest, and along the ``rest``: at position p and tap t
    the element ``p * stride + t * step + start``. Out of the tensor's ``extent`` are zeros. ``low`` is the least
    ``t * step + start``."""

    extent: Scalar
    stride: Scalar
    step: Scalar
    start: Scalar
    low: Scalar
    rest: Any = None

    @property
    def is_last(self) -> bool:
        return self.rest is None

    def at(self, positions: Any, taps: Any) -> tuple[Any, ...]:
        """The element's coordinates, the slowest first, of positions and taps whose fastest come first."""
        own = (positions[0] * self.stride + taps[0] * self.step + self.start,)
        if self.is_last:
            return own
        return join((self.rest.at(positions[1:], taps[1:]), own))

    def contain(self, positions: Any, taps: Any) -> Any:
        """Whether the element lies in the tensor."""
        own = positions[0] * self.stride + taps[0] * self.step + self.start
        if self.is_last:
            return 0 <= own and own < self.extent
        return 0 <= own and own < self.extent and self.rest.contain(positions[1:], taps[1:])

    def bases(self, positions: Any) -> tuple[Any, ...]:
        """Where the first element of each position's window lies, the fastest dimension first."""
        own = (positions[0] * self.stride + self.low,)
        if self.is_last:
            return own
        return join((own, self.rest.bases(positions[1:])))

    def offsets(self, taps: Any) -> tuple[Any, ...]:
        """How far a tap lies from the window's first element, the fastest dimension first."""
        own = (taps[0] * self.step + self.start - self.low,)
        if self.is_last:
            return own
        return join((own, self.rest.offsets(taps[1:])))

    @staticmethod
    def of(dimensions: tuple[tuple[int, int, int, int], ...], taps: tuple[int, ...]) -> Windows:
        """Of (extent, stride, step, start) and the number of taps along each dimension, the fastest first."""
        rest = Windows.of(dimensions[1:], taps[1:]) if len(dimensions) > 1 else None
        extent, stride, step, start = dimensions[0]
        return Windows(extent, stride, step, start, start + min(0, (taps[0] - 1) * step), rest)

    def dimensions(self) -> tuple[tuple[int, int, int, int, int], ...]:
        own = self.extent, self.stride, self.step, self.start, self.low
        return (own, *(() if self.rest is None else self.rest.dimensions()))


@dataclass(frozen=True)
class Im2col(GlobalLayout):
    """The matrix of a convolution's windows: row (n, p, q), column (r, s, c) is the tensor's element
    ``[n, p * stride + r * step + start, q * stride + s * step + start, c]``, or zero out of the tensor.

    The array has the dimensions (N, H, W, C), or one or three spatial ones, in any strides. ``rows`` are the extents of the
    positions, the fastest first, and of N; ``columns`` those of C and of the taps, or with ``taps_first`` of the taps and C.
    ``axis``, ``vector`` and ``near`` are those of `Matricised`; ``is_padded`` says that elements may be out of the tensor.

    >>> from gemmkit.runtime.arrays import describe
    >>> x = np.arange(1, 17, dtype=np.float32).reshape(1, 4, 4, 1)
    >>> layout = Im2col.of(describe(x), (4, 4), (3, 3), ((1, 1, -1), (1, 1, -1)))     # 3 x 3, padded by 1
    >>> [int(layout.element(x, 5, tap, None)) for tap in range(9)], float(layout.element(x, 0, 0, None))
    ([1, 2, 3, 5, 6, 7, 9, 10, 11], 0.0)
    """

    rows: Any
    columns: Any
    windows: Any
    axis: int | None = None
    vector: int = 1
    is_padded: bool = True
    near: bool = False
    taps_first: bool = False
    spare: int = 0

    channel_axis = 1                   # the matrix's axis along which channels are neighbours

    @classmethod
    def of(cls, array: ArrayInfo, positions: tuple[int, ...], taps: tuple[int, ...], steps: tuple[tuple[int, int, int], ...],
           taps_first: bool = False, spare: int = 0) -> Im2col:
        """Of an array (N, ..., C): ``positions`` and ``taps`` of each spatial dimension, and (stride, step, start)."""
        (count, *spatial, channels), unit = array.shape, array.strides[-1]
        windows = Windows.of(tuple((extent, *step) for extent, step in zip(spatial, steps))[::-1], taps[::-1])
        is_padded = any(start + min(0, (t - 1) * step) < 0
                        or (p - 1) * stride + start + max(0, (t - 1) * step) >= extent
                        for extent, p, t, (stride, step, start) in zip(spatial, positions, taps, steps))
        columns = (*taps[::-1], channels) if taps_first else (channels, *taps[::-1])
        is_last = unit == 1 and channels > 1 and not taps_first
        axis = cls.channel_axis if is_last else 0 if array.strides[-2] == 1 else None
        vector = math.gcd(16, channels) if is_last else 1
        return cls(array.dtype, Modes.of((*positions[::-1], count)), Modes.of(columns), windows, axis, vector, is_padded,
                   _span(array) < NEAR, taps_first, spare)

    def __repr__(self) -> str:
        return (f"Im2col({self.dtype.name!r}, {self.rows.extents()}, {self.columns.extents()}, {self.windows.dimensions()}, "
                f"{self.axis}, {self.vector})")

    # -- device methods ---------------------------------------------------------------------------------------------

    def taps(self, column: Any) -> Any:
        return column[:-1] if self.taps_first else column[1:]

    def channel(self, column: Any) -> Any:
        return column[-1] if self.taps_first else column[0]

    def modes(self, i: int, j: int) -> tuple[Any, ...]:
        """The position and image of row i, column j, and its channel and tap."""
        return self.rows.split(i), self.columns.split(j)

    def place(self, i: int, j: int) -> tuple[Any, ...]:
        """Where row i, column j lies in the array, or would lie."""
        row, column = self.modes(i, j)
        return join(((row[-1],), self.windows.at(row[:-1], self.taps(column)), (self.channel(column),)))

    def contains(self, i: int, j: int) -> Any:
        """Whether the array has an element for row i, column j."""
        row, column = self.modes(i, j)
        return self.windows.contain(row[:-1], self.taps(column))

    def view(self, data: View) -> Any:
        return near(data) if self.near else data

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        if self.is_padded:
            return self.view(data)[self.place(i, j)] if self.contains(i, j) else convert(self.dtype, 0)
        return self.view(data)[self.place(i, j)]

    def load(self, data: Any, tile: Any, shape: Any) -> Elements:
        if self.axis == 1 and tile.size[1] == tile.count and self.vector % tile.count == 0:
            if self.is_padded:
                if not self.contains(tile.index[0], tile.index[1]):
                    return fill(self.dtype, tile.count, 0)
            return load_global(self.view(data), self.unit, self.place(tile.index[0], tile.index[1]),
                               fill(INDEX, self.ndim, 0), tile.count)
        return load_elements(self, data, tile, shape)

    def load_packed(self, data: Any, tile: Any, shape: StackShape) -> Elements:
        """What `load` gives, in 32-bit words, of a tile that it `packs`."""
        if self.is_padded:
            if not self.contains(tile.index[0], tile.index[1]):
                return fill(WORD, tile.count * self.itemsize // 4, 0)
        return load_words(self.view(data), self.unit, self.place(tile.index[0], tile.index[1]), fill(INDEX, self.ndim, 0),
                          tile.count)

    def row_offset(self, data: View, i: int) -> int:
        row = self.rows.split(i)
        return offset_of(self.view(data), join(((row[-1],), self.windows.at(row[:-1], fill(INDEX, self.ndim - 2, 0)), (0,))))

    def column_offset(self, data: View, j: int) -> int:
        column, nowhere = self.columns.split(j), fill(INDEX, self.ndim - 2, 0)
        there = join(((0,), self.windows.at(nowhere, self.taps(column)), (self.channel(column),)))
        first = join(((0,), self.windows.at(nowhere, nowhere), (0,)))
        return offset_of(self.view(data), there) - offset_of(self.view(data), first)

    def box_at(self, i: int, j: int, columns: int) -> tuple[Any, ...]:
        """Where TMA begins a box at row i, column j; behind the last of ``columns`` in no image: a tap too many would see
        elements, and 0 times infinity is no zero."""
        row = self.rows.split(i)
        channel = self.channel(self.columns.split(j if j < columns else 0))
        return join(((channel,), self.windows.bases(row[:-1]), (row[-1] if j < columns else NO_IMAGE,)))

    def box_offsets(self, i: int, j: int, columns: int) -> tuple[Any, ...]:
        """How far the tap of column j lies from there."""
        found: tuple[Any, ...] = self.windows.offsets(self.taps(self.columns.split(j if j < columns else 0)))
        return found

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def known_by(self) -> tuple[Any, ...]:                 # type: ignore[override]
        """What a tensor map of it says: plans of other windows are others, though arrays and products have equal shapes."""
        return self.rows.extents(), self.columns.extents(), self.windows.dimensions()

    @property
    def is_separable(self) -> bool:
        return True

    @property
    def ndim(self) -> int:
        return int(self.rows.depth + 1)

    @property
    def unit(self) -> int:
        """The array's dimension along which lines are moved."""
        return self.ndim - 1 if self.axis == self.channel_axis else self.ndim - 2

    @property
    def itemsize(self) -> int:
        return int(self.dtype.itemsize)

    @property
    def neighbours(self) -> int:
        return self.vector

    @property
    def vector_axis(self) -> int | None:
        return self.axis if self.vector > 1 else None

    @property
    def contiguous_axis(self) -> int | None:
        return self.axis

    @property
    def longest_line(self) -> int:                         # type: ignore[override]
        """How many neighbours along `vector_axis` are neighbours in memory, from a multiple of as many on."""
        return int(self.columns.extent) if self.axis == self.channel_axis else 1

    @property
    def slide(self) -> tuple[int, int] | None:
        """Where taps along the fastest dimension see lines of each other's positions: how many taps, and how many positions
        on the next one's line is. Positions at a line's end would see those of the next line, and must be ``spare``."""
        (_, stride, step, _, _), *_ = self.windows.dimensions()
        taps = 1 if self.taps_first else int(self.columns.extents()[1])
        slides = self.axis == self.channel_axis and taps > 1 and stride == 1 and self.spare >= (taps - 1) * abs(step)
        return (taps, int(step)) if slides else None

    def fills(self, shared: Swizzled, tile: Tile, k_axis: int) -> bool:
        """Whether the panels of a block's tile are all taps along the fastest dimension. (Matrix descriptors have no
        negative distances, and need one from panel to panel where lines lie across K.)"""
        if not isinstance(shared, Sliding):
            return False
        are_taps = self.slide == (shared.panels, shared.step) and (shared.step > 0 or shared.axis == k_axis)
        return are_taps and shared.line == self.longest_line and tile.extents[shared.axis] == shared.panels * shared.line

    @property
    def run(self) -> int:
        return math.gcd(self.vector, super().run) if self.vector > 1 else super().run

    def packs(self, tile: Tile) -> bool:
        """Whether `load_packed` loads tiles of threads such as this."""
        return bool(self.axis == 1 and tile.extents[1] == tile.count and self.vector % tile.count == 0
                    and tile.count * self.dtype.itemsize % 4 == 0)

    def dimensions_of(self, array: ArrayInfo) -> int:
        return self.ndim

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return math.prod(self.rows.extents()), math.prod(self.columns.extents())

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        if array is None:
            raise ValueError(f"{name} is None, and {self!r} needs an array")
        channels = self.columns.extents()[-1 if self.taps_first else 0]
        wanted = self.rows.extents()[-1], *(extent for extent, *_ in self.windows.dimensions()[::-1]), channels
        if array.shape != wanted or array.dtype != self.dtype:
            raise ValueError(f"{name} has shape {array.shape} and dtype {array.dtype}, and its layout {self!r} is of an "
                             f"array of shape {wanted}")
        if (self.near and _span(array) >= NEAR) or (rows, columns) != self.extents(array):
            raise ValueError(f"{name} is {rows} x {columns}, and its layout {self!r} is of a matrix {self.extents(array)}, "
                             "whose elements lie within 2**31 bytes if it is near")

    def box_refusal(self, line: int, lines: int) -> str | None:
        """Why TMA cannot bring boxes of so many columns and rows; None if it can."""
        if self.axis != self.channel_axis:
            return "its channels are not neighbours in memory"
        if self.columns.extent % line:
            return f"a line of {line} channels reaches beyond a tap's {self.columns.extent}"
        if self.ndim - 2 not in CORNERS:
            return f"TMA walks 1 to 3 spatial dimensions, not {self.ndim - 2}"
        least, most, far = CORNERS[self.ndim - 2]
        taps = self.columns.extents()[1:]
        window = self._window()
        if any(step > STRIDES for step in window.steps):
            return f"its positions are more than {STRIDES} elements apart"
        if not all(least <= corner <= most for corner in (*window.lower, *window.upper)):
            return f"its windows begin or end more than {-least} elements out of the tensor"
        if any((count - 1) * abs(step) > far for count, (_, _, step, _, _) in zip(taps, self.windows.dimensions())):
            return f"its taps are more than {far} elements apart"
        return None

    def _window(self) -> Im2colWindow:
        dimensions, positions = self.windows.dimensions(), self.rows.extents()[:-1]
        return Im2colWindow(tuple(low for *_, low in dimensions),
                            tuple((count - 1) * stride + low - (extent - 1)
                                  for count, (extent, stride, _, _, low) in zip(positions, dimensions)),
                            tuple(stride for _, stride, *_ in dimensions))

    def box(self, line: int, lines: int, swizzle: int) -> TensorMapSpec:
        """The tensor map of boxes of so many columns and rows."""
        return TensorMapSpec(self.dtype, (line, lines, *(1,) * (self.ndim - 2)), swizzle, self._window())


@dataclass(frozen=True)
class Positions(Im2col, ResultLayout):
    """A result with a row for each position and a column for each channel. Positions out of the array are not stored."""

    def store_element(self, data: View, i: int, j: int, value: Numeric, shape: StackShape) -> None:
        if self.contains(i, j):
            self.view(data)[self.place(i, j)] = value

    def store(self, data: View, tile: Tile, values: Elements, shape: StackShape) -> None:
        if self.axis == 1 and tile.size[1] == tile.count and self.vector % tile.count == 0:
            if self.contains(tile.index[0], tile.index[1]):
                store_global(self.view(data), self.unit, self.place(tile.index[0], tile.index[1]),
                             fill(INDEX, self.ndim, 0), values)
        else:
            store_elements(self, data, tile, values, shape)


@dataclass(frozen=True)
class PositionsAcross(Im2col):
    """The transpose of windows of one tap: a row for each channel, a column for each position."""

    channel_axis = 0

    def modes(self, i: int, j: int) -> tuple[Any, ...]:
        return self.rows.split(j), self.columns.split(i)

    def box_at(self, i: int, j: int, columns: int) -> tuple[Any, ...]:
        row = self.rows.split(j)
        return join(((i,), self.windows.bases(row[:-1]), (row[-1],)))

    def box_offsets(self, i: int, j: int, columns: int) -> tuple[Any, ...]:
        return fill(INDEX, self.ndim - 2, 0)

    @property
    def is_separable(self) -> bool:
        return False

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return Im2col.extents(self, array)[::-1]
