"""`bench.scaled` without a GPU: small cases in the emulator are rows, and a wrong product is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
from bench import report, scaled  # noqa: E402
from bench.harness import WrongResult  # noqa: E402


@pytest.mark.sample(2)
@pytest.mark.parametrize("work", scaled.WORKS)
def test_a_row(work: str) -> None:
    with gk.emulate():
        row = scaled.row(scaled.ScaledCase(work, *scaled.SMALL[0]), "cpu", 1, 1)
    assert row["ratio"] > 0 and row["error"] < scaled.TOLERANCE and row["peer"] == "float32"


def test_a_wrong_product_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    of = scaled.in_float32
    monkeypatch.setattr(scaled, "in_float32", lambda a, b, of_a, of_b: of(a, b, 1.1 * of_a, of_b))
    with gk.emulate(), pytest.raises(WrongResult, match="differs from the product in float32"):
        scaled.row(scaled.ScaledCase("blocks", *scaled.SMALL[0]), "cpu", 1, 1)


@pytest.mark.thorough
def test_it_starts(tmp_path: Path) -> None:
    assert scaled.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    assert len(report.read(tmp_path / "scaled.json")["rows"]) == len(scaled.WORKS) * len(scaled.SMALL)
