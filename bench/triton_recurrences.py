"""Recurrences in Triton, written for `bench.recurrences`: each program goes through a head's blocks of 64 rows in order,
with part of the columns of the state in registers. Lengths, warps and stages are chosen by Triton's own timing.

The inverse of the delta rule's triangles goes row by row, as flash-linear-attention's first kernels did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

CONFIGS = [triton.Config(dict(N=n), num_warps=warps, num_stages=stages) for n, warps, stages in (
    (16, 4, 2), (32, 4, 1), (32, 4, 2), (32, 4, 3), (32, 8, 2), (64, 4, 2), (64, 8, 2), (128, 8, 1))]
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp(x):  # type: ignore[no-untyped-def]
    return tl.exp2(x * LOG2_E)


@triton.autotune(CONFIGS, key=["T"])
@triton.jit
def _linear(q, k, v, g, o, T, D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    n, h = tl.program_id(0) * N, tl.program_id(1).to(tl.int64)
    i, d, w = tl.arange(0, C), tl.arange(0, D), tl.arange(0, N)
    state = tl.zeros((D, N), tl.float32)
    for t in range(0, T, C):
        rows = h * T + t + i
        c = tl.cumsum(tl.load(g + rows), 0)
        total = tl.sum(tl.load(g + rows), 0)
        x = tl.load(q + rows[:, None] * D + d[None])
        y = tl.load(k + rows[:, None] * D + d[None])
        z = tl.load(v + rows[:, None] * W + (n + w)[None])
        scores = tl.where(i[:, None] >= i[None], tl.dot(x, tl.trans(y)) * _exp(c[:, None] - c[None]), 0.0)
        old = tl.dot(x, state.to(x.dtype)) * _exp(c)[:, None]
        out = tl.dot(scores.to(z.dtype), z, old)
        tl.store(o + rows[:, None] * W + (n + w)[None], out.to(z.dtype))
        late = (z * _exp(total - c)[:, None]).to(z.dtype)
        state = tl.dot(tl.trans(y), late, state * _exp(total))


@triton.autotune([triton.Config(dict(N=n), num_warps=warps, num_stages=1) for n, warps in ((32, 4), (64, 4), (64, 8))],
                 key=["T"])
@triton.jit
def _gated(q, k, v, g, o, T, D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    n, h = tl.program_id(0) * N, tl.program_id(1).to(tl.int64)
    i, d, w = tl.arange(0, C), tl.arange(0, D), tl.arange(0, N)
    state = tl.zeros((D, N), tl.float32)
    for t in range(0, T, C):
        rows = h * T + t + i
        decays = tl.load(g + rows[:, None] * D + d[None])
        c = tl.dot((i[:, None] >= i[None]).to(decays.dtype), decays)             # in float32, as flash-linear-attention adds
        total = tl.sum(decays.to(tl.float32), 0)
        middle = c - 0.5 * total[None]
        x = tl.load(q + rows[:, None] * D + d[None])
        y = tl.load(k + rows[:, None] * D + d[None])
        z = tl.load(v + rows[:, None] * W + (n + w)[None])
        scores = tl.dot((x * _exp(middle)).to(x.dtype), tl.trans((y * _exp(-middle)).to(x.dtype)))
        scores = tl.where(i[:, None] >= i[None], scores, 0.0)
        old = tl.dot((x * _exp(c)).to(x.dtype), state.to(x.dtype))
        tl.store(o + rows[:, None] * W + (n + w)[None], tl.dot(scores.to(z.dtype), z, old).to(z.dtype))
        late = (y * _exp(total[None] - c)).to(z.dtype)
        state = tl.dot(tl.trans(late), z, state * _exp(total)[:, None])


@triton.autotune(CONFIGS, key=["T"])
@triton.jit
def _state_space(x, dt, a, b, c, d, y, T, GROUP: tl.constexpr, D: tl.constexpr, W: tl.constexpr,  # type: ignore[no-untyped-def]
                 C: tl.constexpr, N: tl.constexpr):
    n, h = tl.program_id(0) * N, tl.program_id(1).to(tl.int64)
    i, e, w = tl.arange(0, C), tl.arange(0, D), tl.arange(0, N)
    state, rate, skip = tl.zeros((D, N), tl.float32), tl.load(a + h), tl.load(d + h)
    for t in range(0, T, C):
        rows, shared = h * T + t + i, h // GROUP * T + t + i
        size = tl.load(dt + rows)
        s, total = tl.cumsum(rate * size, 0), tl.sum(rate * size, 0)
        q = tl.load(c + shared[:, None] * D + e[None])
        k = tl.load(b + shared[:, None] * D + e[None])
        v = tl.load(x + rows[:, None] * W + (n + w)[None])
        scores = tl.dot(q, tl.trans(k)) * _exp(s[:, None] - s[None]) * size[None]
        scores = tl.where(i[:, None] >= i[None], scores, 0.0)
        old = tl.dot(q, state.to(q.dtype)) * _exp(s)[:, None] + skip * v
        tl.store(y + rows[:, None] * W + (n + w)[None], tl.dot(scores.to(v.dtype), v, old).to(v.dtype))
        late = (v * (size * _exp(total - s))[:, None]).to(v.dtype)
        state = tl.dot(tl.trans(k), late, state * _exp(total))


@triton.autotune([triton.Config({}, num_warps=warps, num_stages=1) for warps in (2, 4, 8)], key=["T"])
@triton.jit
def _delta_updates(k, v, beta, g, w, u, T, D: tl.constexpr, W: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * C
    i, d, e = tl.arange(0, C), tl.arange(0, D), tl.arange(0, W)
    rows = first + i
    c, size = tl.cumsum(tl.load(g + rows), 0), tl.load(beta + rows)
    y = tl.load(k + rows[:, None] * D + d[None])
    lower = tl.where(i[:, None] > i[None], -size[:, None] * tl.dot(y, tl.trans(y)) * _exp(c[:, None] - c[None]), 0.0)
    for n in range(1, C):
        row = tl.sum(tl.where((i == n)[:, None], lower, 0.0), 0)
        row += tl.sum(row[:, None] * lower, 0) * (i < n)
        lower = tl.where((i == n)[:, None], row[None], lower)
    solved = (lower + (i[:, None] == i[None])).to(y.dtype)
    tl.store(w + rows[:, None] * D + d[None], tl.dot(solved, (y * (size * _exp(c))[:, None]).to(y.dtype)).to(y.dtype))
    z = tl.load(v + rows[:, None] * W + e[None])
    tl.store(u + rows[:, None] * W + e[None], tl.dot(solved, (z * size[:, None]).to(z.dtype)).to(z.dtype))


@triton.autotune(CONFIGS, key=["T"])
@triton.jit
def _delta_states(q, k, w, u, g, o, T, D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    n, h = tl.program_id(0) * N, tl.program_id(1).to(tl.int64)
    i, d, e = tl.arange(0, C), tl.arange(0, D), tl.arange(0, N)
    state = tl.zeros((D, N), tl.float32)
    for t in range(0, T, C):
        rows = h * T + t + i
        c, total = tl.cumsum(tl.load(g + rows), 0), tl.sum(tl.load(g + rows), 0)
        x = tl.load(q + rows[:, None] * D + d[None])
        y = tl.load(k + rows[:, None] * D + d[None])
        past = state.to(x.dtype)
        new = tl.load(u + rows[:, None] * W + (n + e)[None]) - tl.dot(tl.load(w + rows[:, None] * D + d[None]), past)
        scores = tl.where(i[:, None] >= i[None], tl.dot(x, tl.trans(y)) * _exp(c[:, None] - c[None]), 0.0)
        old = tl.dot(x, past) * _exp(c)[:, None]
        tl.store(o + rows[:, None] * W + (n + e)[None], tl.dot(scores.to(x.dtype), new.to(x.dtype), old).to(x.dtype))
        state = tl.dot(tl.trans(y), (new * _exp(total - c)[:, None]).to(x.dtype), state * _exp(total))


def call(work: str, x: dict[str, Any], out: Any, group: int) -> Callable[[], Any]:
    heads, rows, width = out.shape

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return width // meta["N"], heads

    if work in ("linear attention", "gated linear attention"):
        kernel = _linear if work == "linear attention" else _gated
        return lambda: kernel[grid](*x.values(), out, rows, x["q"].shape[2], width, 64)
    if work == "state space":
        return lambda: _state_space[grid](*x.values(), out, rows, group, x["b"].shape[2], width, 64)
    w, u = torch.empty_like(x["k"]), torch.empty_like(x["v"])

    def both() -> None:
        _delta_updates[heads * rows // 64,](x["k"], x["v"], x["beta"], x["g"], w, u, rows, x["k"].shape[2], width, 64)
        _delta_states[grid](x["q"], x["k"], w, u, x["g"], out, rows, x["k"].shape[2], width, 64)

    return both
