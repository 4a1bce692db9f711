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
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from gemmkit.emulator import tensor_cores
from gemmkit.emulator.mbarriers import fault
from gemmkit.lang.sites import is_unrolled

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Thread

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
    if thread.index % tensor_cores.WARPGROUP == 0:     # for all of them: to find the way takes long
        unit, fragment.registers = tensor_cores.of(thread), _way()
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
    done = tensor_cores.of(thread).wait(thread, pending)
    thread.touched = thread.touched_a = thread.register_fences
    return tuple([x.values if x.__class__ is Accumulators and x.group <= done else x for x in accumulators])
