"""Step 1 of `warp_specialised`: the producer fills the ring's stages with tiles of A and B."""

from __future__ import annotations

from typing import Any

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
from gemmkit.lang.control import choose, keep
from gemmkit.lang.pairs import is_pairwise, transform_pairs
from gemmkit.lang.registers import registers
from gemmkit.ptx.mbarrier import mbarrier_arrive, mbarrier_expect, mbarrier_wait
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import lane_index, rolled, thread_index, udiv, uniform
from gemmkit.ptx.tma import tma_load, tma_load_multicast
from gemmkit.ptx.warpgroup import fence_async
from gemmkit.ptx.words import pack_words, unpack_words
from gemmkit.tiling import parallelise, translate


def produce_by_engine(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, rank: int,
                      shape: Any) -> None:
    """Both operands by the copy engine: one thread does it all."""
    if thread_index() == 0:
        produce(spec, a, b, map_a, map_b, full, empty, thread_index() * 0, rank, shape)


def produce_by_warps(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, rank: int,
                     shape: Any) -> None:
    """An operand, or both, by the producer's warps, in teams that take turns at the stages.

    A fence waits for all that a thread has on its way, its loads too. So no thread loads for the next stage while it stores
    this one's; another team does.
    """
    team = udiv(uniform(udiv(thread_index(), 32)), spec.team_warps)
    produce(spec, a, b, map_a, map_b, full, empty, team, rank, shape)


def produce(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, team: int, rank: int,
            shape: Any) -> None:
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
                    is_behind, brought = choose(spec.is_changing, bring_stage, serve_stage, spec, a, b, map_a, map_b, full,
                                                empty, stage, phase, m, n, k, rank, shape, is_behind, brought)
                turn = (turn + 1) % spec.teams
                stage, phase = next_stage(spec, stage, phase)
            block = rolled(block + 1)                  # unrolled, its addresses would fill the few registers
        tile += step
    choose(spec.is_changing, change_last, keep, spec, full, is_behind, brought, shape)


def serve_stage(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, stage: int, phase: int, m: int,
                n: int, k: int, rank: int, shape: Any, is_behind: int, brought: tuple) -> tuple:
    choose(spec.is_working, fill_stage, copy_stage, spec, a, b, map_a, map_b, full, empty, stage, phase, m, n, k, rank,
           shape)
    return is_behind, brought


def bring_stage(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, stage: int, phase: int, m: int,
                n: int, k: int, rank: int, shape: Any, is_behind: int, brought: tuple) -> tuple:
    """By the engine, for a team that transforms it in place: a turn later, when it has landed. Consumers give a stage back
    when they have the next: of two stages the last must be changed before the next can be asked for."""
    choose(spec.stages > 2, keep, change_last, spec, full, is_behind, brought, shape)
    if thread_index() % (32 * spec.team_warps) == 0:
        copy_stage(spec, a, b, map_a, map_b, shared(BARRIERS, spec.landed_offset), empty, stage, phase, m, n, k, rank, shape)
    choose(spec.stages > 2, change_last, keep, spec, full, is_behind, brought, shape)
    return 1, (stage, phase ^ 1, m, n, k)


def change_last(spec: Any, full: Any, is_behind: int, brought: tuple, shape: Any) -> None:
    if is_behind == 1:
        change_stage(spec, full, brought, shape)


def copy_stage(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, stage: int, phase: int, m: int,
               n: int, k: int, rank: int, shape: Any) -> None:
    """By the engine, which tells ``full`` itself when the bytes are there."""
    mbarrier_wait(empty, stage, phase)
    mbarrier_expect(full, stage, spec.expected_bytes)
    load_a(spec, map_a, full, stage, m, k, rank)
    load_b(spec, map_b, full, stage, n, k, rank)


def fill_stage(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, stage: int, phase: int, m: int,
               n: int, k: int, rank: int, shape: Any) -> None:
    """By a team of the producer's warps."""
    warp = uniform(udiv(thread_index(), 32)) % spec.team_warps
    choose(spec.holds_whole, fill_masked, fill_by_range, spec, a, b, map_a, map_b, full, empty, stage, phase, m, n, k, rank,
           warp, shape)
    fence_async()                                      # tensor cores read through another way than threads write
    mbarrier_arrive(full, stage)


def fill_by_range(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, stage: int, phase: int, m: int,
                  n: int, k: int, rank: int, warp: int, shape: Any) -> None:
    size = spec.block.size
    if m + size.M <= shape.M and n + size.N <= shape.N and k + size.K <= shape.K:
        choose(spec.holds, fill_ahead, fill_inside, spec, a, b, map_a, map_b, full, empty, stage, phase, m, n, k, rank, warp,
               shape)
    else:
        mbarrier_wait(empty, stage, phase)
        start_copies(spec, map_a, map_b, full, stage, m, n, k, rank)
        choose(spec.a_engine, keep, fill_edge, spec.a, a, a_stage(spec, stage), spec.block.MK, m, k, shape.M, shape.K,
               spec, warp, shape)
        choose(spec.b_engine, keep, fill_edge, spec.b, b, b_stage(spec, stage), spec.block.KN, k, n, shape.K, shape.N,
               spec, warp, shape)


def fill_masked(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, stage: int, phase: int, m: int,
                n: int, k: int, rank: int, warp: int, shape: Any) -> None:
    """As `fill_ahead`, of threads' tiles of which each is wholly in range or wholly out."""
    a_held, b_held = registers(spec.a.words, spec.a_slots), registers(spec.b.words, spec.b_slots)
    choose(spec.a_engine, keep, hold_masked, spec.a, a_held, a, spec.block.MK, m, k, shape.M, shape.K, spec, warp, shape)
    choose(spec.b_engine, keep, hold_masked, spec.b, b_held, b, spec.block.KN, k, n, shape.K, shape.N, spec, warp, shape)
    put_held(spec, a_held, b_held, map_a, map_b, full, empty, stage, phase, m, n, k, rank, warp)


def fill_ahead(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, stage: int, phase: int, m: int,
               n: int, k: int, rank: int, warp: int, shape: Any) -> None:
    """All loads go out before the wait for the stage; registers hold what they bring."""
    a_held, b_held = registers(spec.a.words, spec.a_slots), registers(spec.b.words, spec.b_slots)
    choose(spec.a_engine, keep, hold_inside, spec.a, a_held, a, spec.block.MK, m, k, spec, warp, shape)
    choose(spec.b_engine, keep, hold_inside, spec.b, b_held, b, spec.block.KN, k, n, spec, warp, shape)
    put_held(spec, a_held, b_held, map_a, map_b, full, empty, stage, phase, m, n, k, rank, warp)


def put_held(spec: Any, a_held: Any, b_held: Any, map_a: Any, map_b: Any, full: Any, empty: Any, stage: int, phase: int,
             m: int, n: int, k: int, rank: int, warp: int) -> None:
    mbarrier_wait(empty, stage, phase)
    start_copies(spec, map_a, map_b, full, stage, m, n, k, rank)
    choose(spec.a_engine, keep, put_inside, spec.a, a_held, a_stage(spec, stage), spec.block.MK, m, k, spec, warp,
           spec.team_warps)
    choose(spec.b_engine, keep, put_inside, spec.b, b_held, b_stage(spec, stage), spec.block.KN, k, n, spec, warp,
           spec.team_warps)


def fill_inside(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, stage: int, phase: int, m: int,
                n: int, k: int, rank: int, warp: int, shape: Any) -> None:
    """Threads' tiles that do not fit the registers all at once, or are smaller than a word."""
    mbarrier_wait(empty, stage, phase)
    start_copies(spec, map_a, map_b, full, stage, m, n, k, rank)
    choose(spec.a_engine, keep, copy_inside, spec.a, a, a_stage(spec, stage), spec.block.MK, m, k, spec, warp, shape)
    choose(spec.b_engine, keep, copy_inside, spec.b, b, b_stage(spec, stage), spec.block.KN, k, n, spec, warp, shape)


def start_copies(spec: Any, map_a: Any, map_b: Any, full: Any, stage: int, m: int, n: int, k: int, rank: int) -> None:
    """The operand that the engine moves beside one that it does not, by a team's first thread."""
    if thread_index() % (32 * spec.team_warps) == 0:
        choose(spec.expected_bytes > 0, mbarrier_expect, keep, full, stage, spec.expected_bytes)
        choose(spec.a_engine, load_a, keep, spec, map_a, full, stage, m, k, rank)
        choose(spec.b_engine, load_b, keep, spec, map_b, full, stage, n, k, rank)


def hold_inside(operand: Any, held: Any, data: Any, block: Any, at_i: int, at_j: int, spec: Any, warp: int,
                shape: Any) -> None:
    """Load all of a thread's tiles: raw, or finished and packed."""
    warp_tiles = parallelise(block, operand.warp, warp, spec.team_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            held[i * len(thread_tiles) + j] = choose(operand.is_raw, read_line, load_finished, operand, data,
                                                     translate(thread_tiles[j], at_i, at_j), shape)


def hold_masked(operand: Any, held: Any, data: Any, block: Any, at_i: int, at_j: int, rows: int, columns: int, spec: Any,
                warp: int, shape: Any) -> None:
    """Load all of a thread's tiles as words, zeros for those out of range."""
    warp_tiles = parallelise(block, operand.warp, warp, spec.team_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            held[i * len(thread_tiles) + j] = read_words(operand, data, translate(thread_tiles[j], at_i, at_j), rows,
                                                         columns, spec.operator.identity, shape)


def load_finished(operand: Any, data: Any, tile: Any, shape: Any) -> tuple:
    return choose(operand.is_packed, read_packed, read_finished, operand, data, tile, shape)


def read_finished(operand: Any, data: Any, tile: Any, shape: Any) -> tuple:
    return pack_words(read_inside(operand, data, tile, shape))


def put_inside(operand: Any, held: Any, pointer: Any, block: Any, at_i: int, at_j: int, spec: Any, warp: int,
               warps: int) -> None:
    """Store what `hold_inside` loaded; what is raw is transformed now."""
    warp_tiles = parallelise(block, operand.warp, warp, warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            choose(operand.is_raw, put_raw, put_packed, operand, pointer, thread_tiles[j],
                   operand.shared.leading(block.size), held[i * len(thread_tiles) + j], at_i, at_j)


def put_raw(operand: Any, pointer: Any, tile: Any, leading: int, words: tuple, at_i: int, at_j: int) -> None:
    choose(operand.is_direct, put_packed, put_transformed, operand, pointer, tile, leading, words, at_i, at_j)


def put_packed(operand: Any, pointer: Any, tile: Any, leading: int, words: tuple, at_i: int, at_j: int) -> None:
    put_words(operand, pointer, tile, leading, words)


def put_transformed(operand: Any, pointer: Any, tile: Any, leading: int, words: tuple, at_i: int, at_j: int) -> None:
    choose(operand.same_dtype, put_changed, put_singly, operand, pointer, tile, leading, words, at_i, at_j)


def put_changed(operand: Any, pointer: Any, tile: Any, leading: int, words: tuple, at_i: int, at_j: int) -> None:
    choose(is_pairwise(operand.to_shared, operand.layout.dtype), put_pairwise, put_singly, operand, pointer, tile, leading,
           words, at_i, at_j)


def put_pairwise(operand: Any, pointer: Any, tile: Any, leading: int, words: tuple, at_i: int, at_j: int) -> None:
    changed = transform_pairs(operand.to_shared, operand.layout.dtype, words)
    choose(operand.same_axis, put_words, put_unpacked, operand, pointer, tile, leading, changed)


def put_unpacked(operand: Any, pointer: Any, tile: Any, leading: int, words: tuple) -> None:
    put_elements(operand, pointer, tile, leading, unpack_words(operand.shared.dtype, words))


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


def fill_edge(operand: Any, data: Any, pointer: Any, block: Any, at_i: int, at_j: int, rows: int, columns: int, spec: Any,
              warp: int, shape: Any) -> None:
    """A tile that may be partly out of range, masked."""
    copy_to_shared(operand, 0, data, pointer, block, at_i, at_j, rows, columns, spec.operator.identity, warp,
                   spec.team_warps, shape)


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
    along, across = choose(copy.along_k, swapped, paired, mn, k)
    for plane in range(copy.planes):
        for panel in range(copy.panels):
            choose(copy.is_shared, load_for_all, load_for_one, spec, copy, tensor_map, pointer,
                   position + plane * copy.plane + panel * copy.step, along + panel * copy.along, across, plane, full, stage,
                   rank)


def load_for_one(spec: Any, copy: Any, tensor_map: Any, pointer: Any, position: int, along: int, across: int, plane: int,
                 full: Any, stage: int, rank: int) -> None:
    tma_load(tensor_map, choose(copy.planes > 1, tripled, paired, along, across, plane), pointer, position, full, stage)


def load_for_all(spec: Any, copy: Any, tensor_map: Any, pointer: Any, position: int, along: int, across: int, plane: int,
                 full: Any, stage: int, rank: int) -> None:
    along, across = along + rank * copy.part_along, across + rank * copy.part_across
    tma_load_multicast(tensor_map, choose(copy.planes > 1, tripled, paired, along, across, plane), pointer,
                       position + rank * copy.part, full, stage, spec.everyone)


def tripled(first: int, second: int, third: int) -> tuple:
    return first, second, third


def paired(first: int, second: int, third: int = 0) -> tuple:
    return first, second


def swapped(first: int, second: int) -> tuple:
    return second, first


__all__ = ["load_a", "load_b", "load_tile", "produce_by_engine", "produce_by_warps", "put_inside"]
