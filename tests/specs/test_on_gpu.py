"""Schedules on a GPU: the five decompositions of docs/specs.md, drawn schedules, steps ahead, sizes over the edge."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest

import gemmkit as gk
from gemmkit.specs import products
from gemmkit.specs.products import cuda_wmma_sample, maxwell_optimized, multiply_adds, tensor_cores
from tests.support.drawn_schedules import PARTS, Drawn, part_of_many, schedules

DECOMPOSITIONS = {
    "scalar": (products.scalar, "f4", "CCC"), "registers": (products.registers, "f4", "CCC"),
    "shared": (products.shared_tile, "f4", "CCC"), "maxwell_optimized": (maxwell_optimized, "f4", "FFF"),
    "cuda_wmma_sample": (cuda_wmma_sample, "f2", "CFC"),
    "maxwell, ahead": (multiply_adds(ahead=True, occupancy=2), "f4", "FFF"),
    "wmma, ahead": (tensor_cores((128, 128), 64, (64, 32), ahead=True, occupancy=2), "f2", "CFC"),
}
KNOWS_EDGES = "scalar", "registers", "shared", "cuda_wmma_sample"


def computed(schedule: Any, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
    """The product by the GPU, in the orders of these arrays, at addresses that are aligned."""
    import cupy

    def there(x: np.ndarray) -> Any:
        return cupy.asarray(np.ascontiguousarray(x)) if x.flags.c_contiguous else cupy.asarray(np.ascontiguousarray(x.T)).T

    of_a, of_b, of_out = map(there, (a, b, out))
    assert schedule(of_a, of_b, out=of_out) is of_out
    return np.asarray(of_out.get())


@pytest.mark.gpu
@pytest.mark.sample(14)
@pytest.mark.parametrize("name", DECOMPOSITIONS)
@pytest.mark.parametrize("sizes", [(256, 384, 512), (1024, 128, 128), (200, 136, 264), (97, 61, 13)], ids=str)
def test_decomposition(name: str, sizes: tuple[int, int, int], rng: np.random.Generator) -> None:
    schedule, dtype, orders = DECOMPOSITIONS[name]
    if name not in KNOWS_EDGES and sizes[1] % 128:
        sizes = (128, 256, 128)
    m, n, k = sizes
    a = np.asarray(rng.standard_normal((m, k)).astype(dtype), order=orders[0])            # type: ignore[call-overload]
    b = np.asarray(rng.standard_normal((k, n)).astype(dtype), order=orders[1])            # type: ignore[call-overload]
    out = np.asarray(np.full((m, n), np.nan, "f4"), order=orders[2])                      # type: ignore[call-overload]
    found = computed(schedule, a, b, out)
    np.testing.assert_allclose(found, a.astype(float) @ b.astype(float), atol=5e-4)


def emulated(drawn: Drawn) -> None:
    a, b, out = drawn.matrices()
    with gk.emulate(seed=drawn.seed):
        drawn.schedule(a, b, out=out)
    drawn.check(out, a, b)


@pytest.mark.kin(1)
@hypothesis.settings(max_examples=3)                 # those of `test_many_drawn_in_the_emulator` are many
@hypothesis.given(schedules())
def test_drawn_in_the_emulator(drawn: Drawn) -> None:
    emulated(drawn)


@pytest.mark.thorough
@pytest.mark.parametrize("part", PARTS)
def test_many_drawn_in_the_emulator(part: int) -> None:
    part_of_many(part, emulated)


@pytest.mark.gpu
@pytest.mark.sample(8)
@pytest.mark.parametrize("part", range(8))
def test_drawn_on_the_gpu(part: int) -> None:
    """Some for each of the processes that run tests."""
    def check(drawn: Drawn) -> None:
        a, b, out = drawn.matrices()
        drawn.check(computed(drawn.schedule, a, b, out), a, b)

    part_of_many(part, check, count=6)
