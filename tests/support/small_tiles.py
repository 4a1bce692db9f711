"""Small default tiles of the multistage kernel, for products in the emulator that name no mapping.

A tile is computed whole, however little of it lies in the matrix: in the shipped mapping for small problems 128 threads go
through 32 x 32 x 32 products (0.35 s of the emulator a float32 tile), where most tests have 5 x 6 x 7. The kernel, its routes
and its operator stay the same; a block has one warp, and a k-tile half the length. Tests of what is chosen are marked `shipped`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from gemmkit.launch import forget
from gemmkit.tuning import multistage

#: The tile of each dtype's only mapping; a warp's is as large.
TILES = {"f4": (16, 16, 16), "f8": (16, 16, 16), "c8": (16, 16, 8), "c16": (16, 16, 8)}


def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within a test that runs in the emulator. No plan made meanwhile stays, and none made before is used."""
    if any(request.node.get_closest_marker(name) for name in ("gpu", "compile", "shipped")):
        yield
        return
    for name, block in TILES.items():
        smallest = multistage.TABLES[np.dtype(name)][-1]
        monkeypatch.setitem(multistage.TABLES, np.dtype(name),
                            (dataclasses.replace(smallest, block=block, warp=block[:2]),))
    forget()
    yield
    forget()
