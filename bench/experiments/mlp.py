"""Multi-layer perceptrons of width 128 in one launch, against a product of cuBLASLt's for each layer: rows of
`bench.experiments`.

The peer is ``torch._addmm_activation``: bias and ReLU in cuBLASLt's epilogue, one launch a layer. Both are captured in a
CUDA graph. A row's sizes are those of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gemmkit
from bench.experiments.experiment import ITEMSIZES, Experiment, Lib
from bench.harness import Call
from gemmkit.epilogues.activations import relu

SAMPLED_ROWS = 256
SCALE = 0.125  # of normal weights: the root of 2 / 128, which keeps activations of one size


@dataclass(frozen=True)
class Mlp(Experiment):
    """One row; ``work`` says how many layers."""

    @property
    def layers(self) -> int:
        return int(self.work.split()[0])

    @property
    def products(self) -> int:
        return self.layers

    @property
    def tolerance(self) -> float:
        """Each layer's activations are rounded."""
        return 4e-3

    @property
    def input_bytes(self) -> int:
        return (self.m + self.layers * self.n) * self.n * ITEMSIZES[self.kind]

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        m, n, layers = self.m, self.n, self.layers
        weights = lib.scaled(lib.normal(layers * n, n, self.kind, 3 * i + 1), SCALE)
        out, peer_out, other = (lib.empty(m, n, self.kind) for _ in range(3))
        return SimpleNamespace(a=lib.normal(m, n, self.kind, 3 * i), weights=weights.reshape(layers, n, n),
                               biases=lib.normal(layers, n, self.kind, 3 * i + 2), out=out, peer_out=peer_out, other=other)

    def ours(self, lib: Lib, x: Any) -> Call:
        return lambda: gemmkit.mlp(x.a, x.weights, x.biases, relu, last=relu, out=x.out)

    def peers(self, lib: Lib, x: Any) -> Call:
        return lambda: lib.layers(x)

    def title(self, lib: Lib) -> str:
        return str(lib.layers_title())

    def error_of(self, lib: Lib, x: Any, out: Any) -> float:
        some = lib.sample(self.m, min(SAMPLED_ROWS, self.m), 0)
        h = lib.wide(x.a, some)
        for w, b in zip(x.weights, x.biases):
            h = h @ lib.wide(w) + lib.wide(b)
            h = (h + abs(h)) / 2
        return float(lib.relative_error(out[some], h))


def mlp() -> Iterator[Mlp]:
    """All rows of the group."""
    for layers, bar, aim in ((4, None, None), (8, None, None), (20, 2.4, 5.0)):
        yield Mlp("mlp", f"{layers} layers", "f16", 16384, 128, 128, bar, aim)
