"""`blas.gemmEx` and `blas.gemm`: in place, alpha and beta in every form, cuBLAS's constants, and what each refuses."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts
from gemmkit.blas import gemm, gemmEx
from gemmkit.epilogues import Clamp, LinearCombination, Scale
from gemmkit.epilogues.elementwise import InMemory, Parts, factor
from gemmkit.operators import COMPLEX, QUATERNION, Algebra, FPUOp, MMAOp, WGMMAOp, WMMAOp
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from gemmkit.tiling import Tile
from tests.support.machines import BF16, is_poison, on_machines, poison, whole

# ==========================================================================================================================
# `blas.gemmEx` and `blas.gemm`: in place, run-time alpha and beta, and what each refuses.

F16, F32 = np.dtype("f2"), np.dtype("f4")
M, N, K = 19, 18, 9


def operands(rng: np.random.Generator, dtype: Any, trans: str = "NN") -> tuple[np.ndarray, np.ndarray]:
    """A and B as stored, so that op(A) is M x K and op(B) is K x N."""
    a, b = whole(rng, (M, K), dtype), whole(rng, (K, N), dtype)
    return tuple(np.ascontiguousarray(x if t == "N" else x.T) for x, t in zip((a, b), trans))  # type: ignore[return-value]


def op(x: np.ndarray, trans: str) -> np.ndarray:
    return (x if trans == "N" else x.T).astype(np.float64)


@pytest.mark.sample(7)
@on_machines
@pytest.mark.parametrize("trans", [a + b for a in "NTC" for b in "NTC"])
def test_every_pair_of_trans_characters(machine: Any, trans: str, rng: np.random.Generator) -> None:
    a, b = operands(rng, F16, trans)
    c = whole(rng, (M, N), F32)
    out = machine.array(c)
    with machine.session():
        assert gemmEx(trans[0], trans[1], 2, machine.array(a), machine.array(b), 3, out) is out
    assert np.array_equal(machine.numpy(out), 2 * op(a, trans[0]) @ op(b, trans[1]) + 3.0 * c)


@pytest.mark.sample(7)
@on_machines
@pytest.mark.parametrize("dtype,c_dtype", [("f2", "f2"), ("f2", "f4"), ("f4", "f4"), ("f8", "f8"), ("i4", "i4"),
                                           ("i1", "i1")])
@pytest.mark.parametrize("order", ["C", "F"])
def test_types_and_orders_of_c(machine: Any, dtype: str, c_dtype: str, order: str, rng: np.random.Generator) -> None:
    a, b = (x // 2 for x in operands(rng, dtype))
    c = np.asarray(whole(rng, (M, N), c_dtype), order=order)
    out = machine.array(c)
    with machine.session():
        gemmEx("N", "N", np.float32(2), machine.array(a), machine.array(b), np.int64(-1), out)
    assert np.array_equal(machine.numpy(out), 2 * op(a, "N") @ op(b, "N") - c)


@pytest.mark.sample(6)
@on_machines
@pytest.mark.parametrize("alpha,beta", [(0, 0), (1, 0), (-0.5, 0.0), (0, 1), (0.25, 0.5), (0.0, np.float64(2))])
def test_alpha_and_beta(machine: Any, alpha: float, beta: float, rng: np.random.Generator) -> None:
    """beta = 0 does not read C, which is then full of NaN."""
    a, b = operands(rng, F32)
    c = whole(rng, (M, N), F32) if beta != 0 else poison((M, N), F32)
    out = machine.array(c)
    with machine.session():
        gemmEx("N", "N", alpha, machine.array(a), machine.array(b), beta, out)
    product = alpha * op(a, "N") @ op(b, "N")
    assert np.array_equal(machine.numpy(out), product + beta * c if beta != 0 else product)


@on_machines
@pytest.mark.parametrize("dtype", [np.dtype("f2"), BF16], ids=str)
def test_beta_times_c_is_not_rounded_to_cs_type(machine: Any, dtype: np.dtype, rng: np.random.Generator) -> None:
    """It was: 0.3 as a float16 is 0.30005, and the product another float16."""
    a, b = np.zeros((40, 16), dtype), np.zeros((16, 24), dtype)
    c = (1000 + 8 * np.arange(40 * 24)).reshape(40, 24).astype(dtype)
    out = machine.array(c.copy())
    with machine.session():
        gemmEx("N", "N", 1.0, machine.array(a), machine.array(b), 0.3, out)
    assert np.array_equal(machine.numpy(out).astype("f4"), (np.float32(0.3) * c.astype("f4")).astype(dtype).astype("f4"))


@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("alpha,beta", [(np.inf, 0), (np.nan, 0), (1, np.inf), (1, np.nan), (-np.inf, 1)])
def test_what_is_not_finite_is_allowed(machine: Any, alpha: float, beta: float) -> None:
    a, b, c = np.ones((M, K), F32), np.ones((K, N), F32), np.ones((M, N), F32)
    out = machine.array(c)
    with machine.session():
        gemmEx("N", "N", alpha, machine.array(a), machine.array(b), beta, out)
    expected = alpha * K + (beta if beta != 0 else 0)
    assert np.array_equal(machine.numpy(out), np.full((M, N), expected), equal_nan=True)


@on_machines
def test_c_can_be_a_view(machine: Any, rng: np.random.Generator) -> None:
    """Every second row and a range of columns; the rest of its memory stays as it is."""
    a, b = operands(rng, F16)
    memory = whole(rng, (2 * M, N + 5), F32)
    on = machine.array(memory)
    with machine.session():
        gemmEx("N", "N", 1, machine.array(a), machine.array(b), 1, on[::2, 3:-2])
    memory[::2, 3:-2] += op(a, "N") @ op(b, "N")
    assert np.array_equal(machine.numpy(on), memory)


@on_machines
@pytest.mark.parametrize("operator", [MMAOp(), WMMAOp(), WMMAOp(M=8, N=32), FPUOp(M=16, N=16, dtype=F16, accumulator=F32)],
                         ids=repr)
def test_an_operator_of_the_callers(machine: Any, operator: Any, rng: np.random.Generator) -> None:
    a, b = operands(rng, F16, "TN")
    c = whole(rng, (M, N), F32)
    out = machine.array(c)
    with machine.session():
        gemmEx("T", "N", 3, machine.array(a), machine.array(b), -2, out, operator=operator)
    assert np.array_equal(machine.numpy(out), 3 * op(a, "T") @ op(b, "N") - 2.0 * c)


@on_machines
def test_a_configuration_of_the_callers(machine: Any, rng: np.random.Generator) -> None:
    """Its epilogue gives way to alpha and beta, its transforms stay."""
    conf = gk.get_config(operator=MMAOp(), global_a_layout=layouts.RowMajor(F16), block_shape=Tile(M=16, N=16, K=16),
                         epilogue=gk.epilogues.Bias(machine.array(np.ones(N, F32))),
                         transform_global_to_shared_a=gk.transforms.Map(lambda x: x + 1))
    a, b = operands(rng, F16)
    c = whole(rng, (M, N), F32)
    out = machine.array(c)
    with machine.session():
        gemmEx("N", "N", 3, machine.array(a), machine.array(b), -2, out, conf=conf)
    assert np.array_equal(machine.numpy(out), 3 * (op(a, "N") + 1) @ op(b, "N") - 2.0 * c)


@on_machines
@pytest.mark.parametrize("m,n,k", [(0, N, K), (M, 0, K), (M, N, 0)])
def test_a_size_of_zero(machine: Any, m: int, n: int, k: int, rng: np.random.Generator) -> None:
    c = whole(rng, (m, n), F32)
    out = machine.array(c)
    with machine.session():
        gemmEx("N", "N", 2, machine.array(np.ones((m, k), F16)), machine.array(np.ones((k, n), F16)), 3, out)
    assert np.array_equal(machine.numpy(out), 3 * c)


# -- gemm -------------------------------------------------------------------------------------------------------------

def test_gemm_has_cupys_signature() -> None:
    """Of `cupy.cublas.gemm`, as its documentation gives it."""
    parameters = inspect.signature(gemm).parameters.values()
    assert [p.name for p in parameters] == ["transa", "transb", "a", "b", "out", "alpha", "beta"]
    assert [p.default for p in parameters][4:] == [None, 1.0, 0.0]


@pytest.mark.gpu
def test_gemm_has_the_installed_cupys_signature() -> None:
    from cupy import cublas

    theirs = inspect.signature(cublas.gemm).parameters.values()
    assert [(p.name, p.default) for p in theirs] == [(p.name, p.default) for p in inspect.signature(gemm).parameters.values()]


@pytest.mark.sample(12)
@on_machines
@pytest.mark.parametrize("dtype", [F16, F32, "i4"])
@pytest.mark.parametrize("trans", ["NN", "TN", "NH", "CT"])
def test_gemm_makes_a_result(machine: Any, dtype: Any, trans: str, rng: np.random.Generator) -> None:
    a, b = operands(rng, dtype, trans)
    a_ = machine.array(a)
    with machine.session():
        d = gemm(trans[0], trans[1], a_, machine.array(b), alpha=2)
    assert type(d) is type(a_) and d.dtype == np.dtype(dtype)
    assert np.array_equal(machine.numpy(d), 2 * op(a, trans[0]) @ op(b, trans[1]))


@on_machines
def test_gemm_writes_to_out(machine: Any, rng: np.random.Generator) -> None:
    a, b = operands(rng, F32)
    c = whole(rng, (M, N), F32)
    out = machine.array(c)
    with machine.session():
        assert gemm("N", "N", machine.array(a), machine.array(b), out, 2.0, 0.5) is out
    assert np.array_equal(machine.numpy(out), 2 * op(a, "N") @ op(b, "N") + 0.5 * c)


# -- bad input: nothing is written to c -------------------------------------------------------------------------------

class Case:
    """Good arguments, of which one is then made bad."""

    def __init__(self) -> None:
        self.args: dict[str, Any] = dict(transa="N", transb="N", alpha=1.0, a=np.ones((4, 3), F32), b=np.ones((3, 5), F32),
                                         beta=1.0, c=poison((4, 5), F32))

    def refused(self, error: type[Exception], *messages: str, **changes: Any) -> None:
        args = {**self.args, **changes}
        with gk.emulate(), pytest.raises(error) as caught:
            gemmEx(**args)
        for message in messages:
            assert message in str(caught.value)
        if isinstance(args["c"], np.ndarray) and args["c"].dtype == F32:
            assert is_poison(args["c"])


@pytest.mark.parametrize("trans", ["nn", "X", "", "H", None, 3, b"N", True])
@pytest.mark.parametrize("which", ["transa", "transb"])
def test_an_unknown_trans_character(which: str, trans: Any) -> None:
    Case().refused(ValueError, which, repr(trans), '"N", "T" or "C" is needed', **{which: trans})


def test_small_letters_as_blas_takes_them() -> None:
    a, b = (np.arange(6, dtype="c8") + 1j).reshape(2, 3), np.ones((3, 2), "c8") * (2 - 1j)
    with gk.emulate():
        np.testing.assert_array_equal(gk.blas.gemm("n", "t", a, a), a @ a.T)
        np.testing.assert_array_equal(gk.blas.gemm("h", "c", a, b), a.conj().T @ b.conj().T)


@pytest.mark.parametrize("which", ["alpha", "beta"])
@pytest.mark.parametrize("value", ["1", None, 1j, True, (1.0, 2.0)])
def test_a_factor_that_is_no_real_number(which: str, value: Any) -> None:
    Case().refused(TypeError, which, repr(value), "a real number is needed", **{which: value})


def test_shapes_that_do_not_fit() -> None:
    case = Case()
    case.refused(ValueError, "a has shape (4, 3)", "b has shape (4, 5)", "3 columns", "4 rows", b=np.ones((4, 5), F32))
    case.refused(ValueError, "transa='T'", "op(a) has 4 columns", transa="T")
    case.refused(ValueError, "c has shape (5, 4)", "(4, 5)", c=poison((5, 4), F32))
    case.refused(ValueError, "a has 1 dimensions", "a matrix of 2 is needed", a=np.ones(3, F32))
    case.refused(ValueError, "c has shape (4, 5, 1)", "(4, 5)", c=poison((4, 5, 1), F32))
    case.refused(ValueError, "c has 1 dimensions", "a matrix of 2 is needed", c=poison((4,), F32))


def test_a_c_that_cannot_be_written() -> None:
    case = Case()
    fixed = poison((4, 5), F32)
    fixed.flags.writeable = False
    case.refused(ValueError, "c is read-only", "give a writable array", c=fixed)
    square = poison((4, 4), F32)
    case.refused(ValueError, "c overlaps a", a=square, b=np.ones((4, 4), F32), c=square)
    case.refused(ValueError, "c overlaps b", a=np.ones((4, 4), F32), b=square, c=square.T)


def test_types_that_do_not_fit() -> None:
    case = Case()
    case.refused(TypeError, "c has dtype float32 and a complex64", "give a complex c", a=np.ones((4, 3), "c8"))
    case.refused(TypeError, "a has dtype timedelta64", "the operators take", a=np.ones((4, 3), "m8[s]"))
    case.refused(TypeError, "b must be", "got builtins.list", b=[[1.0]])
    case.refused(TypeError, "c must be", "got builtins.NoneType", c=None)


# ==========================================================================================================================
# Alpha and beta of `blas.gemmEx` as 0-d arrays and as numbers of several parts, and cuBLAS's constants for trans.

F64, C64 = np.dtype("f8"), np.dtype("c8")
M_SMALL, N_SMALL, K_SMALL = 7, 5, 3
TABLE = np.array(QUATERNION.table)


def times(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Products of quaternions."""
    return np.asarray(np.einsum("...i,...j,ijk->...k", x, y, TABLE))


def operands_with_factors(rng: np.random.Generator, dtype: Any, parts: tuple[int, ...] = ()) -> tuple[np.ndarray, ...]:
    return tuple(whole(rng, (*shape, *parts), dtype) for shape in ((M_SMALL, K_SMALL), (K_SMALL, N_SMALL), (M_SMALL, N_SMALL)))


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("of_factor", [F32, F64, F16], ids=str)
@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
@pytest.mark.parametrize("beta", [0, 3])
def test_arrays_of_no_dimension(machine: Any, dtype: Any, of_factor: Any, beta: int, rng: np.random.Generator) -> None:
    """With a beta of 0 in memory C is not read: it is NaN."""
    a, b, c = operands_with_factors(rng, dtype)
    out = machine.array(c if beta else poison((M_SMALL, N_SMALL), dtype))
    factors = [machine.array(np.array(x, of_factor)) for x in (-2, beta)]
    with machine.session():
        gemmEx("N", "N", factors[0], machine.array(a), machine.array(b), factors[1], out)
    assert np.array_equal(machine.numpy(out), -2 * a.astype(F64) @ b + beta * c)


@pytest.mark.sample(8)
@on_machines
def test_one_in_memory_and_one_at_the_call(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = operands_with_factors(rng, F32)
    for alpha, beta in ((machine.array(np.array(2, F32)), -3.0), (2, machine.array(np.array(-3, F32)))):
        out = machine.array(c)
        with machine.session():
            gemmEx("N", "N", alpha, machine.array(a), machine.array(b), beta, out)
        assert np.array_equal(machine.numpy(out), 2 * a @ b - 3 * c)


@pytest.mark.sample(8)
@on_machines
def test_complex_factors_in_memory(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = operands_with_factors(rng, F32)
    a, b, c = (np.asarray(x * (1 + 2j), C64) for x in (a, b, c))
    out = machine.array(c)
    with machine.session():
        gemmEx("N", "N", machine.array(np.array(2 - 1j, C64)), machine.array(a), machine.array(b),
               machine.array(np.array(3, F32)), out)
    assert np.array_equal(machine.numpy(out), (2 - 1j) * (a @ b) + 3 * c)


@pytest.mark.sample(8)
@on_machines
def test_whole_factors_in_memory(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = operands_with_factors(rng, np.int32)
    out = machine.array(c)
    with machine.session():
        gemmEx("N", "N", machine.array(np.array(2, np.int32)), machine.array(a), machine.array(b),
               machine.array(np.array(-3, np.int64)), out)
    assert np.array_equal(machine.numpy(out), 2 * a @ b - 3 * c)


@pytest.mark.sample(8)
@on_machines
def test_of_a_stack(machine: Any, rng: np.random.Generator) -> None:
    a, b, c = whole(rng, (3, M_SMALL, K_SMALL), F32), whole(rng, (K_SMALL, N_SMALL), F32), whole(rng, (3, M_SMALL, N_SMALL), F32)
    out = machine.array(c)
    with machine.session():
        gemmEx("N", "N", machine.array(np.array(2, F32)), machine.array(a), machine.array(b), machine.array(np.array(1, F32)), out)
    assert np.array_equal(machine.numpy(out), 2 * a @ b + c)


ALPHA, BETA = np.array([1, -2, 3, 0], F32), np.array([0, 1, 2, -1], F32)


@pytest.mark.sample(8)
@pytest.mark.kin(1)
@on_machines
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("kind", ["tuple", "memory", "beta 0", "beta 0 in memory", "real in memory"])
def test_quaternions_multiply_from_the_left(machine: Any, dtype: Any, kind: str, rng: np.random.Generator) -> None:
    a, b, c = (x // 2 for x in operands_with_factors(rng, dtype, (4,)))
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


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("kind", ["parts", "a number and parts", "parts in memory", "in memory"])
def test_complex_numbers_of_sixteen_bits(machine: Any, kind: str, rng: np.random.Generator) -> None:
    a, b, c = operands_with_factors(rng, F16, (2,))
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


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("in_memory", [False, True])
def test_dual_factors(machine: Any, in_memory: bool, rng: np.random.Generator) -> None:
    """(2 + 3 e) (a + a' e) b: the tangent has both."""
    parts, b, c = whole(rng, (M_SMALL, K_SMALL, 2), F32), whole(rng, (K_SMALL, N_SMALL), F32), whole(rng, (M_SMALL, N_SMALL, 2), F32)
    alpha = gk.functions.Dual(machine.array(np.array([2, 3], F32))) if in_memory else (2, 3)
    out = gk.functions.Dual(machine.array(c))
    with machine.session():
        gemmEx("N", "N", alpha, gk.functions.Dual(machine.array(parts)), machine.array(b), 1, out)
    made, value, tangent = machine.numpy(out.parts), parts[..., 0] @ b, parts[..., 1] @ b
    assert np.array_equal(made[..., 0], 2 * value + c[..., 0])
    assert np.array_equal(made[..., 1], 3 * value + 2 * tangent + c[..., 1])


@pytest.mark.sample(8)
@pytest.mark.kin(1)
@on_machines
@pytest.mark.parametrize("trans", [(a, b) for a in range(3) for b in range(3)], ids=str)
def test_the_constants_of_cublas(machine: Any, trans: tuple[int, int], rng: np.random.Generator) -> None:
    """CUBLAS_OP_N, CUBLAS_OP_T and CUBLAS_OP_C are 0, 1 and 2."""
    a, b, _ = (np.asarray(x * (1 + 1j), C64) for x in operands_with_factors(rng, F32))
    given = [x if not t else x.T if t == 1 else x.T.conj() for x, t in zip((a, b), trans)]
    given = [machine.array(np.ascontiguousarray(x)) for x in given]
    with machine.session():
        made = gemm(trans[0], np.int64(trans[1]), *given)
    assert np.array_equal(machine.numpy(made), a @ b)


@pytest.mark.sample(8)
def test_a_host_array_is_read_at_the_call() -> None:
    """Beside a C on a GPU; beside one on the host, in the emulator, it stands for one in the GPU's memory."""
    assert factor(np.array(2, F32), "alpha", F32, 0) == np.float32(2)
    number = QUATERNION.number_dtype(F16)
    assert isinstance(factor(ALPHA, "alpha", number, 0), Parts)
    assert tuple(factor(ALPHA, "alpha", number, 0).value()) == tuple(ALPHA)
    assert isinstance(factor(np.array(2, F32), "alpha", F32, -1), InMemory)


@pytest.mark.sample(8)
@pytest.mark.parametrize("alpha,error,says", [
    (np.ones(3, F32), ValueError, r"alpha is an array of shape \(3,\); a real number is needed for a C of float32: one of shape \(\)"),
    (np.array(1j), TypeError, "alpha is an array of dtype complex128; a real number"),
    (np.array(True), TypeError, "alpha is an array of dtype bool"),
    ((1.0, 2.0), TypeError, r"alpha is \(1.0, 2.0\); a real number is needed for a C of float32"),
    (np.array("x"), TypeError, "alpha"),
])
def test_what_is_no_factor(alpha: Any, error: Any, says: str) -> None:
    c = poison((M_SMALL, N_SMALL), F32)
    with gk.emulate(), pytest.raises(error, match=says):
        gemmEx("N", "N", alpha, np.ones((M_SMALL, K_SMALL), F32), np.ones((K_SMALL, N_SMALL), F32), 0, c)
    assert np.isnan(c).all()


@pytest.mark.sample(8)
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


@pytest.mark.sample(8)
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


@pytest.mark.sample(8)
@pytest.mark.kin(1)
@on_machines
@pytest.mark.parametrize("of_factor", [F32, F16, np.dtype(np.int32)], ids=str)
def test_a_scale_in_memory(machine: Any, of_factor: Any, rng: np.random.Generator) -> None:
    """Of all products of a stack, among other epilogues; another array's number with the same kernel."""
    a, b = whole(rng, (2, M_SMALL, K_SMALL), F16), whole(rng, (K_SMALL, N_SMALL), F16)
    for value in (3, -2):
        by = machine.array(np.array(value, of_factor))
        with machine.session():
            d = gk.matmul(machine.array(a), machine.array(b), epilogue=Scale(by) | Clamp(-40.0, 40.0))
        assert np.array_equal(machine.numpy(d), np.clip(value * a.astype(F64) @ b, -40, 40))


IN_MEMORY = InMemory(np.ones(1, F32), 1, F32)
QUATERNIONS = QUATERNION.number_dtype(F32)


@pytest.mark.sample(8)
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
