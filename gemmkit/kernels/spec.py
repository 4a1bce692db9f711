"""What a kernel is specialised by: the components in its slots, and the mapping onto blocks, warps and threads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from gemmkit.components import Component, Scalar
from gemmkit.epilogues import Epilogue
from gemmkit.kernels.rasterisation import Order
from gemmkit.lang.narrowing import narrows
from gemmkit.lang.registers import Fragment
from gemmkit.layouts import ColMajor, Layout, Plain, RowMajor, Swizzled, Tensor
from gemmkit.operators import Operator
from gemmkit.tiling import Tile
from gemmkit.transforms import Transform

HELD = 64                              # registers a thread may hold of an operand on its way to shared memory
ALIGNMENT = 128                        # bytes: where the next operand may start in shared memory


@dataclass(frozen=True)
class Shape(Component):
    """The run-time sizes of a problem: what layouts get as ``shape``."""

    M: Scalar
    N: Scalar
    K: Scalar


@dataclass(frozen=True)
class Condition(Component):
    """Which K blocks a thread block computes: ``__call__(self, m, n, k)`` with the tile's first row, column and k."""

    device_methods = ("__call__",)

    @cached_property
    def is_always(self) -> bool:
        return type(self) is Condition

    def __call__(self, m: int, n: int, k: int) -> bool:
        return True


@dataclass(frozen=True)
class Operand(Component):
    """One operand's way through the memories.

    ``to_shared`` acts between global and shared memory, ``to_registers`` between shared memory and registers (for D:
    the same two stretches, outwards). ``warp`` and ``thread`` are the tiles that a warp and a thread move at a time.
    ``whole`` says that the operand's extents are multiples of the thread's tile, so no thread's tile straddles an edge.
    ``numbers`` is how numbers of several parts lie that the copy engine brings in panels before they are taken apart.
    """

    layout: Layout
    shared: Layout
    to_shared: Transform
    to_registers: Transform
    warp: Tile
    thread: Tile
    whole: bool
    numbers: Swizzled | None = None

    @cached_property
    def in_panels(self) -> bool:
        return self.numbers is not None

    @cached_property
    def is_direct(self) -> bool:
        """Whether a thread's tile can go to shared memory as raw words: same type and order, and no transform."""
        layout, shared, tile = self.layout, cast(Any, self.shared), self.thread
        return (isinstance(layout, Plain) and type(layout).load is Plain.load and self.to_shared.is_identity
                and not hasattr(shared, "plane") and layout.dtype.names is None
                and layout.dtype == shared.dtype and layout.axis == shared.axis
                and tile.extents[layout.axis] == tile.count and tile.count * layout.dtype.itemsize % 4 == 0)

    @cached_property
    def is_packed(self) -> bool:
        """Whether a thread's tile of a tensor is loaded in 32-bit words, because nobody has to know its elements."""
        return (isinstance(self.layout, Tensor) and self.layout.packs(self.thread) and self.to_shared.is_identity
                and not hasattr(self.shared, "plane") and self.same_dtype and self.same_axis)

    @cached_property
    def passes_words(self) -> bool:
        """Whether shared memory is given words as global memory has them, in their order or another."""
        return self.is_direct or self.is_packed

    @cached_property
    def order(self) -> str:
        """How a warp's lanes lie in its tile: along the contiguous axis of global memory first. Accesses of 16 bytes are
        served eight lanes at a time, and these should be neighbours, in global memory and in the banks of shared memory."""
        axis = self.shared.vector_axis if self.layout.vector_axis is None else self.layout.vector_axis
        return "row" if axis == 1 else "column"

    @cached_property
    def is_raw(self) -> bool:
        """Whether a thread's tile can be loaded as raw words, to be looked at later: a line of a plain matrix."""
        layout, tile = cast(Any, self.layout), self.thread
        return (layout.is_plain and tile.extents[layout.axis] == tile.count
                and tile.count * layout.dtype.itemsize % 4 == 0)

    @cached_property
    def brought(self) -> Layout:
        """How the copy engine brings a tile: as it is to lie in shared memory, or across, where global memory has it so; or
        as numbers in panels."""
        if self.numbers is not None:
            return self.numbers
        shared, axis = cast(Any, self.shared), self.layout.vector_axis
        if not isinstance(shared, Swizzled) or axis in (shared.axis, None):
            return cast(Layout, self.plane)
        return Swizzled((ColMajor, RowMajor)[axis](self.layout.dtype), shared.width)

    @cached_property
    def is_masked(self) -> bool:
        """Whether its elements are a function of what lies at their place in an array (`Layout.stored`)."""
        return self.layout.stored is not None and not self.layout.is_plain

    @cached_property
    def same_dtype(self) -> bool:
        """Whether shared memory holds the dtype of global memory."""
        return bool(self.layout.dtype == self.shared.dtype)

    @cached_property
    def same_axis(self) -> bool:
        """Whether a thread's line is one in shared memory, too."""
        return self.thread.extents[self.shared.axis] == self.thread.count        # type: ignore[attr-defined]

    @cached_property
    def plane(self) -> Any:
        """The shared layout of one part: of real elements the shared layout itself."""
        return getattr(self.shared, "plane", self.shared)

    @cached_property
    def planes(self) -> int:
        return int(getattr(self.shared, "count", 1))

    @cached_property
    def words(self) -> Fragment:
        """A thread's tile in 32-bit words: as it is in global memory if `is_raw`, else as it goes to shared memory; none if
        it is smaller than a word."""
        dtype = self.layout.dtype if self.is_raw else self.shared.dtype
        count, rest = divmod(self.thread.count * dtype.itemsize, 4)
        return Fragment(np.dtype(np.uint32), count if not rest else 0)

    @cached_property
    def held(self) -> Fragment:
        """A thread's tile on its way: 32-bit words when it only passes through, else its elements."""
        if self.passes_words:
            return Fragment(np.dtype(np.uint32), self.thread.count * self.shared.dtype.itemsize // 4)
        return Fragment(self.shared.dtype, self.thread.count)

    @cached_property
    def lane_tiles(self) -> int:
        """Tiles of a thread in one of its warp."""
        return max(1, self.warp.count // (32 * self.thread.count))

    def moves(self, tile: Tile, warps: int) -> int:
        """How many thread tiles of the block's tile a thread copies, if all copy as many and can hold them; else 0."""
        moves = self.shares(tile, warps)
        registers = moves * self.held.count * max(1, self.held.dtype.itemsize // 4)
        limit = HELD if self.whole else HELD // 2         # edges take registers of their own
        return moves if registers <= limit else 0

    def shares(self, tile: Tile, warps: int) -> int:
        """How many thread tiles of the block's tile every thread copies, if all copy as many; else 0."""
        lanes, left = divmod(self.warp.count, 32 * self.thread.count)
        steps, right = divmod(tile.count, self.warp.count * warps)
        return lanes * steps if not left and not right else 0


@dataclass(frozen=True)
class Spec(Component):
    """All that a template kernel is specialised by. ``splits`` blocks of a cluster share the K of a tile."""

    block: Tile
    compute_warp: Tile
    warps: int
    operator: Operator
    a: Operand
    b: Operand
    c: Operand
    d: Operand
    epilogue: Epilogue
    condition: Condition
    order: Order
    has_c: bool
    splits: int

    @cached_property
    def threads(self) -> int:
        return 32 * self.warps

    @cached_property
    def operation(self) -> Tile:
        """The operator's shape as a tile."""
        m, n, k = self.operator.shape
        return Tile(M=m, N=n, K=k)

    @cached_property
    def fragments_m(self) -> int:
        return self.compute_warp.size.M // self.operator.shape[0]

    @cached_property
    def fragments_n(self) -> int:
        return self.compute_warp.size.N // self.operator.shape[1]

    @cached_property
    def steps_k(self) -> int:
        """Operations along K in a warp's tile."""
        return self.compute_warp.size.K // self.operator.shape[2]

    @cached_property
    def a_moves(self) -> int:
        return self.a.moves(self.block.MK, self.warps)

    @cached_property
    def b_moves(self) -> int:
        return self.b.moves(self.block.KN, self.warps)

    @cached_property
    def c_moves(self) -> int:
        return self.c.moves(self.block.MN, self.warps)

    @cached_property
    def b_offset(self) -> int:
        """Where B starts in shared memory, in bytes; A starts at 0, and C and D too (they live at other times)."""
        size = self.block.size
        return -(-bytes_of(self.a.shared, size.M, size.K) // ALIGNMENT) * ALIGNMENT

    @cached_property
    def passes_d(self) -> bool:
        """Whether nothing acts on D behind shared memory."""
        return self.d.to_shared.is_identity and self.epilogue.passes_on

    @cached_property
    def returns_d(self) -> bool:
        """Whether what passes through shared memory stands there in a wider dtype than it came in and goes out."""
        return self.passes_d and narrows(self.d.shared.dtype, self.d.layout.dtype)

    @cached_property
    def is_split(self) -> bool:
        return self.splits > 1

    @cached_property
    def sums_width(self) -> int:
        """Accumulators that a thread hands over at a time: 16 bytes of them if they come so."""
        fragment = self.operator.fragment_c
        return math.gcd(fragment.count, max(1, 16 // fragment.dtype.itemsize))

    @cached_property
    def sums_bytes(self) -> int:
        """What a block's accumulators take in shared memory, where another block fetches them."""
        fragment = self.operator.fragment_c
        return self.threads * self.fragments_m * self.fragments_n * fragment.count * fragment.dtype.itemsize

    @cached_property
    def shared_bytes(self) -> int:
        size = self.block.size
        inputs = self.b_offset + bytes_of(self.b.shared, size.K, size.N)
        outputs = bytes_of(self.d.shared, size.M, size.N)
        addend = bytes_of(self.c.shared, size.M, size.N) if self.has_c else 0
        return max(inputs, outputs, addend, self.sums_bytes if self.is_split else 0)

    def grid(self, M: int, N: int) -> tuple[int, int]:
        """Tiles of D along M and N."""
        return -(-M // self.block.size.M), -(-N // self.block.size.N)

    def blocks(self, M: int, N: int, sm_count: int) -> int:
        """Thread blocks of a launch on a device of ``sm_count`` multiprocessors: here one a tile, or as many
        as share its K."""
        rows, columns = self.grid(M, N)
        return rows * columns * self.splits


def bytes_of(layout: Any, rows: int, columns: int) -> int:
    return layout.physical_size(rows, columns) * layout.dtype.itemsize
