"""docs/cupy.md: its block runs, on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import markdown

pytestmark = pytest.mark.gpu


def test_cupy(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    pytest.importorskip("cupy")

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        assert not said, said
        if "using" in names:
            a, b = (names[name].get().astype("f8") for name in "ab")
            assert all(np.allclose(names[x].get(), wanted, rtol=1e-4)
                       for x, wanted in (("d", a @ b), ("e", (a @ b).T), ("f", a @ b)))

    assert markdown.run(markdown.ROOT / "docs" / "cupy.md", monkeypatch, rng, {}, check, emulated=False) == 1
