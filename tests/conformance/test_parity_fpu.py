"""Parity groups "FPU types" (84 cases) and "FPU shapes" (44), and a small version of each in the emulator.

One kernel serves all sizes of a class: the first size compiles it, the others compile nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts
from gemmkit.operators import FPUOp
from tests.support.checks import assert_close
from tests.support.machines import on_machines, tolerance

TYPES = {"f16,f16->f32": ("f2", "f4"), "f32": ("f4", "f4"), "f32,f32->f64": ("f4", "f8"), "f64": ("f8", "f8"),
         "i16": ("i2", "i2"), "i32": ("i4", "i4"), "i64": ("i8", "i8")}

# (M, N, K, MB, NB) of the operator: every warp shape, and every kind of vector
SHAPES = [(8, 16, 2, 4, 8), (16, 16, 2, 4, 8), (32, 16, 2, 4, 8), (8, 32, 2, 4, 8), (16, 32, 2, 4, 8), (32, 32, 2, 4, 8),
          (32, 64, 1, 4, 8), (64, 32, 1, 8, 4), (16, 32, 4, 2, 16), (32, 16, 4, 16, 2), (32, 32, 1, 32, 1)]


def config(operator: FPUOp, trans: str, block: dict[str, int]) -> gk.Config:
    """op(A) and op(B) of row-major arrays; C and D row-major."""
    a, b = ((layouts.ColMajor if t == "T" else layouts.RowMajor)(operator.dtype) for t in trans)
    return gk.get_config(operator=operator, global_a_layout=a, global_b_layout=b, block_shape=gk.Tile(**block),
                         global_d_layout=layouts.RowMajor(operator.accumulator))


def check(machine: Any, conf: gk.Config, trans: str, size: int, alpha: Any, beta: Any, rng: np.random.Generator) -> None:
    """alpha op(A) op(B) + beta C in place."""
    dtype, accumulator = conf.operator.dtype, conf.operator.accumulator
    if dtype.kind == "i":
        most = min(np.iinfo(dtype).max, 2**20)                     # products summed in float64 are exact
        a, b, c = (rng.integers(-most, most, (size, size), t, endpoint=True) for t in (dtype, dtype, accumulator))
    else:
        a, b, c = (rng.standard_normal((size, size)).astype(t) for t in (dtype, dtype, accumulator))
    out = machine.array(c)
    with machine.session():
        gk.blas.gemmEx(trans[0], trans[1], alpha, machine.array(a), machine.array(b), beta, out, conf=conf)
    product = machine.product64(a.T if trans[0] == "T" else a, b.T if trans[1] == "T" else b)
    if dtype.kind == "i":                                          # integers wrap, and are exact
        with np.errstate(all="ignore"):
            expected = (alpha * product.astype(np.int64) + beta * c.astype(np.int64)).astype(accumulator)
        assert np.array_equal(machine.numpy(out), expected)
    else:
        assert_close(machine.numpy(out), alpha * product + beta * c.astype(np.float64),
                     tolerance(dtype, accumulator, accumulator, size))


@pytest.mark.sample(21)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("name", TYPES)
def test_fpu_types(machine: Any, name: str, trans: str, rng: np.random.Generator) -> None:
    dtype, accumulator = TYPES[name]
    block = dict(M=16, N=16, K=8) if machine.emulated else dict(M=64, N=64, K=32)
    conf = config(FPUOp(M=16, N=16, dtype=dtype, accumulator=accumulator), trans, block)
    first, *others = (128, 256, 2048)
    if machine.emulated:
        first, *others = (16, 32) if trans in ("NT", "TN") else (32,)          # each operand in each order
    check(machine, conf, trans, first, 2, 3, rng)
    with machine.compiles_nothing():
        for size in others:
            check(machine, conf, trans, size, 2, 3, rng)


@pytest.mark.sample(7)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_fpu_shapes(machine: Any, shape: tuple[int, ...], trans: str, rng: np.random.Generator) -> None:
    M, N, K, MB, NB = shape
    operator = FPUOp(M, N, K, MB, NB)
    if not machine.emulated:
        check(machine, config(operator, trans, dict(M=128, N=64, K=32)), trans, 128, 2, 3, rng)
    elif trans in ("NT", "TN"):                                    # each operand in each order
        check(machine, config(operator, trans, dict(M=M, N=N, K=8)), trans, 16, 2, 3, rng)
