"""The rules of configurations for `quantised`, and of problems."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.common.rules import check_splits, divides, rule
from gemmkit.lang.errors import ConfigError
from gemmkit.layouts import GroupQuantised, RowMajor
from gemmkit.operators.quantised_mma import QuantisedMMAOp
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.config import Config

STAGES = 1, 8
UNTOUCHED = tuple(f"transform_{way}_{name}" for name in "ab" for way in ("global_to_shared", "shared_to_regs"))


def validate(config: Config) -> None:
    """Raise ConfigError for the first rule that a configuration of this kernel breaks."""
    operator, b = config.operator, config.global_b_layout
    rule(isinstance(operator, QuantisedMMAOp), "operator", operator, f"kernel={config.kernel!r} dequantises in registers; "
         "take operators.QuantisedMMAOp(bits=...)")
    assert isinstance(operator, QuantisedMMAOp)
    rule(isinstance(b, GroupQuantised), "global_b_layout", b, f"{operator!r} takes a GroupQuantised, such as "
         "gemmkit.quantisation.quantise makes")
    assert isinstance(b, GroupQuantised)
    rule(b.bits == operator.bits, "operator", operator, f"B has integers of {b.bits} bits")
    rule(type(config.global_a_layout) is RowMajor, "global_a_layout", config.global_a_layout, "rows of A are loaded as they "
         "lie; a RowMajor is needed")
    for name, layout in (("global_a_layout", config.global_a_layout), ("global_b_layout", b)):
        rule(layout.dtype == operator.dtype, name, layout, f"{operator!r} multiplies {operator.dtype}")
    for name in UNTOUCHED:
        rule(getattr(config, name).is_identity, name, getattr(config, name), f"kernel={config.kernel!r} multiplies operands "
             "as they are; transform with the default kernel")
    rule(not config.has_c, "global_c_layout", config.global_c_layout, f"kernel={config.kernel!r} has no C; add it in the "
         "epilogue, by epilogues.Residual(c)")
    rule(config.condition.is_always, "condition", config.condition, f"kernel={config.kernel!r} computes all k-tiles")
    for field, only in (("producer_warps", 0), ("schedule", "cooperative"), ("cluster", Tile(M=1, N=1))):
        rule(getattr(config, field) == only, field, getattr(config, field), "it is a mapping of the warp-specialised "
              f"kernel; with kernel={config.kernel!r} it is {only!r}")
    least, most = STAGES
    rule(least <= config.stages <= most, "stages", config.stages, f"{least} to {most} stages are needed")
    if config.splits > 1:
        check_splits(config.splits)
    _validate_tiles(config, operator, b)


def _validate_tiles(config: Config, operator: QuantisedMMAOp, b: GroupQuantised) -> None:
    block, warp = config.block_shape, config.compute_warp
    m, n, k = operator.shape
    divides(Tile(M=m, N=n, K=k), warp, "operator", f"compute_warp={warp!r} must be a multiple of the operator's "
            f"{m}x{n}x{k}", operator)
    divides(warp, block, "compute_warp", f"block_shape={block!r} must be a multiple of it")
    rule(warp.size.M == block.size.M, "compute_warp", warp, f"a warp has all rows of the block, M={block.size.M}")
    warps = block.size.N // warp.size.N * (block.size.K // warp.size.K)
    rule(warps == config.warps_per_block, "warps_per_block", config.warps_per_block, "block_shape and compute_warp divide "
         f"columns and K of the block among {warps} warps")
    rule(b.group % warp.size.K == 0 or warp.size.K == k, "compute_warp", warp, f"a part of K has one scale a column: K must "
         f"divide group={b.group}, or be the operator's {k}")


def refusal(N: int, K: int, part: int) -> str | None:
    """Why a B of K x N cannot be had in parts of ``part`` along K, or None."""
    if N % 4 or N < 4:
        return f"N={N}: a lane has four columns, and a multiple of 4 is needed"
    if K % part:
        return f"K={K}: warps have {part} of K at a time, and a multiple is needed"
    return None


def check_sizes(config: Config, arrays: Arrays) -> None:
    """Raise ConfigError for a problem that the kernel cannot carry out."""
    found = refusal(arrays.N, arrays.K, config.compute_warp.size.K) if arrays.M * arrays.N else None
    if found is not None:
        raise ConfigError(f"kernel={config.kernel!r}: {found}; leave kernel and operator out")
