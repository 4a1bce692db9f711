"""Memory as device code sees it: views of global arrays, and typed pointers into shared memory.

A global ``View`` indexes like a NumPy array (``data[i]``, ``data[i, j]``), without wrap-around for negative indices. Its
type holds what decides the code: element type, dimensions, which axis has stride 1, and the alignment *class*; its value
holds address, extents and strides, so a new size compiles nothing.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from gemmkit.lang import numba_hooks as nb
from gemmkit.lang.host import View, access_alignment, misfit_of_type, refusal
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, ir, operation, signature, types
from gemmkit.lang.scalars import index, numba_type, wide_index

i1, i8, i32, i64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
READ_ONLY = ("the array is only read here: name a field that is written in the component's `outputs`; what a function "
             "captured cannot be written")
GLOBAL, SHARED = 1, 3                                          # LLVM's numbers of the address spaces


class ViewType(types.Type):
    """A global array: ``unit`` is the axis of stride 1 (or None), ``alignment`` in bytes holds for every row.

    A ``wide`` one has an extent of 2^31 or more: its extents and coordinates are 64 bits wide. A ``readonly`` one may not be
    assigned to. All of a ``near`` one lies within 2^31 bytes of its first element: a place in it is computed in 32 bits, by
    a multiplication a dimension, where 64 bits take three.
    """

    def __init__(self, dtype: np.dtype, ndim: int, unit: int | None, alignment: int, wide: bool = False,
                 readonly: bool = False, near: bool = False):
        self.dtype, self.ndim, self.unit, self.alignment = np.dtype(dtype), ndim, unit, alignment
        self.wide, self.readonly, self.near = wide, readonly, near
        self.element, self.coordinate = numba_type(dtype), wide_index if wide else index
        element = self.element if self.dtype.names else self.dtype
        how = f"{', wide' if wide else ''}{', read-only' if readonly else ''}{', near' if near else ''}"
        super().__init__(f"View({element}, {ndim}d, unit={unit}, align={alignment}{how})")

    @property
    def strided_axes(self) -> list[int]:
        return [axis for axis in range(self.ndim) if axis != self.unit]


nb.kept_as(ViewType, lambda ty: [("address", types.uint64), *((f"extent{axis}", ty.coordinate) for axis in range(ty.ndim)),
                                 *((f"stride{axis}", types.int64) for axis in ty.strided_axes)])


class SharedType(types.Type):
    """A typed pointer into the block's dynamic shared memory; the value is a byte offset.

    The value of a ``pinned`` pointer is an address in the shared window, with the bases of all its accesses in it
    (`gemmkit.ptx.registers.pinned`).
    """

    def __init__(self, dtype: np.dtype, pinned: bool = False):
        self.dtype, self.pinned = np.dtype(dtype), pinned
        self.element = numba_type(dtype)
        super().__init__(f"Shared({self.element if self.dtype.names else self.dtype}{', pinned' if pinned else ''})")


nb.kept_as(SharedType, lambda ty: i32)


# -- addresses --------------------------------------------------------------------------------------------------------

def shared_symbol(builder: ir.IRBuilder) -> Any:
    """The block's dynamic shared memory, aligned for every swizzle."""
    module = builder.module
    if "gemmkit_shared" in module.globals:
        return module.globals["gemmkit_shared"]
    symbol = ir.GlobalVariable(module, ir.ArrayType(i8, 0), "gemmkit_shared", addrspace=SHARED)
    symbol.linkage, symbol.align = "external", 1024
    return symbol


def shared_pointer(builder: ir.IRBuilder, ty: SharedType, byte_offset: ir.Value, elements: list, llvm_type: ir.Type) -> Any:
    """``base + byte_offset + sum(elements)`` as a pointer; separate terms become register + immediate addressing."""
    pointer = builder.gep(shared_symbol(builder), [i32(0), byte_offset])
    size = ty.dtype.itemsize
    for term in elements:
        pointer = builder.gep(pointer, [builder.mul(term, i32(size))], inbounds=True)
    return builder.bitcast(pointer, ir.PointerType(llvm_type, addrspace=SHARED))


def global_pointer(builder: ir.IRBuilder, ty: ViewType, view: nb.cgutils._StructProxy, terms: list[list],
                   llvm_type: ir.Type) -> Any:
    """The address of coordinates given as a sum of terms (base, offset): each is one 64-bit displacement."""
    pointer = builder.inttoptr(view.address, ir.PointerType(i8, addrspace=GLOBAL))
    for coordinates in terms:
        if ty.near:
            pointer = builder.gep(pointer, [builder.sext(near_bytes(builder, ty, view, coordinates), i64)], inbounds=True)
            continue
        elements = None
        for axis, coordinate in enumerate(coordinates):
            wide = coordinate if coordinate.type == i64 else builder.sext(coordinate, i64)
            if axis != ty.unit:
                wide = builder.mul(wide, getattr(view, f"stride{axis}"), flags=("nsw",))
            elements = wide if elements is None else builder.add(elements, wide, flags=("nsw",))
        if elements is not None:
            pointer = builder.gep(pointer, [builder.mul(elements, i64(ty.dtype.itemsize), flags=("nsw",))], inbounds=True)
    return builder.bitcast(pointer, ir.PointerType(llvm_type, addrspace=GLOBAL))


def near_bytes(builder: ir.IRBuilder, ty: ViewType, view: nb.cgutils._StructProxy, coordinates: list) -> Any:
    """How far coordinates lead into a near view, in 32 bits."""
    elements = i32(0)
    for axis, coordinate in enumerate(coordinates):
        steps = coordinate if coordinate.type == i32 else builder.trunc(coordinate, i32)
        if axis != ty.unit:
            steps = builder.mul(steps, builder.trunc(getattr(view, f"stride{axis}"), i32))
        elements = builder.add(elements, steps)
    return builder.mul(elements, i32(ty.dtype.itemsize))


def coordinates_of(context: Context, builder: ir.IRBuilder, ty: types.Type, value: ir.Value,
                   kind: types.Type | None = None) -> list:
    """A coordinate, a tuple of them or a tile's Coord as a list of LLVM integers of a ``kind``, a view's or 32 bits wide."""
    kind = index if kind is None else kind
    parts = getattr(ty, "coordinate_types", None)
    if parts is None:
        parts = ty.types if isinstance(ty, types.BaseTuple) else None
    if parts is None:
        return [context.cast(builder, value, ty, kind)]
    return [context.cast(builder, builder.extract_value(value, n), t, kind) for n, t in enumerate(parts)]


def coordinate_count(ty: types.Type) -> int:
    """How many coordinates a type carries; 0 when it is none."""
    parts = getattr(ty, "coordinate_types", None)
    if parts is None and isinstance(ty, types.BaseTuple):
        parts = ty.types
    if parts is None:
        return 1 if isinstance(ty, types.Integer) else 0
    return len(parts) if all(isinstance(p, types.Integer) for p in parts) else 0


# -- indexing ---------------------------------------------------------------------------------------------------------

def proxy(context: Context, builder: ir.IRBuilder, ty: types.Type, value: ir.Value | None) -> Any:
    """A view's fields, in a slot: as values they change the loops of float64 (tools.sass_gate)."""
    slot = (nb.cgutils.alloca_once(builder, context.get_value_type(ty), zfill=True) if value is None else
            nb.cgutils.alloca_once_value(builder, value))
    return nb.cgutils.create_struct_proxy(ty)(context, builder, ref=slot)


@operation(operator.getitem)
def _getitem(context: TypingContext, *args: types.Type) -> Any:
    if len(args) != 2:
        return None
    ty, key = args
    if isinstance(ty, ViewType) and coordinate_count(key) == ty.ndim:
        def load_global(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
            where = coordinates_of(c, b, key, v[1], ty.coordinate)
            if ty.dtype.names is not None:
                return _load_record(c, b, ty, v[0], where)
            llvm = c.get_data_type(ty.element)
            pointer = global_pointer(b, ty, proxy(c, b, ty, v[0]), [where], llvm)
            value = b.load(pointer)
            value.align = access_alignment(ty, 1)
            return c.data_model_manager[ty.element].from_data(b, value)

        return signature(ty.element, *args), load_global
    if isinstance(ty, SharedType) and isinstance(key, types.Integer):
        def load_shared(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
            llvm = c.get_data_type(ty.element)
            value = b.load(shared_pointer(b, ty, v[0], coordinates_of(c, b, key, v[1]), llvm))
            value.align = ty.dtype.itemsize
            return c.data_model_manager[ty.element].from_data(b, value)

        return signature(ty.element, *args), load_shared
    return None


@operation(operator.setitem)
def _setitem(context: TypingContext, *args: types.Type) -> Any:
    if len(args) != 3:
        return None
    ty, key, given = args
    is_view = isinstance(ty, ViewType) and coordinate_count(key) == ty.ndim
    is_shared = isinstance(ty, SharedType) and isinstance(key, types.Integer)
    if not (is_view or is_shared):
        return None
    is_python = given == types.int64 and ty.dtype.kind in "iu"           # Numba's type of Python's integers, of len() too
    got = misfit_of_type(given, ty.dtype) if is_view and not is_python else None
    if got is not None:
        raise TypeError(refusal("this array", got, ty.dtype))

    if is_view and ty.readonly:
        raise nb.TypingError(READ_ONLY)

    def store(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        where = coordinates_of(c, b, key, v[1], ty.coordinate if is_view else index)
        if is_view and ty.dtype.names is not None:
            return _store_record(c, b, ty, v[0], where, c.cast(b, v[2], given, ty.element))
        value = c.data_model_manager[ty.element].as_data(b, c.cast(b, v[2], given, ty.element))
        pointer = (global_pointer(b, ty, proxy(c, b, ty, v[0]), [where], value.type) if is_view
                   else shared_pointer(b, ty, v[0], where, value.type))
        b.store(value, pointer, align=access_alignment(ty, 1) if is_view else ty.dtype.itemsize)
        return c.get_dummy_value()

    return signature(types.none, *args), store


def _part_pointers(c: Context, b: ir.IRBuilder, ty: ViewType, view: ir.Value, where: list) -> Any:
    """Each part of a record of a view: its type, and a pointer (a record need not be aligned to its size)."""
    start, at = global_pointer(b, ty, proxy(c, b, ty, view), [where], i8), 0
    for part in ty.element.parts:
        llvm = c.get_data_type(part)
        yield part, b.bitcast(b.gep(start, [i32(at)], inbounds=True), ir.PointerType(llvm, addrspace=GLOBAL))
        at += ty.dtype.itemsize // len(ty.element.parts)


def _load_record(c: Context, b: ir.IRBuilder, ty: ViewType, view: ir.Value, where: list) -> Any:
    from gemmkit.lang.records import of_parts

    return of_parts(c, b, ty.element, [c.data_model_manager[part].from_data(b, b.load(pointer))
                                       for part, pointer in _part_pointers(c, b, ty, view, where)])


def _store_record(c: Context, b: ir.IRBuilder, ty: ViewType, view: ir.Value, where: list, value: ir.Value) -> Any:
    from gemmkit.lang.records import part_of

    for n, (part, pointer) in enumerate(_part_pointers(c, b, ty, view, where)):
        b.store(c.data_model_manager[part].as_data(b, part_of(b, ty.element, value, n)), pointer)
    return c.get_dummy_value()


@nb.attributes_of(ViewType)
def _view_attribute_type(ty: ViewType, attr: str) -> Any:
    if attr == "shape":
        return types.UniTuple(ty.coordinate, ty.ndim)
    return None


@nb.lowering_registry.lower_getattr(ViewType, "shape")
def _shape(context: Context, builder: ir.IRBuilder, ty: ViewType, value: ir.Value) -> Any:
    view = proxy(context, builder, ty, value)
    parts = [getattr(view, f"extent{axis}") for axis in range(ty.ndim)]
    return context.make_tuple(builder, types.UniTuple(ty.coordinate, ty.ndim), parts)


# --------------------------------------------------------------------------------------------------
# The matrices of a group of products, by tables in memory: their addresses, extents and strides, and other sizes.
#
# A group's products have matrices of any sizes at any places, but of one type of view (dtype, contiguous axis,
# alignment). A kernel takes the view of one of them, and `member_of` makes the others' of two tables: ``sizes`` of int32,
# ``places`` of int64, a row a product.

FIRST, M, N, K = range(4)              # columns of `sizes`: the product's first tile, and its sizes
EXTENTS = 4                            # the first of the extents: two of each operand
PLACES = 3                             # columns of `places` of each operand: address, and the strides of both axes
SIZES_DTYPE, PLACES_DTYPE = np.dtype(np.int32), np.dtype(np.int64)



def _entry(c: Context, b: ir.IRBuilder, table: ViewType, value: ir.Value, row: ir.Value, column: int,
           kind: types.Type) -> Any:
    """A number of a table of two dimensions."""
    pointer = global_pointer(b, table, proxy(c, b, table, value), [[row, i32(column)]], kind)
    found = b.load(pointer)
    found.align = kind.width // 8
    return found


def _is_table(table: types.Type, dtype: np.dtype, ndim: int) -> bool:
    return isinstance(table, ViewType) and table.dtype == dtype and table.ndim == ndim


def _type_number_of(context: TypingContext, table: types.Type, row: types.Type, column: types.Type) -> Any:
    if not (_is_table(table, SIZES_DTYPE, 2) and isinstance(row, types.Integer)
            and isinstance(column, types.IntegerLiteral)):
        return None
    return signature(index, table, row, column), lambda c, b, s, v: (
        _entry(c, b, table, v[0], coordinates_of(c, b, row, v[1])[0], int(column.literal_value), i32))


@atom(_type_number_of)
def number_of(table: Any, row: int, column: int) -> int:
    """An entry of a table of int32, as a coordinate; ``column`` is a compile-time number."""
    return int(table[int(row), int(column)])


def _type_entry_of(context: TypingContext, numbers: types.Type, at: types.Type) -> Any:
    if not (_is_table(numbers, SIZES_DTYPE, 1) and isinstance(at, types.Integer)):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        found = b.load(global_pointer(b, numbers, proxy(c, b, numbers, v[0]), [coordinates_of(c, b, at, v[1])], i32))
        found.align = 4
        return found

    return signature(index, numbers, at), codegen


@atom(_type_entry_of)
def entry_of(numbers: Any, at: int) -> int:
    """An entry of a list of int32, as a coordinate."""
    return int(numbers[int(at)])


def _type_member_of(context: TypingContext, view: types.Type, sizes: types.Type, places: types.Type, row: types.Type,
                    operand: types.Type) -> Any:
    if not (_is_table(sizes, SIZES_DTYPE, 2) and _is_table(places, PLACES_DTYPE, 2) and isinstance(row, types.Integer)
            and isinstance(operand, types.IntegerLiteral)):
        return None
    if not isinstance(view, ViewType):
        return signature(view, view, sizes, places, row, operand), lambda c, b, s, v: v[0]
    if view.ndim != 2 or view.wide:
        return None
    which = int(operand.literal_value)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
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


# --------------------------------------------------------------------------------------------------
# One of two arrays, chosen when the kernel runs: what is read from it is read by one instruction, whichever it is.


def _common(one: ViewType, other: ViewType) -> ViewType:
    """The type of a view that may be either: with what is known of both."""
    return ViewType(one.dtype, one.ndim, one.unit if one.unit == other.unit else None, min(one.alignment, other.alignment),
                    one.wide or other.wide, one.readonly or other.readonly)


def _type_either(context: TypingContext, condition: types.Type, one: types.Type, other: types.Type) -> Any:
    if not isinstance(condition, types.Boolean) or not isinstance(one, ViewType) or not isinstance(other, ViewType):
        return None
    if one.dtype != other.dtype or one.ndim != other.ndim:
        return None
    to = _common(one, other)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        is_one = v[0] if v[0].type == i1 else b.trunc(v[0], i1)
        given = [(ty, proxy(c, b, ty, value)) for ty, value in ((one, v[1]), (other, v[2]))]
        out = proxy(c, b, to, None)
        out.address = b.select(is_one, *(view.address for _, view in given))
        for axis in range(to.ndim):
            extents = [c.cast(b, getattr(view, f"extent{axis}"), ty.coordinate, to.coordinate) for ty, view in given]
            setattr(out, f"extent{axis}", b.select(is_one, *extents))
            if axis != to.unit:
                strides = [i64(1) if axis == ty.unit else getattr(view, f"stride{axis}") for ty, view in given]
                setattr(out, f"stride{axis}", b.select(is_one, *strides))
        return out._getvalue()

    return signature(to, condition, one, other), codegen


@atom(_type_either)
def either(condition: bool, one: Any, other: Any) -> Any:
    """The view ``one`` where the condition holds, else ``other``: two views of one dtype and as many dimensions. Accesses
    are as wide as both allow."""
    return one if condition else other
