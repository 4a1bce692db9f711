"""Move, as instructions: loads and stores of lines, cp.async, ldmatrix, and wmma's fragments (Table 2, rows 1 to 4)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import field, replace
from math import gcd
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gemmkit import shapes
from gemmkit.lang.components import dataclass
from gemmkit.ptx import wmma
from gemmkit.ptx.copy_async import SIZES, commit_copies, copy_async, offset_of, wait_copies
from gemmkit.ptx.mma import MMA as MMA_SYNC
from gemmkit.ptx.mma import by_columns, by_rows, ldmatrix, map_c
from gemmkit.ptx.special import lane_index, udiv
from gemmkit.runtime.device import H100
from gemmkit.shapes import CHUNK, NONE, Shape, ShapeError, Swizzle, local, span
from gemmkit.specs import accesses, nodes
from gemmkit.specs.accesses import (
    InShared,
    Instruction,
    access_of,
    atomic,
    count_is,
    count_of,
    fragment_of,
    is_inside,
    is_line,
    levels_are,
    memory_is,
    write_registers,
)
from gemmkit.specs.nodes import HOME, LEVELS
from gemmkit.specs.tensors import (
    FR,
    GL,
    MMA,
    RF,
    SH,
    WMMA,
    WR,
    Form,
    FragmentRole,
    Line,
    Tensor,
    TensorError,
    Threads,
    is_linear,
    line_of,
    sums_of_warpgroup,
)

SIDE = 16                                                     # of a wmma fragment


def _lines(src: Form, dst: Form) -> Iterator[str]:
    yield from is_line("the source", src)
    yield from is_line("the destination", dst)
    if count_of(src) != count_of(dst):
        yield f"{count_of(src)} elements go to {count_of(dst)}"
    if src.dtype != dst.dtype:
        yield f"{src.dtype} goes to {dst.dtype}"
    for name, form in (("the source", src), ("the destination", dst)):
        if form.memory == SH and count_of(form):
            try:
                access_of(form)
            except ValueError as error:
                yield f"{name} {error}"


@atomic("Move")
@dataclass(frozen=True)
class MoveLine(Instruction):
    """A thread's neighbours, from and to anywhere: as few ld and st as alignment allows."""

    row: ClassVar[str] = "Move [1].thread [n].GL, SH or RF -> [n].GL, SH or RF: ld and st, .v2 and .v4 where aligned"
    source: Any
    target: Any
    itemsize: int

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        src, dst = given
        yield from count_is(threads, 1)
        yield from memory_is("the source", src, GL, SH, RF)
        yield from memory_is("the destination", dst, GL, SH, RF)
        yield from _lines(src, dst)

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        src, dst = given
        return cls(access_of(src), access_of(dst), src.itemsize)

    @property
    def becomes(self) -> str:
        """Loads and stores, and how many bytes each moves: in as few accesses as alignment allows, of 16 bytes at most."""
        size = self.itemsize
        parts = [f"{name} {access.said(size)}" for name, access in (("ld", self.source), ("st", self.target))
                 if access.said(size)]
        return ", ".join(parts) or "mov"

    def run(self, src: Tensor, dst: Tensor) -> None:
        self.target.store(dst, self.source.load(src))


@atomic("CopyAsync")
@dataclass(frozen=True)
class CopyLine(Instruction):
    """A thread's neighbours from global to shared memory, started and not waited for."""

    row: ClassVar[str] = "Move [1].thread [n].GL -> [n].SH of 4, 8 or 16 bytes: cp.async"
    count: int

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        src, dst = given
        yield from count_is(threads, 1)
        yield from memory_is("the source", src, GL)
        yield from memory_is("the destination", dst, SH)
        wrong = list(_lines(src, dst))
        yield from wrong
        if wrong or dst.memory != SH:
            return
        nbytes, line = count_of(src) * src.itemsize, line_of(src)
        if nbytes not in SIZES:
            yield f"{count_of(src)} elements of {src.itemsize} bytes are {nbytes} bytes, not 4, 8 or 16"
        if isinstance(line, Line) and line.count > 1 and line.axis != src.unit:
            yield "the elements are no neighbours in global memory"
        if src.is_partial:
            yield "tiles reach over the matrix's edge, where a line may end"
        if nbytes > src.alignment:
            yield f"global memory is aligned to {src.alignment} bytes, not {nbytes}"
        access = access_of(dst)
        if not isinstance(access, InShared) or access.times > 1:
            yield f"the elements are no neighbours in shared memory, or not aligned: {dst.layout}"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        return cls(count_of(given[0]))

    def run(self, src: Tensor, dst: Tensor) -> None:
        base, offset = dst.element_at
        copy_async(dst.storage, base, offset, src.storage, offset_of(src.storage, src.at), self.count, True)


@atomic("Move")
@dataclass(frozen=True)
class LoadMatrices(Instruction):
    """Fig. 1: each lane has the address of a row, and gets two elements of four 8 x 8 matrices."""

    row: ClassVar[str] = "Move [32].thread [1,8].fp16.SH -> [2,2].[1,2].fp16.RF: ldmatrix.sync.aligned.m8n8.x4.shared.b16"

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        src, dst = given
        yield from count_is(threads, 32)
        yield from memory_is("the source", src, SH)
        yield from memory_is("the destination", dst, RF)
        yield from levels_are("the source", src, (1, 8))
        yield from levels_are("the destination", dst, (2, 2), (1, 2))
        if src.dtype != dst.dtype or src.itemsize != 2:
            yield f"{src.dtype} goes to {dst.dtype}: elements of 16 bits are moved"
        if src.layout is not None and count_of(src) == 8 and not _has_whole_rows(src):
            yield f"a row is not 16 bytes of neighbours, aligned, in the layout {src.layout}"

    def run(self, src: Tensor, dst: Tensor) -> None:
        base, offset = src.element_at
        values = ldmatrix(src.storage, base, offset, 4, False)
        for i in range(2):
            for j in range(2):
                n = 4 * i + 2 * j
                write_registers(dst.storage, dst[i, j].at, (1, 2), (values[n], values[n + 1]))


def _has_whole_rows(form: Form) -> bool:
    try:
        return bool(access_of(form) == InShared(1, 8, 8))
    except ValueError:
        return False


def leading(form: Form) -> tuple[str, int] | None:
    """How a tile lies for wmma: ("row" or "col", its leading dimension in elements); None for another layout."""
    if form.swizzle.terms or form.layout is None or not is_linear(form.layout) or form.layout.rank != 2:
        return None
    (_, down), (_, across) = (dim[0] for dim in form.layout.modes)
    return ("row", down) if across == 1 else ("col", across) if down == 1 else None


def fragment_key(role: FragmentRole) -> Any:
    """What wmma's instructions are found by."""
    return (SIDE, SIDE, SIDE), role.input, role.accumulator


def _fragments(shared_name: str, shared: Form, fragment_name: str, fragment: Form) -> Iterator[str]:
    yield from memory_is(shared_name, shared, SH)
    yield from memory_is(fragment_name, fragment, FR)
    yield from levels_are(shared_name, shared, (SIDE, SIDE))
    yield from levels_are(fragment_name, fragment, (SIDE, SIDE))
    yield from fragment_of(fragment_name, fragment, WMMA)
    if shared.dtype != fragment.dtype:
        yield f"{shared_name} is of {shared.dtype} and {fragment_name} of {fragment.dtype}"
    if shared.memory == SH:
        found = leading(shared)
        if found is None:
            swizzle = f" {shared.swizzle}" if shared.swizzle.terms else ""
            yield f"the layout {shared.layout}{swizzle} has no leading dimension"
        elif math.gcd(found[1] * shared.itemsize, 16) != 16:
            yield f"the layout {shared.layout} has lines of {found[1]} elements, which is not a multiple of 16 bytes"


@atomic("Move")
@dataclass(frozen=True)
class LoadFragment(Instruction):
    """A 16 x 16 tile to a fragment of the warp's."""

    row: ClassVar[str] = "Move [32].thread [16,16].SH -> [16,16].FR: wmma.load.sync.aligned.m16n16k16.shared"
    role: FragmentRole
    leading: int

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        src, dst = given
        yield from count_is(threads, 32)
        wrong = list(_fragments("the source", src, "the destination", dst))
        yield from wrong
        if not wrong and dst.role.operand != "c" and dst.role.order != leading(src)[0]:     # type: ignore[index]
            yield f"the fragment is of a tile in {dst.role.order} order, and {src.layout} is not"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        src, dst = given
        order, lines = leading(src)                           # type: ignore[misc]
        return cls(FragmentRole(dst.role.operand, order, dst.role.input, dst.role.accumulator), lines)

    @property
    def load(self) -> Any:
        return wmma.LOAD[fragment_key(self.role), self.role.operand, self.role.order]

    def run(self, src: Any, dst: Any) -> None:
        i, j = dst.at
        base, offset = src.element_at
        dst.storage[udiv(i, SIDE), udiv(j, SIDE)] = self.load(src.storage, base, offset, self.leading)


@atomic("Move")
@dataclass(frozen=True)
class StoreFragment(Instruction):
    """A fragment of sums to a 16 x 16 tile."""

    row: ClassVar[str] = "Move [32].thread [16,16].FR -> [16,16].SH: wmma.store.d.sync.aligned.m16n16k16.shared"
    role: FragmentRole
    leading: int

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        src, dst = given
        yield from count_is(threads, 32)
        yield from _fragments("the destination", dst, "the source", src)
        if src.role is not None and src.role.operand != "c":
            yield "the fragment is of an input, not of sums"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        src, dst = given
        order, lines = leading(dst)                           # type: ignore[misc]
        return cls(FragmentRole("c", order, src.role.input, src.role.accumulator), lines)

    @property
    def store(self) -> Any:
        return wmma.STORE[fragment_key(self.role), self.role.order]

    def run(self, src: Any, dst: Any) -> None:
        i, j = src.at
        base, offset = dst.element_at
        self.store(dst.storage, base, offset, self.leading, src.storage[udiv(i, SIDE), udiv(j, SIDE)])


@atomic("Move")
@dataclass(frozen=True)
class StoreFragmentFar(Instruction):
    """A fragment of sums to a 16 x 16 tile of a matrix."""

    row: ClassVar[str] = "Move [32].thread [16,16].FR -> [16,16].GL: wmma.store.d.sync.aligned.m16n16k16.global"
    role: FragmentRole

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        src, dst = given
        yield from count_is(threads, 32)
        yield from memory_is("the source", src, FR)
        yield from memory_is("the destination", dst, GL)
        for name, form in (("the source", src), ("the destination", dst)):
            yield from levels_are(name, form, (SIDE, SIDE))
        if src.role is not None and (src.role.operand != "c" or src.role.by != WMMA):
            yield "the source is no fragment of wmma's sums"
        if src.dtype != dst.dtype:
            yield f"{src.dtype} goes to {dst.dtype}"
        if dst.is_partial:
            yield "tiles reach over the matrix's edge, and wmma stores whole ones; store to SH first"
        if dst.memory == GL and dst.alignment % 16:
            yield f"global memory is aligned to {dst.alignment} bytes, not 16"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        src, dst = given
        return cls(FragmentRole("c", "row" if dst.unit == 1 else "col", src.role.input, src.role.accumulator))

    @property
    def store(self) -> Any:
        return wmma.STORE_GLOBAL[fragment_key(self.role), self.role.order]

    def run(self, src: Any, dst: Any) -> None:
        i, j = src.at
        self.store(dst.storage, dst.base, dst.offset, src.storage[udiv(i, SIDE), udiv(j, SIDE)])


@atomic("CopyAsync")
@dataclass(frozen=True)
class CopyLineOrZeros(Instruction):
    """`CopyLine` of a matrix whose tiles reach over its edge: of a line that is not all there, what is there and zeros."""

    row: ClassVar[str] = ("Move [1].thread [n].GL, partial -> [n].SH of 4, 8 or 16 bytes: cp.async; at the edge ld and "
                          "st of what is there")
    count: int
    source: Any
    target: Any

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        src, dst = given
        if not src.is_partial:
            yield "no tile reaches over the matrix's edge"
        yield from CopyLine.differs(threads, src.replaced(is_partial=False), dst)

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        src, dst = given
        return cls(count_of(src), access_of(src), access_of(dst))

    def run(self, src: Tensor, dst: Tensor) -> None:
        if is_inside(self.source, src):
            base, offset = dst.element_at
            copy_async(dst.storage, base, offset, src.storage, offset_of(src.storage, src.at), self.count, True)
        else:                                                 # seen by the others behind the barrier that the copies need
            self.target.store(dst, self.source.load_what_is_there(src))


def wait() -> None:
    """Wait until what this thread has started to copy by CopyAsync is there; other threads see it behind a barrier."""
    commit_copies()
    wait_copies(0)


# --------------------------------------------------------------------------------------------------
# How a tile lies in shared memory: ``.storage``, ``.pad``, ``.layout`` and ``.swizzle`` of a move to SH, checked.
#
# A layout is dims:strides over a tile's coordinates, a swizzle a permutation of the elements' numbers behind it. `XOR` is
# the swizzle that a layout asks for: chunks of 16 bytes change places along a line, by the line's number, so that eight
# lines' chunks of one column lie in all 32 banks (they are what eight lanes of ldmatrix, or of 16-byte loads, read at
# once).

#: The swizzle by the numbers of lines.
XOR = "xor"
BANKS = 128                                                   # bytes that shared memory serves at a time


def layout_of(step: nodes.Move, extents: tuple[int, int], order: str) -> Shape:
    """The layout of a tile of these extents. Raises ScheduleError for one of other extents, or where elements meet."""
    rows, columns = extents
    if step.layout is None:
        return Shape(extents, (columns + step.pad, 1) if order == nodes.ROW_MAJOR else (1, rows + step.pad))
    if step.order is not None or step.pad:
        raise step.refuse(".layout says how all elements lie; leave out .storage and .pad")
    try:
        made = step.layout if isinstance(step.layout, Shape) else Shape.parse(step.layout)
    except ShapeError as error:
        raise step.refuse(f".layout: {error}") from None
    if made.extents != extents:
        raise step.refuse(f".layout {made} is of {' x '.join(map(str, made.extents))}, and the tile is {rows} x {columns}")
    offsets = made.offsets()
    if len(set(offsets)) < len(offsets) or min(offsets) < 0:
        raise step.refuse(f".layout {made} has two elements in one place, or one before the first")
    return made


def swizzle_of(step: nodes.Move, layout: Shape, dtype: np.dtype) -> Swizzle:
    """The swizzle of a tile with this layout. Raises ScheduleError where it is no permutation of the tile's elements, or
    takes 16 bytes apart."""
    if step.swizzle is None:
        return NONE
    if step.swizzle == XOR:
        return _by_lines(step, layout, dtype)
    count = 1 + sum(map(span, layout.modes))
    try:
        found = shapes.of_function(step.swizzle, count)
    except ShapeError as error:
        raise step.refuse(f".swizzle: {error}") from None
    if found.terms and found.run * dtype.itemsize < CHUNK:
        raise step.refuse(f".swizzle takes {CHUNK} bytes apart, {CHUNK // dtype.itemsize} elements that one access moves: "
                          f"from {found.run} on elements change places")
    return found


def _by_lines(step: nodes.Move, layout: Shape, dtype: np.dtype) -> Swizzle:
    lines = [dim[0] for dim in layout.modes if len(dim) == 1]
    along = next((extent for extent, stride in lines if stride == 1), 1)
    apart = next((stride for _, stride in lines if stride != 1), 0)
    chunk, size = max(1, CHUNK // dtype.itemsize), dtype.itemsize
    chunks = gcd(along // chunk, BANKS // CHUNK)
    if len(lines) < 2 or apart & (apart - 1) or along % chunk or chunks < 2:
        raise step.refuse(f".swizzle(XOR) is of lines of 32 bytes and more, a power of two apart; {layout} of {dtype} has "
                          "none; give a function of an element's number, or .pad")
    shift = max(apart * size, BANKS) // CHUNK
    return Swizzle((shift.bit_length() - 1, (chunks - 1) * chunk))


# --------------------------------------------------------------------------------------------------
# What the walk over a schedule allocates: operands on the way down, shared memory in use, and where an operand goes.

class OperandForm(NamedTuple):
    """An operand on the way down: its form, and the order in which its matrix lies."""

    form: Form
    order: str | None

    def seen_as(self, form: Form) -> OperandForm:
        return OperandForm(form, self.order)


@dataclasses.dataclass
class WalkState:
    """What the walk collects."""

    input: np.dtype
    accumulator: np.dtype
    threads: int | None = None
    tile: tuple[int, int] | None = None                       # of a block
    cursor: int = 0
    shared_bytes: int = 0
    depth: int | None = None                                  # of the steps whose number is known at run time
    in_shared: list[str] = field(default_factory=list)        # what touches shared memory: for messages
    is_ring: bool = False                                     # within a loop that TMA brings the tiles of
    is_ahead: bool = False                                    # within a move that is a step ahead
    is_through: bool = False                                  # within one by registers: a thread's part of tiles in turn
    fragments: str = WMMA                                     # whose the fragments are: mma.sync's where a tile is swizzled

    def allocate(self, step: nodes.ScheduleStep, nbytes: int, alignment: int = 128) -> int:
        at = -(-self.cursor // alignment) * alignment
        self.cursor = at + -(-nbytes // 128) * 128
        self.use(step, self.cursor)
        return at

    def use(self, step: nodes.ScheduleStep, nbytes: int) -> None:
        self.shared_bytes = max(self.shared_bytes, nbytes)
        if nbytes > H100.shared_memory_per_block:
            raise step.refuse(f"{nbytes} bytes of shared memory are needed, and a block has {H100.shared_memory_per_block}; "
                              "use smaller tiles")


class OperandPlace(NamedTuple):
    """Where an operand goes: as all see it, what one worker allocates of it, and from which byte of shared memory on."""

    operand: OperandForm
    allocated: Form
    offset: int
    said: str


def place_of(step: Any, operand: OperandForm, decomposition: tuple, level: str, state: WalkState,
             other: OperandForm) -> OperandPlace:
    """Where ``operand`` goes by a step of ``level``. Raises ScheduleError where that level cannot see the memory."""
    form, memory = operand.form, step.memory
    if LEVELS.index(HOME[memory]) < LEVELS.index(level):
        raise step.refuse(f"{memory} is a {HOME[memory]}'s, and this is a step of each {level}; move before .to({level})")
    if memory == SH:
        order = step.order or operand.order or other.order or nodes.ROW_MAJOR
        layout = layout_of(step, form.extents, order)
        swizzle = swizzle_of(step, layout, form.dtype)
        made = Form((local(*form.extents),), SH, form.dtype, layout, swizzle=swizzle)
        said = f"{made.element}.SH, {layout}{f', {swizzle}' if swizzle.terms else ''}"
        return OperandPlace(OperandForm(made, order), made, state.allocate(step, made.bytes), said)
    home = HOME[memory]
    extents = form.extents if level == home else accesses.owned(step, decomposition, form.extents, level, home)
    if memory == WR:
        return _place_of_sums(step, operand, extents, state)
    role = role_of(step, operand, extents, state) if memory == FR else None
    seen = accesses.form_in_registers(form, memory, role)
    allocated = seen.replaced(levels=(local(*extents),))
    return OperandPlace(OperandForm(seen, operand.order if memory == FR else None), allocated, 0,
                        f"{allocated} of each {home}")


def _place_of_sums(step: Any, operand: OperandForm, extents: tuple, state: WalkState) -> OperandPlace:
    """A warpgroup's: sums of floats are float32, whatever C is of, and those of integers int32."""
    dtype = np.dtype(np.int32 if state.input.kind in "iu" else np.float32)
    try:
        allocated = sums_of_warpgroup(extents, dtype)
    except TensorError as error:
        raise step.refuse(str(error)) from None
    seen = allocated.replaced(levels=(local(*operand.form.extents),))
    return OperandPlace(OperandForm(seen, None), allocated, 0, f"{allocated} of each {HOME[WR]}")


def ring_stages(step: Any, operand: OperandForm, count: int, shared_by: int,
                state: WalkState) -> tuple[nodes.RingStages, str]:
    """An operand's place in a ring of ``count`` stages: panels whose lines are the swizzle's, 128 bytes in a tile as wide.
    Raises ScheduleError for a tile that TMA does not bring so."""
    form, axis = operand.form, 1 if operand.order == nodes.ROW_MAJOR else 0
    along, lines, size = form.extents[axis], form.extents[1 - axis], form.itemsize
    width = next((w // size for w in (128, 64, 32) if along * size % w == 0), 0)
    if not width:
        raise step.refuse(f"lines of {along} elements of {size} bytes are not a multiple of 32 bytes, which wgmma reads")
    if lines % (8 * shared_by) or lines // shared_by > 256:
        raise step.refuse(f"a tile of {lines} lines{f' for {shared_by} blocks' if shared_by > 1 else ''}: for wgmma TMA "
                          "brings multiples of 8 lines, 256 at most")
    panels = along // width
    modes: list[Any] = [((lines, width),)] * 2
    modes[axis] = ((width, 1), (panels, width * lines))
    layout, swizzle = Shape.of_modes(modes), shapes.lines(width * size, size)
    made = Form((local(*form.extents),), SH, form.dtype, layout, swizzle=swizzle)
    nbytes = along * lines * size
    at = state.allocate(step, nbytes * count, 1024)
    said = f"{step}.prefetch: {form} to {made.element}.SH, {layout}, {swizzle}, {count} stages, by cp.async.bulk.tensor"
    return nodes.RingStages(made, form.dtype, at, nbytes, axis, width, lines, panels, shared_by), said


def role_of(step: Any, operand: OperandForm, extents: tuple, state: WalkState) -> FragmentRole:
    name = "c" if isinstance(step, nodes.Accumulate) else "ab"[step.operand]
    role = FragmentRole(name, operand.order, state.input, state.accumulator, state.fragments)
    key = (16, 16, 16), state.input, state.accumulator
    if key not in wmma.SPECS:
        raise step.refuse(f"no wmma instruction multiplies {state.input} and adds up {state.accumulator}; they take float16 "
                          "(sums of float32 or float16) and bfloat16 (float32)")
    if extents[0] % 16 or extents[1] % 16:
        raise step.refuse(f"{extents[0]} x {extents[1]} elements of a warp are not whole fragments of 16 x 16")
    return replace(role, order=None) if name == "c" else role


# --------------------------------------------------------------------------------------------------
# Fragments of mma.sync as instructions of a schedule: ldmatrix.x4, two mma.m16n8k16, and stores of pairs.
#
# wmma reads tiles by a leading dimension. Where a tile is swizzled it has none, and the warp's fragments of 16 x 16 are
# those of mma.sync (`gemmkit.ptx.mma`): each lane gives ldmatrix the address of a row, wherever the swizzle puts it.
# Which lane holds which element is known, so that sums go to any memory, and over a matrix's edge.

ROW = 8                                                       # elements of a row of ldmatrix's, of 16 bits
#: Where the row of a lane's address begins: of a tile by rows all 16, then their other halves; of one by columns both halves
#: of eight, then of eight more. So lanes get what mma wants of them.
ROWS, COLUMNS = by_rows(16, ROW), by_columns(2, ROW, 8)
SUMS = map_c(SIDE, SIDE)
OF_LANES, OF_VALUES, COUNT = SUMS.thread_shape, SUMS.value_shape, SUMS.values


def of_mma(name: str, form: Form) -> Iterator[str]:
    """What a form would have to be for a fragment of mma.sync's."""
    yield from memory_is(name, form, FR)
    yield from levels_are(name, form, (SIDE, SIDE))
    yield from fragment_of(name, form, MMA)


def rows_of(form: Form) -> bool | None:
    """Whether a 16 x 16 tile in shared memory consists of rows (columns: False) of 16 aligned bytes; None for neither."""
    for is_row, tiler in ((True, (1, ROW)), (False, (ROW, 1))):
        try:
            if access_of(form.tile(*tiler).inner) == InShared(1, ROW, ROW):
                return is_row
        except ValueError:
            pass
    return None


@atomic("Move")
@dataclass(frozen=True)
class LoadRows(Instruction):
    """A 16 x 16 tile of 16-bit elements to a fragment: lanes have the addresses of the rows of four 8 x 8 matrices."""

    row: ClassVar[str] = "Move [32].thread [16,16].SH -> [16,16].FR (of mma.sync): ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    is_row: bool
    is_transposed: bool

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        src, dst = given
        yield from count_is(threads, 32)
        yield from memory_is("the source", src, SH)
        yield from levels_are("the source", src, (SIDE, SIDE))
        yield from of_mma("the destination", dst)
        if src.dtype != dst.dtype or src.itemsize != 2:
            yield f"{src.dtype} goes to {dst.dtype}: elements of 16 bits are moved"
        elif src.memory == SH and len(src.levels) == 1 and src.extents == (SIDE, SIDE) and rows_of(src) is None:
            yield f"neither rows nor columns are 16 bytes of neighbours, aligned, in the layout {src.layout} {src.swizzle}"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        src, dst = given
        is_row = bool(rows_of(src))
        return cls(is_row, (dst.role.operand == "a") != is_row)

    def run(self, src: Any, dst: Any) -> None:
        if self.is_row:
            line = src.window(1, ROW, ROWS(lane_index()), "base")
        else:
            line = src.window(ROW, 1, COLUMNS(lane_index()), "base")
        base, offset = line.element_at
        i, j = dst.at
        dst.storage[udiv(i, SIDE), udiv(j, SIDE)] = ldmatrix(src.storage, base, offset, 4, self.is_transposed)


@atomic("MatMul")
@dataclass(frozen=True)
class MultiplyRows(Instruction):
    """Ampere's and later tensor cores, by fragments of 16 x 16."""

    row: ClassVar[str] = ("MatMul [32].thread [16,16].FR, [16,16].FR -> [16,16].FR (of mma.sync): 2 x "
                          "mma.sync.aligned.m16n8k16.row.col")
    kind: np.dtype
    accumulator: np.dtype

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        yield from count_is(threads, 32)
        for name, form in zip("abc", given):
            yield from of_mma(name, form)
            if form.role is not None and form.role.operand != name:
                yield f"{name} is a fragment of operand {form.role.operand}"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        return cls(given[0].dtype, given[2].dtype)

    @property
    def multiply(self) -> Any:
        return MMA_SYNC[16, 16, self.kind, self.kind, self.accumulator]

    def run(self, a: Any, b: Any, c: Any) -> None:
        (ai, aj), (bi, bj), (ci, cj) = a.at, b.at, c.at
        m, n = udiv(ci, SIDE), udiv(cj, SIDE)
        c.storage[m, n] = self.multiply(a.storage[udiv(ai, SIDE), udiv(aj, SIDE)],
                                        b.storage[udiv(bi, SIDE), udiv(bj, SIDE)], c.storage[m, n])


@atomic("Move")
@dataclass(frozen=True)
class StorePairs(Instruction):
    """A fragment of sums to a 16 x 16 tile in any memory: a lane has two neighbours of a row of each quarter."""

    row: ClassVar[str] = "Move [32].thread [16,16].FR (of mma.sync) -> [16,16].GL or SH: st of two neighbours a lane"
    target: Any

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        src, dst = given
        yield from count_is(threads, 32)
        yield from of_mma("the source", src)
        yield from memory_is("the destination", dst, GL, SH)
        yield from levels_are("the destination", dst, (SIDE, SIDE))
        if src.dtype != dst.dtype:
            yield f"{src.dtype} goes to {dst.dtype}"
        if src.role is not None and src.role.operand != "c":
            yield "the fragment is of an input, not of sums"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        return cls(access_of(given[1].tile(1, 2).inner))

    def run(self, src: Any, dst: Tensor) -> None:
        i, j = src.at
        values = src.storage[udiv(i, SIDE), udiv(j, SIDE)]
        own = dst.window(SIDE, SIDE, OF_LANES(lane_index()), "base")
        for n in range(0, COUNT, 2):
            place = own.window(1, 2, OF_VALUES(n), "offset")
            self.target.store(place, (values[n], values[n + 1]))
