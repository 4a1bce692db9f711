"""Rows of a matrix by index: row i is the array's row ``index[i]``."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from gemmkit.components import Array, Scalar
from gemmkit.lang.component_class import dataclass
from gemmkit.layouts.base import GlobalLayout, ResultLayout, load_elements, store_elements
from gemmkit.layouts.plain import LINE, Plain
from gemmkit.ptx.copy_async import offset_of
from gemmkit.ptx.memory import load_global, store_global
from gemmkit.runtime.arrays import ArrayInfo, info_of


@dataclass(frozen=True)
class Gathered(GlobalLayout):
    """The ``count`` rows ``index[0]``, ``index[1]``, ... of an array in a plain ``layout``: any of them, in any order, as
    often as the index names them. `gemmkit.Gather` makes one.

    An element's place is the sum of its row's and its column's, so threads copy lines of a row-major array by cp.async.
    """

    layout: Plain
    index: Array
    count: Scalar

    array_ndim = 2
    array_names = MappingProxyType({"index": "index of Gather"})

    def __init__(self, layout: Plain, index: Any, count: int):
        if not isinstance(layout, Plain):
            raise TypeError(f"{type(self).__name__}(layout={layout!r}): the RowMajor or ColMajor layout of the array is "
                            "needed")
        for name, value in dict(dtype=layout.dtype, layout=layout, index=index, count=count).items():
            object.__setattr__(self, name, value)

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        return data[self.index[i], j]

    def load(self, data: Any, tile: Any, shape: Any) -> tuple:
        if self.is_row_major and tile.size[1] == tile.count:
            return load_global(data, 1, (self.index[tile.index[0]], tile.index[1]), (0, 0), tile.count)
        return load_elements(self, data, tile, shape)

    def row_offset(self, data: Any, i: int) -> int:
        return offset_of(data, (self.index[i if i < self.count else 0], 0))          # a tile's rows may be out of range

    def column_offset(self, data: Any, j: int) -> int:
        return offset_of(data, (0, j))

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def is_row_major(self) -> bool:
        return self.layout.axis == 1

    is_separable = True

    @property
    def neighbours(self) -> int:
        return LINE if self.is_row_major else 1

    @property
    def vector_axis(self) -> int | None:
        return 1 if self.is_row_major else None

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return info_of(self.index).shape[0], array.shape[1]

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        if array is None:
            raise ValueError(f"{name} is None, and {self!r} needs an array")
        self.layout.check(array, array.shape[0], columns, name)
        if info_of(self.index).shape != (rows,):
            raise ValueError(f"{name} has {rows} rows, and its index shape {info_of(self.index).shape}; ({rows},) is needed")

    def __repr__(self) -> str:
        return f"Gathered({self.layout!r}, <index of {self.count} rows>)"


@dataclass(frozen=True, init=False)
class Scattered(Gathered, ResultLayout):
    """The ``count`` rows ``index[0]``, ``index[1]``, ... of an array that a product writes. Other rows stay as they are.
    `gemmkit.Scatter` makes one."""

    array_names = MappingProxyType({"index": "index of Scatter"})

    def store_element(self, data: Any, i: int, j: int, value: Any, shape: Any) -> None:
        data[self.index[i], j] = value

    def store(self, data: Any, tile: Any, values: tuple, shape: Any) -> None:
        if self.is_row_major and tile.size[1] == tile.count:
            store_global(data, 1, (self.index[tile.index[0]], tile.index[1]), (0, 0), values)
        else:
            store_elements(self, data, tile, values, shape)

    def __repr__(self) -> str:
        return f"Scattered({self.layout!r}, <index of {self.count} rows>)"
