"""Words as bits: logic, shifts, fields and bytes."""

from __future__ import annotations

import numpy as np

from tests.ptx_machine.faults import UnknownInstruction
from tests.ptx_machine.kinds import KINDS, Kind
from tests.ptx_machine.parser import Instruction
from tests.ptx_machine.registry import Operation, operation

B32, U32, S32 = KINDS["b32"], KINDS["u32"], KINDS["s32"]


@operation("and", "or", "xor")
def logic(i: Instruction) -> Operation:
    i.only()
    return Operation([i.kind, i.kind], i.kind, {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[i.name])


@operation("not")
def negation(i: Instruction) -> Operation:
    i.only()
    return Operation([i.kind], i.kind, np.invert)


@operation("cnot")
def logical_negation(i: Instruction) -> Operation:
    i.only()
    return Operation([i.kind], i.kind, lambda a: (a == 0).astype(i.kind.dtype))


@operation("lop3")
def lop3(i: Instruction) -> Operation:
    """Bit by bit, by a table: bit 4 a + 2 b + c of the last operand."""
    i.only()

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
        out = np.zeros_like(a | b | c)
        for n in range(8):
            term = (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
            out = out | np.where(table >> np.uint32(n) & np.uint32(1), term, np.uint32(0))
        return out

    return Operation([B32] * 4, B32, compute)


@operation("shl", "shr")
def shift(i: Instruction) -> Operation:
    """Amounts above the width count as the width."""
    i.only()
    kind = i.kind

    def compute(a: np.ndarray, by: np.ndarray) -> np.ndarray:
        far, n = by >= kind.bits, (by % kind.bits).astype(kind.dtype)
        if i.name == "shr":
            return np.where(far, a >> kind.dtype.type(kind.bits - 1) if kind.is_signed else np.zeros_like(a), a >> n)
        return np.where(far, np.zeros_like(a), a << n)

    return Operation([kind, U32], kind, compute)


@operation("shf")
def funnel(i: Instruction) -> Operation:
    """A shift of two words (the second the upper) of which one remains."""
    i.only("l", "r", "wrap", "clamp")
    left, wrap = i.one_of("l", "r") == "l", i.one_of("wrap", "clamp") == "wrap"

    def compute(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
        n = (by % np.uint32(32) if wrap else np.minimum(by, np.uint32(32))).astype(np.uint64)
        both = high.astype(np.uint64) << np.uint64(32) | low
        out = both >> (np.uint64(32) - n) if left else both >> n
        return (out & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return Operation([B32, B32, U32], B32, compute)


@operation("bfe")
def extract(i: Instruction) -> Operation:
    """``length`` bits from ``at`` on, by the type's sign; beyond the word there are copies of the sign, or zeros."""
    i.only()
    kind = i.kind

    def compute(a: np.ndarray, at: np.ndarray, length: np.ndarray) -> np.ndarray:
        at, length = at & np.uint32(255), length & np.uint32(255)
        word = a.astype(np.int64 if kind.is_signed else np.uint64)
        at = np.minimum(at, kind.bits - 1) if kind.is_signed else at
        moved = np.where(at >= 64, 0, word >> np.minimum(at, 63).astype(word.dtype)).astype(word.dtype)
        keep = np.clip(64 - length.astype(np.int64), 0, 63).astype(word.dtype)
        return np.where(length == 0, word.dtype.type(0), moved << keep >> keep).astype(kind.dtype)

    return Operation([kind, U32, U32], kind, compute)


@operation("bfi")
def insert(i: Instruction) -> Operation:
    """The first ``length`` bits of a in b, from ``at`` on."""
    i.only()
    kind = i.kind

    def compute(a: np.ndarray, b: np.ndarray, at: np.ndarray, length: np.ndarray) -> np.ndarray:
        at, length = at.astype(np.int64) & 255, length.astype(np.int64) & 255
        n = np.arange(kind.bits)
        hole = (n >= at[..., None]) & (n < (at + length)[..., None])
        mask = (hole.astype(np.uint64) << n.astype(np.uint64)).sum(-1, dtype=np.uint64).astype(kind.dtype)
        moved = np.where(at >= kind.bits, kind.dtype.type(0), a << (at % kind.bits).astype(kind.dtype))
        return (b & ~mask) | (moved & mask)

    return Operation([kind, kind, U32, U32], kind, compute)


@operation("brev")
def reverse(i: Instruction) -> Operation:
    i.only()
    kind = i.kind

    def compute(a: np.ndarray) -> np.ndarray:
        out = np.zeros_like(a)
        for n in range(kind.bits):
            out |= (a >> kind.dtype.type(n) & kind.dtype.type(1)) << kind.dtype.type(kind.bits - 1 - n)
        return out

    return Operation([kind], kind, compute)


def bit_length(a: np.ndarray, kind: Kind) -> np.ndarray:
    out = np.zeros(a.shape, np.uint32)
    for n in range(kind.bits):
        out = np.where(a >> kind.dtype.type(n) & kind.dtype.type(1), np.uint32(n + 1), out)
    return out


@operation("popc", "clz")
def count(i: Instruction) -> Operation:
    i.only()
    kind = i.kind
    if i.name == "popc":
        return Operation([kind], U32, lambda a: np.bitwise_count(a).astype(np.uint32))
    return Operation([kind], U32, lambda a: np.uint32(kind.bits) - bit_length(a, kind))


@operation("prmt")
def permute(i: Instruction) -> Operation:
    """Bytes of two words, as four digits say; a digit's upper bit takes the sign in place of the byte."""
    i.only()
    if len(i.modifiers) != 1:
        raise UnknownInstruction("only the general form", i)

    def compute(a: np.ndarray, b: np.ndarray, how: np.ndarray) -> np.ndarray:
        both = b.astype(np.uint64) << np.uint64(32) | a
        out = np.zeros(np.broadcast_shapes(both.shape, how.shape), np.uint32)
        for n in range(4):
            digit = how.astype(np.uint64) >> np.uint64(4 * n)
            byte = (both >> (np.uint64(8) * (digit & np.uint64(7)))).astype(np.uint8)
            signs = np.where(byte & np.uint8(128), np.uint8(255), np.uint8(0))
            out = out | np.where(digit & np.uint64(8), signs, byte).astype(np.uint32) << np.uint32(8 * n)
        return out

    return Operation([B32, B32, B32], B32, compute)
