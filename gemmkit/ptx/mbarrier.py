"""``mbarrier``: barriers in shared memory that count arrivals of threads and bytes of asynchronous copies (sm_90).

A barrier is 8 bytes of shared memory. It goes through phases: a phase completes when ``count`` arrivals have come and all
bytes that were expected have been copied, and the next begins at once. Phases have parities 0, 1, 0, ...; a wait for
parity p returns once the latest phase of that parity has completed. On a fresh barrier a wait for parity 1 returns at once.

``barriers`` is a pointer that `gemmkit.ptx.memory.shared` made of ``np.uint64``, and ``n`` the number of one of them.
"""

from __future__ import annotations

from typing import Any

from gemmkit import emulator
from gemmkit.lang.assembly import assembly, plain
from gemmkit.lang.atoms import atom
from gemmkit.lang.host import SharedPointer
from gemmkit.lang.memory import SharedType, coordinates_of
from gemmkit.lang.numba_hooks import signature, types
from gemmkit.lang.scalars import index
from gemmkit.lang.sites import current
from gemmkit.ptx.ldmatrix import shared_address


def is_barrier(pointer: Any, n: Any) -> bool:
    """Whether these are the types of a pointer to barriers and of the number of one."""
    return isinstance(pointer, SharedType) and pointer.dtype.itemsize == 8 and isinstance(n, types.Integer)


def element_address(c: Any, b: Any, pointer: SharedType, value: Any, position: Any, at: Any) -> Any:
    """The 32-bit shared address of an element, as assembly takes it."""
    return shared_address(b, pointer, value, coordinates_of(c, b, position, at))


def place(pointer: SharedPointer, position: int) -> int:
    """The same in the emulator: a byte offset into the block's shared memory."""
    return pointer.offset + int(position) * pointer.dtype.itemsize


def _instruction(text: str, operands: int) -> Any:
    """The typer of an atom ``f(barriers, n, *operands)``; the text has the barrier's address as ``$0``."""
    def typer(context: Any, pointer: Any, n: Any, *given: Any) -> Any:
        if not is_barrier(pointer, n) or len(given) != operands or not all(isinstance(t, types.Integer) for t in given):
            return None

        def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
            address = element_address(c, b, pointer, v[0], n, v[1])
            assembly(b, text, [], [address, *(c.cast(b, x, t, index) for x, t in zip(v[2:], given))], memory=True)
            return c.get_dummy_value()

        return signature(types.none, pointer, n, *given), codegen

    return typer


@atom(_instruction("mbarrier.init.shared::cta.b64 [$0], $1;", 1))
def mbarrier_init(barriers: Any, n: int, count: int) -> None:
    """Make a barrier whose phases take ``count`` arrivals. One thread does it, before a barrier of the block."""
    emulator.mbarriers.make(current(), place(barriers, n), int(count))


@atom(_instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", 1))
def mbarrier_expect(barriers: Any, n: int, nbytes: int) -> None:
    """Arrive, and have the phase wait for ``nbytes`` bytes of copies as well."""
    thread = current()
    barrier = emulator.mbarriers.find(thread, place(barriers, n))
    barrier.expect(thread, int(nbytes))
    barrier.arrive(thread)


@atom(_instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", 0))
def mbarrier_arrive(barriers: Any, n: int) -> None:
    """Arrive at a barrier of this block."""
    thread = current()
    emulator.thread_copies.check_told(thread)
    emulator.mbarriers.find(thread, place(barriers, n)).arrive(thread)


# Not mbarrier.arrive.release.cluster: its release costs a MEMBAR of the whole GPU each time, a third of a kernel's speed.
@atom(_instruction("{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1; mbarrier.arrive.shared::cluster.b64 _, "
                   "[there]; }", 1))
def mbarrier_arrive_at(barriers: Any, n: int, rank: int) -> None:
    """Arrive at the barrier at the same place in the shared memory of block ``rank`` of the cluster."""
    thread = current()
    emulator.mbarriers.find(thread, place(barriers, n), int(rank)).arrive(thread)


# The braces make the labels local, so that the text may stand in a function many times.
@atom(_instruction("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @done bra over; "
                   "bra again; over: }", 1))
def mbarrier_wait(barriers: Any, n: int, parity: int) -> None:
    """Wait until the last phase of this parity (0 or 1) is complete."""
    thread = current()
    emulator.mbarriers.find(thread, place(barriers, n)).wait(thread, int(parity))


@atom(plain("fence.mbarrier_init.release.cluster;"))
def mbarrier_fence_init() -> None:
    """Let copies and other blocks of the cluster see the barriers that this thread has made."""
    emulator.mbarriers.fence(current())
