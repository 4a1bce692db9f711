"""The rules of configurations for `warp_specialised`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemmkit.kernels.common.rules import rule
from gemmkit.kernels.common.stream_k import StreamK
from gemmkit.kernels.sm90.shared_k import COLUMNS, SharedK, least_columns
from gemmkit.layouts import Planes, Swizzled
from gemmkit.operators.algebra import Algebra, units
from gemmkit.operators.wgmma import WGMMAOp

if TYPE_CHECKING:
    from gemmkit.config import Config

SCHEDULES = ("cooperative", "pingpong")
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (1, 8))
BOX = 256                              # elements that a TMA box can have along a dimension
STAGES = 32
ACCUMULATORS = 192                     # 32-bit registers of a consumer's sums: beyond it they spill


def validate(config: Config) -> None:
    """Raise ConfigError for the first rule that a configuration of this kernel breaks."""
    operator: Any = config.operator
    rule(isinstance(units(operator), WGMMAOp), "operator", operator, "the warp-specialised kernel multiplies with "
          "WGMMAOp; take it, or kernel='singlestage'")
    if isinstance(operator, Algebra):
        _validate_algebra(operator)
    _validate_roles(config)
    _validate_tiles(config)
    for name, across in (("a", "M"), ("b", "N")):
        _validate_operand(config, name, across)
    _validate_d(config)
    if config.splits != 1:
        _validate_splits(config)
    rule(not config.epilogue.stores_blocks, "epilogue", config.epilogue, "it stores whole blocks from shared "
          "memory, where the sums of this kernel never are; override finish or tile, or use MMAOp")
    differs = config.condition.depends_on
    together = config.cluster.size.M == 1 or "m" not in differs, config.cluster.size.N == 1 or "n" not in differs
    rule(config.condition.is_always or all(together), "cluster", config.cluster, "blocks of a cluster compute the same "
         "k-tiles, and the condition may differ between them; take Tile(M=1, N=1)")


def _validate_algebra(operator: Algebra) -> None:
    rule(operator.is_signed, "operator", operator, "wgmma adds or subtracts a product and cannot scale it: the table's "
         "coefficients must be 1 or -1 (or 0); take MMAOp or FPUOp as the base")
    negative = any(factor < 0 for row in operator.table for sums in row for factor in sums)
    rule(not negative or operator.base.accumulator.kind == "f", "operator", operator, "wgmma does not subtract products of "
         "integers, and the table has a -1; take FPUOp as the base")


def _validate_roles(config: Config) -> None:
    rule(config.schedule in SCHEDULES, "schedule", config.schedule, f"the schedules are {', '.join(SCHEDULES)}")
    warps = config.warps_per_block
    rule(warps % 4 == 0 and warps <= 12, "warps_per_block", warps, "one to three warpgroups of 4 warps multiply")
    rule(config.schedule != "pingpong" or warps == 8, "warps_per_block", warps, "two warpgroups play ping-pong: 8 warps")
    rule(config.producer_warps in (4, 8), "producer_warps", config.producer_warps, "4 or 8 warps produce")
    rule(config.producer_warps == 4 or warps <= 8, "producer_warps", config.producer_warps, "three warpgroups that multiply "
         "leave registers for 4 warps")
    rule(2 <= config.stages <= STAGES, "stages", config.stages, f"2 to {STAGES} stages are needed")
    rule(tuple(config.cluster.extents) in CLUSTERS, "cluster", config.cluster, "one block, two along M, two, four or "
         "eight along N, or two by two: Tile(M=1, N=1), Tile(M=2, N=1), Tile(M=1, N=2), Tile(M=1, N=4), Tile(M=1, N=8) or "
         "Tile(M=2, N=2)")


def _validate_tiles(config: Config) -> None:
    operator, parts = units(config.operator), getattr(config.operator, "parts", 1)
    block, group = config.block_shape.size, config.compute_warp.size
    consumers = 1 if config.schedule == "pingpong" else config.warps_per_block // 4
    rule(group.M % 64 == 0, "compute_warp", config.compute_warp, "a warpgroup multiplies 64 rows at a time: M must be a "
         "multiple of 64")
    rule(group.M * consumers == block.M, "compute_warp", config.compute_warp, lambda: f"{consumers} warpgroups of "
         f"M={group.M} rows share a tile of block_shape={config.block_shape!r}")
    rule(group.N == block.N == operator.N, "operator", operator, lambda: "its N must be that of block_shape="
         f"{config.block_shape!r} and of compute_warp={config.compute_warp!r}")
    rule(block.K % operator.K == 0, "block_shape", config.block_shape, "K must be a multiple of the operator's "
         f"{operator.K}")
    promote = operator.promote
    rule(promote % block.K == 0, "operator", operator, f"promote must be a multiple of the block's K={block.K}")
    registers = parts * group.M // 64 * operator.N // 2 * operator.accumulator.itemsize // 4 * (3 if promote else 1)
    own = operator.N // 2 * operator.accumulator.itemsize // 4
    rule(config.threads <= 384 or own <= 96, "operator", operator, f"a block of {config.threads} threads begins with 128 "
         f"registers each, and one instruction would take {own} for its sums, of which 96 can be had; take a smaller N, or "
         "fewer warps")
    most = ACCUMULATORS if config.threads <= 384 else 128
    rule(registers <= most, "compute_warp", config.compute_warp, f"a thread would hold {registers} registers of "
         f"sums, and {most} is the limit with {config.threads} threads; take smaller tiles")


def _validate_splits(config: Config) -> None:
    operator, sharing = units(config.operator), SharedK(config.splits, config.cluster)
    splits, N = config.splits, config.block_shape.size.N
    rule(operator is config.operator, "splits", splits, "sums of numbers of several parts are not exchanged; take splits=1")
    rule(config.schedule == "cooperative" or sharing.streams, "splits", splits, "consumers that play ping-pong have no time "
         "to exchange the sums of every tile; take schedule='cooperative', or StreamK()")
    rule(operator.accumulator.itemsize == 4, "splits", splits, f"sums in {operator.accumulator} are not exchanged")
    if isinstance(splits, StreamK):
        blocks, peers = splits.blocks, config.cluster.count
        rule(blocks is None or blocks % peers == 0, "splits", splits, f"blocks stand in clusters of {peers}; take a "
             "multiple of that, or StreamK()")
    elif not sharing.by_workspace:
        least = least_columns(config.shared_d_layout, config.global_d_layout.folds)
        rule(N % splits == 0 and N // splits % least == 0, "splits", splits, f"each block finishes N={N} / {splits} "
             f"columns, which must be a multiple of {COLUMNS} and of a panel's of D: of {least}; other numbers than 2, 4 "
             "and 8 go by way of a workspace, and have no such rule")


def _validate_operand(config: Config, name: str, across: str) -> None:
    layout, field = getattr(config, f"shared_{name}_layout"), f"shared_{name}_layout"
    operator = units(config.operator)
    if isinstance(config.operator, Algebra):
        rule(isinstance(layout, Planes) and isinstance(layout.plane, Swizzled), field, layout, "wgmma reads an algebra's "
             "numbers in swizzled planes; take layouts.Planes(Swizzled(...), ...)")
        layout = layout.plane
    rule(isinstance(layout, Swizzled), field, layout, "wgmma reads swizzled tiles; take layouts.Swizzled")
    k_axis = 1 if name == "a" else 0
    is_k = layout.axis == k_axis
    major = getattr(operator, f"{name}_major")
    rule((major == "K") == is_k, field, layout, f"the operator reads {name} {major}-major; take {name}_major="
         f"{'K' if is_k else 'MN'!r}")
    extents = dict(zip(config.block_shape.names, config.block_shape.extents))
    along = extents["K"] if is_k else extents[across]
    peers = config.cluster.size.N if name == "a" else config.cluster.size.M
    rule(along % layout.line == 0, field, layout, lambda: f"its panels are {layout.line} elements wide, and block_shape="
         f"{config.block_shape!r} must be a multiple of that along {'K' if is_k else across}")
    parts = extents[across] // 8 if is_k else along // layout.line
    rule(parts % peers == 0, "cluster", config.cluster, f"the blocks share {name}: its {along // layout.line} panels of "
         f"{extents[across]} lines cannot be divided in {peers}" if is_k else
         f"the blocks share {name}: its {parts} panels cannot be divided in {peers}")
    rule(extents[across] // (peers if is_k else 1) <= BOX, "block_shape", config.block_shape, f"{across} may be {BOX}")
    thread = getattr(config, f"mem_{name}_thread")
    moved = thread.count * layout.itemsize
    is_line = thread.extents[layout.axis] == thread.count and (16 % moved == 0 or moved % 16 == 0)
    rule(thread.count == 1 or is_line, f"mem_{name}_thread", thread, "a thread moves one element, or a line of 2, 4, 8 "
         "or a multiple of 16 bytes along the shared layout's contiguous axis")


def _validate_d(config: Config) -> None:
    layout = config.shared_d_layout
    is_along = isinstance(layout, Swizzled) and layout.axis in (1, config.global_d_layout.vector_axis)
    rule(is_along, "shared_d_layout", layout, "D leaves in swizzled panels; take Swizzled(RowMajor(...)), or "
         "Swizzled(ColMajor(...)) where D is contiguous along its columns")
    rule(layout.dtype == config.global_d_layout.dtype, "shared_d_layout", layout, f"D is {config.global_d_layout.dtype}")
    if layout.itemsize not in (1, 2, 4, 8):                       # TMA leaves it to the threads: no subtiles
        return
    rule(layout.line >= 8, "shared_d_layout", layout, f"its panels are {layout.line} elements wide, and 4 threads hold 8 "
         "neighbouring columns of a row; take a wider one")
    N = config.block_shape.size.N
    rule(layout.axis == 0 or N % layout.line == 0, "shared_d_layout", layout, f"its panels are {layout.line} elements "
         f"wide, and N={N} of the block must be a multiple of that")
