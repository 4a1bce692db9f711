"""TMA as an agent beside the threads: one for each thing by which the completion of copies is awaited.

Copies that end at one mbarrier are one agent, whose time is the barrier's phases; copies that one thread asks for and
awaits are one agent, whose time is the thread's groups. So to know of a phase, or of a group, is to know of all copies up to
it, and of no other: an agent that did all copies of a block would have its later ones awaited with the earlier.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from gemmkit.emulator.agent import Agent
from gemmkit.emulator.clocks import Vector
from gemmkit.emulator.errors import ThreadId

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Block, Thread


class TmaId(ThreadId):
    """How errors name TMA."""

    def __str__(self) -> str:
        return f"TMA of block {self.block}"


class _Unit:
    """Stands for a block in vector clocks, with TMA as its only thread."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self.index, self.number = block.index, block.number

    @property
    def finished(self) -> bool:
        return self._block.finished

    @property
    def exported(self) -> bool:
        return self._block.exported

    @exported.setter
    def exported(self, value: bool) -> None:
        """Its knowledge leaves the block together with that of the block's threads."""


class _Copy(Agent):
    """One of an agent's copies, at the agent's time."""

    asynchronous = True
    __slots__ = ()

    @property
    def id(self) -> ThreadId:
        return TmaId(self.block.index, 0)


class _Sent(_Copy):
    """A store that is on its way to another block (st.async): it reaches memory as threads do, not by TMA's proxy."""

    asynchronous = False
    __slots__ = ()


class AsyncUnit(Agent):
    """An agent that knows what the thread that started it knew, and makes its own accesses known.

    Example: ``unit.starts_for(thread); unit.write(...); clock.release(unit)``; what acquires the clock then
        comes after the agent's accesses up to now.
    """

    asynchronous = True
    __slots__ = ()

    def __init__(self, block: Block, pages: Any) -> None:
        super().__init__(cast("Block", _Unit(block)), 0, [0], pages)

    @property
    def id(self) -> ThreadId:
        return TmaId(self.block.index, 0)

    def starts_for(self, thread: Thread) -> None:
        """The next accesses come after all that `thread` has done and seen."""
        own: Vector = list(thread.seen)
        own[thread.index] = thread.clock
        self.foreign = {**(thread.foreign or {}), thread.block: own}
        self.fenced, self.pages = thread.fenced, thread.pages

    def copy(self, thread: Thread, is_sent: bool = False) -> Agent:
        """The agent of one copy that `thread` has started: of the other copies it knows those alone that the
        thread knows of, for nothing orders copies among themselves."""
        copy = (_Sent if is_sent else _Copy)(self.block, 0, [self.known_to(thread)], self.pages)
        copy.clock, copy.foreign = self.clock, self.foreign
        return copy

    def rests(self) -> None:
        """What the agent makes known is its own accesses, not the past of the thread that started it."""
        self.foreign = None

    def awaited_by(self, agent: Agent, time: int) -> None:
        """All accesses up to `time` (of `clock`) happened before what `agent` does from now on."""
        if time > self.known_to(agent):
            agent.foreign = {**(agent.foreign or {}), self.block: [time]}

    def known_to(self, agent: Agent) -> int:
        """How far `agent` has seen it."""
        return (agent.foreign or {}).get(self.block, (0,))[0]
