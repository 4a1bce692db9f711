"""Fireiron's Listing 3 in Python, line for line: both schedules that the paper prints.

``cuda_wmma_sample`` is the CUDA sample's product by tensor cores (26 lines in the paper), ``maxwell_optimized`` one by
multiply-adds (44 with its micro-kernel). They take what the paper's take: of the first A row-major, B column-major, both
fp16, C fp32 and row-major; of the second all column-major, fp32. The second's micro-kernel wants M and N to be multiples of
128, and K of 8.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.ptx.memory import load_shared, shared, store_global, store_shared
from gemmkit.ptx.special import barrier, thread_index
from gemmkit.specs.accesses import read_registers
from gemmkit.specs.schedule import (
    FR,
    GL,
    RF,
    SH,
    SRC,
    A,
    B,
    Block,
    ColMajor,
    Init,
    K,
    Kernel,
    M,
    MatMul,
    Move,
    N,
    RowMajor,
    Thread,
    Warp,
    micro_kernel,
)

cuda_wmma_sample = (MatMul(M, N, K)(GL, GL, GL)(Kernel)
    # --- a block computes 128 x 128
    .tile(128, 128).to(Block)
    .accumulate_in(FR, Init                                         # init: WMMA fragments for C
        .tile(64, 32).to(Warp)
        .tile(16, 16).unroll.done,
        Move                                                        # epilogue in two steps, by SH
        .move(SRC, SH, Move                                         # 1: FR -> SH
            .tile(64, 32).to(Warp)
            .tile(16, 16).unroll.done)
        .tile(16, 128).to(Warp)                                     # 2: SH -> GL
        .tile(1, 128).unroll
        .tile(1, 4).to(Thread).done)
    .split(128).sync.unroll
    # --- A to SH
    .move(A, SH, Move
        .tile(16, 128).to(Warp)
        .tile(2, 128).unroll
        .tile(1, 8).to(Thread).done).no_sync.pad(8)
    # --- B to SH
    .move(B, SH, Move
        .tile(128, 16).to(Warp)
        .tile(128, 2).unroll
        .tile(8, 1).to(Thread).layout(ColMajor).done).pad(8)
    # --- warps
    .tile(64, 32).to(Warp)
    .split(16).unroll
    .move(A, FR, Move.tile(16, 16).unroll.done)
    .move(B, FR, Move.tile(16, 16).unroll.done)
    .tile(16, 16).done)                                             # MatMul(16,16,16)(FR,FR,FR)(Warp)


@micro_kernel(shared_bytes=16 * 128 * 4)
def store_cuda(source: Any, target: Any) -> None:
    """Sums stream through 128 x 16 of shared memory, a column of every thread's at a time, so that a warp writes 512 bytes
    of C that are neighbours. It knows which elements a thread has: the listing's strided tile, and its swizzle."""
    thread = thread_index()
    warp, lane = thread >> 5, swizz(thread & 31)
    row, column = warp // 4 * 64 + lane % 8 * 4, warp % 4 * 4 + lane // 8
    buffer = shared(np.float32, 0)
    for j in range(8):
        for i in range(2):
            store_shared(buffer, column * 128 + row, i * 32, read_registers(source.storage, (i * 4, j), (4, 1)))
        barrier()
        for half in range(2):
            line = half * 8 + warp
            values = load_shared(buffer, line * 128 + (thread & 31) * 4, 0, 4)
            at = target.base[0] + (thread & 31) * 4, target.base[1] + line // 4 * 32 + line % 4 * 4 + j // 4 * 16 + j % 4
            store_global(target.storage, 0, at, (0, 0), values)
        barrier()


def swizz(i: int) -> int:
    """A permutation of a warp's threads: none of eight neighbours reads from the banks of another."""
    return ((i >> 1) & 0x07) | (i & 0x30) | ((i & 0x01) << 3)


maxwell_optimized = (MatMul(M, N, K)(GL, GL, GL)(Kernel)
    # --- a block computes 128 x 128
    .tile(128, 128).to(Block).layout(ColMajor)
    # --- sums in RF, a micro-kernel for the epilogue
    .accumulate_in(RF, Init
        .tile(64, 32).to(Warp)
        .tile(8, 8).to(Thread)                                      # 64 registers a thread
        .tile(1, 1).unroll.done,
        Move.done(store_cuda))
    .split(8).sync
    # --- A to SH
    .move(A, SH, Move
        .tile(128, 1).to(Warp)
        .tile(64, 1).unroll                                         # in two steps
        .tile(2, 1).to(Thread).layout(ColMajor)
        .done).storage(ColMajor).no_sync
    # --- B to SH
    .move(B, SH, Move
        .tile(8, 16).to(Warp)
        .tile(8, 4).unroll
        .tile(1, 1).to(Thread).layout(ColMajor)
        .done).storage(RowMajor).pad(4)
    # --- warps and threads
    .tile(64, 32).to(Warp)
    .tile((4, 32), (4, 16)).to(Thread)
        .layout(ColMajor).swizzle(swizz)
    .split(1).unroll
    .move(A, RF, Move.tile(4, 1).unroll.done)
    .move(B, RF, Move.tile(1, 4).unroll.done)
    .tile(1, 1).unroll.done)                                        # MatMul(1,1,1)(RF,RF,RF)(Thread)
