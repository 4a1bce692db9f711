"""Routes on which TMA brings a tile and producer warps rewrite it where it lies.

They transform its elements; or they transpose the tile, where wgmma reads 8- and 32-bit operands along K alone and it lies
the other way. Then all threads of a team read the whole tile before any of them writes.

A stage has three barriers: ``raw`` (TMA has brought it), ``full`` (it is rewritten) and ``empty``. A team asks for its next
stage before it works on the last one, so that no thread waits for global memory (with a ring of two stages it cannot: the
consumers hold the other).

In a cluster whose blocks share the operand each block rewrites a part of the tile and sends it to the others
(`PartRewrite`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.kernels.collectives.operand import (
    Operand,
    Route,
    column_of,
    put_elements,
    put_words,
    row_of,
    transform_element_into,
    transform_into,
    transform_within,
)
from gemmkit.kernels.collectives.scheduler import Inputs, KTile, Slot, TileCoord, Work, holds
from gemmkit.kernels.sm90.kernel import WORKING, Producer, Registers, fill_stages, place_of, rank_of, stage_of, start_copies
from gemmkit.kernels.sm90.routes import Request, Tma, TmaCopy, put_held
from gemmkit.lang.aggregates import convert, convert_all
from gemmkit.lang.component_products import StackShape, of_product
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Numeric, SharedPointer
from gemmkit.lang.registers import apply, each, generate, is_pairwise, join, registers, split, transform_pairs
from gemmkit.layouts.base import element_tile
from gemmkit.ptx.barriers import store_async
from gemmkit.ptx.memory import load_shared, pack_words, shared, unpack_words
from gemmkit.ptx.special import lane_index, rolled, thread_index, udiv, uniform
from gemmkit.ptx.wgmma import fence_async, named_barrier
from gemmkit.tiling import Coord, Tile, parallelise, translate

if TYPE_CHECKING:
    from gemmkit.kernels.sm90.family import Sm90Spec

BATCH = 32                             # registers of tiles that a producer's thread rewrites at a time
TRANSPOSED = 64                        # registers of a tile that a producer's thread may hold while it is transposed


@dataclass(frozen=True)
class Rewrite(Tma):
    """TMA brings the tile as it is stored, and a team transforms or masks its elements in place.

    ``tile`` is what the block rewrites of it, tiles of ``warp`` at a time. ``batch`` of these a thread reads before it
    writes the first.
    """

    tile: Tile
    warp: Tile
    batch: int = 1

    @classmethod
    def of(cls, request: Request) -> Rewrite:
        return cls(TmaCopy.in_panels(request.operand, request.spec.cluster), request.operand.tile, request.operand.warp)

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        why = cls.refuses_array(request)
        if why is not None:
            return why
        if hasattr(request.operand.shared, "plane"):
            return "elements of several parts are not rewritten in place"
        if not request.moves_lines:
            return "a thread's tile is not a line of words"
        return None if request.stored_axis == request.read_axis else "it lies across"

    @classmethod
    def goes_with(cls, other: type[Route]) -> bool:
        """The producer rewrites what TMA alone has brought."""
        return issubclass(other, Rewrite) or other is Tma

    def dealt(self, operand: Operand) -> Rewrite:
        """The route when ``operand.warps`` are known."""
        warp_tiles = dataclasses.replace(operand, tile=self.tile, warp=self.warp).shares // operand.lane_tiles
        most = max(1, BATCH // (operand.lane_tiles * operand.words.count))
        return dataclasses.replace(self, batch=math.gcd(warp_tiles, most) if warp_tiles else 1)

    def rewrite_inside(self, spec: Sm90Spec, operand: Operand, slot: Slot, at: KTile, warp: int) -> None:
        """Most tiles of a triangular matrix are as they are stored."""
        share = self.share(spec, operand, slot, at)
        place, rows, columns = share.place, self.tile.size[0], self.tile.size[1]
        if not operand.is_masked:
            transform_in_batches(spec, operand, share, warp)
        elif operand.layout.is_as_stored(place.i, place.j, rows, columns):
            if not operand.to_shared.is_identity:
                transform_in_batches(spec, operand, share, warp)
            else:
                self.pass_on(spec, operand, share, warp)
        else:
            end = TileCoord(place.i, place.j, place.i + rows, place.j + columns)
            transform_masked(spec, operand, share, end, warp)

    def rewrite_edge(self, spec: Sm90Spec, operand: Operand, slot: Slot, at: KTile, warp: int) -> None:
        """TMA has put zeros beyond the edge, and the product must meet the identity."""
        share = self.share(spec, operand, slot, at)
        transform_masked(spec, operand, share, share.place, warp)

    def share(self, spec: Sm90Spec, operand: Operand, slot: Slot, at: KTile) -> RewriteShare:
        """What the block rewrites of a stage."""
        return RewriteShare(stage_of(spec, operand, slot), place_of(operand, at), slot.stage, at.rank)

    def put(self, spec: Sm90Spec, operand: Operand, share: RewriteShare, tile: Tile, words: tuple) -> None:
        put_words(operand, share.pointer, tile, words)

    def put_values(self, spec: Sm90Spec, operand: Operand, share: RewriteShare, tile: Tile, values: tuple) -> None:
        put_elements(operand, share.pointer, tile, values)

    def pass_on(self, spec: Sm90Spec, operand: Operand, share: RewriteShare, warp: int) -> None:
        """What is to be done with a tile that is as it is to be: nothing."""


class RewriteShare(NamedTuple):
    """What a block rewrites of a stage's tile: where it is in shared memory, its place in the matrix, the block's rank."""

    pointer: Any
    place: TileCoord
    stage: int
    rank: int


def transform_in_batches(spec: Sm90Spec, operand: Any, share: RewriteShare, warp: int) -> None:
    """Some tiles at a time: all are read before the first is written, or each would wait for the last."""
    pointer = share.pointer
    warp_tiles = parallelise(operand.route.tile, operand.route.warp, warp, operand.warps)
    first = warp * 0
    while first < len(warp_tiles):
        held = registers(operand.words, operand.route.batch * operand.lane_tiles)
        for i in range(operand.route.batch):
            thread_tiles = parallelise(warp_tiles[first + i], operand.thread, lane_index(), 32, operand.order)
            for j in range(len(thread_tiles)):
                held[i * len(thread_tiles) + j] = pack_words(
                    operand.shared.load_shared(pointer, thread_tiles[j], operand.leading()))
        for i in range(operand.route.batch):
            thread_tiles = parallelise(warp_tiles[first + i], operand.thread, lane_index(), 32, operand.order)
            for j in range(len(thread_tiles)):
                put_rewritten(spec, operand, share, thread_tiles[j], held[i * len(thread_tiles) + j])
        first = rolled(first + operand.route.batch)


def put_rewritten(spec: Any, operand: Any, share: RewriteShare, tile: Tile, words: tuple) -> None:
    if is_pairwise(operand.to_shared, operand.shared.dtype):
        operand.route.put(spec, operand, share, tile, transform_pairs(operand.to_shared, operand.shared.dtype, words))
    else:
        place = share.place
        values = transform_into(operand, unpack_words(operand.shared.dtype, words), translate(tile, place.i, place.j))
        operand.route.put_values(spec, operand, share, tile, values)


def transform_masked(spec: Any, operand: Any, share: RewriteShare, place: TileCoord, warp: int) -> None:
    """Element by element, the operator's identity for those beyond the end that ``place`` says."""
    pointer, nothing = share.pointer, spec.operator.identity
    warp_tiles = parallelise(operand.route.tile, operand.route.warp, warp, operand.warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            tile = thread_tiles[j]
            values = operand.shared.load_shared(pointer, tile, operand.leading())
            operand.route.put_values(spec, operand, share, tile, apply(
                transform_element_masked, values, operand, translate(tile, place.i, place.j), place, nothing))


def transform_element_masked(x: Numeric, n: int, operand: Operand, tile: Tile, place: TileCoord, nothing: Numeric) -> Any:
    i, j = row_of(tile, n), column_of(tile, n)
    if i < place.rows and j < place.columns:
        value = operand.layout.of_stored(x, i, j) if operand.is_masked else x
        return transform_element_into(operand, value, i, j)
    return convert(operand.shared.dtype, nothing)


@dataclass(frozen=True)
class Transpose(Rewrite):
    """TMA brings the tile as it is stored, which lies across, and a team transposes it in place (and transforms it)."""

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        operand, spec = request.operand, request.spec
        shared: Any = operand.shared
        why = cls.refuses_array(request)
        if why is not None:
            return why
        if hasattr(shared, "plane") or not operand.layout.is_plain or request.stored_axis == request.read_axis:
            return "it does not lie across in a plain array"
        if not request.moves_lines:
            return "a thread's tile is not a line of words"
        k_axis = operand.k_axis
        depth, across = operand.tile.extents[k_axis], operand.tile.extents[1 - k_axis]
        line, held = shared.width // shared.itemsize, across * depth * shared.itemsize // (128 * spec.producer_warps)
        if not request.divides or across % line or held > TRANSPOSED:
            return f"its lines do not divide among the producer's threads, or {TRANSPOSED} registers do not hold them"
        return "the blocks of a cluster would each have a part of it" if spec.cluster.shares else None

    def rewrite_inside(self, spec: Sm90Spec, operand: Operand, slot: Slot, at: KTile, warp: int) -> None:
        """See `transpose`."""

    def rewrite_edge(self, spec: Sm90Spec, operand: Operand, slot: Slot, at: KTile, warp: int) -> None:
        """See `transpose`."""

    def transpose(self, spec: Sm90Spec, operand: Operand, slot: Slot, at: KTile, warp: int) -> None:
        """Read the team's part of the tile as it came, line by line across K, and store it along K."""
        pointer, place = stage_of(spec, operand, slot), place_of(operand, at)
        held = registers(operand.words, operand.slots)
        warp_tiles = parallelise(operand.tile, operand.warp, warp, operand.warps)
        for i in range(len(warp_tiles)):
            thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
            for j in range(len(thread_tiles)):
                values = operand.brought.load_shared(pointer, thread_tiles[j], operand.brought.leading(operand.tile.size))
                if not operand.to_shared.is_identity:
                    values = apply(transform_element_masked, values, operand, translate(thread_tiles[j], place.i, place.j),
                                   place, spec.operator.identity)
                held[i * len(thread_tiles) + j] = pack_words(values)
        named_barrier(spec.producer.barrier, 32 * spec.producer.warps)       # one team transposes
        for i in range(len(warp_tiles)):
            thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
            for j in range(len(thread_tiles)):
                put_words(operand, pointer, thread_tiles[j], held[i * len(thread_tiles) + j])


# -- the producer -------------------------------------------------------------------------------------------------------

CHANGING: Registers = {(1, 2): (72, 216), **WORKING}
TRANSPOSING: Registers = {(1, 2): (104, 200), **WORKING}


@dataclass(frozen=True)
class RewriteProducer(Producer):
    """TMA moves both operands, of which one or both are rewritten."""

    transposes: bool = False
    sent_bytes: int = 0                # a stage, that the other blocks of the cluster send
    rewrites = True
    barriers = 1                       # of a team that transposes: it has read what it will write over

    @property
    def registers(self) -> Registers:
        return TRANSPOSING if self.transposes else CHANGING

    @property
    def full_arrivals(self) -> int:
        """And the thread that expects what is sent."""
        return super().full_arrivals + (self.sent_bytes > 0)

    @property
    def reader_fences(self) -> bool:                                                            # type: ignore[override]
        """What is sent arrives by the way of threads, and no thread of this block has written it."""
        return self.sent_bytes > 0

    @classmethod
    def of(cls, spec: Sm90Spec) -> RewriteProducer:
        """A team has a stage on its way and one in work, and the consumers have two: from six stages on two teams work."""
        transposes = any(isinstance(x.route, Transpose) for x in (spec.a, spec.b))
        teams = 2 if spec.stages >= 6 and not transposes else 1
        sent = sum(x.nbytes - x.route.brought_bytes(x) for x in (spec.a, spec.b) if isinstance(x.route, PartRewrite))
        return cls(spec.producer_warps // teams, teams, spec.tma_bytes, transposes=transposes, sent_bytes=sent)

    def run(self, spec: Any, inputs: Inputs, rank: int, shape: Any) -> None:
        """The state says whether there is a stage that this team has yet to rewrite, which one, and where its tiles lie."""
        zero = thread_index() * 0
        fill_stages(spec, inputs, rank, shape, (), (zero, (zero, zero, zero, zero, zero, zero)))

    def fill(self, spec: Sm90Spec, inputs: Inputs, slot: Slot, at: KTile, kept: Registers, state: Any) -> Any:
        """Start the copies of this stage, and rewrite the one that they were started for a turn ago. Consumers release a
        stage when they have the next: of two stages the last must be rewritten before the next can be asked for."""
        is_behind, brought = state
        if spec.stages <= 2:
            rewrite_last(spec, is_behind, brought, at.rank, at.shape)
        if thread_index() % (32 * self.warps) == 0:
            spec.pipeline.acquire(slot)
            spec.pipeline.expect_raw(slot, self.tma_bytes)
            if self.sent_bytes > 0:
                spec.pipeline.expect(slot, self.sent_bytes)
            start_copies(spec, inputs, spec.pipeline.raw(), slot, at)
        if spec.stages > 2:
            rewrite_last(spec, is_behind, brought, at.rank, at.shape)
        return 1, (slot.stage, slot.phase ^ 1, at.m, at.n, at.k, at.batch)

    def finish(self, spec: Sm90Spec, state: Any, shape: StackShape) -> None:
        is_behind, brought = state
        rewrite_last(spec, is_behind, brought, rank_of(spec), shape)


def rewrite_last(spec: Sm90Spec, is_behind: int, brought: tuple, rank: int, shape: StackShape) -> None:
    if is_behind == 1:
        stage, phase, m, n, k, batch = brought         # of the tile before this one perhaps, and of its product
        rewrite_stage(of_product(spec, batch), Slot(stage, phase), KTile(m, n, k, batch, rank, of_product(shape, batch)))


def rewrite_stage(spec: Any, slot: Slot, at: KTile) -> None:
    """Rewrite what TMA has brought."""
    warp = uniform(udiv(thread_index(), 32)) % spec.producer.warps
    spec.pipeline.wait_raw(slot)
    size, shape = spec.block.size, at.shape
    if at.m + size.M <= shape.M and at.n + size.N <= shape.N and at.k + size.K <= shape.K:
        spec.a.route.rewrite_inside(spec, spec.a, slot, at, warp)
        spec.b.route.rewrite_inside(spec, spec.b, slot, at, warp)
    else:
        spec.a.route.rewrite_edge(spec, spec.a, slot, at, warp)
        spec.b.route.rewrite_edge(spec, spec.b, slot, at, warp)
    spec.a.route.transpose(spec, spec.a, slot, at, warp)
    spec.b.route.transpose(spec, spec.b, slot, at, warp)
    fence_async()                                      # tensor cores read through another proxy than threads write
    spec.pipeline.commit(slot)


# --------------------------------------------------------------------------------------------------
# The route of an operand that a cluster's blocks share and that is rewritten: each block rewrites a part, for all of
# them.
#
# 1. TMA brings a block its own part of the tile alone (``raw``).
# 2. The block's producer warps rewrite the part where it lies, and send the same words to the other blocks (``st.async``).
# 3. ``full`` is complete when the block's threads have written their part, and the bytes of the others have come.
#
# What shared memory moves of a tile of B, beside what wgmma reads, in tiles: 3 where each block rewrites all of it (TMA
# writes it, threads read and write it), 2 where two blocks rewrite a half each, 1.5 where four do. It is no faster
# (docs/hopper.md). A block may send when its stage is empty, which all blocks of the cluster have said
# (`Pipeline.release`).

WORDS = np.dtype(np.uint32)
WORD, SENT = 4, 16                     # bytes of a word, and of a thread's store to another block at most


@dataclass(frozen=True)
class PartRewrite(Rewrite):
    """TMA brings the block's part as it is stored, and a team rewrites it, in place and in the other blocks."""

    @classmethod
    def of(cls, request: Request) -> PartRewrite:
        copy = TmaCopy.in_panels(request.operand, request.spec.cluster)
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
        return None if divides else "a part is not a whole number of the warps' tiles"

    def brought_bytes(self, operand: Operand) -> int:
        return operand.nbytes * self.tile.count // operand.tile.count

    def share(self, spec: Sm90Spec, operand: Operand, slot: Slot, at: KTile) -> RewriteShare:
        place, part = place_of(operand, at), spec.cluster.part(operand.k_axis, at.rank)
        i, j = place.i, place.j
        if operand.k_axis == 1:
            i += part * self.tile.size[0]
        else:
            j += part * self.tile.size[1]
        pointer = shared(operand.shared.dtype, begin_of(spec, operand, slot.stage, part))
        return RewriteShare(pointer, TileCoord(i, j, place.rows, place.columns), slot.stage, at.rank)

    def put(self, spec: Any, operand: Any, share: RewriteShare, tile: Any, words: tuple) -> None:
        put_words(operand, share.pointer, tile, words)
        if tile.count > operand.shared.chunk:
            each(send_chunk, split(words, SENT // WORD), spec, operand, share, tile)
        else:
            send(spec, operand, share, tile, words)

    def put_values(self, spec: Any, operand: Any, share: RewriteShare, tile: Any, values: tuple) -> None:
        self.put(spec, operand, share, tile, pack_words(values))

    def pass_on(self, spec: Sm90Spec, operand: Any, share: RewriteShare, warp: int) -> None:
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


def send_chunk(words: tuple, n: int, spec: Sm90Spec, operand: Operand, share: RewriteShare, tile: Tile) -> None:
    send(spec, operand, share, element_tile(tile, n * operand.shared.chunk), words)


def send(spec: Sm90Spec, operand: Any, share: RewriteShare, tile: Coord, words: tuple) -> None:
    """Send a chunk at most to the same place in the other blocks."""
    part = spec.cluster.part(operand.k_axis, share.rank)
    at = operand.shared.position(tile.index, operand.leading()) * operand.shared.itemsize
    pointer = shared(WORDS, begin_of(spec, operand, share.stage, part))
    for n in range(1, operand.tile.count // operand.route.tile.count):
        store_async(pointer, udiv(at, WORD), words, spec.pipeline.full(), share.stage,
                    spec.cluster.peer(operand.k_axis, share.rank, n))


# --------------------------------------------------------------------------------------------------
# The route of numbers of several parts that lie side by side in memory (`Interleaved`): TMA, then planes.
#
# Tensor cores want planes, and TMA does not de-interleave. So it brings a stage's numbers as they are, some stages ahead,
# into the very place of their planes; the producer's warps read them all, meet, and write them back part by part:
#
# | a stage is | by | barrier |
# |---|---|---|
# | empty | the consumers, which have read it | ``empty[stage]`` |
# | raw | TMA, which the producer's first thread starts | ``raw[stage]`` |
# | full | the producer's warps | ``full[stage]`` |
#
# Global memory's latency is TMA's affair, and warps wait for shared memory only. Where both operands are split, half of
# the warps take A and half B, each at their own pace; or all take B, and the consumers de-interleave A in registers
# (`gemmkit.kernels.sm90.mainloop`). A transform is applied on the way.

SPLITTING: Registers = {**WORKING, (1, 2): (120, 192)}


@dataclass(frozen=True)
class Deinterleave(Tma):
    """TMA brings numbers as they lie in memory, and ``warps`` warps split them into planes, in place."""

    @classmethod
    def of(cls, request: Request) -> Deinterleave:
        operand = request.operand
        return cls(TmaCopy.in_panels(operand, request.spec.cluster) if operand.in_panels else TmaCopy.whole(operand))

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        layout, shared = request.operand.layout, request.operand.shared
        if not hasattr(shared, "plane"):
            return "it is not multiplied as planes"
        if not layout.is_plain or layout.axis != shared.axis:
            return "its numbers do not lie side by side along the planes' lines"
        if not request.spec.cluster.is_single:
            return "the blocks of a cluster would each have a part of it"
        return request.why_no_tma(shared.axis)

    @classmethod
    def goes_with(cls, other: type[Route]) -> bool:
        return other in (Tma, Deinterleave)

    def split(self, spec: Sm90Spec, operand: Operand, slot: Slot, at: KTile, team: int) -> None:
        """A team reads all numbers of a tile, and writes their parts over them."""
        byte = slot.stage * spec.stage_bytes + operand.offset
        place = place_of(operand, at)
        warp = uniform(udiv(thread_index(), 32)) % operand.warps
        held = registers(operand.words, operand.shares)
        warp_tiles = parallelise(operand.tile, operand.warp, warp, operand.warps)
        for i in range(len(warp_tiles)):
            thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
            for j in range(len(thread_tiles)):
                if operand.in_panels:
                    held[i * len(thread_tiles) + j] = load_chunks(operand, byte, thread_tiles[j])
                else:
                    held[i * len(thread_tiles) + j] = load_line(operand, byte, thread_tiles[j])
        named_barrier(spec.producer.barrier + team, 32 * operand.warps)
        pointer = shared(operand.shared.dtype, byte)
        # What is out of range is zeros, as TMA brings it; but a transform may make something of them.
        if operand.to_shared.is_identity or (place.i + operand.tile.size[0] <= place.rows
                                             and place.j + operand.tile.size[1] <= place.columns):
            put_held(operand, held, pointer, place, warp)
        else:
            put_clipped(operand, held, pointer, place, spec.operator.identity, warp)


def load_line(operand: Operand, byte: int, tile: Tile) -> tuple:
    """A thread's numbers, in words, of a tile that is as it was in global memory, without gaps."""
    axis = operand.plane.axis
    words = (tile.index[1 - axis] * operand.tile.size[axis] + tile.index[axis]) * operand.words.count // tile.count
    return load_shared(shared(WORDS, byte), words, 0, operand.words.count)


def load_chunks(operand: Operand, byte: int, tile: Tile) -> tuple:
    """The same of a tile of B that lies in swizzled panels: a line along K of several chunks of 16 bytes."""
    return join(generate(operand.words.count // 4, load_chunk, operand, byte, tile))


def load_chunk(n: int, operand: Any, byte: int, tile: Any) -> tuple:
    """Four numbers of 4 bytes."""
    chunk = tile.index[0] + 4 * n, tile.index[1]
    leading = operand.numbers.leading(operand.tile.size)
    return load_shared(shared(WORDS, byte), operand.numbers.position(chunk, leading), 0, 4)


def put_clipped(operand: Any, held: Any, pointer: SharedPointer, place: TileCoord, nothing: Numeric, warp: int) -> None:
    """The parts of transformed numbers, ``nothing`` for those beyond the end."""
    warp_tiles = parallelise(operand.tile, operand.warp, warp, operand.warps)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], operand.thread, lane_index(), 32, operand.order)
        for j in range(len(thread_tiles)):
            tile = translate(thread_tiles[j], place.i, place.j)
            values = unpack_words(operand.layout.dtype, held[i * len(thread_tiles) + j])
            values = transform_within(operand.to_shared, values, tile, place.rows, place.columns)
            values = convert_all(operand.shared.dtype, values)
            put_elements(operand, pointer, thread_tiles[j], apply(clipped, values, operand, tile, place, nothing))


def clipped(value: Numeric, n: int, operand: Operand, tile: Tile, place: TileCoord, nothing: Numeric) -> Any:
    """The value, or ``nothing`` where it is out of range."""
    if row_of(tile, n) < place.rows and column_of(tile, n) < place.columns:
        return value
    return convert(operand.shared.dtype, nothing)


# -- the producer -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class DeinterleaveProducer(Producer):
    """TMA brings both operands, ``ahead`` stages before warps split one of them or, each half of the warps, both."""

    ahead: int = 0
    splits_a: bool = False
    splits_b: bool = False
    rewrites = True
    barriers = 2                       # of those that split an operand: they have read what they will write over

    @property
    def registers(self) -> Registers:
        return SPLITTING

    @classmethod
    def of(cls, spec: Sm90Spec) -> DeinterleaveProducer:
        """Consumers release a stage when they have the next, so a copy can take the place of the last but one, and no later
        one; where there are enough stages, of one before."""
        a, b = (isinstance(operand.route, Deinterleave) for operand in (spec.a, spec.b))
        ahead = min(spec.stages - 2, max(1, spec.stages - 3))
        return cls(spec.producer_warps, 1, spec.tma_bytes, ahead=ahead, splits_a=a, splits_b=b)

    def run(self, spec: Any, inputs: Inputs, rank: int, shape: Any) -> None:
        """For every tile of D, for every k-tile: start a copy some stages ahead, and split what has come."""
        is_first = thread_index() == 0
        zero = thread_index() * 0
        tile, tiles, step = spec.scheduler.first(), spec.scheduler.count(shape), spec.scheduler.step()
        next_copy = tile, spec.scheduler.work(spec, tile, rank, shape), zero
        copy_slot = Slot(zero, zero + 1)
        if is_first:
            for _ in range(self.ahead):
                next_copy, copy_slot = start_next(spec, inputs, next_copy, copy_slot, tiles, step, shape)
        slot = Slot(zero, zero)
        while tile < tiles:
            work = spec.scheduler.work(spec, tile, rank, shape)
            own, sizes = of_product(spec, work.batch), of_product(shape, work.batch)
            block = work.k_tiles * 0
            while block < work.k_tiles:
                k = work.k_begin + block * spec.block.size.K
                if holds(spec, work.m, work.n, k):
                    if is_first:
                        next_copy, copy_slot = start_next(spec, inputs, next_copy, copy_slot, tiles, step, shape)
                    spec.pipeline.wait_raw(slot)
                    split_stage(own, slot, KTile(work.m, work.n, k, work.batch, rank, sizes))
                    fence_async()                      # tensor cores read through another proxy than threads write
                    spec.pipeline.commit(slot)
                    slot = spec.pipeline.advance(slot)
                block = rolled(block + 1)
            tile += step


def start_next(spec: Sm90Spec, inputs: Inputs, place: tuple, slot: Slot, tiles: int, step: int, shape: StackShape) -> tuple:
    """Copy the next k-tile to the next stage, if there is one left; returns the place in the iteration and the stage after.

    A place is a tile, its work and the number of the k-tile.
    """
    tile, work, block = place
    while tile < tiles and not is_filled(spec, work, block):
        block += 1
        if block >= work.k_tiles:
            tile += step
            work = spec.scheduler.work(spec, min(tile, tiles - 1), work.rank, shape)
            block = work.k_tiles * 0
    if tile < tiles:
        k = work.k_begin + block * spec.block.size.K
        spec.pipeline.acquire(slot)
        spec.pipeline.expect_raw(slot, spec.producer.tma_bytes)
        start_copies(spec, inputs, spec.pipeline.raw(), slot, KTile(work.m, work.n, k, work.batch, work.rank, shape))
        slot = spec.pipeline.advance(slot)
        block += 1
    return (tile, work, block), slot


def is_filled(spec: Sm90Spec, work: Work, block: int) -> bool:
    """Whether this k-tile is one, and the condition does not leave it out."""
    return block < work.k_tiles and holds(spec, work.m, work.n, work.k_begin + block * spec.block.size.K)


def split_stage(spec: Any, slot: Slot, at: KTile) -> None:
    if spec.producer.splits_a and spec.producer.splits_b:
        if uniform(udiv(thread_index(), 32)) < spec.a.warps:
            spec.a.route.split(spec, spec.a, slot, at, 0)
        else:
            spec.b.route.split(spec, spec.b, slot, at, 1)
    elif spec.producer.splits_a:
        spec.a.route.split(spec, spec.a, slot, at, 0)
    else:
        spec.b.route.split(spec, spec.b, slot, at, 0)
