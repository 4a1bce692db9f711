"""Functions of each row of a matrix, in one launch: softmax, layer norm, RMS norm, and your own (`gemmkit.row_functions`).

The row is read once where its threads can hold it (up to 32,768 elements of 16 bits, 16,384 of float32), and else once for
each fold, from the L2 cache where it fits there.

>>> import numpy as np, gemmkit
>>> with gemmkit.emulate():
...     gemmkit.softmax(np.array([[0.0, 0.0, 0.0, 0.0]], np.float32)).tolist()
[[0.25, 0.25, 0.25, 0.25]]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.kernels.rows.row import Row, fold, largest, mapped, moments, put, put_one, smallest, total
from gemmkit.problem import FLOAT32_MAX, finite_number
from gemmkit.row_functions import (
    AffineLayerNorm,
    AffineRMSNorm,
    LayerNorm,
    LogSoftmax,
    RMSNorm,
    RowFunction,
    Softmax,
)
from gemmkit.row_plans import run_rows
from gemmkit.runtime.arrays import describe

__all__ = ["Row", "RowFunction", "fold", "largest", "layernorm", "log_softmax", "mapped", "moments", "put", "put_one",
           "rmsnorm", "rowwise", "smallest", "softmax", "total"]


def softmax(x: Any, *, scale: float = 1.0, out: Any = None, stream: Any = None) -> Any:
    """The softmax of ``scale * x`` along the last axis.

    Args:
        x: an array (..., N) of float16, bfloat16, float32 or float64; leading axes must be one (strides that collapse).
        scale: a factor, such as one over the root of the head size; a run-time number.
        out: an array of x's shape to store into, of any of these dtypes; x itself is allowed. None makes one like x.
        stream: the stream to launch on; None for the library's current one.

    Raises:
        TypeError: x or out is no array of these dtypes, or on the host outside of `gemmkit.emulate`.
        ValueError: shapes differ, leading axes do not collapse, out shares memory with x without being it, or scale is
            no finite number of float32 (of float64, where x is of float64).

    >>> import numpy as np, gemmkit
    >>> with gemmkit.emulate():
    ...     gemmkit.softmax(np.array([1.0, 1.0], np.float32), scale=2.0).tolist()
    [0.5, 0.5]
    """
    return rowwise(x, Softmax(_number(scale, "scale", x)), out=out, stream=stream)


def log_softmax(x: Any, *, scale: float = 1.0, out: Any = None, stream: Any = None) -> Any:
    """The logarithm of `softmax`, which does not underflow; the arguments are the same."""
    return rowwise(x, LogSoftmax(_number(scale, "scale", x)), out=out, stream=stream)


def layernorm(x: Any, gamma: Any = None, beta: Any = None, *, eps: float = 1e-5, out: Any = None, stream: Any = None) -> Any:
    """(x - mean) / sqrt(variance + eps) gamma + beta along the last axis (Ba et al., 2016).

    The kernel sums squares in float32 (of float64 in float64), which overflow where deviations exceed about 1e19: such a
    row is beta, or zeros, as NumPy computes it in float32. `rmsnorm` does the same.

    Args:
        x, out, stream: as of `softmax`.
        gamma, beta: arrays of N elements, of any dtype of real numbers; both or none.
        eps: added to the variance.

    Raises:
        ValueError, TypeError: as of `softmax`; gamma or beta does not have N elements, or is given alone.

    >>> import numpy as np, gemmkit
    >>> with gemmkit.emulate():
    ...     gemmkit.layernorm(np.array([1.0, 3.0], np.float32), eps=0.0).tolist()
    [-1.0, 1.0]
    """
    if (gamma is None) is not (beta is None):
        raise ValueError(f"{'beta' if gamma is None else 'gamma'} is given alone; give gamma and beta, or none of them")
    number = _number(eps, "eps", x)
    return rowwise(x, LayerNorm(number) if gamma is None else AffineLayerNorm(number, gamma, beta), out=out, stream=stream)


def rmsnorm(x: Any, gamma: Any = None, *, eps: float = 1e-6, out: Any = None, stream: Any = None) -> Any:
    """x / sqrt(mean of squares + eps) gamma along the last axis (Zhang and Sennrich, 2019); arguments as of `layernorm`.

    >>> import numpy as np, gemmkit
    >>> with gemmkit.emulate():
    ...     gemmkit.rmsnorm(np.array([2.0, -2.0], np.float32), eps=0.0).tolist()
    [1.0, -1.0]
    """
    number = _number(eps, "eps", x)
    return rowwise(x, RMSNorm(number) if gamma is None else AffineRMSNorm(number, gamma), out=out, stream=stream)


def rowwise(x: Any, function: RowFunction, *, out: Any = None, stream: Any = None) -> Any:
    """A function of each row of ``x`` (its last axis), in one launch.

    Args:
        x, out, stream: as of `softmax`.
        function: a `RowFunction`; arrays that it holds are on x's device.

    Returns: ``out``, or a new array like x.

    Raises:
        TypeError: function is no RowFunction; else as of `softmax`.
        ValueError: an array of the function's does not fit, or shares memory with out; else as of `softmax`.
        ComponentError: the function's code cannot be compiled.
    """
    if not isinstance(function, RowFunction):
        raise TypeError(f"function={function!r}: a RowFunction is needed, such as gemmkit.row_functions.Softmax()")
    return run_rows(x, function, out, stream)


def _number(value: Any, name: str, x: Any) -> float:
    """A scale or an eps, which the kernel has in float64 for an x of float64, and else in float32."""
    if type(value) is float and -FLOAT32_MAX <= value <= FLOAT32_MAX:
        return value
    number = finite_number(value, name)
    if abs(number) > FLOAT32_MAX and describe(x, "x").dtype != np.float64:
        raise ValueError(f"{name}={value!r}: a finite number of float32 is needed, in which the rows of an x of "
                         f"{describe(x, 'x').dtype} are computed")
    return number
