"""Stacks of small matrices by `gemmkit.matmul`, in one launch, against torch.bmm: rows of `bench.experiments`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from bench.experiments.experiment import ITEMSIZES, Experiment, Lib

# kind, products, size: the bar is issue 13's, for the families as they are then.
STACKS = (
    ("f16", 64, 128), ("f16", 64, 256), ("f16", 512, 64), ("f16", 16, 1024), ("f32", 64, 64), ("f32", 64, 128),
)  # fmt: skip
BAR, AIM = 1 / 1.3, 0.93


@dataclass(frozen=True)
class Stack(Experiment):
    """``count`` products of m x n x k."""

    count: int = 1

    @property
    def products(self) -> int:
        return self.count

    @property
    def input_bytes(self) -> int:
        return self.count * (self.m + self.n) * self.k * ITEMSIZES[self.kind]

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        a = lib.normal(self.count * self.m, self.k, self.kind, 2 * i).reshape((self.count, self.m, self.k))
        b = lib.normal(self.count * self.k, self.n, self.kind, 2 * i + 1).reshape((self.count, self.k, self.n))
        outs = [lib.empty(self.count * self.m, self.n, self.kind).reshape((self.count, self.m, self.n)) for _ in range(2)]
        return SimpleNamespace(a=a, b=b, out=outs[0], peer_out=outs[1])

    def title(self, lib: Lib) -> str:
        return f"{lib.peer_name()}: bmm"

    def error_of(self, lib: Lib, x: Any, out: Any) -> float:
        return float(lib.relative_error(out, lib.wide(x.a) @ lib.wide(x.b)))


def stacks() -> Iterator[Stack]:
    """All rows of the group."""
    for kind, count, size in STACKS:
        yield Stack("stacks", f"{count} products", kind, size, size, size, BAR, AIM, count=count)
