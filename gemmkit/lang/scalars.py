"""Scalars of device code: coordinates, weak constants and narrow floats, with NumPy's rules.

* ``index``: a 32-bit signed integer for coordinates. ``index + index`` and ``index + 1`` stay 32 bits wide (Numba would
  widen both to 64, and its ``//`` is a 64-bit subroutine of hundreds of cycles).
* Weak constants (:mod:`gemmkit.lang.functions`): ``x + 1.0`` has the type of ``x``.
* ``float16`` and ``bfloat16`` of our own: arithmetic is done in float32 and rounded back, operation by operation, which
  is what NumPy and ml_dtypes do too. (numba-cuda's own are calls into a C++ shim that must be linked.)
"""

from __future__ import annotations

import math
import operator
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba.cuda.typeconv import Conversion

from gemmkit.lang.functions import WeakFloat, WeakInt
from gemmkit.lang.numba_hooks import lowering_registry, models, operation, register_model, signature, types, unify_weakly

i1, i16, i32, i64 = (ir.IntType(n) for n in (1, 16, 32, 64))
f32, f64 = ir.FloatType(), ir.DoubleType()


class IndexType(types.Integer):
    """A coordinate: 32 bits, signed. (Its name is int32's, which Numba turns into a NumPy dtype when it unifies.)"""

    def __init__(self) -> None:
        super().__init__("int32", bitwidth=32, signed=True)

    def can_convert_to(self, typingctx: Any, other: types.Type) -> Any:
        if isinstance(other, types.Integer) and other.bitwidth >= 32:
            return Conversion.promote if other.bitwidth > 32 else Conversion.safe
        if isinstance(other, types.Float) and other.bitwidth >= 32:
            return Conversion.promote if other.bitwidth == 64 else Conversion.unsafe
        return None

    def unify(self, typingctx: Any, other: types.Type) -> Any:
        if isinstance(other, types.IntegerLiteral):
            return self
        if isinstance(other, types.Integer):
            return other if other.bitwidth > 32 else self
        return None


index = IndexType()
register_model(IndexType)(models.IntegerModel)


class WeakIntLiteral(types.IntegerLiteral):
    """The type of an integer constant; by itself it is an ``index`` (or int64 where 32 bits do not hold it)."""

    def __init__(self, value: int):
        self._literal_init(int(value))
        fits = -2**31 <= value < 2**31
        self._literal_type_cache = index if fits else types.int64
        types.Integer.__init__(self, f"Weak[int]({int(value)})", bitwidth=32 if fits else 64, signed=True)

    def unify(self, typingctx: Any, other: types.Type) -> Any:
        if isinstance(other, types.IntegerLiteral):
            return types.unliteral(self)
        if isinstance(other, (types.Float, NarrowFloatType, types.Integer)):
            return other
        return None


class WeakFloatLiteral(types.Literal, types.Dummy):
    """The type of a float constant; by itself it is a float64."""

    def __init__(self, value: float):
        self._literal_init(float(value))
        self._literal_type_cache = types.float64
        types.Type.__init__(self, f"Weak[float]({float(value)!r})")

    @property
    def key(self) -> Any:
        return self.name

    def can_convert_to(self, typingctx: Any, other: types.Type) -> Any:
        return Conversion.safe if isinstance(other, (types.Float, types.Complex, NarrowFloatType)) else None

    def unify(self, typingctx: Any, other: types.Type) -> Any:
        if isinstance(other, (types.Float, NarrowFloatType)):
            return other
        if isinstance(other, (types.Literal, IndexType)):
            return weak_float64
        return types.float64 if isinstance(other, types.Integer) else None


class WeakFloat64Type(types.Type):
    """A runtime Python float: a float64 that takes the type of what it meets."""

    def __init__(self) -> None:
        super().__init__("weak float64")

    def can_convert_to(self, typingctx: Any, other: types.Type) -> Any:
        if other == types.float64:
            return Conversion.promote                     # where nothing else decides (``math.exp(alpha)``): all of it
        return Conversion.safe if isinstance(other, (types.Float, types.Complex, NarrowFloatType)) else None

    def unify(self, typingctx: Any, other: types.Type) -> Any:
        if isinstance(other, (types.Float, NarrowFloatType)):
            return other
        if isinstance(other, (types.Literal, IndexType)):
            return self
        return types.float64 if isinstance(other, types.Integer) else None


weak_float64 = WeakFloat64Type()


@register_model(WeakFloat64Type)
class _WeakFloat64Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: WeakFloat64Type):
        super().__init__(dmm, fe_type, f64)


_WEAK_FLOATS = (WeakFloatLiteral, WeakFloat64Type)
unify_weakly((WeakIntLiteral, IndexType))
types.Literal.ctor_map[WeakInt] = WeakIntLiteral
types.Literal.ctor_map[WeakFloat] = WeakFloatLiteral
register_model(WeakIntLiteral)(models.IntegerModel)
register_model(WeakFloatLiteral)(models.OpaqueModel)


class NarrowFloatType(types.Type):
    """A 16- or 8-bit float held as its bits. (No ``types.Number``: Numba would look for its NumPy dtype by name.)"""

    def __init__(self, name: str, dtype: Any):
        self.dtype = np.dtype(dtype)
        self.bitwidth = 8 * self.dtype.itemsize
        super().__init__(name)

    @property
    def bits(self) -> Any:
        """The LLVM type of its bits."""
        return ir.IntType(self.bitwidth)

    def can_convert_to(self, typingctx: Any, other: types.Type) -> Any:
        if isinstance(other, types.Float) and other.bitwidth >= 32:
            return Conversion.promote
        return None

    def unify(self, typingctx: Any, other: types.Type) -> Any:
        if isinstance(other, (types.Literal, types.Boolean, IndexType)):
            return self
        if isinstance(other, types.Float) and other.bitwidth >= 32:
            return other
        if isinstance(other, NarrowFloatType):
            return self if self == other else types.float32
        return None


float16 = NarrowFloatType("gemmkit.float16", np.float16)
bfloat16 = NarrowFloatType("gemmkit.bfloat16", ml_dtypes.bfloat16)
float8_e4m3fn = NarrowFloatType("gemmkit.float8_e4m3fn", ml_dtypes.float8_e4m3fn)
float8_e5m2 = NarrowFloatType("gemmkit.float8_e5m2", ml_dtypes.float8_e5m2)
_FLOAT8 = {float8_e4m3fn: "e4m3", float8_e5m2: "e5m2"}
_OF_ML_DTYPES = (bfloat16, float8_e4m3fn, float8_e5m2)


@register_model(NarrowFloatType)
class _NarrowFloatModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: NarrowFloatType):
        super().__init__(dmm, fe_type, fe_type.bits)


@lowering_registry.lower_constant(NarrowFloatType)
def _narrow_constant(context: Any, builder: Any, ty: NarrowFloatType, value: Any) -> Any:
    return ir.Constant(ty.bits, int(np.asarray(value, ty.dtype).view(f"u{ty.dtype.itemsize}")))


@lowering_registry.lower_constant(IndexType)
def _index_constant(context: Any, builder: Any, ty: IndexType, value: Any) -> Any:
    return ir.Constant(i32, int(value))


@lowering_registry.lower_constant(WeakIntLiteral)
def _weak_int_constant(context: Any, builder: Any, ty: WeakIntLiteral, value: Any) -> Any:
    return ir.Constant(ir.IntType(ty.bitwidth), int(value))


@lowering_registry.lower_constant(WeakFloatLiteral)
def _weak_float_constant(context: Any, builder: Any, ty: WeakFloatLiteral, value: Any) -> Any:
    return context.get_dummy_value()


# -- casts ------------------------------------------------------------------------------------------------------------

def widen(builder: Any, ty: NarrowFloatType, value: Any) -> Any:
    """A narrow float's bits to an LLVM float."""
    from gemmkit.ptx.convert import f32_from_f8, f32_from_f16

    if ty in _FLOAT8:
        return f32_from_f8(builder, _FLOAT8[ty], value)
    if ty == float16:
        return f32_from_f16(builder, value)
    return builder.bitcast(builder.shl(builder.zext(value, i32), ir.Constant(i32, 16)), f32)


def narrow(builder: Any, ty: NarrowFloatType, value: Any) -> Any:
    """An LLVM float to a narrow float's bits, round to nearest even."""
    from gemmkit.ptx.convert import bf16_from_f32, f8_from_f32, f16_from_f32

    if ty in _FLOAT8:
        return f8_from_f32(builder, _FLOAT8[ty], value)
    return f16_from_f32(builder, value) if ty == float16 else bf16_from_f32(builder, value)


@lowering_registry.lower_cast(NarrowFloatType, types.Float)
def _narrow_to_float(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    value = widen(builder, fromty, value)
    return builder.fpext(value, f64) if toty == types.float64 else value


@lowering_registry.lower_cast(types.Float, NarrowFloatType)
def _float_to_narrow(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    from gemmkit.ptx.convert import f16_from_f64

    if fromty == types.float64 and toty == float16:           # NumPy rounds once here,
        return f16_from_f64(builder, value)
    if fromty == types.float64:                               # and ml_dtypes goes by way of float32
        value = builder.fptrunc(value, f32)
    return narrow(builder, toty, value)


@lowering_registry.lower_cast(types.Integer, NarrowFloatType)
def _integer_to_narrow(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    return narrow(builder, toty, context.cast(builder, value, fromty, types.float32))


@lowering_registry.lower_cast(types.Boolean, NarrowFloatType)
def _boolean_to_narrow(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    return narrow(builder, toty, builder.uitofp(value, f32))


@lowering_registry.lower_cast(NarrowFloatType, types.Integer)
def _narrow_to_integer(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    return context.cast(builder, widen(builder, fromty, value), types.float32, toty)


@lowering_registry.lower_cast(NarrowFloatType, types.Boolean)
def _narrow_to_boolean(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    return builder.fcmp_unordered("une", widen(builder, fromty, value), ir.Constant(f32, 0.0))


@lowering_registry.lower_cast(NarrowFloatType, NarrowFloatType)
def _narrow_to_narrow(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    return value if fromty == toty else narrow(builder, toty, widen(builder, fromty, value))


def _weak_to_number(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    v = fromty.literal_value
    if isinstance(toty, types.Literal):
        return value
    if isinstance(toty, types.Boolean):
        return ir.Constant(i1, bool(v))
    return number_constant(context, builder, toty, v)


@lowering_registry.lower_cast(WeakFloat64Type, types.Float)
@lowering_registry.lower_cast(WeakFloat64Type, types.Complex)
@lowering_registry.lower_cast(WeakFloat64Type, types.Integer)
@lowering_registry.lower_cast(WeakFloat64Type, types.Boolean)
@lowering_registry.lower_cast(WeakFloat64Type, NarrowFloatType)
def _weak_float64_to_number(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    return value if toty == types.float64 else context.cast(builder, value, types.float64, toty)


@lowering_registry.lower_cast(types.Float, WeakFloat64Type)
@lowering_registry.lower_cast(types.Integer, WeakFloat64Type)
def _number_to_weak_float64(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    return context.cast(builder, value, fromty, types.float64)


for _weak in (WeakIntLiteral, WeakFloatLiteral):              # exact classes: Numba refuses ambiguous casts
    for _to in (types.Integer, IndexType, types.Float, types.Complex, NarrowFloatType, types.Boolean, WeakFloat64Type,
                WeakIntLiteral, WeakFloatLiteral):
        lowering_registry.lower_cast(_weak, _to)(_weak_to_number)


def number_constant(context: Any, builder: Any, ty: types.Type, v: Any) -> Any:
    """A Python number as an LLVM constant of a number type, by NumPy's conversion."""
    if isinstance(ty, NarrowFloatType):
        return _narrow_constant(context, builder, ty, v)
    if isinstance(ty, types.Integer):
        return ir.Constant(ir.IntType(ty.bitwidth), int(v))
    if isinstance(ty, WeakFloat64Type):
        return ir.Constant(f64, float(v))
    if isinstance(ty, types.Float):
        return context.get_constant(ty, float(v))
    if isinstance(ty, types.Complex):
        return context.get_constant_generic(builder, ty, complex(v))
    return context.get_constant_generic(builder, ty, v)


# -- arithmetic -------------------------------------------------------------------------------------------------------

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
            return strong if strong.bitwidth >= 32 else index
        if isinstance(weak, (WeakFloatLiteral, WeakFloat64Type)) and isinstance(strong, (types.Float, NarrowFloatType)):
            return strong
        if isinstance(weak, WeakIntLiteral) and isinstance(strong, (types.Float, NarrowFloatType, types.Integer)):
            return strong if not isinstance(strong, types.Boolean) else None
    return None


def _floordiv(builder: Any, a: Any, b: Any) -> Any:
    quotient, adjust = _division(builder, a, b)
    return builder.sub(quotient, builder.zext(adjust, i32))


def _mod(builder: Any, a: Any, b: Any) -> Any:
    quotient, adjust = _division(builder, a, b)
    remainder = builder.sub(a, builder.mul(quotient, b))
    return builder.select(adjust, builder.add(remainder, b), remainder)


def _division(builder: Any, a: Any, b: Any) -> Any:
    """The truncated quotient, and whether Python's (floored) is one less."""
    quotient = builder.sdiv(a, b)
    remainder = builder.sub(a, builder.mul(quotient, b))
    zero = ir.Constant(i32, 0)
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
    if op in _COMPARISON:
        name = _COMPARISON[op]
        return (signature(types.boolean, index, index),
                lambda c, builder, s, v: builder.icmp_signed(name, v[0], v[1]))
    if op not in _INDEX_ARITHMETIC:
        return None
    shift = _power_of_two(b)
    # Numba finds code by the signature's types, so code that depends on a constant keeps the constant in its signature.
    if op is operator.floordiv and shift is not None:
        return (signature(index, index, b),
                lambda c, builder, s, v: builder.ashr(v[0], ir.Constant(i32, shift)))
    if op is operator.mod and shift is not None:
        return (signature(index, index, b),
                lambda c, builder, s, v: builder.and_(v[0], ir.Constant(i32, (1 << shift) - 1)))
    emit = _INDEX_ARITHMETIC[op]
    return signature(index, index, index), lambda c, builder, s, v: emit(builder, v[0], v[1])


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


_F16_INSTRUCTIONS = {operator.add: "add", operator.sub: "sub", operator.mul: "mul"}


def _narrow_operation(context: Any, op: Any, a: Any, b: Any) -> Any:
    """Arithmetic on narrow floats: as if in float32, rounded back when the result is narrow by NumPy's rule.

    The rules are those of scalars, which is what the emulator computes with: a Python float is weak beside a float16, and
    beside a bfloat16 or an 8-bit float (ml_dtypes) gives a float32.
    """
    number = (types.Float, types.Integer, types.Boolean, NarrowFloatType, WeakFloatLiteral, WeakFloat64Type)
    if not (isinstance(a, number) and isinstance(b, number)):
        return None
    both = [t for t in (a, b) if not (isinstance(t, (WeakFloatLiteral, WeakIntLiteral, WeakFloat64Type, IndexType))
                                      or _fits_in_any_float(t))]
    if any(t in both for t in _OF_ML_DTYPES) and (isinstance(a, _WEAK_FLOATS) or isinstance(b, _WEAK_FLOATS)):
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
            return signature(index, a), lambda c, b, s, v: _index_unary(op, b, v[0])
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
    return builder.select(builder.icmp_signed("<", value, ir.Constant(i32, 0)), negative, value)


def _narrow_unary(op: Any, builder: Any, value: Any, bits: Any, width: int) -> Any:
    sign = 1 << (width - 1)
    if op is operator.neg:
        return builder.xor(value, ir.Constant(bits, sign))
    if op is operator.pos:
        return value
    return builder.and_(value, ir.Constant(bits, sign - 1))


for _op in (operator.neg, operator.pos, operator.invert, abs):
    _register_unary(_op)


# -- conversions written as calls: np.float32(x), and the host's names ----------------------------------------------------

_NUMBA = {ty.dtype: ty for ty in (float16, *_OF_ML_DTYPES)}


def numba_type(dtype: Any) -> types.Type:
    """The device type of a NumPy dtype; raises TypeError where there is none."""
    dtype = np.dtype(dtype)
    found = _NUMBA.get(dtype)
    if found is not None:
        return found
    if (dtype.kind in "biuf" and dtype.itemsize <= 8) or (dtype.kind == "c" and dtype.itemsize <= 16):
        return getattr(types, dtype.name if dtype.kind != "b" else "boolean")
    if dtype.names is not None:
        return _record_type(dtype)
    raise TypeError(f"dtype {dtype} has no device type; bool, integers, float8_e4m3fn, float8_e5m2, float16, bfloat16, "
                    "float32, float64, complex64 and complex128 have")


_records: dict[str, types.Type] = {}


def _record_type(dtype: np.dtype) -> types.Type:
    from gemmkit.lang.records import RecordType, record_text

    text = record_text(dtype)
    found = _records.get(text)
    return found if found is not None else _records.setdefault(text, RecordType(dtype))


def numpy_dtype(ty: types.Type) -> np.dtype:
    """The NumPy dtype of a device number type."""
    if isinstance(ty, NarrowFloatType) or ty in _records.values():
        return ty.dtype
    if isinstance(ty, IndexType):
        return np.dtype(np.int32)
    if isinstance(ty, types.Literal):
        ty = types.unliteral(ty)
    return np.dtype(bool) if isinstance(ty, types.Boolean) else np.dtype(ty.name)


def is_finite(value: Any) -> bool:
    return math.isfinite(value)
