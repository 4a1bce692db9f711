"""cp.async for operands whose element's place is the sum of its row's and its column's (`Layout.is_separable`): tensors,
whose rows and columns are made of several dimensions each.

What a row of A or a column of B adds is found once a tile of D and kept in registers, an offset for each of a thread's
pieces. What the position along K adds is found anew in every round, and is the same for most of a thread's pieces.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.common.operand import Operand
from gemmkit.kernels.common.work import KTile
from gemmkit.kernels.sm80.routes import CpAsync, Piece, piece_of
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.registers import Fragment
from gemmkit.layouts import Plain
from gemmkit.ptx.copy_async import copy_async
from gemmkit.ptx.special import lane_index
from gemmkit.tiling import parallelise


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

    def seek(self, operand: Any, moved: Any, at: KTile) -> None:
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

    def advance(self, spec: Any, operand: Any, moved: Any) -> None:
        """The rows and columns stay."""

    def copy_piece(self, operand: Any, moved: Any, pointer: Any, piece: Piece, at: KTile, is_there: bool) -> None:
        tile = piece.tile
        along = operand.distance(moved.data, at.k + tile.index[operand.k_axis], operand.k_axis)
        copy_async(pointer, operand.shared.position(tile.base, operand.leading()),
                   operand.shared.position(tile.offset, operand.leading()), moved.data,
                   moved.cursor[piece.number][0] + along, self.width, is_there)
