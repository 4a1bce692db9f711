"""Contractions of tensors by `gemmkit.einsum` against torch.einsum: rows of `bench.experiments`.

The paper's own (its section 5.5) at its sizes, and the 48 of the TCCG benchmark (Springer and Bientinesi) at sizes as it
has them: the largest tensor about 200 MiB of float32 (the same extents for float16), extents of stride 1 multiples of 24,
the others of 4. A case "abj-bka-kj" has the indices of D, A and B, column-major; here they are reversed for arrays in C
order, which lie in memory the same way. Ours writes D in that order; torch.einsum may return it in one that suits it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gemmkit
from bench.experiments.experiment import ITEMSIZES, Experiment, Lib
from bench.harness import Call

TCCG = Path(__file__).parents[2] / "tests" / "data" / "tccg.json"
LARGEST = 50 << 20  # elements of the largest tensor
PAPER = "abc-bda-dc", dict(a=64, b=32, c=2048, d=2048)
KINDS = ("f16", "f32")
Sizes = tuple[tuple[str, int], ...]  # of each index


def tccg_groups() -> dict[str, list[str]]:
    """The benchmark's cases by its own groups: coupled clusters, changes of basis, times a matrix, triples."""
    groups: dict[str, list[str]] = json.loads(TCCG.read_text())["groups"]
    return groups


def tccg_cases() -> list[str]:
    return [case for group in tccg_groups().values() for case in group]


def tccg_sizes(case: str, largest: int = LARGEST) -> dict[str, int]:
    """The extents of a case's indices.

    >>> sorted(tccg_sizes("ij-ik-kj").items())
    [('i', 7224), ('j', 7240), ('k', 7224)]
    """
    terms = case.split("-")
    extent = round(largest ** (1 / max(map(len, terms))))
    steps = {label: 24 if label in {term[0] for term in terms} else 4 for label in sorted(set("".join(terms)))}
    sizes = {label: max(step, extent // step * step) for label, step in steps.items()}

    def elements(term: str) -> int:
        return math.prod(sizes[label] for label in term)

    while elements(most := max(terms, key=elements)) < largest / 2:  # multiples of 24 below 48 are far between
        shortest = min(most, key=sizes.__getitem__)
        sizes[shortest] += steps[shortest]
    return sizes


@dataclass(frozen=True)
class Contraction(Experiment):
    """``work`` is the case, such as "abj-bka-kj"."""

    sizes: Sizes = ()

    @classmethod
    def of(cls, group: str, case: str, sizes: dict[str, int], kind: str) -> Contraction:
        d, a, b = map(set, case.split("-"))
        m, n, k = (math.prod(sizes[label] for label in labels) for labels in (d - b, d - a, (a & b) - d))
        return cls(group, case, kind, m, n, k, sizes=tuple(sorted(sizes.items())))

    @property
    def terms(self) -> tuple[str, str, str]:
        """The indices of D, A and B, in C order."""
        d, a, b = (term[::-1] for term in self.work.split("-"))
        return d, a, b

    @property
    def spec(self) -> str:
        d, a, b = self.terms
        return f"{a},{b}->{d}"

    def shape(self, term: str) -> tuple[int, ...]:
        sizes = dict(self.sizes)
        return tuple(sizes[label] for label in term)

    @property
    def input_bytes(self) -> int:
        return sum(math.prod(self.shape(term)) for term in self.terms[1:]) * ITEMSIZES[self.kind]

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        d, a, b = map(self.shape, self.terms)
        return SimpleNamespace(
            a=lib.normal(1, math.prod(a), self.kind, 2 * i).reshape(a),
            b=lib.normal(1, math.prod(b), self.kind, 2 * i + 1).reshape(b),
            out=lib.empty(1, math.prod(d), self.kind).reshape(d),
            reference=None,
        )

    def ours(self, lib: Lib, x: Any) -> Call:
        return lambda: gemmkit.einsum(self.spec, x.a, x.b, out=x.out)

    def peers(self, lib: Lib, x: Any) -> Call:
        def call() -> None:
            x.peer_out = lib.einsum(self.spec, x.a, x.b)

        return call

    def title(self, lib: Lib) -> str:
        return f"{lib.peer_name()}: einsum"

    def error_of(self, lib: Lib, x: Any, out: Any) -> float:
        if x.reference is None:
            x.reference = lib.einsum(self.spec, lib.wide(x.a), lib.wide(x.b))
        return float(lib.relative_error(out, x.reference))


def contraction() -> Iterator[Contraction]:
    for kind in KINDS:
        yield Contraction.of("contraction", *PAPER, kind)


def tccg(largest: int = LARGEST) -> Iterator[Contraction]:
    for kind in KINDS:
        for case in tccg_cases():
            yield Contraction.of("tccg", case, tccg_sizes(case, largest), kind)
