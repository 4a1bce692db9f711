"""Step 1 of `warp_specialised`: the producer fills the ring's stages with tiles of A and B."""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.parts import copy_to_shared, hold, put
from gemmkit.kernels.walk import first_tile, k_blocks, next_stage, tile_count, tile_place, tile_step
from gemmkit.lang.control import choose
from gemmkit.lang.registers import registers
from gemmkit.ptx.mbarrier import mbarrier_arrive, mbarrier_expect, mbarrier_wait
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import rolled, thread_index, udiv, uniform
from gemmkit.ptx.tma import tma_load, tma_load_multicast
from gemmkit.ptx.warpgroup import fence_async


def produce_by_engine(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, rank: int,
                      shape: Any) -> None:
    """Both operands by the copy engine: one thread does it all."""
    if thread_index() == 0:
        produce(spec, a, b, map_a, map_b, full, empty, rank, shape)


def produce_by_warps(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, rank: int,
                     shape: Any) -> None:
    """An operand, or both, by the producer's warps."""
    produce(spec, a, b, map_a, map_b, full, empty, rank, shape)


def produce(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, rank: int, shape: Any) -> None:
    """For every tile of D, for every block along K: wait until the next stage is empty, and fill it."""
    stage = thread_index() * 0
    phase = stage + 1                                  # nothing has been in the ring: its first round waits for nobody
    tile, tiles, step = first_tile(spec), tile_count(spec, shape), tile_step(spec)
    while tile < tiles:
        m, n = tile_place(spec, tile, rank, shape)
        begin, count = k_blocks(spec, m, n, rank, shape)
        block = count * 0
        while block < count:
            k = begin + block * spec.block.size.K
            if spec.condition(m, n, k):
                choose(spec.is_working, fill_stage, copy_stage, spec, a, b, map_a, map_b, full, empty, stage, phase, m, n,
                       k, rank, shape)
                stage, phase = next_stage(spec, stage, phase)
            block = rolled(block + 1)                  # unrolled, its addresses would fill the few registers
        tile += step


def copy_stage(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, stage: int, phase: int, m: int,
               n: int, k: int, rank: int, shape: Any) -> None:
    """By the engine, which tells ``full`` itself when the bytes are there."""
    mbarrier_wait(empty, stage, phase)
    mbarrier_expect(full, stage, spec.expected_bytes)
    load_a(spec, map_a, full, stage, m, k, rank)
    load_b(spec, map_b, full, stage, n, k, rank)


def fill_stage(spec: Any, a: Any, b: Any, map_a: Any, map_b: Any, full: Any, empty: Any, stage: int, phase: int, m: int,
               n: int, k: int, rank: int, shape: Any) -> None:
    """By the producer's warps: what fits their registers is on its way before the stage is empty."""
    warp = uniform(udiv(thread_index(), 32))
    choose(spec.a_engine, skip_operand, fill_a_first, spec, a, empty, stage, phase, m, k, warp, shape)
    mbarrier_wait(empty, stage, phase)
    if thread_index() == 0:
        choose(spec.expected_bytes > 0, mbarrier_expect, skip, full, stage, spec.expected_bytes)
        choose(spec.a_engine, load_a, skip_load, spec, map_a, full, stage, m, k, rank)
        choose(spec.b_engine, load_b, skip_load, spec, map_b, full, stage, n, k, rank)
    choose(spec.b_engine, skip_operand, fill_b, spec, b, empty, stage, phase, n, k, warp, shape)
    fence_async()                                      # tensor cores read through another way than threads write
    mbarrier_arrive(full, stage)


def fill_a_first(spec: Any, a: Any, empty: Any, stage: int, phase: int, m: int, k: int, warp: int, shape: Any) -> None:
    choose(spec.a_moves > 0, fill_a_ahead, fill_a, spec, a, empty, stage, phase, m, k, warp, shape)


def fill_a_ahead(spec: Any, a: Any, empty: Any, stage: int, phase: int, m: int, k: int, warp: int, shape: Any) -> None:
    """A's loads go out before the wait."""
    held = registers(spec.a.held, spec.a_moves)
    hold(spec.a, held, a, spec.block.MK, m, k, shape.M, shape.K, spec.operator.identity, warp, spec.producer_warps, shape)
    mbarrier_wait(empty, stage, phase)
    put(spec.a, held, a_stage(spec, stage), spec.block.MK, warp, spec.producer_warps)


def fill_a(spec: Any, a: Any, empty: Any, stage: int, phase: int, m: int, k: int, warp: int, shape: Any) -> None:
    mbarrier_wait(empty, stage, phase)
    copy_to_shared(spec.a, 0, a, a_stage(spec, stage), spec.block.MK, m, k, shape.M, shape.K, spec.operator.identity, warp,
                   spec.producer_warps, shape)


def fill_b(spec: Any, b: Any, empty: Any, stage: int, phase: int, n: int, k: int, warp: int, shape: Any) -> None:
    copy_to_shared(spec.b, spec.b_moves, b, b_stage(spec, stage), spec.block.KN, k, n, shape.K, shape.N,
                   spec.operator.identity, warp, spec.producer_warps, shape)


def a_stage(spec: Any, stage: int) -> Any:
    """Where A's tile of a stage begins in shared memory."""
    return shared(spec.a.shared.dtype, stage * spec.stage_bytes)


def b_stage(spec: Any, stage: int) -> Any:
    return shared(spec.b.shared.dtype, stage * spec.stage_bytes + spec.b_offset)


# -- the copy engine --------------------------------------------------------------------------------------------------

def load_a(spec: Any, map_a: Any, full: Any, stage: int, m: int, k: int, rank: int) -> None:
    load_tile(spec, spec.a_copy, map_a, shared(spec.a.shared.dtype, 0), stage * spec.a_stage, full, stage, m, k, rank)


def load_b(spec: Any, map_b: Any, full: Any, stage: int, n: int, k: int, rank: int) -> None:
    load_tile(spec, spec.b_copy, map_b, shared(spec.b.shared.dtype, spec.b_offset), stage * spec.b_stage, full, stage, n,
              k, rank)


def load_tile(spec: Any, copy: Any, tensor_map: Any, pointer: Any, position: int, full: Any, stage: int, mn: int, k: int,
              rank: int) -> None:
    """A tile of an operand, panel by panel; in a cluster that shares it, this block's part, to all."""
    along, across = choose(copy.along_k, swapped, paired, mn, k)
    for panel in range(copy.panels):
        choose(copy.is_shared, load_for_all, load_for_one, spec, copy, tensor_map, pointer, position + panel * copy.step,
               along + panel * copy.along, across, full, stage, rank)


def load_for_one(spec: Any, copy: Any, tensor_map: Any, pointer: Any, position: int, along: int, across: int, full: Any,
                 stage: int, rank: int) -> None:
    tma_load(tensor_map, (along, across), pointer, position, full, stage)


def load_for_all(spec: Any, copy: Any, tensor_map: Any, pointer: Any, position: int, along: int, across: int, full: Any,
                 stage: int, rank: int) -> None:
    tma_load_multicast(tensor_map, (along + rank * copy.part_along, across + rank * copy.part_across), pointer,
                       position + rank * copy.part, full, stage, spec.everyone)


def paired(first: int, second: int) -> tuple:
    return first, second


def swapped(first: int, second: int) -> tuple:
    return second, first


def skip(barriers: Any, n: int, nbytes: int) -> None:
    pass


def skip_load(spec: Any, tensor_map: Any, full: Any, stage: int, mn: int, k: int, rank: int) -> None:
    pass


def skip_operand(spec: Any, data: Any, empty: Any, stage: int, phase: int, mn: int, k: int, warp: int, shape: Any) -> None:
    pass


__all__ = ["produce_by_engine", "produce_by_warps"]
