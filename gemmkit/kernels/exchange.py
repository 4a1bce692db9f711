"""Between steps 2 and 3 of `warp_specialised`, where blocks of a cluster share the K of a tile: they add up their sums.

Each of ``spec.splits`` blocks has sums of the whole tile, over its part of K. Block r finishes the r-th slice of columns:
every thread sends each slice to the block that finishes it, straight into its shared memory, and adds up, in the order of
the blocks, what it is sent itself. Nothing goes through global memory, and the result does not depend on who is first.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.finish import PANEL, add_value
from gemmkit.kernels.walk import BARRIERS
from gemmkit.lang.control import each, fold, join, split
from gemmkit.lang.registers import apply, generate
from gemmkit.ptx.cluster import store_async
from gemmkit.ptx.mbarrier import mbarrier_arrive_at, mbarrier_expect, mbarrier_wait
from gemmkit.ptx.memory import load_shared, shared
from gemmkit.ptx.special import thread_index
from gemmkit.ptx.warpgroup import named_barrier


def exchange(sums: tuple, spec: Any, group: int, rank: int, phase: int) -> tuple:
    """This block's slice of the columns, over all of K; ``phase`` turns with every tile."""
    filled, free = shared(BARRIERS, spec.filled_offset), shared(BARRIERS, spec.free_offset)
    thread = thread_index() % 128
    if thread == 0:
        mbarrier_expect(filled, group, spec.exchanged_bytes)
    mbarrier_wait(free, group, phase ^ 1)              # those it sends to have read what it sent for the last tile
    each(send_fragment, sums, spec, group, rank)
    mbarrier_wait(filled, group, phase)
    mine = generate(spec.fragments_m, receive_fragment, spec, group)
    named_barrier(PANEL + group, 128)
    if thread < spec.splits:
        mbarrier_arrive_at(free, group, thread)
    return mine


def send_fragment(fragment: tuple, i: int, spec: Any, group: int, rank: int) -> None:
    each(send_slice, split(fragment, spec.slice_count), i, spec, group, rank)


def send_slice(values: tuple, to: int, i: int, spec: Any, group: int, rank: int) -> None:
    each(send_words, split(values, 4), i, to, spec, group, rank)


def send_words(words: tuple, j: int, i: int, to: int, spec: Any, group: int, rank: int) -> None:
    store_async(shared(spec.operator.fragment_c.dtype, spec.exchange_offset), place_of(spec, group, rank, i, j), words,
                shared(BARRIERS, spec.filled_offset), group, to)


def receive_fragment(i: int, spec: Any, group: int) -> tuple:
    return join(generate(spec.slice_words, receive_words, i, spec, group))


def receive_words(j: int, i: int, spec: Any, group: int) -> tuple:
    return fold(spec.splits - 1, add_next, load_words_from(0, i, j, spec, group), i, j, spec, group)


def add_next(total: tuple, n: int, i: int, j: int, spec: Any, group: int) -> tuple:
    return apply(add_value, total, load_words_from(n + 1, i, j, spec, group))


def load_words_from(source: int, i: int, j: int, spec: Any, group: int) -> tuple:
    pointer = shared(spec.operator.fragment_c.dtype, spec.exchange_offset)
    return load_shared(pointer, place_of(spec, group, source, i, j), 0, 4)


def place_of(spec: Any, group: int, source: int, i: int, j: int) -> int:
    """Where this thread's four elements from a block lie: neighbours in a warp are neighbours in memory."""
    row = ((group * spec.splits + source) * spec.fragments_m + i) * spec.slice_words + j
    return (row * 128 + thread_index() % 128) * 4


__all__ = ["exchange"]
