"""Blocks that share K through a workspace in global memory: a fixed number of shares, or stream-K.

Stream-K deals the k-tiles of all tiles evenly to as many blocks as are resident (Osama et al., "Stream-K: Work-centric
Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU", PPoPP 2023).

The k-tiles of a product are counted through: tile t has those from t ``steps`` to (t + 1) ``steps``. The first tiles are
*streamed*: block x of g takes the x-th of g equal shares of their k-tiles, wherever a tile ends. The others are whole waves:
block x computes tile ``streamed`` + x, then every g-th (the paper's "two-tile Stream-K + data-parallel" hybrid). Where
blocks stand in clusters a cluster is what is called a block here, and tiles are those of a cluster. Of a share

* the k-tiles of a tile that another block began come first: its sums go to the workspace, and the block counts itself in;
* whole tiles are computed as usual;
* a tile that another block goes on with comes last: its first k-tiles are this block's, so it is the one that finishes. It
  waits for the next blocks, merges their sums in the order of blocks, and goes on to the epilogue.

Two tiles (a and b) of four k-tiles by three blocks, in shares of 3, 3 and 2:

    tile     a a a a b b b b                  block 1 stores the sums of a's last k-tile, block 2 of b's two;
    block    0 0 0 1 1 1 2 2                  then block 0 merges and finishes a, and block 1 finishes b

**No deadlock.** A block stores partial sums, if at all, before it waits, and waits for none that come after a wait. All
blocks must be resident: the launch is cooperative, and the driver is asked before the first.

**Bounded workspace.** A block stores partial sums once, so g tiles of accumulators are enough, whatever the product. If a
share is a tile or more, at most two blocks meet in a tile, and the sums that a block waits for were stored long before.

**The same bits.** Which block has which k-tiles is known before the launch; sums are merged in that order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmkit.components import Array, Scalar
from gemmkit.kernels.collectives.scheduler import Reduction, TileScheduler, dealt
from gemmkit.lang.component_products import StackShape, with_number
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import Numeric, View
from gemmkit.lang.registers import Registers, apply, each, fold, generate, join, split
from gemmkit.ptx.arithmetic import divided, divisor_reciprocal
from gemmkit.ptx.barriers import atomic_add, await_counter, set_counter
from gemmkit.ptx.memory import load_global, load_shared, shared, store_global, store_shared
from gemmkit.ptx.special import barrier, block_x, rolled, thread_index, udiv, warp_barrier

if TYPE_CHECKING:
    from gemmkit.kernels.simt import SimtSpec
    from gemmkit.kernels.spec import Spec
    from gemmkit.runtime.device import DeviceInfo


# --------------------------------------------------------------------------------------------------
# Shares of K that meet in a workspace in global memory: any number of them, without clusters (sm_70 on).
#
# Every block of (tile, share) writes its accumulators to the workspace and counts itself in. Two kinds go on from there:
#
# * `WorkspaceSums`: the block that is counted last reads all shares, from the first to the last, and merges them. No block
#   waits for another, so any grid will do. The last one's time grows with the number of shares.
# * `SlicedSums`: all blocks wait until all are counted. Then each merges a slice of the tile over all shares, in groups of
#   neighbours whose number depends on the shares alone, writes it back, and the last to do so collects the slices. It is for
#   few tiles and many shares. Blocks that wait must all be on multiprocessors: the host takes this kind for no more blocks
#   than there are multiprocessors, and asks the driver before the first launch (`gemmkit.runtime.launch.check_residency`).
#
# Whoever comes last sets the tile's counters to 0 again: the next launch finds them so. Sums are never cleared. A place
# is written in every launch before it is read.
#
# Ordering: all threads of a block write, meet at a barrier, and one of them adds to the counter, releasing (for the
# device) what it knows of; the one that finds the last number has acquired all, and its block meets again before anyone
# reads.

COUNTERS = 2                           # of a tile: blocks that have written their sums, and their slices
INT32 = np.dtype(np.int32)
FLAG = 4                               # bytes of shared memory by which a block's threads hear what one of them counted


@dataclass(frozen=True)
class WorkspaceSums(Reduction):
    """The block that comes last sums ``shares`` shares: ``sums`` are theirs, ``counts`` has `COUNTERS` numbers a tile.

    On the host the arrays are descriptions without an address (`gemmkit.runtime.launch`), until a launch has a stream.
    """

    shares: Scalar
    sums: Array
    counts: Array

    outputs = ("sums", "counts")
    is_shared = True
    divides_k = True

    def tile(self, block: int) -> int:
        return udiv(block, self.shares)

    def rank(self) -> int:
        return block_x() - udiv(block_x(), self.shares) * self.shares

    def share(self, count: int, rank: int) -> tuple:
        return dealt(count, self.shares, rank)

    def gather(self, spec: Any, accumulators: Any, rank: int) -> bool:
        tile = spec.scheduler.first()
        self.put(spec, accumulators, tile, rank)
        if self.counted(tile * COUNTERS) + 1 < self.shares:
            return False
        if thread_index() == 0:
            set_counter(self.counts, tile * COUNTERS, 0)
        self.fetch(spec, accumulators, tile)
        peer = 1
        while peer < self.shares:                      # unrolled, it would take the registers of blocks side by side
            self.merge_share(spec, accumulators, tile, peer)
            peer = rolled(peer + 1)
        return True

    # -- steps --------------------------------------------------------------------------------------------------------

    def put(self, spec: SimtSpec, accumulators: Registers, tile: int, rank: int) -> None:
        """A block's accumulators to its place in the workspace."""
        first = (tile * self.shares + rank) * spec.sums_count + thread_index() * spec.sums_width
        for i in range(spec.fragments_m):
            for j in range(spec.fragments_n):
                each(put_piece, split(accumulators[i, j], spec.sums_width), i, j, spec, self.sums, first)

    def fetch(self, spec: Any, accumulators: Any, tile: int) -> None:
        """The first share's sums, or what stands in their place, to the accumulators."""
        first = tile * self.shares * spec.sums_count + thread_index() * spec.sums_width
        for i in range(spec.fragments_m):
            for j in range(spec.fragments_n):
                accumulators[i, j] = fetch_fragment(i, j, spec, self.sums, first)

    def merge_share(self, spec: Any, accumulators: Any, tile: int, rank: int) -> None:
        first = (tile * self.shares + rank) * spec.sums_count + thread_index() * spec.sums_width
        for i in range(spec.fragments_m):
            for j in range(spec.fragments_n):
                accumulators[i, j] = apply(merge, accumulators[i, j], fetch_fragment(i, j, spec, self.sums, first), spec)

    def counted(self, counter: int) -> int:
        """Count the block in, behind all that its threads have written; how many were there before. The block meets."""
        barrier()
        if thread_index() == 0:
            before = atomic_add(self.counts, counter, 1, "acq_rel")
            store_shared(shared(INT32, 0), 0, 0, (before,))
        barrier()
        found = load_shared(shared(INT32, 0), 0, 0, 1)[0]
        barrier()                                      # it has been read: other things may take its place
        return found

    # -- on the host ----------------------------------------------------------------------------------------------------

    @property
    def blocks_of_a_tile(self) -> int:
        return int(self.shares)

    def shared_bytes(self, spec: Spec) -> int:
        return FLAG


@dataclass(frozen=True)
class SlicedSums(WorkspaceSums):
    """Each of the blocks that share a tile sums a slice of it."""

    waits = True

    def gather(self, spec: Any, accumulators: Any, rank: int) -> bool:
        tile = spec.scheduler.first()
        self.put(spec, accumulators, tile, rank)
        barrier()
        if thread_index() == 0:
            atomic_add(self.counts, tile * COUNTERS, 1, "release")
            await_counter(self.counts, tile * COUNTERS, self.shares, "acquire")
        barrier()
        self.sum_slice(spec, tile, rank)
        if self.counted(tile * COUNTERS + 1) + 1 < self.shares:
            return False
        if thread_index() == 0:
            set_counter(self.counts, tile * COUNTERS, 0)
            set_counter(self.counts, tile * COUNTERS + 1, 0)
        self.fetch(spec, accumulators, tile)
        return True

    def sum_slice(self, spec: SimtSpec, tile: int, rank: int) -> None:
        """The block's pieces of the tile: each thread sums a group of neighbouring shares, the first ones sum the groups."""
        pieces = udiv(spec.sums_pieces + self.shares - 1, self.shares)          # of a block
        across = min(pieces, spec.threads)                                      # pieces that are summed at a time
        groups = min(udiv(spec.threads, across), self.shares)                   # of shares, each a thread's
        group = udiv(thread_index(), across)
        own = udiv(self.shares + groups - 1, groups)
        partial = shared(spec.operator.fragment_c.dtype, 0)
        end = min((rank + 1) * pieces, spec.sums_pieces)
        for start in range(rank * pieces, end, across):
            piece = start + thread_index() - group * across
            first = tile * self.shares * spec.sums_count + piece * spec.sums_width
            is_mine = piece < end and group < groups and group * own < self.shares
            if is_mine:
                values = self.sum_group(spec, first, group * own, min(group * own + own, self.shares))
                store_shared(partial, thread_index() * spec.sums_width, 0, values)
            barrier()
            if is_mine and group == 0:
                values = load_shared(partial, thread_index() * spec.sums_width, 0, spec.sums_width)
                other = 1
                while other * own < self.shares:
                    place = (thread_index() + other * across) * spec.sums_width
                    values = apply(merge, values, load_shared(partial, place, 0, spec.sums_width), spec)
                    other += 1
                store_global(self.sums, 0, (first,), (0,), values)
            barrier()

    def sum_group(self, spec: SimtSpec, first: int, share: int, end: int) -> tuple:
        """A piece, summed over the shares up to ``end``."""
        values = load_global(self.sums, 0, (first + share * spec.sums_count,), (0,), spec.sums_width)
        share += 1
        while share + 3 < end:                         # four loads on their way at a time
            w = load_global(self.sums, 0, (first + share * spec.sums_count,), (0,), spec.sums_width)
            x = load_global(self.sums, 0, (first + (share + 1) * spec.sums_count,), (0,), spec.sums_width)
            y = load_global(self.sums, 0, (first + (share + 2) * spec.sums_count,), (0,), spec.sums_width)
            z = load_global(self.sums, 0, (first + (share + 3) * spec.sums_count,), (0,), spec.sums_width)
            values = apply(merge, apply(merge, apply(merge, apply(merge, values, w, spec), x, spec), y, spec), z, spec)
            share += 4
        while share < end:
            x = load_global(self.sums, 0, (first + share * spec.sums_count,), (0,), spec.sums_width)
            values = apply(merge, values, x, spec)
            share += 1
        return values

    # -- on the host ----------------------------------------------------------------------------------------------------

    def shared_bytes(self, spec: Any) -> int:
        return max(FLAG, int(spec.threads * spec.sums_width * spec.operator.fragment_c.dtype.itemsize))


def merge(x: Numeric, n: int, others: tuple, spec: Spec) -> Any:
    return spec.operator.merge(x, others[n])


def put_piece(values: tuple, n: int, i: int, j: int, spec: SimtSpec, sums: View, first: int) -> None:
    store_global(sums, 0, (first,), (place_of(n, i, j, spec),), values)


def fetch_fragment(i: int, j: int, spec: SimtSpec, sums: Any, first: int) -> tuple:
    return join(generate(spec.operator.fragment_c.count // spec.sums_width, fetch_piece, i, j, spec, sums, first))


def fetch_piece(n: int, i: int, j: int, spec: SimtSpec, sums: View, first: int) -> tuple:
    return load_global(sums, 0, (first,), (place_of(n, i, j, spec),), spec.sums_width)


def place_of(n: int, i: int, j: int, spec: SimtSpec) -> int:
    """Where the threads' n-th pieces of a fragment begin: neighbours in a warp are neighbours in memory."""
    pieces = spec.operator.fragment_c.count // spec.sums_width
    return ((i * spec.fragments_n + j) * pieces + n) * spec.threads * spec.sums_width


# -- which kind, and how much memory ----------------------------------------------------------------------------------

#: Shares from which on slices are summed by all blocks: the one that comes last would take as long as its share's products.
MANY = 8


def takes_slices(shares: int, tiles: int, sm_count: int) -> bool:
    """Whether all blocks sum slices: where the last one would have many shares to read, and all can be resident."""
    return shares >= MANY and tiles * shares <= sm_count


def reduction_of(spec: SimtSpec, shares: int, tiles: int, sm_count: int) -> WorkspaceSums:
    """The reduction of a launch of so many tiles (of all products), with descriptions of the workspace in it.

    Raises ValueError for sums that 32-bit coordinates do not reach.
    """
    from gemmkit.runtime.launch import described

    elements = tiles * shares * spec.sums_count
    if elements >= 2**31 or tiles * shares >= 2**31:
        raise ValueError(f"splits={shares}: {shares} shares of {tiles} tiles need {elements} accumulators, but a workspace "
                         "holds less than 2**31; use fewer splits")
    kind = SlicedSums if takes_slices(shares, tiles, sm_count) else WorkspaceSums
    return kind(shares, described("sums", elements, spec.operator.fragment_c.dtype),
                described("counts", tiles * COUNTERS, np.dtype(np.uint32)))


LEAST = 4                              # k-tiles of a share, unless the number of blocks is given
WAVES = 1, 2
LIMIT = 2**31                          # k-tiles, and sums of the workspace, are counted in 32 bits


@dataclass(frozen=True)
class StreamK:
    """``splits=StreamK()``, for the multistage kernel and for Hopper's: blocks stay, and share K where tiles fill no wave.

    ``blocks`` is the number of launched blocks (in clusters, a multiple of their size); None launches as many as are
    resident. Up to ``waves`` waves are streamed, 1 or 2: the last, partial wave, and for 2 a full one with it, so that a
    block's share is at least a tile.
    """

    blocks: int | None = None
    waves: int = 2

    def __post_init__(self) -> None:
        blocks = self.blocks
        if blocks is not None and (isinstance(blocks, bool) or not isinstance(blocks, (int, np.integer)) or blocks < 1):
            raise ValueError(f"StreamK(blocks={blocks!r}): a positive number of blocks is needed, or None for as many as "
                             "are resident")
        if isinstance(self.waves, bool) or self.waves not in WAVES:
            raise ValueError(f"StreamK(waves={self.waves!r}): 1 or 2 waves are streamed")


@dataclass(frozen=True)
class StreamedSums(WorkspaceSums):
    """A block's sums of a tile that another one finishes: a place in the workspace, and a counter, for each block."""

    divides_k = False
    waits = True

    def store_partials(self, spec: SimtSpec, accumulators: Registers, block: int) -> None:
        first = place_of_block(spec, block)
        for i in range(spec.fragments_m):
            for j in range(spec.fragments_n):
                each(put_piece, split(accumulators[i, j], spec.sums_width), i, j, spec, self.sums, first)
        barrier()
        if thread_index() == 0:
            atomic_add(self.counts, block, 1, "release")

    def take_over(self, spec: SimtSpec, accumulators: Registers, block: int) -> None:
        """Wait for a block's sums, and merge them. Its counter is 0 again for the next launch; no other block reads it."""
        if thread_index() == 0:
            await_counter(self.counts, block, 1, "acquire")
            set_counter(self.counts, block, 0)
        barrier()
        first = place_of_block(spec, block)
        for i in range(spec.fragments_m):
            for j in range(spec.fragments_n):
                pieces = split(accumulators[i, j], spec.sums_width)
                accumulators[i, j] = join(apply(merge_piece, pieces, i, j, spec, self.sums, first))

    def shared_bytes(self, spec: Spec) -> int:
        return 0


def place_of_block(spec: SimtSpec, block: int) -> int:
    """Where a block's sums begin that this thread writes or reads. (The thread's number is asked for anew.)"""
    return block * spec.sums_count + rolled(thread_index()) * spec.sums_width


def merge_piece(values: tuple, n: int, i: int, j: int, spec: Any, sums: View, first: int) -> tuple:
    pieces = spec.operator.fragment_c.count // spec.sums_width
    if ((i * spec.fragments_n + j) * pieces + n) % spec.sums_at_once == 0:
        warp_barrier()                                 # no load goes before it: more on their way than registers hold
    return apply(merge, values, fetch_piece(n, i, j, spec, sums, first), spec)


@dataclass(frozen=True)
class StreamedScheduler(TileScheduler):
    """``tiles`` tiles of ``steps`` k-tiles each by ``launched`` blocks (or clusters) that stay; the first ``streamed`` tiles
    are streamed.

    A part of a block's work is known by the number of its first k-tile, ``at``.
    """

    reduction: Any = None              # `StreamedSums`, or `gemmkit.kernels.sm90.exchange.ClustersStreamK`
    tiles: Scalar = 1
    steps: Scalar = 1
    streamed: Scalar = 0
    launched: Scalar = 1
    multiplier: Scalar = 0             # with `shift`, divides by `steps`
    shift: Scalar = 0
    least: Scalar = 0                  # k-tiles of a share; the first ``more`` shares have one more
    more: Scalar = 0
    at: Scalar = 0

    stays = True

    @classmethod
    def of(cls, scheduler: TileScheduler, reduction: Any, tiles: int, steps: int, streamed: int,
           blocks: int) -> StreamedScheduler:
        """``streamed`` of the tiles that ``scheduler`` hands out, and the others, by so many blocks."""
        least, more = divmod(streamed * steps, max(1, blocks))
        return cls(scheduler.order, scheduler.block, scheduler.cluster, reduction, tiles, steps, streamed, blocks,
                   *divisor_reciprocal(steps), least, more)

    def begin(self) -> int:
        """A block's first part."""
        own = self.share(self.own())
        return own if own < self.share(self.own() + 1) else self.first_whole(self.own())

    def end(self, shape: StackShape) -> int:
        return self.tiles * self.steps

    def step(self) -> int:
        return self.launched * self.steps

    def following(self, at: int, step: int) -> int:
        """The part behind that at ``at``: the next tile of the block's share, its first whole tile, or its next."""
        if at >= self.streamed * self.steps:
            return at + step
        block = rolled(self.own())                     # computed anew, or what follows from it is kept through the main loop
        then = (self.tile_of(at) + 1) * self.steps
        return then if then < self.share(block + 1) else self.first_whole(block)

    def of_part(self, at: int) -> Any:
        return with_number(self, "at", at)

    def share(self, block: int) -> int:
        """Where a block's share of the streamed k-tiles begins, and that of the one before ends."""
        return block * self.least + min(block, self.more)

    def tile_of(self, at: int) -> int:
        return divided(at, self.multiplier, self.shift)

    def first_whole(self, block: int) -> int:
        return (self.streamed + block) * self.steps

    # -- a part -----------------------------------------------------------------------------------------------------------

    def first(self) -> int:
        return self.tile_of(self.at)

    def rank(self) -> int:
        """The k-tile of its tile that the part begins with: 0 for the block that finishes the tile."""
        return self.at - self.tile_of(self.at) * self.steps

    def length(self) -> int:
        """K-tiles of the part."""
        rest = self.steps - self.rank()
        return min(rest, self.share(self.own() + 1) - self.at) if self.first() < self.streamed else rest

    def k_tiles(self, spec: Spec, m: int, n: int, rank: int, shape: StackShape) -> tuple:
        """Those of the part that can matter to the tile. (``rank`` is the block's in its cluster, if it has one.)"""
        size, part = self.block.size.K, self.rank()
        begin, count = TileScheduler.k_tiles(self, spec, m, n, rank, shape)
        first = udiv(begin, size)
        low, high = max(first, part), min(first + count, part + self.length())
        return low * size, max(high - low, 0)

    def goes_on(self, peer: int) -> bool:
        tile = self.tile_of(rolled(self.at))           # computed anew, as in `following`
        return tile < self.streamed and self.share(peer) < (tile + 1) * self.steps

    def gather(self, spec: Spec, accumulators: Registers, rank: int) -> bool:
        block, tile = rolled(self.own()), self.tile_of(rolled(self.at))        # computed anew, as in `following`
        if rank > 0:
            self.reduction.store_partials(spec, accumulators, block)
            return False
        if tile < self.streamed:
            end = (tile + 1) * self.steps
            peer = block + 1
            while self.share(peer) < end:              # the blocks that have the rest of the tile
                self.reduction.take_over(spec, accumulators, peer)
                peer = rolled(peer + 1)
        return True

    # -- on the host ----------------------------------------------------------------------------------------------------

    def blocks(self, M: int, N: int, sm_count: int, products: int = 1) -> int:
        return int(self.launched) * self.cluster.size


# -- shares that the threads of a row merge ------------------------------------------------------------------------------

PARTS, LAST_PARTS = 15, 8             # whose loads are on their way at once, beside the first: of 16 all are


def in_turn(count: int, load: Callable, merge: Callable) -> tuple:
    """``load(0)``, merged with each further part in their order: ``so_far = merge(so_far, load(n))``, for n below ``count``.

    Loads of `PARTS` parts begin before the first of them is waited for, and no branch is between what merges them. The rest
    comes by `LAST_PARTS`: the last part is loaded once more in place of what is not there, and not merged.
    """
    so_far, n = load(0), 1
    while n + PARTS <= count:
        so_far = fold(PARTS, merge_next, so_far, generate(PARTS, load_next, n, load), merge)
        n += PARTS
    while n < count:
        so_far = fold(LAST_PARTS, merge_within, so_far, generate(LAST_PARTS, load_within, n, count, load), n, count, merge)
        n += LAST_PARTS
    return so_far


def load_next(k: int, n: int, load: Callable) -> tuple:
    return load(n + k)


def load_within(k: int, n: int, count: int, load: Callable) -> tuple:
    return load(min(n + k, count - 1))


def merge_next(so_far: tuple, k: int, found: tuple, merge: Callable) -> tuple:
    return merge(so_far, found[k])


def merge_within(so_far: tuple, k: int, found: tuple, n: int, count: int, merge: Callable) -> tuple:
    return merge(so_far, found[k]) if n + k < count else so_far


# -- on the host --------------------------------------------------------------------------------------------------------

def division(tiles: int, steps: int, most: int, waves: int = 2, least: int = 1) -> tuple[int, int]:
    """How many blocks are launched, of ``most``, for tiles of ``steps`` k-tiles, and how many tiles are streamed, in shares
    of ``least`` k-tiles or more. Tiles without k-tiles have no shares.

    Nine tiles on four blocks: two waves and a tile, of which five are streamed (or one alone), and four a whole wave.

    >>> division(9, 32, 4), division(9, 32, 4, waves=1), division(8, 32, 4), division(1, 32, 4), division(1, 2, 4)
    ((4, 5), (4, 1), (4, 0), (4, 1), (2, 1))
    >>> division(9, 0, 4)
    (4, 0)
    """
    if tiles == 0:
        return 0, 0
    blocks = min(most, max(tiles, tiles * steps // least))
    full, rest = divmod(tiles, blocks)
    return blocks, rest + blocks * min(full, waves - 1) if rest and steps else 0


def resident(device: DeviceInfo, threads: int, shared_bytes: int) -> int:
    """How many blocks a multiprocessor holds, as far as threads and shared memory go: of registers the driver knows."""
    nbytes = -(-(shared_bytes + device.reserved_shared_memory) // 128) * 128
    return max(1, min(device.max_threads_per_sm // threads, device.shared_memory_per_sm // nbytes, device.max_blocks_per_sm))


def streamed(scheduler: TileScheduler, spec: SimtSpec, how: StreamK, tiles: int, K: int, most: int) -> StreamedScheduler:
    """The scheduler of a product's ``tiles`` tiles, streamed by ``most`` blocks or fewer, with descriptions of a workspace.

    Raises ValueError for products whose k-tiles, and workspaces whose sums, 32 bits do not count.
    """
    from gemmkit.runtime.launch import described

    stream = streamed_in_shares(scheduler, how, tiles, K, most, int(spec.sums_count))
    blocks = int(stream.launched)
    reduction = StreamedSums(1, described("sums", blocks * int(spec.sums_count), spec.operator.fragment_c.dtype),
                           described("counts", blocks, np.dtype(np.uint32)))
    return dataclasses.replace(stream, reduction=reduction)


def streamed_in_shares(scheduler: TileScheduler, how: StreamK, tiles: int, K: int, most: int,
                       handed: int) -> StreamedScheduler:
    """The same without a reduction; a block (or cluster) hands over ``handed`` sums."""
    steps = max(1, -(-K // scheduler.block.size.K))
    blocks, first = division(tiles, steps, most, how.waves, 1 if how.blocks else LEAST)
    sums = blocks * handed
    if (tiles + blocks) * steps >= LIMIT or sums >= LIMIT:
        raise ValueError(f"splits={how!r}: {tiles} tiles of {steps} k-tiles on {blocks} blocks, whose sums are {sums} "
                         "numbers; both are less than 2**31; use larger tiles, or splits=1")
    return StreamedScheduler.of(scheduler, None, tiles, steps, first, blocks)


def most_blocks(how: StreamK, device: DeviceInfo | None, threads: int, shared_bytes: int, blocks_per_sm: int) -> int:
    """How many blocks may be launched: as many as are asked for, or as many as a device holds.

    Raises ConfigError for more than it holds: they wait for each other.
    """
    if device is None:
        return how.blocks or 1
    held = resident(device, threads, shared_bytes)
    if how.blocks is None:
        return device.sm_count * min(held, blocks_per_sm)
    if how.blocks > device.sm_count * held:
        raise ConfigError(f"splits={how!r}: blocks wait for each other, and {device.name} holds {device.sm_count * held} of "
                          f"{threads} threads and {shared_bytes} bytes of shared memory at once; use fewer blocks")
    return how.blocks
