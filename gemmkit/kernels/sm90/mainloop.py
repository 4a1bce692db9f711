"""Step 2 of `warp_specialised`: the mainloops of the consumers, with A in shared memory or in registers.

wgmma reads 32-bit operands in shared memory along K alone, and from registers in no order: a thread holds single elements of
a fragment, one a register. So a thread loads those of an MN-major A from the tile as TMA brought it, and no tile is
transposed.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.collectives.operand import Operand, transform_within
from gemmkit.kernels.collectives.scheduler import KTile, Slot, TileCoord, Work
from gemmkit.kernels.sm90.cross_lane import add_value
from gemmkit.lang.aggregates import convert_all, fill
from gemmkit.lang.component_products import ProblemShape, StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric, SharedPointer
from gemmkit.lang.records import numbers_of
from gemmkit.lang.registers import apply, fold, generate, is_pairwise, join, split, transform_pairs
from gemmkit.layouts import Interleaved, Planes, Swizzled
from gemmkit.operators.wgmma import within
from gemmkit.ptx.copy_async import copies_arrive
from gemmkit.ptx.memory import first_elements, load_shared, pack_words, shared, unpack_words
from gemmkit.ptx.mma import ldmatrix, round_word
from gemmkit.ptx.special import lane_index, thread_index, udiv
from gemmkit.ptx.wgmma import (
    advance,
    fence_async,
    halves,
    matrix_descriptor,
    named_barrier,
    settle,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from gemmkit.tiling import Tile, translate

if TYPE_CHECKING:
    from gemmkit.kernels.sm90.family import Sm90Spec

# --------------------------------------------------------------------------------------------------
# Step 2 of `warp_specialised`: mainloops, in which a consumer multiplies the pipeline's stages and keeps the sums.
#
# | mainloop | A | accumulators |
# |---|---|---|
# | `SharedMainloop` | wgmma reads it in shared memory | added to by all stages of a tile |
# | `PairMainloop` | the same | of one stage each, two sets in turn, added to a total in float32 |
# | `PromotedMainloop` | the same | of some stages each, added to a total in float32 |
# | `AlternatingMainloop` | the same | of one fragment and stage each, added to a total in float32 |
# | `ScaledMainloop` | the same | the same, by block scales |
# | `gemmkit.kernels.sm90.mainloop.RegisterMainloop` | consumers fetch it into registers | added to by all stages |

WARP_ROWS = 16                         # of a fragment that a warp has
FLOAT = np.dtype(np.float32)


@dataclass(frozen=True)
class WgmmaMainloop(Component):
    """``run`` gives a consumer's sums of ``steps`` stages of a tile, by fragments, and the slot after them."""

    readers_are_warps = False          # threads, not tensor cores alone, read the stages
    copies_scales = False              # the producer's threads bring more than tiles (`ScaledMainloop`)
    sets = 1                           # of accumulators that a thread holds at once

    @property
    def bytes_per_stage(self) -> int:
        """Shared memory that a stage takes beside its tiles."""
        return 0

    def held(self, fragments: int) -> int:
        """Of how many fragments a thread has registers for the accumulators."""
        return self.sets * fragments

    def start_copies(self, spec: Sm90Spec, slot: Slot, at: KTile) -> None:
        """Where it ``copies_scales``: a producer's warp starts its copies, which arrive at ``full`` when they are done."""

    def run(self, spec: Sm90Spec, group: int, slot: Slot, steps: int, work: Work, shape: StackShape) -> tuple:
        raise NotImplementedError


@dataclass(frozen=True)
class SharedMainloop(WgmmaMainloop):
    """One group of wgmmas a stage; a stage is released when the next one's group is on its way."""

    def run(self, spec: Sm90Spec, group: int, slot: Slot, steps: int, work: Work, shape: StackShape) -> tuple:
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
class PairMainloop(WgmmaMainloop):
    """Two stages at a time, in registers of their own: the first one's sums are added to the total while the second is
    multiplied. (Were it on its way still when the loop begins anew, ptxas would make each wgmma wait for the last.)"""

    sets = 3

    def run(self, spec: Sm90Spec, group: int, slot: Slot, steps: int, work: Work, shape: StackShape) -> tuple:
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
class PromotedMainloop(WgmmaMainloop):
    """Several stages at a time: the wait at the end of each portion is a small part of it."""

    stages: int
    sets = 3

    def run(self, spec: Sm90Spec, group: int, slot: Slot, steps: int, work: Work, shape: StackShape) -> tuple:
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


@dataclass(frozen=True)
class AlternatingMainloop(WgmmaMainloop):
    """One fragment of one stage at a time, whose sums are added to its total while the tensor cores multiply for the other
    consumer. A thread holds the totals of all fragments, and the sums of one."""

    def held(self, fragments: int) -> int:
        return fragments + 1

    def run(self, spec: Sm90Spec, group: int, slot: Slot, steps: int, work: Work, shape: StackShape) -> tuple:
        a, b = descriptor_a(spec, group), descriptor_b(spec)
        total, sums = nothing(spec), (nothing_of_fragment(0, spec),)
        for _ in range(steps):
            spec.pipeline.wait(slot)
            if spec.producer.reader_fences:
                fence_async()
            tiles = advance(a, slot.stage * spec.stage_bytes), advance(b, slot.stage * spec.stage_bytes)
            sums = start_fragment(sums, 0, spec, tiles)
            factors = self.factors(spec, group, slot.stage)
            total, sums = add_portion((total, sums), 0, self, spec, slot.stage, factors)
            total, sums = fold(spec.fragments_m - 1, add_next, (total, sums), self, spec, tiles, slot.stage, factors)
            slot = spec.pipeline.advance(slot)
        return total, slot

    def factors(self, spec: Sm90Spec, group: int, stage: int) -> tuple:
        """What a consumer's sums of a stage are multiplied by; called while the first of its products are on their way."""
        return ()

    def added(self, total: tuple, sums: tuple, spec: Sm90Spec, factors: tuple, i: int) -> tuple:
        """A fragment's total."""
        return apply(add_value, total, sums)


def start_fragment(sums: tuple, i: int, spec: Sm90Spec, tiles: tuple) -> tuple:
    """Start the products of a stage for fragment ``i``, as a group, in place of ``sums``. ``tiles`` are the descriptors of
    the stage's A and B."""
    wgmma_fence()
    operator: Any = spec.operator
    a = advance(tiles[0], within(spec.a.plane, (i * operator.M, 0), spec.a.tile.size))
    sums = operator.multiply(sums, a, tiles[1], spec.a.shared, spec.b.shared, spec.block, 0)
    wgmma_commit()
    return sums


def add_portion(state: tuple, i: int, mainloop: AlternatingMainloop, spec: Sm90Spec, stage: int, factors: tuple) -> tuple:
    """Add the sums of fragment ``i`` to its total. The last fragment's products release the stage."""
    total, sums = state
    sums = wgmma_wait(0, sums)
    if i == spec.fragments_m - 1:
        spec.pipeline.release(stage)
    total = apply(add_to_one, total, mainloop, spec, i, sums[0], factors)
    if i < spec.fragments_m - 1:
        total = wgmma_wait(0, total)                   # before the next products start: else ptxas holds two sets of sums
    return total, sums


def add_to_one(total: tuple, n: int, mainloop: AlternatingMainloop, spec: Sm90Spec, i: int, sums: tuple,
               factors: tuple) -> tuple:
    return mainloop.added(total, sums, spec, factors, i) if n == i else total


def add_next(state: tuple, n: int, mainloop: AlternatingMainloop, spec: Sm90Spec, tiles: tuple, stage: int,
             factors: tuple) -> tuple:
    return add_portion((state[0], start_fragment(state[1], n + 1, spec, tiles)), n + 1, mainloop, spec, stage, factors)


@dataclass(frozen=True)
class ScaledMainloop(AlternatingMainloop):
    """`AlternatingMainloop` of blocks with scales (`BlockScaledOp`), by which their sums are multiplied on the way.

    Warps of the producer take turns to copy the scales of a stage's ``rows`` and ``columns`` (cp.async) behind all stages,
    ``offset`` bytes into shared memory. (Tiles of 256 x 128 take 1.02 to 1.15 times as long where all of these warps copy a
    part of each stage, whose barrier then has three times the arrivals; and 1.09 to 1.15 times that where consumers copy.)
    """

    rows: int
    columns: int
    offset: int = 0
    readers_are_warps = True
    copies_scales = True

    @property
    def line(self) -> int:
        """Elements of a stage's scales."""
        return self.rows + -(-self.columns // 4) * 4

    @property
    def bytes_per_stage(self) -> int:
        return self.line * FLOAT.itemsize

    def start_copies(self, spec: Sm90Spec, slot: Slot, at: KTile) -> None:
        spec.pipeline.acquire(slot)
        operator: Any = spec.operator
        operator.copy_scales(shared(FLOAT, self.offset), slot.stage * self.line, self.rows, self.columns, at)
        copies_arrive(spec.pipeline.full(), slot.stage)

    def factors(self, spec: Sm90Spec, group: int, stage: int) -> tuple:
        begin = stage * self.line
        row = begin + group * spec.first_rows + udiv(thread_index() % 128, 32) * WARP_ROWS
        operator: Any = spec.operator
        return operator.factors(shared(FLOAT, self.offset), row, spec.fragments_m, begin + self.rows, self.columns)

    def added(self, total: tuple, sums: tuple, spec: Sm90Spec, factors: tuple, i: int) -> tuple:
        operator: Any = spec.operator
        return operator.add_scaled(total, sums, factors, i)


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


def nothing(spec: Sm90Spec) -> tuple:
    """The sums of no products."""
    return generate(spec.sums, nothing_of_fragment, spec)


def nothing_of_fragment(n: int, spec: Any) -> tuple:
    return fill(spec.operator.registers.dtype, spec.operator.registers.count, 0)


def values_of(sums: tuple, spec: Any) -> tuple:
    """Sums as elements: those in float16 were kept as words, two in each (ptxas would make their wgmmas wait)."""
    return apply(halves_of, sums) if spec.operator.sums_in_words else sums


def halves_of(words: tuple, n: int) -> tuple:
    return halves(words)


def numbers_of_parts(sums: tuple, spec: Sm90Spec) -> tuple:
    """The sums of all parts, by fragments, as numbers."""
    return apply(numbers_of_fragment, split(sums, spec.operator.sums), spec)


def numbers_of_fragment(planes: tuple, n: int, spec: Sm90Spec) -> tuple:
    return numbers_of(spec.operator.fragment_c.dtype, planes)


def descriptor_a(spec: Any, group: int) -> int:
    """This consumer's rows of A in stage 0."""
    own = within(spec.a.plane, (group * spec.first_rows, 0), spec.a.tile.size)
    return advance(descriptor(spec.a), own)


def descriptor_b(spec: Sm90Spec) -> int:
    return descriptor(spec.b)


def descriptor(operand: Operand) -> int:
    """The matrix descriptor of an operand's tile in stage 0."""
    pointer = shared(operand.plane.dtype, operand.offset)
    plane = operand.plane
    return matrix_descriptor(pointer, plane.origin * plane.line, operand.panel_bytes, operand.pattern_bytes, plane.width)


# --------------------------------------------------------------------------------------------------
# Step 2 of `warp_specialised` with A in registers: consumers fetch A themselves and change it on its way to wgmma.
#
# A is neither written to shared memory again nor, of numbers of several parts, read by every product: shared memory is
# what limits these products. k-blocks are groups of wgmmas of their own: while one is on its way, the registers of the
# next are filled. What is fetched is a source's affair:
#
# | source | A in shared memory | on its way |
# |---|---|---|
# | `Transformed` | as TMA brings it | elements are transformed |
# | `MnMajorTf32` | as TMA brings it, of 32-bit elements, MN-major | rounded to tf32 (and transformed) |
# | `Deinterleaved` | numbers of two 16-bit parts, in panels along K | de-interleaved; B's planes are permuted along K |

HALVES = np.dtype(np.uint16)           # the elements that `ldmatrix` moves


@dataclass(frozen=True)
class FragmentSource(Component):
    """Where fragments of A come from."""

    def load(self, spec: Sm90Spec, group: int, stage: int, step: int, at: KTile) -> tuple:
        """The fragments of a k-block; ``at`` is where the stage's tile of A begins."""
        raise NotImplementedError

    def settle(self, fragment: tuple) -> tuple:
        """A fragment in the registers that wgmma reads."""
        return settle(fragment)


@dataclass(frozen=True)
class RegisterMainloop(WgmmaMainloop):
    """A group of wgmmas a k-block, ``steps`` of them a stage."""

    source: FragmentSource
    steps: int
    readers_are_warps = True

    @property
    def middle(self) -> int:
        """Steps that are neither the first nor the last of a stage."""
        return max(0, self.steps - 2)

    @property
    def pending(self) -> int:
        """How many groups may be on their way when the registers of the next are written. A loop of one step a round writes
        the very registers that the last round's group reads, so that one has to be done."""
        return 1 if self.steps > 1 else 0

    def run(self, spec: Sm90Spec, group: int, slot: Slot, steps: int, work: Work, shape: StackShape) -> tuple:
        sums, b = nothing(spec), descriptor_b(spec)
        if steps > 0:                                  # around the waits, too: or ptxas makes each wgmma wait for the last
            previous = slot.stage
            wait_for_a(spec, slot)
            at = KTile(work.m, work.n, work.k_begin, work.batch, work.rank, shape)
            fragments = self.source.load(spec, group, slot.stage, 0, at)
            for step in range(steps):
                at = KTile(work.m, work.n, work.k_begin + step * spec.block.size.K, work.batch, work.rank, shape)
                after = spec.pipeline.advance(slot)
                ahead = choose_next(step + 1 < steps, after, slot)
                spec.pipeline.wait(slot)
                if spec.producer.reader_fences:
                    fence_async()
                sums = start_step(sums, spec, fragments, b, slot.stage, 0, min(step, 1))
                if self.pending == 0:
                    release_last(spec, previous, step)     # it was done when this began
                if self.steps > 1:
                    fragments = self.source.load(spec, group, slot.stage, 1, at)
                else:
                    fragments = load_next_stage(spec, group, ahead, at)
                sums = wgmma_wait(self.pending, sums)
                if self.pending > 0:
                    release_last(spec, previous, step)
                sums, fragments = fold(self.middle, add_step, (sums, fragments), spec, b, group, slot.stage, at)
                if self.steps > 1:
                    sums = start_step(sums, spec, fragments, b, slot.stage, self.steps - 1, 1)
                    fragments = load_next_stage(spec, group, ahead, at)
                    sums = wgmma_wait(1, sums)
                previous = slot.stage
                slot = after
            sums = wgmma_wait(0, sums)
            spec.pipeline.release(previous)
        return values_of(sums, spec), slot


def wait_for_a(spec: Sm90Spec, slot: Slot) -> None:
    """A is there before the producer's warps are done with B."""
    if spec.pipeline.has_raw:
        spec.pipeline.wait_raw(slot)
    else:
        spec.pipeline.wait(slot)


def choose_next(is_next: bool, after: Slot, slot: Slot) -> Slot:
    """The next stage of the tile; behind its last this one again, whose fragments are not used then."""
    if is_next:
        return after
    return slot


def start_step(sums: tuple, spec: Any, fragments: tuple, b: int, stage: int, step: int, accumulate: int) -> tuple:
    """Start the products of a k-block, as a group."""
    fragments = apply(settle_fragment, fragments, spec)
    wgmma_fence()
    sums = spec.operator.multiply_fragments(sums, fragments, advance(b, stage * spec.stage_bytes), spec.b.shared, spec.block,
                                            step, accumulate)
    wgmma_commit()
    return sums


def settle_fragment(fragment: tuple, m: int, spec: Any) -> tuple:
    return spec.mainloop.source.settle(fragment)


def add_step(state: tuple, n: int, spec: Any, b: int, group: int, stage: int, at: KTile) -> tuple:
    """While step ``n + 1`` and the one before are on their way, the next one's fragments are fetched."""
    sums = start_step(state[0], spec, state[1], b, stage, n + 1, 1)
    fragments = spec.mainloop.source.load(spec, group, stage, n + 2, at)
    return wgmma_wait(1, sums), fragments


def load_next_stage(spec: Any, group: int, ahead: Slot, at: KTile) -> tuple:
    wait_for_a(spec, ahead)
    return spec.mainloop.source.load(spec, group, ahead.stage, 0,
                                     KTile(at.m, at.n, at.k + spec.block.size.K, at.batch, at.rank, at.shape))


def release_last(spec: Sm90Spec, stage: int, step: int) -> None:
    if step > 0:
        spec.pipeline.release(stage)


# -- elements that are transformed ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Transformed(FragmentSource):
    """Elements of A, transformed in the registers.

    Transforms of what lies in shared memory are paid for twice there: it is read and written once more. Here A goes through
    shared memory as often as for the plain product, and no warp of the producer's has to touch it.

    A fragment is 64 x 32 bytes of a warpgroup's tile, of which a warp has 16 rows. Lane t of it has four 32-bit words:

    | word | row | elements along K (n in a word) |
    |---|---|---|
    | 0 | t // 4 | from (t % 4) n |
    | 1 | t // 4 + 8 | the same |
    | 2 | t // 4 | from (t % 4) n + 4 n |
    | 3 | t // 4 + 8 | the same |
    """

    itemsize: int

    @cached_property
    def word(self) -> Tile:
        """A thread's elements in a register."""
        return Tile(M=1, K=4 // self.itemsize)

    def load(self, spec: Sm90Spec, group: int, stage: int, step: int, at: KTile) -> tuple:
        return generate(spec.fragments_m, load_transformed, spec, group, stage, step, at)

    def fetch(self, spec: Sm90Spec, stage: int, row: int, k: int) -> tuple:
        """A lane's words of the 16 rows from ``row`` on of a stage's tile, from ``k`` along K."""
        return fetch_words(spec, stage, row, k)

    def round(self, words: tuple) -> tuple:
        """The words as wgmma is to have them."""
        return words


def load_transformed(m: int, spec: Any, group: int, stage: int, step: int, at: KTile) -> tuple:
    row = group * spec.first_rows + 64 * m + udiv(thread_index() % 128, 32) * 16
    k = spec.operator.K * step
    words = spec.mainloop.source.fetch(spec, stage, row, k)
    return spec.mainloop.source.round(transform_words(words, spec, row, k, at))


def transform_words(words: tuple, spec: Any, row: int, k: int, at: KTile) -> tuple:
    if spec.a.to_shared.is_identity:
        return words
    i, j = at.m + row + udiv(lane_index(), 4), at.k + k + lane_index() % 4 * spec.mainloop.source.word.size.K
    if is_pairwise(spec.a.to_shared, spec.a.plane.dtype):
        return apply(within_k, transform_pairs(spec.a.to_shared, spec.a.plane.dtype, words), spec, j, at.shape)
    return apply(within_k, apply(transform_word, words, spec, i, j, at.shape), spec, j, at.shape)


def fetch_words(spec: Sm90Spec, stage: int, row: int, k: int) -> tuple:
    """Four matrices of 8 lines of 16 bytes: of each this lane points to a line, and gets the word that is its own."""
    matrix, line = udiv(lane_index(), 8), lane_index() % 8
    width = 16 // spec.a.plane.itemsize
    if spec.a.plane.axis == 1:                         # lines along K
        i, j = matrix % 2 * 8 + line, udiv(matrix, 2) * width
    else:
        i, j = matrix % 2 * 8, udiv(matrix, 2) * width + line
    at = spec.a.plane.position((row + i, k + j), spec.a.plane.leading(spec.a.tile.size))
    halves = udiv(stage * spec.stage_bytes + at * spec.a.plane.itemsize, 2)
    return pack_words(ldmatrix(shared(HALVES, 0), halves, 0, 4, spec.a.plane.axis == 0))


def transform_word(word: Any, n: int, spec: Any, i: int, j: int, shape: StackShape) -> Any:
    tile = translate(spec.mainloop.source.word, i + n % 2 * 8, j + n // 2 * 4 * spec.mainloop.source.word.size.K)
    values = transform_within(spec.a.to_shared, unpack_words(spec.a.plane.dtype, (word,)), tile, shape.M, shape.K)
    return pack_words(convert_all(spec.a.plane.dtype, values))[0]


def within_k(word: Any, n: int, spec: Any, j: int, shape: ProblemShape) -> Any:
    """Nothing beyond K, where a transform has made something of TMA's zeros. (Rows beyond M go nowhere.)"""
    return first_elements(spec.a.plane.dtype, word, shape.K - j - n // 2 * 4 * spec.mainloop.source.word.size.K)


# -- numbers of two parts ---------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Deinterleaved(FragmentSource):
    """Numbers of two 16-bit parts, which TMA brings in swizzled panels of their own.

    `ldmatrix` takes them for 8 x 8 matrices of pairs of elements, and so gives each lane whole numbers: of the 16 along K of
    an instruction, lane t (of the four that share a row) has t, t + 4, t + 8 and t + 12. What the instruction expects there
    are the places 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. The order along K is free as long as B has the same, so no number of A
    is moved: B's planes are written in this order (`gemmkit.kernels.sm90.mainloop`).
    """

    def load(self, spec: Sm90Spec, group: int, stage: int, step: int, at: KTile) -> tuple:
        return generate(spec.fragments_m, load_fragment, spec, group, stage, step)

    def settle(self, fragment: tuple) -> tuple:
        return settle(join(apply(first_parts, fragment))), settle(join(apply(second_parts, fragment)))


def load_fragment(m: int, spec: Sm90Spec, group: int, stage: int, step: int) -> tuple:
    return generate(2, load_numbers, spec, group * spec.first_rows + 64 * m, stage, 16 * step)


def load_numbers(half: int, spec: Any, row: int, stage: int, k: int) -> tuple:
    """Of this lane's two rows, two numbers of eight along K: as parts, side by side."""
    thread = thread_index() % 128
    matrix = udiv(thread, 8) % 4                       # of which this lane points to a line: at k, k + 4, and eight rows on
    line = row + udiv(thread, 32) * 16 + udiv(matrix, 2) * 8 + thread % 8
    at = spec.a.numbers.position((line, k + 8 * half + matrix % 2 * 4), spec.a.numbers.leading(spec.a.tile.size))
    itemsize = spec.a.plane.itemsize
    return ldmatrix(shared(spec.a.plane.dtype, 0), stage * (spec.stage_bytes // itemsize) + 2 * at, 0, 4, False)


def first_parts(parts: tuple, half: int) -> tuple:
    return parts[0], parts[2], parts[4], parts[6]


def second_parts(parts: tuple, half: int) -> tuple:
    return parts[1], parts[3], parts[5], parts[7]


WORDS = np.dtype(np.uint32)


@dataclass(frozen=True)
class MnMajorTf32(Transformed):
    """Elements of A, loaded one by one, and rounded to tf32.

    Lane t has rows t // 4 and t // 4 + 8 of a fragment's 16, and in each the elements t % 4 and t % 4 + 4 along K (see
    `Transformed`). In shared memory a line is 32 rows of one k, in chunks of 4 rows that are swizzled by k % 8. All lanes'
    words of one kind are of four k, and those of k and k + 1 would lie in the same banks. So where t is odd a lane loads its
    words of t % 4 + 4 first: then the 32 words of an access lie in 32 banks.
    """

    def fetch(self, spec: Sm90Spec, stage: int, row: int, k: int) -> tuple:
        late = lane_index() % 2
        i, j = row + udiv(lane_index(), 4), lane_index() % 4
        first = fetch_two(spec, stage, i, j + 4 * late, k)
        second = fetch_two(spec, stage, i, j + 4 - 4 * late, k)
        if late == 1:
            return second + first
        return first + second

    def round(self, words: tuple) -> tuple:
        return apply(round_one, words)


def fetch_two(spec: Sm90Spec, stage: int, i: int, j: int, k: int) -> tuple:
    """The words of rows ``i`` and ``i + 8``, at ``k + j`` along K."""
    return fetch_word(spec, stage, i, j, k) + fetch_word(spec, stage, i + 8, j, k)


def fetch_word(spec: Sm90Spec, stage: int, i: int, j: int, k: int) -> tuple:
    """``k`` is a multiple of the pattern's 8 lines: it moves a place, whose swizzle is computed once for all of a stage."""
    at = spec.a.plane.position((i, j), spec.a.plane.leading(spec.a.tile.size))
    return load_shared(shared(WORDS, 0), stage * udiv(spec.stage_bytes, 4) + at, k * spec.a.plane.line, 1)


def round_one(word: Numeric, n: int) -> Any:
    return round_word(word)


# --------------------------------------------------------------------------------------------------
# Step 2 of `warp_specialised` with an observer of A: consumers read some stages themselves while tensor cores multiply.
#
# Tensor cores read A by descriptors, so that its elements never come to registers. Of the stages that are this block's to
# look at (`gemmkit.kernels.collectives.lanes`) each thread loads its part of a row, behind the start of the stage's
# products. All threads of the consumer meet before the stage is released: one of them does so for all.

@dataclass(frozen=True)
class ObservedMainloop(SharedMainloop):
    """`SharedMainloop` with an observer of A."""

    def run(self, spec: Sm90Spec, group: int, slot: Slot, steps: int, work: Work, shape: StackShape) -> tuple:
        a, b = descriptor_a(spec, group), descriptor_b(spec)
        sums, state = nothing(spec), spec.a.observer.nothing()
        thread, first_row = thread_index() % 128, group * spec.first_rows
        due, step_due = spec.operand_reduction.first(spec, work.n, shape), spec.operand_reduction.step(spec, shape)
        if steps > 0:
            previous = slot.stage
            for step in range(steps):
                sums = start_stage(spec, a, b, slot, sums, step)
                if step == due:
                    pointer = shared(spec.a.shared.dtype, spec.a.offset + slot.stage * spec.stage_bytes)
                    at = TileCoord(work.m + first_row, step * spec.block.size.K, shape.M, shape.K)
                    state = spec.operand_reduction.add(state, spec, pointer, first_row, thread, at)
                    due += step_due
                    named_barrier(spec.store.barrier + group, 128)
                sums = wgmma_wait(1, sums)
                if step > 0:
                    spec.pipeline.release(previous)
                previous = slot.stage
                slot = spec.pipeline.advance(slot)
            sums = wgmma_wait(0, sums)
            spec.pipeline.release(previous)
        spec.operand_reduction.keep(state, spec, thread, work.m + first_row, work.n, shape)
        return values_of(sums, spec), slot


# --------------------------------------------------------------------------------------------------
# Planes of B that are written in another order along K, to go with A in registers (`fragments.Deinterleaved`).
#
# | place along K | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|---|---|---|
# | number | 0 | 4 | 1 | 5 | 2 | 6 | 3 | 7 |
#
# and so on for every eight.

EIGHT = 8                              # numbers along K that change places
NUMBER = 4                             # bytes: two parts of 16 bits


@dataclass(frozen=True, init=False)
class PermutedPlanes(Planes):
    """Planes of B in the order along K in which registers have A; threads' tiles are lines of `EIGHT` along K, or of one.

    >>> [permuted(k) for k in range(10)]
    [0, 2, 4, 6, 1, 3, 5, 7, 8, 10]
    """

    def __repr__(self) -> str:
        return f"PermutedPlanes({super().__repr__()})"

    def store_shared(self, pointer: SharedPointer, tile: Tile, values: tuple, leading: int) -> None:
        if tile.size[0] == EIGHT:                      # a line along K
            line = values[0], values[4], values[1], values[5], values[2], values[6], values[3], values[7]
            Planes.store_shared(self, pointer, tile, line, leading)
        else:
            k = tile.index[0]
            Planes.store_shared(self, pointer, translate(tile, permuted(k) - k, 0), values, leading)


def permuted(k: int) -> int:
    """The place along K of a number."""
    return k - k % EIGHT + k % 4 * 2 + k // 4 % 2


def in_panels(operand: Operand) -> Operand:
    """The operand, brought as numbers in swizzled panels along K."""
    depth = operand.tile.extents[operand.k_axis]
    width = next(w for w in (128, 64, 32) if depth * NUMBER % w == 0)
    return dataclasses.replace(operand, numbers=Swizzled(
        Interleaved(operand.layout.dtype, ("col", "row")[operand.plane.axis]), width))


def permuted_along_k(b: Operand) -> Operand:
    """B, written in the order of A's registers; where its lines go along K, a thread takes eight numbers of one."""
    b = dataclasses.replace(b, shared=PermutedPlanes(b.shared.plane, b.shared.dtype))
    if b.plane.axis != 0:
        return b
    lanes = math.gcd(32, b.tile.extents[b.k_axis] // EIGHT)
    return dataclasses.replace(in_panels(b), thread=Tile(K=EIGHT, N=1), warp=Tile(K=EIGHT * lanes, N=32 // lanes))
