"""Which tiles a block computes: producer and consumers ask alike. All blocks of a cluster take as many."""

from __future__ import annotations

from typing import Any

from gemmkit.ptx.special import block_x, grid_x


def first_row(spec: Any, turn: int) -> int:
    """Of the block's ``turn``-th tile."""
    return (turn * grid_x() + block_x()) * spec.block_m


def has_tile(spec: Any, sizes: Any, turn: int, rank: int) -> bool:
    """Whether the first block of the cluster has a tile: its peers compute rows beyond the last one beside it, of zeros."""
    return first_row(spec, turn) - rank * spec.block_m < sizes.rows
