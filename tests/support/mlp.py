"""MLPs in float64, and what their tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from gemmkit.plans.launch import Cache
from gemmkit.runtime.device import H100, assumed
from tests.support.machines import epsilon

Function = Callable[[np.ndarray], np.ndarray]


def relu(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, 0, x)


def identity(x: np.ndarray) -> np.ndarray:
    return x


def reference(x: np.ndarray, weights: Sequence[np.ndarray], biases: Any = None, activation: Function = relu,
              last: Function = identity) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, activations between layers rounded to x's dtype; and how much its rounding may be off: what a
    unit in the last place of every activation amounts to in the last layer, twice."""
    h = x.astype(np.float64)
    for n, w in enumerate(weights):
        bias = np.zeros(w.shape[1]) if biases is None else np.asarray(biases[n]).astype(np.float64)
        size = np.abs(h) @ np.abs(w.astype(np.float64)) + np.abs(bias)
        h = h @ w.astype(np.float64) + bias
        if n < len(weights) - 1:
            h = activation(h).astype(x.dtype).astype(np.float64)
    return last(h), 2 * epsilon(x.dtype) * size


def close(found: np.ndarray, expected: tuple[np.ndarray, np.ndarray]) -> None:
    wanted, off = expected
    assert found.shape == wanted.shape and not np.isnan(found.astype(float)).any()
    assert np.all(np.abs(found.astype(np.float64) - wanted) <= off + 2 * epsilon(found.dtype) * np.abs(wanted) + 1e-7)


def draw(rng: np.random.Generator, rows: int, widths: Sequence[int], dtype: Any, order: Any = "C",
         bias: Any = np.float32) -> tuple[np.ndarray, list[np.ndarray], Any]:
    """x, weights that keep activations near 1, and biases (None: of dtype None)."""
    x = rng.standard_normal((rows, widths[0])).astype(dtype)
    weights = [np.asarray((rng.standard_normal((k, n)) * np.sqrt(2 / k)).astype(dtype), order=order)
               for k, n in pairwise(widths)]
    return x, weights, None if bias is None else [rng.standard_normal(n).astype(bias) for n in widths[1:]]


def whole(rng: np.random.Generator, rows: int, widths: Sequence[int], dtype: Any) -> tuple[np.ndarray, list[np.ndarray], list]:
    """Whole numbers so small, and weights with two elements a column, that every sum is exact in every dtype."""
    x = rng.integers(-2, 3, (rows, widths[0])).astype(dtype)
    weights = []
    for k, n in pairwise(widths):
        w = np.zeros((k, n), dtype)
        for column in range(n):
            w[rng.integers(0, k, 2), column] = rng.choice([-1, 1], 2)
        weights.append(w)
    return x, weights, [rng.integers(-2, 3, n).astype(dtype) for n in widths[1:]]


@contextmanager
def small(monkeypatch: pytest.MonkeyPatch, multiprocessors: int, by_warps: bool = False) -> Iterator[None]:
    """A Hopper with few multiprocessors, so that blocks have several tiles; or a GPU without wgmma that has as much of all else."""
    device = dataclasses.replace(H100, sm_count=multiprocessors, arch=(8, 0) if by_warps else H100.arch)
    with monkeypatch.context() as patch, assumed(device):
        patch.setattr("gemmkit.plans.launch._launches", Cache())
        yield
