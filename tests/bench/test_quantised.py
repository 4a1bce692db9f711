"""`bench.quantised` without a GPU: a small case in the emulator is a row, and a wrong product is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
from bench import quantised, report  # noqa: E402
from bench.harness import WrongResult  # noqa: E402


@pytest.mark.parametrize("case", [quantised.QuantisedCase(64, 64, 128, "bf16", 64, True), quantised.QuantisedCase(3, 32, 64, group=32),
                                  quantised.QuantisedCase(16, 64, 128, "e4m3")])
def test_a_row(case: quantised.QuantisedCase) -> None:
    with gk.emulate():
        row = quantised.row(case, "cpu", 2)
    assert row["ratio"] > 0 and row["error"] < 8 * quantised.TOLERANCE and (row["m"], row["n"], row["k"]) == case[:3]


def test_a_wrong_product_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    of = quantised.QuantisedCase.dense
    monkeypatch.setattr(quantised.QuantisedCase, "dense", lambda case, *given: 1.1 * of(case, *given))
    with gk.emulate(), pytest.raises(WrongResult, match="relative error"):
        quantised.row(quantised.QuantisedCase(3, 32, 64, group=32), "cpu", 2)


@pytest.mark.thorough
def test_it_starts(tmp_path: Path) -> None:
    assert quantised.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    assert len(report.read(tmp_path / "quantised.json")["rows"]) == 1
