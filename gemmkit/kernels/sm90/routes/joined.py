"""The routes of operands of several arrays: TMA has a tensor map of each.

| route | operand | a tile is brought from |
|---|---|---|
| `JoinedTma` | `gemmkit.Concat` | the one array that has all of it |
| `BraidedTma` | `gemmkit.Braid` | all arrays, as many of its columns from each |

A braid's columns lie here in another order than in `gemmkit.layouts.Braided`: all of one part before those of the next. TMA
copies no eight columns of one array between eight of another's into a swizzled line, and a thread of wgmma has the same two
columns of every octet anyway.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.common.operand import Operand
from gemmkit.kernels.common.work import KTile, Slot
from gemmkit.kernels.sm90.routes.request import Request
from gemmkit.kernels.sm90.routes.tma import Copy, Fill, Tma
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each
from gemmkit.layouts import Braided, Joined
from gemmkit.ptx.special import udiv
from gemmkit.ptx.tma import tma_prefetch
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.tensor_maps import why_not

ATOM = 8                               # lines of a swizzle's pattern: a part's columns are whole patterns


@dataclass(frozen=True)
class JoinedTma(Tma):
    """TMA brings each tile from the array that has it: parts begin where tiles do."""

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        layout = request.operand.layout
        if not isinstance(layout, Joined):
            return "it is no join of arrays"
        if layout.grain % request.operand.tile.extents[layout.axis]:
            return f"a part begins inside of a tile ({layout.grain} divides where parts begin)"
        return why_no_tma_of_parts(request, layout)

    def other_arrays(self, operand: Operand) -> list[tuple[tuple[str, ...], ArrayInfo]]:
        layout: Any = operand.layout
        return [(("layout", *path), info) for path, info in zip(layout.paths, layout.infos)]

    def prefetch(self, tensor_map: Any) -> None:
        each(prefetch_part, tensor_map)

    def start(self, spec: Any, operand: Any, tensor_map: Any, barrier: Any, slot: Slot, at: KTile) -> None:
        layout = operand.layout
        i, j = (at.m, at.k) if operand.k_axis == 1 else (at.k, at.n)
        part, begin = layout.part_of(i, j), layout.own(i, j)
        across, along = layout.rows(begin), layout.columns(begin)
        if operand.k_axis == 1:
            own = KTile(at.m - across, at.n, at.k - along, at.batch, at.rank, at.shape)
        else:
            own = KTile(at.m, at.n - along, at.k - across, at.batch, at.rank, at.shape)
        each(start_own, tensor_map, self, spec, operand, Fill(slot, own, barrier), part)


@dataclass(frozen=True)
class BraidedTma(JoinedTma):
    """TMA brings as many columns of each part, the parts one behind the other.

    ``copy`` is of one part, ``apart`` elements are from one to the next in shared memory. In a cluster that shares B each
    block loads ``share`` parts.
    """

    apart: int
    share: int

    parts_apart = True

    @classmethod
    def of(cls, request: Request) -> BraidedTma:
        operand, cluster = request.operand, request.spec.cluster
        layout: Any = operand.brought
        braid: Any = operand.layout
        depth, across = operand.tile.extents
        width, line = across // braid.slots, layout.line
        if layout.axis == operand.k_axis:                            # lines along K
            copy = Copy(line, width, depth // line, across * line, line, 0, 0, 0, cluster.shares_b, True, 1, 0, layout.width)
            return cls(copy, width * line, braid.slots // cluster.m)
        copy = Copy(line, depth, width // line, depth * line, line, 0, 0, 0, cluster.shares_b, False, 1, 0, layout.width)
        return cls(copy, width * depth, braid.slots // cluster.m)

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        braid, spec, shared = request.operand.layout, request.spec, request.operand.shared
        if not isinstance(braid, Braided) or not isinstance(braid.layout, Joined) or braid.layout.axis != 1:
            return "it is no braid of arrays"
        if not braid.is_full:
            return "a part of each tile is of no array"
        if spec.scheduler.reduction.divides_k or spec.cluster.splits > 1:
            return "blocks that share K exchange neighbouring columns, which are of one part"
        if braid.slots % spec.cluster.m:
            return f"{spec.cluster.m} blocks cannot share {braid.slots} parts"
        least = ATOM if request.read_axis == request.operand.k_axis else shared.line
        width = request.operand.tile.extents[1] // braid.slots
        if width % least:
            return f"a tile has {width} columns of a part, and {least} are a line or a pattern"
        return why_no_tma_of_parts(request, braid.layout)

    def start(self, spec: Any, operand: Any, tensor_map: Any, barrier: Any, slot: Slot, at: KTile) -> None:
        own = KTile(at.m, udiv(at.n, operand.layout.slots), at.k, at.batch, at.rank, at.shape)
        each(start_share, tensor_map, self, spec, operand, Fill(slot, own, barrier))


def why_no_tma_of_parts(request: Request, layout: Joined) -> str | None:
    """Why TMA cannot bring what lies in several arrays."""
    shared: Any = request.operand.shared
    if not layout.is_alike:
        return "its arrays lie in different orders"
    if not request.is_untouched or layout.dtype != shared.dtype:
        return "a transform acts on it"
    if layout.line_axis != request.read_axis:
        return "it lies across"
    if request.info is not None and request.info.steps:
        return "its parts are stacks"
    infos = [*([] if request.info is None else [request.info]), *layout.infos]
    return next((why for info in infos if (why := why_not(info, layout.line_axis)) is not None), None)


# -- device code ----------------------------------------------------------------------------------------------------------

def prefetch_part(tensor_map: Any, n: int) -> None:
    tma_prefetch(tensor_map)


def start_own(tensor_map: Any, n: int, route: Any, spec: Any, operand: Any, fill: Fill, part: int) -> None:
    """The copies of a tile that lies in one part, if it is this one."""
    if part == n:
        route.start_boxes(spec, operand, tensor_map, fill, 0)


def start_share(tensor_map: Any, n: int, route: Any, spec: Any, operand: Any, fill: Fill) -> None:
    """The copies of one part's columns, if this block is to load them."""
    if route.copy.is_shared:
        if spec.cluster.part(operand.k_axis, fill.at.rank) == n // route.share:
            route.start_boxes(spec, operand, tensor_map, fill, n * route.apart)
    else:
        route.start_boxes(spec, operand, tensor_map, fill, n * route.apart)
