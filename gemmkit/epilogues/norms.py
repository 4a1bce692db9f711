"""`RMSNorm` and `LayerNorm` of D's rows, as the last epilogue of a product."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import numpy as np

from gemmkit.components import Scalar
from gemmkit.epilogues.normalise import Normalise, multiplied
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.records import part_dtypes
from gemmkit.lang.registers import apply
from gemmkit.lang.values import convert, convert_all
from gemmkit.ptx.memory import load_global
from gemmkit.runtime.arrays import ArrayInfo, describe, is_array

__all__ = ["LayerNorm", "RMSNorm"]


@dataclass(frozen=True)
class Norm(Normalise):
    """What the two have in common: standard values are those of a part over its root mean square."""

    def own_scale(self, squares: Any) -> Any:
        """What makes a part's values standard, of their sum of squares; 1 where that is no number."""
        if squares > 0 and squares < math.inf:
            return self.root(squares / convert(self.dtype, self.width))
        return convert(self.dtype, 1)

    def root(self, x: Any) -> Any:
        """1 / sqrt(x); of 0 it is infinite."""
        return convert(self.dtype, 1) / convert(self.dtype, math.sqrt(x))

    @property
    def width(self) -> int:
        """Columns of a part; within one tile any number will do."""
        return self.kept.width if self.is_in_two_passes else 1


@dataclass(frozen=True)
class RMSNorm(Norm):
    """x / sqrt(mean of squares + eps) of each row of D, times ``gain[n]``: the last epilogue of a chain.

    Args:
        gain: N elements of any dtype, of a stack of products with the stack's dimensions before; None for 1.
        eps: a run-time number.

    All else is as with `Softmax`.

    >>> import numpy as np, gemmkit as gk
    >>> with gk.emulate():
    ...     gk.matmul(np.float32([[1, 7]]), np.eye(2, dtype=np.float32), epilogue=RMSNorm(np.float32([1, 10]), 0.0)).tolist()
    [[0.20000000298023224, 14.0]]
    """

    array_ndims = MappingProxyType({"gain": 1})
    row_words = 1

    gain: Any = None
    eps: Scalar = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_vector(self, "gain")
        check_eps(self)

    def standard(self, values: tuple, group: Any, at: Any) -> tuple:
        sums = group.row_states(self.squares, values, at)
        return apply(scaled_value, values, group, apply(scale_of, sums, self)), sums

    def nothing(self) -> Any:
        return convert(self.dtype, 0)

    def combine(self, a: Any, b: Any) -> Any:
        return a + b

    def factor(self, own: Any, whole: Any, shape: Any) -> Any:
        return self.root(whole / convert(self.dtype, shape.N) + convert(self.dtype, self.eps)) / self.own_scale(own)

    def finished(self, values: tuple, factor: Any, shift: Any, n: int) -> tuple:
        scaled = apply(multiplied, values, factor)
        if self.gain is None:
            return scaled
        return convert_all(self.dtype, apply(times_column, scaled, load_global(self.gain, 0, (n,), (0,), len(values))))

    @property
    def state(self) -> Any:
        return self.dtype


@dataclass(frozen=True)
class LayerNorm(Norm):
    """(x - mean) / sqrt(variance + eps) of each row of D, times ``gain[n]`` plus ``bias[n]``: the last epilogue of a chain.

    The variance is summed about the means of the parts, so nothing cancels. Of a stack all products have one gain and one
    bias. All else is as with `RMSNorm` and `Softmax`.

    >>> import numpy as np, gemmkit as gk
    >>> with gk.emulate():
    ...     gk.matmul(np.float32([[1, 3]]), np.eye(2, dtype=np.float32), epilogue=LayerNorm()).round(2).tolist()
    [[-1.0, 1.0]]
    """

    row_words = 4

    gain: Any = None
    bias: Any = None
    eps: Scalar = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_vector(self, "gain", 1)
        check_vector(self, "bias", 1)
        check_eps(self)

    def standard(self, values: tuple, group: Any, at: Any) -> tuple:
        count = convert(self.dtype, group.held_columns(at))
        means = apply(divided, group.row_states(self.total, values, at), count)
        values = apply(centred_value, values, group, means)
        sums = group.row_states(self.squares, values, at)
        return apply(scaled_value, values, group, apply(scale_of, sums, self)), apply(moments, means, self, sums, count)

    def nothing(self) -> Any:
        return convert(self.state, (0.0, 0.0, 0.0))

    def combine(self, a: Any, b: Any) -> Any:
        """Chan's: of two parts' means, squares about them, and counts."""
        count = a.count + b.count
        far, part = b.mean - a.mean, b.count / max(count, convert(self.dtype, 1))
        return convert(self.state, (a.mean + far * part, a.squares + b.squares + far * far * a.count * part, count))

    def scale(self, whole: Any, shape: Any) -> Any:
        return self.root(whole.squares / convert(self.dtype, shape.N) + convert(self.dtype, self.eps))

    def factor(self, own: Any, whole: Any, shape: Any) -> Any:
        return self.scale(whole, shape) / self.own_scale(own.squares)

    def shift(self, own: Any, whole: Any, shape: Any) -> Any:
        return (own.mean - whole.mean) * self.scale(whole, shape)

    def finished(self, values: tuple, factor: Any, shift: Any, n: int) -> tuple:
        made = apply(moved, values, factor, shift)
        if self.gain is not None:
            made = convert_all(self.dtype, apply(times_column, made, load_global(self.gain, 0, (n,), (0,), len(values))))
        if self.bias is not None:
            made = convert_all(self.dtype, apply(plus_column, made, load_global(self.bias, 0, (n,), (0,), len(values))))
        return made

    @property
    def state(self) -> Any:
        return np.dtype([("mean", self.dtype), ("squares", self.dtype), ("count", self.dtype)])


def divided(x: Any, n: int, count: Any) -> Any:
    return x / count


def centred_value(x: Any, n: int, group: Any, means: tuple) -> Any:
    return x - means[group.row(n)]


def moments(mean: Any, r: int, norm: Any, sums: tuple, count: Any) -> Any:
    return convert(norm.state, (mean, sums[r], count))


def moved(x: Any, n: int, factor: Any, shift: Any) -> Any:
    return x * factor + shift


def times_column(x: Any, n: int, gains: tuple) -> Any:
    return x * gains[n]


def plus_column(x: Any, n: int, biases: tuple) -> Any:
    return x + biases[n]


def scale_of(squares: Any, r: int, norm: Any) -> Any:
    return norm.own_scale(squares)


def scaled_value(x: Any, n: int, group: Any, scales: tuple) -> Any:
    return x * scales[group.row(n)]


# -- what is given ------------------------------------------------------------------------------------------------------

def check_vector(epilogue: Any, name: str, most: int = 8) -> None:
    value = getattr(epilogue, name)
    if value is None or isinstance(value, ArrayInfo):
        return
    if not is_array(value):
        raise TypeError(f"{type(epilogue).__name__}({name}={value!r}): a vector with an element for each column, or None, "
                        "is needed")
    info = describe(value, name)
    if not 1 <= len(info.shape) <= most:
        raise ValueError(f"{name} of {type(epilogue).__name__} has shape {info.shape}; a vector of N elements is needed")
    if len(part_dtypes(info.dtype)) > 1:
        raise TypeError(f"{name} of {type(epilogue).__name__} is of {info.dtype}; D's rows are real, and so must it be")


def check_eps(epilogue: Any) -> None:
    eps = epilogue.eps
    is_number = isinstance(eps, (int, float, np.integer, np.floating)) and not isinstance(eps, bool)
    if not is_number or not 0 <= eps < 2.0**128:
        raise ValueError(f"{type(epilogue).__name__}(eps={eps!r}): a number from 0 on that float32 holds is needed")
