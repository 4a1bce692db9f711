"""C, or an array that the epilogue reads, is D itself: what lies out of range reads nothing that others store.

A fragment out of range was computed as if it were the nearest in range, which another consumer stores: the emulator calls
that a race (it did until this file; a value that is not stored could not be wrong).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.emulator.errors import DeadlockError, ProtocolError, RaceError
from gemmkit.kernels.sm90 import epilogue_load, store
from gemmkit.layouts import RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.device import H100, assumed
from gemmkit.tiling import Tile
from tests.support.machines import on_machines
from tests.support.sm90 import F16, F32, mapping


def whole(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(dtype)


def in_place(machine: Any, conf: gk.Config, a: np.ndarray, b: np.ndarray, c: np.ndarray, how: str) -> None:
    """D = C is A B + C, or 2 A B + C / 2."""
    out = machine.array(c)
    with machine.session():
        of_a, of_b = machine.array(a), machine.array(b)
        if how == "c":
            gk.matmul(of_a, of_b, out, conf=conf, out=out)
        elif how == "residual":
            gk.matmul(of_a, of_b, conf=conf, out=out, epilogue=epilogues.Residual(out))
        else:
            linear = epilogues.LinearCombination(2.0, 0.5, out, conf.global_d_layout)
            gk.matmul(of_a, of_b, conf=conf, out=out, epilogue=linear)
    alpha, beta = (2.0, 0.5) if how == "linear combination" else (1.0, 1.0)
    expected = alpha * (a.astype(F32) @ b.astype(F32)) + beta * c.astype(F32)
    assert np.array_equal(machine.numpy(out), expected.astype(c.dtype))


HOWS = "c", "residual", "linear combination"


@pytest.mark.kin(3)
@pytest.mark.sample(30)
@on_machines
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("schedule", "sizes"), [("one", (50, 40, 72)), ("two", (50, 36, 72)), ("two", (150, 40, 64)),
                                                 ("pingpong", (70, 37, 80)), ("pingpong", (150, 40, 64))], ids=str)
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_edges(machine: Any, schedule: str, sizes: tuple[int, int, int], dtype: Any, how: str, rng: np.random.Generator) -> None:
    m, n, k = sizes
    conf = mapping(schedule, d=RowMajor(dtype))
    in_place(machine, conf, whole(rng, (m, k), F16), whole(rng, (k, n), F16), whole(rng, (m, n), dtype), how)


@pytest.mark.kin(3)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("splits", "cluster"), [(2, (1, 1)), (3, (1, 1)), (3, (1, 2))], ids=str)
def test_shares(machine: Any, splits: int, cluster: tuple[int, int], how: str, rng: np.random.Generator) -> None:
    """Slices of a tile to the right of the last column."""
    conf = mapping("one", WGMMAOp(64), splits=splits, cluster=Tile(M=cluster[0], N=cluster[1]), d=RowMajor(F16))
    in_place(machine, conf, whole(rng, (40, 200), F16), whole(rng, (200, 20), F16), whole(rng, (40, 20), F16), how)


@pytest.fixture
def one_multiprocessor() -> Iterator[None]:
    """A block computes all tiles, one after the other."""
    with assumed(dataclasses.replace(H100, name="one multiprocessor", sm_count=1)):
        yield


def tall() -> gk.Config:
    """Consumers of two fragments, each of one subtile: what is on its way when a buffer is filled again matters."""
    return gk.get_config(operator=WGMMAOp(32), global_a_layout=RowMajor(F16), global_d_layout=RowMajor(F16),
                         kernel="warp_specialised", block_shape=Tile(M=256, N=32, K=64), warps_per_block=8,
                         schedule="cooperative", stages=2)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("one_multiprocessor")
@pytest.mark.parametrize("seed", [None, 1])
def test_buffers_of_fragments_that_are_left_out(seed: int | None, rng: np.random.Generator) -> None:
    """Tile after tile of which three of four fragments lie below the last row."""
    a, b, c = whole(rng, (60, 64), F16), whole(rng, (64, 96), F16), whole(rng, (60, 96), F16)
    out = c.copy()
    with gk.emulate(seed):
        made = gk.plan(a, b, out, conf=tall(), out=out)
        assert made._compiled.blocks == 1 and made._compiled.spec.store.uses_tma and made._compiled.spec.fragments_m == 2
        made(a, b, out, out=out)
    assert np.array_equal(out, (a.astype(F32) @ b.astype(F32) + c).astype(F16))


@pytest.mark.usefixtures("one_multiprocessor")
@pytest.mark.parametrize("has_c", [False, True])
def test_a_fragment_that_does_not_count_is_noticed(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, has_c: bool) -> None:
    """A store that leaves it out without a group of its own: the next tile's is written before TMA has read the last one's, or
    C's subtiles arrive in other phases than they are waited for."""
    monkeypatch.setattr(epilogue_load.PrefetchedStore if has_c else store.TmaStore, "leave_out", lambda self, i, spec, outputs, part: None)
    a, b, c = whole(rng, (60, 64), F16), whole(rng, (64, 96), F16), whole(rng, (60, 96), F16)
    with gk.emulate(), pytest.raises((RaceError, DeadlockError, ProtocolError)):
        gk.matmul(a, b, c if has_c else None, conf=tall(), out=c, epilogue=epilogues.ReLU())


@pytest.mark.kin(3)
def test_blas_on_ragged_rows(rng: np.random.Generator) -> None:
    """As a user calls it: rows that are no multiple of a tile's."""
    a, b, c = whole(rng, (150, 64), F16), whole(rng, (64, 136), F16), whole(rng, (150, 136), F16)
    out = c.copy()
    with gk.emulate():
        gk.blas.gemmEx("N", "N", 2.0, a, b, 0.5, out)
    assert np.array_equal(out, (2 * (a.astype(F32) @ b.astype(F32)) + 0.5 * c).astype(F16))
