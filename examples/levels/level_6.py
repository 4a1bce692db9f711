"""Level 6: persistent, with a producer warp and two consumer warpgroups.

The producer asks TMA for stage after stage, of tile after tile. It waits only until the
consumers have left a stage. A consumer keeps 64 x 256 of D in 128 registers a thread, and
the producer's warpgroup releases registers for it. A block takes every ``grid_x()``-th
tile: the first stages of its next tile arrive while it stores the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from examples.levels.level_5 import A_BOX, A_BYTES, B_BOX, B_BYTES, F16, F32, start_products, start_stage, store_pair
from gemmkit.ptx.barriers import mbarrier_arrive, mbarrier_fence_init, mbarrier_init, mbarrier_wait
from gemmkit.ptx.memory import shared
from gemmkit.ptx.own_kernels import device, each, fill, launch, split, tensor_maps, view
from gemmkit.ptx.special import barrier, block_x, grid_x, thread_index, udiv, uniform
from gemmkit.ptx.tma import acquire_map
from gemmkit.ptx.wgmma import (
    WgmmaSpec,
    advance,
    claim_registers,
    instruction,
    matrix_descriptor,
    release_registers,
    wgmma_wait,
)
from gemmkit.tiling import Tile, translate

DTYPE = np.float16
SPEC = WgmmaSpec(256, F16, F16, F32, b_major="MN")
MULTIPLY, D_MAP = instruction(SPEC), SPEC.c
D_CONSUMER = Tile(M=64, N=256)
STAGES, THREADS, BLOCKS = 4, 384, 132  # a block for each multiprocessor of an H100
MULTIPLES = (128, 256, 64)
STAGE_BYTES = A_BYTES + 4 * B_BYTES
FULL, EMPTY, SHARED_MEMORY = (STAGES * (STAGE_BYTES + 8 * n) for n in range(3))
BAND = 8  # rows of tiles that blocks take together


@cuda.jit(launch_bounds=(THREADS, 1))
def kernel(d: Any, maps: Any, depth: int) -> None:
    result, table = view(d, 16), view(maps)
    thread, warpgroup = thread_index(), uniform(thread_index() // 128)
    if thread == 0:
        for stage in range(STAGES):
            mbarrier_init(shared(np.uint64, FULL), stage, 1)  # the producer
            mbarrier_init(shared(np.uint64, EMPTY), stage, 2)  # the two consumers
        mbarrier_fence_init()
        acquire_map(table, 0)
        acquire_map(table, 1)
    barrier()
    if warpgroup == 0:
        release_registers(40)
        if thread == 0:
            produce(table, result.shape, depth // 64)
    else:
        claim_registers(232)
        consume(result, warpgroup - 1, depth // 64)


@device
def produce(table: Any, shape: tuple, steps: int) -> None:
    full, empty = shared(np.uint64, FULL), shared(np.uint64, EMPTY)
    stage, phase = thread_index() * 0, thread_index() * 0
    tile, tiles = block_x(), udiv(shape[0], 128) * udiv(shape[1], 256)
    while tile < tiles:
        m, n = origin_of(tile, shape)
        for step in range(steps):
            mbarrier_wait(empty, stage, phase ^ 1)  # the first round passes at once
            start_stage(table, full, m, n, step, stage, 4)
            stage, phase = following(stage, phase)
        tile += grid_x()


@device
def consume(result: Any, consumer: int, steps: int) -> None:
    full, empty = shared(np.uint64, FULL), shared(np.uint64, EMPTY)
    left = matrix_descriptor(shared(np.float16, 0), consumer * 64 * 64, 16, 1024, 128)
    right = matrix_descriptor(shared(np.float16, A_BYTES), 0, B_BYTES, 1024, 128)
    stage, phase = thread_index() * 0, thread_index() * 0
    tile, tiles = block_x(), udiv(result.shape[0], 128) * udiv(result.shape[1], 256)
    while tile < tiles:
        m, n = origin_of(tile, result.shape)
        sums = fill(np.float32, 128, 0)
        if steps > 0:  # without it ptxas waits after each instruction
            before = stage
            for step in range(steps):
                mbarrier_wait(full, stage, phase)
                at = stage * STAGE_BYTES
                a_here, b_here = advance(left, at), advance(right, at)
                sums = start_products(MULTIPLY, sums, a_here, b_here)
                (sums,) = wgmma_wait(1, (sums,))  # the stage before has been read
                if step > 0 and thread_index() % 128 == 0:
                    mbarrier_arrive(empty, before)
                before = stage
                stage, phase = following(stage, phase)
            (sums,) = wgmma_wait(0, (sums,))
            if thread_index() % 128 == 0:
                mbarrier_arrive(empty, before)
        own = translate(D_CONSUMER, M=m + 64 * consumer, N=n)
        each(store_pair, split(sums, 2), result, D_MAP, own)
        tile += grid_x()


@device
def following(stage: int, phase: int) -> tuple:
    """The next stage of the ring; its phase flips with every round."""
    if stage == STAGES - 1:
        return stage * 0, phase ^ 1
    return stage + 1, phase


@device
def origin_of(tile: int, shape: tuple) -> tuple:
    """Where a tile begins. Blocks go down the columns of a band, and share it in L2."""
    band = udiv(tile, BAND * udiv(shape[1], 256))
    within = tile - band * BAND * udiv(shape[1], 256)
    rows = min(BAND, udiv(shape[0], 128) - band * BAND)
    column = udiv(within, rows)
    return (band * BAND + within - column * rows) * 128, column * 256


def bind(d: Any, a: Any, b: Any) -> Callable[[], None]:
    """What computes D = A B, of multiples of 128 x 256 x 64."""
    m, n = d.shape
    maps = tensor_maps((a, A_BOX, 128), (b, B_BOX, 128))
    return partial(launch, kernel, d, maps, a.shape[1],
                   grid=min(m // 128 * (n // 256), BLOCKS), block=THREADS,
                   shared_memory=SHARED_MEMORY)
