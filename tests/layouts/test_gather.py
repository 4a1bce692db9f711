"""Rows by index: `Gather` of operands and `Scatter` of results, in all kernel families; indices that are out of range."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.emulator import errors
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from tests.functions.test_block_sparse import F32, FAMILIES, multiplied, simt
from tests.support.machines import on_machines, poison, whole

# ==========================================================================================================================
# Rows by index (`gemmkit.layouts.Gather`): in all kernel families, by cp.async and by elements; indices that are none.


def gathered(rng: np.random.Generator, rows: int, of: int) -> np.ndarray:
    return rng.integers(0, of, rows).astype(np.int32)


@pytest.mark.sample(4)
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
    given = gk.layouts.Gather(machine.array(x), machine.array(index))
    assert given.shape == (M, K)
    d = multiplied(machine, conf, given, machine.array(b), (M, N))
    assert np.array_equal(d, x[index].astype("f8") @ b.astype("f8"))


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_b(machine: Any, family: str, rng: np.random.Generator) -> None:
    conf = FAMILIES[family]()
    size, dtype = conf.block_shape.size, conf.operator.fragment_a.dtype
    K = size.K + 3
    a, y, index = whole(rng, (5, K), dtype), whole(rng, (4, 16), dtype), gathered(rng, K, 4)
    d = multiplied(machine, conf, machine.array(a), gk.layouts.Gather(machine.array(y), machine.array(index)), (5, 16))
    assert np.array_equal(d, a.astype("f8") @ y[index].astype("f8"))


@pytest.mark.sample(4)
@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1, -2**31])
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_index_out_of_range_is_a_fault(family: str, odd: int, wrong: int, rng: np.random.Generator) -> None:
    """In a view in the middle of other memory, too."""
    conf = FAMILIES[family]()
    size, dtype = conf.block_shape.size, conf.operator.fragment_a.dtype
    x, index = whole(rng, (12, size.K - odd), dtype)[4:8], np.int32([0, 3, wrong, 1])
    with gk.emulate(), pytest.raises(errors.BoundsError):
        gk.matmul(gk.layouts.Gather(x, index), np.ones((size.K - odd, 2), dtype), conf=conf)


@pytest.mark.sample(4)
@on_machines
def test_plans_take_other_indices(machine: Any, rng: np.random.Generator) -> None:
    x, b, put = whole(rng, (6, 8), F32), whole(rng, (8, 3), F32), machine.array
    with machine.session():
        plan = gk.plan(gk.layouts.Gather(put(x), put(np.int32([0, 1]))), put(b), conf=simt())
        for index in (np.int32([5, 5]), np.int32([4, 2])):
            assert np.array_equal(machine.numpy(plan(gk.layouts.Gather(put(x), put(index)), put(b))), x[index] @ b)
        with pytest.raises(ValueError, match="a differs from the plan's"):
            plan(gk.layouts.Gather(put(x), put(np.int32([1, 2, 3]))), put(b))
        with pytest.raises(ValueError, match="a is one array, and the plan was made with"):
            plan(put(x), put(b))


@pytest.mark.sample(4)
@pytest.mark.kin(1)
def test_no_rows_and_a_chosen_mapping() -> None:
    x, b = np.arange(15, dtype=F32).reshape(3, 5), np.eye(5, dtype=F32)
    with gk.emulate():
        for index in ([], [2], [1, 1, 0, 2]):
            d = gk.matmul(gk.layouts.Gather(x, np.array(index, np.int32)), b)
            assert np.array_equal(d, x[np.array(index, int)])


@pytest.mark.kin(1)
@pytest.mark.sample(3)
@pytest.mark.compile
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled(family: str) -> None:
    """Lines come in accesses of 16 bytes, past the registers where the family has cp.async."""
    conf = FAMILIES[family]()
    dtype, K = conf.operator.fragment_a.dtype, 8 * conf.block_shape.size.K
    given = gk.layouts.Gather(np.zeros((64, K), dtype), np.zeros(128, np.int32))
    conf = dataclasses.replace(conf, global_a_layout=given.layout)
    kernel = ahead.compile_config(conf, device=H100, gemm_shape=dict(M=128, N=64, K=K), operands={
        "a": given.array, "b": np.zeros((K, 64), dtype), "out": np.zeros((128, 64), conf.global_d_layout.dtype)})
    assert kernel.usage.spill_stores == kernel.usage.stack_bytes == 0
    if family == "singlestage":
        assert ".v4" in kernel.ptx
    else:
        assert "cp.async.cg.shared.global.L2::128B" in kernel.ptx


X, INDEX = np.ones((4, 8), F32), np.int32([0, 1])


@pytest.mark.sample(4)
@pytest.mark.parametrize(("array", "index", "kind", "said"), [
    (X, INDEX.astype("i8"), ValueError, "index has dtype int64; int32 is needed"),
    (X, INDEX[:, None], ValueError, r"index has shape \(2, 1\); a vector is needed"),
    (X, [0, 1], TypeError, "index"),
    (X[0], INDEX, ValueError, r"array has shape \(8,\); a matrix of 2 dimensions"),
    (np.stack([X, X]), INDEX, ValueError, "no stack"),
], ids=["dtype", "shape", "list", "vector", "stack"])
def test_bad_indices(array: Any, index: Any, kind: type, said: str) -> None:
    with pytest.raises(kind, match=said):
        gk.layouts.Gather(array, index)


@pytest.mark.parametrize("count", [1, 3, float("inf")])
def test_a_count_that_is_not_the_indexs(count: Any) -> None:
    """More would be read beyond the index."""
    layout = gk.layouts.Gathered(RowMajor(F32), INDEX, count)
    with gk.emulate(), pytest.raises(ValueError, match=r"a has 2 rows, and its index shape \(2,\) and count="):
        gk.matmul(X[:2], X.T, global_a_layout=layout)


@pytest.mark.sample(4)
def test_sizes_that_do_not_fit() -> None:
    out = poison((3, 2), F32)
    with gk.emulate(), pytest.raises(ValueError, match="M=2"):
        gk.matmul(gk.layouts.Gather(X, INDEX), np.ones((8, 2), F32), out=out)
    with gk.emulate(), pytest.raises(ValueError, match="K=8"):
        gk.matmul(gk.layouts.Gather(X, INDEX), np.ones((4, 2), F32))
    assert np.isnan(out).all()


@pytest.mark.sample(4)
def test_an_index_that_overlaps_the_result() -> None:
    out = np.zeros((2, 2), F32)
    with gk.emulate(), pytest.raises(ValueError, match="index of Gather .*overlaps out"):
        gk.matmul(gk.layouts.Gather(X, out.view(np.int32)[0]), np.ones((8, 2), F32), out=out)


@pytest.mark.sample(4)
@pytest.mark.kin(1)
def test_beside_other_operands(rng: np.random.Generator) -> None:
    """A stack of B, and empty blocks of B."""
    x, index, b = whole(rng, (6, 32), F32), np.int32([5, 0, 5]), whole(rng, (2, 32, 3), F32)
    with gk.emulate():
        assert np.array_equal(gk.matmul(gk.layouts.Gather(x, index), b), x[index] @ b)
        mask = np.array([[True], [False]])
        d = gk.matmul(gk.layouts.Gather(x, index), gk.functions.BlockSparse(b[0], mask, (16, 16)), conf=simt())
    assert np.array_equal(d, x[index][:, :16] @ b[0, :16])


# ==========================================================================================================================
# Results whose rows go where an index says (`gemmkit.layouts.Scatter`), in all kernel families; indices that are checked on request.

F32_SCATTERED = np.dtype("f4")


def places(rng: np.random.Generator, rows: int, of: int) -> np.ndarray:
    return rng.permutation(of)[:rows].astype(np.int32)


@pytest.mark.sample(3)
@pytest.mark.kin(1)
@on_machines
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_go_where_the_index_says(machine: Any, family: str, odd: int, order: str, rng: np.random.Generator) -> None:
    """Into a view; what the index does not name stays."""
    conf = FAMILIES[family]()
    size, dtype = conf.block_shape.size, conf.operator.fragment_a.dtype
    conf = dataclasses.replace(conf, global_d_layout=(RowMajor if order == "C" else ColMajor)(conf.global_d_layout.dtype))
    M, N, K, R = size.M + 3, 16 - odd, size.K + 2, size.M + 9
    a, b, index = whole(rng, (M, K), dtype), whole(rng, (K, N), dtype), places(rng, M, R)
    y = np.full((R + 4, N + 8), np.nan, conf.global_d_layout.dtype, order=order)
    kept = machine.array(y)
    with machine.session():
        given = kept[2:R + 2, :N]
        d = gk.matmul(machine.array(a), machine.array(b), conf=conf, out=gk.layouts.Scatter(given, machine.array(index)))
    assert d is given
    expected = y.copy()
    expected[2 + index, :N] = a.astype("f8") @ b.astype("f8")
    assert np.array_equal(machine.numpy(kept), expected, equal_nan=True)


@pytest.mark.sample(3)
@on_machines
def test_an_expert(machine: Any, rng: np.random.Generator) -> None:
    """Rows are gathered, multiplied, finished and put back; a plan takes other indices, and none."""
    x, w, bias = whole(rng, (9, 8), F32_SCATTERED), whole(rng, (8, 5), F32_SCATTERED), whole(rng, (5,), F32_SCATTERED)
    put, y = machine.array, machine.array(np.zeros((9, 5), F32_SCATTERED))
    index = np.int32([7, 0, 3])
    with machine.session():
        plan = gk.plan(gk.layouts.Gather(put(x), put(index)), put(w), out=gk.layouts.Scatter(y, put(index)), conf=simt(),
                       epilogue=epilogues.Bias(put(bias)))
        for rows in (index, np.int32([8, 1, 2])):
            plan(gk.layouts.Gather(put(x), put(rows)), put(w), out=gk.layouts.Scatter(y, put(rows)))
    named = [7, 0, 3, 8, 1, 2]
    expected = np.zeros((9, 5), F32_SCATTERED)
    expected[named] = x[named] @ w + bias
    assert np.array_equal(machine.numpy(y), expected)


@pytest.mark.sample(3)
@pytest.mark.kin(1)
def test_a_chosen_mapping_and_no_rows() -> None:
    y, b = np.full((6, 5), np.nan, F32_SCATTERED), np.eye(5, dtype=F32_SCATTERED)
    with gk.emulate():
        for index in ([], [4], [1, 5]):
            a = np.arange(5 * len(index), dtype=F32_SCATTERED).reshape(len(index), 5)
            d = gk.matmul(a, b, out=gk.layouts.Scatter(y, np.array(index, np.int32), check=True))
            assert d is y and np.array_equal(y[index], a)
    assert np.isnan(y[[0, 2, 3]]).all()


@pytest.mark.sample(3)
@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_index_out_of_range_is_a_fault_of_results(family: str, wrong: int) -> None:
    conf = FAMILIES[family]()
    dtype, y = conf.operator.fragment_a.dtype, np.zeros((12, 8), conf.global_d_layout.dtype)
    with gk.emulate(), pytest.raises(errors.BoundsError):
        gk.matmul(np.ones((3, 8), dtype), np.ones((8, 8), dtype), conf=conf, out=gk.layouts.Scatter(y[4:8], np.int32([0, wrong, 1])))


@pytest.mark.sample(3)
@pytest.mark.kin(1)
@pytest.mark.compile
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_of_results(family: str) -> None:
    conf = FAMILIES[family]()
    dtype, out = conf.operator.fragment_a.dtype, np.zeros((64, 64), conf.global_d_layout.dtype)
    given = gk.layouts.Scatter(out, np.zeros(32, np.int32))
    kernel = ahead.compile_config(
        dataclasses.replace(conf, global_d_layout=given.layout), device=H100, gemm_shape=dict(M=32, N=64, K=64),
        operands={"a": np.zeros((32, 64), dtype), "b": np.zeros((64, 64), dtype), "out": out})
    assert kernel.usage.spill_stores == kernel.usage.stack_bytes == 0


# -- bad input --------------------------------------------------------------------------------------------------------

X_SCATTERED, INDEX_SCATTERED = np.ones((4, 8), F32_SCATTERED), np.int32([0, 1])


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [gk.layouts.Gather, gk.layouts.Scatter])
@pytest.mark.parametrize(("index", "said"), [
    ([1, 4, -1], r"index\[1\] is 4, and the array has 4 rows: 0 to 3 are needed \(2 of 3 are out of range\)"),
    ([-2**31], r"index\[0\] is -2147483648"),
])
@on_machines
def test_checked_on_request(machine: Any, index: list[int], said: str, kind: Any) -> None:
    with machine.session(), pytest.raises(IndexError, match=said):
        kind(machine.array(X_SCATTERED), machine.array(np.int32(index)), check=True)
    with machine.session():
        kind(machine.array(X_SCATTERED), machine.array(np.int32([3, 0])), check=True)
        kind(machine.array(X_SCATTERED), machine.array(np.int32(index)))                       # nothing waits for the device


@pytest.mark.sample(3)
def test_a_row_twice() -> None:
    with pytest.raises(ValueError, match="index names row 3 more than once"):
        gk.layouts.Scatter(X_SCATTERED, np.int32([2, 3, 1, 3, 1]), check=True)
    gk.layouts.Gather(X_SCATTERED, np.int32([2, 3, 1, 3, 1]), check=True)


@pytest.mark.sample(3)
def test_what_is_no_result() -> None:
    y, b = np.full((4, 2), np.nan, F32_SCATTERED), np.ones((8, 2), F32_SCATTERED)
    with gk.emulate():
        with pytest.raises(TypeError, match="out is a Gather, whose layout .* stores nothing; give an array, a SymmetricMatrix or a Scatter"):
            gk.matmul(X_SCATTERED[:2], b, out=gk.layouts.Gather(y, INDEX_SCATTERED))
        with pytest.raises(TypeError, match="a is a Scatter, which is for out; give a Gather"):
            gk.matmul(gk.layouts.Scatter(X_SCATTERED, INDEX_SCATTERED), b)
        with pytest.raises(TypeError, match="global_d_layout is given with out, a Scatter"):
            gk.matmul(X_SCATTERED[:2], b, out=gk.layouts.Scatter(y, INDEX_SCATTERED), global_d_layout=RowMajor(F32_SCATTERED))
        with pytest.raises(ValueError, match="M=2"):
            gk.matmul(X_SCATTERED[:3], b, out=gk.layouts.Scatter(y, INDEX_SCATTERED))
        with pytest.raises(ValueError, match="index of Scatter .*overlaps out"):
            gk.matmul(X_SCATTERED[:2], b, out=gk.layouts.Scatter(y, y.view(np.int32)[0]))
    assert np.isnan(y).all()


@pytest.mark.sample(3)
@pytest.mark.parametrize(("check", "kind"), [(1, TypeError), (None, TypeError)])
def test_a_check_that_is_none(check: Any, kind: type) -> None:
    with pytest.raises(kind, match="True or False"):
        gk.layouts.Scatter(X_SCATTERED, INDEX_SCATTERED, check=check)


@on_machines
@pytest.mark.sample(4)
@pytest.mark.parametrize("step", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8"])
def test_rows_whose_elements_are_no_neighbours(machine: Any, dtype: str, step: int, rng: np.random.Generator) -> None:
    """Every second element of rows of float64 begins at a multiple of 16 bytes, like two neighbours. They were copied as such."""
    x = np.ascontiguousarray(rng.integers(-3, 4, (12, 16 * step))).astype(dtype)
    index, a, b = np.int32([3, 1, 7, 0, 5]), rng.integers(-3, 4, (6, 5)).astype(dtype), rng.integers(-3, 4, (16, 6)).astype(dtype)
    with machine.session():
        table, rows = machine.array(x)[:, ::step], machine.array(index)
        of_a = machine.numpy(gk.matmul(gk.layouts.Gather(table, rows), machine.array(b)))
        of_b = machine.numpy(gk.matmul(machine.array(a), gk.layouts.Gather(table, rows)))
    picked = x[:, ::step][index]
    np.testing.assert_array_equal(of_a, picked @ b)
    np.testing.assert_array_equal(of_b, a @ picked)
