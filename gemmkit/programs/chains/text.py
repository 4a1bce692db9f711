"""A chained kernel as text: a module whose collectives are constants at its top, as one would write it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from gemmkit.kernels.sm90.kernel import STARTING
from gemmkit.kernels.sm90.store import in_lines
from gemmkit.programs.called import CALLED, RETURNS, Callee, Callees
from gemmkit.programs.chains.algebra import MaskBound, Ranges, mentions
from gemmkit.programs.chains.chain import (
    ADDED,
    BELOW,
    LOWERED,
    READ,
    RECTIFIED,
    SHARED,
    Chain,
    ChainPlaces,
    OperandBlock,
    ProductPart,
    dots,
)
from gemmkit.programs.chains.elements import CONSUMER, ELEMENTWISE, Element, Naming, ProducerRole, Role, scalar_text
from gemmkit.programs.chains.merging import LENGTH
from gemmkit.programs.chains.schedule import (
    Anchor,
    ChainOrder,
    ChainRelease,
    ChainStart,
    ChainWait,
    Compute,
    Event,
    Full,
    Pass,
    ScheduleChoice,
    Turn,
)
from gemmkit.programs.collectives import COLUMN, ROWS
from gemmkit.programs.mapping import OutKind, Printed
from gemmkit.programs.pieces import has_sections, places_of_pieces, places_of_rows, staggered, there_and_back
from gemmkit.programs.rounds import ColumnRole, begun_below, column_stages
from gemmkit.programs.sums import TURNS, Adder, handed_on
from gemmkit.programs.text import BEFORE, EARLY, OWN_NAMES, listed
from gemmkit.programs.trace import Carried, Value
from gemmkit.programs.values import Axis, unique

# --------------------------------------------------------------------------------------------------
# The consumers' half of a text: waits, groups of products, lines of values, stores.

ROW_CALLS = dict(rowmax="row_max", rowsum="own_sum", whole="whole_sum")


@dataclass
class Consumer(Role):
    """``functions`` by text: equal ones are printed once. ``scalars``: the names of numbers worked out at the top."""

    naming: Naming = field(kw_only=True)
    functions: dict[str, str] = field(default_factory=dict)
    scalars: dict[Value, str] = field(default_factory=dict)
    products: dict[tuple, str] = field(default_factory=dict)
    arrays: dict[str, Value] = field(default_factory=dict)         # that threads read, and what reads them
    callees: list[Callee] = field(default_factory=list)
    lowered: dict[Value, tuple[str, ...]] = field(default_factory=dict)        # what exponents call their operands
    extra: dict[Any, tuple[str, ...]] = field(default_factory=dict)
    rare: dict[Value, str] = field(default_factory=dict)           # votes of a lazy round, by the references
    left: list[Value] = field(default_factory=list)                # of what is computed together
    done: set[Value] = field(default_factory=set)                  # of it, before its turn
    parts: set[Value] = field(default_factory=set)                 # exponents of it whose operands have names
    met: set[str] = field(default_factory=set)         # of what is in shared memory, what warpgroups have met about
    columns: ColumnRole = field(init=False)                        # the warp that computes what products begin at
    is_whole: bool = False             # whether all places of what is computed are there
    old: set[str] = field(default_factory=set)                     # names that a tile's end finds under before_

    kind = CONSUMER

    def __post_init__(self) -> None:
        self.columns = ColumnRole(self.chain, self.places, self.choice, self.order, self.ranges, False, consumer=self)

    # -- names --------------------------------------------------------------------------------------------------------

    def name(self, x: Value) -> str:
        name = self.naming.of(x)
        return f"before_{name}" if self.before and x.op == "after" and name in self.old else name

    def known(self, x: Value) -> str | None:
        """What a value is called that is computed elsewhere."""
        if x.op == LENGTH:
            return f"before_{self.chain.stop}" if self.before else self.chain.stop
        if x.op == "const":
            return self.least.get(x)
        if not x.dims and self._is_constant(x):
            if x.op == "scalar":
                return f"sizes.{x.data}"
            if x not in self.scalars:
                self.scalars[x] = self.naming.fresh(x.name or "factor")
            return self.scalars[x]
        return None if self.naming.is_inlined(x) else self.name(x)

    def _is_constant(self, x: Value) -> bool:
        return x.op in ("const", "scalar") or (bool(x.args) and x.op not in CALLED and all(map(self._is_constant, x.args)))

    def product(self, d: Value) -> str:
        """The collective of products of the same blocks, taken in the same way."""
        a, b = self.places.blocks.get((d, 0)), self.places.blocks[d, 1]
        held = d.args[0]
        key = held if a is None else a, b, d.data, *(x.op == "transpose" for x in d.args[:2])
        if key not in self.products:
            left = self.naming.of(held).removesuffix("_as_a").removesuffix("_place") if a is None else a.name
            self.products[key] = unique(f"{left}_by_{b.name}", self.products.values())
        return self.products[key]

    # -- values -------------------------------------------------------------------------------------------------------

    def compute_all(self, values: Iterable[Value], guarded: bool) -> None:
        self.left, self.done, self.parts = list(values), set(), set()
        self.is_whole = self.has_tests and not guarded
        while self.left:
            self.compute(self.left[0], guarded)
            self.left.pop(0)

    def compute(self, x: Value, guarded: bool) -> None:
        naming = self.naming
        if not x.dims or naming.is_inlined(x) or (x in naming.tests and not guarded) or x in self.choice.columns:
            return
        if x.op in ROW_CALLS:
            self.put(f"{self.name(x)} = {ROW_CALLS[x.op]}({self.in_eights(x)})")
        elif x.op == "handover":
            dot = next(d for d in naming.users[x] if d.op == "dot")
            packed = "rectified" if x.data == RECTIFIED else "fragments"
            self.put(f"{self.name(x)} = {self.product(dot)}.{packed}({self.name(x.args[0])})")
        elif x.op == SHARED:
            name, rows = self.name(x), self.chain.rows
            lines = f"{self.chain.extent_of(rows)} - {self.of_tile(rows)}"
            self.put(f"{name}.put({self.name(x.args[0])}, at_{name}, group, {lines})")
        elif x.op == ADDED:
            self.put(*handed_on(self.chain, self.choice, x, self.name(x.args[0])))
        elif self.is_rescaled(x):
            asked = self.rare.get(self.chain.factors[x.args[1]]) or f"rescales({self.name(x.args[1])})"
            self.put(f"if {asked}:", f"    {self.name(x)} = {self.applied(x)}")
        elif x in self.chain.factors:
            self.rescale(x)
        elif x.op == BELOW and (x.args[1:] or x.args[0] in self.choice.columns):
            self.put(*begun_below(self, x))
        else:
            assert x.op in ELEMENTWISE or x.op == READ, x.op
            for part in self.exponents(x):
                if part not in self.parts:
                    self.lower(part.args[2], guarded)
            if x not in self.done:
                self.put(f"{self.name(x)} = {self.applied(x)}")

    def advance_round(self) -> None:
        for x in self.choice.shared:
            self.put(f"at_{self.name(x)} = {self.name(x)}.other(at_{self.name(x)})")
        super().advance_round()

    def in_eights(self, x: Value) -> str:
        """What a reduction takes, which goes over eight values at a time: with four more that change nothing."""
        name = self.name(x.args[0])
        if x.op == "whole" or self.values(x.args[0]) % 8 == 0:
            return name
        return f"join(({name}, fill(F32, 4, {'-math.inf' if x.op == 'rowmax' else '0.0'})))"

    def is_rescaled(self, x: Value) -> bool:
        """Whether a value becomes itself times a factor that is 1 in most rounds."""
        return x.op == "mul" and x.args[1] in self.chain.factors and self.name(x) == self.name(x.args[0])

    def rescale(self, x: Value) -> None:
        """A factor that is 1 in most rounds, and the vote for what is done in the others."""
        reference = self.chain.factors[x]
        rare = self.rare[reference] = self.names_of(reference, "rare")[0]
        bound = _bound_of(x)
        least = self.least.get(bound) or scalar_text(bound)
        self.put(f"{self.name(x)} = {self.applied(x)}", f"{rare} = changes({self.name(x.args[0].args[1])}, {least})")

    # -- exponents ----------------------------------------------------------------------------------------------------

    def names_of(self, x: Value, *wanted: str) -> tuple[str, ...]:
        """Names of its own that are not the name of a value: the same ones wherever it is printed."""
        key = x, wanted
        if key not in self.extra:
            self.extra[key] = tuple(map(self.naming.fresh, wanted))
        return self.extra[key]

    @cached_property
    def shifts(self) -> dict[Value, Value]:
        """The factors of lazy rounds, by the shift of exponents that is made of the reference alone."""
        shifts = dict.fromkeys(x.args[2] for x in self.chain.body if x.op == LOWERED and len(x.dims) == 2)
        made = {f: [x for x in shifts if _is_made_of(x, r)] for f, r in self.chain.factors.items()}
        return {found[0]: f for f, found in made.items() if len(found) == 1}

    @cached_property
    def least(self) -> dict[Value, str]:
        """What exponents of factors are compared with, `collectives.DROP`, is a register where a shift may be large: no drop
        is as small as infinity, so the reference is the largest score, and each round asks."""
        return {_bound_of(f): self.naming.fresh("least") for f in self.shifts.values()}

    def begin_least(self) -> None:
        for name in self.least.values():
            self.put(f"{name} = convert(F32, math.inf)")

    def exponents(self, x: Value) -> list[Value]:
        """Parts of exponents that are written where a value is."""
        own = [x] if x.op == LOWERED else []
        return own + [part for y in x.args if self.naming.is_inlined(y) for part in self.exponents(y)]

    def lower(self, shift: Value, guarded: bool) -> None:
        """What is made of a shift. An exponent's fma is of s, its factor and the shift; or, where that is large, of the
        difference as it is written, what is left of the factor, and nothing. A value of rows is computed again there. A
        shift by columns is in s, or, where it is large, nowhere."""
        lines: list[str] = []
        exact: list[str] = []
        parts = 3 if self.chain.rows in shift.dims else 2
        for y in [y for y in self.left if not self.naming.is_inlined(y) and (guarded or y not in self.naming.tests)]:
            for part in [part for part in self.exponents(y) if part.args[2] is shift]:
                s, factor, _, difference, by = part.args
                if not self._is_there(part if len(y.dims) == 2 else y):
                    continue
                self.parts.add(part)
                if len(y.dims) == 2:
                    takes = [self.name(s), self.number(factor), self.name(shift)]
                    made = [self.known(difference) or self.applied(difference, LOWERED), self.number(by),
                            "fill(F32, 2, 0.0)"]
                    names = self.names_of(part, *("exponent", "by", "less")[:parts])
                    if factor is by and parts == 3:
                        names = names[0], "", names[2]
                    self.lowered[part] = names
                    further = [n for n in names[1:] if n]
                    lines.append(f"{', '.join((names[0], *further))} = {', '.join(v for n, v in zip(names, takes) if n)}")
                    exact += [f"{names[0]} = {made[0]}",
                              f"{', '.join(further)} = {', '.join(v for n, v in zip(names[1:], made[1:]) if n)}"]
                else:
                    self.done.add(y)
                    exact.append(f"{self.name(y)} = {self.applied(y)}")
                    self.lowered[part] = self.name(s), "", self.name(shift)
                    lines.append(f"{self.name(y)} = {self.applied(y)}")
                    del self.lowered[part]
        rescaled = self.shifts.get(shift)
        rare = self.rare.get(self.chain.factors[rescaled]) if rescaled else None
        asked = f"steep({self.name(shift)})" if parts == 3 else self.names_of(shift, "over", "rare")[1]
        if rescaled is None or rare is None:
            self.put(*lines, f"if {asked}:", *(f"    {line}" for line in exact))
        else:
            bound = _bound_of(rescaled)
            self.put(*lines, f"if {rare}:", f"    {self.least[bound]} = convert(F32, {scalar_text(bound)})",
                     f"    if {asked}:", f"        {self.least[bound]} = convert(F32, math.inf)",
                     *(f"        {line}" for line in exact))

    def _is_there(self, x: Value) -> bool:
        """Whether all that a value is made of has been computed."""
        return all(self._is_there(y) if self.naming.is_inlined(y) else y not in self.left or y in self.done for y in x.args)

    def number(self, x: Value) -> str:
        return f"convert(F32, {scalar_text(x) if x.op == 'const' else self.known(x) or self.written(x)})"

    def written(self, x: Value) -> str:
        """A number that tiles change, as an element of the stack's matrix is: it has no line of its own."""
        made = Element(self.chain, x, self.known, self.of_tile, self.lowered, self.is_whole)
        text = made.of(x)
        self.take(made)
        return made.outside(text)

    def take(self, made: Element) -> None:
        """What an element is made of besides values is the kernel's to take."""
        for array in made.arrays:
            self.arrays.setdefault(array, made.root)
        self.callees += made.callees

    def values(self, x: Value) -> int:
        """A thread's: of two rows, of a quarter of the columns, of both, in whichever order the program met them."""
        if x.op == READ:
            return self.choice.own(x.dims[0]) // 4
        return 2 if len(x.dims) == 1 else self.choice.own(next(dim for dim in x.dims if dim is not self.chain.rows)) // 2

    def applied(self, x: Value, name: str = "") -> str:
        made = Element(self.chain, x, self.known, self.of_tile, self.lowered, self.is_whole)
        text, call = made.printed(self.values(x))
        self.take(made)
        function = self.functions.get(text)
        if function is None:
            function = self.functions[text] = self.naming.fresh(f"make_{name or self.naming.of(x)}")
        return call(function)

    # -- events -------------------------------------------------------------------------------------------------------

    def events(self, part: list[Event], guarded: bool, joined: bool = False) -> None:
        print_of: dict[type, Callable[[Any], None]] = {
            Full: self.full,
            Turn: lambda e: self.put("turns.wait(group)"),
            Pass: lambda e: self.put(f"turns.give((group + 1) % {self.choice.warpgroups})"),
            ChainStart: lambda e: self.start(e, part is self.order.before and self.order.lags), ChainWait: self.wait,
            ChainRelease: self.release, Anchor: self.anchor}
        self.rare, self.met = {}, set()
        for event in part:
            if isinstance(event, Compute):
                self.compute_all(event.values, guarded)
            else:
                print_of[type(event)](event)
        self.move(part)
        if part is not self.order.after:
            for ring in [event.ring for event in part if isinstance(event, Full) and event.ring in self.order.lagging]:
                self.put(f"before_{ring.name}, at_{ring.name} = at_{ring.name}, ring_{ring.name}.advance(at_{ring.name})")

    def full(self, event: Full) -> None:
        """A part of a product is waited for before the stage of the part before is released."""
        name = event.ring.name
        if event.first:
            self.put(f"next_{name} = ring_{name}.advance(at_{name})")
        self.put(f"ring_{name}.wait({'next' if event.first else 'at'}_{name})")

    def start(self, event: ChainStart, is_first: bool) -> None:
        inits = {c.inside: c.init for c in self.chain.carried}
        met = [self.name(d.args[0]) for d in event.products if d.args[0].op == SHARED]
        met = [name for name in met if name not in self.met]
        self.met.update(met)
        cleared = [f"out_{x.data.parameter.name}.clear()" for x in self.chain.added if met and self.choice.outs]
        self.put(*cleared, *(f"{name}.meet()" for name in met), "wgmma_fence()")
        for d in event.products:
            name, product, b = self.name(d), self.product(d), self.places.blocks[d, 1].ring.name
            a = self.places.blocks.get((d, 0))
            sums = f"{product}.begin(0.0)" if len(d.args) < 3 else self.name(d.args[2])
            fresh = len(d.args) < 3 or (is_first and inits[d.args[2]].data == 0)
            at = f"{'next' if isinstance(d.data, ProductPart) and d.data.first else 'at'}_{b}"
            last, half = f"{at}, {int(not fresh)}", "_half" if self.chain.half_of(d.dims[1]) else ""
            group = self.chain.group_of(d)
            if d.args[0].op == SHARED:
                how = "half" if d.dims[0] is self.chain.index and not self.choice.part(self.chain, d)[0] else "apart"
                self.put(f"{name} = {product}.multiply_{how}({sums}, at_{self.name(d.args[0])}, {at}, group, "
                         f"{int(not fresh)})")
            elif a is None:
                last = f"group, {last}" if half else last
                self.put(f"{name} = {product}.multiply{half}({sums}, {self.name(d.args[0])}, {last})")
            elif a.ring.name == b and not half:
                self.put(f"{name} = {product}.multiply({sums}, at_{b}, {group}, {int(not fresh)})")
            else:
                self.put(f"{name} = {product}.multiply{half or '_apart'}({sums}, at_{a.ring.name}, {at}, {group}, "
                         f"{int(not fresh)})")
        self.put("wgmma_commit()")

    def wait(self, event: ChainWait) -> None:
        names = list(dict.fromkeys(self.name(d) for d in (*event.over, *event.flying)))     # parts add to one
        if len(names) == 1:
            self.put(f"({names[0]},) = wgmma_wait({event.pending}, ({names[0]},))")
        else:
            self.put(f"{', '.join(names)} = wgmma_wait({event.pending}, ({', '.join(names)}))")

    def release(self, event: ChainRelease) -> None:
        name = event.ring.name
        if event.before:
            self.put(f"ring_{name}.release(before_{name}.stage)")
        else:
            self.put(f"ring_{name}.release(at_{name}.stage)", f"at_{name} = ring_{name}.advance(at_{name})")

    def anchor(self, event: Anchor) -> None:
        name = self.name(event.value)
        self.put(f"anchor(ring_{self.places.rings[0].name}.empty(), {name}[0] + {name}[1])")

    def move(self, part: list[Event]) -> None:
        """Cells become what the round has made of them, where that has a name of its own."""
        order = self.order
        def is_made(c: Carried) -> bool:
            if part is order.round:
                return True
            if part is order.after:
                return c.out in order.late
            return c.out not in order.late and c.out not in order.zero

        moved = [(self.naming.of(c.inside), self.naming.of(c.out)) for c in self.chain.carried
                 if is_made(c) and self.naming.of(c.inside) != self.naming.of(c.out)]
        if moved:
            self.put(f"{', '.join(a for a, _ in moved)} = {', '.join(b for _, b in moved)}")

    # -- tiles --------------------------------------------------------------------------------------------------------

    def begin_tile(self, joined: bool) -> None:
        self.begin_least()
        for c in self.chain.carried:
            if c.init.op == "const" and not (joined and len(c.init.dims) == 2) and not self.chain.is_straight:
                self.fill(c)
        for ring in self.places.lone():
            self.put(f"ring_{ring.name}.wait(at_{ring.name})")

    def begin_again(self) -> None:
        for c in self.chain.carried:
            if c.init.op == "const" and len(c.init.dims) == 2:
                self.fill(c)

    def fill(self, c: Carried) -> None:
        count = 2 if len(c.init.dims) == 1 else self.choice.own(c.init.dims[1]) // 2
        self.put(f"{self.naming.of(c.inside)} = fill(F32, {count}, {scalar_text(c.init)})")

    def before_loops(self) -> None:
        """The assembler does not see that slots are uniform: heads of 256 had 13 moves to uniform registers in a round."""
        for ring in self.places.lone():
            if self.places.is_first_alone(ring):           # the next tile's may come
                self.release(ChainRelease(ring))
        for ring in self.places.rings if self.choice.ahead else ():
            at = f"at_{ring.name}"
            self.put(f"{at} = Slot(uniform({at}.stage), uniform({at}.phase))")

    def end_rounds(self) -> None:
        for ring in self.places.lone():
            if not (self.places.is_first_alone(ring) or self.chain.is_straight):
                self.release(ChainRelease(ring))

    def kept(self) -> list[str]:
        needed = {y for x in self.chain.end for y in x.args} | {store.value for store in self.chain.stores}
        self.old = {self.naming.of(c.after) for c in self.chain.carried if c.after in needed and len(c.init.dims) == 1}
        kept = [self.naming.of(c.after) for c in self.chain.carried if self.naming.of(c.after) in self.old]
        begins = any(y.op == LENGTH for x in self.chain.end if x.op == "where" for y in x.args[0].args)
        return [*kept, self.chain.stop] if begins else kept

    def finish_tile(self) -> None:
        self.compute_all(self.chain.end, False)
        stacks = [self.of_tile(stack) for stack in self.chain.own_stacks[::-1]]
        if self.chain.splits > 1:
            stacks = [f"before_{self.outer}" if self.before else self.outer]
        rows, end = self.chain.rows, f"sizes.{self.chain.rows.name}"
        first = self.of_tile(rows)
        if self.chain.piece is not None:
            origin = self.of_tile(rows, "origin")
            first, end = f"{origin} + {first}", f"{origin} + {self.of_tile(rows, 'count')}"
        added = [x.data.parameter.name for x in self.chain.added if self.choice.outs]
        self.put(*(f"out_{name}.leave(ring_added, at_added)" for name in added))
        for store in self.chain.stores:
            name = store.parameter.name
            columns = 1 if self.chain.stores_rows(store) else store.parameter.shape[-1]
            half = self.chain.half_of(Axis(columns))
            column = f"carried(group * {half})" if half else "0"
            to = f"{end} if group == 0 else 0" if self.chain.wide and not half else end
            part = f"WarpgroupPart({first}{self.chain.of_group}, {column}, {to}, {columns}, ({listed(stacks)}))"
            value = store.value
            text = self.applied(value) if value.op in ("const", "scalar", "load") else self.name(value)
            if name in self.arrays:
                self.put("warp_barrier()")             # lanes exchange what they store
            self.put(f"out_{name}.store({text}, {name}, {part}, group)")


def _bound_of(factor: Value) -> Value:
    """What the exponent of a lazy round's factor is compared with (`gemmkit.programs.chains.merging`)."""
    return factor.args[0].args[0]


def _is_made_of(x: Value, reference: Value) -> bool:
    """Whether a value of rows is made of another one and of numbers."""
    return x is reference or (all(not y.dims or _is_made_of(y, reference) for y in x.args) and any(y.dims for y in x.args))


IMPORTS = [
    ("dataclasses", "dataclass"), ("gemmkit.components", "Component"), ("gemmkit.components", "Scalar"),
    ("gemmkit.programs.collectives", "column_at"), ("gemmkit.programs.collectives", "finite"),
    ("gemmkit.kernels.collectives.scheduler", "Cluster"), ("gemmkit.kernels.collectives.pipeline", "CLUSTER"),
    ("gemmkit.kernels.collectives.pipeline", "Pipeline"), ("gemmkit.kernels.collectives.scheduler", "Slot"),
    ("gemmkit.kernels.sm90.store", "own_column"), ("gemmkit.kernels.sm90.store", "own_row"),
    ("gemmkit.kernels.collectives.pipeline", "OrderBarrier"), ("gemmkit.kernels.collectives.pipeline", "Warpgroups"),
    ("gemmkit.lang.registers", "interleave"), ("gemmkit.lang.registers", "split"), ("gemmkit.lang.registers", "apply"),
    ("gemmkit.lang.registers", "join"),
    ("gemmkit.lang.registers", "generate"), ("gemmkit.lang.aggregates", "convert"), ("gemmkit.lang.aggregates", "fill"),
    *(("gemmkit.programs.called", word) for word in (*RETURNS.values(), "element_before")),
    *(("gemmkit.programs.collectives", name) for name in (
        "HandedProduct", "OctetOut", "begin_of", "changes", "column_of", "column_value", "end_limits", "first_limits",
        "lane_value", "limits", "own_sum", "piece_at", "rescales", "row_max", "row_value", "steep", "whole_sum")),
    *(("gemmkit.programs.collectives", name) for name in (
        "F32", "I64", "DirectOut", "WarpgroupPart", "Product", "RowsOut", "StagedTile", "TmaOut", "blocks", "row_of")),
    *(("gemmkit.ptx.arithmetic", name) for name in ("exp2", "log2", "maximum", "reciprocal", "tanh")),
    ("gemmkit.ptx.wgmma", "anchor"), ("gemmkit.ptx.arithmetic", "difference"), ("gemmkit.ptx.arithmetic", "fma"),
    *(("gemmkit.ptx.barriers", name) for name in ("atomic_add", "await_counter", "cluster_barrier", "cluster_rank")),
    ("gemmkit.kernels.collectives.pipeline", "WARPS"),
    ("gemmkit.programs.collectives", "ComputedTile"), ("gemmkit.programs.sums", "AddedOut"),
    ("gemmkit.programs.rounds", "StagedColumns"), ("gemmkit.programs.rounds", "times"),
    ("gemmkit.ptx.barriers", "mbarrier_fence_init"),
    *(("gemmkit.ptx.special", name) for name in (
        "barrier", "block_x", "carried", "grid_x", "rolled", "thread_index", "udiv", "uniform", "warp_barrier")),
    *(("gemmkit.ptx.wgmma", name) for name in ("grid_launch_dependents", "grid_wait")),
    *(("gemmkit.ptx.wgmma", name) for name in ("wgmma_commit", "wgmma_fence", "wgmma_wait")),
]

#: What a text calls its own things, beside `OWN_NAMES`.
TAKEN = ("add", "begins", "bring", "columns", "end_seen", "ends", "first_column", "first_round", "first_seen",
         "following", "free_from", "free_to", "i", "lane", "own", "pass_on", "passed", "place", "room", "section",
         "slot", "turn_at", "turns", "values", "which", "with_rows")


def names_of_ranges(chain: Chain) -> list[str]:
    """What a text calls the places where rounds begin and end, and the shares of a tile's."""
    more = [*(["each", "outer", "share"] if chain.splits > 1 else []),
            *(["origin"] if chain.index.piece is not None else []),
            *(["start"] if chain.start is not None else []), *(["shown"] if chain.starts_within else [])]
    of_rows = [f"{chain.rows.name}_{what}" for what in ("count", "origin")] if chain.piece is not None else []
    of_rounds = "count", "end", "first", "free", "length", "tested", *more
    return [*of_rows, *(f"{chain.index.name}_{what}" for what in of_rounds), *(["front"] if chain.starts_within else [])]


def tests_of(chain: Chain, ranges: Ranges) -> set[Value]:
    """Values that rounds without tests leave out: they are what they test there."""
    users: dict[Value, int] = {}
    for x in chain.values:
        for y in x.args:
            users[y] = users.get(y, 0) + 1

    def is_test(x: Value) -> bool:
        if x.op == "inside":
            return True
        tested = x.args[1] if x.op == "where" else x
        return (x.op == "where" and ranges.has_free and chain.index in x.dims and tested.dims == x.dims
                and users[tested] == 1 and bool(tested.args) and mentions(x.args[0], chain.index))

    return {x for x in chain.body if is_test(x)}


@dataclass
class ChainPrinter:
    """Of a warp-specialised kernel; a subclass prints another. ``scalars`` and ``arrays``: the names of all, which are
    taken."""

    chain: Chain
    places: ChainPlaces
    choice: ScheduleChoice
    order: ChainOrder
    ranges: Ranges
    outs: dict[str, OutKind]
    scalars: list[str]
    arrays: list[str]

    imports = IMPORTS
    own_names: ClassVar[frozenset[str]] = frozenset()            # beside those of all
    consumer_class: ClassVar[type[Consumer]] = Consumer
    product_classes = "Product", "HandedProduct"
    has_next = True                                    # blocks go on from tile to tile

    # -- what kernels differ in ---------------------------------------------------------------------------------------

    @property
    def threads(self) -> int:
        return 128 * (1 + self.choice.warpgroups)

    def roles(self) -> list[str]:
        """The constants of the module that say who does what."""
        few, many = STARTING.get((1, self.choice.warpgroups), (0, 0))
        return [f"WARPGROUPS = Warpgroups(1, {self.choice.warpgroups}, {few}, {many})",
                f"SHARED_BYTES = {self.choice.nbytes}",
                *([] if self.choice.cluster.is_single else [f"cluster = Cluster(m={self.choice.cluster.m})"])]

    def tile_of(self, kind: str, block: OperandBlock, more: str = "") -> str:
        """The constant of a block."""
        rows, columns = self.choice.held(block)
        dtype = np.dtype(block.parameter.dtype).name
        return (f"{block.name}_tile = {kind}({dtype!r}, lines={rows}, columns={columns}, "
                f"offset={self.choice.offsets[block]}, stage_bytes={self.choice.stage_bytes(block.ring)}{more}")

    def staged(self, block: OperandBlock) -> str:
        more = f", stacks={len(block.stacks)}" if block.stacks else ""
        more += self.page(block)
        return self.tile_of("StagedTile", block,
                            f"{more}, cluster=cluster, peers={COLUMN!r}" if self.is_shared(block) else more) + ")"

    def page(self, block: OperandBlock) -> str:
        return f", page={self.chain.index.extent.of_page}" if block.paged is not None else ""

    def is_shared(self, block: OperandBlock) -> bool:
        return self.choice.is_shared(block, self.chain.rows)

    def pipelines(self) -> list[str]:
        lines = []
        for ring in self.places.rings:
            readers, more = 1, ""
            if any(map(self.is_shared, ring.blocks)):
                readers, more = self.choice.cluster.readers, ", readers=CLUSTER, cluster=cluster"
            lines.append(f"ring_{ring.name} = Pipeline(stages={self.choice.stages[ring]}, "
                         f"offset={self.choice.barriers[ring]}, full_arrivals=1, "
                         f"empty_arrivals={self.choice.warpgroups * readers}{more})")
        if self.chain.added:
            lines.append(f"ring_added = Pipeline(stages={self.choice.adding}, offset={self.choice.added_barriers}, "
                         f"full_arrivals=1, empty_arrivals={4 * self.choice.warpgroups}, readers=WARPS)")
        return lines

    def arguments(self, read: list[str]) -> tuple[list[tuple[str, str]], list[str], list[str], list[str]]:
        """Blocks that TMA brings and their arrays, operands that threads copy, results, arrays that threads ``read``."""
        blocks = [(block.name, block.parameter.name) for ring in self.places.rings for block in ring.blocks]
        outs = [*self.outs, *([TURNS] if self.choice.ordered else [])]
        return blocks, [], outs, [f"{BEFORE}{name}" if name in outs else name for name in read]

    def kernel(self, arguments: list[str], consumer: Consumer) -> list[str]:
        rings, columns = self.places.rings, consumer.columns
        takes_maps = [f"map_{block.name}" for ring in rings for block in ring.blocks]
        asked = [callee.name for callee in self.ranges.masks]
        read = dict.fromkeys(x.data[0].name for x in self.chain.where)
        read |= {} if self.chain.index.extent.table is None else {self.chain.index.extent.table.name: None}
        takes_blocks = ["sizes", *takes_maps, *read, *asked]
        added = [x.data.parameter.name for x in self.chain.added]
        takes_all = [name for name in arguments if name not in (*takes_maps, TURNS, *added)]
        adds = ["added"] if added else []
        taken = ["sizes", *read, *asked], added, [TURNS] * self.choice.ordered
        adder = Adder(self.chain, self.places, self.choice, self.order, self.ranges, False)
        cluster = self.choice.cluster
        met = "barrier()" if cluster.is_single else "cluster_barrier()"
        producer = ProducerRole(self.chain, self.places, self.choice, self.order, self.ranges, consumer.has_tests)
        producer.tiles()
        return [f"def kernel({', '.join(['sizes', *arguments])}):",
                "    group = uniform(udiv(thread_index(), 128))", "    if thread_index() == 0:",
                *(f"        ring_{name}.initialise()" for name in (*(ring.name for ring in rings), *adds, *columns.rings)),
                "        mbarrier_fence_init()", f"    {met}", *(f"    {line}" for line in EARLY if not self.choice.ordered),
                "    if group == 0:", "        WARPGROUPS.release_registers()",
                "        if thread_index() == 0:", f"            produce({', '.join(takes_blocks)})",
                *adder.called(*taken), *columns.called(), "    else:",
                "        WARPGROUPS.claim_registers()",
                f"        consume({', '.join(['sizes', *takes_all, 'group - 1'])})",
                *([] if cluster.is_single else [f"    {met}        # a peer may still arrive at this one's barriers"]),
                "", "", *self.tile_functions(consumer),
                f"def produce({', '.join(takes_blocks)}):",
                '    """1. Blocks of the operands: global -> shared."""', "    zero = thread_index() * 0",
                *(f"    at_{ring.name} = Slot(zero, zero + 1)          # fresh rings are empty" for ring in rings),
                *producer.lines, "", "", *adder.text(*taken), *columns.text(),
                f"def consume({', '.join(['sizes', *takes_all, 'group'])}):",
                '    """2. Products, and what becomes of them in the registers. 3. The end of a tile: registers -> '
                'global."""',
                "    zero, column = thread_index() * 0, own_column()",
                *(f"    at_{name} = Slot(zero, zero)"
                  for name in (*(ring.name for ring in rings), *map(consumer.name, self.choice.shared), *adds)),
                *(["    turns.give_first(group)"] if self.choice.turns else []), *scalar_lines(consumer), *consumer.lines,
                *(f"    out_{name}.finish()" for name in self.outs if name not in added)]

    # -- the text -----------------------------------------------------------------------------------------------------

    def printed(self, title: str) -> tuple[Printed, dict[str, Value]]:
        """The text, and the arrays that threads read with what reads them."""
        chain, choice, order = self.chain, self.choice, self.order
        tests = tests_of(chain, self.ranges)
        indices = [index.name for index in (*chain.indices, chain.index)]
        taken = {*OWN_NAMES, *TAKEN, *self.own_names, *(name for _, name in self.imports), *self.arrays, *self.scalars,
                 *indices, *(f"last_{name}" for name in indices), *names_of_ranges(chain)}
        parts = [part for part in (order.round, order.before, order.join, order.after) if part]
        naming = Naming(chain, self.places, tests, parts, taken)
        consumer = self.consumer_class(chain, self.places, choice, order, self.ranges, bool(tests), naming=naming)
        consumer.tiles()
        consumer.columns.made()
        for x in chain.where:
            consumer.arrays.setdefault(x.data[0].name, x)
        table = chain.index.extent.table
        if table is not None:
            consumer.arrays.setdefault(table.name, Value("load", line=chain.line))
        callees = Callees.of(consumer.callees)
        maps, operands, outs, others = self.arguments([*consumer.arrays, *callees.names])
        counted = indices[:-1] if chain.is_straight else indices
        sizes = [*dict.fromkeys(counted), *(["section"] if has_sections(chain, choice) else []),
                 *([chain.share] if chain.splits > 1 else [])]
        lines = self.constants(consumer)
        lines += ["", "", "@dataclass(frozen=True)", "class Sizes(Component):",
                  *(f"    {name}: Scalar" for name in (*sizes, *self.scalars)), "", "",
                  *self.kernel([*(f"map_{block}" for block, _ in maps), *operands, *outs, *others], consumer)]
        for text, name in consumer.functions.items():
            lines += ["", "", *f"def {name}{text}".rstrip().split("\n")]
        body = "\n".join(lines) + "\n"
        used = set(re.findall(r"[A-Za-z_]\w*", body))
        imports: dict[str, list[str]] = {}
        for module, name in self.imports:
            if name in used:
                imports.setdefault(module, []).append(name)
        head = [f'"""{title}"""', "", *(["import math"] if "math" in used else []),
                *(f"from {module} import {', '.join(names)}" for module, names in imports.items()), "", ""]
        tile = tuple(index.name for index in chain.indices)
        made = Printed("\n".join(head) + body, tuple(maps), tuple(outs),
                       tuple(name.removeprefix(BEFORE) for name in others if name not in callees.names), tuple(sizes), tile,
                       tuple(self.scalars), self.threads, tuple(operands), callees,
                       tuple(name for name in outs if self.is_updated(name) or f"{BEFORE}{name}" in others))
        return made, consumer.arrays

    def is_updated(self, name: str) -> bool:
        """Whether a result has something already."""
        return name == TURNS or any(store.parameter.name == name for store in self.chain.updates)

    def constants(self, consumer: Consumer) -> list[str]:
        chain, places, choice = self.chain, self.places, self.choice
        lines = [*self.roles(), *(self.staged(block) for ring in places.rings for block in ring.blocks)]
        for x, offset in choice.shared.items():
            rows, columns = (choice.size(dim) for dim in x.dims)
            lines.append(f"{consumer.name(x)} = ComputedTile({x.data.name!r}, lines={rows}, columns={columns}, "
                         f"offset={offset}, stage_bytes={2 * rows * in_lines(columns)}, barrier={1 + choice.warpgroups})")
        lines += [*self.pipelines(), *column_stages(choice, chain)]
        plain, handed = self.product_classes
        said = set()
        for d in [*places.peeled.values(), *dots(chain.body)]:
            name = consumer.product(d)
            if name in said:
                continue
            said.add(name)
            a, b, added = places.blocks.get((d, 0)), places.blocks[d, 1], d.dims[0] is chain.index
            how = ", b_transposed=True" if d.args[1].op == "transpose" else ""
            how += f", first={d.data.first}, length={d.data.length}" if isinstance(d.data, ProductPart) else ""
            turned = d.args[1].op == "transpose"       # a block in its stage may have more columns than a product of it
            taken = choice.size(d.args[1].dims[0]) if turned else chain.half_of(d.dims[1]) or choice.size(d.dims[1])
            taken = choice.part(chain, d)[1] if added else taken
            if taken < choice.held(b)[1] and not isinstance(d.data, ProductPart):
                how += f", {'length' if turned else 'width'}={taken}"
            if d.args[0].op == SHARED:
                how = ", a_transposed=True" * added + how
                lines.append(f"{name} = {plain}({consumer.name(d.args[0])}, {b.name}_tile{how})")
            elif a is None:
                lines.append(f"{name} = {handed}({b.name}_tile{how})")
            else:
                how = (", a_transposed=True" if d.args[0].op == "transpose" else "") + how
                lines.append(f"{name} = {plain}({a.name}_tile, {b.name}_tile{how})")
        if choice.turns:
            lines.append(f"turns = OrderBarrier({choice.warpgroups}, {1 + choice.warpgroups}, True)")
        rows = ROWS * choice.warpgroups
        stacks = f", stacks={chain.stacks_of_results}" if chain.stacks_of_results else ""
        for name, out in self.outs.items():
            columns = choice.own(Axis(out.columns))
            if out.kind == "TmaOut":
                lines.append(f"out_{name} = TmaOut({out.dtype.name!r}, block_m={rows}, columns={columns}, "
                             f"o_offset={choice.outs[name]}{stacks})")
            elif out.kind == "AddedOut":
                rows_of = choice.blocks[chain.index.name]
                lines.append(f"out_{name} = AddedOut({out.dtype.name!r}, lines={rows_of}, columns={columns}, "
                             f"offset={choice.added_at}, stage_bytes={choice.added_bytes}"
                             f", stacks={len(chain.own_stacks)}{', packed=True' * (chain.index.piece is not None)})")
            elif out.kind == "DirectOut":
                lines.append(f"out_{name} = DirectOut({out.dtype.name!r}, pairs={out.pairs})")
            else:
                more = -columns % 32 if out.kind == "OctetOut" else 0
                is_clipped = out.kind == "OctetOut" and columns + more + chain.half_of(Axis(out.columns)) > out.columns
                clipped = f", clipped=True, more={more}" if is_clipped else ""
                lines.append(f"out_{name} = {out.kind}({out.dtype.name!r}{clipped})")
        return lines

    def tile_functions(self, consumer: Consumer) -> list[str]:
        """How many tiles there are, and which are a block's; and which blocks a tile's rounds visit."""
        following = "following(tile)" if self.choice.longest_first else "tile + grid_x()"
        lines = places_of_rows(self.chain, self.choice) if self.chain.piece is None else places_of_pieces(
            self.chain, self.choice, consumer.placed, following if self.has_next else "")
        if self.choice.longest_first and self.has_next:
            lines += ["", "", "def following(tile):", '    """The block\'s next tile: blocks take tiles there and back."""',
                      *there_and_back(self.choice)]
        if self.choice.staggered:
            lines += ["", "", *staggered(self.chain, self.choice)]
        return [*lines, "", "", *_ranges(self.chain, self.choice, self.ranges)]


def scalar_lines(consumer: Consumer) -> list[str]:
    return [f"    {name} = {scalar_text(x, top=True)}" for x, name in consumer.scalars.items()]


def _ranges(chain: Chain, choice: ScheduleChoice, ranges: Ranges) -> list[str]:
    """Functions that say which blocks a tile's rounds visit, and where nothing is tested."""
    m, rows, step = chain.rows.name, choice.rows * choice.cluster.m, choice.blocks[chain.index.name]
    count = chain.extent_of(chain.rows)
    last, stop = f"min({m} + {rows}, {count}) - 1", chain.stop
    given = ", ".join([m, *(name.removeprefix("sizes.") for name in chain.given_to(ranges))])
    keys, heads = chain.extent_of(chain.index), [stack.name for stack in chain.stacks[::-1]]

    def extreme(bounds: list, of_last: bool, asked: str = "visited") -> list[str]:
        """The bounds of the last of the rows where they grow with them, or of the first; a mask's are of all of them."""
        call = f"{asked}({m}, last + 1, {keys}, {', '.join([*heads, '0', '0'][:2])}, {keys} - {count})"
        return [f"int({bound.callee.name}.f.{call}[{int(bound.is_end)}])" if isinstance(bound, MaskBound) else
                bound.text("last" if (bound.slope >= 0) is of_last else m) for bound in bounds]

    out: list[str] = []
    if ranges.visits_less and ranges.begins:
        begin, less, more = chain.begin, "", ""
        if begin != "0":
            less, more = f" - {begin}", f"{begin} + "
        out += [f"def first_seen({given}):", f'    """The first block that rows {m} on visit."""', f"    last = {last}",
                f"    first = {more}udiv(max({', '.join([begin, *extreme(ranges.begins, False)])}){less}, {step}) * {step}",
                f"    return min(first, {more}udiv(max({stop} - 1{less}, 0), {step}) * {step})", "", ""]
    if ranges.visits_less and ranges.ends:
        least = f"first_seen({given}) + 1" if ranges.begins else f"{chain.begin} + 1" if chain.start is not None else "1"
        ends = ", ".join([stop, *extreme(ranges.ends, True)])
        out += [f"def end_seen({given}):",
                f'    """The place behind the last that rows {m} on see, in one block at least."""', f"    last = {last}",
                f"    return max(min({ends}), {least})", "", ""]
    if ranges.has_tests and ranges.has_free:
        for name, bounds, kind, least in (("free_from", ranges.begins, "max", "0"),
                                          ("free_to", ranges.ends, "min", stop)):
            if bounds:
                what = "first place" if kind == "max" else "place behind the last"
                out += [f"def {name}({given}):", f'    """The {what} that all of rows {m} on see."""',
                        f"    last = min({m} + {choice.rows}, {count}) - 1",
                        f"    return {kind}({', '.join([least, *extreme(bounds, kind == 'max', 'untested')])})", "", ""]
    return out
