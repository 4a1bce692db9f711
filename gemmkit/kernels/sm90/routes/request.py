"""What a route is asked about: an operand, its array, and the kernel that it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemmkit.kernels.common.operand import Operand
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.tensor_maps import why_not

if TYPE_CHECKING:
    from gemmkit.kernels.sm90.spec import Sm90Spec


@dataclass(frozen=True)
class Request:
    """How shall ``operand``, a matrix of ``extents`` in the array ``info``, get into shared memory in the kernel ``spec``?

    ``spec`` has no routes yet. ``info`` None stands for an array that suits TMA.
    """

    spec: Sm90Spec
    operand: Operand
    info: ArrayInfo | None
    extents: tuple[int, int]

    def why_no_tma(self, axis: int) -> str | None:
        """Why TMA cannot take the array with elements contiguous along ``axis``; None if it can."""
        return None if self.info is None else why_not(self.info, axis)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing acts on its elements on their way."""
        return self.operand.to_shared.is_identity and not self.operand.is_masked

    @property
    def read_axis(self) -> int:
        """The axis along which the tensor cores read it."""
        shared: Any = self.operand.shared
        return int(shared.axis)

    @property
    def stored_axis(self) -> int | None:
        """The axis along which the array's elements are contiguous, if a matrix is stored."""
        stored: Any = self.operand.layout.stored
        return None if stored is None else int(stored.axis)

    @property
    def lies_as_read(self) -> bool:
        return self.operand.layout.vector_axis == self.read_axis

    @property
    def moves_lines(self) -> bool:
        """Whether a thread's tile is a line of the shared layout, in whole 32-bit words."""
        thread, shared = self.operand.thread, self.operand.shared
        return bool(thread.extents[self.read_axis] == thread.count and thread.count * shared.dtype.itemsize % 4 == 0)

    @property
    def divides(self) -> bool:
        """Whether every thread of all producer warps copies as much of the tile."""
        operand = self.operand
        return (operand.tile.count % (operand.warp.count * self.spec.producer_warps) == 0
                and operand.warp.count % (32 * operand.thread.count) == 0)
