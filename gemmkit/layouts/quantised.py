"""Weights of 2 and 4 bits with a scale for each group of rows, read as floating-point numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.lang.component_class import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.layouts.base import GlobalLayout
from gemmkit.runtime.arrays import ArrayInfo, info_of

WORD_BITS = 32


@dataclass(frozen=True)
class GroupQuantised(GlobalLayout):
    """B (K x N) of integers of ``bits`` bits. Its array has K * bits / 32 rows of N uint32: a word holds consecutive rows of
    one column, the first in its lowest bits. ``scales`` (float16) and ``zeros`` (uint8) are K / group x N. An element is
    ``(q - zero) * scale``, computed in float32; without ``zeros`` the zero is ``2 ** (bits - 1)``.

    `gemmkit.quantisation.quantise` makes the arrays, and an object that `matmul` takes for B.

    Raises ConfigError for other bits than 2 and 4 and for a group that is no multiple of a word's rows, ValueError for
    arrays whose shapes do not fit, TypeError for arrays of other dtypes.
    """

    scales: Any
    bits: int = 4
    group: int = 128
    zeros: Any = None

    array_ndim = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (2, 4):
            raise ConfigError(f"bits={self.bits!r}: 2 or 4 is needed")
        if not isinstance(self.group, int) or self.group < 1 or self.group % self.rows:
            raise ConfigError(f"group={self.group!r}: a multiple of the {self.rows} rows in a word is needed")

    @property
    def rows(self) -> int:
        """Rows of B in a word."""
        return WORD_BITS // self.bits

    @property
    def middle(self) -> int:
        """What stands for zero where no zeros are given."""
        return 1 << (self.bits - 1)

    @property
    def has_zeros(self) -> bool:
        return self.zeros is not None

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        q = np.float32((data[i // self.rows, j] >> np.uint32(i % self.rows * self.bits)) & np.uint32((1 << self.bits) - 1))
        scale = np.float32(self.scales[i // self.group, j])
        if self.has_zeros:
            return (q - np.float32(self.zeros[i // self.group, j])) * scale
        return (q - np.float32(self.middle)) * scale

    @property
    def storage(self) -> np.dtype:
        return np.dtype(np.uint32)

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return array.shape[0] * self.rows, array.shape[1]

    def array_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows // self.rows, columns

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        wanted = rows // self.group, columns
        if rows % self.group:
            raise ValueError(f"{name} has {rows} rows; a multiple of group={self.group} is needed")
        for field, dtype in (("scales", np.float16), ("zeros", np.uint8)) if self.has_zeros else (("scales", np.float16),):
            info = info_of(getattr(self, field), field)
            if info.shape != wanted:
                raise ValueError(f"{field} has shape {info.shape}; {wanted} is needed for {name}, which is {rows} x "
                                 f"{columns} in groups of {self.group} rows")
            if info.dtype != dtype:
                raise TypeError(f"{field} has dtype {info.dtype}; {np.dtype(dtype)} is needed: kernels read its bits")
        if array is not None and array.dtype != self.storage:
            raise TypeError(f"{name} has dtype {array.dtype}; words of {self.storage} are needed")
