"""Between steps 2 and 3 of `warp_specialised`, where clusters share the K of their tiles: sums meet in global memory.

Every block of (tile, share) has sums of the whole tile over its part of K. The threads of each of its consumers write them
to the workspace and meet, and one adds 1 to the counter of (tile, consumer), releasing. The first ``slices`` blocks finish a
slice of columns each: they wait for the counter, read their slice of all shares, and sum it from the first share to the
last, so that the same call gives the same bits. The others are done when they are counted.

A thread reads what threads of its number wrote: pieces of 16 bytes, neighbours in a warp are neighbours in memory. Consumers
have different rows, so those of a block do not wait for each other.

The counter goes from 0 to ``shares``, and on by 1 for each block that has seen that; who comes last finds
``shares + slices - 1`` and sets it to 0 for the next launch. Sums are never cleared.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.components import Array
from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.sm90.elements import add_value
from gemmkit.kernels.sm90.exchange import Exchange
from gemmkit.kernels.sm90.shared_k import SharedK
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, fold, join, split
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.registers import apply, generate
from gemmkit.ptx.atomics import atomic_add, await_counter, set_counter
from gemmkit.ptx.memory import load_global, store_global
from gemmkit.ptx.special import thread_index
from gemmkit.ptx.warpgroup import named_barrier

WIDTH = 4                              # accumulators of 4 bytes that a thread moves at a time
AHEAD = 8                              # shares whose loads are on their way at once


@dataclass(frozen=True, kw_only=True)
class WorkspaceExchange(Exchange):
    """The sums of ``shares`` shares; ``sums`` are theirs, and ``counts`` has a number for each consumer of each tile.

    ``count`` of a thread's ``total`` sums in each of its 64-row ``fragments`` are those of a slice. On the host the arrays
    are descriptions without an address (`gemmkit.runtime.workspace`), until a launch has a stream.
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

    def finishes(self, spec: Any) -> bool:
        return spec.reduction.rank() < self.slices

    def slice(self, spec: Any, rank: int) -> int:
        return spec.reduction.rank()

    def hand_over(self, sums: tuple, spec: Any, group: int, rank: int, phase: int) -> bool:
        own, share = place_of(spec, group, rank), spec.reduction.rank()
        first = (own * self.shares + share) * self.share_elements + thread_index() % 128 * WIDTH
        each(put_fragment, sums, spec, first)
        named_barrier(spec.store.barrier + group, 128)
        if thread_index() % 128 == 0:
            atomic_add(self.counts, own, 1, "release")
        return share < self.slices

    def collect(self, sums: tuple, spec: Any, group: int, rank: int, phase: int) -> tuple:
        own, thread = place_of(spec, group, rank), thread_index() % 128
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


def place_of(spec: Any, group: int, rank: int) -> int:
    """The number of a consumer's part of a tile among all that the launch computes."""
    return (spec.scheduler.first() * spec.cluster.size + rank) * spec.consumers + group


def put_fragment(fragment: tuple, i: int, spec: Any, first: int) -> None:
    each(put_piece, split(fragment, WIDTH), i, spec, first)


def put_piece(values: tuple, j: int, i: int, spec: Any, first: int) -> None:
    store_global(spec.exchange.sums, 0, (first,), ((i * spec.exchange.total + j * WIDTH) * 128,), values)


def fetch_fragment(i: int, spec: Any, first: int) -> tuple:
    """This thread's sums of a slice of a fragment."""
    return join(generate(spec.exchange.count // WIDTH, fetch_piece, i, spec, first))


def fetch_piece(j: int, i: int, spec: Any, first: int) -> tuple:
    return load_global(spec.exchange.sums, 0, (first,), ((i * spec.exchange.total + j * WIDTH) * 128,), WIDTH)


def add_share(mine: tuple, n: int, spec: Any, first: int) -> tuple:
    """With the sums of the share that is ``n + 1`` behind the one at ``first``."""
    return apply(add_fragment, mine, spec, first + (n + 1) * spec.exchange.share_elements)


def add_fragment(fragment: tuple, i: int, spec: Any, first: int) -> tuple:
    return apply(add_value, fragment, fetch_fragment(i, spec, first))



# -- on the host ------------------------------------------------------------------------------------------------------

def exchange_of(spec: Any, slices: int, sharing: SharedK, arrays: Arrays | None) -> WorkspaceExchange:
    """The exchange of a launch, with descriptions of its workspace.

    Raises ConfigError where the device cannot hold all blocks at once, and for sums that 32-bit coordinates do not reach.
    """
    from gemmkit.runtime.workspace import described

    shares, cluster, count = sharing.shares, spec.cluster, int(spec.operator.fragment_c.count)
    rows, columns = spec.scheduler.grid(arrays.M, arrays.N) if arrays else (1, 1)
    tiles = rows * columns * (1 if arrays is None or arrays.products is None else arrays.products)
    if arrays:
        sharing.check_resident(tiles * shares, cluster.at_once(arrays.sm_count))
    consumers = tiles * cluster.size * spec.consumers
    elements = consumers * shares * spec.fragments_m * count * 128
    if elements >= 2**31:
        raise ConfigError(f"splits={shares}: the sums of {shares} shares of {tiles} tiles are {elements} numbers, and a "
                          "workspace has less than 2**31; take fewer splits")
    return WorkspaceExchange(slices, spec.block.size.N // slices, count // slices, shares=shares, total=count,
                             fragments=spec.fragments_m,
                             sums=described("sums", elements, spec.operator.fragment_c.dtype),
                             counts=described("counts", consumers, np.dtype(np.uint32)))
