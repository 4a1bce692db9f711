"""Clusters: blocks that run at the same time, reach each other's shared memory and meet (sm_90)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from gemmkit.emulator.machine import current
from gemmkit.lang.atoms import atom
from gemmkit.lang.numba_hooks import signature
from gemmkit.lang.scalars import index
from gemmkit.ptx.build import assembly, plain

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
