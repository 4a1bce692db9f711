"""``max``, ``int``, ``round``, ``divmod``, ``math.exp``, ... in device code, by the rules of `number_rules`.

The emulator's are in `gemmkit.emulator.functions`.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from gemmkit.lang import number_rules
from gemmkit.lang.arithmetic import of_two
from gemmkit.lang.complex_scalars import kind_of
from gemmkit.lang.numba_hooks import cgutils, compiles_ours, ir, operation, signature, types
from gemmkit.lang.number_rules import Weak
from gemmkit.lang.number_types import kind_of_type, type_of_kind
from gemmkit.lang.scalars import (
    IndexType,
    NarrowFloatType,
    WeakFloat64Type,
    WeakFloatLiteral,
    WeakIntLiteral,
    number_constant,
)

_OURS = (IndexType, NarrowFloatType, WeakFloat64Type, WeakFloatLiteral, WeakIntLiteral)


def _kinds(context: Any, args: tuple) -> list | None:
    """The kinds of a call's arguments; None where Numba's rules are to hold, or one is no number."""
    kinds = [kind_of_type(a) for a in args]
    if any(kind is None for kind in kinds) or not (compiles_ours() or any(isinstance(a, _OURS) for a in args)):
        return None
    return kinds


def _call(context: Any, builder: Any, key: Any, sig: Any, given: Any, values: Any) -> Any:
    """Call what Numba has under ``key``, with values of the types ``given``."""
    values = [context.cast(builder, v, t, to) for v, t, to in zip(values, given, sig.args)]
    return context.get_function(context.typing_context.resolve_value_type(key), sig)(builder, values)


def _folded_up(context: Any, op: Any, given: tuple) -> Any:
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

    def code(c: Any, builder: Any, values: Any) -> Any:
        out = values[0]
        for (left, right, (sig, emit)), value in zip(steps, values[1:]):
            given = [c.cast(builder, x, t, to) for x, t, to in zip((out, value), (left, right), sig.args)]
            out = emit(c, builder, sig, given)
        return out

    return first, code


# -- max and min ------------------------------------------------------------------------------------------------------

def _register_extremum(key: Any) -> None:
    @operation(key)
    def typer(context: Any, *args: Any) -> Any:
        is_tuple = len(args) == 1 and isinstance(args[0], types.BaseTuple)
        given = tuple(args[0].types) if is_tuple else args
        if len(args) == 1 and compiles_ours() and not (is_tuple and given):
            raise TypeError(f"{key.__name__} of one argument: device code takes two numbers or more")
        if len(given) < 1 + (not is_tuple) or _kinds(context, given) is None:
            return None
        if len(args) == 2:
            return of_two(context, key, *args)
        folded = _folded_up(context, key, given)
        if folded is None:
            return None
        result, code = folded

        def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
            return code(c, builder, cgutils.unpack_tuple(builder, v[0], len(given)) if is_tuple else v)

        return signature(result, *args), codegen


for _key in (max, min):
    _register_extremum(_key)


@operation(sum)
def _sum(context: Any, *args: Any) -> Any:
    """Of a tuple's numbers, from 0 or from another number on."""
    if not 1 <= len(args) <= 2 or not isinstance(args[0], types.BaseTuple):
        return None
    count, start = len(args[0].types), args[1] if len(args) == 2 else WeakIntLiteral(0)
    given = (start, *args[0].types)
    if any(kind_of(t) is None for t in given) or not (compiles_ours() or any(isinstance(t, _OURS) for t in given)):
        return None
    folded = _folded_up(context, operator.add, given)
    if folded is None:
        return None
    result, code = folded

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
        first = v[1] if len(v) == 2 else c.get_constant_generic(builder, start, 0)
        return code(c, builder, [first, *cgutils.unpack_tuple(builder, v[0], count)])

    return signature(result, *args), codegen


# -- conversions ------------------------------------------------------------------------------------------------------

def _register_conversion(key: Any) -> None:
    name = key.__name__

    @operation(key)
    def typer(context: Any, *args: Any) -> Any:
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


def _is_not_zero(context: Any, builder: Any, sig: Any, values: Any) -> Any:
    (value,) = values
    zero = ir.Constant(value.type, 0)
    return builder.icmp_unsigned("!=", value, zero) if isinstance(sig.args[0], types.Integer) \
        else builder.fcmp_unordered("!=", value, zero)


def _rounded(context: Any, given: Any, result: Any) -> Any:
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
def _round_to_digits(context: Any, *args: Any) -> Any:
    if len(args) == 2 and _kinds(context, args) is not None:
        raise TypeError("round(x, digits) has no rule in device code; scale, round and scale back")
    return None


@operation(divmod)
def _divmod(context: Any, *args: Any) -> Any:
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

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
        out = []
        for sig, code in steps:
            given = [c.cast(builder, x, t, to) for x, t, to in zip(v, args, sig.args)]
            out.append(code(c, builder, sig, given))
        return c.make_tuple(builder, result, out)

    return signature(result, *args), codegen


def _of_numba(op: Any) -> Any:
    return lambda c, builder, sig, values: c.get_function(c.typing_context.resolve_value_type(op), sig)(builder, values)


@operation(pow)
def _pow(context: Any, *args: Any) -> Any:
    if len(args) != 2 or _kinds(context, args) is None:
        return None
    return of_two(context, operator.pow, *args)


# -- math -------------------------------------------------------------------------------------------------------------

def _register_math(name: str, count: int) -> None:
    key = getattr(math, name)

    @operation(key)
    def typer(context: Any, *args: Any) -> Any:
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

        def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
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
