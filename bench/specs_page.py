"""docs/design/specs.md's figures, from `bench/results/specs.json` alone: `python -m bench.specs_page`.

    python -m bench.specs_page                          the tables
    python -m bench.specs_page --into docs/design/specs.md     write them into the text, between its two marks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import marks, report
from bench.verdicts import geometric_mean

RESULTS = Path(__file__).parent / "results" / "specs.json"
BEGIN, END = "<!-- measured: python -m bench.specs_page --into docs/design/specs.md -->", "<!-- end of what was measured -->"

Row = Mapping[str, Any]


def large(rows: Sequence[Row]) -> list[str]:
    """The decompositions and listings: a line for each schedule and size, with both ratios."""
    lines = ["| schedule | M = N = K | time | TFLOP/s | template's time by ours | cuBLAS's time by ours |", "|---" * 6 + "|"]
    mine = [row for row in rows if row["group"] in ("decompositions", "listings")]
    for work, size in dict.fromkeys((row["work"], row["m"]) for row in mine):
        of = {row["peer"].startswith("gemmkit"): row for row in mine if (row["work"], row["m"]) == (work, size)}
        row = of.get(False) or of[True]
        ratios = [f"{of[is_template]['ratio']:.2f}" if is_template in of else "" for is_template in (True, False)]
        lines.append(f"| {work} | {size} | {row['ours_us']:.1f} us | {row['tflops']:.1f} | {' | '.join(ratios)} |")
    return lines


def staged(rows: Sequence[Row]) -> list[str]:
    """One schedule of tensor cores, by how its tiles lie in shared memory: the time at each size, TFLOP/s at the last."""
    mine = {(row["work"], row["m"]): row for row in rows if row["group"] == "staged"}
    if not mine:
        return []
    sizes = sorted({size for _, size in mine})
    columns = [*map(str, sizes), f"TFLOP/s at {sizes[-1]}", "cuBLAS's time by ours"]
    lines = [f"| 128 x 128 tiles in steps of 64 | {' | '.join(columns)} |"]
    lines.append("|---" * (len(sizes) + 3) + "|")
    for work in dict.fromkeys(work for work, _ in mine):
        of = [mine[work, size] for size in sizes]
        times = " | ".join(f"{row['ours_us']:.1f} us" for row in of)
        lines.append(f"| {work} | {times} | {of[-1]['tflops']:.0f} | {of[-1]['ratio']:.2f} |")
    return lines


def small(rows: Sequence[Row]) -> list[str]:
    """M = N down, K across: cuBLAS's time by ours. A star stands where a schedule was the fastest."""
    mine = {(row["m"], row["k"]): row for row in rows if row["group"] == "small"}
    if not mine:
        return []
    sizes, depths = (sorted({key[n] for key in mine}) for n in (0, 1))
    lines = ["| M = N | " + " | ".join(f"K = {k}" for k in depths) + " |", "|---" * (len(depths) + 1) + "|"]
    for size in sizes:
        row = [mine.get((size, k)) for k in depths]
        lines.append(f"| {size} | " + " | ".join("" if one is None else f"{one['ratio']:.2f}{'*' * is_schedule(one)}"
                                                 for one in row) + " |")
    ratios = [row["ratio"] for row in mine.values()]
    chosen = Counter("a schedule" if is_schedule(row) else "`gemmkit.matmul`" for row in mine.values())
    twice = [f"{m} x {m} x {k}" for (m, k), row in mine.items() if row["ratio"] >= 2]
    return [*lines, "", f"Geometric mean {geometric_mean(ratios):.2f} of {len(ratios)} products, the worst "
            f"{min(ratios):.2f}, {sum(ratio < 1 for ratio in ratios)} below 1. The fastest was "
            + ", ".join(f"{name} in {count}" for name, count in chosen.items())
            + f". Twice as fast as cuBLAS: {', '.join(twice) or 'none'}."]


def is_schedule(row: Row) -> bool:
    return bool(row["config"].startswith("schedule"))


def text(path: Path = RESULTS) -> str:
    """All that stands between the page's marks."""
    if not path.exists():
        return "Not measured yet: `python -m bench.experiments specs --out bench/results/specs.json`, on a GPU."
    content = report.read(path)
    rows = content["rows"]
    head = (f"One {content['device']}, {content['date'][:10]}, commit {content['commit']}, `bench/results/specs.json`, "
            "CUDA graphs; ratios are of one run, in turns.")
    failed = [f"Not measured: {case} ({message})." for case, message in content.get("failed", {}).items()]
    title = ("Small matrices, float16 with a float32 result: cuBLAS's time by that of the fastest of nine schedules\n"
             "(marked *) and `gemmkit.matmul`.")
    return "\n".join([head, "", *large(rows), "", *staged(rows), "", title, "", *small(rows), *failed])


def main(arguments: Sequence[str] | None = None) -> int:
    return marks.command("bench.specs_page", text, BEGIN, END, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
