"""Fused MLPs against NumPy in float64: widths, depths, orders, dtypes, odd numbers of rows, functions of the user's; in the emulator
and on a GPU, by wgmma and by mma.sync."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import activations
from gemmkit.programs.chains import schedule
from tests.support.machines import BF16, on_machines, poison
from tests.support.mlp import close, draw, reference, relu, small, whole

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
pytestmark = [pytest.mark.sample(12), pytest.mark.usefixtures("own_launches")]

KERNELS = pytest.mark.parametrize("by_warps", [False, True], ids=["wgmma", "mma"])


@pytest.fixture
def kernel(by_warps: bool, without_wgmma: Any) -> None:
    """Hopper counts as any GPU."""
    if by_warps:
        without_wgmma()


def run(machine: Any, x: np.ndarray, weights: Any, biases: Any, *functions: Any, **keywords: Any) -> np.ndarray:
    """The result, in memory that was poisoned."""
    last = weights[-1] if isinstance(weights, list) else weights[len(weights) - 1]
    out = machine.array(poison((*x.shape[:-1], last.shape[1]), x.dtype))
    held = [machine.array(w) for w in weights] if isinstance(weights, list) else machine.array(weights)
    extra = biases if biases is None else [machine.array(b) for b in biases] if isinstance(biases, list) else machine.array(biases)
    with machine.session():
        found = gk.mlp(machine.array(x), held, extra, *functions, out=out, **keywords)
    assert found is out
    return machine.numpy(out)


WIDTHS = {
    "one layer": [64, 64],
    "two": [64, 128, 64],
    "equal": [128, 128, 128, 128],
    "narrow": [16, 16, 16],
    "in and out differ": [48, 64, 64, 24],
    "hidden differ": [32, 80, 16, 64, 8],
    "wide": [96, 256, 256, 160],
    "wide in": [256, 32, 32, 256],
}


@pytest.mark.sample(64)
@on_machines
@KERNELS
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype,bias", [(F16, F32), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("widths", WIDTHS)
def test_widths(machine: Any, kernel: None, widths: str, dtype: Any, bias: Any, order: str, rng: np.random.Generator) -> None:
    x, weights, biases = draw(rng, 21, WIDTHS[widths], dtype, order, bias)
    close(run(machine, x, weights, biases), reference(x, weights, biases))


@on_machines
@KERNELS
@pytest.mark.parametrize("rows", [0, 1, 63, 131])
def test_rows(machine: Any, kernel: None, rows: int, rng: np.random.Generator) -> None:
    """Of whole numbers every bit is right."""
    x, weights, biases = whole(rng, rows, [32, 64, 64, 32], F16)
    expected, _ = reference(x, weights, biases)
    assert np.array_equal(run(machine, x, weights, biases), expected)


@pytest.mark.kin(5)
@on_machines
@KERNELS
@pytest.mark.parametrize("layers", [1, 2, 3, 9])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_depths_stacked(machine: Any, kernel: None, layers: int, dtype: Any, rng: np.random.Generator) -> None:
    """One array of all weights, one of all biases; and the same bits of a list."""
    x, weights, biases = draw(rng, 33, [32] * (layers + 1), dtype, bias=dtype)
    found = run(machine, x, np.stack(weights), np.stack(biases))
    close(found, reference(x, weights, biases))
    assert np.array_equal(found, run(machine, x, weights, biases))


@pytest.mark.kin(5)
@pytest.mark.parametrize("stages", [2, 16])
@pytest.mark.parametrize("multiprocessors,rows", [(2, 260), (4, 700), (1, 131)])
def test_blocks_with_several_tiles(stages: int, multiprocessors: int, rows: int, rng: np.random.Generator,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights come again with each tile, in fewer stages than there are layers, and in more."""
    monkeypatch.setattr(schedule, "MOST", dict.fromkeys(schedule.MOST, stages))
    x, weights, biases = whole(rng, rows, [32, 32, 64, 32], F16)
    with small(monkeypatch, multiprocessors), gk.emulate():
        found = gk.mlp(x, weights, biases)
    assert np.array_equal(found, reference(x, weights, biases)[0])


@pytest.mark.kin(5)
def test_wide_blocks_with_several_tiles(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few stages as there are anywhere: the first layer's weights fill them while x is waited for."""
    x, weights, _ = whole(rng, 260, [256, 256, 32], F16)
    biases = [rng.integers(-2, 3, n).astype(F32) for n in (256, 32)]
    with small(monkeypatch, 2), gk.emulate():
        found = gk.mlp(x, weights, biases)
    assert np.array_equal(found, reference(x, weights, biases)[0])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.kin(5)
@on_machines
@KERNELS
@pytest.mark.parametrize("widths", [[32, 64, 64, 32], [32, 48, 24, 16]], ids=str)
def test_functions_of_the_users(machine: Any, kernel: None, widths: list[int], rng: np.random.Generator) -> None:
    """A captured array's element and a number; sigmoid, of which 0 becomes no 0; both ends; no biases."""
    x, weights, biases = draw(rng, 40, widths, F16)
    slope = machine.array(np.float32([0.25, 4]))
    step = np.float32(0.5)

    def leaky(v: Any) -> Any:
        return v if v > 0 else slope[0] * v - step

    def of_leaky(v: np.ndarray) -> np.ndarray:
        return np.where(v > 0, v, 0.25 * v - 0.5)

    close(run(machine, x, weights, biases, leaky), reference(x, weights, biases, of_leaky))
    close(run(machine, x, weights, None, activations.sigmoid, last=leaky), reference(x, weights, None, sigmoid, of_leaky))
    close(run(machine, x, weights, None, activations.relu, last=activations.relu), reference(x, weights, None, relu, relu))


@on_machines
@KERNELS
def test_what_pads_a_layer_is_no_infinity(machine: Any, kernel: None, rng: np.random.Generator) -> None:
    """Of one over 0 in the columns that pad hidden layers nothing is left."""
    x, weights, biases = draw(rng, 10, [16, 24, 48, 16], F16)
    biases = [b + np.float32(9) for b in biases]
    close(run(machine, x, weights, biases, lambda v: np.float32(1) / v), reference(x, weights, biases, lambda v: 1 / v))


@on_machines
@KERNELS
def test_not_a_number_stays(machine: Any, kernel: None, rng: np.random.Generator) -> None:
    """In its own row."""
    x, weights, biases = whole(rng, 70, [32, 32, 32], F16)
    weights = [np.eye(32, dtype=F16), np.eye(32, dtype=F16)]
    x[3, 5], x[66, 2] = np.nan, np.inf
    found = run(machine, x, weights, biases)
    assert np.isnan(found[3]).all() and not np.isnan(np.delete(found, [3, 66], 0).astype(float)).any()


@on_machines
def test_leading_axes_and_views(machine: Any, rng: np.random.Generator) -> None:
    """Rows apart, a slice of columns, a result in a wider array, weights that are slices; columns beyond are left alone."""
    held = rng.standard_normal((3, 20, 64)).astype(F16)
    wide = rng.standard_normal((48, 64)).astype(F16)
    x, first, second = machine.array(held)[:, :, 16:48], machine.array(wide)[:32, :24], machine.array(wide)[:24, 8:24]
    out = machine.array(poison((3, 20, 32), F16))
    with machine.session():
        gk.mlp(x, [first, second], out=out[:, :, :16])
        made = gk.mlp(x, [first, second])
    expected = reference(held[:, :, 16:48].reshape(60, 32), [wide[:32, :24], wide[:24, 8:24]])
    close(machine.numpy(made).reshape(60, 16), expected)
    found = machine.numpy(out)
    assert np.array_equal(found[:, :, :16], machine.numpy(made)) and np.isnan(found[:, :, 16:].astype(float)).all()


@on_machines
@pytest.mark.parametrize("widths,order", [([30, 18, 10], "C"), ([34, 50, 7], "F"), ([32, 64, 5], "F")], ids=str)
def test_what_tma_cannot_load_goes_another_way(machine: Any, widths: list[int], order: str, rng: np.random.Generator) -> None:
    """Ten classes, or five: rows that are no multiples of 16 bytes."""
    x, weights, biases = draw(rng, 20, widths, F16, order)
    close(run(machine, x, weights, biases), reference(x, weights, biases))


@on_machines
def test_misaligned_bases(machine: Any, rng: np.random.Generator) -> None:
    """x, weights and a result that begin 4 bytes behind a multiple of 16."""
    x, weights, biases = draw(rng, 9, [32, 32, 32], F16)
    moved = []
    for array in (x, *weights, poison((9, 32), F16)):
        place = machine.array(np.zeros(array.size + 8, F16))[2:2 + array.size].reshape(array.shape)
        place[...] = machine.array(array)
        moved.append(place)
    with machine.session():
        gk.mlp(moved[0], moved[1:3], [machine.array(b) for b in biases], out=moved[3])
    close(machine.numpy(moved[3]), reference(x, weights, biases))


@pytest.mark.kin(5)
def test_the_same_bits_in_any_order_of_threads(rng: np.random.Generator) -> None:
    x, weights, biases = draw(rng, 131, [32, 64, 32], F16)
    found = []
    for seed in (None, 1):
        with gk.emulate(seed):
            found.append(gk.mlp(x, weights, biases))
    assert all(np.array_equal(found[0], other) for other in found[1:])


