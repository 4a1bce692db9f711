"""``cp.async``: a thread copies 4, 8 or 16 bytes from global to shared memory and goes on (sm_80+).

Copies complete in one of two ways. A thread gathers those that it has started in groups (`commit_copies`) and waits until
all but the newest groups are done (`wait_copies`); other threads see the bytes after a barrier that follows. Or an mbarrier
is told of the end of all copies that a thread has started (`copies_arrive`).

Copies write as threads do: a `fence_async` stands between them and tensor cores that read the bytes by descriptors.
"""

from __future__ import annotations

import operator
from typing import Any

from gemmkit import emulator
from gemmkit.lang.host import View, current
from gemmkit.lang.memory import SharedType, coordinates_of, global_pointer, near_bytes, proxy, shared_pointer
from gemmkit.lang.numba_hooks import Atom, Context, Signature, TypingContext, Values, atom, ir, signature, types
from gemmkit.lang.scalars import assembly, index, plain
from gemmkit.ptx.barriers import all_but, of_barrier, place
from gemmkit.ptx.memory import is_position

i1, i8, i32, i64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
SIZES = (4, 8, 16)                     # bytes of a copy


def _type_offset_of(context: TypingContext, view: types.Type, position: types.Type) -> Any:
    if not is_position(view, position):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        fields, coordinates = proxy(c, b, view, v[0]), coordinates_of(c, b, position, v[1], view.coordinate)
        if view.near:
            return near_bytes(b, view, fields, coordinates)
        return b.sub(b.ptrtoint(global_pointer(b, view, fields, [coordinates], i8), i64), fields.address)

    return signature(index if view.near else types.int64, view, position), codegen


@atom(_type_offset_of)
def offset_of(view: Any, position: Any) -> int:
    """How many bytes behind the first element of a view another of its elements lies: in 64 bits, of a `near` view in 32. It
    need not be in range."""
    return sum(map(operator.mul, map(int, position), view.steps))


def _copy_of(nbytes: int) -> str:
    """The instruction, without what says how much of it is there."""
    return f"cp.async.{'cg' if nbytes == 16 else 'ca'}.shared.global.L2::128B [$0], [$1], {nbytes}"


def _ends(c: Context, b: ir.IRBuilder, given: tuple, v: Any) -> list[Any]:
    """Where a copy goes, as a 32-bit shared address, and where it comes from."""
    pointer, base, ahead, view, offset = given
    terms = coordinates_of(c, b, base, v[1]) + coordinates_of(c, b, ahead, v[2])
    target = b.ptrtoint(shared_pointer(b, pointer, v[0], terms, i8), i32)
    return [target, b.add(proxy(c, b, view, v[3]).address, c.cast(b, v[4], offset, types.int64))]


def _type_copy(context: TypingContext, pointer: types.Type, base: types.Type, ahead: types.Type, view: types.Type,
               offset: types.Type, count: types.Type, is_there: types.Type) -> Any:
    if not isinstance(pointer, SharedType) or not isinstance(count, types.IntegerLiteral):
        return None
    nbytes = int(count.literal_value) * pointer.dtype.itemsize
    if nbytes not in SIZES or not isinstance(offset, types.Integer) or not isinstance(is_there, types.Boolean):
        return None
    copy = _copy_of(nbytes)
    # A predicate that ignores the source costs one instruction. A size of 0 costs four: ptxas puts it into the address.
    text = f"{{ .reg .pred p; setp.eq.u32 p, $2, 0; {copy}, p; }}"
    always = isinstance(is_there, types.BooleanLiteral) and is_there.literal_value

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        ends = _ends(c, b, (pointer, base, ahead, view, offset), v)
        if always:
            assembly(b, copy + ";", [], ends, memory=True)
        else:
            there = v[6] if v[6].type == i1 else b.trunc(v[6], i1)
            assembly(b, text, [], [*ends, b.zext(there, i32)], memory=True)

    return signature(types.none, pointer, base, ahead, view, offset, count, is_there), codegen


@atom(_type_copy)
def copy_async(pointer: Any, base: int, ahead: int, view: Any, offset: int, count: int, is_there: bool) -> None:
    """Start a copy of ``count`` elements (4, 8 or 16 bytes, a constant), ``offset`` bytes into a view's memory, to position
    ``base + ahead`` of a shared pointer; zeros where ``is_there`` is false, and then no memory is looked at.

    ``offset`` is a multiple of the size, and the position too. What of the position is known when the kernel is compiled
    stands in ``ahead``: it becomes the immediate of the address.
    """
    emulator.copies.start(current(), place(pointer, int(base) + int(ahead)), view.memory,
                        view.address + int(offset) if is_there else None, int(count) * pointer.dtype.itemsize)


def _commit() -> None:
    """The copies that this thread has started since the last one are a group."""
    emulator.copies.commit(current())


commit_copies = Atom("commit_copies", plain("cp.async.commit_group;"), _commit)


def _type_clipped(context: TypingContext, pointer: types.Type, base: types.Type, ahead: types.Type, view: types.Type,
                  offset: types.Type, count: types.Type, there: types.Type) -> Any:
    if not isinstance(pointer, SharedType) or not isinstance(count, types.IntegerLiteral):
        return None
    size = pointer.dtype.itemsize
    nbytes = int(count.literal_value) * size
    if nbytes not in SIZES or not isinstance(offset, types.Integer) or not isinstance(there, types.Integer):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        ends = _ends(c, b, (pointer, base, ahead, view, offset), v)
        assembly(b, f"{_copy_of(nbytes)}, $2;", [], [*ends, b.mul(c.cast(b, v[6], there, index), i32(size))], memory=True)

    return signature(types.none, pointer, base, ahead, view, offset, count, there), codegen


@atom(_type_clipped)
def copy_async_clipped(pointer: Any, base: int, ahead: int, view: Any, offset: int, count: int, there: int) -> None:
    """`copy_async` of ``count`` elements, of which the first ``there`` are in memory: zeros in place of the others, and no
    memory of theirs is looked at. It costs some instructions more."""
    nbytes = int(there) * pointer.dtype.itemsize
    emulator.copies.start(current(), place(pointer, int(base) + int(ahead)), view.memory,
                        view.address + int(offset) if nbytes else None, int(count) * pointer.dtype.itemsize, nbytes)


@atom(all_but("cp.async.wait_group"))
def wait_copies(pending: int) -> None:
    """Wait until all groups of this thread's copies are done but the newest ``pending`` (a constant)."""
    emulator.copies.wait(current(), int(pending))


@atom(of_barrier("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", 0))
def copies_arrive(barriers: Any, n: int) -> None:
    """Have an arrival at barrier ``n`` follow when all copies that this thread has started are done."""
    thread = current()
    emulator.copies.arrive(thread, emulator.barriers.find(thread, place(barriers, n)))


# --------------------------------------------------------------------------------------------------
# Lines of global memory into the L2, ahead of the loads that will read them.

def _type_prefetch(context: TypingContext, view: types.Type, position: types.Type) -> Any:
    if not is_position(view, position):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        at = coordinates_of(c, b, position, v[1], view.coordinate)
        address = b.ptrtoint(global_pointer(b, view, proxy(c, b, view, v[0]), [at], i8), i64)
        assembly(b, "prefetch.global.L2 [$0];", [], [address])

    return signature(types.none, view, position), codegen


@atom(_type_prefetch)
def prefetch(view: View, position: Any) -> None:
    """Bring the line of an element into the L2. No value is read, so it may stand before `grid_wait`: what a kernel before
    still writes goes through the same L2."""
