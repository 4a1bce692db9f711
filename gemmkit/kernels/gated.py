"""Tiles in the order in which their operands arrive, from other GPUs, while the kernel runs.

The rows of A come in shards, one from each rank; this rank's own are there. The host makes a table of D's tiles
(`arrivals`): those of its own rows first, then the next rank's, in rotated order, and for each the shards that it reads. A
kernel computes the table's tiles one after the other, and before a tile's first load its producer waits for the flag of each
of these shards (`Gated`). A flag has the *epoch*, the call's number: what an earlier call wrote opens nothing. The epoch is
what this rank's own flag has, which is written before the launch: the order of one slot is the same in every call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from gemmkit.components import Array, Scalar
from gemmkit.kernels.rasterisation import Order
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.members import number_of
from gemmkit.ptx.flags import await_flag
from gemmkit.ptx.special import rolled

SHARDS = 2**15                         # flags are fewer


@dataclass(frozen=True)
class Gated(Order):
    """Row ``linear`` of ``table`` is a tile: its row, its column, and the flags ``first`` to ``end - 1`` that have to be
    what the flag ``own`` is before it is read. After ``patience`` milliseconds without one the kernel traps.

    ``table`` is int32, (tiles, 4), and ``flags`` uint32, one for each shard; both lie in device memory.
    """

    table: Array
    flags: Array
    own: Scalar
    patience: Scalar

    gates = True

    def block(self, linear: int, rows: int, columns: int) -> tuple[int, int]:
        return number_of(self.table, linear, 0), number_of(self.table, linear, 1)

    def await_tile(self, linear: int, opened: int) -> int:
        shard, end = number_of(self.table, linear, 2), number_of(self.table, linear, 3)
        waited = shard * SHARDS + end
        if waited != opened:                           # a wait takes a microsecond: once for each shard, not for each tile
            epoch = self.flags[self.own]
            while shard < end:
                await_flag(self.flags, shard, epoch, self.patience)
                shard = rolled(shard + 1)              # few: unrolled, the code of a wait would be there many times
        return waited


def arrivals(order: Order, lengths: Sequence[int], rank: int, tile_rows: int, columns: int) -> np.ndarray:
    """The table of `Gated` for shards of ``lengths`` rows: ``tile_rows`` rows and ``columns`` tiles make a row of tiles.

    Shards arrive from ``rank`` on, round to the one before it. A tile belongs to the shard that arrives last of those it
    reads; the tiles of each shard have the order that ``order`` gives them.

    >>> from gemmkit.kernels.rasterisation import Columns
    >>> arrivals(Columns(), (2, 2), 1, 2, 2).tolist()
    [[1, 0, 1, 2], [1, 1, 1, 2], [0, 0, 0, 1], [0, 1, 0, 1]]
    >>> arrivals(Columns(), (3, 1), 1, 2, 1).tolist()               # the second row of tiles reads both shards
    [[0, 0, 0, 1], [1, 0, 0, 2]]
    """
    ranks, ends = len(lengths), list(accumulate(lengths))
    rows = ends[-1]
    reads = []                                                  # of each row of tiles: the first shard, and behind the last
    for begin in range(0, rows, tile_rows):
        last = min(begin + tile_rows, rows) - 1
        reads.append((bisect_right(ends, begin), bisect_right(ends, last) + 1))
    turns = [max((shard - rank) % ranks for shard in range(*of)) for of in reads]
    table = []
    for turn in range(ranks):
        own = [row for row, of in enumerate(turns) if of == turn]
        for linear in range(len(own) * columns):
            row, column = order.block(linear, len(own), columns)
            table.append((own[row], column, *reads[own[row]]))
    return np.array(table, np.int32).reshape(-1, 4)
