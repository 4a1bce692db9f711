"""What `quantised` is specialised by."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from gemmkit.kernels.simt.spec import SimtSpec
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.registers import Fragment

WORD = np.dtype(np.uint32)


@dataclass(frozen=True)
class QuantisedSpec(SimtSpec):
    """``stages`` parts of a warp are on their way."""

    stages: int = 1

    @cached_property
    def warps_n(self) -> int:
        """Warps side by side along the columns of a tile."""
        return self.block.size.N // self.compute_warp.size.N

    @cached_property
    def warps_k(self) -> int:
        """Warps that divide a k-tile."""
        return self.warps // self.warps_n

    @cached_property
    def slabs(self) -> int:
        """Operations along K in a warp's part of a k-tile."""
        return self.steps_k

    @cached_property
    def vectors_a(self) -> int:
        """16 bytes of a row that it loads for an operation."""
        return self.operator.pairs // 4                                    # type: ignore[attr-defined]

    @cached_property
    def loads_b(self) -> int:
        """16 bytes of B that a lane loads for a part."""
        return self.slabs * self.fragments_n

    @cached_property
    def loads_a(self) -> int:
        """All that it loads of A for a part."""
        return self.slabs * self.fragments_m * self.vectors_a

    @cached_property
    def pieces_of_fragment(self) -> int:
        """A lane's sums of an operation, in pieces that are moved at a time."""
        return self.operator.fragment_c.count // self.sums_width

    @cached_property
    def pieces(self) -> int:
        """Those of all operations of a warp."""
        return self.fragments_m * self.fragments_n * self.pieces_of_fragment

    @cached_property
    def words(self) -> Fragment:
        """A lane's words of B for an operation: of four columns."""
        return Fragment(WORD, 4)

    @cached_property
    def vectors(self) -> Fragment:
        return Fragment(WORD, 4)

    @cached_property
    def scale_words(self) -> Fragment:
        return Fragment(WORD, 2)

    @cached_property
    def zero_words(self) -> Fragment:
        return Fragment(WORD, 1)

    @cached_property
    def shared_bytes(self) -> int:
        """Sums of the warps, or of another block, or D."""
        sums = self.sums_count * self.operator.fragment_c.dtype.itemsize if self.warps_k > 1 else 0
        return max(sums, self.d.nbytes, self.reduction.shared_bytes(self))
