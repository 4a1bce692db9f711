"""docs/programs.md: its blocks run, and the texts that it shows are those that are derived."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.support import markdown

PAGE = markdown.ROOT / "docs" / "programs.md"


def test_programs(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    given = markdown.blocks(PAGE)
    shown = {block.line: after.text for block, after in pairwise(given) if (block.language, after.language) == ("python", "text")}
    assert len(shown) == sum(block.language == "text" for block in given) == 17

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        assert said == shown.get(block.line, "")

    assert markdown.run(PAGE, monkeypatch, rng, {}, check) == 22
