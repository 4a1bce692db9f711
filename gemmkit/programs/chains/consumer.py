"""The consumers' half of a text: waits, groups of products, lines of values, stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gemmkit.programs.chains.elements import ELEMENTWISE, Element, scalar_text
from gemmkit.programs.chains.lengths import LENGTH
from gemmkit.programs.chains.names import Naming
from gemmkit.programs.chains.order import Anchor, Compute, Event, Full, Pass, Release, Start, Turn, Wait
from gemmkit.programs.chains.places import RECTIFIED
from gemmkit.programs.chains.reads import READ
from gemmkit.programs.chains.rounds import CONSUMER, Role
from gemmkit.programs.trace import Carried, Value

__all__ = ["Consumer"]

ROW_CALLS = dict(rowmax="row_max", rowsum="own_sum", whole="whole_sum")


@dataclass
class Consumer(Role):
    """``functions`` by text: equal ones are printed once. ``scalars``: the names of numbers worked out at the top."""

    naming: Naming = field(kw_only=True)
    functions: dict[str, str] = field(default_factory=dict)
    scalars: dict[Value, str] = field(default_factory=dict)
    products: dict[tuple, str] = field(default_factory=dict)
    arrays: dict[str, Value] = field(default_factory=dict)         # that threads read, and what reads them
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
        if not x.dims and x.op != "const" and self._is_constant(x):
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
            self.put(f"if rescales({self.name(x.args[1])}):", f"    {self.name(x)} = {self.applied(x)}")
        else:
            assert x.op in ELEMENTWISE or x.op == READ, x.op
            self.put(f"{self.name(x)} = {self.applied(x)}")

    def is_rescaled(self, x: Value) -> bool:
        """Whether a value becomes itself times a factor that is 1 in most rounds."""
        return x.op == "mul" and x.args[1] in self.chain.factors and self.name(x) == self.name(x.args[0])

    def values(self, x: Value) -> int:
        """A thread's: of two rows, of a quarter of the columns, of both, in whichever order the program met them."""
        if x.op == READ:
            return self.choice.size(x.dims[0]) // 4
        return 2 if len(x.dims) == 1 else self.choice.size(next(dim for dim in x.dims if dim is not self.chain.rows)) // 2

    def applied(self, x: Value) -> str:
        made = Element(self.chain, x, self.known, self.of_tile)
        text, call = made.printed(self.values(x))
        for name in made.arrays:
            self.arrays.setdefault(name, x)
        function = self.functions.get(text)
        if function is None:
            function = self.functions[text] = self.naming.fresh(f"make_{self.naming.of(x)}")
        return call(function)

    # -- events -------------------------------------------------------------------------------------------------------

    def events(self, part: list[Event], guarded: bool, joined: bool = False) -> None:
        print_of: dict[type, Callable[[Any], None]] = {
            Full: lambda e: self.put(f"ring_{e.ring.name}.wait(at_{e.ring.name})"),
            Turn: lambda e: self.put("turns.wait(group)"),
            Pass: lambda e: self.put(f"turns.give((group + 1) % {self.choice.warpgroups})"),
            Start: lambda e: self.start(e, part is self.order.before and self.order.lags), Wait: self.wait,
            Release: self.release, Anchor: self.anchor}
        for event in part:
            if isinstance(event, Compute):
                for x in event.values:
                    self.compute(x, guarded)
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
        for x in self.chain.end:
            self.compute(x, False)
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

