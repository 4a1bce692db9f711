"""``mlp``: a multi-layer perceptron for Hopper, whose activations stay in registers from layer to layer.

Blocks stay on their multiprocessors and compute one tile of rows after the other: 64 rows for each consumer, all layers.

| role | threads | waits for | signals |
|---|---|---|---|
| producer | one of the first warpgroup | ``empty`` of x and weights | ``full``, by TMA |
| consumer | 2 warpgroups | ``full`` | ``empty`` |

| step | what | where |
|---|---|---|
| 0 | barriers, registers, the maps of all layers | here |
| 1 | x once a tile, weights and biases layer by layer: global -> shared | `producer` |
| 2 | the first layer: x W, both in shared memory, on top of the biases | `consumer` |
| 3 | a layer: the activation of the sums, their pairs as words of A, the product with the next weights | `consumer` |
| 4 | the last layer's sums, with its activation, to global memory | `store` |

An accumulator's pairs are the words of an A fragment, so that nothing is exchanged between threads. Consumers take turns:
the activations of one lie under the products of the other. The blocks of a cluster share the weights by multicast.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.mlp.consumer import consume
from gemmkit.kernels.mlp.producer import produce
from gemmkit.kernels.mlp.work import Outputs, Tables
from gemmkit.ptx.cluster import cluster_barrier, cluster_rank
from gemmkit.ptx.map_table import acquire_map, map_at
from gemmkit.ptx.mbarrier import mbarrier_fence_init
from gemmkit.ptx.special import barrier, lane_index, rolled, thread_index, udiv, uniform
from gemmkit.ptx.tma import tma_prefetch
from gemmkit.ptx.warpgroup import grid_launch_dependents, grid_wait


def mlp(spec: Any, sizes: Any, maps: Any, shapes: Any, out: Any, map_x: Any, map_out: Any) -> None:
    """Launched with ``spec.threads`` threads, in clusters of ``spec.cluster.size``; see the module's tables."""
    # 0. Barriers, before any thread waits on one; then what was written before may be read: maps that a copy has written.
    group = uniform(udiv(thread_index(), 128))
    rank = thread_index() * 0 if spec.cluster.is_single else cluster_rank()
    if thread_index() == 0:
        spec.ring.initialise()
        spec.x_ring.initialise()
        mbarrier_fence_init()
        tma_prefetch(map_x)
        if spec.store.uses_tma:
            tma_prefetch(map_out)
    grid_launch_dependents()
    grid_wait()
    count = sizes.layers * (2 if spec.has_bias else 1)
    row = lane_index() * (spec.threads // 32) + udiv(thread_index(), 32)       # a warp's lanes go one after the other
    while row < count:
        acquire_map(maps, row)
        tma_prefetch(map_at(maps, row))
        row = rolled(row + spec.threads)
    if spec.cluster.is_single:
        barrier()
    else:
        cluster_barrier()

    if group == 0:
        # 1. x, weights and biases: global -> shared.
        spec.warpgroups.give_registers()
        if thread_index() == 0:
            produce(spec, sizes, maps, map_x, rank)
    else:
        # 2. to 4. Multiply, activate, store.
        spec.warpgroups.take_registers()
        consume(spec, sizes, Tables(maps, shapes), Outputs(out, map_out), rank, group - 1)

    # A block's shared memory must last until its peers have written and signalled all they will.
    if not spec.cluster.is_single:
        cluster_barrier()
