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

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.mlp.spec import ROWS, MlpSpec
from gemmkit.kernels.mlp.store import OutStore

CONSUMERS, CLUSTER, TURNS = 2, 2, True
MOST_STAGES = 16
ENOUGH = 6                             # stages of weights, beside which a second tile of x has room


class Mapping(NamedTuple):
    """The fields of `MlpSpec` that are chosen: tiles of x, and chunks of weights."""

    x_stages: int
    stages: int


def mappings(fields: dict[str, Any], store: OutStore, rows: int, layers: int, room: int) -> Iterator[Mapping]:
    """Those with as many stages of weights as fit in ``room`` bytes: beside two tiles of x if these are enough, and beside
    one."""
    for x_stages in (2, 1):
        one, two = (spec_of(Mapping(x_stages, stages), fields, store, rows, layers).shared_bytes for stages in (1, 2))
        stages = min(MOST_STAGES, 1 + (room - one) // (two - one))
        if x_stages == 1 or stages >= ENOUGH:
            yield Mapping(x_stages, stages)


def spec_of(mapping: Mapping, fields: dict[str, Any], store: OutStore, rows: int, layers: int) -> MlpSpec:
    """The spec of a mapping; a single tile of rows has no cluster."""
    cluster = Cluster(m=CLUSTER) if CLUSTER > 1 and rows > ROWS * CONSUMERS else Cluster()
    spec = MlpSpec(**fields, store=store, cluster=cluster, consumers=CONSUMERS, stages=mapping.stages,
                   x_stages=mapping.x_stages, takes_turns=TURNS, resident=False)
    return replace(spec, resident=_chunks(spec, layers) <= mapping.stages)


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
