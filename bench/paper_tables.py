"""Tables of mixed.json (with ncu/diagonal.json), rivals.json and networks.json; `python -m bench.asked --into` writes them.

They stand in docs/experiments.md and docs/peers.md, each between the marks that `marks` gives.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report, verdicts

Row = Mapping[str, Any]
ORDERS = {order: order for order in ("nn", "nt", "tn", "tt")}
ALGEBRAS = {"complex": "complex", "dual": "dual"}
#: What Table 2 of the paper adds to A B + C, and cuBLAS's time over the paper's own.
TABLE2 = {
    "matmul": ("-", 0.84), "relu": ("ReLU on D", 0.91), "bias": ("bias", 0.91), "bias relu": ("bias, ReLU on D", 0.91),
    "bias relu c": ("bias, ReLU on C and D", 1.0), "table2": ("bias, ReLU on C and D, relu(A + 1), B + 1", 1.07),
}  # fmt: skip
COUNTED = {"cublas": "cuBLASLt, matrix in memory", "product": "gemmkit, matrix in memory", "diagonal": "gemmkit, diagonal"}


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [line(head), "|" + "---|" * len(head), *map(line, rows), ""]


def measured_on(content: Mapping[str, Any]) -> str:
    pairs = ", ".join(str(n) for n in sorted({row["pairs"] for row in content["rows"] if "pairs" in row}))
    return (f"On {content['device']}, driver {content['driver']}; measured {content['date'][:16].replace('T', ' ')}"
            f"{', pairs a row: ' * bool(pairs)}{pairs}. Ratios: the peer's time over ours.")


def grid(rows: Sequence[Row], column: str, titles: Mapping[str, str]) -> list[str]:
    """A line for each size, with a ratio for each value of ``column``, and the best of our speeds."""
    found = []
    for size in dict.fromkeys(row["m"] for row in rows):
        mine = {row[column]: row for row in rows if row["m"] == size}
        ratios = [f"{mine[x]['ratio']:.2f}" if x in mine else "-" for x in titles]
        found.append([str(size), *ratios, f"{max(row['tflops'] for row in mine.values()):.0f}"])
    return table(["M = N = K", *titles.values(), "gemmkit, TFLOP/s"], found)


def squares(rows: Sequence[Row]) -> list[str]:
    ratios = [row["ratio"] for row in rows]
    mean = verdicts.geometric_mean(ratios)
    return [f"**Fig. 8**: D = A B + C beside cuBLASLt. Geometric mean {mean:.3f}, worst {min(ratios):.2f}.",
            "The paper reaches 0.82 to 0.86 from 2048 on.", "", *grid(rows, "layout", ORDERS)]


def counted(counts: Mapping[str, Mapping[str, float]]) -> list[str]:
    given = [counts.get(one, {}) for one in COUNTED]
    names = [name for name in dict.fromkeys(name for one in given for name in one)            # of pipes, their sum alone
             if name not in ("seconds", "kernels") and not name.startswith("tensor instructions _")]
    rows = [[name, *(f"{one[name]:,.0f}" if name in one else "-" for one in given)] for name in names]
    return ["Counts of one launch, by `python -m bench.counted` (ncu):", "", *table(["", *COUNTED.values()], rows)]


def fusion(rows: Sequence[Row]) -> list[str]:
    found = []
    for work, (added, paper) in TABLE2.items():
        mine = [row for row in rows if row["work"] == work]
        if not mine:
            continue
        cells = []
        for is_kernels in (True, False):
            some = [row for row in mine if ("by kernels" in row["peer"]) == is_kernels]
            cells += [f"{some[0]['peer_us']:.0f}", f"**{some[0]['ratio']:.2f}**"] if some else ["-", "-"]
        found.append([added, f"{mine[0]['ours_us']:.0f}", *cells[:2], f"{paper:.2f}", *cells[2:]])
    head = ["added to A B + C", "gemmkit, us", "with kernels, us", "ratio", "the paper's", "fused, us", "ratio"]
    return ["**Table 2**: 4096. The peer is cuBLASLt's product with kernels of PyTorch, as in the paper, and cuBLASLt with",
            "what it fuses itself.", "", *table(head, found)]


def mixed(content: Mapping[str, Any], counts: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """The paper's figures and tables with C and D in float32."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in content["rows"]:
        rows[row["group"]].append(row)
    yield from (measured_on(content), "")
    if rows["mixed"]:
        yield from squares(rows["mixed"])
    if rows["wmma"]:
        yield from ("The same through the WMMA operator, which is the paper's:", "", *grid(rows["wmma"], "layout", ORDERS))
    for row in rows["mixed_diagonal"]:
        yield (f"**Table 1**: D = diag(a) B + C of 4096 takes {row['ours_us']:.0f} us, and cuBLASLt on the matrix in memory "
               f"{row['peer_us']:.0f} us:")
        yield from (f"{row['ratio']:.2f} times as fast (the paper: 6.37).", "")
    if counts:
        yield from counted(counts)
    if rows["mixed_fusion"]:
        yield from fusion(rows["mixed_fusion"])
    if rows["mixed_algebras"]:
        yield "**Fig. 9**: complex and dual numbers, beside 4 and 3 products of planes by cuBLASLt: the same numbers."
        yield from ("The paper's complex numbers reach 0.59 of CUTLASS.", "")
        yield from grid(rows["mixed_algebras"], "work", ALGEBRAS)
    for row in rows["mixed_contraction"]:
        yield (f"**Table 3**: the contraction takes {row['ours_us']:.0f} us, and a transposition of A with cuBLASLt's "
               f"product (TTGT) {row['peer_us']:.0f} us:")
        yield from (f"ratio **{row['ratio']:.2f}** (the paper: 0.81 of cuTENSOR's TTGT).", "")
    yield from failures(content)


def rivals(content: Mapping[str, Any]) -> Iterator[str]:
    """Each work beside each rival."""
    rows, last = [], ""
    for row in content["rows"]:
        what = row["case"].partition(": ")[2].partition(" against ")[0]
        size = next(word for word in what.split() if re.fullmatch(r"\d+(x\d+)+", word))
        cells = ["", ""] if what == last else [row["work"], size.replace("x", " x ")]
        rows.append([*cells, f"{row['ours_us']:.1f}", row["peer"], f"{row['peer_us']:.1f}", f"**{row['ratio']:.2f}**"])
        last = what
    yield from (measured_on(content), "", *table(["work", "size", "gemmkit, us", "rival", "its us", "ratio"], rows))
    yield from failures(content)


def networks(content: Mapping[str, Any]) -> Iterator[str]:
    """Fig. 15 of paper 000: five networks, each by several ways, in CUDA graphs."""
    ways = {"unfused": "unfused graph", "attention alone": "attention graph", "PyTorch's best": "peer_us",
            "accelerate": "ours graph", "backend": "backend graph"}
    rows, gains = [], []
    for row in content["rows"]:
        if "," not in row["work"]:                         # the others are pairs of the same times
            us = {**row["us"], "peer_us": row["peer_us"]}
            best = min(us[way] for way in ("ours graph", "backend graph") if way in us)
            gains.append(us["unfused graph"] / us["attention graph"])
            rows.append([row["network"], row["dtype"], *(f"{us[way]:.0f}" if way in us else "" for way in ways.values()),
                         f"**{gains[-1]:.2f}**", f"**{us['unfused graph'] / best:.2f}**", f"**{row['ratio']:.2f}**"])
    heads = ["network", "dtype", *(f"{way}, us" for way in ways), "attention alone, of unfused", "best, of unfused",
             "best, of PyTorch's best"]
    yield from (measured_on(content), "", *table(heads, rows))
    if gains:
        found = f"{min(gains):.2f} to {max(gains):.2f}"
        yield f"The paper's attention alone gains up to 1.59 on an A6000; here it gains {found}."


def failures(content: Mapping[str, Any]) -> Iterator[str]:
    failed = content.get("failed", {})
    if failed:
        yield from ("Not measured:", "", *(f"* {case}: {why}" for case, why in failed.items()))


def _of_mixed(results: Path) -> Iterator[str]:
    counts = results / "ncu" / "diagonal.json"
    return mixed(report.read(results / "mixed.json"), json.loads(counts.read_text()) if counts.exists() else {})


#: By the words of their marks; each takes the folder of results.
TABLES: dict[str, Callable[[Path], Iterator[str]]] = {
    "mixed": _of_mixed, "rivals": lambda results: rivals(report.read(results / "rivals.json")),
    "networks": lambda results: networks(report.read(results / "networks.json")),
}


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: python -m bench.asked -->", f"<!-- end of {name} -->"
