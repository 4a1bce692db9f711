"""``cp.async``: a thread copies 4, 8 or 16 bytes from global to shared memory and goes on (sm_80+).

An mbarrier can be told of the end of all copies that a thread has started (`copies_arrive`). They write as threads do, so
whoever reads the bytes with tensor cores calls `fence_async` in between.
"""

from __future__ import annotations

import operator
from typing import Any

from gemmkit.emulator import mbarriers, thread_copies
from gemmkit.emulator.machine import current
from gemmkit.lang.atoms import atom
from gemmkit.lang.memory import SharedType, coordinates_of, global_pointer, proxy
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.ptx.build import assembly
from gemmkit.ptx.mbarrier import element_address, is_barrier, place
from gemmkit.ptx.memory import is_position

i1, i8, i32, i64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
SIZES = (4, 8, 16)                     # bytes of a copy


def _type_offset_of(context: Any, view: Any, position: Any) -> Any:
    if not is_position(view, position):
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        fields = proxy(c, b, view, v[0])
        pointer = global_pointer(b, view, fields, [coordinates_of(c, b, position, v[1], view.coordinate)], i8)
        return b.sub(b.ptrtoint(pointer, i64), fields.address)

    return signature(types.int64, view, position), codegen


@atom(_type_offset_of)
def offset_of(view: Any, position: Any) -> int:
    """How many bytes behind the first element of a view another of its elements lies. It need not be in range."""
    return sum(map(operator.mul, map(int, position), view.steps))


def _type_copy(context: Any, pointer: Any, position: Any, view: Any, offset: Any, count: Any, is_there: Any) -> Any:
    if not isinstance(pointer, SharedType) or not isinstance(count, types.IntegerLiteral):
        return None
    nbytes = int(count.literal_value) * pointer.dtype.itemsize
    if nbytes not in SIZES or not isinstance(offset, types.Integer) or not isinstance(is_there, types.Boolean):
        return None
    text = f"cp.async.{'cg' if nbytes == 16 else 'ca'}.shared.global [$0], [$1], {nbytes}, $2;"

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        source = b.add(proxy(c, b, view, v[2]).address, c.cast(b, v[3], offset, types.int64))
        there = v[5] if v[5].type == i1 else b.trunc(v[5], i1)
        assembly(b, text, [], [element_address(c, b, pointer, v[0], position, v[1]), source,
                               b.select(there, i32(nbytes), i32(0))], memory=True)
        return c.get_dummy_value()

    return signature(types.none, pointer, position, view, offset, count, is_there), codegen


@atom(_type_copy)
def copy_async(pointer: Any, position: int, view: Any, offset: int, count: int, is_there: bool) -> None:
    """Start a copy of ``count`` elements (4, 8 or 16 bytes, a constant), ``offset`` bytes into a view's memory, to
    ``position`` of a shared pointer; zeros where ``is_there`` is false, and then no memory is looked at.

    ``offset`` is a multiple of the size, and ``position`` too.
    """
    thread_copies.copy(current(), place(pointer, position), view.memory, view.address + int(offset) if is_there else None,
                       int(count) * pointer.dtype.itemsize)


def _type_arrive(context: Any, pointer: Any, n: Any) -> Any:
    if not is_barrier(pointer, n):
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        assembly(b, "cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", [], [element_address(c, b, pointer, v[0], n, v[1])],
                 memory=True)
        return c.get_dummy_value()

    return signature(types.none, pointer, n), codegen


@atom(_type_arrive)
def copies_arrive(barriers: Any, n: int) -> None:
    """Have an arrival at barrier ``n`` follow when all copies that this thread has started are done."""
    thread = current()
    thread_copies.arrive(thread, mbarriers.find(thread, place(barriers, n)))


__all__ = ["copies_arrive", "copy_async", "offset_of"]
