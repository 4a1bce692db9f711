"""float32, float64 and complex numbers, few tiles with a long K, and skinny products, as `gemmkit.matmul` chooses by itself,
against cuBLAS: rows of `bench.experiments`. What issue 13 asks of groups' geometric means is in `bench.verdicts`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

import gemmkit
from bench.experiments.algebras import ComplexProduct
from bench.experiments.experiment import Experiment, Lib
from bench.harness import Call

SIZES = (512, 1024, 2048, 4096, 8192)
ORDERS = ("nn", "nt", "tn", "tt")
COMPLEX_SIZES = (1024, 2048, 4096)
LONG = (
    ("f16", 64, 64, 65536), ("f16", 512, 512, 16384), ("f16", 256, 256, 32768), ("f16", 1024, 1024, 8192),
    ("f32", 64, 64, 65536), ("f32", 4096, 64, 4096),
)  # fmt: skip
OZAKI_SIZES = {2048: (None, None), 4096: (1.3, 1.4), 8192: (1.6, 1.75), 16384: (1.75, 1.9)}         # bar and aim
#: By the kind of the parts: the name, bar and aim, the sizes.
OZAKI_COMPLEX = {"f32": ("complex64", (1.2, 2.0), (1024, 2048, 4096, 8192)),
                 "f64": ("complex128", (2.0, 2.5), (2048, 4096, 8192))}
OZAKI_FLOAT32 = (1024, 2048, 4096, 8192)
#: log2 of the bounds of docs/how_to/float64_by_int8.md, by √K of real numbers and by √(2 K) of complex ones.
OZAKI_ERRORS = {("f32", False): -26.3, ("f64", False): -53.5, ("f32", True): -25.6, ("f64", True): -54.0}
OZAKI_SAMPLE = 24                      # rows and columns whose errors are looked at
SOME = tuple((m, n, k) for m in (40, 56, 64, 72, 96, 128, 144, 176, 192, 224, 256)
             for n, k in ((4096, 4096), (4096, 14336), (6144, 4096), (14336, 4096)))
SKINNY = tuple((m, n, k) for m in (1, 8, 16, 32) for n, k in ((4096, 4096), (4096, 14336), (14336, 4096)))


@dataclass(frozen=True)
class Product(Experiment):
    """One product of two matrices in an order: "n" for row by row, "t" for the transposed view of such an array."""

    order: str = "nn"

    def __str__(self) -> str:
        return f"{super().__str__()} {self.order}"

    @property
    def layout(self) -> str:  # type: ignore[override]
        return self.order

    def matrix(self, lib: Lib, rows: int, columns: int, order: str, seed: int) -> Any:
        if order == "n":
            return lib.normal(rows, columns, self.kind, seed)
        return lib.normal(columns, rows, self.kind, seed).T

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        a = self.matrix(lib, self.m, self.k, self.order[0], 2 * i)
        b = self.matrix(lib, self.k, self.n, self.order[1], 2 * i + 1)
        outs = [lib.empty(self.m, self.n, self.kind) for _ in range(2)]
        return SimpleNamespace(a=a, b=b, out=outs[0], peer_out=outs[1])


@dataclass(frozen=True)
class Ozaki(Product):
    """A real product by int8 products, beside cuBLAS's of the dtype. Errors of both are against sums with 64 bits of
    mantissa, for some rows and columns, in units of the 2-norms of A's row and B's column."""

    moduli: int = 14

    mapping: ClassVar[str | None] = "ozaki"

    @property
    def tolerance(self) -> float:
        """Of as many moduli as the dtype has without a number."""
        return float(self.k**0.5 * 2.0 ** OZAKI_ERRORS[self.kind, False])

    def ours(self, lib: Lib, x: Any) -> Call:
        return lambda: gemmkit.matmul(x.a, x.b, out=x.out, precision=f"ozaki{self.moduli}")

    def error_of(self, lib: Lib, x: Any, out: Any) -> float:
        return error_by_norms(lib, x.a, x.b, out, np.longdouble)


@dataclass(frozen=True)
class OzakiComplex(ComplexProduct):
    """A complex product by int8 products, beside cuBLAS's of the dtype. Errors are those of `Ozaki`."""

    mapping: ClassVar[str | None] = "ozaki"

    @property
    def tolerance(self) -> float:
        """Of both parts."""
        return float(2 * self.k**0.5 * 2.0 ** OZAKI_ERRORS[self.kind, True])

    def ours(self, lib: Lib, x: Any) -> Call:
        a, b, out = map(lib.complex_view, (x.a, x.b, x.out))
        return lambda: gemmkit.matmul(a, b, out=out, precision="ozaki")

    def title(self, lib: Lib) -> str:
        return f"{lib.peer_name()}: {OZAKI_COMPLEX[self.kind][0]}"

    def error_of(self, lib: Lib, x: Any, out: Any) -> float:
        a, b, d = map(lib.complex_view, (x.a, x.b, out))
        return error_by_norms(lib, a, b, d, np.clongdouble)


def error_by_norms(lib: Lib, a: Any, b: Any, out: Any, wide: type) -> float:
    """The largest error of a corner of a result, in units of the 2-norms of A's row and B's column."""
    rows, columns = slice(0, min(OZAKI_SAMPLE, a.shape[0])), slice(0, min(OZAKI_SAMPLE, b.shape[1]))
    a, b, d = (lib.as_numpy(part).astype(wide) for part in (a[rows], b[:, columns], out[rows, columns]))
    norms = np.sqrt((abs(a) ** 2).sum(1))[:, None] * np.sqrt((abs(b) ** 2).sum(0))
    return float((abs(d - a @ b) / norms).max())


def ozaki() -> Iterator[Ozaki | OzakiComplex]:
    """Squares of complex numbers and of float32; of float64 with as many moduli as are about as exact, and one more."""
    for kind, (name, (least, wanted), sizes) in OZAKI_COMPLEX.items():
        for size in sizes:
            yield OzakiComplex("ozaki", name, kind, size, size, size, bar=least, aim=wanted)
    for size in OZAKI_FLOAT32:
        yield Ozaki("ozaki", "7 moduli", "f32", size, size, size, moduli=7)
    for size, (bar, aim) in OZAKI_SIZES.items():
        yield Ozaki("ozaki", "14 moduli", "f64", size, size, size, bar=bar, aim=aim)
        yield Ozaki("ozaki", "15 moduli", "f64", size, size, size, moduli=15)


def types() -> Iterator[Product]:
    """Squares of float32 and float64."""
    for kind, group in (("f32", "float32"), ("f64", "float64")):
        for size in SIZES:
            for order in ORDERS:
                yield Product(group, "square", kind, size, size, size, order=order)


def complex_squares() -> Iterator[ComplexProduct]:
    """Squares of complex numbers, whose parts are of the kind that is named."""
    for kind, name in (("f32", "complex64"), ("f64", "complex128")):
        for size in COMPLEX_SIZES:
            yield ComplexProduct("complex", name, kind, size, size, size)


def long_k() -> Iterator[Product]:
    """Few tiles and a long K."""
    for kind, m, n, k in LONG:
        yield Product("long", "long K", kind, m, n, k)


def skinny() -> Iterator[Product]:
    """A few rows, as in decoding; B as weights lie, row by row of its transpose."""
    for m, n, k in SKINNY:
        yield Product("skinny", "skinny", "f16", m, n, k, order="nt")


def some() -> Iterator[Product]:
    """Rows that fill no tile, as in decoding of many sequences; some of them, as D^T, are columns."""
    for m, n, k in SOME:
        yield Product("some", "some rows", "f16", m, n, k, order="nt")
    for m in (144, 200):
        yield Product("some", "some columns", "f16", 4096, m, 4096, order="nt")
