"""Steps 2 to 4 of `mlp`, as a consumer takes them: the layers of a tile, one after the other."""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.common.work import Slot
from gemmkit.kernels.mlp.activation import fragments
from gemmkit.kernels.mlp.walk import first_row, has_tile
from gemmkit.kernels.mlp.work import F32, Outputs, Rows, Tables
from gemmkit.kernels.sm90.store import own_column
from gemmkit.lang.control import fold, join
from gemmkit.lang.registers import generate
from gemmkit.lang.values import convert, fill
from gemmkit.ptx.descriptors import advance, matrix_descriptor
from gemmkit.ptx.memory import load_shared, shared
from gemmkit.ptx.special import rolled, thread_index
from gemmkit.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_wait

STEPS = 4                              # of 16 rows of weights, in a chunk


def consume(spec: Any, sizes: Any, tables: Tables, outputs: Outputs, rank: int, group: int) -> None:
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
        rows = Rows(first_row(spec, turn) + group * 64, x_slot.stage, group)
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

def multiply(weights: Any, spec: Any, a: Any, slot: Slot, group: int) -> tuple:
    """The biases, and on top of them A times the weights, whose first chunk is in ``slot``; their stages are released."""
    spec.ring.wait(slot)
    sums = biases(weights, spec, slot.stage)
    spec.turns.wait(group)
    sums = fold(weights.steps, step, sums, weights, spec, a, weights_descriptor(weights, spec), slot)
    spec.turns.give((group + 1) % spec.consumers)
    (sums,) = wgmma_wait(0, (sums,))
    spec.ring.release(spec.ring.skip(slot, weights.chunks - 1).stage)
    return sums


def step(sums: tuple, n: int, weights: Any, spec: Any, a: Any, w: int, slot: Slot) -> tuple:
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


def part_of(weights: Any, spec: Any, a: Any, n: int) -> Any:
    """A's ``n``-th 16 columns: a fragment, or 32 bytes on in a line of x, or in the next panel."""
    if weights.from_registers:
        return a[n]
    steps = spec.x.line // 16
    return advance(a, n // steps * (64 * spec.x.line_bytes) + n % steps * 32)


def x_descriptor(spec: Any, group: int, stage: int) -> int:
    """A consumer's rows of x."""
    width = spec.x.line_bytes
    return advance(matrix_descriptor(shared(spec.dtype, 0), 0, 0, 8 * width, width),
                   stage * spec.x_bytes + group * spec.group_bytes)


def weights_descriptor(weights: Any, spec: Any) -> int:
    """Of the first stage."""
    width = weights.line_bytes
    return matrix_descriptor(shared(spec.dtype, spec.w_offset), 0, weights.leading_bytes, 8 * width, width)


# -- between layers -------------------------------------------------------------------------------------------------------

def biases(weights: Any, spec: Any, stage: int) -> tuple:
    """What a thread's sums begin with."""
    if spec.has_bias:
        return join(generate(weights.n // 8, bias_of, spec, stage * spec.bias_pitch + own_column()))
    return fill(F32, weights.values, 0.0)


def bias_of(n: int, spec: Any, at: int) -> tuple:
    """Of two columns, in both of a thread's rows."""
    pair = load_shared(shared(spec.bias_dtype, spec.bias_offset), at, n * 8, 2)
    first, second = convert(F32, pair[0]), convert(F32, pair[1])
    return first, second, first, second
