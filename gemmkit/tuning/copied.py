"""What the multistage kernel takes on Hopper for 16-bit operands whose rows TMA cannot take.

What copying a k-tile adds to its time depends on how rows begin: at multiples of 16 bytes, of 4 (copied by words),
or anywhere (threads load single elements, and wait for them). So does the storing of D.

The constants were fitted to 518 times of 72 products, f16 on an H200 (bench/results/choice*.json, 2026-11-24); they are off
by 11 % in the mean. Fitted without 20, 19 and 26 of these products, the choice by them reaches 0.955, 0.939 and 0.975 of the
best mapping for those; the rules of the day before reached 0.903, 0.917 and 0.894.
"""

from __future__ import annotations

import dataclasses

from gemmkit.layouts import Plain
from gemmkit.runtime.arrays import ArrayInfo, alignment
from gemmkit.tuning.multistage_mappings import Multistage

VECTOR, WORD = 16, 4                   # bytes at whose multiples rows begin: of a copy by TMA or a thread; the shortest copy
START = 1430                           # ns of a launch
COPIED = (0.0, 0.04, 0.12)             # ns of an element of a k-tile: of rows at vectors, at words, anywhere
WAITING = (0.0, 0.0, 300.0)            # ns that a block which is alone waits in a k-tile for such elements
STORED = (0.11, 0.18, 0.27)            # ns of an element of D, a wave
RUN, BROKEN = 64, 0.023                # elements of a line; ns of an element for each line more that they come from

#: As fast as they multiply.
TABLE = (
    Multistage((128, 256, 64), (64, 64), 3, 1, (1537,) * 4, 1537, START, itemsize=2),
    Multistage((128, 128, 32), (64, 64), 4, 2, (428,) * 4, 540, START, itemsize=2),
    Multistage((64, 64, 64), (32, 32), 3, 4, (234,) * 4, 390, START, itemsize=2),
    Multistage((32, 64, 64), (16, 32), 3, 4, (138,) * 4, 301, START, itemsize=2),
    Multistage((16, 64, 128), (16, 16), 5, 2, (202,) * 4, 404, START, itemsize=2),
    Multistage((16, 32, 256), (16, 8), 4, 1, (315,) * 4, 315, START, itemsize=2, merges=False),
)


def kind(multiple: int) -> int:
    """How rows begin that begin at multiples of so many bytes: 0 at vectors, 1 at words, 2 anywhere.

    >>> kind(128), kind(8), kind(2)
    (0, 1, 2)
    """
    return 0 if multiple >= VECTOR else 1 if multiple >= WORD else 2


def row_alignment(columns: int, itemsize: int) -> int:
    """The largest power of two of bytes at whose multiples rows of so many elements begin, one behind the other.

    >>> row_alignment(24, 2), row_alignment(7, 2)
    (16, 2)
    """
    return columns * itemsize & -(columns * itemsize)


def is_copied(*operands: ArrayInfo) -> bool:
    """Whether rows of one of them begin elsewhere than at vectors."""
    return any(kind(alignment(of)) for of in operands)


def mappings(a: Plain, b: Plain, of_a: ArrayInfo, of_b: ArrayInfo, of_d: int) -> tuple[Multistage, ...]:
    """The mappings with what they cost for operands that lie so, and rows of D at multiples of ``of_d`` bytes."""
    return tuple(_as_copied(one, (a, b), (kind(alignment(of_a)), kind(alignment(of_b))), kind(of_d)) for one in TABLE)


def _as_copied(one: Multistage, layouts: tuple[Plain, Plain], kinds: tuple[int, int], of_d: int) -> Multistage:
    m, n, k = one.block
    copying = 0.0
    for layout, k_axis, across, of in zip(layouts, (1, 0), (m, n), kinds):
        run = k if layout.axis == k_axis else across
        copying += across * k * (COPIED[of] + BROKEN * max(0.0, RUN / run - 1))
    step = round(one.step[0] + copying)
    alone = round(one.solo + copying + max(WAITING[of] for of in kinds))
    return dataclasses.replace(one, step=(step,) * 4, solo=alone, finish=STORED[of_d] * m * n)


__all__ = ["VECTOR", "WORD", "is_copied", "mappings", "row_alignment"]
