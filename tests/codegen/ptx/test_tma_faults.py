"""The faults of kernels that use TMA: reads without waiting, stages given back early, stores without a fence, counts that differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmkit.emulator import errors
from gemmkit.ptx.barriers import mbarrier_arrive, mbarrier_expect, mbarrier_init, mbarrier_wait
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.ptx.tma import tma_commit, tma_load, tma_store, tma_wait, tma_wait_read
from gemmkit.ptx.wgmma import fence_async
from gemmkit.runtime.tensor_maps import TensorMapSpec
from tests.codegen.ptx.test_tma import BARRIERS, F16, SHARED, U32, U64, at, begin, source
from tests.support.harness import Out, Runtime, same_bits
from tests.support.launching import Tensor, emulated

SPEC = TensorMapSpec("f2", (64, 8), 128)


def load_and_read(source: Any, nbytes: int, waits: bool) -> None:
    data, full = shared(U32, 0), shared(U64, BARRIERS)
    data[thread_index()] = np.uint32(0)
    begin(1)
    if thread_index() == 0:
        mbarrier_expect(full, 0, nbytes)
        tma_load(source, (0, 0), data, 0, full, 0)
    if waits:
        mbarrier_wait(full, 0, 0)
    data[thread_index()]


def test_the_kernel_of_these_faults_is_right_without_them() -> None:
    emulated(load_and_read, source(), 1024, True, shared=SHARED)


def test_a_read_without_waiting_is_a_race() -> None:
    for seed in (None, 0, 1):
        with pytest.raises(errors.RaceError, match=r"by TMA of block \(0, 0, 0\)"):
            emulated(load_and_read, source(), 1024, False, shared=SHARED, seed=seed)


def test_waiting_for_one_stage_says_nothing_of_another() -> None:
    def kernel(source: Any) -> None:
        data, full = shared(U32, 0), shared(U64, BARRIERS)
        if thread_index() == 0:
            mbarrier_init(full, 1, 1)
        begin(1)
        if thread_index() == 0:
            for stage in range(2):
                mbarrier_expect(full, stage, 1024)
                tma_load(source, (0, 0), data, 256 * stage, full, stage)
        mbarrier_wait(full, 1, 0)
        data[thread_index()]

    with pytest.raises(errors.RaceError, match="first a write by TMA"):
        emulated(kernel, source(), shared=SHARED)


@pytest.mark.parametrize("nbytes", [1040, 2048])
def test_expecting_too_many_bytes_is_a_deadlock(nbytes: int) -> None:
    with pytest.raises(errors.DeadlockError, match=rf"phase 0 of the mbarrier at offset {BARRIERS}, which lacks 0 of 1 "
                                                   rf"arrivals and {nbytes - 1024} bytes"):
        emulated(load_and_read, source(), nbytes, True, shared=SHARED)


def test_expecting_too_few_bytes_is_a_deadlock() -> None:
    with pytest.raises(errors.DeadlockError, match="-512 bytes"):
        emulated(load_and_read, source(), 512, True, shared=SHARED)


@pytest.mark.parametrize("at, said", [((8, -1), "must not be negative"), ((-8, 0), "must not be negative"),
                                      ((4, 0), "multiple of 16 bytes")])
def test_the_places_that_no_store_can_go_to(at: tuple, said: str) -> None:
    """Illegal instructions on an H100."""
    def kernel(target: Any, x: int, y: int) -> None:
        if thread_index() == 0:
            tma_store(target, (x, y), shared(U32, 0), 0)

    with pytest.raises(errors.ProtocolError, match=said):
        emulated(kernel, Tensor(Out((16, 64), F16), SPEC), *map(Runtime, at), shared=SHARED)


def test_a_store_to_rows_that_end_between_chunks() -> None:
    """On an H100 it writes the rest of the last 16 bytes as well."""
    def kernel(target: Any) -> None:
        if thread_index() == 0:
            tma_store(target, (0, 0), shared(U32, 0), 0)

    narrow = Tensor(Out((1, 60), F16), SPEC)
    with pytest.raises(errors.ProtocolError, match="whose rows have 120 bytes"):
        emulated(kernel, narrow, shared=SHARED)


def test_a_load_from_between_chunks() -> None:
    def kernel(source: Any) -> None:
        begin(1)
        if thread_index() == 0:
            tma_load(source, (1, 0), shared(U32, 0), 0, shared(U64, BARRIERS), 0)

    with pytest.raises(errors.ProtocolError, match="multiple of 16 bytes"):
        emulated(kernel, source(), shared=SHARED)


def ring(source: Any, out: Any, early: bool) -> None:
    """One stage, filled twice; consumers give it back after (or before) they have read it."""
    data, full, empty = shared(U32, 0), shared(U64, BARRIERS), shared(U64, BARRIERS + 8)
    if thread_index() == 0:
        mbarrier_init(empty, 0, 96)
    begin(1)
    for n in range(2):
        if thread_index() < 32:
            if thread_index() == 0:
                mbarrier_wait(empty, 0, 1 - n)
                mbarrier_expect(full, 0, 1024)
                tma_load(source, (0, 8 * n), data, 0, full, 0)
        else:
            mbarrier_wait(full, 0, n)
            if early:
                mbarrier_arrive(empty, 0)
            out[n, thread_index() - 32] = data[thread_index()]
            if not early:
                mbarrier_arrive(empty, 0)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_stage_given_back_too_early_is_a_race(seed: int | None) -> None:
    emulated(ring, source(), Out((2, 96), U32), False, shared=SHARED, seed=seed)
    with pytest.raises(errors.RaceError) as caught:
        emulated(ring, source(), Out((2, 96), U32), True, shared=SHARED, seed=seed)
    assert {access.kind for access in caught.value.accesses} == {"read", "write"}
    assert any("TMA" in str(access.thread) for access in caught.value.accesses)


def write_and_store(target: Any, waits: Any, fenced: bool) -> None:
    """Two tiles from one buffer."""
    data = shared(U32, 0)
    for n in range(2):
        for i in range(2):
            data[thread_index() + 128 * i] = np.uint32(n)
        if fenced:
            fence_async()
        barrier()
        if thread_index() == 0:
            tma_store(target, (0, 8 * n), data, 0)
            tma_commit()
            waits()
        barrier()


def wait_read() -> None:
    tma_wait_read(0)


def wait_too_little() -> None:
    tma_wait_read(1)


def wait_for_all() -> None:
    tma_wait(0)


TARGET = Tensor(Out((16, 64), F16), SPEC)


@pytest.mark.parametrize("waits", [wait_read, wait_for_all])
def test_stores_that_are_awaited(waits: Any) -> None:
    (out,) = emulated(write_and_store, TARGET, waits, True, shared=1024)
    assert same_bits(out.view(U32), np.repeat(np.arange(2, dtype=U32), 8)[:, None] * np.ones(32, U32))


def test_a_buffer_that_is_used_again_before_it_was_read_is_a_race() -> None:
    with pytest.raises(errors.RaceError, match="first a read by TMA"):
        emulated(write_and_store, TARGET, wait_too_little, True, shared=1024)


def test_a_store_without_fence_is_a_fault() -> None:
    with pytest.raises(errors.ProxyError, match="fence_async"):
        emulated(write_and_store, TARGET, wait_read, False, shared=1024)


@pytest.mark.parametrize("commits", [False, True])
def test_a_thread_does_not_end_before_its_stores_have_read(commits: bool) -> None:
    def kernel(target: Any) -> None:
        data = shared(U32, 0)
        for i in range(2):
            data[thread_index() + 128 * i] = np.uint32(1)
        fence_async()
        barrier()
        if thread_index() == 0:
            tma_store(target, (0, 0), data, 0)
            if commits:
                tma_commit()
            else:
                tma_wait_read(0)

    with pytest.raises(errors.ProtocolError, match="may still read shared memory") as caught:
        emulated(kernel, TARGET, shared=1024)
    assert "tma_store(target" in caught.value.kernel_line.text


def store_and_load(target: Any, out: Any, done: bool) -> None:
    """A box goes to the tensor and comes back to another place."""
    data, back, full = shared(U32, 0), shared(U32, 1024), shared(U64, BARRIERS)
    begin(1)
    for i in range(2):
        data[thread_index() + 128 * i] = np.uint32(7)
    fence_async()
    barrier()
    if thread_index() == 0:
        tma_store(target, (0, 0), data, 0)
        tma_commit()
        if done:
            tma_wait(0)
        else:
            tma_wait_read(0)
        mbarrier_expect(full, 0, 1024)
        tma_load(target, (0, 0), back, 0, full, 0)
    mbarrier_wait(full, 0, 0)
    out[thread_index()] = back[thread_index()]


def test_to_have_read_is_not_to_have_written() -> None:
    _, out = emulated(store_and_load, TARGET, Out((128,), U32), True, shared=SHARED)
    assert (out == 7).all()
    with pytest.raises(errors.RaceError, match="first a write by TMA"):
        emulated(store_and_load, TARGET, Out((128,), U32), False, shared=SHARED)


def test_a_box_that_does_not_fit() -> None:
    with pytest.raises(errors.BoundsError, match="1024 bytes at offset 32256"):
        emulated(at(32256 // 4), source(), shared=SHARED)


def test_a_box_begins_at_a_multiple_of_128_bytes() -> None:
    with pytest.raises(errors.AlignmentError, match="64 past a multiple of 128"):
        emulated(at(16), source(), shared=SHARED)


def test_a_copy_to_a_barrier_that_is_not_fenced() -> None:
    def kernel(source: Any) -> None:
        full = shared(U64, BARRIERS)
        if thread_index() == 0:
            mbarrier_init(full, 0, 1)
            tma_load(source, (0, 0), shared(U32, 0), 0, full, 0)

    with pytest.raises(errors.ProtocolError, match="mbarrier_fence_init has not followed"):
        emulated(kernel, source(), shared=SHARED)
