"""Workers that answer, fail, fault, hang and die."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from bench import supervise
from bench.supervise import Outcome, Patience, outcomes


class Clumsy:
    """Measures "row"; does what the other cases say."""

    def __init__(self) -> None:
        self.lost = False

    def measure(self, case: str) -> dict[str, Any]:
        if case == "hang":
            time.sleep(3600)
        if case == "die":
            os._exit(3)
        if case == "fault":
            self.lost = True
        if case in ("fault", "fail"):
            raise RuntimeError(f"cannot {case}")
        return {"process": os.getpid()}

    def is_lost(self) -> bool:
        return self.lost


def run(*cases: str, patience: Patience = Patience(20, 1.0), **options: Any) -> list[Outcome]:
    found = list(outcomes(Clumsy, cases, patience, method="fork", **options))
    assert [outcome.case for outcome in found] == list(cases)
    return found


def processes(found: list[Outcome]) -> list[int]:
    return [outcome.row["process"] for outcome in found if outcome.row is not None]


def test_all_rows_come_from_one_worker() -> None:
    assert len(set(processes(run("row", "row", "row")))) == 1


def test_a_failure_costs_its_row_only() -> None:
    found = run("row", "fail", "row")
    assert len(set(processes(found))) == 1 and len(processes(found)) == 2
    assert found[1].row is None and found[1].message.startswith("RuntimeError: cannot fail (test_supervise.py:")


@pytest.mark.parametrize(
    ("trouble", "message"),
    [("fault", "cannot fault"), ("die", "died with exit status 3"), ("hang", "no answer in 1 s")],
)
def test_a_lost_worker_is_replaced(trouble: str, message: str) -> None:
    found = run("row", trouble, "row", "row")
    first, *others = processes(found)
    assert len(others) == 2 and len(set(others)) == 1 and first not in others
    assert found[1].row is None and message in found[1].message


def test_a_worker_that_faults_on_the_last_row_is_not_replaced() -> None:
    assert len(processes(run("row", "fault"))) == 1


def test_after_too_many_losses_the_rest_is_given_up() -> None:
    found = run("die", "die", "row", restarts=1)
    assert [outcome.row for outcome in found] == [None, None, None]
    assert found[2].message == "not measured: too many workers were lost"


def test_the_whole_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.0, 3599.8, 3601.0])                 # as it begins, and before each row
    monkeypatch.setattr(supervise, "time", SimpleNamespace(monotonic=now.__next__))
    found = run("row", "hang", "row", patience=Patience(3600, 3600, whole=3600))
    assert found[0].row is not None and "no answer" in found[1].message
    assert found[2].message == "not measured: out of time"
