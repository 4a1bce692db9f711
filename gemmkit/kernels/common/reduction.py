"""How blocks that share the K of a tile find their shares, and how their sums become one.

A scheduler has a reduction. Kernels ask it for a block's rank among those that share a tile, for the block's k-tiles, and
behind the main loop to `gather`; the block that is told so finishes the tile.

| kind | shares | sums meet |
|---|---|---|
| `Reduction` | one: a block has K to itself | |
| `ClusterSums` | 2, 4 or 8 blocks of a cluster (sm_90) | in the first block's registers, by way of shared memory |
| `WorkspaceSums` | any number | in the registers of the block that comes last, by way of global memory |
| `SlicedSums` | any number, all resident at once | each block sums a slice; the last to do so collects them |
| `HandedOver` | those of a stream of k-tiles, all resident at once | in the registers of the block that began the tile |
| `ClustersShareK` | any number of clusters, all resident at once | in slices, by the exchange of `warp_specialised` |
| `ClustersStreamK` | those of a stream, clusters all resident at once | in the block that began the tile, by the same |

`ClusterSums` is in `gemmkit.kernels.simt.gather_sums`, `WorkspaceSums` and `SlicedSums` are in
`gemmkit.kernels.common.workspace_sums`, `HandedOver` in `gemmkit.kernels.common.stream_k`, and the last two in
`gemmkit.kernels.sm90`: `shared_k` and `stream_exchange`.

Whatever the kind, the order of additions depends on the number of shares alone: the same call gives the same bits.
"""

from __future__ import annotations

from typing import Any

from gemmkit.components import Component
from gemmkit.lang.component_class import dataclass
from gemmkit.ptx.special import udiv


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

    def gather(self, spec: Any, accumulators: Any, rank: int) -> bool:
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

    def shared_bytes(self, spec: Any) -> int:
        """What it needs of shared memory, at the time of `gather`."""
        return 0


def dealt(count: int, shares: int, rank: int) -> tuple:
    """The first of a share's k-tiles, of ``count``, and how many they are: shares differ by one at most, the first ones have
    more."""
    least = udiv(count, shares)
    more = count - least * shares
    return rank * least + min(rank, more), least + (1 if rank < more else 0)


ALONE = Reduction()
