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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gemmkit.programs.called import EXTENT
from gemmkit.programs.chains.chain import Chain
from gemmkit.programs.trace import Carried, Value

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
