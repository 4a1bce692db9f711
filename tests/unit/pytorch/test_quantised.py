"""`gemmkit.torch.QuantisedLinear`: what it computes, its gradient, its state, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
import gemmkit.torch  # noqa: E402
from gemmkit.layouts.quantised import dequantise, quantise  # noqa: E402
from gemmkit.torch.layers import ACTIVATIONS, FUNCTIONS  # noqa: E402

pytestmark = pytest.mark.sample(8)
QuantisedLinear = gk.torch.QuantisedLinear


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    torch.manual_seed(0)
    with gk.emulate():
        yield


def layers(bits: int = 4, symmetric: bool = True, bias: bool = True, activation: Any = None) -> tuple[Any, Any]:
    """A layer, and the weights that it rounds to, in float64."""
    linear = torch.nn.Linear(64, 8, bias=bias)
    made = QuantisedLinear.from_linear(linear, bits, 32, activation=activation, symmetric=symmetric)
    rounded = dequantise(quantise(np.ascontiguousarray(linear.weight.detach().numpy().T), bits, 32, symmetric))
    return made, torch.from_numpy(rounded.astype(np.float16).astype(np.float64))


def expected(layer: Any, weights: Any, x: Any) -> Any:
    found = x @ weights if layer.bias is None else x @ weights + layer.bias.detach().double()
    return found if layer.activation is None else FUNCTIONS[layer.activation](found)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_it_is_the_layer_of_the_rounded_weights(bits: int, symmetric: bool, bias: bool, activation: Any) -> None:
    """Fused where no gradient is wanted; else the function is PyTorch's, and the gradient that of float64."""
    layer, weights = layers(bits, symmetric, bias, activation)
    x = torch.randn(2, 3, 64, dtype=torch.float16)
    with torch.no_grad():
        found = layer(x)
    assert found.dtype == torch.float16 and found.shape == (2, 3, 8)
    assert torch.allclose(found.double(), expected(layer, weights, x.double()), atol=4e-3)
    x64 = x.double().requires_grad_()
    y, y64 = layer(x.requires_grad_()), expected(layer, weights, x64)
    assert torch.allclose(y.double(), y64, atol=4e-3)
    toward = torch.randn(2, 3, 8, dtype=torch.float16)
    y.backward(toward)
    y64.backward(toward.double())
    assert torch.allclose(x.grad.double(), x64.grad, atol=8e-3)
    assert not bias or layer.bias.grad.shape == (8,)


def test_its_state() -> None:
    layer, weights = layers(symmetric=False)
    other = QuantisedLinear(64, 8, 4, 32, symmetric=False)
    x = torch.randn(3, 64, dtype=torch.float16)
    assert torch.equal(other(x), torch.zeros(3, 8, dtype=torch.float16))           # a new layer's weights are zero
    assert set(other.state_dict()) == {"words", "scales", "zeros", "bias"}
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)) and "bits=4, group=32" in repr(other)
    assert set(QuantisedLinear(64, 8, 2, 32, bias=False).state_dict()) == {"words", "scales"}


def test_it_takes_the_activation_of_the_layer_it_is_made_of() -> None:
    linear = gk.torch.Linear(64, 8, activation="relu")
    assert QuantisedLinear.from_linear(linear, group=64).activation == "relu"


def test_the_operators() -> None:
    layer, _ = layers(symmetric=False)
    x = torch.randn(3, 64, dtype=torch.float16, requires_grad=True)
    given = layer.words, layer.scales, layer.zeros
    tests = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(torch.ops.gemmkit.quantised_linear, (x, *given, layer.bias, 4, 32, None), test_utils=tests)
    torch.library.opcheck(torch.ops.gemmkit.quantised_linear_gradient,
                          (torch.randn(3, 8, dtype=torch.float16), *given, 4, 32), test_utils=tests)
    with pytest.raises(NotImplementedError, match="activation='relu'"):
        torch.ops.gemmkit.quantised_linear(x, *given, None, 4, 32, "relu").sum().backward()


def test_a_second_derivative() -> None:
    """Of a linear function: what the gradient is multiplied by has one."""
    layer, weights = layers(bias=False)
    x, toward = torch.randn(3, 64, dtype=torch.float16, requires_grad=True), torch.ones(3, 8, dtype=torch.float16)
    (grad,) = torch.autograd.grad(layer(x), x, toward.requires_grad_(), create_graph=True)
    (of_toward,) = torch.autograd.grad(grad.sum(), toward)
    assert torch.allclose(of_toward[0].double(), weights.sum(0), atol=1e-2)


def test_it_compiles_without_a_break() -> None:
    layer, _ = layers(activation="relu")
    x = torch.randn(3, 64, dtype=torch.float16)
    assert torch._dynamo.explain(layer)(x).graph_break_count == 0


def test_no_rows() -> None:
    layer, _ = layers()
    assert layer(torch.empty(0, 64, dtype=torch.float16)).shape == (0, 8)
    assert layer(torch.randn(64, dtype=torch.float16)).shape == (8,)


def test_what_is_refused() -> None:
    with pytest.raises(gk.ConfigError, match="bits=3"):
        QuantisedLinear(64, 8, bits=3)
    with pytest.raises(ValueError, match="in_features=64.*group=128"):
        QuantisedLinear(64, 8)
    with pytest.raises(ValueError, match="activation='swish'"):
        QuantisedLinear(128, 8, activation="swish")
    with pytest.raises(TypeError, match=r"linear=ReLU"):
        QuantisedLinear.from_linear(torch.nn.ReLU())
    layer, _ = layers()
    with pytest.raises(TypeError, match=r"x has dtype torch.float32.*x.half\(\)"):
        layer(torch.randn(3, 64))
    with pytest.raises(ValueError, match=r"x has shape \(3, 63\); \(\.\.\., 64\)"):
        layer(torch.randn(3, 63, dtype=torch.float16))


# -- dtypes ---------------------------------------------------------------------------------------------------------------

CONVERSIONS: dict[str, Any] = {
    "bfloat16": lambda x: x.bfloat16(), "half": lambda x: x.half(), "float": lambda x: x.float(), "double": lambda x: x.double(),
    "to": lambda x: x.to(torch.bfloat16), "to a device": lambda x: x.to("cpu", torch.float32), "type": lambda x: x.type(torch.bfloat16)}


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_conversions_keep_the_weights(name: str, symmetric: bool) -> None:
    """Of a model with such a layer: `bias` is converted, and buffers, which are bits, are not."""
    layer, weights = layers(symmetric=symmetric)
    before = {name: x.clone() for name, x in layer.named_buffers()}
    dtype = CONVERSIONS[name](torch.nn.Linear(1, 1)).weight.dtype
    model = CONVERSIONS[name](torch.nn.Sequential(layer))
    assert model[0] is layer and layer.bias.dtype == dtype
    assert all(x.dtype == before[n].dtype and torch.equal(x, before[n]) for n, x in layer.named_buffers())
    x = torch.randn(3, 64)
    for narrow in (torch.float16, torch.bfloat16):
        found = model(x.to(narrow)).detach()
        assert found.dtype == narrow
        assert torch.allclose(found.double(), expected(layer, weights, x.to(narrow).double()), atol=4e-2)
    with pytest.raises(TypeError, match="x has dtype torch.float32"):
        model(x)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_bfloat16(bits: int, activation: Any) -> None:
    layer, weights = layers(bits, False, activation=activation)
    layer.bfloat16()
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        found = layer(x)
    assert found.dtype == torch.bfloat16 and torch.allclose(found.double(), expected(layer, weights, x.double()), atol=4e-2)
    x64, toward = x.double().requires_grad_(), torch.randn(2, 3, 8, dtype=torch.bfloat16)
    layer(x.requires_grad_()).backward(toward)
    expected(layer, weights, x64).backward(toward.double())
    assert torch.allclose(x.grad.double(), x64.grad, atol=4e-2)
    assert layer.bias.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle", "save"])
def test_round_trips(way: str) -> None:
    layer, _ = layers(symmetric=False, activation="silu")
    layer.bfloat16()
    if way == "state_dict":
        other = QuantisedLinear(64, 8, 4, 32, activation="silu", symmetric=False)
        other.load_state_dict(layer.state_dict())
        other.bfloat16()
    elif way == "save":
        file = io.BytesIO()
        torch.save(layer, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    else:
        other = copy.deepcopy(layer) if way == "deepcopy" else pickle.loads(pickle.dumps(layer))
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(other(x), layer(x)) and other.scales.data_ptr() != layer.scales.data_ptr()


def test_autocast_and_batches() -> None:
    layer, weights = layers()
    x = torch.randn(2, 3, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, layer.bias.grad.dtype) == (torch.bfloat16, torch.float32, torch.float16)
    x16 = x.detach().half()
    assert torch.equal(torch.func.vmap(layer, in_dims=1, out_dims=1)(x16), layer(x16))
    assert torch.allclose(torch.func.grad(lambda x: layer(x).float().sum())(x16).double(), weights.sum(1).expand(2, 3, 64), atol=8e-3)
