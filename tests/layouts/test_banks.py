"""Shared tiles of the single-stage and the multistage kernel: no two accesses of a warp meet in a bank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels.sm80 import kernel
from gemmkit.lang.fingerprint import packages_stand
from gemmkit.layouts import ColMajor, Interleaved, Padded, RowMajor
from gemmkit.operators import COMPLEX, Algebra, FPUOp, MMAOp
from gemmkit.tiling import Tile
from gemmkit.tools.figures import Lane, extra_passes
from tests.operators.test_mma import F64, every_operator, mapping
from tests.support.banks import conflicts, recorded, within
from tests.support.machines import E4M3, whole
from tests.support.sm80 import F32, operands, ordered
from tests.support.sm80 import F64 as F64_MULTISTAGE

# ==========================================================================================================================
# Shared tiles of the defaults leave no two accesses of a warp in one bank: fragments of A and B, and D in float64.


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


@pytest.mark.kin(1)
@pytest.mark.sample(9)
@every_operator
@pytest.mark.parametrize("axis", [0, 1])
def test_fragments_meet_in_no_bank(operator: MMAOp, axis: int, rng: np.random.Generator) -> None:
    """With the padding that the operator asks for, which is the default; loads of D by the epilogue are counted, too."""
    if operator.dtype.itemsize > 1:                                    # else the copy turns one operand, byte by byte
        assert passes(operator, axis, rng)[0] == 0


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@pytest.mark.parametrize("operator", [MMAOp(dtype=F64), MMAOp(M=8, K=4, dtype=F64)], ids=repr)
@pytest.mark.parametrize("axis", [0, 1])
def test_results_in_float64_meet_in_no_bank(operator: MMAOp, axis: int, rng: np.random.Generator) -> None:
    assert passes(operator, axis, rng) == (0, 0)


@pytest.mark.kin(1)
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


# ==========================================================================================================================
# Shared tiles of the multistage kernel in the shipped shapes: no two accesses of a warp meet in a bank where fragments are loaded.

C64, C128 = np.dtype("c8"), np.dtype("c16")
TRANS = {"N": RowMajor, "T": ColMajor}
# operator, block, a warp's tile
SHIPPED: dict[str, tuple[Any, tuple[int, int, int], tuple[int, int]]] = {
    "f32 x16": (FPUOp(64, 32, MB=8, NB=4), (128, 128, 16), (64, 32)),
    "f32 x32": (FPUOp(64, 32, MB=8, NB=4), (64, 128, 32), (64, 32)),
    "f16": (MMAOp(N=16), (64, 64, 32), (64, 32)),
    "f16 x64": (MMAOp(N=16), (64, 64, 64), (64, 32)),
    "tf32": (MMAOp(N=16, dtype=F32), (64, 32, 32), (64, 32)),
    "e4m3": (MMAOp(N=16, dtype=E4M3), (64, 32, 64), (64, 32)),
    "f64": (MMAOp(dtype=F64_MULTISTAGE), (64, 32, 16), (32, 32)),
    "f64 8x8x4": (MMAOp(8, 8, 4, F64_MULTISTAGE), (32, 32, 16), (32, 32)),
    "c64": (FPUOp(32, 16, MB=8, NB=4, dtype=C64), (32, 32, 8), (32, 16)),
    "c128": (COMPLEX.with_base(MMAOp(K=4, dtype=F64_MULTISTAGE)), (32, 16, 8), (32, 16)),
}


def passes_multistage(name: str, trans: str, where: str, rng: np.random.Generator, **fields: Any) -> int:
    """Passes too many of what a function of the main loop loads from shared memory (`fetch`) or writes to it (`copy_all`)."""
    operator, block, warp = SHIPPED[name]
    layouts = [Interleaved(f.dtype, "row" if t == "N" else "col") if isinstance(operator, Algebra) else TRANS[t](f.dtype)
               for t, f in zip(trans, (operator.fragment_a, operator.fragment_b))]
    d = Interleaved(operator.fragment_c.dtype) if isinstance(operator, Algebra) else RowMajor(operator.fragment_c.dtype)
    conf = gk.get_config(**{**dict(kernel="multistage", operator=operator, global_a_layout=layouts[0], global_b_layout=layouts[1], global_d_layout=d,
                                   block_shape=Tile(**dict(zip("MNK", block))), compute_warp=Tile(M=warp[0], N=warp[1], K=block[2]), stages=2), **fields})
    a, b = operands(rng, operator, *block)
    if isinstance(operator, Algebra):
        a, b = (np.ascontiguousarray(x).view("f8").reshape(*x.shape, 2) for x in (a, b))
    with within(kernel, where) as inside, gk.emulate(), recorded(inside) as seen:
        gk.matmul(*(ordered(x, layout) for x, layout in zip((a, b), layouts)), None, conf)
    accesses = seen.loads if where == "fetch" else seen.stores
    assert accesses
    return conflicts(accesses)


@pytest.mark.kin(1)
@pytest.mark.sample(17)
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("name", SHIPPED)
def test_fragments_meet_in_no_bank_in_the_multistage_kernel(name: str, trans: str, rng: np.random.Generator) -> None:
    assert passes_multistage(name, trans, "fetch", rng) == 0


@pytest.mark.kin(1)
@pytest.mark.sample(7)
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("name", ["f32 x16", "f16 x64", "f64", "c64"])
def test_copies_meet_in_no_bank(name: str, trans: str, rng: np.random.Generator) -> None:
    """Of cp.async, an element a copy where lines lie across: what it writes. (Of f16 with 32 along K, eight lanes write two lines
    that are 80 bytes apart: two passes in place of one.)"""
    assert passes_multistage(name, trans, "copy_all", rng) == 0


@pytest.mark.parametrize("name", ["f16", "f64"])
def test_the_count_of_banks_counts_in_the_multistage_kernel(name: str, rng: np.random.Generator) -> None:
    """Without padding lines begin in one bank."""
    operator = SHIPPED[name][0]
    bare = {f"shared_{which}_layout": Padded(RowMajor(operator.dtype), 0) for which in "ab"}
    assert passes_multistage(name, "NN", "fetch", rng, **bare) > 0


def test_what_is_read_of_a_replaced_function_is_forgotten(rng: np.random.Generator) -> None:
    """Or the next kernel that is compiled would be told that code has changed."""
    passes_multistage("f16", "NN", "fetch", rng)
    assert packages_stand()
