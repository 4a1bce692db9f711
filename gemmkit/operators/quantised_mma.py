"""``QuantisedMMAOp``: mma.sync for a B of packed integers, which become float16 in registers.

Any term of K may stand in any place of an operation as long as A and B agree, and any column of B in any place as long as D
is stored accordingly. So a lane takes what lies beside each other in memory. Lane (g, t) = (lane / 4, lane % 4) has

| operand | of an operation of 16 x 32 x 4 R, R integers in a word |
|---|---|
| B | the words of columns 4 g to 4 g + 3 and rows t R to t R + R - 1: 16 bytes |
| A | the same R places along K of rows g and g + 8: R / 8 times 16 bytes |
| D | columns 8 t to 8 t + 7 of rows g and g + 8 |

Its column j is what instruction j of four takes for column g. Of the lane's R rows, pair p is (p, p + R / 2), which
`gemmkit.ptx.dequantise` makes at once; instruction s along K takes pairs 2 s and 2 s + 1. Nothing passes through shared
memory, and no value goes from lane to lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.lang.control import fold, interleave
from gemmkit.lang.registers import Fragment, generate
from gemmkit.operators.base import Operator
from gemmkit.operators.warp_fragments import store_elements
from gemmkit.ptx.fragments import FragmentMap, places
from gemmkit.ptx.mma import MMA
from gemmkit.ptx.words import unpack_narrow

__all__ = ["QuantisedMMAOp"]

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
COLUMNS = 4                            # of B that a lane has: instructions side by side


@dataclass(frozen=True)
class QuantisedMMAOp(Operator):
    """Products on tensor cores of a float16 A and a B of integers of ``bits`` bits in `layouts.GroupQuantised`, with float32
    sums; sm_80+. For kernel="quantised" alone.

    Raises ValueError for other bits than 2 and 4.

    >>> QuantisedMMAOp(bits=4).shape
    (16, 32, 32)
    """

    bits: int = 4

    M, N = 16, 32
    merges = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (2, 4):
            raise ValueError(f"QuantisedMMAOp(bits={self.bits!r}): 2 or 4 is needed")

    @property
    def K(self) -> int:
        return 4 * self.rows

    @property
    def rows(self) -> int:
        """Integers in a word."""
        return 32 // self.bits

    @property
    def pairs(self) -> int:
        """Words of float16 that a word of integers becomes."""
        return self.rows // 2

    @cached_property
    def minimum_arch(self) -> tuple[int, int]:
        return 8, 0

    def instead(self, arch: tuple[int, int]) -> str:
        return "the default operator, which has B dequantised on its way to shared memory"

    @cached_property
    def instruction(self) -> Any:
        return MMA[16, 16, F16, F16, F32]

    @cached_property
    def map_c(self) -> FragmentMap:
        return FragmentMap(16, 32, places((4, (0, 8)), (8, (1, 0))), places((8, (0, 1)), (2, (8, 0))))

    @cached_property
    def fragment_a(self) -> Fragment:
        return Fragment(F16, 2 * self.rows)

    @cached_property
    def fragment_b(self) -> Fragment:
        return Fragment(F16, COLUMNS * self.rows)

    @cached_property
    def fragment_c(self) -> Fragment:
        return Fragment(F32, 16)

    def refuses(self, operand: str, layout: Any) -> str | None:
        if operand in ("a", "b"):
            return f"{self!r} takes A and B from global memory; take kernel='quantised'"
        return None

    def line_alignment(self, operand: str, layout: Any) -> int:
        return int(layout.dtype.itemsize) * (4 if layout.axis == 1 else 1)

    def mma(self, a: tuple, b: tuple, c: tuple) -> tuple:
        """``a``: the pairs of words of rows g and g + 8; ``b``: those of four columns."""
        return interleave(generate(4, column, self, a, b, c))

    def store_d(self, layout: Any, pointer: Any, tile: Any, leading: int, d: tuple) -> None:
        store_elements(self.map_c, (1, 4)[layout.axis], 1, layout, pointer, tile, leading, d)


# -- device code ------------------------------------------------------------------------------------------------------

def column(j: int, operator: Any, a: tuple, b: tuple, c: tuple) -> tuple:
    """The sums of a lane's j-th column: of instruction j side by side."""
    sums = c[j], c[4 + j], c[8 + j], c[12 + j]
    return fold(operator.pairs // 2, along_k, sums, operator, a, b[j])


def along_k(sums: tuple, s: int, operator: Any, a: tuple, b: tuple) -> tuple:
    x, y = a
    return operator.instruction(unpack_narrow(F16, (x[2 * s], y[2 * s], x[2 * s + 1], y[2 * s + 1])),
                                unpack_narrow(F16, (b[2 * s], b[2 * s + 1])), sums)
