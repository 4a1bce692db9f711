"""Drawn calls of attention against NumPy in float64: 25 kernels with 20 calls each on a GPU, some in the emulator.

What makes a kernel (head size, dtype, mask, score, what is returned, packed or not) is drawn once for a test; shapes, strides, scales
and run-time numbers for each of its calls. GEMMKIT_SEED is what all follows from.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels.masks import ALiBi, Causal, Documents, SoftCap, Window
from tests.support.attention import close, draw, reference, small
from tests.support.machines import BF16, on_machines, poison

F16 = np.dtype(np.float16)
pytestmark = pytest.mark.sample(8)
HALF = np.float32(0.5)


def offsets_of(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    return np.array([0, *sorted(rng.integers(0, rows + 1, count - 1)), rows])


def mask_of(kind: str, rng: np.random.Generator, machine: Any, queries: int, keys: int) -> tuple[Any, Any]:
    """A mask, and which keys it shows."""
    shift, left, right = keys - queries, int(rng.integers(0, 300)), int(rng.integers(0, 20))
    of = np.searchsorted(offsets := offsets_of(rng, queries, 4), np.arange(max(queries, keys)), "right")
    found = {
        "none": lambda: (None, None),
        "causal": lambda: (Causal(), lambda m, n, h, b: n <= m + shift),
        "upper left": lambda: (Causal("upper left"), lambda m, n, h, b: n <= m),
        "window": lambda: (Window(left, right), lambda m, n, h, b: (m + shift - left <= n) & (n <= m + shift + right)),
        "documents": lambda: (Documents.of(offsets, machine.array) & Causal("upper left"), lambda m, n, h, b: (of[m] == of[n]) & (n <= m)),
    }
    return found[kind]()


def score_of(kind: str, rng: np.random.Generator, machine: Any, heads: int) -> tuple[Any, Any, float]:
    """A score, what it computes, and what it may be wrong by."""
    slopes, cap = rng.random(heads).astype(np.float32), float(rng.uniform(1, 30))
    held = machine.array(slopes)
    found = {
        "none": lambda: (None, None, 0.0),
        "alibi": lambda: (ALiBi(held), lambda s, m, n, h, b: s - slopes[h] * (m - n), 1e-4),
        "soft cap": lambda: (SoftCap(cap), lambda s, m, n, h, b: cap * np.tanh(s / cap), 3e-3),
        "function": lambda: (lambda s, m, n, head, batch: s * held[head] - HALF * ((m + n + batch) % 5),
                             lambda s, m, n, h, b: s * slopes[h] - 0.5 * ((m + n + b) % 5), 1e-4),
    }
    return found[kind]()


def strided(rng: np.random.Generator, x: np.ndarray, layout: str) -> np.ndarray:
    """(batch, heads, rows, head size) in memory as a layout has it, and perhaps as a part of something larger."""
    x = x if layout == "bhnd" else x.swapaxes(1, 2)
    if rng.integers(2):
        room = np.full((*x.shape[:3], x.shape[3] + 8), np.nan, x.dtype)
        room[..., :x.shape[3]] = x
        return room
    return np.ascontiguousarray(x)


@pytest.mark.sample(25)
@on_machines
@pytest.mark.parametrize("number", range(25))
def test_drawn(machine: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng([int(os.environ.get("GEMMKIT_SEED", "1")), number])
    head_dim, dtype = [32, 64, 96, 128, 192, 256][number % 6], (F16, BF16)[int(rng.integers(2))]
    mask, score = (str(rng.choice(kinds)) for kinds in (["none", "causal", "upper left", "window", "documents"],
                                                        ["none", "none", "alibi", "soft cap", "function"]))
    layout, returns = str(rng.choice(["bhnd", "bnhd"])), bool(rng.integers(2))
    context = small(monkeypatch) if machine.emulated else contextlib.nullcontext()
    with context, machine.session():
        for _ in range(1 if machine.emulated else 20):
            most = 70 if machine.emulated else 600
            batch, share, kv_heads, queries = (int(rng.integers(1, n)) for n in (3, 3, 3, most))
            keys = queries if mask == "documents" else int(rng.integers(1, most))
            q = draw(rng, (batch, share * kv_heads, queries, head_dim), dtype)
            k, v = (draw(rng, (batch if rng.integers(2) else 1, kv_heads, keys, head_dim), dtype) for _ in range(2))
            rule, visible = mask_of(mask, rng, machine, queries, keys)
            change, computed, slack = score_of(score, rng, machine, q.shape[1])
            scale = None if rng.integers(2) else float(rng.uniform(0.01, 0.2))
            given = [machine.array(strided(rng, x, layout))[..., :head_dim] for x in (q, k, v)]
            out = machine.array(poison(given[0].shape, dtype))
            found = gk.attention(*given, mask=rule, score=change, scale=scale, layout=layout, out=out, return_lse=returns)
            lse = machine.numpy(found[1]) if returns else None
            result = machine.numpy(out) if layout == "bhnd" else machine.numpy(out).swapaxes(1, 2)
            close(result, reference(q, k, v, scale, visible, computed), lse, slack)
