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
from typing import Any, NamedTuple

from gemmkit.component_products import of_product
from gemmkit.kernels.common.elements import column_of, row_of, transform_element_into, transform_into
from gemmkit.kernels.common.operand import Operand, Route
from gemmkit.kernels.common.tile_copy import put_elements, put_words
from gemmkit.kernels.common.work import Inputs, KTile, Place, Slot
from gemmkit.kernels.sm90.producer import (
    WORKING,
    Producer,
    Registers,
    fill_stages,
    place_of,
    rank_of,
    stage_of,
    start_copies,
)
from gemmkit.kernels.sm90.routes.request import Request
from gemmkit.kernels.sm90.routes.tma import Copy, Tma
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.pairs import is_pairwise, transform_pairs
from gemmkit.lang.registers import apply, registers
from gemmkit.lang.values import convert
from gemmkit.ptx.special import lane_index, rolled, thread_index, udiv, uniform
from gemmkit.ptx.warpgroup import fence_async, named_barrier
from gemmkit.ptx.words import pack_words, unpack_words
from gemmkit.tiling import Tile, parallelise, translate

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
        return cls(Copy.in_panels(request.operand, request.spec.cluster), request.operand.tile, request.operand.warp)

    @classmethod
    def refuses(cls, request: Request) -> str | None:
        why = cls.refuses_array(request)
        if why is not None:
            return why
        if hasattr(request.operand.shared, "plane"):
            return "elements of several parts are not rewritten in place"
        if not request.moves_lines:
            return "a thread's tile is no line of words"
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

    def rewrite_inside(self, spec: Any, operand: Any, slot: Slot, at: KTile, warp: int) -> None:
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
            end = Place(place.i, place.j, place.i + rows, place.j + columns)
            transform_masked(spec, operand, share, end, warp)

    def rewrite_edge(self, spec: Any, operand: Any, slot: Slot, at: KTile, warp: int) -> None:
        """TMA has put zeros beyond the edge, and the product must meet the identity."""
        share = self.share(spec, operand, slot, at)
        transform_masked(spec, operand, share, share.place, warp)

    def share(self, spec: Any, operand: Any, slot: Slot, at: KTile) -> Share:
        """What the block rewrites of a stage."""
        return Share(stage_of(spec, operand, slot), place_of(operand, at), slot.stage, at.rank)

    def put(self, spec: Any, operand: Any, share: Share, tile: Any, words: tuple) -> None:
        put_words(operand, share.pointer, tile, words)

    def put_values(self, spec: Any, operand: Any, share: Share, tile: Any, values: tuple) -> None:
        put_elements(operand, share.pointer, tile, values)

    def pass_on(self, spec: Any, operand: Any, share: Share, warp: int) -> None:
        """What is to be done with a tile that is as it is to be: nothing."""


class Share(NamedTuple):
    """What a block rewrites of a stage's tile: where it is in shared memory, its place in the matrix, the block's rank."""

    pointer: Any
    place: Place
    stage: int
    rank: int


def transform_in_batches(spec: Any, operand: Any, share: Share, warp: int) -> None:
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


def put_rewritten(spec: Any, operand: Any, share: Share, tile: Any, words: tuple) -> None:
    if is_pairwise(operand.to_shared, operand.shared.dtype):
        operand.route.put(spec, operand, share, tile, transform_pairs(operand.to_shared, operand.shared.dtype, words))
    else:
        place = share.place
        values = transform_into(operand, unpack_words(operand.shared.dtype, words), translate(tile, place.i, place.j))
        operand.route.put_values(spec, operand, share, tile, values)


def transform_masked(spec: Any, operand: Any, share: Share, place: Place, warp: int) -> None:
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


def transform_element_masked(x: Any, n: int, operand: Any, tile: Any, place: Place, nothing: Any) -> Any:
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
            return "a thread's tile is no line of words"
        k_axis = operand.k_axis
        depth, across = operand.tile.extents[k_axis], operand.tile.extents[1 - k_axis]
        line, held = shared.width // shared.itemsize, across * depth * shared.itemsize // (128 * spec.producer_warps)
        if not request.divides or across % line or held > TRANSPOSED:
            return f"its lines do not divide among the producer's threads, or {TRANSPOSED} registers do not hold them"
        return "the blocks of a cluster would each have a part of it" if spec.cluster.shares else None

    def rewrite_inside(self, spec: Any, operand: Any, slot: Slot, at: KTile, warp: int) -> None:
        """See `transpose`."""

    def rewrite_edge(self, spec: Any, operand: Any, slot: Slot, at: KTile, warp: int) -> None:
        """See `transpose`."""

    def transpose(self, spec: Any, operand: Any, slot: Slot, at: KTile, warp: int) -> None:
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
    def of(cls, spec: Any) -> RewriteProducer:
        """A team has a stage on its way and one in work, and the consumers have two: from six stages on two teams work."""
        transposes = any(isinstance(x.route, Transpose) for x in (spec.a, spec.b))
        teams = 2 if spec.stages >= 6 and not transposes else 1
        sent = sum(x.nbytes - x.route.brought_bytes(x) for x in (spec.a, spec.b))
        return cls(spec.producer_warps // teams, teams, spec.tma_bytes, transposes=transposes, sent_bytes=sent)

    def run(self, spec: Any, inputs: Inputs, rank: int, shape: Any) -> None:
        """The state says whether there is a stage that this team has yet to rewrite, which one, and where its tiles lie."""
        zero = thread_index() * 0
        fill_stages(spec, inputs, rank, shape, (), (zero, (zero, zero, zero, zero, zero, zero)))

    def fill(self, spec: Any, inputs: Inputs, slot: Slot, at: KTile, kept: Any, state: Any) -> Any:
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

    def finish(self, spec: Any, state: Any, shape: Any) -> None:
        is_behind, brought = state
        rewrite_last(spec, is_behind, brought, rank_of(spec), shape)


def rewrite_last(spec: Any, is_behind: int, brought: tuple, rank: int, shape: Any) -> None:
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
