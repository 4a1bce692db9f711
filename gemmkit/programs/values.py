"""What a program's code holds: terms of its formulas, cells, arrays, extents, and indices.

A dimension is a block of an array's axis (`Index`), or all of it (`Axis`). Two values meet where their dimensions are the
same: a value of rows meets a tile of these rows along the rows, whatever place the dimension has. The program says which
axes are the same, and not their lengths (`gemmkit.programs.axes`).

Passes compute with an interpreter's own values, which compare by identity. A `Term` holds one of these for the program's
code, where ``==`` makes a condition.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from gemmkit.programs.lines import is_ours, name_here, refused

_current: ContextVar[Any] = ContextVar("gemmkit_program", default=None)

#: NumPy's functions of two numbers, which `np.float32(2) * x` calls, by the operation that they are.
UFUNCS = dict(add="add", subtract="sub", multiply="mul", divide="div", true_divide="div", less="lt", less_equal="le",
              equal="eq", not_equal="ne")
SWAPPED = dict(greater="lt", greater_equal="le")
#: What to write in place of NumPy's and Python's words.
WRITE = dict(
    exp="gp.exp(x)", log="gp.log(x)", tanh="gp.tanh(x)", sqrt="gp.sqrt(x)", maximum="gp.maximum(x, y)",
    minimum="gp.minimum(x, y)", fmax="gp.maximum(x, y)", fmin="gp.minimum(x, y)", where="gp.where(condition, x, y)",
    absolute="abs(x)", fabs="abs(x)", square="x * x", power="x ** 2", negative="-x", matmul="x @ y", dot="x @ y",
    transpose="x.T", sum="x.sum(axis=1)", max="x.max(axis=1)", amax="x.max(axis=1)", min="x.min(axis=1)",
    amin="x.min(axis=1)", mean="x.mean(axis=1)", clip="gp.minimum(gp.maximum(x, low), high)", exp2="gp.exp(x * math.log(2))",
    log2="gp.log(x) / math.log(2)", reciprocal="1.0 / x", logical_and="x & y", logical_or="x | y", logical_not="~x",
    bitwise_and="x & y", bitwise_or="x | y", invert="~x", isnan="x != x", zeros_like="gp.zeros(m, n)",
    full_like="gp.full(m, n, value)")
WORDS = "exp, log, tanh, sqrt, rsqrt, maximum, minimum, where, finite of gemmkit.programs, abs(x) and x ** 2"


def current() -> Any:
    """The interpreter that a program is being called under (`gemmkit.programs.interpreter`)."""
    found = _current.get()
    if found is None:
        raise refused(TypeError, "a word of programs is used outside of one: decorate the function with @gk.program")
    return found


def term(op: str, *given: Any) -> Term:
    """An operation of values, numbers and cells, which the current interpreter carries out."""
    return Term(current().make(op, *given))


def written(name: str) -> str:
    """What to write in place of a function of NumPy's."""
    return f"write {WRITE[name]}" if name in WRITE else f"functions of values are {WORDS}"


class Arithmetic:
    """Operators of what a program's code holds."""

    __hash__ = object.__hash__

    def __add__(self, other: Any) -> Any:
        return term("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return term("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return term("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return term("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return term("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return term("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return term("div", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return term("div", other, self)

    def __neg__(self) -> Any:
        return term("neg", self)

    def __pos__(self) -> Any:
        return Term(current().lift(self))

    def __abs__(self) -> Any:
        x = +self
        return Term(current().where(x <= 0.0, 0.0 - x, x))             # of -0.0, 0.0

    def __pow__(self, power: Any) -> Any:
        if isinstance(power, bool) or not isinstance(power, (int, np.integer)) or not 1 <= power <= 8:
            raise refused(TypeError, f"x ** {power!r}: powers are whole numbers from 1 to 8; write gp.sqrt(x), 1.0 / x, or "
                                     "gp.exp(y * gp.log(x))")
        x = Term(current().lift(self))
        made = x
        for _ in range(int(power) - 1):
            made = made * x
        return made

    # -- conditions ---------------------------------------------------------------------------------------------------

    def __eq__(self, other: Any) -> Any:
        return term("eq", self, other)

    def __ne__(self, other: Any) -> Any:
        return term("ne", self, other)

    def __lt__(self, other: Any) -> Any:
        return term("lt", self, other)

    def __le__(self, other: Any) -> Any:
        return term("le", self, other)

    def __gt__(self, other: Any) -> Any:
        return term("lt", other, self)

    def __ge__(self, other: Any) -> Any:
        return term("le", other, self)

    def __and__(self, other: Any) -> Any:
        return term("and", self, other)

    def __or__(self, other: Any) -> Any:
        return term("or", self, other)

    def __invert__(self) -> Any:
        return term("not", self)

    # -- matrices -----------------------------------------------------------------------------------------------------

    def __matmul__(self, other: Any) -> Any:
        return Term(current().dot(self, other))

    @property
    def T(self) -> Any:
        return Term(current().transpose(self))

    def max(self, axis: int) -> Any:
        return Term(current().along("max", self, axis))

    def min(self, axis: int) -> Any:
        return -Term(current().along("max", -self, axis))

    def sum(self, axis: int) -> Any:
        return Term(current().along("sum", self, axis))

    def mean(self, axis: int) -> Any:
        return Term(current().mean(self, axis))

    def astype(self, dtype: Any) -> Any:
        return Term(current().cast(self, dtype))

    # -- what has no meaning before the kernel runs -------------------------------------------------------------------

    def __bool__(self) -> bool:
        raise refused(TypeError, "a program's control flow depends on a value, which is known when the kernel runs and not "
                                 "when it is derived: if, and, or, not, in and a < b < c ask for it. Choose element by "
                                 "element, with where(condition, x, y); conditions meet in c & d, c | d and ~c")

    def __array_ufunc__(self, function: Any, method: str, *given: Any, **keywords: Any) -> Any:
        """Of a NumPy number and a value the value decides; NumPy's functions compute nothing here."""
        name = function.__name__
        if method == "__call__" and not keywords and len(given) == 2:
            if name in UFUNCS:
                return term(UFUNCS[name], *given)
            if name in SWAPPED:
                return term(SWAPPED[name], *given[::-1])
        raise refused(TypeError, f"np.{name} computes with arrays, and a value of a program has no numbers before the "
                                 f"kernel runs: {written(name)}")

    def __array_function__(self, function: Any, types: Any, given: Any, keywords: Any) -> NoReturn:
        raise refused(TypeError, f"np.{function.__name__} computes with arrays, and a value of a program has no numbers "
                                 f"before the kernel runs: {written(function.__name__)}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise refused(AttributeError, f"a value of a program has no {name}: it has .T, max, min, sum, mean, astype; its "
                                      f"functions are {WORDS}")


def _unknown(name: str, why: str) -> Any:
    def method(self: Any, *given: Any, **keywords: Any) -> NoReturn:
        raise refused(TypeError, why)

    method.__name__ = name
    return method


_NO_NUMBER = (f"a value of a program is no number before the kernel runs; programs' functions are {WORDS}, not math's or "
              "NumPy's")
_NO_INDEX = ("a value of a program is no index, and no number before the kernel runs: an array that a program reads is an "
             "argument of it, and the loops' variables are its indices, x[m, n]")
_NO_ELEMENTS = ("a value of a program has no elements to go through: all of them are computed at once; loops are for m, n "
                "in gp.parallel(...) and for k in gp.sequential(...)")
_NO_OPERATION = ("values of programs have no {}: they have +, -, *, /, abs(x), x ** 2, @, comparisons, and &, |, ~ of "
                 "conditions")
for _why, _names in (
        (_NO_INDEX, ("__index__", "__array__")),
        (_NO_NUMBER, ("__float__", "__int__", "__complex__", "__round__", "__trunc__", "__floor__", "__ceil__")),
        (_NO_ELEMENTS, ("__iter__", "__len__", "__contains__", "__reversed__")),
        *((_NO_OPERATION.format(_sign), _of) for _sign, _of in (
            ("//", ("__floordiv__", "__rfloordiv__")), ("%", ("__mod__", "__rmod__")),
            ("divmod", ("__divmod__", "__rdivmod__")), ("powers of a number, but gp.exp(x * math.log(2))", ("__rpow__",)),
            ("^", ("__xor__", "__rxor__")), ("<<", ("__lshift__", "__rlshift__")), (">>", ("__rshift__", "__rrshift__")),
            ("& with what is no condition", ("__rand__",)), ("| with what is no condition", ("__ror__",)),
            ("@ with what is no argument of the program", ("__rmatmul__",))))):
    for _name in _names:
        setattr(Arithmetic, _name, _unknown(_name, _why))


class Symbol:
    """What dimensions are told by. Programs compare places and lengths, and not these."""

    instead = ""

    def _wrong(self, other: Any = None) -> NoReturn:
        raise refused(TypeError, f"{self!r} is no number: {self.instead}")

    def __eq__(self, other: Any) -> bool:
        if _current.get() is not None and not is_ours(sys._getframe(1).f_code) and other is not None:
            self._wrong()
        return self is other or (type(self) is type(other) and self._same(other))

    def _same(self, other: Any) -> bool:
        return False

    __hash__ = object.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _wrong
    __floordiv__ = __mod__ = __lt__ = __le__ = __gt__ = __ge__ = _wrong

    def __neg__(self) -> NoReturn:
        self._wrong()

    __index__ = __int__ = __float__ = __iter__ = __len__ = __neg__

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, eq=False)
class Extent(Symbol):
    """An axis of an array, to go along; ``stack``: one by one."""

    parameter: str
    axis: int
    size: int
    stack: bool = False

    def __repr__(self) -> str:
        return f"axis {self.axis} of {self.parameter} ({self.size})"

    @property
    def instead(self) -> str:                          # type: ignore[override]
        return (f"loops are for m, n in gp.parallel(...) and for k in gp.sequential(...), and its length is "
                f"{self.parameter}.shape[{self.axis}]")

    def _same(self, other: Any) -> bool:
        return (self.parameter, self.axis, self.stack) == (other.parameter, other.axis, other.stack)

    def __hash__(self) -> int:
        return hash((self.parameter, self.axis, self.stack))


@dataclass(frozen=True)
class Axis:
    """All of an array's axis, ``of`` (array, axis). In a trace's values two of a length stand for each other, without
    ``of``."""

    size: int
    of: tuple[str, int] | None = None

    def __repr__(self) -> str:
        return f"all {self.size}" if self.of is None else f"all of axis {self.of[1]} of {self.of[0]} ({self.size})"


@dataclass(eq=False)
class Index(Symbol):
    """A loop's variable: a block of an axis, from ``start`` to ``stop`` where numbers are computed; ``of_tile`` where tiles
    go along the axis, and not rounds. ``is_over``: its loop is. ``twin``: the index of the same blocks, where one block is
    rows and columns of a product."""

    extent: Extent
    name: str = ""
    start: int = 0
    stop: int = 0
    of_tile: bool = False
    is_over: bool = False
    twin: Index | None = None

    def is_block_of(self, other: Any) -> bool:
        return other is self or other is self.twin or (isinstance(other, Index) and other.twin is self)

    @property
    def stack(self) -> bool:
        return self.extent.stack

    def __repr__(self) -> str:
        return self.name or name_here(self) or f"a block of {self.extent}"

    @property
    def instead(self) -> str:                          # type: ignore[override]
        return ("it is an index, of arrays that are arguments of the program; where its elements are is "
                f"gp.place({self!r})")


class Term(Arithmetic):
    """A value as a program's code holds it."""

    kind = "value"

    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return f"<{self.kind} of ({shown(self.value.dims)})>" if self.value.dims else f"<{self.kind}>"

    def __str__(self) -> str:
        """With the numbers, where these are computed."""
        return f"{self!r}{getattr(self.value, 'array', '')}"

    def __getitem__(self, key: Any) -> NoReturn:
        raise refused(TypeError, f"{self!r} has no elements to choose: it is taken as a whole, and array "
                                 "arguments are indexed")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise refused(TypeError, f"{self!r} is assigned to: results are array arguments, d[m, n] = ..., and what rounds "
                                 "change is a cell, acc = gp.zeros(m, n)")


class Place(Term):
    """Where elements are along a dimension, which stands for its index where arrays are read."""

    def __init__(self, value: Any, dim: Any):
        super().__init__(value)
        self.dim = dim


@dataclass(eq=False)
class Parameter(Arithmetic):
    """An array argument. ``data`` is the array where numbers are computed. Without indices a vector is a value."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    data: Any = None

    __hash__ = object.__hash__

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
        return Term(current().load(self, *self.place(key)))

    def __setitem__(self, key: Any, value: Any) -> None:
        key, dims = self.place(key)

        def said() -> str:
            return f"{self.name}[{shown(key)}]"

        value, meets = current().met(said, dims, current().lift(value))
        if set(meets) - set(dims):
            raise refused(ValueError, f"{said()} has the dimensions ({shown(dims)}), and is given a value of "
                                      f"({shown(value.dims)}): each element must get one value")
        current().store(self, key, dims, value)

    def place(self, key: Any) -> tuple[tuple, tuple]:
        """(indices, dimensions of what is there): a stack's index takes its axis away, an axis without index is whole."""
        key = tuple(x.dim if isinstance(x, Place) else x for x in (key if isinstance(key, tuple) else (key,)))
        if len(key) > len(self.shape):
            raise refused(ValueError, f"{self.name} is of shape {self.shape}, and is given {len(key)} indices")
        for axis, index in enumerate(key):
            if not isinstance(index, Index):
                raise refused(TypeError, f"{self.name}[...]: index {axis} is {index!r}; the variables of parallel(...) and "
                                         "sequential(...) are indices")
            current().use(index, self, axis, key)
        whole = tuple(Axis(size, (self.name, axis)) for axis, size in enumerate(self.shape) if axis >= len(key))
        return key, (*(index for index in key if not index.stack), *whole)


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


class Cell(Term):
    """A place whose value changes: ``cell[:] = x``, ``cell += x``. Its dimensions and its type do not."""

    kind = "cell"

    def __init__(self, value: Any):
        super().__init__(value)
        current().cells.append(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, slice) or key != slice(None):
            raise refused(TypeError, "a cell is assigned as a whole: cell[:] = value")
        self._put(current().lift(value))

    def __iadd__(self, other: Any) -> Cell:
        self._put(current().make("add", self, other))
        return self

    def __isub__(self, other: Any) -> Cell:
        self._put(current().make("sub", self, other))
        return self

    def __imul__(self, other: Any) -> Cell:
        self._put(current().make("mul", self, other))
        return self

    def __itruediv__(self, other: Any) -> Cell:
        self._put(current().make("div", self, other))
        return self

    def _put(self, value: Any) -> None:
        value, meets = current().met(lambda: "a cell", self.value.dims, value)
        if set(meets) - set(self.value.dims):
            raise refused(ValueError, f"a cell of ({shown(self.value.dims)}) is given a value of ({shown(value.dims)}): "
                                      "what rounds carry keeps its dimensions")
        self.value = current().fitted(value, self.value.dims)
