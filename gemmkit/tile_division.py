"""How a tile divides among workers, and where each one's sub-tiles lie."""

from __future__ import annotations

import math
from typing import Any

from gemmkit.lang.aggregates import Number
from gemmkit.strides import Mode, Modes, ShapeError, Step, composed, walk


class Division:
    """How a tile divides into sub-tiles for ``count`` workers.

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
        self.tiling, self.count, self.order = tiling, count, order
        self.grid = tuple(extent // step for extent, step in zip(extents, tiling))
        self.axes = tuple(range(len(names))) if order == "column" else tuple(reversed(range(len(names))))
        self.total = math.prod(self.grid)
        self.even = self.total % count == 0
        self.modes: Modes = tuple((self.grid[axis], Step(n if at == axis else 0 for at, n in enumerate(tiling)))
                                  for axis in self.axes)
        self.split = self._carry_free()
        self._places: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def _carry_free(self) -> bool:
        """Whether the workers have a shape in the grid of their own: then so have the places where each one goes on."""
        try:
            return self.count % self.total == 0 or bool(composed(self.modes, ((self.count, 1),)))
        except ShapeError:
            return False

    def steps(self, worker: Any) -> Any:
        """How many sub-tiles the worker gets."""
        rounds, rest = divmod(self.total, self.count)
        return rounds + (worker < rest) if rest else rounds

    def position(self, linear: Any, bound: int) -> tuple:
        """Where the sub-tile of a linear number lies. It is below ``bound``: what follows from that is not computed."""
        digits: list[Mode] = []
        for extent, step in self.modes:
            if 1 == extent < bound:
                continue
            digits.append((extent, step))
            if bound <= extent:
                break
            bound = -(-bound // extent)
        else:                                                 # a number beyond begins anew
            digits.append((None, Step((0,) * len(self.grid))))
        return tuple(walk(tuple(digits), linear))

    def place(self, worker: Any, step: Any) -> tuple[tuple, tuple]:
        """Base and offset of a worker's sub-tile; raises IndexError where it has none, if both are known."""
        found = self._places.get((worker, step))
        if found is None:
            if isinstance(worker, Number) or isinstance(step, Number):
                return self._place(worker, step)
            if not 0 <= step < self.steps(worker):
                raise IndexError(f"sub-tile {step} of {self.steps(worker)}")
            found = self._places[worker, step] = self._place(worker, step)
        return found

    def _place(self, worker: Any, step: Any) -> tuple[tuple, tuple]:
        ahead = step * self.count
        if self.split:
            return self.position(worker, self.count), self.position(ahead, self.total)
        return self.position(worker + ahead, self.total), (0,) * len(self.grid)


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
