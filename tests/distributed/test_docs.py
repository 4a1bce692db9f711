"""docs/distributed.md: its blocks run, one after the other, with one rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.support import markdown


def test_the_page(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    path = markdown.ROOT / "docs" / "distributed.md"
    given = markdown.blocks(path)
    shown = {block.line: after.text for block, after in pairwise(given) if (block.language, after.language) == ("python", "text")}
    assert len(shown) == sum(block.language == "text" for block in given) == 2

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        assert said == shown.get(block.line, "")

    assert markdown.run(path, monkeypatch, rng, {}, check) == 6
