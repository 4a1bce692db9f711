"""cp.async for tensors whose neighbours in memory are eight apart along K: 16 bytes a copy, into boxes (`layouts.Boxed`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemmkit.kernels.common.operand import Operand
from gemmkit.kernels.common.rules import rule
from gemmkit.kernels.common.work import KTile
from gemmkit.kernels.sm80.routes import Piece
from gemmkit.kernels.sm80.separable import CpAsyncSeparable
from gemmkit.lang.component_class import dataclass
from gemmkit.layouts import Boxed, Tensor
from gemmkit.layouts.swizzled import BOX, RUN
from gemmkit.operators import Algebra, BoxMMAOp
from gemmkit.ptx.copy_async import SIZES, copy_async
from gemmkit.runtime.arrays import ArrayInfo, alignment, unit_axis

if TYPE_CHECKING:
    from gemmkit.config import Config


@dataclass(frozen=True)
class CpAsyncBoxes(CpAsyncSeparable):
    """Threads copy the eight neighbours of a piece of a box. The tile's positions along K are those of its lines, so a
    thread's tile is a line's run; the element that stands there says where it lies in memory."""

    @classmethod
    def refuses_layout(cls, operand: Operand) -> str | None:
        layout = operand.layout
        if not isinstance(operand.shared, Boxed):
            return "its tile in shared memory is not Boxed"
        if not isinstance(layout, Tensor) or layout.axis != operand.k_axis or layout.comb != RUN or layout.vector % RUN:
            return f"{layout!r} is no Tensor whose neighbours in memory are {RUN} apart along K, in runs of {RUN}"
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

    def copy_piece(self, operand: Any, moved: Any, pointer: Any, piece: Piece, at: KTile, is_there: bool) -> None:
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
    rule(not isinstance(operator, Algebra) or not isinstance(operator.base, BoxMMAOp), "operator", operator, "boxes hold "
         "real numbers; take base=MMAOp(...)")
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
