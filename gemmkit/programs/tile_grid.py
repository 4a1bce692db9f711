"""What a mapping leaves open of the grid of tiles of rows and columns: how large tiles are, and in which order they come.
Both follow from how many multiprocessors there are for how many tiles.

| left open | chosen |
|---|---|
| warpgroups | 2; of multistage kernels 1 with twice 64 rows, so that what warps load of B serves both halves |
| columns of a tile | those with which waves of tiles take the least time, ``waves * (columns + 64)`` |
| band | as many tile rows as make what a wave reads of both operands alike, and so least |

A tile takes time by its columns, and some for its beginning and end, as much as 64 columns take. 132 multiprocessors take
4096 x 4096 in four waves of 128 x 256, and 1024 x 1024 in one of 128 x 64 (0.49 of the time of 128 x 256, H100). In bands a
product of 4096 x 14336 x 4096 takes 0.78 of the time, and a dual one of 8192 0.69: operands are read from the L2.
"""

from __future__ import annotations

import math
from dataclasses import replace

from gemmkit.programs.allocate import STEP
from gemmkit.programs.collectives import ROWS
from gemmkit.programs.kernels import Kernel
from gemmkit.programs.mapping import MOST_BAND, Mapping
from gemmkit.programs.places import Places
from gemmkit.programs.rows.form import walked

BEGINNING, WARPGROUPS = 64, 2


def laid_out(places: Places, mapping: Mapping, kernel: Kernel, processors: int) -> Mapping:
    """The mapping with its warpgroups, its tiles' columns and rows, and its band."""
    m, n = places.indices
    found, warpgroups = dict(mapping.blocks), mapping.warpgroups
    if not warpgroups and m.name not in found and kernel.parts == 2 and _may_double(places, kernel):
        warpgroups, found[m.name] = 1, 2 * ROWS
    warpgroups = warpgroups or WARPGROUPS
    own = ROWS * warpgroups
    height = max(1, found.get(m.name, own))
    down = max(1, -(-m.extent.size // height)) * (1 if places.stack is None else max(1, places.stack.extent.size))
    if n.name not in found:
        room = kernel.usual_sums[warpgroups] if height <= own else kernel.most_sums[warpgroups] * own // height
        usual = max(STEP, room // len(places.starts) // STEP * STEP)
        widest = min(usual, max(STEP, -(-n.extent.size // STEP) * STEP))

        def time(columns: int) -> int:
            tiles = down * max(1, -(-n.extent.size // columns))
            return -(-tiles // processors) * (columns + BEGINNING)

        found[n.name] = min(range(widest, 0, -STEP), key=time)
    band = mapping.band or _band(places, height, max(1, found[n.name]), processors)
    return replace(mapping, blocks=found, warpgroups=warpgroups, band=band)


def _may_double(places: Places, kernel: Kernel) -> bool:
    """Whether there is room for the sums of twice the rows, and nothing takes registers beside them: sums of rows and
    columns, matrices that a tile's end reads."""
    if kernel.most_sums[1] // 2 // len(places.starts) < STEP:
        return False
    read = walked([store.value for store in places.stores])
    return not (places.row_starts or places.column_starts or any(x.op == "load" and len(x.dims) == 2 for x in read))


def _band(places: Places, height: int, columns: int, processors: int) -> int:
    """Tile rows of a wave of tiles that reads the least: as many bytes of A as of B."""
    m, n = places.indices
    taken = [tile for rounds in places.loops for tile in rounds.tiles]
    of_a, of_b = (max(1, sum(index in tile.dims for tile in taken)) for index in (m, n))
    return max(1, min(MOST_BAND, round(math.sqrt(processors * columns * of_b / (height * of_a)))))
