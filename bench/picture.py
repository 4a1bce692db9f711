"""README's picture, from `bench/results` alone: `python -m bench.picture docs/measured.svg`.

A bar a group: the geometric mean of its ratios to the library that has the product, with a line from the worst to the best,
on a logarithmic scale. Groups are lines of the table in docs/measured.md (`bench.readme`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from bench import readme, verdicts

#: What the picture calls the groups that it shows, by the table's first words.
SHOWN = {
    "f16, bf16 squares": "f16, bf16 squares, cuBLAS",
    "float32": "float32 squares, cuBLAS",
    "float64": "float64 squares, cuBLAS",
    "f16, 1 to 32 rows": "f16, 1 to 32 rows, cuBLAS",
    "stacks of f16": "stacks, torch.bmm",
    "attention, f16": "attention, cuDNN",
    "softmax": "softmax and norms, PyTorch",
    "gated units": "gated units, LSTM, cuBLAS",
    "`mlp`": "perceptrons, cuBLASLt",
    "TCCG's 48 contractions, f16": "contractions f16, torch.einsum",
    "TCCG's 48 contractions, f32": "contractions f32, torch.einsum",
    "diagonal": "diagonal x dense, cuBLAS",
    "random sizes": "300 random products, cuBLAS",
}
LEAST, MOST = 0.25, 8.0
LEFT, WIDE, HIGH, TOP = 232, 420, 22, 48


def across(ratio: float) -> float:
    """Where a ratio stands, in pixels."""
    share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return LEFT + WIDE * share


def drawn(results: Path = readme.RESULTS) -> str:
    """The picture's text."""
    rows = []
    for begin, name in SHOWN.items():
        line = next(line for line in readme.LINES if line.what.startswith(begin))
        ratios = [row["ratio"] for row in line.rows(results)]
        rows.append((name, verdicts.geometric_mean(ratios), min(ratios), max(ratios)))
    height = TOP + HIGH * len(rows) + 12
    found = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" font-family="sans-serif" font-size="13">',
             f'<rect width="720" height="{height}" fill="#ffffff"/>',
             '<text x="12" y="20" font-weight="bold" fill="#222">Speed on an H200, of the library\'s (1 is equal)</text>']
    for tick in (0.25, 0.5, 1, 2, 4, 8):
        place, heavy = across(tick), tick == 1
        found.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{height - 12}" '
                     f'stroke="{"#222" if heavy else "#ddd"}"/>'
                     f'<text x="{place:.1f}" y="{TOP - 3}" text-anchor="middle" font-size="10" fill="#555">{tick:g}</text>')
    for n, (name, mean, worst, best) in enumerate(rows):
        y = TOP + HIGH * n + 12
        left, right = min(across(1), across(mean)), max(across(1), across(mean))
        found.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="#222">{name}</text>'
                     f'<rect x="{left:.1f}" y="{y - 6}" width="{max(1.0, right - left):.1f}" height="12" '
                     f'fill="{"#00897b" if mean >= 1 else "#c2552d"}"/>'
                     f'<line x1="{across(worst):.1f}" x2="{across(best):.1f}" y1="{y}" y2="{y}" stroke="#222"/>'
                     f'<text x="{LEFT + WIDE + 10}" y="{y + 4}" fill="#222">{mean:.2f}</text>')
    return "\n".join([*found, "</svg>", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.picture", description="README's picture.")
    parser.add_argument("file", type=Path)
    parser.parse_args(arguments).file.write_text(drawn(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
