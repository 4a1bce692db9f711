"""What 16-bit operands cost on Hopper whose rows TMA cannot take, in the multistage kernel and in Hopper's own.

What a k-tile takes to be copied depends on how rows begin: at multiples of 16 bytes, of 8 or 4 (cp.async copies words), or
anywhere: threads load single elements then, and a block's k-tile takes as long as one thread's loads. So does storing D.

The constants were fitted to 804 times of 93 products, f16 on an H200 (choice_*.json of commit a48a9ead, 2026-11-24); they
are off by 12 % in the mean. Fitted without 20, 26, 21 and 19 of these products, the choice by them
(`gemmkit.tuning.gathered`) reaches 0.965, 0.969, 0.924 and 0.972 of the best mapping for those; what was chosen when they
were timed reached 0.903, 0.894, 0.835 and 0.917.
"""

from __future__ import annotations

import dataclasses

from gemmkit.layouts import Plain
from gemmkit.runtime.arrays import ArrayInfo, alignment
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuning.mappings import BY_ELEMENTS
from gemmkit.tuning.model import Mapping, by_workspace
from gemmkit.tuning.multistage_mappings import Multistage

VECTOR, WORD = 16, 4                   # bytes at whose multiples rows begin: of a copy by TMA or a thread; the shortest copy
VECTORS, PAIRS, WORDS, ELEMENTS = range(4)     # kinds of rows, by where they begin
START = 1310                           # ns of a launch
COPIED = (0.0, 0.01, 0.035, 0.088)     # ns of an element of a k-tile: of rows at vectors, at 8 bytes, at 4, anywhere
LOADED = 33.0                          # ns of each of a thread's single elements of a k-tile
STORED = (0.123, 0.167, 0.167, 0.28)   # ns of an element of D, a wave
RUN, BROKEN = 64, 0.034                # elements of a line; ns of an element for each line more that they come from

#: As fast as they multiply.
TABLE = (
    Multistage((128, 256, 64), (64, 64), 3, 1, (1370,) * 4, 1370, START, itemsize=2),
    Multistage((128, 128, 32), (64, 64), 4, 2, (351,) * 4, 442, START, itemsize=2),
    Multistage((64, 64, 64), (32, 32), 3, 4, (288,) * 4, 480, START, itemsize=2),
    Multistage((32, 64, 64), (16, 32), 3, 4, (171,) * 4, 375, START, itemsize=2),
    Multistage((16, 64, 128), (16, 16), 5, 2, (226,) * 4, 452, START, itemsize=2),
    Multistage((16, 32, 256), (16, 8), 4, 1, (460,) * 4, 460, START, itemsize=2, merges=False),
)

# Of Hopper's kernel, in cycles (`gemmkit.tuning.model`).
HOPPERS_START = 3160                   # of a launch
MULTIPLIED = 0.063                     # of an element of D, a k-tile of 64
PASSED = (0.0, 0.1, 0.1, 0.22)         # of an element of a k-tile that producer threads pass on
HOPPERS_STORED = (0.08, 0.12, 0.12, 0.22)      # of an element of D, a wave,
SHARED = 0.42                          # and where blocks share K (from 7 products, not fitted)


def kind(multiple: int) -> int:
    """How rows begin that begin at multiples of so many bytes: at vectors, at pairs of words, at words, anywhere.

    >>> kind(128), kind(8), kind(4), kind(2)
    (0, 1, 2, 3)
    """
    return VECTORS if multiple >= VECTOR else PAIRS if multiple >= 2 * WORD else WORDS if multiple >= WORD else ELEMENTS


def is_copied(*operands: ArrayInfo) -> bool:
    """Whether rows of one of them begin elsewhere than at vectors."""
    return any(kind(alignment(of)) for of in operands)


@dataclasses.dataclass(frozen=True)
class Copies:
    """How rows of two operands begin, and those of D (`kind`).

    >>> import numpy as np
    >>> from gemmkit.layouts import RowMajor
    >>> f16, plain = np.dtype(np.float16), RowMajor("float16")
    >>> a, b = (ArrayInfo(0, (8, 24), (columns, 1), f16, 0, False, "cai") for columns in (24, 26))
    >>> Copies.of(plain, plain, a, b, None, 7)
    Copies(layouts=(RowMajor('float16'), RowMajor('float16')), kinds=(0, 2), of_d=3)
    """

    layouts: tuple[Plain, Plain]
    kinds: tuple[int, int]
    of_d: int

    @classmethod
    def of(cls, a: Plain, b: Plain, of_a: ArrayInfo, of_b: ArrayInfo, out: ArrayInfo | None, columns: int) -> Copies:
        """Without ``out`` D's rows, of so many elements, follow each other."""
        nbytes = columns * a.dtype.itemsize
        rows_of_d = nbytes & -nbytes if out is None else alignment(out)
        return cls((a, b), (kind(alignment(of_a)), kind(alignment(of_b))), kind(rows_of_d))

    def multistage(self) -> tuple[Multistage, ...]:
        """The multistage kernel's mappings with what they cost."""
        return tuple(map(self._multistage, TABLE))

    def _multistage(self, one: Multistage) -> Multistage:
        m, n, k = one.block
        copying, single = 0.0, 0
        for layout, k_axis, across, of in zip(self.layouts, (1, 0), (m, n), self.kinds):
            run = k if layout.axis == k_axis else across
            copying += across * k * (COPIED[of] + BROKEN * max(0.0, RUN / run - 1))
            single += across * k if of == ELEMENTS else 0
        threads = 32 * (m // one.warp[0]) * (n // one.warp[1])
        alone = one.solo + max(copying, LOADED * single / threads)
        return dataclasses.replace(one, step=(round(one.step[0] + copying),) * 4, solo=round(alone),
                                   finish=STORED[self.of_d] * m * n)

    def hoppers(self, sizes: tuple[int, int, int], device: DeviceInfo, products: int) -> tuple[Mapping, ...]:
        """Hopper's kernel's mappings with what they cost."""
        shared = by_workspace(sizes, device, products, tuple(self._hoppers(one, SHARED) for one in BY_ELEMENTS.workspace),
                              BY_ELEMENTS.least_shared)
        return (*map(self._hoppers, BY_ELEMENTS.mappings), *shared)

    def _hoppers(self, one: Mapping, shared: float = 0.0) -> Mapping:
        passing = sum(PASSED[of] * across * 64 for of, across in zip(self.kinds, (one.M, one.N)))
        return dataclasses.replace(one, step=MULTIPLIED * one.M * one.N + passing, start=HOPPERS_START,
                                   finish=(HOPPERS_STORED[self.of_d] + shared) * one.M * one.N)


__all__ = ["ELEMENTS", "VECTORS", "WORDS", "Copies", "is_copied", "kind"]
