"""A program of rows as the passes see it: what is stored, and what each value has an element for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Mapping as Names
from dataclasses import dataclass, field, replace

import numpy as np

from gemmkit.kernels.rows import FEW, RegisterRow, RowSource, RowTeam, WarpTeam
from gemmkit.lang.errors import ConfigError
from gemmkit.programs.called import CALLED, EXTENT, NUMBER, RETURNS, Callees, is_whole_load
from gemmkit.programs.chains.chain import updates_last
from gemmkit.programs.chains.elements import is_whole_number
from gemmkit.programs.mapping import SHARED, Mapping, Printed
from gemmkit.programs.places import RowRewriter, is_tiled, refuse_pieces, walked
from gemmkit.programs.text import CALLS as OF_ELEMENTS
from gemmkit.programs.text import EARLY, JOINTS, SIGNS, bare, count_of, listed, parts_of_stacks
from gemmkit.programs.trace import CONDITIONS, Carried, Loop, StoreStatement, Value
from gemmkit.programs.values import Axis, Index, refused, shown, unique
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuning.problems import RowsProblem, choose

FLOATS = "float16", "bfloat16", "float32"
#: What all of a row becomes one value by. ``rowmean`` and ``variance`` are made by the algebra.
FOLDS = frozenset({"rowsum", "rowmax", "rowmin", "rowmean", "variance"})
FORMS = dict(dot="a product: products of whole rows are taken in rounds, for n in sequential(...)",
             transpose="a transpose, or a reduction over rows (axis=0): rows are computed as they lie",
             carried="a cell from outside of the loop: each row begins anew",
             after="a cell from outside of the loop: each row begins anew")


@dataclass(eq=False)
class RowProgram:
    """``columns``: the length of its rows; ``reads``: the arrays that are read, with the lines where they are. ``parts``: a
    loop whose cells begin as the rows of the first part, ``init``, and become ``out`` of themselves and of those of each
    further one (`gemmkit.programs.chains.merging`)."""

    stacks: tuple[Index, ...]
    rows: Index
    columns: int
    stores: list[StoreStatement]
    reads: dict[str, str]
    line: str
    parts: Loop | None = None

    @property
    def indices(self) -> tuple[Index, ...]:
        return *self.stacks, self.rows

    @property
    def cells(self) -> list[Carried]:
        return [] if self.parts is None else self.parts.carried

    @property
    def sizes(self) -> tuple[Index, ...]:
        """The indices of which a kernel is told how long they are."""
        return (*self.indices, *(() if self.parts is None else self.parts.indices))

    @property
    def values(self) -> list[Value]:
        return walked([*(store.value for store in self.stores), *(c.out for c in self.cells)])


def is_vector(x: Value) -> bool:
    """Whether a value has an element for each column of each row. A constant is a number, whatever it fills."""
    return x.op != "const" and len(x.dims) == 2


def is_column(x: Value) -> bool:
    """Whether it has one for each column, the same in every row."""
    return x.op != "const" and len(x.dims) == 1 and isinstance(x.dims[0], Axis)


def is_row(x: Value) -> bool:
    """Whether it is one value of a row, or of all rows."""
    return not is_vector(x) and not is_column(x)


def has_rows_alone(loop: Loop) -> bool:
    """Whether tiles go along rows, and nothing goes around in rounds."""
    return is_tiled(loop, 1) and not any(isinstance(held, Loop) for held in loop.body)


def row_program_of(loop: Loop) -> RowProgram:
    """Raises ValueError and TypeError, with the user's line, for what is no function of rows."""
    refuse_pieces(loop)
    *stacks, rows = loop.indices
    stores = [held for held in loop.body if isinstance(held, StoreStatement)]
    parts = next((held for held in loop.body if isinstance(held, Loop)), None)
    made = RowProgram(tuple(stacks), rows, 0, stores, {}, loop.line, parts)
    lengths: dict[int, str] = {}
    for x in made.values:
        _check(x, made, lengths)
    for store in stores:
        name, rank = store.parameter.name, len(store.parameter.shape)
        if store.only is not None or tuple(store.key) != made.indices or rank - len(made.indices) not in (0, 1):
            raise refused(ValueError, f"{name}[{shown(store.key)}] is stored; a function of rows stores rows or one value "
                                      f"of each, [{shown(made.indices)}], and without once(...) (only .reference(...) runs "
                                      "others)", store.line)
        if rank > len(made.indices):
            lengths.setdefault(store.parameter.shape[-1], store.line)
    made.stores = updates_last(stores, loop)
    if len(lengths) > 1:
        raise refused(ValueError, f"rows of {' and of '.join(map(str, lengths))} elements; all rows of a kernel must have "
                                  "one length (only .reference(...) runs others)", list(lengths.values())[1])
    if not any(is_vector(x) and x.op == "load" for x in made.values):
        raise refused(ValueError, "no sequential loop, and no row of an array is read; a kernel needs products in rounds, "
                                  "or rows, x[m]", loop.line)
    made.columns = next(iter(lengths))
    return made


def _check(x: Value, program: RowProgram, lengths: dict[int, str]) -> None:
    if x.op in FORMS and not any(x in (c.inside, c.after) for c in program.cells):
        raise refused(ValueError, FORMS[x.op], x.line)
    if x.op == "const":
        return
    if x.op == "load":
        parameter, key = x.data
        if not {index.of_loop for index in key} <= set(program.sizes) or len(set(key)) < len(key):
            raise refused(ValueError, f"{parameter.name}[{shown(key)}]: a function of rows must use the index "
                                      f"{shown(program.indices)}", x.line)
        if np.dtype(parameter.dtype).name not in FLOATS and not (is_whole_load(x) and is_row(x)):
            raise refused(TypeError, f"{parameter.name} has dtype {parameter.dtype}; a function of rows reads float16, "
                                     "bfloat16 or float32, and whole numbers of which a row has one", x.line)
        program.reads.setdefault(parameter.name, x.line)
    if x.op == "cast" and np.dtype(x.data).name not in FLOATS:
        raise refused(TypeError, f"astype({np.dtype(x.data)}): functions of rows compute in float32; astype may round to "
                                 "float16 or bfloat16", x.line)
    axes = [dim for dim in x.dims if isinstance(dim, Axis)]
    if len(axes) > 1 or len(x.dims) - len(axes) > 1:
        raise refused(ValueError, f"a value of ({shown(x.dims)}): a function of rows computes with whole rows, (m, all "
                                  "columns), and with values of rows or columns", x.line)
    for axis in axes:
        lengths.setdefault(axis.size, x.line)
    if x.op.startswith("row") and not isinstance(x.args[0].dims[1], Axis):
        raise refused(ValueError, f"{x.op[3:]}(axis=1) of a value of ({shown(x.args[0].dims)}) goes over "
                                  f"{x.args[0].dims[1]}: only rows can be reduced", x.line)


# --------------------------------------------------------------------------------------------------
# What a row's threads do, in order: rows are loaded, mapped and folded, and results are stored.
#
# A row is held in registers from where it is loaded or mapped to where it is needed last. What several folds and stores
# need is mapped once where computing it again costs more than a place in the registers: exponentials and the like, and
# what stands in place of the rows that it is made of. A difference from the mean is written where it is needed.

CELLS = frozenset({"carried", "after"})         # within a loop over parts, and behind it
HELD = CELLS | {"load"}
COSTLY = frozenset({"exp2", "log2", "tanh", "erf", "pow", "sqrt", "reciprocal", NUMBER})
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

    order: list[RowStep]
    rows: set[Value]
    named: set[Value]
    at_once: int
    results: list[Value]
    parts: RowSteps | None = None

    @property
    def all(self) -> list[RowSteps]:
        return [self] if self.parts is None else [self.parts, self]

    def within(self, root: Value) -> Iterator[Value]:
        """What the elements of a value are made of, as far as that has no name: operands first."""
        return _within(root, self.rows | self.named)


def steps_of(program: RowProgram) -> RowSteps:
    rewriter = RowRewriter(program.columns)
    made = _steps([rewriter.of(store.value) for store in program.stores], program.stores)
    if program.parts is None:
        return made
    parts = _steps([rewriter.of(c.out) for c in program.cells], [])
    count = sum(x.op == "load" for x in parts.rows)
    return replace(made, parts=parts, at_once=max(made.at_once, FEW * count))


def _steps(roots: list[Value], stores: list[StoreStatement]) -> RowSteps:
    """``roots``: what is stored; without ``stores`` they are held."""
    values = walked(roots)
    spread = {x.args[0] for x in values if x.op == "variance"}
    forced = {x for x in (*spread, *(() if stores else roots)) if is_vector(x) and x.op not in HELD}
    rows = {x for x in values if x.op in HELD and is_vector(x)} | _mapped(values, roots, forced)
    builder = Builder(rows, _named(values, roots), spread)
    builder.order += [Load(x) for x in values if x.op == "load" and is_vector(x)]
    for n, root in enumerate(roots):
        builder.need(root)
        builder.order += [RowStore(root, store) for store in stores[n:n + 1]]
    return RowSteps(builder.order, rows, builder.named, _at_once(builder), roots)


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

DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
#: Functions as the text calls them, and what it imports for that.
CALLS = {**OF_ELEMENTS, "min": "min"}
FLOAT32 = frozenset({"exp2", "log2", "reciprocal", "cast", "scalar", NUMBER, *FOLDS})
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
            return f"min({COLUMN}, {self._outside('sizes')}.columns - 1)" if self._stays_inside else COLUMN
        if x.op == EXTENT:
            return f"{self._outside('sizes')}.{x.data.name}"
        if x.op == "coordinate":
            return str(x.data.text(lambda index: self._outside(index.name)))
        if self._has_name(x):
            return self._beside(x) if is_vector(x) else self._outside(self.name(x))
        if x.op == "load":
            return self._beside(x)
        if x in self._known and not self._stays_inside:
            return self._known[x]                      # it has a line of its own
        text = self._operation(x)
        if self._uses.get(x, 0) > 1 and not self._stays_inside:
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
        if x.op in CALLED:
            return self._called(x)
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
        whole = is_whole_number(x) and all(is_whole_number(y) or is_whole_load(y) or (
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
        """A row's pieces may reach beyond its end, where a function is told the last place: it may have an array."""
        self._outside(x.data.name)
        self.needs.add(RETURNS[x.op])
        args = []
        for n, y in enumerate(x.args):
            self._stays_inside = x.data.is_counted(n, y)
            text = self.of(y, True) if self._stays_inside else self._float(y)
            args.append(bare(self._converted(text) if x.data.is_real(n) else text))
            self._stays_inside = False
        return str(x.data.text(x.op, args))

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
        if not is_whole_load(x) and (self._has_name(x) or x.op in FLOAT32):
            return True
        if x.op in ("const", "coordinate", "load") or is_whole_number(x):
            return x.op == "load" and not is_narrow(x) and not is_whole_load(x)
        return any(self.is_float(y) or is_narrow(y) or is_whole_number(y) for y in x.args) or x.op == "where"


def is_narrow(x: Value) -> bool:
    return x.op == "load" and is_column(x) and np.dtype(x.data[0].dtype).name != "float32"


# --------------------------------------------------------------------------------------------------
# A function of rows as text: a kernel in gemmkit's dialect, in the words of `gemmkit.kernels.rows`.

WORDS = ("along", "in_turn", "largest", "mapped", "moments", "put_into", "put_one", "row_of", "smallest", "total")
IMPORTS = [
    ("gemmkit.components", "Component"), ("gemmkit.components", "Scalar"), ("gemmkit.kernels.rows", "RegisterRow"),
    ("gemmkit.kernels.rows", "Rows"), ("gemmkit.kernels.rows", "StreamedRow"),
    *(("gemmkit.kernels.rows", word) for word in WORDS),
    ("gemmkit.kernels.rows", "BlockTeam"), ("gemmkit.kernels.rows", "WarpTeam"),
    ("gemmkit.lang.component_products", "matrix_of"), ("gemmkit.lang.aggregates", "convert"),
    *(("gemmkit.programs.called", word) for word in RETURNS.values()), ("gemmkit.programs.collectives", "blocks"),
    *(("gemmkit.ptx.arithmetic", name) for name in ("exp2", "log2", "reciprocal")),
    ("gemmkit.ptx.arithmetic", "difference"), ("gemmkit.ptx.special", "udiv"),
    *(("gemmkit.ptx.wgmma", name) for name in ("grid_launch_dependents", "grid_wait"))]
FOLDED = dict(rowsum="total", rowmean="total", rowmax="largest", rowmin="smallest")
NAMED = dict(rowsum="whole", rowmean="mean", rowmax="top", rowmin="low", variance="variance", reciprocal="over")
LONG = 70                              # characters of an expression, beyond which it is a function of its own
ALWAYS = {"Component", "Scalar", "Rows", "blocks"}
#: What a text calls its own things: arrays, numbers and indices of programs are called otherwise.
OWN_NAMES = frozenset({name for _, name in IMPORTS} | set(DTYPES.values()) | {
    COLUMN, "ROWS", "SHARED_BYTES", "Sizes", "columns", "dataclass", "index", "kernel", "math", "max", "min", "np", "sizes",
    "tiles"})


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
    first: str = ""

    # -- names --------------------------------------------------------------------------------------------------------

    def unique(self, wanted: str) -> str:
        name = unique(wanted.replace(PART, "value_"), self.taken)
        self.taken.add(name)
        return name

    def name(self, x: Value) -> str:
        """What a value of the row is called, or an element of a row or of an array by columns."""
        if not is_row(x):
            self.row(x)
            return self.elements[x]
        if x not in self.names:
            if x.op == "scalar":
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
            self.lines.append(f"{self.names[x]} = {self.call('along', self.first, self.array(x))}")
        return self.names[x]

    def array(self, x: Value) -> str:
        """An array without its stacks."""
        parameter, key = x.data
        return self.matrix_of(parameter.name, [index for index in key if index.stack])

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
        self.first = next((name for c, name in zip(cells, names) if is_vector(c.after)), "")
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
            name = self.row(x)
            made = (self.call("row_of", self.first, self.array(x)) if self.first else
                    f"ROWS.load({self.array(x)}, {self.program.rows.name}, sizes.columns)")
            self.first = self.first or name
            self.lines.append(f"{name} = {made}")
        elif isinstance(step, Moments):
            pair = [self.moment(op, x) for op in ("rowmean", "variance")]
            self.lines.append(f"{', '.join(pair)} = {self.call('moments', self.row(x))}")
        elif isinstance(step, RowFold):
            self.fold(x)
        elif isinstance(step, RowMap):
            made = self.over("mapped", x, "", True)
            self.lines.append(f"{self.row(x)} = {made}")
        elif isinstance(step, NamedValue):
            self.lines += self.named(x)
        elif isinstance(step, RowStore):
            self.put(step)

    def moment(self, op: str, row: Value) -> str:
        found = [x for x in self.steps.named if x.op == op and x.args[0] is row]
        return self.name(found[0]) if found else self.unique(NAMED[op])

    def fold(self, x: Value) -> None:
        made = self.over(FOLDED[x.op], x.args[0], f"of_{self.name(x)}")
        if x.op == "rowmean":
            self.needs |= {"convert", "F32"}
            made += " / convert(F32, sizes.columns)"
        self.lines.append(f"{self.name(x)} = {made}")

    def named(self, x: Value) -> list[str]:
        if x.op == "scalar":
            return [f"{self.name(x)} = sizes.{x.data}"]
        if x.op == "load":
            found = f"{x.data[0].name}[{', '.join(index.text() for index in x.data[1])}]"
            self.needs |= set() if is_whole_load(x) else {"convert", "F32"}
            return [f"{self.name(x)} = {found if is_whole_load(x) else f'convert(F32, {found})'}"]
        made = self.element(x, True)
        text = made.text
        if x.op not in CONDITIONS and not made.is_float(x):
            self.needs |= {"convert", "F32"}
            text = f"convert(F32, {text})"
        return [*made.lines, f"{self.name(x)} = {text}"]

    def element(self, x: Value, is_made: bool) -> RowElement:
        made = RowElement(self.steps, x, self.name, is_made)
        self.needs |= made.needs
        return made

    def over(self, word: str, x: Value, called: str, is_made: bool = False, *given: str) -> str:
        """A word of rows with a function of elements: the first row that it needs, and those beside it."""
        made = self.element(x, is_made)
        rows = sorted(made.rows, key=lambda row: not is_vector(row))
        if not rows or not is_vector(rows[0]):         # the first row says where the elements are
            main, beside, names = self.first, rows, ["_"]
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
            self.lines.append(self.over("put_into", x, f"element_of_{parameter.name}", False, out, DTYPES[kind]))
            return
        made = self.element(x, False)
        self.needs.add("convert")
        value = f"convert({DTYPES[kind]}, {bare(made.text)})"
        self.lines += [*made.lines, self.call("put_one", self.first, out, value)]


def printed(title: str, program: RowProgram, steps: RowSteps, threads: tuple[RowTeam, RowSource, int],
            dtypes: dict[str, np.dtype], scalars: list[str], early: bool) -> Printed:
    """Print the kernel. ``dtypes``: of all arrays, by their names. ``early``: its launch may begin before the kernel before
    has ended."""
    team, source, vector = threads
    rows, stacks, counted = program.rows.name, program.stacks, [index.name for index in program.sizes]
    tile = [index.name for index in program.indices]
    printer = RowPrinter(program, steps, dtypes, {*OWN_NAMES, *dtypes, *scalars, *counted})
    values = walked([step.value for made in steps.all for step in made.order])
    callees = Callees.of(x.data for x in values if x.op in CALLED)
    if steps.parts is not None and program.parts is not None:
        printer.in_turn(program.parts.indices[0].name, steps.parts, callees.names)
    for step in steps.order:
        printer.step(step)
    begin = EARLY if early else ()
    printer.needs |= {"F32", *(line.removesuffix("()") for line in begin), type(team).__name__, type(source).__name__,
                      *(["udiv"] if stacks else [])}
    outs = [store.parameter.name for store in program.stores]
    reads = [name for name in dtypes if name in program.reads and name not in outs]
    used = [name for name in scalars if any(x.op == "scalar" and x.data == name for made in steps.all for x in made.named)]
    imports: dict[str, list[str]] = {}
    for module, word in IMPORTS:
        if word in printer.needs:
            imports.setdefault(module, []).append(word)
    at = [f"{rows} = ROWS.team.row()", f"if {rows} < sizes.{rows}:"]
    if stacks:
        which = f"udiv(index, sizes.{rows})"
        at = ["index = ROWS.team.row()", f"if index < {count_of(stacks)}sizes.{rows}:",
              *(f"    {stack.name} = {part}" for stack, part in zip(stacks, parts_of_stacks(stacks, which))),
              f"    {rows} = index - {which if stacks[1:] else stacks[0].name} * sizes.{rows}"]
    lines = [
        f'"""{title}"""', "", *(["import math"] if "math" in printer.needs else []), "from dataclasses import dataclass", "",
        "import numpy as np", "",
        *(f"from {module} import {', '.join(words)}" for module, words in imports.items()), "",
        *(f'{short} = np.dtype("{kind}")' for kind, short in DTYPES.items() if short in printer.needs),
        f"ROWS = Rows({shown_team(team)}, {shown_source(source)}, vector={vector}, dtype=F32)",
        f"SHARED_BYTES = {team.shared_bytes}", "", "",
        "@dataclass(frozen=True)", "class Sizes(Component):",
        *(f"    {name}: Scalar" for name in (*counted, "columns", *used)), "", "",
        f"def kernel({', '.join(['sizes', *outs, *reads, *callees.names])}):", *(f"    {line}" for line in (*begin, *at)),
        *(f"        {line}" for line in printer.lines), "", "",
        "def tiles(sizes):", f"    return blocks({' * '.join(f'sizes.{name}' for name in tile)}, ROWS.team.rows)",
        *printer.functions]
    return Printed("\n".join(lines) + "\n", (), tuple(outs), tuple(reads), (*counted, "columns"), tuple(tile), tuple(used),
                   team.block, callees=callees, updated=tuple(name for name in outs if name in program.reads))


def shown_team(team: RowTeam) -> str:
    return f"WarpTeam(1, F32, {team.rows})" if isinstance(team, WarpTeam) else f"BlockTeam({team.warps}, F32)"


def shown_source(x: RowSource) -> str:
    return f"RegisterRow(pieces={x.pieces}, whole={x.whole})" if isinstance(x, RegisterRow) else "StreamedRow()"


# --------------------------------------------------------------------------------------------------
# All passes of a program of rows: from its trace to its text.

F32 = np.dtype(np.float32)


def derived(name: str, program: RowProgram, mapping: Mapping, infos: Names[str, ArrayInfo], numbers: list[str],
            device: DeviceInfo) -> Printed:
    """``numbers``: the names of the run-time scalars. Raises ConfigError for a mapping of products."""
    mapping.refuse_products()
    steps = steps_of(program)
    whole = {x.data[0].name for x in steps.rows if x.op == "load"}
    whole |= {store.parameter.name for store in program.stores if len(store.parameter.shape) > len(program.indices)}
    widest = max(infos[key].dtype.itemsize for key in whole)
    found = choose(RowsProblem(program.columns, widest, F32, steps.at_once), device).spec
    team, source, _ = found
    _check_places(mapping, steps, isinstance(source, RegisterRow))
    threads = "a warp" if team.warps == 1 else f"a block of {team.warps} warps"
    title = (f"{name}: {threads} a row; rows are "
             f"{'held in registers' if isinstance(source, RegisterRow) else 'loaded anew for each fold and store'}.")
    used = {key: info.dtype for key, info in infos.items()}
    return printed(title, program, steps, found, used, numbers, device.starts_early)


def _check_places(mapping: Mapping, steps: RowSteps, is_held: bool) -> None:
    """Raises ConfigError for names of no rows, and for rows that no registers hold."""
    names = {x.name for x in steps.rows if is_vector(x)}
    for name, place in mapping.places.items():
        if name not in names:
            raise ConfigError(f"Mapping(places={{{name!r}: {place!r}}}): the rows that are loaded or mapped are "
                              f"{', '.join(sorted(names))}")
        if not is_held or place == SHARED:
            raise ConfigError(f"Mapping(places={{{name!r}: {place!r}}}): " + (
                "threads hold rows in registers" if is_held else "a row is longer than a block's registers and is loaded "
                "again for each use; use shorter rows"))
