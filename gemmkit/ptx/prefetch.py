"""Lines of global memory into the L2, ahead of the loads that will read them."""

from __future__ import annotations

from typing import Any

from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import atom
from gemmkit.lang.host import View
from gemmkit.lang.memory import coordinates_of, global_pointer, proxy
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.ptx.memory import is_position

i8, i64 = ir.IntType(8), ir.IntType(64)


def _type_prefetch(context: Any, view: Any, position: Any) -> Any:
    if not is_position(view, position):
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        at = coordinates_of(c, b, position, v[1], view.coordinate)
        address = b.ptrtoint(global_pointer(b, view, proxy(c, b, view, v[0]), [at], i8), i64)
        assembly(b, "prefetch.global.L2 [$0];", [], [address])
        return c.get_dummy_value()

    return signature(types.none, view, position), codegen


@atom(_type_prefetch)
def prefetch(view: View, position: Any) -> None:
    """Bring the line of an element into the L2. No value is read, so it may stand before `grid_wait`: what a kernel before
    still writes goes through the same L2."""
