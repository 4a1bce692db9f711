"""Loads and stores of 1 to 16 bytes a thread, global and shared.

An access of several elements is one instruction where the alignment class of the view allows 16 bytes, else as few as
it allows. ``base`` and ``offset`` are given apart: their sum is the position, and keeping the compile-time part apart
makes it the immediate of the address.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import (
    SharedPointer,
    View,
    access_alignment,
    misfit_of_type,
    narrowed,
    piece_bytes,
    piece_elements,
    record_accesses,
    refusal,
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
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, TypingError, Values, atom, ir, signature, types
from gemmkit.lang.number_rules import Record, part_size, scalars
from gemmkit.lang.records import of_parts, part_of
from gemmkit.lang.scalars import DTypeType, PackedType, RecordType, assembly, dtype_type, index, numpy_dtype
from gemmkit.ptx.registers import elements, from_registers, pointer_at, to_registers

i8, i16, i32, i64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def unit_type(size: int, itemsize: int) -> Any:
    """The LLVM type of one access: 32-bit (or 64-bit) lanes, so that it becomes ld.v4.b32 and the like."""
    lane = 8 if itemsize == 8 else 4
    if size <= lane:
        return ir.IntType(8 * size)
    return ir.VectorType(ir.IntType(8 * lane), size // lane)


def unpack(context: Context, builder: ir.IRBuilder, element: types.Type, value: ir.Value, count: int) -> list:
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


def records_of_words(context: Context, builder: ir.IRBuilder, element: RecordType, words: list) -> list:
    count, out = len(element.parts), []
    for at in range(0, len(words), count):
        parts = []
        for ty, word in zip(element.parts, words[at:at + count]):
            model = context.data_model_manager[ty]
            parts.append(model.from_data(builder, builder.bitcast(word, context.get_data_type(ty))))
        out.append(of_parts(context, builder, element, parts))
    return out


def words_of_records(context: Context, builder: ir.IRBuilder, element: RecordType, values: list) -> list:
    word = context.get_data_type(_word(element))
    return [builder.bitcast(context.data_model_manager[ty].as_data(builder, part_of(builder, element, value, n)), word)
            for value in values for n, ty in enumerate(element.parts)]


def _complex(context: Context, builder: ir.IRBuilder, element: types.Type, real: ir.Value, imaginary: ir.Value) -> Any:
    value = context.make_complex(builder, element)
    value.real, value.imag = real, imaginary
    return value._getvalue()


def as_words(b: ir.IRBuilder, value: ir.Value) -> list:
    """An access of 4 bytes or more as 32-bit words."""
    if isinstance(value.type, ir.VectorType):
        lanes = value.type.count * value.type.element.width // 32
        vector = b.bitcast(value, ir.VectorType(i32, lanes))
        return [b.extract_element(vector, i32(n)) for n in range(lanes)]
    if value.type.width == 64:
        return as_words(b, b.bitcast(value, ir.VectorType(i32, 2)))
    return [value]


def pack(context: Context, builder: ir.IRBuilder, element: types.Type, values: list, unit: ir.Type) -> Any:
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


def _word_of_bytes(builder: ir.IRBuilder, values: list) -> Any:
    """Four bytes in a word that LLVM cannot look into, for the reason that pairs are."""
    word = builder.zext(values[0], i32)
    for n, value in enumerate(values[1:], 1):
        word = builder.or_(word, builder.shl(builder.zext(value, i32), i32(8 * n)))
    return assembly(builder, "mov.b32 $0, $1;", [i32], [word], pure=True)[0]


def cast_elements(context: Context, builder: ir.IRBuilder, ty: types.BaseTuple, value: ir.Value,
                  element: types.Type) -> list:
    return [context.cast(builder, builder.extract_value(value, n), t, element) for n, t in enumerate(ty.types)]


def _global_access(view: ViewType, axis: int, count: int) -> tuple[int, Any]:
    width = piece_elements(view, axis, count)
    return width, unit_type(width * view.dtype.itemsize, view.dtype.itemsize)


def global_pointers(c: Context, b: ir.IRBuilder, view: ViewType, axis: int, count: int, value: ir.Value,
                    positions: list) -> Any:
    width, unit = _global_access(view, axis, count)
    fields = proxy(c, b, view, value)
    wide = c.get_value_type(view.coordinate)
    for at in range(0, count, width):
        step = [wide(at if n == axis else 0) for n in range(view.ndim)]
        terms = [coordinates_of(c, b, ty, v, view.coordinate) for ty, v in positions]
        terms[-1] = [b.add(x, s) for x, s in zip(terms[-1], step)]
        yield at, width, global_pointer(b, view, fields, terms, unit), unit


def record_pointers(c: Context, b: ir.IRBuilder, view: ViewType, axis: int, count: int, value: ir.Value,
                    positions: list) -> Any:
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


def is_position(view: types.Type, *positions: types.Type) -> bool:
    return isinstance(view, ViewType) and all(coordinate_count(p) == view.ndim for p in positions)


def _type_load_global(context: TypingContext, view: types.Type, axis: types.Type, base: types.Type, offset: types.Type,
                      count: types.Type) -> Any:
    if not is_position(view, base, offset) or not isinstance(count, types.IntegerLiteral):
        return None
    n, along = int(count.literal_value), int(axis.literal_value)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
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
def load_global(view: Any, axis: int, base: Any, offset: Any, count: int) -> tuple:
    """``count`` elements of a view along ``axis`` (a compile-time number), starting at ``base + offset``."""
    return view.load(axis, tuple(map(operator.add, base, offset)), count)


def _type_store_global(context: TypingContext, view: types.Type, axis: types.Type, base: types.Type, offset: types.Type,
                       values: types.Type) -> Any:
    if not is_position(view, base, offset) or not isinstance(values, types.BaseTuple):
        return None
    if view.readonly:
        raise TypingError(READ_ONLY)
    along, n = int(axis.literal_value), len(values.types)
    for ty in dict.fromkeys(values.types):
        got = misfit_of_type(ty, view.dtype)
        if got is not None:
            raise ConfigError(refusal("an array", got, view.dtype))

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
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
            return
        for at, width, pointer, unit in global_pointers(c, b, view, along, n, v[0], [(base, v[2]), (offset, v[3])]):
            b.store(pack(c, b, view.element, given[at:at + width], unit), pointer, align=access_alignment(view, width))

    return signature(types.none, view, axis, base, offset, values), codegen


@atom(_type_store_global)
def store_global(view: Any, axis: int, base: Any, offset: Any, values: tuple) -> None:
    """Store elements of a view along ``axis``, starting at ``base + offset``, converted to its dtype."""
    view.store(axis, tuple(map(operator.add, base, offset)), values)


def _type_near(context: TypingContext, view: types.Type) -> Any:
    if not isinstance(view, ViewType):
        return None
    found = ViewType(view.dtype, view.ndim, view.unit, view.alignment, view.wide, view.readonly, near=True)
    return signature(found, view), lambda c, b, s, v: v[0]


@atom(_type_near)
def near(view: View) -> View:
    """A view of which all elements lie within 2^31 bytes of the first: places in it are computed in 32 bits."""
    return view


# -- shared -----------------------------------------------------------------------------------------------------------

def _type_shared(context: TypingContext, dtype: types.Type, offset: types.Type) -> Any:
    named = dtype_type(dtype)
    if named is None or not isinstance(offset, types.Integer):
        return None
    return (signature(SharedType(numpy_dtype(named.target)), dtype, offset),
            lambda c, b, s, v: c.cast(b, v[1], offset, index))


@atom(_type_shared)
def shared(dtype: np.dtype | type, offset: int) -> SharedPointer:
    """A pointer to elements of ``dtype`` that start ``offset`` bytes into the block's dynamic shared memory."""
    return SharedPointer(np.dtype(dtype), int(offset))


def _type_repoint(context: TypingContext, pointer: types.Type, dtype: types.Type, distance: types.Type) -> Any:
    if not isinstance(pointer, SharedType) or not isinstance(dtype, DTypeType) or not isinstance(distance, types.Integer):
        return None
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


def _type_load_shared(context: TypingContext, pointer: types.Type, base: types.Type, offset: types.Type,
                      count: types.Type) -> Any:
    if not isinstance(pointer, SharedType) or not isinstance(count, types.IntegerLiteral):
        return None
    n = int(count.literal_value)
    width, unit = _shared_pieces(pointer, n)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
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


def _type_store_shared(context: TypingContext, pointer: types.Type, base: types.Type, offset: types.Type,
                       values: types.Type) -> Any:
    if not isinstance(pointer, SharedType) or not isinstance(values, types.BaseTuple):
        return None
    n = len(values.types)
    width, unit = _shared_pieces(pointer, n)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        terms = coordinates_of(c, b, base, v[1]) + coordinates_of(c, b, offset, v[2])
        given = cast_elements(c, b, values, v[3], pointer.element)
        for at in range(0, n, width):
            where = shared_pointer(b, pointer, v[0], [*terms, i32(at)], unit)
            b.store(pack(c, b, pointer.element, given[at:at + width], unit), where, align=width * pointer.dtype.itemsize)

    return signature(types.none, pointer, base, offset, values), codegen


@atom(_type_store_shared)
def store_shared(pointer: SharedPointer, base: int, offset: int, values: tuple) -> None:
    """Store consecutive elements from ``base + offset``, converted to the pointer's dtype."""
    pointer.store(int(base) + int(offset), values)


# --------------------------------------------------------------------------------------------------
# Words: elements that only pass through.
#
# Between a load and a store with nothing in between, 16- and 8-bit elements travel as 32-bit words: merging them one by
# one where a tile is out of range would cost two instructions an element.

LINE = 16                              # bytes that are loaded together


def _word_count(itemsize: int, count: int) -> int:
    return count * itemsize // 4


def _type_load_words(context: TypingContext, view: types.Type, axis: types.Type, base: types.Type, offset: types.Type,
                     count: types.Type) -> Any:
    if not is_position(view, base, offset) or not isinstance(count, types.IntegerLiteral):
        return None
    n, along, size = int(count.literal_value), int(axis.literal_value), view.dtype.itemsize

    def records(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        words: list = []
        for pointer, parts in record_pointers(c, b, view, along, n, v[0], [(base, v[2]), (offset, v[3])]):
            value = b.load(pointer)
            value.align = parts * part_size(view.dtype)
            words += [value] if value.align < 4 else as_words(b, value)
        while words[0].type.width < 32:
            wider = ir.IntType(2 * words[0].type.width)
            words = [b.or_(b.zext(low, wider), b.shl(b.zext(high, wider), wider(wider.width // 2)))
                     for low, high in zip(words[::2], words[1::2])]
        return c.make_tuple(b, s.return_type, words)

    def across_words(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        words: list = []
        for at in range(0, n, LINE // size):
            start = [coordinates_of(c, b, ty, value, view.coordinate) for ty, value in ((base, v[2]), (offset, v[3]))]
            start[-1] = [b.add(x, x.type(at if axis == along else 0)) for axis, x in enumerate(start[-1])]
            words += _sixteen_bytes(b, global_pointer(b, view, proxy(c, b, view, v[0]), start, i8))
        return c.make_tuple(b, s.return_type, words)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        if isinstance(view.element, RecordType):
            return records(c, b, s, v)
        if view.unit == along and view.alignment < 4 and n * size % LINE == 0:
            return across_words(c, b, s, v)
        words: list = []
        for at, width, pointer, _unit in global_pointers(c, b, view, along, n, v[0], [(base, v[2]), (offset, v[3])]):
            value = b.load(pointer)
            value.align = access_alignment(view, width)
            if width * size >= 4:
                words += as_words(b, value)
            else:
                shifted = b.shl(b.zext(value, i32), i32(8 * (at * size % 4)))
                if at * size % 4:
                    words[-1] = b.or_(words[-1], shifted)
                else:
                    words.append(shifted)
        return c.make_tuple(b, s.return_type, words)

    return signature(types.UniTuple(types.uint32, _word_count(size, n)), view, axis, base, offset, count), codegen


def _sixteen_bytes(b: ir.IRBuilder, pointer: ir.Value) -> list:
    """16 bytes that begin anywhere, as four words: of the five aligned words that have them.

    What else is in these words may lie outside the array, but in no word without an element of it: memory is handed out in
    larger pieces, so it can be read, and it is dropped. (Two loads of 16 bytes would keep eight registers waiting.)
    """
    address = b.ptrtoint(pointer, i64)

    def load(n: int) -> Any:
        ahead = min(4 * n, LINE - 1)                       # at an aligned address the last is the fourth again
        word = b.load(b.inttoptr(b.and_(b.add(address, i64(ahead)), i64(-4)), ir.PointerType(i32, addrspace=GLOBAL)))
        word.align = 4
        return word

    return words_from(b, address, load)


def words_from(b: ir.IRBuilder, address: ir.Value, load: Callable[[int], Any]) -> list:
    """The four words that begin at ``address``: ``load`` gives the aligned word that it lies in, and the four after it."""
    words = [load(n) for n in range(LINE // 4 + 1)]
    bits = b.shl(b.trunc(address, i32), i32(3))            # shf takes it modulo 32: of the last two bits of the address
    return [assembly(b, "shf.r.wrap.b32 $0, $1, $2, $3;", [i32], [near, far, bits], pure=True)[0]
            for near, far in itertools.pairwise(words)]


@atom(_type_load_words)
def load_words(view: View, axis: int, base: Any, offset: Any, count: int) -> tuple:
    """`load_global` of ``count`` elements (a multiple of 4 bytes) as 32-bit words, not to be looked at."""
    return tuple(view.load_bytes(axis, tuple(map(operator.add, base, offset)), count).view(np.uint32))


def _type_pack_words(context: TypingContext, values: types.Type) -> Any:
    if not isinstance(values, types.UniTuple):
        return None
    size = element_size(values.dtype)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        given, element, width = cast_elements(c, b, values, v[0], values.dtype), values.dtype, size
        if isinstance(element, RecordType):
            given, element = words_of_records(c, b, element, given), _part_word(element)
            width = element.bitwidth // 8
        per, words = max(1, 4 // width), []
        for at in range(0, len(given), per):
            words += as_words(b, pack(c, b, element, given[at:at + per], unit_type(max(4, width), width)))
        return c.make_tuple(b, s.return_type, words)

    return signature(types.UniTuple(types.uint32, _word_count(size, values.count)), values), codegen


@atom(_type_pack_words)
def pack_words(values: tuple) -> tuple:
    """Elements (a multiple of 4 bytes, of one type) as 32-bit words."""
    data = narrowed(values, values[0].dtype) if isinstance(values[0], Record) else np.array(values)
    return tuple(data.view(np.uint8).view(np.uint32))


def _part_word(element: RecordType) -> Any:
    """The integer that a record's part is in memory."""
    return getattr(types, f"uint{8 * part_size(element.dtype)}")


def _type_unpack_words(context: TypingContext, dtype: types.Type, words: types.Type) -> Any:
    if not isinstance(dtype, DTypeType) or not isinstance(words, types.UniTuple) or words.dtype != types.uint32:
        return None
    size = element_size(dtype.target)
    per = max(1, 4 // size)
    step = max(1, size // 4)
    result = types.UniTuple(dtype.target, 4 * words.count // size)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        given = [b.extract_value(v[1], n) for n in range(words.count)]
        out: list = []
        if isinstance(dtype.target, PackedType):
            return c.make_tuple(b, result, given)
        if isinstance(dtype.target, RecordType):
            part = _part_word(dtype.target)
            for word in given:
                out += unpack(c, b, part, word, 32 // part.bitwidth) if part.bitwidth <= 32 else [word]
            return c.make_tuple(b, result, records_of_words(c, b, dtype.target, out))
        for at in range(0, words.count, step):
            value = given[at] if step == 1 else pack(c, b, types.uint32, given[at:at + step], ir.VectorType(i32, step))
            out += unpack(c, b, dtype.target, b.bitcast(value, unit_type(4 * step, size)), per)
        return c.make_tuple(b, result, out)

    return signature(result, dtype, words), codegen


@atom(_type_unpack_words)
def unpack_words(dtype: np.dtype, words: tuple) -> tuple:
    """The elements in 32-bit words: the inverse of `pack_words`."""
    return scalars(np.array(words, np.uint32).view(np.uint8), dtype)


def _type_pack_narrow(context: TypingContext, values: types.Type) -> Any:
    if not isinstance(values, types.UniTuple) or element_size(values.dtype) not in (1, 2):
        return None
    words, rest = divmod(values.count * element_size(values.dtype), 4)
    if rest:
        return None
    return signature(types.UniTuple(types.uint32, words), values), lambda c, b, s, v: (
        c.make_tuple(b, s.return_type, to_registers(b, elements(b, v[0], values.count))))


@atom(_type_pack_narrow)
def pack_narrow(values: tuple) -> tuple:
    """`pack_words` of 16- or 8-bit elements that LLVM can look through: of a fragment that instructions take in 32-bit
    registers, nothing is left of packing and unpacking."""
    return tuple(np.array(values).view(np.uint8).view(np.uint32))


def _type_unpack_narrow(context: TypingContext, dtype: types.Type, words: types.Type) -> Any:
    if not isinstance(dtype, DTypeType) or not isinstance(words, types.UniTuple) or words.dtype != types.uint32:
        return None
    result = types.UniTuple(dtype.target, 4 * words.count // element_size(dtype.target))
    return signature(result, dtype, words), lambda c, b, s, v: (
        c.make_tuple(b, result, from_registers(b, elements(b, v[1], words.count), c.get_value_type(dtype.target))))


@atom(_type_unpack_narrow)
def unpack_narrow(dtype: np.dtype, words: tuple) -> tuple:
    """The inverse of `pack_narrow`."""
    return scalars(np.array(words, np.uint32).view(np.uint8), dtype)


def element_size(element: types.Type) -> int:
    """Bytes of an element of device code."""
    return int(numpy_dtype(element).itemsize)


def _type_interleave_words(context: TypingContext, vectors: types.Type) -> Any:
    if not isinstance(vectors, types.UniTuple) or not isinstance(vectors.dtype, types.UniTuple) or vectors.count % 2:
        return None
    if vectors.dtype.dtype != types.uint32:
        return None
    result = types.UniTuple(types.uint32, vectors.count * vectors.dtype.count)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        given = [b.extract_value(v[0], n) for n in range(vectors.count)]
        out: list = []
        for n in range(vectors.dtype.count):
            words = [b.extract_value(vector, n) for vector in given]
            for halves in ("0x5410", "0x7632"):                       # the low ones of two words, the high ones
                out += [assembly(b, f"prmt.b32 $0, $1, $2, {halves};", [i32], list(pair), pure=True)[0]
                        for pair in zip(words[::2], words[1::2])]
        return c.make_tuple(b, result, out)

    return signature(result, vectors), codegen


@atom(_type_interleave_words)
def interleave_words(vectors: tuple) -> tuple:
    """`interleave` of 16-bit elements in 32-bit words: the first element of each tuple, then the second of each, and so on.
    One instruction a word; an even number of tuples."""
    halves = [np.array(words, np.uint32).view(np.uint16) for words in vectors]
    return tuple(np.stack(halves, axis=1).reshape(-1).view(np.uint32))


def _type_first_elements(context: TypingContext, dtype: types.Type, word: types.Type, count: types.Type) -> Any:
    if not isinstance(dtype, DTypeType) or word != types.uint32 or not isinstance(count, types.Integer):
        return None
    bits = 8 * element_size(dtype.target)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        most, left = 32 // bits, c.cast(b, v[2], count, types.int32)
        some = b.icmp_signed(">", left, i32(0))
        kept = b.select(b.icmp_signed("<", left, i32(most)), left, i32(most))
        mask = b.lshr(i32(-1), b.and_(b.mul(b.sub(i32(most), kept), i32(bits)), i32(31)))    # of none it does not matter
        return b.select(some, b.and_(v[1], mask), i32(0))

    return signature(types.uint32, dtype, word, count), codegen


@atom(_type_first_elements)
def first_elements(dtype: np.dtype, word: Any, count: int) -> Any:
    """The first ``count`` elements in a 32-bit word and zeros in place of the others: of all if there are no more, of none
    if ``count`` is not positive.

    >>> hex(first_elements(np.dtype(np.float16), np.uint32(0x3C003C00), 1))
    '0x3c00'
    """
    kept = min(max(int(count), 0) * 8 * dtype.itemsize, 32)
    return np.uint32(int(word) & ((1 << kept) - 1))


def _type_store_words(context: TypingContext, pointer: types.Type, base: types.Type, offset: types.Type,
                      words: types.Type) -> Any:
    if not isinstance(pointer, SharedType) or not isinstance(words, types.UniTuple):
        return None
    size = pointer.dtype.itemsize
    step = piece_bytes(4 * words.count, 16) // 4

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> None:
        terms = coordinates_of(c, b, base, v[1]) + coordinates_of(c, b, offset, v[2])
        given = [b.extract_value(v[3], n) for n in range(words.count)]
        unit = ir.VectorType(i32, step) if step > 1 else i32
        for at in range(0, words.count, step):
            value = pack(c, b, types.uint32, given[at:at + step], unit)
            ahead = i32(4 * at // size) if size <= 4 else i32(at // (size // 4))
            b.store(value, shared_pointer(b, pointer, v[0], [*terms, ahead], unit), align=4 * step)

    return signature(types.none, pointer, base, offset, words), codegen


@atom(_type_store_words)
def store_words(pointer: SharedPointer, base: int, offset: int, words: tuple) -> None:
    """Store 32-bit words of elements that `load_words` or `pack_words` gave, from element ``base + offset``."""
    pointer.store_bytes(int(base) + int(offset), np.array(words, np.uint32).view(np.uint8))


# --------------------------------------------------------------------------------------------------
# Words of a line of memory that ends: the load of a tile at an edge of a matrix whose rows begin anywhere.
#
# A branch about the edge would keep each load behind the arrival of the one before, in every thread of a warp that has an
# edge in one of them. So there is none: the loads themselves are predicated, and what is beyond the end becomes zero.

def _type_load_words_within(context: TypingContext, view: types.Type, axis: types.Type, base: types.Type, offset: types.Type,
                            count: types.Type, left: types.Type) -> Any:
    if not is_position(view, base, offset) or not isinstance(count, types.IntegerLiteral):
        return None
    if not isinstance(left, types.Integer):
        return None
    n, along, size = int(count.literal_value), int(axis.literal_value), view.dtype.itemsize
    if view.unit != along or n * size % LINE or size > 8:
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        array = proxy(c, b, view, v[0])
        some = c.cast(b, v[5], left, types.int64)
        some = b.trunc(b.select(b.icmp_signed("<", some, i64(n)), some, i64(n)), i32)
        words: list = []
        for at in range(0, n, LINE // size):
            start = [coordinates_of(c, b, ty, value, view.coordinate) for ty, value in ((base, v[2]), (offset, v[3]))]
            start[-1] = [b.add(x, x.type(at if dimension == along else 0)) for dimension, x in enumerate(start[-1])]
            here = b.sub(some, i32(at))
            first = b.ptrtoint(global_pointer(b, view, array, start, i8), i64)
            loaded = words_from(b, first, _words(b, first, here, size))
            words += [_kept(b, word, here, k, size) for k, word in enumerate(loaded)]
        return c.make_tuple(b, s.return_type, words)

    return signature(types.UniTuple(types.uint32, n * size // 4), view, axis, base, offset, count, left), codegen


def _words(b: ir.IRBuilder, first: ir.Value, here: ir.Value, size: int) -> Callable[[int], Any]:
    """Loads the n-th aligned word from an address on, if it has bytes of the ``here`` elements there; else it is zero."""
    aligned, most = b.and_(first, i64(-4)), i32(LINE // size)
    nbytes = b.mul(b.select(b.icmp_signed("<", here, most), here, most), i32(size))
    nbytes = b.select(b.icmp_signed(">", here, i32(0)), b.add(nbytes, b.and_(b.trunc(first, i32), i32(3))), i32(0))

    def load(n: int) -> Any:
        text = (f"{{ .reg .pred there; setp.gt.s32 there, $2, {4 * n}; mov.b32 $0, 0; "
                f"@there ld.global.b32 $0, [$1+{4 * n}]; }}")
        return assembly(b, text, [i32], [aligned, nbytes])[0]

    return load


def _kept(b: ir.IRBuilder, word: ir.Value, here: ir.Value, k: int, size: int) -> Any:
    """The ``k``-th word of a line of which ``here`` elements are there, zeros in place of the others."""
    per = max(1, 4 // size)
    left = b.sub(here, i32(k * 4 // size))
    kept = word
    for n in range(1, per):                                # the least that is enough: a mask for each number of elements
        kept = b.select(b.icmp_signed("<=", left, i32(per - n)), b.and_(word, i32((1 << 8 * size * (per - n)) - 1)), kept)
    return b.select(b.icmp_signed(">", left, i32(0)), kept, i32(0))


@atom(_type_load_words_within)
def load_words_within(view: View, axis: int, base: Any, offset: Any, count: int, left: int) -> tuple:
    """`load_words` of ``count`` elements along a contiguous ``axis`` (a multiple of 16 bytes), the first ``left`` of which
    are in the array; zeros in place of the others, none of which is read. ``left`` may be any number."""
    kept = min(max(int(left), 0), count)
    data = np.zeros(count * view.dtype.itemsize, np.uint8)
    if kept:
        data[:kept * view.dtype.itemsize] = view.load_bytes(axis, tuple(map(operator.add, base, offset)), kept)
    return tuple(data.view(np.uint32))
