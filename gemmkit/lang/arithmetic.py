"""Arithmetic of scalars in device code: which type a result has, by NumPy's rules, and how it is computed.

The rules are those of `gemmkit.lang.number_rules`; this module registers them with Numba when it is imported. Those for
two of Numba's own numbers hold in gemmkit's functions alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from gemmkit.lang import complex, number_rules
from gemmkit.lang import numba_hooks as nb
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, ir, operation, signature, types
from gemmkit.lang.number_rules import BOOL
from gemmkit.lang.scalars import (
    IndexType,
    NarrowFloatType,
    WeakFloat64Type,
    WeakFloatLiteral,
    WeakIntLiteral,
    absolute,
    bfloat16,
    extremum,
    f16_arithmetic,
    float16,
    i1,
    i32,
    index,
    index_of,
    kind_of_type,
    numba_type,
    number_constant,
    selected,
    type_of_kind,
    weak_float64,
    wide_index,
)

# --------------------------------------------------------------------------------------------------
# LLVM code of integers that wrap around in their own width, with NumPy's results where hardware has none: a division by
# zero is 0, and a shift by the width or more leaves nothing but the sign.

_COMPARE = {"<": "<", "<=": "<=", ">": ">", ">=": ">=", "==": "==", "!=": "!="}
_HELD_BY_SMALLER = {"<": True, "<=": True, ">": False, ">=": False, "==": False, "!=": True}


def emit(builder: ir.IRBuilder, op: str, a: ir.Value, b: ir.Value, signed: bool, literal: int | None = None) -> Any:
    """``a op b`` of two integers of one LLVM type; ``literal`` is b's value where it is known."""
    plain = _PLAIN.get(op)
    if plain is not None:
        return plain(builder, a, b)
    if op in ("max", "min"):
        compare = builder.icmp_signed if signed else builder.icmp_unsigned
        return builder.select(compare(">" if op == "max" else "<", a, b), a, b)
    if op in ("<<", ">>"):
        return _shifted(builder, op, a, b, signed, literal)
    if op == "**":
        return _power(builder, a, b, literal)
    return _divided(builder, op, a, b, signed, literal)


_PLAIN = {"+": lambda b, x, y: b.add(x, y), "-": lambda b, x, y: b.sub(x, y), "*": lambda b, x, y: b.mul(x, y),
          "&": lambda b, x, y: b.and_(x, y), "|": lambda b, x, y: b.or_(x, y), "^": lambda b, x, y: b.xor(x, y)}


def emit_bool(builder: ir.IRBuilder, op: str, a: ir.Value, b: ir.Value) -> Any:
    """Of booleans: + is or, * is and."""
    if op in ("+", "|", "max"):
        return builder.or_(a, b)
    return builder.xor(a, b) if op == "^" else builder.and_(a, b)


def _divided(builder: ir.IRBuilder, op: str, a: ir.Value, b: ir.Value, signed: bool, literal: int | None) -> Any:
    kind = a.type
    zero, one = ir.Constant(kind, 0), ir.Constant(kind, 1)
    if literal == 0:
        return zero
    if not signed:
        if literal is not None:
            return builder.udiv(a, b) if op == "//" else builder.urem(a, b)
        is_zero = builder.icmp_unsigned("==", b, zero)
        by = builder.select(is_zero, one, b)
        out = builder.udiv(a, by) if op == "//" else builder.urem(a, by)
        return builder.select(is_zero, zero, out)
    if literal is not None and literal > 0 and literal & (literal - 1) == 0:
        shift = literal.bit_length() - 1
        return builder.ashr(a, ir.Constant(kind, shift)) if op == "//" else builder.and_(a, ir.Constant(kind, literal - 1))
    # the smallest number divided by -1 has no result in hardware; NumPy's wraps around
    negated = builder.icmp_signed("==", b, ir.Constant(kind, -1))
    is_zero = builder.icmp_signed("==", b, zero)
    by = builder.select(builder.or_(negated, is_zero), one, b)
    quotient = builder.sdiv(a, by)
    remainder = builder.sub(a, builder.mul(quotient, by))
    adjust = builder.and_(builder.icmp_signed("!=", remainder, zero),
                          builder.icmp_signed("<", builder.xor(remainder, by), zero))
    if op == "//":
        out = builder.sub(quotient, builder.zext(adjust, kind))
        out = builder.select(negated, builder.neg(a), out)
    else:
        out = builder.select(adjust, builder.add(remainder, by), remainder)
    return builder.select(is_zero, zero, out)


def _shifted(builder: ir.IRBuilder, op: str, a: ir.Value, b: ir.Value, signed: bool, literal: int | None) -> Any:
    kind = a.type
    zero, most = ir.Constant(kind, 0), ir.Constant(kind, kind.width - 1)
    arithmetic = op == ">>" and signed
    if literal is not None:
        if not 0 <= literal < kind.width:
            return builder.ashr(a, most) if arithmetic else zero
        return builder.shl(a, b) if op == "<<" else builder.ashr(a, b) if signed else builder.lshr(a, b)
    outside = builder.icmp_unsigned(">", b, most)              # negative counts, too
    if arithmetic:
        return builder.ashr(a, builder.select(outside, most, b))
    count = builder.select(outside, zero, b)
    out = builder.shl(a, count) if op == "<<" else builder.lshr(a, count)
    return builder.select(outside, zero, out)


def _power(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, literal: int | None) -> Any:
    """By squaring."""
    kind = a.type
    one, zero = ir.Constant(kind, 1), ir.Constant(kind, 0)
    if literal is not None:
        out = one
        while literal:
            if literal & 1:
                out = a if out is one else builder.mul(out, a)
            literal >>= 1
            a = builder.mul(a, a) if literal else a
        return out
    before = builder.block
    header, body, after = (builder.append_basic_block(f"power_{name}") for name in ("header", "body", "after"))
    builder.branch(header)
    builder.position_at_end(header)
    exponent, base, product = (builder.phi(kind) for _ in range(3))
    for value, start in ((exponent, b), (base, a), (product, one)):
        value.add_incoming(start, before)
    builder.cbranch(builder.icmp_unsigned("!=", exponent, zero), body, after)
    builder.position_at_end(body)
    is_odd = builder.icmp_unsigned("!=", builder.and_(exponent, one), zero)
    multiplied = builder.select(is_odd, builder.mul(product, base), product)
    further = (builder.lshr(exponent, one), builder.mul(base, base), multiplied)
    for value, then in zip((exponent, base, product), further):
        value.add_incoming(then, body)
    builder.branch(header)
    builder.position_at_end(after)
    return product


def compare(builder: ir.IRBuilder, op: str, a: ir.Value, b: ir.Value, a_signed: bool, b_signed: bool) -> Any:
    """A comparison of integers of any widths and signs, exact as in Python."""
    width = max(a.type.width, b.type.width)
    if a_signed != b_signed and (a if b_signed else b).type.width >= width and width < 64:
        width = 64                                             # where both fit
    kind = ir.IntType(width)
    wide = [_extended(builder, x, kind, signed) for x, signed in ((a, a_signed), (b, b_signed))]
    unsigned_fits = a_signed == b_signed or (a if b_signed else b).type.width < width
    if unsigned_fits:
        ask = builder.icmp_signed if a_signed or b_signed else builder.icmp_unsigned
        return ask(_COMPARE[op], *wide)
    # a uint64 and a signed number: a negative one is the smaller
    smaller = _HELD_BY_SMALLER[op] if a_signed or op in ("==", "!=") else not _HELD_BY_SMALLER[op]
    negative = builder.icmp_signed("<", wide[0 if a_signed else 1], ir.Constant(kind, 0))
    return builder.select(negative, ir.Constant(ir.IntType(1), smaller), builder.icmp_unsigned(_COMPARE[op], *wide))


def _extended(builder: ir.IRBuilder, value: ir.Value, kind: ir.Type, signed: bool) -> Any:
    if value.type.width == kind.width:
        return value
    return builder.sext(value, kind) if signed else builder.zext(value, kind)


def _index_pair(a: types.Type, b: types.Type) -> bool:
    """Both coordinates, or a coordinate and a constant."""
    ours = isinstance(a, IndexType) + isinstance(b, IndexType)
    literal = isinstance(a, types.IntegerLiteral) + isinstance(b, types.IntegerLiteral)
    return ours == 2 or (ours == 1 and literal == 1)


def _floordiv(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> Any:
    quotient, adjust = _division(builder, a, b)
    return builder.sub(quotient, builder.zext(adjust, quotient.type))


def _mod(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> Any:
    quotient, adjust = _division(builder, a, b)
    remainder = builder.sub(a, builder.mul(quotient, b))
    return builder.select(adjust, builder.add(remainder, b), remainder)


def _division(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> Any:
    """The truncated quotient, and whether Python's (floored) is one less."""
    quotient = builder.sdiv(a, b)
    remainder = builder.sub(a, builder.mul(quotient, b))
    zero = ir.Constant(a.type, 0)
    signs_differ = builder.icmp_signed("<", builder.xor(a, b), zero)
    return quotient, builder.and_(builder.icmp_signed("!=", remainder, zero), signs_differ)


def _power_of_two(t: types.Type) -> int | None:
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
_NAMES: dict[Callable[..., Any], str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.and_: "&", operator.or_: "|", operator.xor: "^", operator.lshift: "<<",
    operator.rshift: ">>", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
    operator.ne: "!=", max: "max", min: "min"}
_COMPARISON = {op: name for op, name in _NAMES.items() if name in number_rules.COMPARISONS}


def _fold(op: Callable, a: types.Type, b: types.Type) -> Any:
    """Two constants: the result is a constant again. Floats have infinities and NaN, as at run time; TypeError where Python
    raises for integers."""
    weak = (WeakIntLiteral, WeakFloatLiteral)
    if not (isinstance(a, weak) and isinstance(b, weak)):
        return None
    x, y = a.literal_value, b.literal_value
    of_float = isinstance(x, float) or isinstance(y, float)
    try:
        with np.errstate(all="ignore"):
            value = op(np.float64(x), np.float64(y)).item() if of_float and op in _RAISES else op(x, y)
    except TypeError:
        return None
    except (ArithmeticError, ValueError) as error:
        raise TypeError(f"{x} {_NAMES[op]} {y}: {error}") from None
    if op in (max, min) and (x != x or y != y):
        value = math.nan
    if isinstance(value, bool):
        return signature(types.literal(value), a, b), lambda c, builder, s, v: ir.Constant(i1, value)
    result: Any = {int: WeakIntLiteral, float: WeakFloatLiteral}[type(value + 0)](value)
    return signature(result, a, b), lambda c, builder, s, v: c.get_constant_generic(builder, result, value)


_RAISES = operator.truediv, operator.floordiv, operator.mod, operator.pow      # of Python's own floats


def _register_binary(op: Callable, key: Callable) -> None:
    """Type ``key`` (``+`` or ``+=``) by the rules of ``op`` (``+``)."""
    @operation(key)
    def typer(context: TypingContext, *args: types.Type) -> Any:
        return of_two(context, op, *args) if len(args) == 2 else None


def of_two(context: TypingContext, op: Callable, a: types.Type, b: types.Type) -> Any:
    """Signature and code of an operator on two numbers; None for what is not ours, TypeError for what the rules refuse."""
    folded = _fold(op, a, b)
    if folded is not None:
        return folded
    if complex.is_complex(a) or complex.is_complex(b):
        return complex.of_two(context, op, _NAMES[op], a, b)
    kinds = kind_of_type(a), kind_of_type(b)
    if any(kind is None for kind in kinds):                    # not ``None in kinds``: float64's dtype equals None
        return None
    if not any(isinstance(t, (IndexType, WeakIntLiteral, WeakFloatLiteral, WeakFloat64Type, NarrowFloatType))
               for t in (a, b)) and not nb.compiles_ours():
        return None
    name = _NAMES[op]
    if op in _COMPARISON and all(number_rules.is_integer(k) or k == BOOL for k in kinds):
        return _integer_comparison(name, a, b, *kinds)
    kind = number_rules.result(name, *kinds)
    if number_rules.is_coordinate(kind):
        return _index_operation(op, index_of(kind), a, b)
    if isinstance(a, NarrowFloatType) or isinstance(b, NarrowFloatType):
        return _narrow_operation(context, op, a, b, type_of_kind(kind))
    if kind == BOOL and op not in _COMPARISON:
        return (signature(types.boolean, types.boolean, types.boolean),
                lambda c, builder, s, v: emit_bool(builder, name, *v))
    if number_rules.is_integer(kind):
        return _integer_operation(name, kind, a, b, kinds[1])
    # what Numba computes in a float type: of comparisons the one that both are converted to
    strong = type_of_kind(number_rules.common(*kinds) if op in _COMPARISON else kind)
    if op in (max, min):
        return _float_extremum(name, strong, a, b)
    if name in ("//", "%"):
        return _float_division(context, name, strong, a, b)
    return _strong_operation(context, op, strong, a, b)


def _integer_operation(name: str, kind: np.dtype, a: types.Type, b: types.Type, of_b: Any) -> Any:
    """Both operands in the result's type; the code may depend on a constant, which stays in the signature."""
    ty, signed = numba_type(kind), kind.kind == "i"
    literal = of_b if isinstance(of_b, int) else None

    def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        left, right = (c.cast(builder, x, t, ty) for x, t in zip(v, s.args))
        return emit(builder, name, left, right, signed, literal)

    return signature(ty, a, b), codegen


def _integer_comparison(name: str, a: types.Type, b: types.Type, left: Any, right: Any) -> Any:
    ty = wide_index if wide_index in (a, b) else index
    limit = 1 << ty.bitwidth - 1
    if _index_pair(a, b) and all(-limit <= k < limit for k in (left, right) if isinstance(k, int)):
        return signature(types.boolean, ty, ty), lambda c, builder, s, v: builder.icmp_signed(name, v[0], v[1])
    if any(isinstance(k, int) and not -2**63 <= k < 2**64 for k in (left, right)):
        raise TypeError(f"{left if isinstance(left, int) else right} in a comparison; 64 bits do not hold it")

    def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        values, signs = [], []
        for x, t, kind in zip(v, s.args, (left, right)):
            if isinstance(kind, int):
                wide = types.int64 if kind < 2**63 else types.uint64
                x, signed = number_constant(c, builder, wide, kind), wide.signed
            else:
                signed = isinstance(t, types.Integer) and t.signed
                x = builder.zext(x, ir.IntType(8)) if isinstance(t, types.Boolean) else x
            values.append(x)
            signs.append(signed)
        return compare(builder, name, *values, *signs)

    return signature(types.boolean, a, b), codegen


_INSTRUCTION = {types.float32: "f32", float16: "f16", bfloat16: "bf16"}


def _float_extremum(name: str, ty: types.Type, a: types.Type, b: types.Type) -> Any:
    """NaN where either is."""
    compute = types.float64 if ty == weak_float64 else ty

    def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        values = [c.cast(builder, x, t, compute) for x, t in zip(v, s.args)]
        instruction = _INSTRUCTION.get(compute)
        if instruction is not None and tuple(nb.target_arch())[:2] >= (8, 0):
            return extremum(builder, name, instruction, *values)
        if not isinstance(compute, NarrowFloatType):
            return selected(builder, name, *values)
        wide = [c.cast(builder, x, compute, types.float32) for x in values]
        return c.cast(builder, selected(builder, name, *wide), types.float32, compute)

    return signature(ty, a, b), codegen


def _float_division(context: TypingContext, name: str, ty: types.Type, a: types.Type, b: types.Type) -> Any:
    """``//`` and ``%`` of floats, step by step as NumPy has them (npy_divmod). Numba's own go by way of ``frem``, which the
    GPU computes as x - trunc(x / y) y: NaN where y is infinite."""
    compute = types.float32 if isinstance(ty, NarrowFloatType) else types.float64 if ty == weak_float64 else ty
    fmod = context.resolve_function_type(math.fmod, (compute, compute), {})

    def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        narrow = isinstance(ty, NarrowFloatType)
        x, y = (c.cast(builder, c.cast(builder, value, t, ty) if narrow else value, ty if narrow else t, compute)
                for value, t in zip(v, s.args))
        zero, one = (ir.Constant(x.type, n) for n in (0.0, 1.0))
        rest = c.get_function(context.resolve_value_type(math.fmod), fmod)(builder, [x, y])
        is_zero = builder.fcmp_ordered("==", rest, zero)
        is_negative = [builder.fcmp_ordered("<", value, zero) for value in (rest, y)]
        adjust = builder.and_(builder.not_(is_zero), builder.xor(*is_negative))
        if name == "%":
            signed = builder.select(is_negative[1], ir.Constant(x.type, -0.0), zero)
            out = builder.select(is_zero, signed, builder.select(adjust, builder.fadd(rest, y), rest))
        else:
            quotient = builder.fdiv(builder.fsub(x, rest), y)
            quotient = builder.select(adjust, builder.fsub(quotient, one), quotient)
            floor = builder.call(builder.module.declare_intrinsic("llvm.floor", [x.type]), [quotient])
            floor = builder.select(builder.fcmp_ordered(">", builder.fsub(quotient, floor), ir.Constant(x.type, 0.5)),
                                   builder.fadd(floor, one), floor)
            plain = builder.fdiv(x, y)
            out = builder.select(builder.fcmp_ordered("==", quotient, zero), builder.fmul(plain, zero), floor)
            out = builder.select(builder.fcmp_ordered("==", y, zero), plain, out)
        return c.cast(builder, out, compute, ty)

    return signature(ty, a, b), codegen


def _index_operation(op: Callable, ty: IndexType, a: types.Type, b: types.Type) -> Any:
    if op is operator.pow:
        exponent = b.literal_value
        return (signature(ty, a, b), lambda c, builder, s, v: emit(
            builder, "**", c.cast(builder, v[0], a, ty), c.cast(builder, v[1], b, ty), True, exponent))
    shift = _power_of_two(b)
    # Numba finds code by the signature's types, so code that depends on a constant keeps the constant in its signature.
    if op is operator.floordiv and shift is not None:
        return (signature(ty, ty, b),
                lambda c, builder, s, v: builder.ashr(v[0], ir.Constant(v[0].type, shift)))
    if op is operator.mod and shift is not None:
        return (signature(ty, ty, b),
                lambda c, builder, s, v: builder.and_(v[0], ir.Constant(v[0].type, (1 << shift) - 1)))
    of_two = _INDEX_ARITHMETIC[op]
    return signature(ty, ty, ty), lambda c, builder, s, v: of_two(builder, v[0], v[1])


def _strong_operation(context: TypingContext, op: Callable, strong: types.Type, a: types.Type, b: types.Type) -> Any:
    """The operator with both operands of the float type; weak floats stay weak."""
    if a == b == strong and strong != weak_float64:
        return None                                           # as Numba has it
    compute = types.float64 if strong == weak_float64 else strong
    inner = context.resolve_function_type(op, (compute, compute), {})
    if inner is None:
        return None
    keep = strong == weak_float64 and inner.return_type == compute

    def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        values = [c.cast(builder, x, t, inner_t) for x, t, inner_t in zip(v, s.args, inner.args)]
        function = c.get_function(context.resolve_value_type(op), inner)
        result = function(builder, values)
        return c.cast(builder, result, inner.return_type, s.return_type)

    return signature(strong if keep else inner.return_type, a, b), codegen   # (a, b): Numba finds code by these types


_F16_INSTRUCTIONS = {operator.add: "add", operator.sub: "sub", operator.mul: "mul"}


def _narrow_operation(context: TypingContext, op: Callable, a: types.Type, b: types.Type, result: types.Type) -> Any:
    """Arithmetic on narrow floats: as if in float32, rounded back when the result is narrow by NumPy's rule.

    The rules are those of scalars, which is what the emulator computes with: a Python float is weak beside a float16, and
    beside a bfloat16 or an 8-bit float (ml_dtypes) gives a float32.
    """
    if op in (max, min):
        return _float_extremum(_NAMES[op], result, a, b)
    if _NAMES[op] in ("//", "%"):
        return _float_division(context, _NAMES[op], result, a, b)
    if op in _COMPARISON:
        result = type_of_kind(number_rules.common(kind_of_type(a), kind_of_type(b)))
    compute = types.float64 if result == types.float64 else types.float32
    inner = context.resolve_function_type(op, (compute, compute), {})
    if inner is None:
        return None
    returns = result if inner.return_type == compute else inner.return_type
    native = _F16_INSTRUCTIONS.get(op) if result == float16 else None

    def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
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


def _identity(context: TypingContext, *args: types.Type) -> Any:
    if len(args) == 2 and nb.compiles_ours() and all(complex.kind_of(t) is not None for t in args):
        raise TypeError("is, and a pattern of True or False, compares objects, and device code's numbers are none; write ==")
    return None


operation(operator.is_)(_identity)
operation(operator.is_not)(_identity)
for _op in _NAMES:
    if _op in (max, min):
        continue
    _register_binary(_op, _op)
    _in_place = getattr(operator, f"i{_op.__name__.rstrip('_')}", None)
    if _op not in _COMPARISON and _in_place is not None:
        _register_binary(_op, _in_place)


# --------------------------------------------------------------------------------------------------
# Methods of numbers: ``n.bit_count()``. (Numba's own counts the bits of a negative number's complement.)

class _BitCount(nb.AbstractTemplate):
    key = "gemmkit int.bit_count"
    metadata: ClassVar[dict[str, str]] = {"target": "cuda"}            # before Numba's own

    def generic(self, args: tuple, kws: dict) -> Any:
        return None if args or kws else signature(index, recvr=types.unliteral(self.this))


@nb.attributes_of(types.Integer)
def _of_integers(ty: types.Type, attr: str) -> Any:
    return types.BoundFunction(_BitCount, types.unliteral(ty)) if attr == "bit_count" and nb.compiles_ours() else None


@nb.attributes_of(types.Number)
def _of_numbers(ty: types.Type, attr: str) -> Any:
    if attr == "item" and nb.compiles_ours():
        raise nb.TypingError("item() makes a Python number, which device code has none of; write the number itself")


@nb.lowering_registry.lower("gemmkit int.bit_count", types.Integer)
def _bit_count(context: Context, builder: ir.IRBuilder, sig: Signature, args: Values) -> Any:
    """Of the absolute value, as in Python."""
    (ty,), (value,) = sig.args, args
    if ty.signed:
        value = builder.select(builder.icmp_signed("<", value, value.type(0)), builder.neg(value), value)
    count = builder.ctpop(value)
    return builder.trunc(count, i32) if ty.bitwidth > 32 else count if ty.bitwidth == 32 else builder.zext(count, i32)


__all__: list[str] = []


# --------------------------------------------------------------------------------------------------
# Arithmetic of one number in device code: its negative, its complement, its absolute value.

_UNARY: dict[Callable[..., Any], str] = {operator.neg: "neg", operator.pos: "pos", operator.invert: "invert", abs: "abs"}


def _register_unary(op: Callable) -> None:
    name = _UNARY[op]

    @operation(op)
    def typer(context: TypingContext, *args: types.Type) -> Any:
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
        if not isinstance(a, (IndexType, NarrowFloatType, WeakFloat64Type)) and not nb.compiles_ours():
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


def _integer_unary(op: Callable, builder: ir.IRBuilder, value: ir.Value, signed: bool, coordinate: bool) -> Any:
    if op is operator.invert:
        return builder.not_(value)
    if op is operator.pos or (op is abs and not signed):
        return value
    negative = builder.neg(value)
    if op is operator.neg:
        return negative
    if not coordinate:
        return absolute(builder, value)
    return builder.select(builder.icmp_signed("<", value, ir.Constant(value.type, 0)), negative, value)


def _narrow_unary(op: Callable, builder: ir.IRBuilder, value: ir.Value, bits: ir.Value, width: int) -> Any:
    sign = 1 << (width - 1)
    if op is operator.neg:
        return builder.xor(value, ir.Constant(bits, sign))
    if op is operator.pos:
        return value
    return builder.and_(value, ir.Constant(bits, sign - 1))


for _unary in _UNARY:
    _register_unary(_unary)
