"""Launching: indices, limits, exceptions, cleaning up, schedules, and several launches at once."""

from __future__ import annotations

import contextvars
import gc
import sys
import threading
import traceback
import weakref

import greenlet
import numpy as np
import pytest

from gemmkit.emulator import errors, machine
from tests.support.emulated import as_bytes, line_of, run


def test_indices() -> None:
    seen = []

    def kernel(tag: str) -> None:
        thread = machine.current()
        block = thread.block
        x, y, z = thread.thread_index
        assert thread.index == x + 4 * (y + 3 * z)
        assert (thread.warp, thread.lane) == divmod(thread.index, 32)
        assert (block.grid, block.dim, block.size) == ((3, 2, 2), (4, 3, 5), 60)
        assert (block.cluster, block.cluster_rank, block.cluster_dim) == ([block], 0, (1, 1, 1))
        assert block.threads[thread.index] is thread
        seen.append((tag, block.index, thread.thread_index))

    machine.launch(kernel, ("x",), grid=(3, 2, 2), block=(4, 3, 5), shared_memory=0)
    assert seen == [("x", (i, j, k), (x, y, z)) for k in range(2) for j in range(2) for i in range(3)
                    for z in range(5) for y in range(3) for x in range(4)]


def test_outside_a_kernel() -> None:
    with pytest.raises(RuntimeError, match="not inside an emulated kernel"):
        machine.current()
    run(lambda: None)
    with pytest.raises(RuntimeError, match="not inside an emulated kernel"):
        machine.current()


@pytest.mark.parametrize(("changes", "message"), [
    (dict(block=(1025, 1, 1)), r"block is \(1025, 1, 1\); each must be 1 at least, and \(1024, 1024, 64\)"),
    (dict(block=(32, 33, 1)), r"block is \(32, 33, 1\), 1056 threads; the device takes 1024"),
    (dict(block=(64, 1, 1), max_threads=32), "64 threads; the device takes 32"),
    (dict(block=(0, 1, 1)), "block is"),
    (dict(block=(32, 1)), r"block is \(32, 1\); pass three integers"),
    (dict(block=(32.0, 1, 1)), "pass three integers"),
    (dict(grid=7), "grid is 7; pass three integers"),
    (dict(grid=(1, 65536, 1)), "grid is"),
    (dict(shared_memory=232449), "shared_memory is 232449; a block gets 0 to 232448 bytes"),
    (dict(shared_memory=-1), "shared_memory is -1"),
    (dict(shared_memory=64, max_shared_memory=32), "a block gets 0 to 32 bytes"),
    (dict(cluster=(3, 1, 1), grid=(4, 1, 1)), "divide the grid"),
    (dict(cluster=(4, 8, 1), grid=(4, 8, 1)), "16 blocks in all"),
])
def test_sizes_that_no_device_takes(changes: dict[str, object], message: str) -> None:
    calls = []
    sizes = dict(grid=(1, 1, 1), block=(1, 1, 1), shared_memory=0)
    with pytest.raises(ValueError, match=message):
        machine.launch(lambda: calls.append(1), (), **{**sizes, **changes})
    assert calls == []


def test_an_exception_keeps_its_traceback_and_names_its_thread() -> None:
    def fail(index: int) -> None:
        raise KeyError(index)  # raise

    def kernel() -> None:
        thread = machine.current()
        thread.barrier()
        if thread.index == 7 and thread.block.index[0] == 1:
            fail(thread.index)  # call
        thread.barrier()

    with pytest.raises(KeyError) as caught:
        run(kernel, blocks=2)
    lines = [frame.lineno for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert lines[-2:] == [line_of(kernel, "call"), line_of(fail, "raise")]
    if sys.version_info >= (3, 11):
        (note,) = caught.value.__notes__
        assert note == f"in thread 7 of block (1, 0, 0) of the emulated kernel {kernel.__qualname__}"


def test_a_kernel_returns_nothing() -> None:
    with pytest.raises(TypeError, match="returned 3; a kernel returns nothing"):
        run(lambda: 3)


def greenlets() -> int:
    """Those that are alive, but for the one that a thread of Python's itself is from its first emulated kernel on."""
    gc.collect()
    return sum(isinstance(thing, greenlet.greenlet) and bool(thing) and thing.parent is not None for thing in gc.get_objects())


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.usefixtures("quick_collections")
def test_nothing_is_left_behind_by_a_fault(seed: int | None) -> None:
    before = greenlets()
    unwound, swallowed, alive = [], [], []

    class Owned:
        """Something that a thread holds while it waits."""

    def kernel() -> None:
        thread = machine.current()
        owned = Owned()
        alive.append(weakref.ref(owned))
        try:
            if thread.index == 40:
                raise LookupError
            try:
                thread.barrier()
            except Exception as error:  # what ends the others is no Exception, and so is not caught
                swallowed.append(error)
        finally:
            unwound.append(thread.index)
            if thread.index != 40:
                thread.barrier(1)  # waits no more, and goes no further
                swallowed.append(thread)

    for _ in range(2):
        unwound.clear()
        with pytest.raises(LookupError):
            run(kernel, threads=64, schedule_seed=seed)
        assert 40 in unwound and not swallowed
        if seed is None:
            assert sorted(unwound) == list(range(41))  # the others had not begun
        assert greenlets() == before  # it collects: Python 3.12 may keep the last thread in a cycle of exceptions and frames
        assert not any(reference() for reference in alive)
        with pytest.raises(RuntimeError, match="not inside"):
            machine.current()
        run(lambda: machine.current().barrier(), threads=64, schedule_seed=seed)
    assert greenlets() == before


def test_an_error_while_the_others_end_does_not_hide_the_fault() -> None:
    def kernel() -> None:
        thread = machine.current()
        try:
            if thread.index == 9:
                raise LookupError
            thread.barrier()
        finally:
            if thread.index == 3:
                raise OSError

    with pytest.raises(LookupError):
        run(kernel)


@pytest.mark.usefixtures("quick_collections")
def test_deadlock_and_races_leave_nothing_behind() -> None:
    before = greenlets()
    with pytest.raises(errors.DeadlockError):
        run(lambda: machine.current().barrier(machine.current().warp), threads=64)
    with pytest.raises(errors.RaceError):
        run(lambda: machine.current().shared_write(0, bytes(4)), threads=64)
    assert greenlets() == before


def test_the_schedule_is_shuffled_and_reproducible() -> None:
    def order(seed: int | None) -> list[tuple[int, int, int]]:
        log: list[tuple[int, int, int]] = []

        def kernel() -> None:
            thread = machine.current()
            for phase in range(3):
                log.append((phase, thread.block.index[0], thread.index))
                thread.barrier()

        run(kernel, threads=64, blocks=4, schedule_seed=seed)
        return log

    orders = [order(seed) for seed in [None, *range(8)]]
    assert all(sorted(one) == sorted(orders[0]) for one in orders)
    assert len({tuple(one) for one in orders}) == 9
    assert [order(seed) for seed in [None, *range(8)]] == orders
    assert len({one[0][1] for one in orders}) > 1  # the first block
    assert len({one[0][2] for one in orders}) > 1  # the first thread
    assert len({tuple(i for _, _, i in one if i % 32 == 0)[:2] for one in orders}) > 1  # the first warp


def test_a_schedule_finds_an_order_dependent_fault() -> None:
    """Two warps that take tickets in any order; the kernel is wrong if warp 1 comes first."""
    def kernel(tickets: list[int]) -> None:
        thread = machine.current()
        if thread.lane == 0:
            tickets.append(thread.warp)
        thread.barrier()
        assert tickets[0] == 0

    run(kernel, [], threads=64)
    failures = 0
    for seed in range(16):
        try:
            run(kernel, [], threads=64, schedule_seed=seed)
        except AssertionError:
            failures += 1
    assert 0 < failures < 16


def test_a_shuffled_schedule_lets_one_warp_run_ahead() -> None:
    def kernel(log: list[int]) -> None:
        thread = machine.current()
        for _ in range(10):
            thread.collective("step", thread.warp, lambda warps: log.append(warps[0]) or warps)

    logs: list[list[int]] = []
    for seed in range(8):
        logs.append([])
        run(kernel, logs[-1], threads=64, schedule_seed=seed)
    assert any(len(set(log[:8])) == 1 for log in logs)
    assert {log[0] for log in logs} == {0, 1}


def test_the_last_at_a_barrier_need_not_leave_it_first() -> None:
    def kernel(log: list[int]) -> None:
        thread = machine.current()
        log.append(thread.index)
        thread.barrier()
        log.append(thread.index)

    first = []
    for seed in range(8):
        log: list[int] = []
        run(kernel, log, threads=64, schedule_seed=seed)
        first.append(log[63] == log[64])
    assert not all(first)


def test_many_threads() -> None:
    """Each thread's stack is its own, so a thousand of them do not add up to the recursion limit."""
    total = []

    def deep(levels: int) -> int:
        return 1 + deep(levels - 1) if levels else 0

    def kernel() -> None:
        machine.current().barrier()
        total.append(deep(200))
        machine.current().barrier()

    run(kernel, threads=1024)
    assert total == [200] * 1024


def test_operating_system_threads_do_not_meet() -> None:
    results, failures = {}, []
    gate = threading.Barrier(4)

    def work(number: int) -> None:
        def kernel() -> None:
            thread = machine.current()
            thread.shared_write(4 * thread.index, as_bytes(number, dtype=np.int32))
            thread.barrier()
            if thread.index == 0:
                gate.wait()  # all four launches are in the middle now
            thread.barrier()
            assert machine.current() is thread
            results[number, thread.index] = thread.shared_read(4 * (63 - thread.index), 4).view(np.int32)[0]

        try:
            run(kernel, threads=64)
            machine.current()
        except RuntimeError as error:
            failures.append(str(error))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == {(i, j): i for i in range(4) for j in range(64)}
    assert len(failures) == 4 and all("not inside an emulated kernel" in failure for failure in failures)


def test_a_launch_inside_a_kernel() -> None:
    inner_threads = []

    def inner() -> None:
        inner_threads.append(machine.current())
        machine.current().barrier()

    def outer() -> None:
        thread = machine.current()
        thread.barrier()
        if thread.index == 1:
            run(inner, threads=32)
        assert machine.current() is thread
        thread.barrier()

    run(outer, threads=32)
    assert len(inner_threads) == 32


def test_what_surrounds_the_launch_surrounds_its_threads() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)

    def kernel() -> None:
        assert variable.get() == 5
        variable.set(machine.current().index)
        machine.current().barrier()
        assert variable.get() == machine.current().index
        np.float32(1) / np.float32(0)

    with np.errstate(divide="ignore"):
        run(kernel)
    assert variable.get() == 5
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        run(kernel)
