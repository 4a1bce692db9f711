"""MatMul, as instructions: fused multiply-adds, wmma, mma.sync (Table 2, the last five rows). Each adds to its output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gemmkit.lang.aggregates import convert
from gemmkit.lang.components import dataclass
from gemmkit.lang.registers import each, generate, join, split
from gemmkit.ptx import wgmma, wmma
from gemmkit.ptx.arithmetic import fma, hfma, hfma2, outer_fma
from gemmkit.ptx.memory import load_shared, shared, store_global, store_shared
from gemmkit.ptx.mma import MMA, mma_quad_pair
from gemmkit.ptx.special import barrier, thread_index, udiv
from gemmkit.ptx.wgmma import WgmmaSpec
from gemmkit.shapes import lines as swizzle_lines
from gemmkit.shapes import shape
from gemmkit.specs.accesses import (
    Instruction,
    access_of,
    alike,
    atomic,
    count_of,
    dtype_is,
    fragment_of,
    is_line,
    levels_are,
    read_registers,
    write_registers,
)
from gemmkit.specs.moves import SIDE, fragment_key
from gemmkit.specs.nodes import thread_of_group, waited
from gemmkit.specs.pointwise import of_warpgroup
from gemmkit.specs.schedule import (
    FR,
    GL,
    RF,
    SH,
    SRC,
    WR,
    A,
    B,
    Bands,
    Block,
    ColMajor,
    Init,
    K,
    Kernel,
    M,
    MatMul,
    Move,
    N,
    RowMajor,
    Thread,
    Warp,
    Warpgroup,
    micro_kernel,
)
from gemmkit.specs.tensors import WMMA, Form, Tensor, Threads, is_block

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
QUAD_PAIR = shape((4, 2), (1, 16))


@atomic("MatMul", 1, *[(RF, GL, SH)] * 3)
@dataclass(frozen=True)
class MultiplyAdd(Instruction):
    """One element each; what is in memory is loaded, and stored."""

    row: ClassVar[str] = "MatMul [1].thread [].fp16, [].fp16 -> [].fp16: hfma; all fp32: fmaf"
    a: Any
    b: Any
    c: Any
    is_half: bool

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        for name, form in zip("abc", given):
            yield from dtype_is(name, form, F16, F32)
            if count_of(form) != 1:
                yield f"{name} is {form}, not one element"
        yield from alike(given)

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        a, b, c = given
        return cls(access_of(a), access_of(b), access_of(c), c.dtype == F16)

    @property
    def becomes(self) -> str:
        return "hfma" if self.is_half else "fmaf"

    @property
    def multiply_add(self) -> Any:
        return hfma if self.is_half else fma

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        x, y, z = self.a.load(a), self.b.load(b), self.c.load(c)
        self.c.store(c, (self.multiply_add(x[0], y[0], z[0]),))


@atomic("MatMul", 1, RF, RF, RF)
@dataclass(frozen=True)
class MultiplyAddPairs(Instruction):
    """Element by element of pairs."""

    row: ClassVar[str] = "MatMul [1].thread [2].fp16.RF, [2].fp16.RF -> [2].fp16.RF: hfma2"
    a: Any
    b: Any
    c: Any

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        for name, form in zip("abc", given):
            yield from dtype_is(name, form, F16)
            yield from levels_are(name, form, (2,))
            yield from is_line(name, form)

    @classmethod
    def of(cls, threads: Threads, *given: object) -> Instruction:
        return cls(*map(access_of, given))

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        self.c.store(c, hfma2(self.a.load(a), self.b.load(b), self.c.load(c)))


@atomic("MatMul", 1, RF, RF, RF)
@dataclass(frozen=True)
class MultiplyAddBlock(Instruction):
    """All of a thread's product at once. Single multiply-adds, unrolled, mean the same, and are many functions to inline."""

    row: ClassVar[str] = "MatMul [1].thread [m,k].RF, [k,n].RF -> [m,n].RF, fp32 or fp16: m n k times fmaf (of fp16: hfma)"
    rows: int
    columns: int
    depth: int
    is_half: bool

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        a, b, c = given
        for name, form in zip("abc", given):
            yield from dtype_is(name, form, F16, F32)
            if not is_block(form):
                yield f"{name} is {form}, not a block of registers"
        if len(a.extents) == len(b.extents) == 2 and (a.extents[1:] != b.extents[:1]
                                                      or (a.extents[0], b.extents[1]) != c.extents):
            yield f"{a} by {b} is not {c}"
        yield from alike(given)

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        a, b, c = given
        return cls(a.extents[0], b.extents[1], a.extents[1], c.dtype == F16)

    @property
    def becomes(self) -> str:
        return f"{self.rows * self.columns * self.depth} {'hfma' if self.is_half else 'fmaf'}"

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
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


@atomic("MatMul", 32, FR, FR, FR)
@dataclass(frozen=True)
class MultiplyFragments(Instruction):
    """Volta's and later tensor cores, by fragments."""

    row: ClassVar[str] = "MatMul [32].thread [16,16].FR, [16,16].FR -> [16,16].FR: wmma.mma.sync.aligned.m16n16k16"
    key: tuple
    orders: tuple

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        for name, form in zip("abc", given):
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

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        (ai, aj), (bi, bj), (ci, cj) = a.at, b.at, c.at
        m, n = udiv(ci, SIDE), udiv(cj, SIDE)
        c.storage[m, n] = self.multiply(a.storage[udiv(ai, SIDE), udiv(aj, SIDE)],
                                        b.storage[udiv(bi, SIDE), udiv(bj, SIDE)], c.storage[m, n])


@atomic("MatMul", None, RF, RF, RF)
@dataclass(frozen=True)
class MultiplyQuadPairs(Instruction):
    """Volta's instruction, by each quad-pair."""

    row: ClassVar[str] = ("MatMul [(4,2):(1,16)].thread [4,1].fp16.RF, [1,4].fp16.RF -> [2,4].fp32.RF: "
                          "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32")

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        if threads.inner != QUAD_PAIR:
            yield f"{threads!r} are no quad-pairs, {QUAD_PAIR}"
        for (name, form), dtype, extents in zip(zip("abc", given), (F16, F16, F32), ((4, 1), (1, 4), (2, 4))):
            yield from dtype_is(name, form, dtype)
            yield from levels_are(name, form, extents)
            if not is_block(form):
                yield f"{name} is {form}, not a block of registers"

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        z = read_registers(c.storage, c.at, (2, 4))
        x, y = read_registers(a.storage, a.at, (4, 1)), read_registers(b.storage, b.at, (1, 4))
        out = mma_quad_pair(x, y, generate(8, _taken, z))
        write_registers(c.storage, c.at, (2, 4), generate(8, _given_back, out))


def _taken(number: int, z: tuple) -> Any:
    """The instruction's value of C in the order of registers: (row, column) of [2,4], rows first."""
    return z[number // 2 % 2 + (number % 2 + number // 4 * 2) * 2]


def _given_back(number: int, out: tuple) -> Any:
    return out[number % 2 * 2 + number // 2 % 2 + number // 4 * 4]


@atomic("MatMul", 32, RF, RF, RF)
@dataclass(frozen=True)
class MultiplyMatrices(Instruction):
    """Ampere's and later tensor cores, by registers: of any instruction in `gemmkit.ptx.mma`'s table. A register of 32 bits
    (of float64, 64) has w elements: A has parts of [1,w], B of [w,1], C of [1,2]."""

    row: ClassVar[str] = ("MatMul [32].thread [2,2].[1,2].fp16.RF, [2,1].[2,1].fp16.RF -> [2,1].[1,2].fp32.RF: "
                          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 (and of bf16, tf32, fp64, i8, u8, e4m3, e5m2)")
    key: tuple
    width: int

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        for name, form in zip("abc", given):
            if len(form.levels) != 2 or any(len(level.extents) != 2 or None in level.extents for level in form.levels):
                yield f"{name} is {form}, not registers by parts, such as [2,2].[1,2]"
                return
        a, b, c = given
        key, w = _mma_key(a, b, c), max(1, 4 // a.itemsize)
        (m, k), (depth, n), sums = (form.extents for form in given)
        for name, form, wanted in zip("abc", given, ((1, w), (w, 1), (1, 2))):
            if form.levels[1].extents != wanted:
                yield f"{name} has parts of {form.levels[1].extents}, not of {wanted}"
        if (depth, n) != (k, 1) or sums != (m, 1):
            yield f"{a} by {b} is not {c}"
        if key not in MMA:
            others = sorted({(rows, depth) for rows, depth, *types in MMA if tuple(types) == key[2:]})
            yield f"{a.dtype} by {b.dtype} is not added to {c.dtype}" if not others else (
                f"{key[0]} x {key[1]} of A are not {' or '.join(f'{rows} x {depth}' for rows, depth in others)}")

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        a, b, c = given
        return cls(_mma_key(a, b, c), max(1, 4 // a.itemsize))

    @property
    def becomes(self) -> str:
        return f"mma.sync.aligned.m{self.key[0]}n8k{self.key[1]}.row.col"

    @property
    def multiply(self) -> Any:
        return MMA[self.key]

    @property
    def down(self) -> int:
        """Parts of A and C down."""
        return int(self.key[0] // 8)

    @property
    def deep(self) -> int:
        """Parts of A and B along K."""
        return int(self.key[1] // (4 * self.width))

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        # The instruction has the rows of A's 8 x 8 matrices fastest; registers have them as (row, column).
        x = join(generate(self.down * self.deep,
                          lambda n: read_registers(a.storage, a[n % self.down, n // self.down].at, (1, self.width))))
        y = join(generate(self.deep, lambda n: read_registers(b.storage, b[n, 0].at, (self.width, 1))))
        each(lambda pair, n: write_registers(c.storage, c[n, 0].at, (1, 2), pair),
             split(self.multiply(x, y, join(generate(self.down,
                                                     lambda n: read_registers(c.storage, c[n, 0].at, (1, 2))))), 2))


def _mma_key(a: Form, b: Form, c: Form) -> tuple:
    return (8 * a.extents[0], 4 * max(1, 4 // a.itemsize) * a.extents[1], a.dtype, b.dtype, c.dtype)


# -- a warpgroup's: wgmma ------------------------------------------------------------------------------------------------

class WgmmaOperand(NamedTuple):
    """How a matrix in shared memory lies for wgmma: in panels of ``panel`` bytes, whose lines are ``width`` bytes of
    neighbours along "K" or "MN"."""

    major: str
    width: int
    panel: int

    def ahead(self, step: int) -> int:
        """Bytes to the ``step``-th 32 bytes of K."""
        if self.major == "MN":
            return step * 16 * self.width
        panel, within = divmod(32 * step, self.width)
        return panel * self.panel + within


def wgmma_operand(form: Form, depth: int) -> WgmmaOperand | None:
    """How a form lies, of which dimension ``depth`` is K; None if wgmma cannot read it."""
    if form.layout is None or form.layout.rank != 2 or len(form.levels) != 1 or not is_block(form):
        return None
    modes = form.layout.modes
    unit = next((axis for axis, dim in enumerate(modes) if dim[0][1] == 1), None)
    if unit is None or len(modes[1 - unit]) != 1:
        return None
    (line, _), *panels = modes[unit]
    lines, apart = modes[1 - unit][0]
    width = line * form.itemsize
    if apart != line or width not in (32, 64, 128) or form.swizzle != swizzle_lines(width, form.itemsize) or any(
            stride != line * lines for _, stride in panels[:1]):
        return None
    return WgmmaOperand("K" if unit == depth else "MN", width, width * lines)


@atomic("MatMul", 128, SH, SH, WR)
@dataclass(frozen=True)
class MultiplyShared(Instruction):
    """Hopper's tensor cores: a warpgroup multiplies tiles in shared memory, swizzled in lines of 32, 64 or 128 bytes. All
    but the last ``pending`` products are done behind it."""

    row: ClassVar[str] = ("MatMul [128].thread [64,k].SH, [k,n].SH -> [64,n].WR: k / 32 bytes times "
                          "wgmma.mma_async.sync.aligned.m64n(n)k(32 bytes)")
    columns: int
    kinds: tuple                                              # of A, B and the sums
    steps: int
    left: tuple
    right: tuple
    pending: int = 0

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        a, b, c = given
        for name, form in zip("abc", given):
            if len(form.levels) != 1 or len(form.extents) != 2 or None in form.extents:
                yield f"{name} is {form}, not a matrix of known extents"
                return
        (m, k), (depth, n), sums = a.extents, b.extents, c.extents
        if m != 64 or k != depth or sums != (64, n) or (c.role is not None and c.role.columns != n):
            yield f"{a} by {b} is not 64 rows of {c}, of which a fragment has {c.role.columns if c.role else n} columns"
        for name, form, axis in (("a", a, 1), ("b", b, 0)):
            if form.memory == SH and wgmma_operand(form, axis) is None:
                yield (f"{name} does not lie in swizzled lines of 32, 64 or 128 bytes: {form.layout} {form.swizzle} "
                       "(.stages(n) of a .split has them so)")
        if k * a.itemsize % 32:
            yield f"{k} elements along K are not a multiple of 32 bytes"
        if wgmma_operand(a, 1) and wgmma_operand(b, 0):
            try:
                MultiplyShared.of(threads, a, b, c).becomes      # noqa: B018
            except (ValueError, TypeError) as error:
                yield str(error)

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        a, b, c = given
        left, right = wgmma_operand(a, 1), wgmma_operand(b, 0)
        assert left is not None and right is not None
        return cls(b.extents[1], (a.dtype, b.dtype, c.dtype), a.extents[1] * a.itemsize // 32, tuple(left), tuple(right))

    @property
    def spec(self) -> WgmmaSpec:
        """Raises ValueError where there is no such instruction."""
        a, b, sums = self.kinds
        return WgmmaSpec(self.columns, a, b, sums, self.left[0], self.right[0])

    @property
    def one_behind(self) -> MultiplyShared:
        """The products go on behind it, until the next ones have begun."""
        return replace(self, pending=1)

    @property
    def becomes(self) -> str:
        return f"{self.steps} x wgmma.mma_async.sync.aligned.{self.spec.name}"

    @property
    def multiply(self) -> Any:
        return wgmma.instruction(self.spec)

    @property
    def ahead(self) -> tuple:
        """Bytes from one 32 bytes of K to those of each step, of A and of B."""
        return tuple((WgmmaOperand(*self.left).ahead(n), WgmmaOperand(*self.right).ahead(n)) for n in range(self.steps))

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        ci, cj = c.at
        m, n = udiv(ci, 64), udiv(cj, self.columns)
        left = wgmma.matrix_descriptor(a.storage, a.unswizzled_at, self.left[2], 8 * self.left[1], self.left[1])
        right = wgmma.matrix_descriptor(b.storage, b.unswizzled_at, self.right[2], 8 * self.right[1], self.right[1])
        sums = c.storage[m, n]
        wgmma.wgmma_fence()
        for at in self.ahead:
            sums = self.multiply(sums, wgmma.advance(left, at[0]), wgmma.advance(right, at[1]), 1)
        wgmma.wgmma_commit()
        (sums,) = wgmma.wgmma_wait(self.pending, (sums,))
        c.storage[m, n] = sums


@atomic("MatMulAsync", 128, SH, SH, WR)
@dataclass(frozen=True)
class MultiplySharedAsync(Instruction):
    """`MultiplyShared`, which may go on behind it: the one before is done. `AwaitSums` follows the last."""

    row: ClassVar[str] = MultiplyShared.row.replace("MatMul", "MatMulAsync", 1)
    differs = MultiplyShared.differs

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        return MultiplyShared.of(threads, *given).one_behind     # type: ignore[attr-defined]


@atomic("Await", 128, WR)
@dataclass(frozen=True)
class AwaitSums(Instruction):
    """The end of all products of `MultiplySharedAsync`."""

    row: ClassVar[str] = "Await [128].thread -> [64,n].WR: wgmma.wait_group"
    columns: int

    @staticmethod
    def differs(threads: Threads, *given: Any) -> Iterator[str]:
        yield from of_warpgroup(given[-1])
        if len(given) > 1:
            yield f"all products are awaited, not {given[0]}"

    @classmethod
    def of(cls, threads: Threads, *given: Form) -> Instruction:
        return cls(given[0].extents[1])

    def run(self, sums: Tensor) -> None:
        i, j = sums.at
        m, n = udiv(i, 64), udiv(j, self.columns)
        sums.storage[m, n] = waited(sums.storage[m, n])


@atomic("Move", 128, WR, (GL, SH))
@dataclass(frozen=True)
class StoreSums(Instruction):
    """Sums of a warpgroup to a matrix, or to shared memory: a thread has two neighbours in a row of each 8 columns. They are
    converted."""

    row: ClassVar[str] = "Move [128].thread [64,n].WR -> [64,n].GL or SH: st of two neighbours a thread, converted"
    target: Any
    columns: int
    dtype: np.dtype

    @staticmethod
    def differs(threads: Threads, *given: Form) -> Iterator[str]:
        src, dst = given
        yield from of_warpgroup(src)
        if src.role is not None:
            yield from levels_are("the destination", dst, (64, src.role.columns))

    @classmethod
    def of(cls, threads: Threads, *given: Any) -> Instruction:
        src, dst = given
        return cls(access_of(dst.tile(1, 2).inner), src.role.columns, src.dtype if dst.scaling else dst.dtype)

    @property
    def places(self) -> Any:
        return WgmmaSpec(self.columns, F16, F16, F32).c

    @property
    def of_threads(self) -> Any:
        return self.places.thread_shape

    @property
    def of_values(self) -> Any:
        return self.places.value_shape

    def run(self, src: Tensor, dst: Tensor) -> None:
        i, j = src.at
        own = dst.window(64, self.columns, self.of_threads(thread_of_group()), "base")
        each(_store_two, split(src.storage[udiv(i, 64), udiv(j, self.columns)], 2), self, own)


def _store_two(pair: tuple, n: int, how: Any, own: Any) -> None:
    place = own.window(1, 2, how.of_values(2 * n), "offset")
    how.target.store(place, (convert(how.dtype, pair[0]), convert(how.dtype, pair[1])))


# --------------------------------------------------------------------------------------------------
# One product, decomposed ever further: the schedules 1 to 3 of docs/specs.md, which has their text. (4 and 5 are
# `gemmkit.specs.products`.)

scalar = (MatMul(M, N, K)(GL, GL, GL)(Kernel)
    .tile(16, 16).to(Block)
    .tile(1, 1).to(Thread)
    .accumulate_in(RF, Init.done, Move.done)
    .split(1)
    .move(A, RF, Move.done)
    .move(B, RF, Move.done)
    .done)

registers = (MatMul(M, N, K)(GL, GL, GL)(Kernel)
    .tile(32, 32).to(Block)
    .accumulate_in(RF, Init.tile(4, 4).to(Thread).tile(1, 1).unroll.done,
                   Move.tile(4, 4).to(Thread).tile(1, 4).unroll.done)
    .tile(4, 4).to(Thread)
    .split(1)
    .move(A, RF, Move.tile(1, 1).unroll.done)
    .move(B, RF, Move.tile(1, 4).unroll.done)
    .tile(1, 1).unroll.done)

shared_tile = (MatMul(M, N, K)(GL, GL, GL)(Kernel)
    .tile(32, 32).to(Block)
    .accumulate_in(RF, Init.tile(4, 4).to(Thread).tile(1, 1).unroll.done,
                   Move.tile(4, 4).to(Thread).tile(1, 4).unroll.done)
    .split(8).sync                   # a barrier: nobody overwrites what others read
    .move(A, SH, Move.tile(1, 4).to(Thread).done).storage(ColMajor).pad(4).no_sync
    .move(B, SH, Move.tile(1, 4).to(Thread).done)    # and one after both moves
    .tile(4, 4).to(Thread)
    .split(1).unroll
    .move(A, RF, Move.tile(4, 1).unroll.done)
    .move(B, RF, Move.tile(1, 4).unroll.done)
    .tile(1, 1).unroll.done)


# --------------------------------------------------------------------------------------------------
# Fireiron's Listing 3 in Python, line for line: both schedules that the paper prints.
#
# ``cuda_wmma_sample`` is the CUDA sample's product by tensor cores (26 lines in the paper), ``maxwell_optimized`` one by
# multiply-adds (44 with its micro-kernel). They take what the paper's take: of the first A row-major, B column-major, both
# fp16, C fp32 and row-major; of the second all column-major, fp32. The second's micro-kernel wants M and N to be
# multiples of 128, and K of 8.

cuda_wmma_sample = (MatMul(M, N, K)(GL, GL, GL)(Kernel)
    # --- a block computes 128 x 128
    .tile(128, 128).to(Block)
    .accumulate_in(FR, Init                                         # init: WMMA fragments for C
        .tile(64, 32).to(Warp)
        .tile(16, 16).unroll.done,
        Move                                                        # epilogue in two steps, by SH
        .move(SRC, SH, Move                                         # 1: FR -> SH
            .tile(64, 32).to(Warp)
            .tile(16, 16).unroll.done)
        .tile(16, 128).to(Warp)                                     # 2: SH -> GL
        .tile(1, 128).unroll
        .tile(1, 4).to(Thread).done)
    .split(128).sync.unroll
    # --- A to SH
    .move(A, SH, Move
        .tile(16, 128).to(Warp)
        .tile(2, 128).unroll
        .tile(1, 8).to(Thread).done).no_sync.pad(8)
    # --- B to SH
    .move(B, SH, Move
        .tile(128, 16).to(Warp)
        .tile(128, 2).unroll
        .tile(8, 1).to(Thread).layout(ColMajor).done).pad(8)
    # --- warps
    .tile(64, 32).to(Warp)
    .split(16).unroll
    .move(A, FR, Move.tile(16, 16).unroll.done)
    .move(B, FR, Move.tile(16, 16).unroll.done)
    .tile(16, 16).done)                                             # MatMul(16,16,16)(FR,FR,FR)(Warp)


# Listing 2, the sample's first kernel: fragments come from global memory and go there, by warps alone.
simple_wmma = (MatMul(M, N, K)(GL, GL, GL)(Kernel)
    .tile(64, 64).to(Block)
    .accumulate_in(FR,
        Init.tile(16, 16).to(Warp).done,
        Move.tile(16, 16).to(Warp).done)
    .tile(16, 16).to(Warp)
    .split(16)
    .move(A, FR, Move.done)
    .move(B, FR, Move.done)
    .done)


@micro_kernel(shared_bytes=16 * 128 * 4)
def store_cuda(source: Tensor, target: Tensor) -> None:
    """Sums stream through 128 x 16 of shared memory, a column of every thread's at a time, so that a warp writes 512 bytes
    of C that are neighbours. It knows which elements a thread has: the listing's strided tile, and its swizzle."""
    thread = thread_index()
    warp, lane = thread >> 5, swizz(thread & 31)
    row, column = warp // 4 * 64 + lane % 8 * 4, warp % 4 * 4 + lane // 8
    buffer = shared(np.float32, 0)
    for j in range(8):
        for i in range(2):
            store_shared(buffer, column * 128 + row, i * 32, read_registers(source.storage, (i * 4, j), (4, 1)))
        barrier()
        for half in range(2):
            line = half * 8 + warp
            values = load_shared(buffer, line * 128 + (thread & 31) * 4, 0, 4)
            at = target.base[0] + (thread & 31) * 4, target.base[1] + line // 4 * 32 + line % 4 * 4 + j // 4 * 16 + j % 4
            store_global(target.storage, 0, at, (0, 0), values)
        barrier()


def swizz(i: int) -> int:
    """A permutation of a warp's threads: none of eight neighbours reads from the banks of another."""
    return ((i >> 1) & 0x07) | (i & 0x30) | ((i & 0x01) << 3)


maxwell_optimized = (MatMul(M, N, K)(GL, GL, GL)(Kernel)
    # --- a block computes 128 x 128
    .tile(128, 128).to(Block).layout(ColMajor)
    # --- sums in RF, a micro-kernel for the epilogue
    .accumulate_in(RF, Init
        .tile(64, 32).to(Warp)
        .tile(8, 8).to(Thread)                                      # 64 registers a thread
        .tile(1, 1).unroll.done,
        Move.done(store_cuda))
    .split(8).sync
    # --- A to SH
    .move(A, SH, Move
        .tile(128, 1).to(Warp)
        .tile(64, 1).unroll                                         # in two steps
        .tile(2, 1).to(Thread).layout(ColMajor)
        .done).storage(ColMajor).no_sync
    # --- B to SH
    .move(B, SH, Move
        .tile(8, 16).to(Warp)
        .tile(8, 4).unroll
        .tile(1, 1).to(Thread).layout(ColMajor)
        .done).storage(RowMajor).pad(4)
    # --- warps and threads
    .tile(64, 32).to(Warp)
    .tile((4, 32), (4, 16)).to(Thread)
        .layout(ColMajor).swizzle(swizz)
    .split(1).unroll
    .move(A, RF, Move.tile(4, 1).unroll.done)
    .move(B, RF, Move.tile(1, 4).unroll.done)
    .tile(1, 1).unroll.done)                                        # MatMul(1,1,1)(RF,RF,RF)(Thread)


# --------------------------------------------------------------------------------------------------
# Schedules with their sizes as parameters, for `gemmkit.specs.schedule.explore`: what both listings of Fireiron's paper
# are members of (`gemmkit.specs.products`), and what its section 5 explores.
#
# >>> from gemmkit.specs.schedule import explore
# >>> variants = explore(tensor_cores, block=[(32, 32), (64, 64)], k=[32, 64], warp=[(16, 16), (16, 32)])
# >>> print(len(variants), variants[1])
# 8 block=(32, 32) k=32 warp=(16, 32)

def tensor_cores(block: tuple[int, int], k: int, warp: tuple[int, int], ahead: bool = False, occupancy: int = 1) -> Any:
    """``cuda_wmma_sample`` with other tiles: A row-major and B column-major, 16-bit floats; C row-major, float32.

    A block computes ``block`` in steps of ``k`` along K, a warp ``warp`` of it. ``ahead``: A and B come a step ahead, by
    cp.async (`.prefetch`). Threads follow from the tiles. Raises ScheduleError for sizes that are none.
    """
    (m, n), (wm, wn) = block, warp
    warps = max(1, m // wm * (n // wn))
    wide, deep = min(n, 128), min(k, 256)                     # of C and of A, B: a warp's at a time, 16 bytes a lane
    a = Move.tile(m // warps, k).to(Warp).tile(256 // deep, deep).unroll.tile(1, 8).to(Thread).done
    b = Move.tile(k, n // warps).to(Warp).tile(deep, 256 // deep).unroll.tile(8, 1).to(Thread).layout(ColMajor).done
    begin = Init.tile(wm, wn).to(Warp).tile(16, 16).unroll.done
    end = (Move.move(SRC, SH, Move.tile(wm, wn).to(Warp).tile(16, 16).unroll.done).pad(4)
        .tile(m // warps, n).to(Warp).tile(128 // wide, wide).unroll.tile(1, 4).to(Thread).done)
    steps = MatMul(M, N, K)(GL, GL, GL)(Kernel).tile(m, n).to(Block).occupancy(occupancy).accumulate_in(FR, begin, end)
    if ahead:
        steps = steps.split(k).move(A, SH, a).pad(8).prefetch.move(B, SH, b).pad(8).prefetch
    else:
        steps = steps.split(k).sync.move(A, SH, a).no_sync.pad(8).move(B, SH, b).pad(8)
    return (steps.tile(wm, wn).to(Warp)
        .split(16).unroll
        .move(A, FR, Move.tile(16, 16).unroll.done)
        .move(B, FR, Move.tile(16, 16).unroll.done)
        .tile(16, 16).done)


def multiply_adds(block: tuple[int, int] = (128, 128), k: int = 8, ahead: bool = False, occupancy: int = 1,
                  pad: int = 4) -> Any:
    """``maxwell_optimized`` with other tiles: all matrices column-major, float32. A warp computes 64 x 32 and a thread four
    pieces of 4 x 4, as there; the epilogue stores them without a micro-kernel, 16 bytes at a time, so that M and N may be
    any.

    Raises ScheduleError for sizes that are none.
    """
    m, n = block
    warps = max(1, m // 64 * (n // 32))
    tile = (4, 32), (4, 16)
    high = min(m, 128)                                        # of A: what a warp moves at a time, 16 bytes a thread
    a = Move.tile(m, k // warps).to(Warp).tile(high, 128 // high).unroll.tile(4, 1).to(Thread).layout(ColMajor).done
    b = Move.tile(k, n // warps).to(Warp).tile(k, 32 // k).unroll.tile(1, 1).to(Thread).layout(ColMajor).done
    begin = Init.tile(64, 32).to(Warp).tile(8, 8).to(Thread).tile(1, 1).unroll.done
    end = Move.tile(64, 32).to(Warp).tile(*tile).to(Thread).layout(ColMajor).swizzle(swizz).tile(4, 1).unroll.done
    steps = (MatMul(M, N, K)(GL, GL, GL)(Kernel)
        .tile(m, n).to(Block).layout(ColMajor).occupancy(occupancy)
        .accumulate_in(RF, begin, end))
    if ahead:
        steps = (steps.split(k).move(A, SH, a).storage(ColMajor).prefetch
                 .move(B, SH, b).storage(RowMajor).pad(pad).prefetch)
    else:
        steps = (steps.split(k).sync.move(A, SH, a).storage(ColMajor).no_sync
                 .move(B, SH, b).storage(RowMajor).pad(pad))
    return (steps.tile(64, 32).to(Warp)
        .tile(*tile).to(Thread).layout(ColMajor).swizzle(swizz)
        .split(1).unroll
        .move(A, RF, Move.tile(4, 1).unroll.done)
        .move(B, RF, Move.tile(1, 4).unroll.done)
        .tile(1, 1).unroll.done)


def wgmma_ring(block: tuple[int, int] = (128, 256), k: int = 64, stages: int = 4, cluster: int = 2, bands: int = 16) -> Any:
    """Hopper's product, of any orders of A, B and C: TMA brings ``stages`` steps of ``k``, and each warpgroup multiplies 64
    rows by wgmma. Blocks of a ``cluster`` share B's tiles, and go down bands of ``bands`` rows of tiles.

    Raises ScheduleError for sizes that are none.
    """
    m, n = block
    steps = MatMul(M, N, K)(GL, GL, GL)(Kernel).tile(m, n).to(Block).layout(Bands(bands)).cluster(cluster)
    return (steps
        .accumulate_in(WR, Init.tile(64, n).to(Warpgroup).done,
                       Move.tile(64, n).to(Warpgroup).done)
        .split(k).stages(stages)
        .move(A, SH, Move.done).prefetch
        .move(B, SH, Move.done).prefetch
        .tile(64, n).to(Warpgroup)
        .done)                                                      # MatMul(64,n,k)(SH,SH,WR)(Warpgroup)
