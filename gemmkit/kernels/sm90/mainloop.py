"""Step 2 of `warp_specialised`: mainloops, in which a consumer multiplies the pipeline's stages and keeps the sums.

| mainloop | A | accumulators |
|---|---|---|
| `SharedMainloop` | wgmma reads it in shared memory | added to by all stages of a tile |
| `PairMainloop` | the same | of one stage each, two sets in turn, added to a total in float32 |
| `PortionMainloop` | the same | of some stages each, added to a total in float32 |
| `gemmkit.kernels.sm90.fragments.RegisterMainloop` | consumers fetch it into registers | added to by all stages |
"""

from __future__ import annotations

from typing import Any

from gemmkit.components import Component
from gemmkit.kernels.common.work import Slot, Work
from gemmkit.kernels.sm90.elements import add_value
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import split
from gemmkit.lang.record_types import numbers_of
from gemmkit.lang.registers import apply, generate
from gemmkit.lang.values import fill
from gemmkit.operators.wgmma import within
from gemmkit.ptx.descriptors import advance, matrix_descriptor
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import udiv
from gemmkit.ptx.warpgroup import fence_async
from gemmkit.ptx.wgmma import halves, wgmma_commit, wgmma_fence, wgmma_wait


@dataclass(frozen=True)
class Mainloop(Component):
    """``run`` gives a consumer's sums of ``steps`` stages of a tile, by fragments, and the slot after them."""

    readers_are_warps = False          # threads, not tensor cores alone, read the stages
    sets = 1                           # of accumulators that a thread holds at once

    def run(self, spec: Any, group: int, slot: Slot, steps: int, work: Work, shape: Any) -> tuple:
        raise NotImplementedError


@dataclass(frozen=True)
class SharedMainloop(Mainloop):
    """One group of wgmmas a stage; a stage is released when the next one's group is on its way."""

    def run(self, spec: Any, group: int, slot: Slot, steps: int, work: Work, shape: Any) -> tuple:
        a, b = descriptor_a(spec, group), descriptor_b(spec)
        sums = nothing(spec)
        if steps > 0:                                  # around the waits, too: or ptxas makes each wgmma wait for the last
            previous = slot.stage
            for step in range(steps):
                sums = wgmma_wait(1, start_stage(spec, a, b, slot, sums, step))
                if step > 0:
                    spec.pipeline.release(previous)
                previous = slot.stage
                slot = spec.pipeline.advance(slot)
            sums = wgmma_wait(0, sums)
            spec.pipeline.release(previous)
        return values_of(sums, spec), slot


@dataclass(frozen=True)
class PairMainloop(Mainloop):
    """Two stages at a time, in registers of their own: the first one's sums are added to the total while the second is
    multiplied. (Were it on its way still when the loop begins anew, ptxas would make each wgmma wait for the last.)"""

    sets = 3

    def run(self, spec: Any, group: int, slot: Slot, steps: int, work: Work, shape: Any) -> tuple:
        a, b = descriptor_a(spec, group), descriptor_b(spec)
        total, one, other = nothing(spec), nothing(spec), nothing(spec)
        for _ in range(udiv(steps, 2)):
            first = slot.stage
            one = start_stage(spec, a, b, slot, one, 0)
            slot = spec.pipeline.advance(slot)
            other = start_stage(spec, a, b, slot, other, 0)
            one = wgmma_wait(1, one)
            spec.pipeline.release(first)
            total = apply(add_fragment, total, one)
            other = wgmma_wait(0, other)
            spec.pipeline.release(slot.stage)
            slot = spec.pipeline.advance(slot)
            total = apply(add_fragment, total, other)
        if steps % 2 == 1:
            one = wgmma_wait(0, start_stage(spec, a, b, slot, one, 0))
            spec.pipeline.release(slot.stage)
            slot = spec.pipeline.advance(slot)
            total = apply(add_fragment, total, one)
        return total, slot


@dataclass(frozen=True)
class PortionMainloop(Mainloop):
    """Several stages at a time: the wait at the end of each portion is a small part of it."""

    stages: int
    sets = 3

    def run(self, spec: Any, group: int, slot: Slot, steps: int, work: Work, shape: Any) -> tuple:
        a, b = descriptor_a(spec, group), descriptor_b(spec)
        total = nothing(spec)
        done = 0 * steps
        while done < steps:
            partial = nothing(spec)
            last = min(done + self.stages, steps)
            while done < last:
                partial = wgmma_wait(0, start_stage(spec, a, b, slot, partial, 1))
                spec.pipeline.release(slot.stage)
                slot = spec.pipeline.advance(slot)
                done += 1
            total = apply(add_fragment, total, partial)
        return total, slot


def start_stage(spec: Any, a: int, b: int, slot: Slot, sums: tuple, done: int) -> tuple:
    """Start the products of one stage, as a group: in place of ``sums`` if these have ``done`` 0 stages, else added to them.
    ``a`` and ``b`` are the descriptors of stage 0."""
    spec.pipeline.wait(slot)
    if spec.producer.reader_fences:
        fence_async()
    wgmma_fence()
    sums = spec.operator.multiply(sums, advance(a, slot.stage * spec.stage_bytes), advance(b, slot.stage * spec.stage_bytes),
                                  spec.a.shared, spec.b.shared, spec.block, min(done, 1))
    wgmma_commit()
    return sums


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


def halves_of(words: tuple, n: int) -> tuple:
    return halves(words)


def numbers_of_parts(sums: tuple, spec: Any) -> tuple:
    """The sums of all parts, by fragments, as numbers."""
    return apply(numbers_of_fragment, split(sums, spec.operator.sums), spec)


def numbers_of_fragment(planes: tuple, n: int, spec: Any) -> tuple:
    return numbers_of(spec.operator.fragment_c.dtype, planes)


def descriptor_a(spec: Any, group: int) -> int:
    """This consumer's rows of A in stage 0."""
    own = within(spec.a.plane, (group * spec.first_rows, 0), spec.a.tile.size)
    return advance(descriptor(spec.a), own)


def descriptor_b(spec: Any) -> int:
    return descriptor(spec.b)


def descriptor(operand: Any) -> int:
    """The matrix descriptor of an operand's tile in stage 0."""
    pointer = shared(operand.plane.dtype, operand.offset)
    return matrix_descriptor(pointer, 0, operand.panel_bytes, operand.pattern_bytes, operand.plane.width)
