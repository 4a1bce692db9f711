"""Counters in global memory, by which blocks tell each other how far they are (sm_70).

``order`` is a constant: what else the access orders, for all blocks of the device. What a block's other threads did is
ordered as well where they met at a barrier before (release) or meet behind it (acquire).

| order | of an addition | means |
|---|---|---|
| "relaxed" | atom.relaxed | nothing but the number itself |
| "release" | atom.release | who acquires the counter afterwards sees what this thread did, and knew of, before |
| "acquire" | atom.acquire | this thread sees what those did who released the counter before |
| "acq_rel" | atom.acq_rel | both |
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit import emulator
from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import atom
from gemmkit.lang.host import View
from gemmkit.lang.memory import ViewType, coordinates_of, global_pointer, proxy
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.scalars import index
from gemmkit.lang.sites import current

i8, i32, i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
ORDERS = ("relaxed", "release", "acquire", "acq_rel")


def _is_counter(view: Any, at: Any) -> bool:
    return (isinstance(view, ViewType) and view.ndim == 1 and view.dtype == np.dtype(np.uint32) and not view.readonly
            and isinstance(at, types.Integer))


def _address(c: Any, b: Any, view: ViewType, value: Any, at: Any, position: Any) -> Any:
    pointer = global_pointer(b, view, proxy(c, b, view, value), [coordinates_of(c, b, at, position, view.coordinate)], i8)
    return b.ptrtoint(pointer, i64)


def _type_add(context: Any, view: Any, at: Any, number: Any, order: Any) -> Any:
    if not (_is_counter(view, at) and isinstance(number, types.Integer) and isinstance(order, types.StringLiteral)
            and order.literal_value in ORDERS):
        return None
    text = f"atom.{order.literal_value}.gpu.global.add.u32 $0, [$1], $2;"

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        operands = [_address(c, b, view, v[0], at, v[1]), c.cast(b, v[2], number, index)]
        return assembly(b, text, [i32], operands, memory=True)[0]

    return signature(index, view, at, number, order), codegen


@atom(_type_add)
def atomic_add(view: View, at: int, number: int, order: str) -> int:
    """Add to the counter ``at`` of a view of uint32; what it was before."""
    return emulator.counters.add(current(), view.memory, view.locate((at,)), int(number), order)


def _type_set(context: Any, view: Any, at: Any, number: Any) -> Any:
    if not (_is_counter(view, at) and isinstance(number, types.Integer)):
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        assembly(b, "st.relaxed.gpu.global.u32 [$0], $1;", [],
                 [_address(c, b, view, v[0], at, v[1]), c.cast(b, v[2], number, index)], memory=True)
        return c.get_dummy_value()

    return signature(types.none, view, at, number), codegen


@atom(_type_set)
def set_counter(view: View, at: int, number: int) -> None:
    """Set the counter ``at`` of a view of uint32, ordering nothing else."""
    emulator.counters.put(current(), view.memory, view.locate((at,)), int(number))


def _type_await(context: Any, view: Any, at: Any, number: Any, order: Any) -> Any:
    if not (_is_counter(view, at) and isinstance(number, types.Integer) and isinstance(order, types.StringLiteral)
            and order.literal_value in ("relaxed", "acquire")):
        return None
    text = (f"{{ .reg .pred p; .reg .b32 x; AGAIN_${{:uid}}: ld.{order.literal_value}.gpu.global.u32 x, [$0]; "
            "setp.lo.u32 p, x, $1; @p bra AGAIN_${:uid}; }")

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        assembly(b, text, [], [_address(c, b, view, v[0], at, v[1]), c.cast(b, v[2], number, index)], memory=True)
        return c.get_dummy_value()

    return signature(types.none, view, at, number, order), codegen


@atom(_type_await)
def await_counter(view: View, at: int, number: int, order: str) -> None:
    """Look at the counter ``at`` of a view of uint32 until it is ``number`` at least ("acquire" or "relaxed").

    Who is awaited must run: a block that waits for one that finds no multiprocessor waits for ever.
    """
    emulator.counters.wait(current(), view.memory, view.locate((at,)), int(number), order)
