"""The kernel for a B of packed integers and a few rows of A: words go from global memory to registers, become float16
(or bfloat16, as A is) there, and are multiplied by ``mma.sync``. An A of float8 becomes float16 on the way.

All time goes to B, which is read once. A block computes a tile of D; its warps divide the columns and K, and blocks of a
cluster divide K further. A warp's loads do not depend on other warps: there is no barrier before the sums meet, and
``stages`` loads of each warp are on their way.

| step | what | where |
|---|---|---|
| 0 | a block's part of B into the L2, while the kernel before ends | `ahead` |
| 1 | B's words, their scales and zeros, and A: global -> registers, ``stages`` k-tiles of a warp ahead | `mainloop` |
| 2 | integers -> float16 or bfloat16; multiply; a part's sums by its scale to the accumulators | `mainloop` |
| 3 | the sums of warps that share columns -> registers of the first of them, through shared memory | `sums` |
| 4 | those of blocks that share K -> registers of the first block | `gemmkit.kernels.simt` |
| 5 | D: registers -> shared | here |
| 6 | D: shared -> global, by the epilogue | |

The dequantisation follows Marlin (Frantar et al., 2024), which has an order of words of its own for it. Here the order is
plain: which of K and N an instruction takes where is up to the operator (`gemmkit.operators.mma`).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.kernels.collectives.operand import Operand, OperandArrays, stored_by_neighbours
from gemmkit.kernels.collectives.scheduler import UNSPLIT, Cluster, OneTilePerBlock, TileCoord, Work
from gemmkit.kernels.collectives.split_k import merge
from gemmkit.kernels.simt import ClusterSums, SimtSpec, start_from_nothing, store_d
from gemmkit.kernels.spec import KernelFamily, check_splits, divides, rule
from gemmkit.lang.component_products import ProblemShape, StackShape, of_product
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.host import View
from gemmkit.lang.memory import either
from gemmkit.lang.registers import Fragment, Registers, apply, each, fold, generate, join, registers, split
from gemmkit.layouts import ColumnInterleaved, GroupQuantised, Joined, RowMajor
from gemmkit.operators.mma import QuantisedMMAOp
from gemmkit.ptx.copy_async import prefetch
from gemmkit.ptx.memory import interleave_words, load_shared, load_words, shared, store_shared, unpack_words
from gemmkit.ptx.registers import (
    BFLOAT16_UNIT,
    as_bfloat16,
    as_float16,
    bfloat16_integers,
    bfloat16_zero,
    dequantise_word,
    zero_words,
)
from gemmkit.ptx.special import barrier, lane_index, rolled, thread_index, udiv, uniform
from gemmkit.ptx.wgmma import grid_launch_dependents, grid_wait
from gemmkit.tiling import Tile

if TYPE_CHECKING:
    from gemmkit.kernels.config import Config


# --------------------------------------------------------------------------------------------------
# Steps 1 and 2 of `quantised`: a warp's ring of loads in registers.
#
# A k-tile of the block is divided among the ``warps_k`` warps that have the same columns; a warp's part is ``slabs``
# operations along K. The ring has a place for each of ``stages`` parts. A place is filled anew as soon as it has been
# multiplied, so that nothing waits for the slowest warp.
#
# Rows of A beyond the last are read as the last one, and columns of B beyond the last as the last four: what they give is
# never stored.

VECTOR = 8                             # elements of A that a lane loads at a time: 16 bytes, or 8 of float8
SCALES, UNITS = np.dtype(np.float16), np.float32(1 / BFLOAT16_UNIT)


class QuantisedSource(NamedTuple):
    """A, the lane's part of B (words, scales and, where there are any, zeros), and where a lane's elements lie: its first
    row of A, its first column of its part of B, its first row of B in an operation, the last row of A, and the last columns
    of a part of B."""

    a: Any
    b: Any
    scales: Any
    zeros: Any
    row: Any
    column: Any
    k: Any
    last: Any
    last_column: Any


class PartRing(NamedTuple):
    """Registers of the parts that are on their way."""

    words: Any
    a: Any
    scales: Any
    zeros: Any


class PartWalk(NamedTuple):
    """Where a warp's part begins, where K (or the block's share of it) ends, and the step from a part to its next."""

    at: Any
    end: Any
    step: Any


class Factors(NamedTuple):
    """Of a part, by fragments: what a lane's four columns are multiplied by, and what is taken away before."""

    scales: Any
    zeros: Any


def run(spec: Any, accumulators: Registers, a: Any, b: Any, work: Work, warp: int, shape: ProblemShape) -> None:
    """The products of a block's share of K, each warp's added to its accumulators."""
    of_n, of_k, lane = warp % spec.warps_n, udiv(warp, spec.warps_n), lane_index()
    source = source_of(spec, a, b, work.m + udiv(lane, 4), work.n + of_n * spec.compute_warp.size.N + udiv(lane, 4) * 4,
                       lane % 4 * spec.operator.rows, shape)
    ring = PartRing(registers(spec.words, spec.stages * spec.loads_b), registers(spec.vectors, spec.stages * spec.loads_a),
                    registers(spec.scale_words, spec.stages * spec.fragments_n),
                    registers(spec.zero_words, spec.stages * spec.fragments_n))
    step = spec.block.size.K
    at = work.k_begin + of_k * spec.compute_warp.size.K
    end = min(work.k_begin + work.k_tiles * step, shape.K)
    fold(spec.stages, fill, 0, spec, ring, source, PartWalk(at, end, step))
    while at < end:
        fold(spec.stages, one_place, 0, spec, ring, accumulators, source, PartWalk(at, end, step))
        at = rolled(at + spec.stages * step)


def source_of(spec: Any, a: View, b: View, row: int, column: int, k: int, shape: ProblemShape) -> QuantisedSource:
    """A lane's source, for a column of D's tile. Of interleaved columns (`gemmkit.layouts.ColumnInterleaved`) a lane's four
    are of one part, in all of its fragments: octets of two parts alternate."""
    layout = spec.b.layout
    if spec.matrices == 1:
        return QuantisedSource(a, b, layout.scales, layout.zeros if spec.has_zeros else layout.scales, row, column, k,
                               shape.M - 1, shape.N - 4)
    is_first, first, second = layout.part_of(column) == 0, layout.layout.first, layout.layout.second
    scales = either(is_first, first.scales, second.scales)
    return QuantisedSource(a, either(is_first, b, layout.layout.part.array), scales,
                           either(is_first, first.zeros, second.zeros) if spec.has_zeros else scales, row,
                           layout.column_of(column), k, shape.M - 1, layout.columns - 4)


# -- loads ------------------------------------------------------------------------------------------------------------

def fill(_: int, place: int, spec: QuantisedSpec, ring: PartRing, source: QuantisedSource, walk: PartWalk) -> int:
    """Load the part that is ``place`` parts ahead, if there is one."""
    k = walk.at + place * walk.step
    if k < walk.end:
        load(spec, ring, source, place, k)
    return 0


def load(spec: QuantisedSpec, ring: PartRing, source: QuantisedSource, place: int, k: int) -> None:
    """A part that begins at ``k``, to its place in the ring."""
    fold(spec.loads_b, load_of_b, 0, spec, ring, source, place, k)
    fold(spec.fragments_n, load_scales, 0, spec, ring, source, place, udiv(k + source.k, spec.group))
    fold(spec.loads_a, load_of_a, 0, spec, ring, source, place, k)


def load_of_b(_: int, n: int, spec: Any, ring: PartRing, source: QuantisedSource, place: int, k: int) -> int:
    """16 bytes: of the operations along K one after the other, of each its fragments' columns."""
    slab, fragment = n // spec.fragments_n, n % spec.fragments_n
    at = udiv(k + source.k, spec.operator.rows), own_column(fragment, spec, source)
    ring.words[place * spec.loads_b + n] = load_words(source.b, 1, at, (4 * slab, 0), 4)
    return 0


def load_scales(_: int, fragment: int, spec: QuantisedSpec, ring: PartRing, source: QuantisedSource, place: int,
                group: int) -> int:
    at, n = (group, own_column(fragment, spec, source)), place * spec.fragments_n + fragment
    ring.scales[n] = load_words(source.scales, 1, at, (0, 0), 4)
    if spec.has_zeros:
        ring.zeros[n] = load_words(source.zeros, 1, at, (0, 0), 4)
    return 0


def own_column(fragment: int, spec: QuantisedSpec, source: QuantisedSource) -> int:
    """The first of a lane's four columns of a fragment."""
    return min(source.column + fragment * (spec.operation.size.N // spec.matrices), source.last_column)


def load_of_a(_: int, n: int, spec: QuantisedSpec, ring: PartRing, source: QuantisedSource, place: int, k: int) -> int:
    """`VECTOR` elements: of the operations along K one after the other, of each the lane's rows, of each its places in K."""
    slab, row, vector = n // (spec.fragments_m * spec.vectors_a), n // spec.vectors_a % spec.fragments_m, n % spec.vectors_a
    ahead = slab * spec.operation.size.K + vector * VECTOR
    ring.a[place * spec.loads_a + n] = load_words(source.a, 1, (min(source.row + 8 * row, source.last), k + source.k),
                                                  (0, ahead), VECTOR)
    return 0


# -- products ---------------------------------------------------------------------------------------------------------

def one_place(_: int, place: int, spec: QuantisedSpec, ring: PartRing, accumulators: Registers, source: QuantisedSource,
              walk: PartWalk) -> int:
    """The products of a part, whose place then takes the one that is ``stages`` parts ahead."""
    k = walk.at + place * walk.step
    if k < walk.end:
        multiply(spec, ring, accumulators, place)
        following = k + spec.stages * walk.step
        if following < walk.end:
            load(spec, ring, source, place, following)
    return 0


def multiply(spec: QuantisedSpec, ring: PartRing, accumulators: Any, place: int) -> None:
    factors = Factors(generate(spec.fragments_n, scales_of, spec, ring, place),
                      generate(spec.fragments_n, zeros_of, spec, ring, place))
    if spec.scales_sums:
        sums = registers(spec.operator.fragment_c, spec.fragments_m, spec.fragments_n)
        start_from_nothing(spec, sums)
        fold(spec.slabs, one_slab, 0, spec, ring, sums, factors, place)
        fold(spec.fragments_n, add_scaled, 0, spec, ring, accumulators, sums, place)
    else:
        fold(spec.slabs, one_slab, 0, spec, ring, accumulators, factors, place)


def add_scaled(_: int, n: int, spec: QuantisedSpec, ring: PartRing, accumulators: Registers, sums: Registers,
               place: int) -> int:
    """A part's sums of a lane's four columns, multiplied by their scales in float32."""
    scales = unpack_words(SCALES, ring.scales[place * spec.fragments_n + n])
    for m in range(spec.fragments_m):
        accumulators[m, n] = generate(spec.operator.fragment_c.count, plus_scaled, spec, accumulators[m, n], sums[m, n],
                                      scales)
    return 0


def plus_scaled(n: int, spec: QuantisedSpec, accumulators: tuple, sums: tuple, scales: tuple) -> float:
    scale = np.float32(scales[n % 4])
    return accumulators[n] + sums[n] * (scale * UNITS if spec.makes_bfloat16 else scale)


def scales_of(fragment: int, spec: QuantisedSpec, ring: PartRing, place: int) -> tuple:
    """The scales of a lane's four columns, each in both halves of a word."""
    scales = ring.scales[place * spec.fragments_n + fragment]
    return interleave_words((scales, scales))


def zeros_of(fragment: int, spec: QuantisedSpec, ring: PartRing, place: int) -> tuple:
    """What takes away the zero points of a lane's four columns."""
    return generate(4, zeros_of_column, spec, ring, place * spec.fragments_n + fragment)


def zeros_of_column(column: int, spec: Any, ring: PartRing, at: int) -> Any:
    if spec.has_zeros:
        zero = ring.zeros[at][0] >> np.uint32(8 * column) & np.uint32(0xFF)
    else:
        zero = np.uint32(1 << (spec.operator.bits - 1))
    return bfloat16_zero(zero) if spec.makes_bfloat16 else zero_words(spec.operator.bits, zero)


def one_slab(_: int, slab: int, spec: QuantisedSpec, ring: PartRing, accumulators: Registers, factors: Any,
             place: int) -> int:
    """An operation along K, of all rows and columns."""
    n = place * spec.slabs + slab
    b = generate(spec.fragments_n, dequantised, spec, ring, n, factors.zeros, factors.scales)
    fold(spec.fragments_m, one_fragment, 0, spec, ring, accumulators, b, n)
    return 0


def dequantised(fragment: int, spec: QuantisedSpec, ring: PartRing, slab: int, zeros: tuple, scales: tuple) -> tuple:
    return generate(4, dequantised_column, spec, ring.words[slab * spec.fragments_n + fragment], zeros[fragment],
                    scales[fragment])


def dequantised_column(column: int, spec: Any, words: tuple, zeros: tuple, scales: tuple) -> tuple:
    """The weights in a word; of a part whose sums are scaled the integers."""
    if spec.makes_bfloat16:
        return bfloat16_integers(spec.operator.bits, words[column], zeros[column])
    if spec.scales_sums:
        return dequantise_word(spec.operator.bits, words[column], zeros[column], None)
    found = dequantise_word(spec.operator.bits, words[column], zeros[column], scales[column])
    return as_bfloat16(found) if spec.operator.is_bfloat16 else found


def one_fragment(_: int, m: int, spec: QuantisedSpec, ring: PartRing, accumulators: Registers, b: tuple, slab: int) -> int:
    """A fragment's rows by all columns."""
    fold(spec.fragments_n, one_product, 0, spec, accumulators, pairs_of_row(spec, ring, slab * spec.fragments_m + m), b, m)
    return 0


def one_product(_: int, n: int, spec: Any, accumulators: Any, a: tuple, b: tuple, m: int) -> int:
    accumulators[m, n] = spec.operator.mma(a, b[n], accumulators[m, n])
    return 0


def pairs_of_row(spec: Any, ring: PartRing, row: int) -> tuple:
    """The lane's places along K of its row of a fragment, in the pairs that B has."""
    words = join(generate(spec.vectors_a, vector_of, ring, row * spec.vectors_a))
    if spec.operator.is_float8:
        words = as_float16(words)
    return interleave_words((generate(spec.operator.pairs // 2, word_of, words, 0),
                             generate(spec.operator.pairs // 2, word_of, words, spec.operator.pairs // 2)))


def vector_of(n: int, ring: PartRing, first: int) -> tuple:
    return ring.a[first + n]


def word_of(n: int, words: tuple, first: int) -> Any:
    return words[first + n]


# --------------------------------------------------------------------------------------------------
# The rules of configurations for `quantised`, and of problems.

STAGES = 1, 8


def parts_of(layout: object) -> tuple[GroupQuantised, ...]:
    """The packed matrices of a B that this kernel reads: one, or two whose columns are interleaved. Empty for another B."""
    found: tuple[object, ...] = (layout,)
    if isinstance(layout, ColumnInterleaved) and isinstance(layout.layout, Joined):
        found = layout.layout.first, layout.layout.second
    packed = [x for x in found if isinstance(x, GroupQuantised)]
    alike = len(packed) == len(found) and len({(x.bits, x.group, x.has_zeros) for x in packed}) == 1
    return tuple(packed) if alike else ()


UNTOUCHED = tuple(f"transform_{way}_{name}" for name in "ab" for way in ("global_to_shared", "shared_to_regs"))


def validate(config: Config) -> None:
    """Raise ConfigError for the first rule that a configuration of this kernel breaks."""
    operator, b = config.operator, config.global_b_layout
    rule(isinstance(operator, QuantisedMMAOp), "operator", operator,
         f"kernel={config.kernel!r} dequantises in registers; use operators.QuantisedMMAOp(bits=...)")
    assert isinstance(operator, QuantisedMMAOp)
    parts = parts_of(b)
    rule(bool(parts), "global_b_layout", b, f"{operator!r} takes a GroupQuantised, such as "
         "gemmkit.layouts.quantised.quantise makes, or two alike whose columns are interleaved")
    rule(parts[0].bits == operator.bits, "operator", operator, f"B has integers of {parts[0].bits} bits")
    rule(type(config.global_a_layout) is RowMajor, "global_a_layout", config.global_a_layout, "rows of A are loaded as they "
         "lie; a RowMajor is needed")
    for name, layout in (("global_a_layout", config.global_a_layout), ("global_b_layout", b)):
        rule(layout.dtype == operator.dtype, name, layout, f"{operator!r} multiplies {operator.dtype}")
    for name in UNTOUCHED:
        rule(getattr(config, name).is_identity, name, getattr(config, name), f"kernel={config.kernel!r} multiplies operands "
             "as they are; transform with the default kernel")
    rule(not config.has_c, "global_c_layout", config.global_c_layout,
         f"kernel={config.kernel!r} has no C; add it in the epilogue: epilogues.Residual(c)")
    rule(config.condition.is_always, "condition", config.condition, f"kernel={config.kernel!r} computes all k-tiles")
    for field, only in (("producer_warps", 0), ("schedule", "cooperative"), ("cluster", Tile(M=1, N=1))):
        rule(getattr(config, field) == only, field, getattr(config, field),
             f"only the warp-specialised kernel takes it; with kernel={config.kernel!r} it must be {only!r}")
    least, most = STAGES
    rule(least <= config.stages <= most, "stages", config.stages, f"{least} to {most} stages are needed")
    if config.splits > 1:
        check_splits(config.splits)
    _validate_tiles(config, operator, parts[0].group)


def _validate_tiles(config: Config, operator: QuantisedMMAOp, group: int) -> None:
    block, warp = config.block_shape, config.compute_warp
    m, n, k = operator.shape
    divides(Tile(M=m, N=n, K=k), warp, "operator", f"compute_warp={warp!r} must be a multiple of the operator's "
            f"{m}x{n}x{k}", operator)
    divides(warp, block, "compute_warp", f"block_shape={block!r} must be a multiple of it")
    rule(warp.size.M == block.size.M, "compute_warp", warp, f"a warp has all rows of the block, M={block.size.M}")
    warps = block.size.N // warp.size.N * (block.size.K // warp.size.K)
    rule(warps == config.warps_per_block, "warps_per_block", config.warps_per_block, "block_shape and compute_warp divide "
         f"columns and K of the block among {warps} warps")
    rule(group % warp.size.K == 0 or warp.size.K == k, "compute_warp", warp, f"a part of K has one scale a column: K must "
         f"divide group={group}, or be the operator's {k}")
    rule(scales_sums(operator, group, warp) or not operator.is_float8, "compute_warp", warp, "with 8-bit floats a part's "
         "sums are scaled, and no weight: it needs fewer rows, or more of K")


def scales_sums(operator: QuantisedMMAOp, group: int, warp: Tile) -> bool:
    """Whether a part's sums are multiplied by its scale and not each weight: where the part has one scale a column, and
    fewer sums than weights. No weight is rounded, and a part of bfloat16 takes 271 instructions in place of 486."""
    rows, part = warp.size.M // operator.M, warp.size.K
    return group % part == 0 and 2 * int(operator.fragment_c.count) * rows < part


def refusal(layout: object, N: int, K: int, part: int) -> str | None:
    """Why a B of K x N cannot be had in parts of ``part`` along K, or None."""
    N = layout.columns if isinstance(layout, ColumnInterleaved) else N
    if N % 4 or N < 4:
        return f"N={N}: a lane has four columns, and a multiple of 4 is needed"
    if K % part:
        return f"K={K}: warps have {part} of K at a time, and a multiple is needed"
    return None


def check_sizes(config: Config, arrays: OperandArrays) -> None:
    """Raise ConfigError for a problem that the kernel cannot carry out."""
    found = None
    if arrays.M * arrays.N:
        found = refusal(config.global_b_layout, arrays.N, arrays.K, config.compute_warp.size.K)
    if found is not None:
        raise ConfigError(f"kernel={config.kernel!r}: {found}; leave kernel and operator out")


# --------------------------------------------------------------------------------------------------
# What `quantised` is specialised by.

WORD = np.dtype(np.uint32)


@dataclass(frozen=True)
class QuantisedSpec(SimtSpec):
    """``stages`` parts of a warp are on their way."""

    stages: int = 1

    @cached_property
    def matrices(self) -> int:
        """Matrices whose columns B interleaves."""
        return len(parts_of(self.b.layout))

    @cached_property
    def group(self) -> int:
        """Rows of B that share a scale."""
        return parts_of(self.b.layout)[0].group

    @cached_property
    def has_zeros(self) -> bool:
        return parts_of(self.b.layout)[0].has_zeros

    @cached_property
    def scales_sums(self) -> bool:
        operator: Any = self.operator
        return scales_sums(operator, self.group, self.compute_warp)

    @cached_property
    def makes_bfloat16(self) -> bool:
        """Whether integers become bfloat16 at once, which holds them, and no product with a scale."""
        return self.scales_sums and self.operator.is_bfloat16              # type: ignore[attr-defined]

    @cached_property
    def warps_n(self) -> int:
        """Warps side by side along the columns of a tile."""
        return self.block.size.N // self.compute_warp.size.N

    @cached_property
    def warps_k(self) -> int:
        """Warps that divide a k-tile."""
        return self.warps // self.warps_n

    @cached_property
    def slabs(self) -> int:
        """Operations along K in a warp's part of a k-tile."""
        return self.steps_k

    @cached_property
    def vectors_a(self) -> int:
        """`VECTOR` elements of a row that it loads for an operation."""
        return self.operator.pairs // 4                                    # type: ignore[attr-defined]

    @cached_property
    def loads_b(self) -> int:
        """16 bytes of B that a lane loads for a part."""
        return self.slabs * self.fragments_n

    @cached_property
    def loads_a(self) -> int:
        """All of those for a part."""
        return self.slabs * self.fragments_m * self.vectors_a

    @cached_property
    def pieces_of_fragment(self) -> int:
        """A lane's sums of an operation, in pieces that are moved at a time."""
        return self.operator.fragment_c.count // self.sums_width

    @cached_property
    def pieces(self) -> int:
        """Those of all operations of a warp."""
        return self.fragments_m * self.fragments_n * self.pieces_of_fragment

    @cached_property
    def words(self) -> Fragment:
        """A lane's words of B for an operation: of four columns."""
        return Fragment(WORD, 4)

    @cached_property
    def vectors(self) -> Fragment:
        return Fragment(WORD, VECTOR * self.operator.dtype.itemsize // WORD.itemsize)           # type: ignore[attr-defined]

    @cached_property
    def scale_words(self) -> Fragment:
        return Fragment(WORD, 2)

    @cached_property
    def zero_words(self) -> Fragment:
        return Fragment(WORD, 1)

    @cached_property
    def shared_bytes(self) -> int:
        """Sums of the warps, or of another block, or D."""
        sums = self.sums_count * self.operator.fragment_c.dtype.itemsize if self.warps_k > 1 else 0
        return max(sums, self.d.nbytes, self.reduction.shared_bytes(self))


# --------------------------------------------------------------------------------------------------
# Step 3 of `quantised`: the sums of warps that have the same columns become those of the first of them.
#
# All warps put theirs into shared memory, 16 bytes of each lane in a piece. Then each warp adds up some of the pieces,
# over all warps in their order, so that the same call gives the same bits; and the first warp fetches what was added up.
# Alone it would load all other warps' sums one after the other.

def add_warps(spec: QuantisedSpec, accumulators: Registers, warp: int) -> None:
    """Warps below ``warps_n`` have the sums of all; shared memory may be used anew."""
    for i in range(spec.fragments_m):
        for j in range(spec.fragments_n):
            each(put_piece, split(accumulators[i, j], spec.sums_width), i * spec.fragments_n + j, spec, warp)
    barrier()
    first, piece = warp % spec.warps_n, udiv(warp, spec.warps_n)
    while piece < spec.pieces:
        sums = fold(spec.warps_k - 1, add_peer, load_piece(spec, first, piece), spec, first, piece)
        store_shared(shared(spec.operator.fragment_c.dtype, 0), place_of(spec, first, piece), 0, sums)
        piece = rolled(piece + spec.warps_k)
    barrier()
    if warp < spec.warps_n:
        for i in range(spec.fragments_m):
            for j in range(spec.fragments_n):
                accumulators[i, j] = join(generate(spec.pieces_of_fragment, fetch_piece, i * spec.fragments_n + j, spec,
                                                   warp))
    barrier()


def put_piece(values: tuple, n: int, fragment: int, spec: QuantisedSpec, warp: int) -> None:
    piece = fragment * spec.pieces_of_fragment + n
    store_shared(shared(spec.operator.fragment_c.dtype, 0), place_of(spec, warp, 0), piece * 32 * spec.sums_width, values)


def add_peer(sums: tuple, n: int, spec: QuantisedSpec, first: int, piece: int) -> tuple:
    """The piece of the next warp with these columns added."""
    return apply(merge, sums, load_piece(spec, first + (n + 1) * spec.warps_n, piece), spec)


def fetch_piece(n: int, fragment: int, spec: QuantisedSpec, warp: int) -> tuple:
    return load_piece(spec, warp, fragment * spec.pieces_of_fragment + n)


def load_piece(spec: QuantisedSpec, warp: int, piece: int) -> tuple:
    return load_shared(shared(spec.operator.fragment_c.dtype, 0), place_of(spec, warp, piece), 0, spec.sums_width)


def place_of(spec: QuantisedSpec, warp: int, piece: int) -> int:
    """Where a lane's part of a piece lies: neighbours in a warp are neighbours in memory."""
    return ((warp * spec.pieces + piece) * 32 + lane_index()) * spec.sums_width


# --------------------------------------------------------------------------------------------------
# Step 0 of `quantised`: a block's part of B comes into the L2 before the kernel in front has ended.
#
# The launch is a dependent one: blocks begin where there is room, and wait (`grid_wait`) before they read or write
# anything, for the kernel in front may write A, B or what D replaces. A prefetch reads no value, so it need not wait.

LINE = 32                              # words in 128 bytes


def prefetch_b(spec: Any, b: View, work: Work, shape: StackShape) -> None:
    """Each thread brings some of the lines of a block's words and scales."""
    layout = spec.b.layout
    if spec.matrices == 1:
        prefetch_part(spec, b, layout.scales, work.n, shape.N, work, shape)
    else:
        n, first, second = layout.column_of(work.n), layout.layout.first, layout.layout.second
        prefetch_part(spec, b, first.scales, n, layout.columns, work, shape)
        prefetch_part(spec, layout.layout.part.array, second.scales, n, layout.columns, work, shape)


def prefetch_part(spec: Any, b: View, scales: View, n: int, columns: int, work: Work, shape: StackShape) -> None:
    """Those of the block's columns in one matrix, from column ``n`` on."""
    end = min(work.k_begin + work.k_tiles * spec.block.size.K, shape.K)
    row = udiv(work.k_begin, spec.operator.rows) + thread_index()
    while row < udiv(end, spec.operator.rows):
        for line in range(max(1, spec.warps_n * spec.fragments_n // spec.matrices)):
            prefetch(b, (row, min(n + line * LINE, columns - 1)))
        row = rolled(row + spec.threads)
    group = udiv(work.k_begin, spec.group) + thread_index()
    while group * spec.group < end:
        prefetch(scales, (group, n))
        group = rolled(group + spec.threads)


def quantised(spec: QuantisedSpec, a: View, b: View, c: View, d: View, shape: StackShape) -> None:
    """D = A B for one tile of D; see the module's table. Launched with ``spec.cluster.splits`` blocks of ``spec.threads`` a
    tile, in clusters of as many."""
    grid_launch_dependents()
    # 0. Which product of a stack is this block's, which tile of it, and which share of K?
    batch, tile = spec.scheduler.product(spec.scheduler.first())
    stack = spec.scheduler.stack
    compute_tile(of_product(spec, batch), stack.a.matrix(a, batch), stack.b.matrix(b, batch), stack.d.matrix(d, batch),
                 of_product(shape, batch), tile)


def compute_tile(spec: QuantisedSpec, a: View, b: View, d: View, shape: StackShape, tile: int) -> None:
    """All steps, for one tile of a product of two matrices."""
    rank = spec.scheduler.rank() if spec.is_split else 0
    block_m, block_n = spec.scheduler.place(tile, rank, shape)
    k_begin, k_tiles = spec.scheduler.k_tiles(spec, block_m, block_n, rank, shape)
    warp = uniform(udiv(thread_index(), 32))
    work = Work(block_m, block_n, 0, k_begin, k_tiles, rank)
    accumulators = registers(spec.operator.fragment_c, spec.fragments_m, spec.fragments_n)
    start_from_nothing(spec, accumulators)

    # 0. B comes into the L2 while the kernel before may still run; then what that wrote may be read.
    prefetch_b(spec, b, work, shape)
    grid_wait()

    # 1. and 2. Load, dequantise, multiply.
    run(spec, accumulators, a, b, work, warp, shape)

    # 3. and 4. The sums of warps, and of blocks, that share K.
    if spec.warps_k > 1:
        add_warps(spec, accumulators, warp)
    finishes = spec.scheduler.gather(spec, accumulators, rank) if spec.is_split else True
    if finishes:
        # 5. D: registers -> shared.
        d_shared = shared(spec.d.shared.dtype, 0)
        if warp < spec.warps_n:
            store_d(spec, accumulators, d_shared, TileCoord(block_m, block_n, shape.M, shape.N), warp, spec.warps_n)
        barrier()

        # 6. D: shared -> global.
        spec.epilogue.store(spec, d, d_shared, block_m, block_n, warp, shape)


# --------------------------------------------------------------------------------------------------
# The family of `quantised`: B of packed integers, a few rows of A.

class Quantised(KernelFamily):
    """One tile a block; warps and blocks of a cluster divide K."""

    is_dependent = True

    def validate(self, config: Config) -> None:
        validate(config)

    def specialise(self, config: Config, operands: tuple[Operand, Operand, Operand, Operand],
                   arrays: OperandArrays | None) -> QuantisedSpec:
        a, b, c, d = operands
        if arrays is not None:
            check_sizes(config, arrays)
            d = stored_by_neighbours(d, arrays.out, arrays.extents("out"), config.epilogue)
        scheduler = OneTilePerBlock(config.order, config.block_shape, Cluster(splits=config.splits),
                                    ClusterSums() if config.splits > 1 else UNSPLIT)
        return QuantisedSpec(config.block_shape, config.compute_warp, config.warps_per_block, config.operator, a, b, c, d,
                             config.epilogue, config.condition, scheduler, config.has_c, config.stages)


FAMILY = Quantised("quantised", quantised, (9, 0))
