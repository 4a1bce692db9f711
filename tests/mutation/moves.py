"""The battery's products whose operands are moved in unusual ways: tensors, and tiles that lanes do not divide."""

from __future__ import annotations

from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.layouts import Matricised, RowMajor
from gemmkit.operators import MIN_PLUS, FPUOp
from gemmkit.runtime.arrays import describe
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from tests.mutation.products import EMULATOR, case, equal
from tests.support import sm90
from tests.support.machines import poison, whole
from tests.support.sm80 import F32, routes
from tests.support.sm90 import F16


def tensors(a: np.ndarray, b: np.ndarray, by: tuple[str, str], **fields: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The product of matrices of two dimensions each way, by the multistage kernel and those routes; and the two matrices."""
    sizes = dict(M=int(np.prod(a.shape[:2])), N=int(np.prod(b.shape[2:])), K=int(np.prod(b.shape[:2])))
    conf = gk.get_config(gemm_shape=sizes, global_a_layout=Matricised.of(describe(a), 2), global_b_layout=Matricised.of(describe(b), 2),
                         global_d_layout=RowMajor(F32), **{**dict(
                             operator=FPUOp(16, 16), kernel="multistage", block_shape=Tile(M=32, N=32, K=16),
                             compute_warp=Tile(M=16, N=16, K=16), warps_per_block=4, stages=3), **fields})
    assert routes(EMULATOR, conf, a, b, gemm_shape=sizes) == by
    out = poison((sizes["M"], sizes["N"]), F32)
    with gk.emulate():
        gk.matmul(a, b, None, conf, out=out, gemm_shape=sizes)
    left, right = (np.transpose(x, (1, 0, 3, 2)).reshape(x.shape[0] * x.shape[1], -1) for x in (a, b))
    return out, left, right


@case
def tensors_in_vectors() -> None:
    """Four neighbours a copy; several tiles, rounds inside and at the end of K."""
    rng = np.random.default_rng(0)
    a, b = whole(rng, (6, 17, 5, 8), F32).transpose(3, 2, 1, 0), whole(rng, (6, 17, 3, 12), F32).transpose(1, 0, 3, 2)
    out, left, right = tensors(a, b, ("CpAsyncSeparable 4", "CpAsyncSeparable 4"))
    equal(out, left @ right)


@case
def tensors_by_element() -> None:
    """Contiguous along K, and extents of which no vector is made; beyond the end of K stands infinity."""
    rng = np.random.default_rng(0)
    a, b = whole(rng, (9, 5, 17, 4), F32).transpose(0, 1, 3, 2)[:, :, :3], whole(rng, (3, 17, 7, 5), F32)
    operator = MIN_PLUS.sized(dict(M=16, N=16, MB=4, NB=8), F32, F32, F32)
    out, left, right = tensors(a, b, ("CpAsyncSeparable 1", "CpAsyncSeparable 1"), operator=operator)
    equal(out, (left[:, :, None] + right).min(axis=1))


@case
def tensors_in_pieces() -> None:
    """Threads have two tiles of four elements, of which a copy takes two."""
    rng = np.random.default_rng(0)
    a, b = whole(rng, (5, 19, 3, 14), F32).transpose(3, 2, 1, 0), whole(rng, (5, 19, 6, 5), F32).transpose(1, 0, 3, 2)
    out, left, right = tensors(a, b, ("CpAsyncSeparable 2", "CpAsyncSeparable 1"), block_shape=Tile(M=32, N=32, K=32),
                               compute_warp=Tile(M=16, N=16, K=32), mem_a_thread=Tile(M=4, K=1), mem_a_warp=Tile(M=32, K=8))
    equal(out, left @ right)


@case
def lanes_that_do_not_divide() -> None:
    """A warp's tile in place has 48 lines: some lanes have two, others one."""
    rng = np.random.default_rng(0)
    conf = sm90.mapping("three", stages=2, transform_global_to_shared_a=Map(lambda x: x + x),
                        mem_a_warp=Tile(M=3, K=64), mem_a_thread=Tile(M=1, K=4))
    a, b = whole(rng, (200, 72), F16), whole(rng, (72, 32), F16)
    equal(sm90.product(EMULATOR, conf, a, b), 2 * a.astype(F32) @ b.astype(F32))


__all__ = ["tensors"]
