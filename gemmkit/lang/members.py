"""The matrices of a group of products, by tables in memory: their addresses, extents and strides, and other sizes.

A group's products have matrices of any sizes at any places, but of one type of view (dtype, contiguous axis, alignment). A
kernel takes the view of one of them, and `member_of` makes the others' of two tables: ``sizes`` of int32, ``places`` of
int64, a row a product.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.lang.atoms import atom
from gemmkit.lang.host import View
from gemmkit.lang.memory import ViewType, coordinates_of, global_pointer, proxy
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.scalars import index

FIRST, M, N, K = range(4)              # columns of `sizes`: the product's first tile, and its sizes
EXTENTS = 4                            # the first of the extents: two of each operand
PLACES = 3                             # columns of `places` of each operand: address, and the strides of both axes
SIZES_DTYPE, PLACES_DTYPE = np.dtype(np.int32), np.dtype(np.int64)

i32, i64 = ir.IntType(32), ir.IntType(64)


def _entry(c: Any, b: Any, table: ViewType, value: Any, row: Any, column: int, kind: Any) -> Any:
    """A number of a table of two dimensions."""
    pointer = global_pointer(b, table, proxy(c, b, table, value), [[row, i32(column)]], kind)
    found = b.load(pointer)
    found.align = kind.width // 8
    return found


def _is_table(table: Any, dtype: np.dtype, ndim: int) -> bool:
    return isinstance(table, ViewType) and table.dtype == dtype and table.ndim == ndim


def _type_number_of(context: Any, table: Any, row: Any, column: Any) -> Any:
    if not (_is_table(table, SIZES_DTYPE, 2) and isinstance(row, types.Integer)
            and isinstance(column, types.IntegerLiteral)):
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        return _entry(c, b, table, v[0], coordinates_of(c, b, row, v[1])[0], int(column.literal_value), i32)

    return signature(index, table, row, column), codegen


@atom(_type_number_of)
def number_of(table: Any, row: int, column: int) -> int:
    """An entry of a table of int32, as a coordinate; ``column`` is a compile-time number."""
    return int(table[int(row), int(column)])


def _type_entry_of(context: Any, numbers: Any, at: Any) -> Any:
    if not (_is_table(numbers, SIZES_DTYPE, 1) and isinstance(at, types.Integer)):
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        found = b.load(global_pointer(b, numbers, proxy(c, b, numbers, v[0]), [coordinates_of(c, b, at, v[1])], i32))
        found.align = 4
        return found

    return signature(index, numbers, at), codegen


@atom(_type_entry_of)
def entry_of(numbers: Any, at: int) -> int:
    """An entry of a list of int32, as a coordinate."""
    return int(numbers[int(at)])


def _type_member_of(context: Any, view: Any, sizes: Any, places: Any, row: Any, operand: Any) -> Any:
    if not (_is_table(sizes, SIZES_DTYPE, 2) and _is_table(places, PLACES_DTYPE, 2) and isinstance(row, types.Integer)
            and isinstance(operand, types.IntegerLiteral)):
        return None
    if not isinstance(view, ViewType):
        return signature(view, view, sizes, places, row, operand), lambda c, b, s, v: v[0]
    if view.ndim != 2 or view.wide:
        return None
    which = int(operand.literal_value)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        at, out = coordinates_of(c, b, row, v[3])[0], proxy(c, b, view, None)
        out.address = _entry(c, b, places, v[2], at, PLACES * which, i64)
        for axis in range(2):
            setattr(out, f"extent{axis}", _entry(c, b, sizes, v[1], at, EXTENTS + 2 * which + axis, i32))
            if axis != view.unit:
                setattr(out, f"stride{axis}", _entry(c, b, places, v[2], at, PLACES * which + 1 + axis, i64))
        return out._getvalue()

    return signature(view, view, sizes, places, row, operand), codegen


@atom(_type_member_of)
def member_of(view: Any, sizes: Any, places: Any, row: int, operand: int) -> Any:
    """The matrix of operand 0 to 3 (A, B, C, D) of product ``row``, as a view of the type of ``view``; an operand that is
    not there itself.

    In the emulator views have bounds and histories, so the matrices are given (`Members`), and the tables must agree.
    """
    if not isinstance(view, Members):
        return view
    found = view.members[int(row)]
    address, *strides = (int(places[int(row), PLACES * int(operand) + n]) for n in range(PLACES))
    extents = tuple(int(sizes[int(row), EXTENTS + 2 * int(operand) + n]) for n in range(2))
    walked = [n for n, extent in enumerate(extents) if extent > 1]
    steps = [stride * found.dtype.itemsize for stride in strides]
    if address != found.address or extents != found.shape or any(steps[n] != found.steps[n] for n in walked):
        raise ValueError(f"the tables say that operand {operand} of product {row} is {extents} at {address:#x} with strides "
                         f"{steps}, and it is {found.shape} at {found.address:#x} with {found.steps}")
    return found


class Members(View):
    """A view that stands for those of all products."""

    __slots__ = ("members",)

    def __init__(self, array: np.ndarray, memory: Any, unit: int | None, alignment: int, members: list[View]):
        super().__init__(array, memory, unit, alignment)
        self.members = members
