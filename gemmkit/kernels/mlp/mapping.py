"""How an MLP of given widths is mapped onto consumers, stages and clusters on Hopper.

| widest layer | x stages | stages of weights | a block's rows |
|---|---|---|---|
| 32 to 128 | 2 | 16 to 10 | 128 |
| 160 to 256 | 1, of the smaller 2 | what fits: 4 to 7 | 128 |

Two consumers of 64 rows take turns: a layer of width 128 is 512 cycles of the tensor cores for each, and its activations
take less. The weights of a layer are read by every block (16384 rows, width 128, 20 layers: 84 MB from the L2, 4.7 TB/s in
18 us), so that two blocks of a cluster load a half each for both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.mlp.spec import ROWS, MlpSpec
from gemmkit.kernels.mlp.store import OutStore

CONSUMERS, CLUSTER, TURNS = 2, 2, True
MOST_STAGES = 16
ENOUGH = 6                             # stages of weights, beside which a second tile of x has room


def hopper_spec(fields: dict[str, Any], store: OutStore, rows: int, layers: int, device: Any) -> MlpSpec:
    """The spec with as many stages as fit; a single tile of rows has no cluster."""
    cluster = Cluster(m=CLUSTER) if CLUSTER > 1 and rows > ROWS * CONSUMERS else Cluster()
    room = device.shared_memory_per_block
    spec = MlpSpec(**fields, store=store, cluster=cluster, consumers=CONSUMERS, stages=1, x_stages=2, takes_turns=TURNS,
                   resident=False)
    stages = _stages(spec, room)
    if stages < ENOUGH:
        spec = replace(spec, x_stages=1)
        stages = _stages(spec, room)
    spec = replace(spec, stages=stages)
    return replace(spec, resident=_chunks(spec, layers) <= stages)


def _stages(spec: MlpSpec, room: int) -> int:
    """How many stages of weights fit beside x."""
    one = replace(spec, stages=1).shared_bytes
    more = replace(spec, stages=2).shared_bytes - one
    return min(MOST_STAGES, 1 + (room - one) // more)


def _chunks(spec: MlpSpec, layers: int) -> int:
    """Of the weights of all layers."""
    if spec.single:
        return spec.first.chunks
    return spec.first.chunks + (layers - 2) * spec.middle.chunks + spec.final.chunks


def blocks_of(spec: MlpSpec, rows: int, sm_count: int) -> int:
    """Blocks that are on their multiprocessors at once, with as even a number of tiles as there can be."""
    size = spec.cluster.size
    tiles = -(-rows // spec.block_m)
    turns = -(-tiles // (spec.cluster.at_once(sm_count) * size))
    return -(-tiles // (turns * size)) * size
