"""``complete_reductions``: partial states of D's rows and columns, combined and stored, behind the product that kept them.

1. A block takes 32 rows (or columns), a lane each; its warps take the slots of partial states in turn.
2. Each lane combines its slots, in their order.
3. The warps' states meet in shared memory; the first warp combines them in the order of the warps, and stores the result.

So neighbouring lanes load neighbouring states, and the order of combinations depends on the number of slots alone. All
reductions of a chain of epilogues are one launch, for every product of a stack a row of blocks.
"""

from __future__ import annotations

from typing import Any

from gemmkit.component_products import of_product
from gemmkit.components import Component
from gemmkit.lang.component_class import dataclass
from gemmkit.ptx.memory import load_shared, shared, store_shared
from gemmkit.ptx.special import barrier, block_x, lane_index, thread_index, udiv

LANES, MOST_WARPS, SLOTS = 32, 32, 4   # of a block's warps, and slots of a lane for which another warp is taken


@dataclass(frozen=True)
class Team(Component):
    """The threads of a block: ``warps`` warps. ``blocks`` of them are a product's."""

    warps: int
    blocks: int

    def batch(self) -> int:
        """The product of this block."""
        return udiv(block_x(), self.blocks)

    def index(self) -> int:
        """The row (or column) of this thread."""
        return (block_x() - self.batch() * self.blocks) * LANES + lane_index()

    def first(self) -> int:
        """The first of this thread's slots."""
        return udiv(thread_index(), LANES)

    def is_first(self) -> bool:
        return thread_index() < LANES

    def gather(self, reduction: Any, state: Any) -> Any:
        """The states of all warps, combined, in the first one."""
        left = shared(reduction.state, 0)
        barrier()                                      # what was left there last has been read
        store_shared(left, thread_index(), 0, (state,))
        barrier()
        if thread_index() < LANES:
            warp = 1
            while warp < self.warps:
                state = reduction.combine(state, load_shared(left, thread_index(), warp * LANES, 1)[0])
                warp += 1
        return state


def complete_reductions(team: Any, epilogue: Any, observer: Any, shape: Any) -> None:
    """See the module. Launched with ``team.warps`` warps a block, ``team.blocks`` blocks a product."""
    own, sizes = of_product(epilogue, team.batch()), of_product(shape, team.batch())
    own.complete(team, sizes)
    observer.complete(team, sizes)


def warps_for(slots: int) -> int:
    """How many warps share the slots of a row.

    >>> [warps_for(n) for n in (0, 4, 5, 16, 10**6)]
    [1, 1, 2, 4, 32]
    """
    warps = 1
    while warps < MOST_WARPS and warps * SLOTS < slots:
        warps *= 2
    return warps
