"""Counters in global memory: additions that order what other accesses do, by a `Clock` for each counter.

A release puts a thread's past into the counter's clock, an acquire takes what is there. Atomic accesses never race with each
other; with ordinary accesses to the same bytes they are not compared.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gemmkit.emulator import streams
from gemmkit.emulator.clocks import Clock

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Thread
    from gemmkit.emulator.memory import Memory

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
    streams.acquire(thread, address)


def _cell(memory: Memory, address: int) -> np.ndarray:
    """The counter's memory. `View.locate` has checked that it is one of the array's elements."""
    low = address - memory.base
    return memory.data[low:low + _BYTES].view(np.uint32)


def _clock(memory: Memory, address: int) -> Clock:
    return memory.clocks.setdefault(address, Clock())
