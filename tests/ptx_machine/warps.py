"""What the lanes of a warp do together: exchanges and votes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx_machine.faults import Fault, UnknownInstruction
from tests.ptx_machine.kinds import KINDS
from tests.ptx_machine.parser import Instruction
from tests.ptx_machine.registry import effect

B32, PRED = KINDS["b32"], KINDS["pred"]
ALL = 0xFFFFFFFF


def whole(machine: Any, operand: str, i: Instruction) -> None:
    """Refuse an instruction of a part of the warp's lanes."""
    if machine.reader(operand, B32, i)().reshape(-1)[0] != ALL:
        raise UnknownInstruction("only of all lanes", i)


def by_warps(machine: Any, x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x, (machine.count,)).reshape(-1, 32)


@effect("shfl", collective=True)
def shuffle(machine: Any, i: Instruction) -> Any:
    """Each lane's value from another lane of its segment; a lane out of it gives the own value, and the predicate is false."""
    i.only("sync", "idx", "up", "down", "bfly")
    how = i.one_of("idx", "up", "down", "bfly")
    named = machine.reader(i.operands[4], B32, i)
    target, _, valid = i.operands[0].partition("|")
    put = machine.writer(target, B32, i)
    put_valid = machine.writer(valid, PRED, i) if valid else None
    a, b, c = (machine.reader(x, B32, i) for x in i.operands[1:4])

    def act(mask: Any) -> None:
        value, by, how_far = (by_warps(machine, x()) for x in (a, b, c))
        lane = np.arange(32)
        by, clamp, segment = by.astype(np.int64) & 31, how_far.astype(np.int64) & 31, how_far.astype(np.int64) >> 8 & 31
        last, first = (lane & segment) | (clamp & ~segment), lane & segment
        source = {"idx": first | (by & ~segment), "up": lane - by, "down": lane + by, "bfly": lane ^ by}[how]
        inside = source >= last if how == "up" else source <= last
        of, who = np.where(inside, source, lane), by_warps(machine, named()).astype(np.int64)
        there = np.ones(machine.count, bool) if mask is None else mask
        if (there.reshape(-1, 32) & ((who >> lane & who >> of & 1) == 0)).any():
            raise Fault("a lane, or the one that it reads, is not among those that exchange", i)
        taken = np.take_along_axis(value, of, 1)
        put(np.ascontiguousarray(taken).reshape(-1), mask)
        if put_valid:
            put_valid(inside.reshape(-1), mask)

    return act


@effect("vote", collective=True)
def vote(machine: Any, i: Instruction) -> Any:
    i.only("sync", "all", "any", "uni", "ballot")
    how = i.one_of("all", "any", "uni", "ballot")
    whole(machine, i.operands[2], i)
    put, read = machine.writer(i.operands[0], i.kind, i), machine.reader(i.operands[1], PRED, i)

    def act(mask: Any) -> None:
        lanes = by_warps(machine, read())
        if how == "ballot":
            result = (lanes.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
        else:
            result = {"all": lanes.all(1), "any": lanes.any(1), "uni": lanes.all(1) | ~lanes.any(1)}[how]
        put(np.repeat(result, 32), mask)

    return act


@effect("bar", collective=True)
def warp_barrier(machine: Any, i: Instruction) -> Any:
    """``bar.warp.sync``: the machine has waited for the lanes already."""
    if i.modifiers != ("warp", "sync"):
        raise Fault("a barrier of the block in the midst of a block of instructions", i)
    return lambda mask: None
