"""Products of complex and dual numbers: rows of `bench.experiments`.

**f16** against as many real products of cuBLAS's: a complex product is four real ones, a dual one three. Both do the same
number of multiply-adds on tensor cores, so the ratio of times is that of their rates.

**complex64** against cuBLAS's complex product, neither with tf32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gemmkit
from bench.experiments.experiment import ITEMSIZES, SAMPLED_ROWS, Experiment, Lib
from bench.harness import Call
from gemmkit import operators

N = 4096


@dataclass(frozen=True)
class AlgebraProduct(Experiment):
    """Numbers of an algebra of `gemmkit.operators` as arrays with a last axis of parts."""

    @property
    def algebra(self) -> Any:
        return getattr(operators, self.work.upper())

    @property
    def products(self) -> int:
        return int(self.algebra.products)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Which parts of A and B are multiplied with each other."""
        table = self.algebra.table
        parts = range(self.algebra.parts)
        return [(i, j) for i in parts for j in parts if any(table[i][j])]

    @property
    def input_bytes(self) -> int:
        return (self.m + self.n) * self.k * ITEMSIZES[self.kind] * int(self.algebra.parts)

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        parts = self.algebra.parts

        def numbers(make: Callable[..., Any], rows: int, columns: int, *seed: int) -> Any:
            return make(rows, columns * parts, self.kind, *seed).reshape(rows, columns, parts)

        return SimpleNamespace(
            a=numbers(lib.normal, self.m, self.k, 2 * i),
            b=numbers(lib.normal, self.k, self.n, 2 * i + 1),
            out=numbers(lib.empty, self.m, self.n),
        )

    def ours(self, lib: Lib, x: Any) -> Call:
        return lambda: gemmkit.matmul(x.a, x.b, out=x.out, operator=self.algebra)

    def peers(self, lib: Lib, x: Any) -> Call:
        a, b = ([self.plane(lib, numbers, i) for i in range(self.algebra.parts)] for numbers in (x.a, x.b))
        x.products = {pair: lib.empty(self.m, self.n, self.kind) for pair in self.pairs}

        def call() -> None:
            for (i, j), out in x.products.items():
                lib.matmul(a[i], b[j], out)

        return call

    def plane(self, lib: Lib, numbers: Any, i: int) -> Any:
        """One part of all numbers, contiguous."""
        found = lib.empty(*(int(extent) for extent in numbers.shape[:2]), self.kind)
        found[...] = numbers[..., i]
        return found

    def title(self, lib: Lib) -> str:
        return f"{lib.peer_name()}: {self.products} real products"

    def error_of(self, lib: Lib, x: Any, out: Any) -> float:
        """The worst part's."""
        rows = lib.sample(self.m, min(SAMPLED_ROWS, self.m), 0)
        a, b, d = lib.wide(x.a, rows), lib.wide(x.b), lib.wide(out, rows)
        table = self.algebra.table
        errors = []
        for part in range(self.algebra.parts):
            terms = [table[i][j][part] * (a[..., i] @ b[..., j]) for i, j in self.pairs if table[i][j][part]]
            errors.append(float(lib.relative_error(d[..., part], sum(terms))))
        return next((e for e in errors if e != e), max(errors))  # NaN before all

    def peer_error(self, lib: Lib, x: Any) -> float:
        (i, j), out = list(x.products.items())[-1]
        rows = lib.sample(self.m, min(SAMPLED_ROWS, self.m), 0)
        product = lib.wide(x.a, rows)[..., i] @ lib.wide(x.b)[..., j]
        return float(lib.relative_error(out[rows], product))


@dataclass(frozen=True)
class ComplexProduct(AlgebraProduct):
    """complex64, as array libraries have it."""

    peer_error = Experiment.peer_error

    @property
    def algebra(self) -> Any:
        return operators.COMPLEX

    def ours(self, lib: Lib, x: Any) -> Call:
        a, b, out = map(lib.complex_view, (x.a, x.b, x.out))
        return lambda: gemmkit.matmul(a, b, out=out)

    def peers(self, lib: Lib, x: Any) -> Call:
        x.peer_out = lib.empty(self.m, 2 * self.n, self.kind).reshape(self.m, self.n, 2)
        a, b, out = map(lib.complex_view, (x.a, x.b, x.peer_out))
        return lambda: lib.matmul(a, b, out)

    def title(self, lib: Lib) -> str:
        return f"{lib.peer_name()}: complex64"


def algebras(n: int = N) -> Iterator[Experiment]:
    for name in ("complex", "dual"):
        yield AlgebraProduct("algebras", name, "f16", n, n, n, 0.7, 0.95)


def complex64(n: int = N) -> Iterator[Experiment]:
    yield ComplexProduct("complex64", "complex64", "f32", n, n, n, 0.7, 1.0)
