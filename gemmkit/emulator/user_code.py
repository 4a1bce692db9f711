"""Code in the emulator computes as the device does: one rule for a kernel, its components and users' functions.

Python's arithmetic raises where a GPU's gives infinities and NaN, and Python's `max` drops NaN. So every plain float and
complex number that reaches a kernel (an argument, a field, an attribute of a class, a captured value, a default, a literal
of a user's code) is a `Real` or a `Complex` (`gemmkit.emulator.functions`), and code that names ``math``, ``max`` or
``min`` sees those of `gemmkit.emulator.functions`. A twin takes the place of such code for the launch: the same code with
other names around it. Code that names none of these is run as it is.

gemmkit's own code computes places with Python's integers. ``max`` and ``min`` of whole numbers are Python's there, and those
of the template kernels (`gemmkit.kernels`) are not looked at.

Users' code has more around it: ``int``, ``float``, ``bool``, ``round``, ``divmod``, ``pow``, ``range`` and NumPy's scalar
classes are the device's, too, and literals weak. Helpers that the code names, directly or in a module, are treated alike.
Where a kernel calls a user's method or function, whole numbers become coordinates.

Lines, `print` and `breakpoint` are what they were. Global names are read when the launch begins. After its first call a
user's function is compiled once, and refused if the compiler refuses it (`gemmkit.emulator.functions`).
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, wraps
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from gemmkit.components import Component, Scalar, field_values
from gemmkit.emulator.functions import (
    BUILTINS,
    CMATH,
    FUNCTIONS,
    MATH,
    MATH_NAMES,
    MATH_OF_GEMMKIT,
    OF_GEMMKIT,
    Complex,
    Coordinate,
    Names,
    Real,
    UnknownType,
    conversion,
    plain,
    tried,
)
from gemmkit.lang.component_products import ProblemShape, StackShape
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.fingerprint import annotated
from gemmkit.lang.functions import DeviceFunction
from gemmkit.lang.host import INTERNAL_PATHS, TEMPLATE_PATHS
from gemmkit.lang.references import Owner, globals_of, is_gemmkit, is_host, is_library, names_of, owner_of

#: Methods whose results kernels compute with.
GIVES_COORDINATES = frozenset({"block", "column_offset", "free", "k_range", "keys", "offset", "row_offset"})


def arguments(given: Sequence[Any], originals: Mapping[int, Any] | None = None) -> list[Any]:
    """A kernel's arguments with twins for components and functions. Of those that already stand for others (with views in
    place of arrays) ``originals`` has these, by the id of what stands for them."""
    twins = _Twins(originals or {})
    return [twins.outermost(value) for value in given]


def kernel_code(kernel: Callable[..., None]) -> Any:
    """A kernel's function with the device's names around it, and so around the functions that it calls."""
    function = kernel.function if isinstance(kernel, DeviceFunction) else kernel
    return _Twins({}).own(function) if isinstance(function, FunctionType) else kernel


def _is_users(thing: FunctionType | ModuleType | type) -> bool:
    """Whether users' numbers may meet Python's arithmetic there: in their code, and what it calls of the standard library.
    (`gemmkit.lang.checks` writes functions of built-ins, which are not looked into.)"""
    module = thing.__name__ if isinstance(thing, ModuleType) else thing.__module__
    return not is_library(thing) and module != "builtins"


class _Twins:
    """Those of one launch."""

    def __init__(self, originals: Mapping[int, Any]) -> None:
        self._originals = originals
        self._stands_for: dict[int, Any] = {}             # components alone; they live as long as the launch
        self._functions: dict[FunctionType, FunctionType] = {}     # users'
        self._own: dict[FunctionType, FunctionType] = {}           # gemmkit's
        self._boundaries: dict[FunctionType, Any] = {}
        self._classes: dict[type, type] = {}

    def outermost(self, value: Any) -> Any:
        """What a kernel calls."""
        if isinstance(value, Component):
            return self.component(value)
        if isinstance(value, DeviceFunction):
            value = value.function
        if isinstance(value, FunctionType):
            return self.boundary(value) if _is_users(value) else self.own(value)
        if isinstance(value, BuiltinFunctionType | type) and value in FUNCTIONS:
            return FUNCTIONS[value]
        if type(value) is tuple:
            return tuple(self.outermost(v) for v in value)
        return plain(value)

    # -- components -----------------------------------------------------------------------------------------------------

    def component(self, component: Any) -> Any:
        cls: Any = type(component)
        if issubclass(cls, ProblemShape):
            return component
        changed: dict[str, Any] = {}
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
            raise UnknownType from None

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
        if not isinstance(function, FunctionType):
            number = plain(value)
            return None if number is value else number
        twin = self.boundary(function) if _is_users(function) else self.own(function)
        if twin is function:
            return None
        return type(value)(twin) if value is not function else twin

    # -- gemmkit's functions --------------------------------------------------------------------------------------------

    def own(self, function: FunctionType) -> FunctionType:
        """A function of gemmkit's, or a kernel's, with the device's names; itself where it names none."""
        found = self._own.get(function)
        if found is not None:
            return found
        if function in _SAME or _is_machinery(function):
            return function
        self._own[function] = function                    # before what it names, which may name it
        code, names = function.__code__, function.__globals__
        changed = {}
        for name in globals_of(code):
            if name in names:
                value = names[name]
                twin = self._own_named(value, code)
            elif name in OF_GEMMKIT and not code.co_filename.startswith(TEMPLATE_PATHS):
                value, twin = None, OF_GEMMKIT[name]
            else:
                continue
            if twin is not value:
                changed[name] = twin
        cells = [self._own_cell(cell, code) for cell in function.__closure__ or ()]
        if changed or any(cell is not given for cell, given in zip(cells, function.__closure__ or ())):
            found = FunctionType(code, {**names, **changed}, function.__name__, function.__defaults__, tuple(cells) or None)
            found.__kwdefaults__, found.__qualname__, found.__module__ = (
                function.__kwdefaults__, function.__qualname__, function.__module__)
            found.__dict__.update(function.__dict__)
            self._own[function] = found
            return found
        if is_gemmkit(function) and function.__closure__ is None:
            _SAME.add(function)
        return function

    def _own_cell(self, cell: CellType, code: CodeType) -> CellType:
        try:
            value = cell.cell_contents
        except ValueError:                                # not bound yet
            return cell
        twin = self._own_named(value, code)
        return cell if twin is value else CellType(twin)

    def _own_named(self, value: Any, code: CodeType) -> Any:
        if isinstance(value, FunctionType):
            return self.own(value)
        if isinstance(value, DeviceFunction):
            twin = self.own(value.function)
            return value if twin is value.function else twin
        if value is math:
            return value if MATH_NAMES.isdisjoint(names_of(code)) else MATH_OF_GEMMKIT
        if value is cmath:
            return CMATH
        if isinstance(value, ModuleType) and is_gemmkit(value):
            held = {name: vars(value)[name] for name in names_of(code) if name in vars(value)}
            changed = {name: twin for name, given in held.items()
                       if not isinstance(given, ModuleType) and (twin := self._own_named(given, code)) is not given}
            return SimpleNamespace(**{**vars(value), **changed}) if changed else value
        return FUNCTIONS.get(value, value) if isinstance(value, BuiltinFunctionType) else value

    # -- users' functions -----------------------------------------------------------------------------------------------

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
        twin = FunctionType(_with_plain_literals(function.__code__), scope, function.__name__, None, cells or None)
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
        keywords = function.__kwdefaults__
        twin.__kwdefaults__ = keywords and {name: self.named(value) for name, value in keywords.items()}
        return twin

    def named(self, value: Any) -> Any:
        """What user code sees under a name of its own."""
        if isinstance(value, DeviceFunction):
            value = value.function
        if isinstance(value, FunctionType):
            return self.function(value) if _is_users(value) else self.own(value)
        if isinstance(value, ModuleType):
            if value is math or value is cmath:
                return MATH if value is math else CMATH
            return Names(value, self.named) if value is np or _is_users(value) or is_gemmkit(value) else value
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, BuiltinFunctionType):
            return FUNCTIONS.get(value, value)
        return self.component(value) if isinstance(value, Component) else plain(value)

    def _class(self, cls: type) -> Any:
        if cls in FUNCTIONS:
            return FUNCTIONS[cls]
        if issubclass(cls, np.generic):
            return conversion(cls)
        if issubclass(cls, Component):
            return self.twin_class(cls)
        return cls


#: Functions of gemmkit's that name nothing of the device's, and so in every launch.
_SAME: set[FunctionType] = set()


def _is_machinery(function: FunctionType) -> bool:
    """Whether a function is of a package, of gemmkit's host or of its language, which computes as the device does."""
    file = function.__code__.co_filename
    is_known = is_host(function) or any(path in file for path in INTERNAL_PATHS) or owner_of(function) in _FOREIGN
    if is_known and function.__closure__ is None:
        _SAME.add(function)
    return is_known


_FOREIGN = Owner.PACKAGE, Owner.PYTHON


@lru_cache(maxsize=4096)
def _with_plain_literals(code: CodeType) -> CodeType:
    """A user's code, whose literals are weak numbers that do not raise."""
    literals = tuple(_with_plain_literals(x) if isinstance(x, CodeType) else plain(x) for x in code.co_consts)
    return code if all(x is y for x, y in zip(literals, code.co_consts)) else code.replace(co_consts=literals)


def _boundary(twin: FunctionType, gives_coordinates: bool, tried: Callable[[tuple, dict], None]) -> Callable[..., Any]:
    first = [True]

    @wraps(twin)
    def called(*given: Any, **named: Any) -> Any:
        if named or gives_coordinates or not _CHANGED.isdisjoint(map(type, given)):
            if named:
                named = {name: _inwards(value) for name, value in named.items()}
            given = tuple([change(value) if (change := change_of(value.__class__)) else value for value in given])
        try:
            out = twin(*given, **named)
        except TypeError as error:
            if first and not isinstance(error, ComponentError):    # what the compiler would refuse is said in its words
                tried(given, named)
            raise
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


def _shape(shape: ProblemShape) -> ProblemShape:
    global _last
    if isinstance(shape.M, Coordinate):
        return shape
    last = _last                                          # another thread may launch beside this one
    if shape is not last[0]:
        last = _last = shape, type(shape)(*(_coordinate(int(n)) for n in field_values(shape).values()))
    return last[1]


#: What becomes of a kernel's values, by their classes; the others stay.
_CHANGES: dict[type, Callable[[Any], Any]] = {int: _coordinate, float: Real, complex: Complex, ProblemShape: _shape,
                                              StackShape: _shape}
_CHANGED = frozenset(_CHANGES)


def _inwards(value: Any) -> Any:
    change = _CHANGES.get(value.__class__)
    return value if change is None else change(value)


def _outwards(value: Any) -> Any:
    """Kernels compute with Python's integers."""
    if isinstance(value, Coordinate):
        return int(value)
    return tuple(_outwards(v) for v in value) if type(value) is tuple else value
