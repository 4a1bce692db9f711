"""``WGMMAOp``: Hopper's tensor cores, fed from shared memory by warpgroups (``wgmma``; sm_90a)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmkit.lang.checks import dtype_given
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, Numeric, SharedPointer
from gemmkit.lang.registers import Fragment, apply, fold, generate, join
from gemmkit.operators.base import Operator
from gemmkit.ptx.arithmetic import fma
from gemmkit.ptx.copy_async import copy_async, offset_of
from gemmkit.ptx.memory import load_shared
from gemmkit.ptx.mma import FragmentMap
from gemmkit.ptx.special import lane_index, udiv
from gemmkit.ptx.wgmma import WgmmaSpec, advance, instruction
from gemmkit.runtime.arrays import describe
from gemmkit.tiling import Coord

if TYPE_CHECKING:
    from gemmkit.lang.fingerprint import Array
    from gemmkit.layouts.base import SharedLayout
    from gemmkit.layouts.plain import Swizzled

_DEFAULT_ACCUMULATOR = {"i": np.dtype(np.int32), "u": np.dtype(np.int32)}


@dataclass(frozen=True)
class WGMMAOp(Operator):
    """64 x ``N`` products of a warpgroup, with both operands in swizzled shared memory.

    ``dtype`` (and ``b_dtype`` if B's differs): float16 or bfloat16; float32, whose products are tf32 (10 bits of mantissa;
    gemmkit never chooses it for the caller); float8_e4m3fn and float8_e5m2; int8 and uint8. ``accumulator``: float32 (int32
    for integers), or float16 for float16 and 8-bit floats. ``promote`` is for 8-bit floats, whose tensor cores keep only 14
    bits of a sum: after every ``promote`` elements along K (a multiple of the block's K; 0: never) the kernel adds the sum
    to one in float32.

    `gemmkit.matmul` computes some products as their transpose (docs/hopper.md; of float32 those of A and B by rows). ``N``
    then counts rows of D.

    ``a_major`` and ``b_major`` name the axis along which the shared operands are contiguous: "K", or "MN" (16-bit types
    only); `get_config` derives them from the shared layouts.

    Raises ValueError for what the instruction does not have.
    """

    N: int = 256
    dtype: Any = np.float16
    accumulator: Any = None
    b_dtype: Any = None
    promote: int = 0
    a_major: str = "K"
    b_major: str = "K"

    threads = 128
    M = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        dtype = dtype_given(self.dtype, "WGMMAOp")
        b_dtype = dtype if self.b_dtype is None else dtype_given(self.b_dtype, "WGMMAOp", "b_dtype")
        chosen = _DEFAULT_ACCUMULATOR.get(dtype.kind, np.dtype(np.float32))
        accumulator = chosen if self.accumulator is None else dtype_given(self.accumulator, "WGMMAOp", "accumulator")
        for name, value in (("dtype", dtype), ("b_dtype", b_dtype), ("accumulator", accumulator)):
            object.__setattr__(self, name, value)
        if isinstance(self.promote, bool) or not isinstance(self.promote, int) or self.promote < 0:
            raise ValueError(f"WGMMAOp(promote={self.promote!r}): a number of elements along K is needed, or 0")
        if self.promote and accumulator != np.float32:
            raise ValueError(f"WGMMAOp(promote={self.promote}): accumulators in {accumulator} cannot be promoted")
        self.spec                                      # noqa: B018  (raises for what there is not)

    @cached_property
    def spec(self) -> WgmmaSpec:
        return WgmmaSpec(self.N, self.dtype, self.b_dtype, self.accumulator, self.a_major, self.b_major)

    @cached_property
    def K(self) -> int:
        return 32 // int(self.dtype.itemsize)

    @cached_property
    def minimum_arch(self) -> tuple[int, int]:
        return 9, 0

    is_mapped = True

    @cached_property
    def map_c(self) -> FragmentMap:
        return self.spec.c

    @cached_property
    def map_a(self) -> FragmentMap:
        """Of an A in registers (`register_instruction`)."""
        return self.spec.a_map

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(self.dtype, 0)

    @cached_property
    def fragment_b(self) -> Fragment:
        return Fragment(self.b_dtype, 0)

    @cached_property
    def fragment_c(self) -> Fragment:
        return Fragment(self.accumulator, self.N // 2)

    @cached_property
    def sums_in_words(self) -> bool:
        """Whether a thread keeps its sums as 32-bit words, two float16 in each."""
        return bool(self.accumulator == np.float16)

    @cached_property
    def registers(self) -> Fragment:
        """A thread's sums while they are added up."""
        return Fragment(np.dtype(np.uint32), self.N // 4) if self.sums_in_words else self.fragment_c

    @cached_property
    def instruction(self) -> Callable[..., Elements]:
        return instruction(self.spec)

    @cached_property
    def negated_instruction(self) -> Callable[..., Elements]:
        """The one that subtracts the product."""
        return instruction(dataclasses.replace(self.spec, negates=True))

    @cached_property
    def register_instruction(self) -> Callable[..., Elements]:
        """The one that takes A from registers."""
        return instruction(dataclasses.replace(self.spec, a_major="K", a_registers=True))

    @cached_property
    def negated_register_instruction(self) -> Callable[..., Elements]:
        return instruction(dataclasses.replace(self.spec, a_major="K", a_registers=True, negates=True))

    # -- device -----------------------------------------------------------------------------------------------------

    def multiply(self, accumulators: Elements, a: int, b: int, a_layout: Any, b_layout: Any, block: Any,
                 accumulate: int) -> Elements:
        """One stage: the accumulators of several 64-row fragments, and A's and B's tiles by their descriptors."""
        first = apply(_multiply_fragment, accumulators, self, a, b, a_layout, b_layout, block, 0, accumulate)
        return fold(block.size.K // self.K - 1, _multiply_step, first, self, a, b, a_layout, b_layout, block)

    def multiply_fragments(self, accumulators: Elements, fragments: Elements, b: int, b_layout: SharedLayout, block: Coord,
                           step: int, accumulate: int) -> Elements:
        """A k-block with A in registers: ``fragments`` holds one for each accumulator."""
        return apply(_multiply_registers, accumulators, self, fragments, b, b_layout, block, step, accumulate)


def _multiply_step(accumulators: Elements, n: int, operator: WGMMAOp, a: int, b: int, a_layout: SharedLayout,
                   b_layout: SharedLayout, block: Coord) -> Elements:
    return apply(_multiply_fragment, accumulators, operator, a, b, a_layout, b_layout, block, n + 1, 1)


def _multiply_fragment(accumulator: Elements, i: int, operator: WGMMAOp, a: int, b: int, a_layout: Swizzled,
                       b_layout: Swizzled, block: Any, step: int, accumulate: int) -> Elements:
    k = step * operator.K
    return operator.instruction(accumulator, advance(a, within(a_layout, (i * 64, k), block.MK.size)),
                                advance(b, within(b_layout, (k, 0), block.KN.size)), accumulate)


def _multiply_registers(accumulator: Elements, i: int, operator: WGMMAOp, fragments: Elements, b: int, b_layout: Swizzled,
                        block: Any, step: int, accumulate: int) -> Elements:
    return operator.register_instruction(accumulator, fragments[i],
                                         advance(b, within(b_layout, (step * operator.K, 0), block.KN.size)), accumulate)


# --------------------------------------------------------------------------------------------------
# Operands of 8-bit floats in blocks, each with a scale: sums of a block along K are scaled, and added to others.

BLOCK = 128                            # elements along K, and rows or columns of a square block, that share a scale


@dataclass(frozen=True)
class BlockScaledOp(WGMMAOp):
    """Products of 8-bit floats in blocks of 128 along K, each of which has a float32 scale:

        D[m, n] = sum over blocks k of  scale_a[m, k] * scale_b[k, n] * (sum within the block of A * B)

    Args:
        scale_a: (M, K / 128) float32, a scale for each row; or (M / 128, K / 128), one for each 128 rows. Quotients are
            rounded up. Any strides.
        scale_b: (K / 128, N / 128) float32, a scale for each 128 columns; or (K / 128, N), one for each column.
        rows, columns: 1 or 128: how many rows of A, and columns of B, have a scale together.

    Tensor cores sum 128 elements along K; the sum is scaled and added to a total in float32. The kernel reads the scales
    in the GPU's memory.

    Raises ValueError for scales that are no matrices, and for other ``rows`` and ``columns``; TypeError for scales of
    another dtype and for operands other than 8-bit floats. A product raises ValueError for scales that do not fit its sizes.

    >>> a, b = np.full((64, 2), 0.5, np.float32), np.ones((2, 1), np.float32)
    >>> BlockScaledOp(128, "float8_e4m3fn", scale_a=a, scale_b=b).promote
    128
    """

    promote: int = BLOCK
    scale_a: Array = None                                     # type: ignore[assignment]
    scale_b: Array = None                                     # type: ignore[assignment]
    rows: int = 1
    columns: int = BLOCK

    device_methods = (*WGMMAOp.device_methods, "copy_scales", "factors", "add_scaled")
    is_scaled = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype.itemsize != 1 or self.dtype.kind in "iu":
            raise TypeError(f"BlockScaledOp(dtype={self.dtype}): 8-bit floats have block scales")
        if self.promote != BLOCK:
            raise ValueError(f"BlockScaledOp(promote={self.promote}): blocks are of {BLOCK} elements along K")
        for name, count in (("rows", self.rows), ("columns", self.columns)):
            if count not in (1, BLOCK):
                raise ValueError(f"BlockScaledOp({name}={count!r}): 1 or {BLOCK} is needed")
        for name, value in (("scale_a", self.scale_a), ("scale_b", self.scale_b)):
            info = describe(value, name)
            if info.dtype != np.float32:
                raise TypeError(f"{name} has dtype {info.dtype}; float32 is needed")
            if len(info.shape) != 2:
                raise ValueError(f"{name} has shape {info.shape}; a matrix of 2 dimensions is needed")

    def check(self, M: int, N: int, K: int, stack: tuple[int, ...] | None) -> None:
        if stack is not None:
            raise ValueError(f"a and b are a stack of products of shape {stack}, and scales are of one product; multiply "
                             "them one by one")
        blocks = -(-K // BLOCK)
        for name, value, wanted in (("scale_a", self.scale_a, (-(-M // self.rows), blocks)),
                                    ("scale_b", self.scale_b, (blocks, -(-N // self.columns)))):
            info = describe(value, name)
            if info.shape != wanted:
                raise ValueError(f"{name} has shape {info.shape}; a product of {M} x {N} x {K} needs {wanted}")

    @cached_property
    def width(self) -> int:
        """Columns of a tile, beside each other, that have one scale wherever the tile lies."""
        return math.gcd(self.N, self.columns)

    # -- device -----------------------------------------------------------------------------------------------------

    def copy_scales(self, scales: SharedPointer, begin: int, rows: int, columns: int, at: Any) -> None:
        """Start a warp's copies of a stage's scales: those of the tile's ``rows``, then those of its ``columns``. ``at`` is
        where the stage begins."""
        block = udiv(at.k, BLOCK)
        for first in range(0, rows, 32):
            n = lane_index() + first
            if n < rows:
                row = udiv(min(at.m + n, at.shape.M - 1), self.rows)
                copy_async(scales, begin + n, 0, self.scale_a, offset_of(self.scale_a, (row, block)), 1, True)
        for first in range(0, columns, 32):
            n = lane_index() + first
            if n < columns:
                column = udiv(min(at.n + n * self.width, at.shape.N - 1), self.columns)
                copy_async(scales, begin + rows + n, 0, self.scale_b, offset_of(self.scale_b, (block, column)), 1, True)

    def factors(self, scales: SharedPointer, rows: int, fragments: int, begin: int, columns: int) -> Elements:
        """By a thread's rows (two of each fragment), then by its columns: what sums of a block are multiplied by. ``rows``
        and ``begin`` are where the scales of a warp's rows and of the columns stand."""
        if self.columns == 1:                          # a thread has two of eight
            of_columns = join(generate(columns // 8, _two_scales, scales, begin + lane_index() % 4 * 2))
        else:
            of_columns = generate(columns, _scale, scales, begin)
        return apply(_times, generate(2 * fragments, _scale_of_row, scales, rows + udiv(lane_index(), 4)), of_columns)

    def add_scaled(self, total: Elements, sums: Elements, factors: Elements, i: int) -> Elements:
        """The accumulators of fragment ``i``, and the sums of a block in accumulators of their own."""
        return apply(_add_scaled, total, self, sums, factors, i)


def _scale_of_row(n: int, scales: SharedPointer, begin: int) -> Any:
    """A thread has a row and the eighth behind it of each fragment."""
    return load_shared(scales, begin, n // 2 * 64 + n % 2 * 8, 1)[0]


def _two_scales(n: int, scales: SharedPointer, begin: int) -> Any:
    return load_shared(scales, begin, 8 * n, 2)


def _scale(n: int, scales: SharedPointer, begin: int) -> Any:
    return load_shared(scales, begin, n, 1)[0]


def _times(row: Numeric, n: int, columns: Elements) -> Elements:
    return apply(_product, columns, row)


def _product(column: Numeric, n: int, row: Numeric) -> Any:
    return row * column


def _add_scaled(total: Numeric, n: int, operator: BlockScaledOp, sums: Elements, factors: tuple[Any, ...], i: int) -> Any:
    column = n // 4 * 2 + n % 2 if operator.columns == 1 else n // 4 * 8 // operator.width
    return fma(sums[n], factors[2 * i + n // 2 % 2][column], total)


def within(layout: Swizzled, coord: tuple[int, int], size: Coord) -> int:
    """How many bytes a coordinate lies into a swizzled tile, at a corner of the hardware's pattern: there the swizzle, which
    is of the address, changes nothing in the way to it."""
    along, across = coord[layout.axis], coord[1 - layout.axis]
    line = layout.lines_to(along // layout.line, size[1 - layout.axis]) + across
    return (line * layout.line + along % layout.line) * layout.itemsize
