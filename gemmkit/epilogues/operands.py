"""Epilogues with operands of their own: scaling by a number or a vector, a residual, a second output."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from gemmkit.components import Array, Component, Scalar
from gemmkit.epilogues.base import Epilogue
from gemmkit.epilogues.factors import InMemory, in_memory
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.given import check_dtype
from gemmkit.lang.narrowing import fitting
from gemmkit.lang.registers import apply
from gemmkit.layouts import ArrayLayout, ColMajor, RowMajor
from gemmkit.runtime.arrays import ArrayInfo, describe, info_of, is_array


@dataclass(frozen=True)
class Number(Component):
    """A run-time number as weak as a literal."""

    value: Scalar

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Scale(Epilogue):
    """Multiplies by a run-time number, or by a vector: every column by its own element (``along="N"``: by[n]), or every
    row (``"M"``: by[m]). A 0-d array is a number in the GPU's memory, which the kernel loads when it runs.

    >>> import numpy as np
    >>> Scale(2.0)(1.5, 0, 0), float(Scale(np.array([1.0, 10.0]), along="M")(1.5, 1, 0))
    (3.0, 15.0)
    """

    by: Any
    along: str = "N"

    array_ndims = MappingProxyType({"by": 1})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.along not in ("M", "N"):
            raise ValueError(f'Scale(along={self.along!r}): "N" (one element a column) or "M" (one a row) is needed')
        if isinstance(self.by, (float, np.integer, np.floating)) or (
                isinstance(self.by, int) and not isinstance(self.by, bool) and abs(self.by) < 2**63):
            object.__setattr__(self, "by", Number(self.by))
        elif not isinstance(self.by, (Number, InMemory)):
            describe_vector(self.by, "Scale(by=...)")
            info = info_of(self.by, "by of Scale")
            if not info.shape:
                object.__setattr__(self, "by", in_memory(self.by, "by of Scale", info.dtype))

    @property
    def is_number(self) -> bool:
        return isinstance(self.by, Number)

    @property
    def is_in_memory(self) -> bool:
        return isinstance(self.by, InMemory)

    @property
    def is_along_m(self) -> bool:
        return self.along == "M"

    def __call__(self, x: Any, m: int, n: int) -> Any:
        if self.is_number:
            return x * self.by.value
        if self.is_in_memory:
            return x * self.by.value()
        return x * self.by[m if self.is_along_m else n]

    def check(self, M: int, N: int) -> None:
        """Raise ValueError unless the vector fits a D of M x N."""
        if not self.is_number and not self.is_in_memory:
            shape, wanted = describe(self.by, "by").shape, (M if self.is_along_m else N,)
            if shape[-1:] != wanted:
                raise ValueError(f"by of Scale has shape {shape}; along={self.along!r} of a {M} x {N} result needs {wanted}")


def describe_vector(x: Any, name: str) -> None:
    if not is_array(x) and not isinstance(x, ArrayInfo):
        raise TypeError(f"{name}: got {type(x).__name__}; a number or a vector is needed")


@dataclass(frozen=True)
class _WithArray(Epilogue):
    """An epilogue with an array of D's shape, of any strides and dtype; of a stack of products, of the stack's (broadcast as
    NumPy does) or of one product's."""

    array: Array
    layout: Any = None                  # of the array; found by its strides

    array_ndims = MappingProxyType({"array": 2})

    def __post_init__(self) -> None:
        kind = type(self).__name__
        info = info_of(self.array, f"array of {kind}")
        check_dtype(info.dtype, f"array of {kind}")
        if len(info.shape) < 2:
            raise ValueError(f"array of {kind} has {len(info.shape)} dimensions; a matrix of 2 is needed")
        if self.layout is None:
            column_major = info.strides[-2] == 1 and info.strides[-1] != 1
            object.__setattr__(self, "layout", (ColMajor if column_major else RowMajor)(info.dtype))
        elif not isinstance(self.layout, ArrayLayout):
            raise TypeError(f"{kind}(layout={self.layout!r}): a Layout is needed, for example RowMajor('float16')")
        elif (self.layout.dimensions_of(info) or 2) != 2:
            raise ValueError(f"{kind}(layout={self.layout!r}): the layout of a matrix of 2 dimensions is needed, as its "
                             f"array of shape {info.shape} is")
        elif self.outputs and not self.layout.writable:
            raise TypeError(f"{kind}(layout={self.layout!r}): it has neither store_element nor store, so the array cannot "
                            "be written")
        elif not self.outputs and not self.layout.readable:
            raise TypeError(f"{kind}(layout={self.layout!r}): it has neither element nor load, so the array cannot be read")

    reads_tiles = True

    def check(self, M: int, N: int) -> None:
        """Raise ValueError unless the array has the shape of D."""
        shape = describe(self.array, "array").shape
        if shape[-2:] != (M, N):
            raise ValueError(f"array of {type(self).__name__} has shape {shape}; the result is {M} x {N}")


@dataclass(frozen=True)
class Residual(_WithArray):
    """Adds an array of D's shape. It may be D's own memory: every element is read and written by one thread.

    The sum is taken in NumPy's common type of the array and the values.

    >>> import numpy as np
    >>> float(Residual(np.array([[1.0, 2.0]]))(0.5, 0, 1))
    2.5
    """

    beside = "array"

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return x + self.array[m, n]

    def finish(self, values: tuple, tile: Any, shape: Any) -> tuple:
        others = self.layout.load(self.array, tile, shape)
        return apply(lambda x, n: x + others[n], values)


@dataclass(frozen=True)
class Store(_WithArray):
    """Stores the values into an array of D's shape as well, converted to its dtype, and passes them on unchanged.

    ``Store(before) | GELU()`` keeps what a backward pass needs. The array may overlap no operand and no other output.
    """

    outputs = ("array",)

    def __call__(self, x: Any, m: int, n: int) -> Any:
        self.array[m, n] = x
        return x

    def finish(self, values: tuple, tile: Any, shape: Any) -> tuple:
        self.layout.store(self.array, tile, fitting("array of Store", self.layout.dtype, values), shape)
        return values


__all__ = ["Residual", "Scale", "Store"]
