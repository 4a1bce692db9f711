"""Tasks in processes of their own: forked from this one, so that they need not be pickled.

A kernel's components hold functions and arrays of the caller's, which no other process can be sent. A forked process has
them. Each task gets its own process: one that crashes or hangs takes nothing with it. A task must not use the GPU (a CUDA
context does not outlive a fork); compiling does not.

Where a platform does not fork (Windows), tasks run one after the other in this process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclass(frozen=True)
class Failure:
    """Why a task has no result: ``kind`` is the exception's name, "crash" or "timeout"."""

    kind: str
    reason: str

    def __str__(self) -> str:
        return self.reason if self.kind in ("crash", "timeout") else f"{self.kind}: {self.reason}"


@dataclass
class _Child:
    index: int
    process: Any
    answer: Connection
    deadline: float


def processors() -> int:
    """How many tasks can run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forked(tasks: Sequence[Callable[[], Any]], jobs: int | None = None, seconds: float = 300.0) -> Iterator[tuple[int, Any]]:
    """Run tasks, at most ``jobs`` at a time (None: one a processor), and give (index, result) as they end.

    A result must be picklable. That of a task that raised, died, or took longer than ``seconds`` is a `Failure`. Closing the
    iterator, or an exception where it is used, ends what still runs.

    >>> sorted(forked([lambda: 2 + 2, lambda: 1 // 0]))[0]
    (0, 4)
    """
    if not hasattr(os, "fork"):
        for index, task in enumerate(tasks):
            yield index, _result(task)
        return
    context = multiprocessing.get_context("fork")
    waiting, running = list(enumerate(tasks))[::-1], list[_Child]()
    try:
        while waiting or running:
            while waiting and len(running) < max(1, jobs or processors()):
                index, task = waiting.pop()
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(task, theirs), daemon=True)
                process.start()
                theirs.close()
                running.append(_Child(index, process, mine, time.monotonic() + seconds))
            left = min(child.deadline for child in running) - time.monotonic()
            ready = wait([child.answer for child in running], timeout=max(0.0, left))
            for child in [c for c in running if c.answer in ready or c.deadline <= time.monotonic()]:
                running.remove(child)
                yield child.index, _ended(child, seconds)
    finally:
        for child in running:
            _end(child)


def _run(task: Callable[[], Any], answer: Connection) -> None:
    """What a child does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)              # Ctrl-C is the parent's, which ends its children
    try:
        found = _result(task)
        try:
            answer.send(found)
        except Exception as error:                            # it cannot be pickled
            answer.send(Failure(type(error).__name__, str(error)))
    finally:
        os._exit(0)                                           # nothing of the parent's is flushed or destroyed twice


def _result(task: Callable[[], Any]) -> Any:
    try:
        return task()
    except Exception as error:
        return Failure(type(error).__name__, str(error))


def _ended(child: _Child, seconds: float) -> Any:
    try:
        if child.answer.poll():
            return child.answer.recv()
        return Failure("timeout", f"it took longer than {seconds:g} s")
    except EOFError:
        child.process.join()
        status = child.process.exitcode
        return Failure("crash", f"its process died ({signal.Signals(-status).name if status < 0 else f'status {status}'})")
    finally:
        _end(child)


def _end(child: _Child) -> None:
    child.process.kill()                                      # what has answered has nothing left to do
    child.process.join()
    child.answer.close()
