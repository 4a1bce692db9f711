"""Steps 2 to 4 of `attention`, as a consumer takes them: round after round, and on across the ends of tiles.

A round starts S of one block of keys and O's product of the block before, and softens S meanwhile. The first S of a tile
goes beside the last product of the tile before, which is stored while other consumers multiply. That wants two stages of Q:
of one (`AttentionSpec.joins_tiles` is False) a tile's last product comes first, while the next tile's Q is on its way, and
the tile is stored while the first S of the next one is multiplied.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.attention.elements import FREE, TESTED
from gemmkit.kernels.attention.products import (
    Operands,
    multiply_alone,
    operands_of,
    release_last,
    release_q,
    start_alone,
    start_both,
    start_first,
    start_next,
    with_q,
)
from gemmkit.kernels.attention.softmax import begin, packed, rescale, soften
from gemmkit.kernels.attention.walk import consumer_blocks, key_blocks, tile_at
from gemmkit.kernels.attention.work import F32, Blocks, Outputs, Place, State, Sums, Tile
from gemmkit.kernels.common.work import Slot
from gemmkit.kernels.sm90.store import own_column, own_row
from gemmkit.lang.values import fill
from gemmkit.ptx.special import carried, rolled, thread_index, uniform
from gemmkit.ptx.wgmma import wgmma_wait


def consume(spec: Any, sizes: Any, order: Any, outputs: Outputs, group: int) -> None:
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
                o, p, stats, slot = one_round(spec, sizes, now, State(o, p, stats, slot), place, TESTED)
                block -= 1
        if spec.mask.has_free:
            while block >= blocks.free_first:
                place = place_in(spec, tile, row, column, block)
                o, p, stats, slot = one_round(spec, sizes, now, State(o, p, stats, slot), place, FREE)
                block -= 1
        if spec.tests_below:
            while block >= blocks.first:
                place = place_in(spec, tile, row, column, block)
                o, p, stats, slot = one_round(spec, sizes, now, State(o, p, stats, slot), place, TESTED)
                block -= 1
        release_last(spec, q_slot)
        q_slot = spec.q_ring.advance(q_slot)
        before = State(o, p, stats, slot)
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
                spec.store.run(spec, sizes, Sums(o, before.stats), outputs, tile, group)
            else:
                then = with_q(spec, operands, q_slot.stage, blocks.first)
                o = start_alone(spec, operands, before)
                slot = first_seen(spec, following, blocks, slot)
                s, o = start_next(spec, then, o, (slot, q_slot))
                spec.v_ring.release(before.slot.stage)
                # 4. The tile's end.
                spec.store.run(spec, sizes, Sums(o, before.stats), outputs, tile, group)
                (s,) = wgmma_wait(0, (s,))
                spec.k_ring.release(slot.stage)
                release_q(spec, then, blocks.last - 1)
                weights, stats, _ = first_block(s, spec, sizes, place_in(spec, following, row, column, blocks.last - 1))
                p = packed(spec, weights)
            o = fill(F32, spec.values_o, 0.0)
        else:
            o = multiply_alone(spec, operands, before)
            spec.store.run(spec, sizes, Sums(o, before.stats), outputs, tile, group)
        tile = following
    spec.store.finish()


def own_blocks(spec: Any, tile: Tile, group: int) -> Blocks:
    """A consumer's blocks of keys, made uniform, for the assembler does not always see that loops over them are: causal
    rounds at D 128 then moved 48 descriptors from vector to uniform registers."""
    blocks = consumer_blocks(spec, tile, group) if spec.skips else key_blocks(spec, tile)
    return Blocks(uniform(blocks.first), uniform(blocks.last), uniform(blocks.free_first), uniform(blocks.free_last))


def first_seen(spec: Any, tile: Tile, blocks: Blocks, slot: Slot) -> Slot:
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


def first_block(s: tuple, spec: Any, sizes: Any, place: Place) -> tuple:
    """A tile's first block of keys, which may reach beyond the last one."""
    return soften(TESTED.scores(s, spec, sizes, place), spec, sizes, begin())


def place_in(spec: Any, tile: Tile, row: int, column: int, block: int) -> Place:
    """A thread's place in a block of keys. With a score LLVM knows nothing of it: it would carry each of 32 columns from
    round to round in a register of its own (D 128, s - 0.06 (m - n): 56 bytes spilled). Without one masks get longer."""
    if spec.has_score:
        return Place(tile, carried(tile.m + row), carried(column + block * spec.block_n), block)
    return Place(tile, tile.m + row, column + block * spec.block_n, block)


def one_round(spec: Any, sizes: Any, operands: Operands, state: State, place: Place, kind: Any) -> State:
    """A round with the block of keys at ``place``, of which ``kind`` says whether keys may be hidden from queries."""
    slot = spec.k_ring.advance(state.slot)
    spec.k_ring.wait(slot)
    s, o = start_both(spec, operands, state, slot)
    release_q(spec, operands, place.block)
    weights, stats, growth = soften(kind.scores(s, spec, sizes, place), spec, sizes, state.stats)
    spec.k_ring.release(slot.stage)
    (o,) = wgmma_wait(0, (o,))
    spec.v_ring.release(state.slot.stage)
    return State(rescale(o, growth[0], growth[1]), packed(spec, weights), stats, slot)
