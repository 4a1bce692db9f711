"""Moving an operand's tiles between global memory, registers and shared memory, masked at its edges, through its transforms.

Masking is done here, once, for all layouts: an element out of range is never asked for, and stands as the operator's
identity wherever the product would meet it.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.common.elements import column_of, row_of, transform_element_into, transform_into
from gemmkit.kernels.common.work import Place
from gemmkit.lang.registers import generate, registers
from gemmkit.lang.returned import all_converted, counted
from gemmkit.lang.values import convert, fill
from gemmkit.layouts.base import element_of
from gemmkit.ptx.clipped import load_words_within
from gemmkit.ptx.special import lane_index
from gemmkit.ptx.words import load_words, pack_words
from gemmkit.tiling import parallelise, translate


def copy_to_shared(operand: Any, data: Any, pointer: Any, place: Place, nothing: Any, warp: int, shape: Any) -> None:
    """Copy the block's tile of an operand, which begins at ``place``, from global to shared memory.

    Where a thread's registers hold all its tiles, all loads go out before the first store waits for one.
    """
    if operand.moves > 0:
        copy_together(operand, data, pointer, place, nothing, warp, shape)
    else:
        copy_in_turn(operand, data, pointer, place, nothing, warp, shape)


def copy_in_turn(operand: Any, data: Any, pointer: Any, place: Place, nothing: Any, warp: int, shape: Any) -> None:
    """Tile by tile."""
    warp_tiles = parallelise(operand.tile, operand.warp, warp, operand.warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            put_moved(operand, pointer, thread_tiles[j], read_moved(operand, data, thread_tiles[j], place, nothing, shape))


def copy_together(operand: Any, data: Any, pointer: Any, place: Place, nothing: Any, warp: int, shape: Any) -> None:
    """All loads, then all stores."""
    held = registers(operand.held, operand.moves)
    warp_tiles = parallelise(operand.tile, operand.warp, warp, operand.warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            held[i * len(thread_tiles) + j] = read_moved(operand, data, thread_tiles[j], place, nothing, shape)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            put_moved(operand, pointer, thread_tiles[j], held[i * len(thread_tiles) + j])


def read_moved(operand: Any, data: Any, tile: Any, place: Place, nothing: Any, shape: Any) -> tuple:
    """A thread's tile on its way to shared memory: in words where nothing happens to it, or in elements."""
    if operand.passes_words:
        return read_words(operand, data, translate(tile, place.i, place.j), place, nothing, shape)
    return read_tile(operand, data, translate(tile, place.i, place.j), place, nothing, shape)


def put_moved(operand: Any, pointer: Any, tile: Any, held: tuple) -> None:
    if operand.passes_words:
        put_words(operand, pointer, tile, held)
    else:
        put_elements(operand, pointer, tile, held)


def put_words(operand: Any, pointer: Any, tile: Any, words: tuple) -> None:
    operand.shared.store_words(pointer, tile, words, operand.leading())


def put_elements(operand: Any, pointer: Any, tile: Any, values: tuple) -> None:
    operand.shared.store_shared(pointer, tile, values, operand.leading())


# -- reading an operand -----------------------------------------------------------------------------------------------

def read_words(operand: Any, data: Any, tile: Any, place: Place, nothing: Any, shape: Any) -> tuple:
    """A thread's tile in 32-bit words: for the same type and order on both sides, and no transform between.

    ``tile`` is where it lies in the matrix, which ends as ``place`` says.
    """
    if operand.clipped:
        return read_clipped(operand, data, tile, place)
    if inside(tile, place.rows, place.columns):
        if operand.is_packed:
            return read_packed(operand, data, tile, shape)
        return read_line(operand, data, tile)
    return pack_words(read_outside(operand, data, tile, place, nothing, shape))


def read_line(operand: Any, data: Any, tile: Any) -> tuple:
    return load_words(data, operand.layout.axis, tile.base, tile.offset, tile.count)


def read_clipped(operand: Any, data: Any, tile: Any, place: Place) -> tuple:
    """A line, and zeros behind the matrix's end: in any thread by the same instructions."""
    rows, columns = place.rows - tile.index[0], place.columns - tile.index[1]
    along, across = (columns, rows) if operand.layout.axis == 1 else (rows, columns)
    return load_words_within(data, operand.layout.axis, tile.base, tile.offset, tile.count, along if across > 0 else 0)


def read_packed(operand: Any, data: Any, tile: Any, shape: Any) -> tuple:
    return operand.layout.load_packed(data, tile, shape)


def read_tile(operand: Any, data: Any, tile: Any, place: Place, nothing: Any, shape: Any) -> tuple:
    """A thread's tile of an operand, transformed, in the shared layout's dtype; ``nothing`` where it is out of range."""
    if inside(tile, place.rows, place.columns):
        return read_inside(operand, data, tile, shape)
    return read_outside(operand, data, tile, place, nothing, shape)


def inside(tile: Any, rows: int, columns: int) -> bool:
    return tile.index[0] + tile.size[0] <= rows and tile.index[1] + tile.size[1] <= columns


def read_inside(operand: Any, data: Any, tile: Any, shape: Any) -> tuple:
    layout = operand.layout
    loaded = counted(layout, "load", layout.load(data, tile, shape), tile.count)
    values = all_converted(layout, "load", loaded, layout.dtype)
    return transform_into(operand, values, tile)


def read_outside(operand: Any, data: Any, tile: Any, place: Place, nothing: Any, shape: Any) -> tuple:
    """A tile that is not wholly in range: all of it is out where no tile straddles an edge."""
    if operand.whole:
        return fill(operand.shared.dtype, tile.count, nothing)
    return generate(tile.count, read_edge_element, operand, data, tile, place, nothing, shape)


def read_edge_element(n: int, operand: Any, data: Any, tile: Any, place: Place, nothing: Any, shape: Any) -> Any:
    i, j = row_of(tile, n), column_of(tile, n)
    if i < place.rows and j < place.columns:
        return transform_element_into(operand, element_of(operand.layout, data, i, j, shape), i, j)
    return convert(operand.shared.dtype, nothing)
