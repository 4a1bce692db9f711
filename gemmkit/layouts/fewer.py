"""D of which the array has fewer columns than the kernel computes: an epilogue makes one value of several."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.lang.component_class import dataclass
from gemmkit.layouts.base import Layout
from gemmkit.runtime.arrays import ArrayInfo

__all__ = ["FewerColumns"]


@dataclass(frozen=True)
class FewerColumns(Layout):
    """Base class: elements are stored in the order of ``layout``, at coordinates of the array."""

    layout: Any

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

    def stored_columns(self, columns: int) -> int:
        """Columns of the array, of so many that the kernel computes."""
        raise NotImplementedError

    def array_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return self.layout.array_shape(rows, self.stored_columns(columns))

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        self.layout.check(array, rows, self.stored_columns(columns), name)
