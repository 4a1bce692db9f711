"""mbarriers, clusters, named barriers and registers: what they order, how they count, and what goes wrong without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmkit.emulator import errors
from gemmkit.ptx.barriers import (
    cluster_arrive,
    cluster_barrier,
    cluster_rank,
    cluster_wait,
    mbarrier_arrive,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_fence_init,
    mbarrier_init,
    mbarrier_wait,
)
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import barrier, block_x, thread_index, udiv
from gemmkit.ptx.wgmma import (
    claim_registers,
    fence_async,
    grid_launch_dependents,
    grid_wait,
    named_arrive,
    named_barrier,
    release_registers,
)
from gemmkit.runtime.compile import assemble, disassemble, instruction_counts
from tests.support.emulated import run
from tests.support.harness import Out, Runtime, instructions, leaves_nothing, same_bits
from tests.support.launching import compiled, emulated, on_device

# ==========================================================================================================================
# mbarriers, clusters, named barriers and registers: what they order, how they count, and what goes wrong without them.

U32, U64 = np.dtype("u4"), np.dtype("u8")
BARRIERS = 4096
SHARED = BARRIERS + 64
SEEDS = [None, 0, 1, 2]


# -- mbarriers --------------------------------------------------------------------------------------------------------

def ring(out: Any, turns: int, waits: bool) -> None:
    """Warp 0 writes a buffer, warps 1 to 3 read it, in turns; out[turn, reader]."""
    data, full, empty = shared(U32, 0), shared(U64, BARRIERS), shared(U64, BARRIERS + 8)
    if thread_index() == 0:
        mbarrier_init(full, 0, 32)
        mbarrier_init(empty, 0, 96)
    barrier()
    phase = 0
    for turn in range(turns):
        if thread_index() < 32:
            if waits:
                mbarrier_wait(empty, 0, phase ^ 1)
            data[thread_index()] = np.uint32(100 * turn + thread_index())
            mbarrier_arrive(full, 0)
        else:
            mbarrier_wait(full, 0, phase)
            out[turn, thread_index() - 32] = data[thread_index() % 32]
            mbarrier_arrive(empty, 0)
        phase = phase ^ 1


RING = np.array([[100 * turn + reader % 32 for reader in range(96)] for turn in range(5)], U32)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_of_one(seed: int | None) -> None:
    (out,) = emulated(ring, Out((5, 96), U32), Runtime(5), True, shared=SHARED, seed=seed)
    assert same_bits(out, RING)


@pytest.mark.gpu
def test_a_ring_of_one_on_hardware() -> None:
    (out,) = on_device(ring, Out((5, 96), U32), Runtime(5), True, shared=SHARED)
    assert same_bits(out, RING)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_producer_that_does_not_wait_races(seed: int | None) -> None:
    with pytest.raises(errors.EmulatorError):      # a race, or its lanes run so far ahead that they fill a phase too early
        emulated(ring, Out((5, 96), U32), 5, False, shared=SHARED, seed=seed)


def test_a_missing_arrival_is_a_deadlock_that_says_so() -> None:
    def kernel() -> None:
        bars = shared(U64, BARRIERS)
        if thread_index() == 0:
            mbarrier_init(bars, 1, 129)
        barrier()
        mbarrier_arrive(bars, 1)
        mbarrier_wait(bars, 1, 0)

    with pytest.raises(errors.DeadlockError, match=f"threads 0-127 wait for phase 0 of the mbarrier at offset "
                                                   f"{BARRIERS + 8}, which lacks 1 of 129 arrivals and 0 bytes"):
        emulated(kernel, shared=SHARED)


def test_many_who_wait_in_vain_are_found_out() -> None:
    def kernel() -> None:
        if thread_index() == 0:
            mbarrier_init(shared(U64, BARRIERS), 0, 1)
        barrier()
        mbarrier_wait(shared(U64, BARRIERS), 0, 0)

    with pytest.raises(errors.DeadlockError, match="threads 0-639 wait"):
        emulated(kernel, shared=SHARED, threads=640)


def test_waiting_orders_nothing_that_came_after_the_arrival() -> None:
    def kernel(out: Any) -> None:
        bars = shared(U64, BARRIERS)
        if thread_index() == 0:
            mbarrier_init(bars, 0, 1)
        barrier()
        if thread_index() == 0:
            mbarrier_arrive(bars, 0)
            out[0] = 1
        else:
            mbarrier_wait(bars, 0, 0)
            out[0] = 2

    with pytest.raises(errors.RaceError):
        emulated(kernel, Out((1,), U32), shared=SHARED, threads=64)


def without_making() -> None:
    mbarrier_arrive(shared(U64, BARRIERS), 0)


def without_meeting() -> None:
    if thread_index() == 0:
        mbarrier_init(shared(U64, BARRIERS), 0, 1)
        mbarrier_arrive(shared(U64, BARRIERS), 1 - 1)
    else:
        mbarrier_wait(shared(U64, BARRIERS), 0, 0)


def once_too_often() -> None:
    if thread_index() == 0:
        mbarrier_init(shared(U64, BARRIERS), 0, 2)
        mbarrier_expect(shared(U64, BARRIERS), 0, 16)
        mbarrier_arrive(shared(U64, BARRIERS), 0)
        mbarrier_arrive(shared(U64, BARRIERS), 0)


def made_twice() -> None:
    mbarrier_init(shared(U64, BARRIERS), thread_index() * 0, 1)


def for_nobody() -> None:
    mbarrier_init(shared(U64, BARRIERS), thread_index(), 0)


def too_many_bytes() -> None:
    if thread_index() == 0:
        mbarrier_init(shared(U64, BARRIERS), 0, 2)
        mbarrier_expect(shared(U64, BARRIERS), 0, 2**20)


def bad_parity() -> None:
    if thread_index() == 0:
        mbarrier_init(shared(U64, BARRIERS), 0, 2)
        mbarrier_wait(shared(U64, BARRIERS), 0, 2)


def written_over() -> None:
    if thread_index() == 0:
        mbarrier_init(shared(U64, BARRIERS), 0, 1)
        shared(U32, BARRIERS)[1] = np.uint32(7)
        mbarrier_arrive(shared(U64, BARRIERS), 0)


@pytest.mark.parametrize(("kernel", "message"), [
    (written_over, "something has written over the mbarrier at offset 4096"),
    (without_making, "no mbarrier at offset 4096 of block .0, 0, 0.; make it with mbarrier_init"),
    (without_meeting, "nothing orders the mbarrier_init of the mbarrier at offset 4096, by thread 0"),
    (once_too_often, "all 2 arrivals at the mbarrier at offset 4096 have come"),
    (made_twice, "there is an mbarrier at offset 4096 already"),
    (for_nobody, "made for 0 arrivals; 1 to 1048575"),
    (too_many_bytes, "expect 1048576 bytes; a phase counts up to 1048575"),
    (bad_parity, "parity is 2"),
])
def test_barriers_used_against_their_rules(kernel: Any, message: str) -> None:
    with pytest.raises(errors.ProtocolError, match=message):
        emulated(kernel, shared=SHARED)


def test_a_barrier_lies_in_shared_memory_at_a_multiple_of_8() -> None:
    def outside() -> None:
        mbarrier_init(shared(U64, 0), SHARED // 8 + thread_index(), 1)

    def askew() -> None:
        mbarrier_init(shared(U64, BARRIERS + 4), thread_index(), 1)

    with pytest.raises(errors.BoundsError):
        emulated(outside, shared=SHARED)
    with pytest.raises(errors.AlignmentError, match="4 past a multiple of 8"):
        emulated(askew, shared=SHARED)


# -- clusters ---------------------------------------------------------------------------------------------------------

def handed_over(out: Any, meets: bool) -> None:
    """Each block writes its line, then reads the other's."""
    out[block_x(), thread_index()] = np.uint32(block_x())
    cluster_arrive()
    if meets:
        cluster_wait()
    value = out[1 - block_x(), thread_index()]
    if not meets:
        cluster_wait()
    cluster_barrier()
    out[block_x(), thread_index()] = value


HANDED = np.repeat(np.array([[1], [0]], U32), 32, axis=1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cluster_meets(seed: int | None) -> None:
    (out,) = emulated(handed_over, Out((2, 32), U32), True, threads=32, blocks=2, cluster=2, seed=seed)
    assert same_bits(out, HANDED)
    with pytest.raises((errors.RaceError, errors.UninitialisedRead)):
        emulated(handed_over, Out((2, 32), U32), False, threads=32, blocks=2, cluster=2, seed=seed)


@pytest.mark.gpu
def test_a_cluster_meets_on_hardware() -> None:
    (out,) = on_device(handed_over, Out((2, 32), U32), True, threads=32, blocks=2, cluster=2)
    assert same_bits(out, HANDED)


def signal(out: Any, fenced: bool, meets: bool) -> None:
    """Block 0 writes a line and tells block 1, at block 1's barrier, that it has."""
    bars = shared(U64, BARRIERS)
    if thread_index() == 0:
        mbarrier_init(bars, 0, 32)
        if fenced:
            mbarrier_fence_init()
    if meets:
        cluster_barrier()
    else:
        barrier()
    if cluster_rank() == 0:
        out[0, thread_index()] = np.uint32(5)
        mbarrier_arrive_at(bars, 0, 1)
    else:
        mbarrier_wait(bars, 0, 0)
        out[1, thread_index()] = out[0, 31 - thread_index()]
    cluster_barrier()


@pytest.mark.parametrize("seed", SEEDS)
def test_an_arrival_in_another_block(seed: int | None) -> None:
    (out,) = emulated(signal, Out((2, 32), U32), True, True, threads=32, blocks=2, cluster=2, shared=SHARED, seed=seed)
    assert (out == 5).all()


@pytest.mark.gpu
def test_an_arrival_in_another_block_on_hardware() -> None:
    (out,) = on_device(signal, Out((2, 32), U32), True, True, threads=32, blocks=2, cluster=2, shared=SHARED)
    assert (out[0] == 5).all()


@pytest.mark.parametrize(("fenced", "meets", "message"), [
    (False, True, "mbarrier_fence_init has not followed"),
    (True, False, "no mbarrier at offset|nothing orders the mbarrier_init"),
])
def test_another_blocks_barrier_must_be_known(fenced: bool, meets: bool, message: str) -> None:
    with pytest.raises(errors.ProtocolError, match=message):
        emulated(signal, Out((2, 32), U32), fenced, meets, threads=32, blocks=2, cluster=2, shared=SHARED)


def test_a_block_must_not_end_before_others_signal_it() -> None:
    def kernel() -> None:
        bars = shared(U64, BARRIERS)
        if thread_index() == 0:
            mbarrier_init(bars, 0, 32)
            mbarrier_fence_init()
        cluster_barrier()
        if cluster_rank() == 1:
            for _ in range(3):
                barrier()
            mbarrier_arrive_at(bars, 0, 0)

    with pytest.raises(errors.ProtocolError, match=r"block \(0, 0, 0\) of the cluster has ended"):
        emulated(kernel, threads=32, blocks=2, cluster=2, shared=SHARED)


def arrive_twice() -> None:
    cluster_arrive()
    cluster_arrive()


def only_wait() -> None:
    cluster_wait()


def beyond() -> None:
    mbarrier_arrive_at(shared(U64, BARRIERS), 0, 2)


@pytest.mark.parametrize(("kernel", "message"), [
    (arrive_twice, "arrives at the cluster's barrier again"), (only_wait, "without having arrived"),
    (beyond, "no block of rank 2; it has 2")])
def test_clusters_used_against_their_rules(kernel: Any, message: str) -> None:
    with pytest.raises(errors.ProtocolError, match=message):
        emulated(kernel, threads=32, blocks=2, cluster=2, shared=SHARED)


def test_threads_that_have_ended_are_not_waited_for_in_a_cluster() -> None:
    def kernel() -> None:
        if thread_index() < 32:
            cluster_barrier()

    emulated(kernel, threads=64, blocks=2, cluster=2)


# -- named barriers ---------------------------------------------------------------------------------------------------

def turns(out: Any, rounds: int) -> None:
    """Two warps take turns at a place in memory: who has been there lets the other in, and goes on without waiting."""
    warp, data = udiv(thread_index(), 32), shared(U32, 0)
    if thread_index() == 0:
        data[0] = np.uint32(0)
    barrier()
    if warp == 1:
        named_arrive(1, 64)
    for turn in range(rounds):
        named_barrier(1 + warp, 64)
        if thread_index() % 32 == 0:
            data[0] += np.uint32(1)
            out[2 * turn + warp] = data[0]
        if turn + warp < rounds:
            named_arrive(2 - warp, 64)


# -- what the assembler makes of them ---------------------------------------------------------------------------------

def everything(bars_at: int, n: int) -> None:
    grid_wait()
    bars = shared(U64, bars_at)
    if thread_index() == 0:
        mbarrier_init(bars, n, 3)
        mbarrier_fence_init()
    cluster_barrier()
    if thread_index() < 128:
        release_registers(40)
        mbarrier_expect(bars, n, 4096)
        mbarrier_arrive(bars, n + 1)
        mbarrier_arrive_at(bars, n, cluster_rank() ^ 1)
        mbarrier_wait(bars, n, 0)
        mbarrier_wait(bars, n + 1, 1)
        named_arrive(3, 256)
    else:
        claim_registers(232)
        fence_async()
        named_barrier(3, 256)
        named_barrier(udiv(thread_index(), 128), 128)
    grid_launch_dependents()
    cluster_arrive()
    cluster_wait()


def test_the_instructions() -> None:
    ptx = compiled(everything, Runtime(1024), Runtime(2), threads=384)
    assert leaves_nothing(ptx)
    found = instructions(ptx)
    for text, count in {
        "mbarrier.init.shared::cta.b64": 1, "mbarrier.arrive.expect_tx.shared::cta.b64": 1, "mapa.shared::cluster.u32": 1,
        "mbarrier.arrive.shared::cta.b64": 1, "mbarrier.arrive.shared::cluster.b64": 1,
        "mbarrier.try_wait.parity.shared::cta.b64": 2, "fence.mbarrier_init.release.cluster": 1,
        "fence.proxy.async.shared::cta": 1, "barrier.cluster.arrive.release.aligned": 2,
        "barrier.cluster.wait.acquire.aligned": 2, "setmaxnreg.dec.sync.aligned.u32": 1,
        "setmaxnreg.inc.sync.aligned.u32": 1, "griddepcontrol.wait": 1, "griddepcontrol.launch_dependents": 1,
        "bar.arrive": 1, "bar.sync": 2,
    }.items():
        assert found[text] == count, text
    assembled = assemble(ptx)
    assert assembled.usage.stack_bytes == assembled.usage.spill_stores == 0
    sass = disassemble(assembled.cubin)
    # The two meetings of the cluster fence the GPU's memory; arrivals elsewhere must not.
    assert sass.count("MEMBAR.ALL.GPU") == 2
    assert instruction_counts(sass)["USETMAXREG"] == 2


# ==========================================================================================================================
# Named barriers and registers that warps share out: what they order, how they count, and what goes wrong without them.


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
