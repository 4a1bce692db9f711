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
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from gemmkit.lang import arithmetic as _arithmetic  # noqa: F401  (registers + and its like)
from gemmkit.lang import builtins as _builtins  # noqa: F401  (and `max`, `int`, `math.exp`)
from gemmkit.lang import numba_hooks as nb
from gemmkit.lang import records as _records  # noqa: F401  (registers the arithmetic of records)
from gemmkit.lang.arithmetic import of_two
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, ir, operation, signature, types
from gemmkit.lang.number_rules import Record, device_dtype, is_of_one_type, to_dtype
from gemmkit.lang.passes import KnownType, UnknownValue
from gemmkit.lang.scalars import DTypeType, WeakFloatLiteral, WeakIntLiteral, dtype_type, i1, i32, index, numba_type, weaken

__all__ = [
    "DTypeType", "WeakFloatLiteral", "WeakIntLiteral", "static_type", "static_value",
]

F = TypeVar("F", bound=Callable[..., Any])


class Number:
    """A run-time coordinate in a method that is traced: operators emit instructions; without a builder, types alone count.

    It is never negative where it is divided.
    """

    __slots__ = ("builder", "value")

    def __init__(self, builder: ir.IRBuilder | None, value: ir.Value | None):
        self.builder, self.value = builder, value

    def __add__(self, other: Number | int) -> Number:
        return self if type(other) is int and other == 0 else self._emit("add", self, other, flags=("nsw",))

    __radd__ = __add__

    def __mul__(self, other: Number | int) -> Number:
        return self._emit("mul", self, other, flags=("nsw",))

    __rmul__ = __mul__

    def __floordiv__(self, other: Number | int) -> Number:
        return self._emit("udiv", self, other)

    def __mod__(self, other: Number | int) -> Number:
        return self._emit("urem", self, other)

    def __xor__(self, other: Number | int) -> Number:
        return self._emit("xor", self, other)

    def __and__(self, other: Number | int) -> Number:
        return self._emit("and_", self, other)

    def __rshift__(self, other: Number | int) -> Number:
        return self._emit("ashr", self, other)

    def __lshift__(self, other: Number | int) -> Number:
        return self._emit("shl", self, other)

    def __lt__(self, other: Number | int) -> Number:
        """1 or 0."""
        is_less = self._emit("icmp_signed", "<", self, other)
        return Number(self.builder, None if self.builder is None else self.builder.zext(is_less.value, i32))

    def _emit(self, instruction: str, *operands: Number | int | str, **flags: object) -> Number:
        if self.builder is None:
            return self
        values = [x if isinstance(x, str) else _value(x) for x in operands]
        return Number(self.builder, getattr(self.builder, instruction)(*values, **flags))

    def __repr__(self) -> str:
        return "a run-time number"


def _value(number: Number | int) -> Any:
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

    def of(self, context: Context, builder: ir.IRBuilder, value: ir.Value) -> Any:
        """The object of an LLVM value."""
        # by memory, from which LLVM takes structs apart as it does Numba's: of chains of `insertvalue` it hoists less
        fields = nb.cgutils.create_struct_proxy(self)(context, builder, value=value)
        numbers = tuple(Number(builder, getattr(fields, f"n{n}")) for n in range(self.count))
        return self.cls.__of_parts__(self.static, numbers)

    def known_attribute(self, name: str) -> Any:
        """What is known before types are inferred (:mod:`gemmkit.lang.passes`)."""
        try:
            return _known(getattr(self.example, name))
        except AttributeError:
            raise UnknownValue from None

    def known_item(self, n: int) -> Any:
        return _known(self.example[n])


def _known(value: Any) -> Any:
    if isinstance(value, Aggregate):
        return KnownType(type_of(value))
    if type(value) is int:
        return value
    raise UnknownValue


nb.kept_as(AggregateType, lambda ty: [(f"n{n}", index) for n in range(ty.count)])


@nb.lowering_registry.lower_constant(AggregateType)
def _constant(context: Context, builder: ir.IRBuilder, ty: AggregateType, value: object) -> Any:
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


def _lowered(context: Context, builder: ir.IRBuilder, value: Aggregate | Number | int) -> Any:
    if not isinstance(value, Aggregate):
        return _value(value)
    out = nb.cgutils.create_struct_proxy(type_of(value))(context, builder)
    for n, number in enumerate(value.__parts__()[1]):
        setattr(out, f"n{n}", _value(number))
    return out._getvalue()


class _NotOurs(Exception):
    """An argument that is no aggregate, no whole number and no word."""


def _given(context: Any, builder: ir.IRBuilder | None, ty: types.Type, value: ir.Value | None) -> Any:
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
    def call(context: Any, builder: ir.IRBuilder | None, values: Values, names: Sequence[str]) -> Any:
        given = [_given(context, builder, ty, value) for ty, value in zip(args, values)]
        positional = len(given) - len(names)
        return function(*given[:positional], **dict(zip(names, given[positional:])))

    def codegen(context: Context, builder: ir.IRBuilder, sig: Signature, values: Values) -> Any:
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
        raise nb.TypingError(str(error)) from None
    return None if result is None else (signature(result, *args), codegen)


def _takes_names(function: Callable[..., Any]) -> bool:
    code = getattr(function, "__code__", None)                # asked at each call in device code: a signature takes 30 us
    if code is None or hasattr(function, "__wrapped__"):
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    return bool(code.co_flags & inspect.CO_VARKEYWORDS)


def traced(name: str, function: F) -> F:
    """A function of aggregates and whole numbers as device code: its own text. What it returns is an aggregate, or a
    coordinate."""
    def typer(context: TypingContext, *args: types.Type) -> Any:
        return _traced(function, args, literal=False)

    def typer_by_name(context: TypingContext, *args: types.Type, **by: types.Type) -> Any:
        return _traced(function, (*args, *by.values()), by, literal=False)

    return cast(F, nb.Atom(name, typer_by_name if _takes_names(function) else typer, function))


# -- attributes, items, lengths ---------------------------------------------------------------------------------------

@nb.attributes_of(AggregateType)
def _attribute_type(ty: AggregateType, attr: str) -> Any:
    if attr.startswith("_"):
        return None
    try:
        return type_of(getattr(ty.example, attr))
    except AttributeError as error:
        raise nb.TypingError(str(error)) from None


@nb.lowering_registry.lower_getattr_generic(AggregateType)
def _getattr(context: Context, builder: ir.IRBuilder, ty: AggregateType, value: ir.Value, attr: str) -> Any:
    return _lowered(context, builder, getattr(ty.of(context, builder, value), attr))


@operation(operator.getitem)
def _getitem(context: TypingContext, *args: types.Type) -> Any:
    return _traced(operator.getitem, args) if len(args) == 2 and isinstance(args[0], AggregateType) else None


@operation(len)
def _len(context: TypingContext, *args: types.Type) -> Any:      # not `len`, which would have a number of Python's
    return _traced(lambda x: x.__len__(), args) if len(args) == 1 and isinstance(args[0], AggregateType) else None


# --------------------------------------------------------------------------------------------------
# Tuples in device code: their length, values, copies, what is found in them.

@operation(operator.getitem)
def _tuple_item(context: TypingContext, *args: types.Type) -> Any:
    """``values[n]`` of any tuple with a compile-time number: no run-time switch, and the parts may differ in type."""
    if len(args) != 2 or not isinstance(args[0], types.BaseTuple) or not isinstance(args[1], WeakIntLiteral):
        return None
    count, n = len(args[0].types), args[1].literal_value
    if not -count <= n < count:
        return None
    return signature(args[0].types[n], *args), lambda c, b, s, v: b.extract_value(v[0], n % count)


@operation(len)
def _tuple_length(context: TypingContext, *args: types.Type) -> Any:
    """``len`` of a tuple, or of a word, is a literal, as in Python."""
    if len(args) != 1 or not isinstance(args[0], (types.BaseTuple, types.StringLiteral)) or not nb.compiles_ours():
        return None
    of = args[0]
    result = WeakIntLiteral(len(of.types if isinstance(of, types.BaseTuple) else of.literal_value))
    return signature(result, args[0]), lambda c, b, s, v: c.get_constant_generic(b, result, result.literal_value)


@operation(operator.not_)
def _is_empty(context: TypingContext, *args: types.Type) -> Any:
    if len(args) != 1 or not isinstance(args[0], types.BaseTuple) or not nb.compiles_ours():
        return None
    answer = not args[0].types
    return signature(types.boolean, args[0]), lambda c, b, s, v: ir.Constant(i1, answer)


def _repeated(context: TypingContext, *args: types.Type) -> Any:
    """``(x,) * 4``: as many as a literal says, on either side."""
    at = 0 if args and isinstance(args[0], types.BaseTuple) else 1
    if len(args) != 2 or not isinstance(args[at], types.BaseTuple) or not nb.compiles_ours():
        return None
    if not isinstance(args[1 - at], WeakIntLiteral):
        raise TypeError(f"a tuple times {args[1 - at]}: its length is part of its type; multiply it by a literal")
    times, count = max(args[1 - at].literal_value, 0), len(args[at].types)
    result = types.BaseTuple.from_types(tuple(args[at].types) * times)
    return signature(result, *args), lambda c, builder, s, v: (
        c.make_tuple(builder, result, nb.cgutils.unpack_tuple(builder, v[at], count) * times))


for _op in (operator.mul, operator.imul):
    operation(_op)(_repeated)


# -- what is found in them --------------------------------------------------------------------------------------------

def _equals(context: TypingContext, values: types.BaseTuple, wanted: types.Type) -> Any:
    """Code for whether each value is a number that is looked for; None where one cannot be compared."""
    steps = []
    for ty in values.types:
        step = of_two(context, operator.eq, ty, wanted)
        if step is None:
            sig = context.resolve_function_type(operator.eq, (ty, wanted), {})
            if sig is None:
                return None
            step = sig, lambda c, b, s, v: c.get_function(c.typing_context.resolve_value_type(operator.eq), s)(b, v)
        steps.append((ty, *step))

    def code(c: Context, builder: ir.IRBuilder, given: ir.Value, number: ir.Value) -> list:
        out = []
        for n, (ty, sig, emit) in enumerate(steps):
            pair = [c.cast(builder, x, t, to) for x, t, to in zip(
                (builder.extract_value(given, n), number), (ty, wanted), sig.args)]
            out.append(c.cast(builder, emit(c, builder, sig, pair), sig.return_type, types.boolean))
        return out

    return code


@operation(operator.contains)
def _contains(context: TypingContext, *args: types.Type) -> Any:
    """``x in t`` of numbers of several types."""
    if len(args) != 2 or not isinstance(args[0], types.Tuple) or not args[0].types or not nb.compiles_ours():
        return None
    if any(isinstance(t, types.BaseTuple) for t in (*args[0].types, args[1])):
        return None
    code = _equals(context, *args)
    if code is None:
        return None

    def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out = ir.Constant(i1, False)
        for same in code(c, builder, *v):
            out = builder.or_(out, same)
        return out

    return signature(types.boolean, *args), codegen


class _Method(nb.AbstractTemplate):
    """``t.count(x)`` and ``t.index(x)``: coordinates."""

    metadata: ClassVar[dict[str, str]] = {"target": "cuda"}       # before Numba's own, which are for any target

    def generic(self, args: tuple, kws: dict) -> Any:
        if kws or len(args) != 1 or _equals(self.context, self.this, args[0]) is None:
            raise TypeError(f"{self.key} takes one number, which the tuple's values can be compared with")
        return signature(index, *args, recvr=self.this)


class _Count(_Method):
    key = "gemmkit tuple.count"


class _Index(_Method):
    key = "gemmkit tuple.index"


@nb.attributes_of(types.BaseTuple)
def _methods(ty: types.Type, attr: str) -> Any:
    if attr not in ("count", "index") or not nb.compiles_ours() or attr in getattr(ty, "fields", ()):
        return None
    return types.BoundFunction(_Count if attr == "count" else _Index, ty)


@nb.lowering_registry.lower("gemmkit tuple.count", types.BaseTuple, types.Any)
def _count(context: Context, builder: ir.IRBuilder, sig: Signature, args: Values) -> Any:
    same = _equals(context.typing_context, *sig.args)(context, builder, *args)
    out = i32(0)
    for one in same:
        out = builder.add(out, builder.zext(one, i32))
    return out


@nb.lowering_registry.lower("gemmkit tuple.index", types.BaseTuple, types.Any)
def _index(context: Context, builder: ir.IRBuilder, sig: Signature, args: Values) -> Any:
    """The first, and 0 where there is none: Python raises there."""
    same = _equals(context.typing_context, *sig.args)(context, builder, *args)
    out = i32(0)
    for n, one in reversed(list(enumerate(same))):
        out = builder.select(one, i32(n), out)
    return out


# --------------------------------------------------------------------------------------------------
# Compile-time values: how a Python object that does not change becomes a constant of device code.
#
# ``static_type(value)`` is the Numba type that carries the value itself: numbers become weak constants, dtypes become
# conversions (``self.dtype(x)``), and any object with ``__device_type__()`` says its own (tiles, components, device
# functions).

def static_type(value: Any) -> types.Type:
    """The type that carries a compile-time value; raises TypeError for what has none."""
    made: types.Type = static_maker(value)()
    return made


def static_maker(value: Any) -> Callable[[], types.Type]:
    """What makes the type that carries a compile-time value; raises TypeError for what has none."""
    own = getattr(value, "__device_type__", None)
    if own is not None and not isinstance(value, type):
        return own
    if isinstance(value, bool):
        return lambda: types.literal(value)
    if isinstance(value, (int, float, complex)) and not isinstance(value, np.generic):
        return lambda: types.literal(weaken(value))
    if isinstance(value, np.dtype):
        return _dtype_maker(value)
    if isinstance(value, nb.Atom):
        return lambda: value.device_type
    if isinstance(value, str):
        return lambda: types.literal(value)
    if value is None:
        return lambda: types.none
    if isinstance(value, np.generic):
        dtype = device_dtype(value.dtype)
        return lambda: numba_type(dtype)
    if isinstance(value, tuple):
        makers = [static_maker(v) for v in value]
        return lambda: types.BaseTuple.from_types([make() for make in makers])
    if isinstance(value, type) and issubclass(value, np.generic):
        return _dtype_maker(np.dtype(value))
    raise TypeError(f"{value!r} ({type(value).__name__}) cannot be a compile-time value of device code")


def _dtype_maker(dtype: np.dtype) -> Callable[[], types.Type]:
    found = device_dtype(dtype)
    return lambda: DTypeType(numba_type(found))


def static_value(context: Context, builder: ir.IRBuilder, ty: types.Type, value: Any) -> Any:
    """The LLVM constant of a compile-time value."""
    if isinstance(value, type) and issubclass(value, np.generic):
        value = np.dtype(value)
    if isinstance(ty, types.BaseTuple):
        return context.make_tuple(builder, ty, [static_value(context, builder, t, v) for t, v in zip(ty, value)])
    if isinstance(ty, (types.BooleanLiteral, types.NoneType)):
        return context.get_dummy_value() if value is None else context.get_constant(types.boolean, value)
    return context.get_constant_generic(builder, ty, value)


def _type_convert(context: TypingContext, dtype: types.Type, value: types.Type) -> Any:
    if not isinstance(dtype, DTypeType):
        return None
    return signature(dtype.target, dtype, value), lambda c, b, s, v: c.cast(b, v[1], value, dtype.target)


@atom(_type_convert)
def convert(dtype: np.dtype, value: Any) -> Any:
    """``value`` as a scalar of ``dtype``: what ``dtype.type(value)`` is in NumPy."""
    if type(value) is dtype.type or (type(value) is Record and value.dtype is dtype):
        return value
    if dtype.names is not None or type(value) in (Record, tuple):
        return to_dtype(dtype, value)
    if value.__class__ is int and value == 0:                # of what lies beyond an edge, and where sums begin
        return dtype.type(0)
    if isinstance(value, _FLOATS) and dtype.char in "efd" and (
            1e-4 < abs(value) < 6e4 or value == 0 or abs(value) == np.inf or value != value):
        return dtype.type(value)
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(dtype)[()]


#: No conversion warns of what float16 holds, too, nor of infinities and NaN. NumPy need not be told to be silent there: that
#: takes longer than to convert.
_FLOATS: Any = (np.float32, float, np.float16)


def _type_convert_all(context: TypingContext, dtype: types.Type, values: types.Type) -> Any:
    if not isinstance(dtype, DTypeType) or not isinstance(values, types.BaseTuple):
        return None
    result = types.UniTuple(dtype.target, len(values.types))

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        parts = [c.cast(b, b.extract_value(v[1], n), t, dtype.target) for n, t in enumerate(values.types)]
        return c.make_tuple(b, result, parts)

    return signature(result, dtype, values), codegen


@atom(_type_convert_all)
def convert_all(dtype: np.dtype, values: tuple) -> tuple:
    """Every element of a tuple as a scalar of ``dtype``."""
    kind = dtype.type
    for value in values:
        if type(value) is not kind:
            break
    else:
        return values
    if dtype.names is None and len(values) > 4 and is_of_one_type(values):
        with np.errstate(all="ignore"):
            return tuple(np.array(values).astype(dtype))
    return tuple([convert(dtype, value) for value in values])


def _type_fill(context: TypingContext, dtype: types.Type, count: types.Type, value: types.Type) -> Any:
    named = dtype_type(dtype)
    if named is None or not isinstance(count, types.IntegerLiteral):
        return None
    result = types.UniTuple(named.target, int(count.literal_value))
    return signature(result, dtype, count, value), lambda c, b, s, v: (
        c.make_tuple(b, result, [c.cast(b, v[2], value, named.target)] * result.count))


@atom(_type_fill)
def fill(dtype: np.dtype | type, count: int, value: Any) -> tuple:
    """``count`` times one value, as ``dtype``."""
    return (convert(np.dtype(dtype), value),) * count
