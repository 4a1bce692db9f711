"""Default mappings of Hopper's warp-specialised kernel: when it is the one to take, which tables its mapping is chosen from,
and what follows from a mapping.

A table (`MappingTable`) belongs to a way in which operands travel. `propose` takes the mapping with the least modelled time
of the product's table; `complete` and `fill` give the other fields; `assumed_spec` asks the kernel how operands travel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gemmkit.components import with_fields
from gemmkit.epilogues import Epilogue, result_layout
from gemmkit.kernels.collectives.operand import OperandArrays
from gemmkit.kernels.collectives.scheduler import Grouped, Hilbert
from gemmkit.kernels.collectives.split_k import StreamK
from gemmkit.kernels.config import Config, Problem
from gemmkit.kernels.sm90.exchange import COLUMNS, SharedK
from gemmkit.kernels.sm90.kernel import TmaProducer
from gemmkit.kernels.sm90.mainloop import MnMajorTf32, RegisterMainloop
from gemmkit.kernels.sm90.rewrite import RewriteProducer, Transpose
from gemmkit.kernels.sm90.routes import CpAsyncLines, CpAsyncProducer, PlacedTma, Request, StagedRoute, Tma
from gemmkit.kernels.spec import Condition, can_be_asked
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.number_rules import part_dtypes
from gemmkit.layouts import (
    ArrayLayout,
    ColMajor,
    ColumnInterleaved,
    Im2col,
    Interleaved,
    Joined,
    Matricised,
    Plain,
    Planar,
    RowMajor,
    Sliding,
    Swizzled,
    Zero,
)
from gemmkit.operators.algebra import Algebra
from gemmkit.operators.base import units
from gemmkit.operators.wgmma import WGMMAOp
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tiling import Tile
from gemmkit.tuning import tables
from gemmkit.tuning.model import (
    LINE,
    SHORT_LINES,
    UNALIGNED_LINES,
    Asked,
    CostedTile,
    Infos,
    Proposal,
    RowAlignment,
    Sizes,
    Supply,
    by_workspace,
    fastest,
    fitted_tiles,
    smallest,
    streaming,
    with_rows_exchanged,
    with_second_pass,
)
from gemmkit.tuning.operators import SIXTEEN, result_dtype
from gemmkit.tuning.problems import Choice, MappingProblem, choose

MOST_STAGES = 8
PROMOTION = 128                        # elements along K after which sums of float8 are added to others in float32


# -- the tables -------------------------------------------------------------------------------------------------------

def mappings_of(rows: Iterable[tuple[Any, ...]], **fields: Any) -> tuple[CostedTile, ...]:
    """Rows of `gemmkit.tuning.tables` as mappings."""
    return tuple(CostedTile(*row, **fields) for row in rows)


def _stepping(mappings: tuple[CostedTile, ...], steps: dict[Any, int]) -> tuple[CostedTile, ...]:
    """Those of which the cycles of a k-tile are among ``steps``, by their rows or by rows and columns."""
    found = ((one, steps.get((one.M, one.N), steps.get(one.M))) for one in mappings)
    return tuple(dataclasses.replace(one, step=step) for one, step in found if step is not None)


LIKELY, = mappings_of([tables.LIKELY])
MAPPINGS = mappings_of(tables.MAPPINGS) + mappings_of(tables.DEEP, depth=2 * LINE)
INTERLEAVED = tuple(dataclasses.replace(one, finish=one.finish + tables.FOLDING.get((one.M, one.N), 0)) for one in MAPPINGS)
# Where rows of interleaved columns lie along N, a tile takes a piece of a row of each part. A piece that ends within a line
# of the L2 is fetched twice: by 128x192, 96 columns of each, 8192^3 takes 5.6 ms on an H100, 3.6 to 3.9 by 128x128 (H200:
# 3.49 and 3.61), and 8192 x 14336 x 4096 4.0 and 3.2 to 3.4 (2.95, 2.96).
INTERLEAVED_ROWS = tuple(one for one in INTERLEAVED if one.N != 192)
ALIGNED, FEW_COLUMNS, WITH_C = map(mappings_of, (tables.ALIGNED, tables.FEW_COLUMNS, tables.WITH_C))
CLUSTERED = tuple(dataclasses.replace(one, cluster=cluster)
                  for one in MAPPINGS + mappings_of((*tables.NARROW, *tables.THREE, *tables.BETWEEN))
                  for cluster in tables.CLUSTERS.get((one.M, one.N, one.depth // LINE), tables.ALL_CLUSTERS))
# The same tiles by clusters that stream K. Their steps and ends are those of whole tiles; what a stream costs beside is
# `gemmkit.tuning.model.streamed_cycles`.
STREAMED, STREAMED_CLUSTERED = streaming(MAPPINGS), streaming(CLUSTERED)
SPLIT = tuple(one for row in tables.SPLIT for shares in tables.SHARES for one in mappings_of([row], splits=shares))
ALONE = tuple(one for one in mappings_of(tables.WORKSPACE) if one.cluster == (1, 1))    # no blocks share operands
SMALL_SPLIT = tuple(one for shares in tables.SHARES[:2] for one in mappings_of([tables.SMALL_SPLIT], splits=shares))
SMALL_SHARES = tuple(one for row, lines, listed in tables.SMALL_SHARES for shares in listed
                     for one in mappings_of([row], splits=shares, depth=lines * LINE, given=tables.SMALL_SHARED))
STAGED_SPLIT = _stepping(SPLIT, tables.STAGED_STEPS)
STAGED = mappings_of(tables.STAGED, order=Hilbert()) + STAGED_SPLIT
REWRITTEN = mappings_of(tables.REWRITTEN, order=Hilbert()) + STAGED_SPLIT
TRANSFORMED = mappings_of(tables.TRANSFORMED) + STAGED_SPLIT
ACROSS = mappings_of(tables.ACROSS) + _stepping(SPLIT, tables.ACROSS_STEPS)
CP_ASYNC = mappings_of(tables.CP_ASYNC) + _stepping(SPLIT, tables.COPIED_STEPS)
TRANSPOSED = mappings_of(tables.TRANSPOSED, order=Hilbert()) + _stepping(SPLIT, tables.TRANSPOSED_STEPS)
UNALIGNED = mappings_of(tables.UNALIGNED)
PROMOTED = mappings_of(tables.PROMOTED) + _stepping(SPLIT, tables.PROMOTED_STEPS)
SCALED = mappings_of(tables.SCALED)


@plain_dataclass(frozen=True, eq=False)
class MappingTable:
    """Mappings to choose among, and what limits them.

    ``workspace`` are those whose blocks share K by a workspace, from ``least_shared`` k-tiles on; ``small`` those of few
    columns whose blocks share it within a cluster, as D's lines allow; ``streamed`` those whose clusters stream K, and
    ``streamed_clustered`` beside them where ``clustered`` are: for the tuner and the winners, not chosen by their
    modelled time. ``aligned`` are there beside the others where all rows begin at lines of the L2, and ``clustered``
    where they do not and its ``supply`` limits all; with ``is_ragged`` they never begin there. ``halves_stages`` says
    that a short K takes stages of half a line: an empty half would be staged, too; ``orders_few`` that a few tiles take
    the order that is found the soonest (`CostedTile.ordered`); ``tries_more`` that the tuner tries tiles beside all
    these (`gemmkit.tuning.tables.EXTRA`).
    """

    mappings: tuple[CostedTile, ...]
    workspace: tuple[CostedTile, ...] = ()
    streamed: tuple[CostedTile, ...] = ()
    streamed_clustered: tuple[CostedTile, ...] = ()
    least_shared: int = 0
    small: tuple[CostedTile, ...] = ()
    aligned: tuple[CostedTile, ...] = ()
    clustered: tuple[CostedTile, ...] = ()
    supply: Supply = UNALIGNED_LINES
    is_ragged: bool = False
    halves_stages: bool = False
    orders_few: bool = False
    tries_more: bool = False

    def supply_of(self, a: ArrayInfo | None, b: ArrayInfo | None) -> Supply | None:
        """What the L2 gives of these operands; None where it limits nothing."""
        of_a, of_b = (self.is_ragged or is_unaligned(info) for info in (a, b))
        return dataclasses.replace(self.supply, a=of_a, b=of_b) if of_a or of_b else None


def is_unaligned(info: ArrayInfo | None) -> bool:
    """Whether rows begin elsewhere than at multiples of 128 bytes."""
    return info is not None and any(stride * info.dtype.itemsize % LINE for stride in info.strides if stride != 1)


BY_TMA = MappingTable(MAPPINGS + SPLIT, mappings_of(tables.WORKSPACE), STREAMED, STREAMED_CLUSTERED, tables.LEAST_SHARED,
                      SMALL_SHARES, ALIGNED + FEW_COLUMNS, CLUSTERED, orders_few=True, tries_more=True)
BY_PARTS = dataclasses.replace(BY_TMA, small=(), aligned=ALIGNED)              # what it is of operands that are not plain
BY_WINDOWS = dataclasses.replace(BY_PARTS, mappings=MAPPINGS + mappings_of(tables.WINDOWS) + SPLIT,
                                 workspace=mappings_of(tables.WORKSPACE + tables.WINDOWS_WORKSPACE))
BY_BRAIDS = dataclasses.replace(BY_PARTS, mappings=INTERLEAVED + mappings_of(tables.BRAIDED) + SPLIT)
BY_BRAIDED_ROWS = dataclasses.replace(BY_PARTS, mappings=INTERLEAVED_ROWS + SPLIT, aligned=())
BY_TRANSPOSES = MappingTable(TRANSPOSED, _stepping(ALONE, tables.TRANSPOSED_STEPS), least_shared=tables.LEAST_SHARED)
BY_REGISTERS = MappingTable(TRANSFORMED)
BY_FETCHES = MappingTable(ACROSS, _stepping(ALONE, tables.ACROSS_STEPS), least_shared=tables.LEAST_SHARED)
BY_PROMOTION = MappingTable(PROMOTED, _stepping(ALONE, tables.PROMOTED_STEPS), least_shared=tables.LEAST_SHARED)
BY_REWRITES = MappingTable(REWRITTEN, halves_stages=True)
BY_CP_ASYNC = MappingTable(CP_ASYNC, supply=SHORT_LINES, is_ragged=True, halves_stages=True)
BY_THREADS = MappingTable(STAGED, halves_stages=True)
BY_ELEMENTS = MappingTable(UNALIGNED, mappings_of(tables.UNALIGNED_WORKSPACE))


def _of_words(rows: Iterable[tuple[Any, ...]], workspace: Iterable[tuple[Any, ...]], packed: int) -> MappingTable:
    """The table of weights in words, in as many shares by a cluster as a row says, or by way of a workspace."""
    return MappingTable(tuple(one for *row, depth, most in rows for splits in (1, *tables.SHARES) if splits <= most
                              for one in mappings_of([tuple(row)], depth=depth, splits=splits, packed=packed)),
                        tuple(one for *row, depth in workspace
                              for one in mappings_of([tuple(row)], depth=depth, packed=packed)),
                        least_shared=tables.LEAST_SHARED)


DEQUANTISED = _of_words(tables.DEQUANTISED, tables.DEQUANTISED_WORKSPACE, 4)
DEQUANTISED_FLOAT8 = _of_words(tables.DEQUANTISED_FLOAT8, tables.DEQUANTISED_FLOAT8_WORKSPACE, 2)


def table_by_arrays(values: dict[str, Any], arrays: OperandArrays | None) -> MappingTable | None:
    """The table of plain operands where these alone tell it: TMA brings both as tensor cores read them, or cannot take an
    array. None where the kernel is to be asked (`table_of`). Without ``arrays`` all suit TMA."""
    operator, suit = values["operator"], True
    for name, k_axis, dtype in (("a", 1, operator.dtype), ("b", 0, operator.b_dtype)):
        layout = values[f"global_{name}_layout"]
        if isinstance(layout, Plain) and arrays is not None and why_not(getattr(arrays, name), layout.axis) is not None:
            return BY_ELEMENTS
        suit = (suit and isinstance(layout, Plain) and layout.is_plain and layout.dtype == dtype
                and (dtype.itemsize == 2 or layout.axis == k_axis) and is_untouched(name, values)
                and f"shared_{name}_layout" not in values)
    return BY_TMA if suit else None


def table_of(spec: Any, arrays: OperandArrays | None) -> MappingTable:
    """The table for a specialisation of `warp_specialised`, by what produces its stages, of operands that TMA does not bring
    as they are (`table_by_arrays`). Without ``arrays``, those that suit the layouts' best route are assumed."""
    operands = {"a": spec.a, "b": spec.b}
    if any(x.is_masked for x in operands.values()):           # as measured: a triangle's tiles are 128 x 256
        return BY_THREADS
    if isinstance(spec.producer, RewriteProducer):
        turned = any(isinstance(x.route, Transpose) for x in operands.values())
        passed = all(x.to_shared.is_identity for x in operands.values())
        return BY_TRANSPOSES if turned and passed else BY_REWRITES
    if isinstance(spec.mainloop, RegisterMainloop):
        return BY_FETCHES if isinstance(spec.mainloop.source, MnMajorTf32) else BY_REGISTERS
    if isinstance(spec.producer, TmaProducer):
        b = spec.b.layout
        if any(isinstance(x.route, PlacedTma) for x in operands.values()):
            return BY_WINDOWS
        if isinstance(b, ColumnInterleaved) and b.slots == 2:
            return BY_BRAIDED_ROWS if b.contiguous_axis == 1 else BY_BRAIDS
        return BY_TMA
    staged = [x for x in operands.values() if isinstance(x.route, StagedRoute)]
    suits = arrays is None and not any(CpAsyncLines.refuses_layout(Request(spec, x, None, (0, 0))) for x in staged)
    return BY_CP_ASYNC if suits or isinstance(spec.producer, CpAsyncProducer) else BY_THREADS


# -- when they are asked ----------------------------------------------------------------------------------------------

#: With one of these given, a mapping is the caller's.
MAPPING_FIELDS = {"kernel", "block_shape", "warps_per_block", "compute_warp", "blocks_per_sm",
                  *(f"shared_{name}_layout" for name in "abcd"),
                  *(f"mem_{name}_{what}" for name in ("a", "b", "cd") for what in ("warp", "thread"))}


def applies(a: np.dtype, b: np.dtype, fields: dict[str, Any], device: DeviceInfo) -> bool:
    """Whether a product for which nothing but these fields is given should go to Hopper's tensor cores."""
    epilogue = fields.get("epilogue")
    stores_blocks = isinstance(epilogue, Epilogue) and epilogue.stores_blocks
    return (device.arch[0] == 9 and a == b and a in SIXTEEN and not stores_blocks and not set(fields) & MAPPING_FIELDS)


def is_untouched(name: str, fields: dict[str, Any]) -> bool:
    """Whether no transform stands between an operand's memory and the tensor cores."""
    return all(getattr(fields.get(f"transform_{way}_{name}"), "is_identity", True)
               for way in ("global_to_shared", "shared_to_regs"))


# -- which mapping of them --------------------------------------------------------------------------------------------

def propose(asked: Asked, device: DeviceInfo) -> Proposal | None:
    """The operator for a product of 16-bit floats, and the fields of its mapping; None for others."""
    mapping = mapping_for(asked, device)
    return None if mapping is None else (_operator(mapping.N, asked.operands[0].dtype), mapping.fields)


def mapping_for(asked: Asked, device: DeviceInfo) -> CostedTile | None:
    """The mapping of a product of 16-bit floats; None for others."""
    (a, b), infos, fields, sizes, products = asked.operands, asked.infos, asked.fields, asked.sizes, asked.products
    if fields.get("operator") is not None or not applies(a.dtype, b.dtype, fields, device):
        return None
    c, d, of_a, of_b, of_c = asked.layouts["c"], asked.layouts["d"], infos["a"], infos["b"], infos["c"]
    table = table_for(a, b, of_a, of_b, fields, sizes)
    always = getattr(fields.get("condition"), "is_always", True)
    if of_windows := table is BY_WINDOWS:
        table = _sliding(table, a, b)
    supply = table.supply_of(of_a, of_b)
    listed = table.mappings
    if table is BY_ELEMENTS and isinstance(a, Plain) and isinstance(b, Plain) and of_a is not None and of_b is not None:
        copies = RowAlignment.of(a, b, of_a, of_b, infos["out"], sizes[1])
        listed = tuple(one for one in copies.hoppers(BY_ELEMENTS, sizes, device, products) if always or one.splits == 1)
    else:
        first, last = _shareable(table, supply is None, a, b)
        if supply is None:
            first += table.small
        first = tuple(one for one in first if one.shares == 1 or _finishes(one, d, fields.get("epilogue")))
        workspace = table.workspace
        if getattr(d, "is_half", False):
            first, last, workspace = map(_of_half, (first, last, workspace))
        shared = by_workspace(sizes, device, products, workspace, table.least_shared) if always else ()
        last += WITH_C if of_c is not None and table is BY_TMA and supply is None else ()
        listed = first + can_share(shared, a, b) + last if always else first
    if not always:
        listed = _in_blocks(listed, fields["condition"], a.dtype.itemsize)
    if of_windows and isinstance(d, Matricised):
        listed = tuple(dataclasses.replace(one, finish=one.finish + tables.WINDOWS_STORED * one.M * one.N) for one in listed)
    if "splits" in fields:
        listed = tuple(one for one in listed if one.shares == fields["splits"]) or listed
    reads_late = _reads_late(a, b, c, d, infos, fields, sizes)
    if reads_late:
        # What a finishing consumer reads by way of L1 makes the one that multiplies wait: 7 % of its time, measured.
        listed = tuple(dataclasses.replace(x, step=1.07 * x.step) if x.schedule == "pingpong" else x for x in listed)
    epilogue = fields.get("epilogue")
    if isinstance(epilogue, Epilogue) and epilogue.is_last and epilogue.reduces:
        together = (with_rows_exchanged(one, sizes) for one in listed) if _has_short_states(d) and always else ()
        listed = tuple(with_second_pass(one, sizes, products, a.dtype.itemsize) for one in listed)
        listed += can_share(filter(None, together), a, b)
    mapping = fastest(sizes, device, mappings=listed, supply=supply, is_tall=reads_late, products=products)
    mapping = mapping.ordered(sizes, products) if table.orders_few else mapping
    if table.halves_stages and sizes[2] * a.dtype.itemsize <= LINE // 2:
        mapping = dataclasses.replace(mapping, depth=LINE // 2)
    is_aligned, is_alone = table is BY_TMA and supply is None, always and products == 1 and set(fields) <= {"epilogue"}
    is_late = reads_late or getattr(epilogue, "is_last", False) or getattr(d, "is_half", False)
    if not (is_aligned and is_alone) or is_late or not isinstance(b, Plain) or b.axis != 0:
        return mapping
    fitted = (one for one in can_share(fitted_tiles(sizes, device), a, b)
              if one.shares == 1 or asked.new is ColMajor or _finishes(one, d, epilogue))
    return min((mapping, *fitted), key=lambda one: one.fetching(sizes, device))


def _finishes(mapping: CostedTile, d: ArrayLayout | None, epilogue: object) -> bool:
    """Whether each block of a cluster that shares the K of a tile finishes pieces of D's lines (`least_columns`)."""
    folds, dtype = getattr(d, "folds", 1), d.dtype if d is not None else getattr(epilogue, "result_dtype", None)
    least = COLUMNS * folds if folds > 1 else max(COLUMNS, NARROWEST // (2 if dtype is None else dtype.itemsize))
    return bool(mapping.N // mapping.shares % least == 0)


def _sliding(table: MappingTable, a: ArrayLayout, b: ArrayLayout) -> MappingTable:
    """In place of a table's mappings those whose tiles are as deep as the taps of a window, which share their lines
    (`gemmkit.layouts.Sliding`), or beside its shares those as wide."""
    of_a, of_b = (getattr(x, "slide", None) for x in (a, b))
    if of_a:
        line = a.longest_line * a.dtype.itemsize
        rows = (row for row in tables.SLIDING if row[0] * line <= tables.SLIDING_BYTES)
        return dataclasses.replace(table, mappings=mappings_of(rows, depth=of_a[0] * line))
    if of_b:
        N = of_b[0] * b.longest_line
        wide = ((M, N, "cooperative", M // 16, (1, 1), step * N, 8000, 0) for M, step in tables.SLIDING_WORKSPACE)
        return dataclasses.replace(table, workspace=mappings_of(wide, taps=of_b[0]) + table.workspace)
    return table


def _of_half(listed: tuple[CostedTile, ...]) -> tuple[CostedTile, ...]:
    """The mappings where half of a symmetric D is computed."""
    return tuple(dataclasses.replace(one, is_half=True) for one in listed)


@lru_cache(maxsize=64)
def _operator(N: int, dtype: np.dtype) -> WGMMAOp:
    """The operator for 16-bit operands."""
    return WGMMAOp(N, dtype=dtype)


def _shareable(table: MappingTable, is_aligned: bool, a: ArrayLayout,
               b: ArrayLayout) -> tuple[tuple[CostedTile, ...], tuple[CostedTile, ...]]:
    """A table's mappings, and those beside them for rows that begin at lines of the L2 or do not, of which the blocks of a
    cluster `can_share` operands."""
    if type(a) in PLAIN and type(b) in PLAIN:
        return _shareable_of(table, is_aligned, a, b)
    return can_share(table.mappings, a, b), can_share(table.aligned if is_aligned else table.clustered, a, b)


PLAIN = RowMajor, ColMajor


@lru_cache(maxsize=256)
def _shareable_of(table: MappingTable, is_aligned: bool, a: Any, b: Any) -> tuple[tuple[CostedTile, ...],
                                                                                  tuple[CostedTile, ...]]:
    return can_share(table.mappings, a, b), can_share(table.aligned if is_aligned else table.clustered, a, b)


def narrow_mappings(operator: WGMMAOp, values: dict[str, Any], sizes: Sizes | None, device: DeviceInfo, products: int,
                    arrays: OperandArrays | None = None) -> tuple[MappingTable, tuple[CostedTile, ...]]:
    """The table of plain numbers once it is said what multiplies, and the mappings to choose among: those whose blocks share
    K by a workspace are among them."""
    table = BY_PROMOTION if operator.promote else _table(values, arrays)
    sizes, itemsize = sizes or (0, 0, 0), operator.dtype.itemsize
    always = getattr(values.get("condition"), "is_always", True)
    workspace = table.workspace if always and "splits" not in values else ()
    shared = by_workspace(sizes, device, products, workspace, table.least_shared, itemsize)
    step = next((one.step for one in table.mappings if (one.M, one.N) == tables.SMALL_SPLIT[:2]), None)
    if itemsize != 2 and step is not None and sizes[2] * itemsize >= tables.LEAST_SMALL * LINE:
        shared += tuple(dataclasses.replace(one, step=step) for one in SMALL_SPLIT)
    return table, table.mappings + shared


def columns_of_scaled(sizes: Sizes, device: DeviceInfo, most: int) -> int:
    """How wide an operator, of ``most`` columns, the mapping with the least modelled time takes where operands have block
    scales."""
    return fastest(sizes, device, itemsize=1, mappings=tuple(one for one in SCALED if one.N <= most)).N


def _in_blocks(listed: tuple[CostedTile, ...], condition: Condition, itemsize: int) -> tuple[CostedTile, ...]:
    """The mappings of whose tiles a condition can be asked; all where it can of none: the configuration's rule then says
    why."""
    return tuple(one for one in listed
                 if can_be_asked(condition, Tile(M=one.M, N=one.N, K=one.depth // itemsize))) or listed


def _reads_late(a: ArrayLayout, b: ArrayLayout, c: ArrayLayout | None, d: ArrayLayout | None, infos: Infos,
                fields: dict[str, Any], sizes: Sizes) -> bool:
    """Whether consumers read C, or as many elements for the epilogue, from global memory at a tile's end: what does not come
    to D's subtiles ahead of time, where there is room for one array (`gemmkit.kernels.sm90.epilogue_load`)."""
    epilogue, of_c, out = fields.get("epilogue"), infos.get("c"), infos.get("out")
    if isinstance(epilogue, Epilogue) and epilogue.reads_tiles:
        if of_c is not None or len(epilogue.alongside()) != 1:
            return True
    elif of_c is None:
        return False
    operator = WGMMAOp(LIKELY.N, dtype=a.dtype)
    given = dict(fields, operator=operator, global_a_layout=a, global_b_layout=b)
    if c is not None:
        given["global_c_layout"] = c
    given.setdefault("global_d_layout", d or RowMajor(result_dtype(a.dtype, b.dtype, c, operator)))
    if out is None:                                            # one that the call makes
        M, N, _ = sizes
        out = ArrayInfo(0, (M, N), (N, 1), given["global_d_layout"].dtype, -1, False, "numpy")
    spec = assumed_spec(given, LIKELY, OperandArrays(infos["a"], infos["b"], out, *sizes, of_c))
    return not spec.store.reads_ahead


def _has_short_states(d: Any) -> bool:
    """Whether rows of D are normalised in float32."""
    return d is None or (d.dtype.itemsize < 8 and d.folds == 1)


_OF_A_MAPPING = {"block_shape", "compute_warp", "warps_per_block", "schedule", "cluster", "stages", "shared_d_layout"}


def fill(values: dict[str, Any], sizes: Sizes | None, device: DeviceInfo, products: int = 1) -> tuple[Config, int] | None:
    """Complete the mapping of a Config for WGMMAOp in place; layouts are given. Where that made the configuration, to ask
    what it takes: it, and the bytes of shared memory that it needs at most."""
    whole: Any = values["operator"]
    operator = units(whole)
    is_algebra = whole is not operator
    streams = isinstance(values.get("splits"), StreamK)
    shares = not (is_algebra or streams) and operator.accumulator.itemsize == 4 and not set(values) & _OF_A_MAPPING
    if set(LIKELY.fields) <= set(values):
        return _fit(values, LIKELY, device, sizes)             # of which nothing is left to take
    table = (algebra_mappings(whole, values) if is_algebra else SCALED if operator.is_scaled
             else narrow_mappings(operator, values, sizes, device, products)[1])
    listed = _agreeing([one for one in table if shares or one.splits in (1, values.get("splits"))], values)
    completed, made = choose(WgmmaProblem(values, operator, tuple(listed), shares, sizes, products), device).spec
    values.update(completed)
    found: tuple[Config, int] | None = made
    return found


@plain_dataclass(frozen=True)
class WgmmaProblem(MappingProblem):
    """What is left open of a mapping for WGMMAOp: of the ``listed`` mappings the one that costs least."""

    values: dict[str, Any]
    operator: WGMMAOp
    listed: tuple[CostedTile, ...]
    shares: bool
    sizes: Sizes | None
    products: int

    def candidates(self, device: DeviceInfo) -> Iterator[CostedTile]:
        listed, N = self.listed, self.operator.N
        while listed:
            mapping = fastest(self.sizes, device, N, self.operator.dtype.itemsize, listed, products=self.products)
            yield mapping
            others = tuple(one for one in listed if one.N == N and one is not mapping)
            listed = others or tuple(one for one in (smallest(N),) if mapping != one)

    def specialise(self, mapping: CostedTile, device: DeviceInfo) -> Choice:
        values = dict(self.values)
        values.setdefault("splits", mapping.splits if self.shares else 1)
        made = _fit(values, mapping, device, self.sizes)
        return Choice((values, made))

    def refusal(self, refused: list[ConfigError], last: CostedTile) -> ConfigError:
        return refused[0]                              # with what is given, the others are no mappings either


def _agreeing(listed: list[CostedTile], values: dict[str, Any]) -> list[CostedTile]:
    """Those of the mappings that have what is given of one; where none has, all."""
    for name in ("schedule", "splits", "warps_per_block"):
        if name in values:
            listed = [one for one in listed if one.fields[name] == values[name]] or listed
    return listed


def _fit(values: dict[str, Any], mapping: CostedTile, device: DeviceInfo, sizes: Sizes | None) -> tuple[Config, int] | None:
    """A mapping's fields and those that follow from them, with as many stages as fit beside what else the kernel keeps in
    shared memory: the kernel itself says how much that is. Raises ConfigError where it does not take them."""
    complete(values, mapping)
    if "stages" in values:
        return None
    least = Config(**values, stages=LEAST_STAGES)
    spec: Any = least.spec()
    if spec.shared_bytes > device.shared_memory_per_block:
        least.check_device(device)                             # says so
    more = (device.shared_memory_per_block - spec.shared_bytes - spec.row_bytes(sizes)) // spec.bytes_per_stage
    more = max(0, min(MOST_STAGES - LEAST_STAGES, more))
    values["stages"] = LEAST_STAGES + more
    return with_fields(least, {"stages": values["stages"]}), spec.shared_bytes + more * spec.bytes_per_stage


# -- what the kernel is asked -----------------------------------------------------------------------------------------

def table_for(a: ArrayLayout, b: ArrayLayout, of_a: ArrayInfo | None, of_b: ArrayInfo | None, fields: dict[str, Any],
              sizes: Sizes) -> MappingTable:
    """The mappings to choose among for 16-bit operands in these layouts and arrays; ``fields`` are the caller's."""
    given = dict(fields, operator=WGMMAOp(LIKELY.N, dtype=a.dtype), global_a_layout=a, global_b_layout=b)
    return _table(given, None if of_a is None or of_b is None else OperandArrays(of_a, of_b, None, *sizes))


def _table(values: dict[str, Any], arrays: OperandArrays | None = None) -> MappingTable:
    """The mappings to choose among, by the routes that operands take in the kernel on a likely mapping. Without ``arrays``
    all suit TMA."""
    return table_by_arrays(values, arrays) or table_of(assumed_spec(values, LIKELY, arrays), arrays)


# -- what follows from a mapping --------------------------------------------------------------------------------------

WIDTHS = 128, 64, 32                   # bytes of a swizzle's lines
NARROWEST = WIDTHS[-1]
LEAST_STAGES = 2


@dataclass(frozen=True)
class AnyTiles(Condition):
    """A condition that can be asked of any tiles."""


def complete(values: dict[str, Any], mapping: CostedTile) -> None:
    """A mapping's fields, and those that follow from them, but for the stages."""
    whole = values["operator"]
    operator = units(whole)
    values.setdefault("kernel", "warp_specialised")
    values.setdefault("splits", mapping.splits)
    values.setdefault("order", mapping.order)
    _fill_tiles(values, operator, mapping)
    _fill_shared(values, operator)
    if whole is not operator:
        split(values)
    _fill_moves(values)
    condition = values.get("condition")
    always = condition is None or condition.is_always
    cluster = next(c for c in (mapping.cluster, mapping.cluster[::-1], (1, 1))
                   if c == (1, 1) or (always and _divides(values, c)))
    values.setdefault("cluster", Tile(M=cluster[0], N=cluster[1]))
    _fill_d(values)
    majors = dict(a_major="K" if values["shared_a_layout"].axis == 1 else "MN",
                  b_major="K" if values["shared_b_layout"].axis == 0 else "MN")
    ordered = dataclasses.replace(operator, **majors)
    values["operator"] = ordered if whole is operator else whole.with_base(ordered)


def assumed_spec(values: dict[str, Any], mapping: CostedTile, arrays: OperandArrays | None = None) -> Any:
    """The kernel's specialisation for these fields on a mapping, which says by which routes operands travel. What is not
    given of the problem is plain; without ``arrays`` all suit TMA."""
    assumed = dict(values)
    if not getattr(values.get("condition"), "is_always", True):
        assumed["condition"] = AnyTiles()                      # other tiles may be chosen, which the condition takes
    accumulator = assumed["operator"].fragment_c.dtype
    assumed.setdefault("global_c_layout", Zero(accumulator))
    if "global_d_layout" not in assumed:
        assumed["global_d_layout"] = (Interleaved if accumulator.names is not None or accumulator.kind == "c"
                                      else RowMajor)(accumulator)
    assumed["global_d_layout"] = result_layout(assumed["global_b_layout"], assumed.get("epilogue"),
                                               assumed["global_d_layout"])
    complete(assumed, mapping)
    assumed.setdefault("stages", LEAST_STAGES)
    return Config(**assumed).spec(arrays)


# -- fields -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Lying:
    """How an operand lies in shared memory in tiles of any extents: along ``k_axis`` where it ``is_along``, else across K
    where its tile is wide enough; of interleaved columns' ``slots`` TMA brings parts. ``longest`` is how many neighbours in
    memory a line has at most; 0: any number."""

    k_axis: int
    dtype: np.dtype
    is_along: bool
    slots: int
    longest: int
    slide: tuple[int, int] | None = None

    @classmethod
    def of(cls, layout: Any, k_axis: int, dtype: np.dtype) -> Lying:
        axis = layout.vector_axis
        lines = (isinstance(layout, (ColumnInterleaved, Im2col, Joined, Plain, Planar, Matricised))
                 or layout.stored is not None)
        # Only 16-bit operands can be contiguous across K.
        return cls(k_axis, dtype, axis in (None, k_axis) or dtype.itemsize != 2 or not lines, getattr(layout, "slots", 1),
                   layout.longest_line, getattr(layout, "slide", None))

    def lies_along(self, across: int) -> bool:
        """Whether its lines lie along K in a tile with ``across`` rows of A, or columns of B."""
        return self.is_along or bool(across * self.dtype.itemsize % 32)

    def width(self, across: int, depth: int) -> int:
        """Bytes of the swizzle's lines."""
        extent = depth if self.lies_along(across) else across // self.slots
        line = math.gcd(extent, self.longest) * self.dtype.itemsize
        return _width(extent * self.dtype.itemsize if line < NARROWEST else line)

    def layout(self, across: int, depth: int) -> Swizzled:
        is_along = self.lies_along(across)
        found = _swizzled(self.k_axis if is_along else 1 - self.k_axis, self.dtype, self.width(across, depth))
        if self.slide and (found.line, depth if is_along else across) == (self.longest, self.slide[0] * self.longest):
            return Sliding(found.layout, found.width, panels=self.slide[0], step=self.slide[1])
        return found

    def divides(self, across: int, depth: int, peers: int) -> bool:
        """Whether so many blocks of a cluster can each load a part of the tile."""
        if peers == 1 or self.lies_along(across):
            return are_parts(across, None, peers)
        return are_parts(across, self.width(across, depth) // self.dtype.itemsize, peers)


def are_parts(across: int, line: int | None, peers: int) -> bool:
    """Whether a tile of so many rows of A, or columns of B, is in ``peers`` parts: some of the panels of lines of ``line``
    elements, or where lines lie along K (None) some lines of each panel."""
    return across // (line or 8) % peers == 0


def can_share(mappings: Iterable[CostedTile], a: Any, b: Any) -> tuple[CostedTile, ...]:
    """Those of the mappings of which the blocks of a cluster can each load a part of what they share of operands in these
    layouts.

    >>> from gemmkit.layouts import ColMajor, RowMajor
    >>> pair = CostedTile(128, 64, "cooperative", 8, (2, 1), 300, 3000, 0)       # two blocks share 64 columns of B
    >>> can_share([pair], RowMajor("float16"), ColMajor("float16")) == (pair,)
    True
    >>> can_share([pair], RowMajor("float16"), RowMajor("float16"))
    ()
    """
    size = a.dtype.itemsize
    of_a, of_b = Lying.of(a, 1, a.dtype), Lying.of(b, 0, a.dtype)
    return tuple(one for one in mappings if one.cluster == (1, 1) or (
        of_a.divides(one.M, one.depth // size, one.cluster[1]) and of_b.divides(one.N, one.depth // size, one.cluster[0])))


def _fill_tiles(values: dict[str, Any], operator: Any, mapping: CostedTile) -> None:
    values.setdefault("block_shape", Tile(M=mapping.M, N=operator.N, K=mapping.depth // operator.dtype.itemsize))
    block = values["block_shape"].size
    if "schedule" not in values and "warps_per_block" not in values and block.M != mapping.M:
        values["schedule"] = "cooperative"
        values["warps_per_block"] = 8 if block.M % 128 == 0 else 4
    values.setdefault("schedule", mapping.schedule)
    values.setdefault("warps_per_block", mapping.warps if values["schedule"] == mapping.schedule else 8)
    consumers = 1 if values["schedule"] == "pingpong" else max(1, values["warps_per_block"] // 4)
    values.setdefault("compute_warp", Tile(M=max(1, block.M // consumers), N=block.N, K=block.K))
    values.setdefault("producer_warps", mapping.producer_warps)


def _fill_shared(values: dict[str, Any], operator: Any) -> None:
    block = values["block_shape"].size
    for name, k_axis, across, dtype in (("a", 1, block.M, operator.dtype), ("b", 0, block.N, operator.b_dtype)):
        if f"shared_{name}_layout" not in values:
            lying = Lying.of(values[f"global_{name}_layout"], k_axis, dtype)
            values[f"shared_{name}_layout"] = lying.layout(across, block.K)


def _fill_d(values: dict[str, Any]) -> None:
    """C's and D's shared layouts: D's panels divide the columns that a block finishes."""
    values.setdefault("shared_c_layout", RowMajor(values["operator"].fragment_c.dtype))
    d, N = values["global_d_layout"], values["block_shape"].size.N
    axis = 0 if d.vector_axis == 0 and d.is_separable else 1
    N //= d.folds
    columns = N // SharedK(values["splits"], values["cluster"]).slices(N, max(COLUMNS, NARROWEST // d.dtype.itemsize))
    if "shared_d_layout" not in values:
        width = _width((columns if axis == 1 else 64) * d.dtype.itemsize)
        if values["operator"].is_scaled and values["block_shape"].size.M > 128:
            width = min(width, 64)                     # leaves a fourth stage its space beside the scales
        values["shared_d_layout"] = _swizzled(axis, d.dtype, width)


def _divides(values: dict[str, Any], cluster: tuple[int, int]) -> bool:
    """Whether the blocks of a cluster can each load a part of the operand that they share."""
    block = values["block_shape"].size
    layouts = values["shared_a_layout"], values["shared_b_layout"]
    return all(are_parts(across, None if layout.axis == k_axis else layout.line, peers)
               for layout, k_axis, across, peers in zip(layouts, (1, 0), (block.M, block.N), reversed(cluster)))


def _width(nbytes: int) -> int:
    """Of the widest swizzle whose panels divide lines of so many bytes."""
    return next((width for width in WIDTHS if nbytes % width == 0), NARROWEST)


def _swizzled(axis: int, dtype: np.dtype, width: int) -> Swizzled:
    plain = Interleaved(dtype, ("col", "row")[axis]) if dtype.names else (ColMajor, RowMajor)[axis](dtype)
    return Swizzled(plain, width)


def _fill_moves(values: dict[str, Any]) -> None:
    """What producers move when TMA does not: 16 bytes a thread along the shared axis."""
    block, warps = values["block_shape"], values["producer_warps"]
    for name, tile in (("a", block.MK), ("b", block.KN)):
        layout, shared = values[f"global_{name}_layout"], values[f"shared_{name}_layout"]
        thread, warp = _move(tile, layout, shared, warps)
        values.setdefault(f"mem_{name}_thread", thread)
        values.setdefault(f"mem_{name}_warp", warp)
    values.setdefault("mem_cd_thread", Tile(M=1, N=2))
    values.setdefault("mem_cd_warp", Tile(M=8, N=8))


def _move(tile: Tile, layout: Any, shared: Any, warps: int) -> tuple[Tile, Tile]:
    """(thread, warp): lanes go along the axis of global memory, so that their loads are of neighbours."""
    axis = shared.axis
    size = shared.dtype.itemsize                          # of a number, where it has several parts
    vector = math.gcd(16 // size if 16 % size == 0 and size <= 8 else 4, tile.extents[axis])
    if isinstance(layout, (Im2col, Matricised)) and layout.vector_axis == axis:
        run = math.gcd(layout.run, tile.extents[axis])
        vectors = (run >> n for n in range(run.bit_length()) if run >> n >= layout.comb)
        vector = next((v for v in vectors if tile.count % (16 * warps * v) == 0), run)   # as much for each of half of them
    thread, warp = [1, 1], [1, 1]
    if layout.vector_axis in (axis, None):
        thread[axis] = vector
        lanes = math.gcd(32, tile.extents[axis] // vector)
        warp[axis], warp[1 - axis] = lanes * vector, math.gcd(32 // lanes, tile.extents[1 - axis])
    else:                                                 # transposed on the way: lanes along global lines
        thread[axis] = vector
        warp[axis], warp[1 - axis] = vector, math.gcd(32, tile.extents[1 - axis])
    return tuple(Tile(**dict(zip(tile.names, extents))) for extents in (thread, warp))     # type: ignore[return-value]


def split(values: dict[str, Any]) -> None:
    """Shared layouts of real parts as those of numbers, in place."""
    algebra = values["operator"]
    for name in "ab":
        shared = values[f"shared_{name}_layout"]
        if isinstance(shared, Swizzled) and shared.dtype in part_dtypes(values[f"global_{name}_layout"].dtype):
            values[f"shared_{name}_layout"] = algebra.split(shared, algebra.number_dtype(shared.dtype))


# -- algebras ---------------------------------------------------------------------------------------------------------

_OF_A_PROBLEM = {field.name for field in dataclasses.fields(Problem)}
LIKELY_OF_ALGEBRAS, = mappings_of([tables.LIKELY_OF_ALGEBRAS])

REGISTERS = 128                        # of a consumer's sums: beside them a producer that works keeps what it needs
STAGE = 48 * 1024                      # bytes: four stages fit
DEEP = 64 * 1024                       # three: enough where A comes from registers, and 3 % of dual numbers' time
MOST_PARTS = 8
HELD = 64 * 72 * 2                     # parts of 16 bits that two warps can hold
PEAK = 2048                            # real multiply-accumulates of a multiprocessor in a cycle
SHARED = 128.0                         # bytes that go in or out of a multiprocessor's shared memory in a cycle


def give_algebra(values: dict[str, Any], a: ArrayLayout, b: ArrayLayout, sizes: Sizes | None, device: DeviceInfo,
                 products: int = 1) -> None:
    """Give an algebra that leaves its base open Hopper's tensor cores, in place, if they are the ones to take."""
    algebra = values["operator"]
    if not isinstance(algebra, Algebra) or algebra.base is not None or not algebra.is_signed:
        return
    of_a, of_b = part_dtypes(a.dtype), part_dtypes(b.dtype)
    if len(of_a) == len(of_b) == algebra.parts <= MOST_PARTS and applies(of_a[0], of_b[0], values, device):
        listed = algebra_mappings(algebra, dict(values, global_a_layout=a, global_b_layout=b))
        mapping = fastest(sizes, device, mappings=listed, products=products)
        values["operator"] = algebra.with_base(WGMMAOp(mapping.N, dtype=of_a[0]))
        for name, value in mapping.fields.items():                # what the user gives of a mapping stays
            values.setdefault(name, value)


def algebra_mappings(algebra: Algebra, values: dict[str, Any]) -> tuple[CostedTile, ...]:
    """From the largest tile, as wide as the sums of all parts fit a thread's registers, to the smallest."""
    spec = _likely_spec(algebra, values)
    works = any(type(x.route) is not Tma for x in (spec.a, spec.b))
    by_registers = isinstance(spec.mainloop, RegisterMainloop)
    widest = max(8, REGISTERS * 2 // algebra.parts // 16 * 16)
    if works:                                                    # what warps divide among them
        widest = 2 ** (widest.bit_length() - 1)
    widths = [n for n in (widest, 64, 32, 16) if n <= widest]
    tiles = [(128, widest, 8), *((64, n, 4) for n in dict.fromkeys(widths))]
    return tuple(_algebra_mapping(algebra, M, N, warps, works, by_registers) for M, N, warps in tiles)


def _likely_spec(algebra: Algebra, values: dict[str, Any]) -> Any:
    """The kernel for this problem on a likely mapping: it says how operands travel."""
    part = part_dtypes(values["global_a_layout"].dtype)[0]
    N = LIKELY_OF_ALGEBRAS.N
    base = WGMMAOp(N, dtype=part) if algebra.base is None else dataclasses.replace(units(algebra), N=N)
    problem = {name: value for name, value in values.items() if name in _OF_A_PROBLEM}
    return assumed_spec(dict(problem, operator=algebra.with_base(base)), LIKELY_OF_ALGEBRAS)


def _algebra_mapping(algebra: Algebra, M: int, N: int, warps: int, works: bool, by_registers: bool) -> CostedTile:
    """The deepest stage of which four fit; where warps de-interleave it, one of which two of them can hold an operand,
    or four where they have B alone to de-interleave."""
    line = algebra.parts * (M + N) * 2                           # bytes of an element of K
    most = HELD // (algebra.parts * max(M, N)) if works and not by_registers else 64
    depth = next((k for k in (64, 32, 16) if line * k <= (DEEP if by_registers else STAGE) and k <= most), 16)
    # Through shared memory go numbers once (planes), twice (to registers) or three times (de-interleaved), then what
    # every wgmma reads of B, and of A.
    moved = 2 * algebra.parts * (M * (2 if by_registers else 3 if works else 1) + N * (3 if works else 1))
    read = 2 * algebra.products * M // 64 * (N + (0 if by_registers else 64))
    step = 64 * max(algebra.products * M * N / PEAK, (moved + read) / SHARED)
    return CostedTile(M, N, "cooperative", warps, (1, 1), step, 5000, 0, order=Grouped(16), depth=2 * depth)
