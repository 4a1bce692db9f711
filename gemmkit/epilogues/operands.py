"""Epilogues with operands of their own: scaling by a number or a vector, a residual, a second output, a bias, and BLAS's
linear combination with C."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from gemmkit.components import Array, Component, Scalar
from gemmkit.epilogues.base import Epilogue
from gemmkit.epilogues.factors import InMemory, computed_in, factor, in_memory
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.given import check_dtype
from gemmkit.lang.narrowing import fitting
from gemmkit.lang.registers import apply
from gemmkit.lang.values import convert_all, fill
from gemmkit.layouts import ArrayLayout, ColMajor, GlobalLayout, RowMajor
from gemmkit.layouts.base import leading
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


@dataclass(frozen=True)
class Bias(Epilogue):
    """Adds a vector to every row of D (``along="N"``: bias[n], N elements) or to every column (``"M"``: bias[m]).

    Of a stack of products each may have its own, in an array with the stack's dimensions before the vector's (broadcast as
    NumPy does). The vector may have any dtype; the sum is taken in NumPy's common type of it and the accumulator.

    >>> import numpy as np
    >>> float(Bias(np.array([1.0, 2.0]))(0.5, 0, 1))
    2.5
    """

    bias: Array
    along: str = "N"

    array_ndims = MappingProxyType({"bias": 1})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.along not in ("M", "N"):
            raise ValueError(f'Bias(along={self.along!r}): "N" (one element a column) or "M" (one a row) is needed')

    @property
    def is_along_m(self) -> bool:
        return self.along == "M"

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return x + self.bias[m if self.is_along_m else n]

    def check(self, M: int, N: int) -> None:
        """Raise ValueError unless the vector fits a D of M x N."""
        shape, wanted = describe(self.bias, "bias").shape, (M if self.is_along_m else N,)
        if shape[-1:] != wanted:
            raise ValueError(f"bias has shape {shape}; along={self.along!r} of a {M} x {N} result needs {wanted}")


@dataclass(frozen=True)
class LinearCombination(Epilogue):
    """``alpha * x + beta * C``, with run-time alpha and beta; C is not read when beta is 0 (BLAS's rule).

    C may be the same array as D: every element is read and written by one thread. ``layout`` is C's, and its dtype is the
    result's. The arithmetic is the accumulator's, or float32's. Of an integer C, alpha and beta are integers, and sums that
    it cannot hold are refused (ConfigError). Of a stack of products each may have its own C, in an array with the stack's
    dimensions before a matrix's (broadcast as NumPy does); alpha and beta are those of all.

    alpha and beta may be 0-d arrays in the GPU's memory, which the kernel loads, and of an algebra's C numbers of its parts,
    as a tuple or an array (`gemmkit.epilogues.factors`). Such a number multiplies from the left.
    """

    alpha: Scalar
    beta: Scalar
    c: Array
    layout: GlobalLayout

    beside = "c"

    def __post_init__(self) -> None:
        if not isinstance(self.layout, ArrayLayout):
            raise TypeError(f"LinearCombination(layout={self.layout!r}): a Layout is needed, for example "
                            "RowMajor('float16')")
        if not isinstance(self.layout, GlobalLayout) or type(self.layout).element is GlobalLayout.element:
            raise TypeError(f"LinearCombination(layout={self.layout!r}): it has no element(data, i, j, shape), so c cannot "
                            "be read")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if is_array(value) or isinstance(value, (tuple, list)):
                object.__setattr__(self, name, factor(value, name, self.layout.dtype, self._described().device))
            if self.layout.dtype.kind in "iu" and isinstance(value, (float, np.floating)):
                raise TypeError(f"LinearCombination({name}={value!r}): C holds {self.layout.dtype}, and its multiple by a "
                                "float is none; give an integer")
        super().__post_init__()

    def __call__(self, x: Any, m: int, n: int) -> Any:
        raise TypeError("LinearCombination works on tiles")

    def check(self, M: int, N: int) -> None:
        """Raise ValueError unless C, or each of a stack, has the shape of D."""
        c = self._described()
        count = leading(c, self.layout)
        first = c._replace(shape=c.shape[count:], strides=c.strides[count:])
        self.layout.check(self.layout.seen(first), M, N, "c")

    def array_dimensions(self) -> Mapping[str, int]:
        own = self.layout.dimensions_of(self._described())
        return {} if own is None else {"c": own}

    def _described(self) -> ArrayInfo:
        return info_of(self.c, "c")          # a plan keeps no array

    def reads_alongside(self) -> bool:
        if self.is_beta_held:
            return not self.beta.is_zero()
        return self.beta != 0

    def finish(self, values: tuple, tile: Any, shape: Any) -> tuple:
        if self.is_alpha_held or self.is_beta_held:
            return self.finish_held(values, tile, shape)
        if self.beta == 0:
            return convert_all(self.layout.dtype, apply(scaled, fitting("c", self.layout.dtype, values), self))
        c = convert_all(self.wide, self.layout.load(self.c, tile, shape))
        return convert_all(self.layout.dtype, apply(combined, fitting("c", self.layout.dtype, values), self, c))

    def finish_held(self, values: tuple, tile: Any, shape: Any) -> tuple:
        """`finish` with a factor in memory, or of several parts: each is loaded once for a tile."""
        if self.is_alpha_held:
            if self.alpha.is_zero():                       # whatever the product is, NaN too
                return self.finish_without(values, tile, shape)
        alpha = self.alpha.value() if self.is_alpha_held else self.alpha
        multiples = apply(multiple, fitting("c", self.layout.dtype, values), alpha, self.is_alpha_left)
        if not self.reads_alongside():
            return convert_all(self.layout.dtype, multiples)
        beta = self.beta.value() if self.is_beta_held else self.beta
        c = convert_all(self.computed, self.layout.load(self.c, tile, shape))
        return convert_all(self.layout.dtype, apply(plus_multiple, multiples, c, beta, self.is_beta_left))

    def finish_without(self, values: tuple, tile: Any, shape: Any) -> tuple:
        """beta C, where alpha is 0."""
        if not self.reads_alongside():
            return fill(self.layout.dtype, len(values), 0)
        beta = self.beta.value() if self.is_beta_held else self.beta
        c = convert_all(self.computed, self.layout.load(self.c, tile, shape))
        return convert_all(self.layout.dtype, apply(multiple, c, beta, self.is_beta_left))

    @property
    def is_alpha_held(self) -> bool:
        return isinstance(self.alpha, Component)

    @property
    def is_beta_held(self) -> bool:
        return isinstance(self.beta, Component)

    @property
    def computed(self) -> np.dtype:
        """What C is multiplied in by a beta in memory, or of several parts."""
        return computed_in(self.layout.dtype)

    @property
    def is_alpha_left(self) -> bool:
        """Whether alpha's place matters: it is a number of several parts, and complex ones commute."""
        return self.is_alpha_held and self.alpha.is_left

    @property
    def is_beta_left(self) -> bool:
        return self.is_beta_held and self.beta.is_left

    reads_tiles = True

    @property
    def wide(self) -> np.dtype:
        """What C is multiplied by beta in: float32 for the narrow floats, which beta, a plain number, would not widen."""
        dtype = self.layout.dtype
        is_narrow = dtype.names is None and dtype.kind not in "iub" and dtype.itemsize < 4
        return np.dtype(np.float32) if is_narrow else dtype


def first(m: int, n: int) -> int:
    return m


def second(m: int, n: int) -> int:
    return n


def scaled(x: Any, n: int, epilogue: Any) -> Any:
    return x * epilogue.alpha


def combined(x: Any, n: int, epilogue: Any, c: tuple) -> Any:
    return x * epilogue.alpha + c[n] * epilogue.beta


def multiple(x: Any, n: int, alpha: Any, is_left: bool) -> Any:
    if is_left:
        return alpha * x
    return x * alpha


def plus_multiple(x: Any, n: int, c: tuple, beta: Any, is_left: bool) -> Any:
    return x + multiple(c[n], n, beta, is_left)
