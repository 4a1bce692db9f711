"""`MMAOp` of every shape and dtype: values, shared layouts, the instruction on every GPU that has it, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.layouts import ColMajor, Padded, RowMajor
from gemmkit.operators import COMPLEX, Algebra, MMAOp
from gemmkit.plans.ahead import compile_config
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.support.checks import assert_close
from tests.support.dmma_waits import unwaited_products
from tests.support.machines import on_machines, poison, random, whole

# ==========================================================================================================================
# `MMAOp` of every shape and dtype in the single-stage kernel: values, shared layouts, banks; what it refuses.

F16, F32, F64, E4M3 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8"), np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
OPERATORS = [MMAOp(N=16), MMAOp(K=8), MMAOp(N=16, K=8), MMAOp(M=8, K=16, dtype="i1"), MMAOp(N=16, accumulator=F16), MMAOp(dtype=F32), MMAOp(N=16, dtype=F32), MMAOp(N=16, K=4, dtype=F32), MMAOp(dtype="i1"),
             MMAOp(N=16, dtype="u1", b_dtype="i1"), MMAOp(dtype=E4M3), MMAOp(N=16, dtype=E5M2, b_dtype=E4M3), MMAOp(M=8, K=4, dtype=F64),
             MMAOp(K=4, dtype=F64), MMAOp(dtype=F64), MMAOp(N=16, K=16, dtype=F64)]
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=repr)
ORDERS = {"N": "C", "T": "F"}


def mapping(operator: Any, a: Any = RowMajor, b: Any = RowMajor, d: Any = RowMajor, **fields: Any) -> gk.Config:
    """One warp, and a block of two operations along each of M and N and of four along K."""
    m, n, k = operator.shape
    numbers = isinstance(operator, Algebra)
    dtypes = [f.dtype for f in (operator.fragment_a, operator.fragment_b, operator.fragment_c)]
    kinds = [gk.layouts.Interleaved(x, "row" if order is RowMajor else "col") if numbers else order(x)
             for order, x in zip((a, b, d), dtypes)]
    return gk.get_config(**{**dict(operator=operator, global_a_layout=kinds[0], global_b_layout=kinds[1], global_d_layout=kinds[2],
                                   block_shape=Tile(M=2 * m, N=2 * n, K=4 * k), warps_per_block=1, kernel="singlestage"), **fields})


def values(rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype, order: str) -> np.ndarray:
    """Integers of the whole range, so that sums wrap where there are many; else normal floats."""
    return np.asarray(random(rng, shape, dtype), order=order)


def expected(operator: MMAOp, a: np.ndarray, b: np.ndarray, c: Any = None) -> np.ndarray:
    """In float64; integers wrap, and of float32 tensor cores have 11 bits."""
    if operator.accumulator.kind == "i":
        out = a.astype(np.int64) @ b.astype(np.int64) + (0 if c is None else c.astype(np.int64))
        return out.astype(np.int32)
    return a.astype(F64) @ b.astype(F64) + (0 if c is None else c.astype(F64))


def tolerance(operator: MMAOp, K: int) -> float:
    if operator.accumulator.kind == "i":
        return 0
    inputs = 2.0**-10 if operator.dtype == F32 else 0.0
    sums = 2.0**-13 if operator.dtype.itemsize == 1 else float(np.finfo(operator.accumulator).eps)
    return inputs + (K + 2) * sums


@pytest.mark.sample(64)
@on_machines
@every_operator
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
def test_every_transpose_with_c(machine: Any, operator: MMAOp, trans: str, rng: np.random.Generator) -> None:
    """Odd sizes into a poisoned D, with a C."""
    M, N, K = 3 * operator.M + 1, 2 * operator.N + 3, 5 * operator.K + 3
    a, b = (values(rng, shape, dtype, ORDERS[t])
            for shape, dtype, t in zip(((M, K), (K, N)), (operator.dtype, operator.b_dtype), trans))
    c = values(rng, (M, N), operator.accumulator, "C")
    out = machine.array(poison((M, N), operator.accumulator, ORDERS[trans[0]]))
    conf = mapping(operator, *((RowMajor, ColMajor)[t == "T"] for t in (trans[0], trans[1], trans[0])),
                   global_c_layout=RowMajor(operator.accumulator))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), machine.array(c), conf, out=out)
    assert_close(machine.numpy(out), expected(operator, a, b, c), tolerance(operator, K))


@pytest.mark.sample(6)
@on_machines
@every_operator
def test_shared_tiles_in_either_order(machine: Any, operator: MMAOp, rng: np.random.Generator) -> None:
    """The copy turns what lies across in global memory, and the operator takes what it gets."""
    m, n, k = operator.shape
    a, b = whole(rng, (2 * m, 4 * k), operator.dtype, 1), whole(rng, (4 * k, 2 * n), operator.b_dtype, 1)
    for axis in (0, 1):
        kind = (ColMajor, RowMajor)[axis]
        if operator.refuses("a", kind(operator.dtype)) or operator.refuses("b", kind(operator.b_dtype)):
            continue
        shared = {f"shared_{name}_layout": Padded(kind(dtype), operator.padding(name, axis) // dtype.itemsize) for name, dtype in
                  (("a", operator.dtype), ("b", operator.b_dtype), ("d", operator.accumulator))}
        with machine.session():
            d = gk.matmul(machine.array(a), machine.array(b), None, mapping(operator, **shared))
        assert_close(machine.numpy(d), expected(operator, a, b), 0)


@on_machines
def test_integers_wrap(machine: Any) -> None:
    """2^31 of 128 * 128 * K: more than int32 has."""
    K = 2**17 + 32
    a, b = np.full((16, K), -128, "i1"), np.full((K, 8), -128, "i1")
    if machine.emulated:                                     # as much by C
        a, b = a[:, :64], b[:64]
    c = np.full((16, 8), 2**31 - 1, "i4")
    conf = mapping(MMAOp(dtype="i1"), global_c_layout=RowMajor("i4"))
    with machine.session():
        d = gk.matmul(machine.array(a), machine.array(b), machine.array(c), conf)
    assert np.array_equal(machine.numpy(d), expected(MMAOp(dtype="i1"), a, b, c))
    assert machine.numpy(d)[0, 0] != 128 * 128 * a.shape[1] + 2**31 - 1


@on_machines
def test_tf32_is_rounded(machine: Any) -> None:
    """1 + 2^-11 + 2^-12 becomes 1 + 2^-10, and is not cut to 1."""
    a = np.full((16, 8), 1 + 2.0**-11 + 2.0**-12, F32)
    with machine.session():
        d = gk.matmul(machine.array(a), machine.array(np.eye(8, dtype=F32)), None, mapping(MMAOp(dtype=F32)))
    assert (machine.numpy(d) == 1 + 2.0**-10).all()


@on_machines
@pytest.mark.parametrize("trans", ["NN", "TT"])
def test_complex_numbers_in_float64(machine: Any, trans: str, rng: np.random.Generator) -> None:
    a, b = (np.asarray(rng.standard_normal(s) + 1j * rng.standard_normal(s), order=ORDERS[t])
            for s, t in zip(((19, 21), (21, 13)), trans))
    out = machine.array(poison((19, 13), "c16"))
    conf = mapping(Algebra(MMAOp(dtype=F64), COMPLEX), *((RowMajor, ColMajor)[t == "T"] for t in trans))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), None, conf, out=out)
    assert_close(machine.numpy(out), a @ b, 40 * 2.0**-52)


# -- what there is not ------------------------------------------------------------------------------------------------

def test_8_bit_elements_lie_along_k() -> None:
    with pytest.raises(gk.ConfigError, match="shared_a_layout.*contiguous along K only; use Padded"):
        mapping(MMAOp(dtype="i1"), shared_a_layout=Padded(ColMajor("i1"), 16))
    assert isinstance(mapping(MMAOp(dtype="i1")).shared_b_layout.layout, ColMajor)


@pytest.mark.parametrize("make, says", [
    (lambda: MMAOp(M=16, N=8, K=12), "shapes for float16 are M=16, N=8 or 16, K=16"),
    (lambda: MMAOp(N=24), "N=8 or 16"),
    (lambda: MMAOp(M=8, dtype=F64), "M=8, N=8 or 16, K=4"),
    (lambda: MMAOp(K="8"), "K=8.: the shapes for float16"),
    (lambda: MMAOp(dtype="i8"), "dtype=int64, accumulator=int64.*: the instructions have float16 -> float32"),
    (lambda: MMAOp(dtype="i1", accumulator="i1"), "dtype=int8, accumulator=int8"),
    (lambda: MMAOp(dtype=F16, b_dtype=F32), "b_dtype=float32"),
])
def test_shapes_that_no_instruction_has(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_which_gpus_have_it() -> None:
    assert [MMAOp(**how).minimum_arch for how in (dict(), dict(dtype=F32), dict(dtype="i1"), dict(dtype=E4M3), dict(dtype=F64),
                                                  dict(dtype=F64, M=8, K=4))] == [(8, 0), (8, 0), (8, 0), (8, 9), (9, 0), (8, 0)]


def test_it_is_written_without_what_follows_from_the_dtype() -> None:
    for operator in OPERATORS:
        assert eval(repr(operator), {"MMAOp": MMAOp, "ml_dtypes": ml_dtypes}) == operator
    assert repr(MMAOp(M=8, K=4, dtype=F64)) == "MMAOp(M=8, K=4, dtype='float64')"


# ==========================================================================================================================
# `MMAOp` compiled for every GPU that has it, without one: the instruction, 16-byte moves, and nothing in local memory.

ARCHS = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
OPERATORS_BY_ARCH = {"f16": (MMAOp(N=16), "HMMA"), "f16 x8": (MMAOp(N=16, K=8), "HMMA"), "s8 8x8x16": (MMAOp(M=8, N=16, K=16, dtype="i1"), "IMMA"), "tf32": (MMAOp(dtype="f4"), "HMMA"), "s8": (MMAOp(N=16, dtype="i1"), "IMMA"),
             "e4m3": (MMAOp(dtype=ml_dtypes.float8_e4m3fn), "QMMA"), "f64": (MMAOp(dtype="f8"), "DMMA"), "f64 8x8x4": (MMAOp(M=8, K=4, dtype="f8"), "DMMA")}

#: Bytes that ptxas spills of the tile of large products. 8x8x16 is Turing's shape: from sm_80 on 16x8x32 is the default.
SPILLED = {("s8 8x8x16", (10, 0)): 380, ("s8 8x8x16", (12, 0)): 360}


@pytest.mark.compile
@pytest.mark.sample(72)
@pytest.mark.parametrize("arch", ARCHS, ids=str)
@pytest.mark.parametrize("name", OPERATORS_BY_ARCH)
def test_it_compiles_where_it_is(name: str, arch: tuple[int, int]) -> None:
    operator, opcode = OPERATORS_BY_ARCH[name]
    device: Any = dataclasses.replace(H100, name="another GPU", arch=arch)
    def compiled() -> Any:
        conf = gk.get_config(operator=operator, global_a_layout=RowMajor(operator.dtype), global_b_layout=ColMajor(operator.b_dtype),
                             global_d_layout=RowMajor(operator.accumulator), gemm_shape=dict(M=4096, N=4096, K=4096), device=device, kernel="singlestage")
        return compile_config(conf, device=device)

    if arch < operator.minimum_arch:
        with pytest.raises(gk.ConfigError, match="its instructions need compute capability"):
            compiled()
        return
    kernel = compiled()
    # On Hopper products of 8-bit floats are those of float16: it has them in wgmma alone.
    there = kernel.instructions[opcode] or (opcode == "QMMA" and kernel.instructions["HMMA"])
    spilled = SPILLED.get((name, arch), 0)
    assert there and (spilled or kernel.instructions["LDL"] == kernel.instructions["STL"] == 0)
    assert kernel.usage.spill_stores <= spilled and kernel.usage.stack_bytes <= spilled
    if opcode == "DMMA":
        assert unwaited_products(kernel.assembled.cubin) == []
    assert np.all([size in kernel.sass for size in ("LDG.E.128", "STG.E.128")])
