"""Arithmetic of scalars in device code: which type a result has, by NumPy's rules, and how it is computed.

The rules are those of `gemmkit.lang.scalars`; this module registers them with Numba when it is imported.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from llvmlite import ir

from gemmkit.lang.numba_hooks import operation, signature, types
from gemmkit.lang.scalars import (
    OF_ML_DTYPES,
    WEAK_FLOATS,
    IndexType,
    NarrowFloatType,
    WeakFloat64Type,
    WeakFloatLiteral,
    WeakIntLiteral,
    float16,
    i1,
    index,
    number_constant,
    weak_float64,
    wide_index,
)


def _is_int(t: Any) -> bool:
    return isinstance(t, types.Integer)


def _index_pair(a: Any, b: Any) -> bool:
    """Both coordinates, or a coordinate and a constant."""
    ours = isinstance(a, IndexType) + isinstance(b, IndexType)
    literal = isinstance(a, types.IntegerLiteral) + isinstance(b, types.IntegerLiteral)
    return ours == 2 or (ours == 1 and literal == 1)


def _is_weak(t: Any) -> bool:
    return isinstance(t, (WeakIntLiteral, WeakFloatLiteral, WeakFloat64Type, IndexType))


def _weak_pair(a: Any, b: Any) -> types.Type | None:
    """The type that a weak operand takes beside a strong one (NEP 50), or None.

    Coordinates are Python integers in the emulator, so they are weak too: ``x * m`` has the type of ``x``. What Python
    computes as a float of its own (``m * 0.5``, ``alpha * beta``) is a weak float64.
    """
    if _is_weak(a) and _is_weak(b):
        return weak_float64
    for strong, weak in ((a, b), (b, a)):
        if isinstance(strong, types.Literal):
            continue
        if isinstance(strong, types.Complex) and isinstance(
                weak, (WeakIntLiteral, WeakFloatLiteral, WeakFloat64Type, IndexType)):
            return strong
        if isinstance(weak, WeakFloat64Type) and isinstance(strong, (types.Integer, types.Boolean)):
            return types.float64
        if isinstance(weak, IndexType) and isinstance(strong, types.Float):
            return strong
        if isinstance(weak, IndexType) and isinstance(strong, types.Integer) and not isinstance(strong, IndexType):
            return strong if strong.bitwidth >= weak.bitwidth else weak
        if isinstance(weak, (WeakFloatLiteral, WeakFloat64Type)) and isinstance(strong, (types.Float, NarrowFloatType)):
            return strong
        if isinstance(weak, WeakIntLiteral) and isinstance(strong, (types.Float, NarrowFloatType, types.Integer)):
            return strong if not isinstance(strong, types.Boolean) else None
    return None


def _floordiv(builder: Any, a: Any, b: Any) -> Any:
    quotient, adjust = _division(builder, a, b)
    return builder.sub(quotient, builder.zext(adjust, quotient.type))


def _mod(builder: Any, a: Any, b: Any) -> Any:
    quotient, adjust = _division(builder, a, b)
    remainder = builder.sub(a, builder.mul(quotient, b))
    return builder.select(adjust, builder.add(remainder, b), remainder)


def _division(builder: Any, a: Any, b: Any) -> Any:
    """The truncated quotient, and whether Python's (floored) is one less."""
    quotient = builder.sdiv(a, b)
    remainder = builder.sub(a, builder.mul(quotient, b))
    zero = ir.Constant(a.type, 0)
    signs_differ = builder.icmp_signed("<", builder.xor(a, b), zero)
    return quotient, builder.and_(builder.icmp_signed("!=", remainder, zero), signs_differ)


def _power_of_two(t: Any) -> int | None:
    if isinstance(t, types.IntegerLiteral) and t.literal_value > 0 and t.literal_value & (t.literal_value - 1) == 0:
        return t.literal_value.bit_length() - 1
    return None


_INDEX_ARITHMETIC = {
    operator.add: lambda b, x, y: b.add(x, y, flags=("nsw",)), operator.sub: lambda b, x, y: b.sub(x, y, flags=("nsw",)),
    operator.mul: lambda b, x, y: b.mul(x, y, flags=("nsw",)), operator.floordiv: _floordiv, operator.mod: _mod,
    operator.and_: lambda b, x, y: b.and_(x, y), operator.or_: lambda b, x, y: b.or_(x, y),
    operator.xor: lambda b, x, y: b.xor(x, y), operator.lshift: lambda b, x, y: b.shl(x, y),
    operator.rshift: lambda b, x, y: b.ashr(x, y),
    min: lambda b, x, y: b.select(b.icmp_signed("<", y, x), y, x),
    max: lambda b, x, y: b.select(b.icmp_signed(">", y, x), y, x),
}
_COMPARISON = {operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
               operator.ne: "!="}
_PYTHON = {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.and_, operator.or_,
           operator.xor, operator.lshift, operator.rshift, operator.truediv, operator.pow, min, max,
           *_COMPARISON}


_GIVE_FLOATS = (operator.truediv,)                            # of two coordinates


def _fold(op: Any, a: Any, b: Any) -> Any:
    """Two constants: the result is a constant again (or nothing, where Python itself would raise)."""
    weak = (WeakIntLiteral, WeakFloatLiteral)
    if not (isinstance(a, weak) and isinstance(b, weak)):
        return None
    try:
        value = op(a.literal_value, b.literal_value)
    except (ArithmeticError, TypeError, ValueError):
        return None
    if isinstance(value, bool):
        return signature(types.literal(value), a, b), lambda c, builder, s, v: ir.Constant(i1, value)
    result = WeakIntLiteral(value) if isinstance(value, int) else WeakFloatLiteral(value)
    return signature(result, a, b), lambda c, builder, s, v: c.get_constant_generic(builder, result, value)


def _register_binary(op: Any, key: Any) -> None:
    """Type ``key`` (``+`` or ``+=``) by the rules of ``op`` (``+``)."""
    @operation(key)
    def typer(context: Any, *args: Any) -> Any:
        if len(args) != 2:
            return None
        a, b = args
        folded = _fold(op, a, b)
        if folded is not None:
            return folded
        if _index_pair(a, b) and op not in _GIVE_FLOATS:
            return _index_operation(op, a, b)
        if isinstance(a, NarrowFloatType) or isinstance(b, NarrowFloatType):
            return _narrow_operation(context, op, a, b)
        strong = _weak_pair(a, b)
        integer = (types.Integer, types.Boolean)
        if strong is None and (isinstance(a, IndexType) or isinstance(b, IndexType)) \
                and isinstance(a, integer) and isinstance(b, integer):
            strong = types.int64
        if strong is None:
            return None
        return _strong_operation(context, op, strong, a, b)


def _index_operation(op: Any, a: Any, b: Any) -> Any:
    kind = wide_index if wide_index in (a, b) else index
    if op in _COMPARISON:
        name = _COMPARISON[op]
        return (signature(types.boolean, kind, kind),
                lambda c, builder, s, v: builder.icmp_signed(name, v[0], v[1]))
    if op not in _INDEX_ARITHMETIC:
        return None
    shift = _power_of_two(b)
    # Numba finds code by the signature's types, so code that depends on a constant keeps the constant in its signature.
    if op is operator.floordiv and shift is not None:
        return (signature(kind, kind, b),
                lambda c, builder, s, v: builder.ashr(v[0], ir.Constant(v[0].type, shift)))
    if op is operator.mod and shift is not None:
        return (signature(kind, kind, b),
                lambda c, builder, s, v: builder.and_(v[0], ir.Constant(v[0].type, (1 << shift) - 1)))
    emit = _INDEX_ARITHMETIC[op]
    return signature(kind, kind, kind), lambda c, builder, s, v: emit(builder, v[0], v[1])


def _strong_operation(context: Any, op: Any, strong: types.Type, a: Any, b: Any) -> Any:
    """The operator with both operands of the strong type; integers keep its width, weak floats stay weak."""
    compute = types.float64 if strong == weak_float64 else strong
    inner = context.resolve_function_type(op, (compute, compute), {})
    if inner is None:
        return None
    if strong == weak_float64:
        keep = inner.return_type == compute
    else:
        keep = isinstance(strong, types.Integer) and inner.return_type in (types.int64, types.uint64) \
            and op in _INDEX_ARITHMETIC

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
        values = [c.cast(builder, x, t, inner_t) for x, t, inner_t in zip(v, s.args, inner.args)]
        function = c.get_function(context.resolve_value_type(op), inner)
        result = function(builder, values)
        return c.cast(builder, result, inner.return_type, s.return_type)

    return signature(strong if keep else inner.return_type, a, b), codegen   # (a, b): Numba finds code by these types


def _fits_in_any_float(t: Any) -> bool:
    return isinstance(t, types.Boolean) or (_is_int(t) and t.bitwidth <= 8)


def _beside_complex(context: Any, op: Any, a: Any, b: Any) -> Any:
    """A narrow float beside a complex number is a float32."""
    if not any(isinstance(t, types.Complex) for t in (a, b)):
        return None
    kinds = tuple(types.float32 if isinstance(t, NarrowFloatType) else t for t in (a, b))
    inner = context.resolve_function_type(op, kinds, {})
    if inner is None:
        return None

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
        given = [c.cast(builder, x, t, to) for x, t, to in zip(v, s.args, inner.args)]
        return c.get_function(context.resolve_value_type(op), inner)(builder, given)

    return signature(inner.return_type, a, b), codegen


_F16_INSTRUCTIONS = {operator.add: "add", operator.sub: "sub", operator.mul: "mul"}


def _narrow_operation(context: Any, op: Any, a: Any, b: Any) -> Any:
    """Arithmetic on narrow floats: as if in float32, rounded back when the result is narrow by NumPy's rule.

    The rules are those of scalars, which is what the emulator computes with: a Python float is weak beside a float16, and
    beside a bfloat16 or an 8-bit float (ml_dtypes) gives a float32.
    """
    number = (types.Float, types.Integer, types.Boolean, NarrowFloatType, WeakFloatLiteral, WeakFloat64Type)
    if not (isinstance(a, number) and isinstance(b, number)):
        return _beside_complex(context, op, a, b)
    both = [t for t in (a, b) if not (isinstance(t, (WeakFloatLiteral, WeakIntLiteral, WeakFloat64Type, IndexType))
                                      or _fits_in_any_float(t))]
    if any(t in both for t in OF_ML_DTYPES) and (isinstance(a, WEAK_FLOATS) or isinstance(b, WEAK_FLOATS)):
        result = types.float32
    elif all(t == both[0] for t in both):
        result = both[0]
    else:
        wide = [types.float32 if isinstance(t, NarrowFloatType) else t for t in both]
        result = types.float64 if any(t == types.float64 or (_is_int(t) and t.bitwidth > 16) for t in wide) \
            else types.float32
    compute = types.float64 if result == types.float64 else types.float32
    inner = context.resolve_function_type(op, (compute, compute), {})
    if inner is None:
        return None
    returns = result if inner.return_type == compute else inner.return_type
    native = _F16_INSTRUCTIONS.get(op) if result == float16 else None

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
        from gemmkit.ptx.convert import f16_arithmetic

        values: list[Any] = []
        for x, t in zip(v, s.args):
            narrow_type = result if isinstance(result, NarrowFloatType) else None
            if isinstance(t, types.Literal) and narrow_type is not None:      # a weak constant rounds to the narrow type
                x, t = number_constant(c, builder, narrow_type, t.literal_value), narrow_type
            elif isinstance(t, (WeakFloat64Type, IndexType)) and narrow_type is not None:
                x, t = c.cast(builder, x, t, narrow_type), narrow_type
            values.append((x, t))
        if native and all(t == float16 for _, t in values):
            return f16_arithmetic(builder, native, *(x for x, _ in values))
        values = [c.cast(builder, x, t, compute) for x, t in values]
        out = c.get_function(context.resolve_value_type(op), inner)(builder, values)
        return c.cast(builder, out, inner.return_type, returns)

    return signature(returns, a, b), codegen


for _op in _PYTHON:
    _register_binary(_op, _op)
    _in_place = getattr(operator, f"i{_op.__name__.rstrip('_')}", None)
    if _op not in _COMPARISON and _in_place is not None:
        _register_binary(_op, _in_place)


def _register_math(function: Any) -> None:
    @operation(function)
    def typer(context: Any, *args: Any) -> Any:
        if len(args) != 2:
            return None
        strong = _weak_pair(*args)
        if not isinstance(strong, (types.Float, NarrowFloatType)):
            return None
        strong = types.float64 if strong == types.float64 else types.float32
        inner = context.resolve_function_type(function, (strong, strong), {})
        return None if inner is None else _strong_operation(context, function, strong, *args)


for _op in (math.pow, math.fmod, math.atan2, math.copysign, math.hypot):
    _register_math(_op)


def _register_unary(op: Any) -> None:
    @operation(op)
    def typer(context: Any, *args: Any) -> Any:
        if len(args) != 1:
            return None
        (a,) = args
        if isinstance(a, (WeakIntLiteral, WeakFloatLiteral)):
            value = op(a.literal_value)
            result = WeakIntLiteral(value) if isinstance(value, int) else WeakFloatLiteral(value)
            return signature(result, a), lambda c, b, s, v: c.get_constant_generic(b, result, value)
        if isinstance(a, IndexType):
            return signature(a, a), lambda c, b, s, v: _index_unary(op, b, v[0])
        if isinstance(a, NarrowFloatType) and op is not operator.invert:
            return signature(a, a), lambda c, b, s, v: _narrow_unary(op, b, v[0], a.bits, a.bitwidth)
        if isinstance(a, WeakFloat64Type) and op is not operator.invert:
            inner = context.resolve_function_type(op, (types.float64,), {})
            return signature(a, a), lambda c, b, s, v: c.get_function(context.resolve_value_type(op), inner)(b, v)
        return None


def _index_unary(op: Any, builder: Any, value: Any) -> Any:
    negative = builder.neg(value)
    if op is operator.neg:
        return negative
    if op is operator.invert:
        return builder.not_(value)
    if op is operator.pos:
        return value
    return builder.select(builder.icmp_signed("<", value, ir.Constant(value.type, 0)), negative, value)


def _narrow_unary(op: Any, builder: Any, value: Any, bits: Any, width: int) -> Any:
    sign = 1 << (width - 1)
    if op is operator.neg:
        return builder.xor(value, ir.Constant(bits, sign))
    if op is operator.pos:
        return value
    return builder.and_(value, ir.Constant(bits, sign - 1))


for _op in (operator.neg, operator.pos, operator.invert, abs):
    _register_unary(_op)
