"""The times of a search as a heat map over tile sizes, as of paper 003's exploration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemmkit.tuner.found import Tuned


def tiles(found: Tuned) -> dict[tuple[int, int], float]:
    """The least time of each tile's (M, N), in microseconds."""
    best: dict[tuple[int, int], float] = {}
    for row in found.rows:
        if row.microseconds is not None and row.config is not None:
            block = row.config.block_shape.size
            best[block.M, block.N] = min(row.microseconds, best.get((block.M, block.N), row.microseconds))
    return best


def sweep(found: Tuned, file: Path, flops: float) -> None:
    """Draw ``tiles`` as rates of a product of so many operations. Raises ValueError where nothing was timed."""
    best = tiles(found)
    if not best:
        raise ValueError("no mapping was timed: there is nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = (sorted({tile[axis] for tile in best}) for axis in (0, 1))
    rates = [[flops / best[m, n] / 1e6 if (m, n) in best else float("nan") for n in columns] for m in rows]
    figure = Figure(figsize=(1.6 + 0.9 * len(columns), 1.4 + 0.6 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    image = axes.imshow(rates, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel("columns of a block's tile")
    axes.set_ylabel("rows")
    axes.set_title(found.what, fontsize=9)
    highest = max(rate for row in rates for rate in row if rate == rate)
    for at_row, row in enumerate(rates):
        for at_column, rate in enumerate(row):
            if rate == rate:
                axes.text(at_column, at_row, f"{rate:.1f}", ha="center", va="center", fontsize=8,
                          color="white" if rate < 0.7 * highest else "black")
    figure.colorbar(image, label="Tflop/s")
    figure.savefig(file, dpi=150)
