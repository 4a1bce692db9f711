"""Pictures of a result file whose rows have groups (`bench.hopper`, `bench.experiments`): one a group, a line a row.

A dot is the ratio, with half the spread to each side; a tick is the bar, a triangle the aim; a dashed line is a group's
geometric mean where something is asked of that. Of the mappings only the best of each type, size and layout are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.verdicts import GROUPS, MEANS, geometric_mean, grouped, size, verdict

BEST = 6  # mappings of a type, size and layout
WIDE = 3  # ratios beyond which the axis is logarithmic
TALLEST = 48  # rows above each other; more of them stand side by side
COLOURS = {"aim": "tab:green", "bar": "tab:blue", "missed": "tab:red", "": "0.4"}


def label(group: str, row: Mapping[str, Any]) -> str:
    """What stands left of a row's dot."""
    against = " (against the plain product)" if group == "fused" and row["peer"].startswith("gemmkit") else ""
    config = row.get("config", "default")
    work = "" if group in ("square", "ragged", "types", "mappings") else f"{row['work']} "
    return f"{work}{row['dtype']} {size(row)} {row['layout']}{'' if config == 'default' else ' ' + config}{against}"


def drawn(group: str, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of a group that the picture has."""
    if group != "mappings":
        return list(rows)
    taken: dict[tuple, int] = {}
    found = []
    for row in rows:  # the best first
        key = row["dtype"], row["m"], row["n"], row["k"], row["layout"]
        taken[key] = taken.get(key, 0) + 1
        if taken[key] <= BEST:
            found.append(row)
    return found


def pictures(content: Mapping[str, Any], path: Path) -> dict[str, Path]:
    """Where the picture of each group goes: ``path`` itself where there is one group, else beside it, by its name."""
    groups = [group for group, _ in grouped(content["rows"])]
    return {group: path if len(groups) == 1 else path.with_name(f"{path.stem}-{group}{path.suffix}") for group in groups}


def draw_groups(content: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw the ``content`` of a result file, a picture a group (`pictures`); the suffix of ``path`` names the format."""
    places = pictures(content, path)
    for group, rows in grouped(content["rows"]):
        draw_group(content, group, drawn(group, rows), places[group])
    return list(places.values())


def draw_group(content: Mapping[str, Any], group: str, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw one group's rows into ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = -(-len(rows) // TALLEST)
    tall = -(-len(rows) // columns)
    figure, axes = pyplot.subplots(
        1, columns, sharex=True, squeeze=False, figsize=(8.5 * columns, 1.4 + 0.19 * (tall + 1)), layout="constrained"
    )
    for n, panel in enumerate(axes[0]):
        some = rows[n * tall : (n + 1) * tall]
        for y, row in enumerate(some):
            bar, aim = row.get("bar"), row.get("aim")
            colour = COLOURS[verdict(row["ratio"], bar, aim)]
            half = (row.get("spread") or 0.0) / 2
            panel.errorbar(row["ratio"], y, xerr=half, fmt="o", color=colour, markersize=4, capsize=2)
            if bar is not None:
                panel.plot(bar, y, marker="|", color="black", markersize=9)
            if aim is not None:
                panel.plot(aim, y, marker=">", color="0.6", markersize=4)
        panel.axvline(1.0, color="0.5", linewidth=1)
        if group in MEANS:
            mean = geometric_mean([row["ratio"] for row in rows])
            panel.axvline(mean, color=COLOURS[verdict(mean, *MEANS[group])], linewidth=1, linestyle="--")
        panel.set_yticks(range(len(some)), [label(group, row) for row in some], fontsize=7)
        panel.set_ylim(tall - 0.25, -0.75)
        panel.grid(axis="x", alpha=0.3)
        panel.set_xlabel("peer's time / ours   (|: the bar, >: the aim; red: missed)", fontsize=8)
    every = [row["ratio"] for row in rows]
    asked = [row[key] for row in rows for key in ("bar", "aim") if row.get(key) is not None]
    most = max(1.1, *every, *asked)
    if most > WIDE:
        ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if min(every) / 2 <= tick <= 2 * most]
        axes[0, 0].set_xscale("log")
        axes[0, 0].set_xticks(ticks, map(str, ticks))
        axes[0, 0].minorticks_off()
        axes[0, 0].set_xlim(min(0.5, *every) / 1.1, most * 1.1)
    else:
        axes[0, 0].set_xlim(min(0.5, *every) - 0.05, most + 0.05)
    figure.suptitle(f"{GROUPS[group]}\n{content['device']}, {content['date'][:10]}", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
