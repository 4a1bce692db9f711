"""The family of `warp_specialised`: Hopper's tensor cores, warps with roles around a pipeline in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.common.operand import Operand
from gemmkit.kernels.common.scheduler import Persistent, TileScheduler
from gemmkit.kernels.common.stream_k import StreamK
from gemmkit.kernels.family import KernelFamily
from gemmkit.kernels.sm90.kernel import warp_specialised
from gemmkit.kernels.sm90.maps import maps
from gemmkit.kernels.sm90.rules import validate
from gemmkit.kernels.sm90.shared_k import SharedK
from gemmkit.kernels.sm90.spec import Sm90Spec
from gemmkit.kernels.sm90.specialise import specialise
from gemmkit.kernels.sm90.stream_exchange import streamed_clusters
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

    def in_cluster(self, splits: int | StreamK, cluster: Tile) -> int:
        return SharedK(splits, cluster).in_cluster

    def maps(self, spec: Any, arrays: Arrays) -> tuple[Any, ...]:
        return maps(spec, arrays)

    def registers(self, spec: Any) -> tuple[int, ...] | None:
        assert isinstance(spec, Sm90Spec)
        return spec.warpgroups.warp_registers


FAMILY = Sm90("warp_specialised", warp_specialised, (9, 0))

__all__ = ["FAMILY"]
