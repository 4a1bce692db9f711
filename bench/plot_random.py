"""Draw the rows of `bench.experiments random`: `python -m bench.plot_random bench/results/random.json [picture.png]`.

A dot a product: its multiply-adds, and the peer's time over ours, coloured by type.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.verdicts import geometric_mean


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draw the ``content`` of a result file into ``path``. Raises ValueError where it has no such rows."""
    rows = [row for row in content["rows"] if row["group"] == "random"]
    if not rows:
        raise ValueError("the result file has no rows of the group 'random'")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.0, 5.0), layout="constrained")
    for dtype in sorted({row["dtype"] for row in rows}):
        own = [row for row in rows if row["dtype"] == dtype]
        mean = geometric_mean([row["ratio"] for row in own])
        axes.scatter(
            [row["m"] * row["n"] * row["k"] for row in own],
            [row["ratio"] for row in own],
            s=12,
            label=f"{dtype}: {len(own)}, geometric mean {mean:.2f}",
        )
    axes.axhline(1.0, color="0.5", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("multiply-adds")
    axes.set_ylabel("cuBLAS's time / ours")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    axes.set_title(f"Random shapes: {content['device']}, {content['date'][:10]}", fontsize="medium")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plot_random", description="Draw random shapes.")
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path, nargs="?")
    given = parser.parse_args(arguments)
    draw(report.read(given.result), given.picture or given.result.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
