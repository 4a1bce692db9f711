"""Comparisons, and choices by their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx_machine.faults import UnknownInstruction
from tests.ptx_machine.kinds import KINDS
from tests.ptx_machine.parser import Instruction
from tests.ptx_machine.registry import Operation, effect, operation
from tests.ptx_machine.rounding import flushed

PRED = KINDS["pred"]
PLAIN: dict[str, Any] = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
                         "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
BOOLEAN: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def compared(i: Instruction) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Floats: false where one is NaN, but for ``ne``... of the unordered (``neu``), which are true there."""
    name, kind = i.modifiers[0], i.kinds[-1]
    if name in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
    unordered = name.endswith("u") and name[:-1] in PLAIN
    relation = PLAIN.get(name[:-1] if unordered else name)
    if relation is None:
        raise UnknownInstruction(f"unknown comparison {name}", i)
    if not kind.is_float:
        return relation

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if i.has("ftz"):
            a, b = flushed(a), flushed(b)
        either = np.isnan(a) | np.isnan(b)
        return relation(a, b) | either if unordered else relation(a, b) & ~either

    return compute


@effect("setp")
def setp(machine: Any, i: Instruction) -> Any:
    """``p|q``: q is what p is of the opposite comparison."""
    joined = next((m for m in i.modifiers[1:] if m in BOOLEAN), None)
    i.only(i.modifiers[0], "ftz", *BOOLEAN)
    targets = i.operands[0].split("|")
    a, b = (machine.reader(x, i.kind, i) for x in i.operands[1:3])
    other = machine.reader(i.operands[3], PRED, i) if joined else None
    puts = [machine.writer(t.strip(), PRED, i) for t in targets]
    compare = compared(i)

    def act(mask: Any) -> None:
        result = np.asarray(compare(a(), b()))
        for put, value in zip(puts, (result, ~result)):
            put(value if other is None else BOOLEAN[joined](value, other()), mask)

    return act


@operation("set")
def set_number(i: Instruction) -> Operation:
    """All bits (or 1.0) where it holds, else 0."""
    i.only(i.modifiers[0], "ftz")
    out, kind = i.kinds
    compare = compared(i)
    yes = out.dtype.type(1) if out.is_float else np.array(-1).astype(out.dtype)
    return Operation([kind, kind], out, lambda a, b: np.where(compare(a, b), yes, out.dtype.type(0)))


@operation("selp")
def selp(i: Instruction) -> Operation:
    i.only()
    return Operation([i.kind, i.kind, PRED], i.kind, lambda a, b, p: np.where(p, a, b))


@operation("slct")
def slct(i: Instruction) -> Operation:
    """a where c is not negative."""
    i.only("ftz")
    kind, of = i.kinds
    return Operation([kind, kind, of], kind, lambda a, b, c: np.where(c >= 0, a, b))
