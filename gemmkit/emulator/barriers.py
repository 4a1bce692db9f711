"""Barriers of clusters, mbarriers and counters in global memory; the registers that the warps of a block share out; and
tensor cores, with the registers that they are at work on."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from gemmkit.emulator import agents
from gemmkit.emulator.agents import AsyncUnit, Bytes
from gemmkit.emulator.errors import ProtocolError, ThreadId
from gemmkit.emulator.memory import Clock, Foreign, Record, Vector, past
from gemmkit.lang.host import Site, here, is_unrolled, kernel_line

if TYPE_CHECKING:
    from gemmkit.emulator.agents import Agent
    from gemmkit.emulator.machine import Block, Thread
    from gemmkit.emulator.memory import Memory


# --------------------------------------------------------------------------------------------------
# Counters in global memory: additions that order what other accesses do, by a `Clock` for each counter.
#
# A release puts a thread's past into the counter's clock, an acquire takes what is there. Atomic accesses never race with
# each other; with ordinary accesses to the same bytes they are not compared.

_BYTES = 4


def add(thread: Thread, memory: Memory, address: int, number: int, order: str) -> int:
    """Adds to a counter of 32 bits; what it was before."""
    cell, clock = _cell(memory, address), _clock(memory, address)
    before = int(cell[0])
    if order in ("acquire", "acq_rel"):
        clock.acquire(thread)
    if order in ("release", "acq_rel"):
        clock.release(thread)
    cell[0] = (before + number) & 0xFFFFFFFF
    return before


def accumulate(memory: Memory, address: int, numbers: np.ndarray) -> None:
    """Adds float32 to elements from an address on, ordering nothing."""
    low = address - memory.base
    memory.data[low:low + numbers.nbytes].view(np.float32)[:] += numbers


def put(thread: Thread, memory: Memory, address: int, number: int) -> None:
    """Sets a counter, ordering nothing."""
    _cell(memory, address)[0] = number


def wait(thread: Thread, memory: Memory, address: int, number: int, order: str) -> None:
    """Waits until a counter is `number` at least."""
    cell = _cell(memory, address)
    thread.wait_until(lambda: int(cell[0]) >= number, lambda: f"a counter that is {int(cell[0])} to become {number}")
    if order == "acquire":
        _clock(memory, address).acquire(thread)


def meet(thread: Thread, memory: Memory, address: int, number: int) -> None:
    """Waits until a flag is just `number`, at system scope, and acquires it."""
    cell = _cell(memory, address)
    thread.wait_until(lambda: int(cell[0]) == number, lambda: f"a flag that is {int(cell[0])} to become {number}")
    agents.acquire(thread, address)


def _cell(memory: Memory, address: int) -> np.ndarray:
    """The counter's memory. `View.locate` has checked that it is one of the array's elements."""
    low = address - memory.base
    return memory.data[low:low + _BYTES].view(np.uint32)


def _clock(memory: Memory, address: int) -> Clock:
    return memory.clocks.setdefault(address, Clock())


# --------------------------------------------------------------------------------------------------
# mbarriers: phases that end when enough threads have arrived and enough bytes have been copied.

SIZE = 8  # bytes
_CONTENT = b"\xb7\x5ambar\xb7\x5a"  # of its bytes: hardware keeps counts in them, and nothing else may write there
_LIMIT = 2**20 - 1  # of arrivals, and of bytes that a phase expects
_NONE = (0,)                           # of an agent's work that is known to be done
_moments = count()


class _Wait(NamedTuple):
    """A thread's wait: at its time `time`, after so many wgmmas of its warpgroup, at a moment of this run."""

    time: int
    issued: int
    moment: int
    site: Site


class Mbarrier:
    """An mbarrier in the shared memory of a block.

    Attributes:
        phase: how many phases are over; arrivals, nbytes: what the present one still waits for.
        unit: the agent of the copies that end here; fenced: `mbarrier_fence_init` has followed the initialisation.
        touched: when TMA, and each thread of another block, last did something here.
    """

    __slots__ = (
        "_arrived",
        "_clock",
        "_known",
        "_last",
        "_maker",
        "_waits",
        "address",
        "arrivals",
        "block",
        "count",
        "fenced",
        "nbytes",
        "phase",
        "touched",
        "unit",
    )

    def __init__(self, thread: Thread, address: int, count: int) -> None:
        self.block, self.address, self.count, self.arrivals = thread.block, address, count, count
        self.nbytes = self.phase = 0
        self.fenced = False
        self.unit = AsyncUnit(thread.block, thread.pages)
        self._maker = thread, thread.clock, here()
        self.touched: dict[Agent, Record] = {}
        self._clock = self._last = Clock(thread.block)
        self._arrived: tuple[list[tuple[Agent, int]], ...] = [], [], []      # in the present phase and the two before
        self._known: dict[Thread, int] = {}            # how many phases each thread has waited for the end of
        self._waits: dict[Thread, _Wait] = {}          # for the end of the last phase

    def check(self, thread: Thread) -> None:
        """Raises ProtocolError when `thread` may come to the barrier before it is made."""
        if self._maker[0] is thread or thread.is_after(self._maker):
            if self.fenced or self.block is thread.block:
                return
            raise fault(thread, f"{self} is another block's and mbarrier_fence_init has not followed its mbarrier_init")
        raise fault(thread, f"nothing orders the mbarrier_init of {self}, by {self._maker[0].id}, before this: the threads "
                            "of the block, or of the cluster, must meet in between")

    def expect(self, thread: Thread, nbytes: int) -> None:
        """The present phase waits for `nbytes` more."""
        if not 0 <= nbytes <= _LIMIT or self.nbytes + nbytes > _LIMIT:
            raise fault(thread, f"{self} is told to expect {nbytes} bytes; a phase counts up to {_LIMIT}")
        self.nbytes += nbytes

    def arrive(self, thread: Thread) -> None:
        """Counts an arrival; what the thread has done is known to the threads that wait for this phase."""
        if not self.arrivals:
            raise fault(thread, f"all {self.count} arrivals at {self} have come in this phase, and here is one more")
        if thread.block is not self.block:
            self.touched[thread] = thread, thread.clock, here()
        self._arrived[0].append((thread, thread.clock))
        self._clock.release(thread)
        self.arrivals -= 1
        self._advance(thread)

    def complete(self, unit: AsyncUnit, nbytes: int) -> None:
        """Counts bytes that have been copied."""
        unit.block.started.append((next(_moments), unit.clock, unit.foreign))     # type: ignore[attr-defined]
        unit.rests()
        self._arrived[0].append((unit, unit.clock))
        self._clock.release(unit)
        self.nbytes -= nbytes
        self._advance(unit)

    def _advance(self, agent: Agent) -> None:
        if self.arrivals or self.nbytes:
            return
        if self._waits:
            self._check_waits(agent)
        self.phase += 1
        self.arrivals = self.count
        self._last, self._clock = self._clock, Clock(self.block)
        self._arrived = [], *self._arrived[:2]

    def wait(self, thread: Thread, parity: int) -> None:
        """Waits until the last phase of `parity` is over."""
        if parity not in (0, 1):
            raise fault(thread, f"parity is {parity}; phases have parities 0 and 1")
        thread.wait_until(lambda: self.phase % 2 != parity, lambda: f"phase {self.phase} of {self}, which lacks "
                          f"{self.arrivals} of {self.count} arrivals and {self.nbytes} bytes{self._missed(thread)}")
        self._check_phase(thread)
        self._last.acquire(thread)
        self._known[thread] = self.phase
        self._waits[thread] = _Wait(thread.clock, of(thread).issues, next(_moments), here())

    def _missed(self, thread: Thread) -> str:
        known = self._known.get(thread, 0)
        return f" (it may have missed phase {known}, for which it has not waited)" if known < self.phase else ""

    def _check_waits(self, agent: Agent) -> None:
        """The present phase ends. Raises ProtocolError when a thread's wait for the one before might still be to come in
        other orders: the phase that follows has its parity, so that the thread would wait for that one."""
        views = self._clock.views()
        seen = views.get(self.block)
        for thread, wait in self._waits.items():
            if (seen is None or wait.time > seen[thread.index]) and not self._is_over(thread, wait, views, set()):
                missed = f"phase {self.phase - 1}" if self.phase else "the fresh barrier"
                raise fault(agent, f"warp {thread.warp} may miss {missed} of {self}, and wait for phase {self.phase + 1}, "
                                   f"which has the same parity: nothing orders the wait of {thread.id} before this end of "
                                   f"phase {self.phase}\n  it waits at {kernel_line(wait.site)}")
        self._waits.clear()

    def _is_over(self, thread: Thread, wait: _Wait, views: Mapping[Any, Vector], looked: set[int]) -> bool:
        """Whether a wait comes before what is known: by what threads tell each other, or by wgmmas and copies that were
        started after it and are done. (These tell nothing of memory, yet they cannot have run before it.)"""
        seen, cores = views.get(self.block), self.block.tensor_cores[thread.index // WARPGROUP]
        if seen is not None and wait.time <= seen[thread.index]:
            return True
        if cores.issued[views.get(cores.block, _NONE)[0]] > wait.issued:
            return True
        for unit, known in views.items():
            for moment, time, before in reversed(getattr(unit, "started", ())):
                if moment < wait.moment:
                    break
                if time <= known[0] and before and id(before) not in looked:
                    looked.add(id(before))
                    if self._is_over(thread, wait, before, looked):
                        return True
        return False

    def _check_phase(self, thread: Thread) -> None:
        """A parity names the phase that has just ended, or the one two before. Raises ProtocolError when the wait might have
        taken that one: the phase between them had ended before the wait began, but nothing makes it so in other orders."""
        if self.phase < 2 or self._known.get(thread, 0) >= self.phase - 1:
            return
        site = here()
        for agent, time in self._arrived[2]:
            if agent is not thread and not thread.is_after((agent, time, site)):
                old = f"the end of phase {self.phase - 3}" if self.phase > 2 else "the fresh barrier"
                raise fault(thread, f"this wait for phase {self.phase - 1} of {self} may take {old} for it, which has "
                                    f"the same parity: nothing orders the end of phase {self.phase - 2} before the wait")

    def __str__(self) -> str:
        return f"the mbarrier at offset {self.address}"


def make(thread: Thread, address: int, count: int) -> None:
    """Makes a barrier. Raises ProtocolError where there is one, or for a count that no barrier has."""
    if not 1 <= count <= _LIMIT:
        raise fault(thread, f"an mbarrier is made for {count} arrivals; 1 to {_LIMIT} can be counted")
    if address in thread.block.mbarriers:
        raise fault(thread, f"there is an mbarrier at offset {address} already")
    thread.shared_write(address, _CONTENT)
    thread.block.mbarriers[address] = thread.block.kinds.mbarrier(thread, address, count)


def find(thread: Thread, address: int, rank: int | None = None) -> Mbarrier:
    """The barrier at `address`, of the thread's block or of block `rank` of its cluster."""
    block = thread.block if rank is None else peer(thread, rank)
    barrier = block.mbarriers.get(address)
    if barrier is None:
        raise fault(thread, f"there is no mbarrier at offset {address} of block {block.index}; make it with mbarrier_init")
    barrier.check(thread)
    memory = block.shared
    first = address - memory.base
    if memory.bytes[first:first + SIZE] != _CONTENT:
        raise fault(thread, f"something has written over {barrier}, whose {SIZE} bytes are its own")
    return barrier


def peer(thread: Thread, rank: int) -> Block:
    """Block `rank` of the thread's cluster, which must not have ended."""
    cluster = thread.block.cluster
    if not 0 <= rank < len(cluster):
        raise fault(thread, f"the cluster has no block of rank {rank}; it has {len(cluster)}")
    if cluster[rank].finished:
        raise fault(thread, f"block {cluster[rank].index} of the cluster has ended, and its shared memory with it; the "
                            "cluster must meet before its blocks end")
    return cluster[rank]


def fence(thread: Thread) -> None:
    """The barriers that the thread has made may be used by copies and by other blocks."""
    for barrier in thread.block.mbarriers.values():
        if barrier._maker[0] is thread:
            barrier.fenced = True


def fault(thread: Agent, message: str) -> ProtocolError:
    return ProtocolError(message, site=here(), thread=thread.id)


_REGISTERS = 65536  # of a multiprocessor
_MOST = 256  # that a thread is given at launch


class ClusterBarrier:
    """Where all threads of a cluster meet that have not ended; its blocks share it."""

    def __init__(self) -> None:
        self._clock = self._last = Clock()
        self._phase = 0
        self._waiting: dict[Thread, int] = {}  # which phase a thread has arrived at and not yet waited for
        self._arrived = 0

    def arrive(self, thread: Thread) -> None:
        if thread in self._waiting:
            raise fault(thread, "a thread arrives at the cluster's barrier again before it has waited there")
        self._waiting[thread] = self._phase
        self._clock.release(thread)
        self._arrived += 1
        self._advance(thread.block.cluster)

    def wait(self, thread: Thread) -> None:
        if thread not in self._waiting:
            raise fault(thread, "a thread waits at the cluster's barrier without having arrived")
        phase, cluster = self._waiting[thread], thread.block.cluster

        def over() -> bool:
            self._advance(cluster)  # threads may have ended since
            return self._phase > phase

        thread.wait_until(over, lambda: f"the cluster's barrier ({self._arrived} of {_running(cluster)} there)")
        del self._waiting[thread]
        self._last.acquire(thread)

    def _advance(self, cluster: Sequence[Block]) -> None:
        if 0 < _running(cluster) <= self._arrived:
            self._phase += 1
            self._arrived = 0
            self._last, self._clock = self._clock, Clock()


def _running(cluster: Sequence[Block]) -> int:
    return sum(block.running for block in cluster)


def read(thread: Thread, rank: int, offset: int, nbytes: int) -> Bytes:
    """Bytes of the shared memory of block `rank` of the thread's cluster, in accesses as wide as 16 bytes."""
    block, step = peer(thread, rank), math.gcd(nbytes, 16)
    data = np.concatenate([thread.read(block.shared, offset + at, step) for at in range(0, nbytes, step)])
    if block is not thread.block:
        block.readers[thread] = thread, thread.clock, here()
    return data


def leave(thread: Thread) -> None:
    """The thread ends. With the last of its block shared memory goes.

    Raises:
        ProtocolError: another block may still read it or arrive at its barriers, or a copy be on its way there, as nothing
            orders that before the end of any thread.
    """
    block = thread.block
    block.registers.check(thread)
    if block.running > 1:
        return
    for record in block.readers.values():
        if not _is_over(block, record):
            raise ProtocolError(f"block {block.index} of the cluster ends while another may still read its shared memory; "
                                "the cluster must meet before its blocks end", site=record[2], thread=record[0].id)
    for barrier in block.mbarriers.values():
        for record in barrier.touched.values():
            if _is_over(block, record):
                continue
            what = "a copy may still be on its way to its shared memory" if record[0].asynchronous else (
                "another block of the cluster may still arrive there")
            raise ProtocolError(f"block {block.index} ends, and with it {barrier}, while {what}; a thread of the block must "
                                "wait for it, or the cluster meet", site=record[2], thread=record[0].id)


def _is_over(block: Block, record: Record) -> bool:
    """Whether something happened before the end of some thread of the block."""
    return any(own.is_after(record) for own in block.threads)


class RegisterFile:
    """The registers of a block: all warps begin with as many as fit, give some back, take what others gave.

    ``planned`` is what a thread of each warp ends with, where the launch says so: the tiles are chosen to fit these, and
    blocks that share a multiprocessor begin with as many as these take.
    """

    def __init__(self, threads: int, planned: Sequence[int] | None = None) -> None:
        self._planned = planned
        self._warps = -(-threads // 32)
        most = _MOST if planned is None else sum(planned) // self._warps
        self._each = min(most, _REGISTERS // (32 * self._warps) // 8 * 8)
        self._of: dict[int, int] = {}
        self._giving: dict[int, int] = {}              # threads of a warp that have come to give

    def give(self, thread: Thread, n: int) -> None:
        """The thread's warp keeps `n` a thread, when all its threads have come. Raises ProtocolError when it has fewer."""
        warp = thread.warp
        if n > self._has(warp):
            raise fault(thread, f"release_registers({n}) by a warp that has {self._has(warp)} registers a thread")
        lanes = min(32, thread.block.size - 32 * warp)
        came = self._giving[warp] = self._giving.get(warp, 0) + 1
        wanted = -(-came // lanes) * lanes
        thread.wait_until(lambda: self._giving[warp] >= wanted, lambda: f"release_registers({n}): {self._giving[warp]} of "
                          f"{wanted} threads of warp {warp} have come")
        self._of[warp] = n

    def take(self, thread: Thread, n: int) -> None:
        """The thread's warp waits for `n` a thread. Raises ProtocolError when it has more."""
        if n < self._has(thread.warp):
            raise fault(thread, f"claim_registers({n}) by a warp that has {self._has(thread.warp)} registers a thread")
        total = self._each * self._warps

        def wanted() -> int:
            return n + sum(self._has(warp) for warp in range(self._warps) if warp != thread.warp)

        thread.wait_until(lambda: wanted() <= total, lambda: f"claim_registers({n}): {32 * wanted()} registers would be in "
                          f"use, and the block has {32 * total}")
        self._of[thread.warp] = n

    def check(self, thread: Thread) -> None:
        """Raises ProtocolError when a thread ends with other registers than are planned for its warp."""
        has = self._has(thread.warp)
        if self._planned is not None and has != self._planned[thread.warp]:
            raise fault(thread, f"warp {thread.warp} ends with {has} registers a thread, and the tiles are chosen for "
                                f"{self._planned[thread.warp]}: release_registers or claim_registers is missing")

    def _has(self, warp: int) -> int:
        return self._of.get(warp, self._each)


# --------------------------------------------------------------------------------------------------
# The tensor cores of a warpgroup, which read shared memory beside its threads (wgmma), and the registers that they are
# at work on: when these may be touched.
#
# Python's values have no registers, so a few things stand for them:
#
# * The result of a wgmma is `Accumulators`, which shows nothing but to another wgmma. `wgmma_wait` makes numbers of
#   those that are handed to it, once their group is done.
# * A thread counts its fences (`Thread.register_fences`), and remembers how many there were when ordinary instructions
#   could last touch what a wgmma takes (`touched`, `touched_a`). A fence must have followed. Accumulators that go
#   straight from one wgmma to another of the same shape need none. Numbers may have been put into their registers since
#   the last commit.
# * A's fragments are `Settled` in registers of which each is named by the way that led to the instruction: the functions
#   that called each other (all of them are inlined), and the number of an unrolled round. A loop of the kernel's that
#   comes there again writes the same registers. It must have waited for the groups that read them.
#
# What the compiler does beyond that (two places that share registers one after the other) it answers for itself.

WARPGROUP = 128  # threads
CHUNK = 16  # bytes that lie together whatever the layout


class TensorCoreId(ThreadId):
    """How errors name the tensor cores: by the first thread of their warpgroup."""

    def __str__(self) -> str:
        return f"the tensor cores of threads {self.tid}-{self.tid + WARPGROUP - 1} of block {self.block}"


class TensorCores(AsyncUnit):
    """Those of one warpgroup. Their time is the number of the group of wgmmas, from 1.

    They know what the threads knew that issued the instruction. What they have read counts as read for a thread that
    has waited for the group, and for no other: until then it is a race to write there.
    """

    __slots__ = ("_last", "_number", "issued", "issues", "readings")

    def __init__(self, thread: Thread) -> None:
        super().__init__(thread.block, thread.pages)
        self._number = thread.index // WARPGROUP
        self._last: tuple[Foreign, int, Foreign] = None, -1, None
        self.readings: dict[tuple[int, ...], int] = {}     # of registers of A: the last group that reads them
        self.issues = 0                                    # wgmmas so far
        self.issued = [0]                                  # wgmmas up to the end of each group

    @property
    def id(self) -> ThreadId:
        return TensorCoreId(self.block.index, self._number * WARPGROUP)

    def starts_for_all(self, threads: Sequence[Thread]) -> None:
        """The next reads come after all that the warpgroup's threads have done and seen."""
        self.issues += 1
        self.foreign = past(threads)
        fenced = [thread.fenced for thread in threads]
        self.fenced = () if () in fenced else tuple({(id(one[0][1]), id(one[0][2])): one[0] for one in fenced}.values())

    def gather(self, thread: Thread, addresses: np.ndarray) -> np.ndarray:
        """The chunks of `CHUNK` bytes at these addresses of the block's shared memory: their shape, then the bytes."""
        shared = thread.block.shared
        unique, inverse = np.unique(addresses.reshape(-1), return_inverse=True)
        chunks = [self.read(shared, int(run[0]), CHUNK * len(run), CHUNK)
                  for run in np.split(unique, np.flatnonzero(np.diff(unique) != CHUNK) + 1)]
        return np.concatenate(chunks).reshape(-1, CHUNK)[inverse].reshape(*addresses.shape, CHUNK)

    def commit(self) -> None:
        """Closes the group."""
        self.issued.append(self.issues)
        self.clock += 1

    def wait(self, thread: Thread, pending: int) -> int:
        """All groups but the last `pending` are done, and `thread` knows of it. Returns the last that is."""
        group = self.clock - 1 - pending
        before, time, after = self._last
        if before is not thread.foreign or time != group:  # else the neighbour's result: its past was the same
            before = thread.foreign
            self.awaited_by(thread, group)
            after = thread.foreign
            self._last = before, group, after
        thread.foreign = after
        return group


def of(thread: Thread) -> TensorCores:
    """Those of `thread`'s warpgroup."""
    units = thread.block.tensor_cores
    number = thread.index // WARPGROUP
    if number not in units:
        units[number] = thread.block.kinds.tensor_cores(thread)
    return units[number]


def same(thread: Thread, name: str, values: Sequence[int]) -> int:
    """What all threads gave for an operand that must be the same in all; raises ProtocolError when it is not."""
    if values.count(values[0]) != len(values):
        raise ProtocolError(f"{name} differs between the threads of a warpgroup: {values[0]} in its first, "
                            f"{next(v for v in values if v != values[0])} in another", site=here(), thread=thread.id)
    return values[0]


Key = tuple[int, ...]
_MOST_PENDING = 7


class Accumulators:
    """What a thread has of the result of a wgmma that may be in flight."""

    __slots__ = ("_thread", "group", "shape", "values")

    def __init__(self, thread: Thread, values: tuple, group: int, shape: str) -> None:
        self._thread, self.values, self.group, self.shape = thread, values, group, shape

    def _refuse(self, *ignored: Any, **named: Any) -> NoReturn:
        raise fault(self._thread, "accumulators are used while wgmmas in flight may write to them; hand them to wgmma_wait, "
                                  "and take what it returns")

    __getitem__ = __iter__ = __len__ = __array__ = __add__ = __bool__ = _refuse


class Settled(tuple):
    """A fragment of A in the registers that a wgmma will read."""

    fences: int
    registers: Key


def settled(thread: Thread, words: tuple) -> Settled:
    """The words in registers of their own. Raises ProtocolError when a wgmma in flight still reads these."""
    fragment = Settled(words)
    fragment.fences, fragment.registers = thread.register_fences, ()
    if thread.index % WARPGROUP == 0:     # for all of them: to find the way takes long
        unit, fragment.registers = of(thread), _way()
        if unit.readings.get(fragment.registers, 0) > unit.known_to(thread):
            raise fault(thread, "registers of A are written while a wgmma in flight still reads them; wait for its group "
                                "before (a loop has the same registers in every round)")
    return fragment


def _way() -> Key:
    """How the running instruction is reached from the kernel."""
    way: list[int] = []
    frame: FrameType | None = sys._getframe(3)         # the caller of the atom
    while frame is not None:
        code = frame.f_code
        way += id(code), frame.f_lasti
        if is_unrolled(code):
            names = frame.f_locals
            way.append(names.get("n", names.get("i", -1)))
        frame = frame.f_back
    return tuple(way)


def given(thread: Thread, accumulators: Any, shape: str) -> tuple:
    """The values that a wgmma of this shape begins with. Raises ProtocolError without the fence that it needs."""
    if accumulators.__class__ is Accumulators:
        if accumulators.shape == shape or thread.register_fences > thread.touched:
            return accumulators.values
    elif thread.register_fences > thread.touched_a:    # numbers of instructions that may have come behind the last commit
        return accumulators
    raise fault(thread, "wgmma takes accumulators that other instructions may have touched since the last wgmma_fence; call "
                        "it before the first wgmma, and after every wait that is followed by one with other accumulators")


def check_fragment(thread: Thread, fragment: tuple) -> None:
    """Raises ProtocolError when no fence has followed what made A's registers."""
    made = fragment.fences if fragment.__class__ is Settled else thread.touched_a
    if thread.register_fences <= made:
        raise fault(thread, "wgmma reads registers of A that were written since the last wgmma_fence; call it in between")


def fence_registers(thread: Thread) -> None:
    thread.register_fences += 1


def committed(thread: Thread) -> None:
    """The next group's registers of A are yet to be written."""
    thread.touched_a = thread.register_fences


def wait_for_groups(thread: Thread, pending: int, accumulators: tuple) -> tuple:
    """All groups but the last ``pending`` are over: accumulators of those are numbers from now on."""
    if not 0 <= pending <= _MOST_PENDING:
        raise fault(thread, f"wgmma_wait for all groups but {pending}; 0 to {_MOST_PENDING} may be pending")
    done = of(thread).wait(thread, pending)
    thread.touched = thread.touched_a = thread.register_fences
    return tuple([x.values if x.__class__ is Accumulators and x.group <= done else x for x in accumulators])
