"""What the template kernels share: moving an operand's tiles, masked at its edges, through its transforms.

Masking is done here, once, for all layouts: an element out of range is never asked for, and stands as the operator's
identity wherever the product would meet it.
"""

from __future__ import annotations

from typing import Any

from gemmkit.lang.narrowing import fitting
from gemmkit.lang.registers import apply, generate, registers
from gemmkit.lang.returned import all_converted, converted, counted, pair
from gemmkit.lang.values import convert, convert_all, fill
from gemmkit.layouts.base import element_of
from gemmkit.ptx.fragments import fragment_coordinate
from gemmkit.ptx.special import lane_index
from gemmkit.ptx.words import load_words, pack_words
from gemmkit.tiling import parallelise, translate
from gemmkit.transforms.base import transformed


def copy_to_shared(operand: Any, moves: int, data: Any, pointer: Any, block: Any, at_i: int, at_j: int, rows: int,
                   columns: int, nothing: Any, warp: int, warps: int, shape: Any) -> None:
    """Copy the block's tile of an operand from global to shared memory; (at_i, at_j) is where it lies globally.

    ``moves`` is how many tiles a thread copies when its registers can hold them all (0 when not): then all loads go out
    before the first store waits for one.
    """
    if moves > 0:
        copy_together(operand, moves, data, pointer, block, at_i, at_j, rows, columns, nothing, warp, warps, shape)
    else:
        copy_in_turn(operand, data, pointer, block, at_i, at_j, rows, columns, nothing, warp, warps, shape)


def copy_in_turn(operand: Any, data: Any, pointer: Any, block: Any, at_i: int, at_j: int, rows: int, columns: int,
                 nothing: Any, warp: int, warps: int, shape: Any) -> None:
    """Tile by tile."""
    warp_tiles = parallelise(block, operand.warp, warp, warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            tile = thread_tiles[j]
            put_moved(operand, pointer, tile, operand.shared.leading(block.size),
                      read_moved(operand, data, translate(tile, at_i, at_j), rows, columns, nothing, shape))


def copy_together(operand: Any, moves: int, data: Any, pointer: Any, block: Any, at_i: int, at_j: int, rows: int,
                  columns: int, nothing: Any, warp: int, warps: int, shape: Any) -> None:
    """All loads, then all stores."""
    held = registers(operand.held, moves)
    warp_tiles = parallelise(block, operand.warp, warp, warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            held[i * len(thread_tiles) + j] = read_moved(operand, data, translate(thread_tiles[j], at_i, at_j), rows,
                                                         columns, nothing, shape)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            put_moved(operand, pointer, thread_tiles[j], operand.shared.leading(block.size),
                      held[i * len(thread_tiles) + j])


def read_moved(operand: Any, data: Any, tile: Any, rows: int, columns: int, nothing: Any, shape: Any) -> tuple:
    """A thread's tile on its way to shared memory: in words where nothing happens to it, or in elements."""
    if operand.passes_words:
        return read_words(operand, data, tile, rows, columns, nothing, shape)
    return read_tile(operand, data, tile, rows, columns, nothing, shape)


def put_moved(operand: Any, pointer: Any, tile: Any, leading: int, held: tuple) -> None:
    if operand.passes_words:
        put_words(operand, pointer, tile, leading, held)
    else:
        put_elements(operand, pointer, tile, leading, held)


def read_words(operand: Any, data: Any, tile: Any, rows: int, columns: int, nothing: Any, shape: Any) -> tuple:
    """A thread's tile in 32-bit words: for the same type and order on both sides, and no transform between."""
    if inside(tile, rows, columns):
        if operand.is_packed:
            return read_packed(operand, data, tile, shape)
        return read_line(operand, data, tile, shape)
    return pack_words(read_outside(operand, data, tile, rows, columns, nothing, shape))


def read_line(operand: Any, data: Any, tile: Any, shape: Any) -> tuple:
    return load_words(data, operand.layout.axis, tile.base, tile.offset, tile.count)


def read_packed(operand: Any, data: Any, tile: Any, shape: Any) -> tuple:
    return operand.layout.load_packed(data, tile, shape)


def put_words(operand: Any, pointer: Any, tile: Any, leading: int, words: tuple) -> None:
    operand.shared.store_words(pointer, tile, words, leading)


def put_elements(operand: Any, pointer: Any, tile: Any, leading: int, values: tuple) -> None:
    operand.shared.store_shared(pointer, tile, values, leading)


# -- reading an operand -----------------------------------------------------------------------------------------------

def read_tile(operand: Any, data: Any, tile: Any, rows: int, columns: int, nothing: Any, shape: Any) -> tuple:
    """A thread's tile of an operand, transformed, in the shared layout's dtype; ``nothing`` where it is out of range."""
    if inside(tile, rows, columns):
        return read_inside(operand, data, tile, shape)
    return read_outside(operand, data, tile, rows, columns, nothing, shape)


def inside(tile: Any, rows: int, columns: int) -> bool:
    return tile.index[0] + tile.size[0] <= rows and tile.index[1] + tile.size[1] <= columns


def read_inside(operand: Any, data: Any, tile: Any, shape: Any) -> tuple:
    layout = operand.layout
    loaded = counted(layout, "load", layout.load(data, tile, shape), tile.count)
    values = all_converted(layout, "load", loaded, layout.dtype)
    return transform_into(operand, values, tile)


def read_outside(operand: Any, data: Any, tile: Any, rows: int, columns: int, nothing: Any, shape: Any) -> tuple:
    """A tile that is not wholly in range: all of it is out where no tile straddles an edge."""
    if operand.whole:
        return fill(operand.shared.dtype, tile.count, nothing)
    return generate(tile.count, read_edge_element, operand, data, tile, rows, columns, nothing, shape)


def read_edge_element(n: int, operand: Any, data: Any, tile: Any, rows: int, columns: int, nothing: Any,
                      shape: Any) -> Any:
    i, j = row_of(tile, n), column_of(tile, n)
    if i < rows and j < columns:
        return transform_element_into(operand, element_of(operand.layout, data, i, j, shape), i, j)
    return convert(operand.shared.dtype, nothing)


def transform_into(operand: Any, values: tuple, tile: Any) -> tuple:
    """Elements on their way to shared memory."""
    changed = transform_tile(operand.to_shared, values, tile)
    return all_converted(operand.to_shared, "__call__", changed, operand.shared.dtype)


def transform_element_into(operand: Any, x: Any, i: int, j: int) -> Any:
    """An element on its way to shared memory."""
    return converted(operand.to_shared, "__call__", transformed(operand.to_shared, x, i, j), operand.shared.dtype)


def k_range_of(layout: Any, begin: int, end: int, shape: Any) -> tuple:
    """The part of K that a layout says matters to some rows or columns, of what there is of K."""
    first, last = pair(layout, "k_range", layout.k_range(begin, end, shape))
    return max(first, 0), min(last, shape.K)


def row_of(tile: Any, n: int) -> int:
    """The row of a tile's n-th element, first dimension fastest."""
    return tile.index[0] + n % tile.size[0]


def column_of(tile: Any, n: int) -> int:
    return tile.index[1] + n // tile.size[0]


def transform_tile(transform: Any, values: tuple, tile: Any) -> tuple:
    """A transform of a tile's elements."""
    return values if transform.is_identity else apply(transform_element, values, transform, tile)


def transform_element(x: Any, n: int, transform: Any, tile: Any) -> Any:
    return transformed(transform, x, row_of(tile, n), column_of(tile, n))


def transform_within(transform: Any, values: tuple, tile: Any, rows: int, columns: int) -> tuple:
    """`transform_tile` of a tile that may be partly out of range: there the coordinates are the nearest in range."""
    if transform.is_identity:
        return values
    return apply(transform_element_within, values, transform, tile, rows, columns)


def transform_element_within(x: Any, n: int, transform: Any, tile: Any, rows: int, columns: int) -> Any:
    return transformed(transform, x, min(row_of(tile, n), rows - 1), min(column_of(tile, n), columns - 1))


# -- results ----------------------------------------------------------------------------------------------------------

OUT, SHARED_D = "out (global_d_layout)", "shared_d_layout, where values of D stand before they are stored,"


def kept_in_shared(spec: Any, values: tuple) -> tuple:
    """Values on their way into shared memory, in its dtype. Those that will only pass through D's array must hold, too."""
    if spec.passes_d:
        fitting(OUT, spec.d.layout.dtype, values)
    dtype = spec.d.shared.dtype
    return all_converted(spec.d.to_registers, "__call__", fitting(SHARED_D, dtype, values), dtype)


def delivered(spec: Any, values: tuple) -> tuple:
    """Finished values, which D's array must hold. Those that only passed through shared memory may have come in a narrower
    dtype, which a transform gave them by name."""
    if spec.returns_d:
        return convert_all(spec.d.layout.dtype, values)
    return fitting(OUT, spec.d.layout.dtype, values)


# -- fragments --------------------------------------------------------------------------------------------------------

def transform_fragment(transform: Any, mapped: bool, fragment_map: Any, dtype: Any, fragment: tuple, tile: Any,
                       rows: int, columns: int) -> tuple:
    """A transform of a fragment's elements, as ``dtype``; ``tile`` is where the fragment lies globally.

    An element outside the operand's ``rows`` and ``columns`` is transformed as if it were the nearest one inside: a
    function that indexes an array by its coordinates stays within it, and nobody looks at the result.
    ``mapped`` is false for an opaque fragment, whose elements' coordinates are not known (`get_config` refuses a
    transform that asks for them).
    """
    changed = transform_registers(transform, mapped, fragment_map, fragment, tile, rows, columns)
    return all_converted(transform, "__call__", changed, dtype)


def transform_registers(transform: Any, mapped: bool, fragment_map: Any, fragment: tuple, tile: Any, rows: int,
                        columns: int) -> tuple:
    """The same in the type that the transform gives."""
    if transform.is_identity:
        return fragment
    if mapped:
        return apply(changed_element, fragment, transform, fragment_map, tile, rows, columns)
    return apply(changed_opaque_element, fragment, transform)


def changed_element(x: Any, n: int, transform: Any, fragment_map: Any, tile: Any, rows: int, columns: int) -> Any:
    lane = lane_index()
    i = tile.index[0] + fragment_coordinate(fragment_map, lane, n, 0)
    j = tile.index[1] + fragment_coordinate(fragment_map, lane, n, 1)
    return transformed(transform, x, min(i, rows - 1), min(j, columns - 1))


def changed_opaque_element(x: Any, n: int, transform: Any) -> Any:
    return transformed(transform, x, 0, 0)


def transform_input(operand: Any, mapped: bool, fragment_map: Any, dtype: Any, fragment: tuple, tile: Any, rows: int,
                    columns: int, axis: int, limit: int, nothing: Any) -> tuple:
    """The shared-to-registers transform of A or B. Where K ends (``limit`` on ``axis``) there is still nothing."""
    changed = transform_fragment(operand.to_registers, mapped, fragment_map, dtype, fragment, tile, rows, columns)
    if mapped and not operand.to_registers.is_identity:
        return apply(masked_element, changed, fragment_map, dtype, tile, axis, limit, nothing)
    return changed


def masked_element(x: Any, n: int, fragment_map: Any, dtype: Any, tile: Any, axis: int, limit: int,
                   nothing: Any) -> Any:
    if tile.index[axis] + fragment_coordinate(fragment_map, lane_index(), n, axis) < limit:
        return x
    return convert(dtype, nothing)


__all__ = ["column_of", "copy_to_shared", "delivered", "inside", "k_range_of", "kept_in_shared", "put_elements", "put_words",
           "read_inside", "read_line", "read_packed", "read_tile", "read_words", "row_of", "transform_element_into",
           "transform_fragment", "transform_input", "transform_into", "transform_registers", "transform_tile",
           "transform_within"]
