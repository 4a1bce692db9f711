"""Clusters: blocks that run at the same time, reach each other's shared memory and meet (sm_90)."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from gemmkit.emulator import copies
from gemmkit.emulator.machine import current
from gemmkit.lang.atoms import atom
from gemmkit.lang.memory import SharedType
from gemmkit.lang.numba_hooks import signature, types
from gemmkit.lang.scalars import index
from gemmkit.ptx.build import assembly, plain
from gemmkit.ptx.mbarrier import element_address, is_barrier, place

i32 = ir.IntType(32)


def _type_rank(context: Any) -> Any:
    return (signature(index),
            lambda c, b, s, v: assembly(b, "mov.u32 $0, %cluster_ctarank;", [i32], [], pure=True)[0])


@atom(_type_rank)
def cluster_rank() -> int:
    """The block's number in its cluster."""
    return current().block.cluster_rank


_ARRIVE, _WAIT = "barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"


@atom(plain(_ARRIVE, convergent=True))
def cluster_arrive() -> None:
    """Say that this thread has come to the cluster's barrier, and go on; `cluster_wait` is to follow."""
    thread = current()
    thread.block.cluster_barrier.arrive(thread)


@atom(plain(_WAIT, convergent=True))
def cluster_wait() -> None:
    """Wait until all threads of the cluster have come to its barrier; what they wrote before is seen after."""
    thread = current()
    thread.block.cluster_barrier.wait(thread)


@atom(plain(f"{_ARRIVE} {_WAIT}", convergent=True))
def cluster_barrier() -> None:
    """All threads of all blocks of the cluster meet."""
    cluster_arrive()
    cluster_wait()


def _type_store_async(context: Any, pointer: Any, position: Any, values: Any, barriers: Any, n: Any, rank: Any) -> Any:
    if not (isinstance(pointer, SharedType) and isinstance(position, types.Integer) and is_barrier(barriers, n)
            and isinstance(rank, types.Integer) and isinstance(values, types.UniTuple) and values.count == 4
            and pointer.dtype.itemsize == 4 and values.dtype == pointer.element):
        return None
    text = ("{ .reg .b32 there, barrier; mapa.shared::cluster.u32 there, $0, $6; mapa.shared::cluster.u32 barrier, $5, $6; "
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {$1, $2, $3, $4}, [barrier]; }")

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        words = [b.bitcast(b.extract_value(v[2], i), i32) for i in range(4)]
        assembly(b, text, [], [element_address(c, b, pointer, v[0], position, v[1]), *words,
                               element_address(c, b, barriers, v[3], n, v[4]), c.cast(b, v[5], rank, index)], memory=True)
        return c.get_dummy_value()

    return signature(types.none, pointer, position, values, barriers, n, rank), codegen


@atom(_type_store_async)
def store_async(pointer: Any, position: int, values: tuple, barriers: Any, n: int, rank: int) -> None:
    """Send four elements of 4 bytes to the shared memory of block ``rank`` of the cluster, to the place that ``position`` (a
    multiple of 4) of ``pointer`` is here. Their 16 bytes are given to that block's barrier ``n`` of ``barriers``."""
    data = np.array(values, pointer.dtype).view(np.uint8)
    copies.send(current(), place(pointer, position), data, place(barriers, n), int(rank))
