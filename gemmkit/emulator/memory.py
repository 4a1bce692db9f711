"""Memories of the emulated device: arrays by absolute byte address, and the shared memory of a block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gemmkit.lang.host import Site, here

if TYPE_CHECKING:
    from gemmkit.emulator.agents import Agent
    from gemmkit.emulator.machine import Block


# --------------------------------------------------------------------------------------------------
# The history that races are found in: for every byte its last writer, and its readers since.
#
# It is exact, with these economies. Pages of cells are made on first touch. A page has a cell for every 16 bytes until a
# finer access comes, which splits them all. A reader that comes after the one before replaces it; concurrent readers form
# a set. One reader stands for all those of finished blocks, whose accesses nothing can order any more.

PAGE_BITS = 12
PAGE_BYTES = 1 << PAGE_BITS
_CELL_BITS = 4

Record = tuple["Agent", int, Site]  # the agent, at which of its times, where


class Readers:
    """Concurrent readers. At most `cells` cells share the set: an access to as many may change it."""

    __slots__ = ("agent", "cells", "records")

    def __init__(self, records: dict[Agent | None, Record], cells: int, agent: Agent) -> None:
        self.records, self.cells, self.agent = records, cells, agent


State = Record | Readers | None


class Page:
    """Cells of `1 << shift` bytes each, for PAGE_BYTES bytes."""

    __slots__ = ("mask", "readers", "shift", "writers")

    def __init__(self) -> None:
        self.shift = _CELL_BITS
        self.mask = (1 << _CELL_BITS) - 1
        self.writers: list[Record | None] = [None] * (PAGE_BYTES >> _CELL_BITS)
        self.readers: list[State] = [None] * (PAGE_BYTES >> _CELL_BITS)

    def refine(self, divisible: int) -> None:
        """Splits the cells into ones that divide `divisible`."""
        shift = (divisible & -divisible).bit_length() - 1
        times = range(1 << (self.shift - shift))
        self.writers = [writer for writer in self.writers for _ in times]
        self.readers = [state for state in self.readers for _ in times]
        for state in {id(state): state for state in self.readers}.values():
            if isinstance(state, Readers):
                state.cells *= len(times)
        self.shift, self.mask = shift, (1 << shift) - 1


Pages = dict[int, Page]


class Conflict(NamedTuple):
    """The earlier access that the present one races with, and the first byte of both."""

    kind: str
    record: Record
    address: int


def note(pages: Pages, agent: Agent, address: int, nbytes: int, write: bool) -> Conflict | None:
    """Enters an access of any length; or returns an earlier one that it races with."""
    in_page = _note_write if write else _note_read
    if (address & (PAGE_BYTES - 1)) + nbytes <= PAGE_BYTES:
        return in_page(pages, agent, address, nbytes, None)
    site, end = here(2), address + nbytes
    while address < end:
        part = min(end, (address | (PAGE_BYTES - 1)) + 1) - address
        conflict = in_page(pages, agent, address, part, site)
        if conflict is not None:
            return conflict
        address += part
    return None


def writers(pages: Pages, address: int, nbytes: int) -> list[Record]:
    """The accesses that last wrote these bytes, each once."""
    found: dict[int, Record] = {}
    end = address + nbytes
    while address < end:
        part = min(end, (address | (PAGE_BYTES - 1)) + 1) - address
        page, first, count = _cells(pages, address, part)
        for record in page.writers[first:first + count]:
            if record is not None:
                found[id(record)] = record
        address += part
    return list(found.values())


def _cells(pages: Pages, address: int, nbytes: int) -> tuple[Page, int, int]:
    """The page of an access, its first cell and their number."""
    number = address >> PAGE_BITS
    page = pages.get(number)
    if page is None:
        page = pages[number] = Page()
    if (address | nbytes) & page.mask:
        page.refine(address | nbytes)
    shift = page.shift
    return page, (address & (PAGE_BYTES - 1)) >> shift, nbytes >> shift


def _note_read(pages: Pages, agent: Agent, address: int, nbytes: int, site: Site | None) -> Conflict | None:
    page, first, count = _cells(pages, address, nbytes)
    readers, writers = page.readers, page.writers
    if count == 1:
        state, writer = readers[first], writers[first]
        if _is_repeated(state, agent):
            return None
        if writer is not None and writer[0] is not agent and not agent.is_after(writer):
            return Conflict("write", writer, address)
        record = (agent, agent.clock, site or here(3))
        readers[first] = record if state is None else _with_reader(state, record, 1)
        return None
    cells = slice(first, first + count)
    states = readers[cells]
    state = states[0]
    uniform = states.count(state) == count
    if uniform and _is_repeated(state, agent):
        return None
    conflict = _first_unordered(agent, writers[cells], "write", address, page.shift)
    if conflict is not None:
        return conflict
    record = (agent, agent.clock, site or here(3))
    if uniform:
        readers[cells] = [record if state is None else _with_reader(state, record, count)] * count
        return None
    parts: dict[int, list[int]] = {}
    for position, state in enumerate(states):
        parts.setdefault(id(state), []).append(position)
    for positions in parts.values():
        state = _with_reader(states[positions[0]], record, len(positions))
        for position in positions:
            readers[first + position] = state
    return None


def _note_write(pages: Pages, agent: Agent, address: int, nbytes: int, site: Site | None) -> Conflict | None:
    page, first, count = _cells(pages, address, nbytes)
    readers, writers = page.readers, page.writers
    cells = slice(first, first + count)
    if count == 1 and readers[first] is None:
        writer = writers[first]
        if writer is not None and writer[0] is not agent and not agent.is_after(writer):
            return Conflict("write", writer, address)
        writers[first] = agent, agent.clock, site or here(3)
        return None
    conflict = (_first_unordered(agent, writers[cells], "write", address, page.shift)
                or _first_unordered(agent, readers[cells], "read", address, page.shift))
    if conflict is not None:
        return conflict
    writers[cells] = [(agent, agent.clock, site or here(3))] * count
    readers[cells] = [None] * count
    return None


def _is_repeated(state: State, agent: Agent) -> bool:
    """Whether `agent` has read these cells at its present time before; no agent has written them since."""
    if isinstance(state, Readers):
        record = state.records.get(agent)
        return record is not None and record[1] == agent.clock
    return state is not None and state[0] is agent and state[1] == agent.clock


def _first_unordered(agent: Agent, states: Sequence[State], kind: str, address: int,
                     shift: int) -> Conflict | None:
    if len(states) > 1 and states.count(states[0]) == len(states):
        states = states[:1]
    previous, block, seen = None, agent.block, agent.seen
    for position, state in enumerate(states):
        if state is None or state is previous:
            continue
        previous = state
        for record in state.records.values() if isinstance(state, Readers) else (state,):
            other = record[0]
            if other is agent:
                continue
            # `is_after`, without the call for threads of one block, which are most
            if record[1] > seen[other.index] if other.block is block else not agent.is_after(record):
                return Conflict(kind, record, address + (position << shift))
    return None


def _with_reader(state: State, record: Record, count: int) -> Record | Readers:
    """The state of `count` cells that had `state` (None: never read) and are now read by `record` too."""
    agent = record[0]
    if state is None:
        return record
    if not isinstance(state, Readers):
        if state[0] is agent or agent.is_after(state):
            return record
        return Readers({_key(state, agent): state, agent: record}, count, agent)
    if state.cells != count:  # others share the set: leave it to them
        state.cells -= count
        state = Readers(dict(state.records), count, state.agent)
    if state.agent.block is not agent.block:
        state.records = {_key(old, agent): old for old in state.records.values()}
    state.records[agent] = record
    state.agent = agent
    return state


def _key(record: Record, agent: Agent) -> Agent | None:
    """Under what a set keeps a reader: all readers of blocks that ended, unobserved by others, are as one."""
    block = record[0].block
    return None if block is not agent.block and block.finished and not block.exported else record[0]


# --------------------------------------------------------------------------------------------------
# Vector clocks: which agent knows of which one's past.
#
# Every agent counts its own time (`clock`), which moves on when others may learn of it, and holds how far it has seen
# each thread of its block (`seen`, one entry a thread) and, rarely, threads of other blocks (`foreign`). An access of
# agent X at time c happened before one of Y exactly if Y has seen X up to c. The vectors are never changed once they are
# published, so that all threads that leave a barrier share one list.

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
        views = self.views()
        last = self._last
        if last is not None and last[0] is agent.seen and last[1] is agent.foreign:
            agent.seen, agent.foreign = last[2], last[3]  # the neighbour's result: its past was the same
            return
        before = agent.seen, agent.foreign
        own = views.get(agent.block)
        if own is not None:
            agent.seen = _maximum((agent.seen, own))
        others = {block: vector for block, vector in views.items() if block is not agent.block}
        if others:
            agent.foreign = _merged((agent.foreign, others))
        self._last = (*before, agent.seen, agent.foreign)

    def views(self) -> dict[Block, Vector]:
        """How far what was released has seen each block."""
        if self._arrivals:
            self._fold()
        return self._views

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


BANKS, WORD = 32, 4  # of shared memory: words of so many bytes lie in so many banks, one after the other
_POISON = 0xFF  # a NaN in every floating-point type, -1 in the integers


class _Span:
    """Exposes the bytes [base, base + size) that an array lies in; keeps the array alive."""

    def __init__(self, array: npt.NDArray[Any], base: int, size: int) -> None:
        self.array = array
        self.__array_interface__ = {
            "data": (base, not array.flags.writeable), "shape": (size,), "typestr": "|u1", "version": 3}


class Memory:
    """Bytes that a kernel can reach: `size` bytes from address `base`.

    `Memory.for_array` makes it for global memory, `Memory.shared` for a block's. The fields are the
    machine's.

    Attributes:
        valid: one byte for each byte of memory, 0 where no element lies, or in shared memory where a thread's copy is on its
            way (`gemmkit.emulator.copies`); None when all are valid.
        written: one byte for each byte of memory, 0 where nothing has been written; None when all counts as
            written.
        pages: the access history of shared memory. None for arrays: theirs belongs to the launch and goes by
            absolute address, so that two memories over the same bytes share it.
        clocks: those of counters, by their addresses (`gemmkit.emulator.barriers`).
        constant: nothing writes these bytes while the launch runs, so that nobody's reads of them are entered anywhere.
    """

    __slots__ = ("base", "bytes", "clocks", "constant", "data", "name", "pages", "readonly", "size", "valid", "written")

    def __init__(self, name: str, base: int, data: npt.NDArray[np.uint8], *, readonly: bool = False,
                 valid: bytearray | None = None, written: bytearray | None = None,
                 pages: Pages | None = None) -> None:
        self.name, self.base, self.size = name, base, data.size
        self.data, self.bytes = data, memoryview(data)  # type: ignore[arg-type]
        self.readonly, self.valid, self.written, self.pages = readonly, valid, written, pages
        self.clocks: dict[int, Clock] = {}
        self.constant = False

    @classmethod
    def for_array(cls, array: npt.NDArray[Any], name: str, readonly: bool = False,
                  written: bool = True) -> Memory:
        """Global memory over a NumPy array, by absolute byte addresses as the array's data pointer gives
        them.

        Args:
            array: any shape and strides (views, transposed, negative steps). Only bytes of its elements are
                valid: the padding between the rows of a slice is not.
            name: what error messages call it.
            readonly: writes are faults.
            written: False for an output: reading a byte before it is written is a fault. What has been
                written stays so for later launches with the same Memory.

        Raises:
            TypeError: `array` is no NumPy array, or holds Python objects.
            ValueError: `array` is not writeable and `readonly` is not set.

        Example: ``memory = Memory.for_array(out, "out", written=False)``, then in a kernel
        ``thread.write(memory, out.ctypes.data + 4, data)``.
        """
        if not isinstance(array, np.ndarray):
            raise TypeError(f"array ({name}) is {type(array).__name__}; pass a numpy.ndarray")
        if array.dtype.hasobject:
            raise TypeError(f"array ({name}) has dtype {array.dtype}; pass numbers: a device has no objects")
        if not array.flags.writeable and not readonly:
            raise ValueError(f"array ({name}) is not writeable; pass readonly=True, or an array that is")
        base: int = array.__array_interface__["data"][0]
        if array.size == 0 or array.itemsize == 0:
            return cls(name, base, np.empty(0, np.uint8), readonly=readonly)
        steps = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
        base += sum(step for step in steps if step < 0)
        size = sum(map(abs, steps)) + array.itemsize
        data = np.asarray(_Span(array, base, size))
        valid = None
        if size != array.nbytes or not _is_dense(array):
            valid = bytearray(size)
            once = array[tuple(slice(None if stride else 1) for stride in array.strides)]    # along which nothing moves
            _elements(once, np.frombuffer(valid, np.uint8))[...] = 1
        return cls(name, base, data, readonly=readonly, valid=valid,
                   written=None if written else bytearray(size))

    @classmethod
    def shared(cls, size: int, name: str) -> Memory:
        """Shared memory: `size` bytes from address 0, never written, filled with bytes that read as NaN."""
        return cls(name, 0, np.full(size, _POISON, np.uint8), written=bytearray(size), pages={})


def _is_dense(array: npt.NDArray[Any]) -> bool:
    """Whether the elements fill their span without gap or overlap, in some order of the axes."""
    expected = array.itemsize
    for stride, extent in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True


def _elements(array: npt.NDArray[Any], span: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The bytes of `array`'s elements, in `span` that stands for the bytes from its lowest address on."""
    strides = (*map(abs, array.strides), 1)  # a negative step visits the same bytes from the other end
    return np.lib.stride_tricks.as_strided(span, (*array.shape, array.itemsize), strides)


for_array = Memory.for_array
