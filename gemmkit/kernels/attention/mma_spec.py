"""What `attention_by_warps` is specialised by, and how it is mapped onto warps and memory."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from gemmkit.kernels.attention.spec import ROWS, HeadSpec
from gemmkit.kernels.attention.work import F32
from gemmkit.kernels.common.hand_over import HandOver
from gemmkit.kernels.sm90.warpgroups import Warpgroups
from gemmkit.lang.component_class import dataclass
from gemmkit.operators import MMAOp

STAGES = 2                             # of K and V
BLOCK_N = {32: 64, 64: 64, 96: 64, 128: 64, 192: 32, 256: 32}         # by head size: 96 KiB of shared memory at most


@dataclass(frozen=True)
class MmaAttentionSpec(HeadSpec):
    """Four warps of 16 rows of Q each."""

    warpgroups = Warpgroups(0, 1)
    map_specs = ()                     # nothing is moved by TMA

    @cached_property
    def block_m(self) -> int:
        return ROWS

    @cached_property
    def operator(self) -> MMAOp:
        """16 x 16 by 16 x 16, of both products."""
        return MMAOp(N=16, dtype=self.dtype, accumulator=F32)

    @cached_property
    def hand_over(self) -> HandOver:
        return HandOver(self.operator, self.operator, self.block_n)

    @cached_property
    def mma(self) -> Any:
        return self.operator.instruction

    @cached_property
    def q_bytes(self) -> int:
        return 2 * ROWS * self.head_dim

    @cached_property
    def k_bytes(self) -> int:
        """Of a stage of K, and of one of V."""
        return 2 * self.block_n * self.head_dim

    @cached_property
    def k_offset(self) -> int:
        return self.q_bytes

    @cached_property
    def v_offset(self) -> int:
        return self.k_offset + STAGES * self.k_bytes

    @cached_property
    def shared_bytes(self) -> int:
        return self.v_offset + STAGES * self.k_bytes
