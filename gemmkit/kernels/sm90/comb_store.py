"""The store of a tensor whose neighbours in memory are ``comb`` columns apart in D: from the registers, in vectors.

Of an octet of columns a consumer's thread has two, in each of its rows the same two. Columns that are a multiple of eight
apart are therefore one thread's, and with a comb of 8 or 16 the neighbours of one tooth: nothing goes through shared memory,
and no thread waits for another.
"""

from __future__ import annotations

import math
from typing import Any

from gemmkit.kernels.common.work import Outputs
from gemmkit.kernels.sm90.store import Part, Store, finished, own_column, own_row
from gemmkit.kernels.sm90.store_choice import vector_length
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import deal, each, split
from gemmkit.layouts import Tensor
from gemmkit.layouts.braided import OCTET
from gemmkit.ptx.special import udiv
from gemmkit.runtime.arrays import ArrayInfo, alignment

WIDE = 16                              # bytes of the widest store


@dataclass(frozen=True)
class CombStore(Store):
    """Threads store ``length`` neighbours of a tooth of ``comb`` at a time, wholly in or out of bounds."""

    comb: int = OCTET
    length: int = 1

    @classmethod
    def of(cls, spec: Any, info: ArrayInfo | None, extents: tuple[int, int], barrier: int) -> CombStore | None:
        """None where D is no such tensor, or has vectors as long along the lines of a subtile."""
        layout: Any = spec.d.layout
        if info is None or not isinstance(layout, Tensor) or layout.axis != 1 or layout.comb % OCTET:
            return None
        others = vector_length(spec, info, extents) // layout.comb    # none where the epilogue stores D itself
        width, size = spec.block.size.N // spec.exchange.slices, info.dtype.itemsize
        if width % layout.comb or extents[1] % layout.comb:
            return None
        length = math.gcd(WIDE // size, layout.vector, width // layout.comb, alignment(info) // size)
        return cls(barrier, layout.comb, length) if length > others > 0 else None

    def fragment(self, sums: tuple, i: int, spec: Any, outputs: Outputs, part: Part) -> None:
        """A thread's values are pairs, of two rows in turn: those of one row and tooth are dealt out."""
        values = finished(sums, i, spec, outputs, part)
        each(store_tooth, deal(values, self.comb // 2), spec, outputs, part.m + own_row(), part.n + own_column())


def store_tooth(tooth: tuple, n: int, spec: Any, outputs: Outputs, row: int, column: int) -> None:
    each(store_neighbours, split(tooth, spec.store.length), spec, outputs, row + udiv(n, 2) % 2 * 8,
         column + n % 2 + udiv(n, 4) * OCTET)


def store_neighbours(values: tuple, n: int, spec: Any, outputs: Outputs, row: int, column: int) -> None:
    at = column + n * (spec.store.comb * spec.store.length)
    if row < outputs.shape.M and at < outputs.shape.N:
        spec.d.layout.store_neighbours(outputs.d, row, at, values)
