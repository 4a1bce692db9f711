"""Works of the papers, each against every rival that is installed: rows of `bench.experiments`.

| work | papers |
|---|---|
| square | 001, Fig. 13a |
| row sums of a, glu | 001, Fig. 13d and c |
| plain, causal: attention; 32 x 16 x 384 x 64 is MLPerf's BERT | 001, Fig. 14; 000, Fig. 14 |
| layernorm | 000, Fig. 13 |
| lstm | 000, Fig. 12 |

A row is one of another group, beside one rival. `python -m bench.asked --into docs/peers.md` writes the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench import rivals
from bench.experiments.attention import Attention
from bench.experiments.composed import Composed
from bench.experiments.experiment import Experiment, Lib
from bench.experiments.rows import RowWise
from bench.experiments.types import Product
from bench.harness import Call


@dataclass(frozen=True)
class Versus(Experiment):
    """A row ``of`` another group, against the rival that is named."""

    of: Any = None
    rival: str = ""

    def __str__(self) -> str:
        return f"{self.group}: {str(self.of).partition(': ')[2].partition(' against ')[0]} against {self.rival}"

    @property
    def layout(self) -> str:  # type: ignore[override]
        return str(self.of.layout)

    @property
    def products(self) -> int:
        return int(self.of.products)

    @property
    def tolerance(self) -> float:
        return float(self.of.tolerance)

    @property
    def input_bytes(self) -> int:
        return int(self.of.input_bytes)

    def operands(self, lib: Lib, i: int) -> Any:
        x = self.of.operands(lib, i)
        if self.work == "row sums of a":
            x.found2 = lib.empty(self.m, 1, "f32")[:, 0]           # the rival's
        return x

    def ours(self, lib: Lib, x: Any) -> Call:
        call: Call = self.of.ours(lib, x)
        return call

    def peers(self, lib: Lib, x: Any) -> Call:
        call: Call = lib.rival(self, x)
        return call

    def title(self, lib: Lib) -> str:
        return str(lib.rival_title(self))

    def error(self, lib: Lib, x: Any) -> float:
        return float(self.of.error(lib, x))

    def peer_error(self, lib: Lib, x: Any) -> float:
        return float(self.of.peer_error(lib, x))


def attentions() -> Iterator[Experiment]:
    """Of FlashAttention-4's sizes those that `works` has not, beside it and cuDNN alone."""
    for work, batch, rows, size in (("plain", 4, 4096, 64), ("causal", 4, 4096, 64), ("plain", 1, 16384, 128),
                                    ("causal", 1, 16384, 128), ("plain", 1, 16384, 64), ("causal", 1, 16384, 64)):
        yield Attention("rivals", work, "f16", batch * 16 * rows, rows, size, batch=batch, heads=16)


def works() -> Iterator[Experiment]:
    for n in (4096, 8192):
        yield Product("rivals", "square", "f16", n, n, n)
    for n in (4096, 8192):
        yield Composed("rivals", "glu", "f16", n, n, n)
    for n in (4096, 8192):
        yield Composed("rivals", "row sums of a", "f16", n, n, n)
    for work, batch, rows, size in (("plain", 32, 384, 64), ("plain", 4, 4096, 128), ("causal", 4, 4096, 128)):
        heads = 16
        yield Attention("rivals", work, "f16", batch * heads * rows, rows, size, batch=batch, heads=heads)
    for columns in (1024, 4096, 8192):
        yield RowWise("rivals", "layernorm", "f16", 16384, columns, 1)
    yield Composed("rivals", "lstm, 5 kernels", "f16", 4096, 1024, 1024)


def versus() -> Iterator[Versus]:
    pairs = [(of, name) for of in works() for name in rivals.names(of.work)]
    pairs += [(of, name) for of in attentions() for name in ("FlashAttention-4", "cuDNN")]
    for of, name in pairs:
        yield Versus("rivals", of.work.partition(",")[0], of.kind, of.m, of.n, of.k, of=of, rival=name)
