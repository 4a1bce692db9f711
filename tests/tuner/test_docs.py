"""docs/tuning.md: its blocks run, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import markdown
from tests.support.patches import Set

pytestmark = [pytest.mark.gpu, pytest.mark.thorough]


def test_tuning(monkeypatch: pytest.MonkeyPatch, environment: Set, rng: np.random.Generator, tmp_path: Path) -> None:
    """Smaller, and some seconds each; what is found is kept in a folder of the test's."""
    pytest.importorskip("cupy")
    environment(GEMMKIT_CACHE_DIR=tmp_path)
    given: list[Any] = []

    def check(block: markdown.Block, names: dict[str, Any], said: str) -> None:
        given.append(said)
        assert np.allclose(names["d"].get(), 512)

    sizes = {"5000": "512", "tune(a, b)": "tune(a, b, budget=20)", '"imk,jkm->ij", a, b)': '"imk,jkm->ij", a, b, budget=20)',
             "tune(gemmkit.grouped, a_list, b_list)": "tune(gemmkit.grouped, a_list, b_list, budget=20)"}
    page = markdown.ROOT / "docs" / "tuning.md"
    assert markdown.run(page, monkeypatch, rng, sizes, check, emulated=False) == 2 and "us" in given[0]
