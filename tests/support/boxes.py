"""Products whose operands are contiguous along different indices of K, for tests of boxes (`operators.BoxMMAOp`)."""

from __future__ import annotations

from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.layouts import Matricised, RowMajor
from gemmkit.operators import BoxMMAOp
from gemmkit.runtime.arrays import describe
from gemmkit.tiling import Tile
from tests.support.machines import poison, turned, whole

F16, F32 = np.dtype("f2"), np.dtype("f4")


def operands(rng: np.random.Generator, m: int, n: int, p: int, q: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """x[m, q, p] and y[n, p, q], whose last dimensions are contiguous; K is made of p and q."""
    return whole(rng, (m, q, 8 * p), dtype), whole(rng, (n, 8 * p, q), dtype)


def as_matrices(x: Any, y: Any) -> tuple[Any, Any]:
    """x as (m, 8, q, p / 8) and y as (8, q, p / 8, n): K's first index are eight neighbours of x, and its second y's."""
    (m, q, p), n = x.shape, y.shape[0]
    return turned(x.reshape(m, q, p // 8, 8), 0, 3, 1, 2), turned(y.reshape(n, p // 8, 8, q), 2, 3, 1, 0)


def expected(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.asarray(np.einsum("mqp,npq->mn", x.astype("f8"), y.astype("f8")))


def mapping(a: Any, b: Any, units: BoxMMAOp, k: int = 64, stages: int = 3, warps: tuple[int, int] = (2, 1), d: Any = None,
            **fields: Any) -> gk.Config:
    """A block of one operation a warp along M and N, for views that `as_matrices` gives (of combed "a" the other way)."""
    made = Matricised.of(describe(a), 1), Matricised.of(describe(b), 3)
    m, n, _ = units.shape
    given: dict[str, Any] = dict(kernel="multistage", operator=units, global_a_layout=made[0], global_b_layout=made[1],
                 global_d_layout=d or RowMajor(F32), block_shape=Tile(M=m * warps[0], N=n * warps[1], K=k),
                 compute_warp=Tile(M=m, N=n, K=k), warps_per_block=warps[0] * warps[1], stages=stages)
    return gk.get_config(**{**given, **fields})


def views(x: Any, y: Any, combed: str) -> tuple[Any, Any]:
    """A and B of which ``combed`` is the combed one: of "a" the product is the transpose's."""
    a, b = as_matrices(x, y)
    return (a, b) if combed == "b" else (turned(b, 3, 0, 1, 2), turned(a, 1, 2, 3, 0))


def product(machine: Any, x: np.ndarray, y: np.ndarray, operator: BoxMMAOp, **fields: Any) -> np.ndarray:
    """D = x y^T over p and q by a small mapping, poisoned before."""
    a, b = views(machine.array(x), machine.array(y), operator.combed)
    m, n = (x.shape[0], y.shape[0])[::1 if operator.combed == "b" else -1]
    conf = mapping(a, b, operator, **fields)
    d = conf.global_d_layout
    out = machine.array(poison((m, n), d.dtype, "C" if d.axis == 1 else "F"))
    with machine.session():
        gk.matmul(a, b, out=out, conf=conf, gemm_shape=dict(M=m, N=n, K=x.shape[1] * x.shape[2]))
    found = np.asarray(machine.numpy(out))
    return found if operator.combed == "b" else found.T
