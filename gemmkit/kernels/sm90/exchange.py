"""Between steps 2 and 3 of `warp_specialised`, where blocks of a cluster share the K of a tile: they add up their sums.

Each of ``splits`` blocks has sums of the whole tile, over its part of K. Block r finishes the r-th slice of columns: every
thread sends each slice to the block that finishes it, straight into its shared memory, and adds up, in the order of the
blocks, what it is sent itself. Nothing goes through global memory, and the result does not depend on which block is first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemmkit.components import Component
from gemmkit.kernels.common.pipeline import BARRIER, BARRIERS
from gemmkit.kernels.sm90.elements import add_value
from gemmkit.lang.control import each, fold, join, split
from gemmkit.lang.registers import apply, generate
from gemmkit.ptx.cluster import store_async
from gemmkit.ptx.mbarrier import mbarrier_arrive_at, mbarrier_expect, mbarrier_init, mbarrier_wait
from gemmkit.ptx.memory import load_shared, shared
from gemmkit.ptx.special import thread_index
from gemmkit.ptx.warpgroup import named_barrier


@dataclass(frozen=True)
class Exchange(Component):
    """What ``consumers`` consumers send to those of other blocks; none where a block has K to itself.

    ``columns`` are from a slice of the tile to the next, ``count`` a thread's sums in a slice of a 64-row fragment, sent
    four at a time. They arrive ``offset`` bytes into shared memory, ``nbytes`` for each consumer; its barriers stand at
    ``barriers``: one for the sums that it is sent, one for the room to send some.
    """

    consumers: int = 0
    columns: int = 0
    count: int = 0
    nbytes: int = 0
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

    def run(self, sums: tuple, spec: Any, group: int, rank: int, phase: int) -> tuple:
        """This block's slice of the columns, over all of K; ``phase`` flips with every tile."""
        thread = thread_index() % 128
        if thread == 0:
            mbarrier_expect(self.filled(), group, self.nbytes)
        mbarrier_wait(self.free(), group, phase ^ 1)   # those it sends to have read what it sent for the last tile
        each(send_fragment, sums, spec, group, rank)
        mbarrier_wait(self.filled(), group, phase)
        mine = generate(spec.fragments_m, receive_fragment, spec, group)
        named_barrier(spec.store.barrier + group, 128)
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


__all__ = ["Exchange"]
