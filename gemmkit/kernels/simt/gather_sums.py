"""Step 4 of `singlestage`, where blocks of a cluster share the K of a tile: their sums become those of the first.

Every other block writes its accumulators to its own shared memory, the cluster meets, and the first block fetches them from
there. It takes its peers in the order of their ranks, so the result does not depend on which is ready first, and merges
as the operator says. Nothing goes through global memory.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.common.reduction import Reduction
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, join, split
from gemmkit.lang.registers import apply, generate
from gemmkit.ptx.cluster import cluster_barrier, cluster_rank, cluster_size, load_shared_of
from gemmkit.ptx.memory import shared, store_shared
from gemmkit.ptx.special import rolled, thread_index, udiv


@dataclass(frozen=True)
class ClusterSums(Reduction):
    """The blocks of a cluster share a tile."""

    is_shared = True

    def rank(self) -> int:
        return cluster_rank()

    def gather(self, spec: Any, accumulators: Any, rank: int) -> bool:
        gather_sums(spec, accumulators, rank)
        return rank == 0

    def shared_bytes(self, spec: Any) -> int:
        """What a block's accumulators take in shared memory, where another block fetches them."""
        return int(spec.sums_count * spec.operator.fragment_c.dtype.itemsize)


def own_share(k: tuple, spec: Any, rank: int) -> tuple:
    """Where this block's part of K from ``k[0]`` up to ``k[1]`` begins and ends; the last may have less, or nothing."""
    begin, end = k
    size = spec.block.size.K
    share = udiv(udiv(max(end - begin, 0) + size - 1, size) + spec.cluster.splits - 1, spec.cluster.splits) * size
    return begin + rank * share, min(begin + (rank + 1) * share, end)


def gather_sums(spec: Any, accumulators: Any, rank: int) -> None:
    """The first block's accumulators take in those of its peers."""
    if rank > 0:
        for i in range(spec.fragments_m):
            for j in range(spec.fragments_n):
                each(put_piece, split(accumulators[i, j], spec.sums_width), i, j, spec)
    cluster_barrier()
    if rank == 0:
        peer = 1
        while peer < cluster_size():                   # unrolled, it would take the registers of blocks side by side
            for i in range(spec.fragments_m):
                for j in range(spec.fragments_n):
                    accumulators[i, j] = apply(merge, accumulators[i, j], fetch_fragment(i, j, spec, peer), spec)
            peer = rolled(peer + 1)
    cluster_barrier()                                  # a block's shared memory must last until the first has read it


def merge(x: Any, n: int, others: tuple, spec: Any) -> Any:
    return spec.operator.merge(x, others[n])


def put_piece(values: tuple, n: int, i: int, j: int, spec: Any) -> None:
    pointer = shared(spec.operator.fragment_c.dtype, 0)
    store_shared(pointer, thread_index() * spec.sums_width, place_of(n, i, j, spec), values)


def fetch_fragment(i: int, j: int, spec: Any, peer: int) -> tuple:
    return join(generate(spec.operator.fragment_c.count // spec.sums_width, fetch_piece, i, j, spec, peer))


def fetch_piece(n: int, i: int, j: int, spec: Any, peer: int) -> tuple:
    pointer = shared(spec.operator.fragment_c.dtype, 0)
    return load_shared_of(peer, pointer, thread_index() * spec.sums_width, place_of(n, i, j, spec), spec.sums_width)


def place_of(n: int, i: int, j: int, spec: Any) -> int:
    """Where the threads' n-th pieces of a fragment begin: neighbours in a warp are neighbours in memory."""
    pieces = spec.operator.fragment_c.count // spec.sums_width
    return ((i * spec.fragments_n + j) * pieces + n) * spec.threads * spec.sums_width
