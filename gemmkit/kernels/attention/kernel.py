"""``attention``: softmax(score(scale Q K^T)) V for Hopper, in the manner of FlashAttention-3 (Shah et al., 2024).

Blocks stay on their multiprocessors and compute one tile after the other: 64 rows of Q for each consumer.

| role | threads | waits for | signals |
|---|---|---|---|
| producer | one of the first warpgroup | ``empty`` of Q, K, V | ``full`` of Q, K, V, by TMA |
| consumer | 2 or 3 warpgroups | ``full`` | ``empty`` |

| step | what | where |
|---|---|---|
| 0 | barriers, registers | here |
| 1 | Q, K, V: global -> shared | `producer` |
| 2 | a round: start S' = Q K_j^T and O += P V_(j-1), wait for S' | `products` |
| 3 | the softmax of S', while O is multiplied; then P, and O by what the largest scores have grown | `softmax`, `elements` |
| 4 | the end of a tile: O by one over the sums; O and their logarithms to global memory | `store` |

Rounds run on across tiles (`consumer`): the last product of a tile is under way beside the first S of the next one. P stays
in the registers, since an accumulator's pairs are the words of an A fragment.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.attention.consumer import consume
from gemmkit.kernels.attention.producer import produce
from gemmkit.kernels.attention.work import Outputs
from gemmkit.ptx.mbarrier import mbarrier_fence_init
from gemmkit.ptx.special import barrier, thread_index, udiv, uniform
from gemmkit.ptx.tma import tma_prefetch
from gemmkit.ptx.warpgroup import grid_launch_dependents, grid_wait


def attention(spec: Any, sizes: Any, order: Any, out: Any, lse: Any, map_q: Any, map_k: Any, map_v: Any,
              map_out: Any) -> None:
    """Launched with ``spec.threads`` threads; see the module's tables."""
    # 0. Barriers, before any thread waits on one; then what the previous kernel wrote may be read.
    group = uniform(udiv(thread_index(), 128))
    if thread_index() == 0:
        spec.q_ring.initialise()
        spec.k_ring.initialise()
        spec.v_ring.initialise()
        mbarrier_fence_init()
        tma_prefetch(map_q)
        tma_prefetch(map_k)
        tma_prefetch(map_v)
        if spec.store.uses_tma:
            tma_prefetch(map_out)
    barrier()
    grid_launch_dependents()
    grid_wait()

    if group == 0:
        # 1. Q, K and V: global -> shared.
        spec.warpgroups.give_registers()
        if thread_index() == 0:
            produce(spec, sizes, order, map_q, map_k, map_v)
    else:
        # 2. to 4. Multiply, soften, store.
        spec.warpgroups.take_registers()
        consume(spec, sizes, order, Outputs(out, lse, map_out), group - 1)
