"""The CPU machine: plain Python functions run as CUDA kernels, one greenlet a thread, every access checked.

    memory = Memory.for_array(out, "out", written=False)
    def kernel():
        thread = machine.current()
        thread.write(memory, out.ctypes.data + 4 * thread.index, data)
    machine.launch(kernel, (), grid=(1, 1, 1), block=(128, 1, 1), shared_memory=0)

Faults are reported as the exceptions of `errors`. Threads change only where they wait, and blocks run one after another;
yet a race is found whether or not this run's order brings it to light, since accesses count as ordered only by
synchronisation: barriers and collectives within a block, a `Clock` elsewhere.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar, copy_context
from itertools import product
from operator import index as as_index
from operator import mod
from random import Random
from typing import Any, NamedTuple

from greenlet import GreenletExit, getcurrent, greenlet

from gemmkit.emulator import memory
from gemmkit.emulator.agents import Agent, Bytes, NotYet, running
from gemmkit.emulator.barriers import ClusterBarrier, Mbarrier, RegisterFile, TensorCores, leave
from gemmkit.emulator.copies import PendingCopies, Stores
from gemmkit.emulator.errors import CoordinateError, DeadlockError, DivergenceError, UninitialisedRead, Waiter
from gemmkit.emulator.memory import Clock, Memory, Vector, for_array, join
from gemmkit.lang import host
from gemmkit.lang.host import Site, current, here, is_same_place

__all__ = [
    "Block", "Clock", "Memory", "Thread", "current", "for_array", "launch",
]


# --------------------------------------------------------------------------------------------------
# Which thread runs next: every CUDA thread is a greenlet that runs until it has to wait.
#
# A thread that waits switches straight to the next one that is ready. When none is ready, control falls back to the
# scheduler, which lets the threads that wait for a condition look again, then brings in further blocks, and at last
# reports a deadlock. Blocks run one cluster after another, so that memory stays small, yet a block that waits for what a
# later one does gets it.

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
            ready = self._ready
            if not ready:
                self._hub.switch()
            elif self._random is None:
                ready.popleft().fiber.switch()
            else:
                self._next().switch()
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
        return ready.popleft().fiber

    def _admit(self) -> bool:
        """Brings in the next cluster's blocks, if any is left."""
        blocks = next(self._clusters, ())
        for block in blocks:
            for thread in block.threads:
                fiber = thread.fiber = self._fibers[thread] = Fiber(self._run, self._hub, thread)
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
                                    site=host.of_traceback(error.__traceback__)) from None
        except BaseException as error:
            if _is_of_whole_numbers(error):
                raise CoordinateError(f"a GPU has no result for this: {error}", thread=thread.id,
                                      site=host.of_traceback(error.__traceback__)) from None
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"in {thread.id} of the emulated kernel {_name(self._kernel)}")
            raise
        finally:
            del self._fibers[thread]
            thread.fiber = None                            # which refers to the thread
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

    def site(self, thread: Thread) -> host.Site:
        """Where a parked thread stands."""
        return host.of_frame(self._fibers[thread].gr_frame)

    def _deadlock(self) -> DeadlockError:
        threads = sorted(self._fibers, key=lambda thread: (thread.block.number, thread.index))
        waiting: list[Waiter] = []
        places: dict[tuple[Block, str], list[int]] = {}
        for thread in threads:
            assert thread.waits_for is not None  # or it would be ready
            what, line = thread.waits_for(), host.kernel_line(self.site(thread))
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


# --------------------------------------------------------------------------------------------------
# Which classes a launch's threads, barriers and units are of: the machine's own, or those of a recording.

class Kinds(NamedTuple):
    """What a launch makes: its `Thread`s, `Mbarrier`s, `TensorCores` and `Stores`, or subclasses of these."""

    thread: Any
    mbarrier: Any
    tensor_cores: Any
    stores: Any


#: Asked once a launch, so that a launch which nothing records runs the machine's own methods and no test besides.
chosen: ContextVar[Callable[[], Kinds] | None] = ContextVar("gemmkit_recording", default=None)


Index = tuple[int, int, int]

WARP = 32
_BARRIERS = 16  # named barriers of a block
_GRID_LIMITS, _BLOCK_LIMITS, _CLUSTER_LIMIT = (2**31 - 1, 65535, 65535), (1024, 1024, 64), 16


class _Barrier:
    """Threads that wait at a named barrier of a block, where each warp came to it, and the past of those that went on."""

    __slots__ = ("arrived", "clock", "count", "sites", "threads")

    def __init__(self, count: int) -> None:
        self.count, self.arrived = count, 0
        self.threads: list[Thread] = []
        self.sites: dict[int, tuple[Site, Thread]] = {}
        self.clock: Clock | None = None


class _Meeting:
    """Lanes that have arrived at an instruction that their group executes together."""

    __slots__ = ("key", "operands", "results", "size", "sync", "threads")

    def __init__(self, key: str, sync: bool, size: int) -> None:
        self.key, self.sync, self.size = key, sync, size
        self.threads: list[Thread] = []
        self.operands: list[Any] = [None] * size
        self.results: Sequence[Any] = ()


class Thread(Agent):
    """An emulated CUDA thread.

    Attributes:
        index: linear index in the block; thread_index: (x, y, z).
        lane: index in its warp of 32; warp: index of the warp.
        block: its `Block`; fiber: its greenlet, while it lives.
        stores: the copies to global memory that it has asked for, if it has.
        copies: the copies to shared memory that it has started, if it has (`gemmkit.emulator.copies`).
        register_fences, touched, touched_a: its calls of `wgmma_fence`, and how many there were when it could last touch
            accumulators, and registers of A (`gemmkit.emulator.barriers`).
    """

    __slots__ = ("_scheduler", "copies", "fiber", "lane", "register_fences", "stores", "thread_index", "touched",
                 "touched_a", "waits_for", "warp")

    def __init__(self, block: Block, index: int, seen: Vector, pages: memory.Pages,
                 scheduler: Scheduler) -> None:
        super().__init__(block, index, seen, pages)
        x, y, _ = block.dim
        self.thread_index: Index = index % x, index // x % y, index // (x * y)
        self.warp: int = index // WARP
        self.lane: int = index % WARP
        self.waits_for: Callable[[], str] | None = None
        self.fiber: Any = None
        self.stores: Stores | None = None
        self.copies: PendingCopies | None = None
        self.register_fences = self.touched = self.touched_a = 0
        self._scheduler = scheduler

    def shared_read(self, offset: int, nbytes: int, alignment: int | None = None) -> Bytes:
        """A copy of `nbytes` bytes of the block's shared memory; sizes and faults as for `read`."""
        return self.read(self.block.shared, offset, nbytes, alignment)

    def shared_write(self, offset: int, data: Any, alignment: int | None = None) -> None:
        """Stores bytes into the block's shared memory; sizes and faults as for `write`."""
        self.write(self.block.shared, offset, data, alignment)

    def barrier(self, barrier_id: int = 0, count: int | None = None) -> None:
        """Waits until `count` threads are at barrier `barrier_id`; orders their memory accesses
        (``bar.sync``).

        Args:
            barrier_id: 0 to 15.
            count: threads that take part, a multiple of 32; None for all threads of the block.

        Raises:
            DivergenceError: threads of one warp are there on different lines, or threads differ in the count.
            DeadlockError: (from `launch`) the threads it waits for never come.
            ValueError: a barrier or count that the hardware does not have.
        """
        barrier, site = self._barrier(barrier_id, count), here()
        first, neighbour = barrier.sites.setdefault(self.warp, (site, self))
        if not is_same_place(first, site):
            raise DivergenceError(f"one warp is at barrier {barrier_id} on different lines", first, site,
                                  neighbour.id, self.id)
        barrier.threads.append(self)
        barrier.arrived += 1
        if barrier.arrived < barrier.count:
            self._scheduler.park(self, lambda: f"barrier {barrier_id} ({barrier.arrived} of {barrier.count} there)")
            return
        self.block.open(barrier_id)
        self._scheduler.wake(barrier.threads[:-1])
        self._scheduler.step_back(self)

    def arrive(self, barrier_id: int, count: int) -> None:
        """Is counted at barrier `barrier_id` and goes on (``bar.arrive``); its warp does so as one.

        Who waits there comes after what the thread has done; it learns nothing itself. Arguments and faults are those of
        `barrier`.
        """
        site = here()

        def count_warp(warp: list[Thread]) -> list[None]:
            barrier = self._barrier(barrier_id, count)
            if self.warp in barrier.sites:
                first, other = barrier.sites[self.warp]
                raise DivergenceError(f"a warp arrives again at barrier {barrier_id} before it has opened", first, site,
                                      other.id, self.id)
            barrier.sites[self.warp] = site, self
            barrier.clock = barrier.clock or Clock(self.block)
            for thread in warp:
                barrier.clock.release(thread)
            barrier.arrived += len(warp)
            if barrier.arrived >= barrier.count:
                self.block.open(barrier_id)
                self._scheduler.wake(barrier.threads)
            return [None] * len(warp)

        self.collective(f"the arrival at barrier {barrier_id}", self, count_warp, sync=False)

    def _barrier(self, barrier_id: int, count: int | None) -> _Barrier:
        """The named barrier that this thread comes to with `count`."""
        block = self.block
        if count is None:
            count = block.size
        elif not 0 < count <= block.size or count % WARP:
            raise ValueError(f"count is {count}; pass a multiple of 32 up to the {block.size} threads of the "
                             "block, or None for all")
        if not 0 <= barrier_id < _BARRIERS:
            raise ValueError(f"barrier_id is {barrier_id}; pass 0 to {_BARRIERS - 1}")
        barrier = block.barriers.get(barrier_id)
        if barrier is None:
            barrier = block.barriers[barrier_id] = _Barrier(count)
        elif barrier.count != count:
            first, other = next(iter(barrier.sites.values()))
            raise DivergenceError(f"barrier {barrier_id} has counts {barrier.count} and {count}", first, here(),
                                  other.id, self.id)
        return barrier

    def collective(self, key: str, operand: Any, compute: Callable[[list[Any]], Sequence[Any]],
                   size: int = WARP, sync: bool = True) -> Any:
        """Executes an instruction together with the other lanes of the warp, or of an aligned group of
        threads.

        Args:
            key: the instruction's name; all lanes must agree on it, and on `sync`.
            operand: this lane's input.
            compute: called once, by the last lane, with the operands in lane order; returns a result for
                each.
            size: threads of the group.
            sync: whether the instruction orders memory accesses among its lanes, as ``bar.warp.sync`` does
                and ``mma`` does not.

        Returns:
            this lane's result.

        Raises:
            DivergenceError: lanes meet at different instructions, or the block ends inside the group.
            ValueError: `compute` gave another number of results.
        """
        block = self.block
        group, lane = (self.warp, self.lane) if size == WARP else divmod(self.index, size)
        meeting = block.meetings.get((size, group))
        if meeting is None:
            if (group + 1) * size > block.size:
                site = here()
                raise DivergenceError(f"{key!r} needs {size} threads; the block of {block.size} has fewer",
                                      site, site, self.id, self.id)
            meeting = block.meetings[size, group] = _Meeting(key, sync, size)
        elif meeting.key != key or meeting.sync != sync:
            other = meeting.threads[0]
            raise DivergenceError(f"lanes of one group of {size} meet at {meeting.key!r} and at {key!r}",
                                  self._scheduler.site(other), here(), other.id, self.id)
        meeting.operands[lane] = operand
        meeting.threads.append(self)
        if len(meeting.threads) < size:
            there = meeting.threads
            self._scheduler.park(self, lambda: f"the other lanes of {key!r} ({len(there)} of {size} there)")
            return meeting.results[lane]
        del block.meetings[size, group]
        results = compute(meeting.operands)
        if len(results) != size:
            raise ValueError(f"compute of {key!r} returned {len(results)} results for {size} threads")
        meeting.results = results
        if sync:
            join(meeting.threads)
        self._scheduler.wake(meeting.threads[:-1])
        self._scheduler.step_back(self)
        return results[lane]

    def wait_until(self, predicate: Callable[[], bool], what: str | Callable[[], str]) -> None:
        """Waits until `predicate()` is true; it is called in this thread, and must have no effect.

        It orders nothing by itself: acquire a `Clock` after it. Use it wherever a kernel would spin, since a
        thread that spins without waiting keeps the others from running. `what` names the condition in a
        DeadlockError; a function is called there.
        """
        self._scheduler.wait_until(self, predicate, what)


class Block:
    """An emulated block of threads.

    Attributes:
        index: (x, y, z) in the grid; grid, dim: the launch's grid and block sizes; size: threads.
        number: linear index in the grid; shared: its shared `Memory`; threads: its `Thread`s.
        cluster: the blocks of its cluster, by rank; cluster_rank: its own place there; cluster_dim: (x, y,
            z).
        finished: all its threads have ended; running: how many have not; exported: other blocks may learn of its past
            through a Clock.
        readers: the last read of each thread of another block of its shared memory.
        mbarriers: by their place in shared memory; tensor_cores: by their warpgroup's number; cluster_barrier: where its
            cluster meets; registers: what its warps share out.
        kinds: the classes of its threads, barriers and units.
    """

    def __init__(self, index: Index, grid: Index, dim: Index, cluster_dim: Index, cluster_rank: int,
                 shared_memory: int, pages: memory.Pages, scheduler: Scheduler,
                 registers: Sequence[int] | None = None, kinds: Kinds | None = None) -> None:
        self.kinds = kinds = kinds or PLAIN
        self.index, self.grid, self.dim = index, grid, dim
        self.cluster_dim, self.cluster_rank = cluster_dim, cluster_rank
        self.size = math.prod(dim)
        self.number = index[0] + grid[0] * (index[1] + grid[1] * index[2])
        self.shared = Memory.shared(shared_memory, f"shared memory of block {index}")
        self.cluster: Sequence[Block] = (self,)
        self.barriers: dict[int, _Barrier] = {}
        self.meetings: dict[tuple[int, int], _Meeting] = {}
        self.readers: dict[Thread, memory.Record] = {}
        self.mbarriers: dict[int, Mbarrier] = {}
        self.tensor_cores: dict[int, TensorCores] = {}
        self.cluster_barrier = ClusterBarrier()
        self.registers = RegisterFile(self.size, registers)
        self.finished = self.exported = False
        self.running = self.size
        nothing_seen = [0] * self.size
        self.threads: Sequence[Thread] = [
            kinds.thread(self, i, nothing_seen, pages, scheduler) for i in range(self.size)]

    def open(self, barrier_id: int) -> None:
        """Orders the threads that wait at a named barrier after all that came to it; the next to come make it anew."""
        barrier = self.barriers.pop(barrier_id)
        if barrier.threads:
            join(barrier.threads)
        if barrier.clock is not None:
            for thread in barrier.threads:
                barrier.clock.acquire(thread)

    def leave(self) -> None:
        """A thread has ended. With the last one shared memory goes, for its cluster as well."""
        self.running -= 1
        if not self.running:
            self.finished = True
            self.shared = Memory.shared(0, f"shared memory of the finished block {self.index}")
            self.threads = ()


#: What a launch that nothing records is made of.
PLAIN = Kinds(Thread, Mbarrier, TensorCores, Stores)


def launch(kernel: Callable[..., None], args: Sequence[Any], *, grid: Index, block: Index, shared_memory: int,
           cluster: Index = (1, 1, 1), max_shared_memory: int = 232448, max_threads: int = 1024,
           schedule_seed: int | None = None, dependent: bool = False, registers: Sequence[int] | None = None) -> None:
    """Runs ``kernel(*args)`` in every thread of every block, to the end. (Users' components and functions among ``args``
    are what `gemmkit.emulator.user_code.arguments` makes of them: the machine knows none.)

    Args:
        grid, block, cluster: sizes (x, y, z): blocks, threads of a block, blocks of a cluster.
        shared_memory: bytes for each block.
        max_shared_memory, max_threads: the emulated device's limits for a block.
        schedule_seed: None runs threads and blocks in the order of their indices; a number shuffles the
            order, the same for the same number, which finds faults that hide behind one order.
        dependent: the kernel before may still run until a thread calls `grid_wait`: none touches global memory before.
        registers: how many a thread of each warp of a block ends with, if warps are to give and take some.

    Raises:
        EmulatorError: a fault of the kernel (see `errors`).
        ValueError, TypeError: sizes that no device takes; a kernel that returns something.
        Exception: what the kernel raised, with its traceback; from Python 3.11 on a note names the thread.

    Example: ``machine.launch(kernel, (a, b), grid=(4, 1, 1), block=(128, 1, 1), shared_memory=16384)``.
    """
    grid, block = _size("grid", grid, _GRID_LIMITS), _size("block", block, _BLOCK_LIMITS)
    cluster = _size("cluster", cluster, (_CLUSTER_LIMIT,) * 3)
    if math.prod(block) > max_threads:
        raise ValueError(f"block is {block}, {math.prod(block)} threads; the device takes {max_threads}")
    if math.prod(cluster) > _CLUSTER_LIMIT or any(map(mod, grid, cluster)):
        raise ValueError(f"cluster is {cluster}; pass sizes that divide the grid {grid}, with "
                         f"{_CLUSTER_LIMIT} blocks in all at most")
    if not 0 <= shared_memory <= max_shared_memory:
        raise ValueError(f"shared_memory is {shared_memory}; a block gets 0 to {max_shared_memory} bytes")
    pages: memory.Pages = {}
    choose = chosen.get()
    kinds = PLAIN if choose is None else choose()
    axes = [range(0, blocks, part) for blocks, part in zip(grid, cluster, strict=True)]
    origins = [(x, y, z) for z in axes[2] for y in axes[1] for x in axes[0]]
    if schedule_seed is not None:
        Random(schedule_seed).shuffle(origins)

    def clusters() -> Iterator[Sequence[Block]]:
        for x, y, z in origins:
            places = [(x + i, y + j, z + k) for k, j, i in product(*map(range, reversed(cluster)))]
            blocks = [Block(place, grid, block, cluster, rank, shared_memory, pages, scheduler, registers,
                            kinds)
                      for rank, place in enumerate(places)]
            for thread in (thread for member in blocks for thread in member.threads if dependent):
                thread.pages = NotYet(thread, pages)
            for member in blocks:
                member.cluster, member.cluster_barrier = blocks, blocks[0].cluster_barrier
            yield blocks

    streams = running.get()
    if streams is not None:
        streams.begin(pages)
    scheduler = Scheduler(kernel, args, clusters(), schedule_seed, _nothing if streams is None else streams.step)
    scheduler.run()


def _nothing() -> bool:
    """The next command of streams, where there are none."""
    return False


def _size(name: str, size: Index, limits: Index) -> Index:
    """`size` as a triple of ints within 1 to `limits`."""
    try:
        x, y, z = map(as_index, size)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {size!r}; pass three integers (x, y, z)") from None
    if min(x, y, z) < 1 or x > limits[0] or y > limits[1] or z > limits[2]:
        raise ValueError(f"{name} is {size}; each must be 1 at least, and {limits} at most")
    return x, y, z
