"""Shared tiles of the defaults leave no two accesses of a warp in one bank: fragments of A and B, and D in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.layouts import ColMajor, Padded, RowMajor
from gemmkit.operators import FPUOp, MMAOp
from gemmkit.tiling import Tile
from gemmkit.tools.figures import Lane, extra_passes
from tests.kernels.simt.test_mma_operators import F64, every_operator, mapping
from tests.support.banks import conflicts, recorded
from tests.support.machines import whole


def passes(operator: Any, axis: int, rng: np.random.Generator, **fields: Any) -> tuple[int, int]:
    """Passes too many of the loads of fragments, and of the stores of D, for shared tiles contiguous along ``axis``."""
    kind = (ColMajor, RowMajor)[axis]
    m, n, k = operator.shape
    conf = mapping(operator, kind, kind, kind, block_shape=Tile(M=64, N=64, K=max(32, 2 * k)), **fields)
    a, b = (np.asarray(whole(rng, shape, f.dtype, 1), order="CF"[axis == 0])
            for shape, f in (((64, 64), operator.fragment_a), ((64, 64), operator.fragment_b)))
    with gk.emulate(), recorded() as seen:
        gk.matmul(a, b, None, conf, out=np.zeros((64, 64), operator.fragment_c.dtype, order="CF"[axis == 0]))
    return conflicts(seen.loads), conflicts(seen.stores)


@pytest.mark.kin(3)
@pytest.mark.sample(9)
@every_operator
@pytest.mark.parametrize("axis", [0, 1])
def test_fragments_meet_in_no_bank(operator: MMAOp, axis: int, rng: np.random.Generator) -> None:
    """With the padding that the operator asks for, which is the default; loads of D by the epilogue are counted, too."""
    if operator.dtype.itemsize > 1:                                    # else the copy turns one operand, byte by byte
        assert passes(operator, axis, rng)[0] == 0


@pytest.mark.kin(3)
@pytest.mark.sample(4)
@pytest.mark.parametrize("operator", [MMAOp(dtype=F64), MMAOp(M=8, K=4, dtype=F64)], ids=repr)
@pytest.mark.parametrize("axis", [0, 1])
def test_results_in_float64_meet_in_no_bank(operator: MMAOp, axis: int, rng: np.random.Generator) -> None:
    assert passes(operator, axis, rng) == (0, 0)


@pytest.mark.kin(3)
@pytest.mark.parametrize("operator", [FPUOp(64, 32, MB=8, NB=4), FPUOp(32, 16, MB=8, NB=4), FPUOp(16, 16)], ids=repr)
def test_vectors_meet_in_no_bank(operator: FPUOp, rng: np.random.Generator) -> None:
    """Of A by columns and of B by rows, which is how their shared tiles lie by default."""
    conf = mapping(operator, block_shape=Tile(M=64, N=64, K=8), warps_per_block=64 * 64 // (operator.M * operator.N))
    with gk.emulate(), recorded() as seen:
        gk.matmul(whole(rng, (64, 8), "f4"), whole(rng, (8, 64), "f4"), None, conf)
    assert conflicts(seen.loads) == 0


def test_the_count_of_banks_counts() -> None:
    """Without padding all rows begin in one bank; a word that all read is read once."""
    rng = np.random.default_rng(0)
    bare = {f"shared_{name}_layout": Padded(RowMajor(F64), 0) for name in "ab"}
    assert passes(MMAOp(dtype=F64), 1, rng, **bare)[0] > 0
    assert extra_passes([Lane(lane, 0, 4) for lane in range(32)]) == 0
    assert extra_passes([Lane(lane, 128 * lane, 4) for lane in range(32)]) == 31
    assert extra_passes([Lane(lane, 16 * lane, 16) for lane in range(32)]) == 0
    assert extra_passes([Lane(lane, 32 * lane, 8) for lane in range(32)]) == 2 * 3
