"""What a mapping of Hopper's kernel costs, and the choice among mappings."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gemmkit.kernels.common.cluster import at_once
from gemmkit.kernels.common.stream_k import StreamK
from gemmkit.kernels.rasterisation import Grouped, Hilbert, Order
from gemmkit.kernels.sm90.shared_k import in_one_cluster
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile
from gemmkit.tuning import stream_k

CLOCK = 1.7                            # cycles a ns, roughly
LINE = 128                             # bytes of K in a stage: a line of the widest swizzle
SHARED_BYTES = 4000                    # a cycle: what the L2 gives all multiprocessors where they share K
CLUSTER_BYTES = 3200                   # the same where the blocks of a cluster do
SECOND_PASS = 5000                     # cycles of a kernel behind another, at least: 3 us to begin and to run, not fitted
ROW_STATES = 4000                      # cycles of an exchange of states of rows in a cluster, and of waiting; not fitted
SHARE = 100                            # cycles: what one more share costs those that read the sums
#: Cycles that a kernel takes longer to begin and to end for each doubling of its clusters: their blocks start together and
#: wait for each other (40 x 320 x 48 and four more on an H200: 0.15 to 0.31 us a doubling).
CLUSTERING = 400
WARP, THREADS = 32, 128                # threads of a warp, and of a warpgroup
MOST_SUMS = 128                        # of a thread whose rows are normalised: 28 to 68 bytes spill of 192 with a gain
SUM = 4                                # bytes of an accumulator
#: Tiles of a product so small that an order without a division is the faster one: Hilbert's curve through a line or a few
#: tiles (56 x 64 x 64: 1.30 us, 1.56 by groups; 192 x 192 x 321: 2.23, 2.34; 5824 x 64 x 160: 2.62, 2.82).
FEW_TILES = 16
LEAST_STREAMED = 128 * 128             # sums of a tile: smaller tiles fill the last wave better, and hand over as much a sum


@dataclass(frozen=True)
class Supply:
    """What the L2 gives all multiprocessors of an operand whose rows do not begin at its lines, in ``bytes`` a cycle.

    Multiplying and fetching overlap: their times are joined by a norm of this ``order``, which at infinity is the longer of
    the two. ``a`` and ``b`` say whose rows are unaligned; of rows that are, the L2 gives ``ALIGNED`` bytes.
    """

    bytes: float
    order: float = math.inf
    a: bool = True
    b: bool = True

    ALIGNED = 64 * 132                 # a multiprocessor takes 64 a cycle

    @cached_property
    def of_a(self) -> float:
        """Bytes a cycle of A."""
        return self.bytes if self.a else self.ALIGNED

    @cached_property
    def of_b(self) -> float:
        return self.bytes if self.b else self.ALIGNED

    def joined(self, multiplying: float, fetching: float) -> float:
        """Cycles of both."""
        if self.order == math.inf:
            return max(multiplying, fetching)
        return float((multiplying**self.order + fetching**self.order) ** (1 / self.order))


#: Fitted to 34 times on an H200, f16 5000^3 and 7224 x 7224 x 7240 in nine tiles and four clusters (`clusters.json`,
#: `unaligned.json`): off by 4 % at a clock of 1.47 GHz.
UNALIGNED_LINES = Supply(4000, order=4)
SHORT_LINES = Supply(2640)                   # of shorter lines still


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
    splits: int | StreamK = 1
    order: Order = Grouped(8)
    depth: int = LINE                  # bytes of K in a stage

    @property
    def tiles(self) -> int:
        """Of a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def shares(self) -> int:
        """Into how many equal shares the K of every tile is divided."""
        return 1 if isinstance(self.splits, StreamK) else self.splits

    @property
    def by_workspace(self) -> bool:
        """Whether the shares of every tile meet in global memory."""
        return self.shares > in_one_cluster(self.shares, self.tiles)

    def clusters(self, sizes: tuple[int, int, int], products: int) -> int:
        """Clusters of tiles."""
        return (-(-sizes[0] // (self.M * self.cluster[0]))) * (-(-sizes[1] // (self.N * self.cluster[1]))) * products

    def cycles(self, sizes: tuple[int, int, int], device: DeviceInfo, itemsize: int, supply: Supply | None,
               products: int) -> float:
        """The estimated time of a launch; without a ``supply`` the L2 limits nothing."""
        m, n = self.cluster
        tiles, shares = self.tiles, self.shares
        clusters, k_tiles = self.clusters(sizes, products), -(-sizes[2] * itemsize // self.depth)
        lines = k_tiles * self.depth / LINE
        within = in_one_cluster(shares, tiles)
        if shares > within:                            # by way of a workspace: all blocks at once, each with its share
            moved = clusters * lines * LINE * (self.M * m + self.N * n)
            return max(math.ceil(lines / shares) * self.step, moved / SHARED_BYTES) + self.finish + self.start
        start = self.start + CLUSTERING * math.log2(tiles)
        side_by_side = at_once(tiles * within, device.sm_count)
        if isinstance(self.splits, StreamK):
            cycles = start + stream_k.cycles(clusters, k_tiles, self.M * self.N * SUM, self.step * self.depth / LINE,
                                             self.finish, side_by_side, tiles, self.schedule == "pingpong")
        else:
            waves = -(-clusters // side_by_side)
            cycles = waves * (math.ceil(lines / shares) * self.step + self.finish) + start
        if supply is None:
            return cycles if shares == 1 else max(cycles, clusters * lines * LINE * (self.M + self.N) / CLUSTER_BYTES)
        fetched = n * (self.N / supply.of_b) + m * (self.M / supply.of_a)    # m blocks share B's columns
        return supply.joined(cycles, clusters * lines * LINE * fetched)

    def ordered(self, sizes: tuple[int, int, int], products: int) -> Mapping:
        """The mapping with the order that suits the grid: of so few tiles that all are computed at once, the one that is
        found the soonest."""
        rows, columns = (math.ceil(size / (tile * across))
                         for size, tile, across in zip(sizes, (self.M, self.N), self.cluster))
        few = products == 1 and self.splits == 1 and (rows * columns <= FEW_TILES or min(rows, columns) == 1)
        return dataclasses.replace(self, order=Hilbert()) if few else self

    @property
    def fields(self) -> dict[str, Any]:
        """It as fields of a Config for 16-bit operands."""
        return dict(block_shape=Tile(M=self.M, N=self.N, K=self.depth // 2), schedule=self.schedule,
                    warps_per_block=self.warps, producer_warps=self.producer_warps, splits=self.splits,
                    cluster=Tile(M=self.cluster[0], N=self.cluster[1]), order=self.order)


def choose_mapping(sizes: tuple[int, int, int] | None, device: DeviceInfo, N: int | None = None, itemsize: int = 2,
                   mappings: tuple[Mapping, ...] = (), supply: Supply | None = None, is_tall: bool = False,
                   products: int = 1) -> Mapping:
    """The mapping with the least estimated time: full waves of clusters, each as long as its tiles take. Of those that are
    as good as equal, the first, whose tiles are the largest: they move less, and a card at its power limit repays that.

    ``supply`` is what the L2 gives where rows do not begin at multiples of 128 bytes. With ``is_tall`` the tallest of the
    equal is taken. ``products`` of these sizes are one launch.
    """
    fit = [mapping for mapping in mappings if N in (None, mapping.N)]
    if not fit:
        assert N is not None
        fit = [Mapping(128, N, "cooperative", 8, (1, 1), 4.2 * N, 3000, 0) if N > 64 else smallest(N)]
    if sizes is None:
        return fit[0]
    m, n, k = (max(1, size) for size in sizes)

    times = [mapping.cycles((m, n, k), device, itemsize, supply, products) for mapping in fit]
    least = 1.01 * min(times)
    equal = [mapping for mapping, time in zip(fit, times) if time <= least]
    return max(equal, key=lambda mapping: mapping.M) if is_tall else equal[0]


def with_second_pass(mapping: Mapping, sizes: tuple[int, int, int], products: int, itemsize: int) -> Mapping:
    """The mapping where rows of D are normalised: unless a tile has all columns, a second kernel reads and stores D."""
    if mapping.N >= sizes[1] and mapping.splits == 1:
        return mapping
    moved = 2 * products * sizes[0] * sizes[1] * itemsize
    return dataclasses.replace(mapping, start=mapping.start + SECOND_PASS + moved / SHARED_BYTES)


def with_rows_exchanged(mapping: Mapping, sizes: tuple[int, int, int]) -> Mapping | None:
    """The mapping in clusters whose blocks have a row of D together, so that no second kernel is needed where rows are
    normalised; None where there is none (`Sm90Spec.blocks_of_a_row`)."""
    blocks = math.ceil(sizes[1] / mapping.N)
    sums = mapping.M * mapping.N // (THREADS if mapping.schedule == "pingpong" else mapping.warps * WARP)
    fits = sums <= MOST_SUMS and mapping.N & (mapping.N - 1) == 0          # (128 x 224 spills 4 bytes)
    is_full = math.ceil(sizes[0] / 64) % (mapping.M // 64) == 0
    if blocks not in (2, 4, 8) or mapping.cluster != (1, 1) or mapping.splits != 1 or not (is_full and fits):
        return None
    return dataclasses.replace(mapping, cluster=(1, blocks), finish=mapping.finish + ROW_STATES)


def smallest(N: int) -> Mapping:
    """The smallest tile of N columns: what is left where others take too much shared memory."""
    return Mapping(64, N, "cooperative", 4, (1, 1), 4.2 * N, 3000, 0)


def by_workspace(sizes: tuple[int, int, int], device: DeviceInfo, products: int, mappings: tuple[Mapping, ...],
                 least: int) -> tuple[Mapping, ...]:
    """Mappings with shares by way of a workspace for a product of 16-bit operands: as many shares as fill the device, and
    fewer; none below ``least`` k-tiles."""
    lines = math.ceil(sizes[2] * 2 / LINE)
    if 0 in (*sizes, products) or lines < least:
        return ()
    found: list[Mapping] = []
    for one in mappings:
        m, n = one.cluster
        if m * one.M >= sizes[0] + one.M or n * one.N >= sizes[1] + one.N:       # tiles would be empty
            continue
        most = min(at_once(one.tiles, device.sm_count) // one.clusters(sizes, products), lines // 2)
        for shares in sorted({most, most // 2, most // 4}, reverse=True):
            if shares > 1:
                shared = dataclasses.replace(one, splits=shares, finish=one.finish + SHARE * shares)
                found += [shared] if shared.by_workspace else []
    return tuple(found)


def streaming(mappings: tuple[Mapping, ...]) -> tuple[Mapping, ...]:
    """Those with large tiles, streaming K."""
    return tuple(dataclasses.replace(one, splits=StreamK()) for one in mappings
                 if one.splits == 1 and one.M * one.N >= LEAST_STREAMED)


__all__ = ["CLOCK", "LINE", "SHORT_LINES", "UNALIGNED_LINES", "Mapping", "Supply", "by_workspace", "choose_mapping",
           "smallest", "streaming", "with_rows_exchanged", "with_second_pass"]
