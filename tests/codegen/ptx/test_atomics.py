"""Counters in global memory: what they count, what they order, and the instruction of each order."""

from __future__ import annotations

from typing import Any

import pytest

from gemmkit.emulator import errors
from gemmkit.ptx.barriers import ORDERS, atomic_add, await_counter, set_counter
from gemmkit.ptx.special import barrier, block_x, thread_index
from tests.support.harness import Out, compiled, emulated, on_device

BLOCKS = 4


def pass_on(out: Any, counts: Any, how: Any) -> None:
    """Each block adds to what the block before has written: an order that only the counter makes."""
    if thread_index() == 0:
        if block_x() == 0:
            set_counter(counts, 0, 0)
            set_counter(counts, 1, 7)
        else:
            await_counter(counts, 1, block_x() + 7, "acquire")
    barrier()
    before = 0 if block_x() == 0 else out[(block_x() - 1) * 32 + thread_index()]
    out[block_x() * 32 + thread_index()] = before + 1
    barrier()
    if thread_index() == 0:
        atomic_add(counts, 1, 1, how)


def test_blocks_in_turn() -> None:
    out, counts = emulated(pass_on, Out((32 * BLOCKS,), "i4"), Out((2,), "u4"), "release", blocks=BLOCKS)
    assert out.reshape(BLOCKS, 32).tolist() == [[n + 1] * 32 for n in range(BLOCKS)] and counts.tolist() == [0, 7 + BLOCKS]


@pytest.mark.gpu
def test_blocks_in_turn_on_the_device() -> None:
    def counted(out: Any, counts: Any) -> None:
        out[block_x() * 32 + thread_index()] = atomic_add(counts, 0, 2, "relaxed")

    out, counts = on_device(counted, Out((32 * BLOCKS,), "i4"), Out((1,), "u4"), blocks=BLOCKS)
    assert sorted(out.tolist()) == [2 * n - 1 for n in range(32 * BLOCKS)]                # outputs begin at 0xffffffff
    assert counts.tolist() == [64 * BLOCKS - 1]


@pytest.mark.parametrize("how", ["relaxed", "acquire"])
def test_an_addition_that_releases_nothing(how: str) -> None:
    with pytest.raises(errors.RaceError):
        emulated(pass_on, Out((32 * BLOCKS,), "i4"), Out((2,), "u4"), how, blocks=BLOCKS)


def test_a_number_that_never_comes() -> None:
    def waits(counts: Any) -> None:
        set_counter(counts, 0, 2)
        await_counter(counts, 0, 3, "relaxed")

    with pytest.raises(errors.DeadlockError, match="a counter that is 2 to become 3"):
        emulated(waits, Out((1,), "u4"))


def test_beyond_the_end() -> None:
    def beyond(counts: Any) -> None:
        atomic_add(counts, 1, 1, "relaxed")

    with pytest.raises(errors.BoundsError):
        emulated(beyond, Out((1,), "u4"))


@pytest.mark.compile
@pytest.mark.parametrize("order", ORDERS)
def test_instructions(order: str) -> None:
    ptx = compiled(pass_on, Out((32 * BLOCKS,), "i4"), Out((2,), "u4"), order)
    assert f"atom.{order}.gpu.global.add.u32" in ptx and "ld.acquire.gpu.global.u32" in ptx
    assert "st.relaxed.gpu.global.u32" in ptx
