"""Step 1 of `warp_specialised` for numbers of several parts that lie side by side in memory (`Interleaved`).

Tensor cores want planes, and the copy engine takes nothing apart. So it brings a stage's numbers as they are, some stages
ahead, into the very place of their planes; the producer's warps read them all, meet, and write them back part by part. Such
a stage goes around the ring in three states:

| state | who makes it so | told by |
|---|---|---|
| empty | the consumers, who have read it | ``empty[stage]`` |
| landed | the copy engine, which the producer's first thread starts | ``landed[stage]`` |
| full | the producer's warps | ``full[stage]`` |

Global memory's latency is the engine's affair, and warps wait for shared memory only. Where both operands land, half of the
warps take A and half B, each at their own pace; or all take B, and those who multiply take A apart in registers, where
`gemmkit.kernels.weave` finds that they can. A transform is applied on the way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.kernels.parts import column_of, put_elements, row_of, transform_within
from gemmkit.kernels.producer import load_a, load_b, load_tile, put_inside
from gemmkit.kernels.walk import BARRIERS, first_tile, holds, k_blocks, next_stage, tile_count, tile_place, tile_step
from gemmkit.kernels.work import Slot
from gemmkit.lang.control import join
from gemmkit.lang.registers import apply, generate, registers
from gemmkit.lang.values import convert, convert_all
from gemmkit.ptx.mbarrier import mbarrier_arrive, mbarrier_expect, mbarrier_wait
from gemmkit.ptx.memory import load_shared, shared
from gemmkit.ptx.special import lane_index, rolled, thread_index, udiv, uniform
from gemmkit.ptx.tma import tma_load
from gemmkit.ptx.warpgroup import fence_async, named_barrier
from gemmkit.ptx.words import unpack_words
from gemmkit.tiling import parallelise, translate

U32 = np.dtype(np.uint32)
TEAM = 4                               # named barriers 4 and 5: a team has read what it will write over


def produce_by_landing(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, rank: int,
                       shape: Any) -> None:
    """For every tile of D, for every block along K: start a copy some stages ahead, and split what has landed."""
    landed = shared(BARRIERS, spec.landed_offset)
    is_first = thread_index() == 0
    zero = thread_index() * 0
    tile, tiles, step = first_tile(spec), tile_count(spec, shape), tile_step(spec)
    ahead = first_place(spec, rank, shape)
    ahead_stage, ahead_phase = zero, zero + 1
    if is_first:
        for _ in range(spec.stages_ahead):
            ahead, ahead_stage, ahead_phase = start_copy(spec, map_a, map_b, landed, empty, ahead, ahead_stage, ahead_phase,
                                                         tiles, step, rank, shape)
    stage, phase = zero, zero
    while tile < tiles:
        m, n = tile_place(spec, tile, rank, shape)
        begin, count = k_blocks(spec, m, n, rank, shape)
        block = count * 0
        while block < count:
            k = begin + block * spec.block.size.K
            if holds(spec, m, n, k):
                if is_first:
                    ahead, ahead_stage, ahead_phase = start_copy(spec, map_a, map_b, landed, empty, ahead, ahead_stage,
                                                                 ahead_phase, tiles, step, rank, shape)
                mbarrier_wait(landed, stage, phase)
                split_stage(spec, stage, m, n, k, shape)
                fence_async()                          # tensor cores read through another way than threads write
                mbarrier_arrive(full, stage)
                stage, phase = next_stage(spec, Slot(stage, phase))
            block = rolled(block + 1)
        tile += step


# -- copies, ahead of everything --------------------------------------------------------------------------------------

def first_place(spec: Any, rank: int, shape: Any) -> tuple:
    """A place in the walk: a tile, its first row and column, where its blocks along K begin, how many, and which one."""
    tile = first_tile(spec)
    m, n = tile_place(spec, tile, rank, shape)
    begin, count = k_blocks(spec, m, n, rank, shape)
    return tile, m, n, begin, count, count * 0


def start_copy(spec: Any, map_a: Any, map_b: Any, landed: Any, empty: Any, place: tuple, stage: int, phase: int, tiles: int,
               step: int, rank: int, shape: Any) -> tuple:
    """Copy the next block to the next stage, if there is one left; returns the place and the stage after it."""
    tile, m, n, begin, count, block = place
    while tile < tiles and not is_filled(spec, m, n, begin, count, block):
        block += 1
        if block >= count:
            tile += step
            m, n = tile_place(spec, min(tile, tiles - 1), rank, shape)
            begin, count = k_blocks(spec, m, n, rank, shape)
            block = count * 0
    if tile < tiles:
        k = begin + block * spec.block.size.K
        mbarrier_wait(empty, stage, phase)
        mbarrier_expect(landed, stage, spec.a_bytes + spec.b_bytes)
        if spec.a_engine:
            load_a(spec, map_a, landed, stage, m, k, rank)
        else:
            land_a(spec, map_a, landed, stage, m, k, rank)
        if spec.b_engine:
            load_b(spec, map_b, landed, stage, n, k, rank)
        else:
            land_b(spec, map_b, landed, stage, n, k, rank)
        stage, phase = next_stage(spec, Slot(stage, phase))
        block += 1
    return (tile, m, n, begin, count, block), stage, phase


def is_filled(spec: Any, m: int, n: int, begin: int, count: int, block: int) -> bool:
    """Whether this block is one, and the condition does not leave it out."""
    return block < count and holds(spec, m, n, begin + block * spec.block.size.K)


def land_a(spec: Any, map_a: Any, landed: Any, stage: int, m: int, k: int, rank: int) -> None:
    pointer = shared(spec.a.shared.dtype, stage * spec.stage_bytes)
    if spec.a.in_panels:
        load_tile(spec, spec.a_copy, map_a, pointer, 0, landed, stage, m, k, rank)
    else:
        tma_load(map_a, (k, m) if spec.a.plane.axis == 1 else (m, k), pointer, 0, landed, stage)


def land_b(spec: Any, map_b: Any, landed: Any, stage: int, n: int, k: int, rank: int) -> None:
    pointer = shared(spec.b.shared.dtype, stage * spec.stage_bytes + spec.b_offset)
    if spec.b.in_panels:
        load_tile(spec, spec.b_copy, map_b, pointer, 0, landed, stage, n, k, rank)
    else:
        tma_load(map_b, (n, k) if spec.b.plane.axis == 1 else (k, n), pointer, 0, landed, stage)


# -- splitting --------------------------------------------------------------------------------------------------------

def split_stage(spec: Any, stage: int, m: int, n: int, k: int, shape: Any) -> None:
    if spec.splits_both:
        if uniform(udiv(thread_index(), 32)) < spec.landing_warps:
            split_a(spec, stage, m, n, k, 0, shape)
        else:
            split_b(spec, stage, m, n, k, 1, shape)
    elif spec.a_splits:
        split_a(spec, stage, m, n, k, 0, shape)
    else:
        split_b(spec, stage, m, n, k, 0, shape)


def split_a(spec: Any, stage: int, m: int, n: int, k: int, team: int, shape: Any) -> None:
    split_operand(spec.a, stage * spec.stage_bytes, spec.block.MK, spec.a_landed, m, k, shape.M, shape.K, spec, team)


def split_b(spec: Any, stage: int, m: int, n: int, k: int, team: int, shape: Any) -> None:
    split_operand(spec.b, stage * spec.stage_bytes + spec.b_offset, spec.block.KN, spec.b_landed, k, n, shape.K, shape.N,
                  spec, team)


def split_operand(operand: Any, place: int, block: Any, slots: int, at_i: int, at_j: int, rows: int, columns: int,
                  spec: Any, team: int) -> None:
    """A team reads all numbers of a tile, ``place`` bytes into shared memory, and writes their parts over them."""
    warp = uniform(udiv(thread_index(), 32)) % spec.landing_warps
    held = registers(operand.words, slots)
    warp_tiles = parallelise(block, operand.warp, warp, spec.landing_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            if operand.in_panels:
                held[i * len(thread_tiles) + j] = load_chunks(operand, place, block, thread_tiles[j])
            else:
                held[i * len(thread_tiles) + j] = load_landed(operand, place, block, thread_tiles[j])
    named_barrier(TEAM + team, 32 * spec.landing_warps)
    pointer = shared(operand.shared.dtype, place)
    # What is out of range is zeros, as the engine brings it; but a transform may make something of them.
    if operand.to_shared.is_identity or (at_i + block.size[0] <= rows and at_j + block.size[1] <= columns):
        put_inside(operand, held, pointer, block, at_i, at_j, spec, warp, spec.landing_warps)
    else:
        put_clipped(operand, held, pointer, block, at_i, at_j, rows, columns, spec, warp)


def load_landed(operand: Any, place: int, block: Any, tile: Any) -> tuple:
    """A thread's numbers, in words, of a tile that is as it was in global memory, without gaps."""
    axis = operand.plane.axis
    words = (tile.index[1 - axis] * block.size[axis] + tile.index[axis]) * operand.words.count // tile.count
    return load_shared(shared(U32, place), words, 0, operand.words.count)


def load_chunks(operand: Any, place: int, block: Any, tile: Any) -> tuple:
    """The same of a tile of B that lies in swizzled panels: a line along K of several chunks of 16 bytes."""
    return join(generate(operand.words.count // 4, load_chunk, operand, place, block, tile))


def load_chunk(n: int, operand: Any, place: int, block: Any, tile: Any) -> tuple:
    """Four numbers of 4 bytes."""
    chunk = tile.index[0] + 4 * n, tile.index[1]
    return load_shared(shared(U32, place), operand.numbers.position(chunk, operand.numbers.leading(block.size)), 0, 4)


def put_clipped(operand: Any, held: Any, pointer: Any, block: Any, at_i: int, at_j: int, rows: int, columns: int, spec: Any,
                warp: int) -> None:
    warp_tiles = parallelise(block, operand.warp, warp, spec.landing_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            tile = translate(thread_tiles[j], at_i, at_j)
            values = unpack_words(operand.layout.dtype, held[i * len(thread_tiles) + j])
            values = convert_all(operand.shared.dtype, transform_within(operand.to_shared, values, tile, rows, columns))
            put_elements(operand, pointer, thread_tiles[j], operand.shared.leading(block.size),
                         apply(clipped, values, operand, tile, rows, columns, spec))


def clipped(value: Any, n: int, operand: Any, tile: Any, rows: int, columns: int, spec: Any) -> Any:
    """The value, or nothing where it is out of range."""
    if row_of(tile, n) < rows and column_of(tile, n) < columns:
        return value
    return convert(operand.shared.dtype, spec.operator.identity)


__all__ = ["produce_by_landing"]
