"""A program's function called once on symbols: operations in static single assignment, loops with what rounds carry."""

from __future__ import annotations

import dis
import math
import sys
from collections.abc import Callable, Iterator
from collections.abc import Mapping as Names
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import CodeType
from typing import Any

import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16 by its name
import numpy as np

from gemmkit.components import without_arrays
from gemmkit.kernels.masks import Mask
from gemmkit.programs.called import EXTENT, MOST_OF_SCORE, NUMBER, TEST, CallableArgument, Callee, function_of, mask_of
from gemmkit.programs.lengths import PIECE, Axes, RowsOfPiece, check_bound, piece_of
from gemmkit.programs.values import (
    Arithmetic,
    Axis,
    Cell,
    Index,
    Parameter,
    Place,
    ProgramAxis,
    Term,
    _current,
    explained,
    is_of_rounds,
    joined,
    line_here,
    name_here,
    refused,
    shown,
    unique,
)

# --------------------------------------------------------------------------------------------------
# What both readings of a program share: dimensions are checked in one place, whether symbols or numbers are computed.

#: Operations that make conditions: of numbers, and of conditions.
COMPARISONS, CONNECTIVES = frozenset({"lt", "le", "eq", "ne"}), frozenset({"and", "or", "not"})
CONDITIONS = COMPARISONS | CONNECTIVES | {TEST}
TF32 = "tf32"                          # float32 with 10 bits of mantissa, as tensor cores multiply it: no dtype of NumPy's

#: What element-wise operations of a traced program compute.
FUNCTIONS: dict[str, Any] = dict(
    add=np.add, sub=np.subtract, mul=np.multiply, div=np.divide, neg=np.negative, lt=np.less, le=np.less_equal, eq=np.equal,
    ne=np.not_equal, exp=np.exp, log=np.log, tanh=np.tanh, sqrt=np.sqrt, max=np.maximum,
    erf=np.vectorize(math.erf, [np.float64]), abs=np.abs, pow=np.power, where=np.where,
    finite=lambda x: np.where(x == -np.inf, 0.0, x),
    **{"and": np.logical_and, "or": np.logical_or, "not": np.logical_not})


class Interpreter:
    """A reading of a program. Values are a ``kind`` of object that has ``dims``; a subclass says what they are otherwise."""

    kind: type

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.axes = Axes()
        self.stacks: tuple[Index, ...] = ()            # of the tiles
        self.parts: list[tuple[Any, str]] = []         # products that sum over a tile's rows, and what is said of them

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

    def callee(self, f: Any, name: str) -> Callee:
        return Callee(name, f)

    def loop(self, extents: tuple[ProgramAxis, ...], kind: str, start: Any = None, stop: Any = None,
             rows: RowsOfPiece | None = None) -> Iterator[Any]:
        """``start`` and ``stop`` bound the only extent; ``rows``: what it is, of a piece or of pages."""
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

    @contextmanager
    def inlining(self, program: Any, mapping: Any) -> Iterator[Callable[..., Any]]:
        """The function of a program that another one calls, which is read within. ``mapping`` is its own."""
        yield program.function

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
            raise refused(TypeError, f"{x!r} is neither a value of a program nor a condition; a condition compares values: "
                                     "x < y")
        if getattr(x, "shape", ()) != ():
            raise refused(TypeError, f"an array of shape {tuple(x.shape)} is not a value of a program: pass the array as an "
                                     "argument, and read its blocks, x[m, n]")
        if isinstance(x, (str, complex)) or not hasattr(x, "__float__"):
            raise refused(TypeError, f"{x!r} is not a value of a program; values are numbers, cells and elements of array "
                                     "arguments")
        return self.constant(x)

    def lift(self, x: Any) -> Any:
        """A number, for each of some places. Raises TypeError for what is none."""
        value = self._value(x)
        if self.is_condition(value):
            raise refused(TypeError, "a condition is not a number: write where(condition, 1.0, 0.0)")
        return value

    def condition(self, x: Any) -> Any:
        value = self._value(x)
        if not self.is_condition(value):
            raise refused(TypeError, "a number is not a condition: compare it, x != 0.0; combine conditions with c & d, c "
                                     "| d and ~c")
        return value

    def whole(self, x: Parameter) -> Any:
        """An array that is written without indices: all of a vector."""
        if len(x.shape) != 1:
            raise refused(TypeError, f"{x.name} is of shape {x.shape}: only an array with one element for each column can "
                                     f"be read without indices; read blocks of others: {x.name}[m]")
        return self.load(x, *x.place(()))

    def factor(self, x: Any) -> Any:
        """An operand of a product, which may be all of a matrix, without indices."""
        return self.load(x, *x.place(())) if isinstance(x, Parameter) and len(x._shape) == 2 else self.lift(x)

    def make(self, op: str, *given: Any) -> Any:
        args = list(map(self.condition if op in CONNECTIVES else self.lift, given))
        if op in ("eq", "ne"):
            self._check_equal(args)
        return self._met(op, args)

    def _check_equal(self, args: list[Any]) -> None:
        """Raises ValueError for a number that no float32 is: kernels compare these."""
        for number in map(self.number, args):
            if number is not None and number == number and float(np.float32(number)) != number:
                raise refused(ValueError, f"{number!r} is not a float32, so nothing equals it; compare with bounds: abs(x - "
                                          "y) < 1e-6")

    def number(self, value: Any) -> float | None:
        """What a constant is."""
        raise NotImplementedError

    def call(self, f: Any, given: tuple, is_test: bool) -> Any:
        """A function of the user's of each element; an index stands for the places of its elements."""
        name, f = name_of(f), function_of(f, len(given))
        page = next((x for x in given if isinstance(x, Index) and x.is_page), None)
        if page is not None:
            raise refused(TypeError, f"call(..., {page!r}): a page is where rows are read, and no number")
        args = [self.coordinate(x) if isinstance(x, Index) else self.lift(x) for x in given]
        callee = self.callee(f, name)
        callee.extents.append(tuple(extent_of(x) for x in given))
        if callee.is_score:
            args += [self.constant(0)] * (MOST_OF_SCORE - len(args))
        return self._met(TEST if is_test else NUMBER, args, data=callee)

    def shown(self, given: object, mask: Mask, dims: tuple) -> Any:
        """What a mask shows, as a condition: queries are rows, and keys columns."""
        if len(dims) != 2:
            raise refused(ValueError, f"where({type(mask).__name__}(), ...) of a value of ({shown(dims)}): a mask is of "
                                      "scores, whose rows are queries and whose columns are keys")
        if len(self.stacks) > 2:
            raise refused(ValueError, f"where({type(mask).__name__}(), ...) in tiles of {len(self.stacks)} stacks: a mask "
                                      "is given a head and a batch")
        _ = mask.arities                               # refuses other numbers of arguments
        callee, heads = self.callee(mask, name_of(given)), self.stacks[::-1]
        callee.extents.append((*map(extent_of, dims), *(stack.extent for stack in heads), *(None, None)[len(heads):]))
        shift = self.compute("sub", (self.extent(dims[1]), self.extent(dims[0])), ())
        places = [*map(self.coordinate, (*dims, *heads)), *[self.constant(0)] * (2 - len(heads))]
        return self._met(TEST, [*places, shift], data=callee)

    def extent(self, dim: Any) -> Any:
        """How long an axis is, or how far rounds along it go."""
        raise NotImplementedError

    def _met(self, op: str, args: list[Any], first: tuple = (), data: Any = None) -> Any:
        """An element-wise operation of values, which meet along the dimensions that they share. Its own are in the order of
        those of the value that has most, ``first`` among them."""
        longest = max([first, *(x.dims for x in args)], key=len)
        met = [self.met(lambda: op, longest, x) for x in args]
        dims = list(dict.fromkeys([longest, *(new for _, new in met)]))
        return self.compute(op, tuple(x for x, _ in met), joined(op, dims), data)

    def met(self, what: Callable[[], str], dims: tuple, x: Any) -> tuple[Any, tuple]:
        """A value and its dimensions, whose whole axes are those of ``dims`` where they meet."""
        new = self.axes.renamed(what, dims, x.dims)
        return (x if new == x.dims else self.renamed(x, new)), new

    def dot(self, a: Any, b: Any) -> Any:
        a, b = self.factor(a), self.factor(b)

        def said() -> str:
            return f"({shown(a.dims)}) @ ({shown(b.dims)})"

        if len(a.dims) != 2 or len(b.dims) != 2:
            raise refused(ValueError, f"{said()}: matrices are multiplied")
        inner = a.dims[1], b.dims[0]
        if isinstance(inner[0], Axis) and isinstance(inner[1], Axis) and inner[0].size == inner[1].size:
            self.axes.meet(said, *inner, is_contracted=True)
        elif inner[0] != inner[1] and not (isinstance(inner[0], Index) and inner[0].is_block_of(inner[1])):
            raise refused(ValueError, f"{said()}: the left operand has {inner[0]} and the right operand has {inner[1]} to "
                                      "sum over; both must be the same block")
        rows, columns = a.dims[0], b.dims[1]
        if rows == columns:
            if isinstance(rows, Axis) or rows.of_tile:
                raise refused(ValueError, f"{said()}: rows and columns of the product are the same block of {rows}; use two "
                                          "loops, or pass the array as two arguments")
            columns = self.twin(rows)
        made = self.compute("dot", (a, b), (rows, columns))
        if isinstance(a.dims[1], Index) and a.dims[1].of_tile:
            self.parts.append((made, said()))
        return made

    def twin(self, index: Index) -> Index:
        """The columns of products whose rows are the same block of a round."""
        return index.groups.setdefault("twin", replace(index, name=f"{index!r}'", twin=index, groups={}))

    def transpose(self, x: Any) -> Any:
        x = self.factor(x)                             # a value of each row becomes one of each column
        dims = (self.twin(x.dims[0]),) if is_of_rounds(x.dims) else x.dims[::-1]
        if len(dims) != 2 and not is_of_rounds(x.dims):
            raise refused(ValueError, f"cannot transpose a value of ({shown(x.dims)}); a matrix is needed")
        return self.compute("transpose", (x,), dims)

    def along(self, op: str, x: Any, axis: int) -> Any:
        x = self.lift(x)
        if op == "sum" and is_of_rounds(x.dims) and axis == 0:
            return self.compute("total", (x,), ())
        if len(x.dims) != 2 or axis not in (0, 1, -1):
            raise refused(ValueError, f"{op}(axis={axis}) of ({shown(x.dims)}): axis=1 reduces its rows, axis=0 its columns")
        refuse_parts(lambda: f"{op}(axis={axis})", x.dims[axis])
        x = self.transpose(x) if axis == 0 else x
        return self.compute("row" + op, (x,), x.dims[:1])

    def mean(self, x: Any, axis: int) -> Any:
        x = self.lift(x)
        dim = x.dims[axis] if len(x.dims) == 2 and axis in (0, 1, -1) else None
        if dim is not None and not isinstance(dim, Axis):
            raise refused(ValueError, f"mean(axis={axis}) over {dim}: a mean needs the whole row; add up the sums of "
                                      "blocks, and divide after the loop")
        found = self.along("sum", x, axis)
        return self.make("div", found, x.dims[axis].size)

    def cast(self, x: Any, dtype: Any) -> Any:
        x = self.lift(x)
        if isinstance(dtype, str) and dtype == TF32:
            return self.compute("cast", (x,), x.dims, TF32)
        try:
            found = np.dtype(dtype)
        except TypeError:
            raise refused(TypeError, f"astype({dtype!r}): a dtype is needed, such as a.dtype or \"bfloat16\"; of "
                                     "an operand in float32 also \"tf32\"") from None
        if found.kind not in "fiu" and found != np.dtype("bfloat16"):
            raise refused(TypeError, f"astype({dtype!r}): values are real numbers and can be rounded to float16, bfloat16, "
                                     "...")
        return self.compute("cast", (x,), x.dims, found)

    def full(self, dims: tuple, value: Any) -> Any:
        wrong = next((d for d in dims if not isinstance(d, (Index, ProgramAxis)) or d.stack), None)
        if wrong is not None or len(dims) not in (1, 2):
            raise refused(TypeError, f"a cell of ({shown(dims)}): one or two blocks or axes are needed, such as zeros(m, n)")
        cut = next((d for d in dims if isinstance(d, ProgramAxis) and d.offsets is not None), None)
        if cut is not None:
            raise refused(TypeError, f"a cell of ({shown(dims)}): {cut!r} has a length that the host does not know; use the "
                                     "index of its blocks, such as zeros(m, n)")
        if isinstance(value, (bool, Term, Parameter)) or not hasattr(value, "__float__"):
            raise refused(TypeError, f"full(..., {value!r}): the last argument must be a number; to begin with a value "
                                     "write copy(x)")
        axes = tuple(Axis(d.length, (d.parameter, d.axis)) if isinstance(d, ProgramAxis) else d for d in dims)
        self.axes.whole.update(axis.of for axis in axes if isinstance(axis, Axis) and axis.of)
        if len(set(axes)) < len(axes):
            raise refused(ValueError, f"a cell of ({shown(dims)}): its rows and columns must be blocks of two loops")
        return self.filled(axes, float(value))

    def where(self, condition: Any, x: Any, other: Any) -> Any:
        """``condition`` is a value, or a function of the places of an element: ``condition(m, n)``."""
        x = self.lift(x)
        mask = mask_of(condition)
        if mask is not None and mask.is_everything:
            return x
        if mask is not None:
            return self._met("where", [self.shown(condition, mask, x.dims), x, self.lift(other)], x.dims)
        if not isinstance(condition, (Term, Parameter)):
            if not callable(condition):
                raise refused(TypeError, f"where({condition!r}, ...): a condition compares values, x < y, or is a function "
                                         "of an element's places")
            condition = condition(*(self.place(d) for d in x.dims))
        return self._met("where", [self.condition(condition), x, self.lift(other)], x.dims)

    def place(self, dim: Any) -> Place:
        return Place(self.coordinate(dim), dim)

    def extents(self, given: tuple, piece: Index | None = None) -> tuple[ProgramAxis, ...]:
        """``piece``: which one a loop along the rows of a piece is of, where it is no tile's."""
        for n, extent in enumerate(given):
            if not isinstance(extent, ProgramAxis):
                raise refused(TypeError, f"a loop is over {extent!r}, but an axis is needed, such as a.rows, a.columns, "
                                         "a.count")
            if extent.offsets is not None and not extent.stack and piece is None and not any(
                    x.counts_pieces and x.offsets is extent.offsets for x in given[:n]):
                raise refused(ValueError, f"a loop is over {extent!r}, but of which one is not said: of x = packed(...) "
                                          "write parallel(x.count, x.rows) for tiles, and sequential(x[i]) for rounds")
        return given


def name_of(f: object) -> str:
    """The program's argument that a component is."""
    return str(f._name) if isinstance(f, CallableArgument) else ""


def extent_of(x: Any) -> ProgramAxis | int | None:
    """What a called function is told the places along; None for another argument."""
    x = x.dim if isinstance(x, Place) else x
    return x.extent if isinstance(x, Index) else x.size if isinstance(x, Axis) else None


class Along:
    """What a loop goes along: by ``for`` alone, since it is gone around once when a program is traced."""

    def __init__(self, blocks: Iterator[Any]):
        self._blocks = blocks

    def __iter__(self) -> Iterator[Any]:
        frame = sys._getframe(1)
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] != "GET_ITER":
            raise refused(TypeError, "write loops as for k in gp.sequential(...), without enumerate, zip or list; "
                                     "gp.place(k) is a block's position")
        return self._blocks


def called(function: Callable[..., None], given: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Call a program's function with what stands for its arguments. Raises what it raises; errors of Python's own as
    ValueError and TypeError, with the program's line."""
    try:
        function(**given)
    except Exception as error:
        raise explained(error, function.__code__, arguments) from error


def refuse_parts(what: Callable[[], str], dim: Any, line: str = "") -> None:
    """Raises ValueError for a sum over the columns or rows that a tile has of an array: other tiles have the others."""
    if isinstance(dim, Index) and dim.of_tile:
        raise refused(ValueError, f"{what()} reduces {dim}, but a tile has only a part of it; loop over it with "
                                  "sequential(...), use tiles of whole rows, or add it to an array: x[m] += ...", line)


def _check_parts(tracer: Tracer, loop: Loop) -> None:
    """Raises ValueError for products that sum over a tile's rows and are not added to an array as they are."""
    updates = [x.value for x in stores_of(loop) if x.read is not None]
    for made, said in tracer.parts:
        users = [x for one in loop.loops for x in one.body if isinstance(x, Value) and made in x.args]
        is_kept = any(c.out is made for one in loop.loops for c in one.carried)
        if is_kept or not users or any(user not in updates for user in users):
            refuse_parts(lambda said=said: said, made.args[0].dims[1], made.line)      # type: ignore[misc]


@contextmanager
def entered(interpreter: Interpreter) -> Iterator[Interpreter]:
    """Within it programs are read so."""
    token = _current.set(interpreter)
    try:
        yield interpreter
    finally:
        _current.reset(token)


@dataclass(eq=False)
class Value:
    """An operation's result, equal to itself alone. ``data``: a constant's number, a scalar's name, where a load reads;
    ``line`` is the user's."""

    op: str
    args: tuple = ()
    dims: tuple = ()
    data: Any = None
    name: str = ""
    line: str = field(default_factory=line_here)

    def __repr__(self) -> str:
        return self.name or self.op


@dataclass(eq=False)
class StoreStatement:
    """``only``: stored by the first block along that index alone."""

    parameter: Parameter
    key: tuple
    value: Value
    only: Index | None
    line: str = field(default_factory=line_here)

    @property
    def lookup(self) -> Parameter | None:
        """The array that says which rows of the result these are."""
        return next((index.lookup for index in self.key if getattr(index, "lookup", None) is not None), None)

    @property
    def read(self) -> Value | None:
        """What an update adds to, ``x[m] += value``: the load of the elements that are stored; None of another store."""
        such = [y for y in self.value.args if y.op == "load" and y.data[0] is self.parameter
                and len(y.data[1]) == len(self.key) and all(a is b for a, b in zip(y.data[1], self.key))]
        return such[0] if self.value.op == "add" and len(such) == 1 else None


@dataclass(eq=False)
class Carried:
    """A cell that rounds change: its value before the loop, as a round begins and ends, and after the loop."""

    cell: Cell | None
    init: Value
    inside: Value
    out: Value
    after: Value


@dataclass(eq=False)
class Loop:
    """``body`` has values, stores and loops, in the order in which they were written. ``start`` and ``stop``: the whole
    numbers that bound its rounds."""

    kind: str
    indices: tuple[Index, ...]
    body: list = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)
    start: Value | None = None
    stop: Value | None = None
    line: str = field(default_factory=line_here)
    twice: str = ""                    # the line of a product of a block with itself, which recurrences have
    looked_up: str = ""                # that of rows which an array names
    updated: dict[str, StoreStatement] = field(default_factory=dict)   # results that are read before they are stored
    axes: Axes = field(default_factory=Axes)           # of a whole program
    inlined: list[Inlined] = field(default_factory=list)           # programs that a program calls

    @property
    def loops(self) -> list[Loop]:
        """It, and all loops within."""
        return [self, *(each for held in self.body if isinstance(held, Loop) for each in held.loops)]

    @property
    def sizes(self) -> dict[ProgramAxis, int]:
        """How long the axes of all indices are."""
        return {index.extent: index.extent.length for loop in self.loops for index in loop.indices}


@dataclass(eq=False)
class Inlined:
    """A call of a program in another one: its function, its mapping, if it has one, and the loops within; ``written``: their
    indices, as the function calls them."""

    name: str
    function: Any
    mapping: Any
    loops: list[Loop] = field(default_factory=list)
    written: dict[str, Index] = field(default_factory=dict)


class Tracer(Interpreter):
    """``names``: of a program's arguments that are functions, by their ids. ``variants``: which function a program that is
    called is, by its name (`gemmkit.programs.Program.chosen`)."""

    kind = Value

    def __init__(self, names: dict[int, str], variants: Names[str, str]) -> None:
        super().__init__()
        self.names, self.variants = names, variants
        self.inlined: list[Inlined] = []
        self.within: list[Inlined] = []                # calls that are being read, the innermost last
        self.callees: dict[tuple[int, str], Callee] = {}               # by functions' ids, and the arguments that they are
        self.bodies: list[list] = [[]]
        self.only: Index | None = None
        self.over: dict[Value, Loop] = {}              # what rounds that are over have computed
        self.twice = ""                                # where rows and columns of a product are one block
        self.looked_up = ""                            # where rows are those that an array names
        self.reads: dict[str, set[tuple]] = {}         # by the names of arrays that are read, where
        self.stored: set[str] = set()

    def emit(self, made: Any) -> Any:
        self.bodies[-1].append(made)
        return made

    @contextmanager
    def inlining(self, program: Any, mapping: Any) -> Iterator[Callable[..., Any]]:
        before, name = self.variants, program.function.__name__
        if any(call.name == name for call in self.within):
            raise refused(ValueError, f"{name} calls itself; a program's kernel has each call's code in it")
        self.variants = {**(mapping.variants if mapping is not None else {}), **before}
        call = Inlined(name, program.chosen(self.variants), mapping)
        self.inlined.append(call)
        self.within.append(call)
        try:
            yield call.function
        finally:
            self.within.pop()
            self.variants = before

    def constant(self, x: Any) -> Value:
        return Value("const", data=float(x))

    def number(self, value: Value) -> float | None:
        return value.data if value.op == "const" and not value.dims else None

    def is_condition(self, value: Value) -> bool:
        return value.op in CONDITIONS

    def check(self, value: Value, said: Any) -> None:
        index = next((index for index in (*value.dims, *(value.data[1] if value.op == "load" else ()))
                      if isinstance(index, Index) and index.of_loop.is_over), None)
        loop = self.over.get(value)
        if loop is not None or index is not None:
            name, along = name_here(said) or "acc", index if loop is None else shown(loop.indices)
            raise refused(ValueError, f"{name_here(said) or 'a value'} is of one round of {along}, which is over; to keep a "
                                      f"value between rounds make a cell, {name} = gp.zeros(m, n) before the loop, and "
                                      f"{name} += ... or {name}[:] = ... in it")

    def compute(self, op: str, args: tuple, dims: tuple, data: Any = None) -> Value:
        return self.emit(Value(op, args, dims, data))

    def filled(self, dims: tuple, value: float) -> Value:
        return Value("const", (), dims, value)

    def twin(self, index: Index) -> Index:
        self.twice = self.twice or line_here()
        return super().twin(index)

    def use(self, index: Index, parameter: Parameter, axis: int, key: tuple) -> None:
        super().use(index, parameter, axis, key)
        self.looked_up = self.looked_up or (line_here() if index.lookup is not None else "")

    def load(self, parameter: Parameter, key: tuple, dims: tuple) -> Value:
        late = parameter.name in self.stored
        self.reads.setdefault(parameter.name, set()).add((*key, "after the store") if late else key)
        return Value("load", (), dims, (parameter, key), parameter.name)

    def store(self, parameter: Parameter, key: tuple, dims: tuple, value: Value) -> None:
        if self.only is not None and any(index is self.only for index in key):
            raise refused(ValueError, f"{parameter.name}[{shown(key)}] within once({self.only}): only the first block along "
                                      f"{self.only} would be stored")
        self.stored.add(parameter.name)
        self.emit(StoreStatement(parameter, key, value, self.only))

    def coordinate(self, dim: Any) -> Value:
        return Value("coordinate", (), () if isinstance(dim, Index) and dim.stack else (dim,), dim)

    def extent(self, dim: Any) -> Value:
        return self.constant(dim.size) if isinstance(dim, Axis) else Value(EXTENT, (), (), dim)

    def callee(self, f: Any, name: str) -> Callee:
        """Of two arguments that happen to be one component each has its own: in another call they are two."""
        key = id(f), name
        if key not in self.callees:
            wanted = name or self.names.get(id(f)) or getattr(f, "__name__", "") or type(f).__name__.lower()
            wanted = wanted if wanted.isidentifier() else "function"                       # of a lambda
            found = unique(wanted, {repr(callee) for callee in self.callees.values()})
            self.callees[key] = Callee(found, without_arrays(f), name) if name else Callee(found, f)
        return self.callees[key]

    def loop(self, extents: tuple[ProgramAxis, ...], kind: str, start: Any = None, stop: Any = None,
             rows: RowsOfPiece | None = None) -> Iterator[Any]:
        if kind == "parallel" and len(self.bodies) > 1:
            raise refused(ValueError, "parallel(...) inside a loop; it must be the outermost loop")
        if kind == "sequential" and len(self.bodies) == 1:
            raise refused(ValueError, "sequential(...) outside of parallel(...); it must be inside")
        begin, length = (None if x is None else check_bound(word, x, extents[0]) for word, x in (("start", start),
                                                                                                 ("stop", stop)))
        if rows is not None and rows.axis.offsets is not None:
            length = Value(PIECE, (), (), (rows.axis.offsets, (rows.which,)))
        indices = tuple(Index(extent, of_tile=kind == "parallel") for extent in extents)
        if kind == "parallel":
            self.stacks = tuple(x for x in indices if x.stack)
        for index in indices:
            index.piece = piece_of(index.extent, indices)
            if rows is not None:
                index.piece, index.line = (rows.which, None) if rows.axis.table is None else (None, rows.which)
            self.reads.update((x.name, {()}) for x in (index.extent.offsets, index.extent.table) if x is not None)
        loop = self.emit(Loop(kind, indices, start=begin, stop=length))
        for call in self.within:
            call.loops.append(loop)
        user = sys._getframe(1)
        known = dict(user.f_locals)
        names = _carried_names(user.f_code, user.f_lasti)
        self.bodies.append(loop.body)
        before = [(cell, cell.value) for cell in self.cells]
        for cell, init in before:
            cell.value = Value("carried", (), init.dims, line=init.line)
        inside = [cell.value for cell, _ in before]
        yield loop.indices if len(loop.indices) > 1 else loop.indices[0]
        self.bodies.pop()
        _give_names(user.f_locals, loop, before, inside)
        _check_names(user.f_locals, loop, known, names)
        for index in indices:
            index.is_over = True
        self.over.update((held, loop) for held in loop.body if isinstance(held, Value))
        for (cell, init), began in zip(before, inside):
            out = cell.value
            if out is began:
                cell.value = init
                for held in loop.body:                         # what does not change is not carried
                    if isinstance(held, Value):
                        held.args = tuple(init if arg is began else arg for arg in held.args)
            else:
                cell.value = Value("after", (), init.dims, name=began.name, line=began.line)
                loop.carried.append(Carried(cell, init, began, out, cell.value))


@lru_cache(maxsize=256)
def accesses_of(code: CodeType) -> list[tuple[int, int, str, bool]]:
    """Where a function's code names its variables: (offset, line, name, whether it is bound)."""
    found, line = [], code.co_firstlineno
    for x in dis.get_instructions(code):
        position = getattr(x, "positions", None)       # from Python 3.11 on
        line = (position.lineno if position is not None else x.starts_line) or line
        if any(word in x.opname for word in ("_FAST", "_DEREF")) and isinstance(x.argval, (str, tuple)):
            names = x.argval if isinstance(x.argval, tuple) else (x.argval,)       # later Pythons name two at once
            kinds = [word == "STORE" for word in x.opname.split("_") if word in ("LOAD", "STORE")]
            found += [(x.offset, line, name, is_bound) for name, is_bound in zip(names, kinds)]
    return found


@lru_cache(maxsize=256)
def _carried_names(code: CodeType, at: int) -> dict[str, int]:
    """Names that the rounds of the loop ``at`` read before they bind them, with the lines where they bind them."""
    end = next((x.argval for x in dis.get_instructions(code) if x.offset == at and x.opname == "FOR_ITER"), 0)
    read, bound, found = set[str](), set[str](), dict[str, int]()
    for offset, line, name, is_bound in accesses_of(code):
        if at < offset < end:
            if not is_bound and name not in bound:
                read.add(name)
            elif is_bound:
                bound.add(name)
                if name in read:
                    found[name] = line
    return found


def _check_names(now: dict[str, Any], loop: Loop, known: dict[str, Any], names: dict[str, int]) -> None:
    """Raises ValueError for a name that rounds bind anew: a program is traced once, so that a round would find what the name
    was before the loop."""
    for name, line in names.items():
        old, new = known.get(name), now.get(name)
        is_number = isinstance(old, (int, float)) and not isinstance(new, Term)
        if new is old or not isinstance(old, (Arithmetic, int, float)) or (is_number and old == new):
            continue
        at = f"{loop.line.rpartition(':')[0]}:{line}"
        if isinstance(old, Parameter):
            raise refused(ValueError, f"{name} is an array argument, and {name} = ... rebinds the name, so the next round "
                                      "or tile would read the new value; use "
                                      f"another name, or store it: {name}[...] = ...", at)
        raise refused(ValueError, f"{name} is {'rebound' if isinstance(old, Cell) else 'not a cell'}, so the next round "
                                  f"would not see this value; write {name} = gp.zeros(m, n) before the loop, and {name} += "
                                  f"... or {name}[:] = ... in it", at)


def _give_names(known: dict[str, Any], loop: Loop, before: list, inside: list[Value]) -> None:
    """Values, cells and indices are called as the user calls them."""
    for name, x in known.items():
        held = x.value if isinstance(x, Term) and not isinstance(x, Cell) else x
        if isinstance(held, (Value, Index)) and not held.name:
            held.name = name
        for (cell, _), began in zip(before, inside):
            if cell is x:
                began.name = name
    names = [index.name for index in loop.indices]
    if len(set(names)) < len(names) or not all(names):
        raise refused(ValueError, "each index of a loop needs its own variable", loop.line)


def trace(program: Any, arguments: dict[str, Any], variants: Names[str, str]) -> Loop:
    """The one parallel loop that a program is. ``arguments``: parameters, floating point numbers, which become run-time
    scalars, and whatever else the function takes. ``variants``: as a mapping has them.

    Raises what the words raise (ValueError, TypeError, with the user's line), and ValueError for another form.
    """
    function = program.chosen(variants)
    tracer, code = Tracer({id(x): name for name, x in arguments.items() if callable(x)}, variants), function.__code__
    with entered(tracer):
        given = {name: Term(Value("scalar", data=name, name=name)) if isinstance(x, (float, np.floating)) else x
                 for name, x in arguments.items()}
        called(function, given, arguments)
        body = tracer.bodies[0]
    if len(tracer.bodies) > 1:
        raise refused(ValueError, "a program's loop must run to its end: break and return depend on a round",
                      tracer.bodies[-2][-1].line)
    tracer.axes.check()
    loops = [x for x in body if isinstance(x, Loop)]
    if len(loops) != 1 or any(isinstance(x, StoreStatement) for x in body):
        raise refused(ValueError, f"{function.__name__} has {len(loops)} parallel loops; a program must have exactly one, "
                                  "and store inside it",
                      f"{code.co_filename}:{code.co_firstlineno}")
    (loop,) = loops
    if loop.carried:
        raise refused(ValueError, f"{loop.carried[0].cell!r} is made outside of the tiles, which cannot share it; make it "
                                  "inside the loop", loop.line)
    _check_parts(tracer, loop)
    _check_stores(loop, code, [name for name, x in given.items() if isinstance(x, Parameter)], tracer.reads)
    loop.updated = {x.parameter.name: x for x in reversed(stores_of(loop)) if x.parameter.name in tracer.reads}
    _forget_axes(loop)
    loop.twice, loop.looked_up, loop.axes = tracer.twice, tracer.looked_up, tracer.axes
    loop.inlined = tracer.inlined
    for call in loop.inlined:
        call.written = {index.name: index for each in call.loops for index in each.indices}
    return loop


def stores_of(loop: Loop) -> list[StoreStatement]:
    """All stores, in the order in which they are written."""
    return [x for held in loop.body for x in (stores_of(held) if isinstance(held, Loop) else [held]) if isinstance(x,
                                                                                                                   StoreStatement)]


def refuse_update(store: StoreStatement) -> Exception:
    """Of a result that is read."""
    name = store.parameter.name
    return refused(ValueError, f"{name} is both read and stored; a result needs its own array. Read the input from another "
                               f"argument: {name}[{shown(store.key)}] = acc + c[{shown(store.key)}]. Tiles may read the "
                               "elements that they store, and functions of rows their rows", store.line)


def _check_stores(loop: Loop, code: CodeType, arrays: list[str], reads: dict[str, set[tuple]]) -> None:
    """Raises ValueError where nothing is stored, a name of an array is bound in place of a store, a result is read elsewhere
    than where it is stored behind, or one of a stack's matrices would be stored for all."""
    stores = stores_of(loop)
    results = {store.parameter.name for store in stores}
    for _, line, name, is_bound in accesses_of(code):
        if is_bound and name in arrays and name not in results and name not in reads:
            key = ", ".join(index.name for index in loop.indices)
            raise refused(ValueError, f"{name} is an array argument: {name} = ... only rebinds the name and stores nothing; "
                                      f"write {name}[{key}] = ...", f"{code.co_filename}:{line}")
    if not stores:
        raise refused(ValueError, "nothing is stored; a program stores its results in arguments: y[m] = ...", loop.line)
    for store in stores:
        name = store.parameter.name
        is_apart = name in reads and store.read is None and not any(store is x for x in loop.body)
        if reads.get(name, {store.key}) != {store.key} or is_apart:
            raise refuse_update(store)
        of_piece = [x.piece for x in store.key if isinstance(x, Index)]            # which is in no other's rows
        missing = next((x for x in loop.indices if x.stack and not any(y is x for y in (*store.key, *of_piece))), None)
        if missing is not None and store.only is not missing:
            raise refused(ValueError, f"{name}[{shown(store.key)}] is stored for each {missing} of {missing.extent}, and "
                                      "each overwrites the one before; give each its place: "
                                      f"{name}[{shown((missing, *store.key))}]", store.line)


def _forget_axes(loop: Loop) -> None:
    """From here on two whole axes of a length stand for each other: the program has said so, or they never meet."""
    pending: list[Any] = [loop]
    seen: set[int] = set()
    while pending:
        x = pending.pop()
        known = id(x) in seen
        seen.add(id(x))
        if isinstance(x, Loop):
            pending += [*x.body, *(y for c in x.carried for y in (c.init, c.inside, c.out, c.after))] * (not known)
        elif isinstance(x, StoreStatement):
            pending.append(x.value)
        elif not known:
            x.dims = tuple(Axis(d.size) if isinstance(d, Axis) else d for d in x.dims)
            x.data = Axis(x.data.size) if x.op == "coordinate" and isinstance(x.data, Axis) else x.data
            pending += x.args
