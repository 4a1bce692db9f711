"""Step 1 of `warp_specialised`: the producer fills the ring's stages with tiles of A and B."""

from __future__ import annotations

from typing import Any, NamedTuple

from gemmkit.kernels.inplace import change_stage
from gemmkit.kernels.parts import (
    copy_to_shared,
    put_elements,
    put_words,
    read_inside,
    read_line,
    read_packed,
    read_words,
    transform_into,
)
from gemmkit.kernels.walk import BARRIERS, first_tile, holds, k_blocks, next_stage, tile_count, tile_place, tile_step
from gemmkit.kernels.work import Slot as RingSlot
from gemmkit.lang.control import choose
from gemmkit.lang.pairs import is_pairwise, transform_pairs
from gemmkit.lang.registers import registers
from gemmkit.ptx.mbarrier import mbarrier_arrive, mbarrier_expect, mbarrier_wait
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import lane_index, rolled, thread_index, udiv, uniform
from gemmkit.ptx.tma import tma_load, tma_load_multicast
from gemmkit.ptx.warpgroup import fence_async
from gemmkit.ptx.words import pack_words, unpack_words
from gemmkit.tiling import parallelise, translate


class Inputs(NamedTuple):
    """The operands in global memory, and their tensor maps."""

    a: Any
    b: Any
    map_a: Any
    map_b: Any


class Slot(NamedTuple):
    """A stage of the ring: its barriers, its index and the phase to wait for."""

    full: Any
    empty: Any
    stage: Any
    phase: Any


class Block(NamedTuple):
    """Where a stage's tiles lie in the operands; ``rank`` is the thread block's in its cluster, ``warp`` the team's."""

    m: Any
    n: Any
    k: Any
    rank: Any
    warp: Any
    shape: Any


def produce_by_engine(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, rank: int,
                      shape: Any) -> None:
    """Both operands by the copy engine: one thread does it all."""
    if thread_index() == 0:
        produce(spec, Inputs(a, b, map_a, map_b), full, empty, thread_index() * 0, rank, shape)


def produce_by_warps(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, rank: int,
                     shape: Any) -> None:
    """An operand, or both, by the producer's warps, in teams that take turns at the stages.

    A fence waits for all that a thread has on its way, its loads too. So no thread loads for the next stage while it stores
    this one's; another team does.
    """
    team = udiv(uniform(udiv(thread_index(), 32)), spec.team_warps)
    produce(spec, Inputs(a, b, map_a, map_b), full, empty, team, rank, shape)


def produce(spec: Any, inputs: Any, full: Any, empty: Any, team: int, rank: int, shape: Any) -> None:
    """For every tile of D, for every block along K: wait until the next stage is empty, and fill it."""
    stage = thread_index() * 0
    turn = stage                                       # whose stage it is
    phase = stage + 1                                  # nothing has been in the ring: its first round waits for nobody
    brought = (stage, stage, stage, stage, stage)      # a stage that this team has yet to change, and its tiles' place
    is_behind = stage
    tile, tiles, step = first_tile(spec), tile_count(spec, shape), tile_step(spec)
    while tile < tiles:
        m, n = tile_place(spec, tile, rank, shape)
        begin, count = k_blocks(spec, m, n, rank, shape)
        block = count * 0
        while block < count:
            k = begin + block * spec.block.size.K
            if holds(spec, m, n, k):
                if turn == team:
                    slot = Slot(full, empty, stage, phase)
                    if spec.is_changing:
                        is_behind, brought = bring_stage(spec, inputs, slot, Block(m, n, k, rank, 0, shape), is_behind,
                                                         brought)
                    elif spec.is_working:
                        warp = uniform(udiv(thread_index(), 32)) % spec.team_warps
                        fill_stage(spec, inputs, slot, Block(m, n, k, rank, warp, shape))
                    else:
                        copy_stage(spec, inputs, slot, Block(m, n, k, rank, 0, shape))
                turn = (turn + 1) % spec.teams
                stage, phase = next_stage(spec, RingSlot(stage, phase))
            block = rolled(block + 1)                  # unrolled, its addresses would fill the few registers
        tile += step
    if spec.is_changing:
        change_last(spec, full, is_behind, brought, shape)


def bring_stage(spec: Any, inputs: Any, slot: Any, at: Any, is_behind: int, brought: tuple) -> tuple:
    """By the engine, for a team that transforms it in place: a turn later, when it has landed. Consumers give a stage back
    when they have the next: of two stages the last must be changed before the next can be asked for."""
    if spec.stages <= 2:
        change_last(spec, slot.full, is_behind, brought, at.shape)
    if thread_index() % (32 * spec.team_warps) == 0:
        copy_stage(spec, inputs, Slot(shared(BARRIERS, spec.landed_offset), slot.empty, slot.stage, slot.phase), at)
    if spec.stages > 2:
        change_last(spec, slot.full, is_behind, brought, at.shape)
    return 1, (slot.stage, slot.phase ^ 1, at.m, at.n, at.k)


def change_last(spec: Any, full: Any, is_behind: int, brought: tuple, shape: Any) -> None:
    if is_behind == 1:
        change_stage(spec, full, brought, shape)


def copy_stage(spec: Any, inputs: Any, slot: Any, at: Any) -> None:
    """By the engine, which tells ``full`` itself when the bytes are there."""
    mbarrier_wait(slot.empty, slot.stage, slot.phase)
    mbarrier_expect(slot.full, slot.stage, spec.expected_bytes)
    load_a(spec, inputs.map_a, slot.full, slot.stage, at.m, at.k, at.rank)
    load_b(spec, inputs.map_b, slot.full, slot.stage, at.n, at.k, at.rank)


def fill_stage(spec: Any, inputs: Any, slot: Any, at: Any) -> None:
    """By a team of the producer's warps."""
    size, shape = spec.block.size, at.shape
    if spec.holds_whole:
        fill_from_registers(spec, inputs, slot, at, False)
    elif at.m + size.M <= shape.M and at.n + size.N <= shape.N and at.k + size.K <= shape.K:
        if spec.holds:
            fill_from_registers(spec, inputs, slot, at, True)
        else:                                          # they do not fit the registers all at once, or are less than a word
            acquire(spec, inputs, slot, at)
            if not spec.a_engine:
                copy_inside(spec.a, inputs.a, a_stage(spec, slot.stage), spec.block.MK, at.m, at.k, spec, at.warp, shape)
            if not spec.b_engine:
                copy_inside(spec.b, inputs.b, b_stage(spec, slot.stage), spec.block.KN, at.k, at.n, spec, at.warp, shape)
    else:
        acquire(spec, inputs, slot, at)
        if not spec.a_engine:
            copy_to_shared(spec.a, 0, inputs.a, a_stage(spec, slot.stage), spec.block.MK, at.m, at.k, shape.M, shape.K,
                           spec.operator.identity, at.warp, spec.team_warps, shape)
        if not spec.b_engine:
            copy_to_shared(spec.b, 0, inputs.b, b_stage(spec, slot.stage), spec.block.KN, at.k, at.n, shape.K, shape.N,
                           spec.operator.identity, at.warp, spec.team_warps, shape)
    fence_async()                                      # tensor cores read through another way than threads write
    mbarrier_arrive(slot.full, slot.stage)


def fill_from_registers(spec: Any, inputs: Any, slot: Any, at: Any, is_inside: bool) -> None:
    """All loads go out before the wait for the stage; registers hold what they bring. Unless the stage is known to lie
    inside, each of the threads' tiles is wholly in range or wholly out, and then zeros."""
    a_held, b_held = registers(spec.a.words, spec.a_slots), registers(spec.b.words, spec.b_slots)
    if not spec.a_engine:
        load_held(spec.a, a_held, inputs.a, spec.block.MK, at.m, at.k, at.shape.M, at.shape.K, spec, at, is_inside)
    if not spec.b_engine:
        load_held(spec.b, b_held, inputs.b, spec.block.KN, at.k, at.n, at.shape.K, at.shape.N, spec, at, is_inside)
    acquire(spec, inputs, slot, at)
    if not spec.a_engine:
        put_inside(spec.a, a_held, a_stage(spec, slot.stage), spec.block.MK, at.m, at.k, spec, at.warp, spec.team_warps)
    if not spec.b_engine:
        put_inside(spec.b, b_held, b_stage(spec, slot.stage), spec.block.KN, at.k, at.n, spec, at.warp, spec.team_warps)


def acquire(spec: Any, inputs: Any, slot: Any, at: Any) -> None:
    """Wait until the stage is empty, and start the copies that the engine makes."""
    mbarrier_wait(slot.empty, slot.stage, slot.phase)
    start_copies(spec, inputs.map_a, inputs.map_b, slot.full, slot.stage, at.m, at.n, at.k, at.rank)


def start_copies(spec: Any, map_a: Any, map_b: Any, full: Any, stage: int, m: int, n: int, k: int, rank: int) -> None:
    """The operand that the engine moves beside one that it does not, by a team's first thread."""
    if thread_index() % (32 * spec.team_warps) == 0:
        if spec.expected_bytes > 0:
            mbarrier_expect(full, stage, spec.expected_bytes)
        if spec.a_engine:
            load_a(spec, map_a, full, stage, m, k, rank)
        if spec.b_engine:
            load_b(spec, map_b, full, stage, n, k, rank)


def load_held(operand: Any, held: Any, data: Any, block: Any, at_i: int, at_j: int, rows: int, columns: int, spec: Any,
              at: Any, is_inside: bool) -> None:
    """Load all of a thread's tiles as words: raw, or finished and packed; or masked, zeros for those out of range."""
    warp_tiles = parallelise(block, operand.warp, at.warp, spec.team_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            place = translate(thread_tiles[j], at_i, at_j)
            if not is_inside:
                words = read_words(operand, data, place, rows, columns, spec.operator.identity, at.shape)
            elif operand.is_raw:
                words = read_line(operand, data, place, at.shape)
            elif operand.is_packed:
                words = read_packed(operand, data, place, at.shape)
            else:
                words = pack_words(read_inside(operand, data, place, at.shape))
            held[i * len(thread_tiles) + j] = words


def put_inside(operand: Any, held: Any, pointer: Any, block: Any, at_i: int, at_j: int, spec: Any, warp: int,
               warps: int) -> None:
    """Store what `load_held` loaded; what is raw is transformed now."""
    warp_tiles = parallelise(block, operand.warp, warp, warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            words, leading = held[i * len(thread_tiles) + j], operand.shared.leading(block.size)
            if operand.is_raw and not operand.is_direct:
                put_transformed(operand, pointer, thread_tiles[j], leading, words, at_i, at_j)
            else:
                put_words(operand, pointer, thread_tiles[j], leading, words)


def put_transformed(operand: Any, pointer: Any, tile: Any, leading: int, words: tuple, at_i: int, at_j: int) -> None:
    if operand.same_dtype:
        choose(is_pairwise(operand.to_shared, operand.layout.dtype), put_pairwise, put_singly, operand, pointer, tile,
               leading, words, at_i, at_j)
    else:
        put_singly(operand, pointer, tile, leading, words, at_i, at_j)


def put_pairwise(operand: Any, pointer: Any, tile: Any, leading: int, words: tuple, at_i: int, at_j: int) -> None:
    changed = transform_pairs(operand.to_shared, operand.layout.dtype, words)
    if operand.same_axis:
        put_words(operand, pointer, tile, leading, changed)
    else:
        put_elements(operand, pointer, tile, leading, unpack_words(operand.shared.dtype, changed))


def put_singly(operand: Any, pointer: Any, tile: Any, leading: int, words: tuple, at_i: int, at_j: int) -> None:
    values = transform_into(operand, unpack_words(operand.layout.dtype, words), translate(tile, at_i, at_j))
    put_elements(operand, pointer, tile, leading, values)


def copy_inside(operand: Any, data: Any, pointer: Any, block: Any, at_i: int, at_j: int, spec: Any, warp: int,
                shape: Any) -> None:
    """Tile by tile, all in range."""
    warp_tiles = parallelise(block, operand.warp, warp, spec.team_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            put_elements(operand, pointer, thread_tiles[j], operand.shared.leading(block.size),
                         read_inside(operand, data, translate(thread_tiles[j], at_i, at_j), shape))


def a_stage(spec: Any, stage: int) -> Any:
    """Where A's tile of a stage begins in shared memory."""
    return shared(spec.a.shared.dtype, stage * spec.stage_bytes)


def b_stage(spec: Any, stage: int) -> Any:
    return shared(spec.b.shared.dtype, stage * spec.stage_bytes + spec.b_offset)


# -- the copy engine --------------------------------------------------------------------------------------------------

def load_a(spec: Any, map_a: Any, full: Any, stage: int, m: int, k: int, rank: int) -> None:
    load_tile(spec, spec.a_copy, map_a, shared(spec.a.plane.dtype, 0), stage * spec.a_stage, full, stage, m, k, rank)


def load_b(spec: Any, map_b: Any, full: Any, stage: int, n: int, k: int, rank: int) -> None:
    load_tile(spec, spec.b_copy, map_b, shared(spec.b.plane.dtype, spec.b_offset), stage * spec.b_stage, full, stage, n,
              k, rank)


def load_tile(spec: Any, copy: Any, tensor_map: Any, pointer: Any, position: int, full: Any, stage: int, mn: int, k: int,
              rank: int) -> None:
    """A tile of an operand, panel by panel; in a cluster that shares it, this block's part, to all."""
    along, across = (k, mn) if copy.along_k else (mn, k)
    for plane in range(copy.planes):
        for panel in range(copy.panels):
            x, y, to = along + panel * copy.along, across, position + plane * copy.plane + panel * copy.step
            if copy.is_shared:
                x, y, to = x + rank * copy.part_along, y + rank * copy.part_across, to + rank * copy.part
            coordinates: tuple = (x, y, plane) if copy.planes > 1 else (x, y)
            if copy.is_shared:
                tma_load_multicast(tensor_map, coordinates, pointer, to, full, stage, spec.everyone)
            else:
                tma_load(tensor_map, coordinates, pointer, to, full, stage)


__all__ = ["load_a", "load_b", "load_tile", "produce_by_engine", "produce_by_warps", "put_inside"]
