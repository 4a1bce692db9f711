"""Steps 1 and 2 of `quantised`: a warp's ring of loads in registers.

A k-tile of the block is divided among the ``warps_k`` warps that have the same columns; a warp's part is ``slabs``
operations along K. The ring has a place for each of ``stages`` parts. A place is filled anew as soon as it has been
multiplied, so that nothing waits for the slowest warp.

Rows of A beyond the last are read as the last one, and columns of B beyond the last as the last four: what they give is
never stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gemmkit.kernels.common.work import Work
from gemmkit.lang.control import fold, join
from gemmkit.lang.registers import generate, registers
from gemmkit.ptx.dequantise import as_bfloat16, dequantise_word, zero_words
from gemmkit.ptx.special import lane_index, rolled, udiv
from gemmkit.ptx.words import load_words, weave_words

VECTOR = 8                             # elements of A in 16 bytes


class Source(NamedTuple):
    """Both operands, and where a lane's elements lie: its first row of A, its first column of B, its first row of B in an
    operation, the last row of A, and the last columns of B."""

    a: Any
    b: Any
    row: Any
    column: Any
    k: Any
    last: Any
    last_column: Any


class Ring(NamedTuple):
    """Registers of the parts that are on their way."""

    words: Any
    a: Any
    scales: Any
    zeros: Any


class Walk(NamedTuple):
    """Where a warp's part begins, where K (or the block's share of it) ends, and the step from a part to its next."""

    at: Any
    end: Any
    step: Any


class Factors(NamedTuple):
    """Of a part, by fragments: what a lane's four columns are multiplied by, and what is taken away before."""

    scales: Any
    zeros: Any


def run(spec: Any, accumulators: Any, a: Any, b: Any, work: Work, warp: int, shape: Any) -> None:
    """The products of a block's share of K, each warp's added to its accumulators."""
    of_n, of_k, lane = warp % spec.warps_n, udiv(warp, spec.warps_n), lane_index()
    column = work.n + of_n * spec.compute_warp.size.N + udiv(lane, 4) * 4
    source = Source(a, b, work.m + udiv(lane, 4), column, lane % 4 * spec.operator.rows, shape.M - 1, shape.N - 4)
    ring = Ring(registers(spec.words, spec.stages * spec.loads_b), registers(spec.vectors, spec.stages * spec.loads_a),
                registers(spec.scale_words, spec.stages * spec.fragments_n),
                registers(spec.zero_words, spec.stages * spec.fragments_n))
    step = spec.block.size.K
    at = work.k_begin + of_k * spec.compute_warp.size.K
    end = min(work.k_begin + work.k_tiles * step, shape.K)
    fold(spec.stages, fill, 0, spec, ring, source, Walk(at, end, step))
    while at < end:
        fold(spec.stages, one_place, 0, spec, ring, accumulators, source, Walk(at, end, step))
        at = rolled(at + spec.stages * step)


# -- loads ------------------------------------------------------------------------------------------------------------

def fill(_: int, place: int, spec: Any, ring: Ring, source: Source, walk: Walk) -> int:
    """Load the part that is ``place`` parts ahead, if there is one."""
    k = walk.at + place * walk.step
    if k < walk.end:
        load(spec, ring, source, place, k)
    return 0


def load(spec: Any, ring: Ring, source: Source, place: int, k: int) -> None:
    """A part that begins at ``k``, to its place in the ring."""
    fold(spec.loads_b, load_of_b, 0, spec, ring, source, place, k)
    fold(spec.fragments_n, load_scales, 0, spec, ring, source, place, udiv(k + source.k, spec.b.layout.group))
    fold(spec.loads_a, load_of_a, 0, spec, ring, source, place, k)


def load_of_b(_: int, n: int, spec: Any, ring: Ring, source: Source, place: int, k: int) -> int:
    """16 bytes: of the operations along K one after the other, of each its fragments' columns."""
    slab, fragment = n // spec.fragments_n, n % spec.fragments_n
    at = udiv(k + source.k, spec.operator.rows), own_column(fragment, spec, source)
    ring.words[place * spec.loads_b + n] = load_words(source.b, 1, at, (4 * slab, 0), 4)
    return 0


def load_scales(_: int, fragment: int, spec: Any, ring: Ring, source: Source, place: int, group: int) -> int:
    at, n = (group, own_column(fragment, spec, source)), place * spec.fragments_n + fragment
    ring.scales[n] = load_words(spec.b.layout.scales, 1, at, (0, 0), 4)
    if spec.b.layout.has_zeros:
        ring.zeros[n] = load_words(spec.b.layout.zeros, 1, at, (0, 0), 4)
    return 0


def own_column(fragment: int, spec: Any, source: Source) -> int:
    """The first of a lane's four columns of a fragment."""
    return min(source.column + fragment * spec.operation.size.N, source.last_column)


def load_of_a(_: int, n: int, spec: Any, ring: Ring, source: Source, place: int, k: int) -> int:
    """16 bytes: of the operations along K one after the other, of each the lane's rows, of each its places along K."""
    slab, row, vector = n // (spec.fragments_m * spec.vectors_a), n // spec.vectors_a % spec.fragments_m, n % spec.vectors_a
    ahead = slab * spec.operation.size.K + vector * VECTOR
    ring.a[place * spec.loads_a + n] = load_words(source.a, 1, (min(source.row + 8 * row, source.last), k + source.k),
                                                  (0, ahead), VECTOR)
    return 0


# -- products ---------------------------------------------------------------------------------------------------------

def one_place(_: int, place: int, spec: Any, ring: Ring, accumulators: Any, source: Source, walk: Walk) -> int:
    """The products of a part, whose place then takes the one that is ``stages`` parts ahead."""
    k = walk.at + place * walk.step
    if k < walk.end:
        multiply(spec, ring, accumulators, place)
        following = k + spec.stages * walk.step
        if following < walk.end:
            load(spec, ring, source, place, following)
    return 0


def multiply(spec: Any, ring: Ring, accumulators: Any, place: int) -> None:
    scales = generate(spec.fragments_n, scales_of, spec, ring, place)
    zeros = generate(spec.fragments_n, zeros_of, spec, ring, place)
    fold(spec.slabs, one_slab, 0, spec, ring, accumulators, Factors(scales, zeros), place)


def scales_of(fragment: int, spec: Any, ring: Ring, place: int) -> tuple:
    """The scales of a lane's four columns, each in both halves of a word."""
    scales = ring.scales[place * spec.fragments_n + fragment]
    return weave_words((scales, scales))


def zeros_of(fragment: int, spec: Any, ring: Ring, place: int) -> tuple:
    """What takes away the zero points of a lane's four columns."""
    return generate(4, zeros_of_column, spec, ring, place * spec.fragments_n + fragment)


def zeros_of_column(column: int, spec: Any, ring: Ring, at: int) -> tuple:
    if spec.b.layout.has_zeros:
        return zero_words(spec.operator.bits, ring.zeros[at][0] >> np.uint32(8 * column) & np.uint32(0xFF))
    return zero_words(spec.operator.bits, spec.b.layout.middle)


def one_slab(_: int, slab: int, spec: Any, ring: Ring, accumulators: Any, factors: Any, place: int) -> int:
    """An operation along K, of all rows and columns."""
    n = place * spec.slabs + slab
    b = generate(spec.fragments_n, dequantised, spec, ring, n, factors.zeros, factors.scales)
    fold(spec.fragments_m, one_fragment, 0, spec, ring, accumulators, b, n)
    return 0


def dequantised(fragment: int, spec: Any, ring: Ring, slab: int, zeros: tuple, scales: tuple) -> tuple:
    return generate(4, dequantised_column, spec, ring.words[slab * spec.fragments_n + fragment], zeros[fragment],
                    scales[fragment])


def dequantised_column(column: int, spec: Any, words: tuple, zeros: tuple, scales: tuple) -> tuple:
    found = dequantise_word(spec.operator.bits, words[column], zeros[column], scales[column])
    return as_bfloat16(found) if spec.operator.is_bfloat16 else found


def one_fragment(_: int, m: int, spec: Any, ring: Ring, accumulators: Any, b: tuple, slab: int) -> int:
    """A fragment's rows by all columns."""
    fold(spec.fragments_n, one_product, 0, spec, accumulators, pairs_of_row(spec, ring, slab * spec.fragments_m + m), b, m)
    return 0


def one_product(_: int, n: int, spec: Any, accumulators: Any, a: tuple, b: tuple, m: int) -> int:
    accumulators[m, n] = spec.operator.mma(a, b[n], accumulators[m, n])
    return 0


def pairs_of_row(spec: Any, ring: Ring, row: int) -> tuple:
    """The lane's places along K of its row of a fragment, in the pairs that B has."""
    words = join(generate(spec.vectors_a, vector_of, ring, row * spec.vectors_a))
    return weave_words((generate(spec.operator.pairs // 2, word_of, words, 0),
                        generate(spec.operator.pairs // 2, word_of, words, spec.operator.pairs // 2)))


def vector_of(n: int, ring: Ring, first: int) -> tuple:
    return ring.a[first + n]


def word_of(n: int, words: tuple, first: int) -> Any:
    return words[first + n]
