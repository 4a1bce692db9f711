"""Products whose operand arrives while the kernel runs: from a stream beside it, in the order of ranks, behind flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.emulator.agents import Stream, beside
from gemmkit.kernels.collectives import batched
from gemmkit.kernels.collectives.batched import Gated, arrivals
from gemmkit.kernels.collectives.scheduler import Grouped, Hilbert
from gemmkit.kernels.sm90 import kernel as producer
from gemmkit.layouts import RowMajor
from gemmkit.operators import MIN_PLUS, FPUOp
from gemmkit.plans.ahead import compile_config
from gemmkit.ptx import barriers as flags_of_ptx
from gemmkit.tiling import Tile
from tests.support.machines import poison, whole
from tests.support.patches import Seeded
from tests.support.sm90 import F32, mapping

EPOCH = 2**32 - 2                                        # as large as a flag can be
PATIENCE = 1000


def threads(kernel: str, operator: Any = None) -> gk.Config:
    return gk.get_config(operator=operator or FPUOp(M=16, N=16), global_a_layout=RowMajor(F32), kernel=kernel,
                         block_shape=Tile(M=16, N=16, K=16))


CONFIGURATIONS: dict[str, Callable[[], gk.Config]] = {
    "tensor cores": mapping,
    "ping-pong": lambda: mapping("pingpong"),
    "cluster": lambda: mapping("one-2x1", depth=16),
    "transformed": lambda: mapping(transform_global_to_shared_a=gk.transforms.Map(lambda x: x + x)),
    "multistage": lambda: threads("multistage"),
    "singlestage": lambda: threads("singlestage"),
}


class Rank:
    """What a rank has: the gathered A, of which its own rows are there and the others hold an earlier call's; flags."""

    def __init__(self, conf: gk.Config, a: np.ndarray, lengths: tuple[int, ...], rank: int, columns: int):
        self.a = np.full_like(a, np.nan)
        self.flags = np.full(len(lengths), EPOCH - 2, np.uint32)       # the epoch of the buffer's call before
        self.ends = np.cumsum((0, *lengths))
        self.shards = [a[i:j] for i, j in zip(self.ends, self.ends[1:])]
        self.rank, self.lengths = rank, lengths
        self.rows(rank)[:] = self.shards[rank]
        self.flags[rank] = EPOCH
        tiles = -(-columns // (conf.block_shape.size.N * conf.cluster.size.N))
        table = arrivals(conf.order, lengths, rank, conf.block_shape.size.M * conf.cluster.size.M, tiles)
        self.conf = dataclasses.replace(conf, order=Gated(table, self.flags, rank, PATIENCE))

    def rows(self, rank: int) -> np.ndarray:
        return self.a[self.ends[rank]:self.ends[rank + 1]]

    def pushes(self, epoch: int = EPOCH, flag_first: bool = False) -> list[Stream]:
        """The other ranks' streams: the data, and the flag behind it."""
        streams = []
        for step in range(1, len(self.lengths)):
            source = (self.rank + step) % len(self.lengths)
            stream = Stream(f"rank {source}")
            if flag_first:
                stream.write(self.flags, source, epoch)
            stream.copy(self.rows(source), self.shards[source])
            if not flag_first:
                stream.write(self.flags, source, epoch)
            streams.append(stream)
        return streams


def run(conf: gk.Config, lengths: tuple[int, ...], rank: int, rng: np.random.Generator, columns: int = 37, depth: int = 40,
        seed: int | None = None, apart: bool = False, **how: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, B and D; ``apart``: the rank's own rows are not in the buffer, but joined with it."""
    dtype = conf.global_a_layout.dtype
    a, b = whole(rng, (sum(lengths), depth), dtype), whole(rng, (depth, columns), dtype)
    own = Rank(conf, a, lengths, rank, columns)
    d = poison((sum(lengths), columns), conf.global_d_layout.dtype)
    given: Any = own.a
    if apart:
        own.rows(rank)[:] = np.nan
        runs = own.a[:own.ends[rank]], own.shards[rank], own.a[own.ends[rank + 1]:]
        given = gk.layouts.Concat(*(part for part in runs if len(part)), axis=0)
    with gk.emulate(seed), beside(*own.pushes(**how)):
        gk.matmul(given, b, None, own.conf, out=d)
    return a, b, d


# -- the order --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("order", [Grouped(2), Hilbert()], ids=repr)
@pytest.mark.parametrize("lengths", [(64, 64), (5, 0, 77, 3), (0, 1), (130, 1, 1), (16, 16, 16)], ids=str)
def test_every_tile_once_and_own_rows_first(order: Any, lengths: tuple[int, ...]) -> None:
    for rank in range(len(lengths)):
        table = arrivals(order, lengths, rank, 16, 3)
        rows = -(-sum(lengths) // 16)
        assert sorted((i, j) for i, j, _, _ in table.tolist()) == [(i, j) for i in range(rows) for j in range(3)]
        ends = np.cumsum(lengths)
        turns = []
        for row, _, first, end in table.tolist():
            reads = [s for s in range(len(lengths)) if lengths[s] and ends[s] - lengths[s] < 16 * row + 16 and ends[s] > 16 * row]
            assert set(reads) <= set(range(first, end)) and {first, end - 1} <= set(reads)
            turns.append(max((s - rank) % len(lengths) for s in range(first, end)))
        assert turns == sorted(turns)


def test_no_rows() -> None:
    assert arrivals(Grouped(2), (0, 0), 1, 16, 3).shape == (0, 4)


# -- results ----------------------------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(10)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("lengths", [(64, 64), (70, 9)], ids=str)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_two_ranks(name: str, lengths: tuple[int, int], rank: int, rng: np.random.Generator) -> None:
    if name.endswith("stage"):
        lengths = lengths[0] // 4, lengths[1] // 4
    a, b, d = run(CONFIGURATIONS[name](), lengths, rank, rng)
    assert np.array_equal(d, (a.astype("f8") @ b) * (2 if name == "transformed" else 1))


@pytest.mark.kin(5)
@pytest.mark.parametrize("name, rank", [("tensor cores", 0), ("ping-pong", 1), ("cluster", 2), ("multistage", 1)])
def test_own_rows_elsewhere(name: str, rank: int, rng: np.random.Generator) -> None:
    """As `gemmkit.distributed` has it: this rank's rows are where the caller has them, the others' in the slot."""
    lengths = (16, 32, 16) if name == "multistage" else (64, 128, 64)
    a, b, d = run(CONFIGURATIONS[name](), lengths, rank, rng, apart=True)
    assert np.array_equal(d, a.astype("f8") @ b)


@pytest.mark.kin(5)
def test_three_ranks_in_any_order_of_threads(rng: np.random.Generator) -> None:
    a, b, d = run(threads("multistage"), (17, 0, 14), 2, rng, seed=5)
    assert np.array_equal(d, a.astype("f8") @ b)


def test_shortest_paths(rng: np.random.Generator) -> None:
    a, b, d = run(threads("multistage", dataclasses.replace(MIN_PLUS, M=16, N=16)), (9, 20), 0, rng, columns=5, depth=7)
    assert np.array_equal(d, (a[:, :, None] + b[None]).min(1))


# -- faults: each is found ---------------------------------------------------------------------------------------------

KERNELS = pytest.mark.parametrize("name, lengths", [("tensor cores", (64, 64)), ("multistage", (16, 16))])


@pytest.mark.kin(5)
@KERNELS
def test_a_flag_before_the_data(name: str, lengths: Any, rng: np.random.Generator) -> None:
    with pytest.raises(errors.RaceError, match="rank 1"):
        run(CONFIGURATIONS[name](), lengths, 0, rng, flag_first=True)


@KERNELS
def test_no_wait(name: str, lengths: Any, rng: np.random.Generator, seeded: Seeded) -> None:
    seeded(batched, "await_flag", lambda *given: None)
    with pytest.raises(errors.RaceError, match="rank 1"):
        run(CONFIGURATIONS[name](), lengths, 0, rng)


@pytest.mark.kin(5)
@KERNELS
def test_a_stale_epoch(name: str, lengths: Any, rng: np.random.Generator, seeded: Seeded) -> None:
    """A kernel that takes the flag of the buffer's last call for this one's; and a flag that is not this call's."""
    real = flags_of_ptx.await_flag
    with pytest.raises(errors.DeadlockError, match=f"a flag that is {EPOCH - 1} to become {EPOCH}"):
        run(CONFIGURATIONS[name](), lengths, 0, rng, epoch=EPOCH - 1)
    seeded(batched, "await_flag",
                        lambda flags, at, epoch, patience: real(flags, at, EPOCH if at == 0 else EPOCH - 2, patience))
    with pytest.raises(errors.RaceError, match="rank 1"):
        run(CONFIGURATIONS[name](), lengths, 0, rng)


def test_no_fence_before_tma(rng: np.random.Generator, seeded: Seeded) -> None:
    seeded(producer, "fence_async_global", lambda: None)
    with pytest.raises(errors.ProxyError):
        run(mapping(), (64, 64), 0, rng)


# -- on a GPU -----------------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tensor cores", "ping-pong", "cluster", "multistage", "singlestage"])
def test_rows_that_a_copy_engine_brings(name: str, rng: np.random.Generator) -> None:
    """From pinned memory, by a second stream, behind the launch: changing inputs, two slots in turn."""
    import cupy

    from gemmkit.runtime.device import write_value

    conf, (own, other), columns, depth = CONFIGURATIONS[name](), (70, 60), 40, 48
    dtype = conf.global_a_layout.dtype
    b = whole(rng, (depth, columns), dtype)
    of_b, out = cupy.asarray(b), cupy.full((own + other, columns), cupy.nan, conf.global_d_layout.dtype)
    slots = [cupy.full((own + other, depth), cupy.nan, dtype) for _ in range(2)]
    flags = [cupy.zeros(2, cupy.uint32) for _ in range(2)]
    tile = conf.block_shape.size.M * conf.cluster.size.M
    across = -(-columns // (conf.block_shape.size.N * conf.cluster.size.N))
    table = cupy.asarray(arrivals(conf.order, (own, other), 0, tile, across))
    push, main = cupy.cuda.Stream(non_blocking=True), cupy.cuda.get_current_stream()
    for epoch in range(1, 13):
        a, slot, flag = whole(rng, (own + other, depth), dtype), slots[epoch % 2], flags[epoch % 2]
        held = cupy.cuda.alloc_pinned_memory(other * depth * dtype.itemsize)
        pinned = np.frombuffer(held, dtype, other * depth).reshape(other, depth)
        pinned[...] = a[own:]
        slot[:own] = cupy.asarray(a[:own])
        write_value(main.ptr, flag.data.ptr, epoch)
        gk.matmul(slot, of_b, None, conf, out=out, order=Gated(table, flag, 0, PATIENCE))
        to = slot.data.ptr + own * depth * dtype.itemsize
        cupy.cuda.runtime.memcpyAsync(to, pinned.ctypes.data, pinned.nbytes, cupy.cuda.runtime.memcpyHostToDevice, push.ptr)
        write_value(push.ptr, flag.data.ptr + 4, epoch)
        assert np.array_equal(out.get(), a.astype("f8") @ b), epoch


# -- compiled ---------------------------------------------------------------------------------------------------------

@pytest.mark.sample(2)
@pytest.mark.kin(5)
@pytest.mark.compile
@pytest.mark.parametrize("name", ["tensor cores", "multistage"])
def test_instructions(name: str) -> None:
    conf = CONFIGURATIONS[name]()
    flags, table = np.zeros(2, np.uint32), np.zeros((1, 4), np.int32)
    found = compile_config(dataclasses.replace(conf, order=Gated(table, flags, 0, PATIENCE)))
    assert "ld.acquire.sys.global.u32" in found.ptx and "trap" in found.ptx
    assert ("fence.proxy.async.global" in found.ptx) == (name == "tensor cores")
    assert found.usage.spill_stores == found.usage.spill_loads == 0


@pytest.mark.kin(5)
@pytest.mark.compile
def test_no_gate_no_instructions() -> None:
    ptx = compile_config(mapping()).ptx
    assert "ld.acquire.sys" not in ptx and "trap" not in ptx and "fence.proxy.async.global" not in ptx
