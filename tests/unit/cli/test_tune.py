"""`python -m gemmkit tune`, run in this process: its request, its table, its picture. (It times on a GPU alone.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.tools import cli as command
from gemmkit.tools.cli import main
from gemmkit.tuner import Tried, Tuned
from gemmkit.tuner.tuner import sweep, tiles


@pytest.fixture
def conf() -> gk.Config:
    return gk.get_config(operator=gk.operators.MMAOp(), global_a_layout=gk.layouts.RowMajor("float16"))


@pytest.fixture
def found(conf: gk.Config) -> Tuned:
    default = Tried("default", conf, None, 100.0, 1.0)
    best = Tried("multistage 128x128x32", conf, None, 50.0, 2.0)
    rest = (Tried("one", error="not legal: no"), Tried("two", conf, error="failed: CUDA_ERROR_ILLEGAL_ADDRESS"))
    return Tuned("512 x 512 x 512, float16, on a GPU", (best, default, *rest), default, best, True, ("interrupted: so",))


def asked(monkeypatch: pytest.MonkeyPatch, found: Tuned) -> dict[str, Any]:
    """What `gemmkit.tune` is asked, on a machine that says that it has a GPU."""
    seen: dict[str, Any] = {}

    def tune(a: Any, b: Any, **keywords: Any) -> Tuned:
        seen.update(keywords, a=a, b=b)
        return found

    monkeypatch.setattr(command.gemmkit, "tune", tune, raising=False)
    monkeypatch.setattr(command, "absence", lambda: None)
    monkeypatch.setattr(command, "_library", lambda of: lambda x: x)
    return seen


def test_a_request_and_its_table(monkeypatch: pytest.MonkeyPatch, found: Tuned, capsys: pytest.CaptureFixture[str]) -> None:
    seen = asked(monkeypatch, found)
    assert main(["tune", "--m", "48", "--n", "32", "--k", "16", "--layout", "nt", "--batch", "3", "--budget", "7", "--jobs", "2",
                 "--effort", "full"]) == 0
    assert seen["a"].shape == (3, 48, 16) and seen["b"].shape == (3, 16, 32) and seen["b"].strides[-1] > seen["b"].strides[-2]
    assert seen["a"].dtype == np.float16 and np.std(seen["a"]) > 0.5
    assert {name: seen[name] for name in ("effort", "budget", "keep", "jobs")} == dict(effort="full", budget=7, keep=True, jobs=2)
    said = capsys.readouterr().out
    assert "* multistage 128x128x32" in said and "2.000" in said and "two: failed: CUDA_ERROR_ILLEGAL_ADDRESS" in said
    assert "one: not legal" not in said and "interrupted: so" in said and "get_config(" in said
    assert said.rstrip().endswith("gemmkit.matmul takes it from now on")
    assert main(["tune", "--all", "--no-keep"]) == 0
    assert "one: not legal: no" in capsys.readouterr().out and seen["keep"] is False


def test_a_picture_of_tiles(monkeypatch: pytest.MonkeyPatch, found: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked(monkeypatch, found)
    assert main(["tune", "--m", "64", "--n", "64", "--k", "64", "--sweep", str(tmp_path / "tiles.png")]) == 0
    assert (tmp_path / "tiles.png").read_bytes().startswith(b"\x89PNG") and "drawn: " in capsys.readouterr().out
    assert list(tiles(found).values()) == [50.0]
    nothing = Tuned("nothing", (), found.default, found.default, False)
    with pytest.raises(ValueError, match="no mapping was timed"):
        sweep(nothing, tmp_path / "none.png", 1.0)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--m", "0"], "--m 0: 1 or more is needed"), (["--jobs", "0"], "--jobs 0"), (["--a-dtype", "f7"], "no dtype of this name"),
    ([], "there is none here"),
], ids=str)
def test_what_is_wrong(monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str,
                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "absence", lambda: "the driver lists no device")
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_integers_are_small(monkeypatch: pytest.MonkeyPatch, found: Tuned) -> None:
    seen = asked(monkeypatch, found)
    assert main(["tune", "--m", "8", "--n", "8", "--k", "8", "--a-dtype", "int8"]) == 0
    assert seen["a"].dtype == np.int8 and np.abs(seen["a"]).max() <= 4
