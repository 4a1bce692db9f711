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
    Equivalent("wait dropped", r"settle\(.* -> ", "Without `settle` ptxas ends the group where A's registers are made: slow, and right."),
    Equivalent("wait dropped", r"return \(wgmma_wait\(1, sums\), fragments\) -> return \(sums, fragments\)",
               "Unrolled steps have registers of their own, and the wait that ends a round is still there: more are held at once."),
    Equivalent("never", r"if spec.d.whole: -> if False", "Coordinates that are clamped stay the same where all is whole."),
    Equivalent("statement dropped|never", r"prefetch|grid_launch_dependents", "A hint: without it only time is lost."),
    Equivalent("order changed", r"^copy_to_shared\(spec.a, .* -> copy_to_shared\(spec.b, .* copy_to_shared\(spec.a, ",
               "A's tile and B's lie apart, and the barrier stands behind both."),
    Equivalent("order changed", r"-> mbarrier_init\(self.(free|empty)\(\).* mbarrier_init\(self.(filled|full)\(\)",
               "Two barriers of one thread, which nobody may touch before the block has met."),
    Equivalent("bound shifted|constant changed", r"return 'row' if (self.)?axis == 1 .* -> return 'row' if",
               "How lanes are dealt out over a warp's tile, in loads and stores alike: each of its parts still has one lane."),
    Equivalent("phase flipped", r"-> .*(expect|expect_raw|commit|start|stage_of|split_stage|split|rewrite_inside|"
               r"rewrite_edge|transpose)\([^()]*slot\._replace\(phase", "The stage alone of the slot is read there."),
    Equivalent("phase flipped", r"-> (start_copies|load_chunk|each\(start_\w+|.*release\(spec\.ring\.skip)\(.*slot\._replace\(phase", "The stage alone of the slot is read there."),
    Equivalent("done twice", r"(wgmma_commit|tma_commit|commit_copies|copies.commit)\(\) -> ",
               "An empty group more: a wait that leaves so many groups on their way waits for more of the others."),
    Equivalent("always", r"if rank == 0: -> if True: peer = 1",
               "Other blocks of the cluster fetch and merge, too, and nothing reads what they have then."),
    Equivalent("constant changed", r"max\(1, 17 // fragment.dtype.itemsize", "As many elements of 2 to 16 bytes fit 17 bytes as 16."),
    Equivalent("never", r"if operand.layout.is_as_stored\(.* -> if False", "Blocks that need no mask are masked: slower, the same values."),
    Equivalent("never", r"if is_pairwise\(.* -> if False", "One element at a time in place of two: slower, the same values."),
    Equivalent("bound shifted", r"if at.m \+ size.M <= shape.M and .* -> if at.m \+ size.M <=? shape.M and .* < shape",
               "A tile that ends where its matrix does goes the masked way: slower, the same values."),
    Equivalent("constant changed", r"if thread_index\(\) == 0: -> if thread_index\(\) == 1: fill_stages",
               "Another of the producer's threads starts the copies."),
    Equivalent("order changed", r"-> copy_all\(.* load_staged\(", "An operand goes by one of the two: loads and copies are of different ones."),
    Equivalent("statement dropped", r"^keep_places\(", "It tells LLVM to keep a value, and changes none."),
    Equivalent("always", r"if not spec.condition.is_always: -> if True", "A condition that always holds is asked."),
    Equivalent("bound shifted", r"if operand.thread.size\[0\] >= 1", "Of one row, remainders are 0 and quotients the number itself."),
    Equivalent("(term|constant).*", r"return size <= 2 and .* -> .*(fragment.count|size) (==|% \d+ ==|\* size % \d+ == [1-9])",
               "Fragments that are not packed take more registers: the same values."),
    Equivalent("constant changed", r"^return 0 -> return 1$", "Of shared memory, a byte more: the ring has more than 1."),
    Equivalent("never", r"% spec.sums_at_once == 0: -> if False: warp_barrier", "It limits how many loads are on their way at a time."),
    Equivalent("constant changed", r"accumulate if is_first else 2\)", "Any number but 0 adds to the sums."),
    Equivalent("always", r"if tile.count > self.chunk: -> if True", "One chunk is a loop of one."),
    Equivalent("half a condition", r"if layout.axis == 0 and self.mn_major_by_matrices: -> if self.mn_major_by_matrices",
               "Elements of 16 bits along the other axis have gone by matrices before."),
    Equivalent("constant changed", r"place_[ab]\(layout.plane, tile, leading\[0\]\) -> .*leading\[1\]", "Planes of a layout have lines of one length."),
    Equivalent("sign changed", r"\(step \+ 1\) % 2.* -> .*\(step - 1\) % 2", "There are two sets of fragments: either is the other one."),
    Equivalent("order changed", r"wait\(\w*slots?(\[0\])?\) -> \S+ring\.wait\(\S+\) \S+ring\.wait\(\S+\)$", "Two waits, and the product behind both."),
    Equivalent("constant changed", r"max\(keys - 1, 0\).* -> .*max\(keys - 1, 1\)", "Of one key, as of two, the last block is the first."),
    Equivalent("term dropped", r"Slot\(zero, zero \+ 1\).* -> .*Slot\(zero, 1\)", "A constant in place of a run-time one."),
    Equivalent("constant changed", r"type\(layout\).load is Plain.load .* % 4 == 1\)",
               "Lines go as elements in place of words: slower, the same values."),
    Equivalent("order changed", r"-> wgmma_fence\(\) spec\.\w+\.wait\(", "The fence orders registers, which no wait for a barrier touches."),
    Equivalent("constant changed", r"limits_of\(spec, place, 2\)\) -> .*limits_of\(spec, place, 3\)",
               "A thread's values 2 and 3 lie in one row."),
    Equivalent("order changed", r"^spec\.turns\.give\(.* -> .*wgmma_wait\(0", "The turn is given later: slower, the same values."),
    Equivalent("always", r"^if spec\.has_bias: -> if True: store_biases\(spec, following", "Nothing is stored, and the block meets once more."),
    Equivalent("order changed", r"^named_barrier\(.* -> if thread_index\(\) % 128 == 0: tma_commit\(\) named_barrier",
               "A commit is of the copies that the thread has started: none since the barrier, nor in front of it."),
    Equivalent("order changed", r"^if spec\.has_bias: -> wait_copies\(0\) if spec\.has_bias: store_biases",
               "Biases and copies are both there before the barrier behind."),
    Equivalent("order changed", r"-> spec\.store\.initialise\(\) spec\.exchange\.initialise",
               "Barriers of one thread, which nobody may touch before the block has met."),
    Equivalent("order changed", r"^if not spec\.a\.route\.uses_tma: -> if not spec\.b\.route\.uses_tma", "A's tile and B's lie apart."),
    Equivalent("phase flipped", r"-> .*(spec\.store\.begin\(|(tile|place) = ConsumerPart\().*turn \^ 1",
               "What fetches a subtile asks for no phase; nor does what stores a fold."),
    Equivalent("constant changed", r"steps = max\(1, .* -> .*max\(2, ", "A k-tile more lies beyond K, and adds nothing."),
    Equivalent("term dropped", r"or size % CHUNK: return operand", "No line is clipped: its elements go one by one, slower, the same values."),
    Equivalent("constant changed", r"sums = config\.compute_warp.* -> .*itemsize // 5\)",
               "An estimate of registers: lines go clipped, or element by element, the same values."),
    Equivalent("term dropped", r"-> return Swizzled\(RowMajor\(self.dtype\), line_of\(self.n\)\)",
               "Lines of half the width, for stores and loads alike: more of them meet in a bank."),
    Equivalent("term dropped", r"return 64 if width % 64 == 0 else 32 -> return 64 if width == 0",
               "Panels of half the width, for copies and products alike: there are more of them."),
    Equivalent("constant changed", r"OrderBarrier\(self.consumers, 1 \+ self.consumers.* -> .*2 \+ self.consumers", "Other named barriers, which nobody uses."),
    Equivalent("never", r"if not self.by_workspace: -> if False: return self.shares", "N divides among the blocks of a cluster: the rules see to it."),
    Equivalent("sign changed", r"\(self.row\(rank\) \+ n\) % self.m -> .*\(self.row\(rank\) - n\) % self.m", "All other blocks, in another order."),
    Equivalent("constant changed", r"^if row.spec.team.thread\(\) == 0: -> if row.spec.team.thread\(\) == 1", "Another thread stores the row's value, which all have."),
    Equivalent("update dropped", r"^opened = waited -> pass", "It waits for what has arrived once more."),
    Equivalent("constant changed", r"lane_index\(\) & first << n == 0 else .* -> .* == 1 else",
               "Which of two states comes first, so that lanes have the same bits: a reduction may be given them in either order."),
    Equivalent("bound shifted", r"if n < shape.N else shape.K \+ 1 -> .*if n <= shape.N", "A block beyond D watches, and keeps nothing: `keep` asks again."),
    Equivalent("bound shifted", r"== n // route.share: -> .*!= n // route.share", "In a cluster of two the other block brings the share, once."),
    Equivalent("bound shifted", r"return self.sent_bytes > 0 -> return self.sent_bytes >= 0", "A fence more than is needed."),
    Equivalent("never", r"^if length == operand.thread.extents\[axis\] .* -> if False", "How lanes are dealt out over D's tile: each of its parts still has one lane."),
    Equivalent("bound shifted", r"^following = beside_own\(.* -> .* <= row\.spec\.source\.pieces",
               "Behind the last piece the row's first is loaded once more, and nobody looks at it."),
]


def reason(fault: Fault, after: str) -> Equivalent | None:
    """Why a mutant is none, if it is listed."""
    return next((entry for entry in EQUIVALENT if entry.covers(fault, after)), None)
