"""What a row's threads do, in order: rows are loaded, mapped and folded, and results are stored.

A row is held in registers from where it is loaded or mapped to where it is needed last. What several folds and stores need
is mapped once where computing it again costs more than a place in the registers: exponentials and the like, and what stands
in place of the rows that it is made of. A difference from the mean is written where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gemmkit.programs.interpreter import CONDITIONS
from gemmkit.programs.rows.form import FOLDS, RowProgram, is_row, is_vector, walked
from gemmkit.programs.trace import Store, Value

COSTLY = frozenset({"exp2", "log2", "tanh", "sqrt", "reciprocal"})
NEVER = CONDITIONS | {"load"}                   # an array's row is one anyway, and a condition is no number


@dataclass(frozen=True, eq=False)
class Step:
    """``value``: what it makes."""

    value: Value


class Load(Step):
    """A row of an array."""


class Map(Step):
    """A row, element by element, that later steps begin with."""


class Fold(Step):
    """One value of all elements."""


class Moments(Step):
    """The mean of a row, and its variance: ``value`` is the row."""


class Named(Step):
    """A value of the row that elements are computed with, or that is needed twice."""


@dataclass(frozen=True, eq=False)
class Put(Step):
    """``value`` becomes a result."""

    store: Store


@dataclass
class Steps:
    """``rows``: the values that are rows in the text; ``named``: those of a row that have a name; ``at_once``: how many rows
    threads hold at the same time."""

    order: list[Step]
    rows: set[Value]
    named: set[Value]
    at_once: int

    def within(self, root: Value) -> Iterator[Value]:
        """What the elements of a value are made of, as far as that has no name: operands first."""
        return _within(root, self.rows | self.named)


def steps_of(program: RowProgram, roots: list[Value]) -> Steps:
    """``roots``: what is stored."""
    values = walked(roots)
    rows = {x for x in values if x.op == "load" and is_vector(x)} | _mapped(values, roots)
    builder = Builder(rows, _named(values, roots), {x.args[0] for x in values if x.op == "variance"})
    builder.order += [Load(x) for x in values if x.op == "load" and is_vector(x)]
    for store, root in zip(program.stores, roots):
        builder.need(root)
        builder.order.append(Put(root, store))
    return Steps(builder.order, rows, builder.named, _at_once(builder))


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

def _mapped(values: list[Value], roots: list[Value]) -> set[Value]:
    """The computed values that are held."""
    users: dict[Value, list[Value]] = {x: [] for x in values}
    for x in values:
        for y in x.args:
            users[y].append(x)
    forced = {x.args[0] for x in values if x.op == "variance" and x.args[0].op != "load"}
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
        if len(where(x)) > 1 and (COSTLY & {y.op for y in parts} or sum(y.op == "load" for y in parts) > 1):
            held.add(x)
    for x in computed:
        if x in held - forced:
            places.clear()
            parts = elements(x, held - {x})
            replaced = any(is_vector(y) and (y in held or y.op == "load") and where(y) == {x} for y in parts)
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
            and (x.op in FOLDS or x.op in ("load", "scalar") or uses.get(x, 0) > 1)}


# -- in order ---------------------------------------------------------------------------------------------------------------

@dataclass
class Builder:
    """``spread``: rows whose variance is needed."""

    rows: set[Value]
    named: set[Value]
    spread: set[Value]
    order: list[Step] = field(default_factory=list)
    done: set[Value] = field(default_factory=set)

    def need(self, root: Value) -> None:
        """The steps that a value's elements need."""
        for x in _within(root, self.rows | self.named):
            if x not in self.done and ((x in self.rows and x.op != "load") or x in self.named):
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
        self.order.append(Fold(x) if x.op in FOLDS else Map(x) if x in self.rows else Named(x))


def _at_once(builder: Builder) -> int:
    """The most rows that are live between two steps."""
    known = builder.rows | builder.named
    needs = [{step.value} & builder.rows if isinstance(step, (Moments, Put)) and step.value in known else
             {y for y in _within(step.value, known) if y in builder.rows and y is not step.value} for step in builder.order]
    last = {row: n for n, used in enumerate(needs) for row in used}
    made = {step.value: n for n, step in enumerate(builder.order) if isinstance(step, (Load, Map))}
    return max(sum(made[row] <= n < last.get(row, made[row]) or made[row] == n for row in made) for n in range(len(needs)))
