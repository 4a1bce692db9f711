"""Step 1 of `attention`: one thread has TMA fill the stages of Q, K and V.

K is one block ahead of V, as the consumers want them: at the end of a tile come K and Q of the next one, then the last block
of V, or V before Q where a tile ends before the next one begins. A tile's blocks go from the last of its keys to the first.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.attention.walk import key_blocks, slice_of, tile_at
from gemmkit.kernels.attention.work import Tile
from gemmkit.kernels.common.work import Slot
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import rolled, thread_index, udiv
from gemmkit.ptx.tma import tma_load


def produce(spec: Any, sizes: Any, order: Any, map_q: Any, map_k: Any, map_v: Any) -> None:
    zero = thread_index() * 0
    slot, q_slot = Slot(zero, zero + 1), Slot(zero, zero + 1)            # fresh rings are empty
    before, last, last_block, turn = slot, tile_at(spec, sizes, order, zero), zero - 1, zero
    tile = last
    while tile.m >= 0:
        blocks = key_blocks(spec, tile)
        block = blocks.last - 1
        load_k(spec, sizes, map_k, slot, tile, block)
        if spec.joins_tiles:
            load_q(spec, map_q, q_slot, tile)
        if last_block >= 0:
            load_v(spec, sizes, map_v, before, last, last_block)
        if not spec.joins_tiles:
            load_q(spec, map_q, q_slot, tile)
        q_slot = spec.q_ring.advance(q_slot)
        while block > blocks.first:
            before = slot
            slot = spec.k_ring.advance(slot)
            load_k(spec, sizes, map_k, slot, tile, block - 1)
            load_v(spec, sizes, map_v, before, tile, block)
            block = rolled(block - 1)
        before, last, last_block = slot, tile, block
        slot = spec.k_ring.advance(slot)
        turn = rolled(turn + 1)
        tile = tile_at(spec, sizes, order, turn)
    if last_block >= 0:
        load_v(spec, sizes, map_v, before, last, last_block)


def load_q(spec: Any, tensor_map: Any, slot: Slot, tile: Tile) -> None:
    load(spec, spec.q_ring, tensor_map, slot, (tile.first_query + tile.m, tile.head, slice_of(spec, tile)))


def load_k(spec: Any, sizes: Any, tensor_map: Any, slot: Slot, tile: Tile, block: int) -> None:
    head, batch = udiv(tile.head, sizes.k_share), slice_of(spec, tile) * sizes.k_batch
    load(spec, spec.k_ring, tensor_map, slot, (tile.first_key + block * spec.block_n, head, batch))


def load_v(spec: Any, sizes: Any, tensor_map: Any, slot: Slot, tile: Tile, block: int) -> None:
    head, batch = udiv(tile.head, sizes.v_share), slice_of(spec, tile) * sizes.v_batch
    load(spec, spec.v_ring, tensor_map, slot, (tile.first_key + block * spec.block_n, head, batch))


def load(spec: Any, ring: Any, tensor_map: Any, slot: Slot, at: tuple) -> None:
    """A stage of a ring, panel by panel, from a row of a head of a batch on."""
    ring.acquire(slot)
    ring.expect(slot, 2 * ring.rows * spec.head_dim)
    for panel in range(spec.head.count):
        tma_load(tensor_map, (panel * spec.head.line, at[0], at[1], at[2]), shared(spec.dtype, ring.tiles),
                 slot.stage * (ring.rows * spec.head_dim) + panel * ring.rows * spec.head.line, ring.full(), slot.stage)
