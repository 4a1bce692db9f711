"""The rules of configurations for `multistage`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmkit.kernels.common.rules import rule
from gemmkit.kernels.simt.rules import validate_lines, validate_tiles, validate_transforms
from gemmkit.kernels.sm80 import boxes
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.config import Config

STAGES = 2, 8


def validate(config: Config) -> None:
    """Raise ConfigError for the first rule that a configuration of this kernel breaks."""
    operator = config.operator
    rule(operator.threads == 32, "operator", operator, "it acts in warpgroups; take kernel='warp_specialised'")
    for field, only in (("producer_warps", 0), ("schedule", "cooperative"), ("cluster", Tile(M=1, N=1))):
        rule(getattr(config, field) == only, field, getattr(config, field), "it is a mapping of the warp-specialised "
              f"kernel; with kernel={config.kernel!r} it is {only!r}")
    least, most = STAGES
    rule(least <= config.stages <= most, "stages", config.stages, f"{least} to {most} stages are needed")
    if config.splits != 1:
        refusal = operator.refuses_to_merge
        rule(refusal is None, "splits", config.splits, f"with {operator!r}: {refusal}")
    boxes.validate(config)
    validate_tiles(config)
    rule(config.compute_warp.size.K == config.block_shape.size.K, "compute_warp", config.compute_warp, "a warp multiplies "
          f"all of a k-tile: K must be that of block_shape={config.block_shape!r}")
    validate_lines(config)
    validate_transforms(config)
