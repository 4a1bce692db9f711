"""Element-wise values of a round as text: a function of one element, and the line that applies it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gemmkit.programs.called import CALLED, EXTENT, Callee, is_place_made, is_whole_constant, is_whole_load
from gemmkit.programs.chains.algebra import Ranges, bounds_of
from gemmkit.programs.chains.chain import BELOW, FILLED, LOWERED, READ, Chain, ChainPlaces, OperandBlock, depends
from gemmkit.programs.chains.schedule import ChainOrder, Compute, Event, Full, ScheduleChoice
from gemmkit.programs.lengths import PIECE, whole_text
from gemmkit.programs.text import BEFORE, WRITTEN, is_converted, listed, name_of_stack, of_blocks, parts_of_stacks
from gemmkit.programs.trace import COMPARISONS, CONDITIONS, Value
from gemmkit.programs.values import Axis, Index, unique

CALLS = dict(exp2="exp2", log2="log2", reciprocal="reciprocal", tanh="tanh", sqrt="math.sqrt", max="maximum",
             finite="finite", fma="fma", difference="difference", erf="math.erf", pow="math.pow", abs="abs")
EXACT = 2.0**24                        # whole numbers up to it are float32
BEYOND = 256                           # places that a tile's last block has behind an array's end, at most
ELEMENTWISE = frozenset({*WRITTEN, *CALLS, *CALLED, BELOW, LOWERED, "inside"})


def is_whole_number(x: Value) -> bool:
    """Whether a value is a place or made of places, which are counted in whole numbers; a length; or a condition."""
    return x.op in CONDITIONS or x.op == "length" or is_place_made(x)


def _may_be_whole(x: Value) -> bool:
    return is_whole_number(x) or is_whole_constant(x)


def largest(x: Value, sizes: Mapping[Any, int]) -> float:
    """A bound of the size of a whole number that is made of places; infinity where there is none."""
    if x.op == "const":
        return abs(float(x.data))
    if x.op == "coordinate":
        extent = x.data.size if isinstance(x.data, Axis) else sizes[x.data.of_loop.extent]
        return float(extent + BEYOND)
    if x.op not in ("add", "sub", "mul", "neg", "abs"):
        return math.inf
    bounds = [largest(y, sizes) for y in x.args]
    return math.prod(bounds) if x.op == "mul" else sum(bounds)


def may_be_inexact(chain: Chain) -> Iterator[Value]:
    """Whole numbers that no float32 may be, where axes are long: texts convert these another way."""
    pending, seen = [*chain.values, *(store.value for store in chain.stores)], set[Value]()
    while pending:
        x = pending.pop()
        if x not in seen:
            seen.add(x)
            pending += x.args
            if x.op not in CONDITIONS and is_whole_number(x):
                yield x


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
    text = WRITTEN[x.op].format(*args)
    return text if top else f"({text})"


@dataclass
class Element:
    """``known``: the name of a value that is computed elsewhere, None for one that is written here. ``place``: where a tile
    or a round is, by its index; or of rows of a piece its ``"origin"`` and its ``"count"``. ``lowered``: what parts of
    exponents call the three operands of their fma ("": by their own names); others are written as differences. ``is_whole``:
    whether all of a round's places are there."""

    chain: Chain
    root: Value
    known: Callable[[Value], str | None]
    place: Callable[..., str]
    lowered: Mapping[Value, tuple[str, ...]]
    is_whole: bool = False
    zips: list[str] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)
    arrays: set[str] = field(default_factory=set)
    callees: list[Callee] = field(default_factory=list)
    rows_used: bool = False
    by_lanes: bool = False             # whether a warp has the columns, one after the other
    _stays_inside: bool = False        # whether places are those of elements that are there

    def text(self) -> str:
        made = self.of(self.root, top=True)
        if not self.zips and not self.rows_used and not (self.root.op == READ and is_whole_load(self.root)):
            made = f"convert(F32, {made})"             # whole numbers are compared exactly
        return made

    @property
    def is_rows(self) -> bool:
        return len(self.root.dims) == 1

    @property
    def unit(self) -> int:
        """Of the columns that whole axes are computed with (`ScheduleChoice`)."""
        return self.chain.unit

    def of(self, x: Value, top: bool = False, whole: bool = False) -> str:
        if x.op == "coordinate":
            return f"({self._place(x.data)})"
        if x.op == EXTENT:
            self.extra[f"count_{x.data.name}"] = self._extent(x.data)
            return f"count_{x.data.name}"
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
        if x.op in CALLED:
            return self._called(x)
        if x.op == LOWERED and x not in self.lowered:
            return f"({self.of(x.args[3])} * {self.of(x.args[4])})"
        if x.op == LOWERED:
            args = [self._outside(y, name) if name else f"convert(F32, {self.of(y)})"
                    for y, name in zip(x.args, self.lowered[x])]
            return f"fma({', '.join(args)})" if args[2:] else f"({args[0]} * {args[1]})"
        if x.op == BELOW and x.args[1:]:
            self.extra["over"] = self.lowered[x][0]
            return f"{self.of(x.args[0])} * over"
        if x.op == BELOW:
            return self.of(x.args[0])
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
        if x.op in WRITTEN:
            text = WRITTEN[x.op].format(*args)
            return text if top else f"({text})"
        if x.op == "inside":
            index = x.data.name
            self.extra["room"] = f"{self.chain.stop} - {index} - column"
            front = ""
            if self.chain.starts_within:
                self.extra["front"], front = f"{self.chain.shown} - {index} - column", "front <= column_at(i) and "
            text = f"{args[0]} if {front}column_at(i) < room else {args[1]}"
            return text if top else f"({text})"
        return f"{CALLS[x.op]}({', '.join(args)})"

    def _called(self, x: Value) -> str:
        """Of elements that are not there a function is told the places of the last ones that are: it may have an array."""
        if x.data not in self.callees:
            self.callees.append(x.data)
            self.extra[x.data.name] = x.data.name
        is_of_scores = x.data.is_mask and len(self.root.dims) == 2 and self.root.dims[1] is self.chain.index
        return self._shown(x) if is_of_scores else self._call(x)

    def _shown(self, x: Value) -> str:
        """What a mask shows of the rounds' places: each row's bounds are worked out once, and compared with constants."""
        mask, (rows, index), found = x.data.f, self.root.dims, []
        row, place = f"{self.place(rows)}{self.chain.of_group} + own_row()", f"{self.place(index)} + column"
        given = ", ".join([x.data.name, row, f"{self._extent(rows)} - 1", place, *map(self._of_tile, x.args[2:])])
        for has_bound, kind, sign in ((mask.has_first, "first", ">="), (mask.has_end, "end", "<")):
            if has_bound:
                name = f"{kind}_of_{x.data.name}"
                self.extra[name] = f"{kind}_limits({given})"
                found.append(f"(column_at(i) {sign} row_value({name}, i))")
        if mask.has_visible:
            found.append(self._call(x, "shows"))
        return f"({' and '.join(found)})" if found[1:] else found[0]

    def _of_tile(self, x: Value) -> str:
        """A whole number of a tile, where the function of an element is applied."""
        made = Element(self.chain, x, self.known, self.place, self.lowered, self.is_whole)
        return made.outside(made.of(x, whole=True))

    def outside(self, text: str) -> str:
        """A text of numbers that tiles change, with what the function of an element is given in place of what it takes."""
        return re.sub(r"[A-Za-z_]\w*", lambda name: self.extra.get(name[0], name[0]), text)

    def _call(self, x: Value, method: str = "") -> str:
        args = []
        for n, y in enumerate(x.args):
            if x.data.is_real(n) and is_whole_number(y):
                args.append(self._float(y))
                continue
            is_whole = x.data.is_counted(n, y)
            self._stays_inside = is_whole and x.data.stays_inside
            text = self.of(y, top=True, whole=is_whole)
            is_whole = is_whole or is_whole_load(y)
            is_float = y.op not in ("const", "load", READ) and self.known(y) is not None
            args.append(text if is_whole or is_float else f"convert(F32, {text})")
            self._stays_inside = False
        return str(x.data.text(x.op, args, method))

    # -- places -------------------------------------------------------------------------------------------------------

    def _compared(self, x: Value) -> str | None:
        """A condition that bounds the place by the row: each row's bound, counted from the thread's first place, is worked
        out once, and compared with constants."""
        found = bounds_of(x, self.chain.rows, self.chain.index)
        if found is None or self.root.dims[1] is not self.chain.index:
            return None
        for bounds, kind, sign in ((found[0], "begins", ">="), (found[1], "ends", "<")):
            for bound in bounds:
                row = f"{self.place(self.chain.rows)}{self.chain.of_group} + own_row()"
                given = f"limits({row}, {self.place(self.chain.index)} + column, {bound.slope}, {bound.shift})"
                name = unique(kind, {other for other, held in self.extra.items() if held != given})
                self.extra[name] = given
                return f"(column_at(i) {sign} row_value({name}, i))"
        return None

    def _float(self, x: Value) -> str:
        """A whole number as float32. Of places it is made of where the thread's first is, converted once: what a conversion
        takes on each element is what an exponential takes."""
        is_of_stack = x.op == "coordinate" and isinstance(x.data, Index) and x.data.stack
        if is_of_stack or x.op == EXTENT or largest(x, self.chain.sizes) >= EXACT:
            return f"convert(F32, {self.of(x, whole=True)})"
        if x.op == "coordinate":
            name, begin, further = self._begin(x.data)
            self.extra[f"{name}_float"] = f"convert(F32, {begin})"
            return f"({name}_float + convert(F32, {further}))"
        args = [scalar_text(y) if y.op == "const" else self._float(y) for y in x.args]
        if x.op == "abs":
            return f"abs({args[0]})"
        return f"({WRITTEN[x.op].format(*args)})"

    def _place(self, dim: Any) -> str:
        if isinstance(dim, Index) and dim.stack:
            self.extra[name_of_stack(dim)] = self.place(dim.of_loop)
            return dim.text(name_of_stack)
        name, begin, further = self._begin(dim)
        self.extra[name] = begin
        place = f"{name} + {further}"
        return self._last(dim, place) if self._stays_inside and isinstance(dim, Index) else place

    def _extent(self, index: Index) -> str:
        """How many places there are."""
        is_cut = index is self.chain.rows and self.chain.piece is not None
        return self.place(index, "count") if is_cut else self.chain.extent_of(index)

    def _last(self, index: Index, place: str) -> str:
        """A place, or the last one that is there; of a piece without any the first."""
        last = f"last_{index.name}"
        self.extra[last] = f"sizes.{index.name} - 1" if index.piece is None else (
            f"max({self._extent(index) if index is self.chain.rows else self.chain.stop} - 1, 0)")
        return f"min({place}, {last})"

    def _in_array(self, index: Index, is_there: bool = False) -> str:
        """Where an element of an array is along an axis: one that is there."""
        if index.stack:
            return self._place(index)
        is_there = is_there or (self.is_whole and index is self.chain.index)
        if index.piece is None:
            return self._place(index) if is_there else self._last(index, self._place(index))
        origin, last = f"{index.name}_origin", f"last_of_{index.name}"
        self.extra[origin] = self.place(index, "origin")
        if is_there:
            return f"{origin} + {self._place(index)}"
        self.extra[last] = f"sizes.{index.name} - 1"
        return f"min({origin} + {self._place(index)}, {last})"

    def _begin(self, dim: Any) -> tuple[str, str, str]:
        """Where the thread's first place is: its name and its expression; and how much further the element's is."""
        if dim is self.chain.rows:
            begin = f"carried({self.place(dim)}{self.chain.of_group} + own_row())"
            return "row", begin, "i * 8" if self.is_rows else "row_of(i)"
        if self.by_lanes:
            return "place", f"{self.place(dim)} + lane", "i * 32"
        at = "column_of(i)" if self.root.op == READ else "column_at(i)"
        if isinstance(dim, Axis):
            half = self.chain.half_of(dim)
            return ("first_column", f"group * {half} + column", at) if half else ("column", "column", at)
        return "place", f"carried({self.place(dim)} + column)", at

    def _load(self, x: Value) -> str:
        parameter, key = x.data
        self.arrays.add(parameter.name)
        is_before = any(store.parameter is parameter for store in self.chain.stores)
        name = f"{BEFORE if is_before else ''}{parameter.name}"
        self.extra[name] = name
        whole = [dim for dim in x.dims if isinstance(dim, Axis)]
        at = ", ".join([*(self._in_array(index, is_before) for index in key), *map(self._place, whole)])
        found = f"{name}[{at}]"
        if is_before:
            rows, count = self.chain.rows, f"count_{self.chain.rows.name}"
            self.extra[count] = self._extent(rows)
            found = f"element_before({name}, ({at}), {self._place(rows)} < {count})"
        filled = [f"{self._place(dim)} < {dim.size}" for dim in whole
                  if dim.size % self.unit or dim.size < 2 * self.chain.half_of(dim)]
        return f"(convert(F32, {found}) if {filled[0]} else convert(F32, 0.0))" if filled else found

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


def given_to_pages(chain: Chain, block: OperandBlock, place: Callable[[Index], str], at: str, stop: str) -> str:
    """What the copy of a block takes whose rows lie in pages, beside where it is in each of them."""
    index = chain.index
    assert block.paged is index and index.extent.table is not None and index.line is not None
    return f"{index.extent.table.name}, {index.line.text(place)}, {at}, {stop}"


# --------------------------------------------------------------------------------------------------
# Rounds and tiles as text, for either role: what the scheduler has ordered, around the loops that it is ordered for.

PRODUCER, CONSUMER = "producer", "consumer"


@dataclass
class Role:
    """What both roles print: tiles, ranges of rounds, loops. A subclass prints events and the ends of tiles."""

    chain: Chain
    places: ChainPlaces
    choice: ScheduleChoice
    order: ChainOrder
    ranges: Ranges
    has_tests: bool
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    before: bool = False               # the end of a tile that another one has begun beside

    kind = PRODUCER

    def put(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line if line else "" for line in lines]

    # -- names --------------------------------------------------------------------------------------------------------

    @property
    def n(self) -> str:
        return self.chain.index.name

    @property
    def step(self) -> int:
        return self.choice.blocks[self.n]

    def of_tile(self, index: Index, what: str = "") -> str:
        """Where the tile is that is spoken of; ``what``: or the origin or the count of its rows, which are a piece's."""
        name = f"{index.name}_{what}" if what else index.name
        return f"before_{name}" if self.before and index in self.chain.indices else name

    @property
    def piece(self) -> str:
        """What a text calls the piece that a tile's rows are of."""
        return "" if self.chain.piece is None else str(self.chain.piece.data[1][0].name)

    @property
    def placed(self) -> list[str]:
        """What a text's `place` returns."""
        rows = self.chain.rows.name
        if self.chain.splits > 1:
            return [self.outer, rows]
        more = [f"{rows}_origin", f"{rows}_count"] if self.chain.piece is not None else []
        return [*(index.name for index in self.chain.indices), *more]

    @property
    def outer(self) -> str:
        """Which share of which of the stack a tile is of, where shares are."""
        return f"{self.n}_outer"

    @property
    def forward(self) -> str:
        return "-" if self.choice.descending else "+"

    @property
    def next_tile(self) -> str:
        made = "following(tile)" if self.choice.longest_first else f"tile + {of_blocks('grid_x()', self.choice.cluster)}"
        return f"rolled({made})"

    def put_tile(self, tile: str, before: str, start: str = "") -> None:
        """The tile, or the next one of the block that has rows: where a piece begins within a tile, one has none.
        ``before``: a piece that it is not before; ``start``: of the names of what is known of it."""
        if self.chain.piece is None:
            self.put(f"tile = {tile}")
            return
        names = ["tile", *(f"{start}{name}" for name in self.placed)]
        self.put(f"{', '.join(names)} = with_rows({tile}, {before}, sizes, {self.chain.piece.data[0].name})")
        if self.kind == CONSUMER:
            self.put(*(f"{name} = uniform({name})" for name in names))

    def uniform(self, made: str) -> str:
        """What a warp's threads have in common, which the assembler does not see of what is loaded."""
        return f"uniform({made})" if self.kind == CONSUMER else made

    # -- a subclass's -------------------------------------------------------------------------------------------------

    def events(self, part: list[Event], guarded: bool, joined: bool = False) -> None:
        raise NotImplementedError

    def begin_tile(self, joined: bool) -> None:
        """Cells and what all rounds take."""

    def before_loops(self) -> None:
        """Behind the first round of a tile that is not joined to the one before."""

    def end_rounds(self) -> None:
        """Behind a tile's last round."""

    def finish_tile(self) -> None:
        """Its results."""

    def kept(self) -> list[str]:
        """What the end of a tile needs when the next one has begun."""
        return []

    def begin_again(self) -> None:
        """Cells that the end of the last tile has read."""

    # -- ranges -------------------------------------------------------------------------------------------------------

    @property
    def is_bounded(self) -> bool:
        return self.ranges.visits_less and bool(self.ranges.begins or self.ranges.ends)

    @property
    def first(self) -> str:
        is_own = self.chain.splits > 1 or (self.is_bounded and self.ranges.begins)
        return f"{self.n}_first" if is_own else self.chain.begin

    @property
    def end(self) -> str:
        return f"{self.n}_end" if self.has_end else f"sizes.{self.n}"

    @property
    def has_end(self) -> bool:
        """Whether tiles end where the array does not."""
        return self.chain.has_length or (self.is_bounded and bool(self.ranges.ends))

    def range(self) -> None:
        """Where a tile's rounds begin."""
        if self.chain.is_straight:
            return
        n, step, length = self.n, self.step, self.chain.length
        row, more = self.chain.rows.name, ", ".join(self.chain.given_to(self.ranges))
        visited = row if self.choice.cluster.is_single else f"{row} - rank * {self.choice.rows}"     # a cluster's first row

        def put(name: str, made: str) -> None:
            self.put(f"{name} = {self.uniform(made)}")

        if length is not None:
            if length.op == PIECE:
                parameter, (piece,) = length.data
                put(f"{n}_origin", f"begin_of({parameter.name}, {piece.text()}, sizes.{n})")
                put(self.chain.stop, f"begin_of({parameter.name}, {piece.text()} + 1, sizes.{n}) - {n}_origin")
            else:
                put(self.chain.stop, f"min(max({whole_text(length)}, 0), sizes.{n})")      # of 64 bits until here
            if self.chain.asks_extent:
                self.put(f"{self.chain.extent_of(self.chain.index)} = {self.chain.stop}")
        elif self.chain.has_length:
            self.put(f"{self.chain.stop} = sizes.{n}")
        if self.chain.start is not None:
            shown, stop = self.chain.shown, self.chain.stop
            self.put(f"{shown} = max({whole_text(self.chain.start)}, 0)")
            put(shown, f"{shown} if {shown} < {stop} else sizes.{n}")              # without rounds nothing is loaded
            self.put(f"{stop} = {stop} if {shown} < {stop} else 0")
            if self.chain.starts_within:
                within = min(step, self.chain.index.extent.of_page)
                self.put(f"{self.chain.begin} = udiv({self.chain.shown}, {within}) * {within}")
        if self.is_bounded:
            for name, function, bounds in ((self.first, "first_seen", self.ranges.begins),
                                           (self.end, "end_seen", self.ranges.ends)):
                if bounds:                             # the assembler does not see that loops over them are uniform
                    put(name, f"{function}({visited}, {more})")
        begin = self.first if self.is_bounded and self.ranges.begins else self.chain.begin
        begins = begin != "0"
        if self.chain.has_length and not (self.is_bounded and self.ranges.ends):
            self.put(f"{self.end} = max({self.chain.stop}, {f'{begin} + 1' if begins else '1'})")
        if self.chain.splits > 1:
            of_tile, each, stop = f" - {begin}" if begins else "", f"{n}_each", self.chain.stop
            self.put(f"{each} = blocks(blocks({self.end}{of_tile}, {step}), sizes.{self.chain.share}) * {step}")
            put(self.first, f"{f'{begin} + ' if begins else ''}{self.chain.share} * {each}")
            put(self.end, f"max(min({self.end}, {self.first} + {each}), {self.first} + 1)")
            put(stop, f"{stop} if {self.first} < {stop} else 0")
        if self.kind == CONSUMER and self.ranges.has_tests and self.ranges.has_free:
            for name, function, bounds in ((f"{n}_free", "free_from", self.ranges.begins),
                                           (f"{n}_tested", "free_to", self.ranges.ends)):
                if bounds:
                    put(name, f"{function}({row}, {more})")
        if self.kind == CONSUMER and self.chain.starts_within and self.has_tests and self.ranges.has_free:
            shown = self.chain.shown
            self.put(f"{n}_free = {f'max({n}_free, {shown})' if self.ranges.begins else shown}")
        begins = self.first != "0"
        if self.choice.staggered:
            self.put(f"{n} = {self.uniform(f'first_round({row}, sizes)')}", f"{n}_first = 0 * {n}")
        elif self.choice.descending:
            count = f"(blocks({self.end}{f' - {self.first}' if begins else ''}, {step}) - 1) * {step}"
            self.put(f"{n} = {self.first} + {count}" if begins else f"{n} = {count}")
        else:
            self.put(f"{n} = {self.first if begins else '0 * tile'}")

    def loops(self) -> None:
        """A tile's rounds but the first ones: those with tests, and the others."""
        if self.chain.is_straight:
            self.events(self.order.round, True)
            return
        n, step, ranges = self.n, self.step, self.ranges
        tests, begins = self.kind == CONSUMER and self.has_tests, bool(ranges.begins) or self.chain.starts_within
        if self.choice.staggered:                      # from its own first block down, and then from the last one
            self.put(f"while {n} >= {n}_first:")
            self.depth += 1
            for more in (f" and {n} + {step} > {self.chain.stop}", "")[not (tests and ranges.has_free):]:
                self.loop(f"{n} >= {n}_first{more}", tests and bool(more or not ranges.has_free))
            second = self.uniform(f"first_round({self.chain.rows.name}, sizes)")
            self.put(f"{n}_first = {second} + {step} if {n}_first == 0 else sizes.{n}",
                     f"{n} = (blocks(sizes.{n}, {step}) - 1) * {step}")
            self.depth -= 1
            return
        free_end = f"{n}_tested" if ranges.ends else self.chain.stop
        if self.choice.descending:
            if tests and ranges.has_free:
                if ranges.ends or not self.order.before:
                    self.loop(f"{n} >= {self.first} and {n} + {step} > {free_end}", True)
                if begins:
                    self.loop(f"{n} >= {self.first} and {n} >= {n}_free", False)
                    self.loop(f"{n} >= {self.first}", True)
                    return
            self.loop(f"{n} >= {self.first}", tests and not ranges.has_free)
            return
        if tests and ranges.has_free:
            if ranges.begins or (begins and not self.order.before):        # else the first round is the one with tests
                self.loop(f"{n} < {self.end} and {n} < {n}_free", True)
            bound = f"{n} < {self.end} and " if self.chain.splits > 1 else ""
            self.loop(f"{bound}{n} + {step} <= {free_end}", False)
        self.loop(f"{n} < {self.end}", tests)

    def loop(self, condition: str, guarded: bool) -> None:
        self.put(f"while {condition}:")
        self.depth += 1
        self.events(self.order.round, guarded)
        self.advance_round()
        self.depth -= 1

    def advance_round(self) -> None:
        moved = f"{self.n} {self.forward} {self.step}"
        self.put(f"{self.n} = rolled({moved})" if self.kind == PRODUCER else f"{self.n} {self.forward}= {self.step}")

    # -- tiles --------------------------------------------------------------------------------------------------------

    def tiles(self) -> None:
        if not self.choice.cluster.is_single:
            self.put("rank = cluster_rank()")
        self.put_tile(of_blocks("block_x()", self.choice.cluster), "0")
        if self.order.join:
            self._joined_tiles()
            return
        self.put("while tile < tiles(sizes):")
        self.depth += 1
        self.begin(False)
        if self.order.before:
            self.events(self.order.before, True)
            self.advance_round()
            self.before_loops()
        self.loops()
        if self.order.lags:                            # the last product still reads what all rounds take
            self.events(self.order.after, False)
        self.end_rounds()
        if not self.order.lags:
            self.events(self.order.after, False)
        self.finish_tile()
        self.put_tile(self.next_tile, self.piece)
        self.depth -= 1

    def _joined_tiles(self) -> None:
        """Rounds run on: the end of a tile is beside the beginning of the next."""
        may_have_none = self.chain.piece is not None   # else every block has a tile
        if may_have_none:
            self.put("if tile < tiles(sizes):")
            self.depth += 1
        self.begin(False)
        self.events(self.order.before, True)
        self.advance_round()
        self.depth -= may_have_none
        self.put("while tile < tiles(sizes):")
        self.depth += 1
        self.loops()
        self.end_rounds()
        self.put_tile(self.next_tile, self.piece, "next_")
        self.put("if tile < tiles(sizes):")
        self.depth += 1
        origins = [f"{self.n}_origin"] if self.chain.index.piece is not None else []
        kept = [*dict.fromkeys([*self.placed, *(index.name for index in self.chain.indices)]), *origins, *self.kept()]
        self.put(f"{', '.join(f'before_{name}' for name in kept)} = {', '.join(kept)}")
        if self.chain.piece is not None:
            self.put(f"{', '.join(self.placed)} = {', '.join(f'next_{name}' for name in self.placed)}")
        self.begin(True)
        self.events(self.order.join, True, joined=True)
        self.before = True
        self.finish_tile()
        self.before = False
        self.begin_again()
        self.advance_round()
        self.depth -= 1
        self.put("else:")
        self.depth += 1
        self.events(self.order.after, False)
        self.finish_tile()
        self.depth -= 2

    def begin(self, joined: bool) -> None:
        chain = self.chain
        if chain.piece is None:
            given = "tile, sizes" if self.choice.cluster.is_single else "tile, rank, sizes"
            self.put(f"{', '.join(self.placed)} = place({given})")
        if chain.splits > 1:
            which = f"udiv({self.outer}, sizes.{chain.share})"
            self.put(f"{chain.share} = {self.outer} - {which} * sizes.{chain.share}")
            self.put(*(f"{stack.name} = {part}" for stack, part in zip(chain.stacks, parts_of_stacks(chain.stacks, which))))
        self.begin_tile(joined)
        self.range()


@dataclass
class ProducerRole(Role):
    """One thread has TMA fill stages, in the order in which consumers take them."""

    def begin_tile(self, joined: bool) -> None:
        for ring in self.places.lone():
            self.fill(Full(ring, tuple(ring.blocks)), "", False)

    def kept(self) -> list[str]:
        return [self.n, *([self.chain.stop] if self.chain.has_length and self.chain.index.is_paged else [])]

    def events(self, part: list[Event], guarded: bool, joined: bool = False) -> None:
        for event in part:
            if isinstance(event, Full):
                ring = event.ring
                late = bool(self.order.late) and all(
                    d in self.order.late for (d, _), block in self.places.blocks.items() if block.ring is ring)
                back = "+" if self.choice.descending else "-"
                at = f"{'before_' if joined else ''}{self.n} {back} {self.step}" if late else self.n
                self.fill(event, at, late and joined)

    def fill(self, event: Full, at: str, of_last: bool) -> None:
        name, nbytes = event.ring.name, sum(map(self.choice.block_bytes, event.blocks))
        self.put(f"ring_{name}.acquire(at_{name})", f"ring_{name}.expect(at_{name}, {nbytes})")
        for block in event.blocks:
            if block.paged is not None:
                self.put(f"{block.name}_tile.load_pages(map_{block.name}, ({self.corner(block, at, of_last)}), "
                         f"{self.pages_of(block, at, of_last)}, ring_{name}, at_{name})")
                continue
            part, rank = ("_part", ", rank") if self.choice.is_shared(block, self.chain.rows) else ("", "")
            self.put(f"{block.name}_tile.load{part}(map_{block.name}, ({self.corner(block, at, of_last, event.first)}), "
                     f"ring_{name}, at_{name}{rank})")
        self.put(f"at_{name} = ring_{name}.advance(at_{name})")

    def pages_of(self, block: OperandBlock, at: str, of_last: bool) -> str:
        """The table, the line of it, where the block begins, and the place behind the last row that is there."""
        return given_to_pages(self.chain, block, lambda index: f"before_{index.name}" if of_last else index.name, at,
                              f"{'before_' if of_last and self.chain.has_length else ''}{self.chain.stop}")

    def corner(self, block: OperandBlock, at: str, of_last: bool, first: int = 0) -> str:
        """Where a block begins, as TMA counts: the contiguous axis first. ``first``: of a product in parts."""
        def place(dim: Index | Axis) -> str:
            if isinstance(dim, Axis):
                return f"{block.begin(dim, first)}"
            before = "before_" if of_last else ""
            origin = f"{before}{dim.name}_origin + " if dim.piece is not None else ""
            return f"{origin}{at if dim is self.chain.index else before + dim.name}"

        stacks = [stack.text(place) for stack in block.stacks[::-1] if stack.base is None or stack.base is not block.paged]
        return listed([place(block.dims[1]), *([] if block.paged else [place(block.dims[0])]), *stacks])


# --------------------------------------------------------------------------------------------------
# What a text calls its values: a name is a register, so that what is made in another's place shares its name.
#
# | value | name |
# |---|---|
# | a cell, as a round begins, and what becomes of it | one, where nothing reads the old value behind the new one |
# | what a product is added to, and the product | one, where the product alone reads it |
# | what a test lets through, and what it tests | one: rounds without tests leave the line out |
# | another | the user's, or what it is |

DEFAULT = dict(mul="scaled", rowmax="row_top", rowsum="row_sum", neg="minus", reciprocal="over", where="chosen",
               max="larger", fma="value", inside="value", add="value", sub="value", dot="s", call="value", test="holds")


class Naming:
    """``tests``: values that rounds without tests leave out. ``parts``: the rounds' events."""

    def __init__(self, chain: Chain, places: ChainPlaces, tests: set[Value], parts: list[list[Event]], taken: set[str]):
        self.chain, self.tests, self.taken = chain, tests, set(taken)
        self.outs = {c.out for c in chain.carried} | {store.value for store in chain.stores} | {*chain.added}  # have lines
        self.users: dict[Value, list[Value]] = {}
        for x in chain.values:
            for y in x.args:
                self.users.setdefault(y, []).append(x)
        self.names: dict[Value, str] = {}
        self.events = [{x: n for n, event in enumerate(part) if isinstance(event, Compute) for x in event.values}
                       for part in parts]
        self._give(places)

    def _give(self, places: ChainPlaces) -> None:
        body = set(self.chain.body)
        for c in self.chain.carried:
            name = self.names[c.inside] = self.names[c.after] = self.fresh(c.inside.name or "cell")
            if all(x is c.out or depends(c.out, {x}, body) for x in self.users.get(c.inside, ())):
                self.names.setdefault(c.out, name)
        for x in reversed(self.chain.body):
            if x.op == "dot":
                self.names[x] = self.names.get(x) or self.fresh(x.name or DEFAULT["dot"])
                added = x.args[2] if len(x.args) > 2 else None
                if added is not None and self.users[added] == [x] and added not in self.outs and added not in self.names:
                    self.names[added] = self.names[x]
        for dot, first in places.peeled.items():
            self.names[first] = self.names[dot]
        for x in self.chain.body:
            if x.data == FILLED and self.users[x.args[1]] == [x] and x.args[1] not in self.outs:
                self.names[x] = self.of(x.args[1])     # what is filled up is needed no more
            if x in self.tests and not self._within_a_test(x):
                self.names[x] = self.of(self.tested(x))

    def tested(self, x: Value) -> Value:
        """What is there where the tests are left out."""
        while x in self.tests:
            x = x.args[0] if x.op == "inside" else x.args[1]
        return x

    def _within_a_test(self, x: Value) -> bool:
        users = self.users.get(x, [])
        return len(users) == 1 and users[0] in self.tests and users[0].op == "inside" and x not in self.outs

    def fresh(self, name: str) -> str:
        out = unique(name, self.taken)
        self.taken.add(out)
        return out

    def of(self, x: Value) -> str:
        if x not in self.names:
            self.names[x] = self.fresh(x.name or DEFAULT.get(x.op, x.op))
        return self.names[x]

    def is_inlined(self, x: Value) -> bool:
        """Whether a value is written where it is used, and not computed in a line of its own."""
        if x.op not in ELEMENTWISE:
            return False
        if is_whole_number(x) or not x.dims or (len(x.dims) == 1 and x.dims[0] is not self.chain.rows):
            return True
        if x in self.outs or x in self.names:
            return False
        if x in self.tests:
            return self._within_a_test(x)
        users = self.users.get(x, [])
        if len(users) != 1 or users[0].op not in ELEMENTWISE or len(users[0].dims) != len(x.dims):
            return False
        if users[0].op == LOWERED and x is users[0].args[0]:           # which has another in its place in a rare branch
            return False
        if users[0] in self.tests and x is self.tested(users[0]):
            return False
        return all(x in part and part[x] == part[users[0]] for part in self.events if users[0] in part)
