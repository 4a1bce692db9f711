"""The route of numbers of several parts that lie side by side in memory (`Interleaved`): TMA, then planes.

Tensor cores want planes, and TMA does not de-interleave. So it brings a stage's numbers as they are, some stages ahead, into
the very place of their planes; the producer's warps read them all, meet, and write them back part by part:

| a stage is | by | barrier |
|---|---|---|
| empty | the consumers, which have read it | ``empty[stage]`` |
| raw | TMA, which the producer's first thread starts | ``raw[stage]`` |
| full | the producer's warps | ``full[stage]`` |

Global memory's latency is TMA's affair, and warps wait for shared memory only. Where both operands are split, half of the
warps take A and half B, each at their own pace; or all take B, and the consumers de-interleave A in registers
(`gemmkit.kernels.sm90.fragments`). A transform is applied on the way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.component_products import of_product
from gemmkit.kernels.common.elements import column_of, row_of, transform_within
from gemmkit.kernels.common.k_tiles import holds
from gemmkit.kernels.common.operand import Route
from gemmkit.kernels.common.tile_copy import put_elements
from gemmkit.kernels.common.work import Inputs, KTile, Place, Slot, Work
from gemmkit.kernels.sm90.producer import WORKING, Producer, Registers, place_of, start_copies
from gemmkit.kernels.sm90.routes.request import Request
from gemmkit.kernels.sm90.routes.staged import put_held
from gemmkit.kernels.sm90.routes.tma import Copy, Tma
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import join
from gemmkit.lang.registers import apply, generate, registers
from gemmkit.lang.values import convert, convert_all
from gemmkit.ptx.memory import load_shared, shared
from gemmkit.ptx.special import lane_index, rolled, thread_index, udiv, uniform
from gemmkit.ptx.warpgroup import fence_async, named_barrier
from gemmkit.ptx.words import unpack_words
from gemmkit.tiling import parallelise, translate

U32 = np.dtype(np.uint32)
SPLITTING: Registers = {**WORKING, (1, 2): (120, 192)}


@dataclass(frozen=True)
class Deinterleave(Tma):
    """TMA brings numbers as they lie in memory, and ``warps`` warps split them into planes, in place."""

    @classmethod
    def of(cls, request: Request) -> Deinterleave:
        operand = request.operand
        return cls(Copy.in_panels(operand, request.spec.cluster) if operand.in_panels else Copy.whole(operand))

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

    def split(self, spec: Any, operand: Any, slot: Slot, at: KTile, team: int) -> None:
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


def load_line(operand: Any, byte: int, tile: Any) -> tuple:
    """A thread's numbers, in words, of a tile that is as it was in global memory, without gaps."""
    axis = operand.plane.axis
    words = (tile.index[1 - axis] * operand.tile.size[axis] + tile.index[axis]) * operand.words.count // tile.count
    return load_shared(shared(U32, byte), words, 0, operand.words.count)


def load_chunks(operand: Any, byte: int, tile: Any) -> tuple:
    """The same of a tile of B that lies in swizzled panels: a line along K of several chunks of 16 bytes."""
    return join(generate(operand.words.count // 4, load_chunk, operand, byte, tile))


def load_chunk(n: int, operand: Any, byte: int, tile: Any) -> tuple:
    """Four numbers of 4 bytes."""
    chunk = tile.index[0] + 4 * n, tile.index[1]
    return load_shared(shared(U32, byte), operand.numbers.position(chunk, operand.numbers.leading(operand.tile.size)), 0, 4)


def put_clipped(operand: Any, held: Any, pointer: Any, place: Place, nothing: Any, warp: int) -> None:
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


def clipped(value: Any, n: int, operand: Any, tile: Any, place: Place, nothing: Any) -> Any:
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
    def of(cls, spec: Any) -> DeinterleaveProducer:
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


def start_next(spec: Any, inputs: Inputs, place: tuple, slot: Slot, tiles: int, step: int, shape: Any) -> tuple:
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


def is_filled(spec: Any, work: Work, block: int) -> bool:
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
