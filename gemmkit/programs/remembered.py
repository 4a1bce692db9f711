"""Plans of calls, kept: a call of a program finds the plan of an earlier one that is like it.

Deriving takes milliseconds, a launch microseconds. Calls are alike where their arrays are of the same kinds, their floating
point numbers positive or not (a launch is told which ones they are), other numbers equal, functions the same ones and
mappings equal, and where all that the functions' code names still is what it was (`gemmkit.lang.guards`). A call is derived
anew where that cannot be told: a function names something that can change in place, such as a list, or an argument is
neither an array nor a number nor a function. In the emulator all are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from gemmkit.emulator.mode import current_mode, world
from gemmkit.lang.fingerprint import read, when_forgetting
from gemmkit.lang.guards import Guards
from gemmkit.launch import cache
from gemmkit.programs.launches import FLOATS
from gemmkit.programs.mapping import Mapping
from gemmkit.programs.plan import ProgramPlan
from gemmkit.programs.tuned import ProgramProblem
from gemmkit.runtime.arrays import is_array
from gemmkit.runtime.recognition import KEYS, key_of

CONSTANTS = (type(None), bool, int, str, np.number)


class Kept(NamedTuple):
    """A plan, and whether the code that it was derived from is what it was. The functions are kept, so that their ids stay
    theirs."""

    plan: ProgramPlan
    stands: Callable[[], bool]
    functions: list[FunctionType]


plans = cache()                        # by what decides how a call is computed
when_forgetting(plans.clear)           # gemmkit's own code has changed


def plan_of_call(program: Any, arguments: dict[str, Any], mapping: Mapping | None) -> ProgramPlan:
    """The plan of a call with these arguments, by their names. Raises what `gemmkit.programs.planned.planned` raises."""
    key = None if current_mode() is not None else _key(program, arguments, mapping)
    known = None if key is None else plans.get(key)
    if known is not None and known.stands():
        return known.plan
    found = ProgramProblem(program, arguments).plan(mapping)
    functions = [program.function, *(x for x in arguments.values() if isinstance(x, FunctionType))]
    readings = [] if key is None else [read(x) for x in functions]
    if readings and not any(reading.mutable or reading.of_process for reading in readings):
        guards = Guards(fact for reading in readings for fact in reading.guards.facts)
        plans.keep(key, Kept(found, guards.ready(), functions))
    return found


def _key(program: Any, arguments: dict[str, Any], mapping: Mapping | None) -> Any:
    """None for arguments of which it cannot be told whether they are what they were."""
    parts: list[Any] = [program, mapping, world()]
    for name, x in arguments.items():
        if isinstance(x, FLOATS):
            parts.append(x > 0)
        elif isinstance(x, CONSTANTS):
            parts.append((type(x), x))
        elif isinstance(x, FunctionType):
            parts.append(id(x))
        elif type(x) in KEYS or is_array(x):
            at, kind = KEYS.get(type(x), key_of)(x, name)
            parts.append((kind, at & 15))             # and the alignment's class
        else:
            return None
    return tuple(parts)
