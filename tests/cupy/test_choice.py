"""Which of CuPy's calls gemmkit computes: decided on NumPy's arrays, which say as much of themselves as CuPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.cupy import using
from tests.support.machines import poison

pytestmark = pytest.mark.sample(3)

F32 = np.dtype("f4")


def any_array(x: Any) -> bool:
    return type(x) is np.ndarray


def drawn(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.random.default_rng(0).integers(-3, 4, shape).astype(dtype)


A, B, STACK = drawn(3, 4), drawn(4, 5), drawn(2, 4, 5)
TAKEN: dict[str, tuple[Any, tuple, dict[str, Any]]] = {
    "matmul": (using.matmul, (A, B), {}),
    "matmul, defaults": (using.matmul, (A, B), dict(axes=None, casting="same_kind", order="K")),
    "matmul, vectors": (using.matmul, (A[0], B[:, 0]), {}),
    "matmul, a stack": (using.matmul, (A, STACK), {}),
    "matmul, a row and a stack": (using.matmul, (A[0], STACK), {}),
    "matmul, booleans": (using.matmul, (A > 0, B > 0), {}),
    "matmul, int8": (using.matmul, (A.astype("i1"), B.astype("i1")), {}),
    "matmul, float16": (using.matmul, (A.astype("f2"), B.astype("f2")), {}),
    "dot": (using.dot, (A, B), {}),
    "dot, two stacks": (using.dot, (drawn(2, 3, 4), STACK), {}),
    "dot, a row and a stack": (using.dot, (A[0], STACK), {}),
    "tensordot": (using.tensordot, (drawn(2, 3, 4), drawn(3, 4, 2)), {}),
    "tensordot, axes": (using.tensordot, (drawn(2, 3, 4), drawn(4, 2, 5)), dict(axes=((2, 0), (0, 1)))),
    "tensordot, negative axes": (using.tensordot, (drawn(2, 3, 4), drawn(4, 2, 5)), dict(axes=((-1,), (-3,)))),
    "tensordot, an axis each": (using.tensordot, (A, B), dict(axes=(1, 0))),
    "einsum": (using.einsum, ("ij, jk", A, B), {}),
    "einsum, a batch": (using.einsum, ("bij,bjk->kbi", drawn(2, 3, 4), STACK), dict(optimize=True)),
    "einsum, to a number": (using.einsum, ("ij,ij->", A, A), {}),
    "einsum, an ellipsis": (using.einsum, ("...ij,jk", drawn(2, 3, 4), B), {}),
    "einsum, a diagonal": (using.einsum, ("iij,j->i", drawn(3, 3, 4), A[0]), {}),
    "einsum, broadcast": (using.einsum, ("aij,ajk->aik", drawn(1, 3, 4), STACK), {}),
}
LEFT: dict[str, tuple[Any, tuple, dict[str, Any], str]] = {
    "two dtypes": (using.matmul, (A, B.astype("f8")), {}, "two dtypes"),
    "a number": (using.matmul, (A, np.float32(2)), {}, "no array"),
    "0 dimensions": (using.matmul, (A, np.array(2, F32)), {}, "0 dimensions"),
    "shapes": (using.matmul, (A, A), {}, "shapes that do not fit"),
    "stacks": (using.matmul, (drawn(3, 3, 4), STACK), {}, "shapes that do not fit"),
    "empty": (using.matmul, (A[:0], B), {}, "empty"),
    "axes": (using.matmul, (A, B), dict(axes=[(0, 1), (0, 1), (0, 1)]), "axes="),
    "dtype": (using.matmul, (A, B), dict(dtype="f8"), "dtype="),
    "out's shape": (using.matmul, (A, B, poison((1, 3, 5), F32)), {}, "another shape"),
    "out's dtype": (using.matmul, (A, B, poison((3, 5), "f8")), {}, "another shape or dtype"),
    "out is a": (using.matmul, (drawn(4, 4), drawn(4, 4)), {}, ""),
    "out in columns": (using.dot, (A, B, poison((5, 3), F32).T), {}, "C order"),
    "no axes": (using.tensordot, (A, B), dict(axes=0), "summed"),
    "axes out of range": (using.tensordot, (A, B), dict(axes=((2,), (0,))), "axes that"),
    "an axis twice": (using.tensordot, (drawn(4, 4), drawn(4, 4)), dict(axes=((0, 0), (0, 1))), "axes that"),
    "outer": (using.einsum, ("i,j->ij", A[0], B[0]), {}, "summed"),
    "three operands": (using.einsum, ("ij,jk,kl", A, B, B.T), {}, "3 operands"),
    "lists": (using.einsum, (A, [0, 1], B, [1, 2]), {}, "lists"),
    "dtype of einsum": (using.einsum, ("ij,jk", A, B), dict(dtype="f8"), "dtype="),
    "a wrong result": (using.einsum, ("ij,jk->z", A, B), {}, "spec that"),
    "sizes": (using.einsum, ("ij,jk", A, A), {}, "spec that"),
    "sizes of 1": (using.einsum, ("ij,jk", A[:, :1], B), {}, "summed"),
    "gemm of float16": (using.gemm, ("N", "N", A.astype("f2"), B.astype("f2")), {}, "gemm refuses"),
    "gemm's trans": (using.gemm, ("X", "N", A, B), {}, "trans"),
    "gemm's alpha": (using.gemm, ("N", "N", A, B), dict(alpha=np.array(2, F32)), "alpha"),
    "gemm's shapes": (using.gemm, ("T", "N", A, B), {}, "shapes"),
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_is_computed_is_numpys(case: str) -> None:
    function, arguments, keywords = TAKEN[case]
    wanted = getattr(np, function.__name__)(*arguments, **{name: x for name, x in keywords.items() if name != "axes" or x})
    with gk.emulate():
        made = function(any_array, *arguments, **keywords)(np.empty)
    assert made.shape == wanted.shape and made.dtype == wanted.dtype and made.flags.c_contiguous
    np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_to_cupy(case: str) -> None:
    function, arguments, keywords, says = LEFT[case]
    if case == "out is a":
        keywords = dict(out=arguments[0])
        says = "shares memory"
    with pytest.raises(using.NotTaken, match=says):
        function(any_array, *arguments, **keywords)


def test_an_out_is_written_and_returned() -> None:
    out = poison((5, 3), F32).T                                  # matmul takes any order
    with gk.emulate():
        assert using.matmul(any_array, A, B, out=out)(np.empty) is out
    np.testing.assert_array_equal(out, A @ B)


@pytest.mark.parametrize("transa,transb", [("N", "N"), ("T", 0), (1, "H"), (2, "T")])
def test_gemm(transa: Any, transb: Any) -> None:
    a, b = (x if trans in ("N", 0) else x.T for x, trans in ((A, transa), (B, transb)))
    c = drawn(3, 5)
    with gk.emulate():
        new = using.gemm(any_array, transa, transb, a, b, alpha=2)(np.empty)
        using.gemm(any_array, transa, transb, a, b, c, 2.0, -1.0)(np.empty)
    assert new.flags.f_contiguous
    np.testing.assert_array_equal(new, 2 * (A @ B))
    np.testing.assert_array_equal(c, 2 * (A @ B) - drawn(3, 5))


@pytest.mark.parametrize("product,work", [
    (using.matmul(any_array, A, STACK), 2 * 3 * 4 * 5), (using.matmul(any_array, A[0], B[:, 0]), 4),
    (using.dot(any_array, drawn(2, 3, 4), STACK), 6 * 4 * 10), (using.tensordot(any_array, drawn(2, 3, 4), drawn(3, 4, 2)), 48),
    (using.einsum(any_array, "bij,bjk->kbi", drawn(2, 3, 4), STACK), 120), (using.gemm(any_array, "T", "N", A.T, B), 60)])
def test_multiply_adds_are_counted(product: using.CupyCall, work: int) -> None:
    assert product.work == work


@pytest.mark.parametrize("least,error", [(-1, ValueError), (2.5, TypeError), (True, TypeError), (None, TypeError)])
def test_a_least_that_is_no_number_of_them_is_refused(least: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="least="):
        gk.cupy.use(least=least)
