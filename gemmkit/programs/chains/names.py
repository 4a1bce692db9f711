"""What a text calls its values: a name is a register, so that what is made in another's place shares its name.

| value | name |
|---|---|
| a cell, as a round begins, and what becomes of it | one, where nothing reads the old value behind the new one |
| what a product is added to, and the product | one, where the product alone reads it |
| what a test lets through, and what it tests | one: rounds without tests leave the line out |
| another | the user's, or what it is |
"""

from __future__ import annotations

from gemmkit.programs.chains.algebra import LOWERED
from gemmkit.programs.chains.chain import Chain, depends
from gemmkit.programs.chains.elements import ELEMENTWISE, is_whole_number
from gemmkit.programs.chains.order import Compute, Event
from gemmkit.programs.chains.places import ChainPlaces
from gemmkit.programs.trace import Value

DEFAULT = dict(mul="scaled", rowmax="row_top", rowsum="row_sum", neg="minus", reciprocal="over", where="chosen",
               max="larger", fma="value", inside="value", add="value", sub="value", dot="s")


class Naming:
    """``tests``: values that rounds without tests leave out. ``parts``: the rounds' events."""

    def __init__(self, chain: Chain, places: ChainPlaces, tests: set[Value], parts: list[list[Event]], taken: set[str]):
        self.chain, self.tests, self.taken = chain, tests, set(taken)
        self.outs = {c.out for c in chain.carried}
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
        out, n = name, 1
        while out in self.taken:
            n += 1
            out = f"{name}_{n}"
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
