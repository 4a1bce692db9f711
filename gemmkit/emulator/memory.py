"""Memories of the emulated device: arrays by absolute byte address, and the shared memory of a block."""
from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gemmkit.emulator.clocks import Clock
from gemmkit.emulator.shadow import Pages

BANKS, WORD = 32, 4  # of shared memory: words of so many bytes lie in so many banks, one after the other
_POISON = 0xFF  # a NaN in every floating-point type, -1 in the integers


class _Span:
    """Exposes the bytes [base, base + size) that an array lies in; keeps the array alive."""

    def __init__(self, array: npt.NDArray[Any], base: int, size: int) -> None:
        self.array = array
        self.__array_interface__ = {
            "data": (base, not array.flags.writeable), "shape": (size,), "typestr": "|u1", "version": 3}


class Memory:
    """Bytes that a kernel can reach: `size` bytes from address `base`.

    `Memory.for_array` makes it for global memory, `Memory.shared` for a block's. The fields are the
    machine's.

    Attributes:
        valid: one byte for each byte of memory, 0 where no element lies, or in shared memory where a thread's copy is on its
            way (`thread_copies`); None when all are valid.
        written: one byte for each byte of memory, 0 where nothing has been written; None when all counts as
            written.
        pages: the access history of shared memory. None for arrays: theirs belongs to the launch and goes by
            absolute address, so that two memories over the same bytes share it.
        clocks: those of counters, by their addresses (`counters`).
    """

    __slots__ = ("base", "bytes", "clocks", "data", "name", "pages", "readonly", "size", "valid", "written")

    def __init__(self, name: str, base: int, data: npt.NDArray[np.uint8], *, readonly: bool = False,
                 valid: bytearray | None = None, written: bytearray | None = None,
                 pages: Pages | None = None) -> None:
        self.name, self.base, self.size = name, base, data.size
        self.data, self.bytes = data, memoryview(data)  # type: ignore[arg-type]
        self.readonly, self.valid, self.written, self.pages = readonly, valid, written, pages
        self.clocks: dict[int, Clock] = {}

    @classmethod
    def for_array(cls, array: npt.NDArray[Any], name: str, readonly: bool = False,
                  written: bool = True) -> Memory:
        """Global memory over a NumPy array, by absolute byte addresses as the array's data pointer gives
        them.

        Args:
            array: any shape and strides (views, transposed, negative steps). Only bytes of its elements are
                valid: the padding between the rows of a slice is not.
            name: what error messages call it.
            readonly: writes are faults.
            written: False for an output: reading a byte before it is written is a fault. What has been
                written stays so for later launches with the same Memory.

        Raises:
            TypeError: `array` is no NumPy array, or holds Python objects.
            ValueError: `array` is not writeable and `readonly` is not set.

        Example: ``memory = Memory.for_array(out, "out", written=False)``, then in a kernel
        ``thread.write(memory, out.ctypes.data + 4, data)``.
        """
        if not isinstance(array, np.ndarray):
            raise TypeError(f"array ({name}) is {type(array).__name__}; pass a numpy.ndarray")
        if array.dtype.hasobject:
            raise TypeError(f"array ({name}) has dtype {array.dtype}; pass numbers: a device has no objects")
        if not array.flags.writeable and not readonly:
            raise ValueError(f"array ({name}) is not writeable; pass readonly=True, or an array that is")
        base: int = array.__array_interface__["data"][0]
        if array.size == 0 or array.itemsize == 0:
            return cls(name, base, np.empty(0, np.uint8), readonly=readonly)
        steps = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
        base += sum(step for step in steps if step < 0)
        size = sum(map(abs, steps)) + array.itemsize
        data = np.asarray(_Span(array, base, size))
        valid = None
        if size != array.nbytes or not _is_dense(array):
            valid = bytearray(size)
            once = array[tuple(slice(None if stride else 1) for stride in array.strides)]    # along which nothing moves
            _elements(once, np.frombuffer(valid, np.uint8))[...] = 1
        return cls(name, base, data, readonly=readonly, valid=valid,
                   written=None if written else bytearray(size))

    @classmethod
    def shared(cls, size: int, name: str) -> Memory:
        """Shared memory: `size` bytes from address 0, never written, filled with bytes that read as NaN."""
        return cls(name, 0, np.full(size, _POISON, np.uint8), written=bytearray(size), pages={})


def _is_dense(array: npt.NDArray[Any]) -> bool:
    """Whether the elements fill their span without gap or overlap, in some order of the axes."""
    expected = array.itemsize
    for stride, extent in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True


def _elements(array: npt.NDArray[Any], span: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The bytes of `array`'s elements, in `span` that stands for the bytes from its lowest address on."""
    strides = (*map(abs, array.strides), 1)  # a negative step visits the same bytes from the other end
    return np.lib.stride_tricks.as_strided(span, (*array.shape, array.itemsize), strides)


for_array = Memory.for_array
