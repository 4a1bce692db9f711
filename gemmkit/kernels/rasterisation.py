"""CTA orders: which tile of D the n-th block computes. Neighbours in time should share operands in the L2 cache."""

from __future__ import annotations

from dataclasses import dataclass

from gemmkit.components import Component
from gemmkit.ptx.special import udiv


@dataclass(frozen=True)
class Order(Component):
    """``block(linear, rows, columns)`` -> (row, column) of a grid of tiles; every tile exactly once."""

    def block(self, linear: int, rows: int, columns: int) -> tuple[int, int]:
        """Column by column."""
        column = udiv(linear, rows)
        return linear - column * rows, column


@dataclass(frozen=True)
class Columns(Order):
    """Column by column of the grid: the identity."""


@dataclass(frozen=True)
class Grouped(Order):
    """Bands of ``group`` tile rows, each band column by column.

    >>> [Grouped(2).block(n, 3, 2) for n in range(6)]
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    """

    group: int = 8

    def __post_init__(self) -> None:
        if isinstance(self.group, bool) or not isinstance(self.group, int) or self.group < 1:
            raise ValueError(f"Grouped(group={self.group!r}): a positive number of tile rows is needed")

    def block(self, linear: int, rows: int, columns: int) -> tuple[int, int]:
        band = udiv(linear, self.group * columns)
        first = band * self.group
        height = min(rows - first, self.group)
        within = linear - band * (self.group * columns)
        column = udiv(within, height)
        return first + within - column * height, column


__all__ = ["Columns", "Grouped", "Order"]
