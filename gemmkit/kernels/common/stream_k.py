"""Stream-K: the k-tiles of all tiles, dealt evenly to as many blocks as are resident (Osama et al., "Stream-K: Work-centric
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

    tile     a a a a b b b b                  block 1 hands over a's last k-tile, and block 2 b's last two;
    block    0 0 0 1 1 1 2 2                  then block 0 merges and finishes a, and block 1 finishes b

**No deadlock.** A block hands over, if at all, before it waits, and waits for no hand-over that comes behind a wait. All
blocks must be resident: the launch is cooperative, and the driver is asked before the first.

**Bounded workspace.** A block hands over once, so g tiles of accumulators are enough, whatever the product. With a share of
a tile or more (two waves are streamed) at most two blocks meet in a tile, and what is waited for was handed over long
before.

**The same bits.** Which block has which k-tiles is known before the launch; sums are merged in that order.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmkit.component_products import with_number
from gemmkit.components import Scalar
from gemmkit.kernels.common.scheduler import TileScheduler
from gemmkit.kernels.common.workspace_sums import WorkspaceSums, fetch_piece, merge, put_piece
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, join, split
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.registers import apply
from gemmkit.ptx.atomics import atomic_add, await_counter, set_counter
from gemmkit.ptx.division import divided, reciprocal
from gemmkit.ptx.special import barrier, rolled, thread_index, udiv, warp_barrier

if TYPE_CHECKING:
    from gemmkit.runtime.device import DeviceInfo

LEAST = 4                              # k-tiles of a share, unless the number of blocks is given
WAVES = 1, 2
LIMIT = 2**31                          # k-tiles, and sums of the workspace, are counted in 32 bits


@dataclass(frozen=True)
class StreamK:
    """``splits=StreamK()``, for the multistage kernel and for Hopper's: blocks stay, and share K where tiles fill no wave.

    ``blocks`` is how many are launched (in clusters, a multiple of their size); None: as many as are resident. Up to
    ``waves`` waves are streamed, 1 or 2: the last, which is not full, and for 2 a full one with it, so that a block's share
    is a tile at least.
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
class HandedOver(WorkspaceSums):
    """A block's sums of a tile that another one finishes: a place in the workspace, and a counter, for each block."""

    divides_k = False
    waits = True

    def hand_over(self, spec: Any, accumulators: Any, block: int) -> None:
        first = place_of_block(spec, block)
        for i in range(spec.fragments_m):
            for j in range(spec.fragments_n):
                each(put_piece, split(accumulators[i, j], spec.sums_width), i, j, spec, self.sums, first)
        barrier()
        if thread_index() == 0:
            atomic_add(self.counts, block, 1, "release")

    def take_over(self, spec: Any, accumulators: Any, block: int) -> None:
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

    def shared_bytes(self, spec: Any) -> int:
        return 0


def place_of_block(spec: Any, block: int) -> int:
    """Where a block's sums begin that this thread writes or reads. (The thread's number is asked for anew.)"""
    return block * spec.sums_count + rolled(thread_index()) * spec.sums_width


def merge_piece(values: tuple, n: int, i: int, j: int, spec: Any, sums: Any, first: int) -> tuple:
    pieces = spec.operator.fragment_c.count // spec.sums_width
    if ((i * spec.fragments_n + j) * pieces + n) % spec.sums_at_once == 0:
        warp_barrier()                                 # no load goes before it: more on their way than registers hold
    return apply(merge, values, fetch_piece(n, i, j, spec, sums, first), spec)


@dataclass(frozen=True)
class Streamed(TileScheduler):
    """``tiles`` tiles of ``steps`` k-tiles each by ``launched`` blocks (or clusters) that stay; the first ``streamed`` tiles
    are streamed.

    A part of a block's work is known by the number of its first k-tile, ``at``.
    """

    reduction: Any = None              # `HandedOver`, or `gemmkit.kernels.sm90.stream_exchange.ClustersStreamK`
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
    def of(cls, scheduler: TileScheduler, reduction: Any, tiles: int, steps: int, streamed: int, blocks: int) -> Streamed:
        """``streamed`` of the tiles that ``scheduler`` hands out, and the others, by so many blocks."""
        least, more = divmod(streamed * steps, max(1, blocks))
        return cls(scheduler.order, scheduler.block, scheduler.cluster, reduction, tiles, steps, streamed, blocks,
                   *reciprocal(steps), least, more)

    def begin(self) -> int:
        """A block's first part."""
        own = self.share(self.own())
        return own if own < self.share(self.own() + 1) else self.first_whole(self.own())

    def end(self, shape: Any) -> int:
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

    def k_tiles(self, spec: Any, m: int, n: int, rank: int, shape: Any) -> tuple:
        """Those of the part that can matter to the tile. (``rank`` is the block's in its cluster, if it has one.)"""
        size, part = self.block.size.K, self.rank()
        begin, count = TileScheduler.k_tiles(self, spec, m, n, rank, shape)
        first = udiv(begin, size)
        low, high = max(first, part), min(first + count, part + self.length())
        return low * size, max(high - low, 0)

    def goes_on(self, peer: int) -> bool:
        tile = self.tile_of(rolled(self.at))           # computed anew, as in `following`
        return tile < self.streamed and self.share(peer) < (tile + 1) * self.steps

    def gather(self, spec: Any, accumulators: Any, rank: int) -> bool:
        block, tile = rolled(self.own()), self.tile_of(rolled(self.at))        # computed anew, as in `following`
        if rank > 0:
            self.reduction.hand_over(spec, accumulators, block)
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


def streamed(scheduler: TileScheduler, spec: Any, how: StreamK, tiles: int, K: int, most: int) -> Streamed:
    """The scheduler of a product's ``tiles`` tiles, streamed by ``most`` blocks or fewer, with descriptions of a workspace.

    Raises ValueError for products whose k-tiles, and workspaces whose sums, 32 bits do not count.
    """
    from gemmkit.runtime.workspace import described

    stream = streamed_in_shares(scheduler, how, tiles, K, most, int(spec.sums_count))
    blocks = int(stream.launched)
    reduction = HandedOver(1, described("sums", blocks * int(spec.sums_count), spec.operator.fragment_c.dtype),
                           described("counts", blocks, np.dtype(np.uint32)))
    return dataclasses.replace(stream, reduction=reduction)


def streamed_in_shares(scheduler: TileScheduler, how: StreamK, tiles: int, K: int, most: int, handed: int) -> Streamed:
    """The same without a reduction; a block (or cluster) hands over ``handed`` sums."""
    steps = max(1, -(-K // scheduler.block.size.K))
    blocks, first = division(tiles, steps, most, how.waves, 1 if how.blocks else LEAST)
    sums = blocks * handed
    if (tiles + blocks) * steps >= LIMIT or sums >= LIMIT:
        raise ValueError(f"splits={how!r}: {tiles} tiles of {steps} k-tiles on {blocks} blocks, whose sums are {sums} "
                         "numbers; both are less than 2**31; take larger tiles, or splits=1")
    return Streamed.of(scheduler, None, tiles, steps, first, blocks)


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
                          f"{threads} threads and {shared_bytes} bytes of shared memory at once; take fewer blocks")
    return how.blocks
