"""What acts beside a block's threads and must be ordered with them: other blocks, copies, the kernel before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmkit.emulator import errors, machine
from gemmkit.emulator.memory import for_array
from gemmkit.ptx.barriers import (
    cluster_barrier,
    cluster_rank,
    mbarrier_arrive,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_fence_init,
    mbarrier_init,
    mbarrier_wait,
    store_async,
)
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.ptx.tma import tma_load
from gemmkit.ptx.wgmma import grid_wait, named_barrier
from gemmkit.runtime.tensor_maps import TensorMapSpec
from tests.support.emulated import as_bytes, run
from tests.support.launching import Tensor, emulated

U64, F32 = np.dtype(np.uint64), np.dtype(np.float32)
SEEDS = [None, 0, 1, 2]
PAIR = dict(threads=32, blocks=2, cluster=(2, 1, 1))
every_seed = pytest.mark.parametrize("seed", SEEDS)


# -- the kernel before ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("write", [False, True])
def test_global_memory_before_the_kernel_in_front_has_ended(write: bool) -> None:
    array = np.zeros(32, np.float32)
    memory = for_array(array, "a")

    def kernel(waits: bool) -> None:
        thread = machine.current()
        thread.shared_write(4 * thread.index, as_bytes(1.0))
        if waits:
            grid_wait()
        if write:
            thread.write(memory, array.ctypes.data + 4 * thread.index, as_bytes(1.0))
        else:
            thread.read(memory, array.ctypes.data + 4 * thread.index, 4)

    run(kernel, True, dependent=True)
    run(kernel, False)
    with pytest.raises(errors.ProtocolError, match="kernel before may still run; call grid_wait"):
        run(kernel, False, dependent=True)


def copy_in(source: Any, waits: int, first: bool) -> None:
    """TMA reads a box, perhaps before the kernel in front has ended; perhaps nobody waits for it."""
    bars = shared(U64, 1024)
    if thread_index() == 0:
        mbarrier_init(bars, 0, 1)
        mbarrier_fence_init()
        if first:
            grid_wait()
        mbarrier_expect(bars, 0, 512)
        tma_load(source, (0, 0), shared(F32, 0), 0, bars, 0)
    barrier()
    grid_wait()
    if thread_index() < waits:
        mbarrier_wait(bars, 0, 0)


def bring(waits: int, first: bool, seed: int | None = None) -> None:
    emulated(copy_in, Tensor(np.ones((16, 32), F32), TensorMapSpec(F32, (32, 4), 128)), waits, first, threads=32, shared=1032,
             seed=seed, dependent=True)


def test_tma_reads_before_the_kernel_in_front_has_ended() -> None:
    bring(32, True)
    with pytest.raises(errors.ProtocolError, match="call grid_wait first"):
        bring(32, False)


# -- the end of a block -----------------------------------------------------------------------------------------------

@every_seed
def test_a_block_must_not_end_before_its_copies(seed: int | None) -> None:
    bring(1, True, seed)                               # one thread that has waited is enough
    with pytest.raises(errors.ProtocolError, match="ends, and with it .* a copy may still be on its way"):
        bring(0, True, seed)


@every_seed
def test_a_block_must_not_end_before_its_peers_have_arrived(seed: int | None) -> None:
    """Whichever block is first in this run."""
    def kernel(stays: bool) -> None:
        bars = shared(U64, 0)
        if thread_index() == 0:
            mbarrier_init(bars, 0, 32)
            mbarrier_fence_init()
        cluster_barrier()
        if cluster_rank() == 1:
            mbarrier_arrive_at(bars, 0, 0)
        if stays:
            cluster_barrier()

    run(kernel, True, **PAIR, schedule_seed=seed)
    with pytest.raises(errors.ProtocolError, match="another block of the cluster may still arrive|has ended"):
        run(kernel, False, **PAIR, schedule_seed=seed)


def test_a_peers_arrival_that_was_waited_for_needs_no_meeting() -> None:
    def kernel() -> None:
        bars = shared(U64, 0)
        if thread_index() == 0:
            mbarrier_init(bars, 0, 32)
            mbarrier_fence_init()
        cluster_barrier()
        if cluster_rank() == 1:
            mbarrier_arrive_at(bars, 0, 0)
        else:
            mbarrier_wait(bars, 0, 0)

    for seed in SEEDS:
        run(kernel, **PAIR, schedule_seed=seed)


# -- stores from elsewhere --------------------------------------------------------------------------------------------

def send(apart: int, rounds: int, returns: bool) -> None:
    """Threads 0 of both blocks send four numbers to block 0, which reads them; and again, when they are told to."""
    sent, free = shared(U64, 256), shared(U64, 264)
    if thread_index() == 0:
        mbarrier_init(sent, 0, 1)
        mbarrier_init(free, 0, 1)
        mbarrier_fence_init()
    cluster_barrier()
    if thread_index() == 0:
        for step in range(rounds):
            if cluster_rank() == 0:
                mbarrier_expect(sent, 0, 32)
            if step > 0 and returns:
                mbarrier_wait(free, 0, step - 1 & 1)
            store_async(shared(F32, 0), 4 * apart * cluster_rank(), (F32.type(1),) * 4, sent, 0, 0)
            if cluster_rank() == 0:
                mbarrier_wait(sent, 0, step & 1)
                machine.current().shared_read(0, 16 * (1 + apart), 16)
                mbarrier_arrive(free, 0)
                mbarrier_arrive_at(free, 0, 1)
    cluster_barrier()


@every_seed
def test_stores_of_two_blocks_to_one_place(seed: int | None) -> None:
    run(send, 1, 1, True, **PAIR, schedule_seed=seed)
    with pytest.raises(errors.RaceError, match="race in 16 bytes at offset 0") as caught:
        run(send, 0, 1, True, **PAIR, schedule_seed=seed)
    assert [access.kind for access in caught.value.accesses] == ["write", "write"]


@every_seed
def test_stores_to_what_may_not_have_been_read(seed: int | None) -> None:
    run(send, 1, 3, True, **PAIR, schedule_seed=seed)
    with pytest.raises((errors.RaceError, errors.DeadlockError)):
        run(send, 1, 3, False, **PAIR, schedule_seed=seed)


# -- parities ---------------------------------------------------------------------------------------------------------

@every_seed
def test_a_wait_that_may_take_an_old_phase_for_the_one_it_means(seed: int | None) -> None:
    """A parity names every other phase. Who has not seen the one between may go on two phases early."""
    def kernel(phases: int, meets: int) -> None:
        bars = shared(U64, 0)
        if thread_index() == 0:
            mbarrier_init(bars, 0, 1)
        barrier()
        if thread_index() < 32:
            for phase in range(phases):
                if thread_index() == 0:
                    mbarrier_arrive(bars, 0)
                if phase == meets:
                    named_barrier(1, 64)
        else:
            if meets >= 0:
                named_barrier(1, 64)
            if seed is not None:                                  # after all arrivals, so that the wait returns in this order
                machine.current().wait_until(lambda: machine.current().block.mbarriers[0].phase == phases, "the arrivals")
            mbarrier_wait(bars, 0, phases - 1 & 1)

    run(kernel, 1, -1, threads=64, schedule_seed=seed)
    run(kernel, 4, 2, threads=64, schedule_seed=seed)
    for phases, meets in ((2, -1), (3, 0), (4, 1)):
        old = "the fresh barrier" if phases == 2 else f"the end of phase {phases - 3}"
        with pytest.raises(errors.ProtocolError, match=f"wait for phase {phases - 1} of the mbarrier at offset 0 may take {old} .*"
                                                       f" of phase {phases - 2} before the wait|may miss .*{old.split()[-1]}"):
            run(kernel, phases, meets, threads=64, schedule_seed=seed)


@every_seed
@pytest.mark.parametrize("late", [False, True])
def test_a_wait_that_may_come_after_the_next_phase(late: bool, seed: int | None) -> None:
    """Nothing but the meeting tells warp 0 that warp 1 has waited: it may miss a phase and hang, be it late in this run or not."""
    waited = [0]

    def kernel(phases: int, meets: bool) -> None:
        bars = shared(U64, 0)
        if thread_index() == 0:
            mbarrier_init(bars, 0, 1)
        barrier()
        for phase in range(phases):
            if thread_index() == 0:
                if not late:                                      # which orders nothing
                    machine.current().wait_until(lambda: waited[0] == 64 * phase, "the waits")
                mbarrier_arrive(bars, 0)
            mbarrier_wait(bars, 0, phase & 1)
            waited[0] += 1
            if meets:
                barrier()

    for phases, meets in ((1, False), (4, True)):
        waited[0] = 0
        run(kernel, phases, meets, threads=64, schedule_seed=seed)
    waited[0] = 0
    found = "may miss phase 0 of the mbarrier at offset 0, and wait for phase 2(.|\n)*it waits at .*mbarrier_wait"
    if late:
        found += "|may have missed phase [0-2]|may take .* the same parity"
    with pytest.raises(errors.EmulatorError, match=found):
        run(kernel, 4, False, threads=64, schedule_seed=seed)
