"""Copies that threads start and do not wait for (``cp.async``).

A copy may write from its start to the wait for its group, and its bytes are there after that wait alone. So in the emulator
it counts as a write of the thread's at both times, and an access in between, by any thread, is a fault.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gemmkit.emulator.mbarriers import Mbarrier, fault

if TYPE_CHECKING:
    from gemmkit.emulator.agent import Bytes
    from gemmkit.emulator.machine import Thread
    from gemmkit.emulator.memory import Memory


class Copy(NamedTuple):
    """A copy on its way: to ``offset`` of shared memory."""

    offset: int
    data: Bytes


class Copies:
    """A thread's copies: those since its last commit, and the groups before, the oldest first."""

    __slots__ = ("groups", "started")

    def __init__(self) -> None:
        self.started: list[Copy] = []
        self.groups: list[list[Copy]] = []

    @property
    def are_pending(self) -> bool:
        return bool(self.started or any(self.groups))


def start(thread: Thread, offset: int, memory: Memory, address: int | None, nbytes: int, there: int | None = None) -> None:
    """Starts a copy to `offset` of shared memory; zeros where there is no `address`, and behind the first bytes that are
    `there` (None: all are)."""
    data: Bytes = np.zeros(nbytes, np.uint8)
    if address is not None:
        count = nbytes if there is None else there
        data[:count] = thread.read(memory, address, count, None if there is None else nbytes)
    shared = thread.block.shared
    thread.write(shared, offset, np.full(nbytes, 0xFF, np.uint8))
    if shared.valid is None:
        shared.valid = bytearray(b"\x01") * shared.size
    shared.valid[offset:offset + nbytes] = bytes(nbytes)
    if thread.copies is None:
        thread.copies = Copies()
    thread.copies.started.append(Copy(offset, data))


def commit(thread: Thread) -> None:
    """The copies since the last commit are a group, which may be an empty one."""
    if thread.copies is None:
        thread.copies = Copies()
    thread.copies.groups.append(thread.copies.started)
    thread.copies.started = []


def wait(thread: Thread, pending: int) -> None:
    """All groups but the newest `pending` are done."""
    if thread.copies is not None:
        groups = thread.copies.groups
        done = len(groups) - pending
        if done > 0:
            _finish(thread, [copy for group in groups[:done] for copy in group])
            thread.copies.groups = groups[done:]


def arrive(thread: Thread, barrier: Mbarrier) -> None:
    """The thread's arrival follows when its copies are done."""
    if thread.copies is not None:
        _finish(thread, [copy for group in (*thread.copies.groups, thread.copies.started) for copy in group])
        thread.copies = None
    barrier.arrive(thread)


def check_told(thread: Thread) -> None:
    """Raises ProtocolError where the thread would tell others of copies that may still be on their way."""
    if thread.copies is not None and thread.copies.are_pending:
        raise fault(thread, "a thread arrives while copies that it has started are on their way; call copies_arrive")


def _finish(thread: Thread, copies: list[Copy]) -> None:
    shared = thread.block.shared
    assert shared.valid is not None or not copies
    for offset, data in copies:
        shared.valid[offset:offset + len(data)] = b"\x01" * len(data)         # type: ignore[index]
        thread.write(shared, offset, data)
