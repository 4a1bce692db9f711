"""docs/specs.md: its Python blocks run, and print what the page shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import markdown

PAGE = markdown.ROOT / "docs" / "specs.md"


@pytest.mark.compile
def test_the_page(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    shown = [block.text for block in markdown.blocks(PAGE) if block.language == "text"]
    printed: list[str] = []

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        if said:
            printed.append(said)

    assert markdown.run(PAGE, monkeypatch, rng, {}, check) == 12
    assert printed == shown
