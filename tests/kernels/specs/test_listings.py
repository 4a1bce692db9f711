"""Both listings of Fireiron's paper, emulated: right, and without a race."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.specs.products import cuda_wmma_sample, maxwell_optimized
from tests.support.harness import aligned


def matrix(rng: np.random.Generator, rows: int, columns: int, dtype: str, order: str) -> np.ndarray:
    return aligned(np.asarray(rng.standard_normal((rows, columns)).astype(dtype), order=order))  # type: ignore[call-overload]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("schedule", "dtype", "orders", "k"), [(cuda_wmma_sample, "f2", "CFC", 256), (maxwell_optimized, "f4", "FFF", 16)],
                         ids=["cuda_wmma_sample", "maxwell_optimized"])
def test_listing(schedule: Any, dtype: str, orders: str, k: int, rng: np.random.Generator) -> None:
    a, b = matrix(rng, 128, k, dtype, orders[0]), matrix(rng, k, 128, dtype, orders[1])
    out = aligned(np.asarray(np.full((128, 128), np.nan, "f4"), order=orders[2]))  # type: ignore[call-overload]
    with gk.emulate(seed=1):
        assert schedule(a, b, out=out) is out
    np.testing.assert_allclose(out, a.astype(float) @ b.astype(float), atol=5e-5)


def test_blocks_of_a_grid(rng: np.random.Generator) -> None:
    """Two blocks, each with a tile of C of its own."""
    a, b = matrix(rng, 128, 8, "f4", "F"), matrix(rng, 8, 256, "f4", "F")
    out = aligned(np.zeros((128, 256), "f4", order="F"))
    with gk.emulate():
        maxwell_optimized(a, b, out=out)
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "dtype", "orders"), [(cuda_wmma_sample, "f2", "CFC"), (maxwell_optimized, "f4", "FFF")],
                         ids=["cuda_wmma_sample", "maxwell_optimized"])
def test_on_the_gpu(schedule: Any, dtype: str, orders: str, rng: np.random.Generator) -> None:
    import cupy

    a, b = (cupy.asarray(rng.standard_normal((1024, 1024)).astype(dtype), order=order) for order in orders[:2])
    out = cupy.zeros((1024, 1024), "f4", order=orders[2])
    schedule(a, b, out=out)
    cupy.testing.assert_allclose(out, a.astype("f8") @ b.astype("f8"), atol=2e-3)
