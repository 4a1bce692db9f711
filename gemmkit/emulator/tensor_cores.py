"""The tensor cores of a warpgroup, which read shared memory beside its threads (wgmma)."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gemmkit.emulator.async_unit import AsyncUnit
from gemmkit.emulator.clocks import Foreign, past
from gemmkit.emulator.errors import ProtocolError, ThreadId
from gemmkit.lang.sites import here

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Thread

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

    __slots__ = ("_last", "_number", "readings")

    def __init__(self, thread: Thread) -> None:
        super().__init__(thread.block, thread.pages)
        self._number = thread.index // WARPGROUP
        self._last: tuple[Foreign, int, Foreign] = None, -1, None
        self.readings: dict[tuple[int, ...], int] = {}     # of registers of A: the last group that reads them

    @property
    def id(self) -> ThreadId:
        return TensorCoreId(self.block.index, self._number * WARPGROUP)

    def starts_for_all(self, threads: Sequence[Thread]) -> None:
        """The next reads come after all that the warpgroup's threads have done and seen."""
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
