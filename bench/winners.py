"""The table of measured mappings that ships (`gemmkit.tuning.winners`), made of results of `bench.choice`.

    python -m bench.winners bench/results/choice.json ...     writes gemmkit/tuning/winners.json

An entry is a product whose best mapping took at most 0.93 of the default's time, unless the model chooses that mapping by
now. Where two entries are near each other, the one that gains more is kept.
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
from gemmkit.layouts import Plain
from gemmkit.problem import describe_all, resolve
from gemmkit.runtime.device import H100, assumed
from gemmkit.tuning import winners
from gemmkit.tuning.candidates import Candidate
from gemmkit.tuning.winners import Winner

WORTH = 0.93  # of the default's time: what a mapping has to come down to


def entries(rows: Iterable[dict[str, Any]]) -> Iterator[Winner]:
    """The rows' winners that the model does not choose."""
    for row in rows:
        timed = [one for one in row["tried"] if "ratio" in one]
        best = min(timed, key=lambda one: one["ratio"], default=None)
        if best is None or best["ratio"] > WORTH:
            continue
        found = entry(row, Candidate.of_plain(best["mapping"]), best["ratio"])
        if found is not None:
            yield found


def entry(row: dict[str, Any], candidate: Candidate, ratio: float) -> Winner | None:
    """The entry of a row; None where the model chooses that mapping, or computes the transpose."""
    product = Product("choice", "", row["dtype"], row["m"], row["n"], row["k"], order=row["layout"])
    x = product.operands(HostArrays(), 0)
    with assumed(H100), winners.without():
        default = ways(product, 0)[0].config
        with gemmkit.emulate():
            infos = describe_all(x.a, x.b, None, x.out)
            call = resolve(*infos, None, {}, candidate)
    a, b = call.config.global_a_layout, call.config.global_b_layout
    assert isinstance(a, Plain) and isinstance(b, Plain)
    if (default.mapping, default.operator) == (call.config.mapping, call.config.operator):
        return None
    if default.global_d_layout.vector_axis != call.config.global_d_layout.vector_axis:
        return None
    kind = winners.class_of({"a": infos[0], "b": infos[1]}, a, b, product.n)
    return Winner(kind, (product.m, product.n, product.k), candidate, ratio)


def apart(found: Iterable[Winner]) -> list[Winner]:
    """Those of which none is near another that gains more, in the order of their classes and sizes."""
    kept: list[Winner] = []
    for one in sorted(found, key=lambda one: one.ratio):
        if winners.nearest(kept, one.kind, one.sizes) is None:
            kept.append(one)
    return sorted(kept, key=lambda one: (one.kind, one.sizes))


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(prog="python -m bench.winners", description="The table of measured mappings.")
    made.add_argument("files", nargs="+", type=Path, help="results of bench.choice")
    made.add_argument("--into", type=Path, default=winners.FILE)
    options = made.parse_args(arguments)
    contents = [report.read(file) for file in options.files]
    found = apart(one for content in contents for one in entries(content["rows"]))
    plain = [{"class": one.kind, "sizes": one.sizes, "ratio": one.ratio, "mapping": one.candidate.plain()} for one in found]
    measured = ", ".join(f"{content['device']}, {content['date'][:10]}" for content in contents)
    lines = ",\n".join("  " + json.dumps(one) for one in plain)
    options.into.write_text(f'{{"measured": {json.dumps(measured)}, "winners": [\n{lines}\n]}}\n')
    print(f"{len(found)} mappings in {options.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
