"""Parity group "WMMA" (120 cases): f16 -> f16 and f16 -> f32, three shapes, four transposes, and its small version."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts
from gemmkit.operators import WMMAOp
from tests.support.checks import assert_close
from tests.support.machines import on_machines, poison, tolerance

MULTIPLES = [(1, 1, 1), (2, 2, 1), (1, 1, 2), (2, 2, 2)]


@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("shape", [(16, 16, 16), (8, 32, 16), (32, 8, 16)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("accumulator,base", [("f2", 256), ("f4", 128)])
def test_wmma(machine: Any, accumulator: str, base: int, shape: tuple[int, int, int], trans: str,
              rng: np.random.Generator) -> None:
    M, N, K = shape
    operator = WMMAOp(M, N, K, accumulator=accumulator)
    a_layout, b_layout = ((layouts.ColMajor if t == "T" else layouts.RowMajor)("f2") for t in trans)
    mapping = {}
    if machine.emulated:
        mapping = dict(block_shape=gk.Tile(M=32, N=32, K=16), warps_per_block=1)
        sizes = [(32 * m, 32 * n, 16 * k) for m, n, k in ((1, 1, 1), (2, 1, 2))]
    else:
        sizes = [(base * m, base * n, base * k) for m, n, k in MULTIPLES] + [(2048, 2048, 2048)]
    conf = gk.get_config(operator=operator, global_a_layout=a_layout, global_b_layout=b_layout,
                         global_c_layout=layouts.RowMajor(accumulator), global_d_layout=layouts.RowMajor(accumulator),
                         **mapping)

    def check(m: int, n: int, k: int) -> None:
        a = rng.standard_normal((k, m) if trans[0] == "T" else (m, k)).astype("f2")
        b = rng.standard_normal((n, k) if trans[1] == "T" else (k, n)).astype("f2")
        c = rng.standard_normal((m, n)).astype(accumulator)
        out = machine.array(poison((m, n), accumulator))
        a_, b_, c_ = machine.array(a), machine.array(b), machine.array(c)
        with machine.session():
            gk.matmul(a_.T if trans[0] == "T" else a_, b_.T if trans[1] == "T" else b_, c_, conf, out=out)
        expected = machine.product64(a.T if trans[0] == "T" else a, b.T if trans[1] == "T" else b) + c
        assert_close(machine.numpy(out), expected, tolerance("f2", accumulator, accumulator, k))

    check(*sizes[0])
    with machine.compiles_nothing():
        for size in sizes[1:]:
            check(*size)
