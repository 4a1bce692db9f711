"""``attention``: softmax(score(scale Q K^T)) V for Hopper, in the manner of FlashAttention-3 (Shah et al., 2024).

Blocks stay on their multiprocessors and compute one tile after the other: 64 rows of Q for each consumer.

| role | threads | waits for | signals |
|---|---|---|---|
| producer | one of the first warpgroup | ``empty`` of Q, K, V | ``full`` of Q, K, V, by TMA |
| consumer | 2 or 3 warpgroups | ``full`` | ``empty`` |

| step | what | where |
|---|---|---|
| 0 | barriers, registers | here |
| 1 | Q, K, V: global -> shared | `producer` |
| 2 | a round: start S' = Q K_j^T and O += P V_(j-1), wait for S' | `products` |
| 3 | the softmax of S', while O is multiplied; then P, and O by what the largest scores have grown | `softmax`, `elements` |
| 4 | the end of a tile: O by one over the sums; O and their logarithms to global memory | `store` |

Rounds run on across tiles (`consumer`): the last product of a tile is under way beside the first S of the next one. P stays
in the registers, since an accumulator's pairs are the words of an A fragment.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.kernels.collectives.scheduler import Slot
from gemmkit.kernels.collectives.softmax import (
    F32,
    FREE,
    TESTED,
    AttentionOutputs,
    AttentionSizes,
    AttentionState,
    HeadTile,
    KeyBlocks,
    ScoreCoord,
    WeightedSums,
    begin,
    consumer_blocks,
    key_blocks,
    packed,
    rescale,
    slice_of,
    soften,
    tile_at,
)
from gemmkit.kernels.sm90.store import own_column, own_row
from gemmkit.lang.aggregates import fill
from gemmkit.lang.host import View
from gemmkit.lang.registers import fold
from gemmkit.ptx.barriers import mbarrier_fence_init
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import barrier, carried, rolled, thread_index, udiv, uniform
from gemmkit.ptx.tma import tma_load, tma_prefetch
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
    from gemmkit.kernels.attention.spec import AttentionSpec, HeadRing

# --------------------------------------------------------------------------------------------------
# Step 1 of `attention`: one thread has TMA fill the stages of Q, K and V.
#
# K is one block ahead of V, as the consumers want them: at the end of a tile come K and Q of the next one, then the last
# block of V, or V before Q where a tile ends before the next one begins. A tile's blocks go from the last of its keys to
# the first.

def produce(spec: AttentionSpec, sizes: AttentionSizes, order: View, map_q: EmulatedTensorMap, map_k: EmulatedTensorMap,
            map_v: EmulatedTensorMap) -> None:
    zero = thread_index() * 0
    slot, q_slot = Slot(zero, zero + 1), Slot(zero, zero + 1)            # fresh rings are empty
    before, last, last_block, turn = slot, tile_at(spec, sizes, order, zero), zero - 1, zero
    tile = last
    while tile.m >= 0:
        blocks = key_blocks(spec, tile)
        block = blocks.last - 1
        load_k(spec, sizes, map_k, slot, tile, block)
        if spec.joins_tiles:
            load_q(spec, map_q, q_slot, tile)
        if last_block >= 0:
            load_v(spec, sizes, map_v, before, last, last_block)
        if not spec.joins_tiles:
            load_q(spec, map_q, q_slot, tile)
        q_slot = spec.q_ring.advance(q_slot)
        while block > blocks.first:
            before = slot
            slot = spec.k_ring.advance(slot)
            load_k(spec, sizes, map_k, slot, tile, block - 1)
            load_v(spec, sizes, map_v, before, tile, block)
            block = rolled(block - 1)
        before, last, last_block = slot, tile, block
        slot = spec.k_ring.advance(slot)
        turn = rolled(turn + 1)
        tile = tile_at(spec, sizes, order, turn)
    if last_block >= 0:
        load_v(spec, sizes, map_v, before, last, last_block)


def load_q(spec: AttentionSpec, tensor_map: EmulatedTensorMap, slot: Slot, tile: HeadTile) -> None:
    load(spec, spec.q_ring, tensor_map, slot, (tile.first_query + tile.m, tile.head, slice_of(spec, tile)))


def load_k(spec: AttentionSpec, sizes: AttentionSizes, tensor_map: EmulatedTensorMap, slot: Slot, tile: HeadTile,
           block: int) -> None:
    head, batch = udiv(tile.head, sizes.k_share), slice_of(spec, tile) * sizes.k_batch
    load(spec, spec.k_ring, tensor_map, slot, (tile.first_key + block * spec.block_n, head, batch))


def load_v(spec: AttentionSpec, sizes: AttentionSizes, tensor_map: EmulatedTensorMap, slot: Slot, tile: HeadTile,
           block: int) -> None:
    head, batch = udiv(tile.head, sizes.v_share), slice_of(spec, tile) * sizes.v_batch
    load(spec, spec.v_ring, tensor_map, slot, (tile.first_key + block * spec.block_n, head, batch))


def load(spec: AttentionSpec, ring: HeadRing, tensor_map: EmulatedTensorMap, slot: Slot, at: tuple) -> None:
    """A stage of a ring, panel by panel, from a row of a head of a batch on."""
    ring.acquire(slot)
    ring.expect(slot, 2 * ring.rows * spec.head_dim)
    for panel in range(spec.head.count):
        tma_load(tensor_map, (panel * spec.head.line, at[0], at[1], at[2]), shared(spec.dtype, ring.tiles),
                 slot.stage * (ring.rows * spec.head_dim) + panel * ring.rows * spec.head.line, ring.full(), slot.stage)


# --------------------------------------------------------------------------------------------------
# Step 2 of `attention`: S = Q K^T of one block of keys, beside O += P V of the block before.
#
# | wgmma | A | B |
# |---|---|---|
# | S | Q in shared memory, along the head | K in shared memory, along the head |
# | O | P in registers | V in shared memory, along the head: its rows are the product's K |
#
# With turns (`AttentionSpec.takes_turns`) a consumer starts its products when the one before has started its own, so that
# the softmax of one lies under the products of the others. At D 128 two consumers are faster without (1.13 against 1.06
# of cuDNN), at D 64 three are faster with them.

class ConsumerOperands(NamedTuple):
    """Descriptors of a consumer's rows of Q, and of the first stages of K and V; which consumer it is. Of a tile, the
    stage of its Q, and the block of keys that this is multiplied with last."""

    q: Any
    k: Any
    v: Any
    group: Any
    q_stage: Any
    first: Any


def with_q(spec: AttentionSpec, operands: ConsumerOperands, stage: int, first: int) -> ConsumerOperands:
    """The same with Q in another stage, of a tile of which ``first`` is the block of keys that comes last."""
    return ConsumerOperands(advance(operands.q, stage * spec.q_bytes), operands.k, operands.v, operands.group, stage, first)


def release_q(spec: AttentionSpec, operands: ConsumerOperands, block: int) -> None:
    """A block of keys has been multiplied: behind the tile's last one the next tile's Q may come, while the softmax and the
    last product go on."""
    if not spec.joins_tiles:
        if block == operands.first:
            spec.q_ring.release(operands.q_stage)


def release_last(spec: AttentionSpec, slot: Slot) -> None:
    """At the end of a tile, where `release_q` has not given Q back."""
    if spec.joins_tiles:
        spec.q_ring.release(slot.stage)


def operands_of(spec: AttentionSpec, group: int) -> ConsumerOperands:
    width = spec.head.line_bytes
    q = matrix_descriptor(shared(spec.dtype, 0), 0, 0, 8 * width, width)
    k = matrix_descriptor(shared(spec.dtype, spec.k_offset), 0, 0, 8 * width, width)
    v = matrix_descriptor(shared(spec.dtype, spec.v_offset), 0, spec.block_n * width, 8 * width, width)
    return ConsumerOperands(advance(q, group * 64 * width), k, v, group, 0, 0)


def start_first(spec: AttentionSpec, operands: ConsumerOperands, slot: Slot) -> tuple:
    """S of the first block, with nothing beside it."""
    wgmma_fence()
    s = multiply_qk(spec, operands.q, advance(operands.k, slot.stage * spec.k_bytes) if spec.skips else operands.k)
    wgmma_commit()
    return wgmma_wait(0, (s,))[0]


def start_both(spec: AttentionSpec, operands: ConsumerOperands, state: AttentionState, slot: Slot) -> tuple:
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


def start_next(spec: AttentionSpec, following: ConsumerOperands, o: tuple, slots: tuple) -> tuple:
    """Start the first S of the next tile, ``following``, of the keys and the Q in ``slots``, behind the last product of a
    tile, ``o``. O is done at the end, and S is on its way."""
    spec.k_ring.wait(slots[0])
    spec.q_ring.wait(slots[1])
    wgmma_fence()
    s = multiply_qk(spec, following.q, advance(following.k, slots[0].stage * spec.k_bytes))
    wgmma_commit()
    return wgmma_wait(1, (s, o))


def multiply_alone(spec: AttentionSpec, operands: ConsumerOperands, state: AttentionState) -> tuple:
    """The last product of all, beside which no S goes."""
    return wgmma_wait(0, (start_alone(spec, operands, state),))[0]


def start_alone(spec: AttentionSpec, operands: ConsumerOperands, state: AttentionState) -> tuple:
    spec.v_ring.wait(state.slot)
    wgmma_fence()
    o = start_pv(spec, operands, state)
    wgmma_commit()
    return o


def start_pv(spec: AttentionSpec, operands: ConsumerOperands, state: AttentionState) -> tuple:
    return fold(spec.pv_steps, pv_step, state.o, spec, state.p, advance(operands.v, state.slot.stage * spec.k_bytes))


def multiply_qk(spec: AttentionSpec, q: int, k: int) -> tuple:
    s = spec.qk(fill(F32, spec.values_s, 0.0), q, k, 0)
    return fold(spec.qk_steps - 1, qk_step, s, spec, q, k)


def qk_step(s: tuple, n: int, spec: AttentionSpec, q: int, k: int) -> tuple:
    """16 elements of the head: 32 bytes on in a line, or in the next panel."""
    steps = spec.head.line // 16
    panel, within = (n + 1) // steps, (n + 1) % steps * 32
    return spec.qk(s, advance(q, panel * spec.block_m * spec.head.line_bytes + within),
                   advance(k, panel * spec.block_n * spec.head.line_bytes + within), 1)


def pv_step(o: tuple, n: int, spec: AttentionSpec, p: tuple, v: int) -> tuple:
    """16 keys: as many lines of V on."""
    return spec.pv(o, p[n], advance(v, n * 16 * spec.head.line_bytes), 1)


# --------------------------------------------------------------------------------------------------
# Steps 2 to 4 of `attention`, as a consumer takes them: round after round, and on across the ends of tiles.
#
# A round starts S of one block of keys and O's product of the block before, and softens S meanwhile. The first S of a
# tile goes beside the last product of the tile before, which is stored while other consumers multiply. That wants two
# stages of Q: of one (`AttentionSpec.joins_tiles` is False) a tile's last product comes first, while the next tile's Q is
# on its way, and the tile is stored while the first S of the next one is multiplied.

def consume(spec: Any, sizes: Any, order: View, outputs: AttentionOutputs, group: int) -> None:
    zero = thread_index() * 0
    slot, q_slot, turn = Slot(zero, zero), Slot(zero, zero), zero
    operands = operands_of(spec, group)
    row, column = group * 64 + own_row(), own_column()
    tile = tile_at(spec, sizes, order, zero)                            # every block has one
    blocks = own_blocks(spec, tile, group)

    # 2. and 3. S of the first tile's first block of keys, beside which nothing goes.
    slot = first_seen(spec, tile, blocks, slot)
    spec.k_ring.wait(slot)
    spec.q_ring.wait(q_slot)
    s = start_first(spec, operands, slot)
    spec.k_ring.release(slot.stage)
    release_q(spec, with_q(spec, operands, q_slot.stage, blocks.first), blocks.last - 1)
    weights, stats, _ = first_block(s, spec, sizes, place_in(spec, tile, row, column, blocks.last - 1))
    p = packed(spec, weights)
    o = fill(F32, spec.values_o, 0.0)
    spec.turns.give_first(group)

    while tile.m >= 0:
        turn = rolled(turn + 1)
        following = tile_at(spec, sizes, order, turn)
        now = with_q(spec, operands, q_slot.stage, blocks.first)
        block = blocks.last - 2

        # 2. and 3. The tile's other blocks: tested, free, tested. (A state that is one variable costs 39 moves
        # between registers at D 64.)
        if spec.tests_above:
            while block >= blocks.free_last:
                place = place_in(spec, tile, row, column, block)
                o, p, stats, slot = one_round(spec, sizes, now, AttentionState(o, p, stats, slot), place, TESTED)
                block -= 1
        if spec.mask.has_free:
            while block >= blocks.free_first:
                place = place_in(spec, tile, row, column, block)
                o, p, stats, slot = one_round(spec, sizes, now, AttentionState(o, p, stats, slot), place, FREE)
                block -= 1
        if spec.tests_below:
            while block >= blocks.first:
                place = place_in(spec, tile, row, column, block)
                o, p, stats, slot = one_round(spec, sizes, now, AttentionState(o, p, stats, slot), place, TESTED)
                block -= 1
        release_last(spec, q_slot)
        q_slot = spec.q_ring.advance(q_slot)
        before = AttentionState(o, p, stats, slot)
        slot = spec.k_ring.advance(slot)

        if following.m >= 0:
            # 2. and 3. The tile's last product, and the first S of the next one.
            blocks = own_blocks(spec, following, group)
            if spec.joins_tiles:
                spec.k_ring.wait(slot)
                spec.q_ring.wait(q_slot)
                s, o = start_both(spec, with_q(spec, operands, q_slot.stage, blocks.first), before, slot)
                weights, stats, _ = first_block(s, spec, sizes, place_in(spec, following, row, column, blocks.last - 1))
                spec.k_ring.release(slot.stage)
                (o,) = wgmma_wait(0, (o,))
                spec.v_ring.release(before.slot.stage)
                p = packed(spec, weights)
                # 4. The tile's end.
                spec.store.run(spec, sizes, WeightedSums(o, before.stats), outputs, tile, group)
            else:
                then = with_q(spec, operands, q_slot.stage, blocks.first)
                o = start_alone(spec, operands, before)
                slot = first_seen(spec, following, blocks, slot)
                s, o = start_next(spec, then, o, (slot, q_slot))
                spec.v_ring.release(before.slot.stage)
                # 4. The tile's end.
                spec.store.run(spec, sizes, WeightedSums(o, before.stats), outputs, tile, group)
                (s,) = wgmma_wait(0, (s,))
                spec.k_ring.release(slot.stage)
                release_q(spec, then, blocks.last - 1)
                weights, stats, _ = first_block(s, spec, sizes, place_in(spec, following, row, column, blocks.last - 1))
                p = packed(spec, weights)
            o = fill(F32, spec.values_o, 0.0)
        else:
            o = multiply_alone(spec, operands, before)
            spec.store.run(spec, sizes, WeightedSums(o, before.stats), outputs, tile, group)
        tile = following
    spec.store.finish()


def own_blocks(spec: AttentionSpec, tile: HeadTile, group: int) -> KeyBlocks:
    """A consumer's blocks of keys, made uniform, for the assembler does not always see that loops over them are: causal
    rounds at D 128 then moved 48 descriptors from vector to uniform registers."""
    blocks = consumer_blocks(spec, tile, group) if spec.skips else key_blocks(spec, tile)
    return KeyBlocks(uniform(blocks.first), uniform(blocks.last), uniform(blocks.free_first), uniform(blocks.free_last))


def first_seen(spec: AttentionSpec, tile: HeadTile, blocks: KeyBlocks, slot: Slot) -> Slot:
    """The slot of a consumer's first block of keys. Of a tile's first one, which shows its rows nothing, it gives back K and
    V as they come: not before, for the other consumers may still read what was there."""
    if spec.skips:
        if uniform(key_blocks(spec, tile).last) > blocks.last:
            spec.k_ring.wait(slot)
            spec.k_ring.release(slot.stage)
            spec.v_ring.wait(slot)
            spec.v_ring.release(slot.stage)
            return spec.k_ring.advance(slot)
    return slot


def first_block(s: tuple, spec: AttentionSpec, sizes: AttentionSizes, place: ScoreCoord) -> tuple:
    """A tile's first block of keys, which may reach beyond the last one."""
    return soften(TESTED.scores(s, spec, sizes, place), spec, sizes, begin())


def place_in(spec: AttentionSpec, tile: HeadTile, row: int, column: int, block: int) -> ScoreCoord:
    """A thread's place in a block of keys. With a score LLVM knows nothing of it: it would carry each of 32 columns from
    round to round in a register of its own (D 128, s - 0.06 (m - n): 56 bytes spilled). Without one masks get longer."""
    if spec.has_score:
        return ScoreCoord(tile, carried(tile.m + row), carried(column + block * spec.block_n), block)
    return ScoreCoord(tile, tile.m + row, column + block * spec.block_n, block)


def one_round(spec: AttentionSpec, sizes: AttentionSizes, operands: ConsumerOperands, state: AttentionState,
              place: ScoreCoord, kind: Any) -> AttentionState:
    """A round with the block of keys at ``place``, of which ``kind`` says whether keys may be hidden from queries."""
    slot = spec.k_ring.advance(state.slot)
    spec.k_ring.wait(slot)
    s, o = start_both(spec, operands, state, slot)
    release_q(spec, operands, place.block)
    weights, stats, growth = soften(kind.scores(s, spec, sizes, place), spec, sizes, state.stats)
    spec.k_ring.release(slot.stage)
    (o,) = wgmma_wait(0, (o,))
    spec.v_ring.release(state.slot.stage)
    return AttentionState(rescale(o, growth[0], growth[1]), packed(spec, weights), stats, slot)


def attention(spec: AttentionSpec, sizes: AttentionSizes, order: View, out: View, lse: View, map_q: EmulatedTensorMap,
              map_k: EmulatedTensorMap, map_v: EmulatedTensorMap, map_out: EmulatedTensorMap) -> None:
    """Launched with ``spec.threads`` threads; see the module's tables."""
    # 0. Barriers, before any thread waits on one; then what the previous kernel wrote may be read.
    group = uniform(udiv(thread_index(), 128))
    if thread_index() == 0:
        spec.q_ring.initialise()
        spec.k_ring.initialise()
        spec.v_ring.initialise()
        mbarrier_fence_init()
        tma_prefetch(map_q)
        tma_prefetch(map_k)
        tma_prefetch(map_v)
        if spec.store.uses_tma:
            tma_prefetch(map_out)
    barrier()
    grid_launch_dependents()
    grid_wait()

    if group == 0:
        # 1. Q, K and V: global -> shared.
        spec.warpgroups.release_registers()
        if thread_index() == 0:
            produce(spec, sizes, order, map_q, map_k, map_v)
    else:
        # 2. to 4. Multiply, soften, store.
        spec.warpgroups.claim_registers()
        consume(spec, sizes, order, AttentionOutputs(out, lse, map_out), group - 1)


# --------------------------------------------------------------------------------------------------
# Which block computes which tiles, worked out on the host, once for given sizes.
#
# Tiles go, the longest of each section of heads first, to the block that is free first. A section's K and V stay in the
# L2. As long as tiles take what they should this is as good as a dynamic scheduler, without a counter to reset or a
# broadcast in the block. (A fixed stride in sections of 8 heads was 27 % out of balance at causal S 4096 of 64 heads, by
# this model.)

OVERHEAD = 0.5                         # of a tile, in blocks of keys
L2 = 24 << 20                          # bytes of K and V that a section may have


class Head(NamedTuple):
    """A head of one batch or packed sequence: its tiles' lengths in blocks of keys, and what follows m in each tile's row of
    the table."""

    lengths: Sequence[float]
    entry: tuple[int, ...]


def schedule(heads: Sequence[Head], block_m: int, section: int, blocks: int) -> np.ndarray:
    """The table ``(turns x blocks, 1 + entry)`` of tiles: row ``turn * blocks + block`` has a tile's first query, and the
    entry of its head; -1 behind a block's last one. ``section`` heads are computed at a time.

    >>> schedule([Head([1.0, 2.0], (7,)), Head([1.0], (8,))], 64, 2, 2).tolist()
    [[64, 7], [0, 7], [-1, -1], [0, 8], [-1, -1], [-1, -1]]
    """
    free = [(0.0, block) for block in range(blocks)]
    todo: list[list[tuple[int, ...]]] = [[] for _ in range(blocks)]
    for first in range(0, len(heads), section):
        tiles = [(-length, at, row) for at, head in enumerate(heads[first:first + section], first)
                 for row, length in enumerate(head.lengths)]
        for minus, at, row in sorted(tiles):
            begin, block = free[0]
            todo[block].append((row * block_m, *heads[at].entry))
            heapq.heapreplace(free, (begin - minus + OVERHEAD, block))
    turns, width = max(map(len, todo)) + 1, 1 + len(heads[0].entry)
    order = np.full((turns, blocks, width), -1, np.int32)
    for block, tiles_of in enumerate(todo):
        order[:len(tiles_of), block] = tiles_of or np.empty((0, width), np.int32)
    return order.reshape(-1, width)
