"""Arguments of components, checked where they are given: functions, dtypes, numbers, words.

A plain Python function is device code as it stands. A function of `math`, `abs` and conversions such as ``np.float32`` are
written as one. Everything else is refused where it is given, in the emulator too: what has state, or is NumPy's own.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import math
import weakref
from collections.abc import Collection
from functools import cache, lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from gemmkit.lang.errors import ComponentError, place_of
from gemmkit.lang.functions import DeviceFunction
from gemmkit.lang.guards import class_version
from gemmkit.lang.records import Record, device_dtype
from gemmkit.lang.references import is_gemmkit
from gemmkit.lang.runtime_fields import annotated

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
    if type(function) is FunctionType and not function.__dict__:    # it has no signature but its own: calls ask this, too
        code, named = function.__code__, function.__kwdefaults__ or ()
        if not code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) and len(named) == code.co_kwonlyargcount:
            return code.co_argcount - len(function.__defaults__ or ())
    parameters = list(inspect.signature(function).parameters.values())
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL or p.kind is p.VAR_KEYWORD:
            return f"takes {p}, and device code needs a fixed number of arguments"
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty:
            return f"requires the keyword {p.name}, and arguments are given by position"
    return sum(p.kind is not p.KEYWORD_ONLY and p.default is p.empty for p in parameters)


def _as_plain(f: Any) -> Any:
    """A function that device code can call, or None."""
    name: str = getattr(f, "__name__", "")
    if isinstance(f, (FunctionType, DeviceFunction)) or (hasattr(type(f), "__device_type__") and callable(f)):
        return f                                               # (the last: another component)
    if isinstance(f, BuiltinFunctionType) and f.__module__ == "math" and getattr(math, name, None) is f:
        return _written(f"math.{name}")
    if name in _BUILT_IN and getattr(builtins, name) is f:
        return _written(name)
    if isinstance(f, type) and issubclass(f, np.number) and getattr(np, name, None) is f:
        return _written(f"np.{name}")
    return None


@cache
def _written(name: str) -> FunctionType:
    """``lambda x: math.exp(x)``, with a place that speaks for itself."""
    count = 2 if name in ("math.atan2", "math.copysign", "math.fmod", "math.hypot", "math.ldexp", "math.pow") else 1
    arguments = ", ".join("xy"[:count])
    function = eval(compile(f"lambda {arguments}: {name}({arguments})", f"<{name}>", "eval"), {"math": math, "np": np})
    function.__name__ = function.__qualname__ = name
    function.__module__ = "builtins"
    return function


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
    if inspect.ismethod(f) or module == "functools" or getattr(type(f), "__module__", "") == "functools":
        return f"a {type(f).__name__} holds values that device code does not see; write a function that calls it with them"
    return f"{type(f).__name__} is no Python function"


# -- methods ----------------------------------------------------------------------------------------------------------

_HOOKS = {"store_element": "data, i, j, value, shape"}          # those that no base class has

#: Classes of gemmkit's that no user's class stands behind: nobody edits them, and a new size asks of some twenty.
_ours: weakref.WeakSet[type] = weakref.WeakSet()


def check_methods(component: Any, field: str) -> None:
    """Raise ComponentError for a method of a user's class that does not take what the kernel gives it, in the components
    that this one consists of, too."""
    for cls, name, function, wanted in _overridden(type(component)):
        found = _takes(function, len(wanted))
        if found is not None and name in getattr(cls, "may_take", ()) and _takes(function, len(wanted) + 1) is None:
            continue
        if found is not None:
            raise ComponentError(f"{field}: {cls.__qualname__}.{name} {found}\n{place_of(function)}  {name}(self, "
                                 f"{', '.join(wanted)}) is needed")
    for inner in vars(component).values() if hasattr(component, "__dict__") else ():
        if hasattr(inner, "__dataclass_fields__") and hasattr(type(inner), "__device_type__"):
            check_methods(inner, field)


def _overridden(cls: type) -> tuple[tuple[type, str, Any, tuple[str, ...]], ...]:
    """The methods of a user's class that stand in place of gemmkit's, with the arguments of those."""
    if cls in _ours:
        return ()
    mine = [c for c in cls.__mro__[:-1] if not is_gemmkit(c)]
    theirs = [c for c in cls.__mro__[:-1] if is_gemmkit(c)]
    out = []
    for owner in mine:
        for name, function in vars(owner).items():
            if not isinstance(function, FunctionType) or (name.startswith("__") and name != "__call__"):
                continue
            base = next((vars(c)[name] for c in theirs if name in vars(c)), None)
            if isinstance(base, FunctionType) and isinstance(required(base), int):
                out.append((owner, name, function, tuple(inspect.signature(base).parameters)[1:]))
            elif base is None and name in _HOOKS:
                out.append((owner, name, function, tuple(_HOOKS[name].split(", "))))
    if not mine:
        _ours.add(cls)
    return tuple(out)


def _takes(function: FunctionType, count: int) -> str | None:
    """What is wrong with a method that is called with ``count`` arguments; None if nothing is."""
    least = required(function)
    if isinstance(least, str):
        return least
    most = sum(p.kind is not p.KEYWORD_ONLY for p in inspect.signature(function).parameters.values())
    return None if least <= count + 1 <= most else f"takes {max(least - 1, 0)} arguments"


# -- dtypes, numbers, words -------------------------------------------------------------------------------------------

def dtype_given(dtype: Any, what: str, field: str = "dtype") -> np.dtype:
    """The dtype that an argument names. Raises TypeError for what is none, or none that device code has."""
    def said() -> str:                             # (NumPy writes a dtype in as long as all the rest takes)
        return f"{what}({field}={dtype!r})"

    if dtype is None or isinstance(dtype, np.ndarray) or (isinstance(dtype, (dict, list)) and not dtype):
        raise TypeError(f"{said()}: the dtype of a number is needed, for example 'float16'")
    try:
        found = np.dtype(dtype)
    except Exception as error:                     # NumPy raises what it likes
        raise TypeError(f"{said()}: no dtype of this name ({error}); for example 'float16'") from None
    if found.subdtype is not None or not found.isnative:
        raise TypeError(f"{said()}: the dtype of a number, of this machine's byte order, is needed")
    try:
        device_dtype(found)
    except TypeError as error:
        raise TypeError(f"{said()}: {error}") from None
    return found


def check_dtype(dtype: Any, name: str) -> None:
    """Raise TypeError, naming the argument, for a dtype that device code has no numbers of."""
    try:
        device_dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{name} has dtype {dtype}; the operators take integers, floats and complex numbers "
                        f"({error})") from None


def check_fields(component: Any) -> None:
    """The fields of a component by their annotations: numbers and words of gemmkit's own classes, and for any class what is
    annotated `Array` or `Scalar`. NumPy's integers become Python's. Raises TypeError, naming the class and the field."""
    for name, check, wanted, default in _rules(type(component), class_version[0]):         # type: ignore[arg-type]
        value = getattr(component, name)
        if value is default and value is None:
            continue
        if not check(value):
            given = f"{_short(value)} ({type(value).__qualname__}) is not" if wanted == _NUMBER else (
                f"got {type(value).__qualname__};" if wanted == _ARRAY else f"{_short(value)};")
            raise TypeError(f"{type(component).__qualname__}.{name}: {given} {wanted}" + " is needed" * (wanted != _NUMBER))
        if wanted == "a whole number" and type(value) is not int:
            object.__setattr__(component, name, int(value))


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:                              # a repr that fails is not what is asked about
        return f"<{type(value).__qualname__}>"
    return text if len(text) < 80 else f"<{type(value).__qualname__}>"


@lru_cache(maxsize=4096)                           # a class's annotations may change, which its version counts
def _rules(cls: Any, _version: int) -> tuple[tuple[str, Any, str, Any], ...]:
    runtime, rules = annotated(cls), []
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        kind = runtime.get(field.name)
        text = kind.__name__ if kind is not None else str(field.type) if _is_shipped(cls, field.name) else ""
        if text in _CHECKS:
            rules.append((field.name, *_CHECKS[text], field.default))
    return tuple(rules)


def _is_shipped(cls: type, field: str) -> bool:
    """Whether the class that declares a field is one of gemmkit's components."""
    owner = next((c for c in cls.__mro__ if field in vars(c).get("__annotations__", {})), cls)
    return owner.__module__.startswith(("gemmkit.layouts", "gemmkit.operators", "gemmkit.epilogues", "gemmkit.transforms"))


def _is_whole(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool) and -2**63 <= int(x) < 2**63


def _is_argument(x: Any) -> bool:
    """A number, one of several parts, or a component in a number's place (alpha and beta of `LinearCombination`)."""
    return _is_scalar(x) or isinstance(x, Record) or getattr(type(x), "stands_for_number", False)


def _is_scalar(x: Any) -> bool:
    if isinstance(x, np.generic):
        return x.dtype.kind not in "SUMmO" and (x.dtype.kind != "V" or x.dtype.names is None)
    return isinstance(x, float) or (isinstance(x, int) and -2**63 <= x < 2**64)


_arrays: set[type] = set()                         # types whose objects all are: components are made anew for a call


def _is_array(x: Any) -> bool:
    if type(x) in _arrays:
        return True
    from gemmkit.runtime.arrays import ArrayInfo, is_array
    from gemmkit.runtime.recognition import KEYS

    if type(x) in KEYS or type(x) in (ArrayInfo, np.ndarray):
        _arrays.add(type(x))
        return True
    return is_array(x)


_NUMBER = "a number that a kernel can take"
_ARRAY = "an array (CuPy, PyTorch, NumPy under emulation)"
_CHECKS = {
    "int": (_is_whole, "a whole number"),
    "str": (lambda x: isinstance(x, str), "a word"),
    "bool": (lambda x: isinstance(x, bool), "True or False"),
    "float": (_is_scalar, "a number"),
    "Scalar": (_is_argument, _NUMBER),
    "Array": (_is_array, _ARRAY),
}
