"""Swizzles: permutations of offsets that XOR bits of an offset with bits further up, so that columns meet in no bank.

Shared memory of a GPU has 32 banks of 4 bytes. Rows that begin in the same bank are read one after the other where threads
read a column of them. A swizzle moves what a row has in a place that depends on the row's number, and takes no memory for
it, as padding would. TMA's and wgmma's are of this kind (PTX ISA, "Shared memory matrix layout"; CUTLASS's ``Swizzle<bits,
base, shift>`` is ``Swizzle((shift, mask))`` with ``mask = (2**bits - 1) << base``):

>>> swizzle = lines(128, itemsize=2)                          # rows of 128 bytes, of elements of 2 bytes
>>> swizzle
Swizzle((3, 56))
>>> [swizzle(64 * row) for row in range(4)]                   # chunks of 8 elements change places
[0, 72, 144, 216]
>>> swizzle.run, swizzle.period
(8, 512)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_, xor
from typing import Any

from gemmkit.lang.statics import Static
from gemmkit.strides import ShapeError

CHUNK = 16                                                    # bytes that the hardware's swizzles keep together


class Swizzle(Static):
    """``i ^ ((i >> shift) & mask) ^ ...``, a term for each ``(shift, mask)``; a negative shift is one to the left.

    Device code as it stands. Of other terms than `lines` and `of_function` give, the caller sees to it that no two offsets
    meet.
    """

    def __init__(self, *terms: tuple[int, int]):
        self.terms = terms

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Swizzle) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(self.terms)

    def __repr__(self) -> str:
        return f"Swizzle({', '.join(map(str, self.terms))})"

    def __call__(self, offset: Any) -> Any:
        """Where an offset goes: a number, an array of them, a run-time number."""
        out = offset
        for shift, mask in self.terms:
            out = out ^ ((offset >> shift if shift >= 0 else offset << -shift) & mask)
        return out

    @property
    def _bits(self) -> int:
        """All bits that are changed, or that say how others are."""
        return reduce(or_, (mask | (mask << shift if shift >= 0 else mask >> -shift) for shift, mask in self.terms), 0)

    @property
    def run(self) -> int:
        """How many offsets, from a multiple of the number on, stay neighbours: a power of two; of no terms 0."""
        return self._bits & -self._bits

    @property
    def period(self) -> int:
        """A power of two of which multiples move on unchanged: ``swizzle(i + period) == swizzle(i) + period``."""
        return 1 << self._bits.bit_length()


NONE = Swizzle()


def lines(width: int, itemsize: int = 1) -> Swizzle:
    """The hardware's swizzle of lines of ``width`` bytes (32, 64 or 128; 0: none), of elements of ``itemsize`` bytes: chunks
    of 16 bytes change places, by the line's number in a pattern of 1024 bytes.

    >>> lines(64)
    Swizzle((3, 48))
    """
    return Swizzle((3, (width - CHUNK) // itemsize)) if width else NONE


def of_function(function: Callable[[int], int], count: int) -> Swizzle:
    """The swizzle that a function of an offset is, checked at all of ``count`` offsets.

    Raises ShapeError where two offsets meet or one leaves, and for a permutation that is no XOR of bits: of that the machine
    code would be as long as the function.

    >>> of_function(lambda i: i ^ (i >> 2 & 3), 16)
    Swizzle((2, 3))
    >>> of_function(lambda i: i // 2, 16)
    Traceback (most recent call last):
    ...
    gemmkit.strides.ShapeError: it is no permutation of 16 offsets: 0 and 1 both go to 0
    """
    places = [int(function(i)) for i in range(count)]
    first: dict[int, int] = {}
    for i, place in enumerate(places):
        if not 0 <= place < count:
            raise ShapeError(f"it is no permutation of {count} offsets: {i} goes to {place}")
        if place in first:
            raise ShapeError(f"it is no permutation of {count} offsets: {first[place]} and {i} both go to {place}")
        first[place] = i
    masks: dict[int, int] = {}
    bits = [1 << n for n in range((count - 1).bit_length())]
    for n, bit in enumerate(bits):
        changed = places[bit] ^ bit
        for at in (m for m in range(changed.bit_length()) if changed >> m & 1):
            masks[n - at] = masks.get(n - at, 0) | 1 << at
    found = Swizzle(*sorted(masks.items()))
    odd = next((i for i in range(count) if found(i) != places[i]), None)
    if odd is not None:
        parts = reduce(xor, (places[bit] for bit in bits if odd & bit), 0)
        raise ShapeError(f"it is no XOR of an offset's bits: {odd} goes to {places[odd]}, its bits one by one to {parts}")
    return found
