"""The parity table's groups (BLAS, WMMA, FPU types and shapes, bias, tropical, complex, dual), and a small version of each in
the emulator."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.layouts import ColMajor, Interleaved, RowMajor
from gemmkit.operators import COMPLEX, DUAL, MAX_PLUS, Algebra, FPUOp, WMMAOp
from tests.support.checks import assert_close
from tests.support.machines import on_machines, poison, tolerance

# ==========================================================================================================================
# Parity group "BLAS" (324 cases): M, N, K in {10, tile, 1000}, N and T, random alpha and beta; and its small version.

OPERATORS = {"wmma-f16-f16": (WMMAOp(accumulator="f2"), 256), "wmma-f16-f32": (WMMAOp(), 128),
             "fpu-f32": (FPUOp(M=16, N=16), 128)}


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("name", OPERATORS)
def test_blas(machine: Any, name: str, trans: str, rng: np.random.Generator) -> None:
    operator, tile = OPERATORS[name]
    dtype, accumulator = operator.dtype, operator.accumulator
    a_layout, b_layout = ((layouts.ColMajor if t == "T" else layouts.RowMajor)(dtype) for t in trans)
    k = operator.shape[2] if machine.emulated and operator.shape[2] > 1 else 8
    mapping: dict[str, Any] = dict(block_shape=gk.Tile(M=16, N=16, K=k), warps_per_block=1) if machine.emulated else {}
    conf = gk.get_config(operator=operator, global_a_layout=a_layout, global_b_layout=b_layout,
                         global_d_layout=layouts.RowMajor(accumulator), **mapping)
    sizes = [(10, 16, 18), (16, 18, 10), (18, 10, 16)] if machine.emulated else list(
        itertools.product((10, tile, 1000), repeat=3))

    def check(M: int, N: int, K: int) -> None:
        a = rng.standard_normal((K, M) if trans[0] == "T" else (M, K)).astype(dtype)
        b = rng.standard_normal((N, K) if trans[1] == "T" else (K, N)).astype(dtype)
        c = rng.standard_normal((M, N)).astype(accumulator)
        alpha, beta = (float(x) for x in rng.standard_normal(2))
        out = machine.array(c)
        with machine.session():
            gk.blas.gemmEx(trans[0], trans[1], alpha, machine.array(a), machine.array(b), beta, out, conf=conf)
        expected = machine.product64(a.T if trans[0] == "T" else a, b.T if trans[1] == "T" else b)
        assert_close(machine.numpy(out), alpha * expected + beta * c.astype(np.float64),
                     tolerance(dtype, accumulator, accumulator, K))

    for size in sizes:
        check(*size)
    with machine.compiles_nothing():                               # another alpha, another beta, the same classes
        for size in sizes[:9]:
            check(*size)


# ==========================================================================================================================
# Parity group "WMMA" (120 cases): f16 -> f16 and f16 -> f32, three shapes, four transposes, and its small version.

MULTIPLES = [(1, 1, 1), (2, 2, 1), (1, 1, 2), (2, 2, 2)]


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("shape", [(16, 16, 16), (8, 32, 16), (32, 8, 16)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("accumulator,base", [("f2", 256), ("f4", 128)])
def test_wmma(machine: Any, accumulator: str, base: int, shape: tuple[int, int, int], trans: str,
              rng: np.random.Generator) -> None:
    M, N, K = shape
    operator = WMMAOp(M, N, K, accumulator=accumulator)
    a_layout, b_layout = ((layouts.ColMajor if t == "T" else layouts.RowMajor)("f2") for t in trans)
    mapping = {}
    if machine.emulated:
        mapping = dict(block_shape=gk.Tile(M=32, N=32, K=16), warps_per_block=1)
        sizes = [(32 * m, 32 * n, 16 * k) for m, n, k in ((1, 1, 1), (2, 1, 2))]
    else:
        sizes = [(base * m, base * n, base * k) for m, n, k in MULTIPLES] + [(2048, 2048, 2048)]
    conf = gk.get_config(operator=operator, global_a_layout=a_layout, global_b_layout=b_layout,
                         global_c_layout=layouts.RowMajor(accumulator), global_d_layout=layouts.RowMajor(accumulator),
                         **mapping)

    def check(m: int, n: int, k: int) -> None:
        a = rng.standard_normal((k, m) if trans[0] == "T" else (m, k)).astype("f2")
        b = rng.standard_normal((n, k) if trans[1] == "T" else (k, n)).astype("f2")
        c = rng.standard_normal((m, n)).astype(accumulator)
        out = machine.array(poison((m, n), accumulator))
        a_, b_, c_ = machine.array(a), machine.array(b), machine.array(c)
        with machine.session():
            gk.matmul(a_.T if trans[0] == "T" else a_, b_.T if trans[1] == "T" else b_, c_, conf, out=out)
        expected = machine.product64(a.T if trans[0] == "T" else a, b.T if trans[1] == "T" else b) + c
        assert_close(machine.numpy(out), expected, tolerance("f2", accumulator, accumulator, k))

    check(*sizes[0])
    with machine.compiles_nothing():
        for size in sizes[1:]:
            check(*size)


# ==========================================================================================================================
# Parity groups "FPU types" (84 cases) and "FPU shapes" (44), and a small version of each in the emulator.
#
# One kernel serves all sizes of a class: the first size compiles it, the others compile nothing.

TYPES = {"f16,f16->f32": ("f2", "f4"), "f32": ("f4", "f4"), "f32,f32->f64": ("f4", "f8"), "f64": ("f8", "f8"),
         "i16": ("i2", "i2"), "i32": ("i4", "i4"), "i64": ("i8", "i8")}

# (M, N, K, MB, NB) of the operator: every warp shape, and every kind of vector
SHAPES = [(8, 16, 2, 4, 8), (16, 16, 2, 4, 8), (32, 16, 2, 4, 8), (8, 32, 2, 4, 8), (16, 32, 2, 4, 8), (32, 32, 2, 4, 8),
          (32, 64, 1, 4, 8), (64, 32, 1, 8, 4), (16, 32, 4, 2, 16), (32, 16, 4, 16, 2), (32, 32, 1, 32, 1)]


def config(operator: FPUOp, trans: str, block: dict[str, int]) -> gk.Config:
    """op(A) and op(B) of row-major arrays; C and D row-major."""
    a, b = ((layouts.ColMajor if t == "T" else layouts.RowMajor)(operator.dtype) for t in trans)
    return gk.get_config(operator=operator, global_a_layout=a, global_b_layout=b, block_shape=gk.Tile(**block),
                         global_d_layout=layouts.RowMajor(operator.accumulator))


def check(machine: Any, conf: gk.Config, trans: str, size: int, alpha: Any, beta: Any, rng: np.random.Generator) -> None:
    """alpha op(A) op(B) + beta C in place."""
    dtype, accumulator = conf.operator.dtype, conf.operator.accumulator
    if dtype.kind == "i":
        most = min(np.iinfo(dtype).max, 2**20)                     # products summed in float64 are exact
        a, b, c = (rng.integers(-most, most, (size, size), t, endpoint=True) for t in (dtype, dtype, accumulator))
    else:
        a, b, c = (rng.standard_normal((size, size)).astype(t) for t in (dtype, dtype, accumulator))
    out = machine.array(c)
    with machine.session():
        gk.blas.gemmEx(trans[0], trans[1], alpha, machine.array(a), machine.array(b), beta, out, conf=conf)
    product = machine.product64(a.T if trans[0] == "T" else a, b.T if trans[1] == "T" else b)
    if dtype.kind == "i":                                          # integers wrap, and are exact
        with np.errstate(all="ignore"):
            expected = (alpha * product.astype(np.int64) + beta * c.astype(np.int64)).astype(accumulator)
        assert np.array_equal(machine.numpy(out), expected)
    else:
        assert_close(machine.numpy(out), alpha * product + beta * c.astype(np.float64),
                     tolerance(dtype, accumulator, accumulator, size))


@pytest.mark.sample(21)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("name", TYPES)
def test_fpu_types(machine: Any, name: str, trans: str, rng: np.random.Generator) -> None:
    dtype, accumulator = TYPES[name]
    block = dict(M=16, N=16, K=8) if machine.emulated else dict(M=64, N=64, K=32)
    conf = config(FPUOp(M=16, N=16, dtype=dtype, accumulator=accumulator), trans, block)
    first, *others = (128, 256, 2048)
    if machine.emulated:
        first, *others = (16, 32) if trans in ("NT", "TN") else (32,)          # each operand in each order
    check(machine, conf, trans, first, 2, 3, rng)
    with machine.compiles_nothing():
        for size in others:
            check(machine, conf, trans, size, 2, 3, rng)


@pytest.mark.sample(7)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_fpu_shapes(machine: Any, shape: tuple[int, ...], trans: str, rng: np.random.Generator) -> None:
    M, N, K, MB, NB = shape
    operator = FPUOp(M, N, K, MB, NB)
    if not machine.emulated:
        check(machine, config(operator, trans, dict(M=128, N=64, K=32)), trans, 128, 2, 3, rng)
    elif trans in ("NT", "TN"):                                    # each operand in each order
        check(machine, config(operator, trans, dict(M=M, N=N, K=8)), trans, 16, 2, 3, rng)


# ==========================================================================================================================
# Parity group "Bias" (36 cases): f16 -> f32 with a bias along N and along M, and its small version.


@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("shape", [(16, 16, 16), (8, 32, 16), (32, 8, 16)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("along", ["N", "M"])
def test_bias(machine: Any, along: str, shape: tuple[int, int, int], trans: str, rng: np.random.Generator) -> None:
    a_layout, b_layout = ((layouts.ColMajor if t == "T" else layouts.RowMajor)("f2") for t in trans)
    mapping: dict[str, Any] = dict(block_shape=gk.Tile(M=32, N=32, K=16), warps_per_block=1) if machine.emulated else {}
    sizes = [32] if machine.emulated else [128, 256, 4096]
    conf = gk.get_config(operator=WMMAOp(*shape), global_a_layout=a_layout, global_b_layout=b_layout,
                         global_d_layout=layouts.RowMajor("f4"), **mapping)

    def check(size: int) -> None:
        a, b = (rng.standard_normal((size, size), np.float32).astype("f2") for _ in "ab")
        bias = rng.standard_normal(size, np.float32)
        out, a_, b_ = machine.array(poison((size, size), "f4")), machine.array(a), machine.array(b)
        with machine.session():
            gk.matmul(a_.T if trans[0] == "T" else a_, b_.T if trans[1] == "T" else b_, None, conf, out=out,
                      epilogue=epilogues.Bias(machine.array(bias), along))
        expected = machine.product64(a.T if trans[0] == "T" else a, b.T if trans[1] == "T" else b)
        expected += bias if along == "N" else bias[:, None]
        assert_close(machine.numpy(out), expected, tolerance("f2", "f4", "f4", size))

    check(sizes[0])
    with machine.compiles_nothing():
        for size in sizes[1:]:
            check(size)


# ==========================================================================================================================
# Parity groups "tropical" (16 cases) and "complex, dual" (36 + 9), and a small version of each in the emulator.
#
# Dual products have all transposes here, where GemmKernels.jl has NN alone. One kernel serves all sizes of a class.


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
def test_tropical(machine: Any, trans: str, rng: np.random.Generator) -> None:
    """Max-plus in float32: exact on whole numbers."""
    base = 16 if machine.emulated else 128
    layouts = [(RowMajor if t == "N" else ColMajor)("f4") for t in trans]
    block = {} if not machine.emulated else dict(block_shape=gk.Tile(M=16, N=16, K=8))
    conf = gk.get_config(operator=MAX_PLUS, global_a_layout=layouts[0], global_b_layout=layouts[1],
                         global_d_layout=RowMajor("f4"), gemm_shape=dict(M=base, N=base, K=base), **block)
    for multiple in MULTIPLES:
        M, N, K = (base * m for m in multiple)
        a, b = (rng.integers(-99, 99, s).astype("f4") for s in ((M, K), (K, N)))
        out = machine.array(poison((M, N), "f4"))
        given = [machine.array(x if t == "N" else np.asfortranarray(x)) for x, t in zip((a, b), trans)]
        with machine.session():
            gk.matmul(*given, conf=conf, out=out)
        expected = np.max([a[:, k, None] + b[None, k] for k in range(K)], axis=0)
        assert np.array_equal(machine.numpy(out), expected)


@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("name,algebra", [("complex", COMPLEX), ("dual", DUAL)])
def test_complex_and_dual(machine: Any, name: str, algebra: Algebra, trans: str, rng: np.random.Generator) -> None:
    """float16 parts, sums and results in float32."""
    number = algebra.number_dtype("f2")
    for size in (16,) if machine.emulated else (128, 256, 2048):
        x, y = (rng.standard_normal((size, size, 2)).astype("f2") for _ in "ab")
        a, b = (v if t == "N" else v.swapaxes(0, 1) for v, t in zip((x, y), trans))
        given = [machine.array(v) if t == "N" else machine.array(v).swapaxes(0, 1) for v, t in zip((x, y), trans)]
        out = machine.array(poison((size, size, 2), "f4"))
        with machine.session():
            gk.matmul(*given, out=out, operator=algebra,
                      global_a_layout=Interleaved(number, "row" if trans[0] == "N" else "col"))
        (p, q), (r, s) = (np.moveaxis(v.astype("f8"), 2, 0) for v in (a, b))
        real = p @ r - q @ s if name == "complex" else p @ r
        assert_close(machine.numpy(out), np.stack([real, p @ s + q @ r], -1), 1e-6 * size**0.5)
