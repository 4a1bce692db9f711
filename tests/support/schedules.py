"""Schedules for tests: Fireiron's maxwell one for 64 x 64 blocks of two warps, with what a test wants otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.specs.listings import swizz
from gemmkit.specs.schedule import (
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
            end_tile: Any = ((4, 32), (4, 16)), storage: Any = (ColMajor, RowMajor), block: tuple = (64, 64), prefetch: bool = False) -> Any:
    """The listing; its epilogue by the same strided tiles. ``block`` is 64 x 64, 128 x 64 or 64 x 128."""
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
    steps = steps.move(B, SH, Move.tile(8, n // warps).to(Warp).tile(8, 4).unroll.tile(1, 1).to(Thread).layout(ColMajor).done)
    steps = steps.storage(storage[1]).pad(pad)
    steps = steps if b_sync else steps.no_sync
    steps = steps.prefetch if prefetch else steps
    return (steps.tile(64, 32).to(Warp).tile((4, 32), (4, 16)).to(Thread).layout(ColMajor).swizzle(swizzle)
            .split(1).unroll.move(A, RF, Move.tile(4, 1).unroll.done).move(B, RF, Move.tile(1, 4).unroll.done).tile(1, 1).unroll.done)


def operands(m: int, n: int, k: int, dtype: Any = np.float32, orders: str = "FFF", seed: int = 0) -> tuple[Any, Any, Any]:
    """A, B and room for C, in these orders, at aligned addresses."""
    rng = np.random.default_rng(seed)
    a, b = (aligned(np.asarray(rng.standard_normal(extents).astype(dtype), order=order))             # type: ignore[call-overload]
            for extents, order in (((m, k), orders[0]), ((k, n), orders[1])))
    return a, b, aligned(np.asarray(np.full((m, n), np.nan, np.float32), order=orders[2]))           # type: ignore[call-overload]
