"""`bench.attention_backward` without a GPU: small cases in the emulator are rows, and a wrong gradient is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
from bench import attention_backward, report, turns  # noqa: E402
from bench.harness import WrongResult  # noqa: E402


@pytest.mark.parametrize("case", attention_backward.SMALL, ids=lambda case: case.work)
@pytest.mark.sample(5)
def test_a_row(case: Any) -> None:
    with gk.emulate():
        both = attention_backward.rows(case, "cpu", 1, 1)
    assert [row["group"].endswith("in any order") for row in both] == [False, True]
    assert all(row["ratio"] > 0 and row["error"] < attention_backward.TOLERANCE and row["peer"] == "formula" for row in both)


def test_a_wrong_gradient_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backward, "ours", lambda case, q, k, v, **form: attention_backward.by_formula(case, q, 1.1 * k, v))
    with gk.emulate(), pytest.raises(WrongResult, match="gradients beside formula's: results differ"):
        attention_backward.rows(attention_backward.SMALL[0], "cpu", 1, 1)


@pytest.mark.thorough
def test_it_starts(tmp_path: Path) -> None:
    assert attention_backward.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    assert len(report.read(tmp_path / "attention_backward.json")["rows"]) == 2 * len(attention_backward.SMALL)


def test_cases_are_what_peers_take() -> None:
    assert all(case.experiment.kv_heads == case.kv_heads and case.experiment.queries == case.rows for case in attention_backward.CASES)


def test_the_device_is_busy_at_the_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host takes to make the first call that is timed is no time of the device's."""
    seen: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            seen.append("event")

        def synchronize(self) -> None:
            seen.append("wait")

        def elapsed_time(self, other: Any) -> float:
            return 3e-3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert turns.times_of_events({"ours": lambda: seen.append("call")}, "cuda", 3, 1, 2) == {"ours": 1.0}
    assert seen[-7:] == ["call", "event", "call", "call", "call", "event", "wait"]
