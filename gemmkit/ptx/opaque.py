"""Views whose strides the compiler does not know to be those of the round before.

A loop over tiles reads the same arrays in each round. LLVM computes in front of it what does not change, such as the address
of an array plus k rows for each of a thread's rows: two registers each, through the loop that multiplies (f64,
128 x 128 x 32: 30 registers, and 8 spilled). An `opaque` view has its strides from an instruction that stays where it is.
"""

from __future__ import annotations

from typing import Any

from gemmkit.lang.atoms import atom
from gemmkit.lang.memory import ViewType, proxy
from gemmkit.lang.numba_hooks import ir, signature

i64 = ir.IntType(64)


def _type_opaque(context: Any, view: Any) -> Any:
    if not isinstance(view, ViewType):
        return signature(view, view), lambda c, b, s, v: v[0]
    hidden = ir.InlineAsm(ir.FunctionType(i64, [i64]), "mov.b64 $0, $1;", "=l,l", side_effect=True)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        out = proxy(c, b, view, v[0])
        for axis in range(view.ndim):
            if axis != view.unit:
                setattr(out, f"stride{axis}", b.call(hidden, [getattr(out, f"stride{axis}")]))
        return out._getvalue()

    return signature(view, view), codegen


@atom(_type_opaque)
def opaque(view: Any) -> Any:
    """The view, with strides of which LLVM knows nothing; another operand (none, say) as it is."""
    return view
