"""The products that mutants must get wrong, or be caught at: as small as they can be, and together in every part of the kernels.

Each is computed by one cluster (or two) that has several tiles and goes around its ring of stages more than once. Values are small
whole numbers, so every result is exactly right or wrong; what is not written is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.epilogues import Bias, ReLU
from gemmkit.kernels.sm90.routes.cp_async import CpAsyncProducer
from gemmkit.kernels.sm90.routes.deinterleave import DeinterleaveProducer
from gemmkit.kernels.sm90.routes.staged import StagedProducer
from gemmkit.kernels.sm90.spec import Sm90Spec
from gemmkit.kernels.spec import Condition
from gemmkit.layouts import ColMajor, Interleaved, RowMajor, Swizzled, Triangular
from gemmkit.operators import COMPLEX, DUAL, Algebra, FPUOp, MMAOp, WGMMAOp
from gemmkit.tiling import Tile
from gemmkit.transforms import Elementwise
from tests import test_gather, test_shared_k, test_warp_specialised_algebras
from tests.hopper import F16, F32, mapping, ordered, product
from tests.machines import E4M3, MACHINES, poison, whole
from tests.test_algebras import product64

EMULATOR = MACHINES["emulator"]
CASES: dict[str, Callable[[], None]] = {}


class WrongResult(Exception):
    """A product that is not what NumPy says."""


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def few_blocks(clusters: int = 1) -> None:
    """So many clusters do everything."""
    Sm90Spec.blocks = lambda spec, M, N, sm_count: clusters * spec.cluster.size         # type: ignore[method-assign]


def equal(d: np.ndarray, expected: np.ndarray) -> None:
    if not np.array_equal(d, expected.astype(d.dtype)):
        raise WrongResult(f"{np.sum(d != expected.astype(d.dtype))} of {d.size} elements")


def operands(m: int, n: int, k: int, dtype: Any = F16) -> tuple:
    rng = np.random.default_rng(0)
    return tuple(whole(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))


def plain(schedule: str, size: tuple[int, int, int], operator: Any = None, dtype: Any = F16, seed: int | None = None,
          **fields: Any) -> None:
    """A B, both by the engine where sizes allow; with ``seed`` in an order of the threads that it draws."""
    a, b, _ = operands(*size, dtype)
    conf = mapping(schedule, operator, **{**dict(stages=2, depth=32 // dtype.itemsize), **fields})
    equal(product(EMULATOR, conf, a, b, seed=seed), a.astype("f8") @ b.astype("f8"))


# -- warp_specialised: by the engine ----------------------------------------------------------------------------------

@case
def engine() -> None:
    plain("one", (40, 40, 56))


@case
def engine_deep() -> None:
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


@case
def cluster_columns() -> None:
    plain("one-1x2", (72, 64, 24))


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
def promoted() -> None:
    plain("one", (64, 40, 80), WGMMAOp(32, E4M3, promote=32), E4M3, b=ColMajor)


@case
def promoted_portions() -> None:
    plain("one", (64, 32, 160), WGMMAOp(32, E4M3, promote=64), E4M3, b=ColMajor)


@case
def epilogue() -> None:
    """C, transforms of C and D, a bias; N is odd."""
    for n in (16, 13):
        a, b, c = operands(67, n, 16)
        c, bias = c.astype(F32), np.arange(n, dtype=F32)
        conf = mapping("one", WGMMAOp(16), depth=16, stages=2, global_c_layout=RowMajor(F32), epilogue=Bias(bias) | ReLU(),
                       transform_regs_to_shared_d=Elementwise(lambda x, i, j: x + i % 3 - j % 5))
        i, j = np.indices((67, n))
        equal(product(EMULATOR, conf, a, b, c), (a.astype("f8") @ b + c + i % 3 - j % 5 + bias).clip(0))


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
def warps_beside_the_engine() -> None:
    a, b, _ = operands(128, 36, 48)
    conf = mapping("one", depth=16, stages=2,
                   transform_global_to_shared_b=Elementwise(lambda x, i, j: x + i % 3 - j % 2))
    i, j = np.indices(b.shape)
    equal(product(EMULATOR, conf, a, b), a.astype("f8") @ (b.astype("f8") + i % 3 - j % 2))


@case
def warps_across() -> None:
    plain("one", (72, 36, 40), stages=3, a=ColMajor, depth=32)


@case
def warps_transform() -> None:
    a, b, _ = operands(68, 12, 44)
    conf = mapping("one", WGMMAOp(16), depth=32, stages=2, transform_global_to_shared_b=Elementwise(lambda x: x + 1),
                   transform_global_to_shared_a=Elementwise(lambda x, i, j: x + i % 3 - j % 2))
    i, j = np.indices(a.shape)
    equal(product(EMULATOR, conf, a, b), (a.astype("f8") + i % 3 - j % 2) @ (b.astype("f8") + 1))


@case
def warps_pingpong() -> None:
    plain("pingpong", (128, 13, 21), WGMMAOp(16))


@case
def by_triangle() -> None:
    """Masked in place; K begins and ends by the tile."""
    a, b, _ = operands(88, 16, 88)
    conf = mapping("one", WGMMAOp(16), depth=32, stages=3, global_a_layout=Triangular(RowMajor(F16), "upper"))
    equal(product_of(conf, a, b), np.triu(a.astype("f8")) @ b)


def product_of(conf: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = poison((a.shape[0], b.shape[1]), F32)
    with gk.emulate():
        gk.matmul(ordered(a, conf.global_a_layout), ordered(b, conf.global_b_layout), None, conf, out=out)
    return out


class Sometimes(Condition):
    is_always = False

    def __call__(self, m, n, k):
        return (m // 64 + k // 16) % 2 == 0


@case
def in_place() -> None:
    a, b, _ = operands(40, 40, 56)
    t, u = np.arange(56).astype(F16) % 3, np.arange(40).astype(F16) % 2
    conf = mapping("one", depth=16, stages=4, transform_global_to_shared_b=Elementwise(lambda x, k, n: x + t[k] - u[n]))
    equal(product(EMULATOR, conf, a, b), a.astype("f8") @ (b.astype("f8") + t[:, None] - u))


@case
def in_place_by_place() -> None:
    a, b, _ = operands(128, 32, 64)
    conf = mapping("one-2x1", depth=32, stages=2, transform_global_to_shared_a=Elementwise(lambda x, i, j: x + i % 3 - j % 2))
    i, j = np.indices(a.shape)
    equal(product(EMULATOR, conf, a, b), (a.astype("f8") + i % 3 - j % 2) @ b)


@case
def in_place_by_teams() -> None:
    a, b, _ = operands(64, 32, 16 * 9)
    conf = mapping("one", depth=16, stages=6, transform_global_to_shared_b=Elementwise(lambda x: x + 1))
    equal(product(EMULATOR, conf, a, b), a.astype("f8") @ (b.astype("f8") + 1))


@case
def turned() -> None:
    plain("one", (64, 40, 40), WGMMAOp(32, F32), F32, depth=32, stages=2)


@case
def turned_transformed() -> None:
    a, b, _ = operands(64, 32, 72, F32)
    conf = mapping("one", WGMMAOp(32, F32), depth=32, stages=3, transform_global_to_shared_b=Elementwise(lambda x: x + 1))
    equal(product(EMULATOR, conf, a, b), a.astype("f8") @ (b.astype("f8") + 1))


@case
def sometimes() -> None:
    a, b, _ = operands(128, 16, 80)
    conf = mapping("one", WGMMAOp(16), depth=16, stages=2, condition=Sometimes())
    m, k = np.indices(a.shape)
    equal(product(EMULATOR, conf, a, b), np.where((m // 64 + k // 16) % 2 == 0, a.astype("f8"), 0) @ b)


@case
def gathered() -> None:
    a, b = test_gather.operands(np.random.default_rng(0), 40, 24, 72)
    for fast, fields in (((1, 1), {}), ((0, 0), dict(d_fast=2))):
        d, plan = test_gather.run(EMULATOR, a, b, fast=fast, operator=WGMMAOp(32), **fields)
        assert isinstance(plan._compiled.spec.producer, CpAsyncProducer)
        equal(d, a.astype("f8") @ b)


@case
def gathered_beside_the_engine() -> None:
    a, b = test_gather.operands(np.random.default_rng(0), 40, 24, 136)
    d, _ = test_gather.run(EMULATOR, a, b, which="a", stages=2)
    equal(d, a.astype("f8") @ b)


# -- warp_specialised: A by registers, numbers of parts ---------------------------------------------------------------

@case
def by_registers() -> None:
    a, b, _ = operands(40, 32, 144)
    conf = mapping("one", WGMMAOp(16), depth=64, stages=2, transform_global_to_shared_a=Elementwise(lambda x: x + 1))
    equal(product(EMULATOR, conf, a, b), (a.astype("f8") + 1) @ b)


@case
def by_registers_one_step() -> None:
    a, b, _ = operands(40, 32, 56)
    conf = mapping("one", WGMMAOp(16), depth=16, stages=3, a=ColMajor,
                   transform_global_to_shared_a=Elementwise(lambda x, i, j: x + i % 3 - j % 2))
    i, j = np.indices(a.shape)
    equal(product(EMULATOR, conf, a, b), (a.astype("f8") + i % 3 - j % 2) @ b)


@case
def by_registers_two_steps() -> None:
    a, b, _ = operands(128, 16, 72)
    conf = mapping("one", WGMMAOp(16), depth=32, stages=2, block_shape=Tile(M=128, N=16, K=32),
                   transform_global_to_shared_a=Elementwise(lambda x: x + 1))
    equal(product(EMULATOR, conf, a, b), (a.astype("f8") + 1) @ b)


def numbers(algebra: Algebra, size: tuple[int, int, int], conf: Any, orders: str = "NN", **fields: Any) -> None:
    rng = np.random.default_rng(0)
    M, N, K = size
    a, b = (test_warp_specialised_algebras.whole(rng, *shape, algebra.parts, order)
            for shape, order in zip(((M, K), (K, N)), orders))
    d, plan = test_warp_specialised_algebras.run(EMULATOR, a, b, conf=conf, **fields)
    assert isinstance(plan._compiled.spec.producer, (DeinterleaveProducer, StagedProducer))
    equal(d, product64(algebra, a, b))


@case
def numbers_by_registers() -> None:
    numbers(COMPLEX, (36, 20, 40), test_warp_specialised_algebras.small(COMPLEX))


@case
def numbers_by_registers_across() -> None:
    conf = test_warp_specialised_algebras.small(DUAL, global_b_layout=Interleaved(DUAL.number_dtype("f2"), "col"), stages=3)
    numbers(DUAL, (36, 12, 52), conf, "NT")


@case
def numbers_that_land() -> None:
    conf = test_warp_specialised_algebras.small(COMPLEX, global_a_layout=Interleaved(COMPLEX.number_dtype("f2"), "col"),
                                                global_b_layout=Interleaved(COMPLEX.number_dtype("f2"), "col"), stages=3)
    numbers(COMPLEX, (36, 20, 72), conf, "TT")


@case
def numbers_that_land_and_change() -> None:
    """Both operands by the engine, taken apart by two teams, of which one transforms by place."""
    order = dict(global_a_layout=Interleaved(COMPLEX.number_dtype("f2"), "col"),
                 global_b_layout=Interleaved(COMPLEX.number_dtype("f2"), "col"))
    conf = test_warp_specialised_algebras.small(COMPLEX, **order, stages=2,
                                                transform_global_to_shared_a=Elementwise(lambda x, i, j: x * (1 + i % 3 - j % 2)))
    rng = np.random.default_rng(0)
    a, b = (test_warp_specialised_algebras.whole(rng, *shape, 2, order="T") for shape in ((68, 20), (20, 12)))
    d, plan = test_warp_specialised_algebras.run(EMULATOR, a, b, conf=conf)
    assert plan._compiled.spec.producer.splits_a and plan._compiled.spec.producer.splits_b
    i, j = np.indices(a.shape[:2])
    equal(d, product64(COMPLEX, a * (1 + i % 3 - j % 2)[..., None], b))


@case
def numbers_by_warps() -> None:
    numbers(DUAL, (33, 15, 37), test_warp_specialised_algebras.small(DUAL))


# -- singlestage ------------------------------------------------------------------------------------------------------

def single(operator: Any, size: tuple[int, int, int], dtype: Any, with_c: bool = False, d_type: Any = F32, **fields: Any) -> None:
    a, b, c = operands(*size, dtype)
    c = c.astype(d_type)
    given = dict(operator=operator, global_a_layout=RowMajor(dtype), global_b_layout=RowMajor(dtype),
                 global_d_layout=RowMajor(d_type))
    if with_c:
        given["global_c_layout"] = RowMajor(d_type)
    conf = gk.get_config(**{**given, **fields})
    a, b = ordered(a, conf.global_a_layout), ordered(b, conf.global_b_layout)
    out = poison(size[:2], d_type, "CF"[conf.global_d_layout.axis == 0])
    with gk.emulate():
        gk.matmul(a, b, c if with_c else None, conf, out=out)
    equal(out, a.astype("f8") @ b.astype("f8") + (c if with_c else 0))


@case
def mma() -> None:
    single(MMAOp(), (33, 27, 24), F16, True, block_shape=Tile(M=32, N=32, K=16), compute_warp=Tile(M=16, N=16, K=16))


@case
def mma_across() -> None:
    single(MMAOp(), (35, 24, 24), F16, global_a_layout=ColMajor(F16), global_b_layout=ColMajor(F16),
           global_d_layout=ColMajor(F32), block_shape=Tile(M=32, N=32, K=16), compute_warp=Tile(M=16, N=32, K=16))


@case
def mma_transformed() -> None:
    a, b, _ = operands(37, 29, 21)
    t, u = np.arange(37).astype(F16) % 3, np.arange(21).astype(F16) % 2        # of which places out of range have none
    conf = gk.get_config(operator=MMAOp(), global_a_layout=RowMajor(F16), global_b_layout=RowMajor(F16),
                         global_d_layout=RowMajor(F32), block_shape=Tile(M=32, N=32, K=16), compute_warp=Tile(M=16, N=16, K=16),
                         transform_shared_to_regs_a=Elementwise(lambda x, i, j: x + t[i] - u[j]),
                         transform_global_to_shared_b=Elementwise(lambda x: x + 1),
                         transform_shared_to_regs_b=Elementwise(lambda x: x + 1),
                         transform_regs_to_shared_d=Elementwise(lambda x, i, j: x + j % 3), epilogue=Bias(np.arange(29, dtype=F32)))
    out = poison((37, 29), F32)
    with gk.emulate():
        gk.matmul(a, b, None, conf, out=out)
    i, j = np.indices(a.shape)
    equal(out, (a.astype("f8") + i % 3 - j % 2) @ (b.astype("f8") + 2) + np.arange(29) % 3 + np.arange(29))


@case
def fpu() -> None:
    single(FPUOp(8, 16), (9, 33, 11), F32, block_shape=Tile(M=8, N=32, K=8), compute_warp=Tile(M=8, N=16, K=4))


@case
def fpu_splits() -> None:
    a, b, _ = operands(7, 29, 65, "f8")
    conf = test_shared_k.config(FPUOp(8, 16, dtype="f8"), 4, block_shape=Tile(M=8, N=32, K=16), warps_per_block=1,
                                compute_warp=Tile(M=8, N=32, K=4))
    equal(test_shared_k.product(EMULATOR, conf, a, b), a.astype("f8") @ b)


@case
def single_sometimes() -> None:
    a, b, _ = operands(128, 16, 48)
    conf = gk.get_config(operator=MMAOp(), global_a_layout=RowMajor(F16), global_b_layout=RowMajor(F16),
                         global_d_layout=RowMajor(F32), block_shape=Tile(M=64, N=16, K=16), compute_warp=Tile(M=32, N=16, K=16),
                         condition=Sometimes())
    out = poison((128, 16), F32)
    with gk.emulate():
        gk.matmul(a, b, None, conf, out=out)
    m, k = np.indices(a.shape)
    equal(out, np.where((m // 64 + k // 16) % 2 == 0, a.astype("f8"), 0) @ b)


@case
def single_numbers() -> None:
    rng = np.random.default_rng(0)
    a, b = (test_warp_specialised_algebras.whole(rng, *shape, 2, dtype=F32) for shape in ((9, 7), (7, 5)))
    out = poison((9, 5, 2), F32)
    with gk.emulate():
        gk.matmul(a, b, operator=COMPLEX, out=out)
    equal(out, product64(COMPLEX, a, b))
