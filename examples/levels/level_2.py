"""Level 2: tiles in shared memory, 8 x 8 elements of D a thread.

A block reads an element of A from global memory once for 128 columns of D. A thread reads
it from shared memory once for 8. The tile of A is transposed on its way: the eight rows of
a thread lie side by side, and it reads 4 numbers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from gemmkit.ptx.arithmetic import outer_fma
from gemmkit.ptx.memory import load_global, load_shared, shared, store_global, store_shared
from gemmkit.ptx.own_kernels import deal, device, each, fill, join, launch, split, view
from gemmkit.ptx.special import barrier, block_x, block_y, thread_index
from gemmkit.tiling import Tile, linearise, subdivide, translate

DTYPE = np.float32
A_TILE, A_PART = Tile(M=128, K=8), Tile(M=1, K=4)  # a block's tile, a thread's part
B_TILE, B_PART = Tile(K=8, N=128), Tile(K=1, N=4)
D_TILE, D_PART = Tile(M=64, N=64), Tile(M=4, N=4)  # a quarter of D, a thread's part
THREADS = 256
MULTIPLES = (128, 128, 8)
SHARED_MEMORY = 2 * 128 * 8 * 4


@cuda.jit(launch_bounds=THREADS)
def kernel(d: Any, a: Any, b: Any) -> None:
    left, right, result = view(a, 16), view(b, 16), view(d, 16)
    a_shared, b_shared = shared(np.float32, 0), shared(np.float32, 128 * 8 * 4)
    m, n = block_y() * 128, block_x() * 128
    thread = thread_index()
    a_part = subdivide(A_TILE, A_PART, thread, THREADS)  # a warp: 32 rows, 32 banks
    b_part = subdivide(B_TILE, B_PART, thread, THREADS, "row")  # a warp: a row of B
    own = subdivide(D_TILE, D_PART, thread, THREADS, "row")
    sums = fill(np.float32, 64, 0)
    for k in range(0, left.shape[1], 8):
        a_here, b_here = translate(a_part, M=m, K=k), translate(b_part, K=k, N=n)
        from_a = load_global(left, 1, a_here.index, (0, 0), 4)
        from_b = load_global(right, 1, b_here.index, (0, 0), 4)
        barrier()  # all threads have read the tiles before
        each(store_transposed, from_a, a_shared, a_part)
        store_shared(b_shared, linearise(b_part.index, (8, 128), "row"), 0, from_b)
        barrier()  # all threads have written these tiles
        for i in range(8):
            rows = eight_numbers(a_shared, own.index.M, 128 * i)
            columns = eight_numbers(b_shared, own.index.N, 128 * i)
            sums = outer_fma(sums, rows, columns, 1)
    each(store_row, deal(sums, 8), result, translate(own, M=m, N=n))


@device
def eight_numbers(pointer: Any, at: int, line: int) -> tuple:
    """Four numbers of a line of 128, and the four that lie 64 further on."""
    low = load_shared(pointer, at, line, 4)
    return join((low, load_shared(pointer, at, line + 64, 4)))


@device
def store_transposed(value: Any, i: int, a_shared: Any, part: Any) -> None:
    store_shared(a_shared, (part.index.K + i) * 128 + part.index.M, 0, (value,))


@device
def store_row(row: tuple, i: int, result: Any, own: Any) -> None:
    """Row i of a thread's 8 x 8: rows 4 to 7 lie 64 rows below the first."""
    each(store_half, split(row, 4), result, translate(own, M=i % 4 + i // 4 * 64))


@device
def store_half(values: tuple, i: int, result: Any, own: Any) -> None:
    store_global(result, 1, own.index, (0, 64 * i), values)


def bind(d: Any, a: Any, b: Any) -> Callable[[], None]:
    """What computes D = A B, of multiples of 128 x 128 x 8."""
    m, n = d.shape
    return partial(launch, kernel, d, a, b, grid=(n // 128, m // 128), block=THREADS,
                   shared_memory=SHARED_MEMORY)
