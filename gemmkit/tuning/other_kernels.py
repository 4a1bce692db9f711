"""Products on Hopper that other kernels than its own compute: rows that TMA cannot take, and packed integers."""

from __future__ import annotations

import math
from typing import Any

from gemmkit.kernels.quantised.rules import refusal
from gemmkit.layouts import ArrayLayout, GroupQuantised, Plain, RowMajor
from gemmkit.operators.quantised_mma import BF16, F16, QuantisedMMAOp
from gemmkit.runtime.arrays import alignment
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tiling import Tile
from gemmkit.tuning.candidates import Candidate
from gemmkit.tuning.hopper import ELEMENTS, MAPPING_FIELDS, VECTORS, WORDS, Copies, is_untouched
from gemmkit.tuning.model import CLOCK, Asked, Infos, Proposal
from gemmkit.tuning.multistage import copied, of_half
from gemmkit.tuning.operators import SIXTEEN

# -- rows that TMA cannot take ----------------------------------------------------------------------------------------
#
# Products of 16-bit floats on Hopper whose rows TMA cannot take, by other kernels than Hopper's.
#
# There the producer's threads load such rows, and a k-tile takes them longer than the tensor cores. Where there is one
# k-tile, nothing is hidden behind anything, and the kernel that does least besides is the fastest. Where rows begin at
# multiples of 4 bytes, cp.async copies so many at a time, and several blocks a multiprocessor hide what one cannot: the
# multistage kernel is the fastest by the mapping that `copied` finds, unless D is so large, and K so short, that TMA's
# stores of its rows are most of the work: Hopper's producer is hidden behind these. Where rows begin anywhere, the models of
# both kernels are compared. Half of what Hopper's kernel multiplies is unused where D is half as wide as its tile: smaller
# tiles stream K, where they are fewer than multiprocessors. Microseconds on an H200 (2026-11-23 and 24, f16; Hopper's
# kernel, this choice, cuBLAS):
#
# | product | | | |
# |---|---|---|---|
# | 14x1447x55 tt | 3.9 | 2.3 singlestage | 2.4 |
# | 384x34x17 nt | 2.9 | 2.4 | 2.5 |
# | 192x218x29 nt | 3.4 | 2.5 | 2.6 |
# | 648x5649x11 nn | 14.5 | 10.8 | 8.6 |
# | 500x500x500 nn | 12.4 | 5.7 multistage | 8.0 |
# | 480x1344x356 nt | 11.5 | 8.5 | 9.6 |
# | 192x18x256 nn | 4.0 | 2.5 | 3.4 |
# | 32x216x82 nt | 3.0 | 2.5 | 2.7 |
# | 160x384x1542 nt | 8.3 | 6.9 in 4 shares | 10.8 |
# | 11898x683x514 tt | 102.7 | 81.0 streamed | 96.6 |
# | 320x11264x1258 nt | 92.4 | 54.6 | 51.4 |
# | 98x11480x7441 tn | 240.7 | 79.1 streamed | 123.8 |
# | 270x8x3584 tt | 10.3 | 5.8 in 6 shares | 7.0 |
# | 3001x201x6001 nt | 328.1 | 126.6 streamed | 91.9 |
# | 36x256x389 nn | 5.6 | 4.5 | 5.3 |
# | 4299x64x3328 tn | 35.9 | 23.7 streamed | 31.6 |
# | 2964x64x3167 nt | 34.6 | 25.7 | 23.5 |
#
# 1824x4353x1 (20.5, 21.6), 64x51x289 (5.7, 5.9), 333x777x1555 (20.6, 21.1), 3840x6088x78 (39.2, 44.8) and 384x6496x742
# (20.8, 22.3) are Hopper's kernel's.

SHORT = Candidate("singlestage", (32, 32, 64), (16, 16), blocks_per_sm=4)
MOST_BLOCKS = 32                       # of that a multiprocessor: larger tiles store more of D at a time
LEAST = 32                             # along K: half of a k-tile
WIDE = 2**21                           # elements of a D that Hopper's kernel stores by TMA:
HIDDEN = 128, 768                      # the longest K of which is hidden behind that: with both operands copied, with one
WIDEST = 2**24                         # of so many any K, where rows begin at 4 bytes
WORTH = 0.85                           # of Hopper's modelled time, where rows begin anywhere
SIDE = 64                              # of a tile of the multistage kernel's
STREAMED = Candidate("multistage", (SIDE, SIDE, 64), (32, 32), stages=3, blocks_per_sm=4, splits="stream")
LONGEST = 2048                         # along K: above it few tiles are streamed,
FEWEST = 32                            # if they keep the multiprocessors busy


def propose_gathered(asked: Asked, device: DeviceInfo) -> Proposal | None:
    """The operator (None: the default one) and the fields of the mapping; None for what stays with Hopper's kernel."""
    (a, b), infos, fields, (M, N, K) = asked.operands, asked.infos, asked.fields, asked.sizes
    if device.arch[0] != 9 or asked.products != 1 or a.dtype != b.dtype or a.dtype not in SIXTEEN or 0 in asked.sizes:
        return None
    if fields.get("operator") is not None or set(fields) & MAPPING_FIELDS or not _are_plain(a, b, fields):
        return None
    of_a, of_b = infos["a"], infos["b"]
    assert of_a is not None and of_b is not None and isinstance(a, Plain) and isinstance(b, Plain)
    by_tma = [why_not(of, layout.axis) is None for of, layout in ((of_a, a), (of_b, b))]
    if all(by_tma):
        return None
    copies = Copies.of(a, b, of_a, of_b, infos["out"], N)
    worst = max(copies.kinds)
    is_stored = copies.of_d == VECTORS and M * N >= WIDE
    is_hidden = is_stored and (K <= HIDDEN[any(by_tma)] or (M * N >= WIDEST and worst == WORDS))
    if K >= LEAST and worst != ELEMENTS and not is_hidden:
        return of_half(copied(copies), a, b, asked.sizes, device)
    tiles = -(-M // SIDE) * -(-N // SIDE)
    blocks = -(-M // SHORT.block[0]) * -(-N // SHORT.block[1])
    if K <= SHORT.block[2] and blocks <= MOST_BLOCKS * device.sm_count:
        return SHORT.proposal(asked, device)
    if min(M, N) <= SIDE and FEWEST <= tiles <= device.sm_count and K > LONGEST:
        return STREAMED.proposal(asked, device)
    if worst == ELEMENTS and K > SHORT.block[2]:
        found = copies.hoppers(asked.sizes, device, 1)
        cycles = min(one.cycles(asked.sizes, device, a.dtype.itemsize, None, 1) for one in found)
        return of_half(copied(copies), a, b, asked.sizes, device, WORTH * cycles / CLOCK)
    return None


def _are_plain(a: ArrayLayout, b: ArrayLayout, fields: dict[str, Any]) -> bool:
    return all(isinstance(layout, Plain) and layout.is_plain and is_untouched(name, fields)
               for name, layout in (("a", a), ("b", b)))


# -- packed integers --------------------------------------------------------------------------------------------------
#
# Products with a B of packed integers, by the kernel that dequantises in registers.
#
# All time goes to B: 4096 x 4096 of 4 bits are 8.4 MB. A block with all of K needs no sums of others: 16 warps share the K
# of 32 columns, which are 128 blocks. Where such tiles are fewer than half the multiprocessors, two blocks of a cluster
# share K. (Of clusters of four, 32 do not fit at once: M = 1 took 16.5 us by them.) Of more rows a warp has 64 columns: each
# of its loads of A serves twice as many products.
#
# Microseconds of 4096 x 4096 on an H200 in CUDA graphs (2026-11-24, 16 copies of B in turns, groups of 128; M = 1 with 8
# warps 8.9), PyTorch's F.linear in float16, and the layout's own dequantisation in the default kernel:
#
# | M | 4 bits | float16 | ratio | default kernel |
# |---|---|---|---|---|
# | 1 | 5.3 | 13.0 | 2.47 | |
# | 16 | 6.8 | 13.3 | 1.96 | |
# | 64 | 12.6 | 11.4 | 0.91 | |
# | 256 | 33.1 | 17.0 | 0.51 | 238 |

ROWS, COLUMNS = 8, 32                  # of an operation
FEW, SOME = 16, 64                     # rows of A: mappings differ
VECTOR = 16                            # bytes at whose multiples rows must begin for loads of that many


def propose_quantised(asked: Asked, device: DeviceInfo) -> Proposal | None:
    """The operator and the fields of the mapping; None for what stays with the layout's own dequantisation."""
    (a, b), infos, fields, (M, N, K) = asked.operands, asked.infos, asked.fields, asked.sizes
    if not isinstance(b, GroupQuantised) or type(a) is not RowMajor or a.dtype not in (F16, BF16) or b.dtype != a.dtype:
        return None
    if device.arch < (9, 0) or asked.products != 1 or M == 0 or not _is_alone(infos, fields):
        return None
    part = _part(b, M)
    if K == 0 or refusal(N, K, part) is not None:
        return None
    if any(info is None or alignment(info) % VECTOR for info in (infos["a"], infos["b"])):
        return None
    return QuantisedMMAOp(b.bits, a.dtype), _quantised_mapping(M, N, K, b.bits, part, device)


def _is_alone(infos: Infos, fields: dict[str, Any]) -> bool:
    """Whether nothing is asked for that this kernel has not."""
    return (infos["c"] is None and not {"operator", "condition", "global_c_layout", *MAPPING_FIELDS} & set(fields)
            and is_untouched("a", fields) and is_untouched("b", fields))


def _part(b: GroupQuantised, M: int) -> int:
    """A warp's part of a k-tile: a group of rows with one scale, or as much of it as registers hold."""
    k = QuantisedMMAOp(b.bits).K
    most = 128 if M <= ROWS else 2 * k if M <= FEW else 64 if M <= SOME or b.bits == 2 else k
    return max(math.gcd(b.group, most), k)


def _quantised_mapping(M: int, N: int, K: int, bits: int, part: int, device: DeviceInfo) -> dict[str, Any]:
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
