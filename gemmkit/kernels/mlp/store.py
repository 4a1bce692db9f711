"""Step 4 of `mlp`: the last layer's sums, with its activation, to global memory.

| store | how | where |
|---|---|---|
| `TmaOut` | through shared memory, by TMA, which clips rows and columns beyond the last ones | what TMA can carry |
| `DirectOut` | pairs, from the registers | any strides, any number of columns |
"""

from __future__ import annotations

from typing import Any

from gemmkit.components import Component
from gemmkit.kernels.mlp.activation import finished
from gemmkit.kernels.mlp.work import Outputs, Rows
from gemmkit.kernels.sm90.store import own_column, own_row
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, split
from gemmkit.lang.values import convert_all
from gemmkit.ptx.memory import shared, store_global
from gemmkit.ptx.special import lane_index, thread_index, udiv
from gemmkit.ptx.stmatrix import stmatrix
from gemmkit.ptx.tma import tma_commit, tma_store, tma_wait, tma_wait_read
from gemmkit.ptx.warpgroup import fence_async, named_barrier


@dataclass(frozen=True)
class OutStore(Component):
    """How a consumer's rows leave."""

    uses_tma = False

    def run(self, spec: Any, sizes: Any, sums: tuple, outputs: Outputs, rows: Rows) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Before the block ends."""


@dataclass(frozen=True)
class TmaOut(OutStore):
    """Through the consumer's rows of the stage that x came in: its first product has read them. The stage is not released
    before TMA has read the result."""

    uses_tma = True

    def run(self, spec: Any, sizes: Any, sums: tuple, outputs: Outputs, rows: Rows) -> None:
        row, group = rows.first, rows.group
        values = convert_all(spec.dtype, finished(sums, spec))
        place = rows.stage * (spec.x_bytes // 2) + group * (spec.group_bytes // 2)
        named_barrier(1 + group, 128)                  # all four warps have read x
        each(put_matrix, split(values, 8), spec, place)
        fence_async()
        named_barrier(1 + group, 128)
        if thread_index() % 128 == 0:
            if row < sizes.rows:
                for panel in range(spec.out.count):
                    tma_store(outputs.map, (panel * spec.out.line, row), shared(spec.dtype, 0),
                              place + panel * 64 * spec.out.line)
            tma_commit()
            tma_wait_read(0)

    def finish(self) -> None:
        """Stores must be done before the kernel ends."""
        if thread_index() % 128 == 0:
            tma_wait(0)


def put_matrix(values: tuple, n: int, spec: Any, place: int) -> None:
    """16 rows by 16 columns of a warp: four 8 x 8 matrices, of which a lane addresses a line."""
    lane = lane_index()
    row = udiv(thread_index() % 128, 32) * 16 + lane % 16
    at = spec.out.layout.position((row, n * 16 + udiv(lane, 16) * 8), 64)
    stmatrix(shared(spec.dtype, 0), place, at, values, False)


@dataclass(frozen=True)
class DirectOut(OutStore):
    """Elements that are in range, from the registers: as ``pairs`` where there are as many in a row."""

    pairs: bool

    def run(self, spec: Any, sizes: Any, sums: tuple, outputs: Outputs, rows: Rows) -> None:
        values = convert_all(spec.dtype, finished(sums, spec))
        each(put_pair, split(values, 2), self, sizes, outputs.out, rows.first + own_row(), own_column())


def put_pair(pair: tuple, n: int, store: Any, sizes: Any, out: Any, row: int, column: int) -> None:
    row, column = row + n % 2 * 8, column + n // 2 * 8
    if row < sizes.rows and column < sizes.columns:
        if store.pairs:
            store_global(out, 1, (row, column), (0, 0), pair)
        else:
            out[row, column] = pair[0]
            if column + 1 < sizes.columns:
                out[row, column + 1] = pair[1]
