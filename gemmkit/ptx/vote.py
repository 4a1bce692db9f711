"""What the lanes of a warp agree on: vote.sync."""

from __future__ import annotations

from typing import Any

from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import atom
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.sites import current


def _type_any(context: Any, condition: Any) -> Any:
    if not isinstance(condition, types.Boolean):
        return None
    text = ("{ .reg .pred there; setp.ne.u32 there, $1, 0; vote.sync.any.pred there, there, 0xffffffff; "
            "selp.u32 $0, 1, 0, there; }")

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        i32 = ir.IntType(32)
        found = assembly(b, text, [i32], [b.zext(v[0], i32)], convergent=True)[0]
        return b.icmp_unsigned("!=", found, i32(0))

    return signature(types.boolean, condition), codegen


@atom(_type_any)
def any_lane(condition: bool) -> bool:
    """Whether a condition holds in any lane of the warp, all of which execute it: a branch on it is the whole warp's."""
    return current().collective("vote.any", bool(condition), lambda given: [any(given)] * len(given), sync=False)
