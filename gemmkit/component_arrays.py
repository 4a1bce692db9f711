"""The arrays that components hold, in fields and in the functions among them, and what may share their memory.

Operands are checked by name where they come in (`gemmkit.problem`). A component's arrays are read, or written, by any block
at any time, so that those which the product writes must be memory of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any, NamedTuple

from gemmkit.components import NO_ARRAYS, Component, field_values
from gemmkit.lang.closures import captured
from gemmkit.lang.functions import DeviceFunction
from gemmkit.runtime.array_info import are_the_same
from gemmkit.runtime.arrays import ArrayInfo, info_of, is_array, overlaps, overlaps_itself, shares_memory

#: The components that are asked for an element of C or D where that element is read or written, by the same block: an array
#: of theirs may be out itself, as c may.
ALONGSIDE = frozenset({"epilogue", "transform_global_to_shared_c", "transform_shared_to_regs_c",
                       "transform_regs_to_shared_d", "transform_shared_to_global_d"})


class Held(NamedTuple):
    """An array of a component: what messages call it, the array, and whether the kernel writes it."""

    name: str
    info: ArrayInfo
    is_output: bool


def arrays_of(component: Any) -> list[Held]:
    """The arrays of a component, of those nested in it and of the functions among its fields, in the order of its leaves."""
    found = held_values(component)
    return [Held(name, info_of(x, name), is_output) for name, x, is_output in found] if found else []


def held_values(component: Any) -> list[tuple[str, Any, bool]]:
    """The arrays themselves, or what describes them, with their names and whether the kernel writes them."""
    kind, found = type(component), list[tuple[str, Any, bool]]()
    for field, value in field_values(component).items():
        if isinstance(value, Component):
            found += held_values(value)
        elif isinstance(value, (FunctionType, DeviceFunction)):
            found += [(f"{name}, captured by {value.__name__} of {kind.__qualname__},", x, False)
                      for name, x in captured(value).items() if is_array(x) or isinstance(x, ArrayInfo)]
        elif not isinstance(value, NO_ARRAYS) and (is_array(value) or isinstance(value, ArrayInfo)):
            name = getattr(kind, "array_names", {}).get(field, f"{field} of {kind.__qualname__}")
            found.append((name, value, field in getattr(kind, "outputs", ())))
    return found


def check_held(held: Iterable[tuple[str, Held]], infos: dict[str, ArrayInfo | None],
               same: tuple[ArrayInfo, ...] = ()) -> None:
    """Raise ValueError where arrays of components share memory with what is written.

    Args:
        held: the arrays, each with the name of its component's place in a configuration.
        infos: a, b, c and out.
        same: out as it may be described otherwise: an array that equals one of these is out itself. How the dimensions of
            a stack are counted does not matter.
    """
    arrays, out = list(held), infos.get("out")
    written = [(part, x) for part, x in arrays if x.is_output]
    for _, x in written:
        if x.info.readonly:
            raise ValueError(f"{x.name} is read-only, and values are stored into it")
        if overlaps_itself(x.info):
            raise ValueError(f"{x.name} has strides {x.info.strides}: several of its elements share memory")
        for other, operand in infos.items():
            if operand is not None and overlaps(x.info, operand):
                raise ValueError(f"{x.name} overlaps {other} in memory; give it memory of its own")
    for part, x in arrays:
        if out is not None and not x.is_output:
            is_out = any(are_the_same(x.info, one) for one in (out, *same))
            if not (is_out and part in ALONGSIDE) and shares_memory(x.info, out):
                why = ("it is read at other elements than those that a block writes" if is_out or part not in ALONGSIDE else
                       "it may be out itself (the same address, shape, strides and dtype), but no other part of it")
                raise ValueError(f"{x.name} overlaps out in memory, and {why}; give it memory of its own")
        for _, output in written:
            if x is not output and shares_memory(x.info, output.info):
                raise ValueError(f"{output.name} overlaps {x.name} in memory; give it memory of its own")
