"""Arithmetic of scalars in device code: which type a result has, by NumPy's rules, and how it is computed.

The rules are those of `gemmkit.lang.number_rules`; this module registers them with Numba when it is imported. Those for
two of Numba's own numbers hold in gemmkit's functions alone.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from gemmkit.lang import complex_scalars, integer_code, number_rules
from gemmkit.lang.numba_hooks import compiles_ours, ir, operation, signature, types
from gemmkit.lang.number_rules import BOOL
from gemmkit.lang.number_types import index_of, kind_of_type, numba_type, type_of_kind
from gemmkit.lang.scalars import (
    IndexType,
    NarrowFloatType,
    WeakFloat64Type,
    WeakFloatLiteral,
    WeakIntLiteral,
    bfloat16,
    float16,
    i1,
    index,
    number_constant,
    weak_float64,
    wide_index,
)
from gemmkit.lang.target import target_arch


def _index_pair(a: Any, b: Any) -> bool:
    """Both coordinates, or a coordinate and a constant."""
    ours = isinstance(a, IndexType) + isinstance(b, IndexType)
    literal = isinstance(a, types.IntegerLiteral) + isinstance(b, types.IntegerLiteral)
    return ours == 2 or (ours == 1 and literal == 1)


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
_NAMES = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
          operator.mod: "%", operator.pow: "**", operator.and_: "&", operator.or_: "|", operator.xor: "^",
          operator.lshift: "<<", operator.rshift: ">>", operator.lt: "<", operator.le: "<=", operator.gt: ">",
          operator.ge: ">=", operator.eq: "==", operator.ne: "!=", max: "max", min: "min"}
_COMPARISON = {op: name for op, name in _NAMES.items() if name in number_rules.COMPARISONS}


def _fold(op: Any, a: Any, b: Any) -> Any:
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


def _register_binary(op: Any, key: Any) -> None:
    """Type ``key`` (``+`` or ``+=``) by the rules of ``op`` (``+``)."""
    @operation(key)
    def typer(context: Any, *args: Any) -> Any:
        return of_two(context, op, *args) if len(args) == 2 else None


def of_two(context: Any, op: Any, a: Any, b: Any) -> Any:
    """Signature and code of an operator on two numbers; None for what is not ours, TypeError for what the rules refuse."""
    folded = _fold(op, a, b)
    if folded is not None:
        return folded
    if complex_scalars.is_complex(a) or complex_scalars.is_complex(b):
        return complex_scalars.of_two(context, op, _NAMES[op], a, b)
    kinds = kind_of_type(a), kind_of_type(b)
    if any(kind is None for kind in kinds):                    # not ``None in kinds``: float64's dtype equals None
        return None
    if not any(isinstance(t, (IndexType, WeakIntLiteral, WeakFloatLiteral, WeakFloat64Type, NarrowFloatType))
               for t in (a, b)) and not compiles_ours():
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
                lambda c, builder, s, v: integer_code.emit_bool(builder, name, *v))
    if number_rules.is_integer(kind):
        return _integer_operation(name, kind, a, b, kinds[1])
    # what Numba computes in a float type: of comparisons the one that both are converted to
    strong = type_of_kind(number_rules.common(*kinds) if op in _COMPARISON else kind)
    if op in (max, min):
        return _float_extremum(name, strong, a, b)
    if name in ("//", "%"):
        return _float_division(context, name, strong, a, b)
    return _strong_operation(context, op, strong, a, b)


def _integer_operation(name: str, kind: np.dtype, a: Any, b: Any, of_b: Any) -> Any:
    """Both operands in the result's type; the code may depend on a constant, which stays in the signature."""
    ty, signed = numba_type(kind), kind.kind == "i"
    literal = of_b if isinstance(of_b, int) else None

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
        left, right = (c.cast(builder, x, t, ty) for x, t in zip(v, s.args))
        return integer_code.emit(builder, name, left, right, signed, literal)

    return signature(ty, a, b), codegen


def _integer_comparison(name: str, a: Any, b: Any, left: Any, right: Any) -> Any:
    ty = wide_index if wide_index in (a, b) else index
    limit = 1 << ty.bitwidth - 1
    if _index_pair(a, b) and all(-limit <= k < limit for k in (left, right) if isinstance(k, int)):
        return signature(types.boolean, ty, ty), lambda c, builder, s, v: builder.icmp_signed(name, v[0], v[1])
    if any(isinstance(k, int) and not -2**63 <= k < 2**64 for k in (left, right)):
        raise TypeError(f"{left if isinstance(left, int) else right} in a comparison; 64 bits do not hold it")

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
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
        return integer_code.compare(builder, name, *values, *signs)

    return signature(types.boolean, a, b), codegen


_INSTRUCTION = {types.float32: "f32", float16: "f16", bfloat16: "bf16"}


def _float_extremum(name: str, ty: Any, a: Any, b: Any) -> Any:
    """NaN where either is."""
    compute = types.float64 if ty == weak_float64 else ty

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
        from gemmkit.lang.conversions import extremum, selected

        values = [c.cast(builder, x, t, compute) for x, t in zip(v, s.args)]
        instruction = _INSTRUCTION.get(compute)
        if instruction is not None and tuple(target_arch())[:2] >= (8, 0):
            return extremum(builder, name, instruction, *values)
        if not isinstance(compute, NarrowFloatType):
            return selected(builder, name, *values)
        wide = [c.cast(builder, x, compute, types.float32) for x in values]
        return c.cast(builder, selected(builder, name, *wide), types.float32, compute)

    return signature(ty, a, b), codegen


def _float_division(context: Any, name: str, ty: Any, a: Any, b: Any) -> Any:
    """``//`` and ``%`` of floats, step by step as NumPy has them (npy_divmod). Numba's own go by way of ``frem``, which the
    GPU computes as x - trunc(x / y) y: NaN where y is infinite."""
    compute = types.float32 if isinstance(ty, NarrowFloatType) else types.float64 if ty == weak_float64 else ty
    fmod = context.resolve_function_type(math.fmod, (compute, compute), {})

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
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
            floor = builder.call(_floor(builder, x.type), [quotient])
            floor = builder.select(builder.fcmp_ordered(">", builder.fsub(quotient, floor), ir.Constant(x.type, 0.5)),
                                   builder.fadd(floor, one), floor)
            plain = builder.fdiv(x, y)
            out = builder.select(builder.fcmp_ordered("==", quotient, zero), builder.fmul(plain, zero), floor)
            out = builder.select(builder.fcmp_ordered("==", y, zero), plain, out)
        return c.cast(builder, out, compute, ty)

    return signature(ty, a, b), codegen


def _floor(builder: Any, ty: Any) -> Any:
    return builder.module.declare_intrinsic("llvm.floor", [ty])


def _index_operation(op: Any, ty: IndexType, a: Any, b: Any) -> Any:
    if op is operator.pow:
        exponent = b.literal_value
        return (signature(ty, a, b), lambda c, builder, s, v: integer_code.emit(
            builder, "**", c.cast(builder, v[0], a, ty), c.cast(builder, v[1], b, ty), True, exponent))
    shift = _power_of_two(b)
    # Numba finds code by the signature's types, so code that depends on a constant keeps the constant in its signature.
    if op is operator.floordiv and shift is not None:
        return (signature(ty, ty, b),
                lambda c, builder, s, v: builder.ashr(v[0], ir.Constant(v[0].type, shift)))
    if op is operator.mod and shift is not None:
        return (signature(ty, ty, b),
                lambda c, builder, s, v: builder.and_(v[0], ir.Constant(v[0].type, (1 << shift) - 1)))
    emit = _INDEX_ARITHMETIC[op]
    return signature(ty, ty, ty), lambda c, builder, s, v: emit(builder, v[0], v[1])


def _strong_operation(context: Any, op: Any, strong: types.Type, a: Any, b: Any) -> Any:
    """The operator with both operands of the float type; weak floats stay weak."""
    if a == b == strong and strong != weak_float64:
        return None                                           # as Numba has it
    compute = types.float64 if strong == weak_float64 else strong
    inner = context.resolve_function_type(op, (compute, compute), {})
    if inner is None:
        return None
    keep = strong == weak_float64 and inner.return_type == compute

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
        values = [c.cast(builder, x, t, inner_t) for x, t, inner_t in zip(v, s.args, inner.args)]
        function = c.get_function(context.resolve_value_type(op), inner)
        result = function(builder, values)
        return c.cast(builder, result, inner.return_type, s.return_type)

    return signature(strong if keep else inner.return_type, a, b), codegen   # (a, b): Numba finds code by these types


_F16_INSTRUCTIONS = {operator.add: "add", operator.sub: "sub", operator.mul: "mul"}


def _narrow_operation(context: Any, op: Any, a: Any, b: Any, result: Any) -> Any:
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

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
        from gemmkit.lang.conversions import f16_arithmetic

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


def _identity(context: Any, *args: Any) -> Any:
    if len(args) == 2 and compiles_ours() and all(complex_scalars.kind_of(t) is not None for t in args):
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
