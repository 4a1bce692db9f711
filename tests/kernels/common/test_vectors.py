"""Operands of one dimension and of booleans, by NumPy's rules; values are small whole numbers, so results are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts
from gemmkit.epilogues import Elementwise
from gemmkit.layouts.quantised import dequantise, quantise
from gemmkit.operators import COMPLEX, WGMMAOp
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.device import H100
from tests.support.machines import on_machines, poison

pytestmark = pytest.mark.sample(4)

F32 = np.dtype("f4")
SHAPES = [((5,), (5,)), ((5,), (5, 3)), ((3, 5), (5,)), ((2, 3, 5), (5,)), ((5,), (2, 5, 3)), ((0,), (0,)), ((1,), (1,)),
          ((7,), (7, 1)), ((0,), (0, 3)), ((3, 0), (0,)), ((5,), (5, 0))]


def drawn(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.random.default_rng(0).integers(-3, 4, shape).astype(dtype)


@on_machines
@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "c8", "i4", "?"])
@pytest.mark.parametrize("a,b", SHAPES)
def test_vectors_by_numpys_rules(machine: Any, a: tuple[int, ...], b: tuple[int, ...], dtype: str) -> None:
    x, y = drawn(a, dtype), drawn(b, dtype)
    wanted = np.matmul(x, y)
    with machine.session():
        given = machine.array(x), machine.array(y)
        made = gk.matmul(*given)
        assert made.shape == wanted.shape and made.dtype == wanted.dtype
        np.testing.assert_array_equal(machine.numpy(made), wanted)


@on_machines
def test_views_out_c_and_plans(machine: Any) -> None:
    wide, matrix, c = drawn((10,), F32), drawn((5, 3), F32), drawn((3,), F32)
    with machine.session():
        x, m, given = machine.array(wide), machine.array(matrix), machine.array(c)
        out = machine.array(poison((6,), F32))
        run = gk.plan(x[::2], m, given, out=out[::2], epilogue=Elementwise(lambda x, i, j: 2 * x + j))
        assert run(x[::2], m, given, out=out[::2]).shape == (3,)
        np.testing.assert_array_equal(machine.numpy(out)[::2], 2 * (wide[::2] @ matrix + c) + np.arange(3))
        assert np.isnan(machine.numpy(out)[1::2]).all()
        number = gk.plan(x, x)(x, x)
        assert number.shape == () and float(number) == wide @ wide
        np.testing.assert_array_equal(machine.numpy(gk.matmul(m.T, x[1:6], given)), matrix.T @ wide[1:6] + c)


@on_machines
@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i1", "c8"])
def test_booleans_beside_numbers(machine: Any, dtype: str) -> None:
    a, b = drawn((3, 5), "?"), drawn((5, 4), dtype)
    with machine.session():
        made = gk.matmul(machine.array(a), machine.array(b))
        assert made.dtype == np.matmul(a, b).dtype
        np.testing.assert_array_equal(machine.numpy(made), np.matmul(a, b))


@dataclass(frozen=True)
class Hankel(layouts.Layout):
    """Of a vector that has each skew diagonal's element once: it cannot tell its rows and columns."""

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        return data[i + j]


X = drawn((9, 16), F32)
MASK = np.array([[True, False], [False, True]])
SQUARE = drawn((16, 16), F32)
HANKEL = drawn((24,), F32)


# Of each kind: the matrix as an object, made of arrays of the machine's, and as an array.
STRUCTURED: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
    "own layout": (lambda at: gk.Matrix(at(HANKEL), Hankel(F32), (9, 16)), np.lib.stride_tricks.sliding_window_view(HANKEL, 16)),
    "generated": (lambda at: gk.Generated(lambda i, j, s: s * (i - j), (9, 16), F32, 2.0),
                  2 * np.subtract.outer(np.arange(9.0), np.arange(16.0))),
    "columns joined": (lambda at: gk.Concat(at(X[:, :5]), at(X[:, 5:]), axis=1), X),
    "rows joined": (lambda at: gk.Concat(at(X[:2]), at(X[2:4]), at(X[4:]), axis=0), X),
    "gathered": (lambda at: gk.Gather(at(X), at(np.int32([8, 0, 0, 3]))), X[[8, 0, 0, 3]]),
    "diagonal": (lambda at: gk.Diagonal(at(X[0])), np.diag(X[0])),
    "diagonals": (lambda at: gk.Diagonal(at(X[:2])), np.stack([np.diag(x) for x in X[:2]])),
    "triangular": (lambda at: gk.Triangular(at(SQUARE), "upper"), np.triu(SQUARE)),
    "symmetric": (lambda at: gk.Symmetric(at(SQUARE)), np.tril(SQUARE) + np.tril(SQUARE, -1).T),
    "sparse": (lambda at: gk.BlockSparse(at(np.tile(SQUARE, (8, 8))), at(MASK), (64, 64)), np.tile(SQUARE, (8, 8))
               * np.kron(MASK, np.ones((64, 64)))),
    "plain": (lambda at: gk.Matrix(at(X), layouts.RowMajor(F32)), X),
}


@on_machines
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("is_row", [False, True])
@pytest.mark.parametrize("kind", STRUCTURED)
def test_a_vector_beside_a_matrix_with_structure(machine: Any, kind: str, is_row: bool, with_out: bool) -> None:
    make, matrix = STRUCTURED[kind]
    vector = drawn((matrix.shape[-2 if is_row else -1],), F32)
    operands = (vector, matrix) if is_row else (matrix, vector)
    wanted = np.matmul(*operands)
    c = drawn(wanted.shape, F32)
    with machine.session():
        made, v, given = make(machine.array), machine.array(vector), machine.array(c)
        ordered = (v, made) if is_row else (made, v)
        if not with_out:
            result = gk.matmul(*ordered)
            assert result.shape == wanted.shape
            np.testing.assert_array_equal(machine.numpy(result), wanted)
            return
        out = machine.array(poison(wanted.shape, F32))
        assert gk.plan(*ordered, given, out=out)(*ordered, given, out=out) is out
        np.testing.assert_array_equal(machine.numpy(out), wanted + c)


@on_machines
def test_a_vector_beside_layouts_given_by_keyword(machine: Any) -> None:
    """A layout of the caller's that cannot tell its extents, and 4-bit weights, of which the array has other rows."""
    wanted, v = STRUCTURED["own layout"][1], drawn((16,), F32)
    weights = quantise(np.tile(SQUARE, (2, 1)), group=8)
    x = drawn((32,), "f2")
    with machine.session():
        for sizes in (dict(M=9, N=1, K=16), (9, 1, 16)):
            made = gk.matmul(machine.array(HANKEL), machine.array(v), global_a_layout=Hankel(F32), gemm_shape=sizes)
            assert made.shape == (9,)
            np.testing.assert_array_equal(machine.numpy(made), wanted @ v)
        words = gk.Matrix(machine.array(weights.array), layouts.GroupQuantised(
            "float16", machine.array(weights.layout.scales), group=8))                         # type: ignore[attr-defined]
        made = gk.matmul(machine.array(x), words)
        assert made.shape == (16,)
        np.testing.assert_allclose(machine.numpy(made), x.astype("f8") @ dequantise(weights), rtol=2e-3, atol=0.05)


@on_machines
def test_a_row_beside_a_braid(machine: Any) -> None:
    x, w = drawn((16,), F32), drawn((16, 5), F32)
    with machine.session():
        out = machine.array(poison((5,), F32))
        made = gk.matmul(machine.array(x), gk.Braid(machine.array(w), machine.array(w[::-1].copy())), out=out,
                         epilogue=gk.epilogues.Fold(lambda one, other: one - 2 * other))
        assert made is out
        np.testing.assert_array_equal(machine.numpy(made), x @ w - 2 * (x @ w[::-1]))


@pytest.mark.parametrize("columns", [(3,), (2, 16, 3)])
def test_a_matrix_says_its_shape(columns: tuple[int, ...]) -> None:
    """(Of `gk.Matrix(array, layout, shape)`, whose layout cannot.)"""
    b = drawn((16, *columns) if len(columns) == 1 else columns, F32)
    with gk.emulate():
        np.testing.assert_array_equal(gk.matmul(gk.Matrix(HANKEL, Hankel(F32), (9, 16)), b), STRUCTURED["own layout"][1] @ b)


@pytest.mark.parametrize(("call", "says"), [
    (lambda m, v: gk.matmul(m, v[1:]), ("a has shape (9, 16) and b has shape (15,)",)),
    (lambda m, v: gk.matmul(m, v, gemm_shape=dict(M=9, N=1, K=15)), ("a is a matrix of K=16", "gemm_shape says K=15")),
    (lambda m, v: gk.matmul(m, v, v), ("c has shape (16,), that is M=16 rows, and a says M=9",)),
    (lambda m, v: gk.matmul(m, v, out=np.zeros((9, 1), F32)), ("out has shape (9, 1)", "one dimension")),
    (lambda m, v: gk.Matrix(X, layouts.RowMajor(F32), (9, 15)), ("shape=(9, 15)", "9 x 16")),
    (lambda m, v: gk.matmul(np.ones((3, 4, 2), F32), v[:4], operator=COMPLEX), ("b has one dimension", "b[:, None]")),
])
def test_a_matrix_and_a_vector_that_do_not_fit(call: Any, says: tuple[str, ...]) -> None:
    with gk.emulate(), pytest.raises(ValueError) as error:
        call(gk.Matrix(HANKEL, Hankel(F32), (9, 16)), drawn((16,), F32))
    assert all(text in str(error.value) for text in says), error.value


def test_a_vector_whose_product_is_computed_transposed() -> None:
    """(`gemmkit.tuning.choose`: the vector is then the second operand's column.)"""
    a, b = drawn((32,), F32), drawn((32, 64), F32)
    with gk.emulate():
        run = gk.plan(a, b, operator=WGMMAOp(8, dtype=F32), epilogue=Elementwise(lambda x, i, j: x + j))
        made = run(a, b, out=poison((64,), F32))
    assert run._compiled.problem.swap_ab
    np.testing.assert_array_equal(made, a @ b + np.arange(64))


@pytest.mark.parametrize(("a", "b"), [((2, 3, 5), (5,)), ((5,), (2, 5, 3))])
def test_a_stack_beside_a_vector_is_one_product(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    found = recorded(lambda: gk.matmul(np.ones(a, F32), np.ones(b, F32)), H100)
    (call,) = (x.problem for x in found)
    assert {call.M, call.N} == {1, 6} and call.K == 5 and call.stack is None


@pytest.mark.parametrize("a,b,c,out,says", [
    ((4,), (5, 3), None, None, ("a has shape (4,)", "a has 4 elements and b 5 rows")),
    ((3, 4), (5,), None, None, ("b has shape (5,)", "a has 4 columns and b 5 elements")),
    ((4,), (4, 3), None, (1, 3), ("out has shape (1, 3)", "the result has (3,)")),
    ((4,), (4,), None, (1,), ("out has shape (1,)", "the result has ()")),
    ((3, 4), (4,), (3, 1), None, ("c has shape (3, 1)", "the result has (3,)")),
    ((4,), (), None, None, ("b has shape ()", "a number is no operand")),
    ((), (4,), None, None, ("a has shape ()", "a number is no operand")),
])
def test_vectors_that_do_not_fit(a: Any, b: Any, c: Any, out: Any, says: tuple[str, ...]) -> None:
    written = None if out is None else poison(out, F32)
    with gk.emulate(), pytest.raises(ValueError) as error:
        gk.matmul(np.ones(a, F32), np.ones(b, F32), None if c is None else np.ones(c, F32), out=written)
    assert all(text in str(error.value) for text in says), error.value
    assert written is None or np.isnan(written).all()
