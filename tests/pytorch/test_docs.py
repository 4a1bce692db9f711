"""docs/pytorch.md and the pages about `accelerate` and `torch.compile`: their blocks run, one after the other, and print what is
shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import markdown

torch: Any = pytest.importorskip("torch")


def test_pytorch(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        assert not said, said

    assert markdown.run(markdown.ROOT / "docs" / "pytorch.md", monkeypatch, rng, {}, check) == 15


def test_accelerate(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """The table is the one that is shown; of the sample's difference its number alone may be another."""
    path = markdown.ROOT / "docs" / "how_to" / "accelerate.md"
    shown = [block.text.splitlines() for block in markdown.blocks(path) if block.language == "text"]

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        if said:
            lines, wanted = said.splitlines(), shown.pop(0)
            assert lines[:len(wanted) - 1] == wanted[:-1] and len(lines) == len(wanted)
            assert lines[-1].split()[:4] == wanted[-1].split()[:4]

    torch.manual_seed(0)
    assert markdown.run(path, monkeypatch, rng, {}, check) == 3
    assert not shown


def test_compile(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    path = markdown.ROOT / "docs" / "how_to" / "compile.md"
    shown = [block.text.strip() for block in markdown.blocks(path) if block.language == "text"]

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        if said:
            assert said.strip() == shown.pop(0)

    torch.manual_seed(0)
    torch._dynamo.reset()
    assert markdown.run(path, monkeypatch, rng, {}, check) == 2
    assert not shown
