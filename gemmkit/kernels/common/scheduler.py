"""Tile schedulers: which tiles of D a thread block computes, in which order, and which part of K.

Producer and consumers iterate over the same tiles and stages without communicating; the iteration is defined here, once.
"""

from __future__ import annotations

from typing import Any

from gemmkit.components import Component
from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.common.reduction import ALONE as HAS_K_ALONE
from gemmkit.kernels.common.reduction import Reduction
from gemmkit.kernels.common.stack import ALONE, Stack
from gemmkit.kernels.common.work import Work
from gemmkit.kernels.rasterisation import Order
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.returned import pair
from gemmkit.ptx.special import block_x, grid_x, udiv
from gemmkit.tiling import Tile


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
    reduction: Reduction = HAS_K_ALONE

    #: Whether blocks stay and take parts of tiles; then ``of_part(at)`` is the scheduler that answers for the part at ``at``
    #: (`gemmkit.kernels.common.stream_k`).
    stays = False

    @property
    def stack(self) -> Stack:
        """Which matrices belong to a product: there is one product."""
        return ALONE

    def rows(self, shape: Any) -> int:
        """Tiles of a cluster along M."""
        size = self.block.size.M * self.cluster.m
        return udiv(shape.M + size - 1, size)

    def columns(self, shape: Any) -> int:
        size = self.block.size.N * self.cluster.n
        return udiv(shape.N + size - 1, size)

    def count(self, shape: Any) -> int:
        return self.rows(shape) * self.columns(shape)

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

    def end(self, shape: Any) -> int:
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

    def gather(self, spec: Any, accumulators: Any, rank: int) -> bool:
        """Add up the sums of blocks that share a tile; whether this block has them. See `Reduction.gather`."""
        return self.reduction.gather(spec, accumulators, rank)

    def product(self, tile: int) -> tuple:
        """Which product of a stack a tile is of, and which tile of that."""
        return 0, tile

    def work(self, spec: Any, tile: int, rank: int, shape: Any) -> Work:
        """A block's tile of D, and which k-tiles of it are this block's."""
        m, n = self.place(tile, rank, shape)
        begin, count = self.k_tiles(spec, m, n, rank, shape)
        return Work(m, n, 0, begin, count, rank)

    def place(self, tile: int, rank: int, shape: Any) -> tuple:
        """First row and column of a block's tile of D."""
        row, column = pair(self.order, "block", self.order.block(tile, self.rows(shape), self.columns(shape)))
        m, n = row * self.cluster.m, column * self.cluster.n
        if self.cluster.shares_b:
            m += self.cluster.row(rank)
        if self.cluster.shares_a:
            n += self.cluster.column(rank)
        return m * self.block.size.M, n * self.block.size.N

    def k_tiles(self, spec: Any, m: int, n: int, rank: int, shape: Any) -> tuple:
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


@dataclass(frozen=True)
class Persistent(TileScheduler):
    """As many blocks as there are multiprocessors: each stays until all tiles are done. Where clusters share K each has one
    tile's share, and all must be resident."""

    def blocks(self, M: int, N: int, sm_count: int, products: int = 1) -> int:
        rows, columns = self.grid(M, N)
        clusters = rows * columns * products * self.reduction.blocks_of_a_tile
        return (clusters if self.reduction.waits else min(clusters, self.cluster.at_once(sm_count))) * self.cluster.size


@dataclass(frozen=True)
class OneTilePerBlock(TileScheduler):
    """A block for every tile, or as many as share its K."""

    def blocks(self, M: int, N: int, sm_count: int, products: int = 1) -> int:
        rows, columns = self.grid(M, N)
        return rows * columns * products * self.cluster.size * self.reduction.blocks_of_a_tile


def k_range_of(layout: Any, begin: int, end: int, shape: Any) -> tuple:
    """The part of K that a layout says matters to some rows or columns, of what there is of K."""
    first, last = pair(layout, "k_range", layout.k_range(begin, end, shape))
    return max(first, 0), min(last, shape.K)
