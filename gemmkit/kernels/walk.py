"""How the roles of `warp_specialised` walk: over tiles of D, over blocks along K, over the stages of the ring.

Producer and consumers go the same ways without a word between them, so the ways are written once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.kernels.parts import k_range_of
from gemmkit.kernels.work import Slot, Work
from gemmkit.lang.returned import pair, truth
from gemmkit.ptx.special import block_x, grid_x, udiv

BARRIERS = np.dtype(np.uint64)         # what pointers to mbarriers point to


def first_tile(spec: Any) -> int:
    """The first tile of this block's cluster, in the order of tiles."""
    return udiv(block_x(), spec.peers)


def tile_step(spec: Any) -> int:
    """From one tile of a cluster to its next."""
    return udiv(grid_x(), spec.peers)


def tile_count(spec: Any, shape: Any) -> int:
    return cluster_rows(spec, shape) * cluster_columns(spec, shape)


def cluster_rows(spec: Any, shape: Any) -> int:
    size = spec.block.size.M * spec.cluster_m
    return udiv(shape.M + size - 1, size)


def cluster_columns(spec: Any, shape: Any) -> int:
    size = spec.block.size.N * spec.cluster_n
    return udiv(shape.N + size - 1, size)


def tile_place(spec: Any, tile: int, rank: int, shape: Any) -> tuple:
    """First row and column of a block's tile of D: the blocks of a cluster lie along M or along N."""
    row, column = pair(spec.order, "block", spec.order.block(tile, cluster_rows(spec, shape),
                                                                    cluster_columns(spec, shape)))
    m, n = row * spec.cluster_m, column * spec.cluster_n
    if spec.shares_b:
        m += rank
    if spec.shares_a:
        n += rank
    return m * spec.block.size.M, n * spec.block.size.N


def work_of(spec: Any, tile: int, rank: int, shape: Any) -> Work:
    """A block's tile of D, and which of its blocks along K are this block's."""
    m, n = tile_place(spec, tile, rank, shape)
    begin, count = k_blocks(spec, m, n, rank, shape)
    return Work(m, n, begin, count, rank)


def k_blocks(spec: Any, m: int, n: int, rank: int, shape: Any) -> tuple:
    """Where the blocks along K that can matter to a tile begin, and how many there are: the same for a whole cluster, or
    this block's share of them."""
    size = spec.block.size
    if spec.shares_b:
        m -= rank * size.M
    if spec.shares_a:
        n -= rank * size.N
    a_begin, a_end = k_range_of(spec.a.layout, m, min(m + size.M * spec.cluster_m, shape.M), shape)
    b_begin, b_end = k_range_of(spec.b.layout, n, min(n + size.N * spec.cluster_n, shape.N), shape)
    begin = udiv(max(a_begin, b_begin), size.K) * size.K
    count = udiv(max(min(a_end, b_end) - begin, 0) + size.K - 1, size.K)
    if spec.splits > 1:                                # this block's share
        share = udiv(count + spec.splits - 1, spec.splits)
        begin, count = begin + rank * share * spec.block.size.K, max(min(count - rank * share, share), 0)
    return begin, count


def k_steps(spec: Any, work: Work) -> int:
    """How many stages a tile takes: its blocks along K, without those that the condition leaves out."""
    if spec.condition.is_always:
        return work.k_tiles
    steps = work.k_tiles * 0
    for block in range(work.k_tiles):
        if holds(spec, work.m, work.n, work.k_begin + block * spec.block.size.K):
            steps += 1
    return steps


def holds(spec: Any, m: int, n: int, k: int) -> bool:
    """Whether the condition leaves a block along K in."""
    return truth(spec.condition, "__call__", spec.condition(m, n, k))


def next_stage(spec: Any, slot: Slot) -> Slot:
    """The ring's next stage; the phase turns with every round."""
    if slot.stage == spec.stages - 1:
        return Slot(slot.stage * 0, slot.phase ^ 1)
    return Slot(slot.stage + 1, slot.phase)


def skip_stages(spec: Any, slot: Slot, count: int) -> Slot:
    """``count`` stages on, for those that another consumer takes."""
    stage = slot.stage + count
    rounds = udiv(stage, spec.stages)
    return Slot(stage - rounds * spec.stages, slot.phase ^ (rounds & 1))


__all__ = ["BARRIERS", "first_tile", "holds", "k_blocks", "k_steps", "next_stage", "skip_stages", "tile_count", "tile_place",
           "tile_step", "work_of"]
