"""Code that is there as often as it is executed.

A loop over a constant range may be unrolled by LLVM, or not; `.unroll` of a schedule promises it. (A product of 8 x 8
registers that is left a loop does not live in registers.)
"""

from __future__ import annotations

from typing import Any

from gemmkit.lang.atoms import atom
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.registers import call_function
from gemmkit.lang.scalars import index

i32 = ir.IntType(32)


def _type_repeat(context: Any, count: Any, function: Any, *args: Any) -> Any:
    if not isinstance(count, types.IntegerLiteral) or not isinstance(function, types.Callable):
        return None
    inner = context.resolve_function_type(function, (index, *args), {})
    if inner is None:
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        for n in range(int(count.literal_value)):
            given = [c.cast(b, x, t, to) for x, t, to in zip((i32(n), *v[2:]), (index, *args), inner.args)]
            call_function(c, b, function, v[1], inner, given)
        return c.get_dummy_value()

    return signature(types.none, count, function, *args), codegen


@atom(_type_repeat)
def repeat(count: int, function: Any, *args: Any) -> None:
    """``function(n, *args)`` for n = 0, 1, ..., ``count`` (a constant) times in the code."""
    for n in range(count):
        function(n, *args)
