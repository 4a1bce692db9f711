"""Flags of 4 bytes that other GPUs, copy engines or the host write: a kernel waits for a value (sm_70).

``ld.acquire.sys``: what was written before the flag, by whatever writes at system scope (a copy engine's copies and
``cuStreamWriteValue32`` of one stream, say), is seen behind the wait. TMA reads global memory by the asynchronous proxy, so
`fence_async_global` stands between the wait and its copies (sm_90).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit import emulator
from gemmkit.lang.assembly import assembly, plain
from gemmkit.lang.atoms import atom
from gemmkit.lang.host import View
from gemmkit.lang.memory import ViewType, coordinates_of, global_pointer, proxy
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.scalars import index
from gemmkit.lang.sites import current

i8, i64 = ir.IntType(8), ir.IntType(64)

_TEXT = """{
.reg .pred p; .reg .b32 x; .reg .b64 t, e;
ld.acquire.sys.global.u32 x, [$0]; setp.eq.u32 p, x, $1; @p bra THERE_${:uid};
mov.u64 t, %globaltimer; mul.wide.u32 e, $2, 1000000; add.u64 e, e, t;
AGAIN_${:uid}: ld.acquire.sys.global.u32 x, [$0]; setp.eq.u32 p, x, $1; @p bra THERE_${:uid};
mov.u64 t, %globaltimer; setp.lo.u64 p, t, e; @p bra AGAIN_${:uid};
trap;
THERE_${:uid}:
}"""


def _type_await(context: Any, view: Any, at: Any, value: Any, patience: Any) -> Any:
    if not (isinstance(view, ViewType) and view.ndim == 1 and view.dtype == np.dtype(np.uint32)
            and all(isinstance(x, types.Integer) for x in (at, value, patience))):
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        place = [coordinates_of(c, b, at, v[1], view.coordinate)]
        pointer = b.ptrtoint(global_pointer(b, view, proxy(c, b, view, v[0]), place, i8), i64)
        assembly(b, _TEXT, [], [pointer, c.cast(b, v[2], value, index), c.cast(b, v[3], patience, index)], memory=True)
        return c.get_dummy_value()

    return signature(types.none, view, at, value, patience), codegen


@atom(_type_await)
def await_flag(view: View, at: int, value: int, patience: int) -> None:
    """Wait until flag ``at`` of a view of uint32 has just this value, and acquire what was written before it.

    After ``patience`` milliseconds the kernel traps: the launch fails, where a writer that has gone would have it wait for
    ever. (In the emulator a flag that nothing will write is a DeadlockError at once.)
    """
    emulator.counters.meet(current(), view.memory, view.locate((at,)), int(value))


@atom(plain("fence.proxy.async.global;"))
def fence_async_global() -> None:
    """Let TMA copies that this thread starts from here on read what it has acquired in global memory (sm_90)."""
    current().fence_proxy()
