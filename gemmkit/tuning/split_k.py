"""How many blocks share the K of a tile, where the choice is free (the multistage kernel's workspace).

Tiles alone leave multiprocessors idle where they are few; shares fill them. A share costs its block a walk through the
pipeline and the sums a way through memory, so each has some k-tiles to multiply, and a grid that fills half of the machine
stays whole.
"""

from __future__ import annotations

ENOUGH = 4                             # k-tiles of a share, at least
LONG = 16                              # k-tiles of a product whose K is shared at all


def shares(tiles: int, k_tiles: int, blocks_at_once: int) -> int:
    """How many blocks share each of ``tiles`` tiles of ``k_tiles`` k-tiles, on a device that runs ``blocks_at_once`` blocks.

    >>> shares(1, 1024, 132), shares(64, 256, 132), shares(256, 128, 264), shares(1, 8, 132)
    (132, 2, 1, 1)
    """
    if tiles == 0 or k_tiles < LONG:
        return 1
    return max(1, min(blocks_at_once // tiles, k_tiles // ENOUGH))


__all__ = ["shares"]
