"""What a program's code holds: terms of its formulas, cells, arrays, extents, and indices.

A dimension is a block of an array's axis (`Index`), or all of it (`Axis`). Two values meet where their dimensions are the
same: a value of rows meets a tile of these rows along the rows, whatever place the dimension has. The program says which
axes are the same, and not their lengths (`gemmkit.programs.values`).

Passes compute with an interpreter's own values, which compare by identity. A `Term` holds one of these for the program's
code, where ``==`` makes a condition.
"""

from __future__ import annotations

import itertools
import linecache
import math
import sys
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np

# --------------------------------------------------------------------------------------------------
# Errors of programs, with the line of the user's that they are about.

_FOLDER = str(Path(__file__).parent)
_Error = TypeVar("_Error", bound=Exception)


@lru_cache(maxsize=4096)
def _is_of_this_folder(file: str) -> bool:
    return file.startswith(_FOLDER)


def is_ours(code: CodeType) -> bool:
    """Whether code is of this folder, or the initialiser that `dataclass` has written."""
    file = code.co_filename
    return _is_of_this_folder(file) or (file == "<string>" and code.co_name == "__init__")


def users_frame() -> FrameType:
    """The frame of the program that is being executed."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_ours(frame.f_code):
        frame = frame.f_back
    return frame


def line_here() -> str:
    """The line of a program that is being executed: ``file:number``."""
    frame = users_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def name_here(x: Any) -> str:
    """What the program that is being executed calls a thing, or nothing."""
    frame: FrameType | None = users_frame()
    while frame is not None and not is_ours(frame.f_code):
        name = next((name for name, held in frame.f_locals.items() if held is x), "")
        if name:
            return name
        frame = frame.f_back
    return ""


def refused(kind: type[_Error], rule: str, line: str = "") -> _Error:
    """An error that says the rule, the place, and what is written there: ``raise refused(ValueError, ...)``."""
    line = line or line_here()
    file, _, number = line.rpartition(":")
    source = linecache.getline(file, int(number)).strip()
    found = kind(f"{rule}\n  at {line}" + (f"\n    {source}" if source else ""))
    found.line = line                                  # type: ignore[attr-defined]
    return found


def explained(error: Exception, code: CodeType, arguments: dict[str, Any]) -> Exception:
    """What is raised for an error of a program's code: the error itself if it names its line, or if the code has raised a
    kind of its own; else ValueError or TypeError with the line. ``arguments``: of the program."""
    if hasattr(error, "line") or type(error).__module__ != "builtins":
        return error
    at, trace = f"{code.co_filename}:{code.co_firstlineno}", error.__traceback__
    entered = False
    while trace is not None:
        entered = entered or trace.tb_frame.f_code is code
        if entered and _is_program(trace, code):
            at = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    kind = ValueError if isinstance(error, ValueError) else TypeError
    named = "" if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: "
    return refused(kind, f"{named}{error}{_hint(error, arguments)}", at)


def _is_program(trace: TracebackType, code: CodeType) -> bool:
    """Whether a frame is of the program, or of a function that is written beside it."""
    return trace.tb_frame.f_code is code or trace.tb_frame.f_code.co_filename == code.co_filename


def _hint(error: Exception, arguments: dict[str, Any]) -> str:
    if isinstance(error, UnboundLocalError):
        return "; a cell that rounds add to is made before them: acc = gp.zeros(m, n)"
    if isinstance(error, IndexError):
        return "; an array that a program reads is an argument of it, f(..., x), and x[m, n] a block"
    wrong = [f"{name} is {'None' if x is None else f'of type {type(x).__name__}'}" for name, x in arguments.items()
             if f"{type(x).__name__}' object" in str(error) or f"{type(x).__name__} indices" in str(error)]
    return f"; {' and '.join(wrong)}, and a program's arrays are needed" if wrong else ""


COUNTED = np.dtype(np.int32), np.dtype(np.int64)              # of places
_current: ContextVar[Any] = ContextVar("gemmkit_program", default=None)

#: NumPy's functions of two numbers, which `np.float32(2) * x` calls, by the operation that they are.
UFUNCS = dict(add="add", subtract="sub", multiply="mul", divide="div", true_divide="div", less="lt", less_equal="le",
              equal="eq", not_equal="ne", power="pow", float_power="pow")
SWAPPED = dict(greater="lt", greater_equal="le")
#: What to write in place of NumPy's and Python's words.
WRITE = dict(
    exp="gp.exp(x)", log="gp.log(x)", tanh="gp.tanh(x)", sqrt="gp.sqrt(x)", maximum="gp.maximum(x, y)",
    minimum="gp.minimum(x, y)", fmax="gp.maximum(x, y)", fmin="gp.minimum(x, y)", where="gp.where(condition, x, y)",
    absolute="abs(x)", fabs="abs(x)", square="x * x", negative="-x", matmul="x @ y", dot="x @ y",
    transpose="x.T", sum="x.sum(axis=1)", max="x.max(axis=1)", amax="x.max(axis=1)", min="x.min(axis=1)",
    amin="x.min(axis=1)", mean="x.mean(axis=1)", clip="gp.minimum(gp.maximum(x, low), high)", exp2="2.0 ** x",
    log2="gp.log(x) / math.log(2)", reciprocal="1.0 / x", logical_and="x & y", logical_or="x | y", logical_not="~x",
    bitwise_and="x & y", bitwise_or="x | y", invert="~x", isnan="x != x", zeros_like="gp.zeros(m, n)",
    full_like="gp.full(m, n, value)")
WORDS = ("exp, log, tanh, erf, sqrt, rsqrt, maximum, minimum, where, finite of gemmkit.programs, abs(x) and x ** y; "
         "gp.call(f, x) calls any function of numbers")


MOST_POWER = 64                        # that is computed as products


def current() -> Any:
    """The interpreter that a program is being called under (`gemmkit.programs.trace`)."""
    found = _current.get()
    if found is None:
        raise refused(TypeError, "gemmkit.programs is used outside of a program; decorate the function with @gk.program")
    return found


def is_entered() -> bool:
    """Whether a program is being called."""
    return _current.get() is not None


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
        return term("abs", self)

    def __pow__(self, power: Any) -> Any:
        """Whole powers are products, a half is a root; others, of x >= 0 unless they turn out whole, are `math.pow`'s."""
        if not isinstance(power, (int, float, np.integer, np.floating)) or isinstance(power, bool):
            return term("pow", self, power)
        x, number = Term(current().lift(self)), float(power)
        if abs(number) == 0.5:
            return term("sqrt", x) if number > 0 else 1.0 / term("sqrt", x)
        if not number.is_integer() or abs(number) > MOST_POWER:
            return term("pow", x, number)
        if number == 0:
            return Term(current().where(x == x, 1.0, 1.0))
        made, square, left = x, x, abs(int(number)) - 1
        while left:
            made = made * square if left & 1 else made
            left >>= 1
            square = square * square if left else square
        return made if number > 0 else 1.0 / made

    def __rpow__(self, base: Any) -> Any:
        is_positive = isinstance(base, (int, float, np.integer, np.floating)) and 0.0 < base < math.inf
        return term("exp", term("mul", self, math.log(base))) if is_positive else term("pow", base, self)

    def __eq__(self, other: Any) -> Any:
        return term("eq", self, other)

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
        raise refused(TypeError, "a program's control flow depends on a value, but values are known only when the kernel "
                                 "runs (if, and, or, not, in and a < b < c need them earlier). Choose with "
                                 "where(condition, x, y), maximum or minimum; combine conditions with c & d, c | d and ~c")

    def __array_ufunc__(self, function: Any, method: str, *given: Any, **keywords: Any) -> Any:
        """Of a NumPy number and a value the value decides; NumPy's functions compute nothing here."""
        name = function.__name__
        if method == "__call__" and not keywords and len(given) == 2:
            if name in UFUNCS:
                return term(UFUNCS[name], *given)
            if name in SWAPPED:
                return term(SWAPPED[name], *given[::-1])
        raise refused(TypeError, f"np.{name} needs numbers, but a value of a program has none before the kernel runs: "
                                 f"{written(name)}")

    def __array_function__(self, function: Any, types: Any, given: Any, keywords: Any) -> NoReturn:
        raise refused(TypeError, f"np.{function.__name__} needs numbers, but a value of a program has none before the "
                                 f"kernel runs: {written(function.__name__)}")

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
_NO_OPERATION = ("values of programs have no {}: they have +, -, *, /, abs(x), x ** y, @, comparisons, and &, |, ~ of "
                 "conditions; gp.call(f, x) calls any function of numbers")
for _name in "ne", "lt", "le", "and", "or":
    setattr(Arithmetic, f"__{_name}__", lambda self, other, op=_name: term(op, self, other))
for _name, _op in (("gt", "lt"), ("ge", "le")):
    setattr(Arithmetic, f"__{_name}__", lambda self, other, op=_op: term(op, other, self))
for _why, _names in (
        (_NO_INDEX, ("__index__", "__array__")),
        (_NO_NUMBER, ("__float__", "__int__", "__complex__", "__round__", "__trunc__", "__floor__", "__ceil__")),
        (_NO_ELEMENTS, ("__iter__", "__len__", "__contains__", "__reversed__")),
        *((_NO_OPERATION.format(_sign), _of) for _sign, _of in (
            ("//", ("__floordiv__", "__rfloordiv__")), ("%", ("__mod__", "__rmod__")),
            ("divmod", ("__divmod__", "__rdivmod__")),
            ("^", ("__xor__", "__rxor__")), ("<<", ("__lshift__", "__rlshift__")), (">>", ("__rshift__", "__rrshift__")),
            ("& with what is no condition", ("__rand__",)), ("| with what is no condition", ("__ror__",)),
            ("@ with what is no argument of the program", ("__rmatmul__",))))):
    for _name in _names:
        setattr(Arithmetic, _name, _unknown(_name, _why))


class Symbol:
    """What dimensions are told by. Programs compare places and lengths, and not these."""

    instead = ""

    def _wrong(self, other: Any = None) -> NoReturn:
        raise refused(TypeError, f"{self!r} is not a number: {self.instead}")

    def __eq__(self, other: Any) -> bool:
        if _current.get() is not None and not is_ours(sys._getframe(1).f_code) and other is not None:
            self._wrong()
        return self is other or (type(self) is type(other) and self._same(other))

    def _same(self, other: Any) -> bool:
        return False

    __hash__ = object.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _wrong
    __floordiv__ = __rfloordiv__ = __mod__ = __lt__ = __le__ = __gt__ = __ge__ = _wrong

    def __neg__(self) -> NoReturn:
        self._wrong()

    __index__ = __int__ = __float__ = __iter__ = __len__ = __neg__

    def __bool__(self) -> bool:
        return True


def _seen(name: str) -> None:
    """A program's own code reads how long an array's axes are: what it makes of that, it makes for these lengths alone."""
    interpreter = _current.get()
    if interpreter is not None and not is_ours(sys._getframe(2).f_code):
        interpreter.axes.seen.add(name)


@dataclass(frozen=True, eq=False)
class ProgramAxis(Symbol):
    """An axis of an array, to go along; ``stack``: one by one. ``offsets``: the array that says where pieces of it begin, if
    it is cut into some, as packed sequences are; of a stack, the array that it counts the pieces of. ``table``: the array
    that says in which of how many ``pages`` rows are, ``of_page`` in each."""

    parameter: str
    axis: int
    length: int
    stack: bool = False
    group: int = 1                     # of a stack: how many of it share one matrix
    offsets: Parameter | None = None
    table: Parameter | None = None
    pages: int = 0
    of_page: int = 0

    @property
    def size(self) -> int:
        _seen(self.parameter)
        return self.length

    @property
    def counts_pieces(self) -> bool:
        return self.stack and self.offsets is not None

    def measured(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """How long it is where arrays have other shapes, by their names."""
        length = shapes[self.parameter][self.axis]
        return length - self.counts_pieces if self.table is None or self.stack else length * shapes[self.table.name][1]

    def __repr__(self) -> str:
        if self.table is not None:
            return f"rows of {self.parameter} in pages by {self.table.name}"
        if self.offsets is not None:
            return f"{'the pieces' if self.stack else 'a piece'} of {self.parameter} by {self.offsets.name}"
        return f"axis {self.axis} of {self.parameter} ({self.length})"

    @property
    def instead(self) -> str:                          # type: ignore[override]
        return (f"loops are for m, n in gp.parallel(...) and for k in gp.sequential(...), and its length is "
                f"{self.parameter}.shape[{self.axis}]")

    @cached_property
    def _identity(self) -> tuple[Any, ...]:
        more = ("" if x is None else x.name for x in (self.offsets, self.table))
        return self.parameter, self.axis, self.stack, self.group, *more

    def _same(self, other: Any) -> bool:
        return bool(self._identity == other._identity)

    def __hash__(self) -> int:
        return hash(self._identity)


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
    rows and columns of a product.

    Of a stack's index ``h // 4`` is an index, too, whose ``base`` is h: four neighbours of the stack share a matrix. Places
    of a piece's index count from where the piece begins, ``origin``; ``piece``: which one it is. Of rows in pages ``line``
    is the one of the table, and `page` an index, too, whose ``base`` it is. Of ``x[index[m], k]`` the index of x's rows has
    m as its ``base``, and ``lookup``: the array that says where they are."""

    extent: ProgramAxis
    name: str = ""
    start: int = 0
    stop: int = 0
    of_tile: bool = False
    is_over: bool = False
    twin: Index | None = None
    limit: int | None = None           # where rounds end before the axis does, where numbers are computed
    base: Index | None = None
    piece: Index | None = None
    line: Index | None = None
    origin: int = 0
    lookup: Parameter | None = None
    groups: dict[Any, Index] = field(default_factory=dict)         # made of it, by how many share a matrix; 0: its page

    def __floordiv__(self, group: Any) -> Index:       # type: ignore[override]
        if not self.stack or self.is_page:
            raise refused(TypeError, f"{self!r} // {group!r}: {self!r} is {'a page' if self.stack else 'a block'}; only "
                                     "an index along a stack, such as h // 4, has neighbours that share a matrix")
        if isinstance(group, bool) or not isinstance(group, (int, np.integer)) or group < 1:
            raise refused(TypeError, f"{self!r} // {group!r}: how many of a stack share a matrix must be a whole number "
                                     "of 1 or more")
        if self.base is not None:
            return self.base // (self.extent.group * int(group))
        if group not in self.groups and group > 1:
            if self.extent.length % group:
                raise refused(ValueError, f"{self!r} // {group}: {self.extent.parameter} has {self.extent.length} matrices, "
                                          f"no multiple of {group}")
            extent = replace(self.extent, length=self.extent.length // int(group), group=int(group))
            self.groups[int(group)] = Index(extent, "", self.start // int(group), base=self)
        return self.groups[int(group)] if group > 1 else self

    @property
    def page(self) -> Index:
        """Of rows in pages: which page they are in, ``k[n.page, h, n]``."""
        if not self.is_paged:
            raise refused(AttributeError, f"{self!r}.page: {self!r} is a block of {self.extent}, which is in no pages; "
                                          f"write for {self!r} in gp.sequential(gp.paged(k, table)[b])")
        if 0 not in self.groups:
            self.groups[0] = Index(replace(self.extent, axis=0, length=self.extent.pages, stack=True), "", base=self)
        return self.groups[0]

    is_paged = property(lambda self: self.extent.table is not None and not self.stack)
    is_page = property(lambda self: self.extent.table is not None and self.stack)

    @property
    def of_loop(self) -> Index:
        """The loop's variable that it is made of."""
        return self if self.base is None else self.base

    def text(self, place: Callable[[Index], str] = lambda index: index.name) -> str:
        """Where it is, as a kernel computes it from where a loop's variable is: by that variable's name, or ``place``."""
        return place(self) if self.base is None else f"udiv({place(self.base)}, {self.extent.group})"

    def is_block_of(self, other: Any) -> bool:
        return other is self or other is self.twin or (isinstance(other, Index) and other.twin is self)

    @property
    def stack(self) -> bool:
        return self.extent.stack

    def __repr__(self) -> str:
        if self.lookup is not None:
            return f"{self.lookup.name}[{self.base!r}]"
        if self.base is not None:
            return f"{self.base!r}.page" if self.is_page else f"{self.base!r} // {self.extent.group}"
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
        raise refused(TypeError, f"{self!r} cannot be indexed: a value is used as a whole, "
                                 "and axes meet by name (x - s, not x - s[:, None]); only array arguments take indices")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise refused(TypeError, f"{self!r} cannot be assigned to: store results in array arguments, d[m, n] = ..., and "
                                 "change cells, acc = gp.zeros(m, n)")


class Place(Term):
    """Where elements are along a dimension, which stands for its index where arrays are read."""

    def __init__(self, value: Any, dim: Any):
        super().__init__(value)
        self.dim = dim


class LookedUp(Term):
    """Elements of an array of whole numbers, which stand for rows where arrays are read and stored: ``x[index[m], k]``."""

    def __init__(self, value: Any, array: Parameter, index: Index):
        super().__init__(value)
        self.array, self.index = array, index

    def of(self, x: Parameter, axis: int) -> Index:
        """The index along an axis of an array whose places these are: the same each time."""
        known, key = self.index.groups, (self.array.name, x.name, axis)
        if key not in known:
            known[key] = Index(ProgramAxis(x.name, axis, x._shape[axis]), base=self.index, piece=self.index.piece,
                               lookup=self.array)
        return known[key]


class Parameter(Arithmetic):
    """An array argument. ``data`` is the array where numbers are computed. Without indices a vector is a value."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: Any, data: Any = None):
        self.name, self.dtype, self.data, self._shape = name, dtype, data, shape

    @property
    def shape(self) -> tuple[int, ...]:
        _seen(self.name)
        return self._shape

    @property
    def rows(self) -> ProgramAxis:
        return self._extent(-2)

    @property
    def columns(self) -> ProgramAxis:
        return self._extent(-1)

    @property
    def count(self) -> ProgramAxis:
        """Of a stack of matrices, or of vectors: the first axis, one by one."""
        if len(self.shape) < 2:
            raise refused(ValueError, f"{self.name}.count: {self.name} has shape {self.shape}, which is not a stack")
        return ProgramAxis(self.name, 0, self.shape[0], True)

    @property
    def counts(self) -> tuple[ProgramAxis, ...]:
        """Of stacks of matrices, such as batch and heads: all axes in front of rows and columns, one by one."""
        return tuple(ProgramAxis(self.name, axis, length, True) for axis, length in enumerate(self.shape[:-2]))

    def _extent(self, axis: int) -> ProgramAxis:
        rank = len(self.shape)
        if rank < -axis:
            raise refused(ValueError, f"{self.name} has shape {self.shape} and no rows; use {self.name}.columns")
        return ProgramAxis(self.name, rank + axis, self.shape[axis])

    def __getitem__(self, key: Any) -> Any:
        key, dims = self.place(key)
        value = current().load(self, key, dims)
        is_element = len(self._shape) == len(dims) == 1 and not key[0].stack and np.dtype(self.dtype) in COUNTED
        return LookedUp(value, self, key[0]) if is_element and key[0].lookup is None else Term(value)

    def __setitem__(self, key: Any, value: Any) -> None:
        if any(isinstance(x, slice) for x in (key if isinstance(key, tuple) else (key,))):
            raise refused(TypeError, f"{self.name}[{shown((key,))}] is stored: results are stored without slices")
        key, dims = self.place(key)

        def said() -> str:
            return f"{self.name}[{shown(key)}]"

        value, meets = current().met(said, dims, current().lift(value))
        if set(meets) - set(dims):
            raise refused(ValueError, f"{said()} has the dimensions ({shown(dims)}), but the value has "
                                      f"({shown(value.dims)}); each element must get one value")
        current().store(self, key, dims, value)

    def place(self, key: Any) -> tuple[tuple, tuple]:
        """(indices, dimensions of what is there): a stack's index takes its axis away, an axis without index is whole, or as
        long as a slice says."""
        key = key if isinstance(key, tuple) else (key,)
        if len(key) > len(self.shape):
            raise refused(ValueError, f"{self.name} has shape {self.shape}, but {len(key)} indices are given")
        key, first = self._without_slices(key)
        key = tuple(x.dim if isinstance(x, Place) else x.of(self, axis) if isinstance(x, LookedUp) else x
                    for axis, x in enumerate(key))
        for axis, index in enumerate(key):
            if not isinstance(index, Index):
                raise refused(TypeError, f"{self.name}[...]: index {axis} is {index!r}; use variables of parallel(...) and "
                                         "sequential(...) as indices")
            current().use(index, self, axis, key)
        whole = tuple(Axis(size, (self.name, axis)) for axis, size in enumerate(self.shape) if axis >= len(key))
        current().axes.whole.update((self.name, axis) for axis in range(len(key), len(self.shape)))
        dims = (index if index.lookup is None else index.base for index in key if not index.stack)
        return key, (*dims, *(whole if first is None else (*whole[:-1], first)))

    def _without_slices(self, key: tuple) -> tuple[tuple, Axis | None]:
        """The indices of ``k[n, :v.columns]``, and as how many of the last axis' elements: its first ones."""
        count = next((n for n, x in enumerate(key) if isinstance(x, slice)), len(key))
        indices, slices = key[:count], [x if isinstance(x, slice) else None for x in key[count:]]
        stop = slices[-1].stop if slices and slices[-1] is not None else None
        if all(x == slice(None) for x in slices):
            return indices, None
        is_first = slices[:-1] == [slice(None)] * (len(slices) - 1) and slices[-1] == slice(stop)
        is_first = is_first and len(key) == len(self._shape)
        if not isinstance(stop, ProgramAxis) or not is_first or stop.stack or stop.offsets or stop.table:
            raise refused(TypeError, f"{self.name}[...]: a slice is of the first columns, as many as an axis has: "
                                     f"{self.name}[n, :v.columns]")
        if stop.length > self._shape[-1]:
            raise refused(ValueError, f"{self.name}[..., :{stop!r}]: {self.name} has shape {self._shape}, and fewer columns")
        of = stop.parameter, stop.axis
        current().axes.whole.add(of)
        return indices, Axis(stop.length, of)


def is_of_rounds(dims: tuple) -> bool:
    """Whether a value has one number for each row of a round's block."""
    return len(dims) == 1 and isinstance(dims[0], Index) and not (dims[0].of_tile or dims[0].stack or dims[0].twin)


def unique(wanted: str, taken: Collection[str]) -> str:
    """The name as it is wanted, or the first of ``wanted_2``, ``wanted_3`` and so on that is not taken.

    >>> unique("k", ["k", "k_2"])
    'k_3'
    """
    return next(name for n in itertools.count(1) if (name := wanted if n == 1 else f"{wanted}_{n}") not in taken)


def number_text(number: float) -> str:
    """A number in a text.

    >>> number_text(0.5), number_text(-math.inf)
    ('0.5', '-math.inf')
    """
    return repr(number) if math.isfinite(number) else "math.nan" if math.isnan(number) else f"{'-' * (number < 0)}math.inf"


def joined(op: str, dims: list[tuple]) -> tuple:
    """The dimensions of an element-wise result: of the operand that has most, and no others."""
    longest: tuple = max(dims, key=len, default=())
    found = tuple(dict.fromkeys((*longest, *(d for each in dims for d in each))))
    if len(found) > 2:
        raise refused(ValueError, f"{op} of values of ({') and ('.join(map(shown, dims))}): a matrix has at most two "
                                  "dimensions")
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
            raise refused(ValueError, f"a cell of ({shown(self.value.dims)}) is given a value of ({shown(value.dims)}); a "
                                      "cell must keep its dimensions")
        self.value = current().fitted(value, self.value.dims)
