"""Rows of 16-bit elements in shared memory, as TMA and the tensor cores want them: panels of swizzled lines side by side."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from gemmkit.components import Component
from gemmkit.lang.component_class import dataclass
from gemmkit.layouts import RowMajor
from gemmkit.layouts.swizzled import Swizzled
from gemmkit.runtime.tensor_maps import TensorMapSpec


def line_of(width: int) -> int:
    """Elements of a swizzled line: 128 bytes where the width is made of these, else 64.

    >>> line_of(128), line_of(96)
    (64, 32)
    """
    return 64 if width % 64 == 0 else 32


@dataclass(frozen=True)
class Panels(Component):
    """Rows of ``width`` elements, a multiple of 32."""

    dtype: np.dtype
    width: int

    @cached_property
    def line(self) -> int:
        """Elements of a panel's line."""
        return line_of(self.width)

    @cached_property
    def line_bytes(self) -> int:
        return 2 * self.line

    @cached_property
    def count(self) -> int:
        return self.width // self.line

    @cached_property
    def layout(self) -> Swizzled:
        return Swizzled(RowMajor(self.dtype), self.line_bytes)

    def map_spec(self, rows: int, dimensions: int) -> TensorMapSpec:
        """Of boxes of ``rows`` rows of a panel, of an array of so many dimensions."""
        return TensorMapSpec(self.dtype, (self.line, rows) + (1,) * (dimensions - 2), self.line_bytes)
