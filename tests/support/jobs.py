"""The processes of the commands that judge drawn cases (``--jobs``), and the time that a case may take."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FrameType
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

PART = 50                              # short cases that a process takes at a time


def in_jobs(work: Callable[[Item], Result], items: Iterable[Item], jobs: int) -> Iterator[Result]:
    """``work`` of each item, in their order, in so many processes. Processes import ``work`` by the name of its module, so it
    is no function of a package's ``__main__``, which they never import; one job refuses that too."""
    function: Any = work.func if isinstance(work, partial) else work
    if function.__module__.rpartition(".")[2] == "__main__":
        raise TypeError(f"{function.__name__} lies in {function.__module__}, where other processes do not find it; move it to another module")
    if jobs == 1:
        yield from map(work, items)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(work, items)


def in_parts(work: Callable[[int, range], Result], options: argparse.Namespace) -> Iterator[Result]:
    """``work(seed, numbers)`` of all cases that a command's options ask for."""
    numbers = range(options.first, options.first + options.count)
    return in_jobs(partial(work, options.seed), [numbers[n:n + PART] for n in range(0, len(numbers), PART)], options.jobs)


class TooLong(BaseException):
    """A case that does not end. (No Exception: nothing that a case does may catch it.)"""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises TooLong behind so many seconds of the processor, not of a busy machine."""
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TooLong(f"over {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
