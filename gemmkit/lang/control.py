"""Compile-time control: choosing, repeating and combining without leaving anything in the machine code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemmkit.lang.atoms import atom
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.registers import call_function
from gemmkit.lang.scalars import WeakFloatLiteral, WeakIntLiteral, index, weak_float64

i32 = ir.IntType(32)


def _resolve(context: Any, function: Any, args: tuple) -> Any:
    return context.resolve_function_type(function, args, {}) if isinstance(function, types.Callable) else None


def _cast_all(context: Any, builder: Any, values: Any, given: Any, wanted: Any) -> list:
    return [context.cast(builder, v, t, to) for v, t, to in zip(values, given, wanted)]


def _type_each(context: Any, function: Any, values: Any, *args: Any) -> Any:
    if not isinstance(values, types.BaseTuple):
        return None
    inner = [_resolve(context, function, (t, index, *args)) for t in values.types]
    if any(sig is None for sig in inner):
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        for n, (sig, ty) in enumerate(zip(inner, values.types)):
            given = (b.extract_value(v[1], n), i32(n), *v[2:])
            call_function(c, b, function, v[0], sig, _cast_all(c, b, given, (ty, index, *args), sig.args))
        return c.get_dummy_value()

    return signature(types.none, function, values, *args), codegen


@atom(_type_each)
def each(function: Any, values: tuple, *args: Any) -> None:
    """``function(value, i, *args)`` for every value of a tuple, unrolled."""
    for i, value in enumerate(values):
        function(value, i, *args)


def _type_join(context: Any, parts: Any) -> Any:
    if not isinstance(parts, types.BaseTuple) or not all(isinstance(p, types.BaseTuple) for p in parts.types):
        return None
    result = types.BaseTuple.from_types([t for part in parts.types for t in part.types])

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        out = []
        for n, part in enumerate(parts.types):
            inner = b.extract_value(v[0], n)
            out += [b.extract_value(inner, k) for k in range(len(part.types))]
        return c.make_tuple(b, result, out)

    return signature(result, parts), codegen


@atom(_type_join)
def join(parts: tuple) -> tuple:
    """A tuple of tuples as one tuple."""
    return tuple(value for part in parts for value in part)


def to_and_fro(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """The places (i, j) of an outer product column by column, down one and up the next: neighbours in this order share a
    factor, which the reuse cache of the arithmetic units then has. No element's own order of terms depends on it.

    >>> list(to_and_fro(2, 2))
    [(0, 0), (1, 0), (1, 1), (0, 1)]
    """
    for j in range(columns):
        for i in range(rows) if j % 2 == 0 else reversed(range(rows)):
            yield i, j


def _type_outer(context: Any, function: Any, c: Any, a: Any, b: Any, depth: Any, *args: Any) -> Any:
    if not all(isinstance(t, types.UniTuple) for t in (c, a, b)) or not isinstance(depth, types.IntegerLiteral):
        return None
    k = int(depth.literal_value)
    rows, columns = a.count // k, b.count // k
    kept = _of_any_value(c)
    inner = _resolve(context, function, (kept.dtype, a.dtype, b.dtype, *args))
    if inner is None or rows * columns != c.count:
        return None

    def codegen(ctx: Any, builder: Any, s: Any, v: Any) -> Any:
        parts = [[builder.extract_value(v[at], n) for n in range(ty.count)] for at, ty in ((1, c), (2, a), (3, b))]
        out, lhs, rhs = parts
        out = [ctx.cast(builder, value, c.dtype, kept.dtype) for value in out]
        for step in range(k):
            for i, j in to_and_fro(rows, columns):
                n = i + j * rows
                operands = (out[n], lhs[step * rows + i], rhs[step * columns + j], *v[5:])
                given = _cast_all(ctx, builder, operands, (kept.dtype, a.dtype, b.dtype, *args), inner.args)
                value = call_function(ctx, builder, function, v[0], inner, given)
                out[n] = ctx.cast(builder, value, inner.return_type, kept.dtype)
        return ctx.make_tuple(builder, kept, out)

    return signature(kept, function, c, a, b, depth, *args), codegen


@atom(_type_outer)
def outer(function: Any, c: tuple, a: tuple, b: tuple, depth: int, *args: Any) -> tuple:
    """An outer product of register vectors: ``c[i, j] = function(c[i, j], a[k, i], b[k, j], *args)`` for k < depth.

    ``a`` holds ``depth`` groups of rows, ``b`` as many of columns; ``c`` is rows x columns, rows first.
    """
    rows, columns = len(a) // depth, len(b) // depth
    out = list(c)
    for step in range(depth):
        for j in range(columns):
            for i in range(rows):
                n = i + j * rows
                out[n] = function(out[n], a[step * rows + i], b[step * columns + j], *args)
    return tuple(out)


def _type_fold(context: Any, count: Any, function: Any, value: Any, *args: Any) -> Any:
    if not isinstance(count, types.IntegerLiteral) or not isinstance(function, types.Callable):
        return None
    kept = _of_any_value(value)
    inner = _resolve(context, function, (kept, index, *args))
    if inner is None:
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        out = c.cast(b, v[2], value, kept)
        for n in range(int(count.literal_value)):
            given = _cast_all(c, b, (out, i32(n), *v[3:]), (kept, index, *args), inner.args)
            out = c.cast(b, call_function(c, b, function, v[1], inner, given), inner.return_type, kept)
        return out

    return signature(kept, count, function, value, *args), codegen


def _of_any_value(ty: Any) -> Any:
    """The type of a value that will change: not that of a constant, which is its value."""
    if isinstance(ty, types.BaseTuple):
        return types.BaseTuple.from_types([_of_any_value(t) for t in ty.types])
    if isinstance(ty, types.Literal):
        return {WeakIntLiteral: index, WeakFloatLiteral: weak_float64}.get(type(ty), types.unliteral(ty))
    return ty


@atom(_type_fold)
def fold(count: int, function: Any, value: Any, *args: Any) -> Any:
    """``for n in range(count): value = function(value, n, *args)``, unrolled; the value keeps its type."""
    for n in range(count):
        value = function(value, n, *args)
    return value


def _type_split(context: Any, values: Any, size: Any) -> Any:
    if not isinstance(values, types.UniTuple) or not isinstance(size, types.IntegerLiteral):
        return None
    width = int(size.literal_value)
    if width < 1 or values.count % width:
        return None
    part = types.UniTuple(values.dtype, width)
    result = types.UniTuple(part, values.count // width)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        given = [b.extract_value(v[0], n) for n in range(values.count)]
        return c.make_tuple(b, result, [c.make_tuple(b, part, given[n:n + width]) for n in range(0, values.count, width)])

    return signature(result, values, size), codegen


@atom(_type_split)
def split(values: tuple, size: int) -> tuple:
    """A tuple as a tuple of tuples of ``size`` values: what `join` puts together again."""
    return tuple(values[n:n + size] for n in range(0, len(values), size))


def _type_interleave(context: Any, parts: Any) -> Any:
    if not isinstance(parts, types.UniTuple) or not isinstance(parts.dtype, types.UniTuple):
        return None
    result = types.UniTuple(parts.dtype.dtype, parts.count * parts.dtype.count)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        given = [b.extract_value(v[0], n) for n in range(parts.count)]
        return c.make_tuple(b, result, [b.extract_value(part, n) for n in range(parts.dtype.count) for part in given])

    return signature(result, parts), codegen


@atom(_type_interleave)
def interleave(parts: tuple) -> tuple:
    """Tuples of one length as one tuple: the first value of each, then the second of each, and so on."""
    return tuple(part[n] for n in range(len(parts[0])) for part in parts)


def _type_deal(context: Any, values: Any, count: Any) -> Any:
    if not isinstance(values, types.UniTuple) or not isinstance(count, types.IntegerLiteral):
        return None
    hands = int(count.literal_value)
    if hands < 1 or values.count % hands:
        return None
    part = types.UniTuple(values.dtype, values.count // hands)
    result = types.UniTuple(part, hands)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        given = [b.extract_value(v[0], n) for n in range(values.count)]
        return c.make_tuple(b, result, [c.make_tuple(b, part, given[n::hands]) for n in range(hands)])

    return signature(result, values, count), codegen


@atom(_type_deal)
def deal(values: tuple, count: int) -> tuple:
    """A tuple as ``count`` tuples, dealt out one by one: what `interleave` puts together again."""
    return tuple(values[n::count] for n in range(count))
