"""What the kernels of an MLP are specialised by: the caller's functions, widths, the mapping onto warpgroups and memory."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.common.hand_over import HandOver
from gemmkit.kernels.common.pipeline import CLUSTER_WARPS, WARPS, Pipeline
from gemmkit.kernels.mlp.store import OutStore
from gemmkit.kernels.mlp.work import F32
from gemmkit.kernels.sm90.panels import Panels, line_of
from gemmkit.kernels.sm90.warpgroups import Turns, Warpgroups
from gemmkit.lang.component_class import dataclass
from gemmkit.layouts.swizzled import pattern_of
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.tensor_maps import TensorMapSpec

ROWS = 64                              # of x, which a consumer has
CHUNK = 64                             # rows of weights that a stage has
REGISTERS = 40, 232                    # of a producer's and a consumer's thread: with 24 the producer spilled


@dataclass(frozen=True)
class LayersSpec(Component):
    """What every kernel of an MLP is specialised by. Widths are padded to multiples of 32: ``k`` is x's, ``hidden`` that
    of the widest layer but the last, ``n`` the result's. With ``single`` there is one layer. ``k_major``: weights are
    contiguous along K. ``has_padding``: some layer but the last is narrower than ``hidden``, and the activation of 0
    may not be 0."""

    activation: Any
    last: Any
    dtype: np.dtype
    bias_dtype: np.dtype
    has_bias: bool
    k_major: bool
    k: int
    hidden: int
    n: int
    single: bool
    has_padding: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hand_overs                                # noqa: B018  (raises where a layer's sums are no A fragments)

    @cached_property
    def hand_overs(self) -> tuple[HandOver, ...]:
        """The sums of a layer as A of the next one, of each pair of layers that follow each other."""
        raise NotImplementedError

    @cached_property
    def hand_over(self) -> HandOver:
        """The one that is written as text; the others have the same fragments."""
        return self.hand_overs[0]

    @cached_property
    def warpgroups(self) -> Warpgroups:
        raise NotImplementedError

    @cached_property
    def threads(self) -> int:
        return self.warpgroups.threads

    @cached_property
    def widest(self) -> int:
        return max(self.hidden, self.n)

    @cached_property
    def x(self) -> Panels:
        """How rows of x lie in shared memory."""
        return Panels(self.dtype, self.k)


@dataclass(frozen=True)
class Weights(Component):
    """How the ``k`` x ``n`` weights of a layer lie in the stages, ``CHUNK`` rows in each, and what multiplies them."""

    dtype: np.dtype
    k: int
    n: int
    k_major: bool
    from_registers: bool               # whether A is what the layer before has left there

    @cached_property
    def operator(self) -> WGMMAOp:
        return WGMMAOp(self.n, self.dtype, F32, b_major="K" if self.k_major else "MN")

    @cached_property
    def product(self) -> Any:
        return self.operator.register_instruction if self.from_registers else self.operator.instruction

    @cached_property
    def steps(self) -> int:
        return self.k // 16

    @cached_property
    def chunks(self) -> int:
        return -(-self.k // CHUNK)

    @cached_property
    def values(self) -> int:
        """A thread's sums."""
        return self.n // 2

    @cached_property
    def line(self) -> int:
        return CHUNK if self.k_major else line_of(self.n)

    @cached_property
    def line_bytes(self) -> int:
        return 2 * self.line

    @cached_property
    def lines(self) -> int:
        """Of a panel."""
        return self.n if self.k_major else CHUNK

    @cached_property
    def panels(self) -> int:
        return 1 if self.k_major else self.n // self.line

    @cached_property
    def nbytes(self) -> int:
        """Of a chunk."""
        return 2 * CHUNK * self.n

    @cached_property
    def leading_bytes(self) -> int:
        """From one panel to the next."""
        return 0 if self.k_major else CHUNK * self.line_bytes

    @cached_property
    def step_bytes(self) -> int:
        """From 16 rows of the weights to the next: 32 bytes of a line, or as many lines."""
        return 32 if self.k_major else 16 * self.line_bytes

    def map_spec(self, parts: int) -> TensorMapSpec:
        """Of boxes of one of ``parts`` parts of a panel."""
        return TensorMapSpec(self.dtype, (self.line, self.lines // parts), self.line_bytes)


@dataclass(frozen=True)
class MlpSpec(LayersSpec):
    """``consumers`` warpgroups of 64 rows each beside a producer; ``stages`` chunks of weights, and ``x_stages`` tiles of x.
    The blocks of a ``cluster`` load a part of each chunk for all. With ``takes_turns`` consumers start their products one
    after the other. ``resident``: all weights have a stage of their own, and are loaded once."""

    store: OutStore
    cluster: Cluster
    consumers: int
    stages: int
    x_stages: int
    takes_turns: bool
    resident: bool

    # -- layers -------------------------------------------------------------------------------------------------------

    @cached_property
    def first(self) -> Weights:
        """The first layer's, whose A lies in shared memory."""
        return Weights(self.dtype, self.k, self.n if self.single else self.hidden, self.k_major, False)

    @cached_property
    def middle(self) -> Weights:
        return Weights(self.dtype, self.hidden, self.hidden, self.k_major, True)

    @cached_property
    def final(self) -> Weights:
        return Weights(self.dtype, self.hidden, self.n, self.k_major, True)

    @cached_property
    def hand_overs(self) -> tuple[HandOver, ...]:
        if self.single:
            return ()
        return tuple(HandOver(layer.operator, following.operator, self.hidden)
                     for following in (self.middle, self.final) for layer in (self.first, self.middle))

    def weights_of(self, layer: int, layers: int) -> Weights:
        """On the host: those of a layer."""
        return self.first if layer == 0 else self.final if layer == layers - 1 else self.middle

    # -- warpgroups ---------------------------------------------------------------------------------------------------

    @cached_property
    def block_m(self) -> int:
        return ROWS * self.consumers

    @cached_property
    def warpgroups(self) -> Warpgroups:
        return Warpgroups(1, self.consumers, *REGISTERS)

    @cached_property
    def turns(self) -> Turns:
        """The named barriers of the store come before."""
        return Turns(self.consumers, 1 + self.consumers, self.takes_turns)

    # -- shared memory: x and the result, weights, biases, barriers ---------------------------------------------------

    @cached_property
    def out(self) -> Panels:
        """A consumer's rows of the result, which leave from the place of its rows of x."""
        return Panels(self.dtype, self.n)

    @cached_property
    def group_bytes(self) -> int:
        """Of a consumer's rows of x, or of the result."""
        return 2 * ROWS * max(self.k, self.n)

    @cached_property
    def x_bytes(self) -> int:
        return self.consumers * self.group_bytes

    @cached_property
    def x_loaded(self) -> int:
        """What TMA brings of x."""
        return 2 * self.block_m * self.k

    @cached_property
    def stage_bytes(self) -> int:
        return pattern_of(2 * CHUNK * self.widest)

    @cached_property
    def w_offset(self) -> int:
        return self.x_stages * self.x_bytes

    @cached_property
    def bias_pitch(self) -> int:
        """Elements from one stage's biases to the next one's: TMA writes to multiples of 128 bytes."""
        size = int(self.bias_dtype.itemsize)
        return -(-self.widest * size // 128) * 128 // size

    @cached_property
    def bias_bytes(self) -> int:
        """What TMA brings with a layer's first chunk."""
        return self.widest * int(self.bias_dtype.itemsize) if self.has_bias else 0

    @cached_property
    def bias_offset(self) -> int:
        return self.w_offset + self.stages * self.stage_bytes

    @cached_property
    def barrier_offset(self) -> int:
        return self.bias_offset + (self.stages * self.bias_pitch * int(self.bias_dtype.itemsize) if self.has_bias else 0)

    @cached_property
    def ring(self) -> Pipeline:
        """Of weights. Biases are read by threads: each warp releases a stage."""
        return Pipeline(self.stages, self.barrier_offset, 1, 4 * self.consumers * self.cluster.size,
                        readers=WARPS if self.cluster.is_single else CLUSTER_WARPS, cluster=self.cluster)

    @cached_property
    def x_ring(self) -> Pipeline:
        return Pipeline(self.x_stages, self.ring.end, 1, self.consumers)

    @cached_property
    def shared_bytes(self) -> int:
        return self.x_ring.end

    # -- tensor maps --------------------------------------------------------------------------------------------------

    @cached_property
    def bias_map(self) -> TensorMapSpec:
        return TensorMapSpec(self.bias_dtype, (self.widest, 1))
