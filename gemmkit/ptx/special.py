"""Where a thread is; barriers of a block; what the lanes of a warp exchange (shfl.sync) and agree on (vote.sync)."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from gemmkit.lang.host import current
from gemmkit.lang.numba_hooks import Atom, Context, Signature, TypingContext, Values, atom, cgutils, ir, signature, types
from gemmkit.lang.scalars import NarrowFloatType, assembly, index, numpy_dtype, plain

i32 = ir.IntType(32)


def _from(mode: str, lane: int, n: int) -> int:
    """The lane of which ``lane`` gets the value: its own where there is none."""
    found = {"bfly": lane ^ n, "idx": n, "up": lane - n, "down": lane + n}[mode]
    return found % 32 if mode == "idx" else found if 0 <= found < 32 else lane


def _of_group(b: ir.IRBuilder, lanes: ir.Value) -> Any:
    """The mask of the lanes of a thread's aligned group of so many: a constant where that is one."""
    lane = b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(i32, []), "llvm.nvvm.read.ptx.sreg.laneid"), [])
    group = b.trunc(b.sub(b.shl(ir.IntType(64)(1), b.zext(lanes, ir.IntType(64))), ir.IntType(64)(1)), i32)
    return b.shl(group, b.and_(lane, b.neg(lanes)))


def _shuffle(mode: str, doc: str) -> Atom:
    text = f"shfl.sync.{mode}.b32 $0, $1, $2, {'0x0' if mode == 'up' else '0x1f'}, "

    def typer(context: TypingContext, value: types.Type, n: types.Type, lanes: types.Type | None = None) -> Any:
        if not isinstance(value, (types.Integer, types.Float, NarrowFloatType)) or not isinstance(n, types.Integer):
            return None
        bits = 8 * numpy_dtype(value).itemsize
        if bits not in (16, 32, 64):
            return None

        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
            lane = c.cast(b, v[1], n, index)
            which = [] if lanes is None else [_of_group(b, c.cast(b, v[2], lanes, index))]

            def exchange(word: ir.Value) -> Any:
                line = text + ("$3;" if which else "0xffffffff;")
                return assembly(b, line, [i32], [word, lane, *which], convergent=True)[0]

            word = b.bitcast(v[0], ir.IntType(bits))
            if bits == 64:
                halves = b.trunc(word, i32), b.trunc(b.lshr(word, word.type(32)), i32)
                low, high = (b.zext(exchange(half), word.type) for half in halves)
                return b.bitcast(b.or_(low, b.shl(high, word.type(32))), v[0].type)
            word = b.zext(word, i32) if bits < 32 else word
            out = exchange(word)
            return b.bitcast(b.trunc(out, ir.IntType(bits)) if bits < 32 else out, v[0].type)

        return signature(types.unliteral(value), value, n, *([] if lanes is None else [lanes])), codegen

    def emulate(value: Any, n: int, lanes: int = 32) -> Any:
        def exchange(given: list) -> list:
            return [given[_from(mode, lane, step)][0] for lane, (_, step) in enumerate(given)]

        return current().collective(f"shfl.{mode}", (value, int(n)), exchange, size=lanes, sync=False)

    return Atom(f"shfl_{mode}", typer, emulate, doc)


#: ``SHUFFLE[mode](value, n)``, executed by all lanes of a warp. ``SHUFFLE["bfly"](value, n, lanes)``: by an aligned group of
#: 2 to 32 lanes alone, whatever the others of its warp do.
SHUFFLE = MappingProxyType({
    "bfly": _shuffle("bfly", "The value of lane ``lane ^ n``."),
    "idx": _shuffle("idx", "The value of lane ``n``."),
    "up": _shuffle("up", "The value of lane ``lane - n``; the own where there is none."),
    "down": _shuffle("down", "The value of lane ``lane + n``; the own where there is none."),
})


# --------------------------------------------------------------------------------------------------
# Where a thread is, and where threads meet.

def _read_register(name: str, emulate: Any, doc: str) -> Atom:
    def typer(context: TypingContext) -> Any:
        function = ir.FunctionType(i32, [])
        def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
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


@atom(plain("trap;"))
def trap() -> None:
    """End the kernel with an error, which the stream's next synchronisation raises: an argument in memory is wrong. (In the
    emulator an IndexError at once.)"""
    raise IndexError("the kernel traps: a number that it has read is no place of an array")


def _type_warp_barrier(context: TypingContext, lanes: types.Type | None = None) -> Any:
    if lanes is None:
        return plain("bar.warp.sync 0xffffffff;", convergent=True)(context)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        group = _of_group(b, c.cast(b, v[0], lanes, index))
        assembly(b, "bar.warp.sync $0;", [], [group], memory=True, convergent=True)

    return signature(types.none, lanes), codegen


@atom(_type_warp_barrier)
def warp_barrier(lanes: int = 32) -> None:
    """The lanes of a warp, or of an aligned group of fewer ``lanes``, meet; what they wrote before is seen by all after, and
    what they read has been read."""
    current().collective("bar.warp.sync", None, lambda given: given, size=lanes)


def _kept(text: str) -> Any:
    """The typer of an atom that makes a coordinate of one by an instruction, which stays where it is."""
    def typer(context: TypingContext, value: types.Type) -> Any:
        if not isinstance(value, types.Integer):
            return None
        function = ir.FunctionType(i32, [i32])
        return signature(index, value), lambda c, b, s, v: (
            b.call(ir.InlineAsm(function, text, "=r,r", side_effect=True), [c.cast(b, v[0], value, index)]))

    return typer


@atom(_kept("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;"))
def uniform(value: int) -> int:
    """Lane 0's value in every lane of the warp: lets the assembler keep what follows from it in uniform registers."""
    return current().collective("uniform", value, lambda values: [values[0]] * len(values), sync=False)


def _type_udiv(context: TypingContext, a: types.Type, b: types.Type) -> Any:
    if not (isinstance(a, types.Integer) and isinstance(b, types.Integer)):
        return None
    return signature(index, a, b), lambda c, builder, s, v: (
        builder.udiv(c.cast(builder, v[0], a, index), c.cast(builder, v[1], b, index)))


@atom(_type_udiv)
def udiv(a: int, b: int) -> int:
    """``a // b`` of non-negative coordinates, in 32 bits and without a sign to mind."""
    return a // b


def _type_carried(context: TypingContext, value: types.Type) -> Any:
    if not isinstance(value, types.Integer) or value.bitwidth not in (32, 64):
        return None
    kind, letter = ir.IntType(value.bitwidth), "r" if value.bitwidth == 32 else "l"
    function = ir.FunctionType(kind, [kind])
    text = f"mov.b{value.bitwidth} $0, $1;"
    return signature(value, value), lambda c, b, s, v: (
        b.call(ir.InlineAsm(function, text, f"={letter},{letter}", side_effect=False), [v[0]]))


@atom(_type_carried)
def carried(value: int) -> int:
    """The value, of which LLVM knows nothing. What a loop carries from round to round so (``n = carried(n + 4)``) stays in a
    register: otherwise LLVM may compute it in every round from what it is made of."""
    return value


@atom(_kept("mov.b32 $0, $1;"))
def rolled(value: int) -> int:
    """The value, of which LLVM knows nothing: it does not unroll a loop that counts with it (``n = rolled(n + 1)``). The
    assembler still may, where it finds registers for it."""
    return value


# --------------------------------------------------------------------------------------------------
# What the lanes of a warp agree on: vote.sync.

def _type_any(context: TypingContext, condition: types.Type) -> Any:
    if not isinstance(condition, types.Boolean):
        return None
    text = ("{ .reg .pred there; setp.ne.u32 there, $1, 0; vote.sync.any.pred there, there, 0xffffffff; "
            "selp.u32 $0, 1, 0, there; }")

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        found = assembly(b, text, [i32], [b.zext(v[0], i32)], convergent=True)[0]
        return b.icmp_unsigned("!=", found, i32(0))

    return signature(types.boolean, condition), codegen


@atom(_type_any)
def any_lane(condition: bool) -> bool:
    """Whether a condition holds in any lane of the warp, all of which execute it: a branch on it is the whole warp's."""
    return current().collective("vote.any", bool(condition), lambda given: [any(given)] * len(given), sync=False)
