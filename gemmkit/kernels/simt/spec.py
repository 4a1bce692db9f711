"""What `singlestage` is specialised by."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from gemmkit.kernels.spec import Spec

S = TypeVar("S", bound="SimtSpec")
ALIGNMENT = 128                        # bytes: where the next operand may start in shared memory


@dataclass(frozen=True)
class SimtSpec(Spec):
    """What `singlestage` is specialised by."""

    def laid_out(self: S) -> S:
        """The specialisation with B behind A in shared memory."""
        offset = -(-self.a.nbytes // ALIGNMENT) * ALIGNMENT
        return dataclasses.replace(self, b=dataclasses.replace(self.b, offset=offset))

    @cached_property
    def is_split(self) -> bool:
        return self.cluster.splits > 1

    @cached_property
    def sums_width(self) -> int:
        """Accumulators that a thread hands over at a time: 16 bytes of them if they come so."""
        fragment = self.operator.fragment_c
        return math.gcd(fragment.count, max(1, 16 // fragment.dtype.itemsize))

    @cached_property
    def sums_bytes(self) -> int:
        """What a block's accumulators take in shared memory, where another block fetches them."""
        fragment = self.operator.fragment_c
        return self.threads * self.fragments_m * self.fragments_n * fragment.count * fragment.dtype.itemsize

    @cached_property
    def shared_bytes(self) -> int:
        """A begins at 0 and B behind it; C, D and sums that another block fetches begin at 0 at other times."""
        inputs = self.b.offset + self.b.nbytes
        addend = self.c.nbytes if self.has_c else 0
        return max(inputs, self.d.nbytes, addend, self.sums_bytes if self.is_split else 0)


__all__ = ["SimtSpec"]
