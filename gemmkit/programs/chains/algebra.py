"""Equal expressions that cost less, in rounds: scales through maxima, fused multiply-adds, products that are added to.

| written | computed | instead of |
|---|---|---|
| exp(scale s - top) | exp2(fma(s, scale log2 e, -top log2 e)), `LOWERED` | two operations an element more |
| max over a row of scale s, scale > 0 | scale (max over a row of s) | a multiplication an element |
| x + a @ b | the product on top of x | an addition an element |
| a sum of rows, carried | each thread's own part of it (`keep_parts`) | two exchanges a round |

Such an fma's product is exact, and what it subtracts is rounded: the largest exponent of scores of 1e9 is a rounding error
of 64. So it keeps what it was written as, (scale s - top) log2 e, and a warp that has a row with large numbers computes
that (`gemmkit.programs.chains.consumer`). Every other difference in an exponent is computed as it is written, not fused.

Beyond the end of an array stand zeros, as TMA fills up, and behind a length what the array has there; `guard` sees to it
that what folds over a row finds its identity there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.kernels.attention.softmax import LARGE
from gemmkit.programs.algebra import LEAVES, Rewriter, _is_number
from gemmkit.programs.chains.chain import Chain
from gemmkit.programs.chains.monoids import beyond
from gemmkit.programs.interpreter import CONDITIONS
from gemmkit.programs.trace import Carried, Store, Value
from gemmkit.programs.values import joined

LOG2E = math.log2(math.e)
#: An operation: a part of an exponent from which a number of each row is subtracted, of s, a factor and a shift, whose fma
#: it is; and of scale s - top, which it was written as, and what that is multiplied by.
LOWERED = "lowered"
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
                s, scale = Value("mul", (s, scale), x.dims, None, "", x.line), self.number(1.0)
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
        has_name = s.op not in ("load", "const") and not _is_place(s)
        if not has_name or top.dims != (self.rows,) or len(s.dims) < len(top.dims):
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
        if x.op in ("finite", "inside", "max", "neg", "rowmax", "where"):
            return max(self.bound(y, within, grows) for y in x.args[x.op == "where":])
        return 1.0 if x.op == "tanh" else math.inf

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
        if y.op == "dot" and len(y.args) == 2 and x.dims == y.dims and x.op != "dot":
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
    chain.stores = [Store(store.parameter, store.key, root, store.only, store.line)
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


# -- beyond the end ---------------------------------------------------------------------------------------------------------

def guard(chain: Chain, signs: dict[str, float]) -> None:
    """Before what folds over a block's elements, and before a block that a product sums over: the identity in place of what
    is out of range, if it is not there anyway. As early as it is needed, so that one does for all (exp of -inf is 0)."""
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
    if x.op == "dot" and x.args[0].op != "load" and x.args[0].dims[1] is chain.index:
        return x.args[0], 0.0                          # B is filled up with zeros; A must not have infinities and NaN there
    return None


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
            chain.stores[n] = Store(store.parameter, store.key, whole, store.only, store.line)


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
