"""Layer norm, RMS norm and softmax of rows, against PyTorch and `torch.compile`: rows of `bench.experiments`.

What limits them is memory: an element is read once and written once. So inputs of all sets together exceed the L2 cache, as
everywhere in these benches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gemmkit
from bench.experiments.experiment import ITEMSIZES, SAMPLED_ROWS, Experiment, Lib
from bench.harness import Call

ROWS = 16384
COLUMNS = (768, 1024, 2048, 4096, 8192, 16384)
WORKS = ("layernorm", "rmsnorm", "softmax")


@dataclass(frozen=True)
class RowWise(Experiment):
    """``m`` rows of ``n`` elements, against PyTorch's own kernel or the one that it compiles."""

    is_compiled: bool = False

    def __str__(self) -> str:
        peer = "torch.compile" if self.is_compiled else "PyTorch"
        return f"{self.group}: {self.work} {self.kind} {self.m}x{self.n} against {peer}"

    @property
    def tolerance(self) -> float:
        return {"f16": 2e-3, "bf16": 1.6e-2, "f32": 1e-5}[self.kind]

    @property
    def input_bytes(self) -> int:
        return self.m * self.n * ITEMSIZES.get(self.kind, 2)

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        x, gamma, beta = (lib.normal(rows, self.n, self.kind, 3 * i + n) for n, rows in enumerate((self.m, 1, 1)))
        out, peer_out = (lib.empty(self.m, self.n, self.kind) for _ in range(2))
        return SimpleNamespace(x=x, gamma=gamma[0], beta=beta[0], out=out, peer_out=peer_out)

    def ours(self, lib: Lib, x: Any) -> Call:
        calls: dict[str, Callable[[], Any]] = {
            "layernorm": lambda: gemmkit.layernorm(x.x, x.gamma, x.beta, out=x.out),
            "rmsnorm": lambda: gemmkit.rmsnorm(x.x, x.gamma, out=x.out),
            "softmax": lambda: gemmkit.softmax(x.x, out=x.out),
        }
        return calls[self.work]

    def peers(self, lib: Lib, x: Any) -> Call:
        call = lib.row_wise(self.work, self.is_compiled)

        def run() -> None:
            x.peer_out = call(x.x, x.gamma, x.beta)

        return run

    def title(self, lib: Lib) -> str:
        return str(lib.row_wise_title(self.is_compiled))

    def error_of(self, lib: Lib, x: Any, out: Any) -> float:
        some = lib.sample(self.m, min(SAMPLED_ROWS, self.m), 0)
        expected = lib.row_wise(self.work, False)(lib.wide(x.x, some), lib.wide(x.gamma), lib.wide(x.beta))
        return float(lib.relative_error(out[some], expected))


def rows() -> Iterator[RowWise]:
    """What is asked is of the geometric mean (`bench.verdicts.MEANS`)."""
    for work in WORKS:
        for kind in ("f16", "bf16"):
            for columns in COLUMNS:
                for is_compiled in (False, True):
                    yield RowWise("rows", work, kind, ROWS, columns, 1, is_compiled=is_compiled)
