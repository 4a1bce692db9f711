"""The contracts of layouts: what an operand is read through, how a tile is staged, how a result is written.

| role | a kernel asks | enough is |
|---|---|---|
| `GlobalLayout` | for elements and tiles of A, B and C, and which part of K matters | ``element(data, i, j, shape)`` |
| `ResultLayout` | to store elements and tiles of D | ``store_element(data, i, j, value, shape)`` |
| `SharedLayout` | where a tile's elements lie in shared memory | `SharedLayout` names its methods |

(i, j) are the row and the column in the whole operand, ``data`` the array as the user passed it, and ``shape`` has the
run-time ``M``, ``N``, ``K``. An element out of range is never asked for. Of a stack of products the methods get the array of
one product, if the layout says how many dimensions that has (``array_ndim``), and ``shape.batch`` is the product's number in
any case.

A class has the roles that it serves in: the plain layouts (:mod:`gemmkit.layouts.plain`) have all, a swizzled tile has one.
`Layout` has all, for layouts of your own.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gemmkit.components import Component
from gemmkit.lang.checks import converted, dtype_given, number
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import ComponentClass, dataclass
from gemmkit.lang.host import Elements, Numeric, View
from gemmkit.lang.registers import each, generate
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.tiling import Tile, translate_offset

if TYPE_CHECKING:
    from gemmkit.layouts.plain import Plain

WIDE = 16                              # bytes of the widest access of a thread


@dataclass(frozen=True)
class AnyLayout(Component):
    """What layouts of all roles have: ``dtype`` is the type of the elements."""

    dtype: Any

    is_contract = True
    device_methods = ("element", "load", "store_element", "store", "k_range", "row_offset", "column_offset",
                      "of_stored", "is_as_stored", "contains", "box_at", "box_offsets",
                      "leading", "position", "load_shared", "store_shared", "store_words")         # of shared layouts
    needs = MappingProxyType({"load": "element"})            # what edges and other kernels ask for beside
    without_value = ("store_element", "store", "store_shared", "store_words")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dtype", dtype_given(self.dtype, type(self).__qualname__))

    @property
    def vector_axis(self) -> int | None:
        """The axis along which neighbours are neighbours in memory, or None."""
        return None


@dataclass(frozen=True)
class SharedLayout(AnyLayout):
    """How a tile is staged in shared memory.

    Device methods: ``position(coord, leading)`` is an element's place, in elements; ``leading(size)`` is the leading
    dimension of a tile; ``load_shared(pointer, tile, leading)``, ``store_shared(pointer, tile, values, leading)`` and
    ``store_words`` (of 32-bit words) move a thread's tile. On the host ``physical_size(rows, columns)`` is the number of
    elements that a tile takes.
    """

    is_contract = True
    in_planes = False                    # whether a tile has numbers part by part (`Planes`)

    @property
    def is_linear(self) -> bool:
        """Whether the `position` of a sum of coordinates is the sum of their positions, for tiles that begin at multiples of
        their extents. A swizzle is not linear."""
        return True


@dataclass(frozen=True)
class ArrayLayout(AnyLayout):
    """What operands and results have in common: an array in global memory, and how a matrix lies in it."""

    is_contract = True
    array_ndim: ClassVar[int | None] = None
    near = False                         # whether all elements lie within 2**31 bytes of the array's first
    is_padded = False                    # whether elements for which not ``contains(i, j)`` are zeros, and nowhere in memory
    longest_line = 0                     # neighbours along ``vector_axis`` that a box of TMA's may have; 0: any number
    comb = 1                             # how far apart along ``vector_axis`` the neighbours in memory are

    readable = writable = False

    def row_offset(self, data: View, i: int) -> int:
        """The byte offset of row ``i`` from the array's first element, if the layout `is_separable`: in 64 bits, or in 32 if
        it is ``near``."""
        raise TypeError(f"{type(self).__qualname__} has no row_offset(data, i)")

    def column_offset(self, data: View, j: int) -> int:
        """How much further column ``j`` lies."""
        raise TypeError(f"{type(self).__qualname__} has no column_offset(data, j)")

    # -- host methods -----------------------------------------------------------------------------------------------

    @property
    def is_separable(self) -> bool:
        """Whether an element lies at the sum of `row_offset` and `column_offset`, in the array's own dtype. Threads can then
        copy it without reading it, and keep one of the two offsets while the other changes."""
        return False

    @property
    def is_plain(self) -> bool:
        """Whether its elements are those of a strided matrix as they lie in memory, read without a computation. Raw words
        can then stand for them, and TMA can move them."""
        return False

    @property
    def neighbours(self) -> int:
        """How many neighbours along `vector_axis`, from a multiple of as many on, are neighbours in memory for certain."""
        return 1

    @property
    def contiguous_axis(self) -> int | None:
        """The axis along which neighbours are mostly neighbours in memory, though perhaps not in vectors, or None."""
        return self.vector_axis

    @property
    def run(self) -> int:
        """How many elements along ``vector_axis`` a thread should move: what makes its accesses 16 bytes wide."""
        return max(1, WIDE // int(self.dtype.itemsize))

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        """The operand's rows and columns as far as the array says."""
        return None, None

    @property
    def storage(self) -> np.dtype:
        """The dtype of an array in this layout, where that is not the elements' own."""
        dtype: np.dtype = self.dtype
        return dtype

    def dimensions_of(self, array: ArrayInfo) -> int | None:
        """How many dimensions of an array belong to a matrix. Those before are a stack; ``element`` and the other methods
        get one of its matrices at a time. None: all products of a stack share the array, and ``shape.batch`` is the
        product's number. A layout sets ``array_ndim``, or overrides this method."""
        return self.array_ndim

    def array_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of an array that holds an operand in this layout."""
        return rows, columns

    def seen(self, info: ArrayInfo) -> ArrayInfo:
        """The array as the kernel sees it."""
        return info

    def host_view(self, array: np.ndarray) -> np.ndarray:
        """`seen`, of a NumPy array."""
        return array

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        """Raise ValueError when the array cannot be an operand of ``rows`` x ``columns`` in this layout."""


@dataclass(frozen=True)
class GlobalLayout(ArrayLayout):
    """What an operand is read through."""

    is_contract = True

    # -- device methods ---------------------------------------------------------------------------------------------

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        """The element in row ``i``, column ``j`` of the operand."""
        raise TypeError(f"{type(self).__qualname__} has no element(data, i, j, shape): it cannot be read")

    def load(self, data: Any, tile: Tile, shape: StackShape) -> Elements:
        """All elements of a tile that lies inside the operand, first dimension fastest."""
        return load_elements(self, data, tile, shape)

    def k_range(self, begin: int, end: int, shape: StackShape) -> tuple[int, int]:
        """The range of K in which rows (of A) or columns (of B) ``begin`` to ``end`` can be other than nothing."""
        return 0, shape.K

    # -- host methods -----------------------------------------------------------------------------------------------

    @property
    def readable(self) -> bool:                          # type: ignore[override]
        return type(self).element is not GlobalLayout.element or type(self).load is not GlobalLayout.load

    @property
    def stored(self) -> ArrayLayout | None:
        """The plain layout of the array, if an element is a function of the array's element at the same place: the method
        ``of_stored(value, i, j)``. TMA can then load tiles, and the kernel applies the function in place, except to blocks
        that ``is_as_stored(i, j, rows, columns)`` declares unchanged."""
        return self if self.is_plain else None

    def packs(self, tile: Tile) -> bool:
        """Whether ``load_packed(data, tile, shape)`` loads tiles of threads such as this, as 32-bit words."""
        return False

    def as_operand(self, name: str, transformed: bool) -> GlobalLayout:
        """The layout where it stands for operand ``name`` ("a" or "b"): `k_range` may differ between them.

        ``transformed`` says that a transform acts on the elements; it may make something of nothing, so that no part of
        K can be skipped.
        """
        return self

    def of_result(self, layout: ResultLayout) -> ResultLayout:
        """How D is stored where this is the layout of B and D's array has ``layout``."""
        return layout


@dataclass(frozen=True)
class ResultLayout(ArrayLayout):
    """How a result is written: by ``store_element(data, i, j, value, shape)``, or `store` of tiles."""

    is_contract = True
    packed = 1                           # columns that an epilogue makes one of
    folds = 1                            # columns that a kernel computes for one of D
    is_half = False                      # whether tiles wholly on one side of D's diagonal are not computed (`Symmetric`)
    is_discarded = False                 # whether D is nowhere (`Discarded`)
    is_mirrored = False                  # whether what is stored at (i, j) is stored at (j, i), too

    def store(self, data: View, tile: Tile, values: Elements, shape: StackShape) -> None:
        """Store a tile's elements, first dimension fastest."""
        store_elements(self, data, tile, values, shape)

    @property
    def writable(self) -> bool:                          # type: ignore[override]
        return hasattr(self, "store_element") or type(self).store is not ResultLayout.store

    def finished_columns(self, columns: int) -> int:
        """Columns of D, where the kernel computes so many."""
        return columns


class LayoutClass(ComponentClass):
    """Layouts of every role are instances of `Layout`, whichever roles their classes have."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(AnyLayout if cls is Layout else cls, instance)


@dataclass(frozen=True)
class Layout(GlobalLayout, ResultLayout, SharedLayout, metaclass=LayoutClass):
    """Base class of layouts of your own, in whatever role: ``dtype`` is the type of the elements that ``element`` returns.

    Ten lines are a layout (a Toeplitz matrix that is never materialised):

    >>> @dataclass(frozen=True)
    ... class Toeplitz(Layout):
    ...     def element(self, data, m, k, shape):
    ...         return data[m - k + shape.K - 1]
    """

    is_contract = True


@dataclass(frozen=True)
class OfArray(ArrayLayout):
    """Base class of layouts whose array is one of ``layout``, which says what it is."""

    layout: ArrayLayout

    @property
    def vector_axis(self) -> int | None:
        return self.layout.vector_axis

    @property
    def contiguous_axis(self) -> int | None:
        return self.layout.contiguous_axis

    @property
    def storage(self) -> np.dtype:
        return self.layout.storage

    def dimensions_of(self, array: ArrayInfo) -> int | None:
        return self.layout.dimensions_of(array)

    def extents(self, array: ArrayInfo) -> tuple[int | None, int | None]:
        return self.layout.extents(array)

    def array_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return self.layout.array_shape(rows, columns)

    def seen(self, info: ArrayInfo) -> ArrayInfo:
        return self.layout.seen(info)

    def host_view(self, array: np.ndarray) -> np.ndarray:
        return self.layout.host_view(array)

    def check(self, array: ArrayInfo | None, rows: int, columns: int, name: str) -> None:
        self.layout.check(array, rows, columns, name)


def leading(info: ArrayInfo, layout: ArrayLayout | None) -> int:
    """How many dimensions of an array are a stack's: those before a matrix's."""
    own = None if layout is None else layout.dimensions_of(info)
    return 0 if own is None else max(0, len(info.shape) - own)


def check_dimensions(info: ArrayInfo, layout: ArrayLayout, name: str) -> None:
    """Raise ValueError for an array of fewer dimensions than its layout's matrices have."""
    own = layout.dimensions_of(info)
    if own is not None and len(info.shape) < own:
        raise ValueError(f"{name} has shape {info.shape}; its layout {layout!r} takes arrays of {own} dimensions")


def load_elements(layout: GlobalLayout, data: View, tile: Tile, shape: StackShape) -> Elements:
    """A tile's elements one by one, first dimension fastest, in the layout's dtype."""
    return generate(tile.count, element_of_tile, layout, data, tile, shape)


def store_elements(layout: ArrayLayout, data: View, tile: Tile, values: Elements, shape: StackShape) -> None:
    """Store a tile's elements one by one."""
    each(store_element_of_tile, values, layout, data, tile, shape)


def element_tile(tile: Tile, n: int) -> Any:
    """The tile whose first element is the n-th of this one."""
    return translate_offset(tile, n % tile.size[0], n // tile.size[0])


def element_of_tile(n: int, layout: GlobalLayout, data: View, tile: Tile, shape: StackShape) -> Any:
    """Element ``n`` of a tile, first dimension fastest, in the layout's dtype."""
    return element_of(layout, data, tile.index[0] + n % tile.size[0], tile.index[1] + n // tile.size[0], shape)


def element_of(layout: GlobalLayout, data: View, i: int, j: int, shape: StackShape) -> Any:
    """The element in row ``i``, column ``j``, in the layout's dtype."""
    value = layout.element(data, i, j, shape)
    return converted(layout, "element", number(layout, "element", value, 0), layout.dtype)


def store_element_of_tile(value: Numeric, n: int, layout: Plain, data: View, tile: Tile, shape: StackShape) -> None:
    """Store element ``n`` of a tile."""
    layout.store_element(data, tile.index[0] + n % tile.size[0], tile.index[1] + n // tile.size[0], value, shape)
