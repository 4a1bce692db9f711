"""The arrays of a problem, its sizes and its GPU: what a specialisation may depend on beside the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.device import DeviceInfo


@dataclass(frozen=True)
class Arrays:
    """A, B, C and D of a problem of M x N x K; None stands for an array that suits TMA."""

    a: ArrayInfo | None
    b: ArrayInfo | None
    out: ArrayInfo | None
    M: int
    N: int
    K: int
    c: ArrayInfo | None = None
    products: int | None = None        # of a stack; None: there is no stack
    device: DeviceInfo | None = None   # None where it is not known

    @property
    def sm_count(self) -> int:
        """Multiprocessors of the device, 0 where it is not known."""
        return 0 if self.device is None else self.device.sm_count

    def extents(self, name: str) -> tuple[int, int]:
        """Rows and columns of "a", "b", "c" or "out"."""
        return {"a": (self.M, self.K), "b": (self.K, self.N)}.get(name, (self.M, self.N))
