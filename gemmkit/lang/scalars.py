"""Scalars of device code: coordinates, weak constants and narrow floats, with NumPy's rules.

* ``index``: a 32-bit signed integer for coordinates. ``index + index`` and ``index + 1`` stay 32 bits wide (Numba would
  widen both to 64, and its ``//`` is a 64-bit subroutine of hundreds of cycles).
* Weak constants (:mod:`gemmkit.lang.functions`): ``x + 1.0`` has the type of ``x``.
* ``float16`` and ``bfloat16`` of our own: arithmetic is done in float32 and rounded back, operation by operation, which
  is what NumPy and ml_dtypes do too. (numba-cuda's own are calls into a C++ shim that must be linked.)
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.lang import numba_hooks as nb
from gemmkit.lang import number_rules
from gemmkit.lang.deferred import at_load
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, ir, signature, types
from gemmkit.lang.number_rules import BOOL, TABLE, Weak, device_dtype, metadata_of, part_dtypes, record_text

# --------------------------------------------------------------------------------------------------
# Constants that take the type of what they meet, as NumPy has it (NEP 50): ``x + 1.0`` is of the type of ``x``.

class WeakInt(int):
    """An integer constant that takes the type of what it meets."""


class WeakFloat(float):
    """A float constant that takes the type of what it meets."""


class WeakComplex(complex):
    """A complex constant that takes the type of what it meets."""


def weaken(value: Any) -> Any:
    """A constant as the code of a device function should hold it."""
    if type(value) is int:
        return WeakInt(value)
    if type(value) is float:
        return WeakFloat(value)
    if type(value) is complex:
        return WeakComplex(value)
    if type(value) is tuple:
        return tuple(weaken(v) for v in value)
    return value


def weaken_code(code: CodeType) -> CodeType:
    return code.replace(co_consts=tuple(
        weaken_code(c) if isinstance(c, CodeType) else weaken(c) for c in code.co_consts))


i1, i16, i32, i64 = (ir.IntType(n) for n in (1, 16, 32, 64))
f32, f64 = ir.FloatType(), ir.DoubleType()


class IndexType(types.Integer):
    """A coordinate: 32 bits, signed; of operands of 2^31 elements and more 64. (Its name is int32's or int64's, which Numba
    turns into a NumPy dtype when it unifies.)"""

    def __init__(self, bits: int = 32) -> None:
        super().__init__(f"int{bits}", bitwidth=bits, signed=True)

    def can_convert_to(self, typingctx: TypingContext, other: types.Type) -> Any:
        if isinstance(other, types.Integer) and other.bitwidth >= self.bitwidth:
            return nb.Conversion.promote if other.bitwidth > self.bitwidth else nb.Conversion.safe
        if isinstance(other, types.Float) and other.bitwidth >= 32:
            return nb.Conversion.promote if other.bitwidth == 64 else nb.Conversion.unsafe
        return None

    def unify(self, typingctx: TypingContext, other: types.Type) -> Any:
        if isinstance(other, types.IntegerLiteral):
            return self
        if isinstance(other, types.Integer):
            return other if other.bitwidth >= self.bitwidth else self
        return None


index, wide_index = IndexType(), IndexType(64)
nb.register_model(IndexType)(nb.models.IntegerModel)


class WeakIntLiteral(types.IntegerLiteral):
    """The type of an integer constant; by itself it is an ``index`` (or int64 where 32 bits do not hold it)."""

    def __init__(self, value: int):
        self._literal_init(int(value))
        fits = -2**31 <= value < 2**31
        self._literal_type_cache = index if fits else types.int64
        types.Integer.__init__(self, f"Weak[int]({int(value)})", bitwidth=32 if fits else 64, signed=True)

    def unify(self, typingctx: TypingContext, other: types.Type) -> Any:
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

    def can_convert_to(self, typingctx: TypingContext, other: types.Type) -> Any:
        return nb.Conversion.safe if isinstance(other, (types.Float, types.Complex, NarrowFloatType)) else None

    def unify(self, typingctx: TypingContext, other: types.Type) -> Any:
        if isinstance(other, (types.Float, NarrowFloatType)):
            return other
        if isinstance(other, (types.Literal, IndexType)):
            return weak_float64
        return types.float64 if isinstance(other, types.Integer) else None


class WeakFloat64Type(types.Type):
    """A runtime Python float: a float64 that takes the type of what it meets."""

    def __init__(self) -> None:
        super().__init__("weak float64")

    def can_convert_to(self, typingctx: TypingContext, other: types.Type) -> Any:
        if other == types.float64:
            return nb.Conversion.promote                     # where nothing else decides (``math.exp(alpha)``): all of it
        return nb.Conversion.safe if isinstance(other, (types.Float, types.Complex, NarrowFloatType)) else None

    def unify(self, typingctx: TypingContext, other: types.Type) -> Any:
        if isinstance(other, (types.Float, NarrowFloatType)):
            return other
        if isinstance(other, (types.Literal, IndexType)):
            return self
        return types.float64 if isinstance(other, types.Integer) else None


weak_float64 = WeakFloat64Type()
nb.kept_as(WeakFloat64Type, lambda ty: f64)
WEAK_FLOATS = (WeakFloatLiteral, WeakFloat64Type)
at_load(nb.unify_weakly, (WeakIntLiteral, IndexType))
types.Literal.ctor_map[WeakInt] = WeakIntLiteral
types.Literal.ctor_map[WeakFloat] = WeakFloatLiteral
nb.register_model(WeakIntLiteral)(nb.models.IntegerModel)
nb.kept_as(WeakFloatLiteral, None)


@nb.typeof_impl.register(WeakInt)
@nb.typeof_impl.register(WeakFloat)
def _typeof_weak(value: Any, _c: object) -> types.Type:
    """Of a constant within a tuple."""
    return WeakIntLiteral(value) if isinstance(value, int) else WeakFloatLiteral(value)


class NarrowFloatType(types.Type):
    """A 16- or 8-bit float held as its bits. (No ``types.Number``: Numba would look for its NumPy dtype by name.)"""

    def __init__(self, name: str, dtype: type):
        self.dtype = np.dtype(dtype)
        self.bitwidth = 8 * self.dtype.itemsize
        super().__init__(name)

    @property
    def bits(self) -> Any:
        """The LLVM type of its bits."""
        return ir.IntType(self.bitwidth)

    def can_convert_to(self, typingctx: TypingContext, other: types.Type) -> Any:
        if isinstance(other, types.Float) and other.bitwidth >= 32:
            return nb.Conversion.promote
        return None

    def unify(self, typingctx: TypingContext, other: types.Type) -> Any:
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


nb.kept_as(NarrowFloatType, lambda ty: ty.bits)


@nb.lowering_registry.lower_constant(NarrowFloatType)
def _narrow_constant(context: Context, builder: ir.IRBuilder, ty: NarrowFloatType, value: float) -> Any:
    return ir.Constant(ty.bits, int(np.asarray(value, ty.dtype).view(f"u{ty.dtype.itemsize}")))


@nb.lowering_registry.lower_constant(IndexType)
@nb.lowering_registry.lower_constant(WeakIntLiteral)
def _index_constant(context: Context, builder: ir.IRBuilder, ty: IndexType | WeakIntLiteral, value: int) -> Any:
    return ir.Constant(ir.IntType(ty.bitwidth), int(value))




# -- casts ------------------------------------------------------------------------------------------------------------

def _is_number(value: Any) -> bool:
    """Whether an LLVM value is a known float: assembly does not fold, so it is done here."""
    return isinstance(value, ir.Constant) and isinstance(value.constant, float)


def widen(builder: ir.IRBuilder, ty: NarrowFloatType, value: ir.Value) -> Any:
    """A narrow float's bits to an LLVM float."""

    if isinstance(value, ir.Constant) and isinstance(value.constant, int):
        return ir.Constant(f32, float(np.array(value.constant, f"u{ty.dtype.itemsize}").view(ty.dtype)))
    if ty in _FLOAT8:
        return f32_from_f8(builder, _FLOAT8[ty], value)
    if ty == float16:
        return f32_from_f16(builder, value)
    return builder.bitcast(builder.shl(builder.zext(value, i32), ir.Constant(i32, 16)), f32)


def narrow(builder: ir.IRBuilder, ty: NarrowFloatType, value: ir.Value) -> Any:
    """An LLVM float to a narrow float's bits, round to nearest even."""

    if _is_number(value):
        return ir.Constant(ty.bits, int(np.float32(value.constant).astype(ty.dtype).view(f"u{ty.dtype.itemsize}")))
    if ty in _FLOAT8:
        return f8_from_f32(builder, _FLOAT8[ty], value)
    return f16_from_f32(builder, value) if ty == float16 else bf16_from_f32(builder, value)


@nb.lowering_registry.lower_cast(types.Float, NarrowFloatType)
def _float_to_narrow(context: Context, builder: ir.IRBuilder, fromty: types.Type, toty: types.Type, value: ir.Value) -> Any:

    if fromty == types.float64 and _is_number(value):
        return _narrow_constant(context, builder, toty, value.constant)
    if fromty == types.float64 and toty == float16:           # NumPy rounds once here,
        return f16_from_f64(builder, value)
    if fromty == types.float64:                               # and ml_dtypes goes by way of float32
        value = builder.fptrunc(value, f32)
    return narrow(builder, toty, value)


def _weak_to_number(context: Context, builder: ir.IRBuilder, fromty: types.Type, toty: types.Type, value: ir.Value) -> Any:
    v = fromty.literal_value
    if isinstance(toty, types.Literal):
        return value
    if isinstance(toty, types.Boolean):
        return ir.Constant(i1, bool(v))
    return number_constant(context, builder, toty, v)


_CASTS: tuple[tuple[Any, Any, Callable[..., Any]], ...] = (      # (context, builder, the type, another, the value)
    (NarrowFloatType, types.Float, lambda c, b, ty, to, v: c.cast(b, widen(b, ty, v), types.float32, to)),
    (NarrowFloatType, types.Integer, lambda c, b, ty, to, v: c.cast(b, widen(b, ty, v), types.float32, to)),
    (NarrowFloatType, types.Boolean, lambda c, b, ty, to, v: b.fcmp_unordered("une", widen(b, ty, v), f32(0.0))),
    (NarrowFloatType, NarrowFloatType, lambda c, b, ty, to, v: v if ty == to else narrow(b, to, widen(b, ty, v))),
    (types.Integer, NarrowFloatType, lambda c, b, ty, to, v: narrow(b, to, c.cast(b, v, ty, types.float32))),
    (types.Boolean, NarrowFloatType, lambda c, b, ty, to, v: narrow(b, to, b.uitofp(v, f32))),
    *((ty, WeakFloat64Type, lambda c, b, ty, to, v: c.cast(b, v, ty, types.float64)) for ty in (types.Float, types.Integer)),
    *((WeakFloat64Type, ty, lambda c, b, ty, to, v: v if to == types.float64 else c.cast(b, v, types.float64, to))
      for ty in (types.Float, types.Complex, types.Integer, types.Boolean, NarrowFloatType)))
for _from, _to, _cast in _CASTS:
    nb.lowering_registry.lower_cast(_from, _to)(_cast)
for _weak in (WeakIntLiteral, WeakFloatLiteral):              # exact classes: Numba refuses ambiguous casts
    for _to in (types.Integer, IndexType, types.Float, types.Complex, NarrowFloatType, types.Boolean, WeakFloat64Type,
                WeakIntLiteral, WeakFloatLiteral):
        nb.lowering_registry.lower_cast(_weak, _to)(_weak_to_number)


def number_constant(context: Context, builder: ir.IRBuilder, ty: types.Type, v: float) -> Any:
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


# --------------------------------------------------------------------------------------------------
# Which device type a number has: of a NumPy dtype, of a kind of `gemmkit.lang.number_rules`, and back.

# -- numbers of several parts -----------------------------------------------------------------------------------------

class RecordType(types.Type):
    """A struct of parts."""

    def __init__(self, dtype: np.dtype):
        self.dtype, self.names = dtype, dtype.names or ()
        self.parts = tuple(numba_type(kind) for kind in part_dtypes(dtype))
        self.table = metadata_of(dtype).get(TABLE)
        super().__init__(f"record {record_text(dtype)}")


nb.kept_as(RecordType, lambda ty: [(f"part{n}", part) for n, part in enumerate(ty.parts)])


class PackedType(RecordType):
    """A record of two 16-bit parts: one 32-bit register, as memory has it; moving it takes nothing apart."""


nb.kept_as(PackedType, lambda ty: ir.IntType(32))


def record_type(dtype: np.dtype) -> RecordType:
    """The device type of a record dtype."""
    kinds = part_dtypes(dtype)
    return PackedType(dtype) if len(kinds) == 2 and kinds[0].itemsize == 2 else RecordType(dtype)


# -- of a dtype, and back ---------------------------------------------------------------------------------------------

_NUMBA = {np.dtype(dtype): ty for dtype, ty in (
    (np.float16, float16), (ml_dtypes.bfloat16, bfloat16), (ml_dtypes.float8_e4m3fn, float8_e4m3fn),
    (ml_dtypes.float8_e5m2, float8_e5m2))}


def numba_type(dtype: Any) -> types.Type:
    """The device type of a NumPy dtype; raises TypeError where there is none."""
    dtype = device_dtype(dtype)
    if dtype.names is not None:
        return record_type(dtype)         # Numba keeps one of each name; a memory here would be part of every fingerprint
    return _NUMBA.get(dtype) or getattr(types, dtype.name if dtype.kind != "b" else "boolean")


def numpy_dtype(ty: types.Type) -> np.dtype:
    """The NumPy dtype of a device number type."""
    if isinstance(ty, (NarrowFloatType, RecordType)):
        return ty.dtype
    if isinstance(ty, IndexType):
        return np.dtype(f"i{ty.bitwidth // 8}")
    if isinstance(ty, types.Literal):
        ty = types.unliteral(ty)
    return np.dtype(bool) if isinstance(ty, types.Boolean) else np.dtype(ty.name)


# -- of a kind, and back ----------------------------------------------------------------------------------------------

def kind_of_type(t: Any) -> Any:
    """The kind of a device type's numbers (`number_rules`); None for what is no real number."""
    if isinstance(t, types.Boolean):
        return BOOL
    if isinstance(t, (WeakFloatLiteral, types.IntegerLiteral)):
        return t.literal_value
    if isinstance(t, IndexType):
        return Weak(t.bitwidth)
    if isinstance(t, WeakFloat64Type):
        return Weak.FLOAT
    if isinstance(t, NarrowFloatType):
        return t.dtype
    return np.dtype(t.name) if isinstance(t, (types.Integer, types.Float)) else None


def type_of_kind(kind: Any) -> Any:
    """The device type of a kind."""
    if isinstance(kind, np.dtype):
        return numba_type(kind)
    if isinstance(kind, int):
        return WeakIntLiteral(kind)
    if number_rules.is_coordinate(kind):
        return index_of(kind)
    return weak_float64


def index_of(kind: Weak) -> IndexType:
    """The device type of a kind of coordinates."""
    return index if kind is Weak.COORDINATE else wide_index


# --------------------------------------------------------------------------------------------------
# Dtypes in device code: conversions.

class DTypeType(nb.OwnCallable, types.Opaque):
    """A dtype in device code: calling it converts."""

    def __init__(self, target: types.Type):
        self.target = target
        super().__init__(f"dtype({target})")

    def get_call_type(self, context: TypingContext, args: tuple, kws: dict) -> Any:
        if len(args) != 1 or kws:
            return None
        return signature(self.target, types.unliteral(args[0]))

    def get_impl_key(self, sig: Signature) -> Any:
        return _conversion(sig)


def dtype_type(ty: types.Type) -> DTypeType | None:
    """The type of a dtype that device code names: also by NumPy's class (``np.float32``), as kernels of ``cuda.jit`` do."""
    if isinstance(ty, types.NumberClass):
        from numba.cuda.np.numpy_support import as_dtype

        return DTypeType(numba_type(as_dtype(ty.instance_type)))
    return ty if isinstance(ty, DTypeType) else None


nb.kept_as(DTypeType, None)
_conversions: dict[Any, Any] = {}


def _conversion(sig: Signature) -> Any:
    key = (sig.return_type, sig.args)
    if key not in _conversions:
        def convert(context: Context, builder: ir.IRBuilder, sig: Signature, args: Values) -> Any:
            return context.cast(builder, args[0], sig.args[0], sig.return_type)

        _conversions[key] = convert
        nb.target_context().insert_func_defn([(convert, convert, sig.args)])
    return _conversions[key]


nb.attributes_of(DTypeType)(lambda ty, attr: ty if attr == "type" else None)     # ``dtype.type(x)`` is how Python converts
nb.lowering_registry.lower_getattr(DTypeType, "type")(lambda context, builder, ty, value: value)
nb.typeof_impl.register(np.dtype)(lambda value, c: DTypeType(numba_type(value)))


# --------------------------------------------------------------------------------------------------
# Inline assembly from a text and operand types: the one place that knows how LLVM wants it.

_LETTER = {ir.IntType(32): "r", ir.IntType(64): "l", ir.IntType(16): "h", ir.FloatType(): "f", ir.DoubleType(): "d"}


def assembly(builder: ir.IRBuilder, text: str, results: list, operands: list, *, memory: bool = False,
             pure: bool = False, convergent: bool = False, tied: bool = False) -> list:
    """Emit ``text`` (operands ``$0`` ... : results first) and return its results.

    ``memory`` says that it reads or writes memory: the compiler then keeps it in order with other accesses. ``pure``
    says that its results depend on its operands alone: the compiler may then move, merge or drop it. ``convergent`` says
    that the threads of a warp execute it together: the compiler then never copies it into two branches. ``tied`` says
    that the first operands are the results' old values, in the same registers.
    """
    outputs = [f"={_LETTER[t]}" for t in results]
    inputs = [str(n) if tied and n < len(results) else _LETTER[v.type] for n, v in enumerate(operands)]
    constraints = ",".join(outputs + inputs + (["~{memory}"] if memory else []))
    returns = ir.VoidType() if not results else results[0] if len(results) == 1 else ir.LiteralStructType(results)
    function = ir.FunctionType(returns, [v.type for v in operands])
    value = builder.call(ir.InlineAsm(function, text, constraints, side_effect=not pure), operands,
                         attrs=("convergent",) if convergent else ())
    if not results:
        return []
    return [value] if len(results) == 1 else [builder.extract_value(value, n) for n in range(len(results))]


def plain(text: str, convergent: bool = False) -> Any:
    """The typer of an atom without operands or result that orders memory; ``convergent`` as for `assembly`."""
    def typer(context: TypingContext) -> Any:
        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
            assembly(b, text, [], [], memory=True, convergent=convergent)

        return signature(types.none), codegen

    return typer


def braces(first: int, count: int) -> str:
    """``{$4, $5}``: a vector operand."""
    return "{" + ", ".join(f"${n}" for n in range(first, first + count)) + "}"


# --------------------------------------------------------------------------------------------------
# Instructions that operators of numbers need: 16- and 8-bit floats (conversions, arithmetic), extrema, absolute values.
#
# LLVM's ``half`` is not used. Its loops of vectors end in NVVM's "unsupported operation", and a rounded product that is
# added to something becomes a fused multiply-add, which rounds once where Python's two operators round twice.

def bf16_from_f32(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """float32 to the bits of a bfloat16, round to nearest even: an instruction from sm_80 on, and a few before."""
    if tuple(nb.target_arch())[:2] < (8, 0):
        return _bf16_by_integers(builder, value)
    function = ir.FunctionType(ir.IntType(16), [ir.FloatType()])
    return builder.call(ir.InlineAsm(function, "cvt.rn.bf16.f32 $0, $1;", "=h,f"), [value])


def _bf16_by_integers(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """The upper half of the bits, one more where the lower half is over a half of it, or is a half and the upper one odd."""
    i16, i32 = ir.IntType(16), ir.IntType(32)
    word = builder.bitcast(value, i32)
    odd = builder.and_(builder.lshr(word, i32(16)), i32(1))
    upper = builder.lshr(builder.add(builder.add(word, i32(0x7FFF)), odd), i32(16))
    return builder.select(builder.fcmp_unordered("uno", value, value), i16(0x7FFF), builder.trunc(upper, i16))


def f16_from_f32(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """float32 to the bits of a float16, round to nearest even."""
    function = ir.FunctionType(ir.IntType(16), [ir.FloatType()])
    return builder.call(ir.InlineAsm(function, "cvt.rn.f16.f32 $0, $1;", "=h,f"), [value])


def f16_from_f64(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """float64 to the bits of a float16, rounded once to nearest even."""
    function = ir.FunctionType(ir.IntType(16), [ir.DoubleType()])
    return builder.call(ir.InlineAsm(function, "cvt.rn.f16.f64 $0, $1;", "=h,d"), [value])


def f32_from_f16(builder: ir.IRBuilder, bits: ir.Value) -> Any:
    """The bits of a float16 to float32."""
    function = ir.FunctionType(ir.FloatType(), [ir.IntType(16)])
    return builder.call(ir.InlineAsm(function, "cvt.f32.f16 $0, $1;", "=f,h"), [bits])


def f16_arithmetic(builder: ir.IRBuilder, name: str, a: ir.Value, b: ir.Value) -> Any:
    """``add``, ``sub`` or ``mul`` on the bits of two float16, rounded; never fused with another."""
    function = ir.FunctionType(ir.IntType(16), [ir.IntType(16)] * 2)
    return builder.call(ir.InlineAsm(function, f"{name}.rn.f16 $0, $1, $2;", "=h,h,h"), [a, b])


# -- 8-bit floats (sm_89+) ------------------------------------------------------------------------------------------------
# The instructions saturate. What is too large becomes what ml_dtypes makes of it: a NaN of float8_e4m3fn, which has no
# infinities, an infinity of float8_e5m2.

_FLOAT8_LIMITS = {"e4m3": (464.0, False, 0x7F), "e5m2": (61440.0, True, 0x7C)}  # limit, whether it is too large itself, bits


def f8_from_f32(builder: ir.IRBuilder, kind: str, value: ir.Value) -> Any:
    """float32 to the bits of an 8-bit float (``kind``: "e4m3" or "e5m2"), round to nearest even."""
    i8, i16, i32, f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
    text = f"cvt.rn.satfinite.{kind}x2.f32 $0, $2, $1;"                         # the second operand is the lower half
    pair = builder.call(ir.InlineAsm(ir.FunctionType(i16, [f32, f32]), text, "=h,f,f"), [value, ir.Constant(f32, 0.0)])
    limit, inclusive, bits = _FLOAT8_LIMITS[kind]
    word = builder.bitcast(value, i32)
    magnitude = builder.bitcast(builder.and_(word, i32(0x7FFFFFFF)), f32)
    is_large = builder.fcmp_ordered(">=" if inclusive else ">", magnitude, ir.Constant(f32, limit))
    sign = builder.trunc(builder.lshr(builder.and_(word, i32(0x80000000)), i32(24)), i8)
    return builder.select(is_large, builder.or_(sign, i8(bits)), builder.trunc(pair, i8))


def f32_from_f8(builder: ir.IRBuilder, kind: str, bits: ir.Value) -> Any:
    """The bits of an 8-bit float to float32."""
    i16 = ir.IntType(16)
    text = (f"{{ .reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.{kind}x2 pair, $1; mov.b32 {{low, high}}, pair; "
            "cvt.f32.f16 $0, low; }")
    return builder.call(ir.InlineAsm(ir.FunctionType(ir.FloatType(), [i16]), text, "=f,h"), [builder.zext(bits, i16)])


# -- two at once (float16: sm_80+; bfloat16: sm_90) ---------------------------------------------------------------------

def pair_arithmetic(builder: ir.IRBuilder, instruction: str, operands: list) -> Any:
    """An instruction on 16-bit floats in pairs; one that rounds is never fused with another."""
    i32 = ir.IntType(32)
    places = ", ".join(f"${n}" for n in range(len(operands) + 1))
    function = ir.FunctionType(i32, [i32] * len(operands))
    constraints = ",".join(["=r"] + ["r"] * len(operands))
    return builder.call(ir.InlineAsm(function, f"{instruction} {places};", constraints), operands)


# -- extrema and absolute values ------------------------------------------------------------------------------------------

#: The types that have the instruction, from compute capability 8.0 on, and the LLVM types of their registers.
NATIVE = {"f32": ir.FloatType(), "f16": ir.IntType(16), "bf16": ir.IntType(16)}


def extremum(builder: ir.IRBuilder, name: str, kind: str, a: ir.Value, b: ir.Value) -> Any:
    """``max`` or ``min`` of two numbers of a type of `NATIVE`, in one instruction (compute capability 8.0)."""
    return assembly(builder, f"{name}.NaN.{kind} $0, $1, $2;", [NATIVE[kind]], [a, b], pure=True)[0]


def selected(builder: ir.IRBuilder, name: str, a: ir.Value, b: ir.Value) -> Any:
    """The same of LLVM floats, by two comparisons and a select (of a float64: one for each half)."""
    better = builder.fcmp_ordered(">" if name == "max" else "<", a, b)
    return builder.select(builder.or_(better, builder.fcmp_unordered("uno", a, a)), a, b)


def absolute(builder: ir.IRBuilder, value: ir.Value) -> Any:
    """An integer's absolute value; of the most negative one itself, as in NumPy.

    PTX's ``abs`` does not say what it gives there, and ptxas takes its result for positive: ``abs(x) < 0`` becomes False
    (13.0). LLVM's select of ``x`` and ``-x`` becomes that ``abs`` too. So it is the larger of both.
    """
    bits, width = value.type, max(value.type.width, 32)
    wide = value if width == bits.width else builder.sext(value, ir.IntType(width))
    larger = assembly(builder, f"max.s{width} $0, $1, $2;", [wide.type], [wide, builder.neg(wide)], pure=True)[0]
    return larger if width == bits.width else builder.trunc(larger, bits)
