"""tools/cupy_tests.py: what it takes of a source distribution, and how the counts of processes are added up."""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import tools.cupy_tests
from tests.support.patches import Seeded
from tools.cupy_tests import NOT_REACHED, OTHERS, TESTS, added, extract, run

HOUR = 3600.0


def archive(path: Path, members: tuple[str, ...]) -> Path:
    with tarfile.open(path, "w:gz") as made:
        for name in members:
            data = name.encode()
            info = tarfile.TarInfo(f"cupy-1.0/{name}")
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return path


def test_the_tests_are_taken_from_an_archive(tmp_path: Path) -> None:
    extract(archive(tmp_path / "cupy-1.0.tar.gz", (*TESTS, *OTHERS, "setup.py")), tmp_path / "tests")
    found = {path.name: path.read_text() for path in (tmp_path / "tests").iterdir()}
    assert found == {Path(name).name: name for name in (*TESTS, *OTHERS)}


def test_an_archive_without_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=TESTS[-1]):
        extract(archive(tmp_path / "cupy-1.0.tar.gz", TESTS[:-1]), tmp_path / "tests")


def test_counts_are_added_up() -> None:
    one = {"outcomes": {"passed": 2}, "failed": ["x"], "calls": {"dot": 1}, "left": {}}
    other = {"outcomes": {"passed": 1, "failed": 1}, "failed": [], "calls": {}, "left": {"dot: y": 3}}
    assert added([one, other]) == {"outcomes": {"passed": 3, "failed": 1}, "failed": ["x"], "calls": {"dot": 1},
                                   "left": {"dot: y": 3}}


def written(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (folder / "test_some.py").write_text(text)
    return folder


def test_processes_share_the_tests_and_counts_are_told_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.cupy_tests, "TOLD_EVERY", 0.1)
    text = "import pytest\n@pytest.mark.parametrize('n', range(7))\ndef test_it(n):\n    assert n != 3\n"
    told: list[dict] = []
    found = run(written(tmp_path, text), ["test_some.py"], 2, None, behind=False, told=told.append)
    assert found["outcomes"] == {"passed": 6, "failed": 1} and found["failed"] == ["test_some.py::test_it[3]"]
    assert found["ended"] == 0 and found["rc"] == 1 and "assert 3 != 3" in found["said"]
    assert told and told[0]["outcomes"].get("passed", 0) <= 6


def test_what_runs_when_the_time_is_up_is_ended_and_counts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                    replaced: Seeded) -> None:
    """The time is up when the first test has been counted and the second has begun."""
    text = """
import pathlib, time
def test_short(): pass
def test_long():
    pathlib.Path(__file__).with_suffix(".begun").touch()
    time.sleep(3600)
"""
    late = [0.0]

    def told(counts: dict) -> None:
        if counts["outcomes"] == {"passed": 1} and (tmp_path / "test_some.begun").exists():
            late[0] = 10 * HOUR

    clock = SimpleNamespace(time=lambda: time.time() + late[0], sleep=time.sleep)
    replaced(tools.cupy_tests, "time", clock)
    monkeypatch.setattr(tools.cupy_tests, "TOLD_EVERY", 0.1)
    found = run(written(tmp_path, text), ["test_some.py"], 1, HOUR, behind=False, told=told)
    assert found["ended"] == 1 and found["outcomes"] == {"passed": 1}


def test_what_the_time_does_not_reach_is_counted(tmp_path: Path) -> None:
    found = run(written(tmp_path, "def test_it(): pass\n"), ["test_some.py"], 1, 0.0, behind=False)
    assert found["outcomes"] == {NOT_REACHED: 1}
