"""Step 1 of `warp_specialised` where the copy engine brings an operand and the producer's warps change it where it lies.

They transform its elements; or they turn its tile, where the tensor cores read 8- and 32-bit operands along K alone and it
lies the other way. Then all of a team read the whole tile before any of them writes.

A stage has three barriers then: ``landed`` (the engine has brought it), ``full`` (it is transformed) and ``empty``. A team
asks for its next stage before it works on the last one, so that nobody waits for global memory (with a ring of two it
cannot: the consumers hold the other).
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.parts import column_of, put_elements, put_words, row_of, transform_element_into, transform_into
from gemmkit.kernels.walk import BARRIERS
from gemmkit.lang.control import choose
from gemmkit.lang.pairs import is_pairwise, transform_pairs
from gemmkit.lang.registers import apply, registers
from gemmkit.lang.values import convert
from gemmkit.ptx.mbarrier import mbarrier_arrive, mbarrier_wait
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import lane_index, rolled, thread_index, udiv, uniform
from gemmkit.ptx.warpgroup import fence_async, named_barrier
from gemmkit.ptx.words import pack_words, unpack_words
from gemmkit.tiling import parallelise, translate

TEAM = 10                              # named barriers from 10 on: a team has read what it is to write


def change_stage(spec: Any, full: Any, brought: tuple, shape: Any) -> None:
    """Transform what the engine has brought: ``brought`` are the stage, its phase, and where its tiles lie globally."""
    stage, phase, m, n, k = brought
    number = uniform(udiv(thread_index(), 32))
    warp, team = number % spec.team_warps, udiv(number, spec.team_warps)
    mbarrier_wait(shared(BARRIERS, spec.landed_offset), stage, phase)
    a, b = shared(spec.a.shared.dtype, stage * spec.stage_bytes), shared(spec.b.shared.dtype, stage * spec.stage_bytes
                                                                         + spec.b_offset)
    size = spec.block.size
    if m + size.M <= shape.M and n + size.N <= shape.N and k + size.K <= shape.K:
        if spec.a_changes:
            change_whole(spec.a, a, spec.block.MK, m, k, warp, spec.a_batch, spec)
        if spec.b_changes:
            change_whole(spec.b, b, spec.block.KN, k, n, warp, spec.b_batch, spec)
    else:
        if spec.a_changes:
            change_edge(spec.a, a, spec.block.MK, m, k, shape.M, shape.K, warp, spec)
        if spec.b_changes:
            change_edge(spec.b, b, spec.block.KN, k, n, shape.K, shape.N, warp, spec)
    if spec.a_turns:
        turn(spec.a, a, spec.block.MK, m, k, shape.M, shape.K, warp, team, spec.a_slots, spec)
    if spec.b_turns:
        turn(spec.b, b, spec.block.KN, k, n, shape.K, shape.N, warp, team, spec.b_slots, spec)
    fence_async()                                      # tensor cores read through another way than threads write
    mbarrier_arrive(full, stage)


def change_whole(operand: Any, pointer: Any, block: Any, at_i: int, at_j: int, warp: int, batch: int,
                 spec: Any) -> None:
    """A tile that is wholly in range. Most tiles of a triangular matrix are as they are stored."""
    rows, columns = block.size[0], block.size[1]
    if not operand.is_masked:
        change_inside(operand, pointer, block, at_i, at_j, warp, batch, spec)
    elif operand.layout.is_as_stored(at_i, at_j, rows, columns):
        if not operand.to_shared.is_identity:
            change_inside(operand, pointer, block, at_i, at_j, warp, batch, spec)
    else:
        change_edge(operand, pointer, block, at_i, at_j, at_i + rows, at_j + columns, warp, spec)


def change_inside(operand: Any, pointer: Any, block: Any, at_i: int, at_j: int, warp: int, batch: int,
                  spec: Any) -> None:
    """Some tiles at a time: all are read before the first is written, or each would wait for the last."""
    warp_tiles = parallelise(block, operand.warp, warp, spec.team_warps)
    first = warp * 0
    while first < len(warp_tiles):
        held = registers(operand.words, batch * operand.lane_tiles)
        for i in range(batch):
            thread_tiles = parallelise(warp_tiles[first + i], operand.thread, lane_index(), 32, operand.order)
            for j in range(len(thread_tiles)):
                held[i * len(thread_tiles) + j] = pack_words(
                    operand.shared.load_shared(pointer, thread_tiles[j], operand.shared.leading(block.size)))
        for i in range(batch):
            thread_tiles = parallelise(warp_tiles[first + i], operand.thread, lane_index(), 32, operand.order)
            for j in range(len(thread_tiles)):
                choose(is_pairwise(operand.to_shared, operand.shared.dtype), put_pairs, put_singly, operand, pointer,
                       thread_tiles[j], operand.shared.leading(block.size), held[i * len(thread_tiles) + j], at_i, at_j)
        first = rolled(first + batch)


def put_pairs(operand: Any, pointer: Any, tile: Any, leading: int, words: tuple, at_i: int, at_j: int) -> None:
    put_words(operand, pointer, tile, leading, transform_pairs(operand.to_shared, operand.shared.dtype, words))


def put_singly(operand: Any, pointer: Any, tile: Any, leading: int, words: tuple, at_i: int, at_j: int) -> None:
    values = transform_into(operand, unpack_words(operand.shared.dtype, words), translate(tile, at_i, at_j))
    put_elements(operand, pointer, tile, leading, values)


def change_edge(operand: Any, pointer: Any, block: Any, at_i: int, at_j: int, rows: int, columns: int, warp: int,
                spec: Any) -> None:
    """A tile that is partly out of range: there the engine has put zeros, and the product must meet the identity."""
    warp_tiles = parallelise(block, operand.warp, warp, spec.team_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            tile, leading = thread_tiles[j], operand.shared.leading(block.size)
            values = operand.shared.load_shared(pointer, tile, leading)
            put_elements(operand, pointer, tile, leading, apply(change_element, values, operand,
                                                                translate(tile, at_i, at_j), rows, columns,
                                                                spec.operator.identity))


def turn(operand: Any, pointer: Any, block: Any, at_i: int, at_j: int, rows: int, columns: int, warp: int, team: int,
         slots: int, spec: Any) -> None:
    """Read the team's part of the tile as it came, line by line across K, and store it along K."""
    held = registers(operand.words, slots)
    warp_tiles = parallelise(block, operand.warp, warp, spec.team_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            values = operand.brought.load_shared(pointer, thread_tiles[j], operand.brought.leading(block.size))
            if not operand.to_shared.is_identity:
                values = apply(change_element, values, operand, translate(thread_tiles[j], at_i, at_j), rows, columns,
                               spec.operator.identity)
            held[i * len(thread_tiles) + j] = pack_words(values)
    named_barrier(TEAM + team, 32 * spec.team_warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            put_words(operand, pointer, thread_tiles[j], operand.shared.leading(block.size),
                      held[i * len(thread_tiles) + j])


def change_element(x: Any, n: int, operand: Any, place: Any, rows: int, columns: int, nothing: Any) -> Any:
    i, j = row_of(place, n), column_of(place, n)
    if i < rows and j < columns:
        value = operand.layout.of_stored(x, i, j) if operand.is_masked else x
        return transform_element_into(operand, value, i, j)
    return convert(operand.shared.dtype, nothing)


__all__ = ["change_stage"]
