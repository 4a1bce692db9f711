"""Tuples in device code: their length, values, copies, what is found in them."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

from gemmkit.lang.arithmetic import of_two
from gemmkit.lang.numba_hooks import (
    AbstractTemplate,
    AttributeTemplate,
    cgutils,
    compiles_ours,
    ir,
    lowering_registry,
    operation,
    signature,
    types,
    typing_registry,
)
from gemmkit.lang.scalars import WeakIntLiteral, i1, i32, index


@operation(operator.getitem)
def _tuple_item(context: Any, *args: Any) -> Any:
    """``values[n]`` of any tuple with a compile-time number: no run-time switch, and the parts may differ in type."""
    if len(args) != 2 or not isinstance(args[0], types.BaseTuple) or not isinstance(args[1], WeakIntLiteral):
        return None
    count, n = len(args[0].types), args[1].literal_value
    if not -count <= n < count:
        return None
    return signature(args[0].types[n], *args), lambda c, b, s, v: b.extract_value(v[0], n % count)


@operation(len)
def _tuple_length(context: Any, *args: Any) -> Any:
    """``len`` of a tuple, or of a word, is a literal, as in Python."""
    if len(args) != 1 or not isinstance(args[0], (types.BaseTuple, types.StringLiteral)) or not compiles_ours():
        return None
    of = args[0]
    result = WeakIntLiteral(len(of.types if isinstance(of, types.BaseTuple) else of.literal_value))
    return signature(result, args[0]), lambda c, b, s, v: c.get_constant_generic(b, result, result.literal_value)


@operation(operator.not_)
def _is_empty(context: Any, *args: Any) -> Any:
    if len(args) != 1 or not isinstance(args[0], types.BaseTuple) or not compiles_ours():
        return None
    answer = not args[0].types
    return signature(types.boolean, args[0]), lambda c, b, s, v: ir.Constant(i1, answer)


def _repeated(context: Any, *args: Any) -> Any:
    """``(x,) * 4``: as many as a literal says, on either side."""
    at = 0 if args and isinstance(args[0], types.BaseTuple) else 1
    if len(args) != 2 or not isinstance(args[at], types.BaseTuple) or not compiles_ours():
        return None
    if not isinstance(args[1 - at], WeakIntLiteral):
        raise TypeError(f"a tuple times {args[1 - at]}: its length is part of its type; multiply it by a literal")
    times, count = max(args[1 - at].literal_value, 0), len(args[at].types)
    result = types.BaseTuple.from_types(tuple(args[at].types) * times)

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
        return c.make_tuple(builder, result, cgutils.unpack_tuple(builder, v[at], count) * times)

    return signature(result, *args), codegen


for _op in (operator.mul, operator.imul):
    operation(_op)(_repeated)


# -- what is found in them --------------------------------------------------------------------------------------------

def _equals(context: Any, values: Any, wanted: Any) -> Any:
    """Code for whether each value is a number that is looked for; None where one cannot be compared."""
    steps = []
    for ty in values.types:
        step = of_two(context, operator.eq, ty, wanted)
        if step is None:
            sig = context.resolve_function_type(operator.eq, (ty, wanted), {})
            if sig is None:
                return None
            step = sig, lambda c, b, s, v: c.get_function(c.typing_context.resolve_value_type(operator.eq), s)(b, v)
        steps.append((ty, *step))

    def code(c: Any, builder: Any, given: Any, number: Any) -> list:
        out = []
        for n, (ty, sig, emit) in enumerate(steps):
            pair = [c.cast(builder, x, t, to) for x, t, to in zip(
                (builder.extract_value(given, n), number), (ty, wanted), sig.args)]
            out.append(c.cast(builder, emit(c, builder, sig, pair), sig.return_type, types.boolean))
        return out

    return code


@operation(operator.contains)
def _contains(context: Any, *args: Any) -> Any:
    """``x in t`` of numbers of several types."""
    if len(args) != 2 or not isinstance(args[0], types.Tuple) or not args[0].types or not compiles_ours():
        return None
    if any(isinstance(t, types.BaseTuple) for t in (*args[0].types, args[1])):
        return None
    code = _equals(context, *args)
    if code is None:
        return None

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
        out = ir.Constant(i1, False)
        for same in code(c, builder, *v):
            out = builder.or_(out, same)
        return out

    return signature(types.boolean, *args), codegen


class _Method(AbstractTemplate):
    """``t.count(x)`` and ``t.index(x)``: coordinates."""

    metadata: ClassVar[dict[str, str]] = {"target": "cuda"}       # before Numba's own, which are for any target

    def generic(self, args: tuple, kws: dict) -> Any:
        if kws or len(args) != 1 or _equals(self.context, self.this, args[0]) is None:
            raise TypeError(f"{self.key} takes one number, which the tuple's values can be compared with")
        return signature(index, *args, recvr=self.this)


class _Count(_Method):
    key = "gemmkit tuple.count"


class _Index(_Method):
    key = "gemmkit tuple.index"


@typing_registry.register_attr
class _Methods(AttributeTemplate):
    key, metadata = types.BaseTuple, _Method.metadata

    def generic_resolve(self, ty: Any, attr: str) -> Any:
        if attr not in ("count", "index") or not compiles_ours() or attr in getattr(ty, "fields", ()):
            return None
        return types.BoundFunction(_Count if attr == "count" else _Index, ty)


@lowering_registry.lower("gemmkit tuple.count", types.BaseTuple, types.Any)
def _count(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    same = _equals(context.typing_context, *sig.args)(context, builder, *args)
    out = i32(0)
    for one in same:
        out = builder.add(out, builder.zext(one, i32))
    return out


@lowering_registry.lower("gemmkit tuple.index", types.BaseTuple, types.Any)
def _index(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """The first, and 0 where there is none: Python raises there."""
    same = _equals(context.typing_context, *sig.args)(context, builder, *args)
    out = i32(0)
    for n, one in reversed(list(enumerate(same))):
        out = builder.select(one, i32(n), out)
    return out
