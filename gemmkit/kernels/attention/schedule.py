"""Which block computes which tiles, worked out on the host, once for given sizes.

Tiles go, the longest of each section of heads first, to the block that is free first. A section's K and V stay in the L2. As
long as tiles take what they should this is as good as a dynamic scheduler, without a counter to reset or a broadcast in the
block. (A fixed stride in sections of 8 heads was 27 % out of balance at causal S 4096 of 64 heads, by this model.)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

OVERHEAD = 0.5                         # of a tile, in blocks of keys
L2 = 24 << 20                          # bytes of K and V that a section may have


class Head(NamedTuple):
    """A head of one batch or packed sequence: its tiles' lengths in blocks of keys, and what follows m in each tile's row of
    the table."""

    lengths: Sequence[float]
    entry: tuple[int, ...]


def schedule(heads: Sequence[Head], block_m: int, section: int, blocks: int) -> np.ndarray:
    """The table ``(turns x blocks, 1 + entry)`` of tiles: row ``turn * blocks + block`` has a tile's first query, and the
    entry of its head; -1 behind a block's last one. ``section`` heads are computed at a time.

    >>> schedule([Head([1.0, 2.0], (7,)), Head([1.0], (8,))], 64, 2, 2).tolist()
    [[64, 7], [0, 7], [-1, -1], [0, 8], [-1, -1], [-1, -1]]
    """
    free = [(0.0, block) for block in range(blocks)]
    todo: list[list[tuple[int, ...]]] = [[] for _ in range(blocks)]
    for first in range(0, len(heads), section):
        tiles = [(-length, at, row) for at, head in enumerate(heads[first:first + section], first)
                 for row, length in enumerate(head.lengths)]
        for minus, at, row in sorted(tiles):
            begin, block = free[0]
            todo[block].append((row * block_m, *heads[at].entry))
            heapq.heapreplace(free, (begin - minus + OVERHEAD, block))
    turns, width = max(map(len, todo)) + 1, 1 + len(heads[0].entry)
    order = np.full((turns, blocks, width), -1, np.int32)
    for block, tiles_of in enumerate(todo):
        order[:len(tiles_of), block] = tiles_of or np.empty((0, width), np.int32)
    return order.reshape(-1, width)
