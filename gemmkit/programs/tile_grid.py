"""What a mapping leaves open of the grid of tiles of rows and columns: how wide tiles are, in which order they are taken,
and which blocks share operands. All three follow from how many multiprocessors there are for how many tiles.

| left open | chosen |
|---|---|
| columns of a tile | those with which waves of tiles take the least time, ``waves * (columns + 64)`` |
| band | as many tile rows as make what a wave reads of both operands alike, and so least |
| cluster | two tiles below each other, where there are `WAVES` waves of tiles or more, and threads add nothing up |

A tile takes time by its columns, and some for its beginning and end, as much as 64 columns take. 132 multiprocessors take
4096 x 4096 in four waves of 128 x 256, and 1024 x 1024 in one of 128 x 64 (0.6 of the time of 128 x 256, H100).
"""

from __future__ import annotations

import math
from dataclasses import replace

from gemmkit.programs.collectives import ROWS
from gemmkit.programs.kernels import Kernel
from gemmkit.programs.mapping import MOST_BAND, Mapping
from gemmkit.programs.places import Places

__all__ = ["laid_out"]

STEP, BEGINNING, WAVES = 64, 64, 3


def laid_out(places: Places, mapping: Mapping, kernel: Kernel, processors: int) -> Mapping:
    """The mapping, whose warpgroups are said, with its tiles' columns, cluster and band."""
    m, n = places.indices
    found, own = dict(mapping.blocks), ROWS * mapping.warpgroups
    height = max(1, found.get(m.name, own))
    down = max(1, -(-m.extent.size // height)) * (1 if places.stack is None else max(1, places.stack.extent.size))

    def tiles(columns: int) -> int:
        return down * max(1, -(-n.extent.size // columns))

    if n.name not in found:
        room = kernel.usual_sums[mapping.warpgroups] * own // max(own, height)
        usual = max(STEP, room // len(places.starts) // STEP * STEP)
        widest = min(usual, max(STEP, -(-n.extent.size // STEP) * STEP))
        found[n.name] = min(range(widest, 0, -STEP),
                            key=lambda columns: -(-tiles(columns) // processors) * (columns + BEGINNING))
    columns = max(1, found[n.name])
    cluster = dict(mapping.cluster)
    if not cluster and kernel.uses_tma:
        adds = any(rounds.row_sums or rounds.column_sums for rounds in places.loops)
        cluster = {m.name: 2 if not adds and m.extent.size > height and tiles(columns) >= WAVES * processors else 1}
    return replace(mapping, blocks=found, cluster=cluster, band=mapping.band or _band(places, height, columns, processors))


def _band(places: Places, height: int, columns: int, processors: int) -> int:
    """Tile rows of a wave of tiles that reads the least: as many bytes of A as of B."""
    m, n = places.indices
    taken = [tile for rounds in places.loops for tile in rounds.tiles]
    of_a, of_b = (max(1, sum(index in tile.dims for tile in taken)) for index in (m, n))
    return max(1, min(MOST_BAND, round(math.sqrt(processors * columns * of_b / (height * of_a)))))
