"""Equal expressions that cost less, in rounds: scales through maxima, fused multiply-adds, products that are added to.

| written | computed | instead of |
|---|---|---|
| exp(scale s - top) | exp2(fma(s, scale log2 e, -top log2 e)), `LOWERED` | two operations an element more |
| max over a row of scale s, scale > 0 | scale (max over a row of s) | a multiplication an element |
| x + a @ b | the product on top of x | an addition an element |
| a @ b - c, c by rows or columns | the product on top of -c | an operation an element |
| exp(scale a @ b - c), c by columns | exp2(scale log2 e (a @ b on top of -c / scale)), `LOWERED` | a register a column |
| a sum of rows, carried | each thread's own part of it (`keep_parts`) | two exchanges a round |

Such an fma's product is exact, and what it subtracts is rounded: the largest exponent of scores of 1e9 is a rounding error
of 64. So it keeps what it was written as, (scale s - top) log2 e, and a warp that has a row with large numbers computes
that (`gemmkit.programs.chains.text`). Every other difference in an exponent is computed as it is written, not fused.

Beyond the end of an array stand zeros, as TMA fills up, and behind a length what the array has there; `guard` sees to it
that what folds over a row finds its identity there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from gemmkit.programs import trace
from gemmkit.programs.called import CALLED, TEST, Callee, is_place_made
from gemmkit.programs.chains.chain import BELOW, LOWERED, READ, Chain, loaded, why_not_ahead
from gemmkit.programs.chains.monoids import Unproved, beyond, monoids, stays, unchanged_by_nothing
from gemmkit.programs.collectives import LARGE
from gemmkit.programs.places import LEAVES, Rewriter, _is_number
from gemmkit.programs.trace import CONDITIONS, Carried, StoreStatement, Value
from gemmkit.programs.values import Index, joined

LOG2E = math.log2(math.e)
#: What a fold over a row begins with.
IDENTITY = {"rowmax": -math.inf, "rowsum": 0.0}
FUNCTIONS: dict[str, Callable[..., Any]] = dict(
    add=np.add, sub=np.subtract, mul=np.multiply, neg=np.negative, exp2=np.exp2, log2=np.log2, max=np.maximum, tanh=np.tanh,
    sqrt=np.sqrt, finite=lambda x: np.where(x == -np.inf, 0.0, x), fma=lambda x, a, b: x * a + b,
    reciprocal=lambda x: 1 / x, cast=lambda x: x, difference=np.subtract,
    lowered=lambda s, factor, shift, *_: s * factor + shift)


def number(x: float) -> Value:
    return Value("const", data=x, line="")


class ChainRewriter(Rewriter):
    """``signs``: of the scalars' names, the numbers that a plan is made for: what depends on them is their sign."""

    def __init__(self, chain: Chain, signs: dict[str, float]):
        super().__init__()
        self.rows, self.signs = chain.rows, signs
        self.cells = {x: cell for cell in chain.carried for x in (cell.inside, cell.after)}

    def of(self, x: Value) -> Value:
        new = super().of(x)
        if x.name and not new.name and new.op not in LEAVES:
            new.name = x.name
        return new

    def number(self, x: float) -> Value:
        return self._leaf(number(x))

    def make(self, op: str, *args: Value, near: Value) -> Value:
        """An element-wise operation of the widest dimensions."""
        return self.build(op, args, Value("", (), joined(op, [x.dims for x in args]), None, "", near.line))

    def is_positive(self, x: Value) -> bool:
        if x.dims:
            return False
        if x.op == "mul":
            return all(map(self.is_positive, x.args))
        return (x.op == "const" and x.data > 0) or (x.op == "scalar" and self.signs.get(x.data, 0.0) > 0)

    def _of_exp(self, like: Value, x: Value) -> Value:
        return self.make("exp2", self.exponent(x, self.number(LOG2E)), near=like)

    def exponent(self, x: Value, by: Value) -> Value:
        """x times a number, as an exponent: its differences leave no rounding error where large numbers cancel."""
        make = self.make
        if _is_of_places(x):
            return make("mul", x, by, near=x)
        if x.op == "neg":
            return self.exponent(x.args[0], make("neg", by, near=x))
        if x.op == "mul" and not x.args[1].dims:
            return self.exponent(x.args[0], make("mul", x.args[1], by, near=x))
        if x.op == "fma" and (self.rows in x.args[2].dims or _is_subtracted(x.args[2])) and len(x.args[2].dims) < 2:
            s, scale, shift = x.args
            if scale.dims:
                s, scale = make("mul", s, scale, near=x), self.number(1.0)
            return self.difference(s, scale, make("neg", shift, near=x), by, x)
        if x.op == "sub" and min(len(y.dims) for y in x.args) < 2:
            s, top = x.args
            if len(s.dims) < len(top.dims):
                s, top, by = top, s, make("neg", by, near=x)
            s, scale = s.args if s.op == "mul" and not s.args[1].dims else (s, self.number(1.0))
            return self.difference(s, scale, top, by, x)
        if x.op in ("add", "finite", "max", "where"):
            one = self.number(1.0)
            x = self.build(x.op, tuple(y if y.op in CONDITIONS else self.exponent(y, one) for y in x.args), x)
        return make("mul", x, by, near=x)

    def difference(self, s: Value, scale: Value, top: Value, by: Value, like: Value) -> Value:
        """(scale s - top) by; top has no more dimensions than s."""
        make = self.make
        minus, exact = make("neg", top, near=like), make("difference", make("mul", s, scale, near=like), top, near=like)
        factor, shift = make("mul", scale, by, near=like), make("mul", minus, by, near=like)
        if by.op == "const" and self.bound(top) * abs(by.data) <= LARGE:
            return make("fma", s, factor, shift, near=like)
        if not (_has_line(s) and _has_line(shift)) or top.dims != (self.rows,) or len(s.dims) < len(top.dims):
            return make("mul", exact, by, near=like)
        return make(LOWERED, s, factor, shift, exact, by, near=like)

    def bound(self, x: Value, within: tuple[Value, ...] = (), grows: bool = False) -> float:
        """The size of what a value is where it is finite; infinity where no bound is seen. ``within``: cells whose bound is
        being looked for, which no maximum of them exceeds; ``grows``: a product of them may."""
        if x.op == "const":
            return 0.0 if x.data == -math.inf else abs(x.data)
        if x in within:
            return math.inf if grows else 0.0
        if x in self.cells:
            cell = self.cells[x]
            return max(self.bound(y, (*within, x), grows) for y in (cell.init, cell.out))
        if x.op == "mul" and "const" in (x.args[0].op, x.args[1].op):
            return self.bound(x.args[0], within, True) * self.bound(x.args[1], within, True)
        if x.op in ("abs", "finite", "inside", "max", "neg", "rowmax", "where"):
            return max(self.bound(y, within, grows) for y in x.args[x.op == "where":])
        return 1.0 if x.op in ("tanh", "erf") else math.inf

    def _of_mul(self, like: Value, x: Value, y: Value) -> Value | None:
        if _rank(x) < _rank(y):
            return self.build("mul", (y, x), like)
        if x.op == y.op == "const" and not x.dims:
            return self.number(x.data * y.data)
        if y.op == "const" and y.data == 1:
            return x
        if y.dims or x.op in LEAVES:
            return None
        make = self.make
        if x.op == "neg" and y.op == "const":
            return make("mul", x.args[0], self.number(-y.data), near=like)
        if x.op == "mul" and not x.args[1].dims:
            return make("mul", x.args[0], make("mul", x.args[1], y, near=like), near=like)
        if x.op == "fma" and not x.args[1].dims and self.may_distribute(x):
            factor, shift = (make("mul", part, y, near=like) for part in x.args[1:])
            return make("fma", x.args[0], factor, shift, near=like)
        if x.op == "sub" and x.dims and (not x.args[1].dims or (_is_of_places(x) and len(x.args[1].dims) < 2)):
            return make("sub", make("mul", x.args[0], y, near=like), make("mul", x.args[1], y, near=like), near=like)
        return None

    def may_distribute(self, x: Value) -> bool:
        """Whether a factor of a sum goes to both of its parts: not where a number of rows may cancel what it is added to."""
        shift = x.args[2]
        return _is_of_places(x) or not shift.dims or (
            len(shift.dims) < len(x.dims) and self.rows not in shift.dims and not _is_subtracted(shift))

    def _of_neg(self, like: Value, x: Value) -> Value | None:
        if x.op == "neg":
            return x.args[0]
        if x.op == "mul" and _is_number(x.args[1]):
            return self.make("mul", x.args[0], self.number(-x.args[1].data), near=like)
        return self.number(-x.data) if _is_number(x) else None

    def _of_sub(self, like: Value, x: Value, y: Value) -> Value | None:
        if x.op == "mul" and x.dims and not _is_place(x):
            return self.build("fma", (*x.args, self.make("neg", y, near=like)), like)
        return None

    def _of_add(self, like: Value, x: Value, y: Value) -> Value | None:
        if x.op == "dot":
            x, y = y, x
        is_computed = x.op == "carried" or x.op not in LEAVES             # a matrix's element has no register before a sum
        if y.op == "dot" and len(y.args) == 2 and x.dims == y.dims and x.op != "dot" and is_computed:
            return self.build("dot", (*y.args, x), y)
        for one, other in ((x, y), (y, x)):
            if one.op == "mul" and one.dims and not _is_place(one) and len(other.dims) <= len(one.dims):
                return self.build("fma", (*one.args, other), like)
        return None

    def _of_rowmax(self, like: Value, x: Value) -> Value | None:
        if x.op == "mul" and self.is_positive(x.args[1]):
            return self.make("mul", self.build("rowmax", (x.args[0],), like), x.args[1], near=like)
        return None

    def _of_where(self, like: Value, c: Value, x: Value, y: Value) -> Value | None:
        if x.op == "mul" and self.is_positive(x.args[1]) and y.op == "const" and y.data in (0.0, math.inf, -math.inf):
            return self.make("mul", self.build("where", (c, x.args[0], y), like), x.args[1], near=like)
        return None


def _rank(x: Value) -> tuple[int, bool]:
    return len(x.dims), x.op != "const"


def _has_line(x: Value) -> bool:
    """Whether a text computes a value where it is first needed, and has a name for it: elements of arrays, numbers and whole
    numbers made of places are written where they are used. Two signs cancel, and a factor of 1 is left out, so that what an
    exponent is shifted by may be such an element."""
    return x.op not in ("load", "const", "scalar") and not is_place_made(x)


def _is_subtracted(shift: Value) -> bool:
    """Whether what is added has the sign of what was subtracted."""
    return shift.op == "neg" or (shift.op == "mul" and _is_number(shift.args[1]) and shift.args[1].data < 0)


def _is_of_places(x: Value) -> bool:
    """Places, times numbers."""
    return x.op == "coordinate" or (bool(x.args) and all(y.op in ("const", "scalar") or _is_of_places(y) for y in x.args)
                                    and any(y.dims for y in x.args))


def _is_place(x: Value) -> bool:
    """Whole numbers, which have no fused multiply-add."""
    return x.op == "coordinate" or (bool(x.args) and all(y.op == "const" or _is_place(y) for y in x.args))


def rewrite(chain: Chain, signs: dict[str, float]) -> None:
    again = ChainRewriter(chain, signs)
    for carried in chain.carried:
        name, carried.out = carried.out.name, again.of(carried.out)
        carried.out.name = carried.out.name or name
    chain.body = in_order([carried.out for carried in chain.carried])
    again = ChainRewriter(chain, signs)
    roots = [again.of(store.value) for store in chain.stores]
    chain.stores = [StoreStatement(store.parameter, store.key, root, store.only, store.line)
                    for store, root in zip(chain.stores, roots)]
    chain.end = in_order(roots)


def settle(chain: Chain) -> None:
    """Exponents of rows alone are differences, unless exponents of elements have the shift anyway."""
    for values in (chain.body, chain.end):
        shifts = {x.args[2] for x in values if x.op == LOWERED and len(x.dims) == 2}
        known = {x: as_written(x) for x in values if x.op == LOWERED and x.args[2] not in shifts}
        for x in values:
            x.args = tuple(known.get(y, y) for y in x.args)
    chain.body = in_order([carried.out for carried in chain.carried])
    chain.end = in_order([store.value for store in chain.stores])


def as_written(x: Value) -> Value:
    """An exponent as the difference that it was."""
    return Value("mul", x.args[3:], x.dims, None, x.name, x.line) if x.op == LOWERED else x


def in_order(roots: list[Value]) -> list[Value]:
    """What they are made of, operands first; leaves are not computed, and a transpose is its product's."""
    out: dict[Value, None] = {}

    def visit(x: Value) -> None:
        if x not in out and x.op not in LEAVES:
            for y in x.args:
                visit(y)
            out[x] = None

    for root in roots:
        visit(root)
    return [x for x in out if x.op != "transpose"]


# -- what products begin at -------------------------------------------------------------------------------------------------

def begin_below(chain: Chain) -> None:
    """Products begin at what is subtracted from them, which takes no registers beside theirs, and no operation. With heads
    of 128 gradients of keys take rounds of 64 queries in place of 32, and 0.63 of the time, those of queries 0.94 (H100).
    Not where products run a round ahead: there the loads would be waited for.

    The shift of an exponent is divided by the factor. A large one is not: its rounding would show, and what is divided by
    nearly 0 is infinite. Then the product begins at 0, and the exponent is computed as it was written. Shifts of rows have
    registers, and stay what an fma adds."""
    if why_not_ahead(chain) is None:
        return
    users: dict[Value, list[Value]] = {}
    for x in chain.body:
        for y in x.args:
            users.setdefault(y, []).append(x)

    def begin(d: Value, of: Value, *below: Value) -> Value | None:
        """The product, if it is another value's alone, on top of what it begins at."""
        if d.op != "dot" or len(d.args) > 2 or users[d] != [of]:
            return None
        return Value("dot", (*d.args, Value(BELOW, below, d.dims, None, "", d.line)), d.dims, d.data, d.name, d.line)

    def minus(c: Value, line: str) -> Value:
        return Value("neg", (c,), c.dims, None, "", line)

    for x in [x for x in chain.body if x in users and len(x.dims) == 2]:
        new = None
        if x.op == "sub" and (_is_by(chain.rows, x.args[1]) or _is_by(chain.index, x.args[1])):
            d, c = x.args
            new = begin(d, x, _loaded_early(minus(c, x.line), chain, "minus"))
        elif x.op == "mul" and not x.args[1].dims and x.args[0].op == "difference" and _is_by(
                chain.index, x.args[0].args[1]):
            exact, by = x.args
            s, c = exact.args
            s, scale, of = (*s.args, s) if s.op == "mul" and not s.args[1].dims else (s, number(1.0), exact)
            d, hidden = s, of
            while users[d] == [hidden] and _hides(d):
                d, hidden = d.args[0] if d.op == "inside" else d.args[1], d
            factor = Value("mul", (scale, by), (), None, "", x.line)
            shift = _loaded_early(Value("mul", (minus(c, x.line), by), c.dims, None, "", x.line), chain, "less")
            on_top = begin(d, hidden, shift, factor)
            if on_top is not None:
                hidden.args = tuple(on_top if y is d else y for y in hidden.args)
                new = Value(LOWERED, (on_top if s is d else s, factor, shift, exact, by), x.dims, None, x.name, x.line)
        if new is not None:
            for user in users[x]:
                user.args = tuple(new if y is x else y for y in user.args)
    chain.body = in_order([carried.out for carried in chain.carried])


def _loaded_early(x: Value, chain: Chain, name: str) -> Value:
    return x if x.dims == (chain.rows,) else Value(READ, (x,), x.dims, None, name, x.line)


def _hides(x: Value) -> bool:
    """Whether a value is another one, or nothing: the exponential of minus infinity."""
    return x.op == "inside" or (x.op == "where" and x.args[2].op == "const" and x.args[2].data == -math.inf)


def _is_by(index: Index, x: Value) -> bool:
    """Whether a value is made of arrays that have one element for each place along an index."""
    if x.op == "load":
        return x.dims == (index,) and np.dtype(x.data[0].dtype).kind == "f"
    return x.dims == (index,) and x.op in FUNCTIONS and all(not y.dims or _is_by(index, y) for y in x.args)


# -- beyond the end ---------------------------------------------------------------------------------------------------------

def guard(chain: Chain, signs: dict[str, float]) -> None:
    """Before what folds over a block's elements, and before a block that a product sums over: the identity in place of what
    is out of range, if it is not there anyway. As early as it is needed, so that one does for all (exp of -inf is 0)."""
    _read_by_threads(chain)
    _own_maxima(chain)
    while True:
        found = beyond(chain, signs)                    # behind a length arrays have anything, and zeros beyond their ends
        bad = next((w for x in chain.body if (w := _wanted(x, chain)) is not None
                    and w[0].op not in LEAVES and found.get(w[0]) != w[1]), None)
        if bad is None:
            return
        old, identity = bad
        new = Value("inside", (old, number(identity)), old.dims, chain.index, old.name, old.line)
        for x in chain.body:
            x.args = tuple(new if y is old else y for y in x.args)
        chain.body.insert(chain.body.index(old) + 1, new)


def _wanted(x: Value, chain: Chain) -> tuple[Value, float] | None:
    """Which operand an operation wants to be what where it is out of range."""
    if x.op in IDENTITY and x.args[0].dims[1] is chain.index:
        return x.args[0], IDENTITY[x.op]
    if x.op == "dot" and loaded(x.args[0]) is None and x.args[0].dims[1] is chain.index:
        return x.args[0], 0.0                          # B is filled up with zeros; A must not have infinities and NaN there
    return None


def _read_by_threads(chain: Chain) -> None:
    """A block of an array that is folded, or rounded for a product, as it is: threads have it in registers."""
    for x in [x for x in chain.body if _wanted(x, chain) is not None]:
        old, casts = x.args[0], list[Value]()
        while old.op == "cast":
            casts.append(old)
            old = old.args[0]
        if old.op == "load" and (casts or x.op != "dot"):
            new = Value("mul", (old, number(1.0)), old.dims, None, old.name, x.line)
            chain.body.insert(chain.body.index(casts[-1] if casts else x), new)
            if casts:
                casts[-1].args = (new,)
            else:
                x.args = (new, *x.args[1:])


def _own_maxima(chain: Chain) -> None:
    """A maximum of what is added up or multiplied, too, has a copy of it: it wants -inf beyond the end, and the others 0."""
    def uncast(x: Value) -> Value:
        return uncast(x.args[0]) if x.op == "cast" else x

    wanted = [(x, *w) for x in chain.body if (w := _wanted(x, chain)) is not None]
    for x, old, identity in wanted:
        others = [other for _, value, other in wanted if uncast(value) is uncast(old) and other != identity]
        if identity and others and old.op not in LEAVES:
            new = Value("mul", (old, number(1.0)), old.dims, None, "", x.line)
            chain.body.insert(chain.body.index(old) + 1, new)
            x.args = (new,)


# -- sums that threads have parts of --------------------------------------------------------------------------------------

def keep_parts(chain: Chain) -> None:
    """A row's sum is linear: cells of sums stay each thread's own, and lanes meet once, where another operation needs it."""
    own = {c.inside for c in chain.carried if c.init.op == "const" and c.init.data == 0 and len(c.init.dims) == 1}
    while True:
        parts = set(own)
        for x in chain.body:
            if x.op == "rowsum" or _stays_a_part(x, parts):
                parts.add(x)
        keep = {c.inside for c in chain.carried if c.inside in own and c.out in parts}
        if keep == own:
            break
        own = keep
    after = {c.after for c in chain.carried if c.inside in own}
    _met(chain.body, parts, chain.carried)
    _met(chain.end, after | {x for x in chain.end if x.op == "rowsum"}, [])
    for n, store in enumerate(chain.stores):
        if store.value in after or store.value.op == "rowsum":
            whole = Value("whole", (store.value,), store.value.dims, None, "", store.line)
            chain.end.append(whole)
            chain.stores[n] = StoreStatement(store.parameter, store.key, whole, store.only, store.line)


def _stays_a_part(x: Value, parts: set[Value]) -> bool:
    """Sums of parts, and parts times what is no part, of rows."""
    if len(x.dims) != 1:
        return False
    if x.op == "mul":
        return (x.args[0] in parts) != (x.args[1] in parts)
    if x.op == "fma":
        return (x.args[0] in parts) != (x.args[1] in parts) and x.args[2] in parts
    return x.op in ("add", "sub") and all(y in parts for y in x.args)


def _met(values: list[Value], parts: set[Value], carried: list[Carried]) -> None:
    made: dict[Value, Value] = {}
    outs = {c.out for c in carried if c.inside not in parts}

    def whole(y: Value, at: int) -> Value:
        if y not in made:
            made[y] = Value("whole", (y,), y.dims, None, f"{y.name}_whole" if y.name else "", y.line)
            values.insert(at, made[y])
        return made[y]

    for x in list(values):
        if x not in parts and x.op != "whole":
            x.args = tuple(whole(y, values.index(x)) if y in parts else y for y in x.args)
    for c in carried:
        if c.out in outs and c.out in parts:
            c.out = whole(c.out, values.index(c.out) + 1)


# --------------------------------------------------------------------------------------------------
# What rounds do: whether they commute, and what one changes that is shown nothing. Proved (`monoids`), and tried.
#
# Blocks of which a condition shows nothing are left out, and rounds may go from the last block to the first, where the
# program allows it and not where a mapping claims it. The proofs are of real numbers; a few lines of NumPy try the same
# with drawn numbers, infinities and rows that have seen nothing, and around every constant of the program: either can
# refuse.

TRIAL_FUNCTIONS = {**FUNCTIONS, **trace.FUNCTIONS}               # of programs as they are traced, and rewritten


def unknown(x: Value, given: list[Any]) -> Any:
    """What stands for a called function, of which nothing is known: its arguments decide, and infinities are numbers."""
    made = sum((n + 1.7) * np.tanh(np.asarray(one, np.float64) / 3) for n, one in enumerate(given))
    found = np.sin(5.0 * made + len(repr(x.data)))
    return found > 0 if x.op == TEST else found


SIZE = 4                               # of a block, or of a whole axis
CLOSE = 1e-8
EVERYTHING: Mapping[Value, Any] = MappingProxyType({})    # is shown
#: Of drawn numbers: small ones would not show what a maximum with 1 does. And of a constant, what is around it.
SCALES = (0.3,), (2.0,), (8.0,)
AROUND = 0.5, 0.99, 1.0, 1.01, 2.0, 30.0
MOST_CONSTANTS = 6                     # that numbers are drawn around
NUMBER = 0.7                           # the size of a run-time number


class Trial:
    """A round's values for drawn operands, of some ``scales``; ``shown``: what conditions are in place of what they would
    be. A number that is not known to be positive is negative with ``negative``."""

    def __init__(self, chain: Chain, signs: dict[str, float], scales: tuple[float, ...], negative: bool):
        self.chain, self.signs, self.scales, self.negative = chain, signs, scales, negative
        self.rng = np.random.default_rng(1)
        self.drawn: dict[Any, np.ndarray] = {}

    def draw(self, key: Any, dims: tuple) -> np.ndarray:
        if key not in self.drawn:
            shape = [SIZE] * len(dims)
            self.drawn[key] = self.rng.standard_normal(shape) * self.rng.choice(self.scales, shape)
        return self.drawn[key]

    def begin(self) -> dict[Value, Any]:
        return {c.inside: self.leaf(c.init, 0) for c in self.chain.carried}

    def leaf(self, x: Value, turn: int) -> Any:
        if x.op == "const":
            return np.full([SIZE] * len(x.dims), x.data)
        if x.op == "scalar":
            return -NUMBER if self.negative and not self.signs.get(x.data, 1.0) > 0 else NUMBER
        if x.op == "coordinate":
            return np.arange(SIZE) + (SIZE * turn if x.data is self.chain.index else 0) if x.dims else 1
        if x.op == "load":
            parameter, key = x.data
            return self.draw((parameter.name, *map(id, key), turn if self.chain.index in key else 0), x.dims)
        return self.draw(x, x.dims)

    def round(self, state: dict[Value, Any], turn: int, shown: Mapping[Value, Any] = EVERYTHING) -> dict[Value, Any]:
        """The cells behind a round."""
        known = dict(state)
        return {c.inside: self.value(c.out, known, turn, shown) for c in self.chain.carried}

    def value(self, x: Value, known: dict[Value, Any], turn: int = 0, shown: Mapping[Value, Any] = EVERYTHING) -> Any:
        """A value, of what is ``known``, which it is added to."""
        if x not in known:
            args = [self.value(y, known, turn, shown) for y in x.args]
            known[x] = self.operation(x, args, shown) if x.args else self.leaf(x, turn)
        return known[x]

    def of(self, chain: Chain) -> Trial:
        """Of other rounds, with the same operands."""
        other = Trial(chain, self.signs, self.scales, self.negative)
        other.drawn, other.rng = self.drawn, self.rng
        return other

    def operation(self, x: Value, args: list[Any], shown: Mapping[Value, Any]) -> Any:
        if x.op == "dot":
            return args[0] @ args[1] + (_over(x.args[2], args[2], x.dims) if len(args) > 2 else 0.0)
        if x.op == "transpose":
            return args[0].T
        if x.op in ("rowmax", "rowsum"):
            return getattr(np, x.op[3:])(_spread(args[0], x.args[0], x.args[0].dims), axis=1)
        if x.op == "cast":
            return args[0]
        if x.op == "inside":                           # nothing is
            return np.full([SIZE] * len(x.dims), args[1])
        given = [_over(y, a, x.dims) for y, a in zip(x.args, args)]
        if x in shown:
            given[0] = shown[x]
        made = unknown(x, given) if x.op in CALLED else TRIAL_FUNCTIONS[x.op](*given)
        return np.broadcast_to(made, [SIZE] * len(x.dims))         # one of two numbers has no dimensions


def _over(x: Value, array: Any, dims: tuple) -> Any:
    if not x.dims:
        return array
    order = [x.dims.index(d) for d in dims if d in x.dims]
    return np.asarray(array).transpose(order)[tuple(slice(None) if d in x.dims else None for d in dims)]


def _spread(array: Any, x: Value, dims: tuple) -> Any:
    return np.broadcast_to(_over(x, array, dims), [SIZE] * len(dims))


def trials_of(chain: Chain, signs: dict[str, float]) -> Iterator[Trial]:
    """Of numbers of several sizes."""
    for n, scales in enumerate(SCALES):
        yield Trial(chain, signs, scales, n % 2 == 0)


def around_constants(chain: Chain, signs: dict[str, float]) -> Iterator[Trial]:
    """Of numbers around each constant, as elements, and as products of two that are added up."""
    for n, x in enumerate(_constants(chain)[:MOST_CONSTANTS]):
        yield Trial(chain, signs, tuple(x * by for by in AROUND), n % 2 == 0)
        yield Trial(chain, signs, tuple(math.sqrt(x * by / 2) for by in AROUND), n % 2 == 1)


def _constants(chain: Chain) -> list[float]:
    """The sizes of a program's constants that cells or values meet, the largest first: not those of places alone."""
    pending: list[Value] = [x for c in chain.carried for x in (c.out, c.init)]
    seen, found = set(pending), set[float]()
    while pending:
        x = pending.pop()
        if x.op == "const" and x.data and math.isfinite(x.data):
            found.add(abs(float(x.data)))
        more = [y for y in x.args if y not in seen and not _is_of_fixed_places(x)]
        seen.update(more)
        pending += more
    return sorted(found, reverse=True)


def _is_of_fixed_places(x: Value) -> bool:
    return x.op == "coordinate" or (bool(x.args) and all(y.op == "const" or _is_of_fixed_places(y) for y in x.args)
                                    and any(map(_is_of_fixed_places, x.args)))


def same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return all(_are_close(np.asarray(one[key]), np.asarray(other[key])) for key in one)


def _are_close(x: np.ndarray, y: np.ndarray) -> bool:
    """To the largest of them: sums of large numbers may be small."""
    largest = np.abs(x[np.isfinite(x)]).max(initial=1.0)
    return np.allclose(x, y, rtol=CLOSE, atol=CLOSE * float(largest), equal_nan=True)


def mentions(x: Value, index: Index) -> bool:
    """Whether a value depends on the places along an index."""
    return (x.op == "coordinate" and x.data is index) or any(mentions(y, index) for y in x.args)


def commutes(chain: Chain, signs: dict[str, float]) -> bool:
    """Whether two rounds give the same cells in either order, at the beginning and behind another round; and so does one in
    which a condition of places shows nothing, which may be a tile's first in one order alone."""
    try:
        monoids(chain, signs)
    except Unproved:
        return False
    hidden = [{x: np.False_} for x in chain.body if x.op == "where" and mentions(x.args[0], chain.index)]
    with np.errstate(all="ignore"):
        for trial in trials_of(chain, signs):
            for begin in (trial.begin(), trial.round(trial.begin(), 2)):
                for shown in (EVERYTHING, *hidden):
                    forth = trial.round(trial.round(begin, 0, shown), 1)
                    if not same(forth, trial.round(trial.round(begin, 1), 0, shown)):
                        return False
        for trial in around_constants(chain, signs):
            begin = trial.begin()
            if not same(trial.round(trial.round(begin, 0), 1), trial.round(trial.round(begin, 1), 0)):
                return False
    return True


def ignores_hidden(chain: Chain, where: Value, signs: dict[str, float], at_first: bool = True) -> bool:
    """Whether a round in which the condition of a ``where`` holds nowhere leaves the cells as they are: later, and
    ``at_first``, before any round has shown a row anything."""
    if not stays(chain, signs, where, at_first):
        return False
    with np.errstate(all="ignore"):
        for trial in trials_of(chain, signs):
            begin = trial.begin()
            states = [trial.round(begin, 0), *([begin] if at_first else [])]
            if chain.index in where.dims:              # a round that shows a row its first place alone
                first = np.arange(SIZE) == 0
                states.append(trial.round(begin, 0, {where: first if where.dims[-1] is chain.index else first[:, None]}))
            if not all(same(state, trial.round(state, 1, {where: np.False_})) for state in states):
                return False
    return True


def changed_by_nothing(chain: Chain, signs: dict[str, float]) -> list[Value]:
    """The cells (as a round begins) that a tile's first round changes if all of its places are out of range. ``chain`` is
    guarded: what is out of range is a fold's identity."""
    kept = unchanged_by_nothing(chain, signs)
    found = {c.inside: None for c in chain.carried if c.inside not in kept}
    with np.errstate(all="ignore"):
        for trial in trials_of(chain, signs):
            begin = trial.begin()
            after = trial.round(begin, 0)
            found.update((cell, None) for cell in begin if not same({cell: begin[cell]}, {cell: after[cell]}))
    return list(found)


# --------------------------------------------------------------------------------------------------
# Which blocks a tile's rounds visit, and which of these need no test: read off the conditions of ``where``.
#
# A condition that is made of comparisons linear in an element's row and in its place along the rounds (``n <= m``, ``(m -
# n < 128) & (n <= m)``) bounds that place by the row. Blocks outside the bounds of all rows are not visited, where the
# program ignores what is hidden (`trials`); in blocks inside the bounds of every row nothing is tested. Of another
# condition every block is visited and tested.

@dataclass(frozen=True)
class Bound:
    """slope * row + shift: the first place that a row sees, or the one behind the last."""

    slope: int
    shift: int

    def text(self, row: str) -> str:
        scaled = "" if self.slope == 0 else row if self.slope == 1 else f"{self.slope} * ({row})"
        sign = "-" if self.shift < 0 else "+"
        if not scaled:
            return str(self.shift)
        return f"{scaled} {sign} {abs(self.shift)}" if self.shift else scaled


@dataclass(frozen=True)
class MaskBound:
    """The first place, or the one behind the last, that a mask says rows see."""

    callee: Callee
    is_end: bool
    shift: int = 0

    @property
    def slope(self) -> int:
        """Whether it grows with the row, as far as is seen: the order of tiles alone rests on it."""
        return int(self.callee.f.has_end if self.is_end else self.callee.f.has_first)


@dataclass
class Ranges:
    """``ends`` and ``begins``: bounds of places that rows see; ``visits_less``: blocks outside are left out. ``has_tests``:
    there are conditions; ``has_free``: all of them are bounds."""

    has_tests: bool = False
    has_free: bool = True
    visits_less: bool = False
    ends: list[Bound | MaskBound] = field(default_factory=list)
    begins: list[Bound | MaskBound] = field(default_factory=list)

    @property
    def masks(self) -> list[Callee]:
        return [*dict.fromkeys(bound.callee for bound in (*self.begins, *self.ends) if isinstance(bound, MaskBound))]

    @property
    def show_the_first(self) -> bool:
        """Whether every row sees the first place. Rounds from the first block to the last then show a row something before
        they hide a whole block of it."""
        return not self.begins and all(bound.slope >= 0 and bound.shift > 0 for bound in self.ends)

    @property
    def grow(self) -> bool:
        """Whether later rows visit more blocks than earlier ones."""
        return self.visits_less and any(bound.slope > 0 for bound in self.ends) and not any(b.slope > 0 for b in self.begins)

    @property
    def shrink(self) -> bool:
        """Whether later rows visit fewer blocks, as keys do that only later queries see."""
        return self.visits_less and any(bound.slope > 0 for bound in self.begins) and not any(b.slope > 0 for b in self.ends)

    def visit_all(self, chain: Chain) -> bool:
        """Whether each tile visits all blocks of an axis."""
        is_whole = not chain.has_length and chain.begin == "0" and chain.splits == 1 and chain.piece is None
        return is_whole and not (self.visits_less and (self.begins or self.ends))


def ranges_of(chain: Chain, signs: dict[str, float], commutes: bool) -> Ranges:
    """Of a program as it is traced. ``commutes``: its rounds may go from the last block to the first (`trials`)."""
    out, tests = Ranges(), list[Value]()
    for x in chain.body:
        if x.op == "where" and (chain.index in x.args[0].dims or mentions(x.args[0], chain.index)):
            out.has_tests = True
            bounds = bounds_of(x.args[0], chain.rows, chain.index)
            if bounds is None:
                out.has_free = False
                continue
            tests.append(x)
            out.begins += bounds[0]
            out.ends += bounds[1]
    at_first = commutes or chain.start is not None or not out.show_the_first
    out.visits_less = out.has_tests and out.has_free and all(ignores_hidden(chain, x, signs, at_first) for x in tests)
    return out


Bounds = tuple[list[Bound | MaskBound], list[Bound | MaskBound]]


def bounds_of(x: Value, rows: Index, index: Index) -> Bounds | None:
    """(first places, places behind the last) that hold together; None for what is no such bound."""
    if x.op == TEST and x.data.is_mask and x.args[0].data is rows and x.args[1].data is index:
        mask = x.data.f                                # one without a condition and a first key shows a row all up to an end
        return ([MaskBound(x.data, False)] if mask.has_first or mask.has_visible else [],
                [MaskBound(x.data, True)] if mask.has_end or mask.has_visible else [])
    if x.op == "and":
        parts = [bounds_of(y, rows, index) for y in x.args]
        if any(part is None for part in parts):
            return None
        return [b for part in parts if part for b in part[0]], [b for part in parts if part for b in part[1]]
    if x.op not in ("lt", "le"):
        return None
    forms = [_linear(y, rows, index) for y in x.args]
    if forms[0] is None or forms[1] is None:
        return None
    row, place, shift = (a - b for a, b in zip(*forms))
    shift += x.op == "lt"                              # row * m + place * n + shift <= 0
    if place == 1:
        return [], [Bound(-row, 1 - shift)]
    if place == -1:
        return [Bound(row, shift)], []
    return None


def _linear(x: Value, rows: Index, index: Index) -> tuple[int, int, int] | None:
    """(factor of the row, of the place, constant), all whole."""
    if x.op == "const" and not x.dims and float(x.data).is_integer():
        return 0, 0, int(x.data)
    if x.op == "coordinate":
        return (1, 0, 0) if x.data is rows else (0, 1, 0) if x.data is index else None
    forms = [_linear(y, rows, index) for y in x.args]
    if not forms or any(form is None for form in forms):
        return None
    known = [form for form in forms if form is not None]
    if x.op == "neg":
        return _scaled(known[0], -1)
    if x.op in ("add", "sub"):
        other = _scaled(known[1], 1 if x.op == "add" else -1)
        return known[0][0] + other[0], known[0][1] + other[1], known[0][2] + other[2]
    if x.op == "mul":
        for one, factor in (known, known[::-1]):
            if factor[:2] == (0, 0):
                return _scaled(one, factor[2])
    return None


def _scaled(form: tuple[int, int, int], factor: int) -> tuple[int, int, int]:
    return form[0] * factor, form[1] * factor, form[2] * factor
