"""Default mappings: the paper's heuristics brought up to date.

A block's tile is as large as keeps every multiprocessor busy: from a short list, the one whose last wave wastes least.
Where tiles are few and K is long, several blocks of a cluster share the K of a tile.
Threads move 16 bytes at a time along the contiguous axis; shared tiles keep the order of the global operand (so that moves
stay wide), unless the operator refuses it, and are padded as the operator asks (so that its accesses miss no bank).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmkit.kernels.collectives.operand import bytes_of
from gemmkit.kernels.collectives.pipeline import ALIGNMENT
from gemmkit.kernels.spec import divides
from gemmkit.lang.number_rules import part_dtypes
from gemmkit.layouts import ArrayLayout, ColMajor, Padded, RowMajor
from gemmkit.operators import Algebra, FPUOp, MMAOp, Operator
from gemmkit.operators.base import units
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile
from gemmkit.tuning import tables
from gemmkit.tuning.operators import SHORT, shares_of


def fill(values: dict[str, Any], operator: Operator, sizes: tuple[int, int, int] | None, device: DeviceInfo,
         products: int) -> None:
    """Complete the mapping of the single-stage kernel in place."""
    laid_out = dict(values)
    fill_shared(laid_out, operator, operator.fragment_c.dtype)
    fill_tiles(values, operator, sizes, device, products, TileBudget.of(device, laid_out))
    values.update({**laid_out, **values})
    fill_moves(values)


# -- tiles ------------------------------------------------------------------------------------------------------------

LINE = 256                             # bytes of a line of those tiles along K, of elements that are wider than 16 bits
SHARED = 200 * 1024                    # bytes of shared memory that the blocks of a multiprocessor may take
DEPTHS = 24, 16                        # of k-tiles on the ordinary units, where K is no longer than LONG
LONG = 512
BRIEF = 6                              # blocks a multiprocessor where K is SHORT: stores of D are to overlap

# With none of these given, K may be shared out.
_OF_A_MAPPING = {"block_shape", "compute_warp", "warps_per_block", "blocks_per_sm", "order", "stages", "schedule", "cluster",
                 "producer_warps", *(f"shared_{name}_layout" for name in "abcd"),
                 *(f"mem_{name}_{what}" for name in ("a", "b", "cd") for what in ("warp", "thread"))}


def fill_tiles(values: dict[str, Any], operator: Operator, sizes: tuple[int, int, int] | None,
               device: DeviceInfo, products: int, room: TileBudget) -> None:
    """The block's tile, the warps', and in how many shares K is cut. What is not given of them is such as ``room`` holds."""
    shares = (not set(values) & _OF_A_MAPPING and isinstance(operator, (FPUOp, MMAOp))
              and operator.refuses_to_merge is None)
    given_block, given_warp, warps = (values.get(n) for n in ("block_shape", "compute_warp", "warps_per_block"))
    if given_block is None:
        listed = _fitting(candidates(operator), room, operator.shape[2])
        block, warp, blocks = _fastest(listed, sizes, device, shares and isinstance(operator, FPUOp), products)
        if sizes is not None and shares and values.setdefault("splits", _splits(block, blocks, sizes, device, products)) > 1:
            blocks = tables.SIDE_BY_SIDE.get(block, blocks)
        if sizes is not None and sizes[2] <= 64 < block[2]:               # a short K would leave half of it empty
            block = (*block[:2], math.lcm(64, operator.shape[2]))
        if sizes is not None and block == (64, 64, 32) and _is_brief(operator, sizes[2]):
            blocks = BRIEF
        if sizes is not None and isinstance(units(operator), FPUOp):
            block = (*block[:2], _depth(sizes[2], block[2], operator.shape[2]))
        if given_warp is None and warps is None and _is_small(operator):
            values.setdefault("blocks_per_sm", blocks)
        values["block_shape"] = given_block = Tile(M=block[0], N=block[1], K=block[2])
        if given_warp is None and warps is None:
            given_warp = Tile(M=warp[0], N=warp[1], K=_warp_k(operator, block[2]))
    if given_warp is None:
        given_warp = _warp_of(given_block, operator, warps)
    values["compute_warp"] = given_warp
    if warps is None:
        block = given_block.size
        values["warps_per_block"] = max(1, block.M // given_warp.size.M) * max(1, block.N // given_warp.size.N)


def _fitting(candidates: Sequence[Any], room: TileBudget, unit: int) -> Sequence[Any]:
    """Those of the candidates that fit, some of them with a shorter K; if none does, the last one made smaller."""
    shallow = [(room.shallower(block, unit), warp, blocks) for block, warp, blocks in candidates]
    fit = [candidate for candidate in shallow if room.holds(candidate[0])]
    return fit or [(room.smaller(block, warp), warp, blocks) for block, warp, blocks in shallow[-1:]]


def _splits(block: tuple, blocks: int, sizes: tuple[int, int, int], device: DeviceInfo, products: int) -> int:
    """How many blocks share the K of a tile: as many as run side by side, each with enough of K."""
    M, N, K = sizes
    tiles = math.ceil(max(1, M) / block[0]) * math.ceil(max(1, N) / block[1]) * max(1, products)
    side_by_side = tables.SIDE_BY_SIDE.get(block, blocks) * device.sm_count
    most = min(shares_of(K, block[2], device), side_by_side // tiles)
    return next(splits for splits in (8, 4, 2, 1) if splits <= max(1, most))


def _is_brief(operator: Operator, k: int) -> bool:
    """Whether D is nearly all that moves."""
    return isinstance(operator, FPUOp) and k <= SHORT and _is_small(operator)


def _depth(k: int, depth: int, unit: int) -> int:
    """Of a block along a short K: what leaves the least of it empty, a block's own time counted as two steps."""
    depths = [depth] if k > LONG else [depth, *(d for d in DEPTHS if d < depth and d % unit == 0)]
    return min(depths, key=lambda d: -(-max(1, k) // d) * (d + 2))


def _is_small(operator: Operator) -> bool:
    """Whether the listed numbers of blocks leave enough registers: 8-byte elements take twice as many."""
    if isinstance(operator, Algebra):            # `_shrunk` has seen to it on tensor cores
        return not isinstance(operator.base, FPUOp)
    fragments = operator.fragment_a, operator.fragment_b, operator.fragment_c
    return getattr(operator, "is_light", True) and max(f.dtype.itemsize for f in fragments) <= 4


def candidates(operator: Operator) -> list:
    m, n, k = operator.shape
    size = part_dtypes(operator.fragment_a.dtype)[0].itemsize
    listed: Any = tables.DOUBLE_TILES if size == 8 else [((M, N, min(K, LINE // size)), *rest)
                                                         for (M, N, K), *rest in tables.TENSOR_TILES]
    if size == 1 and operator.fragment_a.dtype.kind not in "iu":
        listed = [(block, warp, 1) for block, warp, _ in listed[1:]]    # sm_90 makes float16 of them first, in registers
    if isinstance(operator, Algebra):
        listed = [_shrunk(block, warp, blocks, operator.parts, size) for block, warp, blocks in listed]
    if isinstance(units(operator), FPUOp):      # one operation a warp: a second would double what its threads hold
        known = tables.FPU_TILES.get((m, n), (((2 * m, 2 * n, 32), 1),))
        listed = tuple((block, (m, n), blocks) for block, blocks in known)
    fit = []
    for block, warp, blocks in listed:
        warp = (math.lcm(warp[0], m), math.lcm(warp[1], n))
        block = (math.lcm(block[0], warp[0]), math.lcm(block[1], warp[1]), math.lcm(block[2], k))
        if block[0] // warp[0] * (block[1] // warp[1]) <= 32:
            fit.append((block, warp, blocks))
    return fit


def _shrunk(block: tuple, warp: tuple, blocks: int, parts: int, size: int) -> tuple:
    """Tiles for numbers of several parts, that take no more registers and shared memory than those for one."""
    (M, N, K), (m, n) = block, warp
    accumulators = m * n
    while parts * m * n > accumulators and (m > 16 or n > 8):
        if m > n:
            M, m = M // 2, m // 2
        else:
            N, n = N // 2, n // 2
    while parts * (M + N) * K * size * blocks > SHARED and K > 16:
        K //= 2
    return (M, N, K), (m, n), blocks


def _fastest(candidates: Sequence[Any], sizes: tuple[int, int, int] | None, device: DeviceInfo, shares: bool,
            products: int) -> Any:
    """The candidate with the least estimated time: waves of blocks, each as long as its tile is large (and its share of K).

    A small tile does less per byte that it moves; ``overhead`` stands for that (in rows of a tile). Blocks that share a
    multiprocessor share its time.
    """
    if sizes is None:
        return candidates[0]
    M, N, _ = (max(1, s) for s in sizes)

    def time(candidate: Any) -> float:
        (m, n, _), _, blocks = candidate
        overhead = 24
        splits = _splits(candidate[0], blocks, sizes, device, products) if shares else 1
        tiles = math.ceil(M / m) * math.ceil(N / n) * products * splits
        waves = tiles / (blocks * device.sm_count)
        shared_by = blocks if waves >= 1 else max(1.0, tiles / device.sm_count)
        return max(1, math.ceil(waves)) * shared_by * (m + overhead) * (n + overhead) / splits

    return min(candidates, key=time)


def _warp_k(operator: Operator, block_k: int) -> int:
    """Slices along K: 16 deep on tensor cores, and on the ordinary units short enough to keep the code small."""
    k = operator.shape[2]
    limit = 4 if isinstance(units(operator), FPUOp) else 16       # NVVM unrolls four steps of 64 products, and not eight
    return next((d for d in range(limit, k - 1, -1) if d % k == 0 and block_k % d == 0), k)


def warp_of(block: Tile, operator: Operator, warps: int | None) -> tuple[int, int]:
    """Rows and columns of a warp's part of a given block."""
    size = _warp_of(block, operator, warps).size
    return size.M, size.N


def _warp_of(block: Tile, operator: Operator, warps: int | None) -> Tile:
    """The squarest division of a given block among the warps (4 x 2 for 8) that the operator's shape allows."""
    m, n, k = operator.shape
    best = None
    for rows in range(1, 33):
        for columns in range(1, 33):
            if (warps is not None and rows * columns != warps) or rows * columns > 32:
                continue
            if block.size.M % (rows * m) or block.size.N % (columns * n):
                continue
            wm, wn = block.size.M // rows, block.size.N // columns
            score = (abs(rows * columns - (warps or 8)), abs(math.log2(wm / wn)), wm < wn)
            if best is None or score < best[0]:
                best = score, wm, wn
    if best is None:                     # no division: let validation name the rule that the block breaks
        return Tile(M=m, N=n, K=k)
    return Tile(M=best[1], N=best[2], K=_warp_k(operator, block.size.K))


# -- shared memory ----------------------------------------------------------------------------------------------------

def fill_shared(values: dict[str, Any], operator: Operator, accumulator: np.dtype) -> None:
    for name, fragment, preferred in (("a", operator.fragment_a, 0), ("b", operator.fragment_b, 1)):
        axis = values[f"global_{name}_layout"].vector_axis
        is_fpu = isinstance(units(operator), FPUOp)
        if is_fpu or axis is None:
            axis = preferred if is_fpu else 1 - preferred
        values.setdefault(f"shared_{name}_layout", _shared(name, axis, fragment.dtype, operator))
    axis = values["global_d_layout"].vector_axis
    values.setdefault("shared_d_layout", _shared("d", 1 if axis is None else axis, accumulator, operator))
    values.setdefault("shared_c_layout", values["shared_d_layout"])


def _shared(name: str, axis: int, dtype: np.dtype, operator: Operator) -> Any:
    """For an operand that is contiguous along ``axis``: as the operator wants it; of an algebra's numbers, planes."""
    part = part_dtypes(dtype)[0] if isinstance(operator, Algebra) else dtype
    axis = operator.shared_axis(name, axis)
    padded = Padded((ColMajor, RowMajor)[axis](part), operator.padding(name, axis) // part.itemsize)
    return operator.split(padded, dtype) if isinstance(operator, Algebra) else padded


# -- moves ------------------------------------------------------------------------------------------------------------

def fill_moves(values: dict[str, Any]) -> None:
    block, warps = values["block_shape"], values["warps_per_block"]
    for name, names, operand in (("a", "MK", "a"), ("b", "KN", "b"), ("cd", "MN", "d")):
        tile = getattr(block, names)
        layout, shared = values[f"global_{operand}_layout"], values[f"shared_{operand}_layout"]
        warp, thread = _move(tile, layout, shared, warps)
        values.setdefault(f"mem_{name}_thread", thread)
        if f"mem_{name}_warp" not in values:
            given = values[f"mem_{name}_thread"]
            if given.names == tile.names:
                divides(given, tile, f"mem_{name}_thread", f"the block's {tile!r} must be a multiple of it")
            values[f"mem_{name}_warp"] = warp if given == thread else _warp_around(tile, given)


def _move(tile: Tile, layout: ArrayLayout, shared: Any, warps: int) -> tuple[Tile, Tile]:
    """The tiles that a warp and a thread move: a thread what makes its accesses 16 bytes wide, whole lines a warp."""
    axis = layout.vector_axis if layout.vector_axis is not None else shared.axis
    along, across = tile.extents[axis], tile.extents[1 - axis]
    vector = math.gcd(layout.run, along)
    while vector > layout.comb and tile.count % (warps * 32 * vector):          # every thread should have as much to move
        vector //= 2
    lanes = min(32, along // vector) if axis == shared.axis else min(2 if layout.comb == 1 else 1, along // vector)
    lanes = math.gcd(lanes, along // vector)
    lines = math.gcd(32 // lanes if 32 % lanes == 0 else 1, across)
    warp, thread = [lines, lines], [1, 1]
    warp[axis], thread[axis] = lanes * vector, vector
    return _tile(tile.names, warp), _tile(tile.names, thread)


def _warp_around(tile: Tile, thread: Tile) -> Tile:
    """A warp's tile of whole thread tiles, lines along the first axis that the thread's tile extends."""
    axis = 0 if thread.extents[0] >= thread.extents[1] else 1
    lanes = math.gcd(32, max(1, tile.extents[axis] // thread.extents[axis]))
    lines = math.gcd(32 // lanes, max(1, tile.extents[1 - axis] // thread.extents[1 - axis]))
    warp = [0, 0]
    warp[axis], warp[1 - axis] = lanes * thread.extents[axis], lines * thread.extents[1 - axis]
    return _tile(tile.names, warp)


def _tile(names: tuple[str, ...], extents: list[int]) -> Tile:
    return Tile(**dict(zip(names, extents)))


# -- room -------------------------------------------------------------------------------------------------------------

SHALLOW = 16                           # along K, below which no tile is narrowed


@dataclass(frozen=True)
class TileBudget:
    """``limit`` bytes, which hold ``stages`` tiles of A and of B, and at other times a tile of sums in each of ``sums``: C
    and D. ``a`` and ``b`` are the shared layouts of A and B."""

    limit: int
    stages: int
    a: Any
    b: Any
    sums: tuple[Any, ...]

    @classmethod
    def of(cls, device: DeviceInfo, values: dict[str, Any], stages: int = 1) -> TileBudget:
        """That of a device, for the shared layouts of a configuration's fields."""
        return cls(device.shared_memory_per_block, stages, values["shared_a_layout"], values["shared_b_layout"],
                   (values["shared_c_layout"], values["shared_d_layout"]))

    def nbytes(self, block: tuple[int, int, int]) -> int:
        """What a block's tile takes."""
        m, n, k = block
        stage = _aligned(_aligned(bytes_of(self.a, m, k)) + bytes_of(self.b, k, n))
        return max(self.stages * stage, *(bytes_of(layout, m, n) for layout in self.sums))

    def holds(self, block: tuple[int, int, int]) -> bool:
        return self.nbytes(block) <= self.limit

    def shallower(self, block: tuple[int, int, int], unit: int) -> tuple[int, int, int]:
        """The tile halved along K, where it stays a multiple of ``unit``, until it fits; as far as that is of use."""
        m, n, k = block
        sums = max(bytes_of(layout, m, n) for layout in self.sums)
        while sums <= self.limit < self.nbytes((m, n, k)) and k > SHALLOW and k % (2 * unit) == 0:
            k //= 2
        return m, n, k

    def smaller(self, block: tuple[int, int, int], warp: tuple[int, int]) -> tuple[int, int, int]:
        """The tile halved along M or N, where it is several of the warps' tiles, until it fits."""
        m, n, k = block
        while not self.holds((m, n, k)) and (m > warp[0] or n > warp[1]):
            m, n = (m // 2, n) if (m >= n and m > warp[0]) or n == warp[1] else (m, n // 2)
        return m, n, k


def _aligned(nbytes: int) -> int:
    """Where the next tile may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
