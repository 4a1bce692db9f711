"""How operands get into the stages of `multistage`: by cp.async (plain, joined, tensors, boxes), or through registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.collectives.operand import Operand, Route, copy_in_turn, put_moved, read_moved, unit_of
from gemmkit.kernels.collectives.scheduler import KTile
from gemmkit.kernels.spec import rule
from gemmkit.lang.aggregates import fill
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import SharedPointer
from gemmkit.lang.registers import Fragment
from gemmkit.layouts import Boxed, ColumnInterleaved, Joined, Matricised, Plain
from gemmkit.layouts.plain import BOX, RUN
from gemmkit.operators import Algebra, BoxMMAOp
from gemmkit.ptx.copy_async import SIZES, commit_copies, copy_async, offset_of, wait_copies
from gemmkit.ptx.memory import shared, store_shared
from gemmkit.ptx.special import carried, lane_index
from gemmkit.runtime.arrays import ArrayInfo, alignment, unit_axis
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile, parallelise, translate_offset

if TYPE_CHECKING:
    from gemmkit.kernels.config import Config
    from gemmkit.kernels.sm80.kernel import CopyShare, Moved, Round, Sm80Spec


# --------------------------------------------------------------------------------------------------
# What is known of the copies of a round, when the kernel is compiled: whether they may reach beyond an edge.

@dataclass(frozen=True)
class Reach(Component):
    """``inside``: all are in range. ``asks``: a branch finds out, once for an operand's tile. Else each piece has a
    predicate."""

    inside: bool = False
    asks: bool = False


INSIDE, AT_EDGES, ANYWHERE = Reach(inside=True), Reach(), Reach(asks=True)


# --------------------------------------------------------------------------------------------------
# How an operand gets from global memory into a stage of `multistage`: copied without registers, or by way of them.
#
# | route | what it takes |
# |---|---|
# | `CpAsync` | elements of a strided matrix as they are, 4 to 16 bytes a copy, along the stage's lines or across |
# | `CpAsyncSeparable` | the same of tensors, whose rows and columns are made of several dimensions |
# | `CpAsyncBoxes` | 16-bit tensors whose neighbours in memory are eight apart along K, for `operators.BoxMMAOp` |
# | `CpAsyncJoined` | lines of operands of several arrays |
# | `StagedByThreads` | everything: `Layout.element`, transforms, numbers that become planes, two-byte elements anywhere |
#
# cp.async copies are started before a round's products, or in parts between them. What is staged is loaded before the
# products and stored behind them. Which of these ways a GPU has is `copies`' to say.

OFFSET = Fragment(np.dtype(np.int64), 1)


class Piece(NamedTuple):
    """What one cp.async copies of a k-tile: where it begins in the tile, and its number among the thread's pieces."""

    tile: Any
    number: Any


@dataclass(frozen=True)
class StageRoute(Route):
    """Base class: nothing is loaded, copied or stored. ``sees_edges``: copies in range are others than those at edges."""

    sees_edges: ClassVar[bool] = False

    @classmethod
    def refuses(cls, operand: Operand, info: ArrayInfo | None, extents: tuple[int, int]) -> str | None:
        """Why the route does not take an operand with this array and these extents; None if it does."""
        return None

    @classmethod
    def of(cls, operand: Operand, info: ArrayInfo | None, extents: tuple[int, int]) -> StageRoute:
        """The route for an operand that it does not refuse."""
        return cls()

    def cursors(self, operand: Operand) -> int:
        """How many offsets into memory a thread keeps."""
        return 1

    def cursor(self, operand: Operand) -> Fragment:
        """One of them, in bytes."""
        return OFFSET

    # -- in device code -------------------------------------------------------------------------------------------------

    def seek(self, operand: Operand, moved: Moved, at: KTile) -> None:
        """Find where this thread's part of a k-tile begins in memory."""

    def advance(self, spec: Sm80Spec, operand: Operand, moved: Moved) -> None:
        """The same of the k-tile behind it."""

    def whole_tiles(self, operand: Operand, at: KTile, rounds: int) -> int:
        """How many k-tiles from ``at`` on are copied without a look at the matrix's edges; ``rounds`` if all are."""
        return rounds

    def load(self, spec: Sm80Spec, operand: Operand, moved: Moved, at: KTile) -> None:
        """Load this thread's part of a k-tile."""

    def copy(self, spec: Sm80Spec, operand: Operand, moved: Moved, this: Round, share: CopyShare) -> None:
        """Start a share of the copies of a round."""

    def store(self, operand: Operand, moved: Moved, stage: int) -> None:
        """Store what was loaded into the stage at ``stage`` (bytes)."""


@dataclass(frozen=True)
class CpAsync(StageRoute):
    """Threads start copies of ``width`` elements each."""

    width: int = 1
    sees_edges: ClassVar[bool] = True

    @classmethod
    def refuses(cls, operand: Operand, info: ArrayInfo | None, extents: tuple[int, int]) -> str | None:
        layout, to, why = operand.layout, operand.shared, cls.refuses_layout(operand)
        if why is not None:
            return why
        if not operand.to_shared.is_identity:
            return "its elements are transformed on their way to shared memory"
        if hasattr(to, "plane") or layout.dtype != to.dtype:
            return "it lies otherwise in shared memory than in global memory"
        if operand.shares == 0:
            return "its tile does not divide among the threads"
        if not operand.is_even:
            return "its tile does not divide evenly: a thread's pieces are at no fixed distance from its first"
        if not cls._widths(operand, info, extents):
            return f"its elements of {layout.dtype.itemsize} bytes are not aligned to what cp.async copies: {SIZES} bytes"
        return None

    @classmethod
    def refuses_layout(cls, operand: Operand) -> str | None:
        """Why an operand's layout is none of those that the route copies."""
        if not isinstance(operand.layout, Plain) or not operand.layout.is_plain:
            return "its elements are computed, and cp.async copies what is in memory"
        return None

    @classmethod
    def of(cls, operand: Operand, info: ArrayInfo | None, extents: tuple[int, int]) -> CpAsync:
        return cls(max(cls._widths(operand, info, extents)))

    @classmethod
    def _widths(cls, operand: Operand, info: ArrayInfo | None, extents: tuple[int, int]) -> list[int]:
        """How many elements a copy may take."""
        layout, to, thread = operand.layout, operand.shared, operand.thread
        size, axis = layout.dtype.itemsize, to.axis
        along = (thread.extents[axis] == thread.count and layout.vector_axis == axis
                 and (info is None or unit_axis(info) == unit_of(layout, info)))
        limit = thread.count if along else 1
        aligned = 16 if info is None else alignment(info)
        return [width for width in range(1, limit + 1)
                if width * size in SIZES and limit % width == 0 and aligned % (width * size) == 0
                and (width == 1 or (extents[axis] % width == 0 and layout.neighbours % width == 0))]

    def pieces(self, operand: Operand) -> int:
        """How many copies bring a thread's tile."""
        return operand.thread.count // self.width

    def seek(self, operand: Operand, moved: Moved, at: KTile) -> None:
        place = operand.place(at.m, at.n, at.k, at.shape)
        warp_tile = parallelise(operand.tile, operand.warp, moved.warp, operand.warps)[0]
        first = parallelise(warp_tile, operand.thread, lane_index(), 32, operand.order)[0]
        moved.cursor[0] = (offset_of(moved.data, (place.i + first.base[0], place.j + first.base[1])),)

    def advance(self, spec: Sm80Spec, operand: Operand, moved: Moved) -> None:
        size = spec.block.size.K
        step = offset_of(moved.data, (0, size)) if operand.k_axis == 1 else offset_of(moved.data, (size, 0))
        moved.cursor[0] = (carried(moved.cursor[0][0] + step),)

    def whole_tiles(self, operand: Operand, at: KTile, rounds: int) -> int:
        place = operand.place(at.m, at.n, at.k, at.shape)
        across, along = (place.rows - place.i, place.columns - place.j) if operand.k_axis == 1 else (
            place.columns - place.j, place.rows - place.i)
        if across >= operand.tile.size[1 - operand.k_axis]:
            return along // operand.tile.size[operand.k_axis]
        return along * 0

    def copy(self, spec: Sm80Spec, operand: Operand, moved: Moved, this: Round, share: CopyShare) -> None:
        """In range, without predicates: with them f64 4096^3 took 5 % more, and f32 2 % more instructions. A branch between
        products would part them (f16 4096^3: 0.55 of cuBLAS's wgmma, and 0.51 with it), so there pieces have predicates."""
        if this.reach.inside:
            self.copy_whole(operand, moved, this.write, this.ahead, share)
        elif this.reach.asks and share.parts == 1:
            place = operand.place(this.ahead.m, this.ahead.n, this.ahead.k, this.ahead.shape)
            if place.i + operand.tile.size[0] <= place.rows and place.j + operand.tile.size[1] <= place.columns:
                self.copy_whole(operand, moved, this.write, this.ahead, share)
            else:
                self.copy_edge(spec, operand, moved, this.write, this.ahead, share)
        else:
            self.copy_edge(spec, operand, moved, this.write, this.ahead, share)

    def copy_whole(self, operand: Operand, moved: Moved, write: int, at: KTile, share: CopyShare) -> None:
        """A tile in range. (It gets no more of a round than it needs: what is known of rounds would make it a function for
        each kind of them, and it is a twentieth of a float32 kernel's compilation.)"""
        pointer = shared(operand.shared.dtype, operand.offset + write)
        warp_tiles = parallelise(operand.tile, operand.warp, moved.warp, operand.warps)
        for i in range(len(warp_tiles)):
            thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
            for j in range(len(thread_tiles)):
                if (i * len(thread_tiles) + j) * share.parts // (len(warp_tiles) * len(thread_tiles)) == share.part:
                    for piece in range(self.pieces(operand)):
                        tile = piece_of(thread_tiles[j], operand, piece)
                        n = (i * len(thread_tiles) + j) * self.pieces(operand) + piece
                        self.copy_piece(operand, moved, pointer, Piece(tile, n), at, True)

    def copy_edge(self, spec: Sm80Spec, operand: Operand, moved: Moved, write: int, at: KTile, share: CopyShare) -> None:
        """A tile that reaches beyond an edge: pieces are wholly in range, or wholly out."""
        place = operand.place(at.m, at.n, at.k, at.shape)
        pointer = shared(operand.shared.dtype, operand.offset + write)
        warp_tiles = parallelise(operand.tile, operand.warp, moved.warp, operand.warps)
        for i in range(len(warp_tiles)):
            thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
            for j in range(len(thread_tiles)):
                if (i * len(thread_tiles) + j) * share.parts // (len(warp_tiles) * len(thread_tiles)) == share.part:
                    for piece in range(self.pieces(operand)):
                        tile = piece_of(thread_tiles[j], operand, piece)
                        n = (i * len(thread_tiles) + j) * self.pieces(operand) + piece
                        is_there = place.i + tile.index[0] < place.rows and place.j + tile.index[1] < place.columns
                        if spec.operator.identity == 0:
                            self.copy_piece(operand, moved, pointer, Piece(tile, n), at, is_there)
                        elif is_there:
                            self.copy_piece(operand, moved, pointer, Piece(tile, n), at, True)
                        else:
                            store_shared(pointer, operand.shared.position(tile.base, operand.leading()),
                                         operand.shared.position(tile.offset, operand.leading()),
                                         fill(operand.shared.dtype, self.width, spec.operator.identity))

    def copy_piece(self, operand: Operand, moved: Moved, pointer: SharedPointer, piece: Piece, at: KTile,
                   is_there: bool) -> None:
        """``width`` elements of the k-tile ``at``."""
        tile = piece.tile
        copy_async(pointer, operand.shared.position(tile.base, operand.leading()),
                   operand.shared.position(tile.offset, operand.leading()), moved.data,
                   moved.cursor[0][0] + offset_of(moved.data, (tile.offset[0], tile.offset[1])), self.width, is_there)


def piece_of(tile: Tile, operand: Any, n: int) -> Any:
    """A thread's tile, moved to its n-th piece."""
    distance = n * operand.route.width
    if operand.thread.size[0] > 1:
        return translate_offset(tile, distance % operand.thread.size[0], distance // operand.thread.size[0])
    return translate_offset(tile, 0, distance)


@dataclass(frozen=True)
class StagedByThreads(StageRoute):
    """Threads load, transform and store.

    Where a thread's registers hold all its tiles (`Operand.moves`), loads go out before a round's products and are stored
    behind them. Otherwise tile by tile, before the products.
    """

    def load(self, spec: Sm80Spec, operand: Operand, moved: Moved, at: KTile) -> None:
        if operand.moves > 0:
            place = operand.place(at.m, at.n, at.k, at.shape)
            warp_tiles = parallelise(operand.tile, operand.warp, moved.warp, operand.warps)
            for i in range(len(warp_tiles)):
                thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
                for j in range(len(thread_tiles)):
                    moved.held[i * len(thread_tiles) + j] = read_moved(operand, moved.data, thread_tiles[j], place,
                                                                       spec.operator.identity, at.shape)

    def copy(self, spec: Sm80Spec, operand: Operand, moved: Moved, this: Round, share: CopyShare) -> None:
        if operand.moves == 0:
            if share.part == 0:
                at = this.ahead
                copy_in_turn(operand, moved.data, shared(operand.shared.dtype, operand.offset + this.write),
                             operand.place(at.m, at.n, at.k, at.shape), spec.operator.identity, moved.warp, at.shape)

    def store(self, operand: Operand, moved: Moved, stage: int) -> None:
        if operand.moves > 0:
            pointer = shared(operand.shared.dtype, operand.offset + stage)
            warp_tiles = parallelise(operand.tile, operand.warp, moved.warp, operand.warps)
            for i in range(len(warp_tiles)):
                thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
                for j in range(len(thread_tiles)):
                    put_moved(operand, pointer, thread_tiles[j], moved.held[i * len(thread_tiles) + j])


# --------------------------------------------------------------------------------------------------
# cp.async for operands of several arrays: each piece of a line is copied from the array that has it (`Layout.found`).

@dataclass(frozen=True)
class CpAsyncJoined(CpAsync):
    """Threads start copies of ``width`` neighbours each. Where a piece lies is found anew for each: along K the array may
    change, and with it the distance from line to line."""

    @classmethod
    def refuses_layout(cls, operand: Operand) -> str | None:
        layout = operand.layout
        if not isinstance(layout, (ColumnInterleaved, Joined)) or not layout.is_found:
            return "its elements are not those of arrays of one layout"
        return None

    @classmethod
    def _widths(cls, operand: Operand, info: ArrayInfo | None, extents: tuple[int, int]) -> list[int]:
        """Lines that are lines in every array: single elements are left to the registers, which move more at once."""
        layout: Any = operand.layout
        parts, size = layout.infos, layout.dtype.itemsize
        if any(unit_axis(part) != layout.line_axis for part in parts):
            return []
        return [width for width in super()._widths(operand, info, extents)
                if width > 1 and all(alignment(part) % (width * size) == 0 for part in parts)]

    # -- in device code -------------------------------------------------------------------------------------------------

    def seek(self, operand: Operand, moved: Moved, at: KTile) -> None:
        """Nothing is kept."""

    def advance(self, spec: Sm80Spec, operand: Operand, moved: Moved) -> None:
        """Nothing is kept."""

    def copy_piece(self, operand: Operand, moved: Moved, pointer: SharedPointer, piece: Piece, at: KTile,
                   is_there: bool) -> None:
        tile = piece.tile
        place = operand.place(at.m, at.n, at.k, at.shape)
        view, row, column = operand.layout.found(moved.data, place.i + tile.index[0], place.j + tile.index[1])
        copy_async(pointer, operand.shared.position(tile.base, operand.leading()),
                   operand.shared.position(tile.offset, operand.leading()), view, offset_of(view, (row, column)), self.width,
                   is_there)


# --------------------------------------------------------------------------------------------------
# cp.async for operands whose element's place is the sum of its row's and its column's (`Layout.is_separable`): tensors,
# whose rows and columns are made of several dimensions each.
#
# What a row of A or a column of B adds is found once a tile of D and kept in registers, an offset for each of a thread's
# pieces. What the position along K adds is found anew in every round, and is the same for most of a thread's pieces.

@dataclass(frozen=True)
class CpAsyncSeparable(CpAsync):
    """Threads start copies of ``width`` neighbours each, wherever these lie."""

    @classmethod
    def refuses_layout(cls, operand: Operand) -> str | None:
        if isinstance(operand.layout, Plain) or not operand.layout.is_separable:
            return "an element's place is not the sum of its row's and its column's"
        return None

    def cursors(self, operand: Operand) -> int:
        return operand.slots * self.pieces(operand)

    def cursor(self, operand: Operand) -> Fragment:
        return operand.distances

    # -- in device code -------------------------------------------------------------------------------------------------

    def seek(self, operand: Operand, moved: Moved, at: KTile) -> None:
        place, across = operand.place(at.m, at.n, at.k, at.shape), 1 - operand.k_axis
        begin = place.i if across == 0 else place.j
        warp_tiles = parallelise(operand.tile, operand.warp, moved.warp, operand.warps)
        for i in range(len(warp_tiles)):
            thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
            for j in range(len(thread_tiles)):
                for piece in range(self.pieces(operand)):
                    tile = piece_of(thread_tiles[j], operand, piece)
                    n = (i * len(thread_tiles) + j) * self.pieces(operand) + piece
                    moved.cursor[n] = (operand.distance(moved.data, begin + tile.index[across], across),)

    def advance(self, spec: Sm80Spec, operand: Operand, moved: Moved) -> None:
        """The rows and columns stay."""

    def copy_piece(self, operand: Operand, moved: Moved, pointer: SharedPointer, piece: Piece, at: KTile,
                   is_there: bool) -> None:
        tile = piece.tile
        along = operand.distance(moved.data, at.k + tile.index[operand.k_axis], operand.k_axis)
        if operand.layout.is_padded:
            place = operand.place(at.m, at.n, at.k, at.shape)
            is_there = is_there and operand.layout.contains(place.i + tile.index[0], place.j + tile.index[1])
            copy_async(pointer, operand.shared.position(tile.base, operand.leading()),
                       operand.shared.position(tile.offset, operand.leading()), moved.data,
                       moved.cursor[piece.number][0] + along, self.width, is_there)
        else:
            copy_async(pointer, operand.shared.position(tile.base, operand.leading()),
                       operand.shared.position(tile.offset, operand.leading()), moved.data,
                       moved.cursor[piece.number][0] + along, self.width, is_there)


@dataclass(frozen=True)
class CpAsyncBoxes(CpAsyncSeparable):
    """Threads copy the eight neighbours of a piece of a box. The tile's positions along K are those of its lines, so a
    thread's tile is a line's run; the element that stands there says where it lies in memory."""

    @classmethod
    def refuses_layout(cls, operand: Operand) -> str | None:
        layout = operand.layout
        if not isinstance(operand.shared, Boxed):
            return "its tile in shared memory is not Boxed"
        if not isinstance(layout, Matricised) or layout.axis != operand.k_axis or layout.comb != RUN or layout.vector % RUN:
            return f"{layout!r} is not a Tensor whose neighbours in memory are {RUN} apart along K, in runs of {RUN}"
        if operand.tile.extents[operand.k_axis] % BOX or operand.thread.extents[operand.k_axis] != RUN:
            return f"k-tiles of multiples of {BOX}, moved {RUN} elements a thread along K, are needed"
        return super().refuses_layout(operand)

    @classmethod
    def _widths(cls, operand: Operand, info: ArrayInfo | None, extents: tuple[int, int]) -> list[int]:
        """A run, where the array has them at multiples of 16 bytes; the comb and its vectors make K whole boxes."""
        layout: Any = operand.layout
        size = RUN * layout.dtype.itemsize
        fits = info is None or (unit_axis(info) == layout.unit and alignment(info) % size == 0)
        return [RUN] if fits and size in SIZES else []

    # -- in device code -------------------------------------------------------------------------------------------------

    def copy_piece(self, operand: Operand, moved: Moved, pointer: SharedPointer, piece: Piece, at: KTile,
                   is_there: bool) -> None:
        tile = piece.tile
        element = at.k + operand.shared.element_at(tile.index[operand.k_axis])
        copy_async(pointer, operand.shared.position(tile.base, operand.leading()),
                   operand.shared.position(tile.offset, operand.leading()), moved.data,
                   moved.cursor[piece.number][0] + operand.distance(moved.data, element, operand.k_axis), self.width,
                   is_there)


def validate(config: Config) -> None:
    """Raise ConfigError where boxes are read or written by what knows none."""
    operator = config.operator
    boxes = [name for name in "ab" if isinstance(getattr(config, f"shared_{name}_layout"), Boxed)]
    rule(not isinstance(operator, Algebra) or not isinstance(operator.base, BoxMMAOp), "operator", operator,
         "boxes hold real numbers; use base=MMAOp(...)")
    if not isinstance(operator, BoxMMAOp):
        for name in boxes:
            rule(False, f"shared_{name}_layout", getattr(config, f"shared_{name}_layout"), f"with operator={operator!r}: "
                 "operators.BoxMMAOp alone reads boxes")
        return
    rule(config.block_shape.size.K % BOX == 0, "block_shape", config.block_shape, f"K must be a multiple of {BOX}: the "
         f"operator takes K in boxes of {RUN} x {RUN}")
    for name in "ab":
        field = f"transform_shared_to_regs_{name}"
        transform = getattr(config, field)
        rule(transform.is_identity, field, transform, f"{operator!r} has values of several places of K in one operation; "
             f"give it as transform_global_to_shared_{name}, of the operand that is not {operator.combed!r}")


# --------------------------------------------------------------------------------------------------
# What a GPU has for copies to the stages of `multistage`: which routes, and how threads wait for what they have started.
#
# GPUs before sm_80 have no cp.async: `StagedCopies` leaves the route through registers alone.

@dataclass(frozen=True)
class Copies(Component):
    """What a GPU has for copies to the stages: the routes, and how a thread waits for copies that it has started.

    More than ``useful_stages`` stages hide nothing more. Base class: threads wait for nothing.
    """

    minimum_arch: ClassVar[tuple[int, int]]
    routes: ClassVar[tuple[type[StageRoute], ...]]             # in the order in which they are preferred
    useful_stages: ClassVar[int]

    def route(self, operand: Operand, info: ArrayInfo | None, extents: tuple[int, int]) -> StageRoute:
        """The first route that does not refuse an operand. Boxes have one that fills them: ConfigError if it refuses."""
        if isinstance(operand.shared, Boxed):
            why = CpAsyncBoxes.refuses(operand, info, extents)
            rule(why is None, f"shared_{'ba'[operand.k_axis]}_layout", operand.shared, f"cp.async cannot fill it: {why}")
            return CpAsyncBoxes.of(operand, info, extents)
        return next(route.of(operand, info, extents) for route in self.routes
                    if route.refuses(operand, info, extents) is None)

    def blocks(self, wanted: int, fit: int) -> int:
        """For how many blocks a multiprocessor is to have registers, if its shared memory has room for ``fit``."""
        return wanted

    # -- in device code -------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """The copies that this thread has started for a stage are complete in number."""

    def wait(self, spec: Sm80Spec) -> None:
        """Wait for this thread's copies to the next stage that is read."""


@dataclass(frozen=True)
class AsyncCopies(Copies):
    """cp.async, and what it cannot copy through registers. Every stage is another k-tile on its way."""

    minimum_arch = 8, 0
    routes = CpAsync, CpAsyncSeparable, CpAsyncJoined, StagedByThreads
    useful_stages = 8

    def commit(self) -> None:
        commit_copies()

    def wait(self, spec: Sm80Spec) -> None:
        wait_copies(spec.stages - 2)


@dataclass(frozen=True)
class StagedCopies(Copies):
    """Registers alone. They hold one k-tile on its way, which is stored at the end of the round that loads it: a third stage
    would only be full earlier."""

    minimum_arch = 7, 5
    routes = (StagedByThreads,)
    useful_stages = 2

    def blocks(self, wanted: int, fit: int) -> int:
        """No more than find room: what is on its way takes registers, and there would be none to spare for it."""
        return max(1, min(wanted, fit))


#: In the order in which they are preferred.
COPIES = AsyncCopies(), StagedCopies()


def copies_of(device: DeviceInfo | None) -> Copies:
    """The copies of a device. One that is not known has all; one that is too old for the kernel, which `Config.check_device`
    refuses, the last."""
    return next((copies for copies in COPIES if device is None or device.arch >= copies.minimum_arch), COPIES[-1])
