"""What a row of `bench.experiments` is, if `bench.cases` does not have it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import gemmkit
from bench.harness import Call

Lib = Any  # a `bench.peers.TorchPeers`

# The largest relative error of a right result: the rounding of D, and of float32 that of the sum, which grows with K.
TOLERANCES = {"f16": 1e-3, "f32": 1e-5, "f64": 1e-13}
ROUNDING = 1e-7  # of a sum of one term in float32
SAMPLED_ROWS = 64  # of the result, compared with float64
ITEMSIZES = {"f16": 2, "f32": 4, "f64": 8}


@dataclass(frozen=True)
class Experiment(ABC):
    """One row: what is computed on which operands, by gemmkit as it chooses by itself and by a peer.

    ``m``, ``n``, ``k`` are those of the matrix product. ``operands`` makes one input set; the other methods take it. ``bar``
    and ``aim`` are of the ratio; those of a group's geometric mean are in `bench.verdicts.MEANS`.
    """

    group: str
    work: str
    kind: str
    m: int
    n: int
    k: int
    bar: float | None = field(default=None, compare=False)
    aim: float | None = field(default=None, compare=False)

    layout: ClassVar[str] = "nn"
    peer: ClassVar[str] = "cuBLAS"
    mapping: ClassVar[str | None] = None
    peers_kernel: ClassVar[str | None] = None  # what the peer needs compiled: ``build_peer`` does it

    def __str__(self) -> str:
        return f"{self.group}: {self.work} {self.kind} {self.m}x{self.n}x{self.k}"

    @property
    def products(self) -> int:
        """Real multiply-adds for one of the product's."""
        return 1

    @property
    def tolerance(self) -> float:
        return max(TOLERANCES[self.kind], ROUNDING * math.sqrt(self.k)) if self.kind == "f32" else TOLERANCES[self.kind]

    @property
    def input_bytes(self) -> int:
        """Of one input set."""
        return (self.m + self.n) * self.k * ITEMSIZES[self.kind]

    @abstractmethod
    def operands(self, lib: Lib, i: int) -> Any:
        """The arrays of input set ``i``: ``out`` is ours."""

    def ours(self, lib: Lib, x: Any) -> Call:
        """A call of gemmkit's that writes ``x.out``: `gemmkit.matmul` as it chooses by itself."""
        return lambda: gemmkit.matmul(x.a, x.b, out=x.out)

    def peers(self, lib: Lib, x: Any) -> Call:
        """A call without gemmkit, that writes ``x.peer_out``."""
        return lambda: lib.matmul(x.a, x.b, x.peer_out)

    def title(self, lib: Lib) -> str:
        """How results call the peer."""
        return str(lib.peer_name())

    def error(self, lib: Lib, x: Any) -> float:
        return self.error_of(lib, x, x.out)

    def peer_error(self, lib: Lib, x: Any) -> float:
        return self.error_of(lib, x, x.peer_out)

    def error_of(self, lib: Lib, x: Any, out: Any) -> float:
        """The relative error of a result against float64, of some rows."""
        rows = lib.sample(self.m, min(SAMPLED_ROWS, self.m), 0)
        return float(lib.relative_error(lib.wide(out, rows), lib.wide(x.a, rows) @ lib.wide(x.b)))

    def build_peer(self) -> None:  # noqa: B027
        """Compile ahead what the peer launches; nothing, unless an experiment says otherwise."""
