"""Attention in float64, and what its tests share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from gemmkit.functions import attention, mlp
from gemmkit.plans.launch import Cache, KnownCalls
from gemmkit.programs import Mapping, mapping
from gemmkit.programs.calls import plan_of_call
from gemmkit.runtime.device import H100, assumed
from tests.support.machines import epsilon

MULTISTAGE = Mapping(kernel="multistage")
Rule = Callable[..., Any]              # of arrays m, n, and numbers head, batch


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None, visible: Rule | None = None,
              score: Rule | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The result, the logarithms of the sums, and the weights times |v|, of (batch, heads, rows, head size). Heads and batch of k and
    v are shared; a query that sees nothing has 0 and -inf. ``visible(m, n, head, batch)`` and ``score(s, m, n, head, batch)`` take
    arrays of places."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    k, v = (np.broadcast_to(np.repeat(x, q.shape[1] // x.shape[1], 1), (q.shape[0], q.shape[1], *x.shape[2:])) for x in (k, v))
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = np.einsum("bhmd,bhnd->bhmn", q, k) * scale
    m, n = np.arange(s.shape[2])[:, None], np.arange(s.shape[3])[None]
    for batch in range(s.shape[0]):
        for head in range(s.shape[1]):
            if score is not None:
                s[batch, head] = score(s[batch, head], m, n, head, batch)
            if visible is not None:
                s[batch, head] = np.where(visible(m, n, head, batch), s[batch, head], -np.inf)
    with np.errstate(all="ignore"):
        largest = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(np.isneginf(largest), 0, largest))
        total = p.sum(-1, keepdims=True)
        lse = (np.log(total) + np.where(np.isneginf(largest), 0, largest))[..., 0]
        p = np.where(total == 0, 0, p / total)
    return np.einsum("bhmn,bhnd->bhmd", p, v), lse, np.einsum("bhmn,bhnd->bhmd", p, np.abs(v))


def reference_gradients(q: np.ndarray, k: np.ndarray, v: np.ndarray, grad: np.ndarray, of_lse: np.ndarray | None = None,
                        scale: float | None = None, visible: Rule | None = None, score: Rule | None = None,
                        slope: Rule | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
    """The gradients of q, k and v in float64, from those of the result and of the logarithms, each with what it may be wrong by:
    the rounding of the result, of the weights and of the scores' gradients to q's dtype. Arguments as of `reference`;
    ``slope(s, m, n, head, batch)`` is the score's derivative."""
    scale, unit = 1 / math.sqrt(q.shape[-1]) if scale is None else scale, 2 * epsilon(q.dtype)
    batch, heads = q.shape[:2]
    keys, values = (np.broadcast_to(np.repeat(x, heads // x.shape[1], 1), (batch, heads, *x.shape[2:])).astype(np.float64)
                    for x in (k, v))
    rows, grad = q.astype(np.float64), grad.astype(np.float64)
    s = rows @ keys.swapaxes(2, 3) * scale
    m, n = np.arange(s.shape[2])[:, None], np.arange(s.shape[3])[None]
    t, slopes = s.copy(), np.ones_like(s)
    for b, h in np.ndindex(batch, heads):
        if score is not None:
            t[b, h] = score(s[b, h], m, n, h, b)
        if slope is not None:
            slopes[b, h] = slope(s[b, h], m, n, h, b)
        if visible is not None:
            t[b, h] = np.where(visible(m, n, h, b), t[b, h], -np.inf)
    largest = np.max(t, axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(t - np.where(np.isneginf(largest), 0, largest))
    total = p.sum(-1, keepdims=True)
    p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    out = p @ values
    change = grad @ values.swapaxes(2, 3) - (grad * out).sum(-1, keepdims=True)
    change += 0.0 if of_lse is None else of_lse.astype(np.float64)[..., None]
    ds = p * change * slopes * scale
    of_out = (np.abs(grad) * (p @ np.abs(values))).sum(-1, keepdims=True)              # the weights were rounded for it
    wrong = unit * (np.abs(ds) + p * of_out * np.abs(slopes * scale))

    def summed(x: np.ndarray, like: np.ndarray) -> np.ndarray:
        x = x.reshape(batch, like.shape[1], heads // like.shape[1], *x.shape[2:]).sum(2)
        return x if like.shape[0] == batch else x.sum(0, keepdims=True)

    found = [(ds @ keys, wrong @ np.abs(keys)),
             *((summed(x, like), summed(bound, like)) for x, bound, like in (
                 (ds.swapaxes(2, 3) @ rows, wrong.swapaxes(2, 3) @ np.abs(rows), k),
                 (p.swapaxes(2, 3) @ grad, unit * (p.swapaxes(2, 3) @ np.abs(grad)), v)))]
    least = 2.0**-23 if q.dtype == np.float16 else 0.0
    return [(x, bound + unit * np.abs(x) + 2e-5 * np.abs(x).max(initial=0.0) + least) for x, bound in found]


def close_gradients(found: list[Any], wanted: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Each is within its bound; None was not asked for."""
    for name, x, (exact, bound) in zip("qkv", found, wanted, strict=True):
        if x is not None:
            assert x.shape == exact.shape and np.isfinite(x.astype(np.float64)).all(), name
            error = np.abs(x.astype(np.float64) - exact)
            assert (error <= bound).all(), f"d{name} is wrong by {(error / bound).max()} of what is allowed"


def by_warps(patch: pytest.MonkeyPatch) -> None:
    """Calls take the kernel of GPUs without wgmma."""
    def planned(program: Any, arguments: dict[str, Any], mapping: Any) -> Any:
        has_products = program in (attention.softmax_attention, mlp.perceptron)
        return plan_of_call(program, arguments, MULTISTAGE if has_products else mapping)

    patch.setattr(attention, "plan_of_call", planned)
    patch.setattr(attention, "_calls", KnownCalls())
    patch.setattr(mlp, "_plans", Cache())


def close(found: np.ndarray, expected: tuple[np.ndarray, ...], lse: np.ndarray | None = None, slack: float = 0.0) -> None:
    """Within the rounding of the weights and of the result; ``slack`` is what scores may be wrong by."""
    out, logarithms, magnitude = expected
    unit = epsilon(found.dtype)
    bound = (unit + 2 * slack) * magnitude + unit * np.abs(out) + 1e-6 + (2**-24 if found.dtype == np.float16 else 0)
    assert found.shape == out.shape and np.array_equal(np.isnan(found.astype(float)), np.isnan(out))
    error = np.abs(found.astype(np.float64) - out)
    assert np.all((error <= bound) | np.isnan(out)), f"wrong by {np.nanmax(error / bound)} of what is allowed"
    if lse is not None:
        assert np.array_equal(np.isneginf(lse), np.isneginf(logarithms))
        seen = ~np.isneginf(logarithms)
        assert np.allclose(lse[seen], logarithms[seen], rtol=1e-5, atol=2e-5 + 2 * slack, equal_nan=True)


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


@contextmanager
def small(monkeypatch: pytest.MonkeyPatch, block_n: int = 32, blocks: int = 2) -> Iterator[None]:
    """Within it an emulated kernel takes few keys at a time, and few blocks compute all tiles: what takes thousands of rows
    otherwise, several blocks of keys and several tiles for a block, takes a hundred."""
    with assumed(dataclasses.replace(H100, sm_count=blocks)), monkeypatch.context() as patch:
        patch.setitem(mapping.KERNELS, mapping.WARP_SPECIALISED,
                      dataclasses.replace(mapping.KERNELS[mapping.WARP_SPECIALISED], lengths=(block_n,)))
        yield


__all__ = ["close", "close_gradients", "draw", "reference", "reference_gradients", "small"]
