"""Step 3 of `attention`: the online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022).

Of each row the largest score so far is known, and O and the sum of weights are of weights relative to it. When a block
brings a larger one, both are scaled by ``growth``. Four threads share a row and exchange their largest scores; each keeps
the sum of its own weights, and they are added up when the tile ends.

Weights are 2^(c s - c largest), one fma and one ex2 each; c has the scale and log2(e) in it. Maxima and sums go in eight
chains side by side: with four the kernel was 7 % slower at D 128.

The fma's c s is exact, and the c largest that it subtracts is rounded: the largest score's weight is 2 to the power of that
rounding error. Beyond ``LARGE`` the error would show (of scores of -1e9 it is 2^16 and more, which float16 has not), so a
warp that has such a row subtracts first: an instruction an element, behind a branch that ordinary scores never take.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.components import Component, Scalar
from gemmkit.kernels.sm90.store import own_column, own_row
from gemmkit.lang.aggregates import convert, convert_all
from gemmkit.lang.checks import converted
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric, View
from gemmkit.lang.memory import number_of
from gemmkit.lang.registers import alike, apply, each, reduce, split, together
from gemmkit.ptx.arithmetic import exp2, fma, log2, maximum, reciprocal
from gemmkit.ptx.memory import pack_narrow, shared, store_global, unpack_narrow
from gemmkit.ptx.mma import pack_fragment, stmatrix
from gemmkit.ptx.special import SHUFFLE, any_lane, block_x, grid_x, lane_index, thread_index, udiv
from gemmkit.ptx.tma import tma_commit, tma_store, tma_wait, tma_wait_read
from gemmkit.ptx.wgmma import fence_async, named_barrier

if TYPE_CHECKING:
    from gemmkit.kernels.attention.spec import AttentionSpec, HeadSpec

# --------------------------------------------------------------------------------------------------
# Named tuples of run-time values that travel together through the kernel, and the sizes of a launch.

F32 = np.dtype(np.float32)
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class AttentionSizes(Component):
    """The run-time part: queries and keys of a head (of no single sequence, where sequences are packed); the scale of
    scores, and what takes unscaled scores to powers of 2; by how many heads of Q one of K and one of V is shared, and
    whether they have a batch of their own (1) or one for all (0); the first row of K and V."""

    queries: Scalar
    keys: Scalar
    scale: Scalar
    to_log2: Scalar
    k_share: Scalar
    v_share: Scalar
    k_batch: Scalar
    v_batch: Scalar
    first_key: Scalar


class HeadTile(NamedTuple):
    """A block's rows of Q: the first one (-1: there is no tile), whose head and batch, how many queries and keys these have,
    and in which row of the arrays they begin."""

    m: Any
    head: Any
    batch: Any
    queries: Any
    keys: Any
    first_query: Any
    first_key: Any


class KeyBlocks(NamedTuple):
    """Blocks of keys that a tile visits, from the last down to the first, and those among them in which nothing is
    tested."""

    first: Any
    last: Any
    free_first: Any
    free_last: Any


class ScoreCoord(NamedTuple):
    """Where a thread's first value of S stands: its tile, its row of the tile's head, its key, and the block of keys."""

    tile: HeadTile
    row: Any
    column: Any
    block: Any


class Limits(NamedTuple):
    """The keys that a row of a thread sees: the first, and the one behind the last."""

    first: Any
    end: Any


class Stats(NamedTuple):
    """Of a thread's two rows: their largest scores so far, and its own part of the sums of their weights."""

    upper: Any
    lower: Any
    upper_sum: Any
    lower_sum: Any


class WeightedSums(NamedTuple):
    """Of a thread's two rows: the sums of weighted values, and the stats that these are relative to."""

    o: Any
    stats: Stats


class AttentionState(NamedTuple):
    """What a consumer carries from round to round: O and stats of the blocks of keys so far, the weights P of the last of
    these blocks, which are not in O yet, and the slot that it is in."""

    o: Any
    p: Any
    stats: Stats
    slot: Any


class AttentionOutputs(NamedTuple):
    """The result and the logarithms of the sums, in global memory."""

    out: Any
    lse: Any
    map: Any


exchanged = SHUFFLE["bfly"]
LARGE = 1024.0                         # exponents of 2 up to it are rounded by no more than 2^-15


def begin() -> Stats:
    """Of a tile of which nothing was seen yet."""
    low, none = convert(F32, -math.inf), convert(F32, 0.0)
    return Stats(low, low, none, none)


def exponent(spec: HeadSpec, sizes: AttentionSizes) -> Any:
    """What takes scores to exponents of 2."""
    return convert(F32, LOG2E) if spec.has_score else sizes.to_log2


def soften(s: tuple, spec: HeadSpec, sizes: AttentionSizes, stats: Stats) -> tuple:
    """Weights, the new stats, and what O's two rows are to be multiplied by."""
    c = exponent(spec, sizes)
    groups = split(s, 8)                               # of both rows: two columns, and two that are 8 columns on
    m = reduce(larger, groups[0], groups[1:])
    upper = quad_max(maximum(maximum(maximum(m[0], m[1]), maximum(m[4], m[5])), stats.upper))
    lower = quad_max(maximum(maximum(maximum(m[2], m[3]), maximum(m[6], m[7])), stats.lower))
    first, second = finite(upper), finite(lower)
    growth = exp2((stats.upper - first) * c), exp2((stats.lower - second) * c)
    over, under = c * first, c * second
    if any_lane(maximum(abs(over), abs(under)) > LARGE):
        s, over, under = apply(lowered, s, first, second), convert(F32, 0.0), convert(F32, 0.0)
    weights = apply(weight, s, c, over, under)
    groups = split(weights, 8)
    t = reduce(added, groups[0], groups[1:])
    return weights, Stats(upper, lower, fma(stats.upper_sum, growth[0], (t[0] + t[1]) + (t[4] + t[5])),
                          fma(stats.lower_sum, growth[1], (t[2] + t[3]) + (t[6] + t[7]))), growth


def larger(a: tuple, b: tuple) -> tuple:
    return together(maximum, a, b)


def added(a: tuple, b: tuple) -> tuple:
    return together(add, a, b)


def add(x: Numeric, y: Numeric) -> Any:
    return x + y


def finite(x: Numeric) -> Any:
    """A row of which nothing was seen so far has weights 0, not NaN."""
    return x if x > -math.inf else convert(F32, 0.0)


@alike(4)
def weight(x: Numeric, i: int, c: Numeric, over: Numeric, under: Numeric) -> Any:
    return exp2(fma(x, c, -(over if i // 2 % 2 == 0 else under)))


@alike(4)
def lowered(x: Numeric, i: int, first: Numeric, second: Numeric) -> Any:
    return x - (first if i // 2 % 2 == 0 else second)


def quad_max(x: Numeric) -> Any:
    x = maximum(x, exchanged(x, 1))
    return maximum(x, exchanged(x, 2))


def quad_sum(x: Numeric) -> Any:
    x = x + exchanged(x, 1)
    return x + exchanged(x, 2)


def packed(spec: HeadSpec, weights: tuple) -> tuple:
    """P as A's fragments, one for each 16 keys."""
    return apply(packed_step, split(weights, spec.reuse.values), spec)


def packed_step(weights: tuple, n: int, spec: HeadSpec) -> tuple:
    return pack_fragment(spec.dtype, weights)


def rescale(o: tuple, upper: Numeric, lower: Numeric) -> tuple:
    """O's rows by a factor each."""
    return apply(scaled, o, upper, lower)


@alike(4)
def scaled(x: Numeric, i: int, upper: Numeric, lower: Numeric) -> Any:
    return x * (upper if i // 2 % 2 == 0 else lower)


# --------------------------------------------------------------------------------------------------
# Scores and masks, element by element.
#
# | block of keys | scores | a score's function is told |
# |---|---|---|
# | `FREE` | as they are: every key is there, and seen by every query | the key |
# | `TESTED` | -inf of what is hidden, and beyond the last key | the key, or the last one |
#
# A thread's values of S lie in two rows, 8 apart: (row, c), (row, c + 1), (row + 8, c), (row + 8, c + 1), then the same 8
# columns on. Functions of the user's get places in range: beyond the last query or key those of the last one.

@dataclass(frozen=True)
class Free(Component):
    """A block in which nothing is tested."""

    def scores(self, s: tuple, spec: HeadSpec, sizes: AttentionSizes, place: ScoreCoord) -> tuple:
        if spec.has_score:
            return apply(score, s, self, spec, sizes, place)
        return s

    def key(self, n: int, tile: HeadTile) -> int:
        return n


@dataclass(frozen=True)
class Tested(Component):
    """A block with keys that some queries may not see."""

    def scores(self, s: tuple, spec: HeadSpec, sizes: AttentionSizes, place: ScoreCoord) -> tuple:
        if spec.has_score:
            s = apply(score, s, self, spec, sizes, place)
        return apply(seen, s, spec, place, limits_of(spec, place, 0), limits_of(spec, place, 2))

    def key(self, n: int, tile: HeadTile) -> int:
        return max(min(n, tile.keys - 1), 0)


FREE, TESTED = Free(), Tested()


def limits_of(spec: HeadSpec, place: ScoreCoord, i: int) -> Limits:
    """The keys that a row sees, counted from the thread's first one: asked once a row, since a mask may load them."""
    tile, row = place.tile, row_of(i, place)
    shift = tile.keys - tile.queries
    first, end = 0, tile.keys
    if spec.mask.has_first:
        first = spec.mask.first_shown(row, tile.head, tile.batch, shift) - place.column
    if spec.mask.has_end:
        end = min(end, spec.mask.end_shown(row, tile.head, tile.batch, shift))
    return Limits(first, end - place.column)


def row_of(i: int, place: ScoreCoord) -> int:
    return min(place.row + i // 2 % 2 * 8, place.tile.queries - 1)


def column_of(i: int, place: ScoreCoord) -> int:
    return place.column + column_at(i)


def column_at(i: int) -> int:
    return i // 4 * 8 + i % 2


def score(x: Numeric, i: int, kind: Free, spec: HeadSpec, sizes: AttentionSizes, place: ScoreCoord) -> Any:
    tile, s = place.tile, x * sizes.scale
    if spec.score.real_places:
        m = convert(F32, place.row) + convert(F32, i // 2 % 2 * 8)
        n = convert(F32, place.column) + convert(F32, column_at(i))
        return converted(spec.score, "__call__", spec.score.at(s, m, n, tile.head, tile.batch), F32)
    m, n = row_of(i, place), kind.key(column_of(i, place), tile)
    return converted(spec.score, "__call__", spec.score.at(s, m, n, tile.head, tile.batch), F32)


def seen(x: Numeric, i: int, spec: HeadSpec, place: ScoreCoord, upper: Limits, lower: Limits) -> Any:
    limits = upper if i // 2 % 2 == 0 else lower
    within = column_at(i) < limits.end
    if spec.mask.has_first:
        within = within and limits.first <= column_at(i)
    if spec.mask.has_visible:
        tile, row, column = place.tile, row_of(i, place), column_of(i, place)
        shift = tile.keys - tile.queries
        within = within and spec.mask.shows(row, column, tile.head, tile.batch, shift)
    return x if within else -math.inf


# --------------------------------------------------------------------------------------------------
# Which tiles a block computes, and which keys each of them visits: producer and consumers ask alike.
#
# The host has worked out which block computes which tiles (`gemmkit.kernels.attention.kernel`): row ``turn * blocks +
# block`` of ``order`` is a tile.

ROWS = 64                              # of a consumer


def tile_at(spec: HeadSpec, sizes: AttentionSizes, order: View, turn: int) -> HeadTile:
    """The block's ``turn``-th tile; of the one behind the last m is -1."""
    row = turn * grid_x() + block_x()
    m, head, batch = number_of(order, row, 0), number_of(order, row, 1), number_of(order, row, 2)
    if spec.packed:
        return HeadTile(m, head, batch, number_of(order, row, 3), number_of(order, row, 4), number_of(order, row, 5),
                        number_of(order, row, 6))
    return HeadTile(m, head, batch, sizes.queries, sizes.keys, 0, sizes.first_key)


def slice_of(spec: HeadSpec, tile: HeadTile) -> int:
    """Where the tile's arrays are along the batch: packed sequences have one, and ``tile.batch`` is the sequence."""
    return 0 if spec.packed else tile.batch


def key_blocks(spec: HeadSpec, tile: HeadTile) -> KeyBlocks:
    """The blocks of keys of a tile: one at least, of which the mask then shows nothing."""
    return blocks_of_rows(spec, tile, tile.m, min(tile.m + spec.block_m, tile.queries))


def consumer_blocks(spec: HeadSpec, tile: HeadTile, group: int) -> KeyBlocks:
    """Those of a consumer's rows of the tile, from the tile's last or the one before down to the tile's first: the last one
    may show nothing to the upper rows (causal masks, as long as a block has 64 keys or more)."""
    blocks = key_blocks(spec, tile)
    begin = min(tile.m + group * ROWS, tile.queries - 1)
    own = blocks_of_rows(spec, tile, begin, min(begin + ROWS, tile.queries))
    last = max(own.last, max(blocks.last - 1, blocks.first + 1))
    return KeyBlocks(blocks.first, last, own.free_first if spec.tests_below else blocks.free_first, own.free_last)


def blocks_of_rows(spec: HeadSpec, tile: HeadTile, begin: int, end: int) -> KeyBlocks:
    """Those that rows ``begin`` to ``end`` of a tile's head visit."""
    keys, shift = tile.keys, tile.keys - tile.queries
    first, last = spec.mask.visited(begin, end, keys, tile.head, tile.batch, shift)
    most = udiv(max(keys - 1, 0), spec.block_n)
    first = min(udiv(max(first, 0), spec.block_n), most)
    last = max(udiv(max(min(last, keys), 0) + spec.block_n - 1, spec.block_n), first + 1)
    if not spec.mask.has_free:
        return KeyBlocks(first, last, first, first)
    free, tested = spec.mask.untested(begin, end, keys, tile.head, tile.batch, shift)
    free = udiv(max(free, 0) + spec.block_n - 1, spec.block_n)
    tested = udiv(max(min(tested, keys), 0), spec.block_n)
    return KeyBlocks(first, last, max(free, first), max(tested, first))


# --------------------------------------------------------------------------------------------------
# Step 4 of `attention`: a tile's O, divided by the sums of weights, to global memory; the logarithms of the sums.
#
# | store | how | where |
# |---|---|---|
# | `AttentionTmaStore` | through swizzled panels of shared memory, with TMA, which clips rows | what TMA carries |
# | `AttentionDirectStore` | pairs, from the registers | any strides; packed sequences |
# | `QuadOut` | octets, from the registers: the four lanes of a row exchange pairs | the same, without shared memory |
#
# A row that saw no key has the sum 0: its O is 0 and its logarithm -inf.

LN2 = math.log(2)


@dataclass(frozen=True)
class AttentionStore(Component):
    """How a consumer's 64 rows of O leave."""

    uses_tma = False

    def run(self, spec: HeadSpec, sizes: AttentionSizes, sums: WeightedSums, outputs: AttentionOutputs, tile: HeadTile,
            group: int) -> None:
        """The end of a tile."""
        stats = sums.stats
        upper, lower = quad_sum(stats.upper_sum), quad_sum(stats.lower_sum)
        values = convert_all(spec.dtype, rescale(sums.o, inverse(upper), inverse(lower)))
        row = tile.m + group * 64
        if spec.has_lse:
            scale = convert(F32, 1.0) if spec.has_score else sizes.scale
            if lane_index() % 4 == 0:
                store_lse(spec, outputs.lse, tile, row + own_row(), scale * finite(stats.upper), upper)
                store_lse(spec, outputs.lse, tile, row + own_row() + 8, scale * finite(stats.lower), lower)
        self.put(spec, values, outputs, tile, row, group)

    def put(self, spec: HeadSpec, values: tuple, outputs: AttentionOutputs, tile: HeadTile, row: int, group: int) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Before the block ends."""


def inverse(total: Numeric) -> Any:
    """One over a sum of weights; 0 of none."""
    return reciprocal(total) if total != 0 else convert(F32, 0.0)


def store_lse(spec: HeadSpec, lse: View, tile: HeadTile, row: int, largest: Numeric, total: Numeric) -> None:
    """A row's logarithm of the sum of exponentials, of its largest score and the sum of weights relative to it."""
    if row < tile.queries:
        lse[slice_of(spec, tile), tile.head, tile.first_query + row] = largest + log2(total) * convert(F32, LN2)


@dataclass(frozen=True)
class AttentionTmaStore(AttentionStore):
    """Through panels of a swizzled line's width, which lie behind K and V."""

    uses_tma = True

    def put(self, spec: Any, values: tuple, outputs: AttentionOutputs, tile: HeadTile, row: int, group: int) -> None:
        is_leader = thread_index() % 128 == 0
        if is_leader:                                  # TMA has read what the last tile left there
            tma_wait_read(0)
        named_barrier(1 + group, 128)
        each(put_matrix, split(values, 8), spec, group)
        fence_async()
        named_barrier(1 + group, 128)
        if is_leader:
            if row < tile.queries:
                for panel in range(spec.head.count):
                    tma_store(outputs.map, (panel * spec.head.line, tile.first_query + row, tile.head, slice_of(spec, tile)),
                              shared(spec.dtype, spec.o_offset), (panel * spec.block_m + group * 64) * spec.head.line)
            tma_commit()

    def finish(self) -> None:
        """Shared memory must last until TMA has read it."""
        if thread_index() % 128 == 0:
            tma_wait(0)


def put_matrix(values: tuple, n: int, spec: AttentionSpec, group: int) -> None:
    """16 rows by 16 columns of a warp: four 8 x 8 matrices, of which a lane addresses a line."""
    lane = lane_index()
    row = group * 64 + udiv(thread_index() % 128, 32) * 16 + lane % 16
    place = spec.head.layout.position((row, n * 16 + udiv(lane, 16) * 8), spec.block_m)
    stmatrix(shared(spec.dtype, spec.o_offset), 0, place, values, False)


@dataclass(frozen=True)
class AttentionDirectStore(AttentionStore):
    """Pairs of neighbours, from the registers."""

    def put(self, spec: HeadSpec, values: tuple, outputs: AttentionOutputs, tile: HeadTile, row: int, group: int) -> None:
        each(put_pair, split(values, 2), spec, outputs.out, tile, row + own_row())


def put_pair(pair: tuple, n: int, spec: HeadSpec, out: View, tile: HeadTile, row: int) -> None:
    line = row + n % 2 * 8
    if line < tile.queries:
        place = (slice_of(spec, tile), tile.head, tile.first_query + line, own_column())
        store_global(out, 3, place, (0, 0, 0, n // 2 * 8), pair)


@dataclass(frozen=True)
class QuadOut(AttentionStore):
    """Octets of neighbours, from the registers. The four lanes that share a row have a pair of each octet: they exchange
    pairs, so that each has one octet in four, and stores 16 bytes at once where O's strides allow it. Whether a row is there
    is asked once (D 256: of the 2562 instructions of a tile's end, by pairs, 1218 are left)."""

    def put(self, spec: HeadSpec, values: tuple, outputs: AttentionOutputs, tile: HeadTile, row: int, group: int) -> None:
        words = apply(octets, split(pack_narrow(values), 8))
        each(put_half, (0, 1), spec, outputs.out, tile, row + own_row(), words)


def octets(words: tuple, n: int) -> tuple:
    """Of four octets of each of two rows the one that is this lane's."""
    return quad_transpose(words[0], words[2], words[4], words[6]), quad_transpose(words[1], words[3], words[5], words[7])


def quad_transpose(a: Numeric, b: Any, c: Numeric, d: Numeric) -> tuple:
    """The four words of a lane's row of a 4 x 4 matrix, of which each lane of a quad gives a column."""
    is_odd, is_upper = lane_index() % 2 == 1, lane_index() % 4 >= 2
    ab, cd = swapped(a, b, is_odd, 1), swapped(c, d, is_odd, 1)
    even, odd = swapped(ab[0], cd[0], is_upper, 2), swapped(ab[1], cd[1], is_upper, 2)
    return even[0], odd[0], even[1], odd[1]


def swapped(x: Numeric, y: Numeric, is_second: Any, distance: int) -> tuple:
    """The rows of a 2 x 2 matrix, of which two lanes give the columns."""
    got = exchanged(x if is_second else y, distance)
    return (got if is_second else x), (y if is_second else got)


def put_half(half: int, n: int, spec: HeadSpec, out: View, tile: HeadTile, row: int, words: tuple) -> None:
    line = row + n * 8
    if line < tile.queries:
        place = (slice_of(spec, tile), tile.head, tile.first_query + line, lane_index() % 4 * 8)
        each(put_octet, words, n, spec, out, place)


def put_octet(words: tuple, n: int, half: int, spec: HeadSpec, out: View, place: tuple) -> None:
    store_global(out, 3, place, (0, 0, 0, n * 32), unpack_narrow(spec.dtype, words[half]))
