"""Real matrices among those of an algebra's numbers: an element x is the number (x, 0, ...), made as it is read."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.components import with_fields
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.given import dtype_given
from gemmkit.lang.records import part_dtypes
from gemmkit.lang.values import convert, convert_all
from gemmkit.layouts.base import Layout, element_of
from gemmkit.layouts.number import dtype_text
from gemmkit.runtime.arrays import ArrayInfo

__all__ = ["Embedded"]


@dataclass(frozen=True)
class Embedded(Layout):
    """A matrix of real numbers in any ``layout``, structured ones among them, as one of numbers of several parts.

    An operator that is an `operators.Algebra` multiplies numbers of one kind. Where one operand has parts and the other one
    is real, the call puts this layout around the real one's: the array is read as it is, and threads complete its elements
    on their way to shared memory. All real products are issued, those with the parts that are 0 among them. (complex64 and
    complex128 beside real matrices need no algebra: without ``operator=`` the ordinary units multiply the two kinds as they
    are.)

    Raises TypeError for a layout whose elements are no real numbers.

    >>> import numpy as np, gemmkit as gk
    >>> a, b = np.float16([[1, 2], [3, 4]]), np.zeros((2, 1, 2), np.float16)
    >>> b[:, 0, 1] = 1                                                     # a column of i
    >>> with gk.emulate():
    ...     gk.matmul(a, b, operator=gk.operators.COMPLEX).tolist()
    [[[0.0, 3.0]], [[0.0, 7.0]]]
    """

    layout: Any

    def __init__(self, dtype: Any, layout: Layout):
        if not isinstance(layout, Layout) or len(part_dtypes(layout.dtype)) > 1:
            raise TypeError(f"Embedded(layout={layout!r}): the layout of a real matrix is needed, for example "
                            "RowMajor('float16')")
        object.__setattr__(self, "dtype", dtype_given(dtype, "Embedded"))
        object.__setattr__(self, "layout", layout)

    def __repr__(self) -> str:
        return f"Embedded({dtype_text(self.dtype)}, {self.layout!r})"

    # -- device methods ---------------------------------------------------------------------------------------------

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        return convert(self.dtype, element_of(self.layout, data, i, j, shape))

    def load(self, data: Any, tile: Any, shape: Any) -> tuple:
        return convert_all(self.dtype, self.layout.load(data, tile, shape))

    def k_range(self, begin: int, end: int, shape: Any) -> tuple:
        return self.layout.k_range(begin, end, shape)

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def vector_axis(self) -> int | None:
        return self.layout.vector_axis

    @property
    def contiguous_axis(self) -> int | None:
        return self.layout.contiguous_axis

    @property
    def storage(self) -> np.dtype:
        return self.layout.storage

    def as_operand(self, name: str, transformed: bool) -> Layout:
        layout = self.layout.as_operand(name, transformed)
        return self if layout is self.layout else with_fields(self, {"layout": layout})

    def dimensions_of(self, array: ArrayInfo) -> int | None:
        return self.layout.dimensions_of(array)

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return self.layout.extents(array)

    def array_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return self.layout.array_shape(rows, columns)

    def seen(self, info: ArrayInfo) -> ArrayInfo:
        return self.layout.seen(info)

    def host_view(self, array: np.ndarray) -> np.ndarray:
        return self.layout.host_view(array)

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        self.layout.check(array, rows, columns, name)
