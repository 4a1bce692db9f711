"""Complex numbers in device code: weak ones (``2j``, ``complex(m, n)``), and arithmetic of which one side is complex.

The types are those of `number_rules`: a weak complex number takes the type of what it meets, as in NumPy, where ``c64 * 2j``
and ``f32 * 2j`` are complex64.
"""

from __future__ import annotations

import cmath
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.lang import numba_hooks as nb
from gemmkit.lang import number_rules
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, ir, operation, signature, types
from gemmkit.lang.number_rules import Weak
from gemmkit.lang.scalars import (
    IndexType,
    NarrowFloatType,
    WeakComplex,
    WeakFloat64Type,
    WeakFloatLiteral,
    WeakIntLiteral,
    f64,
    kind_of_type,
    type_of_kind,
    weak_float64,
)


class WeakComplex128Type(types.Type):
    """A run-time Python complex number: a complex128 that takes the type of what it meets."""

    def __init__(self) -> None:
        super().__init__("weak complex128")

    def can_convert_to(self, typingctx: TypingContext, other: types.Type) -> Any:
        if isinstance(other, types.Complex):
            return nb.Conversion.promote if other == types.complex128 else nb.Conversion.safe
        return None

    def unify(self, typingctx: TypingContext, other: types.Type) -> Any:
        if isinstance(other, types.Complex):
            return other
        if isinstance(other, (types.Literal, IndexType, WeakFloat64Type)):
            return self
        narrow = isinstance(other, NarrowFloatType) or other == types.float32
        return types.complex64 if narrow else types.complex128 if isinstance(other, types.Number) else None


weak_complex128 = WeakComplex128Type()


class WeakComplexLiteral(types.Literal, types.Dummy):
    """The type of a complex constant."""

    def __init__(self, value: complex):
        self._literal_init(complex(value))
        self._literal_type_cache = weak_complex128
        types.Type.__init__(self, f"Weak[complex]({complex(value)!r})")

    @property
    def key(self) -> Any:
        return self.name

    can_convert_to, unify = WeakComplex128Type.can_convert_to, WeakComplex128Type.unify

    def __unliteral__(self) -> types.Type:
        return weak_complex128


nb.kept_as(WeakComplex128Type, lambda ty: [("real", types.float64), ("imag", types.float64)])
nb.kept_as(WeakComplexLiteral, None)
types.Literal.ctor_map[WeakComplex] = WeakComplexLiteral
WEAK_COMPLEX = (WeakComplex128Type, WeakComplexLiteral)
_WEAK = (*WEAK_COMPLEX, WeakIntLiteral, WeakFloatLiteral, WeakFloat64Type, IndexType, NarrowFloatType)
nb.typeof_impl.register(WeakComplex)(lambda value, c: WeakComplexLiteral(value))


# -- casts ------------------------------------------------------------------------------------------------------------

def _constant(value: complex) -> Any:
    return ir.Constant.literal_struct([f64(value.real), f64(value.imag)])


nb.lowering_registry.lower_constant(WeakComplex128Type)(lambda context, builder, ty, value: _constant(value))


@nb.lowering_registry.lower_cast(WeakComplexLiteral, types.Complex)
@nb.lowering_registry.lower_cast(WeakComplexLiteral, WeakComplex128Type)
def _literal_to_complex(context: Context, builder: ir.IRBuilder, fromty: types.Type, toty: types.Type,
                        value: ir.Value) -> Any:
    if toty == weak_complex128:
        return _constant(fromty.literal_value)
    return context.get_constant_generic(builder, toty, fromty.literal_value)


nb.lowering_registry.lower_cast(WeakComplex128Type, types.Complex)(
    lambda c, b, ty, to, v: v if to == types.complex128 else c.cast(b, v, types.complex128, to))
nb.lowering_registry.lower_cast(types.Complex, WeakComplex128Type)(lambda c, b, t, to, v: c.cast(b, v, t, types.complex128))


def of_parts(context: Context, builder: ir.IRBuilder, ty: types.Type, parts: Values) -> Any:
    """A complex number's value of its parts, which are of its parts' type."""
    out = context.make_complex(builder, types.complex128 if ty == weak_complex128 else ty)
    out.real, out.imag = parts
    return out._getvalue()


def _real_to_complex(context: Context, builder: ir.IRBuilder, fromty: types.Type, toty: types.Type, value: ir.Value) -> Any:
    part = types.float64 if toty == weak_complex128 else toty.underlying_float
    return of_parts(context, builder, toty, (context.cast(builder, value, fromty, part), ir.Constant(
        context.get_value_type(part), 0.0)))


for _real in (WeakIntLiteral, WeakFloatLiteral, WeakFloat64Type, IndexType, types.Integer, types.Float, types.Boolean,
              NarrowFloatType):
    nb.lowering_registry.lower_cast(_real, WeakComplex128Type)(_real_to_complex)
nb.lowering_registry.lower_cast(NarrowFloatType, types.Complex)(_real_to_complex)


# -- kinds ------------------------------------------------------------------------------------------------------------

def kind_of(ty: types.Type) -> Any:
    """The kind of a number's type, real or complex; None for what is no number."""
    if isinstance(ty, types.Complex):
        return np.dtype(ty.name)
    return Weak.COMPLEX if isinstance(ty, WEAK_COMPLEX) else kind_of_type(ty)


def type_of(kind: Any) -> Any:
    return weak_complex128 if kind is Weak.COMPLEX else type_of_kind(kind)


def _computed(ty: types.Type) -> Any:
    """The type of Numba's that a number is computed in."""
    return {weak_complex128: types.complex128, weak_float64: types.float64}.get(ty, ty)


# -- arithmetic -------------------------------------------------------------------------------------------------------

def is_complex(ty: types.Type) -> bool:
    return isinstance(ty, (types.Complex, *WEAK_COMPLEX))


def of_two(context: TypingContext, op: Callable, name: str, a: types.Type, b: types.Type) -> Any:
    """Signature and code of an operator on two numbers of which one is complex; None for what Numba has as it is to be."""
    kinds = kind_of(a), kind_of(b)
    if any(kind is None for kind in kinds) or not (nb.compiles_ours() or any(isinstance(t, _WEAK) for t in (a, b))):
        return None
    if a == b and isinstance(a, types.Complex):
        number_rules.result(name, *kinds)
        return None
    kind = number_rules.result(name, *kinds)
    ty = type_of(number_rules.common(*kinds))
    compute = _computed(ty)
    inner = context.resolve_function_type(op, (compute, compute), {})
    if inner is None:
        return None
    result = inner.return_type if kind == number_rules.BOOL else ty

    def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        values = [c.cast(builder, x, t, compute) for x, t in zip(v, s.args)]
        return c.get_function(context.resolve_value_type(op), inner)(builder, values)

    return signature(result, a, b), codegen


def _register_unary(op: Callable) -> None:
    @operation(op)
    def typer(context: TypingContext, *args: types.Type) -> Any:
        if len(args) != 1 or not isinstance(args[0], WEAK_COMPLEX):
            return None
        inner = context.resolve_function_type(op, (types.complex128,), {})
        if inner is None:
            return None
        result = weak_float64 if op is abs else weak_complex128

        def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
            value = c.cast(builder, v[0], s.args[0], types.complex128)
            return c.get_function(context.resolve_value_type(op), inner)(builder, [value])

        return signature(result, args[0]), codegen


for _op in (operator.neg, operator.pos, abs):
    _register_unary(_op)


# -- parts ------------------------------------------------------------------------------------------------------------

@nb.attributes_of(WeakComplex128Type)
@nb.attributes_of(WeakComplexLiteral)
def _part_type(ty: types.Type, attr: str) -> Any:
    return weak_float64 if attr in ("real", "imag") else None


@nb.lowering_registry.lower_getattr_generic(WeakComplex128Type)
@nb.lowering_registry.lower_getattr_generic(WeakComplexLiteral)
def _part(context: Context, builder: ir.IRBuilder, ty: types.Type, value: ir.Value, attr: str) -> Any:
    return builder.extract_value(context.cast(builder, value, ty, weak_complex128), 0 if attr == "real" else 1)


@operation(complex)
def _complex(context: TypingContext, *args: types.Type) -> Any:
    """Of one number or of two parts, by `number_rules.of_parts`."""
    kinds = [kind_of(a) for a in args]
    if len(args) > 2 or any(kind is None for kind in kinds) or not nb.compiles_ours():
        return None
    ty = type_of(number_rules.of_parts(*kinds))
    if len(args) == 1 and is_complex(args[0]):
        return signature(ty, args[0]), lambda c, b, s, v: c.cast(b, v[0], s.args[0], ty)
    part = types.float64 if ty == weak_complex128 else ty.underlying_float

    def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
        zero = ir.Constant(c.get_value_type(part), 0.0)
        given = [c.cast(builder, x, t, part) for x, t in zip(v, s.args)]
        return of_parts(c, builder, ty, (*given, zero, zero)[:2])

    return signature(ty, *args), codegen


# -- cmath ------------------------------------------------------------------------------------------------------------

def _register_cmath(name: str) -> None:
    key = getattr(cmath, name)

    @operation(key)
    def typer(context: TypingContext, *args: types.Type) -> Any:
        if len(args) != 1 or kind_of(args[0]) is None or not nb.compiles_ours():
            return None
        kind = number_rules.of_cmath(name, kind_of(args[0]))
        result = type_of(kind)
        compute = types.complex64 if kind in (number_rules.COMPLEX64, number_rules.FLOAT32) else types.complex128
        if args[0] == compute:
            return None                                       # as Numba has it
        inner = context.resolve_function_type(key, (compute,), {})
        if inner is None:
            return None

        def codegen(c: Context, builder: ir.IRBuilder, s: Signature, v: Values) -> Any:
            value = c.cast(builder, v[0], s.args[0], compute)
            return c.get_function(context.resolve_value_type(key), inner)(builder, [value])

        return signature(result, args[0]), codegen


for _name in number_rules.CMATH:
    _register_cmath(_name)
