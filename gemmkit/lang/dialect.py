"""What device code may contain: one check for the emulator and for the compiler, before anything runs or is compiled.

A GPU has no exceptions, no heap and no Python: `raise` would end a thread early, its results missing and its barriers
skipped. What a function contains is read from its bytecode, which lambdas and cells of notebooks have, too. `check` looks at
a component's device methods (`device_methods` of its class), the functions in its fields, and all that these call.
gemmkit's own functions and Numba's are not looked at.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import math
from collections.abc import Iterator
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np

from gemmkit.lang import number_rules
from gemmkit.lang.contents import DICT, LIST, NOTHING, SET, STARS, STRING, Name, contents
from gemmkit.lang.errors import changeable, line_of, refused
from gemmkit.lang.numba_hooks import types
from gemmkit.lang.references import is_fixed, is_library

BREAKPOINT = "breakpoint() stops in the emulator alone (with gemmkit.emulate(): ...); take it out to compile"
MAYBE = "what it returns is None on some ways; give it a value on every way"
NO_VALUE = "it returns nothing, and a value is needed; return one"

# Python's own functions that both worlds have. (isinstance is not among them: np.float32 is no float in Python.)
_BUILTINS = {"abs", "bool", "complex", "divmod", "enumerate", "float", "int", "len", "max", "min", "pow", "print", "range",
             "round", "slice", "sum", "tuple", "zip"}
_NO_MATH = {"cbrt", "comb", "dist", "exp2", "factorial", "fma", "frexp", "fsum", "gcd", "isclose", "isqrt", "lcm", "modf",
            "nextafter", "perm", "prod", "remainder", "sumprod", "ulp"}
_NUMPY = {"where": "x if condition else y", "maximum": "max(x, y)", "minimum": "min(x, y)", "fmax": "max(x, y)",
          "fmin": "min(x, y)", "clip": "min(max(x, low), high)", "absolute": "abs(x)", "abs": "abs(x)", "power": "x ** y",
          "round": "round(x)", "rint": "round(x)", "sign": "math.copysign(1, x)", "square": "x * x",
          "arcsin": "math.asin", "arccos": "math.acos", "arctan": "math.atan", "arctan2": "math.atan2",
          "arcsinh": "math.asinh", "arccosh": "math.acosh", "arctanh": "math.atanh", "dot": "a loop", "sum": "a loop"}


# -- what a function reaches ------------------------------------------------------------------------------------------

_MISSING = object()


def plain(function: Any) -> FunctionType | None:
    """The Python function that a device function or a static method is."""
    if type(function).__name__ == "DeviceFunction":
        function = function.function
    function = function.__func__ if isinstance(function, staticmethod) else function
    return function if isinstance(function, FunctionType) else None


class Walk:
    """One look at a component, or at a function, and all that it reaches. ``compiled`` is stricter in what is printed."""

    def __init__(self, compiled: bool):
        self.compiled = compiled
        self.seen: dict[Any, bool] = {}                    # whether a function gives a value
        self.components: set[int] = set()
        self.within: list[Any] = []

    def component(self, component: Any) -> None:
        """Raise ComponentError for what a component, or one in its fields, has in its device code."""
        if id(component) in self.components:
            return
        self.components.add(id(component))
        cls: Any = type(component)
        if not _is_shipped(cls):
            for name in cls.device_methods:
                method = plain(inspect.getattr_static(cls, name, None))
                if method is not None and not is_library(method) and contents(method.__code__).ends:
                    self.function(method, component, name not in cls.without_value)
        for field in dataclasses.fields(component) if dataclasses.is_dataclass(component) else ():
            value = getattr(component, field.name, None)
            for part in value if type(value) is tuple else (value,):
                if is_component(part):
                    self.component(part)
                elif plain(part) is not None:
                    self.function(plain(part), None, _is_shipped(cls) and field.name not in cls.without_value)

    def function(self, function: Any, owner: Any = None, needed: bool = False) -> bool:
        """Check a function, a method of ``owner`` if it has one; returns whether it gives a value."""
        if is_library(function):
            return True
        key = function, id(owner)
        if key in self.within:
            raise refused(function, line_of(function, function.__name__), f"{function.__qualname__} calls itself, which "
                          "device code cannot; write a loop")
        if key not in self.seen:
            self.within.append(key)
            self.seen[key] = self._look(function, owner)
            self.within.pop()
        if needed and not self.seen[key]:
            found = contents(function.__code__)
            line = [*found.nothing, *(call.line for call in found.calls), function.__code__.co_firstlineno][0]
            raise refused(function, line, NO_VALUE)
        return self.seen[key]

    def _look(self, function: FunctionType, owner: Any) -> bool:
        code = function.__code__
        found = contents(code)
        for fault in found.faults:
            if self.compiled or not fault.allowed:
                raise refused(function, fault.line, fault.reason)
        if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
            raise refused(function, code.co_firstlineno, STARS)
        for name in found.names:
            reason = self._fault(function, name, owner) if self.compiled or not name.allowed else None
            if reason is not None:
                raise refused(function, name.line, reason)
        for name in found.by_keyword:
            called = resolve(function, name, owner)[0]
            if called is not print and called is getattr(builtins, name.root, None):
                raise refused(function, name.line, f"{name} takes no arguments by name in device code; write them by place")
        gives, nothing = found.gives, list(found.nothing)
        for call in found.calls:
            if self._gives(resolve(function, call, owner)):
                gives = True
            else:
                nothing.append(call.line)
        if gives and nothing:
            raise refused(function, min(nothing), NOTHING)
        return gives or not nothing

    def _gives(self, found: tuple[Any, Any]) -> bool:
        """Whether a call of this gives a value, as far as it is known."""
        value, owner = found
        called = plain(value)
        return value is not print and (called is None or self.function(called, owner))

    def _fault(self, function: FunctionType, name: Name, owner: Any) -> str | None:
        value, held = resolve(function, name, owner)
        if value is _MISSING:
            return f"name {name.root!r} is not defined" if name.kind == "global" and not name.path else None
        if is_component(value):
            self.component(value)
        called = plain(value)
        if called is not None and not is_numpy(value):
            self.function(called, held)
            return None
        return _value_fault(name, value, self.compiled)


def is_component(value: Any) -> bool:
    return hasattr(type(value), "device_methods")


def is_numpy(value: Any) -> bool:
    """Whether a value is a function of NumPy's."""
    if not callable(value) or isinstance(value, type):
        return False
    holder = value if isinstance(value, (FunctionType, BuiltinFunctionType)) else type(value)
    of_type = getattr(holder, "__module__", "")               # classes may have none
    return str(of_type).partition(".")[0] == "numpy"


def _is_shipped(cls: type) -> bool:
    """Whether a class of components comes with gemmkit, all of it."""
    return is_library(cls)


def resolve(function: FunctionType, name: Name, owner: Any) -> tuple[Any, Any]:
    """What a name is, and the component that it is a method of. Nothing of the user's is executed for it."""
    value: Any = _MISSING
    if name.kind == "global":
        value = function.__globals__.get(name.root, getattr(builtins, name.root, _MISSING))
    elif name.kind == "free" and name.root in function.__code__.co_freevars:
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name.root)]
        try:
            value = cell.cell_contents
        except ValueError:                                 # not bound yet
            return _MISSING, None
    elif name.kind == "local" and owner is not None and name.root == function.__code__.co_varnames[0]:
        value = owner
    held = None
    for attribute in name.path:
        if value is _MISSING:
            break
        held, value = _attribute(value, attribute)
    return value, held


def _attribute(value: Any, name: str) -> tuple[Any, Any]:
    """An attribute of a module, a class or a component, and the component if it is its method."""
    if isinstance(value, ModuleType):
        return None, getattr(value, name, _MISSING)
    if not isinstance(value, type) and not is_component(value):
        return None, _MISSING
    found = inspect.getattr_static(value, name, _MISSING)
    if isinstance(found, (property, cached_property)):
        return None, _MISSING
    is_method = is_component(value) and isinstance(found, FunctionType) and name not in vars(value)
    return value if is_method else None, found


def _value_fault(name: Name, value: Any, compiled: bool) -> str | None:
    """Why device code cannot have this value; None for what it can have, and for what Numba has to judge."""
    if is_numpy(value):
        called = getattr(value, "__name__", name.root)
        better = _NUMPY.get(called, f"math.{called}" if hasattr(math, called) and called not in _NO_MATH else "math")
        return f"NumPy's function {called} has no device code (np.float32(x) and its like have); write {better}"
    if isinstance(value, (list, dict, set, bytearray)) and name.kind != "local":      # fields: where they are read
        return changeable(str(name), type(value).__name__)
    if value is breakpoint:
        return BREAKPOINT if compiled else None
    if isinstance(value, type):
        return _class_fault(name, value)
    if isinstance(value, BuiltinFunctionType):
        module, called = value.__module__, value.__name__
        if module == "builtins" and called not in _BUILTINS:
            return f"Python's {called} has no device code"
        if module == "math" and called in _NO_MATH:
            return f"math.{called} has no device code"
        if module == "cmath" and called not in number_rules.CMATH:
            return f"cmath.{called} has no device code"
        if module not in ("builtins", "math", "cmath", "_operator") and not is_library(value):
            return f"{name} has no device code; it has the functions of math, and plain functions"
        return None
    if callable(value) and not is_component(value) and not is_library(type(value)):
        return f"{name} is of type {type(value).__name__}, which device code cannot call; write a plain function"
    return None


def _class_fault(name: Name, cls: type) -> str | None:
    if issubclass(cls, np.generic) or is_library(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        return None
    if cls.__module__ == "builtins" and cls.__name__ in _BUILTINS:
        return None
    reasons: dict[type, str] = {list: LIST, dict: DICT, set: SET, frozenset: SET, str: STRING, bytes: STRING}
    return reasons.get(cls, f"{name} makes objects of class {cls.__name__}, which has no device code; a tuple or a "
                       "NamedTuple has")


# -- the two worlds ---------------------------------------------------------------------------------------------------

def check(component: Any) -> None:
    """In the emulator, before it runs: raise ComponentError for what a component's device code may not contain."""
    Walk(compiled=False).component(component)


def check_compiled(function: FunctionType, args: tuple) -> None:
    """Before a function is compiled for argument types: the same of it and of the components that it gets."""
    walk = Walk(compiled=True)
    for ty in _component_types(args):
        walk.component(ty.skeleton)
    if not is_library(function):
        owner = getattr(args[0], "skeleton", None) if args else None
        walk.function(function, owner)


def check_result(function: FunctionType, result: Any) -> None:
    """After it is compiled: what may be None is no value (a name that is None on some ways, which only types tell), and an
    integer literal by itself has 64 bits."""
    if isinstance(result, types.Optional):
        raise refused(function, function.__code__.co_firstlineno, MAYBE)
    for ty in result.types if isinstance(result, types.BaseTuple) else (result,):
        if isinstance(ty, types.IntegerLiteral) and not -2**63 <= ty.literal_value < 2**63 and not is_fixed(function):
            raise refused(function, function.__code__.co_firstlineno,
                          f"it returns {ty.literal_value}, which 64 bits do not hold; write a float, or say the type: "
                          f"np.float32({ty.literal_value})")


_checked: set[Any] = set()


def _component_types(args: tuple) -> Iterator[Any]:
    """The types of components among argument types, each once."""
    for ty in args:
        if hasattr(ty, "skeleton") and ty not in _checked:
            yield ty
            _checked.add(ty)
