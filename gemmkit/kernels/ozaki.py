"""Float64 products from exact int8 products (Ozaki scheme II; Uchino, Ozaki and Imamura, arXiv 2508.03984): device code.

A row of A and a column of B are scaled, each by its own power of two, and rounded to whole numbers x and y. Their product C
is a whole number below P / 2, where P is the product of coprime moduli p_t. So C follows from its remainders, and these
follow from remainders of x and y: one int8 product for each modulus.

1. `split` finds each row's scale, and writes remainders of its whole numbers, a plane of int8 a modulus.
2. A stack of int8 products multiplies planes. Its epilogue, `gemmkit.plans.ozaki.Remainder`, stores the remainder of each
   sum as a byte.
3. `recombine` adds up the remainders, each times its weight (P / p_t) ((P / p_t)^-1 mod p_t), subtracts the multiple of P
   in the sum, scales the rest, and hands it to D's epilogue.

**Scales.** Cauchy's inequality bounds C by the 2-norms of x and y. So each norm may be the root of P / 2, less what rounding
adds. A bound by the largest elements would need log2(K) bits more, and normal data would lose two bits of each operand.

**Remainders without a quotient that is off by one.** Float64 first takes the remainder by a pair of moduli. Its quotient
is within 1/2 + 2^-5 of the exact one, so a whole number below 2^16 is left. Float32 then takes remainders by one
modulus exactly: the quotient is computed to 2^-14, and is never within 2^-9 of a tie, because moduli are odd. (The low byte
is the remainder by 256.)

**Weights** have three float64 of 42 bits each, so that sums of their products with bytes are exact, and so is the
subtraction of a multiple of P, which has three parts like them. C is rounded when these are added up, and nowhere before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.collectives.operand import column_of, row_of
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric, View
from gemmkit.lang.registers import apply, fold, generate, join
from gemmkit.layouts.base import element_of
from gemmkit.ptx.arithmetic import fused
from gemmkit.ptx.memory import (
    load_global,
    load_shared,
    load_words,
    pack_words,
    shared,
    store_global,
    store_shared,
    unpack_words,
)
from gemmkit.ptx.special import SHUFFLE, barrier, block_x, lane_index, thread_index, udiv
from gemmkit.tiling import Tile, translate

#: Pairwise coprime, the largest that int8 remainders allow.
MODULI = 256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193
FEWEST = 13                            # moduli: 12 leave a row 46 bits
MOST_K = 2**17                         # terms: 127^2 K is below 2^31
PART, PARTS = 42, 3                    # bits of a part of a weight, and how many parts it has
BAD = 2**20                            # stands for a scale: the row has an infinity or a NaN
F64, F32, U32, I8, U8 = (np.dtype(x) for x in ("f8", "f4", "u4", "i1", "u1"))

# To add one of these and to subtract it rounds to a whole number. `BOTH` leaves the whole number in the low word, as a
# float32 that `ROUND32` has been added to.
ROUND64, ROUND32 = 1.5 * 2.0**52, 1.5 * 2.0**23
BYTE = 2.0**52 + 128                   # a byte in the low word of 2^52, less this, is from -128 to 127
BOTH = ROUND64 + int(np.float32(ROUND32).view(np.uint32))


# --------------------------------------------------------------------------------------------------
# Constants, all of which follow from how many moduli there are.

@dataclass(frozen=True)
class Residues(Component):
    """The first ``count`` moduli.

    >>> Residues(14).bits, Residues(15).bits
    (54, 58)
    """

    count: int

    @cached_property
    def moduli(self) -> tuple[int, ...]:
        return MODULI[:self.count]

    @cached_property
    def product(self) -> int:
        """P."""
        return math.prod(self.moduli)

    @cached_property
    def bits(self) -> int:
        """Whole bits of a row's 2-norm."""
        return ((self.product // 2).bit_length() - 1) // 2

    def norm(self, K: int) -> float:
        """The largest 2-norm of a scaled row of ``K`` elements before it is rounded: that of the rounded one is larger by
        half a root of K at most, and its square stays below P / 2 by a margin for the errors of sums of squares and of the
        last quotient."""
        return math.sqrt(self.product / 2) * (1 - 2.0**-20) - math.sqrt(K) / 2

    # -- remainders ---------------------------------------------------------------------------------------------------

    @cached_property
    def pairs(self) -> int:
        return -(-self.count // 2)

    @cached_property
    def of_pairs(self) -> tuple[float, ...]:
        """Products of two moduli; the last may stand alone."""
        return tuple(float(math.prod(self.moduli[n:n + 2])) for n in range(0, self.count, 2))

    @cached_property
    def inverse_pairs(self) -> tuple[float, ...]:
        return tuple(1 / x for x in self.of_pairs)

    @cached_property
    def inverse_singles(self) -> tuple[np.float32, ...]:
        return tuple(np.float32(1 / x) for x in self.moduli)

    @cached_property
    def centres(self) -> tuple[int, ...]:
        """What is added to remainders by `gemmkit.plans.ozaki.Remainder`."""
        return tuple(p % 2 for p in self.moduli)

    @cached_property
    def packed(self) -> tuple[np.uint64, np.uint64]:
        """256 less each modulus, as bytes of two words."""
        lines = [sum(256 - p << 8 * n for n, p in enumerate(self.moduli[first:first + 8])) for first in (0, 8)]
        return np.uint64(lines[0]), np.uint64(lines[1])

    # -- weights ------------------------------------------------------------------------------------------------------

    @cached_property
    def weights(self) -> tuple[int, ...]:
        return tuple(self.product // p * pow(self.product // p, -1, p) for p in self.moduli)

    def parts(self, n: int) -> tuple[float, ...]:
        """A number below P as multiples of powers of two, each exact."""
        found, steps = [], [1 << max(0, self.product.bit_length() - PART * part) for part in range(1, PARTS + 1)]
        for step in steps:
            found.append(float(n // step * step))
            n %= step
        return tuple(found)

    @cached_property
    def of_weights(self) -> tuple[tuple[float, ...], ...]:
        return tuple(map(self.parts, self.weights))

    @cached_property
    def start(self) -> tuple[float, ...]:
        """What the sums of weights begin at: bytes, less 128, are remainders plus ``centres`` less 128."""
        return self.parts(sum(w * (128 - c) for w, c in zip(self.weights, self.centres)) % self.product)

    @cached_property
    def whole(self) -> tuple[float, ...]:
        """P."""
        return self.parts(self.product)

    @cached_property
    def inverse(self) -> float:
        return float(Fraction(1, self.product))


# --------------------------------------------------------------------------------------------------
# 1. Rows to planes.

PIECE, RUN = 16, 4                     # elements of a row that a thread has at a time; neighbours among them
LANES = 32
exchanged = SHUFFLE["bfly"]
INFINITY = 0x7FF00000                  # an infinity's upper word; a NaN's is the same or larger
SAFE = 1023 - 400 << 20, 1023 + 400 << 20            # upper words of magnitudes whose squares are added as they are
DOWN, UP = -600, 800                   # others' are those of numbers times powers of two


@dataclass(frozen=True)
class RowSplit(Component):
    """How threads split rows, which lie along the ``axis`` of their array.

    A block of ``warps`` warps takes ``rows`` rows: one whose elements are neighbours in memory, or several rows that are
    neighbours. ``held``: threads hold all of a row from one load.
    """

    residues: Residues
    axis: int
    warps: int
    rows: int
    held: bool

    @cached_property
    def threads(self) -> int:
        return LANES * self.warps

    @cached_property
    def step(self) -> int:
        """Elements of a row that a block has at a time."""
        return self.threads // self.rows * PIECE

    @cached_property
    def shared_bytes(self) -> int:
        return self.warps * self.rows * 8

    def row(self) -> int:
        return block_x() * self.rows + thread_index() % self.rows

    def load(self, x: View, row: int, base: int, count: int, columns: int) -> tuple:
        """A thread's piece of a row; zeros beyond its end."""
        if self.rows == 1:
            return join(generate(PIECE // RUN, load_run, self, x, row, base, columns))
        return generate(PIECE, load_one, self, x, row, base + udiv(thread_index(), self.rows) * PIECE, count, columns)

    def at(self, row: int, k: int) -> tuple:
        return (row, k) if self.axis == 1 else (k, row)

    def reduce(self, value: Numeric, combine: Callable, dtype: np.dtype) -> Any:
        """What all threads of a row have, combined. Each warp leaves its own in shared memory; the block meets before, for
        what was left there last may still be read, and after."""
        n = self.rows
        while n < LANES:
            value = combine(value, exchanged(value, n))
            n = 2 * n
        left = shared(dtype, 0)
        barrier()
        if lane_index() < self.rows:
            store_shared(left, udiv(thread_index(), LANES) * self.rows + lane_index(), 0, (value,))
        barrier()
        found = load_shared(left, thread_index() % self.rows, 0, 1)[0]
        for warp in range(1, self.warps):
            found = combine(found, load_shared(left, warp * self.rows + thread_index() % self.rows, 0, 1)[0])
        return found


def run_at(p: int, how: RowSplit, base: int) -> int:
    return base + (p * how.threads + thread_index()) * RUN


def load_run(p: int, how: RowSplit, x: View, row: int, base: int, columns: int) -> tuple:
    k = run_at(p, how, base)
    if k + RUN <= columns:
        return load_global(x, how.axis, how.at(row, k), (0, 0), RUN)
    return generate(RUN, load_one, how, x, row, k, row + 1, columns)


def load_one(i: int, how: RowSplit, x: View, row: int, k: int, count: int, columns: int) -> Any:
    if row < count and k + i < columns:
        return load_global(x, how.axis, how.at(row, k + i), (0, 0), 1)[0]
    return np.float64(0)


def split(how: RowSplit, x: View, planes: View, scales: View, first: int, count: int, columns: int, limit: Numeric) -> None:
    """Rows ``first`` to ``first + count`` of x, of ``columns`` elements, as planes; ``limit`` is the square of
    `Residues.norm`."""
    own = how.row()
    row, end = first + own, first + count
    # The upper word of the largest magnitude, and the sum of squares.
    kept = how.load(x, row, 0, end, columns)
    top = fold(PIECE, with_largest, np.uint32(0), kept)
    squares = fold(PIECE, with_square, np.float64(0), kept, np.float64(1))
    if not how.held:
        base = how.step
        while base < columns:
            piece = how.load(x, row, base, end, columns)
            top = fold(PIECE, with_largest, top, piece)
            squares = fold(PIECE, with_square, squares, piece, np.float64(1))
            base += how.step
    top = how.reduce(top, larger, U32)
    factor, shift = np.float64(1), 0
    if top > SAFE[1]:
        factor, shift = np.float64(2.0**DOWN), DOWN
    elif top < SAFE[0]:
        factor, shift = np.float64(2.0**UP), UP
    if shift != 0:
        squares = squares_of(how, x, row, end, columns, factor)
    squares = how.reduce(squares, added, F64)
    scale = scale_of(top, squares, limit, shift)
    if thread_index() < how.rows and row < end:
        store_global(scales, 0, (own,), (0,), (np.int32(scale),))
    if scale != BAD and row < end:                                # nothing is taken of planes of a row without a scale
        one, other = power(scale >> 1), power(scale - (scale >> 1))
        if how.held:
            put(how, kept, planes, own, 0, one, other)
        else:
            base = 0
            while base < columns:
                put(how, how.load(x, row, base, end, columns), planes, own, base, one, other)
                base += how.step


def squares_of(how: RowSplit, x: View, row: int, end: int, columns: int, factor: Numeric) -> Any:
    """A thread's sum of squares of its elements times ``factor``."""
    squares, base = np.float64(0), 0
    while base < columns:
        squares = fold(PIECE, with_square, squares, how.load(x, row, base, end, columns), factor)
        base += how.step
    return squares


def scale_of(top: Any, squares: Numeric, limit: Numeric, shift: int) -> int:
    """The largest s for which 4^s times a sum of squares is at most ``limit``, plus the ``shift`` of its terms. A row of
    zeros has 0, one that is not finite `BAD`."""
    if top >= INFINITY:
        return BAD
    if squares > 0:
        return shift + ((int(pack_words((limit / squares,))[1]) >> 20) - 1023 >> 1)
    return 0


def with_largest(top: Numeric, i: int, values: tuple) -> Any:
    return larger(pack_words((values[i],))[1] & np.uint32(0x7FFFFFFF), top)


def larger(a: Numeric, b: Numeric) -> Any:
    return a if a > b else b


def added(a: Numeric, b: Numeric) -> Any:
    return a + b


def with_square(squares: Numeric, i: int, values: tuple, factor: Numeric) -> Any:
    x = values[i] * factor
    return squares + x * x


def power(n: int) -> Any:
    """2^n, of an exponent from -1022 to 1023."""
    return unpack_words(F64, (np.uint32(0), np.uint32((n + 1023) << 20)))[0]


def put(how: RowSplit, values: tuple, planes: View, row: int, base: int, one: Numeric, other: Numeric) -> None:
    """A thread's piece of a row to all planes, as far as these have place for it."""
    if how.rows == 1:
        fold(PIECE // RUN, put_run, 0, how, values, planes, row, base, one, other)
    else:
        k = base + udiv(thread_index(), how.rows) * PIECE
        if k < planes.shape[2]:
            put_values(how, values, planes, row, k, one, other)


def put_run(_: int, p: int, how: RowSplit, values: tuple, planes: View, row: int, base: int, one: Numeric,
            other: Numeric) -> int:
    k = run_at(p, how, base)
    if k < planes.shape[2]:
        put_values(how, (values[RUN * p], values[RUN * p + 1], values[RUN * p + 2], values[RUN * p + 3]), planes, row, k,
                   one, other)
    return 0


def put_values(how: RowSplit, values: tuple, planes: View, row: int, k: int, one: Numeric, other: Numeric) -> None:
    fold(how.residues.pairs, put_pair, 0, how.residues, apply(to_whole, values, one, other), planes, row, k)


def to_whole(x: Any, i: int, one: Any, other: Any) -> Any:
    """Rounded to nearest."""
    return np.float64(round(x * one * other))


def put_pair(_: int, p: int, of: Residues, wholes: tuple, planes: View, row: int, k: int) -> int:
    rough = apply(by_pair, wholes, of.of_pairs[p], of.inverse_pairs[p])
    store_global(planes, 2, (0, row, k), (2 * p, 0, 0), apply(by_single, rough, of, 2 * p))
    if 2 * p + 1 < of.count:
        store_global(planes, 2, (0, row, k), (2 * p + 1, 0, 0), apply(by_single, rough, of, min(2 * p + 1, of.count - 1)))
    return 0


def by_pair(x: Numeric, i: int, modulus: Any, inverse: Numeric) -> Any:
    """A whole number's remainder by a product of two moduli, below 2^16 in magnitude: as a float32 that `ROUND32` has been
    added to, in a word."""
    quotient = (x * inverse + ROUND64) - ROUND64
    return pack_words((fused(-quotient, np.float64(modulus), x) + BOTH,))[0]


def by_single(word: Any, i: int, of: Residues, n: int) -> Any:
    """The remainder by one modulus p, from -p / 2 to p / 2, of what `by_pair` makes. Its low byte is that of the difference
    of words, since `ROUND32` has none."""
    x = unpack_words(F32, (word,))[0] - np.float32(ROUND32)
    quotient = pack_words((x * of.inverse_singles[n] + np.float32(ROUND32),))[0]
    return np.int8(word - quotient * np.uint32(of.moduli[n]))


# --------------------------------------------------------------------------------------------------
# 3. Remainders to D.

THREADS, ELEMENTS = 256, 4             # of a block; neighbours in D that a thread has
LOW = 2000                             # exponents beyond it make 0 or infinity of any whole number


@dataclass(frozen=True)
class Recombination(Component):
    """How threads recombine remainders: ``ELEMENTS`` neighbours in D each, along its ``axis``, the planes' last one."""

    residues: Residues
    axis: int

    @cached_property
    def tile(self) -> Tile:
        return Tile(M=1, N=ELEMENTS) if self.axis == 1 else Tile(M=ELEMENTS, N=1)


def recombine(spec: Any, a: View, b: View, c: View, d: View, shape: Any, how: Recombination, planes: View, across: View,
              along: View, first_i: int, first_j: int, rows: int, columns: int) -> None:
    """D's elements of ``rows`` lines of planes, of ``columns`` each. ``across`` has the lines' scales, ``along`` those of
    places in them; line 0 and place 0 are ``first_i`` and ``first_j`` in D. ``spec`` is that of the float64 product."""
    item = block_x() * THREADS + thread_index()
    pieces = udiv(columns + ELEMENTS - 1, ELEMENTS)
    i = udiv(item, pieces)
    j = (item - i * pieces) * ELEMENTS
    if i < rows:
        of = how.residues
        found = generate(of.count, load_remainders, planes, i, j)
        place = (translate(how.tile, first_i + i, first_j + j) if how.axis == 1
                 else translate(how.tile, first_j + j, first_i + i))
        values = generate(ELEMENTS, to_element, how, found, across, along, i, j, columns)
        if any_bad(across, along, i, j, columns):
            values = apply(in_float64, values, place, across, along, i, j, columns, a, b, shape)
        if spec.has_c:
            values = apply(with_c, values, spec, c, place, shape)
        spec.epilogue.tile(spec, d, place, values, shape)


def load_remainders(t: int, planes: View, i: int, j: int) -> Any:
    """Four bytes, as a word."""
    return load_words(planes, 2, (t, i, j), (0, 0, 0), ELEMENTS)[0]


def scale_at(scales: View, n: int, end: int) -> Any:
    """Beyond the end the last one."""
    return int(load_global(scales, 0, (min(n, end - 1),), (0,), 1)[0])


def any_bad(across: View, along: View, i: int, j: int, columns: int) -> bool:
    worst = fold(ELEMENTS, with_scale, scale_at(across, i, i + 1), along, j, columns)
    return worst == BAD


def with_scale(worst: Numeric, e: int, along: View, j: int, columns: int) -> Any:
    return max(worst, scale_at(along, j + e, columns))


def to_element(e: int, how: Recombination, found: tuple, across: View, along: View, i: int, j: int, columns: int) -> Any:
    whole = whole_of(how.residues, found, e)
    exponent = max(-LOW, min(LOW, -(scale_at(across, i, i + 1) + scale_at(along, j + e, columns))))
    half = exponent >> 1
    return whole * power(half) * power(exponent - half)


def whole_of(of: Residues, words: tuple, e: int) -> Any:
    """The whole number, between -P / 2 and P / 2, that the ``e``-th bytes of words are remainders of."""
    start = np.float64(of.start[0]), np.float64(of.start[1]), np.float64(of.start[2])
    sums = fold(of.count, with_weight, start, of, words, e)
    quotient = (sums[0] * of.inverse + ROUND64) - ROUND64
    left = apply(less_multiple, sums, of, quotient)
    return left[0] + left[1] + left[2]


def less_multiple(sum: Numeric, part: int, of: Residues, quotient: Numeric) -> Any:
    return fused(-quotient, np.float64(of.whole[part]), sum)


def with_weight(sums: tuple, t: int, of: Residues, words: tuple, e: int) -> tuple:
    byte = unpack_words(F64, (words[t] >> np.uint32(8 * e) & np.uint32(255), np.uint32(0x43300000)))[0] - BYTE
    return apply(with_part, sums, of, t, byte)


def with_part(sum: Numeric, part: int, of: Residues, t: int, byte: Any) -> Any:
    return sum + byte * of.of_weights[t][part]


def in_float64(x: Numeric, e: int, place: Tile, across: View, along: View, i: int, j: int, columns: int, a: View, b: View,
               shape: Any) -> Any:
    """An element whose row of A or column of B has an infinity or a NaN: what the sum of float64 products is."""
    if j + e < columns and (scale_at(across, i, i + 1) == BAD or scale_at(along, j + e, columns) == BAD):
        m, n = row_of(place, e), column_of(place, e)
        total = np.float64(0)
        for k in range(shape.K):
            total += load_global(a, 1, (m, k), (0, 0), 1)[0] * load_global(b, 0, (k, n), (0, 0), 1)[0]
        return total
    return x


def with_c(x: Numeric, e: int, spec: Any, c: View, place: Tile, shape: Any) -> Any:
    m, n = row_of(place, e), column_of(place, e)
    if m < shape.M and n < shape.N:
        return x + np.float64(element_of(spec.c.layout, c, m, n, shape))
    return x
