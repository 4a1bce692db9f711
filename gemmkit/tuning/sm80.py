"""Mappings of the multistage kernel: which of them a product takes, and what follows from one.

The time of a product is modelled in nanoseconds. ``step`` is what a block adds to its multiprocessor's time for a k-tile
when as many blocks as fit share it; a block that is alone takes ``solo`` a k-tile; ``start`` is what a launch takes besides.
The constants were fitted to one sweep on an H200 (bench/results/multistage_sweep.json, 2026-11-23: 294 rows, squares from
256 to 8192 and some that are not square); the model's choice was within 0.5 % (geometric mean) of the best of the sweep, and
within 2 % of each. float16's are of the sweep before; the smallest tiles' of f64 and complex64 of the 300 random products
of 2026-11-23 (`random.json`). Other GPUs have other times; that one tile is faster than another
carries over. Before sm_80 stages are filled by way of registers, and a tile has two of them.

Shared tiles keep the order of global memory, padded by 16 bytes a line, so that a copy of 16 bytes goes to 16 bytes. The
ordinary units read vectors along M and N, so an operand that is contiguous along K is copied across: an element a copy, 32
bytes of a row by neighbouring lanes, into lines whose padding puts the lanes of a warp into different banks. So is a tensor
whose contiguous dimension is too odd for vectors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemmkit.kernels.collectives.split_k import StreamK
from gemmkit.kernels.spec import FAMILIES
from gemmkit.layouts import ArrayLayout, Boxed, ColMajor, Matricised, Padded, RowMajor
from gemmkit.layouts.plain import BOX, RUN
from gemmkit.operators import COMPLEX, Algebra, BoxMMAOp, FPUOp, MMAOp, Operator
from gemmkit.operators.base import units
from gemmkit.ptx.copy_async import SIZES
from gemmkit.runtime.arrays import ArrayInfo, alignment, unit_axis
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile
from gemmkit.tuning import simt, tables
from gemmkit.tuning.model import (
    ELEMENTS,
    SHARED_WORTH,
    STREAMED_WORTH,
    STREAMING,
    Asked,
    Infos,
    Proposal,
    RowAlignment,
    Sizes,
    shared_nanoseconds,
    shares_to_try,
    streamed_nanoseconds,
)
from gemmkit.tuning.operators import SIXTEEN, tensor_cores
from gemmkit.tuning.sm90 import MAPPING_FIELDS, is_untouched

RESERVED = 1024                        # bytes of shared memory that the driver takes of a block's
PADDING = 32                           # bytes that a line is padded by
SHARED_START = 5000                    # ns of a launch, at most, whose blocks share tiles: there is no last wave to wait for


@dataclass(frozen=True)
class Multistage:
    """A mapping: a block's tile (M, N, K), a warp's (M, N), ``stages``, and ``blocks`` a multiprocessor.

    ``step`` has four times: neither operand is copied across (element by element), A is, B is, both are. ``merges`` is
    whether registers are left to merge the sums of blocks that share K (without, they spill), ``streams`` whether K is
    streamed.
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

    def nanoseconds(self, sizes: Sizes, products: int, across: int, sm_count: int, splits: int = 1) -> float:
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
        return start + rounds * k_tiles + finish + shared_nanoseconds(splits, tiles, self._sums, sm_count)

    def alone(self, across: int) -> float:
        """What a block that is alone takes for a k-tile. Where A is copied across, its single elements are what it waits
        for: with eight a thread it takes 1.25 times as long (f32 4000 x 8 x 268 on an H200), with 16 twice
        (5608 x 8 x 576, 3208 x 64 x 6720)."""
        if not across & 1 or self.itemsize != 4 or len(set(self.step)) == 1:     # tensor cores copy nothing across
            return self.solo
        m, n = self.block[0] // self.warp[0], self.block[1] // self.warp[1]
        copies = self.block[0] * self.block[2] / (32 * m * n)
        return self.solo * (1 + (copies / 16) ** 2)

    def splits(self, sizes: Sizes, products: int, across: int, sm_count: int) -> int:
        """How many blocks share the K of a tile: the number with the least modelled time, where it is worth it."""
        tiles, k_tiles = self._tiles(sizes, products)
        if tiles > sm_count or not self.merges:
            return 1
        found = shares_to_try(tiles, k_tiles, sm_count, self.blocks)
        best = min(found, key=lambda splits: self.nanoseconds(sizes, products, across, sm_count, splits))
        alone = self.nanoseconds(sizes, products, across, sm_count)
        return best if self.nanoseconds(sizes, products, across, sm_count, best) < SHARED_WORTH * alone else 1

    def streamed(self, sizes: Sizes, products: int, across: int, sm_count: int) -> float:
        """The modelled time of a launch whose blocks stream K (`gemmkit.kernels.collectives.split_k`)."""
        tiles, k_tiles = self._tiles(sizes, products)
        step = max(self.alone(across), self.blocks * self.step[across])
        parts = streamed_nanoseconds(tiles, k_tiles, self._sums, step, sm_count, self.blocks)
        return min(self.start, SHARED_START) + math.ceil(tiles / sm_count) * self.finish + parts

    def launch(self, sizes: Sizes, products: int, across: int, sm_count: int, splits: int | StreamK) -> float:
        """The modelled time of a launch whose blocks share K so, or stream it."""
        if isinstance(splits, StreamK):
            return self.streamed(sizes, products, across, sm_count)
        return self.nanoseconds(sizes, products, across, sm_count, splits)

    def _tiles(self, sizes: Sizes, products: int) -> tuple[int, int]:
        """Tiles of all products, and the k-tiles of one."""
        (m, n, k), (M, N, K) = self.block, sizes
        return math.ceil(M / m) * math.ceil(N / n) * products, math.ceil(K / k)

    @property
    def _sums(self) -> int:
        """Bytes of a tile's sums."""
        return self.block[0] * self.block[1] * max(4, self.itemsize)

    def on(self, device: DeviceInfo) -> Multistage:
        """The mapping as a device has it: with no more stages than are of use there, and the blocks that this leaves."""
        from gemmkit.kernels.sm80.routes import copies_of  # on Hopper 16-bit floats ask for none

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


def multistages_of(rows: Iterable[tuple[Any, ...]], itemsize: int) -> tuple[Multistage, ...]:
    """Rows of `gemmkit.tuning.tables` as mappings, of elements of so many bytes."""
    return tuple(Multistage(block, warp, stages, blocks, step, solo, start, *lanes, itemsize=itemsize, merges=shares > 0,   # type: ignore[misc]
                            streams=shares != 1) for block, warp, stages, blocks, step, solo, start, shares, *lanes in rows)


F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
C64, C128 = np.dtype(np.complex64), np.dtype(np.complex128)
F16, BF16 = SIXTEEN
_HALF, _TF32 = multistages_of(tables.HALF, 2), multistages_of(tables.TF32, 4)
TABLES = {F32: multistages_of(tables.ORDINARY, 4), F64: multistages_of(tables.DOUBLE, 8),
          C64: multistages_of(tables.COMPLEX64, 8), C128: multistages_of(tables.COMPLEX128, 16), F16: _HALF, BF16: _HALF}
SKINNY, = multistages_of(tables.SKINNY, 2)
GATHERED, BOXES = multistages_of(tables.GATHERED, 2), multistages_of(tables.BOXES, 2)


def propose(asked: Asked, device: DeviceInfo) -> Proposal | None:
    """The operator and the mapping's fields of a product that the multistage kernel computes fastest; None for others.

    A semiring that leaves its shape open (the ``operator`` of ``fields``) gets that of the mapping.
    """
    (a, b), fields, sizes, products = asked.operands, asked.fields, asked.sizes, asked.products
    if not applies(a, b, fields, device):
        return None
    given = fields.get("operator")
    if isinstance(given, MMAOp):
        return propose_tf32(asked, device)
    if a.dtype in (F16, BF16) and device.arch[0] == 9:
        is_taken = given is None and products == 1 and _is_skinny(a, b, sizes)
        return _usual(a.dtype, SKINNY, device) if is_taken else None
    # A semiring takes registers of its own: tiles that have none left would spill.
    listed = tuple(one for one in TABLES[a.dtype] if given is None or one.merges)
    if a.dtype == F64:
        listed = _storing(listed, tables.DOUBLES_STORED, asked)
        if tensor_cores(F64, F64, device) is None:                  # the ordinary units' lanes are 8 x 4, or 4 x 8
            listed = tuple(one for one in listed if all(n & n - 1 == 0 for n in one.warp))
    streams = given is None and a.dtype in STREAMING and _are_copied(a, b, fields)
    found = fastest(listed, a, b, sizes, device, products, streams, fields.get("splits"))
    if found is None:
        return None
    best, splits = found
    mapping = dict(best.fields, splits=splits)
    if given is None:
        units = operator(a.dtype, best, device)
        return None if units is None else (units, mapping)
    if a.dtype != F32 or not isinstance(given, FPUOp) or getattr(given, "is_sized", True) or not hasattr(given, "sized"):
        return None
    lanes = dict(M=best.warp[0], N=best.warp[1], MB=best.lanes[0], NB=best.lanes[1])
    units = given.sized(lanes, a.dtype, b.dtype, a.dtype)
    return units, mapping if units.refuses_to_merge is None else best.fields


def _storing(listed: Iterable[Multistage], stored: dict[tuple[int, int, int], tuple[float, float]],
             asked: Asked) -> tuple[Multistage, ...]:
    """The mappings with what storing D costs, whose rows follow each other where there is no out."""
    out, itemsize = asked.infos.get("out"), asked.operands[0].dtype.itemsize
    is_odd = bool(asked.sizes[1] * itemsize % 16 if out is None else alignment(out) % 16)
    return tuple(dataclasses.replace(one, finish=stored[one.block][is_odd] * one.block[0] * one.block[1]) for one in listed)


def propose_tf32(asked: Asked, device: DeviceInfo, most: float = math.inf) -> Proposal | None:
    """The operator and the mapping's fields of float32 operands as tf32, by mma.sync. None where threads do not copy them as
    they are, or where it takes longer than ``most`` ns by the model."""
    found = fastest_tf32(asked, device)
    if found is None or found[2] > most:
        return None
    one, splits, _ = found
    return asked.fields.get("operator") or MMAOp(dtype=F32), dict(one.fields, splits=splits)


def fastest_tf32(asked: Asked, device: DeviceInfo) -> tuple[Multistage, int | StreamK, float] | None:
    """The mapping of float32 operands as tf32, its shares of K, and the ns of a launch by the model."""
    (a, b), sizes, products = asked.operands, asked.sizes, asked.products
    given, of_a, of_b = asked.fields.get("operator") or MMAOp(dtype=F32), asked.infos.get("a"), asked.infos.get("b")
    if not (a.dtype == b.dtype == given.dtype == F32) or not _are_copied(a, b, asked.fields):
        return None
    copied = [of is not None and alignment(of) % 16 > 0 for of in (of_a, of_b)]
    costs = ((one, sum(is_word * across * one.block[2] for is_word, across in zip(copied, one.block))) for one in _TF32)
    listed = (dataclasses.replace(one, step=(round(one.step[0] + tables.TF32_COPIED * words),) * 4,
                                  solo=round(one.solo + tables.TF32_COPIED * words)) for one, words in costs)
    found = fastest(_storing(listed, tables.TF32_STORED, asked), a, b, sizes, device, products, True,
                    asked.fields.get("splits"))
    return found and (*found, found[0].launch(sizes, products, 0, device.sm_count, found[1]))


def of_half(mappings: tuple[Multistage, ...], a: ArrayLayout, b: ArrayLayout, sizes: Sizes, device: DeviceInfo,
            products: int, most: float = math.inf) -> Proposal | None:
    """The same of 16-bit floats by mma.sync among these mappings, wherever wgmma may be had. None where it takes longer than
    ``most`` ns by the model."""
    found = fastest(mappings, a, b, sizes, device, products, may_stream=True)
    if found is None:
        return None
    one, splits = found
    made = _usual(a.dtype, one, device)
    is_slow = made is None or one.launch(sizes, products, 0, device.sm_count, splits) > most
    return None if made is None or is_slow else (made[0], dict(made[1], splits=splits))


def fastest(mappings: tuple[Multistage, ...], a: ArrayLayout, b: ArrayLayout, sizes: Sizes, device: DeviceInfo,
            products: int, may_stream: bool, splits: Any = None) -> tuple[Multistage, int | StreamK] | None:
    """The mapping with the least modelled time, as the device has it, of those that fit a block's shared memory, if any; and
    its shares of K, or ``splits`` where these are given. ``may_stream``: all k-tiles take as long, so that equal numbers of
    them are equal shares."""
    across, sm_count = mn_major_copies(a, b), device.sm_count
    fit = [one for one in (one.on(device) for one in mappings) if one.nbytes <= device.shared_memory_per_block]
    shares = splits if isinstance(splits, int) else None
    found = [(one, shares or one.splits(sizes, products, across, sm_count)) for one in fit]
    best = min(found, key=lambda of: of[0].nanoseconds(sizes, products, across, sm_count, of[1]), default=None)
    if splits is not None:
        return best and (best[0], splits)
    streams = [one for one in fit if one.merges and one.streams and may_stream]
    if best is None or not streams:
        return best
    stream = min(streams, key=lambda one: one.streamed(sizes, products, across, sm_count))
    least = STREAMED_WORTH * best[0].nanoseconds(sizes, products, across, sm_count, best[1])
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
    return all(layout.is_separable and is_untouched(name, fields) for name, layout in (("a", a), ("b", b)))


def _is_skinny(a: ArrayLayout, b: ArrayLayout, sizes: Sizes) -> bool:
    """A few rows of A and columns of B that are contiguous along K: B is all that takes time, and wgmma's 64 rows none of it
    sooner. (Without components of the caller's swap-AB is faster: `gemmkit.tuning.choose`.) Microseconds on an H200, and by
    the warp-specialised kernel, which wider products with more rows stay with:

    | N x K | 1 row | 8 | 16 | 32 |
    |---|---|---|---|---|
    | 4096 x 4096 | 11.6, 29.0 | 13.6, 29.4 | 15.4, 27.1 | 24.0, 21.5 |
    | 4096 x 14336 | 30.8, 89.5 | 37.1, 91.7 | 40.4, 81.1 | 67.3, 62.7 |
    | 14336 x 4096 | 33.6, 35.8 | 38.8, 35.6 | 45.3, 35.2 | 71.6, 33.7 |
    """
    M, N, K = sizes
    rows = 0 < M <= (16 if N <= 8192 else 1)
    return rows and N >= 1024 and K >= 1024 and K % 8 == 0 and a.vector_axis == 1 and b.vector_axis == 0


def _usual(dtype: np.dtype, one: Multistage, device: DeviceInfo) -> Proposal | None:
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


def mn_major_copies(a: ArrayLayout, b: ArrayLayout) -> int:
    """Which operands are copied across on the ordinary units: 1 for A, 2 for B."""
    return (a.contiguous_axis == 1) + 2 * (b.contiguous_axis == 0)


# -- what follows from a mapping --------------------------------------------------------------------------------------

SECTOR = 32                            # bytes of global memory that are loaded together
STAGES = 3


def fill(values: dict[str, Any], sizes: Sizes | None, device: DeviceInfo, products: int = 1) -> None:
    """Complete the tiles, shared layouts and moves of a Config in place; the operator has its shape and dtypes."""
    from gemmkit.kernels.sm80.routes import copies_of

    operator: Operator = values["operator"]
    values.setdefault("stages", stages_on(device))
    given = values.get("block_shape")
    if given is not None and "compute_warp" not in values:
        m, n, _ = operator.shape
        is_fpu = isinstance(units(operator), FPUOp)
        warp = (m, n) if is_fpu else simt.warp_of(given, operator, values.get("warps_per_block"))
        values["compute_warp"] = Tile(M=warp[0], N=warp[1], K=given.size.K)
    laid_out, blocks_given = dict(values), "blocks_per_sm" in values
    _fill_shared(laid_out, operator)
    room = simt.TileBudget.of(device, laid_out, values["stages"])
    simt.fill_tiles(values, operator, sizes, device, products, room)
    block, warp = values["block_shape"], values["compute_warp"]
    if "blocks_per_sm" in values and not blocks_given:
        fit = device.shared_memory_per_sm // room.nbytes(block.extents)
        values["blocks_per_sm"] = copies_of(device).blocks(values["blocks_per_sm"], fit)
    if warp.size.K != block.size.K:
        values["compute_warp"] = Tile(M=warp.size.M, N=warp.size.N, K=block.size.K)
    values.update({**laid_out, **values})
    _fill_moves(values)


def stages_on(device: DeviceInfo) -> int:
    """How many stages a ring has where nothing is said of them."""
    from gemmkit.kernels.sm80.routes import copies_of

    return min(STAGES, copies_of(device).useful_stages)


def _fill_shared(values: dict[str, Any], operator: Operator) -> None:
    if isinstance(operator, BoxMMAOp):
        order = RowMajor if operator.combed == "a" else ColMajor
        values.setdefault(f"shared_{operator.combed}_layout", Boxed(order(operator.dtype), RUN))
    if not isinstance(operator, Algebra) and isinstance(operator, FPUOp):
        for name, fragment, axis in (("a", operator.fragment_a, 0), ("b", operator.fragment_b, 1)):
            if _is_copied(values, name, fragment.dtype) and values[f"global_{name}_layout"].contiguous_axis == 1 - axis:
                # To lie across. Lanes write 32 bytes along K by as many lines as are left of a warp's 128 (or of a
                # half-warp's, where a lane has 16 bytes).
                values.setdefault(f"shared_{name}_layout", Padded((ColMajor, RowMajor)[axis](fragment.dtype), 4))
    if isinstance(operator, Algebra):
        for name, fragment, preferred in (("a", operator.fragment_a, 0), ("b", operator.fragment_b, 1)):
            layout = values[f"global_{name}_layout"]
            axis = preferred if isinstance(units(operator), FPUOp) else layout.vector_axis
            numbers = axis is not None and _padded_numbers(axis, fragment.dtype, axis == (name == "a"))
            if (numbers and layout.is_separable and layout.dtype == fragment.dtype
                    and operator.refuses(name, numbers) is None and f"shared_{name}_layout" not in values):
                values[f"shared_{name}_layout"] = numbers
    simt.fill_shared(values, operator, operator.fragment_c.dtype)


def _padded_numbers(axis: int, dtype: np.dtype, along_k: bool) -> Any:
    """Complex numbers as they are in memory. Of complex128 lanes of DMMA read 64 bytes of two lines along K, and 32 of four
    lines across."""
    if dtype.kind != "c":
        return None
    padding = (64 if along_k else 32) if dtype.itemsize == 16 else 32
    return Padded((ColMajor, RowMajor)[axis](dtype), padding // dtype.itemsize)


def _is_copied(values: dict[str, Any], name: str, dtype: np.dtype) -> bool:
    """Whether cp.async takes an operand as it is, if need be element by element."""
    layout: ArrayLayout = values[f"global_{name}_layout"]
    transform = values.get(f"transform_global_to_shared_{name}")
    return (layout.is_separable and layout.dtype == dtype and dtype.itemsize in SIZES
            and (transform is None or transform.is_identity))


def _fill_moves(values: dict[str, Any]) -> None:
    block = values["block_shape"]
    for name, names in (("a", "MK"), ("b", "KN")):
        layout, shared = values[f"global_{name}_layout"], values[f"shared_{name}_layout"]
        if isinstance(shared, Boxed):                          # eight lanes fill a box's line
            run, line = [1, 1], [4, 4]
            run[shared.axis], line[shared.axis] = RUN, BOX
            values.setdefault(f"mem_{name}_thread", Tile(**dict(zip(names, run))))
            values.setdefault(f"mem_{name}_warp", Tile(**dict(zip(names, line))))
        elif not hasattr(shared, "plane") and _is_copied(values, name, shared.dtype) and layout.vector_axis != shared.axis:
            if f"mem_{name}_thread" not in values and f"mem_{name}_warp" not in values:
                warp, thread = by_element(getattr(block, names), layout, shared)
                values[f"mem_{name}_warp"], values[f"mem_{name}_thread"] = warp, thread
    simt.fill_moves(values)


def by_element(tile: Tile, layout: ArrayLayout, shared: Any) -> tuple[Tile, Tile]:
    """A warp's tile of single elements: along the contiguous axis, by as many lines as there are lanes left; no more than a
    sector where lines of shared memory lie across, or half a sector of each vector of a comb."""
    axis = shared.axis if layout.contiguous_axis is None else layout.contiguous_axis
    sector = SECTOR // layout.dtype.itemsize if layout.comb == 1 else layout.comb * SECTOR // (2 * layout.dtype.itemsize)
    lanes = math.gcd(32 if axis == shared.axis else min(32, sector), tile.extents[axis])
    warp = [math.gcd(32 // lanes, tile.extents[1 - axis])] * 2
    warp[axis] = lanes
    return Tile(**dict(zip(tile.names, warp))), Tile(**dict.fromkeys(tile.names, 1))


# -- rows that TMA does not take, on Hopper ---------------------------------------------------------------------------
#
# What a k-tile takes to be copied depends on how rows begin: at multiples of 16 bytes, of 8 or 4 (cp.async copies words), or
# anywhere: threads load single elements then, and a block's k-tile takes as long as one thread's loads. So does storing D.
#
# The constants here and in `gemmkit.tuning.sm90` were fitted to 804 times of 93 products, f16 on an H200 (choice_*.json of
# commit a48a9ead, 2026-11-24); they are off by 12 % in the mean. Fitted without 20, 26, 21 and 19 of these products, the
# choice by them reaches 0.965, 0.969, 0.924 and 0.972 of the best mapping for those; what was chosen when they were timed
# reached 0.903, 0.894, 0.835 and 0.917.

COPIED = (0.0, 0.01, 0.035, 0.088)     # ns of an element of a k-tile: of rows at vectors, at 8 bytes, at 4, anywhere
LOADED = 33.0                          # ns of each of a thread's single elements of a k-tile
STORED = (0.123, 0.167, 0.167, 0.28)   # ns of an element of D, a wave
UNBROKEN, BROKEN = 64, 0.034           # elements of a line; ns of an element for each line more that they come from


def copied(copies: RowAlignment) -> tuple[Multistage, ...]:
    """The multistage kernel's mappings with what they cost."""
    return tuple(_copied(copies, one) for one in GATHERED)


def _copied(copies: RowAlignment, one: Multistage) -> Multistage:
    m, n, k = one.block
    copying, single = 0.0, 0
    for layout, k_axis, across, of in zip(copies.layouts, (1, 0), (m, n), copies.kinds):
        run = k if layout.axis == k_axis else across
        copying += across * k * (COPIED[of] + BROKEN * max(0.0, UNBROKEN / run - 1))
        single += across * k if of == ELEMENTS else 0
    threads = 32 * (m // one.warp[0]) * (n // one.warp[1])
    alone = one.solo + max(copying, LOADED * single / threads)
    return dataclasses.replace(one, step=(round(one.step[0] + copying),) * 4, solo=round(alone),
                               finish=STORED[copies.of_d] * m * n)


# -- boxes of K -------------------------------------------------------------------------------------------------------
#
# Contractions of 16-bit floats whose A and B are contiguous along different indices of K, by boxes (`operators.BoxMMAOp`).
#
# On Hopper the other way is the producer warps': they load one operand through registers, and transpose it there. The
# multistage kernel copies both as they lie, 16 bytes at a time, and multiplies by mma.sync. Microseconds on an H200
# (2026-11-24, f16, TCCG's three cases; the other way, this one by tiles of 128x256, of 128x192, torch.einsum):
#
# | M x N x K | | | | |
# |---|---|---|---|---|
# | ijkl-minj-nlmk, 6048 x 7056 x 5184 | 4962 | 2163 | 2378 | 1060 |
# | ijkl-minl-njmk, 6048 x 7056 x 5184 | 4953 | 2168 | 2397 | 981 |
# | ij-kil-lkj, 360 x 372 x 129600, 22 shares of K (16: 323) | 1047 | 464 | 408 | 417 |
#
# What a k-tile takes is proportional to its pieces of 16 bytes, each a request to the L2: 0.69 a cycle and multiprocessor,
# for tiles of 128x256, 256x128, 128x192 and two blocks of 128x128 alike. (128x256 takes the same time with four stages,
# streamed, and in other orders of tiles; 128x128 takes 699 us of the third case in 29 shares, 495 in 14.) The first two
# steps of the table were measured so, the others follow from the number of their pieces. K has no more than 16 shares: the
# third case takes 332 us in 14, 323 in 16, 435 in 22, 497 in 44.
#
# A short K and few rows or columns stay with the other way (p and q are K's indices, one unit-stride in each operand):
#
# | M x N x p q | the other way | this one | torch.einsum |
# |---|---|---|---|
# | 64 x 64 x 16 24 | 4.2 | 5.9 | 4.3 |
# | 512 x 512 x 16 24 | 6.7 | 6.3 | 5.3 |
# | 2048 x 2048 x 16 24 | 19.0 | 22.3 | 10.8 |
# | 16 x 4096 x 64 72 | 28.5 | 36.8 | 11.9 |
# | 128 x 128 x 64 72 | 18.2 | 9.3 | 9.9 |
# | 512 x 512 x 64 72 | 45.7 | 27.4 | 20.3 |
# | 4096 x 64 x 64 72 | 128.3 | 36.0 | 92.5 |
# | 2048 x 2048 x 64 72 | 298.3 | 168.4 | 93.0 |

PIECE = 16                             # bytes that are copied together
SHORTEST, NARROWEST = 1024, 64         # along K; rows and columns of D
MOST_SHARES = 16                       # of K


def propose_boxes(asked: Asked, device: DeviceInfo) -> Proposal | None:
    """The operator and the mapping's fields; None for other products."""
    (a, b), infos, fields, sizes = asked.operands, asked.infos, asked.fields, asked.sizes
    if device.arch < (8, 0) or fields.get("operator") is not None or set(fields) & MAPPING_FIELDS:
        return None
    if min(sizes[:2]) < NARROWEST or sizes[2] < SHORTEST:
        return None
    if not all(is_untouched(name, fields) for name in "ab"):
        return None
    combed = combed_operand(a, b, infos)
    if combed is None:
        return None
    found = fastest(BOXES, a, b, sizes, device, asked.products, may_stream=True)
    if found is None:
        return None
    one, splits = found
    if isinstance(splits, int) and splits > MOST_SHARES:
        splits = MOST_SHARES
    return BoxMMAOp(N=16, dtype=a.dtype, combed=combed), dict(one.fields, splits=splits)


def combed_operand(a: ArrayLayout, b: ArrayLayout, infos: Infos) -> str | None:
    """Which operand is the combed one; None unless the other has its neighbours along K, both in pieces of 16 bytes."""
    if a.dtype != b.dtype or a.dtype not in SIXTEEN:
        return None
    layouts, k_axes = {"a": a, "b": b}, {"a": 1, "b": 0}
    for name, other in ("ab", "ba"):
        if (_is_combed(layouts[name], infos[name], k_axes[name])
                and _is_along(layouts[other], infos[other], k_axes[other])):
            return name
    return None


def _is_combed(layout: ArrayLayout, info: ArrayInfo | None, k_axis: int) -> bool:
    return (isinstance(layout, Matricised) and layout.is_separable and layout.axis == k_axis and layout.comb == RUN
            and layout.vector % RUN == 0 and _is_aligned(layout, info))


def _is_along(layout: ArrayLayout, info: ArrayInfo | None, k_axis: int) -> bool:
    return (layout.is_separable and layout.vector_axis == k_axis and layout.neighbours % RUN == 0
            and _is_aligned(layout, info))


def _is_aligned(layout: Any, info: ArrayInfo | None) -> bool:
    return info is not None and unit_axis(info) == getattr(layout, "unit", layout.axis) and alignment(info) >= PIECE
