"""Mappings to try for a product: of every kernel family, each with its modelled time, as plain data that a file can keep.

A `Candidate` is what the tables (`gemmkit.tuning.tables`) have one of, and what a store of tuned
mappings (`gemmkit.tuning.store`) keeps: a tile, how warps share it, and how blocks share the product. All else of a
configuration follows from it by `get_config`, which refuses what is not legal.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from gemmkit.kernels.common.stream_k import StreamK
from gemmkit.kernels.rasterisation import Grouped, Hilbert
from gemmkit.lang.records import part_dtypes
from gemmkit.layouts import ArrayLayout, Plain
from gemmkit.operators import Algebra, BoxMMAOp, FPUOp, MMAOp, Operator
from gemmkit.operators.algebra import units
from gemmkit.operators.wgmma import WGMMAOp
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import Tile
from gemmkit.tuning import defaults, hopper, multistage, tables
from gemmkit.tuning.hopper import can_share
from gemmkit.tuning.model import CLOCK, Asked, Proposal, Sizes, by_workspace
from gemmkit.tuning.operators import SIXTEEN, accumulator_for, algebra_of, operator_for


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
        if self.kernel == "multistage" and a == b and self.warp is not None and a in multistage.TABLES:
            return multistage.operator(a, self._multistage(), device)
        if self.lanes is None or self.warp is None:
            return None
        return FPUOp(M=self.warp[0], N=self.warp[1], MB=self.lanes[0], NB=self.lanes[1], dtype=a, b_dtype=b,
                     accumulator=accumulator_for(a, b))

    def _multistage(self) -> multistage.Multistage:
        assert self.warp is not None
        return multistage.Multistage(self.block, self.warp, self.stages or 2, self.blocks_per_sm or 1, (0,) * 4,
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
            raise ValueError(f"{plain!r} is no mapping")
        held = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
        kinds: dict[str, Any] = {"kernel": str, "schedule": str, "boxed": str, "splits": (int, str), "block": 3, "warp": 2,
                                 "lanes": 2, "cluster": 2}
        for name, value in held.items():
            kind = kinds.get(name, int)
            fits = (isinstance(value, tuple) and len(value) == kind and all(type(n) is int for n in value)
                    if isinstance(kind, int) else isinstance(value, kind) and not isinstance(value, bool))
            if name not in _NAMES or not fits:
                raise ValueError(f"{plain!r} is no mapping: {name}={value!r}")
        if held.get("boxed", "a") not in ("a", "b"):
            raise ValueError(f"{plain!r} is no mapping: boxed is 'a' or 'b'")
        if not {"kernel", "block"} <= set(held):
            raise ValueError(f"{plain!r} is no mapping: kernel and block are needed")
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
    table = hopper.BY_TMA if given is not None else hopper.table_for(a, b, *infos, {}, sizes)
    supply = table.supply_of(*infos)
    shared = by_workspace(sizes, device, products, table.workspace, table.least_shared)
    beside = (dataclasses.replace(one, cluster=(1, 1)) for one in (*table.aligned, *table.clustered))
    tiles = list(dict.fromkeys((*table.mappings, *shared, *beside, *(EXTRA if table.tries_more else ()))))
    if widths is not None and not any(one.N in widths for one in tiles):
        tiles = [dataclasses.replace(one, N=width) for one in hopper.MAPPINGS for width in widths]
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
EXTRA = hopper.mappings_of(tables.EXTRA)


def _multistage(a: ArrayLayout, b: ArrayLayout, given: Operator | None, sizes: Sizes, device: DeviceInfo, products: int,
                infos: tuple[ArrayInfo | None, ArrayInfo | None]) -> Iterator[Candidate]:
    table = multistage.TABLES.get(a.dtype, ()) if a.dtype == b.dtype else ()
    if given is not None and (getattr(given, "is_sized", True) or isinstance(given, Algebra)):
        return
    if a.dtype in SIXTEEN:
        of_a, of_b = infos
        if (device.arch[0] == 9 and isinstance(a, Plain) and isinstance(b, Plain) and of_a is not None and of_b is not None
                and hopper.is_copied(of_a, of_b)):
            table = multistage.copied(hopper.Copies.of(a, b, of_a, of_b, None, sizes[1]))
        else:
            table = (*table, multistage.SKINNY)
    boxed = None if given is not None else multistage.combed_operand(a, b, dict(zip("ab", infos)))
    if boxed is not None:
        table = multistage.BOXES
    M, N, K = (max(1, size) for size in sizes)
    across = multistage.copied_across(a, b)
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
        for block, warp, blocks in defaults.candidates(each):
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
    if set(asked.fields) & _OF_MAPPINGS or (given is not None and getattr(given, "is_sized", True)):
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
    is_fpu = isinstance(base, FPUOp)
    shape = (*LANES, base.shape[2]) if is_fpu else whole.shape
    m, n, k = (math.lcm(max(least, min(most, size)), unit)
               for least, most, size, unit in zip(LEAST_TILE, MOST_TILE, sizes, shape))
    stages = config.stages if config.kernel == "multistage" else None
    for _ in range(3):
        if m >= 2 * shape[0]:
            block, warp = (m, n, k), (m // 2, n)
        else:
            block, warp = (m, max(n, 2 * shape[1]), k), (m, max(n // 2, shape[1]))
        yield Candidate(config.kernel, block, warp, LANES if is_fpu else None, stages=stages, blocks_per_sm=1)
        m, n = max(m // 2, shape[0]), max(n // 2, shape[1])            # of less shared memory


#: Fields by which a caller names a part of a mapping.
_OF_MAPPINGS = hopper.MAPPING_FIELDS | {"splits", "stages", "schedule", "cluster", "order", "producer_warps"}
