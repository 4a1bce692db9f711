"""Draw a result file, from the file alone: `python -m bench.plot bench/results/gemm.json [picture.svg]`.

One line for each dtype and layout: above, the ratio to the peer by size; below, both speeds (both times where
the rows count no operations). Rows that have groups (`bench.hopper`) are drawn by group: `bench.plot_groups`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.plot_groups import draw_groups


def size(row: Mapping[str, Any]) -> str:
    """How the size is written under the axis: one number for a cube."""
    m, n, k = row["m"], row["n"], row["k"]
    return str(m) if m == n == k else f"{m}×{n}×{k}"


def speed(row: Mapping[str, Any], time: str) -> float:
    """TFLOP/s at the time that the key `time` has, or that time itself where a row counts no operations."""
    if "tflops" not in row:
        return float(row[time])
    return float(row["tflops"] * row["ours_us"] / row[time])


def draw(content: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw the `content` of a result file into `path`, whose suffix names the format (.png, .svg, .pdf). Rows with groups
    are drawn into a picture a group beside it. Returns the pictures.

    Raises:
        ValueError: the file has no rows to draw.
    """
    if not content["rows"]:
        raise ValueError(f"{content['bench']}: the result file has no rows to draw")
    if all("group" in row for row in content["rows"]):
        return draw_groups(content, path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    series: dict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in content["rows"]:
        series[row["work"], row["dtype"], row["layout"]].append(row)
    sizes = list(dict.fromkeys(size(row) for row in content["rows"]))
    works = {row["work"] for row in content["rows"]}

    figure, (ratio_axes, speed_axes) = pyplot.subplots(
        2, 1, sharex=True, figsize=(max(6.0, 1.1 * len(sizes) + 3.5), 7.0), layout="constrained"
    )
    for i, ((work, dtype, layout), rows) in enumerate(series.items()):
        label = " ".join([work] * (len(works) > 1) + [dtype, layout])
        x = [sizes.index(size(row)) for row in rows]
        half = [row.get("spread", 0.0) / 2 for row in rows]
        colour = f"C{i % 10}"
        ratio_axes.errorbar(
            x, [row["ratio"] for row in rows], yerr=half, marker="o", capsize=3, color=colour, label=label
        )
        speed_axes.plot(x, [speed(row, "ours_us") for row in rows], marker="o", color=colour, label=label)
        speed_axes.plot(x, [speed(row, "peer_us") for row in rows], marker="x", linestyle=":", color=colour)
    ratio_axes.axhline(1.0, color="0.5", linewidth=1)
    ratio_axes.set_ylim(0.0, 1.1 * max(1.0, *(row["ratio"] for row in content["rows"])))
    ratio_axes.set_ylabel("peer's time / ours")
    ratio_axes.legend(fontsize="small")
    speed_axes.set_yscale("log")
    speed_axes.yaxis.set_major_formatter(ScalarFormatter())
    speed_axes.yaxis.set_minor_formatter(ScalarFormatter())
    unit = "TFLOP/s" if "tflops" in content["rows"][0] else "time in µs"
    speed_axes.set_ylabel(f"{unit} (dotted: the peer)")
    speed_axes.set_xticks(range(len(sizes)), sizes, rotation=30 if max(map(len, sizes)) > 6 else 0)
    speed_axes.set_xlabel("M = N = K, or M×N×K")
    for axes in (ratio_axes, speed_axes):
        axes.grid(alpha=0.3)
    peers = ", ".join(dict.fromkeys(row["peer"] for row in content["rows"]))
    ratio_axes.set_title(
        f"{content['bench']} against {peers}\n{content['device']}, {content['date'][:10]}", fontsize="medium"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return [path]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description="Draw a result file.")
    parser.add_argument(
        "result", type=Path, help="a file that a bench wrote, such as bench/results/gemm.json"
    )
    parser.add_argument(
        "picture", type=Path, nargs="?", help="where to (.png, .svg, .pdf); default: beside the file, .png"
    )
    options = parser.parse_args(arguments)
    picture = options.picture or options.result.with_suffix(".png")
    print(*draw(report.read(options.result), picture), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
