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


# -- elements of arrays ---------------------------------------------------------------------------------------------------------

#: Of an element, one of an array by rows, and one of an array by columns, whose squares are beyond their dtype.
ELEMENTS: list[Any] = [
    lambda s, r, c: s + r * r, lambda s, r, c: s + r * c - c * r * 1e-6, lambda s, r, c: s + gp.maximum(r, 1e-3) * gp.minimum(c, 1e3),
    lambda s, r, c: gp.where(r < c, r * r, c + c) + s, lambda s, r, c: (r - c) * (r + c) * 1e-3 + s, lambda s, r, c: s - -r * c + gp.sqrt(r * r),
    lambda s, r, c: s * 1e-3 + r / c + gp.tanh(r), lambda s, r, c: gp.where(s < r, gp.where(r <= 3.0, r, s), c), lambda s, r, c: gp.exp(r / 400.0) * s + c,
]


@gk.program
def tile_of_arrays(a: Any, b: Any, r: Any, c: Any, d: Any, f: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = f(acc, r[m], c[n])


@gk.program
def rounds_of_arrays(q: Any, k: Any, v: Any, r: Any, c: Any, o: Any, y: Any, f: Any) -> None:
    for m in gp.parallel(q.rows):
        out = gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = f(q[m] @ k[n].T, r[m], c[n])
            out += (s * 1e-4).astype(v.dtype) @ v[n]
        o[m] = out
        y[m] = f(out, r[m], r[m])


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "int32", "float64"])
@pytest.mark.parametrize("n", range(len(ELEMENTS)))
def test_elements_of_arrays_meet_in_float32(dtype: str, n: int) -> None:
    rng, most = np.random.default_rng(n), 100 if dtype == "int8" else 300
    r, c = (rng.integers(-most, most, extent).astype(dtype) for extent in (20, 24))
    r[r == 0], c[c == 0] = 1, 1
    chains.check(tile_of_arrays, [drawn(20, 64), drawn(64, 24), r, c, np.full((20, 24), np.nan, F32)], gk.Mapping({"n": 64}, warpgroups=1),
                 f=ELEMENTS[n])
    chains.check(rounds_of_arrays, [drawn(20, 64), drawn(24, 64), drawn(24, 64), r, c, np.full((20, 64), np.nan, F32), np.full((20, 64), np.nan, F32)],
                 gk.Mapping({"n": 16}, warpgroups=1), f=ELEMENTS[n])


# -- names ----------------------------------------------------------------------------------------------------------------------

@gk.program
def cell_of_an_array(a: Any, b: Any, c: Any, d: Any) -> None:
    e = c
    for m, n in gp.parallel(a.rows, b.columns):
        c = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            c += a[m, k] @ b[k, n]
        d[m, n] = c + e[m, n]


@gk.program
def one_name_twice(a: Any, b: Any, x: Any, y: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        for k in gp.sequential(x.columns):
            acc += x[m, k] @ y[k, n]
        d[m, n] = acc


@gk.program
def index_of_an_array(a: Any, b: Any, m: Any, d: Any) -> None:
    c = m
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = acc + c[m]


@KERNELS
def test_names_that_a_program_has_twice(kernel: str) -> None:
    mapping = gk.Mapping({"n": 64}, warpgroups=1, kernel=kernel)
    chains.check(cell_of_an_array, [drawn(20, 40), drawn(40, 24), drawn(20, 24), np.full((20, 24), np.nan, F32)], mapping)
    for one, other in ((40, 200), (200, 40), (40, 40)):
        chains.check(one_name_twice, [drawn(20, one), drawn(one, 24), drawn(20, other), drawn(other, 24), np.full((20, 24), np.nan, F32)],
                     mapping)
    with pytest.raises(ValueError, match="m: the derived text has this name for its own"):
        index_of_an_array.plan(drawn(20, 40), drawn(40, 24), drawn(20), np.zeros((20, 24), F32), mapping=mapping)
