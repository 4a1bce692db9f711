"""Which thread runs next: every CUDA thread is a greenlet that runs until it has to wait.

A thread that waits switches straight to the next one that is ready. When none is ready, control falls back to
the scheduler, which lets the threads that wait for a condition look again, then brings in further blocks,
and at last reports a deadlock. Blocks run one cluster after another, so that memory stays small, yet a block
that waits for what a later one does gets it.
"""
from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent, greenlet

from gemmkit.emulator.clusters import leave
from gemmkit.emulator.errors import CoordinateError, DeadlockError, UninitialisedRead, Waiter
from gemmkit.lang import sites

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Block, Thread

_TURNS_PER_POLL = 256  # so that a condition is looked at even while other threads keep each other busy
_STAY_IN_WARP = (0.0, 0.9, 0.999)  # shuffled order, one by seed: how far a warp tends to run ahead


class Fiber(greenlet):
    """The greenlet of a CUDA thread."""

    def __init__(self, run: Callable[..., None], parent: greenlet, thread: Thread) -> None:
        super().__init__(run, parent)
        self.thread = thread
        self.gr_context = copy_context()  # NumPy's errstate, and whatever else surrounds the launch


class Scheduler:
    """Runs the threads of one launch to their end.

    Args:
        kernel, args: what every thread calls.
        clusters: makes the blocks of one cluster after another.
        seed: None for the fixed order of indices, or the seed of a shuffled one.
        beside: runs the next command of streams beside the launch, and says whether there was one.
    """

    def __init__(self, kernel: Callable[..., None], args: Sequence[Any], clusters: Iterator[Sequence[Block]],
                 seed: int | None, beside: Callable[[], bool]) -> None:
        self._beside = beside
        self._kernel, self._args, self._clusters = kernel, args, clusters
        self._random = None if seed is None else random.Random(seed)
        self._stay_in_warp = 0.0 if self._random is None else self._random.choice(_STAY_IN_WARP)
        self._hub = getcurrent()
        self._ready: deque[Thread] = deque()
        self._polling: deque[Thread] = deque()
        self._fibers: dict[Thread, Fiber] = {}
        self._turns = 0
        self._moved = False  # whether a thread has begun, or a condition held, since the last round of polls
        self._stopped = False
        self._warp: tuple[Block | None, int] = None, 0       # of the thread that was chosen last

    def run(self) -> None:
        """Runs all blocks.

        Raises:
            DeadlockError: the threads that are left all wait.
            Exception: whatever a thread raised.
        """
        try:
            while True:
                if self._ready:
                    self._next().switch()
                elif self._polling and self._moved:
                    self._moved = False
                    self.wake(self._polling)
                    self._polling.clear()
                elif self._polling and self._beside():
                    self._moved = True
                elif (self._polling or not self._fibers) and self._admit():
                    pass
                elif self._fibers:
                    raise self._deadlock()
                elif not self._beside():                       # the kernel has ended, and so have the streams
                    return
        finally:
            self._stop()

    def wake(self, threads: Iterable[Thread]) -> None:
        """Lets threads that were parked go on."""
        self._ready.extend(threads)

    def step_back(self, thread: Thread) -> None:
        """In shuffled order, lets others go first: the last at a barrier need not leave it first."""
        if self._random is not None:
            self._ready.append(thread)
            self.park(thread, lambda: "its turn")

    def park(self, thread: Thread, what: Callable[[], str]) -> None:
        """Suspends the running thread until it is woken. `what` says, when asked, what it waits for."""
        thread.waits_for = what
        self._turns += 1                # not in `wait_until`: many threads that look in vain are no reason to look again
        if self._turns % _TURNS_PER_POLL == 0:
            self.wake(self._polling)
            self._polling.clear()
        self._switch()
        thread.waits_for = None

    def wait_until(self, thread: Thread, predicate: Callable[[], bool], what: str | Callable[[], str]) -> None:
        """Suspends the running thread until `predicate()` holds; it is asked in the thread itself."""
        if predicate():
            return
        thread.waits_for = what if callable(what) else lambda: what
        while True:
            self._polling.append(thread)
            self._switch()
            if predicate():
                break
        thread.waits_for = None
        self._moved = True  # and whatever this thread wakes may make another's condition true

    def _switch(self) -> None:
        if not self._stopped:
            (self._next() if self._ready else self._hub).switch()
        if self._stopped:  # the launch has failed, and a `finally` of the kernel tried to wait once more
            raise GreenletExit

    def _next(self) -> Fiber:
        ready = self._ready
        if self._random is not None:
            choice = self._random.randrange(len(ready))
            if self._random.random() < self._stay_in_warp:
                block, warp = self._warp
                for i, thread in enumerate(ready):
                    if thread.warp == warp and thread.block is block:
                        choice = i
                        break
            thread = ready[choice]
            self._warp = thread.block, thread.warp
            ready.rotate(-choice)
        return self._fibers[ready.popleft()]

    def _admit(self) -> bool:
        """Brings in the next cluster's blocks, if any is left."""
        blocks = next(self._clusters, ())
        for block in blocks:
            for thread in block.threads:
                fiber = self._fibers[thread] = Fiber(self._run, self._hub, thread)
                fiber.switch()
            self.wake(block.threads)
            self._moved = True
        return bool(blocks)

    def _run(self) -> None:
        """A thread's life."""
        thread = getcurrent().thread
        try:
            # A greenlet inherits the depth of recursion where it starts. So all start in the scheduler and
            # come back at once: if they started from each other, a few hundred would reach the limit.
            self._hub.switch()
            result = self._kernel(*self._args)
            if result is not None:
                raise TypeError(f"kernel {_name(self._kernel)} returned {result!r}; a kernel returns nothing")
            if thread.stores is not None:
                thread.stores.leave(thread)
            leave(thread)
        except GreenletExit:
            raise
        except UnboundLocalError as error:             # of Python's own, and of `gemmkit.lang.registers`
            raise UninitialisedRead(f"a register is read before anything has set it: {error}", thread=thread.id,
                                    site=sites.of_traceback(error.__traceback__)) from None
        except BaseException as error:
            if _is_of_whole_numbers(error):
                raise CoordinateError(f"a GPU has no result for this: {error}", thread=thread.id,
                                      site=sites.of_traceback(error.__traceback__)) from None
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"in {thread.id} of the emulated kernel {_name(self._kernel)}")
            raise
        finally:
            del self._fibers[thread]
            thread.block.leave()

    def _stop(self) -> None:
        """Ends what is left of the threads after a fault, with their `finally` clauses run."""
        self._stopped = True
        for fiber in list(self._fibers.values()):
            with suppress(Exception):
                fiber.throw(GreenletExit)
        self._fibers.clear()
        self._ready.clear()
        self._polling.clear()

    def site(self, thread: Thread) -> sites.Site:
        """Where a parked thread stands."""
        return sites.of_frame(self._fibers[thread].gr_frame)

    def _deadlock(self) -> DeadlockError:
        threads = sorted(self._fibers, key=lambda thread: (thread.block.number, thread.index))
        waiting: list[Waiter] = []
        places: dict[tuple[Block, str], list[int]] = {}
        for thread in threads:
            assert thread.waits_for is not None  # or it would be ready
            what, line = thread.waits_for(), sites.kernel_line(self.site(thread))
            waiting.append(Waiter(thread.id, what, line))
            places.setdefault((thread.block, f"for {what}, at {line}"), []).append(thread.index)
        lines = ["deadlock: no thread can go on"]
        for (block, where), indices in places.items():
            lines.append(f"block {block.index}: {_listed(indices, 'wait')} {where}")
        for block in {thread.block: None for thread in threads}:
            gone = [thread.index for thread in block.threads if thread not in self._fibers]
            if gone:
                lines.append(f"block {block.index}: {_listed(gone, 'have left the kernel')}")
        return DeadlockError("\n  ".join(lines), waiting, self.site(threads[0]))


def _is_of_whole_numbers(error: BaseException) -> bool:
    """Whether arithmetic of whole numbers raised it, Python's or NumPy's: plain floats have infinities and NaN
    (`gemmkit.emulator.user_code`)."""
    is_power = isinstance(error, ValueError) and "negative integer powers" in str(error)
    return is_power or isinstance(error, (ZeroDivisionError, OverflowError))


def _name(kernel: Callable[..., None]) -> str:
    return getattr(kernel, "__qualname__", None) or repr(kernel)


def _listed(indices: Sequence[int], verb: str) -> str:
    """Ascending thread indices with what they do: "threads 0-15, 17 wait"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return "threads " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + f" {verb}"
