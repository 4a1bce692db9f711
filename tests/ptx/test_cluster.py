"""Loads from and stores to the shared memory of another block of the cluster: in the emulator, as instructions, and on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.lang.registers import generate
from gemmkit.ptx.barriers import (
    cluster_barrier,
    cluster_rank,
    cluster_size,
    load_shared_of,
    mbarrier_expect,
    mbarrier_fence_init,
    mbarrier_init,
    mbarrier_wait,
    store_async,
)
from gemmkit.ptx.memory import load_global, load_shared, shared, store_global, store_shared
from gemmkit.ptx.special import barrier, block_x, thread_index
from gemmkit.runtime.compile import assemble
from tests.support.harness import Out, leaves_nothing, lines_with, same_bits
from tests.support.launching import compiled, emulated, on_device

BF16 = np.dtype(ml_dtypes.bfloat16)
WIDTHS = [(np.dtype(d), n) for d in ("i1", "f2", BF16, "i4", "f4", "f8", "c8") for n in (1, 2, 4, 8, 16)
          if 4 <= np.dtype(d).itemsize * n <= 32]
every_width = pytest.mark.parametrize("dtype, count", WIDTHS, ids=[f"{d}x{n}" for d, n in WIDTHS])


@dataclass(frozen=True)
class Access(gk.Component):
    """Each thread's elements; what is left out of the protocol, and how far from its place a load is."""

    dtype: Any
    count: int
    meets: bool = True
    stays: bool = True
    beyond: int = 0
    askew: int = 0


def fetch(out: Any, a: Any, access: Any) -> None:
    """Every block puts its line into shared memory; each then takes the line of the next, the threads in reverse order."""
    pointer, count, threads = shared(access.dtype, 64), access.count, 32
    place = (block_x() * threads + thread_index()) * count
    store_shared(pointer, thread_index() * count, 0, load_global(a, 0, (place,), (0,), count))
    if access.meets:
        cluster_barrier()
    rank = (cluster_rank() + 1) % cluster_size() + access.beyond
    values = load_shared_of(rank, pointer, (15 - thread_index() % 16) * count + access.askew, 16 * count, count)
    if access.stays:
        cluster_barrier()
    store_global(out, 0, (place,), (0,), values)


def lines(dtype: np.dtype, count: int, blocks: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What the blocks have, and what they then get."""
    a = rng.integers(-100, 100, (blocks, 32, count)).astype(dtype)
    got = np.roll(a, -1, axis=0)[:, 16 + 15 - np.arange(32) % 16]
    return a.reshape(-1), got.reshape(-1)


@every_width
def test_a_line_of_the_next_block(dtype: np.dtype, count: int, rng: np.random.Generator) -> None:
    a, expected = lines(dtype, count, 4, rng)
    (out,) = emulated(fetch, Out(a.shape, dtype), a, Access(dtype, count), threads=32, shared=64 + a.nbytes // 4, blocks=4,
                      cluster=4)
    assert np.array_equal(out, expected)


@pytest.mark.sample(5)
@every_width
def test_the_instructions(dtype: np.dtype, count: int) -> None:
    """As wide as 16 bytes, nothing of it in local memory, and one address for all of a thread's loads."""
    a = np.zeros(32 * count, dtype)
    ptx = compiled(fetch, Out(a.shape, dtype), a, Access(dtype, count), threads=32)
    nbytes = count * dtype.itemsize
    words = min(16, nbytes) // 4
    loads = lines_with(ptx, "ld.shared::cluster")
    assert len(loads) == nbytes // (4 * words)
    assert all(line.startswith("ld.shared::cluster" + (f".v{words}" if words > 1 else "") + ".b32") for line in loads)
    assert len(lines_with(ptx, "mapa.shared::cluster.u32")) == 1
    assert leaves_nothing(ptx)
    assert assemble(ptx).usage.spill_stores == 0


@pytest.mark.gpu
@pytest.mark.sample(8)
@every_width
def test_a_line_of_the_next_block_on_hardware(dtype: np.dtype, count: int, rng: np.random.Generator) -> None:
    a, expected = lines(dtype, count, 4, rng)
    (out,) = on_device(fetch, Out(a.shape, dtype), a, Access(dtype, count), threads=32, shared=64 + a.nbytes // 4, blocks=4,
                       cluster=4)
    assert same_bits(out.view(np.uint8), expected.view(np.uint8))


FOUR = np.dtype("f4"), 4


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(("fault", "error", "message"), [
    (dict(meets=False), (errors.RaceError, errors.UninitialisedRead), "race in|nothing has written"),
    (dict(stays=False), errors.ProtocolError, "block .* of the cluster (ends|has ended)"),
    (dict(beyond=2), errors.ProtocolError, "no block of rank 2; it has 2|no block of rank 3; it has 2"),
    (dict(askew=1), errors.AlignmentError, "4 past a multiple of 16")])
def test_what_is_against_the_rules(fault: dict, error: Any, message: str, seed: int | None, rng: np.random.Generator) -> None:
    a, _ = lines(*FOUR, 2, rng)
    with pytest.raises(error, match=message):
        emulated(fetch, Out(a.shape, FOUR[0]), a, Access(*FOUR, **fault), threads=32, shared=64 + a.nbytes // 2, blocks=2,
                 cluster=2, seed=seed)


def linger(out: Any, waits: int) -> None:
    """Block 0 reads block 1, whose threads wait for theirs alone; one of them has met the reader."""
    pointer = shared(np.dtype("u4"), 0)
    pointer[thread_index()] = np.uint32(thread_index())
    cluster_barrier()
    if cluster_rank() == 0:
        out[thread_index()] = load_shared_of(1, pointer, thread_index(), 0, 1)[0]
    generate(waits, step)
    if cluster_rank() == 0 or thread_index() < 32:
        cluster_barrier()


def step(n: int) -> int:
    barrier()
    return n


@pytest.mark.parametrize("waits", [0, 2])
def test_one_warp_that_stays_is_enough(waits: int) -> None:
    """Shared memory lasts as long as any thread of the block."""
    (out,) = emulated(linger, Out((64,), "u4"), waits, threads=64, shared=256, blocks=2, cluster=2)
    assert np.array_equal(out, np.arange(64))


# -- stores that are counted ---------------------------------------------------------------------------------------------

SENT = [(np.dtype(d), n) for d, n in (("f4", 1), ("i4", 2), ("f4", 4), ("f8", 1), ("f8", 2), ("u8", 1))]
every_sent = pytest.mark.parametrize("dtype, count", SENT, ids=[f"{d}x{n}" for d, n in SENT])
U64 = np.dtype(np.uint64)


def pass_on(out: Any, a: Any, access: Any) -> None:
    """Every block sends its line to the next one, its threads in reverse order."""
    pointer, count, threads, barriers = shared(access.dtype, 64), access.count, 32, shared(U64, 0)
    if thread_index() == 0:
        mbarrier_init(barriers, 1, 1)
        mbarrier_fence_init()
    cluster_barrier()
    if thread_index() == 0:
        mbarrier_expect(barriers, 1, access.nbytes)
    place = block_x() * threads * count
    values = load_global(a, 0, (place + thread_index() * count,), (0,), count)
    store_async(pointer, (31 - thread_index()) * count, values, barriers, 1, (cluster_rank() + 1) % cluster_size())
    mbarrier_wait(barriers, 1, 0)
    store_global(out, 0, (place + thread_index() * count,), (0,), load_shared(pointer, thread_index() * count, 0, count))


@dataclass(frozen=True)
class Sent(gk.Component):
    dtype: Any
    count: int
    nbytes: int


def passed_on(dtype: np.dtype, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, Sent]:
    a = rng.integers(0, 100, (4, 32, count)).astype(dtype)
    return a.reshape(-1), np.roll(a, 1, axis=0)[:, ::-1].reshape(-1), Sent(dtype, count, 32 * count * dtype.itemsize)


@every_sent
def test_stores_into_the_next_block(dtype: np.dtype, count: int, rng: np.random.Generator) -> None:
    a, expected, sent = passed_on(dtype, count, rng)
    (out,) = emulated(pass_on, Out(a.shape, dtype), a, sent, threads=32, shared=64 + sent.nbytes, blocks=4, cluster=4)
    assert np.array_equal(out, expected)


@every_sent
def test_stores_are_one_instruction(dtype: np.dtype, count: int) -> None:
    a = np.zeros(32 * count, dtype)
    ptx = compiled(pass_on, Out(a.shape, dtype), a, Sent(dtype, count, 32 * count * dtype.itemsize), threads=32)
    words = count * dtype.itemsize // 4
    (line,) = lines_with(ptx, "st.async")
    assert f"complete_tx::bytes{'' if words == 1 else f'.v{words}'}.b32" in line and leaves_nothing(ptx)
    assert assemble(ptx).usage.spill_stores == 0


@pytest.mark.gpu
@every_sent
def test_stores_into_the_next_block_on_hardware(dtype: np.dtype, count: int, rng: np.random.Generator) -> None:
    a, expected, sent = passed_on(dtype, count, rng)
    (out,) = on_device(pass_on, Out(a.shape, dtype), a, sent, threads=32, shared=64 + sent.nbytes, blocks=4, cluster=4)
    assert same_bits(out.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(("dtype", "count"), [(np.dtype("f2"), 2), (np.dtype("f8"), 4), (np.dtype("f4"), 3)])
def test_other_sizes_are_not_sent(dtype: np.dtype, count: int) -> None:
    a = np.zeros(32 * count, dtype)
    with pytest.raises(Exception, match="No implementation of function.*store_async"):
        compiled(pass_on, Out(a.shape, dtype), a, Sent(dtype, count, 32 * count * dtype.itemsize), threads=32)
