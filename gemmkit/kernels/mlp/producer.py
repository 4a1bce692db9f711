"""Step 1 of `mlp`: one thread has TMA fill the stages of x and of the weights, layer after layer, tile after tile."""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.common.work import Slot
from gemmkit.kernels.mlp.spec import CHUNK, ROWS
from gemmkit.kernels.mlp.walk import first_row, has_tile
from gemmkit.ptx.map_table import map_at
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import rolled, thread_index
from gemmkit.ptx.tma import tma_load, tma_load_multicast


def produce(spec: Any, sizes: Any, maps: Any, map_x: Any, rank: int) -> None:
    zero = thread_index() * 0
    slot, x_slot, turn = Slot(zero, zero + 1), Slot(zero, zero + 1), zero      # fresh rings are empty
    while has_tile(spec, sizes, turn, rank):
        if turn == 0:
            load_x(spec, map_x, x_slot, first_row(spec, turn))
        if not spec.resident or turn == 0:
            slot = load_layer(spec.first, spec, sizes, maps, slot, zero, rank)
        if turn > 0:
            # Not before: with a single stage of x it waits for the end of the last tile, and the first layer has room.
            load_x(spec, map_x, x_slot, first_row(spec, turn))
        x_slot = spec.x_ring.advance(x_slot)
        if not spec.resident or turn == 0:
            if not spec.single:
                layer = zero + 1
                while layer < sizes.layers - 1:
                    slot = load_layer(spec.middle, spec, sizes, maps, slot, layer, rank)
                    layer = rolled(layer + 1)
                slot = load_layer(spec.final, spec, sizes, maps, slot, layer, rank)
        turn = rolled(turn + 1)


def load_x(spec: Any, map_x: Any, slot: Slot, row: int) -> None:
    """The tile's rows, consumer by consumer, panel by panel."""
    spec.x_ring.acquire(slot)
    spec.x_ring.expect(slot, spec.x_loaded)
    for group in range(spec.consumers):
        for panel in range(spec.x.count):
            tma_load(map_x, (panel * spec.x.line, row + group * ROWS), shared(spec.dtype, 0),
                     slot.stage * (spec.x_bytes // 2) + group * (spec.group_bytes // 2) + panel * (ROWS * spec.x.line),
                     spec.x_ring.full(), slot.stage)


def load_layer(weights: Any, spec: Any, sizes: Any, maps: Any, slot: Slot, layer: int, rank: int) -> Slot:
    """A layer's weights, chunk by chunk, its biases with the first; returns the slot behind it."""
    chunk = layer * 0
    while chunk < weights.chunks:
        spec.ring.acquire(slot)
        if chunk == 0:
            spec.ring.expect(slot, weights.nbytes + spec.bias_bytes)
            if spec.has_bias:
                tma_load(map_at(maps, sizes.layers + layer), (0, 0), shared(spec.bias_dtype, spec.bias_offset),
                         slot.stage * spec.bias_pitch, spec.ring.full(), slot.stage)
        else:
            spec.ring.expect(slot, weights.nbytes)
        load_chunk(weights, spec, map_at(maps, layer), slot, chunk * CHUNK, rank)
        slot = spec.ring.advance(slot)
        chunk = rolled(chunk + 1)
    return slot


def load_chunk(weights: Any, spec: Any, tensor_map: Any, slot: Slot, k: int, rank: int) -> None:
    """``CHUNK`` rows of weights from row ``k`` on: this block's lines of each panel, to all blocks of the cluster."""
    part = weights.lines // spec.cluster.size
    pointer, line = shared(spec.dtype, spec.w_offset), rank * part
    for panel in range(weights.panels):
        to = slot.stage * (spec.stage_bytes // 2) + (panel * weights.lines + line) * weights.line
        x, y = (k, line) if weights.k_major else (panel * weights.line, k + line)
        if spec.cluster.is_single:
            tma_load(tensor_map, (x, y), pointer, to, spec.ring.full(), slot.stage)
        else:
            tma_load_multicast(tensor_map, (x, y), pointer, to, spec.ring.full(), slot.stage, spec.cluster.mask)
