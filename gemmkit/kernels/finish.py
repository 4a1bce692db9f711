"""Step 3 of `warp_specialised`: from sums in registers to D in global memory.

A consumer's thread holds pairs of neighbours in a row (see `WgmmaSpec.c`). All functions of elements (the transforms of C
and D, and the epilogue) work on these pairs, with global coordinates. Then D goes panel by panel through swizzled shared
memory to the copy engine, which clips what is out of range; or, where the engine cannot write D (or the epilogue stores
itself), straight from the registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gemmkit.epilogues.base import finished as finished_tile
from gemmkit.kernels.parts import delivered, read_inside, read_tile, transform_tile, transform_within
from gemmkit.kernels.work import Outputs
from gemmkit.lang.control import each, join, split
from gemmkit.lang.registers import apply
from gemmkit.lang.returned import convertible
from gemmkit.lang.values import convert_all
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import lane_index, thread_index, udiv
from gemmkit.ptx.stmatrix import stmatrix
from gemmkit.ptx.tma import tma_commit, tma_store, tma_wait, tma_wait_read
from gemmkit.ptx.warpgroup import fence_async, named_barrier
from gemmkit.tiling import parallelise, translate

PANEL = 1                              # named barriers from 1 on: a consumer's panel of D may be written, or is


class Part(NamedTuple):
    """A consumer's part of a tile of D: the consumer, and the part's first row and column."""

    group: Any
    m: Any
    n: Any


def finish_tile(spec: Any, sums: tuple, outputs: Outputs, part: Part) -> None:
    """All 64-row fragments of a consumer."""
    each(finish_fragment, sums, spec, outputs, part)


def finish_fragment(sums: tuple, i: int, spec: Any, outputs: Outputs, part: Part) -> None:
    m, n = part.m + i * 64, part.n
    if spec.uses_panels:
        finish_by_panels(sums, i, spec, outputs, Part(part.group, m, n))
    else:
        each(store_pair, split(sums, 2), spec, outputs, m + own_row(), n + own_column())


def own_row() -> int:
    """The row of this thread's first pair in a fragment; the next pair is 8 rows on."""
    return udiv(thread_index() % 128, 32) * 16 + udiv(lane_index(), 4)


def own_column() -> int:
    """The column of this thread's first pair; every other pair is 8 columns on."""
    return lane_index() % 4 * 2


# -- by panels --------------------------------------------------------------------------------------------------------

def finish_by_panels(sums: tuple, i: int, spec: Any, outputs: Outputs, part: Part) -> None:
    """First all values are finished, so that what is loaded for them (C, a bias) is on its way at once; then they leave."""
    values = sums
    if spec.has_epilogue:
        values = join(apply(finish_pair, split(sums, 2), spec, outputs, part.m + own_row(), part.n + own_column()))
    values = convert_all(spec.d.layout.dtype, delivered(spec, values))
    each(finish_panel, split(values, spec.d_columns // 2), i, spec, outputs, part)


def finish_panel(values: tuple, p: int, i: int, spec: Any, outputs: Outputs, part: Part) -> None:
    """A panel of D: 64 rows of ``spec.d_columns`` columns."""
    position = (part.group * spec.d_buffers + (i * spec.own_panels + p) % spec.d_buffers) * spec.d_panel
    if spec.d_engine:
        store_by_engine(values, p, i, spec, position, outputs, part)
    else:
        store_by_threads(values, p, i, spec, position, outputs, part)


def store_by_engine(values: tuple, p: int, i: int, spec: Any, position: int, outputs: Outputs, part: Part) -> None:
    pointer = shared(spec.d.shared.dtype, spec.d_offset)
    is_leader = thread_index() % 128 == 0
    if is_leader:                                      # the engine has read what was in the panel before
        if i + p == 0:
            tma_wait_read(spec.d_pending)
        else:
            tma_wait_read(spec.d_buffers - 1)
    named_barrier(PANEL + part.group, 128)
    put_panel(values, spec, pointer, position)
    fence_async()
    named_barrier(PANEL + part.group, 128)
    if is_leader:
        tma_store(outputs.map_d, (part.n + p * spec.d_columns, part.m), pointer, position)
        tma_commit()


def store_by_threads(values: tuple, p: int, i: int, spec: Any, position: int, outputs: Outputs, part: Part) -> None:
    """The panel is written, and read in lines. While some threads still store the last one from the other buffer, others
    fill this one; who fills the next but one has met them all in between."""
    if i + p == 0:
        named_barrier(PANEL + part.group, 128)              # the last tile's panels
    put_panel(values, spec, shared(spec.d.shared.dtype, spec.d_offset), position)
    named_barrier(PANEL + part.group, 128)
    store_lines(spec, outputs, shared(spec.d.shared.dtype, spec.d_offset + position * spec.d.shared.itemsize), part.m,
                part.n + p * spec.d_columns)


def finish_pair(pair: tuple, n: int, spec: Any, outputs: Outputs, row: int, column: int) -> tuple:
    """Pairs out of range are computed as if they were the nearest in range: nobody looks at the result, and a function
    that indexes an array stays within it."""
    row, column = row + n % 2 * 8, column + n // 2 * 8
    if spec.d.whole:
        row, column = min(row, outputs.shape.M - 1), min(column, outputs.shape.N - 2)
        return finished(pair, spec, outputs, translate(spec.pair, row, column))
    # N is odd, and a pair may straddle its end.
    return join(apply(finish_single, split(pair, 1), spec, outputs, row, column))


def finish_single(one: tuple, n: int, spec: Any, outputs: Outputs, row: int, column: int) -> tuple:
    row, column = min(row, outputs.shape.M - 1), min(column + n, outputs.shape.N - 1)
    return finished(one, spec, outputs, translate(spec.single, row, column))


def finished(values: tuple, spec: Any, outputs: Outputs, place: Any) -> tuple:
    """Some sums as values of D; ``place`` is where they lie globally, in range."""
    if spec.has_c:
        values = add_c(values, spec, outputs, place)
    values = changed_sums(spec.d.to_registers, values, spec, place)
    values = changed_sums(spec.d.to_shared, values, spec, place)
    return finished_tile(spec.epilogue, values, spec.d.layout, place, outputs.shape)


def changed_sums(transform: Any, values: tuple, spec: Any, place: Any) -> tuple:
    """A transform of D: its values stay numbers of as many parts as the sums have, or fewer."""
    return convertible(transform, "__call__", transform_tile(transform, values, place), spec.operator.fragment_c.dtype)


def add_c(values: tuple, spec: Any, outputs: Outputs, place: Any) -> tuple:
    added = transform_tile(spec.c.to_registers, read_inside(spec.c, outputs.c, place, outputs.shape), place)
    return apply(add_value, values, convert_all(spec.operator.fragment_c.dtype, added))


def add_value(x: Any, n: int, others: tuple) -> Any:
    return x + others[n]


def put_panel(values: tuple, spec: Any, pointer: Any, position: int) -> None:
    if spec.d.shared.itemsize == 2:                    # 16 columns of 16-bit elements at a time
        each(put_matrix, split(values, 8), spec, pointer, position)
    else:
        each(put_pair, split(values, 2), spec,
             shared(spec.d.shared.dtype, spec.d_offset + position * spec.d.shared.itemsize))


def put_matrix(values: tuple, n: int, spec: Any, pointer: Any, position: int) -> None:
    """Four 8 x 8 matrices: a lane addresses a line of the matrix of its quarter."""
    lane = lane_index()
    if spec.d.shared.axis == 1:
        row = udiv(thread_index() % 128, 32) * 16 + lane % 16
        stmatrix(pointer, position, spec.d.shared.position((row, n * 16 + udiv(lane, 16) * 8), 64), values, False)
    else:                                              # each matrix transposed: its lines are columns of D
        row = udiv(thread_index() % 128, 32) * 16 + udiv(lane, 8) % 2 * 8
        column = n * 16 + udiv(lane, 16) * 8 + lane % 8
        stmatrix(pointer, position, spec.d.shared.position((row, column), spec.d_lines), values, True)


def put_pair(pair: tuple, n: int, spec: Any, pointer: Any) -> None:
    spec.d.shared.store_shared(pointer, translate(spec.pair, own_row() + n % 2 * 8, own_column() + n // 2 * 8), pair,
                               spec.d_lines)


def wait_for_engine(spec: Any) -> None:
    """Before the block ends: shared memory must last until the engine has read it."""
    if spec.d_engine and thread_index() % 128 == 0:
        tma_wait(0)


def store_lines(spec: Any, outputs: Outputs, panel: Any, m: int, n: int) -> None:
    """Each thread's lines are wholly in range, or wholly out."""
    warp_tiles = parallelise(spec.panel, spec.panel_warp, udiv(thread_index() % 128, 32), 4)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], spec.panel_thread, lane_index(), 32, spec.panel_order)
        for j in range(len(thread_tiles)):
            tile = spread(thread_tiles[j], spec) if spec.d_apart > 1 else thread_tiles[j]
            place = translate(tile, m, n)
            if place.index[0] < outputs.shape.M and place.index[1] < outputs.shape.N:
                spec.d.layout.store(outputs.d, place, spec.d.shared.load_shared(panel, tile, spec.d_lines), outputs.shape)


def spread(tile: Any, spec: Any) -> Any:
    """A tile in another row of the panel, so that rows that are neighbours in memory come one after the other."""
    row = tile.index[0]
    return translate(tile, row % spec.d_rounds * spec.d_apart + udiv(row, spec.d_rounds) - row, 0)


# -- by threads -------------------------------------------------------------------------------------------------------

def store_pair(pair: tuple, n: int, spec: Any, outputs: Outputs, row: int, column: int) -> None:
    """The pair may be partly or wholly out of range: `read_tile` and the epilogue mask it."""
    place, shape = translate(spec.pair, row + n % 2 * 8, column + n // 2 * 8), outputs.shape
    values = add_c_masked(pair, spec, outputs, place) if spec.has_c else pair
    values = transform_within(spec.d.to_registers, values, place, shape.M, shape.N)
    values = transform_within(spec.d.to_shared, values, place, shape.M, shape.N)
    spec.epilogue.tile(spec, outputs.d, place, values, shape)


def add_c_masked(values: tuple, spec: Any, outputs: Outputs, place: Any) -> tuple:
    shape = outputs.shape
    added = read_tile(spec.c, outputs.c, place, shape.M, shape.N, 0, shape)
    added = transform_within(spec.c.to_registers, added, place, shape.M, shape.N)
    return apply(add_value, values, convert_all(spec.operator.fragment_c.dtype, added))


__all__ = ["Part", "add_value", "finish_tile", "wait_for_engine"]
