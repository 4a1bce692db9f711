"""Pinned pointers to shared memory: loads of a loop that share an address.

LLVM adds what does not change in a loop before what does. A loop over stages whose loads differ in a compile-time part
then has an address of its own for every load, each with its addition. A pinned pointer has the run-time part of all
positions in it, and hides the sum: the loads of a stage have one address, and immediates (f32, 16 steps of 64 FFMAs a
thread: 86 additions a round before, 22 after).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.lang.host import PinnedPointer, SharedPointer
from gemmkit.lang.memory import SHARED, SharedType, ViewType, proxy, shared_pointer, shared_symbol
from gemmkit.lang.numba_hooks import atom, ir, signature, types
from gemmkit.lang.scalars import DTypeType, assembly

i32 = ir.IntType(32)


def _type_shared_place(context: Any, dtype: Any, position: Any) -> Any:
    if not isinstance(dtype, DTypeType) or not isinstance(position, types.Integer):
        return None
    from gemmkit.lang.scalars import index, numpy_dtype

    size = numpy_dtype(dtype.target).itemsize

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        start = b.ptrtoint(b.gep(shared_symbol(b), [i32(0), i32(0)]), i32)
        return b.add(start, b.mul(c.cast(b, v[1], position, index), i32(size)))

    return signature(index, dtype, position), codegen


@atom(_type_shared_place)
def shared_place(dtype: np.dtype, position: int) -> int:
    """A position of elements of ``dtype`` as what `pinned` takes: an address in the shared window, where there is one."""
    return int(position) * np.dtype(dtype).itemsize


def _type_pinned(context: Any, pointer: Any, place: Any) -> Any:
    if not isinstance(pointer, SharedType) or pointer.pinned or not isinstance(place, types.Integer):
        return None
    from gemmkit.lang.scalars import index

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        total = b.add(v[0], c.cast(b, v[1], place, index))
        return assembly(b, "mov.b32 $0, $1;", [i32], [total], pure=True)[0]

    return signature(SharedType(pointer.dtype, pinned=True), pointer, place), codegen


@atom(_type_pinned)
def pinned(pointer: SharedPointer, place: int) -> SharedPointer:
    """The pointer for loads whose positions have a base of ``place`` (`shared_place`), all of them: it is in the pointer,
    and loads add only what is known when the kernel is compiled, as the immediates of one address."""
    return PinnedPointer(pointer.dtype, pointer.offset, place)


def _type_is_pinned(context: Any, pointer: Any) -> Any:
    if not isinstance(pointer, SharedType):
        return None
    is_so = int(pointer.pinned)
    return signature(types.literal(pointer.pinned), pointer), lambda c, b, s, v: ir.Constant(ir.IntType(1), is_so)


@atom(_type_is_pinned)
def is_pinned(pointer: SharedPointer) -> bool:
    """Whether `pinned` made the pointer: known when a kernel is compiled."""
    return isinstance(pointer, PinnedPointer)


def _pinned_decided(context: Any, pointer: Any) -> bool:
    """`is_pinned` before types are inferred (`gemmkit.lang.passes`)."""
    return bool(pointer.ty.pinned)


is_pinned.decided = _pinned_decided


def pointer_at(builder: Any, pointer: SharedType, value: Any, terms: list, llvm_type: Any) -> Any:
    """The LLVM pointer to a position, a sum of terms of which the base comes first."""
    if not pointer.pinned:
        return shared_pointer(builder, pointer, value, terms, llvm_type)
    place = builder.inttoptr(value, ir.PointerType(ir.IntType(8), addrspace=SHARED))
    for term in terms[1:]:
        place = builder.gep(place, [builder.mul(term, i32(pointer.dtype.itemsize))], inbounds=True)
    return builder.bitcast(place, ir.PointerType(llvm_type, addrspace=SHARED))


# --------------------------------------------------------------------------------------------------
# Views whose strides the compiler does not know to be those of the round before.
#
# A loop over tiles reads the same arrays in each round. LLVM computes in front of it what does not change, such as the
# address of an array plus k rows for each of a thread's rows: two registers each, through the loop that multiplies (f64,
# 128 x 128 x 32: 30 registers, and 8 spilled). An `opaque` view has its strides from an instruction that stays where it is.

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
