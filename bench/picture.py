"""README's picture, from `bench/results` alone: `python -m bench.picture docs/measured.svg`.

The rule: a bar for every line of the first table of docs/measured.md (`bench.readme.LIBRARIES`), sorted by the geometric
mean of its ratios to the fastest peer, on a logarithmic scale, with a line from the worst case to the best. Bars below 1
have another colour. Nothing is chosen by hand.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from bench import readme, verdicts

LEAST, MOST = 0.05, 20.0
TICKS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16)
LEFT, WIDE, HIGH, TOP = 400, 380, 19, 62
GAIN, LOSS = "#00897b", "#c2552d"


def across(ratio: float) -> float:
    """Where a ratio stands, in pixels."""
    share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return LEFT + WIDE * share


def drawn(results: Path = readme.RESULTS) -> str:
    """The picture's text."""
    rows = []
    for line in readme.LIBRARIES:
        ratios = line.ratios(results)
        rows.append((verdicts.geometric_mean(ratios), line.what.replace("`", ""), min(ratios), max(ratios), len(ratios)))
    rows.sort(reverse=True)
    slower = sum(mean < 1 for mean, *_ in rows)
    height = TOP + HIGH * len(rows) + 12
    found = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 870 {height}" font-family="sans-serif" font-size="12">',
             f'<rect width="870" height="{height}" fill="#ffffff"/>',
             '<text x="12" y="20" font-weight="bold" font-size="14" fill="#222">'
             'Speed of gemmkit over that of the fastest peer measured, every group</text>',
             f'<text x="12" y="38" fill="#555">Bar: geometric mean of the group. Line: worst to best case. '
             f'{len(rows) - slower} groups at 1 or above, {slower} below.</text>']
    for tick in TICKS:
        place, heavy = across(tick), tick == 1
        found.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{height - 12}" '
                     f'stroke="{"#222" if heavy else "#ddd"}"/>'
                     f'<text x="{place:.1f}" y="{TOP - 3}" text-anchor="middle" font-size="10" fill="#555">{tick:g}</text>')
    for n, (mean, name, worst, best, count) in enumerate(rows):
        y = TOP + HIGH * n + 11
        left, right = min(across(1), across(mean)), max(across(1), across(mean))
        found.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="#222">{escape(name)}</text>'
                     f'<rect x="{left:.1f}" y="{y - 5}" width="{max(1.0, right - left):.1f}" height="10" '
                     f'fill="{GAIN if mean >= 1 else LOSS}"/>'
                     f'<line x1="{across(worst):.1f}" x2="{across(best):.1f}" y1="{y}" y2="{y}" stroke="#222"/>'
                     f'<text x="{LEFT + WIDE + 10}" y="{y + 4}" fill="#222">{mean:.2f} ({count})</text>')
    return "\n".join([*found, "</svg>", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.picture", description="README's picture.")
    parser.add_argument("file", type=Path)
    parser.parse_args(arguments).file.write_text(drawn(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
