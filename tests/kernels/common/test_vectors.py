"""Operands of one dimension and of booleans, by NumPy's rules; values are small whole numbers, so results are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.ahead import recorded
from gemmkit.epilogues import Elementwise
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.device import H100
from tests.support.machines import on_machines, poison

pytestmark = [pytest.mark.sample(4), pytest.mark.usefixtures("small_tiles")]

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


def test_a_vector_whose_product_is_computed_transposed() -> None:
    """(`gemmkit.tuning.swapped`: the vector is then the second operand's column.)"""
    a, b = drawn((32,), F32), drawn((32, 64), F32)
    with gk.emulate():
        run = gk.plan(a, b, operator=WGMMAOp(8, dtype=F32), epilogue=Elementwise(lambda x, i, j: x + j))
        made = run(a, b, out=poison((64,), F32))
    assert run._compiled.problem.is_transposed
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
