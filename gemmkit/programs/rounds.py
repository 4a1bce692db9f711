"""Forms of programs: functions of rows, and rounds of recurrences, the steps that they take, in which order, and the text of
an element.

`gemmkit.programs.rows` and `gemmkit.programs.recurrences` print kernels of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.collectives.scheduler import Slot
from gemmkit.kernels.sm90.store import own_column
from gemmkit.lang.aggregates import convert
from gemmkit.lang.components import dataclass as component
from gemmkit.lang.host import Numeric
from gemmkit.lang.registers import each, generate
from gemmkit.programs.called import CALLED, EXTENT, F32, F64, is_whole_load
from gemmkit.programs.chains.chain import BELOW, Chain
from gemmkit.programs.chains.elements import CALLS, Element, ProducerRole, scalar_text
from gemmkit.programs.chains.schedule import Event, ScheduleChoice
from gemmkit.programs.collectives import ROWS
from gemmkit.programs.launches import ROW_RESULTS
from gemmkit.programs.places import is_tiled, refuse_pieces, walked
from gemmkit.programs.text import SIGNS, WRITTEN, name_of_stack
from gemmkit.programs.trace import COMPARISONS, Carried, Loop, StoreStatement, Value, refuse_update
from gemmkit.programs.values import Axis, Index, Parameter, number_text, refused, shown
from gemmkit.ptx.memory import load_shared, shared, store_shared

if TYPE_CHECKING:
    from gemmkit.programs.chains.text import Consumer
    from gemmkit.programs.recurrences import RecurrencePrinter, RoundValue

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453

# --------------------------------------------------------------------------------------------------
# What a chain's products begin at by columns. All threads need some of a round's columns, and each number is a load and
# some arithmetic. A warp of the producer's computes it once, a round ahead, and puts it into a stage of shared memory, from
# which threads begin their sums. Gradients of keys took 0.93 of the time so with heads of 128, and 0.86 with heads of 64;
# five products in one kernel 0.85 and 0.84 (H200).

WARP = 32


@component(frozen=True)
class StagedColumns(Component):
    """``arrays`` numbers of each of a round's ``columns`` in a stage, and whether one is so large that sums begin at 0."""

    columns: int
    arrays: int
    offset: int

    def begin(self, stage: int, array: int) -> int:
        return stage * (self.arrays * self.columns + 4) + array * self.columns

    def put(self, values: tuple, array: int, slot: Slot, lane: int) -> None:
        """A lane's columns, a warp's apart."""
        each(put_column, values, self, self.begin(slot.stage, array), lane)

    def say(self, is_large: bool, slot: Slot, lane: int) -> None:
        said = convert(F32, 1.0 if is_large else 0.0)
        if lane == 0:
            store_shared(shared(F32, self.offset), self.begin(slot.stage, self.arrays), 0, (said,))

    def is_large(self, slot: Slot) -> bool:
        return load_shared(shared(F32, self.offset), self.begin(slot.stage, self.arrays), 0, 1)[0] != 0.0

    def take(self, count: int, array: int, slot: Slot) -> tuple:
        """Of each of a thread's ``count`` sums the number of its column."""
        pairs = generate(count // 4, column_pair, self, self.begin(slot.stage, array) + own_column())
        return generate(count, of_pair, pairs)


def put_column(x: Numeric, n: int, to: StagedColumns, begin: int, lane: int) -> None:
    if lane + n * WARP < to.columns:
        store_shared(shared(F32, to.offset), begin + lane, n * WARP, (x,))


def column_pair(i: int, of: StagedColumns, begin: int) -> tuple:
    return load_shared(shared(F32, of.offset), begin, i * 8, 2)


def of_pair(i: int, pairs: tuple) -> Any:
    return pairs[i // 4][i % 2]


def times(x: Numeric, i: int, by: Numeric) -> Numeric:
    return x * by


def column_stages(choice: ScheduleChoice, chain: Chain) -> list[str]:
    """The constants of a text."""
    if not choice.columns:
        return []
    return [f"column_stages = StagedColumns(columns={choice.blocks[chain.index.name]}, arrays={len(choice.columns)}, "
            f"offset={choice.columns_at})",
            f"ring_columns = Pipeline(stages={choice.column_stages}, offset={choice.column_barriers}, full_arrivals={WARP}, "
            f"empty_arrivals={4 * choice.warpgroups}, readers=WARPS)"]


def begun_below(consumer: Consumer, x: Value) -> list[str]:
    """A consumer's lines for what a product begins at. Where that would be inexact, exponents begin at 0, and are computed
    as they are written (`Consumer.lower`). A stage of columns is awaited for the first of a round's numbers, and released
    behind the last. It is where the ring of the last one's product is, which is released later."""
    shift, *factors = x.args
    columns, ring = consumer.choice.columns, consumer.choice.column_ring
    name, count, lines, last = consumer.name(x), consumer.values(x), [], []
    over, rare = consumer.names_of(shift, "over", "rare") if factors else ("", "")
    if shift in columns and ring is not None:
        taken = sum(f"{consumer.name(y)} taken" in consumer.met for y in columns)
        consumer.met.add(f"{consumer.name(shift)} taken")
        lines += [] if taken else [f"ring_columns.wait(at_{ring.name})"]
        lines.append(f"{name} = column_stages.take({count}, {columns.index(shift)}, at_{ring.name})")
        lines += [f"{rare} = column_stages.is_large(at_{ring.name})"] if factors else []
        last += [f"ring_columns.release(at_{ring.name}.stage)"] if taken == len(columns) - 1 else []
    else:
        consumer.lowered[x] = over,
        lines += [f"{over} = reciprocal({consumer.number(factors[0])})",
                  f"{rare} = steep({consumer.name(shift)}) | ({over} * {over} > 2.0**64)", f"{name} = {consumer.applied(x)}"]
    zeros = [f"if {rare}:", f"    {name} = fill(F32, {count}, 0.0)"] if factors else []
    return [*lines, *zeros, *last]


@dataclass
class ColumnRole(ProducerRole):
    """A warp of the producer's: what the consumers' products begin at."""

    consumer: Consumer = field(kw_only=True)
    arrays: list[str] = field(default_factory=list)

    def made(self) -> None:
        """Print it: arrays that it reads are the kernel's to take."""
        if self.choice.columns:
            self.tiles()

    @property
    def taken(self) -> str:
        read = dict.fromkeys(x.data[0].name for x in self.chain.where)
        return ", ".join(dict.fromkeys(["sizes", *read, *self.arrays, *(callee.name for callee in self.ranges.masks)]))

    @property
    def rings(self) -> list[str]:
        return ["columns"] if self.lines else []

    def called(self) -> list[str]:
        return [f"        elif thread_index() >= {3 * WARP}:", f"            bring({self.taken})"] if self.lines else []

    def text(self) -> list[str]:
        if not self.lines:
            return []
        scalars = [f"    {name} = {scalar_text(x, top=True)}" for x, name in self.consumer.scalars.items()]
        return [f"def bring({self.taken}):", '    """What products begin at by columns, a lane each: global -> shared."""',
                "    zero, lane = thread_index() * 0, thread_index() % 32", *scalars,
                "    at_columns = Slot(zero, zero + 1)          # fresh rings are empty", *self.lines, "", ""]

    def begin_tile(self, joined: bool) -> None:
        """It brings nothing."""

    def events(self, part: list[Event], guarded: bool, joined: bool = False) -> None:
        if part is self.order.after:
            return
        consumer, below = self.consumer, {x.args[0]: x.args[1:] for x in self.chain.body if x.op == BELOW}
        count, is_large = -(-self.step // WARP), ""
        self.put("ring_columns.acquire(at_columns)")
        for n, x in enumerate(self.choice.columns):
            element = Element(self.chain, x, consumer.known, self.of_tile, consumer.lowered, by_lanes=True)
            text, call = element.printed(count)
            consumer.take(element)
            self.arrays += sorted(element.arrays)
            name = consumer.name(x)
            function = consumer.functions.setdefault(text, consumer.naming.fresh(f"make_{name}"))
            self.put(f"{name} = {call(function)}")
            if below[x]:
                over, rare = consumer.names_of(x, "over", "rare")
                self.put(f"{over} = reciprocal({consumer.number(below[x][0])})",
                         f"{rare} = steep({name}) | ({over} * {over} > 2.0**64)", f"{name} = apply(times, {name}, {over})")
                is_large = rare
            self.put(f"column_stages.put({name}, {n}, at_columns, lane)")
        if is_large:
            self.put(f"column_stages.say({is_large}, at_columns, lane)")
        self.put("ring_columns.commit(at_columns)", "at_columns = ring_columns.advance(at_columns)")


# --------------------------------------------------------------------------------------------------
# Rounds that store the rows of their blocks. What they do to a cell is a monoid (`gemmkit.programs.chains.monoids`) if they
# multiply it by a number and add what no cell is in: then blocks may share them.

def is_recurrence(loop: Loop) -> bool:
    """Whether rounds store the rows of their blocks, and multiply."""
    rounds = [x for x in loop.body if isinstance(x, Loop)]
    tile = [index for index in loop.indices if not index.stack]
    if len(rounds) != 1 or len(tile) > 1 or not any(isinstance(x, Value) and x.op == "dot" for x in rounds[0].body):
        return False
    stores = [x for x in rounds[0].body if isinstance(x, StoreStatement) and x.read is None]
    return any([index for index in x.key if not index.stack] == [rounds[0].indices[0], *tile] for x in stores)


@dataclass(eq=False)
class Recurrence:
    """``n``: the columns that a tile has of values and results, None where it has all. ``uses``: how often a value is
    taken."""

    loop: Loop
    rounds: Loop
    t: Index
    n: Index | None
    stacks: list[Index]
    uses: dict[Value, int] = field(default_factory=dict)

    @cached_property
    def factors(self) -> dict[Carried, Value | None] | None:
        """What rounds multiply each cell by before they add to it: a number of the round, None for 1. None if what they add
        depends on a cell: then a tile's rounds have no shares."""
        cells = {c.inside for c in self.rounds.carried}

        def depends(x: Value) -> bool:
            return x in cells or any(map(depends, x.args))

        found: dict[Carried, Value | None] = {}
        for c in self.rounds.carried:
            out = without_casts(c.out)
            kept, added = sorted(out.args, key=depends, reverse=True) if out.op == "add" else (out, None)
            factor = next((y for y in kept.args if y is not c.inside), None) if kept.op == "mul" else None
            is_scaled = factor is not None and c.inside in kept.args and not factor.dims and not depends(factor)
            if not (kept is c.inside or is_scaled) or (added is not None and depends(added)):
                return None
            found[c] = factor
        return found or None

    @property
    def stores(self) -> list[StoreStatement]:
        return [x for x in (*self.rounds.body, *self.loop.body) if isinstance(x, StoreStatement)]

    @property
    def indices(self) -> list[Index]:
        return [*self.stacks, *([] if self.n is None else [self.n]), self.t]

    def length(self, dim: Any, blocks: Mapping[str, int]) -> int:
        """Of a dimension, with these ``blocks``."""
        return blocks[self.t.name] if self.is_block(dim) else dim.size if isinstance(dim, Axis) else blocks[dim.name]

    def is_block(self, dim: object) -> bool:
        return dim is self.t or (isinstance(dim, Index) and dim.twin is self.t)


def recurrence_of(loop: Loop) -> Recurrence:
    """Raises ValueError, with the user's line, for what such tiles have not."""
    refuse_pieces(loop)
    (rounds,) = (x for x in loop.body if isinstance(x, Loop))
    (t,) = rounds.indices
    inner = next((x for x in rounds.body if isinstance(x, Loop)), None)
    if inner is not None:
        raise refused(ValueError, "a loop inside rounds that store rows (only .reference(...) runs this)", inner.line)
    if t.stack or t.is_paged or rounds.start is not None or rounds.stop is not None or loop.looked_up:
        raise refused(ValueError, "rounds that store rows go along all rows of an array, without start=, stop= and pages "
                                  "(only .reference(...) runs others)", rounds.line)
    made = Recurrence(loop, rounds, t, next((x for x in loop.indices if not x.stack), None),
                      [x for x in loop.indices if x.stack])
    for store in made.stores:
        if store.only is not None or store.read is not None:
            raise refused(ValueError, f"{store.parameter.name}[{shown(store.key)}] is added to, or stored within once(...), "
                                      "by rounds that store rows (only .reference(...) runs this)", store.line)
    _unify(made)
    for x in values_of(made):
        made.uses[x] = made.uses.get(x, 0)
        for y in x.args:
            made.uses[y] = made.uses.get(y, 0) + 1
    for root in (*(store.value for store in made.stores), *(c.out for c in rounds.carried)):
        made.uses[root] = made.uses.get(root, 0) + 1
    return made


def _unify(of: Recurrence) -> None:
    """Values that are made alike become one."""
    known, found = dict[Any, Value](), dict[Value, Value]()

    def one(x: Value) -> Value:
        if x not in found:
            x.args = tuple(map(one, x.args))
            data = (x.data[0].name, *map(id, x.data[1])) if x.op == "load" else x.data
            dims = (d if isinstance(d, Axis) else id(d) for d in x.dims)
            key = id(x) if x.op in ("carried", "after") else (x.op, *map(id, x.args), *dims, data)
            found[x] = known.setdefault(key, x)
        return found[x]

    for store in of.stores:
        store.value = one(store.value)
    for c in of.rounds.carried:
        c.out = one(c.out)


def values_of(of: Recurrence) -> Iterator[Value]:
    """All values that results and cells are made of, each once."""
    pending = [*(store.value for store in of.stores), *(y for c in of.rounds.carried for y in (c.out, c.init))]
    seen = set[Value]()
    while pending:
        x = pending.pop()
        if x not in seen:
            seen.add(x)
            yield x
            pending += x.args


def without_casts(x: Value) -> Value:
    while x.op == "cast":
        x = x.args[0]
    return x


# --------------------------------------------------------------------------------------------------
# Functions of rows as the passes see them: what is stored, and what each value has an element for.

#: What all of a row becomes one value by. ``rowmean`` and ``variance`` are made by the algebra.
FOLDS = frozenset({"rowsum", "rowmax", "rowmin", "rowmean", "variance"})
FORMS = dict(dot="a product: products of whole rows are taken in rounds, for n in sequential(...)",
             transpose="a transpose, or a reduction over rows (axis=0): rows are computed as they lie",
             carried="a cell from outside of the loop: each row begins anew",
             after="a cell from outside of the loop: each row begins anew")


@dataclass(eq=False)
class RowProgram:
    """``lengths``: those of its rows, and what a kernel calls each; ``reads``: the arrays that are read, with lines.
    ``parts``: a loop whose cells begin as the rows of the first part, ``init``, and become ``out`` of themselves and of
    those of each further one (`gemmkit.programs.chains.merging`)."""

    stacks: tuple[Index, ...]
    rows: Index
    lengths: dict[int, str]
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

    @cached_property
    def dtype(self) -> np.dtype:
        """What it is computed in: float64 if an array is of float64, if elements are of 32 bits and whole, or are rounded to
        float64."""
        held = [(x.data[0], not is_row(x)) for x in self.values if x.op == "load"]
        held += [(store.parameter, False) for store in self.stores]
        wide = [np.dtype(x.dtype) for x, is_counted in held if is_counted or np.dtype(x.dtype).kind == "f"]
        wide += [np.dtype(x.data) for x in self.values if x.op == "cast"]
        return F64 if any(x == F64 or (x.kind in "iu" and x.itemsize > 2) for x in wide) else F32


def is_vector(x: Value) -> bool:
    """Whether a value has an element for each column of each row. A constant is a number, whatever it fills."""
    return x.op != "const" and len(x.dims) == 2


def is_turned(key: Iterable[object]) -> bool:
    """Whether elements are read or stored across rows, ``x[n, m]``: along the rows of a transpose."""
    return any(isinstance(index, Axis) for index in key)


def stored_length(store: StoreStatement) -> int:
    return next((index.size for index in store.key if isinstance(index, Axis)), store.parameter.shape[-1])


def names_rows(x: Value) -> bool:
    """Whether it is rows that an array names."""
    return x.op == "load" and any(isinstance(index, Index) and index.lookup is not None for index in x.data[1])


def is_column(x: Value) -> bool:
    """Whether it has one for each column, the same in every row."""
    return x.op != "const" and len(x.dims) == 1 and isinstance(x.dims[0], Axis)


def is_row(x: Value) -> bool:
    """Whether it is one value of a row, or of all rows."""
    return not is_vector(x) and not is_column(x)


def has_rows_alone(loop: Loop) -> bool:
    """Whether tiles go along rows, and nothing goes around in rounds."""
    return is_tiled(loop, 1) and not any(isinstance(held, Loop) for held in loop.body)


def by_rows(loop: Loop) -> Loop:
    """A program of tiles of rows and columns without rounds and products, as a function of whole rows. One that reads or
    stores in another way stays as it is."""
    such = [x for x in loop.body if isinstance(x, Loop) or getattr(x, "op", "") in ("dot", "transpose")]
    if such or not is_tiled(loop, 2) or loop.indices[-1].extent.offsets is not None:
        return loop
    *indices, m, n = loop.indices
    whole, known = Axis(n.extent.length), dict[Value, Value]()

    def key_of(key: tuple) -> tuple:
        """Of a transpose, ``d[n, m]``, with the axis in its place."""
        return key[:-1] if key[-1:] == (n,) else tuple(whole if index is n else index for index in key)

    def made(x: Value) -> Value:
        if x not in known:
            dims = tuple(whole if dim is n else dim for dim in x.dims)
            data = x.data
            if x.op == "load":
                data = data[0], key_of(data[1])
            elif x.op == "coordinate" and data is n:
                data = whole
            known[x] = (Value("const", data=float(whole.size), line=x.line) if x.op == EXTENT and data is n else
                        Value(x.op, tuple(map(made, x.args)), dims, data, x.name, x.line))
        return known[x]

    stores = [held for held in loop.body if isinstance(held, StoreStatement)]
    keys = [(x.parameter, x.key) for x in stores] + [x.data for x in walked([x.value for x in stores]) if x.op == "load"]

    def is_odd(parameter: Parameter, key: tuple) -> bool:
        is_along = key[-1:] == (n,) or (key[-2:] == (n, m) and parameter.name not in loop.updated)
        return any(index.base is n for index in key) or (n in key and not (is_along and len(key) == len(parameter._shape)))

    if any(is_odd(*key) for key in keys) or any(x.only is not (None if n in x.key else n) for x in stores):
        return loop
    loop.axes.whole.add((n.extent.parameter, n.extent.axis))           # the length of rows is the text's own
    body: list[Any] = [replace(x, key=key_of(x.key), only=None, value=made(x.value)) for x in stores]
    return replace(loop, indices=(*indices, m), body=body)


def updates_last(stores: list[StoreStatement], loop: Loop) -> list[StoreStatement]:
    """Rows that are read and stored are stored last: a long row is loaded again for what else is made of it. Behind them are
    values of rows, which one thread stores when all have read them."""
    reads = {id(store): {x.data[0].name for x in walked([store.value]) if x.op == "load"} for store in stores}
    found = [store for store in stores if store.parameter.name not in loop.updated]
    left = [store for store in stores if store.parameter.name in loop.updated]
    values = [store for store in left if len(store.parameter._shape) == len(store.key)]
    left = [store for store in left if store not in values]
    while left:
        first = next((x for x in left if not any(x.parameter.name in reads[id(y)] for y in left if y is not x)), left[0])
        left.remove(first)
        found.append(first)
    return found + values


def with_updates_last(loop: Loop) -> Loop:
    """Tiles whose results are stored behind what else is made of them. Raises ValueError where each of two is made of the
    other."""
    stores = updates_last([held for held in loop.body if isinstance(held, StoreStatement)], loop)
    for n, store in enumerate(stores):
        if any(x.op == "load" and x.data[0] is store.parameter for x in walked([y.value for y in stores[n + 1:]])):
            raise refuse_update(store)
    return replace(loop, body=[*(held for held in loop.body if not isinstance(held, StoreStatement)), *stores])


def row_program_of(loop: Loop) -> RowProgram:
    """Raises ValueError and TypeError, with the user's line, for what is no function of rows."""
    refuse_pieces(loop)
    *stacks, rows = loop.indices
    stores = [held for held in loop.body if isinstance(held, StoreStatement)]
    parts = next((held for held in loop.body if isinstance(held, Loop)), None)
    made = RowProgram(tuple(stacks), rows, {}, stores, {}, loop.line, parts)
    lengths: dict[int, str] = {}
    for x in made.values:
        _check(x, made, lengths)
    for store in stores:
        name, rank = store.parameter.name, len(store.parameter.shape)
        key = tuple(index.of_loop for index in store.key if isinstance(index, Index))
        if store.only is not None or key != made.indices or rank - len(key) not in (0, 1) or (
                store.lookup is not None and name in loop.updated):
            raise refused(ValueError, f"{name}[{shown(store.key)}] is stored; a function of rows stores rows or one value "
                                      f"of each, [{shown(made.indices)}], and without once(...) (only .reference(...) runs "
                                      "others)", store.line)
        if rank > len(key):
            lengths.setdefault(stored_length(store), store.line)
        if store.lookup is not None:
            made.reads.setdefault(store.lookup.name, store.line)
    made.stores = updates_last(stores, loop)
    made.lengths = {size: f"columns_{n}" if n > 1 else "columns" for n, size in enumerate(lengths or [1], 1)}
    return made


def _check(x: Value, program: RowProgram, lengths: dict[int, str]) -> None:
    if x.op in FORMS and not any(x in (c.inside, c.after) for c in program.cells):
        raise refused(ValueError, FORMS[x.op], x.line)
    if x.op == "const":
        return
    if x.op == "load":
        parameter, key = x.data
        places = [index.of_loop for index in key if isinstance(index, Index)]
        if not {*places} <= {*program.sizes} or len({*places}) < len(places):
            raise refused(ValueError, f"{parameter.name}[{shown(key)}]: a function of rows must use the index "
                                      f"{shown(program.indices)}", x.line)
        if np.dtype(parameter.dtype) not in ROW_RESULTS and not is_whole_load(x):
            raise refused(TypeError, f"{parameter.name} has dtype {parameter.dtype}; a function of rows reads float16, "
                                     "bfloat16, float32, float64 and whole numbers", x.line)
        for array in (parameter, *(index.lookup for index in key if isinstance(index, Index) and index.lookup is not None)):
            program.reads.setdefault(array.name, x.line)
    if x.op == "cast" and np.dtype(x.data) not in ROW_RESULTS:
        raise refused(TypeError, f"astype({np.dtype(x.data)}): functions of rows round to float16, bfloat16, float32 or "
                                 "float64", x.line)
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
# Steps of a recurrence's round, and their order.

@dataclass(eq=False)
class RoundStep:
    """What stands in a round: lines that make ``names`` after the steps that it ``needs``. ``is_product``: it is under way
    until a wait; ``onto``: the step whose accumulators it adds to; ``puts`` and ``takes``: places of shared memory.
    ``is_late``: it stands right before the first step that needs it, so that what it reads is not in registers for long."""

    names: tuple[str, ...]
    lines: list[str]
    needs: list[RoundStep]
    is_product: bool = False
    onto: RoundStep | None = None
    puts: str = ""
    takes: tuple[str, ...] = ()
    is_late: bool = False

    def late(self, done: set[RoundStep]) -> list[RoundStep]:
        """Steps that stand before it."""
        return list(dict.fromkeys(x for x in self.needs if x.is_late and x not in done))


class RoundSchedule:
    """The order of steps: `ordered` has the lines of a round. ``meeting``: the line where the warpgroups meet."""

    def __init__(self, steps: list[RoundStep], meeting: str):
        self.steps, self.meeting = steps, meeting
        self.flying: list[RoundStep] = []              # products that nothing has waited for, the oldest first
        self.unmet: set[str] = set()                   # places that are written since the warpgroups have met
        self.has_met = False                           # since the round before has read what was there
        self.done: set[RoundStep] = set()

    def ordered(self) -> list[str]:
        lines, left = list[str](), list(self.steps)
        while left:
            ready = [x for x in left if not x.is_late and all(
                y.is_late or y in self.done for z in (x, *x.late(self.done)) for y in z.needs)]
            chosen = min(ready, key=lambda x: (self._rank(x), self.steps.index(x)))
            for step in [*chosen.late(self.done), chosen]:
                lines += self._begun(step)
                left.remove(step)
        return [*lines, *self._waited(0)]

    def _awaited(self, step: RoundStep) -> list[RoundStep]:
        """Products that it waits for: it may add to one that is under way."""
        return [x for x in step.needs if x in self.flying and not (step.is_product and x is step.onto)]

    def _rank(self, step: RoundStep) -> tuple[int, int]:
        awaited = self._awaited(step)
        if awaited:
            return 3, max(map(self.flying.index, awaited))
        takes = [place for x in [step, *step.late(self.done)] for place in x.takes]
        return (2 if not self.unmet.isdisjoint(takes) else 0 if step.is_product else 1), 0

    def _begun(self, step: RoundStep) -> list[str]:
        lines, awaited = list[str](), self._awaited(step)
        if awaited:
            lines += self._waited(len(self.flying) - 1 - max(map(self.flying.index, awaited)))
        if not self.unmet.isdisjoint(step.takes) or (step.puts and not self.has_met):
            self.has_met = True
            lines.append(self.meeting)
            self.unmet.clear()
        self.done.add(step)
        if step.puts:
            self.unmet.add(step.puts)
        if not step.is_product:
            return [*lines, *step.lines]
        if step.onto is not None and step.onto in self.flying:
            self.flying.remove(step.onto)
        self.flying.append(step)
        return [*lines, "wgmma_fence()", *step.lines, "wgmma_commit()"]

    def _waited(self, pending: int) -> list[str]:
        """``pending``: how many may stay under way."""
        if len(self.flying) <= pending:
            return []
        names = ", ".join(name for step in self.flying for name in step.names)
        count = sum(len(step.names) for step in self.flying)
        del self.flying[:len(self.flying) - pending]
        given = f"({names},)" if count == 1 else f"({names})"
        return [f"{given if count == 1 else names} = wgmma_wait({pending}, {given})"]


# --------------------------------------------------------------------------------------------------
# The text of an element.

class ElementText:
    """The text of an element of a value. ``first``: the accumulators that it goes along; ``extra``: what else its function
    takes, and what is given; ``form``: of values of each key, in `RecurrencePrinter.of_keys`."""

    def __init__(self, printer: RecurrencePrinter, root: Value, part: int, form: str = ""):
        self.printer, self.root, self.part, self.form = printer, root, part, form
        self.first, self.formal = "", dict[str, str]()
        self.extra: dict[str, str] = {}
        self.needs: list[RoundStep | None] = []

    def of(self, x: Value, top: bool = False) -> str:
        if x is not self.root or x.op in ("dot", "load", "carried", "inverse", "cumsum", "total"):
            known = self._known(x)
            if known is not None:
                return known
        text = self._operation(x)
        return text if top or x.op in CALLS or x.op in ("exp", "log") else f"({text})"

    def outside(self, text: str) -> str:
        """Of a number: with what is given in place of what a function would take."""
        return re.sub(r"[A-Za-z_]\w*", lambda name: self.extra.get(name[0], name[0]), text)

    def _known(self, x: Value) -> str | None:
        printer = self.printer
        if x.op == "const":
            return number_text(float(x.data))
        if x.op == "coordinate":
            return f"convert(F32, {self._place(x)})"
        if len(x.dims) == 2:
            known = x.op in ("dot", "load", "carried", "inverse", "cumsum") or printer.of.uses.get(x, 0) > 1
            if not known and not self._adds(x):
                return None
            if x.dims != self.root.dims:
                raise printer.refusal(f"{x!r} of ({shown(x.dims)}) meets a matrix of ({shown(self.root.dims)})", x.line)
            held = printer.matrix(x)
            self.needs.append(held.step)
            name, short = held.names[self.part], held.names[0]
            if not self.first:
                self.first, self.formal[name] = name, short
            if name == self.first:
                return short
            self.extra[short] = name
            return f"{short}[i]"
        if len(x.dims) == 1 and len(self.root.dims) == 2:
            if self.root.dims[0] == self.root.dims[1]:
                raise printer.refusal(f"{x!r} of ({shown(x.dims)}) meets a matrix as long as it is wide; let tiles have "
                                      "columns, v[h, t, n]", x.line)
            form = "rows" if x.dims[0] == self.root.dims[0] else "columns"
            held = printer.converted(x, form)
            self._extra(held)
            return f"{form[:-1]}_value({held.names[0]}, i)"
        if len(x.dims) == 1:
            if x.op not in ("load", "cumsum", "transpose", "rowsum", "rowmax") and printer.of.uses.get(x, 0) < 2:
                return None
            held = printer.of_keys(x, self.form) if self.form else printer.vector(x)
            self._extra(held)
            return f"{held.names[0]}[i]"
        held = printer.scalar(x)
        self._extra(held)
        return held.names[0].removeprefix("sizes.")

    def _extra(self, held: RoundValue) -> None:
        self.needs.append(held.step)
        self.extra[held.names[0].removeprefix("sizes.")] = held.names[min(self.part, len(held.names) - 1)]

    def _adds(self, x: Value) -> bool:
        """Whether it is a sum with a product, which the product is added to."""
        return x.op == "add" and any(y.op == "dot" for y in x.args)

    def _operation(self, x: Value) -> str:
        if x.op in COMPARISONS and all(y.op == "coordinate" for y in x.args):
            return self._compared(x)
        if x.op in CALLED:
            return self._called(x)
        if x.op == "diagonal":
            size = self.printer.length // x.data
            self.extra["piece"] = f"udiv(({self.printer.group(self.part)}) * {ROWS} + own_row(), {size})"
            return f"{self.of(x.args[0])} if udiv(column_at(i), {size}) == piece else 0.0"
        if x.op == "cast" or x.op == EXTENT or x.op not in (*WRITTEN, *CALLS, "exp", "log"):
            what = "astype" if x.op == "cast" else {"dot": "a product"}.get(x.op, x.op)
            raise self.printer.refusal(f"{what}; astype makes operands of products, and what else is computed is element by "
                                       "element", x.line)
        if x.op == "exp" and len(self.root.dims) == 2 and x.args[0].op == "sub" and all(
                len(y.dims) == 1 and y.op != "coordinate" for y in x.args[0].args):
            a, b = (self.of(self.printer.scaled(y)) for y in x.args[0].args)       # once a row, not once an element
            return f"exp2({a} - {b})"
        args = [self.of(y) for y in x.args]
        if x.op in CALLS and x.op not in ("max", "abs"):
            args = [f"convert(F32, {arg})" if y.op == "const" else arg for arg, y in zip(args, x.args)]
        if x.op == "exp":
            return f"exp2({args[0]} * {LOG2_E})"
        if x.op == "log":
            return f"(log2({args[0]}) * {LN_2})"
        return WRITTEN[x.op].format(*args) if x.op in WRITTEN else f"{CALLS[x.op]}({', '.join(args)})"

    def _called(self, x: Value) -> str:
        """A function is told places of elements that are there: it may have an array."""
        callee = x.data
        if callee.is_mask:
            raise self.printer.refusal("a mask; write its condition as a function of places", x.line)
        self.extra[callee.name], self.printer.callees[callee.name] = callee.name, callee
        places = [callee.is_counted(n, y) for n, y in enumerate(x.args)]
        args = [self._counted(y) if is_place else self.of(y, True) for y, is_place in zip(x.args, places)]
        return str(callee.text(x.op, (f"convert(F32, {arg})" if callee.is_real(n) else arg for n, arg in enumerate(args))))

    def _counted(self, x: Value) -> str:
        """A whole number that is made of places."""
        if x.op == "const":
            return str(int(x.data))
        if x.op != "coordinate":
            if x.op == EXTENT:
                raise self.printer.refusal("the length of an axis", x.line)
            args = [self._counted(y) for y in x.args]
            return f"({WRITTEN[x.op].format(*args)})" if x.op in WRITTEN else f"{CALLS[x.op]}({', '.join(args)})"
        dim, text = x.data, self._place(x)
        if isinstance(dim, Index) and dim.stack:
            return text
        name = f"last_{'row' if dim is self.root.dims[0] else 'column'}"
        self.extra[name] = f"{self.printer.begin_of(self.printer.of.t if self.printer.of.is_block(dim) else dim)[1]} - 1"
        return f"min({text}, {name})"

    def _compared(self, x: Value) -> str:
        """Of places: what differs from element to element is a constant."""
        found = [self._place(y) for y in x.args]
        if len(self.root.dims) == 2 and {*found} == {"row + row_of(i)", "column + column_at(i)"}:
            (small, one), (large, other) = (text.split(" + ") for text in found)
            self.extra["further"] = f"{self.extra.pop(large)} - ({self.extra.pop(small)})"
            return f"{one} - {other} {SIGNS[x.op]} further"
        return f"{found[0]} {SIGNS[x.op]} {found[1]}"

    def _place(self, x: Value) -> str:
        """A whole number: where the element is."""
        dim, of = x.data, self.printer.of
        if isinstance(dim, Index) and dim.stack:
            self.extra[name_of_stack(dim)] = dim.of_loop.name
            return dim.text(name_of_stack)
        begin = "0" if isinstance(dim, Axis) else of.t.name if of.is_block(dim) else dim.name
        if len(self.root.dims) == 1:
            group = self.printer.group(self.part)
            own, place = {"rows": (f" + ({group}) * {ROWS} + own_row()", "i * 8"), "": ("", "lane_row(i)"),
                          "columns": (" + own_column()", "column_of(i)")}[self.form]
            self.extra["at_begin"] = begin + own
            return f"at_begin + {place}"
        if dim is self.root.dims[0]:
            self.extra["row"] = f"{begin} + ({self.printer.group(self.part)}) * {ROWS} + own_row()"
            return "row + row_of(i)"
        self.extra["column"] = f"{begin} + own_column()"
        return "column + column_at(i)"


def listed(words: Iterable[str]) -> str:
    """Arguments behind others."""
    return "".join(f", {word}" for word in words)
