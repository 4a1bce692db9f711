"""The weak numbers of emulated code: coordinates, plain floats and plain complex numbers.

Coordinates are integers that report a fault when they leave their 32 bits. Kernels compute with Python's integers, which
become coordinates where a kernel calls a user's method or function (`gemmkit.emulator.user_code`). Plain floats and complex
numbers are `Real` and `Complex`: Python raises errors where a GPU has infinities and NaN.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.emulator import errors
from gemmkit.lang import number_rules
from gemmkit.lang.number_rules import Kind, Weak
from gemmkit.lang.sites import here
from gemmkit.lang.wide import emulate_with

_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<<": operator.lshift, ">>": operator.rshift, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne}
_METHODS = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "&": "and",
            "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift", "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq",
            "!=": "ne"}


class Coordinate(int):
    """A signed integer of ``bits`` bits with the rules of `number_rules` (``Weak.COORDINATE``).

    >>> import numpy as np
    >>> type(Coordinate(3) * np.float32(0.5)), type(Coordinate(3) * np.int8(100)), Coordinate(3) * np.int8(100)
    (<class 'numpy.float32'>, <class 'gemmkit.emulator.coordinates.Coordinate'>, 300)
    """

    __array_ufunc__ = None                # NumPy's scalars leave it to us
    kind = Weak.COORDINATE
    least, most = -2**31, 2**31 - 1

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __neg__(self) -> Coordinate:
        return in_range(type(self), -int(self))

    def __pos__(self) -> Coordinate:
        return self

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


class Real(float):
    """A plain float (``Weak.FLOAT``) whose operators never raise: they give what NumPy's float64 gives.

    >>> import numpy as np
    >>> with np.errstate(all="ignore"):
    ...     1 / Real(0.0), Real(10.0) ** 400, Real(-8.0) ** 0.5, type(Real(0.1) * np.float32(2))
    (inf, inf, nan, <class 'numpy.float32'>)
    """

    __array_ufunc__ = None                # NumPy's scalars would take it for a float64
    real = property(lambda self: self)
    imag = property(lambda self: Real(0.0))

    def __neg__(self) -> Real:
        return Real(-float(self))

    def __pos__(self) -> Real:
        return self

    def __abs__(self) -> Real:
        return Real(abs(float(self)))

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    __hash__ = float.__hash__


class Complex(complex):
    """A plain complex number (``Weak.COMPLEX``) whose operators never raise: they give what NumPy's complex128 gives."""

    __array_ufunc__ = None
    real = property(lambda self: Real(complex(self).real))
    imag = property(lambda self: Real(complex(self).imag))

    def conjugate(self) -> Complex:
        return Complex(complex(self).conjugate())

    def __neg__(self) -> Complex:
        return Complex(-complex(self))

    def __pos__(self) -> Complex:
        return self

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
