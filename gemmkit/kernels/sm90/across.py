"""A of 32-bit elements that lies across K, fetched into registers by the consumers' threads.

wgmma reads 32-bit operands in shared memory along K alone. A fragment in registers has no such order: a thread holds single
elements of it, one a register, and loads them from where TMA has put the tile as it lies in memory. So no tile is
transposed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.kernels.sm90.fragments import Transformed
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.registers import apply
from gemmkit.ptx.memory import load_shared, shared
from gemmkit.ptx.special import lane_index, udiv
from gemmkit.ptx.tf32 import round_word

WORDS = np.dtype(np.uint32)


@dataclass(frozen=True)
class Across(Transformed):
    """Elements of A, loaded one by one, and rounded to tf32.

    Lane t has rows t // 4 and t // 4 + 8 of a fragment's 16, and in each the elements t % 4 and t % 4 + 4 along K (see
    `Transformed`). In shared memory a line is 32 rows of one k, in chunks of 4 rows that are swizzled by k % 8. All lanes'
    words of one kind are of four k, and those of k and k + 1 would lie in the same banks. So where t is odd a lane loads its
    words of t % 4 + 4 first: then the 32 words of an access lie in 32 banks.
    """

    def fetch(self, spec: Any, stage: int, row: int, k: int) -> tuple:
        late = lane_index() % 2
        i, j = row + udiv(lane_index(), 4), lane_index() % 4
        first = fetch_two(spec, stage, i, j + 4 * late, k)
        second = fetch_two(spec, stage, i, j + 4 - 4 * late, k)
        if late == 1:
            return second + first
        return first + second

    def round(self, words: tuple) -> tuple:
        return apply(round_one, words)


def fetch_two(spec: Any, stage: int, i: int, j: int, k: int) -> tuple:
    """The words of rows ``i`` and ``i + 8``, at ``k + j`` along K."""
    return fetch_word(spec, stage, i, j, k) + fetch_word(spec, stage, i + 8, j, k)


def fetch_word(spec: Any, stage: int, i: int, j: int, k: int) -> tuple:
    """``k`` is a multiple of the pattern's 8 lines: it moves a place, whose swizzle is computed once for all of a stage."""
    at = spec.a.plane.position((i, j), spec.a.plane.leading(spec.a.tile.size))
    return load_shared(shared(WORDS, 0), stage * udiv(spec.stage_bytes, 4) + at, k * spec.a.plane.line, 1)


def round_one(word: Any, n: int) -> Any:
    return round_word(word)
