"""Steps 2 and 3 of `warp_specialised`: the consumers' schedules over the tiles of D."""

from __future__ import annotations

from typing import Any

from gemmkit.component_products import of_part, of_product
from gemmkit.kernels.common.k_tiles import k_steps
from gemmkit.kernels.common.work import Outputs, Slot, Work
from gemmkit.kernels.sm90.mainloop import numbers_of_parts
from gemmkit.kernels.sm90.store import Part
from gemmkit.ptx.flags import fence_async_global
from gemmkit.ptx.special import thread_index


def consume_together(spec: Any, outputs: Outputs, group: int, rank: int) -> None:
    """Cooperative: every consumer computes its rows of every tile, or of every part of one that is the block's."""
    turn = thread_index() * 0
    slot = Slot(turn, turn)
    at, end, step = spec.scheduler.begin(), spec.scheduler.end(outputs.shape), spec.scheduler.step()
    opened = turn - 1
    while at < end:
        here = of_part(spec, at)
        work = here.scheduler.work(here, here.scheduler.tile_of(at), rank, outputs.shape)
        opened = await_arrivals(spec, here.scheduler.tile_of(at), opened)
        own, matrices = of_product(here, work.batch), outputs_of(spec, outputs, work.batch)
        if spec.exchange.finishes(here):
            first = work.n + spec.exchange.slice(spec, rank) * spec.exchange.columns
            spec.store.begin(spec, outputs.map_c, work.batch, Part(group, work.m + group * spec.first_rows, first, turn))
        sums, slot = multiply_tile(own, group, slot, k_steps(here, work), work, matrices.shape)
        if spec.exchange.hand_over(sums, here, group, rank, turn):
            mine = spec.exchange.collect(sums, here, group, rank, turn)
            column = work.n + spec.exchange.slice(spec, rank) * spec.exchange.columns
            spec.store.run(own, mine, matrices, Part(group, work.m + group * spec.first_rows, column, turn))
            turn = turn ^ 1                            # of the tiles that this block finishes
        at = spec.scheduler.following(at, step)
    spec.store.finish()


def consume_in_turns(spec: Any, outputs: Outputs, group: int, rank: int) -> None:
    """Ping-pong: every other tile (or part of one) is this consumer's. While it finishes one, the other multiplies the next.

    The order barrier is needed, and not only for speed: a consumer two rounds ahead would take the parity of an old phase
    for that of the one it waits for.
    """
    turn = thread_index() * 0
    own_turn = turn                                    # flips with every tile that this consumer finishes
    slot = Slot(turn, turn)
    at, end, step = spec.scheduler.begin(), spec.scheduler.end(outputs.shape), spec.scheduler.step()
    opened = turn - 1
    spec.turns.give_first(group)
    while at < end:
        here = of_part(spec, at)
        work = here.scheduler.work(here, here.scheduler.tile_of(at), rank, outputs.shape)
        steps = k_steps(here, work)
        if turn == group:
            opened = await_arrivals(spec, here.scheduler.tile_of(at), opened)
            if spec.exchange.finishes(here):
                spec.store.begin(spec, outputs.map_c, work.batch, Part(group, work.m, work.n, own_turn))
            spec.turns.wait(group)
            own, matrices = of_product(here, work.batch), outputs_of(spec, outputs, work.batch)
            sums, slot = multiply_tile(own, group, slot, steps, work, matrices.shape)
            spec.turns.give(1 - group)
            if spec.exchange.hand_over(sums, here, group, rank, own_turn):
                mine = spec.exchange.collect(sums, here, group, rank, own_turn)
                spec.store.run(own, mine, matrices, Part(group, work.m, work.n, own_turn))
                own_turn = own_turn ^ 1
        else:
            slot = spec.pipeline.skip(slot, steps)
        turn = turn ^ 1
        at = spec.scheduler.following(at, step)
    spec.store.finish()


def await_arrivals(spec: Any, tile: int, opened: int) -> int:
    """Where operands arrive while the kernel runs, and the store fetches an array ahead of time: that array may be what
    arrives, and TMA's thread waits for it as the producer's does for A."""
    if spec.scheduler.order.gates and spec.store.reads_ahead:
        if thread_index() % 128 == 0:
            waited = spec.scheduler.order.await_tile(tile, opened)
            if waited != opened:
                fence_async_global()
            opened = waited
    return opened


def outputs_of(spec: Any, outputs: Outputs, batch: int) -> Outputs:
    """C, D and the sizes of one product of a stack. (A tensor map is of the whole stack.)"""
    stack = spec.scheduler.stack
    return Outputs(stack.c.matrix(outputs.c, batch), stack.d.matrix(outputs.d, batch), outputs.map_c, outputs.map_d, batch,
                   of_product(outputs.shape, batch))


def multiply_tile(spec: Any, group: int, slot: Slot, steps: int, work: Work, shape: Any) -> tuple:
    """The sums of a consumer's fragments, and the slot after ``steps`` stages."""
    sums, slot = spec.mainloop.run(spec, group, slot, steps, work, shape)
    if spec.has_parts:
        return numbers_of_parts(sums, spec), slot
    return sums, slot
