"""mbarriers, and stores to other blocks of a cluster that are counted at them.

What a phase still waits for is kept beside the memory, by the barrier's place. Stores arrive at once, so that a wait that is missing
is not found here (the emulator finds it).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx_machine.faults import Fault, UnknownInstruction
from tests.ptx_machine.kinds import KINDS
from tests.ptx_machine.parser import Instruction
from tests.ptx_machine.registry import effect
from tests.ptx_machine.transfers import address, registers

U32 = KINDS["u32"]


class Barrier:
    """``arrivals`` and ``nbytes`` are what the present phase still waits for; ``phase`` is how many are over."""

    def __init__(self, count: int):
        self.count, self.arrivals, self.nbytes, self.phase = count, count, 0, 0

    def take(self, arrivals: int, nbytes: int, instruction: Instruction) -> None:
        if arrivals > self.arrivals:
            raise Fault(f"all {self.count} arrivals at an mbarrier have come in this phase, and here is one more", instruction)
        self.arrivals, self.nbytes = self.arrivals - arrivals, self.nbytes - nbytes
        if not self.arrivals and not self.nbytes:
            self.arrivals, self.phase = self.count, self.phase + 1


def barriers(machine: Any, where: Any, mask: Any, i: Instruction) -> list[Barrier]:
    """Those of the running threads."""
    _, at = machine.place("shared", where(), mask, i)
    found = [machine.mbarriers.get(int(place)) for place in at]
    if None in found:
        raise Fault(f"there is no mbarrier at {int(at[found.index(None)]):#x} of shared memory", i)
    return found


def running(machine: Any, values: Any, mask: Any) -> np.ndarray:
    values = np.broadcast_to(values, (machine.count,))
    return values if mask is None else values[mask]


@effect("mbarrier")
def mbarrier(machine: Any, i: Instruction) -> Any:
    i.only("init", "arrive", "expect_tx", "try_wait", "parity", "shared", "shared__cta", "shared__cluster")
    how = i.one_of("init", "arrive", "try_wait")
    where = address(machine, i.operands[0 if how == "init" else 1], i)
    given = machine.reader(i.operands[-1], U32, i) if not i.operands[-1].startswith("[") else lambda: np.uint32(0)

    def init(mask: Any) -> None:
        _, at = machine.place("shared", where(), mask, i)
        machine.spaces["shared"].write(at, 8, [np.zeros(at.shape, np.uint64)], i)
        machine.mbarriers.update(zip(at.tolist(), map(Barrier, running(machine, given(), mask).tolist())))

    def arrive(mask: Any) -> None:
        for barrier, nbytes in zip(barriers(machine, where, mask, i), running(machine, given(), mask).tolist()):
            barrier.nbytes += nbytes
            barrier.take(1, 0, i)

    if how != "try_wait":
        return init if how == "init" else arrive
    put = machine.writer(i.operands[0], KINDS["pred"], i)

    def try_wait(mask: Any) -> None:
        found = zip(barriers(machine, where, mask, i), running(machine, given(), mask).tolist())
        over = np.array([barrier.phase % 2 != parity for barrier, parity in found])
        put(machine.spread(over, mask, KINDS["pred"]), mask)

    return try_wait


def store_async(machine: Any, i: Instruction) -> Any:
    """``st.async``: words to a block of the cluster, whose barrier is given their bytes."""
    i.only("async", "weak", "shared__cluster", "mbarrier__complete_tx__bytes", "v2", "v4")
    if i.kind.bits != 32:
        raise UnknownInstruction("only of words", i)
    where, there = address(machine, i.operands[0], i), address(machine, i.operands[2], i)
    values = [machine.reader(x, KINDS["b32"], i) for x in registers(i.operands[1])]

    def act(mask: Any) -> None:
        _, at = machine.place("shared", where(), mask, i)
        machine.spaces["shared"].write(at, 4, [running(machine, value(), mask) for value in values], i)
        for barrier in barriers(machine, there, mask, i):
            barrier.take(0, 4 * len(values), i)

    return act


__all__ = ["Barrier", "store_async"]
