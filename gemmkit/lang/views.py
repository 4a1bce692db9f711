"""One of two arrays, chosen when the kernel runs: what is read from it is read by one instruction, whichever it is."""

from __future__ import annotations

from typing import Any

from gemmkit.lang.atoms import atom
from gemmkit.lang.memory import ViewType, proxy
from gemmkit.lang.numba_hooks import ir, signature, types

i1, i64 = ir.IntType(1), ir.IntType(64)


def _common(one: ViewType, other: ViewType) -> ViewType:
    """The type of a view that may be either: with what is known of both."""
    return ViewType(one.dtype, one.ndim, one.unit if one.unit == other.unit else None, min(one.alignment, other.alignment),
                    one.wide or other.wide, one.readonly or other.readonly)


def _type_either(context: Any, condition: Any, one: Any, other: Any) -> Any:
    if not isinstance(condition, types.Boolean) or not isinstance(one, ViewType) or not isinstance(other, ViewType):
        return None
    if one.dtype != other.dtype or one.ndim != other.ndim:
        return None
    to = _common(one, other)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        is_one = v[0] if v[0].type == i1 else b.trunc(v[0], i1)
        given = [(ty, proxy(c, b, ty, value)) for ty, value in ((one, v[1]), (other, v[2]))]
        out = proxy(c, b, to, None)
        out.address = b.select(is_one, *(view.address for _, view in given))
        for axis in range(to.ndim):
            extents = [c.cast(b, getattr(view, f"extent{axis}"), ty.coordinate, to.coordinate) for ty, view in given]
            setattr(out, f"extent{axis}", b.select(is_one, *extents))
            if axis != to.unit:
                strides = [i64(1) if axis == ty.unit else getattr(view, f"stride{axis}") for ty, view in given]
                setattr(out, f"stride{axis}", b.select(is_one, *strides))
        return out._getvalue()

    return signature(to, condition, one, other), codegen


@atom(_type_either)
def either(condition: bool, one: Any, other: Any) -> Any:
    """The view ``one`` where the condition holds, else ``other``: two views of one dtype and as many dimensions. Accesses
    are as wide as both allow."""
    return one if condition else other
