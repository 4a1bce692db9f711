"""Threads that look at A's tiles in shared memory beside the product, for an observer (`gemmkit.observers`).

Each k-tile of a row of blocks is looked at once: by block n of its tiles, of which the number of k-tile k is n modulo their
count. So every block has as much of this work, whatever the tiles' order, and A is read from shared memory once beside the
product's own reads: with 32 tiles along N a block looks at two of 64 k-tiles. What a thread has of its row at the end of a
tile is a partial state, as one of `gemmkit.epilogues.reductions`.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from gemmkit.components import Component
from gemmkit.kernels.common.work import Place
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import fold
from gemmkit.ptx.special import udiv
from gemmkit.tiling import Tile, translate

CHUNK = 16                             # bytes that a thread reads together


@dataclass(frozen=True)
class Watch(Component):
    """``threads`` threads on ``rows`` rows of A's tile, ``parts`` of them a row; each reads ``columns`` columns of it,
    ``vector`` at a time."""

    rows: int
    threads: int
    columns: int
    vector: int

    @cached_property
    def parts(self) -> int:
        return self.threads // self.rows

    @cached_property
    def piece(self) -> Tile:
        return Tile(M=1, K=self.vector)

    @cached_property
    def pieces(self) -> int:
        return self.columns // self.vector

    # -- in device code -----------------------------------------------------------------------------------------------

    def first(self, spec: Any, n: int, shape: Any) -> int:
        """The first k-tile of block column ``n`` (in columns of D); beyond all of them where it is beyond D."""
        return udiv(n, spec.block.size.N) if n < shape.N else shape.K + 1

    def step(self, spec: Any, shape: Any) -> int:
        """From a block's k-tile to its next."""
        return udiv(shape.N + spec.block.size.N - 1, spec.block.size.N)

    def add(self, state: Any, spec: Any, pointer: Any, base: int, thread: int, a: Place) -> Any:
        """A state with a thread's elements of the k-tile at ``pointer``, whose row ``base`` begins at ``a`` in A."""
        row, column = thread % self.rows, udiv(thread, self.rows) % self.parts * self.columns
        first = Place(min(a.i + row, a.rows - 1), a.j + column, a.rows, a.columns)
        return fold(self.pieces, with_piece, state, spec, pointer, base + row, column, first)

    def keep(self, state: Any, spec: Any, thread: int, m: int, n: int, shape: Any) -> None:
        row, part = m + thread % self.rows, udiv(thread, self.rows)
        if row < shape.M and n < shape.N and part < self.parts:
            spec.a.observer.keep(state, row, udiv(n, spec.block.size.N) * self.parts + part, shape)


def with_piece(state: Any, p: int, spec: Any, pointer: Any, row: int, column: int, a: Place) -> Any:
    """The same with a thread's ``p``-th piece of its row; the first one is at ``row``, ``column``, and at ``a`` in A."""
    tile = translate(spec.watch.piece, row, column + p * spec.watch.vector)
    values = spec.a.shared.load_shared(pointer, tile, spec.a.shared.leading(spec.a.tile.size))
    return fold(spec.watch.vector, with_element, state, values, spec.a.observer, a, a.j + p * spec.watch.vector)


def with_element(state: Any, n: int, values: tuple, observer: Any, a: Place, k: int) -> Any:
    if k + n < a.columns:
        return observer.combine(state, observer.state_of(values[n], a.i, k + n))
    return state


# -- on the host --------------------------------------------------------------------------------------------------------

def watch_of(a: Any, rows: int, threads: int) -> Watch:
    """Threads for an operand A of which they hold ``rows`` rows."""
    parts = 1 << (max(1, threads // rows).bit_length() - 1)
    columns = a.tile.extents[1] // min(parts, a.tile.extents[1])
    along = a.shared.axis == 1
    vector = math.gcd(columns, max(1, CHUNK // a.shared.dtype.itemsize)) if along else 1
    return Watch(rows, a.tile.extents[1] // columns * rows, columns, vector)
