"""Products from exact int8 products (Ozaki scheme II; Uchino, Ozaki and Imamura, arXiv 2508.03984): device code.

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

**Complex numbers take two int8 products a modulus, where real matrices would take four and Karatsuba's formula three.** If
all prime factors of p are 1 modulo 4, there is a j with j^2 = -1 modulo p. The map of x + iy to (x + jy, x - jy) modulo p
turns the complex product into two products of whole numbers u and v that do not mix, and back come (u + v) / 2 and
(u - v) / 2j. (The quadratic residue number system; Krogmeier and Jenkins, 1983.) Remainders are exact, so the cancellation
costs no digit. Such moduli are smaller: 15 are as exact as 14 of the others. Row norms are those of complex numbers, and
bound the real and the imaginary part alike.

**Float32 and complex64** elements are float64 from where they are loaded to D's store, with half as many moduli.

**Stacks** of products have a dimension more: planes lie product by product, and all products are one launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.collectives.operand import column_of, row_of
from gemmkit.kernels.collectives.scheduler import StackSteps
from gemmkit.lang.aggregates import convert
from gemmkit.lang.component_products import matrix_of, of_product
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric, View
from gemmkit.lang.registers import apply, deal, each, fold, generate, join
from gemmkit.lang.registers import split as divided_up
from gemmkit.layouts import Plain
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
from gemmkit.transforms import Transform
from gemmkit.transforms.base import transformed

#: Pairwise coprime, the largest that int8 remainders allow.
MODULI = 256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193
#: The largest of prime factors that are 1 modulo 4.
GAUSSIAN = 241, 233, 229, 221, 205, 197, 193, 181, 173, 157, 149, 137, 113, 109, 101, 97
MOST_K = 2**17                         # terms: 127^2 K is below 2^31
PARTS = 3                              # of a weight
LEAST_BITS = 40                        # what first parts leave out is then below 2^-29 of P, whatever the remainders
BAD = 2**20                            # stands for a scale: the row has an infinity or a NaN
F64, F32, U32, I8, U8, C128 = (np.dtype(x) for x in ("f8", "f4", "u4", "i1", "u1", "c16"))

# To add one of these and to subtract it rounds to a whole number. `BOTH` leaves the whole number in the low word, as a
# float32 that `ROUND32` has been added to.
ROUND64, ROUND32 = 1.5 * 2.0**52, 1.5 * 2.0**23
BYTE = 2.0**52 + 128                   # a byte in the low word of 2^52, less this, is from -128 to 127
TWO = 2.0**52 + 256                    # the same of a sum of two, from -256 to 254, and of a difference plus 256
BOTH = ROUND64 + int(np.float32(ROUND32).view(np.uint32))


# --------------------------------------------------------------------------------------------------
# Constants, all of which follow from how many moduli there are.

@dataclass(frozen=True)
class Residues(Component):
    """The first ``count`` moduli, of real numbers. A modulus has ``parts`` planes.

    >>> Residues(14).bits, Residues(15).bits
    (54, 58)
    """

    count: int

    parts: ClassVar[int] = 1
    listed: ClassVar[tuple[int, ...]] = MODULI
    dtype: ClassVar[np.dtype] = F64

    @staticmethod
    def of(dtype: np.dtype, count: int) -> Residues:
        """Those of operands of this dtype."""
        return GaussianResidues(count) if dtype.kind == "c" else Residues(count)

    @cached_property
    def moduli(self) -> tuple[int, ...]:
        return self.listed[:self.count]

    @cached_property
    def planes(self) -> int:
        return self.count * self.parts

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
        half a root of its numbers at most, and its square stays below P / 2 by a margin for the errors of sums of squares
        and of the last quotient."""
        return math.sqrt(self.product / 2) * (1 - 2.0**-20) - math.sqrt(self.parts * K) / 2

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
    def packed(self) -> tuple[np.uint64, np.uint64]:
        """256 less each modulus, as bytes of two words."""
        lines = [sum(256 - p << 8 * n for n, p in enumerate(self.moduli[first:first + 8])) for first in (0, 8)]
        return np.uint64(lines[0]), np.uint64(lines[1])

    # -- weights ------------------------------------------------------------------------------------------------------

    def weights_of(self, factors: Sequence[int]) -> tuple[int, ...]:
        """Of each modulus what is 0 modulo the others, and one of the ``factors`` modulo itself."""
        return tuple(self.product // p * (pow(self.product // p, -1, p) * factor % p)
                     for p, factor in zip(self.moduli, factors))

    @cached_property
    def weights(self) -> tuple[int, ...]:
        return self.weights_of((1,) * self.count)

    @cached_property
    def part_bits(self) -> int:
        """Of a part of a weight: of the first, from which the multiple of P follows, `LEAST_BITS` at least."""
        return max(LEAST_BITS, -(-self.product.bit_length() // PARTS))

    def in_parts(self, n: int) -> tuple[float, ...]:
        """A number below P as multiples of powers of two, each exact."""
        found = []
        for part in range(1, PARTS + 1):
            step = 1 << max(0, self.product.bit_length() - self.part_bits * part)
            found.append(float(n // step * step))
            n %= step
        return tuple(found)

    @cached_property
    def of_weights(self) -> tuple[tuple[float, ...], ...]:
        return tuple(map(self.in_parts, self.weights))

    @cached_property
    def start(self) -> tuple[float, ...]:
        """What the sums of weights begin at: bytes less 128 are added."""
        return self.in_parts(128 * sum(self.weights) % self.product)

    @cached_property
    def whole(self) -> tuple[float, ...]:
        """P."""
        return self.in_parts(self.product)

    @cached_property
    def inverse(self) -> float:
        return float(Fraction(1, self.product))


@dataclass(frozen=True)
class GaussianResidues(Residues):
    """The first ``count`` moduli of complex numbers. Planes 2 t and 2 t + 1 are those of modulus t: x + jy and x - jy.

    >>> GaussianResidues(14).bits, GaussianResidues(15).bits
    (51, 55)
    """

    parts: ClassVar[int] = 2
    listed: ClassVar[tuple[int, ...]] = GAUSSIAN
    dtype: ClassVar[np.dtype] = C128

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """The smallest j of each modulus: below half of it."""
        return tuple(next(j for j in range(p) if j * j % p == p - 1) for p in self.moduli)

    @cached_property
    def factors(self) -> tuple[np.uint32, ...]:
        """j of each plane: those of a modulus are j and -j."""
        return tuple(np.uint32(x % 2**32) for j in self.roots for x in (j, -j))

    @cached_property
    def turns(self) -> tuple[np.float32, ...]:
        """j / p of each plane."""
        return tuple(np.float32(x / p) for p, j in zip(self.moduli, self.roots) for x in (j, -j))

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Of the sum of both planes' remainders: the real part."""
        return self.weights_of([pow(2, -1, p) for p in self.moduli])

    @cached_property
    def start(self) -> tuple[float, ...]:
        """Sums of two bytes, less 256, are added."""
        return self.in_parts(256 * sum(self.weights) % self.product)

    @cached_property
    def of_differences(self) -> tuple[tuple[float, ...], ...]:
        """Weights of the differences: the imaginary part."""
        return tuple(map(self.in_parts, self.weights_of([pow(2 * j, -1, p) for p, j in zip(self.moduli, self.roots)])))


# --------------------------------------------------------------------------------------------------
# 1. Rows to planes.

PIECE, RUN = 16, 4                     # numbers of a row that a thread has at a time; neighbours among elements
LANES = 32
exchanged = SHUFFLE["bfly"]
INFINITY = 0x7FF00000                  # an infinity's upper word; a NaN's is the same or larger
SAFE = 1023 - 400 << 20, 1023 + 400 << 20            # upper words of magnitudes whose squares are added as they are
DOWN, UP = -600, 800                   # others' are those of numbers times powers of two


@dataclass(frozen=True)
class RowSplit(Component):
    """How threads split rows, which lie along the ``axis`` of their matrix in a ``layout``, and go through ``transform``.

    A block of ``warps`` warps takes ``rows`` rows: one whose elements are neighbours in memory, or several rows that are
    neighbours. ``held``: threads hold all of a row from one load. ``shape`` has the product's sizes.
    """

    residues: Residues
    axis: int
    warps: int
    rows: int
    held: bool
    transform: Transform
    layout: Any
    shape: Any

    @property
    def is_plain(self) -> bool:
        return isinstance(self.layout, Plain)

    @cached_property
    def threads(self) -> int:
        return LANES * self.warps

    @cached_property
    def piece(self) -> int:
        """Elements of a row that a thread has at a time."""
        return PIECE // self.residues.parts

    @cached_property
    def step(self) -> int:
        """Elements of a row that a block has at a time."""
        return self.threads // self.rows * self.piece

    @cached_property
    def shared_bytes(self) -> int:
        return self.warps * self.rows * 8

    def load(self, x: View, row: int, base: int, count: int, columns: int) -> tuple:
        """The numbers of a thread's piece of a row; zeros beyond its end. Those of a complex element are its parts."""
        if self.rows == 1:
            return self.numbers(join(generate(self.piece // RUN, load_run, self, x, row, base, columns)))
        at = base + udiv(thread_index(), self.rows) * self.piece
        return self.numbers(generate(self.piece, load_one, self, x, row, at, count, columns))

    def numbers(self, elements: tuple) -> tuple:
        if self.residues.parts == 1:
            return elements
        return join(apply(parts_of, elements))

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


def parts_of(x: complex, n: int) -> tuple:
    return x.real, x.imag


def run_at(p: int, how: RowSplit, base: int) -> int:
    return base + (p * how.threads + thread_index()) * RUN


def load_run(p: int, how: RowSplit, x: View, row: int, base: int, columns: int) -> tuple:
    k = run_at(p, how, base)
    if how.is_plain and k + RUN <= columns:
        return apply(taken, load_global(x, how.axis, how.at(row, k), (0, 0), RUN), how, row, k)
    return generate(RUN, load_one, how, x, row, k, row + 1, columns)


def load_one(i: int, how: RowSplit, x: View, row: int, k: int, count: int, columns: int) -> Any:
    if row < count and k + i < columns:
        return taken(element_at(how, x, row, k + i), 0, how, row, k + i)
    return convert(how.residues.dtype, 0)


def element_at(how: RowSplit, x: View, row: int, k: int) -> Any:
    if how.is_plain:
        return load_global(x, how.axis, how.at(row, k), (0, 0), 1)[0]
    i, j = how.at(row, k)
    return element_of(how.layout, x, i, j, how.shape)


def taken(x: Numeric, n: int, how: RowSplit, row: int, k: int) -> Any:
    """The element ``n`` places behind (row, k), transformed."""
    i, j = how.at(row, k + n)
    return convert(how.residues.dtype, transformed(how.transform, x, i, j))


def split(how: RowSplit, steps: StackSteps, stack: View, all_planes: View, all_scales: View, product: int, first: int,
          count: int, columns: int, limit: Numeric) -> None:
    """Rows ``first`` to ``first + count``, of ``columns`` elements, of matrices from that of ``product`` on, as planes;
    ``limit`` is the square of `Residues.norm`."""
    blocks = udiv(count + how.rows - 1, how.rows)
    batch = udiv(block_x(), blocks)
    x = matrix_of(stack, steps.coordinates(product + batch))
    planes, scales = matrix_of(all_planes, (batch,)), matrix_of(all_scales, (batch,))
    own = (block_x() - batch * blocks) * how.rows + thread_index() % how.rows
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


def scale_of(top: Numeric, squares: Numeric, limit: Numeric, shift: int) -> int:
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
        each(put_run, divided_up(values, RUN * how.residues.parts), how, planes, row, base, one, other)
    else:
        k = base + udiv(thread_index(), how.rows) * how.piece
        if k < planes.shape[2]:
            put_values(how, values, planes, row, k, one, other)


def put_run(values: tuple, p: int, how: RowSplit, planes: View, row: int, base: int, one: Numeric, other: Numeric) -> None:
    k = run_at(p, how, base)
    if k < planes.shape[2]:
        put_values(how, values, planes, row, k, one, other)


def put_values(how: RowSplit, values: tuple, planes: View, row: int, k: int, one: Numeric, other: Numeric) -> None:
    wholes = apply(lambda x, i: np.float64(round(x * one * other)), values)
    if how.residues.parts == 1:
        fold(how.residues.pairs, put_pair, 0, how.residues, wholes, planes, row, k)
    else:
        real, imaginary = deal(wholes, 2)
        fold(how.residues.pairs, put_gaussian_pair, 0, how.residues, real, imaginary, planes, row, k)


def put_pair(_: int, p: int, of: Residues, wholes: tuple, planes: View, row: int, k: int) -> int:
    rough = apply(by_pair, wholes, of.of_pairs[p], of.inverse_pairs[p])
    store_global(planes, 2, (0, row, k), (2 * p, 0, 0), apply(by_single, rough, of, 2 * p))
    if 2 * p + 1 < of.count:
        store_global(planes, 2, (0, row, k), (2 * p + 1, 0, 0), apply(by_single, rough, of, min(2 * p + 1, of.count - 1)))
    return 0


def put_gaussian_pair(_: int, p: int, of: GaussianResidues, real: tuple, imaginary: tuple, planes: View, row: int,
                      k: int) -> int:
    rough = apply(by_pair, real, of.of_pairs[p], of.inverse_pairs[p])
    other = apply(by_pair, imaginary, of.of_pairs[p], of.inverse_pairs[p])
    put_gaussian(of, 2 * p, rough, other, planes, row, k)
    if 2 * p + 1 < of.count:
        put_gaussian(of, min(2 * p + 1, of.count - 1), rough, other, planes, row, k)
    return 0


def put_gaussian(of: GaussianResidues, n: int, rough: tuple, other: tuple, planes: View, row: int, k: int) -> None:
    """Both planes of a modulus."""
    store_global(planes, 2, (0, row, k), (2 * n, 0, 0), apply(by_root, rough, other, of, 2 * n))
    store_global(planes, 2, (0, row, k), (2 * n + 1, 0, 0), apply(by_root, rough, other, of, 2 * n + 1))


def by_root(word: Numeric, i: int, others: tuple, of: GaussianResidues, plane: int) -> Any:
    """A remainder of x + jy, or of x - jy in the second plane of a modulus p, from what `by_pair` makes of x and y. The
    quotient is below 2^15, and off by less than 2^-8: so the remainder is below p / 2 + 1. Low bytes give it, as in
    `by_single`."""
    n = plane >> 1
    x, y = unpack_words(F32, (word,))[0] - np.float32(ROUND32), unpack_words(F32, (others[i],))[0] - np.float32(ROUND32)
    quotient = pack_words(((x * of.inverse_singles[n] + y * of.turns[plane]) + np.float32(ROUND32),))[0]
    return np.int8(word + others[i] * of.factors[plane] - quotient * np.uint32(of.moduli[n]))


def by_pair(x: Numeric, i: int, modulus: float, inverse: Numeric) -> Any:
    """A whole number's remainder by a product of two moduli, below 2^16 in magnitude: as a float32 that `ROUND32` has been
    added to, in a word."""
    quotient = (x * inverse + ROUND64) - ROUND64
    return pack_words((fused(-quotient, np.float64(modulus), x) + BOTH,))[0]


def by_single(word: Numeric, i: int, of: Residues, n: int) -> Any:
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


def recombine(spec: Any, all_a: View, all_b: View, all_c: View, all_d: View, given: Any, how: Recombination,
              all_planes: View, all_across: View, all_along: View, across_steps: StackSteps, along_steps: StackSteps,
              product: int, first_i: int, first_j: int, rows: int, columns: int) -> None:
    """D's elements of ``rows`` lines of planes, of ``columns`` each, of products from ``product`` on. ``all_across`` has the
    lines' scales, ``all_along`` those of places in them; line 0 and place 0 are ``first_i`` and ``first_j`` in D. ``spec``
    is that of the product by itself."""
    item = block_x() * THREADS + thread_index()
    pieces = udiv(columns + ELEMENTS - 1, ELEMENTS)
    line = udiv(item, pieces)
    own = udiv(line, rows)
    i, j = line - own * rows, (item - line * pieces) * ELEMENTS
    if own < all_planes.shape[0]:
        of, batch, stack = how.residues, product + own, spec.scheduler.stack
        bound, shape = of_product(spec, batch), of_product(given, batch)
        planes = matrix_of(all_planes, (own,))
        across = matrix_of(all_across, across_steps.coordinates(own))
        along = matrix_of(all_along, along_steps.coordinates(own))
        d = stack.d.matrix(all_d, batch)
        found = generate(of.planes, lambda t: load_words(planes, 2, (t, i, j), (0, 0, 0), ELEMENTS)[0])
        place = (translate(how.tile, first_i + i, first_j + j) if how.axis == 1
                 else translate(how.tile, first_j + j, first_i + i))
        values = apply(to_element, sums_of(of, found), how, across, along, i, j, columns)
        if any_bad(across, along, i, j, columns):
            values = apply(by_sum, values, spec, of, place, across, along, i, j, columns, stack.a.matrix(all_a, batch),
                           stack.b.matrix(all_b, batch), shape)
        if spec.has_c:
            values = apply(with_c, values, spec, stack.c.matrix(all_c, batch), place, shape)
        bound.epilogue.tile(bound, d, place, values, shape)


def scale_at(scales: View, n: int, end: int) -> Any:
    """Beyond the end the last one."""
    return int(load_global(scales, 0, (min(n, end - 1),), (0,), 1)[0])


def any_bad(across: View, along: View, i: int, j: int, columns: int) -> bool:
    worst = fold(ELEMENTS, lambda worst, e: max(worst, scale_at(along, j + e, columns)), scale_at(across, i, i + 1))
    return worst == BAD


def to_element(sums: tuple, e: int, how: Recombination, across: View, along: View, i: int, j: int, columns: int) -> Any:
    exponent = max(-LOW, min(LOW, -(scale_at(across, i, i + 1) + scale_at(along, j + e, columns))))
    half = exponent >> 1
    parts = apply(scaled, apply(reduced, divided_up(sums, PARTS), how.residues), power(half), power(exponent - half))
    if how.residues.parts == 1:
        return parts[0]
    return complex(parts[0], parts[1])


def scaled(x: Numeric, part: int, one: Numeric, other: Numeric) -> Any:
    return x * one * other


def sums_of(of: Residues, words: tuple) -> tuple:
    """Sums of weights for each of the elements whose remainders are bytes of words; of complex ones those of the real part,
    then those of the imaginary part. Moduli come one after the other, and each weight is loaded once."""
    return fold(of.count, lambda sums, t: apply(with_digits, sums, t, of, words), generate(ELEMENTS, begun, of))


def begun(e: int, of: Residues) -> tuple:
    if of.parts == 1:
        return apply(in_float, of.start)
    return join((apply(in_float, of.start), (np.float64(0), np.float64(0), np.float64(0))))


def in_float(x: float, n: int) -> Any:
    return np.float64(x)


def with_digits(sums: tuple, e: int, t: int, of: Any, words: tuple) -> tuple:
    if of.parts == 1:
        return apply(with_part, sums, of.of_weights[t], from_word(byte_of(words[t], e)) - BYTE)
    one, other = byte_of(words[2 * t], e), byte_of(words[2 * t + 1], e)
    real, imaginary = divided_up(sums, PARTS)
    return join((apply(with_part, real, of.of_weights[t], from_word(one + other) - TWO),
                 apply(with_part, imaginary, of.of_differences[t], from_word(one + np.uint32(256) - other) - TWO)))


def reduced(sums: tuple, part: int, of: Residues) -> Any:
    """The whole number, between -P / 2 and P / 2, that a sum of weights is less a multiple of P."""
    quotient = (sums[0] * of.inverse + ROUND64) - ROUND64
    left = apply(lambda sum, part: fused(-quotient, np.float64(of.whole[part]), sum), sums)
    return left[0] + left[1] + left[2]


def byte_of(word: np.uint32, e: int) -> Any:
    return word >> np.uint32(8 * e) & np.uint32(255)


def from_word(n: Numeric) -> Any:
    """2^52 plus a number of 32 bits."""
    return unpack_words(F64, (n, np.uint32(0x43300000)))[0]


def with_part(sum: Numeric, part: int, weight: tuple, digit: Numeric) -> Any:
    return sum + digit * weight[part]


def by_sum(x: Numeric, e: int, spec: Any, of: Residues, place: Tile, across: View, along: View, i: int, j: int, columns: int,
           a: View, b: View, shape: Any) -> Any:
    """An element whose row of A or column of B has an infinity or a NaN: what the sum of its products is, of float64 or
    complex128."""
    if j + e < columns and (scale_at(across, i, i + 1) == BAD or scale_at(along, j + e, columns) == BAD):
        m, n = row_of(place, e), column_of(place, e)
        total = convert(of.dtype, 0)
        for k in range(shape.K):
            one = transformed(spec.a.to_shared, element_of(spec.a.layout, a, m, k, shape), m, k)
            other = transformed(spec.b.to_shared, element_of(spec.b.layout, b, k, n, shape), k, n)
            total += convert(of.dtype, one) * convert(of.dtype, other)
        return total
    return x


def with_c(x: Numeric, e: int, spec: Any, c: View, place: Tile, shape: Any) -> Any:
    m, n = row_of(place, e), column_of(place, e)
    if m < shape.M and n < shape.N:
        return x + element_of(spec.c.layout, c, m, n, shape)
    return x
