"""`examples.train` and `examples.serve`: a tiny model trains, is kept, and writes text in another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from examples import experts, serve, train  # noqa: E402


@pytest.mark.thorough
def test_a_model_trains_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(emulate=True, steps=2, out=str(tmp_path))
    assert (tmp_path / "losses.png").stat().st_size > 1000
    assert serve.main(str(tmp_path / "model.pt"), emulate=True, count=3)
    said = capsys.readouterr().out
    assert "gk.torch.glu" in said and "2 of 2: loss" in said and "3 letters behind" in said


@pytest.mark.gpu
def test_a_model_learns_and_writes(tmp_path: Path) -> None:
    assert train.main(emulate=False, steps=60, out=str(tmp_path))
    assert serve.main(str(tmp_path / "model.pt"), emulate=False, count=50)


@pytest.mark.thorough
def test_layers_of_experts_learn_alike(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert experts.command(["--emulate", "--train", "3"]) == 0
    assert "step 3 of 3: loss" in capsys.readouterr().out
    monkeypatch.setattr(experts, "WANTED_LOSS", 0.0)
    assert experts.command(["--emulate", "--train", "1", "--tokens", "9"]) == 1


@pytest.mark.gpu
def test_layers_of_experts_learn_alike_on_a_gpu() -> None:
    assert experts.command(["--train", "10"]) == 0
