"""Which tiles a block computes, and which keys each of them visits: producer and consumers ask alike.

The host has worked out which block computes which tiles (`gemmkit.kernels.attention.schedule`): row ``turn * blocks +
block`` of ``order`` is a tile.
"""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.attention.work import Blocks, Tile
from gemmkit.lang.members import number_of
from gemmkit.ptx.special import block_x, grid_x, udiv

ROWS = 64                              # of a consumer


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
    return blocks_of_rows(spec, tile, tile.m, min(tile.m + spec.block_m, tile.queries))


def consumer_blocks(spec: Any, tile: Tile, group: int) -> Blocks:
    """Those of a consumer's rows of the tile, from the tile's last or the one before down to the tile's first: the last one
    may show nothing to the upper rows (causal masks, as long as a block has 64 keys or more)."""
    blocks = key_blocks(spec, tile)
    begin = min(tile.m + group * ROWS, tile.queries - 1)
    own = blocks_of_rows(spec, tile, begin, min(begin + ROWS, tile.queries))
    last = max(own.last, max(blocks.last - 1, blocks.first + 1))
    return Blocks(blocks.first, last, own.free_first if spec.tests_below else blocks.free_first, own.free_last)


def blocks_of_rows(spec: Any, tile: Tile, begin: int, end: int) -> Blocks:
    """Those that rows ``begin`` to ``end`` of a tile's head visit."""
    keys, shift = tile.keys, tile.keys - tile.queries
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
