"""What passes in the emulator must pass the compiler: a user's method is compiled once, for what it was called with.

Python computes what types cannot describe: a slice as long as a coordinate says, an attribute that NumPy's scalars have, a
tuple of one length on one way and of another on the other. What cannot be seen in bytecode the compiler knows. It needs 20
to 100 ms for a function, and what it has taken it does not look at again (`gemmkit.lang.functions`). So when the first call
of a method in a launch has returned, it is compiled, and what the compiler refuses is refused here, in its words.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from gemmkit.component_products import Shape
from gemmkit.components import Component, field_values, freeze
from gemmkit.emulator.coordinates import Coordinate, LongCoordinate
from gemmkit.lang import dialect
from gemmkit.lang.component_types import MethodType
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.functions import device
from gemmkit.lang.host import View
from gemmkit.lang.installed import NotInstalledError
from gemmkit.lang.later import load
from gemmkit.lang.memory import ViewType
from gemmkit.lang.numba_hooks import types
from gemmkit.lang.number_types import numba_type
from gemmkit.lang.records import Record
from gemmkit.lang.scalars import index, weak_float64, wide_index
from gemmkit.lang.values import static_type
from gemmkit.lang.wide import wide_type


class Unknown(Exception):
    """A value of which the device's type is not known here."""


def tried(function: FunctionType, given: tuple, named: dict[str, Any], original: Callable[[Any], Any]) -> None:
    """Compile a user's function, or the method of a component, for the values that it was called with, by place and by name.
    Raises ComponentError for what the compiler refuses. Where no compiler is installed nothing is compiled: what it alone
    refuses passes.

    ``original`` tells of a component or a function in the emulator which one it stands for.
    """
    try:
        load()                                         # the types below are Numba's own
    except NotInstalledError:
        return
    try:
        owner = original(given[0]) if given and isinstance(given[0], Component) else None
        if not _is_silent(function, owner, [original(x) for x in (*given, *named.values()) if _is_component(x)]):
            return
        args = tuple(_type_of(value, original) for value in given)
        keywords = {name: _type_of(value, original) for name, value in named.items()}
    except Unknown:
        return
    if owner is not None:
        MethodType(args[0], function.__name__, device(function)).get_call_type(None, args[1:], keywords)
        return
    ty: Any = freeze(original(function)).type
    ty.get_call_type(None, args, keywords)


def _is_component(value: Any) -> bool:
    return isinstance(value, Component) and not isinstance(value, Shape)


def _is_silent(function: FunctionType, owner: Any, components: list) -> bool:
    """Whether a function, and the components that it gets, have nothing that the emulator alone takes: `breakpoint`, an
    f-string that is printed."""
    walk = dialect.Walk(compiled=True)
    try:
        for component in components:
            walk.component(component)
        walk.function(function, owner)
    except ComponentError:
        return False
    return True


def _type_of(value: Any, original: Callable[[Any], Any]) -> Any:
    """The device's type of a value in the emulator."""
    if type(value) is tuple:
        return types.BaseTuple.from_types([_type_of(part, original) for part in value])
    if isinstance(value, LongCoordinate):
        return wide_index
    for cls, ty in ((Coordinate, index), (bool, types.boolean), (float, weak_float64)):
        if isinstance(value, cls) and not isinstance(value, np.generic):
            return ty
    if isinstance(value, (np.generic, Record)):
        return numba_type(value.dtype)
    if isinstance(value, View):
        return ViewType(value.dtype, value.ndim, value.unit, value.alignment, max(value.shape, default=0) >= 2**31,
                        value.memory.readonly)
    try:
        if isinstance(value, Shape):
            shape = freeze(type(value)(*(1 for _ in field_values(value)))).type
            return wide_type(shape) if isinstance(value.M, LongCoordinate) else shape
        if isinstance(value, Component):
            return freeze(original(value)).type
        return static_type(value)
    except (TypeError, ValueError):
        raise Unknown from None
