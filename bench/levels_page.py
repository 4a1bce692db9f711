"""docs/levels.md's table, from `bench/results/levels.json` alone: `python -m bench.levels_page`.

    python -m examples.levels --json bench/results/levels.json       measures it, on a GPU
    python -m bench.levels_page --into docs/levels.md                writes it into the text, between its two marks
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bench import marks, report

RESULTS = Path(__file__).parent / "results" / "levels.json"
BEGIN, END = "<!-- measured: python -m bench.levels_page --into docs/levels.md -->", "<!-- end of what was measured -->"


def text(path: Path = RESULTS) -> str:
    """All that stands between the page's marks."""
    if not path.exists():
        return "Not measured yet: `python -m examples.levels --json bench/results/levels.json`, on a GPU."
    content = report.read(path)
    first = content["rows"][0]
    lines = [f"{content['device']}, {content['date'][:10]}, commit {content['commit']}, `bench/results/levels.json`; "
             f"{first['m']} x {first['n']} x {first['k']}, beside cuBLAS's product of the same type.", "",
             "| level | type | time | TFLOP/s | share of cuBLAS's speed |", "|---" * 5 + "|"]
    for row in content["rows"]:
        cells = (row["work"].removeprefix("Level "), row["dtype"], f"{row['ours_us']:.1f} us", f"{row['tflops']:.1f}",
                 f"{100 * row['ratio']:.0f} %")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def quoted(page: str, level: str) -> list[str]:
    """The blocks of Python in the section of a level, which names the level's file."""
    section = next((part for part in page.split("\n## ") if f"examples/levels/{level}.py" in part), "")
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    return marks.command("bench.levels_page", text, BEGIN, END, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
