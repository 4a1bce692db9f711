"""``rows``: a function of each row of a matrix, such as a softmax or a layer norm.

0. The kernel before may still run, where a GPU lets the next one begin: what it writes is waited for.
1. A team of threads takes a row: some lanes, a warp, a block, or the blocks of a cluster.
2. It loads the row, as much as it can hold.
3. The function folds it as often as it wants, and stores its result.
4. Blocks of a cluster end together, for each may still read what the others have left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import Component
from gemmkit.lang import registers
from gemmkit.lang.aggregates import convert, convert_all, fill
from gemmkit.lang.checks import converted
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import Numeric, SharedPointer, View
from gemmkit.lang.registers import apply, generate
from gemmkit.lang.registers import fold as fold_registers
from gemmkit.operators.algebra import maximum, minimum
from gemmkit.ptx.barriers import cluster_barrier, cluster_rank, load_shared_of
from gemmkit.ptx.memory import load_global, load_shared, shared, store_global, store_shared
from gemmkit.ptx.special import SHUFFLE, barrier, block_x, lane_index, thread_index, udiv, warp_barrier
from gemmkit.ptx.wgmma import grid_launch_dependents, grid_wait

# --------------------------------------------------------------------------------------------------
# The threads that work on a row together, and how they combine what each of them has.
#
# Lanes of a warp exchange by butterflies (shfl.sync.bfly): after five of them every lane has the value of all 32, each
# made in the same order. Warps of a block meet in shared memory, where every warp reads what all have left, and exchanges
# it again. So do warps of a cluster, which read what others have left in the shared memory of their blocks.

LANES, BUTTERFLIES = 32, 5
LEFT = 2                               # values that a warp leaves for the others, at most
exchanged = SHUFFLE["bfly"]


@dataclass(frozen=True)
class RowTeam(Component):
    """A row's threads; ``warps`` warps of a block."""

    warps: int
    dtype: np.dtype
    lanes = LANES                      # of a warp that `exchange`
    blocks = 1                         # of a row

    @property
    def threads(self) -> int:
        """Of a row."""
        return self.warps * LANES

    @property
    def rows(self) -> int:
        """Of a block."""
        return 1

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads * self.rows

    @property
    def shared_bytes(self) -> int:
        return 0

    def row(self) -> int:
        """The row of the team."""
        return block_x()

    def thread(self) -> int:
        """The thread's number in its team."""
        return thread_index()

    def reduce(self, value: Numeric, combine: Callable, identity: Numeric) -> Any:
        """Every thread's value, combined."""
        return value

    def exchange(self, value: Numeric, times: int, combine: Callable) -> Any:
        """The values of 2**times neighbouring lanes, combined."""
        return fold_registers(times, butterfly, value, combine, self.lanes)

    def moments(self, row: Row) -> tuple:
        """A row's mean, and the mean of squares about it."""
        mean = self.reduce(row.spec.source.total(row), added, 0) / row.columns
        return mean, self.reduce(row.spec.source.squares(row, mean), added, 0) / row.columns

    def meet(self) -> None:
        """All threads of the row meet."""
        barrier()

    def leave(self) -> None:
        """The row is done."""


@dataclass(frozen=True)
class WarpTeam(RowTeam):
    """A warp a row, or ``lanes`` of a warp, and several rows a block."""

    rows_per_block: int = 4
    lanes: int = LANES

    @property
    def butterflies(self) -> int:
        return self.lanes.bit_length() - 1

    @property
    def threads(self) -> int:
        return self.lanes

    @property
    def rows(self) -> int:
        return self.rows_per_block

    def row(self) -> int:
        return block_x() * self.rows_per_block + udiv(thread_index(), self.lanes)

    def thread(self) -> int:
        return lane_index() % self.lanes

    def meet(self) -> None:
        warp_barrier(self.lanes)                       # lanes of other rows may be elsewhere, or have ended

    def reduce(self, value: Numeric, combine: Callable, identity: Numeric) -> Any:
        return self.exchange(value, self.butterflies, combine)


@dataclass(frozen=True)
class ThreadTeam(RowTeam):
    """A thread a row: of what has one value for each row, and no elements."""

    @property
    def threads(self) -> int:
        return 1

    @property
    def rows(self) -> int:
        return 4 * LANES

    def row(self) -> int:
        return block_x() * self.rows + thread_index()

    def thread(self) -> int:
        return 0

    def meet(self) -> None:
        """It has read what it stores."""


@dataclass(frozen=True)
class TurnedTeam(RowTeam):
    """A block has ``side`` rows. Neighbouring lanes have neighbouring rows, so that a warp reads and stores whole sectors
    along the columns of an array, too: rows of a transpose.

    A row has ``LANES / side`` lanes of each warp. The block meets, so each of its threads has a row: beyond the last row it
    is the last one again, which is not stored. What another thread stores may therefore not be read.
    """

    side: int

    @property
    def bits(self) -> int:
        """Of a lane's number, those that say which row it has."""
        return self.side.bit_length() - 1

    @property
    def threads(self) -> int:
        return self.warps * LANES // self.side

    @property
    def rows(self) -> int:
        return self.side

    @property
    def shared_bytes(self) -> int:
        return self.warps * self.side * self.dtype.itemsize if self.warps > 1 else 0

    def row(self) -> int:
        return block_x() * self.side + lane_index() % self.side

    def thread(self) -> int:
        return udiv(thread_index(), self.side)

    def reduce(self, value: Numeric, combine: Callable, identity: Numeric) -> Any:
        """Each warp leaves a value of each row in shared memory, where every thread reads those of its own."""
        found = fold_registers(BUTTERFLIES - self.bits, butterfly_across, value, combine, self.bits)
        if self.warps == 1:
            return found
        left = shared(self.dtype, 0)
        barrier()
        if lane_index() < self.side:
            store_shared(left, udiv(thread_index(), LANES) * self.side + lane_index(), 0, (found,))
        barrier()
        own = lane_index() % self.side
        return fold_registers(self.warps - 1, with_warp, load_shared(left, own, 0, 1)[0], combine, left, own, self.side)


def with_warp(value: Numeric, n: int, combine: Callable, left: SharedPointer, own: int, side: int) -> Any:
    return combine(value, load_shared(left, own, (n + 1) * side, 1)[0])


@dataclass(frozen=True)
class BlockTeam(RowTeam):
    """A block a row."""

    @property
    def shared_bytes(self) -> int:
        return LEFT * self.warps * self.dtype.itemsize

    def moments(self, row: Row) -> tuple:
        """Each warp leaves the mean of its own elements, and the sum of squares about that: they meet once for both. The
        row's sum of squares is that of theirs and of the way from their means to the row's, as often as they have elements
        (Chan et al., 1979)."""
        mine = row.spec.columns_of(udiv(thread_index(), LANES), row.columns)
        mean = of_warp(row.spec.source.total(row), added) / max(mine, 1)
        squares = of_warp(row.spec.source.squares(row, mean), added)
        left = shared(self.dtype, 0)
        barrier()
        if lane_index() == 0:
            store_shared(left, udiv(thread_index(), LANES), 0, (convert(self.dtype, mean),))
            store_shared(left, self.warps + udiv(thread_index(), LANES), 0, (convert(self.dtype, squares),))
        barrier()
        warp = lane_index() % self.warps
        count = convert(self.dtype, row.spec.columns_of(warp, row.columns) if lane_index() < self.warps else 0)
        means, rest = load_shared(left, warp, 0, 1)[0], load_shared(left, self.warps + warp, 0, 1)[0]
        whole = of_warp(means * count, added) / row.columns
        far = means - whole
        rest = rest if lane_index() < self.warps else convert(self.dtype, 0)
        return whole, of_warp(rest + far * far * count, added) / row.columns

    def reduce(self, value: Numeric, combine: Callable, identity: Numeric) -> Any:
        """Each warp leaves its value in its block's shared memory. The team meets before, for what was left there last may
        still be read, and after."""
        found, left = of_warp(value, combine), shared(self.dtype, 0)
        self.meet()
        if lane_index() == 0:
            store_shared(left, udiv(thread_index(), LANES), 0, (found,))
        self.meet()
        return of_warp(self.left_by(left, combine, identity), combine)

    def left_by(self, left: SharedPointer, combine: Callable, identity: Numeric) -> Any:
        """What the warp has left that has this lane's number."""
        return load_shared(left, lane_index(), 0, 1)[0] if lane_index() < self.warps else identity


@dataclass(frozen=True)
class ClusterTeam(BlockTeam):
    """A cluster of ``blocks`` a row, each of ``warps`` warps (sm_90): of rows that the registers of a block do not hold."""

    blocks: int
    moments = RowTeam.moments

    @property
    def threads(self) -> int:
        return self.blocks * self.block

    @property
    def block(self) -> int:
        return self.warps * LANES

    def row(self) -> int:
        return udiv(block_x(), self.blocks)

    def thread(self) -> int:
        return cluster_rank() * self.block + thread_index()

    def left_by(self, left: SharedPointer, combine: Callable, identity: Numeric) -> Any:
        """Of each 32 warps of the cluster, combined."""
        parts = generate(self.blocks * self.warps // LANES, left_in_block, self.warps, left)
        return registers.reduce(combine, parts[0], parts[1:])

    def meet(self) -> None:
        cluster_barrier()

    def leave(self) -> None:
        cluster_barrier()


def left_in_block(n: int, warps: int, left: SharedPointer) -> Any:
    warp = n * LANES + lane_index()
    return load_shared_of(udiv(warp, warps), left, warp % warps, 0, 1)[0]


def added(a: Numeric, b: Numeric) -> Any:
    return a + b


def of_warp(value: Numeric, combine: Callable) -> Any:
    return fold_registers(BUTTERFLIES, butterfly, value, combine, LANES)


def butterfly(value: Numeric, n: int, combine: Callable, lanes: int) -> Any:
    """Lanes whose numbers differ in bit n exchange. The lane whose bit is 0 gives the first argument in both: so both make
    the same of it. ``lanes`` of the warp take part."""
    other = exchanged(value, 1 << n, lanes)
    return combine(value, other) if lane_index() & 1 << n == 0 else combine(other, value)


def butterfly_across(value: Numeric, n: int, combine: Callable, first: int) -> Any:
    """`butterfly` of bit ``first + n``."""
    return butterfly(value, first + n, combine, LANES)


# --------------------------------------------------------------------------------------------------
# What a function of rows sees in device code: a row, and what it may do with it.
#
# | | |
# |---|---|
# | `fold(row, f, combine, identity)` | all ``f(x, n)`` of the row, combined: the same bits every time, and in every thread |
# | `total(row, f)`, `largest(row, f)`, `smallest(row, f)` | the common folds |
# | `moments(row)` | the mean, and the mean of squares about it |
# | `mapped(row, f)` | the row with ``f(x, n)`` in place of each element: for what folds and `put` would both compute |
# | `put(row, f, columns)` | stores ``f(x, n, ...)``; of each array in ``columns`` the element of column n comes along |
# | `put_one(row, array, value)` | stores one value of the row into an array with an element for each |
# | `put_scaled(row, scales, limit, block)` | stores the row over a scale of each block, and the scales |
# | `row_of(row, array)` | the same row of another matrix |
# | `along(row, array)` | an array with an element for each column, to stand beside a row |
# | `put_into(row, array, dtype, f, beside)`, `put_turned` | stores ``f(x, n, ...)`` into the row, the column of any array |
# | `named(spec, array, at, columns)` | the row ``at`` of a matrix, to stand beside another; zeros if there is none |
# | `meet(row)` | a row's threads meet: what they have read may be stored |
#
# Folds, `mapped` and `put_into` take rows ``beside``: their elements in column n come along, ``f(x, n, ...)``.
#
# ``x`` is in the row's working type: float32 of 16-bit elements, else their own. The row is loaded once where its threads
# can hold it (`RegisterRow`), else once for each fold and for `put` (`StreamedRow`); a function is written alike for both.

class Row(NamedTuple):
    """A row on its way: its number ``m``, how many ``columns`` it has, and what the kernel needs to get at it."""

    m: Any
    columns: Any
    held: Any
    x: Any
    y: Any
    spec: Any


# -- a function's words -------------------------------------------------------------------------------------------------

def fold(row: Row, f: Callable, combine: Callable, identity: Numeric, beside: tuple = ()) -> Any:
    """``combine`` of ``f(x, n)`` over the row, and of ``identity``, which changes nothing. The order is fixed: a thread's
    own elements by columns, then those of the threads in a tree."""
    own = row.spec.source.fold(row, f, combine, convert(row.spec.dtype, identity), beside)
    return row.spec.team.reduce(own, combine, convert(row.spec.dtype, identity))


def total(row: Row, f: Callable, beside: tuple = ()) -> Any:
    """The sum of ``f(x, n)``."""
    return fold(row, f, added, 0, beside)


def largest(row: Row, f: Callable, beside: tuple = ()) -> Any:
    """The largest ``f(x, n)``, NaN where one is."""
    return fold(row, f, maximum, -np.inf, beside)


def smallest(row: Row, f: Callable, beside: tuple = ()) -> Any:
    """The smallest ``f(x, n)``, NaN where one is."""
    return fold(row, f, minimum, np.inf, beside)


def moments(row: Row) -> tuple:
    """The row's mean, and the mean of squares about it: its variance. Nothing cancels; a row's warps meet once for both."""
    return row.spec.team.moments(row)


def mapped(row: Row, f: Callable, beside: tuple = ()) -> Row:
    """The row with ``f(x, n)`` in place of each element: computed once where the row is held, and else each time that it is
    loaded."""
    return row.spec.source.mapped(row, f, beside)


def put(row: Row, f: Callable, columns: tuple = ()) -> None:
    """Store ``f(x, n, *c)`` as the row's result, ``c`` the elements in column n of ``columns``: once, and last."""
    row.spec.source.put(row, f, apply(lambda array, which: along(row, array), columns), row.y, row.spec.result)


def put_into(row: Row, array: View, dtype: np.dtype, f: Callable, beside: tuple = ()) -> None:
    """Store ``f(x, n, ...)`` as the row of ``array``, which has elements of ``dtype`` and no memory of what is read."""
    row.spec.source.put(row, f, beside, array, dtype)


def put_turned(row: Row, array: View, dtype: np.dtype, f: Callable, beside: tuple = ()) -> None:
    """Store ``f(x, n, ...)`` as the column of ``array``: the row of its transpose."""
    row.spec.source.put(row, f, beside, array, dtype, 0)


def put_one(row: Row, array: View, value: Numeric) -> None:
    """Store a value of the row into ``array[m]``: an array of the function's that is among its ``outputs``."""
    if row.spec.team.thread() == 0:
        array[row.m] = value


def put_scaled(row: Row, scales: Any, limit: float, block: int) -> None:
    """Store the row divided by a scale of each ``block`` elements (128; 0: of all): the largest magnitude becomes ``limit``.
    The scales go to ``scales[m, n // block]``, an array of the function's that is among its ``outputs``.

    The row is multiplied by the inverse of a scale, which is the least normal number at least. Blocks need rows of a
    multiple of 4 elements (ConfigError).
    """
    if block == 0 or row.spec.is_of_one_block:
        top = largest(row, magnitude)
        put_scale(row, scales, scale_of(top, limit), 0)
        inverse = 1 / scale_of(top, limit)
        put(row, lambda x, n: x * inverse)
    else:
        row.spec.source.put_scaled(row, scales, limit, block)


def put_scale(row: Row, scales: View, scale: Numeric, n: int) -> None:
    if row.spec.team.thread() == 0:
        scales[row.m, n] = scale


def magnitude(x: Any, n: int) -> Any:
    return abs(x)


def scale_of(top: Numeric, limit: float) -> Any:
    return maximum(top / np.float32(limit), np.float32(LEAST))


def named(spec: Rows, array: View, at: int, columns: int) -> Row:
    """The row of a matrix that an array names, to stand beside another; zeros where there is no such row."""
    there = at >= 0 and at < array.shape[0]
    return mapped(spec.load(array, at if there else 0, columns), lambda x, n: x if there else convert(spec.dtype, 0))


def meet(row: Row) -> None:
    """The row's threads meet: what they have read may be stored."""
    row.spec.team.meet()


def row_of(row: Row, array: View) -> Row:
    """The row of another matrix: loaded as this one is, and held or streamed like it."""
    return Row(row.m, row.columns, row.spec.source.load(row.spec, array, row.m, row.columns), array, array, row.spec)


def along(row: Row, array: View) -> Row:
    """An array with an element for each column, to stand beside a row: its elements are loaded where they are needed."""
    return Row(row.m, row.columns, (), array, array, row.spec.across)


LEAST = 2.0**-126                      # the least normal number of float32
BLOCK = 128                            # elements that have a scale together


# -- where its elements are -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class RowSource(Component):
    """How a team gets at a row: pieces of ``vector`` neighbours, which lie in the row wholly or not at all."""

    def load(self, spec: Rows, x: View, index: int, columns: int) -> Any:
        """What is kept of the row."""
        return ()

    def none(self, spec: Rows, m: int, columns: int) -> Row:
        """A row that is read nowhere, beside which others stand."""
        raise NotImplementedError

    def piece(self, row: Row, p: int, j: int) -> tuple:
        """A thread's ``p``-th piece, which begins in column ``j``."""
        return ()

    def fold(self, row: Row, f: Callable, combine: Callable, own: Numeric, beside: tuple) -> Any:
        """A thread's own elements, combined."""
        return own

    def total(self, row: Row) -> Any:
        """The sum of a thread's own elements."""
        return self.fold(row, lambda x, n: x, added, convert(row.spec.dtype, 0), ())

    def squares(self, row: Row, mean: Numeric) -> Any:
        """The sum of squares of a thread's own elements about ``mean``."""
        return self.fold(row, lambda x, n: (x - mean) * (x - mean), added, convert(row.spec.dtype, 0), ())

    def mapped(self, row: Row, f: Callable, beside: tuple) -> Row:
        """The row of ``f(x, n)``."""
        return row

    def put(self, row: Row, f: Callable, beside: tuple, out: View, dtype: np.dtype, axis: int = 1) -> None:
        """Store the function of a thread's own elements into ``out``, along an axis of it."""

    def put_scaled(self, row: Row, scales: View, limit: float, block: int) -> None:
        """Store blocks over their scales, of all threads at once: they exchange what they have."""


@dataclass(frozen=True)
class RegisterRow(RowSource):
    """All of the row, in registers: ``pieces`` a thread. All threads have the first ``whole``; where that is less, some
    have none of the last.

    What is known when the kernel is compiled is not asked when it runs: a branch about a piece would also keep its load
    behind the arrival of the one before, and the memory would be asked for one piece at a time.
    """

    pieces: int
    whole: int

    def load(self, spec: Rows, x: View, index: int, columns: int) -> Any:
        return generate(self.pieces, load_own, spec, x, index, columns)

    def none(self, spec: Rows, m: int, columns: int) -> Row:
        return Row(m, columns, generate(self.pieces, lambda p: fill(spec.dtype, spec.vector, 0)), (), (), spec)

    def piece(self, row: Row, p: int, j: int) -> tuple:
        return row.held[p]

    def mapped(self, row: Row, f: Callable, beside: tuple) -> Row:
        return Row(row.m, row.columns, apply(map_held, row.held, row, f, beside), row.x, row.y, row.spec)

    def fold(self, row: Row, f: Callable, combine: Callable, own: Numeric, beside: tuple) -> Any:
        return registers.fold(self.pieces, fold_held, own, row, f, combine, beside)

    def put(self, row: Row, f: Callable, beside: tuple, out: View, dtype: np.dtype, axis: int = 1) -> None:
        """The columns' elements of a piece are loaded in front of the store of the piece before: the compiler takes no load
        past a store, since y might be what is loaded."""
        registers.fold(self.pieces, put_with_next, beside_own(0, row, beside), row, f, beside, out, dtype, axis)

    def put_scaled(self, row: Row, scales: View, limit: float, block: int) -> None:
        registers.fold(self.pieces, put_scaled_own, 0, row, scales, limit, block)


@dataclass(frozen=True)
class StreamedRow(RowSource):
    """Of a row of any length: it is loaded anew each time, from the L2 where it fits there. What is kept are the functions
    that it was `mapped` by."""

    def none(self, spec: Rows, m: int, columns: int) -> Row:
        return Row(m, columns, (), (), (), spec.empty)

    def piece(self, row: Row, p: int, j: int) -> tuple:
        return load_mapped(row, j)

    def mapped(self, row: Row, f: Callable, beside: tuple) -> Row:
        return Row(row.m, row.columns, (row.held, f, beside), row.x, row.y, row.spec)

    def fold(self, row: Row, f: Callable, combine: Callable, own: Numeric, beside: tuple) -> Any:
        step = row.spec.team.threads * row.spec.vector
        j = row.spec.team.thread() * row.spec.vector
        while j < row.columns:
            own = fold_piece(own, self.piece(row, 0, j), j, row, f, combine, apply(piece_of, beside, 0, j))
            j += step
        return own

    def put(self, row: Row, f: Callable, beside: tuple, out: View, dtype: np.dtype, axis: int = 1) -> None:
        step = row.spec.team.threads * row.spec.vector
        j = row.spec.team.thread() * row.spec.vector
        while j < row.columns:
            put_piece(self.piece(row, 0, j), j, row, f, apply(piece_of, beside, 0, j), out, dtype, axis)
            j += step

    def put_scaled(self, row: Row, scales: View, limit: float, block: int) -> None:
        first, own = 0 * row.columns, row.spec.team.thread() * row.spec.vector
        while first < row.columns:
            j = first + own
            put_scaled_piece(load_mapped(row, j if j < row.columns else 0), j, row, scales, limit, block)
            first += row.spec.team.threads * row.spec.vector


@dataclass(frozen=True)
class EmptyRow(StreamedRow):
    """Of a row of any length that is read nowhere."""

    def piece(self, row: Row, p: int, j: int) -> tuple:
        return map_streamed(fill(row.spec.dtype, row.spec.vector, 0), row.held, j, row.spec)


@dataclass(frozen=True)
class ColumnVector(RowSource):
    """Of an array with an element for each column, which stands beside a row."""

    def piece(self, row: Row, p: int, j: int) -> tuple:
        return load_global(row.x, 0, (j,), (0,), row.spec.vector)


# -- what the kernel is made for ------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Rows(Component):
    """Which threads work on a row (``team``), and how they get at it (``source``), ``vector`` elements at a time, which
    divides the columns. ``dtype`` is the working type."""

    team: RowTeam
    source: RowSource
    vector: int
    dtype: np.dtype

    @property
    def across(self) -> AcrossSpec:
        return AcrossSpec(ColumnVector(), self.vector)

    @property
    def empty(self) -> Rows:
        return Rows(self.team, EmptyRow(), self.vector, self.dtype)

    @property
    def butterflies_of_block(self) -> int:
        """How often lanes exchange until all of a block of 128 have the same."""
        if self.vector * LANES < BLOCK:
            raise ConfigError(f"threads have {self.vector} elements side by side, and a warp less than a block of {BLOCK}; "
                              "rows of float16, bfloat16 or float32 of a multiple of 4 elements are needed")
        return (BLOCK // self.vector).bit_length() - 1

    @property
    def is_of_one_block(self) -> bool:
        """Whether rows are no longer than a block of 128."""
        return isinstance(self.source, RegisterRow) and self.source.pieces * self.team.threads * self.vector <= BLOCK

    def columns_of(self, warp: int, columns: int) -> int:
        """How many elements of a row a warp of a block has: its share of each round of all threads, and of what is left."""
        if self.team.warps == 1:
            return columns
        share = LANES * self.vector
        rounds = udiv(columns, self.team.warps * share)
        return rounds * share + max(0, min(columns - rounds * self.team.warps * share - warp * share, share))

    def load(self, x: View, m: int, columns: int) -> Row:
        """Row ``m`` of a matrix."""
        return Row(m, columns, self.source.load(self, x, m, columns), x, x, self)

    def none(self, m: int, columns: int) -> Row:
        """A row without an array: others stand beside it."""
        return self.source.none(self, m, columns)


@dataclass(frozen=True)
class RowsSpec(Rows):
    """What the kernel ``rows`` is specialised by: the caller's ``function``, too, and the type of its ``result``, y's;
    whether its launch ``starts_early``, before the kernel before it has ended."""

    function: Component
    result: np.dtype
    starts_early: bool = False

    @property
    def is_narrow(self) -> bool:
        """Whether it is computed in float32 and stored in 16 bits, so that the last bits of float32 are of no matter."""
        return int(self.result.itemsize) == 2 and int(self.dtype.itemsize) == 4


@dataclass(frozen=True)
class AcrossSpec(Component):
    """How a team gets at an array that stands beside its row."""

    source: RowSource
    vector: int


# -- pieces ---------------------------------------------------------------------------------------------------------------

def column_of(p: int, spec: Rows) -> int:
    """Where a thread's ``p``-th piece begins: neighbouring threads have neighbouring pieces."""
    return (p * spec.team.threads + spec.team.thread()) * spec.vector


def load_piece(spec: Rows, x: View, index: int, j: int) -> tuple:
    return convert_all(spec.dtype, load_global(x, 1, (index, j), (0, 0), spec.vector))


def load_mapped(row: Row, j: int) -> tuple:
    """A piece of a row that is streamed, and all that it was mapped by."""
    return map_streamed(load_piece(row.spec, row.x, row.m, j), row.held, j, row.spec)


def map_streamed(values: tuple, functions: tuple, j: int, spec: Rows) -> tuple:
    """The functions from the first to the last, with what stands beside: ``((((), f, beside), g, beside), h, beside)``."""
    if len(functions) == 0:
        return values
    return map_piece(map_streamed(values, functions[0], j, spec), j, spec, functions[1], apply(piece_of, functions[2], 0, j))


def map_piece(values: tuple, j: int, spec: Rows, f: Callable, beside: tuple) -> tuple:
    return generate(spec.vector,
                    lambda n: converted(spec, "__call__", f(values[n], j + n, *apply(element_of, beside, n)), spec.dtype))


def map_held(values: tuple, p: int, row: Row, f: Callable, beside: tuple) -> tuple:
    return map_piece(values, column_of(p, row.spec), row.spec, f, beside_own(p, row, beside))


def load_own(p: int, spec: Any, x: View, index: int, columns: int) -> tuple:
    """The ``p``-th piece. Beyond the row it is the thread's first once more, which nothing looks at: that of another thread
    might be stored by then, where y is x."""
    j = column_of(p, spec)
    if p < spec.source.whole:
        return load_piece(spec, x, index, j)
    if spec.source.whole > 0:
        return load_piece(spec, x, index, j if j < columns else column_of(0, spec))
    if j < columns:
        return load_piece(spec, x, index, j)
    return fill(spec.dtype, spec.vector, 0)


def fold_held(own: Numeric, p: int, row: Row, f: Callable, combine: Callable, beside: tuple) -> Any:
    j = column_of(p, row.spec)
    if p < row.spec.source.whole:
        return fold_piece(own, row.held[p], j, row, f, combine, apply(piece_of, beside, p, j))
    if j < row.columns:
        return fold_piece(own, row.held[p], j, row, f, combine, apply(piece_of, beside, p, j))
    return own


def fold_piece(own: Numeric, values: tuple, j: int, row: Row, f: Callable, combine: Callable, beside: tuple) -> Any:
    return registers.fold(row.spec.vector, fold_element, own, values, j, row.spec, f, combine, beside)


def fold_element(own: Numeric, n: int, values: tuple, j: int, spec: Rows, f: Callable, combine: Callable,
                 beside: tuple) -> Any:
    given = converted(spec, "__call__", f(values[n], j + n, *apply(element_of, beside, n)), spec.dtype)
    return convert(spec.dtype, combine(own, given))


def put_with_next(now: tuple, p: int, row: Row, f: Callable, beside: tuple, out: View, dtype: np.dtype, axis: int) -> tuple:
    """Piece ``p`` with what stands beside it, behind the loads of what stands beside the next piece."""
    following = beside_own(p + 1, row, beside) if p + 1 < row.spec.source.pieces else now
    j = column_of(p, row.spec)
    if p < row.spec.source.whole:
        put_piece(row.held[p], j, row, f, now, out, dtype, axis)
    elif j < row.columns:
        put_piece(row.held[p], j, row, f, now, out, dtype, axis)
    return following


def put_scaled_own(_: int, p: int, row: Row, scales: View, limit: float, block: int) -> int:
    put_scaled_piece(row.held[p], column_of(p, row.spec), row, scales, limit, block)
    return 0


def put_scaled_piece(values: tuple, j: int, row: Any, scales: View, limit: float, block: int) -> None:
    """The piece at column ``j``. Beyond the row a thread has another's elements: it takes part in the exchange, and stores
    nothing. No block ends within a piece, and the others of its last block lie beyond the row as a whole."""
    own = registers.fold(row.spec.vector, with_magnitude, abs(values[0]), values)
    top = own if j < row.columns else convert(row.spec.dtype, 0)
    scale = scale_of(row.spec.team.exchange(top, row.spec.butterflies_of_block, maximum), limit)
    if j < row.columns:
        if j % block == 0:
            scales[row.m, udiv(j, block)] = scale
        inverse = 1 / scale
        put_piece(values, j, row, lambda x, n: x * inverse, (), row.y, row.spec.result, 1)


def with_magnitude(top: Numeric, n: int, values: tuple) -> Any:
    return maximum(top, abs(values[n]))


def beside_own(p: int, row: Row, beside: tuple) -> tuple:
    """The elements beside the ``p``-th piece; beyond the row something that nothing looks at."""
    j = column_of(p, row.spec)
    if p < row.spec.source.whole:
        return apply(piece_of, beside, p, j)
    return apply(piece_of, beside, p, j if j < row.columns else 0)


def put_piece(values: tuple, j: int, row: Row, f: Callable, beside: tuple, out: View, dtype: np.dtype, axis: int) -> None:
    made = generate(row.spec.vector,
                    lambda n: converted(row.spec, "__call__", f(values[n], j + n, *apply(element_of, beside, n)), dtype))
    if axis == 1:
        store_global(out, 1, (row.m, j), (0, 0), made)
    else:
        store_global(out, 0, (j, row.m), (0, 0), made)


def piece_of(beside: Row, which: int, p: int, j: int) -> tuple:
    return beside.spec.source.piece(beside, p, j)


def element_of(values: tuple, which: int, n: int) -> Any:
    return values[n]


def rows(spec: Any, x: Any, y: Any, count: int, columns: int) -> None:
    if spec.starts_early:
        grid_launch_dependents()
        grid_wait()                                                     # 0.
    index = spec.team.row()                                             # 1.
    if index < count:
        held = spec.source.load(spec, x, index, columns)                # 2.
        spec.function(Row(index, columns, held, x, y, spec))            # 3.
        spec.team.leave()                                               # 4.
