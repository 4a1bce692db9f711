"""The consumers' half of a text: waits, groups of products, lines of values, stores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gemmkit.programs.chains.algebra import LOWERED
from gemmkit.programs.chains.elements import ELEMENTWISE, Element, scalar_text
from gemmkit.programs.chains.lengths import LENGTH
from gemmkit.programs.chains.names import Naming
from gemmkit.programs.chains.order import Anchor, Compute, Event, Full, Pass, Release, Start, Turn, Wait
from gemmkit.programs.chains.places import RECTIFIED
from gemmkit.programs.chains.reads import READ
from gemmkit.programs.chains.rounds import CONSUMER, Role
from gemmkit.programs.trace import Carried, Value

ROW_CALLS = dict(rowmax="row_max", rowsum="own_sum", whole="whole_sum")


@dataclass
class Consumer(Role):
    """``functions`` by text: equal ones are printed once. ``scalars``: the names of numbers worked out at the top."""

    naming: Naming = field(kw_only=True)
    functions: dict[str, str] = field(default_factory=dict)
    scalars: dict[Value, str] = field(default_factory=dict)
    products: dict[tuple, str] = field(default_factory=dict)
    arrays: dict[str, Value] = field(default_factory=dict)         # that threads read, and what reads them
    lowered: dict[Value, tuple[str, ...]] = field(default_factory=dict)        # what exponents call their operands
    extra: dict[Any, tuple[str, ...]] = field(default_factory=dict)
    rare: dict[Value, str] = field(default_factory=dict)           # votes of a lazy round, by the references
    left: list[Value] = field(default_factory=list)                # of what is computed together
    done: set[Value] = field(default_factory=set)                  # of it, before its turn
    old: set[str] = field(default_factory=set)                     # names that a tile's end finds under before_

    kind = CONSUMER

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
        return x.op in ("const", "scalar") or (bool(x.args) and all(map(self._is_constant, x.args)))

    def product(self, d: Value) -> str:
        """The collective of products of the same blocks, taken in the same way."""
        a, b = self.places.blocks.get((d, 0)), self.places.blocks[d, 1]
        key = d.args[0] if a is None else a, b, *(x.op == "transpose" for x in d.args[:2])
        if key not in self.products:
            left = self.naming.of(d.args[0]).removesuffix("_as_a") if a is None else a.name
            name = f"{left}_by_{b.name}"
            while name in self.products.values():
                name += "_2"
            self.products[key] = name
        return self.products[key]

    # -- values -------------------------------------------------------------------------------------------------------

    def compute_all(self, values: Iterable[Value], guarded: bool) -> None:
        self.left, self.done = list(values), set()
        while self.left:
            self.compute(self.left[0], guarded)
            self.left.pop(0)

    def compute(self, x: Value, guarded: bool) -> None:
        naming = self.naming
        if not x.dims or naming.is_inlined(x) or (x in naming.tests and not guarded):
            return
        if x.op in ROW_CALLS:
            self.put(f"{self.name(x)} = {ROW_CALLS[x.op]}({self.name(x.args[0])})")
        elif x.op == "handover":
            dot = next(d for d in naming.users[x] if d.op == "dot")
            packed = "rectified" if x.data == RECTIFIED else "fragments"
            self.put(f"{self.name(x)} = {self.product(dot)}.{packed}({self.name(x.args[0])})")
        elif self.is_rescaled(x):
            asked = self.rare.get(self.chain.factors[x.args[1]]) or f"rescales({self.name(x.args[1])})"
            self.put(f"if {asked}:", f"    {self.name(x)} = {self.applied(x)}")
        elif x in self.chain.factors:
            self.rescale(x)
        else:
            assert x.op in ELEMENTWISE or x.op == READ, x.op
            for part in self.exponents(x):
                if part not in self.done:
                    self.lower(part.args[2], guarded)
            if x not in self.done:
                self.put(f"{self.name(x)} = {self.applied(x)}")

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
        difference as it is written, what is left of the factor, and nothing. A value of rows is computed again there."""
        lines: list[str] = []
        exact: list[str] = []
        for y in [y for y in self.left if not self.naming.is_inlined(y) and (guarded or y not in self.naming.tests)]:
            for part in [part for part in self.exponents(y) if part.args[2] is shift]:
                s, factor, _, difference, by = part.args
                if not self._is_there(part if len(y.dims) == 2 else y):
                    continue
                self.done.add(part)
                if len(y.dims) == 2:
                    takes = [self.name(s), self.number(factor), self.name(shift)]
                    made = [self.known(difference) or self.applied(difference, LOWERED), self.number(by),
                            "fill(F32, 2, 0.0)"]
                    names = self.names_of(part, "exponent", "by", "less")
                    if factor is by:
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
        asked = f"steep({self.name(shift)})"
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
        return f"convert(F32, {scalar_text(x) if x.op == 'const' else self.known(x)})"

    def values(self, x: Value) -> int:
        """A thread's: of two rows, of a quarter of the columns, of both, in whichever order the program met them."""
        if x.op == READ:
            return self.choice.size(x.dims[0]) // 4
        return 2 if len(x.dims) == 1 else self.choice.size(next(dim for dim in x.dims if dim is not self.chain.rows)) // 2

    def applied(self, x: Value, name: str = "") -> str:
        made = Element(self.chain, x, self.known, self.of_tile, self.lowered)
        text, call = made.printed(self.values(x))
        for array in made.arrays:
            self.arrays.setdefault(array, x)
        function = self.functions.get(text)
        if function is None:
            function = self.functions[text] = self.naming.fresh(f"make_{name or self.naming.of(x)}")
        return call(function)

    # -- events -------------------------------------------------------------------------------------------------------

    def events(self, part: list[Event], guarded: bool, joined: bool = False) -> None:
        print_of: dict[type, Callable[[Any], None]] = {
            Full: lambda e: self.put(f"ring_{e.ring.name}.wait(at_{e.ring.name})"),
            Turn: lambda e: self.put("turns.wait(group)"),
            Pass: lambda e: self.put(f"turns.give((group + 1) % {self.choice.warpgroups})"),
            Start: lambda e: self.start(e, part is self.order.before and self.order.lags), Wait: self.wait,
            Release: self.release, Anchor: self.anchor}
        self.rare = {}
        for event in part:
            if isinstance(event, Compute):
                self.compute_all(event.values, guarded)
            else:
                print_of[type(event)](event)
        self.move(part)
        if self.order.lags and part is not self.order.after:
            for ring in [event.ring for event in part if isinstance(event, Full)]:
                self.put(f"before_{ring.name}, at_{ring.name} = at_{ring.name}, ring_{ring.name}.advance(at_{ring.name})")

    def start(self, event: Start, is_first: bool) -> None:
        inits = {c.inside: c.init for c in self.chain.carried}
        self.put("wgmma_fence()")
        for d in event.products:
            name, product, b = self.name(d), self.product(d), self.places.blocks[d, 1].ring.name
            a = self.places.blocks.get((d, 0))
            sums = f"{product}.begin(0.0)" if len(d.args) < 3 else self.name(d.args[2])
            fresh = len(d.args) < 3 or (is_first and inits[d.args[2]].data == 0)
            last = f"at_{b}, {int(not fresh)}"
            if a is None:
                self.put(f"{name} = {product}.multiply({sums}, {self.name(d.args[0])}, {last})")
            elif a.ring.name == b:
                self.put(f"{name} = {product}.multiply({sums}, at_{b}, group, {int(not fresh)})")
            else:
                self.put(f"{name} = {product}.multiply_apart({sums}, at_{a.ring.name}, at_{b}, group, {int(not fresh)})")
        self.put("wgmma_commit()")

    def wait(self, event: Wait) -> None:
        names = [self.name(d) for d in (*event.over, *event.flying)]
        if len(names) == 1:
            self.put(f"({names[0]},) = wgmma_wait({event.pending}, ({names[0]},))")
        else:
            self.put(f"{', '.join(names)} = wgmma_wait({event.pending}, ({', '.join(names)}))")

    def release(self, event: Release) -> None:
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
            if c.init.op == "const" and not (joined and len(c.init.dims) == 2):
                self.fill(c)
        for ring in self.places.lone():
            self.put(f"ring_{ring.name}.wait(at_{ring.name})")

    def begin_again(self) -> None:
        for c in self.chain.carried:
            if c.init.op == "const" and len(c.init.dims) == 2:
                self.fill(c)

    def fill(self, c: Carried) -> None:
        count = 2 if len(c.init.dims) == 1 else self.choice.size(c.init.dims[1]) // 2
        self.put(f"{self.naming.of(c.inside)} = fill(F32, {count}, {scalar_text(c.init)})")

    def before_loops(self) -> None:
        """The assembler does not see that slots are uniform: heads of 256 had 13 moves to uniform registers in a round."""
        for ring in self.places.lone():
            if self.places.is_first_alone(ring):           # the next tile's may come
                self.release(Release(ring))
        for ring in self.places.rings if self.choice.ahead else ():
            at = f"at_{ring.name}"
            self.put(f"{at} = Slot(uniform({at}.stage), uniform({at}.phase))")

    def end_rounds(self) -> None:
        for ring in self.places.lone():
            if not self.places.is_first_alone(ring):
                self.release(Release(ring))

    def kept(self) -> list[str]:
        needed = {y for x in self.chain.end for y in x.args} | {store.value for store in self.chain.stores}
        self.old = {self.naming.of(c.after) for c in self.chain.carried if c.after in needed and len(c.init.dims) == 1}
        kept = [self.naming.of(c.after) for c in self.chain.carried if self.naming.of(c.after) in self.old]
        begins = any(y.op == LENGTH for x in self.chain.end if x.op == "where" for y in x.args[0].args)
        return [*kept, self.chain.stop] if begins else kept

    def finish_tile(self) -> None:
        self.compute_all(self.chain.end, False)
        stack = "0" if self.chain.stack is None else self.of_tile(self.chain.stack)
        if self.chain.splits > 1:
            stack = f"before_{self.outer}" if self.before else self.outer
        rows = self.chain.rows
        for store in self.chain.stores:
            name = store.parameter.name
            columns = 1 if self.chain.stores_rows(store) else store.parameter.shape[-1]
            part = f"Part({self.of_tile(rows)} + group * 64, 0, sizes.{rows.name}, {columns}, {stack})"
            value = store.value
            text = self.applied(value) if value.op in ("const", "scalar", "load") else self.name(value)
            self.put(f"out_{name}.store({text}, {name}, {part}, group)")


def _bound_of(factor: Value) -> Value:
    """What the exponent of a lazy round's factor is compared with (`gemmkit.programs.chains.lazy`)."""
    return factor.args[0].args[0]


def _is_made_of(x: Value, reference: Value) -> bool:
    """Whether a value of rows is made of another one and of numbers."""
    return x is reference or (all(not y.dims or _is_made_of(y, reference) for y in x.args) and any(y.dims for y in x.args))
