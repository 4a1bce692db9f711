"""Matrices with structure as objects: an array together with the layout that makes a matrix of it.

``matmul``, ``plan`` and ``blas.gemmEx`` take them for A and B wherever they take an array, so that library code written
for arrays works for them too:

>>> import numpy as np, gemmkit as gk
>>> def library_code(a, b, c):
...     return gk.blas.gemmEx("N", "N", 2.0, a, b, 1.0, c)
>>> b = np.float32([[1, 2], [3, 4]])
>>> with gk.emulate():
...     library_code(gk.layouts.DiagonalMatrix(np.float32([10, 1])), b, np.ones((2, 2), np.float32)).tolist()
[[21.0, 41.0], [7.0, 9.0]]

A new kind is a layout and, where its transpose is not the same layout of ``array.T``, a subclass with ``T``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit import components as kept
from gemmkit.components import Array, Component, Frozen, Scalar
from gemmkit.lang.checks import check_dtype, check_flag
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, Numeric, View
from gemmkit.layouts.base import (
    ArrayLayout,
    GlobalLayout,
    ResultLayout,
    check_dimensions,
    leading,
    load_elements,
    store_elements,
)
from gemmkit.layouts.plain import LINE, ColMajor, Discarded, Plain, RowMajor
from gemmkit.layouts.structured import MOST
from gemmkit.layouts.structured import Diagonal as DiagonalLayout
from gemmkit.layouts.structured import Generated as GeneratedLayout
from gemmkit.layouts.structured import Symmetric as SymmetricLayout
from gemmkit.layouts.structured import Triangular as TriangularLayout
from gemmkit.ptx.copy_async import offset_of
from gemmkit.ptx.memory import load_global, store_global
from gemmkit.runtime.arrays import ArrayInfo, describe, empty_like, strided, unit_axis
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.lang.fingerprint import Array


class Matrix:
    """An array with the layout that reads it as a matrix; or a stack of matrices, if the array has more dimensions.

    ``shape`` is required if the layout cannot derive it from the array. ``array`` may be None if the layout reads none.
    Raises ValueError if neither gives the shape, and if they give different ones.

    A Toeplitz matrix, of an array that has each diagonal's element once:

    >>> from dataclasses import dataclass
    >>> import gemmkit as gk
    >>> @dataclass(frozen=True)
    ... class Toeplitz(gk.layouts.Layout):
    ...     def element(self, data, i, j, shape):
    ...         return data[i - j + shape.K - 1]
    >>> with gk.emulate():
    ...     toeplitz = gk.layouts.Matrix(np.float32([1, 2, 3, 4]), Toeplitz("float32"), (2, 3))
    ...     gk.matmul(toeplitz, np.float32([1, 1, 0])).tolist()
    [5.0, 7.0]
    """

    def __init__(self, array: Any, layout: ArrayLayout, shape: tuple[int, ...] | None = None):
        if not isinstance(layout, ArrayLayout):
            raise TypeError(f"layout={layout!r}: a Layout is needed, for example RowMajor('float16')")
        self.array, self.layout = array, layout
        info = None if array is None else describe(array, "array")
        count = 0 if info is None else leading(info, layout)
        stated: Any = None
        if info is not None:
            check_dimensions(info, layout, "array")
            stated = layout.extents(info._replace(shape=info.shape[count:], strides=info.strides[count:]))
        found: Any = stated if shape is None else shape
        if found is None or not isinstance(found, tuple) or len(found) != 2 or not all(map(_is_extent, found)):
            raise ValueError(f"shape={shape!r}: {layout!r} does not say how many rows and columns an array has; "
                             "give both, as a tuple of two whole numbers")
        if shape is not None and stated is not None and any(n not in (None, m) for n, m in zip(stated, found)):
            raise ValueError(f"shape={shape!r}: {layout!r} says {stated[0]} x {stated[1]}; leave shape out")
        self.is_sized = shape is not None                            # the layout may not know it: calls take it from here
        stack = () if info is None else info.shape[:count]
        self.shape: tuple[int, ...] = (*stack, int(found[0]), int(found[1]))

    @property
    def dtype(self) -> np.dtype:
        dtype: np.dtype = self.layout.dtype
        return dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def T(self) -> Matrix:
        """The transpose; nothing is copied."""
        raise TypeError(f"a Matrix of layout {self.layout!r} does not know its transpose; give its class a property T")

    def check_place(self, name: str, c: Any) -> None:
        """Raise where it cannot be operand ``name``, "a" or "b", of a product with ``c`` (None: without)."""

    def condition(self, name: str) -> Any:
        """The `Condition` that comes with it as operand ``name``: which k-tiles are computed. None: all that its layout's
        `k_range` leaves in."""
        return None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of shape {self.shape}, {self.layout!r}>"


def _is_extent(n: Any) -> bool:
    return isinstance(n, (int, np.integer)) and not isinstance(n, bool) and 0 <= int(n) < 2**31


class DiagonalMatrix(Matrix):
    """The diagonal matrix of a vector. An array of more dimensions is a stack: its last axis is each matrix's diagonal.

    >>> DiagonalMatrix(np.zeros(3)).shape, DiagonalMatrix(np.zeros((4, 3))).shape
    ((3, 3), (4, 3, 3))
    """

    def __init__(self, diagonal: Array):
        info = describe(diagonal, "diagonal")
        check_dtype(info.dtype, "diagonal")
        if not info.shape:
            raise ValueError("diagonal has shape (); a vector is needed, or a stack of them")
        super().__init__(diagonal, DiagonalLayout(info.dtype))

    @property
    def T(self) -> Matrix:
        return self


class TriangularMatrix(Matrix):
    """The lower or upper half of an array with its diagonal (1 with ``unit``); the rest may hold anything.

    >>> TriangularMatrix(np.zeros((4, 4), np.float32), "upper").T
    <TriangularMatrix of shape (4, 4), Triangular(ColMajor('float32'), 'lower')>
    """

    def __init__(self, array: Array, half: str = "lower", unit: bool = False):
        super().__init__(array, TriangularLayout(plain_layout(array), half, unit))

    @property
    def T(self) -> Matrix:
        layout: Any = self.layout
        return TriangularMatrix(transposed(self.array), "upper" if layout.is_lower else "lower", layout.unit)


class SymmetricMatrix(Matrix):
    """The symmetric matrix of which an array's lower or upper half is read, the rest never; with ``hermitian`` the
    Hermitian one, of which the other half has the conjugates, and the diagonal no imaginary parts.

    As ``out`` of `gemmkit.matmul` and `gemmkit.plan` it halves the work: the caller states that the result is symmetric, and
    the kernel computes the tiles that ``half`` has a part of. It stores the elements of that half and touches nothing
    else of the array. With the half "both", which is for ``out`` alone, it computes the lower half and stores each element
    at (i, j) and at (j, i): the result is symmetric to the bit.

    Raises ValueError for another half and for an array that is not square, TypeError for ``hermitian`` of elements of
    several parts that are not complex. (`gemmkit.layouts.Symmetric` is its layout.)

    >>> import gemmkit as gk
    >>> x, out = np.float32([[1, 2], [3, 4], [5, 6]]), np.zeros((3, 3), np.float32)
    >>> with gk.emulate():
    ...     gk.matmul(x, x.T, out=SymmetricMatrix(out, "lower")).tolist()
    [[5.0, 0.0, 0.0], [11.0, 25.0, 0.0], [17.0, 39.0, 61.0]]
    >>> with gk.emulate():
    ...     gk.matmul(x, x.T, out=SymmetricMatrix(out, "both")).tolist()
    [[5.0, 11.0, 17.0], [11.0, 25.0, 39.0], [17.0, 39.0, 61.0]]
    """

    def __init__(self, array: Array, half: str = "lower", hermitian: bool = False):
        layout = SymmetricLayout(plain_layout(array), half, hermitian)
        super().__init__(array, layout)
        if self.shape[-2] != self.shape[-1]:
            raise ValueError(f"array has shape {self.shape}; a symmetric matrix is square")

    @property
    def T(self) -> Matrix:
        layout: Any = self.layout
        if not layout.is_conjugated:
            return self
        return SymmetricMatrix(transposed(self.array), "upper" if layout.is_lower else "lower", True)

    def check_place(self, name: str, c: Any) -> None:
        layout: Any = self.layout
        if layout.is_mirrored:
            raise TypeError(f'{name} is a SymmetricMatrix of both halves, which is for out; give the array, or the half '
                            '"lower" or "upper"')


class Discard(Matrix):
    """For ``out`` of `gemmkit.matmul` and `gemmkit.plan`: D is neither allocated nor stored, and the call returns None.
    What an epilogue reduces or writes beside D, or an observer of A, is all that the call computes.

    ``dtype`` is the type in which elements of D come to a reduction; None takes the type that a new D would have, so that
    the results are those of a call that stores D.

    Raises TypeError for what is no dtype. `matmul` raises ConfigError if nothing is reduced, written or observed, or if the
    epilogue finishes whole rows of D.

    >>> import gemmkit as gk
    >>> a, best = np.float32([[1, 2], [4, 3]]), np.empty(2, np.int32)
    >>> reduction = gk.epilogues.RowReduce(best, "argmax")
    >>> with gk.emulate():
    ...     gk.matmul(a, np.eye(2, dtype=np.float32), out=Discard(), epilogue=reduction)
    >>> best.tolist()
    [1, 0]
    """

    def __init__(self, dtype: Any = None):
        self.array, self.layout, self.is_sized = None, Discarded(dtype), False
        self.shape = ()

    def check_place(self, name: str, c: Any) -> None:
        raise TypeError(f"{name} is a Discard, which is for out; give an array")


class GeneratedMatrix(Matrix):
    """The matrix of ``f(i, j, *arguments)``, nowhere in memory; up to four run-time arguments (see `layouts.Generated`).

    >>> import gemmkit as gk
    >>> with gk.emulate():
    ...     a = GeneratedMatrix(lambda i, j, s: s * (i - j), (2, 3), "float32", 0.5)
    ...     gk.matmul(a, np.eye(3, dtype="float32")).tolist()
    [[0.0, -0.5, -1.0], [0.5, 0.0, -0.5]]
    """

    def __init__(self, f: Any, shape: tuple[int, int], dtype: Any, *arguments: Any):
        if len(arguments) > MOST:
            raise TypeError(f"GeneratedMatrix() got {len(arguments)} arguments for its function; {MOST} are the most: "
                            "put numbers into an array")
        if any(argument is None for argument in arguments):
            raise TypeError("GeneratedMatrix() got None as an argument of its function; an array or a number is needed")
        super().__init__(None, GeneratedLayout(dtype, f, *arguments), shape)

    @property
    def T(self) -> Matrix:
        import dataclasses

        out = object.__new__(GeneratedMatrix)
        layout: Any = self.layout
        Matrix.__init__(out, None, dataclasses.replace(layout, transposed=not layout.transposed), self.shape[::-1])
        return out


# -- how calls take them ----------------------------------------------------------------------------------------------

def unwrapped(a: Any, b: Any, others: tuple[Any, ...], keywords: dict[str, Any],
              conf: Any = None) -> tuple[Any, Any, dict[str, Any]]:
    """A call's operands as arrays, and its keywords with their layouts and conditions and, where arrays do not say them, the
    sizes."""
    keywords = dict(keywords)
    for name, x in (("a", a), ("b", b)):
        if isinstance(x, Matrix):
            field = f"global_{name}_layout"
            if keywords.get(field) is not None:
                raise TypeError(f"{field} is given with {name}, a {type(x).__name__} that has its own layout")
            x.check_place(name, others[0])
            keywords[field] = x.layout
    found = condition_of(a, b)
    if found is not None:
        if keywords.get("condition") is not None or not getattr(
                getattr(conf, "condition", None), "is_always", True):
            raise TypeError("condition is given with a BlockSparse operand, which has its own; give the mask alone, or the "
                            "array and a condition that reads the mask")
        keywords["condition"] = found
    sizes = _sizes({"a": a, "b": b}, keywords, conf)
    if sizes:
        keywords["gemm_shape"] = CallSizes(keywords.get("gemm_shape"), tuple(sizes))
    a, b = arrays(a, b, others)
    return a, b, keywords


class CallSizes(NamedTuple):
    """A call's ``gemm_shape`` and the sizes of matrices with a shape: ``stated`` has (operand, dimension, extent)."""

    gemm_shape: Any
    stated: tuple[tuple[str, str, int], ...]


def _sizes(operands: dict[str, Any], keywords: dict[str, Any], conf: Any) -> list[tuple[str, str, int]]:
    """The extents of those operands whose shape the caller gave.

    Raises ValueError for a K that differs, of the shapes of A and B themselves.
    """
    sized = [name for name, x in operands.items() if isinstance(x, Matrix) and x.is_sized]
    if not sized:
        return []
    shapes = {name: x.shape if isinstance(x, Matrix) else describe(x, name).shape for name, x in operands.items()}
    is_plain = all(isinstance(x, Matrix) or keywords.get(f"global_{name}_layout", conf) is None
                   for name, x in operands.items())
    if is_plain and keywords.get("operator") is None and min(map(len, shapes.values())) > 0:       # no axis is of parts
        K, rows = shapes["a"][-1], shapes["b"][-2:][0]
        if K != rows:
            raise ValueError(f"a has shape {shapes['a']} and b has shape {shapes['b']}: a has {K} columns and b {rows} "
                             "rows; both must be K")
    return [(name, dim, extent) for name in sized for dim, extent in zip("MK" if name == "a" else "KN", shapes[name][-2:])]


def condition_of(a: Any, b: Any) -> Any:
    """The condition that comes with operands; None where none comes."""
    given = [x.condition(name) for name, x in (("a", a), ("b", b)) if isinstance(x, Matrix)]
    found = [one for one in given if one is not None]
    return found[0].beside(found[1]) if len(found) == 2 else found[0] if found else None


def components_of(a: Any, b: Any, out: Any = None) -> dict[str, Component]:
    """The layouts and the condition that come with operands and result, by their fields of a configuration."""
    found: dict[str, Component] = {f"global_{name}_layout": x.layout for name, x in (("a", a), ("b", b), ("d", out))
                                   if isinstance(x, Matrix)}
    condition = condition_of(a, b)
    return found if condition is None else {**found, "condition": condition}


def frozen_components(planned: Callable[[str], Any], components: dict[str, Component],
                      joined: tuple[str, ...]) -> dict[str, Frozen]:
    """Those of the components that have arrays or numbers, which may be others than those that were ``planned(field)``.

    Raises ValueError for one that is not of the planned kind, and where one is missing of those planned with arrays of their
    own, ``joined``: these would be read again.
    """
    for name in joined:
        if name not in components and name == "condition":
            raise ValueError("a and b contain no BlockSparse, but the plan was made with one; give one, or make another "
                             "plan")
        if name not in components:
            raise ValueError(f"{name[7]} is one array, and the plan was made with one of several (a Concat, an "
                             "InterleavedColumns, or a Gather, which has an index); give such a one, or make another plan")
    found = {}
    for name, component in components.items():
        frozen, known = kept.frozen(component, name), kept.frozen(planned(name), name)
        if not frozen.leaves and not known.leaves:
            continue
        lie, wanted = ([(info.shape, info.strides) for info in of.arrays] for of in (frozen, known))
        if frozen.fingerprint != known.fingerprint or lie != wanted:
            what, kind = ("the mask of a BlockSparse", "condition") if name == "condition" else (name[7], "layout")
            raise ValueError(f"{what} differs from the plan's: its {kind} is {component!r} and the planned one "
                             f"{planned(name)!r}; make another plan, or call matmul")
        found[name] = frozen
    return found


def result(out: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A call's result as an array (None of a `Discard`), and its keywords with the layout that comes with it."""
    if not isinstance(out, Matrix):
        return out, keywords
    if not out.layout.writable:
        raise TypeError(f"out is a {type(out).__name__}, whose layout {out.layout!r} stores nothing; give an array, "
                        "a SymmetricMatrix or a Scatter")
    if keywords.get("global_d_layout") is not None:
        raise TypeError(f"global_d_layout is given with out, a {type(out).__name__} that has its own layout")
    return out.array, {**keywords, "global_d_layout": out.layout}


def arrays(a: Any, b: Any, others: tuple[Any, ...]) -> tuple[Any, Any]:
    """The arrays of a call's operands. One that has none gets the other's: it says where to compute."""
    a, b = (x.array if isinstance(x, Matrix) else x for x in (a, b))
    if a is None and b is None:
        beside = next((x for x in others if x is not None), None)
        if beside is None:
            raise TypeError("a and b have no arrays, which would say where to compute; give out")
        a = empty_like(beside, (1,), describe(beside).dtype)        # not c or out itself: operands may not overlap out
    return (b if a is None else a), (a if b is None else b)


def plain_layout(array: Array) -> Plain:
    """The layout of a matrix of numbers, or of each of a stack. Raises ValueError for fewer than two dimensions."""
    info = describe(array, "array")
    check_dtype(info.dtype, "array")
    if len(info.shape) < 2:
        raise ValueError(f"array has shape {info.shape}; a matrix of 2 dimensions is needed")
    rows, columns = info.strides[-2:]
    return (ColMajor if rows == 1 and columns != 1 else RowMajor)(info.dtype)


def transposed(x: Array, parts: int = 0) -> Any:
    """The transpose of a matrix, or of each of a stack, as a view; nothing is copied. ``parts`` is how many axes follow
    those of the matrix."""
    rows, columns = -2 - parts, -1 - parts
    if hasattr(x, "swapaxes"):
        return x.swapaxes(rows, columns)
    info = describe(x, "array")                                       # of a library that makes no such view
    shape, strides = ([*given] for given in (info.shape, info.strides))
    for given in (shape, strides):
        given[rows], given[columns] = given[columns], given[rows]
    return strided(x, info, tuple(shape), tuple(strides))


# --------------------------------------------------------------------------------------------------
# Rows of a matrix by index: row i is the array's row ``index[i]``.

@dataclass(frozen=True)
class Gathered(GlobalLayout):
    """The ``count`` rows ``index[0]``, ``index[1]``, ... of an array in a plain ``layout``, in any order, with repetitions.
    `gemmkit.layouts.Gather` makes one.

    An element's place is the sum of its row's and its column's, so threads copy lines of a row-major array by cp.async.
    """

    layout: Plain
    index: Array
    count: Scalar

    array_ndim = 2
    array_names = MappingProxyType({"index": "index of Gather"})

    def __init__(self, layout: Plain, index: Array, count: int):
        if not isinstance(layout, Plain):
            raise TypeError(f"{type(self).__name__}(layout={layout!r}): the RowMajor or ColMajor layout of the array is "
                            "needed")
        for name, value in dict(dtype=layout.dtype, layout=layout, index=index, count=count).items():
            object.__setattr__(self, name, value)

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        return data[self.index[i], j]

    def load(self, data: View, tile: Tile, shape: StackShape) -> Elements:
        if self.is_row_major and tile.size[1] == tile.count:
            return load_global(data, 1, (self.index[tile.index[0]], tile.index[1]), (0, 0), tile.count)
        return load_elements(self, data, tile, shape)

    def row_offset(self, data: View, i: int) -> int:
        return offset_of(data, (self.index[i if i < self.count else 0], 0))          # a tile's rows may be out of range

    def column_offset(self, data: View, j: int) -> int:
        return offset_of(data, (0, j))

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def is_row_major(self) -> bool:
        return self.layout.axis == 1

    is_separable = True

    @property
    def neighbours(self) -> int:
        return LINE if self.is_row_major else 1

    @property
    def vector_axis(self) -> int | None:
        return 1 if self.is_row_major else None

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return describe(self.index).shape[0], array.shape[1]

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        if array is None:
            raise ValueError(f"{name} is None, and {self!r} needs an array")
        self.layout.check(array, array.shape[0], columns, name)
        found = describe(self.index).shape
        if found != (rows,) or self.count != rows:
            raise ValueError(f"{name} has {rows} rows, and its index shape {found} and count={self.count!r}; ({rows},) and "
                             f"count={rows} are needed")

    def __repr__(self) -> str:
        return f"Gathered({self.layout!r}, <index of {self.count} rows>)"


@dataclass(frozen=True, init=False)
class Scattered(Gathered, ResultLayout):
    """The ``count`` rows ``index[0]``, ``index[1]``, ... of an array that a product writes. Other rows stay as they are.
    `gemmkit.layouts.Scatter` makes one."""

    array_names = MappingProxyType({"index": "index of Scatter"})

    def store_element(self, data: View, i: int, j: int, value: Numeric, shape: StackShape) -> None:
        data[self.index[i], j] = value

    def store(self, data: View, tile: Tile, values: Elements, shape: StackShape) -> None:
        if self.is_row_major and tile.size[1] == tile.count:
            store_global(data, 1, (self.index[tile.index[0]], tile.index[1]), (0, 0), values)
        else:
            store_elements(self, data, tile, values, shape)

    def __repr__(self) -> str:
        return f"Scattered({self.layout!r}, <index of {self.count} rows>)"


# --------------------------------------------------------------------------------------------------
# `Gather` and `Scatter`: some rows of an array as an operand or as the result, by an index on the device, uncopied.

class Gather(Matrix):
    """The matrix of the rows ``array[index]``: its row i is the array's row ``index[i]``. Nothing is copied.

    For A (or B, whose rows run along K) of `gemmkit.matmul`, `gemmkit.plan` and `gemmkit.blas.gemmEx`. ``array`` is (R, K)
    of any strides, ``index`` int32 of (M,), on the array's device. Rows may occur any number of times, in any order. The
    kernel reads the index in each call, so it may change between two calls. An index outside 0 to R - 1 is a fault in the
    emulator; a GPU then reads other memory. ``check`` copies the index to the host, which waits for the device, and raises.

    Raises TypeError for what is no array; ValueError for an array that is no matrix, and for an index of another dtype or of
    other than one dimension; with ``check`` IndexError, which names the first index out of range.

    >>> import numpy as np, gemmkit as gk
    >>> tokens = np.float32([[1, 2], [3, 4], [5, 6]])
    >>> with gk.emulate():
    ...     gk.matmul(Gather(tokens, np.int32([2, 0, 2])), np.eye(2, dtype="f4")).tolist()
    [[5.0, 6.0], [1.0, 2.0], [5.0, 6.0]]
    """

    def __init__(self, array: Array, index: Array, check: bool = False):
        self.index = index
        super().__init__(array, Gathered(*_checked(array, index, "Gather", check)))


class Scatter(Matrix):
    """The rows ``array[index]`` as the result of a product: row i of D is written to row ``index[i]`` of the array.

    For ``out`` of `gemmkit.matmul` and `gemmkit.plan`, which return the array. ``array`` is (R, N) of any strides, ``index``
    int32 of (M,), on the array's device; the kernel reads it in each call. Rows that the index does not name stay as they
    are. It must name each row once: the kernel writes rows and does not add them, and either of two rows for one place may
    stay. (With atomics, the result would depend on the order of blocks: give each copy of a row its own place, and reduce
    the copies after the product.) An index out of range is a fault in the emulator; a GPU then writes other memory.
    ``check`` copies the index to the host, which waits for the device, and raises.

    Raises TypeError and ValueError as `Gather`; with ``check`` IndexError, which names the first index out of range, and
    ValueError, which names the first row that occurs twice.

    >>> import numpy as np, gemmkit as gk
    >>> y = np.zeros((3, 2), np.float32)
    >>> with gk.emulate():
    ...     out = gk.layouts.Scatter(y, np.int32([2, 0]))
    ...     gk.matmul(np.float32([[1, 2], [3, 4]]), np.eye(2, dtype=np.float32), out=out).tolist()
    [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]
    """

    def __init__(self, array: Array, index: Array, check: bool = False):
        found = _checked(array, index, "Scatter", check)
        if check:
            rows, first, times = np.unique(on_host(index), return_index=True, return_counts=True)
            if (times > 1).any():
                again = min(zip(first[times > 1], rows[times > 1]))[1]
                raise ValueError(f"index names row {again} more than once; a row of the result can be written once")
        self.index = index
        super().__init__(array, Scattered(*found))

    def check_place(self, name: str, c: Any) -> None:
        raise TypeError(f"{name} is a Scatter, which is for out; give a Gather of the array and the index")


def _checked(array: Array, index: Array, name: str, check: Any) -> tuple[Any, Any, int]:
    """An array's layout, its index and how many rows that names."""
    info, of_array = describe(index, "index"), describe(array, "array")
    if len(of_array.shape) != 2:
        raise ValueError(f"array has shape {of_array.shape}; a matrix of 2 dimensions is needed, and no stack")
    if info.dtype != np.int32:
        raise ValueError(f"index has dtype {info.dtype}; int32 is needed: convert it once, as index.astype('int32') does")
    if len(info.shape) != 1:
        raise ValueError(f"index has shape {info.shape}; a vector is needed, of a row's number for each row")
    check_flag(check, name, "check")
    if check:
        rows, of_host = of_array.shape[0], on_host(index)
        wrong = np.flatnonzero((of_host < 0) | (of_host >= rows))
        if len(wrong):
            raise IndexError(f"index[{wrong[0]}] is {of_host[wrong[0]]}, and the array has {rows} rows: 0 to {rows - 1} are "
                             f"needed ({len(wrong)} of {len(of_host)} are out of range)")
    layout = plain_layout(array)
    if unit_axis(of_array) is None:                                  # no elements are neighbours: they are copied one by one
        layout = ColMajor(layout.dtype)
    return layout, index, info.shape[0]


def on_host(x: Array) -> np.ndarray:
    """A copy in host memory; waits for the device."""
    for name in ("get", "copy_to_host"):                             # CuPy's, Numba's
        if hasattr(x, name):
            return np.asarray(getattr(x, name)())
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)
