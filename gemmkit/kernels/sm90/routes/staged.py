"""The route of any operand: producer warps load tiles into registers, with the code of the components, and store them.

A fence waits for all that a thread has on its way, its loads too. So no thread loads for the next stage while it stores
this one's: another team does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from gemmkit.kernels.common.elements import transform_into
from gemmkit.kernels.common.operand import Route
from gemmkit.kernels.common.tile_copy import (
    copy_in_turn,
    put_elements,
    put_words,
    read_inside,
    read_line,
    read_packed,
    read_words,
)
from gemmkit.kernels.common.work import Inputs, KTile, Place, Slot
from gemmkit.kernels.sm90.producer import Producer, acquire, place_of, stage_of
from gemmkit.kernels.sm90.routes.request import Request
from gemmkit.kernels.sm90.routes.tma import Tma
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.pairs import is_pairwise, transform_pairs
from gemmkit.lang.registers import registers
from gemmkit.ptx.special import lane_index, thread_index, udiv, uniform
from gemmkit.ptx.warpgroup import fence_async
from gemmkit.ptx.words import pack_words, unpack_words
from gemmkit.tiling import parallelise, translate

CLIPPED, TOGETHER = 24, 40             # words of an operand, and of both, that a thread loads at an edge at once: with more
#                                        threads spill


@dataclass(frozen=True)
class Staged(Route):
    """A producer's threads load and store the operand."""

    @classmethod
    def of(cls, request: Request) -> Staged:
        return cls()

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        return None

    @classmethod
    def goes_with(cls, other: type[Route]) -> bool:
        return other in (Tma, Staged)


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
    def of(cls, spec: Any) -> StagedProducer:
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

    def fill(self, spec: Any, inputs: Inputs, slot: Slot, at: KTile, kept: Any, state: Any) -> Any:
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


def fill_from_registers(spec: Any, inputs: Inputs, slot: Slot, at: KTile, warp: int, is_inside: bool) -> None:
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


def copy_clipped(spec: Any, operand: Any, data: Any, slot: Slot, at: KTile, warp: int) -> None:
    """A stage at an edge, an operand after the other: what is loaded anywhere takes more registers."""
    held = registers(operand.words, operand.slots)
    load_held(spec, operand, held, data, at, warp, False)
    put_held(operand, held, stage_of(spec, operand, slot), place_of(operand, at), warp)


def load_held(spec: Any, operand: Any, held: Any, data: Any, at: KTile, warp: int, is_inside: bool) -> None:
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


def put_held(operand: Any, held: Any, pointer: Any, place: Place, warp: int) -> None:
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


def put_transformed(operand: Any, pointer: Any, tile: Any, words: tuple, place: Place) -> None:
    if operand.same_dtype and is_pairwise(operand.to_shared, operand.layout.dtype):
        changed = transform_pairs(operand.to_shared, operand.layout.dtype, words)
        if operand.same_axis:
            put_words(operand, pointer, tile, changed)
        else:
            put_elements(operand, pointer, tile, unpack_words(operand.shared.dtype, changed))
    else:
        values = transform_into(operand, unpack_words(operand.layout.dtype, words), translate(tile, place.i, place.j))
        put_elements(operand, pointer, tile, values)


def copy_inside(operand: Any, data: Any, pointer: Any, place: Place, warp: int, shape: Any) -> None:
    """Tile by tile, all in range."""
    warp_tiles = parallelise(operand.tile, operand.warp, warp, operand.warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            put_elements(operand, pointer, thread_tiles[j],
                         read_inside(operand, data, translate(thread_tiles[j], place.i, place.j), shape))
