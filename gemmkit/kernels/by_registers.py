"""Step 2 of `warp_specialised` with A of an algebra by registers (`gemmkit.kernels.weave` says when).

The consumers take A from where the copy engine has laid its numbers, and take them apart in registers, so that A is neither
written as planes nor read again by every product: shared memory is what limits products of numbers. Steps along K are groups
of wgmmas of their own: while one is on its way, the registers of the next are filled.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.walk import BARRIERS, next_stage
from gemmkit.lang.control import fold, join
from gemmkit.lang.registers import apply, generate
from gemmkit.ptx.descriptors import advance
from gemmkit.ptx.ldmatrix import ldmatrix
from gemmkit.ptx.mbarrier import mbarrier_arrive, mbarrier_wait
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import lane_index, thread_index, udiv, warp_barrier
from gemmkit.ptx.wgmma import settle, wgmma_commit, wgmma_fence, wgmma_wait


def multiply_stages(spec: Any, full: Any, empty: Any, sums: tuple, b: int, group: int, stage: int, phase: int,
                    steps: int) -> tuple:
    """``sums`` and the products of ``steps`` stages; ``b`` is the descriptor of B in stage 0."""
    landed = shared(BARRIERS, spec.landed_offset)
    if steps > 0:                                      # around the waits, too: or ptxas makes each wgmma wait for the last
        previous = stage
        for step in range(steps):
            mbarrier_wait(landed, stage, phase)
            fragments = load_fragments(spec, group, stage, 0)
            mbarrier_wait(full, stage, phase)
            sums = start_step(sums, spec, fragments, b, stage, 0, min(step, 1))
            if step > 0:
                give_back(empty, previous)
            sums = fold(spec.stage_steps - 1, add_step, sums, spec, b, group, stage)
            previous = stage
            stage, phase = next_stage(spec, stage, phase)
        sums = wgmma_wait(0, sums)
        give_back(empty, previous)
    return sums, stage, phase


def add_step(sums: tuple, n: int, spec: Any, b: int, group: int, stage: int) -> tuple:
    return start_step(sums, spec, load_fragments(spec, group, stage, n + 1), b, stage, n + 1, 1)


def start_step(sums: tuple, spec: Any, fragments: tuple, b: int, stage: int, step: int, accumulate: int) -> tuple:
    """Start the products of a step along K, as a group, and wait for the last one's."""
    wgmma_fence()
    sums = spec.operator.multiply_fragments(sums, fragments, advance(b, stage * spec.stage_bytes), spec.b.shared, spec.block,
                                            step, accumulate)
    wgmma_commit()
    return wgmma_wait(spec.pending_steps, sums)


def give_back(empty: Any, stage: int) -> None:
    """The stage is read, by the tensor cores and by this warp."""
    warp_barrier()
    if lane_index() == 0:
        mbarrier_arrive(empty, stage)


# -- A's fragments ----------------------------------------------------------------------------------------------------

def load_fragments(spec: Any, group: int, stage: int, step: int) -> tuple:
    """Of each 64 rows, the fragments of both parts."""
    return generate(spec.fragments_m, load_fragment, spec, group, stage, step)


def load_fragment(m: int, spec: Any, group: int, stage: int, step: int) -> tuple:
    numbers = generate(2, load_numbers, spec, group * spec.first_rows + 64 * m, stage, 16 * step)
    return settle(join(apply(first_parts, numbers))), settle(join(apply(second_parts, numbers)))


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
