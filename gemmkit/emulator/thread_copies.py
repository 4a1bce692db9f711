"""Copies that threads start and do not wait for (``cp.async``).

In the emulator the bytes are there at once, as if the thread had written them; what is checked is that others are told of
them in the one way that waits for them.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gemmkit.emulator.mbarriers import Mbarrier, fault

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Thread
    from gemmkit.emulator.memory import Memory


def copy(thread: Thread, offset: int, memory: Memory, address: int | None, nbytes: int) -> None:
    """Starts a copy to `offset` of shared memory; zeros where there is no `address`."""
    thread.shared_write(offset, np.zeros(nbytes, np.uint8) if address is None else thread.read(memory, address, nbytes))
    thread.is_copying = True


def arrive(thread: Thread, barrier: Mbarrier) -> None:
    """The thread's arrival follows when its copies are done."""
    thread.is_copying = False
    barrier.arrive(thread)


def check_told(thread: Thread) -> None:
    """Raises ProtocolError where the thread would tell others of copies that may still be on their way."""
    if thread.is_copying:
        raise fault(thread, "a thread arrives while copies that it has started are on their way; call copies_arrive")
