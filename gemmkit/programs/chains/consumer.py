"""The consumers' half of a text: waits, groups of products, lines of values, stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gemmkit.programs.chains.algebra import factor_of_rows, is_bounded, lowered
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
    exponents: dict[Value, tuple[str, ...]] = field(default_factory=dict)      # what `lowered` calls its parts
    bounded: dict[Value, Value] = field(default_factory=dict)      # the shifts that are never steep, by what is subtracted
    kept_factor: Value | None = None                               # of a lazy round, which has computed it
    rare: str | None = None                                        # the vote that its two branches share
    held: list[Value] = field(default_factory=list)                # factors of rows that may share an exponential's branch
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
        if any(self._reads(x, y) for y in self.held):
            self.let_go()
        if factor_of_rows(x) is not None:
            self.held.append(x)
        elif x.op in ROW_CALLS:
            self.put(f"{self.name(x)} = {ROW_CALLS[x.op]}({self.name(x.args[0])})")
        elif x.op == "handover":
            dot = next(d for d in naming.users[x] if d.op == "dot")
            packed = "rectified" if x.data == RECTIFIED else "fragments"
            self.put(f"{self.name(x)} = {self.product(dot)}.{packed}({self.name(x.args[0])})")
        elif self.is_rescaled(x):
            asked = self.rare or f"rescales({self.name(x.args[1])})"
            self.put(f"if {asked}:", f"    {self.name(x)} = {self.applied(x)}")
        else:
            assert x.op in ELEMENTWISE or x.op == READ, x.op
            self.put(f"{self.name(x)} = {self.lowered(x) or self.applied(x)}")
            if x in self.chain.factors and self.shares_vote:
                self.kept_factor = x

    def is_rescaled(self, x: Value) -> bool:
        """Whether a value becomes itself times a factor that is 1 in most rounds."""
        return x.op == "mul" and x.args[1] in self.chain.factors and self.name(x) == self.name(x.args[0])

    def values(self, x: Value) -> int:
        """A thread's: of two rows, of a quarter of the columns, of both, in whichever order the program met them."""
        if x.op == READ:
            return self.choice.size(x.dims[0]) // 4
        return 2 if len(x.dims) == 1 else self.choice.size(next(dim for dim in x.dims if dim is not self.chain.rows)) // 2

    def lowered(self, x: Value) -> str | None:
        """The line of an exponential of which a row's largest number is subtracted; before it, what is subtracted from what
        where that number is large."""
        other, made = lowered(x)
        if made is None or (s := self.known(made.fused.args[0])) is None:
            return None
        shift = made.fused.args[2]
        if x.op == "exp2" and is_bounded(x):
            self.bounded[shift.args[0]] = shift
            return None
        if x not in self.exponents:
            self.exponents[x] = tuple(map(self.naming.fresh, ("exponent", "by", "less")))
        names = self.exponents[x]
        known = dict(zip((made.s, made.factor, made.shift), names))
        factors = [y for y in self.held if y.args[0].args[0].args[1] is shift.args[0]]
        self.held = [y for y in self.held if y not in factors]
        for y in factors:
            self.put(f"{self.name(y)} = {self.applied(factor_of_rows(y, shift) or y, y)}")
        self.put(f"{', '.join(names)} = {s}, convert(F32, {self.number(made.fused.args[1])}), {self.name(shift)}")
        less = [f"    {names[0]} = {self.applied(made.less)}",
                f"    {names[2]} = fill(F32, 2, 0.0)" if made.by is None else
                f"    {', '.join(names[1:])} = convert(F32, {made.by}), fill(F32, 2, 0.0)",
                *(f"    {self.name(y)} = {self.applied(y)}" for y in factors)]
        if self.kept_factor is not None and self.rare is None:
            self.rare = "rare"
            self.put(f"rare = changes({self.name(self.kept_factor)}, large)", "if rare:",
                     f"    large = is_large({self.name(shift)})", "    if any_lane(large):",
                     *(f"    {line}" for line in less))
        else:
            self.put(f"if steep({self.name(shift)}):", *less)
        return self.applied(other, x, known)

    def let_go(self) -> None:
        """Factors that no exponential has taken into its branch are computed as they are written."""
        held, self.held = self.held, []
        for y in held:
            shift = self.bounded.get(y.args[0].args[0].args[1])
            made = None if shift is None else factor_of_rows(y, shift)
            self.put(f"{self.name(y)} = {self.applied(made or y, y)}")

    def _reads(self, x: Value, y: Value) -> bool:
        return any(z is y or (self.naming.is_inlined(z) and self._reads(z, y)) for z in x.args)

    def number(self, x: Value) -> str:
        return scalar_text(x) if x.op == "const" else self.known(x) or ""

    def applied(self, x: Value, of: Value | None = None, names: dict[Value, str] | None = None) -> str:
        """The expression that makes a value, which stands for ``of``; ``names``: of values that the rounds have not."""
        own = names or {}
        made = Element(self.chain, x, lambda y: own.get(y) or (self.known(y) if y in self.naming.users else None),
                       self.of_tile)
        text, call = made.printed(self.values(x))
        for name in made.arrays:
            self.arrays.setdefault(name, x)
        function = self.functions.get(text)
        if function is None:
            function = self.functions[text] = self.naming.fresh(f"make_{self.naming.of(x if of is None else of)}")
        return call(function)

    # -- events -------------------------------------------------------------------------------------------------------

    def events(self, part: list[Event], guarded: bool, joined: bool = False) -> None:
        print_of: dict[type, Callable[[Any], None]] = {
            Full: lambda e: self.put(f"ring_{e.ring.name}.wait(at_{e.ring.name})"),
            Turn: lambda e: self.put("turns.wait(group)"),
            Pass: lambda e: self.put(f"turns.give((group + 1) % {self.choice.warpgroups})"),
            Start: lambda e: self.start(e, part is self.order.before and self.order.lags), Wait: self.wait,
            Release: self.release, Anchor: self.anchor}
        self.kept_factor = self.rare = None
        for event in part:
            if isinstance(event, Compute):
                for x in event.values:
                    self.compute(x, guarded)
            else:
                self.let_go()
                print_of[type(event)](event)
        self.let_go()
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

    @property
    def shares_vote(self) -> bool:
        """Of a lazy round, in which the largest number changes where rows are scaled, and what is ``large`` with it."""
        made = [x for x in self.chain.body if not self.naming.is_inlined(x) and lowered(x)[1] is not None
                and not (x.op == "exp2" and is_bounded(x))]
        return len(self.chain.factors) == 1 and len(made) == 1

    def begin_tile(self, joined: bool) -> None:
        if self.shares_vote:
            self.put("large = True")
        for c in self.chain.carried:
            if c.init.op == "const" and not (joined and len(c.init.dims) == 2):
                self.fill(c)
        for ring in self.places.lone():
            self.put(f"ring_{ring.name}.wait(at_{ring.name})")

    def begin_again(self) -> None:
        if self.shares_vote:
            self.put("large = True")
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
        self.kept_factor = self.rare = None
        for x in self.chain.end:
            self.compute(x, False)
        self.let_go()
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

