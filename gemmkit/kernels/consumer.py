"""Step 2 of `warp_specialised`: consumers multiply the ring's stages."""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.by_registers import multiply_stages
from gemmkit.kernels.exchange import exchange
from gemmkit.kernels.finish import Part, add_value, finish_tile, wait_for_engine
from gemmkit.kernels.walk import first_tile, k_steps, next_stage, skip_stages, tile_count, tile_step, work_of
from gemmkit.kernels.work import Barriers, Outputs, Slot, Work
from gemmkit.lang.control import split
from gemmkit.lang.record_types import numbers_of
from gemmkit.lang.registers import apply, generate
from gemmkit.lang.values import fill
from gemmkit.operators.wgmma import within
from gemmkit.ptx.descriptors import advance, matrix_descriptor
from gemmkit.ptx.mbarrier import mbarrier_arrive, mbarrier_arrive_at, mbarrier_wait
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import thread_index, udiv
from gemmkit.ptx.warpgroup import fence_async, named_arrive, named_barrier
from gemmkit.ptx.wgmma import halves, wgmma_commit, wgmma_fence, wgmma_wait

TURN = 8                               # named barriers 8 and 9: whose turn it is at the tensor cores


def consume_together(spec: Any, outputs: Outputs, barriers: Barriers, group: int, rank: int) -> None:
    """Cooperative: every consumer computes its rows of every tile."""
    turn = thread_index() * 0
    slot = Slot(turn, turn)
    tile, tiles, step = first_tile(spec), tile_count(spec, outputs.shape), tile_step(spec)
    while tile < tiles:
        work = work_of(spec, tile, rank, outputs.shape)
        sums, slot = multiply_tile(spec, barriers, group, slot, k_steps(spec, work), work, outputs.shape)
        if spec.splits > 1:
            sums = exchange(sums, spec, group, rank, turn)
        finish_tile(spec, sums, outputs, Part(group, work.m + group * spec.first_rows, work.n + rank * spec.slice_columns))
        turn = turn ^ 1
        tile += step
    wait_for_engine(spec)


def consume_in_turns(spec: Any, outputs: Outputs, barriers: Barriers, group: int, rank: int) -> None:
    """Ping-pong: every other tile is this consumer's. While it finishes one, the other multiplies the next.

    The order barrier is needed, and not only for speed: a consumer two rounds ahead would take the parity of an old phase
    for that of the one it waits for.
    """
    turn = thread_index() * 0
    slot = Slot(turn, turn)
    tile, tiles, step = first_tile(spec), tile_count(spec, outputs.shape), tile_step(spec)
    if group == 1:
        named_arrive(TURN, 256)                        # the first turn is consumer 0's
    while tile < tiles:
        work = work_of(spec, tile, rank, outputs.shape)
        steps = k_steps(spec, work)
        if turn == group:
            named_barrier(TURN + group, 256)
            sums, slot = multiply_tile(spec, barriers, group, slot, steps, work, outputs.shape)
            named_arrive(TURN + 1 - group, 256)
            finish_tile(spec, sums, outputs, Part(group, work.m, work.n))
        else:
            slot = skip_stages(spec, slot, steps)
        turn = turn ^ 1
        tile += step
    wait_for_engine(spec)


def multiply_tile(spec: Any, barriers: Barriers, group: int, slot: Slot, steps: int, work: Work, shape: Any) -> tuple:
    """The sums of a consumer's fragments, and where the ring stands after ``steps`` stages."""
    if spec.is_promoted:
        sums, slot = multiply_promoted(spec, barriers, group, slot, steps)
    elif spec.a_by_registers:
        sums, slot = multiply_by_registers(spec, barriers, group, slot, steps, work, shape)
    else:
        sums, slot = multiply_plainly(spec, barriers, group, slot, steps)
    if spec.has_parts:
        return numbers_of_parts(sums, spec), slot
    return sums, slot


def multiply_promoted(spec: Any, barriers: Barriers, group: int, slot: Slot, steps: int) -> tuple:
    """Sums of a few stages at a time, added up in float32."""
    if spec.promoted_stages == 1:
        return multiply_in_pairs(spec, barriers, group, slot, steps)
    return multiply_portions(spec, barriers, group, slot, steps)


def multiply_plainly(spec: Any, barriers: Barriers, group: int, slot: Slot, steps: int) -> tuple:
    """One group of wgmmas a stage; a stage is given back when the next one's group is on its way."""
    a, b = descriptor_a(spec, group), descriptor_b(spec)
    sums = nothing(spec)
    if steps > 0:                                      # around the waits, too: or ptxas makes each wgmma wait for the last
        previous = slot.stage
        for step in range(steps):
            sums = wgmma_wait(1, start_stage(spec, barriers.full, a, b, slot, sums, step))
            if step > 0:
                give_back(spec, barriers.empty, previous)
            previous = slot.stage
            slot = next_stage(spec, slot)
        sums = wgmma_wait(0, sums)
        give_back(spec, barriers.empty, previous)
    return values_of(sums, spec), slot


def multiply_by_registers(spec: Any, barriers: Barriers, group: int, slot: Slot, steps: int, work: Work,
                          shape: Any) -> tuple:
    """A by registers: a group of wgmmas a step along K."""
    sums, stage, phase = multiply_stages(spec, barriers.full, barriers.empty, nothing(spec), descriptor_b(spec), group,
                                         slot.stage, slot.phase, steps, (work.m, work.k_begin), shape)
    return values_of(sums, spec), Slot(stage, phase)


def multiply_in_pairs(spec: Any, barriers: Barriers, group: int, slot: Slot, steps: int) -> tuple:
    """Two stages at a time, in registers of their own: the first one's sums are added to the total while the second is
    multiplied. (Were it on its way still when the loop begins anew, ptxas would make each wgmma wait for the last.)"""
    a, b = descriptor_a(spec, group), descriptor_b(spec)
    total, one, other = nothing(spec), nothing(spec), nothing(spec)
    for _ in range(udiv(steps, 2)):
        first = slot.stage
        one = start_stage(spec, barriers.full, a, b, slot, one, 0)
        slot = next_stage(spec, slot)
        other = start_stage(spec, barriers.full, a, b, slot, other, 0)
        one = wgmma_wait(1, one)
        give_back(spec, barriers.empty, first)
        total = apply(add_fragment, total, one)
        other = wgmma_wait(0, other)
        give_back(spec, barriers.empty, slot.stage)
        slot = next_stage(spec, slot)
        total = apply(add_fragment, total, other)
    if steps % 2 == 1:
        one = wgmma_wait(0, start_stage(spec, barriers.full, a, b, slot, one, 0))
        give_back(spec, barriers.empty, slot.stage)
        slot = next_stage(spec, slot)
        total = apply(add_fragment, total, one)
    return total, slot


def start_stage(spec: Any, full: Any, a: int, b: int, slot: Slot, sums: tuple, done: int) -> tuple:
    """Start the products of one stage, as a group: in place of ``sums`` if these have ``done`` 0 stages, else added to them.
    ``a`` and ``b`` are the descriptors of stage 0."""
    mbarrier_wait(full, slot.stage, slot.phase)
    if spec.is_gathering:
        fence_async()                                  # threads' copies write as threads do
    wgmma_fence()
    sums = spec.operator.multiply(sums, advance(a, slot.stage * spec.stage_bytes), advance(b, slot.stage * spec.stage_bytes),
                                  spec.a.shared, spec.b.shared, spec.block, min(done, 1))
    wgmma_commit()
    return sums


def multiply_portions(spec: Any, barriers: Barriers, group: int, slot: Slot, steps: int) -> tuple:
    """Several stages at a time: the wait at the end of each portion is a small part of it."""
    a, b = descriptor_a(spec, group), descriptor_b(spec)
    total = nothing(spec)
    done = 0 * steps
    while done < steps:
        partial = nothing(spec)
        last = min(done + spec.promoted_stages, steps)
        while done < last:
            partial = wgmma_wait(0, start_stage(spec, barriers.full, a, b, slot, partial, 1))
            give_back(spec, barriers.empty, slot.stage)
            slot = next_stage(spec, slot)
            done += 1
        total = apply(add_fragment, total, partial)
    return total, slot


def add_fragment(fragment: tuple, i: int, others: tuple) -> tuple:
    return apply(add_value, fragment, others[i])


def nothing(spec: Any) -> tuple:
    """The sums of no products."""
    return generate(spec.sums, nothing_of_fragment, spec)


def nothing_of_fragment(n: int, spec: Any) -> tuple:
    return fill(spec.operator.registers.dtype, spec.operator.registers.count, 0)


def values_of(sums: tuple, spec: Any) -> tuple:
    """Sums as elements: those in float16 were kept as words, two in each (ptxas would make their wgmmas wait)."""
    return apply(halves_of, sums) if spec.operator.sums_in_words else sums


def numbers_of_parts(sums: tuple, spec: Any) -> tuple:
    """The sums of all parts, by fragments, as numbers."""
    return apply(numbers_of_fragment, split(sums, spec.operator.sums), spec)


def numbers_of_fragment(planes: tuple, n: int, spec: Any) -> tuple:
    return numbers_of(spec.operator.fragment_c.dtype, planes)


def halves_of(words: tuple, n: int) -> tuple:
    return halves(words)


def give_back(spec: Any, empty: Any, stage: int) -> None:
    """The stage is read: its producer, and in a cluster those of all who write to it, may fill it again."""
    thread = thread_index() % 128
    if spec.shares:
        if thread < spec.peers:
            mbarrier_arrive_at(empty, stage, thread)
    elif thread == 0:
        mbarrier_arrive(empty, stage)


def descriptor_a(spec: Any, group: int) -> int:
    """This consumer's rows of A in stage 0."""
    pointer = shared(spec.a.plane.dtype, 0)
    own = within(spec.a.plane, (group * spec.first_rows, 0), spec.block.MK.size)
    return advance(matrix_descriptor(pointer, 0, spec.a_panel_bytes, spec.a_lines_bytes, spec.a_width), own)


def descriptor_b(spec: Any) -> int:
    pointer = shared(spec.b.plane.dtype, spec.b_offset)
    return matrix_descriptor(pointer, 0, spec.b_panel_bytes, spec.b_lines_bytes, spec.b_width)


__all__ = ["consume_in_turns", "consume_together"]
