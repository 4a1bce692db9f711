"""Counters and flags in global memory (sm_70), mbarriers in shared memory, and clusters (sm_90).

Blocks tell each other by counters how far they are. ``order`` is a constant: what else the access orders, for all blocks of
the device. What a block's other threads did is ordered as well where they met at a barrier before (release) or meet behind
it (acquire).

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
from gemmkit.lang.host import SharedPointer, current, piece_bytes
from gemmkit.lang.memory import SharedType, ViewType, coordinates_of, global_pointer, proxy
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, ir, signature, types
from gemmkit.lang.number_rules import part_size, scalars
from gemmkit.lang.scalars import assembly, braces, index, plain
from gemmkit.ptx.memory import as_words, unit_type, unpack
from gemmkit.ptx.mma import shared_address

i8, i32, i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
ORDERS = ("relaxed", "release", "acquire", "acq_rel")


def _is_counter(view: types.Type, at: types.Type) -> bool:
    return (isinstance(view, ViewType) and view.ndim == 1 and view.dtype == np.dtype(np.uint32) and not view.readonly
            and isinstance(at, types.Integer))


def _address(c: Context, b: ir.IRBuilder, view: ViewType, value: ir.Value, at: Any, position: ir.Value) -> Any:
    pointer = global_pointer(b, view, proxy(c, b, view, value), [coordinates_of(c, b, at, position, view.coordinate)], i8)
    return b.ptrtoint(pointer, i64)


def _type_add(context: TypingContext, view: types.Type, at: types.Type, number: types.Type, order: types.Type) -> Any:
    if not (_is_counter(view, at) and isinstance(number, types.Integer) and isinstance(order, types.StringLiteral)
            and order.literal_value in ORDERS):
        return None
    text = f"atom.{order.literal_value}.gpu.global.add.u32 $0, [$1], $2;"

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        operands = [_address(c, b, view, v[0], at, v[1]), c.cast(b, v[2], number, index)]
        return assembly(b, text, [i32], operands, memory=True)[0]

    return signature(index, view, at, number, order), codegen


@atom(_type_add)
def atomic_add(view: Any, at: int, number: int, order: str) -> int:
    """Add to the counter ``at`` of a view of uint32; what it was before."""
    return emulator.barriers.add(current(), view.memory, view.locate((at,)), int(number), order)


def _type_set(context: TypingContext, view: types.Type, at: types.Type, number: types.Type) -> Any:
    if not (_is_counter(view, at) and isinstance(number, types.Integer)):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        assembly(b, "st.relaxed.gpu.global.u32 [$0], $1;", [],
                 [_address(c, b, view, v[0], at, v[1]), c.cast(b, v[2], number, index)], memory=True)

    return signature(types.none, view, at, number), codegen


@atom(_type_set)
def set_counter(view: Any, at: int, number: int) -> None:
    """Set the counter ``at`` of a view of uint32, ordering nothing else."""
    emulator.barriers.put(current(), view.memory, view.locate((at,)), int(number))


def _type_await(context: TypingContext, view: types.Type, at: types.Type, number: types.Type, order: types.Type) -> Any:
    if not (_is_counter(view, at) and isinstance(number, types.Integer) and isinstance(order, types.StringLiteral)
            and order.literal_value in ("relaxed", "acquire")):
        return None
    text = (f"{{ .reg .pred p; .reg .b32 x; AGAIN_${{:uid}}: ld.{order.literal_value}.gpu.global.u32 x, [$0]; "
            "setp.lo.u32 p, x, $1; @p bra AGAIN_${:uid}; }")

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        assembly(b, text, [], [_address(c, b, view, v[0], at, v[1]), c.cast(b, v[2], number, index)], memory=True)

    return signature(types.none, view, at, number, order), codegen


@atom(_type_await)
def await_counter(view: Any, at: int, number: int, order: str) -> None:
    """Look at the counter ``at`` of a view of uint32 until it is ``number`` at least ("acquire" or "relaxed").

    Who is awaited must run: a block that waits for one that finds no multiprocessor waits for ever.
    """
    emulator.barriers.wait(current(), view.memory, view.locate((at,)), int(number), order)


# --------------------------------------------------------------------------------------------------
# Flags of 4 bytes that other GPUs, copy engines or the host write: a kernel waits for a value (sm_70).
#
# ``ld.acquire.sys``: what was written before the flag, by whatever writes at system scope (a copy engine's copies and
# ``cuStreamWriteValue32`` of one stream, say), is seen behind the wait. TMA reads global memory by the asynchronous
# proxy, so `fence_async_global` stands between the wait and its copies (sm_90).

_TEXT = """{
.reg .pred p; .reg .b32 x; .reg .b64 t, e;
ld.acquire.sys.global.u32 x, [$0]; setp.eq.u32 p, x, $1; @p bra THERE_${:uid};
mov.u64 t, %globaltimer; mul.wide.u32 e, $2, 1000000; add.u64 e, e, t;
AGAIN_${:uid}: ld.acquire.sys.global.u32 x, [$0]; setp.eq.u32 p, x, $1; @p bra THERE_${:uid};
mov.u64 t, %globaltimer; setp.lo.u64 p, t, e; @p bra AGAIN_${:uid};
trap;
THERE_${:uid}:
}"""


def _type_await_flag(context: TypingContext, view: types.Type, at: types.Type, value: types.Type,
                     patience: types.Type) -> Any:
    if not (isinstance(view, ViewType) and view.ndim == 1 and view.dtype == np.dtype(np.uint32)
            and all(isinstance(x, types.Integer) for x in (at, value, patience))):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        given = [c.cast(b, x, t, index) for x, t in zip(v[2:], (value, patience))]
        assembly(b, _TEXT, [], [_address(c, b, view, v[0], at, v[1]), *given], memory=True)

    return signature(types.none, view, at, value, patience), codegen


@atom(_type_await_flag)
def await_flag(view: Any, at: int, value: int, patience: int) -> None:
    """Wait until flag ``at`` of a view of uint32 has just this value, and acquire what was written before it.

    After ``patience`` milliseconds the kernel traps: the launch fails, where a writer that has gone would have it wait for
    ever. (In the emulator a flag that nothing will write is a DeadlockError at once.)
    """
    emulator.barriers.meet(current(), view.memory, view.locate((at,)), int(value))


@atom(plain("fence.proxy.async.global;"))
def fence_async_global() -> None:
    """Let TMA copies that this thread starts from here on read what it has acquired in global memory (sm_90)."""
    current().fence_proxy()


# --------------------------------------------------------------------------------------------------
# ``mbarrier``: barriers in shared memory that count arrivals of threads and bytes of asynchronous copies (sm_90).
#
# A barrier is 8 bytes of shared memory. It goes through phases: a phase completes when ``count`` arrivals have come and
# all bytes that were expected have been copied, and the next begins at once. Phases have parities 0, 1, 0, ...; a wait
# for parity p returns once the latest phase of that parity has completed. On a fresh barrier a wait for parity 1 returns
# at once.
#
# ``barriers`` is a pointer that `gemmkit.ptx.memory.shared` made of ``np.uint64``, and ``n`` the number of one of them.

def is_barrier(pointer: types.Type, n: types.Type) -> bool:
    """Whether these are the types of a pointer to barriers and of the number of one."""
    return isinstance(pointer, SharedType) and pointer.dtype.itemsize == 8 and isinstance(n, types.Integer)


def element_address(c: Context, b: ir.IRBuilder, pointer: SharedType, value: ir.Value, position: ir.Value,
                    at: types.Type) -> Any:
    """The 32-bit shared address of an element, as assembly takes it."""
    return shared_address(b, pointer, value, coordinates_of(c, b, position, at))


def place(pointer: SharedPointer, position: int) -> int:
    """The same in the emulator: a byte offset into the block's shared memory."""
    return pointer.offset + int(position) * pointer.dtype.itemsize


def of_barrier(text: str, operands: int) -> Any:
    """The typer of an atom ``f(barriers, n, *operands)``; the text has the barrier's address as ``$0``."""
    def typer(context: TypingContext, pointer: types.Type, n: types.Type, *given: types.Type) -> Any:
        if not is_barrier(pointer, n) or len(given) != operands or not all(isinstance(t, types.Integer) for t in given):
            return None

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
            address = element_address(c, b, pointer, v[0], n, v[1])
            assembly(b, text, [], [address, *(c.cast(b, x, t, index) for x, t in zip(v[2:], given))], memory=True)

        return signature(types.none, pointer, n, *given), codegen

    return typer


def all_but(text: str) -> Any:
    """The typer of an atom that waits for a thread's groups of copies, all but the newest ``pending`` (a constant)."""
    def typer(context: TypingContext, pending: types.Type) -> Any:
        if not isinstance(pending, types.IntegerLiteral) or pending.literal_value < 0:
            return None

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
            assembly(b, f"{text} {pending.literal_value};", [], [], memory=True)

        return signature(types.none, pending), codegen

    return typer


@atom(of_barrier("mbarrier.init.shared::cta.b64 [$0], $1;", 1))
def mbarrier_init(barriers: Any, n: int, count: int) -> None:
    """Make a barrier whose phases take ``count`` arrivals. One thread does it, before a barrier of the block."""
    emulator.barriers.make(current(), place(barriers, n), int(count))


@atom(of_barrier("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", 1))
def mbarrier_expect(barriers: Any, n: int, nbytes: int) -> None:
    """Arrive, and have the phase wait for ``nbytes`` bytes of copies as well."""
    thread = current()
    barrier = emulator.barriers.find(thread, place(barriers, n))
    barrier.expect(thread, int(nbytes))
    barrier.arrive(thread)


@atom(of_barrier("mbarrier.arrive.shared::cta.b64 _, [$0];", 0))
def mbarrier_arrive(barriers: Any, n: int) -> None:
    """Arrive at a barrier of this block."""
    thread = current()
    emulator.copies.check_arrival(thread)
    emulator.barriers.find(thread, place(barriers, n)).arrive(thread)


# Not mbarrier.arrive.release.cluster: its release costs a MEMBAR of the whole GPU each time, a third of a kernel's speed.
@atom(of_barrier("{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1; mbarrier.arrive.shared::cluster.b64 _, "
                 "[there]; }", 1))
def mbarrier_arrive_at(barriers: Any, n: int, rank: int) -> None:
    """Arrive at the barrier at the same place in the shared memory of block ``rank`` of the cluster."""
    thread = current()
    emulator.barriers.find(thread, place(barriers, n), int(rank)).arrive(thread)


# The braces make the labels local, so that the text may stand in a function many times.
@atom(of_barrier("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @done bra over; "
                 "bra again; over: }", 1))
def mbarrier_wait(barriers: Any, n: int, parity: int) -> None:
    """Wait until the last phase of this parity (0 or 1) is complete."""
    thread = current()
    emulator.barriers.find(thread, place(barriers, n)).wait(thread, int(parity))


@atom(plain("fence.mbarrier_init.release.cluster;"))
def mbarrier_fence_init() -> None:
    """Let copies and other blocks of the cluster see the barriers that this thread has made."""
    emulator.barriers.fence(current())


# --------------------------------------------------------------------------------------------------
# Clusters: blocks that run at the same time, reach each other's shared memory and meet (sm_90).

def _register(name: str) -> Any:
    """The typer of an atom that reads a special register."""
    def typer(context: TypingContext) -> Any:
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


def _type_store_async(context: TypingContext, pointer: types.Type, position: types.Type, values: types.Type,
                      barriers: types.Type, n: types.Type, rank: types.Type) -> Any:
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

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        given: list = []
        for i in range(values.count):
            one = b.extract_value(v[2], i)
            given += as_words(b, b.bitcast(one, ir.IntType(8 * pointer.dtype.itemsize)))
        assembly(b, text, [], [element_address(c, b, pointer, v[0], position, v[1]), *given,
                               element_address(c, b, barriers, v[3], n, v[4]), c.cast(b, v[5], rank, index)], memory=True)

    return signature(types.none, pointer, position, values, barriers, n, rank), codegen


@atom(_type_store_async)
def store_async(pointer: Any, position: int, values: tuple, barriers: Any, n: int, rank: int) -> None:
    """Send elements of 4 or 8 bytes, together 4, 8 or 16, to the shared memory of block ``rank`` of the cluster: to the
    place that ``position`` of ``pointer`` (a multiple of their number) is here. Their bytes are given to that block's
    barrier ``n`` of ``barriers``."""
    data = np.array(values, pointer.dtype).view(np.uint8)
    emulator.copies.send(current(), place(pointer, position), data, place(barriers, n), int(rank))


def _type_load(context: TypingContext, rank: types.Type, pointer: types.Type, base: types.Type, offset: types.Type,
               count: types.Type) -> Any:
    if not (isinstance(rank, types.Integer) and isinstance(pointer, SharedType) and isinstance(count, types.IntegerLiteral)
            and isinstance(base, types.Integer) and isinstance(offset, types.Integer)):
        return None
    n, size = int(count.literal_value), pointer.dtype.itemsize
    step = piece_bytes(n * size, 16)
    width, words = step // size, step // 4
    if not width or not words:
        return None
    unit = unit_type(step, part_size(pointer.dtype))

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
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
    return scalars(emulator.barriers.read(current(), int(rank), place(pointer, int(base) + int(offset)),
                                 int(count) * pointer.dtype.itemsize), pointer.dtype)
