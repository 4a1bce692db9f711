"""Arrays that say that they are on a GPU, where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np


class OnDevice:
    """An array as a device library would pass it; it is only described here."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype, self.shape = array, array.dtype, array.shape
        self.__cuda_array_interface__ = {
            **array.__array_interface__, "version": 3, "strides": array.strides,
        }  # fmt: skip

    @property
    def T(self) -> OnDevice:
        return OnDevice(self.array.T)

    def __getitem__(self, key: Any) -> OnDevice:
        return OnDevice(self.array[key])

    def swapaxes(self, first: int, second: int) -> OnDevice:
        return OnDevice(self.array.swapaxes(first, second))

    def reshape(self, *shape: int) -> OnDevice:
        return OnDevice(self.array.reshape(*shape))


__all__ = ["OnDevice"]
