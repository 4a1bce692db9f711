"""Shared tiles that keep K in the order of a tensor's memory, in boxes of 8 x 8."""

from __future__ import annotations

from gemmkit.lang.component_class import dataclass
from gemmkit.layouts.plain import Padded

RUN = 8                                # neighbours in the tensor's memory: 16 bytes of 16-bit elements
BOX = RUN * RUN


@dataclass(frozen=True)
class Boxed(Padded):
    """A padded shared tile of a tensor whose neighbours in memory are eight apart along K (`Tensor`, ``comb`` = 8).

    K is cut into boxes of 64: element ``64 r + 8 q + p`` of K, with p and q below 8, stands at ``64 r + 8 p + q`` of its
    line. So 16 bytes of the tensor's memory are 16 bytes of the tile. `operators.BoxMMAOp` reads such a tile, and
    `gemmkit.kernels.sm80.boxes.CpAsyncBoxes` fills it; coordinates along K are positions in the line.

    >>> from gemmkit.layouts import ColMajor
    >>> [Boxed(ColMajor("float16"), 8).element_at(n) for n in (0, 1, 8, 64)]
    [0, 8, 1, 64]

    Raises what `Padded` raises.
    """

    __init__ = Padded.__init__

    def element_at(self, n: int) -> int:
        """Which element of K stands at position ``n`` of a line."""
        return n // BOX * BOX + n % RUN * RUN + n // RUN % RUN

    def __repr__(self) -> str:
        return f"Boxed({self.layout!r}, {self.padding})"


__all__ = ["BOX", "RUN", "Boxed"]
