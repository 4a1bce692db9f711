"""Random programs: the machine reports a race exactly when an independent account of them finds one.

The account keeps for every thread the set of all accesses in its past (as the bits of an integer), and
compares each access with every earlier one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from gemmkit.emulator import errors, machine
from gemmkit.emulator.memory import for_array
from tests.support.emulated import run

THREADS, BLOCKS, CLOCKS = 8, 2, 3


@dataclass
class Account:
    """Happens-before by its definition."""

    accesses: list[tuple[object, str, int, int, bool]] = field(default_factory=list)
    past: dict[object, int] = field(default_factory=dict)
    clocks: list[int] = field(default_factory=lambda: [0] * CLOCKS)
    waiting: dict[object, list[object]] = field(default_factory=dict)

    def racing(self, who: object, place: str, first: int, nbytes: int, write: bool) -> set[object]:
        """Who has made an access that races with this one."""
        known = self.past.get(who, 0)
        return {other for i, (other, where, start, size, wrote) in enumerate(self.accesses)
                if where == place and first < start + size and start < first + nbytes and (write or wrote)
                and not known >> i & 1}

    def enter(self, who: object, place: str, first: int, nbytes: int, write: bool) -> None:
        self.past[who] = self.past.get(who, 0) | 1 << len(self.accesses)
        self.accesses.append((who, place, first, nbytes, write))

    def meet(self, group: object, who: object, size: int) -> None:
        """`who` comes to a meeting of `size` threads, all of whom then know each other's past."""
        there = self.waiting.setdefault(group, [])
        there.append(who)
        if len(there) == size:
            union = 0
            for one in there:
                union |= self.past.get(one, 0)
            self.past.update(dict.fromkeys(there, union))
            del self.waiting[group]

    def release(self, clock: int, who: object) -> None:
        self.clocks[clock] |= self.past.get(who, 0)

    def acquire(self, clock: int, who: object) -> None:
        self.past[who] = self.past.get(who, 0) | self.clocks[clock]


class RaceFound(Exception):
    """Ends a launch in which both sides found the race."""


def play(seed: int) -> bool:
    """Runs one random program; returns whether it raced."""
    rng = random.Random(seed)
    account, clocks = Account(), [machine.Clock() for _ in range(CLOCKS)]
    array = np.zeros(16384, np.uint8)
    memory = for_array(array, "array")
    base = -array.ctypes.data % 4096 + 4096 - 24  # the bytes in play straddle a boundary of pages
    span = rng.choice([16, 48])
    writes = rng.choice([0.1, 0.5])
    patience = rng.choice([0, 0.9, 0.99])  # how often a racing access is left out, so that programs last
    kinds = ["block", "pair", "four", "unordered", "clocks", "nothing"]
    phases = [(rng.choice(kinds), rng.randrange(1 << 30)) for _ in range(rng.randrange(2, 14))]

    def access(thread: machine.Thread, choice: random.Random) -> None:
        size = choice.choice([1, 2, 4, 8, 16, 5, 40])
        alignment = 1 if size in (5, 40) else size
        first = choice.randrange(0, span + 24 - size + 1, 1) if size < span else 0
        first -= (array.ctypes.data + base + first) % alignment
        if first < 0 or first + size > span + 24:
            return
        write = choice.random() < writes
        who = thread.block.number, thread.index
        shared = choice.random() < 0.5
        offset = (base + first + array.ctypes.data) % 4096 + 64 if shared else base + first
        if offset % alignment:
            return
        place = f"shared {thread.block.number}" if shared else "global"
        racing = account.racing(who, place, offset, size, write)
        if racing and choice.random() < patience:
            return
        account.enter(who, place, offset, size, write)
        target, address = (thread.block.shared, offset) if shared else (memory, array.ctypes.data + offset)
        try:
            if write:
                thread.write(target, address, bytes(size), alignment)
            else:
                thread.read(target, address, size, alignment)
        except errors.RaceError as error:
            other = error.accesses[0].thread
            assert (other.block[0], other.tid) in racing, (error, racing)
            raise RaceFound from error
        assert not racing, f"missed a race of {who} with {racing}"

    def kernel() -> None:
        thread = machine.current()
        who = thread.block.number, thread.index
        if thread.index == 0:  # so that every read finds written memory
            account.enter(who, f"shared {who[0]}", 0, 8192, True)
            thread.shared_write(0, bytes(8192), alignment=16)
        account.meet(("block", who[0]), who, THREADS)
        thread.barrier()
        for number, (sync, salt) in enumerate(phases):
            choice = random.Random(f"{salt} {who}")
            for _ in range(choice.choice([0, 0, 0, 1, 1, 2])):
                access(thread, choice)
            if sync == "block":
                account.meet(("block", who[0]), who, THREADS)
                thread.barrier()
            elif sync in ("pair", "four", "unordered"):
                size = 4 if sync == "four" else 2
                if sync != "unordered":
                    account.meet((sync, who[0], thread.index // size), who, size)
                thread.collective(f"{sync} {number}", None, lambda operands: operands, size=size,
                                  sync=sync != "unordered")
            elif sync == "clocks":
                clock = choice.randrange(CLOCKS)
                if choice.random() < 0.5:
                    account.release(clock, who)
                    clocks[clock].release(thread)
                if choice.random() < 0.8:
                    clock = choice.randrange(CLOCKS)
                    account.acquire(clock, who)
                    clocks[clock].acquire(thread)

    try:
        run(kernel, threads=THREADS, blocks=BLOCKS, shared=8192,
            schedule_seed=rng.choice([None, seed]))
    except RaceFound:
        return True
    return False


@pytest.mark.sample(4)
@pytest.mark.parametrize("part", range(4))
def test_races_are_found_exactly(part: int) -> None:
    outcomes = [play(400 * part + i) for i in range(400)]
    assert 100 < sum(outcomes) < 300  # both outcomes are common, or the programs would prove little
