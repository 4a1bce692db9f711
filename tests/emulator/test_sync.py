"""Barriers, collectives, conditions and clocks; divergence and deadlock."""

from __future__ import annotations

import numpy as np
import pytest

from gemmkit.emulator import errors, machine
from gemmkit.emulator.memory import for_array
from tests.support.emulated import as_bytes, line_of, run

SEEDS = [None, 0, 1, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_leaves_a_barrier_before_all_are_there(seed: int | None) -> None:
    arrived = []

    def kernel() -> None:
        thread = machine.current()
        for phase in range(5):
            arrived.append(phase)
            thread.barrier()
            assert arrived.count(phase) == 96
            thread.barrier()

    run(kernel, threads=96, schedule_seed=seed)
    assert len(arrived) == 5 * 96


def test_named_barriers_are_apart() -> None:
    log = []

    def kernel() -> None:
        thread = machine.current()
        if thread.warp < 2:
            thread.barrier(1, 64)
            log.append(thread.index)
        else:
            for _ in range(3):
                thread.barrier(2, 32)
            log.append(thread.index)
        thread.barrier()
        assert len(log) == 96

    run(kernel, threads=96)


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_at_different_barriers_deadlock(seed: int | None) -> None:
    def kernel() -> None:
        thread = machine.current()
        if thread.warp == 0:
            thread.barrier(1)  # one
        else:
            thread.barrier(2)  # two

    with pytest.raises(errors.DeadlockError) as caught:
        run(kernel, threads=64, schedule_seed=seed)
    error = caught.value
    assert [(w.thread.tid, w.kernel_line.number) for w in error.waiting] == [
        *((i, line_of(kernel, "one")) for i in range(32)),
        *((i, line_of(kernel, "two")) for i in range(32, 64))]
    assert (error.thread, error.kernel_line.number) == (((0, 0, 0), 0), line_of(kernel, "one"))
    text = str(error)
    assert f"threads 0-31 wait for barrier 1 (32 of 64 there), at {error.waiting[0].kernel_line}" in text
    assert f"threads 32-63 wait for barrier 2 (32 of 64 there), at {error.waiting[63].kernel_line}" in text


def test_a_thread_that_exits_while_others_wait() -> None:
    def kernel() -> None:
        thread = machine.current()
        if thread.index in (3, 40):
            return
        thread.barrier()  # wait

    with pytest.raises(errors.DeadlockError) as caught:
        run(kernel, threads=64, blocks=3)
    assert {w.kernel_line.number for w in caught.value.waiting} == {line_of(kernel, "wait")}
    assert len(caught.value.waiting) == 62
    assert "threads 0-2, 4-39, 41-63 wait" in str(caught.value)
    assert "block (0, 0, 0): threads 3, 40 have left the kernel" in str(caught.value)


def test_one_warp_at_one_barrier_on_two_lines() -> None:
    def kernel() -> None:
        thread = machine.current()
        if thread.lane < 16:
            thread.barrier()  # then
        else:
            thread.barrier()  # else

    with pytest.raises(errors.DivergenceError) as caught:
        run(kernel)
    error = caught.value
    assert [line.number for line in error.lines] == [line_of(kernel, "then"), line_of(kernel, "else")]
    assert (error.thread.tid, error.kernel_line) == (16, error.lines[1])
    assert str(error.lines[0]) in str(error) and str(error.lines[1]) in str(error)


def test_warps_may_come_to_one_barrier_on_different_lines() -> None:
    def kernel() -> None:
        thread = machine.current()
        if thread.warp == 0:
            thread.barrier()
        else:
            thread.barrier()

    run(kernel, threads=64)


def test_counts_of_one_barrier_must_agree() -> None:
    def kernel() -> None:
        thread = machine.current()
        if thread.warp == 0:
            thread.barrier(1, 64)  # sixty-four
        else:
            thread.barrier(1, 96)  # ninety-six

    with pytest.raises(errors.DivergenceError, match="barrier 1 has counts 64 and 96") as caught:
        run(kernel, threads=96)
    numbers = [line.number for line in caught.value.lines]
    assert numbers == [line_of(kernel, "sixty-four"), line_of(kernel, "ninety-six")]


@pytest.mark.parametrize(("arguments", "message"), [
    ((16,), "barrier_id is 16"), ((-1,), "barrier_id is -1"),
    ((0, 48), "count is 48"), ((0, 96), "count is 96"), ((0, 0), "count is 0")])
def test_bad_barriers(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(lambda: machine.current().barrier(*arguments), threads=64)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [32, 128])
def test_collective(size: int, seed: int | None) -> None:
    calls = []

    def rotate(operands: list[int]) -> list[int]:
        calls.append(operands)
        return operands[1:] + operands[:1]

    def kernel() -> None:
        thread = machine.current()
        value = thread.index
        for step in range(1, 4):
            value = thread.collective("rotate", value, rotate, size=size)
            group = thread.index // size * size
            assert value == group + (thread.index - group + step) % size

    run(kernel, threads=256, schedule_seed=seed)
    assert len(calls) == 3 * 256 // size


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_at_different_instructions(seed: int | None) -> None:
    def kernel() -> None:
        thread = machine.current()
        if thread.lane != 5:
            thread.collective("mma", 0, lambda operands: operands)  # mma
        else:
            thread.collective("shfl", 0, lambda operands: operands)  # shfl

    with pytest.raises(errors.DivergenceError, match="'mma'") as caught:
        run(kernel, schedule_seed=seed)
    error = caught.value
    assert {line.number for line in error.lines} == {line_of(kernel, "mma"), line_of(kernel, "shfl")}
    assert "'shfl'" in str(error) and all(str(line) in str(error) for line in error.lines)


def test_lanes_that_differ_in_what_an_instruction_orders() -> None:
    def kernel() -> None:
        thread = machine.current()
        thread.collective("shfl", 0, lambda operands: operands, sync=thread.lane < 16)

    with pytest.raises(errors.DivergenceError):
        run(kernel)


def test_a_lane_that_never_comes() -> None:
    def kernel() -> None:
        thread = machine.current()
        if thread.lane:
            thread.collective("mma", 0, lambda operands: operands)  # mma
        else:
            thread.barrier()  # barrier

    with pytest.raises(errors.DeadlockError) as caught:
        run(kernel)
    assert "threads 1-31 wait for the other lanes of 'mma' (31 of 32 there)" in str(caught.value)
    numbers = [waiter.kernel_line.number for waiter in caught.value.waiting]
    assert numbers == [line_of(kernel, "barrier"), *[line_of(kernel, "mma")] * 31]


def test_a_group_that_the_block_does_not_fill() -> None:
    def kernel() -> None:
        machine.current().collective("mma", 0, lambda operands: operands)  # mma

    with pytest.raises(errors.DivergenceError, match="'mma' needs 32 threads; the block of 48") as caught:
        run(kernel, threads=48)
    assert caught.value.kernel_line.number == line_of(kernel, "mma")


def test_a_collective_with_too_few_results() -> None:
    with pytest.raises(ValueError, match="compute of 'mma' returned 31 results for 32"):
        run(lambda: machine.current().collective("mma", 0, lambda operands: operands[1:]))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_flag_with_a_clock_orders(seed: int | None) -> None:
    """A flag alone lets the reader go on, but only the clock makes the write part of its past."""
    def kernel(ordered: bool, state: dict[str, bool], clock: machine.Clock) -> None:
        thread = machine.current()
        if thread.index == 32:
            thread.shared_write(0, as_bytes(1.0))  # write
            clock.release(thread)
            state["up"] = True
        elif thread.warp == 0:
            thread.wait_until(lambda: "up" in state, "the flag")
            if ordered:
                clock.acquire(thread)
            thread.shared_read(0, 4)  # read

    run(kernel, True, {}, machine.Clock(), threads=64, schedule_seed=seed)
    with pytest.raises(errors.RaceError) as caught:
        run(kernel, False, {}, machine.Clock(), threads=64, schedule_seed=seed)
    numbers = [access.kernel_line.number for access in caught.value.accesses]
    assert numbers == [line_of(kernel, "write"), line_of(kernel, "read")]


def test_what_follows_a_release_is_not_ordered_by_it() -> None:
    def kernel(state: dict[str, bool], clock: machine.Clock) -> None:
        thread = machine.current()
        if thread.index == 32:
            clock.release(thread)
            thread.shared_write(0, as_bytes(1.0))  # write
            state["up"] = True
        elif thread.index == 0:
            thread.wait_until(lambda: "up" in state, "the flag")
            clock.acquire(thread)
            thread.shared_read(0, 4)  # read

    with pytest.raises(errors.RaceError):
        run(kernel, {}, machine.Clock(), threads=64)


def test_a_condition_that_never_holds() -> None:
    def kernel() -> None:
        thread = machine.current()
        if thread.index == 0:
            thread.wait_until(lambda: False, "tile 7")  # wait

    with pytest.raises(errors.DeadlockError, match="threads 0 wait for tile 7") as caught:
        run(kernel, blocks=3)
    assert [(w.thread.block, w.kernel_line.number) for w in caught.value.waiting] == [
        ((i, 0, 0), line_of(kernel, "wait")) for i in range(3)]


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_wait_for_later_ones_and_hand_on_results(seed: int | None) -> None:
    """A chain over blocks, as a split-K sum in fixed order, in the order of indices and against it."""
    for forward in (True, False):
        total = np.zeros(1, np.float32)
        memory = for_array(total, "total")
        turns: list[int] = []
        clock = machine.Clock()

        def kernel(ordered: bool, forward: bool, total: np.ndarray, memory: machine.Memory, turns: list[int],
                   clock: machine.Clock) -> None:
            thread = machine.current()
            turn = thread.block.index[0] if forward else 5 - thread.block.index[0]
            if thread.index == 0:
                thread.wait_until(lambda: len(turns) == turn, "its turn")
                if ordered:
                    clock.acquire(thread)
            thread.barrier()
            if thread.index == 33:
                data = thread.read(memory, total.ctypes.data, 4).view(np.float32) + np.float32(turn)
                thread.write(memory, total.ctypes.data, data.view(np.uint8))
            thread.barrier()
            if thread.index == 0:
                clock.release(thread)
                turns.append(turn)

        shared_by_all = (forward, total, memory, turns, clock)
        run(kernel, True, *shared_by_all, threads=64, blocks=6, schedule_seed=seed)
        assert total[0] == 15 and turns == list(range(6))
        turns.clear()
        with pytest.raises(errors.RaceError):
            run(kernel, False, *shared_by_all, threads=64, blocks=6, schedule_seed=seed)


def test_a_condition_is_seen_while_others_keep_busy() -> None:
    """Warp 1 goes on in collectives until thread 0, which waits for it to begin, tells it to stop."""
    state: dict[str, bool] = {}

    def kernel() -> None:
        thread = machine.current()
        if thread.index == 0:
            thread.wait_until(lambda: "begun" in state, "the beginning")
            state["stop"] = True
        elif thread.warp == 1:
            while not thread.collective("vote", None, lambda operands: ["stop" in state] * 32):
                state["begun"] = True

    run(kernel, threads=64)
    assert state == {"begun": True, "stop": True}


def test_a_clock_of_one_block_is_not_acquired_by_another() -> None:
    clocks = {}

    def kernel() -> None:
        thread = machine.current()
        clock = clocks.setdefault("clock", machine.Clock(thread.block))
        clock.release(thread)
        clock.acquire(thread)

    with pytest.raises(ValueError, match=r"block \(1, 0, 0\) acquires a clock of block \(0, 0, 0\)"):
        run(kernel, threads=1, blocks=2)


def cluster_barrier(thread: machine.Thread, state: dict[object, list[int]], clock: machine.Clock) -> None:
    """A barrier of a whole cluster, built from what the machine gives."""
    block = thread.block
    count = len(block.cluster) * block.size
    arrivals = state.setdefault(block.cluster[0], [])
    target = (len(arrivals) // count + 1) * count
    arrivals.append(thread.index)
    clock.release(thread)
    thread.wait_until(lambda: len(arrivals) >= target, "the cluster")
    clock.acquire(thread)


@pytest.mark.parametrize("seed", SEEDS)
def test_clusters_run_together_and_reach_each_others_shared_memory(seed: int | None) -> None:
    ranks = {}

    def kernel(synchronise: bool, state: dict[object, list[int]], clock: machine.Clock) -> None:
        thread = machine.current()
        block = thread.block
        ranks[block.index] = block.cluster_rank
        assert block.cluster[block.cluster_rank] is block
        thread.shared_write(4 * thread.index, as_bytes(block.cluster_rank, dtype=np.int32))
        if synchronise:
            cluster_barrier(thread, state, clock)
        peer = block.cluster[(block.cluster_rank + 1) % 4]
        data = thread.read(peer.shared, 4 * (31 - thread.index), 4)
        assert data.view(np.int32)[0] == peer.cluster_rank
        cluster_barrier(thread, state, clock)  # or a block could end while others read its memory

    def go(synchronise: bool) -> None:
        machine.launch(kernel, (synchronise, {}, machine.Clock()), grid=(4, 4, 1), block=(32, 1, 1),
                       shared_memory=128, cluster=(2, 2, 1), schedule_seed=seed)

    go(True)
    assert ranks == {(x, y, 0): x % 2 + 2 * (y % 2) for x in range(4) for y in range(4)}
    with pytest.raises((errors.RaceError, errors.UninitialisedRead)):
        go(False)


def test_shared_memory_ends_with_its_block() -> None:
    blocks = []

    def kernel() -> None:
        thread = machine.current()
        blocks.append(thread.block)
        thread.read(blocks[0].shared, 0, 4) if len(blocks) > 1 else thread.shared_write(0, bytes(4))

    for cluster in ((1, 1, 1), (2, 1, 1)):
        blocks.clear()
        with pytest.raises(errors.BoundsError, match=r"shared memory of the finished block \(0, 0, 0\)"):
            run(kernel, threads=1, blocks=2, cluster=cluster)
