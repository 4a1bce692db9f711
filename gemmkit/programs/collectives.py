"""What chained kernels call beside `gemmkit.programs.collectives`: products of what registers hold, and values of rows.

A thread's values of a tile lie in two rows, 8 apart, by pairs: (row, c), (row, c + 1), (row + 8, c), (row + 8, c + 1), then
the same 8 columns on. Four threads share a row; of a row's value each has one, of a sum along it its own part until they
meet.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.collectives.operand import FragmentReuse
from gemmkit.kernels.collectives.scheduler import Cluster, Slot
from gemmkit.kernels.sm90.store import Panels, line_of, own_column, own_row
from gemmkit.lang.aggregates import convert, convert_all, fill
from gemmkit.lang.checks import dtype_given
from gemmkit.lang.component_products import matrix_of
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric
from gemmkit.lang.registers import apply, each, fold, generate, join, reduce, split, together
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.layouts.plain import Swizzled
from gemmkit.operators import WGMMAOp
from gemmkit.operators.wgmma import within
from gemmkit.ptx.arithmetic import maximum
from gemmkit.ptx.memory import load_shared, pack_narrow, shared, store_global, store_shared, unpack_narrow
from gemmkit.ptx.mma import pack_fragment, pack_relu, stmatrix
from gemmkit.ptx.special import SHUFFLE, any_lane, lane_index, thread_index, udiv
from gemmkit.ptx.tma import tma_commit, tma_load, tma_load_multicast, tma_store, tma_wait, tma_wait_read
from gemmkit.ptx.wgmma import advance, fence_async, matrix_descriptor, named_barrier
from gemmkit.runtime.tensor_maps import TensorMapSpec
from gemmkit.tiling import Tile

# --------------------------------------------------------------------------------------------------
# What derived kernels call, as constants of their text: tiles in the stages of a ring, products, ways out.
# Rings, roles and swizzles are those of Hopper's kernel of products.

F32, I32, I64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)
ROWS = 64                              # of a product, which a warpgroup has
STEP = 16                              # of a product's K that an instruction takes, of elements of 16 bits
CHUNK = 16                             # bytes that stay together in a swizzled line, and that ldmatrix reads of one
ROW, COLUMN = "row", "column"          # of a cluster's tiles
BY_TMA = "TmaOut", "PieceOut"          # the collectives by which results leave so
ROWS_OF = "rows_of_"                   # in front of the name of a result that TMA stores: where threads store it
NOWHERE = 2**30                        # a page beyond all: what TMA brings from there is 0
MEETING = 4                            # a named barrier; those of the consumers' ways out are 1 to 3
PATTERN = 1024                         # bytes of eight lines of 128 bytes, after which the swizzle begins anew


@dataclass(frozen=True)
class Typed(Component):
    """What has elements of a ``dtype``, which a text gives by its name."""

    dtype: np.dtype

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dtype", dtype_given(self.dtype, type(self).__qualname__))

    def finish(self) -> None:
        """Wait for what results have under way: nothing."""


@dataclass(frozen=True)
class PanelTile(Typed):
    """``lines`` x ``columns`` elements of a row-major array in every stage of a ring, by panels of 128 or 64 bytes of each
    line: 64 or 32 elements of 16 bits."""

    lines: int
    columns: int
    offset: int
    stage_bytes: int

    @cached_property
    def size(self) -> int:
        """Bytes of an element."""
        return int(self.dtype.itemsize)

    @cached_property
    def chunk(self) -> int:
        """Elements of 16 bytes."""
        return CHUNK // self.size

    @cached_property
    def line(self) -> int:
        """Elements of a panel's line."""
        return line_of(self.columns * self.size // 2) * 2 // self.size

    def begin_of(self, stage: int) -> int:
        """Elements in front of a stage."""
        return stage * (self.stage_bytes // self.size)

    @cached_property
    def held(self) -> int:
        """Lines of a panel."""
        return in_steps(self.lines)

    @cached_property
    def layout(self) -> Swizzled:
        """Of the block as it is in its array, and in a stage."""
        return Swizzled(RowMajor(self.dtype), self.size * self.line)

    @cached_property
    def transposed_layout(self) -> Swizzled:
        return Swizzled(ColMajor(self.dtype), self.size * self.line)

    def from_column(self, column: int, slot: Slot) -> int:
        """The descriptor of a stage, from a panel on."""
        return advance(self.descriptor(), slot.stage * self.stage_bytes + column * (self.size * self.held))

    def descriptor(self) -> int:
        """Of the first stage."""
        line = self.size * self.line
        return matrix_descriptor(shared(self.dtype, self.offset), 0, self.held * line, 8 * line, line)


@dataclass(frozen=True)
class StagedTile(PanelTile):
    """``lines`` x ``columns`` elements of a row-major array in every stage of a ring, by panels of 64 or 32 columns; of an
    array with ``stacks`` axes in front from one of its matrices.

    Panels are whole, and lines are in whole steps of a product's K: TMA fills both with zeros where the array ends, which
    it then does, and products of zeros add nothing. Heads of 80 lie in three panels of 32 columns, 96 in all: in panels of
    64 they would take 128, a third of the memory of a stage more (`line_of`).

    Of rows that lie in pages, so many in a ``page``, TMA brings what a block has of each.

    In a ``cluster`` whose blocks of a ROW (or COLUMN) of tiles, ``peers``, have the same block of the array, each loads a
    part for all: some of the panels, or some lines of each."""

    stacks: int = 0
    cluster: Cluster = Cluster()
    peers: str = ""
    page: int = 0

    @cached_property
    def panels(self) -> int:
        return -(-self.columns // self.line)

    @cached_property
    def k_axis(self) -> int:
        """As a cluster counts: 1 for A, which the blocks of a row of tiles share, 0 for B."""
        return int(self.peers == ROW)

    @cached_property
    def parts(self) -> int:
        if self.page:
            return self.held // min(self.page, self.held)
        return {ROW: self.cluster.n, COLUMN: self.cluster.m}.get(self.peers, 1)

    @cached_property
    def by_panels(self) -> bool:
        """Whether a part is some whole panels: fewer and longer copies."""
        return self.panels % self.parts == 0

    @cached_property
    def part(self) -> tuple[int, int]:
        """Panels and lines of a part."""
        if self.by_panels and not self.page:
            return self.panels // self.parts, self.held
        return self.panels, self.held // self.parts

    @cached_property
    def map_spec(self) -> TensorMapSpec:
        return TensorMapSpec(self.dtype, (self.line, self.part[1], *(1,) * self.stacks), self.size * self.line)

    def load(self, tensor_map: Any, place: tuple, ring: Any, slot: Any) -> None:
        """Have TMA bring the block that begins at a place (column, row, which matrix of stacks, the last stack first); zeros
        where the array has ended."""
        pointer = shared(self.dtype, self.offset)
        for panel in range(self.panels):
            to = self.begin_of(slot.stage) + panel * self.held * self.line
            tma_load(tensor_map, (place[0] + panel * self.line, *place[1:]), pointer, to, ring.full(), slot.stage)

    def load_pages(self, tensor_map: Any, place: tuple, table: Any, line: int, first: int, end: int, ring: Any,
                   slot: Any) -> None:
        """The same of rows from ``first`` on that lie in pages, which a ``line`` of the table names. Zeros of pages from the
        ``end`` on, which are not looked up. ``place``: the column, and stacks without pages."""
        pointer = shared(self.dtype, self.offset)
        pages = generate(self.parts, page_of_part, self, table, line, first, end)              # all look-ups are under way
        for part in range(self.parts):
            row = first + part * self.part[1]
            for panel in range(self.panels):
                to = self.begin_of(slot.stage) + (panel * self.held + part * self.part[1]) * self.line
                at = place[0] + panel * self.line, row - udiv(row, self.page) * self.page, *place[1:], pages[part]
                tma_load(tensor_map, at, pointer, to, ring.full(), slot.stage)

    def load_part(self, tensor_map: Any, place: tuple, ring: Any, slot: Any, rank: int) -> None:
        """The same for all that share the block: of this one's part, whose place in the cluster is ``rank``."""
        pointer, mask = shared(self.dtype, self.offset), self.cluster.sharers(self.k_axis, rank)
        panels, lines = self.part
        part = self.cluster.part(self.k_axis, rank)
        for n in range(panels):
            panel, line = (n + part * panels, 0) if self.by_panels else (n, part * lines)
            to = self.begin_of(slot.stage) + (panel * self.held + line) * self.line
            at = place[0] + panel * self.line, place[1] + line, *place[2:]
            tma_load_multicast(tensor_map, at, pointer, to, ring.full(), slot.stage, mask)


def page_of_part(part: int, tile: StagedTile, table: Any, line: int, first: int, end: int) -> int:
    """Of the rows that TMA brings at a time."""
    row = first + part * tile.part[1]
    return min(max(int(table[line, udiv(row, tile.page)]), -1), NOWHERE) if row < end else NOWHERE      # TMA has 32 bits


def in_steps(extent: int) -> int:
    """Elements of the whole steps that a product takes so many elements of K in."""
    return -(-extent // STEP) * STEP


class StagedOperand(Component):
    """What products have that take ``b`` from a stage. Their fields are its subclasses'."""

    b: Any
    b_transposed: bool
    width: int                         # of how many of b's columns it is, if not of all

    @cached_property
    def columns(self) -> int:
        return self.b.lines if self.b_transposed else self.width or self.b.columns

    @cached_property
    def b_layout(self) -> Swizzled:
        return self.b.transposed_layout if self.b_transposed else self.b.layout

    @cached_property
    def values(self) -> int:
        """A thread's sums."""
        return self.columns // 2

    @cached_property
    def accumulator(self) -> np.dtype:
        """What sums are in: of integers int32, else float32."""
        return I32 if self.b.dtype.kind in "iu" else F32

    def begin(self, value: float) -> tuple:
        return fill(self.accumulator, self.values, value)


@dataclass(frozen=True)
class HandedOperand(StagedOperand):
    """Such products' whose A is what a warpgroup has computed, in its registers; ``first`` to ``width`` as of `Product`."""

    reuse: ClassVar[Any]
    b: StagedTile
    b_transposed: bool = False
    first: int = 0
    length: int = 0
    width: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reuse                                 # noqa: B018  (raises where the sums are no A fragments)

    def fragments(self, values: tuple) -> tuple:
        """Values as A, rounded to its dtype."""
        return apply(packed, split(values, self.reuse.values), self.b.dtype)

    def rectified(self, values: tuple) -> tuple:
        """`fragments` of max(x, 0) of each: in the same instructions."""
        return apply(packed_rectified, split(values, self.reuse.values), self.b.dtype)


@dataclass(frozen=True)
class Product(StagedOperand):
    """64 rows of ``a`` times ``b``, for each warpgroup; a transposed operand lies in its stage as in its array. ``first``,
    ``length``: which of a's columns the stage of ``b`` has rows for, where it is a part. ``width``: of how
    many of b's columns it is, if not of all."""

    a: StagedTile
    b: StagedTile
    a_transposed: bool = False
    b_transposed: bool = False
    first: int = 0
    length: int = 0
    width: int = 0

    @cached_property
    def block(self) -> Tile:
        """As its operands lie in their stages."""
        a, b = self.a, self.b
        m, k = (a.columns, a.held) if self.a_transposed else (a.held, in_steps(self.length or a.columns))
        return Tile(M=m, N=b.held if self.b_transposed else self.width or b.columns, K=k)

    @cached_property
    def a_layout(self) -> Swizzled:
        return self.a.transposed_layout if self.a_transposed else self.a.layout

    @cached_property
    def operator(self) -> WGMMAOp:
        return WGMMAOp(self.columns, self.a.dtype, self.accumulator, self.b.dtype,
                       a_major="MN" if self.a_transposed else "K", b_major="K" if self.b_transposed else "MN")

    def multiply(self, sums: tuple, slot: Any, group: int, accumulate: int) -> tuple:
        """Start the product of a stage, on top of the sums or (``accumulate`` 0) in their place. It is done after a wait."""
        return self.multiply_apart(sums, slot, slot, group, accumulate)

    def multiply_apart(self, sums: tuple, a_slot: Any, b_slot: Any, group: int, accumulate: int) -> tuple:
        """The same of operands in rings of their own."""
        return self.multiply_at(sums, a_slot, b_slot, group * ROWS, 0, accumulate)

    def multiply_half(self, sums: tuple, a_slot: Slot, b_slot: Slot, group: int, accumulate: int) -> tuple:
        """The same, where warpgroups have the same rows, and ``width`` columns each."""
        return self.multiply_at(sums, a_slot, b_slot, 0, group * self.width, accumulate)

    def multiply_at(self, sums: tuple, a_slot: Slot, b_slot: Slot, row: int, column: int, accumulate: int) -> tuple:
        own = within(self.a_layout, (row, self.first), self.block.MK.size)
        return self.operator.multiply((sums,), advance(self.a.descriptor(), own + a_slot.stage * self.a.stage_bytes),
                                      self.b.from_column(column, b_slot), self.a_layout, self.b_layout, self.block,
                                      accumulate)[0]


class WarpgroupPart(NamedTuple):
    """Where a warpgroup's sums are stored: first row and column, where the matrix ends, and which one of stacks it is, of
    the last stack first."""

    m: Any
    n: Any
    rows: Any
    columns: Any
    stack: Any


@dataclass(frozen=True)
class TmaOut(Typed):
    """A warpgroup's rows through swizzled shared memory, by TMA, which clips what is out of range."""

    block_m: int
    columns: int
    o_offset: int
    stacks: int = 0

    @cached_property
    def head(self) -> Panels:
        return Panels(self.dtype, self.columns)

    @cached_property
    def map_spec(self) -> TensorMapSpec:
        return self.head.map_spec(ROWS, 2 + self.stacks)

    def store(self, values: tuple, out: Any, part: WarpgroupPart, group: int) -> None:
        self.put(values, out, part, group)

    def put(self, values: tuple, out: Any, part: WarpgroupPart, group: int) -> None:
        is_leader = thread_index() % 128 == 0
        if is_leader:                                  # TMA has read what the last tile left there
            tma_wait_read(0)
        named_barrier(1 + group, 128)
        held = convert_all(self.dtype, values)
        if self.columns % 16 != 0:                     # a matrix more, of columns that TMA does not store
            held = join((held, fill(self.dtype, 4, 0)))
        each(put_matrix, split(held, 8), self, group)
        fence_async()
        named_barrier(1 + group, 128)
        if is_leader:
            if part.m < part.rows:
                for panel in range(self.head.count):
                    column = part.n + panel * self.head.line
                    if column < part.columns:
                        at = (panel * self.block_m + group * ROWS) * self.head.line
                        tma_store(out, (column, part.m, *part.stack), shared(self.dtype, self.o_offset), at)
            tma_commit()

    def finish(self) -> None:
        """Shared memory must last until TMA has read it."""
        if thread_index() % 128 == 0:
            tma_wait(0)


def put_matrix(values: tuple, n: int, store: TmaOut, group: int) -> None:
    """16 rows by 16 columns of a warp: four 8 x 8 matrices, of which a lane addresses a line."""
    lane = lane_index()
    row = group * ROWS + udiv(thread_index() % 128, 32) * 16 + lane % 16
    place = store.head.layout.position((row, n * 16 + udiv(lane, 16) * 8), store.block_m)
    stmatrix(shared(store.dtype, store.o_offset), 0, place, values, False)


@dataclass(frozen=True)
class DirectOut(Typed):
    """Elements that are in range, from the registers: as ``pairs`` where there are as many in a row."""

    pairs: bool

    def store(self, values: tuple, out: Any, part: WarpgroupPart, group: int) -> None:
        pairs, row, column = split(convert_all(self.dtype, values), 2), part.m + own_row(), part.n + own_column()
        each(put_pair, pairs, self, part, matrix_of(out, part.stack), row, column)


def put_pair(pair: tuple, n: int, store: DirectOut, part: WarpgroupPart, out: Any, row: int, column: int) -> None:
    if row + n % 2 * 8 < part.rows:
        put_at(pair, store, part, out, row + n % 2 * 8, column + n // 2 * 8)


def put_at(pair: tuple, store: DirectOut, part: WarpgroupPart, out: Any, row: int, column: int) -> None:
    """Of a row that is there."""
    if column < part.columns:
        if store.pairs:
            store_global(out, 1, (row, column), (0, 0), pair)
        else:
            out[row, column] = pair[0]
            if column + 1 < part.columns:
                out[row, column + 1] = pair[1]


@dataclass(frozen=True)
class RowsOut(Typed):
    """A value of each row, by the first of the row's four threads."""

    def store(self, values: tuple, out: Any, part: WarpgroupPart, group: int) -> None:
        each(put_row, values, self, part, matrix_of(out, part.stack), part.m + own_row())


def put_row(value: Any, n: int, store: Any, part: WarpgroupPart, out: Any, row: int) -> None:
    if lane_index() % 4 == 0 and row + n * 8 < part.rows:
        out[row + n * 8] = convert(store.dtype, value)


def blocks(extent: int, size: int) -> int:
    """How many blocks of ``size`` an extent has."""
    return udiv(extent + size - 1, size)


def begin_of(offsets: Any, piece: int, rows: int) -> int:
    """Where a piece of packed rows begins, whatever the offsets are: within the ``rows`` that there are."""
    return min(max(int(offsets[piece]), 0), rows)


def piece_at(offsets: Any, piece: int, pieces: int, slot: int, size: int, rows: int) -> int:
    """The piece whose tiles of ``size`` rows have the slot: the last one whose first slot is not behind it. It is ``piece``
    or one behind, by no more than there are slots between, since each has one."""
    end = min(piece + (slot - slot_of(offsets, piece, size, rows)) + 1, pieces)
    while end - piece > 1:
        middle = udiv(piece + end, 2)
        if slot_of(offsets, middle, size, rows) <= slot:
            piece = middle
        else:
            end = middle
    return piece


def slot_of(offsets: Any, piece: int, size: int, rows: int) -> int:
    """The first one of a piece."""
    return udiv(begin_of(offsets, piece, rows), size) + piece


def row_of(i: int) -> int:
    """Of a thread's i-th sum: rows below the thread's first."""
    return i // 2 % 2 * 8


def column_at(i: int) -> int:
    """Of a thread's i-th sum: columns behind the thread's first."""
    return i // 4 * 8 + i % 2


exchanged = SHUFFLE["bfly"]


def larger(a: tuple, b: tuple) -> tuple:
    return together(maximum, a, b)


def added(a: tuple, b: tuple) -> tuple:
    return together(add, a, b)


def add(x: Numeric, y: Numeric) -> Any:
    return x + y


def finite(x: Numeric) -> Any:
    """A row of which nothing was seen so far has weights 0, not NaN."""
    return x if x > -math.inf else convert(F32, 0.0)


def quad(combined: Any, x: Numeric) -> Any:
    x = combined(x, exchanged(x, 1))
    return combined(x, exchanged(x, 2))


#: Exponents of 2 up to it are rounded by no more than 2^-15. Beyond it a factor times a score, which an fma does not round,
#: less a rounded maximum would show that rounding: of scores of -1e9 it is 2^16 and more, which float16 has not.
LARGE = 1024.0
DROP = -8.0                            # the least exponent of a factor for which rows are left as they are


@dataclass(frozen=True)
class HandedProduct(HandedOperand):
    """64 rows of what a warpgroup has computed times ``b``."""

    @cached_property
    def block(self) -> Tile:
        """As its operands lie in their stages."""
        b = self.b
        n, k = (b.held, b.columns) if self.b_transposed else (self.width or b.columns, b.lines)
        return Tile(M=ROWS, N=n, K=self.length or k)

    @cached_property
    def operator(self) -> WGMMAOp:
        return WGMMAOp(self.columns, self.b.dtype, F32, b_major="K" if self.b_transposed else "MN")

    @cached_property
    def reuse(self) -> FragmentReuse:
        return FragmentReuse(WGMMAOp(self.block.size.K, self.b.dtype, F32), self.operator, self.block.size.K)

    def multiply(self, sums: tuple, fragments: tuple, slot: Any, accumulate: int) -> tuple:
        """Start the product with a stage, on top of the sums or (``accumulate`` 0) in their place, done after a wait."""
        return self.multiply_half(sums, fragments, 0, slot, accumulate)

    def multiply_half(self, sums: tuple, fragments: tuple, group: int, slot: Slot, accumulate: int) -> tuple:
        """The same of the ``width`` columns that a warpgroup has."""
        b = self.b.from_column(group * self.width, slot)
        sums = multiply_step(sums, 0, self, fragments, b, accumulate)
        return fold(self.reuse.fragments - 1, next_step, sums, self, fragments, b)


def packed(values: tuple, n: int, dtype: Any) -> tuple:
    return pack_fragment(dtype, values)


def packed_rectified(values: tuple, n: int, dtype: Any) -> tuple:
    return pack_relu(dtype, values)


def next_step(sums: tuple, n: int, product: Any, fragments: tuple, b: int) -> tuple:
    return multiply_step(sums, n + 1, product, fragments, b, 1)


def multiply_step(sums: tuple, n: int, product: Any, fragments: tuple, b: int, accumulate: int) -> tuple:
    a = (fragments[n + product.first // STEP],)
    return product.operator.multiply_fragments((sums,), a, b, product.b_layout, product.block, n,
                                               accumulate)[0]


# -- results ---------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class OctetOut(Typed):
    """A warpgroup's whole rows from the registers, where shared memory has no room for them: the four lanes of a row
    exchange pairs, so that each stores 16 bytes at once (pairs made attention with heads of 256 take 1.2 times as long).
    Columns are a multiple of 32 with the ``more`` that it adds, and rows begin at multiples of 16 bytes. ``clipped``: tiles
    have columns beyond the array's, which are a multiple of 8."""

    clipped: bool = False
    more: int = 0

    def store(self, values: tuple, out: Any, part: WarpgroupPart, group: int) -> None:
        each(put_row_of_octets, (0, 1), self, part, matrix_of(out, part.stack), self.words(values))

    def words(self, values: tuple) -> tuple:
        held = convert_all(self.dtype, values)
        if self.more > 0:
            held = join((held, fill(self.dtype, self.more // 2, 0)))
        return apply(octets, split(pack_narrow(held), 8))


def put_row_of_octets(half: int, n: int, store: Any, part: WarpgroupPart, out: Any, words: tuple) -> None:
    row = part.m + own_row() + n * 8
    if row < part.rows:
        each(put_octet, words, n, store, part, out, (row, part.n + lane_index() % 4 * 8))


def put_octet(words: tuple, n: int, half: int, store: Any, part: WarpgroupPart, out: Any, place: tuple) -> None:
    if not store.clipped or place[1] + n * 32 < part.columns:
        store_global(out, 1, place, (0, n * 32), unpack_narrow(store.dtype, words[half]))


def octets(words: tuple, n: int) -> tuple:
    """Of four octets of each of two rows the one that is this lane's."""
    return quad_transpose(words[0], words[2], words[4], words[6]), quad_transpose(words[1], words[3], words[5], words[7])


def quad_transpose(a: Numeric, b: Numeric, c: Numeric, d: Numeric) -> tuple:
    """The four words of a lane's row of a 4 x 4 matrix, of which each lane of a quad gives a column."""
    is_odd, is_upper = lane_index() % 2 == 1, lane_index() % 4 >= 2
    ab, cd = swapped(a, b, is_odd, 1), swapped(c, d, is_odd, 1)
    even, odd = swapped(ab[0], cd[0], is_upper, 2), swapped(ab[1], cd[1], is_upper, 2)
    return even[0], odd[0], even[1], odd[1]


def swapped(x: Numeric, y: Numeric, is_second: Any, distance: int) -> tuple:
    """The rows of a 2 x 2 matrix, of which two lanes give the columns."""
    got = exchanged(x if is_second else y, distance)
    return (got if is_second else x), (y if is_second else got)


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


def first_limits(called: Any, row: int, last: int, place: int, head: int, batch: int, shift: int) -> tuple:
    """Of a thread's two rows the first place that a mask shows them, counted from the thread's first on; of a row behind the
    ``last`` one this one's. A mask may load it, and is asked once a row."""
    upper = called.f.first_shown(min(row, last), head, batch, shift)
    return upper - place, called.f.first_shown(min(row + 8, last), head, batch, shift) - place


def end_limits(called: Any, row: int, last: int, place: int, head: int, batch: int, shift: int) -> tuple:
    """The same of the place behind the last."""
    upper = called.f.end_shown(min(row, last), head, batch, shift)
    return upper - place, called.f.end_shown(min(row + 8, last), head, batch, shift) - place


def rescales(factors: tuple) -> bool:
    """Whether a row of the warp's has another factor than 1."""
    return any_lane((factors[0] != 1.0) | (factors[1] != 1.0))


def changes(drops: tuple, least: float) -> bool:
    """Whether a row of the warp's does not stay as it is (`gemmkit.programs.chains.merging`): NaN does not, and nothing does
    where ``least`` is infinite."""
    return any_lane(not ((least <= drops[0]) & (least <= drops[1])))


def steep(shifts: tuple) -> bool:
    """Whether what exponents of the warp's rows, or columns, are shifted by is so large that its rounding would show."""
    return any_lane(reduce(larger_size, abs(shifts[0]), shifts[1:]) > LARGE)


def larger_size(x: Any, y: Any) -> Any:
    return maximum(x, abs(y))


def row_max(values: tuple) -> tuple:
    """The largest of each row, in eight chains side by side."""
    groups = split(values, 8)
    m = reduce(larger, groups[0], groups[1:])
    return (quad(maximum, maximum(maximum(m[0], m[1]), maximum(m[4], m[5]))),
            quad(maximum, maximum(maximum(m[2], m[3]), maximum(m[6], m[7]))))


def own_sum(values: tuple) -> tuple:
    """Of each row what this thread has of its sum."""
    groups = split(values, 8)
    t = reduce(added, groups[0], groups[1:])
    return (t[0] + t[1]) + (t[4] + t[5]), (t[2] + t[3]) + (t[6] + t[7])


def whole_sum(own: tuple) -> tuple:
    return quad(add, own[0]), quad(add, own[1])


@dataclass(frozen=True)
class RowValues(Component):
    """A value of each row of a block on its way from a thread's two rows to lanes: in shared memory, from ``offset`` on."""

    offset: int

    def put(self, rows: tuple, group: int) -> None:
        if lane_index() % 4 == 0:
            row = group * ROWS + own_row()
            store_shared(shared(F32, self.offset), row, 0, (rows[0],))
            store_shared(shared(F32, self.offset), row, 8, (rows[1],))

    def lane(self, i: int) -> Any:
        return load_shared(shared(F32, self.offset), lane_index(), i * 32, 1)[0]


@dataclass(frozen=True)
class ComputedTile(PanelTile):
    """What warpgroups have computed, 64 lines each, in shared memory, where all of them take it as the transposed left
    operand of a product: in two places, which rounds take in turn. ``barrier``: the named one at which they meet."""

    barrier: int = 1

    def put(self, values: tuple, slot: Any, group: int, lines: int) -> None:
        """A warpgroup's values; zeros behind so many ``lines`` of the tile, which a product sums over."""
        words, row = pack_narrow(convert_all(self.dtype, values)), group * ROWS + own_row()
        each(put_computed, split(words, 4), self, slot, group, row < lines, row + 8 < lines)
        fence_async()

    def meet(self) -> None:
        named_barrier(self.barrier, 2 * self.lines)

    def other(self, slot: Slot) -> Slot:
        """The place of the next round."""
        return Slot(1 - slot.stage, slot.phase)


def put_computed(words: tuple, n: int, tile: ComputedTile, slot: Slot, group: int, upper: bool, lower: bool) -> None:
    """16 lines by 16 columns of a warp."""
    lane = lane_index()
    line = group * ROWS + udiv(thread_index() % 128, 32) * 16 + lane % 16
    place = tile.layout.position((line, n * 16 + udiv(lane, 16) * 8), tile.held) + slot.stage * (tile.stage_bytes // 2)
    held = unpack_narrow(tile.dtype, apply(word_or_zeros, words, upper, lower))
    stmatrix(shared(tile.dtype, tile.offset), 0, place, held, False)


def word_or_zeros(word: int, i: int, upper: bool, lower: bool) -> Any:
    """Two neighbours of a line that is there, or zeros."""
    return word if (upper if i % 2 == 0 else lower) else word ^ word


# --------------------------------------------------------------------------------------------------
# A triangle that threads solve with, for recurrences (`gemmkit.programs.recurrences`).

PITCH = ROWS + 4                       # elements of a line of a matrix that threads solve with: no two lanes meet in a bank
STRIP, AHEAD = 16, 8                   # rows that a thread solves for in registers, and that it reads at a time


@dataclass(frozen=True)
class UnitLowerInverse(Component):
    """The inverse of I + L of 64 rows, in float32, of which L are the elements of a warpgroup's matrix below the diagonal.
    Each of 64 threads has a column, and solves for it by forward substitution, 16 rows at a time. ``offset``: of the matrix
    by columns, and of the columns that are solved, by rows."""

    nbytes: ClassVar[int] = 8 * ROWS * PITCH

    offset: int

    def of(self, values: tuple) -> tuple:
        each(put_below, values, self)
        named_barrier(MEETING, 2 * ROWS)
        column = thread_index() % 128
        if column < ROWS:
            for strip in range(ROWS // STRIP):
                first = strip * STRIP
                x = generate(STRIP, element_of_unit, first - column)
                for k in range(0, first, AHEAD):       # several loads are under way
                    x = fold(AHEAD, less_row, x, self, k, first, column)
                x = fold(STRIP, eliminate, x, self, first)
                each(put_solved, x, self, first, column)
        named_barrier(MEETING, 2 * ROWS)
        return generate(len(values), solved_element, self)

    def lower(self) -> Any:
        return shared(F32, self.offset)

    def solved(self) -> Any:
        return shared(F32, self.offset + 4 * ROWS * PITCH)

    def solved_at(self, row: int, column: int) -> Any:
        return load_shared(self.solved(), row * PITCH, column, 1)[0]


def put_below(x: Numeric, i: int, to: UnitLowerInverse) -> None:
    row, column = own_row() + row_of(i), own_column() + column_at(i)
    store_shared(to.lower(), column * PITCH, row, (x if column < row else 0.0,))


def element_of_unit(i: int, below: int) -> Any:
    return np.float32(1.0) if i == -below else np.float32(0.0)


def less_row(x: tuple, n: int, of: UnitLowerInverse, k: int, first: int, column: int) -> tuple:
    return apply(less_known, x, load_shared(of.lower(), (k + n) * PITCH, first, STRIP), of.solved_at(k + n, column))


def less_known(x: Numeric, i: int, lower: tuple, known: Numeric) -> Any:
    return x - lower[i] * known


def eliminate(x: tuple, n: int, of: UnitLowerInverse, first: int) -> tuple:
    return apply(less_known, x, load_shared(of.lower(), (first + n) * PITCH, first, STRIP), x[n])


def put_solved(x: Numeric, i: int, to: UnitLowerInverse, first: int, column: int) -> None:
    store_shared(to.solved(), (first + i) * PITCH, column, (x,))


def solved_element(i: int, of: UnitLowerInverse) -> Any:
    return of.solved_at(own_row() + row_of(i), own_column() + column_at(i))
