"""Words: elements that only pass through.

Between a load and a store with nothing in between, 16- and 8-bit elements travel as 32-bit words: merging them one by one
where a tile is out of range would cost two instructions an element.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.lang.assembly import assembly
from gemmkit.lang.atoms import atom
from gemmkit.lang.dtypes import DTypeType
from gemmkit.lang.host import SharedPointer, View, access_alignment, narrowed, piece_bytes
from gemmkit.lang.memory import GLOBAL, SharedType, coordinates_of, global_pointer, proxy, shared_pointer
from gemmkit.lang.numba_hooks import ir, signature, types
from gemmkit.lang.number_types import PackedType, RecordType
from gemmkit.lang.records import Record, part_size, scalars
from gemmkit.ptx.memory import (
    as_words,
    cast_elements,
    global_pointers,
    is_position,
    pack,
    record_pointers,
    records_of_words,
    unit_type,
    unpack,
    words_of_records,
)
from gemmkit.ptx.registers import elements, from_registers, to_registers

i8, i32, i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
LINE = 16                              # bytes that are loaded together


def _word_count(itemsize: int, count: int) -> int:
    return count * itemsize // 4


def _type_load_words(context: Any, view: Any, axis: Any, base: Any, offset: Any, count: Any) -> Any:
    if not is_position(view, base, offset) or not isinstance(count, types.IntegerLiteral):
        return None
    n, along, size = int(count.literal_value), int(axis.literal_value), view.dtype.itemsize

    def records(c: Any, b: Any, s: Any, v: Any) -> Any:
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

    def across_words(c: Any, b: Any, s: Any, v: Any) -> Any:
        words: list = []
        for at in range(0, n, LINE // size):
            start = [coordinates_of(c, b, ty, value, view.coordinate) for ty, value in ((base, v[2]), (offset, v[3]))]
            start[-1] = [b.add(x, x.type(at if axis == along else 0)) for axis, x in enumerate(start[-1])]
            words += _sixteen_bytes(b, global_pointer(b, view, proxy(c, b, view, v[0]), start, i8))
        return c.make_tuple(b, s.return_type, words)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
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


def _sixteen_bytes(b: Any, pointer: Any) -> list:
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


def words_from(b: Any, address: Any, load: Callable[[int], Any]) -> list:
    """The four words that begin at ``address``: ``load`` gives the aligned word that it lies in, and the four after it."""
    words = [load(n) for n in range(LINE // 4 + 1)]
    bits = b.shl(b.trunc(address, i32), i32(3))            # shf takes it modulo 32: of the last two bits of the address
    return [assembly(b, "shf.r.wrap.b32 $0, $1, $2, $3;", [i32], [near, far, bits], pure=True)[0]
            for near, far in itertools.pairwise(words)]


@atom(_type_load_words)
def load_words(view: View, axis: int, base: Any, offset: Any, count: int) -> tuple:
    """`load_global` of ``count`` elements (a multiple of 4 bytes) as 32-bit words, not to be looked at."""
    return tuple(view.load_bytes(axis, tuple(map(operator.add, base, offset)), count).view(np.uint32))


def _type_pack_words(context: Any, values: Any) -> Any:
    if not isinstance(values, types.UniTuple):
        return None
    from gemmkit.lang.number_types import numpy_dtype

    size = numpy_dtype(values.dtype).itemsize

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
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


def _type_unpack_words(context: Any, dtype: Any, words: Any) -> Any:
    if not isinstance(dtype, DTypeType) or not isinstance(words, types.UniTuple) or words.dtype != types.uint32:
        return None
    from gemmkit.lang.number_types import numpy_dtype

    size = numpy_dtype(dtype.target).itemsize
    per = max(1, 4 // size)
    step = max(1, size // 4)
    result = types.UniTuple(dtype.target, 4 * words.count // size)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
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


def _type_pack_narrow(context: Any, values: Any) -> Any:
    if not isinstance(values, types.UniTuple) or element_size(values.dtype) not in (1, 2):
        return None
    words, rest = divmod(values.count * element_size(values.dtype), 4)
    if rest:
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        return c.make_tuple(b, s.return_type, to_registers(b, elements(b, v[0], values.count)))

    return signature(types.UniTuple(types.uint32, words), values), codegen


@atom(_type_pack_narrow)
def pack_narrow(values: tuple) -> tuple:
    """`pack_words` of 16- or 8-bit elements that LLVM can look through: of a fragment that instructions take in 32-bit
    registers, nothing is left of packing and unpacking."""
    return tuple(np.array(values).view(np.uint8).view(np.uint32))


def _type_unpack_narrow(context: Any, dtype: Any, words: Any) -> Any:
    if not isinstance(dtype, DTypeType) or not isinstance(words, types.UniTuple) or words.dtype != types.uint32:
        return None
    result = types.UniTuple(dtype.target, 4 * words.count // element_size(dtype.target))

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        return c.make_tuple(b, result, from_registers(b, elements(b, v[1], words.count), c.get_value_type(dtype.target)))

    return signature(result, dtype, words), codegen


@atom(_type_unpack_narrow)
def unpack_narrow(dtype: np.dtype, words: tuple) -> tuple:
    """The inverse of `pack_narrow`."""
    return scalars(np.array(words, np.uint32).view(np.uint8), dtype)


def element_size(element: Any) -> int:
    """Bytes of an element of device code."""
    from gemmkit.lang.number_types import numpy_dtype

    return int(numpy_dtype(element).itemsize)


def _type_weave_words(context: Any, teeth: Any) -> Any:
    if not isinstance(teeth, types.UniTuple) or not isinstance(teeth.dtype, types.UniTuple) or teeth.count % 2:
        return None
    if teeth.dtype.dtype != types.uint32:
        return None
    result = types.UniTuple(types.uint32, teeth.count * teeth.dtype.count)

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        given = [b.extract_value(v[0], n) for n in range(teeth.count)]
        out: list = []
        for n in range(teeth.dtype.count):
            words = [b.extract_value(tooth, n) for tooth in given]
            for halves in ("0x5410", "0x7632"):                       # the low ones of two words, the high ones
                out += [assembly(b, f"prmt.b32 $0, $1, $2, {halves};", [i32], list(pair), pure=True)[0]
                        for pair in zip(words[::2], words[1::2])]
        return c.make_tuple(b, result, out)

    return signature(result, teeth), codegen


@atom(_type_weave_words)
def weave_words(teeth: tuple) -> tuple:
    """`interleave` of 16-bit elements in 32-bit words: the first element of each tuple, then the second of each, and so on.
    One instruction a word; an even number of tuples."""
    halves = [np.array(words, np.uint32).view(np.uint16) for words in teeth]
    return tuple(np.stack(halves, axis=1).reshape(-1).view(np.uint32))


def _type_first_elements(context: Any, dtype: Any, word: Any, count: Any) -> Any:
    if not isinstance(dtype, DTypeType) or word != types.uint32 or not isinstance(count, types.Integer):
        return None
    from gemmkit.lang.number_types import numpy_dtype

    bits = 8 * numpy_dtype(dtype.target).itemsize

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
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


def _type_store_words(context: Any, pointer: Any, base: Any, offset: Any, words: Any) -> Any:
    if not isinstance(pointer, SharedType) or not isinstance(words, types.UniTuple):
        return None
    size = pointer.dtype.itemsize
    step = piece_bytes(4 * words.count, 16) // 4

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        terms = coordinates_of(c, b, base, v[1]) + coordinates_of(c, b, offset, v[2])
        given = [b.extract_value(v[3], n) for n in range(words.count)]
        unit = ir.VectorType(i32, step) if step > 1 else i32
        for at in range(0, words.count, step):
            value = pack(c, b, types.uint32, given[at:at + step], unit)
            ahead = i32(4 * at // size) if size <= 4 else i32(at // (size // 4))
            b.store(value, shared_pointer(b, pointer, v[0], [*terms, ahead], unit), align=4 * step)
        return c.get_dummy_value()

    return signature(types.none, pointer, base, offset, words), codegen


@atom(_type_store_words)
def store_words(pointer: SharedPointer, base: int, offset: int, words: tuple) -> None:
    """Store 32-bit words of elements that `load_words` or `pack_words` gave, from element ``base + offset``."""
    pointer.store_bytes(int(base) + int(offset), np.array(words, np.uint32).view(np.uint8))
