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
    Equivalent("constant changed", r"spec.store.thread, lane_index\(\), 33", "A warp's tile has 32 threads' tiles: one each, still."),
    Equivalent("order changed", r"spec.a.route.(rewrite|transpose).* -> spec.b.route.(rewrite|transpose)", "A's tile and B's lie apart."),
    Equivalent("wait dropped", r"settle\(.* -> ", "Without `settle` ptxas ends the group where A's registers are made: slow, and right."),
    Equivalent("wait dropped", r"return \(wgmma_wait\(1, sums\), fragments\) -> return \(sums, fragments\)",
               "Unrolled steps have registers of their own, and the wait that ends a round is still there: more are held at once."),
    Equivalent("(term|constant|bound).*", r"return 16 if self.is_squeezed",
               "It decides how many teams take turns, and how much they hold in registers at once: other ways to the same values."),
    Equivalent("never", r"if spec.d.whole: -> if False", "Coordinates that are clamped stay the same where all is whole."),
    Equivalent("never", r"if transform.is_identity: -> if False: return values", "An identity gives the values themselves, slowly."),
    Equivalent("always", r"if not operand.to_shared.is_identity: -> if True",
               "An identity changes no element, and TMA has written the operator's identity where the operand ends."),
    Equivalent("bound shifted", r"operand.to_shared.is_identity or .* < columns",
               "A tile that ends where its operand does is clipped: slower, and the same values."),
    Equivalent("order changed", r"-> spec.pipeline.expect_raw.* spec.pipeline.acquire",
               "The thread has waited for what landed there last, and knows by then that the phase is a new one."),
    Equivalent("statement dropped|never", r"tma_prefetch|grid_launch_dependents", "A hint: without it only time is lost."),
    Equivalent("sign changed", r"\(i \* self.count - p\) % BUFFERS", "There are two buffers: p and -p are the same."),
    Equivalent("order changed", r"-> named_barrier\(self.barrier \+ part.group, 128\) fence_async\(\)",
               "The thread that starts the copy fences behind the barrier, and so on the way from the others' writes to the copy: that is "
               "what the order of proxies asks for (PTX ISA, memory consistency model, causality order)."),
    Equivalent("order changed", r"-> if spec.stages > 2: rewrite_last\(.* start_copies",
               "As a ring of two stages has it: the copy waits for the stage and is not ahead, and nothing else."),
    Equivalent("order changed", r"^copy_to_shared\(spec.a, .* -> copy_to_shared\(spec.b, .* copy_to_shared\(spec.a, ",
               "A's tile and B's lie apart, and the barrier stands behind both."),
    Equivalent("order changed", r"-> mbarrier_init\(self.(free|empty)\(\).* mbarrier_init\(self.(filled|full)\(\)",
               "Two barriers of one thread, which nobody may touch before the block has met."),
    Equivalent("bound shifted|constant changed", r"return 'row' if (self.)?axis == 1 .* -> return 'row' if",
               "How lanes are dealt out over a warp's tile, in loads and stores alike: each of its parts still has one lane."),
    Equivalent("constant changed", r"max\(inputs, .* else 0\) -> .* else 1\)", "The tiles of A and B have more bytes than 1."),
    Equivalent("never", r"if spec.cluster.is_single: -> if False: barrier\(\) else: cluster_barrier\(\)",
               "A block that was launched without a cluster is one of one block: all its threads meet, with the same order of memory."),
    Equivalent("phase flipped", r"-> .*(expect|expect_raw|commit|start|stage_of|split_stage|split|rewrite_inside|"
               r"rewrite_edge|transpose)\([^()]*slot\._replace\(phase", "The stage alone of the slot is read there."),
    Equivalent("phase flipped", r"-> start_copies\(.*slot\._replace\(phase", "The stage alone of the slot is read there."),
    Equivalent("done twice", r"(wgmma_commit|tma_commit|commit_copies|copies.commit)\(\) -> ",
               "An empty group more: a wait that leaves so many groups on their way waits for more of the others."),
    Equivalent("always", r"if rank == 0: -> if True: peer = 1",
               "Other blocks of the cluster fetch and merge, too, and nothing reads what they have then."),
    Equivalent("constant changed", r"max\(1, 17 // fragment.dtype.itemsize", "As many elements of 2 to 16 bytes fit 17 bytes as 16."),
    Equivalent("order changed", r"-> mbarrier_wait\(self.free\(\).* mbarrier_expect\(self.filled\(\)",
               "The phase ends with its one arrival, which expects the bytes: these may come before."),
    Equivalent(".*", r"-> rank = 0 if spec.cluster.is_single", "A constant in place of a run-time zero."),
    Equivalent("never", r"if operand.layout.is_as_stored\(.* -> if False", "Blocks that need no mask are masked: slower, the same values."),
    Equivalent("never", r"if is_pairwise\(.* -> if False", "One element at a time in place of two: slower, the same values."),
    Equivalent("bound shifted", r"if at.m \+ size.M <= shape.M and .* -> if at.m \+ size.M <=? shape.M and .* < shape",
               "A tile that ends where its matrix does goes the masked way: slower, the same values."),
    Equivalent("constant changed", r"if thread_index\(\) == 0: -> if thread_index\(\) == 1: fill_stages",
               "Another of the producer's threads starts the copies."),
    Equivalent("order changed", r"-> copy_all\(.* load_staged\(", "An operand goes by one of the two: loads and copies are of different ones."),
    Equivalent("always", r"share.parts // .* == share.part: -> if True.* piece_of\(thread_tiles\[j\], operand, piece\), True\)",
               "Every part has all copies: the same values, several times."),
    Equivalent("term dropped", r"== share.part: -> if (i \* len\(thread_tiles\)|j) \* share.parts", "Another part's, once: copies are dealt otherwise."),
    Equivalent("constant changed", r"addend = .* else 0 -> .* else 1", "The ring has more bytes than 1."),
    Equivalent("term dropped", r"kept.places\[1\] = \(thread_index\(\) \* 0,\) -> ", "Nobody asks for places of an operator that has none."),
    Equivalent("constant changed", r"^kept = Kept\(.* -> .*(3 \* spec.fragments|PLACE, 3|OFFSET, 2)", "More registers than are used."),
    Equivalent("always", r"^if goes_on: -> if True: spec.copies.commit\(\) meet_stage\(spec\)$", "The block waits and meets once more at the end."),
    Equivalent("always", r"^if this.fills: -> if True: store_staged", "What is stored behind the last k-tile is not read."),
    Equivalent("constant changed", r"^fold\(.*, step_\w+, 0, .* -> fold\(.*, step_\w+, 1, ", "Nobody reads what these folds carry."),
    Equivalent("statement dropped", r"^keep_places\(", "It tells LLVM to keep a value, and changes none."),
    Equivalent("always", r"if not spec.condition.is_always: -> if True", "A condition that always holds is asked."),
    Equivalent("bound shifted", r"if operand.thread.size\[0\] >= 1", "Of one row, remainders are 0 and quotients the number itself."),
    Equivalent("(term|constant).*", r"return size <= 2 and .* -> .*(fragment.count|size) (==|% \d+ ==|\* size % \d+ == [1-9])",
               "Fragments that are not packed take more registers: the same values."),
    Equivalent("constant changed", r"^return 0 -> return 1$", "Of shared memory, a byte more: the ring has more than 1."),
    Equivalent("never", r"% spec.sums_at_once == 0: -> if False: warp_barrier", "It limits how many loads are on their way at a time."),
    Equivalent("never", r"if not self.by_workspace: -> if False: return self.splits", "N divides among the blocks of a cluster: the rules see to it."),
    Equivalent("constant changed", r"accumulate if is_first else 2\)", "Any number but 0 adds to the sums."),
    Equivalent("always", r"if tile.count > self.chunk: -> if True", "One chunk is a loop of one."),
    Equivalent("half a condition", r"if layout.axis == 0 and self.across_by_matrices: -> if self.across_by_matrices",
               "Elements of 16 bits along the other axis have gone by matrices before."),
    Equivalent("constant changed", r"place_[ab]\(layout.plane, tile, leading\[0\]\) -> .*leading\[1\]", "Planes of a layout have lines of one length."),
    Equivalent("bound shifted|sign changed|constant changed", r"row = i if j % 2 == 0 else .* -> row = i if j % 2 != 0", "The order of products of different sums."),
    Equivalent("sign changed", r"\(step \+ 1\) % 2.* -> .*\(step - 1\) % 2", "There are two sets of fragments: either is the other one."),
    Equivalent("order changed", r"wait\(\w*slot\) -> \S+ring\.wait\(\w*slot\) \S+ring\.wait\(\w*slot\)$", "Two waits, and the product behind both."),
    Equivalent("constant changed", r"max\(keys - 1, 0\).* -> .*max\(keys - 1, 1\)", "Of one key, as of two, the last block is the first."),
    Equivalent("term dropped", r"Slot\(zero, zero \+ 1\).* -> .*Slot\(zero, 1\)", "A constant in place of a run-time one."),
    Equivalent("constant changed", r"type\(layout\).load is Plain.load .* % 4 == 1\)",
               "Lines go as elements in place of words: slower, the same values."),
]


def reason(fault: Fault, after: str) -> Equivalent | None:
    """Why a mutant is none, if it is listed."""
    return next((entry for entry in EQUIVALENT if entry.covers(fault, after)), None)
