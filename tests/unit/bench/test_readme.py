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
    every = (ROOT / "docs" / "measured_rows.md").read_text()
    assert put(every, readme.rows_text(), readme.ROWS_BEGIN, readme.END) == every


def test_the_picture_is_that_of_the_results() -> None:
    """`python -m bench.picture docs/measured.svg` was."""
    assert (ROOT / "docs" / "measured.svg").read_text() == picture.drawn()


def test_every_row_belongs_to_one_line() -> None:
    """No result is left out of the page, and none counts twice: a group that loses cannot be dropped in silence."""
    rows = {(path.stem, n): 0 for path in readme.RESULTS.glob("*.json") for n in range(len(report.read(path)["rows"]))}
    for file in {line.file for line in readme.LINES}:
        content = report.read(readme.RESULTS / f"{file}.json")["rows"]
        for line in (line for line in readme.LINES if line.file == file):
            for n, row in enumerate(content):
                rows[file, n] += row.get("group") == line.group and line.of(row)
    wrong = {f"{file}: row {n}": count for (file, n), count in rows.items() if count != 1}
    assert rows and not wrong


def test_every_file_names_its_commit_and_its_card() -> None:
    for path in readme.RESULTS.glob("*.json"):
        content = report.read(path)
        assert content["commit"] and "dirty" not in content["commit"] and "NVIDIA" in content["device"], path.name
        assert content["rows"] and not content.get("failed"), f"{path.name} lacks {content.get('failed')}"


def test_a_case_counts_with_its_fastest_peer(tmp_path: Path) -> None:
    """Two peers of one case are one case, and the line has the lesser ratio."""
    line = readme.Line("", "rows", "rows")
    rows = [{"work": "softmax", "dtype": "f16", "m": 4, "n": n, "k": 1, "layout": "nn", "ours_us": 1.0, "peer": peer,
             "peer_us": ratio, "ratio": ratio, "error": 0.0, "graph": True, "group": "rows"}
            for n, peer, ratio in ((8, "PyTorch", 3.0), (8, "torch.compile", 0.5), (9, "PyTorch", 2.0))]
    report.write(report.document("rows", rows, "a GPU"), tmp_path / "rows.json")
    assert line.ratios(tmp_path) == [0.5, 2.0]


def test_the_picture_has_every_line_and_shows_losses(tmp_path: Path) -> None:
    text = picture.drawn()
    means = [verdicts.geometric_mean(line.ratios(readme.RESULTS)) for line in readme.LIBRARIES]
    assert text.count("<rect") - 1 == len(readme.LIBRARIES)
    assert text.count(f'fill="{picture.LOSS}"') == sum(mean < 1 for mean in means) > 0


def test_the_table_follows_the_rows(tmp_path: Path) -> None:
    for line in readme.LINES:
        path = tmp_path / f"{line.file}.json"
        if not path.exists():
            report.write(report.read(readme.RESULTS / path.name), path)
    before = readme.table(readme.LIBRARIES, "", tmp_path)
    content = report.read(tmp_path / "random.json")
    content["rows"][0]["ratio"] = 1e-3
    report.write(content, tmp_path / "random.json")
    changed = [line for line, old in zip(readme.table(readme.LIBRARIES, "", tmp_path), before, strict=True) if line != old]
    assert len(changed) == 1 and "| 0.00 |" in changed[0]
    report.write({**content, "rows": []}, tmp_path / "random.json")
    with pytest.raises(ValueError, match="random.json has no rows of 'random sizes, orders and types'"):
        readme.table(readme.LIBRARIES, "", tmp_path)


def test_a_text_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.md").write_text("no marks")
    with pytest.raises(ValueError, match="lacks"):
        readme.main(["--into", str(tmp_path / "text.md")])
    assert (tmp_path / "text.md").read_text() == "no marks"


def test_every_group_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """All groups but "mappings", which is for tuning."""
    measured = [group for groups in every.FILES.values() for group in groups]
    assert len(measured) == len(set(measured))
    assert set(verdicts.GROUPS) - set(measured) == {"mappings"}
    assert every.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert f"[1 of {len(every.NAMES)}] hopper_square" in said and "] host" in said and "300 rows" in said
    by_hand = {"distributed", "multistage_sweep", "levels"}     # two GPUs; a sweep to fit a model to; python -m examples.levels
    assert {line.file for line in readme.LINES} - by_hand == set(every.NAMES)


def test_bad_calls(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["nothing"], "'nothing' is none of hopper_square"), (["--out", "x.json"], "a folder is needed")):
        with pytest.raises(SystemExit) as stop:
            every.main(arguments)
        assert stop.value.code == 2 and words in capsys.readouterr().err
