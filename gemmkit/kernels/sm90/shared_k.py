"""How many blocks share the K of a tile, and by which way their sums meet: `SharedK` decides it for a configuration.

| `splits` | cluster | blocks that share K stand in | sums meet |
|---|---|---|---|
| 1 | any | | |
| 2, 4, 8 | 1 x 1 | one cluster | in shared memory (`gemmkit.kernels.sm90.exchange.ClusterExchange`) |
| any other number | 1 x 1 | the grid | in global memory (`gemmkit.kernels.sm90.workspace_exchange`) |
| 2 and more | 2 x 1, 1 x 2, 2 x 2 | different clusters: those of one multicast operands | the same |
| `StreamK()` | any | the grid, a cluster each | in global memory (`gemmkit.kernels.sm90.stream_exchange`) |

With a workspace all blocks of a launch wait for others, so they must be on multiprocessors at once.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.common.reduction import ALONE, Reduction, dealt
from gemmkit.kernels.common.rules import SPLITS
from gemmkit.kernels.common.stream_k import StreamK
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.ptx.special import block_x, udiv
from gemmkit.tiling import Tile

COLUMNS = 8                            # that four threads hold of a row side by side: the least of a slice


@dataclass(frozen=True)
class SharedK:
    """``splits`` blocks share the K of a tile, or clusters stream it; clusters are of ``cluster`` tiles (M, N)."""

    splits: int | StreamK
    cluster: Tile

    @property
    def streams(self) -> bool:
        """Whether clusters stay and take equal shares of all k-tiles, wherever a tile ends."""
        return isinstance(self.splits, StreamK)

    @property
    def in_cluster(self) -> int:
        """Blocks of a cluster that share the K of a tile."""
        return in_one_cluster(self.shares, self.cluster.count)

    @property
    def shares(self) -> int:
        """Into how many equal shares the K of every tile is divided."""
        return 1 if isinstance(self.splits, StreamK) else self.splits

    @property
    def by_workspace(self) -> bool:
        """Whether the shares of every tile meet in global memory."""
        return self.shares > self.in_cluster

    def slices(self, N: int, least: int) -> int:
        """In how many slices of columns a tile of ``N`` columns is finished, each by one block; a slice has a multiple of
        ``least`` columns (`least_columns`).

        By way of a cluster as many as there are blocks. By way of a workspace as many as N allows, and no more than there
        are blocks: those that are left over finish none.

        >>> SharedK(15, Tile(M=2, N=2)).slices(128, 16), SharedK(6, Tile(M=1, N=1)).slices(96, 16)
        (8, 6)
        """
        if not self.by_workspace:
            return self.shares
        return next((n for n in range(min(self.shares, N // least), 0, -1) if N % n == 0 and N // n % least == 0), 1)

    @property
    def reduction(self) -> Reduction:
        """What the scheduler is told of blocks that share K by way of a workspace. (Of those of a cluster the cluster
        knows.)"""
        return ClustersShareK(self.shares, self.cluster.count) if self.by_workspace else ALONE

    def check_resident(self, clusters: int, most: int) -> None:
        """Raise ConfigError where ``clusters`` clusters, of which a device holds ``most`` at once, wait for each other."""
        if clusters > most:
            m, n = self.cluster.extents
            fits = most // (clusters // self.shares)
            cure = f"take splits={fits} or fewer" if fits > 1 else "take splits=1, or larger tiles"
            raise ConfigError(f"splits={self.splits}: {clusters} clusters of {m}x{n} blocks wait for each other, and the "
                              f"device holds {most} at once; {cure}")


def in_one_cluster(shares: int, tiles: int) -> int:
    """How many of ``shares`` blocks that share the K of a tile stand in its cluster, of so many tiles."""
    return shares if tiles == 1 and shares in SPLITS else 1


def least_columns(layout: Any, folds: int) -> int:
    """Of what the columns of a slice must be a multiple, for D's shared layout: of `COLUMNS`, and of its panels'. Where
    ``folds`` columns become one of D, of `COLUMNS` for each: where that is no panel, D leaves from the registers."""
    if folds > 1:
        return COLUMNS * folds
    return max(COLUMNS, int(layout.line)) if layout.axis == 1 else COLUMNS


@dataclass(frozen=True)
class ClustersShareK(Reduction):
    """``shares`` clusters of ``blocks`` blocks, beside each other in the grid, share the K of their tiles.

    All blocks of a cluster have the same share: they multicast operands to each other.
    """

    shares: int
    blocks: int

    is_shared = True
    divides_k = True
    waits = True

    def tile(self, block: int) -> int:
        return udiv(block, self.shares)

    def rank(self) -> int:
        cluster = udiv(block_x(), self.blocks)
        return cluster - udiv(cluster, self.shares) * self.shares

    def share(self, count: int, rank: int) -> tuple:
        """``rank`` is the block's in its cluster, on which its share does not depend."""
        return dealt(count, self.shares, self.rank())

    # -- on the host ----------------------------------------------------------------------------------------------------

    @property
    def blocks_of_a_tile(self) -> int:
        return self.shares
