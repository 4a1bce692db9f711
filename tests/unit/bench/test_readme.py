"""The figures of docs/measured.md and README's picture are those of the result files, and every bench is measured by one command."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import all as every
from bench import picture, readme, report, verdicts
from bench.marks import put

ROOT = Path(__file__).parents[3]


def test_the_page_has_the_figures_of_the_results() -> None:
    """`python -m bench.readme --into docs/measured.md` was run after the last measurement."""
    text = (ROOT / "docs" / "measured.md").read_text()
    assert put(text, readme.text(), readme.BEGIN, readme.END) == text


def test_the_picture_is_that_of_the_results() -> None:
    """`python -m bench.picture docs/measured.svg` was."""
    assert (ROOT / "docs" / "measured.svg").read_text() == picture.drawn()


def test_a_line_is_of_its_rows(tmp_path: Path) -> None:
    for line in readme.LINES:
        path = tmp_path / f"{line.file}.json"
        if not path.exists():
            report.write(report.read(readme.RESULTS / path.name), path)
    before = readme.summaries(tmp_path)
    assert before == readme.summaries()
    content = report.read(tmp_path / "random.json")
    content["rows"][0]["ratio"] = 1e-3
    report.write(content, tmp_path / "random.json")
    changed = [line for line, old in zip(readme.summaries(tmp_path), before, strict=True) if line != old]
    assert len(changed) == 1 and "| 0.00 |" in changed[0]
    report.write({**content, "rows": []}, tmp_path / "random.json")
    with pytest.raises(ValueError, match="random.json has no rows of 'random sizes, orders and types'"):
        readme.summaries(tmp_path)


def test_a_text_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.md").write_text("no marks")
    with pytest.raises(ValueError, match="lacks"):
        readme.main(["--into", str(tmp_path / "text.md")])
    assert (tmp_path / "text.md").read_text() == "no marks"


def test_every_group_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """But for "mappings", which is for tuning, and "forced", a check of one number."""
    measured = [group for groups in every.FILES.values() for group in groups]
    assert len(measured) == len(set(measured))
    assert set(verdicts.GROUPS) - set(measured) == {"mappings", "forced"}
    assert every.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert "[1 of 21] hopper_square" in said and "[18 of 21] host" in said and "300 rows" in said
    assert {line.file for line in readme.LINES} <= set(every.NAMES)


def test_bad_calls(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["nothing"], "'nothing' is none of hopper_square"), (["--out", "x.json"], "a folder is needed")):
        with pytest.raises(SystemExit) as stop:
            every.main(arguments)
        assert stop.value.code == 2 and words in capsys.readouterr().err
