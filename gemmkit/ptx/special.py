"""Where a thread is, and where threads meet."""

from __future__ import annotations

from typing import Any

from gemmkit.lang.assembly import plain
from gemmkit.lang.atoms import Atom, atom
from gemmkit.lang.numba_hooks import cgutils, ir, signature, types
from gemmkit.lang.scalars import index
from gemmkit.lang.sites import current

i32 = ir.IntType(32)


def _read_register(name: str, emulate: Any, doc: str) -> Atom:
    def typer(context: Any) -> Any:
        function = ir.FunctionType(i32, [])
        def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
            # An intrinsic rather than assembly: the compiler knows its range (a lane is below 32, a block index no sign).
            return b.call(cgutils.get_or_insert_function(b.module, function, f"llvm.nvvm.read.ptx.sreg.{name}"), [])

        return signature(index), codegen

    return Atom(name.replace(".", "_"), typer, emulate, doc)


thread_index = _read_register("tid.x", lambda: current().index, "The thread's number in its block (blocks are 1-D).")
lane_index = _read_register("laneid", lambda: current().lane, "The thread's number in its warp.")
block_x = _read_register("ctaid.x", lambda: current().block.index[0], "The block's x in the grid.")
block_y = _read_register("ctaid.y", lambda: current().block.index[1], "The block's y in the grid.")
grid_x = _read_register("nctaid.x", lambda: current().block.grid[0], "Blocks of the grid along x.")
block_z = _read_register("ctaid.z", lambda: current().block.index[2], "The block's z in the grid.")


@atom(plain("bar.sync 0;"))
def barrier() -> None:
    """All threads of the block meet; what they wrote before is seen by all after."""
    current().barrier()


@atom(plain("bar.warp.sync 0xffffffff;", convergent=True))
def warp_barrier() -> None:
    """The lanes of a warp meet; what they wrote before is seen by all after, and what they read has been read."""
    current().collective("bar.warp.sync", None, lambda lanes: lanes)


def _type_uniform(context: Any, value: Any) -> Any:
    if not isinstance(value, types.Integer):
        return None
    function = ir.FunctionType(i32, [i32])
    text = "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;"

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        return b.call(ir.InlineAsm(function, text, "=r,r", side_effect=True), [c.cast(b, v[0], value, index)])

    return signature(index, value), codegen


@atom(_type_uniform)
def uniform(value: int) -> int:
    """Lane 0's value in every lane of the warp: lets the assembler keep what follows from it in uniform registers."""
    return current().collective("uniform", value, lambda values: [values[0]] * len(values), sync=False)


def _type_udiv(context: Any, a: Any, b: Any) -> Any:
    if not (isinstance(a, types.Integer) and isinstance(b, types.Integer)):
        return None

    def codegen(c: Any, builder: Any, s: Any, v: Any) -> Any:
        return builder.udiv(c.cast(builder, v[0], a, index), c.cast(builder, v[1], b, index))

    return signature(index, a, b), codegen


@atom(_type_udiv)
def udiv(a: int, b: int) -> int:
    """``a // b`` of non-negative coordinates, in 32 bits and without a sign to mind."""
    return a // b


def _type_carried(context: Any, value: Any) -> Any:
    if not isinstance(value, types.Integer) or value.bitwidth not in (32, 64):
        return None
    kind, letter = ir.IntType(value.bitwidth), "r" if value.bitwidth == 32 else "l"
    function = ir.FunctionType(kind, [kind])
    text = f"mov.b{value.bitwidth} $0, $1;"

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        return b.call(ir.InlineAsm(function, text, f"={letter},{letter}", side_effect=False), [v[0]])

    return signature(value, value), codegen


@atom(_type_carried)
def carried(value: int) -> int:
    """The value, of which LLVM knows nothing. What a loop carries from round to round so (``n = carried(n + 4)``) stays in a
    register: otherwise LLVM may compute it in every round from what it is made of."""
    return value


def _type_rolled(context: Any, value: Any) -> Any:
    if not isinstance(value, types.Integer):
        return None
    function = ir.FunctionType(i32, [i32])

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        return b.call(ir.InlineAsm(function, "mov.b32 $0, $1;", "=r,r", side_effect=True), [c.cast(b, v[0], value, index)])

    return signature(index, value), codegen


@atom(_type_rolled)
def rolled(value: int) -> int:
    """The value, of which LLVM knows nothing: it does not unroll a loop that counts with it (``n = rolled(n + 1)``). The
    assembler still may, where it finds registers for it."""
    return value
