"""What a text of tiles of rows and columns imports, each with what it is for, and the names that texts call their own."""

from __future__ import annotations

from gemmkit.programs.expressions import KEPT

IMPORTS = [
    ("dataclasses", "dataclass", ()), ("gemmkit.components", "Component", ()), ("gemmkit.components", "Scalar", ()),
    ("gemmkit.kernels.attention.elements", "column_at", ("column_at",)),
    ("gemmkit.kernels.common.cluster", "Cluster", ("cluster",)),
    *(("gemmkit.kernels.common.pipeline", name, (name,)) for name in ("CLUSTER", "CLUSTER_WARPS")),
    ("gemmkit.kernels.common.pipeline", "Pipeline", ()), ("gemmkit.kernels.common.pipeline", "WARPS", ("WARPS",)),
    ("gemmkit.kernels.common.work", "Slot", ()), ("gemmkit.kernels.rasterisation", "Grouped", ()),
    ("gemmkit.kernels.sm90.store", "own_column", ("column", "own_column")),
    ("gemmkit.kernels.sm90.store", "own_row", ("row",)), ("gemmkit.kernels.sm90.warpgroups", "Warpgroups", ()),
    ("gemmkit.lang.control", "interleave", ("interleave",)), ("gemmkit.lang.control", "split", ("interleave",)),
    ("gemmkit.lang.registers", "apply", ("apply",)),
    ("gemmkit.programs.chains.collectives", "row_value", ("row_value",)),
    ("gemmkit.lang.values", "convert", ("convert",)), ("gemmkit.programs.collectives", "F32", ("convert",)),
    ("gemmkit.programs.collectives", "DirectOut", ("DirectOut",)),
    ("gemmkit.programs.collectives", "Part", ()), ("gemmkit.programs.collectives", "Product", ()),
    *(("gemmkit.programs.collectives", name, (name,)) for name in ("RowSums", "RowsOut")),
    ("gemmkit.programs.collectives", "Staged", ()), ("gemmkit.programs.collectives", "TmaOut", ("TmaOut",)),
    ("gemmkit.programs.collectives", "blocks", ()), ("gemmkit.programs.collectives", "row_of", ("row_of",)),
    *(("gemmkit.programs.columns", name, (name,)) for name in ("ColumnSums", "Columns", "ColumnsOut")),
    *(("gemmkit.ptx.approximate", name, (name,)) for name in ("exp2", "log2", "reciprocal")),
    *(("gemmkit.ptx.cluster", name, ("cluster",)) for name in ("cluster_barrier", "cluster_rank")),
    ("gemmkit.ptx.mbarrier", "mbarrier_fence_init", ()), ("gemmkit.ptx.special", "barrier", ("barrier",)),
    *(("gemmkit.ptx.special", name, ()) for name in ("block_x", "grid_x", "rolled", "thread_index", "udiv",
                                                 "uniform")),
    *(("gemmkit.ptx.warpgroup", name, ()) for name in ("grid_launch_dependents", "grid_wait")),
    *(("gemmkit.ptx.wgmma", name, ()) for name in ("wgmma_commit", "wgmma_fence", "wgmma_wait")),
]
#: What a text calls its own things: arrays, cells and indices of programs are called otherwise.
OWN_NAMES = frozenset({name for _, name, _ in IMPORTS} | {
    "SHARED_BYTES", "Sizes", "WARPGROUPS", "abs", "before", "cluster", "column", "column_float", "consume", "group",
    "kernel", "math", "max", "min", "order", "place", "place_float", "produce", "rank", "ring", "row", "row_float",
    "rows", "sizes", "slot", "tile", "tiles", "values", "zero"})
OWN_STARTS = ("at_", "before_", "make_", "ring_", "slot_", "out_", "map_", "rows_of_", "columns_of_", "element_of_", "last_",
              "value_", KEPT)
