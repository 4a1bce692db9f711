"""docs/explain.md: its blocks run, and its picture is small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import markdown
from tests.support.patches import Seeded


def test_explain(monkeypatch: pytest.MonkeyPatch, replaced: Seeded, rng: np.random.Generator, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def no_page(explanation: Any, path: str) -> None:
        """The page itself is made in test_explain."""
        Path(path).write_text(repr(explanation), encoding="utf-8")

    replaced("gemmkit.tools.explain.Explanation.save", no_page)

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        assert ("D (128 x 256) = A (128 x 64) @ B (64 x 256)" in said) == ("print(said)" in block.text)

    assert markdown.run(markdown.ROOT / "docs" / "explain.md", monkeypatch, rng, {}, check) == 2
    assert (tmp_path / "report.html").exists()


def test_the_picture_is_small() -> None:
    assert (markdown.ROOT / "docs" / "explain.png").stat().st_size < 100_000
