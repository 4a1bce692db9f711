"""Tasks in forked processes: what they return, and what becomes of those that do not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest

from gemmkit.runtime import device as module
from gemmkit.runtime.device import Failure, forked

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")


def hangs() -> None:
    time.sleep(3600)


def test_results_come_as_they_end() -> None:
    captured = {"what": object()}                          # not pickled: the child has it
    wait, go_on = os.pipe()

    def slow() -> str:
        return f"slow {len(captured)} {os.read(wait, 1)!r}"

    tasks = forked([slow, lambda: "fast"], jobs=2)
    assert next(tasks) == (1, "fast")
    os.write(go_on, b"!")
    assert list(tasks) == [(0, "slow 1 b'!'")]


def test_each_has_its_process() -> None:
    found = dict(forked([os.getpid] * 5, jobs=2))
    assert len(set(found.values()) | {os.getpid()}) == 6 and sorted(found) == list(range(5))


def test_no_more_than_jobs_at_a_time() -> None:
    running = multiprocessing.get_context("fork").Value("i", 0)

    def counted() -> int:
        with running:
            running.value += 1
            found: int = running.value
        time.sleep(0.05)
        with running:
            running.value -= 1
        return found

    assert max(found for _, found in forked([counted] * 6, jobs=2)) <= 2


def test_what_fails_is_told_and_the_others_go_on() -> None:
    def raises() -> None:
        raise ValueError("out of luck")

    def dies() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leaves() -> None:
        os._exit(7)

    found = dict(forked([raises, dies, leaves, lambda: 42], jobs=4))
    assert found == {0: Failure("ValueError", "out of luck"), 1: Failure("crash", "its process died (SIGKILL)"),
                     2: Failure("crash", "its process died (status 7)"), 3: 42}
    assert [str(found[n]) for n in range(3)] == ["ValueError: out of luck", "its process died (SIGKILL)",
                                                 "its process died (status 7)"]


def assert_ended(alive: int, ours: int) -> None:
    """No child has the other end of a pipe any more. (If one has, this waits until pytest ends the test.)"""
    os.close(ours)
    assert os.read(alive, 1) == b""
    os.close(alive)


def test_what_hangs_is_ended_and_the_next_is_run() -> None:
    alive, ours = os.pipe()
    found = list(forked([hangs, hangs], jobs=1, seconds=0.2))
    assert found == [(n, Failure("timeout", "it took longer than 0.2 s")) for n in range(2)]
    assert str(found[0][1]) == "it took longer than 0.2 s"
    assert_ended(alive, ours)


def test_an_answer_that_cannot_be_sent() -> None:
    (_, found), = forked([lambda: lambda: 1])
    assert found.kind in ("AttributeError", "PicklingError")


def test_large_answers() -> None:
    (_, found), = forked([lambda: bytes(10**7)])
    assert len(found) == 10**7


def test_who_stops_asking_ends_them() -> None:
    alive, ours = os.pipe()
    tasks = forked([os.getpid, hangs], jobs=2)
    next(tasks)
    tasks.close()                                            # type: ignore[attr-defined]
    assert_ended(alive, ours)


def test_without_fork_they_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoFork:
        def __getattr__(self, name: str) -> Any:
            if name == "fork":
                raise AttributeError(name)
            return getattr(os, name)

    monkeypatch.setattr(module, "os", NoFork())
    assert list(forked([os.getpid, lambda: 1 // 0])) == [(0, os.getpid()), (1, Failure("ZeroDivisionError",
                                                                                     "integer division or modulo by zero"))]
