"""Scalars of device code: coordinates, weak constants and narrow floats, with NumPy's rules.

* ``index``: a 32-bit signed integer for coordinates. ``index + index`` and ``index + 1`` stay 32 bits wide (Numba would
  widen both to 64, and its ``//`` is a 64-bit subroutine of hundreds of cycles).
* Weak constants (:mod:`gemmkit.lang.functions`): ``x + 1.0`` has the type of ``x``.
* ``float16`` and ``bfloat16`` of our own: arithmetic is done in float32 and rounded back, operation by operation, which
  is what NumPy and ml_dtypes do too. (numba-cuda's own are calls into a C++ shim that must be linked.)
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.lang.later import at_load
from gemmkit.lang.numba_hooks import (
    Conversion,
    ir,
    lowering_registry,
    models,
    register_model,
    typeof_impl,
    types,
    unify_weakly,
)
from gemmkit.lang.weak import WeakFloat, WeakInt

i1, i16, i32, i64 = (ir.IntType(n) for n in (1, 16, 32, 64))
f32, f64 = ir.FloatType(), ir.DoubleType()


class IndexType(types.Integer):
    """A coordinate: 32 bits, signed; of operands of 2^31 elements and more 64. (Its name is int32's or int64's, which Numba
    turns into a NumPy dtype when it unifies.)"""

    def __init__(self, bits: int = 32) -> None:
        super().__init__(f"int{bits}", bitwidth=bits, signed=True)

    def can_convert_to(self, typingctx: Any, other: types.Type) -> Any:
        if isinstance(other, types.Integer) and other.bitwidth >= self.bitwidth:
            return Conversion.promote if other.bitwidth > self.bitwidth else Conversion.safe
        if isinstance(other, types.Float) and other.bitwidth >= 32:
            return Conversion.promote if other.bitwidth == 64 else Conversion.unsafe
        return None

    def unify(self, typingctx: Any, other: types.Type) -> Any:
        if isinstance(other, types.IntegerLiteral):
            return self
        if isinstance(other, types.Integer):
            return other if other.bitwidth >= self.bitwidth else self
        return None


index, wide_index = IndexType(), IndexType(64)
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
    """The type of a float constant; by itself it is a plain float."""

    def __init__(self, value: float):
        self._literal_init(float(value))
        self._literal_type_cache = weak_float64
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


WEAK_FLOATS = (WeakFloatLiteral, WeakFloat64Type)
at_load(unify_weakly, (WeakIntLiteral, IndexType))
types.Literal.ctor_map[WeakInt] = WeakIntLiteral
types.Literal.ctor_map[WeakFloat] = WeakFloatLiteral
register_model(WeakIntLiteral)(models.IntegerModel)
register_model(WeakFloatLiteral)(models.OpaqueModel)


@typeof_impl.register(WeakInt)
@typeof_impl.register(WeakFloat)
def _typeof_weak(value: Any, _c: Any) -> types.Type:
    """Of a constant within a tuple."""
    return WeakIntLiteral(value) if isinstance(value, int) else WeakFloatLiteral(value)


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
OF_ML_DTYPES = (bfloat16, float8_e4m3fn, float8_e5m2)


@register_model(NarrowFloatType)
class _NarrowFloatModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: NarrowFloatType):
        super().__init__(dmm, fe_type, fe_type.bits)


@lowering_registry.lower_constant(NarrowFloatType)
def _narrow_constant(context: Any, builder: Any, ty: NarrowFloatType, value: Any) -> Any:
    return ir.Constant(ty.bits, int(np.asarray(value, ty.dtype).view(f"u{ty.dtype.itemsize}")))


@lowering_registry.lower_constant(IndexType)
def _index_constant(context: Any, builder: Any, ty: IndexType, value: Any) -> Any:
    return ir.Constant(ir.IntType(ty.bitwidth), int(value))


@lowering_registry.lower_constant(WeakIntLiteral)
def _weak_int_constant(context: Any, builder: Any, ty: WeakIntLiteral, value: Any) -> Any:
    return ir.Constant(ir.IntType(ty.bitwidth), int(value))


@lowering_registry.lower_constant(WeakFloatLiteral)
def _weak_float_constant(context: Any, builder: Any, ty: WeakFloatLiteral, value: Any) -> Any:
    return context.get_dummy_value()


# -- casts ------------------------------------------------------------------------------------------------------------

def _is_number(value: Any) -> bool:
    """Whether an LLVM value is a known float: assembly does not fold, so it is done here."""
    return isinstance(value, ir.Constant) and isinstance(value.constant, float)


def widen(builder: Any, ty: NarrowFloatType, value: Any) -> Any:
    """A narrow float's bits to an LLVM float."""
    from gemmkit.lang.conversions import f32_from_f8, f32_from_f16

    if isinstance(value, ir.Constant) and isinstance(value.constant, int):
        return ir.Constant(f32, float(np.array(value.constant, f"u{ty.dtype.itemsize}").view(ty.dtype)))
    if ty in _FLOAT8:
        return f32_from_f8(builder, _FLOAT8[ty], value)
    if ty == float16:
        return f32_from_f16(builder, value)
    return builder.bitcast(builder.shl(builder.zext(value, i32), ir.Constant(i32, 16)), f32)


def narrow(builder: Any, ty: NarrowFloatType, value: Any) -> Any:
    """An LLVM float to a narrow float's bits, round to nearest even."""
    from gemmkit.lang.conversions import bf16_from_f32, f8_from_f32, f16_from_f32

    if _is_number(value):
        return ir.Constant(ty.bits, int(np.float32(value.constant).astype(ty.dtype).view(f"u{ty.dtype.itemsize}")))
    if ty in _FLOAT8:
        return f8_from_f32(builder, _FLOAT8[ty], value)
    return f16_from_f32(builder, value) if ty == float16 else bf16_from_f32(builder, value)


@lowering_registry.lower_cast(NarrowFloatType, types.Float)
def _narrow_to_float(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    value = widen(builder, fromty, value)
    return builder.fpext(value, f64) if toty == types.float64 else value


@lowering_registry.lower_cast(types.Float, NarrowFloatType)
def _float_to_narrow(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    from gemmkit.lang.conversions import f16_from_f64

    if fromty == types.float64 and _is_number(value):
        return _narrow_constant(context, builder, toty, value.constant)
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


#: The classes of device types that are real numbers, each that code is registered for by name.
REAL_TYPES = (types.Integer, types.IntegerLiteral, IndexType, WeakIntLiteral, types.Float, WeakFloatLiteral, WeakFloat64Type,
              NarrowFloatType, types.Boolean, types.BooleanLiteral)
