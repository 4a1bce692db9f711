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
from collections.abc import Collection, Iterable
from functools import cache, lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np

from gemmkit.lang.aggregates import _type_convert_all, convert
from gemmkit.lang.components import SURE, ComponentType, words_of
from gemmkit.lang.errors import ComponentError, place_of
from gemmkit.lang.fingerprint import annotated
from gemmkit.lang.functions import DeviceFunction
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, ir, signature, types
from gemmkit.lang.number_rules import (
    REAL_IMAG,
    SIGNS,
    TABLE,
    Record,
    device_dtype,
    metadata_of,
    number_dtype,
    part_dtypes,
    to_dtype,
)
from gemmkit.lang.records import of_parts, part_types
from gemmkit.lang.references import class_version, is_gemmkit
from gemmkit.lang.scalars import (
    REAL_TYPES,
    IndexType,
    RecordType,
    WeakFloat64Type,
    WeakFloatLiteral,
    WeakIntLiteral,
    numba_type,
    numpy_dtype,
)

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
        return f"{type(f).__name__} is not a function, such as gemmkit.epilogues.activations.gelu"
    module, name = getattr(f, "__module__", None) or "", getattr(f, "__name__", None)
    if isinstance(f, np.ufunc) or module.partition(".")[0] == "numpy":
        instead = {"absolute": "abs", "maximum": "lambda x: max(x, ...)", "minimum": "lambda x: min(x, ...)"}.get(
            str(name), f"math.{name}" if hasattr(math, str(name)) else "math's functions")
        return f"NumPy's functions are not device code, use {instead}"
    if isinstance(f, type):
        return "a class is not a function"
    if inspect.ismethod(f) or module == "functools" or getattr(type(f), "__module__", "") == "functools":
        return f"a {type(f).__name__} holds values that device code does not see; write a function that calls it with them"
    return f"{type(f).__name__} is not a Python function"


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
        return f"{what}({field}={shown(dtype)})"

    if dtype is None or isinstance(dtype, (np.ndarray, np.generic)) or (isinstance(dtype, (dict, list)) and not dtype):
        raise TypeError(f"{said()}: the dtype of a number is needed, for example 'float16'")
    try:
        found = np.dtype(dtype)
    except Exception as error:                     # NumPy raises what it likes
        raise TypeError(f"{said()}: no dtype of this name ({error}); for example 'float16' or 'bfloat16'") from None
    if found.subdtype is not None or not found.isnative:
        raise TypeError(f"{said()}: the dtype of a number, of this machine's byte order, is needed")
    try:
        device_dtype(found)
    except TypeError as error:
        raise TypeError(f"{said()}: {error}") from None
    return found


def check_flag(value: object, what: str, field: str) -> None:
    """Raise TypeError for what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{what}({field}={value!r}): True or False is needed")


def check_dtype(dtype: Any, name: str) -> None:
    """Raise TypeError, naming the argument, for a dtype that device code has no numbers of."""
    try:
        device_dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{name} has dtype {dtype}; the operators take integers, floats and complex numbers "
                        f"({error})") from None


def check_fields(component: Any, *_: Any) -> None:
    """The fields of a component by their annotations: numbers and words of gemmkit's own classes, and for any class what is
    annotated `Array` or `Scalar`. NumPy's integers become Python's. Raises TypeError, naming the class and the field, and
    ValueError for a word that is none of those of a ``Literal``."""
    for name, check, wanted, sure, default in _rules(type(component), class_version[0]):   # type: ignore[arg-type]
        value = getattr(component, name)
        if type(value) in sure or (value is default and value is None):
            continue
        if not check(value):
            if isinstance(value, str) and wanted.startswith('"'):                      # a word, and none of a ``Literal``'s
                raise ValueError(f"{type(component).__qualname__}({name}={shown(value)}): {wanted} is needed")
            given = f"{shown(value)} ({type(value).__qualname__}) is not" if wanted == _NUMBER else (
                f"got {type(value).__qualname__};" if wanted == _ARRAY else f"{shown(value)};")
            raise TypeError(f"{type(component).__qualname__}.{name}: {given} {wanted}" + " is needed" * (wanted != _NUMBER))
        if wanted == "a whole number" and type(value) is not int:
            object.__setattr__(component, name, int(value))


check_fields.checks_fields_alone = True                   # type: ignore[attr-defined]  # (for a class's `__init__`)


def shown(value: Any, most: int = 80) -> str:
    """A value in an error: its repr, or its class where that is long (an array's; a device array's waits for the GPU)."""
    if hasattr(value, "__array_interface__") or hasattr(value, "__cuda_array_interface__"):
        return f"<{type(value).__qualname__}>"
    try:
        text = repr(value)
    except Exception:                              # a repr that fails is not what is asked about
        return f"<{type(value).__qualname__}>"
    return text if len(text) < most else f"<{type(value).__qualname__}>"


@lru_cache(maxsize=4096)                           # a class's annotations may change, which its version counts
def _rules(cls: Any, _version: int) -> tuple[tuple[str, Any, str, Collection[type], Any], ...]:
    runtime, rules = annotated(cls), list[tuple[str, Any, str, Collection[type], Any]]()
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        kind = runtime.get(field.name)
        text = kind.__name__ if kind is not None else str(field.type) if _is_shipped(cls, field.name) else ""
        if words := words_of(text):
            rules.append((field.name, lambda x, words=words: isinstance(x, str) and x in words,
                          " or ".join(f'"{word}"' for word in words), (), field.default))
        if text in _CHECKS:
            rules.append((field.name, *_CHECKS[text], SURE.get(text, ()), field.default))
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


def _is_array(x: Any) -> bool:
    from gemmkit.runtime.arrays import KEYS, ArrayInfo, is_array

    if type(x) in KEYS or type(x) in (ArrayInfo, np.ndarray):
        SURE["Array"].add(type(x))
        return True
    return is_array(x)


_NUMBER = "a number that a kernel can take"
_ARRAY = "an array (CuPy, PyTorch, NumPy under emulation)"
#: By an annotation: what a value must be, in words.
_CHECKS: dict[str, tuple[Any, str]] = {
    "int": (_is_whole, "a whole number"),
    "str": (lambda x: isinstance(x, str), "a word"),
    "bool": (lambda x: isinstance(x, bool), "True or False"),
    "float": (_is_scalar, "a number"),
    "Scalar": (_is_argument, _NUMBER),
    "Array": (_is_array, _ARRAY),
}


# --------------------------------------------------------------------------------------------------
# What a component's method may return: checked where the kernel takes it, so that the error names the user's method.
#
# A kernel calls methods of components it knows nothing of. Without a look at what comes back, None would be NaN in the
# emulator and a cast deep inside gemmkit where it is compiled. The atoms here leave nothing in the machine code.
#
# Numbers of several parts may come back as a tuple of their parts; the next function of a chain gets a number again.

NUMBER = "a number"
TRUTH = "True or False"
WHOLE = types.Integer, types.IntegerLiteral


# -- which function of the user's it was ------------------------------------------------------------------------------

def function_of(component: Any, method: str) -> Any:
    """The user's function behind a component's method: the method itself, or what a shipped class calls in its place."""
    found = getattr(type(component), method, None)
    if isinstance(found, FunctionType) and not is_gemmkit(found):
        return found
    for name in ("f", "mask", "second", "first", "function"):
        inner = vars(component).get(name) if hasattr(component, "__dict__") else None
        inner = inner.function if isinstance(inner, DeviceFunction) else inner
        if isinstance(inner, FunctionType):
            return inner
        if inner is not None and hasattr(inner, "__dataclass_fields__"):
            return function_of(inner, "__call__")
    own = [value for cls in type(component).__mro__ for name, value in vars(cls).items()      # gemmkit's methods call these
           if isinstance(value, FunctionType) and not is_gemmkit(value)
           and (name == "__call__" or not name.startswith("__"))]
    return own[0] if own else found


def refusal(component: Any, method: str, got: str, wanted: str) -> ComponentError:
    """The error of a method that returned something else than it should."""
    component = component.skeleton if isinstance(component, ComponentType) else component
    function = function_of(component, method)
    name = f"{type(component).__qualname__}.{method}"
    if function is getattr(type(component), method, None) and is_gemmkit(function):
        return ComponentError(f"{name} returned {got}; {wanted} is needed")     # by what it was given: no line is at fault
    name = getattr(function, "__qualname__", name)
    return ComponentError(f"{name} returned {got}\n{place_of(function)}  {wanted} is needed")


def worded(x: Any) -> str:
    """A returned value or its type, in words."""
    if isinstance(x, types.NoneType) or x is None:
        return "None (is there a return on every way through it?)"
    if isinstance(x, types.BaseTuple):
        return f"a tuple of {len(x.types)} ({', '.join(str(t) for t in x.types)})"
    if isinstance(x, types.Type):
        return f"a value of type {x}"
    if isinstance(x, tuple):
        return f"a tuple of {len(x)} ({', '.join(type(v).__name__ for v in x)})"
    return f"{type(x).__name__} {x!r}"


# -- numbers ----------------------------------------------------------------------------------------------------------

def is_number(x: Any) -> bool:
    """Whether a Python value is a number, real or of several parts."""
    if isinstance(x, np.generic):
        return x.dtype.kind not in "SUMmO"
    return isinstance(x, (int, float, complex, Record)) or (
        hasattr(x, "__float__") and not hasattr(x, "__len__") and not isinstance(x, (np.ndarray, type)))


def _is_real(x: Any) -> bool:
    return is_number(x) and not isinstance(x, (complex, np.complexfloating, Record))


#: Most of the classes that `_is_real` accepts: asked first, for it is asked of every element.
_REAL_CLASSES = frozenset({int, float, *(np.dtype(code).type for code in "?bhilqBHILQefd")})


def is_number_type(ty: types.Type) -> bool:
    return isinstance(ty, REAL_TYPES) or part_types(ty) is not None


def _common_part(own: np.dtype, given: Iterable[np.dtype]) -> np.dtype:
    """The type of a number's parts from those of a tuple; ``given`` are those that are no literals or coordinates."""
    strong = tuple(given)
    if not strong:
        return own
    common = np.result_type(*strong)
    return np.result_type(common, own) if own.kind not in "iu" and common.kind in "iub" else common


def _number_dtype(like: np.dtype, given: Iterable[np.dtype]) -> np.dtype:
    """The dtype of an algebra's numbers with other parts, by the types that `_common_part` takes."""
    own = part_dtypes(like)
    metadata = metadata_of(like)
    if like.names is not None and (TABLE not in metadata or len(set(own)) > 1):
        return like
    part = _common_part(own[0], given)
    if like.names is None:
        return number_dtype(REAL_IMAG, np.result_type(part, np.float32), None, ())
    return number_dtype(like.names, part, metadata[TABLE], metadata[SIGNS])


def as_number(values: tuple, like: Any) -> Any:
    """A tuple of parts as a number of the kind of ``like``; the tuple itself where that has another number of parts."""
    dtype = getattr(like, "dtype", None)
    if not isinstance(dtype, np.dtype) or len(part_dtypes(dtype)) != len(values) or len(values) < 2:
        return values
    strong = (v.dtype for v in values if isinstance(v, np.generic))      # not always asked for
    return to_dtype(_number_dtype(dtype, strong), values)


def _number_type(ty: types.BaseTuple, like: Any) -> Any:
    """`as_number`, of types; None where the tuple stays what it is."""
    own = part_types(like)
    if own is None or len(own) != len(ty.types):
        return None
    dtype = like.dtype if isinstance(like, RecordType) else np.dtype(like.name)
    weak = WeakIntLiteral, WeakFloatLiteral, WeakFloat64Type, IndexType
    strong = [numpy_dtype(t) for t in ty.types if not isinstance(t, weak)]
    return numba_type(_number_dtype(dtype, strong))


def _type_number(context: TypingContext, component: types.Type, method: types.Type, value: types.Type,
                 like: types.Type) -> Any:
    given = (component, method, value, like)
    if is_number_type(value):
        return signature(value, *given), lambda c, b, s, v: v[2]
    if not isinstance(value, types.BaseTuple) or not value.types or not all(isinstance(t, REAL_TYPES) for t in value.types):
        raise refusal(component, method.literal_value, worded(value), NUMBER)
    wanted = _number_type(value, like)
    if wanted is None:
        return signature(value, *given), lambda c, b, s, v: v[2]

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        kinds = part_types(wanted) or ()
        parts = [c.cast(b, b.extract_value(v[2], n), t, to) for n, (t, to) in enumerate(zip(value.types, kinds))]
        return of_parts(c, b, wanted, parts)

    return signature(wanted, *given), codegen


@atom(_type_number)
def number(component: Any, method: str, value: Any, like: Any) -> Any:
    """What ``component.method`` made of the element ``like``: a number; a tuple of as many parts as that has becomes one.

    (A tuple beside a real element stays a tuple: a record may be where it goes.)
    """
    if type(value) is type(like):
        return value
    if isinstance(value, tuple):
        if value and (_REAL_CLASSES.issuperset(map(type, value)) or all(map(_is_real, value))):
            return as_number(value, like)
    elif is_number(value):
        return value
    raise refusal(component, method, worded(value), NUMBER)


def _type_numbers(context: TypingContext, component: types.Type, method: types.Type, values: types.Type,
                  like: types.Type) -> Any:
    given = (component, method, values, like)
    if not isinstance(values, types.BaseTuple) or len(values.types) != len(like.types):
        raise refusal(component, method.literal_value, worded(values), f"a tuple of {len(like.types)}, one for each value,")
    single = [_type_number(context, component, method, t, x) for t, x in zip(values.types, like.types)]
    result = types.BaseTuple.from_types([sig.return_type for sig, _ in single])

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        parts = [emit(c, b, sig, (None, None, b.extract_value(v[2], n), None)) for n, (sig, emit) in enumerate(single)]
        return c.make_tuple(b, result, parts)

    return signature(result, *given), codegen


@atom(_type_numbers)
def numbers(component: Any, method: str, values: tuple, like: tuple) -> tuple:
    """`number`, of a tuple: as many as the method was given."""
    if not isinstance(values, tuple) or len(values) != len(like):
        raise refusal(component, method, worded(values), f"a tuple of {len(like)}, one for each value,")
    return tuple(number(component, method, value, x) for value, x in zip(values, like))


def _type_counted(context: TypingContext, component: types.Type, method: types.Type, values: types.Type,
                  count: types.Type) -> Any:
    wanted = count.literal_value
    if not isinstance(values, types.BaseTuple) or len(values.types) != wanted:
        raise refusal(component, method.literal_value, worded(values), f"a tuple of {wanted}, one for each element,")
    for ty in values.types:
        if not is_number_type(ty) and not isinstance(ty, types.BaseTuple):
            raise refusal(component, method.literal_value, f"a tuple with {worded(ty)}", NUMBER)
    return signature(values, component, method, values, count), lambda c, b, s, v: v[2]


@atom(_type_counted)
def counted(component: Any, method: str, values: tuple, count: int) -> tuple:
    """A tile's elements that ``component.method`` returned: so many numbers."""
    if not isinstance(values, tuple) or len(values) != count:
        raise refusal(component, method, worded(values), f"a tuple of {count}, one for each element,")
    for value in values:
        if not isinstance(value, tuple) and not is_number(value):
            raise refusal(component, method, f"a tuple with {worded(value)}", NUMBER)
    return values


# -- where a number goes ----------------------------------------------------------------------------------------------

def _fits(count: int, dtype: np.dtype, is_tuple: bool) -> bool:
    wanted = len(part_dtypes(dtype))
    if is_tuple and dtype.names is None:
        return count == wanted > 1                     # (x,) is no number
    return count == 1 or count == wanted or (count < wanted and dtype.names is not None)


def _too_many(component: Any, method: str, dtype: np.dtype, got: str) -> ComponentError:
    wanted = len(part_dtypes(dtype))
    name = dtype.name if dtype.names is None else f"({', '.join(dtype.names)})"
    return refusal(component, method, got, f"it becomes {name}: " + (
        "a real number" if wanted == 1 else f"a number of {wanted} parts"))


def _type_converted(context: TypingContext, component: types.Type, method: types.Type, value: types.Type,
                    dtype: types.Type) -> Any:
    count = len(value.types) if isinstance(value, types.BaseTuple) else len(part_types(value) or (value,))
    target = numpy_dtype(dtype.target)
    if not _fits(count, target, isinstance(value, types.BaseTuple)):
        raise _too_many(component, method.literal_value, target, worded(value))
    return signature(dtype.target, component, method, value, dtype), lambda c, b, s, v: c.cast(b, v[2], value, dtype.target)


@atom(_type_converted)
def converted(component: Any, method: str, value: Any, dtype: np.dtype) -> Any:
    """`convert` of what ``component.method`` returned: a number of several parts fits no ``dtype`` of fewer."""
    if type(value) is dtype.type or (type(value) is Record and value.dtype is dtype):
        return value
    count = len(value) if isinstance(value, (tuple, Record)) else 1 + isinstance(value, (complex, np.complexfloating))
    if not _fits(count, dtype, isinstance(value, tuple)):
        raise _too_many(component, method, dtype, worded(value))
    return convert(dtype, value)


def _type_all_converted(context: TypingContext, component: types.Type, method: types.Type, values: types.Type,
                        dtype: types.Type) -> Any:
    for ty in values.types:
        _type_converted(context, component, method, ty, dtype)
    sig, emit = _type_convert_all(context, dtype, values)
    return signature(sig.return_type, component, method, values, dtype), lambda c, b, s, v: emit(c, b, sig, (None, v[2]))


@atom(_type_all_converted)
def all_converted(component: Any, method: str, values: tuple, dtype: np.dtype) -> tuple:
    """`converted`, of every value of a tuple."""
    kind = dtype.type
    for value in values:
        if type(value) is not kind:
            return tuple(converted(component, method, value, dtype) for value in values)
    return values


def _type_convertible(context: TypingContext, component: types.Type, method: types.Type, values: types.Type,
                      dtype: types.Type) -> Any:
    for ty in values.types:
        _type_converted(context, component, method, ty, dtype)
    return signature(values, component, method, values, dtype), lambda c, b, s, v: v[2]


@atom(_type_convertible)
def convertible(component: Any, method: str, values: tuple, dtype: np.dtype) -> tuple:
    """The values themselves, where each could be `converted`."""
    all_converted(component, method, values, dtype)
    return values


# -- ranges, places, conditions ---------------------------------------------------------------------------------------

def _has_index(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) or (hasattr(x, "__index__") and not isinstance(x, np.ndarray))


def _type_pair(context: TypingContext, component: types.Type, method: types.Type, value: types.Type) -> Any:
    if not isinstance(value, types.BaseTuple) or len(value.types) != 2 or not all(isinstance(t, WHOLE) for t in value.types):
        raise refusal(component, method.literal_value, worded(value), "a tuple of two whole numbers")
    return signature(value, component, method, value), lambda c, b, s, v: v[2]


@atom(_type_pair)
def pair(component: Any, method: str, value: Any) -> tuple:
    """A range or a place that ``component.method`` returned: two whole numbers."""
    if not isinstance(value, tuple) or len(value) != 2 or not _has_index(value[0]) or not _has_index(value[1]):
        raise refusal(component, method, worded(value), "a tuple of two whole numbers")
    return value


def _type_truth(context: TypingContext, component: types.Type, method: types.Type, value: types.Type) -> Any:
    if not isinstance(value, (types.Boolean, types.BooleanLiteral, *WHOLE)):
        raise refusal(component, method.literal_value, worded(value), TRUTH)
    return signature(value, component, method, value), lambda c, b, s, v: v[2]


@atom(_type_truth)
def truth(component: Any, method: str, value: Any) -> bool:
    """What a condition said: a truth value or a whole number."""
    if not isinstance(value, np.bool_) and not _has_index(value):
        raise refusal(component, method, worded(value), TRUTH)
    return value


FLOAT32_MAX = float(np.finfo(np.float32).max)


def finite_number(value: Any, name: str) -> float:
    """A run-time number of a call, such as a scale, as a plain float.

    Raises TypeError for what is no real number, ValueError for NaN and infinities.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}={value!r}: a real number is needed")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: a finite number is needed")
    return float(value)
