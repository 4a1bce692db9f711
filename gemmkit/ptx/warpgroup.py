"""What the warpgroups (128 threads) of a kernel with roles tell the hardware and each other (sm_90)."""

from __future__ import annotations

from typing import Any

from gemmkit import emulator
from gemmkit.lang.assembly import assembly, plain
from gemmkit.lang.atoms import atom
from gemmkit.lang.numba_hooks import signature, types
from gemmkit.lang.scalars import index
from gemmkit.lang.sites import current


def _set_registers(action: str) -> Any:
    def typer(context: Any, n: Any) -> Any:
        if not isinstance(n, types.IntegerLiteral) or n.literal_value % 8 or not 24 <= n.literal_value <= 256:
            return None
        text = f"setmaxnreg.{action}.sync.aligned.u32 {n.literal_value};"

        def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
            assembly(b, text, [], [], memory=True, convergent=True)
            return c.get_dummy_value()

        return signature(types.none, n), codegen

    return typer


@atom(_set_registers("dec"))
def give_registers(n: int) -> None:
    """Keep ``n`` registers a thread (a constant, a multiple of 8 from 24 to 256) of this warpgroup and release the rest."""
    thread = current()
    thread.block.registers.give(thread, n)


@atom(_set_registers("inc"))
def take_registers(n: int) -> None:
    """Wait until the block has registers to spare for ``n`` a thread of this warpgroup, and take them."""
    thread = current()
    thread.block.registers.take(thread, n)


def _at_barrier(instruction: str) -> Any:
    def typer(context: Any, number: Any, threads: Any) -> Any:
        if not (isinstance(number, types.Integer) and isinstance(threads, types.Integer)):
            return None

        def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
            texts: list[str] = []
            operands: list[Any] = []
            for ty, value in zip((number, threads), v):
                if isinstance(ty, types.IntegerLiteral):     # with a number in a register, ptxas assumes all 16 barriers
                    texts.append(str(ty.literal_value))
                else:
                    texts.append(f"${len(operands)}")
                    operands.append(c.cast(b, value, ty, index))
            assembly(b, f"{instruction} {', '.join(texts)};", [], operands, memory=True, convergent=True)
            return c.get_dummy_value()

        return signature(types.none, number, threads), codegen

    return typer


@atom(_at_barrier("bar.sync"))
def named_barrier(number: int, threads: int) -> None:
    """Meet at barrier ``number`` (1 to 15; 0 is the whole block's) until ``threads`` of the block have come."""
    current().barrier(int(number), int(threads))


@atom(_at_barrier("bar.arrive"))
def named_arrive(number: int, threads: int) -> None:
    """Be counted at barrier ``number`` and go on: threads that wait there see what was written before."""
    current().arrive(int(number), int(threads))


# Not the unqualified fence.proxy.async: it orders global memory as well, and waits for it.
@atom(plain("fence.proxy.async.shared::cta;"))
def fence_async() -> None:
    """Let copies and wgmma, which reach shared memory by another way than threads, see what this thread wrote there."""
    current().fence_proxy()


@atom(plain("griddepcontrol.wait;"))
def grid_wait() -> None:
    """Wait until the kernels before in the stream have ended, if this one was launched early; nothing otherwise."""
    emulator.early.wait(current())


@atom(plain("griddepcontrol.launch_dependents;"))
def grid_launch_dependents() -> None:
    """Let the next kernel in the stream start, if it is one that may start early (it calls `grid_wait` first)."""
