"""When A goes to the tensor cores by registers, and how B of an algebra is then woven to go with it.

A that is transformed goes by registers where it can, as it lies (`gemmkit.kernels.transformed`).

Numbers of two 16-bit parts the copy engine lays in panels of their own. `ldmatrix` takes them for 8 x 8 matrices of pairs
of elements, and so gives each lane whole numbers: of the 16 along K of an instruction, lane t (of the four that share a row)
has t, t + 4, t + 8 and t + 12. What the instruction expects there are the places 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. The
order along K is free as long as B has the same, so nobody moves a number of A: B's planes are written in this order.

| place along K | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
|---|---|---|---|---|---|---|---|---|
| number | 0 | 4 | 1 | 5 | 2 | 6 | 3 | 7 |

and so on for every eight.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from gemmkit.kernels.pipeline import PipelineSpec
from gemmkit.kernels.spec import Operand
from gemmkit.layouts import Interleaved, Planes, Swizzled
from gemmkit.operators import WGMMAOp
from gemmkit.tiling import Tile, translate

EIGHT = 8                              # numbers along K that change places
NUMBER = 4                             # bytes: two parts of 16 bits
THREADS = 384                          # of a block: with more they have too few registers, and wgmmas wait for each other


@dataclass(frozen=True, init=False)
class Woven(Planes):
    """Planes of B that are written in the order along K in which registers have A; threads' tiles are lines of `EIGHT` along
    K, or of one.

    >>> [woven(k) for k in range(10)]
    [0, 2, 4, 6, 1, 3, 5, 7, 8, 10]
    """

    def __repr__(self) -> str:
        return f"Woven({super().__repr__()})"

    def store_shared(self, pointer: Any, tile: Any, values: tuple, leading: Any) -> None:
        if tile.size[0] == EIGHT:                      # a line along K
            line = values[0], values[4], values[1], values[5], values[2], values[6], values[3], values[7]
            Planes.store_shared(self, pointer, tile, line, leading)
        else:
            k = tile.index[0]
            Planes.store_shared(self, pointer, translate(tile, woven(k) - k, 0), values, leading)


def woven(k: int) -> int:
    """The place along K of a number."""
    return k - k % EIGHT + k % 4 * 2 + k // 4 % 2


def with_a_by_registers(spec: PipelineSpec) -> PipelineSpec:
    """The specialisation itself, or, where A can go by registers and gains by it, one in which it does."""
    if is_transformed(spec):
        return dataclasses.replace(spec, a_by_registers=True)
    if not (spec.a_lands and spec.b_lands and spec.peers == 1 and not spec.is_promoted and spec.threads <= THREADS):
        return spec
    a, b = spec.a, spec.b
    if a.plane.axis != 1 or not a.to_shared.is_identity or any(
            x.planes != 2 or x.plane.itemsize != 2 or not x.same_dtype for x in (a, b)):
        return spec
    depth = spec.block.size.K
    a = dataclasses.replace(a, numbers=_panels(a, depth))
    b = dataclasses.replace(b, shared=Woven(b.shared.plane, b.shared.dtype))                # type: ignore[attr-defined]
    if b.plane.axis == 0:
        lanes = math.gcd(32, depth // EIGHT)
        b = dataclasses.replace(b, numbers=_panels(b, depth), thread=Tile(K=EIGHT, N=1),
                                warp=Tile(K=EIGHT * lanes, N=32 // lanes))
    chosen = dataclasses.replace(spec, a=a, b=b, a_by_registers=True)
    return chosen if chosen.is_landing else spec


def is_transformed(spec: PipelineSpec) -> bool:
    """Whether A, brought by the engine as it is, is transformed element by element, and can be so in registers."""
    operator, a = spec.operator, spec.a
    return bool(isinstance(operator, WGMMAOp) and spec.a_engine and spec.b_engine and spec.a_changes and not a.is_masked
                and not spec.is_turning and (a.plane.axis == 1 or a.plane.itemsize == 2) and spec.condition.is_always
                and spec.peers == 1 and not spec.is_promoted and not spec.is_squeezed and spec.threads <= THREADS)


def _panels(operand: Operand, depth: int) -> Swizzled:
    """How numbers lie in panels along K."""
    width = next(w for w in (128, 64, 32) if depth * NUMBER % w == 0)
    return Swizzled(Interleaved(operand.layout.dtype, ("col", "row")[operand.plane.axis]), width)


__all__ = ["Woven", "with_a_by_registers", "woven"]
