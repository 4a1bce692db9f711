"""The shared memory of a block: what tiles take of it, and tiles made to fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemmkit.kernels.common.operand import bytes_of
from gemmkit.kernels.common.shared_memory import ALIGNMENT
from gemmkit.runtime.device import DeviceInfo

SHALLOW = 16                           # along K, below which no tile is narrowed


@dataclass(frozen=True)
class Room:
    """``limit`` bytes, which hold ``stages`` tiles of A and of B, and at other times a tile of sums in each of ``sums``: C
    and D. ``a`` and ``b`` are the shared layouts of A and B."""

    limit: int
    stages: int
    a: Any
    b: Any
    sums: tuple[Any, ...]

    @classmethod
    def of(cls, device: DeviceInfo, values: dict[str, Any], stages: int = 1) -> Room:
        """That of a device, for the shared layouts of a configuration's fields."""
        return cls(device.shared_memory_per_block, stages, values["shared_a_layout"], values["shared_b_layout"],
                   (values["shared_c_layout"], values["shared_d_layout"]))

    def nbytes(self, block: tuple[int, int, int]) -> int:
        """What a block's tile takes."""
        m, n, k = block
        stage = _aligned(_aligned(bytes_of(self.a, m, k)) + bytes_of(self.b, k, n))
        return max(self.stages * stage, *(bytes_of(layout, m, n) for layout in self.sums))

    def holds(self, block: tuple[int, int, int]) -> bool:
        return self.nbytes(block) <= self.limit

    def shallower(self, block: tuple[int, int, int], unit: int) -> tuple[int, int, int]:
        """The tile halved along K, where it stays a multiple of ``unit``, until it fits; as far as that is of use."""
        m, n, k = block
        sums = max(bytes_of(layout, m, n) for layout in self.sums)
        while sums <= self.limit < self.nbytes((m, n, k)) and k > SHALLOW and k % (2 * unit) == 0:
            k //= 2
        return m, n, k

    def smaller(self, block: tuple[int, int, int], warp: tuple[int, int]) -> tuple[int, int, int]:
        """The tile halved along M or N, where it is several of the warps' tiles, until it fits."""
        m, n, k = block
        while not self.holds((m, n, k)) and (m > warp[0] or n > warp[1]):
            m, n = (m // 2, n) if (m >= n and m > warp[0]) or n == warp[1] else (m, n // 2)
        return m, n, k


def _aligned(nbytes: int) -> int:
    """Where the next tile may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


__all__ = ["Room"]
