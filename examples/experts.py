"""A layer of a mixture of experts, in two kernels that multiply (docs/programs.md): `python -m examples.experts`.

Each token goes to the two experts for which a router has the highest scores, and gets the sum of what they make of it:

    y = sum over its experts e of  weight_e  (silu(x Gate_e) * (x Up_e)) Down_e

| step | by |
|---|---|
| scores, the two experts, their weights (a softmax of the two) | the array library |
| which tokens each expert has, and where they begin | the array library; the sizes stay on the GPU |
| h = silu(x Gate) * (x Up), of each expert's tokens, where they lie in x | `gated`, one kernel |
| d = weight (h Down), to the token's place for this expert | `weighted`, one kernel |
| the sum of each token's two results | the array library |

The kernels want a GPU of compute capability 9.0. The layer is compared with one token after the other in float64.

`python -m examples.experts --train 20` trains two layers of PyTorch's tensors to do what a third one does: one is
`gk.torch.experts`, which is these kernels with gradients, the other PyTorch's own products, expert by expert. They begin
with the same weights, and their losses must agree at every step.
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
def gated(x: Any, gate: Any, up: Any, token: Any, offsets: Any, h: Any) -> None:
    rows = gp.packed(h.rows, offsets)
    for e, m, n in gp.parallel(rows.count, rows.rows, gate.columns):
        g, u = gp.zeros(m, n), gp.zeros(m, n)
        for k in gp.sequential(x.columns):
            g += x[token[m], k] @ gate[e, k, n]
            u += x[token[m], k] @ up[e, k, n]
        h[m, n] = g / (1.0 + gp.exp(-g)) * u


@gk.program
def weighted(h: Any, down: Any, to: Any, offsets: Any, weight: Any, d: Any) -> None:
    rows = gp.packed(h.rows, offsets)
    for e, m, n in gp.parallel(rows.count, rows.rows, down.columns):
        out = gp.zeros(m, n)
        for k in gp.sequential(h.columns):
            out += h[m, k] @ down[e, k, n]
        d[to[m], n] = out * weight[m]


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
    weight = weights.ravel()[order].astype(np.float32)
    h = xp.empty((len(order), layer.gate.shape[2]), np.float16)
    d = xp.empty((len(order), x.shape[1]), np.float16)
    gated(x, layer.gate, layer.up, order // CHOSEN, offsets, h)
    weighted(h, layer.down, order, offsets, weight, d)
    return d.reshape(len(x), CHOSEN, -1).astype(np.float32).sum(axis=1)


def reference(layer: Layer, x: np.ndarray) -> np.ndarray:
    """Token by token, in float64."""
    out = np.zeros(x.shape)
    for n, (token, chosen, weights) in enumerate(zip(x.astype(np.float64), *route(np, x, layer.router))):
        for expert, weight in zip(chosen, weights):
            g = token @ layer.gate[expert]
            out[n] += weight * (g / (1.0 + np.exp(-g)) * (token @ layer.up[expert]) @ layer.down[expert])
    return out


# -- two layers that learn, by PyTorch --------------------------------------------------------------------

RATE, WANTED_LOSS = 0.5, 0.02          # of a step; by how much of itself a loss may differ from PyTorch's


def by_experts(x: Any, chosen: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
    return importlib.import_module("gemmkit.torch").experts(x, chosen, weights, gate, up, down)


def one_by_one(x: Any, chosen: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
    """PyTorch's products, expert by expert; the host waits for the number of each one's tokens."""
    torch = importlib.import_module("torch")
    y = torch.zeros_like(x, dtype=torch.float32)
    for e in range(gate.shape[0]):
        token, choice = (chosen == e).nonzero(as_tuple=True)
        own = x[token]
        found = (torch.nn.functional.silu(own @ gate[e]) * (own @ up[e])) @ down[e]
        y = y.index_add(0, token, weights[token, choice][:, None] * found)
    return y.to(x.dtype)


def made_of(x: Any, layer: Any, router: Any, *experts: Any) -> Any:
    best = (x @ router).float().topk(CHOSEN)
    return layer(x, best.indices, best.values.softmax(1), *experts)


def train(steps: int, emulate: bool | None = None, tokens: int | None = None) -> bool:
    torch = importlib.import_module("torch")
    where = machine.find(emulate)
    device = "cpu" if where.emulated else "cuda"
    tokens = tokens or (24 if where.emulated else 4096)
    experts, width, hidden = (3, 16, 24) if where.emulated else (64, 1024, 512)
    rng = np.random.default_rng(0)

    def moved(x: np.ndarray, dtype: Any) -> Any:
        return torch.from_numpy(x).to(device, dtype)

    teacher, first = ([getattr(layer, name) for name in Layer.__dataclass_fields__]
                      for layer in (drawn(rng, experts, width, hidden), drawn(rng, experts, width, hidden)))
    students = {layer: [moved(w, torch.float32).requires_grad_() for w in first] for layer in (by_experts, one_by_one)}
    agree, began = True, 0.0
    x = moved(rng.standard_normal((tokens, width)), torch.float16)
    wanted = made_of(x, one_by_one, *(moved(w, torch.float16) for w in teacher))
    with where.session():
        for step in range(steps):
            losses = []
            for layer, weights in students.items():
                loss = (made_of(x, layer, *(w.half() for w in weights)) - wanted).float().square().mean()
                for w, slope in zip(weights, torch.autograd.grad(loss, weights)):
                    w.data -= RATE * slope
                losses.append(loss.item())
            ours, peer = losses
            agree, began = agree and abs(ours - peer) <= WANTED_LOSS * peer, began or ours
            print(f"  step {step + 1} of {steps}: loss {ours:.4f} by gk.torch.experts, {peer:.4f} by PyTorch")
    return agree and ours <= began


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
    parser.add_argument("--tokens", type=int, help="how many tokens (default: 4096; 90, or of training 24, in the emulator)")
    parser.add_argument("--train", type=int, metavar="STEPS", help="train two layers for so many steps; wants PyTorch")
    options = parser.parse_args(arguments)
    if options.train:
        return 0 if train(options.train, options.emulate, options.tokens) else 1
    return 0 if main(options.emulate, options.tokens) else 1


if __name__ == "__main__":
    raise SystemExit(command())
