"""`bench.training` without a GPU: both models are the same, and a wrong gradient is no row."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
from bench import training  # noqa: E402


def test_the_same_models() -> None:
    ours, theirs = training.models(4, "cpu", torch.float32)
    x = torch.randn(3, 4)
    with gk.emulate():
        assert training.compared(ours, theirs, x) < 1e-4
        torch.testing.assert_close(training.forward(ours, x)(), training.forward(theirs, x)())
        with torch.no_grad():
            theirs[0].weight += 1.0
        with pytest.raises(ValueError, match="differ by"):
            training.compared(ours, theirs, x)


def test_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([2.0, 1.0] * training.TURNS)
    monkeypatch.setattr(training, "timed", lambda call, calls: next(times))
    found = training.row("step", lambda: None, lambda: None, 0.0)
    assert (found["ratio"], found["ours_us"], found["peer_us"]) == (0.5, 2.0, 1.0)
