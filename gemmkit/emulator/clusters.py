"""The barrier of a cluster, reads of each other's shared memory, and the registers that the warps of a block share out."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gemmkit.emulator.agent import Bytes
from gemmkit.emulator.clocks import Clock
from gemmkit.emulator.errors import ProtocolError
from gemmkit.emulator.mbarriers import fault, peer
from gemmkit.emulator.shadow import Record
from gemmkit.lang.sites import here

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Block, Thread

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


class Registers:
    """The registers of a block: all warps begin with as many as fit, give some back, take what others gave.

    ``planned`` is what a thread of each warp ends with, where the launch says so: the tiles are chosen to fit these.
    """

    def __init__(self, threads: int, planned: Sequence[int] | None = None) -> None:
        self._planned = planned
        self._warps = -(-threads // 32)
        self._each = min(_MOST, _REGISTERS // (32 * self._warps) // 8 * 8)
        self._of: dict[int, int] = {}
        self._giving: dict[int, int] = {}              # threads of a warp that have come to give

    def give(self, thread: Thread, n: int) -> None:
        """The thread's warp keeps `n` a thread, when all its threads have come. Raises ProtocolError when it has fewer."""
        warp = thread.warp
        if n > self._has(warp):
            raise fault(thread, f"give_registers({n}) by a warp that has {self._has(warp)} registers a thread")
        lanes = min(32, thread.block.size - 32 * warp)
        came = self._giving[warp] = self._giving.get(warp, 0) + 1
        wanted = -(-came // lanes) * lanes
        thread.wait_until(lambda: self._giving[warp] >= wanted, lambda: f"give_registers({n}): {self._giving[warp]} of "
                          f"{wanted} threads of warp {warp} have come")
        self._of[warp] = n

    def take(self, thread: Thread, n: int) -> None:
        """The thread's warp waits for `n` a thread. Raises ProtocolError when it has more."""
        if n < self._has(thread.warp):
            raise fault(thread, f"take_registers({n}) by a warp that has {self._has(thread.warp)} registers a thread")
        total = self._each * self._warps

        def wanted() -> int:
            return n + sum(self._has(warp) for warp in range(self._warps) if warp != thread.warp)

        thread.wait_until(lambda: wanted() <= total, lambda: f"take_registers({n}): {32 * wanted()} registers would be in "
                          f"use, and the block has {32 * total}")
        self._of[thread.warp] = n

    def check(self, thread: Thread) -> None:
        """Raises ProtocolError when a thread ends with other registers than are planned for its warp."""
        has = self._has(thread.warp)
        if self._planned is not None and has != self._planned[thread.warp]:
            raise fault(thread, f"warp {thread.warp} ends with {has} registers a thread, and the tiles are chosen for "
                                f"{self._planned[thread.warp]}: give_registers or take_registers is missing")

    def _has(self, warp: int) -> int:
        return self._of.get(warp, self._each)
