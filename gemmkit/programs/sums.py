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
    transposed: bool = False           # rows lie along the block's columns, of 16 bits

    @cached_property
    def steps(self) -> int:
        """Groups of four matrices that have all of a row."""
        return self.tile.lines // 16 if self.transposed else self.tile.columns // (2 * self.tile.chunk)

    def begin(self, value: float) -> tuple:
        """The value once a row: the first of its four threads has it."""
        return fill(F32, 2, value if lane_index() % 4 == 0 else 0.0)

    def add(self, sums: tuple, slot: Any, group: int) -> tuple:
        return fold(self.steps, add_matrix, sums, self, slot.stage, group)

    def matrices(self, n: int, stage: int, group: int) -> tuple:
        """16 rows by 32 bytes of a warp: four 8 x 8 matrices of 16 bits, of which a lane addresses a line."""
        lane, tile = lane_index(), self.tile
        row = group * ROWS + udiv(thread_index() % 128, 32) * 16
        if self.transposed:
            place = n * 16 + lane % 8 + udiv(lane, 16) * 8, row + udiv(lane, 8) % 2 * 8
        else:
            place = row + lane % 16, (2 * n + udiv(lane, 16)) * tile.chunk
        return words_of(tile, stage, 0, tile.layout.position(place, tile.lines), self.transposed)

    def whole(self, sums: tuple) -> tuple:
        return quad(add, sums[0]), quad(add, sums[1])


def add_matrix(sums: tuple, n: int, of: Any, stage: int, group: int) -> tuple:
    x = apply(sum_of_word, split(of.matrices(n, stage, group), 4 // of.tile.size))
    return sums[0] + (x[0] + x[2]), sums[1] + (x[1] + x[3])


def words_of(tile: Any, stage: int, more: int, at: int, trans: bool) -> tuple:
    """Of four matrices that a lane has a word of each the words' elements, in float32."""
    return convert_all(F32, ldmatrix(shared(tile.dtype, tile.offset), tile.begin_of(stage) + more, at, 4, trans))


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
    x = octet_of_columns(tile, n, stage, octet)
    return sums[0] + ((x[0] + x[2]) + (x[4] + x[6])), sums[1] + ((x[1] + x[3]) + (x[5] + x[7]))


def octet_of_columns(tile: Any, n: int, stage: int, octet: int) -> tuple:
    """32 lines of eight columns of 16 bits, of which a lane addresses one; the swizzle of a line is that of the 32nd behind
    it."""
    at = tile.layout.position((lane_index(), octet * OCTET), tile.lines)
    return words_of(tile, stage, n * AT_ONCE * tile.line, at, False)


def add_lines(sums: tuple, n: int, tile: Any, stage: int, octet: int) -> tuple:
    x = apply(sum_of_word, split(octet_of_lines(tile, n, stage, octet), 4 // tile.size))
    return (sums[0] + ((x[0] + x[1]) + (x[2] + x[3])),)


def octet_of_lines(tile: Any, n: int, stage: int, octet: int) -> tuple:
    """Eight lines, 64 bytes of each."""
    lane = lane_index()
    at = tile.layout.position((octet * OCTET + lane % 8, (4 * n + udiv(lane, 8)) * tile.chunk), tile.lines)
    return words_of(tile, stage, 0, at, False)


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


# --------------------------------------------------------------------------------------------------
# The largest and smallest elements of rows and columns, of blocks in their stages. What an array does not have is zero in a
# stage, so that threads leave out what lies behind its end.

@dataclass(frozen=True)
class RowExtremes(RowSums):
    """The ``largest`` elements, or the smallest, of the rows of a staged block, as `RowSums` adds them up."""

    largest: bool = True

    def begin(self, value: float) -> tuple:
        return fill(F32, 2, value)

    def add(self, sums: tuple, slot: Any, group: int, limit: int) -> tuple:        # type: ignore[override]
        """Of the first ``limit`` elements of each row."""
        return fold(self.steps, keep_matrix, sums, self, slot.stage, group, limit)

    def whole(self, sums: tuple) -> tuple:
        return apply(extreme_of_quad, sums, self.largest)


def keep_matrix(sums: tuple, n: int, of: Any, stage: int, group: int, limit: int) -> tuple:
    x = of.matrices(n, stage, group)
    return fold(len(x), keep_of_row, sums, x, of, 2 * n, limit)


def keep_of_row(sums: tuple, i: int, x: tuple, of: Any, first: int, limit: int) -> tuple:
    """Matrices are the upper one and the lower one of the first chunk, then those of the second."""
    width = 4 // of.tile.size
    at = (first + i // (2 * width)) * of.tile.chunk + lane_index() % 4 * width + i % width
    if i // width % 2 == 0:
        return kept(sums[0], x[i], at < limit, of.largest), sums[1]
    return sums[0], kept(sums[1], x[i], at < limit, of.largest)


def kept(best: Any, x: Any, is_there: Any, largest: bool) -> Any:
    """The larger one, or the smaller one, or the one that is NaN."""
    if largest:
        return x if is_there and not (best >= x or best != best) else best
    return x if is_there and not (best <= x or best != best) else best


def extreme_of_quad(x: Any, n: int, largest: bool) -> Any:
    x = kept(x, exchanged(x, 1), True, largest)
    return kept(x, exchanged(x, 2), True, largest)


@dataclass(frozen=True)
class ColumnExtremes(ColumnSums):
    """The same of columns, as `ColumnSums` adds them up."""

    largest: bool = True

    def begin(self, value: float) -> tuple:
        return fill(F32, self.parts * self.octets, value)

    def add(self, sums: tuple, slot: Any, group: int, limit: int) -> tuple:        # type: ignore[override]
        if self.warps == 4 * self.consumers:
            return self.kept_octets(sums, slot.stage, group, limit)
        if group * 4 < self.warps:
            return self.kept_octets(sums, slot.stage, group, limit)
        return sums

    def kept_octets(self, sums: tuple, stage: int, group: int, limit: int) -> tuple:
        return join(apply(keep_octet, split(sums, self.parts), self, stage, self.first(group), limit))

    def whole(self, sums: tuple) -> tuple:
        return apply(extreme_of_column, sums, self)


def keep_octet(sums: tuple, n: int, of: Any, stage: int, first: int, limit: int) -> tuple:
    return fold(of.steps, keep_step, sums, of, stage, first + n, limit)


def keep_step(sums: tuple, n: int, of: Any, stage: int, octet: int, limit: int) -> tuple:
    if of.transposed:
        lines = octet_of_lines(of.tile, n, stage, octet)
        return fold(len(lines), keep_of_line, sums, lines, of, 4 * n, limit)
    columns = octet_of_columns(of.tile, n, stage, octet)
    return fold(len(columns), keep_of_column, sums, columns, of, n * AT_ONCE + udiv(lane_index(), 4), limit)


def keep_of_line(sums: tuple, i: int, x: tuple, of: Any, first: int, limit: int) -> tuple:
    width = 4 // of.tile.size
    at = (first + i // width) * of.tile.chunk + lane_index() % 4 * width + i % width
    return (kept(sums[0], x[i], at < limit, of.largest),)


def keep_of_column(sums: tuple, i: int, x: tuple, of: Any, line: int, limit: int) -> tuple:
    """Two neighbours of a line of each of four matrices, one below the other."""
    is_there = line + i // 2 * 8 < limit
    if i % 2 == 0:
        return kept(sums[0], x[i], is_there, of.largest), sums[1]
    return sums[0], kept(sums[1], x[i], is_there, of.largest)


def extreme_of_column(x: Any, n: int, of: Any) -> Any:
    if of.transposed:
        return extreme_of_quad(x, n, of.largest)
    x = kept(x, exchanged(x, 4), True, of.largest)
    x = kept(x, exchanged(x, 8), True, of.largest)
    return kept(x, exchanged(x, 16), True, of.largest)
