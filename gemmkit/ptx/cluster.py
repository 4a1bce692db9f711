"""Clusters: blocks that run at the same time, reach each other's shared memory and meet (sm_90)."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit import emulator
from gemmkit.lang.assembly import assembly, braces, plain
from gemmkit.lang.atoms import atom
from gemmkit.lang.host import piece_bytes
from gemmkit.lang.memory import SharedType, coordinates_of
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.records import part_size, scalars
from gemmkit.lang.scalars import index
from gemmkit.lang.sites import current
from gemmkit.ptx.ldmatrix import shared_address
from gemmkit.ptx.mbarrier import element_address, is_barrier, place
from gemmkit.ptx.memory import as_words, unit_type, unpack

i32 = ir.IntType(32)


def _register(name: str) -> Any:
    """The typer of an atom that reads a special register."""
    def typer(context: Any) -> Any:
        return signature(index), lambda c, b, s, v: assembly(b, f"mov.u32 $0, %{name};", [i32], [], pure=True)[0]

    return typer


@atom(_register("cluster_ctarank"))
def cluster_rank() -> int:
    """The block's number in its cluster."""
    return current().block.cluster_rank


@atom(_register("cluster_nctarank"))
def cluster_size() -> int:
    """The blocks of its cluster."""
    return len(current().block.cluster)


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
            and isinstance(rank, types.Integer) and isinstance(values, types.UniTuple) and values.dtype == pointer.element
            and pointer.dtype.itemsize in (4, 8) and values.count * pointer.dtype.itemsize in (4, 8, 16)):
        return None
    words = values.count * pointer.dtype.itemsize // 4
    vector = "" if words == 1 else f".v{words}"
    data = "$1" if words == 1 else braces(1, words)
    text = (f"{{ .reg .b32 there, barrier; mapa.shared::cluster.u32 there, $0, ${words + 2}; "
            f"mapa.shared::cluster.u32 barrier, ${words + 1}, ${words + 2}; "
            f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [there], {data}, [barrier]; }}")

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        given: list = []
        for i in range(values.count):
            one = b.extract_value(v[2], i)
            given += as_words(b, b.bitcast(one, ir.IntType(8 * pointer.dtype.itemsize)))
        assembly(b, text, [], [element_address(c, b, pointer, v[0], position, v[1]), *given,
                               element_address(c, b, barriers, v[3], n, v[4]), c.cast(b, v[5], rank, index)], memory=True)
        return c.get_dummy_value()

    return signature(types.none, pointer, position, values, barriers, n, rank), codegen


@atom(_type_store_async)
def store_async(pointer: Any, position: int, values: tuple, barriers: Any, n: int, rank: int) -> None:
    """Send elements of 4 or 8 bytes, together 4, 8 or 16, to the shared memory of block ``rank`` of the cluster: to the
    place that ``position`` of ``pointer`` (a multiple of their number) is here. Their bytes are given to that block's
    barrier ``n`` of ``barriers``."""
    data = np.array(values, pointer.dtype).view(np.uint8)
    emulator.copies.send(current(), place(pointer, position), data, place(barriers, n), int(rank))


def _type_load(context: Any, rank: Any, pointer: Any, base: Any, offset: Any, count: Any) -> Any:
    if not (isinstance(rank, types.Integer) and isinstance(pointer, SharedType) and isinstance(count, types.IntegerLiteral)
            and isinstance(base, types.Integer) and isinstance(offset, types.Integer)):
        return None
    n, size = int(count.literal_value), pointer.dtype.itemsize
    step = piece_bytes(n * size, 16)
    width, words = step // size, step // 4
    if not width or not words:
        return None
    unit = unit_type(step, part_size(pointer.dtype))

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        # Apart from the loads, so that one of these serves all whose base is the same.
        mapped = assembly(b, "mapa.shared::cluster.u32 $0, $1, $2;", [i32],
                          [shared_address(b, pointer, v[1], coordinates_of(c, b, base, v[2])),
                           c.cast(b, v[0], rank, index)], pure=True)[0]
        first = b.add(mapped, b.mul(c.cast(b, v[3], offset, index), i32(size)))
        text = f"ld.shared::cluster{'' if words == 1 else f'.v{words}'}.b32 "
        text += f"{'$0' if words == 1 else braces(0, words)}, [${words}];"
        out: list = []
        for at in range(0, n * size, step):
            value = ir.Constant(ir.VectorType(i32, words), ir.Undefined)
            for k, word in enumerate(assembly(b, text, [i32] * words, [b.add(first, i32(at))], memory=True)):
                value = b.insert_element(value, word, i32(k))
            out += unpack(c, b, pointer.element, b.bitcast(value, unit), width)
        return c.make_tuple(b, s.return_type, out)

    return signature(types.UniTuple(pointer.element, n), rank, pointer, base, offset, count), codegen


@atom(_type_load)
def load_shared_of(rank: int, pointer: Any, base: int, offset: int, count: int) -> tuple:
    """``count`` elements (4 bytes or more) from the shared memory of block ``rank`` of the cluster, from where
    ``base + offset`` of ``pointer`` is there; the position must be aligned to the access. The cluster meets after they are
    written, and again before that block ends."""
    return scalars(emulator.clusters.read(current(), int(rank), place(pointer, int(base) + int(offset)),
                                 int(count) * pointer.dtype.itemsize), pointer.dtype)
