"""docs/pytorch.md: its blocks run, one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import markdown

torch: Any = pytest.importorskip("torch")


def test_pytorch(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        assert not said, said

    assert markdown.run(markdown.ROOT / "docs" / "pytorch.md", monkeypatch, rng, {}, check) == 10
