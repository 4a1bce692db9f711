"""The route of plain operands: TMA copies boxes of a matrix into swizzled tiles, and one thread starts it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from gemmkit.components import Component
from gemmkit.kernels.collectives.operand import Operand, Route
from gemmkit.kernels.collectives.scheduler import Cluster, Inputs, KTile, Slot
from gemmkit.kernels.sm90.kernel import STARTING, STREAMING, Producer, Registers, fill_stages, start_copies
from gemmkit.lang.components import dataclass
from gemmkit.lang.registers import each, join
from gemmkit.layouts import ColumnInterleaved, Joined, Planar
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import thread_index, udiv
from gemmkit.ptx.tma import tma_load, tma_load_multicast, tma_prefetch
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.tensor_maps import TensorMapSpec, why_not

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

    @classmethod
    def in_panels(cls, operand: Operand, cluster: Cluster) -> TmaCopy:
        """Swizzled panels, of which each block of a cluster that shares the operand loads a part."""
        layout: Any = operand.brought
        k_axis = operand.k_axis
        is_shared = cluster.shares_a if k_axis == 1 else cluster.shares_b
        peers = cluster.n if k_axis == 1 else cluster.m              # each of which loads a part
        depth, across = operand.tile.extents[k_axis], operand.tile.extents[1 - k_axis]
        planes = 1 if operand.in_panels else operand.planes
        plane = planes, int(layout.physical_size(*operand.tile.extents)), layout.width
        if layout.axis == k_axis:                                    # lines along K: the parts are some lines of each panel
            return cls(layout.line, across // peers, depth // layout.line, across * layout.line, layout.line,
                       across // peers * layout.line, 0, across // peers, is_shared, True, *plane)
        panels = across // layout.line // peers                      # lines across K: the parts are some of the panels
        return cls(layout.line, depth, panels, depth * layout.line, layout.line, panels * depth * layout.line,
                   panels * layout.line, 0, is_shared, False, *plane)

    @classmethod
    def whole(cls, operand: Operand) -> TmaCopy:
        """The tile as it lies in global memory, in one box without a swizzle."""
        axis = operand.plane.axis
        line, lines = operand.tile.extents[axis], operand.tile.extents[1 - axis]
        return cls(line, lines, 1, 0, 0, 0, 0, 0, False, axis == operand.k_axis, 1, 0, 0)


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
        return cls(TmaCopy.in_panels(request.operand, request.spec.cluster))

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


def matrix_at(spec: Sm90Spec, operand: Operand, batch: int) -> tuple:
    """Where a product's matrix of A or B lies in a stack: its coordinates behind those of rows, columns and planes."""
    if operand.k_axis == 1:
        return spec.scheduler.stack.a.coordinates(batch)
    return spec.scheduler.stack.b.coordinates(batch)


@dataclass(frozen=True)
class TmaProducer(Producer):
    """TMA moves both operands: one thread does it all. ``streams``: it also finds its parts of a stream of k-tiles, or makes
    lists of them, and needs registers for it."""

    streams: bool = False

    @property
    def registers(self) -> Registers:
        return STREAMING if self.streams else STARTING

    @property
    def squeezed_registers(self) -> Registers:
        return self.registers

    full_arrivals = 1

    @classmethod
    def of(cls, spec: Sm90Spec) -> TmaProducer:
        return cls(spec.producer_warps, 1, spec.tma_bytes, streams=spec.scheduler.stays or not spec.condition.is_always)

    def run(self, spec: Any, inputs: Inputs, rank: int, shape: Any) -> None:
        if thread_index() == 0:
            fill_stages(spec, inputs, rank, shape, (), ())

    def team(self) -> int:
        return thread_index() * 0

    def fill(self, spec: Sm90Spec, inputs: Inputs, slot: Slot, at: KTile, kept: Registers, state: Any) -> Any:
        """TMA tells ``full`` itself when the bytes are there."""
        spec.pipeline.acquire(slot)
        spec.pipeline.expect(slot, self.tma_bytes)
        start_copies(spec, inputs, spec.pipeline.full(), slot, at)
        return state


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
    if route.copy.is_shared:
        if spec.cluster.part(operand.k_axis, fill.at.rank) == n // route.share:
            route.start_boxes(spec, operand, tensor_map, fill, n * route.apart)
    else:
        route.start_boxes(spec, operand, tensor_map, fill, n * route.apart)
