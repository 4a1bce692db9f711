"""`Gather`: some rows of an array as an operand, by an index on the device, uncopied."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.layouts import Gathered
from gemmkit.matrices import Matrix, plain_layout
from gemmkit.runtime.arrays import describe

__all__ = ["Gather"]


class Gather(Matrix):
    """The matrix of the rows ``array[index]``: its row i is the array's row ``index[i]``. Nothing is copied.

    As A (or B, whose rows run along K) of `gemmkit.matmul`, `gemmkit.plan` and `gemmkit.blas.gemmEx`. ``array`` is (R, K) of
    any strides, ``index`` int32 of (M,), on the array's device. Rows may occur any number of times, in any order. The kernel
    reads the index in each call, so that it may change between two. An index that is none of 0 to R - 1 is a fault in the
    emulator; on a GPU it is not looked for, and reads other memory.

    Raises TypeError for what is no array; ValueError for an array that is no matrix, and for an index of another dtype or of
    other than one dimension.

    >>> import numpy as np, gemmkit as gk
    >>> tokens = np.float32([[1, 2], [3, 4], [5, 6]])
    >>> with gk.emulate():
    ...     gk.matmul(gk.Gather(tokens, np.int32([2, 0, 2])), np.eye(2, dtype=np.float32)).tolist()
    [[5.0, 6.0], [1.0, 2.0], [5.0, 6.0]]
    """

    def __init__(self, array: Any, index: Any):
        info, of_array = describe(index, "index"), describe(array, "array")
        if len(of_array.shape) != 2:
            raise ValueError(f"array has shape {of_array.shape}; a matrix of 2 dimensions is needed, and no stack")
        if info.dtype != np.int32:
            raise ValueError(f"index has dtype {info.dtype}; int32 is needed")
        if len(info.shape) != 1:
            raise ValueError(f"index has shape {info.shape}; a vector is needed, of a row's number for each row")
        self.index = index
        super().__init__(array, Gathered(plain_layout(array), index, info.shape[0]))
