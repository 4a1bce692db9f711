"""What `mlp_by_warps` is specialised by, and how it is mapped onto warps and memory."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.common.hand_over import HandOver
from gemmkit.kernels.mlp.spec import LayersSpec
from gemmkit.kernels.mlp.store import OutStore
from gemmkit.kernels.mlp.work import F32
from gemmkit.kernels.sm90.panels import line_of
from gemmkit.kernels.sm90.warpgroups import Warpgroups
from gemmkit.lang.component_class import dataclass
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.layouts.swizzled import Swizzled
from gemmkit.operators import MMAOp

ROWS = 64                              # of x: four warps of 16
STAGES = 2                             # of weights
CHUNK = 32                             # rows of weights in a stage: 32 KiB for both stages at most


@dataclass(frozen=True)
class Chunks(Component):
    """How the ``k`` x ``n`` weights of a layer lie in the stages, ``CHUNK`` rows in each: in lines of N, or of K."""

    dtype: np.dtype
    k: int
    n: int
    k_major: bool

    @cached_property
    def count(self) -> int:
        return self.k // CHUNK

    @cached_property
    def values(self) -> int:
        """A thread's sums."""
        return self.n // 2

    @cached_property
    def layout(self) -> Swizzled:
        if self.k_major:
            return Swizzled(ColMajor(self.dtype), 2 * CHUNK)
        return Swizzled(RowMajor(self.dtype), 2 * line_of(self.n))

    @cached_property
    def lines(self) -> int:
        return self.n if self.k_major else CHUNK


@dataclass(frozen=True)
class MmaMlpSpec(LayersSpec):
    """Four warps of 16 rows each; ``run`` elements are copied at a time."""

    store: OutStore
    run: int

    warpgroups = Warpgroups(0, 1)

    @cached_property
    def operator(self) -> MMAOp:
        """16 x 16 by 16 x 16, of every layer."""
        return MMAOp(N=16, dtype=self.dtype, accumulator=F32)

    @cached_property
    def hand_overs(self) -> tuple[HandOver, ...]:
        return () if self.single else (HandOver(self.operator, self.operator, self.hidden),)

    @cached_property
    def mma(self) -> Any:
        return self.operator.instruction

    @cached_property
    def first(self) -> Chunks:
        return Chunks(self.dtype, self.k, self.n if self.single else self.hidden, self.k_major)

    @cached_property
    def middle(self) -> Chunks:
        return Chunks(self.dtype, self.hidden, self.hidden, self.k_major)

    @cached_property
    def final(self) -> Chunks:
        return Chunks(self.dtype, self.hidden, self.n, self.k_major)

    @cached_property
    def x_steps(self) -> int:
        return self.k // 16

    @cached_property
    def x_bytes(self) -> int:
        return 2 * ROWS * self.k

    @cached_property
    def w_bytes(self) -> int:
        """Of a stage of weights."""
        return 2 * CHUNK * self.widest

    @cached_property
    def bias_columns(self) -> int:
        """How many columns of biases a thread loads."""
        return -(-self.widest // self.threads) if self.has_bias else 0

    @cached_property
    def bias_offset(self) -> int:
        return self.x_bytes + STAGES * self.w_bytes

    @cached_property
    def shared_bytes(self) -> int:
        """With two layers' biases in float32."""
        return self.bias_offset + 2 * 4 * self.bias_columns * self.threads
