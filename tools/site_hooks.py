"""What mkdocs does not know of the repository: pages show pictures of `bench/results`, which lies beside docs/. And where
Markdown differs: GitHub wants a bar within a table's code escaped, and Python's Markdown shows the escape.

mkdocs calls these functions by their names (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "bench" / "results"
BESIDE, INSIDE = "../bench/results/", "results/"


def on_files(files: Any, config: Any) -> Any:
    """The pictures become files of the site."""
    from mkdocs.structure.files import File

    for picture in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, INSIDE + picture.name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, **rest: Any) -> str:
    """Links to pictures lead there; code in tables shows its bars.

    >>> on_page_markdown("| `a \\\\| b` | two |")
    '| `a | b` | two |'
    """
    rows = re.compile(r"^\|.*\|$", re.MULTILINE)
    code = re.compile(r"`[^`\n]+`")
    return rows.sub(lambda row: code.sub(lambda span: span[0].replace(r"\|", "|"), row[0]), markdown.replace(BESIDE, INSIDE))
