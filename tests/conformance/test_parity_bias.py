"""Parity group "Bias" (36 cases): f16 -> f32 with a bias along N and along M, and its small version."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts
from gemmkit.operators import WMMAOp
from tests.support.checks import assert_close
from tests.support.machines import on_machines, poison, tolerance


@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("shape", [(16, 16, 16), (8, 32, 16), (32, 8, 16)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("along", ["N", "M"])
def test_bias(machine: Any, along: str, shape: tuple[int, int, int], trans: str, rng: np.random.Generator) -> None:
    a_layout, b_layout = ((layouts.ColMajor if t == "T" else layouts.RowMajor)("f2") for t in trans)
    mapping: dict[str, Any] = dict(block_shape=gk.Tile(M=32, N=32, K=16), warps_per_block=1) if machine.emulated else {}
    sizes = [32] if machine.emulated else [128, 256, 4096]
    conf = gk.get_config(operator=WMMAOp(*shape), global_a_layout=a_layout, global_b_layout=b_layout,
                         global_d_layout=layouts.RowMajor("f4"), **mapping)

    def check(size: int) -> None:
        a, b = (rng.standard_normal((size, size), np.float32).astype("f2") for _ in "ab")
        bias = rng.standard_normal(size, np.float32)
        out, a_, b_ = machine.array(poison((size, size), "f4")), machine.array(a), machine.array(b)
        with machine.session():
            gk.matmul(a_.T if trans[0] == "T" else a_, b_.T if trans[1] == "T" else b_, None, conf, out=out,
                      epilogue=epilogues.Bias(machine.array(bias), along))
        expected = machine.product64(a.T if trans[0] == "T" else a, b.T if trans[1] == "T" else b)
        expected += bias if along == "N" else bias[:, None]
        assert_close(machine.numpy(out), expected, tolerance("f2", "f4", "f4", size))

    check(sizes[0])
    with machine.compiles_nothing():
        for size in sizes[1:]:
            check(size)
