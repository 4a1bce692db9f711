"""A drawn program by NumPy in float64, and beside each value a bound of what a kernel's may be off.

Kernels compute in float32, and round what products take and what is stored to 16 bits. Each operation passes on the errors of what it
is given and adds its own: of an addition in units of what is added, since compilers reassociate; of a product of n terms n units of the
sum of their sizes. A condition whose sides are closer than their errors may turn out either way, so that a value is off by what the
two differ.

Tiles are computed at once, stacks one by one, and rounds in blocks of the plan's length, in the program's order: a program may depend on
how long its rounds are (a sum that is cut off after each), and then its kernel's must be the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.drawn_programs.syntax import Add, Cell, Expr, Let, Loop, Once, Over, Put, Source, Statement, Store, expressions

__all__ = ["Bounded", "Numbers", "computed", "rounding"]

UNIT = 2.0 ** -22                      # of one operation in float32: some two roundings, approximate exponentials and reciprocals
TANH = 2.0 ** -10                      # the special function unit's
LEAST = 1e-36                          # what is flushed to zero
LARGEST = 1e37                         # what may overflow on the way
DTYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


class Unbound(Exception):
    """A name that has no value: the program was shrunk too far."""


@dataclass
class Bounded:
    """``error`` bounds what each element of a kernel's may be off; of a condition it is where it may be otherwise. It is -1 of elements of a
    result that nothing is stored in."""

    dims: tuple[str, ...]
    value: np.ndarray
    error: np.ndarray

    def over(self, dims: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Both with these dimensions, of length 1 where there are none."""
        order = [self.dims.index(dim) for dim in dims if dim in self.dims]
        at = tuple(slice(None) if dim in self.dims else None for dim in dims)
        return self.value.transpose(order)[at], self.error.transpose(order)[at]


def rounding(dtype: str, value: np.ndarray) -> np.ndarray:
    """What a rounding to a type is off, at most."""
    if dtype == "float32":
        return np.abs(value) * 2.0 ** -24 + LEAST
    about = ml_dtypes.finfo(DTYPES[dtype])
    half = np.abs(value) * float(about.eps) / 2 + float(about.smallest_subnormal) / 2
    return np.where(np.abs(value) * (1 + float(about.eps)) > float(about.max), np.inf, half)


def _settled(dims: tuple[str, ...], value: np.ndarray, error: np.ndarray) -> Bounded:
    """Nothing is claimed of what may overflow; what is infinite or NaN without doubt is so in a kernel, too."""
    value, error = np.broadcast_arrays(value, error)
    error = np.where(np.isnan(error), np.where(np.isfinite(value), np.inf, 0.0), error)
    return Bounded(dims, np.array(value), np.where(np.isfinite(value) & (np.abs(value) > LARGEST), np.inf, error))


def _exp(x: Any, ex: Any) -> tuple[Any, Any]:
    value = np.exp(x)
    return value, value * (np.expm1(np.minimum(ex, 700.0)) + UNIT * (1 + np.minimum(np.abs(x), 200.0))) + LEAST


def _log(x: Any, ex: Any) -> tuple[Any, Any]:
    value = np.log(x)
    near = np.where(np.abs(x) > ex, ex / np.maximum(np.abs(x) - ex, 1e-300), np.inf)
    return value, np.where(ex == 0, 0.0, near) + UNIT * (1 + np.abs(value))


def _sqrt(x: Any, ex: Any) -> tuple[Any, Any]:
    value = np.sqrt(x)
    low = np.where(x - ex >= 0, np.sqrt(np.maximum(x - ex, 0.0)), np.nan)
    error = np.maximum(np.sqrt(np.maximum(x, 0) + ex) - value, value - low) + UNIT * value + LEAST
    return value, np.where(ex == 0, UNIT * np.abs(value) + LEAST, error)


def _divided(x: Any, ex: Any, y: Any, ey: Any) -> tuple[Any, Any]:
    value = x / y
    error = np.where(np.abs(y) > ey, (ex + np.abs(value) * ey) / np.maximum(np.abs(y) - ey, 1e-300), np.inf)
    return value, np.where((ey == 0) & (ex == 0), 0.0, error) + UNIT * np.abs(value) + LEAST


BINARY: dict[str, Callable[..., tuple[Any, Any]]] = {
    "add": lambda x, ex, y, ey: (x + y, ex + ey + UNIT * (np.abs(x) + np.abs(y))),
    "sub": lambda x, ex, y, ey: (x - y, ex + ey + UNIT * (np.abs(x) + np.abs(y))),
    "mul": lambda x, ex, y, ey: (x * y, _times(x, ey) + _times(y, ex) + ex * ey + UNIT * np.abs(x * y) + LEAST),
    "div": _divided,
    "max": lambda x, ex, y, ey: (np.maximum(x, y), np.maximum(ex, ey)),
    "min": lambda x, ex, y, ey: (np.minimum(x, y), np.maximum(ex, ey))}
UNARY: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "neg": lambda x, ex: (-x, ex), "abs": lambda x, ex: (np.abs(x), ex), "exp": _exp, "log": _log, "sqrt": _sqrt,
    "tanh": lambda x, ex: (np.tanh(x), np.minimum(ex, 2.0) + TANH * np.abs(np.tanh(x)) + LEAST),
    "erf": lambda x, ex: (_ERF(x), np.minimum(1.13 * ex, 2.0) + 4 * UNIT * np.abs(_ERF(x)) + LEAST),
    "finite": lambda x, ex: (np.where(x == -np.inf, 0.0, x), ex)}
_ERF = np.vectorize(math.erf, [float])


def _root(x: Any, ex: Any, power: float) -> tuple[Any, Any]:
    value = x ** power
    error = np.maximum((x + ex) ** power - value, value - np.maximum(x - ex, 0.0) ** power)
    return value, np.where(ex == 0, 0.0, error) + 8 * UNIT * value + LEAST


COMPARED: dict[str, Callable[[Any, Any], Any]] = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
                                                  "eq": np.equal, "ne": np.not_equal}


def _times(x: Any, error: Any) -> Any:
    """A factor times an error, which is nothing where there is none, however large the factor."""
    return np.where(error == 0, 0.0, np.abs(x) * error)


class Numbers:
    """``sizes`` of classes, ``arrays`` by name, ``blocks``: how long the rounds of an index are."""

    def __init__(self, source: Source, sizes: dict[str, int], arrays: dict[str, np.ndarray], blocks: dict[str, int]):
        self.source, self.sizes, self.blocks = source, sizes, blocks
        self.given = {array.name: array for array in source.arrays}
        self.held = {name: np.asarray(x, np.float64) for name, x in arrays.items() if self.given[name].role != "result" or self.given[name].style == "held"}
        self.results = {a.name: Bounded(a.dims, *(np.full([sizes[dim] for dim in a.dims], fill) for fill in (np.nan, -1.0)))
                        for a in source.arrays if a.role == "result"}
        self.at: dict[str, int | slice] = {}
        self.of: dict[str, str] = {}
        self.origin: dict[str, int] = {}                # of an index along a piece: where this begins
        self.ends: dict[str, int] = {}                  # how many places there are along an index
        self.lines: dict[str, tuple[str, ...]] = {}     # of an index of rows in pages: the table, and which of its lines
        self.known: dict[str, Bounded] = {}

    def run(self) -> dict[str, Bounded]:
        """The results by name."""
        with np.errstate(all="ignore"):
            self.do(self.source.loop)
        return self.results

    # -- statements ---------------------------------------------------------------------------------------------------

    def do(self, x: Statement) -> None:
        if isinstance(x, Loop):
            self.loop(x, x.over)
        elif isinstance(x, Once):
            for held in x.body:
                self.do(held)
        elif isinstance(x, Cell):
            begin = self.of_expression(x.begin) if isinstance(x.begin, Expr) else self.constant(x.begin)
            self.known[x.name] = self.fitted(begin, x.dims)
        elif isinstance(x, Let):
            self.known[x.name] = self.of_expression(x.value)
        elif isinstance(x, Add):
            self.known[x.name] = self.fitted(self.operation("add", [self.named(x.name), self.of_expression(x.value)]), self.named(x.name).dims)
        elif isinstance(x, Put):
            self.known[x.name] = self.fitted(self.of_expression(x.value), self.named(x.name).dims)
        elif isinstance(x, Store):
            self.store(x)
        else:
            raise Unbound(f"{x} is not interpreted")

    def loop(self, x: Loop, over: tuple[Over, ...]) -> None:
        if not over:
            for held in x.body:
                self.do(held)
            return
        (first, *rest), size = over, self.sizes[over[0].of]
        self.of[first.index] = first.of
        origin, of_page = 0, 0
        if first.piece and self.given[first.piece[0]].role == "table":
            of_page, self.lines[first.index] = self.sizes["R"], first.piece
        elif first.piece:
            which = self.placed(first.piece[1])
            assert isinstance(which, int)
            origin, after = (min(max(int(x), 0), size) for x in self.held[first.piece[0]][which:which + 2])
            size = max(0, after - origin)
        end = size if x.stop is None else max(0, min(size, int(self.of_expression(x.stop).value)))
        self.origin[first.index], self.ends[first.index] = origin, end
        step = 1 if first.stack else end if x.kind == "parallel" else self.blocks.get(first.index, 64)
        start = 0 if x.start is None else max(0, int(self.of_expression(x.start).value))
        aligned = start - start % math.gcd(step, of_page) if of_page else start                # blocks do not lie across pages
        for begin in range(aligned, end, step) if end > start else ():
            self.at[first.index] = begin if first.stack else slice(origin + max(begin, start), origin + min(begin + step, end))
            self.loop(x, tuple(rest))

    def store(self, x: Store) -> None:
        array = self.given[x.array]
        dims = (*(index for index in x.indices if isinstance(self.at[index], slice)), *(f"*{c}" for c in array.dims[len(x.indices):]))
        value = self.fitted(self.of_expression(x.value), dims)
        place = tuple(self.at[index] for index in x.indices)
        result = self.results[x.array]
        result.value[place] = value.value
        result.error[place] = value.error + rounding(array.dtype, value.value)
        beyond = np.isfinite(result.value[place]) & ~np.isfinite(result.error[place])
        result.error[place] = np.where(beyond, np.inf, np.where(np.isfinite(result.value[place]), result.error[place], 0.0))

    # -- expressions --------------------------------------------------------------------------------------------------

    def named(self, name: str) -> Bounded:
        if name not in self.known:
            raise Unbound(name)
        return self.known[name]

    def constant(self, x: float) -> Bounded:
        return Bounded((), np.array(x), np.array(abs(x - float(np.float32(x))) if math.isfinite(x) else 0.0))

    def length(self, dim: str) -> int:
        if dim.startswith("*"):
            return self.sizes[dim[1:]]
        at = self.at[dim]
        assert isinstance(at, slice)
        return int(at.stop - at.start)

    def fitted(self, x: Bounded, dims: tuple[str, ...]) -> Bounded:
        if set(x.dims) - set(dims):
            raise Unbound(f"({x.dims}) is put where there is ({dims})")
        shape = [self.length(dim) for dim in dims]
        value, error = x.over(dims)
        return Bounded(dims, np.array(np.broadcast_to(value, shape)), np.array(np.broadcast_to(error, shape)))

    def of_expression(self, x: Expr) -> Bounded:
        if x.op in ("number", "whole"):
            return self.constant(x.data)
        if x.op == "scalar":
            return Bounded((), np.array(self.source.numbers[x.data]), np.array(0.0))
        if x.op == "name":
            return self.named(x.data)
        if x.op == "load":
            return self.load(*x.data)
        if x.op == "place" and isinstance(self.at.get(x.data), int):
            return Bounded((), np.array(float(self.at[x.data])), np.array(0.0))                # type: ignore[arg-type]
        if x.op == "place":
            at = self.at.get(x.data)
            begin, end = (at.start, at.stop) if isinstance(at, slice) else (0, self.length(x.data))
            return Bounded((x.data,), np.arange(begin, end, dtype=float) - self.origin.get(x.data, 0), np.zeros(end - begin))
        if x.op == "masked":
            return self.masked(*x.data, *map(self.of_expression, x.args), x.dims)
        if x.op == "dot":
            return self.product(*x.args)
        return self.operation(x.op, [self.of_expression(y) for y in x.args], x.data)

    def load(self, name: str, indices: tuple[str, ...]) -> Bounded:
        array = self.given[name]
        paged = next((index.removesuffix(".page") for index in indices if index.endswith(".page")), "")
        for index, of in zip(indices, array.dims):
            if paged and index.removesuffix(".page") == paged:
                continue
            index, _, group = index.partition(" // ")
            if index not in self.at or self.sizes[self.of[index]] != self.sizes[of] * int(group or 1):
                raise Unbound(f"{name}[{indices}]")
        if paged:
            rows, (table, which) = self.at[paged], self.lines[paged]
            assert isinstance(rows, slice)
            places, size = np.arange(rows.start, rows.stop), self.sizes["R"]
            known = {f"{paged}.page": self.held[table][self.placed(which)].astype(int)[places // size], paged: places % size}
            value = self.held[name][tuple(known[x] if x in known else self.placed(x) for x in indices)]
            return Bounded((paged, *(f"*{c}" for c in array.dims[len(indices):])), value, np.zeros_like(value))
        value = self.held[name][tuple(map(self.placed, indices))]
        dims = (*(index for index in indices if isinstance(self.placed(index), slice)), *(f"*{c}" for c in array.dims[len(indices):]))
        return Bounded(dims, value, np.zeros_like(value))

    def placed(self, index: str) -> int | slice:
        index, _, group = index.partition(" // ")
        at = self.at[index]
        return at // int(group) if group and isinstance(at, int) else at

    def product(self, x: Expr, y: Expr) -> Bounded:
        """What was computed is rounded to the other operand's type, whether a program says so or not."""
        left, right = self.of_expression(x), self.of_expression(y)
        if x.op not in ("load", "transpose", "cast"):
            dtype = next(self.given[z.data[0]].dtype for z in expressions(y) if z.op == "load")
            left = self.operation("cast", [left], ("", dtype))
        made = self.dot(left, right)
        if any(z.op == "load" and self.given[z.data[0]].dtype.startswith("float8") for z in expressions(y)):           # sums have 14 bits
            made = Bounded(made.dims, made.value, made.error + 2.0 ** -12 * (np.abs(left.value) @ np.abs(right.value)))
        return made

    def operation(self, op: str, args: list[Bounded], data: Any = None) -> Bounded:
        if op == "transpose":
            return Bounded(args[0].dims[::-1], args[0].value.T, args[0].error.T)
        if op in ("sum", "rowmax", "rowmin", "mean"):
            return self.folded(op, args[0], data)
        if op == "cast":
            (x,) = args
            if data[1] == "tf32":                      # which tensor cores make by cutting mantissas
                return Bounded(x.dims, x.value, x.error + 2.0 ** -10 * np.abs(x.value))
            return Bounded(x.dims, x.value, x.error + np.where(np.isfinite(x.value), rounding(data[1], x.value), 0.0))
        if op == "rsqrt":
            return self.operation("div", [self.constant(1.0), self.operation("sqrt", args)])
        first = (args[1], args[0], *args[2:]) if op == "where" else args
        dims = tuple(dict.fromkeys(dim for x in sorted(first, key=lambda x: -len(x.dims)) for dim in x.dims))
        pairs = [x.over(dims) for x in args]
        if op in ("called", "asked"):
            return self.called(data, *args)
        if op == "root":
            return _settled(dims, *_root(*pairs[0], data))
        if op == "power":
            made = args[0]
            for _ in range(data - 1):
                made = self.operation("mul", [made, args[0]])
            return made
        if op == "not":
            return Bounded(dims, ~pairs[0][0], pairs[0][1])
        if op in UNARY:
            return _settled(dims, *UNARY[op](*pairs[0]))
        if op in BINARY:
            return _settled(dims, *BINARY[op](*pairs[0], *pairs[1]))
        if op == "or":
            (one, may_one), (other, may_other) = pairs
            return Bounded(dims, one | other, (may_one | ~one) & (may_other | ~other) & (may_one | may_other))
        if op == "and":
            (one, may_one), (other, may_other) = pairs
            return Bounded(dims, one & other, (may_one | one) & (may_other | other) & (may_one | may_other))
        if op in COMPARED:
            (left, e_left), (right, e_right) = pairs
            errors = e_left + e_right
            near = (errors > 0) & (np.abs(left - right) <= errors + UNIT * (np.abs(left) + np.abs(right)))
            return Bounded(dims, COMPARED[op](left, right), near)
        assert op == "where", op
        (condition, may), (then, e_then), (other, e_other) = pairs
        apart = np.where(then == other, 0.0, np.abs(then - other)) + np.maximum(e_then, e_other)
        return _settled(dims, np.where(condition, then, other), np.where(may, apart, np.where(condition, e_then, e_other)))

    def masked(self, left: int | None, right: int, aligned: str, x: Bounded, other: Bounded, dims: tuple[str, ...]) -> Bounded:
        """Rows are queries and columns keys, of which the last ones belong together."""
        at_m, at_n = (self.of_expression(Expr("place", (), dim, (dim,))) for dim in dims)
        shift = self.constant(float(self.ends[dims[1]] - self.ends[dims[0]] if aligned == "lower right" else 0))
        after = self.operation("sub", [at_n, self.operation("add", [at_m, shift])])
        seen = self.operation("le", [after, self.constant(float(right))])
        if left is not None:
            seen = self.operation("and", [seen, self.operation("ge", [after, self.constant(-float(left))])])
        return self.operation("where", [self.fitted(seen, dims), self.fitted(x, dims), other])

    def called(self, name: str, x: Bounded) -> Bounded:
        """What `syntax.FUNCTIONS` do, in the operations of programs."""
        at, do = self.constant, self.operation
        if name == "leaky":
            return do("where", [do("gt", [x, at(0.0)]), x, do("mul", [at(0.25), x])])
        if name == "stepped":
            for _ in range(2):
                x = do("add", [do("mul", [at(0.5), x]), at(0.25)])
            return x
        if name == "looked_up":
            value = np.arange(7)[x.value.astype(int) % 7] / 8
            return Bounded(x.dims, value, np.zeros_like(value))
        assert name == "between", name
        return do("and", [do("lt", [at(-0.5), x]), do("lt", [x, at(0.75)])])

    def dot(self, x: Bounded, y: Bounded) -> Bounded:
        if len(x.dims) != 2 or len(y.dims) != 2 or x.dims[1] != y.dims[0]:
            raise Unbound(f"({x.dims}) @ ({y.dims})")
        size = np.abs(x.value) @ np.abs(y.value)
        error = np.abs(x.value) @ y.error + x.error @ np.abs(y.value) + x.error @ y.error
        return _settled((x.dims[0], y.dims[1]), x.value @ y.value, error + (x.value.shape[1] + 4) * UNIT * size + LEAST)

    def folded(self, op: str, x: Bounded, axis: int) -> Bounded:
        if len(x.dims) != 2:
            raise Unbound(f"{op} of ({x.dims})")
        dims, count = x.dims[:1] if axis == 1 else x.dims[1:], x.value.shape[axis]
        if op in ("rowmax", "rowmin"):
            fold, begin = (np.max, -np.inf) if op == "rowmax" else (np.min, np.inf)
            return Bounded(dims, fold(x.value, axis=axis, initial=begin), np.max(x.error, axis=axis, initial=0.0))
        value = np.sum(x.value, axis=axis)
        error = np.sum(x.error, axis=axis) + (count + 4) * UNIT * np.sum(np.abs(x.value), axis=axis) + LEAST
        return _settled(dims, value / count, error / count) if op == "mean" else _settled(dims, value, error)


def computed(source: Source, sizes: dict[str, int], arrays: dict[str, np.ndarray], blocks: dict[str, int]) -> dict[str, Bounded]:
    return Numbers(source, sizes, arrays, blocks).run()
