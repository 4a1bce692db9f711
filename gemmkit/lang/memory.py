"""Memory as device code sees it: views of global arrays, and typed pointers into shared memory.

A global ``View`` indexes like a NumPy array (``data[i]``, ``data[i, j]``), without wrap-around for negative indices. Its
type holds what decides the code: element type, dimensions, which axis has stride 1, and the alignment *class*; its value
holds address, extents and strides, so a new size compiles nothing.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from gemmkit.lang.host import access_alignment
from gemmkit.lang.narrowing import misfit_of_type, refusal
from gemmkit.lang.numba_hooks import (
    AttributeTemplate,
    TypingError,
    cgutils,
    ir,
    lowering_registry,
    models,
    operation,
    register_model,
    signature,
    types,
    typing_registry,
)
from gemmkit.lang.number_types import numba_type
from gemmkit.lang.scalars import index, wide_index

i8, i32, i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
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


@register_model(ViewType)
class _ViewModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: ViewType):
        members = [("address", types.uint64)]
        members += [(f"extent{axis}", fe_type.coordinate) for axis in range(fe_type.ndim)]
        members += [(f"stride{axis}", types.int64) for axis in fe_type.strided_axes]
        super().__init__(dmm, fe_type, members)


class SharedType(types.Type):
    """A typed pointer into the block's dynamic shared memory; the value is a byte offset.

    The value of a ``pinned`` pointer is an address in the shared window, with the bases of all its accesses in it
    (`gemmkit.ptx.memory.pinned`).
    """

    def __init__(self, dtype: np.dtype, pinned: bool = False):
        self.dtype, self.pinned = np.dtype(dtype), pinned
        self.element = numba_type(dtype)
        super().__init__(f"Shared({self.element if self.dtype.names else self.dtype}{', pinned' if pinned else ''})")


@register_model(SharedType)
class _SharedModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: SharedType):
        super().__init__(dmm, fe_type, i32)


# -- addresses --------------------------------------------------------------------------------------------------------

def shared_symbol(builder: Any) -> Any:
    """The block's dynamic shared memory, aligned for every swizzle."""
    module = builder.module
    if "gemmkit_shared" in module.globals:
        return module.globals["gemmkit_shared"]
    symbol = ir.GlobalVariable(module, ir.ArrayType(i8, 0), "gemmkit_shared", addrspace=SHARED)
    symbol.linkage, symbol.align = "external", 1024
    return symbol


def shared_pointer(builder: Any, ty: SharedType, byte_offset: Any, elements: list, llvm_type: Any) -> Any:
    """``base + byte_offset + sum(elements)`` as a pointer; separate terms become register + immediate addressing."""
    pointer = builder.gep(shared_symbol(builder), [i32(0), byte_offset])
    size = ty.dtype.itemsize
    for term in elements:
        pointer = builder.gep(pointer, [builder.mul(term, i32(size))], inbounds=True)
    return builder.bitcast(pointer, ir.PointerType(llvm_type, addrspace=SHARED))


def global_pointer(builder: Any, ty: ViewType, view: Any, terms: list[list], llvm_type: Any) -> Any:
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


def near_bytes(builder: Any, ty: ViewType, view: Any, coordinates: list) -> Any:
    """How far coordinates lead into a near view, in 32 bits."""
    elements = i32(0)
    for axis, coordinate in enumerate(coordinates):
        steps = coordinate if coordinate.type == i32 else builder.trunc(coordinate, i32)
        if axis != ty.unit:
            steps = builder.mul(steps, builder.trunc(getattr(view, f"stride{axis}"), i32))
        elements = builder.add(elements, steps)
    return builder.mul(elements, i32(ty.dtype.itemsize))


def coordinates_of(context: Any, builder: Any, ty: types.Type, value: Any, kind: Any = None) -> list:
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

def proxy(context: Any, builder: Any, ty: types.Type, value: Any) -> Any:
    """A view's fields, in a slot: as values they change the loops of float64 (tools.sass_gate)."""
    slot = (cgutils.alloca_once(builder, context.get_value_type(ty), zfill=True) if value is None else
            cgutils.alloca_once_value(builder, value))
    return cgutils.create_struct_proxy(ty)(context, builder, ref=slot)


@operation(operator.getitem)
def _getitem(context: Any, *args: Any) -> Any:
    if len(args) != 2:
        return None
    ty, key = args
    if isinstance(ty, ViewType) and coordinate_count(key) == ty.ndim:
        def load_global(c: Any, b: Any, s: Any, v: Any) -> Any:
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
        def load_shared(c: Any, b: Any, s: Any, v: Any) -> Any:
            llvm = c.get_data_type(ty.element)
            value = b.load(shared_pointer(b, ty, v[0], coordinates_of(c, b, key, v[1]), llvm))
            value.align = ty.dtype.itemsize
            return c.data_model_manager[ty.element].from_data(b, value)

        return signature(ty.element, *args), load_shared
    return None


@operation(operator.setitem)
def _setitem(context: Any, *args: Any) -> Any:
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
        raise TypingError(READ_ONLY)

    def store(c: Any, b: Any, s: Any, v: Any) -> Any:
        where = coordinates_of(c, b, key, v[1], ty.coordinate if is_view else index)
        if is_view and ty.dtype.names is not None:
            return _store_record(c, b, ty, v[0], where, c.cast(b, v[2], given, ty.element))
        value = c.data_model_manager[ty.element].as_data(b, c.cast(b, v[2], given, ty.element))
        pointer = (global_pointer(b, ty, proxy(c, b, ty, v[0]), [where], value.type) if is_view
                   else shared_pointer(b, ty, v[0], where, value.type))
        b.store(value, pointer, align=access_alignment(ty, 1) if is_view else ty.dtype.itemsize)
        return c.get_dummy_value()

    return signature(types.none, *args), store


def _part_pointers(c: Any, b: Any, ty: ViewType, view: Any, where: list) -> Any:
    """Each part of a record of a view: its type, and a pointer (a record need not be aligned to its size)."""
    start, at = global_pointer(b, ty, proxy(c, b, ty, view), [where], i8), 0
    for part in ty.element.parts:
        llvm = c.get_data_type(part)
        yield part, b.bitcast(b.gep(start, [i32(at)], inbounds=True), ir.PointerType(llvm, addrspace=GLOBAL))
        at += ty.dtype.itemsize // len(ty.element.parts)


def _load_record(c: Any, b: Any, ty: ViewType, view: Any, where: list) -> Any:
    from gemmkit.lang.record_types import of_parts

    return of_parts(c, b, ty.element, [c.data_model_manager[part].from_data(b, b.load(pointer))
                                       for part, pointer in _part_pointers(c, b, ty, view, where)])


def _store_record(c: Any, b: Any, ty: ViewType, view: Any, where: list, value: Any) -> Any:
    from gemmkit.lang.record_types import part_of

    for n, (part, pointer) in enumerate(_part_pointers(c, b, ty, view, where)):
        b.store(c.data_model_manager[part].as_data(b, part_of(b, ty.element, value, n)), pointer)
    return c.get_dummy_value()


@typing_registry.register_attr
class _ViewAttributes(AttributeTemplate):
    key = ViewType

    def generic_resolve(self, ty: ViewType, attr: str) -> Any:
        if attr == "shape":
            return types.UniTuple(ty.coordinate, ty.ndim)
        return None


@lowering_registry.lower_getattr(ViewType, "shape")
def _shape(context: Any, builder: Any, ty: ViewType, value: Any) -> Any:
    view = proxy(context, builder, ty, value)
    parts = [getattr(view, f"extent{axis}") for axis in range(ty.ndim)]
    return context.make_tuple(builder, types.UniTuple(ty.coordinate, ty.ndim), parts)
