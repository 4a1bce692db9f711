"""The emulator's side of memory: views of NumPy arrays and pointers into emulated shared memory.

Every access goes through the machine, which checks bounds, alignment, that the bytes were written, and that no other
thread's access is unordered with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from gemmkit.lang.narrowing import check_stored
from gemmkit.lang.records import Record, part_size, scalars, to_dtype
from gemmkit.lang.sites import current
from gemmkit.runtime.arrays import part_bytes


class View:
    """A NumPy array as a kernel sees it: ``view[i, j]``, ``view.shape``; no wrap-around, every access checked."""

    __slots__ = ("address", "alignment", "apart", "dtype", "memory", "ndim", "shape", "steps", "unit")

    def __init__(self, array: np.ndarray, memory: Any, unit: int | None, alignment: int):
        self.memory, self.dtype, self.shape, self.ndim = memory, array.dtype, array.shape, array.ndim
        self.address = array.__array_interface__["data"][0]
        self.steps = array.strides
        self.unit, self.alignment = unit, alignment
        own = access_alignment(self, 1) if self.dtype.names is None else self.dtype.itemsize
        self.apart = own if own < self.dtype.itemsize else None          # its numbers are read part by part

    def at(self, coordinates: tuple) -> View:
        """What the first dimensions' coordinates leave: a matrix of a stack, in the same memory."""
        if not all(0 <= i < extent for i, extent in zip(coordinates, self.shape)):
            current().out_of_bounds(self.memory, coordinates, self.shape)
        out, count = object.__new__(View), len(coordinates)
        for name in ("memory", "dtype", "alignment", "apart"):
            setattr(out, name, getattr(self, name))
        out.address = self.address + sum(int(i) * step for i, step in zip(coordinates, self.steps))
        out.shape, out.steps, out.ndim = self.shape[count:], self.steps[count:], self.ndim - count
        out.unit = None if self.unit is None or self.unit < count else self.unit - count
        return out

    def locate(self, key: tuple, axis: int = 0, count: int = 1) -> int:
        """The absolute address of an element, the first of ``count`` along ``axis``.

        An index outside the extents is an error whatever lies there.
        """
        if len(key) != self.ndim:
            raise IndexError(f"{self.memory.name} has {self.ndim} dimensions and was indexed with {key}")
        address = self.address
        for i, extent, step in zip(key, self.shape, self.steps):
            if i.__class__ is not int:
                i = int(i) if isinstance(i, int) else i          # a coordinate's own arithmetic takes long
            if not 0 <= i < extent:
                current().out_of_bounds(self.memory, key, self.shape)
            address += int(i) * step
        if count > 1 and key[axis] + count > self.shape[axis]:
            last = tuple(i + (count - 1 if n == axis else 0) for n, i in enumerate(key))
            current().out_of_bounds(self.memory, last, self.shape)
        return address

    def __getitem__(self, key: Any) -> Any:
        key = key if isinstance(key, tuple) else (key,)
        if self.dtype.names is not None:
            return scalars(self.load_bytes(0, key, 1), self.dtype)[0]
        return current().read(self.memory, self.locate(key), self.dtype.itemsize, self.apart).view(self.dtype)[0]

    def __setitem__(self, key: Any, value: Any) -> None:
        key = key if isinstance(key, tuple) else (key,)
        if isinstance(value, (Record, tuple)) or self.dtype.names is not None:
            self.store(0, key, (value,))
            return
        if type(value) is not self.dtype.type:
            check_stored(value, self.dtype)
        data = np.asarray(value).astype(self.dtype).reshape(1).view(np.uint8)
        current().write(self.memory, self.locate(key), data, self.apart)

    def load(self, axis: int, first: tuple, count: int) -> tuple:
        """``count`` elements along ``axis``, in accesses as wide as the device code's."""
        return scalars(self.load_bytes(axis, first, count), self.dtype)

    def load_bytes(self, axis: int, first: tuple, count: int) -> np.ndarray:
        """`load`, as bytes."""
        if self.dtype.names is not None:
            return np.concatenate([current().read(self.memory, address, size)
                                   for address, size in self._accesses(axis, first, count)])
        width = piece_elements(self, axis, count)
        read, memory, size = current().read, self.memory, width * self.dtype.itemsize
        apart = self.apart if width == 1 else None
        if width == count:
            return read(memory, self.locate(first, axis, width), size, apart)
        return np.concatenate([read(memory, self.locate(_ahead(first, axis, at), axis, width), size, apart)
                               for at in range(0, count, width)])

    def store(self, axis: int, first: tuple, values: tuple) -> None:
        count = len(values)
        thread = current()
        for value in values if {*map(type, values)} != {self.dtype.type} else ():
            check_stored(value, self.dtype)
        data = narrowed(values, self.dtype)
        if self.dtype.names is not None:
            raw, at = data.view(np.uint8), 0
            for address, size in self._accesses(axis, first, count):
                thread.write(self.memory, address, raw[at:at + size])
                at += size
            return
        width = piece_elements(self, axis, count)
        for at in range(0, count, width):
            address = self.locate(_ahead(first, axis, at), axis, width)
            thread.write(self.memory, address, data[at:at + width].view(np.uint8), self.apart if width == 1 else None)

    def _accesses(self, axis: int, first: tuple, count: int) -> Iterator[tuple[int, int]]:
        """Address and size of each access to ``count`` records, which may be wider or narrower than a record."""
        run, step = record_accesses(self, axis, count)
        for at in range(0, count, run):
            address = self.locate(_ahead(first, axis, at), axis, run)
            for byte in range(0, run * self.dtype.itemsize, step):
                yield address + byte, step


def _ahead(position: tuple, axis: int, distance: int) -> tuple:
    return tuple(i + (distance if n == axis else 0) for n, i in enumerate(position)) if distance else position


def narrowed(values: tuple, dtype: np.dtype) -> np.ndarray:
    """Values converted to a dtype as the device converts them."""
    if dtype.names is not None:
        return np.array([tuple(to_dtype(dtype, v)) for v in values], dtype)
    if {*map(type, values)} == {dtype.type}:
        return np.array(values, dtype)
    with np.errstate(all="ignore"):
        return np.array([to_dtype(dtype, v) if isinstance(v, (Record, tuple)) else np.asarray(v).astype(dtype)
                         for v in values], dtype)


def piece_bytes(total: int, alignment: int) -> int:
    """The widest access (a power of two up to 16 bytes) that the alignment class allows and that divides the whole."""
    return math.gcd(min(16, alignment), total)


def piece_elements(view: Any, axis: int, count: int) -> int:
    """Elements per access along ``axis``: one unless the axis has stride 1. Used by the device and the emulator alike."""
    if view.unit != axis:
        return 1
    return max(1, piece_bytes(count * view.dtype.itemsize, view.alignment) // view.dtype.itemsize)


def access_alignment(view: Any, width: int) -> int:
    """Where an access to ``width`` neighbours starts, in bytes: at a multiple of its size. A complex number's address may be
    a multiple of its parts' size alone."""
    size = view.dtype.itemsize
    return width * size if width > 1 else min(size, max(view.alignment, part_bytes(view.dtype)))


def record_accesses(view: Any, axis: int, count: int) -> tuple[int, int]:
    """Of ``count`` records along ``axis``: how many are neighbours in memory, and the bytes of each access to them."""
    run = count if view.unit == axis else 1
    return run, max(part_size(view.dtype), piece_bytes(run * view.dtype.itemsize, view.alignment))


class SharedPointer:
    """A typed pointer into the block's shared memory: ``pointer[i]``."""

    __slots__ = ("dtype", "offset")

    def __init__(self, dtype: np.dtype, offset: int):
        self.dtype, self.offset = dtype, offset

    def __getitem__(self, i: int) -> Any:
        return self.load(int(i), 1)[0]

    def __setitem__(self, i: int, value: Any) -> None:
        self.store(int(i), (value,))

    def moved(self, dtype: np.dtype, distance: int) -> SharedPointer:
        """A pointer to elements of ``dtype``, ``distance`` bytes behind this one."""
        return SharedPointer(dtype, self.offset + distance)

    def from_base(self, base: int) -> SharedPointer:
        """The pointer for an access whose position has this base."""
        return self

    def load(self, first: int, count: int) -> tuple:
        return scalars(self.load_bytes(first, count), self.dtype)

    def load_bytes(self, first: int, count: int) -> np.ndarray:
        size = count * self.dtype.itemsize
        step, at = piece_bytes(size, 16), self.offset + first * self.dtype.itemsize
        thread = current()
        memory = thread.block.shared
        if step == size:
            return thread.read(memory, at, step)
        return np.concatenate([thread.read(memory, at + k, step) for k in range(0, size, step)])

    def store(self, first: int, values: tuple) -> None:
        self.store_bytes(first, narrowed(values, self.dtype).view(np.uint8))

    def store_bytes(self, first: int, data: np.ndarray) -> None:
        step, at = piece_bytes(len(data), 16), self.offset + first * self.dtype.itemsize
        thread = current()
        for k in range(0, len(data), step):
            thread.write(thread.block.shared, at + k, data[k:k + step])


class PinnedPointer(SharedPointer):
    """A pointer whose accesses have one base: compiled code has added ``place``, and does not look at theirs."""

    __slots__ = ("place",)

    def __init__(self, dtype: np.dtype, offset: int, place: int):
        super().__init__(dtype, offset)
        self.place = place

    def moved(self, dtype: np.dtype, distance: int) -> SharedPointer:
        return PinnedPointer(dtype, self.offset + distance, self.place)

    def from_base(self, base: int) -> SharedPointer:
        if base * self.dtype.itemsize != self.place:
            raise ValueError(f"a load from base {base} of elements of {self.dtype} by a pointer that is pinned to byte "
                             f"{self.place}: the operator's place_a or place_b is not where its load_a or load_b begins")
        return self
