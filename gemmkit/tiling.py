"""Tiles: named, recursive blocking of an iteration space (papers: Faingnaert et al., section 3).

A `Tile` has a compile-time size, named dimensions, and a position split in two: a run-time ``base`` (what depends on the
thread) and an ``offset`` (what does not). Addresses computed from the two apart become register + immediate.

Four operations:

* **project**: ``tile.MN``, ``tile.KM`` keep (and order) dimensions;
* **parallelise**: ``parallelise(tile, tiling, index, count)`` divides a tile among ``count`` workers;
* **translate**: ``translate(tile, M=i, N=j)`` moves the base, ``translate_offset`` the offset;
* **linearise**: ``linearise(tile.base, (rows, columns))`` is the position in memory.

>>> block = Tile(M=8, N=4)
>>> tiles = parallelise(block, Tile(M=4, N=1), index=3, count=4)     # worker 3 of 4; 2 x 4 sub-tiles
>>> [tuple(t.index) for t in tiles]
[(4, 1), (4, 3)]
>>> linearise(translate(tiles[0], M=16, N=0).index, (64, 64))
84

The same functions work in device code. There a loop over tiles is written ``for i in range(len(tiles)): tile =
tiles[i]``: the compiler unrolls and folds it, which it cannot do with an iterator's state.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from gemmkit.lang import tiles as _device
from gemmkit.lang.atoms import Atom

__all__ = ["Coord", "Division", "Tile", "Tiles", "division", "linearise", "parallelise", "project", "subdivide",
           "translate", "translate_base", "translate_offset"]


class Coord:
    """A named position or extent: ``coord.M``, ``coord[0]``, iterable in dimension order."""

    __slots__ = ("names", "values")

    def __init__(self, names: tuple[str, ...], values: Sequence[int]):
        self.names, self.values = names, tuple(values)

    def __getattr__(self, name: str) -> int:
        if name.startswith("__") or name in Coord.__slots__:      # not there yet: this is being copied or unpickled
            raise AttributeError(name)
        try:
            return self.values[self.names.index(name)]
        except ValueError:
            raise AttributeError(f"no dimension {name!r} among {', '.join(self.names)}") from None

    def __getitem__(self, position: int) -> int:
        return self.values[position]

    def __iter__(self) -> Iterator[int]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Coord) and (self.names, self.values) == (other.names, other.values)

    def __hash__(self) -> int:
        return hash((self.names, self.values))

    def __repr__(self) -> str:
        return "(" + ", ".join(f"{n}={v}" for n, v in zip(self.names, self.values)) + ")"


class Tile:
    """A block of an iteration space: a named compile-time size, and a position.

    Dimension names may be any identifiers; those of one letter can be projected as an attribute (``tile.MN``), others
    by ``project(tile, "row", "column")`` or, one at a time, ``tile.row``.

    Raises ValueError for an extent that is not a positive integer, or when no dimension is given.
    """

    __slots__ = ("_base", "_offset", "extents", "names")

    def __init__(self, **extents: int):
        if not extents:
            raise ValueError("Tile() got no dimensions; write for example Tile(M=64, N=32)")
        for name in extents:
            if name in RESERVED:
                raise ValueError(f"Tile({name}=...): {name!r} is an attribute of every tile; choose another name")
        self.names = tuple(extents)
        self.extents = tuple(_extent(name, extent) for name, extent in extents.items())
        self._base = self._offset = (0,) * len(extents)

    @classmethod
    def at(cls, names: tuple[str, ...], extents: tuple[int, ...], base: tuple, offset: tuple) -> Tile:
        """A tile at a position (no checks: the inner loop of the emulator comes through here)."""
        tile = object.__new__(cls)
        tile.names, tile.extents, tile._base, tile._offset = names, extents, base, offset
        return tile

    @property
    def size(self) -> Coord:
        return Coord(self.names, self.extents)

    @property
    def base(self) -> Coord:
        return Coord(self.names, self._base)

    @property
    def offset(self) -> Coord:
        return Coord(self.names, self._offset)

    @property
    def index(self) -> Coord:
        """The position: base + offset."""
        return Coord(self.names, tuple(b + o for b, o in zip(self._base, self._offset)))

    @property
    def count(self) -> int:
        """How many elements the tile has."""
        return math.prod(self.extents)

    def __getattr__(self, name: str) -> Tile:
        if name.startswith("__") or name in Tile.__slots__:       # not there yet: this is being copied or unpickled
            raise AttributeError(name)
        try:
            return _take(self, dimensions_of(name, self.names))
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tile) and self._state() == other._state()

    def __hash__(self) -> int:
        return hash(self._state())

    def _state(self) -> tuple:
        return self.names, self.extents, self._base, self._offset

    def __repr__(self) -> str:
        size = ", ".join(f"{n}={s}" for n, s in zip(self.names, self.extents))
        if any(self._base) or any(self._offset):
            return f"Tile({size}) at {self.index!r}"
        return f"Tile({size})"

    def __device_type__(self) -> Any:
        from gemmkit.lang.tiles import TileType

        if any(self._base) or any(self._offset):
            raise TypeError(f"{self!r} cannot be a compile-time value: only a tile at the origin can")
        return TileType(self.names, self.extents)


RESERVED = frozenset(name for name in dir(Tile) if not name.startswith("__"))


def _extent(name: str, extent: Any) -> int:
    try:
        value = 0 if isinstance(extent, bool) else operator.index(extent)
    except TypeError:
        value = 0
    if value < 1:
        raise ValueError(f"Tile({name}={extent!r}): an extent is a positive integer")
    return value


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


def _take(tile: Tile, dims: list[int]) -> Tile:
    return Tile.at(tuple(tile.names[d] for d in dims), tuple(tile.extents[d] for d in dims),
                   tuple(tile._base[d] for d in dims), tuple(tile._offset[d] for d in dims))


def _project(tile: Tile, *names: str) -> Tile:
    """Keep the named dimensions, in this order; raises ValueError for a name that the tile lacks."""
    return _take(tile, named_dimensions(tile, names))


class Division:
    """How a tile divides into sub-tiles for ``count`` workers; shared by the host and the device.

    ``split`` is true when a worker's sub-tiles all lie at (position of its first) + (a compile-time offset), so that
    base and offset can be told apart. That holds when the workers fill whole leading dimensions of the grid, the last
    one evenly (mixed-radix addition without carries); otherwise the whole position is computed at run time.
    """

    def __init__(self, names: tuple[str, ...], extents: tuple[int, ...], tiling: tuple[int, ...], count: int,
                 order: str = "column"):
        if count < 1:
            raise ValueError(f"parallelise: count is {count}; at least one worker is needed")
        if order not in ("column", "row"):
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


class Tiles:
    """The sub-tiles of one worker: ``len(tiles)``, ``tiles[i]``, iterable in Python."""

    __slots__ = ("division", "tile", "worker")

    def __init__(self, tile: Tile, division: Division, worker: int):
        self.tile, self.division, self.worker = tile, division, worker

    def __len__(self) -> int:
        return self.division.steps(self.worker)

    def __getitem__(self, step: int) -> Tile:
        division, tile = self.division, self.tile
        if not 0 <= step < len(self):
            raise IndexError(f"sub-tile {step} of {len(self)}")
        if division.split:
            base, offset = division.position(self.worker), division.position(step * division.count)
        else:
            base, offset = division.position(self.worker + step * division.count), (0,) * len(division.grid)
        return Tile.at(tile.names, division.tiling, tuple(a + b for a, b in zip(tile._base, base)),
                       tuple(a + b for a, b in zip(tile._offset, offset)))

    def __iter__(self) -> Iterator[Tile]:
        return (self[step] for step in range(len(self)))


_divisions: dict[tuple, Division] = {}


def division(tile: Any, tiling: Any, count: int, order: str = "column") -> Division:
    """The division of a tile (or its device type); raises ValueError when there is none."""
    key = (tile.names, tile.extents, tiling.names, tiling.extents, count, order)
    found = _divisions.get(key)
    if found is None:
        if tile.names != tiling.names:
            raise ValueError(f"parallelise: the tile has dimensions {', '.join(tile.names)} and the tiling "
                             f"{', '.join(tiling.names)}; project one of them")
        found = _divisions.setdefault(key, Division(tile.names, tile.extents, tiling.extents, count, order))
    return found


def _tiles(tile: Tile, tiling: Tile, index: int, count: int, order: str) -> Tiles:
    how = division(tile, tiling, count, order)
    if not 0 <= index < count:
        raise ValueError(f"parallelise: index is {index}; the workers are 0 to {count - 1}")
    return Tiles(tile, how, index)


_device.register_tile(Tile)


def _parallelise(tile: Tile, tiling: Tile, index: int, count: int, order: str = "column") -> Tiles:
    """The sub-tiles of size ``tiling`` that worker ``index`` of ``count`` handles.

    Sub-tiles are numbered along the first dimension first (``order="column"``) or the last (``"row"``), and dealt in
    turn. ``count`` may leave tiles for further rounds, or exceed the number of sub-tiles (then some workers get none).
    Raises ValueError when the tile is not a multiple of the tiling, and (on the host) when there is no such worker.
    """
    return _tiles(tile, tiling, index, count, order)


def _subdivide(tile: Tile, tiling: Tile, index: int, count: int, order: str = "column") -> Tile:
    """The first sub-tile of worker ``index`` of ``count``: ``parallelise(...)[0]``."""
    return _tiles(tile, tiling, index, count, order)[0]


def check_distances(tile: Any, distances: tuple, by: dict[str, Any]) -> None:
    """Raise ValueError unless these distances, by position or by name, are a tile's (or its device type's)."""
    if distances and (by or len(distances) != len(tile.names)):
        raise ValueError(f"translate: give one distance for each of {', '.join(tile.names)}, or name them")
    unknown = set(by) - set(tile.names)
    if unknown:
        raise ValueError(f"translate: {', '.join(sorted(unknown))} is not among the dimensions {', '.join(tile.names)}")


def _distances(tile: Tile, distances: tuple[int, ...], by: dict[str, int]) -> list[int]:
    check_distances(tile, distances, by)
    return list(distances) if distances else [by.get(name, 0) for name in tile.names]


def _translate(tile: Tile, *distances: int, **by: int) -> Tile:
    """The tile with its base moved: ``translate(tile, M=i, N=j)`` (dimensions not named stay), or by position."""
    base = tuple(b + d for b, d in zip(tile._base, _distances(tile, distances, by)))
    return Tile.at(tile.names, tile.extents, base, tile._offset)


def _translate_offset(tile: Tile, *distances: int, **by: int) -> Tile:
    """The tile with its offset moved; for distances that are compile-time numbers."""
    offset = tuple(o + d for o, d in zip(tile._offset, _distances(tile, distances, by)))
    return Tile.at(tile.names, tile.extents, tile._base, offset)


def check_linearisation(coordinates: int, dimensions: int, order: str) -> None:
    """Raise ValueError unless so many coordinates can be linearised in an array of so many dimensions."""
    if coordinates != dimensions:
        raise ValueError(f"linearise: {coordinates} coordinates in an array of {dimensions} dimensions")
    if order not in ("column", "row"):
        raise ValueError(f'linearise: order is {order!r}; it is "column" or "row"')


def _linearise(coord: Any, shape: Any, order: str = "column") -> int:
    """The linear position of a coordinate in an array of ``shape``, first dimension fastest (``order="row"``: last).

    ``coord`` and ``shape`` are Coords, tuples or tile sizes of one length. The slowest extent is not used.
    """
    values, extents = tuple(coord), tuple(shape)
    check_linearisation(len(values), len(extents), order)
    if order == "row":
        values, extents = values[::-1], extents[::-1]
    linear = 0
    for value, extent in zip(reversed(values), reversed(extents)):
        linear = linear * extent + value
    return linear


project = Atom("project", _device.type_project, _project)
parallelise = Atom("parallelise", _device.type_parallelise, _parallelise)
subdivide = Atom("subdivide", _device.type_subdivide, _subdivide)
translate = Atom("translate", _device.type_translate("base"), _translate)
translate_base = Atom("translate_base", _device.type_translate("base"), _translate)
translate_offset = Atom("translate_offset", _device.type_translate("offset"), _translate_offset)
linearise = Atom("linearise", _device.type_linearise, _linearise)
