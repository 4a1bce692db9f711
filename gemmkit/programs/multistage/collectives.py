"""What derived kernels without wgmma call, as constants of their text: blocks that threads copy, products by mma.sync.

Four warps of 16 rows are a warpgroup of 64: a thread's sums of m16n8k16 are those that it has of wgmma's m64nNk16. So what
becomes of them is the same (`gemmkit.programs.collectives`, `gemmkit.programs.chains.collectives`), and so are the blocks
that lie in the stages: swizzled lines, of which ldmatrix reads eight side by side without meeting in a bank.

All threads copy a part of every block, and a round's copies are a group. A thread knows that its own are done, and of the
others' after the barrier of the block; behind the same barrier all have read the stage of the round before, which is filled
next.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from gemmkit.components import Component
from gemmkit.kernels.common.hand_over import HandOver
from gemmkit.kernels.common.work import Slot
from gemmkit.kernels.sm90.panels import line_of
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import fold, join, split
from gemmkit.lang.registers import apply, generate
from gemmkit.lang.values import fill
from gemmkit.layouts import RowMajor
from gemmkit.layouts.swizzled import Swizzled
from gemmkit.operators import MMAOp
from gemmkit.programs.chains.collectives import packed, packed_rectified
from gemmkit.programs.collectives import F32, ROWS, Typed
from gemmkit.ptx.copy_async import commit_copies, copy_async, copy_async_clipped, offset_of, wait_copies
from gemmkit.ptx.ldmatrix import ldmatrix
from gemmkit.ptx.memory import shared
from gemmkit.ptx.pinned import pinned, shared_place
from gemmkit.ptx.special import barrier, lane_index, rolled, thread_index, udiv
from gemmkit.ptx.words import unpack_words

WARP_ROWS = STEP = 16                  # of a product's rows; of its K that an instruction takes
PATTERN_LINES = 8                      # after which the swizzle begins anew


@dataclass(frozen=True)
class CopyRing(Component):
    """``stages`` that all threads fill and read: while one is read, the copies to the others are on their way."""

    stages: int

    def commit(self) -> None:
        """The copies of a round are a group, an empty one where there is no such round."""
        commit_copies()

    def wait(self) -> None:
        """The next stage is full, for all threads; and all have read the stage before."""
        wait_copies(self.stages - 2)
        barrier()

    def advance(self, slot: Slot) -> Slot:
        """The next stage."""
        if slot.stage == self.stages - 1:
            return Slot(slot.stage * 0, slot.phase)
        return Slot(slot.stage + 1, slot.phase)


@dataclass(frozen=True)
class Copied(Typed):
    """``lines`` x ``columns`` elements of a row-major array in every stage of a ring, by panels of 64 columns (or 32); of a
    ``stacked`` array from one of its matrices. ``threads`` copy ``vector`` elements at a time; ``clipped`` where a row may
    end within them."""

    lines: int
    columns: int
    offset: int
    stage_bytes: int
    threads: int
    vector: int = 8
    clipped: bool = False
    stacked: bool = False

    @cached_property
    def line(self) -> int:
        """Elements of a panel's line."""
        return line_of(self.columns)

    @cached_property
    def layout(self) -> Swizzled:
        """Of the block as it is in its array, and in a stage."""
        return Swizzled(RowMajor(self.dtype), 2 * self.line)

    @cached_property
    def vectors(self) -> int:
        """Of a line."""
        return self.line // self.vector

    @cached_property
    def all_lines(self) -> int:
        """Of all panels, which lie one behind the other."""
        return self.columns // self.line * self.lines

    @cached_property
    def at_once(self) -> int:
        """Lines that the threads copy at a time."""
        return self.threads // self.vectors

    # -- in device code: global -> shared -----------------------------------------------------------------------------

    def copy(self, array: Any, place: tuple, ends: tuple, slot: Slot) -> None:
        """Start this thread's copies of the block that begins at a place (of a stack which matrix, row, column); zeros from
        the ``ends`` of rows and columns on."""
        thread = rolled(thread_index())                # or the places of all copies stay in registers
        first = udiv(thread, self.vectors)
        column = (thread - first * self.vectors) * self.vector
        for n in range(-(-self.all_lines // self.at_once)):
            if self.all_lines % self.at_once == 0 or first + n * self.at_once < self.all_lines:
                self.copy_vector(array, place, ends, slot, first, n * self.at_once, column)

    def copy_vector(self, array: Any, place: tuple, ends: tuple, slot: Slot, first: int, more: int, column: int) -> None:
        """Of line ``first + more``, ``column`` elements into it."""
        if self.lines % self.at_once == 0:             # then the panel does not depend on the thread
            panel = more // self.lines
            line = first + (more - panel * self.lines)
        else:
            panel = udiv(first + more, self.lines)
            line = first + more - panel * self.lines
        row, along = place[-2] + line, place[-1] + panel * self.line + column
        if self.stacked:
            source = offset_of(array, (place[0], row, along))
        else:
            source = offset_of(array, (row, along))
        if self.at_once % PATTERN_LINES == 0:
            to, ahead = self.layout.swizzle(first * self.line + column), more * self.line
        else:
            to, ahead = self.layout.swizzle((first + more) * self.line + column), 0
        to += slot.stage * (self.stage_bytes // 2)
        if self.clipped:
            there = max(min(ends[1] - along, self.vector), 0) if row < ends[0] else 0
            copy_async_clipped(shared(self.dtype, self.offset), to, ahead, array, source, self.vector, there)
        else:
            copy_async(shared(self.dtype, self.offset), to, ahead, array, source, self.vector,
                       row < ends[0] and along < ends[1])

    # -- shared -> registers ------------------------------------------------------------------------------------------
    # ldmatrix loads four 8 x 8 matrices, of which lane t addresses line t % 8 of the (t / 8)-th.

    def upright(self, stage: int, line: int, column: int, n: int, k: int, trans: bool) -> tuple:
        """16 x 16 elements from line ``line + n`` and column ``column + k`` on, all of them multiples of 16: the upper left
        8 x 8 first, then the lower left one. ``n`` and ``k`` are known when the kernel is compiled."""
        lane = lane_index()
        return self.matrices(stage, line, column, n, k, lane % 16, udiv(lane, 16) * 8, trans)

    def lying(self, stage: int, line: int, column: int, n: int, k: int, trans: bool) -> tuple:
        """The same, but the upper right 8 x 8 second."""
        lane = lane_index()
        return self.matrices(stage, line, column, n, k, lane % 8 + udiv(lane, 16) * 8, udiv(lane, 8) % 2 * 8, trans)

    def matrices(self, stage: int, line: int, column: int, n: int, k: int, down: int, right: int, trans: bool) -> tuple:
        """Of this lane's line, ``down`` below the first and ``right`` into it."""
        panel, known = udiv(column, self.line), k // self.line
        within = column - panel * self.line + (k - known * self.line)
        at = self.layout.swizzle(down * self.line + right + within) + line * self.line
        at += panel * (self.lines * self.line) + stage * (self.stage_bytes // 2)
        pointer = pinned(shared(self.dtype, self.offset), shared_place(self.dtype, at))
        return ldmatrix(pointer, at, known * (self.lines * self.line) + n * self.line, 4, trans)


class Multiplied(Component):
    """What products have that take B from a stage: 16 rows of each warp times ``b``. Their fields are its subclasses'."""

    b: Copied
    b_transposed: bool

    @cached_property
    def columns(self) -> int:
        return self.b.lines if self.b_transposed else self.b.columns

    @cached_property
    def k(self) -> int:
        return self.b.columns if self.b_transposed else self.b.lines

    @cached_property
    def operator(self) -> MMAOp:
        """16 x 16 by 16 x 16."""
        return MMAOp(N=16, dtype=self.b.dtype, accumulator=F32)

    @cached_property
    def mma(self) -> Any:
        return self.operator.instruction

    @cached_property
    def values(self) -> int:
        """A thread's sums."""
        return self.columns // 2

    def begin(self, value: float) -> tuple:
        return fill(F32, self.values, value)


@dataclass(frozen=True)
class MmaProduct(Multiplied):
    """64 rows of ``a`` times ``b``, for each warpgroup; a transposed operand lies in its stage as in its array.

    With ``parts`` a warpgroup has as many times 64 rows, and what a warp loads of B serves all: a thread's sums are those of
    16 columns of each part, then of the next 16 columns."""

    a: Copied
    b: Copied
    a_transposed: bool = False
    b_transposed: bool = False
    parts: int = 1

    @cached_property
    def values(self) -> int:
        return self.parts * self.columns // 2

    def part(self, sums: tuple, n: int) -> tuple:
        """The sums of the n-th part."""
        return join(apply(of_part, split(sums, 8 * self.parts), n))

    def multiply(self, sums: tuple, slot: Slot, group: int) -> tuple:
        """The sums, and on top of them the product of a stage."""
        return self.multiply_apart(sums, slot, slot, group)

    def multiply_apart(self, sums: tuple, a_slot: Slot, b_slot: Slot, group: int) -> tuple:
        """The same of operands in rings of their own."""
        row = group * ROWS + udiv(thread_index() % 128, 32) * WARP_ROWS
        return join(fold(self.k // STEP, one_step, split(sums, 8 * self.parts), self, a_slot.stage, b_slot.stage, row))

    def left(self, stage: int, row: int, n: int) -> tuple:
        """A warp's rows of A, 16 elements of each."""
        if self.a_transposed:
            return self.a.lying(stage, 0, row, n * STEP, 0, True)
        return self.a.upright(stage, row, 0, 0, n * STEP, False)


def one_step(sums: tuple, n: int, product: Any, a_stage: int, b_stage: int, row: int) -> tuple:
    """16 elements of K: a warp's rows of A against 16 columns at a time."""
    return apply(next_columns, sums, product, generate(product.parts, left_of_part, product, a_stage, row, n), b_stage, n)


def left_of_part(part: int, product: Any, stage: int, row: int, n: int) -> tuple:
    """Parts of A lie one behind the other: each has 64 rows of every warpgroup."""
    return product.left(stage, row + part * (product.a.threads // 2), n)


def next_columns(sums: tuple, i: int, product: Any, a: tuple, stage: int, n: int) -> tuple:
    if product.b_transposed:
        return join(apply(multiplied, split(sums, 8), product, a, product.b.lying(stage, 0, 0, i * 16, n * STEP, False)))
    return join(apply(multiplied, split(sums, 8), product, a, product.b.upright(stage, 0, 0, n * STEP, i * 16, True)))


def multiplied(sums: tuple, part: int, product: Any, a: tuple, b: tuple) -> tuple:
    return product.mma(a[part], b, sums)


def of_part(sums: tuple, i: int, n: int) -> tuple:
    return split(sums, 8)[n]


@dataclass(frozen=True)
class HandedMmaProduct(Multiplied):
    """64 rows of what a warpgroup has computed times ``b``: the sums of one product are A of this one, in the registers that
    they are in."""

    b: Copied
    b_transposed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hand_over                                 # noqa: B018  (raises where the sums are no A fragments)

    @cached_property
    def hand_over(self) -> HandOver:
        return HandOver(self.operator, self.operator, self.k)

    def fragments(self, values: tuple) -> tuple:
        """Values as A, rounded to its dtype."""
        return apply(packed, split(values, self.hand_over.values), self.b.dtype)

    def rectified(self, values: tuple) -> tuple:
        """`fragments` of max(x, 0) of each: in the same instructions."""
        return apply(packed_rectified, split(values, self.hand_over.values), self.b.dtype)

    def multiply(self, sums: tuple, fragments: tuple, slot: Slot) -> tuple:
        """The sums, and on top of them the product with a stage."""
        return join(fold(self.hand_over.fragments, handed_step, split(sums, 8), self, fragments, slot.stage))


def handed_step(sums: tuple, n: int, product: Any, fragments: tuple, stage: int) -> tuple:
    return apply(next_columns, sums, product, (unpack_words(product.b.dtype, fragments[n]),), stage, n)
