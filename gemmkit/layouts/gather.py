"""Rows of a matrix by index: row i is the array's row ``index[i]``."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from gemmkit.components import Array, Scalar
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, Numeric, View
from gemmkit.layouts.base import GlobalLayout, ResultLayout, load_elements, store_elements
from gemmkit.layouts.matrices import Matrix, plain_layout
from gemmkit.layouts.plain import LINE, Plain
from gemmkit.ptx.copy_async import offset_of
from gemmkit.ptx.memory import load_global, store_global
from gemmkit.runtime.arrays import ArrayInfo, describe
from gemmkit.tiling import Tile


@dataclass(frozen=True)
class Gathered(GlobalLayout):
    """The ``count`` rows ``index[0]``, ``index[1]``, ... of an array in a plain ``layout``, in any order, with repetitions.
    `gemmkit.layouts.Gather` makes one.

    An element's place is the sum of its row's and its column's, so threads copy lines of a row-major array by cp.async.
    """

    layout: Plain
    index: Array
    count: Scalar

    array_ndim = 2
    array_names = MappingProxyType({"index": "index of Gather"})

    def __init__(self, layout: Plain, index: Array, count: int):
        if not isinstance(layout, Plain):
            raise TypeError(f"{type(self).__name__}(layout={layout!r}): the RowMajor or ColMajor layout of the array is "
                            "needed")
        for name, value in dict(dtype=layout.dtype, layout=layout, index=index, count=count).items():
            object.__setattr__(self, name, value)

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        return data[self.index[i], j]

    def load(self, data: View, tile: Tile, shape: StackShape) -> Elements:
        if self.is_row_major and tile.size[1] == tile.count:
            return load_global(data, 1, (self.index[tile.index[0]], tile.index[1]), (0, 0), tile.count)
        return load_elements(self, data, tile, shape)

    def row_offset(self, data: View, i: int) -> int:
        return offset_of(data, (self.index[i if i < self.count else 0], 0))          # a tile's rows may be out of range

    def column_offset(self, data: View, j: int) -> int:
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
        return describe(self.index).shape[0], array.shape[1]

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        if array is None:
            raise ValueError(f"{name} is None, and {self!r} needs an array")
        self.layout.check(array, array.shape[0], columns, name)
        found = describe(self.index).shape
        if found != (rows,):
            raise ValueError(f"{name} has {rows} rows, and its index shape {found}; ({rows},) is needed")

    def __repr__(self) -> str:
        return f"Gathered({self.layout!r}, <index of {self.count} rows>)"


@dataclass(frozen=True, init=False)
class Scattered(Gathered, ResultLayout):
    """The ``count`` rows ``index[0]``, ``index[1]``, ... of an array that a product writes. Other rows stay as they are.
    `gemmkit.layouts.Scatter` makes one."""

    array_names = MappingProxyType({"index": "index of Scatter"})

    def store_element(self, data: View, i: int, j: int, value: Numeric, shape: StackShape) -> None:
        data[self.index[i], j] = value

    def store(self, data: View, tile: Tile, values: Elements, shape: StackShape) -> None:
        if self.is_row_major and tile.size[1] == tile.count:
            store_global(data, 1, (self.index[tile.index[0]], tile.index[1]), (0, 0), values)
        else:
            store_elements(self, data, tile, values, shape)

    def __repr__(self) -> str:
        return f"Scattered({self.layout!r}, <index of {self.count} rows>)"


# --------------------------------------------------------------------------------------------------
# `Gather` and `Scatter`: some rows of an array as an operand or as the result, by an index on the device, uncopied.

class Gather(Matrix):
    """The matrix of the rows ``array[index]``: its row i is the array's row ``index[i]``. Nothing is copied.

    For A (or B, whose rows run along K) of `gemmkit.matmul`, `gemmkit.plan` and `gemmkit.blas.gemmEx`. ``array`` is (R, K)
    of any strides, ``index`` int32 of (M,), on the array's device. Rows may occur any number of times, in any order. The
    kernel reads the index in each call, so it may change between two calls. An index outside 0 to R - 1 is a fault in the
    emulator; a GPU then reads other memory. ``check`` copies the index to the host, which waits for the device, and raises.

    Raises TypeError for what is no array; ValueError for an array that is no matrix, and for an index of another dtype or of
    other than one dimension; with ``check`` IndexError, which names the first index out of range.

    >>> import numpy as np, gemmkit as gk
    >>> tokens = np.float32([[1, 2], [3, 4], [5, 6]])
    >>> with gk.emulate():
    ...     gk.matmul(Gather(tokens, np.int32([2, 0, 2])), np.eye(2, dtype="f4")).tolist()
    [[5.0, 6.0], [1.0, 2.0], [5.0, 6.0]]
    """

    def __init__(self, array: Array, index: Array, check: bool = False):
        self.index = index
        super().__init__(array, Gathered(*_checked(array, index, "Gather", check)))


class Scatter(Matrix):
    """The rows ``array[index]`` as the result of a product: row i of D is written to row ``index[i]`` of the array.

    For ``out`` of `gemmkit.matmul` and `gemmkit.plan`, which return the array. ``array`` is (R, N) of any strides, ``index``
    int32 of (M,), on the array's device; the kernel reads it in each call. Rows that the index does not name stay as they
    are. It must name each row once: the kernel writes rows and does not add them, and either of two rows for one place may
    stay. (With atomics, the result would depend on the order of blocks: give each copy of a row its own place, and reduce
    the copies after the product.) An index out of range is a fault in the emulator; a GPU then writes other memory.
    ``check`` copies the index to the host, which waits for the device, and raises.

    Raises TypeError and ValueError as `Gather`; with ``check`` IndexError, which names the first index out of range, and
    ValueError, which names the first row that occurs twice.

    >>> import numpy as np, gemmkit as gk
    >>> y = np.zeros((3, 2), np.float32)
    >>> with gk.emulate():
    ...     out = gk.layouts.Scatter(y, np.int32([2, 0]))
    ...     gk.matmul(np.float32([[1, 2], [3, 4]]), np.eye(2, dtype=np.float32), out=out).tolist()
    [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]
    """

    def __init__(self, array: Array, index: Array, check: bool = False):
        found = _checked(array, index, "Scatter", check)
        if check:
            rows, first, times = np.unique(on_host(index), return_index=True, return_counts=True)
            if (times > 1).any():
                again = min(zip(first[times > 1], rows[times > 1]))[1]
                raise ValueError(f"index names row {again} more than once; a row of the result can be written once")
        self.index = index
        super().__init__(array, Scattered(*found))

    def check_place(self, name: str, c: Any) -> None:
        raise TypeError(f"{name} is a Scatter, which is for out; give a Gather of the array and the index")


def _checked(array: Array, index: Array, name: str, check: Any) -> tuple[Any, Any, int]:
    """An array's layout, its index and how many rows that names."""
    info, of_array = describe(index, "index"), describe(array, "array")
    if len(of_array.shape) != 2:
        raise ValueError(f"array has shape {of_array.shape}; a matrix of 2 dimensions is needed, and no stack")
    if info.dtype != np.int32:
        raise ValueError(f"index has dtype {info.dtype}; int32 is needed")
    if len(info.shape) != 1:
        raise ValueError(f"index has shape {info.shape}; a vector is needed, of a row's number for each row")
    if not isinstance(check, bool):
        raise TypeError(f"{name}(check={check!r}): True or False is needed")
    if check:
        rows, of_host = of_array.shape[0], on_host(index)
        wrong = np.flatnonzero((of_host < 0) | (of_host >= rows))
        if len(wrong):
            raise IndexError(f"index[{wrong[0]}] is {of_host[wrong[0]]}, and the array has {rows} rows: 0 to {rows - 1} are "
                             f"needed ({len(wrong)} of {len(of_host)} are out of range)")
    return plain_layout(array), index, info.shape[0]


def on_host(x: Array) -> np.ndarray:
    """A copy in host memory; waits for the device."""
    for name in ("get", "copy_to_host"):                             # CuPy's, Numba's
        if hasattr(x, name):
            return np.asarray(getattr(x, name)())
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)
