"""Threads that hold a part of D together: how they finish it, and combine what they hold of its rows and columns.

An epilogue that finishes blocks (`gemmkit.epilogues.reductions`, `.normalise`, `.pairs`) sees more than an element: its
`finish_block` gets the group of threads that hold neighbouring values. `Lanes` is that group where D's tile is in shared
memory (`singlestage`, `multistage`): a warp, whose lanes hold ``m`` by ``n`` tiles of ``piece``.
`gemmkit.kernels.sm90.cross_lane` has Hopper's.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from gemmkit.components import Component, Scalar
from gemmkit.kernels.collectives.operand import column_of, delivered, inside, row_of
from gemmkit.kernels.collectives.scheduler import TileCoord
from gemmkit.lang.aggregates import convert, convert_all
from gemmkit.lang.checks import numbers
from gemmkit.lang.component_products import StackShape, of_product
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric, SharedPointer, View
from gemmkit.lang.registers import apply, each, fold, generate
from gemmkit.ptx.arithmetic import exp2
from gemmkit.ptx.memory import load_global, load_shared, shared, store_global, store_shared
from gemmkit.ptx.special import SHUFFLE, barrier, block_x, lane_index, thread_index, udiv
from gemmkit.tiling import Tile, translate

if TYPE_CHECKING:
    from gemmkit.epilogues.base import Epilogue
    from gemmkit.epilogues.reductions import Reduce, States
    from gemmkit.kernels.sm90.family import Sm90Spec
    from gemmkit.kernels.spec import Spec

WARP = 32
DOWN = 8                               # lanes below each other where columns are reduced, too
BESIDE = 16                            # and beside each other, where rows of a column-major D are normalised
ELEMENT = Tile(M=1, N=1)
butterfly = SHUFFLE["bfly"]


class LaneCoord(NamedTuple):
    """Where a thread's values lie: its tile's place in D, D's sizes, and whether the thread holds any."""

    place: Any
    shape: Any
    holds: Any


@dataclass(frozen=True)
class Lanes(Component):
    """A warp with ``m`` x ``n`` lanes on tiles of ``piece``; ``rows`` x ``columns`` are the block's. Lanes lie along rows
    of D first where ``along_rows``. Where a block is smaller than a warp, the lanes that are left hold nothing."""

    piece: Tile
    m: int
    n: int
    rows: int
    columns: int
    along_rows: bool

    @cached_property
    def packed(self) -> Tile:
        """What is stored of a tile whose pairs are packed."""
        return Tile(M=1, N=self.piece.extents[1] // 2)

    @cached_property
    def height(self) -> int:
        """Rows that a warp holds."""
        return self.m * self.piece.extents[0]

    @cached_property
    def width(self) -> int:
        return self.n * self.piece.extents[1]

    @cached_property
    def down(self) -> int:
        """Warps' parts below each other."""
        return self.rows // self.height

    @cached_property
    def parts(self) -> int:
        """Warps' parts of a block's tile."""
        return self.down * (self.columns // self.width)

    @cached_property
    def steps_n(self) -> int:
        """Exchanges among the lanes of a row."""
        return self.n.bit_length() - 1

    @cached_property
    def steps_m(self) -> int:
        return self.m.bit_length() - 1

    @cached_property
    def first_n(self) -> int:
        """From a lane to its neighbour in a row."""
        return 1 if self.along_rows else self.m

    @cached_property
    def first_m(self) -> int:
        return self.n if self.along_rows else 1

    # -- in device code -----------------------------------------------------------------------------------------------

    def lane_m(self) -> int:
        lane = lane_index() % (self.m * self.n)
        return udiv(lane, self.n) if self.along_rows else lane % self.m

    def lane_n(self) -> int:
        lane = lane_index() % (self.m * self.n)
        return lane % self.n if self.along_rows else udiv(lane, self.m)

    def tile(self, part: int) -> Any:
        """This lane's tile in the block."""
        return translate(self.piece, part % self.down * self.height + self.lane_m() * self.piece.size.M,
                         udiv(part, self.down) * self.width + self.lane_n() * self.piece.size.N)

    def finish(self, epilogue: Epilogue, values: tuple, at: LaneCoord) -> tuple:
        """Values out of range are not finished: 0 stands in their place."""
        if inside(at.place, at.shape.M, at.shape.N):
            return numbers(epilogue, "finish", epilogue.finish(values, at.place, at.shape), values)
        return apply(finish_in_range, values, epilogue, at)

    def reduce_rows(self, reduction: States, values: tuple, at: LaneCoord) -> None:
        each(reduce_row, generate(self.piece.size.M, number_of), self, reduction, values, at)

    def row_states(self, reduction: States, values: tuple, at: LaneCoord) -> tuple:
        """The state of each row of which a lane has values: of all that the warp's part has of the row, in each lane."""
        return generate(self.piece.size.M, row_state, self, reduction, values, at)

    def keep_rows(self, reduction: States, states: tuple, at: LaneCoord) -> None:
        each(keep_row, states, self, reduction, at)

    def row(self, n: int) -> int:
        """Which of a lane's rows has its n-th value."""
        return n % self.piece.size.M

    def row_at(self, n: int, at: LaneCoord) -> int:
        """The n-th value's row in D; beyond D's edge the last one."""
        return min(row_of(at.place, n), at.shape.M - 1)

    def column(self, n: int, at: LaneCoord) -> int:
        """The n-th value's column in D; beyond D's edge the last one."""
        return min(column_of(at.place, n), at.shape.N - 1)

    def held_columns(self, at: LaneCoord) -> int:
        """How many columns of D the warp's part has."""
        return min(self.width, at.shape.N - udiv(at.place.index[1], self.width) * self.width)

    def reduce_columns(self, reduction: States, values: tuple, at: LaneCoord) -> None:
        each(reduce_column, generate(self.piece.size.N, number_of), self, reduction, values, at)


def number_of(n: int) -> int:
    return n


def finish_in_range(x: Numeric, n: int, epilogue: Epilogue, at: LaneCoord) -> Any:
    i, j = row_of(at.place, n), column_of(at.place, n)
    if i < at.shape.M and j < at.shape.N:
        return numbers(epilogue, "finish", epilogue.finish((x,), translate(ELEMENT, i, j), at.shape), (x,))[0]
    return 0


def reduce_row(_: int, r: int, lanes: Lanes, reduction: States, values: tuple, at: LaneCoord) -> None:
    keep_row(row_state(r, lanes, reduction, values, at), r, lanes, reduction, at)


def row_state(r: int, lanes: Lanes, reduction: States, values: tuple, at: LaneCoord) -> Any:
    """A row of the warp's part: a lane's own values, then those of its lanes. All of these have the state."""
    state = fold(lanes.piece.size.N, with_column, reduction.nothing(), r, lanes, reduction, values, at)
    return fold(lanes.steps_n, exchanged, state, lanes.first_n, reduction)


def keep_row(state: Any, r: int, lanes: Lanes, reduction: States, at: LaneCoord) -> None:
    i, j = at.place.index[0] + r, at.place.index[1]
    if at.holds and lanes.lane_n() == 0 and i < at.shape.M and j < at.shape.N:
        reduction.keep(state, i, udiv(j, lanes.width), at.shape)


def with_column(state: Any, c: int, r: int, lanes: Lanes, reduction: States, values: tuple, at: LaneCoord) -> Any:
    return combined(state, values[c * lanes.piece.size.M + r], reduction, at, at.place.index[0] + r, at.place.index[1] + c)


def reduce_column(_: int, c: int, lanes: Lanes, reduction: States, values: tuple, at: LaneCoord) -> None:
    state = fold(lanes.piece.size.M, with_row, reduction.nothing(), c, lanes, reduction, values, at)
    state = fold(lanes.steps_m, exchanged, state, lanes.first_m, reduction)
    i, j = at.place.index[0], at.place.index[1] + c
    if at.holds and lanes.lane_m() == 0 and i < at.shape.M and j < at.shape.N:
        reduction.keep(state, j, udiv(i, lanes.height), at.shape)


def with_row(state: Any, r: int, c: int, lanes: Lanes, reduction: States, values: tuple, at: LaneCoord) -> Any:
    return combined(state, values[c * lanes.piece.size.M + r], reduction, at, at.place.index[0] + r, at.place.index[1] + c)


def combined(state: Any, x: Numeric, reduction: States, at: Any, i: int, j: int) -> Any:
    """A state with one value more, if that is in range."""
    if i < at.shape.M and j < at.shape.N:
        return reduction.combine(state, reduction.state_of(x, i, j))
    return state


# -- exchanges ----------------------------------------------------------------------------------------------------------

def exchanged(state: Any, n: int, first: int, reduction: Reduce) -> Any:
    """Lanes whose numbers differ in one bit exchange. The lane whose bit is 0 gives the first argument in both, so both make
    the same of it."""
    other = of_other_lane(reduction, state, first << n)
    return reduction.combine(state, other) if lane_index() & first << n == 0 else reduction.combine(other, state)


def of_other_lane(reduction: Reduce, x: Any, distance: int) -> Any:
    """Part by part."""
    if reduction.state_parts == 1:
        return butterfly(x, distance)
    if reduction.state_parts == 2:
        return convert(reduction.state, (butterfly(x[0], distance), butterfly(x[1], distance)))
    if reduction.state_parts == 3:
        return convert(reduction.state, (butterfly(x[0], distance), butterfly(x[1], distance), butterfly(x[2], distance)))
    return convert(reduction.state, (butterfly(x[0], distance), butterfly(x[1], distance), butterfly(x[2], distance),
                                     butterfly(x[3], distance)))


# -- where D's tile is in shared memory ---------------------------------------------------------------------------------

def store_together(epilogue: Any, spec: Sm90Spec, d: View, pointer: SharedPointer, block: TileCoord, warp: int,
                   shape: StackShape) -> None:
    """Step 6 of `singlestage` for an epilogue that finishes blocks: a warp takes its parts of D's tile in turn."""
    lanes = spec.lanes
    for part in range(warp, lanes.parts, spec.warps):
        tile = lanes.tile(part)
        holds = lane_index() < lanes.m * lanes.n
        place = translate(tile, block.i if holds else block.rows, block.j)
        values = epilogue.values_at(spec, pointer, tile, place, shape)
        store_masked(epilogue.finish_block(values, lanes, LaneCoord(place, shape, holds)), 0, spec, d, place, shape)


def store_masked(values: tuple, _: int, spec: Sm90Spec, d: View, place: Tile, shape: StackShape) -> None:
    """Finished values of a tile, those in range."""
    if spec.d.layout.packed > 1:
        store_packed(values, spec, d, place, shape)
    elif inside(place, shape.M, shape.N):
        spec.d.layout.store(d, place, delivered(spec, values), shape)
    else:
        each(store_in_range, values, spec, d, place, shape)


def store_packed(values: tuple, spec: Sm90Spec, d: View, place: Tile, shape: StackShape) -> None:
    """Of a row's pairs one value each: pairs are in range or out of it. ``place`` counts the product's columns."""
    if inside(place, shape.M, shape.N):
        packed = translate(spec.lanes.packed, place.index[0], udiv(place.index[1], 2))
        spec.d.layout.store(d, packed, delivered(spec, values), shape)
    else:
        each(store_packed_in_range, values, spec, d, place, shape)


def store_packed_in_range(x: Numeric, n: int, spec: Spec, d: View, place: Tile, shape: StackShape) -> None:
    i, j = place.index[0], place.index[1] + 2 * n
    if i < shape.M and j < shape.N:
        spec.d.layout.store(d, translate(ELEMENT, i, udiv(j, 2)), delivered(spec, (x,)), shape)


def store_in_range(x: Numeric, n: int, spec: Spec, d: View, place: Tile, shape: StackShape) -> None:
    i, j = row_of(place, n), column_of(place, n)
    if i < shape.M and j < shape.N:
        spec.d.layout.store(d, translate(ELEMENT, i, j), delivered(spec, (x,)), shape)


# -- on the host --------------------------------------------------------------------------------------------------------

def lanes_of(piece: Tile, rows: int, columns: int, along_rows: bool, columns_too: bool, least_n: int = 1) -> Lanes:
    """The lanes of a warp on a block's tile: along lines of D, but some of them below each other where columns are reduced
    (``columns_too``), and ``least_n`` beside each other: a part of few rows, or columns, would leave as many partial states
    as D has elements."""
    grid_m, grid_n = rows // piece.extents[0], columns // piece.extents[1]
    most_n = WARP // DOWN if columns_too else WARP
    n = math.gcd(most_n, grid_n) if along_rows else WARP // math.gcd(WARP, grid_m)
    n = math.gcd(max(n, least_n), grid_n)
    m = math.gcd(WARP // n, grid_m)
    return Lanes(piece, m, n, rows, columns, along_rows)


# --------------------------------------------------------------------------------------------------
# ``rescale_rows``: the second pass over rows of D that an epilogue normalises (`gemmkit.epilogues.norms`).
#
# The product has stored values that are standard in their part of a row, and each part's state.
#
# 1. A warp takes a piece of a row (of a column-major D: of 32 rows, a lane each).
# 2. It combines the states of all parts of the row, in an order that depends on their number alone.
# 3. It loads its values of D, multiplies each by its part's factor, and stores them in place.
#
# All loads of a warp's piece go out together. Warps of one row combine its states each for itself: they are few.

EXCHANGES, WARPS = 5, 4                # among the lanes of a warp; of a block
PIECES = 4                             # that a lane loads at a time
STEP = 128                             # columns of a column-major D that a warp takes


@dataclass(frozen=True)
class Rescaler(Component):
    """Who rescales what: D's matrices of a stack (``steps``), ``vector`` neighbours at a time along ``axis``. A row is
    ``chunks`` warps', a product ``blocks`` blocks'."""

    steps: Any
    axis: int
    vector: int
    chunks: Scalar
    blocks: Scalar


class ProductRow(NamedTuple):
    """A row of a product's D: the matrix, the row's number, the epilogue that finishes it, the state of all its parts
    together, and the product's sizes."""

    d: Any
    number: Any
    own: Any
    whole: Any
    sizes: Any


def rescale_rows(how: Any, epilogue: Epilogue, d: View, shape: StackShape) -> None:
    """See the module. Launched with ``WARPS`` warps a block."""
    # 1. Which product, which rows and which columns are this warp's?
    batch = udiv(block_x(), how.blocks)
    own, sizes = of_product(epilogue, batch).ending(), of_product(shape, batch)
    item = (block_x() - batch * how.blocks) * WARPS + udiv(thread_index(), WARP)
    part = udiv(item, how.chunks)
    chunk = item - part * how.chunks
    if how.axis == 1:
        if part < sizes.M:
            rescale_row(how, own, how.steps.matrix(d, batch), part, chunk * PIECES * WARP * how.vector, sizes)
    else:
        row = part * WARP + lane_index()
        if row < sizes.M:
            rescale_columns(own, how.steps.matrix(d, batch), row, chunk * STEP, sizes)


def rescale_row(how: Any, own: Numeric, d: View, row: int, begin: int, sizes: Any) -> None:
    # 2. The states of lanes 0 to 31, and so on; then the lanes' in a tree.
    whole = fold(EXCHANGES, exchanged, combined_states(own, row, lane_index(), WARP, sizes), 1, own)
    # 3. Beyond the row a lane's first piece stands for the next ones, which are not stored.
    first = begin + lane_index() * how.vector
    if first < sizes.N:
        this = ProductRow(d, row, own, whole, sizes)
        each(store_piece, generate(PIECES, load_piece, how, this, first), how, this, first)


def rescale_columns(own: Numeric, d: View, row: int, begin: int, sizes: Any) -> None:
    this = ProductRow(d, row, own, combined_states(own, row, 0, 1, sizes), sizes)
    end = min(begin + STEP, sizes.N)
    j = begin
    while j < end:
        each(store_element, generate(PIECES, load_element, this, j, end), this, j, end)
        j += PIECES


def combined_states(own: Any, row: int, first: int, step: int, sizes: Any) -> Any:
    state = own.nothing()
    slot = first
    while slot < own.kept.slots:
        state = own.combine(state, own.kept.kept(row, slot, sizes))
        slot += step
    return state


def load_piece(p: int, how: Any, row: ProductRow, first: int) -> tuple:
    j = first + p * WARP * how.vector
    return load_global(row.d, 1, (row.number, j if j < row.sizes.N else first), (0, 0), how.vector)


def store_piece(values: tuple, p: int, how: Any, row: ProductRow, first: int) -> None:
    j = first + p * WARP * how.vector
    if j < row.sizes.N:
        store_global(row.d, 1, (row.number, j), (0, 0), rescaled(values, row, j))


def load_element(p: int, row: ProductRow, j: int, end: int) -> tuple:
    return load_global(row.d, 0, (row.number, j + p if j + p < end else j), (0, 0), 1)


def store_element(values: tuple, p: int, row: ProductRow, j: int, end: int) -> None:
    if j + p < end:
        store_global(row.d, 0, (row.number, j + p), (0, 0), rescaled(values, row, j + p))


def rescaled(values: tuple, row: ProductRow, j: int) -> tuple:
    """Neighbours of one part of a row, from column ``j`` on."""
    own, whole, sizes = row.own, row.whole, row.sizes
    part = own.kept.kept(row.number, udiv(j, own.kept.width), sizes)
    made = own.finished(convert_all(own.dtype, values), own.factor(part, whole, sizes), own.shift(part, whole, sizes), j)
    return convert_all(own.stored, made)


# --------------------------------------------------------------------------------------------------
# e^x as a softmax needs it: to the last bits where its result has them, else in one instruction beside a multiplication.

LOG2E = math.log2(math.e)


def power(of: Any, x: Any) -> Any:
    """e^x, in the type ``of.dtype``; by the special function unit's power of two where ``of.is_narrow``: what is computed in
    float32 is stored in 16 bits."""
    if of.is_narrow:
        return exp2(x * convert(of.dtype, LOG2E))
    return math.exp(x)


# --------------------------------------------------------------------------------------------------
# ``complete_reductions``: partial states of D's rows and columns, combined and stored, behind the product that kept them.
#
# 1. A block takes 32 rows (or columns), a lane each; its warps take the slots of partial states in turn.
# 2. Each lane combines its slots, in their order.
# 3. The warps' states meet in shared memory; the first warp combines them in the order of the warps, and stores the result.
#
# So neighbouring lanes load neighbouring states, and the order of combinations depends on the number of slots alone. All
# reductions of a chain of epilogues are one launch, for every product of a stack a row of blocks.

LANES, MOST_WARPS, SLOTS = 32, 32, 4   # of a block's warps, and slots of a lane for which another warp is taken


@dataclass(frozen=True)
class Team(Component):
    """The threads of a block: ``warps`` warps. ``blocks`` of them are a product's."""

    warps: int
    blocks: int

    def batch(self) -> int:
        """The product of this block."""
        return udiv(block_x(), self.blocks)

    def index(self) -> int:
        """The row (or column) of this thread."""
        return (block_x() - self.batch() * self.blocks) * LANES + lane_index()

    def first(self) -> int:
        """The first of this thread's slots."""
        return udiv(thread_index(), LANES)

    def is_first(self) -> bool:
        return thread_index() < LANES

    def gather(self, reduction: States, state: Any) -> Any:
        """The states of all warps, combined, in the first one."""
        left = shared(reduction.state, 0)
        barrier()                                      # what was left there last has been read
        store_shared(left, thread_index(), 0, (state,))
        barrier()
        if thread_index() < LANES:
            warp = 1
            while warp < self.warps:
                state = reduction.combine(state, load_shared(left, thread_index(), warp * LANES, 1)[0])
                warp += 1
        return state


def complete_reductions(team: Team, epilogue: Epilogue, observer: Any, shape: StackShape) -> None:
    """See the module. Launched with ``team.warps`` warps a block, ``team.blocks`` blocks a product."""
    own, sizes = of_product(epilogue, team.batch()), of_product(shape, team.batch())
    own.complete(team, sizes)
    observer.complete(team, sizes)


def warps_for(slots: int) -> int:
    """How many warps share the slots of a row.

    >>> [warps_for(n) for n in (0, 4, 5, 16, 10**6)]
    [1, 1, 2, 4, 32]
    """
    warps = 1
    while warps < MOST_WARPS and warps * SLOTS < slots:
        warps *= 2
    return warps


# --------------------------------------------------------------------------------------------------
# Threads that look at A's tiles in shared memory beside the product, for an observer (`gemmkit.epilogues.observers`).
#
# Each k-tile of a row of blocks is looked at once: by block n of its tiles, of which the number of k-tile k is n modulo
# their count. So every block has as much of this work, whatever the tiles' order, and A is read from shared memory once
# beside the product's own reads: with 32 tiles along N a block looks at two of 64 k-tiles. What a thread has of its row
# at the end of a tile is a partial state, as one of `gemmkit.epilogues.reductions`.

CHUNK = 16                             # bytes that a thread reads together


@dataclass(frozen=True)
class OperandReduction(Component):
    """``threads`` threads on ``rows`` rows of A's tile, ``parts`` of them a row; each reads ``columns`` columns of it,
    ``vector`` at a time."""

    rows: int
    threads: int
    columns: int
    vector: int

    @cached_property
    def parts(self) -> int:
        return self.threads // self.rows

    @cached_property
    def piece(self) -> Tile:
        return Tile(M=1, K=self.vector)

    @cached_property
    def pieces(self) -> int:
        return self.columns // self.vector

    # -- in device code -----------------------------------------------------------------------------------------------

    def first(self, spec: Spec, n: int, shape: StackShape) -> int:
        """The first k-tile of block column ``n`` (in columns of D); beyond all of them where it is beyond D."""
        return udiv(n, spec.block.size.N) if n < shape.N else shape.K + 1

    def step(self, spec: Spec, shape: StackShape) -> int:
        """From a block's k-tile to its next."""
        return udiv(shape.N + spec.block.size.N - 1, spec.block.size.N)

    def add(self, state: Any, spec: Spec, pointer: SharedPointer, base: int, thread: int, a: TileCoord) -> Any:
        """A state with a thread's elements of the k-tile at ``pointer``, whose row ``base`` begins at ``a`` in A."""
        row, column = thread % self.rows, udiv(thread, self.rows) % self.parts * self.columns
        first = TileCoord(min(a.i + row, a.rows - 1), a.j + column, a.rows, a.columns)
        return fold(self.pieces, with_piece, state, spec, pointer, base + row, column, first)

    def keep(self, state: Any, spec: Spec, thread: int, m: int, n: int, shape: StackShape) -> None:
        row, part = m + thread % self.rows, udiv(thread, self.rows)
        if row < shape.M and n < shape.N and part < self.parts:
            spec.a.observer.keep(state, row, udiv(n, spec.block.size.N) * self.parts + part, shape)


def with_piece(state: Any, p: int, spec: Spec, pointer: SharedPointer, row: int, column: int, a: TileCoord) -> Any:
    """The same with a thread's ``p``-th piece of its row; the first one is at ``row``, ``column``, and at ``a`` in A."""
    tile = translate(spec.operand_reduction.piece, row, column + p * spec.operand_reduction.vector)
    values = spec.a.shared.load_shared(pointer, tile, spec.a.shared.leading(spec.a.tile.size))
    j = a.j + p * spec.operand_reduction.vector
    return fold(spec.operand_reduction.vector, with_element, state, values, spec.a.observer, a, j)


def with_element(state: Any, n: int, values: tuple, observer: Any, a: TileCoord, k: int) -> Any:
    if k + n < a.columns:
        return observer.combine(state, observer.state_of(values[n], a.i, k + n))
    return state


# -- on the host --------------------------------------------------------------------------------------------------------

def operand_reduction_of(a: Any, rows: int, threads: int) -> OperandReduction:
    """Threads for an operand A of which they hold ``rows`` rows."""
    parts = 1 << (max(1, threads // rows).bit_length() - 1)
    columns = a.tile.extents[1] // min(parts, a.tile.extents[1])
    along = a.shared.axis == 1
    vector = math.gcd(columns, max(1, CHUNK // a.shared.dtype.itemsize)) if along else 1
    return OperandReduction(rows, a.tile.extents[1] // columns * rows, columns, vector)
