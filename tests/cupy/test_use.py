"""`gemmkit.cupy.use` on CuPy's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk

pytestmark = pytest.mark.gpu


@pytest.fixture
def arrays() -> Any:
    cupy = pytest.importorskip("cupy")
    draw = np.random.default_rng(0)
    return cupy, cupy.asarray(draw.integers(-3, 4, (33, 17)).astype("f4")), cupy.asarray(
        draw.integers(-3, 4, (17, 29)).astype("f4"))


def test_every_function_is_gemmkits_within(arrays: Any) -> None:
    cupy, a, b = arrays
    wanted = a.get() @ b.get()
    with gk.cupy.use(least=0) as using:
        out = cupy.full((33, 29), cupy.nan, "f4")
        made = [a @ b, a.dot(b), cupy.matmul(a, b), cupy.matmul(a, b, out=out), cupy.dot(a, b), cupy.tensordot(a, b, 1),
                cupy.einsum("ij,jk", a, b)]
        from cupy import cublas

        made.append(cublas.gemm("N", "N", a, b))
    for one in made:
        np.testing.assert_array_equal(one.get(), wanted)
    assert made[3] is out and made[-1].flags.f_contiguous
    assert sum(using.calls.values()) == len(made) and not using.left
    assert set(using.calls) == {"matmul", "dot", "tensordot", "einsum", "gemm"}


def test_all_is_restored(arrays: Any) -> None:
    cupy, a, b = arrays
    from cupy import cublas
    from cupy.linalg import _product

    def functions() -> tuple[Any, ...]:
        return (cupy.matmul, cupy.dot, cupy.einsum, cupy.tensordot, cublas.gemm, _product.matmul, cupy.ndarray.dot,
                cupy.ndarray.__matmul__)

    before = functions()
    outer = gk.cupy.use(least=0)
    with gk.cupy.use(least=0) as inner:
        a @ b
    assert all(x is not y for x, y in zip(functions(), before))
    a @ b
    assert (inner.calls["matmul"], outer.calls["matmul"]) == (1, 2)
    outer.stop()
    outer.stop()
    assert functions() == before and "dot" not in vars(cupy.ndarray)
    a @ b
    assert outer.calls["matmul"] == 2
    with pytest.raises(ZeroDivisionError), gk.cupy.use():
        raise ZeroDivisionError
    assert functions() == before


def error_of(call: Callable[[], Any]) -> tuple[type, str]:
    """What a call raises."""
    with pytest.raises(Exception) as found:                      # (which one depends on CuPy's version)
        call()
    return found.type, str(found.value)


def test_what_is_left_is_cupys(arrays: Any) -> None:
    cupy, a, b = arrays
    refused: tuple[Callable[[], Any], ...] = (lambda: cupy.dot(a, a), lambda: a @ cupy.float32(2),
                                              lambda: cupy.tensordot(a, a, 1), lambda: cupy.einsum("ij,jk", a, a))
    alone = [error_of(call) for call in refused]
    with gk.cupy.use(least=0) as using:
        mixed = cupy.matmul(a, b.astype("f8"))
        assert [error_of(call) for call in refused] == alone
        number = cupy.dot(a[0], a[0])
    assert mixed.dtype == np.float64 and number.shape == () and float(number) == float((a.get()[0] ** 2).sum())
    assert using.left["matmul", "operands of two dtypes"] == 1 and using.left["dot", "shapes that do not fit"] == 1
    assert using.calls == {"dot": 1}


def test_small_products_are_cupys(arrays: Any) -> None:
    cupy, a, b = arrays
    with gk.cupy.use(least=33 * 17 * 29) as outer:
        a @ b
        cupy.dot(a[:32], b)
        with gk.cupy.use() as inner:
            a @ b
    assert outer.calls == {"matmul": 1} and sum(outer.left.values()) == 2
    assert not inner.calls and inner.left == {("matmul", f"a product of fewer than {inner.least} multiply-adds"): 1}
