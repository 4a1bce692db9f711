"""The three pages about programs: their blocks run, and the texts that they show are those that are derived.

docs/design/programs.md and docs/reference/programs.md continue docs/programs.md.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import markdown

DOCS = markdown.ROOT / "docs"
GUIDE = DOCS / "programs.md"


@pytest.mark.kin(1)
@pytest.mark.parametrize(("page", "python", "text"), [("programs.md", 33, 1), ("design/programs.md", 16, 15),
                                                      ("reference/programs.md", 2, 2)])
def test_programs(page: str, python: int, text: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                  rng: np.random.Generator) -> None:
    both = tmp_path / "programs.md"
    before = "" if page == "programs.md" else GUIDE.read_text(encoding="utf-8")
    both.write_text(f"{before}\n{(DOCS / page).read_text(encoding='utf-8')}", encoding="utf-8")
    given = markdown.blocks(both)
    shown = {block.line: after.text for block, after in pairwise(given) if (block.language, after.language) == ("python", "text")}
    first = sum(block.language == "python" for block in markdown.blocks(GUIDE)) if before else 0
    wanted = range(first, sum(block.language == "python" for block in given))
    here = markdown.blocks(DOCS / page)
    assert len(wanted) == python and sum(block.language == "text" for block in here) == text
    assert sum((block.language, after.language) == ("python", "text") for block, after in pairwise(here)) == text

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        if block.line in shown or said:
            assert said == shown.get(block.line, "")

    assert markdown.run(both, monkeypatch, rng, {}, check, wanted) >= python
