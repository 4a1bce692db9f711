"""Tiles: named blocking of an iteration space, on the host and in device code; and how a tile divides among workers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np

from gemmkit.lang.aggregates import Aggregate, AggregateType, Number, traced
from gemmkit.lang.numba_hooks import join_numba, typeof_impl
from gemmkit.shapes import Mode, Modes, ShapeError, Step, composed, walk

__all__ = [
    "Coord", "Division", "Tile", "Tiles", "division", "linearise", "parallelise", "project", "subdivide",
    "translate", "translate_base", "translate_offset",
]

Position = tuple[Any, ...]             # numbers, or the compiler's values that stand for them


def _operated(f: Callable[[Any, Any], Any]) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """An operator of an extent and a number, and the reflected one."""
    def left(self: Any, other: Any) -> Any:
        number = _number(other)
        return NotImplemented if number is None else f(self.__index__(), number)

    def right(self: Any, other: Any) -> Any:
        number = _number(other)
        return NotImplemented if number is None else f(number, self.__index__())

    return left, right


def _number(x: Any) -> Any:
    return x if isinstance(x, (int, float)) else x.__index__() if hasattr(x, "__index__") else None


class Extent:
    """What has one extent computes as that number does; the results are plain numbers.

    >>> from gemmkit import Tile
    >>> block = Tile(M=64, N=32)
    >>> int(block.M), block.M * block.N, -(-1000 // block.M), block.M == 64, block.M < 100
    (64, 2048, 16, True, True)
    """

    __slots__ = ()

    @property
    def names(self) -> tuple[str, ...]:
        raise NotImplementedError

    @property
    def extents(self) -> tuple[int, ...]:
        raise NotImplementedError

    def __index__(self) -> int:
        if len(self.extents) != 1:
            raise TypeError(f"{self!r} has {len(self.extents)} dimensions; one alone is a number: {self!r}.{self.names[0]}")
        return self.extents[0]

    __add__, __radd__ = _operated(operator.add)
    __sub__, __rsub__ = _operated(operator.sub)
    __mul__, __rmul__ = _operated(operator.mul)
    __floordiv__, __rfloordiv__ = _operated(operator.floordiv)
    __truediv__, __rtruediv__ = _operated(operator.truediv)
    __mod__, __rmod__ = _operated(operator.mod)
    __lt__, __gt__ = _operated(operator.lt)
    __le__, __ge__ = _operated(operator.le)


# --------------------------------------------------------------------------------------------------
# How a tile divides among workers, and where each one's sub-tiles lie.

class Division:
    """How a tile divides into sub-tiles for ``count`` workers.

    ``split`` is true if all of a worker's sub-tiles lie at (position of its first) + (a compile-time offset), so that base
    and offset can be separated. This holds if the workers fill whole leading dimensions of the grid, the last one evenly
    (mixed-radix addition without carries). Otherwise the whole position is computed at run time.
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

    def position(self, linear: Any, bound: int) -> Position:
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

    def place(self, worker: Any, step: Any) -> tuple[Position, Position]:
        """Base and offset of a worker's sub-tile; raises IndexError where it has none, if both are known."""
        found = self._places.get((worker, step))
        if found is None:
            if isinstance(worker, Number) or isinstance(step, Number):
                return self._place(worker, step)
            if not 0 <= step < self.steps(worker):
                raise IndexError(f"sub-tile {step} of {self.steps(worker)}")
            found = self._places[worker, step] = self._place(worker, step)
        return found

    def _place(self, worker: Any, step: Any) -> tuple[Position, Position]:
        ahead = step * self.count
        if self.split:
            return self.position(worker, self.count), self.position(ahead, self.total)
        return self.position(worker + ahead, self.total), (0,) * len(self.grid)


_divisions: dict[Position, Division] = {}


def division(tile: Any, tiling: Any, count: int, order: str = "column") -> Division:
    """How a tile (or its device type) is divided; made once.

    Args:
        tile: the tile to divide.
        tiling: the size of a sub-tile.
        count: how many workers there are.
        order: "column" or "row", as `parallelise` takes it.

    Raises:
        ValueError: the tile is no multiple of the tiling, or has other dimensions.
    """
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


# --------------------------------------------------------------------------------------------------
# Tiles: named, recursive blocking of an iteration space (papers: Faingnaert et al., section 3).
#
# A `Tile` has a compile-time size, named dimensions, and a position split in two: a run-time ``base`` (what depends on
# the thread) and an ``offset`` (what does not). Addresses computed from the two apart become register + immediate.
#
# The same functions are device code (:mod:`gemmkit.lang.aggregates`); there a loop over tiles is ``for i in
# range(len(tiles))``, which the compiler unrolls.

class Coord(tuple[int, ...], Aggregate):
    """A named position or extent: ``coord.M``, ``coord[0]``, iterable in dimension order."""

    __slots__ = ()
    names: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, names: tuple[str, ...], values: Sequence[int]) -> Coord:
        return tuple.__new__(_coord_class(names), values)

    def __parts__(self) -> tuple[Any, Position]:
        """A tile's size is compile-time, a position is not."""
        return (None, tuple(self)) if any(type(value) is not int for value in self) else (tuple(self), ())

    @classmethod
    def __of_parts__(cls, static: Any, numbers: Position) -> Coord:
        return tuple.__new__(cls, numbers if static is None else static)

    @classmethod
    def __text__(cls, static: Any) -> str:
        return f"Coord({','.join(cls.names)})" if static is None else f"Size({_text(cls.names, static)})"

    def __getattr__(self, name: str) -> int:
        raise AttributeError(f"no dimension {name!r} among {', '.join(self.names)}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Coord) and self.names == other.names and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.names, tuple(self)))

    def __repr__(self) -> str:
        return "(" + ", ".join(f"{n}={v}" for n, v in zip(self.names, self)) + ")"

    def __reduce__(self) -> Any:
        return Coord, (self.names, tuple(self))

    __add__ = __mul__ = __rmul__ = None                # type: ignore[assignment]  # a tuple's: never what is meant


@cache
def _coord_class(names: tuple[str, ...]) -> type[Coord]:
    """Coords of these dimensions: a class of their own makes reading one as quick as an index."""
    fields = {name: property(operator.itemgetter(n)) for n, name in enumerate(names)}
    return type("Coord", (Coord,), {"__slots__": (), "names": names, **fields})


def _text(names: Sequence[str], extents: Sequence[int]) -> str:
    return ",".join(f"{n}={s}" for n, s in zip(names, extents))


class _Form:
    """What tiles of one size have in common, made once: a thread of the emulator goes through thousands of tiles."""

    __slots__ = ("coord", "extents", "names", "projections", "size", "text")

    def __init__(self, names: tuple[str, ...], extents: tuple[int, ...]):
        self.names, self.extents = names, extents
        self.text = f"Tile({', '.join(f'{n}={s}' for n, s in zip(names, extents))})"
        self.coord = _coord_class(names)
        self.size = Coord(names, extents)
        self.projections: dict[str, tuple[_Form, Callable[[Position], Position]]] = {}

    def projection(self, dims: list[int]) -> tuple[_Form, Callable[[Position], Position]]:
        """The form of the dimensions kept, and what picks them from a position."""
        one = operator.itemgetter(dims[0])
        pick = operator.itemgetter(*dims) if len(dims) > 1 else lambda position: (one(position),)
        return _form(pick(self.names), pick(self.extents)), pick


@cache
def _form(names: tuple[str, ...], extents: tuple[int, ...]) -> _Form:
    return _Form(names, extents)


class Tile(Extent, Aggregate):
    """A block of an iteration space: a named compile-time size, and a position.

    Dimension names may be any identifiers; those of one letter can be projected as an attribute (``tile.MN``), others
    by ``project(tile, "row", "column")`` or, one at a time, ``tile.row``: on the host its extent in arithmetic, too.

    Raises ValueError for an extent that is not a positive integer, or when no dimension is given.
    """

    __slots__ = ("_base", "_form", "_offset")

    def __init__(self, *unnamed: int, **extents: int):
        if unnamed or not extents:
            raise (TypeError if unnamed else ValueError)(f"Tile({', '.join(map(str, unnamed))}) got no dimensions by name; "
                                                         "write for example Tile(M=64, N=32)")
        for name, extent in extents.items():
            if name in RESERVED:
                raise ValueError(f"Tile({name}=...): {name!r} is an attribute of every tile; choose another name")
            if type(extent) is not int or extent < 1:
                extents[name] = _extent(name, extent)
        self._form = _form(tuple(extents), tuple(extents.values()))
        self._base = self._offset = (0,) * len(extents)

    @classmethod
    def at(cls, names: tuple[str, ...], extents: tuple[int, ...], base: Position, offset: Position) -> Tile:
        """A tile at a position; nothing is checked."""
        return _at(_form(names, extents), base, offset)

    @property
    def names(self) -> tuple[str, ...]:
        return self._form.names

    @property
    def extents(self) -> tuple[int, ...]:
        return self._form.extents

    @property
    def size(self) -> Coord:
        return self._form.size

    @property
    def base(self) -> Coord:
        return _new_tuple(self._form.coord, self._base)

    @property
    def offset(self) -> Coord:
        return _new_tuple(self._form.coord, self._offset)

    @property
    def index(self) -> Coord:
        """The position: base + offset."""
        return _new_tuple(self._form.coord, map(operator.add, self._base, self._offset))

    @property
    def count(self) -> int:
        """How many elements the tile has."""
        return math.prod(self._form.extents)

    def __getattr__(self, name: str) -> Tile:
        known = self._form.projections
        if name not in known:
            try:
                known[name] = self._form.projection(_dimensions_of(name, self._form.names))
            except KeyError as error:
                raise AttributeError(error.args[0]) from None
        form, pick = known[name]
        return _at(form, pick(self._base), pick(self._offset))

    def __parts__(self) -> tuple[Any, Position]:
        return self._form, (*self._base, *self._offset)

    @classmethod
    def __of_parts__(cls, form: _Form, numbers: Position) -> Tile:
        middle = len(form.names)
        return _at(form, numbers[:middle], numbers[middle:])

    @classmethod
    def __text__(cls, form: _Form) -> str:
        return f"Tile({_text(form.names, form.extents)})"

    def __reduce__(self) -> Any:
        return Tile.at, self._state()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, np.integer)):
            return self._form.extents == (other,)
        return isinstance(other, Tile) and self._state() == other._state()

    def __hash__(self) -> int:
        return hash(self._state() if len(self._form.extents) > 1 else self._form.extents[0])       # equal to a number

    def _state(self) -> Position:
        return self.names, self.extents, self._base, self._offset

    def __repr__(self) -> str:
        if any(self._base) or any(self._offset):
            return f"{self._form.text} at {self.index!r}"
        return self._form.text

    def __device_type__(self) -> Any:
        if any(self._base) or any(self._offset):
            raise TypeError(f"{self!r} cannot be a compile-time value: only a tile at the origin can")
        return AggregateType(Tile, self._form, 2 * len(self.names))

    @property
    def _numba_type_(self) -> Any:
        """What Numba asks for in a kernel of ``cuda.jit``, until gemmkit's types are registered with it."""
        join_numba()
        return self.__device_type__()


_new_tuple, _new_tile = tuple.__new__, object.__new__


def _at(form: _Form, base: Position, offset: Position) -> Tile:
    """A tile at a position (the inner loop of the emulator comes through here)."""
    tile = _new_tile(Tile)
    tile._form, tile._base, tile._offset = form, base, offset
    return tile


RESERVED = frozenset(name for name in dir(Tile) if not name.startswith("__"))


def _extent(name: str, extent: Any) -> int:
    try:
        value = 0 if isinstance(extent, bool) else operator.index(extent)
    except TypeError:
        value = 0
    if value < 1:
        raise ValueError(f"Tile({name}={extent!r}): an extent is a positive integer")
    return value


def _dimensions_of(projection: str, names: tuple[str, ...]) -> list[int]:
    """The dimensions that ``tile.<projection>`` names, in its order; raises KeyError with a reason."""
    if projection in names:
        return [names.index(projection)]
    chosen = [names.index(letter) if letter in names else -1 for letter in projection]
    if not chosen or -1 in chosen or len(set(chosen)) != len(chosen):
        raise KeyError(f"{projection!r} does not project a tile of dimensions {', '.join(names)}")
    return chosen


def _project(tile: Tile, *names: str) -> Tile:
    """Keep some of a tile's dimensions. ``tile.KM`` is short for ``project(tile, "K", "M")``.

    Args:
        tile: a tile.
        names: the dimensions to keep, in the order that the result has.

    Raises:
        ValueError: no name, a name twice, or a name that the tile lacks.

    >>> project(Tile(M=4, N=2, K=8), "K", "M")
    Tile(K=8, M=4)
    """
    missing = [name for name in names if name not in tile.names]
    if missing or not names:
        raise ValueError(f"project: {missing or 'nothing'} is not among the dimensions {', '.join(tile.names)}")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"project: {name} is named twice")
    form, pick = tile._form.projection([tile.names.index(name) for name in names])
    return _at(form, pick(tile._base), pick(tile._offset))


class Tiles(Aggregate):
    """The sub-tiles of one worker: ``len(tiles)``, ``tiles[i]``, iterable in Python."""

    __slots__ = ("division", "form", "tile", "worker")

    def __init__(self, tile: Tile, division: Division, worker: Any):
        self.tile, self.division, self.worker = tile, division, worker
        self.form = _form(tile._form.names, division.tiling)

    def __parts__(self) -> tuple[Any, Position]:
        return (self.tile._form, self.division), (*self.tile.__parts__()[1], self.worker)

    @classmethod
    def __of_parts__(cls, static: Any, numbers: Position) -> Tiles:
        form, division = static
        return Tiles(Tile.__of_parts__(form, numbers[:-1]), division, numbers[-1])

    @classmethod
    def __text__(cls, static: Any) -> str:
        form, division = static
        return f"Tiles({Tile.__text__(form)}/{_text(form.names, division.tiling)}/{division.count}/{division.order})"

    def __len__(self) -> int:
        steps: int = self.division.steps(self.worker)
        return steps

    def __getitem__(self, step: int) -> Tile:
        tile, (base, offset) = self.tile, self.division.place(self.worker, step)
        return _at(self.form, tuple(map(operator.add, tile._base, base)), tuple(map(operator.add, tile._offset, offset)))

    def __iter__(self) -> Iterator[Tile]:
        return (self[step] for step in range(len(self)))


def _tiles(tile: Tile, tiling: Tile, index: Any, count: Any, order: str) -> Tiles:
    if not isinstance(tile, Tile) or not isinstance(tiling, Tile):
        raise TypeError(f"parallelise: tile={tile!r}, tiling={tiling!r}; two Tiles are needed")
    if isinstance(count, Number):
        raise ValueError("parallelise: count must be a compile-time number in device code")
    how = division(tile, tiling, count, order)
    if not isinstance(index, Number) and (not isinstance(index, (int, np.integer)) or not 0 <= index < count):
        raise ValueError(f"parallelise: index is {index!r}; the workers are 0 to {count - 1}")
    return Tiles(tile, how, index)


@typeof_impl.register(Tile)                               # type: ignore[untyped-decorator]
def _typeof(value: Tile, c: Any) -> Any:
    return value.__device_type__()


def _parallelise(tile: Tile, tiling: Tile, index: int, count: int, order: str = "column") -> Tiles:
    """Deal a tile's sub-tiles to workers (GemmKernels.jl's ``parallelise``).

    Args:
        tile: the tile to divide, in elements.
        tiling: the size of a sub-tile; each extent divides that of ``tile``.
        index: the worker, 0 to count - 1: a warp of a block, a lane of a warp.
        count: how many workers there are, a compile-time number. It may leave sub-tiles for further rounds, or exceed
            their number: then some workers get none.
        order: number sub-tiles along the first dimension first ("column") or the last ("row").

    Returns:
        `Tiles`: worker ``index`` gets the sub-tiles ``index``, ``index + count``, ...

    Raises:
        ValueError: the tile is no multiple of the tiling, or (on the host) there is no such worker.

    >>> [sub.index for sub in parallelise(Tile(M=4, N=4), Tile(M=2, N=2), 1, 2)]
    [(M=2, N=0), (M=2, N=2)]
    """
    return _tiles(tile, tiling, index, count, order)


def _subdivide(tile: Tile, tiling: Tile, index: int, count: int, order: str = "column") -> Tile:
    """The first sub-tile of a worker, ``parallelise(tile, tiling, index, count, order)[0]``.

    Args:
        tile: the tile to divide, in elements.
        tiling: the size of a sub-tile; each extent divides that of ``tile``.
        index: the worker, 0 to count - 1.
        count: how many workers there are, a compile-time number.
        order: "column" or "row", as `parallelise` takes it.

    Raises:
        ValueError, IndexError: as `parallelise`; the worker has no sub-tile.

    >>> subdivide(Tile(M=4, N=4), Tile(M=2, N=2), 3, 4)
    Tile(M=2, N=2) at (M=2, N=2)
    """
    return _tiles(tile, tiling, index, count, order)[0]


def _moved(tile: Tile, position: Position, distances: tuple[int, ...], by: dict[str, int]) -> Position:
    """``position`` and these distances from it."""
    if by or len(distances) != len(position):
        _check_distances(tile, distances, by)
        distances = tuple(by.get(name, 0) for name in tile.names)
    return tuple(map(operator.add, position, distances))


def _check_distances(tile: Tile, distances: Position, by: dict[str, Any]) -> None:
    """Raise ValueError unless these distances, by position or by name, are a tile's."""
    if distances and (by or len(distances) != len(tile.names)):
        raise ValueError(f"translate: {len(distances)} distances; give one distance for each of "
                         f"{', '.join(tile.names)}, or name them")
    unknown = set(by) - set(tile.names)
    if unknown:
        raise ValueError(f"translate: {', '.join(sorted(unknown))} is not among the dimensions {', '.join(tile.names)}")


def _not_moved(tile: Any, distances: Position, by: dict[str, Any]) -> str:
    if not isinstance(tile, Tile):
        return f"translate: tile={tile!r}; a Tile is needed"
    given = ", ".join([*map(repr, distances), *(f"{name}={value!r}" for name, value in by.items())])
    return f"translate: distances {given}; a whole number for each of {', '.join(tile.names)} is needed"


def _translate(tile: Tile, *distances: int, **by: int) -> Tile:
    """Move a tile's base.

    Args:
        tile: a tile.
        distances: elements along each dimension, in the tile's order.
        by: elements along dimensions by name, instead; a dimension that is not named stays.

    Returns:
        The moved tile. ``tile.index`` is base plus offset; `translate_offset` moves the compile-time offset alone.

    Raises:
        ValueError: as many distances as dimensions are needed, or a name is not among the dimensions.
        TypeError: a distance is no whole number.

    >>> translate(Tile(M=4, N=4), M=8).index
    (M=8, N=0)
    """
    try:
        return _at(tile._form, _moved(tile, tile._base, distances, by), tile._offset)
    except (AttributeError, TypeError):
        raise TypeError(_not_moved(tile, distances, by)) from None


def _translate_offset(tile: Tile, *distances: int, **by: int) -> Tile:
    """Move a tile's offset, which becomes the immediate of an address.

    Args:
        tile: a tile.
        distances: elements along each dimension, in the tile's order; compile-time numbers.
        by: elements along dimensions by name, instead; a dimension that is not named stays.

    Raises:
        ValueError, TypeError: as `translate`.

    >>> translate_offset(Tile(M=4, N=4), 0, 2).index
    (M=0, N=2)
    """
    try:
        return _at(tile._form, tile._base, _moved(tile, tile._offset, distances, by))
    except (AttributeError, TypeError):
        raise TypeError(_not_moved(tile, distances, by)) from None


def _linearise(coord: Any, shape: Any, order: str = "column") -> int:
    """Compute the linear position of a coordinate in an array, in elements.

    Args:
        coord: a Coord, a tuple or a tile's size.
        shape: the array's extents, as many. The slowest one is not used.
        order: "column" if the first dimension is the fastest, "row" if the last is.

    Raises:
        ValueError: the lengths differ, or order is neither.
        TypeError: coord or shape is no tuple of numbers.

    >>> linearise((1, 2), (4, 8)), linearise((1, 2), (4, 8), "row")
    (9, 10)
    """
    try:
        values, extents = tuple(coord), tuple(shape)
    except TypeError:
        raise TypeError(f"linearise: coord={coord!r}, shape={shape!r}; two tuples of numbers are needed") from None
    if len(values) != len(extents):
        raise ValueError(f"linearise: coord has {len(values)} coordinates and shape {len(extents)} extents; both need as "
                         "many")
    if not isinstance(order, str) or order not in ("column", "row"):
        raise ValueError(f'linearise: order is {order!r}; it is "column" or "row"')
    if order == "row":
        values, extents = values[::-1], extents[::-1]
    linear = 0
    try:
        for value, extent in zip(reversed(values), reversed(extents)):
            linear = linear * extent + value
    except TypeError:
        raise TypeError(f"linearise: coord={coord!r}, shape={shape!r}; two tuples of numbers are needed") from None
    return linear


project = traced("project", _project)
parallelise = traced("parallelise", _parallelise)
subdivide = traced("subdivide", _subdivide)
translate = traced("translate", _translate)
translate_base = traced("translate_base", _translate)
translate_offset = traced("translate_offset", _translate_offset)
linearise = traced("linearise", _linearise)
