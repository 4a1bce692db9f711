"""Fragments of mma.sync as instructions of a schedule: ldmatrix.x4, two mma.m16n8k16, and stores of pairs.

wmma reads tiles by a leading dimension. Where a tile is swizzled it has none, and the warp's fragments of 16 x 16 are those
of mma.sync (`gemmkit.ptx.mma`): each lane gives ldmatrix the address of a row, wherever the swizzle puts it. Which lane
holds which element is known, so that sums go to any memory, and over a matrix's edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from gemmkit.lang.component_class import dataclass
from gemmkit.ptx.ldmatrix import by_columns, by_rows, ldmatrix
from gemmkit.ptx.mma import MMA as MMA_SYNC
from gemmkit.ptx.mma import map_c
from gemmkit.ptx.special import lane_index, udiv
from gemmkit.specs.accesses import InShared, access_of
from gemmkit.specs.forms import FR, GL, MMA, SH, Form
from gemmkit.specs.matching import Instruction, atomic, count_is, fragment_of, levels_are, memory_is
from gemmkit.specs.moves import SIDE
from gemmkit.specs.threads import Threads

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

    def run(self, src: Any, dst: Any) -> None:
        i, j = src.at
        values = src.storage[udiv(i, SIDE), udiv(j, SIDE)]
        own = dst.window(SIDE, SIDE, OF_LANES(lane_index()), "base")
        for n in range(0, COUNT, 2):
            place = own.window(1, 2, OF_VALUES(n), "offset")
            self.target.store(place, (values[n], values[n + 1]))
