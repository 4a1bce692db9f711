"""`blas.gemmEx` and `blas.gemm`: in place, run-time alpha and beta, and what each refuses."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts
from gemmkit.blas import gemm, gemmEx
from gemmkit.operators import FPUOp, MMAOp, WMMAOp
from gemmkit.tiling import Tile
from tests.support.machines import BF16, is_poison, on_machines, poison, whole

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
                         transform_global_to_shared_a=gk.transforms.Elementwise(lambda x: x + 1))
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
        np.testing.assert_array_equal(gk.blas.gemm("n", "n", a, b), a @ b)
        np.testing.assert_array_equal(gk.blas.gemm("t", "c", a, b), a.T @ b.conj().T)
        np.testing.assert_array_equal(gk.blas.gemm("h", "t", a, b), a.conj().T @ b.T)


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
