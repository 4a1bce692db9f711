"""cp.async for operands of several arrays: each piece of a line is copied from the array that has it (`Layout.found`)."""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.common.operand import Operand
from gemmkit.kernels.common.work import KTile
from gemmkit.kernels.sm80.routes import CpAsync, Piece
from gemmkit.lang.component_class import dataclass
from gemmkit.layouts import Braided, Joined
from gemmkit.ptx.copy_async import copy_async, offset_of
from gemmkit.runtime.arrays import ArrayInfo, alignment, unit_axis


@dataclass(frozen=True)
class CpAsyncJoined(CpAsync):
    """Threads start copies of ``width`` neighbours each. Where a piece lies is found anew for each: along K the array may
    change, and with it the distance from line to line."""

    @classmethod
    def refuses_layout(cls, operand: Operand) -> str | None:
        layout = operand.layout
        if not isinstance(layout, (Braided, Joined)) or not layout.is_found:
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

    def seek(self, operand: Any, moved: Any, at: KTile) -> None:
        """Nothing is kept."""

    def advance(self, spec: Any, operand: Any, moved: Any) -> None:
        """Nothing is kept."""

    def copy_piece(self, operand: Any, moved: Any, pointer: Any, piece: Piece, at: KTile, is_there: bool) -> None:
        tile = piece.tile
        place = operand.place(at.m, at.n, at.k, at.shape)
        view, row, column = operand.layout.found(moved.data, place.i + tile.index[0], place.j + tile.index[1])
        copy_async(pointer, operand.shared.position(tile.base, operand.leading()),
                   operand.shared.position(tile.offset, operand.leading()), view, offset_of(view, (row, column)), self.width,
                   is_there)
