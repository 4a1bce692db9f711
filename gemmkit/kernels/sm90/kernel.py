"""The template kernel for Hopper: warps with roles around a ring of stages in shared memory.

Blocks stay on their multiprocessors and take one tile of D after the other. In each, warpgroups have roles:

| role | warps | waits for | signals |
|---|---|---|---|
| producer | the first warpgroup (or two) | ``empty[stage]`` | ``full[stage]`` |
| consumer, multiplying | the other warpgroups | ``full[stage]`` | ``empty[stage]`` |
| consumer, finishing | the same | its subtile of shared memory | TMA |

The producer fills a stage with tiles of A and B, each by its route: by TMA, which one thread starts; or, for an operand in a
layout of the user's, or lying where TMA cannot reach, with the code of the component. What is transformed comes by TMA, too,
where it can, and the producer's warps rewrite it in place (``raw[stage]`` stands between). Consumers multiply a stage
(wgmma) and keep the sums in registers; at the end of a tile they finish it (C, transforms, epilogue) and store D by way of
swizzled shared memory and TMA.

A *cooperative* schedule
has all consumers work on one tile, each on its rows. With *ping-pong* each has a tile of its own, and while one multiplies
the other finishes: they take turns at the tensor cores, which an order barrier sees to. In a cluster, blocks with the same
rows (or columns) share A (or B): each loads a part for all. Or they share the K of a tile, and `exchange` their sums.
Clusters that share operands can share K with other clusters: their sums meet in global memory (`workspace_exchange`).

| step | what | where |
|---|---|---|
| 0 | barriers, registers | here |
| 1 | A, B: global -> shared, with their transforms | `producer`, `routes` |
| 2 | multiply and accumulate | `consumer`, `mainloop`, `fragments` |
| 3 | C, transforms of C and D, epilogue; D: registers -> shared -> global | `store` |

Transforms of A and B between shared memory and registers stand before shared memory here, behind those on the way to it
(`Config.transforms_of`): tensor cores read shared memory themselves. A that comes from registers is transformed there.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.common.work import Input, Inputs, Outputs
from gemmkit.kernels.sm90.consumer import consume_in_turns, consume_together
from gemmkit.kernels.sm90.producer import rank_of
from gemmkit.ptx.cluster import cluster_barrier
from gemmkit.ptx.mbarrier import mbarrier_fence_init
from gemmkit.ptx.special import barrier, thread_index, udiv, uniform
from gemmkit.ptx.tma import tma_prefetch
from gemmkit.ptx.warpgroup import grid_launch_dependents, grid_wait


def warp_specialised(spec: Any, a: Any, b: Any, c: Any, d: Any, shape: Any, map_a: Any, map_b: Any, map_c: Any,
                     map_d: Any) -> None:
    """D = A B + C; see the module's table. Launched with ``spec.threads`` threads, in clusters of ``spec.cluster.size``."""
    # 0. Barriers, before any thread waits on one; then what the previous kernel wrote may be read.
    group = uniform(udiv(thread_index(), 128))
    rank = rank_of(spec)
    if thread_index() == 0:
        spec.pipeline.initialise()
        spec.exchange.initialise(spec.cluster.splits)
        spec.store.initialise()
        spec.row_exchange.initialise()
        mbarrier_fence_init()
        spec.a.route.prefetch(map_a)
        spec.b.route.prefetch(map_b)
        if spec.store.reads_ahead:
            tma_prefetch(map_c)
        if spec.store.uses_tma:
            tma_prefetch(map_d)
    if spec.cluster.is_single:
        barrier()
    else:
        cluster_barrier()
    grid_launch_dependents()
    grid_wait()

    if group < spec.producers:
        # 1. A and B: global -> shared.
        spec.warpgroups.give_registers()
        spec.producer.run(spec, Inputs(Input(a, map_a), Input(b, map_b)), rank, shape)
    else:
        # 2. and 3. Multiply, finish.
        spec.warpgroups.take_registers()
        if spec.is_pingpong:
            consume_in_turns(spec, Outputs(c, d, map_c, map_d, 0, shape), group - spec.producers, rank)
        else:
            consume_together(spec, Outputs(c, d, map_c, map_d, 0, shape), group - spec.producers, rank)

    # A block's shared memory must last until its peers have read and signalled all they will.
    if not spec.cluster.is_single:
        cluster_barrier()
