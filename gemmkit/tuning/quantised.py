"""Products with a B of packed integers, by the kernel that dequantises in registers.

All time goes to B: 4096 x 4096 of 4 bits are 8.4 MB. A block with all of K needs no sums of others: 16 warps share the K of
32 columns, which are 128 blocks. Where such tiles are fewer than half the multiprocessors, two blocks of a cluster share K.
(Of clusters of four, 32 do not fit at once: M = 1 took 16.5 us by them.) Of more rows a warp has 64 columns: each of its
loads of A serves twice as many products.

Microseconds of 4096 x 4096 on an H200 in CUDA graphs (2026-11-24, 16 copies of B in turns, groups of 128; M = 1 with 8 warps
8.9), PyTorch's F.linear in float16, and the layout's own dequantisation in the default kernel:

| M | 4 bits | float16 | ratio | default kernel |
|---|---|---|---|---|
| 1 | 5.3 | 13.0 | 2.47 | |
| 16 | 6.8 | 13.3 | 1.96 | |
| 64 | 12.6 | 11.4 | 0.91 | |
| 256 | 33.1 | 17.0 | 0.51 | 238 |
"""

from __future__ import annotations

import math
from typing import Any

from gemmkit.kernels.quantised.rules import refusal
from gemmkit.layouts import ArrayLayout, GroupQuantised, RowMajor
from gemmkit.operators import Operator
from gemmkit.operators.quantised_mma import BF16, F16, QuantisedMMAOp
from gemmkit.runtime.arrays import ArrayInfo, alignment
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile
from gemmkit.tuning.mappings import MAPPING_FIELDS, is_untouched

__all__ = ["choice"]

ROWS, COLUMNS = 8, 32                  # of an operation
FEW, SOME = 16, 64                     # rows of A: mappings differ
VECTOR = 16                            # bytes at whose multiples rows must begin for loads of that many


def choice(a: ArrayLayout, b: ArrayLayout, infos: dict[str, ArrayInfo | None], fields: dict[str, Any], sizes: tuple[int,
           int, int], device: DeviceInfo, products: int) -> tuple[Operator, dict[str, Any]] | None:
    """The operator and the fields of the mapping; None for what stays with the layout's own dequantisation."""
    M, N, K = sizes
    if not isinstance(b, GroupQuantised) or type(a) is not RowMajor or a.dtype not in (F16, BF16) or b.dtype != a.dtype:
        return None
    if device.arch < (9, 0) or products != 1 or M == 0 or not _is_alone(infos, fields):
        return None
    part = _part(b, M)
    if K == 0 or refusal(N, K, part) is not None:
        return None
    if any(info is None or alignment(info) % VECTOR for info in (infos["a"], infos["b"])):
        return None
    return QuantisedMMAOp(b.bits, a.dtype), _mapping(M, N, K, b.bits, part, device)


def _is_alone(infos: dict[str, ArrayInfo | None], fields: dict[str, Any]) -> bool:
    """Whether nothing is asked for that this kernel has not."""
    return (infos["c"] is None and not {"operator", "condition", "global_c_layout", *MAPPING_FIELDS} & set(fields)
            and is_untouched("a", fields) and is_untouched("b", fields))


def _part(b: GroupQuantised, M: int) -> int:
    """A warp's part of a k-tile: a group of rows with one scale, or as much of it as registers hold."""
    k = QuantisedMMAOp(b.bits).K
    most = 128 if M <= ROWS else 2 * k if M <= FEW else 64 if M <= SOME or b.bits == 2 else k
    return max(math.gcd(b.group, most), k)


def _mapping(M: int, N: int, K: int, bits: int, part: int, device: DeviceInfo) -> dict[str, Any]:
    """Tiles, warps, and blocks that share K. (With 64 rows 2 bits, whose operations are longer, spill.)"""
    if M <= FEW:
        rows, columns, warp, warps_k = ROWS if M <= ROWS else FEW, COLUMNS, COLUMNS, 16
    elif M <= SOME or bits == 2:
        rows, columns, warp, warps_k = 4 * ROWS, 2 * COLUMNS, 2 * COLUMNS, 8
    else:
        rows, columns, warp, warps_k = 8 * ROWS, 4 * COLUMNS, 2 * COLUMNS, 4
    while warps_k > 1 and warps_k * part > K:
        warps_k //= 2
    tiles = -(-M // rows) * -(-N // columns)
    parts = K // (part * warps_k)
    splits = 2 if 2 * tiles <= device.sm_count and parts >= 2 else 1
    return dict(kernel="quantised", block_shape=Tile(M=rows, N=columns, K=part * warps_k),
                compute_warp=Tile(M=rows, N=warp, K=part), warps_per_block=columns // warp * warps_k, stages=1,
                splits=splits)
