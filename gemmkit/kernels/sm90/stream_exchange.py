"""Between steps 2 and 3 of `warp_specialised`, where clusters stream K (`gemmkit.kernels.common.stream_k`): a part of a tile
goes from the cluster that computed it to the one that finishes the tile.

Blocks of a cluster multicast operands to each other, so a cluster has one share of k-tiles, and each of its blocks computes
that part of its own tile. Where the part does not begin with the tile's first k-tile, the threads of each consumer write
their sums to the workspace and meet, and one adds 1 to the consumer's counter, releasing. The consumer of the same number,
in the block of the same rank of the cluster that has the tile's first k-tile, waits for the counter, sets it back to 0, and
adds the sums to its own: first those of the next cluster, then of the one behind that, so that the same call gives the same
bits. It goes on to C and the epilogue with the sums of all of K. (With a ping-pong schedule a consumer has a part to itself,
and there is one place a block: while one consumer hands over, or waits, the other multiplies.)

A thread reads what a thread of its number wrote: pieces of 16 bytes, neighbours in a warp are neighbours in memory. A
cluster hands over once, at its first part, so the workspace has a tile of sums for each block that is launched, and a
counter for each of its consumers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.common.reduction import Reduction
from gemmkit.kernels.common.scheduler import TileScheduler
from gemmkit.kernels.common.stream_k import Streamed, StreamK, streamed_in_shares
from gemmkit.kernels.sm90.workspace_exchange import WIDTH, WorkspaceExchange, add_fragment, put_fragment
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.registers import apply
from gemmkit.ptx.atomics import atomic_add, await_counter, set_counter
from gemmkit.ptx.special import rolled, thread_index
from gemmkit.ptx.warpgroup import named_barrier


@dataclass(frozen=True)
class ClustersStreamK(Reduction):
    """Clusters hand over the sums of parts of tiles: by the `StreamExchange`, since consumers do so one by one."""

    is_shared = True
    waits = True


@dataclass(frozen=True, kw_only=True)
class StreamExchange(WorkspaceExchange):
    """A consumer's sums of a part that another cluster finishes: a place in ``sums`` for each consumer of each block, and a
    number in ``counts``. Tiles are finished whole."""

    def finishes(self, spec: Any) -> bool:
        return spec.scheduler.rank() == 0

    def slice(self, spec: Any, rank: int) -> int:
        return 0

    def hand_over(self, sums: tuple, spec: Any, group: int, rank: int, phase: int) -> bool:
        if spec.scheduler.rank() == 0:
            return True
        place, thread = place_of(spec, rolled(spec.scheduler.own()), group, rank), thread_index() % 128
        each(put_fragment, sums, spec, place * self.share_elements + thread * WIDTH)
        named_barrier(spec.store.barrier + group, 128)
        if thread == 0:
            atomic_add(self.counts, place, 1, "release")
        return False

    def collect(self, sums: tuple, spec: Any, group: int, rank: int, phase: int) -> tuple:
        peer = rolled(spec.scheduler.own()) + 1
        while spec.scheduler.goes_on(peer):            # the clusters that have the rest of the tile
            sums = self.take_over(sums, spec, place_of(spec, peer, group, rank), group)
            peer = rolled(peer + 1)
        return sums

    def take_over(self, sums: tuple, spec: Any, place: int, group: int) -> tuple:
        """Wait for what has been handed over at a place, and add it."""
        thread = thread_index() % 128
        if thread == 0:
            await_counter(self.counts, place, 1, "acquire")
            set_counter(self.counts, place, 0)
        named_barrier(spec.store.barrier + group, 128)
        return apply(add_fragment, sums, spec, place * self.share_elements + thread * WIDTH)


def place_of(spec: Any, cluster: int, group: int, rank: int) -> int:
    """Where a consumer hands over and another takes over; ``rank`` is its block's in the cluster. With a ping-pong schedule
    a consumer has all rows of a tile, and takes over from either one of the next cluster."""
    block = cluster * spec.cluster.size + rank
    return block if spec.is_pingpong else block * spec.consumers + group


# -- on the host ------------------------------------------------------------------------------------------------------

def streamed_clusters(scheduler: TileScheduler, how: StreamK, arrays: Arrays | None) -> Streamed:
    """The scheduler of a product whose clusters stream K; ``scheduler`` hands out its tiles.

    Raises ConfigError for more blocks than the device holds at once, ValueError for products that 32 bits do not count.
    """
    cluster, size = scheduler.cluster, scheduler.block.size
    most = cluster.at_once(arrays.sm_count) if arrays else 1
    if how.blocks is not None:
        if arrays and how.blocks > most * cluster.size:
            raise ConfigError(f"splits={how!r}: blocks wait for each other, and the device holds {most} clusters of "
                              f"{cluster.m}x{cluster.n} at once; take {most * cluster.size} blocks or fewer")
        most = how.blocks // cluster.size
    rows, columns = scheduler.grid(arrays.M, arrays.N) if arrays else (1, 1)
    tiles = rows * columns * (1 if arrays is None or arrays.products is None else arrays.products)
    stream = streamed_in_shares(scheduler, how, tiles, arrays.K if arrays else 0, most, cluster.size * size.M * size.N)
    return dataclasses.replace(stream, reduction=ClustersStreamK())


def stream_exchange_of(spec: Any) -> StreamExchange:
    """The exchange of a launch, with descriptions of its workspace: a place for each consumer that is launched."""
    from gemmkit.runtime.workspace import described

    fragment, blocks = spec.operator.fragment_c, int(spec.scheduler.launched) * spec.cluster.size
    places = blocks * (1 if spec.is_pingpong else spec.consumers)
    count = int(fragment.count)
    return StreamExchange(1, 0, count, shares=1, total=count, fragments=spec.fragments_m,
                          sums=described("sums", places * spec.fragments_m * count * 128, fragment.dtype),
                          counts=described("counts", places, np.dtype(np.uint32)))
