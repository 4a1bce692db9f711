"""The BLAS face: ``gemmEx`` and ``gemm`` of matrices and of stacks, in place, with run-time alpha and beta; ``syrk``,
``herk``, ``symm`` and ``trmm`` of those of which one half is in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gemmkit.epilogues import LinearCombination
from gemmkit.epilogues.elementwise import InMemory, Parts, factor
from gemmkit.functions.matmul import matmul
from gemmkit.functions.number_systems import Dual, real_operand
from gemmkit.kernels.config import Config
from gemmkit.lang.checks import check_dtype
from gemmkit.lang.records import conjugate
from gemmkit.layouts import ArrayLayout
from gemmkit.layouts.joined import InterleavedColumns
from gemmkit.layouts.matrices import Matrix, SymmetricMatrix, TriangularMatrix, arrays, transposed
from gemmkit.operators import Algebra, Operator, dual
from gemmkit.plans.problem import check_places, has_parts, layout_of, seen_stack
from gemmkit.runtime.arrays import ArrayInfo, describe, empty_like, overlaps_itself, shares_memory, strided
from gemmkit.runtime.device import target
from gemmkit.transforms import Map
from gemmkit.tuning.operators import new_dtype

__all__ = ["gemm", "gemmEx", "herk", "symm", "syrk", "trmm"]


def gemmEx(transa: str | int, transb: str | int, alpha: Any, a: Any, b: Any, beta: Any, c: Any, *,
           operator: Operator | None = None, conf: Config | None = None, precision: str | None = None,
           stream: Any = None) -> Any:
    """``C := alpha op(A) op(B) + beta C``, in place; returns c.

    Args:
        transa: "N" (as it is), "T" (transposed) or "C" (conjugate transposed; equal to "T" for real and dual numbers), in
            capital or small letters; or cuBLAS's constants 0, 1 and 2.
        transb: the same for B.
        alpha: a number (complex for a complex C, whole for an integer C, otherwise real), applied in the accumulator's
            precision. If C has numbers of an algebra, also one of these: a tuple or array of its parts, or a
            `gemmkit.functions.Dual` of shape (); it multiplies from the left. A 0-d array in the GPU's memory stays there,
            and the kernel loads it when it runs, without synchronisation (cuBLAS's pointer mode "device"); a host array is
            read at the call. If alpha is 0 on the host, the kernel does not read A and B; if it is 0 in the GPU's memory,
            their contents have no effect.
        a: op(A) is (M, K): an array, or a matrix with structure (such as `gemmkit.layouts.DiagonalMatrix(x)`).
        b: op(B) is (K, N), as a.
        beta: a number, as alpha. With beta = 0, C is not read: it may hold NaN.
        c: (M, N), any strides. The last two dimensions of each array are its matrices; dimensions before are a stack,
            computed in one launch; ``trans`` transposes each matrix. The stacks of a and b broadcast as in NumPy, and c has
            the full shape: (..., M, N).
        operator: an operator; None chooses one for the dtypes and sizes, with accumulators that hold what c holds: int8 into
            an int32 or float32 c is exact. With an `operators.Algebra`, arrays of more than two dimensions have a last axis,
            the parts of its numbers, after those of the matrices (unless they are complex).
        conf: a configuration for op(A), op(B) and c, whose epilogue gives way to alpha and beta.
        precision: "tf32", "fast", "ozaki" or "auto", as of `gemmkit.matmul`.
        stream: None is the current stream of a's library.

    Raises ValueError, TypeError and ConfigError as `gemmkit.matmul`, and ValueError for another ``trans`` character, for
    stacks that do not fit each other, and for a c that is read-only or overlaps itself, a or b. Nothing is written then.

    >>> import numpy as np, gemmkit
    >>> a, c = np.array([[1, 2], [3, 4]], np.float32), np.ones((2, 2), np.float32)
    >>> with gemmkit.emulate():
    ...     gemmEx("T", "N", 2.0, a, a, -1.0, c).tolist()
    [[19.0, 27.0], [27.0, 39.0]]
    >>> stack, c = np.stack([a, -a]), np.ones((2, 2, 2), np.float32)
    >>> with gemmkit.emulate():                             # two products with the same B
    ...     gemmEx("N", "N", 1.0, stack, a, 0.0, c).tolist()
    [[[7.0, 10.0], [15.0, 22.0]], [[-7.0, -10.0], [-15.0, -22.0]]]
    """
    transa, transb = _letter(transa, "transa"), _letter(transb, "transb")
    if isinstance(c, Dual):
        return _dual(transa, transb, alpha, a, b, beta, c, operator, conf, stream)
    return _combined((transa, transb), alpha, a, b, beta, c, None, operator, conf, precision, stream)


def _combined(trans: tuple[str, str], alpha: Any, a: Any, b: Any, beta: Any, c: Any, half: Half | None, operator: Any,
              conf: Config | None, precision: str | None, stream: Any) -> Any:
    """`gemmEx` of arrays that are not dual; of a symmetric C one ``half`` (None: C is whole)."""
    transa, transb = trans
    multiplies = operator if operator is not None else getattr(conf, "operator", None)      # another conf is refused later
    op_a, a_info = _operated(transa, a, "a", multiplies)
    op_b, b_info = _operated(transb, b, "b", multiplies)
    c_info = describe(c, "c")
    check_places({"a": a_info.info, "b": b_info.info, "c": c_info})
    layout = layout_of(c_info, "c", multiplies)
    seen = _numbers(c_info, layout, "c")
    alpha, beta = factor(alpha, "alpha", seen.dtype, c_info.device), factor(beta, "beta", seen.dtype, c_info.device)
    for name, x in (("alpha", alpha), ("beta", beta)):
        if isinstance(x, InMemory):
            check_places({"c": c_info, name: describe(x.array, name)})
    _check(_result((transa, transb), a_info, b_info), a_info, b_info, seen)
    held: Any = c if seen is c_info else seen if c_info.device >= 0 else layout.host_view(c)
    epilogue = LinearCombination(alpha, beta, held, layout)
    out = c if half is None else half.of(c)
    if alpha.is_not_zero == 0 if isinstance(alpha, Parts) else not isinstance(alpha, InMemory) and alpha == 0:
        kept: dict[str, Any] = {"operator": multiplies} if isinstance(multiplies, Algebra) else {}
        op_a, op_b = _without_k(c, c_info, has_parts(c_info, multiplies))
        matmul(op_a, op_b, out=out, epilogue=epilogue, stream=stream, **kept)
        return c
    more: dict[str, Any] = {f"transform_global_to_shared_{name}": CONJUGATE
                            for name, trans, info in (("a", transa, a_info), ("b", transb, b_info))
                            if trans == "C" and info.dtype.kind in "cV"}
    if operator is not None:
        more["operator"] = operator
    if precision is not None:
        more["precision"] = precision
    matmul(op_a, op_b, conf=conf, out=out, epilogue=epilogue, stream=stream, **more)
    return c


def _dual(transa: str, transb: str, alpha: Any, a: Any, b: Any, beta: Any, c: Dual, operator: Any, conf: Any,
          stream: Any) -> Dual:
    """`gemmEx` of dual arrays: of their parts. Real ones among A and B count as constants."""
    trans, given = [transa, transb], [a, b]
    for n, (name, x) in enumerate((("a", a), ("b", b))):
        if isinstance(x, Dual):
            if x.count != c.count:
                raise ValueError(f"{name} has {x.count} tangents and c {c.count}; all need as many")
            given[n] = x.parts
        elif conf is not None and not isinstance(x, Matrix):
            given[n] = Dual.constant(x, c.count).parts                    # a conf's layouts are those of dual numbers
        elif not isinstance(x, Matrix) and len(describe(x, name).shape) > 2:
            given[n], trans[n] = real_operand(x if trans[n] == "N" else transposed(x), name), "N"
        else:
            given[n] = real_operand(x, name)
    if operator is None and conf is None:
        operator = dual(c.count)
    gemmEx(trans[0], trans[1], alpha, given[0], given[1], beta, c.parts, operator=operator, conf=conf, stream=stream)
    return c


def gemm(transa: str | int, transb: str | int, a: Any, b: Any, out: Any = None, alpha: Any = 1.0, beta: Any = 0.0) -> Any:
    """``out := alpha op(a) op(b) + beta out``, with the signature of ``cupy.cublas.gemm``.

    Args:
        transa: "N", "T", "C" or "H" (CuPy's name for "C"), in capital or small letters, or cuBLAS's constants.
        transb: the same for b.
        a: op(a) is (M, K), or a stack, as `gemmEx` takes it.
        b: op(b) is (K, N), or a stack.
        out: (M, N), or a stack; None returns a new array, for which beta does nothing.
        alpha: a number, as `gemmEx` takes it.
        beta: a number, as alpha.

    Raises:
        ValueError, TypeError, ConfigError: as `gemmEx`.

    >>> import numpy as np, gemmkit
    >>> a = np.array([[1, 2], [3, 4]], np.float32)
    >>> with gemmkit.emulate():
    ...     gemm("N", "T", a, a).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    transa, transb = (_letter("C" if isinstance(t, str) and t in ("H", "h") else t, name)
                      for name, t in (("transa", transa), ("transb", transb)))
    if out is None:
        a_info, b_info = _operated(transa, a, "a")[1], _operated(transb, b, "b")[1]
        check_places({"a": a_info.info, "b": b_info.info})
        for name, dtype in (("a", a_info.dtype), ("b", b_info.dtype)):
            check_dtype(dtype, name)
        shape = _result((transa, transb), a_info, b_info)
        where = next(x.info.device for x in (a_info, b_info) if x.info is not None)
        out, beta = empty_like(arrays(a, b, ())[0], shape, new_dtype(a_info.dtype, b_info.dtype, None, target(where))), 0.0
    return gemmEx(transa, transb, alpha, a, b, beta, out)


# --------------------------------------------------------------------------------------------------
# Results and operands of which one half is in memory. Each comes down to `gemmEx`, by the layouts of such matrices.

class Half(NamedTuple):
    """A half of C that is computed."""

    name: str
    hermitian: bool

    def of(self, c: Any) -> SymmetricMatrix:
        return SymmetricMatrix(c, self.name, self.hermitian)


def syrk(uplo: str | int, trans: str | int, alpha: Any, a: Any, beta: Any, c: Any, *, operator: Operator | None = None,
         conf: Config | None = None, precision: str | None = None, stream: Any = None) -> Any:
    """One half of ``C := alpha op(A) op(A)^T + beta C``, in place, for half of a product's work. Returns c.

    Args:
        uplo: "L" or "U", the half of C (with the diagonal) that is read and written, in capital or small letters; or
            cuBLAS's constants 0 (lower) and 1. The kernel does not write the other half, and what that holds does not
            matter. For both halves: `gemmkit.matmul` with ``out=layouts.SymmetricMatrix(c, "both")``.
        trans: "N": op(A) is a; "T": its transpose; or cuBLAS's constants 0 and 1.
        alpha: a number, as `gemmEx` takes it.
        a: (N, K), with "T" (K, N); or a stack.
        beta: a number, as alpha.
        c: (N, N), or a stack.
        operator: as of `gemmEx`.
        conf: as of `gemmEx`.
        precision: as of `gemmEx`.
        stream: as of `gemmEx`.

    Raises:
        ValueError: another ``uplo`` or ``trans``; and as `gemmEx`.
        TypeError, ConfigError: as `gemmEx`; TypeError for dual arrays.

    >>> import numpy as np, gemmkit
    >>> a, c = np.float32([[1, 2], [3, 4]]), np.ones((2, 2), np.float32)
    >>> with gemmkit.emulate():
    ...     syrk("L", "N", 2.0, a, 1.0, c).tolist()
    [[11.0, 1.0], [23.0, 51.0]]
    """
    turned = ("N", "T") if _letter(trans, "trans", "NT") == "N" else ("T", "N")
    half = Half(_half(uplo), False)
    return _combined(turned, alpha, _not_dual(a, "a"), a, beta, _not_dual(c, "c"), half, operator, conf, precision, stream)


def herk(uplo: str | int, trans: str | int, alpha: float, a: Any, beta: float, c: Any, *, operator: Operator | None = None,
         conf: Config | None = None, stream: Any = None) -> Any:
    """One half of ``C := alpha op(A) op(A)^H + beta C``, in place; returns c.

    As `syrk`, with the conjugate transpose. The diagonal of C is written without imaginary parts, which count as zero where
    it is read. Of real arrays it is `syrk`.

    Args:
        uplo: "L" or "U", the half of C that is read and written, or cuBLAS's 0 (lower) and 1.
        trans: "N" for ``A A^H``, "C" for ``A^H A``; or cuBLAS's 0 and 2.
        alpha: a real number.
        a: (M, K), or (K, M) with "C".
        beta: a real number.
        c: (M, M), which is written.
        operator: as of `gemmEx`.
        conf: as of `gemmEx`.
        stream: as of `gemmEx`.

    Raises what `syrk` raises, and TypeError for a complex alpha or beta.

    >>> import numpy as np, gemmkit
    >>> a, c = np.complex64([[1j, 2]]), np.zeros((1, 1), np.complex64)
    >>> with gemmkit.emulate():
    ...     herk("U", "N", 1.0, a, 0.0, c).tolist()
    [[(5+0j)]]
    """
    for name, x in (("alpha", alpha), ("beta", beta)):
        if isinstance(x, (complex, np.complexfloating)):
            raise TypeError(f"{name}={x!r}: a real number is needed; no other multiple of a Hermitian matrix is Hermitian")
    turned = ("N", "C") if _letter(trans, "trans", "NC") == "N" else ("C", "N")
    half = Half(_half(uplo), True)
    return _combined(turned, alpha, _not_dual(a, "a"), a, beta, _not_dual(c, "c"), half, operator, conf, None, stream)


def symm(side: str | int, uplo: str | int, alpha: Any, a: Any, b: Any, beta: Any, c: Any, *, hermitian: bool = False,
         operator: Operator | None = None, conf: Config | None = None, stream: Any = None) -> Any:
    """``C := alpha A B + beta C`` with a symmetric A, in place; returns c. With ``side`` "R" it is ``alpha B A + beta C``.

    Args:
        side: "L" or "R", the side of B on which A stands; or cuBLAS's constants 0 (left) and 1.
        uplo: "L" or "U", the half of A that is read, or cuBLAS's 0 (lower) and 1. The other half is never read.
        alpha: a number, as `gemmEx` takes it.
        a: (M, M), with "R" (N, N).
        b: (M, N).
        beta: a number, as alpha.
        c: (M, N).
        hermitian: whether A is Hermitian: BLAS's hemm, which takes imaginary parts of the diagonal for zeros.
        operator: as of `gemmEx`.
        conf: as of `gemmEx`.
        stream: as of `gemmEx`.

    Raises what `gemmEx` raises, and ValueError for another ``side`` or ``uplo``.

    >>> import numpy as np, gemmkit
    >>> a, c = np.float32([[1, np.nan], [2, 3]]), np.zeros((2, 2), np.float32)
    >>> with gemmkit.emulate():
    ...     symm("L", "L", 1.0, a, np.eye(2, dtype=np.float32), 0.0, c).tolist()
    [[1.0, 2.0], [2.0, 3.0]]
    """
    left = SymmetricMatrix(_plain_numbers(a, "a"), _half(uplo), hermitian)
    first, second = (left, b) if _letter(side, "side", "LR") == "L" else (b, left)
    return gemmEx("N", "N", alpha, first, second, beta, c, operator=operator, conf=conf, stream=stream)


def trmm(side: str | int, uplo: str | int, transa: str | int, diag: str | int, alpha: Any, a: Any, b: Any, c: Any, *,
         operator: Operator | None = None, conf: Config | None = None, stream: Any = None) -> Any:
    """``C := alpha op(A) B`` with a triangular A, for half of a product's work; returns c. With ``side`` "R" it is
    ``alpha B op(A)``. C is another array than B, as of cuBLAS.

    Args:
        side: "L" or "R", the side of B on which A stands; or cuBLAS's constants 0 (left) and 1.
        uplo: "L" or "U", the half of A that is read, or cuBLAS's 0 (lower) and 1. What the other half holds does not matter.
        transa: "N", "T" or "C", as of `gemmEx`.
        diag: "N", or "U": the diagonal of A is 1, whatever the array has there; or cuBLAS's 0 and 1.
        alpha: a number, as `gemmEx` takes it.
        a: (M, M), with "R" (N, N).
        b: (M, N).
        c: (M, N).
        operator: as of `gemmEx`.
        conf: as of `gemmEx`.
        stream: as of `gemmEx`.

    Raises what `gemmEx` raises, and ValueError for another ``side``, ``uplo`` or ``diag``.

    >>> import numpy as np, gemmkit
    >>> a, c = np.float32([[1, np.nan], [2, 3]]), np.zeros((2, 2), np.float32)
    >>> with gemmkit.emulate():
    ...     trmm("L", "L", "T", "U", 1.0, a, np.eye(2, dtype=np.float32), c).tolist()
    [[1.0, 2.0], [0.0, 1.0]]
    """
    left = TriangularMatrix(_plain_numbers(a, "a"), _half(uplo), _letter(diag, "diag", "NU") == "U")
    op = _letter(transa, "transa")
    if _letter(side, "side", "LR") == "L":
        return gemmEx(op, "N", alpha, left, b, 0.0, c, operator=operator, conf=conf, stream=stream)
    return gemmEx("N", op, alpha, b, left, 0.0, c, operator=operator, conf=conf, stream=stream)


def _half(uplo: Any) -> str:
    return "lower" if _letter(uplo, "uplo", "LU") == "L" else "upper"


def _not_dual(x: Any, name: str) -> Any:
    if isinstance(x, (Dual, Matrix)):
        raise TypeError(f"{name} is a {type(x).__name__}; an array is needed (gemmEx takes dual arrays and matrices with "
                        "structure)")
    return x


def _plain_numbers(x: object, name: str) -> Any:
    """What is an array of numbers, for errors that name the argument."""
    check_dtype(describe(_not_dual(x, name), name).dtype, name)
    return x


class _Operand(NamedTuple):
    """What is asked of A and B, (..., rows, columns): ``info`` is of the array behind it, if there is one."""

    shape: tuple[int, ...]
    dtype: np.dtype
    info: ArrayInfo | None


def _letter(given: Any, argument: str, letters: str = "NTC") -> str:
    """One of these letters, also of small ones, which BLAS takes, and of cuBLAS's numbers (CUBLAS_OP_N, CUBLAS_OP_T and
    CUBLAS_OP_C are 0, 1 and 2). Raises ValueError for another."""
    numbers = dict(enumerate("NTC" if argument.startswith("trans") else "LU" if argument == "uplo" else letters))
    is_number = isinstance(given, (int, np.integer)) and not isinstance(given, bool)
    found = numbers.get(int(given)) if is_number else given.upper() if isinstance(given, str) else None
    if found is None or found not in tuple(letters):
        *first, last = [f'"{letter}"' for letter in letters]
        raise ValueError(f"{argument} is {given!r}; {', '.join(first)} or {last} is needed")
    return found


def _operated(trans: str, x: Any, name: str, operator: Any = None) -> tuple[Any, _Operand]:
    """op(x) as a view (nothing is copied), and x described."""
    if isinstance(x, Dual):
        raise TypeError(f"{name} is a dual array, and the array of the result is none; give a Dual")
    if isinstance(x, InterleavedColumns):
        raise TypeError(f"{name} is an InterleavedColumns, whose products only a Fold can take; give it to matmul, with "
                        "epilogue=epilogues.Fold(f), or give a Concat")
    if isinstance(x, Matrix):
        about = _Operand(x.shape, x.dtype, None if x.array is None else describe(x.array, name))
        return (x if trans == "N" else x.T), about
    info = seen = describe(x, name)
    if len(info.shape) < 2:
        raise ValueError(f"{name} has {len(info.shape)} dimensions; a matrix of 2 is needed, or a stack of them")
    if in_parts := has_parts(info, operator):
        seen = _numbers(info, layout_of(info, name, operator), name)
    return x if trans == "N" else transposed(x, int(in_parts)), _Operand(seen.shape, seen.dtype, info)


def _numbers(info: ArrayInfo, layout: ArrayLayout, name: str) -> ArrayInfo:
    """An array, described as one of numbers: those whose parts lie along a last axis count as one element each."""
    try:
        return seen_stack(info, layout)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _result(trans: tuple[str, str], a: _Operand, b: _Operand) -> tuple[int, ...]:
    """The shape of op(A) op(B). Raises ValueError, in BLAS's terms, where they do not fit each other."""
    M, K = a.shape[-2:] if trans[0] == "N" else a.shape[:-3:-1]
    inner, N = b.shape[-2:] if trans[1] == "N" else b.shape[:-3:-1]
    if K != inner:
        raise ValueError(f"a has shape {a.shape} and b has shape {b.shape}: with transa={trans[0]!r} and "
                         f"transb={trans[1]!r} op(a) has {K} columns and op(b) {inner} rows; both must be K")
    stack, other = a.shape[:-2], b.shape[:-2]
    try:
        return (*(stack if stack == other else np.broadcast_shapes(stack, other)), M, N)
    except ValueError:
        raise ValueError(f"a has shape {a.shape} and b has shape {b.shape}: the stacks {stack} and {other} cannot be "
                         "broadcast together; along each dimension both need as many matrices, or one of them 1") from None


def _check(shape: tuple[int, ...], a: _Operand, b: _Operand, c: ArrayInfo) -> None:
    """Raise, in BLAS's terms, where c is not of the result's shape and kind, or cannot be written."""
    if c.shape != shape:
        full = "" if len(shape) == 2 else ", and c, which is written, has a matrix for each product"
        raise ValueError(f"c has shape {c.shape}; op(a) op(b) is {shape}{full}")
    for name, other in (("a", a), ("b", b)):
        if other.dtype.kind == "c" and c.dtype.kind != "c":
            raise TypeError(f"c has dtype {c.dtype} and {name} {other.dtype}: the result is complex; give a complex c")
    if c.readonly:
        raise ValueError("c is read-only, and the result is written to it; give a writable array")
    if overlaps_itself(c):
        raise ValueError(f"c has strides {c.strides}: several of its elements share memory, but the kernel writes each; "
                         "give a c whose elements do not overlap")
    for name, other in (("a", a), ("b", b)):
        if other.info is not None and shares_memory(c, other.info):
            raise ValueError(f"c overlaps {name} in memory; every thread block reads {name} while others write c")


def _without_k(c: Any, info: ArrayInfo, in_parts: bool) -> tuple[Any, Any]:
    """Operands of no elements whose product has c's shape."""
    end = len(info.shape) - in_parts
    a, b = (strided(c, info, (*info.shape[:at], 0, *info.shape[at + 1:]), info.strides) for at in (end - 1, end - 2))
    return a, b


def _conjugate(x: Any) -> Any:
    return conjugate(x)


CONJUGATE = Map(_conjugate)
