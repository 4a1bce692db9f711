"""What both readings of a program share: dimensions are checked in one place, whether symbols or numbers are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemmkit.programs.lines import refused
from gemmkit.programs.values import Arithmetic, Axis, Cell, Extent, Index, Parameter, _current, joined, shown

__all__ = ["Interpreter", "entered"]


class Interpreter:
    """A reading of a program. Values have ``dims``; a subclass says what they are otherwise."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []

    # -- a subclass's -------------------------------------------------------------------------------------------------

    def constant(self, x: Any) -> Any:
        raise NotImplementedError

    def compute(self, op: str, args: tuple, dims: tuple, data: Any = None) -> Any:
        raise NotImplementedError

    def filled(self, dims: tuple, value: float) -> Any:
        raise NotImplementedError

    def load(self, parameter: Any, key: tuple, dims: tuple) -> Any:
        raise NotImplementedError

    def store(self, parameter: Any, key: tuple, dims: tuple, value: Any) -> None:
        raise NotImplementedError

    def coordinate(self, dim: Any) -> Any:
        raise NotImplementedError

    def loop(self, extents: tuple[Extent, ...], kind: str, stop: Any = None) -> Iterator[Any]:
        """``stop``: a length that bounds the only extent."""
        raise NotImplementedError

    def fitted(self, value: Any, dims: tuple) -> Any:
        """The value with these dimensions, in this order."""
        return value

    # -- checked here -------------------------------------------------------------------------------------------------

    def lift(self, x: Any) -> Any:
        if isinstance(x, Cell):
            return x.value
        if isinstance(x, Parameter):
            return self.whole(x)
        if isinstance(x, Arithmetic):
            return x
        if isinstance(x, (bool, str)) or not hasattr(x, "__float__") or getattr(x, "shape", ()) != ():
            raise refused(TypeError, f"{x!r} is no value of a program: numbers, cells, and elements of array arguments are")
        return self.constant(x)

    def whole(self, x: Parameter) -> Any:
        """An array that is written without indices: all of a vector."""
        if len(x.shape) != 1:
            raise refused(TypeError, f"{x.name} is of shape {x.shape}: without indices an array with an element for each "
                                     f"column is read; of others blocks are, {x.name}[m]")
        return self.load(x, *x.place(()))

    def make(self, op: str, *given: Any) -> Any:
        args = tuple(map(self.lift, given))
        return self.compute(op, args, joined(op, [x.dims for x in args]))

    def dot(self, a: Any, b: Any) -> Any:
        a, b = self.lift(a), self.lift(b)
        if len(a.dims) != 2 or len(b.dims) != 2:
            raise refused(ValueError, f"({shown(a.dims)}) @ ({shown(b.dims)}): matrices are multiplied")
        if a.dims[1] != b.dims[0]:
            raise refused(ValueError, f"({shown(a.dims)}) @ ({shown(b.dims)}): the sum goes over {a.dims[1]} of the one and "
                                      f"{b.dims[0]} of the other, which must be the same")
        refuse_parts(f"({shown(a.dims)}) @ ({shown(b.dims)})", a.dims[1])
        if a.dims[0] == b.dims[1]:
            raise refused(ValueError, f"({shown(a.dims)}) @ ({shown(b.dims)}): rows and columns of the product are the same "
                                      "block; go along them by two loops")
        return self.compute("dot", (a, b), (a.dims[0], b.dims[1]))

    def transpose(self, x: Any) -> Any:
        x = self.lift(x)
        if len(x.dims) != 2:
            raise refused(ValueError, f"the transpose of a value of ({shown(x.dims)}): a matrix is needed")
        return self.compute("transpose", (x,), x.dims[::-1])

    def along(self, op: str, x: Any, axis: int) -> Any:
        x = self.lift(x)
        if len(x.dims) != 2 or axis not in (0, 1, -1):
            raise refused(ValueError, f"{op}(axis={axis}) of a value of ({shown(x.dims)}): rows of a matrix are reduced, "
                                      "axis=1, or its columns, axis=0")
        refuse_parts(f"{op}(axis={axis})", x.dims[axis])
        x = self.transpose(x) if axis == 0 else x
        return self.compute("row" + op, (x,), x.dims[:1])

    def mean(self, x: Any, axis: int) -> Any:
        x = self.lift(x)
        dim = x.dims[axis] if len(x.dims) == 2 and axis in (0, 1, -1) else None
        if dim is not None and not isinstance(dim, Axis):
            raise refused(ValueError, f"mean(axis={axis}) over {dim}: the mean of a row is of all of it; add up the sums of "
                                      "blocks, and divide behind the loop")
        found = self.along("sum", x, axis)
        return self.make("div", found, x.dims[axis].size)

    def cast(self, x: Any, dtype: Any) -> Any:
        x = self.lift(x)
        return self.compute("cast", (x,), x.dims, dtype)

    def full(self, dims: tuple, value: float) -> Any:
        wrong = next((d for d in dims if not isinstance(d, (Index, Extent)) or d.stack), None)
        if wrong is not None or len(dims) not in (1, 2):
            raise refused(TypeError, f"a cell of ({shown(dims)}): one or two blocks or axes are needed, such as zeros(m, n)")
        return self.filled(tuple(Axis(d.size) if isinstance(d, Extent) else d for d in dims), value)

    def where(self, condition: Any, x: Any, other: Any) -> Any:
        """``condition`` is a value, or a function of the places of an element: ``condition(m, n)``."""
        x = self.lift(x)
        if not isinstance(condition, (Arithmetic, Cell)):
            condition = condition(*(self.coordinate(d) for d in x.dims))
        args = self.lift(condition), x, self.lift(other)
        return self.compute("where", args, joined("where", [x.dims, *(arg.dims for arg in args)]))

    def extents(self, given: tuple) -> tuple[Extent, ...]:
        for extent in given:
            if not isinstance(extent, Extent):
                raise refused(TypeError, f"a loop goes along {extent!r}: an axis is needed, such as a.rows, "
                                         "a.columns, a.count")
        return given


def refuse_parts(what: str, dim: Any) -> None:
    """Raises ValueError for a sum over the columns or rows that a tile has of an array: other tiles have the others."""
    if isinstance(dim, Index) and dim.of_tile:
        raise refused(ValueError, f"{what} goes over {dim}, of which a tile has a part: what goes over all of an axis goes "
                                  "along it in rounds, sequential(...), or has tiles of whole rows")


@contextmanager
def entered(interpreter: Interpreter) -> Iterator[Interpreter]:
    """Within it programs are read so."""
    token = _current.set(interpreter)
    try:
        yield interpreter
    finally:
        _current.reset(token)
