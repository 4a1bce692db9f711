"""Structured operands: what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts, transforms
from gemmkit.operators import FPUOp, MMAOp
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from tests.kernels.common.test_structured import mapping, one

F16, F32, F64 = np.dtype("f2"), np.dtype("f4"), np.dtype("f8")


OPERATORS = {"mma": MMAOp(), "fpu": FPUOp(M=16, N=16)}


X = np.ones((6, 6), F32)


@contextlib.contextmanager
def refuses(kind: Any, *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught, gk.emulate():
        yield
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(("call", "kind", "words"), [
    (lambda: gk.matmul(np.ones(5, F32), X, global_a_layout=layouts.Diagonal(F32)), ValueError, ("K=6", "K=5")),
    (lambda: gk.matmul(gk.Diagonal(np.ones(5, F32)), X), ValueError, ("b has shape (6, 6)", "K=5")),
    (lambda: gk.blas.gemmEx("N", "N", 1, gk.Diagonal(np.ones(5, F32)), X, 0, X.copy()), ValueError, ("(5, 5)", "(6, 6)")),
    (lambda: gk.matmul(X[:, :5].copy(), X, global_a_layout=layouts.Diagonal(F32)), ValueError, ("K=6", "K=5")),
    (lambda: gk.matmul(np.ones(6, F64), X, global_a_layout=layouts.Diagonal(F32)), ValueError, ("float64", "Diagonal('float32')")),
    (lambda: gk.Diagonal(np.array(1, F32)), ValueError, ("diagonal has shape ()", "vector")),
    (lambda: gk.Triangular(X[0]), ValueError, ("array has shape (6,)",)),
    (lambda: gk.Triangular(X, "left"), ValueError, ("half='left'", '"lower" or "upper"')),
    (lambda: layouts.Triangular(F32), TypeError, ("layout=dtype('float32')", "RowMajor")),
    (lambda: layouts.Triangular(layouts.RowMajor(F32), unit=1), TypeError, ("unit=1",)),
    (lambda: gk.Symmetric(np.ones((6, 5), F32)), ValueError, ("(6, 5)", "square")),
    (lambda: gk.matmul(np.ones((5, 6), F32), X, global_a_layout=layouts.Symmetric(layouts.RowMajor(F32))), ValueError, ("a is 5 x 6", "square")),
    (lambda: gk.matmul(gk.Symmetric(X), X, global_a_layout=layouts.RowMajor(F32)), TypeError, ("global_a_layout", "beside a")),
    (lambda: gk.Generated(3, (2, 2), F32), TypeError, ("f=3", "function")),
    (lambda: gk.Generated(one, (2, 2), F32, "x"), TypeError, ("first='x'",)),
    (lambda: gk.Generated(one, (2, 2), F32, None), TypeError, ("None",)),
    (lambda: gk.Generated(one, (2, 2), F32, 1, 2, 3, 4, 5), TypeError, ("5 arguments", "4")),
    (lambda: gk.Generated(one, (2,), F32), ValueError, ("shape=(2,)",)),
    (lambda: layouts.Generated(F32, one, None, 2), TypeError, ("None",)),
    (lambda: gk.matmul(gk.Generated(one, (2, 5), F32), X), ValueError, ("(2, 5)", "(6, 6)", "K")),
    (lambda: gk.matmul(gk.Generated(lambda i, j: np.float16(1), (6, 6), F32), X), TypeError, ("<lambda>", "test_structured_input.py", "float16", "float32")),
    (lambda: gk.Matrix(X, F32), TypeError, ("layout=",)),
    (lambda: gk.Matrix(X, layouts.Generated(F32, one)), ValueError, ("shape=None",)),
    (lambda: gk.Matrix(X, layouts.RowMajor(F32)).T, TypeError, ("transpose",)),
])
def test_refusals(call: Any, kind: Any, words: tuple[str, ...]) -> None:
    with refuses(kind, *words):
        call()


@pytest.mark.kin(2)
@pytest.mark.compile
def test_a_generated_function_of_another_dtype_is_refused_when_compiled() -> None:
    conf = gk.get_config(operator=OPERATORS["fpu"], global_a_layout=layouts.Generated(F32, lambda i, j: np.float16(i)),
                         global_b_layout=layouts.RowMajor(F32), device=H100)
    with pytest.raises(gk.ComponentError, match=r"test_structured_input.py, line \d+\) returns .*float16, .* declares dtype float32"):
        ahead.compile_config(conf, device=H100, operands=dict(a=X))


@pytest.mark.kin(2)
@pytest.mark.sample(2)
@pytest.mark.compile
@pytest.mark.parametrize("layout", [layouts.Diagonal(F32), layouts.Triangular(layouts.RowMajor(F32), "upper")], ids=repr)
def test_with_a_transform_nothing_is_skipped_in_compiled_code_either(layout: Any) -> None:
    """What does not matter to a right result may still not compile."""
    conf = gk.get_config(**mapping(OPERATORS["fpu"]), global_a_layout=layout, global_b_layout=layouts.RowMajor(F32), device=H100,
                         transform_global_to_shared_a=transforms.Elementwise(lambda x: x + 1))
    assert ahead.compile_config(conf, device=H100, operands=dict(a=X[0] if layout.vector_axis is None else X)).usage.registers > 0
