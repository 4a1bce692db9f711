"""Which tiles a block computes, and which keys each of them visits: producer and consumers ask alike.

The host has worked out which block computes which tiles (`gemmkit.kernels.attention.schedule`): row ``turn * blocks +
block`` of ``order`` is a tile.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.attention.work import Blocks, Tile
from gemmkit.lang.members import number_of
from gemmkit.ptx.special import block_x, grid_x, udiv

__all__ = ["key_blocks", "slice_of", "tile_at"]


def tile_at(spec: Any, sizes: Any, order: Any, turn: int) -> Tile:
    """The block's ``turn``-th tile; of the one behind the last m is -1."""
    row = turn * grid_x() + block_x()
    m, head, batch = number_of(order, row, 0), number_of(order, row, 1), number_of(order, row, 2)
    if spec.packed:
        return Tile(m, head, batch, number_of(order, row, 3), number_of(order, row, 4), number_of(order, row, 5),
                    number_of(order, row, 6))
    return Tile(m, head, batch, sizes.queries, sizes.keys, 0, sizes.first_key)


def slice_of(spec: Any, tile: Tile) -> int:
    """Where the tile's arrays are along the batch: packed sequences have one, and ``tile.batch`` is the sequence."""
    return 0 if spec.packed else tile.batch


def key_blocks(spec: Any, tile: Tile) -> Blocks:
    """The blocks of keys of a tile: one at least, of which the mask then shows nothing."""
    begin, end, keys, shift = tile.m, min(tile.m + spec.block_m, tile.queries), tile.keys, tile.keys - tile.queries
    first, last = spec.mask.visited(begin, end, keys, tile.head, tile.batch, shift)
    most = udiv(max(keys - 1, 0), spec.block_n)
    first = min(udiv(max(first, 0), spec.block_n), most)
    last = max(udiv(max(min(last, keys), 0) + spec.block_n - 1, spec.block_n), first + 1)
    if not spec.mask.has_free:
        return Blocks(first, last, first, first)
    free, tested = spec.mask.untested(begin, end, keys, tile.head, tile.batch, shift)
    free = udiv(max(free, 0) + spec.block_n - 1, spec.block_n)
    tested = udiv(max(min(tested, keys), 0), spec.block_n)
    return Blocks(first, last, max(free, first), max(tested, first))
