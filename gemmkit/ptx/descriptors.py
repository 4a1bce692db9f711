"""Matrix descriptors: how ``wgmma`` is told where an operand lies in shared memory (PTX ISA, "Matrix-descriptor format").

64 bits: where the operand starts, how it is swizzled, and two distances. The instruction reads its operand in blocks of 8
lines (of rows of A or columns of B, when the operand is K-major) by one swizzle width:

* K-major: the next 8 lines are ``stride_bytes`` on. Along K an instruction stays within the width, except without a swizzle:
  there the width is 16 bytes, and the second half of K is ``leading_bytes`` on.
* MN-major: lines run along M or N, and 8 of them are 8 steps of K. The next 8 steps of K are ``stride_bytes`` on, the next
  swizzle width along M or N is ``leading_bytes`` on. (Without a swizzle the two change places.)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gemmkit import swizzles
from gemmkit.lang.atoms import atom
from gemmkit.lang.memory import SharedType, coordinates_of
from gemmkit.lang.numba_hooks import TypingError, ir, signature, types
from gemmkit.lang.scalars import index
from gemmkit.ptx.ldmatrix import shared_address
from gemmkit.shapes import Shape
from gemmkit.swizzles import CHUNK  # 16 bytes: the unit of addresses and distances

i32, i64 = ir.IntType(32), ir.IntType(64)
_FIELD = 0x3FFF
_SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}


class Descriptor(NamedTuple):
    """What a descriptor says, in bytes; ``swizzle`` is its width (0: none)."""

    address: int
    leading_bytes: int
    stride_bytes: int
    swizzle: int

    def addresses(self, lines: int, major: str) -> np.ndarray:
        """Where the hardware looks for the chunks of ``lines`` lines by 32 bytes of K.

        K-major: of line i the chunks [i, 0] and [i, 1]. MN-major: [i, k] are 8 lines from 8 i on, at k (0 to 15).
        """
        logical = self.address + _offsets(lines, major, self.leading_bytes, self.stride_bytes, self.swizzle)
        return np.asarray(swizzles.lines(self.swizzle)(logical))


@lru_cache
def _offsets(lines: int, major: str, leading: int, stride: int, width: int) -> np.ndarray:
    """The addresses without a swizzle, from the start of the operand on (the canonical layouts of the PTX ISA)."""
    first, second = (lines, 2) if major == "K" else (lines // 8, 16)
    offsets = _blocks(lines, major, leading, stride, width)(np.arange(first)[:, None], np.arange(second))
    return np.zeros((first, second), int) + offsets


def _blocks(lines: int, major: str, leading: int, stride: int, width: int) -> Shape:
    """From (line, chunk) of a K-major operand, or (chunk of 8 lines, k) of an MN-major one, to bytes."""
    if major == "K":
        return Shape(((8, lines // 8), 2), ((width or CHUNK, stride), CHUNK if width else leading))
    if not width:
        return Shape((lines // 8, (8, 2)), (stride, (CHUNK, leading)))
    across = width // CHUNK
    return Shape(((across, -(-lines // 8 // across)), (8, 2)), ((CHUNK, leading), (width, stride)))


def constant_bits(leading_bytes: int, stride_bytes: int, swizzle: int) -> int:
    """A descriptor without its address.

    Raises ValueError for a distance that is no multiple of 16 from 0 to 262128, and for an unknown swizzle.
    """
    for name, value in (("leading_bytes", leading_bytes), ("stride_bytes", stride_bytes)):
        if value % CHUNK or not 0 <= value // CHUNK <= _FIELD:
            raise ValueError(f"matrix_descriptor: {name} is {value}; a multiple of {CHUNK} from 0 to {_FIELD * CHUNK} is "
                             "needed")
    if swizzle not in _SWIZZLES:
        raise ValueError(f"matrix_descriptor: swizzle is {swizzle}; 0, 32, 64 and 128 bytes are known")
    return leading_bytes // CHUNK << 16 | stride_bytes // CHUNK << 32 | _SWIZZLES[swizzle] << 62


def decode(descriptor: int) -> Descriptor:
    """What the bits of a descriptor say.

    >>> decode(1 << 62 | 64 << 32 | 1 << 16 | 128)
    Descriptor(address=2048, leading_bytes=16, stride_bytes=1024, swizzle=128)
    """
    address, leading, stride = ((int(descriptor) >> at & _FIELD) * CHUNK for at in (0, 16, 32))
    code = int(descriptor) >> 62 & 3
    return Descriptor(address, leading, stride, next(width for width, c in _SWIZZLES.items() if c == code))


def _type_descriptor(context: Any, pointer: Any, position: Any, leading: Any, stride: Any, swizzle: Any) -> Any:
    if not isinstance(pointer, SharedType) or not isinstance(position, types.Integer):
        return None
    for name, ty in (("leading_bytes", leading), ("stride_bytes", stride), ("swizzle", swizzle)):
        if not isinstance(ty, types.IntegerLiteral):
            raise TypingError(f"matrix_descriptor: {name} must be a compile-time number in device code")
    try:
        bits = constant_bits(leading.literal_value, stride.literal_value, swizzle.literal_value)
    except ValueError as error:
        raise TypingError(str(error)) from None
    bits -= bits >> 63 << 64                   # as a signed number

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        address = shared_address(b, pointer, v[0], coordinates_of(c, b, position, v[1]))
        chunk = b.and_(b.lshr(address, i32(4)), i32(_FIELD))
        return b.or_(b.zext(chunk, i64), i64(bits))

    return signature(types.int64, pointer, position, leading, stride, swizzle), codegen


@atom(_type_descriptor)
def matrix_descriptor(pointer: Any, position: int, leading_bytes: int, stride_bytes: int, swizzle: int) -> int:
    """The descriptor of an operand that starts at element ``position`` of ``pointer``; the rest are constants.

    Raises ValueError for distances that are no multiples of 16, an unknown swizzle, or a start between chunks of 16 bytes.
    """
    address = pointer.offset + int(position) * pointer.dtype.itemsize
    if address % CHUNK:
        raise ValueError(f"matrix_descriptor: the operand starts at byte {address} of shared memory; it must be at a "
                         f"multiple of {CHUNK}")
    return constant_bits(leading_bytes, stride_bytes, swizzle) | (address // CHUNK & _FIELD)


def _type_advance(context: Any, descriptor: Any, nbytes: Any) -> Any:
    if not (isinstance(descriptor, types.Integer) and isinstance(nbytes, types.Integer)):
        return None

    def codegen(c: Any, b: Any, s: Any, v: Any) -> Any:
        if isinstance(nbytes, types.IntegerLiteral):
            chunks = i64(nbytes.literal_value >> 4)
        else:
            chunks = b.sext(b.ashr(c.cast(b, v[1], nbytes, index), i32(4)), i64)
        return b.add(c.cast(b, v[0], descriptor, types.int64), chunks)

    return signature(types.int64, descriptor, nbytes), codegen


@atom(_type_advance)
def advance(descriptor: int, nbytes: int) -> int:
    """The descriptor of what lies ``nbytes`` (a multiple of 16) further on in shared memory."""
    return descriptor + (int(nbytes) >> 4)
