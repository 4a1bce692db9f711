"""A function's bytecode as steps: with the source line, and the height of the stack before and after each.

Lambdas, cells of notebooks and strings given to ``exec`` have bytecode where they have no source. Opcodes are known by their
names, those of Python 3.10 to 3.13.
"""

from __future__ import annotations

import dis
from types import CodeType
from typing import Any, NamedTuple

_JUMPS = {*dis.hasjrel, *dis.hasjabs, *getattr(dis, "hasjump", ())}
_ALWAYS = {"JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"}
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_NOTHING = {"CACHE", "EXTENDED_ARG", "NOP", "RESUME"}
_TUPLE_OF_LIST = 6                        # CALL_INTRINSIC_1's number of what was LIST_TO_TUPLE until 3.11


class Step(NamedTuple):
    """One instruction. ``value`` is its argument as `dis` resolves it: a name, a constant, the offset of a jump."""

    name: str
    value: Any
    line: int
    offset: int
    before: int
    after: int

    @property
    def jumps(self) -> bool:
        return self.name in _ALWAYS

    @property
    def makes_tuple(self) -> bool:
        """Whether it turns the list on top of the stack into a tuple: ``(*a, b)``, ``f(a, *b)``."""
        return self.name == "LIST_TO_TUPLE" or (self.name == "CALL_INTRINSIC_1" and self.value == _TUPLE_OF_LIST)


def steps_of(code: CodeType) -> list[Step]:
    """The instructions of a code object, without those of its nested functions."""
    heights: dict[int, int] = {}          # at the targets of jumps
    out: list[Step] = []
    height, line = 0, code.co_firstlineno
    for i in dis.get_instructions(code):
        positions: Any = getattr(i, "positions", None)
        line = (positions.lineno if positions is not None else i.starts_line) or line
        before = heights.get(i.offset, height)
        if i.opname in _NOTHING:
            height = before
            continue
        height = before + dis.stack_effect(i.opcode, i.arg, jump=False)
        if i.opcode in _JUMPS:
            heights.setdefault(i.argval, before + dis.stack_effect(i.opcode, i.arg, jump=True))
        elif i.opname in _ENDS:
            height = 0
        out.append(Step(i.opname, i.arg if i.opname == "CALL_INTRINSIC_1" else i.argval, line, i.offset, before, height))
    return out


def region(steps: list[Step], start: int) -> int:
    """The step at which what is put on the stack at ``start`` has become one value: of a function, its call."""
    base = steps[start].before
    for n in range(start + 1, len(steps)):
        if steps[n].after <= base + 1 and steps[n].name.startswith("CALL"):
            return n
    return start
