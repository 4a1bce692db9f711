"""The routes of operands into shared memory.

| operand | route |
|---|---|
| plain | TMA copies boxes of a matrix into swizzled tiles, and one thread starts it |
| of several arrays | TMA, with a tensor map of each array |
| a convolution's windows, weights of its input's gradient | TMA, box by box, where the layout says that each lies |
| any | producer warps load tiles into registers, with the code of the components, and store them |
| one that TMA does not take, whose neighbours lie side by side | threads start cp.async copies |
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.collectives.operand import (
    CHUNK,
    Operand,
    Route,
    copy_in_turn,
    put_elements,
    put_transformed,
    put_words,
    read_inside,
    read_line,
    read_packed,
    read_words,
    unit_of,
)
from gemmkit.kernels.collectives.scheduler import Cluster, Inputs, KTile, Slot, TileCoord, Work
from gemmkit.kernels.sm90.kernel import WORKING, Producer, Registers, acquire, fill_stages, matrix_at, place_of, stage_of
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import SharedPointer, View
from gemmkit.lang.registers import each, join, registers
from gemmkit.layouts import ColumnInterleaved, Im2col, Joined, Matricised, Planar, Sliding
from gemmkit.ptx.copy_async import SIZES, copies_arrive, copy_async
from gemmkit.ptx.memory import pack_words, shared, store_shared
from gemmkit.ptx.special import lane_index, rolled, thread_index, udiv, uniform
from gemmkit.ptx.tma import tma_load, tma_load_im2col, tma_load_im2col_multicast, tma_load_multicast, tma_prefetch
from gemmkit.ptx.wgmma import fence_async
from gemmkit.runtime.arrays import ArrayInfo, alignment, unit_axis
from gemmkit.runtime.tensor_maps import TensorMapSpec, why_not
from gemmkit.tiling import parallelise, translate

if TYPE_CHECKING:
    from gemmkit.emulator.copies import EmulatedTensorMap
    from gemmkit.kernels.sm90.family import Sm90Spec


# --------------------------------------------------------------------------------------------------
# What a route is asked about: an operand, its array, and the kernel that it is for.

@dataclasses.dataclass(frozen=True)
class Request:
    """How shall ``operand``, a matrix of ``extents`` in the array ``info``, get into shared memory in the kernel ``spec``?

    ``spec`` has no routes yet. ``info`` None stands for an array that suits TMA.
    """

    spec: Sm90Spec
    operand: Operand
    info: ArrayInfo | None
    extents: tuple[int, int]

    def why_no_tma(self, axis: int) -> str | None:
        """Why TMA cannot take the array with elements contiguous along ``axis``; None if it can."""
        return None if self.info is None else why_not(self.info, axis)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing acts on its elements on their way."""
        return self.operand.to_shared.is_identity and not self.operand.is_masked

    @property
    def read_axis(self) -> int:
        """The axis along which the tensor cores read it."""
        shared: Any = self.operand.shared
        return int(shared.axis)

    @property
    def stored_axis(self) -> int | None:
        """The axis along which the array's elements are contiguous, if a matrix is stored."""
        stored: Any = self.operand.layout.stored
        return None if stored is None else int(stored.axis)

    @property
    def lies_as_read(self) -> bool:
        return self.operand.layout.vector_axis == self.read_axis

    @property
    def moves_lines(self) -> bool:
        """Whether a thread's tile is a line of the shared layout, in whole 32-bit words."""
        thread, shared = self.operand.thread, self.operand.shared
        return bool(thread.extents[self.read_axis] == thread.count and thread.count * shared.dtype.itemsize % 4 == 0)

    @property
    def divides(self) -> bool:
        """Whether every thread of all producer warps copies as much of the tile."""
        operand = self.operand
        return (operand.tile.count % (operand.warp.count * self.spec.producer_warps) == 0
                and operand.warp.count % (32 * operand.thread.count) == 0)


@dataclass(frozen=True)
class TmaCopy(Component):
    """How TMA brings an operand's tile: ``panels`` boxes of ``lines`` lines of ``line`` elements.

    ``step`` is a panel's size in shared memory, ``along`` how far the next panel's first element is along the lines. In a
    cluster that shares the operand, a block's part begins ``part`` elements into the tile, ``part_along`` further along the
    lines and ``part_across`` lines on. Numbers of several parts come plane by plane: ``planes`` of ``plane`` elements each.
    ``swizzle`` is the width of the swizzled panels in bytes, 0 for a tile without. ``multicasts``: all blocks get the part.
    ``begin`` is how far along the lines a box of overlapping panels begins. A panel comes in ``cuts`` boxes. The last
    ``missing`` lines of each panel are beyond the matrix and never brought: they are zeros from the start (`Tma.clear`).
    """

    line: int
    lines: int
    panels: int
    step: int
    along: int
    part: int
    part_along: int
    part_across: int
    is_shared: bool
    along_k: bool
    planes: int
    plane: int
    swizzle: int
    multicasts: bool = True
    begin: int = 0
    cuts: int = 1
    missing: int = 0

    @classmethod
    def in_panels(cls, operand: Operand, cluster: Cluster, rows: int = 0) -> TmaCopy:
        """Swizzled panels, of which each block of a cluster that shares the operand loads a part. There are so many
        ``rows`` (columns of B) in all; 0: any number."""
        layout, k_axis = operand.brought, operand.k_axis
        is_shared = cluster.shares_a if k_axis == 1 else cluster.shares_b
        peers = cluster.n if k_axis == 1 else cluster.m              # each of which loads a part
        depth, across = operand.tile.extents[k_axis], operand.tile.extents[1 - k_axis]
        plane = 1 if operand.in_panels else operand.planes, int(layout.physical_size(*operand.tile.extents)), layout.width
        along_k = layout.axis == k_axis
        if isinstance(layout, Sliding):                              # one box holds all panels
            return cls(layout.line, layout.lines(across if along_k else depth), 1, 0, 0, 0, 0, 0, is_shared, along_k, *plane,
                       begin=(layout.panels - 1) * layout.line if layout.step < 0 else 0)
        if along_k:                                                  # lines along K: the parts are some lines of each panel
            lines, panels, part = across // peers, depth // layout.line, (across // peers * layout.line, 0, across // peers)
        else:                                                        # lines across K: the parts are some of the panels
            lines, panels = depth, across // layout.line // peers
            part = panels * depth * layout.line, panels * layout.line, 0
        piece = getattr(operand.layout, "box_lines", 0)
        cuts = lines // piece if 0 < piece < lines and lines % piece == piece % ATOM == 0 else 1
        missing = lines - brought_lines(lines, rows) if along_k and cuts == operand.planes == 1 and not is_shared else 0
        return cls(layout.line, (lines - missing) // cuts, panels, (across if along_k else depth) * layout.line, layout.line,
                   *part, is_shared, along_k, *plane, cuts=cuts, missing=missing)

    @classmethod
    def whole(cls, operand: Operand) -> TmaCopy:
        """The tile as it lies in global memory, in one box without a swizzle."""
        axis = operand.plane.axis
        line, lines = operand.tile.extents[axis], operand.tile.extents[1 - axis]
        return cls(line, lines, 1, 0, 0, 0, 0, 0, False, axis == operand.k_axis, 1, 0, 0)


# How many lines a box may have in place of a tile's. TMA takes its time for lines beyond the matrix, too: tiles of 64 x 64
# with 128 of K, of which 63 lines of A are beyond it, took twice the time of 64 x 16 for the same bytes (1 x 28672 x 4096 in
# three stages, H200, 2026-11-30: 118 us and 64.5).
FEW_LINES = 1, 8, 32


def brought_lines(lines: int, rows: int) -> int:
    """How many of a tile's lines TMA brings where there are so many ``rows`` in all.

    >>> [brought_lines(64, rows) for rows in (0, 1, 2, 30, 33)], brought_lines(16, 9)
    ([64, 1, 8, 32, 64], 16)
    """
    return next((few for few in FEW_LINES if 0 < rows <= few and 2 * few <= lines), lines)


class StageFill(NamedTuple):
    """A stage to be filled: with which k-tile, and the barrier that counts the bytes."""
    slot: Slot
    at: KTile
    barrier: Any


@dataclass(frozen=True)
class Tma(Route):
    """TMA brings the tile as the tensor cores read it: a plain matrix, nothing acts on it."""

    copy: TmaCopy
    uses_tma = True

    @classmethod
    def of(cls, request: Request) -> Tma:
        return cls(TmaCopy.in_panels(request.operand, request.spec.cluster, request.extents[1 - request.operand.k_axis]))

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        """Why TMA cannot bring the operand as it is to be read; None where it can."""
        why = cls.refuses_array(request)
        if why is not None or hasattr(request.operand.shared, "plane"):
            return why
        if not request.is_untouched:
            return "a transform or a mask acts on it"
        return None if request.stored_axis == request.read_axis else "it lies across"

    @classmethod
    def goes_with(cls, other: type[Route]) -> bool:
        """Whether the other operand may take that route."""
        return True

    @classmethod
    def refuses_array(cls, request: Request) -> str | None:
        """Why TMA cannot bring what lies in memory."""
        operand, layout = request.operand, request.operand.layout
        shared: Any = operand.shared
        if hasattr(shared, "plane"):
            if type(layout) is not Planar or not operand.to_shared.is_identity or layout.dtype != shared.dtype:
                return "TMA takes no number apart: its parts must be planes already, untransformed"
            return request.why_no_tma(shared.axis + 1)
        stored: Any = layout.stored
        if stored is None:
            return f"{layout!r} does not say that a matrix is stored"
        if stored.dtype != shared.dtype:
            return f"it is stored in {stored.dtype}, and multiplied in {shared.dtype}"
        return request.why_no_tma(stored.axis)

    def other_arrays(self, operand: Operand) -> list[tuple[tuple[str, ...], ArrayInfo]]:
        """Arrays behind the operand's own, each of which has a tensor map, too, and the fields of the operand to them."""
        return []

    def map_spec(self, operand: Operand, info: ArrayInfo) -> tuple[int, TensorMapSpec]:
        """The axis of the array along which elements are contiguous, and the tensor map's box."""
        planes = len(info.shape) - 2                                  # a box is of one plane, of one matrix
        layout: Any = operand.brought
        return layout.axis + planes, TensorMapSpec(info.dtype, (self.copy.line, self.copy.lines) + (1,) * planes,
                                                   self.copy.swizzle)

    def brought_bytes(self, operand: Operand) -> int:
        return operand.nbytes * self.copy.lines // (self.copy.lines + self.copy.missing)

    def suits(self, operand: Operand, extents: tuple[int, int]) -> bool:
        """Whether it brings as many lines of a matrix of these ``extents`` as `of` would have it."""
        copy = self.copy
        return not copy.along_k or copy.is_shared or (
            copy.lines == brought_lines(copy.lines + copy.missing, extents[1 - operand.k_axis]))

    def clear(self, spec: Any, operand: Operand) -> None:
        """Zeros into the lines of all stages that no copy brings, by the block's threads. A barrier has to follow."""
        if self.copy.missing > 0:
            zero, pieces, n = np.uint32(0), self.copy.missing * self.copy.swizzle // CHUNK, thread_index()
            while n < spec.stages * self.copy.panels * pieces:
                panel = udiv(n, pieces)
                at = (udiv(panel, self.copy.panels) * spec.stage_bytes + self.copy.lines * self.copy.swizzle
                      + panel % self.copy.panels * self.copy.step * operand.brought.itemsize + n % pieces * CHUNK)
                store_shared(shared(np.uint32, operand.offset), udiv(at, 4), 0, (zero, zero, zero, zero))
                n = rolled(n + spec.threads)
            fence_async()

    def prefetch(self, tensor_map: EmulatedTensorMap) -> None:
        tma_prefetch(tensor_map)

    def start(self, spec: Any, operand: Any, tensor_map: Any, barrier: Any, slot: Slot, at: KTile) -> None:
        """Start a stage's copies."""
        self.start_boxes(spec, operand, tensor_map, StageFill(slot, at, barrier), 0)

    def start_boxes(self, spec: Sm90Spec, operand: Operand, tensor_map: EmulatedTensorMap, fill: StageFill,
                    first: int) -> None:
        """Start copies panel by panel, from element ``first`` of the stage's tile on; in a cluster that shares the operand,
        of this block's part, to all."""
        at, stage = fill.at, fill.slot.stage
        across = at.m if operand.k_axis == 1 else at.n
        pointer = shared(operand.brought.dtype, operand.offset)
        position = stage * (spec.stage_bytes // operand.brought.itemsize) + first
        along, across = (at.k, across) if self.copy.along_k else (across, at.k)
        matrix = matrix_at(spec, operand, at.batch)
        for plane in range(self.copy.planes):
            for panel in range(self.copy.panels):
                x, y = along + panel * self.copy.along, across
                to = position + plane * self.copy.plane + panel * self.copy.step
                if self.copy.is_shared:
                    part = spec.cluster.part(operand.k_axis, at.rank)
                    x, y = x + part * self.copy.part_along, y + part * self.copy.part_across
                    to += part * self.copy.part
                inside: tuple = (x, y, plane) if self.copy.planes > 1 else (x, y)
                coordinates = join((inside, matrix))
                if self.copy.is_shared and self.copy.multicasts:
                    tma_load_multicast(tensor_map, coordinates, pointer, to, fill.barrier, stage,
                                       spec.cluster.sharers(operand.k_axis, at.rank))
                else:
                    tma_load(tensor_map, coordinates, pointer, to, fill.barrier, stage)

    # Nothing is to be done to what is there (see `rewrite.Rewrite`).

    def rewrite_inside(self, spec: Sm90Spec, operand: Operand, slot: Slot, at: KTile, warp: int) -> None:
        """A team's part of a raw tile that is wholly in range."""

    def rewrite_edge(self, spec: Sm90Spec, operand: Operand, slot: Slot, at: KTile, warp: int) -> None:
        """The same of one that is partly out of range."""

    def transpose(self, spec: Sm90Spec, operand: Operand, slot: Slot, at: KTile, warp: int) -> None:
        """The same of any tile that lies across."""


@dataclass(frozen=True)
class PlacedTma(Tma):
    """TMA brings each panel from where the layout says that it lies (``box_at``): of a tensor of several dimensions, or
    (``walks``) a convolution's windows in im2col mode."""

    walks: bool = False

    @classmethod
    def of(cls, request: Request) -> PlacedTma:
        return cls(TmaCopy.in_panels(request.operand, request.spec.cluster), isinstance(request.operand.layout, Im2col))

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        operand, layout, info = request.operand, request.operand.layout, request.info
        shared: Any = operand.shared
        if not isinstance(layout, (Im2col, Matricised)):
            return "its layout names no boxes"
        if hasattr(shared, "plane") or layout.dtype != shared.dtype or not request.is_untouched or not request.lies_as_read:
            return "TMA copies elements as they are, along their lines"
        if info is not None and info.steps:
            return "it is a stack"
        copy = TmaCopy.in_panels(operand, request.spec.cluster)
        fills = isinstance(layout, Im2col) and not copy.is_shared and layout.fills(shared, operand.tile, operand.k_axis)
        if isinstance(shared, Sliding) and not fills:
            return "its panels are not the taps of a tile"
        return layout.box_refusal(copy.line, copy.lines) or request.why_no_tma(layout.unit)

    def map_spec(self, operand: Operand, info: ArrayInfo) -> tuple[int, TensorMapSpec]:
        return operand.layout.unit, operand.layout.box(self.copy.line, self.copy.lines, self.copy.swizzle)

    def start(self, spec: Any, operand: Any, tensor_map: Any, barrier: Any, slot: Slot, at: KTile) -> None:
        pointer, layout = shared(operand.brought.dtype, operand.offset), operand.layout
        position = slot.stage * (spec.stage_bytes // operand.brought.itemsize)
        part = spec.cluster.part(operand.k_axis, at.rank) if self.copy.is_shared else at.rank * 0
        across = at.m if operand.k_axis == 1 else at.n
        along, across = (at.k, across) if self.copy.along_k else (across, at.k)
        columns = place_of(operand, at).columns
        for panel in range(self.copy.panels):
            for cut in range(self.copy.cuts):
                x = along + self.copy.begin + panel * self.copy.along + part * self.copy.part_along
                y = across + cut * self.copy.lines + part * self.copy.part_across
                to = position + panel * self.copy.step + part * self.copy.part + cut * self.copy.lines * self.copy.line
                i, j = (y, x) if operand.brought.axis == 1 else (x, y)
                box = layout.box_at(i, j, columns)
                if self.walks:
                    tap = layout.box_offsets(i, j, columns)
                    if self.copy.is_shared and self.copy.multicasts:
                        tma_load_im2col_multicast(tensor_map, box, tap, pointer, to, barrier, slot.stage,
                                                  spec.cluster.sharers(operand.k_axis, at.rank))
                    else:
                        tma_load_im2col(tensor_map, box, tap, pointer, to, barrier, slot.stage)
                elif self.copy.is_shared and self.copy.multicasts:
                    tma_load_multicast(tensor_map, box, pointer, to, barrier, slot.stage,
                                       spec.cluster.sharers(operand.k_axis, at.rank))
                else:
                    tma_load(tensor_map, box, pointer, to, barrier, slot.stage)


# --------------------------------------------------------------------------------------------------
# The routes of operands of several arrays: TMA has a tensor map of each.
#
# | route | operand | a tile is brought from |
# |---|---|---|
# | `JoinedTma` | `gemmkit.layouts.Concat` | the one array that has all of it |
# | `InterleavedTma` | `gemmkit.layouts.InterleavedColumns` | all arrays, as many of its columns from each |
#
# Interleaved columns lie here in another order than in `gemmkit.layouts.ColumnInterleaved`: all of one part before those of
# the next. TMA copies no eight columns of one array between eight of another's into a swizzled line, and a thread of wgmma
# has the same two columns of every octet anyway.

ATOM = 8                               # lines of a swizzle's pattern: a part's columns are whole patterns


@dataclass(frozen=True)
class JoinedTma(Tma):
    """TMA brings each tile from the array that has it: parts begin where tiles do."""

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        layout = request.operand.layout
        if not isinstance(layout, Joined):
            return "it does not join arrays"
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
        each(start_own, tensor_map, self, spec, operand, StageFill(slot, own, barrier), part)


@dataclass(frozen=True)
class InterleavedTma(JoinedTma):
    """TMA brings as many columns of each part, the parts one behind the other.

    ``copy`` is of one part, ``apart`` elements are from one to the next in shared memory. In a cluster that shares B each
    block loads ``share`` parts.
    """

    apart: int
    share: int

    parts_apart = True

    @classmethod
    def of(cls, request: Request) -> InterleavedTma:
        operand, cluster = request.operand, request.spec.cluster
        layout: Any = operand.brought
        columns: Any = operand.layout
        depth, across = operand.tile.extents
        width, line = across // columns.slots, layout.line
        if layout.axis == operand.k_axis:                            # lines along K
            copy = TmaCopy(line, width, depth // line, across * line, line, 0, 0, 0, cluster.shares_b, True, 1, 0,
                           layout.width)
            return cls(copy, width * line, columns.slots // cluster.m)
        copy = TmaCopy(line, depth, width // line, depth * line, line, 0, 0, 0, cluster.shares_b, False, 1, 0, layout.width)
        return cls(copy, width * depth, columns.slots // cluster.m)

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        columns, spec, shared = request.operand.layout, request.spec, request.operand.shared
        if not isinstance(columns, ColumnInterleaved) or not isinstance(columns.layout, Joined) or columns.layout.axis != 1:
            return "it does not interleave arrays"
        if not columns.is_full:
            return "a part of each tile is of no array"
        if spec.scheduler.reduction.divides_k or spec.cluster.splits > 1:
            return "blocks that share K exchange neighbouring columns, which are of one part"
        if columns.slots % spec.cluster.m:
            return f"{spec.cluster.m} blocks cannot share {columns.slots} parts"
        least = ATOM if request.read_axis == request.operand.k_axis else shared.line
        width = request.operand.tile.extents[1] // columns.slots
        if width % least:
            return f"a tile has {width} columns of a part, and {least} are a line or a pattern"
        return why_no_tma_of_parts(request, columns.layout)

    def start(self, spec: Any, operand: Any, tensor_map: Any, barrier: Any, slot: Slot, at: KTile) -> None:
        own = KTile(at.m, udiv(at.n, operand.layout.slots), at.k, at.batch, at.rank, at.shape)
        each(start_share, tensor_map, self, spec, operand, StageFill(slot, own, barrier))


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

def prefetch_part(tensor_map: EmulatedTensorMap, n: int) -> None:
    tma_prefetch(tensor_map)


def start_own(tensor_map: EmulatedTensorMap, n: int, route: Any, spec: Sm90Spec, operand: Operand, fill: StageFill,
              part: int) -> None:
    """The copies of a tile that lies in one part, if it is this one."""
    if part == n:
        route.start_boxes(spec, operand, tensor_map, fill, 0)


def start_share(tensor_map: EmulatedTensorMap, n: int, route: Any, spec: Sm90Spec, operand: Operand,
                fill: StageFill) -> None:
    """The copies of one part's columns, if this block is to load them."""
    if not route.copy.is_shared or spec.cluster.part(operand.k_axis, fill.at.rank) == n // route.share:
        route.start_boxes(spec, operand, tensor_map, fill, n * route.apart)


# --------------------------------------------------------------------------------------------------
# The route of any operand: producer warps load tiles into registers, with the code of the components, and store them.
#
# A fence waits for all that a thread has on its way, its loads too. So no thread loads for the next stage while it stores
# this one's: another team does.

CLIPPED, TOGETHER = 24, 40             # words of an operand, and of both, that a thread loads at an edge; more of them spill


@dataclass(frozen=True)
class StagedRoute(Route):
    """A producer's threads load and store the operand."""

    @classmethod
    def of(cls, request: Request) -> StagedRoute:
        return cls()

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        return None

    @classmethod
    def goes_with(cls, other: type[Route]) -> bool:
        return other in (Tma, PlacedTma, StagedRoute)


@dataclass(frozen=True)
class StagedProducer(Producer):
    """Teams of warps move an operand, or both.

    ``holds``: a thread has registers for its part of a stage, so that all its loads go out before it waits for the stage.
    ``holds_whole``: besides, each of its tiles is in range or out of it as a whole, and only passes through.
    ``holds_clipped``: besides, its tiles at the edges are loaded as those within are; if not ``together``, an operand after
    the other.
    """

    holds: bool = False
    holds_whole: bool = False
    holds_clipped: bool = False
    together: bool = False

    @classmethod
    def of(cls, spec: Sm90Spec) -> StagedProducer:
        """Two teams, if half of the warps can hold a stage with registers to spare; else one."""
        staged = [operand for operand in (spec.a, spec.b) if not operand.route.uses_tma]

        def held(warps: int) -> int:
            words = [dataclasses.replace(operand, warps=warps).staged_words for operand in staged]
            return sum(words) if all(words) else 0

        most = spec.most_staged
        teams = 2 if 0 < held(spec.producer_warps // 2) <= most * 3 // 4 else 1
        warps = spec.producer_warps // teams
        holds = 0 < held(warps) <= most
        words = max((dataclasses.replace(operand, warps=warps).staged_words for operand in staged), default=0)
        together = held(warps) <= TOGETHER
        is_clipped = holds and (together or words <= CLIPPED) and all(operand.clipped for operand in staged)
        is_whole = holds and not is_clipped and all(operand.whole and operand.passes_words for operand in staged)
        return cls(warps, teams, spec.tma_bytes, holds=holds, holds_whole=is_whole, holds_clipped=is_clipped,
                   together=is_clipped and together)

    def fill(self, spec: Sm90Spec, inputs: Inputs, slot: Slot, at: KTile, kept: Registers, state: Any) -> Any:
        warp = uniform(udiv(thread_index(), 32)) % self.warps
        size, shape = spec.block.size, at.shape
        if self.holds_whole:
            fill_from_registers(spec, inputs, slot, at, warp, False)
        elif at.m + size.M <= shape.M and at.n + size.N <= shape.N and at.k + size.K <= shape.K:
            if self.holds:
                fill_from_registers(spec, inputs, slot, at, warp, True)
            else:                                      # they do not fit the registers all at once, or are less than a word
                acquire(spec, inputs, slot, at)
                if not spec.a.route.uses_tma:
                    copy_inside(spec.a, inputs.a.data, stage_of(spec, spec.a, slot), place_of(spec.a, at), warp, shape)
                if not spec.b.route.uses_tma:
                    copy_inside(spec.b, inputs.b.data, stage_of(spec, spec.b, slot), place_of(spec.b, at), warp, shape)
        elif self.together:
            fill_from_registers(spec, inputs, slot, at, warp, False)
        elif self.holds_clipped:
            acquire(spec, inputs, slot, at)
            if not spec.a.route.uses_tma:
                copy_clipped(spec, spec.a, inputs.a.data, slot, at, warp)
            if not spec.b.route.uses_tma:
                copy_clipped(spec, spec.b, inputs.b.data, slot, at, warp)
        else:
            acquire(spec, inputs, slot, at)
            nothing = spec.operator.identity
            if not spec.a.route.uses_tma:
                copy_in_turn(spec.a, inputs.a.data, stage_of(spec, spec.a, slot), place_of(spec.a, at), nothing, warp, shape)
            if not spec.b.route.uses_tma:
                copy_in_turn(spec.b, inputs.b.data, stage_of(spec, spec.b, slot), place_of(spec.b, at), nothing, warp, shape)
        fence_async()                                  # tensor cores read through another proxy than threads write
        spec.pipeline.commit(slot)
        return state


def fill_from_registers(spec: Sm90Spec, inputs: Inputs, slot: Slot, at: KTile, warp: int, is_inside: bool) -> None:
    """All loads go out before the wait for the stage; registers hold what they bring. Unless the stage is known to lie
    inside, each of the threads' tiles is wholly in range or wholly out, and then the identity."""
    a_held, b_held = registers(spec.a.words, spec.a.slots), registers(spec.b.words, spec.b.slots)
    if not spec.a.route.uses_tma:
        load_held(spec, spec.a, a_held, inputs.a.data, at, warp, is_inside)
    if not spec.b.route.uses_tma:
        load_held(spec, spec.b, b_held, inputs.b.data, at, warp, is_inside)
    acquire(spec, inputs, slot, at)
    if not spec.a.route.uses_tma:
        put_held(spec.a, a_held, stage_of(spec, spec.a, slot), place_of(spec.a, at), warp)
    if not spec.b.route.uses_tma:
        put_held(spec.b, b_held, stage_of(spec, spec.b, slot), place_of(spec.b, at), warp)


def copy_clipped(spec: Sm90Spec, operand: Operand, data: View, slot: Slot, at: KTile, warp: int) -> None:
    """A stage at an edge, an operand after the other: what is loaded anywhere takes more registers."""
    held = registers(operand.words, operand.slots)
    load_held(spec, operand, held, data, at, warp, False)
    put_held(operand, held, stage_of(spec, operand, slot), place_of(operand, at), warp)


def load_held(spec: Sm90Spec, operand: Operand, held: Any, data: View, at: KTile, warp: int, is_inside: bool) -> None:
    """Load all of a thread's tiles as words: raw, or finished and packed; or masked, the identity for those out of range."""
    place = place_of(operand, at)
    warp_tiles = parallelise(operand.tile, operand.warp, warp, operand.warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            tile = translate(thread_tiles[j], place.i, place.j)
            if not is_inside:
                words = read_words(operand, data, tile, place, spec.operator.identity, at.shape)
            elif operand.is_raw:
                words = read_line(operand, data, tile)
            elif operand.is_packed:
                words = read_packed(operand, data, tile, at.shape)
            else:
                words = pack_words(read_inside(operand, data, tile, at.shape))
            held[i * len(thread_tiles) + j] = words


def put_held(operand: Operand, held: Any, pointer: SharedPointer, place: TileCoord, warp: int) -> None:
    """Store what `load_held` loaded; what is raw is transformed now."""
    warp_tiles = parallelise(operand.tile, operand.warp, warp, operand.warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            words = held[i * len(thread_tiles) + j]
            if operand.is_raw and not operand.is_direct:
                put_transformed(operand, pointer, thread_tiles[j], words, place)
            else:
                put_words(operand, pointer, thread_tiles[j], words)


def copy_inside(operand: Operand, data: View, pointer: SharedPointer, place: TileCoord, warp: int,
                shape: StackShape) -> None:
    """Tile by tile, all in range."""
    warp_tiles = parallelise(operand.tile, operand.warp, warp, operand.warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            put_elements(operand, pointer, thread_tiles[j],
                         read_inside(operand, data, translate(thread_tiles[j], place.i, place.j), shape))


# --------------------------------------------------------------------------------------------------
# The route of operands that TMA does not take, whose neighbours still lie side by side: threads start cp.async copies.
#
# TMA copies boxes of at most five dimensions; an operand of a contraction is a matrix whose rows and columns are made of
# any number of them, wherever a tile begins. The producer's threads then start copies of 4 to 16 bytes each (cp.async),
# and the hardware arrives on ``full[stage]`` when a thread's have come: no thread waits for global memory, and no
# register holds what is on its way. An element's place is the sum of its row's and its column's (`Layout.is_separable`):
# what stays the same along K is computed once a tile of D. What is out of range comes as zeros.
#
# The copies write as threads do: consumers fence (`fence_async`) before tensor cores read a stage.

@dataclass(frozen=True)
class CpAsyncLines(Route):
    """Threads start copies of whole lines of the operand."""

    @classmethod
    def of(cls, request: Request) -> CpAsyncLines:
        return cls()

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        """Every thread's tile must be a line of neighbours in memory, there and in range as a whole, that a copy takes."""
        why, info = cls.refuses_layout(request), request.info
        if why is not None or info is None:
            return why or "its array is not known"
        operand, thread = request.operand, request.operand.thread
        shared: Any = operand.shared
        nbytes = thread.count * shared.itemsize
        if unit_axis(info) != unit_of(operand.layout, info) or alignment(info) % nbytes:
            return f"its lines are not aligned to {nbytes} bytes"
        return "a thread's tile straddles an edge" if request.extents[shared.axis] % thread.count else None

    @classmethod
    def refuses_layout(cls, request: Request) -> str | None:
        """Why no array in this layout, on this mapping, comes by cp.async."""
        operand, layout, thread = request.operand, request.operand.layout, request.operand.thread
        shared: Any = operand.shared
        if hasattr(shared, "plane"):
            return "cp.async takes no number apart"
        if not layout.is_separable:
            return "an element's place is not the sum of its row's and its column's"
        if layout.dtype != shared.dtype or not request.is_untouched or not request.lies_as_read:
            return "cp.async copies elements as they are, along their lines"
        nbytes = thread.count * shared.itemsize
        if thread.extents[shared.axis] != thread.count or nbytes not in SIZES or layout.neighbours % thread.count:
            return f"a thread's tile of {nbytes} bytes is not a line that cp.async copies"
        if not request.divides:
            return "the tiles do not divide among the producer's threads"
        return "cp.async copies to one block alone" if request.spec.cluster.shares else None

    @classmethod
    def goes_with(cls, other: type[Route]) -> bool:
        return other in (Tma, PlacedTma, CpAsyncLines)


@dataclass(frozen=True)
class CpAsyncProducer(Producer):
    """Threads start the copies of an operand, or of both."""

    reader_fences = True

    @property
    def squeezed_registers(self) -> Registers:
        return WORKING

    @classmethod
    def of(cls, spec: Sm90Spec) -> CpAsyncProducer:
        return cls(spec.producer_warps, 1, spec.tma_bytes)

    def team(self) -> int:
        return thread_index() * 0

    def run(self, spec: Any, inputs: Inputs, rank: int, shape: Any) -> None:
        """Registers hold where this thread's lines begin."""
        a_lines, b_lines = registers(spec.a.distances, spec.a.slots), registers(spec.b.distances, spec.b.slots)
        fill_stages(spec, inputs, rank, shape, (a_lines, b_lines, uniform(udiv(thread_index(), 32))), ())

    def begin(self, spec: Any, inputs: Inputs, work: Work, kept: Any) -> None:
        a_lines, b_lines, warp = kept
        if not spec.a.route.uses_tma:
            find_lines(spec.a, a_lines, inputs.a.data, work.m, warp)
        if not spec.b.route.uses_tma:
            find_lines(spec.b, b_lines, inputs.b.data, work.n, warp)

    def fill(self, spec: Any, inputs: Inputs, slot: Slot, at: KTile, kept: Any, state: Any) -> Any:
        a_lines, b_lines, warp = kept
        acquire(spec, inputs, slot, at)
        if not spec.a.route.uses_tma:
            copy_lines(spec, spec.a, a_lines, inputs.a.data, slot, at, warp)
        if not spec.b.route.uses_tma:
            copy_lines(spec, spec.b, b_lines, inputs.b.data, slot, at, warp)
        copies_arrive(spec.pipeline.full(), slot.stage)
        return state


def find_lines(operand: Any, lines: Any, data: Any, at: int, warp: int) -> None:
    """Where the lines along K begin (rows of A, columns of B) that a thread copies from."""
    across = 1 - operand.k_axis
    warp_tiles = parallelise(operand.tile, operand.warp, warp, operand.warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            lines[i * len(thread_tiles) + j] = (operand.distance(data, at + thread_tiles[j].index[across], across),)


def copy_lines(spec: Sm90Spec, operand: Any, lines: Any, data: Any, slot: Slot, at: KTile, warp: int) -> None:
    """Extents are multiples of a thread's tile, so it is wholly in range or wholly out."""
    pointer, place = stage_of(spec, operand, slot), place_of(operand, at)
    warp_tiles = parallelise(operand.tile, operand.warp, warp, operand.warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            tile = thread_tiles[j]
            row, column = place.i + tile.index[0], place.j + tile.index[1]
            along = operand.distance(data, column if operand.k_axis == 1 else row, operand.k_axis)
            is_there = row < place.rows and column < place.columns
            if operand.layout.is_padded:
                is_there = is_there and operand.layout.contains(row, column)
            copy_async(pointer, operand.shared.position(tile.index, operand.leading()), 0, data,
                       lines[i * len(thread_tiles) + j][0] + along, tile.count, is_there)
