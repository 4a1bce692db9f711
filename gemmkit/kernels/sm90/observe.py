"""Step 2 of `warp_specialised` with an observer of A: consumers read some stages themselves while tensor cores multiply.

Tensor cores read A by descriptors, so that its elements never come to registers. Of the stages that are this block's to
look at (`gemmkit.kernels.common.watch`) each thread loads its part of a row, behind the start of the stage's products. All
threads of the consumer meet before the stage is released: one of them does so for all.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.common.work import Place, Slot, Work
from gemmkit.kernels.sm90.mainloop import (
    SharedMainloop,
    descriptor_a,
    descriptor_b,
    nothing,
    start_stage,
    values_of,
)
from gemmkit.lang.component_class import dataclass
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import thread_index
from gemmkit.ptx.warpgroup import named_barrier
from gemmkit.ptx.wgmma import wgmma_wait


@dataclass(frozen=True)
class ObservedMainloop(SharedMainloop):
    """`SharedMainloop` with an observer of A."""

    def run(self, spec: Any, group: int, slot: Slot, steps: int, work: Work, shape: Any) -> tuple:
        a, b = descriptor_a(spec, group), descriptor_b(spec)
        sums, state = nothing(spec), spec.a.observer.nothing()
        thread, first_row = thread_index() % 128, group * spec.first_rows
        due, step_due = spec.watch.first(spec, work.n, shape), spec.watch.step(spec, shape)
        if steps > 0:
            previous = slot.stage
            for step in range(steps):
                sums = start_stage(spec, a, b, slot, sums, step)
                if step == due:
                    pointer = shared(spec.a.shared.dtype, spec.a.offset + slot.stage * spec.stage_bytes)
                    at = Place(work.m + first_row, step * spec.block.size.K, shape.M, shape.K)
                    state = spec.watch.add(state, spec, pointer, first_row, thread, at)
                    due += step_due
                    named_barrier(spec.store.barrier + group, 128)
                sums = wgmma_wait(1, sums)
                if step > 0:
                    spec.pipeline.release(previous)
                previous = slot.stage
                slot = spec.pipeline.advance(slot)
            sums = wgmma_wait(0, sums)
            spec.pipeline.release(previous)
        spec.watch.keep(state, spec, thread, work.m + first_row, work.n, shape)
        return values_of(sums, spec), slot
