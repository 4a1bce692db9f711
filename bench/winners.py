"""The table of measured mappings that ships (`gemmkit.tuning.candidates`), made of results of `bench.choice`.

    python -m bench.winners bench/results/choice.json ...     writes gemmkit/tuning/winners.json

An entry is a product whose best mapping took at most 0.93 of the time of the mapping that the model chooses by now (of that
which it chose then, where the one of now was not timed), unless a product near it that is in the files lost by it. Where two
entries are near each other, the one that gains more is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gemmkit
from bench import report
from bench.choice import ways
from bench.experiments.types import Product
from bench.prepare import HostArrays
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.plans.problem import resolve
from gemmkit.runtime.arrays import describe_all
from gemmkit.runtime.device import H100, assumed
from gemmkit.tuning import candidates
from gemmkit.tuning.candidates import Candidate, Winner

WORTH = 0.93  # of the default's time: what a mapping has to come down to
LAYOUTS = {"n": RowMajor, "t": ColMajor}
LOSES = 1.02  # of it: from here on a mapping is none for what is near


def entries(rows: Iterable[dict[str, Any]]) -> Iterator[Winner]:
    """The rows' winners that the model does not choose."""
    for row in rows:
        timed = [one for one in row["tried"] if "ratio" in one]
        best = min(timed, key=lambda one: one["ratio"], default=None)
        if best is None or best["ratio"] > WORTH:
            continue
        found = entry(row, timed, best)
        if found is not None:
            yield found


def entry(row: dict[str, Any], timed: Sequence[dict[str, Any]], best: dict[str, Any]) -> Winner | None:
    """The entry of a row; None where the model chooses a mapping that is as fast by now, or computes the transpose."""
    product = product_of(row)
    x = product.operands(HostArrays(), 0)

    def config(mapping: dict[str, Any]) -> Any:
        with assumed(H100), candidates.without(), gemmkit.emulate(mapping="device"):
            return resolve(*describe_all(x.a, x.b, None, x.out), None, {}, Candidate.of_plain(mapping)).config

    with assumed(H100), candidates.without():
        default = ways(product, 0)[0].config
    mine = config(best["mapping"])
    if default.global_d_layout.vector_axis != mine.global_d_layout.vector_axis:
        return None
    others = ((one, config(one["mapping"])) for one in timed)
    now = next((one["ratio"] for one, other in others if is_same(other, default)), 1.0)
    ratio = round(best["ratio"] / now, 4)
    if ratio > WORTH:
        return None
    return Winner(kind_of(row), (product.m, product.n, product.k), Candidate.of_plain(best["mapping"]), ratio)


def is_same(one: Any, other: Any) -> bool:
    return (one.mapping, one.operator) == (other.mapping, other.operator)


def product_of(row: dict[str, Any]) -> Product:
    return Product("choice", "", row["dtype"], row["m"], row["n"], row["k"], order=row["layout"])


def kind_of(row: dict[str, Any]) -> str:
    """The shape class of a row's product."""
    product = product_of(row)
    x = product.operands(HostArrays(), 0)
    with assumed(H100), gemmkit.emulate(mapping="device"):
        infos = describe_all(x.a, x.b, None, x.out)
    a, b = (LAYOUTS[order](info.dtype) for order, info in zip(row["layout"], infos[:2]))
    return candidates.class_of({"a": infos[0], "b": infos[1]}, a, b, product.n)


def holds(one: Winner, rows: Iterable[dict[str, Any]]) -> bool:
    """Whether no product near an entry lost by its mapping."""
    for row in rows:
        lost = any(
            tried.get("ratio", 0) > LOSES and Candidate.of_plain(tried["mapping"]) == one.candidate for tried in row["tried"]
        )
        if lost and one.distance((row["m"], row["n"], row["k"])) <= candidates.NEAR and kind_of(row) == one.kind:
            return False
    return True


def apart(found: Iterable[Winner]) -> list[Winner]:
    """Those of which none is near another that gains more, in the order of their classes and sizes."""
    kept: list[Winner] = []
    for one in sorted(found, key=lambda one: one.ratio):
        if candidates.nearest(kept, one.kind, one.sizes) is None:
            kept.append(one)
    return sorted(kept, key=lambda one: (one.kind, one.sizes))


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m bench.winners", description="The table of measured mappings.")
    made.add_argument("files", nargs="+", type=Path, help="results of bench.choice")
    made.add_argument("--into", type=Path, default=candidates.FILE)
    options = made.parse_args(arguments)
    contents = [report.read(file) for file in options.files]
    rows = [row for content in contents for row in content["rows"]]
    found = apart(one for one in entries(rows) if holds(one, rows))
    plain = [{"class": one.kind, "sizes": one.sizes, "ratio": one.ratio, "mapping": one.candidate.plain()} for one in found]
    measured = ", ".join(dict.fromkeys(f"{content['device']}, {content['date'][:10]}" for content in contents))
    lines = ",\n".join("  " + json.dumps(one) for one in plain)
    options.into.write_text(f'{{"measured": {json.dumps(measured)}, "winners": [\n{lines}\n]}}\n')
    print(f"{len(found)} mappings in {options.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
