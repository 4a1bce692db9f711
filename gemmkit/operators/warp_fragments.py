"""Between shared memory and the fragments of a warp: by each lane its own values, or by ``ldmatrix``.

A lane loads and stores neighbours at once where its map has some and the layout has them side by side. ``ldmatrix`` is for
matrix instructions (`gemmkit.ptx.mma`): it gives a lane 32 bits of a row of 16 bytes, as they lie where a row (of B: a
column) is contiguous along K, transposed where 16-bit elements lie across.
"""

from __future__ import annotations

from typing import Any

from gemmkit.lang.control import each, join
from gemmkit.lang.registers import generate
from gemmkit.ptx.fragments import fragment_coordinate
from gemmkit.ptx.ldmatrix import ldmatrix
from gemmkit.ptx.memory import load_shared, store_shared
from gemmkit.ptx.pinned import is_pinned
from gemmkit.ptx.special import lane_index
from gemmkit.tiling import translate, translate_offset

LINE = 16                              # bytes of a row of ldmatrix


def own_place(fragment_map: Any, tile: Any, n: int) -> Any:
    """The tile moved to where this lane's n-th value lies."""
    lane = lane_index()
    return translate(tile, fragment_coordinate(fragment_map, lane, n, 0), fragment_coordinate(fragment_map, lane, n, 1))


def pinned_place(fragment_map: Any, tile: Any, n: int) -> Any:
    """The same with what is known when a kernel is compiled apart: the base is the same for all of a lane's values."""
    return translate_offset(own_place(fragment_map, tile, 0), fragment_coordinate(fragment_map, 0, n, 0),
                            fragment_coordinate(fragment_map, 0, n, 1))


# -- element by element -----------------------------------------------------------------------------------------------

def load_elements(fragment_map: Any, width: int, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    """A fragment, ``width`` neighbours at a time."""
    return join(generate(fragment_map.values // width, _load_group, width, 1, fragment_map, layout, pointer, tile, leading))


def load_apart(fragment_map: Any, width: int, apart: int, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    """A fragment, ``width`` neighbours at a time, which are ``apart`` values from each other in it."""
    groups = generate(fragment_map.values // width, _load_group, width, apart, fragment_map, layout, pointer, tile, leading)
    return generate(fragment_map.values, _value_of, groups, width, apart)


def _load_group(n: int, width: int, apart: int, fragment_map: Any, layout: Any, pointer: Any, tile: Any,
                leading: int) -> tuple:
    if is_pinned(pointer):
        at = pinned_place(fragment_map, tile, _first(n, width, apart))
    else:                              # apart, FFMA loops of the single-stage kernel would be unrolled once, not four times
        at = own_place(fragment_map, tile, _first(n, width, apart))
    return load_shared(pointer, layout.position(at.base, leading), layout.position(at.offset, leading), width)


def _value_of(n: int, groups: tuple, width: int, apart: int) -> Any:
    """The inverse of `_first`: which group has the n-th value, and where in it."""
    return groups[n % apart + n // (apart * width) * apart][n // apart % width]


def store_elements(fragment_map: Any, width: int, apart: int, layout: Any, pointer: Any, tile: Any, leading: int,
                   values: tuple) -> None:
    """A fragment, ``width`` neighbours at a time, which are ``apart`` values from each other in it."""
    groups = generate(fragment_map.values // width, _neighbours, values, width, apart)
    each(_store, groups, width, apart, fragment_map, layout, pointer, tile, leading)


def _first(n: int, width: int, apart: int) -> int:
    """Which value the n-th group of neighbours begins with."""
    return n % apart + n // apart * apart * width


def _neighbours(n: int, values: tuple, width: int, apart: int) -> tuple:
    return generate(width, _neighbour, values, _first(n, width, apart), apart)


def _neighbour(k: int, values: tuple, first: int, apart: int) -> Any:
    return values[first + k * apart]


def _store(values: tuple, n: int, width: int, apart: int, fragment_map: Any, layout: Any, pointer: Any, tile: Any,
           leading: int) -> None:
    at = own_place(fragment_map, tile, _first(n, width, apart))
    store_shared(pointer, layout.position(at.base, leading), layout.position(at.offset, leading), values)


def element_place(fragment_map: Any, layout: Any, tile: Any, leading: int) -> int:
    """Where a lane's elements begin."""
    return layout.position(own_place(fragment_map, tile, 0).base, leading)


# -- matrices ---------------------------------------------------------------------------------------------------------

def a_along(operator: Any, tile: Any) -> Any:
    """A, contiguous along K: lane l addresses row l % 16, 16 bytes further along K from lane 16 on."""
    return translate(tile, lane_index() % 16, lane_index() // 16 * operator.line)


def a_across(operator: Any, tile: Any) -> Any:
    """A of 16-bit elements, contiguous along M: lane l addresses column l % 8 of one of four 8 x 8 matrices (of K = 8:
    of two)."""
    return translate(tile, lane_index() // 8 % 2 * 8, lane_index() % 8 + lane_index() // 16 * 8)


def b_along(operator: Any, tile: Any) -> Any:
    """B, contiguous along K: lane l addresses column l % 8, further along K and then 8 columns on in turn."""
    return translate(tile, lane_index() // 8 % operator.lines * operator.line,
                     lane_index() % 8 + lane_index() // (8 * operator.lines) * operator.further)


def b_across(operator: Any, tile: Any) -> Any:
    """B of 16-bit elements, contiguous along N: lane l addresses row l % 16 (of K = 8: l % 8), and then 8 columns on."""
    rows = 8 * operator.lines
    return translate(tile, lane_index() % rows, lane_index() // rows * operator.further)


def load_matrices(layout: Any, pointer: Any, tile: Any, leading: int, count: int, trans: bool) -> tuple:
    """``ldmatrix``; ``tile`` lies where this lane's row does."""
    return ldmatrix(pointer, layout.position(tile.base, leading), layout.position(tile.offset, leading), count, trans)
