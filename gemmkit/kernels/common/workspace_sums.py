"""Shares of K that meet in a workspace in global memory: any number of them, without clusters (sm_70 on).

Every block of (tile, share) writes its accumulators to the workspace and counts itself in. Two kinds go on from there:

* `WorkspaceSums`: the block that is counted last reads all shares, from the first to the last, and merges them. No block
  waits for another, so any grid will do. The last one's time grows with the number of shares.
* `SlicedSums`: all blocks wait until all are counted. Then each merges a slice of the tile over all shares, in groups of
  neighbours whose number depends on the shares alone, writes it back, and the last to do so collects the slices. It is for
  few tiles and many shares. Blocks that wait must all be on multiprocessors: the host takes this kind for no more blocks
  than there are multiprocessors, and asks the driver before the first launch (`gemmkit.runtime.workspace.check_residency`).

Whoever comes last sets the tile's counters to 0 again: the next launch finds them so. Sums are never cleared. A place is
written in every launch before it is read.

Ordering: all threads of a block write, meet at a barrier, and one of them adds to the counter, releasing (for the device)
what it knows of; the one that finds the last number has acquired all, and its block meets again before anyone reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.components import Array, Scalar
from gemmkit.kernels.common.reduction import Reduction, dealt
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, join, split
from gemmkit.lang.registers import apply, generate
from gemmkit.ptx.atomics import atomic_add, await_counter, set_counter
from gemmkit.ptx.memory import load_global, load_shared, shared, store_global, store_shared
from gemmkit.ptx.special import barrier, block_x, rolled, thread_index, udiv

COUNTERS = 2                           # of a tile: blocks that have written their sums, and their slices
INT32 = np.dtype(np.int32)
FLAG = 4                               # bytes of shared memory by which a block's threads hear what one of them counted


@dataclass(frozen=True)
class WorkspaceSums(Reduction):
    """The block that comes last sums ``shares`` shares: ``sums`` are theirs, ``counts`` has `COUNTERS` numbers a tile.

    On the host the arrays are descriptions without an address (`gemmkit.runtime.workspace`), until a launch has a stream.
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

    def put(self, spec: Any, accumulators: Any, tile: int, rank: int) -> None:
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

    def shared_bytes(self, spec: Any) -> int:
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

    def sum_slice(self, spec: Any, tile: int, rank: int) -> None:
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

    def sum_group(self, spec: Any, first: int, share: int, end: int) -> tuple:
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


def merge(x: Any, n: int, others: tuple, spec: Any) -> Any:
    return spec.operator.merge(x, others[n])


def put_piece(values: tuple, n: int, i: int, j: int, spec: Any, sums: Any, first: int) -> None:
    store_global(sums, 0, (first,), (place_of(n, i, j, spec),), values)


def fetch_fragment(i: int, j: int, spec: Any, sums: Any, first: int) -> tuple:
    return join(generate(spec.operator.fragment_c.count // spec.sums_width, fetch_piece, i, j, spec, sums, first))


def fetch_piece(n: int, i: int, j: int, spec: Any, sums: Any, first: int) -> tuple:
    return load_global(sums, 0, (first,), (place_of(n, i, j, spec),), spec.sums_width)


def place_of(n: int, i: int, j: int, spec: Any) -> int:
    """Where the threads' n-th pieces of a fragment begin: neighbours in a warp are neighbours in memory."""
    pieces = spec.operator.fragment_c.count // spec.sums_width
    return ((i * spec.fragments_n + j) * pieces + n) * spec.threads * spec.sums_width


# -- which kind, and how much memory ----------------------------------------------------------------------------------

#: Shares from which on slices are summed by all blocks: the one that comes last would take as long as its share's products.
MANY = 8


def takes_slices(shares: int, tiles: int, sm_count: int) -> bool:
    """Whether all blocks sum slices: where the last one would have many shares to read, and all can be resident."""
    return shares >= MANY and tiles * shares <= sm_count


def reduction_of(spec: Any, shares: int, tiles: int, sm_count: int) -> WorkspaceSums:
    """The reduction of a launch of so many tiles (of all products), with descriptions of the workspace in it.

    Raises ValueError for sums that 32-bit coordinates do not reach.
    """
    from gemmkit.runtime.workspace import described

    elements = tiles * shares * spec.sums_count
    if elements >= 2**31 or tiles * shares >= 2**31:
        raise ValueError(f"splits={shares}: the sums of {shares} shares of {tiles} tiles are {elements} numbers, and a "
                         "workspace has less than 2**31; take fewer splits")
    kind = SlicedSums if takes_slices(shares, tiles, sm_count) else WorkspaceSums
    return kind(shares, described("sums", elements, spec.operator.fragment_c.dtype),
                described("counts", tiles * COUNTERS, np.dtype(np.uint32)))
