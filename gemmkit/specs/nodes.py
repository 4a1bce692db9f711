"""The tree that a schedule is lowered to: components whose `run` is device code.

Numba's specialisation does the lowering: a node's fields are constants, its ``inner`` node is compiled into it, and of the
tree nothing is left in the machine code but what its leaves are. ``operands`` is a tuple of tensors: (a, b, c) of a MatMul,
(source, target) of a Move, (target,) of an Init.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

from gemmkit.components import Component
from gemmkit.lang.components import dataclass
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, ir, signature, types
from gemmkit.lang.registers import call_function
from gemmkit.lang.scalars import index
from gemmkit.lang.static import traced
from gemmkit.ptx.special import barrier, block_x, thread_index, udiv, uniform
from gemmkit.shapes import ALL
from gemmkit.specs.tensors import FR, GL, RF, SH, Tensor, allocate, on

# --------------------------------------------------------------------------------------------------
# Code that is there as often as it is executed.
#
# A loop over a constant range may be unrolled by LLVM, or not; `.unroll` of a schedule promises it. (A product of 8 x 8
# registers that is left a loop does not live in registers.)

i32 = ir.IntType(32)


def _type_repeat(context: TypingContext, count: types.Type, function: types.Type, *args: types.Type) -> Any:
    if not isinstance(count, types.IntegerLiteral) or not isinstance(function, types.Callable):
        return None
    inner = context.resolve_function_type(function, (index, *args), {})
    if inner is None:
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        for n in range(int(count.literal_value)):
            given = [c.cast(b, x, t, to) for x, t, to in zip((i32(n), *v[2:]), (index, *args), inner.args)]
            call_function(c, b, function, v[1], inner, given)
        return c.get_dummy_value()

    return signature(types.none, count, function, *args), codegen


@atom(_type_repeat)
def repeat(count: int, function: Any, *args: Any) -> None:
    """``function(n, *args)`` for n = 0, 1, ..., ``count`` (a constant) times in the code."""
    for n in range(count):
        function(n, *args)


# -- workers: their numbers -------------------------------------------------------------------------------------------

def block_number() -> int:
    return block_x()


def warp_number() -> int:
    return uniform(udiv(thread_index(), 32))


def lane_number() -> int:
    return thread_index() & 31


def thread_number() -> int:
    return thread_index()


def same(number: int) -> int:
    return number


def row_first(number: int, rows: int, columns: int) -> tuple:
    """The place of worker or tile ``number`` in a grid, row by row."""
    row = udiv(number, columns)
    return row, number - row * columns


def column_first(number: int, rows: int, columns: int) -> tuple:
    column = udiv(number, rows)
    return number - column * rows, column


def over(extent: int, size: int) -> int:
    """How many tiles of a size cover an extent."""
    return udiv(extent + size - 1, size)


# -- the part of each operand in tile (i, j) --------------------------------------------------------------------------
# The compiler runs these: a compiled function may not return a tensor that stands on registers.

@traced
def parts_of_matmul(tiles: Any, operands: tuple, i: int, j: int) -> tuple:
    a, b, c = operands
    return (a.part(tiles.rows, ALL, i, 0, tiles.hows[0]), b.part(ALL, tiles.columns, 0, j, tiles.hows[1]),
            c.part(tiles.rows, tiles.columns, i, j, tiles.hows[2]))


@traced
def parts_of_move(tiles: Any, operands: tuple, i: int, j: int) -> tuple:
    source, target = operands
    return (source.part(tiles.rows, tiles.columns, i, j, tiles.hows[0]),
            target.part(tiles.rows, tiles.columns, i, j, tiles.hows[1]))


@traced
def parts_of_init(tiles: Any, operands: tuple, i: int, j: int) -> tuple:
    return (operands[0].part(tiles.rows, tiles.columns, i, j, tiles.hows[0]),)


@dataclass(frozen=True)
class TileGrid(Component):
    """Tiles of ``rows`` x ``columns``, ``m`` x ``n`` of them (0: known at run time).

    ``hows`` say how each operand goes there (`gemmkit.specs.tensors.Tensor.part`).
    """

    parts: Any
    rows: Any
    columns: Any
    m: int
    n: int
    hows: tuple


@dataclass(frozen=True)
class InTurn(Component):
    """Tiles one after the other, row by row: ``.tile(r, c)``."""

    tiles: TileGrid
    inner: Any
    is_unrolled: bool

    def run(self, operands: tuple) -> None:
        if self.is_unrolled:
            repeat(self.count, one_tile, self, operands)
        else:
            for number in range(self.count):
                one_tile(number, self, operands)

    @property
    def count(self) -> int:
        return self.tiles.m * self.tiles.n


def one_tile(number: int, node: InTurn, operands: tuple) -> None:
    i, j = row_first(number, node.tiles.m, node.tiles.n)
    node.inner.run(node.tiles.parts(node.tiles, operands, i, j))


@dataclass(frozen=True)
class SideBySide(Component):
    """A tile for each worker: ``.tile(r, c).to(level)``, with the refinements ``.layout`` and ``.swizzle``."""

    tiles: TileGrid
    inner: Any
    worker: Any
    swizzle: Any
    place: Any

    def run(self, operands: tuple) -> None:
        number = self.swizzle(self.worker())
        if self.is_known:
            i, j = self.place(number, self.tiles.m, self.tiles.n)
        else:
            rows, columns = operands[2].storage.shape
            i, j = self.place(number, over(rows, self.tile_rows), over(columns, self.tile_columns))
        self.inner.run(self.tiles.parts(self.tiles, operands, i, j))

    @property
    def is_known(self) -> bool:
        return self.tiles.m > 0 and self.tiles.n > 0

    @property
    def tile_rows(self) -> int:
        return self.tiles.rows if isinstance(self.tiles.rows, int) else self.tiles.rows.size

    @property
    def tile_columns(self) -> int:
        return self.tiles.columns if isinstance(self.tiles.columns, int) else self.tiles.columns.size


@dataclass(frozen=True)
class Looped(Component):
    """Steps along K: ``.split(k)``, with ``.sync`` and ``.unroll``. ``count`` 0 is known at run time."""

    k: int
    count: int
    how: str
    is_synced: bool
    is_unrolled: bool
    inner: Any

    def run(self, operands: tuple) -> None:
        if self.is_unrolled:
            repeat(self.count, one_step, self, operands)
        elif self.count > 0:
            for i in range(self.count):
                one_step(i, self, operands)
        else:
            for i in range(over(operands[0].storage.shape[1], self.k)):
                one_step(i, self, operands)


def one_step(i: int, node: Looped, operands: tuple) -> None:
    a, b, c = operands
    node.inner.run((a.part(ALL, node.k, 0, i, node.how), b.part(node.k, ALL, i, 0, node.how), c))
    if node.is_synced:
        barrier()


# -- moves ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class MovedNode(Component):
    """Operand ``number`` moves to a new place by ``implementation``; what follows finds it there: ``.move``.

    Registers are allocated here, in the function that passes them on: they are its own (`allocate`).
    """

    number: int
    form: Any
    allocated: Any
    offset: int
    is_shared: bool
    is_synced: bool
    implementation: Any
    inner: Any
    replaced: Any

    def run(self, operands: tuple) -> None:
        if self.is_shared:
            new = allocate(self.form, self.offset)
        else:
            new = allocate(self.allocated).seen_as(self.form)
        self.implementation.run((operands[self.number], new))
        if self.is_synced:
            barrier()
        self.inner.run(self.replaced(operands, new))


@traced
def with_a(operands: tuple, new: object) -> tuple:
    return new, operands[1], operands[2]


@traced
def with_b(operands: tuple, new: object) -> tuple:
    return operands[0], new, operands[2]


@traced
def with_source(operands: tuple, new: object) -> tuple:
    return new, operands[1]


@dataclass(frozen=True)
class Accumulated(Component):
    """Sums in a place of their own: ``.accumulate_in(memory, begin, end)``."""

    form: Any
    allocated: Any
    begin: Any
    inner: Any
    end: Any

    def run(self, operands: tuple) -> None:
        a, b, c = operands
        sums = allocate(self.allocated).seen_as(self.form)
        self.begin.run((sums,))
        self.inner.run((a, b, sums))
        self.end.run((sums, c))


# -- leaves -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ThreeOperands(Component):
    """``.done`` of a MatMul: one instruction (`gemmkit.specs.accesses`)."""

    instruction: Any

    def run(self, operands: tuple) -> None:
        a, b, c = operands
        self.instruction.run(a, b, c)


@dataclass(frozen=True)
class TwoOperands(Component):
    """``.done`` of a Move."""

    instruction: Any

    def run(self, operands: tuple) -> None:
        source, target = operands
        self.instruction.run(source, target)


@dataclass(frozen=True)
class OneOperand(Component):
    """``.done`` of an Init."""

    instruction: Any

    def run(self, operands: tuple) -> None:
        self.instruction.run(operands[0])


@dataclass(frozen=True)
class MatMulBy(Component):
    """``.done(function)`` of a MatMul: a micro-kernel, any device function of (a, b, c)."""

    without_value: ClassVar[tuple[str, ...]] = ("function",)
    function: Any

    def run(self, operands: tuple) -> None:
        a, b, c = operands
        self.function(a, b, c)


@dataclass(frozen=True)
class MoveBy(Component):
    """``.done(function)`` of a Move: a micro-kernel of (source, target)."""

    without_value: ClassVar[tuple[str, ...]] = ("function",)
    function: Any

    def run(self, operands: tuple) -> None:
        source, target = operands
        self.function(source, target)


@dataclass(frozen=True)
class Root(Component):
    """A kernel: the tree with the forms of its matrices."""

    tree: Any
    a: Any
    b: Any
    c: Any

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        self.tree.run((on(a, self.a), on(b, self.b), on(c, self.c)))


def scheduled(root: Root, a: Tensor, b: Tensor, c: Tensor) -> None:
    """The kernel of a schedule."""
    root.run(a, b, c)


# --------------------------------------------------------------------------------------------------
# The steps of a schedule: Fireiron's decompositions and their refinements (section 3), each with its line in the source.

#: Levels of the compute hierarchy, the outermost first.
LEVELS = KERNEL, BLOCK, WARP, THREAD = "Kernel", "Block", "Warp", "Thread"
#: Whose each memory is.
HOME = {GL: KERNEL, SH: BLOCK, FR: WARP, RF: THREAD}
ROW_MAJOR, COLUMN_MAJOR = "row", "col"
#: Files whose lines say nothing to whom writes a schedule.
_OURS = frozenset(str(Path(__file__).with_name(name)) for name in ("nodes.py", "schedule.py"))


class ScheduleError(ValueError):
    """A schedule that cannot be carried out: at which of its lines, by which rule, and what would do."""


def line_here() -> str:
    """The line of a schedule that is being executed: ``file:number``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in _OURS:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclasses.dataclass(frozen=True)
class ScheduleStep:
    """One decomposition; ``line`` is where it was written."""

    def refuse(self, why: str) -> ScheduleError:
        """The error of this step: ``raise step.refuse(...)``."""
        return ScheduleError(f"{self}: {why}\n  at {self.line}")

    line: str = field(default="", compare=False, kw_only=True)


@dataclasses.dataclass(frozen=True)
class TileStep(ScheduleStep):
    """``.tile(rows, columns)``: tiles one after the other, or ``.to(level)`` side by side. A size is a number, or (width,
    step): pieces of ``width``, ``step`` apart."""

    rows: Any
    columns: Any
    level: str | None = None
    order: str = ROW_MAJOR
    swizzle: Any = None
    unroll: bool = False
    blocks_per_sm: int = 1

    def __str__(self) -> str:
        return f".tile({self.rows}, {self.columns})" + (f".to({self.level})" if self.level else "")


@dataclasses.dataclass(frozen=True)
class SplitStep(ScheduleStep):
    """``.split(k)``: steps along K; ``.sync`` ends each with a barrier."""

    k: int
    sync: bool = False
    unroll: bool = False

    def __str__(self) -> str:
        return f".split({self.k})"


@dataclasses.dataclass(frozen=True)
class Move(ScheduleStep):
    """``.move(operand, memory, implementation)``: what follows finds the operand there."""

    operand: int
    memory: str
    implementation: Any
    order: str | None = None
    pad: int = 0
    layout: Any = None
    swizzle: Any = None
    no_sync: bool = False
    prefetch: bool = False
    through: bool = False                                     # of a prefetch: by registers

    def __str__(self) -> str:
        name = "AB"[self.operand] if self.operand in (0, 1) else str(self.operand)
        return f".move({name}, {self.memory}, ...)"


@dataclasses.dataclass(frozen=True)
class Accumulate(ScheduleStep):
    """``.accumulate_in(memory, begin, end)``: sums have a place of their own, with a beginning (Init) and an end (Move)."""

    memory: str
    begin: Any
    end: Any

    def __str__(self) -> str:
        return f".accumulate_in({self.memory}, ...)"
