"""Section 5 of the paper as it is stated: A and B in float16, C and D in float32, D = A B + C. Rows of `bench.experiments`.

The peer is cuBLASLt with the same types, C and D two arrays (`bench.cublas`). Where the paper's peer is cuBLAS and kernels
behind it, rows have both: those kernels, and what cuBLASLt fuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gemmkit
from bench.cases import DTYPES
from bench.experiments.algebras import AlgebraProduct
from bench.experiments.contractions import PAPER, Contraction
from bench.experiments.experiment import Experiment, Lib
from bench.experiments.types import Product
from bench.fusions import WORKS, Operands
from bench.harness import Call
from gemmkit.operators import WMMAOp

ORDERS = ("nn", "nt", "tn", "tt")
SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)             # Fig. 8's
TABLE2 = ("matmul", "relu", "bias", "bias relu", "bias relu c", "table2")
ALGEBRA_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)            # Fig. 9's
WMMA_SIZES = (2048, 4096, 8192)
ROWS = 64                                                          # that are compared with float64
TOLERANCE = 2e-5                                                   # of float32 sums of 16384 terms


@dataclass(frozen=True)
class Mixed(Product):
    """``work`` is one of `bench.fusions.WORKS`, with C, or "wmma". ``way``: the peer fuses what cuBLASLt fuses, or launches
    "kernels" behind the product, as the paper's does."""

    way: str = "fused"

    @property
    def peer(self) -> str:  # type: ignore[override]
        return "cuBLAS" if self.way == "fused" else "kernels"

    def __str__(self) -> str:
        return super().__str__() + (" against kernels" if self.way == "kernels" else "")

    @property
    def tolerance(self) -> float:
        """A + 1 and B + 1 are rounded to float16."""
        return 1e-3 if self.work == "table2" else TOLERANCE

    @property
    def input_bytes(self) -> int:
        return 2 * (self.m + self.n) * self.k + 4 * self.m * self.n

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        m, n, k = self.m, self.n, self.k
        x = SimpleNamespace(b=self.matrix(lib, k, n, self.order[1], 4 * i + 1), c=lib.normal(m, n, "f32", 4 * i + 2),
                            bias=lib.normal(1, n, "f32", 4 * i + 3)[0], out=lib.empty(m, n, "f32"),
                            peer_out=lib.empty(m, n, "f32"))
        if self.work == "diagonal":
            x.diagonal = lib.normal(1, k, "f16", 4 * i)[0]
        else:
            x.a = self.matrix(lib, m, k, self.order[0], 4 * i)
        return x

    def ours(self, lib: Lib, x: Any) -> Call:
        if self.work == "wmma":
            return lambda: gemmkit.matmul(x.a, x.b, x.c, out=x.out, operator=WMMAOp())
        work = WORKS[self.work]
        given = Operands(getattr(x, "a", None), x.b, x.out, x.peer_out, c=x.c, bias=x.bias,
                         diagonal=getattr(x, "diagonal", None))
        keywords = work.keywords(given, DTYPES[self.kind])
        return lambda: gemmkit.matmul(work.left(given), x.b, x.c, out=x.out, **keywords)

    def peers(self, lib: Lib, x: Any) -> Call:
        if self.work == "diagonal":
            x.a = lib.diagonal_matrix(x.diagonal)
        call: Call = lib.mixed(self, x)
        return call

    def title(self, lib: Lib) -> str:
        return str(lib.mixed_title(self))

    def reference(self, lib: Lib, x: Any, rows: Any) -> Any:
        """Some rows of D in float64."""
        b, c = lib.wide(x.b), lib.wide(x.c, rows)
        if self.work == "diagonal":
            return lib.wide(x.diagonal, rows)[:, None] * lib.wide(x.b, rows) + c
        a = lib.wide(x.a, rows)
        if self.work == "table2":
            a, b = (a + 1).clip(0), b + 1
        d = a @ b + (c.clip(0) if self.work in ("table2", "bias relu c") else c)
        d = d + lib.wide(x.bias) if "bias" in self.work or self.work == "table2" else d
        return d.clip(0) if "relu" in self.work or self.work == "table2" else d

    def error_of(self, lib: Lib, x: Any, out: Any) -> float:
        rows = lib.sample(self.m, min(ROWS, self.m), 0)
        return float(lib.relative_error(lib.wide(out, rows), self.reference(lib, x, rows)))


@dataclass(frozen=True)
class MixedAlgebra(AlgebraProduct):
    """Complex or dual numbers of float16, added to numbers of float32. The peer has planes, and a product of real numbers
    for each pair of parts."""

    peer_error = Experiment.peer_error

    @property
    def tolerance(self) -> float:
        return TOLERANCE

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        x, shape = super().operands(lib, 2 * i), (self.m, self.n, self.algebra.parts)
        x.c = lib.normal(self.m, self.n * self.algebra.parts, "f32", 4 * i + 2).reshape(shape)
        x.out = lib.empty(self.m, self.n * self.algebra.parts, "f32").reshape(shape)
        return x

    def ours(self, lib: Lib, x: Any) -> Call:
        return lambda: gemmkit.matmul(x.a, x.b, x.c, out=x.out, operator=self.algebra)

    def peers(self, lib: Lib, x: Any) -> Call:
        parts = range(self.algebra.parts)
        x.planes = [[self.plane(lib, numbers, i) for i in parts] for numbers in (x.a, x.b)]
        x.c_planes, x.peer_out = ([lib.empty(self.m, self.n, "f32") for _ in parts] for _ in range(2))
        for i in parts:
            x.c_planes[i][...] = x.c[..., i]
        call: Call = lib.mixed(self, x)
        return call

    @property
    def terms(self) -> list[tuple[int, int, int, int]]:
        """Of each product: the parts of A, of B and of D, and its sign; a part of D is begun by its first."""
        table, parts = self.algebra.table, range(self.algebra.parts)
        return [(i, j, part, table[i][j][part]) for part in parts for i, j in self.pairs if table[i][j][part]]

    def title(self, lib: Lib) -> str:
        return str(lib.mixed_title(self))

    def reference(self, lib: Lib, x: Any, rows: Any) -> list[Any]:
        """Some rows of each part of D in float64."""
        a, b, c = lib.wide(x.a, rows), lib.wide(x.b), lib.wide(x.c, rows)
        found = [c[..., part] for part in range(self.algebra.parts)]
        for i, j, part, sign in self.terms:
            found[part] = found[part] + sign * (a[..., i] @ b[..., j])
        return found

    def error_of(self, lib: Lib, x: Any, out: Any) -> float:
        rows = lib.sample(self.m, min(ROWS, self.m), 0)
        parts = out if isinstance(out, list) else [out[..., part] for part in range(self.algebra.parts)]
        errors = [float(lib.relative_error(lib.wide(part, rows), wanted))
                  for part, wanted in zip(parts, self.reference(lib, x, rows))]
        return next((e for e in errors if e != e), max(errors))


@dataclass(frozen=True)
class MixedContraction(Contraction):
    """The paper's contraction into float32. The peer transposes A and multiplies (TTGT): its D has the order asked for."""

    @property
    def tolerance(self) -> float:
        return TOLERANCE

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        x, shape = super().operands(lib, i), self.shape(self.terms[0])
        x.out, x.peer_out = (lib.empty(1, self.m * self.n, "f32").reshape(shape) for _ in range(2))
        return x

    def peers(self, lib: Lib, x: Any) -> Call:
        call: Call = lib.mixed(self, x)
        return call

    def title(self, lib: Lib) -> str:
        return str(lib.mixed_title(self))

    def reference(self, lib: Lib, x: Any, rows: Any) -> Any:
        return lib.einsum(self.spec, lib.wide(x.a), lib.wide(x.b))


def mixed() -> Iterator[Mixed]:
    """Fig. 8."""
    for n in SIZES:
        for order in ORDERS:
            yield Mixed("mixed", "matmul", "f16", n, n, n, 0.95, 1.0, order=order)


def wmma() -> Iterator[Mixed]:
    """Fig. 8's operator: fragments through wmma's own loads."""
    for n in WMMA_SIZES:
        for order in ORDERS:
            yield Mixed("wmma", "wmma", "f16", n, n, n, order=order)


def diagonal() -> Iterator[Mixed]:
    """Table 1."""
    yield Mixed("mixed_diagonal", "diagonal", "f16", 4096, 4096, 4096, 5.0, 6.4)


def fusion() -> Iterator[Mixed]:
    """Table 2, against the paper's peer and against what cuBLASLt fuses. Its own ratios are the aims."""
    paper = 0.84, 0.91, 0.91, 0.91, 1.0, 1.07
    for work, aim in zip(TABLE2, paper):
        if work != "matmul":
            yield Mixed("mixed_fusion", work, "f16", 4096, 4096, 4096, min(1.0, aim), aim, way="kernels")
        yield Mixed("mixed_fusion", work, "f16", 4096, 4096, 4096)


def algebras() -> Iterator[MixedAlgebra]:
    """Fig. 9."""
    for work, bar in (("complex", 0.95), ("dual", 0.85)):
        for n in ALGEBRA_SIZES:
            asked = bar if n == 4096 else None
            yield MixedAlgebra("mixed_algebras", work, "f16", n, n, n, asked, asked)


def contraction() -> Iterator[Contraction]:
    """Table 3."""
    yield MixedContraction.of("mixed_contraction", *PAPER, "f16")
