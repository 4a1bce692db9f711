"""Memory in which every byte knows whether it may be read and written, and whether anything has written it.

A state space (global, shared, local) is one `Memory`: bytes, and a byte of flags for each. An access is checked for all threads at
once, to the byte. Addresses of the spaces are apart, so that a generic address says which space it means.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx_machine.faults import Fault
from tests.ptx_machine.kinds import UNSIGNED

READABLE, WRITABLE, WRITTEN = 1, 2, 4
POISON = 0x5B                           # every byte that nothing has written
WINDOWS = {"shared": 1 << 34, "local": 1 << 36, "global": 1 << 40}     # where generic addresses begin; a process's are beyond
NEAR = 64                               # bytes around arrays of which it is said near which array they are
RANK = 24                               # a shared address by `mapa` has the block's rank in its cluster, and 1, from this bit on


class Memory:
    """``size`` bytes that nothing has written; places in it count from 0."""

    def __init__(self, name: str, size: int, flags: int = 0):
        size = -(-max(size, 1) // 16) * 16
        self.name = name
        self.bytes = np.full(size, POISON, np.uint8)
        self.flags = np.full(size, flags, np.uint8)

    def read(self, at: np.ndarray, size: int, count: int, instruction: Any) -> list[np.ndarray]:
        """``count`` values of ``size`` bytes from each place on, as unsigned integers."""
        self._check(at, size, count, READABLE | WRITTEN, instruction)
        first, words = at // size, self.bytes.view(UNSIGNED[8 * size])
        return [words[first + n] for n in range(count)]

    def write(self, at: np.ndarray, size: int, values: list[np.ndarray], instruction: Any) -> None:
        """``values[n][i]`` to the n-th place behind ``at[i]``."""
        self._check(at, size, len(values), WRITABLE, instruction)
        first, kind = at // size, UNSIGNED[8 * size]
        words, flags = self.bytes.view(kind), self.flags.view(kind)
        for n, value in enumerate(values):
            words[first + n] = value
            flags[first + n] |= kind.type(int.from_bytes([WRITTEN] * size, "little"))

    def _check(self, at: np.ndarray, size: int, count: int, wanted: int, instruction: Any) -> None:
        total = size * count
        if (at % total).any():
            raise Fault(f"{self.name} memory: an access of {total} bytes at {int(at[at % total != 0][0]):#x}, which is misaligned", instruction)
        inside = (at >= 0) & (at + total <= self.bytes.size)
        if not inside.all():
            raise Fault(f"{self.name} memory: {int(at[~inside][0]):#x} is out of bounds, of {int((~inside).sum())} threads", instruction)
        kind = UNSIGNED[8 * size]
        flags, need = self.flags.view(kind), kind.type(int.from_bytes([wanted] * size, "little"))
        for n in range(count):
            right = flags[at // size + n] & need == need
            if not right.all():
                self._refuse(int(at[~right][0]) + n * size, size, wanted, int((~right).sum()), instruction)

    def _refuse(self, at: int, size: int, wanted: int, threads: int, instruction: Any) -> None:
        missing = wanted & ~int(np.bitwise_and.reduce(self.flags[at:at + size]))
        what = ("out of bounds" if missing & READABLE else "read, and nothing has written there" if missing & WRITTEN
                else "written, and may not be")
        raise Fault(f"{self.name} memory: {size} bytes at {self.tell(at)} are {what}, by {threads} threads", instruction)

    def tell(self, at: int) -> str:
        return f"{at:#x}"


class GlobalMemory(Memory):
    """Arrays of NumPy where a kernel's pointers point to.

    Each is copied in at its own alignment, with everything between its elements out of bounds, and what was written is copied back.
    Arrays that share memory share it here. Addresses are NumPy's own.
    """

    def __init__(self, arrays: list[Array]):
        self.segments: list[list[int]] = []                            # [first address, the one behind, place]
        for low, high in sorted(_range(a.array) for a in arrays if a.array.size):
            if self.segments and low <= self.segments[-1][1] + 2 * NEAR:
                self.segments[-1][1] = max(high, self.segments[-1][1])
            else:
                self.segments.append([low, high, 0])
        place = 512
        for segment in self.segments:
            segment[2] = place + segment[0] % 256
            place = -(-(segment[2] + segment[1] - segment[0]) // 256) * 256 + 256           # so that `NEAR` is nobody else's
        super().__init__("global", place)
        self.arrays = [a for a in arrays if a.array.size]
        for a in self.arrays:
            flags = READABLE | (WRITABLE if a.is_output else 0) | (WRITTEN if a.is_written else 0)
            self._mine(a.array, self.bytes)[...] = _as_bytes(a.array)
            self._mine(a.array, self.flags)[...] |= np.uint8(flags)
            if a.reads_words:
                self._words_around(a.array)

    def _words_around(self, array: np.ndarray) -> None:
        """Words with an element of the array can be read wholly; what else is in them must not matter."""
        mine = np.zeros(self.flags.size, bool)
        self._mine(array, mine)[...] = True
        words = mine.reshape(-1, 4).any(1)
        others = np.repeat(words, 4) & (self.flags == 0)
        self.flags[others] = READABLE | WRITTEN

    def places(self, addresses: np.ndarray, instruction: Any) -> np.ndarray:
        """Where addresses (NumPy's own) are here."""
        ordered = np.array(self.segments or [[0, 0, 0]])
        n = np.maximum(np.searchsorted(ordered[:, 0] - NEAR, addresses, "right") - 1, 0)
        low, high, place = ordered[n].T
        outside = (addresses < low - NEAR) | (addresses >= high + NEAR)
        if outside.any():
            raise Fault(f"global memory: {int(addresses[outside][0]):#x} is in no array, of {int(outside.sum())} threads", instruction)
        return addresses - low + place

    def _place(self, array: np.ndarray) -> int:
        at = array.__array_interface__["data"][0]
        low, _, place = next(s for s in self.segments if s[0] <= at < s[1])
        return at - low + place

    def _mine(self, array: np.ndarray, memory: np.ndarray) -> np.ndarray:
        """The bytes of an array's elements in ``memory``: of its shape, with an axis of bytes more."""
        return np.ndarray((*array.shape, array.itemsize), memory.dtype, memory, self._place(array), (*array.strides, 1))

    def copy_back(self) -> None:
        """What the outputs are now."""
        for a in self.arrays:
            if a.is_output:
                made = np.ascontiguousarray(self._mine(a.array, self.bytes)).view(a.array.dtype)
                a.array[...] = made.reshape(a.array.shape)

    def tell(self, at: int) -> str:
        near = [f"{a.name} + {at - self._place(a.array)}" for a in self.arrays if self._of_segment(a.array, at)]
        return f"{at:#x}" + (f" ({', '.join(near)})" if near else "")

    def _of_segment(self, array: np.ndarray, at: int) -> bool:
        low, high, place = next(s for s in self.segments if s[0] <= array.__array_interface__["data"][0] < s[1])
        return place - NEAR <= at < place + high - low + NEAR


class Array:
    """An array that a kernel gets: ``is_written`` says that its elements may be read, ``is_output`` that they may be written,
    ``reads_words`` that the words with its elements may be read wholly."""

    def __init__(self, array: np.ndarray, name: str, is_output: bool = False, is_written: bool = True, reads_words: bool = False):
        self.array, self.name, self.is_output, self.is_written, self.reads_words = array, name, is_output, is_written, reads_words


def _range(array: np.ndarray) -> tuple[int, int]:
    return np.lib.array_utils.byte_bounds(array)


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """The elements' bytes, on a last axis."""
    flat = np.ascontiguousarray(array)
    return flat.view(np.uint8).reshape(*array.shape, array.itemsize)


__all__ = ["RANK", "WINDOWS", "Array", "GlobalMemory", "Memory"]
