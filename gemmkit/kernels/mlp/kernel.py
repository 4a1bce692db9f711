"""``mlp``: a multi-layer perceptron for Hopper, whose activations stay in registers from layer to layer.

Blocks stay on their multiprocessors and compute one tile of rows after the other: 64 rows for each consumer, all layers.

| role | threads | waits for | signals |
|---|---|---|---|
| producer | one of the first warpgroup | ``empty`` of x and weights | ``full``, by TMA |
| consumer | 2 warpgroups | ``full`` | ``empty`` |

| step | what | where |
|---|---|---|
| 0 | barriers, registers, the maps of all layers | here |
| 1 | x once a tile, weights and biases layer by layer: global -> shared | `producer` |
| 2 | the first layer: x W, both in shared memory, on top of the biases | `consumer` |
| 3 | a layer: the activation of the sums, their pairs as words of A, the product with the next weights | `consumer` |
| 4 | the last layer's sums, with its activation, to global memory | `store` |

An accumulator's pairs are the words of an A fragment, so that nothing is exchanged between threads. Consumers take turns:
the activations of one lie under the products of the other. The blocks of a cluster share the weights by multicast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemmkit.kernels.collectives.scheduler import Slot
from gemmkit.kernels.mlp.spec import (
    CHUNK,
    F32,
    ROWS,
    ConsumerRows,
    LayerTables,
    MlpOutputs,
    MlpSizes,
    MlpSpec,
    Weights,
    fragments,
)
from gemmkit.kernels.sm90.store import own_column
from gemmkit.lang.aggregates import convert, fill
from gemmkit.lang.host import Numeric, View
from gemmkit.lang.registers import fold, generate, join
from gemmkit.ptx.barriers import cluster_barrier, cluster_rank, mbarrier_fence_init
from gemmkit.ptx.memory import load_shared, shared
from gemmkit.ptx.special import barrier, block_x, grid_x, lane_index, rolled, thread_index, udiv, uniform
from gemmkit.ptx.tma import acquire_map, map_at, tma_load, tma_load_multicast, tma_prefetch
from gemmkit.ptx.wgmma import (
    advance,
    grid_launch_dependents,
    grid_wait,
    matrix_descriptor,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)

if TYPE_CHECKING:
    from gemmkit.emulator.copies import EmulatedTensorMap

# --------------------------------------------------------------------------------------------------
# Which tiles a block computes: producer and consumers ask alike. All blocks of a cluster take as many.

def first_row(spec: MlpSpec, turn: int) -> int:
    """Of the block's ``turn``-th tile."""
    return (turn * grid_x() + block_x()) * spec.block_m


def has_tile(spec: MlpSpec, sizes: MlpSizes, turn: int, rank: int) -> bool:
    """Whether the first block of the cluster has a tile: its peers compute rows beyond the last one beside it, of zeros."""
    return first_row(spec, turn) - rank * spec.block_m < sizes.rows


# --------------------------------------------------------------------------------------------------
# Step 1 of `mlp`: one thread has TMA fill the stages of x and of the weights, layer after layer, tile after tile.

def produce(spec: MlpSpec, sizes: MlpSizes, maps: View, map_x: EmulatedTensorMap, rank: int) -> None:
    zero = thread_index() * 0
    slot, x_slot, turn = Slot(zero, zero + 1), Slot(zero, zero + 1), zero      # fresh rings are empty
    while has_tile(spec, sizes, turn, rank):
        if turn == 0:
            load_x(spec, map_x, x_slot, first_row(spec, turn))
        if not spec.resident or turn == 0:
            slot = load_layer(spec.first, spec, sizes, maps, slot, zero, rank)
        if turn > 0:
            # Not before: with a single stage of x it waits for the end of the last tile, and the first layer has room.
            load_x(spec, map_x, x_slot, first_row(spec, turn))
        x_slot = spec.x_ring.advance(x_slot)
        if not spec.resident or turn == 0:
            if not spec.single:
                layer = zero + 1
                while layer < sizes.layers - 1:
                    slot = load_layer(spec.middle, spec, sizes, maps, slot, layer, rank)
                    layer = rolled(layer + 1)
                slot = load_layer(spec.final, spec, sizes, maps, slot, layer, rank)
        turn = rolled(turn + 1)


def load_x(spec: MlpSpec, map_x: EmulatedTensorMap, slot: Slot, row: int) -> None:
    """The tile's rows, consumer by consumer, panel by panel."""
    spec.x_ring.acquire(slot)
    spec.x_ring.expect(slot, spec.x_loaded)
    for group in range(spec.consumers):
        for panel in range(spec.x.count):
            tma_load(map_x, (panel * spec.x.line, row + group * ROWS), shared(spec.dtype, 0),
                     slot.stage * (spec.x_bytes // 2) + group * (spec.group_bytes // 2) + panel * (ROWS * spec.x.line),
                     spec.x_ring.full(), slot.stage)


def load_layer(weights: Weights, spec: MlpSpec, sizes: MlpSizes, maps: View, slot: Slot, layer: int, rank: int) -> Slot:
    """A layer's weights, chunk by chunk, its biases with the first; returns the slot behind it."""
    chunk = layer * 0
    while chunk < weights.chunks:
        spec.ring.acquire(slot)
        if chunk == 0:
            spec.ring.expect(slot, weights.nbytes + spec.bias_bytes)
            if spec.has_bias:
                tma_load(map_at(maps, sizes.layers + layer), (0, 0), shared(spec.bias_dtype, spec.bias_offset),
                         slot.stage * spec.bias_pitch, spec.ring.full(), slot.stage)
        else:
            spec.ring.expect(slot, weights.nbytes)
        load_chunk(weights, spec, map_at(maps, layer), slot, chunk * CHUNK, rank)
        slot = spec.ring.advance(slot)
        chunk = rolled(chunk + 1)
    return slot


def load_chunk(weights: Weights, spec: MlpSpec, tensor_map: EmulatedTensorMap, slot: Slot, k: int, rank: int) -> None:
    """``CHUNK`` rows of weights from row ``k`` on: this block's lines of each panel, to all blocks of the cluster."""
    part = weights.lines // spec.cluster.size
    pointer, line = shared(spec.dtype, spec.w_offset), rank * part
    for panel in range(weights.panels):
        to = slot.stage * (spec.stage_bytes // 2) + (panel * weights.lines + line) * weights.line
        x, y = (k, line) if weights.k_major else (panel * weights.line, k + line)
        if spec.cluster.is_single:
            tma_load(tensor_map, (x, y), pointer, to, spec.ring.full(), slot.stage)
        else:
            tma_load_multicast(tensor_map, (x, y), pointer, to, spec.ring.full(), slot.stage, spec.cluster.mask)


# --------------------------------------------------------------------------------------------------
# Steps 2 to 4 of `mlp`, as a consumer takes them: the layers of a tile, one after the other.

STEPS = 4                              # of 16 rows of weights, in a chunk


def consume(spec: Any, sizes: MlpSizes, tables: LayerTables, outputs: MlpOutputs, rank: int, group: int) -> None:
    zero = thread_index() * 0
    slot, x_slot, turn = Slot(zero, zero), Slot(zero, zero), zero
    spec.turns.give_first(group)
    while has_tile(spec, sizes, turn, rank):
        if spec.resident:
            slot = Slot(zero, zero)                    # the weights have stayed where they were
        # 2. The first layer.
        spec.x_ring.wait(x_slot)
        sums = multiply(spec.first, spec, x_descriptor(spec, group, x_slot.stage), slot, group)
        slot = spec.ring.skip(slot, spec.first.chunks)
        if not spec.store.uses_tma:
            spec.x_ring.release(x_slot.stage)
        rows = ConsumerRows(first_row(spec, turn) + group * 64, x_slot.stage, group)
        if spec.single:
            spec.store.run(spec, sizes, sums, outputs, rows)
        else:
            # 3. The others.
            layer = zero + 1
            while layer < sizes.layers - 1:
                sums = multiply(spec.middle, spec, fragments(spec, sums, tables.shapes, layer - 1), slot, group)
                slot = spec.ring.skip(slot, spec.middle.chunks)
                layer = rolled(layer + 1)
            result = multiply(spec.final, spec, fragments(spec, sums, tables.shapes, layer - 1), slot, group)
            slot = spec.ring.skip(slot, spec.final.chunks)
            # 4. The tile's end.
            spec.store.run(spec, sizes, result, outputs, rows)
        if spec.store.uses_tma:
            spec.x_ring.release(x_slot.stage)
        x_slot = spec.x_ring.advance(x_slot)
        turn = rolled(turn + 1)
    spec.store.finish()


# -- a layer --------------------------------------------------------------------------------------------------------------

def multiply(weights: Weights, spec: MlpSpec, a: Any, slot: Slot, group: int) -> tuple:
    """The biases, and on top of them A times the weights, whose first chunk is in ``slot``; their stages are released."""
    spec.ring.wait(slot)
    sums = biases(weights, spec, slot.stage)
    spec.turns.wait(group)
    sums = fold(weights.steps, step, sums, weights, spec, a, weights_descriptor(weights, spec), slot)
    spec.turns.give((group + 1) % spec.consumers)
    (sums,) = wgmma_wait(0, (sums,))
    spec.ring.release(spec.ring.skip(slot, weights.chunks - 1).stage)
    return sums


def step(sums: tuple, n: int, weights: Weights, spec: MlpSpec, a: Numeric, w: int, slot: Slot) -> tuple:
    """16 rows of the weights. The products of a chunk are a group; its stage is released when the next chunk's is on its
    way."""
    at = spec.ring.skip(slot, n // STEPS)
    if n % STEPS == 0:
        if n > 0:
            spec.ring.wait(at)
        wgmma_fence()
    sums = weights.product(sums, part_of(weights, spec, a, n),
                           advance(w, at.stage * spec.stage_bytes + n % STEPS * weights.step_bytes), 1)
    if n % STEPS == STEPS - 1 or n == weights.steps - 1:
        wgmma_commit()
        if n >= STEPS:
            (sums,) = wgmma_wait(1, (sums,))
            spec.ring.release(spec.ring.skip(slot, n // STEPS - 1).stage)
    return sums


def part_of(weights: Weights, spec: MlpSpec, a: Any, n: int) -> Any:
    """A's ``n``-th 16 columns: a fragment, or 32 bytes on in a line of x, or in the next panel."""
    if weights.from_registers:
        return a[n]
    steps = spec.x.line // 16
    return advance(a, n // steps * (64 * spec.x.line_bytes) + n % steps * 32)


def x_descriptor(spec: MlpSpec, group: int, stage: int) -> int:
    """A consumer's rows of x."""
    width = spec.x.line_bytes
    return advance(matrix_descriptor(shared(spec.dtype, 0), 0, 0, 8 * width, width),
                   stage * spec.x_bytes + group * spec.group_bytes)


def weights_descriptor(weights: Weights, spec: MlpSpec) -> int:
    """Of the first stage."""
    width = weights.line_bytes
    return matrix_descriptor(shared(spec.dtype, spec.w_offset), 0, weights.leading_bytes, 8 * width, width)


# -- between layers -------------------------------------------------------------------------------------------------------

def biases(weights: Weights, spec: MlpSpec, stage: int) -> tuple:
    """What a thread's sums begin with."""
    if spec.has_bias:
        return join(generate(weights.n // 8, bias_of, spec, stage * spec.bias_pitch + own_column()))
    return fill(F32, weights.values, 0.0)


def bias_of(n: int, spec: MlpSpec, at: int) -> tuple:
    """Of two columns, in both of a thread's rows."""
    pair = load_shared(shared(spec.bias_dtype, spec.bias_offset), at, n * 8, 2)
    first, second = convert(F32, pair[0]), convert(F32, pair[1])
    return first, second, first, second


def mlp(spec: MlpSpec, sizes: MlpSizes, maps: View, shapes: View, out: View, map_x: EmulatedTensorMap,
        map_out: EmulatedTensorMap) -> None:
    """Launched with ``spec.threads`` threads, in clusters of ``spec.cluster.size``; see the module's tables."""
    # 0. Barriers, before any thread waits on one; then what was written before may be read: maps that a copy has written.
    group = uniform(udiv(thread_index(), 128))
    rank = thread_index() * 0 if spec.cluster.is_single else cluster_rank()
    if thread_index() == 0:
        spec.ring.initialise()
        spec.x_ring.initialise()
        mbarrier_fence_init()
        tma_prefetch(map_x)
        if spec.store.uses_tma:
            tma_prefetch(map_out)
    grid_launch_dependents()
    grid_wait()
    count = sizes.layers * (2 if spec.has_bias else 1)
    row = lane_index() * (spec.threads // 32) + udiv(thread_index(), 32)       # a warp's lanes go one after the other
    while row < count:
        acquire_map(maps, row)
        tma_prefetch(map_at(maps, row))
        row = rolled(row + spec.threads)
    if spec.cluster.is_single:
        barrier()
    else:
        cluster_barrier()

    if group == 0:
        # 1. x, weights and biases: global -> shared.
        spec.warpgroups.release_registers()
        if thread_index() == 0:
            produce(spec, sizes, maps, map_x, rank)
    else:
        # 2. to 4. Multiply, activate, store.
        spec.warpgroups.claim_registers()
        consume(spec, sizes, LayerTables(maps, shapes), MlpOutputs(out, map_out), rank, group - 1)

    # A block's shared memory must last until its peers have written and signalled all they will.
    if not spec.cluster.is_single:
        cluster_barrier()
