"""``QuantisedMMAOp``: mma.sync for a B of packed integers, which become float16 or bfloat16 in registers.

D^T = B^T A^T is computed: columns of B are the 16 rows of an instruction, rows of A its 8 columns, of which few are then
left empty. Any term of K may stand in any place of an operation as long as A and B agree, and any column of B in any place
as long as D is stored accordingly. So a lane takes what lies beside each other in memory. Lane (g, t) = (lane / 4, lane % 4)
has

| operand | of an operation of 8 x 32 x 4 R, R integers in a word |
|---|---|
| B | the words of columns 4 g to 4 g + 3 and rows t R to t R + R - 1: 16 bytes |
| A | the same R places along K of row g: R / 8 times 16 bytes |
| D | columns 4 g to 4 g + 3 of rows 2 t and 2 t + 1 |

Its columns 2 h and 2 h + 1 are what instruction h of two takes for rows g and g + 8. Of the lane's R places along K, pair p
is (p, p + R / 2), which `gemmkit.ptx.registers` makes at once; instruction s along K takes pairs 2 s and 2 s + 1. Nothing
passes through shared memory, and no value goes from lane to lane.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from gemmkit.lang.checks import dtype_given
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, SharedPointer
from gemmkit.lang.registers import Fragment, fold, generate
from gemmkit.operators.base import Operator
from gemmkit.operators.mma import store_elements
from gemmkit.ptx.memory import unpack_narrow
from gemmkit.ptx.mma import MMA, FragmentMap, places
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.layouts.base import SharedLayout
    from gemmkit.layouts.plain import Plain

F16, BF16, F32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
COLUMNS = 4                            # of B that a lane has: instructions side by side


@dataclass(frozen=True)
class QuantisedMMAOp(Operator):
    """Products on tensor cores of an A of ``dtype``, float16 or bfloat16, and a B of integers of ``bits`` bits in
    `layouts.GroupQuantised`, with float32 accumulators. It requires sm_80 and kernel="quantised". Weights become float16,
    and then bfloat16 if A is bfloat16, which takes three more instructions a pair.

    Raises ValueError for other bits than 2 and 4 and for another dtype.

    >>> QuantisedMMAOp(bits=4).shape
    (8, 32, 32)
    """

    bits: int = 4
    dtype: Any = np.float16

    M, N = 8, 32
    merges = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (2, 4):
            raise ValueError(f"QuantisedMMAOp(bits={self.bits!r}): 2 or 4 is needed")
        object.__setattr__(self, "dtype", dtype_given(self.dtype, "QuantisedMMAOp"))
        if self.dtype not in (F16, BF16):
            raise ValueError(f"QuantisedMMAOp(dtype={self.dtype}): float16 or bfloat16 is needed")

    @property
    def K(self) -> int:
        return 4 * self.rows

    @property
    def rows(self) -> int:
        """Integers in a word."""
        return 32 // self.bits

    @property
    def pairs(self) -> int:
        """Words of float16, or bfloat16, that a word of integers becomes."""
        return self.rows // 2

    @property
    def is_bfloat16(self) -> bool:
        return bool(self.dtype == BF16)

    @cached_property
    def minimum_arch(self) -> tuple[int, int]:
        return 8, 0

    def instead(self, arch: tuple[int, int]) -> str:
        return "the default operator, which has B dequantised on its way to shared memory"

    @cached_property
    def instruction(self) -> Callable[..., Elements]:
        return MMA[16, 16, self.dtype, self.dtype, F32]

    @cached_property
    def map_c(self) -> FragmentMap:
        return FragmentMap(8, 32, places((4, (2, 0)), (8, (0, 4))), places((4, (0, 1)), (2, (1, 0))))

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(self.dtype, self.rows)

    @cached_property
    def fragment_b(self) -> Fragment:
        return Fragment(self.dtype, COLUMNS * self.rows)

    @cached_property
    def fragment_c(self) -> Fragment:
        return Fragment(F32, 8)

    def refuses(self, operand: str, layout: SharedLayout) -> str | None:
        if operand in ("a", "b"):
            return f"{self!r} takes A and B from global memory; use kernel='quantised'"
        return None

    def line_alignment(self, operand: str, layout: Any) -> int:
        return int(layout.dtype.itemsize) * (4 if layout.axis == 1 else 1)

    def mma(self, a: Elements, b: Elements, c: Elements) -> Elements:
        """``a``: the pairs of a row's places along K; ``b``: those of four columns; ``c``: four columns of a row, and of the
        next."""
        x, y = generate(2, two_columns, self, a, b, c)
        return x[0], x[2], y[0], y[2], x[1], x[3], y[1], y[3]

    def store_d(self, layout: Plain, pointer: SharedPointer, tile: Tile, leading: int, d: Elements) -> None:
        store_elements(self.map_c, (1, 4)[layout.axis], 1, layout, pointer, tile, leading, d)


# -- device code ------------------------------------------------------------------------------------------------------

def two_columns(h: int, operator: QuantisedMMAOp, a: Elements, b: Elements, c: Elements) -> Elements:
    """The sums of a lane's columns 2 h and 2 h + 1, of each for two rows."""
    sums = c[2 * h], c[4 + 2 * h], c[2 * h + 1], c[5 + 2 * h]
    return fold(operator.pairs // 2, along_k, sums, operator, a, b[2 * h], b[2 * h + 1])


def along_k(sums: Elements, s: int, operator: QuantisedMMAOp, a: Elements, near: Elements, far: Elements) -> Elements:
    return operator.instruction(unpack_narrow(operator.dtype, (near[2 * s], far[2 * s], near[2 * s + 1], far[2 * s + 1])),
                                unpack_narrow(operator.dtype, (a[2 * s], a[2 * s + 1])), sums)
