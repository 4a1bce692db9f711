"""Default mappings of the warp-specialised kernel, and when it is the one to take."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from gemmkit.epilogues import Epilogue
from gemmkit.kernels.sm90.shared_k import COLUMNS, SharedK
from gemmkit.layouts import ColMajor, Interleaved, Layout, Plain, Planar, RowMajor, Swizzled, Tensor
from gemmkit.layouts.swizzled import pattern_of
from gemmkit.operators.base import Operator
from gemmkit.operators.wgmma import WGMMAOp
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tiling import Tile
from gemmkit.tuning import algebras
from gemmkit.tuning.mappings import (
    CP_ASYNC,
    LINE,
    MAPPINGS,
    PROMOTED,
    REWRITTEN,
    SHORT_BYTES,
    SPLIT,
    STAGED,
    TRANSFORMED,
    TRANSPOSED,
    UNALIGNED,
    UNALIGNED_BYTES,
    UNALIGNED_WORKSPACE,
    WORKSPACE,
    Mapping,
    by_workspace,
    choose_mapping,
    is_untouched,
)

WIDTHS = 128, 64, 32                   # bytes of a swizzle's lines
NARROWEST = WIDTHS[-1]


def choice(a: Layout, b: Layout, infos: dict[str, ArrayInfo | None], fields: dict[str, Any], sizes: tuple[int, int, int],
           device: DeviceInfo, products: int = 1) -> tuple[Operator, dict[str, Any]]:
    """The operator for a product of 16-bit floats in these layouts, and the fields of its mapping."""
    given = dict(fields, global_a_layout=a, global_b_layout=b)
    always = getattr(fields.get("condition"), "is_always", True)
    is_misaligned = any(isinstance(layout, Plain) and (info := infos[name]) is not None
                        and why_not(info, layout.axis) is not None for name, layout in (("a", a), ("b", b)))
    changed = _not_by_tma(given)
    mappings, shareable = MAPPINGS + SPLIT, WORKSPACE
    if is_misaligned:
        mappings, shareable = UNALIGNED, UNALIGNED_WORKSPACE
    elif changed is not None:
        mappings, shareable = changed, ()
    shared = by_workspace(sizes, device, products, shareable) if always else ()
    is_ragged = any(info is not None and any(stride * info.dtype.itemsize % LINE for stride in info.strides if stride != 1)
                    for info in (infos["a"], infos["b"]))
    epilogue = fields.get("epilogue")
    reads_tiles = infos.get("c") is not None or (isinstance(epilogue, Epilogue) and epilogue.reads_tiles)
    if reads_tiles:
        # What a finishing consumer reads by way of L1 makes the one that multiplies wait: 7 % of its time, measured.
        mappings = tuple(dataclasses.replace(one, step=1.07 * one.step) if one.schedule == "pingpong" else one
                         for one in mappings)
    mapping = choose_mapping(sizes, device, mappings=mappings + shared, is_ragged=is_ragged or mappings is CP_ASYNC,
                             is_tall=reads_tiles, limit=SHORT_BYTES if mappings is CP_ASYNC else UNALIGNED_BYTES,
                             products=products)
    is_short = sizes is not None and sizes[2] * a.dtype.itemsize <= LINE // 2
    if is_short and mappings in (CP_ASYNC, STAGED, REWRITTEN):
        mapping = dataclasses.replace(mapping, depth=LINE // 2)
    return WGMMAOp(mapping.N, dtype=a.dtype), mapping.fields


_OF_A_MAPPING = {"block_shape", "compute_warp", "warps_per_block", "schedule", "cluster", "stages", "shared_d_layout"}


def fill(values: dict[str, Any], sizes: tuple[int, int, int] | None, device: DeviceInfo, products: int = 1) -> None:
    """Complete the mapping of a Config for WGMMAOp in place; layouts are given."""
    whole: Any = values["operator"]
    operator: Any = getattr(whole, "base", whole)              # what multiplies: of an algebra, its base
    values.setdefault("kernel", "warp_specialised")
    is_algebra = whole is not operator
    splits = () if is_algebra or operator.accumulator.itemsize != 4 or set(values) & _OF_A_MAPPING else SPLIT
    mappings = (algebras.mappings(whole, values) if is_algebra else PROMOTED if operator.promote
                else _not_by_tma(values) or (TRANSPOSED if _is_transposed(values) else MAPPINGS + splits))
    mappings = tuple(one for one in mappings if splits or one.splits == 1)
    mapping = choose_mapping(sizes, device, operator.N, operator.dtype.itemsize, mappings, products=products)
    values.setdefault("splits", mapping.splits if splits else 1)
    values.setdefault("order", mapping.order)
    _fill_tiles(values, operator, mapping)
    _fill_shared(values, operator)
    if is_algebra:
        algebras.split(values)
    _fill_moves(values)
    condition = values.get("condition")
    always = condition is None or condition.is_always
    cluster = next(c for c in (mapping.cluster, mapping.cluster[::-1], (1, 1))
                   if c == (1, 1) or (always and _divides(values, c)))
    values.setdefault("cluster", Tile(M=cluster[0], N=cluster[1]))
    _fill_d(values)
    majors = dict(a_major="K" if values["shared_a_layout"].axis == 1 else "MN",
                  b_major="K" if values["shared_b_layout"].axis == 0 else "MN")
    units = dataclasses.replace(operator, **majors)
    values["operator"] = units if whole is operator else whole.with_base(units)
    values.setdefault("stages", _stages(values, device))


def _not_by_tma(values: dict[str, Any]) -> tuple[Mapping, ...] | None:
    """Candidate mappings when an operand cannot simply be copied by TMA (what TMA takes depends on the arrays, too): it is
    transformed, or comes by the producer's warps. cp.async candidates if every such operand is likely to be copied as it
    is; None if TMA copies both."""
    changed = [name for name in "ab" if _is_changed(name, values[f"global_{name}_layout"], values)]
    if not changed:
        return None
    if all(isinstance(values[f"global_{name}_layout"], Plain) for name in changed):
        return TRANSFORMED if changed == ["a"] else REWRITTEN
    return CP_ASYNC if all(_is_by_cp_async(name, values[f"global_{name}_layout"], values) for name in changed) else STAGED


def _is_by_cp_async(name: str, layout: Layout, fields: dict[str, Any]) -> bool:
    return layout.is_separable and layout.neighbours * layout.dtype.itemsize >= 4 and is_untouched(name, fields)


def _is_transposed(values: dict[str, Any]) -> bool:
    """Whether an operand lies across K that the hardware reads along K."""
    layouts = (values["global_a_layout"], 1), (values["global_b_layout"], 0)
    return any(layout.dtype.itemsize != 2 and layout.vector_axis != k_axis for layout, k_axis in layouts)


def _is_changed(name: str, layout: Layout, fields: dict[str, Any]) -> bool:
    """Whether code of a component stands between an operand's memory and shared memory."""
    return not isinstance(layout, Plain) or not is_untouched(name, fields)


def _fill_tiles(values: dict[str, Any], operator: Any, mapping: Mapping) -> None:
    values.setdefault("block_shape", Tile(M=mapping.M, N=operator.N, K=mapping.depth // operator.dtype.itemsize))
    block = values["block_shape"].size
    if "schedule" not in values and "warps_per_block" not in values and block.M != mapping.M:
        values["schedule"] = "cooperative"
        values["warps_per_block"] = 8 if block.M % 128 == 0 else 4
    values.setdefault("schedule", mapping.schedule)
    values.setdefault("warps_per_block", mapping.warps if values["schedule"] == mapping.schedule else 8)
    consumers = 1 if values["schedule"] == "pingpong" else max(1, values["warps_per_block"] // 4)
    values.setdefault("compute_warp", Tile(M=max(1, block.M // consumers), N=block.N, K=block.K))
    values.setdefault("producer_warps", mapping.producer_warps)


def _fill_shared(values: dict[str, Any], operator: Any) -> None:
    block = values["block_shape"].size
    for name, k_axis, across, dtype in (("a", 1, block.M, operator.dtype), ("b", 0, block.N, operator.b_dtype)):
        layout = values[f"global_{name}_layout"]
        axis = layout.vector_axis
        lines = isinstance(layout, (Plain, Planar, Tensor)) or layout.stored is not None
        if axis is None or dtype.itemsize != 2 or not lines or across * dtype.itemsize % 32:
            axis = k_axis                                 # only 16-bit operands can be contiguous across K
        extent = block.K if axis == k_axis else across
        values.setdefault(f"shared_{name}_layout", _swizzled(axis, dtype, extent))


def _fill_d(values: dict[str, Any]) -> None:
    """C's and D's shared layouts: D's panels divide the columns that a block finishes."""
    values.setdefault("shared_c_layout", RowMajor(values["operator"].fragment_c.dtype))
    d, N = values["global_d_layout"], values["block_shape"].size.N
    axis = 0 if d.vector_axis == 0 and d.is_separable else 1
    columns = N // SharedK(values["splits"], values["cluster"]).slices(N, max(COLUMNS, NARROWEST // d.dtype.itemsize))
    values.setdefault("shared_d_layout", _swizzled(axis, d.dtype, columns if axis == 1 else 64))


def _divides(values: dict[str, Any], cluster: tuple[int, int]) -> bool:
    """Whether the blocks of a cluster can each load a part of the operand that they share."""
    block = values["block_shape"].size
    for name, k_axis, across, peers in (("a", 1, block.M, cluster[1]), ("b", 0, block.N, cluster[0])):
        layout = values[f"shared_{name}_layout"]
        if (across // 8 if layout.axis == k_axis else across // layout.line) % peers:
            return False
    return True


def _swizzled(axis: int, dtype: np.dtype, extent: int) -> Swizzled:
    """The widest swizzle whose panels divide a tile."""
    width = next((w for w in WIDTHS if extent * dtype.itemsize % w == 0), NARROWEST)
    plain = Interleaved(dtype, ("col", "row")[axis]) if dtype.names else (ColMajor, RowMajor)[axis](dtype)
    return Swizzled(plain, width)


def _fill_moves(values: dict[str, Any]) -> None:
    """What producers move when TMA does not: 16 bytes a thread along the shared axis."""
    block, warps = values["block_shape"], values["producer_warps"]
    for name, tile in (("a", block.MK), ("b", block.KN)):
        layout, shared = values[f"global_{name}_layout"], values[f"shared_{name}_layout"]
        thread, warp = _move(tile, layout, shared, warps)
        values.setdefault(f"mem_{name}_thread", thread)
        values.setdefault(f"mem_{name}_warp", warp)
    values.setdefault("mem_cd_thread", Tile(M=1, N=2))
    values.setdefault("mem_cd_warp", Tile(M=8, N=8))


def _move(tile: Tile, layout: Any, shared: Any, warps: int) -> tuple[Tile, Tile]:
    """(thread, warp): lanes go along the axis of global memory, so that their loads are of neighbours."""
    axis = shared.axis
    size = shared.dtype.itemsize                          # of a number, where it has several parts
    vector = math.gcd(16 // size if 16 % size == 0 and size <= 8 else 4, tile.extents[axis])
    if isinstance(layout, Tensor) and layout.vector_axis == axis:
        run = math.gcd(layout.run, tile.extents[axis])
        vectors = (run >> n for n in range(run.bit_length()) if run >> n >= layout.comb)
        vector = next((v for v in vectors if tile.count % (16 * warps * v) == 0), run)   # as much for each of half of them
    thread, warp = [1, 1], [1, 1]
    if layout.vector_axis in (axis, None):
        thread[axis] = vector
        lanes = math.gcd(32, tile.extents[axis] // vector)
        warp[axis], warp[1 - axis] = lanes * vector, math.gcd(32 // lanes, tile.extents[1 - axis])
    else:                                                 # transposed on the way: lanes along global lines
        thread[axis] = vector
        warp[axis], warp[1 - axis] = vector, math.gcd(32, tile.extents[1 - axis])
    return tuple(Tile(**dict(zip(tile.names, extents))) for extents in (thread, warp))     # type: ignore[return-value]


def _stages(values: dict[str, Any], device: DeviceInfo) -> int:
    """As many as fit beside the subtiles of D."""
    from gemmkit.kernels.common.pipeline import BARRIER
    from gemmkit.kernels.sm90.store import BUFFERS

    block, a, b, d = (values[name] for name in ("block_shape", "shared_a_layout", "shared_b_layout", "shared_d_layout"))
    size = block.size
    stage = (pattern_of(a.physical_size(size.M, size.K) * a.dtype.itemsize)
             + pattern_of(b.physical_size(size.K, size.N) * b.dtype.itemsize))
    panels = BUFFERS * (values["warps_per_block"] // 4) * 64 * getattr(d, "width", LINE)
    sums = size.M * size.N * 4 + 2 * BARRIER * BUFFERS if SharedK(values["splits"], values["cluster"]).in_cluster > 1 else 0
    return max(2, min(8, (device.shared_memory_per_block - panels - sums) // (stage + 3 * BARRIER)))


__all__ = ["choice", "fill"]
