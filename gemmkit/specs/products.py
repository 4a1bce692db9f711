"""MatMul, as instructions: fused multiply-adds, wmma, mma.sync (Table 2, the last five rows). Each adds to its output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from gemmkit.lang.component_class import dataclass
from gemmkit.lang.registers import generate
from gemmkit.ptx import wmma
from gemmkit.ptx.arithmetic import fma, outer_fma
from gemmkit.ptx.half import hfma, hfma2
from gemmkit.ptx.mma import MMA
from gemmkit.ptx.quad_pair import mma_quad_pair
from gemmkit.ptx.special import udiv
from gemmkit.shapes import shape
from gemmkit.specs.accesses import access_of, is_block, read_registers, write_registers
from gemmkit.specs.forms import FR, GL, RF, SH, WMMA, Form
from gemmkit.specs.matching import (
    Instruction,
    alike,
    atomic,
    count_is,
    count_of,
    dtype_is,
    fragment_of,
    is_line,
    levels_are,
    memory_is,
)
from gemmkit.specs.moves import SIDE, fragment_key
from gemmkit.specs.threads import Threads

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
QUAD_PAIR = shape((4, 2), (1, 16))
K_OF_MMA = 16


def _three(given: tuple) -> Iterator[tuple[str, Form]]:
    return zip(("a", "b", "c"), given)


@atomic("MatMul")
@dataclass(frozen=True)
class MultiplyAdd(Instruction):
    """One element each; what is in memory is loaded, and stored."""

    row: ClassVar[str] = "MatMul [1].thread [].fp16, [].fp16 -> [].fp16: hfma; all fp32: fmaf"
    a: Any
    b: Any
    c: Any
    is_half: bool

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        yield from count_is(threads, 1)
        for name, form in _three(given):
            yield from memory_is(name, form, RF, GL, SH)
            yield from dtype_is(name, form, F16, F32)
            if count_of(form) != 1:
                yield f"{name} is {form}, not one element"
        yield from alike(given)

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        a, b, c = given
        return cls(access_of(a), access_of(b), access_of(c), c.dtype == F16)

    @property
    def becomes(self) -> str:
        return "hfma" if self.is_half else "fmaf"

    @property
    def multiply_add(self) -> Any:
        return hfma if self.is_half else fma

    def run(self, a: Any, b: Any, c: Any) -> None:
        x, y, z = self.a.load(a), self.b.load(b), self.c.load(c)
        self.c.store(c, (self.multiply_add(x[0], y[0], z[0]),))


@atomic("MatMul")
@dataclass(frozen=True)
class MultiplyAddPairs(Instruction):
    """Element by element of pairs."""

    row: ClassVar[str] = "MatMul [1].thread [2].fp16.RF, [2].fp16.RF -> [2].fp16.RF: hfma2"
    a: Any
    b: Any
    c: Any

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        yield from count_is(threads, 1)
        for name, form in _three(given):
            yield from memory_is(name, form, RF)
            yield from dtype_is(name, form, F16)
            yield from levels_are(name, form, (2,))
            yield from is_line(name, form)

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        return cls(*map(access_of, given))

    def run(self, a: Any, b: Any, c: Any) -> None:
        self.c.store(c, hfma2(self.a.load(a), self.b.load(b), self.c.load(c)))


@atomic("MatMul")
@dataclass(frozen=True)
class MultiplyAddBlock(Instruction):
    """All of a thread's product at once. Single multiply-adds, unrolled, mean the same, and are many functions to inline."""

    row: ClassVar[str] = "MatMul [1].thread [m,k].RF, [k,n].RF -> [m,n].RF, fp32 or fp16: m n k times fmaf (of fp16: hfma)"
    rows: int
    columns: int
    depth: int
    is_half: bool

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        a, b, c = given
        yield from count_is(threads, 1)
        for name, form in _three(given):
            yield from memory_is(name, form, RF)
            yield from dtype_is(name, form, F16, F32)
            if not is_block(form):
                yield f"{name} is {form}, not a block of registers"
        if len(a.extents) == len(b.extents) == 2 and (a.extents[1:] != b.extents[:1]
                                                      or (a.extents[0], b.extents[1]) != c.extents):
            yield f"{a} by {b} is not {c}"
        yield from alike(given)

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        a, b, c = given
        return cls(a.extents[0], b.extents[1], a.extents[1], c.dtype == F16)

    @property
    def becomes(self) -> str:
        return f"{self.rows * self.columns * self.depth} {'hfma' if self.is_half else 'fmaf'}"

    def run(self, a: Any, b: Any, c: Any) -> None:
        x = read_registers(a.storage, a.at, (self.rows, self.depth))
        z = read_registers(c.storage, c.at, (self.rows, self.columns))
        if self.is_half:
            y = read_registers(b.storage, b.at, (self.depth, self.columns))
            write_registers(c.storage, c.at, (self.rows, self.columns),
                            generate(self.rows * self.columns, _half_sum, self, x, y, z))
        else:                                                 # of B a step's columns follow each other
            y = generate(self.depth * self.columns, _transposed, b.storage, b.at, self.columns)
            write_registers(c.storage, c.at, (self.rows, self.columns), outer_fma(z, x, y, self.depth))


def _transposed(number: int, regs: Any, at: tuple, columns: int) -> Any:
    i, j = at
    return regs[i + number // columns, j + number % columns][0]


def _half_sum(number: int, product: Any, x: tuple, y: tuple, z: tuple) -> Any:
    i, j = number % product.rows, number // product.rows
    total = z[number]
    for k in range(product.depth):
        total = hfma(x[k * product.rows + i], y[j * product.depth + k], total)
    return total


@atomic("MatMul")
@dataclass(frozen=True)
class MultiplyFragments(Instruction):
    """Volta's and later tensor cores, by fragments."""

    row: ClassVar[str] = "MatMul [32].thread [16,16].FR, [16,16].FR -> [16,16].FR: wmma.mma.sync.aligned.m16n16k16"
    key: tuple
    orders: tuple

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        yield from count_is(threads, 32)
        for name, form in _three(given):
            yield from memory_is(name, form, FR)
            yield from levels_are(name, form, (SIDE, SIDE))
            yield from fragment_of(name, form, WMMA)
            if form.role is not None and form.role.operand != name:
                yield f"{name} is a fragment of operand {form.role.operand}"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        a, b, c = given
        return cls(fragment_key(c.role), (a.role.order, b.role.order))

    @property
    def multiply(self) -> Any:
        return wmma.MMA[self.key, self.orders[0], self.orders[1]]

    def run(self, a: Any, b: Any, c: Any) -> None:
        (ai, aj), (bi, bj), (ci, cj) = a.at, b.at, c.at
        m, n = udiv(ci, SIDE), udiv(cj, SIDE)
        c.storage[m, n] = self.multiply(a.storage[udiv(ai, SIDE), udiv(aj, SIDE)],
                                        b.storage[udiv(bi, SIDE), udiv(bj, SIDE)], c.storage[m, n])


@atomic("MatMul")
@dataclass(frozen=True)
class MultiplyQuadPairs(Instruction):
    """Volta's instruction, by each quad-pair."""

    row: ClassVar[str] = ("MatMul [(4,2):(1,16)].thread [4,1].fp16.RF, [1,4].fp16.RF -> [2,4].fp32.RF: "
                          "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32")

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        if threads.inner != QUAD_PAIR:
            yield f"{threads!r} are no quad-pairs, {QUAD_PAIR}"
        for (name, form), dtype, extents in zip(_three(given), (F16, F16, F32), ((4, 1), (1, 4), (2, 4))):
            yield from memory_is(name, form, RF)
            yield from dtype_is(name, form, dtype)
            yield from levels_are(name, form, extents)
            if not is_block(form):
                yield f"{name} is {form}, not a block of registers"

    def run(self, a: Any, b: Any, c: Any) -> None:
        z = read_registers(c.storage, c.at, (2, 4))
        x, y = read_registers(a.storage, a.at, (4, 1)), read_registers(b.storage, b.at, (1, 4))
        out = mma_quad_pair(x, y, generate(8, _taken, z))
        write_registers(c.storage, c.at, (2, 4), generate(8, _given_back, out))


def _taken(number: int, z: tuple) -> Any:
    """The instruction's value of C in the order of registers: (row, column) of [2,4], rows first."""
    return z[number // 2 % 2 + (number % 2 + number // 4 * 2) * 2]


def _given_back(number: int, out: tuple) -> Any:
    return out[number % 2 * 2 + number // 2 % 2 + number // 4 * 4]


@atomic("MatMul")
@dataclass(frozen=True)
class MultiplyMatrices(Instruction):
    """Ampere's tensor cores, by registers."""

    row: ClassVar[str] = ("MatMul [32].thread [2,2].[1,2].fp16.RF, [2,1].[2,1].fp16.RF -> [2,1].[1,2].fp32.RF: "
                          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 (and of bf16)")
    kind: np.dtype
    accumulator: np.dtype

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        a, b, c = given
        yield from count_is(threads, 32)
        wanted = (((2, 2), (1, 2)), ((2, 1), (2, 1)), ((2, 1), (1, 2)))
        for (name, form), extents in zip(_three(given), wanted):
            yield from memory_is(name, form, RF)
            yield from levels_are(name, form, *extents)
        if (16, K_OF_MMA, a.dtype, b.dtype, c.dtype) not in MMA or a.itemsize != 2:
            yield f"{a.dtype} by {b.dtype} is not added to {c.dtype}"

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        return cls(given[0].dtype, given[2].dtype)

    @property
    def multiply(self) -> Any:
        return MMA[16, K_OF_MMA, self.kind, self.kind, self.accumulator]

    def run(self, a: Any, b: Any, c: Any) -> None:
        # The instruction has the rows of A's four 8 x 8 matrices fastest; registers have them as (row, column).
        x = _pair(a[0, 0], (1, 2)) + _pair(a[1, 0], (1, 2)) + _pair(a[0, 1], (1, 2)) + _pair(a[1, 1], (1, 2))
        y = _pair(b[0, 0], (2, 1)) + _pair(b[1, 0], (2, 1))
        z = _pair(c[0, 0], (1, 2)) + _pair(c[1, 0], (1, 2))
        out = self.multiply(x, y, z)
        write_registers(c.storage, c[0, 0].at, (1, 2), (out[0], out[1]))
        write_registers(c.storage, c[1, 0].at, (1, 2), (out[2], out[3]))


def _pair(part: Any, extents: tuple) -> tuple:
    return read_registers(part.storage, part.at, extents)
