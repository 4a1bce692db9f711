"""Products with more than one result, or of more than two matrices: rows of `bench.experiments`.

| work | ours | against |
|---|---|---|
| row max, row sumsq | D and a reduction of its rows (`epilogues.RowReduce`) | our own plain product |
| row sums of a | D and the sums of A's rows (`observers.OperandRowSum`) | our own plain product |
| glu | silu(A W) * (A V) (`gemmkit.glu`) | cuBLAS of 2 N columns, then an element-wise kernel |
| glu, plain | the same | our own plain product of 2 N columns |
| lstm, 5 kernels | relu(A W + H U + b) (`gemmkit.functions.lstm_cell`) | two products, two additions and a ReLU |
| lstm, addmm | the same | torch.addmm of inputs joined beforehand, then a ReLU |
| softmax | softmax of each row of A B (`epilogues.Softmax`) | torch.matmul, then torch.softmax |
| rmsnorm | the RMS norm of each row, with a gain (`epilogues.RMSNorm`) | torch.matmul, then torch.nn.functional.rms_norm |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gemmkit
from bench.experiments.experiment import ITEMSIZES, Experiment, Lib
from bench.harness import Call
from gemmkit import epilogues
from gemmkit.epilogues import observers

SAMPLED_ROWS = 256
NORMALISED = ("softmax", "rmsnorm")
EPS = 1e-5
PLAIN = ("row max", "row sumsq", "row sums of a", "glu, plain")


@dataclass(frozen=True)
class Composed(Experiment):
    """One row; of an LSTM ``k`` are the inputs x and ``n`` the outputs h, which are inputs too."""

    @property
    def has_two(self) -> bool:
        """Whether two products are computed."""
        return self.work.startswith(("glu", "lstm"))

    @property
    def tolerance(self) -> float:
        return 2e-3

    @property
    def input_bytes(self) -> int:
        parts = 2 if self.work.startswith("glu") else 1
        more = (self.m + self.n) * self.n if self.work.startswith("lstm") else 0
        return ((self.m + parts * self.n) * self.k + more) * ITEMSIZES[self.kind]

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        """``b`` has both of a gated unit's weights side by side; ``w`` and ``v`` are views of it."""
        m, n, k, columns = self.m, self.n, self.k, 2 * self.n if self.work.startswith("glu") else self.n
        x = SimpleNamespace(a=lib.normal(m, k, self.kind, 5 * i), b=lib.normal(k, columns, self.kind, 5 * i + 1))
        x.out, x.peer_out = lib.empty(m, n, self.kind), lib.empty(m, n, self.kind)
        x.first = x.second = x.peer_out
        if self.work.startswith("row"):
            x.found = lib.empty(m, 1, "f32")[:, 0]
        elif self.work in NORMALISED:
            x.a = lib.scaled(x.a, 0.015625)            # logits of some 1 at K = 4096
            x.gain, x.first = lib.normal(1, n, self.kind, 5 * i + 2)[0], lib.empty(m, n, self.kind)
        elif self.work.startswith("glu"):
            x.a = lib.scaled(x.a, 0.0625)              # else products of two sums of 8192 exceed float16
            x.w, x.v = x.b[:, :n], x.b[:, n:]
            x.wide = lib.empty(m, columns, self.kind)
        else:
            x.h, x.u = lib.normal(m, n, self.kind, 5 * i + 2), lib.normal(n, n, self.kind, 5 * i + 3)
            x.bias = lib.normal(1, n, self.kind, 5 * i + 4)[0]
            x.first, x.second = lib.empty(m, n, self.kind), lib.empty(m, n, self.kind)
            x.inputs, x.weights = lib.joined(x.a, x.h, 1), lib.joined(x.b, x.u, 0)
        return x

    def ours(self, lib: Lib, x: Any) -> Call:
        calls: dict[str, Callable[[], Any]] = {
            "row max": lambda: gemmkit.matmul(x.a, x.b, out=x.out, epilogue=epilogues.RowReduce(x.found, "max")),
            "row sumsq": lambda: gemmkit.matmul(x.a, x.b, out=x.out, epilogue=epilogues.RowReduce(x.found, "sumsq")),
            "row sums of a": lambda: gemmkit.matmul(x.a, x.b, out=x.out, observe_a=observers.OperandRowSum(x.found)),
            "glu": lambda: gemmkit.glu(x.a, x.w, x.v, out=x.out),
            "softmax": lambda: gemmkit.matmul(x.a, x.b, out=x.out, epilogue=epilogues.Softmax()),
            "rmsnorm": lambda: gemmkit.matmul(x.a, x.b, out=x.out, epilogue=epilogues.RMSNorm(x.gain, EPS)),
            "lstm": lambda: gemmkit.functions.lstm_cell(x.a, x.h, None, x.b, x.u, x.bias, out=x.out),
        }
        return calls[self.work.partition(",")[0]]

    def peers(self, lib: Lib, x: Any) -> Call:
        if self.work in PLAIN:
            return lambda: lib.plain(x.a, x.b, x.wide if self.has_two else x.peer_out)
        call: Callable[[Any], None] = lib.composed(self.work)
        return lambda: call(x)

    def title(self, lib: Lib) -> str:
        return str(lib.composed_title(self.work))

    def error(self, lib: Lib, x: Any) -> float:
        some = lib.sample(self.m, min(SAMPLED_ROWS, self.m), 0)
        found = float(lib.relative_error(x.out[some], self.expected(lib, x, some)))
        return found if self.has_two or self.work in NORMALISED else max(found, self.beside(lib, x, some))

    def peer_error(self, lib: Lib, x: Any) -> float:
        some = lib.sample(self.m, min(SAMPLED_ROWS, self.m), 0)
        if self.work == "glu, plain":
            return float(lib.relative_error(x.wide[some], lib.wide(x.a, some) @ lib.wide(x.b)))
        return float(lib.relative_error(x.peer_out[some], self.expected(lib, x, some)))

    def expected(self, lib: Lib, x: Any, some: Any) -> Any:
        sums = lib.wide(x.a, some) @ lib.wide(x.b)
        if self.work.startswith("glu"):
            gate = sums[:, : self.n]
            return gate / (1 + 2.718281828459045 ** (-gate)) * sums[:, self.n :]
        if self.work.startswith("lstm"):
            sums = sums + lib.wide(x.h, some) @ lib.wide(x.u) + lib.wide(x.bias)
            return (sums + abs(sums)) / 2
        if self.work == "softmax":
            raised = 2.718281828459045**sums           # of logits that are small
            return raised / raised.sum(-1)[:, None]
        if self.work == "rmsnorm":
            return sums / ((sums * sums).sum(-1) / self.n + EPS)[:, None] ** 0.5 * lib.wide(x.gain)
        return sums

    def beside(self, lib: Lib, x: Any, some: Any) -> float:
        """The error of what was reduced."""
        if self.work == "row sums of a":
            wanted = lib.wide(x.a, some).sum(-1)
        else:
            sums = self.expected(lib, x, some)
            wanted = (sums * sums).sum(-1) if self.work == "row sumsq" else lib.largest(sums)
        return float(lib.relative_error(x.found[some], wanted))


def composed() -> Iterator[Composed]:
    """All rows of the group."""
    for work in ("row max", "row sumsq"):
        yield Composed("composed", work, "f16", 8192, 4096, 4096, 0.96, 0.99)
    for size in (4096, 6144, 8192):
        yield Composed("composed", "row sums of a", "f16", size, size, size, 0.93, 0.99)
    for m, n, k in ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 14336, 4096)):
        yield Composed("composed", "glu", "f16", m, n, k, 1.1, 1.2)
        yield Composed("composed", "glu, plain", "f16", m, n, k, 0.95, 1.0)
    yield Composed("composed", "lstm, 5 kernels", "f16", 4096, 1024, 1024, 1.75, 2.2)
    yield Composed("composed", "lstm, addmm", "f16", 4096, 1024, 1024, 1.05, 1.3)
    for work in NORMALISED:
        for m, n, k in ((8192, 1024, 4096), (4096, 128, 4096)):
            yield Composed("composed", work, "f16", m, n, k, 1.0, 1.2)
