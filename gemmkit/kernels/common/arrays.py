"""The arrays of a problem, and its sizes: what a specialisation may depend on beside the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from gemmkit.runtime.arrays import ArrayInfo


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
    sm_count: int = 0                  # multiprocessors of the device, 0 where it is not known

    def extents(self, name: str) -> tuple[int, int]:
        """Rows and columns of "a", "b", "c" or "out"."""
        return {"a": (self.M, self.K), "b": (self.K, self.N)}.get(name, (self.M, self.N))


__all__ = ["Arrays"]
