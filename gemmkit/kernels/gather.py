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
from gemmkit.kernels.walk import first_tile, k_blocks, next_stage, tile_count, tile_place, tile_step
from gemmkit.lang.control import choose, keep
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
        choose(spec.a_gathers, find_rows, keep, spec.a, a_lines, a, m, spec.block.MK, warp, spec)
        choose(spec.b_gathers, find_columns, keep, spec.b, b_lines, b, n, spec.block.KN, warp, spec)
        block = count * 0
        while block < count:
            k = begin + block * spec.block.size.K
            if spec.condition(m, n, k):
                mbarrier_wait(empty, stage, phase)
                start_copies(spec, map_a, map_b, full, stage, m, n, k, rank)
                choose(spec.a_gathers, copy_rows, keep, spec.a, a_lines, a, a_stage(spec, stage), spec.block.MK, m, k,
                       shape.M, shape.K, warp, spec)
                choose(spec.b_gathers, copy_columns, keep, spec.b, b_lines, b, b_stage(spec, stage), spec.block.KN, k, n,
                       shape.K, shape.N, warp, spec)
                copies_arrive(full, stage)
                stage, phase = next_stage(spec, stage, phase)
            block = rolled(block + 1)
        tile += step


def find_rows(operand: Any, lines: Any, data: Any, m: int, block: Any, warp: int, spec: Any) -> None:
    """Where the rows of A begin that a thread copies from."""
    warp_tiles = parallelise(block, operand.warp, warp, spec.producer_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            lines[i * len(thread_tiles) + j] = (operand.layout.row_offset(data, m + thread_tiles[j].index[0]),)


def find_columns(operand: Any, lines: Any, data: Any, n: int, block: Any, warp: int, spec: Any) -> None:
    """Where the columns of B begin that a thread copies from."""
    warp_tiles = parallelise(block, operand.warp, warp, spec.producer_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            lines[i * len(thread_tiles) + j] = (operand.layout.column_offset(data, n + thread_tiles[j].index[1]),)


def copy_rows(operand: Any, lines: Any, data: Any, pointer: Any, block: Any, m: int, k: int, rows: int, columns: int,
              warp: int, spec: Any) -> None:
    warp_tiles = parallelise(block, operand.warp, warp, spec.producer_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            tile = thread_tiles[j]
            along = operand.layout.column_offset(data, k + tile.index[1])
            copy_line(operand, data, pointer, block, tile, lines[i * len(thread_tiles) + j][0] + along,
                      m + tile.index[0] < rows and k + tile.index[1] < columns)


def copy_columns(operand: Any, lines: Any, data: Any, pointer: Any, block: Any, k: int, n: int, rows: int, columns: int,
                 warp: int, spec: Any) -> None:
    warp_tiles = parallelise(block, operand.warp, warp, spec.producer_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            tile = thread_tiles[j]
            along = operand.layout.row_offset(data, k + tile.index[0])
            copy_line(operand, data, pointer, block, tile, lines[i * len(thread_tiles) + j][0] + along,
                      k + tile.index[0] < rows and n + tile.index[1] < columns)


def copy_line(operand: Any, data: Any, pointer: Any, block: Any, tile: Any, offset: int, is_there: bool) -> None:
    """A thread's tile: extents are multiples of it, so it is wholly in range or wholly out."""
    copy_async(pointer, operand.shared.position(tile.index, operand.shared.leading(block.size)), data, offset, tile.count,
               is_there)


__all__ = ["produce_by_copies"]
