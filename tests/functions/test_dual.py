"""Dual arrays: derivatives agree with finite differences, and (on a GPU) with PyTorch's forward mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.functions import Dual
from tests.bad_calls.scope import Interface
from tests.support.checks import assert_close
from tests.support.machines import on_machines, random

STEP = 1e-6


def finite_difference(f: Callable[[np.ndarray], np.ndarray], x: np.ndarray, direction: np.ndarray) -> np.ndarray:
    return np.asarray((f(x + STEP * direction) - f(x - STEP * direction)) / (2 * STEP))


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp, "log": lambda x: np.log(x * x + 1), "sqrt": lambda x: np.sqrt(x * x + 2), "sin": np.sin, "cos": np.cos,
    "tan": np.tan, "tanh": np.tanh, "sinh": np.sinh, "cosh": np.cosh, "square": np.square, "abs": np.abs,
    "reciprocal": lambda x: np.reciprocal(x * x + 1), "log1p": lambda x: np.log1p(x * x), "expm1": np.expm1,
    "arithmetic": lambda x: (3 - x) * x / (x * x + 1) - 2 / (x**3 + 5) + (-x) ** 2 - x / 4 + 1,
    "arrays": lambda x: np.arange(5.0) * x + x * np.arange(5.0) - np.arange(5.0) / (x * x + 1) + (np.arange(5.0) - x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, rng: np.random.Generator) -> None:
    """Two directions at once, each against differences of the same function of real arrays."""
    x, directions = random(rng, (4, 5), "f8") / 2, random(rng, (4, 5, 2), "f8")
    out = FUNCTIONS[name](Dual.of(x, directions))
    assert_close(out.value, FUNCTIONS[name](x), 1e-15)
    for n in range(2):
        assert_close(out.tangents[..., n], finite_difference(FUNCTIONS[name], x, directions[..., n]), 1e-7)


@pytest.mark.kin(1)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("count", [1, 3])
def test_a_small_network(machine: Any, count: int, rng: np.random.Generator) -> None:
    """tanh(X W + b) V by its weights, in several directions at once: products in gemmkit, functions by NumPy's protocol."""
    sizes = (9, 7, 11, 5) if machine.emulated else (129, 65, 97, 33)
    n, inputs, hidden, outputs = sizes
    x, w, b, v = (random(rng, s, "f8") / 2 for s in ((n, inputs), (inputs, hidden), (hidden,), (hidden, outputs)))
    dw, dv = random(rng, (*w.shape, count), "f8"), random(rng, (*v.shape, count), "f8")

    def network(w: np.ndarray, v: np.ndarray) -> np.ndarray:
        return np.tanh(x @ w + b) @ v

    with machine.session():
        weights, last = (Dual.of(machine.array(value), machine.array(d)) for value, d in ((w, dw), (v, dv)))
        out = np.tanh(machine.array(x) @ weights + machine.array(b)) @ last
    assert_close(machine.numpy(out.value), network(w, v), 1e-13)
    for k in range(count):
        expected = (network(w + STEP * dw[..., k], v + STEP * dv[..., k])
                    - network(w - STEP * dw[..., k], v - STEP * dv[..., k])) / (2 * STEP)
        assert_close(machine.numpy(out.tangents[..., k]), expected, 1e-7)


@pytest.mark.kin(1)
@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "CC"])
def test_gemm_ex_of_dual_arrays(machine: Any, trans: str, rng: np.random.Generator) -> None:
    """The product rule, in place, with alpha and beta: all transposes."""
    M, N, K = (9, 18, 5) if machine.emulated else (130, 66, 77)
    a, da = random(rng, (M, K) if trans[0] == "N" else (K, M), "f4"), random(rng, (M, K) if trans[0] == "N" else (K, M), "f4")
    b, db = random(rng, (K, N) if trans[1] == "N" else (N, K), "f4"), random(rng, (K, N) if trans[1] == "N" else (N, K), "f4")
    c, dc = random(rng, (M, N), "f4"), random(rng, (M, N), "f4")
    with machine.session():
        given = [Dual.of(machine.array(x), machine.array(dx)) for x, dx in ((a, da), (b, db), (c, dc))]
        out = gk.blas.gemmEx(trans[0], trans[1], 1.5, given[0], given[1], -2.0, given[2])
    assert out is given[2]
    a, da = (x.astype("f8") if trans[0] == "N" else x.astype("f8").T for x in (a, da))
    b, db = (x.astype("f8") if trans[1] == "N" else x.astype("f8").T for x in (b, db))
    assert_close(machine.numpy(out.value), 1.5 * a @ b - 2 * c, 1e-6)
    assert_close(machine.numpy(out.tangents[..., 0]), 1.5 * (a @ db + da @ b) - 2 * dc, 1e-6)


@on_machines
def test_matmul_with_c_out_and_float16(machine: Any, rng: np.random.Generator) -> None:
    M, N, K = 18, 20, 7
    parts = [random(rng, (*shape, 3), "f2") for shape in ((M, K), (K, N), (M, N))]
    with machine.session():
        a, b, c = (Dual(machine.array(x)) for x in parts)
        out = Dual(machine.array(np.full((M, N, 3), np.nan, np.float16)))
        assert gk.matmul(a, b, c, out=out) is out
        transposed = (b.T @ a.T).T
    x, y, z = (p.astype("f8") for p in parts)
    value = x[..., 0] @ y[..., 0]
    tangents = np.stack([x[..., 0] @ y[..., k] + x[..., k] @ y[..., 0] for k in (1, 2)], -1)
    assert_close(machine.numpy(out.value), value + z[..., 0], 2e-3)
    assert_close(machine.numpy(out.tangents), tangents + z[..., 1:], 2e-3)
    assert_close(machine.numpy(transposed.tangents), tangents, 2e-3)


@pytest.mark.kin(1)
def test_seed_gives_the_jacobian(rng: np.random.Generator) -> None:
    """y_i = sum_j A_ij x_j^2: the tangents are the whole Jacobian at once."""
    a, x = random(rng, (6, 4), "f8"), random(rng, (4, 1), "f8")
    with gk.emulate():
        y = a @ Dual.seed(x) ** 2
    assert y.shape == (6, 1) and y.count == 4
    assert_close(y.tangents[:, 0, :], 2 * a * x.T, 1e-14)


def test_parts_are_views() -> None:
    x = Dual(np.arange(24.0).reshape(3, 4, 2))
    assert x.shape == (3, 4) and x.ndim == 2 and x.dtype == np.float64
    x.value[0, 0] = 7
    assert x.parts[0, 0, 0] == 7 and x[0, 0].value == 7 and x[1:, ..., 2].shape == (2,)
    assert np.shares_memory(x.T.parts, x.parts) and "tangents" in repr(x)


def test_what_is_refused() -> None:
    one, two = Dual(np.zeros((3, 3, 2))), Dual(np.zeros((3, 3, 3)))
    with pytest.raises(ValueError, match="dual numbers with 1 and 2 tangents"):
        one + two
    with pytest.raises(ValueError, match=r"parts has shape \(3, 1\); a last axis of 1 \+ p"):
        Dual(np.zeros((3, 1)))
    with pytest.raises(TypeError, match="parts has dtype int64; derivatives are floats"):
        Dual(np.zeros((3, 2), np.int64))
    with pytest.raises(ValueError, match=r"tangents has shape \(2, 2\), and value \(3,\)"):
        Dual.of(np.zeros(3), np.zeros((2, 2)))
    with gk.emulate(), pytest.raises(TypeError, match="value is on GPU 0, and the emulator works on NumPy arrays"):
        Dual.of(Interface(np.zeros(3)), np.zeros((3, 2)))
    with gk.emulate(), pytest.raises(TypeError, match="value is on GPU 0, and the emulator works on NumPy arrays"):
        Dual.seed(Interface(np.zeros(3)))
    with pytest.raises(TypeError, match="arctan of dual numbers is not known"):
        np.arctan(one)
    with pytest.raises(TypeError, match="the exponent is dual"):
        one**one
    with gk.emulate():
        with pytest.raises(ValueError, match="b has 2 tangents and another operand 1"):
            one @ two
        with pytest.raises(TypeError, match="out is not a dual array"):
            gk.matmul(one, one, out=np.zeros((3, 3)))
        with pytest.raises(ValueError, match=r"a has shape \(3,\); a matrix of 2 dimensions"):
            one[0] @ one
        with pytest.raises(ValueError, match="a has 2 tangents and c 1"):
            gk.blas.gemmEx("N", "N", 1.0, two, one, 0.0, one)


@pytest.mark.gpu
def test_torch_forward_mode(rng: np.random.Generator) -> None:
    """The same network differentiated by PyTorch."""
    import torch
    from torch.autograd import forward_ad

    x, w, dw, v, dv = (torch.from_numpy(random(rng, s, "f8")).cuda() / 8
                       for s in ((129, 65), (65, 97), (65, 97), (97, 33), (97, 33)))
    out = gk.matmul(np.tanh(gk.matmul(x, Dual.of(w, dw))), Dual.of(v, dv))
    with forward_ad.dual_level():
        expected = torch.tanh(x @ forward_ad.make_dual(w, dw)) @ forward_ad.make_dual(v, dv)
        value, tangent = forward_ad.unpack_dual(expected)
    assert_close(out.value.cpu().numpy(), value.cpu().numpy(), 1e-13)
    assert_close(out.tangents[..., 0].cpu().numpy(), tangent.cpu().numpy(), 1e-13)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("count", [1, 3])
def test_torch_jvp(count: int, dtype: str, rng: np.random.Generator) -> None:
    """All directions at once, against PyTorch's of float64, one at a time."""
    import torch

    shapes = (130, 65), (65, 97), (97,), (97, 33)
    x, w, b, v = (torch.from_numpy(random(rng, shape, "f8")).cuda() / 8 for shape in shapes)
    dw, dv = (torch.from_numpy(random(rng, (*value.shape, count), "f8")).cuda() for value in (w, v))

    def network(w: Any, v: Any) -> Any:
        return torch.tanh(x @ w + b) @ v

    kind = torch.float32 if dtype == "f4" else torch.float64
    weights, last = Dual.of(w.to(kind), dw.to(kind)), Dual.of(v.to(kind), dv.to(kind))
    out = gk.matmul(np.tanh(gk.matmul(x.to(kind), weights) + b.to(kind)), last)
    assert out.parts.dtype == kind and out.count == count
    for k in range(count):
        value, tangent = torch.func.jvp(network, (w, v), (dw[..., k], dv[..., k]))
        assert_close(out.value.cpu().numpy(), value.cpu().numpy(), 1e-5 if dtype == "f4" else 1e-13)
        assert_close(out.tangents[..., k].cpu().numpy(), tangent.cpu().numpy(), 1e-5 if dtype == "f4" else 1e-13)


@pytest.mark.gpu
def test_functions_of_tensors(rng: np.random.Generator) -> None:
    """Every function that a Dual has is the tensor's own, and its derivative PyTorch's."""
    import torch

    from gemmkit.functions.number_systems import DERIVATIVES

    x, dx = (torch.from_numpy(random(rng, (7, 5), "f8")).cuda() for _ in range(2))
    x = x.abs() / 2 + 0.25                                      # where all of them are smooth
    for name in DERIVATIVES:
        value, tangent = torch.func.jvp(lambda t: getattr(t, name)(), (x,), (dx,))
        out = getattr(Dual.of(x, dx), name)()
        assert_close(out.value.cpu().numpy(), value.cpu().numpy(), 1e-15)
        assert_close(out.tangents[..., 0].cpu().numpy(), tangent.cpu().numpy(), 1e-14)
