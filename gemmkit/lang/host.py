"""The emulator's side of memory: views of NumPy arrays and pointers into emulated shared memory.

Every access goes through the machine, which checks bounds, alignment, that the bytes were written, and that no other
thread's access is unordered with it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def _machine() -> Any:
    from gemmkit.emulator import machine

    return machine


class View:
    """A NumPy array as a kernel sees it: ``view[i, j]``, ``view.shape``; no wrap-around, every access checked."""

    __slots__ = ("address", "alignment", "dtype", "memory", "ndim", "shape", "steps", "unit")

    def __init__(self, array: np.ndarray, memory: Any, unit: int | None, alignment: int):
        self.memory, self.dtype, self.shape, self.ndim = memory, array.dtype, array.shape, array.ndim
        self.address = array.__array_interface__["data"][0]
        self.steps = array.strides
        self.unit, self.alignment = unit, alignment

    def locate(self, key: Any) -> int:
        """The absolute address of an element; an index outside the extents is an error whatever lies there."""
        key = key if isinstance(key, tuple) else (key,)
        if len(key) != self.ndim:
            raise IndexError(f"{self.memory.name} has {self.ndim} dimensions and was indexed with {key}")
        address = self.address
        for i, extent, step in zip(key, self.shape, self.steps):
            if not 0 <= i < extent:
                machine = _machine()
                machine.current().out_of_bounds(self.memory, key, self.shape)
            address += int(i) * step
        return address

    def __getitem__(self, key: Any) -> Any:
        data = _machine().current().read(self.memory, self.locate(key), self.dtype.itemsize)
        return data.view(self.dtype)[0]

    def __setitem__(self, key: Any, value: Any) -> None:
        data = np.asarray(value).astype(self.dtype).reshape(1).view(np.uint8)
        _machine().current().write(self.memory, self.locate(key), data)

    def load(self, axis: int, first: tuple, count: int) -> tuple:
        """``count`` elements along ``axis``, in accesses as wide as the device code's."""
        width = piece_elements(self, axis, count)
        thread, out = _machine().current(), []
        for at in range(0, count, width):
            key = tuple(int(i) + (at if n == axis else 0) for n, i in enumerate(first))
            self.locate(key[:axis] + (key[axis] + width - 1,) + key[axis + 1:])
            out.extend(thread.read(self.memory, self.locate(key), width * self.dtype.itemsize).view(self.dtype))
        return tuple(out)

    def store(self, axis: int, first: tuple, values: tuple) -> None:
        count = len(values)
        width = piece_elements(self, axis, count)
        thread = _machine().current()
        data = narrowed(values, self.dtype)
        for at in range(0, count, width):
            key = tuple(int(i) + (at if n == axis else 0) for n, i in enumerate(first))
            self.locate(key[:axis] + (key[axis] + width - 1,) + key[axis + 1:])
            thread.write(self.memory, self.locate(key), data[at:at + width].view(np.uint8))


def narrowed(values: tuple, dtype: np.dtype) -> np.ndarray:
    """Values converted to a dtype as the device converts them."""
    if all(type(v) is dtype.type for v in values):
        return np.array(values, dtype)
    with np.errstate(all="ignore"):
        return np.array([np.asarray(v).astype(dtype) for v in values], dtype)


def piece_bytes(total: int, alignment: int) -> int:
    """The widest access (a power of two up to 16 bytes) that the alignment class allows and that divides the whole."""
    return math.gcd(min(16, alignment), total)


def piece_elements(view: Any, axis: int, count: int) -> int:
    """Elements per access along ``axis``: one unless the axis has stride 1. Used by the device and the emulator alike."""
    if view.unit != axis:
        return 1
    return max(1, piece_bytes(count * view.dtype.itemsize, view.alignment) // view.dtype.itemsize)


class SharedPointer:
    """A typed pointer into the block's shared memory: ``pointer[i]``."""

    __slots__ = ("dtype", "offset")

    def __init__(self, dtype: np.dtype, offset: int):
        self.dtype, self.offset = dtype, offset

    def __getitem__(self, i: int) -> Any:
        return self.load(int(i), 1)[0]

    def __setitem__(self, i: int, value: Any) -> None:
        self.store(int(i), (value,))

    def load(self, first: int, count: int) -> tuple:
        size = self.dtype.itemsize
        step = piece_bytes(count * size, 16)
        thread, at = _machine().current(), self.offset + first * size
        if step == count * size:
            return tuple(thread.shared_read(at, step).view(self.dtype))
        return tuple(x for k in range(0, count * size, step)
                     for x in thread.shared_read(at + k, step).view(self.dtype))

    def store(self, first: int, values: tuple) -> None:
        size = self.dtype.itemsize
        step = piece_bytes(len(values) * size, 16)
        thread, at = _machine().current(), self.offset + first * size
        data = narrowed(values, self.dtype).view(np.uint8)
        for k in range(0, len(data), step):
            thread.shared_write(at + k, data[k:k + step])
