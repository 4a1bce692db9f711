"""Step 2 of `attention`: S = Q K^T of one block of keys, beside O += P V of the block before.

| wgmma | A | B |
|---|---|---|
| S | Q in shared memory, along the head | K in shared memory, along the head |
| O | P in registers | V in shared memory, along the head: its rows are the product's K |

With turns (`AttentionSpec.takes_turns`) a consumer starts its products when the one before has started its own, so that the
softmax of one lies under the products of the others. At D 128 two consumers are faster without (1.13 against 1.06 of
cuDNN), at D 64 three are faster with them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gemmkit.kernels.attention.work import F32, State
from gemmkit.kernels.common.work import Slot
from gemmkit.lang.control import fold
from gemmkit.lang.values import fill
from gemmkit.ptx.descriptors import advance, matrix_descriptor
from gemmkit.ptx.memory import shared
from gemmkit.ptx.wgmma import wgmma_commit, wgmma_fence, wgmma_wait


class Operands(NamedTuple):
    """Descriptors of a consumer's rows of Q, and of the first stages of K and V; which consumer it is. Of a tile, the
    stage of its Q, and the block of keys that this is multiplied with last."""

    q: Any
    k: Any
    v: Any
    group: Any
    q_stage: Any
    first: Any


def with_q(spec: Any, operands: Operands, stage: int, first: int) -> Operands:
    """The same with Q in another stage, of a tile of which ``first`` is the block of keys that comes last."""
    return Operands(advance(operands.q, stage * spec.q_bytes), operands.k, operands.v, operands.group, stage, first)


def release_q(spec: Any, operands: Operands, block: int) -> None:
    """A block of keys has been multiplied: behind the tile's last one the next tile's Q may come, while the softmax and the
    last product go on."""
    if not spec.joins_tiles:
        if block == operands.first:
            spec.q_ring.release(operands.q_stage)


def release_last(spec: Any, slot: Slot) -> None:
    """At the end of a tile, where `release_q` has not given Q back."""
    if spec.joins_tiles:
        spec.q_ring.release(slot.stage)


def operands_of(spec: Any, group: int) -> Operands:
    width = spec.head.line_bytes
    q = matrix_descriptor(shared(spec.dtype, 0), 0, 0, 8 * width, width)
    k = matrix_descriptor(shared(spec.dtype, spec.k_offset), 0, 0, 8 * width, width)
    v = matrix_descriptor(shared(spec.dtype, spec.v_offset), 0, spec.block_n * width, 8 * width, width)
    return Operands(advance(q, group * 64 * width), k, v, group, 0, 0)


def start_first(spec: Any, operands: Operands, slot: Slot) -> tuple:
    """S of the first block, with nothing beside it."""
    wgmma_fence()
    s = multiply_qk(spec, operands.q, advance(operands.k, slot.stage * spec.k_bytes) if spec.skips else operands.k)
    wgmma_commit()
    return wgmma_wait(0, (s,))[0]


def start_both(spec: Any, operands: Operands, state: State, slot: Slot) -> tuple:
    """Start S of the keys in a slot, and O's product of the values in the state's slot; S is done at the end."""
    spec.turns.wait(operands.group)
    wgmma_fence()
    s = multiply_qk(spec, operands.q, advance(operands.k, slot.stage * spec.k_bytes))
    wgmma_commit()
    spec.v_ring.wait(state.slot)
    wgmma_fence()
    o = start_pv(spec, operands, state)
    spec.turns.give((operands.group + 1) % spec.consumers)
    wgmma_commit()
    return wgmma_wait(1, (s, o))


def start_next(spec: Any, following: Operands, o: tuple, slots: tuple) -> tuple:
    """Start the first S of the next tile, ``following``, of the keys and the Q in ``slots``, behind the last product of a
    tile, ``o``. O is done at the end, and S is on its way."""
    spec.k_ring.wait(slots[0])
    spec.q_ring.wait(slots[1])
    wgmma_fence()
    s = multiply_qk(spec, following.q, advance(following.k, slots[0].stage * spec.k_bytes))
    wgmma_commit()
    return wgmma_wait(1, (s, o))


def multiply_alone(spec: Any, operands: Operands, state: State) -> tuple:
    """The last product of all, beside which no S goes."""
    return wgmma_wait(0, (start_alone(spec, operands, state),))[0]


def start_alone(spec: Any, operands: Operands, state: State) -> tuple:
    spec.v_ring.wait(state.slot)
    wgmma_fence()
    o = start_pv(spec, operands, state)
    wgmma_commit()
    return o


def start_pv(spec: Any, operands: Operands, state: State) -> tuple:
    return fold(spec.pv_steps, pv_step, state.o, spec, state.p, advance(operands.v, state.slot.stage * spec.k_bytes))


def multiply_qk(spec: Any, q: int, k: int) -> tuple:
    s = spec.qk(fill(F32, spec.values_s, 0.0), q, k, 0)
    return fold(spec.qk_steps - 1, qk_step, s, spec, q, k)


def qk_step(s: tuple, n: int, spec: Any, q: int, k: int) -> tuple:
    """16 elements of the head: 32 bytes on in a line, or in the next panel."""
    steps = spec.head.line // 16
    panel, within = (n + 1) // steps, (n + 1) % steps * 32
    return spec.qk(s, advance(q, panel * spec.block_m * spec.head.line_bytes + within),
                   advance(k, panel * spec.block_n * spec.head.line_bytes + within), 1)


def pv_step(o: tuple, n: int, spec: Any, p: tuple, v: int) -> tuple:
    """16 keys: as many lines of V on."""
    return spec.pv(o, p[n], advance(v, n * 16 * spec.head.line_bytes), 1)
