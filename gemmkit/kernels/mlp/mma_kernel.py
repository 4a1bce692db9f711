"""``mlp_by_warps``: a multi-layer perceptron by mma.sync, whose activations stay in registers from layer to layer.

For GPUs from compute capability 8.0 on that have no wgmma, and for arrays that TMA cannot load. A block computes 64 rows of
x, four warps with 16 rows each.

| step | what |
|---|---|
| 1 | x, and the first rows of the first weights: global -> shared, by cp.async; x becomes A fragments |
| 2 | 32 rows of weights are multiplied while the next 32 are copied, those of the next layer behind the last of one |
| 3 | between layers the activation of the sums, which are A fragments of the next product |
| 4 | the last sums, with their activation, to global memory |

Activations and the store are those of `gemmkit.kernels.mlp.kernel`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.collectives.operand import FragmentReuse
from gemmkit.kernels.collectives.pipeline import Warpgroups
from gemmkit.kernels.mlp.spec import (
    F32,
    ConsumerRows,
    LayersSpec,
    MlpOutputs,
    MlpSizes,
    MlpStore,
    Weights,
    columns_of,
    fragments,
)
from gemmkit.kernels.sm90.store import line_of, own_column
from gemmkit.lang.aggregates import convert, fill
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric, View
from gemmkit.lang.memory import EXTENTS, member_of, number_of
from gemmkit.lang.registers import apply, each, fold, generate, join, split
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.layouts.plain import Swizzled
from gemmkit.operators import MMAOp
from gemmkit.ptx.copy_async import commit_copies, copy_async, offset_of, wait_copies
from gemmkit.ptx.memory import load_shared, pack_words, shared, store_shared, unpack_words
from gemmkit.ptx.mma import ldmatrix
from gemmkit.ptx.special import barrier, block_x, lane_index, rolled, thread_index, udiv

# --------------------------------------------------------------------------------------------------
# What `mlp_by_warps` is specialised by, and how it is mapped onto warps and memory.

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

    store: MlpStore
    run: int

    warpgroups = Warpgroups(0, 1)

    @cached_property
    def operator(self) -> MMAOp:
        """16 x 16 by 16 x 16, of every layer."""
        return MMAOp(N=16, dtype=self.dtype, accumulator=F32)

    @cached_property
    def reuses(self) -> tuple[FragmentReuse, ...]:
        return () if self.single else (FragmentReuse(self.operator, self.operator, self.hidden),)

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


STEPS = CHUNK // 16                    # of 16 rows of weights, in a stage


class MlpInputs(NamedTuple):
    """Weights and biases in global memory: views of a layer's, the tables that make the others', and the launch's sizes."""

    w: Any
    b: Any
    shapes: Any
    places: Any
    sizes: Any


class LayerStage(NamedTuple):
    """A layer, and the stage that its first chunk is in."""

    layer: Any
    stage: Any


class WeightStep(NamedTuple):
    """The ``n``-th 16 rows of a stage of weights, and the lane that loads from them."""

    stage: Any
    n: Any
    lane: Any


def mlp_by_warps(spec: Any, sizes: MlpSizes, places: View, shapes: Any, out: View, x: View, w: View, b: View) -> None:
    """Launched with a block for each 64 rows; see the module's table."""
    # 1. The first copies; x as A fragments.
    zero = thread_index() * 0
    row, inputs = block_x() * ROWS, MlpInputs(w, b, shapes, places, sizes)
    copy_x(spec, sizes, x, row, number_of(shapes, zero, EXTENTS))
    copy_chunk(spec.first, spec, inputs, zero, zero, zero)
    if spec.has_bias:
        store_biases(spec, next_biases(spec, inputs, zero), zero)
    wait_copies(0)
    barrier()
    a = generate(spec.x_steps, x_fragment, spec)

    # 2. to 4. Layer after layer.
    rows = ConsumerRows(row, zero, zero)
    sums = multiply(spec.first, spec, inputs, a, LayerStage(zero, zero))
    if spec.single:
        spec.store.run(spec, sizes, sums, MlpOutputs(out, zero), rows)
    else:
        stage, layer = zero + spec.first.count % 2, zero + 1
        while layer < sizes.layers - 1:
            sums = multiply(spec.middle, spec, inputs, fragments(spec, sums, shapes, layer - 1), LayerStage(layer, stage))
            stage, layer = stage ^ (spec.middle.count % 2), rolled(layer + 1)
        result = multiply(spec.final, spec, inputs, fragments(spec, sums, shapes, layer - 1), LayerStage(layer, stage))
        spec.store.run(spec, sizes, result, MlpOutputs(out, zero), rows)


# -- copies ---------------------------------------------------------------------------------------------------------------

def copy_x(spec: Any, sizes: Any, x: Any, row: int, columns: int) -> None:
    """A block's rows; zeros beyond the last one, and beyond the last column."""
    pieces, thread = spec.k // spec.run, rolled(thread_index())
    for n in range(ROWS * spec.k // (spec.run * spec.threads)):
        piece = n * spec.threads + thread
        line = udiv(piece, pieces)
        column = (piece - line * pieces) * spec.run
        copy_async(shared(spec.dtype, 0), spec.x.layout.position((line, column), ROWS), 0, x,
                   offset_of(x, (row + line, column)), spec.run, row + line < sizes.rows and column < columns)


def copy_chunk(weights: Any, spec: MmaMlpSpec, inputs: MlpInputs, layer: int, chunk: int, stage: int) -> None:
    """32 rows of a layer's weights into a stage, zeros beyond them: a group of copies."""
    view = member_of(inputs.w, inputs.shapes, inputs.places, layer, 0)
    rows, columns = number_of(inputs.shapes, layer, EXTENTS), columns_of(inputs.shapes, layer)
    pieces, thread = (CHUNK if spec.k_major else weights.n) // spec.run, rolled(thread_index())
    piece = thread
    while piece < CHUNK * weights.n // spec.run:
        line = udiv(piece, pieces)
        along = (piece - line * pieces) * spec.run
        k, column = (along, line) if spec.k_major else (line, along)
        row = chunk * CHUNK + k
        copy_async(shared(spec.dtype, spec.x_bytes + stage * spec.w_bytes),
                   weights.layout.position((k, column), weights.lines), 0, view, offset_of(view, (row, column)), spec.run,
                   row < rows and column < columns)
        piece = rolled(piece + spec.threads)
    commit_copies()


def copy_next(weights: Any, spec: Any, inputs: MlpInputs, layer: int, chunk: int, stage: int) -> None:
    """What is multiplied behind a chunk: the next one of its layer, or the first of the next layer."""
    if chunk < weights.count - 1:
        copy_chunk(weights, spec, inputs, layer, chunk + 1, stage)
    elif layer + 1 < inputs.sizes.layers - 1:
        copy_chunk(spec.middle, spec, inputs, layer + 1, 0, stage)
    elif layer + 1 < inputs.sizes.layers:
        copy_chunk(spec.final, spec, inputs, layer + 1, 0, stage)
    else:
        commit_copies()


# -- products -------------------------------------------------------------------------------------------------------------
# ldmatrix loads four 8 x 8 matrices, of which lane t addresses row t % 8 of the (t / 8)-th.

def x_fragment(n: int, spec: Any) -> tuple:
    """A warp's rows of x, 16 columns of them."""
    matrix, line = udiv(lane_index(), 8), lane_index() % 8
    row = udiv(thread_index(), 32) * 16 + matrix % 2 * 8 + line
    at = spec.x.layout.position((row, n * 16 + udiv(matrix, 2) * 8), ROWS)
    return pack_words(ldmatrix(shared(spec.dtype, 0), at, 0, 4, False))


def multiply(weights: Any, spec: MmaMlpSpec, inputs: MlpInputs, a: tuple, at: LayerStage) -> tuple:
    """The biases, and on top of them A times a layer's weights. The next layer's biases are loaded before,
    and stored behind the last barrier at which threads that read these have met."""
    sums = split(biases(weights, spec, at.layer), 8)
    following = next_biases(spec, inputs, at.layer + 1)
    found = join(fold(weights.count, one_chunk, sums, weights, spec, inputs, a, at))
    if spec.has_bias:
        store_biases(spec, following, at.layer + 1)
        barrier()
    return found


def one_chunk(sums: tuple, c: int, weights: Weights, spec: MmaMlpSpec, inputs: MlpInputs, a: tuple, at: LayerStage) -> tuple:
    """32 rows of weights; the next ones are copied meanwhile."""
    stage = at.stage ^ (c % 2)
    copy_next(weights, spec, inputs, at.layer, c, stage ^ 1)
    wait_copies(1)
    barrier()
    sums = fold(STEPS, one_step, sums, weights, spec, a, c, stage)
    barrier()                                          # the stage may be filled anew
    return sums


def one_step(sums: tuple, n: int, weights: Weights, spec: MmaMlpSpec, a: tuple, c: int, stage: int) -> tuple:
    """16 rows of weights against 16 columns at a time."""
    lane = rolled(lane_index())                        # or the places of all columns stay in registers
    return apply(columns, sums, weights, spec, unpack_words(spec.dtype, a[c * STEPS + n]), WeightStep(stage, n, lane))


def columns(sums: tuple, i: int, weights: Any, spec: MmaMlpSpec, a: tuple, step: WeightStep) -> tuple:
    matrix, line = udiv(step.lane, 8), step.lane % 8
    k, column = step.n * 16 + matrix % 2 * 8, i * 16 + udiv(matrix, 2) * 8
    k, column = (k, column + line) if spec.k_major else (k + line, column)
    pointer = shared(spec.dtype, spec.x_bytes + step.stage * spec.w_bytes)
    at = weights.layout.position((k, column), weights.lines)
    if spec.k_major:
        return spec.mma(a, ldmatrix(pointer, at, 0, 4, False), sums)
    return spec.mma(a, ldmatrix(pointer, at, 0, 4, True), sums)


# -- between layers -------------------------------------------------------------------------------------------------------

def next_biases(spec: MmaMlpSpec, inputs: MlpInputs, layer: int) -> tuple:
    """A thread's columns of a layer's biases: zeros beyond the last column, and the last layer."""
    if spec.has_bias:
        last = min(layer, inputs.sizes.layers - 1)
        columns = columns_of(inputs.shapes, last)
        view = member_of(inputs.b, inputs.shapes, inputs.places, last, 1)
        return generate(spec.bias_columns, bias_of, spec, view, columns)
    return ()


def bias_of(n: int, spec: MmaMlpSpec, view: View, columns: int) -> Any:
    column = thread_index() + n * spec.threads
    return convert(F32, view[0, column]) if column < columns else convert(F32, 0.0)


def store_biases(spec: MmaMlpSpec, values: tuple, layer: int) -> None:
    """Biases of even layers lie in front of those of odd ones."""
    each(store_bias, values, spec, layer % 2 * (spec.bias_columns * spec.threads) + thread_index())


def store_bias(value: Numeric, n: int, spec: MmaMlpSpec, at: int) -> None:
    store_shared(shared(F32, spec.bias_offset), at, n * spec.threads, (value,))


def biases(weights: Weights, spec: MmaMlpSpec, layer: int) -> tuple:
    """What a thread's sums begin with."""
    if spec.has_bias:
        at = layer % 2 * (spec.bias_columns * spec.threads) + own_column()
        return join(generate(weights.n // 8, bias_pair, spec, at))
    return fill(F32, weights.values, 0.0)


def bias_pair(n: int, spec: MmaMlpSpec, at: int) -> tuple:
    """Of two columns, in both of a thread's rows."""
    pair = load_shared(shared(F32, spec.bias_offset), at, n * 8, 2)
    return pair[0], pair[1], pair[0], pair[1]
