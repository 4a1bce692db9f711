"""Weights of 4 bits as A of `warp_specialised`: TMA brings words and scales, consumers dequantise them on the way to wgmma.

The product is D^T = W^T x^T (swap-AB): W's columns are the rows of a tile, x's rows its columns. A stage has W's words as
they lie in global memory (`gemmkit.layouts.quantised.QuantisedTile`), and x's tile as tensor cores read it.

A fragment of A is 64 rows by 16 along K. Lane (g, t) = (lane / 4, lane % 4) of a warp has rows g and g + 8 of its 16, and
of each the elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 along K: byte t of the row's two words. So the four lanes of a row
load the same words, and each takes its byte. No element changes lanes, and the words' order is that of
`gemmkit.kernels.quantised`.

The dequantised elements are those of `gemmkit.kernels.quantised`: rounded to float16, then to bfloat16 if x is bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit.kernels.collectives.operand import Operand
from gemmkit.kernels.collectives.scheduler import KTile, Slot, Work
from gemmkit.kernels.sm90.mainloop import WgmmaMainloop, choose_next, descriptor_b, nothing, release_last
from gemmkit.kernels.sm90.routes import StageFill, Tma, TmaCopy, prefetch_part
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric
from gemmkit.lang.registers import apply, each, fold, generate
from gemmkit.layouts.quantised import QuantisedTile, QuantisedTranspose
from gemmkit.operators.wgmma import BLOCK, WGMMAOp
from gemmkit.ptx.arithmetic import fma
from gemmkit.ptx.memory import load_shared, shared
from gemmkit.ptx.registers import as_bfloat16, as_float8, dequantise_bytes, float8_table, zero_words
from gemmkit.ptx.special import lane_index, thread_index, udiv
from gemmkit.ptx.tma import tma_load
from gemmkit.ptx.wgmma import advance, settle, wgmma_commit, wgmma_fence, wgmma_wait
from gemmkit.runtime.arrays import ArrayInfo, describe
from gemmkit.runtime.tensor_maps import TensorMapSpec, why_not

if TYPE_CHECKING:
    from gemmkit.kernels.sm90.family import Sm90Spec
    from gemmkit.kernels.sm90.routes import Request

BYTES, WORDS, HALVES = np.dtype(np.uint8), np.dtype(np.uint32), np.dtype(np.uint16)
F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
STEP = 16                              # elements along K of a wgmma
FRAGMENT = 4                           # words that a lane has of a fragment
NARROW = 64                            # columns of a tile whose wgmmas are short
SUMS = 256                             # columns of a thread's accumulators, at most
PORTIONS = 4                           # of a stage, at least: with fewer, wgmmas wait for each other
THREADS = 512                          # of a block, at most


def quantised_tile(spec: Sm90Spec) -> QuantisedTile | None:
    """How the kernel has its A in words; None where it cannot dequantise on the way to wgmma."""
    layout, block, operator = spec.a.layout, spec.block.size, spec.operator
    if layout.layout.bits != 4 or type(operator) is not WGMMAOp:
        return None
    group = layout.layout.group
    is_alone = spec.a.to_shared.is_identity and spec.condition.is_always and spec.cluster.n == 1
    if operator.dtype.itemsize == 1:
        sets, are_portions = Float8Mainloop.sets, group % BLOCK == 0 and block.K == operator.promote == BLOCK
    else:
        sets, are_portions = 1, shares_scales(group, block.K) and block.K >= PORTIONS * STEP and not operator.promote
    has_registers = sets * spec.fragments_m * operator.N <= SUMS and not operator.sums_in_words and spec.threads <= THREADS
    if not (is_alone and has_registers and are_portions and spec.a.observer is None):
        return None
    return QuantisedTile(block.M, block.K, group, layout.layout.has_zeros)


def shares_scales(group: int, depth: int) -> bool:
    """Whether a k-block has one scale a row, and a stage of ``depth`` along K begins with a group or lies in one."""
    return group % STEP == 0 and (group % depth == 0 or depth % group == 0)


# -- from global to shared memory -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class QuantisedTma(Tma):
    """TMA brings the words, and of each group of rows the scales and zero points, by tensor maps of their own."""

    @classmethod
    def of(cls, request: Request) -> QuantisedTma:
        tile: Any = request.operand.shared
        return cls(TmaCopy(tile.rows, tile.lines, 1, 0, 0, 0, 0, 0, False, False, 1, 0, 0))

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        tile, layout = request.operand.shared, request.operand.layout
        if not isinstance(tile, QuantisedTile) or not isinstance(layout, QuantisedTranspose):
            return "its tile is none of words"
        return request.why_no_tma(0) or next((why for _, info in _beside(layout) if (why := why_not(info, 1))), None)

    def other_arrays(self, operand: Operand) -> list[tuple[tuple[str, ...], ArrayInfo]]:
        return [(("layout", "layout", name), info) for name, info in _beside(operand.layout)]

    def map_spec(self, operand: Operand, info: ArrayInfo) -> tuple[int, TensorMapSpec]:
        tile: Any = operand.shared
        if info.dtype == WORDS:
            return 0, TensorMapSpec(info.dtype, (tile.rows, tile.lines))
        return 1, TensorMapSpec(info.dtype, (tile.rows, tile.groups))

    def prefetch(self, tensor_map: Any) -> None:
        each(prefetch_part, tensor_map)

    def start(self, spec: Any, operand: Any, tensor_map: Any, barrier: Any, slot: Slot, at: KTile) -> None:
        each(start_lines, tensor_map, spec, operand, StageFill(slot, at, barrier))


def _beside(layout: QuantisedTranspose) -> list[tuple[str, ArrayInfo]]:
    """The arrays beside the words, by their names in a `GroupQuantised`."""
    names = ("scales", "zeros") if layout.layout.has_zeros else ("scales",)
    return [(name, describe(getattr(layout.layout, name), name)) for name in names]


def start_lines(tensor_map: Any, n: int, spec: Any, operand: Any, fill: StageFill) -> None:
    """The copy of a tile's words (0), of its scales (1) or of its zero points (2)."""
    tile, stage = operand.shared, fill.slot.stage
    tma_load(tensor_map, (fill.at.m, udiv(fill.at.k, tile.spans[n])), shared(BYTES, operand.offset),
             stage * spec.stage_bytes + tile.begins[n], fill.barrier, stage)


# -- from shared memory to tensor cores -------------------------------------------------------------------------------

class StageFactors(NamedTuple):
    """Of a stage, by fragments: for each group of rows along K the scales and zero points of a lane's two rows. (Of 8-bit
    floats: what integers become beside these zero points.)"""

    scales: Any
    zeros: Any


@dataclass(frozen=True)
class DequantisingMainloop(WgmmaMainloop):
    """``portions`` groups of wgmmas a stage, of ``steps`` k-blocks each. While two are on their way, the registers of the
    next are filled, from words that were loaded a portion before: no portion waits for shared memory."""

    portions: int
    steps: int
    is_bfloat16: bool
    readers_are_warps = True
    is_float8 = False

    @classmethod
    def of(cls, spec: Any) -> DequantisingMainloop:
        """Short wgmmas go in pairs: fences and waits are then fewer."""
        if spec.operator.dtype.itemsize == 1:
            return Float8Mainloop(PORTIONS, 1, False)
        steps = spec.block.size.K // STEP
        together = 2 if spec.block.size.N <= NARROW and steps % 2 == 0 and steps >= 2 * PORTIONS else 1
        return cls(steps // together, together, spec.operator.dtype == BF16)

    def run(self, spec: Sm90Spec, group: int, slot: Slot, steps: int, work: Work, shape: StackShape) -> tuple:
        sums, b = nothing(spec), descriptor_b(spec)
        if steps > 0:                                  # around the waits, too: or ptxas makes each wgmma wait for the last
            previous = slot.stage
            spec.pipeline.wait(slot)
            factors = load_factors(spec, group, slot.stage)
            fragments = dequantised_portion(spec, load_portion(spec, group, slot.stage, 0), factors, 0)
            words = load_portion(spec, group, slot.stage, 1)
            for step in range(steps):
                after = spec.pipeline.advance(slot)
                ahead = choose_next(step + 1 < steps, after, slot)
                sums = start_portion(sums, spec, fragments, b, slot.stage, 0, min(step, 1))
                following = load_portion(spec, group, slot.stage, 2)
                fragments = dequantised_portion(spec, words, factors, 1)
                sums = wgmma_wait(1, sums)
                release_last(spec, previous, step)
                sums, fragments, words = fold(self.portions - 3, add_portion, (sums, fragments, following), spec, group,
                                              factors, b, slot.stage)
                sums, fragments, words, factors = add_last(sums, spec, group, fragments, words, factors, b, slot.stage,
                                                           ahead)
                sums = wgmma_wait(1, sums)
                previous = slot.stage
                slot = after
            sums = wgmma_wait(0, sums)
            spec.pipeline.release(previous)
        return sums, slot


@dataclass(frozen=True)
class Float8Mainloop(DequantisingMainloop):
    """Integers less their zero points are exact as 8-bit floats, and a stage lies in one group: its sums are multiplied by
    the group's scales as they are added to the total, while the tensor cores multiply the other consumer's stage.

    A fragment is 64 rows by 32 along K. Lane (g, t) has of rows g and g + 8 the elements 4 t to 4 t + 3 along K, and those
    16 behind: half t % 2 of words t / 2 and t / 2 + 2 of a row.
    """

    sets = 2
    is_float8 = True

    def run(self, spec: Sm90Spec, group: int, slot: Slot, steps: int, work: Work, shape: StackShape) -> tuple:
        total, b = nothing(spec), descriptor_b(spec)
        if steps > 0:
            spec.pipeline.wait(slot)
            factors = load_factors(spec, group, slot.stage)
            fragments = dequantised_portion(spec, load_portion(spec, group, slot.stage, 0), factors, 0)
            words = load_portion(spec, group, slot.stage, 1)
            for step in range(steps):
                after = spec.pipeline.advance(slot)
                ahead = choose_next(step + 1 < steps, after, slot)
                sums = start_portion(nothing(spec), spec, fragments, b, slot.stage, 0, 0)
                following = load_portion(spec, group, slot.stage, 2)
                fragments = dequantised_portion(spec, words, factors, 1)
                sums = wgmma_wait(1, sums)
                sums, fragments, words = fold(self.portions - 3, add_portion, (sums, fragments, following), spec, group,
                                              factors, b, slot.stage)
                scales = factors.scales
                sums, fragments, words, factors = add_last(sums, spec, group, fragments, words, factors, b, slot.stage,
                                                           ahead)
                sums = wgmma_wait(0, sums)
                spec.pipeline.release(slot.stage)
                total = apply(add_scaled, total, sums, scales)
                slot = after
        return total, slot


def add_scaled(total: tuple, m: int, sums: tuple, scales: tuple) -> tuple:
    return apply(add_scaled_value, total, sums[m], scales[m])


def add_scaled_value(total: Numeric, n: int, sums: tuple, scales: tuple) -> Any:
    return fma(sums[n], scales[n // 2 % 2], total)


def add_portion(state: tuple, n: int, spec: Any, group: int, factors: StageFactors, b: int, stage: int) -> tuple:
    """Start portion ``n + 1``; while it and the one before are on their way, the next one is dequantised, and the words of
    the one behind that are loaded."""
    sums = start_portion(state[0], spec, state[1], b, stage, n + 1, 1)
    following = load_portion(spec, group, stage, n + 3)
    fragments = dequantised_portion(spec, state[2], factors, n + 2)
    return wgmma_wait(1, sums), fragments, following


def add_last(sums: tuple, spec: Any, group: int, fragments: tuple, words: tuple, factors: StageFactors, b: int, stage: int,
             ahead: Slot) -> tuple:
    """Start the last two portions of a stage; of the stage ``ahead`` the first one is dequantised, and words of the second
    are loaded. The last portion is still on its way."""
    sums = start_portion(sums, spec, fragments, b, stage, spec.mainloop.portions - 2, 1)
    spec.pipeline.wait(ahead)
    first, following = load_portion(spec, group, ahead.stage, 0), load_factors(spec, group, ahead.stage)
    fragments = dequantised_portion(spec, words, factors, spec.mainloop.portions - 1)
    sums = start_portion(wgmma_wait(1, sums), spec, fragments, b, stage, spec.mainloop.portions - 1, 1)
    words = load_portion(spec, group, ahead.stage, 1)
    return sums, dequantised_portion(spec, first, following, 0), words, following


def start_portion(sums: tuple, spec: Any, fragments: tuple, b: int, stage: int, portion: int, accumulate: int) -> tuple:
    """Start the products of a portion, as a group; ``accumulate`` 0: in place of ``sums``."""
    fragments = apply(settle_step, fragments)
    wgmma_fence()
    first = spec.mainloop.steps * portion
    b = advance(b, stage * spec.stage_bytes)
    sums = spec.operator.multiply_fragments(sums, fragments[0], b, spec.b.shared, spec.block, first, accumulate)
    sums = fold(spec.mainloop.steps - 1, multiply_step, sums, spec, fragments, b, first)
    wgmma_commit()
    return sums


def settle_step(fragments: tuple, n: int) -> tuple:
    return apply(settle_fragment, fragments)


def settle_fragment(fragment: tuple, m: int) -> tuple:
    return settle(fragment)


def multiply_step(sums: tuple, n: int, spec: Any, fragments: tuple, b: int, first: int) -> tuple:
    return spec.operator.multiply_fragments(sums, fragments[n + 1], b, spec.b.shared, spec.block, first + n + 1, 1)


# -- a stage's words and scales ---------------------------------------------------------------------------------------

def load_portion(spec: Any, group: int, stage: int, portion: int) -> tuple:
    """The words of a lane's rows, by fragments, k-block by k-block."""
    return generate(spec.fragments_m, words_of_fragment, spec, first_row(spec, group), stage * spec.stage_bytes,
                    portion * spec.mainloop.steps)


def load_factors(spec: Any, group: int, stage: int) -> StageFactors:
    row, begin, count = first_row(spec, group), stage * spec.stage_bytes, 2 * spec.a.shared.groups
    scale = float_scale_of if spec.mainloop.is_float8 else scale_of
    return StageFactors(generate(spec.fragments_m, of_fragment, scale, count, spec, row, begin),
                        generate(spec.fragments_m, of_fragment, zero_of, count, spec, row, begin))


def first_row(spec: Sm90Spec, group: int) -> int:
    """The first row of a lane's first fragment."""
    return group * spec.first_rows + udiv(thread_index() % 128, 32) * 16 + udiv(lane_index(), 4)


def words_of_fragment(m: int, spec: Any, row: int, begin: int, first: int) -> tuple:
    return generate(FRAGMENT * spec.mainloop.steps, word_of, spec, row + 64 * m, begin, first)


def word_of(n: int, spec: Any, row: int, begin: int, first: int) -> Any:
    """Of k-block ``first`` + n / 4, in the order of a fragment's registers: rows g and g + 8, of eight elements along K and
    the next (of 8-bit floats of those 16 behind)."""
    line, row_ahead = 2 * (first + n // FRAGMENT) + n % FRAGMENT // 2, 8 * (n % 2)
    if spec.mainloop.is_float8:
        line, row = 2 * line, row + udiv(lane_index() % 4, 2) * spec.a.shared.rows
    return load_shared(shared(WORDS, spec.a.offset), udiv(begin, 4) + row, line * spec.a.shared.rows + row_ahead, 1)[0]


def of_fragment(m: int, factor: Callable[..., Any], count: int, spec: Any, row: int, begin: int) -> tuple:
    return generate(count, factor, spec, row + 64 * m, begin)


def scale_of(n: int, spec: Any, row: int, begin: int) -> Any:
    """Of group n / 2: the scale of row g or g + 8, in both halves of a word."""
    tile = spec.a.shared
    scale = load_shared(shared(HALVES, spec.a.offset + tile.begins[1]), udiv(begin, 2) + row,
                        n // 2 * tile.rows + 8 * (n % 2), 1)[0]
    return np.uint32(scale) * np.uint32(0x10001)


def float_scale_of(n: int, spec: Any, row: int, begin: int) -> Any:
    return np.float32(load_shared(shared(F16, spec.a.offset + spec.a.shared.begins[1]), udiv(begin, 2) + row, 8 * n, 1)[0])


def zero_of(n: int, spec: Any, row: int, begin: int) -> tuple:
    """What takes away the zero point of row g or g + 8 in group n / 2."""
    tile = spec.a.shared
    if tile.has_zeros:
        zero: Any = load_shared(shared(BYTES, spec.a.offset + tile.begins[2]), begin + row,
                                n // 2 * tile.rows + 8 * (n % 2), 1)[0]
        return float8_table(zero) if spec.mainloop.is_float8 else zero_words(4, zero)
    if spec.mainloop.is_float8:
        return float8_table(spec.a.layout.layout.middle)
    return zero_words(4, spec.a.layout.layout.middle)


# -- dequantisation ---------------------------------------------------------------------------------------------------

def dequantised_portion(spec: Any, words: tuple, factors: StageFactors, portion: int) -> tuple:
    """The fragments of a portion, k-block by k-block."""
    return generate(spec.mainloop.steps, dequantised_step, spec, words, factors, portion * spec.mainloop.steps)


def dequantised_step(n: int, spec: Any, words: tuple, factors: StageFactors, first: int) -> tuple:
    return generate(spec.fragments_m, dequantised_fragment, spec, words, factors, n, first + n)


def dequantised_fragment(m: int, spec: Any, words: tuple, factors: StageFactors, n: int, step: int) -> tuple:
    """Of the ``n``-th k-block of a portion, which is the ``step``-th of the stage."""
    given = generate(FRAGMENT, part_of, words[m], FRAGMENT * n)
    if spec.mainloop.is_float8:
        return as_float8(given, lane_index() % 2, factors.zeros[m])
    factor = 2 * (step * STEP // spec.a.shared.group % spec.a.shared.groups)
    found = dequantise_bytes(given, lane_index() % 4, generate(2, part_of, factors.zeros[m], factor),
                             generate(2, part_of, factors.scales[m], factor))
    return as_bfloat16(found) if spec.mainloop.is_bfloat16 else found


def part_of(n: int, values: tuple, first: int) -> Any:
    return values[first + n]


