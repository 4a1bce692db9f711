"""Vector clocks: which agent knows of which one's past.

Every agent counts its own time (`clock`), which moves on when others may learn of it, and holds how far it
has seen each thread of its block (`seen`, one entry a thread) and, rarely, threads of other blocks
(`foreign`). An access of agent X at time c happened before one of Y exactly if Y has seen X up to c. The
vectors are never changed once they are published, so that all threads that leave a barrier share one list.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmkit.emulator.agent import Agent
    from gemmkit.emulator.machine import Block

Vector = list[int]
Foreign = dict["Block", Vector] | None


def _maximum(vectors: Iterable[Vector]) -> Vector:
    """Element-wise maximum, as a new list. After a barrier the vectors are one object, taken once."""
    distinct = list({id(vector): vector for vector in vectors}.values())
    if len(distinct) == 2:                                     # the usual number, and `max` takes four times as long
        return [a if a > b else b for a, b in zip(*distinct)]
    return list(distinct[0]) if len(distinct) == 1 else list(map(max, *distinct))


def _merged(views: Iterable[Foreign]) -> dict[Block, Vector]:
    """What several agents together have seen of a set of blocks."""
    parts: dict[Block, list[Vector]] = {}
    for view in {id(view): view for view in views}.values():  # threads that met share one
        for block, vector in (view or {}).items():
            parts.setdefault(block, []).append(vector)
    return {block: _maximum(vectors) for block, vectors in parts.items()}


def join(agents: Sequence[Agent]) -> None:
    """Orders the whole past of agents of one block before the future of each of them, as a barrier does."""
    seen = _maximum(agent.seen for agent in agents)
    for agent in agents:
        seen[agent.index] = agent.clock
    foreign: Foreign = None
    if any(agent.foreign for agent in agents):
        foreign = _merged(agent.foreign for agent in agents)
    for agent in agents:
        agent.seen, agent.foreign = seen, foreign
        agent.clock += 1


def past(agents: Sequence[Agent]) -> dict[Block, Vector]:
    """All that agents of one block have done and seen, as an agent elsewhere comes to know it."""
    seen = _maximum(agent.seen for agent in agents)
    for agent in agents:
        seen[agent.index] = agent.clock
    return {**_merged(agent.foreign for agent in agents), agents[0].block: seen}


class Clock:
    """Carries order through a synchronisation object: what a thread did before `release` happened before
    what another does after an `acquire` that follows.

    A clock remembers every release. An object with phases (an mbarrier) takes a new one for each phase, or
    its waiters would learn of arrivals for the next phase too.

    Args:
        block: the block whose threads alone may acquire, such as the block whose shared memory holds the
            object; None for any thread of the launch.

    Example: a flag set by one thread and awaited by another::

        flag.clock.release(thread); flag.up = True                   # the producer
        thread.wait_until(lambda: flag.up, "the flag"); flag.clock.acquire(thread)
    """

    __slots__ = ("_arrivals", "_last", "_views", "block")

    def __init__(self, block: Block | None = None) -> None:
        self.block = block
        self._arrivals: list[tuple[Agent, int, Vector, Foreign]] = []
        self._views: dict[Block, Vector] = {}
        self._last: tuple[Vector, Foreign, Vector, Foreign] | None = None

    def release(self, agent: Agent) -> None:
        """Publishes all that `agent` has done and seen so far."""
        self._arrivals.append((agent, agent.clock, agent.seen, agent.foreign))
        agent.clock += 1
        if self.block is not agent.block:
            agent.block.exported = True
        if len(self._arrivals) > 1024:
            self._fold()

    def acquire(self, agent: Agent) -> None:
        """Makes all that was released so far part of `agent`'s past."""
        if self.block is not None and self.block is not agent.block:
            raise ValueError(f"{agent.id} acquires a clock of block {self.block.index}; give Clock no block "
                             "when threads of other blocks acquire it")
        if self._arrivals:
            self._fold()
        last = self._last
        if last is not None and last[0] is agent.seen and last[1] is agent.foreign:
            agent.seen, agent.foreign = last[2], last[3]  # the neighbour's result: its past was the same
            return
        before = agent.seen, agent.foreign
        own = self._views.get(agent.block)
        if own is not None:
            agent.seen = _maximum((agent.seen, own))
        others = {block: vector for block, vector in self._views.items() if block is not agent.block}
        if others:
            agent.foreign = _merged((agent.foreign, others))
        self._last = (*before, agent.seen, agent.foreign)

    def _fold(self) -> None:
        arrivals: dict[Block, list[tuple[Agent, int, Vector, Foreign]]] = {}
        for arrival in self._arrivals:
            arrivals.setdefault(arrival[0].block, []).append(arrival)
        views: list[Foreign] = [self._views]
        views.extend({id(foreign): foreign for _, _, _, foreign in self._arrivals}.values())
        for block, group in arrivals.items():
            vector = _maximum(seen for _, _, seen, _ in group)
            for agent, clock, _, _ in group:
                vector[agent.index] = max(vector[agent.index], clock)
            views.append({block: vector})
        self._views, self._arrivals, self._last = _merged(views), [], None
