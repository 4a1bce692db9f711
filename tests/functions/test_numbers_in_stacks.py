"""Stacks of matrices with structure and of numbers of several parts, real matrices beside such numbers, plans of them, and how
D lies where A is in planes. Values are small whole numbers, so results are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.blas import gemmEx
from gemmkit.operators import COMPLEX, DUAL, MIN_PLUS, QUATERNION
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from tests.support.machines import BF16, on_machines, poison, whole
from tests.support.on_device import OnDevice

pytestmark = pytest.mark.sample(6)

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")
N = 9


def diagonals(x: np.ndarray) -> np.ndarray:
    return np.asarray(x[..., None] * np.eye(x.shape[-1], dtype=x.dtype))


def product(table: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Products of matrices of an algebra's numbers."""
    return np.asarray(np.einsum("...mki,...knj,ijp->...mnp", x.astype(F64), y.astype(F64), np.array(table)))


def as_numbers(x: np.ndarray, parts: int) -> np.ndarray:
    return np.concatenate([x[..., None], np.zeros((*x.shape, parts - 1), x.dtype)], axis=-1)


# -- structure --------------------------------------------------------------------------------------------------------

@on_machines
@pytest.mark.parametrize("shape,other", [((3, N), (3, N, 5)), ((3, N), (N, 5)), ((2, 1, N), (3, N, 5)), ((N,), (3, N, 5)), ((0, N), (N, 5))],
                         ids=str)
@pytest.mark.parametrize("dtype", [F16, F64], ids=str)
def test_stacks_of_diagonals(machine: Any, shape: tuple[int, ...], other: tuple[int, ...], dtype: Any,
                             rng: np.random.Generator) -> None:
    d, x = whole(rng, shape, dtype), whole(rng, other, dtype)
    a, b = gk.layouts.DiagonalMatrix(machine.array(d)), machine.array(x)
    with machine.session():
        left, right = gk.matmul(a, b), gk.matmul(b.swapaxes(-1, -2), a)
    wanted = diagonals(d) @ x
    assert np.array_equal(machine.numpy(left), wanted)
    assert np.array_equal(machine.numpy(right), np.swapaxes(wanted, -1, -2))


@pytest.mark.kin(4)
@on_machines
def test_diagonals_by_diagonals(machine: Any, rng: np.random.Generator) -> None:
    x, y = whole(rng, (4, N), F32), whole(rng, (2, 1, N), F32)
    with machine.session():
        made = gk.matmul(gk.layouts.DiagonalMatrix(machine.array(x)), gk.layouts.DiagonalMatrix(machine.array(y)))
    assert np.array_equal(machine.numpy(made), diagonals(x * y))


@on_machines
@pytest.mark.parametrize("kind", ["diagonal", "triangular", "symmetric", "complex"])
def test_a_plan_of_stacks_takes_others_of_their_kind(machine: Any, kind: str, rng: np.random.Generator) -> None:
    """What is planned is a kind: the arrays of a call are its own."""
    def made(x: np.ndarray) -> tuple[Any, np.ndarray]:
        if kind == "diagonal":
            return gk.layouts.DiagonalMatrix(machine.array(x[:, 0])), diagonals(x[:, 0])
        if kind == "triangular":
            return gk.layouts.TriangularMatrix(machine.array(np.where(np.tri(N, dtype=bool), x, np.nan).astype(x.dtype))), np.tril(x)
        if kind == "symmetric":
            return gk.layouts.SymmetricMatrix(machine.array(x)), np.tril(x) + np.tril(x, -1).swapaxes(-1, -2)
        return machine.array(x * np.complex64(1 + 2j)), x * np.complex64(1 + 2j)

    first, second, y, z, c = (whole(rng, shape, F32) for shape in ((3, N, N), (3, N, N), (3, N, 5), (3, N, 5), (3, N, 5)))
    if kind == "complex":
        y, z, c = (x.astype(np.complex64) for x in (y, z, c))
    with machine.session():
        run = gk.plan(made(first)[0], machine.array(y), machine.array(c))
        a, wanted = made(second)
        d = run(a, machine.array(z), machine.array(c))
    assert "(3,) products" in repr(run)
    assert np.array_equal(machine.numpy(d), wanted @ z + c)


@pytest.mark.parametrize("call", ["diagonal", "triangular", "symmetric", "dual", "min-plus", "planned"])
def test_a_stack_is_one_launch(call: str, grids: list[Any]) -> None:
    x, y = np.ones((3, N, N), F32), np.ones((3, N, 5), F32)
    with gk.emulate():
        {"diagonal": lambda: gk.matmul(gk.layouts.DiagonalMatrix(x[:, 0]), y), "triangular": lambda: gk.matmul(gk.layouts.TriangularMatrix(x), y),
         "symmetric": lambda: gk.matmul(gk.layouts.SymmetricMatrix(x), y), "dual": lambda: gk.matmul(x, gk.functions.Dual(np.ones((3, N, 5, 2), F32))),
         "min-plus": lambda: gk.matmul(x, y, operator=MIN_PLUS), "planned": lambda: gk.plan(gk.layouts.DiagonalMatrix(x[:, 0]), y)(gk.layouts.DiagonalMatrix(x[:, 0]), y)}[call]()
    assert len(grids) == 1


# -- numbers of several parts -----------------------------------------------------------------------------------------

@pytest.mark.kin(4)
@on_machines
@pytest.mark.parametrize("dtype", [F16, F32, F64, BF16], ids=str)
@pytest.mark.parametrize("algebra", [COMPLEX, QUATERNION], ids=["complex", "quaternion"])
@pytest.mark.parametrize("turned", [False, True])
def test_real_matrices_by_numbers(machine: Any, dtype: Any, algebra: Any, turned: bool, rng: np.random.Generator) -> None:
    """A real float16 matrix by one of complex numbers of float16, and the other way round: the real one is read as it is."""
    x, y = whole(rng, (N, 7), dtype), whole(rng, (7, 5, algebra.parts), dtype)
    given = machine.array(x), machine.array(y)
    if turned:
        x, y = whole(rng, (5, 7, algebra.parts), dtype), whole(rng, (7, N), dtype)
        given = machine.array(x), machine.array(y)
    with machine.session():
        d = gk.matmul(*given, operator=algebra, epilogue=epilogues.Elementwise(lambda v: v + v))
    left, right = (v if v.ndim == 3 else as_numbers(v, algebra.parts) for v in (x, y))
    assert np.array_equal(machine.numpy(d).astype(F64), 2 * product(algebra.table, left, right))


@on_machines
def test_gemm_ex_of_a_real_matrix_by_numbers(machine: Any, rng: np.random.Generator) -> None:
    x, y, c = whole(rng, (7, N), F16), whole(rng, (5, 7, 2), F16), whole(rng, (N, 5, 2), F16)
    out = machine.array(c)
    with machine.session():
        gemmEx("T", "C", 2, machine.array(x), machine.array(y), -1, out, operator=COMPLEX)
    turned = y.swapaxes(0, 1) * np.array([1, -1])
    assert np.array_equal(machine.numpy(out).astype(F64), 2 * product(COMPLEX.table, as_numbers(x.T, 2), turned) - c)


@pytest.mark.kin(4)
@on_machines
@pytest.mark.parametrize("kind", ["triangular", "diagonal", "plain", "stack of real"])
def test_dual_numbers_by_structure_in_stacks(machine: Any, kind: str, rng: np.random.Generator) -> None:
    x, y = whole(rng, (2, N, N), F32), whole(rng, (2, N, 5, 3), F32)
    a, wanted = {"triangular": lambda: (gk.layouts.TriangularMatrix(machine.array(x)), np.tril(x)),
                 "diagonal": lambda: (gk.layouts.DiagonalMatrix(machine.array(x[:, 0])), diagonals(x[:, 0])),
                 "plain": lambda: (machine.array(x[0]), x[0]),
                 "stack of real": lambda: (machine.array(x), x)}[kind]()
    with machine.session():
        d = gk.matmul(a, gk.functions.Dual(machine.array(y)))
    assert d.shape == (2, N, 5) and d.count == 2
    assert np.array_equal(machine.numpy(d.parts), np.einsum("...mk,...knp->...mnp", wanted, y))


@pytest.mark.thorough
@on_machines
@pytest.mark.parametrize("kind", ["triangular", "stack of real", "real"])
@pytest.mark.parametrize("trans", "NT")
def test_gemm_ex_of_dual_numbers_by_real_ones(machine: Any, kind: str, trans: str, rng: np.random.Generator) -> None:
    x, y, c = whole(rng, (3, N, N), F32), whole(rng, (3, N, 5, 2), F32), whole(rng, (3, N, 5, 2), F32)
    out = gk.functions.Dual(machine.array(c))
    a, wanted = {"triangular": lambda: (gk.layouts.TriangularMatrix(machine.array(x)), np.tril(x)), "stack of real": lambda: (machine.array(x), x),
                 "real": lambda: (machine.array(x[0]), x[0])}[kind]()
    with machine.session():
        gemmEx(trans, "N", (1, 2), a, gk.functions.Dual(machine.array(y)), -1, out)
    product = np.einsum("...mk,...knp->...mnp", wanted if trans == "N" else wanted.swapaxes(-1, -2), y)
    assert np.array_equal(machine.numpy(out.parts), np.stack([product[..., 0], product[..., 1] + 2 * product[..., 0]], -1) - c)


@pytest.mark.thorough
@on_machines
def test_stacks_of_dual_numbers(machine: Any, rng: np.random.Generator) -> None:
    x, y = whole(rng, (2, 1, N, 7, 2), F64), whole(rng, (2, 7, 5, 2), F64)
    out = gk.functions.Dual(machine.array(poison((2, 2, N, 5, 2), F64)))
    with machine.session():
        assert gk.matmul(gk.functions.Dual(machine.array(x)), gk.functions.Dual(machine.array(y)), out=out) is out
    assert np.array_equal(machine.numpy(out.parts), product(DUAL.table, x, y))


@pytest.mark.kin(4)
@on_machines
@pytest.mark.parametrize("shapes", [((3, N, 7), (3, 7, 5)), ((2, 1, N, 7), (2, 7, 5)), ((N, 7), (2, 7, 5))], ids=str)
def test_which_k_decided_in_stacks(machine: Any, shapes: Any, rng: np.random.Generator) -> None:
    x, y = (whole(rng, shape, F32) for shape in shapes)
    with machine.session():
        d, k = gk.functions.select(machine.array(x), machine.array(y))
    sums = x[..., :, :, None] + y[..., None, :, :]
    assert np.array_equal(machine.numpy(d), sums.min(axis=-2)) and np.array_equal(machine.numpy(k), sums.argmin(axis=-2))


def test_stacks_that_do_not_fit_a_selection() -> None:
    x = np.ones((3, 4, 4), F32)
    with gk.emulate():
        with pytest.raises(ValueError, match=r"the stacks \(3,\) and \(2,\) cannot be broadcast"):
            gk.functions.select(x, x[:2])
        with pytest.raises(ValueError, match=r"index has shape \(4, 4\) .*; \(3, 4, 4\) and int32 are needed"):
            gk.functions.select(x, x, index=np.zeros((4, 4), np.int32))


# -- planes -----------------------------------------------------------------------------------------------------------

def planes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(x, -1, -3))


@pytest.mark.kin(4)
@on_machines
@pytest.mark.parametrize("stack", [(), (2,)], ids=str)
@pytest.mark.parametrize("kinds,lies", [("PP", "P"), ("PI", "P"), ("IP", "I"), ("RP", "P"), ("RI", "I"), ("PR", "P")])
def test_a_new_d_lies_as_a_does(machine: Any, kinds: str, lies: str, stack: tuple[int, ...], rng: np.random.Generator) -> None:
    """P: planes, I: parts side by side, R: real. Beside a real A it lies as B does."""
    number = COMPLEX.number_dtype(F16)
    numbers = [whole(rng, (*stack, *shape, 2), F16) for shape in ((N, 7), (7, 5))]
    named: dict[str, Any] = {}
    arrays: list[Any] = []
    for name, kind, x in zip("ab", kinds, numbers):
        if kind == "R":
            x[..., 1] = 0
            arrays.append(gk.layouts.Matrix(machine.array(np.ascontiguousarray(x[..., 0])), layouts.RowMajor(F16)))
            continue
        arrays.append(machine.array(planes(x) if kind == "P" else x))
        if kind == "P":
            named[f"global_{name}_layout"] = layouts.Planar(number)
    wanted = product(COMPLEX.table, *numbers)
    with machine.session():
        d = gk.matmul(*arrays, operator=COMPLEX, **named)
        other = machine.array(poison((*stack, N, 5, 2) if lies == "P" else (*stack, 2, N, 5), F16))
        layout = layouts.Interleaved(number) if lies == "P" else layouts.Planar(number)
        gk.matmul(*arrays, operator=COMPLEX, out=other, global_d_layout=layout, **named)
    assert np.array_equal(machine.numpy(d), planes(wanted) if lies == "P" else wanted)
    assert np.array_equal(machine.numpy(other), wanted if lies == "P" else planes(wanted))


def test_what_is_no_real_matrix() -> None:
    with pytest.raises(TypeError, match=r"Embedded\(layout=.*the layout of a real matrix is needed"):
        layouts.Embedded("complex64", layouts.RowMajor("complex64"))
    with pytest.raises(ValueError, match=r"diagonal has shape \(\); a vector is needed"):
        gk.layouts.DiagonalMatrix(np.array(1.0))
    x = np.ones((3, 4), F32)
    with gk.emulate():
        with pytest.raises(ValueError, match="cannot be broadcast"):
            gk.matmul(gk.layouts.DiagonalMatrix(x), np.ones((2, 4, 4), F32))
        with pytest.raises(ValueError, match="matrices of a have|are rows|K="):
            gk.matmul(gk.layouts.DiagonalMatrix(x), np.ones((3, 5, 4), F32))
        with pytest.raises(gk.ConfigError, match="global_a_layout"):
            gk.matmul(x.astype(np.int32), np.ones((4, 4, 2), F32), operator=COMPLEX)


@pytest.mark.thorough
@pytest.mark.compile
@pytest.mark.parametrize("real", ["a", "b"])
def test_real_matrices_are_staged_for_hoppers_tensor_cores(real: str) -> None:
    """No spills, and as many wgmma as of two matrices of numbers."""
    number = COMPLEX.number_dtype(F16)
    of = {name: layouts.Embedded(number, layouts.RowMajor(F16)) if name == real else layouts.Interleaved(number) for name in "ab"}
    conf = gk.get_config(operator=COMPLEX, global_a_layout=of["a"], global_b_layout=of["b"], device=H100,
                         gemm_shape=dict(M=1024, N=1024, K=1024))
    made = ahead.compile_config(conf, device=H100, operands={real: OnDevice(np.zeros((1024, 1024), F16))},
                                     gemm_shape=dict(M=1024, N=1024, K=1024))
    assert conf.kernel == "warp_specialised"
    assert made.usage.spill_stores == 0 and made.instructions["HGMMA"] > 0
