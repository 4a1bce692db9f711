"""Step 2 of `warp_specialised` with A in registers: consumers fetch A themselves and change it on its way to wgmma.

A is neither written to shared memory again nor, of numbers of several parts, read by every product: shared memory is what
limits these products. k-blocks are groups of wgmmas of their own: while one is on its way, the registers of the next are
filled. What is fetched is a source's affair:

| source | A in shared memory | on its way |
|---|---|---|
| `Transformed` | as TMA brings it | elements are transformed |
| `gemmkit.kernels.sm90.across.Across` | as TMA brings it, of 32-bit elements across K | rounded to tf32 (and transformed) |
| `Deinterleaved` | numbers of two 16-bit parts, in panels along K | de-interleaved; B's planes are permuted along K |
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.common.elements import transform_within
from gemmkit.kernels.common.work import KTile, Slot, Work
from gemmkit.kernels.sm90.mainloop import Mainloop, descriptor_b, nothing, values_of
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import fold, join
from gemmkit.lang.pairs import is_pairwise, transform_pairs
from gemmkit.lang.registers import apply, generate
from gemmkit.lang.values import convert_all
from gemmkit.ptx.descriptors import advance
from gemmkit.ptx.ldmatrix import ldmatrix
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import lane_index, thread_index, udiv
from gemmkit.ptx.warpgroup import fence_async
from gemmkit.ptx.wgmma import settle, wgmma_commit, wgmma_fence, wgmma_wait
from gemmkit.ptx.words import first_elements, pack_words, unpack_words
from gemmkit.tiling import Tile, translate

HALVES = np.dtype(np.uint16)           # the elements that `ldmatrix` moves


@dataclass(frozen=True)
class Source(Component):
    """Where fragments of A come from."""

    def load(self, spec: Any, group: int, stage: int, step: int, at: KTile) -> tuple:
        """The fragments of a k-block; ``at`` is where the stage's tile of A begins."""
        raise NotImplementedError

    def settle(self, fragment: tuple) -> tuple:
        """A fragment in the registers that wgmma reads."""
        return settle(fragment)


@dataclass(frozen=True)
class RegisterMainloop(Mainloop):
    """A group of wgmmas a k-block, ``steps`` of them a stage."""

    source: Source
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

    def run(self, spec: Any, group: int, slot: Slot, steps: int, work: Work, shape: Any) -> tuple:
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


def wait_for_a(spec: Any, slot: Slot) -> None:
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


def release_last(spec: Any, stage: int, step: int) -> None:
    if step > 0:
        spec.pipeline.release(stage)


# -- elements that are transformed ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Transformed(Source):
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

    def load(self, spec: Any, group: int, stage: int, step: int, at: KTile) -> tuple:
        return generate(spec.fragments_m, load_transformed, spec, group, stage, step, at)

    def fetch(self, spec: Any, stage: int, row: int, k: int) -> tuple:
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


def fetch_words(spec: Any, stage: int, row: int, k: int) -> tuple:
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


def transform_word(word: Any, n: int, spec: Any, i: int, j: int, shape: Any) -> Any:
    tile = translate(spec.mainloop.source.word, i + n % 2 * 8, j + n // 2 * 4 * spec.mainloop.source.word.size.K)
    values = transform_within(spec.a.to_shared, unpack_words(spec.a.plane.dtype, (word,)), tile, shape.M, shape.K)
    return pack_words(convert_all(spec.a.plane.dtype, values))[0]


def within_k(word: Any, n: int, spec: Any, j: int, shape: Any) -> Any:
    """Nothing beyond K, where a transform has made something of TMA's zeros. (Rows beyond M go nowhere.)"""
    return first_elements(spec.a.plane.dtype, word, shape.K - j - n // 2 * 4 * spec.mainloop.source.word.size.K)


# -- numbers of two parts ---------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Deinterleaved(Source):
    """Numbers of two 16-bit parts, which TMA brings in swizzled panels of their own.

    `ldmatrix` takes them for 8 x 8 matrices of pairs of elements, and so gives each lane whole numbers: of the 16 along K of
    an instruction, lane t (of the four that share a row) has t, t + 4, t + 8 and t + 12. What the instruction expects there
    are the places 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. The order along K is free as long as B has the same, so no number of A
    is moved: B's planes are written in this order (`gemmkit.kernels.sm90.permuted`).
    """

    def load(self, spec: Any, group: int, stage: int, step: int, at: KTile) -> tuple:
        return generate(spec.fragments_m, load_fragment, spec, group, stage, step)

    def settle(self, fragment: tuple) -> tuple:
        return settle(join(apply(first_parts, fragment))), settle(join(apply(second_parts, fragment)))


def load_fragment(m: int, spec: Any, group: int, stage: int, step: int) -> tuple:
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
