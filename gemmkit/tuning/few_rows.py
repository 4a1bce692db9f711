"""Products of a few rows on Hopper (decoding), by their transpose.

All time goes to B, which is read once. A tile of wgmma's has 64 rows at least: of A most would be padding, and few tiles
would be left to read B. So D^T = B^T A^T is computed: B's columns are the rows of tiles, 64 each, and A's rows their 16
columns or more. Blocks of a cluster share K until the multiprocessors are filled.

Microseconds on an H200, f16, B contiguous along K (nt), and cuBLAS's (2026-11-22):

| N x K | 1 row | 8 | 16 | 32 |
|---|---|---|---|---|
| 4096 x 4096 | 10.3, 12.3 | 10.4, 12.8 | 10.5, 12.6 | 10.7, 13.1 |
| 4096 x 14336 | 30.2, 30.3 | 30.0, 33.4 | 30.0, 31.4 | 30.3, 31.9 |
| 14336 x 4096 | 31.3, 29.7 | 31.1, 30.1 | 31.1, 30.0 | 31.2, 30.4 |

As it is, the product of 1 to 32 rows took 11.5 to 62 us there; of 48 or 64 rows it gains from this up to 4096 columns
(64 x 4096 x 4096: 11.2 us, 12.5; 64 x 8192 x 1024: 7.4, 6.5).
"""

from __future__ import annotations

from typing import Any

from gemmkit.layouts import ArrayLayout
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile
from gemmkit.tuning.operators import SIXTEEN

MOST_ROWS = 64                         # of so many, where tiles are too few to fill the multiprocessors; else of
FEW_ROWS = 32                          # these, whatever the tiles
LEAST = 1024                           # columns, and elements along K
ROWS, DEPTH = 64, 128                  # of a tile: B's columns, and along K
SLICE = 8                              # columns of D^T that a block of a cluster finishes, at least
RING = 170 * 1024                      # bytes of stages: what is on its way hides the latency of memory


def fields(infos: dict[str, ArrayInfo | None], layouts: dict[str, ArrayLayout | None], sizes: tuple[int, int, int],
           device: DeviceInfo) -> dict[str, Any] | None:
    """The fields of a configuration of the transposed product of plain operands of one dtype that suit TMA; None where it is
    not the one to compute (`gemmkit.tuning.swapped`)."""
    M, N, K = sizes
    a = infos["a"]
    assert a is not None
    if a.dtype not in SIXTEEN or not 0 < M <= MOST_ROWS or N < LEAST or K < LEAST:
        return None
    d = layouts["d"]
    if d is not None and d.vector_axis != 1:           # of rows of D^T a block would finish 16 columns or more
        return None
    tiles = -(-N // ROWS)
    if M > FEW_ROWS and 2 * tiles > device.sm_count:
        return None
    splits = next((n for n in (8, 4) if tiles * n <= device.sm_count), 2)
    columns = max(-(-M // SLICE), splits)              # in slices; a power of two, so that all blocks finish as many
    columns = SLICE * (1 << (columns - 1).bit_length())
    stage = (ROWS + columns) * DEPTH * a.dtype.itemsize
    return dict(kernel="warp_specialised", operator=WGMMAOp(columns, dtype=a.dtype), splits=splits, schedule="cooperative",
                block_shape=Tile(M=ROWS, N=columns, K=DEPTH), warps_per_block=4, stages=RING // stage)


__all__ = ["MOST_ROWS", "fields"]
