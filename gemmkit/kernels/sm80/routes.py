"""How an operand gets from global memory into a stage of `multistage`: copied without registers, or by way of them.

| route | what it takes |
|---|---|
| `CpAsync` | elements of a strided matrix as they are, 4 to 16 bytes a copy, along the stage's lines or across |
| `separable.CpAsyncSeparable` | the same of tensors, whose rows and columns are made of several dimensions |
| `boxes.CpAsyncBoxes` | 16-bit tensors whose neighbours in memory are eight apart along K, for `operators.BoxMMAOp` |
| `joined.CpAsyncJoined` | lines of operands of several arrays |
| `Staged` | everything: `Layout.element`, transforms, numbers that become planes, two-byte elements at any address |

cp.async copies are started before a round's products, or in parts between them. What is staged is loaded before the products
and stored behind them. Which of these ways a GPU has is `copies`' to say.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from gemmkit.kernels.common.operand import Operand, Route, unit_of
from gemmkit.kernels.common.tile_copy import copy_in_turn, put_moved, read_moved
from gemmkit.kernels.common.work import KTile
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.registers import Fragment
from gemmkit.lang.values import fill
from gemmkit.layouts import Plain
from gemmkit.ptx.copy_async import SIZES, copy_async, offset_of
from gemmkit.ptx.memory import shared, store_shared
from gemmkit.ptx.special import carried, lane_index
from gemmkit.runtime.arrays import ArrayInfo, alignment, unit_axis
from gemmkit.tiling import parallelise, translate_offset

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

    def seek(self, operand: Any, moved: Any, at: KTile) -> None:
        """Find where this thread's part of a k-tile begins in memory."""

    def advance(self, spec: Any, operand: Any, moved: Any) -> None:
        """The same of the k-tile behind it."""

    def whole_tiles(self, operand: Any, at: KTile, rounds: int) -> int:
        """How many k-tiles from ``at`` on are copied without a look at the matrix's edges; ``rounds`` if all are."""
        return rounds

    def load(self, spec: Any, operand: Any, moved: Any, at: KTile) -> None:
        """Load this thread's part of a k-tile."""

    def copy(self, spec: Any, operand: Any, moved: Any, this: Any, share: Any) -> None:
        """Start a share of the copies of a round."""

    def store(self, operand: Any, moved: Any, stage: int) -> None:
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

    def pieces(self, operand: Any) -> int:
        """How many copies bring a thread's tile."""
        return operand.thread.count // self.width

    def seek(self, operand: Any, moved: Any, at: KTile) -> None:
        place = operand.place(at.m, at.n, at.k, at.shape)
        warp_tile = parallelise(operand.tile, operand.warp, moved.warp, operand.warps)[0]
        first = parallelise(warp_tile, operand.thread, lane_index(), 32, operand.order)[0]
        moved.cursor[0] = (offset_of(moved.data, (place.i + first.base[0], place.j + first.base[1])),)

    def advance(self, spec: Any, operand: Any, moved: Any) -> None:
        size = spec.block.size.K
        step = offset_of(moved.data, (0, size)) if operand.k_axis == 1 else offset_of(moved.data, (size, 0))
        moved.cursor[0] = (carried(moved.cursor[0][0] + step),)

    def whole_tiles(self, operand: Any, at: KTile, rounds: int) -> int:
        place = operand.place(at.m, at.n, at.k, at.shape)
        across, along = (place.rows - place.i, place.columns - place.j) if operand.k_axis == 1 else (
            place.columns - place.j, place.rows - place.i)
        if across >= operand.tile.size[1 - operand.k_axis]:
            return along // operand.tile.size[operand.k_axis]
        return along * 0

    def copy(self, spec: Any, operand: Any, moved: Any, this: Any, share: Any) -> None:
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

    def copy_whole(self, operand: Any, moved: Any, write: int, at: KTile, share: Any) -> None:
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

    def copy_edge(self, spec: Any, operand: Any, moved: Any, write: int, at: KTile, share: Any) -> None:
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

    def copy_piece(self, operand: Any, moved: Any, pointer: Any, piece: Piece, at: KTile, is_there: bool) -> None:
        """``width`` elements of the k-tile ``at``."""
        tile = piece.tile
        copy_async(pointer, operand.shared.position(tile.base, operand.leading()),
                   operand.shared.position(tile.offset, operand.leading()), moved.data,
                   moved.cursor[0][0] + offset_of(moved.data, (tile.offset[0], tile.offset[1])), self.width, is_there)


def piece_of(tile: Any, operand: Any, n: int) -> Any:
    """A thread's tile, moved to its n-th piece."""
    distance = n * operand.route.width
    if operand.thread.size[0] > 1:
        return translate_offset(tile, distance % operand.thread.size[0], distance // operand.thread.size[0])
    return translate_offset(tile, 0, distance)


@dataclass(frozen=True)
class Staged(StageRoute):
    """Threads load, transform and store.

    Where a thread's registers hold all its tiles (`Operand.moves`), loads go out before a round's products and are stored
    behind them. Otherwise tile by tile, before the products.
    """

    def load(self, spec: Any, operand: Any, moved: Any, at: KTile) -> None:
        if operand.moves > 0:
            place = operand.place(at.m, at.n, at.k, at.shape)
            warp_tiles = parallelise(operand.tile, operand.warp, moved.warp, operand.warps)
            for i in range(len(warp_tiles)):
                thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
                for j in range(len(thread_tiles)):
                    moved.held[i * len(thread_tiles) + j] = read_moved(operand, moved.data, thread_tiles[j], place,
                                                                       spec.operator.identity, at.shape)

    def copy(self, spec: Any, operand: Any, moved: Any, this: Any, share: Any) -> None:
        if operand.moves == 0:
            if share.part == 0:
                at = this.ahead
                copy_in_turn(operand, moved.data, shared(operand.shared.dtype, operand.offset + this.write),
                             operand.place(at.m, at.n, at.k, at.shape), spec.operator.identity, moved.warp, at.shape)

    def store(self, operand: Any, moved: Any, stage: int) -> None:
        if operand.moves > 0:
            pointer = shared(operand.shared.dtype, operand.offset + stage)
            warp_tiles = parallelise(operand.tile, operand.warp, moved.warp, operand.warps)
            for i in range(len(warp_tiles)):
                thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
                for j in range(len(thread_tiles)):
                    put_moved(operand, pointer, thread_tiles[j], moved.held[i * len(thread_tiles) + j])
