"""Step 3 of `warp_specialised` where an epilogue normalises rows of D that the blocks of a cluster hold together.

| exchange | a row's columns are held by |
|---|---|
| `RowExchange` | one block; or it is finished in a second pass |
| `ClusterRowExchange` | the blocks of a cluster of 1 x ``blocks`` |

1. Each quad of lanes has its block's states of two rows of a fragment. Its lanes send them to all blocks (``st.async``),
   where an mbarrier of the consumer's fragment counts the bytes.
2. Every lane combines the states of its rows in the order of the blocks: all blocks make the same of them.
3. Each warp tells all blocks that it has read. They wait for that before they send for the next tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.common.pipeline import BARRIER, BARRIERS
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, fold
from gemmkit.lang.registers import generate
from gemmkit.ptx.cluster import cluster_rank, store_async
from gemmkit.ptx.mbarrier import mbarrier_arrive_at, mbarrier_expect, mbarrier_init, mbarrier_wait
from gemmkit.ptx.memory import load_shared, shared
from gemmkit.ptx.special import lane_index, thread_index, warp_barrier

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

    def whole_rows(self, epilogue: Any, states: tuple, at: Any) -> tuple:
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


def send_state(state: Any, r: int, exchange: Any, epilogue: Any, n: int, row: int, to: int) -> None:
    place = exchange.place(n, cluster_rank(), row + r * 8)
    store_async(exchange.values(), place, epilogue.words_of(state), exchange.full(), n, to)


def whole_row(r: int, exchange: Any, epilogue: Any, n: int, row: int) -> Any:
    return fold(exchange.blocks - 1, with_next, state_from(0, r, exchange, epilogue, n, row), r, exchange, epilogue, n, row)


def with_next(whole: Any, k: int, r: int, exchange: Any, epilogue: Any, n: int, row: int) -> Any:
    return epilogue.combine(whole, state_from(k + 1, r, exchange, epilogue, n, row))


def state_from(source: int, r: int, exchange: Any, epilogue: Any, n: int, row: int) -> Any:
    return epilogue.of_words(load_shared(exchange.values(), exchange.place(n, source, row + r * 8), 0, exchange.words))
