"""How heads of a size are mapped onto consumers, blocks of keys and stages: what was measured on an H200, or else what fits.

Ratios are to cuDNN 9.19: of 64 and 128 in one run (2026-11-23, `bench/results/attention.json`), of 256 in another
(2026-11-24, without CUDA graphs). Mappings were compared in the sketch that this kernel was written after, and so were the
figures in the files beside, but those of 256.

| head | consumers | keys | stages of K, V / of Q | turns | O leaves | of cuDNN |
|---|---|---|---|---|---|---|
| 32, 64 | 3 | 128 | 4 / 2 | yes | by TMA | 0.96 to 1.20 (D 64) |
| 96 | 2 | 128 | 3 / 2 | no | by TMA | not measured |
| 128 | 2 | 128 | 2 / 2 | no, with a score yes | by TMA | 1.00 to 1.22 |
| 192 | 2 | 96 | 2 / 1 | no | in pairs | not measured |
| 256 | 2 | 80 | 2 / 1 | no | in octets | 0.72 to 1.15 |

Heads of 256, as geometric means of 512 to 8192 keys, causal and not, in turns in one run (2026-11-24):

| 80 keys, one stage of Q | all | up to 2048 keys |
|---|---|---|
| tiles joined, O in pairs (as heads of 192) | 0.84 | 0.78 |
| tiles joined, O in octets, descriptors made uniform in each round | 0.99 | 0.94 |
| **tiles apart, O in octets** | **1.02** | **0.99** |
| the same, O rescaled under the next S, as FlashAttention-3 does | 1.02 | 0.98 |
| the same, and consumers take turns | 1.02 | 0.98 |
| O rescaled under the next S, 64 keys | 1.00 | 0.98 |

Tiles joined, O in pairs: a tile took 8.5 us beside its rounds of 1.95 us each (a line through the times of 512 to 2048
keys). It waited for its one stage of Q, for V behind Q, and for 2500 instructions that stored O. With tiles apart the
assembler sees that descriptors are uniform: a round has 441 instructions, none from vector to uniform registers; it had
604, 74 of these.
"""

from __future__ import annotations

from typing import NamedTuple

from gemmkit.kernels.attention.store import DirectOut, OutStore, QuadOut, TmaOut
from gemmkit.scores import Score

__all__ = ["HEADS", "MAPPINGS", "Mapping", "mapping_of"]


class Mapping(NamedTuple):
    """The fields of `AttentionSpec` that say how a head is computed, not what."""

    consumers: int
    block_n: int
    stages: int
    q_stages: int
    turns: bool
    store: OutStore                    # of O; what TMA cannot carry leaves in pairs
    joins_tiles: bool                  # a tile's last product and the next one's first S: it wants two stages of Q


MAPPINGS = {
    32: Mapping(3, 128, 4, 2, True, TmaOut(), True),
    64: Mapping(3, 128, 4, 2, True, TmaOut(), True),
    96: Mapping(2, 128, 3, 2, False, TmaOut(), True),
    128: Mapping(2, 128, 2, 2, False, TmaOut(), True),
    192: Mapping(2, 96, 2, 1, False, DirectOut(), True),
    256: Mapping(2, 80, 2, 1, False, QuadOut(), False),
}
HEADS = tuple(MAPPINGS)


def mapping_of(head_dim: int, score: Score, is_packed: bool) -> Mapping:
    """The mapping of a head size.

    With a score the softmax is longer than the products: turns put it under the other consumers' (ALiBi, S 4096, D 128:
    1213 us with turns, 1286 us without). A function of the user's, or the sizes of packed sequences, take registers that
    three consumers do not have: there are two then. A light score needs few (ALiBi, 4 x 16 x 4096 x 64: 760 us with three,
    874 with two).
    """
    found = MAPPINGS[head_dim]
    if found.consumers == 3 and (is_packed or not (score.is_plain or score.is_light)):
        found = found._replace(consumers=2)
    return found if score.is_plain else found._replace(turns=True)
