"""D whose elements are made of neighbours in a row, as int4 are packed into bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmkit.lang.errors import ConfigError
from gemmkit.layouts.base import Layout
from gemmkit.layouts.plain import Plain
from gemmkit.runtime.arrays import ArrayInfo

__all__ = ["PAIR", "Packed"]

PAIR = 2                               # neighbours that a thread of every kernel holds


@dataclass(frozen=True)
class Packed(Layout):
    """D of half as many columns as the kernel computes, stored in the order of ``layout``: coordinates are those of the
    array. A configuration whose epilogue is a `gemmkit.epilogues.Pack` makes one of its ``global_d_layout``.

    Raises ConfigError for a layout that is not plain.
    """

    layout: Any
    packed = PAIR

    def __init__(self, layout: Layout):
        if not isinstance(layout, Plain):
            raise ConfigError(f"global_d_layout={layout!r}: packed results go into a plain matrix (RowMajor, ColMajor); "
                              "those of a fold are packed by the fold's function")
        for name, value in dict(dtype=layout.dtype, layout=layout).items():
            object.__setattr__(self, name, value)

    # -- device methods ---------------------------------------------------------------------------------------------

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        return self.layout.element(data, i, j, shape)

    def store_element(self, data: Any, i: int, j: int, value: Any, shape: Any) -> None:
        self.layout.store_element(data, i, j, value, shape)

    def store(self, data: Any, tile: Any, values: tuple, shape: Any) -> None:
        self.layout.store(data, tile, values, shape)

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def vector_axis(self) -> int | None:
        return self.layout.vector_axis

    def dimensions_of(self, array: ArrayInfo) -> int | None:
        return self.layout.dimensions_of(array)

    @property
    def storage(self) -> np.dtype:
        return self.layout.storage

    def seen(self, info: ArrayInfo) -> ArrayInfo:
        return self.layout.seen(info)

    def host_view(self, array: np.ndarray) -> np.ndarray:
        return self.layout.host_view(array)

    def array_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return self.layout.array_shape(rows, columns // PAIR)

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return array.shape[0], array.shape[1] * PAIR

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        self.layout.check(array, rows, columns // PAIR, name)
