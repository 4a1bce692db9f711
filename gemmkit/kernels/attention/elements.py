"""Scores and masks, element by element.

A thread's values of S lie in two rows, 8 apart: (row, c), (row, c + 1), (row + 8, c), (row + 8, c + 1), then the same 8
columns on. Functions of the user's get places in range: beyond the last query or key those of the last one.
"""

from __future__ import annotations

import math
from typing import Any

from gemmkit.kernels.attention.work import F32, Limits, Place, Tile
from gemmkit.lang.registers import apply
from gemmkit.lang.returned import converted
from gemmkit.lang.values import convert

__all__ = ["columns_in_range", "columns_within", "mask", "unmasked"]


def unmasked(s: tuple, columns: Any, spec: Any, sizes: Any, tile: Tile, place: Place) -> tuple:
    """Scores of a block in which every key is seen by every query."""
    if spec.has_score:
        return apply(score, s, columns, spec, sizes, tile, place)
    return s


def mask(s: tuple, columns: Any, spec: Any, sizes: Any, tile: Tile, place: Place) -> tuple:
    """Scores of a block; -inf of what is hidden, and beyond the last key."""
    s = unmasked(s, columns, spec, sizes, tile, place)
    return apply(seen, s, spec, tile, place, limits_of(spec, tile, place, 0), limits_of(spec, tile, place, 2))


def limits_of(spec: Any, tile: Tile, place: Place, i: int) -> Limits:
    """The keys that a row sees, counted from the thread's first one: asked once a row, since a mask may load them."""
    row, shift = row_of(i, tile, place), tile.keys - tile.queries
    first, end = 0, tile.keys
    if spec.mask.has_first:
        first = spec.mask.first_shown(row, tile.head, tile.batch, shift) - place.column
    if spec.mask.has_end:
        end = min(end, spec.mask.end_shown(row, tile.head, tile.batch, shift))
    return Limits(first, end - place.column)


def columns_in_range(n: int, tile: Tile) -> int:
    return n


def columns_within(n: int, tile: Tile) -> int:
    """The key, or the last one."""
    return max(min(n, tile.keys - 1), 0)


def row_of(i: int, tile: Tile, place: Place) -> int:
    return min(place.row + i // 2 % 2 * 8, tile.queries - 1)


def column_of(i: int, place: Place) -> int:
    return place.column + column_at(i)


def column_at(i: int) -> int:
    return i // 4 * 8 + i % 2


def score(x: Any, i: int, columns: Any, spec: Any, sizes: Any, tile: Tile, place: Place) -> Any:
    s = x * sizes.scale
    if spec.score.real_places:
        m = convert(F32, place.row) + convert(F32, i // 2 % 2 * 8)
        n = convert(F32, place.column) + convert(F32, column_at(i))
        return converted(spec.score, "__call__", spec.score.at(s, m, n, tile.head, tile.batch), F32)
    m, n = row_of(i, tile, place), columns(column_of(i, place), tile)
    return converted(spec.score, "__call__", spec.score.at(s, m, n, tile.head, tile.batch), F32)


def seen(x: Any, i: int, spec: Any, tile: Tile, place: Place, upper: Limits, lower: Limits) -> Any:
    limits = upper if i // 2 % 2 == 0 else lower
    within = column_at(i) < limits.end
    if spec.mask.has_first:
        within = within and limits.first <= column_at(i)
    if spec.mask.has_visible:
        row, column, shift = row_of(i, tile, place), column_of(i, place), tile.keys - tile.queries
        within = within and spec.mask.shows(row, column, tile.head, tile.batch, shift)
    return x if within else -math.inf
