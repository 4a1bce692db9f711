"""The template kernel for Hopper: warps with roles around a ring of stages in shared memory.

Blocks stay on their multiprocessors and walk over the tiles of D. In each, warpgroups have roles:

| role | who | waits for | signals |
|---|---|---|---|
| producer | the first warpgroup (or two) | ``empty[stage]`` | ``full[stage]`` |
| consumer, multiplying | the other warpgroups | ``full[stage]`` | ``empty[stage]`` |
| consumer, finishing | the same | its panel of shared memory | the copy engine |

The producer fills a stage with tiles of A and B: by the copy engine (TMA), which one thread starts; or, for an operand in a
layout of the user's, or lying where the engine cannot reach, with the code of the component. What is transformed comes by
the engine, too, where it can, and the producer's warps change it in place (``landed[stage]`` stands between). Consumers
multiply a stage (wgmma) and keep the sums in registers; at the end of a tile they finish it (C, transforms, epilogue) and
send D by way of swizzled shared memory and the copy engine.

The barriers count in phases: the n-th filling of a stage is the n-th phase of its barriers. A *cooperative* schedule
has all consumers work on one tile, each on its rows. With *ping-pong* each has a tile of its own, and while one multiplies
the other finishes: they take turns at the tensor cores, which an order barrier sees to. In a cluster, blocks with the same
rows (or columns) share A (or B): each loads a part for all. Or they share the K of a tile, and `exchange` their sums.

| step | what | where |
|---|---|---|
| 0 | barriers, registers | here |
| 1 | A, B: global -> shared, with their transforms | `producer`; `gather`; `inplace`; `landing` |
| 2 | multiply and accumulate | `consumer` |
| 3 | C, transforms of C and D, epilogue; D: registers -> shared -> global | `finish` |

Transforms of A and B between shared memory and registers stand before shared memory here, behind those on the way to it
(`Config.transforms_of`): tensor cores read shared memory themselves. A that goes by registers is transformed there.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.consumer import consume_in_turns, consume_together
from gemmkit.kernels.gather import produce_by_copies
from gemmkit.kernels.landing import produce_by_landing
from gemmkit.kernels.producer import produce_by_engine, produce_by_warps
from gemmkit.kernels.walk import BARRIERS
from gemmkit.kernels.work import Barriers, Outputs
from gemmkit.ptx.cluster import cluster_barrier, cluster_rank
from gemmkit.ptx.mbarrier import mbarrier_fence_init, mbarrier_init
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import barrier, thread_index, udiv, uniform
from gemmkit.ptx.tma import tma_prefetch
from gemmkit.ptx.warpgroup import give_registers, grid_launch_dependents, grid_wait, take_registers


def warp_specialised(spec: Any, a: Any, b: Any, c: Any, d: Any, shape: Any, map_a: Any, map_b: Any, map_d: Any) -> None:
    """D = A B + C; see the module's table. Launched with ``spec.threads`` threads, in clusters of ``spec.peers``."""
    # 0. Barriers, before anybody waits on one; then what the previous kernel wrote may be read.
    full, empty = shared(BARRIERS, spec.full_offset), shared(BARRIERS, spec.empty_offset)
    group = uniform(udiv(thread_index(), 128))
    rank = cluster_rank() if spec.is_cluster else thread_index() * 0
    if thread_index() == 0:
        for stage in range(spec.stages):
            mbarrier_init(full, stage, spec.full_arrivals)
            mbarrier_init(empty, stage, spec.empty_arrivals)
            if spec.has_landed:
                mbarrier_init(shared(BARRIERS, spec.landed_offset), stage, 1)
        for consumer in range(spec.exchanging):
            mbarrier_init(shared(BARRIERS, spec.filled_offset), consumer, 1)
            mbarrier_init(shared(BARRIERS, spec.free_offset), consumer, spec.splits)
        mbarrier_fence_init()
        if spec.a_engine:
            tma_prefetch(map_a)
        if spec.b_engine:
            tma_prefetch(map_b)
        if spec.d_engine:
            tma_prefetch(map_d)
    if spec.is_cluster:
        cluster_barrier()
    else:
        barrier()
    grid_launch_dependents()
    grid_wait()

    if group < spec.producers:
        # 1. A and B: global -> shared.
        if spec.deals_registers:
            give_registers(spec.producer_registers)
        if spec.is_landing:
            produce_by_landing(spec, a, b, map_a, map_b, full, empty, rank, shape)
        elif spec.is_gathering:
            produce_by_copies(spec, a, b, map_a, map_b, full, empty, rank, shape)
        elif spec.is_working:
            produce_by_warps(spec, a, b, map_a, map_b, full, empty, rank, shape)
        else:
            produce_by_engine(spec, a, b, map_a, map_b, full, empty, rank, shape)
    else:
        # 2. and 3. Multiply, finish.
        if spec.deals_registers:
            take_registers(spec.consumer_registers)
        if spec.is_pingpong:
            consume_in_turns(spec, Outputs(c, d, map_d, shape), Barriers(full, empty), group - spec.producers, rank)
        else:
            consume_together(spec, Outputs(c, d, map_d, shape), Barriers(full, empty), group - spec.producers, rank)

    # A block's shared memory must last until its peers have read and signalled all they will.
    if spec.is_cluster:
        cluster_barrier()


__all__ = ["warp_specialised"]
