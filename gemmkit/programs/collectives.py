"""What derived kernels call, as constants of their text: tiles in the stages of a ring, products, ways out.

Rings, roles and swizzles are those of the kernels that are written by hand (`gemmkit.kernels.common.pipeline`,
`gemmkit.kernels.sm90.warpgroups`, `gemmkit.kernels.sm90.panels`), and so is what becomes of a warpgroup's sums.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gemmkit.component_products import matrix_of
from gemmkit.components import Component
from gemmkit.kernels.attention.softmax import quad_sum
from gemmkit.kernels.attention.store import put_matrix
from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.mlp.store import put_pair
from gemmkit.kernels.sm90.panels import Panels
from gemmkit.kernels.sm90.store import own_column, own_row
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, fold, split
from gemmkit.lang.given import dtype_given
from gemmkit.lang.values import convert, convert_all, fill
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.layouts.swizzled import Swizzled
from gemmkit.operators import WGMMAOp
from gemmkit.operators.wgmma import within
from gemmkit.ptx.descriptors import advance, matrix_descriptor
from gemmkit.ptx.ldmatrix import ldmatrix
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import lane_index, thread_index, udiv
from gemmkit.ptx.tma import tma_commit, tma_load, tma_load_multicast, tma_store, tma_wait, tma_wait_read
from gemmkit.ptx.warpgroup import fence_async, named_barrier
from gemmkit.runtime.tensor_maps import TensorMapSpec
from gemmkit.tiling import Tile

F32 = np.dtype(np.float32)
ROWS = 64                              # of a product, which a warpgroup has
LINE = 64                              # elements of a swizzled line of 128 bytes
ROW, COLUMN = "row", "column"          # of a cluster's tiles
PATTERN = 1024                         # bytes of eight such lines, after which the swizzle begins anew


@dataclass(frozen=True)
class Typed(Component):
    """What has elements of a ``dtype``, which a text gives by its name."""

    dtype: np.dtype

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dtype", dtype_given(self.dtype, type(self).__qualname__))


@dataclass(frozen=True)
class Staged(Typed):
    """``lines`` x ``columns`` elements of a row-major array in every stage of a ring, by panels of 64 columns; of a
    ``stacked`` array from one of its matrices.

    In a ``cluster`` whose blocks of a ROW (or COLUMN) of tiles, ``peers``, have the same block of the array, each loads a
    part for all: some of the panels, or some lines of each."""

    lines: int
    columns: int
    offset: int
    stage_bytes: int
    stacked: bool = False
    cluster: Cluster = Cluster()
    peers: str = ""

    @cached_property
    def line(self) -> int:
        """Elements of a panel's line."""
        return LINE

    @cached_property
    def panels(self) -> int:
        return self.columns // LINE

    @cached_property
    def k_axis(self) -> int:
        """As a cluster counts: 1 for A, which the blocks of a row of tiles share, 0 for B."""
        return int(self.peers == ROW)

    @cached_property
    def parts(self) -> int:
        return {ROW: self.cluster.n, COLUMN: self.cluster.m}.get(self.peers, 1)

    @cached_property
    def by_panels(self) -> bool:
        """Whether a part is some whole panels: fewer and longer copies."""
        return self.panels % self.parts == 0

    @cached_property
    def part(self) -> tuple[int, int]:
        """Panels and lines of a part."""
        if self.by_panels:
            return self.panels // self.parts, self.lines
        return self.panels, self.lines // self.parts

    @cached_property
    def layout(self) -> Swizzled:
        """Of the block as it is in its array, and in a stage."""
        return Swizzled(RowMajor(self.dtype), 2 * LINE)

    @cached_property
    def transposed_layout(self) -> Swizzled:
        return Swizzled(ColMajor(self.dtype), 2 * LINE)

    @cached_property
    def map_spec(self) -> TensorMapSpec:
        box = LINE, self.part[1]
        return TensorMapSpec(self.dtype, (*box, 1) if self.stacked else box, 2 * LINE)

    def load(self, tensor_map: Any, place: tuple, ring: Any, slot: Any) -> None:
        """Have TMA bring the block that begins at a place (column, row, which matrix of a stack); zeros where the array
        has ended."""
        pointer = shared(self.dtype, self.offset)
        for panel in range(self.panels):
            to = slot.stage * (self.stage_bytes // 2) + panel * self.lines * LINE
            if self.stacked:
                tma_load(tensor_map, (place[0] + panel * LINE, place[1], place[2]), pointer, to, ring.full(), slot.stage)
            else:
                tma_load(tensor_map, (place[0] + panel * LINE, place[1]), pointer, to, ring.full(), slot.stage)

    def load_part(self, tensor_map: Any, place: tuple, ring: Any, slot: Any, rank: int) -> None:
        """The same for all that share the block: of this one's part, whose place in the cluster is ``rank``."""
        pointer, mask = shared(self.dtype, self.offset), self.cluster.sharers(self.k_axis, rank)
        panels, lines = self.part
        part = self.cluster.part(self.k_axis, rank)
        for n in range(panels):
            panel, line = (n + part * panels, 0) if self.by_panels else (n, part * lines)
            to = slot.stage * (self.stage_bytes // 2) + (panel * self.lines + line) * LINE
            column, row = place[0] + panel * LINE, place[1] + line
            if self.stacked:
                tma_load_multicast(tensor_map, (column, row, place[2]), pointer, to, ring.full(), slot.stage, mask)
            else:
                tma_load_multicast(tensor_map, (column, row), pointer, to, ring.full(), slot.stage, mask)

    def descriptor(self) -> int:
        """Of the first stage."""
        return matrix_descriptor(shared(self.dtype, self.offset), 0, self.lines * 2 * LINE, PATTERN, 2 * LINE)


@dataclass(frozen=True)
class Product(Component):
    """64 rows of ``a`` times ``b``, for each warpgroup; a transposed operand lies in its stage as in its array."""

    a: Staged
    b: Staged
    a_transposed: bool = False
    b_transposed: bool = False

    @cached_property
    def block(self) -> Tile:
        a, b = self.a, self.b
        m, k = (a.columns, a.lines) if self.a_transposed else (a.lines, a.columns)
        return Tile(M=m, N=b.lines if self.b_transposed else b.columns, K=k)

    @cached_property
    def a_layout(self) -> Swizzled:
        return self.a.transposed_layout if self.a_transposed else self.a.layout

    @cached_property
    def b_layout(self) -> Swizzled:
        return self.b.transposed_layout if self.b_transposed else self.b.layout

    @cached_property
    def operator(self) -> WGMMAOp:
        return WGMMAOp(self.block.size.N, self.a.dtype, F32, a_major="MN" if self.a_transposed else "K",
                       b_major="K" if self.b_transposed else "MN")

    @cached_property
    def values(self) -> int:
        """A thread's sums."""
        return self.block.size.N // 2

    def begin(self, value: float) -> tuple:
        return fill(F32, self.values, value)

    def multiply(self, sums: tuple, slot: Any, group: int, accumulate: int) -> tuple:
        """Start the product of a stage, on top of the sums or (``accumulate`` 0) in their place. It is done after a wait."""
        return self.multiply_apart(sums, slot, slot, group, accumulate)

    def multiply_apart(self, sums: tuple, a_slot: Any, b_slot: Any, group: int, accumulate: int) -> tuple:
        """The same of operands in rings of their own."""
        own = within(self.a_layout, (group * ROWS, 0), self.block.MK.size)
        return self.operator.multiply((sums,), advance(self.a.descriptor(), own + a_slot.stage * self.a.stage_bytes),
                                      advance(self.b.descriptor(), b_slot.stage * self.b.stage_bytes), self.a_layout,
                                      self.b_layout, self.block, accumulate)[0]


@dataclass(frozen=True)
class RowSums(Component):
    """Sums along the rows of a staged block, which a warpgroup's threads read: each adds up its part of two rows, 8 apart,
    and the four threads of a row meet at the end."""

    tile: Staged

    def begin(self, value: float) -> tuple:
        """The value once a row: the first of its four threads has it."""
        return fill(F32, 2, value if lane_index() % 4 == 0 else 0.0)

    def add(self, sums: tuple, slot: Any, group: int) -> tuple:
        return fold(self.tile.columns // 16, add_matrix, sums, self.tile, slot.stage, group)

    def whole(self, sums: tuple) -> tuple:
        return quad_sum(sums[0]), quad_sum(sums[1])


def add_matrix(sums: tuple, n: int, tile: Any, stage: int, group: int) -> tuple:
    """16 rows by 16 columns of a warp: four 8 x 8 matrices, of which a lane addresses a line."""
    lane = lane_index()
    row = group * ROWS + udiv(thread_index() % 128, 32) * 16 + lane % 16
    at = tile.layout.position((row, n * 16 + udiv(lane, 16) * 8), tile.lines)
    x = convert_all(F32, ldmatrix(shared(tile.dtype, tile.offset), stage * (tile.stage_bytes // 2), at, 4, False))
    return sums[0] + ((x[0] + x[1]) + (x[4] + x[5])), sums[1] + ((x[2] + x[3]) + (x[6] + x[7]))


class Part(NamedTuple):
    """Where a warpgroup's sums are stored: first row and column, where the matrix ends, and which one of a stack it is."""

    m: Any
    n: Any
    rows: Any
    columns: Any
    stack: Any


@dataclass(frozen=True)
class TmaOut(Typed):
    """A warpgroup's rows through swizzled shared memory, by TMA, which clips what is out of range."""

    block_m: int
    columns: int
    o_offset: int
    stacked: bool = False

    @cached_property
    def head(self) -> Panels:
        return Panels(self.dtype, self.columns)

    @cached_property
    def map_spec(self) -> TensorMapSpec:
        return self.head.map_spec(ROWS, 3 if self.stacked else 2)

    def store(self, values: tuple, out: Any, part: Part, group: int) -> None:
        is_leader = thread_index() % 128 == 0
        if is_leader:                                  # TMA has read what the last tile left there
            tma_wait_read(0)
        named_barrier(1 + group, 128)
        each(put_matrix, split(convert_all(self.dtype, values), 8), self, group)
        fence_async()
        named_barrier(1 + group, 128)
        if is_leader:
            if part.m < part.rows:
                for panel in range(self.head.count):
                    column = part.n + panel * self.head.line
                    if column < part.columns:
                        self.store_panel(out, column, part, (panel * self.block_m + group * ROWS) * self.head.line)
            tma_commit()

    def store_panel(self, out: Any, column: int, part: Part, at: int) -> None:
        if self.stacked:
            tma_store(out, (column, part.m, part.stack), shared(self.dtype, self.o_offset), at)
        else:
            tma_store(out, (column, part.m), shared(self.dtype, self.o_offset), at)

    def finish(self) -> None:
        """Shared memory must last until TMA has read it."""
        if thread_index() % 128 == 0:
            tma_wait(0)


@dataclass(frozen=True)
class DirectOut(Typed):
    """Elements that are in range, from the registers: as ``pairs`` where there are as many in a row."""

    pairs: bool
    stacked: bool = False

    def store(self, values: tuple, out: Any, part: Part, group: int) -> None:
        pairs, row, column = split(convert_all(self.dtype, values), 2), part.m + own_row(), part.n + own_column()
        if self.stacked:
            each(put_pair, pairs, self, part, matrix_of(out, (part.stack,)), row, column)
        else:
            each(put_pair, pairs, self, part, out, row, column)

    def finish(self) -> None:
        """Nothing is under way."""


@dataclass(frozen=True)
class RowsOut(Typed):
    """A value of each row, by the first of the row's four threads."""

    stacked: bool = False

    def store(self, values: tuple, out: Any, part: Part, group: int) -> None:
        each(put_row, values, self, part, out, part.m + own_row())

    def finish(self) -> None:
        """Nothing is under way."""


def put_row(value: Any, n: int, store: Any, part: Part, out: Any, row: int) -> None:
    if lane_index() % 4 == 0 and row + n * 8 < part.rows:
        if store.stacked:
            out[part.stack, row + n * 8] = convert(store.dtype, value)
        else:
            out[row + n * 8] = convert(store.dtype, value)


def blocks(extent: int, size: int) -> int:
    """How many blocks of ``size`` an extent has."""
    return udiv(extent + size - 1, size)


def row_of(i: int) -> int:
    """Of a thread's i-th sum: rows below the thread's first."""
    return i // 2 % 2 * 8
