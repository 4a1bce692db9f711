"""Values in registers: pinned pointers, views of a round's own, packed integers as float16, and fragments as 32-bit words.

Pinned pointers are for loads of a loop that share an address. LLVM adds what does not change in a loop before what does. A
loop over stages whose loads differ in a compile-time part then has an address of its own for every load, each with its
addition. A pinned pointer has the run-time part of all positions in it, and hides the sum: the loads of a stage have one
address, and immediates (f32, 16 steps of 64 FFMAs a thread: 86 additions a round before, 22 after).
"""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.lang.host import PinnedPointer, SharedPointer
from gemmkit.lang.memory import SHARED, SharedType, ViewType, proxy, shared_pointer, shared_symbol
from gemmkit.lang.numba_hooks import Context, Signature, TypingContext, Values, atom, ir, signature, types
from gemmkit.lang.scalars import DTypeType, assembly, index, numpy_dtype

i1, i8, i32 = ir.IntType(1), ir.IntType(8), ir.IntType(32)


def _type_shared_place(context: TypingContext, dtype: types.Type, position: types.Type) -> Any:
    if not isinstance(dtype, DTypeType) or not isinstance(position, types.Integer):
        return None
    size = numpy_dtype(dtype.target).itemsize

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        start = b.ptrtoint(b.gep(shared_symbol(b), [i32(0), i32(0)]), i32)
        return b.add(start, b.mul(c.cast(b, v[1], position, index), i32(size)))

    return signature(index, dtype, position), codegen


@atom(_type_shared_place)
def shared_place(dtype: np.dtype, position: int) -> int:
    """A position of elements of ``dtype`` as what `pinned` takes: an address in the shared window, where there is one."""
    return int(position) * np.dtype(dtype).itemsize


def _type_pinned(context: TypingContext, pointer: types.Type, place: types.Type) -> Any:
    if not isinstance(pointer, SharedType) or pointer.pinned or not isinstance(place, types.Integer):
        return None
    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        total = b.add(v[0], c.cast(b, v[1], place, index))
        return assembly(b, "mov.b32 $0, $1;", [i32], [total], pure=True)[0]

    return signature(SharedType(pointer.dtype, pinned=True), pointer, place), codegen


@atom(_type_pinned)
def pinned(pointer: SharedPointer, place: int) -> SharedPointer:
    """The pointer for loads whose positions have a base of ``place`` (`shared_place`), all of them: it is in the pointer,
    and loads add only what is known when the kernel is compiled, as the immediates of one address."""
    return PinnedPointer(pointer.dtype, pointer.offset, place)


def _type_is_pinned(context: TypingContext, pointer: types.Type) -> Any:
    if not isinstance(pointer, SharedType):
        return None
    is_so = int(pointer.pinned)
    return signature(types.literal(pointer.pinned), pointer), lambda c, b, s, v: ir.Constant(ir.IntType(1), is_so)


@atom(_type_is_pinned)
def is_pinned(pointer: SharedPointer) -> bool:
    """Whether `pinned` made the pointer: known when a kernel is compiled."""
    return isinstance(pointer, PinnedPointer)


def _pinned_decided(context: TypingContext, pointer: Any) -> bool:
    """`is_pinned` before types are inferred (`gemmkit.lang.passes`)."""
    return bool(pointer.ty.pinned)


is_pinned.decided = _pinned_decided                       # type: ignore[attr-defined]


def pointer_at(builder: ir.IRBuilder, pointer: SharedType, value: ir.Value, terms: list, llvm_type: ir.Type) -> Any:
    """The LLVM pointer to a position, a sum of terms of which the base comes first."""
    if not pointer.pinned:
        return shared_pointer(builder, pointer, value, terms, llvm_type)
    place = builder.inttoptr(value, ir.PointerType(ir.IntType(8), addrspace=SHARED))
    for term in terms[1:]:
        place = builder.gep(place, [builder.mul(term, i32(pointer.dtype.itemsize))], inbounds=True)
    return builder.bitcast(place, ir.PointerType(llvm_type, addrspace=SHARED))


# --------------------------------------------------------------------------------------------------
# Views whose strides the compiler does not know to be those of the round before.
#
# A loop over tiles reads the same arrays in each round. LLVM computes in front of it what does not change, such as the
# address of an array plus k rows for each of a thread's rows: two registers each, through the loop that multiplies (f64,
# 128 x 128 x 32: 30 registers, and 8 spilled). An `opaque` view has its strides from an instruction that stays where it is.

i64 = ir.IntType(64)


def _type_opaque(context: TypingContext, view: types.Type) -> Any:
    if not isinstance(view, ViewType):
        return signature(view, view), lambda c, b, s, v: v[0]
    hidden = ir.InlineAsm(ir.FunctionType(i64, [i64]), "mov.b64 $0, $1;", "=l,l", side_effect=True)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out = proxy(c, b, view, v[0])
        for axis in range(view.ndim):
            if axis != view.unit:
                setattr(out, f"stride{axis}", b.call(hidden, [getattr(out, f"stride{axis}")]))
        return out._getvalue()

    return signature(view, view), codegen


@atom(_type_opaque)
def opaque(view: Any) -> Any:
    """The view, with strides of which LLVM knows nothing; another operand (none, say) as it is."""
    return view


# --------------------------------------------------------------------------------------------------
# Integers of 2 and 4 bits as float16, two at a time, in registers.
#
# A float16 from 1024 to 2047 has its integer in the ten bits of the mantissa: ``0x6400 | q`` is 1024 + q. One LOP3 takes
# two integers of a word, 16 bits apart, to such numbers (Kim et al., "Who says elephants can't run", 2022). Integers e
# places of ``bits`` higher in the mantissa are 2 ** (bits * e) times as large: an FMA by the inverse brings them down and
# takes away the zero point at once. Both are exact. Only the multiplication by the scale rounds.
#
# | bits | pairs of a word, (q_p, q_p+R/2) | without a shift | a word's instructions |
# |---|---|---|---|
# | 4 | 4 | 2 | 4 LOP3, 1 SHF, 4 HADD2 or HFMA2, 4 HMUL2: 1.6 a weight |
# | 2 | 8 | 5 | 8, 1, 8, 8: 1.6 a weight |
#
# An A of wgmma has neighbours (q_2t, q_2t+1) in a register: the two integers of 4 bits in a byte. PRMT puts that byte below
# the upper bytes of 1024 twice, and one mask leaves 1024 + q and 1024 + 16 q': 4 instructions for two weights.

MANTISSA, THOUSAND = 10, 0x64006400    # bits; 1024 in both halves


def _together(bits: int) -> int:
    """Pairs that stand in the mantissa without a shift."""
    return MANTISSA // bits


def _pair(value: float) -> int:
    """A float16 in both halves of a word."""
    return int(np.float16(value).view(np.uint16)) * 0x10001


def _type_zeros(context: TypingContext, bits: types.Type, zero: types.Type) -> Any:
    if not isinstance(bits, types.IntegerLiteral) or not isinstance(zero, types.Integer):
        return None
    width = int(bits.literal_value)
    result = types.UniTuple(types.uint32, _together(width))

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        number = b.or_(b.mul(c.cast(b, v[1], zero, types.uint32), i32(0x10001)), i32(THOUSAND))
        out = [assembly(b, "sub.rn.f16x2 $0, $1, $2;", [i32], [i32(_pair(1024 - 1024 * 2.0**(-width * e))), number],
                        pure=True)[0] for e in range(_together(width))]
        return c.make_tuple(b, result, out)

    return signature(result, bits, zero), codegen


@atom(_type_zeros)
def zero_words(bits: int, zero: int) -> tuple:
    """What `dequantise_word` adds for a zero point: -(1024 / 2 ** (bits * e) + zero) for each place e in the mantissa.

    >>> [float(np.uint32(word & 0xFFFF).astype(np.uint16).view(np.float16)) for word in zero_words(4, 8)]
    [-1032.0, -72.0]
    """
    return tuple(np.uint32(_pair(-(1024 * 2.0**(-bits * e) + int(zero)))) for e in range(_together(bits)))


def _type_dequantise(context: TypingContext, bits: types.Type, word: types.Type, zeros: types.Type,
                     scale: types.Type) -> Any:
    if not isinstance(bits, types.IntegerLiteral) or word != types.uint32 or scale not in (types.uint32, types.none):
        return None
    width = int(bits.literal_value)
    together, pairs = _together(width), 16 // width
    if zeros != types.UniTuple(types.uint32, together):
        return None
    result = types.UniTuple(types.uint32, pairs)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out = []
        for p in range(pairs):
            e, shifted = p % together, b.lshr(v[1], i32(p // together * together * width))
            mask = ((1 << width) - 1) * 0x10001 << width * e
            number = assembly(b, f"lop3.b32 $0, $1, {mask}, {THOUSAND}, 0xea;", [i32], [shifted], pure=True)[0]
            zero = b.extract_value(v[2], e)
            if e == 0:
                number = assembly(b, "add.rn.f16x2 $0, $1, $2;", [i32], [number, zero], pure=True)[0]
            else:
                number = assembly(b, "fma.rn.f16x2 $0, $1, $2, $3;", [i32], [number, i32(_pair(2.0**(-width * e))), zero],
                                  pure=True)[0]
            out.append(number if scale == types.none else assembly(b, "mul.rn.f16x2 $0, $1, $2;", [i32], [number, v[3]],
                                                                   pure=True)[0])
        return c.make_tuple(b, result, out)

    return signature(result, bits, word, zeros, scale), codegen


@atom(_type_dequantise)
def dequantise_word(bits: int, word: int, zeros: tuple, scale: int | None) -> tuple:
    """The integers in a 32-bit word as float16, (q - zero) * scale, in pairs: word p of the result has integers p and
    p + 16 / bits. ``zeros`` are `zero_words`, ``scale`` has the scale in both halves, or is None: q - zero; sm_80+.

    >>> words = dequantise_word(4, np.uint32(0x00090008), zero_words(4, 8), np.uint32(0x40004000))
    >>> np.array(words, np.uint32).view(np.float16).tolist()
    [0.0, 2.0, -16.0, -16.0, -16.0, -16.0, -16.0, -16.0]
    """
    zero = -np.array(zeros[:1], np.uint32).view(np.float16)[0].astype(np.float32) - 1024
    factor = np.float32(1) if scale is None else np.array([scale], np.uint32).view(np.float16)[0].astype(np.float32)
    with np.errstate(all="ignore"):
        values = ((_integers(bits, word) - zero) * factor).astype(np.float16)
    return tuple(values.view(np.uint32).reshape(-1))


def _integers(bits: int, word: int) -> np.ndarray:
    """Those of a word, in pairs."""
    places = np.arange(16 // bits, dtype=np.uint32)[:, None] * np.uint32(bits) + np.array([0, 16], np.uint32)
    return ((np.uint32(word) >> places) & np.uint32((1 << bits) - 1)).astype(np.float32)


#: 1 / 16 and 1 as bfloat16, in both halves. The last place of the former's mantissa, of seven bits, is 1 / 2048.
SIXTEENTH, ONE, BFLOAT16_UNIT = 0x3D803D80, 0x3F803F80, 2.0**-11


def _type_as_bfloat16_integers(context: TypingContext, bits: types.Type, word: types.Type, zero: types.Type) -> Any:
    if not isinstance(bits, types.IntegerLiteral) or word != types.uint32 or zero != types.uint32:
        return None
    width = int(bits.literal_value)
    result = types.UniTuple(types.uint32, 16 // width)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out = []
        for p in range(result.count):
            text = f"lop3.b32 $0, $1, {((1 << width) - 1) * 0x10001}, {SIXTEENTH}, 0xea;"
            number = assembly(b, text, [i32], [b.lshr(v[1], i32(p * width))], pure=True)[0]
            out.append(assembly(b, "fma.rn.bf16x2 $0, $1, $2, $3;", [i32], [number, i32(ONE), v[2]], pure=True)[0])
        return c.make_tuple(b, result, out)

    return signature(result, bits, word, zero), codegen


@atom(_type_as_bfloat16_integers)
def bfloat16_integers(bits: int, word: int, zero: int) -> tuple:
    """The integers in a 32-bit word as bfloat16, (q - zero) / 2048, in pairs as `dequantise_word` has them, all exact: q in
    the mantissa of 1 / 16 is 1 / 16 + q / 2048, so that a pair takes a LOP3, a SHF and an HFMA2 and no conversion. In units
    of 1 / 2048 no sum of 128 products exceeds A's largest element. ``zero`` is a `bfloat16_zero`; sm_80+.

    >>> words = bfloat16_integers(4, np.uint32(0x00090008), bfloat16_zero(np.uint32(8)))
    >>> (2048 * np.array(words, np.uint32).view(ml_dtypes.bfloat16).astype(np.float32)).tolist()
    [0.0, 1.0, -8.0, -8.0, -8.0, -8.0, -8.0, -8.0]
    """
    zero_of = -np.array([zero], np.uint32).view(ml_dtypes.bfloat16)[0].astype(np.float32) - 1 / 16
    values = (_integers(bits, word) * np.float32(BFLOAT16_UNIT) - zero_of).astype(ml_dtypes.bfloat16)
    return tuple(values.view(np.uint32).reshape(-1))


def bfloat16_zero(zero: int) -> Any:
    """What `bfloat16_integers` adds for a zero point below 128: -(1 / 16 + zero / 2048), in both halves."""
    return np.uint32(SIXTEENTH | 0x80008000) | np.uint32(zero) * np.uint32(0x10001)


#: What PRMT makes of a byte: copies in the first and third place, each below the upper byte of 1024 as float16.
SPREAD, PLACES_OF_FOUR = 0x5050, 0xFFF0FF0F


def _type_dequantise_bytes(context: TypingContext, words: types.Type, byte: types.Type, zeros: types.Type,
                           scales: types.Type) -> Any:
    is_known = (isinstance(words, types.UniTuple) and isinstance(scales, types.UniTuple) and isinstance(byte, types.Integer)
                and words.dtype == scales.dtype == types.uint32
                and zeros == types.UniTuple(types.UniTuple(types.uint32, _together(4)), scales.count))
    if not is_known:
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        select = b.or_(b.mul(c.cast(b, v[1], byte, types.uint32), i32(0x0101)), i32(SPREAD))
        lower, upper = (int(np.float16(value).view(np.uint16)) for value in (1, 2.0**-4))
        out = []
        for n in range(words.count):
            zero = b.extract_value(v[2], n % scales.count)
            zero = b.or_(b.and_(b.extract_value(zero, 0), i32(0xFFFF)), b.and_(b.extract_value(zero, 1), i32(0xFFFF0000)))
            text = f"{{ .reg .b32 x; prmt.b32 x, $1, {THOUSAND}, $2; and.b32 $0, x, {PLACES_OF_FOUR}; }}"
            number = assembly(b, text, [i32], [b.extract_value(v[0], n), select], pure=True)[0]
            places = i32(upper << 16 | lower)
            number = assembly(b, "fma.rn.f16x2 $0, $1, $2, $3;", [i32], [number, places, zero], pure=True)[0]
            out.append(assembly(b, "mul.rn.f16x2 $0, $1, $2;", [i32], [number, b.extract_value(v[3], n % scales.count)],
                                pure=True)[0])
        return c.make_tuple(b, words, out)

    return signature(words, words, byte, zeros, scales), codegen


@atom(_type_dequantise_bytes)
def dequantise_bytes(words: tuple, byte: int, zeros: tuple, scales: tuple) -> tuple:
    """The two integers of 4 bits in a byte (0 to 3) of each word as float16, (q - zero) * scale, the lower one in the lower
    half. Word n has scale n % len(scales), which is in both halves, and the zero point of that number as `zero_words`.

    >>> words = dequantise_bytes((np.uint32(0x00009800),), 1, (zero_words(4, 8),), (np.uint32(0x40004000),))
    >>> np.array(words, np.uint32).view(np.float16).tolist()
    [0.0, 2.0]
    """
    integers = np.array(words, np.uint32) >> np.uint32(8 * int(byte)) & np.uint32(0xFF)
    pairs = np.stack([integers & 15, integers >> 4], axis=1).astype(np.float32)
    of = np.arange(len(words)) % len(scales)
    zero = -np.array([zero[0] for zero in zeros], np.uint32).view(np.float16)[::2].astype(np.float32) - 1024
    factor = np.array(scales, np.uint32).view(np.float16)[::2].astype(np.float32)
    with np.errstate(all="ignore"):
        values = ((pairs - zero[of, None]) * factor[of, None]).astype(np.float16)
    return tuple(values.view(np.uint32).reshape(-1))


def _type_as_bfloat16(context: TypingContext, words: types.Type) -> Any:
    if not isinstance(words, types.UniTuple) or words.dtype != types.uint32:
        return None
    text = ("{ .reg .b16 low, high; .reg .f32 x, y; mov.b32 {low, high}, $1; cvt.f32.f16 x, low; cvt.f32.f16 y, high; "
            "cvt.rn.bf16x2.f32 $0, y, x; }")                                     # the first source is the upper half

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out = [assembly(b, text, [i32], [b.extract_value(v[0], n)], pure=True)[0] for n in range(words.count)]
        return c.make_tuple(b, words, out)

    return signature(words, words), codegen


@atom(_type_as_bfloat16)
def as_bfloat16(words: tuple) -> tuple:
    """Pairs of float16 in words as pairs of bfloat16, rounded to the nearest; sm_80+.

    >>> [hex(word) for word in as_bfloat16((np.uint32(0x40003C00),))]
    ['0x40003f80']
    """
    with np.errstate(all="ignore"):
        values = np.array(words, np.uint32).view(np.float16).astype(np.float32).astype(ml_dtypes.bfloat16)
    return tuple(values.view(np.uint32).reshape(-1))


def _type_as_float16(context: TypingContext, words: types.Type) -> Any:
    if not isinstance(words, types.UniTuple) or words.dtype != types.uint32:
        return None
    result = types.UniTuple(types.uint32, 2 * words.count)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        out = []
        for word, half in itertools.product(elements(b, v[0], words.count), ("low", "high")):
            text = f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.rn.f16x2.e4m3x2 $0, {half}; }}"
            out.append(assembly(b, text, [i32], [word], pure=True)[0])
        return c.make_tuple(b, result, out)

    return signature(result, words), codegen


@atom(_type_as_float16)
def as_float16(words: tuple) -> tuple:
    """Fours of float8_e4m3fn in words as pairs of float16, which holds them exactly; sm_89+.

    >>> [hex(word) for word in as_float16((np.uint32(0x7F38B83C),))]
    ['0xbc003e00', '0x7fff3c00']
    """
    return tuple(np.array(words, np.uint32).view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint32))


# -- integers of 4 bits as 8-bit floats --

#: -15 to 16 as float8_e4m3fn, four in a word.
_INTEGERS = tuple(int(word) for word in np.arange(-15, 17).astype(ml_dtypes.float8_e4m3fn).view(np.uint32))
_LOWER, _UPPER = 0x5410, 0x7632        # what PRMT makes of two words: one of their lower halves, one of their upper ones


def _type_float8_table(context: TypingContext, zero: types.Type) -> Any:
    if not isinstance(zero, types.Integer):
        return None
    result = types.UniTuple(types.uint32, 4)

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        first = b.sub(i32(15), c.cast(b, v[0], zero, types.uint32))
        words = [i32(word) for word in _INTEGERS]
        for bit, count in ((4, 7), (8, 5)):                # from word first / 4 on
            is_set = b.icmp_unsigned("!=", b.and_(first, i32(bit)), i32(0))
            words = [b.select(is_set, words[n + bit // 4], words[n]) for n in range(count)]
        shift = b.shl(b.and_(first, i32(3)), i32(3))
        out = [assembly(b, "shf.r.wrap.b32 $0, $1, $2, $3;", [i32], [words[n], words[n + 1], shift], pure=True)[0]
               for n in range(4)]
        return c.make_tuple(b, result, out)

    return signature(result, zero), codegen


@atom(_type_float8_table)
def float8_table(zero: int) -> tuple:
    """What integers q of 4 bits are beside a zero point from 0 to 15: q - zero as float8_e4m3fn, which holds it exactly;
    four in a word.

    >>> words = np.array(float8_table(8), np.uint32)
    >>> words.view(ml_dtypes.float8_e4m3fn).astype(int).tolist()
    [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7]
    """
    return tuple((np.arange(16) - int(zero)).astype(ml_dtypes.float8_e4m3fn).view(np.uint32))


def _type_as_float8(context: TypingContext, words: types.Type, half: types.Type, tables: types.Type) -> Any:
    if words != types.UniTuple(types.uint32, 4) or not isinstance(half, types.Integer) or tables != types.UniTuple(words, 2):
        return None

    def codegen(c: Context, b: ir.IRBuilder, s: Signature, v: Values) -> Any:
        select = b.add(b.mul(c.cast(b, v[1], half, types.uint32), i32(_UPPER - _LOWER)), i32(_LOWER))

        def permuted(one: Any, other: Any, by: Any) -> Any:
            return assembly(b, "prmt.b32 $0, $1, $2, $3;", [i32], [one, other, by], pure=True)[0]

        out = [None] * 4
        for row in range(2):
            table = [b.extract_value(b.extract_value(v[2], row), n) for n in range(4)]
            integers = permuted(b.extract_value(v[0], row), b.extract_value(v[0], row + 2), select)
            lower = b.and_(integers, i32(0x77777777))      # which of eight; the fourth bit says of which eight
            upper = assembly(b, "lop3.b32 $0, $1, 0x44444444, 0x32103210, 0xea;", [i32], [b.lshr(integers, i32(1))],
                             pure=True)[0]
            for n in range(2):
                low, high = (b.lshr(x, i32(16)) if n else x for x in (lower, upper))
                out[row + 2 * n] = permuted(permuted(table[0], table[1], low), permuted(table[2], table[3], low), high)
        return c.make_tuple(b, words, out)

    return signature(words, words, half, tables), codegen


@atom(_type_as_float8)
def as_float8(words: tuple, half: int, tables: tuple) -> tuple:
    """The four integers of 4 bits in the lower (0) or upper half of each of four words, as a fragment of float8 has them:
    word n by table n % 2 (`float8_table`).

    >>> found = as_float8((np.uint32(0x9F80),) * 4, 0, (float8_table(8),) * 2)
    >>> np.array(found, np.uint32).view(ml_dtypes.float8_e4m3fn)[:4].astype(int).tolist()
    [-8, 0, 7, 1]
    """
    out = []
    for n, word in enumerate(words):
        places = np.arange(4, dtype=np.uint32) * np.uint32(4) + np.uint32(16 * int(half))
        table = np.array(tables[n % 2], np.uint32).view(np.uint8)
        out.append(table[np.uint32(word) >> places & np.uint32(15)].view(np.uint32)[0])
    return tuple(out)


# --------------------------------------------------------------------------------------------------
# Fragments of 16- and 8-bit elements as the 32-bit registers that instructions take, and back.


def elements(builder: ir.IRBuilder, value: ir.Value, count: int) -> list:
    return [builder.extract_value(value, n) for n in range(count)]


def _is_narrow(element: types.Type) -> bool:
    return isinstance(element, ir.IntType) and element.width < 32


def to_registers(builder: ir.IRBuilder, values: list) -> list:
    """Pairs of 16-bit values, or fours of 8-bit ones, as 32-bit registers; wider values as they are. A bool is a byte."""
    if not _is_narrow(values[0].type):
        return values
    values = [builder.zext(value, i8) for value in values] if values[0].type == i1 else values
    per, packed = 32 // values[0].type.width, []
    for at in range(0, len(values), per):
        vector = ir.Constant(ir.VectorType(values[0].type, per), ir.Undefined)
        for n in range(per):
            vector = builder.insert_element(vector, values[at + n], i32(n))
        packed.append(builder.bitcast(vector, i32))
    return packed


def from_registers(builder: ir.IRBuilder, registers: list, element: types.Type) -> list:
    """The inverse of `to_registers` for elements of an LLVM type."""
    if element == i1:
        return [builder.icmp_unsigned("!=", byte, i8(0)) for byte in from_registers(builder, registers, i8)]
    if not _is_narrow(element):
        return [builder.bitcast(register, element) for register in registers]
    per, out = 32 // element.width, []
    for register in registers:
        vector = builder.bitcast(register, ir.VectorType(element, per))
        out += [builder.extract_element(vector, i32(n)) for n in range(per)]
    return out
