"""The code of products in boxes of K, without a GPU: no two accesses of a warp meet in a bank, and the shipped mappings spill nothing."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels.sm80 import kernel as mainloop
from gemmkit.layouts import Padded, RowMajor, Tensor
from gemmkit.operators import BoxMMAOp
from gemmkit.plans.ahead import CompiledKernel, compile_config
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import A100, H100
from gemmkit.tuning.sm80 import BOXES
from tests.codegen.test_sm80_code import count
from tests.support.banks import conflicts, recorded, within
from tests.support.boxes import F16, as_matrices, mapping, operands, views

DEVICES = {"sm_90a": H100, "sm_80": A100}
TILES = {"x".join(map(str, one.block)): one for one in BOXES}


def passes(where: str, combed: str, rng: np.random.Generator, k: int, **fields: Any) -> int:
    """Passes too many of the accesses to shared memory of a function of the main loop."""
    units = BoxMMAOp(N=16, combed=combed)
    a, b = views(*operands(rng, 32, 32, 2, 8, F16), combed)
    conf = mapping(a, b, units, k, stages=2, **fields)
    with within(mainloop, where) as inside, gk.emulate(), recorded(inside) as seen:
        gk.matmul(a, b, None, conf, gemm_shape=dict(M=32, N=32, K=128))
    accesses = seen.loads if where == "fetch" else seen.stores
    assert accesses
    return conflicts(accesses)


@pytest.mark.sample(2)
@pytest.mark.parametrize("k", [64, 128])
@pytest.mark.parametrize("combed", "ab")
@pytest.mark.parametrize("where", ["fetch", "copy_all"])
def test_accesses_meet_in_no_bank(where: str, combed: str, k: int, rng: np.random.Generator) -> None:
    assert passes(where, combed, rng, k) == 0


def test_the_count_of_banks_counts(rng: np.random.Generator) -> None:
    """Without padding lines begin in one bank."""
    assert passes("fetch", "b", rng, 64, shared_a_layout=Padded(RowMajor(F16), 0)) > 0


@functools.cache
def compiled(name: str, combed: str, arch: str) -> CompiledKernel:
    """Of a contraction with two indices in M, in N and in K."""
    one, device = TILES[name], DEVICES[arch]
    x, y = np.zeros((64, 24, 64), F16), np.zeros((48, 64, 24), F16)
    a, b = as_matrices(x, y)
    a = a.reshape(8, 8, *a.shape[1:]).swapaxes(0, 1)
    b = b.reshape(*b.shape[:-1], 6, 8).swapaxes(-1, -2)
    if combed == "a":
        a, b = b.transpose(3, 4, 0, 1, 2), a.transpose(2, 3, 4, 0, 1)
    M, N, K = np.prod(a.shape[:2]), np.prod(b.shape[3:]), 24 * 64
    out = np.zeros((M, N), F16)
    conf = gk.get_config(operator=BoxMMAOp(N=16, combed=combed), global_a_layout=Tensor.of(describe(a), 2),
                         global_b_layout=Tensor.of(describe(b), 3), global_d_layout=RowMajor(F16), device=device, **one.fields)
    return compile_config(conf, device=device, operands=dict(a=a, b=b, out=out), gemm_shape=dict(M=int(M), N=int(N), K=K))


@pytest.mark.compile
@pytest.mark.sample(12)
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("combed", "ab")
@pytest.mark.parametrize("name", TILES)
def test_the_shipped_mappings(name: str, combed: str, arch: str) -> None:
    """No spill; both operands by cp.async of 16 bytes, fragments by words and two permutations a pair, nothing by ldmatrix."""
    if TILES[name].nbytes > DEVICES[arch].shared_memory_per_block:
        return
    kernel, one = compiled(name, combed, arch), TILES[name]
    assert (kernel.usage.spill_stores, kernel.usage.spill_loads, kernel.usage.stack_bytes) == (0, 0, 0)
    found = kernel.instructions
    assert found["LDL"] == found["STL"] == found["LDSM"] == found["LDG"] == 0
    assert found["SHFL"] <= 1                                     # a warp's number
    assert count(kernel, "LDGSTS") == count(kernel, "LDGSTS", "128") > 0
    rounds = 2                                                    # loops: rounds inside, and at edges
    m, n = one.warp[0] // 16, one.warp[1] // 8
    assert found["HMMA"] == rounds * 4 * m * n
    pairs = 2 * m if combed == "b" else n                         # of words, of the operand that is not combed
    assert rounds * 4 * 2 * pairs <= found["PRMT"] <= (rounds * 4 + 1) * 2 * pairs + 16
