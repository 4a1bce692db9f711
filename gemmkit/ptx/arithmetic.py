"""Arithmetic: fused multiply-adds, functions in one instruction, division by a constant, clamps, 16-bit pairs, planes."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.lang.components import ComponentType
from gemmkit.lang.numba_hooks import Atom, Context, Signature, TypingContext, Values, atom, ir, signature, types
from gemmkit.lang.number_rules import scaled, terms
from gemmkit.lang.records import numbers_of, of_parts, part_of, part_types, planes_of
from gemmkit.lang.registers import call_function, to_and_fro
from gemmkit.lang.scalars import (
    DTypeType,
    NarrowFloatType,
    WeakFloat64Type,
    WeakFloatLiteral,
    WeakIntLiteral,
    assembly,
    index,
    kind_of_type,
    numba_type,
    numpy_dtype,
)
from gemmkit.ptx.registers import elements, from_registers, to_registers


def _typer(context: TypingContext, a: types.Type, b: types.Type, c: types.Type) -> Any:
    if not (a == b == c):
        return None
    if isinstance(a, types.Float):
        def fused(ctx: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
            return builder.fma(*v)

        return signature(a, a, b, c), fused
    if isinstance(a, types.Integer):
        return signature(a, a, b, c), lambda ctx, builder, s, v: builder.add(builder.mul(v[0], v[1]), v[2])
    if isinstance(a, NarrowFloatType):
        def narrow(ctx: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
            wide = [ctx.cast(builder, x, a, types.float32) for x in v]
            out = builder.fma(*wide)
            return ctx.cast(builder, out, types.float32, a)

        return signature(a, a, b, c), narrow
    return None


@atom(_typer)
def fma(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` rounded once (16-bit floats: in float32, then to 16 bits); integers wrap. All three of one type.

    The emulation computes in float64: it rounds a float64 product before the sum, too.
    """
    if type(c) is np.float32 and type(a) in _FLOATS and type(b) in _FLOATS:
        value = float(a) * float(b) + float(c)
        # NumPy warns of no such number, nor of infinities and NaN: it need not be told to be silent.
        if 1e-37 < abs(value) < 3e38 or value == 0 or value - value != 0:
            return np.float32(value)
    kind = np.asarray(c).dtype
    with np.errstate(all="ignore"):
        if kind.kind in "iu":
            wrapped = (int(a) * int(b) + int(c)) % (1 << 8 * kind.itemsize)
            return np.array(wrapped, f"u{kind.itemsize}").view(kind)[()]
        return _rounded(np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64), kind)[()]


def _type_fused(context: TypingContext, a: types.Type, b: types.Type, c: types.Type) -> Any:
    if not (a == b == c == types.float64):
        return None
    return signature(a, a, b, c), lambda ctx, builder, s, v: builder.fma(*v)


@atom(_type_fused)
def fused(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of finite float64, rounded once on the device and in the emulator: for code that rests on it.

    >>> float(fused(np.float64(2.0**53 + 2), np.float64(2.0**53 - 2), np.float64(-2.0**106)))
    -4.0
    """
    return np.float64(float(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))))


def _type_difference(context: TypingContext, a: types.Type, b: types.Type) -> Any:
    if a != b or not isinstance(a, types.Float):
        return None
    kind = f"f{a.bitwidth}"
    return signature(a, a, b), lambda ctx, builder, s, v: (
        assembly(builder, f"sub.rn.{kind} $0, $1, $2;", [v[0].type], list(v), pure=True)[0])


@atom(_type_difference)
def difference(a: Any, b: Any) -> Any:
    """``a - b`` of two float32 or float64, each rounded as it is: a product in ``a`` is not fused with the subtraction. What
    is the largest of rounded products is then 0 from itself, and not a rounding error that has no bound."""
    with np.errstate(all="ignore"):
        return a - b


def _rounded(value: np.ndarray, kind: np.dtype) -> np.ndarray:
    """A float64 result as the hardware gives it: 16-bit floats by way of float32. (Integers have wrapped already.)"""
    if value.dtype == kind:
        return value
    return value.astype(np.float32).astype(kind) if kind.itemsize == 2 else value.astype(kind)


def _type_outer_fma(context: TypingContext, c: types.Type, a: types.Type, b: types.Type, depth: types.Type) -> Any:
    if not all(isinstance(t, types.UniTuple) for t in (c, a, b)) or not a.dtype == b.dtype == c.dtype:
        return None
    k = int(depth.literal_value)
    rows, columns = a.count // k, b.count // k
    if rows * columns != c.count:
        return None
    if isinstance(c.dtype, types.Complex):
        return signature(c, c, a, b, depth), _complex_products(rows, columns, k)
    if (element := _typer(context, c.dtype, c.dtype, c.dtype)) is None:
        return None
    sig, multiply_add = element

    def codegen(ctx: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out, lhs, rhs = ([builder.extract_value(x, n) for n in range(t.count)] for x, t in zip(v, (c, a, b)))
        for step in range(k):
            for i, j in to_and_fro(rows, columns):
                n = i + j * rows
                out[n] = multiply_add(ctx, builder, sig, [lhs[step * rows + i], rhs[step * columns + j], out[n]])
        return ctx.make_tuple(builder, c, out)

    return signature(c, c, a, b, depth), codegen


def _complex_products(rows: int, columns: int, depth: int) -> Any:
    """The code of complex sums: four fused real products each. Of a column those with one part of B follow each other."""
    def codegen(ctx: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out, lhs, rhs = ([[builder.extract_value(builder.extract_value(x, n), part) for part in (0, 1)]
                          for n in range(t.count)] for x, t in zip(v[:3], s.args[:3]))
        minus = [builder.fsub(imaginary.type(-0.0), imaginary) for _, imaginary in rhs]
        for step in range(depth):
            for j in range(columns):
                real, imaginary = rhs[step * columns + j]
                for turn, (part, of_a, factor) in enumerate(((0, 0, real), (1, 1, real), (1, 0, imaginary),
                                                             (0, 1, minus[step * columns + j]))):
                    for i in (range(rows) if turn % 2 == 0 else range(rows - 1, -1, -1)):
                        sums = out[i + j * rows]
                        sums[part] = builder.fma(lhs[step * rows + i][of_a], factor, sums[part])
        made = []
        for real, imaginary in out:
            number = ctx.make_complex(builder, s.return_type.dtype)
            number.real, number.imag = real, imaginary
            made.append(number._getvalue())
        return ctx.make_tuple(builder, s.return_type, made)

    return codegen


@atom(_type_outer_fma)
def outer_fma(c: tuple, a: tuple, b: tuple, depth: int) -> tuple:
    """``c[i, j] += a[k, i] * b[k, j]`` for k < depth, all of one type: `control.outer` of `fma`. Of complex numbers each of
    the four real products is fused with the sum."""
    kind = c[0].dtype
    wide = kind if kind.kind in "iu" else np.dtype(np.complex128 if kind.kind == "c" else np.float64)
    out = np.array(c, kind).reshape(len(b) // depth, len(a) // depth)
    lhs = np.array(a, kind).astype(wide).reshape(depth, 1, -1)
    rhs = np.array(b, kind).astype(wide).reshape(depth, -1, 1)
    with np.errstate(all="ignore"):
        for step in range(depth):
            out = _rounded(rhs[step] * lhs[step] + out, kind)
    return tuple(out.reshape(-1))


# --------------------------------------------------------------------------------------------------
# Functions of a float32 in one instruction of the special function units, and the maximum that skips NaN.
#
# | atom | instruction | error (PTX ISA) | instead of |
# |---|---|---|---|
# | `exp2` | ex2.approx.ftz.f32 | 2 ulp; denormals are 0 | libdevice's, three instructions longer |
# | `log2` | lg2.approx.ftz.f32 | 2^-22 absolute near 1, else 2^-22 relative | libdevice's, some twenty instructions |
# | `reciprocal` | rcp.approx.ftz.f32 | 1 ulp | a division, some eight |
# | `tanh` | tanh.approx.f32 | 2^-11 relative | libdevice's, some twenty with a branch |
# | `maximum` | max.f32 | none; of a number and a NaN the number | Python's ``max``: a comparison and a select |
#
# The arguments may be any real numbers; they are converted to float32.

F32 = np.float32
_FLOATS = frozenset((F32, float))       # what the emulator computes with at once; a constant is a float of Python's


def _of_floats(name: str, text: str, count: int, compute: Callable[..., Any], doc: str, low: float = 1.0,
               high: float = 100.0, also: float = 1.0) -> Atom:
    """``low``, ``high``: from one to the other, and at ``also``, arguments set off no warning, and NumPy need not be told to
    be silent. That takes longer than to compute, and attention has this for every score (a hidden one is a constant)."""

    def typer(context: TypingContext, *args: types.Type) -> Any:
        if len(args) != count or any(kind_of_type(t) is None or isinstance(t, types.Complex) for t in args):
            return None

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
            given = [c.cast(b, x, t, types.float32) for x, t in zip(v, args)]
            return assembly(b, text, [ir.FloatType()], given, pure=True)[0]

        return signature(types.float32, *args), codegen

    def emulate(*given: Any) -> Any:
        for x in given:
            if type(x) not in _FLOATS or not (low <= x <= high or x == also):
                break
        else:
            if type(found := compute(*given)) is F32:
                return found
        with np.errstate(all="ignore"):
            return F32(compute(*[F32(x) for x in given]))

    return Atom(name, typer, emulate, doc)


exp2 = _of_floats("exp2", "ex2.approx.ftz.f32 $0, $1;", 1, np.exp2, "2 to the power of x.", low=-100.0,
                  also=-np.inf)                                # a score that a mask hides
log2 = _of_floats("log2", "lg2.approx.ftz.f32 $0, $1;", 1, np.log2, "The logarithm to the base 2; of 0 it is -inf.")
reciprocal = _of_floats("reciprocal", "rcp.approx.ftz.f32 $0, $1;", 1, np.reciprocal, "1 / x.")
tanh = _of_floats("tanh", "tanh.approx.f32 $0, $1;", 1, np.tanh, "The hyperbolic tangent.", low=-100.0)
maximum = _of_floats("maximum", "max.f32 $0, $1, $2;", 2, np.fmax, "The larger of two; of a number and a NaN the number.",
                     low=-3e38, high=3e38, also=-np.inf)


# --------------------------------------------------------------------------------------------------
# Division by a number that stays the same through a kernel: a multiplication and a shift.
#
# For 0 <= n < 2**31 and d >= 1, with l = ceil(log2 d) and m = ceil(2**(31 + l) / d): n // d == (n * m) >> (31 + l). (m d
# exceeds 2**(31 + l) by less than d <= 2**l, so the quotient's error is below n / 2**31 / d < 1 / d.) m fits into 32
# bits.

i16, i32, i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


def divisor_reciprocal(d: int) -> tuple[np.uint32, int]:
    """The multiplier and the shift of a divisor from 1 to 2**31 - 1.

    >>> [int(divided(n, *divisor_reciprocal(7))) for n in (0, 6, 7, 2**31 - 1)] == [0, 0, 1, (2**31 - 1) // 7]
    True
    """
    shift = 31 + (d - 1).bit_length()
    return np.uint32(-(-(1 << shift) // d)), shift


def _type_divided(context: TypingContext, n: types.Type, multiplier: types.Type, shift: types.Type) -> Any:
    if not all(isinstance(t, types.Integer) for t in (n, multiplier, shift)):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        product = b.mul(b.zext(c.cast(b, v[0], n, index), i64), b.zext(c.cast(b, v[1], multiplier, types.uint32), i64))
        return b.trunc(b.lshr(product, b.zext(c.cast(b, v[2], shift, index), i64)), i32)

    return signature(index, n, multiplier, shift), codegen


@atom(_type_divided)
def divided(n: int, multiplier: int, shift: int) -> int:
    """n // d of a coordinate n, by d's `reciprocal`."""
    return (int(n) * int(multiplier)) >> int(shift)


# --------------------------------------------------------------------------------------------------
# Conversions that clamp to what a dtype holds, and round floats to the nearest integer.

f32, f64 = ir.FloatType(), ir.DoubleType()
REAL = "Saturate takes real numbers; it got {}"


def _type_saturate(context: TypingContext, dtype: types.Type, value: types.Type) -> Any:
    if not isinstance(dtype, DTypeType):
        return None
    given, target = _held(value), dtype.target
    wanted = numpy_dtype(target)
    if not isinstance(given, (types.Integer, types.Boolean, types.Float)):
        raise TypeError(REAL.format(value))
    is_float = isinstance(given, types.Float)
    convert = _to_float if wanted.kind not in "iu" else _from_float if is_float else _from_integer
    return signature(target, dtype, value), lambda c, b, s, v: (
        convert(c, b, c.cast(b, v[1], value, given), given, target, wanted))


def _held(ty: types.Type) -> Any:
    """The type that a value is looked at in: float32 for the narrow floats, and that of what a weak number is by itself."""
    if isinstance(ty, NarrowFloatType):
        return types.float32
    if isinstance(ty, (WeakFloatLiteral, WeakFloat64Type)):
        return types.float64
    return index if isinstance(ty, WeakIntLiteral) and ty.bitwidth == 32 else ty


def _from_float(c: Context, b: ir.IRBuilder, value: ir.Value, given: types.Type, target: types.Type,
                wanted: np.dtype) -> Any:
    """One instruction: it rounds to nearest even, and clamps to the destination's range. NaN becomes 0."""
    bits = 8 * wanted.itemsize
    source = "f64" if given == types.float64 else "f32"
    kind = "s" if wanted.kind == "i" else "u"
    held = i64 if bits == 64 else i32
    (out,) = assembly(b, f"cvt.rni.sat.{kind}{bits}.{source} $0, $1;", [held], [value], pure=True)
    if bits == 64 or source == "f64":                     # there the instruction makes something else of NaN
        out = b.select(b.fcmp_unordered("uno", value, value), ir.Constant(held, 0), out)
    return out if bits >= 32 else b.trunc(out, ir.IntType(bits))


def _from_integer(c: Context, b: ir.IRBuilder, value: ir.Value, given: types.Type, target: types.Type,
                  wanted: np.dtype) -> Any:
    """A minimum and a maximum, where they are needed."""
    if isinstance(given, types.Boolean):
        return b.zext(value, ir.IntType(8 * wanted.itemsize))
    limits, own = np.iinfo(wanted), np.iinfo(numpy_dtype(given))
    for limit, is_needed, comparison in ((limits.max, own.max > limits.max, ">"), (limits.min, own.min < limits.min, "<")):
        if is_needed:
            compare = b.icmp_signed if given.signed else b.icmp_unsigned
            constant = ir.Constant(value.type, int(limit))
            value = b.select(compare(comparison, value, constant), constant, value)
    return c.cast(b, value, given, target)


def _to_float(c: Context, b: ir.IRBuilder, value: ir.Value, given: types.Type, target: types.Type, wanted: np.dtype) -> Any:
    """Beyond the largest finite number there is nothing; NaN, which is neither above nor below, stays."""
    if not isinstance(given, types.Float):
        wide = types.float64 if given.bitwidth == 64 else types.float32
        value, given = c.cast(b, value, given, wide), wide
    limit = float(ml_dtypes.finfo(wanted).max)
    if given == types.float64 or wanted.itemsize < 8:
        for end, comparison in ((limit, ">"), (-limit, "<")):
            constant = ir.Constant(value.type, end)
            value = b.select(b.fcmp_ordered(comparison, value, constant), constant, value)
    return c.cast(b, value, given, target)


@atom(_type_saturate)
def saturate(dtype: np.dtype, value: Any) -> Any:
    """``value`` as ``dtype``, clamped to what it holds. Floats become the nearest integers (ties to even), and NaN 0.

    >>> [int(saturate(np.dtype("int8"), x)) for x in (2.5, 3.5, -1e9, math.inf, math.nan, 200)]
    [2, 4, -128, 127, 0, 127]
    """
    kind = np.asarray(value).dtype
    if kind.kind == "c" or kind.names is not None or kind.kind == "O":
        raise TypeError(REAL.format(kind))
    is_float = kind.kind not in "iub"
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        x = float(value) if is_float else int(value)
        if math.isnan(x):
            return dtype.type(0)
        return dtype.type(min(max(round(x) if math.isfinite(x) else x, int(limits.min)), int(limits.max)))
    wide = np.float64 if kind.itemsize == 8 else np.float32
    limit, given = float(ml_dtypes.finfo(dtype).max), wide(value)
    with np.errstate(all="ignore"):
        clamped = wide(limit) if given > limit else wide(-limit) if given < -limit else given
        return np.asarray(clamped).astype(dtype)[()]


# --------------------------------------------------------------------------------------------------
# Arithmetic of 16-bit floats as the hardware has it: one element, or a pair in one register.
#
# ``+`` and ``*`` of device code compute in float32 and round back. These are single instructions: `hadd`, `hmul`, `hfma`
# of elements, `hadd2`, `hmul2`, `hfma2` of pairs (CUDA's names).

F16 = np.dtype(np.float16)


def _half(name: str, operation: str, operands: int, pairs: bool, compute: Any, doc: str) -> Atom:
    text = f"{operation}.rn.f16{'x2' if pairs else ''} {', '.join(f'${n}' for n in range(operands + 1))};"

    def typer(context: TypingContext, *args: types.Type) -> Any:
        element = numba_type(F16)
        wanted = types.UniTuple(element, 2) if pairs else element
        if len(args) != operands or any(arg != wanted for arg in args):
            return None

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
            if not pairs:
                return assembly(b, text, [i16], list(v), pure=True)[0]
            given = [to_registers(b, elements(b, value, 2))[0] for value in v]
            out = from_registers(b, assembly(b, text, [i32], given, pure=True), i16)
            return c.make_tuple(b, wanted, out)

        return signature(wanted, *args), codegen

    def emulate(*args: Any) -> Any:
        if any(len(arg) != 2 for arg in args) if pairs else False:
            raise TypeError(f"{name} is of pairs of float16")
        wide = [np.asarray(arg, np.float64) for arg in args]            # exact but for sums of more than 53 bits
        with np.errstate(all="ignore"):
            out = compute(*wide).astype(F16)
        return tuple(out) if pairs else out[()]

    return Atom(name, typer, emulate, doc)


hadd = _half("hadd", "add", 2, False, lambda a, b: a + b, "``a + b`` of float16, in one instruction.")
hmul = _half("hmul", "mul", 2, False, lambda a, b: a * b, "``a * b`` of float16, in one instruction.")
hfma = _half("hfma", "fma", 3, False, lambda a, b, c: a * b + c, "``a * b + c`` of float16, rounded once.")
hadd2 = _half("hadd2", "add", 2, True, lambda a, b: a + b, "Sums of two pairs of float16.")
hmul2 = _half("hmul2", "mul", 2, True, lambda a, b: a * b, "Products of two pairs of float16.")
hfma2 = _half("hfma2", "fma", 3, True, lambda a, b, c: a * b + c, "``a * b + c`` of pairs of float16, each rounded once.")


# --------------------------------------------------------------------------------------------------
# The product of an algebra's numbers in planes: a real operation for every entry of its multiplication table.

def _negative(context: Context, builder: ir.IRBuilder, kind: types.Type, values: list) -> list:
    """The negatives of a plane's values; of narrow floats a register at a time, as instructions take them."""
    if isinstance(kind, types.Float):
        return [builder.fsub(ir.Constant(v.type, -0.0), v) for v in values]
    if isinstance(kind, NarrowFloatType) and len(values) * kind.bits.width % 32 == 0:
        signs = ir.Constant(i32, 0x80008000 if kind.bits.width == 16 else 0x80808080)
        return from_registers(builder, [builder.xor(word, signs) for word in to_registers(builder, values)], kind.bits)
    inner = context.typing_context.resolve_function_type(operator.neg, (kind,), {})
    function = context.get_function(context.typing_context.resolve_value_type(operator.neg), inner)
    return [context.cast(builder, function(builder, [v]), inner.return_type, kind) for v in values]


def _times(context: Context, builder: ir.IRBuilder, kind: types.Type, values: list, factor: int) -> list:
    if factor == 1:
        return values
    if factor == -1:
        return _negative(context, builder, kind, values)
    typing = context.typing_context
    inner = typing.resolve_function_type(operator.mul, (kind, kind), {})
    function = context.get_function(typing.resolve_value_type(operator.mul), inner)
    weight = context.cast(builder, context.get_constant(types.float64, float(factor)), types.float64, kind)
    out = []
    for v in values:
        given = [context.cast(builder, x, kind, to) for x, to in zip((v, weight), inner.args)]
        out.append(context.cast(builder, function(builder, given), inner.return_type, kind))
    return out


def _algebra_typer(context: TypingContext, algebra: types.Type, a: types.Type, b: types.Type, c: types.Type) -> Any:
    if not isinstance(algebra, ComponentType) or not all(isinstance(t, types.UniTuple) for t in (a, b, c)):
        return None
    kinds = [part_types(t.dtype) for t in (a, b, c)]
    if None in kinds:
        return None
    planes = [types.UniTuple(kind[0], t.count) for kind, t in zip(kinds, (a, b, c))]    # type: ignore[index]
    base = context.resolve_getattr(algebra, "base")
    method = context.resolve_getattr(base, "mma")
    inner = context.resolve_function_type(method, tuple(planes), {})
    if inner is None:
        return None
    entries = terms(algebra.skeleton.table)

    def codegen(ctx: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        operand = ctx.get_getattr(algebra, "base")(ctx, builder, algebra, v[0], "base")
        lhs, rhs, out = ([[part_of(builder, ty.dtype, builder.extract_value(value, n), p) for n in range(ty.count)]
                          for p in range(len(kind))] for value, ty, kind in zip(v[1:], (a, b, c), kinds))  # type: ignore[arg-type]
        sums: list = [ctx.make_tuple(builder, planes[2], plane) for plane in out]
        weighted: dict = {}
        for i, j, k, factor in entries:
            if (i, factor) not in weighted:
                plane = _times(ctx, builder, planes[0].dtype, lhs[i], factor)
                weighted[i, factor] = ctx.make_tuple(builder, planes[0], plane)
            given = [weighted[i, factor], ctx.make_tuple(builder, planes[1], rhs[j]), sums[k]]
            given = [ctx.cast(builder, x, t, to) for x, t, to in zip(given, planes, inner.args)]
            value = call_function(ctx, builder, method, operand, inner, given)
            sums[k] = ctx.cast(builder, value, inner.return_type, planes[2])
        numbers = []
        for n in range(c.count):
            parts = [builder.extract_value(plane, n) for plane in sums]
            numbers.append(of_parts(ctx, builder, c.dtype, parts))
        return ctx.make_tuple(builder, c, numbers)

    return signature(c, algebra, a, b, c), codegen


@atom(_algebra_typer)
def multiply_planes(algebra: Any, a: tuple, b: tuple, c: tuple) -> tuple:
    """``c_k += table[i][j][k] a_i b_j`` on fragments of numbers, each term one operation of the algebra's base."""
    lhs, rhs, sums = planes_of(a), planes_of(b), list(planes_of(c))
    for i, j, k, factor in terms(algebra.table):
        weighted = tuple(scaled(x, factor if abs(factor) == 1 else type(x)(factor)) for x in lhs[i])
        sums[k] = algebra.base.mma(weighted, rhs[j], sums[k])
    return numbers_of(algebra.fragment_c.dtype, tuple(sums))


def _type_terms(context: TypingContext, algebra: types.Type, sums: types.Type, function: types.Type,
                *args: types.Type) -> Any:
    if not isinstance(algebra, ComponentType) or not isinstance(sums, types.UniTuple):
        return None
    steps = list(_steps(algebra.skeleton, sums.count))
    flags = {(negative, first): (types.literal(negative), types.literal(first)) for *_, negative, first in steps}
    inner = {key: context.resolve_function_type(function, (sums.dtype, index, index, index, *literals, *args), {})
             for key, literals in flags.items()}
    if not inner or any(sig is None or sig.return_type != sums.dtype for sig in inner.values()):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out = [b.extract_value(v[1], n) for n in range(sums.count)]
        for at, m, i, j, negative, first in steps:
            sig, literals = inner[negative, first], flags[negative, first]
            given = [(out[at], sums.dtype), *((i32(n), index) for n in (m, i, j)),
                     *((ir.Constant(ir.IntType(1), literal.literal_value), literal) for literal in literals),
                     *zip(v[3:], args)]
            values = [c.cast(b, value, ty, to) for (value, ty), to in zip(given, sig.args)]
            out[at] = call_function(c, b, function, v[2], sig, values)
        return c.make_tuple(b, sums, out)

    return signature(sums, algebra, sums, function, *args), codegen


def _steps(algebra: Any, count: int) -> Any:
    """(sum, fragment, i, j, whether negative, whether the sum's first) of every product of a k-block.

    The parts of A that are in the fewest products come first: a register that is used once ptxas makes where it is used, and
    where that is in the midst of a group, the group ends there.
    """
    seen = set()
    uses = Counter(i for i, *_ in terms(algebra.table))
    entries = sorted(terms(algebra.table), key=lambda entry: uses[entry[0]])
    for m in range(count // algebra.parts):
        for i, j, k, factor in entries:
            at = m * algebra.parts + k
            yield at, m, i, j, factor < 0, at not in seen
            seen.add(at)


@atom(_type_terms)
def accumulate_terms(algebra: Any, sums: tuple, function: Any, *args: Any) -> tuple:
    """Every product that the table asks for, of the planes of several fragments: ``sums`` holds those of the first
    fragment, of the second, ...; the table's coefficients are +1 and -1.

    ``sum = function(sum, m, i, j, negative, first, *args)`` adds the product of A's plane i (rows of fragment m) and B's
    plane j, or subtracts it if ``negative``; ``first`` says that it is the first of this sum. Both are compile-time values.
    """
    out = list(sums)
    for at, m, i, j, negative, first in _steps(algebra, len(sums)):
        out[at] = function(out[at], m, i, j, negative, first, *args)
    return tuple(out)
