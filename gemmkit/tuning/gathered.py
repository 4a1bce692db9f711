"""Products of 16-bit floats on Hopper whose rows TMA cannot take, by other kernels than Hopper's.

There the producer's threads load such rows, and a k-tile takes them longer than the tensor cores. Where there is one k-tile,
nothing is hidden behind anything, and the kernel that does least besides is the fastest. Where rows begin at multiples of
4 bytes, cp.async copies so many at a time, and several blocks a multiprocessor hide what one cannot: the multistage kernel
is the fastest by the mapping that `gemmkit.tuning.copied` finds, unless D is so large, and K so short, that TMA's stores of
its rows are most of the work: Hopper's producer is hidden behind these. Where rows begin anywhere, the models of both
kernels are compared. Half of what Hopper's kernel multiplies is unused where D is half as wide as its tile: smaller tiles
stream K, where they are fewer than multiprocessors. Microseconds on an H200 (2026-11-23 and 24, f16; Hopper's kernel, this
choice, cuBLAS):

| product | | | |
|---|---|---|---|
| 14x1447x55 tt | 3.9 | 2.3 singlestage | 2.4 |
| 384x34x17 nt | 2.9 | 2.4 | 2.5 |
| 192x218x29 nt | 3.4 | 2.5 | 2.6 |
| 648x5649x11 nn | 14.5 | 10.8 | 8.6 |
| 500x500x500 nn | 12.4 | 5.7 multistage | 8.0 |
| 480x1344x356 nt | 11.5 | 8.5 | 9.6 |
| 192x18x256 nn | 4.0 | 2.5 | 3.4 |
| 32x216x82 nt | 3.0 | 2.5 | 2.7 |
| 160x384x1542 nt | 8.3 | 6.9 in 4 shares | 10.8 |
| 11898x683x514 tt | 102.7 | 81.0 streamed | 96.6 |
| 320x11264x1258 nt | 92.4 | 54.6 | 51.4 |
| 98x11480x7441 tn | 240.7 | 79.1 streamed | 123.8 |
| 270x8x3584 tt | 10.3 | 5.8 in 6 shares | 7.0 |
| 3001x201x6001 nt | 328.1 | 126.6 streamed | 91.9 |
| 36x256x389 nn | 5.6 | 4.5 | 5.3 |
| 4299x64x3328 tn | 35.9 | 23.7 streamed | 31.6 |
| 2964x64x3167 nt | 34.6 | 25.7 | 23.5 |

1824x4353x1 (20.5, 21.6), 64x51x289 (5.7, 5.9), 333x777x1555 (20.6, 21.1), 3840x6088x78 (39.2, 44.8) and 384x6496x742
(20.8, 22.3) are Hopper's kernel's.
"""

from __future__ import annotations

from typing import Any

from gemmkit.layouts import ArrayLayout, Plain
from gemmkit.operators import Operator
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tuning import copied, multistage_mappings
from gemmkit.tuning.candidates import Candidate
from gemmkit.tuning.mappings import MAPPING_FIELDS, is_untouched
from gemmkit.tuning.model import CLOCK
from gemmkit.tuning.operators import SIXTEEN

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


def choice(a: ArrayLayout, b: ArrayLayout, infos: dict[str, ArrayInfo | None], fields: dict[str, Any], sizes: tuple[int,
           int, int], device: DeviceInfo, products: int) -> tuple[Operator | None, dict[str, Any]] | None:
    """The operator (None: the default one) and the fields of the mapping; None for what stays with Hopper's kernel."""
    M, N, K = sizes
    if device.arch[0] != 9 or products != 1 or a.dtype != b.dtype or a.dtype not in SIXTEEN or 0 in sizes:
        return None
    if fields.get("operator") is not None or set(fields) & MAPPING_FIELDS or not _are_plain(a, b, fields):
        return None
    of_a, of_b = infos["a"], infos["b"]
    assert of_a is not None and of_b is not None and isinstance(a, Plain) and isinstance(b, Plain)
    by_tma = [why_not(of, layout.axis) is None for of, layout in ((of_a, a), (of_b, b))]
    if all(by_tma):
        return None
    copies = copied.Copies.of(a, b, of_a, of_b, infos["out"], N)
    worst = max(copies.kinds)
    is_stored = copies.of_d == copied.VECTORS and M * N >= WIDE
    is_hidden = is_stored and (K <= HIDDEN[any(by_tma)] or (M * N >= WIDEST and worst == copied.WORDS))
    if K >= LEAST and worst != copied.ELEMENTS and not is_hidden:
        return multistage_mappings.of_half(copies.multistage(), a, b, sizes, device)
    tiles = -(-M // SIDE) * -(-N // SIDE)
    blocks = -(-M // SHORT.block[0]) * -(-N // SHORT.block[1])
    if K <= SHORT.block[2] and blocks <= MOST_BLOCKS * device.sm_count:
        return SHORT.choice(a, b, fields, device)
    if min(M, N) <= SIDE and FEWEST <= tiles <= device.sm_count and K > LONGEST:
        return STREAMED.choice(a, b, fields, device)
    if worst == copied.ELEMENTS and K > SHORT.block[2]:
        hoppers = min(one.cycles(sizes, device, a.dtype.itemsize, None, 1) for one in copies.hoppers(sizes, device, 1))
        return multistage_mappings.of_half(copies.multistage(), a, b, sizes, device, WORTH * hoppers / CLOCK)
    return None


def _are_plain(a: ArrayLayout, b: ArrayLayout, fields: dict[str, Any]) -> bool:
    return all(isinstance(layout, Plain) and layout.is_plain and is_untouched(name, fields)
               for name, layout in (("a", a), ("b", b)))


__all__ = ["choice"]
