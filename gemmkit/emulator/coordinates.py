"""Coordinates in user code: integers that are weak beside NumPy's scalars, and a fault when they leave their 32 bits.

Kernels compute with Python's own integers. Where they call a user's method or function (`gemmkit.emulator.user_code`), these
become coordinates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.emulator import errors
from gemmkit.emulator.sites import here
from gemmkit.lang import number_rules
from gemmkit.lang.number_rules import Kind, Weak

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
    return {float: Weak.FLOAT, complex: Weak.COMPLEX}.get(type(value))


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
        return float(value)
    if kind is Weak.COMPLEX:
        return complex(value)
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
    if op in ("/", "//", "%") and b == 0:
        fault("a coordinate is divided by zero")
    if kind is Weak.FLOAT and op == "**":
        return float(np.power(np.float64(a), np.float64(b)))  # Python's own is complex of a negative number
    if kind is Weak.FLOAT or kind is Weak.COMPLEX:
        return python(*(int(x) if isinstance(x, int) else x for x in (a, b)))
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

__all__ = ["CLASSES", "Coordinate", "LongCoordinate", "as_kind", "in_range", "kind_of"]
