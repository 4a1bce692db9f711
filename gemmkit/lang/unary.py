"""Arithmetic of one number in device code: its negative, its complement, its absolute value."""

from __future__ import annotations

import operator
from typing import Any

from gemmkit.lang import number_rules
from gemmkit.lang.numba_hooks import compiles_ours, ir, operation, signature, types
from gemmkit.lang.number_types import kind_of_type
from gemmkit.lang.scalars import IndexType, NarrowFloatType, WeakFloat64Type, WeakFloatLiteral, WeakIntLiteral

_UNARY = {operator.neg: "neg", operator.pos: "pos", operator.invert: "invert", abs: "abs"}


def _register_unary(op: Any) -> None:
    name = _UNARY[op]

    @operation(op)
    def typer(context: Any, *args: Any) -> Any:
        if len(args) != 1:
            return None
        (a,) = args
        kind = kind_of_type(a)
        if kind is None:
            return None
        if isinstance(a, (WeakIntLiteral, WeakFloatLiteral)):
            value = op(a.literal_value)
            result = WeakIntLiteral(value) if isinstance(value, int) else WeakFloatLiteral(value)
            return signature(result, a), lambda c, b, s, v: c.get_constant_generic(b, result, value)
        if not isinstance(a, (IndexType, NarrowFloatType, WeakFloat64Type)) and not compiles_ours():
            return None
        number_rules.unary(name, kind)
        if isinstance(a, NarrowFloatType):
            return signature(a, a), lambda c, b, s, v: _narrow_unary(op, b, v[0], a.bits, a.bitwidth)
        if isinstance(a, WeakFloat64Type):
            inner = context.resolve_function_type(op, (types.float64,), {})
            return signature(a, a), lambda c, b, s, v: c.get_function(context.resolve_value_type(op), inner)(b, v)
        if isinstance(a, (types.Integer, types.Boolean)):
            ty = types.unliteral(a)
            signed, coordinate = isinstance(ty, types.Integer) and ty.signed, isinstance(a, IndexType)
            return signature(ty, ty), lambda c, b, s, v: _integer_unary(op, b, v[0], signed, coordinate)
        return None


def _integer_unary(op: Any, builder: Any, value: Any, signed: bool, coordinate: bool) -> Any:
    if op is operator.invert:
        return builder.not_(value)
    if op is operator.pos or (op is abs and not signed):
        return value
    negative = builder.neg(value)
    if op is operator.neg:
        return negative
    if not coordinate:
        from gemmkit.lang.conversions import absolute

        return absolute(builder, value)
    return builder.select(builder.icmp_signed("<", value, ir.Constant(value.type, 0)), negative, value)


def _narrow_unary(op: Any, builder: Any, value: Any, bits: Any, width: int) -> Any:
    sign = 1 << (width - 1)
    if op is operator.neg:
        return builder.xor(value, ir.Constant(bits, sign))
    if op is operator.pos:
        return value
    return builder.and_(value, ir.Constant(bits, sign - 1))


for _op in _UNARY:
    _register_unary(_op)
