"""Hopper's mappings: tiles with what they cost, as measured, for each way in which operands travel."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmkit.epilogues import Epilogue
from gemmkit.kernels.common.arrays import Arrays
from gemmkit.kernels.rasterisation import Hilbert
from gemmkit.kernels.sm90.across import Across
from gemmkit.kernels.sm90.fragments import RegisterMainloop
from gemmkit.kernels.sm90.routes.cp_async import CpAsync, CpAsyncProducer
from gemmkit.kernels.sm90.routes.request import Request
from gemmkit.kernels.sm90.routes.rewrite import RewriteProducer, Transpose
from gemmkit.kernels.sm90.routes.staged import Staged
from gemmkit.kernels.sm90.routes.tma import TmaProducer
from gemmkit.layouts import Braided, Plain
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tuning.model import LINE, SHORT_LINES, UNALIGNED_LINES, Mapping, Supply, streaming
from gemmkit.tuning.operators import SIXTEEN

LEAST_SHARED = 32                      # k-tiles of a product whose K is shared by way of a workspace
#: What stands for all of them where the kernel is asked how operands travel.
LIKELY = Mapping(128, 128, "cooperative", 8, (1, 1), 560, 6500, 0)

# Roughly from the fastest on a large problem to the smallest.
MAPPINGS = (
    Mapping(128, 192, "pingpong", 8, (1, 1), 790, 2500, 2000),
    Mapping(128, 256, "cooperative", 8, (1, 1), 1046, 6000, 0),
    # (4096^3 nn, tn, nt on an H200, 2026-11-24: 128x256 takes 0.97, 0.97 and 0.99 of its time.)
    Mapping(128, 128, "pingpong", 8, (1, 1), 545, 1200, 2000),
    Mapping(256, 128, "cooperative", 8, (1, 1), 1046, 6000, 0),
    Mapping(64, 128, "pingpong", 8, (1, 1), 300, 1200, 2000),
    Mapping(64, 64, "cooperative", 4, (1, 1), 200, 2500, 0),
    Mapping(64, 32, "cooperative", 4, (1, 1), 160, 2200, 0),
    # A line of so small a tile takes a warpgroup less time than the hand-over of its stage: two a stage (384 x 320 x 944,
    # clusters of 2x2: 3.65 us, 4.34 with one; 192 x 192 x 321: 2.10, 2.31). Along a long K it is no gain: 33 x 64 x 2504
    # takes 6.06 us, and 4.30 in 8 shares of 64 x 128.
    Mapping(64, 32, "cooperative", 4, (1, 1), 145, 2200, 0, depth=2 * LINE),
)

# Of a braid of two. Consumers that multiply together wait for what is folded: 4096^3 takes 458 us by 128x256, 415 by 128x128
# in turns; and of those in turns large tiles fold longer (433 by 128x192; H200, 2026-11-26).
FOLDING = {(128, 256): 7000, (256, 128): 7000, (128, 192): 2000}     # cycles of a tile's end
BRAIDED = tuple(dataclasses.replace(one, finish=one.finish + FOLDING.get((one.M, one.N), 0)) for one in MAPPINGS)
# Where its rows lie along N a tile takes a piece of a row of each part. One that ends within a line of the L2 has it fetched
# twice: by 128x192, 96 columns of each, 8192^3 takes 5.6 ms on an H100, 3.6 to 3.9 by 128x128 (H200: 3.49 and 3.61), and
# 8192 x 14336 x 4096 4.0 and 3.2 to 3.4 (2.95, 2.96).
BRAIDED_ROWS = tuple(one for one in BRAIDED if one.N != 192)

# Beside them where rows begin at lines of the L2: tiles between those above, for what fills a wave of neither. Three
# consumers share 192 rows. (f16 squares on an H200, 2026-11-24: 1536 takes 13.3 us by 128 tiles of 192x96 and 15.3 by 96 of
# 128x192, 1152 7.14 by 64x192 and 8.46, 1792 20.7 by 128x224 and 21.1, 768 4.12 by 64x96 and 4.20.) Most have panels of B or
# D that are 32 elements wide: between lines of the L2, TMA fetches these at two thirds of the speed (12992 x 384 x 1811 tn,
# 128x224: 58 us where 42 are modelled).
ALIGNED = (
    Mapping(128, 224, "cooperative", 8, (1, 1), 940, 5500, 0),
    Mapping(192, 96, "cooperative", 12, (1, 1), 700, 3500, 0),
    Mapping(64, 192, "pingpong", 8, (1, 1), 440, 1300, 2500),
    Mapping(64, 96, "cooperative", 4, (1, 1), 300, 2700, 0),
)

# Beside them where rows do not begin at lines of the L2, so that an operand's tile is two lines a row: blocks of a cluster
# share what is fetched. Where rows do begin there, waiting for each other costs more than it saves.
# (On an H200, 2026-11-23: 1216 x 406 x 1544 takes 14.5 us by tiles of 64 x 128 and 9.1 by clusters of 2x2 of 128 x 64;
# 224 x 7312 x 7560 52.4 and 46.9 by 2x2 of 128 x 128; 384 x 320 x 944 4.4 and 3.65 by 2x2 of 64 x 32.)
NARROW = Mapping(128, 64, "cooperative", 8, (1, 1), 300, 3000, 0)
_CLUSTERS = {(128, 192, LINE): ((1, 2),), (128, 256, LINE): ((2, 2), (2, 1)), (256, 128, LINE): ((2, 2), (1, 2)),
             (64, 32, LINE): (), (64, 32, 2 * LINE): ((2, 2),),
             (192, 192, LINE): ((1, 2), (2, 1)), (192, 64, LINE): ((1, 2),)}
_ALL = (1, 2), (2, 1), (2, 2)          # of the other tiles
# Three consumers fetch less for a tile of 192x192 (3000^3 nt: 95 us, 99 by two), and have the rows of 10000 x 128 x 10000 nn
# in one wave (192x64: 61.9 us, 67.9 in shares of K).
THREE = (
    Mapping(192, 192, "cooperative", 12, (1, 1), 1180, 6000, 0),
    Mapping(192, 64, "cooperative", 12, (1, 1), 400, 4500, 0),
)
CLUSTERED = tuple(dataclasses.replace(one, cluster=cluster) for one in (*MAPPINGS, NARROW, *THREE)
                  for cluster in _CLUSTERS.get((one.M, one.N, one.depth), _ALL))

# The same tiles by clusters that stream K. Their steps and ends are those of whole tiles; what a stream costs beside is
# `gemmkit.tuning.stream_k.cycles`.
STREAMED, STREAMED_CLUSTERED = streaming(MAPPINGS), streaming(CLUSTERED)

# Where K is long and there are few tiles, the blocks of a cluster share it, and exchange their sums at the end.
SPLIT = tuple(Mapping(*tile, step, finish, 0, splits=splits) for tile, step, finish in (
    ((128, 128, "cooperative", 8, (1, 1)), 560, 6500), ((64, 128, "cooperative", 4, (1, 1)), 330, 5500))
    for splits in (2, 4, 8))


# The same by way of a workspace, with any number of shares; clusters multicast operands (`by_workspace` says how many).
# Fitted to an H200 (2026-11-22): f16 512 x 512 x 16384, 256 x 256 x 32768, 64 x 64 x 65536, 128 x 128 x 16384, and 96 x 2048
# x 8192, each with 3 to 132 shares; to 15 % on average.
WORKSPACE = tuple(Mapping(M, N, "cooperative", warps, cluster, step, 8000, 0)
                  for M, N, warps, step in ((128, 128, 8, 560), (64, 128, 4, 330), (64, 64, 4, 200))
                  for cluster in ((1, 1), (2, 1), (1, 2), (2, 2)) if N == 128 or cluster == (1, 1))
# The same of operands that TMA cannot take as they lie in memory (64 x 29 x 3653, nt: 108 us without shares).
# (In groups of 8, not along Hilbert's curve: seven products of `choice_before.json` take 0.81 to 0.98 of the time,
# 128 x 1128 x 9591 in 14 shares 55 us and 68.)
UNALIGNED_WORKSPACE = (
    Mapping(128, 128, "cooperative", 8, (1, 1), 3600, 8000, 0, 8),
    Mapping(64, 64, "cooperative", 4, (1, 1), 2800, 8000, 0, 8),
)


# The same where producer warps stage or rewrite an operand.
STAGED_SPLIT = tuple(dataclasses.replace(one, step=1300 if one.M == 128 else 1000) for one in SPLIT)


# Where producer warps stage an operand in registers: it is in a layout of the user's, or transformed on the way;
STAGED = (
    Mapping(128, 256, "cooperative", 8, (1, 1), 1750, 6000, 0, order=Hilbert()),
    Mapping(128, 128, "cooperative", 8, (1, 1), 1150, 4000, 0, order=Hilbert()),
    Mapping(64, 64, "cooperative", 4, (1, 1), 700, 2500, 0, order=Hilbert()),
    Mapping(64, 32, "cooperative", 4, (1, 1), 550, 2200, 0, order=Hilbert()),
    *STAGED_SPLIT,
)
# or B is rewritten in place (and A perhaps transformed in the consumers' registers);
REWRITTEN = (
    Mapping(256, 128, "cooperative", 8, (1, 1), 1370, 6000, 0, order=Hilbert()),
    Mapping(128, 256, "cooperative", 8, (1, 1), 1490, 6000, 0, order=Hilbert()),
    Mapping(128, 128, "cooperative", 8, (1, 1), 880, 4000, 0, order=Hilbert()),
    Mapping(64, 64, "cooperative", 4, (1, 1), 500, 2500, 0, order=Hilbert()),
    Mapping(64, 32, "cooperative", 4, (1, 1), 420, 2200, 0, order=Hilbert()),
    *STAGED_SPLIT,
)
# or A alone is transformed, in the consumers' registers;
TRANSFORMED = (
    Mapping(128, 256, "cooperative", 8, (1, 1), 1090, 6000, 0),
    Mapping(256, 128, "cooperative", 8, (1, 1), 1280, 6000, 0),
    Mapping(128, 128, "cooperative", 8, (1, 1), 720, 4000, 0),
    Mapping(64, 128, "cooperative", 4, (1, 1), 480, 3000, 0),
    Mapping(64, 64, "cooperative", 4, (1, 1), 430, 2500, 0),
    Mapping(64, 32, "cooperative", 4, (1, 1), 380, 2200, 0),
    *STAGED_SPLIT,
)
# or A, of 32-bit elements across K, is fetched by consumers as it lies (f32 4096^3 and 8192^3 on an H200, 2026-11-23: of
# cuBLAS's speed 1.05 and 1.03 by 128x256 tiles, 0.84 and 0.95 by 128x192, 0.79 and 0.78 by 256x128, 0.69 and 0.67 by
# 128x128; tiles of 64 rows are not measured);
ACROSS = (
    Mapping(128, 256, "cooperative", 8, (1, 1), 1060, 6000, 0),
    Mapping(256, 128, "cooperative", 8, (1, 1), 1400, 6000, 0),
    Mapping(128, 192, "cooperative", 8, (1, 1), 880, 5000, 0),
    Mapping(128, 128, "cooperative", 8, (1, 1), 800, 4000, 0),
    Mapping(64, 64, "cooperative", 4, (1, 1), 430, 2500, 0),
    Mapping(64, 32, "cooperative", 4, (1, 1), 380, 2200, 0),
)
# or threads start cp.async copies of it (of equal times the tall tile is the first: a contraction of 2048^3 took 55.6 us by
# it and 68.8 by 128x256, six of TCCG of 6048 and 7056 0.91 to 0.96 of the other's time);
CP_ASYNC = (
    Mapping(256, 128, "cooperative", 8, (1, 1), 1700, 3700, 0),
    Mapping(128, 256, "cooperative", 8, (1, 1), 1700, 4000, 0),
    Mapping(128, 128, "pingpong", 8, (1, 1), 1265, 1800, 2000),
    Mapping(64, 256, "pingpong", 8, (1, 1), 1400, 2000, 2000),
    Mapping(64, 128, "pingpong", 8, (1, 1), 1000, 1500, 2000),
    Mapping(64, 64, "cooperative", 4, (1, 1), 700, 2500, 0),
    Mapping(64, 32, "cooperative", 4, (1, 1), 550, 2200, 0),
    *(dataclasses.replace(one, step=1265 if one.M == 128 else 1000) for one in SPLIT),
)
# or its tiles are transposed in place, because tensor cores read 8- and 32-bit operands along K alone;
TRANSPOSED = (
    Mapping(256, 128, "cooperative", 8, (1, 1), 1300, 6000, 0, order=Hilbert()),
    Mapping(128, 128, "cooperative", 8, (1, 1), 800, 4000, 0, order=Hilbert()),
    Mapping(128, 256, "cooperative", 8, (1, 1), 1500, 6000, 0, order=Hilbert()),
    Mapping(64, 64, "cooperative", 4, (1, 1), 500, 2500, 0, order=Hilbert()),
    Mapping(64, 32, "cooperative", 4, (1, 1), 400, 2200, 0, order=Hilbert()),
)
# or TMA cannot take it as it lies in memory, and it comes element by element.
UNALIGNED = (
    Mapping(128, 192, "cooperative", 8, (1, 1), 3600, 5000, 0, 8),
    Mapping(128, 128, "cooperative", 8, (1, 1), 2800, 4000, 0, 8),
    Mapping(64, 64, "cooperative", 4, (1, 1), 1500, 2500, 0, 8),
)

# Sums that are promoted take three times the registers.
PROMOTED = (
    Mapping(128, 128, "cooperative", 8, (1, 2), 600, 4000, 0),
    Mapping(64, 128, "cooperative", 4, (1, 2), 400, 3000, 0),
    Mapping(64, 64, "cooperative", 4, (1, 1), 300, 2500, 0),
)

# -- which of them ----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Table:
    """Mappings to choose among, and what limits them.

    ``workspace`` are those whose blocks share K by a workspace, from ``least_shared`` k-tiles on; ``streamed`` those whose
    clusters stream K, and ``streamed_clustered`` beside them where ``clustered`` are: for the tuner and the winners, not
    chosen by their modelled time. ``aligned`` are there beside the others where all rows begin at lines of the L2, and
    ``clustered`` where they do not and its ``supply`` limits all; with ``is_ragged`` they never begin there.
    ``halves_stages`` says that a short K takes stages of half a line: an empty half would be staged, too; ``orders_few``
    that a few tiles take the order that is found the soonest (`Mapping.ordered`);
    ``tries_more`` that the tuner tries tiles beside all these (`gemmkit.tuning.candidates.EXTRA`).
    """

    mappings: tuple[Mapping, ...]
    workspace: tuple[Mapping, ...] = ()
    streamed: tuple[Mapping, ...] = ()
    streamed_clustered: tuple[Mapping, ...] = ()
    least_shared: int = 0
    aligned: tuple[Mapping, ...] = ()
    clustered: tuple[Mapping, ...] = ()
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


BY_TMA = Table(MAPPINGS + SPLIT, WORKSPACE, STREAMED, STREAMED_CLUSTERED, LEAST_SHARED, ALIGNED, CLUSTERED, orders_few=True,
               tries_more=True)
BY_BRAIDS = dataclasses.replace(BY_TMA, mappings=BRAIDED + SPLIT)
BY_BRAIDED_ROWS = dataclasses.replace(BY_TMA, mappings=BRAIDED_ROWS + SPLIT, aligned=())
BY_TRANSPOSES = Table(TRANSPOSED)
BY_REGISTERS = Table(TRANSFORMED)
BY_FETCHES = Table(ACROSS)
BY_REWRITES = Table(REWRITTEN, halves_stages=True)
BY_CP_ASYNC = Table(CP_ASYNC, supply=SHORT_LINES, is_ragged=True, halves_stages=True)
BY_THREADS = Table(STAGED, halves_stages=True)
BY_ELEMENTS = Table(UNALIGNED, UNALIGNED_WORKSPACE)


def table_by_arrays(values: dict[str, Any], arrays: Arrays | None) -> Table | None:
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


def table_of(spec: Any, arrays: Arrays | None) -> Table:
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
        return BY_FETCHES if isinstance(spec.mainloop.source, Across) else BY_REGISTERS
    if isinstance(spec.producer, TmaProducer):
        b = spec.b.layout
        if isinstance(b, Braided) and b.slots == 2:
            return BY_BRAIDED_ROWS if b.contiguous_axis == 1 else BY_BRAIDS
        return BY_TMA
    staged = [x for x in operands.values() if isinstance(x.route, Staged)]
    suits = arrays is None and not any(CpAsync.refuses_layout(Request(spec, x, None, (0, 0))) for x in staged)
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


__all__ = [
    "ACROSS",
    "ALIGNED",
    "LIKELY",
    "MAPPINGS",
    "MAPPING_FIELDS",
    "PROMOTED",
    "REWRITTEN",
    "SPLIT",
    "TRANSFORMED",
    "TRANSPOSED",
    "Mapping",
    "Table",
    "applies",
    "is_unaligned",
    "is_untouched",
    "table_by_arrays",
    "table_of",
]
