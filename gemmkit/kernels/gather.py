"""Step 1 of `warp_specialised` for operands that the copy engine does not take, whose neighbours still lie side by side.

The engine copies boxes of at most five dimensions; an operand of a contraction is a matrix whose rows and columns are made
of any number of them, wherever a tile begins. The producer's threads then start copies of 4 to 16 bytes each (cp.async), and
the hardware tells ``full[stage]`` when a thread's have come: nobody waits for global memory, and no register holds what is
on its way. An element's place is the sum of its row's and its column's (`Layout.is_separable`): what stays the same along K
is computed once a tile of D. What is out of range comes as zeros.

They write as threads do: consumers fence (`fence_async`) before tensor cores read a stage.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.kernels.producer import a_stage, b_stage, start_copies
from gemmkit.kernels.walk import first_tile, holds, k_blocks, next_stage, tile_count, tile_place, tile_step
from gemmkit.kernels.work import Slot
from gemmkit.lang.registers import Fragment, registers
from gemmkit.ptx.copy_async import copies_arrive, copy_async
from gemmkit.ptx.mbarrier import mbarrier_wait
from gemmkit.ptx.special import lane_index, rolled, thread_index, udiv, uniform
from gemmkit.tiling import parallelise

OFFSET = Fragment(np.dtype(np.int64), 1)


def produce_by_copies(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, rank: int,
                      shape: Any) -> None:
    """For every tile of D, for every block along K: wait until the next stage is empty, and start its copies."""
    warp = uniform(udiv(thread_index(), 32))
    a_lines, b_lines = registers(OFFSET, spec.a_slots), registers(OFFSET, spec.b_slots)
    stage = thread_index() * 0
    phase = stage + 1                                  # nothing has been in the ring: its first round waits for nobody
    tile, tiles, step = first_tile(spec), tile_count(spec, shape), tile_step(spec)
    while tile < tiles:
        m, n = tile_place(spec, tile, rank, shape)
        begin, count = k_blocks(spec, m, n, rank, shape)
        if spec.a_gathers:
            find_lines(spec.a, a_lines, a, m, spec.block.MK, 0, warp, spec)
        if spec.b_gathers:
            find_lines(spec.b, b_lines, b, n, spec.block.KN, 1, warp, spec)
        block = count * 0
        while block < count:
            k = begin + block * spec.block.size.K
            if holds(spec, m, n, k):
                mbarrier_wait(empty, stage, phase)
                start_copies(spec, map_a, map_b, full, stage, m, n, k, rank)
                if spec.a_gathers:
                    copy_tiles(spec.a, a_lines, a, a_stage(spec, stage), spec.block.MK, m, k, shape.M, shape.K, 0, warp,
                               spec)
                if spec.b_gathers:
                    copy_tiles(spec.b, b_lines, b, b_stage(spec, stage), spec.block.KN, k, n, shape.K, shape.N, 1, warp,
                               spec)
                copies_arrive(full, stage)
                stage, phase = next_stage(spec, Slot(stage, phase))
            block = rolled(block + 1)
        tile += step


def find_lines(operand: Any, lines: Any, data: Any, at: int, block: Any, across: int, warp: int, spec: Any) -> None:
    """Where the lines along K begin (rows of A, columns of B: ``across`` is their axis) that a thread copies from."""
    warp_tiles = parallelise(block, operand.warp, warp, spec.producer_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            lines[i * len(thread_tiles) + j] = (offset(operand, data, at + thread_tiles[j].index[across], across),)


def copy_tiles(operand: Any, lines: Any, data: Any, pointer: Any, block: Any, at_i: int, at_j: int, rows: int, columns: int,
               across: int, warp: int, spec: Any) -> None:
    """Extents are multiples of a thread's tile, so it is wholly in range or wholly out."""
    warp_tiles = parallelise(block, operand.warp, warp, spec.producer_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            tile = thread_tiles[j]
            row, column = at_i + tile.index[0], at_j + tile.index[1]
            along = offset(operand, data, column if across == 0 else row, 1 - across)
            copy_async(pointer, operand.shared.position(tile.index, operand.shared.leading(block.size)), data,
                       lines[i * len(thread_tiles) + j][0] + along, tile.count, row < rows and column < columns)


def offset(operand: Any, data: Any, n: int, axis: int) -> int:
    """What a row (axis 0) or a column adds to an element's place."""
    return operand.layout.row_offset(data, n) if axis == 0 else operand.layout.column_offset(data, n)


__all__ = ["produce_by_copies"]
