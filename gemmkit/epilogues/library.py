"""Epilogues that come with gemmkit: bias, and BLAS's linear combination with C."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from gemmkit.components import Array, Component, Scalar
from gemmkit.epilogues.base import Epilogue
from gemmkit.epilogues.factors import computed_in, factor
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.narrowing import fitting
from gemmkit.lang.registers import apply
from gemmkit.lang.values import convert_all, fill
from gemmkit.layouts import ArrayLayout, GlobalLayout
from gemmkit.layouts.base import leading
from gemmkit.runtime.arrays import ArrayInfo, describe, info_of, is_array


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


__all__ = ["Bias", "LinearCombination"]
