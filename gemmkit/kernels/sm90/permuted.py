"""Planes of B that are written in another order along K, to go with A in registers (`fragments.Deinterleaved`).

| place along K | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
|---|---|---|---|---|---|---|---|---|
| number | 0 | 4 | 1 | 5 | 2 | 6 | 3 | 7 |

and so on for every eight.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from gemmkit.kernels.common.operand import Operand
from gemmkit.lang.component_class import dataclass
from gemmkit.layouts import Interleaved, Planes, Swizzled
from gemmkit.tiling import Tile, translate

EIGHT = 8                              # numbers along K that change places
NUMBER = 4                             # bytes: two parts of 16 bits


@dataclass(frozen=True, init=False)
class PermutedPlanes(Planes):
    """Planes of B in the order along K in which registers have A; threads' tiles are lines of `EIGHT` along K, or of one.

    >>> [permuted(k) for k in range(10)]
    [0, 2, 4, 6, 1, 3, 5, 7, 8, 10]
    """

    def __repr__(self) -> str:
        return f"PermutedPlanes({super().__repr__()})"

    def store_shared(self, pointer: Any, tile: Any, values: tuple, leading: Any) -> None:
        if tile.size[0] == EIGHT:                      # a line along K
            line = values[0], values[4], values[1], values[5], values[2], values[6], values[3], values[7]
            Planes.store_shared(self, pointer, tile, line, leading)
        else:
            k = tile.index[0]
            Planes.store_shared(self, pointer, translate(tile, permuted(k) - k, 0), values, leading)


def permuted(k: int) -> int:
    """The place along K of a number."""
    return k - k % EIGHT + k % 4 * 2 + k // 4 % 2


def permutable(a: Operand, b: Operand) -> bool:
    """Whether consumers can tell A's numbers apart, with B permuted: two parts of 16 bits, A along K and untouched."""
    return bool(a.plane.axis == 1 and a.to_shared.is_identity
                and all(x.planes == 2 and x.plane.itemsize == 2 and x.same_dtype for x in (a, b)))


def in_panels(operand: Operand) -> Operand:
    """The operand, brought as numbers in swizzled panels along K."""
    depth = operand.tile.extents[operand.k_axis]
    width = next(w for w in (128, 64, 32) if depth * NUMBER % w == 0)
    return dataclasses.replace(operand, numbers=Swizzled(
        Interleaved(operand.layout.dtype, ("col", "row")[operand.plane.axis]), width))


def permuted_along_k(b: Operand) -> Operand:
    """B, written in the order of A's registers; where its lines go along K, a thread takes eight numbers of one."""
    b = dataclasses.replace(b, shared=PermutedPlanes(b.shared.plane, b.shared.dtype))
    if b.plane.axis != 0:
        return b
    lanes = math.gcd(32, b.tile.extents[b.k_axis] // EIGHT)
    return dataclasses.replace(in_panels(b), thread=Tile(K=EIGHT, N=1), warp=Tile(K=EIGHT * lanes, N=32 // lanes))
