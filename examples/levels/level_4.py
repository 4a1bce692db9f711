"""Level 4: a ring of four stages, filled by cp.async.

A warp computes as in level 3. A thread no longer holds what it copies: cp.async moves it
from global to shared memory, and the thread waits for a group of copies when it needs it.
One barrier a step ensures two things: the copies of all threads for this stage have come, and
all warps have left the stage that is filled next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from examples.levels.level_3 import (
    A_CHUNK,
    A_SWIZZLE,
    A_TILE,
    B_CHUNK,
    B_SWIZZLE,
    B_TILE,
    D_TILE,
    D_WARP,
    multiply_tiles,
    store_rows,
)
from gemmkit.ptx.copy_async import commit_copies, copy_async, offset_of, wait_copies
from gemmkit.ptx.memory import shared
from gemmkit.ptx.own_kernels import device, each, fill, launch, split, view
from gemmkit.ptx.special import barrier, block_x, block_y, thread_index
from gemmkit.tiling import linearise, parallelise, subdivide, translate

DTYPE = np.float16
STAGES, THREADS = 4, 256
PENDING = STAGES - 2  # groups of copies that may still be on their way
MULTIPLES = (128, 128, 32)
A_BYTES, STAGE_BYTES = 128 * 32 * 2, 2 * 128 * 32 * 2
SHARED_MEMORY = STAGES * STAGE_BYTES


@cuda.jit(launch_bounds=(THREADS, 2))
def kernel(d: Any, a: Any, b: Any) -> None:
    left, right, result = view(a, 16), view(b, 16), view(d, 16)
    m, n, steps = block_y() * 128, block_x() * 128, left.shape[1] // 32
    warp = subdivide(D_TILE, D_WARP, thread_index() // 32, 8)
    sums = split(fill(np.float32, 64, 0), 16)
    for step in range(STAGES - 1):
        start_copies(left, right, m, n, step, steps)
    for step in range(steps):
        wait_copies(PENDING)  # this thread's copies of this stage have come,
        barrier()  # and those of the others; all warps have read the stage before
        start_copies(left, right, m, n, step + STAGES - 1, steps)
        stage = step % STAGES * STAGE_BYTES
        b_shared = shared(np.float16, stage + A_BYTES)
        sums = multiply_tiles(sums, shared(np.float16, stage), b_shared, warp)
    each(store_rows, sums, result, translate(warp, M=m, N=n))


@device
def start_copies(left: Any, right: Any, m: int, n: int, step: int, steps: int) -> None:
    """Start this thread's copies of one stage, as a group; after the last step, no copy.

    A thread waits for all groups but the newest two, so every step must commit a group.
    """
    if step < steps:
        stage = step % STAGES * STAGE_BYTES
        a_shared = shared(np.float16, stage)
        a_chunks = parallelise(A_TILE, A_CHUNK, thread_index(), THREADS, "row")
        for i in range(len(a_chunks)):
            part = a_chunks[i]
            source = offset_of(left, translate(part, M=m, K=32 * step).index)
            at = A_SWIZZLE(linearise(part.index, (128, 32), "row"))
            copy_async(a_shared, at, 0, left, source, 8, True)
        b_shared = shared(np.float16, stage + A_BYTES)
        b_chunks = parallelise(B_TILE, B_CHUNK, thread_index(), THREADS, "row")
        for i in range(len(b_chunks)):
            part = b_chunks[i]
            source = offset_of(right, translate(part, K=32 * step, N=n).index)
            at = B_SWIZZLE(linearise(part.index, (32, 128), "row"))
            copy_async(b_shared, at, 0, right, source, 8, True)
    commit_copies()


def bind(d: Any, a: Any, b: Any) -> Callable[[], None]:
    """What computes D = A B, of multiples of 128 x 128 x 32."""
    m, n = d.shape
    return partial(launch, kernel, d, a, b, grid=(n // 128, m // 128), block=THREADS,
                   shared_memory=SHARED_MEMORY)
