"""Numbers and places as texts: whatever expressions they are in, a text says what the program does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from tests.support import chains

F16, F32 = np.float16, np.float32
KERNELS = pytest.mark.parametrize("kernel", ["warp_specialised", "multistage"])
#: Of an element, a run-time number near 2, and the places of the element's row and column.
EXPRESSIONS: list[Any] = [
    lambda s, x, i, j: s / x, lambda s, x, i, j: -s * (1.0 / x), lambda s, x, i, j: s * (x + 1.0) / (x - 4.0) - x,
    lambda s, x, i, j: s * gp.exp(-(x * 0.5)) + gp.sqrt(x) * gp.log(x + 1.5), lambda s, x, i, j: s * gp.maximum(x, 2.5) - gp.minimum(-x, 1.0),
    lambda s, x, i, j: gp.where(s < x, s, x * x), lambda s, x, i, j: s * gp.where(s <= x, 3.0, x / 7.0), lambda s, x, i, j: s * gp.tanh(x / 3.0),
    lambda s, x, i, j: (s + gp.exp(0.5)) * gp.sqrt(2.0) / gp.log(3.0), lambda s, x, i, j: s * (i * 2.0 - j) * 0.0625,
    lambda s, x, i, j: (1.5 - i) * x + s, lambda s, x, i, j: s + x * (j + 1.0) / (i + x), lambda s, x, i, j: -i * 0.5 + -(i - j) * s,
    lambda s, x, i, j: gp.where((s <= x) & (-x < s), s - j, i), lambda s, x, i, j: gp.sqrt(i + 1.0) * s - gp.sqrt(j),
    lambda s, x, i, j: gp.maximum(s, i - j), lambda s, x, i, j: s / (i + 1.0) + 1.0 / (j + 1.0), lambda s, x, i, j: gp.where(i < j, i, j) + s,
    lambda s, x, i, j: gp.exp(-(0.05 * (i + j))) * s, lambda s, x, i, j: gp.finite(s) - (x - (s - (x - 1.0))),
]


@gk.program
def of_sums(a: Any, b: Any, d: Any, x: float, f: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = f(acc, x, gp.place(m), gp.place(n))


@gk.program
def of_scores(q: Any, k: Any, v: Any, o: Any, x: float, f: Any) -> None:
    for m in gp.parallel(q.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            out += f(q[m] @ k[n].T, x, gp.place(m), gp.place(n)).astype(v.dtype) @ v[n]
        o[m] = out


@gk.program
def of_rows(a: Any, y: Any, x: float, f: Any) -> None:
    for m in gp.parallel(a.rows):
        y[m] = f(a[m], x, gp.place(m), gp.place(m))


def drawn(*shape: int) -> np.ndarray:
    return (np.random.default_rng(5).standard_normal(shape) / 4).astype(F16)


@KERNELS
@pytest.mark.sample(8)
@pytest.mark.parametrize("n", range(len(EXPRESSIONS)))
def test_of_a_tile(kernel: str, n: int) -> None:
    arrays = [drawn(20, 64), drawn(64, 24), np.full((20, 24), np.nan, F32)]
    chains.check(of_sums, arrays, gk.Mapping({"n": 64}, warpgroups=1, kernel=kernel), x=2.25, f=EXPRESSIONS[n])


@KERNELS
@pytest.mark.sample(8)
@pytest.mark.parametrize("n", range(len(EXPRESSIONS)))
def test_of_rounds(kernel: str, n: int) -> None:
    arrays = [drawn(20, 64), drawn(30, 64), drawn(30, 64), np.full((20, 64), np.nan, F32)]
    chains.check(of_scores, arrays, gk.Mapping({"n": 16}, warpgroups=1, kernel=kernel), x=2.25, f=EXPRESSIONS[n])


@pytest.mark.sample(8)
@pytest.mark.parametrize("n", range(len(EXPRESSIONS)))
def test_of_rows(n: int) -> None:
    chains.check(of_rows, [drawn(20, 24), np.full((20, 24), np.nan, F32)], gk.Mapping(), x=2.25, f=EXPRESSIONS[n])


@gk.program
def both_ways(x: Any, w: Any, y: Any) -> None:
    """A block that is taken as it is, and as its transpose."""
    for m in gp.parallel(x.rows):
        out = gp.zeros(m, w.columns)
        for layer in gp.sequential(w.count):
            out += x[m] @ w[layer] + gp.tanh(x[m] @ w[layer].T)
        y[m] = out


@KERNELS
def test_products_of_the_same_blocks_are_told_apart(kernel: str) -> None:
    chains.check(both_ways, [drawn(20, 64), drawn(2, 64, 64), np.full((20, 64), np.nan, F32)], gk.Mapping(warpgroups=1, kernel=kernel))
