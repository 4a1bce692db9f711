"""Contractions of 16-bit floats whose A and B are contiguous along different indices of K, by boxes (`operators.BoxMMAOp`).

On Hopper the other way is the producer warps': they load one operand through registers, and turn it there. The multistage
kernel copies both as they lie, 16 bytes at a time, and multiplies by mma.sync.
"""

from __future__ import annotations

from typing import Any

from gemmkit.layouts import Layout, Tensor
from gemmkit.layouts.boxed import RUN
from gemmkit.operators import BoxMMAOp, Operator
from gemmkit.runtime.arrays import ArrayInfo, alignment, unit_axis
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuning.mappings import MAPPING_FIELDS, is_untouched
from gemmkit.tuning.multistage_mappings import Multistage, fastest
from gemmkit.tuning.operators import SIXTEEN

PIECE = 16                             # bytes that are copied together
TABLE = (
    Multistage((128, 256, 64), (64, 64), 3, 1, (2400,) * 4, 2400, 4000, itemsize=2),
    Multistage((128, 128, 64), (64, 64), 3, 2, (1600,) * 4, 1700, 3500, itemsize=2),
    Multistage((64, 64, 64), (32, 32), 3, 4, (800,) * 4, 900, 2500, itemsize=2),
)


def choice(a: Layout, b: Layout, infos: dict[str, ArrayInfo | None], fields: dict[str, Any], sizes: tuple[int, int, int],
           device: DeviceInfo, products: int) -> tuple[Operator, dict[str, Any]] | None:
    """The operator and the mapping's fields; None for other products."""
    if device.arch < (8, 0) or 0 in sizes or fields.get("operator") is not None or set(fields) & MAPPING_FIELDS:
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
    return BoxMMAOp(N=16, dtype=a.dtype, combed=combed), dict(one.fields, splits=splits)


def combed_operand(a: Layout, b: Layout, infos: dict[str, ArrayInfo | None]) -> str | None:
    """Which operand is the combed one; None unless the other has its neighbours along K, both in pieces of 16 bytes."""
    if a.dtype != b.dtype or a.dtype not in SIXTEEN:
        return None
    layouts, k_axes = {"a": a, "b": b}, {"a": 1, "b": 0}
    for name, other in ("ab", "ba"):
        if (_is_combed(layouts[name], infos[name], k_axes[name])
                and _is_along(layouts[other], infos[other], k_axes[other])):
            return name
    return None


def _is_combed(layout: Layout, info: ArrayInfo | None, k_axis: int) -> bool:
    return (isinstance(layout, Tensor) and layout.is_separable and layout.axis == k_axis and layout.comb == RUN
            and layout.vector % RUN == 0 and _is_aligned(layout, info))


def _is_along(layout: Layout, info: ArrayInfo | None, k_axis: int) -> bool:
    return (layout.is_separable and layout.vector_axis == k_axis and layout.neighbours % RUN == 0
            and _is_aligned(layout, info))


def _is_aligned(layout: Any, info: ArrayInfo | None) -> bool:
    return info is not None and unit_axis(info) == getattr(layout, "unit", layout.axis) and alignment(info) >= PIECE


__all__ = ["TABLE", "choice", "combed_operand"]
