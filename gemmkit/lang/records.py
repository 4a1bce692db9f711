"""Arithmetic of records (structs that live in registers) in device code, and numbers as planes of parts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gemmkit.lang import numba_hooks as nb
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, ir, operation, signature, types
from gemmkit.lang.number_rules import SIGNS, Record, metadata_of, number_dtype, parts, terms, to_dtype
from gemmkit.lang.scalars import REAL_TYPES, DTypeType, NarrowFloatType, PackedType, RecordType, numba_type, numpy_dtype

_PAIR = ir.VectorType(ir.IntType(16), 2)


def part_of(builder: ir.IRBuilder, ty: types.Type, value: ir.Value, n: int) -> Any:
    """Part ``n`` of a record or complex value."""
    if isinstance(ty, PackedType):
        return builder.extract_element(builder.bitcast(value, _PAIR), ir.IntType(32)(n))
    return builder.extract_value(value, n)


def of_parts(context: Context, builder: ir.IRBuilder, ty: types.Type, values: list) -> Any:
    """A record or complex value from its parts."""
    if isinstance(ty, PackedType):
        pair = ir.Constant(_PAIR, ir.Undefined)
        for n, value in enumerate(values):
            pair = builder.insert_element(pair, value, ir.IntType(32)(n))
        return builder.bitcast(pair, ir.IntType(32))
    out = context.get_constant_undef(ty)
    for n, value in enumerate(values):
        out = builder.insert_value(out, value, n)
    return out


def part_types(ty: types.Type) -> tuple | None:
    """The types of a value's parts, or None for what is no number of parts."""
    if isinstance(ty, RecordType):
        return ty.parts
    if isinstance(ty, types.Complex):
        return ty.underlying_float, ty.underlying_float
    return None


def _values(builder: ir.IRBuilder, ty: types.Type, value: ir.Value) -> list:
    count = len(part_types(ty) or ())
    return [part_of(builder, ty, value, n) for n in range(count)]


def _cast_parts(context: Context, builder: ir.IRBuilder, given: Sequence[types.Type], values: list, to: types.Type) -> Any:
    wanted = part_types(to)
    assert wanted is not None
    if len(values) > len(wanted):
        raise TypeError(f"{len(values)} parts do not fit {to}")
    made = [context.cast(builder, v, t, p) for v, t, p in zip(values, given, wanted)]
    zero = [context.cast(builder, context.get_constant(types.int32, 0), types.int32, p) for p in wanted[len(made):]]
    return of_parts(context, builder, to, made + zero)


def _cast_numbers(context: Context, builder: ir.IRBuilder, fromty: types.Type, toty: types.Type, value: ir.Value) -> Any:
    if fromty == toty:
        return value
    return _cast_parts(context, builder, part_types(fromty) or (), _values(builder, fromty, value), toty)


def _cast_tuple(context: Context, builder: ir.IRBuilder, fromty: types.Type, toty: types.Type, value: ir.Value) -> Any:
    values = [builder.extract_value(value, n) for n in range(len(fromty.types))]
    return _cast_parts(context, builder, fromty.types, values, toty)


def _cast_scalar(context: Context, builder: ir.IRBuilder, fromty: types.Type, toty: types.Type, value: ir.Value) -> Any:
    return _cast_parts(context, builder, [fromty], [value], toty)


for _from, _to in ((RecordType, RecordType), (RecordType, types.Complex), (types.Complex, RecordType)):
    nb.lowering_registry.lower_cast(_from, _to)(_cast_numbers)
for _to in (RecordType, types.Complex):
    for _from in (types.UniTuple, types.Tuple):
        nb.lowering_registry.lower_cast(_from, _to)(_cast_tuple)
for _from in REAL_TYPES:
    nb.lowering_registry.lower_cast(_from, RecordType)(_cast_scalar)
nb.lowering_registry.lower_cast(NarrowFloatType, types.Complex)(_cast_scalar)


@nb.attributes_of(RecordType)
def _attribute_type(ty: RecordType, attr: str) -> Any:
    return ty.parts[ty.names.index(attr)] if attr in ty.names else None


@nb.lowering_registry.lower_getattr_generic(RecordType)
def _getattr(context: Context, builder: ir.IRBuilder, ty: RecordType, value: ir.Value, attr: str) -> Any:
    return part_of(builder, ty, value, ty.names.index(attr))


@operation(operator.getitem)
def _getitem(context: TypingContext, *args: types.Type) -> Any:
    if len(args) != 2 or not isinstance(args[0], RecordType) or not isinstance(args[1], types.IntegerLiteral):
        return None
    n = args[1].literal_value
    if not 0 <= n < len(args[0].parts):
        return None
    return signature(args[0].parts[n], *args), lambda c, b, s, v: part_of(b, args[0], v[0], n)


def _record_of(ty: RecordType, kinds: list) -> types.Type:
    """The type of a number of the same algebra with these parts."""
    dtypes = [numpy_dtype(kind) for kind in kinds]
    metadata = metadata_of(ty.dtype)
    return numba_type(number_dtype(ty.names, np.result_type(*dtypes), ty.table, metadata.get(SIGNS)))


def _apply(context: TypingContext, op: Callable, *kinds: types.Type) -> Any:
    """The signature and code of a scalar operation."""
    inner = context.resolve_function_type(op, kinds, {})
    if inner is None:
        return None, None

    def emit(c: Context, b: ir.IRBuilder, *values: Any) -> Any:
        given = [c.cast(b, v, t, to) for v, t, to in zip(values, kinds, inner.args)]
        return c.get_function(context.resolve_value_type(op), inner)(b, given)

    return types.unliteral(inner.return_type), emit


def _type_sum(op: Callable) -> Any:
    def typer(context: TypingContext, *args: types.Type) -> Any:
        record = next((t for t in args if isinstance(t, RecordType)), None)
        if record is None or len(args) != 2:
            return None
        sides = [part_types(t) or (t,) for t in args]
        count = len(record.parts)
        if any(len(side) not in (1, count) or isinstance(side[0], types.BaseTuple) for side in sides):
            return None
        steps = []
        for n in range(count):
            mine = [side[n] if n < len(side) else None for side in sides]
            steps.append(_apply(context, op, *mine) if None not in mine
                         else _apply(context, operator.neg, mine[1]) if mine[0] is None and op is operator.sub
                         else (mine[0] or mine[1], None))
        if any(kind is None for kind, _ in steps):
            return None
        result = _record_of(record, [kind for kind, _ in steps])

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
            given = [_values(b, t, x) or [x] for t, x in zip(args, v)]
            out = []
            for n, (kind, emit) in enumerate(steps):
                values = [side[n] for side in given if n < len(side)]
                out.append((kind, emit(c, b, *values) if emit else values[0]))
            return _cast_parts(c, b, [k for k, _ in out], [x for _, x in out], result)

        return signature(result, *args), codegen

    return typer


operation(operator.add)(_type_sum(operator.add))
operation(operator.sub)(_type_sum(operator.sub))
operation(operator.iadd)(_type_sum(operator.add))
operation(operator.isub)(_type_sum(operator.sub))


def _type_scale(context: TypingContext, op: Callable, args: types.Type, at: int) -> Any:
    """A record (argument ``at``) and a scalar: part by part."""
    record, scalar = args[at], args[1 - at]
    if isinstance(scalar, (types.BaseTuple, types.Complex)):
        return None
    steps = [_apply(context, op, *((p, scalar) if at == 0 else (scalar, p))) for p in record.parts]
    if any(kind is None for kind, _ in steps):
        return None
    result = _record_of(record, [kind for kind, _ in steps])

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out = [emit(c, b, *((p, v[1]) if at == 0 else (v[0], p)))
               for (_, emit), p in zip(steps, _values(b, record, v[at]))]
        return _cast_parts(c, b, [kind for kind, _ in steps], out, result)

    return signature(result, *args), codegen


def _type_product(context: TypingContext, *args: types.Type) -> Any:
    if len(args) != 2 or not any(isinstance(t, RecordType) for t in args):
        return None
    sides = [part_types(t) for t in args]
    if sides[0] is None or sides[1] is None:
        return _type_scale(context, operator.mul, args, 0 if sides[0] is not None else 1)
    record = args[0] if isinstance(args[0], RecordType) else args[1]
    if record.table is None or len(sides[0]) != len(sides[1]):
        return None
    kind, multiply = _apply(context, operator.mul, sides[0][0], sides[1][0])
    _, add = _apply(context, operator.add, kind, kind)
    _, negate = _apply(context, operator.neg, kind)
    result = _record_of(record, [kind])

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        x, y = (_values(b, t, value) for t, value in zip(args, v))
        out: list[Any] = [None] * len(x)
        for i, j, k, factor in terms(record.table):
            term = multiply(c, b, x[i], y[j])
            if factor == -1:
                term = negate(c, b, term)
            elif factor != 1:
                _, scale = _apply(context, operator.mul, kind, kind)
                weight = c.cast(b, c.get_constant(types.float64, float(factor)), types.float64, kind)
                term = scale(c, b, term, weight)
            out[k] = term if out[k] is None else add(c, b, out[k], term)
        zero = c.cast(b, c.get_constant(types.int32, 0), types.int32, kind)
        return _cast_parts(c, b, [kind] * len(out), [zero if term is None else term for term in out], result)

    return signature(result, *args), codegen


operation(operator.mul)(_type_product)
operation(operator.imul)(_type_product)


@operation(operator.truediv)
def _type_quotient(context: TypingContext, *args: types.Type) -> Any:
    if len(args) != 2 or not isinstance(args[0], RecordType) or part_types(args[1]) is not None:
        return None
    return _type_scale(context, operator.truediv, args, 0)


def _signed(context: TypingContext, ty: types.Type, signs: types.Type) -> Any:
    steps = [_apply(context, operator.neg, p) for p in part_types(ty) or ()]

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out = [emit(c, b, x) if sign < 0 else x for (_, emit), x, sign in zip(steps, _values(b, ty, v[0]), signs)]
        return of_parts(c, b, ty, out)

    return signature(ty, ty), codegen


@operation(operator.neg)
def _type_negative(context: TypingContext, *args: types.Type) -> Any:
    if len(args) != 1 or not isinstance(args[0], RecordType):
        return None
    return _signed(context, args[0], [-1] * len(args[0].parts))


def _type_conjugate(context: TypingContext, x: types.Type) -> Any:
    if isinstance(x, types.Complex):
        return _signed(context, x, (1, -1))
    if isinstance(x, RecordType):
        return _signed(context, x, metadata_of(x.dtype).get(SIGNS) or (1,) * len(x.parts))
    return signature(x, x), lambda c, b, s, v: v[0]


@atom(_type_conjugate)
def conjugate(x: Any) -> Any:
    """A number's conjugate, as its algebra has it; a real number is its own."""
    if isinstance(x, Record):
        signs = metadata_of(x.dtype).get(SIGNS) or (1,) * len(x.parts)
        return Record(x.dtype, [p if sign > 0 else -p for p, sign in zip(x.parts, signs)])
    return x.conjugate() if isinstance(x, (complex, np.complexfloating)) else x


# -- planes -----------------------------------------------------------------------------------------------------------

def _type_planes(context: TypingContext, values: types.Type) -> Any:
    if not isinstance(values, types.UniTuple):
        return None
    kinds = part_types(values.dtype) or (values.dtype,)
    result = types.BaseTuple.from_types([types.UniTuple(kind, values.count) for kind in kinds])

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        given = [b.extract_value(v[0], n) for n in range(values.count)]
        split = [_values(b, values.dtype, x) or [x] for x in given]
        planes = [c.make_tuple(b, types.UniTuple(kind, values.count), [x[p] for x in split]) for p, kind in enumerate(kinds)]
        return c.make_tuple(b, result, planes)

    return signature(result, values), codegen


@atom(_type_planes)
def planes_of(values: tuple) -> tuple:
    """The parts of some numbers, one tuple a part: all first parts, all second parts, ..."""
    return tuple(zip(*map(parts, values)))


def _type_numbers(context: TypingContext, dtype: types.Type, planes: types.Type) -> Any:
    if not isinstance(dtype, DTypeType) or not isinstance(planes, types.BaseTuple):
        return None
    count = len(planes.types[0].types)
    result = types.UniTuple(dtype.target, count)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        split = [b.extract_value(v[1], p) for p in range(len(planes.types))]
        kinds = [plane.types for plane in planes.types]
        made = [_cast_parts(c, b, [k[n] for k in kinds], [b.extract_value(x, n) for x in split], dtype.target)
                for n in range(count)]
        return c.make_tuple(b, result, made)

    return signature(result, dtype, planes), codegen


@atom(_type_numbers)
def numbers_of(dtype: np.dtype, planes: tuple) -> tuple:
    """The inverse of `planes_of`: numbers of ``dtype``."""
    return tuple(to_dtype(dtype, p) for p in zip(*planes))
