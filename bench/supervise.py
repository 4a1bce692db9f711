"""Rows measured in a process of their own, so that a kernel that hangs or faults costs its own row only.

A fault of the device stays with the process that had it, and nothing ends a kernel that waits for ever but the end of its
process. So a worker process measures the rows one after the other; when it is gone, or silent for too long, its row has
failed and another worker goes on with the next.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from bench.harness import Row


class Worker(Protocol):
    """Measures rows; made in the worker's process."""

    def measure(self, case: Any) -> Row:
        """One row."""

    def is_lost(self) -> bool:
        """Whether the device cannot be used any more in this process."""


@dataclass(frozen=True)
class Outcome:
    """A case's row, or why there is none."""

    case: Any
    row: Row | None
    message: str = ""


@dataclass(frozen=True)
class Patience:
    """In seconds: for a worker's start with its first row, for any other row, and for all rows."""

    start: float = 120.0
    row: float = 45.0
    whole: float = float("inf")


def work(start: Callable[[], Worker], cases: Sequence[Any], connection: Connection) -> None:
    """The worker's process: sends (row, message, whether the device is lost) for each case, in order."""
    worker = start()
    for case in cases:
        try:
            connection.send((worker.measure(case), "", False))
        except Exception as problem:
            place = traceback.extract_tb(problem.__traceback__)[-1]
            message = f"{type(problem).__name__}: {problem} ({place.filename.rsplit('/', 1)[-1]}:{place.lineno})"
            is_lost = worker.is_lost()
            connection.send((None, message, is_lost))
            if is_lost:
                break


def outcomes(
    start: Callable[[], Worker],
    cases: Sequence[Any],
    patience: Patience = Patience(),
    *,
    restarts: int = 6,
    method: str = "spawn",
) -> Iterator[Outcome]:
    """Measure the cases; one outcome each, in order.

    Args:
        start: makes the `Worker`; it is called in the worker's process, so it must be picklable.
        restarts: how many workers may be lost before the remaining rows are given up.
        method: how processes are started (as multiprocessing names it).
    """
    context = multiprocessing.get_context(method)
    begun, remaining = time.monotonic(), list(cases)
    while remaining:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(start, remaining, sender), daemon=True)  # type: ignore[attr-defined]
        process.start()
        sender.close()  # so that the worker's end is the only one, and its death is seen
        limit = patience.start
        try:
            while remaining:
                left = patience.whole - (time.monotonic() - begun)
                if left <= 0:
                    yield from (Outcome(case, None, "not measured: out of time") for case in remaining)
                    return
                row, message, is_lost = _answer(receiver, min(limit, left), process)
                yield Outcome(remaining.pop(0), row, message)
                if is_lost:
                    break
                limit = patience.row
        except _Gone as gone:
            yield Outcome(remaining.pop(0), None, str(gone))
        finally:
            receiver.close()
            _end(process)
        restarts -= 1
        if restarts < 0 and remaining:
            yield from (Outcome(case, None, "not measured: too many workers were lost") for case in remaining)
            return


class _Gone(Exception):
    """The worker will not answer any more."""


def _answer(receiver: Connection, seconds: float, process: Any) -> tuple[Row | None, str, bool]:
    if not receiver.poll(seconds):
        raise _Gone(f"no answer in {seconds:.0f} s: the kernel hangs, or the row takes too long")
    try:
        answer: tuple[Row | None, str, bool] = receiver.recv()
    except EOFError:
        process.join(10)
        raise _Gone(f"the worker died with exit status {process.exitcode}") from None
    return answer


def _end(process: Any) -> None:
    process.join(0.5)
    if process.is_alive():
        process.kill()
        process.join(20)
