"""This rank's own rows of a reduction: one product, whose epilogue merges what the other ranks' streams push behind flags."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import gemmkit as gk
from gemmkit.distributed.rank_order import InRankOrder, rule_of
from gemmkit.distributed.shards import even_lengths
from gemmkit.emulator import errors
from gemmkit.emulator.streams import Stream, beside
from gemmkit.epilogues import ReLU
from gemmkit.kernels import gated
from gemmkit.kernels.gated import Gated, arrivals
from gemmkit.layouts import RowMajor
from gemmkit.operators import MIN_PLUS, FPUOp
from gemmkit.tiling import Tile
from tests.support.machines import poison, whole
from tests.support.sm90 import F32, mapping

EPOCH, RANKS, OWN, CHUNKS = 9, 3, 1, 2


def by_threads(operator: Any = None) -> gk.Config:
    return gk.get_config(operator=operator or FPUOp(M=16, N=16), global_a_layout=RowMajor(F32), kernel="multistage",
                         block_shape=Tile(M=16, N=16, K=16))


def run(conf: gk.Config, rows: int, rng: np.random.Generator, flag_first: bool = False) -> tuple[np.ndarray, list[np.ndarray]]:
    """D, and each rank's partial sums, of which this rank's are not in memory."""
    columns, depth = 24, 20
    a, b = whole(rng, (rows, depth), conf.global_a_layout.dtype), whole(rng, (depth, columns), conf.global_b_layout.dtype)
    sums = [whole(rng, (rows, columns), F32, 50) for _ in range(RANKS)]
    with gk.emulate():
        sums[OWN] = gk.matmul(a, b, None, conf)
    slot, flags = np.full((RANKS, rows, columns), np.nan, np.float32), np.zeros(CHUNKS * RANKS, np.uint32)
    flags[OWN::RANKS] = EPOCH
    streams, lengths = [], even_lengths(rows, CHUNKS)
    for rank in (0, 2):
        stream, begin = Stream(f"rank {rank}"), 0
        for chunk, length in enumerate(lengths):
            part = slice(begin, begin := begin + length)
            if flag_first:
                stream.write(flags, chunk * RANKS + rank, EPOCH)
            stream.copy(slot[rank, part], sums[rank][part])
            stream.write(flags, chunk * RANKS + rank, EPOCH)
        streams.append(stream)
    table = arrivals(conf.order, lengths, 0, conf.block_shape.size.M, -(-columns // conf.block_shape.size.N))
    table[:, 2:] *= RANKS
    merging = InRankOrder(slot.reshape(-1, columns), rows, rule_of(conf.operator, None), F32, RANKS, travels=F32, own=OWN)
    made = dataclasses.replace(conf, order=Gated(table, flags, OWN, 1000))
    d = poison((rows, columns), F32)
    with gk.emulate(), beside(*streams):
        gk.matmul(a, b, None, made, out=d, epilogue=merging | ReLU())
    return d, sums


@pytest.mark.parametrize("conf, rows", [(mapping, 130), (by_threads, 37)])
def test_sums(conf: Any, rows: int, rng: np.random.Generator) -> None:
    d, sums = run(conf(), rows, rng)
    assert np.array_equal(d, np.maximum(sums[0] + sums[1] + sums[2], 0))


def test_shortest_paths(rng: np.random.Generator) -> None:
    d, sums = run(by_threads(dataclasses.replace(MIN_PLUS, M=16, N=16)), 18, rng)
    assert np.array_equal(d, np.maximum(np.min(sums, axis=0), 0))


@pytest.mark.parametrize("conf, rows", [(mapping, 64), (by_threads, 20)])
def test_faults(conf: Any, rows: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumers read what the producer has waited for: nothing else orders them with the streams."""
    with pytest.raises(errors.RaceError, match=r"rank 0|rank 2|parts"):
        run(conf(), rows, rng, flag_first=True)
    monkeypatch.setattr(gated, "await_flag", lambda *given: None)
    with pytest.raises(errors.RaceError, match=r"rank 0|rank 2|parts"):
        run(conf(), rows, rng)
