"""Element-wise values of a round as text: a function of one element, and the line that applies it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gemmkit.programs.chains.algebra import LOWERED
from gemmkit.programs.chains.chain import Chain
from gemmkit.programs.chains.ranges import bounds_of
from gemmkit.programs.chains.reads import READ
from gemmkit.programs.expressions import JOINTS, SIGNS, is_converted
from gemmkit.programs.interpreter import COMPARISONS, CONDITIONS
from gemmkit.programs.trace import Value
from gemmkit.programs.values import Axis, Index

CALLS = dict(exp2="exp2", log2="log2", reciprocal="reciprocal", tanh="tanh", sqrt="math.sqrt", max="maximum",
             finite="finite", fma="fma", difference="difference")
EXACT = 2.0**24                        # whole numbers up to it are float32
BEYOND = 256                           # places that a tile's last block has behind an array's end, at most
ELEMENTWISE = frozenset({*SIGNS, *JOINTS, *CALLS, LOWERED, "neg", "where", "inside"})


def is_whole_number(x: Value) -> bool:
    """Whether a value is a place or made of places, which are counted in whole numbers; a length; or a condition."""
    if x.op in CONDITIONS or x.op in ("coordinate", "length"):
        return True
    if x.op not in ("add", "sub", "mul", "neg", "max"):
        return False
    return all(map(_may_be_whole, x.args)) and any(map(is_whole_number, x.args))


def _may_be_whole(x: Value) -> bool:
    return is_whole_number(x) or (x.op == "const" and not x.dims and float(x.data).is_integer())


def largest(x: Value) -> float:
    """A bound of the size of a whole number that is made of places; infinity where there is none."""
    if x.op == "const":
        return abs(float(x.data))
    if x.op == "coordinate":
        extent = x.data.size if isinstance(x.data, Axis) else x.data.extent.size
        return float(extent + BEYOND)
    if x.op not in ("add", "sub", "mul", "neg"):
        return math.inf
    sizes = [largest(y) for y in x.args]
    return math.prod(sizes) if x.op == "mul" else sum(sizes)


def scalar_text(x: Value, top: bool = False) -> str:
    """A number that tiles and rounds do not change, of the kernel's scalars; ``top``: without brackets around all of it."""
    if x.op == "const":
        return repr(float(x.data)) if math.isfinite(x.data) else "math.inf" if x.data > 0 else "-math.inf"
    if x.op == "scalar":
        return f"sizes.{x.data}"
    args = [scalar_text(y) for y in x.args]
    if x.op in CALLS:
        if x.op != "max":                              # which has operands as weak as literals
            args = [f"convert(F32, {arg})" if y.op == "const" else arg for arg, y in zip(args, x.args)]
        return f"{CALLS[x.op]}({', '.join(args)})"
    text = (f"{args[0]} {SIGNS[x.op]} {args[1]}" if x.op in SIGNS else f"-{args[0]}" if x.op == "neg" else
            JOINTS[x.op].format(*args) if x.op in JOINTS else f"{args[1]} if {args[0]} else {args[2]}")
    return text if top else f"({text})"


@dataclass
class Element:
    """``known``: the name of a value that is computed elsewhere, None for one that is written here. ``place``: where a tile
    or a round is, by its index. ``lowered``: what parts of exponents call the three
    operands of their fma ("": by their own names); others are written as differences."""

    chain: Chain
    root: Value
    known: Callable[[Value], str | None]
    place: Callable[[Index], str]
    lowered: Mapping[Value, tuple[str, ...]]
    zips: list[str] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)
    arrays: set[str] = field(default_factory=set)
    rows_used: bool = False

    def text(self) -> str:
        made = self.of(self.root, top=True)
        if not self.zips and not self.rows_used:
            made = f"convert(F32, {made})"
        return made

    @property
    def is_rows(self) -> bool:
        return len(self.root.dims) == 1

    def of(self, x: Value, top: bool = False, whole: bool = False) -> str:
        if x.op == "coordinate":
            return f"({self._place(x.data)})"
        if x.op == "load":
            return self._load(x)
        name = None if x is self.root else self.known(x)
        if name is not None:
            return self._outside(x, name)
        if x.op == "const":
            return str(int(x.data)) if whole else scalar_text(x)
        return self._operation(x, top)

    def _outside(self, x: Value, name: str) -> str:
        if not x.dims:
            short = name.removeprefix("sizes.").removeprefix("before_")
            self.extra[short] = name
            return short
        if len(x.dims) == len(self.root.dims):
            if not self.is_rows or not self.zips or name == self.zips[0]:
                if name not in self.zips:
                    self.zips.append(name)
                return name
            self.extra[name] = name
            return f"lane_value({name}, i)"
        self.rows_used = True
        self.extra[name] = name
        return f"{'column' if x.op == READ else 'row'}_value({name}, i)"

    def _operation(self, x: Value, top: bool) -> str:
        if x.op == READ:
            return self.of(x.args[0])
        if x.op == LOWERED and x not in self.lowered:
            return f"({self.of(x.args[3])} * {self.of(x.args[4])})"
        if x.op == LOWERED:
            args = [self._outside(y, name) if name else f"convert(F32, {self.of(y)})"
                    for y, name in zip(x.args, self.lowered[x])]
            return f"fma({', '.join(args)})"
        if x.op in ("lt", "le") and not self.is_rows and len(self.root.dims) == 2:
            compared = self._compared(x)
            if compared is not None:
                return compared
        whole = is_whole_number(x) and (x.op not in COMPARISONS or all(map(_may_be_whole, x.args)))
        are_floats = not whole and x.op != "where"
        args = [self._float(y) if are_floats and is_whole_number(y) and y.op not in CONDITIONS else
                self.of(y, whole=whole and _may_be_whole(y)) for y in x.args]
        if x.op not in ("fma", "difference"):
            args = [f"convert(F32, {a})" if is_converted(x, y) else a for a, y in zip(args, x.args)]
        else:                                          # of float32, and nothing weaker
            weak = "const", "load", "coordinate", READ
            args = [a if y.op not in weak and self.known(y) is not None else f"convert(F32, {a})"
                    for a, y in zip(args, x.args)]
        if x.op in JOINTS:
            return JOINTS[x.op].format(*args) if top else f"({JOINTS[x.op].format(*args)})"
        if x.op in SIGNS:
            return f"{args[0]} {SIGNS[x.op]} {args[1]}" if top else f"({args[0]} {SIGNS[x.op]} {args[1]})"
        if x.op == "neg":
            return f"-{args[0]}" if top else f"(-{args[0]})"
        if x.op == "where":
            text = f"{args[1]} if {args[0]} else {args[2]}"
            return text if top else f"({text})"
        if x.op == "inside":
            index = x.data.name
            self.extra["room"] = f"{self.chain.stop} - {index} - column"
            text = f"{args[0]} if column_at(i) < room else {args[1]}"
            return text if top else f"({text})"
        return f"{CALLS[x.op]}({', '.join(args)})"

    # -- places -------------------------------------------------------------------------------------------------------

    def _compared(self, x: Value) -> str | None:
        """A condition that bounds the place by the row: each row's bound, counted from the thread's first place, is worked
        out once, and compared with constants."""
        found = bounds_of(x, self.chain.rows, self.chain.index)
        if found is None or self.root.dims[1] is not self.chain.index:
            return None
        for bounds, kind, sign in ((found[0], "begins", ">="), (found[1], "ends", "<")):
            for bound in bounds:
                row = f"{self.place(self.chain.rows)} + group * 64 + own_row()"
                given = f"limits({row}, {self.place(self.chain.index)} + column, {bound.slope}, {bound.shift})"
                name, n = kind, 1
                while self.extra.get(name, given) != given:
                    n += 1
                    name = f"{kind}_{n}"
                self.extra[name] = given
                return f"(column_at(i) {sign} row_value({name}, i))"
        return None

    def _float(self, x: Value) -> str:
        """A whole number as float32. Of places it is made of where the thread's first is, converted once: what a conversion
        takes on each element is what an exponential takes."""
        if largest(x) >= EXACT:
            return f"convert(F32, {self.of(x, whole=True)})"
        if x.op == "coordinate":
            name, begin, further = self._begin(x.data)
            self.extra[f"{name}_float"] = f"convert(F32, {begin})"
            return f"({name}_float + convert(F32, {further}))"
        args = [scalar_text(y) if y.op == "const" else self._float(y) for y in x.args]
        return f"(-{args[0]})" if x.op == "neg" else f"({args[0]} {SIGNS[x.op]} {args[1]})"

    def _place(self, dim: Any) -> str:
        name, begin, further = self._begin(dim)
        self.extra[name] = begin
        return f"{name} + {further}"

    def _begin(self, dim: Any) -> tuple[str, str, str]:
        """Where the thread's first place is: its name and its expression; and how much further the element's is."""
        if dim is self.chain.rows:
            return "row", f"carried({self.place(dim)} + group * 64 + own_row())", "i * 8" if self.is_rows else "row_of(i)"
        at = "column_of(i)" if self.root.op == READ else "column_at(i)"
        if isinstance(dim, Axis):
            return "column", "column", at
        return "place", f"carried({self.place(dim)} + column)", at

    def _load(self, x: Value) -> str:
        parameter, key = x.data
        self.arrays.add(parameter.name)
        self.extra[parameter.name] = parameter.name
        at = []
        for index in key:
            if index.stack:
                self.extra[index.name] = self.place(index)
                at.append(index.name)
            else:
                last = f"last_{index.name}"
                self.extra[last] = f"sizes.{index.name} - 1"
                at.append(f"min({self._place(index)}, {last})")
        at += [self._place(dim) for dim in x.dims if isinstance(dim, Axis)]
        return f"{parameter.name}[{', '.join(at)}]"

    # -- the whole ----------------------------------------------------------------------------------------------------

    def printed(self, values: int) -> tuple[str, Callable[[str], str]]:
        """The function but for its name, and the expression that applies the function of a name."""
        text = self.text()
        extra = "".join(f", {name}" for name in self.extra)
        given = "".join(f", {argument}" for argument in self.extra.values())
        if not self.zips:
            return f"(i{extra}):\n    return {text}\n", lambda f: f"generate({values}, {f}{given})"
        if len(self.zips) == 1 or self.is_rows:
            return f"({self.zips[0]}, i{extra}):\n    return {text}\n", lambda f: f"apply({f}, {self.zips[0]}{given})"
        zips = ", ".join(self.zips)
        return (f"(values, i{extra}):\n    {zips} = values\n    return {text}\n",
                lambda f: f"apply({f}, split(interleave(({zips})), {len(self.zips)}){given})")
