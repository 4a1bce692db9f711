"""Products of random sizes by `gemmkit.plan_grouped`, one launch, against a loop of cuBLAS: rows of `bench.experiments`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gemmkit
from bench.experiments.experiment import ITEMSIZES, Experiment, Lib
from bench.harness import Call

STEP = 8  # elements: sizes are multiples, so that rows are aligned to 16 bytes
BAR, AIM = 1.5, 3.0


@dataclass(frozen=True)
class Group(Experiment):
    """``count`` products of random sizes up to m x n x k, of a sixteenth of each at least."""

    count: int = 32

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Of each product: the same in every run."""
        draw = random.Random(13)
        limits = [range(max(STEP, size // 16 // STEP * STEP), size + 1, STEP) for size in (self.m, self.n, self.k)]
        return [(draw.choice(limits[0]), draw.choice(limits[1]), draw.choice(limits[2])) for _ in range(self.count)]

    @property
    def products(self) -> int:
        """As many of the largest size as have the multiply-adds of all, rounded."""
        return max(1, round(sum(m * n * k for m, n, k in self.shapes) / (self.m * self.n * self.k)))

    @property
    def input_bytes(self) -> int:
        return sum((m + n) * k for m, n, k in self.shapes) * ITEMSIZES[self.kind]

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        """Results lie one behind the other in ``out``."""
        shapes, starts = self.shapes, [0]
        for m, n, _ in shapes:
            starts.append(starts[-1] + m * n)
        a = [lib.normal(m, k, self.kind, 2 * (i * self.count + at)) for at, (m, _, k) in enumerate(shapes)]
        b = [lib.normal(k, n, self.kind, 2 * (i * self.count + at) + 1) for at, (_, n, k) in enumerate(shapes)]
        outs = [lib.empty(starts[-1], 1, self.kind) for _ in range(2)]
        views = [[out[start : start + m * n].reshape((m, n)) for start, (m, n, _) in zip(starts, shapes)] for out in outs]
        return SimpleNamespace(a=a, b=b, out=outs[0], peer_out=outs[1], outs=views[0], peer_outs=views[1])

    def ours(self, lib: Lib, x: Any) -> Call:
        made: list[Any] = []

        def call() -> Any:
            if not made:
                made.append(gemmkit.plan_grouped(x.a, x.b, out=x.outs))
            return made[0](x.a, x.b, out=x.outs)

        return call

    def peers(self, lib: Lib, x: Any) -> Call:
        def call() -> None:
            for a, b, out in zip(x.a, x.b, x.peer_outs):
                lib.matmul(a, b, out)

        return call

    def title(self, lib: Lib) -> str:
        return f"{lib.peer_name()}: a call for each"

    def error(self, lib: Lib, x: Any) -> float:
        return self.error_of(lib, x, x.outs)

    def peer_error(self, lib: Lib, x: Any) -> float:
        return self.error_of(lib, x, x.peer_outs)

    def error_of(self, lib: Lib, x: Any, outs: list[Any]) -> float:
        return max(float(lib.relative_error(out, lib.wide(a) @ lib.wide(b))) for a, b, out in zip(x.a, x.b, outs))


def groups() -> Iterator[Group]:
    """All rows of the group."""
    for size in (256, 1024, 2048):
        yield Group("grouped", f"32 products up to {size}", "f16", size, size, size, BAR, AIM)
