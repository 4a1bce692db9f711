"""The family of `quantised`: B of packed integers, a few rows of A."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.common.operand import Operand, stored_by_neighbours
from gemmkit.kernels.common.reduction import ALONE
from gemmkit.kernels.common.scheduler import OneTilePerBlock
from gemmkit.kernels.family import KernelFamily
from gemmkit.kernels.quantised.kernel import quantised
from gemmkit.kernels.quantised.rules import check_sizes, validate
from gemmkit.kernels.quantised.spec import QuantisedSpec
from gemmkit.kernels.simt.gather_sums import ClusterSums

if TYPE_CHECKING:
    from gemmkit.config import Config


class Quantised(KernelFamily):
    """One tile a block; warps and blocks of a cluster divide K."""

    is_dependent = True

    def validate(self, config: Config) -> None:
        validate(config)

    def specialise(self, config: Config, operands: tuple[Operand, Operand, Operand, Operand],
                   arrays: Arrays | None) -> QuantisedSpec:
        a, b, c, d = operands
        if arrays is not None:
            check_sizes(config, arrays)
            d = stored_by_neighbours(d, arrays.out, arrays.extents("out"), config.epilogue)
        scheduler = OneTilePerBlock(config.order, config.block_shape, Cluster(splits=config.splits),
                                    ClusterSums() if config.splits > 1 else ALONE)
        return QuantisedSpec(config.block_shape, config.compute_warp, config.warps_per_block, config.operator, a, b, c, d,
                             config.epilogue, config.condition, scheduler, config.has_c, config.stages)


FAMILY = Quantised("quantised", quantised, (9, 0))
