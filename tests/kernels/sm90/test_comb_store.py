"""D whose neighbours in memory are 16 columns apart: stored from the registers, in vectors of every length."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from bench.experiments.contractions import PAPER, Contraction
from bench.prepare import products
from gemmkit.epilogues import Bias, ReLU
from gemmkit.functions import einsum
from gemmkit.kernels.sm90.staged import CpAsync
from gemmkit.kernels.sm90.store import InterleavedStore
from gemmkit.layouts import RowMajor, Tensor
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.arrays import describe
from tests.kernels.common.test_contraction_orders import machine_code
from tests.support.machines import on_machines, poison, whole
from tests.support.sm90 import F16, F32, mapping

BF16 = np.dtype(ml_dtypes.bfloat16)
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
    conf = mapping(schedule, OPERATOR, d=Tensor.of(describe(out), 1))
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
    layout = Tensor.of(describe(out), 1)
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
    conf = mapping("one", OPERATOR, d=Tensor.of(describe(out), 1), splits=2)
    store = computed(machine, conf, a, b, out)
    assert np.array_equal(in_order(machine.numpy(flat), 0, m, n, 8), (a.astype(F32) @ b.astype(F32)).astype(F16))
    assert not isinstance(store, InterleavedStore) or store.length <= 4


@pytest.mark.kin(5)
@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("sizes", [(64, 40, 32, 48), (9, 40, 32, 47), (16, 8, 24, 40), (8, 40, 48, 33), (24, 72, 16, 256)], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_the_papers_contraction(machine: Any, sizes: tuple, dtype: Any, rng: np.random.Generator,
                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Which order its indices get depends on its sizes; here they are small."""
    monkeypatch.setattr(einsum, "REREAD", {"m": 33, "k": 8})
    einsum._recipe.cache_clear()
    p, q, r, s = sizes
    a, b = whole(rng, (p, q, r), dtype), whole(rng, (s, q), dtype)
    out = machine.array(poison((s, r, p), dtype))
    with machine.session():
        gk.einsum("adb,cd->cba", machine.array(a), machine.array(b), out=out)
    einsum._recipe.cache_clear()
    assert np.array_equal(machine.numpy(out), np.einsum("adb,cd->cba", a.astype("f8"), b.astype("f8")).astype(dtype))


@pytest.mark.kin(5)
@pytest.mark.compile
def test_machine_code_of_the_papers_contraction() -> None:
    """B comes by cp.async, 32 bytes of a line side by side, and D leaves 16 bytes at a time, without a subtile."""
    (made,) = products(Contraction.of("contraction", *PAPER, "f16"))
    assert made.problem.config.global_b_layout.columns.extents() == (16, 8, 2, 8)
    assert isinstance(made.spec.store, InterleavedStore) and isinstance(made.spec.b.route, CpAsync)
    code = machine_code(made)
    assert (code.usage.spill_stores, code.usage.spill_loads) == (0, 0)
    assert code.count("STG") == code.count("STG", "128") == 2 * 64 * 128 // 128 // 8 and code.count("STSM") == 0
