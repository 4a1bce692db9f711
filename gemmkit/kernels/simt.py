"""The template kernel with one stage: the paper's listing, for any GPU and any component.

Every thread block computes one tile of D. Nothing overlaps inside a block; several blocks a multiprocessor hide each
other's latencies. Where tiles are few and K is long, the blocks of a cluster compute one tile together, each a share of the
k-tiles.

| step | what | transform |
|---|---|---|
| 1 | C: global -> shared | transform_global_to_shared_c |
| 2 | C: shared -> registers | transform_shared_to_regs_c |
| 3a | A: global -> shared | transform_global_to_shared_a |
| 3b | B: global -> shared | transform_global_to_shared_b |
| 3c | A, B: shared -> registers; multiply and accumulate | transform_shared_to_regs_a, _b |
| 4 | blocks that share K: the others' sums -> registers of the first | |
| 5 | D: registers -> shared | transform_regs_to_shared_d |
| 6 | D: shared -> global, by the epilogue | transform_shared_to_global_d |

M, N, K are run-time values, and 0 is one of them: K = 0 gives D = transform(C).
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gemmkit.kernels.collectives.operand import (
    Operand,
    OperandArrays,
    clipped_inputs,
    copy_to_shared,
    kept_in_shared,
    stored_by_neighbours,
    transform_fragment,
    transform_input,
    transform_registers,
)
from gemmkit.kernels.collectives.pipeline import ALIGNMENT
from gemmkit.kernels.collectives.scheduler import UNSPLIT, Cluster, OneTilePerBlock, Reduction, TileCoord, holds, k_range_of
from gemmkit.kernels.collectives.split_k import merge, place_of
from gemmkit.kernels.spec import KernelFamily, Spec, check_splits, divides, order_of, rule
from gemmkit.lang.aggregates import fill
from gemmkit.lang.component_products import StackShape, of_product
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import SharedPointer, View
from gemmkit.lang.registers import Registers, apply, each, generate, join, registers, split
from gemmkit.operators import BoxMMAOp
from gemmkit.ptx.barriers import cluster_barrier, cluster_rank, cluster_size, load_shared_of
from gemmkit.ptx.memory import shared, store_shared
from gemmkit.ptx.special import barrier, rolled, thread_index, udiv, uniform
from gemmkit.tiling import Tile, parallelise, translate, translate_offset

if TYPE_CHECKING:
    from gemmkit.kernels.config import Config


# --------------------------------------------------------------------------------------------------
# Step 4 of `singlestage`, where blocks of a cluster share the K of a tile: their sums become those of the first.
#
# Every other block writes its accumulators to its own shared memory, the cluster meets, and the first block fetches them
# from there. It takes its peers in the order of their ranks, so the result does not depend on which is ready first, and
# merges as the operator says. Nothing goes through global memory.

@dataclass(frozen=True)
class ClusterSums(Reduction):
    """The blocks of a cluster share a tile."""

    is_shared = True

    def rank(self) -> int:
        return cluster_rank()

    def gather(self, spec: Any, accumulators: Any, rank: int) -> bool:
        gather_sums(spec, accumulators, rank)
        return rank == 0

    def shared_bytes(self, spec: Any) -> int:
        """What a block's accumulators take in shared memory, where another block fetches them."""
        return int(spec.sums_count * spec.operator.fragment_c.dtype.itemsize)


def own_share(k: tuple, spec: SimtSpec, rank: int) -> tuple:
    """Where this block's part of K from ``k[0]`` up to ``k[1]`` begins and ends; the last may have less, or nothing."""
    begin, end = k
    size = spec.block.size.K
    share = udiv(udiv(max(end - begin, 0) + size - 1, size) + spec.cluster.splits - 1, spec.cluster.splits) * size
    return begin + rank * share, min(begin + (rank + 1) * share, end)


def gather_sums(spec: SimtSpec, accumulators: Registers, rank: int) -> None:
    """The first block's accumulators take in those of its peers."""
    if rank > 0:
        for i in range(spec.fragments_m):
            for j in range(spec.fragments_n):
                each(put_piece, split(accumulators[i, j], spec.sums_width), i, j, spec)
    cluster_barrier()
    if rank == 0:
        peer = 1
        while peer < cluster_size():                   # unrolled, it would take the registers of blocks side by side
            for i in range(spec.fragments_m):
                for j in range(spec.fragments_n):
                    accumulators[i, j] = apply(merge, accumulators[i, j], fetch_fragment(i, j, spec, peer), spec)
            peer = rolled(peer + 1)
    cluster_barrier()                                  # a block's shared memory must last until the first has read it


def put_piece(values: tuple, n: int, i: int, j: int, spec: SimtSpec) -> None:
    pointer = shared(spec.operator.fragment_c.dtype, 0)
    store_shared(pointer, thread_index() * spec.sums_width, place_of(n, i, j, spec), values)


def fetch_fragment(i: int, j: int, spec: SimtSpec, peer: int) -> tuple:
    return join(generate(spec.operator.fragment_c.count // spec.sums_width, fetch_piece, i, j, spec, peer))


def fetch_piece(n: int, i: int, j: int, spec: SimtSpec, peer: int) -> tuple:
    pointer = shared(spec.operator.fragment_c.dtype, 0)
    return load_shared_of(peer, pointer, thread_index() * spec.sums_width, place_of(n, i, j, spec), spec.sums_width)


class Observed(NamedTuple):
    """What a thread has of a row of A, and which k-tile it looks at next."""

    state: Any
    due: Any


def singlestage(spec: SimtSpec, a: View, b: View, c: View, d: View, shape: StackShape) -> None:
    """D = A B + C for one tile of D; see the module's table. Launched with ``spec.cluster.splits`` blocks
    of ``spec.threads`` a tile, in clusters of as many."""
    # 0. Which product of a stack is this block's, and which tile of it?
    batch, tile = spec.scheduler.product(spec.scheduler.first())
    stack = spec.scheduler.stack
    compute_tile(of_product(spec, batch), stack.a.matrix(a, batch), stack.b.matrix(b, batch), stack.c.matrix(c, batch),
                 stack.d.matrix(d, batch), of_product(shape, batch), tile)


def compute_tile(spec: SimtSpec, a: View, b: View, c: View, d: View, shape: StackShape, tile: int) -> None:
    """All steps, for one tile of a product of two matrices."""
    # 0. Where is the tile, which share of K is this block's, and which warp is this thread's?
    block = spec.block
    rank = spec.scheduler.rank() if spec.is_split else 0      # without a split a block has K to itself
    block_m, block_n = spec.scheduler.place(tile, rank, shape)
    if spec.scheduler.order.gates:                     # operands arrive while the kernel runs
        spec.scheduler.order.await_tile(tile, -1)
    warp = uniform(udiv(thread_index(), 32))
    accumulators = registers(spec.operator.fragment_c, spec.fragments_m, spec.fragments_n)

    # 1. and 2. C: global -> shared -> registers (or the start of the sum where there is no C, or another block takes it).
    if rank == 0:
        if spec.has_c:
            load_c(spec, accumulators, c, TileCoord(block_m, block_n, shape.M, shape.N), warp, shape)
        else:
            start_from_nothing(spec, accumulators)
    else:
        start_from_nothing(spec, accumulators)

    # 3. For every k-tile that can matter to these rows and columns (or this block's share of them):
    a_shared, b_shared = shared(spec.a.shared.dtype, spec.a.offset), shared(spec.b.shared.dtype, spec.b.offset)
    a_begin, a_end = k_range_of(spec.a.layout, block_m, min(block_m + block.size.M, shape.M), shape)
    b_begin, b_end = k_range_of(spec.b.layout, block_n, min(block_n + block.size.N, shape.N), shape)
    begin = udiv(max(a_begin, b_begin), block.size.K) * block.size.K
    end = min(a_end, b_end)
    if spec.is_split:
        begin, end = own_share((begin, end), spec, rank)
    observed = start_observing(spec, block_n, shape)
    for block_k in range(begin, end, block.size.K):
        if holds(spec, block_m, block_n, block_k):
            a_place, b_place = spec.a.place(block_m, block_n, block_k, shape), spec.b.place(block_m, block_n, block_k, shape)
            # 3a. A: global -> shared.
            copy_to_shared(spec.a, a, a_shared, a_place, spec.operator.identity, warp, shape)
            # 3b. B: global -> shared.
            copy_to_shared(spec.b, b, b_shared, b_place, spec.operator.identity, warp, shape)
            barrier()
            if spec.observes:
                observed = observe(spec, observed, a_shared, block_m, block_k, shape)
            # 3c. Every warp multiplies its part.
            warp_tiles = parallelise(block, spec.compute_warp, warp, spec.warps)
            for step in range(len(warp_tiles)):
                multiply(spec, accumulators, a_shared, b_shared, warp_tiles[step], a_place, b_place)
            barrier()

    if spec.observes:
        spec.operand_reduction.keep(observed.state, spec, thread_index(), block_m, block_n, shape)

    # 4. The sums of blocks that share K become those of the first, which finishes the tile.
    finishes = spec.scheduler.gather(spec, accumulators, rank) if spec.is_split else True
    if finishes:
        # 5. D: registers -> shared.
        d_shared = shared(spec.d.shared.dtype, 0)
        store_d(spec, accumulators, d_shared, TileCoord(block_m, block_n, shape.M, shape.N), warp, spec.warps)
        barrier()

        # 6. D: shared -> global.
        spec.epilogue.store(spec, d, d_shared, block_m, block_n, warp, shape)


def start_observing(spec: SimtSpec, block_n: int, shape: StackShape) -> Any:
    """An observer's state of this thread's row of A, and the first k-tile that this block looks at."""
    if spec.observes:
        return Observed(spec.a.observer.nothing(), spec.operand_reduction.first(spec, block_n, shape))
    return 0


def observe(spec: SimtSpec, observed: Observed, pointer: SharedPointer, block_m: int, block_k: int,
            shape: StackShape) -> Observed:
    """A's tile at ``block_k`` is looked at where it is this block's."""
    if udiv(block_k, spec.block.size.K) == observed.due:
        a = TileCoord(block_m, block_k, shape.M, shape.K)
        state = spec.operand_reduction.add(observed.state, spec, pointer, 0, thread_index(), a)
        return Observed(state, observed.due + spec.operand_reduction.step(spec, shape))
    return observed


def load_c(spec: Any, accumulators: Any, c: Any, place: TileCoord, warp: int, shape: StackShape) -> None:
    """Steps 1 and 2."""
    pointer = shared(spec.c.shared.dtype, 0)
    copy_to_shared(spec.c, c, pointer, place, 0, warp, shape)
    barrier()
    warp_tile = parallelise(spec.block.MN, spec.compute_warp.MN, warp, spec.warps)[0]
    for i in range(spec.fragments_m):
        for j in range(spec.fragments_n):
            tile = translate_offset(warp_tile, i * spec.operation.size.M, j * spec.operation.size.N)
            fragment = spec.operator.load_c(spec.c.shared, pointer, tile, spec.c.leading())
            accumulators[i, j] = transform_fragment(spec.operator, spec.c.to_registers, spec.operator.map_c,
                                                    spec.operator.fragment_c.dtype, fragment,
                                                    translate(tile, place.i, place.j), place)
    barrier()


def start_from_nothing(spec: SimtSpec, accumulators: Registers) -> None:
    """No C: the accumulators start as the operator says."""
    for i in range(spec.fragments_m):
        for j in range(spec.fragments_n):
            accumulators[i, j] = fill(spec.operator.fragment_c.dtype, spec.operator.fragment_c.count, spec.operator.start)


def multiply(spec: Any, accumulators: Any, a_shared: Any, b_shared: Any, warp_tile: Tile, a_place: TileCoord,
             b_place: TileCoord) -> None:
    """Step 3c for one slice along K of a warp's tile: fragments of A and B, and their outer product."""
    operator, operation = spec.operator, spec.operation
    a_fragments = registers(operator.fragment_a, spec.fragments_m)
    b_fragments = registers(operator.fragment_b, spec.fragments_n)
    for k in range(spec.steps_k):
        for i in range(spec.fragments_m):
            tile = translate_offset(warp_tile.MK, i * operation.size.M, k * operation.size.K)
            fragment = operator.load_a(spec.a.shared, a_shared, tile, spec.a.leading())
            a_fragments[i] = transform_input(spec.a, operator, operator.map_a, operator.fragment_a.dtype, fragment,
                                             translate(tile, a_place.i, a_place.j), a_place)
        for j in range(spec.fragments_n):
            tile = translate_offset(warp_tile.KN, k * operation.size.K, j * operation.size.N)
            fragment = operator.load_b(spec.b.shared, b_shared, tile, spec.b.leading())
            b_fragments[j] = transform_input(spec.b, operator, operator.map_b, operator.fragment_b.dtype, fragment,
                                             translate(tile, b_place.i, b_place.j), b_place)
        for i in range(spec.fragments_m):
            for j in range(spec.fragments_n):
                accumulators[i, j] = operator.mma(a_fragments[i], b_fragments[j], accumulators[i, j])


def store_d(spec: Any, accumulators: Any, pointer: Any, place: TileCoord, warp: int, warps: int) -> None:
    """Step 5, of the ``warps`` that have the sums."""
    warp_tile = parallelise(spec.block.MN, spec.compute_warp.MN, warp, warps)[0]
    for i in range(spec.fragments_m):
        for j in range(spec.fragments_n):
            tile = translate_offset(warp_tile, i * spec.operation.size.M, j * spec.operation.size.N)
            values = transform_registers(spec.operator, spec.d.to_registers, spec.operator.map_c, accumulators[i, j],
                                         translate(tile, place.i, place.j), place)
            spec.operator.store_d(spec.d.shared, pointer, tile, spec.d.leading(), kept_in_shared(spec, values))


# --------------------------------------------------------------------------------------------------
# The rules of configurations for `singlestage`.

ON_REGISTERS = ("transform_shared_to_regs_a", "transform_shared_to_regs_b", "transform_shared_to_regs_c",
                "transform_regs_to_shared_d")


def validate(config: Config) -> None:
    """Raise ConfigError for the first rule that a configuration of this kernel breaks."""
    _validate_one_stage(config)
    validate_tiles(config)
    validate_lines(config)
    validate_transforms(config)


def _validate_one_stage(config: Config) -> None:
    operator = config.operator
    rule(operator.threads == 32, "operator", operator, "it acts in warpgroups; use kernel='warp_specialised'")
    rule(not isinstance(operator, BoxMMAOp), "operator", operator,
         "its boxes of K are filled by cp.async; use kernel='multistage'")
    for field, only in (("stages", 1), ("producer_warps", 0), ("schedule", "cooperative"), ("cluster", Tile(M=1, N=1))):
        rule(getattr(config, field) == only, field, getattr(config, field),
             f"only the warp-specialised kernel takes it; with kernel={config.kernel!r} it must be {only!r}")
    if config.splits > 1:
        check_splits(config.splits)
        refusal = operator.refuses_to_merge
        rule(refusal is None, "splits", config.splits, f"with {operator!r}: {refusal}")


def validate_tiles(config: Config) -> None:
    block, warp, warps = config.block_shape, config.compute_warp, config.warps_per_block
    m, n, k = config.operator.shape
    operation = Tile(M=m, N=n, K=k)
    divides(operation, warp, "operator", f"compute_warp={warp!r} must be a multiple of the operator's {m}x{n}x{k}",
             config.operator)
    divides(warp, block, "compute_warp", f"block_shape={block!r} must be a multiple of it")
    tiles = block.size.M // warp.size.M * (block.size.N // warp.size.N)
    rule(tiles == warps, "warps_per_block", warps, f"block_shape and compute_warp divide the block among {tiles} warps")
    for name, projected in (("a", block.MK), ("b", block.KN), ("cd", block.MN)):
        mem_warp, mem_thread = getattr(config, f"mem_{name}_warp"), getattr(config, f"mem_{name}_thread")
        divides(mem_warp, projected, f"mem_{name}_warp", f"the block's {projected!r} must be a multiple of it")
        divides(mem_thread, mem_warp, f"mem_{name}_thread", f"mem_{name}_warp={mem_warp!r} must be a multiple of it")


def validate_lines(config: Config) -> None:
    """Lines of shared tiles start where the widest access to them may."""
    block = config.block_shape
    for name, tile, thread in (("a", block.MK, config.mem_a_thread), ("b", block.KN, config.mem_b_thread),
                               ("c", block.MN, config.mem_cd_thread), ("d", block.MN, config.mem_cd_thread)):
        layout = getattr(config, f"shared_{name}_layout")
        rule(getattr(layout, "plane", layout).is_linear, f"shared_{name}_layout", layout,
             f"kernel={config.kernel!r} adds an element's offset in a tile to the tile's offset, and a swizzle does not "
             "allow this; use layouts.Padded(...), or kernel='warp_specialised'")
        refusal = config.operator.refuses(name, layout)
        rule(refusal is None, f"shared_{name}_layout", layout, refusal or "")
        layout = getattr(layout, "plane", layout)              # of numbers in planes, one plane is loaded at a time
        size = layout.dtype.itemsize
        moved = thread.count if thread.extents[layout.axis] == thread.count else 1
        needed = max(math.gcd(16, moved * size), config.operator.line_alignment(name, layout))
        line = layout.leading(tile.size) * size
        rule(line % needed == 0, f"shared_{name}_layout", layout, f"its lines are {line} bytes long in the block's "
              f"{tile!r}, and must be multiples of {needed}: threads move that much at a time; pad by a multiple of "
              f"{needed // size or 1} elements")


def validate_transforms(config: Config) -> None:
    if config.operator.is_mapped:
        return
    for field in ON_REGISTERS:
        transform = getattr(config, field)
        rule(transform.is_identity or not transform.with_coordinates, field, transform,
              f"{config.operator!r} does not say which element a register holds, so a transform on registers cannot have "
              "coordinates; transform between global and shared memory, or use MMAOp")


# --------------------------------------------------------------------------------------------------
# What `singlestage` is specialised by.

S = TypeVar("S", bound="SimtSpec")


@dataclass(frozen=True)
class SimtSpec(Spec):
    """What `singlestage` is specialised by."""

    def laid_out(self: S) -> S:
        """The specialisation with B behind A in shared memory."""
        offset = -(-self.a.nbytes // ALIGNMENT) * ALIGNMENT
        return dataclasses.replace(self, b=dataclasses.replace(self.b, offset=offset))

    @cached_property
    def is_split(self) -> bool:
        """Whether blocks share the K of a tile."""
        return self.reduction.is_shared

    @cached_property
    def sums_width(self) -> int:
        """Accumulators that a thread hands over at a time: 16 bytes of them if they come so."""
        fragment = self.operator.fragment_c
        return math.gcd(fragment.count, max(1, 16 // fragment.dtype.itemsize))

    @cached_property
    def sums_count(self) -> int:
        """Accumulators of a block."""
        return self.threads * self.fragments_m * self.fragments_n * self.operator.fragment_c.count

    @cached_property
    def sums_pieces(self) -> int:
        """In how many accesses they are moved."""
        return self.sums_count // self.sums_width

    @cached_property
    def shared_bytes(self) -> int:
        """A begins at 0 and B behind it; C, D and sums that another block fetches begin at 0 at other times."""
        inputs = self.b.offset + self.b.nbytes
        addend = self.c.nbytes if self.has_c else 0
        return max(inputs, self.d.nbytes, addend, self.reduction.shared_bytes(self))


# --------------------------------------------------------------------------------------------------
# The family of `singlestage`: any GPU, any operator that acts in warps.

class Simt(KernelFamily):
    """One stage, one tile a block."""

    def validate(self, config: Config) -> None:
        validate(config)

    def specialise(self, config: Config, operands: tuple[Operand, Operand, Operand, Operand],
                   arrays: OperandArrays | None) -> SimtSpec:
        cluster = Cluster(splits=config.splits)
        scheduler = OneTilePerBlock(order_of(config, cluster), config.block_shape, cluster,
                                    ClusterSums() if config.splits > 1 else UNSPLIT)
        if arrays is not None:
            d = stored_by_neighbours(operands[3], arrays.out, arrays.extents("out"), config.epilogue)
            operands = (*clipped_inputs(config, *operands[:2], arrays), operands[2], d)
        return SimtSpec(config.block_shape, config.compute_warp, config.warps_per_block, config.operator, *operands,
                        config.epilogue, config.condition, scheduler, config.has_c).laid_out()


FAMILY = Simt("singlestage", singlestage, (5, 0))
