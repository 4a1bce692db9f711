"""Which of CuPy's calls gemmkit computes, with CuPy's result: shape, dtype and order in memory.

Each function takes the arguments of CuPy's and returns a `Product`, or raises `NotTaken` with the reason. Arrays are asked
for ``shape``, ``dtype`` and their description alone, so NumPy's do in tests.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemmkit.blas import gemm as blas_gemm
from gemmkit.functions.einsum import einsum as contract
from gemmkit.functions.einsum import sizes_of, subscripts
from gemmkit.functions.matmul import matmul as multiply
from gemmkit.runtime.arrays import describe, overlaps, overlaps_itself

DTYPES = "?bBhHiIlLqQefdFD"            # of which gemmkit's product of two has CuPy's dtype
GEMM_DTYPES = "fdFD"                   # cupy.cublas.gemm's own
CONSTANTS = {0: "N", 1: "T", 2: "C"}   # cublasOperation_t


class NotTaken(Exception):
    """A call that is left to CuPy, with the reason."""


@dataclass(frozen=True)
class Product:
    """A call of gemmkit's: ``function(*arguments, out=out)``, with ``out`` of this shape and dtype where none is given.

    ``work`` is how many multiply-adds it takes.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    work: int
    out: Any = None
    order: str = "C"
    keywords: dict[str, Any] = field(default_factory=dict)

    def __call__(self, empty: Callable[..., Any]) -> Any:
        """The result; ``empty`` makes arrays, as `cupy.empty` does."""
        out = empty(self.shape, self.dtype, order=self.order) if self.out is None else self.out
        self.function(*self.arguments, out=out, **self.keywords)
        return out


def matmul(is_array: Callable[[Any], bool], a: Any, b: Any, out: Any = None, **keywords: Any) -> Product:
    """``cupy.matmul(a, b, out=out)``: the last two dimensions are matrices, those before are broadcast.

    >>> matmul(lambda x: True, np.ones((2, 3, 4)), np.ones(4)).shape
    (2, 3)
    """
    _without(keywords)
    _check_operands(is_array, a, b)
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise NotTaken("shapes that do not fit")
    try:
        stack = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise NotTaken("shapes that do not fit") from None
    shape = (*stack, *a.shape[-2:-1], *(b.shape[-1:] if b.ndim > 1 else ()))
    return Product(multiply, (a, b), shape, a.dtype, math.prod(shape) * a.shape[-1], _checked(is_array, out, shape, a, b))


def dot(is_array: Callable[[Any], bool], a: Any, b: Any, out: Any = None) -> Product:
    """``cupy.dot(a, b, out)``: the sum over a's last dimension and b's last but one, of all pairs of the others.

    >>> dot(lambda x: True, np.ones((2, 3, 4)), np.ones((5, 4, 6))).shape
    (2, 3, 5, 6)
    """
    _check_operands(is_array, a, b)
    if out is not None and is_array(out) and not out.flags.c_contiguous:
        raise NotTaken("an out that is not in C order, which dot refuses")
    if b.ndim < 3:
        return matmul(is_array, a, b, out)
    return _contraction(is_array, a, b, (a.ndim - 1,), (b.ndim - 2,), out)


def tensordot(is_array: Callable[[Any], bool], a: Any, b: Any, axes: Any = 2) -> Product:
    """``cupy.tensordot(a, b, axes)``.

    >>> tensordot(lambda x: True, np.ones((2, 3, 4)), np.ones((4, 3, 5)), ((1, 2), (1, 0))).arguments[0]
    'abc,cbd->ad'
    """
    _check_operands(is_array, a, b)
    if isinstance(axes, Sequence) and len(axes) == 2:
        of_a, of_b = ((x,) if np.isscalar(x) else tuple(x) for x in axes)
    elif isinstance(axes, (int, np.integer)) and 0 <= axes <= min(a.ndim, b.ndim):
        of_a, of_b = tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes))
    else:
        raise NotTaken("axes that do not fit")
    if len(of_a) != len(of_b) or not all(isinstance(n, (int, np.integer)) for n in of_a + of_b):
        raise NotTaken("axes that do not fit")
    if any(not -a.ndim <= n < a.ndim for n in of_a) or any(not -b.ndim <= n < b.ndim for n in of_b):
        raise NotTaken("axes that do not fit")
    of_a, of_b = tuple(n % a.ndim for n in of_a), tuple(n % b.ndim for n in of_b)
    if len(set(of_a)) != len(of_a) or len(set(of_b)) != len(of_b):
        raise NotTaken("axes that do not fit")
    if not of_a:
        raise NotTaken("nothing is summed over")
    return _contraction(is_array, a, b, of_a, of_b, None)


def einsum(is_array: Callable[[Any], bool], *operands: Any, dtype: Any = None, optimize: Any = False) -> Product:
    """``cupy.einsum(spec, a, b)``, of two operands. A call with more of them is CuPy's, which calls ``cupy.matmul`` in turn.

    >>> einsum(lambda x: True, "ij,kj", np.ones((2, 3)), np.ones((4, 3))).shape
    (2, 4)
    """
    if dtype is not None:
        raise NotTaken("dtype=")
    if not operands or not isinstance(operands[0], str):
        raise NotTaken("indices as lists")
    if len(operands) != 3:
        raise NotTaken(f"{len(operands) - 1} operands")
    if optimize not in (False, True, "greedy", "optimal"):
        raise NotTaken("optimize=")
    spec, a, b = operands
    _check_operands(is_array, a, b)
    if not spec.isascii():
        raise NotTaken("a spec of other than letters")
    infos = [describe(x, "operand") for x in (a, b)]
    try:
        found = subscripts(spec, tuple(info.shape for info in infos), tuple(info.strides for info in infos))
    except ValueError:
        raise NotTaken("a spec that does not fit") from None
    if not set(found.terms[0]) & set(found.terms[1]) - set(found.result):
        raise NotTaken("nothing is summed over")
    sizes = sizes_of(found.terms, [view.shape for view in found.views])
    return Product(contract, (spec, a, b), tuple(sizes[x] for x in found.result), a.dtype, math.prod(sizes.values()))


def gemm(is_array: Callable[[Any], bool], transa: Any, transb: Any, a: Any, b: Any, out: Any = None, alpha: Any = 1.0,
         beta: Any = 0.0) -> Product:
    """``cupy.cublas.gemm``: out := alpha op(a) op(b) + beta out. A new out is in Fortran's order.

    >>> gemm(lambda x: True, "T", 0, np.ones((4, 2)), np.ones((4, 3))).shape
    (2, 3)
    """
    _check_operands(is_array, a, b)
    if a.dtype.char not in GEMM_DTYPES or a.ndim != 2 or b.ndim != 2:
        raise NotTaken("operands that gemm refuses")
    named = []
    for trans in (transa, transb):
        known = trans if isinstance(trans, str) else CONSTANTS.get(trans) if isinstance(trans, int) else None
        if known not in ("N", "T", "H", "C") or trans == "C":              # cupy.cublas says H
            raise NotTaken("a trans that gemm refuses")
        named.append(known)
    for name, value in (("alpha", alpha), ("beta", beta)):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
            raise NotTaken(f"{name} is no real number on the host")
    M, K = a.shape if named[0] == "N" else a.shape[::-1]
    rows, N = b.shape if named[1] == "N" else b.shape[::-1]
    if K != rows:
        raise NotTaken("shapes that do not fit")
    out = _checked(is_array, out, (M, N), a, b)
    return Product(blas_gemm, (*named, a, b), (M, N), a.dtype, M * N * K, out, "F",
                   dict(alpha=float(alpha), beta=0.0 if out is None else float(beta)))


def _contraction(is_array: Callable[[Any], bool], a: Any, b: Any, of_a: tuple[int, ...], of_b: tuple[int, ...],
                 out: Any) -> Product:
    """The sum over pairs of dimensions; those of a that are left come first."""
    letters = string.ascii_letters
    if a.ndim + b.ndim > len(letters):
        raise NotTaken("too many dimensions")
    in_a = letters[:a.ndim]
    in_b = list(letters[a.ndim - len(of_b):][:b.ndim])
    free = iter(letters[a.ndim:])
    for n in range(b.ndim):
        in_b[n] = in_a[of_a[of_b.index(n)]] if n in of_b else next(free)
    if any(a.shape[n] != b.shape[m] for n, m in zip(of_a, of_b)):
        raise NotTaken("shapes that do not fit")
    left = [(label, extent) for n, (label, extent) in enumerate(zip(in_a, a.shape)) if n not in of_a]
    left += [(label, extent) for n, (label, extent) in enumerate(zip(in_b, b.shape)) if n not in of_b]
    shape = tuple(extent for _, extent in left)
    spec = f"{in_a},{''.join(in_b)}->{''.join(label for label, _ in left)}"
    work = math.prod(shape) * math.prod(a.shape[n] for n in of_a)
    return Product(contract, (spec, a, b), shape, a.dtype, work, _checked(is_array, out, shape, a, b))


def _without(keywords: dict[str, Any]) -> None:
    """CuPy's arguments of ufuncs: those with their defaults change nothing."""
    defaults = dict(axes=None, axis=None, keepdims=False, casting="same_kind", dtype=None, signature=None, order="K")
    for name, value in keywords.items():
        if name not in defaults or (value is not defaults[name] and value != defaults[name]):
            raise NotTaken(f"{name}=")


def _check_operands(is_array: Callable[[Any], bool], a: Any, b: Any) -> None:
    if not is_array(a) or not is_array(b):
        raise NotTaken("an operand that is no array on the current device")
    if a.ndim == 0 or b.ndim == 0:
        raise NotTaken("an operand of 0 dimensions")
    if a.dtype != b.dtype:
        raise NotTaken("operands of two dtypes")
    if a.dtype.char not in DTYPES:
        raise NotTaken(f"dtype {a.dtype}")
    if a.size == 0 or b.size == 0:
        raise NotTaken("an empty operand")


def _checked(is_array: Callable[[Any], bool], out: Any, shape: tuple[int, ...], a: Any, b: Any) -> Any:
    """``out``, if gemmkit can write it as CuPy does."""
    if out is None:
        return None
    if not is_array(out):
        raise NotTaken("an out that is no array on the current device")
    if out.shape != shape or out.dtype != a.dtype:
        raise NotTaken("an out of another shape or dtype")
    given = describe(out, "out")
    if overlaps_itself(given) or any(overlaps(given, describe(x, "operand")) for x in (a, b)):
        raise NotTaken("an out that shares memory")
    return out
