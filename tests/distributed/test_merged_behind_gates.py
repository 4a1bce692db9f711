"""This rank's own rows of a reduction: one product, whose epilogue merges what the other ranks' streams push behind flags."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import gemmkit as gk
from gemmkit.distributed.ranks import InRankOrder, ReductionRule, even_lengths, rule_of, with_own
from gemmkit.emulator import errors
from gemmkit.emulator.agents import Stream, beside
from gemmkit.epilogues import ReLU
from gemmkit.kernels.collectives import batched
from gemmkit.kernels.collectives.batched import Gated, arrivals
from gemmkit.kernels.sm90 import kernel
from gemmkit.layouts import RowMajor
from gemmkit.operators import MIN_PLUS, FPUOp
from gemmkit.plans.ahead import recorded
from gemmkit.tiling import Tile
from tests.support.machines import poison, whole
from tests.support.patches import Seeded
from tests.support.sm90 import F32, mapping

EPOCH, RANKS, OWN, CHUNKS = 9, 3, 1, 2


def by_threads(operator: Any = None) -> gk.Config:
    return gk.get_config(operator=operator or FPUOp(M=16, N=16), global_a_layout=RowMajor(F32), kernel="multistage",
                         block_shape=Tile(M=16, N=16, K=16))


def run(conf: gk.Config, rows: int, rng: np.random.Generator, flag_first: bool = False,
        ranks: int = RANKS, own: int = OWN) -> tuple[np.ndarray, list[np.ndarray]]:
    """D, and each rank's partial sums, of which this rank's are not in memory."""
    columns, depth = 24, 20
    a, b = whole(rng, (rows, depth), conf.global_a_layout.dtype), whole(rng, (depth, columns), conf.global_b_layout.dtype)
    sums = [whole(rng, (rows, columns), F32, 50) for _ in range(ranks)]
    with gk.emulate():
        sums[own] = gk.matmul(a, b, None, conf)
    slot, flags = np.full((ranks, rows, columns), np.nan, np.float32), np.zeros(CHUNKS * ranks, np.uint32)
    flags[own::ranks] = EPOCH
    streams, lengths = [], even_lengths(rows, CHUNKS)
    for rank in (one for one in range(ranks) if one != own):
        stream, begin = Stream(f"rank {rank}"), 0
        for chunk, length in enumerate(lengths):
            part = slice(begin, begin := begin + length)
            if flag_first:
                stream.write(flags, chunk * ranks + rank, EPOCH)
            stream.copy(slot[rank, part], sums[rank][part])
            stream.write(flags, chunk * ranks + rank, EPOCH)
        streams.append(stream)
    table = arrivals(conf.order, lengths, 0, conf.block_shape.size.M, -(-columns // conf.block_shape.size.N))
    table[:, 2:] *= ranks
    merging = InRankOrder(slot.reshape(-1, columns), rows, rule_of(conf.operator, None), F32, ranks, travels=F32, own=own)
    made = dataclasses.replace(conf, order=Gated(table, flags, own, 1000, True))
    d = poison((rows, columns), F32)
    with gk.emulate(), beside(*streams):
        gk.matmul(a, b, None, made, out=d, epilogue=merging | ReLU())
    return d, sums


@pytest.mark.parametrize("ranks, own", [(3, 1), (5, 4), (8, 0)])
@pytest.mark.parametrize("conf, rows", [(mapping, 130), (by_threads, 37)])
@pytest.mark.sample(3)
def test_sums(conf: Any, rows: int, ranks: int, own: int, rng: np.random.Generator) -> None:
    d, sums = run(conf(), rows, rng, ranks=ranks, own=own)
    assert np.array_equal(d, np.maximum(sum(sums[1:], sums[0]), 0))


def test_shortest_paths(rng: np.random.Generator) -> None:
    d, sums = run(by_threads(dataclasses.replace(MIN_PLUS, M=16, N=16)), 18, rng)
    assert np.array_equal(d, np.maximum(np.min(sums, axis=0), 0))


# -- two ranks: the other's sums come ahead of time -----------------------------------------------------------------------

def of_two(conf: gk.Config, rows: int, columns: int, own: int, rng: np.random.Generator, seed: int | None = None,
           flag_first: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """D, and what it is to be. The other rank pushes its sums in two chunks."""
    a, b = whole(rng, (rows, 20), conf.global_a_layout.dtype), whole(rng, (20, columns), conf.global_b_layout.dtype)
    sums, slot = whole(rng, (rows, columns), F32, 50), np.full((2, rows, columns), np.nan, np.float32)
    flags, lengths, stream, begin = np.zeros(2 * CHUNKS, np.uint32), even_lengths(rows, CHUNKS), Stream("the other"), 0
    flags[own::2] = EPOCH
    for chunk, length in enumerate(lengths):
        part, flag = slice(begin, begin := begin + length), (flags, 2 * chunk + 1 - own, EPOCH)
        if flag_first:
            stream.write(*flag)
        stream.copy(slot[1 - own, part], sums[part])
        stream.write(*flag)
    scheduler: Any = conf.spec().scheduler
    table = arrivals(conf.order, lengths, 0, conf.block_shape.size.M * scheduler.cluster.m,
                     -(-columns // (conf.block_shape.size.N * scheduler.cluster.n)))
    table[:, 2:] *= 2
    how = ReductionRule(F32, F32, rule_of(conf.operator, None), F32)
    given = with_own(Slot(slot), how, own, dict(epilogue=ReLU()))
    made = dataclasses.replace(conf, order=Gated(table, flags, own, 1000, True))
    d = poison((rows, columns), F32)
    with gk.emulate(seed), beside(stream):
        gk.matmul(a, b, None, made, out=d, **given)
    return d, np.maximum(a.astype("f8") @ b + sums, 0)


class Slot:
    """Both ranks' sums, as much of a tensor as `with_own` asks for."""

    is_cuda = True                                           # an array is taken as it is

    def __init__(self, sums: np.ndarray):
        self.sums, self.shape = sums, sums.shape

    def __getitem__(self, rank: int) -> Any:
        return self.sums[rank].view(Taken)


class Taken(np.ndarray):
    is_cuda = True


@pytest.mark.parametrize("name", ["one", "pingpong", "one-2x1"])
@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.sample(2)
def test_two_ranks(name: str, own: int, rng: np.random.Generator) -> None:
    d, expected = of_two(mapping(name), 130, 72, own, rng)
    assert np.array_equal(d, expected)


def test_the_other_ranks_sums_come_ahead_of_time(rng: np.random.Generator) -> None:
    slot = np.zeros((2, 64, 64), np.float32)
    given = with_own(Slot(slot), ReductionRule(F32, F32, rule_of(mapping().operator, None), F32), 0, {})
    a, b = np.zeros((64, 16), mapping().global_a_layout.dtype), np.zeros((16, 64), mapping().global_b_layout.dtype)
    (found,) = recorded(lambda: gk.matmul(a, b, None, mapping(), out=np.zeros((64, 64), F32), **given))
    assert found.spec.store.reads_ahead


def test_a_tile_is_multiplied_before_its_sums_are_awaited(rng: np.random.Generator, replaced: Seeded) -> None:
    """The producer waits for none of them, and a consumer when it has multiplied."""
    said: list[str] = []
    for name in ("multiply_tile", "await_tile"):
        real = getattr(kernel, name)
        replaced(kernel, name, lambda *given, real=real, name=name: said.append(name) or real(*given))
    d, expected = of_two(mapping(), 70, 40, 1, rng)
    assert np.array_equal(d, expected) and said.index("multiply_tile") < said.index("await_tile")


def test_faults_of_two(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, seeded: Seeded) -> None:
    """TMA reads what the consumer's thread has waited for, behind a fence."""
    with pytest.raises(errors.RaceError, match=r"the other"):
        of_two(mapping(), 128, 64, 1, rng, flag_first=True)
    with monkeypatch.context() as patch, pytest.raises(errors.RaceError, match=r"the other"):
        patch.setattr(kernel, "await_tile", lambda spec, tile, opened: opened)
        of_two(mapping(), 128, 64, 1, rng)
    seeded(kernel, "fence_async_global", lambda: None)
    with pytest.raises(errors.ProxyError):
        of_two(mapping(), 128, 64, 1, rng)


@pytest.mark.parametrize("conf, rows", [(mapping, 64), (by_threads, 20)])
def test_faults(conf: Any, rows: int, rng: np.random.Generator, seeded: Seeded) -> None:
    """The consumers read what the producer has waited for: nothing else orders them with the streams."""
    with pytest.raises(errors.RaceError, match=r"rank 0|rank 2|parts"):
        run(conf(), rows, rng, flag_first=True)
    seeded(batched, "await_flag", lambda *given: None)
    with pytest.raises(errors.RaceError, match=r"rank 0|rank 2|parts"):
        run(conf(), rows, rng)
