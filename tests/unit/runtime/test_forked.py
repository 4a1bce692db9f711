"""Tasks in forked processes: what they return, and what becomes of those that do not."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from gemmkit.runtime import forked as module
from gemmkit.runtime.forked import Failure, forked

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")


def test_results_come_as_they_end() -> None:
    captured = {"what": object()}                          # not pickled: the child has it

    def slow() -> str:
        time.sleep(0.5)
        return f"slow {len(captured)}"

    assert list(forked([slow, lambda: "fast"], jobs=2)) == [(1, "fast"), (0, "slow 1")]


def test_each_has_its_process() -> None:
    found = dict(forked([os.getpid] * 5, jobs=2))
    assert len(set(found.values()) | {os.getpid()}) == 6 and sorted(found) == list(range(5))


def test_no_more_than_jobs_at_a_time() -> None:
    def span() -> tuple[float, float]:
        start = time.monotonic()
        time.sleep(0.1)
        return start, time.monotonic()

    spans = [found for _, found in forked([span] * 6, jobs=2)]
    assert max(sum(begin <= at < end for begin, end in spans) for at, _ in spans) <= 2


def test_what_fails_is_told_and_the_others_go_on() -> None:
    def raises() -> None:
        raise ValueError("out of luck")

    def dies() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leaves() -> None:
        os._exit(7)

    def hangs() -> None:
        time.sleep(60)

    start = time.monotonic()
    found = dict(forked([raises, dies, leaves, hangs, lambda: 42], jobs=5, seconds=1.0))
    assert time.monotonic() - start < 20
    assert found == {0: Failure("ValueError", "out of luck"), 1: Failure("crash", "its process died (SIGKILL)"),
                     2: Failure("crash", "its process died (status 7)"), 3: Failure("timeout", "it took longer than 1 s"), 4: 42}
    assert [str(found[n]) for n in range(4)] == ["ValueError: out of luck", "its process died (SIGKILL)",
                                                 "its process died (status 7)", "it took longer than 1 s"]


def test_an_answer_that_cannot_be_sent() -> None:
    (_, found), = forked([lambda: lambda: 1])
    assert found.kind in ("AttributeError", "PicklingError")


def test_large_answers() -> None:
    (_, found), = forked([lambda: bytes(10**7)])
    assert len(found) == 10**7


def test_who_stops_asking_ends_them() -> None:
    def pid(seconds: float) -> Any:
        def task() -> int:
            time.sleep(seconds)
            return os.getpid()

        return task

    tasks = forked([pid(0), pid(60)], jobs=2)
    next(tasks)
    start = time.monotonic()
    tasks.close()                                            # type: ignore[attr-defined]
    assert time.monotonic() - start < 10


def test_without_fork_they_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoFork:
        def __getattr__(self, name: str) -> Any:
            if name == "fork":
                raise AttributeError(name)
            return getattr(os, name)

    monkeypatch.setattr(module, "os", NoFork())
    assert list(forked([os.getpid, lambda: 1 // 0])) == [(0, os.getpid()), (1, Failure("ZeroDivisionError",
                                                                                     "integer division or modulo by zero"))]
