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

import math
from collections.abc import Callable
from collections.abc import Mapping as Names
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from gemmkit.lang.errors import ConfigError
from gemmkit.programs.called import F32, NUMBER, is_whole_load
from gemmkit.programs.chains.algebra import Trial, as_written, changed_by_nothing, ignores_hidden, in_order, same, trials_of
from gemmkit.programs.chains.chain import (
    ADDED,
    FILLED,
    LOWERED,
    MOST_COLUMNS,
    READ,
    SHARED,
    Added,
    Chain,
    depends,
    dots,
    late_values,
    loaded,
    only_adds,
)
from gemmkit.programs.chains.monoids import Unproved, is_independent, monoids
from gemmkit.programs.collectives import DROP, ROWS, STEP
from gemmkit.programs.launches import spare
from gemmkit.programs.mapping import MOST_SPLITS, KernelLimits, Mapping
from gemmkit.programs.places import walked
from gemmkit.programs.trace import CONDITIONS, Carried, Loop, StoreStatement, Value
from gemmkit.programs.values import Axis, Index, Parameter, ProgramAxis, refused, shown, unique
from gemmkit.runtime.array_info import ArrayInfo

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
            if chain.length is not None or chain.start is not None:
                tries.append((begin, begin, begin))
            if not all(same(expected, _computed(trial, merge, x, y)) for x, y, expected in tries):
                return False
    return True


def _computed(trial: Trial, merge: Merge, one: dict[Value, Any], other: dict[Value, Any]) -> dict[Value, Any]:
    known = merge.leaves(one, other)
    return {cell: trial.value(x, known) for cell, x in merge.result.items()}


# --------------------------------------------------------------------------------------------------
# Lazy rescaling: a running maximum stays as it is while what it scales would shrink by no more than 2^-8.
#
# In attention a round finds the largest score so far, and everything that was added up relative to the old one is
# multiplied by exp(best - top). The reference need not be the largest score: any place near it gives the same quotient.
# So with ``Mapping(lazy=True)`` a row's reference stays until the factor would be below 2^-8, and a warp whose rows all
# have factor 1 leaves the multiplication of its sums out (`gemmkit.programs.collectives.rescales`). Of heads of 128
# these are 64 of a round's 455 instructions. FlashAttention-4 (Zadouri et al., 2026) does so on Blackwell.
#
# | written | computed |
# |---|---|
# | top = max(best, ...) | highest = max(best, ...), drop = the exponent of the factor from best to highest |
# | | top = best if drop >= -8 else highest |
# | shrink = exp(best - top) | 1 if drop >= -8 else 2^drop |
#
# It takes a comparison and a vote a round, and pays where sums are wide: on an H100 heads of 192 take 0.97 to 0.98 of the
# time (with turns), of 256 0.95 to 0.96, and of 128 1.03. So where nothing is said sums of 192 columns or more are
# rescaled lazily.
#
# That results do not depend on the reference is proved (`monoids.is_independent`) and tried: rounds whose references are
# moved by drawn numbers store the same. Weights are 2^8 times as large at most; of float16 only powers that a maximum
# bounds by 1 have room for that.

WIDE = 192                             # columns of sums


def references(chain: Chain, signs: dict[str, float], said: bool | None) -> list[Carried]:
    """Of a program as it is traced: cells that keep a maximum on which results do not depend; none where the mapping says
    so, or says nothing and sums are narrow.

    Raises ConfigError where they are asked for, and there is none.
    """
    is_wide = any(len(c.init.dims) == 2 and isinstance(c.init.dims[1], Axis) and c.init.dims[1].size >= WIDE
                  for c in chain.carried)
    if said is False or not (said or is_wide):
        return []
    maxima = list(filter(_keeps_a_maximum, chain.carried))
    found = [c for c in maxima if _does_not_matter(chain, c, signs)]
    if said and not found:
        why = (f"results depend on the maximum that {maxima[0].inside!r} keeps" if maxima else
               "no cell of rows keeps a maximum, such as best[:] = maximum(best, s.max(axis=1))")
        raise _refused(chain, why)
    return found


def _keeps_a_maximum(c: Carried) -> bool:
    return c.out.op == "max" and c.inside in c.out.args and len(c.out.dims) == 1


def _refused(chain: Chain, why: str, line: str = "") -> ConfigError:
    return refused(ConfigError, f"Mapping(lazy=True): {why}", line or chain.line)


def _does_not_matter(chain: Chain, cell: Carried, signs: dict[str, float]) -> bool:
    """Whether three rounds whose maxima are moved by drawn numbers store what they store otherwise."""
    if not is_independent(chain, signs, cell):
        return False
    by = Value("moved", (), cell.out.dims, None, "", cell.out.line)
    moved = Value("add", (cell.out, by), cell.out.dims, None, "", cell.out.line)
    known = {cell.out: moved}
    other = replace(chain, carried=[replace(c, out=made_anew(c.out, known)) for c in chain.carried])
    with np.errstate(all="ignore"):
        return all(same(_stored(trial), _stored(trial.of(other))) for trial in trials_of(chain, signs))


def _stored(trial: Trial) -> dict[str, Any]:
    """What three rounds store, by the names of results."""
    state = trial.begin()
    for turn in range(3):
        state = trial.round(state, turn)
    known: dict[Value, Any] = {c.after: state[c.inside] for c in trial.chain.carried}
    return {store.parameter.name: trial.value(store.value, known) for store in trial.chain.stores}


# -- the rounds -----------------------------------------------------------------------------------------------------------

def begin_lazily(chain: Chain, cells: list[Carried], said: bool | None) -> None:
    """Change the rounds, behind `gemmkit.programs.chains.algebra`, and name the factors: `Chain.factors`.

    Raises ConfigError where it is asked for, and rounds do not allow it.
    """
    for cell in cells:
        try:
            _check_room(chain)
            _one(chain, cell)
        except ConfigError:
            if said:
                raise


def _one(chain: Chain, cell: Carried) -> None:
    best, highest = cell.inside, cell.out
    rows = {x for x in chain.body if len(x.dims) < 2}
    factors = [x for x in chain.body if x.op == "exp2" and len(x.dims) == 1
               and depends(x, {best}, rows) and depends(x, {highest}, rows)]
    if len(factors) != 1:
        raise _refused(chain, f"{len(factors)} factors of rows go from the old {best!r} to the new one; one is needed, such "
                              "as exp(best - top)", highest.line)
    (shrink,), dims, line = factors, highest.dims, highest.line
    drop = as_written(shrink.args[0])

    def made(op: str, *args: Value, name: str = "") -> Value:
        return Value(op, args, dims, None, name, line)

    stays = made("le", Value("const", (), (), DROP, "", line), drop)
    top = made("where", stays, best, highest, name=highest.name)
    factor = made("where", stays, Value("const", (), (), 1.0, "", line), made("exp2", drop), name=shrink.name)
    known = {highest: top, shrink: factor}
    outs = [made_anew(c.out, known) for c in chain.carried]
    if not any(x.op == "mul" and len(x.dims) == 2 and x.args[1] is factor for x in in_order(outs)):
        raise _refused(chain, f"no sums of a tile are multiplied by {factor!r}, so that nothing is left out", line)
    for c, out in zip(chain.carried, outs):
        c.out = out
    chain.factors = {made_anew(f, known): made_anew(r, known) for f, r in chain.factors.items()}
    for x in rows:                                     # what the exponent alone is made of has no name of the user's
        if depends(drop, {x}, rows) and depends(x, {highest}, rows):
            x.name = ""
    highest.name, drop.name = "highest", "drop"
    chain.body = in_order(outs)
    chain.factors[factor] = top


def _check_room(chain: Chain) -> None:
    """Raises ConfigError for what is handed over in float16 and may exceed it."""
    for dot in dots(chain.body):
        a, b = dot.args[0], loaded(dot.args[1])
        if loaded(a) is not None or b is None or np.dtype(b.data[0].dtype) != np.float16:
            continue
        source = a.args[0] if a.op == "cast" else a
        if source.op != "exp2":
            raise _refused(chain, f"{source!r} is handed over to a product in float16, and may be 2^8 times as large; of "
                                  "bfloat16, or of a power such as exp(s - top), there is room", dot.line)


# --------------------------------------------------------------------------------------------------
# Chained programs whose rounds end at a length of the tile's own (`gemmkit.programs.trace`).
#
# A tile's rounds go to min(length, the axis): producer and consumers read it at the tile's beginning, and blocks behind
# it are not loaded. The last block is loaded as a whole, and holds what the array has there; so `guard` puts the identity
# of what is folded in place of it, in a tile's ragged block alone. A product's right operand is not guarded: its rows
# behind a length meet zeros, and must be finite, as padding is.
#
# | length | rounds | results |
# |---|---|---|
# | more than the axis | all | as without a length |
# | 70, blocks of 64 | 2, of which the last shows 6 places | |
# | 0 or less | 1, which shows none | what the cells begin with: `begun` |
#
# Every tile has a round, since rounds run on across tile ends. Most programs are not changed by one that shows nothing:
# an attention's weights are zeros. Where trials find that a cell is changed, as by exp(-inf - -inf), it begins anew
# behind the loop: ``out = apply(make_out, out, n_length)`` with ``0.0 if n_length < 1 else out``.

LENGTH = "length"


def check_bounded(chain: Chain) -> None:
    """Raises ValueError, with the user's line, for rounds that cannot end within a block. Threads read a left operand that a
    product sums over: behind a length it counts as zeros, and it begins anywhere."""
    index = chain.index
    if chain.length is None and chain.start is None:
        return
    for dot in dots(chain.body):
        a = dot.args[0]
        if a.op == "load" and a.dims[1] is index:
            read = Value("cast", (a,), a.dims, np.dtype(a.data[0].dtype), a.name, dot.line)
            chain.body.insert(chain.body.index(dot), read)
            dot.args = (read, *dot.args[1:])
    for dot in dots(chain.body) if chain.length is not None or chain.starts_within else ():
        a = loaded(dot.args[0])
        if a is not None and dot.args[0].dims[1] is index:
            raise refused(ValueError, f"a product sums over {index}, and takes {a.data[0].name} transposed: behind a length "
                                      "and in front of a start in a page its blocks hold what the array has there. pass the "
                                      "transposed array, x[m, k] @ y[k] (only .reference(...) runs others)", dot.line)
    block = next((c for c in chain.carried if c.init.op == "load"), None)
    if block is not None:
        raise refused(ValueError, f"{block.inside.name} begins as a block of {block.init.data[0].name}, but rounds have a "
                                  "length; the cell must begin with a "
                                  "number, which it keeps if the length is 0", chain.line)


def begun(chain: Chain, signs: dict[str, float]) -> None:
    """Where a length is 0, or a share has no rounds, cells are what they begin with: of those that a round without places
    changes behind the loop."""
    if not chain.has_length:
        return
    changed = set(changed_by_nothing(chain, signs))
    needed = {y for x in chain.end for y in x.args} | {store.value for store in chain.stores}
    is_none = Value("lt", (Value(LENGTH, line=chain.line), Value("const", data=1.0, line="")), line=chain.line)
    for c in chain.carried:
        if c.inside not in changed or c.after not in needed:
            continue
        new = Value("where", (is_none, c.init, c.after), c.after.dims, None, c.after.name, c.after.line)
        for x in chain.end:
            x.args = tuple(new if y is c.after else y for y in x.args)
        chain.stores = [replace(store, value=new) if store.value is c.after else store for store in chain.stores]
        chain.end.insert(0, new)


# --------------------------------------------------------------------------------------------------
# Rounds that are split over blocks, ``Mapping(splits=4)``: each block has a share of a tile's rounds, and stores its
# cells.
#
# A tile of few rows and long rounds, as in decoding, leaves most multiprocessors idle: 8 heads of one sequence are 8
# tiles. With shares they are as many times more. A share's cells are stored in float32, in memory of the stream's; a
# second kernel, a function of rows (`gemmkit.programs.rows`), merges them in the order of the shares by the rule of
# `gemmkit.programs.chains.merging`, and computes what the program stores.
#
# How many shares there are is a size of both kernels, as the number of rows is: one text merges 2 and 132. The second one
# loads 16 shares before it waits for the first (`gemmkit.kernels.collectives.split_k.in_turn`).
#
# A tile's shares are of one length, in blocks, so that the last ones may have no rounds: as behind a length they have one
# that shows nothing.

LEAST = 4                              # rounds of a share at least, where the number is left open and they are many
MERGED = 16                            # shares that the second kernel loads at once
ALIGNED = 256                          # bytes


class Shares(NamedTuple):
    """``merging``: the second kernel's program, with a loop along the shares, by the index ``share``; ``cells``: what the
    rounds' kernel stores, (stack x shares, rows, ...); ``parts``: the same memory as the second kernel reads it, (stack,
    shares, rows, ...); ``widths``: see `memory_of`."""

    merging: Loop
    share: Index
    widths: dict[str, tuple[int, ...]]
    cells: dict[str, ArrayInfo]
    parts: dict[str, ArrayInfo]

    @property
    def stores(self) -> list[StoreStatement]:
        """What the second kernel stores."""
        return [held for held in self.merging.body if isinstance(held, StoreStatement)]

    def held(self, infos: dict[str, ArrayInfo]) -> dict[str, ArrayInfo]:
        """Of a program's arrays and the parts, those that it takes."""
        roots = [*(store.value for store in self.stores), *(c.out for loop in self.merging.loops for c in loop.carried)]
        used = {store.parameter.name for store in self.stores} | {x.data[0].name for x in walked(roots) if x.op == "load"}
        return {key: info for key, info in {**infos, **self.parts}.items() if key in used}


def shares_of(chain: Chain, mapping: Mapping, signs: dict[str, float], processors: int,
              kernel: KernelLimits) -> Shares | None:
    """Split the rounds of a chain, as it is traced: its stores are its cells from here on. None where blocks take all rounds
    of a tile: where the mapping says so, where nothing is said and tiles are enough, or no rule to merge is found.

    Raises ConfigError where splits are asked for that cannot be.
    """
    splits = splits_of(chain, mapping, processors, kernel)
    if splits == 1:
        return None
    if chain.index.stack:
        raise ConfigError(f"Mapping(splits={splits}): {chain.index} goes along a stack, whose matrices are not split")
    if chain.updates:
        raise ConfigError(f"Mapping(splits={splits}): rounds add to {chain.updates[0].parameter.name}, and are not split")
    if chain.piece is not None:
        raise ConfigError(f"Mapping(splits={splits}): rows of {chain.rows} are packed, and their rounds are not split")
    if mapping.longest_first:
        raise ConfigError(f"Mapping(longest_first=True, splits={splits}): shares of a tile are of one length; leave out one")
    try:
        merge = merge_of(chain, signs)
    except ConfigError:
        if mapping.splits:
            raise
        return None
    stores, chain.stores, chain.end, chain.splits = chain.stores, [], [], splits
    widths = dict[str, tuple[int, ...]]()
    for c in chain.carried:
        stem = unique(c.inside.name or "cell", widths)
        widths[stem] = tuple(dim.size for dim in c.init.dims[1:])
    cells, parts = memory_of(widths, chain)
    share = Index(ProgramAxis(next(iter(parts)), len(chain.indices) - 1, splits, stack=True), chain.share)
    for c, (name, info) in zip(chain.carried, cells.items()):
        chain.stores.append(StoreStatement(Parameter(name, info.shape, F32), chain.indices, c.after, None, c.inside.line))
    read = {x.data[0] for x in walked([store.value for store in stores]) if x.op == "load"}
    merging = Loop("parallel", chain.indices, _merged(chain, merge, share, parts, stores), line=chain.line,
                   updated={store.parameter.name: store for store in stores if store.parameter in read})
    return Shares(merging, share, widths, cells, parts)


def memory_of(widths: Names[str, tuple[int, ...]], chain: Chain) -> tuple[dict[str, ArrayInfo], dict[str, ArrayInfo]]:
    """`Shares`' cells and parts, for a chain's sizes. ``widths``: of cells, by what their arrays' names begin with."""
    first, cells, parts = 0, dict[str, ArrayInfo](), dict[str, ArrayInfo]()
    counts = [chain.sizes[stack.extent] for stack in chain.stacks]
    for stem, columns in widths.items():
        shape = (chain.count * chain.splits, chain.sizes[chain.rows.extent], *columns)
        cells[f"{stem}_shares"] = spare(first, shape)
        parts[f"{stem}_parts"] = spare(first, (*counts, chain.splits, *shape[1:]))._replace(readonly=True)
        first += -(-4 * math.prod(shape) // ALIGNED) * ALIGNED
    return cells, parts


def splits_of(chain: Chain, mapping: Mapping, processors: int, kernel: KernelLimits) -> int:
    """How many shares are asked for. If nothing is said, as many as fill the multiprocessors once with the shares of all
    tiles, of `LEAST` rounds or more: on 132, each of 2 heads of 65,536 keys takes 66 shares, one of 8,192 keys takes 16.
    Where there are two of `LEAST` rounds, shares of fewer are taken up to `MERGED`: each of 8 heads of 2,049 keys takes 9
    of 2 rounds (64.5 us after 83.3 for 8 calls, H200)."""
    if mapping.splits or chain.index.stack or mapping.longest_first or chain.piece is not None or chain.updates:
        return mapping.splits or 1
    warpgroups = 1 if chain.wide else mapping.warpgroups or kernel.chain_warpgroups
    rows = mapping.blocks.get(chain.rows.name, ROWS * warpgroups)
    tiles = chain.count * -(-chain.sizes[chain.rows.extent] // rows)
    rows_of_rounds, length = chain.each(chain.index), mapping.blocks.get(chain.index.name, kernel.lengths[0])
    most = max(1, min(processors // tiles, rows_of_rounds // length // LEAST, MOST_SPLITS)) if tiles else 1
    if most == 1:
        return 1
    rounds = -(-rows_of_rounds // length)
    return max(most, -(-rounds // -(-rounds // min(processors // tiles, MERGED))))      # none is without rounds


def _merged(chain: Chain, merge: Merge, share: Index, parts: dict[str, ArrayInfo],
            stores: list[StoreStatement]) -> list[Loop | StoreStatement]:
    """The second kernel's loop along the shares, with those cells that results need, and what it stores."""
    def made(op: str, c: Carried, name: str, data: Any = None) -> Value:
        return Value(op, (), c.init.dims, data, name, c.inside.line)

    found = {c: (made("load", c, name, (Parameter(name, info.shape, F32), (*chain.indices[:-1], share, chain.rows))),
                 made("carried", c, c.inside.name), made("after", c, c.inside.name))
             for c, (name, info) in zip(chain.carried, parts.items())}
    merged = merge.of(*({c.inside: values[n] for c, values in found.items()} for n in (1, 0)))
    known = {c.after: after for c, (_, _, after) in found.items()}
    stores = [replace(store, value=made_anew(store.value, known)) for store in stores]
    cells = [Carried(c.cell, load, inside, merged[c.inside], after) for c, (load, inside, after) in found.items()]
    needed = set(walked([store.value for store in stores]))
    for _ in cells:
        needed |= set(walked([c.out for c in cells if c.after in needed or c.inside in needed]))
    cells = [c for c in cells if c.after in needed or c.inside in needed]
    return [Loop("sequential", (share,), carried=cells, line=chain.line), *stores]


# --------------------------------------------------------------------------------------------------
# Arrays by columns that rounds read, such as an MLP's biases: loaded while the round's product runs.
#
# A load from global memory takes hundreds of cycles. Behind the wait for a product they would be on the way from one
# product to the next: 20 layers of 16384 x 128 took 1.18 of the time of the kernel by hand, whose biases lie in shared
# memory. So a thread's elements of such an array are a value of their own, which the scheduler computes as soon as it
# needs no wait.
#
# Where products run ahead they are left where they are used: registers are short there, and a round's arithmetic hides
# them. What a product begins at is loaded while nothing runs: in front of the wait for its operands.

def read_early(chain: Chain, size: Callable[[Any], int], ahead: bool, room: int) -> None:
    """Put a `READ` in the place of loads by columns, as many as a thread's ``room`` has registers for. ``size``: of a
    dimension in a round."""
    if ahead or only_adds(chain):
        return
    made, room = dict[Value, Value](), room - registers_needed(chain, size, False)
    rare = {x.args[3] for x in chain.body if x.op == LOWERED}
    for x in [x for x in chain.body if x.op != "dot" and len(x.dims) == 2 and x not in rare]:
        for y in x.args:
            if y.op != "load" or len(y.dims) != 1 or y.dims[0] is chain.rows or y in made:
                continue
            is_long = is_whole_load(y) and np.dtype(y.data[0].dtype).itemsize > 4
            registers = size(y.dims[0]) // 4 * (1 + is_long)
            if registers <= room:
                room -= 0 if chain.is_straight else registers          # one after the other
                made[y] = Value(READ, (y,), y.dims, None, f"{y.data[0].name}_columns", x.line)
        x.args = tuple(made.get(y, y) for y in x.args)
    chain.body[:0] = made.values()


# --------------------------------------------------------------------------------------------------
# Registers of a thread, where a round has most of them.

READING = 80                           # for addresses of a matrix that threads read in rounds
CALLING = 20                           # for what functions of a user's compute with, where they are called


def registers_needed(chain: Chain, size: Callable[[Any], int], at_once: bool,
                     parts: Names[Value, int] = MappingProxyType({})) -> int:
    """Registers of a thread for all sums and for what is handed over, or for the matrices that a round has ``at_once``; of
    products without a loop for the sums of one, of those before that it does not need, and what it takes. ``size``: of a
    dimension in a round. ``parts``: columns of products of which warpgroups have a part. Raises ConfigError for odd sizes of
    products."""
    read = {(y.data[0].name, y.data[1]) for x in chain.body if x.op not in ("dot", "transpose") for y in x.args
            if y.op == "load" and len(y.dims) == 2}
    sums = {d: _sums(parts.get(d) or size(d.dims[1]), d.line) for d in dots(chain.body)}
    handed = {x: _handed(size(x.dims[1]), x.line) for x in chain.body if x.op == "handover"}
    if chain.is_straight:
        order, body, begun = list(sums), set(chain.body), {d.args[2] for d in sums if d.args[2:]}      # parts of products
        apart = {d: sum(sums[x] for x in order[:n] if x not in begun and not depends(d, {x}, body))
                 for n, d in enumerate(order)}
        return READING * len(read) + max(sums[d] + apart[d] + handed.get(d.args[0], 0) for d in sums)
    own = {**sums, **handed}
    need = _most_at_once(chain, size, own) if at_once else sum(own.values())
    return need + READING * len(read)


def shared_of(chain: Chain) -> list[Value]:
    """The values that go to shared memory."""
    return [x for x in chain.body if x.op == SHARED]


def check_added(chain: Chain, mapping: Mapping) -> None:
    """Raises ConfigError for what rounds that add to an array have not, or others."""
    if chain.added and (mapping.turns or math.prod(mapping.cluster.values()) > 1):
        raise ConfigError(f"Mapping(turns={mapping.turns}, cluster={dict(mapping.cluster)!r}): warpgroups meet where rounds "
                          "add to an array, and tiles add in the order of their numbers; leave both out")
    if mapping.ordered and not chain.added:
        raise ConfigError("Mapping(ordered=True): the rounds add to no array, x[m] += ...")


def part_of(chain: Chain, d: Value, length: int, columns: int, warpgroups: int) -> tuple[int, int]:
    """What a warpgroup has of a product that is added to an array, of rounds of so many rows: how many rows it is apart
    from the next one's, and columns. Raises ConfigError for blocks that do not divide so."""
    parts, rest = divmod(warpgroups * ROWS, length)
    if length % ROWS or rest or columns % (ROWS * parts) * (parts > 1):
        raise refused(ConfigError, f"blocks of {length} along {chain.index}, whose {columns} columns are added to an array: "
                                   f"{warpgroups} warpgroups have no part of 64 rows each, or of a multiple of 64 columns",
                      d.line)
    return (ROWS if parts == 1 else 0), columns // parts


def _most_at_once(chain: Chain, size: Callable[[Any], int], own: dict[Value, int]) -> int:
    """Registers for matrices where a round has most of them. ``own``: of products and hand-overs.

    Cells have theirs always, and products that need none of the round's others from its beginning. What is computed takes
    the place of what nothing needs any more; a hand-over stands beside what it is packed from, and what arrays have by
    columns beside what is computed with it."""
    usual = _usually([*chain.added, *(c.out for c in chain.carried)])
    cells = {x for c in chain.carried for x in (c.inside, c.out)}
    late, begun = late_values(chain), {y for d in dots(chain.body) for y in d.args[2:]}
    users: dict[Value, list[Value]] = {}
    for x in chain.body:
        for y in x.args if x in usual else ():
            if x.op != LOWERED or y.op != READ:        # which is in the product already
                users.setdefault(y, []).append(x)
    last = {y: of[-1] for y, of in users.items()}

    def is_folded(x: Value) -> bool:
        """An element at a time: into a row's value, or into what is folded so."""
        return all(y.op in ("rowmax", "rowsum") or (y not in own and len(y.dims) == 2 and is_folded(y))
                   for y in users.get(x, ()))

    def of_value(x: Value) -> int:
        if len(x.dims) < 2 or is_folded(x) or x in begun or x.op in CONDITIONS:
            return size(x.dims[0]) // 4 if x.op == READ else 0
        return size(x.dims[x.dims[0] is chain.rows]) // 2

    live = {d: own[d] for d in dots(chain.body) if d in cells or d not in late}
    live.update({c.out: size(c.init.dims[1]) // 2 for c in chain.carried if len(c.init.dims) == 2})
    most = sum(live.values())
    for x in chain.body:
        if x.op in (SHARED, ADDED) or (chain.added and (x in live or x.op == "inside")):         # has no more registers
            for y in x.args:
                if last.get(y) is x and y not in cells:
                    live.pop(y, 0)
            continue
        if x not in usual or x in live or x in cells or (x.data == FILLED and x.args[1] in cells):       # in its place
            continue
        over = [y for y in dict.fromkeys(x.args) if y in live and last[y] is x and y not in cells]
        is_apart = x.op in ("dot", "handover", READ)
        more = own.get(x, of_value(x)) if is_apart or not over else 0
        meanwhile = CALLING if x.op == NUMBER else 0
        meanwhile += sum(size(chain.index) // 4 for y in x.args if len(x.dims) == 2 and y.dims == (chain.index,)
                         and y.op != READ and any(z.op == "load" for z in walked([y])))
        most = max(most, sum(live.values()) + more + meanwhile)
        left = max([more, *(live.pop(y) for y in over)])
        left = more if chain.added and x.op == "handover" else left
        if left and x not in begun and (len(x.dims) == 2 or x.op == READ):
            live[x] = left
    return most


def _usually(roots: list[Value]) -> set[Value]:
    """The values of rounds in which no exponent is large."""
    pending, seen = [*roots], set[Value]()
    while pending:
        x = pending.pop()
        if x not in seen:
            seen.add(x)
            pending += [y for n, y in enumerate(x.args) if x.op != LOWERED or n != 3]
    return seen


def _sums(columns: int, line: str) -> int:
    if columns % 8 or columns > MOST_COLUMNS:
        more = ("; make parts of them a stack, v[b, part, n]: each is a tile then, and two warpgroups share up to "
                f"{2 * MOST_COLUMNS} columns" if columns > MOST_COLUMNS else "")
        raise refused(ConfigError, f"a product has {columns} columns; a multiple of 8 up to {MOST_COLUMNS} is "
                                   f"needed{more}", line)
    return columns // 2


def _handed(columns: int, line: str) -> int:
    if columns % STEP:
        raise refused(ConfigError, f"the left operand of a product is computed and has {columns} columns; a multiple of "
                                   f"{STEP} is needed, which an instruction takes", line)
    return columns // 4


# -- what rounds of all tiles add to an array, as products of a computed value (`gemmkit.programs.sums`) ------------------

def share_added(chain: Chain, kernel: KernelLimits) -> None:
    """What rounds add becomes a product of what is in shared memory. Raises ValueError and TypeError, with the user's line,
    for other sums, and ConfigError for a kernel without the place."""
    cells = [c for c in chain.carried if isinstance(c, Added)]
    chain.carried = [c for c in chain.carried if c not in cells]
    places: dict[Value, Value] = {}
    if cells and not kernel.uses_tma:
        raise refused(ConfigError, f"{cells[0].store.parameter.name}[...] += ... in rounds: kernels of TMA and wgmma have a "
                                   "place for it, and this one has not; use another program with tiles of these rows, or "
                                   "operands that TMA takes", cells[0].store.line)
    if len(cells) > 1:
        one, other = (c.store.parameter.name for c in cells[:2])
        raise refused(ValueError, f"{other}[...] += ...: rounds add to {one} already, and have stages for one array; use "
                                  "another program", cells[1].store.line)
    for c in cells:
        d, name, own = c.out, c.store.parameter.name, (*chain.own_stacks, chain.index)
        if tuple(c.store.key) != own or c.store.only is not None or len(c.store.parameter.shape) != len(own) + 1:
            raise refused(ValueError, f"{name}[{shown(c.store.key)}] += ...; rounds add to their own rows, [{shown(own)}] "
                                      "(only .reference(...) runs others)", c.store.line)
        a, b = d.args[:2] if d.op == "dot" and d.args[2:] == (c.inside,) else (None, None)
        is_computed = a is not None and a.op == "transpose" and loaded(a) is None
        if not is_computed or b.op != "load" or chain.rows not in b.dims or a.dims[0] is not chain.index:
            raise refused(ValueError, f"{name}[...] += a value that is no product of a computed value's transpose and the "
                                      f"tile's rows, x.astype(dtype).T @ y[{chain.rows}] (only .reference(...) runs others)",
                          c.store.line)
        if np.dtype(c.store.parameter.dtype) != F32:
            raise refused(TypeError, f"{name} has dtype {c.store.parameter.dtype}; tiles add up float32", c.store.line)
        source = a.args[0]
        while source.op == "cast":
            source = source.args[0]
        if source not in places:
            dtype, called = np.dtype(b.data[0].dtype), f"{source.name or 'value'}_place"
            others = (x.args[0] for x in dots(chain.body) if x is not d and _is_made_of(x.args[0], source))
            held = next(others, source)                # another product takes it as it is, too, from the registers
            places[source] = Value(SHARED, (held,), source.dims, dtype, called, d.line)
            if held is not source:
                chain.body.remove(held)
                chain.body.insert(chain.body.index(held.args[0]) + 1, held)
            chain.body.insert(chain.body.index(held) + 1, places[source])
        d.args, d.name = (places[source], b), d.name or c.inside.name
        made = Value(ADDED, (d,), d.dims, c.store, "", c.store.line)
        chain.body.insert(chain.body.index(d) + 1, made)
        chain.added.append(made)


def _is_made_of(x: Value, source: Value) -> bool:
    """Whether it is the value, rounded, and zeros where places are not there."""
    while x is not source and x.op in ("cast", "inside"):
        x = x.args[0]
    return x is source
