"""Named tuples of run-time values that travel together through the kernel, and the sizes of a launch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import Component, Scalar
from gemmkit.lang.component_class import dataclass

F32 = np.dtype(np.float32)
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Sizes(Component):
    """The run-time part: queries and keys of a head (of no single sequence, where sequences are packed); the scale of
    scores, and what takes unscaled scores to powers of 2; by how many heads of Q one of K and one of V is shared, and
    whether they have a batch of their own (1) or one for all (0); the first row of K and V."""

    queries: Scalar
    keys: Scalar
    scale: Scalar
    to_log2: Scalar
    k_share: Scalar
    v_share: Scalar
    k_batch: Scalar
    v_batch: Scalar
    first_key: Scalar


class Tile(NamedTuple):
    """A block's rows of Q: the first one (-1: there is no tile), whose head and batch, how many queries and keys these have,
    and in which row of the arrays they begin."""

    m: Any
    head: Any
    batch: Any
    queries: Any
    keys: Any
    first_query: Any
    first_key: Any


class Blocks(NamedTuple):
    """Blocks of keys that a tile visits, from the last down to the first, and those among them in which nothing is
    tested."""

    first: Any
    last: Any
    free_first: Any
    free_last: Any


class Place(NamedTuple):
    """Where a thread's first value of S stands: its tile, its row of the tile's head, its key, and the block of keys."""

    tile: Tile
    row: Any
    column: Any
    block: Any


class Limits(NamedTuple):
    """The keys that a row of a thread sees: the first, and the one behind the last."""

    first: Any
    end: Any


class Stats(NamedTuple):
    """Of a thread's two rows: their largest scores so far, and its own part of the sums of their weights."""

    upper: Any
    lower: Any
    upper_sum: Any
    lower_sum: Any


class Sums(NamedTuple):
    """Of a thread's two rows: the sums of weighted values, and the stats that these are relative to."""

    o: Any
    stats: Stats


class State(NamedTuple):
    """What a consumer carries from round to round: O and stats of the blocks of keys so far, the weights P of the last of
    these blocks, which are not in O yet, and the slot that it is in."""

    o: Any
    p: Any
    stats: Stats
    slot: Any


class Outputs(NamedTuple):
    """The result and the logarithms of the sums, in global memory."""

    out: Any
    lse: Any
    map: Any
