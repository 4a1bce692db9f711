"""Hopper's mappings: tiles with what they cost, as measured, and the choice among them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmkit.epilogues import Epilogue
from gemmkit.kernels.common.cluster import Cluster
from gemmkit.kernels.rasterisation import Grouped, Hilbert, Order
from gemmkit.kernels.sm90.shared_k import SharedK
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile
from gemmkit.tuning.operators import SIXTEEN

LINE = 128                             # bytes of K in a stage: a line of the widest swizzle
UNALIGNED_BYTES = 3200                 # a cycle: what the L2 gives all multiprocessors of lines that straddle its own
SHORT_BYTES = 2640                     # the same of shorter lines still


@dataclass(frozen=True)
class Mapping:
    """A tile of ``M`` x ``N``, how warpgroups share it, and what it costs.

    ``step`` is the time of a k-tile of one tile, ``finish`` what is not hidden of a tile's end and beginning, ``start``
    that of the whole kernel: in cycles of a multiprocessor (16-bit operands), fitted to times on an H100 (docs/hopper.md).
    """

    M: int
    N: int
    schedule: str
    warps: int
    cluster: tuple[int, int]
    step: float
    finish: float
    start: float
    producer_warps: int = 4
    splits: int = 1
    order: Order = Grouped(8)
    depth: int = LINE                  # bytes of K in a stage

    @property
    def sharing(self) -> SharedK:
        """By which way blocks share K."""
        return SharedK(self.splits, Tile(M=self.cluster[0], N=self.cluster[1]))

    def clusters(self, sizes: tuple[int, int, int], products: int) -> int:
        """Clusters of tiles."""
        return math.ceil(sizes[0] / (self.M * self.cluster[0])) * math.ceil(sizes[1] / (self.N * self.cluster[1])) * products

    def at_once(self, device: DeviceInfo) -> int:
        """Clusters that a device holds at once: large ones do not fill every GPC."""
        peers = self.cluster[0] * self.cluster[1] * self.splits
        return max(1, device.sm_count // (peers if peers < 8 else peers + 1))

    def cycles(self, sizes: tuple[int, int, int], device: DeviceInfo, itemsize: int, limit: int | None,
               products: int) -> float:
        """The estimated time of a launch. ``limit`` is what the L2 can give, in bytes a cycle (None: it limits nothing)."""
        clusters, lines = self.clusters(sizes, products), math.ceil(sizes[2] * itemsize / LINE)
        if self.sharing.by_workspace:                  # all blocks at once, each with its share
            moved = clusters * lines * LINE * (self.M * self.cluster[0] + self.N * self.cluster[1])
            return max(math.ceil(lines / self.splits) * self.step, moved / SHARED_BYTES) + self.finish + self.start
        waves = math.ceil(clusters / self.at_once(device))
        cycles = waves * (math.ceil(lines / self.splits) * self.step + self.finish) + self.start
        moved = clusters * self.cluster[0] * self.cluster[1] * lines * LINE * (self.M + self.N)
        if limit is None and self.splits > 1:
            limit = UNALIGNED_BYTES
        return cycles if limit is None else max(cycles, moved / limit)

    @property
    def fields(self) -> dict[str, Any]:
        """It as fields of a Config for 16-bit operands."""
        return dict(block_shape=Tile(M=self.M, N=self.N, K=self.depth // 2), schedule=self.schedule,
                    warps_per_block=self.warps, producer_warps=self.producer_warps, splits=self.splits,
                    cluster=Tile(M=self.cluster[0], N=self.cluster[1]), order=self.order)


# Roughly from the fastest on a large problem to the smallest.
MAPPINGS = (
    Mapping(128, 192, "pingpong", 8, (1, 1), 790, 2500, 2000),
    Mapping(128, 256, "cooperative", 8, (1, 1), 1046, 6000, 0),
    Mapping(128, 128, "pingpong", 8, (1, 1), 532, 1200, 2000),
    Mapping(256, 128, "cooperative", 8, (1, 1), 1046, 6000, 0),
    Mapping(64, 128, "pingpong", 8, (1, 1), 300, 1200, 2000),
    Mapping(64, 64, "cooperative", 4, (1, 1), 200, 2500, 0),
    Mapping(64, 32, "cooperative", 4, (1, 1), 160, 2200, 0),
)


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
UNALIGNED_WORKSPACE = (
    Mapping(128, 128, "cooperative", 8, (1, 1), 3600, 8000, 0, 8, order=Hilbert()),
    Mapping(64, 64, "cooperative", 4, (1, 1), 2800, 8000, 0, 8, order=Hilbert()),
)
SHARE = 100                            # cycles: what one more share costs those that read the sums
SHARED_BYTES = 4000                    # a cycle: what the L2 gives all multiprocessors where they share K
LEAST_SHARED = 32                      # k-tiles of a product whose K is shared by way of a workspace


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
# or threads start cp.async copies of it;
CP_ASYNC = (
    Mapping(128, 256, "cooperative", 8, (1, 1), 1700, 4000, 0),
    Mapping(256, 128, "cooperative", 8, (1, 1), 1700, 3700, 0),
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
    Mapping(128, 192, "cooperative", 8, (1, 1), 3600, 5000, 0, 8, order=Hilbert()),
    Mapping(128, 128, "cooperative", 8, (1, 1), 2800, 4000, 0, 8, order=Hilbert()),
    Mapping(64, 64, "cooperative", 4, (1, 1), 1500, 2500, 0, 8, order=Hilbert()),
)

# Sums that are promoted take three times the registers.
PROMOTED = (
    Mapping(128, 128, "cooperative", 8, (1, 2), 600, 4000, 0),
    Mapping(64, 128, "cooperative", 4, (1, 2), 400, 3000, 0),
    Mapping(64, 64, "cooperative", 4, (1, 1), 300, 2500, 0),
)


def choose_mapping(sizes: tuple[int, int, int] | None, device: DeviceInfo, N: int | None = None, itemsize: int = 2,
                   mappings: tuple[Mapping, ...] = MAPPINGS, is_ragged: bool = False, is_tall: bool = False,
                   limit: int = UNALIGNED_BYTES, products: int = 1) -> Mapping:
    """The mapping with the least estimated time: full waves of clusters, each as long as its tiles take. Of those that are
    as good as equal, the first, whose tiles are the largest: they move less, and a card at its power limit repays that.

    ``is_ragged`` says that rows do not begin at multiples of 128 bytes: then what the L2 can give, ``limit`` bytes a cycle,
    limits the rest. With ``is_tall`` the tallest of the equal is taken. ``products`` of these sizes are one launch.
    """
    fit = [mapping for mapping in mappings if N in (None, mapping.N)]
    if not fit:
        assert N is not None
        fit = [Mapping(128 if N > 64 else 64, N, "cooperative", 8 if N > 64 else 4, (1, 1), 4.2 * N, 3000, 0)]
    if sizes is None:
        return fit[0]
    m, n, k = (max(1, size) for size in sizes)

    def time(mapping: Mapping) -> float:
        return mapping.cycles((m, n, k), device, itemsize, limit if is_ragged else None, products)

    least = min(map(time, fit))
    equal = [mapping for mapping in fit if time(mapping) <= 1.01 * least]
    return max(equal, key=lambda mapping: mapping.M) if is_ragged or is_tall else equal[0]


def by_workspace(sizes: tuple[int, int, int], device: DeviceInfo, products: int = 1,
                 mappings: tuple[Mapping, ...] = WORKSPACE) -> tuple[Mapping, ...]:
    """Mappings with shares by way of a workspace for a product of 16-bit operands: as many as fill the device, and fewer."""
    lines = math.ceil(sizes[2] * 2 / LINE)
    if 0 in sizes or (mappings is WORKSPACE and lines < LEAST_SHARED):
        return ()
    found: list[Mapping] = []
    for one in mappings:
        m, n = one.cluster
        if m * one.M >= sizes[0] + one.M or n * one.N >= sizes[1] + one.N:       # tiles would be empty
            continue
        most = min(Cluster(m, n).at_once(device.sm_count) // one.clusters(sizes, products), lines // 2)
        for shares in sorted({most, most // 2, most // 4}, reverse=True):
            if shares > 1:
                shared = dataclasses.replace(one, splits=shares, finish=one.finish + SHARE * shares)
                found += [shared] if shared.sharing.by_workspace else []
    return tuple(found)


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
    "CP_ASYNC",
    "LINE",
    "MAPPINGS",
    "MAPPING_FIELDS",
    "PROMOTED",
    "REWRITTEN",
    "SHORT_BYTES",
    "SPLIT",
    "STAGED",
    "TRANSFORMED",
    "TRANSPOSED",
    "UNALIGNED",
    "UNALIGNED_BYTES",
    "UNALIGNED_WORKSPACE",
    "Mapping",
    "applies",
    "by_workspace",
    "choose_mapping",
    "is_untouched",
]
