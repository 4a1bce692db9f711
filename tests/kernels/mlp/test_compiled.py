"""The PTX of the kernel by mma.sync, run without a GPU (`tests.ptx_machine`), against NumPy and the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import activations
from gemmkit.functions import mlp
from tests.ptx_machine.launch import Ptx
from tests.support.machines import BF16, poison
from tests.support.mlp import close, draw, reference, relu, whole

F16 = np.dtype(np.float16)
pytestmark = [pytest.mark.compile, pytest.mark.sample(3)]


def run(x: np.ndarray, weights: Any, biases: Any, **keywords: Any) -> np.ndarray:
    out = poison((x.shape[0], weights[-1].shape[1]), x.dtype)
    with Ptx().session():
        gk.mlp(x, weights, biases, out=out, **keywords)
    return out


@pytest.mark.kin(2)
@pytest.mark.sample(8)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("widths,dtype,bias", [([32, 64, 64, 32], F16, np.float32), ([64, 64], BF16, BF16), ([30, 50, 20, 10], F16, F16),
                                               ([16, 96, 40], F16, None)], ids=str)
def test_widths(widths: list[int], dtype: Any, bias: Any, order: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator's bits, and right: several layers, one, lines of 4 bytes, no biases."""
    monkeypatch.setattr(mlp, "HOPPER", (0, 0))
    x, weights, biases = draw(rng, 37, widths, dtype, order, bias)
    found = run(x, weights, biases)
    close(found, reference(x, weights, biases))
    with gk.emulate():
        emulated = gk.mlp(x, weights, biases)
    close(found, (emulated.astype(np.float64), reference(x, weights, biases)[1]))


@pytest.mark.kin(2)
def test_whole_numbers_and_functions(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks, a function at both ends, whose zero is none."""
    monkeypatch.setattr(mlp, "HOPPER", (0, 0))
    x, weights, biases = whole(rng, 70, [32, 64, 32, 32], F16)
    found = run(x, weights, biases, last=activations.relu)
    assert np.array_equal(found, reference(x, weights, biases, last=relu)[0])
    some = [weights[0][:, :40].copy(), weights[1][:40].copy(), weights[2]]
    shorter = [biases[0][:40].copy(), *biases[1:]]
    assert np.array_equal(run(x, some, shorter, activation=lambda v: v + 1), reference(x, some, shorter, lambda v: v + 1)[0])
