"""What the attention kernel is specialised by: the caller's mask and score, and the mapping onto warpgroups and memory."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.collectives.operand import FragmentReuse
from gemmkit.kernels.collectives.pipeline import OrderBarrier, Pipeline, Warpgroups
from gemmkit.kernels.collectives.softmax import F32, AttentionStore, AttentionTmaStore, QuadOut
from gemmkit.kernels.masks import Mask, Score
from gemmkit.kernels.sm90.kernel import STARTING
from gemmkit.kernels.sm90.store import Panels
from gemmkit.lang.components import dataclass
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.tensor_maps import TensorMapSpec

ROWS = 64                              # of Q, which a consumer multiplies at a time


@dataclass(frozen=True)
class HeadSpec(Component):
    """What every attention kernel is specialised by: ``block_n`` keys at a time of heads of ``head_dim``. ``packed``: each
    tile says itself which rows of the arrays its sequence has."""

    mask: Mask
    score: Score
    store: AttentionStore
    dtype: np.dtype
    head_dim: int
    block_n: int
    has_lse: bool
    packed: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reuse                                 # noqa: B018  (raises where P is no A fragment)

    @cached_property
    def reuse(self) -> FragmentReuse:
        """S, whose values become those of P, as A of O += P V."""
        raise NotImplementedError

    @cached_property
    def block_m(self) -> int:
        """Rows of Q of a block."""
        raise NotImplementedError

    @cached_property
    def warpgroups(self) -> Warpgroups:
        raise NotImplementedError

    @cached_property
    def threads(self) -> int:
        return self.warpgroups.threads

    @cached_property
    def qk_steps(self) -> int:
        return self.head_dim // 16

    @cached_property
    def pv_steps(self) -> int:
        return self.reuse.fragments

    @cached_property
    def values_s(self) -> int:
        """A thread's values of S, and of O."""
        return self.block_n // 2

    @cached_property
    def values_o(self) -> int:
        return self.head_dim // 2

    # -- scores -------------------------------------------------------------------------------------------------------

    @cached_property
    def has_score(self) -> bool:
        return not self.score.is_plain

    @cached_property
    def tests_above(self) -> bool:
        """Whether blocks of keys above the free ones, apart from a tile's first, have to be tested."""
        return not self.mask.is_everything

    @cached_property
    def tests_below(self) -> bool:
        return self.mask.has_free and not self.mask.free_from_first

    # -- shared memory ------------------------------------------------------------------------------------------------

    @cached_property
    def head(self) -> Panels:
        """How rows of a head lie there."""
        return Panels(self.dtype, self.head_dim)


@dataclass(frozen=True)
class HeadRing(Pipeline):
    """The stages of Q, K or V: ``rows`` rows of a head in each, the first one's from byte ``tiles`` on."""

    tiles: int = 0
    rows: int = 0


@dataclass(frozen=True)
class AttentionSpec(HeadSpec):
    """``consumers`` warpgroups of 64 rows of Q each, beside a producer; ``block_n`` keys at a time, in ``stages`` stages; Q
    in ``q_stages``. With ``takes_turns`` consumers start their products one after the other. With ``joins_tiles`` a tile's
    last product is started behind the first S of the next one, else in front of it."""

    consumers: int
    stages: int
    q_stages: int
    takes_turns: bool
    joins_tiles: bool
    skips: bool = False

    # -- instructions -------------------------------------------------------------------------------------------------

    @cached_property
    def qk_operator(self) -> WGMMAOp:
        """S = Q K^T, both in shared memory."""
        return WGMMAOp(self.block_n, self.dtype, F32)

    @cached_property
    def pv_operator(self) -> WGMMAOp:
        """O += P V, with P in registers."""
        return WGMMAOp(self.head_dim, self.dtype, F32, b_major="MN")

    @cached_property
    def reuse(self) -> FragmentReuse:
        return FragmentReuse(self.qk_operator, self.pv_operator, self.block_n)

    @cached_property
    def qk(self) -> Any:
        return self.qk_operator.instruction

    @cached_property
    def pv(self) -> Any:
        return self.pv_operator.register_instruction

    # -- warpgroups ---------------------------------------------------------------------------------------------------

    @cached_property
    def block_m(self) -> int:
        return ROWS * self.consumers

    @cached_property
    def warpgroups(self) -> Warpgroups:
        return Warpgroups(1, self.consumers, *STARTING.get((1, self.consumers), (0, 0)))

    @cached_property
    def turns(self) -> OrderBarrier:
        """The named barriers of the store come before."""
        return OrderBarrier(self.consumers, 1 + self.consumers, self.takes_turns)

    # -- shared memory: Q, K, V, O, barriers --------------------------------------------------------------------------

    @cached_property
    def q_bytes(self) -> int:
        return 2 * self.block_m * self.head_dim

    @cached_property
    def k_bytes(self) -> int:
        """Of a stage of K, and of one of V."""
        return 2 * self.block_n * self.head_dim

    @cached_property
    def k_offset(self) -> int:
        return self.q_stages * self.q_bytes

    @cached_property
    def v_offset(self) -> int:
        return self.k_offset + self.stages * self.k_bytes

    @cached_property
    def o_offset(self) -> int:
        return self.v_offset + self.stages * self.k_bytes

    @cached_property
    def barrier_offset(self) -> int:
        return self.o_offset + (self.q_bytes if self.store.uses_tma else 0)

    @cached_property
    def q_ring(self) -> HeadRing:
        return HeadRing(self.q_stages, self.barrier_offset, 1, self.consumers, tiles=0, rows=self.block_m)

    @cached_property
    def k_ring(self) -> HeadRing:
        return HeadRing(self.stages, self.q_ring.end, 1, self.consumers, tiles=self.k_offset, rows=self.block_n)

    @cached_property
    def v_ring(self) -> HeadRing:
        return HeadRing(self.stages, self.k_ring.end, 1, self.consumers, tiles=self.v_offset, rows=self.block_n)

    @cached_property
    def shared_bytes(self) -> int:
        return self.v_ring.end

    # -- tensor maps: (head_dim, rows, heads, batch) ------------------------------------------------------------------

    @property
    def map_specs(self) -> tuple[TensorMapSpec, ...]:
        """Of Q, K, V and O."""
        return tuple(self.head.map_spec(rows, 4) for rows in (self.block_m, self.block_n, self.block_n, ROWS))


# --------------------------------------------------------------------------------------------------
# How heads of a size are mapped onto consumers, blocks of keys and stages: what was measured on an H200, or else what
# fits.
#
# Ratios are to cuDNN 9.19: of 64 and 128 in one run (2026-11-23, `bench/results/attention.json`), of 192 and of 256 in
# others (2026-11-24, without CUDA graphs: those of causal heads up to 1024 keys are of Python's calls, 123 us each).
# Mappings were compared in the sketch that this kernel was written after, and so were the figures in the files beside,
# but those of 192 and 256.
#
# | head | consumers | keys | stages of K, V / of Q | turns | O leaves | of cuDNN |
# |---|---|---|---|---|---|---|
# | 32, 64 | 3 | 128 | 4 / 2 | yes | by TMA | 0.96 to 1.20 (D 64) |
# | 96 | 2 | 128 | 3 / 2 | no | by TMA | not measured |
# | 128 | 2 | 128 | 2 / 2 | no, with a score yes | by TMA | 1.00 to 1.22 |
# | 192 | 2 | 96 | 2 / 1 | no | in octets | 0.65 to 1.34 |
# | 256 | 2 | 80 | 2 / 1 | no | in octets | 0.72 to 1.15 |
#
# Heads of 256, as geometric means of 512 to 8192 keys, causal and not, in turns in one run (2026-11-24):
#
# | 80 keys, one stage of Q | all | up to 2048 keys |
# |---|---|---|
# | tiles joined, O in pairs | 0.84 | 0.78 |
# | tiles joined, O in octets, descriptors made uniform in each round | 0.99 | 0.94 |
# | **tiles apart, O in octets** | **1.02** | **0.99** |
# | the same, O rescaled under the next S, as FlashAttention-3 does | 1.02 | 0.98 |
# | the same, and consumers take turns | 1.02 | 0.98 |
# | O rescaled under the next S, 64 keys | 1.00 | 0.98 |
#
# Heads of 192, likewise, of 8 heads and 16384 rows in all:
#
# | 96 keys, one stage of Q | all | 2048 keys and more | of these causal |
# |---|---|---|---|
# | tiles joined, O in pairs | 0.87 | 0.99 | 1.04 |
# | tiles joined, O in octets | 0.97 | 1.08 | 1.17 |
# | tiles apart, O in octets | 1.07 | 1.20 | 1.26 |
# | the same, 112 keys | 1.06 | 1.19 | 1.25 |
# | the same, 80 keys | 1.04 | 1.15 | 1.19 |
# | **tiles apart, O in octets, consumers skip what shows them nothing** | **1.08** | **1.22** | **1.30** |
# | the same, 80 keys | 1.06 | 1.19 | 1.25 |
#
# Of a causal tile's 128 rows the upper 64 see nothing of the last keys: their consumer gives these back as they come, and
# tests no more blocks than its own rows ask for (2048 keys: 190 us, 182). Three consumers of 80 keys spill 520 bytes.
#
# Heads of 256, tiles joined, O in pairs: a tile took 8.5 us beside its rounds of 1.95 us each (a line through the times
# of 512 to 2048 keys). It waited for its one stage of Q, for V behind Q, and for 2500 instructions that stored O. With
# tiles apart the assembler sees that descriptors are uniform: a round has 441 instructions, none from vector to uniform
# registers; it had 604, 74 of these.

class AttentionMapping(NamedTuple):
    """The fields of `AttentionSpec` that say how a head is computed, not what."""

    consumers: int
    block_n: int
    stages: int
    q_stages: int
    turns: bool
    store: AttentionStore                    # of O; what TMA cannot carry leaves in pairs
    joins_tiles: bool                  # a tile's last product and the next one's first S: it wants two stages of Q
    skips: bool = False                # consumers skip a tile's first block of keys where it shows their rows nothing


#: By head size, the fastest first.
MAPPINGS = {
    32: (AttentionMapping(3, 128, 4, 2, True, AttentionTmaStore(), True),
         AttentionMapping(2, 128, 4, 2, True, AttentionTmaStore(), True)),
    64: (AttentionMapping(3, 128, 4, 2, True, AttentionTmaStore(), True),
         AttentionMapping(2, 128, 4, 2, True, AttentionTmaStore(), True)),
    96: (AttentionMapping(2, 128, 3, 2, False, AttentionTmaStore(), True),),
    128: (AttentionMapping(2, 128, 2, 2, False, AttentionTmaStore(), True),),
    192: (AttentionMapping(2, 96, 2, 1, False, QuadOut(), False, True),),
    256: (AttentionMapping(2, 80, 2, 1, False, QuadOut(), False),),
}
HEADS = tuple(MAPPINGS)


def mappings(head_dim: int, score: Score, emulated: tuple[int, int] | None = None) -> list[AttentionMapping]:
    """Those of a head size, the fastest first. ``emulated``: queries and keys of the longest sequence, where the emulator
    computes it, of which no more than these is then taken.

    With a score the softmax is longer than the products: turns put it under the other consumers' (ALiBi, S 4096, D 128:
    1213 us with turns, 1286 us without).
    """
    found = [one if score.is_plain else one._replace(turns=True) for one in MAPPINGS[head_dim]]
    if emulated is None:
        return found
    consumers = min(-(-emulated[0] // ROWS), 2) or 1
    return [one._replace(consumers=consumers, block_n=few_keys(one.block_n, emulated[1]), turns=one.turns and consumers > 1)
            for one in found[-1:]]


def few_keys(most: int, keys: int) -> int:
    """Keys of a block where there are so few in all."""
    return min(most, max(1, -(-keys // 32)) * 32)


def why_not(mapping: AttentionMapping, score: Score, is_packed: bool) -> str | None:
    """Why a mapping is none for a score, or for packed sequences: a function of the user's, or the sequences' sizes, take
    registers that three consumers do not have. A light score needs few (ALiBi, 4 x 16 x 4096 x 64: 760 us with three, 874
    with two)."""
    if mapping.consumers == 3 and (is_packed or not (score.is_plain or score.is_light)):
        return "three consumers have no registers for packed sequences, or for a score that is not light"
    return None
