"""Values of other lanes of the warp: shfl.sync, of elements of 16, 32 and (in two halves) 64 bits."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import Atom
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.number_types import numpy_dtype
from gemmkit.lang.scalars import NarrowFloatType, index
from gemmkit.lang.sites import current

i32 = ir.IntType(32)


def _from(mode: str, lane: int, n: int) -> int:
    """The lane of which ``lane`` gets the value: its own where there is none."""
    found = {"bfly": lane ^ n, "idx": n, "up": lane - n, "down": lane + n}[mode]
    return found % 32 if mode == "idx" else found if 0 <= found < 32 else lane


def _shuffle(mode: str, doc: str) -> Atom:
    text = f"shfl.sync.{mode}.b32 $0, $1, $2, {'0x0' if mode == 'up' else '0x1f'}, 0xffffffff;"

    def typer(context: Any, value: Any, n: Any) -> Any:
        if not isinstance(value, (types.Integer, types.Float, NarrowFloatType)) or not isinstance(n, types.Integer):
            return None
        bits = 8 * numpy_dtype(value).itemsize
        if bits not in (16, 32, 64):
            return None

        def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
            lane = c.cast(b, v[1], n, index)
            word = b.bitcast(v[0], ir.IntType(bits))
            if bits == 64:
                halves = b.trunc(word, i32), b.trunc(b.lshr(word, word.type(32)), i32)
                low, high = (b.zext(assembly(b, text, [i32], [half, lane], convergent=True)[0], word.type)
                             for half in halves)
                return b.bitcast(b.or_(low, b.shl(high, word.type(32))), v[0].type)
            word = b.zext(word, i32) if bits < 32 else word
            out = assembly(b, text, [i32], [word, lane], convergent=True)[0]
            return b.bitcast(b.trunc(out, ir.IntType(bits)) if bits < 32 else out, v[0].type)

        return signature(types.unliteral(value), value, n), codegen

    def emulate(value: Any, n: int) -> Any:
        def exchange(given: list) -> list:
            return [given[_from(mode, lane, step)][0] for lane, (_, step) in enumerate(given)]

        return current().collective(f"shfl.{mode}", (value, int(n)), exchange, sync=False)

    return Atom(f"shfl_{mode}", typer, emulate, doc)


#: ``SHUFFLE[mode](value, n)``, executed by all lanes of a warp.
SHUFFLE = MappingProxyType({
    "bfly": _shuffle("bfly", "The value of lane ``lane ^ n``."),
    "idx": _shuffle("idx", "The value of lane ``n``."),
    "up": _shuffle("up", "The value of lane ``lane - n``; the own where there is none."),
    "down": _shuffle("down", "The value of lane ``lane + n``; the own where there is none."),
})
