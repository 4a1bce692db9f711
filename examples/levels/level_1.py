"""Level 1: a thread computes one element of D from global memory.

Neighbouring threads take neighbouring columns: a warp reads 128 bytes of B at once, and
all its threads read the same element of A.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from gemmkit.ptx.own_kernels import launch, view
from gemmkit.ptx.special import block_x, block_y, thread_index
from gemmkit.tiling import Tile, subdivide, translate

DTYPE = np.float32
BLOCK, ELEMENT = Tile(M=8, N=32), Tile(M=1, N=1)
THREADS = BLOCK.count
MULTIPLES = (1, 1, 1)  # of M, N and K: any


@cuda.jit
def kernel(d: Any, a: Any, b: Any) -> None:
    left, right, result = view(a), view(b), view(d)
    own = subdivide(BLOCK, ELEMENT, thread_index(), THREADS, "row")
    own = translate(own, M=block_y() * 8, N=block_x() * 32)
    row, column = own.index.M, own.index.N
    if row < result.shape[0] and column < result.shape[1]:
        total = np.float32(0)
        for k in range(left.shape[1]):
            total += left[row, k] * right[k, column]
        result[row, column] = total


def bind(d: Any, a: Any, b: Any) -> Callable[[], None]:
    """What computes D = A B."""
    m, n = d.shape
    grid = -(-n // 32), -(-m // 8)
    return partial(launch, kernel, d, a, b, grid=grid, block=THREADS)
