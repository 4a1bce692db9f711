"""Functions as arguments: which ones device code can call, and in how many ways they take their arguments.

A plain Python function is device code as it stands. A function of `math`, `abs` and conversions such as ``np.float32`` are
written as one. Everything else is refused where it is given, in the emulator too: what has state, or is NumPy's own.
"""

from __future__ import annotations

import builtins
import inspect
import math
from collections.abc import Collection
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from gemmkit.lang.functions import DeviceFunction

_BUILT_IN = ("abs", "bool", "float", "int", "round")


def function_given(f: Any, what: str, field: str, counts: Collection[int], wanted: str) -> Any:
    """The function to keep of one that a component is given: ``f``, or a plain function that does the same.

    ``counts`` are the numbers of arguments that it may require, ``wanted`` says so in words. Raises TypeError, naming
    ``what`` and its ``field``, for what is no function, takes other arguments or cannot be device code.
    """
    said = f"{what}({field}={f!r})"
    plain = _as_plain(f)
    if plain is None:
        raise TypeError(f"{said}: {_why_not(f)}; {wanted} is needed")
    found = required(plain)
    if found not in counts:
        raise TypeError(f"{said}: it {found if isinstance(found, str) else f'takes {found} arguments'}; {wanted} is needed")
    return plain


def required(function: Any) -> int | str:
    """How many arguments a function requires; in words what is wrong with one that cannot be called by position."""
    parameters = list(inspect.signature(function).parameters.values())
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL or p.kind is p.VAR_KEYWORD:
            return f"takes {p}, and device code needs a fixed number of arguments"
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty:
            return f"requires the keyword {p.name}, and arguments are given by position"
    return sum(p.kind is not p.KEYWORD_ONLY and p.default is p.empty for p in parameters)


def _as_plain(f: Any) -> Any:
    """A function that device code can call, or None."""
    if isinstance(f, (FunctionType, DeviceFunction)) or (hasattr(type(f), "__device_type__") and callable(f)):
        return f                                               # (the last: another component)
    if isinstance(f, BuiltinFunctionType) and f.__module__ == "math" and getattr(math, f.__name__, None) is f:
        return _written(f"math.{f.__name__}")
    if getattr(builtins, getattr(f, "__name__", ""), None) is f and f.__name__ in _BUILT_IN:
        return _written(f.__name__)
    if isinstance(f, type) and issubclass(f, np.generic) and getattr(np, f.__name__, None) is f and np.dtype(f).kind in "biufc":
        return _written(f"np.{f.__name__}")
    return None


@cache
def _written(name: str) -> FunctionType:
    """``lambda x: math.exp(x)``, with a place that speaks for itself."""
    count = 2 if name in ("math.atan2", "math.copysign", "math.fmod", "math.hypot", "math.ldexp", "math.pow") else 1
    arguments = ", ".join("xy"[:count])
    function = eval(compile(f"lambda {arguments}: {name}({arguments})", f"<{name}>", "eval"), {"math": math, "np": np})
    function.__name__ = function.__qualname__ = name
    function.__module__ = "builtins"
    return function                                                                        # type: ignore[no-any-return]


def _why_not(f: Any) -> str:
    if not callable(f):
        return f"{type(f).__name__} is no function"
    module, name = getattr(f, "__module__", None) or "", getattr(f, "__name__", None)
    if isinstance(f, np.ufunc) or module.partition(".")[0] == "numpy":
        instead = {"absolute": "abs", "maximum": "lambda x: max(x, ...)", "minimum": "lambda x: min(x, ...)"}.get(
            str(name), f"math.{name}" if hasattr(math, str(name)) else "math's functions")
        return f"NumPy's functions are no device code, use {instead}"
    if isinstance(f, type):
        return "a class is no function"
    if inspect.ismethod(f) or module == "functools" or type(f).__module__ == "functools":
        return f"a {type(f).__name__} holds values that device code does not see; write a function that calls it with them"
    return f"{type(f).__name__} is no Python function"


__all__ = ["function_given", "required"]
