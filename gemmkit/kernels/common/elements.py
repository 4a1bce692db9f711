"""Functions of elements: transforms of tiles and fragments at their coordinates, and the dtypes that results must hold."""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.common.work import Place
from gemmkit.lang.narrowing import fitting
from gemmkit.lang.registers import apply
from gemmkit.lang.returned import all_converted, converted, convertible, numbers
from gemmkit.lang.values import convert, convert_all
from gemmkit.ptx.fragments import fragment_coordinate
from gemmkit.ptx.special import lane_index
from gemmkit.transforms.base import transformed


def row_of(tile: Any, n: int) -> int:
    """The row of a tile's n-th element, first dimension fastest."""
    return tile.index[0] + n % tile.size[0]


def column_of(tile: Any, n: int) -> int:
    return tile.index[1] + n // tile.size[0]


# -- epilogues of tiles ------------------------------------------------------------------------------------------------

def finished(epilogue: Any, values: tuple, layout: Any, tile: Any, shape: Any) -> tuple:
    """What an epilogue made of a tile's values, fit to be stored in D's layout."""
    made = numbers(epilogue, "finish", epilogue.finish(values, tile, shape), values)
    return convertible(epilogue, "finish", made, layout.dtype) if layout.is_plain else made    # a user's may take anything


# -- tiles -------------------------------------------------------------------------------------------------------------

def transform_into(operand: Any, values: tuple, tile: Any) -> tuple:
    """Elements on their way to shared memory."""
    changed = transform_tile(operand.to_shared, values, tile)
    return all_converted(operand.to_shared, "__call__", changed, operand.shared.dtype)


def transform_element_into(operand: Any, x: Any, i: int, j: int) -> Any:
    """An element on its way to shared memory."""
    return converted(operand.to_shared, "__call__", transformed(operand.to_shared, x, i, j), operand.shared.dtype)


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

def transform_fragment(operator: Any, transform: Any, fragment_map: Any, dtype: Any, fragment: tuple, tile: Any,
                       place: Place) -> tuple:
    """A transform of a fragment's elements, as ``dtype``; ``tile`` is where the fragment lies in its matrix.

    An element beyond the matrix's end (``place``) is transformed as if it were the nearest one inside: a function that
    indexes an array by its coordinates stays within it, and the result is never stored.
    The coordinates of an opaque fragment (not ``operator.is_mapped``) are not known; `get_config` refuses a transform that
    asks for them.
    """
    changed = transform_registers(operator, transform, fragment_map, fragment, tile, place)
    return all_converted(transform, "__call__", changed, dtype)


def transform_registers(operator: Any, transform: Any, fragment_map: Any, fragment: tuple, tile: Any, place: Place) -> tuple:
    """The same in the type that the transform gives."""
    if transform.is_identity:
        return fragment
    if operator.is_mapped:
        return apply(changed_element, fragment, transform, fragment_map, tile, place)
    return apply(changed_opaque_element, fragment, transform)


def changed_element(x: Any, n: int, transform: Any, fragment_map: Any, tile: Any, place: Place) -> Any:
    lane = lane_index()
    i = tile.index[0] + fragment_coordinate(fragment_map, lane, n, 0)
    j = tile.index[1] + fragment_coordinate(fragment_map, lane, n, 1)
    return transformed(transform, x, min(i, place.rows - 1), min(j, place.columns - 1))


def changed_opaque_element(x: Any, n: int, transform: Any) -> Any:
    return transformed(transform, x, 0, 0)


def transform_input(operand: Any, operator: Any, fragment_map: Any, dtype: Any, fragment: tuple, tile: Any,
                    place: Place) -> tuple:
    """The shared-to-registers transform of A or B. Beyond K's end the identity stays."""
    changed = transform_fragment(operator, operand.to_registers, fragment_map, dtype, fragment, tile, place)
    if operator.is_mapped and not operand.to_registers.is_identity:
        return apply(masked_element, changed, operand, fragment_map, tile, place, convert(dtype, operator.identity))
    return changed


def masked_element(x: Any, n: int, operand: Any, fragment_map: Any, tile: Any, place: Place, nothing: Any) -> Any:
    end = place.columns if operand.k_axis == 1 else place.rows
    if tile.index[operand.k_axis] + fragment_coordinate(fragment_map, lane_index(), n, operand.k_axis) < end:
        return x
    return nothing
