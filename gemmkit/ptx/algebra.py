"""The product of an algebra's numbers in planes: a real operation for every entry of its multiplication table."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

from gemmkit.lang.atoms import atom
from gemmkit.lang.component_types import ComponentType
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.record_types import numbers_of, of_parts, part_of, part_types, planes_of
from gemmkit.lang.records import scaled, terms
from gemmkit.lang.registers import call_function
from gemmkit.lang.scalars import NarrowFloatType, index

i32 = ir.IntType(32)


def _negative(context: Any, builder: Any, kind: types.Type, values: list) -> list:
    """The negatives of a plane's values; of narrow floats a register at a time, as instructions take them."""
    if isinstance(kind, types.Float):
        return [builder.fsub(ir.Constant(v.type, -0.0), v) for v in values]
    if isinstance(kind, NarrowFloatType) and len(values) * kind.bits.width % 32 == 0:
        from gemmkit.ptx.registers import from_registers, to_registers

        signs = ir.Constant(i32, 0x80008000 if kind.bits.width == 16 else 0x80808080)
        return from_registers(builder, [builder.xor(word, signs) for word in to_registers(builder, values)], kind.bits)
    inner = context.typing_context.resolve_function_type(operator.neg, (kind,), {})
    function = context.get_function(context.typing_context.resolve_value_type(operator.neg), inner)
    return [context.cast(builder, function(builder, [v]), inner.return_type, kind) for v in values]


def _times(context: Any, builder: Any, kind: types.Type, values: list, factor: Any) -> list:
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


def _typer(context: Any, algebra: Any, a: Any, b: Any, c: Any) -> Any:
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

    def codegen(ctx: Any, builder: Any, s: Any, v: Any) -> Any:
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


@atom(_typer)
def multiply_planes(algebra: Any, a: tuple, b: tuple, c: tuple) -> tuple:
    """``c_k += table[i][j][k] a_i b_j`` on fragments of numbers, each term one operation of the algebra's base."""
    lhs, rhs, sums = planes_of(a), planes_of(b), list(planes_of(c))
    for i, j, k, factor in terms(algebra.table):
        weighted = tuple(scaled(x, factor if abs(factor) == 1 else type(x)(factor)) for x in lhs[i])
        sums[k] = algebra.base.mma(weighted, rhs[j], sums[k])
    return numbers_of(algebra.fragment_c.dtype, tuple(sums))


def _type_terms(context: Any, algebra: Any, sums: Any, function: Any, *args: Any) -> Any:
    if not isinstance(algebra, ComponentType) or not isinstance(sums, types.UniTuple):
        return None
    steps = list(_steps(algebra.skeleton, sums.count))
    flags = {(negative, first): (types.literal(negative), types.literal(first)) for *_, negative, first in steps}
    inner = {key: context.resolve_function_type(function, (sums.dtype, index, index, index, *literals, *args), {})
             for key, literals in flags.items()}
    if not inner or any(sig is None or sig.return_type != sums.dtype for sig in inner.values()):
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
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
