"""What a product writes is memory of its own: of out, of outputs, and of the arrays that components hold."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts, operators, transforms
from gemmkit.runtime.arrays import ArrayInfo, overlaps_itself, shares_memory
from tests.support.checks import assert_close
from tests.support.machines import whole

DRAWN = int(os.environ.get("GEMMKIT_STRIDES", "400"))


def at(strides: tuple[int, ...], shape: tuple[int, ...], pointer: int = 4096) -> ArrayInfo:
    return ArrayInfo(pointer, shape, strides, np.dtype("f4"), 0, False, "cai")


def addresses(x: ArrayInfo) -> list[int]:
    return [x.pointer + 4 * sum(i * s for i, s in zip(place, x.strides)) for place in itertools.product(*map(range, x.shape))]


def test_overlap_by_strides_is_found_exactly(rng: np.random.Generator) -> None:
    """Drawn strides against all addresses. (GEMMKIT_STRIDES=20000 draws more.)"""
    found = 0
    for _ in range(DRAWN):
        dims = int(rng.integers(1, 5))
        shape = tuple(int(n) for n in rng.integers(0, 6, dims))
        strides = tuple(int(n) for n in rng.integers(-9, 30, dims))
        x = at(strides, shape)
        every = addresses(x)
        assert overlaps_itself(x) == (len(set(every)) < len(every)), x
        found += overlaps_itself(x)
    assert 0.1 * DRAWN < found < 0.9 * DRAWN


def test_shared_memory_is_found_exactly(rng: np.random.Generator) -> None:
    found = 0
    for _ in range(DRAWN):
        pair = [at(tuple(int(n) for n in rng.integers(-9, 20, 2)), tuple(int(n) for n in rng.integers(0, 5, 2)),
                   4096 + 4 * int(rng.integers(0, 30))) for _ in range(2)]
        common = set(addresses(pair[0])) & set(addresses(pair[1]))
        assert shares_memory(*pair) == bool(common), pair
        found += bool(common)
    assert 0.1 * DRAWN < found < 0.9 * DRAWN


def test_what_is_hard_to_tell_counts_as_overlap() -> None:
    many = at(tuple(2 * 3**n + 1 for n in range(20)), (3,) * 20)
    assert overlaps_itself(many)


# -- in calls ---------------------------------------------------------------------------------------------------------

M, N, K = 6, 8, 5


def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.random((M, K), np.float32), rng.random((K, N), np.float32)


def refused(match: str, out: Any = None, **keywords: Any) -> None:
    before = None if out is None else out.copy()
    with gk.emulate(), pytest.raises(ValueError, match=match):
        gk.matmul(*operands(), out=out, **keywords)
    assert before is None or np.array_equal(before, out)


def test_an_out_whose_rows_overlap_is_refused() -> None:
    memory = np.zeros(100, np.float32)
    rows = np.lib.stride_tricks.as_strided(memory, (M, N), (4 * (N - 1), 4))
    refused(r"out has strides \(7, 1\): several of its elements share memory", rows)
    columns = np.lib.stride_tricks.as_strided(memory, (M, N), (4, 4 * (M - 1)))
    refused("several of its elements share memory", columns)


def test_a_residual_that_is_a_part_of_out_is_refused() -> None:
    memory = np.zeros((M + 1, N), np.float32)
    refused("array of Residual overlaps out in memory, and it may be out itself", memory[:M],
            epilogue=epilogues.Residual(memory[1:]))


def test_a_residual_may_be_out_itself() -> None:
    a, b = operands()
    out = np.arange(M * N, dtype=np.float32).reshape(M, N)
    before = out.copy()
    with gk.emulate():
        gk.matmul(a, b, out=out, epilogue=epilogues.Residual(out[:]))
    assert_close(out, a @ b + before, 1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(1, N), (M, 1), (1, 1)])
def test_out_by_another_stride_of_one_row_or_column(shape: tuple[int, int], rng: np.random.Generator) -> None:
    """An extent of 1 may have any stride: that of out's row, or of the one row that a library made of it."""
    rows, columns = shape
    a, b = whole(rng, (rows, K), np.float32), whole(rng, (K, columns), np.float32)
    memory = whole(rng, (M, N), np.float32)
    before, out = memory.copy(), memory[:rows, :columns]
    other = np.lib.stride_tricks.as_strided(out, shape, tuple(20 if extent == 1 else stride for extent, stride
                                                              in zip(shape, out.strides)))
    assert other.strides != out.strides
    product = a.astype(np.float64) @ b
    with gk.emulate():
        gk.matmul(a, b, out=out, epilogue=epilogues.Residual(other))
        assert np.array_equal(memory[:rows, :columns], product + before[:rows, :columns])
        gk.matmul(a, b, c=other, out=out)
        assert np.array_equal(memory[:rows, :columns], 2 * product + before[:rows, :columns])
    memory[:rows, :columns] = before[:rows, :columns]
    assert np.array_equal(memory, before)


@pytest.mark.parametrize("trans", ["N", "T"])
def test_one_column_of_pairs_in_place(trans: str, rng: np.random.Generator) -> None:
    """A column of complex numbers as pairs of floats, beside another column: gemmEx sees it as c and as out."""
    a, b = (whole(rng, shape, np.float32) for shape in ((M, K, 2), (1, K, 2) if trans == "T" else (K, 1, 2)))
    memory = whole(rng, (2, M, 2), np.float32).swapaxes(0, 1)
    before, c = memory.copy(), memory[:, :1]
    with gk.emulate():
        gk.blas.gemmEx("N", trans, 1.0, a, b, -0.5, c, operator=operators.COMPLEX)
    complex_a, complex_b, complex_c = (x[..., 0] + 1j * x[..., 1].astype(np.float64) for x in (a, b, before[:, :1]))
    expected = complex_a @ (complex_b.T if trans == "T" else complex_b) - 0.5 * complex_c
    assert np.array_equal(c[..., 0] + 1j * c[..., 1], expected)
    assert np.array_equal(memory[:, 1], before[:, 1])


def test_a_residual_between_the_columns_of_out_shares_nothing() -> None:
    a, b = operands()
    memory = np.ones((M, 2 * N), np.float32)
    with gk.emulate():
        gk.matmul(a, b, out=memory[:, :N], epilogue=epilogues.Residual(memory[:, N:]))
    assert_close(memory[:, :N], a @ b + 1, 1e-6)
    assert (memory[:, N:] == 1).all()


def test_an_array_of_a_transform_of_a_is_not_out() -> None:
    """It would be read at the rows and columns of A, while blocks write out."""
    table = np.zeros((M, N), np.float32)
    refused("table, captured by <lambda> of Map, overlaps out in memory, and it is read at other elements", table,
            transform_global_to_shared_a=transforms.Map(lambda x, m, k: x + table[m, k]))


def test_a_bias_that_lies_in_out_is_refused() -> None:
    out = np.zeros((M, N), np.float32)
    refused("bias of Bias overlaps out", out, epilogue=epilogues.Bias(out[0]))


@pytest.mark.parametrize("of_conf", [False, True])
def test_outputs_overlap_nothing_else(of_conf: bool) -> None:
    kept, other = np.zeros((M, N), np.float32), np.zeros((M, N), np.float32)
    chains = {"array of Store overlaps array of Residual": epilogues.Store(kept) | epilogues.Residual(kept),
              "array of Store overlaps array of Store": epilogues.Store(kept) | epilogues.Store(kept),
              "array of Store has strides": epilogues.Store(np.lib.stride_tricks.as_strided(other, (M, N), (4, 4)))}
    for match, chain in chains.items():
        if of_conf:
            row = layouts.RowMajor("float32")
            conf = gk.get_config(operator=operators.FPUOp(), global_a_layout=row, global_d_layout=row, epilogue=chain)
            refused(match, conf=conf)
        else:
            refused(match, epilogue=chain)


def test_outputs_overlap_no_operand() -> None:
    a, b = operands()
    memory = np.zeros((M, K + N), np.float32)
    memory[:, :K] = a
    with gk.emulate(), pytest.raises(ValueError, match="array of Store overlaps a in memory"):
        gk.matmul(memory[:, :K], b, epilogue=epilogues.Store(memory[:, K:]))


def test_a_plan_looks_at_the_out_of_each_call() -> None:
    a, b = operands()
    memory = np.zeros((2 * M, N), np.float32)
    with gk.emulate():
        run = gk.plan(a, b, epilogue=epilogues.Residual(memory[1:M + 1]))
        assert_close(run(a, b), a @ b, 1e-6)
        with pytest.raises(ValueError, match="array of Residual overlaps out"):
            run(a, b, out=memory[:M])
        run(a, b, out=memory[1:M + 1])
    assert_close(memory[1:M + 1], a @ b, 1e-6)


@dataclass(frozen=True)
class Scaled(epilogues.Epilogue):
    by: gk.Array

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return x * self.by[m, n]


def test_a_component_of_ones_own_is_checked_alike() -> None:
    memory = np.zeros((M + 1, N), np.float32)
    refused("by of Scaled overlaps out", memory[:M], epilogue=Scaled(memory[1:]))


# -- C in place -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("planned", [False, True])
def test_out_may_be_the_memory_of_c_by_another_object(planned: bool) -> None:
    a, b = operands()
    c = np.ones((M, N), np.float32)
    with gk.emulate():
        (gk.plan(a, b, c, out=c[:]) if planned else gk.matmul)(a, b, c, out=c[:])
    assert_close(c, a @ b + 1, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("planned", [False, True])
def test_the_same_on_the_gpu(planned: bool) -> None:
    import cupy

    a, b = (cupy.asarray(x) for x in operands())
    c, residual = cupy.ones((M, N), cupy.float32), cupy.zeros((M + 1, N), cupy.float32)
    (gk.plan(a, b, c, out=c[:]) if planned else gk.matmul)(a, b, c, out=c[:])
    assert_close(cupy.asnumpy(c), cupy.asnumpy(a @ b + 1), 1e-6)
    gk.matmul(a, b, out=cupy.empty((M, N), cupy.float32), epilogue=epilogues.Residual(residual[1:]))
    with pytest.raises(ValueError, match="array of Residual overlaps out"):       # the plan is known by now
        gk.matmul(a, b, out=residual[:M], epilogue=epilogues.Residual(residual[1:]))
    assert not residual.any()
    run = gk.plan(a, b, epilogue=epilogues.Residual(residual[1:]))
    with pytest.raises(ValueError, match="array of Residual overlaps out"):
        run(a, b, out=residual[:M])
    assert not residual.any()
