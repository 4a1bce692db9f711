"""The route of an operand that a cluster's blocks share and that is rewritten: each block rewrites a part, for all of them.

1. TMA brings a block its own part of the tile alone (``raw``).
2. The block's producer warps rewrite the part where it lies, and send the same words to the other blocks (``st.async``).
3. ``full`` is complete when the block's threads have written their part, and the bytes of the others have come.

What shared memory moves of a tile of B, beside what wgmma reads, in tiles: 3 where each block rewrites all of it (TMA writes
it, threads read and write it), 2 where two blocks rewrite a half each, 1.5 where four do. It is no faster (docs/hopper.md).
A block may send when its stage is empty, which all blocks of the cluster have said (`Pipeline.release`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from gemmkit.kernels.common.operand import Operand
from gemmkit.kernels.common.tile_copy import put_words
from gemmkit.kernels.common.work import KTile, Place, Slot
from gemmkit.kernels.sm90.producer import place_of
from gemmkit.kernels.sm90.routes.request import Request
from gemmkit.kernels.sm90.routes.rewrite import Rewrite, Share
from gemmkit.kernels.sm90.routes.tma import Copy
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import each, split
from gemmkit.layouts.base import element_tile
from gemmkit.ptx.cluster import store_async
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import lane_index, udiv
from gemmkit.ptx.words import pack_words
from gemmkit.tiling import Tile, parallelise

WORDS = np.dtype(np.uint32)
WORD, SENT = 4, 16                     # bytes of a word, and of a thread's store to another block at most


@dataclass(frozen=True)
class PartRewrite(Rewrite):
    """TMA brings the block's part as it is stored, and a team rewrites it, in place and in the other blocks."""

    @classmethod
    def of(cls, request: Request) -> PartRewrite:
        copy = Copy.in_panels(request.operand, request.spec.cluster)
        part = part_of(request)
        return cls(dataclasses.replace(copy, multicasts=False), part, warp_of(request, part))

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        why = super().refuses(request)
        if why is not None:
            return why
        if peers_of(request) == 1:
            return "no other block shares it"
        if request.is_untouched:
            return "nothing is rewritten"
        part = part_of(request)
        divides = all(extent % step == 0 for extent, step in zip(part.extents, warp_of(request, part).extents))
        return None if divides else "a part is no whole number of the warps' tiles"

    def brought_bytes(self, operand: Operand) -> int:
        return operand.nbytes * self.tile.count // operand.tile.count

    def share(self, spec: Any, operand: Any, slot: Slot, at: KTile) -> Share:
        place, part = place_of(operand, at), spec.cluster.part(operand.k_axis, at.rank)
        i, j = place.i, place.j
        if operand.k_axis == 1:
            i += part * self.tile.size[0]
        else:
            j += part * self.tile.size[1]
        pointer = shared(operand.shared.dtype, begin_of(spec, operand, slot.stage, part))
        return Share(pointer, Place(i, j, place.rows, place.columns), slot.stage, at.rank)

    def put(self, spec: Any, operand: Any, share: Share, tile: Any, words: tuple) -> None:
        put_words(operand, share.pointer, tile, words)
        if tile.count > operand.shared.chunk:
            each(send_chunk, split(words, SENT // WORD), spec, operand, share, tile)
        else:
            send(spec, operand, share, tile, words)

    def put_values(self, spec: Any, operand: Any, share: Share, tile: Any, values: tuple) -> None:
        self.put(spec, operand, share, tile, pack_words(values))

    def pass_on(self, spec: Any, operand: Any, share: Share, warp: int) -> None:
        """The other blocks have not got it."""
        warp_tiles = parallelise(operand.route.tile, operand.route.warp, warp, operand.warps)
        for i in range(len(warp_tiles)):
            thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
            for j in range(len(thread_tiles)):
                values = operand.shared.load_shared(share.pointer, thread_tiles[j], operand.leading())
                self.put(spec, operand, share, thread_tiles[j], pack_words(values))


def peers_of(request: Request) -> int:
    """Blocks of the cluster that share the operand."""
    cluster = request.spec.cluster
    return cluster.n if request.operand.k_axis == 1 else cluster.m


def part_of(request: Request) -> Tile:
    """What each of them rewrites: as much across K."""
    operand, peers = request.operand, peers_of(request)
    extents = list(operand.tile.extents)
    extents[1 - operand.k_axis] //= peers
    return Tile(**dict(zip(operand.tile.names, extents)))


def warp_of(request: Request, part: Tile) -> Tile:
    """A warp's tile of the part: as large as that of the whole tile, and no wider across K than the part."""
    operand, across = request.operand, 1 - request.operand.k_axis
    extents = list(operand.warp.extents)
    fitting = math.gcd(extents[across], part.extents[across])
    extents[1 - across] *= extents[across] // fitting
    extents[across] = fitting
    return Tile(**dict(zip(operand.warp.names, extents)))


def begin_of(spec: Any, operand: Any, stage: int, part: int) -> int:
    """The byte of shared memory where a part of a stage's tile begins."""
    return stage * spec.stage_bytes + operand.offset + part * (operand.route.copy.part * operand.shared.itemsize)


def send_chunk(words: tuple, n: int, spec: Any, operand: Any, share: Share, tile: Any) -> None:
    send(spec, operand, share, element_tile(tile, n * operand.shared.chunk), words)


def send(spec: Any, operand: Any, share: Share, tile: Any, words: tuple) -> None:
    """Send a chunk at most to the same place in the other blocks."""
    part = spec.cluster.part(operand.k_axis, share.rank)
    at = operand.shared.position(tile.index, operand.leading()) * operand.shared.itemsize
    pointer = shared(WORDS, begin_of(spec, operand, share.stage, part))
    for n in range(1, operand.tile.count // operand.route.tile.count):
        store_async(pointer, udiv(at, WORD), words, spec.pipeline.full(), share.stage,
                    spec.cluster.peer(operand.k_axis, share.rank, n))
