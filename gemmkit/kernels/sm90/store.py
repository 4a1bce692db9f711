"""Step 3 of `warp_specialised`: stores, by which a consumer's sums become D in global memory.

A consumer's thread holds pairs of neighbours in a row (see `WgmmaSpec.c`). All functions of elements (the transforms of C
and D, and the epilogue) work on these pairs, with global coordinates. Then D leaves:

| store | how | where |
|---|---|---|
| `TmaStore` | through swizzled subtiles of shared memory, by TMA, which clips what is out of range | plain D |
| `VectorStore` | through subtiles of shared memory, which threads read in lines and store as vectors | runs in D |
| `InterleavedStore` | from the registers, in vectors | D's neighbours are eight columns apart, or a multiple |
| `SymmetricTmaStore` | as `TmaStore`; what is off the diagonal twice, once transposed | a symmetric D |
| `DirectStore` | from the registers, pair by pair | any layout; epilogues that store or write themselves |

`store_of` says which: TMA where it can, else the longest vectors. A folded product's leaves by any of them (`Folding`).
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.collectives.operand import Operand, delivered, transform_within, unit_of
from gemmkit.kernels.collectives.pipeline import SharedMemory
from gemmkit.kernels.collectives.scheduler import Outputs
from gemmkit.kernels.sm90.cross_lane import add_c_masked, finish_pair_by_element, finish_together, store_together
from gemmkit.lang.aggregates import convert_all
from gemmkit.lang.component_products import with_number
from gemmkit.lang.components import dataclass
from gemmkit.lang.registers import apply, deal, each, generate, join, split
from gemmkit.layouts import Folded, Matricised, Plain, RowMajor, Symmetric
from gemmkit.layouts.joined import OCTET
from gemmkit.layouts.plain import Swizzled
from gemmkit.ptx.memory import shared
from gemmkit.ptx.mma import by_columns, by_rows, stmatrix
from gemmkit.ptx.special import lane_index, thread_index, udiv
from gemmkit.ptx.tma import tma_commit, tma_store, tma_wait, tma_wait_read
from gemmkit.ptx.wgmma import fence_async, named_barrier
from gemmkit.runtime.arrays import ArrayInfo, alignment, unit_axis
from gemmkit.runtime.tensor_maps import TensorMapSpec, why_not
from gemmkit.tiling import Tile, parallelise, translate

if TYPE_CHECKING:
    from gemmkit.emulator.copies import EmulatedTensorMap
    from gemmkit.kernels.sm90.family import Sm90Spec

BUFFERS = 2                            # subtiles of D that a warpgroup has on their way out


class ConsumerPart(NamedTuple):
    """A consumer's part of a tile of D: the consumer, its first row and column, a bit that flips with each of its tiles."""

    group: Any
    m: Any
    n: Any
    turn: Any


@dataclass(frozen=True)
class TileStore(Component):
    """How D leaves. ``barrier`` is the first of the consumers' named barriers."""

    barrier: int = 0
    uses_tma = False
    reads_ahead = False  # C, or what an epilogue reads beside D, comes by TMA (`gemmkit.kernels.sm90.epilogue_load`)

    @property
    def pair(self) -> Tile:
        """Two neighbours in a row: what a thread holds together of D."""
        return Tile(M=1, N=2)

    @property
    def single(self) -> Tile:
        return Tile(M=1, N=1)

    def placed(self, memory: SharedMemory) -> TileStore:
        """With barriers of its own, which it takes of the block's memory: none."""
        return self

    def initialise(self) -> None:
        """Called by one thread, before any other meets a barrier."""

    def begin(self, spec: Sm90Spec, map_c: EmulatedTensorMap, batch: int, part: ConsumerPart) -> None:
        """Before a tile is multiplied."""

    def run(self, spec: Sm90Spec, sums: tuple, outputs: Outputs, part: ConsumerPart) -> None:
        """All 64-row fragments of a consumer."""
        each(store_fragment, sums, spec, outputs, part)

    def fragment(self, sums: tuple, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        """The ``i``-th fragment; ``part`` is where it begins."""

    def leave_out(self, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        """In place of a fragment that lies wholly out of range."""

    def finish(self) -> None:
        """Before the block ends."""


def store_fragment(sums: tuple, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
    """Where values are finished, a fragment wholly out of range is left out. Its nearest elements in range are other
    consumers', which may be storing them, and C or an array that the epilogue reads may be D."""
    place = ConsumerPart(part.group, part.m + i * 64, part.n, part.turn)
    if not spec.has_epilogue:
        spec.store.fragment(sums, i, spec, outputs, place)
    elif place.m < outputs.shape.M and place.n < outputs.shape.N:
        spec.store.fragment(sums, i, spec, outputs, place)
    else:
        spec.store.leave_out(i, spec, outputs, place)


def finished(sums: tuple, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> tuple:
    """A fragment's values as D has them. All are finished before the first goes, so that what is loaded for them (C, a bias)
    is on its way at once."""
    values = sums
    if spec.epilogue.finishes_blocks:
        values = finish_together(sums, i, spec, outputs, part.m + own_row(), part.n + own_column(), part)
    elif spec.has_epilogue:
        values = join(apply(finish_pair_by_element, split(sums, 2), spec, outputs,
                            part.m + own_row(), part.n + own_column()))
    return convert_all(spec.d.layout.dtype, delivered(spec, values))


def own_row() -> int:
    """The row of this thread's first pair in a fragment; the next pair is 8 rows on."""
    return udiv(thread_index() % 128, 32) * 16 + udiv(lane_index(), 4)


def own_column() -> int:
    """The column of this thread's first pair; every other pair is 8 columns on."""
    return lane_index() % 4 * 2


# -- through shared memory --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class SubtileStore(TileStore):
    """D goes through shared memory in swizzled subtiles of 64 rows by ``columns``, of which each of ``consumers`` has two in
    turn, from ``offset`` on. ``count`` of them make a fragment's columns that this block finishes, ``fragments`` fragments a
    tile. ``lines`` are those of the swizzled layout, of elements of ``itemsize`` bytes.
    """

    offset: int = 0
    consumers: int = 1
    columns: int = 8
    lines: int = 64
    count: int = 1
    fragments: int = 1
    itemsize: int = 2

    @cached_property
    def nbytes(self) -> int:
        """Of shared memory."""
        return BUFFERS * self.consumers * self.elements * self.itemsize

    @cached_property
    def elements(self) -> int:
        """Of a subtile."""
        return 64 * self.columns

    @cached_property
    def pending(self) -> int:
        """How many subtiles may still be on their way out when a tile's first one is written: where a tile does not fill all
        buffers alike, that is the buffer of the last tile's last subtile."""
        return BUFFERS - 1 if self.fragments * self.count % BUFFERS == 0 else 0

    def fragment(self, sums: tuple, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        values = finished(sums, i, spec, outputs, part)
        each(store_subtile, split(values, self.columns // 2), i, spec, outputs, part)

    def position(self, p: int, i: int, group: int) -> int:
        """The element where the ``p``-th subtile of the ``i``-th fragment begins."""
        return (group * BUFFERS + (i * self.count + p) % BUFFERS) * self.elements

    def subtile(self, values: tuple, p: int, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        """Store a subtile: 64 rows of ``columns`` columns."""


def store_subtile(values: tuple, p: int, i: int, spec: Any, outputs: Outputs, part: ConsumerPart) -> None:
    spec.store.subtile(values, p, i, spec, outputs, part)


@dataclass(frozen=True)
class TmaStore(SubtileStore):
    """TMA stores the subtiles. It clips them to D's bounds."""

    uses_tma = True

    def map_spec(self, operand: Operand, info: ArrayInfo) -> tuple[int, TensorMapSpec]:
        """The axis of the array along which elements are contiguous, and the tensor map's box."""
        layout, before = operand.shared, len(info.shape) - 2          # dimensions of a stack
        box = (layout.line, self.columns if layout.axis == 0 else 64)
        return layout.axis + before, TensorMapSpec(info.dtype, box + (1,) * before, layout.width)

    def subtile(self, values: tuple, p: int, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        self.await_buffer(i + p, part)
        self.send(values, p, i, spec, outputs, part)

    def await_buffer(self, number: int, part: ConsumerPart) -> None:
        """TMA has read what was in the buffer that the tile's subtile of this number is written to."""
        if thread_index() % 128 == 0:
            if number == 0:
                tma_wait_read(self.pending)
            else:
                tma_wait_read(BUFFERS - 1)
        named_barrier(self.barrier + part.group, 128)

    def send(self, values: tuple, p: int, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        """Write a subtile, and have TMA store it."""
        position = self.position(p, i, part.group)
        pointer = shared(spec.d.shared.dtype, self.offset)
        put_subtile(values, spec, pointer, position)
        fence_async()
        named_barrier(self.barrier + part.group, 128)
        if thread_index() % 128 == 0:
            matrix = spec.scheduler.stack.d.coordinates(outputs.batch)
            m, n = part.m, part.n + p * self.columns
            if spec.d.shared.axis == 1:
                tma_store(outputs.map_d, join(((n, m), matrix)), pointer, position)
            else:                                      # lines are columns of D, in one panel of 64 elements or two of 32
                for i in range(64 // spec.d.shared.line):
                    at = position + i * self.columns * spec.d.shared.line
                    tma_store(outputs.map_d, join(((m + i * spec.d.shared.line, n), matrix)), pointer, at)
            tma_commit()

    def leave_out(self, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        """Its subtiles count as stored: how many may be on their way when a buffer is filled again is counted in them."""
        if thread_index() % 128 == 0:
            for _ in range(self.count):
                tma_commit()

    def finish(self) -> None:
        """Shared memory must last until TMA has read it."""
        if thread_index() % 128 == 0:
            tma_wait(0)


@dataclass(frozen=True)
class SymmetricTmaStore(TmaStore):
    """TMA stores those of the square subtiles that lie within D's half, off the diagonal (`gemmkit.layouts.Symmetric`), and
    ``twice`` where D has both halves: as they are, and transposed, each from a buffer of its own. Threads store what the
    half has of subtiles on the diagonal from their registers: of N / 64 squared / 2 subtiles these are N / 64."""

    twice: bool = False

    @cached_property
    def pending(self) -> int:
        return BUFFERS - 1 if self.twice or self.fragments * self.count % BUFFERS == 0 else 0

    def position(self, p: int, i: int, group: int) -> int:
        if self.twice:
            return group * BUFFERS * self.elements
        return (group * BUFFERS + (i * self.count + p) % BUFFERS) * self.elements

    def subtile(self, values: tuple, p: int, i: int, spec: Any, outputs: Outputs, part: ConsumerPart) -> None:
        row, column = part.m, part.n + p * self.columns
        if spec.d.layout.holds(row, column, 64, self.columns, 1):
            self.await_buffer(i + p, part)
            self.send(values, p, i, spec, outputs, part)
            if self.twice:
                self.await_buffer(i + p, part)
                self.send_transposed(values, p, spec, outputs, part)
        else:
            if row == column:
                each(store_pair_of_half, split(values, 2), spec, outputs, row + own_row(), column + own_column())
            self.pass_over()

    def send_transposed(self, values: tuple, p: int, spec: Any, outputs: Outputs, part: ConsumerPart) -> None:
        """The subtile's columns are lines of the other half."""
        position = (part.group * BUFFERS + 1) * self.elements
        pointer = shared(spec.d.shared.dtype, self.offset)
        each(put_transposed, split(values, 8), spec, pointer, position)
        fence_async()
        named_barrier(self.barrier + part.group, 128)
        if thread_index() % 128 == 0:
            matrix = spec.scheduler.stack.d.coordinates(outputs.batch)
            tma_store(outputs.map_d, join(((part.m, part.n + p * self.columns), matrix)), pointer, position)
            tma_commit()

    def pass_over(self) -> None:
        """A subtile that TMA does not store counts as stored."""
        if thread_index() % 128 == 0:
            tma_commit()
            if self.twice:
                tma_commit()

    def leave_out(self, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        for _ in range(self.count):
            self.pass_over()


def put_transposed(values: tuple, n: int, spec: Any, pointer: Any, position: int) -> None:
    """`put_matrix`, where a row of D is a column of the subtile."""
    i, j = by_columns(2, 8, 8)(lane_index())
    row = udiv(thread_index() % 128, 32) * 16 + i
    stmatrix(pointer, position, spec.d.shared.position((n * 16 + j, row), 64), values, True)


def store_pair_of_half(pair: tuple, n: int, spec: Any, outputs: Outputs, row: int, column: int) -> None:
    each(store_one_of_half, split(pair, 1), spec, outputs, row + n % 2 * 8, column + n // 2 * 8)


def store_one_of_half(one: tuple, n: int, spec: Any, outputs: Outputs, row: int, column: int) -> None:
    if row < outputs.shape.M and column + n < outputs.shape.N:
        spec.d.layout.store_element(outputs.d, row, column + n, one[0], outputs.shape)


@dataclass(frozen=True)
class VectorStore(SubtileStore):
    """Threads read the subtiles in lines and store vectors of ``run`` elements, each wholly in or out of bounds.

    Rows of a subtile that are ``apart`` rows from each other lie next to each other in memory. With ``down`` a warp stores
    down rows, since these are nearer to each other than a row's own pieces.
    """

    run_length: int = 1
    apart: int = 1
    down: bool = False
    axis: int = 1                      # along which D is contiguous

    @cached_property
    def tile(self) -> Tile:
        return Tile(M=64, N=self.columns)

    @cached_property
    def thread(self) -> Tile:
        """What a thread stores at a time."""
        return Tile(M=1, N=self.run_length) if self.axis == 1 else Tile(M=self.run_length, N=1)

    @cached_property
    def warp(self) -> Tile:
        """What a warp stores: as long lines as there are, or (``down``) pieces of as many lines."""
        along, across = self.tile.extents[self.axis], self.tile.extents[1 - self.axis]
        lanes = 1 if self.down else math.gcd(32, along // self.run_length)
        extents = lanes * self.run_length, math.gcd(32 // lanes, across)
        return Tile(M=extents[self.axis], N=extents[1 - self.axis])

    @cached_property
    def order(self) -> str:
        return "row" if self.axis == 1 else "column"

    @cached_property
    def rounds(self) -> int:
        """Rows of a subtile that are neighbours in memory."""
        return 64 // self.apart

    def subtile(self, values: tuple, p: int, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        """The two buffers alternate; the named barrier guarantees that a buffer is refilled only after every thread has
        finished storing from it."""
        position = self.position(p, i, part.group)
        if i + p == 0:
            named_barrier(self.barrier + part.group, 128)   # the last tile's subtiles
        put_subtile(values, spec, shared(spec.d.shared.dtype, self.offset), position)
        named_barrier(self.barrier + part.group, 128)
        store_lines(spec, outputs, shared(spec.d.shared.dtype, self.offset + position * self.itemsize), part.m,
                    part.n + p * self.columns)


def put_subtile(values: tuple, spec: Any, pointer: Any, position: int) -> None:
    if spec.d.shared.itemsize == 2:                    # 16 columns of 16-bit elements at a time, or all 8
        each(put_matrix, split(values, min(8, spec.store.columns // 2)), spec, pointer, position)
    else:
        each(put_pair, split(values, 2), spec,
             shared(spec.d.shared.dtype, spec.store.offset + position * spec.store.itemsize))


def put_matrix(values: tuple, n: int, spec: Any, pointer: Any, position: int) -> None:
    """Four 8 x 8 matrices (or two of 8 columns): a lane addresses a line of the matrix of its quarter."""
    row = udiv(thread_index() % 128, 32) * 16
    if spec.d.shared.axis == 1:
        i, j = by_rows(16, 8)(lane_index())
        stmatrix(pointer, position, spec.d.shared.position((row + i, n * 16 + j), 64), values, False)
    else:                                              # each matrix transposed: its lines are columns of D
        i, j = by_columns(2, 8, 8)(lane_index())
        stmatrix(pointer, position, spec.d.shared.position((row + i, n * 16 + j), spec.store.lines), values, True)


def put_pair(pair: tuple, n: int, spec: Any, pointer: Any) -> None:
    spec.d.shared.store_shared(pointer, translate(spec.store.pair, own_row() + n % 2 * 8, own_column() + n // 2 * 8), pair,
                               spec.store.lines)


def store_lines(spec: Any, outputs: Outputs, subtile: Any, m: int, n: int) -> None:
    """Each thread's lines are wholly in range, or wholly out."""
    warp_tiles = parallelise(spec.store.tile, spec.store.warp, udiv(thread_index() % 128, 32), 4)
    for i in range(len(warp_tiles)):
        thread_tiles = parallelise(warp_tiles[i], spec.store.thread, lane_index(), 32, spec.store.order)
        for j in range(len(thread_tiles)):
            tile = spread(thread_tiles[j], spec) if spec.store.apart > 1 else thread_tiles[j]
            place = translate(tile, m, n)
            if place.index[0] < outputs.shape.M and place.index[1] < outputs.shape.N:
                values = spec.d.shared.load_shared(subtile, tile, spec.store.lines)
                spec.d.layout.store(outputs.d, place, values, outputs.shape)


def spread(tile: Any, spec: Any) -> Any:
    """A tile in another row of the subtile, so that rows that are neighbours in memory come one after the other."""
    row = tile.index[0]
    return translate(tile, row % spec.store.rounds * spec.store.apart + udiv(row, spec.store.rounds) - row, 0)


# -- from the registers -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class DirectStore(TileStore):
    """Threads store pairs from their registers."""

    def fragment(self, sums: tuple, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        if spec.epilogue.finishes_blocks:
            store_together(sums, i, spec, outputs, part.m + own_row(), part.n + own_column(), part)
        else:
            each(store_pair, split(sums, 2), spec, outputs, part.m + own_row(), part.n + own_column())


def store_pair(pair: tuple, n: int, spec: Sm90Spec, outputs: Outputs, row: int, column: int) -> None:
    """The pair may be partly or wholly out of range: `read_tile` and the epilogue mask it."""
    place, shape = translate(spec.store.pair, row + n % 2 * 8, column + n // 2 * 8), outputs.shape
    values = add_c_masked(pair, spec, outputs, place) if spec.has_c else pair
    values = transform_within(spec.d.to_registers, values, place, shape.M, shape.N)
    values = transform_within(spec.d.to_shared, values, place, shape.M, shape.N)
    spec.epilogue.tile(spec, outputs.d, place, values, shape)


# -- a D of interleaved vectors ---------------------------------------------------------------------------------------------
#
# The store of a tensor whose neighbours in memory are ``comb`` columns apart in D: from the registers, in vectors.
#
# Of an octet of columns a consumer's thread has two, in each of its rows the same two. Columns that are a multiple of eight
# apart are therefore one thread's, and with a comb of 8 or 16 the neighbours of one vector: nothing goes through shared
# memory, and no thread waits for another.

WIDE = 16                              # bytes of the widest store


@dataclass(frozen=True)
class InterleavedStore(TileStore):
    """Threads store ``length`` neighbours of one of ``comb`` vectors at a time, wholly in or out of bounds."""

    comb: int = OCTET
    length: int = 1

    @classmethod
    def of(cls, spec: Sm90Spec, info: ArrayInfo | None, extents: tuple[int, int], barrier: int) -> InterleavedStore | None:
        """None where D is no such tensor, or has vectors as long along the lines of a subtile."""
        layout: Any = spec.d.layout
        if info is None or not isinstance(layout, Matricised) or layout.axis != 1 or layout.comb % OCTET:
            return None
        others = vector_length(spec, info, extents) // layout.comb    # none where the epilogue stores D itself
        width, size = spec.block.size.N // spec.exchange.slices, info.dtype.itemsize
        if width % layout.comb or extents[1] % layout.comb:
            return None
        length = math.gcd(WIDE // size, layout.vector, width // layout.comb, alignment(info) // size)
        return cls(barrier, layout.comb, length) if length > others > 0 else None

    def fragment(self, sums: tuple, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        """A thread's values are pairs, of two rows in turn: it stores those of one row and vector together."""
        values = finished(sums, i, spec, outputs, part)
        each(store_vector, deal(values, self.comb // 2), spec, outputs, part.m + own_row(), part.n + own_column())


def store_vector(vector: tuple, n: int, spec: Any, outputs: Outputs, row: int, column: int) -> None:
    each(store_neighbours, split(vector, spec.store.length), spec, outputs, row + udiv(n, 2) % 2 * 8,
         column + n % 2 + udiv(n, 4) * OCTET)


def store_neighbours(values: tuple, n: int, spec: Any, outputs: Outputs, row: int, column: int) -> None:
    at = column + n * (spec.store.comb * spec.store.length)
    if row < outputs.shape.M and at < outputs.shape.N:
        spec.d.layout.store_neighbours(outputs.d, row, at, values)


# -- folded products --------------------------------------------------------------------------------------------------
#
# Stores of folded products in `warp_specialised`: a consumer's sums of several parts become one fragment, which leaves as
# any other.
#
# A fragment of wgmma is octets of columns, and a thread has two columns of each. Interleaved columns
# (`gemmkit.layouts.ColumnInterleaved`) are the parts' in turn, or all of one part before those of the next where TMA brings
# them (`gemmkit.kernels.sm90.routes`): either way a thread folds values of its own. The folded values lie in registers
# as the accumulators of a product with a narrower tile do: the stores of `gemmkit.kernels.sm90.store` take them, at D's
# coordinates.

HELD = 4                               # values of a thread in an octet of columns: two rows of two


@dataclass(frozen=True)
class Folding(TileStore):
    """A store whose fragments are folded first."""

    def run(self, spec: Sm90Spec, sums: tuple, outputs: Outputs, part: ConsumerPart) -> None:
        shape = with_number(outputs.shape, "N", spec.d.layout.columns)
        own = Outputs(outputs.c, outputs.d, outputs.map_c, outputs.map_d, outputs.batch, shape)
        place = ConsumerPart(part.group, part.m, udiv(part.n, spec.b.layout.slots), part.turn)
        each(store_fragment, apply(fold_fragment, sums, spec, own, place), spec, own, place)


def fold_fragment(sums: tuple, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> tuple:
    """The ``i``-th fragment of D; ``part`` is where the first begins."""
    return join(generate(spec.folded_octets, fold_octets, split(sums, HELD), spec, outputs, part.m + i * 64 + own_row(),
                         part.n + own_column()))


def fold_octets(octet: int, sums: tuple, spec: Sm90Spec, outputs: Outputs, row: int, column: int) -> tuple:
    """A thread's values of an octet of D's columns, from those of the same octet of each part."""
    if spec.b.route.parts_apart:
        parts = generate(spec.b.layout.parts, lambda part: sums[part * spec.folded_octets + octet])
    else:
        parts = generate(spec.b.layout.parts, lambda part: sums[octet * spec.b.layout.slots + part])
    return generate(HELD, fold_sum, parts, spec, outputs, row, column + octet * OCTET)


def fold_sum(n: int, parts: tuple, spec: Any, outputs: Outputs, row: int, column: int) -> Any:
    """Beyond D's edge f gets the coordinates of the nearest element in range."""
    values = generate(spec.b.layout.parts, lambda part: parts[part][n])
    return spec.epilogue.fold(values, min(row + n // 2 * 8, outputs.shape.M - 1), min(column + n % 2, outputs.shape.N - 1))


@dataclass(frozen=True)
class FoldingTmaStore(Folding, TmaStore):
    """TMA stores the folded subtiles."""


@dataclass(frozen=True)
class FoldingVectorStore(Folding, VectorStore):
    """Threads store lines of the folded subtiles."""


@dataclass(frozen=True)
class FoldingDirectStore(Folding, DirectStore):
    """Threads store folded pairs from their registers."""


FOLDING: dict[type[TileStore], Any] = {TmaStore: FoldingTmaStore, VectorStore: FoldingVectorStore,
                                       DirectStore: FoldingDirectStore}


def store_for(spec: Any, info: ArrayInfo | None, extents: tuple[int, int], barrier: int) -> TileStore:
    """How D leaves: a folded one as that of a product with D's own columns and what follows the fold would."""
    if isinstance(spec.d.layout, Symmetric):
        return symmetric_store(spec, info, extents, barrier)
    if not isinstance(spec.d.layout, Folded):
        return InterleavedStore.of(spec, info, extents, barrier) or store_of(spec, info, extents, barrier)
    folded: Folded = spec.d.layout
    m, n, k = spec.block.extents
    alike = dataclasses.replace(spec, block=Tile(M=m, N=n // folded.folds, K=k), epilogue=spec.epilogue.then,
                                d=dataclasses.replace(spec.d, layout=folded.layout))
    store = store_of(alike, info, (extents[0], folded.finished_columns(extents[1])), barrier)
    if isinstance(store, SubtileStore) and alike.block.size.N // spec.exchange.slices % store.columns:
        store = DirectStore(barrier)                       # the columns that are left are fewer than a panel's
    return FOLDING[type(store)](**{field.name: getattr(store, field.name) for field in dataclasses.fields(store)})


def symmetric_store(spec: Any, info: ArrayInfo | None, extents: tuple[int, int], barrier: int) -> TileStore:
    """How a symmetric D leaves: by TMA where a whole one would, in square subtiles, which have the same box transposed."""
    store = store_of(dataclasses.replace(spec, d=dataclasses.replace(spec.d, layout=spec.d.layout.layout)), info, extents,
                     barrier)
    if type(store) is not TmaStore or spec.d.shared.axis != 1 or store.columns != 64 or store.itemsize != 2:
        return DirectStore(barrier)
    fields = {field.name: getattr(store, field.name) for field in dataclasses.fields(store)}
    return SymmetricTmaStore(**fields, twice=spec.d.layout.is_mirrored)


# -- which of them ----------------------------------------------------------------------------------------------------

CHUNK = 16                             # bytes that TMA moves together
SECTOR, LINE = 32, 128                 # bytes that memory moves together, and that a warp's access asks for together
APART = 2, 4, 8, 16, 32


def store_of(spec: Sm90Spec, info: ArrayInfo | None, extents: tuple[int, int], barrier: int) -> TileStore:
    """How D, a matrix of ``extents`` in the array ``info`` (None: one that suits TMA), leaves."""
    layout: Any = spec.d.shared
    if info is not None and refuses_tma(spec, info) is not None and vector_length(spec, info, extents) == 0:
        return DirectStore(barrier)
    width = spec.block.size.N // spec.exchange.slices    # of what this block finishes
    columns = int(layout.line) if layout.axis == 1 else math.gcd(width, min(64, LINE // layout.dtype.itemsize))
    fields = dict(consumers=spec.consumers, columns=columns, lines=columns if layout.vector_axis == 0 else 64,
                  count=width // columns, fragments=spec.fragments_m, itemsize=layout.dtype.itemsize)
    if info is None or refuses_tma(spec, info) is None:
        return TmaStore(barrier, **fields)
    apart, down = rows_apart(spec, info)
    return VectorStore(barrier, **fields, run_length=vector_length(spec, info, extents), apart=apart, down=down,
                       axis=layout.vector_axis)


def refuses_tma(spec: Sm90Spec, info: ArrayInfo) -> str | None:
    """Why TMA cannot store D. It clips to bounds, so the epilogue also runs on elements that are out of them: one with side
    outputs must not use TMA. It clips 16 bytes at a time: a line of another length would be overrun."""
    layout, shared = spec.d.layout, spec.d.shared
    if not isinstance(layout, Plain) or type(layout).store is not Plain.store or layout.axis != shared.axis:
        return "it is not a plain matrix"
    if spec.epilogue.stores_itself or spec.epilogue.writes:
        return "the epilogue stores or writes itself"
    if info.shape[layout.axis] * info.dtype.itemsize % CHUNK:
        return f"a line is not a multiple of {CHUNK} bytes"
    return why_not(info, layout.axis)


def vector_length(spec: Sm90Spec, info: ArrayInfo, extents: tuple[int, int]) -> int:
    """Vector length of D's global stores in elements (a vector is wholly in or out of bounds); 0 where the epilogue stores D
    itself, or no lines are to be had. Single elements pay, too: lanes then store neighbours (`stored_by_neighbours`)."""
    layout, shared = spec.d.layout, spec.d.shared
    if (not layout.is_separable or layout.vector_axis != shared.vector_axis or spec.epilogue.stores_itself
            or spec.epilogue.writes or unit_axis(info) != unit_of(layout, info)):
        return 0
    extent = 64 if shared.axis == 0 else shared.line
    line = math.gcd(layout.run, extent, extents[shared.axis]) // layout.comb
    nbytes = math.gcd(CHUNK, line * shared.itemsize, alignment(info))
    return int(layout.comb * nbytes // shared.itemsize) if nbytes >= shared.itemsize else 0


def rows_apart(spec: Sm90Spec, info: ArrayInfo) -> tuple[int, bool]:
    """How far apart rows of a subtile of a tensor are that lie next to each other in memory, and whether they are nearer to
    each other than a row's own pieces."""
    layout = spec.d.layout
    if not isinstance(layout, Matricised) or layout.vector_axis != 1:
        return 1, False
    size, depth, rows = info.dtype.itemsize, layout.rows.depth, layout.rows.extents()
    is_cut = depth > 1 and rows[0] in APART and 0 < info.strides[1] < info.strides[0]
    is_piece = layout.columns.depth > 1 and layout.columns.extents()[0] * size < SECTOR
    return rows[0] if is_cut else 1, bool(is_piece and 0 < info.strides[0] * size <= LINE)


# --------------------------------------------------------------------------------------------------
# Rows of 16-bit elements in shared memory, as TMA and the tensor cores want them: panels of swizzled lines side by side.

def line_of(width: int) -> int:
    """Elements of a swizzled line: 128 bytes, or 64 where half of the last line of 128 bytes would be empty.

    >>> line_of(128), line_of(112), line_of(96), line_of(80)
    (64, 64, 32, 32)
    """
    return 32 if 0 < width % 64 <= 32 else 64


def in_lines(width: int) -> int:
    """Elements of the whole lines that so many elements of a row lie in.

    >>> in_lines(128), in_lines(112), in_lines(96), in_lines(80)
    (128, 128, 96, 96)
    """
    line = line_of(width)
    return -(-width // line) * line


@dataclass(frozen=True)
class Panels(Component):
    """Rows of ``width`` elements, in whole lines: TMA loads zeros behind the end of an array's rows, and stores nothing
    there."""

    dtype: np.dtype
    width: int

    @cached_property
    def line(self) -> int:
        """Elements of a panel's line."""
        return line_of(self.width)

    @cached_property
    def line_bytes(self) -> int:
        return 2 * self.line

    @cached_property
    def count(self) -> int:
        return -(-self.width // self.line)

    @cached_property
    def layout(self) -> Swizzled:
        return Swizzled(RowMajor(self.dtype), self.line_bytes)

    def map_spec(self, rows: int, dimensions: int) -> TensorMapSpec:
        """Of boxes of ``rows`` rows of a panel, of an array of so many dimensions."""
        return TensorMapSpec(self.dtype, (self.line, rows) + (1,) * (dimensions - 2), self.line_bytes)
