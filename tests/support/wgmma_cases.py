"""Products by wgmma for tests: a kernel, its operands in shared memory, and what must come out.

The kernel copies both operands into shared memory by an arithmetic of its own, as chunks of 16 bytes, and multiplies two
instructions' worth of K. Operands travel as 32-bit words, so that every type goes the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import gemmkit as gk
from gemmkit.lang.registers import each, generate
from gemmkit.ptx.memory import load_global, shared, store_shared
from gemmkit.ptx.mma import fragment_coordinate
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.ptx.wgmma import advance, fence_async, instruction, matrix_descriptor, wgmma_commit, wgmma_fence, wgmma_wait

F16, F32, BF16 = np.dtype("f2"), np.dtype("f4"), np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
S8, U8, S32 = np.dtype("i1"), np.dtype("u1"), np.dtype("i4")
STEPS = 2

KINDS = [(F16, F16, F32), (F16, F16, F16), (BF16, BF16, F32), (F32, F32, F32), (E4M3, E4M3, F32), (E5M2, E4M3, F32),
         (E4M3, E5M2, F16), (E5M2, E5M2, F32), (S8, S8, S32), (U8, U8, S32), (S8, U8, S32), (U8, S8, S32)]
WIDTHS = [0, 32, 64, 128]


# -- an operand in shared memory -----------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Placed(gk.Component):
    """How an operand of ``lines`` (rows of A, columns of B) lies in shared memory: in panels as wide as the swizzle.

    Its source is a matrix with rows of ``per_row`` chunks: (lines, K) when it is K-major, (K, lines) when it is MN-major.
    """

    lines: int
    itemsize: int
    width: int
    major: str

    @property
    def is_k_major(self) -> bool:
        return self.major == "K"

    @property
    def rows(self) -> int:
        return self.lines if self.major == "K" else STEPS * 32 // self.itemsize

    @property
    def per_row(self) -> int:
        return STEPS * 2 if self.major == "K" else self.lines * self.itemsize // 16

    @property
    def across(self) -> int:
        """Chunks of a panel's row."""
        return max(self.width // 16, 1)

    @property
    def panel_bytes(self) -> int:
        return self.rows * self.across * 16

    @property
    def nbytes(self) -> int:
        panels = -(-self.per_row // self.across)
        return -(-panels * self.panel_bytes // 1024) * 1024

    @property
    def leading_bytes(self) -> int:
        if self.major == "MN" and not self.width:
            return 128
        return self.panel_bytes

    @property
    def stride_bytes(self) -> int:
        if self.major == "MN" and not self.width:
            return self.panel_bytes
        return 128 * self.across

    def place(self, chunk: int) -> int:
        """Where a chunk of the source goes, in chunks."""
        row, column = chunk // self.per_row, chunk % self.per_row
        swizzled = (column % self.across) ^ (row // (8 // self.across) % self.across)
        return column // self.across * (self.rows * self.across) + row * self.across + swizzled

    def ahead(self, step: int) -> int:
        """How many bytes into the operand an instruction begins."""
        if self.is_k_major:
            return 2 * step // self.across * self.panel_bytes + 2 * step % self.across * 16
        return step * 16 * self.across * 16


def copy_in(placed: Any, source: Any, start: int, case: Any) -> None:
    """The block's threads copy an operand's words to byte ``start`` of shared memory."""
    pointer = shared(case.word, start)
    for first in range(0, placed.rows * placed.per_row, 128):
        chunk = first + thread_index()
        if chunk < placed.rows * placed.per_row:
            store_shared(pointer, placed.place(chunk) * 4, 0, load_global(source, 0, (4 * chunk,), (0,), 4))


# -- products ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Product(gk.Component):
    """A product of 64 x (2 instructions' K) by (2 instructions' K) x N."""

    spec: Any
    width: int = 128
    word = np.dtype("u4")

    @property
    def instruction(self) -> Any:
        return instruction(self.spec)

    @property
    def map_c(self) -> Any:
        return self.spec.c

    @property
    def map_a(self) -> Any:
        return self.spec.a_map

    @property
    def count(self) -> int:
        return self.spec.fragment_c.count

    @property
    def a_registers(self) -> bool:
        return self.spec.a_registers

    @property
    def a(self) -> Placed:
        return Placed(64, self.spec.a.itemsize, self.width, self.spec.a_major)

    @property
    def b(self) -> Placed:
        return Placed(self.spec.N, self.spec.b.itemsize, self.width, self.spec.b_major)

    @property
    def b_start(self) -> int:
        return self.a.nbytes

    @property
    def shared(self) -> int:
        return self.a.nbytes + self.b.nbytes


def product_kernel(d: Any, a: Any, b: Any, c: Any, accumulate: int, case: Any) -> None:
    copy_in(case.a, a, 0, case)
    copy_in(case.b, b, case.b_start, case)
    fence_async()
    barrier()
    descriptor = matrix_descriptor(shared(case.word, case.b_start), 0, case.b.leading_bytes, case.b.stride_bytes, case.width)
    sums = generate(case.count, take, c, case.map_c)
    wgmma_fence()
    for step in range(STEPS):
        left = fragment_of_a(case, a, step) if case.a_registers else descriptor_of_a(case, a, step)
        sums = case.instruction(sums, left, advance(descriptor, case.b.ahead(step)), max(accumulate, min(step, 1)))
    wgmma_commit()
    (sums,) = wgmma_wait(0, (sums,))
    each(put, sums, d, case.map_c)


def descriptor_of_a(case: Any, a: Any, step: int) -> int:
    start = matrix_descriptor(shared(case.word, 0), 0, case.a.leading_bytes, case.a.stride_bytes, case.width)
    return advance(start, case.a.ahead(step))


def fragment_of_a(case: Any, a: Any, step: int) -> tuple:
    return generate(4, word_of_a, a, step)


def word_of_a(n: int, a: Any, step: int) -> Any:
    """The four words of a fragment: rows 8 apart, then the other half of the 32 bytes along K."""
    lane, warp = thread_index() % 32, thread_index() // 32
    row, column = 16 * warp + lane // 4 + 8 * (n % 2), lane % 4 + 4 * (n // 2)
    return a[row * (8 * STEPS) + 8 * step + column]


def take(n: int, view: Any, fragment_map: Any) -> Any:
    t = thread_index()
    return view[fragment_coordinate(fragment_map, t, n, 0), fragment_coordinate(fragment_map, t, n, 1)]


def put(value: Any, n: int, view: Any, fragment_map: Any) -> None:
    t = thread_index()
    view[fragment_coordinate(fragment_map, t, n, 0), fragment_coordinate(fragment_map, t, n, 1)] = value


@dataclass(frozen=True)
class Elements(Product):
    @property
    def is_packed(self) -> bool:
        """Whether the accumulators travel as words."""
        return self.spec.accumulator == F16

    @property
    def start_dtype(self) -> np.dtype:
        return self.word if self.is_packed else self.spec.accumulator

    @property
    def start_count(self) -> int:
        return self.spec.registers

    @property
    def elements(self) -> int:
        return self.spec.a_map.values

    @property
    def is_settled(self) -> bool:
        """Whether A's fragment is settled before the fence: those of 16-bit elements."""
        return self.spec.a.itemsize == 2


def draw(rng: np.random.Generator, data: str, shape: tuple[int, int], kind: np.dtype) -> np.ndarray:
    if kind == U8:
        return rng.integers(0, 9 if data == "integers" else 256, shape).astype(kind)
    if kind == S8 and data == "normal":
        return rng.integers(-128, 128, shape).astype(kind)
    return (rng.integers(-4, 5, shape) if data == "integers" else rng.standard_normal(shape)).astype(kind)


def words(matrix: np.ndarray, major: str) -> np.ndarray:
    """A (lines, K) matrix in memory, line by line or, MN-major, k by k."""
    return np.ascontiguousarray(matrix if major == "K" else matrix.T).view(np.uint8).reshape(-1).view(np.uint32)


def assert_product(d: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, data: str) -> None:
    if a.dtype == F32:                                       # tf32: the last 13 bits of an operand do not count
        a, b = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(F32) for x in (a, b))
    a64, b64, c64 = (x.astype(np.float64) for x in (a, b, c))
    reference = a64 @ b64.T + c64
    if data == "integers" or d.dtype == S32:
        assert np.array_equal(d.astype(np.float64), reference)
        return
    magnitude = abs(a64) @ abs(b64).T + abs(c64)
    tolerance = (a.shape[1] + 1) * 2.0**(-23 if a.itemsize > 1 else -13) * magnitude
    if d.dtype == F16:
        tolerance += 2 * STEPS * 2.0**-11 * magnitude
    assert (abs(d.astype(np.float64) - reference) <= tolerance).all()


def name(dtype: np.dtype) -> str:
    return {F16: "f16", BF16: "bf16", F32: "tf32", E4M3: "e4m3", E5M2: "e5m2", S8: "s8", U8: "u8"}[dtype]


def kind_name(kind: tuple[np.dtype, np.dtype, np.dtype]) -> str:
    return f"{name(kind[0])}-{name(kind[1])}-{kind[2]}"
