"""Level 5: TMA and wgmma, with an mbarrier for each stage.

One thread asks TMA for a box of A and two of B, and goes on. An mbarrier counts the bytes
that arrive, and all threads wait for its phase. TMA swizzles rows of 128 bytes on their
way, and a matrix descriptor tells ``wgmma`` how they lie. No thread computes the address
of an element of A or B.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from gemmkit.ptx.barriers import mbarrier_expect, mbarrier_fence_init, mbarrier_init, mbarrier_wait
from gemmkit.ptx.memory import shared, store_global
from gemmkit.ptx.mma import fragment_coordinate
from gemmkit.ptx.own_kernels import device, each, fill, launch, split, tensor_maps, view
from gemmkit.ptx.special import barrier, block_x, block_y, thread_index, udiv
from gemmkit.ptx.tma import acquire_map, map_at, tma_load
from gemmkit.ptx.wgmma import WgmmaSpec, advance, instruction, matrix_descriptor, wgmma_commit, wgmma_fence, wgmma_wait
from gemmkit.tiling import Tile, translate

DTYPE = np.float16
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
SPEC = WgmmaSpec(128, F16, F16, F32, b_major="MN")  # 64 x 128 of D, 16 along K
MULTIPLY, D_MAP = instruction(SPEC), SPEC.c  # and which thread holds which element
D_WARPGROUP = Tile(M=64, N=128)
STAGES, THREADS = 3, 256
MULTIPLES = (128, 128, 64)
A_BOX, B_BOX = (64, 128), (64, 64)  # the contiguous axis first: rows of 128 bytes
A_BYTES, B_BYTES = 128 * 64 * 2, 64 * 64 * 2
STAGE_BYTES = A_BYTES + 2 * B_BYTES
BARRIERS = STAGES * STAGE_BYTES  # the byte where they begin
SHARED_MEMORY = BARRIERS + STAGES * 8


@cuda.jit(launch_bounds=(THREADS, 2))
def kernel(d: Any, maps: Any, depth: int) -> None:
    result, table = view(d, 16), view(maps)
    m, n, steps = block_y() * 128, block_x() * 128, depth // 64
    thread, warpgroup = thread_index(), thread_index() // 128
    full = shared(np.uint64, BARRIERS)
    if thread == 0:
        for stage in range(STAGES):
            mbarrier_init(full, stage, 1)
        mbarrier_fence_init()
        acquire_map(table, 0)
        acquire_map(table, 1)
    barrier()
    if thread == 0:
        for step in range(min(STAGES, steps)):
            start_stage(table, full, m, n, step, step, 2)
    a_shared, b_shared = shared(np.float16, 0), shared(np.float16, A_BYTES)
    left = matrix_descriptor(a_shared, warpgroup * 64 * 64, 16, 1024, 128)
    right = matrix_descriptor(b_shared, 0, B_BYTES, 1024, 128)
    sums = fill(np.float32, 64, 0)
    for step in range(steps):
        stage = step % STAGES
        mbarrier_wait(full, stage, step // STAGES % 2)  # TMA has brought the stage
        at = stage * STAGE_BYTES
        sums = start_products(MULTIPLY, sums, advance(left, at), advance(right, at))
        (sums,) = wgmma_wait(0, (sums,))
        barrier()  # both warpgroups have read the stage
        if thread == 0 and step + STAGES < steps:
            start_stage(table, full, m, n, step + STAGES, stage, 2)
    own = translate(D_WARPGROUP, M=m + 64 * warpgroup, N=n)
    each(store_pair, split(sums, 2), result, D_MAP, own)


@device
def start_stage(
    table: Any, full: Any, m: int, n: int, step: int, stage: int, boxes: int
) -> None:
    """Ask TMA for the tiles of one step: a box of A, and boxes of 64 columns of B."""
    pointer, nbytes = shared(np.float16, 0), A_BYTES + boxes * B_BYTES
    at = udiv(stage * nbytes, 2)  # in elements
    mbarrier_expect(full, stage, nbytes)
    tma_load(map_at(table, 0), (64 * step, m), pointer, at, full, stage)
    for i in range(boxes):
        here = at + A_BYTES // 2 + B_BYTES // 2 * i
        tma_load(map_at(table, 1), (n + 64 * i, 64 * step), pointer, here, full, stage)


@device
def start_products(multiply: Any, sums: tuple, left: int, right: int) -> tuple:
    """Four instructions: 16 along K are 32 bytes of a row of A, or 16 rows of B."""
    wgmma_fence()
    for i in (0, 1, 2, 3):
        sums = multiply(sums, advance(left, 32 * i), advance(right, 2048 * i), 1)
    wgmma_commit()
    return sums


@device
def store_pair(pair: tuple, i: int, result: Any, d_map: Any, own: Any) -> None:
    """Two neighbours in a row: a thread has such a pair every 8 columns of two rows."""
    row = fragment_coordinate(d_map, thread_index() % 128, 2 * i, 0)
    column = fragment_coordinate(d_map, thread_index() % 128, 2 * i, 1)
    store_global(result, 1, translate(own, M=row, N=column).index, (0, 0), pair)


def bind(d: Any, a: Any, b: Any) -> Callable[[], None]:
    """What computes D = A B, of multiples of 128 x 128 x 64."""
    m, n = d.shape
    maps = tensor_maps((a, A_BOX, 128), (b, B_BOX, 128))
    return partial(launch, kernel, d, maps, a.shape[1], grid=(n // 128, m // 128),
                   block=THREADS, shared_memory=SHARED_MEMORY)
