"""The products that mutants must get wrong, or be caught at: as small as they can be, and together in every part of the kernels.

Each is computed by one cluster (or two) that has several tiles and goes around its ring of stages more than once. Values are small
whole numbers, so every result is exactly right or wrong; what is not written is NaN. Those of the single-stage kernel, and what is
refused, are in `single`; those that lanes, warps and blocks finish together in `finishing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.epilogues import Bias, LinearCombination, ReLU
from gemmkit.kernels.collectives.scheduler import Order
from gemmkit.kernels.sm90.mainloop import RegisterMainloop
from gemmkit.kernels.sm90.rewrite import DeinterleaveProducer
from gemmkit.kernels.sm90.routes import CpAsyncProducer, StagedProducer
from gemmkit.layouts import ColMajor, Interleaved, RowMajor, Swizzled, Triangular
from gemmkit.operators import COMPLEX, DUAL, Algebra, WGMMAOp
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.kernels.sm90 import test_algebras, test_cp_async, test_registers
from tests.mutation import families, finishing, moves, ring, shares, single
from tests.mutation.products import (
    CASES,
    EMULATOR,
    Sometimes,
    WrongResult,
    case,
    equal,
    multiprocessors,
    operands,
    pairs,
    plain,
    product_of,
)
from tests.support.algebras import product64
from tests.support.machines import E4M3, poison
from tests.support.sm90 import F16, F32, mapping, product

# -- warp_specialised: by TMA ----------------------------------------------------------------------------------

@case
def tma() -> None:
    plain("one", (40, 40, 56))


@case
def tma_deep() -> None:
    plain("one", (72, 16, 72), WGMMAOp(16), depth=32, stages=3, a=ColMajor, b=ColMajor)


@case
def panels_of_a() -> None:
    """Rows of A in several panels, of which an instruction reads all."""
    plain("one", (72, 16, 40), WGMMAOp(16), a=ColMajor, shared_a_layout=Swizzled(ColMajor(F16), 32))


@case
def two_consumers() -> None:
    plain("two", (136, 16, 40), WGMMAOp(16))


@case
def fragments() -> None:
    plain("one", (136, 16, 40), WGMMAOp(16), block_shape=Tile(M=128, N=16, K=16))


@case
def pingpong() -> None:
    plain("pingpong", (64 * 3, 16, 40), WGMMAOp(16))


@case
def pingpong_one_stage_more() -> None:
    plain("pingpong", (64 * 4, 16, 40), WGMMAOp(16), stages=4)


@case
def pingpong_in_any_order() -> None:
    for seed in range(3):
        plain("pingpong", (64 * 3, 16, 40), WGMMAOp(16), seed=seed)


@case
def cluster_rows() -> None:
    plain("one-2x1", (128, 40, 40))


@dataclass(frozen=True)
class Listed(Order):
    """Tiles of one column, in an order that an array gives: there must be as many of them as it has rows."""

    rows: Any

    def block(self, linear, rows, columns):
        return self.rows[linear], 0


@case
def cluster_columns() -> None:
    plain("one-1x2", (72, 64, 24), order=Listed(np.array([1, 0], np.int32)))


@case
def cluster_of_four() -> None:
    plain("two-2x2", (256, 64, 72), depth=16)


@case
def splits_of_three() -> None:
    """Three consumers exchange sums, each with those of the other block."""
    plain("three", (192, 32, 72), WGMMAOp(32), depth=16, splits=2, shared_d_layout=Swizzled(RowMajor(F32), 32))


@case
def cluster_pingpong() -> None:
    plain("pingpong-1x2", (136, 64, 24))


@case
def half_sums() -> None:
    plain("one", (64, 32, 40), WGMMAOp(32, accumulator=F16), d=RowMajor(F16))


@case
def columns_of_d() -> None:
    plain("one", (72, 24, 24), WGMMAOp(32), d=ColMajor(F16))


@case
def columns_of_wide_d() -> None:
    plain("one", (72, 24, 24), WGMMAOp(32), d=ColMajor(F32))


@case
def odd_columns() -> None:
    """D leaves from the registers, element by element."""
    plain("one", (67, 13, 24), WGMMAOp(16), d=RowMajor(F16))


@case
def promoted() -> None:
    plain("one", (64, 40, 80), WGMMAOp(32, E4M3, promote=32), E4M3, b=ColMajor)


@case
def promoted_portions() -> None:
    plain("one", (64, 32, 160), WGMMAOp(32, E4M3, promote=64), E4M3, b=ColMajor)


@case
def epilogue() -> None:
    """C, transforms of C and D, a bias; N is odd."""
    t = np.arange(67).astype(F32) % 3
    for n in (16, 13):
        a, b, c = operands(67, n, 16)
        c, bias = c.astype(F32), np.arange(n, dtype=F32)
        conf = mapping("one", WGMMAOp(16), depth=16, stages=2, global_c_layout=RowMajor(F32), epilogue=Bias(bias) | ReLU(),
                       transform_regs_to_shared_d=Map(lambda x, i, j: x + t[i] - j % 5))
        i, j = np.indices((67, n))
        equal(product(EMULATOR, conf, a, b, c), (a.astype("f8") @ b + c + i % 3 - j % 5 + bias).clip(0))


@case
def c_ahead() -> None:
    """C and a residual in D's subtiles: as many a tile as fill the buffers unevenly, some out of range, and none with beta=0."""
    for schedule, (m, n) in (("one", (72, 168)), ("pingpong", (136, 72))):
        a, b, c = operands(m, n, 16)
        rows = 128 if schedule == "one" else 64                  # two fragments of three subtiles, or one
        conf = mapping(schedule, WGMMAOp(96), block_shape=Tile(M=rows, N=96, K=16), stages=2, d=RowMajor(F16),
                       global_c_layout=RowMajor(F16))
        equal(product(EMULATOR, conf, a, b, c.astype(F16)), a.astype("f8") @ b + c)
    a, b, c = operands(136, 24, 16)
    for beta in (2.0, 0.0):
        c = c.astype(F16) if beta else np.full_like(c, np.nan, F16)
        conf = mapping("one", depth=16, stages=2, d=RowMajor(F16), epilogue=ReLU() | LinearCombination(3.0, beta, c, RowMajor(F16)))
        equal(product(EMULATOR, conf, a, b), 3 * (a.astype("f8") @ b).clip(0) + (beta * c if beta else 0))


@case
def c_ahead_of_nothing() -> None:
    """A fragment out of range, and a subtile that begins where D ends: what comes for them counts as stored, tile after tile."""
    for schedule, m in (("one", 40), ("three", 140)):
        a, b, c = operands(m, 128, 16)
        conf = mapping(schedule, WGMMAOp(96), block_shape=Tile(M=128 if m == 40 else 192, N=96, K=16), stages=2, d=RowMajor(F16),
                       global_c_layout=RowMajor(F16))
        equal(product(EMULATOR, conf, a, b, c.astype(F16), seed=1), a.astype("f8") @ b + c)
    a, b, c = operands(140, 96, 16)                    # two subtiles a tile: the next tile's first one may follow one that is left out
    conf = mapping("one", WGMMAOp(64), depth=16, stages=2,
                   epilogue=ReLU() | LinearCombination(3.0, 0.0, np.full_like(c, np.nan, F32), RowMajor(F32)))
    equal(product(EMULATOR, conf, a, b), 3 * (a.astype("f8") @ b).clip(0))


@case
def c_of_fragments_out_of_range() -> None:
    """C is D; a consumer, and a consumer's second fragment, have no rows: they do not read what others store."""
    for schedule, rows in (("two", 128), ("one", 128)):
        a, b, c = operands(40, 14, 16)
        c = c.astype(F32)
        expected = a.astype("f8") @ b + c
        conf = mapping(schedule, WGMMAOp(16), block_shape=Tile(M=rows, N=16, K=16), stages=2, global_c_layout=RowMajor(F32))
        with gk.emulate():
            gk.matmul(a, b, c, conf, out=c)
        equal(c, expected)
    a, b, _ = operands(40, 96, 16)                     # the next tile's first subtile may follow one that is left out
    conf = mapping("one", WGMMAOp(32), block_shape=Tile(M=128, N=32, K=16), stages=2, epilogue=Bias(np.ones(96, F32)))
    equal(product(EMULATOR, conf, a, b), a.astype("f8") @ b + 1)


@case
def splits() -> None:
    a, b, _ = operands(40, 24, 48)
    equal(product(EMULATOR, mapping("one", WGMMAOp(16), depth=16, stages=2, splits=2), a, b), a.astype("f8") @ b)


# -- warp_specialised: by the producer's warps ------------------------------------------------------------------------

@case
def splits_of_two_consumers() -> None:
    a, b, _ = operands(128, 32, 32)
    equal(product(EMULATOR, mapping("two", WGMMAOp(32), depth=16, stages=2, splits=2), a, b), a.astype("f8") @ b)


@case
def warps() -> None:
    plain("one", (67, 19, 35), WGMMAOp(16))


@case
def warps_hold() -> None:
    plain("one", (64, 36, 76), stages=3)


@case
def warps_masked() -> None:
    """Threads' tiles are in range or out of it; lines begin anywhere."""
    a, b, _ = operands(72, 35, 43)
    a, out = a[:, :40], poison((72, 32), F32)
    with gk.emulate():
        gk.matmul(a, b[:40, :32], None, mapping("one", depth=16, stages=2), out=out)
    equal(out, a.astype("f8") @ b[:40, :32])


@case
def warps_beside_tma() -> None:
    a, b, _ = operands(128, 36, 48)
    conf = mapping("one", depth=16, stages=2,
                   transform_global_to_shared_b=Map(lambda x, i, j: x + i % 3 - j % 2))
    i, j = np.indices(b.shape)
    equal(product(EMULATOR, conf, a, b), a.astype("f8") @ (b.astype("f8") + i % 3 - j % 2))


@case
def warps_across() -> None:
    plain("one", (72, 36, 40), stages=3, a=ColMajor, depth=32)


@case
def warps_transform() -> None:
    a, b, _ = operands(68, 12, 44)
    conf = mapping("one", WGMMAOp(16), depth=32, stages=2, transform_global_to_shared_b=Map(lambda x: x + 1),
                   transform_global_to_shared_a=Map(lambda x, i, j: x + i % 3 - j % 2))
    i, j = np.indices(a.shape)
    equal(product(EMULATOR, conf, a, b), (a.astype("f8") + i % 3 - j % 2) @ (b.astype("f8") + 1))


@case
def warps_convert() -> None:
    """An operand of another dtype, in lines that are as long in global memory as two stores."""
    a, b, _ = operands(64, 16, 40)
    given = dict(depth=16, stages=2, transform_global_to_shared_a=Map(lambda x: np.float16(x + 1)))
    for dtype, fields in ((F32, {}), (E4M3, dict(mem_a_thread=Tile(M=1, K=16), mem_a_warp=Tile(M=32, K=16)))):
        conf = mapping("one", WGMMAOp(16), global_a_layout=RowMajor(dtype), **given, **fields)
        equal(product_of(conf, a.astype(dtype), b), (a.astype("f8") + 1) @ b)


@case
def warps_in_long_lines() -> None:
    plain("one", (64, 16, 41), WGMMAOp(16), mem_a_thread=Tile(M=1, K=16), mem_a_warp=Tile(M=32, K=16))


@case
def in_pairs() -> None:
    """By the producer's warps, in place, and by registers."""
    for n, which in ((36, "b"), (32, "b"), (32, "a")):
        a, b, _ = operands(64, n, 16)
        conf = mapping("one", depth=16, stages=2, **{f"transform_global_to_shared_{which}": Map(lambda x: x + 1)})
        with pairs():
            equal(product(EMULATOR, conf, a, b), (a.astype("f8") + (which == "a")) @ (b.astype("f8") + (which == "b")))


@case
def warps_pingpong() -> None:
    plain("pingpong", (128, 13, 21), WGMMAOp(16))


@case
def by_triangle() -> None:
    """Masked in place; K begins and ends by the tile."""
    a, b, _ = operands(88, 16, 88)
    conf = mapping("one", WGMMAOp(16), depth=32, stages=3, global_a_layout=Triangular(RowMajor(F16), "upper"))
    equal(product_of(conf, a, b), np.triu(a.astype("f8")) @ b)


@case
def in_place() -> None:
    """Two tiles, whose last subtile leaves from in front of the barriers."""
    a, b, _ = operands(72, 40, 56)
    t, u = np.arange(56).astype(F16) % 3, np.arange(40).astype(F16) % 2
    conf = mapping("one", WGMMAOp(64), depth=16, stages=4, transform_global_to_shared_b=Map(lambda x, k, n: x + t[k] - u[n]))
    equal(product(EMULATOR, conf, a, b), a.astype("f8") @ (b.astype("f8") + t[:, None] - u))


@case
def in_place_by_place() -> None:
    a, b, _ = operands(128, 32, 64)
    conf = mapping("one-2x1", depth=32, stages=2, transform_global_to_shared_a=Map(lambda x, i, j: x + i % 3 - j % 2))
    i, j = np.indices(a.shape)
    equal(product(EMULATOR, conf, a, b), (a.astype("f8") + i % 3 - j % 2) @ b)


@case
def in_place_by_teams() -> None:
    a, b, _ = operands(64, 32, 16 * 9)
    conf = mapping("one", depth=16, stages=6, transform_global_to_shared_b=Map(lambda x: x + 1))
    equal(product(EMULATOR, conf, a, b), a.astype("f8") @ (b.astype("f8") + 1))


@case
def turned() -> None:
    plain("one", (64, 40, 40), WGMMAOp(32, F32), F32, depth=32, stages=2)


@case
def turned_in_several_tiles() -> None:
    """A thread has several tiles of its warp's."""
    plain("one", (64, 40, 40), WGMMAOp(32, F32), F32, depth=32, stages=2, mem_b_thread=Tile(K=4, N=1), mem_b_warp=Tile(K=16, N=16))


@case
def turned_a() -> None:
    """A of 32-bit elements across K goes by the consumers' registers."""
    plain("one", (72, 32, 72), WGMMAOp(32, F32), F32, depth=32, stages=2, a=ColMajor, b=ColMajor)


@case
def triangle_of_b() -> None:
    """Which part of K matters follows from the columns."""
    b = np.triu(operands(40, 40, 40)[1][:40, :40])
    a = operands(64, 40, 40)[0]
    conf = mapping("one", WGMMAOp(16), depth=16, stages=2, global_b_layout=Triangular(RowMajor(F16), "upper"))
    equal(product(EMULATOR, conf, a, b), a.astype("f8") @ b.astype("f8"))


@case
def turned_transformed() -> None:
    a, b, _ = operands(64, 32, 72, F32)
    conf = mapping("one", WGMMAOp(32, F32), depth=32, stages=3, transform_global_to_shared_b=Map(lambda x: x + 1))
    equal(product(EMULATOR, conf, a, b), a.astype("f8") @ (b.astype("f8") + 1))


@case
def sometimes() -> None:
    a, b, _ = operands(128, 16, 80)
    conf = mapping("one", WGMMAOp(16), depth=16, stages=2, condition=Sometimes())
    m, k = np.indices(a.shape)
    equal(product(EMULATOR, conf, a, b), np.where((m // 64 + k // 16) % 2 == 0, a.astype("f8"), 0) @ b)


@case
def gathered() -> None:
    a, b = test_cp_async.operands(np.random.default_rng(0), 40, 24, 72)
    for fast, fields in (((1, 1), {}), ((0, 0), dict(d_fast=2))):
        d, plan = test_cp_async.run(EMULATOR, a, b, fast=fast, operator=WGMMAOp(32), **fields)
        assert isinstance(plan._compiled.spec.producer, CpAsyncProducer)
        equal(d, a.astype("f8") @ b)


@case
def gathered_beside_tma() -> None:
    a, b = test_cp_async.operands(np.random.default_rng(0), 40, 24, 136)
    d, _ = test_cp_async.run(EMULATOR, a, b, which="a", stages=2)
    equal(d, a.astype("f8") @ b)


# -- warp_specialised: A by registers, numbers of parts ---------------------------------------------------------------

@case
def by_registers() -> None:
    a, b, _ = operands(40, 32, 144)
    conf = mapping("one", WGMMAOp(16), depth=64, stages=2, transform_global_to_shared_a=Map(lambda x: x + 1))
    equal(product(EMULATOR, conf, a, b), (a.astype("f8") + 1) @ b)


@case
def by_registers_in_a_cluster() -> None:
    """Warps tell the blocks that share B when they have read A."""
    a, b, _ = operands(130, 32, 40)
    conf = mapping("one-2x1", WGMMAOp(32), depth=16, stages=2, transform_global_to_shared_a=Map(lambda x: x + 1))
    equal(product(EMULATOR, conf, a, b), (a.astype("f8") + 1) @ b)


@case
def by_registers_one_step() -> None:
    a, b, _ = operands(72, 16, 56)
    conf = mapping("one", WGMMAOp(16), depth=16, stages=3, a=ColMajor,
                   transform_global_to_shared_a=Map(lambda x, i, j: x + i % 3 - j % 5))
    i, j = np.indices(a.shape)
    equal(product(EMULATOR, conf, a, b), (a.astype("f8") + i % 3 - j % 5) @ b)


@case
def by_registers_two_steps() -> None:
    a, b, _ = operands(128, 16, 72)
    conf = mapping("one", WGMMAOp(16), depth=32, stages=2, block_shape=Tile(M=128, N=16, K=32),
                   transform_global_to_shared_a=Map(lambda x, i, j: x + i % 3 - j % 5))
    i, j = np.indices(a.shape)
    equal(product(EMULATOR, conf, a, b), (a.astype("f8") + i % 3 - j % 5) @ b)


@case
def by_registers_to_the_end_of_k() -> None:
    """What a transform makes of the zeros beyond K is no number."""
    if not test_registers.reciprocals(EMULATOR, 45, RowMajor, np.random.default_rng(0)):
        raise WrongResult("beyond K")


def numbers(algebra: Algebra, size: tuple[int, int, int], conf: Any, orders: str = "NN",
            by_registers: bool = False, **fields: Any) -> None:
    rng = np.random.default_rng(0)
    M, N, K = size
    a, b = (test_algebras.whole(rng, *shape, algebra.parts, order)
            for shape, order in zip(((M, K), (K, N)), orders))
    d, plan = test_algebras.run(EMULATOR, a, b, conf=conf, **fields)
    spec = plan._compiled.spec
    assert isinstance(spec.producer, (DeinterleaveProducer, StagedProducer))
    assert isinstance(spec.mainloop, RegisterMainloop) == by_registers
    equal(d, product64(algebra, a, b))


@case
def numbers_by_registers() -> None:
    numbers(COMPLEX, (36, 20, 40), test_algebras.small(COMPLEX), by_registers=True)


@case
def numbers_by_registers_across() -> None:
    conf = test_algebras.small(DUAL, N=32, global_b_layout=Interleaved(DUAL.number_dtype("f2"), "col"), stages=3)
    numbers(DUAL, (36, 12, 52), conf, "NT", by_registers=True)


@case
def numbers_of_a_narrow_b() -> None:
    """In lines of eight along K, in the order of registers, not every warp would have a part of B: so A does not go by registers."""
    conf = test_algebras.small(DUAL, global_b_layout=Interleaved(DUAL.number_dtype("f2"), "col"), stages=3)
    numbers(DUAL, (36, 12, 52), conf, "NT")


@case
def numbers_that_land_sometimes() -> None:
    """The copies that are ahead leave out the k-tiles that the condition leaves out."""
    conf = test_algebras.small(COMPLEX, global_a_layout=Interleaved(COMPLEX.number_dtype("f2"), "col"),
                                                global_b_layout=Interleaved(COMPLEX.number_dtype("f2"), "col"), stages=3,
                                                condition=Sometimes(), block_shape=Tile(M=64, N=16, K=16))
    rng = np.random.default_rng(0)
    a, b = (test_algebras.whole(rng, *shape, 2, order="T") for shape in ((68, 72), (72, 12)))
    d, _ = test_algebras.run(EMULATOR, a, b, conf=conf)
    m, k = np.indices(a.shape[:2])
    equal(d, product64(COMPLEX, a * ((m // 64 + k // 16) % 2 == 0)[..., None], b))


@case
def numbers_that_land() -> None:
    conf = test_algebras.small(COMPLEX, global_a_layout=Interleaved(COMPLEX.number_dtype("f2"), "col"),
                                                global_b_layout=Interleaved(COMPLEX.number_dtype("f2"), "col"), stages=3)
    numbers(COMPLEX, (36, 20, 72), conf, "TT")


@case
def numbers_that_land_and_change() -> None:
    """Both operands by TMA, taken apart by two teams, which transform: one by place, one makes something of the zeros where
    the operand ends."""
    order = dict(global_a_layout=Interleaved(COMPLEX.number_dtype("f2"), "col"),
                 global_b_layout=Interleaved(COMPLEX.number_dtype("f2"), "col"))
    conf = test_algebras.small(COMPLEX, **order, stages=2,
                                                transform_global_to_shared_a=Map(lambda x, i, j: x * (1 + i % 3 - j % 2)),
                                                transform_global_to_shared_b=Map(lambda x: (1 / x[0], x[1])))
    rng = np.random.default_rng(0)
    a, b = (test_algebras.whole(rng, *shape, 2, order="T") for shape in ((68, 20), (20, 12)))
    b[..., 0] = 1 - b[..., 0] % 2 / 2                  # of which the reciprocals are exact
    d, plan = test_algebras.run(EMULATOR, a, b, conf=conf)
    assert plan._compiled.spec.producer.splits_a and plan._compiled.spec.producer.splits_b
    i, j = np.indices(a.shape[:2])
    equal(d, product64(COMPLEX, a * (1 + i % 3 - j % 2)[..., None], np.stack([1 / b[..., 0], b[..., 1]], -1)))


@case
def numbers_by_warps() -> None:
    numbers(DUAL, (33, 15, 37), test_algebras.small(DUAL))


# -- derived programs ---------------------------------------------------------------------------------------------------

def of_program(name: str) -> None:
    """A text of `tests.mutation.derived`, which calls the collectives of `gemmkit.programs`."""
    from tests.mutation import derived  # which takes its processes from `running`, and that takes the battery

    if not derived.is_right(name):
        raise WrongResult(name)


for name in ("GEMM", "dual", "clusters", "columns", "attention", "attention in turns", "multistage GEMM", "multistage loops", "multistage attention",
             "multistage MLP", "MLP"):
    CASES[f"program {name}"] = partial(of_program, name)


def run(name: str) -> None:
    """A case, by one multiprocessor: its blocks go on from tile to tile."""
    with multiprocessors():
        CASES[name]()


__all__ = ["CASES", "WrongResult", "families", "finishing", "moves", "multiprocessors", "ring", "run", "shares", "single"]
