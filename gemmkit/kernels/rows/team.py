"""The threads that work on a row together, and how they combine what each of them has.

Lanes of a warp exchange by butterflies (shfl.sync.bfly): after five of them every lane has the value of all 32, each made in
the same order. Warps of a block meet in shared memory, where every warp reads what all have left, and exchanges it again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.components import Component
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import fold
from gemmkit.lang.values import convert
from gemmkit.ptx.memory import load_shared, shared, store_shared
from gemmkit.ptx.shuffle import SHUFFLE
from gemmkit.ptx.special import barrier, block_x, lane_index, thread_index, udiv

LANES, BUTTERFLIES = 32, 5
LEFT = 2                               # values that a warp leaves for the others, at most
exchanged = SHUFFLE["bfly"]


@dataclass(frozen=True)
class Team(Component):
    """A row's threads; ``warps`` warps of a block."""

    warps: int
    dtype: np.dtype

    @property
    def threads(self) -> int:
        """Of a row."""
        return self.warps * LANES

    @property
    def rows(self) -> int:
        """Of a block."""
        return 1

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads * self.rows

    @property
    def shared_bytes(self) -> int:
        return 0

    def row(self) -> int:
        """The row of the team."""
        return block_x()

    def thread(self) -> int:
        """The thread's number in its team."""
        return thread_index()

    def reduce(self, value: Any, combine: Any, identity: Any) -> Any:
        """Every thread's value, combined."""
        return value

    def moments(self, row: Any) -> tuple:
        """A row's mean, and the mean of squares about it."""
        raise NotImplementedError


@dataclass(frozen=True)
class WarpTeam(Team):
    """A warp a row, and several rows a block."""

    rows_per_block: int = 4

    @property
    def rows(self) -> int:
        return self.rows_per_block

    def row(self) -> int:
        return block_x() * self.rows_per_block + udiv(thread_index(), LANES)

    def thread(self) -> int:
        return lane_index()

    def reduce(self, value: Any, combine: Any, identity: Any) -> Any:
        return of_warp(value, combine)

    def moments(self, row: Any) -> tuple:
        mean = of_warp(row.spec.source.total(row), added) / row.columns
        return mean, of_warp(row.spec.source.squares(row, mean), added) / row.columns


@dataclass(frozen=True)
class BlockTeam(Team):
    """A block a row."""

    @property
    def shared_bytes(self) -> int:
        return LEFT * self.warps * self.dtype.itemsize

    def moments(self, row: Any) -> tuple:
        """Each warp leaves the mean of its own elements, and the sum of squares about that: they meet once for both. The
        row's sum of squares is that of theirs and of the way from their means to the row's, as often as they have elements
        (Chan et al., 1979)."""
        mine = self.columns_of(udiv(thread_index(), LANES), row)
        mean = of_warp(row.spec.source.total(row), added) / max(mine, 1)
        squares = of_warp(row.spec.source.squares(row, mean), added)
        left = shared(self.dtype, 0)
        barrier()
        if lane_index() == 0:
            store_shared(left, udiv(thread_index(), LANES), 0, (convert(self.dtype, mean),))
            store_shared(left, self.warps + udiv(thread_index(), LANES), 0, (convert(self.dtype, squares),))
        barrier()
        warp = lane_index() % self.warps
        count = convert(self.dtype, self.columns_of(warp, row) if lane_index() < self.warps else 0)
        means, rest = load_shared(left, warp, 0, 1)[0], load_shared(left, self.warps + warp, 0, 1)[0]
        whole = of_warp(means * count, added) / row.columns
        far = means - whole
        rest = rest if lane_index() < self.warps else convert(self.dtype, 0)
        return whole, of_warp(rest + far * far * count, added) / row.columns

    def columns_of(self, warp: int, row: Any) -> int:
        """How many elements of a row a warp has: its share of each round of all threads, and of what is left."""
        share = LANES * row.spec.vector
        rounds = udiv(row.columns, self.warps * share)
        left = row.columns - rounds * self.warps * share - warp * share
        return rounds * share + max(0, min(left, share))

    def reduce(self, value: Any, combine: Any, identity: Any) -> Any:
        """Each warp leaves its value in shared memory. The block meets before, for what was left there last may still be
        read, and after."""
        found = of_warp(value, combine)
        left = shared(self.dtype, 0)
        barrier()
        if lane_index() == 0:
            store_shared(left, udiv(thread_index(), LANES), 0, (found,))
        barrier()
        return of_warp(load_shared(left, lane_index(), 0, 1)[0] if lane_index() < self.warps else identity, combine)


def added(a: Any, b: Any) -> Any:
    return a + b


def of_warp(value: Any, combine: Any) -> Any:
    return fold(BUTTERFLIES, butterfly, value, combine)


def butterfly(value: Any, n: int, combine: Any) -> Any:
    """Lanes whose numbers differ in bit n exchange. The lane whose bit is 0 gives the first argument in both: so both make
    the same of it."""
    other = exchanged(value, 1 << n)
    return combine(value, other) if lane_index() & 1 << n == 0 else combine(other, value)
