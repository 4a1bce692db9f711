"""Where the families of instructions enter what they do."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.ptx_machine.kinds import Kind
from tests.ptx_machine.parser import Instruction

FAMILIES = ("integers", "bits", "floats", "comparison", "conversion", "transfers", "mbarriers", "warps", "matrices")


class Operation(NamedTuple):
    """An instruction that makes of arrays of the types ``inputs`` one of the type ``output``."""

    inputs: Sequence[Kind]
    output: Kind
    compute: Callable[..., Any]


OPERATIONS: dict[str, Callable[[Instruction], Operation]] = {}
EFFECTS: dict[str, Callable[[Any, Instruction], Any]] = {}            # (machine, instruction) -> what it does to the running threads
COLLECTIVE: set[str] = set()                                           # instructions of whole warps


def operation(*names: str) -> Any:
    def enter(make: Any) -> Any:
        OPERATIONS.update(dict.fromkeys(names, make))
        return make

    return enter


def effect(*names: str, collective: bool = False) -> Any:
    def enter(make: Any) -> Any:
        EFFECTS.update(dict.fromkeys(names, make))
        if collective:
            COLLECTIVE.update(names)
        return make

    return enter


def load_families() -> None:
    """Have all instructions entered."""
    for name in FAMILIES:
        importlib.import_module(f"tests.ptx_machine.{name}")


__all__ = ["COLLECTIVE", "EFFECTS", "OPERATIONS", "Operation", "effect", "load_families", "operation"]
