"""What `multistage` is specialised by."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from gemmkit.kernels.common.shared_memory import ALIGNMENT
from gemmkit.kernels.simt.spec import SimtSpec
from gemmkit.kernels.sm80.copies import AsyncCopies, Copies
from gemmkit.kernels.sm80.mainloop import Mainloop
from gemmkit.kernels.sm80.reach import ANYWHERE, AT_EDGES, Reach
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.registers import Fragment

FULL = 64                              # 32-bit registers of a thread's sums, from which on there is little room for others


@dataclass(frozen=True)
class Sm80Spec(SimtSpec):
    """``stages`` of A and B lie one behind the other; C, D and sums take the ring's place before and after the main loop.

    ``copy_parts`` is in how many parts the copies of a k-tile are started: between the products of as many steps. ``copies``
    is what the GPU has for them.
    """

    stages: int = 2
    mainloop: Mainloop = Mainloop()
    copy_parts: int = 1
    copies: Copies = AsyncCopies()

    @cached_property
    def has_inside(self) -> bool:
        """Whether rounds whose copies are in range have a loop of their own."""
        return self.condition.is_always and (self.a.route.sees_edges or self.b.route.sees_edges)    # type: ignore[attr-defined]

    @cached_property
    def reach(self) -> Reach:
        """What is known of the copies of the other rounds."""
        return AT_EDGES if self.has_inside else ANYWHERE

    @cached_property
    def packs_a(self) -> bool:
        """Whether fragments of A are kept as 32-bit words."""
        return _packs(self.operator.fragment_a)

    @cached_property
    def packs_b(self) -> bool:
        return _packs(self.operator.fragment_b)

    @cached_property
    def kept_a(self) -> Fragment:
        """A fragment of A as it is kept from the step that fetches it to the step that multiplies it."""
        return _kept(self.operator.fragment_a)

    @cached_property
    def kept_b(self) -> Fragment:
        return _kept(self.operator.fragment_b)

    @cached_property
    def stage_bytes(self) -> int:
        """From a stage to the next."""
        return -(-(self.b.offset + self.b.nbytes) // ALIGNMENT) * ALIGNMENT

    @cached_property
    def sums_at_once(self) -> int:
        """Loads of another block's sums that a thread has on their way (stream-K): few where its own take most registers."""
        nbytes = self.sums_count // self.threads * self.operator.fragment_c.dtype.itemsize
        return 8 if nbytes // 4 < FULL else 2

    @cached_property
    def shared_bytes(self) -> int:
        addend = self.c.nbytes if self.has_c else 0
        return max(self.stages * self.stage_bytes, self.d.nbytes, addend, self.reduction.shared_bytes(self))


def _packs(fragment: Fragment) -> bool:
    """16- and 8-bit elements: carried around a loop one by one, each would take a register."""
    size = fragment.dtype.itemsize
    return size <= 2 and fragment.dtype.names is None and fragment.count * size % 4 == 0


def _kept(fragment: Fragment) -> Fragment:
    return Fragment(np.dtype(np.uint32), fragment.count * fragment.dtype.itemsize // 4) if _packs(fragment) else fragment
