"""Sums along the rows of a product's left operand, and along the columns of its right one, of blocks in their stages."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from gemmkit.components import Component
from gemmkit.lang.aggregates import convert, convert_all, fill
from gemmkit.lang.component_products import matrix_of
from gemmkit.lang.components import dataclass
from gemmkit.lang.registers import apply, each, fold, generate, join, split
from gemmkit.programs.collectives import F32, ROWS, StagedTile, Typed, WarpgroupPart, add, exchanged, quad
from gemmkit.ptx.memory import load_shared, shared, store_shared
from gemmkit.ptx.mma import ldmatrix
from gemmkit.ptx.special import lane_index, thread_index, udiv
from gemmkit.ptx.wgmma import named_barrier


@dataclass(frozen=True)
class RowSums(Component):
    """Sums along the rows of a staged block, which a warpgroup's threads read: each adds up its part of two rows, 8 apart,
    and the four threads of a row meet at the end."""

    tile: StagedTile

    def begin(self, value: float) -> tuple:
        """The value once a row: the first of its four threads has it."""
        return fill(F32, 2, value if lane_index() % 4 == 0 else 0.0)

    def add(self, sums: tuple, slot: Any, group: int) -> tuple:
        return fold(self.tile.columns // (2 * self.tile.chunk), add_matrix, sums, self.tile, slot.stage, group)

    def whole(self, sums: tuple) -> tuple:
        return quad(add, sums[0]), quad(add, sums[1])


def add_matrix(sums: tuple, n: int, tile: Any, stage: int, group: int) -> tuple:
    """16 rows by 32 bytes of a warp: four 8 x 8 matrices of 16 bits, of which a lane addresses a line."""
    lane = lane_index()
    row = group * ROWS + udiv(thread_index() % 128, 32) * 16 + lane % 16
    at = tile.layout.position((row, (2 * n + udiv(lane, 16)) * tile.chunk), tile.lines)
    x = words_of(tile, stage, 0, at)
    return sums[0] + (x[0] + x[2]), sums[1] + (x[1] + x[3])


def words_of(tile: Any, stage: int, more: int, at: int) -> tuple:
    """Of four matrices that a lane has a word of each the sums of the word's elements, in float32."""
    x = ldmatrix(shared(tile.dtype, tile.offset), tile.begin_of(stage) + more, at, 4, False)
    return apply(sum_of_word, split(convert_all(F32, x), 4 // tile.size))


def sum_of_word(x: tuple, n: int) -> Any:
    if len(x) == 4:
        return (x[0] + x[1]) + (x[2] + x[3])
    if len(x) == 2:
        return x[0] + x[1]
    return x[0]


# --------------------------------------------------------------------------------------------------
# Sums of the columns of a product's right operand, which threads read where it is staged for the product.
#
# Each warp of the consumers adds up columns of its own, eight at a time, over all lines of a stage. A thread's sums are
# parts: when the rounds are over, lanes that have parts of one column add them up, and the sums of all columns go to
# shared memory. From there every thread takes those of its columns, whichever warpgroup it is in.

OCTET = 8                              # columns of a matrix that ldmatrix loads, and its lines
AT_ONCE = 32                           # lines of four such matrices one below the other
MEETING = 4                            # a named barrier; those of the consumers' ways out are 1 to 3


@dataclass(frozen=True)
class ColumnSums(Component):
    """Sums of the columns of ``tile``, by ``consumers`` warpgroups; ``transposed``: by its lines, which are columns of the
    product."""

    tile: StagedTile
    consumers: int
    transposed: bool = False

    @cached_property
    def columns(self) -> int:
        return self.tile.lines if self.transposed else self.tile.columns

    @cached_property
    def warps(self) -> int:
        """Those that read: all, or those of two warpgroups where three cannot share the columns evenly."""
        warps = 4 * self.consumers
        return warps if self.columns // OCTET % warps == 0 else 8

    @cached_property
    def octets(self) -> int:
        """Of a warp."""
        return self.columns // OCTET // self.warps

    @cached_property
    def parts(self) -> int:
        """A thread's sums of an octet: two neighbours, or one line."""
        return 1 if self.transposed else 2

    @cached_property
    def steps(self) -> int:
        """Groups of four matrices that have all of a stage's elements of an octet."""
        return self.tile.columns // (4 * self.tile.chunk) if self.transposed else self.tile.lines // AT_ONCE

    def begin(self, value: float) -> tuple:
        """The value once a column: the first of the lanes that have parts of it begins with it."""
        if self.transposed:
            return fill(F32, self.octets, value if lane_index() % 4 == 0 else 0.0)
        return fill(F32, 2 * self.octets, value if lane_index() < 4 else 0.0)

    def add(self, sums: tuple, slot: Any, group: int) -> tuple:
        if self.warps == 4 * self.consumers:
            return self.added(sums, slot.stage, group)
        if group * 4 < self.warps:
            return self.added(sums, slot.stage, group)
        return sums

    def added(self, sums: tuple, stage: int, group: int) -> tuple:
        return join(apply(add_octet, split(sums, self.parts), self, stage, self.first(group)))

    def first(self, group: int) -> int:
        """The warp's first octet."""
        return (group * 4 + udiv(thread_index() % 128, 32)) * self.octets

    def whole(self, sums: tuple) -> tuple:
        """Of all lanes that have parts of a column."""
        return apply(met, sums, self)


def add_octet(sums: tuple, n: int, of: Any, stage: int, first: int) -> tuple:
    return fold(of.steps, add_lines if of.transposed else add_columns, sums, of.tile, stage, first + n)


def add_columns(sums: tuple, n: int, tile: Any, stage: int, octet: int) -> tuple:
    """32 lines of eight columns of 16 bits, of which a lane addresses one; the swizzle of a line is that of the 32nd behind
    it."""
    at = tile.layout.position((lane_index(), octet * OCTET), tile.lines)
    more = tile.begin_of(stage) + n * AT_ONCE * tile.line
    x = convert_all(F32, ldmatrix(shared(tile.dtype, tile.offset), more, at, 4, False))
    return sums[0] + ((x[0] + x[2]) + (x[4] + x[6])), sums[1] + ((x[1] + x[3]) + (x[5] + x[7]))


def add_lines(sums: tuple, n: int, tile: Any, stage: int, octet: int) -> tuple:
    """Eight lines, 64 bytes of each."""
    lane = lane_index()
    at = tile.layout.position((octet * OCTET + lane % 8, (4 * n + udiv(lane, 8)) * tile.chunk), tile.lines)
    x = words_of(tile, stage, 0, at)
    return (sums[0] + ((x[0] + x[1]) + (x[2] + x[3])),)


def met(x: Any, n: int, of: Any) -> Any:
    if of.transposed:
        return quad(add, x)
    x = x + exchanged(x, 4)
    x = x + exchanged(x, 8)
    return x + exchanged(x, 16)


@dataclass(frozen=True)
class ColumnValues(Component):
    """A value of each of a tile's columns, in shared memory from ``offset`` on: ``sums`` are put there, and read."""

    sums: ColumnSums
    offset: int

    @cached_property
    def threads(self) -> int:
        """Of the consumers."""
        return 128 * self.sums.consumers

    def put(self, whole: tuple, group: int) -> None:
        """When all have read the last tile's; all can read these when it returns."""
        named_barrier(MEETING, self.threads)
        if group * 4 < self.sums.warps:
            each(put_value, whole, self, self.sums.first(group))
        named_barrier(MEETING, self.threads)

    def at(self, column: int) -> Any:
        """Of a column of the tile."""
        return load_shared(shared(F32, self.offset), column, 0, 1)[0]

    def own(self, group: int) -> tuple:
        """Of the columns that a thread stores: its own number's, and those that are ``threads`` further on."""
        return generate(-(-self.sums.columns // self.threads), own_value, self, number(group))


def put_value(value: Any, n: int, to: Any, first: int) -> None:
    lane, pointer = lane_index(), shared(F32, to.offset)
    if to.sums.transposed:
        if lane % 4 == 0:
            store_shared(pointer, (first + n) * OCTET + udiv(lane, 4), 0, (value,))
    elif lane < 4:
        store_shared(pointer, (first + n // 2) * OCTET + lane * 2, n % 2, (value,))


def own_value(n: int, of: Any, thread: int) -> Any:
    return of.at(min(thread + n * of.threads, of.sums.columns - 1))


def number(group: int) -> int:
    """Of a thread among the consumers."""
    return group * 128 + thread_index() % 128


@dataclass(frozen=True)
class ColumnsOut(Typed):
    """A value of each of a tile's ``columns``, each by one of the consumers' ``threads``."""

    columns: int
    threads: int

    def store(self, values: tuple, out: Any, part: WarpgroupPart, group: int) -> None:
        each(put_column, values, self, part, matrix_of(out, part.stack), number(group))

    def finish(self) -> None:
        """Nothing is under way."""


def put_column(value: Any, n: int, store: Any, part: WarpgroupPart, out: Any, thread: int) -> None:
    column = thread + n * store.threads
    if column < store.columns and part.n + column < part.columns:
        out[part.n + column] = convert(store.dtype, value)
