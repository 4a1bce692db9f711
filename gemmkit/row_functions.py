"""Functions of rows: those that come with gemmkit, and the contract of your own (`gemmkit.rows.rowwise`).

A function of rows is a component with one method of device code, ``__call__(row)``. It folds the row as often as it wants
and stores its result once (`gemmkit.kernels.rows.row`):

>>> from gemmkit.lang.component_class import dataclass
>>> import math
>>> import numpy as np
>>> import gemmkit as gk
>>> from gemmkit.rows import RowFunction, put, rowwise, total
>>> @dataclass(frozen=True)
... class UnitLength(RowFunction):
...     def __call__(self, row):
...         length = math.sqrt(total(row, lambda x, n: x * x))
...         put(row, lambda x, n: x / length)
>>> with gk.emulate():
...     rowwise(np.array([[3.0, 4.0], [5.0, 12.0]], np.float32), UnitLength()).round(3).tolist()
[[0.6000000238418579, 0.800000011920929], [0.38499999046325684, 0.9229999780654907]]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from gemmkit.components import Array, Component, Scalar
from gemmkit.kernels.common.exponential import power
from gemmkit.kernels.rows.row import Row, largest, mapped, moments, put, total
from gemmkit.lang.records import part_dtypes
from gemmkit.lang.values import convert
from gemmkit.ptx.arithmetic import difference
from gemmkit.runtime.arrays import describe


@dataclass(frozen=True)
class RowFunction(Component):
    """A function of each row of a matrix: ``__call__(row)`` is device code and returns nothing.

    ``outputs`` names arrays among its fields that it stores into (`gemmkit.rows.put_one`); ``along_columns`` those that have
    an element for each column, which `check` looks at.
    """

    without_value = ("__call__",)
    outputs: ClassVar[tuple[str, ...]] = ()
    along_columns: ClassVar[tuple[str, ...]] = ()

    def __call__(self, row: Row) -> None:
        raise NotImplementedError(f"{type(self).__qualname__} has no __call__(row)")

    def check(self, rows: int, columns: int) -> None:
        """Raise ValueError where its arrays do not fit a matrix of ``rows`` x ``columns``, TypeError for numbers of several
        parts among those along columns."""
        for name in self.along_columns:
            info = describe(getattr(self, name), name)
            if info.shape != (columns,):
                raise ValueError(f"{name} has shape {info.shape}; rows of {columns} elements need {(columns,)}")
            if len(part_dtypes(info.dtype)) > 1:
                raise TypeError(f"{name} is of {info.dtype}; rows are real, and so must it be")
        for name in self.outputs:
            shape = describe(getattr(self, name), name).shape
            if shape[:1] != (rows,):
                raise ValueError(f"{name} has shape {shape}; {rows} rows need {(rows,)}")


@dataclass(frozen=True)
class Softmax(RowFunction):
    """exp(scale (x - largest)) over its sum: no exponential is larger than 1. A row of -inf alone is NaN, as in NumPy.

    A result of 16 bits takes the special function unit's exponential, which `math.exp` calls amid some ten instructions."""

    scale: Scalar = np.float32(1)

    def __call__(self, row: Row) -> None:
        spec, scale = row.spec, self.scale
        top = largest(row, lambda x, n: scale * x)
        raised = mapped(row, lambda x, n: power(spec, difference(convert(spec.dtype, scale * x), top)))
        share = 1 / total(raised, lambda x, n: x)
        put(raised, lambda x, n: x * share)


@dataclass(frozen=True)
class LogSoftmax(RowFunction):
    """The logarithm of `Softmax`, which does not underflow."""

    scale: Scalar = np.float32(1)

    def __call__(self, row: Row) -> None:
        spec, scale = row.spec, self.scale
        top = largest(row, lambda x, n: scale * x)
        low = math.log(total(row, lambda x, n: power(spec, difference(convert(spec.dtype, scale * x), top))))
        put(row, lambda x, n: difference(convert(spec.dtype, scale * x), top) - low)


def centred(row: Row, eps: Any) -> tuple:
    """A row's mean, and one over its standard deviation (of the row, not of what it is a sample of)."""
    mean, variance = moments(row)
    return mean, 1 / math.sqrt(variance + eps)


@dataclass(frozen=True)
class LayerNorm(RowFunction):
    """(x - mean) / sqrt(variance + eps)."""

    eps: Scalar

    def __call__(self, row: Row) -> None:
        mean, scale = centred(row, self.eps)
        put(row, lambda x, n: (x - mean) * scale)


@dataclass(frozen=True)
class AffineLayerNorm(RowFunction):
    """gamma (x - mean) / sqrt(variance + eps) + beta, with an element of gamma and beta for each column."""

    eps: Scalar
    gamma: Array
    beta: Array

    array_ndims = MappingProxyType({"gamma": 1, "beta": 1})
    along_columns: ClassVar[tuple[str, ...]] = ("gamma", "beta")

    def __call__(self, row: Row) -> None:
        mean, scale = centred(row, self.eps)
        put(row, lambda x, n, gamma, beta: (x - mean) * scale * gamma + beta, (self.gamma, self.beta))


def root_mean_square(row: Row, eps: Any) -> Any:
    """One over the root of the mean of squares."""
    return 1 / math.sqrt(total(row, lambda x, n: x * x) / row.columns + eps)


@dataclass(frozen=True)
class RMSNorm(RowFunction):
    """x / sqrt(mean of squares + eps)."""

    eps: Scalar

    def __call__(self, row: Row) -> None:
        scale = root_mean_square(row, self.eps)
        put(row, lambda x, n: x * scale)


@dataclass(frozen=True)
class AffineRMSNorm(RowFunction):
    """gamma x / sqrt(mean of squares + eps), with an element of gamma for each column."""

    eps: Scalar
    gamma: Array

    array_ndims = MappingProxyType({"gamma": 1})
    along_columns: ClassVar[tuple[str, ...]] = ("gamma",)

    def __call__(self, row: Row) -> None:
        scale = root_mean_square(row, self.eps)
        put(row, lambda x, n, gamma: x * scale * gamma, (self.gamma,))
