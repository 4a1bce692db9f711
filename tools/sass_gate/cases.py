"""The kernels that are compiled: every way that an operand takes, for A and for B, and whatever else changes the code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.kernels.collectives.scheduler import Grouped
from gemmkit.kernels.spec import Condition
from gemmkit.layouts import ColMajor, Interleaved, Matricised, Planar, RowMajor, Triangular
from gemmkit.operators import COMPLEX, DUAL, MIN_PLUS, QUATERNION, Algebra, BoxMMAOp, FPUOp, MMAOp, WGMMAOp, WMMAOp
from gemmkit.runtime.arrays import describe
from gemmkit.transforms import Map
from tests.support.programs import attention

F16, BF16, F32, F64 = np.dtype("f2"), np.dtype(ml_dtypes.bfloat16), np.dtype("f4"), np.dtype("f8")
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGE, SMALL = (4096, 4096, 4096), (128, 128, 128)


@dataclass(frozen=True)
class Case:
    """A configuration's fields, the sizes of the product, arrays for operands whose layout does not say what they are, and
    how many products a stack has (0: there is none)."""

    fields: Callable[[], dict[str, Any]]
    sizes: tuple[int, int, int] = LARGE
    operands: dict[str, Callable[[], Any]] = field(default_factory=dict)
    batch: int = 0


@dataclass(frozen=True)
class Launched:
    """A call that launches one kernel, such as a program's."""

    call: Callable[[], object]


# -- components of a user's -------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Hankel(layouts.Layout):
    """a[m, k] = h[m + k], element by element."""

    def element(self, data: Any, m: Any, k: Any, shape: Any) -> Any:
        return data[m + k]


@dataclass(frozen=True)
class SquaredDistance(FPUOp):
    """Another pair of operations on the ordinary units."""

    def multiply(self, a: Any, b: Any) -> Any:
        return (a - b) * (a - b)


@dataclass(frozen=True)
class Logistic(epilogues.Epilogue):
    bias: gk.Array
    sharpness: gk.Scalar

    def __call__(self, x: Any, m: Any, n: Any) -> Any:
        return 1 / (1 + math.exp(-self.sharpness * (x + self.bias[n])))


@dataclass(frozen=True)
class BlockDiagonal(Condition):
    """Leaves out what lies far from the diagonal."""

    def __call__(self, m: Any, n: Any, k: Any) -> Any:
        return abs(m - k) < 1024


def plus_one(x: Any) -> Any:
    return x + 1


def scaled_by_product(x: Any, i: Any, j: Any, batch: Any) -> Any:
    return x * batch


def scaled_rows(x: Any, i: Any, j: Any) -> Any:
    return x * (i + 1)


# -- arrays ------------------------------------------------------------------------------------------------------------

def panels(rows: int, columns: int, inner: int, dtype: Any = F16) -> Any:
    """A matrix as a view of three dimensions, whose rows are cut into lines of ``inner``, far apart in memory."""
    return np.zeros((columns // inner, rows, inner), dtype).transpose(1, 2, 0)


def of(array: Any, rows: int = 1) -> Any:
    return Matricised.of(describe(array), rows)


def wgmma(n: int = 128, **fields: Any) -> Callable[[], dict[str, Any]]:
    """f16 rows of A, columns of B, on Hopper's tensor cores, unless told otherwise."""
    def make() -> dict[str, Any]:
        made = {"operator": WGMMAOp(n), "global_a_layout": RowMajor(F16), "global_b_layout": ColMajor(F16),
                "global_d_layout": RowMajor(F16)}
        return {**made, **fields}
    return make


def algebra(kind: Algebra, a: str, b: str, layout: Any = Interleaved, **fields: Any) -> Callable[[], dict[str, Any]]:
    number = kind.number_dtype(F16)
    return lambda: {"operator": kind, "global_a_layout": layout(number, a), "global_b_layout": layout(number, b),
                    "global_d_layout": Interleaved(number), **fields}


def single(operator: Any, dtype: Any = F32, **fields: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"operator": operator, "global_a_layout": RowMajor(dtype), "kernel": "singlestage",
                    "global_d_layout": RowMajor(operator.accumulator), **fields}


def staged(operator: Any, block: tuple[int, int, int], warp: tuple[int, int], stages: int, a: Any, b: Any,
           **fields: Any) -> Callable[[], dict[str, Any]]:
    """The multistage kernel with a ring of so many stages."""
    m, n, k = block
    return lambda: {"kernel": "multistage", "operator": operator, "global_a_layout": a, "global_b_layout": b,
                    "global_d_layout": RowMajor(operator.fragment_c.dtype), "block_shape": gk.Tile(M=m, N=n, K=k),
                    "compute_warp": gk.Tile(M=warp[0], N=warp[1], K=k), "stages": stages, "splits": 1, **fields}


def big(m: int, n: int, warps: int, schedule: str = "cooperative", k: int = 64) -> dict[str, Any]:
    return {"block_shape": gk.Tile(M=m, N=n, K=k), "warps_per_block": warps, "schedule": schedule}


def square() -> Any:
    return np.zeros((4096, 4096), F16)


def rows_in_boxes() -> Any:
    """A whose neighbours in memory are K's first index, cut into eights."""
    return np.zeros((4096, 24, 8, 8), F16).transpose(0, 3, 1, 2)


def columns_in_boxes() -> Any:
    """B whose neighbours in memory are K's second."""
    return np.zeros((4096, 8, 8, 24), F16).transpose(2, 3, 1, 0)


def lines() -> Any:
    return panels(4096, 4096, 64)


def lines_across() -> Any:
    return lines().transpose(1, 2, 0)


def planes() -> Any:
    return np.zeros((2, 4096, 4096), F16).transpose(1, 2, 0)


def pieces() -> Any:
    return panels(4096, 4096, 8)


def vector(dtype: Any = F16, count: int = 8192) -> Callable[[], Any]:
    return lambda: np.zeros(count, dtype)


FFMA = FPUOp(64, 32, MB=8, NB=4)
PAIR: dict[str, Any] = {"cluster": gk.Tile(M=2, N=1), **big(128, 128, 8)}
TF32: dict[str, Any] = {"operator": WGMMAOp(128, F32), "global_d_layout": RowMajor(F32)}

def heads_of(d: int) -> list[Any]:
    return [np.zeros((16, 4096, d), F16) for _ in range(4)]


CASES: dict[str, Case | Launched] = {
    # Hopper: TMA, schedules, clusters, shares of K, types
    "tma pingpong": Case(wgmma(**big(128, 128, 8, "pingpong"))),
    "tma cooperative 256 columns": Case(wgmma(256, **big(128, 256, 8))),
    "tma across K bf16": Case(wgmma(operator=WGMMAOp(128, BF16), global_a_layout=ColMajor(BF16),
                                    global_b_layout=RowMajor(BF16), global_d_layout=RowMajor(BF16))),
    "cluster 2x1 cooperative": Case(wgmma(**PAIR)),
    "cluster 2x2 cooperative": Case(wgmma(**big(128, 128, 8), cluster=gk.Tile(M=2, N=2))),
    "cluster 1x2 pingpong": Case(wgmma(**big(64, 128, 8, "pingpong"), cluster=gk.Tile(M=1, N=2))),
    "splits": Case(wgmma(**big(128, 128, 8), splits=4)),
    "splits by workspace 2x2": Case(wgmma(**big(128, 128, 8), splits=7, cluster=gk.Tile(M=2, N=2)),
                                    sizes=(512, 512, 16384)),
    "stream-K 2x1": Case(wgmma(256, **{**PAIR, **big(128, 256, 8)}, splits=gk.kernels.StreamK()), sizes=(5000, 5000, 5000)),
    "few rows, transposed": Case(wgmma(operator=WGMMAOp(16), global_d_layout=ColMajor(F16), splits=2,
                                       **big(64, 16, 4, k=128)), sizes=(4096, 16, 4096)),
    "promoted e4m3": Case(wgmma(operator=WGMMAOp(128, E4M3, promote=128), global_a_layout=RowMajor(E4M3),
                                global_b_layout=ColMajor(E4M3), global_d_layout=RowMajor(BF16), cluster=gk.Tile(M=1, N=2),
                                **big(128, 128, 8, k=128))),
    "condition": Case(wgmma(condition=BlockDiagonal(), **big(128, 128, 8))),
    # an operand by the producer's warps: register-staged, rewritten in place, transposed, by cp.async
    "A by element": Case(wgmma(global_a_layout=Hankel(F16)), operands={"a": vector()}),
    "B by element": Case(wgmma(global_b_layout=Hankel(F16)), operands={"b": vector()}),
    "both staged, masked": Case(wgmma(), sizes=(4095, 4095, 4095)),
    "both staged, words": Case(wgmma(), sizes=(4098, 4098, 4098)),
    "staged, whole, cluster": Case(wgmma(global_a_layout=of(lines()), order=Grouped(8), **PAIR), operands={"a": lines}),
    "staged, transformed": Case(wgmma(transform_global_to_shared_a=Map(plus_one)), sizes=(4098, 4098, 4098)),
    "A in registers, transformed": Case(wgmma(transform_global_to_shared_a=Map(plus_one))),
    "A in registers, transformed, of a cluster": Case(wgmma(transform_global_to_shared_a=Map(plus_one),
                                                            order=Grouped(8), **PAIR)),
    "A in place": Case(wgmma(128, transform_global_to_shared_a=Map(plus_one), warps_per_block=12,
                             block_shape=gk.Tile(M=192, N=128, K=64), schedule="cooperative")),
    "B in place": Case(wgmma(transform_global_to_shared_b=Map(plus_one))),
    "B in parts": Case(wgmma(transform_global_to_shared_b=Map(plus_one), order=Grouped(8), **PAIR)),
    "A in registers, coordinates": Case(wgmma(transform_global_to_shared_a=Map(scaled_rows))),
    "staged, coordinates": Case(wgmma(transform_global_to_shared_a=Map(scaled_rows)), sizes=(4098, 4098, 4098)),
    "B in place, coordinates": Case(wgmma(transform_global_to_shared_b=Map(scaled_rows))),
    "A and B transformed": Case(wgmma(transform_global_to_shared_a=Map(plus_one),
                                      transform_global_to_shared_b=Map(plus_one))),
    "A triangular": Case(wgmma(global_a_layout=Triangular(RowMajor(F16))), operands={"a": square}),
    "A in registers, across K": Case(wgmma(**TF32, global_a_layout=ColMajor(F32), global_b_layout=ColMajor(F32))),
    "A turned": Case(wgmma(operator=WGMMAOp(128, "i1"), global_a_layout=ColMajor("i1"), global_b_layout=ColMajor("i1"),
                           global_d_layout=RowMajor("i4"), **big(128, 128, 8, k=128))),
    "B turned, transformed": Case(wgmma(**TF32, global_a_layout=RowMajor(F32), global_b_layout=RowMajor(F32),
                                        transform_global_to_shared_b=Map(plus_one))),
    "A by cp.async": Case(wgmma(global_a_layout=of(lines())), operands={"a": lines}),
    "both by cp.async": Case(wgmma(global_a_layout=of(lines()), global_b_layout=of(lines_across(), 2)),
                             operands={"a": lines, "b": lines_across}),
    # numbers of several parts
    "complex by registers": Case(algebra(COMPLEX, "row", "row")),
    "dual by registers, B across": Case(algebra(DUAL, "row", "col")),
    "complex lands": Case(algebra(COMPLEX, "col", "row")),
    "quaternion lands": Case(algebra(QUATERNION, "row", "col")),
    "complex staged": Case(algebra(COMPLEX, "row", "row"), sizes=(4095, 4095, 4095)),
    "complex planar": Case(algebra(COMPLEX, "row", "row", Planar), operands={"a": planes, "b": planes}),
    # how D leaves
    "C, bias and ReLU": Case(lambda: {**wgmma(**big(128, 128, 8))(), "global_c_layout": RowMajor(F16),
                                      "epilogue": epilogues.Bias(np.ones(4096, F16)) | epilogues.ReLU()}),
    "D in columns": Case(wgmma(global_d_layout=ColMajor(F16))),
    "D in columns of an odd length": Case(wgmma(global_d_layout=ColMajor(F16)), sizes=(4092, 4096, 4096)),
    "D of an odd width": Case(wgmma(), sizes=(4096, 4099, 4096)),
    "D a tensor": Case(wgmma(global_d_layout=of(pieces())), operands={"out": pieces}),
    "D written by the epilogue": Case(lambda: {**wgmma()(), "epilogue": epilogues.Store(square()) | epilogues.ReLU()}),
    "a user's epilogue": Case(lambda: {**wgmma()(), "epilogue": Logistic(np.ones(4096, F32), np.float32(0.5))}),
    # the single-stage kernel
    "fpu f32": Case(single(FPUOp(16, 16))),
    "fpu f64, masked": Case(single(FPUOp(16, 16, dtype=F64), F64), sizes=(1001, 1003, 1005)),
    "fpu, a user's operator": Case(single(SquaredDistance(16, 16))),
    "wmma": Case(single(WMMAOp(), F16)),
    "mma": Case(single(MMAOp(), F16)),
    "mma, transformed, C": Case(single(MMAOp(), F16, global_c_layout=RowMajor(F32),
                                       transform_shared_to_regs_a=Map(plus_one),
                                       transform_regs_to_shared_d=Map(plus_one))),
    "mma, pairs": Case(single(MMAOp(N=16), F16)),
    "mma f64": Case(single(MMAOp(dtype=F64), F64)),
    "mma f64, across": Case(single(MMAOp(dtype=F64), F64, global_a_layout=ColMajor(F64), global_b_layout=ColMajor(F64))),
    "mma f64, 8x8x4": Case(single(MMAOp(8, 8, 4, F64), F64), sizes=(1001, 1003, 1005)),
    "mma tf32": Case(single(MMAOp(dtype=F32), F32)),
    "mma s8": Case(single(MMAOp(dtype="i1"), "i1")),
    "mma e4m3": Case(single(MMAOp(dtype=E4M3), E4M3)),
    "complex on mma f64": Case(lambda: {"operator": COMPLEX, "kernel": "singlestage",
                                        "global_a_layout": Interleaved(COMPLEX.number_dtype(F64))}),
    "mma, splits": Case(single(MMAOp(), F16, splits=4)),
    "semiring": Case(lambda: {"operator": MIN_PLUS, "global_a_layout": RowMajor(F32)}),
    "complex on fpu": Case(lambda: {"operator": COMPLEX, "kernel": "singlestage",
                                    "global_a_layout": Interleaved(COMPLEX.number_dtype(F32))}),
    "diagonal": Case(single(FPUOp(16, 16), global_a_layout=layouts.Diagonal(F32), global_b_layout=RowMajor(F32)),
                     operands={"a": vector(F32, 4096)}),
    "element, singlestage": Case(single(FPUOp(16, 16), global_a_layout=Hankel(F32), global_b_layout=RowMajor(F32)),
                                 operands={"a": vector(F32)}),
    # the multistage kernel: every unit, both routes, both main loops
    "ring f32": Case(staged(FFMA, (128, 128, 16), (64, 32), 3, ColMajor(F32), RowMajor(F32))),
    "ring f32, across": Case(staged(FFMA, (128, 128, 16), (64, 32), 3, RowMajor(F32), ColMajor(F32))),
    "ring f32, masked": Case(staged(FFMA, (128, 128, 16), (64, 32), 3, RowMajor(F32), RowMajor(F32)), (1001, 1003, 1005)),
    "ring f64": Case(staged(MMAOp(dtype=F64), (128, 64, 16), (32, 32), 3, RowMajor(F64), RowMajor(F64))),
    "ring f64, 8x8x4": Case(staged(MMAOp(8, 8, 4, F64), (64, 64, 16), (32, 32), 4, RowMajor(F64), ColMajor(F64))),
    "ring f16": Case(staged(MMAOp(N=16), (128, 128, 32), (64, 64), 4, RowMajor(F16), ColMajor(F16))),
    "ring f16, odd addresses": Case(staged(MMAOp(N=16), (128, 128, 32), (64, 64), 3, RowMajor(F16), RowMajor(F16)),
                                    (1001, 1003, 1005)),
    "ring f16, boxes": Case(staged(BoxMMAOp(N=16), (128, 256, 64), (64, 64), 3, of(rows_in_boxes()),
                                   of(columns_in_boxes(), 3)),
                            (4096, 4096, 1536), operands={"a": rows_in_boxes, "b": columns_in_boxes}),
    "ring tf32": Case(staged(MMAOp(N=16, dtype=F32), (128, 128, 32), (64, 64), 3, RowMajor(F32), ColMajor(F32))),
    "ring s8": Case(staged(MMAOp(N=16, dtype="i1"), (128, 128, 64), (64, 64), 4, RowMajor("i1"), ColMajor("i1"))),
    "ring complex64": Case(staged(FPUOp(32, 16, MB=8, NB=4, dtype="c8"), (64, 64, 8), (32, 16), 3, ColMajor("c8"),
                                  RowMajor("c8"))),
    "ring complex128": Case(staged(COMPLEX.with_base(MMAOp(K=4, dtype=F64)), (64, 64, 8), (32, 16), 3,
                                   Interleaved("c16"), Interleaved("c16"), global_d_layout=Interleaved("c16"))),
    "ring f64, stream-K": Case(staged(MMAOp(dtype=F64), (64, 64, 16), (32, 32), 4, RowMajor(F64), RowMajor(F64),
                                      **{"splits": gk.kernels.StreamK()})),
    "ring, A transformed, condition": Case(staged(FFMA, (128, 128, 16), (64, 32), 3, ColMajor(F32), RowMajor(F32),
                                                  transform_global_to_shared_a=Map(scaled_rows),
                                                  condition=BlockDiagonal())),
    # stacks of products, with matrices and vectors for each, and for all of them
    "stack, tma pingpong": Case(wgmma(**big(64, 128, 8, "pingpong")), SMALL, batch=64),
    "stack, C, bias, the product's number": Case(
        lambda: {**wgmma(**big(128, 128, 8))(), "global_c_layout": RowMajor(F16), "transform_shared_to_regs_c":
                 Map(scaled_by_product), "epilogue": epilogues.Bias(np.ones((64, 128), F16)) | epilogues.ReLU()},
        SMALL, batch=64),
    "stack, B in place": Case(wgmma(transform_global_to_shared_b=Map(plus_one)), SMALL, batch=64),
    "stack, staged": Case(wgmma(), (127, 127, 127), batch=64),
    "stack, complex by registers": Case(algebra(COMPLEX, "row", "row"), SMALL, batch=64),
    "stack, fpu f32": Case(single(FPUOp(16, 16)), SMALL, batch=64),
    "stack, ring f32": Case(staged(FFMA, (64, 32, 16), (64, 32), 3, ColMajor(F32), RowMajor(F32)), SMALL, batch=64),
    "stack, mma": Case(single(MMAOp(), F16), SMALL, batch=64),
    # derived: a chain whose heads end within a swizzled line
    "attention by a program, heads of 80": Launched(lambda: attention(*heads_of(80), 0.1, mapping=gk.Mapping(splits=1))),
}
