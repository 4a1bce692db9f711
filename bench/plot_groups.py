"""The picture of a result file whose rows have groups (`bench.hopper`, `bench.experiments`): a panel a group, a line a row.

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


def draw_groups(content: Mapping[str, Any], path: Path) -> None:
    """Draw the ``content`` of a result file into ``path``, whose suffix names the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(group, drawn(group, rows)) for group, rows in grouped(content["rows"])]
    heights = [len(rows) + 1.5 for _, rows in panels]
    every = [row["ratio"] for _, rows in panels for row in rows]
    asked = [row[key] for _, rows in panels for row in rows for key in ("bar", "aim") if row.get(key) is not None]
    figure, axes = pyplot.subplots(
        len(panels), 1, sharex=True, squeeze=False, figsize=(9.0, 1.5 + 0.19 * sum(heights)), layout="constrained",
        height_ratios=heights,
    )  # fmt: skip
    for panel, (group, rows) in zip(axes[:, 0], panels, strict=True):
        for y, row in enumerate(rows):
            bar, aim = row.get("bar"), row.get("aim")
            colour = COLOURS[verdict(row["ratio"], bar, aim)]
            panel.errorbar(row["ratio"], y, xerr=row.get("spread", 0.0) / 2, fmt="o", color=colour, markersize=4, capsize=2)
            if bar is not None:
                panel.plot(bar, y, marker="|", color="black", markersize=9)
            if aim is not None:
                panel.plot(aim, y, marker=">", color="0.6", markersize=4)
        panel.axvline(1.0, color="0.5", linewidth=1)
        if group in MEANS:
            mean = geometric_mean([row["ratio"] for row in rows])
            panel.axvline(mean, color=COLOURS[verdict(mean, *MEANS[group])], linewidth=1, linestyle="--")
        panel.set_yticks(range(len(rows)), [label(group, row) for row in rows], fontsize=7)
        panel.set_ylim(len(rows) - 0.25, -0.75)
        panel.grid(axis="x", alpha=0.3)
        panel.set_title(GROUPS[group], fontsize="small", loc="left")
    most = max(1.1, *every, *asked)
    if most > WIDE:
        ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if min(every) / 2 <= tick <= 2 * most]
        axes[0, 0].set_xscale("log")
        axes[0, 0].set_xticks(ticks, map(str, ticks))
        axes[0, 0].minorticks_off()
        axes[0, 0].set_xlim(min(0.5, *every) / 1.1, most * 1.1)
    else:
        axes[0, 0].set_xlim(min(0.5, *every) - 0.05, most + 0.05)
    axes[-1, 0].set_xlabel("peer's time / ours   (|: the bar, >: the aim; red: missed)")
    figure.suptitle(f"{content['bench']}, {content['device']}, {content['date'][:10]}", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
