"""Alpha and beta of `blas.gemmEx` as 0-d arrays and as numbers of several parts, and cuBLAS's constants for trans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts
from gemmkit.blas import gemm, gemmEx
from gemmkit.epilogues import Clamp, LinearCombination, Scale
from gemmkit.epilogues.elementwise import InMemory, Parts, factor
from gemmkit.operators import COMPLEX, QUATERNION, Algebra, FPUOp, MMAOp, WGMMAOp
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from tests.support.machines import on_machines, poison, whole

pytestmark = pytest.mark.sample(8)

F16, F32, F64, C64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8"), np.dtype("c8")
M, N, K = 7, 5, 3
TABLE = np.array(QUATERNION.table)


def times(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Products of quaternions."""
    return np.asarray(np.einsum("...i,...j,ijk->...k", x, y, TABLE))


def operands(rng: np.random.Generator, dtype: Any, parts: tuple[int, ...] = ()) -> tuple[np.ndarray, ...]:
    return tuple(whole(rng, (*shape, *parts), dtype) for shape in ((M, K), (K, N), (M, N)))


@on_machines
@pytest.mark.parametrize("of_factor", [F32, F64, F16], ids=str)
@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
@pytest.mark.parametrize("beta", [0, 3])
def test_arrays_of_no_dimension(machine: Any, dtype: Any, of_factor: Any, beta: int, rng: np.random.Generator) -> None:
    """With a beta of 0 in memory C is not read: it is NaN."""
    a, b, c = operands(rng, dtype)
    out = machine.array(c if beta else poison((M, N), dtype))
    factors = [machine.array(np.array(x, of_factor)) for x in (-2, beta)]
    with machine.session():
        gemmEx("N", "N", factors[0], machine.array(a), machine.array(b), factors[1], out)
    assert np.array_equal(machine.numpy(out), -2 * a.astype(F64) @ b + beta * c)


@on_machines
def test_one_in_memory_and_one_at_the_call(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = operands(rng, F32)
    for alpha, beta in ((machine.array(np.array(2, F32)), -3.0), (2, machine.array(np.array(-3, F32)))):
        out = machine.array(c)
        with machine.session():
            gemmEx("N", "N", alpha, machine.array(a), machine.array(b), beta, out)
        assert np.array_equal(machine.numpy(out), 2 * a @ b - 3 * c)


@on_machines
def test_complex_factors_in_memory(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = operands(rng, F32)
    a, b, c = (np.asarray(x * (1 + 2j), C64) for x in (a, b, c))
    out = machine.array(c)
    with machine.session():
        gemmEx("N", "N", machine.array(np.array(2 - 1j, C64)), machine.array(a), machine.array(b),
               machine.array(np.array(3, F32)), out)
    assert np.array_equal(machine.numpy(out), (2 - 1j) * (a @ b) + 3 * c)


@on_machines
def test_whole_factors_in_memory(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = operands(rng, np.int32)
    out = machine.array(c)
    with machine.session():
        gemmEx("N", "N", machine.array(np.array(2, np.int32)), machine.array(a), machine.array(b),
               machine.array(np.array(-3, np.int64)), out)
    assert np.array_equal(machine.numpy(out), 2 * a @ b - 3 * c)


@on_machines
def test_of_a_stack(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = whole(rng, (3, M, K), F32), whole(rng, (K, N), F32), whole(rng, (3, M, N), F32)
    out = machine.array(c)
    with machine.session():
        gemmEx("N", "N", machine.array(np.array(2, F32)), machine.array(a), machine.array(b), machine.array(np.array(1, F32)), out)
    assert np.array_equal(machine.numpy(out), 2 * a @ b + c)


ALPHA, BETA = np.array([1, -2, 3, 0], F32), np.array([0, 1, 2, -1], F32)


@pytest.mark.kin(3)
@on_machines
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("kind", ["tuple", "memory", "beta 0", "beta 0 in memory", "real in memory"])
def test_quaternions_multiply_from_the_left(machine: Any, dtype: Any, kind: str, rng: np.random.Generator) -> None:
    a, b, c = (x // 2 for x in operands(rng, dtype, (4,)))
    zero = np.zeros(4, F32)
    alpha, beta = {"tuple": (tuple(ALPHA), list(BETA)), "memory": (machine.array(ALPHA), machine.array(BETA)),
                   "beta 0": (tuple(ALPHA), (0, 0, 0, 0)), "beta 0 in memory": (tuple(ALPHA), machine.array(zero)),
                   "real in memory": (machine.array(np.array(2, F32)), 1.0)}[kind]
    of_a, of_b = (np.array([2, 0, 0, 0]), np.array([1, 0, 0, 0])) if "real" in kind else (ALPHA, zero if "0" in kind else BETA)
    product = np.einsum("mki,knj,ijp->mnp", a.astype(F64), b.astype(F64), TABLE)
    out = machine.array(poison(c.shape, dtype) if "0" in kind else c)
    with machine.session():
        gemmEx("N", "N", alpha, machine.array(a), machine.array(b), beta, out, operator=QUATERNION)
    assert np.array_equal(machine.numpy(out), times(of_a, product) + times(of_b, c.astype(F64)))


@on_machines
@pytest.mark.parametrize("kind", ["parts", "a number and parts", "parts in memory", "in memory"])
def test_complex_numbers_of_sixteen_bits(machine: Any, kind: str, rng: np.random.Generator) -> None:
    a, b, c = operands(rng, F16, (2,))
    of = [x[..., 0].astype(F64) + 1j * x[..., 1] for x in (a, b, c)]
    wanted = (1 + 2j) * (of[0] @ of[1]) - 1j * of[2]
    alpha, beta = {"parts": ((1, 2), -1j), "a number and parts": (1 + 2j, (0, -1)),
                   "parts in memory": (machine.array(np.array([1, 2], F32)), machine.array(np.array([0, -1], F16))),
                   "in memory": (machine.array(np.array(1 + 2j, C64)), -1j)}[kind]
    out = machine.array(c)
    with machine.session():
        gemmEx("N", "N", alpha, machine.array(a), machine.array(b), beta, out, operator=COMPLEX)
    made = machine.numpy(out).astype(F64)
    assert np.array_equal(made[..., 0] + 1j * made[..., 1], wanted)


@on_machines
@pytest.mark.parametrize("in_memory", [False, True])
def test_dual_factors(machine: Any, in_memory: bool, rng: np.random.Generator) -> None:
    """(2 + 3 e) (a + a' e) b: the tangent has both."""
    parts, b, c = whole(rng, (M, K, 2), F32), whole(rng, (K, N), F32), whole(rng, (M, N, 2), F32)
    alpha = gk.Dual(machine.array(np.array([2, 3], F32))) if in_memory else (2, 3)
    out = gk.Dual(machine.array(c))
    with machine.session():
        gemmEx("N", "N", alpha, gk.Dual(machine.array(parts)), machine.array(b), 1, out)
    made, value, tangent = machine.numpy(out.parts), parts[..., 0] @ b, parts[..., 1] @ b
    assert np.array_equal(made[..., 0], 2 * value + c[..., 0])
    assert np.array_equal(made[..., 1], 3 * value + 2 * tangent + c[..., 1])


@pytest.mark.kin(3)
@on_machines
@pytest.mark.parametrize("trans", [(a, b) for a in range(3) for b in range(3)], ids=str)
def test_the_constants_of_cublas(machine: Any, trans: tuple[int, int], rng: np.random.Generator) -> None:
    """CUBLAS_OP_N, CUBLAS_OP_T and CUBLAS_OP_C are 0, 1 and 2."""
    a, b, _ = (np.asarray(x * (1 + 1j), C64) for x in operands(rng, F32))
    given = [x if not t else x.T if t == 1 else x.T.conj() for x, t in zip((a, b), trans)]
    given = [machine.array(np.ascontiguousarray(x)) for x in given]
    with machine.session():
        made = gemm(trans[0], np.int64(trans[1]), *given)
    assert np.array_equal(machine.numpy(made), a @ b)


def test_a_host_array_is_read_at_the_call() -> None:
    """Beside a C on a GPU; beside one on the host, in the emulator, it stands for one in the GPU's memory."""
    assert factor(np.array(2, F32), "alpha", F32, 0) == np.float32(2)
    number = QUATERNION.number_dtype(F16)
    assert isinstance(factor(ALPHA, "alpha", number, 0), Parts)
    assert tuple(factor(ALPHA, "alpha", number, 0).value()) == tuple(ALPHA)
    assert isinstance(factor(np.array(2, F32), "alpha", F32, -1), InMemory)


@pytest.mark.parametrize("alpha,error,says", [
    (np.ones(3, F32), ValueError, r"alpha is an array of shape \(3,\); a real number is needed for a C of float32: one of shape \(\)"),
    (np.array(1j), TypeError, "alpha is an array of dtype complex128; a real number"),
    (np.array(True), TypeError, "alpha is an array of dtype bool"),
    ((1.0, 2.0), TypeError, r"alpha is \(1.0, 2.0\); a real number is needed for a C of float32"),
    (np.array("x"), TypeError, "alpha"),
])
def test_what_is_no_factor(alpha: Any, error: Any, says: str) -> None:
    c = poison((M, N), F32)
    with gk.emulate(), pytest.raises(error, match=says):
        gemmEx("N", "N", alpha, np.ones((M, K), F32), np.ones((K, N), F32), 0, c)
    assert np.isnan(c).all()


def test_parts_that_are_too_few_and_an_overlap() -> None:
    a, c = np.ones((4, 4, 4), F32), poison((4, 4, 4), F32)
    with gk.emulate():
        with pytest.raises(TypeError, match=r"alpha is \(1, 2\); a real number, or one of 4 parts \(real, i, j, k\), is needed"):
            gemmEx("N", "N", (1, 2), a, a, 0, c, operator=QUATERNION)
        with pytest.raises(ValueError, match=r"\(\) or, of its parts, \(4,\)"):
            gemmEx("N", "N", np.ones(2), a, a, 0, c, operator=QUATERNION)
        with pytest.raises(ValueError, match="overlaps out"):
            gemmEx("N", "N", c[0, 0], a, a, 0, c, operator=QUATERNION)
    for trans in (3, -1, True, 1.0, "X"):
        with gk.emulate(), pytest.raises(ValueError, match='transa is .*"N", "T" or "C" is needed'):
            gemmEx(trans, "N", 1, a[0], a[0], 0, c[0])                                          # type: ignore[arg-type]
    assert np.isnan(c).all()


@pytest.mark.gpu
def test_a_factor_in_memory_is_read_when_the_kernel_runs() -> None:
    """A stream that is captured refuses to be synchronised, and the graph sees what is written later."""
    import cupy

    a, c, alpha = cupy.ones((64, 64), F32), cupy.zeros((64, 64), F32), cupy.array(2, F32)
    gemmEx("N", "N", alpha, a, a, cupy.array(0, F32), c)                         # compiled before
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    zero = cupy.array(0, F32)
    with stream:
        stream.begin_capture()
        gemmEx("N", "N", alpha, a, a, zero, c)
        graph = stream.end_capture()
    for value in (3, -5):
        alpha.fill(value)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert (c == 64 * value).all()


@pytest.mark.kin(3)
@on_machines
@pytest.mark.parametrize("of_factor", [F32, F16, np.dtype(np.int32)], ids=str)
def test_a_scale_in_memory(machine: Any, of_factor: Any, rng: np.random.Generator) -> None:
    """Of all products of a stack, among other epilogues; another array's number with the same kernel."""
    a, b = whole(rng, (2, M, K), F16), whole(rng, (K, N), F16)
    for value in (3, -2):
        by = machine.array(np.array(value, of_factor))
        with machine.session():
            d = gk.matmul(machine.array(a), machine.array(b), epilogue=Scale(by) | Clamp(-40.0, 40.0))
        assert np.array_equal(machine.numpy(d), np.clip(value * a.astype(F64) @ b, -40, 40))


IN_MEMORY = InMemory(np.ones(1, F32), 1, F32)
QUATERNIONS = QUATERNION.number_dtype(F32)


@pytest.mark.thorough
@pytest.mark.compile
@pytest.mark.parametrize("operator,layout,alpha,beta", [
    (MMAOp(), layouts.RowMajor(F32), IN_MEMORY, IN_MEMORY), (MMAOp(), layouts.RowMajor(F32), 2.0, IN_MEMORY),
    (WGMMAOp(64), layouts.RowMajor(F32), IN_MEMORY, IN_MEMORY),
    (Algebra(FPUOp(M=16, N=16), QUATERNION), layouts.Interleaved(QUATERNIONS), (1, 2, 3, 4), InMemory(np.ones(4, F32), 4, QUATERNIONS)),
], ids=["mma", "one of two", "wgmma", "quaternions"])
def test_compiled_without_spills(operator: Any, layout: Any, alpha: Any, beta: Any) -> None:
    c = np.zeros((128, 128), layout.dtype)
    conf = gk.get_config(operator=operator, global_a_layout=layout if alpha == (1, 2, 3, 4) else layouts.RowMajor(F16),
                         global_d_layout=layout, epilogue=LinearCombination(alpha, beta, c, layout),
                         gemm_shape=dict(M=128, N=128, K=128), device=H100)
    made = ahead.compile_config(conf, device=H100)
    assert made.usage.spill_stores == 0 and made.usage.stack_bytes == 0
    assert any(opcode.startswith("LDG") for opcode in made.instructions)
