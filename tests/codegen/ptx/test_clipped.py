"""`load_words_within`: what is beyond an array's end is zero, is not read, and takes no branch; products that load so, as PTX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels.collectives.operand import clipped, stored_by_neighbours
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import FPUOp, MMAOp
from gemmkit.ptx.memory import load_words_within, store_global, unpack_words
from gemmkit.ptx.special import thread_index
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import H100, assumed
from tests.ptx_machine.launch import Ptx
from tests.support.harness import Out, compiled, emulated, leaves_nothing, lines_with, on_device, same_bits
from tests.support.machines import poison

F16, F32 = np.dtype("f2"), np.dtype("f4")
DTYPES = [np.dtype(x) for x in ("i1", "f2", "f4", "f8")]


@dataclass(frozen=True)
class Line(gk.Component):
    dtype: Any
    count: int
    length: int                        # of a row


def lines(out: Any, a: Any, case: Any) -> None:
    """Thread t loads from element t * count + 1 of the second row on, which ends in the middle of them."""
    at = thread_index() * case.count + 1
    words = load_words_within(a, 1, (1, at), (0, 0), case.count, case.length - at)
    store_global(out, 0, (thread_index() * case.count,), (0,), unpack_words(case.dtype, words))


@pytest.mark.parametrize("run", [emulated, pytest.param(on_device, marks=pytest.mark.gpu)], ids=["emulator", "gpu"])
@pytest.mark.parametrize("short", range(4))
@pytest.mark.parametrize("nbytes", [16, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_beyond_the_end_is_zero(dtype: np.dtype, nbytes: int, short: int, run: Any, rng: np.random.Generator) -> None:
    count = nbytes // dtype.itemsize
    length = 20 * count + 2 * short + 1
    a = rng.integers(1, 100, (2, length)).astype(dtype)
    (out,) = run(lines, Out((32 * count,), dtype), a, Line(dtype, count, length))
    expected = np.zeros(32 * count, dtype)
    expected[:length - 1] = a[1, 1:]
    assert same_bits(out, expected)


def test_there_is_no_branch() -> None:
    ptx = compiled(lines, Out((256,), F16), np.ones((2, 201), F16), Line(F16, 8, 201))
    assert leaves_nothing(ptx) and not lines_with(ptx, "bra") and len(lines_with(ptx, "ld.global")) == 5


@pytest.mark.compile
@pytest.mark.sample(32)
@pytest.mark.parametrize("orders", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("kernel", ["singlestage", "multistage"])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("sizes", [(33, 39, 21), (5, 35, 70)], ids=str)
def test_products_as_ptx(sizes: tuple[int, int, int], dtype: np.dtype, kernel: str, orders: str, rng: np.random.Generator) -> None:
    """All edges at once, by threads that load their operands; NaN around them in memory."""
    M, N, K = sizes
    layouts = [(RowMajor, ColMajor)["nt".index(order)](dtype) for order in orders]

    def matrix(rows: int, columns: int, order: str) -> np.ndarray:
        lines, length = (rows, columns) if order == "n" else (columns, rows)
        memory = poison((lines + 2, length), dtype)
        memory[1:-1] = rng.standard_normal((lines, length)).astype(dtype)
        return memory[1:-1] if order == "n" else memory[1:-1].T

    operator: Any = MMAOp(dtype="float16") if dtype == F16 else FPUOp(M=16, N=16, MB=4, NB=8)
    conf = gk.get_config(gemm_shape=gk.Tile(M=M, N=N, K=K), operator=operator, kernel=kernel, global_a_layout=layouts[0],
                         global_b_layout=layouts[1], global_d_layout=RowMajor(dtype))
    a, b, out = matrix(M, K, orders[0]), matrix(K, N, orders[1]), poison((M, N), dtype)
    with Ptx().session():
        plan = gk.plan(a, b, out=out, conf=conf)
        plan(a, b, out=out)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    assert np.all(np.abs(out - expected) <= (2e-3 if dtype == F16 else 1e-5) * np.abs(expected).max())


def test_operands_that_are_clipped() -> None:
    """Of rows that begin anywhere; aligned ones are loaded 16 bytes at a time, and a semiring's edge is no zero."""
    conf = gk.get_config(gemm_shape=gk.Tile(M=64, N=64, K=64), operator=MMAOp(dtype="float16"), kernel="singlestage",
                         global_a_layout=RowMajor(F16), global_b_layout=RowMajor(F16))
    operand = conf.spec().a

    assert clipped(operand, describe(np.empty((64, 65), F16), "a"), 0).clipped
    assert not clipped(operand, describe(np.empty((64, 64), F16), "a"), 0).clipped
    assert not clipped(operand, describe(np.empty((64, 65), F16), "a"), np.inf).clipped
    assert not clipped(operand, None, 0).clipped


def test_hopper_loads_edges_as_what_is_within() -> None:
    """By both operands' registers at once where these are few; what is wholly in range is not asked about."""
    with gk.emulate(mapping="device"), assumed(H100):
        for M, N, K in ((1001, 1001, 1001), (333, 777, 455), (4097, 4097, 4097)):
            plan = gk.plan(np.empty((M, K), F16), np.empty((K, N), F16))
            producer: Any = plan._compiled.spec.producer
            assert producer.holds and producer.holds_clipped and producer.together and not producer.holds_whole
        whole: Any = gk.plan(np.empty((1024, 1024), F16), np.empty((1024, 1024), F16))._compiled.spec.producer
        assert not hasattr(whole, "holds_clipped")         # TMA brings both


def test_stores_by_neighbours() -> None:
    """As many elements a thread as one access takes."""
    conf = gk.get_config(gemm_shape=gk.Tile(M=64, N=64, K=64), operator=MMAOp(dtype="float16"), kernel="singlestage",
                         global_a_layout=RowMajor(F16), global_b_layout=RowMajor(F16), global_d_layout=RowMajor(F16))
    operand = conf.spec().d
    for columns, length in ((64, 8), (68, 4), (66, 2), (65, 1)):
        array = describe(np.empty((64, columns), F16)[:, :64], "out")
        found = stored_by_neighbours(operand, array, (64, 64), conf.epilogue)
        assert found.thread == gk.Tile(M=1, N=length) and found.warp.size.N == 32 == operand.tile.extents[1], columns
