"""Between steps 2 and 3 of `warp_specialised`, where blocks share the K of a tile: they add up their sums.

| exchange | blocks that share K | sums meet |
|---|---|---|
| `Exchange` | one: a block has K to itself | |
| `ClusterExchange` | those of a cluster | in shared memory |
| `gemmkit.kernels.sm90.workspace_exchange.WorkspaceExchange` | of different clusters | in global memory |

In a cluster each of ``splits`` blocks has sums of the whole tile, over its part of K. Block r finishes the r-th slice of
columns: every thread sends each slice to the block that finishes it, straight into its shared memory, and adds up, in the
order of the blocks, what it is sent itself. Nothing goes through global memory, and the result does not depend on which
block is first.
"""

from __future__ import annotations

from typing import Any

from gemmkit.components import Component
from gemmkit.kernels.common.pipeline import BARRIER, BARRIERS
from gemmkit.kernels.sm90.elements import add_value
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, fold, join, split
from gemmkit.lang.registers import apply, generate
from gemmkit.ptx.cluster import store_async
from gemmkit.ptx.mbarrier import mbarrier_arrive_at, mbarrier_expect, mbarrier_init, mbarrier_wait
from gemmkit.ptx.memory import load_shared, shared
from gemmkit.ptx.special import thread_index
from gemmkit.ptx.warpgroup import named_barrier


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

    def finishes(self, spec: Any) -> bool:
        """Whether this block finishes any of its tile."""
        return True

    def slice(self, spec: Any, rank: int) -> int:
        """Which slice of columns a block finishes, of those that do. ``rank`` is the block's in its cluster."""
        return rank

    def hand_over(self, sums: tuple, spec: Any, group: int, rank: int, phase: int) -> bool:
        """Give a consumer's sums of the whole tile to the blocks that finish it; whether this is one of them. ``phase``
        flips with every tile."""
        return True

    def collect(self, sums: tuple, spec: Any, group: int, rank: int, phase: int) -> tuple:
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

    def hand_over(self, sums: tuple, spec: Any, group: int, rank: int, phase: int) -> bool:
        if thread_index() % 128 == 0:
            mbarrier_expect(self.filled(), group, self.nbytes)
        mbarrier_wait(self.free(), group, phase ^ 1)   # those it sends to have read what it sent for the last tile
        each(send_fragment, sums, spec, group, rank)
        return True

    def collect(self, sums: tuple, spec: Any, group: int, rank: int, phase: int) -> tuple:
        mbarrier_wait(self.filled(), group, phase)
        mine = generate(spec.fragments_m, receive_fragment, spec, group)
        named_barrier(spec.store.barrier + group, 128)
        thread = thread_index() % 128
        if thread < spec.cluster.splits:
            mbarrier_arrive_at(self.free(), group, thread)
        return mine


def send_fragment(fragment: tuple, i: int, spec: Any, group: int, rank: int) -> None:
    each(send_slice, split(fragment, spec.exchange.count), i, spec, group, rank)


def send_slice(values: tuple, to: int, i: int, spec: Any, group: int, rank: int) -> None:
    each(send_words, split(values, 4), i, to, spec, group, rank)


def send_words(words: tuple, j: int, i: int, to: int, spec: Any, group: int, rank: int) -> None:
    store_async(shared(spec.operator.fragment_c.dtype, spec.exchange.offset), place_of(spec, group, rank, i, j), words,
                spec.exchange.filled(), group, to)


def receive_fragment(i: int, spec: Any, group: int) -> tuple:
    return join(generate(spec.exchange.pieces, receive_words, i, spec, group))


def receive_words(j: int, i: int, spec: Any, group: int) -> tuple:
    return fold(spec.cluster.splits - 1, add_next, load_words_from(0, i, j, spec, group), i, j, spec, group)


def add_next(total: tuple, n: int, i: int, j: int, spec: Any, group: int) -> tuple:
    return apply(add_value, total, load_words_from(n + 1, i, j, spec, group))


def load_words_from(source: int, i: int, j: int, spec: Any, group: int) -> tuple:
    pointer = shared(spec.operator.fragment_c.dtype, spec.exchange.offset)
    return load_shared(pointer, place_of(spec, group, source, i, j), 0, 4)


def place_of(spec: Any, group: int, source: int, i: int, j: int) -> int:
    """Where this thread's four elements from a block lie: neighbours in a warp are neighbours in memory."""
    row = ((group * spec.cluster.splits + source) * spec.fragments_m + i) * spec.exchange.pieces + j
    return (row * 128 + thread_index() % 128) * 4
