"""The history that races are found in: for every byte its last writer, and its readers since.

It is exact, with these economies. Pages of cells are made on first touch. A page has a cell for every 16
bytes until a finer access comes, which splits them all. A reader that comes after the one before replaces
it; concurrent readers form a set. One reader stands for all those of finished blocks, whose accesses nothing
can order any more.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from gemmkit.lang.sites import Site, here

if TYPE_CHECKING:
    from gemmkit.emulator.agent import Agent

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
