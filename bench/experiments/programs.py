"""A GEMM as a program (docs/programs.md), by blocks alone and in clusters that share operands by multicast, against cuBLAS:
rows of `bench.experiments`. What clusters change is the ratio of two rows' ratios."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gemmkit
from bench.experiments.experiment import Lib
from bench.experiments.types import Product
from bench.harness import Call
from gemmkit import programs

SIZES = (4096, 8192)
CLUSTERS: dict[str, dict[str, int]] = {
    "program": {},
    "program, clusters along m": {"m": 2},
    "program, clusters along n": {"n": 2},
    "program, clusters of 2 x 2": {"m": 2, "n": 2},
}


@gemmkit.program
def gemm(a: Any, b: Any, d: Any) -> None:
    for m, n in programs.parallel(a.rows, b.columns):
        acc = programs.zeros(m, n)
        for k in programs.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = acc


@dataclass(frozen=True)
class Programmed(Product):
    """One row; ``work`` says which cluster."""

    def ours(self, lib: Lib, x: Any) -> Call:
        mapping = gemmkit.Mapping(cluster=CLUSTERS[self.work])
        return lambda: gemm(x.a, x.b, x.out, mapping=mapping)


def of_programs() -> Iterator[Programmed]:
    """All rows of the group."""
    for size in SIZES:
        for work in CLUSTERS:
            yield Programmed("programs", work, "f16", size, size, size)
