"""Level 3: tensor cores by mma, fragments by ldmatrix, swizzled tiles.

``ldmatrix`` reads eight rows of 16 bytes at once. Rows that lie 64 or 256 bytes apart
share banks. A swizzle moves the 16-byte chunks of a row to places that depend on the row,
and eight rows then use all 32 banks once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from gemmkit.ptx.memory import load_global, shared, store_global, store_shared
from gemmkit.ptx.mma import C_16X8, MMA, fragment_coordinate, ldmatrix
from gemmkit.ptx.own_kernels import apply, device, each, fill, generate, join, launch, split, view
from gemmkit.ptx.special import barrier, block_x, block_y, lane_index, thread_index
from gemmkit.shapes import Swizzle
from gemmkit.tiling import Tile, linearise, parallelise, subdivide, translate

DTYPE = np.float16
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
A_TILE, A_CHUNK = Tile(M=128, K=32), Tile(M=1, K=8)
B_TILE, B_CHUNK = Tile(K=32, N=128), Tile(K=1, N=8)
A_SWIZZLE, B_SWIZZLE = Swizzle((3, 24)), Swizzle((4, 56))  # of 64-byte, 256-byte rows
D_TILE, D_WARP = Tile(M=128, N=128), Tile(M=64, N=32)
MULTIPLY = MMA[16, 16, F16, F16, F32]
THREADS = 256
MULTIPLES = (128, 128, 32)
B_OFFSET = 128 * 32 * 2  # bytes: the tile of B follows that of A
SHARED_MEMORY = 2 * B_OFFSET


@cuda.jit(launch_bounds=(THREADS, 2))
def kernel(d: Any, a: Any, b: Any) -> None:
    left, right, result = view(a, 16), view(b, 16), view(d, 16)
    m, n = block_y() * 128, block_x() * 128
    thread = thread_index()
    a_shared, b_shared = shared(np.float16, 0), shared(np.float16, B_OFFSET)
    a_chunks = parallelise(A_TILE, A_CHUNK, thread, THREADS, "row")
    b_chunks = parallelise(B_TILE, B_CHUNK, thread, THREADS, "row")
    warp = subdivide(D_TILE, D_WARP, thread // 32, 8)
    sums = split(fill(np.float32, 64, 0), 16)
    for k in range(0, left.shape[1], 32):
        barrier()  # all warps have read the tiles before
        for i in range(len(a_chunks)):
            part = a_chunks[i]
            values = load_global(left, 1, translate(part, M=m, K=k).index, (0, 0), 8)
            at = linearise(part.index, (128, 32), "row")
            store_shared(a_shared, A_SWIZZLE(at), 0, values)
        for i in range(len(b_chunks)):
            part = b_chunks[i]
            values = load_global(right, 1, translate(part, K=k, N=n).index, (0, 0), 8)
            at = linearise(part.index, (32, 128), "row")
            store_shared(b_shared, B_SWIZZLE(at), 0, values)
        barrier()  # all threads have written these tiles
        sums = multiply_tiles(sums, a_shared, b_shared, warp)
    each(store_rows, sums, result, translate(warp, M=m, N=n))


@device
def multiply_tiles(sums: tuple, a_shared: Any, b_shared: Any, warp: Any) -> tuple:
    """Add the products of two tiles of 32 along K to a warp's 64 x 32 of D."""
    for k in (0, 16):
        columns = join(generate(2, fragments_of_b, b_shared, warp.index.N, k))
        sums = apply(multiply_row, sums, columns, a_shared, warp.index.M, k)
    return sums


@device
def fragments_of_b(i: int, b_shared: Any, column: int, k: int) -> tuple:
    """16 columns, as two instructions take them; ldmatrix transposes the rows of B."""
    lane = lane_index()
    at = (k + lane % 16) * 128 + column + 16 * i + lane // 16 * 8
    return ldmatrix(b_shared, B_SWIZZLE(at), 0, 4, True)


@device
def multiply_row(
    row: tuple, i: int, columns: tuple, a_shared: Any, first: int, k: int
) -> tuple:
    lane = lane_index()
    at = (first + 16 * i + lane % 16) * 32 + k + lane // 16 * 8
    return MULTIPLY(ldmatrix(a_shared, A_SWIZZLE(at), 0, 4, False), columns, row)


@device
def store_rows(row: tuple, i: int, result: Any, warp: Any) -> None:
    each(store_pair, split(row, 2), result, translate(warp, M=16 * i))


@device
def store_pair(pair: tuple, i: int, result: Any, warp: Any) -> None:
    """Two neighbours in a row; a fragment of 8 columns has two, 8 rows apart."""
    row = fragment_coordinate(C_16X8, lane_index(), 2 * (i % 2), 0)
    column = fragment_coordinate(C_16X8, lane_index(), 2 * (i % 2), 1)
    at = translate(warp, M=row, N=column + i // 2 * 8)
    store_global(result, 1, at.index, (0, 0), pair)


def bind(d: Any, a: Any, b: Any) -> Callable[[], None]:
    """What computes D = A B, of multiples of 128 x 128 x 32."""
    m, n = d.shape
    return partial(launch, kernel, d, a, b, grid=(n // 128, m // 128), block=THREADS,
                   shared_memory=SHARED_MEMORY)
