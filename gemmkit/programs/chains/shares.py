"""Rounds that are split over blocks, ``Mapping(splits=4)``: each block has a share of a tile's rounds, and stores its cells.

A tile of few rows and long rounds, as in decoding, leaves most multiprocessors idle: 8 heads of one sequence are 8 tiles.
With shares they are as many times more. A share's cells are stored in float32, in memory of the stream's; a second kernel, a
function of rows (`gemmkit.programs.rows`), merges them in the order of the shares by the rule of
`gemmkit.programs.chains.merging`, and computes what the program stores.

A tile's shares are of one length, in blocks, so that the last ones may have no rounds: as behind a length they have one that
shows nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count as count_from
from typing import Any, NamedTuple

import numpy as np

from gemmkit.lang.errors import ConfigError
from gemmkit.programs.chains.chain import Chain
from gemmkit.programs.chains.merging import Merge, made_anew, merge_of
from gemmkit.programs.collectives import ROWS
from gemmkit.programs.kernels import Kernel
from gemmkit.programs.mapping import MOST_SPLITS, Mapping
from gemmkit.programs.spare import spare
from gemmkit.programs.trace import Loop, Store, Value
from gemmkit.programs.values import Parameter
from gemmkit.runtime.array_info import ArrayInfo

F32 = np.dtype(np.float32)
LEAST = 4                              # rounds of a share, where the number of shares is left open
ALIGNED = 256                          # bytes


class Shares(NamedTuple):
    """``cells``: what the rounds' kernel stores, of (stack x splits, rows, ...); ``merging``: the second kernel's program,
    and ``parts``, its arrays: one for each cell and share."""

    cells: dict[str, ArrayInfo]
    merging: Loop
    parts: dict[str, ArrayInfo]


def shares_of(chain: Chain, mapping: Mapping, signs: dict[str, float], processors: int, kernel: Kernel) -> Shares | None:
    """Split the rounds of a chain, as it is traced: its stores are its cells from here on. None where blocks take all rounds
    of a tile: where the mapping says so, where nothing is said and tiles are enough, or no rule to merge is found.

    Raises ConfigError where splits are asked for that cannot be.
    """
    splits = mapping.splits or _left_open(chain, mapping, processors, kernel)
    if splits == 1:
        return None
    if chain.index.stack:
        raise ConfigError(f"Mapping(splits={splits}): {chain.index} goes along a stack, whose matrices are not split")
    if mapping.longest_first:
        raise ConfigError(f"Mapping(longest_first=True, splits={splits}): shares of a tile are of one length; leave out one")
    try:
        merge = merge_of(chain, signs)
    except ConfigError:
        if mapping.splits:
            raise
        return None
    stores, chain.stores, chain.end, chain.splits = chain.stores, [], [], splits
    count = 1 if chain.stack is None else chain.stack.extent.size
    rows, first, cells, parts = chain.rows.extent.size, 0, {}, {}
    states: list[dict[Value, Value]] = [{} for _ in range(splits)]
    for c in chain.carried:
        columns, base = [dim.size for dim in c.init.dims[1:]], c.inside.name or "cell"
        stem = next(x for n in count_from(1) if f"{(x := base if n == 1 else f'{base}_{n}')}_shares" not in cells)
        name = f"{stem}_shares"
        shape = (count * splits, rows, *columns)
        info = cells[name] = spare(first, shape)
        chain.stores.append(Store(Parameter(name, shape, F32), chain.indices, c.after, None, c.inside.line))
        step = math.prod(shape[1:])
        for share in range(splits):
            part = f"{stem}_{share}"
            of_stack = chain.stack is not None
            parts[part] = info._replace(pointer=info.pointer + 4 * step * share, readonly=True,
                                        shape=((count,) if of_stack else ()) + shape[1:],
                                        strides=((splits * step,) if of_stack else ()) + info.strides[1:])
            held = Parameter(part, parts[part].shape, F32), chain.indices
            states[share][c.inside] = Value("load", (), c.init.dims, held, part, c.inside.line)
        first += -(-4 * math.prod(shape) // ALIGNED) * ALIGNED
    return Shares(cells, _merging(chain, merge, states, stores), parts)


def _left_open(chain: Chain, mapping: Mapping, processors: int, kernel: Kernel) -> int:
    """As many shares as there are idle multiprocessors for, of some rounds each."""
    if chain.index.stack or mapping.longest_first:
        return 1
    count = 1 if chain.stack is None else chain.stack.extent.size
    rows = mapping.blocks.get(chain.rows.name, ROWS * (mapping.warpgroups or kernel.chain_warpgroups))
    tiles = count * -(-chain.rows.extent.size // rows)
    rounds = chain.index.extent.size // mapping.blocks.get(chain.index.name, kernel.lengths[0])
    return max(1, min(processors // tiles, rounds // LEAST, MOST_SPLITS)) if tiles else 1


def _merging(chain: Chain, merge: Merge, states: list[dict[Value, Value]], stores: list[Store]) -> Loop:
    """The program of the second kernel."""
    state = states[0]
    for further in states[1:]:
        state = merge.of(state, further)
    known = {c.after: state[c.inside] for c in chain.carried}
    body: list[Any] = [replace(store, value=made_anew(store.value, known)) for store in stores]
    return Loop("parallel", chain.indices, body, line=chain.line)
