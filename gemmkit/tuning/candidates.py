"""Mappings to try for a product: of every kernel family, each with its modelled time, as plain data that a file can keep.

A `Candidate` is what the tables (`gemmkit.tuning.tables`) have one of, and what a store of tuned
mappings (`gemmkit.tuning.store`) keeps: a tile, how warps share it, and how blocks share the product. All else of a
configuration follows from it by `get_config`, which refuses what is not legal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from gemmkit.epilogues import Epilogue
from gemmkit.kernels.collectives.operand import OperandArrays
from gemmkit.kernels.collectives.scheduler import Grouped, Hilbert
from gemmkit.kernels.collectives.split_k import StreamK
from gemmkit.kernels.quantised import parts_of, refusal
from gemmkit.kernels.sm90.dequantised import shares_scales
from gemmkit.lang.number_rules import part_dtypes
from gemmkit.layouts import ArrayLayout, GroupQuantised, Plain, RowMajor
from gemmkit.layouts.quantised import E4M3
from gemmkit.operators import Algebra, BoxMMAOp, FPUOp, MMAOp, Operator
from gemmkit.operators.base import units
from gemmkit.operators.mma import BF16, F16, QuantisedMMAOp
from gemmkit.operators.wgmma import WGMMAOp
from gemmkit.runtime.array_info import ArrayInfo, alignment
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tiling import Tile
from gemmkit.tuning import simt, sm80, sm90, tables
from gemmkit.tuning.model import (
    CLOCK,
    ELEMENTS,
    LINE,
    VECTORS,
    WORDS,
    Asked,
    CostedTile,
    Proposal,
    RowAlignment,
    Sizes,
    by_workspace,
    fastest,
    is_copied,
)
from gemmkit.tuning.operators import EIGHT, SIXTEEN, accumulator_for, algebra_of, operator_for
from gemmkit.tuning.sm80 import copied, of_half
from gemmkit.tuning.sm90 import MAPPING_FIELDS, can_share, is_unaligned, is_untouched
from gemmkit.tuning.store import is_as_new


@dataclass(frozen=True)
class Candidate:
    """A mapping.

    ``kernel`` is the family's name; ``block`` (M, N, K) a block's tile, K in elements; ``warp`` (M, N) a warp's, ``lanes``
    (MB, NB) a thread's part on the ordinary units, both None where the operator says it. ``splits`` is a number of shares of
    K, or "stream". The others are fields of a `Config`; None leaves one to its default. ``nanoseconds`` is what the tables'
    model says, by which candidates are ordered; it decides nothing else.
    """

    kernel: str
    block: tuple[int, int, int]
    warp: tuple[int, int] | None = None
    lanes: tuple[int, int] | None = None
    stages: int | None = None
    blocks_per_sm: int | None = None
    splits: int | str = 1
    schedule: str | None = None
    warps: int | None = None
    cluster: tuple[int, int] = (1, 1)
    producer_warps: int | None = None
    group: int | None = None                   # of the order: rows of a group, 0 for the Hilbert curve
    boxed: str | None = None                   # the combed operand, "a" or "b", of a product in boxes of K
    nanoseconds: float = dataclasses.field(default=0.0, compare=False)

    @property
    def name(self) -> str:
        """A short name.

        >>> Candidate("multistage", (128, 128, 16), (64, 32), (8, 4), 3, 2).name
        'multistage 128x128x16, warps of 64x32, 3 stages, 2 a multiprocessor'
        """
        order = None if self.group is None else f"groups of {self.group}" if self.group else "Hilbert"
        shares = "streamed K" if self.splits == "stream" else f"{self.splits} shares of K" if self.splits != 1 else None
        parts = (
            self.warp and f"warps of {_by(self.warp)}", self.schedule, self.warps and f"{self.warps} warps",
            self.cluster != (1, 1) and f"clusters of {_by(self.cluster)}", self.stages and f"{self.stages} stages",
            self.blocks_per_sm and f"{self.blocks_per_sm} a multiprocessor", shares, order,
            self.boxed and f"boxes of {self.boxed}")
        return ", ".join([f"{self.kernel} {_by(self.block)}", *(part for part in parts if part)])

    def fields(self) -> dict[str, Any]:
        """The fields of a `Config`, but for the operator."""
        m, n, k = self.block
        found: dict[str, Any] = dict(
            kernel=self.kernel, block_shape=Tile(M=m, N=n, K=k), stages=self.stages, blocks_per_sm=self.blocks_per_sm,
            splits=StreamK() if self.splits == "stream" else self.splits, schedule=self.schedule, warps_per_block=self.warps,
            producer_warps=self.producer_warps)
        if self.warp is not None:
            found["compute_warp"] = Tile(M=self.warp[0], N=self.warp[1], K=k)
            found["warps_per_block"] = m // self.warp[0] * (n // self.warp[1])
        if self.kernel == "warp_specialised":
            found["cluster"] = Tile(M=self.cluster[0], N=self.cluster[1])
        if self.group is not None:
            found["order"] = Grouped(self.group) if self.group else Hilbert()
        return {name: value for name, value in found.items() if value is not None}

    def operator(self, a: np.dtype, b: np.dtype, given: Operator | None, device: DeviceInfo) -> Operator | None:
        """What multiplies in the mapping's tiles: the caller's operator where it says its shape; None where the default
        does."""
        if given is not None and getattr(given, "is_sized", True):
            return given
        if self.boxed is not None and a in SIXTEEN:
            return BoxMMAOp(N=16, dtype=a, combed=self.boxed)
        algebra = given if isinstance(given, Algebra) else algebra_of(a) if given is None and a == b else None
        if self.kernel == "warp_specialised":
            base = WGMMAOp(self.block[1], dtype=part_dtypes(a)[0])
            return base if algebra is None else algebra.with_base(base)
        if self.lanes is not None and self.warp is not None and given is not None and hasattr(given, "sized"):
            shape = dict(M=self.warp[0], N=self.warp[1], MB=self.lanes[0], NB=self.lanes[1])
            sized: Operator = given.sized(shape, a, b, accumulator_for(a, b))
            return sized
        if given is not None or (self.kernel == "singlestage" and self.lanes is None):
            return given
        if self.kernel == "multistage" and a == b and self.warp is not None and a in sm80.TABLES:
            return sm80.operator(a, self._multistage(), device)
        if self.lanes is None or self.warp is None:
            return None
        return FPUOp(M=self.warp[0], N=self.warp[1], MB=self.lanes[0], NB=self.lanes[1], dtype=a, b_dtype=b,
                     accumulator=accumulator_for(a, b))

    def _multistage(self) -> sm80.Multistage:
        assert self.warp is not None
        return sm80.Multistage(self.block, self.warp, self.stages or 2, self.blocks_per_sm or 1, (0,) * 4,
                                              solo=0, start=0, lanes=self.lanes or (4, 8))

    def proposal(self, asked: Asked, device: DeviceInfo) -> Proposal:
        """The operator and the fields for a product."""
        a, b = asked.operands
        return self.operator(a.dtype, b.dtype, asked.fields.get("operator"), device), self.fields()

    # -- in files

    def plain(self) -> dict[str, Any]:
        """Numbers, texts and lists."""
        held = ((name, value) for name, value in dataclasses.asdict(self).items() if name in _NAMES and value is not None)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in held}

    @classmethod
    def of_plain(cls, plain: Any) -> Candidate:
        """What `plain` made it of; raises ValueError for anything else.

        >>> one = Candidate("singlestage", (64, 64, 32), (32, 32))
        >>> Candidate.of_plain(one.plain()) == one
        True
        """
        if not isinstance(plain, dict):
            raise ValueError(f"{plain!r} is not a mapping")
        held = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
        kinds: dict[str, Any] = {"kernel": str, "schedule": str, "boxed": str, "splits": (int, str), "block": 3, "warp": 2,
                                 "lanes": 2, "cluster": 2}
        for name, value in held.items():
            kind = kinds.get(name, int)
            fits = (isinstance(value, tuple) and len(value) == kind and all(type(n) is int for n in value)
                    if isinstance(kind, int) else isinstance(value, kind) and not isinstance(value, bool))
            if name not in _NAMES or not fits:
                raise ValueError(f"{plain!r} is not a mapping: {name}={value!r}")
        if held.get("boxed", "a") not in ("a", "b"):
            raise ValueError(f"{plain!r} is not a mapping: boxed is 'a' or 'b'")
        if not {"kernel", "block"} <= set(held):
            raise ValueError(f"{plain!r} is not a mapping: kernel and block are needed")
        return cls(**cast(Any, held))


_NAMES = {field.name for field in dataclasses.fields(Candidate)} - {"nanoseconds"}


def _by(extents: tuple[int, ...]) -> str:
    return "x".join(map(str, extents))


# -- which are tried --------------------------------------------------------------------------------------------------

CLUSTERS = (1, 1), (2, 1), (1, 2), (2, 2)
GROUPS = 8, 16, 0
DEPTHS = 1, 2                          # lines of 128 bytes of K in a stage
ANOTHER = 0.15                         # of the modelled time, for each mapping before it with the same tile and shares
UNUSUAL = 0.04                         # of the modelled time, for each field that is not the tables': other tiles come first


def candidates(a: ArrayLayout, b: ArrayLayout, given: Operator | None, sizes: Sizes, device: DeviceInfo,
               products: int = 1, infos: tuple[ArrayInfo | None, ArrayInfo | None] = (None, None)) -> list[Candidate]:
    """Mappings for a product of these operands, of all families, each once: the best of each family as the tables model it,
    then the others in the order of their modelled time. ``infos`` are the operands' arrays; None: rows are aligned.

    What a kernel refuses is among them: `get_config` says why.
    """
    families = [_diverse(found) for found in modelled(a, b, given, sizes, device, products, infos)]
    first = [one for family in families for one in family[:1]]
    return first + sorted((one for family in families for one in family[1:]), key=_modelled)


def modelled(a: ArrayLayout, b: ArrayLayout, given: Operator | None, sizes: Sizes, device: DeviceInfo, products: int = 1,
             infos: tuple[ArrayInfo | None, ArrayInfo | None] = (None, None)) -> list[dict[Candidate, None]]:
    """The mappings of each family as the tables model them, each once."""
    return [dict.fromkeys(found) for found in (
        _warp_specialised(a, b, given, sizes, device, products, infos),
        _multistage(a, b, given, sizes, device, products, infos),
        _singlestage(a, b, given, sizes, device, products))]


def _modelled(candidate: Candidate) -> float:
    return candidate.nanoseconds


def _diverse(found: Iterable[Candidate]) -> list[Candidate]:
    """By their modelled time, to which each further mapping with the same tile and shares adds `ANOTHER` of it: the model
    tells tiles apart to some 15 %, so that another tile is the better guess than another order of the same."""
    of: Counter[tuple] = Counter()
    ranked = []
    for one in sorted(found, key=_modelled):
        tile = one.block[:2], one.splits
        ranked.append(dataclasses.replace(one, nanoseconds=one.nanoseconds * (1 + ANOTHER * of[tile])))
        of[tile] += 1
    return sorted(ranked, key=_modelled)


def _warp_specialised(a: ArrayLayout, b: ArrayLayout, given: Operator | None, sizes: Sizes, device: DeviceInfo,
                      products: int, infos: tuple[ArrayInfo | None, ArrayInfo | None]) -> Iterator[Candidate]:
    parts = part_dtypes(a.dtype)
    is_ours = given is None or isinstance(given, Algebra)
    if device.arch[0] != 9 or a.dtype != b.dtype:
        return
    if isinstance(given, WGMMAOp):
        widths: Any = {given.N}
    elif is_ours and parts[0] in SIXTEEN:
        widths = None
    else:
        return
    itemsize = parts[0].itemsize * len(parts)
    table = sm90.BY_TMA if given is not None else sm90.table_for(a, b, *infos, {}, sizes)
    supply = table.supply_of(*infos)
    shared = by_workspace(sizes, device, products, table.workspace, table.least_shared)
    beside = (dataclasses.replace(one, cluster=(1, 1)) for one in (*table.aligned, *table.clustered))
    tiles = list(dict.fromkeys((*table.mappings, *table.small, *shared, *beside, *(EXTRA if table.tries_more else ()))))
    if widths is not None and not any(one.N in widths for one in tiles):
        tiles = [dataclasses.replace(one, N=width) for one in sm90.MAPPINGS for width in widths]
    least = max(1, sizes[0]), max(1, sizes[1]), max(1, sizes[2])
    for one in (*table.streamed, *table.streamed_clustered) if len(parts) == 1 else ():
        if (widths is None or one.N in widths) and (a.dtype not in SIXTEEN or can_share([one], a, b)):
            cost = one.cycles(least, device, itemsize, supply, products)
            if cost < math.inf:                        # something is streamed
                yield Candidate("warp_specialised", (one.M, one.N, 128 // parts[0].itemsize), splits="stream",
                                schedule=one.schedule, warps=one.warps, cluster=one.cluster,
                                producer_warps=one.producer_warps, group=8, nanoseconds=cost / CLOCK)
    for one in tiles:
        if widths is not None and one.N not in widths:
            continue
        for cluster, group, depth in itertools.product(CLUSTERS if one.splits == 1 else (one.cluster,), GROUPS, DEPTHS):
            tried = dataclasses.replace(one, cluster=cluster)
            if a.dtype in SIXTEEN and not can_share([tried], a, b):
                continue
            cost = tried.cycles(least, device, itemsize, supply, products)
            usual = (cluster == (1, 1) or supply is not None) + (group == 8) + (depth == 1)
            yield Candidate("warp_specialised", (one.M, one.N, depth * 128 // parts[0].itemsize), splits=one.shares,
                            schedule=one.schedule, warps=one.warps, cluster=tried.cluster, producer_warps=one.producer_warps,
                            group=group, nanoseconds=cost / CLOCK * (1 + UNUSUAL * (3 - usual)))


#: Beside the tables' for operands by TMA.
EXTRA = sm90.mappings_of(tables.EXTRA)


def _multistage(a: ArrayLayout, b: ArrayLayout, given: Operator | None, sizes: Sizes, device: DeviceInfo, products: int,
                infos: tuple[ArrayInfo | None, ArrayInfo | None]) -> Iterator[Candidate]:
    table = sm80.TABLES.get(a.dtype, ()) if a.dtype == b.dtype else ()
    if given is not None and (getattr(given, "is_sized", True) or isinstance(given, Algebra)):
        return
    if a.dtype in SIXTEEN:
        of_a, of_b = infos
        if (device.arch[0] == 9 and isinstance(a, Plain) and isinstance(b, Plain) and of_a is not None and of_b is not None
                and is_copied(of_a, of_b)):
            table = sm80.copied(RowAlignment.of(a, b, of_a, of_b, None, sizes[1]))
        else:
            table = (*table, sm80.SKINNY)
    boxed = None if given is not None else sm80.combed_operand(a, b, dict(zip("ab", infos)))
    if boxed is not None:
        table = sm80.BOXES
    M, N, K = (max(1, size) for size in sizes)
    across = sm80.mn_major_copies(a, b)
    for one in table:
        lanes = one.lanes if a.dtype.itemsize in (4, 8) else None
        for stages in sorted({one.stages, max(2, one.stages - 1), one.stages + 1}):
            for blocks in {one.blocks, max(1, one.blocks - 1)}:
                tried = dataclasses.replace(one, stages=stages, blocks=blocks)
                k_tiles = -(-K // one.block[2])
                shares: list[int | str] = [n for n in (1, 2, 3, 4, 6, 8, 16) if n == 1 or (one.merges and 4 * n <= k_tiles)]
                if one.merges and one.streams:
                    shares.append("stream")
                for splits in shares:
                    cost = (tried.streamed((M, N, K), products, across, device.sm_count) if splits == "stream"
                            else tried.nanoseconds((M, N, K), products, across, device.sm_count, int(splits)))
                    unusual = (stages != one.stages) + (blocks != one.blocks)
                    yield Candidate("multistage", one.block, one.warp, lanes, stages, blocks, splits, boxed=boxed,
                                    nanoseconds=cost * (1 + UNUSUAL * unusual))


def _singlestage(a: ArrayLayout, b: ArrayLayout, given: Operator | None, sizes: Sizes, device: DeviceInfo,
                 products: int) -> Iterator[Candidate]:
    operator = operator_for(a.dtype, b.dtype, sizes, device, products) if given is None else given
    if not getattr(operator, "is_sized", True) or operator.threads == 128:
        return
    M, N, K = (max(1, size) for size in sizes)
    for each, lanes in _units(operator, given):
        for block, warp, blocks in simt.candidates(each):
            for splits in (1, 2, 4, 8) if device.arch >= (9, 0) and isinstance(each, (FPUOp, MMAOp)) else (1,):
                if splits > 1 and K < 16 * splits * block[2]:
                    continue
                tiles = -(-M // block[0]) * -(-N // block[1]) * products * splits
                waves = -(-tiles // (blocks * device.sm_count))
                cost = waves * blocks * (block[0] + 24) * (block[1] + 24) * K / splits / 400
                yield Candidate("singlestage", block, warp, lanes, blocks_per_sm=blocks, splits=splits, nanoseconds=cost)


def _units(operator: Operator, given: Operator | None) -> Iterator[tuple[Operator, tuple[int, int] | None]]:
    """The operator, or on the ordinary units those of every shape, with a thread's part, where the caller gave none."""
    if given is not None or type(operator) is not FPUOp:
        yield operator, None
        return
    widest = max(fragment.dtype.itemsize for fragment in (operator.fragment_a, operator.fragment_b, operator.fragment_c))
    for (m, n), lanes in tables.LANES.items():
        if m * n * widest <= 64 * 32 * 4:
            yield dataclasses.replace(operator, M=m, N=n, MB=lanes[0], NB=lanes[1]), lanes


# -- in the emulator --------------------------------------------------------------------------------------------------
#
# A thread costs the emulator about a millisecond, and each k-step its loads. How large its part of a tile is hardly matters,
# because NumPy computes it. So few threads with large parts are quick, in tiles no larger than the problem: f32 64 x 64 x 64
# takes 1.3 s by two warps, and 7.7 s by the GPU's four blocks of four warps. There are two warps because one alone would
# hide what a component of the caller's gets wrong between warps.

LANES = 4, 8                           # of a warp on the ordinary units
LEAST_TILE, MOST_TILE = (8, 16, 8), (64, 64, 16)                 # M, N, K of a block of warps
MOST_OF_HOPPER = 128, 256              # rows and columns of a tile by wgmma


def small_candidates(asked: Asked, config: Any) -> Iterator[Candidate]:
    """Mappings by a configuration's kernel and operator that are quickly emulated, the first one preferred; none where the
    caller named a part of the mapping."""
    given = asked.fields.get("operator")
    is_sized = given is not None and getattr(given, "is_sized", True)
    if set(asked.fields) & _OF_MAPPINGS or (is_sized and not isinstance(given, FPUOp)):
        return
    sizes = tuple(1 << (max(1, size) - 1).bit_length() for size in asked.sizes)
    whole, base = config.operator, units(config.operator)
    parts = getattr(whole, "parts", 1)
    if whole.threads == 128:
        m, n = (max(least, min(most // share, size)) for least, most, size, share in
                zip((64, 32), MOST_OF_HOPPER, sizes, (1, parts)))
        depth = 128 // base.dtype.itemsize
        while n >= 32:
            yield Candidate("warp_specialised", (m, n, depth), schedule="cooperative", warps=m // 16)
            n //= 2
        return
    if config.kernel not in ("multistage", "singlestage"):
        return
    is_fpu = whole is base and isinstance(base, FPUOp) and not is_sized        # (an algebra chooses its base's lanes)
    shape = (*LANES, base.shape[2]) if is_fpu else whole.shape
    if is_sized:                       # its fragments are moved one by one: as few of them as there can be
        sizes = tuple(-(-size // unit) * unit for size, unit in zip(asked.sizes, shape))
    m, n, k = (math.lcm(max(least, min(most, size)), unit)
               for least, most, size, unit in zip(LEAST_TILE, MOST_TILE, sizes, shape))
    stages = config.stages if config.kernel == "multistage" else None
    for _ in range(3):
        if m % (2 * shape[0]) == 0:
            block, warp = (m, n, k), (m // 2, n)
        elif is_sized:
            block, warp = (m, n, k), (shape[0], n)
        else:
            block, warp = (m, max(n, 2 * shape[1]), k), (m, max(n // 2, shape[1]))
        yield Candidate(config.kernel, block, warp, LANES if is_fpu else None, stages=stages, blocks_per_sm=1)
        m, n = max(m // 2, shape[0]), max(n // 2, shape[1])            # of less shared memory


#: Fields by which a caller names a part of a mapping.
_OF_MAPPINGS = sm90.MAPPING_FIELDS | {"splits", "stages", "schedule", "cluster", "order", "producer_warps"}


# --------------------------------------------------------------------------------------------------
# Products on Hopper that other kernels than its own compute: rows that TMA cannot take, and packed integers.

# -- rows that TMA cannot take ----------------------------------------------------------------------------------------
#
# Products of 16-bit floats on Hopper whose rows TMA cannot take, by other kernels than Hopper's.
#
# There the producer's threads load such rows, and a k-tile takes them longer than the tensor cores. Where there is one
# k-tile, nothing is hidden behind anything, and the kernel that does least besides is the fastest. Where rows begin at
# multiples of 4 bytes, cp.async copies so many at a time, and several blocks a multiprocessor hide what one cannot: the
# multistage kernel is the fastest by the mapping that `copied` finds, unless D is so large, and K so short, that TMA's
# stores of its rows are most of the work: Hopper's producer is hidden behind these. Where rows begin anywhere, the models of
# both kernels are compared. Half of what Hopper's kernel multiplies is unused where D is half as wide as its tile: smaller
# tiles stream K, where they are fewer than multiprocessors. Microseconds on an H200 (2026-11-23 and 24, f16; Hopper's
# kernel, this choice, cuBLAS):
#
# | product | | | |
# |---|---|---|---|
# | 14x1447x55 tt | 3.9 | 2.3 singlestage | 2.4 |
# | 384x34x17 nt | 2.9 | 2.4 | 2.5 |
# | 192x218x29 nt | 3.4 | 2.5 | 2.6 |
# | 648x5649x11 nn | 14.5 | 10.8 | 8.6 |
# | 500x500x500 nn | 12.4 | 5.7 multistage | 8.0 |
# | 480x1344x356 nt | 11.5 | 8.5 | 9.6 |
# | 192x18x256 nn | 4.0 | 2.5 | 3.4 |
# | 32x216x82 nt | 3.0 | 2.5 | 2.7 |
# | 160x384x1542 nt | 8.3 | 6.9 in 4 shares | 10.8 |
# | 11898x683x514 tt | 102.7 | 81.0 streamed | 96.6 |
# | 320x11264x1258 nt | 92.4 | 54.6 | 51.4 |
# | 98x11480x7441 tn | 240.7 | 79.1 streamed | 123.8 |
# | 270x8x3584 tt | 10.3 | 5.8 in 6 shares | 7.0 |
# | 3001x201x6001 nt | 328.1 | 126.6 streamed | 91.9 |
# | 36x256x389 nn | 5.6 | 4.5 | 5.3 |
# | 4299x64x3328 tn | 35.9 | 23.7 streamed | 31.6 |
# | 2964x64x3167 nt | 34.6 | 25.7 | 23.5 |
#
# 1824x4353x1 (20.5, 21.6), 64x51x289 (5.7, 5.9), 333x777x1555 (20.6, 21.1), 3840x6088x78 (39.2, 44.8) and 384x6496x742
# (20.8, 22.3) are Hopper's kernel's.

SHORT = Candidate("singlestage", (32, 32, 64), (16, 16), blocks_per_sm=4)
MOST_BLOCKS = 32                       # of that a multiprocessor: larger tiles store more of D at a time
LEAST = 32                             # along K: half of a k-tile
WIDE = 2**21                           # elements of a D that Hopper's kernel stores by TMA:
HIDDEN = 128, 768                      # the longest K of which is hidden behind that: with both operands copied, with one
WIDEST = 2**24                         # of so many any K, where rows begin at 4 bytes
WORTH = 0.85                           # of the other kernel's modelled time: what taking one in place of the usual comes to
MOST_SHARED = 5                        # shares of K of Hopper's kernel in that: of more the model promises too much
SIDE = 64                              # of a tile of the multistage kernel's
STREAMED = Candidate("multistage", (SIDE, SIDE, 64), (32, 32), stages=3, blocks_per_sm=4, splits="stream")
LONGEST = 2048                         # along K: above it few tiles are streamed,
FEWEST = 32                            # if they keep the multiprocessors busy


def propose_gathered(asked: Asked, device: DeviceInfo) -> Proposal | None:
    """The operator (None: the default one) and the fields of the mapping; None for what stays with Hopper's kernel."""
    (a, b), infos, fields, (M, N, K) = asked.operands, asked.infos, asked.fields, asked.sizes
    products = asked.products
    if device.arch[0] != 9 or a.dtype != b.dtype or a.dtype not in SIXTEEN or 0 in (*asked.sizes, products):
        return None
    if fields.get("operator") is not None or set(fields) & MAPPING_FIELDS or not _are_plain(a, b, fields):
        return None
    of_a, of_b = infos["a"], infos["b"]
    assert of_a is not None and of_b is not None and isinstance(a, Plain) and isinstance(b, Plain)
    by_tma = [why_not(of, layout.axis) is None for of, layout in ((of_a, a), (of_b, b))]
    if all(by_tma):
        return None
    copies = RowAlignment.of(a, b, of_a, of_b, infos["out"], N)
    worst = max(copies.kinds)
    is_stored = copies.of_d == VECTORS and products * M * N >= WIDE
    is_hidden = is_stored and (K <= HIDDEN[any(by_tma)] or (products * M * N >= WIDEST and worst == WORDS))
    if K >= LEAST and worst != ELEMENTS and not is_hidden:
        most = nanoseconds_of_hoppers(copies, asked, device, MOST_SHARED) / WORTH
        return of_half(copied(copies), a, b, asked.sizes, device, products, most)
    tiles = -(-M // SIDE) * -(-N // SIDE) * products
    blocks = -(-M // SHORT.block[0]) * -(-N // SHORT.block[1]) * products
    if K <= SHORT.block[2] and blocks <= MOST_BLOCKS * device.sm_count:
        return SHORT.proposal(asked, device)
    if min(M, N) <= SIDE and FEWEST <= tiles <= device.sm_count and K > LONGEST:
        return STREAMED.proposal(asked, device)
    if worst == ELEMENTS and K > SHORT.block[2]:
        most = WORTH * nanoseconds_of_hoppers(copies, asked, device)
        return of_half(copied(copies), a, b, asked.sizes, device, products, most)
    return None


def nanoseconds_of_hoppers(copies: RowAlignment, asked: Asked, device: DeviceInfo, most_shares: float = math.inf) -> float:
    """The least modelled time of Hopper's kernel, with so many shares of K at most."""
    listed = copies.hoppers(sm90.BY_ELEMENTS, asked.sizes, device, asked.products)
    found = (one for one in listed if one.shares <= most_shares)
    return min(one.cycles(asked.sizes, device, 2, None, asked.products) for one in found) / CLOCK


def _are_plain(a: ArrayLayout, b: ArrayLayout, fields: dict[str, Any]) -> bool:
    return all(isinstance(layout, Plain) and layout.is_plain and is_untouched(name, fields)
               for name, layout in (("a", a), ("b", b)))


# -- narrow operands, by Hopper's kernel ---------------------------------------------------------------------------------

@dataclass(frozen=True)
class Narrow:
    """What multiplies 8-bit operands, or float32 as tf32, and the mapping with the least modelled time."""

    operator: WGMMAOp
    mapping: CostedTile
    nanoseconds: float

    @property
    def fields(self) -> dict[str, Any]:
        """The operator and the mapping as fields of a Config."""
        block = Tile(M=self.mapping.M, N=self.mapping.N, K=self.mapping.depth // self.operator.dtype.itemsize)
        return dict(self.mapping.fields, operator=self.operator, block_shape=block)


def narrow(asked: Asked, device: DeviceInfo, promote: bool = True) -> Narrow | None:
    """The operator and the mapping of a product of 8-bit operands, or of float32 as tf32; None where Hopper's kernel is not
    the one to take. Sums of float8 are promoted to float32 unless ``promote`` is False or K has one portion. Raises
    ConfigError where the kernel does not take what is given."""
    (a, b), infos, fields, products = asked.operands, asked.infos, asked.fields, asked.products
    sizes = tuple(max(1, size) for size in asked.sizes)
    epilogue = fields.get("epilogue")
    stores_blocks = isinstance(epilogue, Epilogue) and epilogue.stores_blocks
    if device.arch[0] != 9 or stores_blocks or set(fields) & MAPPING_FIELDS:
        return None
    size, is_promoted = a.dtype.itemsize, promote and a.dtype in EIGHT and asked.sizes[2] > sm90.PROMOTION
    made = WGMMAOp(sm90.LIKELY.N, dtype=a.dtype, b_dtype=b.dtype, promote=sm90.PROMOTION if is_promoted else 0)
    of_a, of_b = infos["a"], infos["b"]
    given = dict(fields, operator=made, global_a_layout=a, global_b_layout=b)
    arrays = None if of_a is None or of_b is None else OperandArrays(of_a, of_b, None, *asked.sizes)
    table, listed = sm90.narrow_mappings(made, given, asked.sizes, device, products, arrays)
    supply = table.supply_of(of_a, of_b) if size == 1 else None
    if supply is not None:
        listed += can_share(table.clustered, a, b)
    if is_promoted:
        piece, is_aligned = _piece(asked), supply is None
        if not is_aligned:                             # it is in what these take
            listed, supply = tuple(one for one in UNALIGNED_PROMOTED if one.N % (piece * one.within) == 0), None
        listed += _fitted(sizes[1], piece, is_aligned)
    mapping = fastest(asked.sizes, device, itemsize=size, mappings=listed, supply=supply, products=products)
    cycles = mapping.cycles(sizes, device, size, supply, products)                      # type: ignore[arg-type]
    return Narrow(dataclasses.replace(made, N=mapping.N), mapping, cycles / CLOCK)


def _unaligned(M: int, N: int, schedule: str, warps: int, cluster: tuple[int, int], step: float,
               shares: int = 1) -> CostedTile:
    """A tile of float8 whose sums are promoted, of rows that begin between lines of the L2."""
    fixed, each, of_share = tables.UNALIGNED_EXCHANGE
    exchange = fixed + each * M * N + of_share * shares if shares > 1 else 0
    return CostedTile(M, N, schedule, warps, cluster, step, exchange, tables.UNALIGNED_START, splits=shares)


UNALIGNED_PROMOTED = tuple(_unaligned(M, N, schedule, warps, cluster, step, shares)
                           for M, N, schedule, warps, cluster, step, listed in tables.UNALIGNED_PROMOTED
                           for shares in listed)


def _fitted(columns: int, piece: int, is_aligned: bool) -> tuple[CostedTile, ...]:
    """Tiles as wide as a product of a few columns, in steps of ``piece`` columns, whose sums of float8 are promoted."""
    width = -(-columns // piece) * piece
    if not 0 < width <= tables.PROMOTED_WIDEST:
        return ()
    if is_aligned:
        return tuple(CostedTile(M, width, schedule, warps, (1, 1), fixed + each * width, 3500, 0)
                     for M, schedule, warps, fixed, each in tables.PROMOTED_FITTED)
    return tuple(_unaligned(M, width, schedule, warps, (1, 1), fixed + each * width)
                 for M, schedule, warps, fixed, each in tables.UNALIGNED_FITTED)


def _piece(asked: Asked) -> int:
    """Of how many columns a tile's, or those that a block of a cluster finishes, are a multiple: the narrowest lines of D in
    shared memory, or eight where these lie along columns."""
    d = asked.layouts["d"]
    along = asked.new.axis if d is None else d.vector_axis
    return 8 if along == 0 else max(8, sm90.NARROWEST // (2 if d is None else d.dtype.itemsize))


# -- packed integers --------------------------------------------------------------------------------------------------
#
# Products with a B of packed integers, by the kernel that dequantises in registers.
#
# All time goes to B: 4096 x 4096 of 4 bits are 8.4 MB. A block with all of K needs no sums of others: 16 warps share the K
# of 32 columns, which are 128 blocks. Where such tiles are fewer than half the multiprocessors, two blocks of a cluster
# share K. (Of clusters of four, 32 do not fit at once: M = 1 took 16.5 us by them.) 8 warps share K where there
# are more tiles than multiprocessors: one block loads while another adds up. A multiprocessor holds three such blocks, or
# two whose warps have two loads each on their way, or two of 64 columns: up to 8 rows take what holds all tiles at once
# (M = 1, K = 4096, float16, H200, 2026-11-30: 6144 columns 6.8 us by two loads, 8.1 by one; 11008 10.3 by 32 columns, 11.5
# by 64; 14336 12.9 and 11.8; 20480 17.2 and 18.4). 16 rows of two braided matrices of 14336 columns took 52.4 and 44.5, with
# two loads each on their way. Of more rows a warp has 64 columns: each of its loads of A serves twice as many products.
#
# Microseconds of 4096 x 4096 on an H200 in CUDA graphs (2026-11-24, 16 copies of B in turns, groups of 128; M = 1 with 8
# warps 8.9), PyTorch's F.linear in float16, and the layout's own dequantisation in the default kernel:
#
# | M | 4 bits | float16 | ratio | default kernel |
# |---|---|---|---|---|
# | 1 | 5.3 | 13.0 | 2.47 | |
# | 16 | 6.8 | 13.3 | 1.96 | |
# | 64 | 12.6 | 11.4 | 0.91 | |
# | 256 | 33.1 | 17.0 | 0.51 | 238 |

LEAST_ROWS = 17                        # of A, from which on Hopper's kernel is faster
ROWS, COLUMNS = 8, 32                  # of an operation
FEW, SOME = 16, 64                     # rows of A: mappings differ
VECTOR = 16                            # bytes at whose multiples rows must begin for loads of that many


def propose_quantised(asked: Asked, device: DeviceInfo) -> Proposal | None:
    """The operator and the fields of the mapping; None for what stays with the layout's own dequantisation."""
    (a, b), infos, (M, N, K) = asked.operands, asked.infos, asked.sizes
    packed = () if b.is_plain else parts_of(b)
    if not packed or not _is_alone(asked) or device.arch < (9, 0) or asked.products != 1 or M == 0:
        return None
    if a.dtype.itemsize == 1 and M > FEW:              # weights would be scaled, and no sums
        return None
    is_large = M > SOME and packed[0].bits == 4 and len(packed) == 1
    part = _part(packed[0], M, is_large, len(packed) == 1)
    if K == 0 or refusal(b, N, K, part) is not None:
        return None
    if any(info is None or alignment(info) % VECTOR for info in (infos["a"], infos["b"])):
        return None
    return QuantisedMMAOp(packed[0].bits, a.dtype), _quantised_mapping(M, N, K, is_large, len(packed) == 1, part, device)


def propose_dequantised(asked: Asked, device: DeviceInfo) -> dict[str, Any] | None:
    """The fields of the transposed product's mapping where Hopper's kernel dequantises B on the way to wgmma; None for what
    stays with `propose_quantised`."""
    (a, b), infos, (M, N, K) = asked.operands, asked.infos, asked.sizes
    of_a, of_b, d = infos["a"], infos["b"], asked.layouts["d"]
    if not isinstance(b, GroupQuantised) or not _is_alone(asked):
        return None
    is_float8 = a.dtype.itemsize == 1
    if of_a is None or of_b is None or b.bits != 4 or M < LEAST_ROWS or 0 in (N, K):
        return None
    if d is not None and not (isinstance(d, Plain) and d.axis == 1):
        return None
    b.check(of_b, K, N, "b")
    held = (b.scales, b.zeros) if b.has_zeros else (b.scales,)
    if why_not(of_a, 1) or why_not(of_b, 1) or any(why_not(describe(one), 1) for one in held):
        return None
    table = sm90.DEQUANTISED_FLOAT8 if is_float8 else sm90.DEQUANTISED
    shared = by_workspace((N, M, K), device, 1, table.workspace, table.least_shared, a.dtype.itemsize)
    listed = tuple(one for one in table.mappings + shared if is_float8 or shares_scales(b.group, one.depth // 2))
    if not listed:
        return None
    mapping = fastest((N, M, K), device, itemsize=a.dtype.itemsize, mappings=listed)
    operator = WGMMAOp(mapping.N, dtype=a.dtype, promote=sm90.PROMOTION if is_float8 else 0)
    block = Tile(M=mapping.M, N=mapping.N, K=mapping.depth // a.dtype.itemsize)
    return dict(mapping.fields, block_shape=block, kernel="warp_specialised", operator=operator)


def _is_alone(asked: Asked) -> bool:
    """Whether A is plain rows of 16 bits or of float8, as B's numbers are, and nothing is asked for that these kernels have
    not."""
    (a, b), fields = asked.operands, asked.fields
    return (type(a) is RowMajor and a.dtype in (F16, BF16, E4M3) and b.dtype == a.dtype and asked.infos["c"] is None
            and not {"operator", "condition", "global_c_layout", *MAPPING_FIELDS} & set(fields)
            and is_untouched("a", fields) and is_untouched("b", fields))


def _part(b: GroupQuantised, M: int, is_large: bool, is_plain: bool) -> int:
    """A warp's part of a k-tile: a group of rows with one scale, or as much of it as registers hold."""
    k = QuantisedMMAOp(b.bits).K
    most = 128 if M <= (FEW if is_plain else ROWS) else 2 * k if M <= FEW else k if is_large else 64
    return max(math.gcd(b.group, most), k)


def _quantised_mapping(M: int, N: int, K: int, is_large: bool, is_plain: bool, part: int,
                       device: DeviceInfo) -> dict[str, Any]:
    """Tiles, warps, and blocks that share K. (With 64 rows 2 bits, whose operations are longer, spill, and so do interleaved
    columns, whose lanes choose among arrays.)"""
    stages = 1
    if M <= FEW:
        rows, turns = ROWS if M <= ROWS else FEW, -(-N // COLUMNS) / device.sm_count
        is_wide = M <= ROWS and is_plain and 3 < turns <= 4
        columns = warp = 2 * COLUMNS if is_wide else COLUMNS
        warps_k = 16 if turns <= 1 else 8
        if (turns > 1 and part < 128) if M > ROWS else (is_plain and 1 < turns <= 2):
            stages = 2
    elif not is_large:
        rows, columns, warp, warps_k = 4 * ROWS, 2 * COLUMNS, 2 * COLUMNS, 8
    else:
        rows, columns, warp, warps_k = 8 * ROWS, 4 * COLUMNS, 2 * COLUMNS, 4
    while warps_k > 1 and warps_k * part > K:
        warps_k //= 2
    tiles = -(-M // rows) * -(-N // columns)
    parts = K // (part * warps_k)
    splits = 2 if 2 * tiles <= device.sm_count and parts >= 2 else 1
    return dict(kernel="quantised", block_shape=Tile(M=rows, N=columns, K=part * warps_k),
                compute_warp=Tile(M=rows, N=warp, K=part), warps_per_block=columns // warp * warps_k, stages=stages,
                splits=splits)


# --------------------------------------------------------------------------------------------------
# Mappings that were measured to be the fastest, where the model does not find them: the table that ships.
#
# An entry is a plain product of `bench.choice` whose best mapping beat the model's by more than 7 % on an H200. It stands
# for its shape class: the same dtype, orders and alignments, and sizes within a quarter of an octave (19 %) of it, of
# several entries the nearest. ``winners.json`` has them, as `Candidate.plain` writes mappings; `python -m bench.winners`
# makes it of result files. What `gemmkit.tune` found on a machine stands above it, and so does all that a caller says.

FILE = Path(__file__).with_name("winners.json")
ARCH, SM_COUNT = (9, 0), 132           # of an H200 and of an H100 alike
NEAR = 0.25                            # octaves between a size and an entry's, at most

_is_without: ContextVar[bool] = ContextVar("gemmkit_without_winners", default=False)


@dataclass(frozen=True)
class Winner:
    """An entry: its shape ``kind`` (`class_of`), its ``sizes`` M, N, K, the mapping, and its time by that of the model's
    choice."""

    kind: str
    sizes: tuple[int, int, int]
    candidate: Candidate
    ratio: float

    def distance(self, sizes: tuple[int, int, int]) -> float:
        """Octaves by which the sizes differ, the most of the three."""
        return max(abs(math.log2(size / mine)) for size, mine in zip(sizes, self.sizes))


def class_of(infos: Mapping[str, ArrayInfo | None], a: Plain, b: Plain, columns: int) -> str:
    """What products have in common that take the same routes: A's and B's dtype and orders, where their rows begin, and
    whether TMA can store rows of D, of so many columns: "float16 tn 16 2 -"."""
    orders = "".join("nt"[layout.axis == 0] for layout in (a, b))
    starts = [_start(info) for info in (infos["a"], infos["b"])]
    stored = "d" if columns * a.dtype.itemsize % 16 == 0 else "-"
    dtype = SIXTEEN[0] if a.dtype in SIXTEEN else a.dtype                # bfloat16 takes the same time
    return " ".join(map(str, (dtype, orders, *starts, stored)))


def _start(info: ArrayInfo | None) -> int:
    """The bytes at whose multiples an operand's rows begin: what vectors can be of, or a line of the L2."""
    assert info is not None
    found = alignment(info)
    return LINE if found == 16 and not is_unaligned(info) else found


def table() -> tuple[Winner, ...]:
    """The entries of the file."""
    return tuple(one for kind in dict.fromkeys(one["class"] for one in _read(FILE)) for one in of_class(FILE, kind))


@cache
def of_class(file: Path, kind: str) -> tuple[Winner, ...]:
    """The entries of a shape class."""
    return tuple(Winner(kind, tuple(one["sizes"]), Candidate.of_plain(one["mapping"]), one["ratio"])
                 for one in _read(file) if one["class"] == kind)


@cache
def _read(file: Path) -> list[dict[str, Any]]:
    return list(json.loads(file.read_text())["winners"])


def nearest(entries: Sequence[Winner], kind: str, sizes: tuple[int, int, int]) -> Winner | None:
    """The entry of a shape class that is nearest to these sizes; None where none is near.

    >>> one = Winner("float16 nn 16 16 d", (512, 512, 64), Candidate("singlestage", (32, 32, 64)), 0.8)
    >>> nearest([one], one.kind, (600, 500, 64)) is one, nearest([one], one.kind, (650, 500, 64))
    (True, None)
    """
    found = [one for one in entries if one.kind == kind and one.distance(sizes) <= NEAR]
    return min(found, key=lambda one: one.distance(sizes), default=None)


def propose(asked: Asked, device: DeviceInfo) -> Proposal | None:
    """The operator (None: the default one) and the fields of a winner's mapping, for a product of two matrices for which
    nothing else is given; None where there is none."""
    (a, b), infos, sizes, d = asked.operands, asked.infos, asked.sizes, asked.layouts["d"]
    out = infos.get("out")
    if asked.fields or asked.products != 1 or 0 in sizes or infos.get("c") is not None or _is_without.get():
        return None
    if device.arch != ARCH or device.sm_count != SM_COUNT or not a.dtype == b.dtype == (a if d is None else d).dtype:
        return None
    if not (isinstance(a, Plain) and a.is_plain and isinstance(b, Plain) and b.is_plain):
        return None
    if out is not None and not is_as_new(out, a.dtype, sizes, 1):
        return None
    kind = class_of(infos, a, b, sizes[1])
    found = nearest(of_class(FILE, kind), kind, sizes)
    return None if found is None else found.candidate.proposal(asked, device)


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Within it every product takes the model's mapping."""
    token = _is_without.set(True)
    try:
        yield
    finally:
        _is_without.reset(token)
