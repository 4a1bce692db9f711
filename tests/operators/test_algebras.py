"""Products of complex, dual, quaternion and a user's own numbers: against the definition in float64, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.layouts import ColMajor, Interleaved, Padded, Planar, Planes, RowMajor
from gemmkit.operators import COMPLEX, DUAL, QUATERNION, SPLIT_COMPLEX, Algebra, FPUOp, MMAOp, dual
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from gemmkit.transforms import Map
from tests.support.algebras import FRACTIONS, TRIANGULAR, product64
from tests.support.checks import assert_close
from tests.support.machines import BF16, MACHINES, on_machines, poison

# ==========================================================================================================================
# Products of complex, dual, quaternion and a user's own numbers: against the definition in float64, part by part.

ALGEBRAS = {"complex": COMPLEX, "dual": DUAL, "dual3": dual(3), "quaternion": QUATERNION, "split": SPLIT_COMPLEX,
            "triangular": TRIANGULAR, "fractions": FRACTIONS}


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, order: str = "N") -> np.ndarray:
    """Random parts along a last axis; "T": stored as the transpose."""
    if order == "N":
        return rng.standard_normal(shape).astype(dtype)
    return rng.standard_normal((shape[1], shape[0], *shape[2:])).astype(dtype).swapaxes(0, 1)


def close(out: np.ndarray, expected: np.ndarray, dtype: Any, K: int) -> None:
    eps = {2: 1e-3 if np.dtype(dtype) != BF16 else 8e-3, 4: 1e-7, 8: 1e-16}[np.dtype(dtype).itemsize]
    assert_close(out, expected, eps * 4 + (K + 4) * (1e-7 if np.dtype(dtype).itemsize < 8 else 1e-16))


def sizes(machine: Any) -> list[tuple[int, int, int]]:
    return [(17, 13, 11)] if machine.emulated else [(17, 13, 11), (128, 64, 96), (1, 257, 31), (200, 136, 72), (64, 1, 7)]


# In the emulator float64 and bfloat16 with three algebras: the others' code is the same.
PAIRS = [pytest.param(machine, name, dtype, id=f"{name}-{np.dtype(dtype).name}-{kind}", marks=[pytest.mark.gpu] * (kind == "gpu"))
         for kind, machine in MACHINES.items() for name in ALGEBRAS for dtype in ("f2", "f4", "f8", BF16)
         if kind == "gpu" or name in ("complex", "dual", "dual3") or dtype in ("f2", "f4")]


@pytest.mark.sample(20)
@pytest.mark.parametrize("machine, name, dtype", PAIRS)
def test_every_algebra(machine: Any, name: str, dtype: Any, rng: np.random.Generator) -> None:
    """A last axis of parts, tensor cores for 16 bits and the ordinary units for wider ones."""
    algebra = ALGEBRAS[name]
    for M, N, K in sizes(machine):
        a, b = (numbers(rng, (*shape, algebra.parts), dtype) for shape in ((M, K), (K, N)))
        out = machine.array(poison((M, N, algebra.parts), dtype))
        with machine.session():
            gk.matmul(machine.array(a), machine.array(b), out=out, operator=algebra)
        close(machine.numpy(out), product64(algebra, a, b), dtype, K)


@pytest.mark.sample(27)
@on_machines
@pytest.mark.parametrize("transa", "NTC")
@pytest.mark.parametrize("transb", "NTC")
@pytest.mark.parametrize("name", ["complex", "dual", "quaternion"])
def test_gemm_ex(machine: Any, name: str, transa: str, transb: str, rng: np.random.Generator) -> None:
    """All transposes, alpha and beta; "C" conjugates on the way in."""
    if machine.emulated and name == "quaternion" and "C" not in (transa, transb):
        name = "split"
    algebra = ALGEBRAS[name]
    signs = np.array(algebra.conjugate)
    operated = {"N": lambda x: x, "T": lambda x: x.swapaxes(0, 1), "C": lambda x: x.swapaxes(0, 1) * signs}
    for M, N, K in [(9, 18, 5)] if machine.emulated else [(9, 18, 5), (101, 67, 33), (128, 128, 128), (256, 256, 256)]:
        a = numbers(rng, ((M, K) if transa == "N" else (K, M)) + (algebra.parts,), "f2")
        b = numbers(rng, ((K, N) if transb == "N" else (N, K)) + (algebra.parts,), "f2")
        c = numbers(rng, (M, N, algebra.parts), "f2")
        out = machine.array(c)
        with machine.session():
            gk.blas.gemmEx(transa, transb, 2.0, machine.array(a), machine.array(b), -0.5, out, operator=algebra)
        close(machine.numpy(out), 2 * product64(algebra, operated[transa](a), operated[transb](b)) - 0.5 * c.astype("f8"), "f2", K)


@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("base", [MMAOp(), MMAOp(accumulator="f2"), MMAOp(dtype=BF16), FPUOp(16, 16, dtype="f2", accumulator="f4"),
                                  FPUOp(8, 16, 2, dtype="f4", accumulator="f8")],
                         ids=["mma-f16", "mma-f16-f16", "mma-bf16", "fpu-f16", "fpu-f32-f64"])
def test_a_base_of_ones_own(machine: Any, base: Any, rng: np.random.Generator) -> None:
    dtype = np.dtype(base.dtype)
    a, b = numbers(rng, (18, 7, 2), dtype), numbers(rng, (7, 20, 2), dtype)
    with machine.session():
        out = machine.numpy(gk.matmul(machine.array(a), machine.array(b), operator=Algebra(base, COMPLEX)))
    assert out.dtype == dtype and out.shape == (18, 20, 2)
    close(out, product64(COMPLEX, a, b), dtype if base.accumulator != np.float16 else "f2", 7)


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("orders", ["rr", "rc", "cr", "cc"])
def test_planar_and_interleaved(machine: Any, orders: str, dtype: str, rng: np.random.Generator) -> None:
    """A planar A, an interleaved B, a planar D: every order, through one product."""
    M, N, K = (18, 20, 9) if machine.emulated else (130, 72, 57)
    number = COMPLEX.number_dtype(dtype)
    a, b = numbers(rng, (M, K, 2), dtype), numbers(rng, (K, N, 2), dtype)
    planes = np.ascontiguousarray(np.moveaxis(a, 2, 0))
    if orders[0] == "c":
        planes = np.ascontiguousarray(planes.transpose(0, 2, 1)).transpose(0, 2, 1)
    given_b = b if orders[1] == "r" else np.ascontiguousarray(b.swapaxes(0, 1))
    given_b = machine.array(given_b)
    out = machine.array(poison((2, M, N), dtype))
    order = {"r": "row", "c": "col"}
    with machine.session():
        gk.matmul(_in_order(machine, planes, orders[0]), given_b if orders[1] == "r" else given_b.swapaxes(0, 1), out=out,
                  operator=COMPLEX, global_a_layout=Planar(number, order[orders[0]]),
                  global_b_layout=Interleaved(number, order[orders[1]]) if dtype == "f2" else None,
                  global_d_layout=Planar(number))
    close(np.moveaxis(machine.numpy(out), 0, 2), product64(COMPLEX, a, b), dtype, K)


def _in_order(machine: Any, planes: np.ndarray, order: str) -> Any:
    if order == "r":
        return machine.array(planes)
    return machine.array(np.ascontiguousarray(planes.transpose(0, 2, 1))).swapaxes(1, 2)


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_complex_arrays(machine: Any, dtype: str, rng: np.random.Generator) -> None:
    """complex64 and complex128 need no operator: parts on the ordinary units, column-major operands, C, a bias."""
    for M, N, K in sizes(machine):
        a, b, c = (rng.standard_normal((*s, 2)).astype(f"f{int(dtype[1:]) // 2}").view(dtype)[..., 0]
                   for s in ((M, K), (K, N), (M, N)))
        bias = rng.standard_normal(N)
        out = machine.array(poison((M, N), dtype))
        with machine.session():
            gk.matmul(machine.array(np.asfortranarray(a)), machine.array(b), machine.array(c), out=out,
                      epilogue=gk.epilogues.Bias(machine.array(bias)))
        assert_close(machine.numpy(out), a.astype("c16") @ b + c + bias, 1e-5 if dtype == "c8" else 1e-13)


def test_complex64_is_planes_of_float32() -> None:
    conf = gk.get_config(operator=COMPLEX, global_a_layout=RowMajor("c8"))
    operator = conf.operator
    assert isinstance(operator, Algebra) and isinstance(operator.base, FPUOp) and operator.base.dtype == np.float32
    assert isinstance(conf.shared_a_layout, Planes) and conf.shared_a_layout.plane.dtype == np.float32


@pytest.mark.kin(5)
def test_structured_arrays(rng: np.random.Generator) -> None:
    """A NumPy array of numbers is one of two dimensions, and knows its algebra."""
    number = dual(2).number_dtype("f4")
    a, b = numbers(rng, (18, 7, 3), "f4"), numbers(rng, (7, 20, 3), "f4")
    with gk.emulate():
        out = gk.matmul(a.view(number)[..., 0], b.view(number)[..., 0])
    assert out.dtype == number and out.shape == (18, 20)
    assert_close(out.view("f4").reshape(18, 20, 3), product64(dual(2), a, b), 1e-6)


@on_machines
def test_empty_and_single(machine: Any, rng: np.random.Generator) -> None:
    for M, N, K in ((0, 5, 3), (3, 0, 5), (3, 5, 0), (1, 1, 1)):
        a, b = numbers(rng, (M, K, 2), "f2"), numbers(rng, (K, N, 2), "f2")
        out = machine.array(poison((M, N, 2), "f2"))
        with machine.session():
            gk.matmul(machine.array(a), machine.array(b), out=out, operator=DUAL)
        close(machine.numpy(out), product64(DUAL, a, b), "f2", 1)


@on_machines
def test_strided_and_misaligned_views(machine: Any, rng: np.random.Generator) -> None:
    """Every other row of a larger array, from its second number on: nothing is copied."""
    a, b = numbers(rng, (34, 12, 2), "f2"), numbers(rng, (11, 21, 2), "f2")
    given_a, given_b = machine.array(a)[::2, 1:], machine.array(b)[:, 1:]
    with machine.session():
        out = machine.numpy(gk.matmul(given_a, given_b, operator=COMPLEX))
    close(out, product64(COMPLEX, a[::2, 1:], b[:, 1:]), "f2", 11)


# -- functions of numbers -------------------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@on_machines
def test_functions_see_numbers(machine: Any, rng: np.random.Generator) -> None:
    """A transform returns a tuple of parts, an epilogue computes with the numbers themselves."""
    import math

    @dataclass(frozen=True)
    class Tanh(gk.epilogues.Epilogue):
        def __call__(self, x: Any, m: int, n: int) -> Any:
            value = math.tanh(x.value)
            return value, (1 - value * value) * x.tangent

    a, b = numbers(rng, (18, 7, 2), "f4"), numbers(rng, (7, 20, 2), "f4")
    swap = Map(lambda x: (x[1], x[0]))
    square = Map(lambda x: x * x - 2 * x + 1)
    with machine.session():
        out = machine.numpy(gk.matmul(machine.array(a), machine.array(b), operator=DUAL, transform_global_to_shared_a=swap,
                                      transform_regs_to_shared_d=square, epilogue=Tanh()))
    x = product64(DUAL, a[..., ::-1], b)
    value, tangent = x[..., 0] ** 2 - 2 * x[..., 0] + 1, (2 * x[..., 0] - 2) * x[..., 1]
    assert_close(out, np.stack([np.tanh(value), (1 - np.tanh(value) ** 2) * tangent], -1), 1e-4)


# -- bad input ------------------------------------------------------------------------------------------------------------

def test_tables_of_the_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"table=...\): it has shape \(2, 2\), and must be n x n x n"):
        Algebra(None, [[1, 0], [0, 1]])
    with pytest.raises(ValueError, match=r"it has shape \(2, 2, 3\)"):
        Algebra(None, np.zeros((2, 2, 3)))
    with pytest.raises(ValueError, match="'x' is not a real number"):
        Algebra(None, [[["x", 0], [0, 1]], [[0, 1], [0, 0]]])
    with pytest.raises(ValueError, match="2 different names are needed"):
        Algebra(None, DUAL.table, ["a"])
    with pytest.raises(ValueError, match="2 signs"):
        Algebra(None, DUAL.table, conjugate=(1, 0))
    with pytest.raises(ValueError, match="an MMAOp, WGMMAOp or FPUOp"):
        Algebra(COMPLEX, DUAL)
    with pytest.raises(ValueError, match=r"dual\(tangents=0\)"):
        dual(0)


def test_arrays_that_do_not_fit() -> None:
    a = np.zeros((4, 4, 3), np.float16)
    with gk.emulate():
        with pytest.raises(ValueError, match=r"a: an array has shape \(4, 4, 3\) and dtype float16; .* needs float16 with a last "
                                             "axis of 2, the parts value, tangent"):
            gk.matmul(a, a, operator=DUAL)
        with pytest.raises(ValueError, match="the parts of a number must be neighbours"):
            gk.matmul(np.zeros((4, 4, 4), np.float16)[..., ::2], a[..., :2].copy(), operator=DUAL)
        with pytest.raises(ValueError, match="the dtype of a number of several parts is needed"):
            Interleaved("float32")
        with pytest.raises(gk.ConfigError, match="numbers have 2 parts .*which would be lost"):
            gk.matmul(a[..., :2].copy(), a[..., :2].copy(), operator=DUAL, out=np.zeros((4, 4), np.float32))
        with pytest.raises(gk.ConfigError, match="an algebra's numbers are in planes"):       # ldmatrix loads no numbers
            gk.get_config(operator=COMPLEX.with_base(MMAOp()), kernel="singlestage",
                          global_a_layout=Interleaved(COMPLEX.number_dtype("f2")),
                          shared_a_layout=Padded(ColMajor(COMPLEX.number_dtype("f2")), 4))
        with pytest.raises(TypeError, match=r"alpha is 1j; a real number, or one of 2 parts \(value, tangent\), is needed"):
            gk.blas.gemmEx("N", "N", 1j, a[..., :2].copy(), a[..., :2].copy(), 0.0, np.zeros((4, 4, 2), np.float16), operator=DUAL)


# -- machine code ---------------------------------------------------------------------------------------------------------

LARGE = dict(M=4096, N=4096, K=4096)


def compiled(algebra: Algebra, dtype: Any, order: str = "row") -> tuple[gk.Config, Any]:
    """By the kernel for any GPU."""
    number = algebra.number_dtype(dtype)
    conf = gk.get_config(operator=Algebra(MMAOp(), algebra) if dtype == "f2" else algebra, global_a_layout=Interleaved(number, order), global_d_layout=Interleaved(number),
                         gemm_shape=LARGE, device=H100)
    kernel = ahead.compile_config(conf, device=H100)
    assert (kernel.usage.spill_stores, kernel.usage.spill_loads, kernel.usage.stack_bytes) == (0, 0, 0)
    assert kernel.instructions["CALL"] == kernel.instructions["LDL"] == 0
    return conf, kernel


@pytest.mark.kin(5)
@pytest.mark.sample(7)
@pytest.mark.compile
@pytest.mark.parametrize("name,order", [("complex", "row"), ("complex", "col"), ("dual", "row"), ("dual3", "col"),
                                        ("quaternion", "row"), ("quaternion", "col"), ("split", "col")])
def test_tensor_cores_do_what_the_table_asks(name: str, order: str) -> None:
    """As many HMMAs a fragment as the table has entries, no more and no fewer."""
    algebra = ALGEBRAS[name]
    conf, kernel = compiled(algebra, "f2", order)
    warp = conf.compute_warp.size
    assert kernel.instructions["HMMA"] == algebra.products * warp.M * warp.N // (16 * 8)
    moved = (conf.block_shape.MK.count + conf.block_shape.KN.count) // conf.threads
    assert algebra.parts != 2 or kernel.instructions["PRMT"] <= moved + 8         # two numbers' parts by two instructions
    assert algebra.products == {"complex": 4, "dual": 3, "dual3": 7, "quaternion": 16, "split": 4}[name]


@pytest.mark.kin(5)
@pytest.mark.compile
def test_numbers_that_start_at_odd_parts_compile() -> None:
    """2-byte alignment: part by part, and no wider access."""
    number = COMPLEX.number_dtype("f2")
    parts = np.zeros(64 * 64 * 2 + 1, np.float16)[1:].reshape(64, 64, 2)
    assert parts.ctypes.data % 4 == 2
    conf = gk.get_config(operator=Algebra(MMAOp(), COMPLEX), global_a_layout=Interleaved(number),
                         global_d_layout=Interleaved(number), gemm_shape=dict(M=64, N=64, K=64), device=H100)
    kernel = ahead.compile_config(conf, device=H100, gemm_shape=dict(M=64, N=64, K=64),
                                       operands=dict(a=parts, b=parts, out=parts))
    assert kernel.usage.spill_stores == 0 and "LDG.E.U16" in kernel.sass
    assert "LDG.E.128" not in kernel.sass and "STG.E.128" not in kernel.sass


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@pytest.mark.compile
@pytest.mark.parametrize("name,dtype,opcode", [("complex", "f4", "FFMA"), ("complex", "f8", "DMMA"), ("dual", "f4", "FFMA"),
                                               ("dual3", "f4", "FFMA")])
def test_other_units_do_what_the_table_asks(name: str, dtype: str, opcode: str) -> None:
    conf, kernel = compiled(ALGEBRAS[name], dtype)
    assert isinstance(conf.operator, Algebra)
    base, warp = conf.operator.base, conf.compute_warp.size
    each = warp.M * warp.N // (base.M * base.N) if opcode == "DMMA" else base.M * base.N * base.K // 32        # of one thread
    step = ALGEBRAS[name].products * each                                       # steps may be unrolled
    assert kernel.instructions[opcode] in (step, 2 * step, 4 * step, 8 * step)
    assert kernel.instructions["HMMA"] == 0                       # no tf32


# ==========================================================================================================================
# Complex numbers on the ordinary units: products, all pairs of N, T and C, complex alpha and beta.

OPERATION = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T}
TOLERANCE = {"c8": 1e-5, "c16": 1e-13}


def complex_normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.asarray((rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype))


@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("transa,transb,dtype", [
    *((a, b, "c8") for a in "NTC" for b in "NTC"), ("N", "N", "c16"), ("T", "C", "c16"), ("C", "T", "c16")])
def test_gemm_ex_of_complex_numbers(machine: Any, dtype: str, transa: str, transb: str, rng: np.random.Generator) -> None:
    sizes = [(9, 7, 5)] if machine.emulated else [(9, 7, 5), (64, 96, 32), (101, 67, 33)]
    for M, N, K in sizes:
        a = complex_normal(rng, (M, K) if transa == "N" else (K, M), dtype)
        b = complex_normal(rng, (K, N) if transb == "N" else (N, K), dtype)
        c = complex_normal(rng, (M, N), dtype)
        wide = np.complex128
        expected = (1.5 - 2j) * OPERATION[transa](a.astype(wide)) @ OPERATION[transb](b.astype(wide)) + 0.5j * c.astype(wide)
        out = machine.array(c)
        with machine.session():
            gk.blas.gemmEx(transa, transb, 1.5 - 2j, machine.array(a), machine.array(b), 0.5j, out)
        assert_close(machine.numpy(out), expected, TOLERANCE[dtype])


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_matmul_with_c_and_a_bias(machine: Any, dtype: str, rng: np.random.Generator) -> None:
    M, N, K = 17, 13, 11
    a, b, c = (complex_normal(rng, s, dtype) for s in ((M, K), (K, N), (M, N)))
    bias = rng.standard_normal(N).astype("f4")
    out = machine.array(poison((M, N), dtype))
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), machine.array(c), out=out,
                  epilogue=gk.epilogues.Bias(machine.array(bias)))
    assert_close(machine.numpy(out), a.astype("c16") @ b.astype("c16") + c + bias, TOLERANCE[dtype])


def test_beta_zero_does_not_read_c(rng: np.random.Generator) -> None:
    a, b = complex_normal(rng, (5, 4), "c8"), complex_normal(rng, (4, 6), "c8")
    out = poison((5, 6), "c8")
    with gk.emulate():
        gk.blas.gemmEx("N", "N", 1.0, a, b, 0.0, out)
    assert_close(out, a @ b, 1e-5)


def test_a_complex_alpha_needs_a_complex_c(rng: np.random.Generator) -> None:
    a = np.ones((2, 2), np.float32)
    with gk.emulate(), pytest.raises(TypeError, match=r"alpha is 1j; a real number is needed for a C of float32"):
        gk.blas.gemmEx("N", "N", 1j, a, a, 0.0, a.copy())
