"""Attention of scores of any size, 1e-3 to 1e38, written in as many ways as there are, and its results of scores in float32.

Exponents of scores of 1e9 are rounding errors of thousands where a product is fused with what is subtracted from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import gemmkit as gk
from gemmkit import programs as gp

F16, F32, BF16 = np.float16, np.float32, ml_dtypes.bfloat16
KINDS = ("scaled", "biased", "masked", "gated", "scaled weights", "scaled difference", "turned", "clamped", "sum")


@gk.program
def weighted(q: Any, k: Any, v: Any, bias: Any, gate: Any, o: Any, scale: float, kind: str) -> None:
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = q[h, m] @ k[h, n].T
            if kind not in ("scaled weights", "scaled difference"):
                s = scale * s
            if kind == "biased":
                s = s + bias[m, n]
            if kind == "masked":
                s = gp.where(lambda i, j: j <= i, s, -1e9)
            if kind == "gated":
                s = s * gate[m]
            top = gp.maximum(best, s.max(axis=1))
            shrink = gp.exp(best - top)
            if kind == "scaled weights":
                p, shrink = gp.exp(scale * s - scale * top), gp.exp(scale * (best - top))
            elif kind == "scaled difference":
                p, shrink = gp.exp(scale * (s - top)), gp.exp(scale * (best - top))
            elif kind == "turned":
                p = gp.exp(-(top - s))
            elif kind == "clamped":
                p = gp.exp(gp.maximum(s - top, -50.0))
            elif kind == "sum":
                p = gp.exp(s + -top)
            else:
                p = gp.exp(s - top)
            total[:] = total * shrink + p.sum(axis=1)
            out[:] = out * shrink + p.astype(v.dtype) @ v[h, n]
            best[:] = top
        o[h, m] = out / total


class Case(NamedTuple):
    """``close``: whether results are right."""

    program: Any
    arrays: list[np.ndarray]
    mapping: gk.Mapping
    components: dict[str, Any]
    close: Callable[[np.ndarray], bool]


def drawn(seed: int) -> Case:
    """Rows whose scores are of one size each, equal or 2^-7 apart, and rows of all sizes; splits, lazy or not, both kernels."""
    rng = np.random.default_rng(seed)

    def pick(*given: Any) -> Any:
        return given[rng.integers(len(given))]

    kind, dtype = KINDS[seed % len(KINDS)], pick(F16, BF16, BF16)
    count, rows, places, d = 1, int(rng.integers(1, 80)), int(rng.integers(1, 140)), 64
    scale = float(pick(1.0, 0.25, 2.0, 1024.0)) if kind in ("biased", "gated") else float(pick(1.0, 0.3, 0.125, 3e4))
    most = (4.5 if dtype is F16 else 37.0) - (math.log10(scale) if scale > 1 and dtype is BF16 else 0)
    sizes = 10.0 ** rng.uniform(-3, most, (count, rows)) * rng.choice([-1, 1], (count, rows))
    q, k = np.zeros((count, rows, d), dtype), np.zeros((count, places, d), dtype)
    q[..., 0] = sizes
    k[..., 0] = 1 + rng.integers(0, int(pick(1, 2, 3)), (count, places)) / 128
    if pick(True, False, False) and kind != "gated":
        k[..., 0] *= rng.choice([-1, 1], (count, places)).astype(dtype)
    v = rng.standard_normal((count, places, d)).astype(dtype)
    bias = rng.choice([0.0, 1.0, -1e9, 3e8], (rows, places)).astype(F32)
    gate = rng.choice([0.5, 1.0, -2.0], rows).astype(F32)
    o = np.full((count, rows, d), np.nan, dtype)
    lazy, splits = pick(None, True, False), pick(0, 1, 2, 3)
    if kind in ("clamped", "masked", "gated"):
        lazy, splits = None, pick(0, 1)
    mapping = gk.Mapping({"n": int(pick(32, 48, 64))}, warpgroups=int(pick(1, 1, 2)), lazy=lazy, splits=splits,
                         descending=pick(None, False), kernel=str(pick("warp_specialised", "multistage")))

    dots = q[..., 0].astype(F32)[..., None] * k[..., 0].astype(F32)[:, None, :]           # exact
    with np.errstate(over="ignore"):
        s = dots if kind in ("scaled weights", "scaled difference") else F32(scale) * dots
        s = s + bias if kind == "biased" else s * gate[:, None] if kind == "gated" else s
    if kind == "masked":
        s = np.where(np.arange(places) <= np.arange(rows)[:, None], s, F32(-1e9))
    top = s.max(-1, keepdims=True)
    if kind == "scaled weights":
        below = (F32(scale) * s).astype(float) - F32(scale) * top
    else:
        below = (s.astype(float) - top) * (scale if kind == "scaled difference" else 1.0)
    p = np.exp(np.maximum(below, -50.0) if kind == "clamped" else below)
    p /= p.sum(-1, keepdims=True)
    exact, all_of_it = p @ v.astype(float), p @ np.abs(v.astype(float))

    def close(found: np.ndarray) -> bool:
        return bool(np.all(np.abs(found.astype(float) - exact) <= (2.0**-7 if dtype is BF16 else 2.0**-9) * all_of_it + 1e-5))

    return Case(weighted, [q, k, v, bias, gate, o], mapping, dict(scale=scale, kind=kind), close)
