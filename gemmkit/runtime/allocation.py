"""New arrays of one kind, by the shortest way that their library offers.

`gemmkit.runtime.arrays.empty_like` makes any array like any other; a plan makes the same array at every call, so that all
but the allocation itself is settled beforehand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.runtime import arrays, device
from gemmkit.runtime.array_info import ArrayInfo

Allocate = Callable[[], tuple[Any, int]]


def allocator(like: ArrayInfo, shape: tuple[int, ...], dtype: Any) -> Allocate:
    """A function that makes an array as ``empty_like(like, shape, dtype)`` does, and returns it with its pointer.

    Raises nothing; what the function cannot make it says when it is called.
    """
    shape, dtype, is_alone = tuple(map(int, shape)), np.dtype(dtype), device.count() < 2
    if like.library == "cupy" and is_alone:  # else its current device may be another
        return _of_cupy(shape, dtype)
    if like.library == "torch":
        torch_dtype = arrays._to_torch().get(dtype)
        if torch_dtype is not None:
            return _of_torch(shape, torch_dtype, None if is_alone else like.device)

    def allocate() -> tuple[Any, int]:
        made = arrays.empty_like(like, shape, dtype)
        return made, arrays.describe(made).pointer

    return allocate


def _of_cupy(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Allocate:
    ndarray = sys.modules["cupy"].ndarray  # what cupy.empty calls

    def allocate() -> tuple[Any, int]:
        made = ndarray(shape, dtype)
        return made, made.data.ptr

    return allocate


def _of_torch(shape: tuple[int, ...], dtype: Any, ordinal: int | None) -> Allocate:
    torch = sys.modules["torch"]
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    short: Any = getattr(guards, "_empty_strided_cuda", None)
    strides, place = arrays._contiguous(shape), torch.device("cuda", ordinal or 0)

    def allocate_shortly() -> tuple[Any, int]:
        made = short(shape, strides, dtype)
        return made, made.data_ptr()

    def allocate() -> tuple[Any, int]:
        made = torch.empty(shape, dtype=dtype, device=place)
        return made, made.data_ptr()

    # What PyTorch's own compiler calls takes less than half the time, and the current device.
    return allocate if short is None or ordinal is not None else allocate_shortly
