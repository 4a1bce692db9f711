"""Scores and masks, element by element.

| block of keys | scores | a score's function is told |
|---|---|---|
| `FREE` | as they are: every key is there, and seen by every query | the key |
| `TESTED` | -inf of what is hidden, and beyond the last key | the key, or the last one |

A thread's values of S lie in two rows, 8 apart: (row, c), (row, c + 1), (row + 8, c), (row + 8, c + 1), then the same 8
columns on. Functions of the user's get places in range: beyond the last query or key those of the last one.
"""

from __future__ import annotations

import math
from typing import Any

from gemmkit.components import Component
from gemmkit.kernels.attention.work import F32, Limits, Place, Tile
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.registers import apply
from gemmkit.lang.returned import converted
from gemmkit.lang.values import convert


@dataclass(frozen=True)
class Free(Component):
    """A block in which nothing is tested."""

    def scores(self, s: tuple, spec: Any, sizes: Any, place: Place) -> tuple:
        if spec.has_score:
            return apply(score, s, self, spec, sizes, place)
        return s

    def key(self, n: int, tile: Tile) -> int:
        return n


@dataclass(frozen=True)
class Tested(Component):
    """A block with keys that some queries may not see."""

    def scores(self, s: tuple, spec: Any, sizes: Any, place: Place) -> tuple:
        if spec.has_score:
            s = apply(score, s, self, spec, sizes, place)
        return apply(seen, s, spec, place, limits_of(spec, place, 0), limits_of(spec, place, 2))

    def key(self, n: int, tile: Tile) -> int:
        return max(min(n, tile.keys - 1), 0)


FREE, TESTED = Free(), Tested()


def limits_of(spec: Any, place: Place, i: int) -> Limits:
    """The keys that a row sees, counted from the thread's first one: asked once a row, since a mask may load them."""
    tile, row = place.tile, row_of(i, place)
    shift = tile.keys - tile.queries
    first, end = 0, tile.keys
    if spec.mask.has_first:
        first = spec.mask.first_shown(row, tile.head, tile.batch, shift) - place.column
    if spec.mask.has_end:
        end = min(end, spec.mask.end_shown(row, tile.head, tile.batch, shift))
    return Limits(first, end - place.column)


def row_of(i: int, place: Place) -> int:
    return min(place.row + i // 2 % 2 * 8, place.tile.queries - 1)


def column_of(i: int, place: Place) -> int:
    return place.column + column_at(i)


def column_at(i: int) -> int:
    return i // 4 * 8 + i % 2


def score(x: Any, i: int, kind: Any, spec: Any, sizes: Any, place: Place) -> Any:
    tile, s = place.tile, x * sizes.scale
    if spec.score.real_places:
        m = convert(F32, place.row) + convert(F32, i // 2 % 2 * 8)
        n = convert(F32, place.column) + convert(F32, column_at(i))
        return converted(spec.score, "__call__", spec.score.at(s, m, n, tile.head, tile.batch), F32)
    m, n = row_of(i, place), kind.key(column_of(i, place), tile)
    return converted(spec.score, "__call__", spec.score.at(s, m, n, tile.head, tile.batch), F32)


def seen(x: Any, i: int, spec: Any, place: Place, upper: Limits, lower: Limits) -> Any:
    limits = upper if i // 2 % 2 == 0 else lower
    within = column_at(i) < limits.end
    if spec.mask.has_first:
        within = within and limits.first <= column_at(i)
    if spec.mask.has_visible:
        tile, row, column = place.tile, row_of(i, place), column_of(i, place)
        shift = tile.keys - tile.queries
        within = within and spec.mask.shows(row, column, tile.head, tile.batch, shift)
    return x if within else -math.inf
