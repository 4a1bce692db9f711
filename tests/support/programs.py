"""Programs that tests derive kernels of, and compare with NumPy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit import programs as gp


@gk.program
def gemm(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = acc


@gk.program
def transposed(a: Any, b: Any, d: Any) -> None:
    """A by columns, B by rows of its transpose."""
    for m, n in gp.parallel(a.columns, b.rows):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.rows):
            acc += a[k, m].T @ b[n, k].T
        d[m, n] = acc


@gk.program
def biased(a: Any, b: Any, bias: Any, scale: Any, d: Any, alpha: float = 1.0) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = gp.maximum(alpha * acc * scale[m] + bias[n], 0.0)


@gk.program
def residual(a: Any, b: Any, c: Any, d: Any, e: Any) -> None:
    """Two results, of which one has the squares of the other, and zero above the diagonal."""
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        total = acc + c[m, n]
        d[m, n] = total
        e[m, n] = gp.where(lambda i, j: j <= i, total * total, 0.0)


@gk.program
def dual(a: Any, b: Any, c: Any, d: Any, gate: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        x, y = gp.zeros(m, n), gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            x += a[m, k] @ b[k, n]
            y += a[m, k] @ c[k, n]
        d[m, n] = gate(x, y)


@gk.program
def batched(a: Any, b: Any, factor: Any, bias: Any, d: Any, y: Any) -> None:
    """A stack of products with one B, a factor and a bias for each, and sums of rows."""
    for h, m, n in gp.parallel(a.count, a.rows, b.columns):
        acc, sums = gp.zeros(m, n), gp.zeros(m)
        for k in gp.sequential(a.columns):
            acc += a[h, m, k] @ b[k, n]
            sums += a[h, m, k].sum(axis=1)
        d[h, m, n] = acc * factor[h] + bias[h, n]
        with gp.once(n):
            y[h, m] = sums


@gk.program
def lstm(x: Any, w: Any, h: Any, u: Any, bias: Any, y: Any) -> None:
    for m, n in gp.parallel(x.rows, w.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(x.columns):
            acc += x[m, k] @ w[k, n]
        for j in gp.sequential(h.columns):
            acc += h[m, j] @ u[j, n]
        y[m, n] = gp.tanh(acc + bias[n])


@gk.program
def two_layers(x: Any, w: Any, v: Any, bias: Any, y: Any) -> None:
    """Products one after the other, without a loop."""
    for m in gp.parallel(x.rows):
        h = gp.maximum(x[m] @ w + bias, 0.0)
        y[m] = h.astype(w.dtype) @ v


@gk.program
def mlp(x: Any, w: Any, bias: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        h = gp.copy(x[m])
        for layer in gp.sequential(w.count):
            h[:] = gp.maximum(h @ w[layer] + bias[layer], 0.0).astype(x.dtype)
        y[m] = h


@gk.program
def product_and_sums(a: Any, b: Any, d: Any, y: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc, sums = gp.zeros(m, n), gp.zeros(m)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            sums += a[m, k].sum(axis=1)
        d[m, n] = acc
        with gp.once(n):
            y[m] = sums


@gk.program
def product_and_columns(a: Any, b: Any, d: Any, y: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc, sums = gp.zeros(m, n), gp.zeros(n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            sums += b[k, n].sum(axis=0)
        d[m, n] = acc
        with gp.once(m):
            y[n] = sums


@gk.program
def zero_points(a: Any, b: Any, of_a: Any, of_b: Any, scale: Any, d: Any) -> None:
    """(A - a zero point of each row) (B - one of each column), scaled: of the sums of both at the end of a tile."""
    for m, n in gp.parallel(a.rows, b.columns):
        acc, left, right, terms = gp.zeros(m, n), gp.zeros(m), gp.zeros(n), float(a.shape[1])
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
            left += a[m, k].sum(axis=1)
            right += b[k, n].sum(axis=0)
        d[m, n] = (acc - of_a[m] * right - left * of_b[n] + terms * (of_a[m] * of_b[n])) * scale[n]


@gk.program
def zero_points_of_weights(a: Any, w: Any, of_a: Any, d: Any, y: Any, of_all: float) -> None:
    """A stack by weights as they are kept, W[n, k]: columns of the product are lines of W."""
    for h, m, n in gp.parallel(a.count, a.rows, w.rows):
        acc, sums = gp.full(m, n, 1.0), gp.full(n, 0.5)
        for k in gp.sequential(a.columns):
            acc += a[h, m, k] @ w[h, n, k].T
            sums += w[h, n, k].sum(axis=1)
        d[h, m, n] = gp.maximum(acc - (of_a[h, m] + of_all) * sums, -1.0)
        with gp.once(m):
            y[h, n] = of_all * sums


@gk.program
def attention(q: Any, k: Any, v: Any, o: Any, scale: float, score: Any = None, visible: Any = None) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = scale * (q[h, m] @ k[h, n].T)
            s = s if score is None else score(s)
            s = s if visible is None else gp.where(visible, s, -math.inf)
            top = gp.maximum(best, s.max(axis=1))
            zero = gp.finite(top)
            p, shrink = gp.exp(s - zero), gp.exp(best - zero)
            total[:] = total * shrink + p.sum(axis=1)
            out[:] = out * shrink + p.astype(v.dtype) @ v[h, n]
            best[:] = top
        o[h, m] = out / total


def online(s: Any, values: Any, dtype: Any, best: Any, total: Any, out: Any) -> None:
    """A round of a softmax whose maximum runs, of scores and of what they weigh: it changes the three cells."""
    top = gp.maximum(best, s.max(axis=1))
    zero = gp.finite(top)
    p, shrink = gp.exp(s - zero), gp.exp(best - zero)
    total[:] = total * shrink + p.sum(axis=1)
    out[:] = out * shrink + p.astype(dtype) @ values
    best[:] = top


@gk.program
def packed_attention(q: Any, k: Any, v: Any, of_q: Any, of_k: Any, o: Any, scale: float) -> None:
    queries, keys = gp.packed(q.rows, of_q), gp.packed(k.rows, of_k)
    for h, i, m in gp.parallel(q.count, queries.count, queries.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(keys[i]):
            online(scale * (q[h, m] @ k[h, n].T), v[h, n], v.dtype, best, total, out)
        o[h, m] = out / total + gp.place(m)


@gk.program
def bounded_attention(q: Any, k: Any, v: Any, starts: Any, lengths: Any, o: Any, scale: float) -> None:
    """From a start to an end, both of each of a stack."""
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows, start=starts[h] - 2, stop=lengths[h]):
            online(scale * (q[h, m] @ k[h, n].T), v[h, n], v.dtype, best, total, out)
        o[h, m] = out / total + gp.place(m)


@gk.program
def attention_in_pages(q: Any, k: Any, v: Any, table: Any, starts: Any, o: Any, scale: float) -> None:
    """From a start within a page on."""
    rows = gp.paged(k, table)
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(rows[h], start=starts[h]):
            online(scale * (q[h, m] @ k[n.page, n].T), v[n.page, n], v.dtype, best, total, out)
        o[h, m] = out / total + gp.place(m)


def silu_times(x: Any, y: Any) -> Any:
    return x / (1.0 + gp.exp(-x)) * y


#: What a mapping has half of the time.
CLUSTERS: tuple[dict[str, int], ...] = ({}, {}, {}, {"m": 2}, {"n": 2}, {"m": 2, "n": 2})


def view(x: np.ndarray) -> np.ndarray:
    """In float16, as a view of an array whose rows TMA takes."""
    whole = np.zeros((*x.shape[:-1], x.shape[-1] + -x.shape[-1] % 8), np.float16)
    whole[..., :x.shape[-1]] = x
    return whole[..., :x.shape[-1]]


def multistage(mapping: gk.Mapping) -> gk.Mapping:
    """The mapping on a kernel by cp.async and mma.sync, without what that has not."""
    return dataclasses.replace(mapping, kernel="multistage", cluster={}, ahead=None, across=None, turns=None, anchored=None)


def doubled(mapping: gk.Mapping) -> gk.Mapping:
    """Twice as many rows of each warpgroup of a multistage kernel, and no more columns than there is room for."""
    columns = min(mapping.blocks.get("n", 64), 64)
    return dataclasses.replace(mapping, blocks={**mapping.blocks, "m": 128 * mapping.warpgroups, "n": columns})


def drawn_case(seed: int) -> tuple[Any, list[np.ndarray], gk.Mapping, dict[str, Any]]:
    """A program with operands, NaN where results belong, and a mapping."""
    rng = np.random.default_rng(seed)
    m, n = (int(x) for x in rng.integers(1, 200, 2))
    k, j = (8 * int(x) for x in rng.integers(1, 20, 2))

    def half(*shape: int) -> np.ndarray:
        wide = rng.standard_normal((*shape[:-1], shape[-1] + -shape[-1] % 8)) / 4
        return wide.astype(np.float16)[..., :shape[-1]]

    out = [np.full((m, n), np.nan, (np.float16, np.float32)[rng.integers(2)]) for _ in range(2)]
    row, column = (rng.standard_normal(extent).astype(np.float32) / 4 for extent in (m, n))
    name = ("gemm", "transposed", "biased", "residual", "dual", "lstm", "product_and_sums", "product_and_columns", "zero_points",
            "zero_points_of_weights")[rng.integers(10)]
    arrays = {"gemm": [half(m, k), half(k, n), out[0]], "transposed": [half(k, m), half(n, k), out[0]],
              "biased": [half(m, k), half(k, n), half(n), half(m), out[0]],
              "residual": [half(m, k), half(k, n), half(m, n), *out],
              "dual": [half(m, k), half(k, n), half(k, n), out[0]],
              "lstm": [half(m, k), half(k, n), half(m, j), half(j, n), half(n), out[0]],
              "product_and_sums": [half(m, k), half(k, n), out[0], np.full(m, np.nan, np.float32)],
              "product_and_columns": [half(m, k), half(k, n), out[0], np.full(n, np.nan, out[1].dtype)],
              "zero_points": [half(m, k), half(k, n), row, column, half(n), out[0]],
              "zero_points_of_weights": [half(2, m, k), half(2, n, k), half(2, m), np.full((2, m, n), np.nan, out[0].dtype),
                                         np.full((2, n), np.nan, out[1].dtype)]}[name]
    known: dict[str, dict[str, Any]] = {"dual": dict(gate=silu_times), "biased": dict(alpha=0.5),
                                        "zero_points_of_weights": dict(of_all=0.25)}
    more = known.get(name, {})
    mapping = gk.Mapping({"n": int(rng.choice([64, 128])), "k": int(rng.choice([64, 128]))}, warpgroups=int(rng.integers(1, 3)),
                         stages=int(rng.integers(2, 4)), cluster=CLUSTERS[rng.integers(len(CLUSTERS))])
    return globals()[name], arrays, mapping, more
