"""What rounds do: whether they commute, and what one changes that is shown nothing. Proved (`monoids`), and tried.

Blocks of which a condition shows nothing are left out, and rounds may go from the last block to the first, where the program
allows it and not where a mapping claims it. The proofs are of real numbers; a few lines of NumPy try the same with drawn
numbers, infinities and rows that have seen nothing, and around every constant of the program: either can refuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from gemmkit.programs import reference
from gemmkit.programs.chains import algebra
from gemmkit.programs.chains.chain import Chain
from gemmkit.programs.chains.monoids import Unproved, monoids, stays, unchanged_by_nothing
from gemmkit.programs.trace import Value
from gemmkit.programs.values import Index

FUNCTIONS = {**algebra.FUNCTIONS, **reference.FUNCTIONS}               # of programs as they are traced, and rewritten

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
            return np.arange(SIZE) + (SIZE * turn if x.data is self.chain.index else 0)
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
        return FUNCTIONS[x.op](*given)


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
        more = [y for y in x.args if y not in seen and not _is_of_places(x)]
        seen.update(more)
        pending += more
    return sorted(found, reverse=True)


def _is_of_places(x: Value) -> bool:
    return x.op == "coordinate" or (bool(x.args) and all(y.op == "const" or _is_of_places(y) for y in x.args)
                                    and any(map(_is_of_places, x.args)))


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
