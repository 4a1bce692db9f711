"""An operand's way through the memories: its layouts, its transforms, and the tiles that warps and threads move."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any, cast

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.common.work import KTile, Place, Slot
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.registers import Fragment
from gemmkit.layouts import ColMajor, Plain, RowMajor, Swizzled
from gemmkit.runtime.arrays import ArrayInfo, alignment, unit_axis
from gemmkit.tiling import Tile, division
from gemmkit.transforms import Transform

CHUNK = 16                             # bytes of an access, at most
STAGING = 64                           # registers a thread may hold of an operand on its way to shared memory


@dataclass(frozen=True)
class Route(Component):
    """How an operand's tiles get from global into shared memory. This one: threads load and store them, through registers.

    Hopper's other routes are in `gemmkit.kernels.sm90.routes`.
    """

    uses_tma = False                   # a tensor map is needed, and TMA's bytes arrive on a barrier
    parts_apart = False                # a braid's parts stand one behind the other in the tile, not eight by eight

    def brought_bytes(self, operand: Operand) -> int:
        """What TMA brings into a stage of this block."""
        return operand.nbytes if self.uses_tma else 0

    def prefetch(self, tensor_map: Any) -> None:
        """Fetch the tensor map: there is none."""

    def start(self, spec: Any, operand: Any, tensor_map: Any, barrier: Any, slot: Slot, at: KTile) -> None:
        """Start TMA's copies of a stage: none."""


@dataclass(frozen=True)
class Operand(Component):
    """One operand's way through the memories.

    ``to_shared`` acts between global and shared memory, ``to_registers`` between shared memory and registers (for D:
    the same two stretches, outwards). ``warp`` and ``thread`` are the tiles that a warp and a thread move at a time.
    ``whole`` says that the operand's extents are multiples of the thread's tile, so no thread's tile straddles an edge.
    ``tile`` is the block's tile of it, which lies ``offset`` bytes into a stage and which ``warps`` warps copy together.
    ``observer`` is told of its elements beside the product (`gemmkit.observers`), None if there is none.
    ``numbers`` is the layout in which TMA brings interleaved numbers of several parts before they become planes.
    ``clipped``: threads load tiles at the edges as words, too, without a branch (`gemmkit.kernels.common.clipping`).
    """

    layout: Any
    shared: Any
    to_shared: Transform
    to_registers: Transform
    warp: Tile
    thread: Tile
    whole: bool
    tile: Tile
    warps: int = 1
    offset: int = 0
    route: Route = Route()
    numbers: Swizzled | None = None
    clipped: bool = False
    observer: Any = None

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
        """Whether a layout loads a thread's tile in 32-bit words, because no code has to know its elements."""
        return (self.layout.packs(self.thread) and self.to_shared.is_identity
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
    def brought(self) -> Any:
        """How TMA brings a tile: as it is to lie in shared memory, or across, where global memory has it so; or
        as interleaved numbers in swizzled panels."""
        if self.numbers is not None:
            return self.numbers
        shared, axis = cast(Any, self.shared), self.layout.vector_axis
        if not isinstance(shared, Swizzled) or axis in (shared.axis, None):
            return self.plane
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
        return self.thread.extents[self.shared.axis] == self.thread.count

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
        """Tiles of a thread in one of its warp: those of the lanes that have most, where lanes do not divide it."""
        return -(-self.warp.count // (32 * self.thread.count))

    @cached_property
    def moves(self) -> int:
        """How many thread tiles of the block's tile a thread copies, if all copy as many and can hold them; else 0."""
        registers = self.shares * self.held.count * max(1, self.held.dtype.itemsize // 4)
        limit = STAGING if self.whole else STAGING // 2   # edges take registers of their own
        return self.shares if registers <= limit else 0

    @cached_property
    def shares(self) -> int:
        """How many thread tiles of the block's tile every thread copies, if all copy as many; else 0."""
        lanes, left = divmod(self.warp.count, 32 * self.thread.count)
        steps, right = divmod(self.tile.count, self.warp.count * self.warps)
        return lanes * steps if not left and not right else 0

    @cached_property
    def is_even(self) -> bool:
        """Whether a thread's tiles lie at distances from its first that are known when the kernel is compiled."""
        return (division(self.tile, self.warp, self.warps).split
                and division(self.warp, self.thread, 32, self.order).split)

    @cached_property
    def distances(self) -> Fragment:
        """A `distance` in registers."""
        return Fragment(np.dtype(np.int32 if self.layout.near else np.int64), 1)

    @cached_property
    def slots(self) -> int:
        """Registers' tiles for all that a thread copies; at least one."""
        return max(1, self.shares)

    @cached_property
    def staged_words(self) -> int:
        """32-bit words that a thread holds of the block's tile at once; 0 if it cannot."""
        return self.shares * self.words.count

    @cached_property
    def k_axis(self) -> int:
        """The axis of the matrix that runs along K: 1 of A, 0 of B."""
        return self.tile.names.index("K")

    @cached_property
    def panel_bytes(self) -> int:
        """From one swizzled panel of the tile to the next: as many lines as the tile has."""
        return int(self.plane.leading(self.tile.size) * self.plane.width)

    @cached_property
    def pattern_bytes(self) -> int:
        """Eight lines: one pattern of the swizzle."""
        return 8 * int(self.plane.width)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the block's tile in shared memory."""
        return bytes_of(self.shared, *self.tile.extents)

    # -- in device code -------------------------------------------------------------------------------------------------

    def leading(self) -> Any:
        """The leading dimension of the block's tile in shared memory."""
        return self.shared.leading(self.tile.size)

    def place(self, m: int, n: int, k: int, shape: Any) -> Place:
        """Where the block's tile begins in A or B, and where the matrix ends."""
        if self.k_axis == 1:
            return Place(m, k, shape.M, shape.K)
        return Place(k, n, shape.K, shape.N)

    def distance(self, data: Any, n: int, axis: int) -> int:
        """What row ``n`` (axis 0) or column ``n`` (axis 1) adds to an element's place, in bytes, where that is their sum."""
        return self.layout.row_offset(data, n) if axis == 0 else self.layout.column_offset(data, n)


def unit_of(layout: Any, info: ArrayInfo) -> int | None:
    """The dimension of the array along which a layout's lines lie: if it does not say, the contiguous one."""
    unit: int | None = getattr(layout, "unit", layout.axis if isinstance(layout, Plain) else unit_axis(info))
    return unit


def stored_by_neighbours(operand: Operand, info: ArrayInfo | None, extents: tuple[int, int], epilogue: Any) -> Operand:
    """How threads store D, a matrix of ``extents`` in the array ``info`` (None: one whose rows begin at 16 bytes), by an
    ``epilogue``: no more at a time than one access takes.

    Rows of 5649 float16 begin at any 2 bytes, and eight elements of a thread leave in eight accesses. Lanes that had eight
    neighbours each would touch 16 sectors of memory with every one of them, for 64 bytes; an element a lane, they touch 3.
    """
    layout = operand.layout
    if info is None or not isinstance(layout, Plain) or type(layout).store is not Plain.store or epilogue.stores_itself:
        return operand
    axis, size = layout.axis, info.dtype.itemsize
    length = min(operand.thread.extents[axis], max(1, alignment(info) // size))
    if length == operand.thread.extents[axis] or unit_axis(info) != unit_of(layout, info):
        return operand
    along, across = operand.tile.extents[axis], operand.tile.extents[1 - axis]
    lanes = math.gcd(32, along // length)
    thread, warp = [1, 1], [math.gcd(32 // lanes, across)] * 2
    thread[axis], warp[axis] = length, lanes * length
    names = operand.tile.names
    single = Tile(**dict(zip(names, thread)))
    return dataclasses.replace(operand, thread=single, warp=Tile(**dict(zip(names, warp))), whole=is_whole(extents, single))


def is_whole(extents: tuple[int, int], thread: Tile) -> bool:
    """Whether an operand's extents are multiples of a thread's tile."""
    return extents[0] % thread.extents[0] == 0 and extents[1] % thread.extents[1] == 0


def bytes_of(layout: Any, rows: int, columns: int) -> int:
    """What a tile takes in shared memory."""
    return int(layout.physical_size(rows, columns) * layout.dtype.itemsize)
