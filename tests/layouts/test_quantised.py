"""B of 2 and 4 bits with group scales, dequantised in its layout."""

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.layouts.quantised import dequantise, quantise
from gemmkit.plans.ahead import compiled, recorded
from tests.support.compiling import H100

pytestmark = pytest.mark.sample(4)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits, group", [(4, 8), (4, 32), (2, 16)])
@pytest.mark.parametrize("m, n", [(1, 7), (3, 16)])
def test_a_product_is_that_of_the_dequantised_weights(m, n, bits, group, symmetric):
    rng = np.random.default_rng(bits + m)
    b = quantise(rng.standard_normal((64, n)).astype(np.float32), bits, group, symmetric)
    a, d = rng.integers(-2, 3, (m, 64)).astype(np.float16), np.full((m, n), np.nan, np.float32)
    with gk.emulate():
        gk.matmul(a, b, out=d)
    rounded = dequantise(b).astype(np.float16).astype(np.float64)
    assert np.allclose(d, a.astype(np.float64) @ rounded, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits, group", [(4, 8), (2, 16)])
def test_an_error_is_half_a_step_at_most(bits, group, symmetric):
    weights = np.random.default_rng(0).standard_normal((64, 5)).astype(np.float32)
    b = quantise(weights, bits, group, symmetric)
    steps = np.repeat(b.layout.scales.astype(np.float64), group, axis=0)
    assert (abs(dequantise(b) - weights) <= steps * (1.01 if not symmetric else 0.51)).all()


def test_what_does_not_fit_is_refused_by_name():
    weights = np.ones((32, 4), np.float32)
    with pytest.raises(gk.ConfigError, match="bits=3"):
        quantise(weights, bits=3)
    with pytest.raises(gk.ConfigError, match="group=12"):
        quantise(weights, group=12)
    with pytest.raises(ValueError, match="32 rows; a multiple of group=128"):
        quantise(weights)
    with pytest.raises(ValueError, match="not finite"):
        quantise(weights * np.nan, group=8)
    with pytest.raises(TypeError, match="weights"):
        quantise(weights.astype(int))


@pytest.mark.parametrize("bits", [pytest.param(4), pytest.param(2, marks=pytest.mark.thorough)])
def test_its_kernel_spills_nothing(bits):
    b = quantise(np.ones((256, 64), np.float32), bits)
    (made,) = compiled(recorded(lambda: gk.matmul(np.ones((16, 256), np.float16), b), H100), 1)
    assert made.error is None and made.usage["spill_stores"] == made.usage["spill_loads"] == made.usage["stack_bytes"] == 0
