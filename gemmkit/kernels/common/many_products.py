"""What schedulers of many products in one launch share: each product's tiles are handed out by a `TileScheduler`."""

from __future__ import annotations

from typing import Any

from gemmkit.components import Component
from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.common.reduction import Reduction
from gemmkit.kernels.common.scheduler import TileScheduler
from gemmkit.kernels.rasterisation import Order
from gemmkit.lang.component_class import dataclass
from gemmkit.tiling import Tile


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

    def end(self, shape: Any) -> int:
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

    def gather(self, spec: Any, accumulators: Any, rank: int) -> bool:
        return self.one.gather(spec, accumulators, rank)

    def product(self, tile: int) -> tuple:
        """Which product a tile is of, and which tile of that."""
        raise NotImplementedError

    def place(self, tile: int, rank: int, shape: Any) -> tuple:
        return self.one.place(tile, rank, shape)

    def k_tiles(self, spec: Any, m: int, n: int, rank: int, shape: Any) -> tuple:
        return self.one.k_tiles(spec, m, n, rank, shape)
