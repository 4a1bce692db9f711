"""Arrays of a program's own, in memory of the stream's: what its first kernel leaves for the second.

They are described by places from `BEGIN` on, which no array has (`gemmkit.runtime.workspace`), and have addresses with a
launch; in the emulator they are NumPy arrays of NaNs.
"""

from __future__ import annotations

import math

import numpy as np

from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.workspace import PLACES, Space, addresses

ROLE = "sums"
BEGIN = PLACES[ROLE]
F32 = np.dtype(np.float32)


def spare(first: int, shape: tuple[int, ...]) -> ArrayInfo:
    """An array of float32, ``first`` bytes from the beginning.

    >>> spare(256, (4, 2)).strides
    (2, 1)
    """
    strides = tuple(math.prod(shape[n + 1:]) for n in range(len(shape)))
    return ArrayInfo(BEGIN + first, shape, strides, F32, -1, False, "workspace")


def stream_memory(ordinal: int, stream: int, nbytes: int) -> int:
    """Where a stream has memory for so many bytes of such arrays."""
    (begin,) = addresses(ordinal, stream, [Space(0, ROLE, nbytes)])
    return begin


def host_arrays(infos: dict[str, ArrayInfo]) -> dict[str, np.ndarray]:
    """NumPy arrays in one memory, as they lie on the GPU."""
    memory = np.full(spare_bytes(list(infos.values())) // F32.itemsize, np.nan, F32)
    return {name: np.lib.stride_tricks.as_strided(memory[(info.pointer - BEGIN) // F32.itemsize:], info.shape,
                                                  [F32.itemsize * stride for stride in info.strides])
            for name, info in infos.items()}


def spare_bytes(infos: list[ArrayInfo]) -> int:
    """From the beginning to the last array's end."""
    return max((info.pointer - BEGIN + F32.itemsize * math.prod(info.shape) for info in infos), default=0)
