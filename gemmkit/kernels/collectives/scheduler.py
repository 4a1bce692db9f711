"""Tile schedulers: which tiles of D a thread block computes, in which order, and which part of K.

Producer and consumers iterate over the same tiles and stages without communicating; the iteration is defined here, once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.components import Component, Scalar
from gemmkit.lang.checks import pair, truth
from gemmkit.lang.component_products import StackShape, matrix_of
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import View
from gemmkit.lang.registers import Registers, fold, join
from gemmkit.ptx.arithmetic import divided, divisor_reciprocal
from gemmkit.ptx.special import block_x, grid_x, rolled, udiv
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.kernels.spec import Spec
    from gemmkit.layouts.base import GlobalLayout

# --------------------------------------------------------------------------------------------------
# Named tuples of run-time values that travel together through the kernels.

class Work(NamedTuple):
    """A thread block's tile of D: its first row and column, in which product of a stack (0 without one), its share of K,
    and the block's rank in its cluster."""

    m: Any
    n: Any
    batch: Any
    k_begin: Any
    k_tiles: Any
    rank: Any


class Slot(NamedTuple):
    """A stage of a pipeline, and the phase of its barriers. (``index`` would hide a method of tuples.)"""

    stage: Any
    phase: Any


class KTile(NamedTuple):
    """Where the tiles of A and B of one stage begin, in which product, the block's rank in its cluster, and the problem's
    sizes."""

    m: Any
    n: Any
    k: Any
    batch: Any
    rank: Any
    shape: Any


class TileCoord(NamedTuple):
    """Where a tile of a matrix begins (row ``i``, column ``j``), and where the matrix ends."""

    i: Any
    j: Any
    rows: Any
    columns: Any


class Input(NamedTuple):
    """An operand in global memory: a view of its array, and its tensor map (`Nothing` where TMA does not load it)."""

    data: Any
    map: Any


class Inputs(NamedTuple):
    """Both operands in global memory."""

    a: Any
    b: Any


class Outputs(NamedTuple):
    """What stores of D need of global memory. ``map_c`` is the tensor map of C, or of what an epilogue reads beside D
    (`gemmkit.kernels.sm90.epilogue_load`)."""

    c: Any
    d: Any
    map_c: Any
    map_d: Any
    batch: Any
    shape: Any


# --------------------------------------------------------------------------------------------------
# Which k-tiles of a tile of D are computed: all of its interval, or a list that the condition gives.
#
# The list is made in registers at the beginning of a tile, a word of bits for 32 k-tiles. The condition is asked of all
# of a word at a time, so that what it loads (a mask's elements) is on its way together: asked of one after the other,
# each waited for the one before. (Eight at a time: 2 % slower, of 4096 x 4096 with 90 % empty.) Producer and consumers
# iterate over the same list without communicating.

WORD = 32                              # k-tiles of a word
TOGETHER = 32                          # of which the condition is asked at once: as many loads are in flight


class KTiles(NamedTuple):
    """Where an iteration over k-tiles stands: at number ``block`` of the tile's interval (``work.k_tiles`` or more: at its
    end). ``word`` has a bit for those of the 32 from number ``first`` on that remain."""

    block: Any
    first: Any
    word: Any


def k_steps(spec: Spec, work: Work) -> int:
    """How many stages a tile takes: its k-tiles, without those that the condition leaves out."""
    if spec.condition.is_always:
        return work.k_tiles
    steps, first = work.k_tiles * 0, work.k_tiles * 0
    while first < work.k_tiles:
        steps += word_from(spec, work, first).bit_count()
        first = rolled(first + WORD)
    return steps


def first_k_tile(spec: Spec, work: Work) -> KTiles:
    """The first k-tile that is computed."""
    zero = work.k_tiles * 0
    if spec.condition.is_always:
        return KTiles(zero, zero, np.uint32(0))
    return listed(spec, work, zero - WORD, np.uint32(0))


def following_k_tile(spec: Spec, work: Work, at: KTiles) -> KTiles:
    """The next one."""
    if spec.condition.is_always:
        return KTiles(rolled(at.block + 1), at.first, at.word)       # unrolled, addresses would fill the few registers
    return listed(spec, work, at.first, at.word & (at.word - np.uint32(1)))


def listed(spec: Spec, work: Work, first: int, word: np.uint32) -> KTiles:
    """The k-tile of a word's lowest bit, or of the next word that has one."""
    while word == 0 and first < work.k_tiles:
        first = rolled(first + WORD)
        word = word_from(spec, work, first)
    return KTiles(first + trailing_zeros(word) if word != 0 else first, first, word)


def word_from(spec: Spec, work: Work, first: int) -> np.uint32:
    """A bit for each of the 32 k-tiles from number ``first`` on: whether it is one, and the condition leaves it in."""
    word = np.uint32(0)
    for n in range(0, WORD, TOGETHER):
        if first + n < work.k_tiles:
            word |= fold(TOGETHER, with_bit, np.uint32(0), spec, work, first + n) << np.uint32(n)
    return word


def with_bit(word: np.uint32, n: int, spec: Spec, work: Work, first: int) -> np.uint32:
    """Bit ``n``. Beyond the end the last k-tile is asked for once more: with a branch, loads would wait for each other."""
    block = min(first + n, work.k_tiles - 1)
    is_in = holds(spec, work.m, work.n, work.k_begin + block * spec.block.size.K)
    return word | (np.uint32(1 << n) if is_in & (first + n < work.k_tiles) else np.uint32(0))


def trailing_zeros(word: np.uint32) -> int:
    """The number of a word's lowest bit that is set."""
    return ((word ^ (word - np.uint32(1))) >> np.uint32(1)).bit_count()


def holds(spec: Spec, m: int, n: int, k: int) -> bool:
    """Whether the condition leaves a k-tile in."""
    return truth(spec.condition, "__call__", spec.condition(m, n, k))


# --------------------------------------------------------------------------------------------------
# Clusters: thread blocks side by side that share operands by multicast, or the K of a tile.

@dataclass(frozen=True)
class Cluster(Component):
    """Blocks of ``m`` x ``n`` neighbouring tiles of D, or of ``splits`` shares of one tile's K.

    Blocks in a row of tiles have the same rows of A, those in a column the same columns of B: each loads a part of the
    operand, and TMA multicasts it to all that share it. Ranks count down the columns: with 2 x 2 blocks rank 1 is below
    rank 0, and rank 2 beside it.
    """

    m: int = 1
    n: int = 1
    splits: int = 1

    @cached_property
    def size(self) -> int:
        return self.m * self.n * self.splits

    @cached_property
    def is_single(self) -> bool:
        return self.size == 1

    @cached_property
    def shares_a(self) -> bool:
        """Whether blocks have the same rows of A."""
        return self.n > 1

    @cached_property
    def shares_b(self) -> bool:
        return self.m > 1

    @cached_property
    def shares(self) -> bool:
        return self.shares_a or self.shares_b

    @cached_property
    def readers(self) -> int:
        """Blocks that read what a block multicasts, itself among them: those of its row and of its column."""
        return self.m + self.n - 1

    @cached_property
    def mask(self) -> int:
        """The multicast mask of all blocks."""
        return (1 << self.size) - 1

    @cached_property
    def row_mask(self) -> int:
        """The mask of the first row."""
        return sum(1 << self.m * column for column in range(self.n))

    @cached_property
    def column_mask(self) -> int:
        """The mask of the first column."""
        return (1 << self.m) - 1

    def at_once(self, sm_count: int) -> int:
        """Clusters that a device of so many multiprocessors holds at once, with a block on each."""
        return at_once(self.size, sm_count)

    # -- in device code -------------------------------------------------------------------------------------------------

    def row(self, rank: int) -> int:
        """The block's row of tiles in its cluster."""
        return rank if self.n == 1 else rank % self.m

    def column(self, rank: int) -> int:
        return rank if self.m == 1 else udiv(rank, self.m)

    def part(self, k_axis: int, rank: int) -> int:
        """Which part of an operand the block loads: of A (``k_axis`` 1) by its column, of B by its row."""
        if k_axis == 1:
            return self.column(rank)
        return self.row(rank)

    def sharers(self, k_axis: int, rank: int) -> int:
        """The mask of the blocks that share an operand with this one."""
        if self.m == 1 or self.n == 1:
            return self.mask
        if k_axis == 1:
            return self.row_mask << self.row(rank)
        return self.column_mask << self.column(rank) * self.m

    def peer(self, k_axis: int, rank: int, n: int) -> int:
        """The rank of the n-th block behind this one, going round, of those that share an operand with it."""
        if k_axis == 1:
            return self.row(rank) + (self.column(rank) + n) % self.n * self.m
        return self.column(rank) * self.m + (self.row(rank) + n) % self.m

    def reads_of(self, rank: int, other: int) -> bool:
        """Whether a block reads what the ``other`` multicasts."""
        if self.m == 1 or self.n == 1:
            return True
        return self.row(rank) == self.row(other) or self.column(rank) == self.column(other)


def at_once(size: int, sm_count: int) -> int:
    """Clusters of ``size`` blocks that a device of so many multiprocessors holds at once, with a block on each.

    The blocks of a cluster stand in one GPC, and GPCs differ: clusters of four and more leave multiprocessors idle. An H200
    holds 30 clusters of four on its 132; with 31 the last ones took a second round, and the product twice the time (f16,
    5000^3: 0.93 of cuBLAS with 30, 0.60 with 31 to 33).
    """
    return max(1, sm_count * 10 // 11 // size if size > 2 else sm_count // size)


# --------------------------------------------------------------------------------------------------
# Stacks of products: which matrix of each operand belongs to a product.
#
# A stack has any number of dimensions, and an operand any strides along them. Products are counted in C order; of that
# count each operand makes the coordinates of its own matrix. Dimensions of an operand that lie in each other's stride are
# merged on the host (`gemmkit.plans.problem`), so that most have one, and the count itself is the coordinate.

@dataclass(frozen=True)
class StackSteps(Component):
    """The dimensions of an operand's stack: the fastest, and the ``rest``, slower ones.

    Where the fastest is the only one it needs no ``extent`` (with the ``multiplier`` and ``shift`` that divide by it).
    ``is_still`` says that the operand does not change along it: its array has no such dimension.
    """

    is_still: bool = False
    extent: Scalar = None
    multiplier: Scalar = None
    shift: Scalar = None
    rest: Any = None

    @classmethod
    def of(cls, steps: Sequence[tuple[int, int]]) -> StackSteps:
        """Of (extent, stride) of each dimension, the slowest first; none is an operand that all products share.

        >>> [StackSteps.of(steps).coordinates(8) for steps in ([(5, 48)], [(5, 48), (7, 0)], [])]
        [(8,), (1,), ()]
        """
        if not steps:
            return cls(True)
        (extent, stride), slower = steps[-1], steps[:-1]
        if not slower:
            return cls(stride == 0)
        multiplier, shift = divisor_reciprocal(max(1, extent))
        return cls(stride == 0, extent, multiplier, shift, cls.of(slower))

    @cached_property
    def is_last(self) -> bool:
        return self.rest is None

    def coordinates(self, batch: int) -> tuple:
        """Of a product's matrix in the operand's array, the fastest dimension first."""
        if self.is_last:
            return self.own(batch)
        slower = divided(batch, self.multiplier, self.shift)
        return join((self.own(batch - slower * self.extent), self.rest.coordinates(slower)))

    def own(self, coordinate: int) -> tuple:
        if self.is_still:
            return ()
        return (coordinate,)

    def matrix(self, data: View, batch: int) -> Any:
        """The view of a product's matrix."""
        return matrix_of(data, self.coordinates(batch))


@dataclass(frozen=True)
class Stack(Component):
    """The matrices of A, B, C and D that belong to each product."""

    a: StackSteps = StackSteps(True)
    b: StackSteps = StackSteps(True)
    c: StackSteps = StackSteps(True)
    d: StackSteps = StackSteps(True)


ALONE = Stack()                        # one product: its operands are the matrices themselves


# --------------------------------------------------------------------------------------------------
# How blocks that share the K of a tile find their shares, and how their sums become one.
#
# A scheduler has a reduction. Kernels ask it for a block's rank among those that share a tile, for the block's k-tiles,
# and behind the main loop to `gather`; the block that is told so finishes the tile.
#
# | kind | shares | sums meet |
# |---|---|---|
# | `Reduction` | one: a block has K to itself | |
# | `ClusterSums` | 2, 4 or 8 blocks of a cluster (sm_90) | in the first block's registers, by way of shared memory |
# | `WorkspaceSums` | any number | in the registers of the block that comes last, by way of global memory |
# | `SlicedSums` | any number, all resident at once | each block sums a slice; the last to do so collects them |
# | `StreamedSums` | those of a stream of k-tiles, all resident at once | in the registers of the block that began the tile |
# | `ClustersShareK` | any number of clusters, all resident at once | in slices, by the exchange of `warp_specialised` |
# | `ClustersStreamK` | those of a stream, clusters all resident at once | in the block that began the tile, by the same |
#
# `ClusterSums` is in `gemmkit.kernels.simt`, the next three are in `gemmkit.kernels.collectives.split_k`, and the last two
# in `gemmkit.kernels.sm90.exchange`.
#
# Whatever the kind, the order of additions depends on the number of shares alone: the same call gives the same bits.

@dataclass(frozen=True)
class Reduction(Component):
    """A block has K to itself."""

    #: Whether blocks share tiles.
    is_shared = False
    #: Whether `share` says which k-tiles are a block's (those of a cluster are dealt out by `Cluster.splits`).
    divides_k = False
    #: Whether blocks wait for each other, so that all of a launch must be on multiprocessors at once.
    waits = False

    def tile(self, block: int) -> int:
        """Which tile a block (or cluster) of the grid computes."""
        return block

    def rank(self) -> int:
        """The block's place among those that share its tile."""
        return 0

    def share(self, count: int, rank: int) -> tuple:
        """The first of a block's k-tiles, of ``count``, and how many they are."""
        return 0, count

    def gather(self, spec: Spec, accumulators: Registers, rank: int) -> bool:
        """Add up the sums of all shares, in a fixed order; whether this block has them, and finishes the tile.

        All threads of the block come here after a barrier behind which nobody reads what is in shared memory; the finishing
        block has met again when it goes on.
        """
        return True

    # -- on the host ----------------------------------------------------------------------------------------------------

    @property
    def blocks_of_a_tile(self) -> int:
        """Blocks beside each other in the grid that share a tile (not those of a cluster)."""
        return 1

    def shared_bytes(self, spec: Spec) -> int:
        """What it needs of shared memory, at the time of `gather`."""
        return 0


def dealt(count: int, shares: int, rank: int) -> tuple:
    """The first of a share's k-tiles, of ``count``, and how many they are: shares differ by one at most, the first ones have
    more."""
    least = udiv(count, shares)
    more = count - least * shares
    return rank * least + min(rank, more), least + (1 if rank < more else 0)


UNSPLIT = Reduction()


# --------------------------------------------------------------------------------------------------
# CTA orders: which tile of D the n-th block computes. Neighbours in time should share operands in the L2 cache.

@dataclass(frozen=True)
class Order(Component):
    """``block(linear, rows, columns)`` -> (row, column) of a grid of tiles; each of the ``count(rows, columns)`` tiles that
    are computed exactly once. That is all of them, but of a `HalfOfTiles`."""

    device_methods = ("block", "await_tile", "is_open")

    #: Whether operands arrive while the kernel runs (`gemmkit.kernels.collectives.batched`): then a kernel calls
    #: ``await_tile`` before a tile's first load.
    gates = False
    #: Whether what arrives is read by the epilogue alone.
    of_sums = False

    def is_open(self, linear: int, opened: int) -> bool:
        """Whether the sums that a tile's epilogue merges are there, behind a wait that returned ``opened``."""
        return True

    def await_tile(self, linear: int, opened: int) -> int:
        """Return when a tile's operands are there, with what this thread has waited for: the ``opened`` of its next call (-1
        in the first). Here they are there before the launch."""
        return opened

    def count(self, rows: int, columns: int) -> int:
        """How many tiles are computed."""
        return rows * columns

    def block(self, linear: int, rows: int, columns: int) -> tuple[int, int]:
        """Column by column."""
        column = udiv(linear, rows)
        return linear - column * rows, column


@dataclass(frozen=True)
class Columns(Order):
    """Column by column of the grid: the identity."""


@dataclass(frozen=True)
class Grouped(Order):
    """Bands of ``group`` tile rows, each band column by column.

    >>> [Grouped(2).block(n, 3, 2) for n in range(6)]
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    """

    group: int = 8

    def __post_init__(self) -> None:
        if isinstance(self.group, bool) or not isinstance(self.group, int) or self.group < 1:
            raise ValueError(f"Grouped(group={self.group!r}): a positive number of tile rows is needed")

    def block(self, linear: int, rows: int, columns: int) -> tuple[int, int]:
        band = udiv(linear, self.group * columns)
        first = band * self.group
        height = min(rows - first, self.group)
        within = linear - band * (self.group * columns)
        column = udiv(within, height)
        return first + within - column * height, column


@dataclass(frozen=True)
class Hilbert(Order):
    """A Hilbert curve through a grid of any shape: consecutive tiles are neighbours in the grid.

    The rectangle is divided as Hilbert's square is, into parts whose extents need not be powers of two; each part is
    entered and left at corners that meet those of the next. (Where an odd extent leaves no other way a single step of the
    whole curve is diagonal.) Of the parts only the one that holds ``linear`` is looked into, so a tile costs about
    2 log2 of the longer extent turns of a short loop, without division or table. That is what it has over `Grouped`: at
    every scale the tiles in flight form a patch about as high as it is wide, whatever the number of blocks in flight.

    >>> [Hilbert().block(n, 2, 3) for n in range(6)]
    [(0, 0), (1, 0), (1, 1), (1, 2), (0, 2), (0, 1)]
    """

    def block(self, linear: int, rows: int, columns: int) -> tuple[int, int]:
        # A part starts at (m, n), goes `wide` tiles along its main axis and `high` along the other. `turned` says that
        # the main axis is M; along both it may run backwards, which `step` and `rise` (1 or -1) say.
        turned = rows > columns
        wide, high = max(rows, columns), min(rows, columns)
        m, n, rest, step, rise = 0, 0, linear, 1, 1
        while wide > 1 and high > 1:
            half, other = wide >> 1, high >> 1
            if 2 * wide > 3 * high:
                # Long: two halves, one after the other; the first of even length, so that it ends on the near side.
                half += half & 1 if wide > 2 else 0
                if rest < half * high:
                    wide = half
                else:
                    rest -= half * high
                    m, n = (m + half * step, n) if turned else (m, n + half * step)
                    wide -= half
            else:
                # A leg away (turned), the long side along the far end, and a leg back (turned and backwards).
                other += other & 1 if high > 2 else 0
                legs, top = half * other, wide * (high - other)
                if rest < legs:
                    turned, wide, high, step, rise = not turned, other, half, rise, step
                elif rest < legs + top:
                    rest -= legs
                    m, n = (m, n + other * rise) if turned else (m + other * rise, n)
                    high -= other
                else:
                    rest -= legs + top
                    along, across = (wide - 1) * step, (other - 1) * rise
                    m, n = (m + along, n + across) if turned else (m + across, n + along)
                    turned, wide, high, step, rise = not turned, other, wide - half, -rise, -step
        distance = rest * (step if wide > 1 else rise)
        if turned == (wide > 1):
            return m + distance, n
        return m, n + distance


@dataclass(frozen=True)
class HalfOfTiles(Order):
    """The tiles of a square matrix on one side of the diagonal, and those that it crosses: ``order`` in a half of the grid.

    Tiles are taken together in squares of ``rows`` x ``columns`` tiles, whose diagonal is the matrix's. The squares of the
    lower half, of n to a side, fill a rectangle of n / 2 columns and n + 1 rows (of an odd n, of (n + 1) / 2 and n): the
    part of the triangle that is right of the rectangle stands transposed above the rest (LAPACK's rectangular full packed
    format). ``order`` orders this rectangle, so that neighbours in time are neighbours in the matrix as in all of a grid.
    The squares of an ``upper`` half are those of the lower one transposed.

    >>> order = HalfOfTiles(Columns())
    >>> order.count(4, 4), [order.block(n, 4, 4) for n in range(10)]
    (10, [(2, 2), (0, 0), (1, 0), (2, 0), (3, 0), (3, 2), (3, 3), (1, 1), (2, 1), (3, 1)])
    """

    order: Order
    rows: int = 1
    columns: int = 1
    upper: bool = False

    @classmethod
    def of(cls, order: Order, tile: tuple[int, int], upper: bool) -> HalfOfTiles:
        """Of tiles of so many rows and columns (those of a cluster).

        Raises ConfigError for an order whose tiles wait for operands.
        """
        if order.gates:
            raise ConfigError(f"order={order!r}: its tiles are those of a whole matrix; give another order, or an out that "
                              "is no SymmetricMatrix")
        side = math.lcm(*tile)
        return cls(order, side // tile[0], side // tile[1], upper)

    def squares(self, rows: int) -> int:
        """Squares along a side of a matrix of so many rows of tiles."""
        return udiv(rows + self.rows - 1, self.rows)

    def count(self, rows: int, columns: int) -> int:
        side = self.squares(rows)
        return (side * (side + 1) >> 1) * (self.rows * self.columns)

    def block(self, linear: int, rows: int, columns: int) -> tuple[int, int]:
        square = udiv(linear, self.rows * self.columns)
        tile = linear - square * (self.rows * self.columns)
        side = self.squares(rows)
        odd = side & 1
        wide = (side + 1) >> 1
        i, j = pair(self.order, "block", self.order.block(square, side + 1 - odd, wide))
        row = i - 1 + odd                              # an even side has a row of the transposed part above all others
        is_below = row >= j
        m, n = row if is_below else wide + j - odd, j if is_below else wide + i
        if self.upper:
            m, n = n, m
        column = udiv(tile, self.rows)
        return m * self.rows + tile - column * self.rows, n * self.columns + column


@dataclass(frozen=True)
class TileScheduler(Component):
    """Tiles of ``block`` in the order that a rasterisation gives them, for each cluster one after the other.

    Methods get the kernel's ``spec`` for its operands' layouts: a layout may say which part of K matters to some rows or
    columns (`Layout.k_range`).

    The scheduler owns the `reduction`: how blocks that share a tile's K divide it, and add up their sums.
    """

    order: Order
    block: Tile
    cluster: Cluster
    reduction: Reduction = UNSPLIT

    #: Whether blocks stay and take parts of tiles; then ``of_part(at)`` is the scheduler that answers for the part at ``at``
    #: (`gemmkit.kernels.collectives.split_k`).
    stays = False

    @property
    def stack(self) -> Stack:
        """Which matrices belong to a product: there is one product."""
        return ALONE

    def rows(self, shape: StackShape) -> int:
        """Tiles of a cluster along M."""
        size = self.block.size.M * self.cluster.m
        return udiv(shape.M + size - 1, size)

    def columns(self, shape: StackShape) -> int:
        size = self.block.size.N * self.cluster.n
        return udiv(shape.N + size - 1, size)

    def count(self, shape: StackShape) -> int:
        return self.order.count(self.rows(shape), self.columns(shape))

    def own(self) -> int:
        """The number of this block's cluster in the grid."""
        return udiv(block_x(), self.cluster.size)

    def first(self) -> int:
        """The first tile of this block's cluster, in the order of tiles."""
        return self.reduction.tile(self.own())

    def step(self) -> int:
        """From one tile of a cluster to its next."""
        return udiv(grid_x(), self.cluster.size)

    # -- the parts that a cluster computes one after the other: whole tiles, or (`stays`) parts of some -------------------

    def begin(self) -> int:
        """A cluster's first part."""
        return self.first()

    def end(self, shape: StackShape) -> int:
        """Behind all parts of all clusters."""
        return self.count(shape)

    def following(self, at: int, step: int) -> int:
        """The part behind the one at ``at``; ``step`` is from a whole tile to the next (`step`)."""
        return at + step

    def tile_of(self, at: int) -> int:
        """Which tile the part at ``at`` is of."""
        return at

    def goes_on(self, peer: int) -> bool:
        """Whether cluster ``peer``, behind this one, has k-tiles of this part's tile."""
        return False

    # -- a tile -----------------------------------------------------------------------------------------------------------

    def rank(self) -> int:
        """The block's place among those that share its tile's K."""
        return self.reduction.rank()

    def gather(self, spec: Spec, accumulators: Registers, rank: int) -> bool:
        """Add up the sums of blocks that share a tile; whether this block has them. See `Reduction.gather`."""
        return self.reduction.gather(spec, accumulators, rank)

    def product(self, tile: int) -> tuple:
        """Which product of a stack a tile is of, and which tile of that."""
        return 0, tile

    def work(self, spec: Spec, tile: int, rank: int, shape: StackShape) -> Work:
        """A block's tile of D, and which k-tiles of it are this block's."""
        m, n = self.place(tile, rank, shape)
        begin, count = self.k_tiles(spec, m, n, rank, shape)
        return Work(m, n, 0, begin, count, rank)

    def place(self, tile: int, rank: int, shape: StackShape) -> tuple:
        """First row and column of a block's tile of D."""
        row, column = pair(self.order, "block", self.order.block(tile, self.rows(shape), self.columns(shape)))
        m, n = row * self.cluster.m, column * self.cluster.n
        if self.cluster.shares_b:
            m += self.cluster.row(rank)
        if self.cluster.shares_a:
            n += self.cluster.column(rank)
        return m * self.block.size.M, n * self.block.size.N

    def k_tiles(self, spec: Spec, m: int, n: int, rank: int, shape: StackShape) -> tuple:
        """Where the k-tiles that can matter to a tile begin, and how many there are: the same for a whole cluster, or this
        block's share of them."""
        size = self.block.size
        if self.cluster.shares_b:
            m -= self.cluster.row(rank) * size.M
        if self.cluster.shares_a:
            n -= self.cluster.column(rank) * size.N
        a_begin, a_end = k_range_of(spec.a.layout, m, min(m + size.M * self.cluster.m, shape.M), shape)
        b_begin, b_end = k_range_of(spec.b.layout, n, min(n + size.N * self.cluster.n, shape.N), shape)
        begin = udiv(max(a_begin, b_begin), size.K) * size.K
        count = udiv(max(min(a_end, b_end) - begin, 0) + size.K - 1, size.K)
        if self.cluster.splits > 1:                    # this block's share
            share = udiv(count + self.cluster.splits - 1, self.cluster.splits)
            begin, count = begin + rank * share * self.block.size.K, max(min(count - rank * share, share), 0)
        if self.reduction.divides_k:
            first, count = self.reduction.share(count, rank)
            begin += first * size.K
        return begin, count

    # -- on the host ----------------------------------------------------------------------------------------------------

    def blocks(self, M: int, N: int, sm_count: int, products: int = 1) -> int:
        """Thread blocks of a launch of so many products on a device of ``sm_count`` multiprocessors."""
        raise NotImplementedError

    def tiles(self, M: int, N: int) -> tuple[int, int]:
        """Tiles of D along M and N."""
        return -(-M // self.block.size.M), -(-N // self.block.size.N)

    def grid(self, M: int, N: int) -> tuple[int, int]:
        """Tiles of a cluster along M and N."""
        size = self.block.size
        return -(-M // (size.M * self.cluster.m)), -(-N // (size.N * self.cluster.n))

    def computed(self, M: int, N: int) -> int:
        """How many of these tiles are computed: of a product."""
        return self.order.count(*self.grid(M, N))


@dataclass(frozen=True)
class Persistent(TileScheduler):
    """As many blocks as there are multiprocessors: each stays until all tiles are done. Where clusters share K each has one
    tile's share, and all must be resident."""

    def blocks(self, M: int, N: int, sm_count: int, products: int = 1) -> int:
        clusters = self.computed(M, N) * products * self.reduction.blocks_of_a_tile
        return (clusters if self.reduction.waits else min(clusters, self.cluster.at_once(sm_count))) * self.cluster.size


@dataclass(frozen=True)
class OneTilePerBlock(TileScheduler):
    """A block for every tile, or as many as share its K."""

    def blocks(self, M: int, N: int, sm_count: int, products: int = 1) -> int:
        return self.computed(M, N) * products * self.cluster.size * self.reduction.blocks_of_a_tile


def k_range_of(layout: GlobalLayout, begin: int, end: int, shape: StackShape) -> tuple:
    """The part of K that a layout says matters to some rows or columns, of what there is of K."""
    first, last = pair(layout, "k_range", layout.k_range(begin, end, shape))
    return max(first, 0), min(last, shape.K)
