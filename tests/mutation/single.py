"""The battery's products by the single-stage kernel, and what is refused; each names the way that it takes."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.epilogues import Bias
from gemmkit.layouts import ColMajor, Padded, RowMajor
from gemmkit.operators import COMPLEX, Algebra, FPUOp, MMAOp, WMMAOp, dual
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.kernels.simt import test_shared_k
from tests.kernels.sm90 import test_algebras
from tests.mutation.products import EMULATOR, Sometimes, WrongResult, case, equal, operands
from tests.support.algebras import product64
from tests.support.machines import poison
from tests.support.sm90 import F16, F32, ordered

SMALL = Tile(M=32, N=32, K=16)


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
        gk.matmul(a, b, ordered(c, conf.global_c_layout) if with_c else None, conf, out=out)
    equal(out, a.astype("f8") @ b.astype("f8") + (c if with_c else 0))


@case
def mma() -> None:
    single(MMAOp(), (33, 27, 24), F16, True, block_shape=Tile(M=32, N=32, K=16), compute_warp=Tile(M=16, N=16, K=16))


@case
def mma_in_several_tiles() -> None:
    """A thread has several tiles of its warp's."""
    single(MMAOp(), (33, 27, 24), F16, True, block_shape=Tile(M=32, N=32, K=16), compute_warp=Tile(M=16, N=16, K=16),
           mem_a_thread=Tile(M=1, K=2), mem_a_warp=Tile(M=8, K=16))


@case
def a_result_that_does_not_fit() -> None:
    """A float in an array of integers is refused."""
    a, b, _ = operands(4, 4, 4, np.dtype("i1"))
    with gk.emulate():
        try:
            gk.matmul(a, b, epilogue=gk.epilogues.Elementwise(lambda x: x * 0.5))
        except Exception:
            return
    raise WrongResult("a float was stored as an integer")


@case
def mma_of_c() -> None:
    """C is transformed by place, in lines of D that begin at multiples of 8 bytes alone."""
    a, b, c = operands(33, 27, 16)
    c = c.astype(F32)
    conf = gk.get_config(operator=MMAOp(), global_a_layout=RowMajor(F16), global_b_layout=RowMajor(F16), block_shape=SMALL,
                         global_c_layout=RowMajor(F32), global_d_layout=RowMajor(F32), compute_warp=Tile(M=16, N=16, K=16),
                         shared_d_layout=Padded(RowMajor(F32), 2), mem_cd_thread=Tile(M=1, N=2), mem_cd_warp=Tile(M=2, N=32),
                         transform_shared_to_regs_c=Map(lambda x, i, j: x + i % 3 - j % 5))
    i, j = np.indices(c.shape)
    out = poison(c.shape, F32)
    with gk.emulate():
        gk.matmul(a, b, c, conf, out=out)
    equal(out, a.astype("f8") @ b + c + i % 3 - j % 5)


@case
def mma_of_columns_of_c() -> None:
    single(MMAOp(), (33, 24, 16), F16, True, global_c_layout=ColMajor(F32), global_d_layout=ColMajor(F32), block_shape=SMALL,
           compute_warp=Tile(M=16, N=16, K=16))


@case
def opaque() -> None:
    """Fragments of which it is not known who has what."""
    single(WMMAOp(), (33, 27, 24), F16, block_shape=SMALL, compute_warp=Tile(M=16, N=16, K=16))


@case
def narrowed() -> None:
    """By name, on the way to shared memory, which is wider than D."""
    single(FPUOp(8, 16, dtype="i1", accumulator="i4"), (9, 17, 5), np.dtype("i1"), d_type=np.dtype("i1"),
           block_shape=Tile(M=8, N=16, K=8), compute_warp=Tile(M=8, N=16, K=4),
           transform_regs_to_shared_d=Map(lambda x: np.int8(x)))


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
                         transform_shared_to_regs_a=Map(lambda x, i, j: x + t[i] - u[j]),
                         transform_global_to_shared_b=Map(lambda x: x + 1),
                         transform_shared_to_regs_b=Map(lambda x: x + 1),
                         transform_regs_to_shared_d=Map(lambda x, i, j: x + j % 3), epilogue=Bias(np.arange(29, dtype=F32)))
    out = poison((37, 29), F32)
    with gk.emulate():
        gk.matmul(a, b, None, conf, out=out)
    i, j = np.indices(a.shape)
    equal(out, (a.astype("f8") + i % 3 - j % 2) @ (b.astype("f8") + 2) + np.arange(29) % 3 + np.arange(29))


@case
def fpu() -> None:
    single(FPUOp(8, 16), (9, 33, 11), F32, block_shape=Tile(M=8, N=32, K=8), compute_warp=Tile(M=8, N=16, K=4))


@case
def fpu_across() -> None:
    single(FPUOp(8, 16), (9, 33, 11), F32, block_shape=Tile(M=8, N=32, K=8), compute_warp=Tile(M=8, N=16, K=4),
           shared_a_layout=Padded(RowMajor(F32), 4), shared_b_layout=Padded(ColMajor(F32), 4))


@case
def fpu_vectors() -> None:
    """A lane has four rows, and four columns: neighbours in shared memory, or across it."""
    for fields in ({}, dict(shared_a_layout=Padded(RowMajor(F32), 4), shared_b_layout=Padded(ColMajor(F32), 4))):
        single(FPUOp(16, 32, MB=4, NB=8), (17, 33, 6), F32, block_shape=Tile(M=16, N=32, K=4),
               compute_warp=Tile(M=16, N=32, K=4), **fields)


@case
def fused() -> None:
    """Products are rounded with the sum: (1 + e) (1 + e) - (1 + 2 e) is e e, and 0 if they are rounded before."""
    e = 2.0 ** -12
    a, b = np.full((8, 2), 1 + e, F32), np.full((2, 16), 1 + e, F32)
    a[:, 0], b[0] = 1, -(1 + 2 * e)
    equal(on_units(FPUOp(8, 16), a, b), np.full((8, 16), e * e))


@dataclass(frozen=True)
class Shortest(FPUOp):
    """Ways of two steps, of which the second costs double."""

    identity = start = math.inf

    def multiply(self, a, b):
        return a + 2 * b

    def combine(self, c, product):
        return min(c, product)


@case
def shortest_ways() -> None:
    a, b, _ = operands(9, 17, 11, F32)
    equal(on_units(Shortest(8, 16), a, b), (a[:, :, None] + 2 * b).min(1))


def on_units(operator: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    conf = gk.get_config(operator=operator, global_a_layout=RowMajor(F32), block_shape=Tile(M=8, N=16, K=8),
                         compute_warp=Tile(M=8, N=16, K=4))
    out = poison((a.shape[0], b.shape[1]), F32)
    with gk.emulate():
        gk.matmul(a, b, None, conf, out=out)
    return out


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
    a, b = (test_algebras.whole(rng, *shape, 2, dtype=F32) for shape in ((9, 7), (7, 5)))
    out = poison((9, 5, 2), F32)
    with gk.emulate():
        gk.matmul(a, b, operator=COMPLEX, out=out)
    equal(out, product64(COMPLEX, a, b))


@case
def single_tangents() -> None:
    rng = np.random.default_rng(0)
    a, b = (test_algebras.whole(rng, *shape, 3, dtype=F32) for shape in ((5, 3), (3, 4)))
    out = poison((5, 4, 3), F32)
    with gk.emulate():
        gk.matmul(a, b, operator=dual(2), out=out)
    table = np.zeros((3, 3, 3))
    table[0] = table[:, 0] = np.eye(3)
    equal(out, np.einsum("ika,kjb,abc->ijc", a, b, table))


# -- what is refused --------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class FromOne(FPUOp):
    """Sums that begin at 1: those of two parts of K would have it twice."""

    start = 1


@case
def refused() -> None:
    for error, make in (
            (ValueError, lambda: Algebra(None, [[1, 0], [0, 1]])),
            (gk.ConfigError, lambda: test_shared_k.config(FromOne(8, 16), 2)),
            (gk.ConfigError, lambda: gk.get_config(operator=MMAOp(), global_a_layout=RowMajor(F16), block_shape=SMALL,
                                                   mem_a_thread=Tile(M=1, K=2), shared_a_layout=Padded(RowMajor(F16), 2)))):
        try:
            make()
        except error:
            continue
        raise WrongResult(f"{inspect.getsource(make).strip()}: nothing is refused")


__all__ = ["refused"]
