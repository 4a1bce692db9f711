"""How the cells of two runs of rounds become those of all their rounds, read off a round and tried with numbers.

A tile's rounds are split over blocks (``Mapping(splits=...)``), each of which begins anew and stores its cells. What two
neighbours' cells become follows from what a round does with a cell:

| a round | two shares |
|---|---|
| ``best[:] = max(best, ...)`` | the larger one |
| ``total[:] = total * shrink + ...`` | each times ``shrink``, and the sum |

``shrink`` is computed as in a round, from the share's own cells to the merged ones: in attention exp(best - top), where top
is the larger of both. A rule is right where cells are monoids (`gemmkit.programs.chains.monoids`) and sums begin with 0; and
it is tried: a round's cells for drawn operands, merged in either grouping, against those of the same rounds in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmkit.lang.errors import ConfigError
from gemmkit.programs.chains.chain import Chain
from gemmkit.programs.chains.monoids import Unproved, monoids
from gemmkit.programs.chains.trials import Trial, ignores_hidden, same, trials_of
from gemmkit.programs.lines import refused
from gemmkit.programs.trace import Value

_OF_A_BLOCK = "load", "dot", "rowmax", "rowsum", "transpose", "coordinate", "inside", "carried"


@dataclass(frozen=True)
class Merge:
    """By cells (`Carried.inside`): leaves that stand for the cells of two shares, and what becomes of them."""

    one: dict[Value, Value]
    other: dict[Value, Value]
    result: dict[Value, Value]

    def of(self, one: dict[Value, Value], other: dict[Value, Value]) -> dict[Value, Value]:
        """The merged cells of these."""
        known = self.leaves(one, other)
        return {cell: made_anew(x, known) for cell, x in self.result.items()}

    def leaves(self, one: dict[Value, Any], other: dict[Value, Any]) -> dict[Value, Any]:
        """What the leaves stand for, of two shares' cells."""
        return {held[cell]: given[cell] for held, given in ((self.one, one), (self.other, other)) for cell in held}


def made_anew(x: Value, known: dict[Value, Value]) -> Value:
    """A value with others in place of those in ``known``, which what is made is added to. What does not depend on them stays
    the same value."""
    if x not in known:
        args = tuple(made_anew(y, known) for y in x.args)
        is_same = all(one is other for one, other in zip(args, x.args))
        known[x] = x if is_same else Value(x.op, args, x.dims, x.data, x.name, x.line)
    return known[x]


def merge_of(chain: Chain, signs: dict[str, float]) -> Merge:
    """Of a program as it is traced. Raises ConfigError, with the user's line, for rounds of which no rule is found."""
    merge = _Reader(chain).merge
    hidden = [x for x in chain.body if x.op == "where" and (chain.index in x.args[0].dims or x.args[0].dims == ())]
    if not all(ignores_hidden(chain, x, signs) for x in hidden):
        raise _unsplit(chain, "a share of them that shows a row nothing would change its cells; guard them, as by "
                              "finite(...)")
    if not _is_right(chain, merge, signs):
        raise _unsplit(chain, "what two shares' cells become is not what their rounds in a row make of them")
    try:
        found = monoids(chain, signs)
    except Unproved as error:
        raise _unsplit(chain, f"{error.value!r} makes of a cell what is no sum and no maximum of all rounds in any order",
                       error.value.line) from None
    twice = next((c for c in chain.carried if found[c.inside].kind == "sum" and (c.init.op != "const" or c.init.data)), None)
    if twice is not None:
        raise _unsplit(chain, f"{twice.inside!r} begins with {twice.init.data}, which each share would add", twice.init.line)
    return merge


def _unsplit(chain: Chain, why: str, line: str = "") -> ConfigError:
    said = f"Mapping(splits=...): the rounds of {chain.index} cannot be split: {why}"
    return refused(ConfigError, said, line or chain.line)


class _Reader:
    def __init__(self, chain: Chain):
        self.chain = chain
        self.cells = {c.out: c.inside for c in chain.carried}
        for c in chain.carried:
            if c.init.op != "const":
                raise _unsplit(chain, f"{c.inside!r} begins as a block of an array, which only the first share has")
        self.one, self.other = ({c.inside: Value("share", (), c.init.dims, side, c.inside.name, c.inside.line)
                                 for c in chain.carried} for side in (0, 1))
        self.result: dict[Value, Value] = {}
        self._pending: set[Value] = set()
        self._known: dict[tuple[int, Value], Value] = {}               # factors, by the share
        for c in chain.carried:
            self.merged(c.inside)
        self.merge = Merge(self.one, self.other, self.result)

    def merged(self, cell: Value) -> Value:
        if cell not in self.result:
            if cell in self._pending:
                raise _unsplit(self.chain, f"what becomes of {cell!r} depends on itself")
            self._pending.add(cell)
            c = next(c for c in self.chain.carried if c.inside is cell)
            self.result[cell] = self._made(c.out, cell, c.init.dims)
        return self.result[cell]

    def _made(self, out: Value, cell: Value, dims: tuple) -> Value:
        one, other = self.one[cell], self.other[cell]
        if out.op == "max" and cell in out.args:
            return Value("max", (one, other), dims, None, cell.name, cell.line)
        if out.op == "neg" and out.args[0].op == "max" and any(
                y.op == "neg" and y.args[0] is cell for y in out.args[0].args):
            minus = tuple(Value("neg", (y,), dims, None, "", cell.line) for y in (one, other))     # the least: -max(-x, -y)
            return Value("neg", (Value("max", minus, dims, None, "", cell.line),), dims, None, cell.name, cell.line)
        factor = self._factor(out, cell)
        parts = [x if factor is None else Value("mul", (x, self._moved(factor, held)), dims, None, "", cell.line)
                 for x, held in ((one, self.one), (other, self.other))]
        return Value("add", tuple(parts), dims, None, cell.name, cell.line)

    def _has(self, x: Value, cell: Value) -> bool:
        return x is cell or (x not in self.cells and any(self._has(y, cell) for y in x.args))

    def _factor(self, x: Value, cell: Value) -> Value | None:
        """What x has of the cell, as a factor: x = factor * cell + what a round adds. None is 1."""
        if x is cell:
            return None
        having = [y for y in x.args if self._has(y, cell)]
        if len(having) == 1:
            (y,) = having
            if x.op == "add" or (x.op == "sub" and y is x.args[0]) or (x.op == "dot" and x.args[2:] == (y,)):
                return self._factor(y, cell)
            if x.op == "mul" or (x.op == "div" and y is x.args[0]):
                by = next(z for z in x.args if z is not y)
                if x.op == "div":
                    by = Value("div", (Value("const", (), by.dims, 1.0, "", x.line), by), by.dims, None, "", x.line)
                inner = self._factor(y, cell)
                return by if inner is None else Value("mul", (inner, by), by.dims, None, "", x.line)
        raise _unsplit(self.chain, f"{cell!r} becomes neither the largest of itself and what a round finds, nor itself "
                                   "times a factor and what a round adds", x.line)

    def _moved(self, x: Value, held: dict[Value, Value]) -> Value:
        """A factor from a share's own cells to the merged ones."""
        if x in held:
            return held[x]
        if x in self.cells:
            return self.merged(self.cells[x])
        if x.op in _OF_A_BLOCK:
            raise _unsplit(self.chain, f"a cell is multiplied by what depends on a round's own block ({x!r})", x.line)
        key = id(held), x
        if key not in self._known:
            args = tuple(self._moved(y, held) for y in x.args)
            self._known[key] = Value(x.op, args, x.dims, x.data, x.name, x.line) if args else x
        return self._known[key]


# -- tried ----------------------------------------------------------------------------------------------------------------

def _is_right(chain: Chain, merge: Merge, signs: dict[str, float]) -> bool:
    with np.errstate(all="ignore"):
        for trial in trials_of(chain, signs):
            begin = trial.begin()
            a, b, c = (trial.round(begin, turn) for turn in range(3))
            ab, bc = trial.round(a, 1), trial.round(b, 2)
            abc = trial.round(ab, 2)
            tries = [(a, b, ab), (a, bc, abc), (ab, c, abc), (a, begin, a)]      # the last share may have no rounds
            if chain.length is not None:
                tries.append((begin, begin, begin))
            if not all(same(expected, _computed(trial, merge, x, y)) for x, y, expected in tries):
                return False
    return True


def _computed(trial: Trial, merge: Merge, one: dict[Value, Any], other: dict[Value, Any]) -> dict[Value, Any]:
    known = merge.leaves(one, other)
    return {cell: trial.value(x, known) for cell, x in merge.result.items()}
