"""Fused multiply-add of the ordinary floating-point units."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.lang.atoms import atom
from gemmkit.lang.numba_hooks import signature, types
from gemmkit.lang.scalars import NarrowFloatType


def _typer(context: Any, a: Any, b: Any, c: Any) -> Any:
    if not (a == b == c):
        return None
    if isinstance(a, types.Float):
        def fused(ctx: Any, builder: Any, s: Any, v: Any) -> Any:
            return builder.fma(*v)

        return signature(a, a, b, c), fused
    if isinstance(a, types.Integer):
        return signature(a, a, b, c), lambda ctx, builder, s, v: builder.add(builder.mul(v[0], v[1]), v[2])
    if isinstance(a, NarrowFloatType):
        def narrow(ctx: Any, builder: Any, s: Any, v: Any) -> Any:
            wide = [ctx.cast(builder, x, a, types.float32) for x in v]
            out = builder.fma(*wide)
            return ctx.cast(builder, out, types.float32, a)

        return signature(a, a, b, c), narrow
    return None


@atom(_typer)
def fma(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` rounded once; integers wrap. All three of one type."""
    kind = np.asarray(c).dtype
    with np.errstate(all="ignore"):
        if kind.kind in "iu":
            return kind.type((int(a) * int(b) + int(c)) & ((1 << 8 * kind.itemsize) - 1)) if kind.kind == "u" else \
                np.array(int(a) * int(b) + int(c)).astype(np.int64).astype(kind)[()]
        if kind == np.float64:
            return kind.type(a * b + c)
        return kind.type(np.float64(a) * np.float64(b) + np.float64(c))
