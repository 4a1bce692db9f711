"""What the template kernels share: moving an operand's tiles, masked at its edges, through its transforms.

Masking is done here, once, for all layouts: an element out of range is never asked for, and stands as the operator's
identity wherever the product would meet it.
"""

from __future__ import annotations

from typing import Any

from gemmkit.lang.control import choose, keep
from gemmkit.lang.narrowing import fitting
from gemmkit.lang.registers import apply, generate, registers
from gemmkit.lang.values import convert, convert_all, fill
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
    choose(moves > 0, copy_together, copy_in_turn, operand, moves, data, pointer, block, at_i, at_j, rows, columns, nothing,
           warp, warps, shape)


def copy_in_turn(operand: Any, moves: int, data: Any, pointer: Any, block: Any, at_i: int, at_j: int, rows: int,
                 columns: int, nothing: Any, warp: int, warps: int, shape: Any) -> None:
    """Tile by tile."""
    warp_tiles = parallelise(block, operand.warp, warp, warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            tile = thread_tiles[j]
            held = choose(operand.passes_words, read_words, read_tile, operand, data, translate(tile, at_i, at_j), rows,
                          columns, nothing, shape)
            choose(operand.passes_words, put_words, put_elements, operand, pointer, tile,
                   operand.shared.leading(block.size), held)


def copy_together(operand: Any, moves: int, data: Any, pointer: Any, block: Any, at_i: int, at_j: int, rows: int,
                  columns: int, nothing: Any, warp: int, warps: int, shape: Any) -> None:
    """All loads, then all stores."""
    held = registers(operand.held, moves)
    warp_tiles = parallelise(block, operand.warp, warp, warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            held[i * len(thread_tiles) + j] = choose(operand.passes_words, read_words, read_tile, operand, data,
                                                     translate(thread_tiles[j], at_i, at_j), rows, columns, nothing, shape)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            choose(operand.passes_words, put_words, put_elements, operand, pointer, thread_tiles[j],
                   operand.shared.leading(block.size), held[i * len(thread_tiles) + j])


def read_words(operand: Any, data: Any, tile: Any, rows: int, columns: int, nothing: Any, shape: Any) -> tuple:
    """A thread's tile in 32-bit words: for the same type and order on both sides, and no transform between."""
    if inside(tile, rows, columns):
        return choose(operand.is_packed, read_packed, read_line, operand, data, tile, shape)
    return pack_words(choose(operand.whole, nothing_of_tile, read_edge, operand, data, tile, rows, columns, nothing,
                             shape))


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
    return choose(operand.whole, nothing_of_tile, read_edge, operand, data, tile, rows, columns, nothing, shape)


def inside(tile: Any, rows: int, columns: int) -> bool:
    return tile.index[0] + tile.size[0] <= rows and tile.index[1] + tile.size[1] <= columns


def read_inside(operand: Any, data: Any, tile: Any, shape: Any) -> tuple:
    values = convert_all(operand.layout.dtype, operand.layout.load(data, tile, shape))
    return convert_all(operand.shared.dtype, transform_tile(operand.to_shared, values, tile))


def nothing_of_tile(operand: Any, data: Any, tile: Any, rows: int, columns: int, nothing: Any, shape: Any) -> tuple:
    return fill(operand.shared.dtype, tile.count, nothing)


def read_edge(operand: Any, data: Any, tile: Any, rows: int, columns: int, nothing: Any, shape: Any) -> tuple:
    return generate(tile.count, read_edge_element, operand, data, tile, rows, columns, nothing, shape)


def read_edge_element(n: int, operand: Any, data: Any, tile: Any, rows: int, columns: int, nothing: Any,
                      shape: Any) -> Any:
    i, j = row_of(tile, n), column_of(tile, n)
    if i < rows and j < columns:
        value = convert(operand.layout.dtype, operand.layout.element(data, i, j, shape))
        return convert(operand.shared.dtype, transformed(operand.to_shared, value, i, j))
    return convert(operand.shared.dtype, nothing)


def row_of(tile: Any, n: int) -> int:
    """The row of a tile's n-th element, first dimension fastest."""
    return tile.index[0] + n % tile.size[0]


def column_of(tile: Any, n: int) -> int:
    return tile.index[1] + n // tile.size[0]


def transform_tile(transform: Any, values: tuple, tile: Any) -> tuple:
    """A transform of a tile's elements."""
    return choose(transform.is_identity, keep, transform_elements, values, transform, tile)


def transform_elements(values: tuple, transform: Any, tile: Any) -> tuple:
    return apply(transform_element, values, transform, tile)


def transform_element(x: Any, n: int, transform: Any, tile: Any) -> Any:
    return transformed(transform, x, row_of(tile, n), column_of(tile, n))


def transform_within(transform: Any, values: tuple, tile: Any, rows: int, columns: int) -> tuple:
    """`transform_tile` of a tile that may be partly out of range: there the coordinates are the nearest in range."""
    return choose(transform.is_identity, keep, transform_elements_within, values, transform, tile, rows, columns)


def transform_elements_within(values: tuple, transform: Any, tile: Any, rows: int, columns: int) -> tuple:
    return apply(transform_element_within, values, transform, tile, rows, columns)


def transform_element_within(x: Any, n: int, transform: Any, tile: Any, rows: int, columns: int) -> Any:
    return transformed(transform, x, min(row_of(tile, n), rows - 1), min(column_of(tile, n), columns - 1))


# -- results ----------------------------------------------------------------------------------------------------------

OUT, SHARED_D = "out (global_d_layout)", "shared_d_layout, where values of D stand before they are stored,"


def kept_in_shared(spec: Any, values: tuple) -> tuple:
    """Values on their way into shared memory, in its dtype. Those that will only pass through D's array must hold, too."""
    choose(spec.passes_d, fits_out, keep, values, spec)
    return convert_all(spec.d.shared.dtype, fitting(SHARED_D, spec.d.shared.dtype, values))


def fits_out(values: tuple, spec: Any) -> tuple:
    return fitting(OUT, spec.d.layout.dtype, values)


def delivered(spec: Any, values: tuple) -> tuple:
    """Finished values, which D's array must hold. Those that only passed through shared memory may have come in a narrower
    dtype, which a transform gave them by name."""
    return choose(spec.returns_d, returned, fits_out, values, spec)


def returned(values: tuple, spec: Any) -> tuple:
    return convert_all(spec.d.layout.dtype, values)


# -- fragments --------------------------------------------------------------------------------------------------------

def transform_fragment(transform: Any, mapped: bool, fragment_map: Any, dtype: Any, fragment: tuple, tile: Any,
                       rows: int, columns: int) -> tuple:
    """A transform of a fragment's elements, as ``dtype``; ``tile`` is where the fragment lies globally.

    An element outside the operand's ``rows`` and ``columns`` is transformed as if it were the nearest one inside: a
    function that indexes an array by its coordinates stays within it, and nobody looks at the result.
    ``mapped`` is false for an opaque fragment, whose elements' coordinates are not known (`get_config` refuses a
    transform that asks for them).
    """
    return convert_all(dtype, transform_registers(transform, mapped, fragment_map, fragment, tile, rows, columns))


def transform_registers(transform: Any, mapped: bool, fragment_map: Any, fragment: tuple, tile: Any, rows: int,
                        columns: int) -> tuple:
    """The same in the type that the transform gives."""
    return choose(transform.is_identity, keep, changed_fragment, fragment, transform, mapped, fragment_map, tile, rows,
                  columns)


def changed_fragment(fragment: tuple, transform: Any, mapped: bool, fragment_map: Any, tile: Any, rows: int,
                     columns: int) -> tuple:
    return choose(mapped, changed_mapped, changed_opaque, fragment, transform, fragment_map, tile, rows, columns)


def changed_mapped(fragment: tuple, transform: Any, fragment_map: Any, tile: Any, rows: int, columns: int) -> tuple:
    return apply(changed_element, fragment, transform, fragment_map, tile, rows, columns)


def changed_element(x: Any, n: int, transform: Any, fragment_map: Any, tile: Any, rows: int, columns: int) -> Any:
    lane = lane_index()
    i = tile.index[0] + fragment_coordinate(fragment_map, lane, n, 0)
    j = tile.index[1] + fragment_coordinate(fragment_map, lane, n, 1)
    return transformed(transform, x, min(i, rows - 1), min(j, columns - 1))


def changed_opaque(fragment: tuple, transform: Any, fragment_map: Any, tile: Any, rows: int, columns: int) -> tuple:
    return apply(changed_opaque_element, fragment, transform)


def changed_opaque_element(x: Any, n: int, transform: Any) -> Any:
    return transform.of(x)


def transform_input(operand: Any, mapped: bool, fragment_map: Any, dtype: Any, fragment: tuple, tile: Any, rows: int,
                    columns: int, axis: int, limit: int, nothing: Any) -> tuple:
    """The shared-to-registers transform of A or B. Where K ends (``limit`` on ``axis``) there is still nothing."""
    changed = transform_fragment(operand.to_registers, mapped, fragment_map, dtype, fragment, tile, rows, columns)
    return choose(operand.to_registers.is_identity, keep, mask_where_known, changed, mapped, fragment_map, dtype, tile,
                  axis, limit, nothing)


def mask_where_known(fragment: tuple, mapped: bool, fragment_map: Any, dtype: Any, tile: Any, axis: int, limit: int,
                     nothing: Any) -> tuple:
    return choose(mapped, masked, keep, fragment, fragment_map, dtype, tile, axis, limit, nothing)


def masked(fragment: tuple, fragment_map: Any, dtype: Any, tile: Any, axis: int, limit: int, nothing: Any) -> tuple:
    return apply(masked_element, fragment, fragment_map, dtype, tile, axis, limit, nothing)


def masked_element(x: Any, n: int, fragment_map: Any, dtype: Any, tile: Any, axis: int, limit: int,
                   nothing: Any) -> Any:
    if tile.index[axis] + fragment_coordinate(fragment_map, lane_index(), n, axis) < limit:
        return x
    return convert(dtype, nothing)


__all__ = ["column_of", "copy_to_shared", "delivered", "inside", "kept_in_shared", "put_elements", "put_words",
           "read_inside", "read_line", "read_packed", "read_tile", "read_words", "row_of", "transform_fragment",
           "transform_input", "transform_registers", "transform_tile", "transform_within"]
