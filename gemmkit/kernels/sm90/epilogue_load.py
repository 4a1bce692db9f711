"""Step 3 of `warp_specialised` where D is stored by TMA and C has D's form: TMA brings C, ahead of time, into D's subtiles.

A consumer that reads C from global memory at the end of a tile waits for it, and its accesses of 4 bytes a lane (8 rows at
once) take their time in L1 from the wgmmas of the other consumer. D's subtiles are idle while a tile is multiplied. So one
thread has TMA bring C's first subtiles there before the tile begins, each to the place where the same subtile of D will be:

| in the place of a subtile | is written by | when | which then |
|---|---|---|---|
| C's | TMA | TMA has read the D that was there (``tma_wait_read``) | completes ``filled`` |
| D's | the consumer's threads | all have read C's (a named barrier) | TMA stores |

What an epilogue reads beside D, element by element (`Epilogue.alongside`: a residual, BLAS's C), comes the same way; there
is room for one such array. Threads read it by a layout, `InSubtiles`, that stands in the place of the array's own, so that
transforms and epilogues do not see the difference.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gemmkit.components import Component, with_at_path
from gemmkit.kernels.collectives.operand import OperandArrays, delivered
from gemmkit.kernels.collectives.pipeline import BARRIER, BARRIERS, SharedMemory
from gemmkit.kernels.collectives.scheduler import Outputs
from gemmkit.kernels.sm90.cross_lane import finish_pair_by_element
from gemmkit.kernels.sm90.store import BUFFERS, ConsumerPart, TmaStore, own_column, own_row
from gemmkit.lang.aggregates import convert_all
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import View
from gemmkit.lang.registers import apply, each, join, split
from gemmkit.layouts import ArrayLayout, GlobalLayout, RowMajor, Swizzled
from gemmkit.ptx.barriers import mbarrier_expect, mbarrier_init, mbarrier_wait
from gemmkit.ptx.memory import load_shared, shared
from gemmkit.ptx.special import thread_index, udiv
from gemmkit.ptx.tma import tma_commit, tma_load, tma_wait, tma_wait_read
from gemmkit.ptx.wgmma import named_barrier
from gemmkit.runtime.arrays import ArrayInfo, describe
from gemmkit.runtime.tensor_maps import TensorMapSpec, why_not
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.emulator.copies import EmulatedTensorMap
    from gemmkit.kernels.sm90.family import Sm90Spec

# -- what is read -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class EpilogueSource(Component):
    """What comes ahead of time. This one: the product's C."""

    path: tuple = ("c",)               # fields from the spec to what has its ``layout``
    array: tuple | None = None         # fields to its array, where a component holds it

    def is_read(self, spec: Sm90Spec) -> bool:
        """Whether this launch reads it at all."""
        return True

    def coordinates(self, spec: Sm90Spec, batch: int) -> tuple:
        """Of a product's matrix, behind those of columns and rows."""
        return spec.scheduler.stack.c.coordinates(batch)


@dataclass(frozen=True, kw_only=True)
class OfEpilogue(EpilogueSource):
    """An array of the epilogue's; ``where`` finds what reads it (`gemmkit.epilogues.base.StageLocation`), and ``steps`` its
    matrices in a stack."""

    where: Any
    steps: Any = None

    def is_read(self, spec: Sm90Spec) -> bool:
        return self.where.reads(spec.epilogue)

    @cached_property
    def is_shared(self) -> bool:
        """Whether all products of a stack have one matrix of it."""
        return self.steps is None

    def coordinates(self, spec: Sm90Spec, batch: int) -> tuple:
        if self.is_shared:
            return ()
        return self.steps.coordinates(batch)


@dataclass(frozen=True)
class InSubtiles(GlobalLayout):
    """A matrix of D's form, of which each consumer finds the elements of its tile in D's subtiles (see `SubtileStore`)."""

    lines: Swizzled                    # of a subtile
    offset: int                        # bytes into shared memory
    columns: int
    count: int
    fragments: int
    producers: int                     # warpgroups in front of the first consumer

    @property
    def axis(self) -> int:
        return self.lines.axis

    def element(self, data: View, i: int, j: int, shape: StackShape) -> Any:
        return load_shared(shared(self.dtype, self.offset), self.place(i, j), 0, 1)[0]

    def load(self, data: View, tile: Tile, shape: StackShape) -> tuple:
        """A thread's neighbours in a row."""
        return load_shared(shared(self.dtype, self.offset), self.place(tile.index[0], tile.index[1]), 0, tile.count)

    def place(self, i: int, j: int) -> int:
        """Where an element of D lies, in elements; tiles and consumers' parts begin at multiples of their size."""
        group = udiv(thread_index(), 128) - self.producers
        subtile = udiv(i, 64) % self.fragments * self.count + udiv(j, self.columns) % self.count
        first = (group * BUFFERS + subtile % BUFFERS) * (64 * self.columns)
        return first + self.lines.position((i & 63, j & (self.columns - 1)), 64)


# -- the store --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class PrefetchedStore(TmaStore):
    """TMA brings a subtile of ``source`` to where it then stores the same subtile of D from. ``filled`` barriers stand
    ``barriers`` bytes into shared memory, one for each subtile that a consumer has."""

    source: EpilogueSource
    barriers: int = 0
    reads_ahead = True

    @cached_property
    def subtiles(self) -> int:
        """Of a consumer's tile."""
        return self.fragments * self.count

    @cached_property
    def first(self) -> int:
        """How many come before a tile is multiplied: as many as there is room for."""
        return min(BUFFERS, self.subtiles)

    @cached_property
    def subtile_bytes(self) -> int:
        return self.elements * self.itemsize

    def filled(self) -> Any:
        return shared(BARRIERS, self.barriers)

    def phase(self, k: int, turn: int) -> int:
        """The parity of subtile ``k``'s phase: a barrier goes through as many in a tile as subtiles use its place."""
        uses = udiv(self.subtiles - k % BUFFERS + BUFFERS - 1, BUFFERS)
        return (udiv(k, BUFFERS) + turn * uses) & 1

    def placed(self, memory: SharedMemory) -> PrefetchedStore:
        return dataclasses.replace(self, barriers=memory.take(BUFFERS * self.consumers * BARRIER))

    def initialise(self) -> None:
        for n in range(BUFFERS * self.consumers):
            mbarrier_init(self.filled(), n, 1)

    def map_of_source(self, info: ArrayInfo) -> tuple[int, TensorMapSpec]:
        """The axis along which the source's elements are contiguous, and the box of its tensor map: a subtile."""
        before = len(info.shape) - 2                                  # dimensions of a stack
        return 1 + before, TensorMapSpec(info.dtype, (self.columns, 64) + (1,) * before, self.columns * self.itemsize)

    # -- TMA's thread -------------------------------------------------------------------------------------------------

    def begin(self, spec: Sm90Spec, map_c: EmulatedTensorMap, batch: int, part: ConsumerPart) -> None:
        """The first subtiles set out when TMA has read the last tile's."""
        if thread_index() % 128 == 0 and self.source.is_read(spec):
            tma_wait_read(0)
            for k in range(self.first):
                self.fetch(k, spec, map_c, batch, part)

    def fetch(self, k: int, spec: Sm90Spec, map_c: EmulatedTensorMap, batch: int, part: ConsumerPart) -> None:
        """Have TMA bring subtile ``k`` of the tile that begins at ``part``."""
        buffer = part.group * BUFFERS + k % BUFFERS
        row, column = part.m + udiv(k, self.count) * 64, part.n + k % self.count * self.columns
        mbarrier_expect(self.filled(), buffer, self.subtile_bytes)
        matrix = self.source.coordinates(spec, batch)
        tma_load(map_c, join(((column, row), matrix)), shared(spec.d.shared.dtype, self.offset), buffer * self.elements,
                 self.filled(), buffer)

    def make_room(self, k: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        """Before subtile ``k`` is written, which is of the fragment at ``part``. The next one sets out, unless it was among
        the first: to where subtile ``k - 1`` was, when TMA has read that."""
        if thread_index() % 128 == 0:
            if self.source.is_read(spec):
                if k + 1 >= BUFFERS and k + 1 < self.subtiles:
                    tma_wait_read(0)
                    tile = ConsumerPart(part.group, part.m - udiv(k, self.count) * 64, part.n, part.turn)
                    self.fetch(k + 1, spec, outputs.map_c, outputs.batch, tile)
            elif k == 0:
                tma_wait_read(self.pending)
            else:
                tma_wait_read(BUFFERS - 1)

    # -- all threads --------------------------------------------------------------------------------------------------

    def fragment(self, sums: tuple, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        each(finish_subtile, split(sums, self.columns // 2), i, spec, outputs, part)

    def leave_out(self, i: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        for p in range(self.count):
            self.pass_over(i * self.count + p, spec, outputs, part)

    def await_subtile(self, k: int, spec: Sm90Spec, part: ConsumerPart) -> None:
        if self.source.is_read(spec):
            mbarrier_wait(self.filled(), part.group * BUFFERS + k % BUFFERS, self.phase(k, part.turn))

    def pass_over(self, k: int, spec: Sm90Spec, outputs: Outputs, part: ConsumerPart) -> None:
        """In place of a subtile that lies wholly out of range. It comes all the same, and all threads see that before its
        barrier's next phase begins; it counts as stored."""
        self.await_subtile(k, spec, part)
        self.make_room(k, spec, outputs, part)
        named_barrier(self.barrier + part.group, 128)
        if thread_index() % 128 == 0:
            tma_commit()

    def finish(self) -> None:
        """Shared memory must last until TMA has read it."""
        if thread_index() % 128 == 0:
            tma_wait(0)


def finish_subtile(sums: tuple, p: int, i: int, spec: Any, outputs: Outputs, part: ConsumerPart) -> None:
    """The nearest elements in range of a subtile wholly out of range would be another's: it is left out."""
    column = part.n + p * spec.store.columns
    if column < outputs.shape.N:
        spec.store.await_subtile(i * spec.store.count + p, spec, part)
        values = join(apply(finish_pair_by_element, split(sums, 2), spec, outputs,
                            part.m + own_row(), column + own_column()))
        values = convert_all(spec.d.layout.dtype, delivered(spec, values))
        spec.store.make_room(i * spec.store.count + p, spec, outputs, part)
        named_barrier(spec.store.barrier + part.group, 128)            # all have read what values are written over
        spec.store.send(values, p, i, spec, outputs, part)
    else:
        spec.store.pass_over(i * spec.store.count + p, spec, outputs, part)


# -- whether there is one ---------------------------------------------------------------------------------------------

WIDTHS = 2, 4                          # bytes of elements


def with_ahead(spec: Any, arrays: OperandArrays) -> Any:
    """``spec``, whose D has been given its store, with the first array of D's form that TMA can bring ahead of time; itself
    where there is none."""
    for source, layout, info in candidates(spec, arrays):
        if refuses(spec, arrays, layout, info) is None:
            store = spec.store
            fields = {field.name: getattr(store, field.name) for field in dataclasses.fields(store)}
            place = InSubtiles(layout.dtype, spec.d.shared, store.offset, store.columns, store.count, store.fragments,
                               spec.producers)
            spec = with_at_path(spec, (*source.path, "layout"), place)
            return dataclasses.replace(spec, store=PrefetchedStore(**fields, source=source))
    return spec


def candidates(spec: Sm90Spec, arrays: OperandArrays) -> Any:
    """(source, layout, array) of C and of what the epilogue reads beside D, in the order in which they are preferred."""
    if spec.has_c and arrays.c is not None:
        yield EpilogueSource(), spec.c.layout, arrays.c
    for one in spec.epilogue.alongside():
        info = describe(one.array)
        path = ("epilogue", *one.path)
        yield OfEpilogue(path, (*path, one.field), where=one.where, steps=one.steps), one.layout, info


def refuses(spec: Sm90Spec, arrays: OperandArrays, layout: ArrayLayout, info: ArrayInfo) -> str | None:
    """Why an array cannot come by TMA into D's subtiles, in words; None where it can."""
    if type(spec.store) is not TmaStore:
        return "D is not stored by TMA, or it is folded"
    if spec.epilogue.reduces:
        return "the epilogue reduces: it takes all columns of a fragment at once, and D's subtiles hold two of them"
    if type(layout) is not RowMajor or spec.d.shared.axis != 1:
        return "it is not a plain row-major matrix, as D is"
    if layout.dtype != spec.d.layout.dtype or layout.dtype != spec.d.shared.dtype or info.dtype != layout.dtype:
        return f"its elements are {layout.dtype}, and D's {spec.d.layout.dtype}: they would not lie in the same places"
    if layout.dtype.names is not None or layout.dtype.kind == "c" or layout.dtype.itemsize not in WIDTHS:
        return f"elements of {layout.dtype} are not read in pairs"
    if tuple(info.shape[-2:]) != arrays.extents("out"):
        return f"it is {info.shape}, and D {arrays.extents('out')}"
    return why_not(info, len(info.shape) - 1)
