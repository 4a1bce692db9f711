"""Mappings of the multistage kernel for plain operands, and which of them a product takes.

The time of a product is modelled in nanoseconds. ``step`` is what a block adds to its multiprocessor's time for a k-tile
when as many blocks as fit share it; a block that is alone takes ``solo`` a k-tile; ``start`` is what a launch takes besides.
The constants were fitted to one sweep on an H200 (bench/results/multistage_sweep.json, 2026-11-23: 294 rows, squares from
256 to 8192 and some that are not square); the model's choice was within 0.5 % (geometric mean) of the best of the sweep, and
within 2 % of each. float16's are of the sweep before; the smallest tiles' of f64 and complex64 of the 300 random products
of 2026-11-23 (`random.json`). Other GPUs have other times; that one tile is faster than another
carries over. Before sm_80 stages are filled by way of registers, and a tile has two of them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.kernels.common.stream_k import StreamK
from gemmkit.kernels.select import FAMILIES
from gemmkit.layouts import ArrayLayout
from gemmkit.operators import COMPLEX, FPUOp, Operator
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile
from gemmkit.tuning import split_k, stream_k
from gemmkit.tuning.mappings import MAPPING_FIELDS, is_untouched
from gemmkit.tuning.operators import tensor_cores

RESERVED = 1024                        # bytes of shared memory that the driver takes of a block's
PADDING = 32                           # bytes that a line is padded by
SHARED_START = 5000                    # ns of a launch, at most, whose blocks share tiles: there is no last wave to wait for


@dataclass(frozen=True)
class Multistage:
    """A mapping: a block's tile (M, N, K), a warp's (M, N), ``stages``, and ``blocks`` a multiprocessor.

    ``step`` has four times: neither operand is copied across (element by element), A is, B is, both are. ``merges`` is
    whether registers are left to merge the sums of blocks that share K, ``streams`` whether they are to stream K as well;
    without, they spill.
    """

    block: tuple[int, int, int]
    warp: tuple[int, int]
    stages: int
    blocks: int
    step: tuple[int, int, int, int]
    solo: int
    start: int
    lanes: tuple[int, int] = (4, 8)
    itemsize: int = field(default=4)
    merges: bool = field(default=True)
    streams: bool = field(default=True)
    finish: float = field(default=0.0)                 # ns that storing D takes a wave, where it depends on how rows begin

    def nanoseconds(self, sizes: tuple[int, int, int], products: int, across: int, sm_count: int, splits: int = 1) -> float:
        """The modelled time of a launch in which ``splits`` blocks share the K of a tile."""
        tiles, all_k_tiles = self._tiles(sizes, products)
        k_tiles = math.ceil(all_k_tiles / splits)
        full, rest = divmod(math.ceil(tiles * splits / sm_count), self.blocks)
        alone = self.alone(across)
        rounds = full * max(alone, self.blocks * self.step[across])
        if rest:
            rounds += max(alone, rest * self.step[across])
        start = self.start if splits == 1 else min(self.start, SHARED_START)
        finish = math.ceil(tiles * splits / sm_count) * self.finish
        return start + rounds * k_tiles + finish + split_k.nanoseconds(splits, tiles, self._sums, sm_count)

    def alone(self, across: int) -> float:
        """What a block that is alone takes for a k-tile. Where A is copied across, its single elements are what it waits
        for: with eight a thread it takes 1.25 times as long (f32 4000 x 8 x 268 on an H200), with 16 twice
        (5608 x 8 x 576, 3208 x 64 x 6720)."""
        if not across & 1 or self.itemsize != 4:
            return self.solo
        m, n = self.block[0] // self.warp[0], self.block[1] // self.warp[1]
        copies = self.block[0] * self.block[2] / (32 * m * n)
        return self.solo * (1 + (copies / 16) ** 2)

    def splits(self, sizes: tuple[int, int, int], products: int, across: int, sm_count: int) -> int:
        """How many blocks share the K of a tile: the number with the least modelled time, where it is worth it."""
        tiles, k_tiles = self._tiles(sizes, products)
        if tiles > sm_count or not self.merges:
            return 1
        found = split_k.candidates(tiles, k_tiles, sm_count, self.blocks)
        best = min(found, key=lambda splits: self.nanoseconds(sizes, products, across, sm_count, splits))
        alone = self.nanoseconds(sizes, products, across, sm_count)
        return best if self.nanoseconds(sizes, products, across, sm_count, best) < split_k.WORTH * alone else 1

    def streamed(self, sizes: tuple[int, int, int], products: int, across: int, sm_count: int) -> float:
        """The modelled time of a launch whose blocks stream K (`gemmkit.tuning.stream_k`)."""
        tiles, k_tiles = self._tiles(sizes, products)
        step = max(self.alone(across), self.blocks * self.step[across])
        parts = stream_k.nanoseconds(tiles, k_tiles, self._sums, step, sm_count, self.blocks)
        return min(self.start, SHARED_START) + math.ceil(tiles / sm_count) * self.finish + parts

    def _tiles(self, sizes: tuple[int, int, int], products: int) -> tuple[int, int]:
        """Tiles of all products, and the k-tiles of one."""
        (m, n, k), (M, N, K) = self.block, sizes
        return math.ceil(M / m) * math.ceil(N / n) * products, math.ceil(K / k)

    @property
    def _sums(self) -> int:
        """Bytes of a tile's sums."""
        return self.block[0] * self.block[1] * max(4, self.itemsize)

    def on(self, device: DeviceInfo) -> Multistage:
        """The mapping as a device has it: with no more stages than are of use there, and the blocks that this leaves."""
        from gemmkit.kernels.sm80.copies import copies_of  # on Hopper 16-bit floats ask for none

        copies = copies_of(device)
        one = dataclasses.replace(self, stages=min(self.stages, copies.useful_stages))
        return dataclasses.replace(one, blocks=copies.blocks(one.blocks, device.shared_memory_per_sm // one.nbytes))

    @property
    def nbytes(self) -> int:
        """Shared memory of a block; sums of 16-bit elements have four bytes."""
        return shared_bytes(self.block, self.stages, self.itemsize, max(4, self.itemsize))

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a configuration."""
        m, n, k = self.block
        warp = Tile(M=self.warp[0], N=self.warp[1], K=k)
        return dict(kernel="multistage", block_shape=Tile(M=m, N=n, K=k), compute_warp=warp,
                    warps_per_block=m // self.warp[0] * (n // self.warp[1]), stages=self.stages, blocks_per_sm=self.blocks)


def shared_bytes(block: tuple[int, int, int], stages: int, itemsize: int, accumulator: int) -> int:
    """About what a block's tile takes of shared memory, with elements and sums of so many bytes: the ring, or D's tile."""
    m, n, k = block
    return max(stages * (m + n) * (k * itemsize + PADDING), m * (n * accumulator + PADDING)) + RESERVED


ORDINARY = (                           # float32
    Multistage((128, 128, 16), (64, 32), 3, 2, (1254, 1326, 1340, 1375), 1330, 10500, (8, 4), merges=False),
    Multistage((64, 128, 16), (32, 64), 4, 3, (639, 665, 696, 758), 720, 11000),
    Multistage((128, 64, 16), (64, 32), 4, 3, (638, 727, 667, 763), 730, 11000, (8, 4)),
    Multistage((64, 64, 16), (32, 32), 4, 4, (355, 395, 438, 438), 450, 3500),
    Multistage((32, 64, 32), (16, 32), 3, 4, (420, 479, 511, 572), 535, 2400),
    Multistage((64, 32, 32), (32, 16), 3, 4, (416, 533, 471, 592), 620, 2400, (8, 4)),
    Multistage((32, 32, 32), (16, 16), 3, 6, (269, 350, 334, 404), 355, 2300),
)
DOUBLE = (                             # float64, by DMMA: nothing is copied across, yet the order of A decides how warps lie
    Multistage((128, 128, 32), (32, 64), 3, 1, (2270, 2310, 2270, 2310), 2270, 4000, itemsize=8, merges=False),
    Multistage((128, 128, 32), (64, 32), 3, 1, (2310, 2270, 2310, 2270), 2270, 4000, itemsize=8, merges=False),
    Multistage((64, 128, 32), (32, 32), 3, 1, (1173,) * 4, 1173, 2600, itemsize=8),
    Multistage((64, 64, 16), (32, 32), 4, 3, (302,) * 4, 380, 2500, itemsize=8, streams=False),
    Multistage((32, 64, 32), (16, 32), 3, 3, (418,) * 4, 430, 2900, itemsize=8),
    Multistage((32, 32, 32), (16, 16), 3, 4, (230,) * 4, 390, 2000, itemsize=8),
)
COMPLEX64 = (
    Multistage((128, 128, 8), (32, 64), 4, 1, (2550, 2550, 2550, 2680), 2550, 8000, itemsize=8, merges=False),
    Multistage((64, 64, 16), (32, 32), 3, 3, (1530, 1530, 1530, 1580), 2290, 4700, itemsize=8),
    Multistage((32, 64, 16), (16, 32), 3, 4, (710, 710, 710, 735), 740, 5000, itemsize=8),
    Multistage((32, 32, 16), (16, 16), 3, 4, (385, 385, 385, 400), 390, 2000, itemsize=8),
)
COMPLEX128 = (
    Multistage((64, 64, 8), (16, 64), 4, 2, (565,) * 4, 720, 4500, itemsize=16, merges=False),
    Multistage((32, 64, 16), (16, 32), 3, 2, (611,) * 4, 800, 2300, itemsize=16),
    Multistage((32, 32, 16), (16, 16), 3, 3, (348,) * 4, 430, 2200, itemsize=16),
)
HALF = (                               # float16 and bfloat16 by mma.sync, where there is no wgmma
    Multistage((128, 256, 64), (64, 64), 3, 1, (1220,) * 4, 1220, 4000, itemsize=2),
    Multistage((128, 128, 32), (64, 64), 4, 2, (397,) * 4, 500, 3500, itemsize=2),
    Multistage((64, 64, 64), (32, 32), 3, 4, (240,) * 4, 400, 2500, itemsize=2),
    Multistage((32, 64, 64), (16, 32), 3, 4, (160,) * 4, 350, 2500, itemsize=2),
    Multistage((16, 64, 128), (16, 16), 5, 2, (200,) * 4, 400, 2500, itemsize=2),
)
SKINNY = Multistage((16, 32, 256), (16, 8), 4, 1, (1900,) * 4, 1900, 2500, itemsize=2)

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
C64, C128 = np.dtype(np.complex64), np.dtype(np.complex128)
F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
TABLES = {F32: ORDINARY, F64: DOUBLE, C64: COMPLEX64, C128: COMPLEX128, F16: HALF, BF16: HALF}


def choice(a: ArrayLayout, b: ArrayLayout, fields: dict[str, Any], sizes: tuple[int, int, int], device: DeviceInfo,
           products: int = 1) -> tuple[Operator, dict[str, Any]] | None:
    """The operator and the mapping's fields of a product that the multistage kernel computes fastest; None for others.

    A semiring that leaves its shape open (the ``operator`` of ``fields``) gets that of the mapping.
    """
    if not applies(a, b, fields, device):
        return None
    given = fields.get("operator")
    if a.dtype in (F16, BF16) and device.arch[0] == 9:
        is_taken = given is None and products == 1 and _is_skinny(a, b, sizes)
        return _usual(a.dtype, SKINNY, device) if is_taken else None
    # A semiring takes registers of its own: tiles that have none left would spill.
    listed = tuple(one for one in TABLES[a.dtype] if given is None or one.merges)
    streams = given is None and a.dtype in stream_k.CHOSEN and _are_copied(a, b, fields)
    found = fastest(listed, a, b, sizes, device, products, streams)
    if found is None:
        return None
    best, splits = found
    mapping = dict(best.fields, splits=fields.get("splits", splits))
    if given is None:
        units = operator(a.dtype, best, device)
        return None if units is None else (units, mapping)
    if a.dtype != F32 or not isinstance(given, FPUOp) or getattr(given, "is_sized", True) or not hasattr(given, "sized"):
        return None
    lanes = dict(M=best.warp[0], N=best.warp[1], MB=best.lanes[0], NB=best.lanes[1])
    units = given.sized(lanes, a.dtype, b.dtype, a.dtype)
    return units, mapping if units.refuses_to_merge is None else best.fields


def of_half(mappings: tuple[Multistage, ...], a: ArrayLayout, b: ArrayLayout, sizes: tuple[int, int, int],
            device: DeviceInfo, most: float = math.inf) -> tuple[Operator | None, dict[str, Any]] | None:
    """The same of 16-bit floats by mma.sync among these mappings, wherever wgmma may be had. None where it takes longer than
    ``most`` ns by the model."""
    found = fastest(mappings, a, b, sizes, device, 1, may_stream=True)
    if found is None:
        return None
    one, splits = found
    time = (one.streamed(sizes, 1, 0, device.sm_count) if isinstance(splits, StreamK)
            else one.nanoseconds(sizes, 1, 0, device.sm_count, splits))
    made = _usual(a.dtype, one, device)
    return None if made is None or time > most else (made[0], dict(made[1], splits=splits))


def fastest(mappings: tuple[Multistage, ...], a: ArrayLayout, b: ArrayLayout, sizes: tuple[int, int, int],
            device: DeviceInfo, products: int, may_stream: bool) -> tuple[Multistage, int | StreamK] | None:
    """The mapping with the least modelled time, as the device has it, of those that fit a block's shared memory, if any; and
    its shares of K. ``may_stream``: all k-tiles take as long, so that equal numbers of them are equal shares."""
    across, sm_count = copied_across(a, b), device.sm_count
    fit = [one for one in (one.on(device) for one in mappings) if one.nbytes <= device.shared_memory_per_block]
    found = [(one, one.splits(sizes, products, across, sm_count)) for one in fit]
    best = min(found, key=lambda of: of[0].nanoseconds(sizes, products, across, sm_count, of[1]), default=None)
    streams = [one for one in fit if one.merges and one.streams and may_stream]
    if best is None or not streams:
        return best
    stream = min(streams, key=lambda one: one.streamed(sizes, products, across, sm_count))
    least = stream_k.WORTH * best[0].nanoseconds(sizes, products, across, sm_count, best[1])
    return (stream, StreamK()) if stream.streamed(sizes, products, across, sm_count) < least else best


def applies(a: ArrayLayout, b: ArrayLayout, fields: dict[str, Any], device: DeviceInfo) -> bool:
    """Whether a product for which nothing but these fields is given may go to the multistage kernel: operands of one dtype;
    of real numbers in any layout and with any transform (f32 4096^3 on an H200: relu of A 2.82 ms, 3.20 by the single-stage
    kernel; a Toeplitz A 2.79, 3.16), of others plain ones."""
    plain = _are_copied(a, b, fields)
    return (a.dtype == b.dtype and a.dtype in TABLES and not set(fields) & MAPPING_FIELDS
            and (plain or a.dtype in (F32, F64))
            and (device.arch[0] == 9 or device.arch >= FAMILIES["multistage"].minimum_arch))  # which loads the family


def _are_copied(a: ArrayLayout, b: ArrayLayout, fields: dict[str, Any]) -> bool:
    """Whether A and B are matrices or tensors that nothing acts on."""
    return all(layout.is_separable and is_untouched(name, fields)
               for name, layout in (("a", a), ("b", b)))


def _is_skinny(a: ArrayLayout, b: ArrayLayout, sizes: tuple[int, int, int]) -> bool:
    """A few rows of A and columns of B that are contiguous along K: B is all that takes time, and wgmma's 64 rows none of it
    sooner. (Without components of the caller's the transpose is computed, which is faster: `few_rows`.) Microseconds on an
    H200, and by the warp-specialised kernel, which wider products with more rows stay with:

    | N x K | 1 row | 8 | 16 | 32 |
    |---|---|---|---|---|
    | 4096 x 4096 | 11.6, 29.0 | 13.6, 29.4 | 15.4, 27.1 | 24.0, 21.5 |
    | 4096 x 14336 | 30.8, 89.5 | 37.1, 91.7 | 40.4, 81.1 | 67.3, 62.7 |
    | 14336 x 4096 | 33.6, 35.8 | 38.8, 35.6 | 45.3, 35.2 | 71.6, 33.7 |
    """
    M, N, K = sizes
    rows = 0 < M <= (16 if N <= 8192 else 1)
    return rows and N >= 1024 and K >= 1024 and K % 8 == 0 and a.vector_axis == 1 and b.vector_axis == 0


def _usual(dtype: np.dtype, one: Multistage, device: DeviceInfo) -> tuple[Operator, dict[str, Any]] | None:
    """A mapping's fields with the operator for them, if there is one."""
    made = operator(dtype, one, device)
    return None if made is None else (made, one.fields)


def operator(dtype: np.dtype, one: Multistage, device: DeviceInfo) -> Operator | None:
    """What multiplies elements of a dtype in the warps' tiles of a mapping; None where the device has nothing for them."""
    real = F64 if dtype == C128 else dtype
    units = tensor_cores(real, real, device)
    if dtype in (F16, BF16):
        return units and dataclasses.replace(units, N=16 if one.warp[1] % 16 == 0 else 8)
    if units is None:
        return FPUOp(M=one.warp[0], N=one.warp[1], MB=one.lanes[0], NB=one.lanes[1], dtype=dtype)
    doubles = dataclasses.replace(units, K=4)
    return COMPLEX.with_base(doubles) if dtype == C128 else doubles


def copied_across(a: ArrayLayout, b: ArrayLayout) -> int:
    """Which operands are copied across on the ordinary units: 1 for A, 2 for B."""
    return (a.contiguous_axis == 1) + 2 * (b.contiguous_axis == 0)


__all__ = ["SKINNY", "TABLES", "Multistage", "applies", "choice", "copied_across", "of_half", "operator"]
