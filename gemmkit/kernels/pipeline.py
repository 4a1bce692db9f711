"""What the warp-specialised kernel is specialised by: a `Spec` with a ring of stages, roles and a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gemmkit.components import Component
from gemmkit.kernels.roles import PipelineRoles
from gemmkit.kernels.spec import Operand, bytes_of
from gemmkit.layouts.swizzled import pattern_of
from gemmkit.tiling import Tile

BARRIER = 8                            # bytes of an mbarrier
PANEL = 64                             # columns of a panel of D whose lines go along columns, at most
BUFFERS = 2                            # panels of D a warpgroup has on their way out


@dataclass(frozen=True)
class PipelineSpec(PipelineRoles):
    """A `Spec` for `warp_specialised`: its roles, and where everything lies in shared memory."""

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
    def d_columns(self) -> int:
        """Columns of a panel of D: those of a line, where lines go along rows."""
        shared: Any = self.d.shared
        return int(shared.line) if shared.axis == 1 else math.gcd(self.block.size.N // self.splits, PANEL)

    @cached_property
    def d_lines(self) -> int:
        """Lines of a panel."""
        return self.d_columns if self.d.shared.vector_axis == 0 else 64

    @cached_property
    def d_panels(self) -> int:
        """Panels of a 64-row fragment."""
        return self.block.size.N // self.d_columns

    @cached_property
    def own_panels(self) -> int:
        """Panels of a fragment that this block finishes."""
        return self.d_panels // self.splits

    @cached_property
    def d_panel(self) -> int:
        """Elements of a panel."""
        return 64 * self.d_columns

    @cached_property
    def panel(self) -> Tile:
        return Tile(M=64, N=self.d_columns)

    @cached_property
    def panel_thread(self) -> Tile:
        """What a thread stores of a panel at a time, where threads do."""
        return Tile(M=1, N=self.d_run) if self.d.shared.vector_axis == 1 else Tile(M=self.d_run, N=1)

    @cached_property
    def panel_warp(self) -> Tile:
        """What a warp stores: as long lines as there are, or (`d_down`) pieces of as many lines."""
        axis = self.d.shared.vector_axis
        assert axis is not None
        along, across = self.panel.extents[axis], self.panel.extents[1 - axis]
        lanes = 1 if self.d_down else math.gcd(32, along // self.d_run)
        extents = lanes * self.d_run, math.gcd(32 // lanes, across)
        return Tile(M=extents[axis], N=extents[1 - axis])

    @cached_property
    def d_rounds(self) -> int:
        """Rows of a panel that are neighbours in memory."""
        return 64 // self.d_apart

    @cached_property
    def panel_order(self) -> str:
        return "row" if self.d.shared.vector_axis == 1 else "column"

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
    def uses_panels(self) -> bool:
        """Whether D leaves by way of shared memory."""
        return self.d_engine or self.d_run > 0

    @cached_property
    def _panels_bytes(self) -> int:
        return BUFFERS * self.consumers * self.d_panel * self.d.shared.dtype.itemsize if self.uses_panels else 0

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
        return by_engine + (32 * self.team_warps if self.is_working or self.is_gathering else 0)

    @cached_property
    def empty_arrivals(self) -> int:
        """Of a consumer one thread: its tensor cores have read for all. What its threads have read, each warp must say."""
        consumers = 1 if self.is_pingpong else self.consumers
        return consumers * self.cluster_m * self.cluster_n * (4 if self.a_by_registers else 1)

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
        planes = 1 if operand.in_panels else operand.planes
        plane = planes, layout.physical_size(*((across, depth) if k_axis == 1 else (depth, across)))
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
