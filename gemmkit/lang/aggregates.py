"""Aggregates: Python objects of whole numbers (a tile, a position) whose own methods are device code.

The class of an aggregate says what of an object is compile-time (of a tile its names and extents) and which numbers are
run-time (its base and offset). Where device code reads an attribute of one, indexes it or calls a `traced` function, the
Python method itself runs: once to know the result's type, and once on an object of `Number`s, whose arithmetic emits
instructions. So host and device have one text.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from gemmkit.lang.atoms import Atom
from gemmkit.lang.numba_hooks import (
    AttributeTemplate,
    TypingError,
    cgutils,
    ir,
    lowering_registry,
    models,
    operation,
    register_model,
    signature,
    types,
    typing_registry,
)
from gemmkit.lang.scalars import WeakIntLiteral, i32, index
from gemmkit.lang.static_branches import Of, Unknown


class Number:
    """A run-time coordinate in a method that is traced: operators emit instructions; without a builder, types alone count.

    It is never negative where it is divided.
    """

    __slots__ = ("builder", "value")

    def __init__(self, builder: Any, value: Any):
        self.builder, self.value = builder, value

    def __add__(self, other: Any) -> Number:
        return self if type(other) is int and other == 0 else self._emit("add", self, other, flags=("nsw",))

    __radd__ = __add__

    def __mul__(self, other: Any) -> Number:
        return self._emit("mul", self, other, flags=("nsw",))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Number:
        return self._emit("udiv", self, other)

    def __mod__(self, other: Any) -> Number:
        return self._emit("urem", self, other)

    def __xor__(self, other: Any) -> Number:
        return self._emit("xor", self, other)

    def __and__(self, other: Any) -> Number:
        return self._emit("and_", self, other)

    def __rshift__(self, other: Any) -> Number:
        return self._emit("ashr", self, other)

    def __lshift__(self, other: Any) -> Number:
        return self._emit("shl", self, other)

    def __lt__(self, other: Any) -> Number:
        """1 or 0."""
        is_less = self._emit("icmp_signed", "<", self, other)
        return Number(self.builder, None if self.builder is None else self.builder.zext(is_less.value, i32))

    def _emit(self, instruction: str, *operands: Any, **flags: Any) -> Number:
        if self.builder is None:
            return self
        values = [x if isinstance(x, str) else _value(x) for x in operands]
        return Number(self.builder, getattr(self.builder, instruction)(*values, **flags))

    def __repr__(self) -> str:
        return "a run-time number"


def _value(number: Any) -> Any:
    return number.value if isinstance(number, Number) else i32(operator.index(number))


class Aggregate:
    """Base class. The methods named here are what tracing needs; all others are device code."""

    __slots__ = ()

    def __parts__(self) -> tuple[Any, tuple]:
        """What is compile-time (hashable), and the numbers that are not."""
        raise NotImplementedError

    @classmethod
    def __of_parts__(cls, static: Any, numbers: tuple) -> Any:
        """The object of these parts."""
        raise NotImplementedError

    @classmethod
    def __text__(cls, static: Any) -> str:
        """How errors name the type."""
        raise NotImplementedError


class AggregateType(types.Type):
    """Numba's view of an aggregate: ``static`` in the type, the numbers in the value."""

    def __init__(self, cls: Any, static: Any, count: int):
        self.cls, self.static, self.count = cls, static, count
        self.coordinate_types = [index] * count if count and issubclass(cls, tuple) else None
        super().__init__(cls.__text__(static))

    @property
    def key(self) -> Any:
        return self.cls, self.static, self.count

    @cached_property
    def example(self) -> Any:
        """An object of this type, of which types alone count."""
        return self.cls.__of_parts__(self.static, (Number(None, None),) * self.count)

    def of(self, context: Any, builder: Any, value: Any) -> Any:
        """The object of an LLVM value."""
        # by memory, from which LLVM takes structs apart as it does Numba's: of chains of `insertvalue` it hoists less
        fields = cgutils.create_struct_proxy(self)(context, builder, value=value)
        numbers = tuple(Number(builder, getattr(fields, f"n{n}")) for n in range(self.count))
        return self.cls.__of_parts__(self.static, numbers)

    def known_attribute(self, name: str) -> Any:
        """What is known before types are inferred (:mod:`gemmkit.lang.static_branches`)."""
        try:
            return _known(getattr(self.example, name))
        except AttributeError:
            raise Unknown from None

    def known_item(self, n: Any) -> Any:
        return _known(self.example[n])


def _known(value: Any) -> Any:
    if isinstance(value, Aggregate):
        return Of(type_of(value))
    if type(value) is int:
        return value
    raise Unknown


@register_model(AggregateType)
class _AggregateModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: AggregateType):
        super().__init__(dmm, fe_type, [(f"n{n}", index) for n in range(fe_type.count)])


@lowering_registry.lower_constant(AggregateType)
def _constant(context: Any, builder: Any, ty: AggregateType, value: Any) -> Any:
    return ir.Constant(context.get_value_type(ty), [0] * ty.count)       # of a tile, which is at the origin


# -- between Numba's values and objects -------------------------------------------------------------------------------

def type_of(value: Any, literal: bool = True) -> Any:
    """The type of what a traced method returned; None for what is no value of device code. Whole numbers are constants, or
    coordinates if not ``literal``."""
    if isinstance(value, Aggregate):
        static, numbers = value.__parts__()
        return AggregateType(type(value), static, len(numbers))
    if isinstance(value, Number):
        return index
    if type(value) is int:
        return WeakIntLiteral(value) if literal else index
    return None


def _lowered(context: Any, builder: Any, value: Any) -> Any:
    if not isinstance(value, Aggregate):
        return _value(value)
    out = cgutils.create_struct_proxy(type_of(value))(context, builder)
    for n, number in enumerate(value.__parts__()[1]):
        setattr(out, f"n{n}", _value(number))
    return out._getvalue()


class _NotOurs(Exception):
    """An argument that is no aggregate, no whole number and no word."""


def _given(context: Any, builder: Any, ty: Any, value: Any) -> Any:
    """The object that an argument is to a traced method."""
    if isinstance(ty, AggregateType):
        return ty.example if builder is None else ty.of(context, builder, value)
    if isinstance(ty, types.IntegerLiteral):
        return int(ty.literal_value)
    if isinstance(ty, types.StringLiteral):
        return ty.literal_value
    if isinstance(ty, types.Integer):
        return Number(builder, None if builder is None else context.cast(builder, value, ty, index))
    if isinstance(ty, types.BaseTuple):
        values = [None if builder is None else builder.extract_value(value, n) for n in range(len(ty.types))]
        return tuple(_given(context, builder, t, v) for t, v in zip(ty.types, values))
    raise _NotOurs


def _traced(function: Callable[..., Any], args: tuple, by: Iterable[str] = (), literal: bool = True) -> Any:
    """Signature and code of a method called with arguments of these types, the last of them named; None for none of ours.
    What the method refuses is a TypingError."""
    def call(context: Any, builder: Any, values: Any, names: Sequence[str]) -> Any:
        given = [_given(context, builder, ty, value) for ty, value in zip(args, values)]
        positional = len(given) - len(names)
        return function(*given[:positional], **dict(zip(names, given[positional:])))

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        # Numba finds this code by the argument types alone: the names of a call are in its signature
        parameters = tuple(sig.pysig.parameters) if by_name and sig.pysig is not None else ()
        return _lowered(context, builder, call(context, builder, values, [
            name for n, name in enumerate(parameters) if name != f"_{n}"]))

    by_name = _takes_names(function)
    try:
        result = type_of(call(None, None, args, tuple(by)), literal)
    except _NotOurs:
        return None
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise TypingError(str(error)) from None
    return None if result is None else (signature(result, *args), codegen)


def _takes_names(function: Callable[..., Any]) -> bool:
    code = getattr(function, "__code__", None)                # asked at each call in device code: a signature takes 30 us
    if code is None or hasattr(function, "__wrapped__"):
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    return bool(code.co_flags & inspect.CO_VARKEYWORDS)


def traced(name: str, function: Callable[..., Any]) -> Atom:
    """A function of aggregates and whole numbers as device code: its own text. What it returns is an aggregate, or a
    coordinate."""
    def typer(context: Any, *args: Any) -> Any:
        return _traced(function, args, literal=False)

    def typer_by_name(context: Any, *args: Any, **by: Any) -> Any:
        return _traced(function, (*args, *by.values()), by, literal=False)

    return Atom(name, typer_by_name if _takes_names(function) else typer, function)


# -- attributes, items, lengths ---------------------------------------------------------------------------------------

@typing_registry.register_attr
class _Attributes(AttributeTemplate):
    key = AggregateType

    def generic_resolve(self, ty: AggregateType, attr: str) -> Any:
        if attr.startswith("_"):
            return None
        try:
            return type_of(getattr(ty.example, attr))
        except AttributeError as error:
            raise TypingError(str(error)) from None


@lowering_registry.lower_getattr_generic(AggregateType)
def _getattr(context: Any, builder: Any, ty: AggregateType, value: Any, attr: str) -> Any:
    return _lowered(context, builder, getattr(ty.of(context, builder, value), attr))


@operation(operator.getitem)
def _getitem(context: Any, *args: Any) -> Any:
    return _traced(operator.getitem, args) if len(args) == 2 and isinstance(args[0], AggregateType) else None


@operation(len)
def _len(context: Any, *args: Any) -> Any:                      # not `len`, which would have a number of Python's
    return _traced(lambda x: x.__len__(), args) if len(args) == 1 and isinstance(args[0], AggregateType) else None
