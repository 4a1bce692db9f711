"""Products of a few rows with a B of packed integers, by the kernel that dequantises in registers.

All time goes to B: 4096 x 4096 of 4 bits are 8.4 MB. A multiprocessor needs 64 KiB of loads on their way, and a block with
all of K needs no sums of others: 8 warps share the K of 32 columns. Where such tiles are fewer than multiprocessors, blocks
of a cluster share K as well.
"""

from __future__ import annotations

import math
from typing import Any

from gemmkit.kernels.quantised.rules import refusal
from gemmkit.layouts import GroupQuantised, Layout, RowMajor
from gemmkit.operators import Operator
from gemmkit.operators.quantised_mma import F16, QuantisedMMAOp
from gemmkit.runtime.arrays import ArrayInfo, alignment
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile
from gemmkit.tuning.mappings import MAPPING_FIELDS, is_untouched

__all__ = ["choice"]

ROWS, COLUMNS = 8, 32                  # of an operation
FEW = 16                               # rows, of which a warp has all and a group of B's rows at a time
MOST_ROWS = 256                        # of A
PART = 128                             # along K that a warp has at a time, of so few rows
VECTOR = 16                            # bytes at whose multiples rows must begin for loads of that many


def choice(a: Layout, b: Layout, infos: dict[str, ArrayInfo | None], fields: dict[str, Any], sizes: tuple[int, int, int],
           device: DeviceInfo, products: int) -> tuple[Operator, dict[str, Any]] | None:
    """The operator and the fields of the mapping; None for what stays with the layout's own dequantisation."""
    M, N, K = sizes
    if not isinstance(b, GroupQuantised) or type(a) is not RowMajor or a.dtype != F16 or b.dtype != F16:
        return None
    if device.arch < (9, 0) or products != 1 or not 0 < M <= MOST_ROWS or not _is_alone(infos, fields):
        return None
    part = _part(b, M)
    if K == 0 or refusal(N, K, part) is not None:
        return None
    if any(info is None or alignment(info) % VECTOR for info in (infos["a"], infos["b"])):
        return None
    return QuantisedMMAOp(b.bits), _mapping(M, N, K, part, device)


def _is_alone(infos: dict[str, ArrayInfo | None], fields: dict[str, Any]) -> bool:
    """Whether nothing is asked for that this kernel has not."""
    return (infos["c"] is None and not {"operator", "condition", "global_c_layout", *MAPPING_FIELDS} & set(fields)
            and is_untouched("a", fields) and is_untouched("b", fields))


def _part(b: GroupQuantised, M: int) -> int:
    """A warp's part of a k-tile: a group of rows with one scale, or as much of it as registers hold."""
    k = QuantisedMMAOp(b.bits).K
    most = PART if M <= FEW else 2 * k
    return max(math.gcd(b.group, most), k)


def _mapping(M: int, N: int, K: int, part: int, device: DeviceInfo) -> dict[str, Any]:
    """Tiles, warps, and blocks that share K."""
    if M <= FEW:
        rows, columns, warps_k, stages = ROWS if M <= ROWS else FEW, COLUMNS, 8, 1
    else:
        rows, columns, warps_k, stages = 4 * ROWS, 4 * COLUMNS, 4, 1
    while warps_k > 1 and warps_k * part > K:
        warps_k //= 2
    tiles = -(-M // rows) * -(-N // columns)
    parts = K // (part * warps_k)
    splits = max([n for n in (1, 2, 4, 8) if tiles * n <= device.sm_count and n <= parts], default=1)
    return dict(kernel="quantised", block_shape=Tile(M=rows, N=columns, K=part * warps_k),
                compute_warp=Tile(M=rows, N=COLUMNS, K=part), warps_per_block=columns // COLUMNS * warps_k, stages=stages,
                splits=splits)
