"""What a tensor map says whatever the tensor: elements, the box that a copy moves, the swizzle of shared memory."""

from __future__ import annotations

import math

import numpy as np

from gemmkit.components import Component
from gemmkit.lang.component_class import dataclass

SWIZZLES = (0, 32, 64, 128)


@dataclass(frozen=True)
class TensorMapSpec(Component):
    """What does not change with the tensor: its elements, the box that a copy moves, and how shared memory is swizzled.

    ``box`` counts elements, the fastest dimension first. A box lies in shared memory with its fastest dimension fastest and
    no gaps; with a swizzle of 32, 64 or 128 bytes, which is then the length of its rows, the 16-byte chunks of a row change
    places: the byte at address a moves to a XOR ((a >> 3) & (swizzle - 16)). It begins at a multiple of 128 bytes.

    >>> TensorMapSpec(np.float16, (64, 128), 128).box_bytes
    16384

    Raises ValueError for a box that TMA cannot move, TypeError for elements that it does not know.
    """

    dtype: np.dtype
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        object.__setattr__(self, "box", tuple(map(int, self.box)))
        size, rows = self.dtype.itemsize, self.box
        if size not in (1, 2, 4, 8):
            raise TypeError(f"TensorMapSpec(dtype={self.dtype}): TMA moves elements of 1, 2, 4 or 8 bytes")
        if not 1 <= len(rows) <= 5 or not all(1 <= extent <= 256 for extent in rows):
            raise ValueError(f"TensorMapSpec(box={rows}): 1 to 5 extents from 1 to 256 are needed")
        if rows[0] * size % 16:
            raise ValueError(f"TensorMapSpec(box={rows}): its rows have {rows[0] * size} bytes; a multiple of 16 is needed")
        if self.swizzle not in SWIZZLES:
            raise ValueError(f"TensorMapSpec(swizzle={self.swizzle!r}): 0 (none), 32, 64 or 128 is needed")
        if self.swizzle and rows[0] * size != self.swizzle:
            raise ValueError(f"TensorMapSpec(box={rows}, swizzle={self.swizzle}): rows of {self.swizzle} bytes are needed; "
                             f"these have {rows[0] * size}")

    @property
    def rank(self) -> int:
        return len(self.box)

    @property
    def box_bytes(self) -> int:
        """Bytes of a box: what a load gives its barrier."""
        return math.prod(self.box) * int(self.dtype.itemsize)


__all__ = ["SWIZZLES", "TensorMapSpec"]
