"""cp.async: copies of 4, 8 and 16 bytes, zeros in place of what is not there, and who is told of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmkit.emulator import errors
from gemmkit.ptx.barriers import mbarrier_arrive, mbarrier_init, mbarrier_wait
from gemmkit.ptx.copy_async import copies_arrive, copy_async, copy_async_clipped, offset_of
from gemmkit.ptx.memory import load_shared, shared
from gemmkit.ptx.special import barrier, thread_index
from tests.support.harness import Out, same_bits
from tests.support.launching import compiled, emulated, on_device

U32, U64, F16 = np.dtype("u4"), np.dtype("u8"), np.dtype("f2")
BARRIERS, SHARED = 4096, 4160
SOURCE = np.arange(40 * 24, dtype=F16).reshape(40, 24)


def gathered(source: Any, out: Any, count: int, column: int, rows: int, tells: bool) -> None:
    """Threads copy ``count`` neighbours of rows 3, 4, ..., from ``column`` on, to shared memory; those from ``rows`` on have none."""
    data, full = shared(F16, 0), shared(U64, BARRIERS)
    thread = thread_index()
    if thread == 0:
        mbarrier_init(full, 0, 32)
    barrier()
    where = offset_of(source, (thread + 3, 0)) + offset_of(source, (0, column))
    copy_async(data, thread * 8, 0, source, where, count, thread < rows)
    if tells:
        copies_arrive(full, 0)
    else:
        mbarrier_arrive(full, 0)
    mbarrier_wait(full, 0, 0)
    for n in range(count):
        out[thread, n] = load_shared(data, thread * 8, n, 1)[0]


def expected(count: int, rows: int) -> np.ndarray:
    taken = SOURCE[3:35, 8:8 + count].copy()
    taken[rows:] = 0
    return taken


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("rows", [0, 13, 32])
def test_copies(count: int, rows: int) -> None:
    (out,) = emulated(gathered, SOURCE, Out((32, count), F16), count, 8, rows, True, threads=32, shared=SHARED)
    assert same_bits(out, expected(count, rows))


@pytest.mark.gpu
@pytest.mark.sample(4)
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("rows", [0, 13, 32])
def test_copies_on_hardware(count: int, rows: int) -> None:
    (out,) = on_device(gathered, SOURCE, Out((32, count), F16), count, 8, rows, True, threads=32, shared=SHARED)
    assert same_bits(out, expected(count, rows))


def clipped(source: Any, out: Any, count: int, end: int) -> None:
    """Thread t copies ``count`` neighbours of row t, from column 8 on, of which those in front of column ``end`` are there."""
    data, full = shared(F16, 0), shared(U64, BARRIERS)
    thread = thread_index()
    if thread == 0:
        mbarrier_init(full, 0, 32)
    barrier()
    there = max(min(end + thread % 4 - 8, count), 0)
    copy_async_clipped(data, thread * 8, 0, source, offset_of(source, (thread, 8)), count, there)
    copies_arrive(full, 0)
    mbarrier_wait(full, 0, 0)
    for n in range(count):
        out[thread, n] = load_shared(data, thread * 8, n, 1)[0]


def expected_clipped(count: int, end: int) -> np.ndarray:
    ends = end + np.arange(32)[:, None] % 4
    return np.where(np.arange(8, 8 + count) < ends, SOURCE[:32, 8:8 + count], 0).astype(F16)


@pytest.mark.parametrize("count, end", [(2, 8), (4, 9), (8, 5), (8, 12), (8, 20)])
def test_copies_that_end_within(count: int, end: int) -> None:
    (out,) = emulated(clipped, SOURCE, Out((32, count), F16), count, end, threads=32, shared=SHARED)
    assert same_bits(out, expected_clipped(count, end))


@pytest.mark.gpu
@pytest.mark.parametrize("count, end", [(2, 8), (4, 9), (8, 5), (8, 12), (8, 20)])
def test_copies_that_end_within_on_hardware(count: int, end: int) -> None:
    (out,) = on_device(clipped, SOURCE, Out((32, count), F16), count, end, threads=32, shared=SHARED)
    assert same_bits(out, expected_clipped(count, end))


@pytest.mark.compile
def test_the_instruction_of_copies_that_end_within() -> None:
    ptx = compiled(clipped, SOURCE, Out((32, 8), F16), 8, 12, threads=32)
    assert "cp.async.cg.shared.global.L2::128B [" in ptx and "], 16, %r" in ptx


@pytest.mark.compile
@pytest.mark.parametrize("count, text", [(2, "cp.async.ca.shared.global"), (8, "cp.async.cg.shared.global")])
def test_the_instruction(count: int, text: str) -> None:
    ptx = compiled(gathered, SOURCE, Out((32, count), F16), count, 8, 32, True, threads=32)
    assert text in ptx and f", {2 * count}, " in ptx and "cp.async.mbarrier.arrive.noinc.shared.b64" in ptx


def test_what_is_not_there_is_not_looked_at() -> None:
    """Row 40 and those behind it are outside the array; asked for, they are an error, and else not."""
    emulated(gathered, SOURCE[:20], Out((32, 8), F16), 8, 8, 17, True, threads=32, shared=SHARED)
    with pytest.raises(errors.BoundsError):
        emulated(gathered, SOURCE[:20].copy(), Out((32, 8), F16), 8, 8, 18, True, threads=32, shared=SHARED)


def test_an_ordinary_arrival_does_not_wait_for_copies() -> None:
    with pytest.raises(errors.ProtocolError, match="copies_arrive"):
        emulated(gathered, SOURCE, Out((32, 8), F16), 8, 8, 32, False, threads=32, shared=SHARED)


def test_copies_are_aligned() -> None:
    with pytest.raises(errors.AlignmentError):
        emulated(gathered, SOURCE, Out((32, 8), F16), 8, 7, 32, True, threads=32, shared=SHARED)
