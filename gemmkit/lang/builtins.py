"""``max``, ``int``, ``round``, ``divmod``, ``math.exp``, ... in device code, by the rules of `number_rules`.

The emulator's are in `gemmkit.emulator.functions`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.lang import numba_hooks as nb
from gemmkit.lang import number_rules
from gemmkit.lang.arithmetic import of_two
from gemmkit.lang.complex import kind_of
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, ir, operation, signature, types
from gemmkit.lang.number_rules import Weak
from gemmkit.lang.scalars import (
    IndexType,
    NarrowFloatType,
    WeakFloat64Type,
    WeakFloatLiteral,
    WeakIntLiteral,
    index,
    kind_of_type,
    number_constant,
    type_of_kind,
    wide_index,
)

_OURS = (IndexType, NarrowFloatType, WeakFloat64Type, WeakFloatLiteral, WeakIntLiteral)


def _kinds(context: TypingContext, args: tuple) -> list | None:
    """The kinds of a call's arguments; None where Numba's rules are to hold, or one is no number."""
    kinds = [kind_of_type(a) for a in args]
    if any(kind is None for kind in kinds) or not (nb.compiles_ours() or any(isinstance(a, _OURS) for a in args)):
        return None
    return kinds


def _call(context: Context, builder: ir.IRBuilder, key: Callable, sig: Signature, given: Values, values: Values) -> Any:
    """Call what Numba has under ``key``, with values of the types ``given``."""
    values = [context.cast(builder, v, t, to) for v, t, to in zip(values, given, sig.args)]
    return context.get_function(context.typing_context.resolve_value_type(key), sig)(builder, values)


def _folded_up(context: TypingContext, op: Callable, given: tuple) -> Any:
    """``((a op b) op c) op ...`` of numbers: its type, and code for their values; None for what is not ours."""
    steps, first = [], given[0]
    for other in given[1:]:
        step = of_two(context, op, first, other)
        if step is None:                                       # Numba's own
            inner = context.resolve_function_type(op, (first, other), {})
            if inner is None:
                return None
            step = inner, _of_numba(op)
        steps.append((first, other, step))
        first = step[0].return_type

    def code(c: Context, builder: ir.IRBuilder, values: Values) -> Any:
        out = values[0]
        for (left, right, (sig, emit)), value in zip(steps, values[1:]):
            given = [c.cast(builder, x, t, to) for x, t, to in zip((out, value), (left, right), sig.args)]
            out = emit(c, builder, sig, given)
        return out

    return first, code


# -- max and min ------------------------------------------------------------------------------------------------------

def _register_extremum(key: Callable) -> None:
    @operation(key)
    def typer(context: TypingContext, *args: types.Type) -> Any:
        is_tuple = len(args) == 1 and isinstance(args[0], types.BaseTuple)
        given = tuple(args[0].types) if is_tuple else args
        if len(args) == 1 and nb.compiles_ours() and not (is_tuple and given):
            raise TypeError(f"{key.__name__} of one argument: device code takes two numbers or more")
        if len(given) < 1 + (not is_tuple) or _kinds(context, given) is None:
            return None
        if len(args) == 2:
            return of_two(context, key, *args)
        folded = _folded_up(context, key, given)
        if folded is None:
            return None
        result, code = folded
        return signature(result, *args), lambda c, builder, s, v: (
            code(c, builder, nb.cgutils.unpack_tuple(builder, v[0], len(given)) if is_tuple else v))


for _key in (max, min):
    _register_extremum(_key)


@operation(sum)
def _sum(context: TypingContext, *args: types.Type) -> Any:
    """Of a tuple's numbers, from 0 or from another number on."""
    if not 1 <= len(args) <= 2 or not isinstance(args[0], types.BaseTuple):
        return None
    count, start = len(args[0].types), args[1] if len(args) == 2 else WeakIntLiteral(0)
    given = (start, *args[0].types)
    if any(kind_of(t) is None for t in given) or not (nb.compiles_ours() or any(isinstance(t, _OURS) for t in given)):
        return None
    folded = _folded_up(context, operator.add, given)
    if folded is None:
        return None
    result, code = folded

    def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        first = v[1] if len(v) == 2 else c.get_constant_generic(builder, start, 0)
        return code(c, builder, [first, *nb.cgutils.unpack_tuple(builder, v[0], count)])

    return signature(result, *args), codegen


# -- conversions ------------------------------------------------------------------------------------------------------

def _register_conversion(key: Callable) -> None:
    name = key.__name__

    @operation(key)
    def typer(context: TypingContext, *args: types.Type) -> Any:
        kinds = _kinds(context, args)
        if kinds is None or len(args) != 1:
            return None
        kind, given = number_rules.converted(name, kinds[0]), args[0]
        result = type_of_kind(kind)
        if kind is kinds[0] or (name == "round" and kind == kinds[0]):
            return signature(given, given), lambda c, b, s, v: v[0]
        if isinstance(given, WeakFloatLiteral) and kind == number_rules.INT64:
            number = key(given.literal_value)
            return signature(result, given), lambda c, b, s, v: number_constant(c, b, result, number)
        if name == "round":
            return _rounded(context, given, result)
        if name == "bool" and isinstance(given, (types.Integer, types.Float)) and not isinstance(given, types.Literal):
            return signature(result, given), _is_not_zero      # Numba's cast to a boolean asks for this very function
        return signature(result, given), lambda c, b, s, v: c.cast(b, v[0], given, result)


def _is_not_zero(context: Context, builder: ir.IRBuilder, sig: Signature, values: Values) -> Any:
    (value,) = values
    zero = ir.Constant(value.type, 0)
    return builder.icmp_unsigned("!=", value, zero) if isinstance(sig.args[0], types.Integer) \
        else builder.fcmp_unordered("!=", value, zero)


def _rounded(context: TypingContext, given: types.Type, result: types.Type) -> Any:
    wide = {WeakFloat64Type: types.float64, NarrowFloatType: types.float32}.get(type(given), given)
    if wide == given:
        return None                                            # Numba's own: int64, halves to even
    inner = context.resolve_function_type(round, (wide,), {})
    if inner is None or inner.return_type != result:
        return None
    return signature(result, given), lambda c, b, s, v: _call(c, b, round, inner, (given,), v)


for _conversion in (int, float, bool, round):
    _register_conversion(_conversion)


@operation(round)
def _round_to_digits(context: TypingContext, *args: types.Type) -> Any:
    if len(args) == 2 and _kinds(context, args) is not None:
        raise TypeError("round(x, digits) has no rule in device code; scale, round and scale back")
    return None


@operation(divmod)
def _divmod(context: TypingContext, *args: types.Type) -> Any:
    if len(args) != 2 or _kinds(context, args) is None:
        return None
    steps = []
    for op in (operator.floordiv, operator.mod):
        inner = of_two(context, op, *args)
        if inner is None:                                      # two floats of one type
            sig = context.resolve_function_type(op, args, {})
            inner = sig, _of_numba(op)
        steps.append(inner)
    result = types.BaseTuple.from_types([sig.return_type for sig, _ in steps])

    def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out = []
        for sig, code in steps:
            given = [c.cast(builder, x, t, to) for x, t, to in zip(v, args, sig.args)]
            out.append(code(c, builder, sig, given))
        return c.make_tuple(builder, result, out)

    return signature(result, *args), codegen


def _of_numba(op: Callable) -> Any:
    return lambda c, builder, sig, values: c.get_function(c.typing_context.resolve_value_type(op), sig)(builder, values)


@operation(pow)
def _pow(context: TypingContext, *args: types.Type) -> Any:
    if len(args) != 2 or _kinds(context, args) is None:
        return None
    return of_two(context, operator.pow, *args)


# -- math -------------------------------------------------------------------------------------------------------------

def _register_math(name: str, count: int) -> None:
    key = getattr(math, name)

    @operation(key)
    def typer(context: TypingContext, *args: types.Type) -> Any:
        kinds = _kinds(context, args)
        if kinds is None or len(args) != count:
            return None
        kind = number_rules.of_math(name, *kinds)
        if name in number_rules.MATH_TO_WHOLE and number_rules.is_integer(kind):
            return signature(args[0], args[0]), lambda c, b, s, v: v[0]
        if kind is Weak.FLOAT and all(isinstance(a, (WeakIntLiteral, WeakFloatLiteral)) for a in args):
            return _folded(name, args)
        given = number_rules.of_math("fabs", *kinds)           # what it is computed in
        compute = types.float64 if given is Weak.FLOAT else type_of_kind(given)
        if all(a == compute for a in args):
            return None                                        # Numba's own
        inner = context.resolve_function_type(key, (compute,) * count, {})
        if inner is None:
            return None
        result = type_of_kind(kind)

        def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
            values = [c.cast(builder, x, t, compute) for x, t in zip(v, s.args)]
            out = _call(c, builder, key, inner, (compute,) * count, values)
            return c.cast(builder, out, inner.return_type, result)

        return signature(result, *args), codegen


def _folded(name: str, args: tuple) -> Any:
    """Of literals: a literal."""
    with np.errstate(all="ignore"):
        value = float(number_rules.computed(name)(*[np.float64(a.literal_value) for a in args]))
    result = WeakFloatLiteral(value)
    return signature(result, *args), lambda c, b, s, v: c.get_constant_generic(b, result, value)


for _name in (*number_rules.MATH_OF_ONE, *number_rules.MATH_TO_WHOLE, *number_rules.MATH_TESTS):
    _register_math(_name, 1)
for _name in number_rules.MATH_OF_TWO:
    _register_math(_name, 2)


# --------------------------------------------------------------------------------------------------
# ``range`` over coordinates: as wide as they are, so that what is computed from the loop variable stays so. And
# ``enumerate``, whose numbers are coordinates.

class IndexRangeType(types.SimpleIterableType):
    def __init__(self, of: IndexType) -> None:
        self.of = of
        super().__init__("index_range" if of == index else "wide_index_range", IndexRangeIteratorType(of))


class IndexRangeIteratorType(types.SimpleIteratorType):
    def __init__(self, of: IndexType) -> None:
        self.of = of
        super().__init__("index_range_iterator" if of == index else "wide_index_range_iterator", of)


nb.kept_as(IndexRangeType, lambda ty: [(name, ty.of) for name in ("start", "stop", "step")])
nb.kept_as(IndexRangeIteratorType,
           lambda ty: [("current", types.EphemeralPointer(ty.of)), ("stop", ty.of), ("step", ty.of)])


@operation(range)
def _range(context: TypingContext, *args: types.Type) -> Any:
    if not 1 <= len(args) <= 3:
        return None
    if not all(isinstance(a, (IndexType, types.IntegerLiteral)) for a in args):
        return _of_integers(context, args) if nb.compiles_ours() else None
    if not any(isinstance(a, (IndexType, WeakIntLiteral)) for a in args):
        return None
    of = wide_index if wide_index in args else index
    width = ir.IntType(of.bitwidth)

    def codegen(context: Context, builder: ir.IRBuilder, sig: Signature, values: Values) -> Any:
        state = nb.cgutils.create_struct_proxy(sig.return_type)(context, builder)
        values = list(values)
        state.start = width(0) if len(values) == 1 else values.pop(0)
        state.stop = values.pop(0)
        state.step = values.pop(0) if values else width(1)
        return state._getvalue()

    return signature(IndexRangeType(of), *([of] * len(args))), codegen


def _of_integers(context: TypingContext, args: tuple) -> Any:
    """Where NumPy's integers are among the limits: Numba's own range, of the type that the rules say."""
    kinds = [kind_of_type(a) for a in args]
    if any(kind is None for kind in kinds):
        return None
    ty = type_of_kind(number_rules.of_range(*kinds))
    if all(a == ty for a in args):
        return None
    inner = context.resolve_function_type(range, (ty,) * len(args), {})

    def codegen(c: Context, builder: ir.IRBuilder, sig: Signature, values: Values) -> Any:
        given = [c.cast(builder, v, t, ty) for v, t in zip(values, sig.args)]
        return c.get_function(context.resolve_value_type(range), inner)(builder, given)

    return signature(inner.return_type, *args), codegen


@nb.lowering_registry.lower("getiter", IndexRangeType)
def _getiter(context: Context, builder: ir.IRBuilder, sig: Signature, args: Values) -> Any:
    state = nb.cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0])
    iterator = nb.cgutils.create_struct_proxy(sig.return_type)(context, builder)
    iterator.current = nb.cgutils.alloca_once_value(builder, state.start)
    builder.store(state.start, iterator.current)
    iterator.stop, iterator.step = state.stop, state.step
    return iterator._getvalue()


@nb.lowering_registry.lower("iternext", IndexRangeIteratorType)
@nb.iternext_impl(nb.RefType.UNTRACKED)
def _iternext(context: Context, builder: ir.IRBuilder, sig: Signature, args: Values, result: ir.Value) -> None:
    iterator = nb.cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0])
    current = builder.load(iterator.current)
    upwards = builder.icmp_signed(">", iterator.step, iterator.step.type(0))
    valid = builder.select(upwards, builder.icmp_signed("<", current, iterator.stop),
                           builder.icmp_signed(">", current, iterator.stop))
    result.set_valid(valid)
    with builder.if_then(valid):
        result.yield_(current)
        builder.store(builder.add(current, iterator.step, flags=("nsw",)), iterator.current)


# -- enumerate --------------------------------------------------------------------------------------------------------

class IndexEnumerateType(types.SimpleIteratorType):
    """What Numba's ``enumerate`` is, with a coordinate in place of an int64."""

    def __init__(self, of: types.Type) -> None:
        self.of = of
        super().__init__(f"index_enumerate({of})", types.BaseTuple.from_types((index, of.yield_type)))


nb.kept_as(IndexEnumerateType, lambda ty: [("count", types.EphemeralPointer(index)), ("iterator", ty.of)])


@operation(enumerate)
def _enumerate(context: TypingContext, *args: types.Type) -> Any:
    if not 1 <= len(args) <= 2 or not isinstance(args[0], types.IterableType):
        return None
    if len(args) == 2 and not isinstance(args[1], (IndexType, WeakIntLiteral)):
        return None

    def codegen(context: Context, builder: ir.IRBuilder, sig: Signature, values: Values) -> Any:
        state = nb.cgutils.create_struct_proxy(sig.return_type)(context, builder)
        start = context.cast(builder, values[1], args[1], index) if len(values) == 2 else ir.IntType(32)(0)
        state.count = nb.cgutils.alloca_once_value(builder, start)
        builder.store(start, state.count)
        getiter = context.get_function("getiter", signature(sig.return_type.of, args[0]))
        state.iterator = getiter(builder, (values[0],))
        return state._getvalue()

    return signature(IndexEnumerateType(args[0].iterator_type), *args), codegen


@nb.lowering_registry.lower("iternext", IndexEnumerateType)
@nb.iternext_impl(nb.RefType.UNTRACKED)
def _next_of_enumerate(context: Context, builder: ir.IRBuilder, sig: Signature, args: Values, result: ir.Value) -> None:
    of = sig.args[0].of
    state = nb.cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0])
    count = builder.load(state.count)
    following = nb.call_iternext(context, builder, of, state.iterator)
    valid = following.is_valid()
    result.set_valid(valid)
    with builder.if_then(valid):
        result.yield_(context.make_tuple(builder, sig.args[0].yield_type, [count, following.yielded_value()]))
        builder.store(builder.add(count, count.type(1), flags=("nsw",)), state.count)
