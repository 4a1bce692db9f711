"""Linear attention with decay, Mamba-2's state space duality, and the gated delta rule, in blocks of rows.

The kernels go through the rows in blocks of 64. Between blocks a state of ``k.columns x v.columns`` numbers carries on, in
float32. Decays are natural logarithms, of which differences are taken before an exponential, so that long ranges underflow
to 0 and nothing overflows.

    python -m examples.recurrences
"""


from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit import programs as gp


def until(i: Any, j: Any) -> Any:
    return j <= i


def before(i: Any, j: Any) -> Any:
    return j < i


@gk.program
def linear_attention(q: Any, k: Any, v: Any, g: Any, o: Any) -> None:
    """o_t = q_t S_t with S_t = exp(g_t) S_(t-1) + k_t^T v_t, for each head: retention if g is a head's constant.

    q, k: (heads, rows, key width), v, o: (heads, rows, width), g: (heads, rows) logarithms of decays.
    """
    for h, n in gp.parallel(q.count, v.columns):
        state = gp.zeros(k.columns, n)
        for t in gp.sequential(q.rows):
            c, total = gp.cumsum(g[h, t]), g[h, t].sum(axis=0)
            scores = gp.where(until, (q[h, t] @ k[h, t].T) * gp.exp(c - c.T), 0.0)
            old = (q[h, t] @ state.astype(q.dtype)) * gp.exp(c)
            o[h, t, n] = old + scores.astype(v.dtype) @ v[h, t, n]
            late = v[h, t, n] * gp.exp(total - c)
            state[:] = state * gp.exp(total) + k[h, t].T @ late.astype(v.dtype)


@gk.program
def gated_linear_attention(q: Any, k: Any, v: Any, g: Any, o: Any) -> None:
    """o_t = q_t S_t with S_t = diag(exp(g_t)) S_(t-1) + k_t^T v_t: each key decays by itself (GLA).

    q, k, g: (heads, rows, key width), v, o: (heads, rows, width). g are logarithms of decays, at most 0.

    Rows of different halves of a block meet with factors of at most 1, and those of one half with decays on both sides of
    its middle. In float16 half a block may decay by exp(-18), and in bfloat16 by exp(-170): further rows overflow to NaN.
    """
    for h, n in gp.parallel(q.count, v.columns):
        state = gp.zeros(k.columns, n)
        for t in gp.sequential(q.rows):
            until_row, behind = gp.cumsum(g[h, t], parts=2), gp.cumsum(g[h, t], parts=2, after=True)
            middle = 0.5 * (until_row - behind)
            near = (q[h, t] * gp.exp(middle)).astype(q.dtype) @ (k[h, t] * gp.exp(-middle)).astype(q.dtype).T
            far = (q[h, t] * gp.exp(until_row)).astype(q.dtype) @ (k[h, t] * gp.exp(behind)).astype(q.dtype).T
            scores = gp.where(until, far + gp.block_diagonal(near - far, parts=2), 0.0)
            old = (q[h, t] * gp.exp(gp.cumsum(g[h, t]))).astype(q.dtype) @ state.astype(q.dtype)
            o[h, t, n] = scores.astype(v.dtype) @ v[h, t, n] + old
            late = (k[h, t] * gp.exp(gp.cumsum(g[h, t], after=True))).astype(v.dtype)
            state[:] = state * gp.exp(g[h, t].sum(axis=0)) + late.T @ v[h, t, n]


@gk.program
def state_space(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, y: Any, group: int) -> None:
    """Mamba-2: s_t = exp(dt_t a) s_(t-1) + dt_t b_t^T x_t, y_t = c_t s_t + d x_t, in the form of state space duality.

    x, y: (heads, rows, width), dt: (heads, rows), a, d: (heads,), b, c: (heads / group, rows, state width).
    """
    for h, n in gp.parallel(x.count, x.columns):
        state = gp.zeros(b.columns, n)
        for t in gp.sequential(x.rows):
            steps = a[h] * dt[h, t]
            s, total = gp.cumsum(steps), steps.sum(axis=0)
            scores = (c[h // group, t] @ b[h // group, t].T) * gp.exp(s - s.T) * dt[h, t].T
            scores = gp.where(until, scores, 0.0)
            old = (c[h // group, t] @ state.astype(x.dtype)) * gp.exp(s)
            y[h, t, n] = old + scores.astype(x.dtype) @ x[h, t, n] + d[h] * x[h, t, n]
            late = x[h, t, n] * (dt[h, t] * gp.exp(total - s))
            state[:] = state * gp.exp(total) + b[h // group, t].T @ late.astype(x.dtype)


@gk.program
def delta_updates(k: Any, v: Any, beta: Any, g: Any, w: Any, u: Any) -> None:
    """Of each block of 64 rows what it writes into a state of zeros, u, and what it takes out of the state before, w S.

    k, w: (heads, blocks, 64, key width), v, u: (heads, blocks, 64, width), beta, g: (heads, blocks, 64).
    """
    for h, i in gp.parallel(*k.counts):
        for t in gp.sequential(k.rows):
            c, size = gp.cumsum(g[h, i, t]), beta[h, i, t]
            overlaps = size * (k[h, i, t] @ k[h, i, t].T) * gp.exp(c - c.T)
            solved = gp.unit_lower_inverse(gp.where(before, overlaps, 0.0)).astype(k.dtype)
            w[h, i, t] = solved @ (k[h, i, t] * (size * gp.exp(c))).astype(k.dtype)
            u[h, i, t] = solved @ (v[h, i, t] * size).astype(v.dtype)


@gk.program
def delta_states(q: Any, k: Any, w: Any, u: Any, g: Any, o: Any) -> None:
    """The gated delta rule: S_t = exp(g_t) (I - beta_t k_t^T k_t) S_(t-1) + beta_t k_t^T v_t, o_t = q_t S_t.

    q, k, w: (heads, rows, key width), u, o: (heads, rows, width), g: (heads, rows). w and u are of `delta_updates`.
    """
    for h, n in gp.parallel(q.count, u.columns):
        state = gp.zeros(k.columns, n)
        for t in gp.sequential(q.rows):
            c, total = gp.cumsum(g[h, t]), g[h, t].sum(axis=0)
            past = state.astype(q.dtype)
            new = u[h, t, n] - w[h, t] @ past
            scores = gp.where(until, (q[h, t] @ k[h, t].T) * gp.exp(c - c.T), 0.0)
            o[h, t, n] = (q[h, t] @ past) * gp.exp(c) + scores.astype(u.dtype) @ new.astype(u.dtype)
            state[:] = state * gp.exp(total) + k[h, t].T @ (new * gp.exp(total - c)).astype(u.dtype)


def gated_delta_rule(q: Any, k: Any, v: Any, beta: Any, g: Any, w: Any, u: Any, o: Any) -> None:
    """``w`` and ``u`` are of k's and v's shapes, and receive what `delta_updates` makes. Rows are a multiple of 64."""
    blocks = q.shape[1] // 64
    delta_updates(*(x.reshape(x.shape[0], blocks, 64, *x.shape[2:]) for x in (k, v, beta, g, w, u)))
    delta_states(q, k, w, u, g, o, mapping=gk.Mapping({"t": 64}))


def main() -> None:
    """Linear attention of 200 rows on the CPU machine, beside float64."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 200, 64)).astype(np.float16) for _ in range(3))
    g, o = -rng.uniform(0.0, 0.1, (1, 200)).astype(np.float32), np.empty((1, 200, 64), np.float16)
    with gk.emulate():
        linear_attention(q, k, v, g, o)
    wanted = linear_attention.reference(q, k, v, g, o)
    print(f"largest error {np.abs(o - wanted).max() / np.abs(wanted).max():.1e} of the largest element")


if __name__ == "__main__":
    main()
