"""Reductions over tuples of registers, unrolled: one chain of dependent operations, or several side by side.

`control.fold` counts, and `registers.apply` maps one tuple. `reduce` folds over a tuple's values, and `together` maps two:
``reduce(f, groups[0], groups[1:])`` with an ``f`` that is `together` has as many chains as a group has values, which hides
the latency of one.

>>> reduce(max, 1, (5, 3)), together(max, (1, 4), (2, 3))
(5, (2, 4))
"""

from __future__ import annotations

from typing import Any

from gemmkit.lang.atoms import atom
from gemmkit.lang.numba_hooks import signature, types
from gemmkit.lang.registers import call_function


def _type_reduce(context: Any, function: Any, value: Any, values: Any, *args: Any) -> Any:
    if not isinstance(values, types.UniTuple) or not isinstance(function, types.Callable):
        return None
    kept = types.unliteral(value)
    inner = context.resolve_function_type(function, (kept, values.dtype, *args), {})
    if inner is None:
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        out = c.cast(b, v[1], value, kept)
        for n in range(values.count):
            operands = (out, b.extract_value(v[2], n), *v[3:])
            given = [c.cast(b, x, t, to) for x, t, to in zip(operands, (kept, values.dtype, *args), inner.args)]
            out = c.cast(b, call_function(c, b, function, v[0], inner, given), inner.return_type, kept)
        return out

    return signature(kept, function, value, values, *args), codegen


@atom(_type_reduce)
def reduce(function: Any, value: Any, values: tuple, *args: Any) -> Any:
    """``for x in values: value = function(value, x, *args)``, unrolled; the value keeps its type."""
    for x in values:
        value = function(value, x, *args)
    return value


def _type_together(context: Any, function: Any, a: Any, b: Any) -> Any:
    if not all(isinstance(t, types.UniTuple) for t in (a, b)) or a.count != b.count:
        return None
    inner = context.resolve_function_type(function, (a.dtype, b.dtype), {})
    if inner is None:
        return None
    result = types.UniTuple(inner.return_type, a.count)

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
        out = []
        for n in range(a.count):
            given = [c.cast(builder, builder.extract_value(x, n), t, to)
                     for x, t, to in zip(v[1:], (a.dtype, b.dtype), inner.args)]
            out.append(call_function(c, builder, function, v[0], inner, given))
        return c.make_tuple(builder, result, out)

    return signature(result, function, a, b), codegen


@atom(_type_together)
def together(function: Any, a: tuple, b: tuple) -> tuple:
    """``tuple(function(x, y) for x, y in zip(a, b))``, unrolled."""
    return tuple(function(x, y) for x, y in zip(a, b))
