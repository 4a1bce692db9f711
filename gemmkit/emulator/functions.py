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
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from gemmkit.components import Component, field_values, freeze
from gemmkit.emulator import errors
from gemmkit.lang import number_rules, source
from gemmkit.lang.aggregates import static_type
from gemmkit.lang.component_products import ProblemShape
from gemmkit.lang.components import MethodType, emulate_with, wide_type
from gemmkit.lang.deferred import NotInstalledError, load
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.functions import device
from gemmkit.lang.host import View, here
from gemmkit.lang.memory import ViewType
from gemmkit.lang.numba_hooks import types
from gemmkit.lang.number_rules import Kind, Record, Weak
from gemmkit.lang.scalars import index, numba_type, weak_float64, wide_index

# --------------------------------------------------------------------------------------------------
# The weak numbers of emulated code: coordinates, plain floats and plain complex numbers.
#
# Coordinates are integers that report a fault when they leave their 32 bits. Kernels compute with Python's integers,
# which become coordinates where a kernel calls a user's method or function (`gemmkit.emulator.user_code`). Plain floats
# and complex numbers are `Real` and `Complex`: Python raises errors where a GPU has infinities and NaN.

_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<<": operator.lshift, ">>": operator.rshift, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne}
_METHODS = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "&": "and",
            "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift", "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq",
            "!=": "ne"}


class _Emulated:
    """What numbers of emulated code have in common."""

    __array_ufunc__ = None                # NumPy's scalars leave operators to us; they would take a `Real` for a float64

    def __pos__(self) -> Any:
        return self

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


class Coordinate(_Emulated, int):
    """A signed integer of ``bits`` bits with the rules of `number_rules` (``Weak.COORDINATE``).

    >>> import numpy as np
    >>> type(Coordinate(3) * np.float32(0.5)), type(Coordinate(3) * np.int8(100)), Coordinate(3) * np.int8(100)
    (<class 'numpy.float32'>, <class 'gemmkit.emulator.functions.Coordinate'>, 300)
    """

    kind = Weak.COORDINATE
    least, most = -2**31, 2**31 - 1

    def __neg__(self) -> Coordinate:
        return in_range(type(self), -int(self))

    def __abs__(self) -> Coordinate:
        return -self if self < 0 else self

    def __invert__(self) -> Coordinate:
        return type(self)(~int(self))

    __hash__ = int.__hash__


class LongCoordinate(Coordinate):
    """A coordinate of an operand with 2^31 elements or more."""

    kind = Weak.LONG_COORDINATE
    least, most = -2**63, 2**63 - 1


CLASSES = {Weak.COORDINATE: Coordinate, Weak.LONG_COORDINATE: LongCoordinate}
emulate_with(LongCoordinate)


class Real(_Emulated, float):
    """A plain float (``Weak.FLOAT``) whose operators never raise: they give what NumPy's float64 gives.

    >>> import numpy as np
    >>> with np.errstate(all="ignore"):
    ...     1 / Real(0.0), Real(10.0) ** 400, Real(-8.0) ** 0.5, type(Real(0.1) * np.float32(2))
    (inf, inf, nan, <class 'numpy.float32'>)
    """

    real = property(lambda self: self)
    imag = property(lambda self: Real(0.0))

    def __neg__(self) -> Real:
        return Real(-float(self))

    def __abs__(self) -> Real:
        return Real(abs(float(self)))

    __hash__ = float.__hash__


class Complex(_Emulated, complex):
    """A plain complex number (``Weak.COMPLEX``) whose operators never raise: they give what NumPy's complex128 gives."""

    real = property(lambda self: Real(complex(self).real))
    imag = property(lambda self: Real(complex(self).imag))

    def conjugate(self) -> Complex:
        return Complex(complex(self).conjugate())

    def __neg__(self) -> Complex:
        return Complex(-complex(self))

    def __abs__(self) -> Real:
        return Real(abs(np.complex128(self)))

    __hash__ = complex.__hash__


def plain(value: Any) -> Any:
    """A number of Python's as emulated code computes with it: floats and complex numbers, and those in tuples."""
    made = _PLAIN.get(type(value))
    if made is not None:
        return made(value)
    if type(value) is tuple:
        parts = tuple(map(plain, value))
        return value if all(map(operator.is_, parts, value)) else parts
    return value


_PLAIN: dict[type, type] = {float: Real, complex: Complex}


def in_range(cls: Any, value: int) -> Coordinate:
    """A coordinate of a class; raises CoordinateError where its bits do not hold the value."""
    if not cls.least <= value <= cls.most:
        bits = cls.kind.value
        fault(f"a coordinate becomes {value}, which {bits} bits do not hold (-2^{bits - 1} to 2^{bits - 1} - 1); the GPU "
              "would wrap it around")
    return cls(value)


def fault(message: str) -> None:
    """Raise CoordinateError with the line of the user's code."""
    from gemmkit.emulator.machine import current

    try:
        thread = current().id
    except RuntimeError:                   # a method called outside a kernel
        thread = None
    raise errors.CoordinateError(message, site=here(), thread=thread)


def kind_of(value: Any) -> Kind | None:
    """The kind of a number in user code; None for what is no number. A literal is itself."""
    if isinstance(value, np.generic):
        return value.dtype
    if isinstance(value, Coordinate):
        return value.kind
    if isinstance(value, bool):
        return number_rules.BOOL
    if type(value) is int:
        return value
    return _WEAK.get(type(value))


_WEAK = {float: Weak.FLOAT, Real: Weak.FLOAT, complex: Weak.COMPLEX, Complex: Weak.COMPLEX}


def as_kind(value: Any, kind: Kind) -> Any:
    """A number converted: integers wrap, as on the device."""
    if isinstance(kind, np.dtype):
        if isinstance(value, np.generic) and value.dtype == kind:
            return value
        if isinstance(value, Coordinate) and kind.char in "fd" and -2**31 <= value < 2**31:
            return kind.type(value)                           # exact in float64: rounded once
        if isinstance(value, int) and number_rules.is_integer(kind):
            return np.array(int(value) % (1 << 8 * kind.itemsize), f"u{kind.itemsize}").view(kind)[()]
        return np.asarray(value).astype(kind)[()]
    if kind is Weak.FLOAT or isinstance(kind, float):
        return Real(value)
    if kind is Weak.COMPLEX:
        return Complex(value)
    if number_rules.is_coordinate(kind):
        return in_range(CLASSES[kind], int(value))
    return value


def _compute(op: str, a: Any, b: Any, mine: Any, other: Any) -> Any:
    """``a op b``, of which ``mine`` is a coordinate."""
    python = _PYTHON[op]
    theirs = kind_of(other)
    if theirs is None:
        return NotImplemented
    if op in number_rules.COMPARISONS:
        return np.bool_(python(*(int(x) if isinstance(x, int) else x for x in (a, b))))
    left, right = (mine.kind, theirs) if a is mine else (theirs, mine.kind)
    kind = number_rules.result(op, left, right)
    if isinstance(kind, np.dtype):
        return python(as_kind(a, kind), as_kind(b, kind))
    if op in ("/", "//", "%") and b == 0 and not (number_rules.is_float(theirs) or kind is Weak.COMPLEX):
        fault("a coordinate is divided by zero")
    if kind is Weak.FLOAT or kind is Weak.COMPLEX:
        return python(as_kind(a, kind), as_kind(b, kind))
    if op in ("<<", ">>") and not 0 <= int(b) < kind.value:
        fault(f"a coordinate of {kind.value} bits is shifted by {int(b)}")
    return in_range(CLASSES[kind], python(int(a), int(b)))


def _methods(op: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    direct: Any = None
    divides = op in ("//", "%")
    if op in number_rules.COMPARISONS or op in ("+", "-", "*", "&", "|", "^") or divides:
        direct = getattr(int, f"__{_METHODS[op]}__")                          # Python's own

    def forward(self: Any, other: Any) -> Any:
        mine, theirs = self.__class__, other.__class__                        # mostly alike: no table is asked
        if direct is not None and (theirs is mine or (theirs is int and -2**31 <= other < 2**31)) and (other or not divides):
            found = direct(self, other)
            return in_range(mine, found) if found.__class__ is int else np.bool_(found)
        return _compute(op, self, other, self, other)

    def backward(self: Any, other: Any) -> Any:
        if direct is not None and other.__class__ is int and -2**31 <= other < 2**31 and (self or not divides):
            return in_range(self.__class__, direct(other, self))
        return _compute(op, other, self, self, other)

    return forward, backward


for _op, _name in _METHODS.items():
    _forward, _backward = _methods(_op)
    setattr(Coordinate, f"__{_name}__", _forward)
    if _op not in number_rules.COMPARISONS:
        setattr(Coordinate, f"__r{_name}__", _backward)

_OF_ML_DTYPES = frozenset(dtype.type for dtype in number_rules.OF_ML_DTYPES)
_RAISES = "/", "//", "%", "**"            # of Python's own floats and complex numbers


def _plain_methods(op: str, cls: Any, numbers: tuple[type, ...],
                   exact: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The methods of ``cls`` for an operator, beside ``numbers`` of Python's; ``exact`` is NumPy's type of its own. All else
    meets Python's own number; ml_dtypes' floats are float32 beside it, as `number_rules` says."""
    python, own, narrow = _PYTHON[op], cls.__base__, np.float32 if exact is np.float64 else np.complex64
    of_own = np.bool_ if op in number_rules.COMPARISONS else cls

    def forward(self: Any, other: Any) -> Any:
        if isinstance(other, np.generic) or not isinstance(other, numbers):
            if type(other) in _OF_ML_DTYPES:
                return python(narrow(self), np.float32(other))
            return python(own(self), other)
        return made(self, other)

    def backward(self: Any, other: Any) -> Any:
        if isinstance(other, np.generic) or not isinstance(other, numbers):
            if type(other) in _OF_ML_DTYPES:
                return python(np.float32(other), narrow(self))
            return python(other, own(self))
        return made(other, self)

    def made(a: Any, b: Any) -> Any:
        return of_own(python(exact(a), exact(b)) if op in _RAISES else python(own(a), own(b)))

    return forward, backward


for _op, _name in _METHODS.items():
    for _cls, _numbers, _exact in ((Real, (int, float), np.float64), (Complex, (int, float, complex), np.complex128)):
        if not hasattr(_cls.__base__, f"__{_name}__") or (_cls is Complex and _op in ("<", "<=", ">", ">=")):
            continue
        _forward, _backward = _plain_methods(_op, _cls, _numbers, _exact)
        setattr(_cls, f"__{_name}__", _forward)
        if _op not in number_rules.COMPARISONS:
            setattr(_cls, f"__r{_name}__", _backward)


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
    raise AttributeError(f"math.{name} has no rule in device code; docs/reference/device_code.md lists those that have one")


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
    device, is_better = BUILTINS[name], operator.gt if name == "max" else operator.lt

    def extremum(*given: Any, **how: Any) -> Any:
        if given[0].__class__ is np.ndarray:                   # an operator's (`lang.registers.outer`), of one type
            first, second = given
            return np.where(is_better(first, second) | (first != first), first, second)
        kind = kind_of(given[0])
        is_whole = kind.__class__ is int                       # beyond 32 bits, int(x) of an int64 may be
        plainly = how or len(given) == 1 or kind is None or (is_whole and (given[1].__class__ is int or abs(kind) >> 31))
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


# --------------------------------------------------------------------------------------------------
# What passes in the emulator must pass the compiler: a user's method is compiled once, for what it was called with.
#
# Python computes what types cannot describe: a slice as long as a coordinate says, an attribute that NumPy's scalars
# have, a tuple of one length on one way and of another on the other. What cannot be seen in bytecode the compiler knows.
# It needs 20 to 100 ms for a function, and what it has taken it does not look at again (`gemmkit.lang.functions`). So
# when the first call of a method in a launch has returned, it is compiled, and what the compiler refuses is refused here,
# in its words.

class UnknownType(Exception):
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
    except UnknownType:
        return
    if owner is not None:
        MethodType(args[0], function.__name__, device(function)).get_call_type(None, args[1:], keywords)
        return
    ty: Any = freeze(original(function)).type
    ty.get_call_type(None, args, keywords)


def _is_component(value: Any) -> bool:
    return isinstance(value, Component) and not isinstance(value, ProblemShape)


def _is_silent(function: FunctionType, owner: Any, components: list) -> bool:
    """Whether a function, and the components that it gets, have nothing that the emulator alone takes: `breakpoint`, an
    f-string that is printed."""
    walk = source.SourceWalk(compiled=True)
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
        if isinstance(value, ProblemShape):
            shape = freeze(type(value)(*(1 for _ in field_values(value)))).type
            return wide_type(shape) if isinstance(value.M, LongCoordinate) else shape
        if isinstance(value, Component):
            return freeze(original(value)).type
        return static_type(value)
    except (TypeError, ValueError):
        raise UnknownType from None
