"""Named barriers and registers that warps share out: what they order, how they count, and what goes wrong without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmkit.emulator import errors
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import thread_index
from gemmkit.ptx.wgmma import claim_registers, named_arrive, named_barrier, release_registers
from tests.codegen.ptx.test_mbarrier import turns
from tests.support.emulated import run
from tests.support.harness import Out
from tests.support.launching import compiled, emulated, on_device

U32, U64 = np.dtype("u4"), np.dtype("u8")


SEEDS = [None, 0, 1, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_taking_turns(seed: int | None) -> None:
    (out,) = emulated(turns, Out((6,), U32), 3, threads=64, shared=4, seed=seed)
    assert out.tolist() == [1, 2, 3, 4, 5, 6]


def hand_over(out: Any, arrives_first: bool) -> None:
    """Warp 0 writes and goes on; warp 1 waits and reads."""
    data = shared(U32, 0)
    if thread_index() < 32:
        if arrives_first:
            named_arrive(3, 64)
        data[thread_index()] = np.uint32(thread_index())
        if not arrives_first:
            named_arrive(3, 64)
    else:
        named_barrier(3, 64)
        out[thread_index() - 32] = data[63 - thread_index()]


@pytest.mark.parametrize("seed", SEEDS)
def test_an_arrival_makes_known_what_was_before_it(seed: int | None) -> None:
    (out,) = emulated(hand_over, Out((32,), U32), False, threads=64, shared=128, seed=seed)
    assert out.tolist() == list(range(31, -1, -1))
    with pytest.raises((errors.RaceError, errors.UninitialisedRead)):
        emulated(hand_over, Out((32,), U32), True, threads=64, shared=128, seed=seed)


@pytest.mark.gpu
def test_named_barriers_on_hardware() -> None:
    (out,) = on_device(hand_over, Out((32,), U32), False, threads=64, shared=128)
    assert out.tolist() == list(range(31, -1, -1))


def test_who_arrives_learns_nothing() -> None:
    def kernel() -> None:
        data = shared(U32, 0)
        if thread_index() < 32:
            data[thread_index()] = np.uint32(1)
            named_barrier(1, 64)
        else:
            named_arrive(1, 64)
            data[thread_index() - 32]

    with pytest.raises((errors.RaceError, errors.UninitialisedRead)):
        emulated(kernel, threads=64, shared=128)


def test_a_warp_that_arrives_twice() -> None:
    def kernel() -> None:
        if thread_index() < 32:
            named_arrive(1, 96)
            named_arrive(1, 96)

    with pytest.raises(errors.DivergenceError, match="a warp arrives again at barrier 1 before it has opened"):
        emulated(kernel, threads=96)


def test_counts_that_differ() -> None:
    def kernel() -> None:
        if thread_index() < 32:
            named_arrive(1, 64)
        else:
            named_barrier(1, 96)

    with pytest.raises(errors.DivergenceError, match="barrier 1 has counts"):
        emulated(kernel, threads=96)


def share_out(few: int, many: int) -> None:
    if thread_index() < 128:
        release_registers(few)
    else:
        claim_registers(many)


@pytest.mark.parametrize(("few", "many"), [(24, 240), (40, 232), (88, 208)])
def test_registers_that_fit(few: int, many: int) -> None:
    emulated(share_out, few, many, threads=384)


def test_registers_that_nobody_gives_are_waited_for_in_vain() -> None:
    with pytest.raises(errors.DeadlockError, match=r"claim_registers\(240\): .* the block has 64512"):
        emulated(share_out, 40, 240, threads=384)


def test_a_warp_gives_registers_when_all_its_threads_have_come() -> None:
    def kernel() -> None:
        if thread_index() >= 128:
            claim_registers(240)
        elif thread_index() > 0:
            release_registers(24)

    with pytest.raises(errors.DeadlockError, match=r"release_registers\(24\): 31 of 32 threads of warp 0 have come"):
        emulated(kernel, threads=384)


def test_registers_that_a_role_forgets() -> None:
    planned = (24,) * 4 + (240,) * 8
    run(share_out, 24, 240, threads=384, registers=planned)
    with pytest.raises(errors.ProtocolError, match="warp 0 ends with 40 registers a thread, and the tiles are chosen for 24"):
        run(share_out, 40, 232, threads=384, registers=planned)
    with pytest.raises(errors.ProtocolError, match="warp 4 ends with 168 registers a thread, and the tiles are chosen for 240"):
        run(share_out, 24, 168, threads=384, registers=planned)


def test_giving_more_than_one_has() -> None:
    with pytest.raises(errors.ProtocolError, match=r"release_registers\(176\) by a warp that has 168"):
        emulated(share_out, 176, 240, threads=384)
    with pytest.raises(errors.ProtocolError, match=r"claim_registers\(160\) by a warp that has 168"):
        emulated(share_out, 168, 160, threads=384)


@pytest.mark.parametrize("n", [23, 28, 264])
def test_registers_come_in_eights(n: int) -> None:
    with pytest.raises(Exception, match="release_registers"):
        compiled(share_out, n, 232, threads=384)
