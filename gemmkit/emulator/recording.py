"""What threads, TMA and tensor cores did in a launch, in the order in which the emulator ran them.

>>> import numpy as np, gemmkit
>>> a = np.eye(16, dtype=np.float32)
>>> with gemmkit.emulate(), recorded() as seen:
...     d = gemmkit.matmul(a, a)
>>> {event.kind for event in seen.launches[0]} >= {"read", "write", "met", "left"}
True

The order is one in which the launch may run: what waits stands behind what it waits for. The emulator has no time, and
events have none.
"""
from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from gemmkit.emulator import machine
from gemmkit.emulator.barriers import Mbarrier
from gemmkit.emulator.copies import Stores
from gemmkit.emulator.machine import Kinds, chosen
from gemmkit.emulator.memory import Memory
from gemmkit.emulator.tensor_cores import TensorCores
from gemmkit.lang.host import TEMPLATE_PATHS, Site, here

MOST = 2_000_000                       # events of a launch; the rest is left out (`EventRecording.is_cut`)
_FINISHED = "_finish"                  # the function of `copies` that writes a copy a second time, at its end


class Event(NamedTuple):
    """Something that a thread did, or had done.

    ``block`` and ``thread`` are numbers in the grid and in the block; of a warpgroup's instruction, its first thread.

    | kind | place | size | phase |
    |---|---|---|---|
    | read, write | address in shared memory | bytes | |
    | copy, landed | the same, of a cp.async: started, and awaited | bytes | |
    | load, store | address in global memory; ``memory`` is its name | bytes | |
    | operand | addresses that the tensor cores read (an array) | bytes of each | |
    | instruction | its name, once a warp | | |
    | awaited | | | the last group of wgmmas that is done |
    | arrive, waited | mbarrier: (block, address) | | number of the phase |
    | tma | mbarrier that gets the bytes | bytes | number of the phase |
    | met, left | a named barrier: (number, which of its openings) | | |
    | stored | address that TMA stores from | bytes | |
    | store wait | | | |

    ``way`` has the kernel's functions that led there, the innermost first; ``site`` is the line.
    """

    kind: str
    block: int
    thread: int
    place: Any = 0
    size: int = 0
    phase: int = 0
    way: tuple[str, ...] = ()
    site: Site | None = None
    memory: str = ""


class EventRecording:
    """``launches`` has the events of each launch, and ``is_cut`` says whether one had more than `MOST`."""

    def __init__(self) -> None:
        self.launches: list[list[Event]] = []
        self.is_cut = False

    def begin(self) -> Kinds:
        """The classes of the next launch."""
        events: list[Event] = []
        self.launches.append(events)

        def note(event: Event) -> None:
            if len(events) < MOST:
                events.append(event)
            else:
                self.is_cut = True

        return _kinds(note)


@contextmanager
def recorded() -> Iterator[EventRecording]:
    """Launches within it are recorded, about half as fast as they are else."""
    recording = EventRecording()
    token = chosen.set(recording.begin)
    try:
        yield recording
    finally:
        chosen.reset(token)


def _kinds(note: Any) -> Kinds:
    """The machine's classes, with methods that note what is done before they do it."""

    def event(kind: str, thread: Any, place: Any = 0, size: int = 0, phase: int = 0) -> None:
        note(Event(kind, thread.block.number, thread.index, place, size, phase))

    def access(shared: str, far: str, thread: Any, memory: Memory, address: int, nbytes: int) -> None:
        frame = sys._getframe(2)
        at, way = int(address), _way(frame)
        if memory is not thread.block.shared:
            note(Event(far, thread.block.number, thread.index, at, nbytes, 0, way, here(2), memory.name))
            return
        caller = frame.f_code.co_name if frame.f_code.co_filename.endswith("copies.py") else ""
        kind = shared if not caller else "landed" if caller == _FINISHED else "copy"
        note(Event(kind, thread.block.number, thread.index, at, nbytes, 0, way, here(2), memory.name))

    class RecordedThread(machine.Thread):
        __slots__ = ("_met",)

        def read(self, memory: Memory, address: int, nbytes: int, alignment: int | None = None) -> Any:
            access("read", "load", self, memory, address, nbytes)
            return super().read(memory, address, nbytes, alignment)

        def write(self, memory: Memory, address: int, data: Any, alignment: int | None = None) -> None:
            access("write", "store", self, memory, address, data.nbytes if hasattr(data, "nbytes") else len(data))
            super().write(memory, address, data, alignment)

        def shared_read(self, offset: int, nbytes: int, alignment: int | None = None) -> Any:
            access("read", "load", self, self.block.shared, offset, nbytes)
            return super().read(self.block.shared, offset, nbytes, alignment)

        def shared_write(self, offset: int, data: Any, alignment: int | None = None) -> None:
            access("write", "store", self, self.block.shared, offset, len(data))
            super().write(self.block.shared, offset, data, alignment)

        def collective(self, key: str, *given: Any, **named: Any) -> Any:
            if self.lane == 0:
                event("instruction", self, key)
            return super().collective(key, *given, **named)

        def barrier(self, barrier_id: int = 0, count: int | None = None) -> None:
            super().barrier(barrier_id, count)
            event("left", self, self._met)

        def _barrier(self, barrier_id: int, count: int | None) -> Any:
            barrier = super()._barrier(barrier_id, count)
            self._met = barrier_id, barrier            # which keeps the object, so that no other has its identity
            event("met", self, self._met)
            return barrier

    class Barrier(Mbarrier):
        __slots__ = ()

        @property
        def place(self) -> tuple[int, int]:
            return self.block.number, self.address

        def arrive(self, thread: Any) -> None:
            event("arrive", thread, self.place, 0, self.phase)
            super().arrive(thread)

        def complete(self, unit: Any, nbytes: int) -> None:
            event("tma", machine.current(), self.place, nbytes, self.phase)
            super().complete(unit, nbytes)

        def wait(self, thread: Any, parity: int) -> None:
            super().wait(thread, parity)
            event("waited", thread, self.place, 0, self.phase - 1)

    class Cores(TensorCores):
        __slots__ = ()

        def gather(self, thread: Any, addresses: Any) -> Any:
            note(Event("operand", thread.block.number, thread.index, addresses, 16, 0, _way(sys._getframe(1))))
            return super().gather(thread, addresses)

        def wait(self, thread: Any, pending: int) -> int:
            group = super().wait(thread, pending)
            event("awaited", thread, 0, 0, group)
            return group

    class BulkStores(Stores):
        def store(self, thread: Any, tensor_map: Any, coordinates: Any, offset: int) -> None:
            event("stored", thread, int(offset), tensor_map.spec.box_bytes)
            super().store(thread, tensor_map, coordinates, offset)

        def wait(self, thread: Any, pending: int, done: bool) -> None:
            super().wait(thread, pending, done)
            event("store wait", thread, 0, 0, pending)

    return Kinds(RecordedThread, Barrier, Cores, BulkStores)


def _way(frame: FrameType | None) -> tuple[str, ...]:
    names: list[str] = []
    while frame is not None:
        if TEMPLATE_PATHS[0] in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return tuple(names)
