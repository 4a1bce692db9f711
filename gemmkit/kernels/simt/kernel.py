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

from typing import Any, NamedTuple

from gemmkit.component_products import of_product
from gemmkit.kernels.common.elements import kept_in_shared, transform_fragment, transform_input, transform_registers
from gemmkit.kernels.common.k_tiles import holds
from gemmkit.kernels.common.scheduler import k_range_of
from gemmkit.kernels.common.tile_copy import copy_to_shared
from gemmkit.kernels.common.work import Place
from gemmkit.kernels.simt.gather_sums import own_share
from gemmkit.lang.registers import registers
from gemmkit.lang.values import fill
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import barrier, thread_index, udiv, uniform
from gemmkit.tiling import parallelise, translate, translate_offset


class Observed(NamedTuple):
    """What a thread has of a row of A, and which k-tile it looks at next."""

    state: Any
    due: Any


def singlestage(spec: Any, a: Any, b: Any, c: Any, d: Any, shape: Any) -> None:
    """D = A B + C for one tile of D; see the module's table. Launched with ``spec.cluster.splits`` blocks
    of ``spec.threads`` a tile, in clusters of as many."""
    # 0. Which product of a stack is this block's, and which tile of it?
    batch, tile = spec.scheduler.product(spec.scheduler.first())
    stack = spec.scheduler.stack
    compute_tile(of_product(spec, batch), stack.a.matrix(a, batch), stack.b.matrix(b, batch), stack.c.matrix(c, batch),
                 stack.d.matrix(d, batch), of_product(shape, batch), tile)


def compute_tile(spec: Any, a: Any, b: Any, c: Any, d: Any, shape: Any, tile: int) -> None:
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
            load_c(spec, accumulators, c, Place(block_m, block_n, shape.M, shape.N), warp, shape)
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
        spec.watch.keep(observed.state, spec, thread_index(), block_m, block_n, shape)

    # 4. The sums of blocks that share K become those of the first, which finishes the tile.
    finishes = spec.scheduler.gather(spec, accumulators, rank) if spec.is_split else True
    if finishes:
        # 5. D: registers -> shared.
        d_shared = shared(spec.d.shared.dtype, 0)
        store_d(spec, accumulators, d_shared, Place(block_m, block_n, shape.M, shape.N), warp)
        barrier()

        # 6. D: shared -> global.
        spec.epilogue.store(spec, d, d_shared, block_m, block_n, warp, shape)


def start_observing(spec: Any, block_n: int, shape: Any) -> Any:
    """An observer's state of this thread's row of A, and the first k-tile that this block looks at."""
    if spec.observes:
        return Observed(spec.a.observer.nothing(), spec.watch.first(spec, block_n, shape))
    return 0


def observe(spec: Any, observed: Observed, pointer: Any, block_m: int, block_k: int, shape: Any) -> Observed:
    """A's tile at ``block_k`` is looked at where it is this block's."""
    if udiv(block_k, spec.block.size.K) == observed.due:
        a = Place(block_m, block_k, shape.M, shape.K)
        state = spec.watch.add(observed.state, spec, pointer, 0, thread_index(), a)
        return Observed(state, observed.due + spec.watch.step(spec, shape))
    return observed


def load_c(spec: Any, accumulators: Any, c: Any, place: Place, warp: int, shape: Any) -> None:
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


def start_from_nothing(spec: Any, accumulators: Any) -> None:
    """No C: the accumulators start as the operator says."""
    for i in range(spec.fragments_m):
        for j in range(spec.fragments_n):
            accumulators[i, j] = fill(spec.operator.fragment_c.dtype, spec.operator.fragment_c.count,
                                      spec.operator.start)


def multiply(spec: Any, accumulators: Any, a_shared: Any, b_shared: Any, warp_tile: Any, a_place: Place,
             b_place: Place) -> None:
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


def store_d(spec: Any, accumulators: Any, pointer: Any, place: Place, warp: int) -> None:
    """Step 5."""
    warp_tile = parallelise(spec.block.MN, spec.compute_warp.MN, warp, spec.warps)[0]
    for i in range(spec.fragments_m):
        for j in range(spec.fragments_n):
            tile = translate_offset(warp_tile, i * spec.operation.size.M, j * spec.operation.size.N)
            values = transform_registers(spec.operator, spec.d.to_registers, spec.operator.map_c, accumulators[i, j],
                                         translate(tile, place.i, place.j), place)
            spec.operator.store_d(spec.d.shared, pointer, tile, spec.d.leading(), kept_in_shared(spec, values))
