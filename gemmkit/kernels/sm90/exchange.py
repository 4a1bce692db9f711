"""Between steps 2 and 3 of `warp_specialised`, where blocks share the K of a tile: they add up their sums.

| exchange | blocks that share K | sums meet |
|---|---|---|
| `Exchange` | one: a block has K to itself | |
| `ClusterExchange` | those of a cluster | in shared memory |
| `gemmkit.kernels.sm90.exchange.WorkspaceExchange` | of different clusters | in global memory |

In a cluster each of ``splits`` blocks has sums of the whole tile, over its part of K. Block r finishes the r-th slice of
columns: every thread sends each slice to the block that finishes it, straight into its shared memory, and adds up, in the
order of the blocks, what it is sent itself. Nothing goes through global memory, and the result does not depend on which
block is first.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmkit.components import Array, Component
from gemmkit.kernels.collectives.operand import OperandArrays
from gemmkit.kernels.collectives.pipeline import BARRIER, BARRIERS
from gemmkit.kernels.collectives.scheduler import UNSPLIT, Reduction, TileScheduler, dealt
from gemmkit.kernels.collectives.split_k import StreamedScheduler, StreamK, streamed_in_shares
from gemmkit.kernels.sm90.cross_lane import add_value
from gemmkit.kernels.spec import SPLITS
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import Numeric
from gemmkit.lang.registers import apply, each, fold, generate, join, split
from gemmkit.ptx.barriers import (
    atomic_add,
    await_counter,
    cluster_rank,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    set_counter,
    store_async,
)
from gemmkit.ptx.memory import load_global, load_shared, shared, store_global
from gemmkit.ptx.special import block_x, lane_index, rolled, thread_index, udiv, warp_barrier
from gemmkit.ptx.wgmma import named_barrier
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.epilogues.base import Epilogue
    from gemmkit.kernels.sm90.family import Sm90Spec


@dataclass(frozen=True)
class Exchange(Component):
    """A block has K to itself, and finishes the whole tile.

    Where blocks share K a tile is finished in ``slices`` slices, each by one block. ``columns`` are from a slice to the
    next, ``count`` a thread's sums in a slice of a 64-row fragment.
    """

    slices: int = 1
    columns: int = 0
    count: int = 0

    def initialise(self, splits: int) -> None:
        """Called by one thread, before any other meets a barrier."""

    def finishes(self, spec: Sm90Spec) -> bool:
        """Whether this block finishes any of its tile."""
        return True

    def slice(self, spec: Sm90Spec, rank: int) -> int:
        """Which slice of columns a block finishes, of those that do. ``rank`` is the block's in its cluster."""
        return rank

    def store_partials(self, sums: tuple, spec: Sm90Spec, group: int, rank: int, phase: int) -> bool:
        """Give a consumer's sums of the whole tile to the blocks that finish it; whether this is one of them. ``phase``
        flips with every tile."""
        return True

    def collect(self, sums: tuple, spec: Sm90Spec, group: int, rank: int, phase: int) -> tuple:
        """This block's slice of the columns, over all of K."""
        return sums


@dataclass(frozen=True, kw_only=True)
class ClusterExchange(Exchange):
    """What ``consumers`` consumers send to those of other blocks of the cluster, four sums at a time.

    They arrive ``offset`` bytes into shared memory, ``nbytes`` for each consumer; its barriers stand at ``barriers``: one
    for the sums that it is sent, one for the room to send some.
    """

    consumers: int
    nbytes: int
    offset: int = 0
    barriers: int = 0

    @property
    def pieces(self) -> int:
        """In how many pieces of four a slice is sent."""
        return self.count // 4

    def filled(self) -> Any:
        return shared(BARRIERS, self.barriers)

    def free(self) -> Any:
        return shared(BARRIERS, self.barriers + BARRIER * self.consumers)

    def initialise(self, splits: int) -> None:
        for consumer in range(self.consumers):
            mbarrier_init(self.filled(), consumer, 1)
            mbarrier_init(self.free(), consumer, splits)

    def store_partials(self, sums: tuple, spec: Sm90Spec, group: int, rank: int, phase: int) -> bool:
        if thread_index() % 128 == 0:
            mbarrier_expect(self.filled(), group, self.nbytes)
        mbarrier_wait(self.free(), group, phase ^ 1)   # those it sends to have read what it sent for the last tile
        each(send_fragment, sums, spec, group, rank)
        return True

    def collect(self, sums: tuple, spec: Sm90Spec, group: int, rank: int, phase: int) -> tuple:
        mbarrier_wait(self.filled(), group, phase)
        mine = generate(spec.fragments_m, receive_fragment, spec, group)
        named_barrier(spec.store.barrier + group, 128)
        thread = thread_index() % 128
        if thread < spec.cluster.splits:
            mbarrier_arrive_at(self.free(), group, thread)
        return mine


def send_fragment(fragment: tuple, i: int, spec: Sm90Spec, group: int, rank: int) -> None:
    each(send_slice, split(fragment, spec.exchange.count), i, spec, group, rank)


def send_slice(values: tuple, to: int, i: int, spec: Sm90Spec, group: int, rank: int) -> None:
    each(send_words, split(values, 4), i, to, spec, group, rank)


def send_words(words: tuple, j: int, i: int, to: int, spec: Any, group: int, rank: int) -> None:
    store_async(shared(spec.operator.fragment_c.dtype, spec.exchange.offset), place_of(spec, group, rank, i, j), words,
                spec.exchange.filled(), group, to)


def receive_fragment(i: int, spec: Any, group: int) -> tuple:
    return join(generate(spec.exchange.pieces, receive_words, i, spec, group))


def receive_words(j: int, i: int, spec: Sm90Spec, group: int) -> tuple:
    return fold(spec.cluster.splits - 1, add_next, load_words_from(0, i, j, spec, group), i, j, spec, group)


def add_next(total: tuple, n: int, i: int, j: int, spec: Sm90Spec, group: int) -> tuple:
    return apply(add_value, total, load_words_from(n + 1, i, j, spec, group))


def load_words_from(source: int, i: int, j: int, spec: Any, group: int) -> tuple:
    pointer = shared(spec.operator.fragment_c.dtype, spec.exchange.offset)
    return load_shared(pointer, place_of(spec, group, source, i, j), 0, 4)


def place_of(spec: Any, group: int, source: int, i: int, j: int) -> int:
    """Where this thread's four elements from a block lie: neighbours in a warp are neighbours in memory."""
    row = ((group * spec.cluster.splits + source) * spec.fragments_m + i) * spec.exchange.pieces + j
    return (row * 128 + thread_index() % 128) * 4


# --------------------------------------------------------------------------------------------------
# Step 3 of `warp_specialised` where an epilogue normalises rows of D that the blocks of a cluster hold together.
#
# | exchange | a row's columns are held by |
# |---|---|
# | `RowExchange` | one block; or it is finished in a second pass |
# | `ClusterRowExchange` | the blocks of a cluster of 1 x ``blocks`` |
#
# 1. Each quad of lanes has its block's states of two rows of a fragment. Its lanes send them to all blocks (``st.async``),
#    where an mbarrier of the consumer's fragment counts the bytes.
# 2. Every lane combines the states of its rows in the order of the blocks: all blocks make the same of them.
# 3. Each warp tells all blocks that it has read. They wait for that before they send for the next tile.

WORDS = np.dtype(np.float32)
ROWS, OWN, QUAD, WARPS = 64, 2, 4, 4   # of a fragment; of a lane; lanes of a row; warps of a consumer


@dataclass(frozen=True)
class RowExchange(Component):
    """Nothing is exchanged."""

    def initialise(self) -> None:
        """Called by one thread, before any other meets a barrier."""


@dataclass(frozen=True, kw_only=True)
class ClusterRowExchange(RowExchange):
    """States of ``words`` words of the rows of ``consumers`` consumers' ``fragments`` each. They arrive ``offset`` bytes
    into shared memory; barriers stand at ``barriers``: for each fragment one for what is sent, and behind these one for the
    room to send."""

    blocks: int
    consumers: int
    fragments: int
    words: int
    offset: int = 0
    barriers: int = 0

    @property
    def count(self) -> int:
        """Fragments of a block's tile, or of its consumers' tiles."""
        return self.consumers * self.fragments

    @property
    def sent(self) -> int:
        """Bytes that a fragment is sent."""
        return self.blocks * ROWS * self.words * WORDS.itemsize

    @property
    def nbytes(self) -> int:
        return self.count * self.sent

    @property
    def barrier_bytes(self) -> int:
        return 2 * self.count * BARRIER

    # -- in device code -------------------------------------------------------------------------------------------------

    def full(self) -> Any:
        return shared(BARRIERS, self.barriers)

    def free(self) -> Any:
        return shared(BARRIERS, self.barriers + BARRIER * self.count)

    def values(self) -> Any:
        return shared(WORDS, self.offset)

    def initialise(self) -> None:
        for n in range(self.count):
            mbarrier_init(self.full(), n, 1)
            mbarrier_init(self.free(), n, self.blocks * WARPS)

    def place(self, n: int, source: int, row: int) -> int:
        """Where a block's state of a row of fragment ``n`` lies."""
        return ((n * self.blocks + source) * ROWS + row) * self.words

    def whole_rows(self, epilogue: Epilogue, states: tuple, at: Any) -> tuple:
        """The states of a lane's rows over all blocks, of those that this block has."""
        n, row, lane = at.group * self.fragments + at.fragment, at.row % ROWS, lane_index()
        # 1.
        if thread_index() % (32 * WARPS) == 0:
            mbarrier_expect(self.full(), n, self.sent)
        to = lane % QUAD
        while to < self.blocks:
            mbarrier_wait(self.free(), n, at.turn ^ 1)
            each(send_state, states, self, epilogue, n, row, to)
            to += QUAD
        # 2.
        mbarrier_wait(self.full(), n, at.turn)
        wholes = generate(OWN, whole_row, self, epilogue, n, row)
        # 3.
        warp_barrier()
        if lane < self.blocks:
            mbarrier_arrive_at(self.free(), n, lane)
        return wholes


def send_state(state: Any, r: int, exchange: ClusterRowExchange, epilogue: Any, n: int, row: int, to: int) -> None:
    place = exchange.place(n, cluster_rank(), row + r * 8)
    store_async(exchange.values(), place, epilogue.words_of(state), exchange.full(), n, to)


def whole_row(r: int, exchange: ClusterRowExchange, epilogue: Epilogue, n: int, row: int) -> Any:
    return fold(exchange.blocks - 1, with_next, state_from(0, r, exchange, epilogue, n, row), r, exchange, epilogue, n, row)


def with_next(whole: Numeric, k: int, r: int, exchange: ClusterRowExchange, epilogue: Any, n: int, row: int) -> Any:
    return epilogue.combine(whole, state_from(k + 1, r, exchange, epilogue, n, row))


def state_from(source: int, r: int, exchange: ClusterRowExchange, epilogue: Any, n: int, row: int) -> Any:
    return epilogue.of_words(load_shared(exchange.values(), exchange.place(n, source, row + r * 8), 0, exchange.words))


# --------------------------------------------------------------------------------------------------
# How many blocks share the K of a tile, and by which way their sums meet: `SharedK` decides it for a configuration.
#
# | `splits` | cluster | blocks that share K stand in | sums meet |
# |---|---|---|---|
# | 1 | any | | |
# | 2, 4, 8 | 1 x 1 | one cluster | in shared memory (`gemmkit.kernels.sm90.exchange.ClusterExchange`) |
# | any other number | 1 x 1 | the grid | in global memory (`gemmkit.kernels.sm90.exchange`) |
# | 2 and more | 2 x 1, 1 x 2, 2 x 2 | different clusters: those of one multicast operands | the same |
# | `StreamK()` | any | the grid, a cluster each | in global memory (`gemmkit.kernels.sm90.exchange`) |
#
# With a workspace all blocks of a launch wait for others, so they must be on multiprocessors at once.

COLUMNS = 8                            # that four threads hold of a row side by side: the least of a slice


@dataclass(frozen=True)
class SharedK:
    """``splits`` blocks share the K of a tile, or clusters stream it; clusters are of ``cluster`` tiles (M, N)."""

    splits: int | StreamK
    cluster: Tile

    @property
    def streams(self) -> bool:
        """Whether clusters stay and take equal shares of all k-tiles, wherever a tile ends."""
        return isinstance(self.splits, StreamK)

    @property
    def in_cluster(self) -> int:
        """Blocks of a cluster that share the K of a tile."""
        return in_one_cluster(self.shares, self.cluster.count)

    @property
    def shares(self) -> int:
        """Into how many equal shares the K of every tile is divided."""
        return 1 if isinstance(self.splits, StreamK) else self.splits

    @property
    def by_workspace(self) -> bool:
        """Whether the shares of every tile meet in global memory."""
        return self.shares > self.in_cluster

    def slices(self, N: int, least: int) -> int:
        """In how many slices of columns a tile of ``N`` columns is finished, each by one block; a slice has a multiple of
        ``least`` columns (`least_columns`).

        By way of a cluster as many as there are blocks. By way of a workspace as many as N allows, and no more than there
        are blocks: those that are left over finish none.

        >>> SharedK(15, Tile(M=2, N=2)).slices(128, 16), SharedK(6, Tile(M=1, N=1)).slices(96, 16)
        (8, 6)
        """
        if not self.by_workspace:
            return self.shares
        return next((n for n in range(min(self.shares, N // least), 0, -1) if N % n == 0 and N // n % least == 0), 1)

    @property
    def reduction(self) -> Reduction:
        """What the scheduler is told of blocks that share K by way of a workspace. (Of those of a cluster the cluster
        knows.)"""
        return ClustersShareK(self.shares, self.cluster.count) if self.by_workspace else UNSPLIT

    def check_resident(self, clusters: int, most: int) -> None:
        """Raise ConfigError where ``clusters`` clusters, of which a device holds ``most`` at once, wait for each other."""
        if clusters > most:
            m, n = self.cluster.extents
            fits = most // (clusters // self.shares)
            cure = f"use splits={fits} or fewer" if fits > 1 else "use splits=1, or larger tiles"
            raise ConfigError(f"splits={self.splits}: {clusters} clusters of {m}x{n} blocks wait for each other, and the "
                              f"device holds {most} at once; {cure}")


def in_one_cluster(shares: int, tiles: int) -> int:
    """How many of ``shares`` blocks that share the K of a tile stand in its cluster, of so many tiles."""
    return shares if tiles == 1 and shares in SPLITS else 1


def least_columns(layout: Any, folds: int) -> int:
    """Of what the columns of a slice must be a multiple, for D's shared layout: of `COLUMNS`, and of its panels'. Where
    ``folds`` columns become one of D, of `COLUMNS` for each: where that is no panel, D leaves from the registers."""
    if folds > 1:
        return COLUMNS * folds
    return max(COLUMNS, int(layout.line)) if layout.axis == 1 else COLUMNS


@dataclass(frozen=True)
class ClustersShareK(Reduction):
    """``shares`` clusters of ``blocks`` blocks, beside each other in the grid, share the K of their tiles.

    All blocks of a cluster have the same share: they multicast operands to each other.
    """

    shares: int
    blocks: int

    is_shared = True
    divides_k = True
    waits = True

    def tile(self, block: int) -> int:
        return udiv(block, self.shares)

    def rank(self) -> int:
        cluster = udiv(block_x(), self.blocks)
        return cluster - udiv(cluster, self.shares) * self.shares

    def share(self, count: int, rank: int) -> tuple:
        """``rank`` is the block's in its cluster, on which its share does not depend."""
        return dealt(count, self.shares, self.rank())

    # -- on the host ----------------------------------------------------------------------------------------------------

    @property
    def blocks_of_a_tile(self) -> int:
        return self.shares


# --------------------------------------------------------------------------------------------------
# Between steps 2 and 3 of `warp_specialised`, where clusters share the K of their tiles: sums meet in global memory.
#
# Every block of (tile, share) has sums of the whole tile over its part of K. The threads of each of its consumers write
# them to the workspace and meet, and one adds 1 to the counter of (tile, consumer), releasing. The first ``slices``
# blocks finish a slice of columns each: they wait for the counter, read their slice of all shares, and sum it from the
# first share to the last, so that the same call gives the same bits. The others are done when they are counted.
#
# A thread reads what threads of its number wrote: pieces of 16 bytes, neighbours in a warp are neighbours in memory.
# Consumers have different rows, so those of a block do not wait for each other.
#
# The counter goes from 0 to ``shares``, and on by 1 for each block that has seen that; who comes last finds ``shares +
# slices - 1`` and sets it to 0 for the next launch. Sums are never cleared.

WIDTH = 4                              # accumulators of 4 bytes that a thread moves at a time
AHEAD = 8                              # shares whose loads are on their way at once


@dataclass(frozen=True, kw_only=True)
class WorkspaceExchange(Exchange):
    """The sums of ``shares`` shares; ``sums`` are theirs, and ``counts`` has a number for each consumer of each tile.

    ``count`` of a thread's ``total`` sums in each of its 64-row ``fragments`` are those of a slice. On the host the arrays
    are descriptions without an address (`gemmkit.runtime.launch`), until a launch has a stream.
    """

    shares: int
    total: int
    fragments: int
    sums: Array
    counts: Array

    outputs = ("sums", "counts")

    @property
    def share_elements(self) -> int:
        """What a consumer has of a share."""
        return self.fragments * self.total * 128

    @property
    def rounds(self) -> int:
        """How often `AHEAD` shares are added to the first."""
        return (self.shares - 1) // AHEAD

    @property
    def rest(self) -> int:
        return (self.shares - 1) % AHEAD

    def finishes(self, spec: Sm90Spec) -> bool:
        return spec.reduction.rank() < self.slices

    def slice(self, spec: Sm90Spec, rank: int) -> int:
        return spec.reduction.rank()

    def store_partials(self, sums: tuple, spec: Sm90Spec, group: int, rank: int, phase: int) -> bool:
        own, share = workspace_place(spec, group, rank), spec.reduction.rank()
        first = (own * self.shares + share) * self.share_elements + thread_index() % 128 * WIDTH
        each(put_fragment, sums, spec, first)
        named_barrier(spec.store.barrier + group, 128)
        if thread_index() % 128 == 0:
            atomic_add(self.counts, own, 1, "release")
        return share < self.slices

    def collect(self, sums: tuple, spec: Sm90Spec, group: int, rank: int, phase: int) -> tuple:
        own, thread = workspace_place(spec, group, rank), thread_index() % 128
        if thread == 0:
            await_counter(self.counts, own, self.shares, "acquire")
            if atomic_add(self.counts, own, 1, "relaxed") + 1 == self.shares + self.slices:
                set_counter(self.counts, own, 0)
        named_barrier(spec.store.barrier + group, 128)
        first = own * self.shares * self.share_elements + self.slice(spec, rank) * self.count * 128 + thread * WIDTH
        mine = generate(self.fragments, fetch_fragment, spec, first)
        for _ in range(self.rounds):
            mine = fold(AHEAD, add_share, mine, spec, first)
            first += AHEAD * self.share_elements
        return fold(self.rest, add_share, mine, spec, first)


def workspace_place(spec: Sm90Spec, group: int, rank: int) -> int:
    """The number of a consumer's part of a tile among all that the launch computes."""
    return (spec.scheduler.first() * spec.cluster.size + rank) * spec.consumers + group


def put_fragment(fragment: tuple, i: int, spec: Sm90Spec, first: int) -> None:
    each(put_piece, split(fragment, WIDTH), i, spec, first)


def put_piece(values: tuple, j: int, i: int, spec: Any, first: int) -> None:
    store_global(spec.exchange.sums, 0, (first,), ((i * spec.exchange.total + j * WIDTH) * 128,), values)


def fetch_fragment(i: int, spec: Sm90Spec, first: int) -> tuple:
    """This thread's sums of a slice of a fragment."""
    return join(generate(spec.exchange.count // WIDTH, fetch_piece, i, spec, first))


def fetch_piece(j: int, i: int, spec: Any, first: int) -> tuple:
    return load_global(spec.exchange.sums, 0, (first,), ((i * spec.exchange.total + j * WIDTH) * 128,), WIDTH)


def add_share(mine: tuple, n: int, spec: Any, first: int) -> tuple:
    """With the sums of the share that is ``n + 1`` behind the one at ``first``."""
    return apply(add_fragment, mine, spec, first + (n + 1) * spec.exchange.share_elements)


def add_fragment(fragment: tuple, i: int, spec: Sm90Spec, first: int) -> tuple:
    return apply(add_value, fragment, fetch_fragment(i, spec, first))



# -- on the host ------------------------------------------------------------------------------------------------------

def exchange_of(spec: Sm90Spec, slices: int, sharing: SharedK, arrays: OperandArrays | None) -> WorkspaceExchange:
    """The exchange of a launch, with descriptions of its workspace.

    Raises ConfigError where the device cannot hold all blocks at once, and for sums that 32-bit coordinates do not reach.
    """
    from gemmkit.runtime.launch import described

    shares, cluster, count = sharing.shares, spec.cluster, int(spec.operator.fragment_c.count)
    tiles = spec.scheduler.computed(arrays.M, arrays.N) * arrays.count if arrays else 1
    if arrays:
        sharing.check_resident(tiles * shares, cluster.at_once(arrays.sm_count))
    consumers = tiles * cluster.size * spec.consumers
    elements = consumers * shares * spec.fragments_m * count * 128
    if elements >= 2**31:
        raise ConfigError(f"splits={shares}: {shares} shares of {tiles} tiles need {elements} accumulators, but a workspace "
                          "holds less than 2**31; use fewer splits")
    return WorkspaceExchange(slices, spec.block.size.N // slices, count // slices, shares=shares, total=count,
                             fragments=spec.fragments_m,
                             sums=described("sums", elements, spec.operator.fragment_c.dtype),
                             counts=described("counts", consumers, np.dtype(np.uint32)))


# --------------------------------------------------------------------------------------------------
# Between steps 2 and 3 of `warp_specialised`, where clusters stream K (`gemmkit.kernels.collectives.split_k`): a part
# of a tile goes from the cluster that computed it to the one that finishes the tile.
#
# Blocks of a cluster multicast operands to each other, so a cluster has one share of k-tiles, and each of its blocks
# computes that part of its own tile. Where the part does not begin with the tile's first k-tile, the threads of each
# consumer write their sums to the workspace and meet, and one adds 1 to the consumer's counter, releasing. The consumer
# of the same number, in the block of the same rank of the cluster that has the tile's first k-tile, waits for the
# counter, sets it back to 0, and adds the sums to its own: first those of the next cluster, then of the one behind that,
# so that the same call gives the same bits. It goes on to C and the epilogue with the sums of all of K. (With a ping-pong
# schedule a consumer has a part to itself, and there is one place a block: while one consumer hands over, or waits, the
# other multiplies.)
#
# A thread reads what a thread of its number wrote: pieces of 16 bytes, neighbours in a warp are neighbours in memory. A
# cluster hands over once, at its first part, so the workspace has a tile of sums for each block that is launched, and a
# counter for each of its consumers.

@dataclass(frozen=True)
class ClustersStreamK(Reduction):
    """Clusters hand over the sums of parts of tiles: by the `StreamExchange`, since consumers do so one by one."""

    is_shared = True
    waits = True


@dataclass(frozen=True, kw_only=True)
class StreamExchange(WorkspaceExchange):
    """A consumer's sums of a part that another cluster finishes: a place in ``sums`` for each consumer of each block, and a
    number in ``counts``. Tiles are finished whole."""

    def finishes(self, spec: Sm90Spec) -> bool:
        return spec.scheduler.rank() == 0

    def slice(self, spec: Sm90Spec, rank: int) -> int:
        return 0

    def store_partials(self, sums: tuple, spec: Sm90Spec, group: int, rank: int, phase: int) -> bool:
        if spec.scheduler.rank() == 0:
            return True
        place, thread = stream_place(spec, rolled(spec.scheduler.own()), group, rank), thread_index() % 128
        each(put_fragment, sums, spec, place * self.share_elements + thread * WIDTH)
        named_barrier(spec.store.barrier + group, 128)
        if thread == 0:
            atomic_add(self.counts, place, 1, "release")
        return False

    def collect(self, sums: tuple, spec: Sm90Spec, group: int, rank: int, phase: int) -> tuple:
        peer = rolled(spec.scheduler.own()) + 1
        while spec.scheduler.goes_on(peer):            # the clusters that have the rest of the tile
            sums = self.take_over(sums, spec, stream_place(spec, peer, group, rank), group)
            peer = rolled(peer + 1)
        return sums

    def take_over(self, sums: tuple, spec: Sm90Spec, place: int, group: int) -> tuple:
        """Wait for what has been handed over at a place, and add it."""
        thread = thread_index() % 128
        if thread == 0:
            await_counter(self.counts, place, 1, "acquire")
            set_counter(self.counts, place, 0)
        named_barrier(spec.store.barrier + group, 128)
        return apply(add_fragment, sums, spec, place * self.share_elements + thread * WIDTH)


def stream_place(spec: Sm90Spec, cluster: int, group: int, rank: int) -> int:
    """Where a consumer hands over and another takes over; ``rank`` is its block's in the cluster. With a ping-pong schedule
    a consumer has all rows of a tile, and takes over from either one of the next cluster."""
    block = cluster * spec.cluster.size + rank
    return block if spec.is_pingpong else block * spec.consumers + group


# -- on the host ------------------------------------------------------------------------------------------------------

def streamed_clusters(scheduler: TileScheduler, how: StreamK, arrays: OperandArrays | None) -> StreamedScheduler:
    """The scheduler of a product whose clusters stream K; ``scheduler`` hands out its tiles.

    Raises ConfigError for more blocks than the device holds at once, ValueError for products that 32 bits do not count.
    """
    cluster, size = scheduler.cluster, scheduler.block.size
    most = cluster.at_once(arrays.sm_count) if arrays else 1
    if how.blocks is not None:
        if arrays and how.blocks > most * cluster.size:
            raise ConfigError(f"splits={how!r}: blocks wait for each other, and the device holds {most} clusters of "
                              f"{cluster.m}x{cluster.n} at once; use {most * cluster.size} blocks or fewer")
        most = how.blocks // cluster.size
    tiles = scheduler.computed(arrays.M, arrays.N) * arrays.count if arrays else 1
    stream = streamed_in_shares(scheduler, how, tiles, arrays.K if arrays else 0, most, cluster.size * size.M * size.N)
    return dataclasses.replace(stream, reduction=ClustersStreamK())


def stream_exchange_of(spec: Any) -> StreamExchange:
    """The exchange of a launch, with descriptions of its workspace: a place for each consumer that is launched."""
    from gemmkit.runtime.launch import described

    fragment, blocks = spec.operator.fragment_c, int(spec.scheduler.launched) * spec.cluster.size
    places = blocks * (1 if spec.is_pingpong else spec.consumers)
    count = int(fragment.count)
    return StreamExchange(1, 0, count, shares=1, total=count, fragments=spec.fragments_m,
                          sums=described("sums", places * spec.fragments_m * count * 128, fragment.dtype),
                          counts=described("counts", places, np.dtype(np.uint32)))
