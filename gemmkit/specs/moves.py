"""Move, as instructions: loads and stores of lines, cp.async, ldmatrix, and wmma's fragments (Table 2, rows 1 to 4)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

from gemmkit.lang.component_class import dataclass
from gemmkit.ptx import wmma
from gemmkit.ptx.copy_async import SIZES, commit_copies, copy_async, offset_of, wait_copies
from gemmkit.ptx.ldmatrix import ldmatrix
from gemmkit.ptx.special import udiv
from gemmkit.specs.accesses import InShared, access_of, is_inside, write_registers
from gemmkit.specs.forms import FR, GL, RF, SH, WMMA, Form, Line, Role, line_of
from gemmkit.specs.matching import Instruction, atomic, count_is, count_of, fragment_of, is_line, levels_are, memory_is
from gemmkit.specs.tensors import is_linear
from gemmkit.specs.threads import Threads

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

    def run(self, src: Any, dst: Any) -> None:
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

    def run(self, src: Any, dst: Any) -> None:
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

    def run(self, src: Any, dst: Any) -> None:
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


def fragment_key(role: Role) -> Any:
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
            yield f"the layout {shared.layout} has lines of {found[1]} elements, which are no multiple of 16 bytes"


@atomic("Move")
@dataclass(frozen=True)
class LoadFragment(Instruction):
    """A 16 x 16 tile to a fragment of the warp's."""

    row: ClassVar[str] = "Move [32].thread [16,16].SH -> [16,16].FR: wmma.load.sync.aligned.m16n16k16.shared"
    role: Role
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
        return cls(Role(dst.role.operand, order, dst.role.input, dst.role.accumulator), lines)

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
    role: Role
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
        return cls(Role("c", order, src.role.input, src.role.accumulator), lines)

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
    role: Role

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
        return cls(Role("c", "row" if dst.unit == 1 else "col", src.role.input, src.role.accumulator))

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

    def run(self, src: Any, dst: Any) -> None:
        if is_inside(self.source, src):
            base, offset = dst.element_at
            copy_async(dst.storage, base, offset, src.storage, offset_of(src.storage, src.at), self.count, True)
        else:                                                 # seen by the others behind the barrier that the copies need
            self.target.store(dst, self.source.load_what_is_there(src))


def wait() -> None:
    """Wait until what this thread has started to copy by CopyAsync is there; other threads see it behind a barrier."""
    commit_copies()
    wait_copies(0)
