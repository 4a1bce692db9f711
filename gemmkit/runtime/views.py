"""Views of an array with other shapes and strides, in the array's own library. Nothing is copied."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gemmkit.runtime.arrays import ArrayInfo


def strided(x: Any, info: ArrayInfo, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """The elements of ``x``, described by ``info``, from its first one on, with another shape and other strides (in
    elements). They must stay within the array.

    >>> from gemmkit.runtime.arrays import describe
    >>> x = np.arange(6)
    >>> strided(x, describe(x), (2, 2), (3, 1)).tolist()
    [[0, 1], [3, 4]]
    """
    if (shape, strides) == (info.shape, info.strides):
        return x
    size = info.dtype.itemsize
    if info.library == "numpy":
        return np.lib.stride_tricks.as_strided(x, shape, [s * size for s in strides], writeable=not info.readonly)
    if info.library == "cupy":
        return sys.modules["cupy"].lib.stride_tricks.as_strided(x, shape, [s * size for s in strides])
    if info.library == "torch":
        return x.as_strided(shape, strides)
    return _View(x, info, shape, strides, info.pointer)


class _View:
    """A view behind ``__cuda_array_interface__``, of an array whose library makes none."""

    def __init__(self, owner: Any, info: ArrayInfo, shape: tuple[int, ...], strides: tuple[int, ...], pointer: int):
        self.owner, self.info, self.shape, self.strides, self.dtype = owner, info, shape, strides, info.dtype
        self.pointer = pointer
        self.__cuda_array_interface__ = {
            "version": 3, "shape": shape, "typestr": info.dtype.str, "data": (pointer, info.readonly),
            "strides": tuple(stride * info.dtype.itemsize for stride in strides), "stream": info.stream}

    def __getitem__(self, at: tuple[int, ...]) -> _View:
        pointer = self.pointer + self.dtype.itemsize * sum(i * stride for i, stride in zip(at, self.strides))
        return _View(self.owner, self.info, self.shape[len(at):], self.strides[len(at):], pointer)
