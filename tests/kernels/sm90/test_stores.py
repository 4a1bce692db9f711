"""How D leaves: by columns, in vectors of neighbours that lie apart, and over C or an array that the epilogue reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from bench.experiments.contractions import PAPER, Contraction
from bench.experiments.mixed import MixedContraction
from bench.prepare import products
from gemmkit import epilogues
from gemmkit.emulator.errors import DeadlockError, ProtocolError, RaceError
from gemmkit.epilogues import Bias, ReLU
from gemmkit.functions import einsum
from gemmkit.kernels.sm90 import epilogue_load, store
from gemmkit.kernels.sm90.routes import CpAsyncLines
from gemmkit.kernels.sm90.store import InterleavedStore, TileStore, TmaStore, VectorStore
from gemmkit.layouts import ColMajor, Matricised, RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import H100, assumed
from gemmkit.tiling import Tile
from tests.functions.test_einsum_orders import machine_code
from tests.support.machines import BF16, on_machines, poison, whole
from tests.support.patches import Seeded
from tests.support.sm90 import F16, F32, mapping

# ==========================================================================================================================
# A D by columns, which TMA stores as it does one by rows: in one panel a subtile, or in several where elements are wide.

F64 = np.dtype("f8")


def stored(machine: Any, conf: gk.Config, size: tuple[int, int, int], above: int, below: int, rng: np.random.Generator,
           rows: np.ndarray | None = None) -> TileStore:
    """How D leaves, after it has been computed exactly into some rows of a larger array, around which nothing is written.
    ``rows`` are added to its rows."""
    M, N, K = size
    a, b = (rng.integers(-2, 3, shape).astype(F16) for shape in ((M, K), (K, N)))
    dtype = conf.global_d_layout.dtype
    larger = machine.array(poison((above + M + below, N), dtype, "F"))
    out, given = larger[above:above + M], (machine.array(a), machine.array(b))
    fields = {} if rows is None else dict(epilogue=Bias(machine.array(rows), along="M"))
    with machine.session():
        made = gk.plan(*given, None, conf, out=out, **fields)
        made(*given, out=out)
    after, want = machine.numpy(larger).astype(F64), a.astype(F64) @ b.astype(F64)
    want = want if rows is None else want + rows[:, None]
    assert np.array_equal(after[above:above + M], want.astype(dtype).astype(F64))
    assert np.isnan(after[:above]).all() and np.isnan(after[above + M:]).all()
    store = made._compiled.spec.store
    assert isinstance(store, TileStore)
    return store


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("schedule", ["one", "two", "pingpong", "two-2x1"])
def test_types_and_schedules(machine: Any, schedule: str, dtype: np.dtype, rng: np.random.Generator) -> None:
    conf = mapping(schedule, WGMMAOp(64), d=ColMajor(dtype))
    assert isinstance(stored(machine, conf, (136, 67, 40), 8, 16, rng), TmaStore)


@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("M, above, below, kind", [
    (72, 8, 8, TmaStore), (72, 8, 3, VectorStore), (72, 9, 7, VectorStore), (73, 8, 7, VectorStore), (8, 0, 0, TmaStore)])
def test_what_tma_takes(machine: Any, M: int, above: int, below: int, kind: Any, rng: np.random.Generator) -> None:
    """Columns of a multiple of 16 bytes, which begin and lie apart by such; of all others each would write beyond its end."""
    conf = mapping("one", d=ColMajor(F16))
    assert type(stored(machine, conf, (M, 43, 40), above, below, rng)) is kind


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_with_an_epilogue_and_shares_of_k(machine: Any, splits: int, rng: np.random.Generator) -> None:
    """Where blocks share K each stores a slice of the columns."""
    conf = mapping("one", WGMMAOp(64), d=ColMajor(F32), splits=splits)
    assert isinstance(stored(machine, conf, (80, 70, 200), 4, 4, rng, np.arange(80, dtype=F32)), TmaStore)


# ==========================================================================================================================
# D whose neighbours in memory are 16 columns apart: stored from the registers, in vectors of every length.

OPERATOR = WGMMAOp(128)
SCHEDULES = ["one", "two", "pingpong", "one-2x1"]


def combed(machine: Any, m: int, n: int, run: int, dtype: Any, comb: int = 16, offset: int = 0) -> Any:
    """Poisoned memory and a view of it, a tensor of m rows and n columns of which ``run`` that are ``comb`` apart lie next to
    each other, ``offset`` elements behind an aligned address."""
    flat = machine.array(poison((m * n + offset,), dtype))
    memory = flat[offset:].reshape(m, n // (run * comb), comb, run)
    return flat, memory.transpose(0, 2, 3, 1)


def in_order(x: np.ndarray, offset: int, m: int, n: int, run: int, comb: int = 16) -> np.ndarray:
    """The matrix that such memory holds."""
    return x[offset:].reshape(m, n // (run * comb), comb, run).transpose(0, 1, 3, 2).reshape(m, n)


def computed(machine: Any, conf: gk.Config, a: np.ndarray, b: np.ndarray, out: Any, c: Any = None) -> Any:
    with machine.session():
        plan = gk.plan(machine.array(a), machine.array(b), c, conf, out=out)
        plan(machine.array(a), machine.array(b), c, out=out)
    return plan._compiled.spec.store


@pytest.mark.kin(5)
@pytest.mark.sample(24)
@on_machines
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("run, offset, length", [(8, 0, 8), (4, 0, 4), (2, 0, 2), (8, 4, 4), (8, 1, 1), (1, 0, 1), (3, 0, 1)])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_vectors(machine: Any, schedule: str, run: int, offset: int, length: int, dtype: Any, rng: np.random.Generator) -> None:
    """Rows and columns beyond the tile's edge, addresses that allow shorter vectors or none: a subtile's lines hold these, too."""
    m, n, k = 131, run * 16 * 3, 40
    a, b = whole(rng, (m, k), F16), whole(rng, (k, n), F16)
    flat, out = combed(machine, m, n, run, dtype, offset=offset)
    conf = mapping(schedule, OPERATOR, d=Matricised.of(describe(out), 1))
    store = computed(machine, conf, a, b, out)
    assert isinstance(store, InterleavedStore) == (length * dtype.itemsize >= 16)
    assert not isinstance(store, InterleavedStore) or store.length == 16 // dtype.itemsize
    assert np.array_equal(in_order(machine.numpy(flat), offset, m, n, run), (a.astype(F32) @ b.astype(F32)).astype(dtype))
    assert np.isnan(machine.numpy(flat)[:offset]).all()


@pytest.mark.kin(5)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("schedule", ["one", "two", "pingpong"])
def test_what_comes_before_it(machine: Any, schedule: str, rng: np.random.Generator) -> None:
    """C, a bias and an activation; sums that a cluster's blocks share."""
    m, n, k = 70, 256, 72
    a, b, bias = whole(rng, (m, k), F16), whole(rng, (k, n), F16), whole(rng, (n,), F16)
    c = whole(rng, (m, n), F32)
    flat, out = combed(machine, m, n, 8, F16)
    layout = Matricised.of(describe(out), 1)
    conf = mapping(schedule, OPERATOR, d=layout, global_c_layout=RowMajor(F32),
                   epilogue=Bias(machine.array(bias)) | ReLU())
    assert isinstance(computed(machine, conf, a, b, out, machine.array(c)), InterleavedStore)
    expected = np.maximum(a.astype(F32) @ b.astype(F32) + c + bias, 0)
    assert np.array_equal(in_order(machine.numpy(flat), 0, m, n, 8), expected.astype(F16))


@pytest.mark.kin(5)
@on_machines
def test_a_cluster_that_shares_k(machine: Any, rng: np.random.Generator) -> None:
    """Each block finishes half of the columns, which hold shorter vectors."""
    m, n, k = 70, 256, 300
    a, b = whole(rng, (m, k), F16), whole(rng, (k, n), F16)
    flat, out = combed(machine, m, n, 8, F16)
    conf = mapping("one", OPERATOR, d=Matricised.of(describe(out), 1), splits=2)
    store = computed(machine, conf, a, b, out)
    assert np.array_equal(in_order(machine.numpy(flat), 0, m, n, 8), (a.astype(F32) @ b.astype(F32)).astype(F16))
    assert not isinstance(store, InterleavedStore) or store.length <= 4


@pytest.mark.kin(5)
@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("sizes", [(64, 40, 32, 48), (9, 40, 32, 47), (16, 8, 24, 40), (8, 40, 48, 33), (24, 72, 16, 256)], ids=str)
@pytest.mark.parametrize(("dtype", "result"), [(F16, F16), (BF16, BF16), (F16, F32)], ids=str)
def test_the_papers_contraction(machine: Any, sizes: tuple, dtype: Any, result: Any, rng: np.random.Generator,
                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Which order its indices get depends on its sizes; here they are small."""
    monkeypatch.setattr(einsum, "REREAD", {"m": 33, "k": 8})
    einsum._recipe.cache_clear()
    p, q, r, s = sizes
    a, b = whole(rng, (p, q, r), dtype), whole(rng, (s, q), dtype)
    out = machine.array(poison((s, r, p), result))
    with machine.session():
        gk.einsum("adb,cd->cba", machine.array(a), machine.array(b), out=out)
    einsum._recipe.cache_clear()
    assert np.array_equal(machine.numpy(out), np.einsum("adb,cd->cba", a.astype("f8"), b.astype("f8")).astype(result))


@pytest.mark.kin(5)
@pytest.mark.compile
@pytest.mark.parametrize("made_of", [Contraction, MixedContraction], ids=["into float16", "into float32"])
def test_machine_code_of_the_papers_contraction(made_of: Any) -> None:
    """B comes by cp.async, 32 bytes of a line side by side, and D leaves 16 bytes at a time, without a subtile."""
    (made,) = products(made_of.of("contraction", *PAPER, "f16"))
    assert made.problem.config.global_b_layout.columns.extents() == (16, 8, 2, 8)
    assert isinstance(made.spec.store, InterleavedStore) and isinstance(made.spec.b.route, CpAsyncLines)
    code = machine_code(made)
    assert (code.usage.spill_stores, code.usage.spill_loads) == (0, 0)
    assert code.count("STG") == code.count("STG", "128") == 2 * 64 // 8 * made.out.dtype.itemsize // 2 and code.count("STSM") == 0


# ==========================================================================================================================
# C, or an array that the epilogue reads, is D itself: what lies out of range reads nothing that others store.
#
# A fragment out of range was computed as if it were the nearest in range, which another consumer stores: the emulator calls
# that a race (it did until this file; a value that is not stored could not be wrong).


def whole_in_place(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
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


@pytest.mark.kin(5)
@pytest.mark.sample(30)
@on_machines
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("schedule", "sizes"), [("one", (50, 40, 72)), ("two", (50, 36, 72)), ("two", (150, 40, 64)),
                                                 ("pingpong", (70, 37, 80)), ("pingpong", (150, 40, 64))], ids=str)
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_edges(machine: Any, schedule: str, sizes: tuple[int, int, int], dtype: Any, how: str, rng: np.random.Generator) -> None:
    m, n, k = sizes
    conf = mapping(schedule, d=RowMajor(dtype))
    in_place(machine, conf, whole_in_place(rng, (m, k), F16), whole_in_place(rng, (k, n), F16), whole_in_place(rng, (m, n), dtype), how)


@pytest.mark.kin(5)
@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("splits", "cluster"), [(2, (1, 1)), (3, (1, 1)), (3, (1, 2))], ids=str)
def test_shares(machine: Any, splits: int, cluster: tuple[int, int], how: str, rng: np.random.Generator) -> None:
    """Slices of a tile to the right of the last column."""
    conf = mapping("one", WGMMAOp(64), splits=splits, cluster=Tile(M=cluster[0], N=cluster[1]), d=RowMajor(F16))
    in_place(machine, conf, whole_in_place(rng, (40, 200), F16), whole_in_place(rng, (200, 20), F16), whole_in_place(rng, (40, 20), F16), how)


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
    a, b, c = whole_in_place(rng, (60, 64), F16), whole_in_place(rng, (64, 96), F16), whole_in_place(rng, (60, 96), F16)
    out = c.copy()
    with gk.emulate(seed):
        made = gk.plan(a, b, out, conf=tall(), out=out)
        assert made._compiled.blocks == 1 and made._compiled.spec.store.uses_tma and made._compiled.spec.fragments_m == 2
        made(a, b, out, out=out)
    assert np.array_equal(out, (a.astype(F32) @ b.astype(F32) + c).astype(F16))


@pytest.mark.usefixtures("one_multiprocessor")
@pytest.mark.parametrize("has_c", [False, True])
def test_a_fragment_that_does_not_count_is_noticed(seeded: Seeded, rng: np.random.Generator, has_c: bool) -> None:
    """A store that leaves it out without a group of its own: the next tile's is written before TMA has read the last one's, or
    C's subtiles arrive in other phases than they are waited for."""
    seeded(epilogue_load.PrefetchedStore if has_c else store.TmaStore, "leave_out", lambda self, i, spec, outputs, part: None)
    a, b, c = whole_in_place(rng, (60, 64), F16), whole_in_place(rng, (64, 96), F16), whole_in_place(rng, (60, 96), F16)
    with gk.emulate(), pytest.raises((RaceError, DeadlockError, ProtocolError)):
        gk.matmul(a, b, c if has_c else None, conf=tall(), out=c, epilogue=epilogues.ReLU())


@pytest.mark.kin(5)
def test_blas_on_ragged_rows(rng: np.random.Generator) -> None:
    """As a user calls it: rows that are no multiple of a tile's."""
    a, b, c = whole_in_place(rng, (150, 64), F16), whole_in_place(rng, (64, 136), F16), whole_in_place(rng, (150, 136), F16)
    out = c.copy()
    with gk.emulate():
        gk.blas.gemmEx("N", "N", 2.0, a, b, 0.5, out)
    assert np.array_equal(out, (2 * (a.astype(F32) @ b.astype(F32)) + 0.5 * c).astype(F16))
