"""Clusters: blocks that run at the same time, reach each other's shared memory and meet (sm_90)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from gemmkit.emulator.machine import current
from gemmkit.lang.atoms import atom
from gemmkit.lang.numba_hooks import signature, types
from gemmkit.lang.scalars import index
from gemmkit.ptx.build import assembly

i32 = ir.IntType(32)


def _type_rank(context: Any) -> Any:
    return (signature(index),
            lambda c, b, s, v: assembly(b, "mov.u32 $0, %cluster_ctarank;", [i32], [], pure=True)[0])


@atom(_type_rank)
def cluster_rank() -> int:
    """The block's number in its cluster."""
    return current().block.cluster_rank


def _together(text: str) -> Any:
    def typer(context: Any) -> Any:
        def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
            assembly(b, text, [], [], memory=True, convergent=True)
            return c.get_dummy_value()

        return signature(types.none), codegen

    return typer


_ARRIVE, _WAIT = "barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"


@atom(_together(_ARRIVE))
def cluster_arrive() -> None:
    """Say that this thread has come to the cluster's barrier, and go on; `cluster_wait` is to follow."""
    thread = current()
    thread.block.cluster_barrier.arrive(thread)


@atom(_together(_WAIT))
def cluster_wait() -> None:
    """Wait until all threads of the cluster have come to its barrier; what they wrote before is seen after."""
    thread = current()
    thread.block.cluster_barrier.wait(thread)


@atom(_together(f"{_ARRIVE} {_WAIT}"))
def cluster_barrier() -> None:
    """All threads of all blocks of the cluster meet."""
    cluster_arrive()
    cluster_wait()
