"""How heads of a size are mapped onto consumers, blocks of keys and stages: what was measured on an H200, or else what fits.

Ratios are to cuDNN 9.19, in one run (2026-11-23, `bench/results/attention.json`). Mappings were compared in the sketch that
this kernel was written after, and so were the figures in the files beside.

| head | consumers | keys | stages of K, V / of Q | turns | O leaves | of cuDNN |
|---|---|---|---|---|---|---|
| 32, 64 | 3 | 128 | 4 / 2 | yes | by TMA | 0.96 to 1.20 (D 64) |
| 96 | 2 | 128 | 3 / 2 | no | by TMA | not measured |
| 128 | 2 | 128 | 2 / 2 | no, with a score yes | by TMA | 1.00 to 1.22 |
| 192 | 2 | 96 | 2 / 1 | no | from the registers | not measured |
| 256 | 2 | 80 | 2 / 1 | no | from the registers | 0.70 to 0.90 |
"""

from __future__ import annotations

from typing import NamedTuple

from gemmkit.kernels.attention.store import DirectOut, OutStore, QuadOut, TmaOut

__all__ = ["HEADS", "MAPPINGS", "Mapping", "mapping_of"]


class Mapping(NamedTuple):
    """The fields of `AttentionSpec` that say how a head is computed, not what."""

    consumers: int
    block_n: int
    stages: int
    q_stages: int
    turns: bool
    store: OutStore                    # of O, where TMA can carry it
    joins_tiles: bool


MAPPINGS = {
    32: Mapping(3, 128, 4, 2, True, TmaOut(), True),
    64: Mapping(3, 128, 4, 2, True, TmaOut(), True),
    96: Mapping(2, 128, 3, 2, False, TmaOut(), True),
    128: Mapping(2, 128, 2, 2, False, TmaOut(), True),
    192: Mapping(2, 96, 2, 1, False, DirectOut(), True),
    256: Mapping(2, 80, 2, 1, False, QuadOut(), False),
}
HEADS = tuple(MAPPINGS)


def mapping_of(head_dim: int, has_score: bool, is_packed: bool) -> Mapping:
    """The mapping of a head size.

    With a score the softmax is longer than the products: turns put it under the other consumers' (ALiBi, S 4096, D 128:
    1213 us with turns, 1286 us without). A function of the user's, or the sizes of packed sequences, take registers that
    three consumers do not have: there are two then.
    """
    found = MAPPINGS[head_dim]
    if found.consumers == 3 and (has_score or is_packed):
        found = found._replace(consumers=2)
    return found._replace(turns=True) if has_score else found
