"""The family of `singlestage`: any GPU, any operator that acts in warps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.common.clipping import clipped_inputs
from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.common.operand import Operand, stored_by_neighbours
from gemmkit.kernels.common.reduction import ALONE
from gemmkit.kernels.common.scheduler import OneTilePerBlock
from gemmkit.kernels.family import KernelFamily
from gemmkit.kernels.simt.gather_sums import ClusterSums
from gemmkit.kernels.simt.kernel import singlestage
from gemmkit.kernels.simt.rules import validate
from gemmkit.kernels.simt.spec import SimtSpec

if TYPE_CHECKING:
    from gemmkit.config import Config

class Simt(KernelFamily):
    """One stage, one tile a block."""

    def validate(self, config: Config) -> None:
        validate(config)

    def specialise(self, config: Config, operands: tuple[Operand, Operand, Operand, Operand],
                   arrays: Arrays | None) -> SimtSpec:
        scheduler = OneTilePerBlock(config.order, config.block_shape, Cluster(splits=config.splits),
                                    ClusterSums() if config.splits > 1 else ALONE)
        if arrays is not None:
            d = stored_by_neighbours(operands[3], arrays.out, arrays.extents("out"), config.epilogue)
            operands = (*clipped_inputs(config, *operands[:2], arrays), operands[2], d)
        return SimtSpec(config.block_shape, config.compute_warp, config.warps_per_block, config.operator, *operands,
                        config.epilogue, config.condition, scheduler, config.has_c).laid_out()


FAMILY = Simt("singlestage", singlestage, (5, 0))
