"""Results whose rows go where an index says (`gemmkit.Scatter`), in all kernel families; indices that are checked on request."""

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
from tests.kernels.common.test_gather import FAMILIES, simt
from tests.support.machines import on_machines, whole

pytestmark = pytest.mark.sample(3)

F32 = np.dtype(np.float32)


def places(rng: np.random.Generator, rows: int, of: int) -> np.ndarray:
    return rng.permutation(of)[:rows].astype(np.int32)


@pytest.mark.kin(3)
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
        d = gk.matmul(machine.array(a), machine.array(b), conf=conf, out=gk.Scatter(given, machine.array(index)))
    assert d is given
    expected = y.copy()
    expected[2 + index, :N] = a.astype("f8") @ b.astype("f8")
    assert np.array_equal(machine.numpy(kept), expected, equal_nan=True)


@on_machines
def test_an_expert(machine: Any, rng: np.random.Generator) -> None:
    """Rows are gathered, multiplied, finished and put back; a plan takes other indices, and none."""
    x, w, bias = whole(rng, (9, 8), F32), whole(rng, (8, 5), F32), whole(rng, (5,), F32)
    put, y = machine.array, machine.array(np.zeros((9, 5), F32))
    index = np.int32([7, 0, 3])
    with machine.session():
        plan = gk.plan(gk.Gather(put(x), put(index)), put(w), out=gk.Scatter(y, put(index)), conf=simt(),
                       epilogue=epilogues.Bias(put(bias)))
        for rows in (index, np.int32([8, 1, 2])):
            plan(gk.Gather(put(x), put(rows)), put(w), out=gk.Scatter(y, put(rows)))
    named = [7, 0, 3, 8, 1, 2]
    expected = np.zeros((9, 5), F32)
    expected[named] = x[named] @ w + bias
    assert np.array_equal(machine.numpy(y), expected)


@pytest.mark.kin(3)
def test_a_chosen_mapping_and_no_rows() -> None:
    y, b = np.full((6, 5), np.nan, F32), np.eye(5, dtype=F32)
    with gk.emulate():
        for index in ([], [4], [1, 5]):
            a = np.arange(5 * len(index), dtype=F32).reshape(len(index), 5)
            d = gk.matmul(a, b, out=gk.Scatter(y, np.array(index, np.int32), check=True))
            assert d is y and np.array_equal(y[index], a)
    assert np.isnan(y[[0, 2, 3]]).all()


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_index_out_of_range_is_a_fault(family: str, wrong: int) -> None:
    conf = FAMILIES[family]()
    dtype, y = conf.operator.fragment_a.dtype, np.zeros((12, 8), conf.global_d_layout.dtype)
    with gk.emulate(), pytest.raises(errors.BoundsError):
        gk.matmul(np.ones((3, 8), dtype), np.ones((8, 8), dtype), conf=conf, out=gk.Scatter(y[4:8], np.int32([0, wrong, 1])))


@pytest.mark.kin(3)
@pytest.mark.compile
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled(family: str) -> None:
    conf = FAMILIES[family]()
    dtype, out = conf.operator.fragment_a.dtype, np.zeros((64, 64), conf.global_d_layout.dtype)
    given = gk.Scatter(out, np.zeros(32, np.int32))
    kernel = ahead.compile_config(
        dataclasses.replace(conf, global_d_layout=given.layout), device=H100, gemm_shape=dict(M=32, N=64, K=64),
        operands={"a": np.zeros((32, 64), dtype), "b": np.zeros((64, 64), dtype), "out": out})
    assert kernel.usage.spill_stores == kernel.usage.stack_bytes == 0


# -- bad input --------------------------------------------------------------------------------------------------------

X, INDEX = np.ones((4, 8), F32), np.int32([0, 1])


@pytest.mark.parametrize("kind", [gk.Gather, gk.Scatter])
@pytest.mark.parametrize(("index", "said"), [
    ([1, 4, -1], r"index\[1\] is 4, and the array has 4 rows: 0 to 3 are needed \(2 of 3 are out of range\)"),
    ([-2**31], r"index\[0\] is -2147483648"),
])
@on_machines
def test_checked_on_request(machine: Any, index: list[int], said: str, kind: Any) -> None:
    with machine.session(), pytest.raises(IndexError, match=said):
        kind(machine.array(X), machine.array(np.int32(index)), check=True)
    with machine.session():
        kind(machine.array(X), machine.array(np.int32([3, 0])), check=True)
        kind(machine.array(X), machine.array(np.int32(index)))                       # nothing waits for the device


def test_a_row_twice() -> None:
    with pytest.raises(ValueError, match="index names row 3 more than once"):
        gk.Scatter(X, np.int32([2, 3, 1, 3, 1]), check=True)
    gk.Gather(X, np.int32([2, 3, 1, 3, 1]), check=True)


def test_what_is_no_result() -> None:
    y, b = np.full((4, 2), np.nan, F32), np.ones((8, 2), F32)
    with gk.emulate():
        with pytest.raises(TypeError, match="out is a Gather, whose layout .* stores nothing; give an array or a Scatter"):
            gk.matmul(X[:2], b, out=gk.Gather(y, INDEX))
        with pytest.raises(TypeError, match="a is a Scatter, which is for out; give a Gather"):
            gk.matmul(gk.Scatter(X, INDEX), b)
        with pytest.raises(TypeError, match="global_d_layout is given beside out, a Scatter"):
            gk.matmul(X[:2], b, out=gk.Scatter(y, INDEX), global_d_layout=RowMajor(F32))
        with pytest.raises(ValueError, match="M=2"):
            gk.matmul(X[:3], b, out=gk.Scatter(y, INDEX))
        with pytest.raises(ValueError, match="index of Scatter .*overlaps out"):
            gk.matmul(X[:2], b, out=gk.Scatter(y, y.view(np.int32)[0]))
    assert np.isnan(y).all()


@pytest.mark.parametrize(("check", "kind"), [(1, TypeError), (None, TypeError)])
def test_a_check_that_is_none(check: Any, kind: type) -> None:
    with pytest.raises(kind, match="True or False"):
        gk.Scatter(X, INDEX, check=check)
