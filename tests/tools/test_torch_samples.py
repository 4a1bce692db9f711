"""`tools.torch_samples`: PyTorch's samples go through gemmkit, a wrong result is found, and what is refused is said."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from tools import torch_samples as samples  # noqa: E402


def test_samples_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert samples.main(["--only", "mm", "softmax", "--dtypes", "float32"]) == 0
    said = capsys.readouterr().out
    assert "17 samples: 2 refused, 15 right" in said and "refused 2 x softmax: ValueError: x has no axis" in said


@pytest.mark.parametrize(("wrong", "said"), [
    (lambda a, b: a @ b * 1.001, "off by"), (lambda a, b: (a @ b).double(), "torch.float64"),
    (lambda a, b: (a @ b).detach() + a.sum() * 0, "a gradient: off by"),
    (lambda a, b: a @ b + ((a.detach() - a) ** 2).sum(), "a second derivative: off by"), (lambda a, b: {}["x"], "KeyError")])
def test_what_is_wrong_is_found(wrong: Any, said: str, monkeypatch: pytest.MonkeyPatch,
                                capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(samples.WORKS, "mm", wrong)
    assert samples.main(["--only", "mm", "--dtypes", "float32"]) == 1
    assert said in capsys.readouterr().out
