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
from gemmkit.kernels.collectives.scheduler import Slot
from gemmkit.lang.components import dataclass
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, ir, signature, types
from gemmkit.lang.registers import call_function
from gemmkit.lang.scalars import index
from gemmkit.lang.static import traced
from gemmkit.ptx.barriers import cluster_barrier, cluster_rank, mbarrier_fence_init
from gemmkit.ptx.copy_async import commit_copies, wait_copies
from gemmkit.ptx.memory import repoint, shared
from gemmkit.ptx.special import barrier, block_x, grid_x, lane_index, thread_index, udiv, uniform
from gemmkit.ptx.tma import tma_load, tma_load_multicast
from gemmkit.ptx.wgmma import wgmma_wait
from gemmkit.runtime.tensor_maps import TensorMapSpec
from gemmkit.shapes import ALL, local
from gemmkit.specs.tensors import FR, GL, QP, RF, SH, WR, Form, Tensor, allocate, on, on_scaled, stored_matrix

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

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        for n in range(int(count.literal_value)):
            given = [c.cast(b, x, t, to) for x, t, to in zip((i32(n), *v[2:]), (index, *args), inner.args)]
            call_function(c, b, function, v[1], inner, given)

    return signature(types.none, count, function, *args), codegen


@atom(_type_repeat)
def repeat(count: int, function: Any, *args: Any) -> None:
    """``function(n, *args)`` for n = 0, 1, ..., ``count`` (a constant) times in the code."""
    for n in range(count):
        function(n, *args)


# -- workers: their numbers -------------------------------------------------------------------------------------------

def block_number() -> int:
    return block_x()


def warpgroup_number() -> int:
    return uniform(udiv(thread_index(), 128))


def warp_number() -> int:
    return uniform(udiv(thread_index(), 32))


def warp_of_group() -> int:
    return warp_number() & 3


def quad_pair_number() -> int:
    return udiv(thread_index() & 15, 4)


def thread_of_group() -> int:
    return thread_index() & 127


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
def parts_of(tiles: Any, operands: tuple, i: int, j: int) -> tuple:
    if len(operands) < 3:
        return tuple(x.part(tiles.rows, tiles.columns, i, j, how) for x, how in zip(operands, tiles.hows))
    a, b, c = operands
    return (a.part(tiles.rows, ALL, i, 0, tiles.hows[0]), b.part(ALL, tiles.columns, 0, j, tiles.hows[1]),
            c.part(tiles.rows, tiles.columns, i, j, tiles.hows[2]))


@dataclass(frozen=True)
class TileGrid(Component):
    """Tiles of ``rows`` x ``columns``, ``m`` x ``n`` of them (0: known at run time).

    ``hows`` say how each operand goes there (`gemmkit.specs.tensors.Tensor.part`).
    """

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
    node.inner.run(parts_of(node.tiles, operands, i, j))


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
            rows, columns = stored_matrix(operands[2]).shape
            i, j = self.place(number, over(rows, self.tile_rows), over(columns, self.tile_columns))
        self.inner.run(parts_of(self.tiles, operands, i, j))

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

    def run(self, operands: tuple) -> None:
        if self.is_shared:
            new = allocate(self.form, self.offset)
        else:
            new = allocate(self.allocated).seen_as(self.form)
        self.implementation.run((operands[self.number], new))
        if self.is_synced:
            barrier()
        self.inner.run(with_operand(operands, self.number, new))


@traced
def with_operand(operands: tuple, number: int, new: object) -> tuple:
    return *operands[:number], new, *operands[number + 1:]


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
class Done(Component):
    """``.done``: one instruction (`gemmkit.specs.accesses`)."""

    instruction: Any

    def run(self, operands: tuple) -> None:
        self.instruction.run(*operands)


@dataclass(frozen=True)
class DoneBy(Component):
    """``.done(function)``: a micro-kernel, any device function of the operands."""

    without_value: ClassVar[tuple[str, ...]] = ("function",)
    function: Any

    def run(self, operands: tuple) -> None:
        self.function(*operands)


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


def scheduled_scaled(root: Any, a: Any, b: Any, out: Any, c: Any, alpha: Any, beta: Any) -> None:
    """That of ``alpha a b + beta c``."""
    root.tree.run((on(a, root.a), on(b, root.b), on_scaled(out, c, alpha, beta, root.c)))


# --------------------------------------------------------------------------------------------------
# ``.prefetch``: what a step of a loop over K multiplies is brought during the step before (double buffering).
#
# Each of A and B has two stages in shared memory. A step begins with a barrier: its stage is full, and the other one has
# been read. Then the next step's elements are asked for: by cp.async (`CopiedStages`), which is waited for before the next
# barrier, or by loads to each thread's registers (`RegisterStages`), which are stored behind the step's products.

@dataclass(frozen=True)
class OperandStages(Component):
    """An operand's two stages, ``nbytes`` each from ``offset`` on."""

    form: Any
    dtype: Any
    offset: int
    nbytes: int

    def stage(self, i: int) -> Any:
        """Where step ``i`` lies."""
        return repoint(shared(self.dtype, self.offset), self.dtype, (i & 1) * self.nbytes)


@dataclass(frozen=True)
class CopiedStages(OperandStages):
    """By cp.async: ``implementation`` starts the copies of a thread."""

    implementation: Any

    is_copied = True

    def begin(self, i: int, source: Tensor, held: Tensor) -> None:
        self.implementation.run((source, on(self.stage(i), self.form)))

    def end(self, i: int, held: Tensor) -> None:
        pass

    @property
    def registers(self) -> Any:
        """Of which nothing is used."""
        return Form((local(1, 1),), RF, self.dtype)


@dataclass(frozen=True)
class RegisterStages(OperandStages):
    """By registers: ``load`` fills them, ``store`` empties them. Of ``allocated`` each thread has its own; all together they
    are ``seen``."""

    allocated: Any
    seen: Any
    load: Any
    store: Any

    is_copied = False

    def begin(self, i: int, source: Tensor, held: Any) -> None:
        self.load.run((source, held.seen_as(self.seen)))

    def end(self, i: int, held: Any) -> None:
        self.store.run((held.seen_as(self.seen), on(self.stage(i), self.form)))

    @property
    def registers(self) -> Any:
        return self.allocated


@dataclass(frozen=True)
class LoopedAhead(Component):
    """``.split(k)`` with both moves ``.prefetch``; ``count`` 0 is known at run time."""

    k: int
    count: int
    is_unrolled: bool
    a: Any
    b: Any
    inner: Any

    def run(self, operands: tuple) -> None:
        a_held, b_held = allocate(self.a.registers), allocate(self.b.registers)
        begin(self, operands, 0, a_held, b_held)
        end(self, 0, a_held, b_held)
        if self.is_unrolled:
            repeat(self.count, step_ahead, self, operands, self.count, a_held, b_held)
        elif self.count > 0:
            for i in range(self.count):
                step_ahead(i, self, operands, self.count, a_held, b_held)
        else:
            count = over(operands[0].storage.shape[1], self.k)
            for i in range(count):
                step_ahead(i, self, operands, count, a_held, b_held)
        barrier()                                             # who comes after may use the memory

    @property
    def has_copies(self) -> bool:
        return self.a.is_copied or self.b.is_copied


def step_ahead(i: int, node: LoopedAhead, operands: tuple, count: int, a_held: Tensor, b_held: Tensor) -> None:
    # 1. The step is there: this thread's copies, then all threads'; and the other stage has been read.
    if node.has_copies:
        commit_copies()
        wait_copies(0)
    barrier()
    # 2. The next one is asked for.
    if i + 1 < count:
        begin(node, operands, i + 1, a_held, b_held)
    # 3. Products.
    node.inner.run((on(node.a.stage(i), node.a.form), on(node.b.stage(i), node.b.form), operands[2]))
    # 4. What has come to registers goes to the other stage.
    if i + 1 < count:
        end(node, i + 1, a_held, b_held)


def begin(node: LoopedAhead, operands: tuple, i: int, a_held: Tensor, b_held: Tensor) -> None:
    """Ask for step ``i``."""
    node.a.begin(i, operands[0].part(ALL, node.k, 0, i, "base"), a_held)
    node.b.begin(i, operands[1].part(node.k, ALL, i, 0, "base"), b_held)


def end(node: LoopedAhead, i: int, a_held: Tensor, b_held: Tensor) -> None:
    """What of step ``i`` is in registers goes to its stage."""
    node.a.end(i, a_held)
    node.b.end(i, b_held)


# --------------------------------------------------------------------------------------------------
# ``.split(k).stages(n)``: a ring of n stages that TMA fills, and wgmma reads (sm_90).
#
# One warp more asks for the tiles of A and B; the warpgroups multiply, and release a stage when their products of the next
# one are under way. Blocks stay, and take a tile after the other: the next tile's stages arrive while C is stored. With a
# ``cluster`` of two, blocks of neighbouring rows of C share B's tile: each asks for one half of it, for both.

@dataclass(frozen=True)
class RingStages(OperandStages):
    """An operand's stages: ``panels`` of ``lines`` lines of ``width`` elements, along ``axis`` of the matrix. ``shared_by``
    blocks of a cluster take parts of it, each for all."""

    axis: int
    width: int
    lines: int
    panels: int
    shared_by: int = 1

    def fill(self, tensor_map: Any, ring: Any, slot: Any, at: tuple) -> None:
        """Ask for the tile that begins ``at`` (one thread)."""
        pointer, first = shared(self.dtype, self.offset), slot.stage * self.elements
        along, across = (at[1], at[0]) if self.axis == 1 else (at[0], at[1])
        if self.shared_by == 1:
            for p in range(self.panels):
                tma_load(tensor_map, (along + p * self.width, across), pointer, first + p * self.width * self.lines,
                         ring.full(), slot.stage)
        else:
            own = cluster_rank() * self.own_lines
            for p in range(self.panels):
                tma_load_multicast(tensor_map, (along + p * self.width, across + own), pointer,
                                   first + (p * self.lines + own) * self.width, ring.full(), slot.stage, self.mask)

    @property
    def elements(self) -> int:
        return self.nbytes // self.dtype.itemsize

    @property
    def own_lines(self) -> int:
        return self.lines // self.shared_by

    @property
    def mask(self) -> int:
        return (1 << self.shared_by) - 1

    @property
    def map_spec(self) -> TensorMapSpec:
        """The box of a copy."""
        return TensorMapSpec(self.dtype, (self.width, self.own_lines), self.width * self.dtype.itemsize)

    def filled(self, stage: int) -> Any:
        return on(repoint(shared(self.dtype, self.offset), self.dtype, stage * self.nbytes), self.form)


@dataclass(frozen=True)
class Pipelined(Component):
    """A kernel's tiles, its sums and its loop over K: `.tile().to(Block)`, `.accumulate_in(WR)`, `.split(k).stages(n)`."""

    tiles: TileGrid
    k: int
    ring: Any
    a: Any
    b: Any
    form: Any
    allocated: Any
    begin: Any
    inner: Any
    end: Any
    warps: int
    place: Any
    swizzle: Any
    cluster: int

    def run(self, operands: tuple, a_map: Any, b_map: Any) -> None:
        if thread_index() == 0:
            self.ring.initialise()
            mbarrier_fence_init()
        if self.cluster > 1:
            cluster_barrier()
        else:
            barrier()
        if warp_number() >= self.warps:
            if lane_index() == 0:
                produce(self, operands, a_map, b_map)
        else:
            consume(self, operands)
        if self.cluster > 1:                                  # nobody leaves while another writes to its shared memory
            cluster_barrier()

    def tile_of(self, operands: tuple, number: int) -> tuple:
        m, n = self.grid(operands)
        return self.place(self.swizzle(number), m, n)

    def grid(self, operands: tuple) -> tuple:
        """How many tiles there are; blocks of a cluster have as many."""
        rows, columns = stored_matrix(operands[2]).shape
        return over(over(rows, self.tiles.rows), self.cluster) * self.cluster, over(columns, self.tiles.columns)

    def count(self, operands: tuple) -> int:
        m, n = self.grid(operands)
        return m * n

    @property
    def step_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


def produce(node: Pipelined, operands: tuple, a_map: Any, b_map: Any) -> None:
    """One thread: a stage is asked for as soon as it is empty."""
    slot = Slot(thread_index() * 0, thread_index() * 0 + 1)
    steps, number, count = over(operands[0].storage.shape[1], node.k), block_x(), node.count(operands)
    while number < count:
        i, j = node.tile_of(operands, number)
        for step in range(steps):
            node.ring.acquire(slot)
            node.ring.expect(slot, node.step_bytes)
            node.a.fill(a_map, node.ring, slot, (i * node.tiles.rows, step * node.k))
            node.b.fill(b_map, node.ring, slot, (step * node.k, j * node.tiles.columns))
            slot = node.ring.advance(slot)
        number += grid_x()


def consume(node: Pipelined, operands: tuple) -> None:
    """All threads of the warpgroups."""
    held, c = allocate(node.allocated).seen_as(node.form), operands[2]
    slot = Slot(thread_index() * 0, thread_index() * 0)
    steps, number, count = over(operands[0].storage.shape[1], node.k), block_x(), node.count(operands)
    while number < count:
        i, j = node.tile_of(operands, number)
        node.begin.run((held,))
        if steps > 0:                                         # without it ptxas waits behind each instruction
            before = slot.stage
            for step in range(steps):
                node.ring.wait(slot)
                node.inner.run((node.a.filled(slot.stage), node.b.filled(slot.stage), held))
                if step > 0:                                  # all products but the last step's are done
                    node.ring.release(before)
                before = slot.stage
                slot = node.ring.advance(slot)
            held.storage[0, 0] = waited(held.storage[0, 0])
            node.ring.release(before)
        node.end.run((held, c.part(node.tiles.rows, node.tiles.columns, i, j, "base")))
        number += grid_x()


def waited(sums: tuple) -> tuple:
    (sums,) = wgmma_wait(0, (sums,))
    return sums


@dataclass(frozen=True)
class RingRoot(Component):
    """`Root` of a kernel that TMA loads for."""

    tree: Any
    a: Any
    b: Any
    c: Any

    def run(self, a: Tensor, b: Tensor, c: Tensor, a_map: Any, b_map: Any) -> None:
        self.tree.run((on(a, self.a), on(b, self.b), on(c, self.c)), a_map, b_map)


def scheduled_in_ring(root: RingRoot, a: Tensor, b: Tensor, c: Tensor, a_map: Any, b_map: Any) -> None:
    """The kernel of a schedule with ``.stages``."""
    root.run(a, b, c, a_map, b_map)


def scaled_in_ring(root: Any, a: Any, b: Any, out: Any, c: Any, alpha: Any, beta: Any, a_map: Any, b_map: Any) -> None:
    root.tree.run((on(a, root.a), on(b, root.b), on_scaled(out, c, alpha, beta, root.c)), a_map, b_map)


@dataclass(frozen=True)
class Bands(Component):
    """Blocks go down the columns of bands of ``rows`` rows of tiles, so that those that run together share A and B in L2:
    ``.to(Block).layout(Bands(16))``."""

    rows: int

    def __call__(self, number: int, rows: int, columns: int) -> tuple:
        band = udiv(number, self.rows * columns)
        within, high = number - band * self.rows * columns, min(self.rows, rows - band * self.rows)
        column = udiv(within, high)
        return band * self.rows + within - column * high, column


# --------------------------------------------------------------------------------------------------
# The steps of a schedule: Fireiron's decompositions and their refinements (section 3), each with its line in the source.

#: Levels of the compute hierarchy, the outermost first.
LEVELS = KERNEL, BLOCK, WARPGROUP, WARP, QUADPAIR, THREAD = "Kernel", "Block", "Warpgroup", "Warp", "QuadPair", "Thread"
#: Whose each memory is.
HOME = {GL: KERNEL, SH: BLOCK, WR: WARPGROUP, FR: WARP, QP: QUADPAIR, RF: THREAD}
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
    order: Any = ROW_MAJOR
    swizzle: Any = None
    unroll: bool = False
    blocks_per_sm: int = 1
    cluster: int = 1

    def __str__(self) -> str:
        return f".tile({self.rows}, {self.columns})" + (f".to({self.level})" if self.level else "")


@dataclasses.dataclass(frozen=True)
class SplitStep(ScheduleStep):
    """``.split(k)``: steps along K; ``.sync`` ends each with a barrier; ``.stages(n)`` of them are in shared memory."""

    k: int
    sync: bool = False
    unroll: bool = False
    stages: int = 0

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
