"""What the kernels of an MLP are specialised by: the caller's functions, widths, the mapping onto warpgroups and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import Component, Scalar
from gemmkit.epilogues.activations import relu
from gemmkit.kernels.collectives.operand import FragmentReuse
from gemmkit.kernels.collectives.pipeline import CLUSTER_WARPS, WARPS, OrderBarrier, Pipeline, Warpgroups
from gemmkit.kernels.collectives.scheduler import Cluster
from gemmkit.kernels.sm90.store import Panels, line_of, own_column, own_row
from gemmkit.lang.aggregates import convert, convert_all
from gemmkit.lang.checks import converted, function_given
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric, View
from gemmkit.lang.memory import EXTENTS, number_of
from gemmkit.lang.registers import apply, each, split
from gemmkit.layouts.plain import pattern_of
from gemmkit.operators import WGMMAOp
from gemmkit.ptx.memory import shared, store_global
from gemmkit.ptx.mma import pack_fragment, pack_relu, stmatrix
from gemmkit.ptx.special import lane_index, thread_index, udiv
from gemmkit.ptx.tma import tma_commit, tma_store, tma_wait, tma_wait_read
from gemmkit.ptx.wgmma import fence_async, named_barrier
from gemmkit.runtime.tensor_maps import TensorMapSpec

# --------------------------------------------------------------------------------------------------
# The sizes of a launch, and run-time values that travel together through the kernel.

F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class MlpSizes(Component):
    """The run-time part: rows of x, columns of the result, and layers."""

    rows: Scalar
    columns: Scalar
    layers: Scalar


class LayerTables(NamedTuple):
    """What the host has written of each layer: the maps of its weights (and, behind those of all layers, of its biases), and
    its extents (`gemmkit.lang.memory`)."""

    maps: Any
    shapes: Any


class ConsumerRows(NamedTuple):
    """A consumer's 64 rows: the first of them, the stage that x came in, and which consumer it is."""

    first: Any
    stage: Any
    group: Any


class MlpOutputs(NamedTuple):
    """The result in global memory: a view, or a tensor map."""

    out: Any
    map: Any


# --------------------------------------------------------------------------------------------------
# What becomes of a layer's sums: the caller's function, and the words that the next product reads.

@dataclass(frozen=True)
class Activation(Component):
    """A plain function of one number; arrays and NumPy scalars that it captured are arguments of the kernel."""

    f: Any

    is_identity = False
    is_relu = False

    def __post_init__(self) -> None:
        given = function_given(self.f, "mlp", "activation", (1,), "f(x), a function of one number,")
        object.__setattr__(self, "f", given)

    def __call__(self, x: Numeric) -> Any:
        return self.f(x)


@dataclass(frozen=True)
class Relu(Component):
    """max(x, 0), which the instruction that packs words takes with it."""

    is_identity = False
    is_relu = True

    def __call__(self, x: Numeric) -> Any:
        return relu(x)


@dataclass(frozen=True)
class NoActivation(Component):
    """Sums as they are."""

    is_identity = True
    is_relu = False

    def __call__(self, x: Numeric) -> Any:
        return x


def columns_of(shapes: View, layer: int) -> int:
    """The columns of a layer's weights: its width, without what pads it."""
    return number_of(shapes, layer, EXTENTS + 1)


def words_of(sums: tuple, n: int, spec: MlpSpec, columns: int) -> tuple:
    """The activations of a fragment of the next layer's A, the ``n``-th, of a thread's sums."""
    if spec.activation.is_relu:
        return pack_relu(spec.dtype, sums)             # of sums that pad a layer, 0, it is 0
    return pack_fragment(spec.dtype, apply(activated, sums, spec, n * spec.reuse.k, columns))


def activated(x: Numeric, i: int, spec: MlpSpec, first: int, columns: int) -> Any:
    """The activation of the ``i``-th of a thread's sums from column ``first`` on. Columns that pad a layer become 0: of some
    functions 0 becomes no finite number, which the zeros of the next layer's weights would not take away."""
    value = converted(spec.activation, "__call__", spec.activation(x), F32)
    if spec.has_padding:
        return value if first + own_column() + i // 4 * 8 + i % 2 < columns else convert(F32, 0.0)
    return value


def fragments(spec: MlpSpec, sums: tuple, shapes: View, layer: int) -> tuple:
    """The activations of a layer as A of the next one, a fragment at a time (`gemmkit.kernels.collectives.operand`)."""
    columns = columns_of(shapes, layer) if spec.has_padding else layer
    return apply(words_of, split(sums, spec.reuse.values), spec, columns)


def finished(sums: tuple, spec: MlpSpec) -> tuple:
    """The sums of the last layer, with its own activation."""
    if spec.last.is_identity:
        return sums
    return apply(finished_one, sums, spec)


def finished_one(x: Numeric, i: int, spec: MlpSpec) -> Any:
    return converted(spec.last, "__call__", spec.last(x), F32)


# --------------------------------------------------------------------------------------------------
# Step 4 of `mlp`: the last layer's sums, with its activation, to global memory.
#
# | store | how | where |
# |---|---|---|
# | `MlpTmaStore` | through shared memory, by TMA, which clips rows and columns beyond the last ones | what TMA can carry |
# | `MlpDirectStore` | pairs, from the registers | any strides, any number of columns |

@dataclass(frozen=True)
class MlpStore(Component):
    """How a consumer's rows leave."""

    uses_tma = False

    def run(self, spec: MlpSpec, sizes: MlpSizes, sums: tuple, outputs: MlpOutputs, rows: ConsumerRows) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Before the block ends."""


@dataclass(frozen=True)
class MlpTmaStore(MlpStore):
    """Through the consumer's rows of the stage that x came in: its first product has read them. The stage is not released
    before TMA has read the result."""

    uses_tma = True

    def run(self, spec: MlpSpec, sizes: MlpSizes, sums: tuple, outputs: MlpOutputs, rows: ConsumerRows) -> None:
        row, group = rows.first, rows.group
        values = convert_all(spec.dtype, finished(sums, spec))
        place = rows.stage * (spec.x_bytes // 2) + group * (spec.group_bytes // 2)
        named_barrier(1 + group, 128)                  # all four warps have read x
        each(put_matrix, split(values, 8), spec, place)
        fence_async()
        named_barrier(1 + group, 128)
        if thread_index() % 128 == 0:
            if row < sizes.rows:
                for panel in range(spec.out.count):
                    tma_store(outputs.map, (panel * spec.out.line, row), shared(spec.dtype, 0),
                              place + panel * 64 * spec.out.line)
            tma_commit()
            tma_wait_read(0)

    def finish(self) -> None:
        """Stores must be done before the kernel ends."""
        if thread_index() % 128 == 0:
            tma_wait(0)


def put_matrix(values: tuple, n: int, spec: Any, place: int) -> None:
    """16 rows by 16 columns of a warp: four 8 x 8 matrices, of which a lane addresses a line."""
    lane = lane_index()
    row = udiv(thread_index() % 128, 32) * 16 + lane % 16
    at = spec.out.layout.position((row, n * 16 + udiv(lane, 16) * 8), 64)
    stmatrix(shared(spec.dtype, 0), place, at, values, False)


@dataclass(frozen=True)
class MlpDirectStore(MlpStore):
    """Elements that are in range, from the registers: as ``pairs`` where there are as many in a row."""

    pairs: bool

    def run(self, spec: MlpSpec, sizes: MlpSizes, sums: tuple, outputs: MlpOutputs, rows: ConsumerRows) -> None:
        values = convert_all(spec.dtype, finished(sums, spec))
        each(put_pair, split(values, 2), self, sizes, outputs.out, rows.first + own_row(), own_column())


def put_pair(pair: tuple, n: int, store: Any, sizes: MlpSizes, out: View, row: int, column: int) -> None:
    row, column = row + n % 2 * 8, column + n // 2 * 8
    if row < sizes.rows and column < sizes.columns:
        if store.pairs:
            store_global(out, 1, (row, column), (0, 0), pair)
        else:
            out[row, column] = pair[0]
            if column + 1 < sizes.columns:
                out[row, column + 1] = pair[1]


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
        self.reuses                                # noqa: B018  (raises where a layer's sums are no A fragments)

    @cached_property
    def reuses(self) -> tuple[FragmentReuse, ...]:
        """The sums of a layer as A of the next one, of each pair of layers that follow each other."""
        raise NotImplementedError

    @cached_property
    def reuse(self) -> FragmentReuse:
        """The one that is written as text; the others have the same fragments."""
        return self.reuses[0]

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

    store: MlpStore
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
    def reuses(self) -> tuple[FragmentReuse, ...]:
        if self.single:
            return ()
        return tuple(FragmentReuse(layer.operator, following.operator, self.hidden)
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
    def turns(self) -> OrderBarrier:
        """The named barriers of the store come before."""
        return OrderBarrier(self.consumers, 1 + self.consumers, self.takes_turns)

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


# --------------------------------------------------------------------------------------------------
# How an MLP of given widths is mapped onto consumers, stages and clusters on Hopper.
#
# | widest layer | x stages | stages of weights | a block's rows |
# |---|---|---|---|
# | 32 to 128 | 2 | 16 to 10 | 128 |
# | 160 to 256 | 1, of the smaller 2 | what fits: 4 to 7 | 128 |
#
# Two consumers of 64 rows take turns: a layer of width 128 is 512 cycles of the tensor cores for each, and its activations
# take less. The weights of a layer are read by every block (16384 rows, width 128, 20 layers: 84 MB from the L2, 4.7 TB/s in
# 18 us), so that two blocks of a cluster load a half each for both.

CONSUMERS, CLUSTER, TURNS = 2, 2, True
MOST_STAGES = 16
ENOUGH = 6                             # stages of weights, beside which a second tile of x has room


class MlpMapping(NamedTuple):
    """The fields of `MlpSpec` that are chosen: tiles of x, and chunks of weights."""

    x_stages: int
    stages: int


def mappings(fields: dict[str, Any], store: MlpStore, rows: int, layers: int, room: int) -> Iterator[MlpMapping]:
    """Those with as many stages of weights as fit in ``room`` bytes: beside two tiles of x if these are enough, and beside
    one."""
    for x_stages in (2, 1):
        one, two = (spec_of(MlpMapping(x_stages, stages), fields, store, rows, layers).shared_bytes for stages in (1, 2))
        stages = min(MOST_STAGES, 1 + (room - one) // (two - one))
        if x_stages == 1 or stages >= ENOUGH:
            yield MlpMapping(x_stages, stages)


def spec_of(mapping: MlpMapping, fields: dict[str, Any], store: MlpStore, rows: int, layers: int) -> MlpSpec:
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
