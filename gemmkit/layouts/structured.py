"""Matrices with structure: diagonal, triangular and symmetric ones, and functions of the row and the column.

Each takes from memory what matters and nothing else (the other half of a triangular or symmetric matrix may hold
anything, NaN too), and declares by ``k_range`` which part of K matters to given rows (of A) or columns
(of B), so that the blocks beyond are neither loaded nor multiplied: a diagonal product is O(N^2) work, a triangular
one half the work of a dense one.

Where there is no element there is ``nothing``: 0, or for an operator other than (+, *) its identity (``inf`` for
min-plus). A skipped block contributes the operator's identity; both are the same only if ``nothing`` says so. Blocks are
not skipped where a transform acts on the operand: it might make something of nothing.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from gemmkit.components import with_fields
from gemmkit.lang.aggregates import convert, convert_all
from gemmkit.lang.checks import check_flag, function_given, required, worded
from gemmkit.lang.component_products import ProblemShape, StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, Numeric, View
from gemmkit.lang.numba_hooks import TypingError, atom, signature, types
from gemmkit.lang.records import conjugate
from gemmkit.lang.registers import apply, each
from gemmkit.lang.scalars import DTypeType, IndexType, WeakFloat64Type, WeakFloatLiteral, WeakIntLiteral
from gemmkit.layouts.base import ArrayLayout, GlobalLayout, ResultLayout, load_elements, store_elements
from gemmkit.layouts.plain import Plain
from gemmkit.runtime.arrays import ArrayInfo, is_array
from gemmkit.tiling import Tile

HALVES = "lower", "upper"
MOST = 4                               # run-time arguments of `Generated`


@dataclass(frozen=True)
class Structured(GlobalLayout):
    """What matrices with structure have in common: their place among the operands, which decides what is skipped."""

    nothing: float = 0
    operand: str = "a"                  # set by the configuration that the layout is in
    skips: bool = True                  # likewise

    def as_operand(self, name: str, transformed: bool) -> GlobalLayout:
        if (self.operand, self.skips) == (name, not transformed):
            return self
        return with_fields(self, dict(operand=name, skips=not transformed))


@dataclass(frozen=True)
class Diagonal(Structured):
    """A diagonal matrix as the 1-D array of its diagonal, as A, B or both; it is its own transpose.

    >>> import numpy as np, gemmkit as gk
    >>> with gk.emulate():
    ...     gk.matmul(np.float32([2, 3]), np.ones((2, 3), np.float32), global_a_layout=Diagonal("float32")).tolist()
    [[2.0, 2.0, 2.0], [3.0, 3.0, 3.0]]
    """

    array_ndim = 1

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        here = data[i]                             # one load for all of a row, and no branch
        return here if i == j else convert(self.dtype, self.nothing)

    def k_range(self, begin: int, end: int, shape: StackShape) -> tuple[int, int]:
        return (begin, min(end, shape.K)) if self.skips else (0, shape.K)

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return (array.shape[0],) * 2 if len(array.shape) == 1 else (None, None)

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        if rows != columns:
            raise ValueError(f"{name} is {rows} x {columns}; a diagonal matrix is square")
        _check_array(self, array, (rows,), name, f"the diagonal of a {rows} x {rows} matrix has shape ({rows},)")


@dataclass(frozen=True)
class _Half(Structured):
    """A matrix of which one half (with the diagonal) is stored in a 2-D array of the matrix's shape."""

    layout: Plain = None                # type: ignore[assignment]  # `_set` gives one
    half: str = "lower"

    array_ndim = 2
    halves: ClassVar[tuple[str, ...]] = HALVES

    def _set(self, **fields: Any) -> None:
        layout, half = fields["layout"], fields["half"]
        kind = type(self).__name__
        if not isinstance(layout, Plain):
            raise TypeError(f"{kind}(layout={layout!r}): the RowMajor or ColMajor layout of the array is needed")
        if not isinstance(half, str) or half not in self.halves:
            *others, last = (f'"{name}"' for name in self.halves)
            raise ValueError(f"{kind}(half={half!r}): {', '.join(others)} or {last} is needed")
        for name, value in {"dtype": layout.dtype, "nothing": 0, "operand": "a", "skips": True, **fields}.items():
            object.__setattr__(self, name, value)

    @property
    def is_lower(self) -> bool:
        return self.half == "lower"

    @property
    def vector_axis(self) -> int | None:
        return self.layout.vector_axis

    def is_stored(self, i: int, j: int) -> bool:
        return i >= j if self.is_lower else i <= j

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return (array.shape[0], array.shape[1]) if len(array.shape) == 2 else (None, None)

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        _check_array(self, array, (rows, columns), name, f"({rows}, {columns}) is needed")


@dataclass(frozen=True)
class Triangular(_Half):
    """A triangular matrix: the lower or upper half of an array, the diagonal included; the rest may hold anything.

    With ``unit`` the diagonal is 1, whatever the array contains there. The transpose of a lower triangular array ``x`` is
    ``x.T`` with the upper half. The matrix may be rectangular (a trapezoid).

    >>> from gemmkit.layouts import RowMajor
    >>> Triangular(RowMajor("float16"), "upper")
    Triangular(RowMajor('float16'), 'upper')
    """

    unit: bool = False

    def __init__(self, layout: Plain, half: str = "lower", unit: bool = False, nothing: float = 0):
        check_flag(unit, "Triangular", "unit")
        self._set(layout=layout, half=half, unit=unit, nothing=nothing)

    def __repr__(self) -> str:
        more = ("" if not self.unit else ", unit=True") + ("" if self.nothing == 0 else f", nothing={self.nothing!r}")
        return f"Triangular({self.layout!r}, {self.half!r}{more})"

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        return self.of_stored(convert(self.dtype, self.layout.element(data, i, j, shape)), i, j)

    @property
    def stored(self) -> ArrayLayout | None:
        return self.layout if self.layout.is_plain else None

    def is_as_stored(self, i: int, j: int, rows: int, columns: int) -> bool:
        """Whether all of a block lies within the half, and with ``unit`` off the diagonal."""
        if self.is_lower:
            return i >= j + columns - 1 + self.strictness
        return i + rows - 1 + self.strictness <= j

    @property
    def strictness(self) -> int:
        return 1 if self.unit else 0

    def load(self, data: View, tile: Tile, shape: StackShape) -> Elements:
        # Of a tile on the diagonal all is loaded, and what is not of the matrix is dropped: cheaper than a branch for each.
        return apply(lambda value, n: self.of_stored(value, tile.index[0] + n % tile.size[0],
                                                     tile.index[1] + n // tile.size[0]),
                     convert_all(self.dtype, self.layout.load(data, tile, shape)))

    def of_stored(self, value: Numeric, i: int, j: int) -> Any:
        """The matrix's element where the array has ``value``."""
        value = value if self.is_stored(i, j) else convert(self.dtype, self.nothing)
        return (convert(self.dtype, 1) if i == j else value) if self.unit else value

    @property
    def starts_at_zero(self) -> bool:
        """Whether the range of K is from 0 to the last row or column, rather than from the first to K."""
        return self.is_lower == (self.operand == "a")

    def k_range(self, begin: int, end: int, shape: ProblemShape) -> tuple[int, int]:
        if not self.skips:
            return 0, shape.K
        return (0, min(end, shape.K)) if self.starts_at_zero else (begin, shape.K)


@dataclass(frozen=True)
class Symmetric(_Half, ResultLayout):
    """A symmetric matrix of which the lower or upper half (with the diagonal) of an array is read, the rest never.

    It is its own transpose. Every element matters to a product, so no work is skipped; what is halved is the data.

    As the layout of D it halves the work: tiles on the other side of the diagonal are not computed, and elements there are
    neither stored nor asked for of an epilogue. The rest of the array keeps what it holds. With the half "both" the lower
    half is computed, and each element is stored twice, at (i, j) and at (j, i). A layout of "both" is for D alone.

    With ``hermitian`` an element is stored at (j, i) as its conjugate, and the diagonal without an imaginary part. An
    operand's diagonal is read without one, as BLAS's hemm reads it.

    >>> from gemmkit.layouts import ColMajor
    >>> Symmetric(ColMajor("float32"))
    Symmetric(ColMajor('float32'), 'lower')
    """

    hermitian: bool = False

    halves = (*HALVES, "both")
    is_half = True

    def __init__(self, layout: Plain, half: str = "lower", hermitian: bool = False):
        check_flag(hermitian, "Symmetric", "hermitian")
        if hermitian and layout.dtype.names is not None:
            raise TypeError(f"Symmetric(hermitian=True): the elements are {layout.dtype}; complex numbers are needed")
        self._set(layout=layout, half=half, hermitian=hermitian)

    def __repr__(self) -> str:
        return f"Symmetric({self.layout!r}, {self.half!r}{', hermitian=True' if self.hermitian else ''})"

    @property
    def is_lower(self) -> bool:
        return self.half != "upper"

    @property
    def is_conjugated(self) -> bool:
        return self.hermitian and self.dtype.kind == "c"

    @property
    def is_mirrored(self) -> bool:                         # type: ignore[override]
        """Whether D is stored in both halves."""
        return self.half == "both"

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        low, high = min(i, j), max(i, j)
        found = self.layout.element(data, high, low, shape) if self.is_lower else self.layout.element(data, low, high, shape)
        if self.is_conjugated:
            found = self.on_diagonal(found) if i == j else found
            return found if self.is_stored(i, j) else conjugate(found)
        return found

    def load(self, data: View, tile: Tile, shape: StackShape) -> Elements:
        if tile.size[self.layout.axis] == tile.count:      # along the contiguous axis: at once where all of it is stored
            if self.holds(tile.index[0], tile.index[1], tile.size[0], tile.size[1], 1 if self.is_conjugated else 0):
                return convert_all(self.dtype, self.layout.load(data, tile, shape))
        return load_elements(self, data, tile, shape)

    def holds(self, i: int, j: int, rows: int, columns: int, strictly: int) -> bool:
        """Whether all of a block lies within the half, with ``strictly`` 1 off the diagonal."""
        if self.is_lower:
            return i >= j + columns - 1 + strictly
        return i + rows - 1 + strictly <= j

    # -- as D -----------------------------------------------------------------------------------------------------------

    def store_element(self, data: View, i: int, j: int, value: Numeric, shape: StackShape) -> None:
        if self.is_stored(i, j):
            self.layout.store_element(data, i, j, self.on_diagonal(value) if i == j else convert(self.dtype, value), shape)
            if self.is_mirrored:
                if i != j:
                    self.layout.store_element(data, j, i, self.mirrored(value), shape)

    def mirrored(self, value: Numeric) -> Any:
        """What stands at (j, i) where ``value`` stands at (i, j)."""
        if self.is_conjugated:
            return conjugate(convert(self.dtype, value))
        return convert(self.dtype, value)

    def on_diagonal(self, value: Numeric) -> Any:
        if self.is_conjugated:
            return convert(self.dtype, convert(self.dtype, value).real)
        return convert(self.dtype, value)

    def store(self, data: View, tile: Tile, values: Elements, shape: StackShape) -> None:
        if self.holds(tile.index[0], tile.index[1], tile.size[0], tile.size[1], 1):
            self.layout.store(data, tile, values, shape)
            if self.is_mirrored:
                each(store_mirrored, values, self, data, tile, shape)
        else:
            store_elements(self, data, tile, values, shape)

    # -- host -----------------------------------------------------------------------------------------------------------

    def as_operand(self, name: str, transformed: bool) -> GlobalLayout:
        if self.is_mirrored:
            raise TypeError(f"{name} has the layout {self!r}, which stores D in both halves; read the array itself")
        return super().as_operand(name, transformed)

    def array_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        if rows != columns:
            raise ValueError(f"out is {rows} x {columns}; a symmetric matrix is square")
        return rows, columns

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        if rows != columns:
            raise ValueError(f"{name} is {rows} x {columns}; a symmetric matrix is square")
        super().check(array, rows, columns, name)


def store_mirrored(value: Numeric, n: int, layout: Any, data: View, tile: Tile, shape: StackShape) -> None:
    """Element ``n`` of a tile, on the other side of the diagonal."""
    i, j = tile.index[0] + n % tile.size[0], tile.index[1] + n // tile.size[0]
    layout.layout.store_element(data, j, i, layout.mirrored(value), shape)


def _check_array(layout: GlobalLayout, array: ArrayInfo | None, shape: tuple[int, ...], name: str, needed: str) -> None:
    if array is None:
        raise ValueError(f"{name} is None, and {layout!r} needs an array")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; {needed}")
    if array.dtype != layout.dtype:
        raise ValueError(f"{name} has dtype {array.dtype} and its layout is {layout!r}; convert the array, or give a layout "
                         f"of dtype {array.dtype}")


# -- nowhere in memory -------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Generated(GlobalLayout):
    """The matrix of ``f(i, j)``, or of ``f(i, j, first, second, ...)`` with up to four run-time arguments. If ``f`` takes
    one more, it receives the number of the product in a stack.

    Arguments are arrays, NumPy scalars or Python numbers (floats in the layout's dtype, others as int32); another value
    compiles nothing. Arrays and NumPy scalars that ``f`` captured are run-time arguments too. ``f`` returns the declared
    dtype, or a number of Python (a coordinate, a literal, a result of `math`: int64 and float64); any other dtype raises, so
    nothing is narrowed silently. The kernel does not read the operand's array; any array will do.

    >>> import numpy as np, gemmkit as gk
    >>> hilbert = Generated("float32", lambda i, j: np.float32(1) / (i + j + 1))
    >>> with gk.emulate():
    ...     b = np.float32([[12], [12]])
    ...     gk.matmul(b, b, global_a_layout=hilbert, gemm_shape=dict(M=2, N=1, K=2)).tolist()
    [[18.0], [10.0]]
    """

    f: Any
    first: Any = None
    second: Any = None
    third: Any = None
    fourth: Any = None
    transposed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [getattr(self, name) for name in _NAMES]
        if any(x is None and y is not None for x, y in pairwise(given)):
            raise TypeError("Generated: an argument is None and one after it is not; leave none out")
        for name, value in zip(_NAMES, given):
            object.__setattr__(self, name, _argument(value, name, self.dtype))
        count = 2 + sum(value is not None for value in given)
        wanted = f"a function of {count} arguments, i, j and those given,"
        object.__setattr__(self, "f", function_given(self.f, "Generated", "f", (count, count + 1), wanted))

    @property
    def count(self) -> int:
        """How many run-time arguments there are."""
        return sum(getattr(self, name) is not None for name in _NAMES)

    @property
    def with_batch(self) -> bool:
        """Whether f wants the number of the product, too."""
        return required(self.f) == self.count + 3

    def given(self) -> tuple[Any, ...]:
        """The run-time arguments."""
        if self.count == 0:
            return ()
        if self.count == 1:
            return (self.first,)
        if self.count == 2:
            return self.first, self.second
        if self.count == 3:
            return self.first, self.second, self.third
        return self.first, self.second, self.third, self.fourth

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        i, j = (j, i) if self.transposed else (i, j)
        if self.with_batch:
            return declared(self.dtype, self.f(i, j, *self.given(), shape.batch), self.f)
        return declared(self.dtype, self.f(i, j, *self.given()), self.f)


_NAMES = ("first", "second", "third", "fourth")


def _argument(value: Numeric, name: str, dtype: np.dtype) -> Any:
    if value is None or is_array(value) or isinstance(value, np.generic):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and -2**31 <= value < 2**31:
        return np.int32(value)
    if isinstance(value, float) and dtype.names is None and (dtype.kind not in "iu" or math.isnan(value)):
        return dtype.type(value)
    raise TypeError(f"Generated({name}={value!r}): an array, a NumPy scalar or a number is needed")


# -- device code ------------------------------------------------------------------------------------------------------

def _type_declared(context: Any, dtype: np.dtype, value: Numeric, f: Any) -> Any:
    if not isinstance(dtype, DTypeType):
        return None
    given, target = types.unliteral(value), dtype.target
    is_integer = given == types.int64 or isinstance(value, (IndexType, WeakIntLiteral))
    is_float = given == types.float64 or isinstance(value, (WeakFloatLiteral, WeakFloat64Type))
    if given != target and not is_integer and not (is_float and not isinstance(target, types.Integer)):
        raise TypingError(_mismatch(f.function, value, target))
    return signature(target, dtype, value, f), lambda c, b, s, v: c.cast(b, v[1], value, target)


@atom(_type_declared)
def declared(dtype: np.dtype, value: Numeric, f: Any) -> Any:
    """A value that ``f`` returned, which must be of the dtype already or a number as Python has it."""
    if type(value) is dtype.type:
        return value
    is_integer = isinstance(value, (int, np.int64)) and not isinstance(value, bool)
    if not is_integer and not (isinstance(value, float) and dtype.kind not in "iu"):         # np.float64 is a float, too
        is_number = isinstance(value, (np.generic, bool, complex))
        raise TypeError(_mismatch(f, np.asarray(value).dtype if is_number else worded(value), dtype))
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(dtype)[()]


def _mismatch(f: Any, got: Any, wanted: Any) -> str:
    code = getattr(f, "function", f).__code__
    return (f"{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name} ({code.co_filename}, line "
            f"{code.co_firstlineno}) returns {got}, and its Generated layout declares dtype {wanted}; convert what it "
            f"returns{f', or declare {got}' if isinstance(got, np.dtype) else ''}")
