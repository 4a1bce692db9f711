"""What the emulator takes where nobody names a mapping: the GPU's kernel and arithmetic, in a tile that fits the problem."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmkit as gk
from gemmkit import operators
from gemmkit.runtime.device import A100, H100, T4, assumed
from gemmkit.tiling import Tile

DTYPES = ["f2", ml_dtypes.bfloat16, "f4", "f8", "c8", "c16", "i1", "i4"]


def planned(a: Any, b: Any, mapping: str, **fields: Any) -> Any:
    with gk.emulate(mapping=mapping):
        return gk.plan(a, b, **fields)


@pytest.mark.parametrize("device", [H100, A100, T4], ids=["H100", "A100", "T4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_the_kernel_and_its_arithmetic_are_the_devices(dtype: Any, device: Any) -> None:
    """Threads are fewer, and two warps at least: one alone would hide what goes wrong between them."""
    for M, N, K in ((3, 5, 4), (64, 64, 64), (17, 200, 90), (1, 1, 1), (300, 20, 7)):
        a, b = np.zeros((M, K), dtype), np.zeros((K, N), dtype)
        with assumed(device):
            small, large = (planned(a, b, mapping) for mapping in ("small", "device"))
        assert small.config.kernel == large.config.kernel and type(small.config.operator) is type(large.config.operator)
        for name in ("fragment_a", "fragment_b", "fragment_c"):
            assert getattr(small.config.operator, name).dtype == getattr(large.config.operator, name).dtype
        assert small.config.global_d_layout == large.config.global_d_layout and small.config.splits == 1
        assert small.config.warps_per_block >= 2
        threads = [plan._compiled.launchable.blocks * plan._compiled.launchable.threads for plan in (small, large)]
        assert threads[0] <= threads[1] or small.config == large.config, (M, N, K)


def test_the_mappings_of_two_modes_are_two_plans(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((20, 9)).astype("f4"), rng.standard_normal((9, 7)).astype("f4")
    for mapping in ("small", "device", "small"):
        with gk.emulate(mapping=mapping):
            np.testing.assert_allclose(gk.matmul(a, b), a @ b, rtol=1e-5, atol=1e-5)
    assert planned(a, b, "small").config.block_shape.count < planned(a, b, "device").config.block_shape.count


@pytest.mark.parametrize("fields", [
    dict(operator=operators.FPUOp(M=16, N=32)), dict(operator=operators.MMAOp(dtype="float32"))], ids=["FPUOp", "MMAOp"])
def test_an_operator_with_a_shape_is_a_part_of_a_mapping(fields: dict[str, Any]) -> None:
    a = np.zeros((8, 8), "f4")
    assert planned(a, a, "small", **fields).config == planned(a, a, "device", **fields).config


def test_a_configuration_is_taken_as_it_is() -> None:
    a = np.zeros((8, 8), "f4")
    conf = gk.get_config(operator=operators.FPUOp(), global_a_layout=gk.layouts.RowMajor("f4"), block_shape=Tile(M=64, N=64, K=16))
    assert planned(a, a, "small", conf=conf).config == conf


def test_semirings_have_the_lanes_of_small_tiles() -> None:
    a = np.zeros((9, 12), "f4")
    small, large = (planned(a, a.T, mapping, operator=operators.MIN_PLUS) for mapping in ("small", "device"))
    assert small.config.operator.M < large.config.operator.M and type(small.config.operator) is type(large.config.operator)


@pytest.mark.parametrize("mapping", ["gpu", None, 3])
def test_another_mapping_is_refused(mapping: Any) -> None:
    with pytest.raises(ValueError, match=r"mapping=.*: 'small' \(a tile that fits the problem\) or 'device'"), gk.emulate(mapping=mapping):
        pass
