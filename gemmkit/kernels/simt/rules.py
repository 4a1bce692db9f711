"""The rules of configurations for `singlestage`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gemmkit.kernels.common.rules import check_splits, divides, rule
from gemmkit.operators import BoxMMAOp
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.config import Config

ON_REGISTERS = ("transform_shared_to_regs_a", "transform_shared_to_regs_b", "transform_shared_to_regs_c",
                "transform_regs_to_shared_d")


def validate(config: Config) -> None:
    """Raise ConfigError for the first rule that a configuration of this kernel breaks."""
    _validate_one_stage(config)
    validate_tiles(config)
    validate_lines(config)
    validate_transforms(config)


def _validate_one_stage(config: Config) -> None:
    operator = config.operator
    rule(operator.threads == 32, "operator", operator, "it acts in warpgroups; take kernel='warp_specialised'")
    rule(not isinstance(operator, BoxMMAOp), "operator", operator, "its boxes of K are filled by cp.async; take "
         "kernel='multistage'")
    for field, only in (("stages", 1), ("producer_warps", 0), ("schedule", "cooperative"), ("cluster", Tile(M=1, N=1))):
        rule(getattr(config, field) == only, field, getattr(config, field), "it is a mapping of the warp-specialised "
              f"kernel; with kernel={config.kernel!r} it is {only!r}")
    if config.splits > 1:
        check_splits(config.splits)
        refusal = operator.refuses_to_merge
        rule(refusal is None, "splits", config.splits, f"with {operator!r}: {refusal}")


def validate_tiles(config: Config) -> None:
    block, warp, warps = config.block_shape, config.compute_warp, config.warps_per_block
    m, n, k = config.operator.shape
    operation = Tile(M=m, N=n, K=k)
    divides(operation, warp, "operator", f"compute_warp={warp!r} must be a multiple of the operator's {m}x{n}x{k}",
             config.operator)
    divides(warp, block, "compute_warp", f"block_shape={block!r} must be a multiple of it")
    tiles = block.size.M // warp.size.M * (block.size.N // warp.size.N)
    rule(tiles == warps, "warps_per_block", warps, f"block_shape and compute_warp divide the block among {tiles} warps")
    for name, projected in (("a", block.MK), ("b", block.KN), ("cd", block.MN)):
        mem_warp, mem_thread = getattr(config, f"mem_{name}_warp"), getattr(config, f"mem_{name}_thread")
        divides(mem_warp, projected, f"mem_{name}_warp", f"the block's {projected!r} must be a multiple of it")
        divides(mem_thread, mem_warp, f"mem_{name}_thread", f"mem_{name}_warp={mem_warp!r} must be a multiple of it")


def validate_lines(config: Config) -> None:
    """Lines of shared tiles start where the widest access to them may."""
    block = config.block_shape
    for name, tile, thread in (("a", block.MK, config.mem_a_thread), ("b", block.KN, config.mem_b_thread),
                               ("c", block.MN, config.mem_cd_thread), ("d", block.MN, config.mem_cd_thread)):
        layout = getattr(config, f"shared_{name}_layout")
        rule(getattr(layout, "plane", layout).is_linear, f"shared_{name}_layout", layout, f"kernel={config.kernel!r} adds "
             "an element's place in a tile to the tile's place, and a swizzle is no sum; take layouts.Padded(...), or "
             "kernel='warp_specialised'")
        refusal = config.operator.refuses(name, layout)
        rule(refusal is None, f"shared_{name}_layout", layout, refusal or "")
        layout = getattr(layout, "plane", layout)              # of numbers in planes, one plane is loaded at a time
        size = layout.dtype.itemsize
        moved = thread.count if thread.extents[layout.axis] == thread.count else 1
        needed = max(math.gcd(16, moved * size), config.operator.line_alignment(name, layout))
        line = layout.leading(tile.size) * size
        rule(line % needed == 0, f"shared_{name}_layout", layout, f"its lines are {line} bytes long in the block's "
              f"{tile!r}, and must be multiples of {needed}: threads move that much at a time; pad by a multiple of "
              f"{needed // size or 1} elements")


def validate_transforms(config: Config) -> None:
    if config.operator.is_mapped:
        return
    for field in ON_REGISTERS:
        transform = getattr(config, field)
        rule(transform.is_identity or not transform.with_coordinates, field, transform,
              f"{config.operator!r} does not say which element a register holds, so a transform on registers cannot have "
              "coordinates; transform between global and shared memory, or use MMAOp")
