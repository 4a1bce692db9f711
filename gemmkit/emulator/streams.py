"""Streams beside a launch: what copy engines, of this GPU or of others, write while a kernel runs.

    push = Stream("push from rank 1")
    push.copy(rows_of_rank_1, its_shard)
    push.write(flags, 1, epoch)
    with beside(push):
        gk.matmul(a, b, None, conf)

A stream's commands run in order, each at a moment when no thread of the launch can go on, and the rest when the kernel has
ended. Nothing but a flag orders them with the kernel, and a race is found whether or not this run's order brings it to
light (`machine`): a flag that is written before the data, a kernel that reads without waiting or waits for an old flag.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gemmkit.emulator.agent import Agent
from gemmkit.emulator.clocks import Clock
from gemmkit.emulator.errors import ThreadId
from gemmkit.emulator.memory import Memory

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Block
    from gemmkit.emulator.shadow import Pages


class _Place:
    """Stands for a block in vector clocks, with a copy engine as its only thread."""

    finished = exported = False
    number = -1

    def __init__(self, name: str) -> None:
        self.index = (name,)


class _StreamId(ThreadId):
    """How errors name a stream's copy engine."""

    def __str__(self) -> str:
        return f"the copy engine of {self.block[0]}"


class _Engine(Agent):
    """The agent of a stream's commands. It reaches memory as threads do, not by the asynchronous proxy."""

    __slots__ = ()

    @property
    def id(self) -> ThreadId:
        return _StreamId(self.block.index, 0)


class Stream:
    """Commands that run in their order beside a launch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._commands: deque[Callable[[_Engine, dict[int, Clock]], None]] = deque()
        self._engine: _Engine | None = None

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        """Copy a matrix into one of the same shape and dtype. It is read now."""
        if to.shape != source.shape or to.dtype != source.dtype:
            raise ValueError(f"source is {source.dtype} {source.shape} and to is {to.dtype} {to.shape}; they must be alike")
        memory, rows = Memory.for_array(to, self.name), np.array(source, order="C")

        def run(engine: _Engine, clocks: dict[int, Clock]) -> None:
            for i in range(len(to)):
                for at, row in _runs(to[i], rows[i]):
                    engine.write(memory, at, row, alignment=1)

        self._commands.append(run)

    def write(self, flags: np.ndarray, at: int, value: int) -> None:
        """Write a flag of uint32, behind all that the stream has done."""
        address = flags[at:].__array_interface__["data"][0]

        def run(engine: _Engine, clocks: dict[int, Clock]) -> None:
            clocks.setdefault(address, Clock()).release(engine)
            flags[at] = value

        self._commands.append(run)

    def begin(self, pages: Pages) -> None:
        """A launch begins, whose history of global memory this is."""
        self._engine = _Engine(cast("Block", _Place(self.name)), 0, [0], pages)

    def step(self, clocks: dict[int, Clock]) -> bool:
        """Run the next command, if there is one."""
        if not self._commands:
            return False
        assert self._engine is not None
        self._commands.popleft()(self._engine, clocks)
        return True


def _runs(to: np.ndarray, values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The bytes of a row where they lie together: the address, and what is to be written there."""
    first = to.__array_interface__["data"][0]
    if to.size and to.strides[0] == to.itemsize:
        yield first, values.view(np.uint8)
    else:
        for j in range(to.size):
            yield first + j * to.strides[0], values[j:j + 1].view(np.uint8)


class Running:
    """The streams beside one launch after the other, and the clocks of the flags that they have written."""

    def __init__(self, streams: tuple[Stream, ...]) -> None:
        self.streams = streams
        self.clocks: dict[int, Clock] = {}

    def begin(self, pages: Pages) -> None:
        self.clocks.clear()
        for stream in self.streams:
            stream.begin(pages)

    def step(self) -> bool:
        """One command of one stream; whether there was one left."""
        return any(stream.step(self.clocks) for stream in self.streams)


running: ContextVar[Running | None] = ContextVar("gemmkit_streams", default=None)


@contextmanager
def beside(*streams: Stream) -> Iterator[None]:
    """Launches within it have these streams beside them."""
    token = running.set(Running(streams))
    try:
        yield
    finally:
        running.reset(token)


def acquire(agent: Any, address: int) -> None:
    """What was written before the flag at this address is a part of the agent's past."""
    found = running.get()
    clock = None if found is None else found.clocks.get(address)
    if clock is not None:
        clock.acquire(agent)
