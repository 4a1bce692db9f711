"""mbarriers: phases that end when enough threads have arrived and enough bytes have been copied."""
from __future__ import annotations

from typing import TYPE_CHECKING

from gemmkit.emulator.async_unit import AsyncUnit
from gemmkit.emulator.clocks import Clock
from gemmkit.emulator.errors import ProtocolError
from gemmkit.emulator.shadow import Record
from gemmkit.lang.sites import here

if TYPE_CHECKING:
    from gemmkit.emulator.agent import Agent
    from gemmkit.emulator.machine import Block, Thread

SIZE = 8  # bytes
_CONTENT = b"\xb7\x5ambar\xb7\x5a"  # of its bytes: hardware keeps counts in them, and nothing else may write there
_LIMIT = 2**20 - 1  # of arrivals, and of bytes that a phase expects


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
        self._advance()

    def complete(self, unit: AsyncUnit, nbytes: int) -> None:
        """Counts bytes that have been copied."""
        unit.rests()
        self._arrived[0].append((unit, unit.clock))
        self._clock.release(unit)
        self.nbytes -= nbytes
        self._advance()

    def _advance(self) -> None:
        if self.arrivals or self.nbytes:
            return
        self.phase += 1
        self.arrivals = self.count
        self._last, self._clock = self._clock, Clock(self.block)
        self._arrived = [], *self._arrived[:2]

    def wait(self, thread: Thread, parity: int) -> None:
        """Waits until the last phase of `parity` is over."""
        if parity not in (0, 1):
            raise fault(thread, f"parity is {parity}; phases have parities 0 and 1")
        thread.wait_until(lambda: self.phase % 2 != parity, lambda: f"phase {self.phase} of {self}, which lacks "
                          f"{self.arrivals} of {self.count} arrivals and {self.nbytes} bytes")
        self._check_phase(thread)
        self._last.acquire(thread)
        self._known[thread] = self.phase

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
