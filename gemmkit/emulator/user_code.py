"""Users' methods and functions in the emulator: with the device's arithmetic, and coordinates that know when they overflow.

A kernel's own code runs as it is. Of a user's component a twin takes its place for the launch: an object of a subclass whose
methods are the same code with other names around it. ``max``, ``min``, ``int``, ``float``, ``bool``, ``round``, ``divmod``,
``pow``, ``range``, the module ``math`` and NumPy's scalar classes are those of `gemmkit.emulator.functions`; helpers that
the code names, directly or in a module, are treated alike. Where a kernel calls such a method or function, whole numbers
become coordinates (`gemmkit.emulator.coordinates`).

The code objects are the user's, so lines, `print` and `breakpoint` are what they were. Global names are read when the launch
begins. After its first call each is compiled once, and refused if the compiler refuses it (`gemmkit.emulator.trial`).
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, wraps
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

import numpy as np

from gemmkit.components import Component, Scalar, field_values
from gemmkit.emulator.coordinates import Coordinate
from gemmkit.emulator.functions import BUILTINS, CMATH, FUNCTIONS, MATH, Names, conversion
from gemmkit.emulator.trial import Unknown, tried
from gemmkit.kernels.spec import Shape, StackShape
from gemmkit.lang.functions import DeviceFunction
from gemmkit.lang.references import globals_of, is_gemmkit, is_library
from gemmkit.lang.runtime_fields import annotated

#: gemmkit's own modules that compute with users' numbers.
ARITHMETIC_MODULES = frozenset({"gemmkit.activations", "gemmkit.distributed.rank_order", "gemmkit.epilogues.elementwise",
                                "gemmkit.epilogues.library", "gemmkit.epilogues.norms", "gemmkit.epilogues.reductions",
                                "gemmkit.epilogues.softmax", "gemmkit.glu", "gemmkit.kernels.common.exponential",
                                "gemmkit.lstm", "gemmkit.masks", "gemmkit.operators.semiring", "gemmkit.row_functions",
                                "gemmkit.scores"})
#: Methods whose results kernels compute with.
GIVES_COORDINATES = frozenset({"block", "column_offset", "free", "k_range", "keys", "offset", "row_offset"})


def arguments(given: Sequence[Any], originals: Mapping[int, Any] | None = None) -> list[Any]:
    """A kernel's arguments with twins for components and functions. Of those that already stand for others (with views in
    place of arrays) ``originals`` has these, by the id of what stands for them."""
    twins = _Twins(originals or {})
    return [twins.outermost(value) for value in given]


def _is_users(thing: FunctionType | ModuleType | type) -> bool:
    """Whether users' numbers may meet Python's arithmetic there: in their code, and what it calls of the standard library.
    (`gemmkit.lang.given` writes functions of built-ins, which are not looked into.)"""
    module = thing.__name__ if isinstance(thing, ModuleType) else thing.__module__
    return not is_library(thing) and module != "builtins"


class _Twins:
    """Those of one launch."""

    def __init__(self, originals: Mapping[int, Any]) -> None:
        self._originals = originals
        self._stands_for: dict[int, Any] = {}             # components alone; they live as long as the launch
        self._functions: dict[FunctionType, FunctionType] = {}
        self._boundaries: dict[FunctionType, Any] = {}
        self._classes: dict[type, type] = {}

    def outermost(self, value: Any) -> Any:
        """What a kernel calls."""
        if isinstance(value, Component):
            return self.component(value)
        if isinstance(value, DeviceFunction):
            value = value.function
        if isinstance(value, FunctionType) and self._is_ours(value):
            return self.boundary(value)
        if isinstance(value, BuiltinFunctionType | type) and value in FUNCTIONS:
            return FUNCTIONS[value]
        if type(value) is tuple:
            return tuple(self.outermost(v) for v in value)
        return value

    # -- components -----------------------------------------------------------------------------------------------------

    def component(self, component: Any) -> Any:
        cls: Any = type(component)
        if issubclass(cls, Shape):
            return component
        changed = {}
        scalars = annotated(cls) if _is_users(cls) else {}
        for field, value in field_values(component).items():
            if scalars.get(field) is Scalar and type(value) is int and -2**31 <= value < 2**31:
                changed[field] = Coordinate(value)
            else:
                twin = self.outermost(value)
                if twin is not value:
                    changed[field] = twin
        twin_class = self.twin_class(cls)
        original = self._stands_for[id(component)] = self._originals.get(id(component), component)
        if twin_class is cls and not changed:
            return component
        out: Any = object.__new__(twin_class)
        for name, value in vars(component).items():
            if not isinstance(getattr(cls, name, None), cached_property):
                object.__setattr__(out, name, changed.get(name, value))
        self._stands_for[id(out)] = original
        return out

    def original(self, value: Any) -> Any:
        """The user's component or function for which one stands; raises Unknown for a component that was made meanwhile."""
        if isinstance(value, FunctionType):
            return self._originals.get(id(value), value)
        try:
            return self._stands_for[id(value)]
        except KeyError:
            raise Unknown from None

    def twin_class(self, cls: type) -> type:
        """A subclass whose methods have the device's names around them; the class itself where none needs it."""
        found = self._classes.get(cls)
        if found is None:
            self._classes[cls] = cls                      # its methods may name it
            methods: dict[str, Any] = {}
            for base in reversed(cls.__mro__[:-1]):
                for name, value in vars(base).items():
                    methods.pop(name, None)
                    twin = self._method(name, value)
                    if twin is not None:
                        methods[name] = twin
            found = cls
            if methods:
                shown = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__repr__": cls.__repr__}
                found = type(cls)(cls.__name__, (cls,), {**methods, **shown})
            self._classes[cls] = found
        return found

    def _method(self, name: str, value: Any) -> Any:
        if name.startswith("__") and name != "__call__":
            return None
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if not isinstance(function, FunctionType) or not self._is_ours(function):
            return None
        twin = self.boundary(function) if _is_users(function) else self.function(function)
        return type(value)(twin) if value is not function else twin

    # -- functions ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _is_ours(function: FunctionType) -> bool:
        return _is_users(function) or function.__module__ in ARITHMETIC_MODULES

    def boundary(self, function: FunctionType) -> Any:
        """The function as a kernel calls it: whole numbers become coordinates."""
        found = self._boundaries.get(function)
        if found is None:
            twin = self.function(function)
            found = self._boundaries[function] = _boundary(
                twin, function.__name__ in GIVES_COORDINATES,
                lambda given, named: tried(function, given, named, self.original))
        return found

    def function(self, function: FunctionType) -> FunctionType:
        """The same code with the device's names around it."""
        found = self._functions.get(function)
        if found is not None:
            return found
        names = globals_of(function.__code__)
        scope: dict[str, Any] = {"__builtins__": BUILTINS, "__name__": function.__globals__.get("__name__")}
        cells = tuple(CellType() for _ in function.__closure__ or ())
        twin = FunctionType(function.__code__, scope, function.__name__, None, cells or None)
        self._functions[function] = twin                  # before what it names, which may name it
        twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
        scope.update({name: self.named(function.__globals__[name]) for name in names if name in function.__globals__})
        for cell, given in zip(cells, function.__closure__ or ()):
            try:
                cell.cell_contents = self.named(given.cell_contents)
            except ValueError:                            # not bound yet
                continue
        defaults = function.__defaults__
        twin.__defaults__ = None if defaults is None else tuple(self.named(value) for value in defaults)
        twin.__kwdefaults__ = function.__kwdefaults__
        return twin

    def named(self, value: Any) -> Any:
        """What user code sees under a name of its own."""
        if isinstance(value, DeviceFunction):
            value = value.function
        if isinstance(value, FunctionType):
            return self.function(value) if self._is_ours(value) else value
        if isinstance(value, ModuleType):
            if value is math or value is cmath:
                return MATH if value is math else CMATH
            return Names(value, self.named) if value is np or _is_users(value) or is_gemmkit(value) else value
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, BuiltinFunctionType):
            return FUNCTIONS.get(value, value)
        return self.component(value) if isinstance(value, Component) else value

    def _class(self, cls: type) -> Any:
        if cls in FUNCTIONS:
            return FUNCTIONS[cls]
        if issubclass(cls, np.generic):
            return conversion(cls)
        if issubclass(cls, Component):
            return self.twin_class(cls)
        return cls


def _boundary(twin: FunctionType, gives_coordinates: bool, tried: Callable[[tuple, dict], None]) -> Callable[..., Any]:
    first = [True]

    @wraps(twin)
    def called(*given: Any, **named: Any) -> Any:
        if not named and not gives_coordinates and _CHANGED.isdisjoint(map(type, given)):
            out = twin(*given)                            # elements alone, as a semiring has them
        else:
            if named:
                named = {name: _inwards(value) for name, value in named.items()}
            given = tuple([change(value) if (change := change_of(value.__class__)) else value for value in given])
            out = twin(*given, **named)
        if first:
            first.clear()
            tried(given, named)
        return _outwards(out) if gives_coordinates else out

    change_of = _CHANGES.get                              # `_inwards` without the call: it is for every element
    called.function = twin                                # type: ignore[attr-defined]
    return called


def _coordinate(value: int) -> int:
    return Coordinate(value) if -2**31 <= value < 2**31 else value


_last: tuple[Any, Any] = None, None                           # one launch has one shape


def _shape(shape: Shape) -> Shape:
    global _last
    if isinstance(shape.M, Coordinate):
        return shape
    last = _last                                          # another thread may launch beside this one
    if shape is not last[0]:
        last = _last = shape, type(shape)(*(_coordinate(int(n)) for n in field_values(shape).values()))
    return last[1]


#: What becomes of a kernel's values, by their classes; the others stay.
_CHANGES: dict[type, Callable[[Any], Any]] = {int: _coordinate, Shape: _shape, StackShape: _shape}
_CHANGED = frozenset(_CHANGES)


def _inwards(value: Any) -> Any:
    change = _CHANGES.get(value.__class__)
    return value if change is None else change(value)


def _outwards(value: Any) -> Any:
    """Kernels compute with Python's integers."""
    if isinstance(value, Coordinate):
        return int(value)
    return tuple(_outwards(v) for v in value) if type(value) is tuple else value


__all__ = ["ARITHMETIC_MODULES", "arguments"]
