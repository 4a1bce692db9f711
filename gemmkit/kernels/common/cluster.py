"""Clusters: thread blocks side by side that share operands by multicast, or the K of a tile."""

from __future__ import annotations

from functools import cached_property

from gemmkit.components import Component
from gemmkit.lang.component_class import dataclass
from gemmkit.ptx.special import udiv


@dataclass(frozen=True)
class Cluster(Component):
    """Blocks of ``m`` x ``n`` neighbouring tiles of D, or of ``splits`` shares of one tile's K.

    Blocks in a row of tiles have the same rows of A, those in a column the same columns of B: each loads a part of the
    operand, and TMA multicasts it to all that share it. Ranks count down the columns: with 2 x 2 blocks rank 1 is below
    rank 0, and rank 2 beside it.
    """

    m: int = 1
    n: int = 1
    splits: int = 1

    @cached_property
    def size(self) -> int:
        return self.m * self.n * self.splits

    @cached_property
    def is_single(self) -> bool:
        return self.size == 1

    @cached_property
    def shares_a(self) -> bool:
        """Whether blocks have the same rows of A."""
        return self.n > 1

    @cached_property
    def shares_b(self) -> bool:
        return self.m > 1

    @cached_property
    def shares(self) -> bool:
        return self.shares_a or self.shares_b

    @cached_property
    def readers(self) -> int:
        """Blocks that read what a block multicasts, itself among them: those of its row and of its column."""
        return self.m + self.n - 1

    @cached_property
    def mask(self) -> int:
        """The multicast mask of all blocks."""
        return (1 << self.size) - 1

    @cached_property
    def row_mask(self) -> int:
        """The mask of the first row."""
        return sum(1 << self.m * column for column in range(self.n))

    @cached_property
    def column_mask(self) -> int:
        """The mask of the first column."""
        return (1 << self.m) - 1

    def at_once(self, sm_count: int) -> int:
        """Clusters that a device of so many multiprocessors holds at once, with a block on each."""
        return at_once(self.size, sm_count)

    # -- in device code -------------------------------------------------------------------------------------------------

    def row(self, rank: int) -> int:
        """The block's row of tiles in its cluster."""
        return rank if self.n == 1 else rank % self.m

    def column(self, rank: int) -> int:
        return rank if self.m == 1 else udiv(rank, self.m)

    def part(self, k_axis: int, rank: int) -> int:
        """Which part of an operand the block loads: of A (``k_axis`` 1) by its column, of B by its row."""
        if k_axis == 1:
            return self.column(rank)
        return self.row(rank)

    def sharers(self, k_axis: int, rank: int) -> int:
        """The mask of the blocks that share an operand with this one."""
        if self.m == 1 or self.n == 1:
            return self.mask
        if k_axis == 1:
            return self.row_mask << self.row(rank)
        return self.column_mask << self.column(rank) * self.m

    def peer(self, k_axis: int, rank: int, n: int) -> int:
        """The rank of the n-th block behind this one, going round, of those that share an operand with it."""
        if k_axis == 1:
            return self.row(rank) + (self.column(rank) + n) % self.n * self.m
        return self.column(rank) * self.m + (self.row(rank) + n) % self.m

    def reads_of(self, rank: int, other: int) -> bool:
        """Whether a block reads what the ``other`` multicasts."""
        if self.m == 1 or self.n == 1:
            return True
        return self.row(rank) == self.row(other) or self.column(rank) == self.column(other)


def at_once(size: int, sm_count: int) -> int:
    """Clusters of ``size`` blocks that a device of so many multiprocessors holds at once, with a block on each.

    The blocks of a cluster stand in one GPC, and GPCs differ: clusters of four and more leave multiprocessors idle. An H200
    holds 30 clusters of four on its 132; with 31 the last ones took a second round, and the product twice the time (f16,
    5000^3: 0.93 of cuBLAS with 30, 0.60 with 31 to 33).
    """
    return max(1, sm_count * 10 // 11 // size if size > 2 else sm_count // size)
