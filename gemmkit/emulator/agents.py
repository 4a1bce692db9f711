"""Checked memory accesses, and the point in time that whoever makes them stands at."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import index as as_index
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from gemmkit.emulator import errors
from gemmkit.emulator import memory as shadow
from gemmkit.emulator.errors import ProtocolError, ThreadId
from gemmkit.emulator.memory import Clock, Foreign, Memory, Pages, Vector
from gemmkit.lang.host import Site, here, kernel_line, template_line

if TYPE_CHECKING:
    from gemmkit.emulator.machine import Block, Thread


Bytes = npt.NDArray[np.uint8]

Fenced = tuple["Block", Vector, Foreign]

_PLAIN_SIZES = frozenset((1, 2, 4, 8, 16))
_ONES = {size: b"\x01" * size for size in _PLAIN_SIZES}


class Agent:
    """An agent reads and writes memory: a thread, or a unit that acts beside threads, such as TMA.

    Attributes:
        block: where it runs; index: its entry in the block's vector clocks.
        clock, seen, foreign: its time and its knowledge of others (`clocks`).
        pages: the launch's history of global memory.
        fences: its times of `fence_proxy`, ascending.
        fenced: its knowledge (vector clock) at its last proxy fence, or, for an asynchronous agent, that of each thread that
            started it: the block, `seen`, `foreign`.
        asynchronous: whether it reaches memory by the asynchronous proxy, as TMA and tensor cores do.
            What threads have written it sees only where `fence_proxy` followed, of the writer or of the thread that
            started it.
    """

    asynchronous = False

    __slots__ = ("block", "clock", "fenced", "fences", "foreign", "index", "pages", "seen")

    def __init__(self, block: Block, index: int, seen: Vector, pages: shadow.Pages) -> None:
        self.block, self.index, self.pages = block, index, pages
        self.clock = 1
        self.seen = seen
        self.foreign: Foreign = None
        self.fences: list[int] = []
        self.fenced: Sequence[Fenced] = ()

    @property
    def id(self) -> errors.ThreadId:
        """Block index and linear thread index, as errors give them."""
        return errors.ThreadId(self.block.index, self.index)

    def is_after(self, record: shadow.Record) -> bool:
        """Whether another agent's access happened before now."""
        other = record[0]
        if other.block is self.block:
            return record[1] <= self.seen[other.index]
        seen = None if self.foreign is None else self.foreign.get(other.block)
        return seen is not None and record[1] <= seen[other.index]

    def fence_proxy(self) -> None:
        """Lets asynchronous agents that learn of this moment see what this one wrote before
        (``fence.proxy.async``)."""
        self.fences.append(self.clock)
        self.fenced = ((self.block, self.seen, self.foreign),)
        self.clock += 1

    def is_visible_to_async(self, record: shadow.Record) -> bool:
        """Whether this asynchronous agent sees a write that happened before now: another such one made it; its writer
        fenced it, and the fence too happened before now; or all threads that started the agent knew of the write, and
        fenced."""
        writer, time, site = record
        if writer.asynchronous or self._is_fenced(writer, time):
            return True
        first = bisect_left(writer.fences, time)
        # The fence ends one moment of the writer's; an agent that has seen the next one comes after it.
        return first < len(writer.fences) and self.is_after((writer, writer.fences[first] + 1, site))

    def _is_fenced(self, writer: Agent, time: int) -> bool:
        for block, seen, foreign in self.fenced:
            known = seen if writer.block is block else (foreign or {}).get(writer.block)
            if known is None or time > known[writer.index]:
                return False
        return len(self.fenced) > 0

    def read(self, memory: Memory, address: int, nbytes: int, alignment: int | None = None) -> Bytes:
        """A copy of `nbytes` bytes from absolute byte address `address`.

        Without `alignment` it is one plain access: 1, 2, 4, 8 or 16 bytes, at a multiple of its size. With
        it, it is any number of bytes at a multiple of `alignment`.

        Raises:
            AlignmentError, BoundsError, UninitialisedRead, RaceError, ProxyError: the faults of the kernel.
            ValueError: a size that no plain access has.
        """
        if address.__class__ is not int:
            address = as_index(address)
        low = address - memory.base
        if (alignment is not None or memory.valid is not None or nbytes not in _PLAIN_SIZES or address % nbytes
                or not 0 <= low <= memory.size - nbytes):      # else there is nothing to look at
            low = self._locate("read", memory, address, nbytes, alignment)
        if memory.written is not None:
            first = memory.written.find(0, low, low + nbytes)
            if first >= 0:
                raise self._fault(errors.UninitialisedRead, "read", memory, address, nbytes,
                                  f"of which nothing has written byte {first - low}")
        if memory.constant and self.pages.__class__ is dict:   # else the thread must wait for the kernel before
            return memory.data[low:low + nbytes].copy()
        pages = memory.pages
        conflict = shadow.note(self.pages if pages is None else pages, self, address, nbytes, False)
        if conflict is not None:
            raise self._race("read", conflict, memory, nbytes)
        if self.asynchronous:
            self._look_through_proxy(memory, self.pages if pages is None else pages, address, nbytes)
        return memory.data[low:low + nbytes].copy()

    def write(self, memory: Memory, address: int, data: Any, alignment: int | None = None) -> None:
        """Stores `data` (one-dimensional uint8, or bytes) at absolute byte address `address`.

        Sizes and alignment are those of `read`.

        Raises:
            ReadOnlyError, AlignmentError, BoundsError, RaceError: the faults of the kernel.
            TypeError, ValueError: `data` is not bytes; a size that no plain access has.
        """
        if address.__class__ is not int:
            address = as_index(address)
        nbytes = data.nbytes if data.__class__ is np.ndarray else len(data)
        low = address - memory.base
        if (alignment is not None or memory.valid is not None or nbytes not in _PLAIN_SIZES or address % nbytes
                or not 0 <= low <= memory.size - nbytes):
            low = self._locate("write", memory, address, nbytes, alignment)
        if memory.readonly:
            raise self._fault(errors.ReadOnlyError, "write", memory, address, nbytes, "which is read-only (a component "
                              "lists an array that it writes in its class's `outputs`)")
        pages = self.pages if memory.pages is None else memory.pages
        conflict = shadow.note(pages, self, address, nbytes, True)
        if conflict is not None:
            raise self._race("write", conflict, memory, nbytes)
        try:
            memory.bytes[low:low + nbytes] = data
        except ValueError as error:
            what = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
            raise TypeError(f"data is {what}; pass a one-dimensional array of uint8 or bytes") from error
        if memory.written is not None:
            memory.written[low:low + nbytes] = _ONES.get(nbytes) or b"\x01" * nbytes

    def out_of_bounds(self, memory: Memory, index: Sequence[int], shape: Sequence[int]) -> NoReturn:
        """Reports an array index outside its extents, whatever lies at the address it would have.

        Raises:
            BoundsError: always.
        """
        key, extents = tuple(map(int, index)), tuple(map(int, shape))
        error = errors.BoundsError(f"index {key} of {memory.name!r}, which has shape {extents}", site=here(),
                                   thread=self.id, memory=memory.name)
        error.index, error.extents = key, extents
        raise error

    def _locate(self, kind: str, memory: Memory, address: int, nbytes: int, alignment: int | None) -> int:
        """Index of the access's first byte in `memory.data`, checked for size, alignment and bounds."""
        low = address - memory.base
        if alignment is None:
            if nbytes not in _PLAIN_SIZES:
                raise ValueError(f"nbytes is {nbytes}; a plain access has 1, 2, 4, 8 or 16 bytes; "
                                 "others need alignment=")
            alignment = nbytes
        elif nbytes <= 0 or alignment <= 0:
            raise ValueError(f"nbytes is {nbytes} and alignment {alignment}; both must be positive")
        if address % alignment:
            raise self._fault(errors.AlignmentError, kind, memory, address, nbytes,
                              f"which is {address % alignment} past a multiple of {alignment}")
        high = low + nbytes
        if low < 0 or high > memory.size:
            side = f"starts {-low} bytes before it" if low < 0 else f"ends {high - memory.size} bytes past it"
            raise self._fault(errors.BoundsError, kind, memory, address, nbytes,
                              f"which has {memory.size} bytes; the access {side}")
        if memory.valid is not None and memory.valid.find(0, low, high) >= 0:
            if memory.pages is not None:
                raise self._fault(errors.ProtocolError, kind, memory, address, nbytes,
                                  "where a thread's cp.async is on its way: its group must be awaited first (wait_copies)")
            raise self._fault(errors.BoundsError, kind, memory, address, nbytes,
                              "where it touches padding between the elements")
        return low

    def _fault(self, error: type[errors.EmulatorError], kind: str, memory: Memory, address: int, nbytes: int,
               why: str) -> errors.EmulatorError:
        return error(f"{kind} of {_place(memory, address, nbytes)}, {why}", site=here(), thread=self.id,
                     address=address, size=nbytes, memory=memory.name)

    def _look_through_proxy(self, memory: Memory, pages: shadow.Pages, address: int, nbytes: int) -> None:
        """Raises ProxyError when a thread's write to these bytes cannot be seen yet."""
        for record in shadow.writers(pages, address, nbytes):
            if not self.is_visible_to_async(record):
                raise errors.ProxyError(
                    f"read of {_place(memory, address, nbytes)}, where a thread's write is not to be seen: the thread must "
                    "call fence_async() after it, and let that be known", _access("write", record[0], record[2]),
                    site=here(), thread=self.id, address=address, size=nbytes, memory=memory.name)

    def _race(self, kind: str, conflict: shadow.Conflict, memory: Memory, nbytes: int) -> errors.RaceError:
        other, _, earlier = conflict.record
        place, now = _place(memory, conflict.address, nbytes), here()
        return errors.RaceError(f"race in {place}: nothing orders these two accesses",
                                _access(conflict.kind, other, earlier), _access(kind, self, now), site=now,
                                address=conflict.address, size=nbytes, memory=memory.name)


def _place(memory: Memory, address: int, nbytes: int) -> str:
    offset = address - memory.base
    where = f"offset {offset}" if memory.base == 0 else f"address {address:#x} (byte {offset})"
    return f"{nbytes} byte{'s' if nbytes > 1 else ''} at {where} of {memory.name!r}"


def _access(kind: str, agent: Agent, site: Site) -> errors.Access:
    return errors.Access(kind, agent.id, kernel_line(site), template_line(site))


# --------------------------------------------------------------------------------------------------
# TMA as an agent beside the threads: one for each thing by which the completion of copies is awaited.
#
# Copies that end at one mbarrier are one agent, whose time is the barrier's phases; copies that one thread asks for and
# awaits are one agent, whose time is the thread's groups. So to know of a phase, or of a group, is to know of all copies
# up to it, and of no other: an agent that did all copies of a block would have its later ones awaited with the earlier.

class TmaId(ThreadId):
    """How errors name TMA."""

    def __str__(self) -> str:
        return f"TMA of block {self.block}"


class _Unit:
    """Stands for a block in vector clocks, with TMA as its only thread."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self.started: deque[tuple[int, int, Foreign]] = deque(maxlen=64)     # copies: moment, time, what came before
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


# --------------------------------------------------------------------------------------------------
# Launches that start before the kernel in front of them has ended (programmatic dependent launch).

class NotYet(dict):
    """Stands for the history of global memory (`shadow`) until its thread has waited: every access looks there first."""

    def __init__(self, thread: Thread, pages: Pages) -> None:
        super().__init__()
        self._thread, self.pages = thread, pages

    def get(self, *ignored: Any) -> NoReturn:
        raise ProtocolError("global memory is accessed while the kernel before may still run; call grid_wait first",
                            site=here(), thread=self._thread.id)


def wait(thread: Thread) -> None:
    """The kernels before have ended (``griddepcontrol.wait``)."""
    if isinstance(thread.pages, NotYet):
        thread.pages = thread.pages.pages


# --------------------------------------------------------------------------------------------------
# Streams beside a launch: what copy engines, of this GPU or of others, write while a kernel runs.
#
#     push = Stream("push from rank 1")
#     push.copy(rows_of_rank_1, its_shard)
#     push.write(flags, 1, epoch)
#     with beside(push):
#         gk.matmul(a, b, None, conf)
#
# A stream's commands run in order, each at a moment when no thread of the launch can go on, and the rest when the kernel
# has ended. Nothing but a flag orders them with the kernel, and a race is found whether or not this run's order brings it
# to light (`machine`): a flag that is written before the data, a kernel that reads without waiting or waits for an old
# flag.

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
