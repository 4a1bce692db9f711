"""Rows by index (`gemmkit.Gather`): in all kernel families, by cp.async and by elements; indices that are none."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from tests.kernels.common.test_block_sparse import F32, FAMILIES, multiplied, simt
from tests.support.machines import on_machines, poison, whole

pytestmark = pytest.mark.sample(4)


def gathered(rng: np.random.Generator, rows: int, of: int) -> np.ndarray:
    return rng.integers(0, of, rows).astype(np.int32)


@on_machines
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_by_index(machine: Any, family: str, odd: int, order: str, rng: np.random.Generator) -> None:
    """Of lines that are aligned and in range as a whole, and of others; in a view whose rows lie further apart."""
    conf = FAMILIES[family](a=RowMajor if order == "C" else ColMajor)
    size, dtype = conf.block_shape.size, conf.operator.fragment_a.dtype
    M, N, K, R = size.M + 3, 7, 2 * size.K - odd, 11
    wide = whole(rng, (R + 5, K + 16 - odd), dtype)
    x, b, index = np.asarray(wide, order=order)[:R, :K], whole(rng, (K, N), dtype), gathered(rng, M, R)
    given = gk.Gather(machine.array(x), machine.array(index))
    assert given.shape == (M, K)
    d = multiplied(machine, conf, given, machine.array(b), (M, N))
    assert np.array_equal(d, x[index].astype("f8") @ b.astype("f8"))


@on_machines
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_b(machine: Any, family: str, rng: np.random.Generator) -> None:
    conf = FAMILIES[family]()
    size, dtype = conf.block_shape.size, conf.operator.fragment_a.dtype
    K = size.K + 3
    a, y, index = whole(rng, (5, K), dtype), whole(rng, (4, 16), dtype), gathered(rng, K, 4)
    d = multiplied(machine, conf, machine.array(a), gk.Gather(machine.array(y), machine.array(index)), (5, 16))
    assert np.array_equal(d, a.astype("f8") @ y[index].astype("f8"))


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1, -2**31])
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_index_out_of_range_is_a_fault(family: str, odd: int, wrong: int, rng: np.random.Generator) -> None:
    """In a view in the middle of other memory, too."""
    conf = FAMILIES[family]()
    size, dtype = conf.block_shape.size, conf.operator.fragment_a.dtype
    x, index = whole(rng, (12, size.K - odd), dtype)[4:8], np.int32([0, 3, wrong, 1])
    with gk.emulate(), pytest.raises(errors.BoundsError):
        gk.matmul(gk.Gather(x, index), np.ones((size.K - odd, 2), dtype), conf=conf)


@on_machines
def test_plans_take_other_indices(machine: Any, rng: np.random.Generator) -> None:
    x, b, put = whole(rng, (6, 8), F32), whole(rng, (8, 3), F32), machine.array
    with machine.session():
        plan = gk.plan(gk.Gather(put(x), put(np.int32([0, 1]))), put(b), conf=simt())
        for index in (np.int32([5, 5]), np.int32([4, 2])):
            assert np.array_equal(machine.numpy(plan(gk.Gather(put(x), put(index)), put(b))), x[index] @ b)
        with pytest.raises(ValueError, match="a differs from the plan's"):
            plan(gk.Gather(put(x), put(np.int32([1, 2, 3]))), put(b))
        with pytest.raises(ValueError, match="a is one array, and the plan was made with"):
            plan(put(x), put(b))


@pytest.mark.kin(3)
def test_no_rows_and_a_chosen_mapping() -> None:
    x, b = np.arange(15, dtype=F32).reshape(3, 5), np.eye(5, dtype=F32)
    with gk.emulate():
        for index in ([], [2], [1, 1, 0, 2]):
            d = gk.matmul(gk.Gather(x, np.array(index, np.int32)), b)
            assert np.array_equal(d, x[np.array(index, int)])


@pytest.mark.kin(3)
@pytest.mark.sample(3)
@pytest.mark.compile
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled(family: str) -> None:
    """Lines come in accesses of 16 bytes, past the registers where the family has cp.async."""
    conf = FAMILIES[family]()
    dtype, K = conf.operator.fragment_a.dtype, 8 * conf.block_shape.size.K
    given = gk.Gather(np.zeros((64, K), dtype), np.zeros(128, np.int32))
    conf = dataclasses.replace(conf, global_a_layout=given.layout)
    kernel = ahead.compile_config(conf, device=H100, gemm_shape=dict(M=128, N=64, K=K), operands={
        "a": given.array, "b": np.zeros((K, 64), dtype), "out": np.zeros((128, 64), conf.global_d_layout.dtype)})
    assert kernel.usage.spill_stores == kernel.usage.stack_bytes == 0
    if family == "singlestage":
        assert ".v4" in kernel.ptx
    else:
        assert "cp.async.cg.shared.global.L2::128B" in kernel.ptx


X, INDEX = np.ones((4, 8), F32), np.int32([0, 1])


@pytest.mark.parametrize(("array", "index", "kind", "said"), [
    (X, INDEX.astype("i8"), ValueError, "index has dtype int64; int32 is needed"),
    (X, INDEX[:, None], ValueError, r"index has shape \(2, 1\); a vector is needed"),
    (X, [0, 1], TypeError, "index"),
    (X[0], INDEX, ValueError, r"array has shape \(8,\); a matrix of 2 dimensions"),
    (np.stack([X, X]), INDEX, ValueError, "no stack"),
], ids=["dtype", "shape", "list", "vector", "stack"])
def test_bad_indices(array: Any, index: Any, kind: type, said: str) -> None:
    with pytest.raises(kind, match=said):
        gk.Gather(array, index)


def test_sizes_that_do_not_fit() -> None:
    out = poison((3, 2), F32)
    with gk.emulate(), pytest.raises(ValueError, match="M=2"):
        gk.matmul(gk.Gather(X, INDEX), np.ones((8, 2), F32), out=out)
    with gk.emulate(), pytest.raises(ValueError, match="K=8"):
        gk.matmul(gk.Gather(X, INDEX), np.ones((4, 2), F32))
    assert np.isnan(out).all()


def test_an_index_that_overlaps_the_result() -> None:
    out = np.zeros((2, 2), F32)
    with gk.emulate(), pytest.raises(ValueError, match="index of Gather .*overlaps out"):
        gk.matmul(gk.Gather(X, out.view(np.int32)[0]), np.ones((8, 2), F32), out=out)


@pytest.mark.kin(3)
def test_beside_other_operands(rng: np.random.Generator) -> None:
    """A stack of B, and empty blocks of B."""
    x, index, b = whole(rng, (6, 32), F32), np.int32([5, 0, 5]), whole(rng, (2, 32, 3), F32)
    with gk.emulate():
        assert np.array_equal(gk.matmul(gk.Gather(x, index), b), x[index] @ b)
        mask = np.array([[True], [False]])
        d = gk.matmul(gk.Gather(x, index), gk.BlockSparse(b[0], mask, (16, 16)), conf=simt())
    assert np.array_equal(d, x[index][:, :16] @ b[0, :16])
