"""Step 2 of `warp_specialised` with A by registers (`gemmkit.kernels.weave` says when).

The consumers take A from where the copy engine has laid it, and take its numbers apart in registers (or transform its
elements: `gemmkit.kernels.transformed`). So A is neither written to shared memory again nor, of numbers, read by every
product: shared memory is what limits these products. Steps along K are groups of wgmmas of their own: while one is on its
way, the registers of the next are filled.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.transformed import load_transformed
from gemmkit.kernels.walk import BARRIERS, next_stage
from gemmkit.kernels.work import Slot
from gemmkit.lang.control import fold, join
from gemmkit.lang.registers import apply, generate
from gemmkit.ptx.descriptors import advance
from gemmkit.ptx.ldmatrix import ldmatrix
from gemmkit.ptx.mbarrier import mbarrier_arrive, mbarrier_wait
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import lane_index, thread_index, udiv, warp_barrier
from gemmkit.ptx.wgmma import settle, wgmma_commit, wgmma_fence, wgmma_wait


def multiply_stages(spec: Any, full: Any, empty: Any, sums: tuple, b: int, group: int, stage: int, phase: int,
                    steps: int, place: tuple, shape: Any) -> tuple:
    """``sums`` and the products of ``steps`` stages; ``b`` is the descriptor of B in stage 0, and ``place`` the first row of
    the block's tile and where it begins along K."""
    there = full
    if spec.has_landed:                                # A is there before the producer's warps are done with B
        there = shared(BARRIERS, spec.landed_offset)
    m, k = place
    if steps > 0:                                      # around the waits, too: or ptxas makes each wgmma wait for the last
        previous = stage
        mbarrier_wait(there, stage, phase)
        fragments = load_fragments(spec, group, stage, 0, (m, k), shape)
        for step in range(steps):
            at = m, k + step * spec.block.size.K
            after, turned = next_stage(spec, Slot(stage, phase))
            ahead = choose_next(step + 1 < steps, after, turned, stage, phase)
            mbarrier_wait(full, stage, phase)
            sums = start_step(sums, spec, fragments, b, stage, 0, min(step, 1))
            if spec.pending_steps == 0:
                give_back_last(empty, previous, step)  # it was done when this began
            if spec.stage_steps > 1:
                fragments = load_fragments(spec, group, stage, 1, at, shape)
            else:
                fragments = load_next_stage(spec, there, group, ahead, at, shape)
            sums = wgmma_wait(spec.pending_steps, sums)
            if spec.pending_steps > 0:
                give_back_last(empty, previous, step)
            sums, fragments = fold(spec.middle_steps, add_step, (sums, fragments), spec, b, group, stage, at, shape)
            if spec.stage_steps > 1:
                sums = start_step(sums, spec, fragments, b, stage, spec.stage_steps - 1, 1)
                fragments = load_next_stage(spec, there, group, ahead, at, shape)
                sums = wgmma_wait(1, sums)
            previous = stage
            stage, phase = after, turned
        sums = wgmma_wait(0, sums)
        give_back(empty, previous)
    return sums, stage, phase


def choose_next(is_next: bool, after: int, turned: int, stage: int, phase: int) -> tuple:
    """The next stage of the tile; behind its last this one again, whose fragments nobody uses then."""
    if is_next:
        return after, turned
    return stage, phase


def start_step(sums: tuple, spec: Any, fragments: tuple, b: int, stage: int, step: int, accumulate: int) -> tuple:
    """Start the products of a step along K, as a group."""
    fragments = apply(settle_fragment, fragments, spec)
    wgmma_fence()
    sums = spec.operator.multiply_fragments(sums, fragments, advance(b, stage * spec.stage_bytes), spec.b.shared, spec.block,
                                            step, accumulate)
    wgmma_commit()
    return sums


def add_step(state: tuple, n: int, spec: Any, b: int, group: int, stage: int, at: tuple, shape: Any) -> tuple:
    """While step ``n + 1`` and the one before are on their way, the next one's fragments are fetched."""
    sums = start_step(state[0], spec, state[1], b, stage, n + 1, 1)
    fragments = load_fragments(spec, group, stage, n + 2, at, shape)
    return wgmma_wait(1, sums), fragments


def load_next_stage(spec: Any, there: Any, group: int, ahead: tuple, at: tuple, shape: Any) -> tuple:
    mbarrier_wait(there, ahead[0], ahead[1])
    return load_fragments(spec, group, ahead[0], 0, (at[0], at[1] + spec.block.size.K), shape)


def give_back_last(empty: Any, stage: int, step: int) -> None:
    if step > 0:
        give_back(empty, stage)


def give_back(empty: Any, stage: int) -> None:
    """The stage is read, by the tensor cores and by this warp."""
    warp_barrier()
    if lane_index() == 0:
        mbarrier_arrive(empty, stage)


def settle_fragment(fragment: tuple, m: int, spec: Any) -> tuple:
    if spec.a_lands:
        return settle(join(apply(first_parts, fragment))), settle(join(apply(second_parts, fragment)))
    return settle(fragment)


# -- A's fragments ----------------------------------------------------------------------------------------------------

def load_fragments(spec: Any, group: int, stage: int, step: int, at: tuple, shape: Any) -> tuple:
    """Of each 64 rows, the numbers of both halves of the step; or what is transformed."""
    if spec.a_lands:
        return generate(spec.fragments_m, load_fragment, spec, group, stage, step)
    return load_transformed(spec, group, stage, step, at, shape)


def load_fragment(m: int, spec: Any, group: int, stage: int, step: int) -> tuple:
    return generate(2, load_numbers, spec, group * spec.first_rows + 64 * m, stage, 16 * step)


def load_numbers(half: int, spec: Any, row: int, stage: int, k: int) -> tuple:
    """Of this lane's two rows, two numbers of eight along K: as parts, side by side."""
    thread = thread_index() % 128
    matrix = udiv(thread, 8) % 4                       # of which this lane points to a line: at k, k + 4, and eight rows on
    line = row + udiv(thread, 32) * 16 + udiv(matrix, 2) * 8 + thread % 8
    at = spec.a.numbers.position((line, k + 8 * half + matrix % 2 * 4), spec.a.numbers.leading(spec.block.MK.size))
    return ldmatrix(shared(spec.a.plane.dtype, 0), stage * spec.a_stage + 2 * at, 0, 4, False)


def first_parts(parts: tuple, half: int) -> tuple:
    return parts[0], parts[2], parts[4], parts[6]


def second_parts(parts: tuple, half: int) -> tuple:
    return parts[1], parts[3], parts[5], parts[7]


__all__ = ["multiply_stages"]
