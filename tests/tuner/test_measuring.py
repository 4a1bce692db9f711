"""The process that runs candidates, on a driver whose memory is the host's: copies, results, times, faults, hangs."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.tuner.device_process import MOST_SETS, Process
from gemmkit.tuner.measure import ALIGNMENT, Buffer, Buffers, Failed, Job, Measuring, Pointer
from tests.support.pretend_device import Driver, pretended

COMMAND = sys.executable, "-m", "tests.support.pretend_device"
X = np.arange(100, dtype=np.uint8)
AT_X, AT_OUT = 3 * ALIGNMENT + 8, 9 * ALIGNMENT + 16


def info(at: int, count: int, step: int = 1) -> ArrayInfo:
    return ArrayInfo(at, (count,), (step,), np.dtype(np.uint8), 0, False, "cupy")


def memory(is_read: bool = False) -> Buffers:
    out = info(AT_OUT, 100)
    return Buffers([info(AT_X, 100), *([out] if is_read else [])], [out])


def job(cubin: str) -> Job:
    return Job(cubin.encode(), 1, 32, 0, ("u64", "u64", "i32"), (0, 0, 100), 1, False, False,
               ((0, Pointer(0, 0)), (1, Pointer(1, 0))), (), (), (0, 1))


@pytest.fixture
def measuring() -> Iterator[Measuring]:
    with Measuring(memory(), [X.tobytes(), b""], (0, 1), 0, COMMAND) as process:
        for number, cubin in enumerate(("double:20", "double:10", "wrong", "fault", "hang", "die")):
            process.keep(number, job(cubin))
        yield process


# -- the process's side ------------------------------------------------------------------------------------------------

def test_buffers_are_arrays_that_overlap() -> None:
    """Strided arrays from their first byte to their last; of negative strides too."""
    read = [info(1000, 10), info(1005, 10), info(2000 + 18, 10, -2), info(3000, 4)]
    held = Buffers(read, [info(3002, 8), info(5000, 0)])
    assert held.buffers == [Buffer(1000, 15, True, False), Buffer(2000, 19, True, False), Buffer(3000, 10, True, True),
                            Buffer(5000, 0, False, True)]
    assert held.pointer(1005) == Pointer(0, 5) and held.pointer(2018) == Pointer(1, 18) and held.pointer(5000) == Pointer(3, 0)
    with pytest.raises(KeyError):
        held.pointer(1015)


def test_addresses_keep_their_alignment_and_results_their_place() -> None:
    driver = Driver()
    with pretended(driver):
        process = Process(driver, 0)
        assert process.memory(memory().buffers, [X.tobytes(), b""], (0, 1)) == MOST_SETS
        process.job(7, job("double"))
        (result,) = process.result(7)
        assert np.array_equal(np.frombuffer(result, np.uint8), X * 2)
        at_x, at_out, count = process._jobs[7].kernels[0]._bound.launched[0]
        assert (at_x % ALIGNMENT, at_out % ALIGNMENT, count) == (8, 16, 100)


def test_what_is_not_written_is_poison_and_what_is_read_is_as_it_was() -> None:
    for is_read, expected in ((False, 0xFF), (True, 5)):
        driver = Driver()
        with pretended(driver):
            process = Process(driver, 0)
            contents = [X.tobytes(), bytes([5] * 100) if is_read else b""]
            process.memory(memory(is_read).buffers, contents, (0, 1))
            short = Job(b"double", 1, 32, 0, ("u64", "u64", "i32"), (0, 0, 60), 1, False, False,
                        ((0, Pointer(0, 0)), (1, Pointer(1, 0))), (), (), (0, 1))
            process.job(0, short)
            for _ in range(2):
                (result,) = process.result(0)
                found = np.frombuffer(result, np.uint8)
                assert np.array_equal(found[:60], X[:60] * 2) and (found[60:] == expected).all()


def test_launches_of_a_graph_take_all_copies_in_turns() -> None:
    driver = Driver()
    with pretended(driver):
        process = Process(driver, 0)
        sets = process.memory(memory().buffers, [X.tobytes(), b""], (0, 1))
        for number, cubin in enumerate(("double:30", "double:10")):
            process.job(number, job(cubin))
        pairs = process.pairs(0, 1, 4, 2000.0)
        assert pairs == [(pytest.approx(30.0), pytest.approx(10.0))] * 4
        launched = process._jobs[1].kernels[0]._bound.launched[-sets:]
        assert len({values[0] for values in launched}) == len({values[1] for values in launched}) == sets
        assert process._jobs[1]._launches % sets == 0 and process._jobs[1]._launches * 10 >= 2000


def test_workspaces_are_zeros_and_given_back() -> None:
    driver = Driver()
    with pretended(driver):
        process = Process(driver, 0)
        process.memory(memory().buffers, [X.tobytes(), b""], (0, 1))
        spaced = dataclasses.replace(job("double"), formats=("u64", "u64", "i32", "u64"), values=(0, 0, 100, 2**62),
                                     spaces=((3, "counts", 64),))
        process.job(0, spaced)
        process.job(1, job("double"))
        process.pairs(0, 1, 2, 100.0)
        used = {values[3] for values in process._jobs[0].kernels[0]._bound.launched}
        (address,) = used
        assert ctypes.string_at(address, 64) == bytes(64) and driver.freed == []
        process.forget(0)
        process.forget(0)
        assert driver.freed == [address]


def test_kernels_run_in_their_order_and_hand_over_in_memory_of_the_jobs() -> None:
    """2 x to the second kernel, 2 x to the result; before the first has run that memory is poison; it is given back."""
    driver = Driver()
    with pretended(driver):
        process = Process(driver, 0)
        process.memory(memory().buffers, [X.tobytes(), b""], (0, 1))
        first = dataclasses.replace(job("double:20"), pointers=((0, Pointer(0, 0)),), spares=((1, 8),), spare_bytes=108)
        then = dataclasses.replace(job("double:5"), pointers=((1, Pointer(1, 0)),), spares=((0, 8),))
        both = dataclasses.replace(first, then=(then,))
        process.job(0, dataclasses.replace(then, spare_bytes=108))
        (result,) = process.result(0)
        assert np.array_equal(np.frombuffer(result, np.uint8), np.full(100, 2 * 0xFF % 256, np.uint8))
        process.job(1, both)
        (result,) = process.result(1)
        assert np.array_equal(np.frombuffer(result, np.uint8), X * 4)
        one, other = (kernel._bound.launched[-1] for kernel in process._jobs[1].kernels)
        assert one[1] == other[0] and one[1] % ALIGNMENT != 0
        process.job(2, job("double:10"))
        assert process.pairs(2, 1, 2, 100.0) == [(pytest.approx(10.0), pytest.approx(25.0))] * 2
        process.forget(1)
        assert driver.freed == [one[1] - 8]


def test_operands_larger_than_the_cache_have_one_copy() -> None:
    driver = Driver()
    with pretended(driver):
        large = [Buffer(0, 120 * 2**20, True, False), Buffer(2**30, 8, False, True)]
        assert Process(driver, 0).memory(large, [bytes(120 * 2**20), b""], (0, 1)) == 1


# -- the caller's side -------------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
def test_results_and_times(measuring: Measuring) -> None:
    (result,) = measuring.result(0, 30)
    assert np.array_equal(np.frombuffer(result, np.uint8), X * 2)
    assert measuring.pairs(0, 1, 3, 100.0, 30) == [(pytest.approx(20.0), pytest.approx(10.0))] * 3
    (result,) = measuring.result(2, 30)
    assert np.array_equal(np.frombuffer(result, np.uint8), X)


@pytest.mark.kin(1)
@pytest.mark.parametrize(("number", "reason"), [(3, "CUDA_ERROR_ILLEGAL_ADDRESS"), (4, "it did not end within 0.5 s"),
                                                (5, "its process died with status 9")])
def test_a_candidate_that_fails_takes_nothing_with_it(measuring: Measuring, number: int, reason: str) -> None:
    measuring.result(0, 30)
    before = measuring._process.pid
    with pytest.raises(Failed, match=reason):
        measuring.result(number, 0.5 if number == 4 else 30)
    (result,) = measuring.result(0, 30)                       # by another process
    assert np.array_equal(np.frombuffer(result, np.uint8), X * 2) and measuring._process.pid != before
    measuring.forget(0)
    measuring.forget(5)


@pytest.mark.kin(1)
def test_nothing_is_left_behind() -> None:
    with Measuring(memory(), [X.tobytes(), b""], (0, 1), 0, COMMAND) as process:
        process.keep(0, job("double"))
        process.result(0, 30)
        child = process._process
    assert child.returncode is not None and process._requests.closed and process._answers.closed
    process.close()


def test_a_process_that_does_not_start() -> None:
    with Measuring(memory(), [X.tobytes(), b""], (0, 1), 0, (sys.executable, "-c", "1 // 0")) as process:
        process.keep(0, job("double"))
        with pytest.raises(Failed, match=r"its process died with status 1 \(ZeroDivisionError: integer division"):
            process.result(0, 30)


@pytest.mark.kin(1)
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")
def test_no_file_stays_open() -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    for _ in range(2):
        with Measuring(memory(), [X.tobytes(), b""], (0, 1), 0, COMMAND) as process:
            process.keep(0, job("die"))
            with pytest.raises(Failed):
                process.result(0, 30)
    assert opened() == before
