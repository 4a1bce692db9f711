"""What `multistage` is specialised by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gemmkit.kernels.sm80.mainloop import Mainloop
from gemmkit.kernels.simt.spec import ALIGNMENT, SimtSpec


@dataclass(frozen=True)
class Sm80Spec(SimtSpec):
    """``stages`` of A and B lie one behind the other; C, D and sums take the ring's place before and after the main loop.

    ``copy_parts`` is in how many parts the copies of a k-tile are started: between the products of as many steps.
    """

    stages: int = 2
    mainloop: Mainloop = Mainloop()
    copy_parts: int = 1

    @cached_property
    def stage_bytes(self) -> int:
        """From a stage to the next."""
        return -(-(self.b.offset + self.b.nbytes) // ALIGNMENT) * ALIGNMENT

    @cached_property
    def shared_bytes(self) -> int:
        addend = self.c.nbytes if self.has_c else 0
        return max(self.stages * self.stage_bytes, self.d.nbytes, addend, self.sums_bytes if self.is_split else 0)


__all__ = ["Sm80Spec"]
