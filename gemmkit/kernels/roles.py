"""Who does what in the warp-specialised kernel: the fields of its `Spec`, the roles of warps, what each of them holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from gemmkit.epilogues import Default
from gemmkit.kernels.spec import Operand, Spec
from gemmkit.tiling import Tile

HELD = 32                              # registers of tiles that a producer's thread changes in place at a time

# Registers of a producer's and a consumer's thread, by the numbers of their warpgroups: what the block got at launch, dealt
# out anew. A producer that runs layouts and transforms needs more of them than one that starts copies; beside two consumers
# it keeps the 168 that everyone begins with.
COPYING = {(1, 2): (24, 240), (1, 3): (32, 160), (2, 2): (40, 208)}
WORKING = {(1, 3): (56, 152), (2, 2): (88, 168)}
CHANGING = {(1, 2): (72, 216), **WORKING}
LANDING = {**WORKING, (1, 2): (120, 192)}        # a producer that takes apart what has landed
TURNING = {(1, 2): (104, 200), **WORKING}
SQUEEZED = {(1, 2): (56, 224)}         # a producer that works, beside consumers with more than 128 registers of sums


@dataclass(frozen=True)
class PipelineRoles(Spec):
    """The fields of `gemmkit.kernels.pipeline.PipelineSpec`, and what roles follow from them.

    ``splits`` blocks of a cluster share the K of a tile.

    ``warps`` are those that multiply, in warpgroups of four (the consumers). ``schedule`` is "cooperative" (they share a
    tile of D, each its rows) or "pingpong" (each has tiles of its own, in turn). ``a_engine``, ``b_engine`` and
    ``d_engine`` say which operands the copy engine (TMA) moves; the others go through ``producer_warps`` (A, B) or leave
    from the registers (D).
    ``a_lands`` and ``b_lands`` are for numbers of several parts that the engine brings and warps then take apart; with
    ``a_by_registers`` those who multiply take A apart themselves, or transform it (`gemmkit.kernels.by_registers`).
    ``a_gathers`` and ``b_gathers`` are for operands that threads can have copied piece by piece (`gemmkit.kernels.gather`).
    ``d_run`` is how many neighbours of D threads store together where the engine does not, 0 if there are none; ``d_apart``
    how far apart the rows of a panel are that lie next to each other in memory; with ``d_down`` a warp stores down rows.
    """

    stages: int
    schedule: str
    cluster_m: int
    cluster_n: int
    producer_warps: int
    a_engine: bool
    b_engine: bool
    d_engine: bool
    a_lands: bool = False
    b_lands: bool = False
    a_gathers: bool = False
    b_gathers: bool = False
    d_run: int = 0
    d_apart: int = 1
    d_down: bool = False
    a_by_registers: bool = False

    # -- roles ------------------------------------------------------------------------------------------------------

    @cached_property
    def threads(self) -> int:
        return 32 * (self.warps + self.producer_warps)

    @cached_property
    def consumers(self) -> int:
        return self.warps // 4

    @cached_property
    def producers(self) -> int:
        """Warpgroups that produce."""
        return self.producer_warps // 4

    @cached_property
    def is_pingpong(self) -> bool:
        return self.schedule == "pingpong"

    @cached_property
    def is_working(self) -> bool:
        """Whether the producer's warps move an operand themselves, or change one in place."""
        return self.is_changing or not (self.is_gathering or (self.a_engine and self.b_engine))

    @cached_property
    def is_gathering(self) -> bool:
        """Whether the producer's threads start copies of what the engine does not bring, and look at nothing."""
        return ((self.a_gathers or self.b_gathers) and (self.a_engine or self.a_gathers)
                and (self.b_engine or self.b_gathers) and not self.is_changing)

    @cached_property
    def a_changes(self) -> bool:
        """Whether A is transformed in place, once the engine has brought it."""
        goes = self.a_turns or self.a_by_registers
        return self.a_engine and not goes and (self.a.is_masked or not self.a.to_shared.is_identity)

    @cached_property
    def b_changes(self) -> bool:
        return self.b_engine and not self.b_turns and (self.b.is_masked or not self.b.to_shared.is_identity)

    @cached_property
    def a_turns(self) -> bool:
        """Whether A's tiles are turned in place (and transformed on the way)."""
        return self.a_engine and self.a.brought != self.a.plane

    @cached_property
    def b_turns(self) -> bool:
        return self.b_engine and self.b.brought != self.b.plane

    @cached_property
    def is_turning(self) -> bool:
        return self.a_turns or self.b_turns

    @cached_property
    def is_changing(self) -> bool:
        """Whether an operand is changed in place; then the engine moves both."""
        return self.a_changes or self.b_changes or self.is_turning

    @cached_property
    def peers(self) -> int:
        """Blocks of a cluster: those that share operands, or the K of a tile."""
        return self.cluster_m * self.cluster_n * self.splits

    @cached_property
    def is_cluster(self) -> bool:
        return self.peers > 1

    @cached_property
    def shares(self) -> bool:
        """Whether the blocks of a cluster share an operand."""
        return self.shares_a or self.shares_b

    @cached_property
    def shares_a(self) -> bool:
        """Whether the blocks of a cluster have the same rows, so that each loads a part of A for all."""
        return self.cluster_n > 1

    @cached_property
    def shares_b(self) -> bool:
        return self.cluster_m > 1

    @cached_property
    def everyone(self) -> int:
        """The mask of all blocks of a cluster."""
        return (1 << self.peers) - 1

    @cached_property
    def _registers(self) -> tuple[int, int] | None:
        table = (WORKING if self.is_gathering else COPYING if not self.is_working else SQUEEZED if self.is_squeezed
                 else TURNING if self.is_turning else CHANGING if self.is_changing else LANDING if self.is_landing
                 else WORKING)
        return table.get((self.producers, self.consumers))

    @cached_property
    def is_squeezed(self) -> bool:
        fragment, sets = self.operator.fragment_c, 3 if self.is_promoted else 1
        return sets * self.fragments_m * fragment.count * fragment.dtype.itemsize // 4 > 128

    @cached_property
    def deals_registers(self) -> bool:
        return self._registers is not None

    @cached_property
    def producer_registers(self) -> int:
        return self._registers[0] if self._registers else 24

    @cached_property
    def consumer_registers(self) -> int:
        return self._registers[1] if self._registers else 24

    @cached_property
    def warp_registers(self) -> tuple[int, ...] | None:
        """What a thread of each warp has after warps have given and taken, the producer's first."""
        counts = (self.producer_registers,) * self.producer_warps + (self.consumer_registers,) * self.warps
        return counts if self.deals_registers else None

    # -- tiles ------------------------------------------------------------------------------------------------------

    @cached_property
    def group_rows(self) -> int:
        """Rows of D that a warpgroup computes at a time."""
        return self.compute_warp.size.M

    @cached_property
    def first_rows(self) -> int:
        """Rows from one warpgroup's part of the block's tile to the next one's: none where each has tiles of its own."""
        return 0 if self.is_pingpong else self.group_rows

    @cached_property
    def pair(self) -> Tile:
        """Two neighbours in a row: what a thread holds together of D."""
        return Tile(M=1, N=2)

    @cached_property
    def single(self) -> Tile:
        return Tile(M=1, N=1)

    @cached_property
    def a_word(self) -> Tile:
        """What a thread has of A in a register, where A goes by registers."""
        return Tile(M=1, K=4 // self.a.plane.itemsize)

    @cached_property
    def has_epilogue(self) -> bool:
        """Whether anything happens to a value between the sum and D."""
        return bool(self.has_c or type(self.epilogue) is not Default or not self.d.to_registers.is_identity
                    or not self.d.to_shared.is_identity)

    @cached_property
    def stage_steps(self) -> int:
        """Steps along K in a stage."""
        return self.block.size.K // self.operator.shape[2]

    @cached_property
    def middle_steps(self) -> int:
        """Steps that are neither the first nor the last of a stage."""
        return max(0, self.stage_steps - 2)

    @cached_property
    def pending_steps(self) -> int:
        """How many groups may be on their way when the registers of the next are written. A loop of one step a round writes
        the very registers that the last round's group reads, so that one has to be done."""
        return 1 if self.stage_steps > 1 else 0

    @cached_property
    def sums(self) -> int:
        """Accumulators that a consumer's thread has: of numbers of several parts, each fragment has one a part."""
        return self.fragments_m * self.operator.sums

    @cached_property
    def has_parts(self) -> bool:
        return self.operator.sums > 1

    # -- what the producer's warps move -------------------------------------------------------------------------------

    @cached_property
    def teams(self) -> int:
        """Teams of the producer's warps: two, if half of them can hold a stage with registers to spare, or need not."""
        if not self.is_working:
            return 1
        if self.is_changing:                              # a stage each on its way and in work, and two with the consumers
            return 2 if self.stages >= 6 and not self.is_turning else 1
        limit = self._most_held * 3 // 4
        return 2 if 0 < self._held(self.producer_warps // 2) <= limit else 1

    @cached_property
    def team_warps(self) -> int:
        return self.producer_warps // self.teams

    @cached_property
    def holds(self) -> bool:
        """Whether the threads of a team can have all their part of a stage on its way at once."""
        return 0 < self._held(self.team_warps) <= self._most_held

    @cached_property
    def holds_whole(self) -> bool:
        """Whether, besides, each thread's tile is in range or out of it as a whole, and only passes through."""
        working = [operand for operand, by_engine in ((self.a, self.a_engine), (self.b, self.b_engine)) if not by_engine]
        return self.holds and all(operand.whole and operand.passes_words for operand in working)

    @cached_property
    def _most_held(self) -> int:
        """Registers that a producer's thread has for operands on their way."""
        return 16 if self.is_squeezed else 48 if self.threads > 384 else 96

    def _held(self, warps: int) -> int:
        """Words that a thread of so many warps holds of a stage; 0 if some cannot be held."""
        words = [operand.shares(tile, warps) * operand.words.count for operand, tile, by_engine in (
            (self.a, self.block.MK, self.a_engine), (self.b, self.block.KN, self.b_engine)) if not by_engine]
        return sum(words) if all(words) else 0

    @cached_property
    def a_batch(self) -> int:
        """Of how many of its warp's tiles of A a thread holds its part while it changes them in place."""
        return self._batch(self.a, self.block.MK)

    @cached_property
    def b_batch(self) -> int:
        return self._batch(self.b, self.block.KN)

    def _batch(self, operand: Operand, tile: Tile) -> int:
        warp_tiles = operand.shares(tile, self.team_warps) // operand.lane_tiles
        return math.gcd(warp_tiles, max(1, HELD // (operand.lane_tiles * operand.words.count))) if warp_tiles else 1

    @cached_property
    def a_slots(self) -> int:
        """Tiles of A that a thread holds."""
        return max(1, self.a.shares(self.block.MK, self.team_warps))

    @cached_property
    def b_slots(self) -> int:
        return max(1, self.b.shares(self.block.KN, self.team_warps))

    # -- numbers that land and are taken apart ------------------------------------------------------------------------

    @cached_property
    def is_landing(self) -> bool:
        """Whether the engine brings all there is, and the warps that take it apart can hold what they read."""
        landing = [slots * operand.words.count for slots, operand, splits in (
            (self.a_landed, self.a, self.a_splits), (self.b_landed, self.b, self.b_lands)) if splits]
        return (bool(landing) and self.peers == 1 and (self.a_engine or self.a_lands) and (self.b_engine or self.b_lands)
                and all(0 < words <= self._most_held for words in landing))

    @cached_property
    def a_splits(self) -> bool:
        """Whether the producer's warps take A apart."""
        return self.a_lands and not self.a_by_registers

    @cached_property
    def splits_both(self) -> bool:
        return self.a_splits and self.b_lands

    @cached_property
    def has_landed(self) -> bool:
        """Whether stages are changed, or taken apart, after the engine has brought them."""
        return self.is_changing or self.is_landing

    @cached_property
    def landing_warps(self) -> int:
        """Warps that take an operand apart."""
        return self.producer_warps // (2 if self.splits_both else 1)

    @cached_property
    def a_landed(self) -> int:
        """Tiles of A that a thread takes apart."""
        return self.a.shares(self.block.MK, self.landing_warps)

    @cached_property
    def b_landed(self) -> int:
        return self.b.shares(self.block.KN, self.landing_warps)

    @cached_property
    def stages_ahead(self) -> int:
        """How many stages ahead of the one that warps take apart a copy starts. Consumers give a stage back when they have
        the next, so it can take the place of the last but one, and no later one; where there are enough, of one before."""
        return min(self.stages - 2, max(1, self.stages - 3))

    @cached_property
    def promoted_stages(self) -> int:
        """After how many stages a sum is added to the one in float32; 0: never."""
        return self.operator.promote // self.block.size.K

    @cached_property
    def is_promoted(self) -> bool:
        return self.promoted_stages > 0


__all__ = ["PipelineRoles"]
