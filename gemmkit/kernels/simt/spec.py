"""What `singlestage` is specialised by."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import TypeVar

from gemmkit.kernels.common.shared_memory import ALIGNMENT
from gemmkit.kernels.spec import Spec
from gemmkit.lang.component_class import dataclass

S = TypeVar("S", bound="SimtSpec")


@dataclass(frozen=True)
class SimtSpec(Spec):
    """What `singlestage` is specialised by."""

    def laid_out(self: S) -> S:
        """The specialisation with B behind A in shared memory."""
        offset = -(-self.a.nbytes // ALIGNMENT) * ALIGNMENT
        return dataclasses.replace(self, b=dataclasses.replace(self.b, offset=offset))

    @cached_property
    def is_split(self) -> bool:
        """Whether blocks share the K of a tile."""
        return self.reduction.is_shared

    @cached_property
    def sums_width(self) -> int:
        """Accumulators that a thread hands over at a time: 16 bytes of them if they come so."""
        fragment = self.operator.fragment_c
        return math.gcd(fragment.count, max(1, 16 // fragment.dtype.itemsize))

    @cached_property
    def sums_count(self) -> int:
        """Accumulators of a block."""
        return self.threads * self.fragments_m * self.fragments_n * self.operator.fragment_c.count

    @cached_property
    def sums_pieces(self) -> int:
        """In how many accesses they are moved."""
        return self.sums_count // self.sums_width

    @cached_property
    def shared_bytes(self) -> int:
        """A begins at 0 and B behind it; C, D and sums that another block fetches begin at 0 at other times."""
        inputs = self.b.offset + self.b.nbytes
        addend = self.c.nbytes if self.has_c else 0
        return max(inputs, self.d.nbytes, addend, self.reduction.shared_bytes(self))
