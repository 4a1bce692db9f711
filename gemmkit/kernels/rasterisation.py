"""CTA orders: which tile of D the n-th block computes. Neighbours in time should share operands in the L2 cache."""

from __future__ import annotations

from gemmkit.components import Component
from gemmkit.lang.component_class import dataclass
from gemmkit.ptx.special import udiv


@dataclass(frozen=True)
class Order(Component):
    """``block(linear, rows, columns)`` -> (row, column) of a grid of tiles; every tile exactly once."""

    device_methods = ("block", "await_tile")

    #: Whether operands arrive while the kernel runs (`gemmkit.kernels.gated`): then a kernel calls ``await_tile`` before a
    #: tile's first load.
    gates = False

    def await_tile(self, linear: int, opened: int) -> int:
        """Return when a tile's operands are there, with what this thread has waited for: the ``opened`` of its next call (-1
        in the first). Here they are there before the launch."""
        return opened

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


@dataclass(frozen=True)
class Hilbert(Order):
    """A Hilbert curve through a grid of any shape: consecutive tiles are neighbours in the grid.

    The rectangle is divided as Hilbert's square is, into parts whose extents need not be powers of two; each part is
    entered and left at corners that meet those of the next. (Where an odd extent leaves no other way a single step of the
    whole curve is diagonal.) Of the parts only the one that holds ``linear`` is looked into, so a tile costs about
    2 log2 of the longer extent turns of a short loop, without division or table. That is what it has over `Grouped`: at
    every scale the tiles in flight form a patch about as high as it is wide, whatever the number of blocks in flight.

    >>> [Hilbert().block(n, 2, 3) for n in range(6)]
    [(0, 0), (1, 0), (1, 1), (1, 2), (0, 2), (0, 1)]
    """

    def block(self, linear: int, rows: int, columns: int) -> tuple[int, int]:
        # A part starts at (m, n), goes `wide` tiles along its main axis and `high` along the other. `turned` says that
        # the main axis is M; along both it may run backwards, which `step` and `rise` (1 or -1) say.
        turned = rows > columns
        wide, high = max(rows, columns), min(rows, columns)
        m, n, rest, step, rise = 0, 0, linear, 1, 1
        while wide > 1 and high > 1:
            half, other = wide >> 1, high >> 1
            if 2 * wide > 3 * high:
                # Long: two halves, one after the other; the first of even length, so that it ends on the near side.
                half += half & 1 if wide > 2 else 0
                if rest < half * high:
                    wide = half
                else:
                    rest -= half * high
                    m, n = (m + half * step, n) if turned else (m, n + half * step)
                    wide -= half
            else:
                # A leg away (turned), the long side along the far end, and a leg back (turned and backwards).
                other += other & 1 if high > 2 else 0
                legs, top = half * other, wide * (high - other)
                if rest < legs:
                    turned, wide, high, step, rise = not turned, other, half, rise, step
                elif rest < legs + top:
                    rest -= legs
                    m, n = (m, n + other * rise) if turned else (m + other * rise, n)
                    high -= other
                else:
                    rest -= legs + top
                    along, across = (wide - 1) * step, (other - 1) * rise
                    m, n = (m + along, n + across) if turned else (m + across, n + along)
                    turned, wide, high, step, rise = not turned, other, wide - half, -rise, -step
        distance = rest * (step if wide > 1 else rise)
        if turned == (wide > 1):
            return m + distance, n
        return m, n + distance
