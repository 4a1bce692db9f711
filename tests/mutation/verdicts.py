"""Mutants that survive because nothing is wrong with them: which, and why.

An entry that matches no survivor of a whole run is reported, so that none outlives what it was about.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.mutation.seeding import Fault


@dataclass(frozen=True)
class Equivalent:
    """Mutants of an ``operator`` whose statement matches ``pattern`` (as it was, " -> ", as it is), and the reason."""

    operator: str
    pattern: str
    reason: str

    def covers(self, fault: Fault, after: str) -> bool:
        return (re.fullmatch(self.operator, fault.operator) is not None
                and re.search(self.pattern, f"{fault.before} -> {after}") is not None)


EQUIVALENT: list[Equivalent] = [
    Equivalent("count changed", r"wgmma_wait\(.* - 1, ", "It waits for more groups than it has to."),
    Equivalent("count changed", r"-> tma_wait_read\(.* - 1\)", "It waits for more groups than it has to."),
    Equivalent("constant changed", r"itemsize == 3: each\(put_matrix", "Pairs one by one: slower, and to the same places."),
    Equivalent("constant changed", r"spec.panel_thread, lane_index\(\), 33", "A warp's tile has 32 threads' tiles: one each, still."),
    Equivalent("order changed", r"if spec.a_(changes|turns).* -> if spec.b_(changes|turns)", "A's tile and B's lie apart."),
    Equivalent("wait dropped", r"settle\(.* -> ", "Without `settle` ptxas ends the group where A's registers are made: slow, and right."),
    Equivalent("wait dropped", r"return \(wgmma_wait\(1, sums\), fragments\) -> return \(sums, fragments\)",
               "Unrolled steps have registers of their own, and the wait that ends a round is still there: more are held at once."),
    Equivalent("constant changed", r"thread_index\(\) % 129", "Another of the warpgroup's threads does it."),
    Equivalent("(term|constant).*", r"limit = self._most_held|return 16 if self.is_squeezed", "It decides how many teams, no more."),
    Equivalent("never", r"if spec.d.whole: -> if False", "Coordinates that are clamped stay the same where all is whole."),
    Equivalent("never", r"if transform.is_identity: -> if False: return values", "An identity gives the values themselves, slowly."),
    Equivalent("always", r"if not operand.to_shared.is_identity: -> if True",
               "An identity changes no element, and TMA has written the operator's identity where the operand ends."),
    Equivalent("always", r"if spec.is_changing: -> if True: change_last", "No stage is behind where none is changed in place."),
    Equivalent("bound shifted", r"operand.to_shared.is_identity or .* < columns",
               "A tile that ends where its operand does is clipped: slower, and the same values."),
    Equivalent("order changed", r"-> mbarrier_expect\(landed, .* mbarrier_wait\(empty",
               "The thread has waited for what landed there last, and knows by then that the phase is a new one."),
    Equivalent("operands swapped", r"-> put_inside\(operand, held, pointer, block, at_j, at_i", "Nothing asks where it lies."),
    Equivalent("statement dropped|never", r"tma_prefetch|grid_launch_dependents", "A hint: without it only time is lost."),
    Equivalent("sign changed", r"\(i \* spec.own_panels - p\) % spec.d_buffers", "There are two buffers: p and -p are the same."),
    Equivalent("order changed", r"-> named_barrier\(PANEL \+ group, 128\) fence_async\(\)",
               "The thread that starts the copy fences too, and knows of the others' writes by then."),
    Equivalent("order changed", r"if spec.pending_steps == 0: give_back_last",
               "Where no group may be pending the stage was read before this step began."),
]


def reason(fault: Fault, after: str) -> Equivalent | None:
    """Why a mutant is none, if it is listed."""
    return next((entry for entry in EQUIVALENT if entry.covers(fault, after)), None)
