"""Programs as a small tree, and the Python source that is printed of it: one statement a line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["Add", "Array", "Cell", "Cut", "Expr", "Let", "Loop", "Once", "Over", "Put", "Raw", "Source", "Statement", "Store", "expressions",
           "number", "printed", "rewritten", "statements", "text_of"]


@dataclass(frozen=True)
class Expr:
    """An operation on expressions. ``dims``: what its elements go along: an index's name, or ``*C`` for all of an axis of class C.

    | op | data |
    |---|---|
    | number, scalar, name | the number; the argument's name; the local variable's name |
    | whole | the number, of Python's int |
    | load | (array, indices), which may be ``h // 2``, of a stack, and ``n.page``, of rows in pages |
    | place | the index |
    | add, sub, mul, div, neg, exp, log, tanh, sqrt, rsqrt, max, min, finite, dot, transpose | |
    | lt, le, gt, ge, eq, ne, and, or, not | |
    | abs | |
    | power | the exponent |
    | erf, root | ; the exponent, of what is not negative |
    | called, asked | the function's name, among `FUNCTIONS`: a number, or a condition, of the arguments |
    | where | whether its condition is written as a function of places |
    | masked | how many keys a row sees before its own (None: all) and after it, and how it is aligned: a mask of `gemmkit.masks` |
    | sum, rowmax, rowmin, mean | the axis |
    | cast | (as it is written, the dtype's name) |
    """

    op: str
    args: tuple[Expr, ...] = ()
    data: Any = None
    dims: tuple[str, ...] = ()


def number(x: float) -> Expr:
    return Expr("number", (), float(x))


@dataclass(frozen=True)
class Statement:
    """A line of a program, or a loop with lines."""


@dataclass(frozen=True)
class Cell(Statement):
    """``name = gp.zeros(...)``, ``full(...)`` or ``copy(...)``. ``shape``: how its dimensions are written."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[str, ...]
    begin: float | Expr


@dataclass(frozen=True)
class Let(Statement):
    name: str
    value: Expr


@dataclass(frozen=True)
class Add(Statement):
    """``cell += value``."""

    name: str
    value: Expr


@dataclass(frozen=True)
class Put(Statement):
    """``cell[:] = value``."""

    name: str
    value: Expr


@dataclass(frozen=True)
class Store(Statement):
    array: str
    indices: tuple[str, ...]
    value: Expr


@dataclass(frozen=True)
class Over:
    """An index, the class of sizes that it goes along, and the axis as it is written: ``a.rows``. ``piece``: the array of offsets, or the
    table of pages, and the index that says which of the pieces, or lines, it goes along."""

    index: str
    of: str
    axis: str
    stack: bool = False
    piece: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cut:
    """``name = gp.packed(axis, offsets)``, or ``gp.paged(array, table)``, in front of the loop."""

    name: str
    axis: str
    offsets: str
    word: str = "packed"


@dataclass(frozen=True)
class Loop(Statement):
    kind: str
    over: tuple[Over, ...]
    body: tuple[Statement, ...]
    stop: Expr | None = None
    start: Expr | None = None


@dataclass(frozen=True)
class Once(Statement):
    index: str
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Raw(Statement):
    """A line of text: a slip, which nobody interprets."""

    text: str


@dataclass(frozen=True)
class Array:
    """An array argument. ``dims``: classes of sizes. ``style``: what its elements are like; ``pitch``: rows begin at multiples of so
    many elements. ``role``: operand, element, result, length, table, or offsets, which have one element more than ``dims`` says; ``cuts``: the
    class of rows that they are of, or of pages that a table's elements are."""

    name: str
    dims: tuple[str, ...]
    dtype: str
    style: str = "normal"
    scale: float = 1.0
    pitch: int = 8
    role: str = "element"
    cuts: str = ""


@dataclass(frozen=True)
class Source:
    """A program: its arguments, and one parallel loop. ``numbers``: floating point arguments of a call; ``told``: those with which its
    plan is made, where they are others."""

    arrays: tuple[Array, ...]
    loop: Loop
    numbers: dict[str, float] = field(default_factory=dict)
    told: dict[str, float] | None = None
    helpers: tuple[str, ...] = ()
    cuts: tuple[Cut, ...] = ()

    def __hash__(self) -> int:
        return id(self)

    @property
    def names(self) -> list[str]:
        return [*(array.name for array in self.arrays), *self.numbers]

    @property
    def is_slip(self) -> bool:
        return any(isinstance(x, Raw) for x in statements(self.loop))

    def with_body(self, loop: Loop) -> Source:
        return replace(self, loop=loop)


def statements(x: Statement) -> Iterator[Statement]:
    yield x
    for y in getattr(x, "body", ()):
        yield from statements(y)


def expressions(x: Any) -> Iterator[Expr]:
    """All expressions of a statement or an expression."""
    if isinstance(x, Expr):
        yield x
        for y in x.args:
            yield from expressions(y)
    elif isinstance(x, Statement):
        for held in statements(x):
            for part in PARTS:
                found = getattr(held, part, None)
                if isinstance(found, Expr):
                    yield from expressions(found)


def rewritten(x: Any, change: Callable[[Expr], Expr]) -> Any:
    """A statement or an expression with other expressions in it, from the innermost on."""
    if isinstance(x, Expr):
        return change(replace(x, args=tuple(rewritten(y, change) for y in x.args)))
    parts = {part: rewritten(getattr(x, part), change) for part in PARTS if isinstance(getattr(x, part, None), Expr)}
    if hasattr(x, "body"):
        parts["body"] = tuple(rewritten(y, change) for y in x.body)
    return replace(x, **parts)


PARTS = "value", "begin", "stop", "start"
SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "and": "&", "or": "|",
         "dot": "@"}
CALLS = {"exp": "exp", "log": "log", "tanh": "tanh", "sqrt": "sqrt", "rsqrt": "rsqrt", "max": "maximum", "min": "minimum", "finite": "finite", "erf": "erf"}
#: Functions that programs call: with branches, loops, and an array that they have captured, whose index is a place's.
FUNCTIONS = {
    "leaky": "def leaky(x):\n    return x if x > 0 else 0.25 * x",
    "stepped": "def stepped(x):\n    for _ in range(2):\n        x = 0.5 * x + 0.25\n    return x",
    "looked_up": "TABLE = np.arange(7, dtype=np.float32) / 8\ndef looked_up(i):\n    return TABLE[i % 7]",
    "between": "def between(x):\n    return -0.5 < x and x < 0.75"}
FOLDS = {"sum": "sum", "rowmax": "max", "rowmin": "min", "mean": "mean"}


def text_of(x: Expr, places: dict[str, str] | None = None, top: bool = True) -> str:
    """``places``: what the indices' places are called within a condition's function."""
    args = [text_of(y, places, top=False) for y in x.args]
    if x.op == "number":
        return ("math.inf" if x.data > 0 else "-math.inf") if math.isinf(x.data) else repr(x.data)
    if x.op in ("scalar", "name", "whole"):
        return str(x.data)
    if x.op == "load":
        array, indices = x.data
        return f"{array}[{', '.join(indices)}]" if indices else array
    if x.op == "place":
        return places[x.data] if places and x.data in places else f"gp.place({x.data})"
    if x.op in SIGNS:
        made = f"{args[0]} {SIGNS[x.op]} {args[1]}"
        return made if top else f"({made})"
    if x.op == "neg":
        return f"-{args[0]}" if top else f"(-{args[0]})"
    if x.op == "not":
        return f"(~{args[0]})"
    if x.op == "abs":
        return f"abs({text_of(x.args[0], places)})"
    if x.op in ("called", "asked"):
        given = [x.data, *(text_of(y, places) for y in x.args)]
        return f"gp.call({', '.join(given)}{', dtype=bool' if x.op == 'asked' else ''})"
    if x.op in ("power", "root"):
        return f"{args[0]} ** {x.data}" if top else f"({args[0]} ** {x.data})"
    if x.op in CALLS:
        return f"gp.{CALLS[x.op]}({', '.join(text_of(y, places) for y in x.args)})"
    if x.op == "where":
        condition = text_of(x.args[0], places)
        if x.data:
            known = {dim: f"at_{dim.strip(chr(42))}" for dim in x.args[1].dims}
            condition = f"lambda {', '.join(known.values())}: {text_of(x.args[0], known)}"
        return f"gp.where({condition}, {text_of(x.args[1], places)}, {text_of(x.args[2], places)})"
    if x.op == "masked":
        left, right, aligned = x.data
        said = "" if aligned == "lower right" else f"aligned={aligned!r}"
        mask = f"Causal({said})" if left is None else f"Window({', '.join(filter(None, (str(left), str(right), said)))})"
        return f"gp.where(gk.masks.{mask}, {text_of(x.args[0], places)}, {text_of(x.args[1], places)})"
    if x.op == "transpose":
        return f"{args[0]}.T"
    if x.op in FOLDS:
        return f"{args[0]}.{FOLDS[x.op]}(axis={x.data})"
    assert x.op == "cast", x.op
    return f"{args[0]}.astype({x.data[0]})"


def _lines(x: Statement, indent: str) -> Iterator[str]:
    if isinstance(x, Cell):
        if isinstance(x.begin, Expr):
            yield f"{indent}{x.name} = gp.copy({text_of(x.begin)})"
        elif x.begin == 0:
            yield f"{indent}{x.name} = gp.zeros({', '.join(x.shape)})"
        else:
            yield f"{indent}{x.name} = gp.full({', '.join((*x.shape, text_of(number(x.begin))))})"
    elif isinstance(x, Let):
        yield f"{indent}{x.name} = {text_of(x.value)}"
    elif isinstance(x, Add):
        yield f"{indent}{x.name} += {text_of(x.value)}"
    elif isinstance(x, Put):
        yield f"{indent}{x.name}[:] = {text_of(x.value)}"
    elif isinstance(x, Store):
        yield f"{indent}{x.array}[{', '.join(x.indices)}] = {text_of(x.value)}"
    elif isinstance(x, Loop):
        stop = "".join(f", {word}={text_of(given)}" for word, given in (("start", x.start), ("stop", x.stop)) if given is not None)
        axes = re.sub(r"(\w+)\.counts\[0\], \1\.counts\[1\]", r"*\1.counts", ", ".join(o.axis for o in x.over))
        yield f"{indent}for {', '.join(o.index for o in x.over)} in gp.{x.kind}({axes}{stop}):"
        yield from _block(x.body, indent)
    elif isinstance(x, Once):
        yield f"{indent}with gp.once({x.index}):"
        yield from _block(x.body, indent)
    else:
        assert isinstance(x, Raw)
        yield from (indent + line for line in x.text.splitlines())


def _block(body: tuple[Statement, ...], indent: str) -> Iterator[str]:
    for held in body:
        yield from _lines(held, indent + "    ")
    if not body:
        yield f"{indent}    pass"


def printed(source: Source) -> str:
    """A module with the program ``drawn``."""
    called = dict.fromkeys(x.data for x in expressions(source.loop) if x.op in ("called", "asked"))
    head = ["import math", "", "import numpy as np", "", "import gemmkit as gk", "from gemmkit import programs as gp", "", *source.helpers,
            *(line for name in called for line in FUNCTIONS[name].split("\n")), "",
            "@gk.program", f"def drawn({', '.join(source.names)}):",
            *(f"    {cut.name} = gp.{cut.word}({cut.axis}, {cut.offsets})" for cut in source.cuts)]
    return "\n".join([*head, *_lines(source.loop, "    ")]) + "\n"
