"""Between shared memory and the fragments of a warp's matrix instructions (`gemmkit.ptx.mma`).

Inputs come by ``ldmatrix``, which gives a lane 32 bits of a row of 16 bytes: as they lie where a row (of B: a column) is
contiguous along K, transposed where 16-bit elements lie across. Other elements come one by one, each lane its own.
Results and C go in pairs of neighbours where rows are contiguous.

A position is a run-time part (the lane's) and a compile-time one (the value's), which becomes the immediate of the address.
"""

from __future__ import annotations

from typing import Any

from gemmkit.lang.control import each, join
from gemmkit.lang.registers import generate
from gemmkit.ptx.fragments import fragment_coordinate
from gemmkit.ptx.ldmatrix import ldmatrix
from gemmkit.ptx.memory import load_shared, store_shared
from gemmkit.ptx.special import lane_index
from gemmkit.tiling import translate, translate_offset

LINE = 16                              # bytes of a row of ldmatrix


def own_place(fragment_map: Any, tile: Any, n: int) -> Any:
    """The tile moved to where this lane's n-th value lies."""
    lane = lane_index()
    mine = translate(tile, fragment_coordinate(fragment_map, lane, 0, 0), fragment_coordinate(fragment_map, lane, 0, 1))
    return translate_offset(mine, fragment_coordinate(fragment_map, 0, n, 0), fragment_coordinate(fragment_map, 0, n, 1))


# -- element by element -----------------------------------------------------------------------------------------------

def load_elements(fragment_map: Any, width: int, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    """A fragment, ``width`` neighbours at a time."""
    return join(generate(fragment_map.values // width, _load, width, fragment_map, layout, pointer, tile, leading))


def _load(n: int, width: int, fragment_map: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    at = own_place(fragment_map, tile, n * width)
    return load_shared(pointer, layout.position(at.base, leading), layout.position(at.offset, leading), width)


def store_elements(fragment_map: Any, layout: Any, pointer: Any, tile: Any, leading: int, values: tuple) -> None:
    each(_store, values, fragment_map, layout, pointer, tile, leading)


def _store(value: Any, n: int, fragment_map: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> None:
    _put((value,), n, fragment_map, layout, pointer, tile, leading)


def store_pairs(fragment_map: Any, layout: Any, pointer: Any, tile: Any, leading: int, values: tuple) -> None:
    """A fragment, two neighbours at a time."""
    each(_store_pair, generate(fragment_map.values // 2, _pair_of, values), fragment_map, layout, pointer, tile, leading)


def _pair_of(n: int, values: tuple) -> tuple:
    return values[2 * n], values[2 * n + 1]


def _store_pair(pair: tuple, n: int, fragment_map: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> None:
    _put(pair, 2 * n, fragment_map, layout, pointer, tile, leading)


def _put(values: tuple, n: int, fragment_map: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> None:
    at = own_place(fragment_map, tile, n)
    store_shared(pointer, layout.position(at.base, leading), layout.position(at.offset, leading), values)


# -- matrices ---------------------------------------------------------------------------------------------------------

def load_matrices(layout: Any, pointer: Any, tile: Any, leading: int, i: int, j: int, count: int, trans: bool) -> tuple:
    """``ldmatrix`` with this lane's row at (i, j) in the tile."""
    return ldmatrix(pointer, layout.position(translate(tile, i, j).base, leading), layout.position(tile.offset, leading),
                    count, trans)


def load_a_along(operator: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    """A, contiguous along K: lane l addresses row l % 16, 16 bytes further along K from lane 16 on."""
    lane = lane_index()
    return load_matrices(layout, pointer, tile, leading, lane % 16, lane // 16 * operator.line, 2 * operator.lines, False)


def load_a_across(operator: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    """A of 16-bit elements, contiguous along M: lane l addresses column l % 8 of one of four 8 x 8 matrices."""
    lane = lane_index()
    return load_matrices(layout, pointer, tile, leading, lane // 8 % 2 * 8, lane % 8 + lane // 16 * 8, 4, True)


def load_b_along(operator: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    """B, contiguous along K: lane l addresses column l % 8, further along K and then 8 columns on in turn."""
    lane = lane_index()
    return load_matrices(layout, pointer, tile, leading, lane // 8 % operator.lines * operator.line,
                         lane % 8 + lane // (8 * operator.lines) * 8, operator.lines * operator.columns, False)


def load_b_across(operator: Any, layout: Any, pointer: Any, tile: Any, leading: int) -> tuple:
    """B of 16-bit elements, contiguous along N: lane l addresses row l % 16, 8 columns on from lane 16 on."""
    lane = lane_index()
    return load_matrices(layout, pointer, tile, leading, lane % 16, lane // 16 * 8, 2 * operator.columns, True)


__all__ = ["LINE", "load_a_across", "load_a_along", "load_b_across", "load_b_along", "load_elements", "own_place",
           "store_elements", "store_pairs"]
