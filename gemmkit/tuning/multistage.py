"""Default mappings of the multistage kernel: what is not given of its tiles, shared layouts and moves.

Shared tiles keep the order of global memory, padded by 16 bytes a line, so that a copy of 16 bytes goes to 16 bytes. The
ordinary units read vectors along M and N, so an operand that is contiguous along K is copied across: an element a copy, 32
bytes of a row by neighbouring lanes, into lines whose padding puts the lanes of a warp into different banks. So is a tensor
whose contiguous dimension is too odd for vectors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gemmkit.kernels.sm80.copies import copies_of
from gemmkit.layouts import ArrayLayout, Boxed, ColMajor, Padded, RowMajor
from gemmkit.layouts.swizzled import BOX, RUN
from gemmkit.operators import Algebra, BoxMMAOp, FPUOp, Operator
from gemmkit.operators.algebra import units
from gemmkit.ptx.copy_async import SIZES
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile
from gemmkit.tuning import defaults
from gemmkit.tuning.room import Room

SECTOR = 32                            # bytes of global memory that are loaded together
STAGES = 3


def fill(values: dict[str, Any], sizes: tuple[int, int, int] | None, device: DeviceInfo, products: int = 1) -> None:
    """Complete the tiles, shared layouts and moves of a Config in place; the operator has its shape and dtypes."""
    operator: Operator = values["operator"]
    values.setdefault("stages", stages_on(device))
    given = values.get("block_shape")
    if given is not None and "compute_warp" not in values:
        m, n, _ = operator.shape
        is_fpu = isinstance(units(operator), FPUOp)
        warp = (m, n) if is_fpu else defaults.warp_of(given, operator, values.get("warps_per_block"))
        values["compute_warp"] = Tile(M=warp[0], N=warp[1], K=given.size.K)
    laid_out, blocks_given = dict(values), "blocks_per_sm" in values
    _fill_shared(laid_out, operator)
    room = Room.of(device, laid_out, values["stages"])
    defaults.fill_tiles(values, operator, sizes, device, products, room)
    block, warp = values["block_shape"], values["compute_warp"]
    if "blocks_per_sm" in values and not blocks_given:
        fit = device.shared_memory_per_sm // room.nbytes(block.extents)
        values["blocks_per_sm"] = copies_of(device).blocks(values["blocks_per_sm"], fit)
    if warp.size.K != block.size.K:
        values["compute_warp"] = Tile(M=warp.size.M, N=warp.size.N, K=block.size.K)
    values.update({**laid_out, **values})
    _fill_moves(values)


def stages_on(device: DeviceInfo) -> int:
    """How many stages a ring has where nothing is said of them."""
    return min(STAGES, copies_of(device).useful_stages)


def _fill_shared(values: dict[str, Any], operator: Operator) -> None:
    if isinstance(operator, BoxMMAOp):
        order = RowMajor if operator.combed == "a" else ColMajor
        values.setdefault(f"shared_{operator.combed}_layout", Boxed(order(operator.dtype), RUN))
    if not isinstance(operator, Algebra) and isinstance(operator, FPUOp):
        for name, fragment, axis in (("a", operator.fragment_a, 0), ("b", operator.fragment_b, 1)):
            if _is_across(values, name, axis, fragment.dtype):
                values.setdefault(f"shared_{name}_layout", _padded_across(axis, fragment.dtype))
    if isinstance(operator, Algebra):
        for name, fragment, preferred in (("a", operator.fragment_a, 0), ("b", operator.fragment_b, 1)):
            layout = values[f"global_{name}_layout"]
            axis = preferred if isinstance(units(operator), FPUOp) else layout.vector_axis
            numbers = axis is not None and _padded_numbers(axis, fragment.dtype, _along_k(name, axis))
            if (numbers and layout.is_separable and layout.dtype == fragment.dtype
                    and operator.refuses(name, numbers) is None and f"shared_{name}_layout" not in values):
                values[f"shared_{name}_layout"] = numbers
    defaults.fill_shared(values, operator, operator.fragment_c.dtype)


def _along_k(name: str, axis: int) -> bool:
    return axis == (1 if name == "a" else 0)


def _padded_numbers(axis: int, dtype: np.dtype, along_k: bool) -> Any:
    """Complex numbers as they are in memory. Of complex128 lanes of DMMA read 64 bytes of two lines along K, and 32 of four
    lines across."""
    if dtype.kind != "c":
        return None
    padding = (64 if along_k else 32) if dtype.itemsize == 16 else 32
    return Padded((ColMajor, RowMajor)[axis](dtype), padding // dtype.itemsize)


def _is_copied(values: dict[str, Any], name: str, dtype: np.dtype) -> bool:
    """Whether cp.async takes an operand as it is, if need be element by element."""
    layout: ArrayLayout = values[f"global_{name}_layout"]
    transform = values.get(f"transform_global_to_shared_{name}")
    return (layout.is_separable and layout.dtype == dtype and dtype.itemsize in SIZES
            and (transform is None or transform.is_identity))


def _is_across(values: dict[str, Any], name: str, axis: int, dtype: np.dtype) -> bool:
    """Whether an operand is copied element by element, to lie across."""
    return _is_copied(values, name, dtype) and values[f"global_{name}_layout"].contiguous_axis == 1 - axis


def _padded_across(axis: int, dtype: np.dtype) -> Padded:
    """Lanes write 32 bytes along K by as many lines as are left of a warp's (or of 16 bytes a lane, a half-warp's) 128."""
    return Padded((ColMajor, RowMajor)[axis](dtype), 4)


def _fill_moves(values: dict[str, Any]) -> None:
    block = values["block_shape"]
    for name, names in (("a", "MK"), ("b", "KN")):
        layout, shared = values[f"global_{name}_layout"], values[f"shared_{name}_layout"]
        if isinstance(shared, Boxed):                          # eight lanes fill a box's line
            run, line = [1, 1], [4, 4]
            run[shared.axis], line[shared.axis] = RUN, BOX
            values.setdefault(f"mem_{name}_thread", Tile(**dict(zip(names, run))))
            values.setdefault(f"mem_{name}_warp", Tile(**dict(zip(names, line))))
        elif not hasattr(shared, "plane") and _is_copied(values, name, shared.dtype) and layout.vector_axis != shared.axis:
            if f"mem_{name}_thread" not in values and f"mem_{name}_warp" not in values:
                warp, thread = by_element(getattr(block, names), layout, shared)
                values[f"mem_{name}_warp"], values[f"mem_{name}_thread"] = warp, thread
    defaults.fill_moves(values)


def by_element(tile: Tile, layout: ArrayLayout, shared: Any) -> tuple[Tile, Tile]:
    """A warp's tile of single elements: along the contiguous axis, by as many lines as there are lanes left; no more than a
    sector where lines of shared memory lie across, or half a sector of each tooth of a comb."""
    axis = shared.axis if layout.contiguous_axis is None else layout.contiguous_axis
    sector = SECTOR // layout.dtype.itemsize if layout.comb == 1 else layout.comb * SECTOR // (2 * layout.dtype.itemsize)
    lanes = math.gcd(32 if axis == shared.axis else min(32, sector), tile.extents[axis])
    warp = [math.gcd(32 // lanes, tile.extents[1 - axis])] * 2
    warp[axis] = lanes
    return Tile(**dict(zip(tile.names, warp))), Tile(**dict.fromkeys(tile.names, 1))


__all__ = ["fill", "stages_on"]
