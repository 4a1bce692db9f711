"""What a round does to its cells, proved by algebra: rounds may change their order, or be shared by blocks, for this alone.

A cell is a monoid where a round makes of it

| written | with | what does not depend on the order |
|---|---|---|
| max(cell, x), -max(-cell, y) | x of the round's blocks alone | the largest, the least |
| cell + x | the same | the sum |
| cell * x | the same | the product |
| cell * w / w' + x / w' | w of other cells as a round begins, w' of the same as it ends | cell * w, which is a sum |

where w is a product of powers and of exponentials of cells: exp(best) in attention, whose sums become
cell * exp(best - top) + x * exp(-top). What is not recognised keeps its order.

Values are sums of terms here: a monomial of cells times a coefficient, which is a number times constants, or anything that
no cell is in. Real numbers are meant: what rounding, infinities and NaN do trials look at (`trials`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from gemmkit.programs.called import EXTENT
from gemmkit.programs.chains.chain import Chain
from gemmkit.programs.places import refuse_pieces
from gemmkit.programs.trace import Carried, Loop, StoreStatement, Value
from gemmkit.programs.values import Axis, Index, refused, shown

#: A number times constants (their names, sorted); None: any number that no cell is in.
Coefficient = tuple[float, tuple[str, ...]] | None
#: Powers of atoms, and what their exponentials' exponents are multiplied by. An atom is a value, or the logarithm of one.
Monomial = tuple[frozenset, frozenset]
Form = dict[Monomial, Coefficient]

ONE: Coefficient = (1.0, ())
UNIT: Monomial = (frozenset(), frozenset())
OVER = "1 / "                          # of a constant's name
BEYOND: Coefficient = (-math.inf, ())


class Unproved(Exception):
    """A value is no sum of monomials of cells."""

    def __init__(self, x: Value):
        super().__init__(f"{x!r}")
        self.value = x


class Monoid(NamedTuple):
    """``weights``: by the cells (`Carried.inside`) that a sum is relative to, the power and the exponential's factor."""

    kind: str
    weights: dict[Value, tuple[int, tuple[float, tuple[str, ...]]]]


class Logarithm(NamedTuple):
    """An atom: the logarithm of a value."""

    of: Value


# -- coefficients and forms -----------------------------------------------------------------------------------------------

def _is_infinite(x: Coefficient) -> bool:
    return x is not None and math.isinf(x[0])


def atom(x: Any) -> Form:
    return {(frozenset([(x, 1)]), frozenset()): ONE}


def constant(number: float) -> Form:
    return {} if number == 0 else {UNIT: (float(number), ())}


class Forms:
    """Values as forms. ``known``: forms of some values, such as atoms for cells; ``hidden``: a ``where`` whose condition
    holds nowhere; ``nothing``: all places are out of range; ``beyond``: the index that is, and whether arrays have zeros
    there. ``unseen``: a maximum over all rounds: where it is -inf, as of a row that has seen nothing, nothing depends on by
    how much it is moved. ``signs`` of numbers, by their names."""

    def __init__(self, chain: Chain, signs: Mapping[str, float], known: Mapping[Value, Form], hidden: Value | None = None,
                 nothing: bool = False, beyond: bool | None = None, unseen: Value | None = None):
        self.chain, self.signs, self.hidden, self.nothing, self.beyond = chain, signs, hidden, nothing, beyond
        self.unseen = unseen
        self.known = dict(known)

    def of(self, x: Value) -> Form:
        if x not in self.known:
            self.known[x] = self.expanded(x)
        return self.known[x]

    def expanded(self, x: Value) -> Form:
        """Of an operation, even if it is known by another form."""
        if not x.args:
            return self._leaf(x)
        if x.op == "where":
            return self._where(x)
        if x.op == "inside":
            if self.nothing or self.beyond is not None:
                return self.of(x.args[1])
            return self._either(x, self.of(x.args[0]), self.of(x.args[1]))
        if self.beyond is not None:
            if x.op == "dot" and self.chain.index in x.dims:
                return {} if self.beyond and len(x.args) == 2 else {UNIT: None}
            if x.dims and self.chain.index not in x.dims:
                return {UNIT: None}                    # of other places
        rule: Callable[..., Form] | None = getattr(self, f"_of_{x.op}", None)
        args = [self.of(y) for y in x.args]
        if rule is not None:
            return rule(x, *args)
        if not all(map(is_pure, args)) or any(_is_infinite(f.get(UNIT, ONE)) for f in args):
            raise Unproved(x)
        return {} if x.op in ("tanh", "erf", "abs", "sqrt") and not args[0] else {UNIT: None}

    def _leaf(self, x: Value) -> Form:
        if x.op == "const":
            if math.isnan(x.data):
                raise Unproved(x)
            return constant(x.data)
        key = self._constant(x)
        if x.op in ("scalar", "load", "coordinate", EXTENT) or self.beyond is not None:
            return {UNIT: None if key is None else (1.0, (key,))}
        raise Unproved(x)

    def _constant(self, x: Value) -> str | None:
        """What a value is called that is the same in all rounds."""
        if x.op == "scalar":
            return str(x.data)
        if x.op == "load" and self.chain.index not in x.data[1]:
            return f"{x.data[0].name}[{', '.join(str(id(index)) for index in x.data[1])}]"
        return None

    # -- choices ------------------------------------------------------------------------------------------------------

    def _where(self, x: Value) -> Form:
        condition, one, other = x.args
        if x is self.hidden or (condition.op == "eq" and condition.args[0] is self.unseen
                                and number(self.of(condition.args[1])) == -math.inf):
            return self.of(other)
        holds = self._holds(condition)
        return self._either(x, self.of(one), self.of(other)) if holds is None else self.of(one if holds else other)

    def _holds(self, x: Value) -> bool | None:
        """Whether a condition is decided. Raises Unproved for one that cells are in."""
        if x.op in ("and", "or", "not"):
            parts = [self._holds(y) for y in x.args]
            if x.op == "not":
                return None if parts[0] is None else not parts[0]
            decides = x.op == "or"
            return decides if decides in parts else None if None in parts else not decides
        if not x.args:
            return None
        forms = [self.of(y) for y in x.args]
        numbers = [number(f) for f in forms]
        if None not in numbers and len(numbers) == 2 and x.op in ("lt", "le", "eq", "ne"):
            one, two = (float(n) for n in numbers if n is not None)
            return {"lt": one < two, "le": one <= two, "eq": one == two, "ne": one != two}[x.op]
        if not all(map(is_pure, forms)):
            raise Unproved(x)
        return None

    def _either(self, x: Value, f: Form, g: Form) -> Form:
        """One of two forms: what an infinity takes the place of may be left out of a sum that is -inf with it."""
        if f == g:
            return f
        for one, other in ((f, g), (g, f)):
            if one == {UNIT: BEYOND} and not _is_infinite(other.get(UNIT, ONE)):
                return {**other, UNIT: None} if not is_pure(other) else {UNIT: None}
        return {m: f[m] if m in f and m in g and f[m] == g[m] else None for m in (*f, *g)}

    # -- operations ---------------------------------------------------------------------------------------------------

    def _times(self, x: Value, a: Coefficient, b: Coefficient) -> Coefficient:
        for one, other in ((a, b), (b, a)):
            if _is_infinite(one):                      # of a sign that is known
                if other is None or other[0] == 0 or not all(self.signs.get(name.removeprefix(OVER), 0.0) > 0
                                                                for name in other[1]):
                    raise Unproved(x)
        if a is None or b is None:
            return None
        product = a[0] * b[0]
        return (product, ()) if math.isinf(product) else (product, tuple(sorted(a[1] + b[1])))

    def _plus(self, x: Value, a: Coefficient, b: Coefficient) -> Coefficient:
        if _is_infinite(a) or _is_infinite(b):
            if _is_infinite(a) and _is_infinite(b) and a != b:
                raise Unproved(x)
            return a if _is_infinite(a) else b
        if a is None or b is None or a[1] != b[1]:
            return None
        return a[0] + b[0], a[1]

    def _sum(self, x: Value, *forms: Form) -> Form:
        out: Form = {}
        for form in forms:
            for m, c in form.items():
                out[m] = self._plus(x, out[m], c) if m in out else c
        if _is_infinite(out.get(UNIT, ONE)):
            return {UNIT: out[UNIT]}               # all else is finite
        return {m: c for m, c in out.items() if c is None or c[0] != 0}

    def _product(self, x: Value, f: Form, g: Form) -> Form:
        made = []
        for m, c in f.items():
            for n, d in g.items():
                powers, exponents = dict(m[0]), dict(m[1])
                for which, by in n[0]:
                    powers[which] = powers.get(which, 0) + by
                for which, by in n[1]:
                    exponents[which] = self._plus(x, exponents[which], by) if which in exponents else by
                    if exponents[which] is None:
                        raise Unproved(x)
                key = (frozenset((a, p) for a, p in powers.items() if p),
                       frozenset((a, e) for a, e in exponents.items() if e[0] != 0))
                made.append({key: self._times(x, c, d)})
        return self._sum(x, *made)

    def _of_add(self, x: Value, f: Form, g: Form) -> Form:
        return self._sum(x, f, g)

    def _of_neg(self, x: Value, f: Form) -> Form:
        return self._product(x, f, constant(-1.0))

    def _of_sub(self, x: Value, f: Form, g: Form) -> Form:
        return self._sum(x, f, self._of_neg(x, g))

    _of_difference = _of_sub

    def _of_mul(self, x: Value, f: Form, g: Form) -> Form:
        return self._product(x, f, g)

    def _of_fma(self, x: Value, f: Form, g: Form, h: Form) -> Form:
        return self._sum(x, self._product(x, f, g), h)

    def _of_lowered(self, x: Value, s: Form, factor: Form, shift: Form, *_: Form) -> Form:
        return self._of_fma(x, s, factor, shift)

    def _of_div(self, x: Value, f: Form, g: Form) -> Form:
        return self._product(x, f, self._of_reciprocal(x, g))

    def _of_reciprocal(self, x: Value, f: Form) -> Form:
        if len(f) != 1:
            raise Unproved(x)
        (((powers, exponents), c),) = f.items()
        if _is_infinite(c):
            raise Unproved(x)
        key = (frozenset((a, -p) for a, p in powers), frozenset((a, self._times(x, e, (-1.0, ()))) for a, e in exponents))
        return {key: None if c is None else (1 / c[0], tuple(f"{OVER}{name}" for name in c[1]))}

    def _of_cast(self, x: Value, f: Form) -> Form:
        return f

    _of_transpose = _of_cast

    def _of_finite(self, x: Value, f: Form) -> Form:
        """Of a maximum: -inf before a row has seen anything, when what its exponential is a factor of is 0."""
        if is_pure(f):
            return {} if f == {UNIT: BEYOND} else f
        if len(f) == 1 and UNIT not in f and linear(next(iter(f))) is not None:
            return f
        raise Unproved(x)

    def _of_max(self, x: Value, f: Form, g: Form) -> Form:
        if f == g or g == {UNIT: BEYOND}:
            return f
        if f == {UNIT: BEYOND}:
            return g
        one, other = number(f), number(g)
        if one is not None and other is not None:
            return constant(max(one, other))
        if is_pure(f) and is_pure(g):
            return {UNIT: None}
        raise Unproved(x)

    def _of_exp(self, x: Value, f: Form) -> Form:
        if f.get(UNIT) == BEYOND:
            return {}
        powers: dict[Any, int] = {}
        exponents: dict[Any, Coefficient] = {}
        for m, c in f.items():
            if m == UNIT:
                continue
            which = linear(m)
            if which is None or c is None or _is_infinite(c):
                raise Unproved(x)
            if isinstance(which, Logarithm):
                if c[1] or c[0] != int(c[0]):
                    raise Unproved(x)
                powers[which.of] = int(c[0])
            else:
                exponents[which] = c
        if _is_infinite(f.get(UNIT, ONE)):
            raise Unproved(x)
        return {(frozenset(powers.items()), frozenset(exponents.items())): None if UNIT in f else ONE}

    _of_exp2 = _of_exp

    def _of_log(self, x: Value, f: Form) -> Form:
        if len(f) != 1 or _is_infinite(next(iter(f.values()))):
            raise Unproved(x)
        (((powers, exponents), c),) = f.items()
        made = [self._product(x, atom(Logarithm(a)), constant(p)) for a, p in powers]
        made += [{m: e for m in atom(a)} for a, e in exponents]
        return self._sum(x, *made, {} if c == ONE else {UNIT: None})

    _of_log2 = _of_log

    def _of_rowsum(self, x: Value, f: Form) -> Form:
        return {m: self._anything(x, c) for m, c in f.items() if self._goes_through(x, m, x.args[0].dims[1])}

    def _of_rowmax(self, x: Value, f: Form) -> Form:
        """Of terms that are the same along a row the maximum is of the rest."""
        out = {}
        for m, c in f.items():
            if m == UNIT:
                out[m] = c if _is_infinite(c) else None
            elif c is not None and linear(m) is not None and self._goes_through(x, m, x.args[0].dims[1]):
                out[m] = c
            else:
                raise Unproved(x)
        return out or {UNIT: None} if f else {}

    def _of_dot(self, x: Value, f: Form, g: Form, added: Form | None = None) -> Form:
        over = x.args[0].dims[1]
        for m in (*f, *g):
            self._goes_through(x, m, over)
        made = {m: self._anything(x, c) for m, c in self._product(x, f, g).items()}
        return made if added is None else self._sum(x, made, added)

    @staticmethod
    def _anything(x: Value, c: Coefficient) -> Coefficient:
        if _is_infinite(c):
            raise Unproved(x)
        return None

    @staticmethod
    def _goes_through(x: Value, m: Monomial, over: Any) -> bool:
        """Whether a sum over a dimension is one of coefficients alone. Raises Unproved if it is not."""
        if any(over in (which.of if isinstance(which, Logarithm) else which).dims for part in m for which, _ in part):
            raise Unproved(x)
        return True


def is_pure(f: Form) -> bool:
    """Whether no cell is in it."""
    return all(m == UNIT for m in f)


def number(f: Form) -> float | None:
    """What a form is if it is one number."""
    if not f:
        return 0.0
    c = f.get(UNIT)
    return c[0] if len(f) == 1 and c is not None and not c[1] else None


def linear(m: Monomial) -> Any:
    """The atom that a monomial is; None for another one."""
    powers, exponents = m
    if len(powers) != 1 or exponents:
        return None
    ((which, power),) = powers
    return which if power == 1 else None


# -- cells ----------------------------------------------------------------------------------------------------------------

def monoids(chain: Chain, signs: Mapping[str, float]) -> dict[Value, Monoid]:
    """Of a program as it is traced: what its cells are (by `Carried.inside`), each behind those that it is relative to.
    Raises Unproved for what is not recognised."""
    found = {c.inside: _monoid(chain, c, signs) for c in chain.carried}
    out: dict[Value, Monoid] = {}
    while len(out) < len(found):                       # a sum follows from what it is relative to, and not the other way
        more = {cell: made for cell, made in found.items() if cell not in out and set(made.weights) <= set(out)}
        if not more:
            raise Unproved(next(cell for cell in found if cell not in out))
        out |= more
    return out


def _monoid(chain: Chain, c: Carried, signs: Mapping[str, float]) -> Monoid:
    known = {x: atom(x) for other in chain.carried for x in (other.inside, other.out)}
    forms = Forms(chain, signs, known)
    for kind, cell, out in (("max", c.inside, c.out), ("min", None, c.out.args[0] if c.out.op == "neg" else c.out)):
        if out.op != "max" or (kind == "min" and c.out.op != "neg"):
            continue
        parts, others = [out], list[Value]()
        while parts:
            x = parts.pop()
            if x.op == "max" and (x is out or x not in known):
                parts += x.args
            else:
                others.append(x)
        own = [x for x in others if x is cell or (cell is None and x.op == "neg" and x.args[0] is c.inside)]
        if own and all(is_pure(forms.of(x)) for x in others if x not in own):
            return Monoid(kind, {})
        raise Unproved(c.out)
    return _sum_of(c, forms.expanded(c.out), [other for other in chain.carried if other is not c])


def _sum_of(c: Carried, f: Form, others: list[Carried]) -> Monoid:
    """Of a form cell * w / w' + x / w'."""
    own = [m for m in f if any(which is c.inside for part in m for which, _ in part)]
    if len(own) != 1 or (c.inside, 1) not in own[0][0] :
        raise Unproved(c.out)
    powers, exponents = (dict(part) for part in own[0])
    weights: dict[Value, tuple[int, tuple[float, tuple[str, ...]]]] = {}
    ends: tuple[dict[Value, int], dict[Value, Coefficient]] = {}, {}
    for other in others:
        power, (by, names) = powers.get(other.inside, 0), exponents.get(other.inside, (0.0, ()))
        if powers.get(other.out, 0) != -power or exponents.get(other.out, (0.0, ())) != (-by, names):
            raise Unproved(c.out)
        if power:
            ends[0][other.out] = -power
        if by:
            ends[1][other.out] = -by, names
        if power or by:
            weights[other.inside] = power, (by, names)
    w = frozenset(ends[0].items()), frozenset(ends[1].items())
    added = [m for m in f if m != own[0]]
    if c.inside in exponents or any(m != w for m in added) or (added and f[own[0]] != ONE):
        raise Unproved(c.out)
    return Monoid("sum" if f[own[0]] == ONE else "product", weights)


def stays(chain: Chain, signs: Mapping[str, float], hidden: Value, at_first: bool) -> bool:
    """Whether a round in which the condition of a ``where`` holds nowhere leaves every cell as it is: of rows that have seen
    something, and ``at_first`` of others."""
    states = [{c.inside: atom(c.inside) for c in chain.carried}]
    if at_first:
        states.append({c.inside: constant(c.init.data) if c.init.op == "const" else atom(c.inside) for c in chain.carried})
    try:
        for known in states:
            forms = Forms(chain, signs, known, hidden=hidden)
            if any(forms.of(c.out) != known[c.inside] for c in chain.carried):
                return False
    except Unproved:
        return False
    return True


def unchanged_by_nothing(chain: Chain, signs: Mapping[str, float]) -> set[Value]:
    """Cells (as a round begins) that a tile's first round leaves as they are if all of its places are out of range."""
    begin = {c.inside: constant(c.init.data) if c.init.op == "const" else atom(c.inside) for c in chain.carried}
    forms, found = Forms(chain, signs, begin, nothing=True), set[Value]()
    for c in chain.carried:
        try:
            if forms.of(c.out) == begin[c.inside]:
                found.add(c.inside)
        except Unproved:
            continue
    return found


def beyond(chain: Chain, signs: Mapping[str, float]) -> dict[Value, float]:
    """What values are where the rounds' index is out of range, of those that are one number there."""
    forms, found = Forms(chain, signs, {}, beyond=chain.length is None and not chain.starts_within), dict[Value, float]()
    for x in chain.body:
        if chain.index in x.dims:
            try:
                value = number(forms.of(x))
            except Unproved:
                continue
            if value is not None:
                found[x] = value
    return found


def is_independent(chain: Chain, signs: Mapping[str, float], cell: Carried) -> bool:
    """Whether no result depends on the number that a cell keeps, since all else is relative to it: where the cell is moved
    by x, logarithms of sums are moved by a multiple of x, and what is stored is not."""
    try:
        moved: dict[Value, Degree] = {}
        for inside, made in monoids(chain, signs).items():
            degree: Degree = {(): 1.0} if inside is cell.inside else {}
            for other, (power, by) in made.weights.items():
                if (power if other is cell.inside else by[0]) and moved[other]:
                    raise Unproved(inside)
                degree = _added(degree, moved[other], by if other is cell.inside else (float(power), ()), -1.0)
            moved[inside] = degree
        after = {c.after: moved[c.inside] for c in chain.carried}
        forms = Forms(chain, signs, {x: atom(x) for x in after}, unseen=cell.after if cell.out.op == "max" else None)
        return not any(_moved(store.value, forms.of(store.value), cell.after, after) for store in chain.stores)
    except Unproved:
        return False


#: Numbers by the constants that they are multiplied by.
Degree = dict[tuple[str, ...], float]


def _added(degree: Degree, more: Degree, by: tuple[float, tuple[str, ...]], times: float = 1.0) -> Degree:
    out = dict(degree)
    for names, x in more.items():
        key = tuple(sorted(names + by[1]))
        out[key] = out.get(key, 0.0) + times * x * by[0]
    return {key: x for key, x in out.items() if x}


def _moved(x: Value, f: Form, cell: Value, after: dict[Value, Degree]) -> Degree:
    """By how much of what a cell is moved by. Raises Unproved for a form that does otherwise than to move."""
    total: Degree = {}
    for m, c in f.items():
        which = linear(m)
        if which is cell or isinstance(which, Logarithm):
            by = after[which.of if isinstance(which, Logarithm) else cell]
            if by and c is None:
                raise Unproved(x)
            total = _added(total, by, c or (1.0, ()))
            continue
        degree: Degree = {}
        for one, power in m[0]:
            if one is cell or isinstance(one, Logarithm):
                raise Unproved(x)
            degree = _added(degree, after[one], (float(power), ()))
        for one, factor in m[1]:
            if one is not cell and after[one]:
                raise Unproved(x)
            degree = _added(degree, after[one], factor)
        if degree:
            raise Unproved(x)
    return total


# --------------------------------------------------------------------------------------------------
# Recurrences: rounds that store the rows of their blocks (`gemmkit.programs.recurrences`). What they do to a cell is a
# monoid, too, if they multiply it by a number and add what no cell is in: then blocks may share them.

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

    def is_block(self, dim: Any) -> bool:
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
        return [x for x in self.needs if x.is_late and x not in done]


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
            ready = [x for x in left if not x.is_late and all(y in self.done for z in [x, *x.late(self.done)] for y in z.needs
                                                              if not y.is_late)]
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
