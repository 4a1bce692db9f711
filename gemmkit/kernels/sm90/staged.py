"""The route of any operand: producer warps load tiles into registers, with the code of the components, and store them.

A fence waits for all that a thread has on its way, its loads too. So no thread loads for the next stage while it stores
this one's: another team does.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from gemmkit.kernels.collectives.operand import (
    Operand,
    Route,
    copy_in_turn,
    put_elements,
    put_words,
    read_inside,
    read_line,
    read_packed,
    read_words,
    transform_into,
    unit_of,
)
from gemmkit.kernels.collectives.scheduler import Inputs, KTile, Slot, TileCoord, Work
from gemmkit.kernels.sm90.kernel import WORKING, Producer, Registers, acquire, fill_stages, place_of, stage_of
from gemmkit.kernels.sm90.tma import Request, Tma
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import SharedPointer, View
from gemmkit.lang.pairs import is_pairwise, transform_pairs
from gemmkit.lang.registers import registers
from gemmkit.ptx.copy_async import SIZES, copies_arrive, copy_async
from gemmkit.ptx.memory import pack_words, unpack_words
from gemmkit.ptx.special import lane_index, thread_index, udiv, uniform
from gemmkit.ptx.wgmma import fence_async
from gemmkit.runtime.arrays import alignment, unit_axis
from gemmkit.tiling import Tile, parallelise, translate

if TYPE_CHECKING:
    from gemmkit.kernels.sm90.family import Sm90Spec

CLIPPED, TOGETHER = 24, 40             # words of an operand, and of both, that a thread loads at an edge at once: with more
#                                        threads spill


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
        return other in (Tma, StagedRoute)


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


def put_transformed(operand: Operand, pointer: SharedPointer, tile: Tile, words: tuple, place: TileCoord) -> None:
    if operand.same_dtype and is_pairwise(operand.to_shared, operand.layout.dtype):
        changed = transform_pairs(operand.to_shared, operand.layout.dtype, words)
        if operand.same_axis:
            put_words(operand, pointer, tile, changed)
        else:
            put_elements(operand, pointer, tile, unpack_words(operand.shared.dtype, changed))
    else:
        values = transform_into(operand, unpack_words(operand.layout.dtype, words), translate(tile, place.i, place.j))
        put_elements(operand, pointer, tile, values)


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
        return other in (Tma, CpAsyncLines)


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
            copy_async(pointer, operand.shared.position(tile.index, operand.leading()), 0, data,
                       lines[i * len(thread_tiles) + j][0] + along, tile.count, row < place.rows and column < place.columns)
