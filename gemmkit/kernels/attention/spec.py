"""What the attention kernel is specialised by: the caller's mask and score, and the mapping onto warpgroups and memory."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.attention.store import OutStore
from gemmkit.kernels.attention.work import F32
from gemmkit.kernels.common.hand_over import HandOver
from gemmkit.kernels.common.pipeline import Pipeline
from gemmkit.kernels.sm90.panels import Panels
from gemmkit.kernels.sm90.producer import STARTING
from gemmkit.kernels.sm90.warpgroups import Turns, Warpgroups
from gemmkit.lang.component_class import dataclass
from gemmkit.masks import Mask
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.tensor_maps import TensorMapSpec
from gemmkit.scores import Score

ROWS = 64                              # of Q, which a consumer multiplies at a time


@dataclass(frozen=True)
class HeadSpec(Component):
    """What every attention kernel is specialised by: ``block_n`` keys at a time of heads of ``head_dim``. ``packed``: each
    tile says itself which rows of the arrays its sequence has."""

    mask: Mask
    score: Score
    store: OutStore
    dtype: np.dtype
    head_dim: int
    block_n: int
    has_lse: bool
    packed: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hand_over                                 # noqa: B018  (raises where P is no A fragment)

    @cached_property
    def hand_over(self) -> HandOver:
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
        return self.hand_over.fragments

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
class Ring(Pipeline):
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
    def hand_over(self) -> HandOver:
        return HandOver(self.qk_operator, self.pv_operator, self.block_n)

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
    def turns(self) -> Turns:
        """The named barriers of the store come before."""
        return Turns(self.consumers, 1 + self.consumers, self.takes_turns)

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
    def q_ring(self) -> Ring:
        return Ring(self.q_stages, self.barrier_offset, 1, self.consumers, tiles=0, rows=self.block_m)

    @cached_property
    def k_ring(self) -> Ring:
        return Ring(self.stages, self.q_ring.end, 1, self.consumers, tiles=self.k_offset, rows=self.block_n)

    @cached_property
    def v_ring(self) -> Ring:
        return Ring(self.stages, self.k_ring.end, 1, self.consumers, tiles=self.v_offset, rows=self.block_n)

    @cached_property
    def shared_bytes(self) -> int:
        return self.v_ring.end

    # -- tensor maps: (head_dim, rows, heads, batch) ------------------------------------------------------------------

    @property
    def map_specs(self) -> tuple[TensorMapSpec, ...]:
        """Of Q, K, V and O."""
        return tuple(self.head.map_spec(rows, 4) for rows in (self.block_m, self.block_n, self.block_n, ROWS))
