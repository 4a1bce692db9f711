"""Sums beside products: along the rows of a left operand, and the columns of a right one, of blocks in their stages; and
sums that tiles have parts of, and add to an array."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from gemmkit.components import Component
from gemmkit.kernels.collectives.scheduler import Slot
from gemmkit.kernels.sm90.store import own_column, own_row
from gemmkit.lang.aggregates import convert, convert_all, fill
from gemmkit.lang.component_products import matrix_of
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric
from gemmkit.lang.registers import apply, each, fold, generate, join, reduce, split
from gemmkit.programs.chains.chain import Chain
from gemmkit.programs.chains.elements import ProducerRole
from gemmkit.programs.chains.schedule import ScheduleChoice
from gemmkit.programs.collectives import (
    F32,
    MEETING,
    ROWS,
    STEP,
    PanelTile,
    StagedTile,
    Typed,
    WarpgroupPart,
    add,
    column_at,
    exchanged,
    quad,
)
from gemmkit.programs.trace import Value
from gemmkit.ptx.barriers import fence_async_global
from gemmkit.ptx.memory import load_shared, shared, store_shared
from gemmkit.ptx.mma import ldmatrix
from gemmkit.ptx.special import SHUFFLE, lane_index, thread_index, udiv
from gemmkit.ptx.tma import tma_add, tma_commit, tma_wait, tma_wait_read
from gemmkit.ptx.wgmma import fence_async, named_barrier
from gemmkit.runtime.tensor_maps import TensorMapSpec


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


def keep_matrix(sums: tuple, n: int, of: RowExtremes, stage: int, group: int, limit: int) -> tuple:
    x = of.matrices(n, stage, group)
    return fold(len(x), keep_of_row, sums, x, of, 2 * n, limit)


def keep_of_row(sums: tuple, i: int, x: tuple, of: RowExtremes, first: int, limit: int) -> tuple:
    """Matrices are the upper one and the lower one of the first chunk, then those of the second."""
    width = 4 // of.tile.size
    at = (first + i // (2 * width)) * of.tile.chunk + lane_index() % 4 * width + i % width
    if i // width % 2 == 0:
        return kept(sums[0], x[i], at < limit, of.largest), sums[1]
    return sums[0], kept(sums[1], x[i], at < limit, of.largest)


def kept(best: Numeric, x: Numeric, is_there: bool, largest: bool) -> Any:
    """The larger one, or the smaller one, or the one that is NaN."""
    if largest:
        return x if is_there and not (best >= x or best != best) else best
    return x if is_there and not (best <= x or best != best) else best


def extreme_of_quad(x: Numeric, n: int, largest: bool) -> Any:
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


def keep_octet(sums: tuple, n: int, of: ColumnExtremes, stage: int, first: int, limit: int) -> tuple:
    return fold(of.steps, keep_step, sums, of, stage, first + n, limit)


def keep_step(sums: tuple, n: int, of: ColumnExtremes, stage: int, octet: int, limit: int) -> tuple:
    if of.transposed:
        lines = octet_of_lines(of.tile, n, stage, octet)
        return fold(len(lines), keep_of_line, sums, lines, of, 4 * n, limit)
    columns = octet_of_columns(of.tile, n, stage, octet)
    return fold(len(columns), keep_of_column, sums, columns, of, n * AT_ONCE + udiv(lane_index(), 4), limit)


def keep_of_line(sums: tuple, i: int, x: tuple, of: ColumnExtremes, first: int, limit: int) -> tuple:
    width = 4 // of.tile.size
    at = (first + i // width) * of.tile.chunk + lane_index() % 4 * width + i % width
    return (kept(sums[0], x[i], at < limit, of.largest),)


def keep_of_column(sums: tuple, i: int, x: tuple, of: ColumnExtremes, line: int, limit: int) -> tuple:
    """Two neighbours of a line of each of four matrices, one below the other."""
    is_there = line + i // 2 * 8 < limit
    if i % 2 == 0:
        return kept(sums[0], x[i], is_there, of.largest), sums[1]
    return sums[0], kept(sums[1], x[i], is_there, of.largest)


def extreme_of_column(x: Numeric, n: int, of: ColumnExtremes) -> Any:
    if of.transposed:
        return extreme_of_quad(x, n, of.largest)
    x = kept(x, exchanged(x, 4), True, of.largest)
    x = kept(x, exchanged(x, 8), True, of.largest)
    return kept(x, exchanged(x, 16), True, of.largest)


# --------------------------------------------------------------------------------------------------
# A value of each row of a block, for recurrences (`gemmkit.programs.recurrences`): every warp has the values of all rows, a
# row in each lane, and those of the rows 32 further on. Sums of them take five shuffles.

LANES, LINES_OF_WARP = 32, 16

from_lane, from_before = SHUFFLE["idx"], SHUFFLE["up"]


def lane_row(i: int) -> int:
    """The row of a block that the i-th value of this thread is of."""
    return lane_index() + i * LANES


def there(x: Numeric, i: int, room: int) -> Any:
    return x if lane_row(i) < room else 0.0


def in_room(x: Numeric, i: int, room: int, other: float = 0.0) -> Any:
    """Of a matrix, counted from a thread's first column: zeros, or ``other``, behind the end."""
    return x if column_at(i) < room else other


def total_of(lanes: tuple, room: int) -> Any:
    """The sum of the values of the rows that are there."""
    held = apply(there, lanes, room)
    return fold(5, add_lane, reduce(add, held[0], held[1:]))


def add_lane(x: Numeric, n: int) -> Any:
    return x + exchanged(x, 1 << n)


def cumulative(lanes: tuple) -> tuple:
    """Of each row the sum of the values up to it."""
    sums = apply(scan_of, lanes)
    return apply(with_those_before, sums, sums)


def scan_of(x: Numeric, i: int) -> Any:
    return fold(5, scan_step, x)


def scan_step(x: Numeric, n: int) -> Any:
    before = from_before(x, 1 << n)
    return x + before if lane_index() >= 1 << n else x


def with_those_before(x: Numeric, i: int, sums: tuple) -> Any:
    return fold(len(sums), with_one_before, x, i, sums)


def with_one_before(x: Numeric, n: int, i: int, sums: tuple) -> Any:
    last = from_lane(sums[n], LANES - 1)
    return x + last if n < i else x


def rows_of_lanes(lanes: tuple, group: int) -> tuple:
    """Of a thread's two rows of a matrix."""
    return generate(2, row_of_lanes, lanes, group)


def row_of_lanes(i: int, lanes: tuple, group: int) -> Any:
    row = group * ROWS + own_row() + i * 8
    return fold(len(lanes), of_lane_group, lanes[0], lanes, row)


def of_lane_group(x: Numeric, n: int, lanes: tuple, row: int) -> Any:
    found = from_lane(lanes[n], row % LANES)
    return found if udiv(row, LANES) == n else x


def columns_of_lanes(lanes: tuple, count: int) -> tuple:
    """Of the ``count`` columns that a thread has of a matrix."""
    return generate(count, column_of_lanes, lanes)


def column_of_lanes(i: int, lanes: tuple) -> Any:
    column = i // 2 * 8
    return from_lane(lanes[column // LANES], column % LANES + own_column() + i % 2)


def block_of(tile: StagedTile, slot: Any, group: int) -> tuple:
    """64 rows of a block in a stage, as accumulators."""
    return join(generate(tile.columns // STEP, matrix_of_block, tile, slot.stage, group))


def matrix_of_block(n: int, tile: StagedTile, stage: int, group: int) -> tuple:
    if tile.size == 4:
        return join(generate(4, pair_of_block, tile, stage, group * ROWS + own_row(), n * STEP + own_column()))
    lane = lane_index()
    row = group * ROWS + udiv(thread_index() % 128, 32) * 16 + lane % 16
    place = tile.layout.position((row, n * STEP + udiv(lane, 16) * 8), tile.held)
    return words_of(tile, stage, 0, place, False)


def pair_of_block(i: int, tile: StagedTile, stage: int, row: int, column: int) -> tuple:
    """Two neighbours in float32, of four matrices of 8 x 8."""
    at = tile.layout.position((row + i % 2 * 8, column + i // 2 * 8), tile.held)
    return load_shared(shared(tile.dtype, tile.offset), tile.begin_of(stage), at, 2)


@dataclass(frozen=True)
class RowScan(Component):
    """Cumulative sums along the rows of a block, of ``lines`` rows and so many ``columns``. Warps add up their 16 rows with
    shuffles, and leave their sums in shared memory from ``offset`` on, where others find them.

    Sums begin anew every ``piece`` warps. ``after``: they are of the rows of the piece behind a row."""

    lines: int
    columns: int
    offset: int
    piece: int
    after: bool

    @cached_property
    def warps(self) -> int:
        return self.lines // LINES_OF_WARP

    def of_warp(self, values: tuple, group: int, room: int) -> tuple:
        """A warp's sums along its rows. Rows from ``room`` on count as zeros."""
        row = group * ROWS + own_row()
        sums = apply(scan_octet, split(values, 4), room - row)
        if lane_index() >= LANES - 4:                  # which have the warp's last row
            each(leave_sums, sums, self, udiv(row, LINES_OF_WARP))
        return join(sums)

    def of_piece(self, sums: tuple, group: int) -> tuple:
        """The sums along the piece's rows, of those of a warp."""
        warp = group * 4 + udiv(thread_index() % 128, LANES)
        own = warp % self.piece
        return join(apply(with_other_warps, split(sums, 4), self, own, warp - own))

    def rows(self, group: int) -> tuple:
        """Sums of whole columns, as a thread's two rows of another matrix take them."""
        return generate(2, sum_of_column, self, group * ROWS + own_row(), 1)

    def own_columns(self) -> tuple:
        """The same for the columns that a thread has."""
        return generate(self.columns // 4, sum_of_column, self, own_column(), 2)

    def at(self, warp: int, column: int, count: int) -> tuple:
        return load_shared(shared(F32, self.offset), warp * self.columns, column, count)


def scan_octet(x: tuple, n: int, room: int) -> tuple:
    """Of eight columns: two of each of a thread's two rows."""
    upper = generate(2, scan_of_line, x, 0, room)
    lower = generate(2, scan_of_line, x, 1, room)
    return join((upper, apply(below, lower, upper)))


def scan_of_line(i: int, x: tuple, half: int, room: int) -> Any:
    return fold(3, line_step, x[2 * half + i] if 8 * half < room else convert(F32, 0.0))


def line_step(x: Numeric, n: int) -> Any:
    before = from_before(x, 4 << n)
    return x + before if lane_index() >= 4 << n else x


def below(x: Numeric, i: int, upper: tuple) -> Any:
    return x + from_lane(upper[i], LANES - 4 + lane_index() % 4)


def leave_sums(sums: tuple, n: int, to: RowScan, warp: int) -> None:
    store_shared(shared(F32, to.offset), warp * to.columns, n * 8 + own_column(), (sums[2], sums[3]))


def with_other_warps(sums: tuple, n: int, of: RowScan, own: int, first: int) -> tuple:
    return apply(with_others, sums, fold(of.piece, add_other, fill(F32, 2, 0.0), of, own, first, n * 8 + own_column()), of)


def add_other(sums: tuple, n: int, of: RowScan, own: int, first: int, column: int) -> tuple:
    x = of.at(first + n, column, 2)
    return (sums[0] + x[0], sums[1] + x[1]) if (n >= own if of.after else n < own) else sums


def with_others(x: Numeric, i: int, sums: tuple, of: RowScan) -> Any:
    return sums[i % 2] - x if of.after else sums[i % 2] + x


def sum_of_column(i: int, of: RowScan, first: int, pair: int) -> Any:
    return fold(of.warps, add_warp, convert(F32, 0.0), of, first + i // pair * 8 + i % pair)


def add_warp(x: Numeric, n: int, of: RowScan, column: int) -> Any:
    return x + of.at(n, column, 1)[0]


def leave_share(x: Numeric, i: int, to: Any, which: int, share: int, first: int, thread: int) -> None:
    """What a share of a tile's rounds makes of zeros, in the order of threads."""
    to[which, share, first + i, thread] = x


def take_share(x: Numeric, i: int, of: Any, which: int, share: int, first: int, thread: int, factor: Numeric) -> Any:
    """What the share makes of ``x``."""
    return x * factor + of[which, share, first + i, thread]


# --------------------------------------------------------------------------------------------------
# Sums that tiles have parts of: rounds add to rows of an array, ``x[m] += value``, in float32.
#
#     for n in parallel(k.rows):
#         for m in sequential(q.rows):
#             ...
#             sums += ds @ q[m]
#             dq[m] += ds.T @ k[n]               # of all tiles
#
# A tile's rows are what the product sums over, so that each warpgroup's rows are a part of its left operand:
#
# 1. **A place "shared".** Warpgroups write their rows of ``ds`` into swizzled shared memory (stmatrix), and meet. Then each
#    multiplies a part of the result, of all rows of the tile: 64 of its rows, or some of its columns. There are two such
#    places, which rounds take in turn: who is at the barrier of a round has read what the round before the last wrote.
# 2. **Reductions by TMA.** Warpgroups put their sums into a stage of shared memory. A thread of the producer's warpgroup for
#    each stage has TMA add it to the array (``cp.reduce.async.bulk.tensor``), and gives the stage back when TMA has read it.
# 3. **An order.** The n-th tile of a stack adds to a block of rows when the one before it has. A counter of each block says
#    how many have: the thread that adds waits for it before, and counts when TMA has finished. In blocks that its tile's
#    rounds do not visit a warp of its own passes the turn on. The last tile sets the counter to 0, as it was. A tile waits
#    for tiles of smaller numbers alone, which blocks take before, and all blocks run at once (the launch is cooperative),
#    so that some tile can always go on. ``Mapping(ordered=False)`` leaves the order out, and with it the same bits.
#
# Source: Shah et al., "FlashAttention-3", 2024, whose gradient of queries is added up so, without an order.

WARP, TURNS = 32, "turn_counts"


@dataclass(frozen=True)
class AddedOut(PanelTile):
    """``lines`` rows of what a round adds to an array with ``stacks`` axes in front: warpgroups put their parts into a stage
    of ``ring_added``, and TMA adds it. Of ``packed`` rows zeros are added to those of the next piece."""

    stacks: int = 0
    packed: bool = False

    @cached_property
    def map_spec(self) -> TensorMapSpec:
        return TensorMapSpec(self.dtype, (self.line, ROWS, *(1,) * self.stacks), self.size * self.line)

    # -- consumers ----------------------------------------------------------------------------------------------------

    def put(self, values: tuple, slot: Slot, row: int, column: int, rows: int) -> None:
        """A warpgroup's 64 rows from ``row`` on; the piece has so many ``rows`` of the block."""
        own = row + own_row()
        if len(values) % 16 == 0 and self.line % 32 == 0:
            places = generate(4, octet_place, self, self.begin_of(slot.stage), own, column + own_column(), own % 2)
            each(put_panel, split(values, 16), self, places, own, rows)
        else:
            each(put_octet, split(values, 4), self, self.begin_of(slot.stage), own, column, rows)
        fence_async()

    def clear(self) -> None:
        """Where results leave by TMA, from the same memory, it has read the last tile's. Warpgroups meet behind it."""
        if thread_index() % 128 == 0:
            tma_wait_read(0)

    def leave(self, ring: Any, slot: Slot) -> None:
        """TMA has read all stages, so that results may take their place."""
        for _ in range(ring.stages):
            ring.wait(slot)
            slot = ring.advance(slot)

    # -- one thread of each stage -------------------------------------------------------------------------------------

    def add(self, tensor_map: Any, place: tuple, slot: Slot) -> None:
        """Have TMA add a stage to the rows from a place (column, row, which matrix of stacks) on; it has read the stage."""
        fence_async_global()                           # others' additions are over
        for line in range(0, self.lines, ROWS):
            for column in range(0, self.columns, self.line):
                at = self.begin_of(slot.stage) + column * self.held + line * self.line
                tma_add(tensor_map, (place[0] + column, place[1] + line, *place[2:]), shared(F32, self.offset), at)
        tma_commit()
        tma_wait_read(0)

    def finish(self) -> None:
        """All that the thread has had TMA add is there."""
        tma_wait(0)


def octet_place(i: int, out: AddedOut, begin: int, row: int, column: int, is_odd: int) -> int:
    """Where the i-th octet of a panel is put: those of odd rows go two ahead, and back."""
    return begin + out.layout.position((row, column + i * 8 + (is_odd * 16 if i < 2 else -is_odd * 16)), out.held)


def put_panel(values: tuple, n: int, out: AddedOut, places: tuple, row: int, rows: int) -> None:
    """32 columns of a thread's two rows. Odd rows go two octets ahead, and back, so that the 16 lanes whose pairs are stored
    together reach all banks. Panels and rows are apart by constants, so that a thread has four places."""
    each(put_octets, (0, 1), split(values, 4), n, out, places, row, rows)


def put_octets(i: int, n: int, octets: tuple, panel: int, out: AddedOut, places: tuple, row: int, rows: int) -> None:
    """Two octets of columns, 16 apart."""
    is_odd = row % 2
    one, other = octets[i], octets[i + 2]
    for ahead, values in ((0, generate(4, either, is_odd, other, one)), (2, generate(4, either, is_odd, one, other))):
        each(put_rows, split(values, 2), out, places[i + ahead], panel * out.held * out.line, row, rows)


def put_rows(pair: tuple, n: int, out: AddedOut, place: int, panel: int, row: int, rows: int) -> None:
    kept = apply(pair_or_zeros, pair, row + n * 8 < rows) if out.packed else pair
    store_shared(shared(F32, out.offset), place, panel + n * 8 * out.line, kept)


def either(n: int, first: int, one: tuple, other: tuple) -> Any:
    return one[n] if first else other[n]


def put_octet(values: tuple, n: int, out: AddedOut, begin: int, row: int, column: int, rows: int) -> None:
    """Eight columns: two of each of a thread's two rows."""
    place = begin + out.layout.position((row, column + n * 8 + own_column()), out.held)
    each(put_rows, split(values, 2), out, place, 0, row, rows)


def pair_or_zeros(x: Any, n: int, is_there: bool) -> Any:
    return x if is_there else convert(F32, 0.0)


# -- passes: what is added, and its turns ---------------------------------------------------------------------------------

def handed_on(chain: Chain, choice: ScheduleChoice, x: Value, sums: str) -> list[str]:
    """A consumer's lines for its part of what a round adds."""
    (d,), n = x.args, chain.index.name
    rows, columns = choice.part(chain, d)
    row, column = (f"group * {rows}", "0") if rows else ("0", f"group * {columns}")
    there = f"{chain.stop} - {n}" if chain.index.piece is not None else str(choice.blocks[n])
    return ["ring_added.wait(at_added)", f"out_{x.data.parameter.name}.put({sums}, at_added, {row}, {column}, {there})",
            "ring_added.release(at_added.stage)", "at_added = ring_added.advance(at_added)"]


class Adder(ProducerRole):
    """One thread of each stage has TMA add what consumers have put there; in order, when the tiles before have."""

    def called(self, takes: list[str], arrays: list[str], turns: list[str]) -> list[str]:
        """How the kernel calls it."""
        if not self.chain.added:
            return []
        lines = [f"        elif thread_index() == {WARP * (1 + n)}:\n"
                 f"            add({', '.join([*takes, *arrays, *turns, str(n)])})" for n in range(self.choice.adding)]
        if self.passes:
            lines += [f"        elif thread_index() >= {3 * WARP}:", f"            pass_on({', '.join([*takes, *turns])})"]
        return lines

    @property
    def passes(self) -> bool:
        """Whether there are blocks that a tile's rounds do not visit."""
        return self.choice.ordered and (self.has_end or self.first != "0")

    def text(self, takes: list[str], arrays: list[str], turns: list[str]) -> list[str]:
        if not self.chain.added:
            return []
        self.tiles()
        made = [f"def add({', '.join([*takes, *arrays, *turns, 'own'])}):",
                '    """What consumers have put into the thread\'s own stage: shared -> global."""',
                "    zero = thread_index() * 0", "    at_added = Slot(zero, zero)",
                "    ring_added.expect(Slot(zero + own, zero), 0)          # a fresh stage is empty", *self.lines,
                f"    out_{arrays[0]}.finish()", "", ""]
        if self.passes:
            passing = Passer(self.chain, self.places, self.choice, self.order, self.ranges, False)
            passing.tiles()
            made += [f"def pass_on({', '.join([*takes, *turns])}):",
                     '    """Turns at blocks that a tile does not visit, one each lane."""', *passing.lines, "", ""]
        return made

    def begin_tile(self, joined: bool) -> None:
        """It brings nothing."""

    def range(self) -> None:
        super().range()
        if self.choice.ordered:
            self.turn()

    def turn(self) -> None:
        """Which turn is the tile's, and its first counter."""
        chain, step, n = self.chain, self.step, self.n
        rows, count = chain.rows.name, chain.extent_of(chain.rows)
        blocks, stacks = f"blocks(sizes.{n}, {step})", chain.own_stacks
        if chain.index.piece is not None:
            piece = chain.index.piece.text()
            blocks = f"(udiv(sizes.{n}, {step}) + sizes.{chain.index.piece.of_loop.name})"
        which = ""
        for stack in stacks:
            which = f"({which} * sizes.{stack.name} + {stack.name})" if which else stack.name
        first = f"{which} * {blocks}" if stacks else "0"
        if chain.index.piece is not None:
            first += f" + udiv({n}_origin, {step}) + {piece}"
        size = self.choice.rows
        own = [f"turn = udiv({rows}, {size})", f"passed = -turn if {rows} + {size} >= {count} else 1"]
        self.put(f"first_turn = {first}", *([] if self.choice.staggered else own))

    @property
    def counter(self) -> str:
        return f"{TURNS}, first_turn + udiv({self.n}, {self.step})"

    def events(self, part: list, guarded: bool, joined: bool = False) -> None:
        if part is not self.order.round:
            return
        store = self.chain.added[0].data
        name, stacks = store.parameter.name, [stack.name for stack in self.chain.own_stacks[::-1]]
        row = f"{self.n}_origin + {self.n}" if self.chain.index.piece is not None else self.n
        ordered, more = self.choice.ordered, "    " * (self.choice.adding > 1)
        lines = [*([f"turn, passed = turn_at({self.chain.rows.name}, {self.n}, sizes)"] if self.choice.staggered else []),
                 *([f'await_counter({self.counter}, turn, "acquire")'] if ordered else []), "ring_added.acquire(at_added)",
                 f"out_{name}.add({name}, ({', '.join(['0', row, *stacks])}), at_added)",
                 "ring_added.expect(at_added, 0)"]
        lines += [f"out_{name}.finish()", f'atomic_add({self.counter}, passed, "release")'] if ordered else []
        self.put(*(["if at_added.stage == own:"] if more else []), *(more + line for line in lines),
                 "at_added = ring_added.advance(at_added)")


class Passer(Adder):
    """A warp that passes turns on, of blocks that a tile's rounds do not visit."""

    def loops(self) -> None:
        n, step = self.n, self.step
        ends = []
        if self.has_end:
            ends.append((f"{self.first} + blocks({self.end} - {self.first}, {step}) * {step}", self.extent))
        if self.first != "0":
            ends.append(("0", self.first))
        for begin, end in ends:
            self.put(f"{n} = rolled({begin} + thread_index() % {WARP} * {step})", f"while {n} < {end}:",
                     f'    await_counter({self.counter}, turn, "acquire")',
                     f'    atomic_add({self.counter}, passed, "release")', f"    {n} = rolled({n} + {WARP * step})")

    @property
    def extent(self) -> str:
        """The place behind the last block of the axis, or of the piece, wherever rounds end."""
        chain = self.chain
        return chain.stop if chain.index.piece is not None else f"sizes.{self.n}"
