"""A layer of a mixture of experts, in two kernels (docs/programs.md): `python -m examples.experts`.

Each token goes to the two experts for which a router has the highest scores, and gets the sum of what they make of it:

    y = sum over its experts e of  weight_e  (silu(x Gate_e) * (x Up_e)) Down_e

| step | by |
|---|---|
| scores, the two experts, their weights (a softmax of the two) | the array library |
| tokens sorted by expert, and where each expert's begin | the array library; the sizes stay on the GPU |
| h = silu(x Gate) * (x Up), of each expert's tokens | `gated`, one kernel |
| d = weight (h Down) | `weighted`, one kernel |
| the sum of each token's two results | the array library |

The kernels want a GPU of compute capability 9.0. The layer is compared with one token after the other in float64.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import gemmkit as gk
from examples import machine
from gemmkit import programs as gp

CHOSEN = 2                             # experts of a token
WANTED_ERROR = 3e-3                    # of the largest element: what float16 operands and results cost


@gk.program
def gated(x: Any, gate: Any, up: Any, offsets: Any, h: Any) -> None:
    rows = gp.packed(x.rows, offsets)
    for e, m, n in gp.parallel(rows.count, rows.rows, gate.columns):
        g, u = gp.zeros(m, n), gp.zeros(m, n)
        for k in gp.sequential(x.columns):
            g += x[m, k] @ gate[e, k, n]
            u += x[m, k] @ up[e, k, n]
        h[m, n] = g / (1.0 + gp.exp(-g)) * u


@gk.program
def weighted(h: Any, down: Any, offsets: Any, weight: Any, d: Any) -> None:
    rows = gp.packed(h.rows, offsets)
    for e, m, n in gp.parallel(rows.count, rows.rows, down.columns):
        out = gp.zeros(m, n)
        for k in gp.sequential(h.columns):
            out += h[m, k] @ down[e, k, n]
        d[m, n] = out * weight[m]


@dataclass(frozen=True)
class Layer:
    """(width, experts), twice (experts, width, hidden), and (experts, hidden, width)."""

    router: Any
    gate: Any
    up: Any
    down: Any


def drawn(rng: np.random.Generator, experts: int, width: int, hidden: int) -> Layer:
    def half(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float16)

    gate, up = (half(experts, width, hidden) for _ in range(2))
    return Layer(half(width, experts), gate, up, half(experts, hidden, width))


def route(xp: Any, x: Any, router: Any) -> tuple[Any, Any]:
    """Of each token its experts and their weights: (tokens, 2) each."""
    scores = x.astype(np.float32) @ router.astype(np.float32)
    chosen = xp.argsort(-scores, axis=1)[:, :CHOSEN]
    powers = xp.exp(xp.take_along_axis(scores, chosen, axis=1) - scores.max(axis=1, keepdims=True))
    return chosen, powers / powers.sum(axis=1, keepdims=True)


def forward(xp: Any, layer: Layer, x: Any) -> Any:
    """(tokens, width) of (tokens, width), by the two kernels."""
    chosen, weights = route(xp, x, layer.router)
    order = xp.argsort(chosen.ravel(), kind="stable")                  # token order // 2 is the expert's next
    offsets = xp.searchsorted(chosen.ravel()[order], xp.arange(layer.router.shape[1] + 1)).astype(np.int32)
    tokens, weight = x[order // CHOSEN], weights.ravel()[order].astype(np.float32)
    h = xp.empty((len(order), layer.gate.shape[2]), np.float16)
    d = xp.empty_like(tokens)
    gated(tokens, layer.gate, layer.up, offsets, h)
    weighted(h, layer.down, offsets, weight, d)
    back = xp.argsort(order)
    return d[back].reshape(len(x), CHOSEN, -1).astype(np.float32).sum(axis=1)


def reference(layer: Layer, x: np.ndarray) -> np.ndarray:
    """Token by token, in float64."""
    out = np.zeros(x.shape)
    for n, (token, chosen, weights) in enumerate(zip(x.astype(np.float64), *route(np, x, layer.router))):
        for expert, weight in zip(chosen, weights):
            g = token @ layer.gate[expert]
            out[n] += weight * (g / (1.0 + np.exp(-g)) * (token @ layer.up[expert]) @ layer.down[expert])
    return out


def main(emulate: bool | None = None, tokens: int | None = None) -> bool:
    where = machine.find(emulate)
    if where.library not in ("cupy", "numpy"):
        print("A layer of experts wants CuPy on a GPU; python -m examples.experts --emulate needs none")
        return True
    xp = importlib.import_module(where.library)
    tokens = tokens or (90 if where.emulated else 4096)
    experts, width, hidden = (5, 64, 96) if where.emulated else (64, 1024, 512)
    rng = np.random.default_rng(0)
    layer, x = drawn(rng, experts, width, hidden), rng.standard_normal((tokens, width)).astype(np.float16)
    moved = Layer(*(where.to_device(getattr(layer, name)) for name in Layer.__dataclass_fields__))
    with where.session():
        found = where.to_host(forward(xp, moved, where.to_device(x)))
    wanted = reference(layer, x)
    error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    print(f"{tokens} tokens, each to {CHOSEN} of {experts} experts, {where}")
    print(f"  error {error:.1e}, against NumPy in float64 (wanted: at most {WANTED_ERROR})")
    return error <= WANTED_ERROR


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.experts", description="A layer of a mixture of experts.")
    parser.add_argument("--emulate", action="store_true", default=None, help="use the emulator, GPU or not")
    parser.add_argument("--tokens", type=int, help="how many tokens (default: 4096; 90 in the emulator)")
    options = parser.parse_args(arguments)
    return 0 if main(options.emulate, options.tokens) else 1


if __name__ == "__main__":
    raise SystemExit(command())
