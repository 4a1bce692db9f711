"""The family of `warp_specialised`: Hopper's tensor cores, warps with roles around a pipeline in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.common.operand import Operand
from gemmkit.kernels.common.scheduler import Persistent, TileScheduler
from gemmkit.kernels.common.stream_k import StreamK
from gemmkit.kernels.family import KernelFamily
from gemmkit.kernels.sm90.exchange import ClusterExchange, Exchange
from gemmkit.kernels.sm90.kernel import warp_specialised
from gemmkit.kernels.sm90.maps import maps
from gemmkit.kernels.sm90.routes.tma import Tma
from gemmkit.kernels.sm90.rules import validate
from gemmkit.kernels.sm90.shared_k import SharedK
from gemmkit.kernels.sm90.spec import Sm90Spec
from gemmkit.kernels.sm90.specialise import specialise
from gemmkit.kernels.sm90.store import TmaStore
from gemmkit.kernels.sm90.store_choice import refuses_tma
from gemmkit.kernels.sm90.stream_exchange import streamed_clusters
from gemmkit.layouts import Plain
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.config import Config


class Sm90(KernelFamily):
    """Persistent blocks with a producer and consumers."""

    is_dependent = True
    streams_k = True
    joins_transforms = True            # tensor cores read shared memory themselves

    def validate(self, config: Config) -> None:
        validate(config)

    def specialise(self, config: Config, operands: tuple[Operand, Operand, Operand, Operand],
                   arrays: Arrays | None) -> Sm90Spec:
        m, n = config.cluster.extents
        sharing = SharedK(config.splits, config.cluster)
        cluster = Cluster(m, n, sharing.in_cluster)
        scheduler: TileScheduler = Persistent(config.order, config.block_shape, cluster, sharing.reduction)
        if isinstance(config.splits, StreamK):
            scheduler = streamed_clusters(scheduler, config.splits, arrays)
        spec = Sm90Spec(config.block_shape, config.compute_warp, config.warps_per_block, config.operator, *operands,
                        config.epilogue, config.condition, scheduler, config.has_c, config.stages, config.schedule,
                        config.producer_warps)
        return specialise(spec, sharing, arrays)

    def is_specialised(self, spec: Any, config: Config, arrays: Arrays) -> bool:
        """Of plain operands and a D that TMA moves, unless C or the epilogue reads ahead, or blocks share K by a workspace:
        nothing but that TMA takes them depends on the arrays."""
        a, b, out = arrays.a, arrays.b, arrays.out
        return (type(spec.store) is TmaStore and type(spec.a.route) is type(spec.b.route) is Tma
                and type(config.splits) is int and type(spec.exchange) in (Exchange, ClusterExchange)
                and arrays.products is None and not config.has_c and config.epilogue.is_default
                and a is not None and b is not None and out is not None
                and isinstance(config.global_a_layout, Plain) and isinstance(config.global_b_layout, Plain)
                and why_not(a, config.global_a_layout.axis) is None and why_not(b, config.global_b_layout.axis) is None
                and refuses_tma(spec, out) is None)

    def in_cluster(self, splits: int | StreamK, cluster: Tile) -> int:
        return SharedK(splits, cluster).in_cluster

    def maps(self, spec: Any, arrays: Arrays) -> tuple[Any, ...]:
        return maps(spec, arrays)

    def registers(self, spec: Any) -> tuple[int, ...] | None:
        assert isinstance(spec, Sm90Spec)
        return spec.warpgroups.warp_registers


FAMILY = Sm90("warp_specialised", warp_specialised, (9, 0))

__all__ = ["FAMILY"]
