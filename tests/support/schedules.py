"""Schedules for tests: Fireiron's maxwell one for 64 x 64 blocks of two warps, with what a test wants otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.specs.products import swizz
from gemmkit.specs.schedule import (
    FR,
    GL,
    RF,
    SH,
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
from tests.support.harness import aligned


def maxwell(*, end: Any = None, split_sync: bool = True, b_sync: bool = True, pad: int = 4, swizzle: Any = swizz, end_swizzle: Any = None,
            end_tile: Any = ((4, 32), (4, 16)), storage: Any = (ColMajor, RowMajor), block: tuple = (64, 64), prefetch: bool = False,
            b_swizzle: Any = None, b_layout: Any = None, through: str = "") -> Any:
    """The listing; its epilogue by the same strided tiles. ``block`` is 64 x 64, 128 x 64 or 64 x 128; ``through`` names the operands
    that are prefetched by registers."""
    m, n = block
    warps = m // 64 * (n // 32)
    if end is None:
        end = (Move.tile(64, 32).to(Warp).tile(*end_tile).to(Thread).layout(ColMajor).swizzle(end_swizzle or swizzle)
               .tile(4, 1).unroll.done)
    steps = (MatMul(M, N, K)(GL, GL, GL)(Kernel).tile(m, n).to(Block).layout(ColMajor)
             .accumulate_in(RF, Init.tile(64, 32).to(Warp).tile(8, 8).to(Thread).tile(1, 1).unroll.done, end)
             .split(8))
    steps = steps.sync if split_sync else steps
    steps = steps.move(A, SH, Move.tile(m, 8 // warps).to(Warp).tile(64, 1).unroll.tile(2, 1).to(Thread).layout(ColMajor).done)
    steps = steps.storage(storage[0]).no_sync
    steps = steps.prefetch if prefetch else steps
    steps = steps.through(RF) if "a" in through else steps
    steps = steps.move(B, SH, Move.tile(8, n // warps).to(Warp).tile(8, 4).unroll.tile(1, 1).to(Thread).layout(ColMajor).done)
    steps = steps.storage(storage[1]).pad(pad) if b_layout is None else steps.layout(b_layout)
    steps = steps if b_swizzle is None else steps.swizzle(b_swizzle)
    steps = steps if b_sync else steps.no_sync
    steps = steps.prefetch if prefetch else steps
    steps = steps.through(RF) if "b" in through else steps
    return (steps.tile(64, 32).to(Warp).tile((4, 32), (4, 16)).to(Thread).layout(ColMajor).swizzle(swizzle)
            .split(1).unroll.move(A, RF, Move.tile(4, 1).unroll.done).move(B, RF, Move.tile(1, 4).unroll.done).tile(1, 1).unroll.done)


#: A move to shared memory as a test wants it: of the step, what refines it.
Refined = Callable[[Any], Any]


def tensor_cores(a: Refined, b: Refined, *, block: tuple[int, int, int] = (128, 128, 64), warp: tuple[int, int] = (64, 32), end: Any = None) -> Any:
    """A row-major, B column-major, of 16 bits; sums go straight to global memory. ``a`` and ``b`` refine the moves to shared memory."""
    (m, n, k), (rows, columns) = block, warp
    warps = m // rows * (n // columns)
    end = end or Move.tile(*warp).to(Warp).tile(16, 16).unroll.done
    steps = (MatMul(M, N, K)(GL, GL, GL)(Kernel).tile(m, n).to(Block)
             .accumulate_in(FR, Init.tile(*warp).to(Warp).tile(16, 16).unroll.done, end)
             .split(k).sync)
    lines = 32 * 8 // k                                          # that a warp moves at once, 16 bytes a thread
    steps = a(steps.move(A, SH, Move.tile(m // warps, k).to(Warp).tile(lines, k).unroll.tile(1, 8).to(Thread).done).no_sync)
    steps = b(steps.move(B, SH, Move.tile(k, n // warps).to(Warp).tile(k, lines).unroll.tile(8, 1).to(Thread).layout(ColMajor).done))
    return (steps.tile(*warp).to(Warp).split(16).unroll.move(A, FR, Move.tile(16, 16).unroll.done)
            .move(B, FR, Move.tile(16, 16).unroll.done).tile(16, 16).done)


def operands(m: int, n: int, k: int, dtype: Any = np.float32, orders: str = "FFF", seed: int = 0) -> tuple[Any, Any, Any]:
    """A, B and room for C, in these orders, at aligned addresses."""
    rng = np.random.default_rng(seed)
    a, b = (aligned(np.asarray(rng.standard_normal(extents).astype(dtype), order=order))             # type: ignore[call-overload]
            for extents, order in (((m, k), orders[0]), ((k, n), orders[1])))
    return a, b, aligned(np.asarray(np.full((m, n), np.nan, np.float32), order=orders[2]))           # type: ignore[call-overload]
