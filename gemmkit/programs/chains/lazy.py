"""Lazy rescaling: a running maximum stays as it is while what it scales would shrink by no more than 2^-8.

In attention a round finds the largest score so far, and everything that was added up relative to the old one is multiplied
by exp(best - top). The reference need not be the largest score: any place near it gives the same quotient. So with
``Mapping(lazy=True)`` a row's reference stays until the factor would be below 2^-8, and a warp whose rows all have factor 1
leaves the multiplication of its sums out (`gemmkit.programs.chains.collectives.rescales`). Of heads of 128 these are 64 of
a round's 455 instructions. FlashAttention-4 (Zadouri et al., 2026) does so on Blackwell.

| written | computed |
|---|---|
| top = max(best, ...) | highest = max(best, ...), drop = the exponent of the factor from best to highest |
| | top = best if drop >= -8 else highest |
| shrink = exp(best - top) | 1 if drop >= -8 else 2^drop |

It takes a comparison and a vote a round, and pays where sums are wide: on an H100 heads of 192 take 0.97 to 0.98 of the time
(with turns), of 256 0.95 to 0.96, and of 128 1.03. So where nothing is said sums of 192 columns or more are rescaled lazily.

That results do not depend on the reference is proved (`monoids.is_independent`) and tried: rounds whose references are
moved by drawn numbers store the same. Weights are 2^8 times as large at most; of float16 only powers that a maximum bounds
by 1 have room for that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gemmkit.lang.errors import ConfigError
from gemmkit.programs.chains.algebra import as_written, in_order
from gemmkit.programs.chains.chain import Chain, depends, dots, loaded
from gemmkit.programs.chains.collectives import DROP
from gemmkit.programs.chains.merging import made_anew
from gemmkit.programs.chains.monoids import is_independent
from gemmkit.programs.chains.trials import Trial, same, trials_of
from gemmkit.programs.lines import refused
from gemmkit.programs.trace import Carried, Value
from gemmkit.programs.values import Axis

WIDE = 192                             # columns of sums


def references(chain: Chain, signs: dict[str, float], said: bool | None) -> list[Carried]:
    """Of a program as it is traced: cells that keep a maximum on which results do not depend; none where the mapping says
    so, or says nothing and sums are narrow.

    Raises ConfigError where they are asked for, and there is none.
    """
    if said is None:
        is_wide = any(len(c.init.dims) == 2 and isinstance(c.init.dims[1], Axis) and c.init.dims[1].size >= WIDE
                      for c in chain.carried)
        said = is_wide and any(map(_keeps_a_maximum, chain.carried))
    return _found(chain, signs) if said else []


def _keeps_a_maximum(c: Carried) -> bool:
    return c.out.op == "max" and c.inside in c.out.args and len(c.out.dims) == 1


def _found(chain: Chain, signs: dict[str, float]) -> list[Carried]:
    maxima = list(filter(_keeps_a_maximum, chain.carried))
    found = [c for c in maxima if _does_not_matter(chain, c, signs)]
    if not found:
        why = (f"results depend on the maximum that {maxima[0].inside!r} keeps" if maxima else
               "no cell of rows keeps a maximum, such as best[:] = maximum(best, s.max(axis=1))")
        raise _refused(chain, why)
    return found


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
