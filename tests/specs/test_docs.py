"""docs/specs.md: its Python blocks run, and print what the page shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import markdown
from tests.support.code_lines import source_of

PAGE = markdown.ROOT / "docs" / "specs.md"
OWN = markdown.ROOT / "docs" / "how_to" / "instruction.md"


@pytest.mark.parametrize("name", ["scalar", "registers", "shared_tile"])
def test_the_decompositions_are_those_that_are_measured(name: str) -> None:
    """The page's text is that of gemmkit/specs/products.py."""
    import re

    texts = [re.findall(rf"^{name} = \(.*?\.done\)$", text, re.MULTILINE | re.DOTALL)
             for text in (PAGE.read_text(encoding="utf-8"), source_of("gemmkit/specs/products.py"))]
    assert texts[0] == texts[1] and len(texts[0]) == 1


@pytest.mark.kin(1)
@pytest.mark.compile
def test_the_page(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    shown = [block.text for block in markdown.blocks(PAGE) if block.language == "text"]
    printed: list[str] = []

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        if said:
            printed.append(said)

    assert markdown.run(PAGE, monkeypatch, rng, {}, check) == 16
    assert printed == shown


@pytest.mark.compile
def test_an_instruction_of_ones_own(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """The page's instruction is entered for this test alone."""
    from gemmkit.specs import accesses

    monkeypatch.setattr(accesses, "_known", {kind: list(classes) for kind, classes in accesses._known.items()})
    accesses.instruction.cache_clear()
    shown = [block.text for block in markdown.blocks(OWN) if block.language == "text"]
    printed: list[str] = []

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        if said:
            printed.append(said)

    try:
        assert markdown.run(OWN, monkeypatch, rng, {}, check) == 4
    finally:
        accesses.instruction.cache_clear()
    assert printed == shown
