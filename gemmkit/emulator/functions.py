"""What user code in the emulator sees under the names of Python's functions: ``max``, ``int``, ``math.exp``, ``np.float32``.

Python's own have other results than the device's: ``max`` passes NaN on or not by the order of its arguments, ``int`` gives
a number of any size, ``math.exp`` raises where it overflows. These give what `gemmkit.lang.number_rules` says.
"""

from __future__ import annotations

import builtins
import cmath
import math
import operator
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from gemmkit.emulator.coordinates import Complex, Coordinate, Real, as_kind, fault, kind_of, plain
from gemmkit.lang import number_rules
from gemmkit.lang.number_rules import Kind, Weak


def _kind(value: Any, name: str) -> Kind:
    kind = kind_of(value)
    if kind is None:
        raise TypeError(f"{name} of {value!r}: device code takes numbers")
    return kind


# -- max and min ------------------------------------------------------------------------------------------------------

def _extremum(name: str, python: Callable[..., Any]) -> Callable[..., Any]:
    is_better = operator.gt if name == "max" else operator.lt

    def extremum(first: Any, *others: Any) -> Any:
        if not others and isinstance(first, tuple) and first:
            first, *others = first                             # type: ignore[assignment]
        elif not others:
            raise TypeError(f"{name} of one argument: device code takes two numbers or more")
        for other in others:
            cls = first.__class__
            if cls is not other.__class__ or cls is int or cls is float or cls is Real:
                first, other = alike(first, other)
            if not is_better(first, other) and first == first:       # else it is NaN
                first = other
        return first

    def alike(a: Any, b: Any) -> tuple[Any, Any]:
        kinds = _kind(a, name), _kind(b, name)
        if isinstance(kinds[0], (int, float)) and isinstance(kinds[1], (int, float)):
            return (python(a, b),) * 2
        kind = number_rules.result(name, *kinds)
        return as_kind(a, kind), as_kind(b, kind)

    extremum.__name__ = name
    return extremum


# -- conversions ------------------------------------------------------------------------------------------------------

def _int(value: Any) -> Any:
    """int64 of NumPy's numbers and of plain floats; coordinates and literals stay."""
    kind = _kind(value, "int")
    if number_rules.converted("int", kind) is kind:
        return value
    if number_rules.is_float(kind):
        return _whole("int", value, number_rules.INT64)
    return as_kind(int(value), number_rules.INT64)


def _whole(name: str, value: Any, dtype: np.dtype, whole: Callable[[Any], int] = int) -> Any:
    """A float as a number of an integer type; a fault for one that it does not hold, of which a GPU makes any number."""
    limits: Any = np.iinfo(dtype)
    made = whole(float(value)) if math.isfinite(value) else None
    if made is None or not limits.min <= made <= limits.max:
        fault(f"{name} of {value}: {dtype} holds {limits.min} to {limits.max}")
    return as_kind(made, dtype)


def _float(value: Any) -> Any:
    _kind(value, "float")
    return np.float64(value)


def _complex(*parts: Any) -> Any:
    """Of one number or of two parts, by `number_rules.of_parts`."""
    if not parts:
        return Complex(0)
    kind = number_rules.of_parts(*[_kind(x, "complex") for x in parts])
    return as_kind(complex(*parts), kind)


def _bool(value: Any) -> Any:
    return np.bool_(builtins.bool(value))


def _round(value: Any, *digits: Any) -> Any:
    """To the nearest whole number, halves to even: int64 of a float."""
    if digits:
        raise TypeError("round(x, digits) has no rule in device code; scale, round and scale back")
    kind = _kind(value, "round")
    wanted = number_rules.converted("round", kind)
    return value if wanted is kind or wanted == kind else _whole("round", value, number_rules.INT64, round)


def _divmod(a: Any, b: Any) -> Any:
    return a // b, a % b


def _pow(a: Any, b: Any, *modulus: Any) -> Any:
    if modulus:
        raise TypeError("pow of three numbers has no rule in device code; write a ** b % c")
    return a ** b


def _enumerate(values: Any, start: Any = 0) -> Iterator[Any]:
    return ((Coordinate(n), value) for n, value in enumerate(values, int(start)))


class _Range:
    """``range``, whose numbers are coordinates, or int32 or int64 where NumPy's integers are among the limits."""

    def __init__(self, *limits: Any):
        self.kind = number_rules.of_range(*[_kind(x, "range") for x in limits])
        self.range = range(*map(int, limits))

    def __iter__(self) -> Iterator[Any]:
        kind: Any = self.kind
        return map(Coordinate if kind is Weak.COORDINATE else lambda n: as_kind(n, kind), self.range)


class Conversion:
    """``np.float32`` in user code: calling it converts as the device does."""

    def __init__(self, scalar: type):
        self.dtype, self.__name__ = np.dtype(scalar), scalar.__name__

    def __call__(self, value: Any) -> Any:
        kind = _kind(value, self.__name__)
        if number_rules.is_integer(self.dtype) and number_rules.is_float(kind):
            return _whole(self.__name__, value, self.dtype)
        return as_kind(value, self.dtype)

    def __repr__(self) -> str:
        return f"<conversion to {self.__name__}>"


# -- math -------------------------------------------------------------------------------------------------------------

def _of_math(name: str) -> Callable[..., Any]:
    compute = number_rules.computed(name)
    count = 2 if name in number_rules.MATH_OF_TWO else 1

    def of(values: tuple) -> Callable[..., Any]:
        """How it is computed of numbers of these classes."""
        if len(values) != count:
            raise TypeError(f"math.{name} of {len(values)} numbers: device code takes {count}")
        kinds = [_kind(x, f"math.{name}") for x in values]
        kind = number_rules.of_math(name, *kinds)
        if name in number_rules.MATH_TO_WHOLE and number_rules.is_integer(kind):
            return lambda x: x
        made = kind.type if isinstance(kind, np.dtype) else Real
        if len(kinds) == 1:
            return lambda x: made(compute(np.float64(x)))
        common = number_rules.of_math("fabs", *kinds)           # a plain float beside a float32 is one
        return lambda *values: made(compute(*[np.float64(as_kind(x, common)) for x in values]))

    ways: dict[tuple[type, ...], Callable[..., Any]] = {}

    def function(*values: Any) -> Any:
        classes = tuple(map(type, values))
        way = ways.get(classes)
        if way is None:
            way = ways[classes] = of(values)
        return way(*values)

    function.__name__ = name
    return function


def _ldexp(x: Any, exponent: Any) -> Any:
    return as_kind(np.ldexp(np.float64(x), int(exponent)), number_rules.of_math("fabs", _kind(x, "math.ldexp")))


def _not_in_the_table(name: str) -> Any:
    raise AttributeError(f"math.{name} has no rule in device code; docs/components.md lists what has, under Arithmetic")


def _of_cmath(name: str) -> Callable[..., Any]:
    python = getattr(cmath, name)
    compute = np.angle if name == "phase" else number_rules.computed(name)

    def function(value: Any) -> Any:
        kind = number_rules.of_cmath(name, _kind(value, f"cmath.{name}"))
        return as_kind(compute(np.complex128(value)), kind)

    function.__name__ = python.__name__
    return function


class _Math(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        return _not_in_the_table(name)


_MATH_NAMES = (*number_rules.MATH_OF_ONE, *number_rules.MATH_OF_TWO, *number_rules.MATH_TO_WHOLE, *number_rules.MATH_TESTS)
MATH = _Math(**{name: _of_math(name) for name in _MATH_NAMES}, ldexp=_ldexp,
             **{name: plain(getattr(math, name)) for name in ("pi", "e", "tau", "inf", "nan")})

CMATH = _Math(**{name: _of_cmath(name) for name in number_rules.CMATH},
              **{name: plain(getattr(cmath, name)) for name in ("pi", "e", "tau", "inf", "nan")})

#: The built-in names of user code.
BUILTINS = {**vars(builtins), "max": _extremum("max", max), "min": _extremum("min", min), "int": _int, "float": _float,
            "complex": _complex, "bool": _bool, "round": _round, "divmod": _divmod, "pow": _pow, "range": _Range,
            "enumerate": _enumerate}

#: What stands for a Python function that user code holds under another name.
FUNCTIONS = {getattr(builtins, name): BUILTINS[name]
             for name in ("max", "min", "int", "float", "complex", "bool", "round", "divmod", "pow", "range", "enumerate")}
FUNCTIONS.update({getattr(math, name): getattr(MATH, name) for name in (*_MATH_NAMES, "ldexp")})
FUNCTIONS.update({getattr(cmath, name): getattr(CMATH, name) for name in number_rules.CMATH})


def _of_gemmkit(name: str, python: Callable[..., Any]) -> Callable[..., Any]:
    """``max`` or ``min`` in gemmkit's own code, which has them of whole numbers, tuples and lists as well."""
    device = BUILTINS[name]

    def extremum(*given: Any, **how: Any) -> Any:
        plainly = how or len(given) == 1 or given[0].__class__ is int is given[1].__class__ or kind_of(given[0]) is None
        return python(*given, **how) if plainly else device(*given)

    return extremum


#: What gemmkit's own code sees under names of Python's: where numbers alone differ.
OF_GEMMKIT = {name: _of_gemmkit(name, getattr(builtins, name)) for name in ("max", "min")}
MATH_NAMES = frozenset((*_MATH_NAMES, "ldexp"))
MATH_OF_GEMMKIT = SimpleNamespace(**{**vars(math), **{name: getattr(MATH, name) for name in MATH_NAMES}})


def conversion(scalar: type) -> Any:
    """`Conversion` of a class of NumPy's scalars; the class itself where it is none of a number."""
    try:
        dtype = np.dtype(scalar)
    except TypeError:
        return scalar
    return Conversion(scalar) if dtype.kind in "biufc" or dtype in number_rules.OF_ML_DTYPES else scalar


class Names:
    """A module or class as user code sees it: what it reads from it is replaced as its own names are."""

    def __init__(self, holder: ModuleType | type, replace: Callable[[Any], Any]):
        self._holder, self._replace = holder, replace

    def __getattr__(self, name: str) -> Any:
        return self._replace(getattr(self._holder, name))

    def __repr__(self) -> str:
        return repr(self._holder)
