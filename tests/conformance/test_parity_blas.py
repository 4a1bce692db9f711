"""Parity group "BLAS" (324 cases): M, N, K in {10, tile, 1000}, N and T, random alpha and beta; and its small version."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts
from gemmkit.operators import FPUOp, WMMAOp
from tests.support.checks import assert_close
from tests.support.machines import on_machines, tolerance

OPERATORS = {"wmma-f16-f16": (WMMAOp(accumulator="f2"), 256), "wmma-f16-f32": (WMMAOp(), 128),
             "fpu-f32": (FPUOp(M=16, N=16), 128)}


@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("name", OPERATORS)
def test_blas(machine: Any, name: str, trans: str, rng: np.random.Generator) -> None:
    operator, tile = OPERATORS[name]
    dtype, accumulator = operator.dtype, operator.accumulator
    a_layout, b_layout = ((layouts.ColMajor if t == "T" else layouts.RowMajor)(dtype) for t in trans)
    k = operator.shape[2] if machine.emulated and operator.shape[2] > 1 else 8
    mapping: dict[str, Any] = dict(block_shape=gk.Tile(M=16, N=16, K=k), warps_per_block=1) if machine.emulated else {}
    conf = gk.get_config(operator=operator, global_a_layout=a_layout, global_b_layout=b_layout,
                         global_d_layout=layouts.RowMajor(accumulator), **mapping)
    sizes = [(10, 16, 18), (16, 18, 10), (18, 10, 16)] if machine.emulated else list(
        itertools.product((10, tile, 1000), repeat=3))

    def check(M: int, N: int, K: int) -> None:
        a = rng.standard_normal((K, M) if trans[0] == "T" else (M, K)).astype(dtype)
        b = rng.standard_normal((N, K) if trans[1] == "T" else (K, N)).astype(dtype)
        c = rng.standard_normal((M, N)).astype(accumulator)
        alpha, beta = (float(x) for x in rng.standard_normal(2))
        out = machine.array(c)
        with machine.session():
            gk.blas.gemmEx(trans[0], trans[1], alpha, machine.array(a), machine.array(b), beta, out, conf=conf)
        expected = machine.product64(a.T if trans[0] == "T" else a, b.T if trans[1] == "T" else b)
        assert_close(machine.numpy(out), alpha * expected + beta * c.astype(np.float64),
                     tolerance(dtype, accumulator, accumulator, K))

    for size in sizes:
        check(*size)
    with machine.compiles_nothing():                               # another alpha, another beta, the same classes
        for size in sizes[:9]:
            check(*size)
