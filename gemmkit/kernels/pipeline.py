"""What the warp-specialised kernel is specialised by: a `Spec` with a ring of stages, roles and a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gemmkit.components import Component
from gemmkit.epilogues import Default
from gemmkit.kernels.spec import Operand, Spec, bytes_of
from gemmkit.layouts.swizzled import pattern_of
from gemmkit.tiling import Tile

BARRIER = 8                            # bytes of an mbarrier
HELD = 32                              # registers of tiles that a producer's thread changes in place at a time
BUFFERS = 2                            # panels of D a warpgroup has on their way out

# Registers of a producer's and a consumer's thread, by the numbers of their warpgroups: what the block got at launch, dealt
# out anew. A producer that runs layouts and transforms needs more of them than one that starts copies; beside two consumers
# it keeps the 168 that everyone begins with.
COPYING = {(1, 2): (24, 240), (1, 3): (32, 160), (2, 2): (40, 208)}
WORKING = {(1, 3): (56, 152), (2, 2): (88, 168)}
CHANGING = {(1, 2): (72, 216), **WORKING}
LANDING = {**WORKING, (1, 2): (120, 192)}        # a producer that takes apart what has landed
TURNING = {(1, 2): (104, 200), (1, 3): (56, 152), (2, 2): (88, 168)}
SQUEEZED = {(1, 2): (56, 224)}         # a producer that works, beside consumers with more than 128 registers of sums


@dataclass(frozen=True)
class PipelineSpec(Spec):
    """A `Spec` for `warp_specialised`.

    ``splits`` blocks of a cluster share the K of a tile.

    ``warps`` are those that multiply, in warpgroups of four (the consumers). ``schedule`` is "cooperative" (they share a
    tile of D, each its rows) or "pingpong" (each has tiles of its own, in turn). ``a_engine``, ``b_engine`` and
    ``d_engine`` say which operands the copy engine (TMA) moves; the others go through ``producer_warps`` (A, B) or leave
    from the registers (D).
    ``a_lands`` and ``b_lands`` are for numbers of several parts that the engine brings and warps then take apart.
    """

    stages: int
    schedule: str
    cluster_m: int
    cluster_n: int
    splits: int
    producer_warps: int
    a_engine: bool
    b_engine: bool
    d_engine: bool
    a_lands: bool = False
    b_lands: bool = False

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
        return not (self.a_engine and self.b_engine) or self.is_changing

    @cached_property
    def a_changes(self) -> bool:
        """Whether A is transformed in place, once the engine has brought it."""
        return self.a_engine and not self.a_turns and (self.a.is_masked or not self.a.to_shared.is_identity)

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
        table = (COPYING if not self.is_working else SQUEEZED if self.is_squeezed else TURNING if self.is_turning
                 else CHANGING if self.is_changing else LANDING if self.is_landing else WORKING)
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
    def has_epilogue(self) -> bool:
        """Whether anything happens to a value between the sum and D."""
        return bool(self.has_c or type(self.epilogue) is not Default or not self.d.to_registers.is_identity
                    or not self.d.to_shared.is_identity)

    @cached_property
    def sums(self) -> int:
        """Accumulators that a consumer's thread has: of numbers of several parts, each fragment has one a part."""
        return self.fragments_m * int(getattr(self.operator, "sums", 1))

    @cached_property
    def has_parts(self) -> bool:
        return int(getattr(self.operator, "sums", 1)) > 1

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
        landing = [slots * operand.words.count for slots, operand, lands in (
            (self.a_landed, self.a, self.a_lands), (self.b_landed, self.b, self.b_lands)) if lands]
        return (bool(landing) and self.peers == 1 and (self.a_engine or self.a_lands) and (self.b_engine or self.b_lands)
                and all(0 < words <= self._most_held for words in landing))

    @cached_property
    def lands_both(self) -> bool:
        return self.a_lands and self.b_lands

    @cached_property
    def has_landed(self) -> bool:
        """Whether stages are changed, or taken apart, after the engine has brought them."""
        return self.is_changing or self.is_landing

    @cached_property
    def landing_warps(self) -> int:
        """Warps that take an operand apart."""
        return self.producer_warps // (2 if self.lands_both else 1)

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

    # -- shared memory ----------------------------------------------------------------------------------------------

    @cached_property
    def a_bytes(self) -> int:
        return bytes_of(self.a.shared, self.block.size.M, self.block.size.K)

    @cached_property
    def b_bytes(self) -> int:
        return bytes_of(self.b.shared, self.block.size.K, self.block.size.N)

    @cached_property
    def stage_bytes(self) -> int:
        return self.b_offset + pattern_of(self.b_bytes)

    @cached_property
    def a_stage(self) -> int:
        """Elements of A's planes from one stage to the next."""
        return self.stage_bytes // self.a.plane.dtype.itemsize

    @cached_property
    def b_stage(self) -> int:
        return self.stage_bytes // self.b.plane.dtype.itemsize

    @cached_property
    def b_offset(self) -> int:
        return pattern_of(self.a_bytes)

    @cached_property
    def d_line(self) -> int:
        """Columns of a panel of D."""
        return int(self.d.shared.line)                               # type: ignore[attr-defined]

    @cached_property
    def d_panels(self) -> int:
        """Panels of a 64-row fragment."""
        return self.block.size.N // self.d_line

    @cached_property
    def own_panels(self) -> int:
        """Panels of a fragment that this block finishes."""
        return self.d_panels // self.splits

    @cached_property
    def d_panel(self) -> int:
        """Elements of a panel."""
        return 64 * self.d_line

    @cached_property
    def d_buffers(self) -> int:
        return BUFFERS

    @cached_property
    def d_pending(self) -> int:
        """How many panels may still be on their way out when a tile's first one is written: where a tile does not fill all
        buffers alike, that is the buffer of the last tile's last panel."""
        return BUFFERS - 1 if self.fragments_m * self.own_panels % BUFFERS == 0 else 0

    @cached_property
    def d_offset(self) -> int:
        return self.stages * self.stage_bytes

    @cached_property
    def _panels_bytes(self) -> int:
        return BUFFERS * self.consumers * self.d_panel * self.d.shared.dtype.itemsize if self.d_engine else 0

    @cached_property
    def full_offset(self) -> int:
        return self.exchange_offset + self.exchanging * self.exchanged_bytes

    @cached_property
    def empty_offset(self) -> int:
        return self.full_offset + BARRIER * self.stages

    @cached_property
    def landed_offset(self) -> int:
        """Barriers of stages that the engine has brought and the producer's warps have yet to change or take apart."""
        return self.empty_offset + BARRIER * self.stages

    @cached_property
    def filled_offset(self) -> int:
        """Barriers of the sums that a consumer is sent, and of the room to send some."""
        return self.landed_offset + (BARRIER * self.stages if self.has_landed else 0)

    @cached_property
    def free_offset(self) -> int:
        return self.filled_offset + BARRIER * self.exchanging

    @cached_property
    def shared_bytes(self) -> int:
        return self.free_offset + BARRIER * self.exchanging

    # -- sums that the blocks of a cluster exchange -----------------------------------------------------------------------

    @cached_property
    def exchanging(self) -> int:
        """Consumers that exchange sums with those of other blocks."""
        return self.consumers if self.splits > 1 else 0

    @cached_property
    def slice_columns(self) -> int:
        """From the columns that a block finishes to those of the next."""
        return self.block.size.N // self.splits if self.splits > 1 else 0

    @cached_property
    def slice_count(self) -> int:
        """A thread's sums in a slice of a fragment."""
        return int(self.operator.fragment_c.count) // self.splits

    @cached_property
    def slice_words(self) -> int:
        """In how many pieces of four they are sent."""
        return self.slice_count // 4

    @cached_property
    def exchanged_bytes(self) -> int:
        """What a consumer is sent for a tile: as much as it has itself."""
        return self.fragments_m * int(self.operator.fragment_c.count) * 4 * 128

    @cached_property
    def exchange_offset(self) -> int:
        return self.d_offset + self._panels_bytes

    # -- barriers ---------------------------------------------------------------------------------------------------

    @cached_property
    def expected_bytes(self) -> int:
        """What the copy engine brings a stage."""
        return self.a_engine * self.a_bytes + self.b_engine * self.b_bytes

    @cached_property
    def full_arrivals(self) -> int:
        if self.is_landing:
            return 32 * self.producer_warps
        by_engine = self.expected_bytes > 0 and not self.is_changing
        return by_engine + (32 * self.team_warps if self.is_working else 0)

    @cached_property
    def empty_arrivals(self) -> int:
        return (1 if self.is_pingpong else self.consumers) * self.cluster_m * self.cluster_n

    # -- copies by the engine ---------------------------------------------------------------------------------------

    @cached_property
    def a_copy(self) -> Copy:
        return self._copy(self.a, self.block.size.M, 1, self.shares_a)

    @cached_property
    def b_copy(self) -> Copy:
        return self._copy(self.b, self.block.size.N, 0, self.shares_b)

    def _copy(self, operand: Operand, across: int, k_axis: int, is_shared: bool) -> Copy:
        layout: Any = operand.brought
        peers = self.peers if is_shared else 1
        depth = self.block.size.K
        plane = operand.planes, layout.physical_size(*((across, depth) if k_axis == 1 else (depth, across)))
        if layout.axis == k_axis:                                    # lines along K: the parts are some lines of each panel
            return Copy(layout.line, across // peers, depth // layout.line, across * layout.line, layout.line,
                        across // peers * layout.line, 0, across // peers, is_shared, True, *plane)
        panels = across // layout.line // peers                      # lines across K: the parts are some of the panels
        return Copy(layout.line, depth, panels, depth * layout.line, layout.line, panels * depth * layout.line,
                    panels * layout.line, 0, is_shared, False, *plane)

    # -- descriptors ------------------------------------------------------------------------------------------------

    @cached_property
    def a_panel_bytes(self) -> int:
        """From one panel of A to the next: as many lines as the tile has."""
        return int(self.a.plane.leading(self.block.MK.size) * self.a.plane.width)

    @cached_property
    def b_panel_bytes(self) -> int:
        return int(self.b.plane.leading(self.block.KN.size) * self.b.plane.width)

    @cached_property
    def a_width(self) -> int:
        return int(self.a.plane.width)

    @cached_property
    def b_width(self) -> int:
        return int(self.b.plane.width)

    @cached_property
    def a_lines_bytes(self) -> int:
        """Eight lines: one pattern of the swizzle."""
        return 8 * self.a_width

    @cached_property
    def b_lines_bytes(self) -> int:
        return 8 * self.b_width

    @cached_property
    def promoted_stages(self) -> int:
        """After how many stages a sum is added to the one in float32; 0: never."""
        return int(getattr(self.operator, "promote", 0)) // self.block.size.K

    @cached_property
    def is_promoted(self) -> bool:
        return self.promoted_stages > 0

    # -- launch -----------------------------------------------------------------------------------------------------

    def cluster_grid(self, M: int, N: int) -> tuple[int, int]:
        """Tiles of a cluster along M and N."""
        size = self.block.size
        return -(-M // (size.M * self.cluster_m)), -(-N // (size.N * self.cluster_n))

    def blocks(self, M: int, N: int, sm_count: int) -> int:
        """Blocks of a launch: as many as there are multiprocessors, for each stays until all tiles are done."""
        rows, columns = self.cluster_grid(M, N)
        return min(rows * columns, max(1, sm_count // self.peers)) * self.peers


@dataclass(frozen=True)
class Copy(Component):
    """How the engine brings an operand's tile: ``panels`` boxes of ``lines`` lines of ``line`` elements.

    ``step`` is a panel's size in shared memory, ``along`` how far the next panel's first element is along the lines. In a
    cluster that shares the operand, a block's part begins ``part`` elements into the tile, ``part_along`` further along the
    lines and ``part_across`` lines on. Numbers of several parts come plane by plane: ``planes`` of ``plane`` elements each.
    """

    line: int
    lines: int
    panels: int
    step: int
    along: int
    part: int
    part_along: int
    part_across: int
    is_shared: bool
    along_k: bool
    planes: int
    plane: int


__all__ = ["Copy", "PipelineSpec"]
