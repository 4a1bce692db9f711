"""The battery's products by the multistage kernel: rings that are gone around more than once, by both routes and both main loops."""

from __future__ import annotations

from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.epilogues import Bias
from gemmkit.layouts import ColMajor, RowMajor, Triangular
from gemmkit.operators import MIN_PLUS, FPUOp, MMAOp, WMMAOp
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.mutation.products import EMULATOR, Sometimes, case, equal, operands
from tests.support import sm80 as multistage
from tests.support.machines import poison
from tests.support.sm80 import KINDS, mapping
from tests.support.sm90 import F16, F32, ordered


def ring(kind: str, size: tuple[int, int, int], trans: str = "NN", seed: int | None = None, by: tuple[str, str] | None = None,
         **fields: Any) -> None:
    """A B; ``by`` are the routes that the operands must take."""
    operator = KINDS[kind]
    a, b = multistage.operands(np.random.default_rng(0), operator, *size)
    orders = [ColMajor if t == "T" else RowMajor for t in trans]
    conf = mapping(operator, *orders, **{**dict(warps=(1, 1), stages=2), **fields})
    if by is not None:
        given = [ordered(x, layout) for x, layout in ((a, conf.global_a_layout), (b, conf.global_b_layout))]
        assert multistage.routes(EMULATOR, conf, *given) == by
    equal(multistage.product(EMULATOR, conf, a, b, seed=seed), multistage.expected(operator, a, b))


@case
def ring_of_two() -> None:
    ring("f16", (20, 16, 104), by=("CpAsync 8", "CpAsync 8"))


@case
def ring_of_three_odd_steps() -> None:
    ring("f16", (20, 16, 200), "NT", steps=3, stages=3)


@case
def ring_of_one_step() -> None:
    ring("f16", (16, 8, 72), steps=1, stages=3)


@case
def ring_of_four_parts() -> None:
    """Copies are dealt over the steps, and every thread has several of each operand."""
    ring("f16", (32, 24, 200), "TT", steps=4, warps=(2, 1), mem_a_thread=Tile(M=4, K=1), mem_a_warp=Tile(M=32, K=8),
         mem_b_thread=Tile(K=4, N=1), mem_b_warp=Tile(K=32, N=8))


@case
def ring_staged() -> None:
    """Elements of two bytes at odd addresses: loads before the products, stores behind them."""
    ring("f16", (19, 13, 101), by=("StagedByThreads", "StagedByThreads"), stages=3, steps=4)
    ring("f16", (19, 13, 101), "NT", steps=2, mem_a_thread=Tile(M=1, K=2), mem_a_warp=Tile(M=4, K=32), mem_b_thread=Tile(K=2, N=1), mem_b_warp=Tile(K=32, N=4))


@case
def ring_staged_in_turn() -> None:
    """A thread cannot hold all that it copies."""
    ring("f16", (16, 13, 101), block_shape=Tile(M=64, N=32, K=32), compute_warp=Tile(M=64, N=32, K=32))


@case
def ring_transformed() -> None:
    """A by registers with coordinates, and both in registers behind the stage; a bias."""
    a, b, _ = operands(20, 16, 72)
    conf = mapping(MMAOp(), stages=3, warps=(1, 1), transform_global_to_shared_a=Map(lambda x, i, j: x + i % 3 - j % 2),
                   transform_shared_to_regs_a=Map(lambda x, i, j: x - i % 5 + j % 3),
                   transform_shared_to_regs_b=Map(lambda x, i, j: x + i % 2 + j % 3), epilogue=Bias(np.arange(16, dtype=F32)))
    i, j = np.indices(a.shape)
    k, n = np.indices(b.shape)
    equal(multistage.product(EMULATOR, conf, a, b),
          (a.astype("f8") + i % 3 - j % 2 - i % 5 + j % 3) @ (b.astype("f8") + k % 2 + n % 3) + np.arange(16))


@case
def ring_fpu() -> None:
    """An element a copy for what lies across, four for what does not."""
    ring("f32", (20, 20, 44), steps=8, stages=3, by=("CpAsync 1", "CpAsync 4"))


@case
def ring_fpu_across() -> None:
    ring("f32", (19, 20, 45), "TT", steps=8, by=("CpAsync 1", "CpAsync 1"))


@case
def ring_fpu_in_any_order() -> None:
    for seed in range(2):
        ring("f32", (16, 16, 40), steps=8, warps=(1, 2), seed=seed)


@case
def ring_dmma() -> None:
    """Fragments in the step that multiplies them."""
    ring("f64 by dmma", (20, 12, 76), steps=3, stages=3)
    ring("f64 by 8x8x4", (9, 12, 26), "TN", steps=2)


@case
def ring_dmma_staged() -> None:
    """An operand by registers around products whose fragments are fetched in their step."""
    a, b, _ = operands(19, 13, 52, np.dtype("f8"))
    conf = mapping(KINDS["f64 by dmma"], steps=2, stages=2, warps=(1, 1), transform_global_to_shared_a=Map(lambda x, i, j: x + i % 3 - j % 2))
    i, j = np.indices(a.shape)
    equal(multistage.product(EMULATOR, conf, a, b), (a + i % 3 - j % 2) @ b)


@case
def ring_complex() -> None:
    ring("c128", (18, 10, 20), steps=2)
    ring("c64", (10, 18, 20), steps=4, stages=3)


@case
def ring_of_parts() -> None:
    ring("dual", (10, 18, 12), steps=4)


@case
def ring_min_plus() -> None:
    """Infinity beyond the edges: copies that are out of range store it."""
    operator = MIN_PLUS.sized(dict(M=16, N=16, MB=4, NB=8), F32, F32, F32)
    for size, trans in (((20, 20, 44), "TN"), ((17, 19, 21), "NT")):
        a, b, c = (20 + x for x in operands(*size, F32))
        conf = mapping(operator, *(ColMajor if t == "T" else RowMajor for t in trans), steps=8, warps=(1, 1),
                       global_c_layout=RowMajor(F32))
        equal(multistage.product(EMULATOR, conf, a, b, c), np.minimum((a[:, :, None] + b[None]).min(1), c))


@case
def ring_sometimes() -> None:
    """The copies that are ahead leave out the k-tiles that the rounds leave out."""
    for operator, steps, dtype in ((MMAOp(), 1, F16), (FPUOp(32, 16), 16, F32)):
        a, b, _ = operands(80, 16, 136, dtype)
        conf = mapping(operator, steps=steps, stages=3, block_shape=Tile(M=64, N=16, K=16), compute_warp=Tile(M=32, N=16, K=16), condition=Sometimes())
        m, k = np.indices(a.shape)
        equal(multistage.product(EMULATOR, conf, a, b), np.where((m // 64 + k // 16) % 2 == 0, a.astype("f8"), 0) @ b)


@case
def ring_by_triangle() -> None:
    a, b, _ = operands(40, 16, 40, F32)
    conf = mapping(FPUOp(16, 16), Triangular(RowMajor(F32), "upper"), RowMajor(F32), steps=8, warps=(1, 1))
    equal(multistage.product(EMULATOR, conf, a, b), np.triu(a.astype("f8")) @ b)


@case
def ring_splits() -> None:
    """With a C, which one block takes; the other ends in the first stage."""
    for k in (104, 8):
        a, b, c = operands(18, 10, k)
        c = c.astype(F32)
        conf = mapping(MMAOp(), steps=1, stages=2, warps=(1, 2), splits=2, global_c_layout=RowMajor(F32))
        equal(multistage.product(EMULATOR, conf, a, b, c), a.astype("f8") @ b + c)


@case
def ring_streamed() -> None:
    """Tiles that begin in one block and end in another, in two and in three; whole ones between; with a C."""
    for rows, blocks in ((5 * 16, 3), (2 * 16, 5)):
        a, b, c = operands(rows - 3, 7, 104)
        c = c.astype(F32)
        conf = mapping(MMAOp(), steps=1, stages=2, warps=(1, 1), splits=gk.kernels.StreamK(blocks=blocks), global_c_layout=RowMajor(F32))
        equal(multistage.product(EMULATOR, conf, a, b, c), a.astype("f8") @ b + c)


@case
def ring_opaque() -> None:
    """An operator that does not say where its loads begin."""
    a, b, _ = operands(19, 20, 40)
    conf = mapping(WMMAOp(), steps=1, stages=2, warps=(1, 1))
    equal(multistage.product(EMULATOR, conf, a, b), a.astype("f8") @ b)


@case
def ring_of_a_stack() -> None:
    a, b = operands(2 * 18, 10, 40)[0].reshape(2, 18, 40), operands(40, 2 * 10, 20)[0].reshape(2, 40, 10)
    out = poison((2, 18, 10), F32)
    with gk.emulate():
        gk.matmul(a, b, None, mapping(MMAOp(), steps=1, warps=(1, 1)), out=out)
    equal(out, a.astype("f8") @ b)


__all__ = ["ring"]
