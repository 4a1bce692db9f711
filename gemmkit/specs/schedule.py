"""Schedules: how a product is decomposed, as a chain of steps (Fireiron; Hagedorn et al., PACT 2020).

A schedule begins with a spec and ends with ``.done``: there an instruction executes what is left, or a micro-kernel does.
Every step makes a new schedule, so that parts can be named, shared and tried in variants:

>>> thread_by_thread = (MatMul(M, N, K)(GL, GL, GL)(Kernel)
...     .tile(16, 16).to(Block)                           # a block computes 16 x 16
...     .tile(1, 1).to(Thread)                            # and each of its 256 threads one element
...     .accumulate_in(RF, Init.done, Move.done)          # in a register
...     .split(1)
...     .move(A, RF, Move.done)
...     .move(B, RF, Move.done)
...     .done)                                            # MatMul(1,1,1)(RF,RF,RF)(Thread): fma
>>> import gemmkit, numpy as np
>>> a = np.ones((16, 32), np.float32)
>>> with gemmkit.emulate():
...     print(thread_by_thread(a, a.T)[3, 4])
32.0

=========================== ========================================================================================
decomposition               what it says
=========================== ========================================================================================
``.tile(r, c)``             C (and with it A's rows, B's columns) in tiles, one after the other; of a Move both operands.
                            A size may be (width, step): pieces of ``width`` neighbours, ``step`` apart
``.split(k)``               steps along K
``.move(x, memory, how)``   operand x (A, B; SRC of a Move) goes to another memory, by the schedule ``how`` of a Move
``.accumulate_in(memory,    sums begin by the schedule of an Init, and end in C by that of a Move
begin, end)``
``.done``, ``.done(f)``     an instruction; the micro-kernel f, a device function of the spec's tensors
=========================== ========================================================================================

Refinements of what they stand behind:

* of ``.tile``: ``.to(level)`` (tiles side by side: Block, Warp, Thread), ``.layout(ColMajor)`` (workers column by column),
  ``.swizzle(f)`` (workers renumbered), ``.unroll``; of ``.to(Block)``: ``.occupancy(blocks)`` of a multiprocessor,
  for wgmma ``.cluster(2)``, ``.layout(Bands(16))``;
* of ``.split``: ``.sync`` (a barrier behind each step), ``.unroll``, ``.stages(n)`` (steps that TMA brings for wgmma);
* of ``.move`` to SH: ``.storage(order)``, ``.pad(elements)`` a line, ``.layout(shape)``, ``.swizzle(XOR)`` or by a function
  of an element's number, ``.no_sync`` (no barrier behind it), ``.prefetch`` (a step ahead, by cp.async;
  ``.prefetch.through(RF)`` by registers).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from gemmkit.shapes import Shape, Swizzle
from gemmkit.specs import nodes
from gemmkit.specs.accesses import XOR
from gemmkit.specs.nodes import Bands, ScheduleError, ScheduleStep, line_here
from gemmkit.specs.tensors import FR, GL, QP, RF, SH, WR

__all__ = [
    "FR",
    "GL",
    "QP",
    "RF",
    "SH",
    "SRC",
    "WR",
    "XOR",
    "A",
    "B",
    "Bands",
    "Block",
    "ColMajor",
    "Init",
    "K",
    "Kernel",
    "M",
    "MatMul",
    "Move",
    "N",
    "QuadPair",
    "RowMajor",
    "Schedule",
    "ScheduleError",
    "Thread",
    "Warp",
    "Warpgroup",
    "explore",
    "micro_kernel",
]

Kernel, Block, Warpgroup, Warp, QuadPair, Thread = nodes.LEVELS
RowMajor, ColMajor = nodes.ROW_MAJOR, nodes.COLUMN_MAJOR
#: Operands: of a MatMul, and of a Move.
A, B, SRC = 0, 1, 0
#: Sizes that are known at run time.
M, N, K = "MNK"


@dataclass(frozen=True)
class Schedule:
    """A spec (``kind``: MatMul, Move or Init) and the steps that decompose it: see the module.

    Every method returns a new schedule. A step that makes no sense where it stands, whatever the operands, raises
    ScheduleError at once; one that does not fit the operands does so before anything is compiled.
    """

    kind: str
    sizes: tuple = (None, None, None)
    steps: tuple = ()

    # -- decompositions ---------------------------------------------------------------------------------------------

    def tile(self, rows: object, columns: object) -> Schedule:
        """Tiles of ``rows`` x ``columns``, each a number or (width, step)."""
        step = nodes.TileStep(rows, columns, line=line_here())
        for name, size in (("rows", rows), ("columns", columns)):
            parts = size if isinstance(size, tuple) else (size,)
            if len(parts) > 2 or not all(type(part) is int and part > 0 for part in parts):
                raise step.refuse(f"{name}={size!r}; give a number of at least 1, or (width, step)")
            if len(parts) == 2 and parts[1] % parts[0]:
                raise step.refuse(f"{name}={size}: the step must be a multiple of the width {parts[0]}")
        return self._with(step)

    def split(self, k: int) -> Schedule:
        """Steps of ``k`` along K."""
        step = nodes.SplitStep(k, line=line_here())
        if type(k) is not int or k < 1:
            raise step.refuse(f"k={k!r}; give a number of at least 1")
        if self.kind != "MatMul":
            raise step.refuse(f"a {self.kind} has no K; .split is of a MatMul")
        return self._with(step)

    def move(self, operand: int, memory: str, implementation: Schedule) -> Schedule:
        """Operand A, B (of a Move: SRC) goes to ``memory``, by a schedule of a Move."""
        step = nodes.Move(operand, memory, implementation, line=line_here())
        if self.kind == "Init" or operand not in ((A, B) if self.kind == "MatMul" else (SRC,)):
            raise step.refuse(f"operand={operand!r}; a MatMul moves A or B, a Move SRC, an Init nothing")
        if memory not in (SH, RF, FR, QP):
            raise step.refuse(f"memory={memory!r}; operands move to SH, RF, FR or QP")
        _finished(step, "implementation", implementation, "Move")
        return self._with(step)

    def accumulate_in(self, memory: str, begin: Schedule, end: Schedule) -> Schedule:
        """Sums in RF, FR, WR or QP: ``begin`` is a schedule of an Init, ``end`` of a Move."""
        step = nodes.Accumulate(memory, begin, end, line=line_here())
        if self.kind != "MatMul":
            raise step.refuse(f"a {self.kind} has no sums; .accumulate_in is of a MatMul")
        if memory not in (RF, FR, WR, QP):
            raise step.refuse(f"memory={memory!r}; sums are kept in RF, FR, WR or QP")
        _finished(step, "begin", begin, "Init")
        _finished(step, "end", end, "Move")
        return self._with(step)

    @property
    def done(self) -> Finished:
        """The end; called with a device function, that executes what is left."""
        return Finished(self.kind, self.sizes, self.steps)

    # -- refinements ------------------------------------------------------------------------------------------------

    def to(self, level: str) -> Schedule:
        """Tiles side by side, one for each worker of ``level``: Block, Warpgroup, Warp, QuadPair or
        Thread."""
        if level not in nodes.LEVELS[1:]:
            raise self._last(nodes.TileStep, ".to").refuse(f".to({level!r}): give {', '.join(nodes.LEVELS[1:])}")
        return self._refined(".to", (nodes.TileStep,), level=level)

    def layout(self, order: object) -> Schedule:
        """Of a tile: workers row by row (RowMajor) or column by column (ColMajor); blocks also by `Bands`. Of a
        move to SH: the tile's layout there, a `Shape` of its rows and columns or its text, ``"[(8,16):(16,1)]"``."""
        if isinstance(self._last((nodes.TileStep, nodes.Move), ".layout"), nodes.Move):
            if not isinstance(order, (Shape, str)) or order in (RowMajor, ColMajor):
                raise self.steps[-1].refuse(f".layout({order!r}): give a Shape, or its text; an order is .storage(order)")
            return self._refined(".layout", (nodes.Move,), layout=order)
        if isinstance(order, Bands):
            if self.steps[-1].level != Block or type(order.rows) is not int or order.rows < 1:
                raise self.steps[-1].refuse(f".layout({order}): bands are of 1 row of tiles or more, and of .to(Block)")
            return self._refined(".layout", (nodes.TileStep,), order=order)
        return self._refined(".layout", (nodes.TileStep,), order=_order(self, ".layout", order))

    def swizzle(self, function: object) -> Schedule:
        """Of a tile: workers renumbered by a device function, which must be a permutation of their numbers. Of a move to SH:
        elements renumbered, behind their layout, so that no two that are accessed together lie in one bank: by `XOR`, a
        `Swizzle`, or a function of an element's number that is an XOR of its bits."""
        if isinstance(self._last((nodes.TileStep, nodes.Move), ".swizzle"), nodes.Move):
            if function != XOR and not isinstance(function, (FunctionType, Swizzle)):
                raise self.steps[-1].refuse(f".swizzle({function!r}): give XOR, a Swizzle, or a function of a number")
            return self._refined(".swizzle", (nodes.Move,), swizzle=function)
        if not isinstance(function, FunctionType):
            raise self._last(nodes.TileStep,
                             ".swizzle").refuse(f".swizzle({function!r}): give a function of a worker's number")
        return self._refined(".swizzle", (nodes.TileStep,), swizzle=function)

    def occupancy(self, blocks: int) -> Schedule:
        """So many blocks at least fit on a multiprocessor by their registers, of which a thread then has fewer: of
        ``.to(Block)``. (CUDA's launch bounds.)"""
        last = self._last(nodes.TileStep, ".occupancy")
        if last.level != Block:
            raise last.refuse(".occupancy is of .to(Block): it says how many blocks a multiprocessor has at a time")
        if type(blocks) is not int or not 1 <= blocks <= 32:
            raise last.refuse(f".occupancy({blocks!r}): give a number of blocks, 1 to 32")
        return self._refined(".occupancy", (nodes.TileStep,), blocks_per_sm=blocks)

    def cluster(self, blocks: int) -> Schedule:
        """Blocks of neighbouring rows of tiles are a cluster, 1 or 2 of them, and share B's tiles: of ``.to(Block)`` of a
        kernel with ``.stages``, whose blocks go column by column (ColMajor, or `Bands` of an even number of rows)."""
        last = self._last(nodes.TileStep, ".cluster")
        if last.level != Block or type(blocks) is not int or blocks not in (1, 2):
            raise last.refuse(f".cluster({blocks!r}): give 1 or 2, behind .to(Block)")
        return self._refined(".cluster", (nodes.TileStep,), cluster=blocks)

    def stages(self, count: int) -> Schedule:
        """So many steps of a ``.split`` are in shared memory: TMA brings A and B, whose moves to SH follow, ``.prefetch``,
        and wgmma reads them. Sums are in WR. One warp more than the tiles say asks for the copies (sm_90)."""
        last = self._last(nodes.SplitStep, ".stages")
        if type(count) is not int or not 2 <= count <= 32:
            raise last.refuse(f".stages({count!r}): give a number of stages, 2 to 32")
        return self._refined(".stages", (nodes.SplitStep,), stages=count)

    @property
    def unroll(self) -> Schedule:
        """No loop: the code is there as often."""
        return self._refined(".unroll", (nodes.TileStep, nodes.SplitStep), unroll=True)

    @property
    def sync(self) -> Schedule:
        """A barrier behind each step."""
        return self._refined(".sync", (nodes.SplitStep,), sync=True)

    def storage(self, order: str) -> Schedule:
        """How a tile lies in shared memory: RowMajor, ColMajor."""
        return self._refined(".storage", (nodes.Move,), order=_order(self, ".storage", order))

    def pad(self, elements: int) -> Schedule:
        """So many elements more a line of shared memory, which then begins in another bank."""
        if type(elements) is not int or elements < 0:
            raise self._last(nodes.Move, ".pad").refuse(f".pad({elements!r}): give a number of elements")
        return self._refined(".pad", (nodes.Move,), pad=elements)

    @property
    def no_sync(self) -> Schedule:
        """No barrier behind the move: a later one serves for both."""
        return self._refined(".no_sync", (nodes.Move,), no_sync=True)

    @property
    def prefetch(self) -> Schedule:
        """Bring the tile a step ahead, by cp.async into two stages: of both moves right behind a ``.split``."""
        return self._refined(".prefetch", (nodes.Move,), prefetch=True)

    def through(self, memory: str) -> Schedule:
        """A prefetch by registers (RF): a step ahead each thread loads its part, and stores it to shared memory behind the
        step's products. For what cp.async does not copy: lines of other than 4, 8 or 16 bytes, or not aligned, or turned."""
        last = self._last(nodes.Move, ".through")
        if memory != RF or not last.prefetch:
            raise last.refuse(f".through({memory!r}): a move that is .prefetch goes .through(RF)")
        return self._refined(".through", (nodes.Move,), through=True)

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _with(self, step: ScheduleStep) -> Schedule:
        if isinstance(self, Finished):
            raise step.refuse("the schedule is done; put the step before .done")
        return Schedule(self.kind, self.sizes, (*self.steps, step))

    def _last(self, kind: Any, name: str) -> Any:
        last = self.steps[-1] if self.steps else None
        if isinstance(self, Finished) or not isinstance(last, kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            wanted = " or ".join(f".{k.__name__.removesuffix('Step').lower()}" for k in kinds)
            raise ScheduleError(f"{name} refines {wanted}, and stands behind {self.kind if last is None else last}"
                                f"{'.done' if isinstance(self, Finished) else ''}\n  at {line_here()}")
        return last

    def _refined(self, name: str, kinds: tuple, **changed: object) -> Schedule:
        last = self._last(kinds, name)
        if isinstance(last, nodes.Move) and last.memory != SH:
            raise last.refuse(f"{name} is of moves to SH; registers have no layout and need no barrier")
        return replace(self, steps=(*self.steps[:-1], replace(last, **changed)))


@dataclass(frozen=True)
class Finished(Schedule):
    """A schedule to its end: with ``micro`` a micro-kernel's. That of a kernel can be called, explained and configured."""

    micro: Any = None

    def __call__(self, *given: object, **how: Any) -> Any:
        """Of a kernel's schedule: ``schedule(a, b, out=None, c=None, alpha=1, beta=1, stream=None)``, which is
        ``alpha a @ b + beta c`` (`gemmkit.specs.run.run`). Of a part: ``done(function)``, executed by a micro-kernel.

        Raises ScheduleError, TypeError, ValueError before anything is compiled.
        """
        if len(given) == 1 and isinstance(given[0], FunctionType):
            return replace(self, micro=given[0])
        from gemmkit.specs.run import run

        return run(self, *given, **how)

    def explain(self, a: object, b: object, c: object) -> str:
        """What the kernel's schedule becomes, as an indented tree: how many tiles, for whom, in which memory, and which
        instruction executes each leaf.

        Matrices are arrays, or (dtype, order): ``schedule.explain(("float16", "row"), ("float16", "col"), ("float32",
        "row"))``. Raises ScheduleError where the schedule does not fit them.
        """
        from gemmkit.specs.run import explain

        return explain(self, a, b, c)

    def compile(self, a: object, b: object, c: object, *, blocks_per_sm: int | None = None) -> Any:
        """PTX, machine code and what it takes of registers, for an H100 and without a GPU: a
        `gemmkit.specs.lower.Code`. Matrices are as for `explain`; ``blocks_per_sm`` is the schedule's ``.occupancy``
        where it is not given. Raises ScheduleError."""
        from gemmkit.specs.run import compile_schedule

        return compile_schedule(self, a, b, c, blocks_per_sm=blocks_per_sm)

    def config(self, a: object, b: object, c: object, **fields: object) -> Any:
        """The Config of gemmkit's template kernel that does the same (`gemmkit.specs.run.config`); raises ConfigError,
        naming all that does not fit, where there is none."""
        from gemmkit.specs.run import config

        return config(self, a, b, c, **fields)


def MatMul(m: object, n: object, k: object) -> Any:
    """``MatMul(M, N, K)(GL, GL, GL)(Kernel)``: the spec of a whole product.

    Sizes are numbers, or M, N, K: known at run time. Raises ScheduleError for another size, memory or level.
    """
    for name, size in zip("mnk", (m, n, k)):
        if not (type(size) is int and size > 0) and size not in (M, N, K):
            raise ScheduleError(f"MatMul({name}={size!r}): give a number of at least 1, or M, N, K\n  at {line_here()}")

    def of_memories(a: str, b: str, c: str) -> Any:
        if (a, b, c) != (GL, GL, GL):
            raise ScheduleError(f"MatMul(...)({a}, {b}, {c}): a kernel's matrices are in GL\n  at {line_here()}")

        def of_level(level: str) -> Schedule:
            if level != Kernel:
                raise ScheduleError(f"MatMul(...)(...)({level}): a schedule begins at Kernel\n  at {line_here()}")
            return Schedule("MatMul", tuple(x if type(x) is int else None for x in (m, n, k)))

        return of_level

    return of_memories


#: The specs that schedules of a MatMul have parts of.
Move, Init = Schedule("Move"), Schedule("Init")


def explore(make: Any, **choices: Any) -> Any:
    """``explore(make, tiles=[(64, 64), (128, 64)], k=[8, 16])(a, b)``: the schedules ``make(tiles, k)`` for all
    combinations, compiled, checked and timed on these matrices; printed it is a table, ``.schedule`` is the fastest one.

    Those that do not fit are listed with their rule. In the emulator nothing is timed. See
    `gemmkit.specs.trials.Variants` for what a call takes, and for the errors.
    """
    from gemmkit.specs.trials import Variants

    return Variants(make, choices)


def micro_kernel(shared_bytes: int) -> Any:
    """Decorate a micro-kernel that uses shared memory, from its beginning on: so many bytes."""
    def mark(function: Any) -> Any:
        function.shared_bytes = shared_bytes
        return function

    return mark


def _order(schedule: Schedule, name: str, order: object) -> str:
    if order not in (RowMajor, ColMajor):
        raise ScheduleError(f"{name}({order!r}): give RowMajor or ColMajor\n  at {line_here()}")
    return str(order)


def _finished(step: nodes.ScheduleStep, name: str, given: object, kind: str) -> None:
    if not isinstance(given, Finished) or given.kind != kind:
        got = f"a {given.kind} that is not done" if isinstance(given, Schedule) and given.kind == kind else (
            f"a {given.kind}" if isinstance(given, Schedule) else repr(given))
        raise step.refuse(f"{name} is {got}; give a schedule of {kind} that ends with .done")
