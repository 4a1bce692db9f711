"""What chained kernels call beside `gemmkit.programs.collectives`: products of what registers hold, and values of rows.

A thread's values of a tile lie in two rows, 8 apart, by pairs: (row, c), (row, c + 1), (row + 8, c), (row + 8, c + 1), then
the same 8 columns on. Four threads share a row; of a row's value each has one, of a sum along it its own part until they
meet.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from gemmkit.component_products import matrix_of
from gemmkit.components import Component
from gemmkit.kernels.attention.softmax import LARGE, added, larger, quad_max, quad_sum
from gemmkit.kernels.attention.store import octets
from gemmkit.kernels.common.hand_over import HandOver
from gemmkit.kernels.sm90.store import own_row
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, fold, split
from gemmkit.lang.reductions import reduce
from gemmkit.lang.registers import apply
from gemmkit.lang.values import convert_all, fill
from gemmkit.layouts.swizzled import Swizzled
from gemmkit.operators import WGMMAOp
from gemmkit.programs.collectives import F32, ROWS, Part, Staged, Typed
from gemmkit.ptx.approximate import maximum
from gemmkit.ptx.descriptors import advance
from gemmkit.ptx.memory import store_global
from gemmkit.ptx.pack_fragment import pack_fragment, pack_relu
from gemmkit.ptx.special import lane_index
from gemmkit.ptx.vote import any_lane
from gemmkit.ptx.words import pack_narrow, unpack_narrow
from gemmkit.tiling import Tile

DROP = -8.0                            # the least exponent of a factor for which rows are left as they are


@dataclass(frozen=True)
class HandedProduct(Component):
    """64 rows of what a warpgroup has computed times ``b``: the sums of one product are A of this one, in the registers that
    they are in."""

    b: Staged
    b_transposed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hand_over                                 # noqa: B018  (raises where the sums are no A fragments)

    @cached_property
    def block(self) -> Tile:
        b = self.b
        n, k = (b.lines, b.columns) if self.b_transposed else (b.columns, b.lines)
        return Tile(M=ROWS, N=n, K=k)

    @cached_property
    def b_layout(self) -> Swizzled:
        return self.b.transposed_layout if self.b_transposed else self.b.layout

    @cached_property
    def operator(self) -> WGMMAOp:
        return WGMMAOp(self.block.size.N, self.b.dtype, F32, b_major="K" if self.b_transposed else "MN")

    @cached_property
    def hand_over(self) -> HandOver:
        return HandOver(WGMMAOp(self.block.size.K, self.b.dtype, F32), self.operator, self.block.size.K)

    @cached_property
    def values(self) -> int:
        """A thread's sums."""
        return self.block.size.N // 2

    def begin(self, value: float) -> tuple:
        return fill(F32, self.values, value)

    def fragments(self, values: tuple) -> tuple:
        """Values as A, rounded to its dtype."""
        return apply(packed, split(values, self.hand_over.values), self.b.dtype)

    def rectified(self, values: tuple) -> tuple:
        """`fragments` of max(x, 0) of each: in the same instructions."""
        return apply(packed_rectified, split(values, self.hand_over.values), self.b.dtype)

    def multiply(self, sums: tuple, fragments: tuple, slot: Any, accumulate: int) -> tuple:
        """Start the product with a stage, on top of the sums or (``accumulate`` 0) in their place. It is done after a
        wait."""
        b = advance(self.b.descriptor(), slot.stage * self.b.stage_bytes)
        sums = multiply_step(sums, 0, self, fragments, b, accumulate)
        return fold(self.hand_over.fragments - 1, next_step, sums, self, fragments, b)


def packed(values: tuple, n: int, dtype: Any) -> tuple:
    return pack_fragment(dtype, values)


def packed_rectified(values: tuple, n: int, dtype: Any) -> tuple:
    return pack_relu(dtype, values)


def next_step(sums: tuple, n: int, product: Any, fragments: tuple, b: int) -> tuple:
    return multiply_step(sums, n + 1, product, fragments, b, 1)


def multiply_step(sums: tuple, n: int, product: Any, fragments: tuple, b: int, accumulate: int) -> tuple:
    return product.operator.multiply_fragments((sums,), (fragments[n],), b, product.b_layout, product.block, n,
                                               accumulate)[0]


# -- results ---------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class OctetOut(Typed):
    """A warpgroup's whole rows from the registers, where shared memory has no room for them: the four lanes of a row
    exchange pairs, so that each stores 16 bytes at once (pairs made attention with heads of 256 take 1.2 times as long).
    Columns are a multiple of 32, and rows begin at multiples of 16 bytes. ``clipped``: tiles have columns beyond the
    array's, which are a multiple of 8."""

    stacked: bool = False
    clipped: bool = False

    def store(self, values: tuple, out: Any, part: Part, group: int) -> None:
        words = apply(octets, split(pack_narrow(convert_all(self.dtype, values)), 8))
        if self.stacked:
            each(put_row_of_octets, (0, 1), self, part, matrix_of(out, (part.stack,)), words)
        else:
            each(put_row_of_octets, (0, 1), self, part, out, words)

    def finish(self) -> None:
        """Nothing is under way."""


def put_row_of_octets(half: int, n: int, store: Any, part: Part, out: Any, words: tuple) -> None:
    row = part.m + own_row() + n * 8
    if row < part.rows:
        each(put_octet, words, n, store, part, out, (row, part.n + lane_index() % 4 * 8))


def put_octet(words: tuple, n: int, half: int, store: Any, part: Part, out: Any, place: tuple) -> None:
    if not store.clipped or place[1] + n * 32 < part.columns:
        store_global(out, 1, place, (0, n * 32), unpack_narrow(store.dtype, words[half]))


# -- values of rows -------------------------------------------------------------------------------------------------------

def row_value(rows: tuple, i: int) -> Any:
    """Of the row that a thread's i-th value of a tile is in."""
    return rows[0] if i // 2 % 2 == 0 else rows[1]


def column_value(columns: tuple, i: int) -> Any:
    """Of the column that a thread's i-th value of a tile is in."""
    return columns[i // 4 * 2 + i % 2]


def column_of(i: int) -> int:
    """Where the i-th of a thread's columns is, from the first on."""
    return i // 2 * 8 + i % 2


def lane_value(rows: tuple, i: int) -> Any:
    """Of the i-th of a thread's two rows."""
    return rows[0] if i == 0 else rows[1]


def limits(row: int, place: int, slope: int, shift: int) -> tuple:
    """Of a thread's two rows slope * row + shift, counted from its first place on."""
    return slope * row + shift - place, slope * (row + 8) + shift - place


def rescales(factors: tuple) -> bool:
    """Whether a row of the warp's has another factor than 1."""
    return any_lane((factors[0] != 1.0) | (factors[1] != 1.0))


def changes(drops: tuple, least: float) -> bool:
    """Whether a row of the warp's does not stay as it is (`gemmkit.programs.chains.lazy`): NaN does not, and nothing does
    where ``least`` is infinite."""
    return any_lane(not ((least <= drops[0]) & (least <= drops[1])))


def steep(shifts: tuple) -> bool:
    """Whether what exponents of a row of the warp's are shifted by is so large that its rounding would show."""
    return any_lane(maximum(abs(shifts[0]), abs(shifts[1])) > LARGE)


def row_max(values: tuple) -> tuple:
    """The largest of each row, in eight chains side by side."""
    groups = split(values, 8)
    m = reduce(larger, groups[0], groups[1:])
    return (quad_max(maximum(maximum(m[0], m[1]), maximum(m[4], m[5]))),
            quad_max(maximum(maximum(m[2], m[3]), maximum(m[6], m[7]))))


def own_sum(values: tuple) -> tuple:
    """Of each row what this thread has of its sum."""
    groups = split(values, 8)
    t = reduce(added, groups[0], groups[1:])
    return (t[0] + t[1]) + (t[4] + t[5]), (t[2] + t[3]) + (t[6] + t[7])


def whole_sum(own: tuple) -> tuple:
    return quad_sum(own[0]), quad_sum(own[1])
