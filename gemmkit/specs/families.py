"""Schedules with their sizes as parameters, for `gemmkit.specs.schedule.explore`: what both listings of Fireiron's paper are
members of (`gemmkit.specs.listings`), and what its section 5 explores.

>>> from gemmkit.specs.schedule import explore
>>> variants = explore(tensor_cores, block=[(32, 32), (64, 64)], k=[32, 64], warp=[(16, 16), (16, 32)])
>>> print(len(variants), variants[1])
8 block=(32, 32) k=32 warp=(16, 32)
"""

from __future__ import annotations

from typing import Any

from gemmkit.specs.listings import swizz
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
)


def tensor_cores(block: tuple[int, int], k: int, warp: tuple[int, int], ahead: bool = False, occupancy: int = 1) -> Any:
    """``cuda_wmma_sample`` with other tiles: A row-major and B column-major, 16-bit floats; C row-major, float32.

    A block computes ``block`` in steps of ``k`` along K, a warp ``warp`` of it. ``ahead``: A and B come a step ahead, by
    cp.async (`.prefetch`). Threads follow from the tiles. Raises ScheduleError for sizes that are none.
    """
    (m, n), (wm, wn) = block, warp
    warps = max(1, m // wm * (n // wn))
    wide, deep = min(n, 128), min(k, 256)                     # of C and of A, B: a warp's at a time, 16 bytes a lane
    a = Move.tile(m // warps, k).to(Warp).tile(256 // deep, deep).unroll.tile(1, 8).to(Thread).done
    b = Move.tile(k, n // warps).to(Warp).tile(deep, 256 // deep).unroll.tile(8, 1).to(Thread).layout(ColMajor).done
    begin = Init.tile(wm, wn).to(Warp).tile(16, 16).unroll.done
    end = (Move.move(SRC, SH, Move.tile(wm, wn).to(Warp).tile(16, 16).unroll.done).pad(4)
        .tile(m // warps, n).to(Warp).tile(128 // wide, wide).unroll.tile(1, 4).to(Thread).done)
    steps = MatMul(M, N, K)(GL, GL, GL)(Kernel).tile(m, n).to(Block).occupancy(occupancy).accumulate_in(FR, begin, end)
    if ahead:
        steps = steps.split(k).move(A, SH, a).pad(8).prefetch.move(B, SH, b).pad(8).prefetch
    else:
        steps = steps.split(k).sync.move(A, SH, a).no_sync.pad(8).move(B, SH, b).pad(8)
    return (steps.tile(wm, wn).to(Warp)
        .split(16).unroll
        .move(A, FR, Move.tile(16, 16).unroll.done)
        .move(B, FR, Move.tile(16, 16).unroll.done)
        .tile(16, 16).done)


def multiply_adds(block: tuple[int, int] = (128, 128), k: int = 8, ahead: bool = False, occupancy: int = 1,
                  pad: int = 4) -> Any:
    """``maxwell_optimized`` with other tiles: all matrices column-major, float32. A warp computes 64 x 32 and a thread four
    pieces of 4 x 4, as there; the epilogue stores them without a micro-kernel, 16 bytes at a time, so that M and N may be
    any.

    Raises ScheduleError for sizes that are none.
    """
    m, n = block
    warps = max(1, m // 64 * (n // 32))
    tile = (4, 32), (4, 16)
    high = min(m, 128)                                        # of A: what a warp moves at a time, 16 bytes a thread
    a = Move.tile(m, k // warps).to(Warp).tile(high, 128 // high).unroll.tile(4, 1).to(Thread).layout(ColMajor).done
    b = Move.tile(k, n // warps).to(Warp).tile(k, 32 // k).unroll.tile(1, 1).to(Thread).layout(ColMajor).done
    begin = Init.tile(64, 32).to(Warp).tile(8, 8).to(Thread).tile(1, 1).unroll.done
    end = Move.tile(64, 32).to(Warp).tile(*tile).to(Thread).layout(ColMajor).swizzle(swizz).tile(4, 1).unroll.done
    steps = (MatMul(M, N, K)(GL, GL, GL)(Kernel)
        .tile(m, n).to(Block).layout(ColMajor).occupancy(occupancy)
        .accumulate_in(RF, begin, end))
    if ahead:
        steps = (steps.split(k).move(A, SH, a).storage(ColMajor).prefetch
                 .move(B, SH, b).storage(RowMajor).pad(pad).prefetch)
    else:
        steps = (steps.split(k).sync.move(A, SH, a).storage(ColMajor).no_sync
                 .move(B, SH, b).storage(RowMajor).pad(pad))
    return (steps.tile(64, 32).to(Warp)
        .tile(*tile).to(Thread).layout(ColMajor).swizzle(swizz)
        .split(1).unroll
        .move(A, RF, Move.tile(4, 1).unroll.done)
        .move(B, RF, Move.tile(1, 4).unroll.done)
        .tile(1, 1).unroll.done)
