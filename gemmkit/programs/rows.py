"""A program of rows as the passes see it: what is stored, and what each value has an element for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Mapping as Names
from dataclasses import dataclass, field, replace

import numpy as np

from gemmkit.kernels.collectives.split_k import LAST_PARTS
from gemmkit.kernels.rows import LANES, ClusterTeam, RegisterRow, RowSource, RowTeam, ThreadTeam, TurnedTeam, WarpTeam
from gemmkit.lang.errors import ConfigError
from gemmkit.programs.called import CALLED, EXTENT, F64, NUMBER, RETURNS, WIDE, Callees, is_whole_load
from gemmkit.programs.chains.elements import is_whole_number
from gemmkit.programs.launches import ROW_RESULTS, Sizes, check_launch
from gemmkit.programs.mapping import SHARED, Mapping, Printed
from gemmkit.programs.places import RowRewriter, walked
from gemmkit.programs.rounds import FOLDS, RowProgram, is_column, is_row, is_turned, is_vector, names_rows, stored_length
from gemmkit.programs.text import CALLS as OF_ELEMENTS
from gemmkit.programs.text import EARLY, JOINTS, SIGNS, bare, count_of, listed, parts_of_stacks
from gemmkit.programs.trace import CONDITIONS, StoreStatement, Value
from gemmkit.programs.values import Axis, Index, refused, unique
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuning.problems import RowsProblem, choose

# --------------------------------------------------------------------------------------------------
# What a row's threads do, in order: rows are loaded, mapped and folded, and results are stored.
#
# A row is held in registers from where it is loaded or mapped to where it is needed last. What several folds and stores
# need is mapped once where computing it again costs more than a place in the registers: exponentials and the like, and
# what stands in place of the rows that it is made of. A difference from the mean is written where it is needed.

CELLS = frozenset({"carried", "after"})         # within a loop over parts, and behind it
HELD = CELLS | {"load"}
COSTLY = frozenset({"exp", "log", "exp2", "log2", "tanh", "erf", "pow", "sqrt", "reciprocal", NUMBER})
NEVER = CONDITIONS | HELD                       # an array's row is one anyway, and a condition is no number


@dataclass(frozen=True, eq=False)
class RowStep:
    """``value``: what it makes."""

    value: Value


class Load(RowStep):
    """A row of an array."""


class RowMap(RowStep):
    """A row, element by element, that later steps begin with."""


class RowFold(RowStep):
    """One value of all elements."""


class Moments(RowStep):
    """The mean of a row, and its variance: ``value`` is the row."""


class NamedValue(RowStep):
    """A value of the row that elements are computed with, or that is needed twice."""


@dataclass(frozen=True, eq=False)
class RowStore(RowStep):
    """``value`` becomes a result."""

    store: StoreStatement


@dataclass
class RowSteps:
    """``rows``: the values that are rows in the text; ``named``: those of a row that have a name; ``at_once``: how many rows
    threads hold at the same time; ``results``: what the steps are for; ``parts``: what comes before them."""

    program: RowProgram
    order: list[RowStep]
    rows: set[Value]
    named: set[Value]
    at_once: int
    results: list[Value]
    parts: RowSteps | None = None

    @property
    def dtype(self) -> str:
        """Of what is computed, as the text calls it."""
        return DTYPES[self.program.dtype.name]

    @property
    def all(self) -> list[RowSteps]:
        return [self] if self.parts is None else [self.parts, self]

    def within(self, root: Value) -> Iterator[Value]:
        """What the elements of a value are made of, as far as that has no name: operands first."""
        return _within(root, self.rows | self.named)


def steps_of(program: RowProgram) -> RowSteps:
    rewriter = RowRewriter(program.dtype)
    made = _steps(program, [rewriter.of(store.value) for store in program.stores], program.stores)
    if program.parts is None:
        return made
    parts = _steps(program, [rewriter.of(c.out) for c in program.cells], [])
    count = sum(x.op == "load" for x in parts.rows)
    return replace(made, parts=parts, at_once=max(made.at_once, LAST_PARTS * count))


def _steps(program: RowProgram, roots: list[Value], stores: list[StoreStatement]) -> RowSteps:
    """``roots``: what is stored; without ``stores`` they are held."""
    values = walked(roots)
    spread = {x.args[0] for x in values if x.op == "variance"}
    forced = {x for x in (*spread, *(() if stores else roots)) if is_vector(x) and x.op not in HELD}
    loads = [x for x in values if x.op == "load" and is_vector(x) and not is_turned(x.data[1])]
    rows = {*loads, *(x for x in values if x.op in CELLS and is_vector(x))} | _mapped(values, roots, forced)
    builder = Builder(rows, _named(values, roots), spread)
    builder.order += map(Load, sorted(loads, key=names_rows))
    stored = {store.parameter.name for store in stores}
    for x in values:                                   # before a thread stores it
        if x.op == "load" and is_row(x) and x.data[0].name in stored:
            builder.need(x)
    for n, root in enumerate(roots):
        builder.need(root)
        builder.order += [RowStore(root, store) for store in stores[n:n + 1]]
    return RowSteps(program, builder.order, rows, builder.named, _at_once(builder), roots)


def _within(root: Value, known: set[Value]) -> Iterator[Value]:
    seen: set[Value] = set()

    def visit(x: Value) -> Iterator[Value]:
        if x not in seen:
            seen.add(x)
            if x is root or x not in known:
                for y in x.args:
                    yield from visit(y)
            yield x

    return visit(root)


# -- which values are rows ------------------------------------------------------------------------------------------------

def _mapped(values: list[Value], roots: list[Value], forced: set[Value]) -> set[Value]:
    """The computed values that are held: those ``forced``, and others."""
    users: dict[Value, list[Value]] = {x: [] for x in values}
    for x in values:
        for y in x.args:
            users[y].append(x)
    held = set(forced)
    places: dict[Value, set[Value | int]] = {}

    def where(x: Value) -> set[Value | int]:
        """The folds, stores and rows whose elements a value is needed for."""
        if x not in places:
            places[x] = {n for n, root in enumerate(roots) if root is x}
            for user in users[x]:
                places[x] |= {user} if user in held or user.op in FOLDS else where(user)
        return places[x]

    of_rows = {x for x in values if is_row(x)}

    def elements(x: Value, known: set[Value]) -> list[Value]:
        return [y for y in _within(x, of_rows | known) if y not in of_rows]

    computed = [x for x in reversed(values) if is_vector(x) and x.op not in NEVER]
    for x in computed:                                 # what needs a value comes before it
        parts = elements(x, set())
        if len(where(x)) > 1 and (COSTLY & {y.op for y in parts} or sum(y.op in HELD for y in parts) > 1):
            held.add(x)
    for x in computed:
        if x in held - forced:
            places.clear()
            parts = elements(x, held - {x})
            replaced = any(is_vector(y) and (y in held or y.op in HELD) and where(y) == {x} for y in parts)
            inner = {y.op for y in parts if y not in held or y is x}
            if not COSTLY & inner and not replaced:
                held.discard(x)
    return held


def _named(values: list[Value], roots: list[Value]) -> set[Value]:
    """Values of a row that elements meet, that are stored as elements or that are needed twice; and all that have no text of
    their own."""
    uses: dict[Value, int] = {}
    for x in values:
        for y in x.args:
            if is_row(y):
                uses[y] = uses.get(y, 0) + (1 if is_row(x) and x.op not in FOLDS else 2)
    for root in roots:
        uses[root] = uses.get(root, 0) + 2
    return {x for x in values if is_row(x) and x.op not in ("const", "coordinate")
            and (x.op in FOLDS or x.op in HELD or x.op == "scalar" or uses.get(x, 0) > 1)}


# -- in order ---------------------------------------------------------------------------------------------------------------

@dataclass
class Builder:
    """``spread``: rows whose variance is needed."""

    rows: set[Value]
    named: set[Value]
    spread: set[Value]
    order: list[RowStep] = field(default_factory=list)
    done: set[Value] = field(default_factory=set)

    def need(self, root: Value) -> None:
        """The steps that a value's elements need."""
        for x in _within(root, self.rows | self.named):
            if x not in self.done and x.op not in CELLS and ((x in self.rows and x.op != "load") or x in self.named):
                self.done.add(x)
                self.make(x)

    def make(self, x: Value) -> None:
        if x.op in ("rowmean", "variance") and x.args[0] in self.spread:
            row = x.args[0]
            if not any(isinstance(step, Moments) and step.value is row for step in self.order):
                self.need(row)
                self.order.append(Moments(row))
            return
        for y in x.args:
            self.need(y)
        self.order.append(RowFold(x) if x.op in FOLDS else RowMap(x) if x in self.rows else NamedValue(x))


def _at_once(builder: Builder) -> int:
    """The most rows that are live between two steps."""
    known = builder.rows | builder.named
    needs = [{step.value} & builder.rows if isinstance(step, (Moments, RowStore)) and step.value in known else
             {y for y in _within(step.value, known) if y in builder.rows and y is not step.value} for step in builder.order]
    last = {row: n for n, used in enumerate(needs) for row in used}
    made = {step.value: n for n, step in enumerate(builder.order) if isinstance(step, (Load, RowMap))}
    return max(sum(made[row] <= n < last.get(row, made[row]) or made[row] == n for row in made) for n in range(len(needs)))


# --------------------------------------------------------------------------------------------------
# Elements of rows as text: a function of one element, with those of other rows and of arrays by columns that it meets.

DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "int64": "I64"}
#: Functions as the text calls them, and what it imports for that.
CALLS = {**OF_ELEMENTS, "min": "min", "exp": "math.exp", "log": "math.log"}
FLOAT = frozenset({"exp2", "log2", "reciprocal", "cast", "scalar", NUMBER, *FOLDS})
COLUMN = "column"                      # what an element's place in its row is called
PART = "part_"                         # what is needed more than once in a function has such a name, which nothing else has


@dataclass
class RowElement:
    """``name``: what a value of a row, and an element of a row, is called. ``is_made``: the elements become a row, so that
    its own name is not what they are."""

    steps: RowSteps
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
    _stays_inside: bool = False        # whether columns are those of elements that are there

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
        if x.op == "coordinate" and isinstance(x.data, Axis):
            return self._column(x.data, self._stays_inside)
        if x.op == EXTENT:
            return f"{self._outside('sizes')}.{x.data.name}"
        if x.op == "coordinate":
            return str(x.data.text(lambda index: self._outside(index.name)))
        if self._has_name(x):
            return self._beside(x) if is_vector(x) else self._outside(self.name(x))
        if x.op == "load" and not is_turned(x.data[1]):
            return self._beside(x)
        if x in self._known and not self._stays_inside:
            return self._known[x]                      # it has a line of its own
        text = self._operation(x)
        if self._uses.get(x, 0) > 1 and not self._stays_inside:
            name = f"{PART}{len(self._known)}"
            self.lines.append(f"{name} = {bare(text)}")
            self._known[x] = text = name
        return text

    def _column(self, axis: Axis, stays_inside: bool) -> str:
        """``stays_inside``: a row's pieces may reach beyond its end, and there it is the last place."""
        length = self.steps.program.lengths[axis.size]
        return f"min({COLUMN}, {self._outside('sizes')}.{length} - 1)" if stays_inside else COLUMN

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
        if x.op in CALLED:
            return self._called(x)
        if x.op == "load":                             # across rows
            axis, m = x.data[1][-2:]
            at = f"{self._column(axis, self.is_made)}, {self._outside(m.name)}"
            return self._converted(f"{self._outside(self.name(x))}[{at}]")
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
        whole = is_whole_number(x) and all(is_whole_number(y) or is_label(y) or (
            y.op == "const" and float(y.data).is_integer()) for y in x.args)
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

    def _called(self, x: Value) -> str:
        """A function is told places of elements that are there: it may have an array."""
        self._outside(x.data.name)
        word, args = RETURNS[x.op] if self.steps.dtype == "F32" else WIDE[x.op], []
        self.needs.add(word)
        for n, y in enumerate(x.args):
            self._stays_inside = x.data.is_counted(n, y)
            text = self.of(y, True) if self._stays_inside or is_label(y) else self._float(y)
            if is_whole_load(y):
                self.needs |= {"convert", "I64"}
                text = f"convert(I64, {bare(text)})"
            args.append(bare(self._converted(text) if x.data.is_real(n) else text))
            self._stays_inside = False
        return str(x.data.text(x.op, args, word=word))

    def _binds(self, x: Value) -> int:
        """How closely a value's text binds where its brackets may go: 2 a product, 1 a sum, 0 anything else."""
        is_inline = not self._has_name(x) and x not in self._known
        return {"mul": 2, "add": 1, "sub": 1}.get(x.op, 0) if is_inline else 0

    def _float(self, x: Value, beside: Value | None = None) -> str:
        """In float32: an array's element by columns is of its own dtype, unless what it meets is in float32."""
        text = self.of(x)
        if x.op == "const" or self.is_float(x) or (self._is_narrow(x) and not is_whole_load(x) and beside is not None
                                                   and self._widens(beside)):
            return text
        return self._converted(text)

    def _converted(self, text: str) -> str:
        self.needs |= {"convert", self.steps.dtype}
        return f"convert({self.steps.dtype}, {bare(text)})"

    def _widens(self, x: Value) -> bool:
        """Whether what a value meets becomes what is computed in. (`math`'s functions give Python's numbers in the
        emulator, which do not.)"""
        return self._has_name(x) or x.op in FLOAT or (x.op in ("add", "sub", "mul") and any(map(self._widens, x.args)))

    def is_float(self, x: Value) -> bool:
        """Whether a value's text is in what is computed in: not a constant, which is as wide as what it meets."""
        if not is_label(x) and (self._has_name(x) or x.op in FLOAT):
            return not self._is_narrow(x)
        if x.op in ("const", "coordinate", "load") or is_whole_number(x):
            return x.op == "load" and not self._is_narrow(x) and not is_label(x)
        return any(self.is_float(y) or self._is_narrow(y) or is_whole_number(y) for y in x.args) or x.op == "where"

    def _is_narrow(self, x: Value) -> bool:
        """Whether an element by columns is of another dtype than what is computed in."""
        return x.op == "load" and is_column(x) and np.dtype(x.data[0].dtype) != self.steps.program.dtype


def is_label(x: Value) -> bool:
    """Whether it is a whole number of which a row has one. (Rows of them are computed with.)"""
    return is_whole_load(x) and is_row(x)


# --------------------------------------------------------------------------------------------------
# A function of rows as text: a kernel in gemmkit's dialect, in the words of `gemmkit.kernels.rows`.

WORDS = ("RegisterRow", "Rows", "StreamedRow", "along", "largest", "mapped", "meet", "moments", "named", "put_into",
         "put_one", "put_turned", "row_of", "smallest", "total",
         *(f"{team}Team" for team in ("Block", "Cluster", "Thread", "Turned", "Warp")))
IMPORTS = [
    ("gemmkit.components", "Component"), ("gemmkit.components", "Scalar"),
    *(("gemmkit.kernels.rows", word) for word in WORDS), ("gemmkit.kernels.collectives.split_k", "in_turn"),
    ("gemmkit.lang.component_products", "matrix_of"), ("gemmkit.lang.aggregates", "convert"),
    *(("gemmkit.programs.called", word) for word in sorted({*RETURNS.values(), *WIDE.values()})),
    ("gemmkit.programs.collectives", "blocks"),
    *(("gemmkit.ptx.arithmetic", name) for name in ("exp2", "log2", "reciprocal")),
    ("gemmkit.ptx.arithmetic", "difference"), ("gemmkit.ptx.special", "udiv"),
    *(("gemmkit.ptx.wgmma", name) for name in ("grid_launch_dependents", "grid_wait"))]
FOLDED = dict(rowsum="total", rowmean="total", rowmax="largest", rowmin="smallest")
NAMED = dict(rowsum="whole", rowmean="mean", rowmax="top", rowmin="low", variance="variance", reciprocal="over")
LONG = 70                              # characters of an expression, beyond which it is a function of its own
ALWAYS = {"Component", "Scalar", "Rows", "blocks"}
#: What a text calls its own things: arrays, numbers and indices of programs are called otherwise.
OWN_NAMES = frozenset({name for _, name in IMPORTS} | set(DTYPES.values()) | {
    COLUMN, "ROWS", "SHARED_BYTES", "Sizes", "columns", "dataclass", "index", "kernel", "math", "max", "min", "np", "place",
    "sizes", "tiles"})


@dataclass
class RowPrinter:
    program: RowProgram
    steps: RowSteps
    dtypes: dict[str, np.dtype]
    taken: set[str]
    needs: set[str] = field(default_factory=lambda: set(ALWAYS))
    lines: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    names: dict[Value, str] = field(default_factory=dict)
    elements: dict[Value, str] = field(default_factory=dict)
    firsts: dict[int, str] = field(default_factory=dict)           # by the lengths of rows, one that says where elements are
    loaded: set[str] = field(default_factory=set)                  # those of them that are of arrays
    guard: str = ""                    # what a thread's place is if it has a row of its own

    # -- names --------------------------------------------------------------------------------------------------------

    def unique(self, wanted: str) -> str:
        name = unique(wanted.replace(PART, "value_"), self.taken)
        self.taken.add(name)
        return name

    def name(self, x: Value) -> str:
        """What a value of the row is called, an element of a row or of an array by columns, a matrix that is read across."""
        is_across = x.op == "load" and is_turned(x.data[1])
        if not is_row(x) and not is_across:
            self.row(x)
            return self.elements[x]
        if x not in self.names:
            if is_across:
                self.names[x] = self.unique(f"{x.data[0].name}_across")
                self.lines.append(f"{self.names[x]} = {self.array(x)}")
            elif x.op == "scalar":
                self.names[x] = str(x.data)            # an argument's name, which is its own
            else:
                # (A reciprocal with its argument's name is the rewriter's, not the user's.)
                given = "" if x.op == "reciprocal" and x.name == x.args[0].name else x.name
                plain = f"{x.data[0].name}_value" if x.op == "load" else given or NAMED.get(x.op, "value")
                self.names[x] = self.unique(plain)
        return self.names[x]

    def row(self, x: Value) -> str:
        """What the row is called, or the array that stands beside it: made by a line of its own the first time."""
        if x in self.names:
            return self.names[x]
        if x.op == "load":
            name = x.data[0].name                      # within a function it is the element's
            self.elements[x] = name if name not in self.elements.values() else self.unique(name)
        else:
            self.elements[x] = self.unique(x.name or "value")
        self.names[x] = self.unique(f"{self.elements[x]}_row")
        if x.op == "load" and not is_vector(x):
            self.lines.append(f"{self.names[x]} = {self.call('along', self.first(length_of(x)), self.array(x))}")
        return self.names[x]

    def spec(self, length: int) -> str:
        return f"ROWS{self.program.lengths[length].removeprefix('columns')}"

    def where(self, length: int, row: str = "") -> str:
        """Of a row that is loaded, or made of others."""
        return f"{row or self.program.rows.name}, sizes.{self.program.lengths[length]}"

    def first(self, length: int) -> str:
        if length not in self.firsts:
            self.firsts[length] = self.unique("empty_row")
            self.lines.append(f"{self.firsts[length]} = {self.spec(length)}.none({self.where(length)})")
        return self.firsts[length]

    def array(self, x: Value) -> str:
        """An array without its stacks."""
        parameter, key = x.data
        return self.matrix_of(parameter.name, [index for index in key if isinstance(index, Index) and index.stack])

    def matrix_of(self, name: str, stacks: Sequence[Index]) -> str:
        return self.call("matrix_of", name, f"({listed(stack.text() for stack in stacks[::-1])})") if stacks else name

    def call(self, word: str, *arguments: str) -> str:
        self.needs.add(word)
        return f"{word}({', '.join(arguments)})"

    # -- parts --------------------------------------------------------------------------------------------------------

    def in_turn(self, n: str, parts: RowSteps, callees: Iterable[str]) -> None:
        """One function loads a part, another one merges two. Cells have one name within it and behind the loop."""
        load, merge, one, other = map(self.unique, ("load_part", "merge_part", "one", "other"))
        cells, names = self.program.cells, [self.held(c.after) for c in self.program.cells]
        for c in cells:
            self.names[c.inside], self.elements[c.inside] = self.names[c.after], self.elements.get(c.after, "")
        outer, self.steps, self.lines = (self.steps, self.lines), parts, []
        for c in cells:
            self.step(Load(c.init) if is_vector(c.init) else NamedValue(c.init))
        given = ", ".join(["sizes", *(index.name for index in self.program.indices), *(c.init.data[0].name for c in cells)])
        loaded = listed(self.held(c.init) for c in cells)
        self.function(f"{load}({n}, {given})", self.lines, loaded)
        self.lines = [f"{listed(names)} = {one}", f"{loaded} = {other}"]
        self.firsts = {length_of(c.after): name for c, name in reversed([*zip(cells, names)]) if is_vector(c.after)}
        self.loaded = {*self.firsts.values()}
        for step in parts.order:
            if step.value.op != "load":
                self.step(step)
        words = set(re.findall(r"\w+", " ".join(self.lines)))
        more = "".join(f", {name}" for name in ("sizes", *callees) if name in words)
        self.function(f"{merge}({one}, {other}{more})", self.lines, listed(map(self.held, parts.results)))
        self.steps, self.lines = outer
        merged = f"lambda {one}, {other}: {merge}({one}, {other}{more})" if more else merge
        loaded = f"lambda {n}: {load}({n}, {given})"
        self.lines.append(f"{listed(names)} = {self.call('in_turn', f'sizes.{n}', loaded, merged)}")

    def held(self, x: Value) -> str:
        """What a row is called, or a value of the row."""
        return self.row(x) if is_vector(x) else self.name(x)

    def function(self, head: str, lines: list[str], result: str) -> None:
        self.functions += ["", "", f"def {head}:", *(f"    {line}" for line in lines), f"    return {result}"]

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, step: RowStep) -> None:
        x = step.value
        if isinstance(step, Load):
            name, length = self.row(x), length_of(x)
            if names_rows(x):
                index = x.data[1][-1]
                at = self.where(length, f"{index.lookup.name}[{index.base.text()}]")
                made = self.call("named", self.spec(length), self.array(x), at)
            elif self.firsts.get(length) in self.loaded:
                made = self.call("row_of", self.firsts[length], self.array(x))
            else:
                made = f"{self.spec(length)}.load({self.array(x)}, {self.where(length)})"
                self.firsts[length] = name
                self.loaded.add(name)
            self.lines.append(f"{name} = {made}")
        elif isinstance(step, Moments):
            pair = [self.moment(op, x) for op in ("rowmean", "variance")]
            self.lines.append(f"{', '.join(pair)} = {self.call('moments', self.row(x))}")
        elif isinstance(step, RowFold):
            self.fold(x)
        elif isinstance(step, RowMap):
            made = self.over("mapped", x, length_of(x), "", True)
            self.lines.append(f"{self.row(x)} = {made}")
        elif isinstance(step, NamedValue):
            self.lines += self.named(x)
        elif isinstance(step, RowStore):
            self.put(step)

    def moment(self, op: str, row: Value) -> str:
        found = [x for x in self.steps.named if x.op == op and x.args[0] is row]
        return self.name(found[0]) if found else self.unique(NAMED[op])

    def fold(self, x: Value) -> None:
        length = length_of(x.args[0])
        made = self.over(FOLDED[x.op], x.args[0], length, f"of_{self.name(x)}", False)
        if x.op == "rowmean":
            self.needs |= {"convert", self.steps.dtype}
            made += f" / convert({self.steps.dtype}, sizes.{self.program.lengths[length]})"
        self.lines.append(f"{self.name(x)} = {made}")

    def named(self, x: Value) -> list[str]:
        if x.op == "scalar":
            return [f"{self.name(x)} = sizes.{x.data}"]
        if x.op == "load":
            found = f"{x.data[0].name}[{', '.join(index.text() for index in x.data[1])}]"
            self.needs |= set() if is_whole_load(x) else {"convert", self.steps.dtype}
            return [f"{self.name(x)} = {found if is_whole_load(x) else f'convert({self.steps.dtype}, {found})'}"]
        made = self.element(x, True)
        text = made.text
        if x.op not in CONDITIONS and not made.is_float(x):
            self.needs |= {"convert", self.steps.dtype}
            text = f"convert({self.steps.dtype}, {text})"
        return [*made.lines, f"{self.name(x)} = {text}"]

    def element(self, x: Value, is_made: bool) -> RowElement:
        made = RowElement(self.steps, x, self.name, is_made)
        self.needs |= made.needs
        return made

    def over(self, word: str, x: Value, length: int, called: str, is_made: bool, *given: str, first: str = "") -> str:
        """A word of rows with a function of elements: the first row that it needs, and those beside it. ``first``: all stand
        beside this one."""
        made = self.element(x, is_made)
        rows = sorted(made.rows, key=lambda row: not is_vector(row) or names_rows(row))
        if first or not rows or not is_vector(rows[0]) or names_rows(rows[0]):         # it says where the elements are
            main, beside, names = first or self.first(length), rows, ["_"]
        else:
            main, beside, names = self.row(rows[0]), rows[1:], [self.name(rows[0])]
        parameters = ", ".join([*names, COLUMN, *map(self.name, beside)])
        text = made.text
        if made.lines or len(text) > LONG:
            f = self.unique(called or f"make_{self.elements.get(x, 'value')}")
            arguments = ", ".join([parameters, *made.outside])
            self.function(f"{f}({arguments})", made.lines, made.text)
            text = f"{f}({arguments})"
        tuples = [f"({listed(map(self.row, beside))})"] if beside else []
        return self.call(word, main, *given, f"lambda {parameters}: {text}", *tuples)

    def put(self, step: RowStore) -> None:
        x, parameter = step.value, step.store.parameter
        kind = self.dtypes[parameter.name].name
        out = self.matrix_of(parameter.name, self.program.stacks)
        self.needs.add(DTYPES[kind])
        if len(parameter.shape) > len(self.program.indices):
            length, word = stored_length(step.store), "put_turned" if is_turned(step.store.key) else "put_into"
            given = length, f"element_of_{parameter.name}", False, out, DTYPES[kind]
            if step.store.lookup is None:
                self.stored(self.over(word, x, *given))
                return
            at = f"{step.store.lookup.name}[{self.program.rows.name}]"
            stored = self.over(word, x, *given, first=f"{self.spec(length)}.none({self.where(length, at)})")
            self.lines += [f"if {at} >= 0 and {at} < {out}.shape[0]:", f"    {stored}"]
            return
        made, first = self.element(x, False), self.first(next(iter(self.program.lengths)))
        self.needs.add("convert")
        value = f"convert({DTYPES[kind]}, {bare(made.text)})"
        met = [self.call("meet", first)] if parameter.name in self.program.reads else []
        self.lines += [*made.lines, *met]
        self.stored(self.call("put_one", first, out, value))

    def stored(self, line: str) -> None:
        """A store, which threads of a `TurnedTeam` leave out whose row is another's."""
        self.lines += [f"if place == {self.guard}:", f"    {line}"] if self.guard else [line]


def length_of(x: Value) -> int:
    """Of a row, or of an array by columns."""
    return next(dim.size for dim in x.dims if isinstance(dim, Axis))


def printed(title: str, program: RowProgram, steps: RowSteps, threads: dict[int, tuple[RowTeam, RowSource, int]],
            dtypes: dict[str, np.dtype], scalars: list[str], early: bool) -> Printed:
    """Print the kernel. ``threads``: of rows of each length. ``dtypes``: of all arrays, by their names. ``early``: it may be
    launched before the kernel before has ended."""
    (team, _, _), *_ = threads.values()
    rows, stacks, counted = program.rows.name, program.stacks, [index.name for index in program.sizes]
    index = "index" if stacks else rows
    guard = index if isinstance(team, TurnedTeam) else ""
    printer = RowPrinter(program, steps, dtypes, {*OWN_NAMES, *dtypes, *scalars, *counted}, guard=guard)
    values = walked([step.value for made in steps.all for step in made.order])
    callees = Callees.of(x.data for x in values if x.op in CALLED)
    if steps.parts is not None and program.parts is not None:
        printer.in_turn(program.parts.indices[0].name, steps.parts, callees.names)
    for step in steps.order:
        printer.step(step)
    begin = EARLY if early else ()
    printer.needs |= {steps.dtype, *(line.removesuffix("()") for line in begin), type(team).__name__,
                      *(type(source).__name__ for _, source, _ in threads.values()), *(["udiv"] if stacks else [])}
    outs = [store.parameter.name for store in program.stores]
    reads = [name for name in dtypes if name in program.reads and name not in outs]
    tile = [index.name for index in program.indices]
    used = [name for name in scalars if any(x.op == "scalar" and x.data == name for made in steps.all for x in made.named)]
    imports: dict[str, list[str]] = {}
    for module, word in IMPORTS:
        if word in printer.needs:
            imports.setdefault(module, []).append(word)
    count, at = f"{count_of(stacks)}sizes.{rows}", f"udiv(index, sizes.{rows})"
    body = [*(f"{stack.name} = {part}" for stack, part in zip(stacks, parts_of_stacks(stacks, at))),
            *([f"{rows} = index - {at if stacks[1:] else stacks[0].name} * sizes.{rows}"] if stacks else []), *printer.lines,
            *["ROWS.team.leave()"] * (team.blocks > 1)]
    if printer.guard:                                  # the block meets: each of its threads has a row
        body = ["place = ROWS.team.row()", f"{index} = min(place, {count} - 1)", *body]
    else:
        body = [f"{index} = ROWS.team.row()", f"if {index} < {count}:", *(f"    {line}" for line in body)]
    lines = [
        f'"""{title}"""', "", *(["import math"] if "math" in printer.needs else []), "from dataclasses import dataclass", "",
        "import numpy as np", "",
        *(f"from {module} import {', '.join(words)}" for module, words in imports.items()), "",
        *(f'{short} = np.dtype("{kind}")' for kind, short in DTYPES.items() if short in printer.needs),
        *(f"{printer.spec(length)} = Rows({shown_team(team, steps.dtype)}, {shown_source(source)}, vector={vector}, "
          f"dtype={steps.dtype})" for length, (_, source, vector) in threads.items()),
        f"SHARED_BYTES = {team.shared_bytes}", "", "",
        "@dataclass(frozen=True)", "class Sizes(Component):",
        *(f"    {name}: Scalar" for name in (*counted, *program.lengths.values(), *used)), "", "",
        f"def kernel({', '.join(['sizes', *outs, *reads, *callees.names])}):",
        *(f"    {line}" for line in (*begin, *body)), "", "", "def tiles(sizes):",
        f"    return blocks({' * '.join(f'sizes.{name}' for name in tile)}, ROWS.team.rows)", *printer.functions]
    updated, sizes = tuple(name for name in outs if name in program.reads), (*counted, *program.lengths.values())
    return Printed("\n".join(lines) + "\n", (), tuple(outs), tuple(reads), sizes, tuple(tile), tuple(used), team.block,
                   callees=callees, updated=updated, number=program.dtype)


def shown_team(team: RowTeam, dtype: str) -> str:
    more = [team.rows] if isinstance(team, (WarpTeam, TurnedTeam)) else [team.blocks] * isinstance(team, ClusterTeam)
    more += [team.lanes] if isinstance(team, WarpTeam) and team.lanes < LANES else []
    return f"{type(team).__name__}({', '.join([str(team.warps), dtype, *map(str, more)])})"


def shown_source(x: RowSource) -> str:
    return f"RegisterRow(pieces={x.pieces}, whole={x.whole})" if isinstance(x, RegisterRow) else "StreamedRow()"


# --------------------------------------------------------------------------------------------------
# All passes of a program of rows: from its trace to its text.

def derived(name: str, program: RowProgram, mapping: Mapping, infos: Names[str, ArrayInfo], numbers: list[str],
            device: DeviceInfo) -> Printed:
    """``numbers``: the names of the run-time scalars. Raises ConfigError for a mapping of products."""
    mapping.refuse_products()
    steps = steps_of(program)
    whole = {x.data[0].name for x in steps.rows if x.op == "load"}
    whole |= {store.parameter.name for store in program.stores if len(store.parameter.shape) > len(program.indices)}
    widest = max([8 if program.dtype == F64 else 1, *(infos[key].dtype.itemsize for key in whole)])
    turned = turned_bytes(program, infos)
    problems = {length: RowsProblem(length, widest, program.dtype, max(1, steps.at_once), turned)
                for length in program.lengths}
    chosen = {length: choose(problem, device).spec for length, problem in problems.items()}
    most = max(team.threads for team, _, _ in chosen.values())         # a team has rows of all lengths
    found = {length: problem.specialise((most, isinstance(chosen[length][1], RegisterRow)), device).spec
             for length, problem in problems.items()}
    if program.lengths == {1: "columns"} and not whole:
        found = {1: (ThreadTeam(1, program.dtype), RegisterRow(1, 1), 1)}
    team, is_held = next(iter(found.values()))[0], all(isinstance(source, RegisterRow) for _, source, _ in found.values())
    _check_places(mapping, steps, is_held)
    for n, store in enumerate(program.stores if not is_held else ()):
        is_row_of = len(store.parameter.shape) > len(program.indices) and 0 not in store.parameter.shape
        if store.parameter.name in program.reads and is_row_of and any(
                x.op == "load" and x.data[0] is store.parameter for x in walked([y.value for y in program.stores[n + 1:]])):
            raise refused(ValueError, f"{store.parameter.name} and another result are stored in place, and each is made of "
                                      "both: a row does not fit in a block's registers; give one its own array", store.line)
    warps = team.threads // LANES
    threads = ("a thread" if team.threads == 1 else f"{team.threads} threads of a block of {team.rows} rows" if turned else
               f"{team.threads} lanes" if team.threads < LANES else "a warp" if warps == 1 else
               f"a {'block' if team.blocks == 1 else 'cluster'} of {warps} warps")
    title = f"{name}: {threads} a row; rows are {'held in registers' if is_held else 'loaded anew for each fold and store'}."
    return printed(title, program, steps, found, {key: info.dtype for key, info in infos.items()}, numbers,
                   device.starts_early)


def turned_bytes(program: RowProgram, infos: Names[str, ArrayInfo]) -> int:
    """Bytes of the smallest element that lies along columns; 0 where none does, or where rows of a block may not meet: each
    has its own count of parts, or may not be there, or an array is stored that is read."""
    loads = [x for x in walked([store.value for store in program.stores]) if x.op == "load"]
    found = [x.data[0].name for x in loads if is_vector(x) and is_turned(x.data[1])]
    found += [store.parameter.name for store in program.stores if is_turned(store.key)]
    apart = program.parts is not None or any(store.lookup is not None for store in program.stores) or any(
        names_rows(x) for x in loads) or any(store.parameter.name in program.reads for store in program.stores)
    return 0 if apart else min((infos[name].dtype.itemsize for name in found), default=0)


def check_rows(infos: dict[str, ArrayInfo], sizes: Sizes, program: RowProgram) -> None:
    count, longest = math.prod(sizes[index.extent] for index in program.indices), max(program.lengths)
    if count >= 2**31 or longest >= 2**31:
        raise refused(ValueError, f"{count} rows of {longest} elements; less than 2**31 of each is needed",
                      program.line)
    check_launch(infos, sizes, {}, program.indices, [], {}, program.stores, results=ROW_RESULTS)


def _check_places(mapping: Mapping, steps: RowSteps, is_held: bool) -> None:
    """Raises ConfigError for names of no rows, and for rows that no registers hold."""
    names = {x.name for x in steps.rows if is_vector(x)}
    for name, place in mapping.places.items():
        if name not in names:
            raise ConfigError(f"Mapping(places={{{name!r}: {place!r}}}): the rows that are loaded or mapped are "
                              f"{', '.join(sorted(names))}")
        if not is_held or place == SHARED:
            raise ConfigError(f"Mapping(places={{{name!r}: {place!r}}}): " + (
                "threads hold rows in registers" if is_held else "a row is longer than its threads' registers and is loaded "
                "again for each use; use shorter rows"))
