"""The family of `multistage`: rings of stages, for GPUs from sm_75 on and any operator that acts in warps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.common.clipping import clipped_inputs
from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.common.operand import Operand, stored_by_neighbours
from gemmkit.kernels.common.scheduler import OneTilePerBlock, TileScheduler
from gemmkit.kernels.common.stream_k import StreamK, most_blocks, streamed
from gemmkit.kernels.common.workspace_sums import reduction_of
from gemmkit.kernels.family import KernelFamily
from gemmkit.kernels.sm80.copies import COPIES, copies_of
from gemmkit.kernels.sm80.kernel import multistage
from gemmkit.kernels.sm80.mainloop import InStepMainloop, Mainloop
from gemmkit.kernels.sm80.rules import validate
from gemmkit.kernels.sm80.spec import Sm80Spec
from gemmkit.operators import FPUOp
from gemmkit.operators.algebra import units
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.config import Config

#: DMMAs between two on the same accumulators with which ptxas may leave out the wait at a loop's end: the tensor core has
#: finished the first when it begins the second. (Twice what `tests.support.dmma_waits` takes for near.)
SAFE = 7


class Sm80(KernelFamily):
    """One tile a block, or parts of tiles one after the other; a ring of stages."""

    streams_k = True

    def validate(self, config: Config) -> None:
        validate(config)

    def specialise(self, config: Config, operands: tuple[Operand, Operand, Operand, Operand],
                   arrays: Arrays | None) -> Sm80Spec:
        a, b, c, d = operands
        copies = copies_of(arrays.device if arrays else None)
        a, b = (dataclasses.replace(operand, route=copies.route(operand, getattr(arrays, name, None),
                                                                arrays.extents(name) if arrays else (0, 0)))
                for operand, name in ((a, "a"), (b, "b")))
        if arrays is not None:
            a, b = clipped_inputs(config, a, b, arrays)
            d = stored_by_neighbours(d, arrays.out, arrays.extents("out"), config.epilogue)
        scheduler = OneTilePerBlock(config.order, config.block_shape, Cluster())
        spec = Sm80Spec(config.block_shape, config.compute_warp, config.warps_per_block, config.operator, a, b, c, d,
                        config.epilogue, config.condition, scheduler, config.has_c, config.stages, copies=copies)
        if config.splits != 1:
            spec = dataclasses.replace(spec, scheduler=_shared(scheduler, spec, config, arrays))
        return dataclasses.replace(spec.laid_out(), mainloop=_mainloop(spec), copy_parts=_copy_parts(spec))

    def in_cluster(self, splits: int | StreamK, cluster: Tile) -> int:
        return 1


def _shared(scheduler: OneTilePerBlock, spec: Sm80Spec, config: Config, arrays: Arrays | None) -> TileScheduler:
    """A scheduler of blocks that share tiles by a workspace."""
    rows, columns = scheduler.grid(arrays.M, arrays.N) if arrays else (1, 1)
    tiles = rows * columns * (1 if arrays is None or arrays.products is None else arrays.products)
    if isinstance(config.splits, StreamK):
        most = most_blocks(config.splits, arrays.device if arrays else None, config.threads, spec.laid_out().shared_bytes,
                           config.blocks_per_sm)
        return streamed(scheduler, spec, config.splits, tiles, arrays.K if arrays else 0, most)
    reduction = reduction_of(spec, config.splits, tiles, arrays.sm_count if arrays else 0)
    return dataclasses.replace(scheduler, reduction=reduction)


def _mainloop(spec: Sm80Spec) -> Mainloop:
    """Fragments across rounds, unless ptxas would then leave out a wait that is needed (`InStepMainloop`)."""
    table = getattr(spec.operator, "table", None)
    own = units(spec.operator)
    if isinstance(own, FPUOp) or own.fragment_c.dtype != np.dtype(np.float64):
        return Mainloop()
    instructions = 1 if table is None else sum(factor != 0 for row in table for sums in row for factor in sums)
    between = (spec.fragments_m * spec.fragments_n - 1) * instructions
    return Mainloop() if between >= SAFE else InStepMainloop()


def _copy_parts(spec: Sm80Spec) -> int:
    """Tensor cores are fed best with copies dealt over the steps. On the ordinary units they go out together, for in front
    of every group of copies ptxas puts three dummy loads."""
    together = isinstance(units(spec.operator), FPUOp) or isinstance(_mainloop(spec), InStepMainloop)
    return 1 if together else max(1, spec.steps_k - 1)


FAMILY = Sm80("multistage", multistage, min(copies.minimum_arch for copies in COPIES))
