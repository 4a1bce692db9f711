"""Loads and stores of 1 to 16 bytes a thread, global and shared.

An access of several elements is one instruction where the alignment class of the view allows 16 bytes, else as few as
it allows. ``base`` and ``offset`` are given apart: their sum is the position, and keeping the compile-time part apart
makes it the immediate of the address.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import atom
from gemmkit.lang.dtypes import DTypeType, dtype_type
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import (
    SharedPointer,
    View,
    access_alignment,
    piece_bytes,
    piece_elements,
    record_accesses,
)
from gemmkit.lang.memory import (
    GLOBAL,
    READ_ONLY,
    SharedType,
    ViewType,
    coordinate_count,
    coordinates_of,
    global_pointer,
    proxy,
    shared_pointer,
)
from gemmkit.lang.narrowing import misfit_of_type, refusal
from gemmkit.lang.numba_hooks import TypingError, ir, signature, types
from gemmkit.lang.number_types import PackedType, RecordType
from gemmkit.lang.record_types import of_parts, part_of
from gemmkit.lang.records import part_size
from gemmkit.ptx.pinned import pointer_at

i16, i32 = ir.IntType(16), ir.IntType(32)


def unit_type(size: int, itemsize: int) -> Any:
    """The LLVM type of one access: 32-bit (or 64-bit) lanes, so that it becomes ld.v4.b32 and the like."""
    lane = 8 if itemsize == 8 else 4
    if size <= lane:
        return ir.IntType(8 * size)
    return ir.VectorType(ir.IntType(8 * lane), size // lane)


def unpack(context: Any, builder: Any, element: types.Type, value: Any, count: int) -> list:
    """The elements in an access, in memory order, as device values."""
    if isinstance(element, types.Complex):
        part = element.underlying_float
        parts = unpack(context, builder, part, value, 2 * count)
        return [_complex(context, builder, element, re, im) for re, im in zip(parts[::2], parts[1::2])]
    if isinstance(element, PackedType):
        return unpack(context, builder, types.uint32, value, count)
    if isinstance(element, RecordType):
        words = unpack(context, builder, _word(element), value, count * len(element.parts))
        return records_of_words(context, builder, element, words)
    model = context.data_model_manager[element]
    data = context.get_data_type(element)
    if count == 1:
        return [model.from_data(builder, builder.bitcast(value, data))]
    if data == ir.HalfType() or data == i16:
        halves: list = []                                  # as in `pack`
        for word in as_words(builder, value):
            halves += assembly(builder, "mov.b32 {$0, $1}, $2;", [i16, i16], [word], pure=True)
        return [model.from_data(builder, builder.bitcast(half, data)) for half in halves]
    if data == ir.IntType(8) and count >= 4:
        # By hand, as LLVM cannot look into: of a vector of bytes NVVM forgets to extend the sign of the first, and shifts
        # it turns into accesses of single bytes.
        return [model.from_data(builder, builder.trunc(byte, data)) for word in as_words(builder, value)
                for n in range(4) for byte in assembly(builder, f"bfe.u32 $0, $1, {8 * n}, 8;", [i32], [word], pure=True)]
    vector = builder.bitcast(value, ir.VectorType(data, count))
    return [model.from_data(builder, builder.extract_element(vector, i32(n))) for n in range(count)]


def _word(element: RecordType) -> types.Type:
    """The integer that a record's part is in memory."""
    return getattr(types, f"uint{8 * element.dtype.itemsize // len(element.parts)}")


def records_of_words(context: Any, builder: Any, element: RecordType, words: list) -> list:
    count, out = len(element.parts), []
    for at in range(0, len(words), count):
        parts = []
        for ty, word in zip(element.parts, words[at:at + count]):
            model = context.data_model_manager[ty]
            parts.append(model.from_data(builder, builder.bitcast(word, context.get_data_type(ty))))
        out.append(of_parts(context, builder, element, parts))
    return out


def words_of_records(context: Any, builder: Any, element: RecordType, values: list) -> list:
    word = context.get_data_type(_word(element))
    return [builder.bitcast(context.data_model_manager[ty].as_data(builder, part_of(builder, element, value, n)), word)
            for value in values for n, ty in enumerate(element.parts)]


def _complex(context: Any, builder: Any, element: types.Type, real: Any, imaginary: Any) -> Any:
    value = context.make_complex(builder, element)
    value.real, value.imag = real, imaginary
    return value._getvalue()


def as_words(b: Any, value: Any) -> list:
    """An access of 4 bytes or more as 32-bit words."""
    if isinstance(value.type, ir.VectorType):
        lanes = value.type.count * value.type.element.width // 32
        vector = b.bitcast(value, ir.VectorType(i32, lanes))
        return [b.extract_element(vector, i32(n)) for n in range(lanes)]
    if value.type.width == 64:
        return as_words(b, b.bitcast(value, ir.VectorType(i32, 2)))
    return [value]


def pack(context: Any, builder: Any, element: types.Type, values: list, unit: Any) -> Any:
    """Device values to one access."""
    if isinstance(element, types.Complex):
        parts = [builder.extract_value(v, n) for v in values for n in (0, 1)]
        return pack(context, builder, element.underlying_float, parts, unit)
    if isinstance(element, PackedType):
        return pack(context, builder, types.uint32, values, unit)
    if isinstance(element, RecordType):
        return pack(context, builder, _word(element), words_of_records(context, builder, element, values), unit)
    model = context.data_model_manager[element]
    data = context.get_data_type(element)
    values = [model.as_data(builder, v) for v in values]
    if len(values) == 1:
        return builder.bitcast(values[0], unit)
    if data == ir.HalfType() or data == i16:
        # As pairs in words that LLVM cannot look into: it would take a vector of 16-bit elements apart again, and move
        # it in two accesses of half the width.
        values = [builder.bitcast(v, i16) for v in values]
        values = [assembly(builder, "mov.b32 $0, {$1, $2};", [i32], pair, pure=True)[0]
                  for pair in (values[n:n + 2] for n in range(0, len(values), 2))]
        if len(values) == 1:
            return builder.bitcast(values[0], unit)
        data = i32
    if data == ir.IntType(8) and len(values) >= 4:
        values = [_word_of_bytes(builder, values[n:n + 4]) for n in range(0, len(values), 4)]
        if len(values) == 1:
            return builder.bitcast(values[0], unit)
        data = i32
    vector = ir.Constant(ir.VectorType(data, len(values)), ir.Undefined)
    for n, value in enumerate(values):
        vector = builder.insert_element(vector, value, i32(n))
    return builder.bitcast(vector, unit)


def _word_of_bytes(builder: Any, values: list) -> Any:
    """Four bytes in a word that LLVM cannot look into, for the reason that pairs are."""
    word = builder.zext(values[0], i32)
    for n, value in enumerate(values[1:], 1):
        word = builder.or_(word, builder.shl(builder.zext(value, i32), i32(8 * n)))
    return assembly(builder, "mov.b32 $0, $1;", [i32], [word], pure=True)[0]


def cast_elements(context: Any, builder: Any, ty: types.BaseTuple, value: Any, element: types.Type) -> list:
    return [context.cast(builder, builder.extract_value(value, n), t, element) for n, t in enumerate(ty.types)]


def _global_access(view: ViewType, axis: int, count: int) -> tuple[int, Any]:
    width = piece_elements(view, axis, count)
    return width, unit_type(width * view.dtype.itemsize, view.dtype.itemsize)


def global_pointers(c: Any, b: Any, view: ViewType, axis: int, count: int, value: Any, positions: list) -> Any:
    width, unit = _global_access(view, axis, count)
    fields = proxy(c, b, view, value)
    wide = c.get_value_type(view.coordinate)
    for at in range(0, count, width):
        step = [wide(at if n == axis else 0) for n in range(view.ndim)]
        terms = [coordinates_of(c, b, ty, v, view.coordinate) for ty, v in positions]
        terms[-1] = [b.add(x, s) for x, s in zip(terms[-1], step)]
        yield at, width, global_pointer(b, view, fields, terms, unit), unit


def record_pointers(c: Any, b: Any, view: ViewType, axis: int, count: int, value: Any, positions: list) -> Any:
    """The accesses to ``count`` records: pointers, and how many parts each takes."""
    size = part_size(view.dtype)
    run, step = record_accesses(view, axis, count)
    unit = unit_type(step, size)
    fields = proxy(c, b, view, value)
    wide = c.get_value_type(view.coordinate)
    for at in range(0, count, run):
        ahead = [wide(at if n == axis else 0) for n in range(view.ndim)]
        terms = [coordinates_of(c, b, ty, v, view.coordinate) for ty, v in positions]
        terms[-1] = [b.add(x, s) for x, s in zip(terms[-1], ahead)]
        start = global_pointer(b, view, fields, terms, ir.IntType(8))
        for byte in range(0, run * view.dtype.itemsize, step):
            pointer = b.gep(start, [i32(byte)], inbounds=True)
            yield b.bitcast(pointer, ir.PointerType(unit, addrspace=GLOBAL)), step // size


def is_position(view: Any, *positions: Any) -> bool:
    return isinstance(view, ViewType) and all(coordinate_count(p) == view.ndim for p in positions)


def _type_load_global(context: Any, view: Any, axis: Any, base: Any, offset: Any, count: Any) -> Any:
    if not is_position(view, base, offset) or not isinstance(count, types.IntegerLiteral):
        return None
    n, along = int(count.literal_value), int(axis.literal_value)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        out: list = []
        if isinstance(view.element, RecordType):
            for pointer, words in record_pointers(c, b, view, along, n, v[0], [(base, v[2]), (offset, v[3])]):
                value = b.load(pointer)
                value.align = words * part_size(view.dtype)
                if isinstance(view.element, PackedType) and words % 2 == 0:
                    out += unpack(c, b, view.element, value, words // 2)
                else:
                    out += unpack(c, b, _word(view.element), value, words)
            if len(out) == n:                                  # records already
                return c.make_tuple(b, s.return_type, out)
            return c.make_tuple(b, s.return_type, records_of_words(c, b, view.element, out))
        for _, width, pointer, _unit in global_pointers(c, b, view, along, n, v[0], [(base, v[2]), (offset, v[3])]):
            value = b.load(pointer)
            value.align = access_alignment(view, width)
            out += unpack(c, b, view.element, value, width)
        return c.make_tuple(b, s.return_type, out)

    return signature(types.UniTuple(view.element, n), view, axis, base, offset, count), codegen


@atom(_type_load_global)
def load_global(view: View, axis: int, base: Any, offset: Any, count: int) -> tuple:
    """``count`` elements of a view along ``axis`` (a compile-time number), starting at ``base + offset``."""
    return view.load(axis, tuple(map(operator.add, base, offset)), count)


def _type_store_global(context: Any, view: Any, axis: Any, base: Any, offset: Any, values: Any) -> Any:
    if not is_position(view, base, offset) or not isinstance(values, types.BaseTuple):
        return None
    if view.readonly:
        raise TypingError(READ_ONLY)
    along, n = int(axis.literal_value), len(values.types)
    for ty in dict.fromkeys(values.types):
        got = misfit_of_type(ty, view.dtype)
        if got is not None:
            raise ConfigError(refusal("an array", got, view.dtype))

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        given = cast_elements(c, b, values, v[4], view.element)
        if isinstance(view.element, RecordType):
            parts, at = words_of_records(c, b, view.element, given), 0
            for pointer, words in record_pointers(c, b, view, along, n, v[0], [(base, v[2]), (offset, v[3])]):
                if isinstance(view.element, PackedType) and words % 2 == 0:
                    piece = pack(c, b, view.element, given[at // 2:(at + words) // 2], pointer.type.pointee)
                else:
                    piece = pack(c, b, _word(view.element), parts[at:at + words], pointer.type.pointee)
                b.store(piece, pointer, align=words * part_size(view.dtype))
                at += words
            return c.get_dummy_value()
        for at, width, pointer, unit in global_pointers(c, b, view, along, n, v[0], [(base, v[2]), (offset, v[3])]):
            b.store(pack(c, b, view.element, given[at:at + width], unit), pointer, align=access_alignment(view, width))
        return c.get_dummy_value()

    return signature(types.none, view, axis, base, offset, values), codegen


@atom(_type_store_global)
def store_global(view: View, axis: int, base: Any, offset: Any, values: tuple) -> None:
    """Store elements of a view along ``axis``, starting at ``base + offset``, converted to its dtype."""
    view.store(axis, tuple(map(operator.add, base, offset)), values)


def _type_near(context: Any, view: Any) -> Any:
    if not isinstance(view, ViewType):
        return None
    found = ViewType(view.dtype, view.ndim, view.unit, view.alignment, view.wide, view.readonly, near=True)
    return signature(found, view), lambda c, b, s, v: v[0]


@atom(_type_near)
def near(view: View) -> View:
    """A view of which all elements lie within 2^31 bytes of the first: places in it are computed in 32 bits."""
    return view


# -- shared -----------------------------------------------------------------------------------------------------------

def _type_shared(context: Any, dtype: Any, offset: Any) -> Any:
    named = dtype_type(dtype)
    if named is None or not isinstance(offset, types.Integer):
        return None
    from gemmkit.lang.number_types import numpy_dtype
    from gemmkit.lang.scalars import index

    return (signature(SharedType(numpy_dtype(named.target)), dtype, offset),
            lambda c, b, s, v: c.cast(b, v[1], offset, index))


@atom(_type_shared)
def shared(dtype: np.dtype, offset: int) -> SharedPointer:
    """A pointer to elements of ``dtype`` that start ``offset`` bytes into the block's dynamic shared memory."""
    return SharedPointer(np.dtype(dtype), int(offset))


def _type_repoint(context: Any, pointer: Any, dtype: Any, distance: Any) -> Any:
    if not isinstance(pointer, SharedType) or not isinstance(dtype, DTypeType) or not isinstance(distance, types.Integer):
        return None
    from gemmkit.lang.number_types import numpy_dtype
    from gemmkit.lang.scalars import index

    return (signature(SharedType(numpy_dtype(dtype.target), pointer.pinned), pointer, dtype, distance),
            lambda c, b, s, v: b.add(v[0], c.cast(b, v[2], distance, index)))


@atom(_type_repoint)
def repoint(pointer: SharedPointer, dtype: np.dtype, distance: int) -> SharedPointer:
    """A pointer to elements of ``dtype``, ``distance`` bytes behind another pointer."""
    return pointer.moved(np.dtype(dtype), int(distance))


def _shared_pieces(pointer: SharedType, count: int) -> tuple[int, Any]:
    size = pointer.dtype.itemsize
    step = piece_bytes(count * size, 16)
    return step // size, unit_type(step, part_size(pointer.dtype))


def _type_load_shared(context: Any, pointer: Any, base: Any, offset: Any, count: Any) -> Any:
    if not isinstance(pointer, SharedType) or not isinstance(count, types.IntegerLiteral):
        return None
    n = int(count.literal_value)
    width, unit = _shared_pieces(pointer, n)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        terms = coordinates_of(c, b, base, v[1]) + coordinates_of(c, b, offset, v[2])
        out = []
        for at in range(0, n, width):
            value = b.load(pointer_at(b, pointer, v[0], [*terms, i32(at)], unit))
            value.align = width * pointer.dtype.itemsize
            out += unpack(c, b, pointer.element, value, width)
        return c.make_tuple(b, s.return_type, out)

    return signature(types.UniTuple(pointer.element, n), pointer, base, offset, count), codegen


@atom(_type_load_shared)
def load_shared(pointer: SharedPointer, base: int, offset: int, count: int) -> tuple:
    """``count`` consecutive elements from ``base + offset``; the position must be aligned to the access."""
    return pointer.from_base(int(base)).load(int(base) + int(offset), count)


def _type_store_shared(context: Any, pointer: Any, base: Any, offset: Any, values: Any) -> Any:
    if not isinstance(pointer, SharedType) or not isinstance(values, types.BaseTuple):
        return None
    n = len(values.types)
    width, unit = _shared_pieces(pointer, n)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        terms = coordinates_of(c, b, base, v[1]) + coordinates_of(c, b, offset, v[2])
        given = cast_elements(c, b, values, v[3], pointer.element)
        for at in range(0, n, width):
            where = shared_pointer(b, pointer, v[0], [*terms, i32(at)], unit)
            b.store(pack(c, b, pointer.element, given[at:at + width], unit), where, align=width * pointer.dtype.itemsize)
        return c.get_dummy_value()

    return signature(types.none, pointer, base, offset, values), codegen


@atom(_type_store_shared)
def store_shared(pointer: SharedPointer, base: int, offset: int, values: tuple) -> None:
    """Store consecutive elements from ``base + offset``, converted to the pointer's dtype."""
    pointer.store(int(base) + int(offset), values)
