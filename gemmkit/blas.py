"""The BLAS face: ``gemmEx`` and ``gemm``, in place, with run-time alpha and beta."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.epilogues import LinearCombination
from gemmkit.matmul import matmul
from gemmkit.problem import layout_of
from gemmkit.runtime.arrays import describe, empty_like

__all__ = ["gemm", "gemmEx"]


def gemmEx(transa: str, transb: str, alpha: Any, a: Any, b: Any, beta: Any, c: Any, *, stream: Any = None) -> Any:
    """``C := alpha op(A) op(B) + beta C``, in place; returns c.

    Args:
        transa, transb: "N" (as it is), "T" (transposed) or "C" (conjugate transposed; for real numbers that is "T").
        alpha, beta: numbers, applied in the accumulator's precision. With beta = 0, C is not read: it may hold NaN.
        a, b: op(A) is (M, K) and op(B) is (K, N). c: (M, N), any strides.
        stream: None is the current stream of a's library.

    Raises ValueError, TypeError as `gemmkit.matmul`, and ValueError for another ``trans`` character.

    >>> import numpy as np, gemmkit
    >>> a, c = np.array([[1, 2], [3, 4]], np.float32), np.ones((2, 2), np.float32)
    >>> with gemmkit.emulate():
    ...     gemmEx("T", "N", 2.0, a, a, -1.0, c).tolist()
    [[19.0, 27.0], [27.0, 39.0]]
    """
    a, b = _operated(transa, a, "transa", "a"), _operated(transb, b, "transb", "b")
    info = describe(c, "c")
    epilogue = LinearCombination(_number(alpha, "alpha"), _number(beta, "beta"), c, layout_of(info, "c"))
    return matmul(a, b, out=c, epilogue=epilogue, stream=stream)


def gemm(transa: str, transb: str, a: Any, b: Any, out: Any = None, alpha: Any = 1.0, beta: Any = 0.0) -> Any:
    """``out := alpha op(a) op(b) + beta out``, with the signature of ``cupy.cublas.gemm``.

    "H" is accepted for "C", as CuPy has it. Without ``out`` a new array is returned (and beta does nothing).

    >>> import numpy as np, gemmkit
    >>> a = np.array([[1, 2], [3, 4]], np.float32)
    >>> with gemmkit.emulate():
    ...     gemm("N", "T", a, a).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    transa, transb = ("C" if t == "H" else t for t in (transa, transb))
    if out is None:
        rows = describe(_operated(transa, a, "transa", "a"), "a").shape[0]
        columns = describe(_operated(transb, b, "transb", "b"), "b").shape[-1]
        info = describe(a, "a")
        out, beta = empty_like(a, (rows, columns), np.result_type(info.dtype, describe(b, "b").dtype)), 0.0
    return gemmEx(transa, transb, alpha, a, b, beta, out)


def _operated(trans: str, x: Any, argument: str, name: str) -> Any:
    """op(x) as a view: nothing is copied."""
    if trans not in ("N", "T", "C"):
        raise ValueError(f'{argument} is {trans!r}; "N", "T" or "C" is needed')
    info = describe(x, name)
    if len(info.shape) != 2:
        raise ValueError(f"{name} has {len(info.shape)} dimensions; a matrix of 2 is needed")
    return x if trans == "N" else x.T


def _number(value: Any, name: str) -> Any:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} is {value!r}; a real number is needed")
    return value
