"""Functions and methods in the emulator, with checked views in place of the arrays that they refer to.

A lambda's bias, a helper's table, a global array that a method reads: Python would hand out the NumPy array itself, which
wraps negative indices around and takes any write. Here the function is made anew, with the view in its cell or among its
globals; so are the helpers it calls. What refers to no array stays the object that it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import CellType, FunctionType, ModuleType
from typing import Any

from gemmkit.components import Component, is_array
from gemmkit.lang.functions import DeviceFunction
from gemmkit.lang.references import globals_of, may_change, names_of

__all__ = ["Captures"]


class Captures:
    """Makes functions anew: ``array(value, name)`` gives the view of an array, ``component(value)`` what stands for a
    component that a function refers to."""

    def __init__(self, array: Callable[[Any, str], Any], component: Callable[[Component], Component]) -> None:
        self._array, self._component = array, component
        self._made: dict[Any, Any] = {}

    def function(self, value: Any) -> Any:
        """The function with views in place of arrays; itself where it and its helpers refer to none."""
        function = value.function if isinstance(value, DeviceFunction) else value
        if function in self._made:
            return self._made[function]
        if not may_change(function.__module__):
            return value
        self._made[function] = value                           # what it calls may call it again
        names = names_of(function.__code__)
        cells = [self._cell(cell, name, function, names)
                 for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())]
        scope = function.__globals__
        changed = {}
        for name in globals_of(function.__code__):
            if name in scope:
                found = self._stand_in(scope[name], name, function, names)
                if found is not scope[name]:
                    changed[name] = found
        if not changed and all(x is y for x, y in zip(cells, function.__closure__ or ())):
            return value
        made = FunctionType(function.__code__, {**scope, **changed}, function.__name__, function.__defaults__, tuple(cells))
        made.__qualname__, made.__module__, made.__kwdefaults__ = function.__qualname__, function.__module__, function.__kwdefaults__
        self._made[function] = made
        return made

    def methods(self, component: Any) -> Any:
        """The component with methods that refer to arrays made anew, in a class of its own; itself where none does."""
        changed: dict[str, Any] = {}
        for name in dir(type(component)):
            method = inspect.getattr_static(type(component), name)
            is_static = isinstance(method, staticmethod)
            function = method.__func__ if is_static else method
            if isinstance(function, (FunctionType, DeviceFunction)) and not (name.startswith("__") and name != "__call__"):
                made = self.function(function)
                if made is not function:
                    changed[name] = staticmethod(made) if is_static else made
        if not changed:
            return component
        kind = type(component)
        out = copy.copy(component)
        own = type(kind)(kind.__name__, (kind,), {**changed, "__qualname__": kind.__qualname__, "__module__": kind.__module__,
                                                  "__repr__": kind.__repr__})
        object.__setattr__(out, "__class__", own)
        return out

    def _cell(self, cell: CellType, name: str, function: FunctionType, names: Any) -> CellType:
        try:
            value = cell.cell_contents
        except ValueError:                                     # not bound yet
            return cell
        found = self._stand_in(value, name, function, names)
        return cell if found is value else CellType(found)

    def _stand_in(self, value: Any, name: str, function: FunctionType, names: Any) -> Any:
        """What a function is to find where it refers to ``value``."""
        if is_array(value):
            return self._array(value, f"{name}, captured by {function.__name__}")
        if isinstance(value, (FunctionType, DeviceFunction)):
            return self.function(value)
        if isinstance(value, Component):
            return self._component(value)
        if isinstance(value, ModuleType) and may_change(value.__name__):
            held = {own: vars(value)[own] for own in names if own in vars(value)}
            found = {own: self._stand_in(x, f"{name}.{own}", function, ()) for own, x in held.items()
                     if is_array(x) or isinstance(x, (FunctionType, DeviceFunction))}
            changed = {own: x for own, x in found.items() if x is not held[own]}
            return _Module(value, changed) if changed else value
        return value


class _Module:
    """A module some of whose names are bound otherwise."""

    def __init__(self, module: ModuleType, changed: dict[str, Any]) -> None:
        self.__dict__.update(changed)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)
