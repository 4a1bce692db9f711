"""The kernel for a B of packed integers and a few rows of A: words go from global memory to registers, become float16
(or bfloat16, as A is) there, and are multiplied by ``mma.sync``.

All time goes to B, which is read once. A block computes a tile of D; its warps divide the columns and K, and blocks of a
cluster divide K further. A warp's loads do not depend on other warps: there is no barrier before the sums meet, and
``stages`` loads of each warp are on their way.

| step | what | where |
|---|---|---|
| 0 | a block's part of B into the L2, while the kernel before ends | `ahead` |
| 1 | B's words, their scales and zeros, and A: global -> registers, ``stages`` k-tiles of a warp ahead | `mainloop` |
| 2 | integers -> float16; multiply and accumulate | `mainloop` |
| 3 | the sums of warps that share columns -> registers of the first of them, through shared memory | `sums` |
| 4 | those of blocks that share K -> registers of the first block | `gemmkit.kernels.simt.gather_sums` |
| 5 | D: registers -> shared | here |
| 6 | D: shared -> global, by the epilogue | |

The dequantisation follows Marlin (Frantar et al., 2024), which has an order of words of its own for it. Here the order is
plain: which of K and N an instruction takes where is up to the operator (`gemmkit.operators.quantised_mma`).
"""

from __future__ import annotations

from typing import Any

from gemmkit.component_products import of_product
from gemmkit.kernels.common.elements import kept_in_shared, transform_registers
from gemmkit.kernels.common.work import Place, Work
from gemmkit.kernels.quantised.ahead import prefetch_b
from gemmkit.kernels.quantised.mainloop import run
from gemmkit.kernels.quantised.sums import add_warps
from gemmkit.kernels.simt.kernel import start_from_nothing
from gemmkit.lang.registers import registers
from gemmkit.ptx.memory import shared
from gemmkit.ptx.special import barrier, thread_index, udiv, uniform
from gemmkit.ptx.warpgroup import grid_launch_dependents, grid_wait
from gemmkit.tiling import parallelise, translate, translate_offset


def quantised(spec: Any, a: Any, b: Any, c: Any, d: Any, shape: Any) -> None:
    """D = A B for one tile of D; see the module's table. Launched with ``spec.cluster.splits`` blocks of ``spec.threads`` a
    tile, in clusters of as many."""
    grid_launch_dependents()
    # 0. Which product of a stack is this block's, which tile of it, and which share of K?
    batch, tile = spec.scheduler.product(spec.scheduler.first())
    stack = spec.scheduler.stack
    compute_tile(of_product(spec, batch), stack.a.matrix(a, batch), stack.b.matrix(b, batch), stack.d.matrix(d, batch),
                 of_product(shape, batch), tile)


def compute_tile(spec: Any, a: Any, b: Any, d: Any, shape: Any, tile: int) -> None:
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
            store_d(spec, accumulators, d_shared, Place(block_m, block_n, shape.M, shape.N), warp)
        barrier()

        # 6. D: shared -> global.
        spec.epilogue.store(spec, d, d_shared, block_m, block_n, warp, shape)


def store_d(spec: Any, accumulators: Any, pointer: Any, place: Place, warp: int) -> None:
    """Step 5, for the warps that have the sums."""
    warp_tile = parallelise(spec.block.MN, spec.compute_warp.MN, warp, spec.warps_n)[0]
    for i in range(spec.fragments_m):
        for j in range(spec.fragments_n):
            tile = translate_offset(warp_tile, i * spec.operation.size.M, j * spec.operation.size.N)
            values = transform_registers(spec.operator, spec.d.to_registers, spec.operator.map_c, accumulators[i, j],
                                         translate(tile, place.i, place.j), place)
            spec.operator.store_d(spec.d.shared, pointer, tile, spec.d.leading(), kept_in_shared(spec, values))
