"""What both readings of a program share: dimensions are checked in one place, whether symbols or numbers are computed."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16 by its name
import numpy as np

from gemmkit.programs.axes import Axes
from gemmkit.programs.lines import explained, refused
from gemmkit.programs.values import Axis, Cell, Extent, Index, Parameter, Place, Term, _current, joined, shown

#: Operations that make conditions: of numbers, and of conditions.
COMPARISONS, CONNECTIVES = frozenset({"lt", "le", "eq", "ne"}), frozenset({"and", "or", "not"})
CONDITIONS = COMPARISONS | CONNECTIVES


class Interpreter:
    """A reading of a program. Values are a ``kind`` of object that has ``dims``; a subclass says what they are otherwise."""

    kind: type

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.axes = Axes()

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

    def renamed(self, value: Any, dims: tuple) -> Any:
        """The value, whose whole axes are called as what they meet calls them."""
        return value

    def is_condition(self, value: Any) -> bool:
        raise NotImplementedError

    def check(self, value: Any, said: Any) -> None:
        """Raise ValueError for a value that is not there, of what the program has ``said``."""

    def use(self, index: Index, parameter: Parameter, axis: int, key: tuple) -> None:
        """An index stands on an axis of an array."""
        self.axes.use(index, parameter, axis, key)

    # -- checked here -------------------------------------------------------------------------------------------------

    def _value(self, x: Any) -> Any:
        if isinstance(x, Term):
            self.check(x.value, x)
            return x.value
        if isinstance(x, Parameter):
            return self.whole(x)
        if isinstance(x, self.kind):
            return x
        if isinstance(x, (bool, np.bool_)):
            raise refused(TypeError, f"{x!r} is no value of a program, and no condition: conditions compare values, x < y")
        if getattr(x, "shape", ()) != ():
            raise refused(TypeError, f"an array of shape {tuple(x.shape)} is no value of a program: arrays are its "
                                     "arguments, and blocks of them are read, x[m, n]")
        if isinstance(x, (str, complex)) or not hasattr(x, "__float__"):
            raise refused(TypeError, f"{x!r} is no value of a program: numbers, cells, and elements of array arguments are")
        return self.constant(x)

    def lift(self, x: Any) -> Any:
        """A number, for each of some places. Raises TypeError for what is none."""
        value = self._value(x)
        if self.is_condition(value):
            raise refused(TypeError, "a condition is no number: choose by it, where(condition, 1.0, 0.0)")
        return value

    def condition(self, x: Any) -> Any:
        value = self._value(x)
        if not self.is_condition(value):
            raise refused(TypeError, "a number is no condition: compare it, x != 0.0; conditions meet in c & d, c "
                                     "| d and ~c")
        return value

    def whole(self, x: Parameter) -> Any:
        """An array that is written without indices: all of a vector."""
        if len(x.shape) != 1:
            raise refused(TypeError, f"{x.name} is of shape {x.shape}: without indices an array with an element for each "
                                     f"column is read; of others blocks are, {x.name}[m]")
        return self.load(x, *x.place(()))

    def make(self, op: str, *given: Any) -> Any:
        args = list(map(self.condition if op in CONNECTIVES else self.lift, given))
        if op in ("eq", "ne"):
            self._check_equal(args)
        return self._met(op, args)

    def _check_equal(self, args: list[Any]) -> None:
        """Raises ValueError for a number that no float32 is: kernels compare these."""
        for number in map(self.number, args):
            if number is not None and number == number and float(np.float32(number)) != number:
                raise refused(ValueError, f"{number!r} is no float32, so that nothing equals it: compare with bounds, "
                                          "abs(x - y) < 1e-6")

    def number(self, value: Any) -> float | None:
        """What a constant is."""
        raise NotImplementedError

    def _met(self, op: str, args: list[Any], first: tuple = ()) -> Any:
        """An element-wise operation of values, which meet along the dimensions that they share. Its own are in the order of
        those of the value that has most, ``first`` among them."""
        longest = max([first, *(x.dims for x in args)], key=len)
        met = [self.met(lambda: op, longest, x) for x in args]
        dims = list(dict.fromkeys([longest, *(new for _, new in met)]))
        return self.compute(op, tuple(x for x, _ in met), joined(op, dims))

    def met(self, what: Callable[[], str], dims: tuple, x: Any) -> tuple[Any, tuple]:
        """A value and its dimensions, whose whole axes are those of ``dims`` where they meet."""
        new = self.axes.renamed(what, dims, x.dims)
        return (x if new == x.dims else self.renamed(x, new)), new

    def dot(self, a: Any, b: Any) -> Any:
        a, b = self.lift(a), self.lift(b)

        def said() -> str:
            return f"({shown(a.dims)}) @ ({shown(b.dims)})"

        if len(a.dims) != 2 or len(b.dims) != 2:
            raise refused(ValueError, f"{said()}: matrices are multiplied")
        inner = a.dims[1], b.dims[0]
        if isinstance(inner[0], Axis) and isinstance(inner[1], Axis) and inner[0].size == inner[1].size:
            self.axes.meet(said, *inner, is_contracted=True)
        elif inner[0] != inner[1] and not (isinstance(inner[0], Index) and inner[0].is_block_of(inner[1])):
            raise refused(ValueError, f"{said()}: the sum goes over {inner[0]} of the one and {inner[1]} of the other, "
                                      "which must be the same")
        refuse_parts(said, a.dims[1])
        rows, columns = a.dims[0], b.dims[1]
        if rows == columns:
            if isinstance(rows, Axis) or rows.of_tile:
                raise refused(ValueError, f"{said()}: rows and columns of the product are the same block of {rows}; go "
                                          "along them by two loops, or take the array as two arguments")
            columns = self.twin(rows)
        return self.compute("dot", (a, b), (rows, columns))

    def twin(self, index: Index) -> Index:
        """The columns of a product whose rows are the same block of a round."""
        return replace(index, name=f"{index!r}'", twin=index)

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
        refuse_parts(lambda: f"{op}(axis={axis})", x.dims[axis])
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
        try:
            found = np.dtype(dtype)
        except TypeError:
            raise refused(TypeError, f"astype({dtype!r}): a dtype is needed, such as a.dtype or \"bfloat16\"") from None
        if found.kind not in "fiu" and found != np.dtype("bfloat16"):
            raise refused(TypeError, f"astype({dtype!r}): values are real numbers, and rounded to such: float16, "
                                     "bfloat16, ...")
        return self.compute("cast", (x,), x.dims, found)

    def full(self, dims: tuple, value: Any) -> Any:
        wrong = next((d for d in dims if not isinstance(d, (Index, Extent)) or d.stack), None)
        if wrong is not None or len(dims) not in (1, 2):
            raise refused(TypeError, f"a cell of ({shown(dims)}): one or two blocks or axes are needed, such as zeros(m, n)")
        if isinstance(value, (bool, Term, Parameter)) or not hasattr(value, "__float__"):
            raise refused(TypeError, f"full(..., {value!r}): a cell begins with a number, which stands last; one that "
                                     "begins with a value is copy(x)")
        axes = tuple(Axis(d.size, (d.parameter, d.axis)) if isinstance(d, Extent) else d for d in dims)
        if len(set(axes)) < len(axes):
            raise refused(ValueError, f"a cell of ({shown(dims)}): rows and columns are two blocks, of two loops")
        return self.filled(axes, float(value))

    def where(self, condition: Any, x: Any, other: Any) -> Any:
        """``condition`` is a value, or a function of the places of an element: ``condition(m, n)``."""
        x = self.lift(x)
        if not isinstance(condition, (Term, Parameter)):
            if not callable(condition):
                raise refused(TypeError, f"where({condition!r}, ...): a condition compares values, x < y, or is a function "
                                         "of an element's places")
            condition = condition(*(self.place(d) for d in x.dims))
        return self._met("where", [self.condition(condition), x, self.lift(other)], x.dims)

    def place(self, dim: Any) -> Place:
        return Place(self.coordinate(dim), dim)

    def extents(self, given: tuple) -> tuple[Extent, ...]:
        for extent in given:
            if not isinstance(extent, Extent):
                raise refused(TypeError, f"a loop goes along {extent!r}: an axis is needed, such as a.rows, "
                                         "a.columns, a.count")
        return given


class Along:
    """What a loop goes along: by ``for`` alone, since it is gone around once when a program is traced."""

    def __init__(self, blocks: Iterator[Any]):
        self._blocks = blocks

    def __iter__(self) -> Iterator[Any]:
        frame = sys._getframe(1)
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] != "GET_ITER":
            raise refused(TypeError, "rounds and tiles are gone along by for k in gp.sequential(...) alone, not by "
                                     "enumerate, zip or list; where a block is is gp.place(k)")
        return self._blocks


def called(function: Callable[..., None], given: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Call a program's function with what stands for its arguments. Raises what it raises; errors of Python's own as
    ValueError and TypeError, with the program's line."""
    try:
        function(**given)
    except Exception as error:
        raise explained(error, function.__code__, arguments) from error


def refuse_parts(what: Callable[[], str], dim: Any) -> None:
    """Raises ValueError for a sum over the columns or rows that a tile has of an array: other tiles have the others."""
    if isinstance(dim, Index) and dim.of_tile:
        raise refused(ValueError, f"{what()} goes over {dim}, of which a tile has a part: what goes over all of an axis "
                                  "goes along it in rounds, sequential(...), or has tiles of whole rows")


@contextmanager
def entered(interpreter: Interpreter) -> Iterator[Interpreter]:
    """Within it programs are read so."""
    token = _current.set(interpreter)
    try:
        yield interpreter
    finally:
        _current.reset(token)
