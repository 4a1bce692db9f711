"""Where an example runs: on a GPU with the array library at hand, or in the emulator with NumPy."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np

import gemmkit as gk

Array = Any  # of the machine's library


@dataclass(frozen=True)
class Machine:
    """`library` is "cupy", "torch" or "numba" (device arrays), or "numpy" for the emulator."""

    library: str

    @property
    def emulated(self) -> bool:
        return self.library == "numpy"

    def __str__(self) -> str:
        return (
            "in the emulator (no GPU is used)" if self.emulated else f"on the GPU, with {self.library} arrays"
        )

    def session(self) -> contextlib.AbstractContextManager[Any]:
        """What the example's products must run inside."""
        return gk.emulate() if self.emulated else contextlib.nullcontext()

    def to_device(self, array: np.ndarray) -> Array:
        """A copy of a host array where the machine multiplies (the array itself in the emulator)."""
        if self.library == "cupy":
            import cupy

            return cupy.asarray(array)
        if self.library == "torch":
            import torch

            return torch.from_numpy(np.ascontiguousarray(array)).cuda()
        if self.library == "numba":
            from numba import cuda

            return cuda.to_device(array)
        return array

    def to_host(self, array: Array) -> np.ndarray:
        """A NumPy array of a result."""
        if self.library == "cupy":
            return np.asarray(array.get())
        if self.library == "torch":
            return np.asarray(array.cpu().numpy())
        if self.library == "numba":
            return np.asarray(array.copy_to_host())
        return np.asarray(array)


def find(emulate: bool | None = None) -> Machine:
    """The machine to run on: the emulator if `emulate`, or if it is None and there is no GPU.

    Raises:
        RuntimeError: `emulate` is False and there is no GPU.
    """
    from gemmkit.runtime import device

    available = device.available()
    if emulate is False and not available:
        raise RuntimeError("emulate: got False, but there is no GPU; leave it out, or say emulate=True")
    if emulate or not available:
        return Machine("numpy")
    for library in ("cupy", "torch"):
        if importlib.util.find_spec(library) is not None:
            return Machine(library)
    return Machine("numba")
