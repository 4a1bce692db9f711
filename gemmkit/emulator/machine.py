"""The CPU machine: plain Python functions run as CUDA kernels, one greenlet a thread, every access checked.

    memory = Memory.for_array(out, "out", written=False)
    def kernel():
        thread = machine.current()
        thread.write(memory, out.ctypes.data + 4 * thread.index, data)
    machine.launch(kernel, (), grid=(1, 1, 1), block=(128, 1, 1), shared_memory=0)

Faults are reported as the exceptions of `errors`. Threads change only where they wait, and blocks run one
after another; yet a race is found whether or not this run's order brings it to light, since accesses count
as ordered only
by synchronisation: barriers and collectives within a block, a `Clock` elsewhere.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from operator import index as as_index
from operator import mod
from random import Random
from typing import Any

from gemmkit.emulator import shadow
from gemmkit.emulator.agent import Agent, Bytes
from gemmkit.emulator.clocks import Clock, Vector, join
from gemmkit.emulator.clusters import ClusterBarrier, Registers
from gemmkit.emulator.copies import Stores
from gemmkit.emulator.early import NotYet
from gemmkit.emulator.errors import DivergenceError
from gemmkit.emulator.kinds import Kinds, chosen
from gemmkit.emulator.mbarriers import Mbarrier
from gemmkit.emulator.memory import Memory, for_array
from gemmkit.emulator.scheduler import Scheduler
from gemmkit.emulator.streams import running
from gemmkit.emulator.tensor_cores import TensorCores
from gemmkit.emulator.thread_copies import Copies
from gemmkit.lang.sites import Site, current, here, is_same_place

__all__ = ["Block", "Clock", "Memory", "Thread", "current", "for_array", "launch"]

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
        block: its `Block`.
        stores: the copies to global memory that it has asked for, if it has.
        copies: the copies to shared memory that it has started, if it has (`thread_copies`).
        register_fences, touched, touched_a: its calls of `wgmma_fence`, and how many there were when it could last touch
            accumulators, and registers of A (`in_flight`).
    """

    __slots__ = ("_scheduler", "copies", "lane", "register_fences", "stores", "thread_index", "touched", "touched_a",
                 "waits_for", "warp")

    def __init__(self, block: Block, index: int, seen: Vector, pages: shadow.Pages,
                 scheduler: Scheduler) -> None:
        super().__init__(block, index, seen, pages)
        x, y, _ = block.dim
        self.thread_index: Index = index % x, index // x % y, index // (x * y)
        self.warp: int = index // WARP
        self.lane: int = index % WARP
        self.waits_for: Callable[[], str] | None = None
        self.stores: Stores | None = None
        self.copies: Copies | None = None
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
        group, lane = divmod(self.index, size)
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
                 shared_memory: int, pages: shadow.Pages, scheduler: Scheduler,
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
        self.readers: dict[Thread, shadow.Record] = {}
        self.mbarriers: dict[int, Mbarrier] = {}
        self.tensor_cores: dict[int, TensorCores] = {}
        self.cluster_barrier = ClusterBarrier()
        self.registers = Registers(self.size, registers)
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
    pages: shadow.Pages = {}
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
