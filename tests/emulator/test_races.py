"""Unordered accesses are found, with both lines; ordered ones are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gemmkit.emulator import errors, machine
from gemmkit.emulator.memory import for_array
from tests.support.emulated import as_bytes, line_of, run

SEEDS = [None, 0, 1, 2]


def race(kernel: Callable[..., None], *args: object, **options: int | None) -> errors.RaceError:
    """The race that a launch ends with."""
    with pytest.raises(errors.RaceError) as caught:
        run(kernel, *args, **options)
    return caught.value


def described(error: errors.RaceError) -> set[tuple[str, int]]:
    """Both accesses, as (kind, line number): their order depends on the schedule."""
    return {(access.kind, access.kernel_line.number) for access in error.accesses}


@pytest.mark.parametrize("seed", SEEDS)
def test_dropped_barrier(seed: int | None) -> None:
    def kernel(synchronise: bool) -> None:
        thread = machine.current()
        thread.shared_write(4 * thread.index, as_bytes(1.0))  # write
        if synchronise:
            thread.barrier()
        thread.shared_read(4 * (thread.index ^ 1), 4)  # read

    run(kernel, True, threads=64, schedule_seed=seed)
    with pytest.raises(errors.EmulatorError) as caught:  # with another thread's write not yet done, or done
        run(kernel, False, threads=64, schedule_seed=seed)
    assert caught.value.kernel_line.number in (line_of(kernel, "read"), line_of(kernel, "write"))


@pytest.mark.parametrize("seed", SEEDS)
def test_dropped_barrier_before_the_next_stage_is_written(seed: int | None) -> None:
    def kernel(synchronise: bool) -> None:
        thread = machine.current()
        thread.shared_write(4 * thread.index, as_bytes(1.0))
        thread.barrier()
        thread.shared_read(4 * (thread.index ^ 1), 4)  # read
        if synchronise:
            thread.barrier()
        thread.shared_write(4 * thread.index, as_bytes(2.0))  # write

    run(kernel, True, threads=64, schedule_seed=seed)
    error = race(kernel, False, threads=64, schedule_seed=seed)
    assert described(error) == {("read", line_of(kernel, "read")), ("write", line_of(kernel, "write"))}
    earlier, later = error.accesses
    assert earlier.thread.tid == later.thread.tid ^ 1
    writer = earlier if earlier.kind == "write" else later
    assert error.address == 4 * writer.thread.tid
    assert (error.size, error.memory) == (4, "shared memory of block (0, 0, 0)")
    assert error.thread == later.thread and error.kernel_line == later.kernel_line
    assert str(earlier.kernel_line) in str(error) and str(later.kernel_line) in str(error)
    assert f"thread {earlier.thread.tid} of block (0, 0, 0)" in str(error)


def test_lines_and_threads_of_a_write_then_read_race() -> None:
    def kernel() -> None:
        thread = machine.current()
        if thread.index == 3:
            thread.shared_write(  # write
                32, as_bytes(1.0))
        elif thread.index == 9:
            value = 1 + thread.shared_read(32, 4)  # read
            discard(value)

    error = race(kernel)
    assert [(a.kind, a.thread, a.kernel_line.number) for a in error.accesses] == [
        ("write", ((0, 0, 0), 3), line_of(kernel, "write")),
        ("read", ((0, 0, 0), 9), line_of(kernel, "read"))]
    assert error.accesses[1].kernel_line.text == "value = 1 + thread.shared_read(32, 4)  # read"


def discard(_: object) -> None:
    """Uses a value."""


def test_two_writes_race_even_of_one_value() -> None:
    def kernel() -> None:
        machine.current().shared_write(0, as_bytes(1.0))  # write

    error = race(kernel)
    assert [a.kind for a in error.accesses] == ["write", "write"]
    assert {a.kernel_line.number for a in error.accesses} == {line_of(kernel, "write")}
    assert error.accesses[0].thread != error.accesses[1].thread


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_race_on_global_memory(seed: int | None) -> None:
    array = np.zeros(64, np.float32)
    memory = for_array(array, "d")

    def kernel(overlap: int) -> None:
        thread = machine.current()
        at = 32 * thread.block.index[0] + thread.index - overlap * thread.block.index[0]
        thread.write(memory, array.ctypes.data + 4 * at, as_bytes(1.0))  # write

    run(kernel, 0, blocks=2, schedule_seed=seed)
    error = race(kernel, 1, blocks=2, schedule_seed=seed)
    assert {(a.thread.block, a.thread.tid) for a in error.accesses} == {((0, 0, 0), 31), ((1, 0, 0), 0)}
    assert error.address == array.ctypes.data + 4 * 31
    assert {a.kernel_line.number for a in error.accesses} == {line_of(kernel, "write")}


@pytest.mark.parametrize("first", ["read", "write"])
def test_a_block_reads_what_another_writes(first: str) -> None:
    array = np.zeros(1, np.float32)
    memory = for_array(array, "d")

    def kernel() -> None:
        thread = machine.current()
        if (thread.block.index[0] == 4) == (first == "read"):
            thread.write(memory, array.ctypes.data, as_bytes(1.0))
        elif thread.block.index[0] in (0, 1, 2, 4):
            thread.read(memory, array.ctypes.data, 4)

    error = race(kernel, threads=1, blocks=5)
    assert [a.kind for a in error.accesses] == (["read", "write"] if first == "read" else ["write", "write"])


def test_a_launch_orders_what_came_before_it() -> None:
    array = np.zeros(32, np.float32)
    memory = for_array(array, "d")

    def kernel(shift: int) -> None:
        thread = machine.current()
        thread.write(memory, array.ctypes.data + 4 * ((thread.index + shift) % 32), as_bytes(1.0))

    for shift in range(3):
        run(kernel, shift)


def test_two_memories_over_one_array_race() -> None:
    array = np.zeros((4, 4), np.float32)
    source, target = for_array(array, "c", readonly=True), for_array(array.T, "d", written=False)

    def kernel() -> None:
        thread = machine.current()
        if thread.index == 0:
            thread.read(source, array.ctypes.data + 4, 4)
        if thread.index == 1:
            thread.write(target, array.ctypes.data + 4, as_bytes(1.0))

    assert [a.kind for a in race(kernel).accesses] == ["read", "write"]


@pytest.mark.parametrize("known", [0, 1])
def test_readers_of_an_ended_block_are_told_apart_if_a_clock_can_order_them(known: int) -> None:
    """Two threads of block 0 read; block 1 learns of one of them alone, reads too, and writes."""
    array = np.zeros(1, np.float32)
    memory = for_array(array, "d")

    def kernel(clock: machine.Clock) -> None:
        thread = machine.current()
        if thread.block.index[0] == 0:
            thread.read(memory, array.ctypes.data, 4)
            if thread.index == known:
                clock.release(thread)
        elif thread.index == 0:
            clock.acquire(thread)
            thread.read(memory, array.ctypes.data, 4)
            thread.write(memory, array.ctypes.data, as_bytes(1.0))

    assert race(kernel, machine.Clock(), threads=2, blocks=2).accesses[0].thread == ((0, 0, 0), 1 - known)


@pytest.mark.parametrize("reader", range(32))
def test_each_of_many_readers_counts(reader: int) -> None:
    """Only one of 32 readers of the bytes is not ordered before the write."""
    def kernel() -> None:
        thread = machine.current()
        if thread.index == 0:
            thread.shared_write(0, bytes(16))
        thread.barrier()
        if thread.index < 32 and thread.index != reader:
            thread.shared_read(0, 16)
        thread.barrier()
        if thread.index == reader:
            thread.shared_read(8, 4)  # read
        if thread.index == 40:
            thread.shared_write(0, bytes(16))

    error = race(kernel, threads=64)
    earlier = error.accesses[0]
    assert (earlier.thread.tid, earlier.kernel_line.number) == (reader, line_of(kernel, "read"))
    assert error.address == 8


def test_only_common_bytes_race() -> None:
    """Neighbouring bytes of one word are different memory, however they are accessed."""
    def kernel() -> None:
        thread = machine.current()
        thread.shared_write(16 * (thread.index // 4), bytes(16)) if thread.index % 4 == 0 else None
        thread.barrier()
        thread.shared_write(thread.index, b"x")
        thread.barrier()
        thread.shared_read(16 * (thread.index % 2), 16)
        thread.barrier()
        thread.shared_write(2 * thread.index, b"xy")
        thread.shared_read(2 * thread.index, 2)

    run(kernel)


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_double_buffering_is_clean(seed: int | None) -> None:
    """A tiled product with two stages, its barriers just enough; and each of them needed."""
    a = np.arange(16 * 64, dtype=np.float32).reshape(16, 64) % 7
    d = np.zeros((16, 16), np.float32)
    source, target = for_array(a, "a", readonly=True), for_array(d, "d", written=False)

    def kernel(missing: int) -> None:
        thread = machine.current()
        row, column = divmod(thread.index, 16)

        def fetch(step: int) -> None:
            data = thread.read(source, a.ctypes.data + 4 * (64 * row + 16 * step + column), 4)
            thread.shared_write(1024 * (step % 2) + 4 * thread.index, data)

        fetch(0)
        total = np.float32(0)
        for step in range(4):
            if step != missing:
                thread.barrier()
            if step < 3:
                fetch(step + 1)
            for k in range(16):
                x, y = (thread.shared_read(1024 * (step % 2) + 4 * (16 * r + k), 4).view(np.float32)[0]
                        for r in (row, column))
                total += x * y
        thread.write(target, d.ctypes.data + 4 * thread.index, as_bytes(total))

    run(kernel, -1, threads=256, shared=2048, schedule_seed=seed)
    np.testing.assert_array_equal(d, a @ a.T)
    for step in range(4):
        with pytest.raises((errors.RaceError, errors.UninitialisedRead)):
            run(kernel, step, threads=256, shared=2048, schedule_seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_exchange_within_a_warp(seed: int | None) -> None:
    def kernel(sync: bool) -> None:
        thread = machine.current()
        thread.shared_write(4 * thread.index, as_bytes(float(thread.index)))  # write
        thread.collective("exchange", None, lambda operands: operands, sync=sync)
        data = thread.shared_read(4 * (thread.index ^ 31), 4)  # read
        assert data.view(np.float32)[0] == thread.index ^ 31

    run(kernel, True, threads=64, schedule_seed=seed)
    error = race(kernel, False, threads=64, schedule_seed=seed)
    assert described(error) == {("write", line_of(kernel, "write")), ("read", line_of(kernel, "read"))}


def test_a_warp_synchronises_itself_alone() -> None:
    def kernel() -> None:
        thread = machine.current()
        thread.shared_write(4 * thread.index, as_bytes(1.0))
        thread.collective("warp", None, lambda operands: operands)
        thread.shared_read(4 * (thread.index ^ 32), 4)

    with pytest.raises((errors.RaceError, errors.UninitialisedRead)):
        run(kernel, threads=64)


def test_order_passes_on_through_a_third_thread() -> None:
    """Warp 0 writes, a named barrier tells warp 1, and another tells warp 2, which never met warp 0."""
    def kernel() -> None:
        thread = machine.current()
        if thread.warp == 0:
            thread.shared_write(4 * thread.lane, as_bytes(1.0))
            thread.barrier(1, 64)
        elif thread.warp == 1:
            thread.barrier(1, 64)
            thread.barrier(2, 64)
        else:
            thread.barrier(2, 64)
            thread.shared_read(4 * (31 - thread.lane), 4)

    for seed in SEEDS:
        run(kernel, threads=96, schedule_seed=seed)


def test_a_bulk_access_is_checked_to_its_end() -> None:
    """Over several pages of the history, of which another thread touches the last byte only."""
    def kernel(last: int) -> None:
        thread = machine.current()
        if thread.index == 0:
            thread.shared_write(16, bytes(10000), alignment=16)  # bulk
        elif thread.index == 1:
            thread.shared_write(last, b"x")

    run(kernel, 15, shared=16384)
    run(kernel, 10016, shared=16384)
    for last in (16, 4096, 10015):
        error = race(kernel, last, shared=16384)
        assert error.address == last
        assert error.accesses[0].kernel_line.number == line_of(kernel, "bulk")


def test_a_component_and_its_template_are_both_named() -> None:
    """The innermost line is the component's; the template kernel's line that called it is given too."""
    import linecache

    from gemmkit.lang import host as sites

    file = sites.TEMPLATE_PATHS[0] + "made_up_for_a_test.py"
    source = "def template(component):\n    x = 1\n    component(x)\n"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names: dict[str, Callable[..., None]] = {}
    exec(compile(source, file, "exec"), names)

    def component(_: int) -> None:
        machine.current().shared_write(0, as_bytes(1.0))  # write

    error = race(names["template"], component)
    for access in error.accesses:
        assert access.kernel_line.number == line_of(component, "write")
        assert access.template_line == (file, 3, "component(x)")
    assert error.template_line == (file, 3, "component(x)")
    assert str(error).count(f"called from {file}:3: component(x)") == 2


def test_the_innermost_function_is_named() -> None:
    def helper() -> None:
        machine.current().shared_write(0, as_bytes(1.0))  # write

    def kernel() -> None:
        helper()

    assert {a.kernel_line.number for a in race(kernel).accesses} == {line_of(helper, "write")}


def test_machinery_is_never_the_kernel_line() -> None:
    from gemmkit.lang import host as sites

    file = sites.INTERNAL_PATHS[0] + "made_up_for_a_test.py"
    names: dict[str, Callable[..., None]] = {"machine": machine}
    exec(compile("def store():\n    machine.current().shared_write(0, bytes(4))\n", file, "exec"), names)
    store = names["store"]

    def kernel() -> None:
        store()  # call

    assert {a.kernel_line.number for a in race(kernel).accesses} == {line_of(kernel, "call")}
    sites.configure(internal=(*sites.INTERNAL_PATHS, __file__))
    try:
        assert __file__ not in {a.kernel_line.file for a in race(kernel).accesses}
    finally:
        sites.configure()
    assert {a.kernel_line.number for a in race(kernel).accesses} == {line_of(kernel, "call")}
    with pytest.raises(TypeError, match="internal is 'x'"):
        sites.configure(internal="x")
