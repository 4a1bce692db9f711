"""Words of a line of memory that ends: the load of a tile at an edge of a matrix whose rows begin anywhere.

A branch about the edge would keep each load behind the arrival of the one before, in every thread of a warp that has an edge
in one of them. So there is none: the loads themselves are predicated, and what is beyond the end becomes zero.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import atom
from gemmkit.lang.host import View
from gemmkit.lang.memory import coordinates_of, global_pointer, proxy
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.ptx.memory import is_position
from gemmkit.ptx.words import LINE, words_from

i8, i32, i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _type_load_words_within(context: Any, view: Any, axis: Any, base: Any, offset: Any, count: Any, left: Any) -> Any:
    if not is_position(view, base, offset) or not isinstance(count, types.IntegerLiteral):
        return None
    if not isinstance(left, types.Integer):
        return None
    n, along, size = int(count.literal_value), int(axis.literal_value), view.dtype.itemsize
    if view.unit != along or n * size % LINE or size > 8:
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        array = proxy(c, b, view, v[0])
        some = c.cast(b, v[5], left, types.int64)
        some = b.trunc(b.select(b.icmp_signed("<", some, i64(n)), some, i64(n)), i32)
        words: list = []
        for at in range(0, n, LINE // size):
            start = [coordinates_of(c, b, ty, value, view.coordinate) for ty, value in ((base, v[2]), (offset, v[3]))]
            start[-1] = [b.add(x, x.type(at if dimension == along else 0)) for dimension, x in enumerate(start[-1])]
            here = b.sub(some, i32(at))
            first = b.ptrtoint(global_pointer(b, view, array, start, i8), i64)
            loaded = words_from(b, first, _words(b, first, here, size))
            words += [_kept(b, word, here, k, size) for k, word in enumerate(loaded)]
        return c.make_tuple(b, s.return_type, words)

    return signature(types.UniTuple(types.uint32, n * size // 4), view, axis, base, offset, count, left), codegen


def _words(b: Any, first: Any, here: Any, size: int) -> Callable[[int], Any]:
    """Loads the n-th aligned word from an address on, if it has bytes of the ``here`` elements there; else it is zero."""
    aligned, most = b.and_(first, i64(-4)), i32(LINE // size)
    nbytes = b.mul(b.select(b.icmp_signed("<", here, most), here, most), i32(size))
    nbytes = b.select(b.icmp_signed(">", here, i32(0)), b.add(nbytes, b.and_(b.trunc(first, i32), i32(3))), i32(0))

    def load(n: int) -> Any:
        text = (f"{{ .reg .pred there; setp.gt.s32 there, $2, {4 * n}; mov.b32 $0, 0; "
                f"@there ld.global.b32 $0, [$1+{4 * n}]; }}")
        return assembly(b, text, [i32], [aligned, nbytes])[0]

    return load


def _kept(b: Any, word: Any, here: Any, k: int, size: int) -> Any:
    """The ``k``-th word of a line of which ``here`` elements are there, zeros in place of the others."""
    per = max(1, 4 // size)
    left = b.sub(here, i32(k * 4 // size))
    kept = word
    for n in range(1, per):                                # the least that is enough: a mask for each number of elements
        kept = b.select(b.icmp_signed("<=", left, i32(per - n)), b.and_(word, i32((1 << 8 * size * (per - n)) - 1)), kept)
    return b.select(b.icmp_signed(">", left, i32(0)), kept, i32(0))


@atom(_type_load_words_within)
def load_words_within(view: View, axis: int, base: Any, offset: Any, count: int, left: int) -> tuple:
    """`load_words` of ``count`` elements along a contiguous ``axis`` (a multiple of 16 bytes), the first ``left`` of which
    are in the array; zeros in place of the others, none of which is read. ``left`` may be any number."""
    kept = min(max(int(left), 0), count)
    data = np.zeros(count * view.dtype.itemsize, np.uint8)
    if kept:
        data[:kept * view.dtype.itemsize] = view.load_bytes(axis, tuple(map(operator.add, base, offset)), kept)
    return tuple(data.view(np.uint32))
