"""Registers that the tensor cores are at work on (wgmma): when they may be touched.

Python's values have no registers, so a few things stand for them:

* The result of a wgmma is `Accumulators`, which shows nothing but to another wgmma. `wgmma_wait` makes numbers of
  those that are handed to it, once their group is done.
* A thread counts its fences (`Thread.register_fences`), and remembers how many there were when ordinary instructions could
  last touch what a wgmma takes (`touched`, `touched_a`). A fence must have followed. Accumulators that go straight from one
  wgmma to another of the same shape need none. Numbers may have been put into their registers since the last commit.
* A's fragments are `Settled` in registers of which each is named by the way that led to the instruction: the functions that
  called each other (all of them are inlined), and the number of an unrolled round. A loop of the kernel's that comes there
  again writes the same registers. It must have waited for the groups that read them.

What the compiler does beyond that (two places that share registers one after the other) it answers for itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from gemmkit.emulator.agents import AsyncUnit
from gemmkit.emulator.barriers import fault
from gemmkit.emulator.errors import ProtocolError, ThreadId
from gemmkit.emulator.memory import Foreign, past
from gemmkit.lang.host import here, is_unrolled

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Thread


# --------------------------------------------------------------------------------------------------
# The tensor cores of a warpgroup, which read shared memory beside its threads (wgmma).

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


def fence(thread: Thread) -> None:
    thread.register_fences += 1


def committed(thread: Thread) -> None:
    """The next group's registers of A are yet to be written."""
    thread.touched_a = thread.register_fences


def wait(thread: Thread, pending: int, accumulators: tuple) -> tuple:
    """All groups but the last ``pending`` are over: accumulators of those are numbers from now on."""
    if not 0 <= pending <= _MOST_PENDING:
        raise fault(thread, f"wgmma_wait for all groups but {pending}; 0 to {_MOST_PENDING} may be pending")
    done = of(thread).wait(thread, pending)
    thread.touched = thread.touched_a = thread.register_fences
    return tuple([x.values if x.__class__ is Accumulators and x.group <= done else x for x in accumulators])
