"""What programs compute with: values whose dimensions have names, arrays, extents, indices, and cells.

A dimension is a block of an array's axis (`Index`), or all of it (`Axis`). Two values meet where their dimensions are the
same: a value of rows meets a tile of these rows along the rows, whatever place the dimension has. Two axes of arrays that
one index goes along must be as long as each other.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from gemmkit.programs.lines import refused

__all__ = ["Arithmetic", "Axis", "Cell", "Extent", "Index", "Parameter", "current", "joined", "shown"]

_current: ContextVar[Any] = ContextVar("gemmkit_program", default=None)


def current() -> Any:
    """The interpreter that a program is being called under (`gemmkit.programs.interpreter`)."""
    found = _current.get()
    if found is None:
        raise refused(TypeError, "a word of programs is used outside of one: decorate the function with @gk.program")
    return found


class Arithmetic:
    """Operators of values, which the current interpreter carries out."""

    __hash__ = object.__hash__
    __array_ufunc__ = None                               # of a NumPy number and a value the value decides

    def __add__(self, other: Any) -> Any:
        return current().make("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return current().make("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return current().make("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return current().make("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return current().make("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return current().make("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return current().make("div", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return current().make("div", other, self)

    def __neg__(self) -> Any:
        return current().make("neg", self)

    def __lt__(self, other: Any) -> Any:
        return current().make("lt", self, other)

    def __le__(self, other: Any) -> Any:
        return current().make("le", self, other)

    def __gt__(self, other: Any) -> Any:
        return current().make("lt", other, self)

    def __ge__(self, other: Any) -> Any:
        return current().make("le", other, self)

    def __and__(self, other: Any) -> Any:
        return current().make("and", self, other)

    def __matmul__(self, other: Any) -> Any:
        return current().dot(self, other)


    @property
    def T(self) -> Any:
        return current().transpose(self)

    def max(self, axis: int) -> Any:
        return current().along("max", self, axis)

    def min(self, axis: int) -> Any:
        return -current().along("max", -self, axis)

    def sum(self, axis: int) -> Any:
        return current().along("sum", self, axis)

    def mean(self, axis: int) -> Any:
        return current().mean(self, axis)

    def astype(self, dtype: Any) -> Any:
        return current().cast(self, dtype)


    def __bool__(self) -> bool:
        raise refused(TypeError, "a program's control flow depends on a value, which is known when the kernel runs and not "
                                 "when it is derived; choose element by element, with where(condition, x, y)")

    def __float__(self) -> float:
        raise refused(TypeError, "a value of a program is no number before the kernel runs; programs' functions are exp, "
                                 "log, tanh, sqrt, maximum, ... of gemmkit.programs, not math's or NumPy's")


@dataclass(frozen=True)
class Extent:
    """An axis of an array, to go along; ``stack``: one by one."""

    parameter: str
    axis: int
    size: int
    stack: bool = False

    def __repr__(self) -> str:
        return f"axis {self.axis} of {self.parameter} ({self.size})"


@dataclass(frozen=True)
class Axis:
    """All of an array's axis. Two of a length stand for each other."""

    size: int

    def __repr__(self) -> str:
        return f"all {self.size}"


@dataclass(eq=False)
class Index:
    """A loop's variable: a block of an axis, from ``start`` to ``stop`` where numbers are computed; ``of_tile`` where tiles
    go along the axis, and not rounds."""

    extent: Extent
    name: str = ""
    start: int = 0
    stop: int = 0
    of_tile: bool = False

    @property
    def stack(self) -> bool:
        return self.extent.stack

    def __repr__(self) -> str:
        return self.name or f"a block of {self.extent}"


@dataclass(eq=False)
class Parameter(Arithmetic):
    """An array argument. ``data`` is the array where numbers are computed. Without indices a vector is a value."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    data: Any = None

    @property
    def rows(self) -> Extent:
        return self._extent(-2)

    @property
    def columns(self) -> Extent:
        return self._extent(-1)

    @property
    def count(self) -> Extent:
        """Of a stack of matrices, or of vectors."""
        if len(self.shape) < 2:
            raise refused(ValueError, f"{self.name}.count: {self.name} is of shape {self.shape}, and no stack")
        return Extent(self.name, 0, self.shape[0], True)

    def _extent(self, axis: int) -> Extent:
        rank = len(self.shape)
        if rank < -axis:
            raise refused(ValueError, f"{self.name} is of shape {self.shape}, and has no rows: take {self.name}.columns")
        return Extent(self.name, rank + axis, self.shape[axis])

    def __getitem__(self, key: Any) -> Any:
        return current().load(self, *self.place(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        key, dims = self.place(key)
        value = current().lift(value)
        if set(value.dims) - set(dims):
            raise refused(ValueError, f"{self.name}[{shown(key)}] has the dimensions ({shown(dims)}), and is given a value "
                                      f"of ({shown(value.dims)}): each element must get one value")
        current().store(self, key, dims, value)

    def place(self, key: Any) -> tuple[tuple, tuple]:
        """(indices, dimensions of what is there): a stack's index takes its axis away, an axis without index is whole."""
        key = key if isinstance(key, tuple) else (key,)
        if len(key) > len(self.shape):
            raise refused(ValueError, f"{self.name} is of shape {self.shape}, and is given {len(key)} indices")
        for axis, index in enumerate(key):
            if not isinstance(index, Index):
                raise refused(TypeError, f"{self.name}[...]: index {axis} is {index!r}; the variables of parallel(...) and "
                                         "sequential(...) are indices")
            if index.extent.size != self.shape[axis]:
                raise refused(ValueError, f"{self.name}[{shown(key)}]: {index} goes along {index.extent}, and axis {axis} "
                                          f"of {self.name} has {self.shape[axis]} elements")
        return key, (*(index for index in key if not index.stack), *map(Axis, self.shape[len(key):]))


def joined(op: str, dims: list[tuple]) -> tuple:
    """The dimensions of an element-wise result: of the operand that has most, and no others."""
    longest: tuple = max(dims, key=len, default=())
    found = tuple(dict.fromkeys((*longest, *(d for each in dims for d in each))))
    if len(found) > 2:
        raise refused(ValueError, f"{op} of values of ({') and ('.join(map(shown, dims))}): three dimensions or more do not "
                                  "meet in a matrix")
    return found


def shown(dims: Any) -> str:
    return ", ".join(map(repr, dims))


class Cell(Arithmetic):
    """A place whose value changes: ``cell[:] = x``, ``cell += x``. Its dimensions and its type do not."""

    def __init__(self, value: Any):
        self.value = value
        current().cells.append(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key != slice(None):
            raise refused(TypeError, "a cell is assigned as a whole: cell[:] = value")
        self._put(current().lift(value))

    def __iadd__(self, other: Any) -> Cell:
        self._put(current().make("add", self, other))
        return self

    def _put(self, value: Any) -> None:
        if set(value.dims) - set(self.value.dims):
            raise refused(ValueError, f"a cell of ({shown(self.value.dims)}) is given a value of ({shown(value.dims)}): "
                                      "what rounds carry keeps its dimensions")
        self.value = current().fitted(value, self.value.dims)
