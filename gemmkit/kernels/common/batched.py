"""The scheduler of stacks: it hands out the tiles of all products in one launch."""

from __future__ import annotations

import math
from typing import Any

from gemmkit.component_products import of_product
from gemmkit.components import Scalar
from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.common.many_products import ManyProducts
from gemmkit.kernels.common.scheduler import TileScheduler
from gemmkit.kernels.common.stack import Stack, Steps
from gemmkit.kernels.common.work import Work
from gemmkit.lang.component_class import dataclass
from gemmkit.ptx.division import divided, reciprocal

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
    def of(cls, one: TileScheduler, arrays: Arrays) -> Batched:
        tiles, products = math.prod(one.grid(arrays.M, arrays.N)), arrays.products or 0
        if tiles * products * one.cluster.size * one.reduction.blocks_of_a_tile >= LIMIT:
            raise ValueError(f"a and b are {products} products of {tiles} tiles each; a launch has less than {LIMIT}")
        infos = arrays.a, arrays.b, arrays.c, arrays.out
        stack = Stack(*(Steps.of(() if info is None else info.steps) for info in infos))
        return cls(one, stack, products, tiles, *reciprocal(max(1, tiles)))

    def count(self, shape: Any) -> int:
        return self.tiles * self.products

    def end(self, shape: Any) -> int:
        return self.one.end(shape) if self.one.stays else self.count(shape)

    def product(self, tile: int) -> tuple:
        batch = divided(tile, self.multiplier, self.shift)
        return batch, tile - batch * self.tiles

    def work(self, spec: Any, tile: int, rank: int, shape: Any) -> Work:
        batch, own = self.product(tile)
        work = self.one.work(of_product(spec, batch), own, rank, of_product(shape, batch))
        return Work(work.m, work.n, batch, work.k_begin, work.k_tiles, rank)

    # -- on the host ----------------------------------------------------------------------------------------------------

    def blocks(self, M: int, N: int, sm_count: int) -> int:
        return self.one.blocks(M, N, sm_count, int(self.products))

    def grid(self, M: int, N: int) -> tuple[int, int]:
        return self.one.grid(M, N)
