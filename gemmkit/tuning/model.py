"""What mappings cost, and the choice among those of Hopper's kernel: the mapping with the least modelled time.

**Shares of K.** Tiles alone leave multiprocessors idle where they are few; shares fill them. A share costs its block a walk
through the pipeline and the sums a way through memory, so each has some k-tiles to multiply. Where the number is free (the
multistage kernel's workspace) it is `shares_to_try`'s with the least time. Costs are nanoseconds on an H200 (2026-11-22: f32
64 x 64 x 65536 with 66 to 512 shares, 4096 x 64 x 4096 with 2 to 12, complex64 1024^3 with 2; 2026-11-23: f32 8 x 8 x 7584
with 8 and 16, f64 67 x 1 x 636 with 3 and 4, by whose small tiles counting is seen to cost less).

**Streams of K** (`gemmkit.kernels.collectives.split_k`). The time of whole tiles goes up by a step with each wave,
however few
tiles the last one has; streamed, it is that of the k-tiles of all. A launch pays for it with hand-overs: a block writes the
sums of one tile and reads those of another. On an H200 (2026-11-23, f32 and f64, sizes from 768 to 3072, three tiles each)
the model was within 6 % of what was measured, and streams took 0.55 to 1.0 of the time of the same tile's waves. With two
waves in the stream most were as fast as with one or faster (f64 2560^3, 128x128 tiles: 558 us, 658 with one). complex128 was
no faster (0.95 to 1.02 of the time), and float16 is wgmma's.

Hopper's kernel streams by clusters. Its model counts cycles (`streamed_cycles`), with hand-overs as bytes by what the L2
gives, and is there for the order in which the tuner tries streams. It does not choose them: blocks of a stream stand at
different k-tiles and share nothing in the L2, so that some take 0.9 of the default's time and some 1.4 (docs/schedulers.md).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.kernels.collectives.scheduler import Grouped, HalfOfTiles, Hilbert, Order, at_once
from gemmkit.kernels.collectives.split_k import LEAST, StreamK, division, takes_slices
from gemmkit.kernels.sm90.exchange import in_one_cluster
from gemmkit.layouts import ArrayLayout, Plain, RowMajor
from gemmkit.runtime.array_info import ArrayInfo, alignment
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile
from gemmkit.tuning import tables
from gemmkit.tuning.operators import AccumulatorRule

Infos = dict[str, ArrayInfo | None]   # of a, b, c and out
Layouts = dict[str, ArrayLayout | None]         # of a, b, c and d
Sizes = tuple[int, int, int]          # M, N and K
Proposal = tuple[Any, dict[str, Any]]           # an operator (None: the default one), and fields of a mapping


@dataclass(frozen=True)
class Asked:
    """What a mapping is chosen for.

    ``infos`` are the arrays a, b, c and out, ``layouts`` those of a, b, c and d (None: what is open), ``sizes`` M, N and K,
    ``fields`` the components that the caller gives, and ``products`` how many of these sizes are one launch. ``key()`` is
    what a tuned mapping is found by. Of a group all these are of its largest product, and ``group`` has the arrays of all. A
    D that the call makes is ``new``.
    """

    infos: Infos
    layouts: Layouts
    sizes: Sizes
    fields: dict[str, Any]
    products: int = 1
    key: Callable[[], str] | None = None
    is_stack: bool = False
    group: Sequence[Any] | None = None
    new: type[Plain] = RowMajor

    @property
    def operands(self) -> tuple[ArrayLayout, ArrayLayout]:
        """The layouts of A and B."""
        a, b = self.layouts["a"], self.layouts["b"]
        assert a is not None and b is not None
        return a, b

    @cached_property
    def sums(self) -> AccumulatorRule:
        return AccumulatorRule.of(self.layouts, self.fields, self.sizes[2])


CLOCK = 1.7                            # cycles a ns, roughly
LINE = 128                             # bytes of K in a stage: a line of the widest swizzle
SHARED_BYTES = 4000                    # a cycle: what the L2 gives all multiprocessors where they share K
FETCHED_BYTES = 40                     # the same, what one fetches of 16-bit operands (256 x 64 x 100352 in 33 shares)
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
class CostedTile:
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
    is_half: bool = False              # of a symmetric D: tiles on one side of the diagonal alone are computed
    packed: int = 1                    # how many elements of the first operand take the bytes of one
    taps: int = 1                      # of the second operand: taps that share lines
    given: float = CLUSTER_BYTES       # bytes a cycle that the L2 gives all blocks where those of a cluster share K

    @cached_property
    def tiles(self) -> int:
        """Of a cluster."""
        return self.cluster[0] * self.cluster[1]

    @cached_property
    def shares(self) -> int:
        """Into how many equal shares the K of every tile is divided."""
        return 1 if isinstance(self.splits, StreamK) else self.splits

    @cached_property
    def within(self) -> int:
        """How many of them are those of one cluster."""
        return in_one_cluster(self.shares, self.tiles)

    @property
    def by_workspace(self) -> bool:
        """Whether the shares of every tile meet in global memory."""
        return self.shares > self.within

    def clusters(self, sizes: tuple[int, int, int], products: int) -> int:
        """Clusters of tiles."""
        m, n = self.M * self.cluster[0], self.N * self.cluster[1]
        order = HalfOfTiles.of(self.order, (m, n), False) if self.is_half else self.order
        return order.count(-(-sizes[0] // m), -(-sizes[1] // n)) * products

    def cycles(self, sizes: tuple[int, int, int], device: DeviceInfo, itemsize: int, supply: Supply | None,
               products: int) -> float:
        """The estimated time of a launch; without a ``supply`` the L2 limits nothing."""
        m, n = self.cluster
        tiles, shares = self.tiles, self.shares
        clusters, k_tiles = self.clusters(sizes, products), -(-sizes[2] * itemsize // self.depth)
        lines = k_tiles * self.depth / LINE
        within = self.within
        if shares > within:                            # by way of a workspace: all blocks at once, each with its share
            moved = clusters * lines * LINE * (self.M * m / self.packed + self.N * n / self.taps)
            given = min(SHARED_BYTES, FETCHED_BYTES * clusters * tiles * shares) if itemsize == 2 else SHARED_BYTES
            return max(math.ceil(lines / shares) * self.step, moved / given) + self.finish + self.start
        start = self.start + CLUSTERING * math.log2(tiles)
        side_by_side = at_once(tiles * within, device.sm_count)
        if isinstance(self.splits, StreamK):
            cycles = start + streamed_cycles(clusters, k_tiles, self.M * self.N * SUM, self.step * self.depth / LINE,
                                             self.finish, side_by_side, tiles, self.schedule == "pingpong")
        else:
            waves = -(-clusters // side_by_side)
            cycles = waves * (math.ceil(lines / shares) * self.step + self.finish) + start
        if supply is None:
            moved = clusters * lines * LINE * (self.M + self.N)
            return cycles if shares == 1 or self.packed > 1 else max(cycles, moved / self.given)   # 8 TB/s were seen
        fetched = n * (self.N / supply.of_b) + m * (self.M / supply.of_a)    # m blocks share B's columns
        return supply.joined(cycles, clusters * lines * LINE * fetched)

    def fetching(self, sizes: tuple[int, int, int], device: DeviceInfo) -> float:
        """The estimated cycles of a launch for 16-bit operands of which one has few rows, so that memory, the L2 and tensor
        cores are busy alike: it tells tiles of any width apart (`tables.FETCHING`)."""
        (M, N, K), (m, n) = sizes, self.cluster
        start, wave, memory, second_level, taken, multiplied, met, summed = tables.FETCHING
        clusters, lines = self.clusters(sizes, 1), math.ceil(2 * K / LINE)
        waves = 1 if self.by_workspace else math.ceil(clusters / at_once(self.tiles * self.within, device.sm_count))
        steps, tile = waves * lines / self.shares, self.M * self.N
        times = (2 * (M * K + N * K + M * N) / memory, steps * LINE * (self.M + self.N) / taken, steps * tile * multiplied,
                 clusters * self.tiles * lines * LINE * (self.M / n + self.N / m) / second_level)
        exchange = met + summed * tile if self.shares > 1 else 0
        return float(start + waves * wave + sum(time**3 for time in times) ** (1 / 3) + exchange)

    def ordered(self, sizes: tuple[int, int, int], products: int) -> CostedTile:
        """The mapping with the order that suits the grid: of so few tiles that all are computed at once, the one that is
        found the soonest."""
        rows, columns = (math.ceil(size / (tile * across))
                         for size, tile, across in zip(sizes, (self.M, self.N), self.cluster))
        few = products == 1 and self.shares == self.within and (rows * columns <= FEW_TILES or min(rows, columns) == 1)
        return dataclasses.replace(self, order=Hilbert()) if few else self

    @property
    def fields(self) -> dict[str, Any]:
        """It as fields of a Config for 16-bit operands."""
        return dict(block_shape=Tile(M=self.M, N=self.N, K=self.depth // 2), schedule=self.schedule,
                    warps_per_block=self.warps, producer_warps=self.producer_warps, splits=self.splits,
                    cluster=Tile(M=self.cluster[0], N=self.cluster[1]), order=self.order)


def fitted_tiles(sizes: tuple[int, int, int], device: DeviceInfo) -> tuple[CostedTile, ...]:
    """Tiles as wide as a product of some columns, or as half of it, for 16-bit operands, of which B lies along K.

    The tables' tiles have 64, 96, 128 or 192 columns: some are padding, which TMA takes its time for, or A comes once for
    each column of tiles. These fetch A once: blocks of a cluster share it, or two blocks share K where that fills the
    multiprocessors. Products of some rows are computed so as D^T. Microseconds of f16, nt, on an H200 (2026-11-30), by the
    tables' tiles, by these, and cuBLAS:

    | rows | 4096 x 4096 | 14336 x 4096 | 4096 x 14336 |
    |---|---|---|---|
    | 72 | 22.2, 13.3, 12.3 | 42.5, 33.9, 32.7 | 70.0, 32.7, 35.9 |
    | 144 | 20.7, 13.7, 15.6 | 52.2, 36.2, 34.3 | 72.3, 36.3, 40.4 |
    | 224 | 20.2, 14.9, 19.5 | 45.9, 43.8, 43.1 | 60.5, 46.3, 51.6 |
    """
    M, N, K = sizes
    if not tables.FEWEST <= N <= tables.WIDEST or M < tables.LEAST_ROWS or K < tables.LEAST_K:
        return ()
    found = []
    for rows, parts in itertools.product((64, 128), (1, 2)):
        width = -(-N // (parts * tables.PIECE)) * tables.PIECE
        depth = 2 * LINE if rows == 64 and width <= tables.DEEPEST else LINE
        tile = CostedTile(rows, width, "cooperative", rows // 16, (1, parts), 0, 0, 0, order=Hilbert(), depth=depth)
        found.append(tile)
        if rows == 64 and parts == 1 and 2 * -(-M // rows) <= device.sm_count:
            found.append(dataclasses.replace(tile, splits=2))
    return tuple(found)


def fastest(sizes: tuple[int, int, int] | None, device: DeviceInfo, N: int | None = None, itemsize: int = 2,
                   mappings: tuple[CostedTile, ...] = (), supply: Supply | None = None, is_tall: bool = False,
                   products: int = 1) -> CostedTile:
    """The mapping with the least estimated time: full waves of clusters, each as long as its tiles take. Of those that are
    as good as equal, the first, whose tiles are the largest: they move less, and a card at its power limit repays that.

    ``supply`` is what the L2 gives where rows do not begin at multiples of 128 bytes. With ``is_tall`` the tallest of the
    equal is taken. ``products`` of these sizes are one launch.
    """
    fit = [mapping for mapping in mappings if N in (None, mapping.N)]
    if not fit:
        assert N is not None
        fit = [CostedTile(128, N, "cooperative", 8, (1, 1), 4.2 * N, 3000, 0) if N > 64 else smallest(N)]
    if sizes is None:
        return fit[0]
    m, n, k = (max(1, size) for size in sizes)

    times = [mapping.cycles((m, n, k), device, itemsize, supply, products) for mapping in fit]
    least = 1.01 * min(times)
    equal = [mapping for mapping, time in zip(fit, times) if time <= least]
    return max(equal, key=lambda mapping: mapping.M) if is_tall else equal[0]


def with_second_pass(mapping: CostedTile, sizes: tuple[int, int, int], products: int, itemsize: int) -> CostedTile:
    """The mapping where rows of D are normalised: unless a tile has all columns, a second kernel reads and stores D."""
    if mapping.N >= sizes[1] and mapping.splits == 1:
        return mapping
    moved = 2 * products * sizes[0] * sizes[1] * itemsize
    return dataclasses.replace(mapping, start=mapping.start + SECOND_PASS + moved / SHARED_BYTES)


def with_rows_exchanged(mapping: CostedTile, sizes: tuple[int, int, int]) -> CostedTile | None:
    """The mapping in clusters whose blocks have a row of D together, so that no second kernel is needed where rows are
    normalised; None where there is none (`Sm90Spec.blocks_of_a_row`)."""
    blocks = math.ceil(sizes[1] / mapping.N)
    sums = mapping.M * mapping.N // (THREADS if mapping.schedule == "pingpong" else mapping.warps * WARP)
    fits = sums <= MOST_SUMS and mapping.N & (mapping.N - 1) == 0          # (128 x 224 spills 4 bytes)
    is_full = math.ceil(sizes[0] / 64) % (mapping.M // 64) == 0
    if blocks not in (2, 4, 8) or mapping.cluster != (1, 1) or mapping.splits != 1 or not (is_full and fits):
        return None
    return dataclasses.replace(mapping, cluster=(1, blocks), finish=mapping.finish + ROW_STATES)


def smallest(N: int) -> CostedTile:
    """The smallest tile of N columns: what is left where others take too much shared memory."""
    return CostedTile(64, N, "cooperative", 4, (1, 1), 4.2 * N, 3000, 0)


def by_workspace(sizes: tuple[int, int, int], device: DeviceInfo, products: int, mappings: tuple[CostedTile, ...],
                 least: int, itemsize: int = 2) -> tuple[CostedTile, ...]:
    """Mappings with shares by way of a workspace for a product of operands of so many bytes: as many shares as fill the
    device, and fewer; none below ``least`` k-tiles."""
    lines = math.ceil(sizes[2] * itemsize / LINE)
    if 0 in (*sizes, products) or lines < least:
        return ()
    found: list[CostedTile] = []
    for one in mappings:
        m, n = one.cluster
        is_half = one.N == 2 * sizes[1] and one.taps == 1         # of its sums, which would travel, too
        if m * one.M >= sizes[0] + one.M or n * one.N >= sizes[1] + one.N or is_half:       # tiles would be empty
            continue
        most = min(at_once(one.tiles, device.sm_count) // one.clusters(sizes, products), lines // 2)
        for shares in sorted({most, most // 2, most // 4}, reverse=True):
            if shares > 1:
                shared = dataclasses.replace(one, splits=shares, finish=one.finish + SHARE * shares)
                found += [shared] if shared.by_workspace else []
    return tuple(found)


def streaming(mappings: tuple[CostedTile, ...]) -> tuple[CostedTile, ...]:
    """Those with large tiles, streaming K."""
    return tuple(dataclasses.replace(one, splits=StreamK()) for one in mappings
                 if one.splits == 1 and one.M * one.N >= LEAST_STREAMED)


# -- shares of K ------------------------------------------------------------------------------------------------------

ENOUGH = 4                             # k-tiles of a share, at least
LONG = 8                               # k-tiles of a product whose K is shared at all
COUNTING, WRITTEN = 600, 12            # ns: finding out which block is the last; bytes a ns: writing a share's sums
LATE = 4000                            # ns: both, at most
BYTES = 64                             # a ns: what the last block reads
SLICES = 5300                          # ns: where all blocks wait for each other and sum slices
KEPT, TRAFFIC = 40e6, 2000             # bytes of sums that the L2 keeps; bytes a ns, of those that go to memory and back
SHARED_WORTH = 0.9                            # of the time without shares: what sharing has to come down to


def shares_to_try(tiles: int, k_tiles: int, sm_count: int, blocks: int) -> list[int]:
    """Numbers of shares worth trying: 1, small ones, and those that fill the multiprocessors with a block each, or with as
    many as run side by side.

    >>> shares_to_try(1, 4096, 132, 4), shares_to_try(64, 256, 132, 4), shares_to_try(1, 7, 132, 4)
    ([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 132, 528], [1, 2, 3, 4, 5, 6, 7, 8], [1])
    """
    if tiles == 0 or k_tiles < LONG:
        return [1]
    some = (n for n in (12, 16, 24, 32) if n * tiles <= sm_count * blocks)
    found = {*range(1, 9), *some, sm_count // tiles, sm_count * blocks // tiles}
    return sorted(n for n in found if 1 <= n <= max(1, k_tiles // ENOUGH))


def shared_nanoseconds(splits: int, tiles: int, nbytes: int, sm_count: int) -> float:
    """What the sums of ``splits`` shares of a tile's accumulators (``nbytes``) cost a launch of so many tiles.

    >>> shared_nanoseconds(1, 64, 2**17, 132), shared_nanoseconds(2, 64, 2**17, 132), shared_nanoseconds(132, 1, 2**14, 132)
    (0.0, 8096.0, 5300.0)
    """
    if splits == 1:
        return 0.0
    moved = max(0.0, 2 * tiles * splits * nbytes - KEPT) / TRAFFIC
    if takes_slices(splits, tiles, sm_count):
        return SLICES + moved
    return min(LATE, COUNTING + nbytes / WRITTEN) + splits * nbytes / BYTES + moved


# -- streams of K -----------------------------------------------------------------------------------------------------

#: Dtypes of A whose products stream K where the model says so: the switch.
STREAMING = frozenset({np.dtype(np.float32), np.dtype(np.float64)})

STREAMED_WORTH = 0.95                           # of the best time without: what it has to come down to
STREAM = 1.02                          # times the step of whole tiles: parts begin and end anywhere
HANDED = 1000                          # ns: writing the sums of a part; the block that needs them is rarely done before
#: ns: waiting for one block more and adding its sums, where more than two meet (one tile of f32, whose 237 k-tiles are 59
#: parts, takes 32.7 us on an H200; 26 of them are this).
FURTHER = 450
PART = 2.0                             # k-tiles: filling the ring anew for a tile that is begun within


def streamed_nanoseconds(tiles: int, k_tiles: int, nbytes: int, step: float, sm_count: int, blocks: int) -> float:
    """The modelled time of a launch by ``blocks`` blocks a multiprocessor, which take ``step`` ns for a k-tile each (all at
    a time), with sums of ``nbytes`` a tile; without the launch itself. Infinite where nothing would be streamed.

    133 tiles of 100 k-tiles on 132 multiprocessors, 1000 ns each, are two waves, or 1.01 and the exchange of sums:

    >>> round(streamed_nanoseconds(133, 100, 2**16, 1000.0, 132, 1)), streamed_nanoseconds(132, 100, 2**16, 1000.0, 132, 1)
    (106837, inf)
    """
    launched, streamed = division(tiles, k_tiles, sm_count * blocks, least=LEAST)
    if not streamed:
        return math.inf
    share = streamed * k_tiles / launched
    meet = math.ceil(k_tiles / share)                  # blocks whose sums the one that finishes reads
    moved = max(0.0, 2 * launched * nbytes - KEPT) / TRAFFIC
    whole = (tiles - streamed) // launched * k_tiles
    handed = HANDED + FURTHER * max(0, meet - 2) + meet * nbytes / BYTES
    return STREAM * (share + whole + PART) * step + handed + moved


#: Of Hopper's kernel: bytes a cycle that a block hands over, since first parts end at different times; bytes a cycle that
#: the L2 gives all blocks, which take over at about the same time; cycles until a block sees that it may; and cycles that a
#: cooperative launch begins later, which waits for the end of the kernel before it.
HANDED_BYTES, TAKEN_BYTES, SEEN, COOPERATIVE = 64, 4000, 1500, 3000


def streamed_cycles(tiles: int, k_tiles: int, nbytes: int, step: float, finish: float, at_once: int, blocks: int,
           takes_turns: bool = False) -> float:
    """The modelled cycles of a launch of Hopper's kernel with ``at_once`` clusters of ``blocks`` blocks, which take ``step``
    for a k-tile and ``finish`` for a tile's end, with sums of ``nbytes`` a block. Infinite where nothing would be streamed.
    With ``takes_turns`` (ping-pong) one consumer multiplies while the other hands over, or takes over before whole tiles.

    400 tiles of 79 k-tiles on 66 clusters are seven waves of 620,000 cycles, or 6.06 and the exchange of sums:

    >>> round(streamed_cycles(400, 79, 2**17, 1046, 6000, 66, 2)), streamed_cycles(396, 79, 2**17, 1046, 6000, 66, 2)
    (565836, inf)
    """
    launched, streamed = division(tiles, k_tiles, at_once, least=LEAST)
    if not streamed:
        return math.inf
    share = streamed * k_tiles / launched
    finished = math.ceil(streamed / launched) + (tiles - streamed) // launched
    others = math.ceil(k_tiles / share)                # clusters whose sums the one that finishes reads
    handed = 0 if takes_turns else nbytes / HANDED_BYTES
    if not takes_turns or tiles == streamed:
        handed += others * (launched * blocks * nbytes / TAKEN_BYTES + SEEN)
    multiplying = STREAM * (share + (tiles - streamed) // launched * k_tiles + PART) * step
    return multiplying + finished * finish + handed + COOPERATIVE


# -- rows that TMA does not take --------------------------------------------------------------------------------------

VECTOR, WORD = 16, 4                   # bytes at whose multiples rows begin: of a copy by TMA or a thread; the shortest copy
VECTORS, PAIRS, WORDS, ELEMENTS = range(4)     # kinds of rows, by where they begin

# Of Hopper's kernel, in cycles (`gemmkit.tuning.model`).
HOPPERS_START = 3160                   # of a launch
MULTIPLIED = 0.063                     # of an element of D, a k-tile of 64
PASSED = (0.0, 0.1, 0.1, 0.22)         # of an element of a k-tile that producer threads pass on
HOPPERS_STORED = (0.08, 0.12, 0.12, 0.22)      # of an element of D, a wave,
SHARED_STORED = 0.42                         # and where blocks share K (from 7 products, not fitted)


def kind(multiple: int) -> int:
    """How rows begin that begin at multiples of so many bytes: at vectors, at pairs of words, at words, anywhere.

    >>> kind(128), kind(8), kind(4), kind(2)
    (0, 1, 2, 3)
    """
    return VECTORS if multiple >= VECTOR else PAIRS if multiple >= 2 * WORD else WORDS if multiple >= WORD else ELEMENTS


def is_copied(*operands: ArrayInfo) -> bool:
    """Whether rows of one of them begin elsewhere than at vectors."""
    return any(kind(alignment(of)) for of in operands)


@dataclass(frozen=True)
class RowAlignment:
    """How rows of two operands begin, and those of D (`kind`).

    >>> import numpy as np
    >>> from gemmkit.layouts import RowMajor
    >>> f16, plain = np.dtype(np.float16), RowMajor("float16")
    >>> a, b = (ArrayInfo(0, (8, 24), (columns, 1), f16, 0, False, "cai") for columns in (24, 26))
    >>> RowAlignment.of(plain, plain, a, b, None, 7)
    RowAlignment(layouts=(RowMajor('float16'), RowMajor('float16')), kinds=(0, 2), of_d=3)
    """

    layouts: tuple[Plain, Plain]
    kinds: tuple[int, int]
    of_d: int

    @classmethod
    def of(cls, a: Plain, b: Plain, of_a: ArrayInfo, of_b: ArrayInfo, out: ArrayInfo | None, columns: int) -> RowAlignment:
        """Without ``out`` D's rows, of so many elements, follow each other."""
        nbytes = columns * a.dtype.itemsize
        rows_of_d = nbytes & -nbytes if out is None else alignment(out)
        return cls((a, b), (kind(alignment(of_a)), kind(alignment(of_b))), kind(rows_of_d))

    def hoppers(self, table: Any, sizes: Sizes, device: DeviceInfo, products: int) -> tuple[CostedTile, ...]:
        """Hopper's kernel's mappings of a `MappingTable` with what they cost."""
        workspace = tuple(self._hoppers(one, SHARED_STORED) for one in table.workspace)
        shared = by_workspace(sizes, device, products, workspace, table.least_shared)
        return (*map(self._hoppers, table.mappings), *shared)

    def _hoppers(self, one: CostedTile, shared: float = 0.0) -> CostedTile:
        passing = sum(PASSED[of] * across * 64 for of, across in zip(self.kinds, (one.M, one.N)))
        return dataclasses.replace(one, step=MULTIPLIED * one.M * one.N + passing, start=HOPPERS_START,
                                   finish=(HOPPERS_STORED[self.of_d] + shared) * one.M * one.N)
