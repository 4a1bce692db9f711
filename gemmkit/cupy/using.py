"""`use`: CuPy's functions with gemmkit behind them, and what became of each call."""

from __future__ import annotations

import functools
import math
import string
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from gemmkit.blas import gemm as blas_gemm
from gemmkit.functions.einsum import einsum as contract
from gemmkit.functions.einsum import sizes_of, subscripts
from gemmkit.functions.matmul import matmul as multiply
from gemmkit.lang.errors import ConfigError
from gemmkit.runtime.arrays import describe, overlaps, overlaps_itself

# --------------------------------------------------------------------------------------------------
# Which of CuPy's calls gemmkit computes, with CuPy's result: shape, dtype and order in memory.
#
# Each function takes the arguments of CuPy's and returns a `CupyCall`, or raises `NotTaken` with the reason. Arrays are
# asked for ``shape``, ``dtype`` and their description alone, so NumPy's do in tests.

DTYPES = "?bBhHiIlLqQefdFD"            # of which gemmkit's product of two has CuPy's dtype
GEMM_DTYPES = "fdFD"                   # cupy.cublas.gemm's own
CONSTANTS = {0: "N", 1: "T", 2: "C"}   # cublasOperation_t


class NotTaken(Exception):
    """A call that is left to CuPy, with the reason."""


@dataclass(frozen=True)
class CupyCall:
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


def matmul(is_array: Callable[[Any], bool], a: Any, b: Any, out: Any = None, **keywords: object) -> CupyCall:
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
    return CupyCall(multiply, (a, b), shape, a.dtype, math.prod(shape) * a.shape[-1], _checked(is_array, out, shape, a, b))


def dot(is_array: Callable[[Any], bool], a: Any, b: Any, out: Any = None) -> CupyCall:
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


def tensordot(is_array: Callable[[Any], bool], a: Any, b: Any, axes: Any = 2) -> CupyCall:
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


def einsum(is_array: Callable[[Any], bool], *operands: Any, dtype: Any = None, optimize: Any = False) -> CupyCall:
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
    return CupyCall(contract, (spec, a, b), tuple(sizes[x] for x in found.result), a.dtype, math.prod(sizes.values()))


def gemm(is_array: Callable[[Any], bool], transa: object, transb: object, a: Any, b: Any, out: Any = None, alpha: Any = 1.0,
         beta: Any = 0.0) -> CupyCall:
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
            raise NotTaken(f"{name} is not a real number on the host")
    M, K = a.shape if named[0] == "N" else a.shape[::-1]
    rows, N = b.shape if named[1] == "N" else b.shape[::-1]
    if K != rows:
        raise NotTaken("shapes that do not fit")
    out = _checked(is_array, out, (M, N), a, b)
    return CupyCall(blas_gemm, (*named, a, b), (M, N), a.dtype, M * N * K, out, "F",
                    dict(alpha=float(alpha), beta=0.0 if out is None else float(beta)))


def _contraction(is_array: Callable[[Any], bool], a: Any, b: Any, of_a: tuple[int, ...], of_b: tuple[int, ...],
                 out: object) -> CupyCall:
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
    return CupyCall(contract, (spec, a, b), shape, a.dtype, work, _checked(is_array, out, shape, a, b))


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


def _checked(is_array: Callable[[Any], bool], out: Any, shape: tuple[int, ...], a: Any, b: object) -> Any:
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


# Where CuPy keeps each function: its own code calls some of them by these names, too.
PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "matmul": (("cupy", "matmul"), ("cupy.linalg._product", "matmul")),
    "dot": (("cupy", "dot"), ("cupy.linalg._product", "dot")),
    "tensordot": (("cupy", "tensordot"), ("cupy.linalg._product", "tensordot")),
    "einsum": (("cupy", "einsum"), ("cupy.linalg._einsum", "einsum")),
    "gemm": (("cupy.cublas", "gemm"),),
}
# Multiply-adds: a product of 64 x 64 x 64. Of fewer the launch is most of the time, CuPy's as gemmkit's; but CuPy's kernels
# are there, and gemmkit's are compiled for seconds, one for each dtype, order and alignment.
LEAST = 2**18
METHODS = {"__matmul__": "matmul", "dot": "dot"}          # of cupy.ndarray, whose base class in Cython has CuPy's

_lock = threading.Lock()
_active: list[Using] = []
_restore: list[Callable[[], None]] = []
_local = threading.local()


class Using:
    """What became of the calls since `use`; a context manager, at whose end CuPy's functions are its own again.

    ``calls`` counts the calls that gemmkit computed, by function; ``left`` counts those that CuPy computed, by function and
    reason. gemmkit computes products of at least ``least`` multiply-adds.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.calls: Counter[str] = Counter()
        self.left: Counter[tuple[str, str]] = Counter()

    def stop(self) -> None:
        """Leave CuPy its functions again, unless another `use` still holds. To stop twice does nothing."""
        with _lock:
            if self in _active:
                _active.remove(self)
                if not _active:
                    while _restore:
                        _restore.pop()()

    def __enter__(self) -> Using:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        left = ", ".join(f"{name}: {reason} ({count})" for (name, reason), count in self.left.most_common())
        return f"<gemmkit computed {sum(self.calls.values())} calls, CuPy {sum(self.left.values())}{left and ': ' + left}>"


def use(*, least: int = LEAST) -> Using:
    """Have gemmkit compute CuPy's products, in all threads of this process, where it can; CuPy computes the others.

    It replaces ``cupy.matmul``, ``cupy.dot``, ``cupy.einsum``, ``cupy.tensordot``, ``cupy.cublas.gemm``, and the operator
    ``@`` and the method ``dot`` of `cupy.ndarray`. Results have CuPy's shape, dtype and order in memory; gemmkit adds in
    another order. The first call of a kind compiles a kernel, which stays on disk.

        using = gemmkit.cupy.use()               # from here on, until using.stop()
        with gemmkit.cupy.use() as using:        # or within
            a @ b

    Args:
        least: the number of multiply-adds (M N K, times the products of a stack) from which gemmkit computes a product. CuPy
            computes smaller ones, which are not worth compiling a kernel. 0 leaves none to CuPy.

    Returns:
        a `Using`, that counts calls. Calls of `use` nest: each has its own counts, the last one's ``least`` holds, and
        CuPy's functions are restored when the last one ends.

    Raises:
        ImportError: without CuPy.
        TypeError, ValueError: a ``least`` that is no number of multiply-adds.
    """
    if isinstance(least, bool) or not isinstance(least, int):
        raise TypeError(f"least={least!r}: a number of multiply-adds is needed, an int")
    if least < 0:
        raise ValueError(f"least={least}: a number of multiply-adds is needed, 0 or more")
    cupy = import_module("cupy")
    made = Using(least)
    with _lock:
        if not _active:
            _install(cupy)
        _active.append(made)
    return made


def _install(cupy: Any) -> None:
    originals = {}
    for name, places in PLACES.items():
        for module, attribute in places:
            try:
                owner = import_module(module)
            except ImportError:                            # cupy.cublas, where there is no cuBLAS: it cannot be called
                continue
            original = getattr(owner, attribute)
            if name not in originals:
                originals[name] = original, _behind(cupy, name, original)
            if original is originals[name][0]:
                setattr(owner, attribute, originals[name][1])
                _restore.append(functools.partial(setattr, owner, attribute, original))
    for attribute, name in METHODS.items():
        original = getattr(cupy.ndarray, attribute)
        had = attribute in vars(cupy.ndarray)
        setattr(cupy.ndarray, attribute, _method(cupy, name, original))
        _restore.append(functools.partial(setattr, cupy.ndarray, attribute, original) if had
                        else functools.partial(delattr, cupy.ndarray, attribute))


def _behind(cupy: object, name: str, original: Any) -> Any:
    """CuPy's function with gemmkit's before it."""
    chosen = globals()[name]

    def function(*arguments: Any, **keywords: Any) -> Any:
        taken, out = _taken(cupy, name, chosen, arguments, keywords)
        if taken:
            return out
        if name != "dot":
            return original(*arguments, **keywords)
        _local.is_left = True                              # cupy.dot calls the method, which is not asked again
        try:
            return original(*arguments, **keywords)
        finally:
            _local.is_left = False

    functools.update_wrapper(function, original, assigned=("__name__", "__doc__"), updated=())
    return function


def _method(cupy: object, name: str, original: Any) -> Any:
    chosen = globals()[name]

    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not getattr(_local, "is_left", False):
            taken, out = _taken(cupy, name, chosen, (self, *arguments), keywords)
            if taken:
                return out
        return original(self, *arguments, **keywords)

    functools.update_wrapper(method, original, assigned=("__name__", "__doc__"), updated=())
    return method


def _taken(cupy: Any, name: str, chosen: Callable[..., Any], arguments: tuple[Any, ...],
           keywords: dict[str, Any]) -> tuple[bool, Any]:
    """Whether gemmkit computed a call, and its result. What it refuses it refuses before anything is launched."""
    device = cupy.cuda.runtime.getDevice()

    def is_array(x: Any) -> bool:
        return type(x) is cupy.ndarray and x.device.id == device

    try:
        product = chosen(is_array, *arguments, **keywords)
        least = next((using.least for using in reversed(_active)), 0)      # (none: another thread has just ended the last)
        if product.work < least:
            raise NotTaken(f"a product of fewer than {least} multiply-adds")
        out = product(cupy.empty)
    except (NotTaken, ConfigError, TypeError, ValueError) as refused:
        reason = str(refused) if isinstance(refused, NotTaken) else f"{type(refused).__name__}: {refused}"
        with _lock:
            for using in _active:
                using.left[name, reason] += 1
        return False, None
    with _lock:
        for using in _active:
            using.calls[name] += 1
    return True, out
