"""An operand's way through the memories: its layouts, its transforms, and the tiles that warps and threads move."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.collectives.scheduler import KTile, Slot, TileCoord
from gemmkit.lang.aggregates import convert, convert_all, fill
from gemmkit.lang.checks import all_converted, converted, convertible, counted, numbers
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import Numeric, SharedPointer, View, fitting
from gemmkit.lang.registers import Fragment, apply, generate, is_pairwise, registers, transform_pairs
from gemmkit.layouts import ColMajor, Plain, RowMajor, Swizzled
from gemmkit.layouts.base import ArrayLayout, element_of
from gemmkit.operators.base import Operator
from gemmkit.ptx.memory import load_words, load_words_within, pack_words, unpack_words
from gemmkit.ptx.mma import FragmentMap, fragment_coordinate
from gemmkit.ptx.special import lane_index
from gemmkit.runtime.arrays import ArrayInfo, alignment, unit_axis
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile, division, parallelise, translate
from gemmkit.transforms import Transform
from gemmkit.transforms.base import transformed

if TYPE_CHECKING:
    from gemmkit.emulator.copies import EmulatedTensorMap
    from gemmkit.epilogues.base import Epilogue
    from gemmkit.kernels.config import Config
    from gemmkit.kernels.spec import Spec


CHUNK = 16                             # bytes of an access, at most
STAGING = 64                           # registers a thread may hold of an operand on its way to shared memory


@dataclass(frozen=True)
class Route(Component):
    """How an operand's tiles get from global into shared memory. This one: threads load and store them, through registers.

    Hopper's other routes are in `gemmkit.kernels.sm90.routes`.
    """

    uses_tma = False                   # a tensor map is needed, and TMA's bytes arrive on a barrier
    parts_apart = False                # interleaved parts follow each other in the tile, not eight by eight

    def brought_bytes(self, operand: Operand) -> int:
        """What TMA brings into a stage of this block."""
        return operand.nbytes if self.uses_tma else 0

    def clear(self, spec: Spec, operand: Operand) -> None:
        """Zeros into what stages have and nothing brings: there is nothing of that."""

    def prefetch(self, tensor_map: EmulatedTensorMap) -> None:
        """Fetch the tensor map: there is none."""

    def start(self, spec: Spec, operand: Operand, tensor_map: EmulatedTensorMap, barrier: SharedPointer, slot: Slot,
              at: KTile) -> None:
        """Start TMA's copies of a stage: none."""


@dataclass(frozen=True)
class Operand(Component):
    """One operand's way through the memories.

    ``to_shared`` acts between global and shared memory, ``to_registers`` between shared memory and registers (for D:
    the same two stretches, outwards). ``warp`` and ``thread`` are the tiles that a warp and a thread move at a time.
    ``whole`` says that the operand's extents are multiples of the thread's tile, so no thread's tile straddles an edge.
    ``tile`` is the block's tile of it, which lies ``offset`` bytes into a stage and which ``warps`` warps copy together.
    ``observer`` is told of its elements beside the product (`gemmkit.epilogues.observers`), None if there is none.
    ``numbers`` is the layout in which TMA brings interleaved numbers of several parts before they become planes.
    ``clipped``: threads load tiles at the edges as words, too, without a branch (`gemmkit.kernels.collectives.operand`).
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
        """From one swizzled panel of the tile to the next."""
        return abs(int(self.plane.lines_to(1, self.plane.leading(self.tile.size)))) * int(self.plane.width)

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

    def place(self, m: int, n: int, k: int, shape: StackShape) -> TileCoord:
        """Where the block's tile begins in A or B, and where the matrix ends."""
        if self.k_axis == 1:
            return TileCoord(m, k, shape.M, shape.K)
        return TileCoord(k, n, shape.K, shape.N)

    def distance(self, data: View, n: int, axis: int) -> int:
        """What row ``n`` (axis 0) or column ``n`` (axis 1) adds to an element's place, in bytes, where that is their sum."""
        return self.layout.row_offset(data, n) if axis == 0 else self.layout.column_offset(data, n)


def unit_of(layout: ArrayLayout, info: ArrayInfo) -> int | None:
    """The dimension of the array along which a layout's lines lie: if it does not say, the contiguous one."""
    unit: int | None = getattr(layout, "unit", layout.axis if isinstance(layout, Plain) else unit_axis(info))
    return unit


def stored_by_neighbours(operand: Operand, info: ArrayInfo | None, extents: tuple[int, int], epilogue: Epilogue) -> Operand:
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


def bytes_of(layout: Plain, rows: int, columns: int) -> int:
    """What a tile takes in shared memory."""
    return int(layout.physical_size(rows, columns) * layout.dtype.itemsize)


# --------------------------------------------------------------------------------------------------
# Functions of elements: transforms of tiles and fragments at their coordinates, and the dtypes that results must hold.

def row_of(tile: Tile, n: int) -> int:
    """The row of a tile's n-th element, first dimension fastest."""
    return tile.index[0] + n % tile.size[0]


def column_of(tile: Tile, n: int) -> int:
    return tile.index[1] + n // tile.size[0]


# -- epilogues of tiles ------------------------------------------------------------------------------------------------

def finished(epilogue: Any, values: tuple, layout: ArrayLayout, tile: Tile, shape: StackShape) -> tuple:
    """What an epilogue made of a tile's values, fit to be stored in D's layout."""
    made = numbers(epilogue, "finish", epilogue.finish(values, tile, shape), values)
    return convertible(epilogue, "finish", made, layout.dtype) if layout.is_plain else made    # a user's may take anything


# -- tiles -------------------------------------------------------------------------------------------------------------

def transform_into(operand: Operand, values: tuple, tile: Tile) -> tuple:
    """Elements on their way to shared memory."""
    changed = transform_tile(operand.to_shared, values, tile)
    return all_converted(operand.to_shared, "__call__", changed, operand.shared.dtype)


def put_transformed(operand: Operand, pointer: SharedPointer, tile: Tile, words: tuple, place: TileCoord) -> None:
    """Words of raw elements, transformed and put into shared memory."""
    if operand.same_dtype and is_pairwise(operand.to_shared, operand.layout.dtype):
        changed = transform_pairs(operand.to_shared, operand.layout.dtype, words)
        if operand.same_axis:
            put_words(operand, pointer, tile, changed)
        else:
            put_elements(operand, pointer, tile, unpack_words(operand.shared.dtype, changed))
    else:
        values = transform_into(operand, unpack_words(operand.layout.dtype, words), translate(tile, place.i, place.j))
        put_elements(operand, pointer, tile, values)


def transform_element_into(operand: Operand, x: Numeric, i: int, j: int) -> Any:
    """An element on its way to shared memory."""
    return converted(operand.to_shared, "__call__", transformed(operand.to_shared, x, i, j), operand.shared.dtype)


def transform_tile(transform: Transform, values: tuple, tile: Tile) -> tuple:
    """A transform of a tile's elements."""
    return values if transform.is_identity else apply(transform_element, values, transform, tile)


def transform_element(x: Numeric, n: int, transform: Transform, tile: Tile) -> Any:
    return transformed(transform, x, row_of(tile, n), column_of(tile, n))


def transform_within(transform: Transform, values: tuple, tile: Tile, rows: int, columns: int) -> tuple:
    """`transform_tile` of a tile that may be partly out of range: there the coordinates are the nearest in range."""
    if transform.is_identity:
        return values
    return apply(transform_element_within, values, transform, tile, rows, columns)


def transform_element_within(x: Numeric, n: int, transform: Transform, tile: Tile, rows: int, columns: int) -> Any:
    return transformed(transform, x, min(row_of(tile, n), rows - 1), min(column_of(tile, n), columns - 1))


# -- results ----------------------------------------------------------------------------------------------------------

OUT, SHARED_D = "out (global_d_layout)", "shared_d_layout, where values of D stand before they are stored,"


def kept_in_shared(spec: Spec, values: tuple) -> tuple:
    """Values on their way into shared memory, in its dtype. Those that will only pass through D's array must hold, too."""
    if spec.passes_d:
        fitting(OUT, spec.d.layout.dtype, values)
    dtype = spec.d.shared.dtype
    return all_converted(spec.d.to_registers, "__call__", fitting(SHARED_D, dtype, values), dtype)


def delivered(spec: Spec, values: tuple) -> tuple:
    """Finished values, which D's array must hold. Those that only passed through shared memory may have come in a narrower
    dtype, which a transform gave them by name."""
    if spec.returns_d:
        return convert_all(spec.d.layout.dtype, values)
    return fitting(OUT, spec.d.layout.dtype, values)


# -- fragments --------------------------------------------------------------------------------------------------------

def transform_fragment(operator: Operator, transform: Transform, fragment_map: FragmentMap, dtype: np.dtype, fragment: tuple,
                       tile: Tile, place: TileCoord) -> tuple:
    """A transform of a fragment's elements, as ``dtype``; ``tile`` is where the fragment lies in its matrix.

    An element beyond the matrix's end (``place``) is transformed as if it were the nearest one inside: a function that
    indexes an array by its coordinates stays within it, and the result is never stored.
    The coordinates of an opaque fragment (not ``operator.is_mapped``) are not known; `get_config` refuses a transform that
    asks for them.
    """
    changed = transform_registers(operator, transform, fragment_map, fragment, tile, place)
    return all_converted(transform, "__call__", changed, dtype)


def transform_registers(operator: Operator, transform: Transform, fragment_map: FragmentMap, fragment: tuple, tile: Tile,
                        place: TileCoord) -> tuple:
    """The same in the type that the transform gives."""
    if transform.is_identity:
        return fragment
    if operator.is_mapped:
        return apply(changed_element, fragment, transform, fragment_map, tile, place)
    return apply(lambda x, n: transformed(transform, x, 0, 0), fragment)


def changed_element(x: Numeric, n: int, transform: Transform, fragment_map: FragmentMap, tile: Tile,
                    place: TileCoord) -> Any:
    lane = lane_index()
    i = tile.index[0] + fragment_coordinate(fragment_map, lane, n, 0)
    j = tile.index[1] + fragment_coordinate(fragment_map, lane, n, 1)
    return transformed(transform, x, min(i, place.rows - 1), min(j, place.columns - 1))


def transform_input(operand: Operand, operator: Operator, fragment_map: FragmentMap, dtype: np.dtype, fragment: tuple,
                    tile: Tile, place: TileCoord) -> tuple:
    """The shared-to-registers transform of A or B. Beyond K's end the identity stays."""
    changed = transform_fragment(operator, operand.to_registers, fragment_map, dtype, fragment, tile, place)
    if operator.is_mapped and not operand.to_registers.is_identity:
        return apply(masked_element, changed, operand, fragment_map, tile, place, convert(dtype, operator.identity))
    return changed


def masked_element(x: Numeric, n: int, operand: Operand, fragment_map: FragmentMap, tile: Tile, place: TileCoord,
                   nothing: Numeric) -> Any:
    end = place.columns if operand.k_axis == 1 else place.rows
    if tile.index[operand.k_axis] + fragment_coordinate(fragment_map, lane_index(), n, operand.k_axis) < end:
        return x
    return nothing


# --------------------------------------------------------------------------------------------------
# Moving an operand's tiles between global memory, registers and shared memory, masked at its edges, through its
# transforms.
#
# Masking is done here, once, for all layouts: an element out of range is never asked for, and stands as the operator's
# identity wherever the product would meet it.

def copy_to_shared(operand: Operand, data: View, pointer: SharedPointer, place: TileCoord, nothing: Numeric, warp: int,
                   shape: StackShape) -> None:
    """Copy the block's tile of an operand, which begins at ``place``, from global to shared memory.

    Where a thread's registers hold all its tiles, all loads go out before the first store waits for one.
    """
    if operand.moves > 0:
        copy_together(operand, data, pointer, place, nothing, warp, shape)
    else:
        copy_in_turn(operand, data, pointer, place, nothing, warp, shape)


def copy_in_turn(operand: Operand, data: View, pointer: SharedPointer, place: TileCoord, nothing: Numeric, warp: int,
                 shape: StackShape) -> None:
    """Tile by tile."""
    warp_tiles = parallelise(operand.tile, operand.warp, warp, operand.warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            put_moved(operand, pointer, thread_tiles[j], read_moved(operand, data, thread_tiles[j], place, nothing, shape))


def copy_together(operand: Operand, data: View, pointer: SharedPointer, place: TileCoord, nothing: Numeric, warp: int,
                  shape: StackShape) -> None:
    """All loads, then all stores."""
    held = registers(operand.held, operand.moves)
    warp_tiles = parallelise(operand.tile, operand.warp, warp, operand.warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            held[i * len(thread_tiles) + j] = read_moved(operand, data, thread_tiles[j], place, nothing, shape)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            put_moved(operand, pointer, thread_tiles[j], held[i * len(thread_tiles) + j])


def read_moved(operand: Operand, data: View, tile: Tile, place: TileCoord, nothing: Numeric, shape: StackShape) -> tuple:
    """A thread's tile on its way to shared memory: in words where nothing happens to it, or in elements."""
    if operand.passes_words:
        return read_words(operand, data, translate(tile, place.i, place.j), place, nothing, shape)
    return read_tile(operand, data, translate(tile, place.i, place.j), place, nothing, shape)


def put_moved(operand: Operand, pointer: SharedPointer, tile: Tile, held: tuple) -> None:
    if operand.passes_words:
        put_words(operand, pointer, tile, held)
    else:
        put_elements(operand, pointer, tile, held)


def put_words(operand: Operand, pointer: SharedPointer, tile: Tile, words: tuple) -> None:
    operand.shared.store_words(pointer, tile, words, operand.leading())


def put_elements(operand: Operand, pointer: SharedPointer, tile: Tile, values: tuple) -> None:
    operand.shared.store_shared(pointer, tile, values, operand.leading())


# -- reading an operand -----------------------------------------------------------------------------------------------

def read_words(operand: Operand, data: View, tile: Tile, place: TileCoord, nothing: Numeric, shape: StackShape) -> tuple:
    """A thread's tile in 32-bit words: for the same type and order on both sides, and no transform between.

    ``tile`` is where it lies in the matrix, which ends as ``place`` says.
    """
    if operand.clipped:
        return read_clipped(operand, data, tile, place)
    if inside(tile, place.rows, place.columns):
        if operand.is_packed:
            return read_packed(operand, data, tile, shape)
        return read_line(operand, data, tile)
    return pack_words(read_outside(operand, data, tile, place, nothing, shape))


def read_line(operand: Operand, data: View, tile: Tile) -> tuple:
    return load_words(data, operand.layout.axis, tile.base, tile.offset, tile.count)


def read_clipped(operand: Operand, data: View, tile: Tile, place: TileCoord) -> tuple:
    """A line, and zeros behind the matrix's end: in any thread by the same instructions."""
    rows, columns = place.rows - tile.index[0], place.columns - tile.index[1]
    along, across = (columns, rows) if operand.layout.axis == 1 else (rows, columns)
    return load_words_within(data, operand.layout.axis, tile.base, tile.offset, tile.count, along if across > 0 else 0)


def read_packed(operand: Operand, data: View, tile: Tile, shape: StackShape) -> tuple:
    return operand.layout.load_packed(data, tile, shape)


def read_tile(operand: Operand, data: View, tile: Tile, place: TileCoord, nothing: Numeric, shape: StackShape) -> tuple:
    """A thread's tile of an operand, transformed, in the shared layout's dtype; ``nothing`` where it is out of range."""
    if inside(tile, place.rows, place.columns):
        return read_inside(operand, data, tile, shape)
    return read_outside(operand, data, tile, place, nothing, shape)


def inside(tile: Tile, rows: int, columns: int) -> bool:
    return tile.index[0] + tile.size[0] <= rows and tile.index[1] + tile.size[1] <= columns


def read_inside(operand: Operand, data: View, tile: Tile, shape: StackShape) -> tuple:
    layout = operand.layout
    loaded = counted(layout, "load", layout.load(data, tile, shape), tile.count)
    values = all_converted(layout, "load", loaded, layout.dtype)
    return transform_into(operand, values, tile)


def read_outside(operand: Operand, data: View, tile: Tile, place: TileCoord, nothing: Numeric, shape: StackShape) -> tuple:
    """A tile that is not wholly in range: all of it is out where no tile straddles an edge."""
    if operand.whole:
        return fill(operand.shared.dtype, tile.count, nothing)
    return generate(tile.count, read_edge_element, operand, data, tile, place, nothing, shape)


def read_edge_element(n: int, operand: Operand, data: View, tile: Tile, place: TileCoord, nothing: Numeric,
                      shape: StackShape) -> Any:
    i, j = row_of(tile, n), column_of(tile, n)
    if i < place.rows and j < place.columns:
        return transform_element_into(operand, element_of(operand.layout, data, i, j, shape), i, j)
    return convert(operand.shared.dtype, nothing)


# --------------------------------------------------------------------------------------------------
# Reuse of accumulators as an operand: the sums of one product become A of the next one in the registers that they are in.
#
# A kernel that chains products (attention's two, the layers of an MLP) joins the sums of one, converts them, packs
# neighbours into registers, and gives the next product so many at a time as fragments of A. That is right where every
# lane holds the elements that the instruction wants of it, in the instruction's order; elsewhere the kernel computes
# another product, and says nothing. The operators' fragment maps (`gemmkit.ptx.mma`) have both sides, so that a
# kernel's spec compares them on the host, before anything is compiled.

REGISTER = 4                           # bytes; an element of 8 has two of them
PARTS = {1: ("",), 2: (" (its lower half)", " (its upper half)"), 4: tuple(f" (its byte {n})" for n in range(4))}


@dataclass(frozen=True)
class FragmentReuse(Component):
    """The sums of ``product``, ``columns`` wide, as A of ``following``.

    The sums are a lane's accumulators, joined: instructions stand side by side along N, as many as ``columns`` has, and what
    a lane holds of one comes before what it holds of the next. Each ``values`` of them, converted to ``following``'s dtype
    and packed, the first into the lower part of a register, are a fragment of A: in device code
    ``split(sums, reuse.values)``. Fragment n has columns ``n * k`` to ``(n + 1) * k`` of the sums.

    Raises ConfigError where a lane does not hold what it has to, naming operators, lane, register and elements.

    >>> from gemmkit.operators import MMAOp, WGMMAOp
    >>> layers = FragmentReuse(WGMMAOp(128), WGMMAOp(64), columns=128)
    >>> layers.fragments, layers.values, layers.k
    (8, 8, 16)
    >>> FragmentReuse(MMAOp(), MMAOp(), columns=64).fragments           # eight instructions of 8 columns
    4
    >>> FragmentReuse(MMAOp(), MMAOp(dtype="float32"), columns=64)      # doctest: +ELLIPSIS
    Traceback (most recent call last):
    gemmkit.lang.errors.ConfigError: the sums of MMAOp() as A of MMAOp(dtype='float32'): lane 0 has element (0, 1) of ...
    """

    product: Operator
    following: Operator
    columns: int

    def __post_init__(self) -> None:
        super().__post_init__()
        reason = _unmapped(self) or _uneven(self) or _other_element(self)
        if reason is not None:
            raise ConfigError(f"the sums of {self.product!r} as A of {self.following!r}: {reason}")

    @cached_property
    def values(self) -> int:
        """A lane's elements of a fragment of A."""
        return _map_a(self).values

    @cached_property
    def k(self) -> int:
        """Columns of the sums that a fragment has."""
        return _map_a(self).columns

    @cached_property
    def fragments(self) -> int:
        return self.columns // self.k


def _map_a(given: FragmentReuse) -> FragmentMap:
    found = given.following.map_a
    assert found is not None
    return found


def _unmapped(given: FragmentReuse) -> str | None:
    """Why nothing can be said of a lane's registers."""
    c, a = given.product.map_c, given.following.map_a
    if c is None:
        return f"which element a lane's accumulator is, {type(given.product).__name__} does not say (map_c is None)"
    if a is None:
        return f"which element of A a lane's register is, {type(given.following).__name__} does not say (map_a is None)"
    for operator in (given.product, given.following):
        if operator.sums != 1:
            return f"an element of {type(operator).__name__} has {operator.sums} parts; numbers of one are needed"
    return None


def _uneven(given: FragmentReuse) -> str | None:
    """Why the two do not have the same rows and whole numbers of instructions."""
    c, a = given.product.map_c, given.following.map_a
    assert c is not None and a is not None
    if (c.threads, c.rows) != (a.threads, a.rows):
        return f"{c.threads} threads hold {c.rows} rows of sums, and {a.threads} threads hold {a.rows} rows of A"
    for what, width in (("an instruction's sums", c.columns), ("a fragment of A", a.columns)):
        if given.columns < 1 or given.columns % width:
            return f"columns={given.columns}: a multiple of {width} is needed, which {what} has"
    sums, taken = given.columns // c.columns * c.values, given.columns // a.columns * a.values
    if sums != taken:
        return f"a lane has {sums} sums of {given.columns} columns, and A takes {taken} of it"
    return None


def _other_element(given: FragmentReuse) -> str | None:
    """Which element stands where another one should."""
    c, a = given.product.map_c, given.following.map_a
    assert c is not None and a is not None
    found = _first_difference(c, a, given.columns)
    if found is None:
        return None
    lane, value, has, wanted = found
    n, place = divmod(value, a.values)
    per = max(1, REGISTER // int(given.following.fragment_a.dtype.itemsize))
    return (f"lane {lane} has element {has} of the sums in register {place // per}{PARTS[per][place % per]} of A's fragment "
            f"{n}, where element {wanted} is wanted")


Element = tuple[int, int]


@lru_cache(maxsize=256)
def _first_difference(c: FragmentMap, a: FragmentMap, columns: int) -> tuple[int, int, Element, Element] | None:
    """(lane, value, the element that it is, the one that it should be) where the two differ.

    A map is a sum of what the lane and what the value contribute, so that two maps which agree for all values of lane 0, and
    for value 0 of all lanes, agree everywhere.
    """
    c, a = c.beside(columns // c.columns), a.beside(columns // a.columns)
    for lane, value in (*((0, value) for value in range(a.values)), *((lane, 0) for lane in range(a.threads))):
        held, wanted = ((x.row(lane, value), x.column(lane, value)) for x in (c, a))
        if held != wanted:
            return lane, value, held, wanted
    return None


# --------------------------------------------------------------------------------------------------
# The arrays of a problem, its sizes and its GPU: what a specialisation may depend on beside the configuration.

@dataclasses.dataclass(frozen=True)
class OperandArrays:
    """A, B, C and D of a problem of M x N x K; None stands for an array that suits TMA."""

    a: ArrayInfo | None
    b: ArrayInfo | None
    out: ArrayInfo | None
    M: int
    N: int
    K: int
    c: ArrayInfo | None = None
    products: int | None = None        # of a stack; None: there is no stack
    device: DeviceInfo | None = None   # None where it is not known

    @property
    def sm_count(self) -> int:
        """Multiprocessors of the device, 0 where it is not known."""
        return 0 if self.device is None else self.device.sm_count

    @property
    def count(self) -> int:
        """How many products there are."""
        return 1 if self.products is None else self.products

    def extents(self, name: str) -> tuple[int, int]:
        """Rows and columns of "a", "b", "c" or "out"."""
        return {"a": (self.M, self.K), "b": (self.K, self.N)}.get(name, (self.M, self.N))


# --------------------------------------------------------------------------------------------------
# Operands whose rows begin at no multiple of 16 bytes: loads in words up to their ends, without a branch.
#
# Where a k-tile reaches over an edge, threads load what is there of their lines of 16 bytes by predicated instructions
# (`gemmkit.ptx.memory`), all before the first one waits. Element by element, in branches, a line would wait for the one
# before; and of a small product, or of one with an odd K, most k-tiles reach over an edge.

REGISTERS, MOST = 65536, 255           # of a multiprocessor, and of a thread
OTHERS = 32                            # of a thread, beside accumulators and what it loads
A_WORD = 3                             # registers, at most, that a word on its way takes: its line's fifth, its address


def clipped(operand: Operand, info: ArrayInfo | None, nothing: Numeric) -> Operand:
    """``operand``, marked if lines of its array ``info`` can be loaded so, with ``nothing`` behind their ends."""
    size = operand.layout.dtype.itemsize
    if info is None or not operand.is_direct or alignment(info) >= CHUNK or nothing != 0 or size > 8:
        return operand
    unit = unit_of(operand.layout, info)
    # Of a group ``info`` says what its arrays have in common: an extent of 1 makes none of them contiguous along it.
    if unit is None or unit_axis(info) != unit or info.strides[unit] != 1 or operand.thread.count * size % CHUNK:
        return operand
    return dataclasses.replace(operand, clipped=True)


def clipped_inputs(config: Config, a: Operand, b: Operand, arrays: OperandArrays) -> tuple[Operand, Operand]:
    """A and B of a kernel whose multiplying threads load them, where that leaves them enough registers."""
    found = clipped(a, arrays.a, config.operator.identity), clipped(b, arrays.b, config.operator.identity)
    marked = [operand for operand in found if operand.clipped]
    words = sum(operand.moves * operand.held.count for operand in marked)
    sums = config.compute_warp.MN.count // 32 * -(-config.operator.fragment_c.dtype.itemsize // 4)
    limit = min(MOST, REGISTERS // (max(1, config.blocks_per_sm) * config.threads))
    if all(operand.moves for operand in marked) and A_WORD * words <= limit - sums - OTHERS:
        return found
    return a, b
