"""`python -m gemmkit explain --html`: one page that fetches nothing, with a toolkit and without."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from gemmkit import inspection
from gemmkit.cli import main
from gemmkit.operators import WGMMAOp
from gemmkit.report.banks import count
from gemmkit.report.page import page
from gemmkit.report.subject import of_call
from gemmkit.runtime.assemble import AssemblerError
from gemmkit.runtime.device import H100
from tests.support.sm90 import mapping


def test_a_page_without_a_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(*given: object) -> None:
        raise AssemblerError("no ptxas is here")

    monkeypatch.setattr(inspection, "assemble", none)
    file = tmp_path / "report.html"
    assert main(["explain", "--m", "64", "--n", "64", "--k", "64", "--html", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert re.findall('<section id="([a-z]+)">', text) == ["mapping", "banks", "resources"]
    assert not re.search("https?:|src=|href=|@import|url\\(", text)
    assert "no ptxas is here" in text and "gemmkit[cu13]" in text


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--html", str(tmp_path / "no" / "report.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_the_numbers_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*given: object) -> None:
        raise AssemblerError("none")

    monkeypatch.setattr(inspection, "assemble", none)
    x = np.zeros((64, 64), np.float16)
    subject = of_call(x, x, None, mapping("one", WGMMAOp(64)), device=H100)
    assert not isinstance(subject.run, str)
    rows, text = count(subject.run.events, subject.run.spec), page(subject)
    assert len(rows) == 2
    for row in rows:
        cells = "".join(f'<td class="n">{n:,}</td>' for n in (row.accesses, row.extra, row.without))
        assert f"<td>{row.operand}</td><td>wgmma</td>{cells}" in text
