"""Contractions of 16-bit floats whose A and B are contiguous along different indices of K, by boxes (`operators.BoxMMAOp`).

On Hopper the other way is the producer warps': they load one operand through registers, and transpose it there. The
multistage kernel copies both as they lie, 16 bytes at a time, and multiplies by mma.sync. Microseconds on an H200
(2026-11-24, f16, TCCG's three cases; the other way, this one by tiles of 128x256, of 128x192, torch.einsum):

| M x N x K | | | | |
|---|---|---|---|---|
| ijkl-minj-nlmk, 6048 x 7056 x 5184 | 4962 | 2163 | 2378 | 1060 |
| ijkl-minl-njmk, 6048 x 7056 x 5184 | 4953 | 2168 | 2397 | 981 |
| ij-kil-lkj, 360 x 372 x 129600, 22 shares of K (16: 323) | 1047 | 464 | 408 | 417 |

What a k-tile takes is proportional to its pieces of 16 bytes, each a request to the L2: 0.69 a cycle and multiprocessor,
for tiles of 128x256, 256x128, 128x192 and two blocks of 128x128 alike. (128x256 takes the same time with four stages,
streamed, and in other orders of tiles; 128x128 takes 699 us of the third case in 29 shares, 495 in 14.) The first two steps
of the table were measured so, the others follow from the number of their pieces. K has no more than 16 shares: the third
case takes 332 us in 14, 323 in 16, 435 in 22, 497 in 44.

A short K and few rows or columns stay with the other way (p and q are K's indices, one unit-stride in each operand):

| M x N x p q | the other way | this one | torch.einsum |
|---|---|---|---|
| 64 x 64 x 16 24 | 4.2 | 5.9 | 4.3 |
| 512 x 512 x 16 24 | 6.7 | 6.3 | 5.3 |
| 2048 x 2048 x 16 24 | 19.0 | 22.3 | 10.8 |
| 16 x 4096 x 64 72 | 28.5 | 36.8 | 11.9 |
| 128 x 128 x 64 72 | 18.2 | 9.3 | 9.9 |
| 512 x 512 x 64 72 | 45.7 | 27.4 | 20.3 |
| 4096 x 64 x 64 72 | 128.3 | 36.0 | 92.5 |
| 2048 x 2048 x 64 72 | 298.3 | 168.4 | 93.0 |
"""

from __future__ import annotations

from typing import Any

from gemmkit.layouts import ArrayLayout, Tensor
from gemmkit.layouts.swizzled import RUN
from gemmkit.operators import BoxMMAOp, Operator
from gemmkit.runtime.arrays import ArrayInfo, alignment, unit_axis
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuning.mappings import MAPPING_FIELDS, is_untouched
from gemmkit.tuning.multistage_mappings import Multistage, fastest
from gemmkit.tuning.operators import SIXTEEN

PIECE = 16                             # bytes that are copied together
SHORTEST, NARROWEST = 1024, 64         # along K; rows and columns of D
MOST_SHARES = 16                       # of K
TABLE = (
    Multistage((128, 256, 64), (64, 64), 3, 1, (2420,) * 4, 2420, 4000, itemsize=2, streams=False),
    Multistage((128, 192, 64), (64, 48), 4, 1, (2100,) * 4, 2100, 4000, itemsize=2),
    Multistage((128, 128, 64), (64, 32), 3, 1, (1690,) * 4, 1690, 4000, itemsize=2, streams=False),
    Multistage((64, 64, 64), (32, 32), 3, 4, (845,) * 4, 1000, 2500, itemsize=2),
)


def choice(a: ArrayLayout, b: ArrayLayout, infos: dict[str, ArrayInfo | None], fields: dict[str, Any], sizes: tuple[int,
           int, int], device: DeviceInfo, products: int) -> tuple[Operator, dict[str, Any]] | None:
    """The operator and the mapping's fields; None for other products."""
    if device.arch < (8, 0) or fields.get("operator") is not None or set(fields) & MAPPING_FIELDS:
        return None
    if min(sizes[:2]) < NARROWEST or sizes[2] < SHORTEST:
        return None
    if not all(is_untouched(name, fields) for name in "ab"):
        return None
    combed = combed_operand(a, b, infos)
    if combed is None:
        return None
    found = fastest(TABLE, a, b, sizes, device, products, may_stream=True)
    if found is None:
        return None
    one, splits = found
    if isinstance(splits, int) and splits > MOST_SHARES:
        splits = MOST_SHARES
    return BoxMMAOp(N=16, dtype=a.dtype, combed=combed), dict(one.fields, splits=splits)


def combed_operand(a: ArrayLayout, b: ArrayLayout, infos: dict[str, ArrayInfo | None]) -> str | None:
    """Which operand is the combed one; None unless the other has its neighbours along K, both in pieces of 16 bytes."""
    if a.dtype != b.dtype or a.dtype not in SIXTEEN:
        return None
    layouts, k_axes = {"a": a, "b": b}, {"a": 1, "b": 0}
    for name, other in ("ab", "ba"):
        if (_is_combed(layouts[name], infos[name], k_axes[name])
                and _is_along(layouts[other], infos[other], k_axes[other])):
            return name
    return None


def _is_combed(layout: ArrayLayout, info: ArrayInfo | None, k_axis: int) -> bool:
    return (isinstance(layout, Tensor) and layout.is_separable and layout.axis == k_axis and layout.comb == RUN
            and layout.vector % RUN == 0 and _is_aligned(layout, info))


def _is_along(layout: ArrayLayout, info: ArrayInfo | None, k_axis: int) -> bool:
    return (layout.is_separable and layout.vector_axis == k_axis and layout.neighbours % RUN == 0
            and _is_aligned(layout, info))


def _is_aligned(layout: Any, info: ArrayInfo | None) -> bool:
    return info is not None and unit_axis(info) == getattr(layout, "unit", layout.axis) and alignment(info) >= PIECE


__all__ = ["TABLE", "choice", "combed_operand"]
