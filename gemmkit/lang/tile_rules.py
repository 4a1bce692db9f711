"""What the operations of tiles mean, and what they refuse, shared by the host and the device: projections, divisions among
workers, distances, linear positions."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["Division", "check_distances", "check_linearisation", "dimensions_of", "division", "named_dimensions"]


def dimensions_of(projection: str, names: tuple[str, ...]) -> list[int]:
    """The dimensions that ``tile.<projection>`` names, in its order; raises KeyError with a reason."""
    if projection in names:
        return [names.index(projection)]
    chosen = [names.index(letter) if letter in names else -1 for letter in projection]
    if not chosen or -1 in chosen or len(set(chosen)) != len(chosen):
        raise KeyError(f"{projection!r} does not project a tile of dimensions {', '.join(names)}")
    return chosen


def named_dimensions(tile: Any, names: tuple[str, ...]) -> list[int]:
    """The dimensions that ``project(tile, *names)`` keeps; raises ValueError with a reason."""
    missing = [name for name in names if name not in tile.names]
    if missing or not names:
        raise ValueError(f"project: {missing or 'nothing'} is not among the dimensions {', '.join(tile.names)}")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"project: {name} is named twice")
    return [tile.names.index(name) for name in names]


class Division:
    """How a tile divides into sub-tiles for ``count`` workers; shared by the host and the device.

    ``split`` is true when a worker's sub-tiles all lie at (position of its first) + (a compile-time offset), so that
    base and offset can be told apart. That holds when the workers fill whole leading dimensions of the grid, the last
    one evenly (mixed-radix addition without carries); otherwise the whole position is computed at run time.
    """

    def __init__(self, names: tuple[str, ...], extents: tuple[int, ...], tiling: tuple[int, ...], count: int,
                 order: str = "column"):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"parallelise: count is {count!r}; at least one worker is needed")
        if not isinstance(order, str) or order not in ("column", "row"):
            raise ValueError(f'parallelise: order is {order!r}; it is "column" or "row"')
        for name, extent, step in zip(names, extents, tiling):
            if extent % step:
                raise ValueError(f"parallelise: {name}={extent} is not a multiple of the tiling's {name}={step}")
        self.tiling, self.count = tiling, count
        self.grid = tuple(extent // step for extent, step in zip(extents, tiling))
        self.axes = tuple(range(len(names))) if order == "column" else tuple(reversed(range(len(names))))
        self.total = math.prod(self.grid)
        self.even = self.total % count == 0
        self.split = self._carry_free()
        self._places: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def _carry_free(self) -> bool:
        left = self.count
        for axis in self.axes:
            extent = self.grid[axis]
            if left >= extent:
                if left % extent:
                    return False
                left //= extent
            else:
                return extent % left == 0
        return True

    def steps(self, index: int) -> int:
        """How many sub-tiles the worker gets."""
        return max(0, -(-(self.total - index) // self.count))

    def position(self, linear: int) -> tuple[int, ...]:
        """Where the sub-tile of a linear number lies."""
        out = [0] * len(self.grid)
        for axis in self.axes:
            linear, digit = divmod(linear, self.grid[axis])
            out[axis] = digit * self.tiling[axis]
        return tuple(out)

    def place(self, worker: int, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Base and offset of a worker's sub-tile; raises IndexError where it has none."""
        found = self._places.get((worker, step))
        if found is None:
            if not 0 <= step < self.steps(worker):
                raise IndexError(f"sub-tile {step} of {self.steps(worker)}")
            if self.split:
                found = self.position(worker), self.position(step * self.count)
            else:
                found = self.position(worker + step * self.count), (0,) * len(self.grid)
            self._places[worker, step] = found
        return found


_divisions: dict[tuple, Division] = {}


def division(tile: Any, tiling: Any, count: int, order: str = "column") -> Division:
    """The division of a tile (or its device type); raises ValueError when there is none."""
    try:
        key = (tile.names, tile.extents, tiling.names, tiling.extents, count, order)
        found = _divisions.get(key)
    except TypeError:
        raise TypeError(f"parallelise: count={count!r}, order={order!r}; a number of workers and a word are "
                        "needed") from None
    if found is None:
        if tile.names != tiling.names:
            raise ValueError(f"parallelise: the tile has dimensions {', '.join(tile.names)} and the tiling "
                             f"{', '.join(tiling.names)}; project one of them")
        found = _divisions.setdefault(key, Division(tile.names, tile.extents, tiling.extents, count, order))
    return found


def check_distances(tile: Any, distances: tuple, by: dict[str, Any]) -> None:
    """Raise ValueError unless these distances, by position or by name, are a tile's (or its device type's)."""
    if distances and (by or len(distances) != len(tile.names)):
        raise ValueError(f"translate: give one distance for each of {', '.join(tile.names)}, or name them")
    unknown = set(by) - set(tile.names)
    if unknown:
        raise ValueError(f"translate: {', '.join(sorted(unknown))} is not among the dimensions {', '.join(tile.names)}")


def check_linearisation(coordinates: int, dimensions: int, order: str) -> None:
    """Raise ValueError unless so many coordinates can be linearised in an array of so many dimensions."""
    if coordinates != dimensions:
        raise ValueError(f"linearise: coord has {coordinates} coordinates and shape {dimensions} extents; both need as many")
    if not isinstance(order, str) or order not in ("column", "row"):
        raise ValueError(f'linearise: order is {order!r}; it is "column" or "row"')
