"""tools/cupy_tests.py: what it takes of a source distribution, and how the counts of processes are added up."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tools.cupy_tests import OTHERS, TESTS, added, extract


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
