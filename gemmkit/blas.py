"""The BLAS face: ``gemmEx`` and ``gemm``, in place, with run-time alpha and beta."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gemmkit.config import Config
from gemmkit.dual import Dual
from gemmkit.epilogues import LinearCombination
from gemmkit.lang.given import check_dtype
from gemmkit.lang.record_types import conjugate
from gemmkit.lang.records import REAL_IMAG
from gemmkit.matmul import matmul
from gemmkit.matrices import Matrix, arrays, transposed
from gemmkit.operators import Algebra, Operator, dual
from gemmkit.problem import check_places, layout_of
from gemmkit.runtime.arrays import ArrayInfo, describe, empty_like, overlaps
from gemmkit.transforms import Elementwise

__all__ = ["gemm", "gemmEx"]


def gemmEx(transa: str, transb: str, alpha: Any, a: Any, b: Any, beta: Any, c: Any, *, operator: Operator | None = None,
           conf: Config | None = None, stream: Any = None) -> Any:
    """``C := alpha op(A) op(B) + beta C``, in place; returns c.

    Args:
        transa, transb: "N" (as it is), "T" (transposed) or "C" (conjugate transposed, conjugated on the way in; for
            real and dual numbers that is "T").
        alpha, beta: numbers (complex ones for a complex C, whole ones for an integer C, real ones otherwise), applied in the
            accumulator's precision.
            With beta = 0, C is not read: it may hold NaN.
        a, b: op(A) is (M, K) and op(B) is (K, N): arrays, or matrices with structure (`gemmkit.Diagonal(x)` and the
            like). c: (M, N), any strides.
        operator: what multiplies; None chooses one by dtypes and sizes. With an `operators.Algebra` the arrays may have a
            last axis, the parts of its numbers.
        conf: a configuration for op(A), op(B) and c, whose epilogue gives way to alpha and beta.
        stream: None is the current stream of a's library.

    Raises ValueError, TypeError and ConfigError as `gemmkit.matmul`, and ValueError for another ``trans`` character.

    >>> import numpy as np, gemmkit
    >>> a, c = np.array([[1, 2], [3, 4]], np.float32), np.ones((2, 2), np.float32)
    >>> with gemmkit.emulate():
    ...     gemmEx("T", "N", 2.0, a, a, -1.0, c).tolist()
    [[19.0, 27.0], [27.0, 39.0]]
    """
    if isinstance(c, Dual):
        return _dual(transa, transb, alpha, a, b, beta, c, operator, conf, stream)
    multiplies = operator if operator is not None or conf is None else conf.operator
    op_a, a_info = _operated(transa, a, "transa", "a", multiplies)
    op_b, b_info = _operated(transb, b, "transb", "b", multiplies)
    c_info = describe(c, "c")
    check_places({"a": a_info.info, "b": b_info.info, "c": c_info})
    layout = layout_of(c_info, "c", multiplies)
    seen = layout.seen(c_info)
    alpha, beta = _number(alpha, "alpha", seen.dtype), _number(beta, "beta", seen.dtype)
    _check(transa, a_info, transb, b_info, seen)
    held = c if seen is c_info else seen if c_info.device >= 0 else layout.host_view(c)
    epilogue = LinearCombination(alpha, beta, held, layout)
    more: dict[str, Any] = {f"transform_global_to_shared_{name}": CONJUGATE
                            for name, trans, info in (("a", transa, a_info), ("b", transb, b_info))
                            if trans == "C" and info.dtype.kind in "cV"}
    if operator is not None:
        more["operator"] = operator
    return matmul(op_a, op_b, conf=conf, out=c, epilogue=epilogue, stream=stream, **more)


def _dual(transa: str, transb: str, alpha: Any, a: Any, b: Any, beta: Any, c: Dual, operator: Any, conf: Any,
          stream: Any) -> Dual:
    """`gemmEx` of dual arrays: of their parts. Real ones among A and B count as constants."""
    for name, x in (("a", a), ("b", b)):
        if isinstance(x, Dual) and x.count != c.count:
            raise ValueError(f"{name} has {x.count} tangents and c {c.count}; all need as many")
    a, b = ((x if isinstance(x, Dual) else Dual.constant(x, c.count)).parts for x in (a, b))
    if operator is None and conf is None:
        operator = dual(c.count)
    gemmEx(transa, transb, alpha, a, b, beta, c.parts, operator=operator, conf=conf, stream=stream)
    return c


def gemm(transa: str, transb: str, a: Any, b: Any, out: Any = None, alpha: Any = 1.0, beta: Any = 0.0) -> Any:
    """``out := alpha op(a) op(b) + beta out``, with the signature of ``cupy.cublas.gemm``.

    "H" is accepted for "C", as CuPy has it. Without ``out`` a new array is returned (and beta does nothing).

    >>> import numpy as np, gemmkit
    >>> a = np.array([[1, 2], [3, 4]], np.float32)
    >>> with gemmkit.emulate():
    ...     gemm("N", "T", a, a).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    transa, transb = ("C" if isinstance(t, str) and t == "H" else t for t in (transa, transb))
    if out is None:
        a_info, b_info = _operated(transa, a, "transa", "a")[1], _operated(transb, b, "transb", "b")[1]
        check_places({"a": a_info.info, "b": b_info.info})
        for name, dtype in (("a", a_info.dtype), ("b", b_info.dtype)):
            check_dtype(dtype, name)
        rows, columns = a_info.shape[transa != "N"], b_info.shape[transb == "N"]
        out, beta = empty_like(arrays(a, b, ())[0], (rows, columns), np.result_type(a_info.dtype, b_info.dtype)), 0.0
    return gemmEx(transa, transb, alpha, a, b, beta, out)


class _Operand(NamedTuple):
    """What is asked of A and B: ``info`` is of the array behind it, if there is one."""

    shape: tuple[int, ...]
    dtype: np.dtype
    info: ArrayInfo | None


def _operated(trans: str, x: Any, argument: str, name: str, operator: Any = None) -> tuple[Any, _Operand]:
    """op(x) as a view (nothing is copied), and x described."""
    if not isinstance(trans, str) or trans not in ("N", "T", "C"):
        raise ValueError(f'{argument} is {trans!r}; "N", "T" or "C" is needed')
    if isinstance(x, Matrix):
        if x.ndim != 2:
            raise ValueError(f"{name} has {x.ndim} dimensions; a matrix of 2 is needed")
        about = _Operand(x.shape, x.dtype, None if x.array is None else describe(x.array, name))
        return (x if trans == "N" else x.T), about
    info = describe(x, name)
    if isinstance(operator, Algebra) and len(info.shape) == 3:           # a last axis of parts
        seen = layout_of(info, name, operator).seen(info)
        return x if trans == "N" else x.swapaxes(0, 1), _Operand(seen.shape, seen.dtype, info)
    if len(info.shape) != 2:
        raise ValueError(f"{name} has {len(info.shape)} dimensions; a matrix of 2 is needed")
    if trans == "N":
        return x, _Operand(info.shape, info.dtype, info)
    return transposed(x), _Operand(info.shape, info.dtype, info)


def _check(transa: str, a: _Operand, transb: str, b: _Operand, c: ArrayInfo) -> None:
    """Raise ValueError, in BLAS's terms, where the operands do not fit each other or c cannot be written."""
    M, K = a.shape if transa == "N" else a.shape[::-1]
    inner, N = b.shape if transb == "N" else b.shape[::-1]
    if K != inner:
        raise ValueError(f"a has shape {a.shape} and b has shape {b.shape}: with transa={transa!r} and transb={transb!r} "
                         f"op(a) has {K} columns and op(b) {inner} rows; both are K")
    if c.shape != (M, N):
        raise ValueError(f"c has shape {c.shape}; op(a) op(b) is ({M}, {N})")
    for name, other in (("a", a), ("b", b)):
        if other.dtype.kind == "c" and c.dtype.kind != "c":
            raise TypeError(f"c has dtype {c.dtype} and {name} {other.dtype}: the result is complex; give a complex c")
    if c.readonly:
        raise ValueError("c is read-only, and the result is written to it; give a writable array")
    for name, other in (("a", a), ("b", b)):
        if other.info is not None and overlaps(c, other.info):
            raise ValueError(f"c overlaps {name} in memory; every thread block reads {name} while others write c")


def _number(value: Any, name: str, dtype: np.dtype) -> Any:
    """A scalar as the epilogue takes it: complex ones in the precision of C."""
    kinds: tuple = (int, float, np.integer, np.floating)
    is_complex = dtype.kind == "c" or dtype.names == REAL_IMAG
    if is_complex:
        kinds = (*kinds, complex, np.complexfloating)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, kinds):
        raise TypeError(f"{name} is {value!r}; a {'' if is_complex else 'real '}number is needed for a C of {dtype}")
    if dtype.kind in "iu":
        return _integer(value, name, dtype)
    return value if not is_complex else dtype.type(value) if dtype.kind == "c" else np.complex64(value)


def _integer(value: Any, name: str, dtype: np.dtype) -> Any:
    """A scalar in the dtype of an integer C: 2.0 is 2, and 0.5 is an error."""
    limits = np.iinfo(dtype)
    if value != value or value in (np.inf, -np.inf) or int(value) != value or not limits.min <= int(value) <= limits.max:
        raise ValueError(f"{name} is {value!r} and c holds {dtype}: a whole number from {limits.min} to {limits.max} is "
                         "needed")
    return dtype.type(int(value))


def _conjugate(x: Any) -> Any:
    return conjugate(x)


CONJUGATE = Elementwise(_conjugate)
