"""The route of operands that TMA does not take, whose neighbours still lie side by side: threads start cp.async copies.

TMA copies boxes of at most five dimensions; an operand of a contraction is a matrix whose rows and columns are made of any
number of them, wherever a tile begins. The producer's threads then start copies of 4 to 16 bytes each (cp.async), and the
hardware arrives on ``full[stage]`` when a thread's have come: no thread waits for global memory, and no register holds what
is on its way. An element's place is the sum of its row's and its column's (`Layout.is_separable`): what stays the same along
K is computed once a tile of D. What is out of range comes as zeros.

The copies write as threads do: consumers fence (`fence_async`) before tensor cores read a stage.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.common.operand import Route, unit_of
from gemmkit.kernels.common.work import Inputs, KTile, Slot, Work
from gemmkit.kernels.sm90.producer import WORKING, Producer, Registers, acquire, fill_stages, place_of, stage_of
from gemmkit.kernels.sm90.routes.request import Request
from gemmkit.kernels.sm90.routes.tma import Tma
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.registers import registers
from gemmkit.ptx.copy_async import SIZES, copies_arrive, copy_async
from gemmkit.ptx.special import lane_index, thread_index, udiv, uniform
from gemmkit.runtime.arrays import alignment, unit_axis
from gemmkit.tiling import parallelise


@dataclass(frozen=True)
class CpAsync(Route):
    """Threads start copies of whole lines of the operand."""

    @classmethod
    def of(cls, request: Request) -> CpAsync:
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
            return f"a thread's tile of {nbytes} bytes is no line that cp.async copies"
        if not request.divides:
            return "the tiles do not divide among the producer's threads"
        return "cp.async copies to one block alone" if request.spec.cluster.shares else None

    @classmethod
    def goes_with(cls, other: type[Route]) -> bool:
        return other in (Tma, CpAsync)


@dataclass(frozen=True)
class CpAsyncProducer(Producer):
    """Threads start the copies of an operand, or of both."""

    reader_fences = True

    @property
    def squeezed_registers(self) -> Registers:
        return WORKING

    @classmethod
    def of(cls, spec: Any) -> CpAsyncProducer:
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


def copy_lines(spec: Any, operand: Any, lines: Any, data: Any, slot: Slot, at: KTile, warp: int) -> None:
    """Extents are multiples of a thread's tile, so it is wholly in range or wholly out."""
    pointer, place = stage_of(spec, operand, slot), place_of(operand, at)
    warp_tiles = parallelise(operand.tile, operand.warp, warp, operand.warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            tile = thread_tiles[j]
            row, column = place.i + tile.index[0], place.j + tile.index[1]
            along = operand.distance(data, column if operand.k_axis == 1 else row, operand.k_axis)
            copy_async(pointer, operand.shared.position(tile.index, operand.leading()), 0, data,
                       lines[i * len(thread_tiles) + j][0] + along, tile.count, row < place.rows and column < place.columns)
