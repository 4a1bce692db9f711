"""Programs whose rounds compute with what they multiply, which tests derive kernels of and compare with NumPy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit import programs as gp
from tests.support import programs as listing


def check_close(results: list[Any], wanted: Any, most: Callable[[Any], float]) -> None:
    """Every result is the reference's: NaN where it is, and else to ``most(result)`` of the largest element."""
    for got, exact in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        shown = np.isfinite(exact)
        assert np.array_equal(np.isnan(got), np.isnan(exact))
        largest = max(1.0, np.abs(exact[shown]).max(initial=0.0))
        assert np.abs(got[shown].astype(float) - exact[shown]).max(initial=0.0) <= most(got) * largest


def check_infinite(results: list[Any], wanted: Any) -> None:
    """They are infinite where the reference is, and as it is."""
    for got, exact in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert np.array_equal(got[np.isinf(exact)], exact[np.isinf(exact)])


def computed(program: gp.Program, given: Sequence[Any], mapping: gk.Mapping | None, seed: int | None = None,
             **components: Any) -> tuple[Any, list[Any], Any]:
    """The plan of a program, its results in the emulator, and what they have to be."""
    plan = program.plan(*given, mapping=mapping, **components)
    wanted, arguments = program.reference(*given, **components), program.bound(tuple(given), components)
    with gk.emulate(seed):
        plan.run(arguments)
    return plan, [arguments[name] for name in arguments if name in plan.results], wanted


def check(program: gp.Program, arrays: list[np.ndarray], mapping: gk.Mapping, seed: int | None = None, **components: Any) -> Any:
    """The plan of a program, all of whose results in the emulator are the reference's: to rounding, NaN and infinite where it is."""
    plan, results, wanted = computed(program, arrays, mapping, seed, **components)
    check_close(results, wanted, lambda got: 2e-2 if components.get("score") else 3e-3)
    check_infinite(results, wanted)
    return plan


@gk.program
def summed(x: Any, w: Any, y: Any) -> None:
    """Rounds that only add: one operand is all layers'."""
    for m in gp.parallel(x.rows):
        out = gp.zeros(m, w.columns)
        for layer in gp.sequential(w.count):
            out += x[m] @ w[layer]
        y[m] = out


@gk.program
def decayed(q: Any, k: Any, v: Any, decay: Any, bias: Any, o: Any, lse: Any, scale: float) -> None:
    """Attention whose scores fall with the distance, by a factor for each head, on top of a bias; and its logarithms."""
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = scale * (q[h, m] @ k[h, n].T) - decay[h] * (gp.place(m) - gp.place(n)) + bias[m, n]
            s = gp.where(lambda i, j: j <= i, s, -math.inf)
            top = gp.maximum(best, s.max(axis=1))
            p, shrink = gp.exp(s - top), gp.exp(best - top)
            total[:] = total * shrink + p.sum(axis=1)
            out[:] = out * shrink + p.astype(v.dtype) @ v[h, n]
            best[:] = top
        o[h, m] = out / total
        lse[h, m] = best + gp.log(total)


@gk.program
def bounded(q: Any, k: Any, v: Any, lengths: Any, o: Any, lse: Any, scale: float, visible: Any = None) -> None:
    """Attention to as many places as each of a stack has, and its logarithms."""
    for h, m in gp.parallel(q.count, q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows, stop=lengths[h]):
            s = scale * (q[h, m] @ k[h, n].T)
            s = s if visible is None else gp.where(visible, s, -math.inf)
            top = gp.maximum(best, s.max(axis=1))
            zero = gp.finite(top)
            p, shrink = gp.exp(s - zero), gp.exp(best - zero)
            total[:] = total * shrink + p.sum(axis=1)
            out[:] = out * shrink + p.astype(v.dtype) @ v[h, n]
            best[:] = top
        o[h, m] = out / total
        lse[h, m] = best + gp.log(total)


@gk.program
def bounded_weights(q: Any, k: Any, v: Any, lengths: Any, o: Any, total: Any, scale: float) -> None:
    """The same before the division, and without a word of rows that have seen nothing: a round without places is NaN."""
    for h, m in gp.parallel(q.count, q.rows):
        best, sums, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows, stop=lengths[h]):
            s = scale * (q[h, m] @ k[h, n].T)
            top = gp.maximum(best, s.max(axis=1))
            p, shrink = gp.exp(s - top), gp.exp(best - top)
            sums[:] = sums * shrink + p.sum(axis=1)
            out[:] = out * shrink + p.astype(v.dtype) @ v[h, n]
            best[:] = top
        o[h, m] = out
        total[h, m] = sums


@gk.program
def bounded_chain(a: Any, b: Any, c: Any, lengths: Any, d: Any) -> None:
    """Sums of what each of a stack has: what is behind a length is no zero, and must not count."""
    for h, m in gp.parallel(a.count, a.rows):
        out = gp.zeros(m, c.columns)
        for n in gp.sequential(b.rows, stop=lengths[h]):
            out += gp.tanh(a[h, m] @ b[h, n].T).astype(a.dtype) @ c[h, n]
        d[h, m] = out


@gk.program
def gated_chain(a: Any, b: Any, gate: Any, c: Any, d: Any) -> None:
    """(gate rows of A B) C: the product between is never stored."""
    for m in gp.parallel(a.rows):
        out = gp.zeros(m, c.columns)
        for n in gp.sequential(b.rows):
            h = gp.tanh(a[m] @ b[n].T) * gate[m]
            out += h.astype(a.dtype) @ c[n]
        d[m] = out


@gk.program
def glu_chain(a: Any, b: Any, c: Any, w: Any, y: Any) -> None:
    """The feed-forward block of a transformer, with a gate."""
    for m in gp.parallel(a.rows):
        out = gp.zeros(m, w.columns)
        for n in gp.sequential(b.rows):
            h = listing.silu_times(a[m] @ b[n].T, a[m] @ c[n].T)
            out += h.astype(a.dtype) @ w[n]
        y[m] = out


@gk.program
def normalised(q: Any, k: Any, v: Any, o: Any) -> None:
    """Attention that is normalised in every round: what follows the product needs its own round, and it cannot run ahead."""
    for m in gp.parallel(q.rows):
        best, total, out = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, v.columns)
        for n in gp.sequential(k.rows):
            s = 0.125 * (q[m] @ k[n].T)
            top = gp.maximum(best, s.max(axis=1))
            p, before = gp.exp(s - top), total * gp.exp(best - top)
            now = before + p.sum(axis=1)
            out[:] = (out * before + p.astype(v.dtype) @ v[n]) / now
            total[:] = now
            best[:] = top
        o[m] = out


@gk.program
def softmax_gemm(a: Any, b: Any, d: Any, largest: Any) -> None:
    """A product whose rows become weights before they are stored."""
    for m in gp.parallel(a.rows):
        acc = gp.zeros(m, b.columns)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k]
        top = acc.max(axis=1)
        p = gp.exp(acc - top)
        d[m] = p / p.sum(axis=1)
        largest[m] = top


def causal(m: Any, n: Any) -> Any:
    return n <= m


def window(m: Any, n: Any) -> Any:
    return (n <= m) & (m - n < 40)


def between(m: Any, n: Any) -> Any:
    """A window that is free at both ends: blocks before it and behind it are not visited, and those within it not tested."""
    return (n - m < 100) & (m - n <= 90)


def stretched(m: Any, n: Any) -> Any:
    """The ends go at paces of their own."""
    return (n < 2 * m + 30) & (m < n + 60)


def odd(m: Any, n: Any) -> Any:
    """No bound of places: every block is visited and tested."""
    return n * n <= m * m + 5


def soft_cap(s: Any) -> Any:
    return 20.0 * gp.tanh(s / 20.0)


def half(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float16)


def empty(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def drawn_case(seed: int) -> tuple[Any, list[np.ndarray], gk.Mapping, dict[str, Any]]:
    """A program with operands, NaN where results belong, and a mapping. Components are by name, numbers among them."""
    rng = np.random.default_rng(seed)

    def pick(*given: Any) -> Any:
        return given[rng.integers(len(given))]

    rows, places, d = int(rng.integers(1, 200)), int(rng.integers(1, 200)), int(pick(64, 64, 128))
    count, groups = int(rng.integers(1, 3)), int(pick(1, 1, 2))
    name = pick("attention", "attention", "attention", "decayed", "gated_chain", "glu_chain", "mlp", "softmax_gemm", "normalised")
    chained = name in ("attention", "decayed", "gated_chain", "glu_chain")
    ahead = pick(None, None, False) if chained else None
    blocks = {} if name in ("mlp", "softmax_gemm") else {"n": int(pick(32, 48, 64))}
    if name == "softmax_gemm":
        blocks = {"k": 64}
    mapping = gk.Mapping(blocks, warpgroups=groups, ahead=ahead, across=pick(None, False) if ahead is None else None,
                         turns=pick(None, True, False) if groups > 1 and name != "softmax_gemm" else None,
                         descending=None if name == "mlp" else pick(None, False), stages=pick(0, 2, 3))
    out = pick(np.float16, np.float32)
    if name == "attention":
        q, k, v = half(rng, count, rows, d), half(rng, count, places, d), half(rng, count, places, d)
        more = dict(scale=float(pick(0.125, 0.125, -0.1)), score=pick(None, None, soft_cap), visible=pick(None, causal, window, odd))
        return listing.attention, [q, k, v, empty(count, rows, d, dtype=out)], mapping, more
    if name == "decayed":
        q, k, v = half(rng, count, rows, d), half(rng, count, places, d), half(rng, count, places, d)
        return decayed, [q, k, v, rng.random(count, np.float32) / 8, half(rng, rows, places), empty(count, rows, d, dtype=out),
                         empty(count, rows, dtype=np.float32)], mapping, dict(scale=0.125)
    if name == "gated_chain":
        return gated_chain, [half(rng, rows, d), half(rng, places, d, scale=0.1), half(rng, rows), half(rng, places, 64),
                             empty(rows, 64, dtype=out)], mapping, {}
    if name == "glu_chain":
        return glu_chain, [half(rng, rows, 64), half(rng, places, 64, scale=0.1), half(rng, places, 64, scale=0.1),
                           half(rng, places, 64), empty(rows, 64, dtype=out)], mapping, {}
    if name == "normalised":
        return normalised, [half(rng, rows, d), half(rng, places, d), half(rng, places, 64), empty(rows, 64, dtype=out)], mapping, {}
    if name == "mlp":
        layers = int(rng.integers(1, 4))
        return listing.mlp, [half(rng, rows, d), half(rng, layers, d, d, scale=d ** -0.5), half(rng, layers, d),
                             empty(rows, d, dtype=out)], mapping, {}
    depth = 8 * int(rng.integers(1, 20))
    return softmax_gemm, [half(rng, rows, depth), half(rng, depth, 64, scale=0.3), empty(rows, 64, dtype=out),
                          empty(rows, dtype=np.float32)], mapping, {}


def padded(x: np.ndarray, lengths: np.ndarray, value: float) -> np.ndarray:
    """Each of the stack with ``value`` behind its length."""
    for each, length in zip(x, lengths):
        each[max(0, int(length)):] = value
    return x


def drawn_lengths(seed: int) -> tuple[Any, list[np.ndarray], gk.Mapping, dict[str, Any]]:
    """The same of programs with lengths: some 0, some less, some more than there is; behind them K has NaN and V what is large."""
    rng = np.random.default_rng(seed)

    def pick(*given: Any) -> Any:
        return given[rng.integers(len(given))]

    count, rows, places = int(rng.integers(1, 5)), int(rng.integers(1, 200)), int(rng.integers(1, 300))
    lengths = np.array([pick(0, -3, 1, places, places + 50, *rng.integers(0, places + 1, 4)) for _ in range(count)],
                       pick(np.int32, np.int64))
    groups, d, out = int(pick(1, 1, 2)), int(pick(64, 64, 128)), pick(np.float16, np.float32)
    ahead = pick(None, None, False)
    mapping = gk.Mapping({"n": int(pick(32, 48, 64))}, warpgroups=groups, ahead=ahead,
                         across=pick(None, False) if ahead is None else None, turns=pick(None, True, False) if groups > 1 else None,
                         descending=pick(None, False), stages=pick(0, 2, 3))
    x, y, z = half(rng, count, rows, d), half(rng, count, places, d), half(rng, count, places, d)
    y, z = padded(y, lengths, np.nan), padded(z, lengths, 6e4)
    o, sums = empty(count, rows, d, dtype=out), empty(count, rows, dtype=np.float32)
    name = pick("bounded", "bounded", "bounded_weights", "bounded_chain")
    if name == "bounded":
        seen = pick(None, causal, window, between, stretched, odd)
        return bounded, [x, y, z, lengths, o, sums], mapping, dict(scale=float(pick(0.125, -0.1)), visible=seen)
    if name == "bounded_weights":
        return bounded_weights, [x, y, z, lengths, o, sums], mapping, dict(scale=0.125)
    return bounded_chain, [x, y / np.float16(8), z, lengths, o], mapping, {}


#: Programs whose rounds are not split, and what they are told.
NO_SHARES = {"decayed": "shows a row nothing", "bounded_weights": "is not what their rounds in a row make of them",
             "mlp": "goes along a stack", "softmax_gemm": "largest: the derived kernel uses this name"}


def drawn_shares(seed: int) -> tuple[Any, list[np.ndarray], gk.Mapping, dict[str, Any]]:
    """A program of either kind whose rounds are split over 2 to 19 blocks; most of them have fewer."""
    program, arrays, mapping, more = (drawn_lengths if seed % 2 else drawn_case)(seed)
    return program, arrays, dataclasses.replace(mapping, splits=(2, 3, 5, 19)[seed // 2 % 4], longest_first=None), more


#: Programs without lazy rescaling, and what they are told.
NOT_LAZY = {"bounded_weights": "results depend on the maximum", "bounded_chain": "no cell of rows keeps a maximum",
            "gated_chain": "no cell of rows", "glu_chain": "no cell of rows", "mlp": "no cell of rows", "softmax_gemm": "no cell of rows",
            "normalised": "no sums of a tile are multiplied by"}


def drawn_lazy(seed: int) -> tuple[Any, list[np.ndarray], gk.Mapping, dict[str, Any]]:
    """The same, lazily, of scores that grow along the keys or fall: maxima grow by little, by much, or not."""
    program, arrays, mapping, more = (drawn_case, drawn_lengths, drawn_shares)[seed % 3](seed // 3)
    if program.function.__name__ in ("attention", "decayed", "bounded", "normalised"):
        keys = arrays[1]
        steps = np.linspace(*((0.1, 4.0), (4.0, 0.1), (1.0, 1.0))[seed // 3 % 3], keys.shape[-2], dtype=np.float16)
        arrays[1] = keys * steps[:, None]
    return program, arrays, dataclasses.replace(mapping, lazy=True), more


def drawn_clusters(seed: int) -> tuple[Any, list[np.ndarray], gk.Mapping, dict[str, Any]]:
    """The same in clusters of two and four blocks."""
    program, arrays, mapping, more = (drawn_case, drawn_lengths, drawn_shares)[seed % 3](seed // 3)
    return program, arrays, dataclasses.replace(mapping, cluster={"m": 2 if seed // 3 % 3 else 4}), more
