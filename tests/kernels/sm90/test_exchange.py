"""Blocks of a cluster that share the K of a tile: their sums, exchanged, are the product's; the rules; what is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues
from gemmkit.epilogues import Bias, ReLU
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.device import H100
from gemmkit.transforms import Elementwise
from tests.support.machines import BF16, on_machines
from tests.support.sm90 import F16, F32, mapping, product

SHAPES = [(64, 32, 512), (70, 40, 600), (130, 72, 200), (64, 32, 64), (1, 8, 72), (64, 32, 0)]


def whole(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(dtype)


@pytest.mark.kin(2)
@pytest.mark.sample(18)
@on_machines
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("schedule, splits", [("one", 2), ("two", 2), ("one", 4)])
def test_sums_are_exchanged(machine: Any, schedule: str, splits: int, shape: tuple, rng: np.random.Generator) -> None:
    """Of blocks along K that do not divide, too, and where some blocks have none."""
    m, n, k = shape
    a, b = whole(rng, (m, k), F16), whole(rng, (k, n), F16)
    conf = mapping(schedule, WGMMAOp(16 * splits), splits=splits)
    assert np.array_equal(product(machine, conf, a, b), a.astype(F32) @ b.astype(F32))


@dataclass(frozen=True)
class Own(epilogues.Epilogue):
    """Adds an array, of which gemmkit knows nothing but that it is one."""

    array: gk.Array

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return x + self.array[m, n]


@pytest.mark.kin(2)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("kind", ["Residual", "LinearCombination", "Own"])
def test_an_epilogue_that_reads_the_result(machine: Any, kind: str, rng: np.random.Generator) -> None:
    """Blocks whose slices lie out of range read nothing: the nearest element in range is stored by another block (a race that
    the emulator found at c5dc2f6)."""
    a, b, c = whole(rng, (64, 200), F16), whole(rng, (200, 40), F16), whole(rng, (64, 40), F16)
    conf = mapping("one", WGMMAOp(128), splits=4, d=RowMajor(F16))
    out = machine.array(c)
    epilogue = {"Residual": lambda: epilogues.Residual(out), "Own": lambda: Own(out),
                "LinearCombination": lambda: epilogues.LinearCombination(2.0, 0.5, out, RowMajor(F16))}[kind]()
    with machine.session():
        gk.matmul(machine.array(a), machine.array(b), conf=conf, out=out, epilogue=epilogue)
    alpha, beta = (2.0, 0.5) if kind == "LinearCombination" else (1.0, 1.0)
    expected = alpha * (a.astype(F32) @ b.astype(F32)) + beta * c.astype(F32)
    assert np.array_equal(machine.numpy(out), expected.astype(F16))


@pytest.mark.thorough
@on_machines
@pytest.mark.parametrize("dtype", [F16, BF16, np.dtype("i1")], ids=str)
def test_eight_blocks_and_other_types(machine: Any, dtype: np.dtype, rng: np.random.Generator) -> None:
    """Each block of a cluster has some of K, and one of 16-bit numbers more than the others."""
    k = 1008 if dtype.itemsize == 1 else 520
    a, b = whole(rng, (40, k), dtype), whole(rng, (k, 144), dtype)
    conf = mapping("one", WGMMAOp(128, dtype), b=ColMajor if dtype.itemsize == 1 else RowMajor, splits=8)
    assert np.array_equal(product(machine, conf, a, b), a.astype(F32) @ b.astype(F32))


@pytest.mark.thorough
@on_machines
@pytest.mark.parametrize("columns", [136, 135])
def test_every_slot_stays_open(machine: Any, columns: int, rng: np.random.Generator) -> None:
    """C, a bias, a transform in place and one by the epilogue, with global coordinates; D by TMA, and by threads."""
    a, b, c = whole(rng, (100, 264), F16), whole(rng, (264, columns), F16), whole(rng, (100, columns), F32)
    bias = whole(rng, (columns,), F32)
    conf = mapping("two", WGMMAOp(64), splits=2, global_c_layout=RowMajor(F32), epilogue=Bias(machine.array(bias)) | ReLU(),
                   transform_global_to_shared_a=Elementwise(lambda x: x + 1),
                   transform_regs_to_shared_d=Elementwise(lambda x, i, j: x + i % 3 - j % 5))
    i, j = np.indices((100, columns))
    expected = (a.astype(F32) + 1) @ b.astype(F32) + c + i % 3 - j % 5 + bias
    assert np.array_equal(product(machine, conf, a, b, c), expected.clip(0))


@pytest.mark.parametrize("fields, said", [
    (dict(splits=8), "multiple of 8"), (dict(splits=2, operator=WGMMAOp(32, accumulator=F16)), "not exchanged"),
    (dict(splits=0), "positive")])
def test_rules(fields: dict, said: str) -> None:
    with pytest.raises(gk.ConfigError, match=said):
        mapping("one", **{"operator": WGMMAOp(32), **fields})


def test_ping_pong_does_not_split() -> None:
    with pytest.raises(gk.ConfigError, match="ping-pong"):
        mapping("pingpong", splits=2)


@pytest.mark.parametrize("shape, least", [((512, 512, 16384), 4), ((4096, 4096, 4096), 1), ((8192, 8192, 64), 1)])
def test_long_thin_products_are_split(shape: tuple, least: int) -> None:
    conf = gk.get_config(global_a_layout=RowMajor(F16), global_b_layout=RowMajor(F16), global_d_layout=RowMajor(F16),
                         gemm_shape=dict(zip("MNK", shape)), device=H100, operator=gk.operators.WGMMAOp(128))
    assert conf.splits >= least if least > 1 else conf.splits == 1
