"""LSTM cells in every kernel, against NumPy in float64, into poisoned outputs; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues.activations import tanh
from tests.support.joined import FAMILIES, config, dtype_of
from tests.support.machines import is_poison, on_machines, poison


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def reference(x: Any, h: Any, c: Any, w: Any, u: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    i, f, g, o = np.split(x.astype("f8") @ w.astype("f8") + h.astype("f8") @ u.astype("f8") + b, 4, axis=1)
    new = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(new), new


def drawn(M: int, X: int, H: int, dtype: Any, gates: int = 4) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(M + X + H)
    x, h, w, u = (rng.standard_normal(shape).astype(dtype) for shape in ((M, X), (M, H), (X, gates * H), (H, gates * H)))
    return x, h, rng.standard_normal((M, H)).astype("f4"), w, u, rng.standard_normal(gates * H).astype("f4")


@pytest.mark.sample(40)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(19, 24, 16), (5, 7, 13), (1, 1, 1), (64, 32, 8), (3, 0, 5)], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_cells(machine: Any, family: str, shape: tuple[int, int, int], biased: bool) -> None:
    dtype = dtype_of(family)
    x, h, c, w, u, b = drawn(*shape, dtype)
    with machine.session():
        there = [machine.array(v) for v in (x, h, c, w, u)]
        out, state = machine.array(poison(h.shape, "f4")), machine.array(poison(h.shape, "f4"))
        got = gk.functions.lstm_cell(*there, machine.array(b) if biased else None, out=out, state=state, conf=config(family))
    assert got[0] is out and got[1] is state
    for found, wanted in zip((out, state), reference(x, h, c, w, u, b if biased else 0)):
        np.testing.assert_allclose(machine.numpy(found), wanted, rtol=2e-5, atol=2e-5)


@on_machines
def test_views_and_new_arrays(machine: Any) -> None:
    """PyTorch's weights are transposed views; the results are like x and c."""
    x, h, c, w, u, b = drawn(9, 6, 8, "f2")
    with machine.session():
        w_there, u_there = machine.array(np.ascontiguousarray(w.T)).T, machine.array(np.ascontiguousarray(u.T)).T
        out, state = gk.functions.lstm_cell(machine.array(x), machine.array(h), machine.array(c), w_there, u_there, machine.array(b))
    assert machine.numpy(out).dtype == np.float16 and machine.numpy(state).dtype == np.float32
    for found, wanted in zip((out, state), reference(x, h, c, w, u, b)):
        np.testing.assert_allclose(machine.numpy(found), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("family", FAMILIES)
def test_the_simplified_cell(machine: Any, family: str) -> None:
    x, h, _, w, u, b = drawn(19, 24, 16, dtype_of(family), 1)
    with machine.session():
        there = [machine.array(v) for v in (x, h)], [machine.array(v) for v in (w, u, b)]
        out = machine.array(poison(h.shape, "f4"))
        assert gk.functions.lstm_cell(*there[0], None, *there[1], out=out, conf=config(family)) is out
        other = gk.functions.lstm_cell(*there[0], None, *there[1][:2], activation=tanh)
    sums = x.astype("f8") @ w.astype("f8") + h.astype("f8") @ u.astype("f8")
    np.testing.assert_allclose(machine.numpy(out), np.maximum(sums + b, 0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(machine.numpy(other), np.tanh(sums), rtol=2e-3, atol=2e-3)


X, H, C, W, U, B = drawn(3, 4, 5, "f4")
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "rows of h": (lambda out: gk.functions.lstm_cell(X, H[:2], C, W, U, out=out), ValueError, r"h has shape \(2, 5\); .* it needs \(3, 5\)"),
    "one gate's weights": (lambda out: gk.functions.lstm_cell(X, H, C, W[:, :5], U, out=out), ValueError, r"w has shape \(4, 5\); .* it needs \(4, 20\)"),
    "weights of u": (lambda out: gk.functions.lstm_cell(X, H, C, W, W, out=out), ValueError, r"u has shape \(4, 20\); .* it needs \(5, 20\)"),
    "state": (lambda out: gk.functions.lstm_cell(X, H, C[:, :4], W, U, out=out), ValueError, r"c has shape \(3, 4\); .* it needs \(3, 5\)"),
    "bias": (lambda out: gk.functions.lstm_cell(X, H, C, W, U, B[:5], out=out), ValueError, r"b has shape \(5,\); \(20,\) is needed"),
    "a vector": (lambda out: gk.functions.lstm_cell(X[0], H, C, W, U, out=out), ValueError, "x has 1 dimensions; a matrix of 2 is needed"),
    "an activation": (lambda out: gk.functions.lstm_cell(X, H, C, W, U, activation=tanh, out=out), TypeError, "an LSTM's own are sigmoid and tanh"),
    "a state of none": (lambda out: gk.functions.lstm_cell(X, H, None, W[:, :5], U[:, :5], state=C.copy(), out=out), TypeError, "state is given without c"),
    "the old state": (lambda out: gk.functions.lstm_cell(X, H, C, W, U, state=C, out=out), ValueError, "array of KeptState overlaps c"),
    "the output is h": (lambda out: gk.functions.lstm_cell(X, H, C, W, U, out=H), ValueError, "overlaps"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, kind, said = REFUSED[name]
    out = poison((3, 5), "f4")
    before = [v.copy() for v in (X, H, C)]
    with gk.emulate(), pytest.raises(kind, match=said):
        call(out)
    assert is_poison(out) and all(np.array_equal(x, y) for x, y in zip(before, (X, H, C)))
