"""A point in the code that a value is computed before, and that the assembler moves no wait for wgmma over."""

from __future__ import annotations

from typing import Any

from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import atom
from gemmkit.lang.memory import SharedType
from gemmkit.lang.numba_hooks import signature, types
from gemmkit.ptx.ldmatrix import shared_address

#: The bits of a NaN that no arithmetic gives: results that are none are 0x7fffffff.
NEVER = 0x7fbadbad


def _type_anchor(context: Any, pointer: Any, value: Any) -> Any:
    if not isinstance(pointer, SharedType) or value != types.float32:
        return None
    text = (f"{{ .reg .pred never; .reg .b32 bits; mov.b32 bits, $1; setp.eq.b32 never, bits, {NEVER:#x}; "
            "@never mbarrier.arrive.shared::cta.b64 _, [$0]; }")

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        assembly(b, text, [], [shared_address(b, pointer, v[0], []), v[1]], memory=True)
        return c.get_dummy_value()

    return signature(types.none, pointer, value), codegen


@atom(_type_anchor)
def anchor(barriers: Any, value: float) -> None:
    """Nothing, when ``value`` (a float32) is computed: two instructions of which the second is never executed.

    ptxas moves the wait for a group of wgmma over arithmetic that does not need its results, so that what is to run under
    the products comes behind them. It does not move it over an arrival at a barrier, and one that needs a value keeps what
    the value is made of before it. ``barriers`` is any pointer to barriers of the block's.
    """
