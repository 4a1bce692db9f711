"""Scores and masks, element by element.

A thread's values of S lie in two rows, 8 apart: (row, c), (row, c + 1), (row + 8, c), (row + 8, c + 1), then the same 8
columns on. Functions of the user's get places in range: beyond the last query or key those of the last one.
"""

from __future__ import annotations

import math
from typing import Any

from gemmkit.kernels.attention.work import F32, Place, Tile
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
    return apply(seen, unmasked(s, columns, spec, sizes, tile, place), columns, spec, tile, place)


def columns_in_range(n: int, tile: Tile) -> int:
    return n


def columns_within(n: int, tile: Tile) -> int:
    """The key, or the last one."""
    return max(min(n, tile.keys - 1), 0)


def row_of(i: int, tile: Tile, place: Place) -> int:
    return min(place.row + i // 2 % 2 * 8, tile.queries - 1)


def column_of(i: int, place: Place) -> int:
    return place.column + i // 4 * 8 + i % 2


def score(x: Any, i: int, columns: Any, spec: Any, sizes: Any, tile: Tile, place: Place) -> Any:
    s = x * sizes.scale
    if spec.score.real_places:
        m = convert(F32, place.row) + convert(F32, i // 2 % 2 * 8)
        n = convert(F32, place.column) + convert(F32, i // 4 * 8 + i % 2)
        return converted(spec.score, "__call__", spec.score.at(s, m, n, tile.head, tile.batch), F32)
    m, n = row_of(i, tile, place), columns(column_of(i, place), tile)
    return converted(spec.score, "__call__", spec.score.at(s, m, n, tile.head, tile.batch), F32)


def seen(x: Any, i: int, columns: Any, spec: Any, tile: Tile, place: Place) -> Any:
    n = column_of(i, place)
    if spec.mask.is_everything:
        return x if n < tile.keys else -math.inf
    shift = tile.keys - tile.queries
    return x if n < tile.keys and spec.mask.sees(row_of(i, tile, place), n, tile.head, tile.batch, shift) else -math.inf
