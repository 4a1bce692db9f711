"""How many blocks share the K of a tile, where the choice is free (the multistage kernel's workspace), and what it costs.

Tiles alone leave multiprocessors idle where they are few; shares fill them. A share costs its block a walk through the
pipeline and the sums a way through memory, so each has some k-tiles to multiply. Costs are nanoseconds on an H200
(2026-11-22: f32 64 x 64 x 65536 with 66 to 512 shares, 4096 x 64 x 4096 with 2 to 12, complex64 1024^3 with 2; 2026-11-23:
f32 8 x 8 x 7584 with 8 and 16, f64 67 x 1 x 636 with 3 and 4, by whose small tiles counting is seen to cost less).
"""

from __future__ import annotations

from gemmkit.kernels.common.workspace_sums import takes_slices

ENOUGH = 4                             # k-tiles of a share, at least
LONG = 16                              # k-tiles of a product whose K is shared at all
COUNTING, WRITTEN = 1000, 5.5          # ns: finding out which block is the last; bytes a ns: writing a share's sums
LATE = 4000                            # ns: both, at most
BYTES = 64                             # a ns: what the last block reads
SLICES = 5300                          # ns: where all blocks wait for each other and sum slices
KEPT, TRAFFIC = 40e6, 2000             # bytes of sums that the L2 keeps; bytes a ns, of those that go to memory and back
WORTH = 0.9                            # of the time without shares: what sharing has to come down to


def candidates(tiles: int, k_tiles: int, sm_count: int, blocks: int) -> list[int]:
    """Numbers of shares worth trying: 1, small ones, and those that fill the multiprocessors with a block each, or with as
    many as run side by side.

    >>> candidates(1, 4096, 132, 4), candidates(64, 256, 132, 4), candidates(1, 8, 132, 4)
    ([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 132, 528], [1, 2, 3, 4, 5, 6, 7, 8], [1])
    """
    if tiles == 0 or k_tiles < LONG:
        return [1]
    some = (n for n in (12, 16, 24, 32) if n * tiles <= sm_count * blocks)
    found = {*range(1, 9), *some, sm_count // tiles, sm_count * blocks // tiles}
    return sorted(n for n in found if 1 <= n <= max(1, k_tiles // ENOUGH))


def nanoseconds(splits: int, tiles: int, nbytes: int, sm_count: int) -> float:
    """What the sums of ``splits`` shares of a tile's accumulators (``nbytes``) cost a launch of so many tiles.

    >>> nanoseconds(1, 64, 2**17, 132), nanoseconds(2, 64, 2**17, 132), nanoseconds(132, 1, 2**14, 132)
    (0.0, 8096.0, 5300.0)
    """
    if splits == 1:
        return 0.0
    moved = max(0.0, 2 * tiles * splits * nbytes - KEPT) / TRAFFIC
    if takes_slices(splits, tiles, sm_count):
        return SLICES + moved
    return min(LATE, COUNTING + nbytes / WRITTEN) + splits * nbytes / BYTES + moved


__all__ = ["candidates", "nanoseconds"]
