"""Schedulers of many products in one launch: stacks, groups of different sizes, tiles whose operands arrive meanwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmkit.components import Array, Component, Scalar
from gemmkit.kernels.collectives.operand import OperandArrays
from gemmkit.kernels.collectives.scheduler import Cluster, Order, Reduction, Stack, StackSteps, TileScheduler, Work
from gemmkit.lang.component_products import StackShape, of_product, with_number
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import View
from gemmkit.lang.memory import FIRST, K, M, N, entry_of, member_of, number_of
from gemmkit.lang.registers import Registers
from gemmkit.ptx.arithmetic import divided, divisor_reciprocal
from gemmkit.ptx.barriers import await_flag
from gemmkit.ptx.special import rolled
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.kernels.spec import Spec

# --------------------------------------------------------------------------------------------------
# What schedulers of many products in one launch share: each product's tiles are handed out by a `TileScheduler`.

@dataclass(frozen=True)
class ManyProducts(Component):
    """Base class: ``one`` hands out the tiles of a product, and ``stack`` says which matrices belong to each."""

    one: TileScheduler
    stack: Any

    @property
    def order(self) -> Order:
        return self.one.order

    @property
    def block(self) -> Tile:
        return self.one.block

    @property
    def cluster(self) -> Cluster:
        return self.one.cluster

    @property
    def reduction(self) -> Reduction:
        return self.one.reduction

    @property
    def stays(self) -> bool:
        return self.one.stays

    def begin(self) -> int:
        return self.one.begin()

    def end(self, shape: StackShape) -> int:
        return self.one.end(shape)

    def following(self, at: int, step: int) -> int:
        return self.one.following(at, step)

    def tile_of(self, at: int) -> int:
        return self.one.tile_of(at)

    def own(self) -> int:
        return self.one.own()

    def goes_on(self, peer: int) -> bool:
        return self.one.goes_on(peer)

    def step(self) -> int:
        return self.one.step()

    def first(self) -> int:
        return self.one.first()

    def rank(self) -> int:
        return self.one.rank()

    def gather(self, spec: Spec, accumulators: Registers, rank: int) -> bool:
        return self.one.gather(spec, accumulators, rank)

    def product(self, tile: int) -> tuple:
        """Which product a tile is of, and which tile of that."""
        raise NotImplementedError

    def place(self, tile: int, rank: int, shape: StackShape) -> tuple:
        return self.one.place(tile, rank, shape)

    def k_tiles(self, spec: Spec, m: int, n: int, rank: int, shape: StackShape) -> tuple:
        return self.one.k_tiles(spec, m, n, rank, shape)


LIMIT = 2**31                          # thread blocks and tiles are counted in 32 bits


@dataclass(frozen=True)
class Batched(ManyProducts):
    """The tiles of a stack of ``products`` products, one product after the other, each as ``one`` hands out its own.

    A product has ``tiles`` tiles (of a cluster), and ``multiplier`` and ``shift`` divide by that.
    """

    stack: Stack
    products: Scalar
    tiles: Scalar
    multiplier: Scalar
    shift: Scalar

    @classmethod
    def of(cls, one: TileScheduler, arrays: OperandArrays) -> Batched:
        tiles, products = one.computed(arrays.M, arrays.N), arrays.products or 0
        if tiles * products * one.cluster.size * one.reduction.blocks_of_a_tile >= LIMIT:
            raise ValueError(f"a and b are {products} products of {tiles} tiles each; a launch has less than {LIMIT}")
        infos = arrays.a, arrays.b, arrays.c, arrays.out
        stack = Stack(*(StackSteps.of(() if info is None else info.steps) for info in infos))
        return cls(one, stack, products, tiles, *divisor_reciprocal(max(1, tiles)))

    def count(self, shape: StackShape) -> int:
        return self.tiles * self.products

    def end(self, shape: StackShape) -> int:
        return self.one.end(shape) if self.one.stays else self.count(shape)

    def product(self, tile: int) -> tuple:
        batch = divided(tile, self.multiplier, self.shift)
        return batch, tile - batch * self.tiles

    def work(self, spec: Spec, tile: int, rank: int, shape: StackShape) -> Work:
        batch, own = self.product(tile)
        work = self.one.work(of_product(spec, batch), own, rank, of_product(shape, batch))
        return Work(work.m, work.n, batch, work.k_begin, work.k_tiles, rank)

    # -- on the host ----------------------------------------------------------------------------------------------------

    def blocks(self, M: int, N: int, sm_count: int) -> int:
        return self.one.blocks(M, N, sm_count, int(self.products))

    def grid(self, M: int, N: int) -> tuple[int, int]:
        return self.one.grid(M, N)

    def computed(self, M: int, N: int) -> int:
        return self.one.computed(M, N)


# --------------------------------------------------------------------------------------------------
# The scheduler of groups: it hands out the tiles of products of different sizes in one launch.
#
# The host makes three tables in device memory: of each product its first tile and sizes (``sizes``), and where its
# matrices lie (``places``); of each tile its product (``products``), so that a block finds its own with one load, and no
# search. Products with the longest K come first, so that the last blocks to end are short ones.

@dataclass(frozen=True)
class Member(Component):
    """The matrices of one operand (0 to 3 are A, B, C, D)."""

    operand: int
    sizes: Array
    places: Array

    def matrix(self, data: View, batch: int) -> Any:
        """The view of a product's matrix."""
        return member_of(data, self.sizes, self.places, batch, self.operand)


@dataclass(frozen=True)
class MatrixGroup(Component):
    """The matrices of A, B, C and D that belong to each product."""

    a: Member
    b: Member
    c: Member
    d: Member


@dataclass(frozen=True)
class GroupShape(Component):
    """The sizes of all products; kernels and users' code get those of one (``shape`` with other numbers in it)."""

    shape: Any                         # a `gemmkit.kernels.spec.StackShape`
    sizes: Array

    def of_product(self, batch: int) -> Any:
        numbered = with_number(with_number(self.shape, "batch", batch), "M", number_of(self.sizes, batch, M))
        return with_number(with_number(numbered, "N", number_of(self.sizes, batch, N)), "K", number_of(self.sizes, batch, K))


@dataclass(frozen=True)
class GroupScheduler(ManyProducts):
    """The tiles of all products of a group, each product's as ``one`` hands them out."""

    stack: MatrixGroup
    sizes: Array
    products: Array

    def product(self, tile: int) -> tuple:
        batch = entry_of(self.products, tile)
        return batch, tile - number_of(self.sizes, batch, FIRST)


# --------------------------------------------------------------------------------------------------
# Tiles in the order in which their operands arrive, from other GPUs, while the kernel runs.
#
# The rows of A come in shards, one from each rank; this rank's own are there. The host makes a table of D's tiles
# (`arrivals`): those of its own rows first, then the next rank's, in rotated order, and for each the shards that it
# reads. A kernel computes the table's tiles one after the other, and before a tile's first load its producer waits for
# the flag of each of these shards (`Gated`). A flag has the *epoch*, the call's number: what an earlier call wrote opens
# nothing. The epoch is what this rank's own flag has, which is written before the launch: the order of one slot is the
# same in every call.

SHARDS = 2**15                         # flags are fewer


@dataclass(frozen=True)
class Gated(Order):
    """Row ``linear`` of ``table`` is a tile: its row, its column, and the flags ``first`` to ``end - 1`` that have to be
    what the flag ``own`` is before it is read. After ``patience`` milliseconds without one the kernel traps.

    ``table`` is int32, (tiles, 4), and ``flags`` uint32, one for each shard; both lie in device memory. With ``of_sums``
    what arrives is what the epilogue merges: if TMA fetches that, A is read and multiplied meanwhile.
    """

    table: Array
    flags: Array
    own: Scalar
    patience: Scalar
    of_sums: bool = False

    gates = True

    def block(self, linear: int, rows: int, columns: int) -> tuple[int, int]:
        return number_of(self.table, linear, 0), number_of(self.table, linear, 1)

    def is_open(self, linear: int, opened: int) -> bool:
        if not self.of_sums:
            return True
        return number_of(self.table, linear, 2) * SHARDS + number_of(self.table, linear, 3) == opened

    def await_tile(self, linear: int, opened: int) -> int:
        shard, end = number_of(self.table, linear, 2), number_of(self.table, linear, 3)
        waited = shard * SHARDS + end
        if waited != opened:                           # a wait takes a microsecond: once for each shard, not for each tile
            epoch = self.flags[self.own]
            while shard < end:
                await_flag(self.flags, shard, epoch, self.patience)
                shard = rolled(shard + 1)              # few: unrolled, the code of a wait would be there many times
        return waited


def arrivals(order: Order, lengths: Sequence[int], rank: int, tile_rows: int, columns: int) -> np.ndarray:
    """The table of `Gated` for shards of ``lengths`` rows: ``tile_rows`` rows and ``columns`` tiles make a row of tiles.

    Shards arrive from ``rank`` on, round to the one before it. A tile belongs to the shard that arrives last of those it
    reads; the tiles of each shard have the order that ``order`` gives them.

    >>> from gemmkit.kernels.collectives.scheduler import Columns
    >>> arrivals(Columns(), (2, 2), 1, 2, 2).tolist()
    [[1, 0, 1, 2], [1, 1, 1, 2], [0, 0, 0, 1], [0, 1, 0, 1]]
    >>> arrivals(Columns(), (3, 1), 1, 2, 1).tolist()               # the second row of tiles reads both shards
    [[0, 0, 0, 1], [1, 0, 0, 2]]
    """
    ranks, ends = len(lengths), list(accumulate(lengths))
    rows = ends[-1]
    reads = []                                                  # of each row of tiles: the first shard, and behind the last
    for begin in range(0, rows, tile_rows):
        last = min(begin + tile_rows, rows) - 1
        reads.append((bisect_right(ends, begin), bisect_right(ends, last) + 1))
    turns = [max((shard - rank) % ranks for shard in range(*of)) for of in reads]
    table = []
    for turn in range(ranks):
        own = [row for row, of in enumerate(turns) if of == turn]
        for linear in range(len(own) * columns):
            row, column = order.block(linear, len(own), columns)
            table.append((own[row], column, *reads[own[row]]))
    return np.array(table, np.int32).reshape(-1, 4)
