"""The multistage kernel: a ring of stages in shared memory that is filled while the block multiplies, from sm_80 on by
cp.async.

Every thread block computes one tile of D, or, where its scheduler stays (`stream_k`), parts of tiles, one after the other.
Its threads start the copies of the k-tile that is ``stages - 1`` ahead, then
multiply the present one, so that loads from global memory have ``stages - 1`` k-tiles of arithmetic to hide behind. There
are no producer warps and no mbarriers: a thread waits for its own groups of copies, and the block meets once a k-tile.

| step | what | transform |
|---|---|---|
| 1 | C: global -> shared | transform_global_to_shared_c |
| 2 | C: shared -> registers | transform_shared_to_regs_c |
| 3a | A, B: global -> a stage, by each operand's route | transform_global_to_shared_a, _b |
| 3b | A, B: stage -> registers, one k-block ahead | transform_shared_to_regs_a, _b |
| 3c | multiply and accumulate | |
| 4 | blocks that share K: the others' sums -> registers of the one that finishes | |
| 5 | D: registers -> shared | transform_regs_to_shared_d |
| 6 | D: shared -> global, by the epilogue | transform_shared_to_global_d |

Steps 1, 2 and 4 to 6 are those of `singlestage`. CUTLASS calls this main loop ``MainloopSm80CpAsync``.
"""

from __future__ import annotations

from typing import Any

from gemmkit.component_products import of_part, of_product
from gemmkit.kernels.common.work import Input, Inputs, Place, Work
from gemmkit.kernels.simt.kernel import load_c, start_from_nothing, store_d
from gemmkit.lang.registers import registers
from gemmkit.ptx.memory import shared
from gemmkit.ptx.opaque import opaque
from gemmkit.ptx.special import barrier, rolled, thread_index, udiv, uniform


def multistage(spec: Any, a: Any, b: Any, c: Any, d: Any, shape: Any) -> None:
    """D = A B + C for one tile of D, or for the parts of tiles that are a block's; see the module's table. Launched with as
    many blocks of ``spec.threads`` as the scheduler says."""
    if spec.scheduler.stays:
        at, step = spec.scheduler.begin(), spec.scheduler.step()
        while at < spec.scheduler.end(shape):
            compute_part(of_part(spec, at), opaque(a), opaque(b), opaque(c), opaque(d), shape)
            barrier()                                  # D has been read from shared memory: the next part may take its place
            at = rolled(spec.scheduler.following(at, step))
    else:
        compute_part(spec, a, b, c, d, shape)


def compute_part(spec: Any, a: Any, b: Any, c: Any, d: Any, shape: Any) -> None:
    # 0. Which product of a stack is this block's, and which tile of it?
    batch, tile = spec.scheduler.product(spec.scheduler.first())
    stack = spec.scheduler.stack
    compute_tile(of_product(spec, batch), stack.a.matrix(a, batch), stack.b.matrix(b, batch), stack.c.matrix(c, batch),
                 stack.d.matrix(d, batch), of_product(shape, batch), tile)


def compute_tile(spec: Any, a: Any, b: Any, c: Any, d: Any, shape: Any, tile: int) -> None:
    """All steps, for one tile of a product of two matrices."""
    # 0. Where is the tile, which share of K is this block's, and which warp is this thread's?
    rank = spec.scheduler.rank() if spec.is_split else 0      # without a split a block has K to itself
    block_m, block_n = spec.scheduler.place(tile, rank, shape)
    if spec.scheduler.order.gates:                     # operands arrive while the kernel runs
        spec.scheduler.order.await_tile(tile, -1)
    k_begin, k_tiles = spec.scheduler.k_tiles(spec, block_m, block_n, rank, shape)
    work = Work(block_m, block_n, 0, k_begin, k_tiles, rank)
    place = Place(work.m, work.n, shape.M, shape.N)
    warp = uniform(udiv(thread_index(), 32))
    accumulators = registers(spec.operator.fragment_c, spec.fragments_m, spec.fragments_n)

    # 1. and 2. C: global -> shared -> registers (or the start of the sum where there is no C, or another block takes it).
    if rank == 0:
        if spec.has_c:
            load_c(spec, accumulators, c, place, warp, shape)
        else:
            start_from_nothing(spec, accumulators)
    else:
        start_from_nothing(spec, accumulators)

    # 3. For every k-tile that can matter to these rows and columns (or this block's share of them): copy, multiply.
    spec.mainloop.run(spec, accumulators, Inputs(Input(a, None), Input(b, None)), work, warp, shape)

    # 4. The sums of blocks that share K become those of one, which finishes the tile.
    barrier()                                          # the last stage has been read: sums and D may take its place
    finishes = spec.scheduler.gather(spec, accumulators, rank) if spec.is_split else True
    if finishes:
        # 5. D: registers -> shared.
        d_shared = shared(spec.d.shared.dtype, 0)
        store_d(spec, accumulators, d_shared, place, warp)
        barrier()

        # 6. D: shared -> global.
        spec.epilogue.store(spec, d, d_shared, work.m, work.n, warp, shape)
