"""Layouts of numbers of several parts (complex, dual, quaternion, or of a user's algebra), and of real ones among them.

In global memory they are interleaved (one number's parts side by side, as NumPy and CuPy store complex numbers) or planar
(all first parts, then all second parts, ...). In shared memory they are always `Planes`, since that is what instructions
for real numbers can load.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.components import with_fields
from gemmkit.lang.aggregates import convert, convert_all
from gemmkit.lang.checks import dtype_given
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, Numeric, SharedPointer, View
from gemmkit.lang.number_rules import part_dtypes
from gemmkit.lang.records import numbers_of, planes_of
from gemmkit.lang.registers import each, generate
from gemmkit.layouts.base import GlobalLayout, OfArray, ResultLayout, SharedLayout, element_of, load_elements, store_elements
from gemmkit.layouts.plain import Plain
from gemmkit.ptx.memory import load_global, repoint, store_global, unpack_words
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.tiling import Coord, Tile


def _order(order: str, what: str) -> str:
    if not isinstance(order, str) or order not in ("row", "col"):
        raise ValueError(f'{what}(order={order!r}): "row" or "col" is needed')
    return order


def dtype_text(dtype: np.dtype) -> str:
    """A number's dtype, as it can be pasted back."""
    return repr(dtype.name if dtype.names is None else dtype.descr)


def _number(dtype: Any, what: str) -> np.dtype:
    given: np.dtype = dtype_given(dtype, what)
    if len(part_dtypes(given)) < 2:
        raise ValueError(f"{what}(dtype={given}): the dtype of a number of several parts is needed, for example complex64 "
                         'or operators.DUAL.number_dtype("float16")')
    return given


@dataclass(frozen=True)
class Interleaved(Plain):
    """A matrix of numbers whose parts are neighbours: an array of parts (rows, columns, parts), or one of numbers.

    A result that is made in this layout is an array of parts. (For arrays of complex64 and complex128, `RowMajor` will do.)

    >>> import numpy as np
    >>> Interleaved("complex64").seen(ArrayInfo(0, (3, 5, 2), (10, 2, 1), np.dtype("f4"), -1, False, "numpy"))[1:4]
    ((3, 5), (5, 1), dtype('complex64'))
    """

    order: str = "row"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _number(self.dtype, "Interleaved"))
        _order(self.order, "Interleaved")

    def __repr__(self) -> str:
        return f"Interleaved({dtype_text(self.dtype)}, {self.order!r})"

    @property
    def axis(self) -> int:                                       # type: ignore[override]
        return 1 if self.order == "row" else 0

    @property
    def storage(self) -> np.dtype:
        """The dtype of an array in this layout."""
        return part_dtypes(self.dtype)[0]

    def dimensions_of(self, array: ArrayInfo) -> int:
        """Of an array of numbers two, of one of parts three."""
        return 2 if array.dtype == self.dtype else 3

    def array_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows, columns, len(part_dtypes(self.dtype))

    def seen(self, info: ArrayInfo) -> ArrayInfo:
        if len(info.shape) != 3:
            return info
        kinds = part_dtypes(self.dtype)
        count = len(kinds)
        if info.dtype != kinds[0] or info.shape[2] != count:
            raise ValueError(f"an array has shape {info.shape} and dtype {info.dtype}; {self!r} needs {kinds[0]} with a "
                             f"last axis of {count}, the parts {', '.join(self.dtype.names or ('real', 'imag'))}")
        if 0 in info.shape:
            return info._replace(shape=info.shape[:2], strides=(info.shape[1], 1), dtype=self.dtype)
        if any(stride % count for _, stride in info.steps):
            raise ValueError(f"a stack has matrices {info.steps[-1][1]} elements apart; they must be apart by whole numbers "
                             f"of {count} parts (copy the array)")
        if info.strides[2] != 1 or any(stride % count for stride, extent in zip(info.strides[:2], info.shape) if extent > 1):
            raise ValueError(f"an array of shape {info.shape} has strides {info.strides}; the parts of a number must be "
                             "neighbours, and numbers apart by whole numbers (copy the array)")
        strides = tuple(stride // count if extent > 1 else 1 for stride, extent in zip(info.strides[:2], info.shape))
        steps = tuple((extent, stride // count) for extent, stride in info.steps)
        return info._replace(shape=info.shape[:2], strides=strides, dtype=self.dtype, steps=steps)

    def host_view(self, array: np.ndarray) -> np.ndarray:
        if array.dtype == self.dtype:
            return array
        return array.view(self.dtype)[..., 0] if array.size else np.empty(array.shape[:-1], self.dtype)


@dataclass(frozen=True)
class Planar(GlobalLayout, ResultLayout):
    """A matrix of numbers as an array of shape (parts, rows, columns): every part a matrix of its own.

    ``order`` says whether rows ("row") or columns ("col") of the planes are contiguous; any strides are right.
    """

    order: str = "row"

    array_ndim = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _number(self.dtype, "Planar"))
        _order(self.order, "Planar")

    def __repr__(self) -> str:
        return f"Planar({dtype_text(self.dtype)}, {self.order!r})"

    @property
    def vector_axis(self) -> int:
        return 1 if self.order == "row" else 0

    @property
    def line_axis(self) -> int:
        """The array's axis along which a line of a plane lies."""
        return self.vector_axis + 1

    @property
    def count(self) -> int:
        return len(part_dtypes(self.dtype))

    # -- device -----------------------------------------------------------------------------------------------------

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        return generate(self.count, lambda n: data[n, i, j])

    def store_element(self, data: View, i: int, j: int, value: Numeric, shape: StackShape) -> None:
        each(_set_part, planes_of((convert(self.dtype, value),)), data, i, j)

    def load(self, data: View, tile: Tile, shape: StackShape) -> Elements:
        if tile.size[self.vector_axis] == tile.count:
            return numbers_of(self.dtype, generate(self.count, lambda n: load_global(
                data, self.line_axis, (n, tile.base[0], tile.base[1]), (0, tile.offset[0], tile.offset[1]), tile.count)))
        return load_elements(self, data, tile, shape)

    def store(self, data: View, tile: Tile, values: Elements, shape: StackShape) -> None:
        if tile.size[self.vector_axis] == tile.count:
            each(lambda plane, n: store_global(
                data, self.line_axis, (n, tile.base[0], tile.base[1]), (0, tile.offset[0], tile.offset[1]), plane),
                planes_of(convert_all(self.dtype, values)))
        else:
            store_elements(self, data, tile, values, shape)

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def storage(self) -> np.dtype:
        return part_dtypes(self.dtype)[0]

    def array_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return self.count, rows, columns

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return (array.shape[1], array.shape[2]) if len(array.shape) == 3 else (None, None)

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        wanted = (self.count, rows, columns)
        if array is None or array.shape != wanted or array.dtype != self.storage:
            given = "None" if array is None else f"of shape {array.shape} and dtype {array.dtype}"
            raise ValueError(f"{name} is {given}; {self!r} needs {wanted} of {self.storage}")


def _set_part(plane: tuple[Any, ...], n: int, data: View, i: int, j: int) -> None:
    data[n, i, j] = plane[0]


@dataclass(frozen=True)
class Embedded(OfArray, GlobalLayout):
    """A matrix of real numbers in any ``layout``, structured ones among them, as one of numbers of several parts.

    An `operators.Algebra` multiplies numbers of one kind. If only one operand has parts, the call wraps the real operand's
    layout in this one: the kernel reads the array as it is, and threads complete its elements on their way to shared memory.
    The kernel computes all real products, including those with the parts that are 0. (complex64 and complex128 beside real
    matrices need no algebra: without ``operator=`` the ordinary units multiply the two kinds directly.)

    Raises TypeError for a layout whose elements are no real numbers.

    >>> import numpy as np, gemmkit as gk
    >>> a, b = np.float16([[1, 2], [3, 4]]), np.zeros((2, 1, 2), np.float16)
    >>> b[:, 0, 1] = 1                                                     # a column of i
    >>> with gk.emulate():
    ...     gk.matmul(a, b, operator=gk.operators.COMPLEX).tolist()
    [[[0.0, 3.0]], [[0.0, 7.0]]]
    """

    layout: GlobalLayout

    def __init__(self, dtype: np.dtype, layout: GlobalLayout):
        if not isinstance(layout, GlobalLayout) or len(part_dtypes(layout.dtype)) > 1:
            raise TypeError(f"Embedded(layout={layout!r}): the layout of a real matrix is needed, for example "
                            "RowMajor('float16')")
        object.__setattr__(self, "dtype", dtype_given(dtype, "Embedded"))
        object.__setattr__(self, "layout", layout)

    def __repr__(self) -> str:
        return f"Embedded({dtype_text(self.dtype)}, {self.layout!r})"

    # -- device methods ---------------------------------------------------------------------------------------------

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        return convert(self.dtype, element_of(self.layout, data, i, j, shape))

    def load(self, data: View, tile: Tile, shape: StackShape) -> Elements:
        return convert_all(self.dtype, self.layout.load(data, tile, shape))

    def k_range(self, begin: int, end: int, shape: StackShape) -> tuple[int, int]:
        return self.layout.k_range(begin, end, shape)

    # -- host -------------------------------------------------------------------------------------------------------

    def as_operand(self, name: str, transformed: bool) -> GlobalLayout:
        layout = self.layout.as_operand(name, transformed)
        return self if layout is self.layout else with_fields(self, {"layout": layout})


# -- shared memory ----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Planes(SharedLayout):
    """A shared tile of numbers, part by part: ``plane`` is the layout of each plane, and one follows the other.

    ``dtype`` is the numbers'; ``plane.dtype`` that of one part.

    >>> from gemmkit.layouts import Padded, RowMajor
    >>> Planes(Padded(RowMajor("float32"), 4), "complex64").physical_size(8, 32)       # complex numbers
    288
    """

    in_planes = True

    plane: Any
    dtype: Any

    def __init__(self, plane: Any, dtype: np.dtype):
        dtype = _number(dtype, "Planes")
        if isinstance(plane, type) or not hasattr(plane, "physical_size") or plane.dtype not in part_dtypes(dtype):
            raise ValueError(f"Planes(plane={plane!r}): a RowMajor, ColMajor or Padded layout of {part_dtypes(dtype)[0]} is "
                             "needed")
        object.__setattr__(self, "plane", plane)
        object.__setattr__(self, "dtype", dtype)

    def __repr__(self) -> str:
        return f"Planes({self.plane!r}, {dtype_text(self.dtype)})"

    @property
    def axis(self) -> int:
        return int(self.plane.axis)

    @property
    def vector_axis(self) -> int | None:
        return self.axis

    @property
    def count(self) -> int:
        return len(part_dtypes(self.dtype))

    @property
    def itemsize(self) -> int:
        """Bytes of one part."""
        return int(self.plane.dtype.itemsize)

    def leading(self, size: Coord) -> Any:
        """Elements from one line of a plane to the next, and from one plane to the next."""
        return self.plane.leading(size), self.plane.physical_size(size[0], size[1])

    def physical_size(self, rows: int, columns: int) -> int:
        return int(self.plane.physical_size(rows, columns))

    def position(self, coord: Coord, leading: Any) -> int:
        """Where a coordinate lies in each plane."""
        return self.plane.position(coord, leading[0])  # type: ignore[no-any-return]

    def plane_at(self, n: int, pointer: SharedPointer, leading: Any) -> Any:
        """A pointer to plane ``n``."""
        return repoint(pointer, self.plane.dtype, n * leading[1] * self.itemsize)

    def store_words(self, pointer: SharedPointer, tile: Tile, words: Elements, leading: Any) -> None:
        """Store a tile of numbers that came as 32-bit words."""
        self.store_shared(pointer, tile, unpack_words(self.dtype, words), leading)

    def load_shared(self, pointer: SharedPointer, tile: Tile, leading: Any) -> Elements:
        return numbers_of(self.dtype, generate(self.count, lambda n: self.plane.load_shared(
            self.plane_at(n, pointer, leading), tile, leading[0])))

    def store_shared(self, pointer: SharedPointer, tile: Tile, values: Elements, leading: Any) -> None:
        each(lambda plane, n: self.plane.store_shared(self.plane_at(n, pointer, leading), tile, plane, leading[0]),
             planes_of(values))
