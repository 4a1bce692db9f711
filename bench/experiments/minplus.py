"""The min-plus product against the card's own limit for its instructions (`limit`): a row of `bench.experiments`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import gemmkit
from bench.experiments.experiment import SAMPLED_ROWS, Experiment, Lib
from bench.experiments.limit import CHAINS, Limit
from bench.harness import Call
from gemmkit.operators import MIN_PLUS
from gemmkit.runtime.device import target

N = 4096


@dataclass(frozen=True)
class MinPlus(Experiment):
    peers_kernel = "limit"

    @cached_property
    def limit(self) -> Limit:
        return Limit(MIN_PLUS, self.m * self.n * self.k, target())

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        return SimpleNamespace(
            a=lib.normal(self.m, self.k, self.kind, 2 * i),
            b=lib.normal(self.k, self.n, self.kind, 2 * i + 1),
            out=lib.empty(self.m, self.n, self.kind),
        )

    def ours(self, lib: Lib, x: Any) -> Call:
        return lambda: gemmkit.matmul(x.a, x.b, out=x.out, operator=MIN_PLUS)

    def peers(self, lib: Lib, x: Any) -> Call:
        first = lib.empty(1, self.limit.threads, self.kind)[0]
        first[...] = 0
        x.chains = lib.empty(CHAINS, self.limit.threads, self.kind)
        return lib.limit(self.limit, x.chains, first)

    def title(self, lib: Lib) -> str:
        return f"this card's limit: FADD and FMNMX on registers, {self.limit}"

    def error(self, lib: Lib, x: Any) -> float:
        rows = lib.sample(self.m, min(SAMPLED_ROWS, self.m), 0)
        return float(lib.relative_error(x.out[rows], lib.min_plus(x.a, x.b, rows)))

    def peer_error(self, lib: Lib, x: Any) -> float:
        expected = lib.empty(CHAINS, self.limit.threads, self.kind)
        for n in range(CHAINS):
            expected[n] = self.limit.expected(n)
        return float(lib.relative_error(x.chains, lib.wide(expected)))

    def build_peer(self) -> None:
        self.limit.build()


def minplus(n: int = N) -> Iterator[Experiment]:
    yield MinPlus("minplus", "min-plus", "f32", n, n, n, 0.6, 0.9)
