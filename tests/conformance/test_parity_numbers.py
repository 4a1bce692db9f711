"""Parity groups "tropical" (16 cases) and "complex, dual" (36 + 9), and a small version of each in the emulator.

Dual products have all transposes here, where GemmKernels.jl has NN alone. One kernel serves all sizes of a class.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.layouts import ColMajor, Interleaved, RowMajor
from gemmkit.operators import COMPLEX, DUAL, MAX_PLUS, Algebra
from tests.support.checks import assert_close
from tests.support.machines import on_machines, poison

MULTIPLES = [(1, 1, 1), (2, 2, 1), (1, 1, 2), (2, 2, 2)]


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
def test_tropical(machine: Any, trans: str, rng: np.random.Generator) -> None:
    """Max-plus in float32: exact on whole numbers."""
    base = 16 if machine.emulated else 128
    layouts = [(RowMajor if t == "N" else ColMajor)("f4") for t in trans]
    block = {} if not machine.emulated else dict(block_shape=gk.Tile(M=16, N=16, K=8))
    conf = gk.get_config(operator=MAX_PLUS, global_a_layout=layouts[0], global_b_layout=layouts[1],
                         global_d_layout=RowMajor("f4"), gemm_shape=dict(M=base, N=base, K=base), **block)
    for multiple in MULTIPLES:
        M, N, K = (base * m for m in multiple)
        a, b = (rng.integers(-99, 99, s).astype("f4") for s in ((M, K), (K, N)))
        out = machine.array(poison((M, N), "f4"))
        given = [machine.array(x if t == "N" else np.asfortranarray(x)) for x, t in zip((a, b), trans)]
        with machine.session():
            gk.matmul(*given, conf=conf, out=out)
        expected = np.max([a[:, k, None] + b[None, k] for k in range(K)], axis=0)
        assert np.array_equal(machine.numpy(out), expected)


@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("name,algebra", [("complex", COMPLEX), ("dual", DUAL)])
def test_complex_and_dual(machine: Any, name: str, algebra: Algebra, trans: str, rng: np.random.Generator) -> None:
    """float16 parts, sums and results in float32."""
    number = algebra.number_dtype("f2")
    for size in (16,) if machine.emulated else (128, 256, 2048):
        x, y = (rng.standard_normal((size, size, 2)).astype("f2") for _ in "ab")
        a, b = (v if t == "N" else v.swapaxes(0, 1) for v, t in zip((x, y), trans))
        given = [machine.array(v) if t == "N" else machine.array(v).swapaxes(0, 1) for v, t in zip((x, y), trans)]
        out = machine.array(poison((size, size, 2), "f4"))
        with machine.session():
            gk.matmul(*given, out=out, operator=algebra,
                      global_a_layout=Interleaved(number, "row" if trans[0] == "N" else "col"))
        (p, q), (r, s) = (np.moveaxis(v.astype("f8"), 2, 0) for v in (a, b))
        real = p @ r - q @ s if name == "complex" else p @ r
        assert_close(machine.numpy(out), np.stack([real, p @ s + q @ r], -1), 1e-6 * size**0.5)
