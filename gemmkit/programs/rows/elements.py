"""Elements of rows as text: a function of one element, with those of other rows and of arrays by columns that it meets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gemmkit.programs.chains.elements import is_whole_number
from gemmkit.programs.expressions import JOINTS, SIGNS
from gemmkit.programs.rows.form import FOLDS, is_column, is_vector
from gemmkit.programs.rows.steps import Steps
from gemmkit.programs.trace import Value
from gemmkit.programs.values import Axis

DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
#: Functions as the text calls them, and what it imports for that.
CALLS = dict(exp2="exp2", log2="log2", reciprocal="reciprocal", tanh="math.tanh", sqrt="math.sqrt", max="max", min="min")
FLOAT32 = frozenset({"exp2", "log2", "reciprocal", "cast", "scalar", *FOLDS})
COLUMN = "column"                      # what an element's place in its row is called
PART = "part_"                         # what is needed more than once in a function has such a name, which nothing else has


@dataclass
class Element:
    """``name``: what a value of a row, and an element of a row, is called. ``is_made``: the elements become a row, so that
    its own name is not what they are."""

    steps: Steps
    root: Value
    name: Callable[[Value], str]
    is_made: bool = False
    rows: list[Value] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    needs: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    text: str = field(init=False)
    _known: dict[Value, str] = field(default_factory=dict)
    _uses: dict[Value, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for x in self.steps.within(self.root) if self.is_made or not self._has_name(self.root) else ():
            for y in x.args if not self._has_name(x) else ():
                self._uses[y] = self._uses.get(y, 0) + (2 if x.op == "finite" else 1)
        self.text = bare(self.of(self.root))

    def _has_name(self, x: Value) -> bool:
        return (x in self.steps.rows or x in self.steps.named) and not (self.is_made and x is self.root)

    def of(self, x: Value, whole: bool = False) -> str:
        """``whole``: as a whole number, which places are."""
        if x.op == "const":
            return str(int(x.data)) if whole else self._number(x.data)
        if x.op == "coordinate":
            return COLUMN if isinstance(x.data, Axis) else self._outside(x.data.name)
        if self._has_name(x):
            return self._beside(x) if is_vector(x) else self._outside(self.name(x))
        if x.op == "load":
            return self._beside(x)
        if x in self._known:
            return self._known[x]                      # it has a line of its own
        text = self._operation(x)
        if self._uses.get(x, 0) > 1:
            name = f"{PART}{len(self._known)}"
            self.lines.append(f"{name} = {bare(text)}")
            self._known[x] = text = name
        return text

    def _number(self, number: float) -> str:
        if math.isfinite(number):
            return repr(float(number))
        self.needs.add("math")
        return "math.nan" if math.isnan(number) else "math.inf" if number > 0 else "-math.inf"

    def _outside(self, name: str) -> str:
        if name not in self.outside:
            self.outside.append(name)
        return name

    def _beside(self, x: Value) -> str:
        if x not in self.rows:
            self.rows.append(x)
        return self.name(x)

    def _operation(self, x: Value) -> str:
        if x.op == "where":
            condition, one, other = self.of(x.args[0]), *(self._float(y) for y in x.args[1:])
            if x.args[1].op != "where":                # within another's first choice it keeps its brackets
                one = bare(one)
            text = f"({one} if {bare(condition)} else {bare(other)})"
            return text if any(map(self.is_float, x.args[1:])) else self._converted(text)
        if x.op in JOINTS:
            return f"({JOINTS[x.op].format(*map(self.of, x.args))})"
        if x.op == "cast":
            kind = DTYPES[np.dtype(x.data).name]
            self.needs.add(kind)
            return self._converted(f"convert({kind}, {bare(self._float(x.args[0]))})")
        whole = is_whole_number(x) and all(is_whole_number(y) or (y.op == "const" and float(y.data).is_integer())
                                           for y in x.args)
        if x.op == "sub" and not whole and "mul" in (x.args[0].op, x.args[1].op):
            one, other = (self.of(y) if self.is_float(y) else self._converted(self.of(y)) for y in x.args)
            self.needs.add("difference")               # a GPU would fuse the product: a row's largest is 0 from itself
            return f"difference({bare(one)}, {bare(other)})"
        if x.op in SIGNS:
            one, other = ([self.of(y, True) for y in x.args] if whole else
                          [self._float(y, x.args[1 - n]) for n, y in enumerate(x.args)])
            binds = [self._binds(y) for y in x.args]
            one = bare(one) if binds[0] and (binds[0] == 2 or x.op != "mul") and x.op != "div" else one
            other = bare(other) if binds[1] == 2 and x.op != "mul" and x.op != "div" else other
            return f"({one} {SIGNS[x.op]} {other})"
        args = [self.of(y, True) if whole else self._float(y) for y in x.args]
        if x.op == "neg":
            return f"(-{args[0]})"
        if x.op == "finite":
            self.needs.add("math")
            return f"(0.0 if {args[0]} == -math.inf else {args[0]})"
        self.needs |= {"math"} if CALLS[x.op].startswith("math.") else {CALLS[x.op]}
        return f"{CALLS[x.op]}({', '.join(map(bare, args))})"

    def _binds(self, x: Value) -> int:
        """How closely a value's text binds where its brackets may go: 2 a product, 1 a sum, 0 anything else."""
        is_inline = not self._has_name(x) and x not in self._known
        return {"mul": 2, "add": 1, "sub": 1}.get(x.op, 0) if is_inline else 0

    def _float(self, x: Value, beside: Value | None = None) -> str:
        """In float32: an array's element by columns is of its own dtype, unless what it meets is in float32."""
        text = self.of(x)
        if x.op == "const" or self.is_float(x) or (is_narrow(x) and beside is not None and self._widens(beside)):
            return text
        return self._converted(text)

    def _converted(self, text: str) -> str:
        self.needs |= {"convert", "F32"}
        return f"convert(F32, {bare(text)})"

    def _widens(self, x: Value) -> bool:
        """Whether what a value meets becomes float32. (`math`'s functions give Python's numbers in the emulator, which do
        not.)"""
        return self._has_name(x) or x.op in FLOAT32 or (x.op in ("add", "sub", "mul") and any(map(self._widens, x.args)))

    def is_float(self, x: Value) -> bool:
        """Whether a value's text is in float32: not a constant, which is as wide as what it meets."""
        if self._has_name(x) or x.op in FLOAT32:
            return True
        if x.op in ("const", "coordinate", "load") or is_whole_number(x):
            return x.op == "load" and not is_narrow(x)
        return any(self.is_float(y) or is_narrow(y) or is_whole_number(y) for y in x.args) or x.op == "where"


def is_narrow(x: Value) -> bool:
    return x.op == "load" and is_column(x) and np.dtype(x.data[0].dtype).name != "float32"


def bare(text: str) -> str:
    """Without the brackets around all of it."""
    depth = 0
    for n, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and n < len(text) - 1:
            return text
    return text[1:-1] if text.startswith("(") else text
