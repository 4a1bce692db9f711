"""Programs of rows without a product that tests derive kernels of, and drawn ones: expressions of rows, columns and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import gemmkit as gk
from gemmkit import programs as gp

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
F64, I8 = np.dtype(np.float64), np.dtype(np.int8)


@gk.program
def layernorm(x: Any, gamma: Any, beta: Any, y: Any, eps: float) -> None:
    for m in gp.parallel(x.rows):
        c = x[m] - x[m].mean(axis=1)
        y[m] = c * gp.rsqrt((c * c).mean(axis=1) + eps) * gamma + beta


@gk.program
def softmax(x: Any, y: Any, scale: float = 1.0) -> None:
    for m in gp.parallel(x.rows):
        t = scale * x[m]
        p = gp.exp(t - t.max(axis=1))
        y[m] = p / p.sum(axis=1)


@gk.program
def added_rmsnorm(x: Any, residual: Any, gamma: Any, h: Any, y: Any, r: Any, eps: float) -> None:
    """The sum of two arrays of rows, its norm, and the factors of the rows."""
    for m in gp.parallel(x.rows):
        t = x[m] + residual[m]
        scale = gp.rsqrt((t * t).mean(axis=1) + eps)
        h[m] = t
        y[m] = t * scale * gamma
        r[m] = scale


@gk.program
def layernorm_gradient(dy: Any, x: Any, gamma: Any, mean: Any, rstd: Any, dx: Any) -> None:
    """Two arrays of rows, which folds and the result read."""
    for m in gp.parallel(x.rows):
        normal, g = (x[m] - mean[m]) * rstd[m], dy[m] * gamma
        dx[m] = (g - g.mean(axis=1) - normal * (g * normal).mean(axis=1)) * rstd[m]


@gk.program
def causal_softmax(x: Any, y: Any, lse: Any) -> None:
    for m in gp.parallel(x.rows):
        t = gp.where(lambda i, j: j <= i, x[m], -math.inf)
        top = t.max(axis=1)
        p = gp.exp(t - top)
        total = p.sum(axis=1)
        y[m] = p / total
        lse[m] = top + gp.log(total)


@gk.program
def stacked(x: Any, bias: Any, factor: Any, scale: Any, y: Any, low: Any) -> None:
    """Of each matrix of a stack with its bias and its factor."""
    for h, m in gp.parallel(x.count, x.rows):
        t = x[h, m] * factor[h] + bias[h]
        low[h, m] = t.min(axis=1)
        y[h, m] = gp.minimum(t - t.min(axis=1), 3.0) * scale[h, m]


@gk.program
def quantised(x: Any, y: Any, step: Any) -> None:
    """Rounded to bfloat16 on the way, and all rows by the size of their largest element."""
    for m in gp.parallel(x.rows):
        t = x[m].astype("bfloat16")
        most = gp.maximum(t.max(axis=1), -t.min(axis=1))
        y[m] = gp.where(t < 0.5 * most, t / gp.maximum(most, 1e-6), gp.tanh(t))
        step[m] = most


@gk.program
def corners(x: Any, gamma: Any, y: Any, z: Any, r: Any, alpha: float) -> None:
    """Cells, places, constants alone, conditions of a row, what is needed often within one function."""
    for m in gp.parallel(x.rows):
        h = gp.copy(x[m])
        h[:] = h + gp.where(lambda i, j: j - i < 3, gp.full(m, x.columns, 1.0), 0.0) * gp.where(lambda j: j < 2, gamma, -1.0)
        h += 0.25 * gp.place(m)
        value, value_2 = h.sum(axis=1) * 1e-3, gp.finite(gp.log(gp.maximum(h.max(axis=1) - 100.0, 0.0)))
        a = gp.where(value < 0.0, h, gp.exp(gp.minimum(h, 1.0)) - 1.0)
        b = a * a + value_2
        c = b * b - alpha * a
        y[m] = (c * c + b) / (c * c + 1.0) * gp.finite(b) + value
        z[m] = gp.where((h < 0.5) & (a < 0.25), value, gp.zeros(x.columns) + alpha)
        r[m] = gp.where(value < alpha, value, 2.0 * alpha)


# -- forms: what is read and stored otherwise than as rows of one length ---------------------------------------------------------

@gk.program
def outer(s: Any, t: Any, d: Any, e: Any) -> None:
    """No matrix is read."""
    for m, n in gp.parallel(d.rows, d.columns):
        d[m, n] = s[m] * t[n] + gp.place(n)
        e[m, n] = gp.exp(s[m])


@gk.program
def values(s: Any, t: Any, d: Any, c: float) -> None:
    """One value of each row, and no rows."""
    for m in gp.parallel(s.columns):
        d[m] = s[m] * c + t[m]
        t[m] = t[m] - s[m]


@gk.program
def turned(x: Any, b: Any, d: Any, e: Any) -> None:
    """A transpose is stored."""
    for h, m, n in gp.parallel(x.count, x.rows, x.columns):
        y = gp.exp(gp.minimum(x[h, m, n], 1.0)) * b[m]
        d[h, n, m] = y * y / (1.0 + y * y)
        e[h, m, n] = y


@gk.program
def turned_folds(x: Any, d: Any) -> None:
    """A transpose of rows that are folded."""
    for m, n in gp.parallel(x.rows, x.columns):
        top = x[m].max(axis=1)
        total = gp.exp(x[m] - top).sum(axis=1)
        d[n, m] = gp.exp(x[m, n] - top) / total


@gk.program
def symmetric(x: Any, d: Any, e: Any) -> None:
    """A transpose is read: once beside rows, once for two results."""
    for m, n in gp.parallel(x.rows, x.columns):
        d[m, n] = 0.5 * (x[m, n] + x[n, m])
        t = gp.tanh(x[n, m])
        e[m, n] = t * t + gp.exp(t) * gp.call(lambda t, i, j: t + i - j, t, m, n)


@gk.program
def lengths(x: Any, z: Any, y: Any, w: Any, t: Any) -> None:
    """Rows of two lengths."""
    for m in gp.parallel(x.rows):
        a = x[m] - x[m].mean(axis=1)
        y[m] = a * gp.rsqrt((a * a).mean(axis=1) + 0.5) * z[m].max(axis=1)
        w[m] = gp.exp(z[m] - z[m].max(axis=1)) + t + gp.place(m)


@gk.program
def embedded(ids: Any, x: Any, w: Any, g: Any, y: Any, s: Any) -> None:
    """Rows that an array names, normalised, and beside other rows."""
    for m in gp.parallel(ids.columns):
        row = w[ids[m]]
        y[m] = row * gp.rsqrt((row * row).mean(axis=1) + 1e-3) * g + x[m]
        s[m] = row.max(axis=1)


@gk.program
def scattered(to: Any, x: Any, y: Any, z: Any) -> None:
    """Rows are stored where an array says."""
    for h, m in gp.parallel(x.count, x.rows):
        y[h, to[m]] = x[h, m] * 2.0
        z[h, m] = x[h, m] - x[h, m].max(axis=1)


@gk.program
def counted(c: Any, x: Any, y: Any) -> None:
    """A value of each row in place."""
    for m in gp.parallel(x.rows):
        y[m] = x[m] * c[m]
        c[m] = c[m] + x[m].sum(axis=1)


@gk.program
def swapped(x: Any, y: Any) -> None:
    """Two rows in place, each of which is made of both."""
    for m in gp.parallel(x.rows):
        one, other = x[m], y[m]
        x[m] = other
        y[m] = one - other.mean(axis=1)


@gk.program
def dequantised(x: Any, s: Any, b: Any, y: Any, t: Any, c: float) -> None:
    """Rows and columns of whole numbers, as numbers and as what a function gets."""
    for m in gp.parallel(x.rows):
        y[m] = x[m] * s[m] + b + gp.call(lambda v, w: v // 2 + (w & 1), x[m], b) * c
        t[m] = x[m].sum(axis=1)


@gk.program
def in_double(x: Any, gamma: Any, y: Any, z: Any, c: float) -> None:
    for m in gp.parallel(x.rows):
        t = gp.exp(x[m] - x[m].max(axis=1)) + gp.erf(x[m]) / (2.0 + gp.tanh(x[m]))
        y[m] = t * gp.rsqrt((t * t).mean(axis=1) + c) * gamma + gp.call(lambda v, i: v * 0.1 if v > 0 else i, x[m], m)
        z[m] = gp.log(t.sum(axis=1)) + t.astype("float32").min(axis=1)


# -- drawn ------------------------------------------------------------------------------------------------------------------

COLUMNS = 1, 2, 7, 8, 31, 64, 97, 100, 257, 1000, 1031, 2056


def drawn_rows(seed: int) -> tuple[Any, list[np.ndarray], dict[str, Any]]:
    """A program of rows whose expressions are drawn, its arrays, NaN where results belong, and its number."""
    rng = np.random.default_rng(seed)
    columns = int(rng.choice(COLUMNS))
    count = int(rng.integers(1, 6))

    def array(*shape: int) -> np.ndarray:
        return (rng.uniform(0.25, 1.5, shape) * rng.choice([1, -1])).astype((F16, BF16, F32, F64, I8)[rng.integers(5)])

    arrays = [array(count, columns), array(count, columns), array(columns), array(count)]
    outs = [np.full((count, columns), np.nan, (F16, BF16, F32)[rng.integers(3)]),
            np.full((count, columns), np.nan, F32), np.full(count, np.nan, F32)]
    plan = [int(x) for x in rng.integers(0, 2**31, 40)]

    @gk.program
    def drawn(x: Any, r: Any, gamma: Any, s: Any, y: Any, z: Any, v: Any, alpha: float) -> None:
        for m in gp.parallel(x.rows):
            y[m], z[m], v[m] = _expressions(x[m], r[m], gamma, s[m], alpha, plan)

    return drawn, [*arrays, *outs], dict(alpha=float(np.float32(rng.uniform(0.5, 1.5))))


UNARY: list[Callable[[Any], Any]] = [
    lambda v: gp.exp(gp.minimum(v, 2.0)), lambda v: gp.tanh(v), lambda v: gp.sqrt(v * v + 0.5), lambda v: -v,
    lambda v: gp.log(v * v + 1.0), lambda v: gp.rsqrt(v * v + 0.25), lambda v: 0.5 * v]
BINARY: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b * 0.5, lambda a, b: a / (b * b + 0.5), gp.maximum, gp.minimum,
    lambda a, b: gp.where(a < b, 0.5 * a, a - 0.5 * b)]
FOLDED: list[Callable[[Any], Any]] = [
    lambda v: v.mean(axis=1), lambda v: v.max(axis=1), lambda v: v.min(axis=1), lambda v: v.sum(axis=1) * 1e-3,
    lambda v: ((v - v.mean(axis=1)) * (v - v.mean(axis=1))).mean(axis=1)]


def _expressions(x: Any, r: Any, gamma: Any, s: Any, alpha: Any, plan: list[int]) -> tuple[Any, Any, Any]:
    """Two rows and a value of each, out of what is there and of what was made before."""
    vectors, values = [x, r, x * gamma], [s, alpha]
    for n in plan[:12]:
        kind, one, other = n % 4, n // 4, n // 1009
        if kind == 0:
            vectors.append(UNARY[one % len(UNARY)](vectors[other % len(vectors)]))
        elif kind == 1:
            vectors.append(BINARY[one % len(BINARY)](vectors[other % len(vectors)], vectors[n // 7 % len(vectors)]))
        elif kind == 2:
            vectors.append(BINARY[one % len(BINARY)](vectors[other % len(vectors)], values[n // 11 % len(values)]))
        else:
            values.append(FOLDED[one % len(FOLDED)](vectors[other % len(vectors)]))
    return vectors[-1], vectors[plan[12] % len(vectors)] * gamma + values[-1], values[plan[13] % len(values)] * s
