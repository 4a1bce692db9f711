"""Move, as instructions: loads and stores of lines, cp.async, ldmatrix, and wmma's fragments (Table 2, rows 1 to 4); TMA
with mbarriers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from gemmkit.lang.components import dataclass
from gemmkit.lang.registers import each, split
from gemmkit.lang.static import traced
from gemmkit.ptx import wmma
from gemmkit.ptx.barriers import mbarrier_arrive, mbarrier_expect, mbarrier_fence_init, mbarrier_init, mbarrier_wait
from gemmkit.ptx.copy_async import SIZES, commit_copies, copy_async, offset_of, wait_copies
from gemmkit.ptx.mma import C_8X8, by_columns, by_rows, ldmatrix, map_c, mma_quad_pair
from gemmkit.ptx.mma import MMA as MMA_SYNC
from gemmkit.ptx.special import lane_index, udiv
from gemmkit.ptx.tma import map_of, tma_load
from gemmkit.runtime.tensor_maps import TensorMapSpec
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
    write_registers,
)
from gemmkit.specs.tensors import (
    FR,
    GL,
    MBARRIER,
    MMA,
    OF_QUADS,
    QP,
    RF,
    SH,
    WMMA,
    Form,
    FragmentRole,
    Line,
    Tensor,
    Threads,
    box_of,
    is_block,
    is_linear,
    line_of,
)

SIDE = 16                                                     # of a wmma fragment
#: Where a lane's sums of a quad-pair begin, and where the further ones lie from there.
QUAD_LANES, QUAD_VALUES = C_8X8.thread_shape, C_8X8.value_shape


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


@atomic("Move", 1, (GL, SH, RF), (GL, SH, RF))
@dataclass(frozen=True)
class MoveLine(Instruction):
    """A thread's neighbours, from and to anywhere: as few ld and st as alignment allows."""

    row: ClassVar[str] = "Move [1].thread [n].GL, SH or RF -> [n].GL, SH or RF: ld and st, .v2 and .v4 where aligned"
    source: Any
    target: Any
    itemsize: int

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        yield from _lines(*given)

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
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


@atomic("CopyAsync", 1, GL, SH)
@dataclass(frozen=True)
class CopyLine(Instruction):
    """A thread's neighbours from global to shared memory, started and not waited for."""

    row: ClassVar[str] = "Move [1].thread [n].GL -> [n].SH of 4, 8 or 16 bytes: cp.async"
    count: int

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        src, dst = given
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
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        return cls(count_of(given[0]))

    def run(self, src: Tensor, dst: Tensor) -> None:
        base, offset = dst.element_at
        copy_async(dst.storage, base, offset, src.storage, offset_of(src.storage, src.at), self.count, True)


@atomic("Move", 32, SH, RF)
@dataclass(frozen=True)
class LoadMatrices(Instruction):
    """Fig. 1: each lane has the address of a line of 16 bytes, and gets 32 bits of each of one, two or four matrices of
    eight lines. Lines are rows or columns, and so are the 32 bits; 16-bit elements may be turned from one to the other."""

    row: ClassVar[str] = ("Move [32].thread [1,8].fp16.SH -> [2,2].[1,2].fp16.RF: ldmatrix.sync.aligned.m8n8.x4.shared.b16 "
                          "(.x1 to [1,2], .x2 to [2,1].[1,2]; .trans to [2,1]; of 8 and 32 bits [1,16] to [1,4], [1,4] to "
                          "[1,1])")
    outer: tuple
    inner: tuple
    is_transposed: bool

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        src, dst = given
        if src.dtype != dst.dtype or src.itemsize not in (1, 2, 4):
            yield f"{src.dtype} goes to {dst.dtype}: elements of 8, 16 or 32 bits are moved"
            return
        line, part = 16 // src.itemsize, 4 // src.itemsize
        if len(src.levels) != 1 or src.extents not in ((1, line), (line, 1)):
            yield f"the source is {src}, not [1,{line}] or [{line},1]"
        outer, inner = _matrices(dst)
        if inner not in ((1, part), (part, 1)) or len(outer) != 2 or math.prod(outer) not in (1, 2, 4):
            yield f"the destination is {dst}, not [2,2].[1,{part}], [2,1].[1,{part}], [1,{part}] or the same of [{part},1]"
        elif src.itemsize != 2 and (src.extents[0] == 1) != (inner[0] == 1):
            yield f"elements of {8 * src.itemsize} bits are not turned from rows to columns, as those of 16 bits are"
        if src.layout is not None and count_of(src) == line and not _has_whole_rows(src):
            yield f"a row is not 16 bytes of neighbours, aligned, in the layout {src.layout}"

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        src, dst = given
        outer, inner = _matrices(dst)
        return cls(outer, inner, src.itemsize == 2 and (src.extents[0] == 1) != (inner[0] == 1))

    @property
    def becomes(self) -> str:
        trans = ".trans" if self.is_transposed else ""
        return f"ldmatrix.sync.aligned.m8n8.x{self.outer[0] * self.outer[1]}{trans}.shared.b16"

    @property
    def count(self) -> int:
        return int(self.outer[0] * self.outer[1])

    @property
    def each(self) -> int:
        return int(self.inner[0] * self.inner[1])

    def run(self, src: Tensor, dst: Tensor) -> None:
        base, offset = src.element_at
        each(_keep_matrix, split(ldmatrix(src.storage, base, offset, self.count, self.is_transposed), self.each), self, dst)


def _keep_matrix(values: tuple, n: int, load: LoadMatrices, dst: Tensor) -> None:
    i = n // load.outer[1]
    down, across = i * load.inner[0], (n - i * load.outer[1]) * load.inner[1]
    write_registers(dst.storage, (dst.at[0] + down, dst.at[1] + across), load.inner, values)


def _matrices(form: Form) -> tuple[tuple, tuple]:
    """(how many matrices down and across, a lane's part of each)."""
    *outer, inner = (level.extents for level in form.levels)
    return (tuple(outer[0]) if len(outer) == 1 else (1, 1) if not outer else ()), inner


def _has_whole_rows(form: Form) -> bool:
    try:
        return bool(access_of(form) == InShared(1, count_of(form), count_of(form)))
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


@atomic("Move", 32, SH, FR)
@dataclass(frozen=True)
class LoadFragment(Instruction):
    """A 16 x 16 tile to a fragment of the warp's."""

    row: ClassVar[str] = "Move [32].thread [16,16].SH -> [16,16].FR: wmma.load.sync.aligned.m16n16k16.shared"
    role: FragmentRole
    leading: int

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        src, dst = given
        wrong, lies = list(_fragments("the source", src, "the destination", dst)), leading(src)
        yield from wrong
        if not wrong and lies is not None and dst.role is not None and dst.role.operand != "c" and dst.role.order != lies[0]:
            yield f"the fragment is of a tile in {dst.role.order} order, and {src.layout} is not"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        src, dst = given
        order, lines = leading(src)                           # type: ignore[misc]
        return cls(FragmentRole(dst.role.operand, order, dst.role.input, dst.role.accumulator), lines)

    @property
    def load(self) -> Any:
        return wmma.LOAD[fragment_key(self.role), self.role.operand, self.role.order]

    def run(self, src: Tensor, dst: Tensor) -> None:
        i, j = dst.at
        base, offset = src.element_at
        dst.storage[udiv(i, SIDE), udiv(j, SIDE)] = self.load(src.storage, base, offset, self.leading)


@atomic("Move", 32, FR, SH)
@dataclass(frozen=True)
class StoreFragment(Instruction):
    """A fragment of sums to a 16 x 16 tile."""

    row: ClassVar[str] = "Move [32].thread [16,16].FR -> [16,16].SH: wmma.store.d.sync.aligned.m16n16k16.shared"
    role: FragmentRole
    leading: int

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        src, dst = given
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

    def run(self, src: Tensor, dst: Tensor) -> None:
        i, j = src.at
        base, offset = dst.element_at
        self.store(dst.storage, base, offset, self.leading, src.storage[udiv(i, SIDE), udiv(j, SIDE)])


@atomic("Move", 32, FR, GL)
@dataclass(frozen=True)
class StoreFragmentFar(Instruction):
    """A fragment of sums to a 16 x 16 tile of a matrix."""

    row: ClassVar[str] = "Move [32].thread [16,16].FR -> [16,16].GL: wmma.store.d.sync.aligned.m16n16k16.global"
    role: FragmentRole

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        src, dst = given
        for name, form in (("the source", src), ("the destination", dst)):
            yield from levels_are(name, form, (SIDE, SIDE))
        if src.role is not None and (src.role.operand != "c" or src.role.by != WMMA):
            yield "the source is no fragment of wmma's sums"
        if src.dtype != dst.dtype:
            yield f"{src.dtype} goes to {dst.dtype}"
        if dst.is_partial:
            yield "tiles reach over the matrix's edge, and wmma stores whole ones; store to SH first"
        if dst.scaling:
            yield "wmma stores sums as they are, without alpha and beta; store to SH first"
        if dst.memory == GL and dst.alignment % 16:
            yield f"global memory is aligned to {dst.alignment} bytes, not 16"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        src, dst = given
        return cls(FragmentRole("c", "row" if dst.unit == 1 else "col", src.role.input, src.role.accumulator))

    @property
    def store(self) -> Any:
        return wmma.STORE_GLOBAL[fragment_key(self.role), self.role.order]

    def run(self, src: Tensor, dst: Tensor) -> None:
        i, j = src.at
        self.store(dst.storage, dst.base, dst.offset, src.storage[udiv(i, SIDE), udiv(j, SIDE)])


@atomic("Move", 32, GL, FR)
@dataclass(frozen=True)
class LoadFragmentFar(Instruction):
    """A 16 x 16 tile of a matrix to a fragment (Fireiron, Fig. 7)."""

    row: ClassVar[str] = "Move [32].thread [16,16].GL -> [16,16].FR: wmma.load.sync.aligned.m16n16k16.global"
    role: FragmentRole

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        src, dst = given
        for name, form in (("the source", src), ("the destination", dst)):
            yield from levels_are(name, form, (SIDE, SIDE))
        yield from fragment_of("the destination", dst, WMMA)
        if src.dtype != dst.dtype:
            yield f"{src.dtype} goes to {dst.dtype}"
        if src.is_partial:
            yield "tiles reach over the matrix's edge, and wmma loads whole ones; move to SH first"
        if src.memory == GL and src.alignment % 16:
            yield f"global memory is aligned to {src.alignment} bytes, not 16"
        order = "row" if src.unit == 1 else "col"
        if dst.role is not None and dst.role.operand != "c" and dst.role.order != order:
            yield f"the fragment is of a tile in {dst.role.order} order, and the matrix is in {order} order"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        src, dst = given
        order = "row" if src.unit == 1 else "col"
        return cls(FragmentRole(dst.role.operand, order, dst.role.input, dst.role.accumulator))

    @property
    def load(self) -> Any:
        return wmma.LOAD_GLOBAL[fragment_key(self.role), self.role.operand, self.role.order]

    def run(self, src: Tensor, dst: Tensor) -> None:
        i, j = dst.at
        dst.storage[udiv(i, SIDE), udiv(j, SIDE)] = self.load(src.storage, src.base, src.offset)


@atomic("CopyAsync", 1, GL, SH)
@dataclass(frozen=True)
class CopyLineOrZeros(Instruction):
    """`CopyLine` of a matrix whose tiles reach over its edge: of a line that is not all there, what is there and zeros."""

    row: ClassVar[str] = ("Move [1].thread [n].GL, partial -> [n].SH of 4, 8 or 16 bytes: cp.async; at the edge ld and "
                          "st of what is there")
    count: int
    source: Any
    target: Any

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        src, dst = given
        if not src.is_partial:
            yield "no tile reaches over the matrix's edge"
        yield from CopyLine.differs(threads, src.replaced(is_partial=False), dst)

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        src, dst = given
        return cls(count_of(src), access_of(src), access_of(dst))

    def run(self, src: Tensor, dst: Tensor) -> None:
        if is_inside(self.source, src):
            base, offset = dst.element_at
            copy_async(dst.storage, base, offset, src.storage, offset_of(src.storage, src.at), self.count, True)
        else:                                                 # seen by the others behind the barrier that the copies need
            self.target.store(dst, self.source.load_what_is_there(src))


# -- TMA, and mbarriers in shared memory -----------------------------------------------------------------------------------
#
# Of a ring of barriers, T[4].mbar.SH, number n is barrier n % 4 in its phase n // 4: so loops number their steps, and nobody
# writes parities. A copy arrives with the bytes that it brings, so that none is awaited that was not said.

def is_barrier(name: str, form: Form) -> Iterator[str]:
    """What a form would have to be for one barrier of a ring."""
    if form.dtype != MBARRIER or form.memory != SH or form.extents:
        yield f"{name} is {form}, not one barrier of a ring in SH, as full[n] is of T[4].mbar.SH"


@traced
def box_at(tensor: Tensor, axis: int, along: int) -> tuple:
    """The coordinates of a box ``along`` elements further: the fastest dimension first, as TMA takes them."""
    at = tensor.at
    return at[axis] + along, *(at[n] for n in reversed(range(len(at))) if n != axis)


@atomic("CopyAsync", 1, GL, SH, SH)
@dataclass(frozen=True)
class CopyBox(Instruction):
    """A tile that TMA brings (sm_90), zeros where it reaches over the array's edge. The barrier counts one arrival, and
    the phase waits for the tile's bytes."""

    row: ClassVar[str] = ("CopyAsync [1].thread [m,n].GL.in_boxes(form) -> [m,n].SH, [].mbar.SH: mbarrier.arrive.expect_tx, "
                          "cp.async.bulk.tensor")
    number: int
    axis: int
    spec: TensorMapSpec
    panels: int
    apart: int

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        src, dst, barrier = given
        yield from is_barrier("the barrier", barrier)
        found = box_of(dst)
        if src.box is None:
            yield f"the source {src} has no tensor map; annotate the parameter with T[...].GL.in_boxes(form of a tile in SH)"
        elif src.memory == GL and (not is_block(src, src.rank) or src.extents != src.box.extents):
            yield f"the source is {src}, and its boxes are {src.box}"
        if isinstance(found, str):
            yield f"the destination {found}"
            return
        if src.box is not None and found != src.box._replace(number=0):
            yield f"the destination is {found}, and the source's boxes are {src.box}"
        if dst.alignment % (found.swizzle * 8 or 128):
            yield f"the destination is allocated at a multiple of {dst.alignment} bytes, not of {found.swizzle * 8 or 128}"

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        src, dst, _ = given
        box: Any = src.box
        modes: Any = dst.layout
        apart = modes.modes[box.axis][-1][1]
        return cls(box.number, box.axis, box.map_spec, box.extents[box.axis] // box.width, apart)

    @property
    def width(self) -> int:
        return self.spec.box[0]

    @property
    def nbytes(self) -> int:
        return self.panels * self.spec.box_bytes

    def run(self, src: Tensor, dst: Tensor, barrier: Tensor) -> None:
        n, first = barrier.at[1], dst.unswizzled_at
        mbarrier_expect(barrier.storage, n, self.nbytes)
        for p in range(self.panels):
            tma_load(map_of(src.storage, self.number, self.spec, self.axis), box_at(src, self.axis, p * self.width),
                     dst.storage, first + p * self.apart, barrier.storage, n)


@atomic("Init")
@dataclass(frozen=True)
class InitBarriers(Instruction):
    """A ring of barriers, whose phases take ``arrivals`` each. One thread; then a barrier of the block."""

    row: ClassVar[str] = "Init<arrivals> [1].thread -> [?].mbar.SH: mbarrier.init of each, fence.mbarrier_init"
    count: int
    arrivals: int

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        *arrivals, ring = given
        yield from count_is(threads, 1)
        if ring.dtype != MBARRIER or ring.extents != (None,):
            yield f"the destination is {ring}, not a ring of barriers, T[4].mbar.SH"
        if len(arrivals) != 1 or type(arrivals[0]) is not int or not 1 <= arrivals[0] < 2**20:
            yield f"a phase takes 1 to {2**20 - 1} arrivals, not {', '.join(map(str, arrivals)) or 'none'}"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        return cls(given[1].layout.extents[1], given[0])

    def run(self, ring: Tensor) -> None:
        for n in range(self.count):
            mbarrier_init(ring.storage, n, self.arrivals)
        mbarrier_fence_init()


@atomic("Arrive", 1, SH)
@dataclass(frozen=True)
class ArriveAtBarrier(Instruction):
    """One arrival: what the thread did before is seen by those that wait."""

    row: ClassVar[str] = "Arrive [1].thread -> [].mbar.SH: mbarrier.arrive"

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        yield from is_barrier("the destination", given[0])

    def run(self, barrier: Tensor) -> None:
        mbarrier_arrive(barrier.storage, barrier.at[1])


@atomic("Await")
@dataclass(frozen=True)
class AwaitBarrier(Instruction):
    """The end of a phase, awaited by each thread that comes here: that of the barrier's number, or with -1 the one before,
    which in a ring's first round is over from the start."""

    row: ClassVar[str] = "Await, Await<-1> [n].thread -> [].mbar.SH: mbarrier.try_wait.parity"
    rounds: int                                               # 1 for the one before: of two rounds the parity is the same

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        *rounds, barrier = given
        yield from is_barrier("the destination", barrier)
        if rounds not in ([], [-1]):
            yield f"the phase of a number, or with -1 the one before is awaited, not {', '.join(map(str, rounds))}"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        return cls(len(given) - 1)

    def run(self, barrier: Tensor) -> None:
        phase, n = barrier.at
        mbarrier_wait(barrier.storage, n, (phase + self.rounds) & 1)


def wait() -> None:
    """Wait until what this thread has started to copy by CopyAsync is there; other threads see it behind a barrier."""
    commit_copies()
    wait_copies(0)


# -- fragments of a quad-pair: a row of A, a column of B, eight elements of C a thread ------------------------------------

def of_quads(name: str, form: Form, *operands: str) -> Iterator[str]:
    """What a form would have to be for a fragment of mma.m8n8k4's."""
    if form.role is not None and form.memory == QP:
        if form.role.operand not in operands:
            yield f"{name} is a fragment of operand {form.role.operand}, not {' or '.join(operands)}"
        yield from levels_are(name, form, OF_QUADS[form.role.operand])


@atomic("Move", 8, (GL, SH), QP)
@dataclass(frozen=True)
class LoadQuads(Instruction):
    """A row of A, or a column of B, a thread."""

    row: ClassVar[str] = "Move [(4,2):(1,16)].thread [8,4] or [4,8].GL or SH -> .QP: ld of four elements a thread"
    source: Any
    is_a: bool

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        src, dst = given
        yield from of_quads("the destination", dst, "a", "b")
        if dst.role is not None and dst.role.operand in OF_QUADS:
            yield from levels_are("the source", src, OF_QUADS[dst.role.operand])
        if src.dtype != dst.dtype:
            yield f"{src.dtype} goes to {dst.dtype}"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        src, dst = given
        is_a = dst.role.operand == "a"
        return cls(access_of(src.tile(*((1, 4) if is_a else (4, 1))).inner), is_a)

    def run(self, src: Tensor, dst: Tensor) -> None:
        (i, j), line = dst.at, (lane_index() & 3) + udiv(lane_index(), 16) * 4
        if self.is_a:
            dst.storage[udiv(i, 8), udiv(j, 4)] = self.source.load(src.window(1, 4, (line, 0), "base"))
        else:
            dst.storage[udiv(i, 4), udiv(j, 8)] = self.source.load(src.window(4, 1, (0, line), "base"))


@atomic("Move", 8, QP, (GL, SH))
@dataclass(frozen=True)
class StoreQuads(Instruction):
    """Sums of a quad-pair: four times two neighbours a thread."""

    row: ClassVar[str] = "Move [(4,2):(1,16)].thread [8,8].QP -> [8,8].GL or SH: st of two neighbours, four times a thread"
    target: Any

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        src, dst = given
        yield from of_quads("the source", src, "c")
        yield from levels_are("the destination", dst, (8, 8))
        if src.dtype != dst.dtype:
            yield f"{src.dtype} goes to {dst.dtype}"

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        return cls(access_of(given[1].tile(1, 2).inner))

    def run(self, src: Tensor, dst: Tensor) -> None:
        i, j = src.at
        values = src.storage[udiv(i, 8), udiv(j, 8)]
        own = dst.window(8, 8, QUAD_LANES(lane_index()), "base")
        for n in range(0, 8, 2):
            self.target.store(own.window(1, 2, QUAD_VALUES(n), "offset"), (values[n], values[n + 1]))


@atomic("MatMul", 8, QP, QP, QP)
@dataclass(frozen=True)
class MultiplyQuads(Instruction):
    """Volta's instruction, of fragments (Fireiron, Fig. 8)."""

    row: ClassVar[str] = ("MatMul [(4,2):(1,16)].thread [8,4].QP, [4,8].QP -> [8,8].QP: "
                          "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32")

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        for name, form in zip("abc", given):
            yield from of_quads(name, form, name)

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        (ai, aj), (bi, bj), (ci, cj) = a.at, b.at, c.at
        m, n = udiv(ci, 8), udiv(cj, 8)
        c.storage[m, n] = mma_quad_pair(a.storage[udiv(ai, 8), udiv(aj, 4)], b.storage[udiv(bi, 4), udiv(bj, 8)],
                                        c.storage[m, n])


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


@atomic("Move", 32, SH, FR)
@dataclass(frozen=True)
class LoadRows(Instruction):
    """A 16 x 16 tile of 16-bit elements to a fragment: lanes have the addresses of the rows of four 8 x 8 matrices."""

    row: ClassVar[str] = "Move [32].thread [16,16].SH -> [16,16].FR (of mma.sync): ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    is_row: bool
    is_transposed: bool

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        src, dst = given
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

    def run(self, src: Tensor, dst: Tensor) -> None:
        if self.is_row:
            line = src.window(1, ROW, ROWS(lane_index()), "base")
        else:
            line = src.window(ROW, 1, COLUMNS(lane_index()), "base")
        base, offset = line.element_at
        i, j = dst.at
        dst.storage[udiv(i, SIDE), udiv(j, SIDE)] = ldmatrix(src.storage, base, offset, 4, self.is_transposed)


@atomic("MatMul", 32, FR, FR, FR)
@dataclass(frozen=True)
class MultiplyRows(Instruction):
    """Ampere's and later tensor cores, by fragments of 16 x 16."""

    row: ClassVar[str] = ("MatMul [32].thread [16,16].FR, [16,16].FR -> [16,16].FR (of mma.sync): 2 x "
                          "mma.sync.aligned.m16n8k16.row.col")
    kind: np.dtype
    accumulator: np.dtype

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        for name, form in zip("abc", given):
            yield from of_mma(name, form)
            if form.role is not None and form.role.operand != name:
                yield f"{name} is a fragment of operand {form.role.operand}"

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        return cls(given[0].dtype, given[2].dtype)

    @property
    def multiply(self) -> Any:
        return MMA_SYNC[16, 16, self.kind, self.kind, self.accumulator]

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        (ai, aj), (bi, bj), (ci, cj) = a.at, b.at, c.at
        m, n = udiv(ci, SIDE), udiv(cj, SIDE)
        c.storage[m, n] = self.multiply(a.storage[udiv(ai, SIDE), udiv(aj, SIDE)],
                                        b.storage[udiv(bi, SIDE), udiv(bj, SIDE)], c.storage[m, n])


@atomic("Move", 32, FR, (GL, SH))
@dataclass(frozen=True)
class StorePairs(Instruction):
    """A fragment of sums to a 16 x 16 tile in any memory: a lane has two neighbours of a row of each quarter."""

    row: ClassVar[str] = "Move [32].thread [16,16].FR (of mma.sync) -> [16,16].GL or SH: st of two neighbours a lane"
    target: Any

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        src, dst = given
        yield from of_mma("the source", src)
        yield from levels_are("the destination", dst, (SIDE, SIDE))
        if src.dtype != dst.dtype:
            yield f"{src.dtype} goes to {dst.dtype}"
        if src.role is not None and src.role.operand != "c":
            yield "the fragment is of an input, not of sums"

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        return cls(access_of(given[1].tile(1, 2).inner))

    def run(self, src: Tensor, dst: Tensor) -> None:
        i, j = src.at
        values = src.storage[udiv(i, SIDE), udiv(j, SIDE)]
        own = dst.window(SIDE, SIDE, OF_LANES(lane_index()), "base")
        for n in range(0, COUNT, 2):
            place = own.window(1, 2, OF_VALUES(n), "offset")
            self.target.store(place, (values[n], values[n + 1]))
