"""Step 4 of `attention`: a tile's O, divided by the sums of weights, to global memory; the logarithms of the sums.

| store | how | where |
|---|---|---|
| `TmaOut` | through swizzled panels of shared memory, by TMA, which clips rows beyond the last query | what TMA can carry |
| `DirectOut` | pairs, from the registers | any strides; packed sequences, behind which the next one lies |
| `QuadOut` | octets, from the registers: the four lanes of a row exchange pairs | the same, where no shared memory is left |

A row that saw no key has the sum 0: its O is 0 and its logarithm -inf.
"""

from __future__ import annotations

import math
from typing import Any

from gemmkit.components import Component
from gemmkit.kernels.attention.softmax import finite, quad_sum, rescale
from gemmkit.kernels.attention.walk import slice_of
from gemmkit.kernels.attention.work import F32, Outputs, Sums, Tile
from gemmkit.kernels.sm90.store import own_column, own_row
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, split
from gemmkit.lang.registers import apply
from gemmkit.lang.values import convert, convert_all
from gemmkit.ptx.approximate import log2, reciprocal
from gemmkit.ptx.memory import shared, store_global
from gemmkit.ptx.shuffle import SHUFFLE
from gemmkit.ptx.special import lane_index, thread_index, udiv
from gemmkit.ptx.stmatrix import stmatrix
from gemmkit.ptx.tma import tma_commit, tma_store, tma_wait, tma_wait_read
from gemmkit.ptx.warpgroup import fence_async, named_barrier
from gemmkit.ptx.words import pack_narrow, unpack_narrow

LN2 = math.log(2)
exchanged = SHUFFLE["bfly"]


@dataclass(frozen=True)
class OutStore(Component):
    """How a consumer's 64 rows of O leave."""

    uses_tma = False

    def run(self, spec: Any, sizes: Any, sums: Sums, outputs: Outputs, tile: Tile, group: int) -> None:
        """The end of a tile."""
        stats = sums.stats
        upper, lower = quad_sum(stats.upper_sum), quad_sum(stats.lower_sum)
        values = convert_all(spec.dtype, rescale(sums.o, inverse(upper), inverse(lower)))
        row = tile.m + group * 64
        if spec.has_lse:
            scale = convert(F32, 1.0) if spec.has_score else sizes.scale
            if lane_index() % 4 == 0:
                store_lse(spec, outputs.lse, tile, row + own_row(), scale * finite(stats.upper), upper)
                store_lse(spec, outputs.lse, tile, row + own_row() + 8, scale * finite(stats.lower), lower)
        self.put(spec, values, outputs, tile, row, group)

    def put(self, spec: Any, values: tuple, outputs: Outputs, tile: Tile, row: int, group: int) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Before the block ends."""


def inverse(total: Any) -> Any:
    """One over a sum of weights; 0 of none."""
    return reciprocal(total) if total != 0 else convert(F32, 0.0)


def store_lse(spec: Any, lse: Any, tile: Tile, row: int, largest: Any, total: Any) -> None:
    """A row's logarithm of the sum of exponentials, of its largest score and the sum of weights relative to it."""
    if row < tile.queries:
        lse[slice_of(spec, tile), tile.head, tile.first_query + row] = largest + log2(total) * convert(F32, LN2)


@dataclass(frozen=True)
class TmaOut(OutStore):
    """Through panels of a swizzled line's width, which lie behind K and V."""

    uses_tma = True

    def put(self, spec: Any, values: tuple, outputs: Outputs, tile: Tile, row: int, group: int) -> None:
        is_leader = thread_index() % 128 == 0
        if is_leader:                                  # TMA has read what the last tile left there
            tma_wait_read(0)
        named_barrier(1 + group, 128)
        each(put_matrix, split(values, 8), spec, group)
        fence_async()
        named_barrier(1 + group, 128)
        if is_leader:
            if row < tile.queries:
                for panel in range(spec.head.count):
                    tma_store(outputs.map, (panel * spec.head.line, tile.first_query + row, tile.head, slice_of(spec, tile)),
                              shared(spec.dtype, spec.o_offset), (panel * spec.block_m + group * 64) * spec.head.line)
            tma_commit()

    def finish(self) -> None:
        """Shared memory must last until TMA has read it."""
        if thread_index() % 128 == 0:
            tma_wait(0)


def put_matrix(values: tuple, n: int, spec: Any, group: int) -> None:
    """16 rows by 16 columns of a warp: four 8 x 8 matrices, of which a lane addresses a line."""
    lane = lane_index()
    row = group * 64 + udiv(thread_index() % 128, 32) * 16 + lane % 16
    place = spec.head.layout.position((row, n * 16 + udiv(lane, 16) * 8), spec.block_m)
    stmatrix(shared(spec.dtype, spec.o_offset), 0, place, values, False)


@dataclass(frozen=True)
class DirectOut(OutStore):
    """Pairs of neighbours, from the registers."""

    def put(self, spec: Any, values: tuple, outputs: Outputs, tile: Tile, row: int, group: int) -> None:
        each(put_pair, split(values, 2), spec, outputs.out, tile, row + own_row())


def put_pair(pair: tuple, n: int, spec: Any, out: Any, tile: Tile, row: int) -> None:
    line = row + n % 2 * 8
    if line < tile.queries:
        place = (slice_of(spec, tile), tile.head, tile.first_query + line, own_column())
        store_global(out, 3, place, (0, 0, 0, n // 2 * 8), pair)


@dataclass(frozen=True)
class QuadOut(OutStore):
    """Octets of neighbours, from the registers. The four lanes that share a row have a pair of each octet: they exchange
    pairs, so that each has one octet in four, and stores 16 bytes at once where O's strides allow it. Whether a row is there
    is asked once (D 256: of the 2562 instructions of a tile's end, by pairs, 1218 are left)."""

    def put(self, spec: Any, values: tuple, outputs: Outputs, tile: Tile, row: int, group: int) -> None:
        words = apply(octets, split(pack_narrow(values), 8))
        each(put_half, (0, 1), spec, outputs.out, tile, row + own_row(), words)


def octets(words: tuple, n: int) -> tuple:
    """Of four octets of each of two rows the one that is this lane's."""
    return quad_transpose(words[0], words[2], words[4], words[6]), quad_transpose(words[1], words[3], words[5], words[7])


def quad_transpose(a: Any, b: Any, c: Any, d: Any) -> tuple:
    """The four words of a lane's row of a 4 x 4 matrix, of which each lane of a quad gives a column."""
    is_odd, is_upper = lane_index() % 2 == 1, lane_index() % 4 >= 2
    ab, cd = swapped(a, b, is_odd, 1), swapped(c, d, is_odd, 1)
    even, odd = swapped(ab[0], cd[0], is_upper, 2), swapped(ab[1], cd[1], is_upper, 2)
    return even[0], odd[0], even[1], odd[1]


def swapped(x: Any, y: Any, is_second: Any, distance: int) -> tuple:
    """The rows of a 2 x 2 matrix, of which two lanes give the columns."""
    got = exchanged(x if is_second else y, distance)
    return (got if is_second else x), (y if is_second else got)


def put_half(half: int, n: int, spec: Any, out: Any, tile: Tile, row: int, words: tuple) -> None:
    line = row + n * 8
    if line < tile.queries:
        place = (slice_of(spec, tile), tile.head, tile.first_query + line, lane_index() % 4 * 8)
        each(put_octet, words, n, spec, out, place)


def put_octet(words: tuple, n: int, half: int, spec: Any, out: Any, place: tuple) -> None:
    store_global(out, 3, place, (0, 0, 0, n * 32), unpack_narrow(spec.dtype, words[half]))
