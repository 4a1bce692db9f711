"""`gemmkit.torch.Linear` and `QuantisedLinear`, what layers share with `matmul`, and the bench that trains them."""

from __future__ import annotations

import copy
import io
import itertools
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
import gemmkit.torch
from bench import training, turns
from gemmkit.epilogues import Bias, SiLU
from gemmkit.layouts.quantised import dequantise, quantise
from gemmkit.torch.layers import ACTIVATIONS, FUNCTIONS
from tests.support.checks import functions_run
from tests.support.machines import on_devices
from tests.support.patches import Seeded

# ==========================================================================================================================
# `gemmkit.torch.Linear`, and what layers share with `matmul` and `op`: autocast, dtypes, widths, pickles.

torch: Any = pytest.importorskip("torch")


F = torch.nn.functional
Linear = gk.torch.Linear
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
scaled = gk.torch.op(name="tests::layers_silu", epilogue=lambda bias: Bias(bias) | SiLU())


def layers(device: str, activation: str | None = "gelu", bias: bool = True, dtype: Any = F32) -> tuple[Any, Any]:
    """A layer, and PyTorch's with the same parameters."""
    torch.manual_seed(0)
    ours = Linear(5, 8, bias=bias, activation=activation, device=device, dtype=dtype)
    theirs = torch.nn.Linear(5, 8, bias=bias, device=device, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    return ours, torch.nn.Sequential(theirs, *({"gelu": [torch.nn.GELU()], None: []}[activation]))


def near(x: Any, y: Any) -> None:
    """One dtype, and equal but for the roundings of a narrow one."""
    assert x.dtype == y.dtype and x.shape == y.shape
    loose = 2e-2 if x.dtype in (BF16, torch.float16) else 2e-2 if x.dtype == F32 else 1e-9
    torch.testing.assert_close(x, y, rtol=loose, atol=loose)


# -- calls that come again ------------------------------------------------------------------------------------------------

@pytest.mark.sample(2, at=1)
@pytest.mark.parametrize(("device", "dtype"), [("cpu", F32), *(pytest.param("cuda", dtype, marks=pytest.mark.gpu)
                                                               for dtype in (BF16, F32, F64))], indirect=["device"])
@pytest.mark.parametrize(("activation", "bias"), [("gelu", True), (None, True), ("gelu", False), (None, False)])
def test_a_known_layer_computes_with_what_is_there(activation: str | None, bias: bool, dtype: Any, device: str) -> None:
    """Its parameters are changed, replaced and moved, and x is a view, of other strides or misaligned: results and gradients
    are PyTorch's, and so are second ones."""
    ours, theirs = layers(device, activation, bias, dtype)
    room = torch.linspace(-1, 1, 400, device=device, dtype=dtype)
    views = [room[:15].view(3, 5), room[1:16].view(3, 5), room[:30].view(3, 10)[:, ::2], room[:15].view(5, 3).T, room[:30].view(2, 3, 5),
             room[:0].view(0, 5), room[:5].expand(3, 5)][::1 if device == "cuda" else 3]

    def agree(x: Any, is_twice: bool = False) -> None:
        found = []
        for layer in (ours, theirs):
            given = x.detach().requires_grad_()
            wanted = [given, *layer.parameters()]
            first = torch.autograd.grad(layer(given).square().sum(), wanted, create_graph=is_twice)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted) if is_twice else ()
            with torch.no_grad():
                found.append([layer(x), *first, *second])
        for one, other in zip(*found):
            near(one, other)

    for x in (*views, views[0]):
        agree(x)
    if device == "cuda":
        with torch.no_grad():
            for _ in range(2):
                ours(views[0])
            assert "described" not in functions_run(lambda: ours(views[0])), "no component is made by a known call"
    agree(views[0], is_twice=True)
    for change in (lambda p: p.data.mul_(-0.5), lambda p: setattr(p, "data", p.data.flip(0).contiguous()),
                   lambda p: setattr(p, "data", torch.cat([p.data.flatten()[:1], p.data.flatten()])[1:].view(p.shape)),
                   lambda p: setattr(p, "data", p.data.mT.contiguous().mT if p.dim() == 2 else p.data)):
        with torch.no_grad():
            for p in (*ours.parameters(), *theirs.parameters()):
                change(p)
        agree(views[0])


# -- autocast -------------------------------------------------------------------------------------------------------------

@on_devices
@pytest.mark.parametrize(("activation", "bias", "narrow"), [("gelu", True, BF16), (None, True, torch.float16), (None, False, BF16)])
def test_autocast_of_a_layer(activation: str | None, bias: bool, narrow: Any, device: str) -> None:
    """Results in its dtype, gradients in the parameters', as `torch.nn.Linear` has them."""
    found = []
    for layer in layers(device, activation, bias):
        x = torch.linspace(-1, 1, 15, device=device).view(3, 5).requires_grad_()
        with torch.autocast(device, dtype=narrow):
            y = layer(x)
            with torch.no_grad():
                near(layer(x), y)
            with torch.autocast(device, enabled=False):
                assert layer(x).dtype == F32
            assert layer(x.to(narrow)).dtype == narrow
        y.float().square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*found, strict=True):
        near(ours, theirs)
    assert found[0][0].dtype == narrow and all(x.dtype == F32 for x in found[0][1:])


@on_devices
def test_autocast_of_products(device: str) -> None:
    a, b, c, bias = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((3, 5), (5, 4), (3, 4), (4,)))
    with torch.autocast(device, dtype=BF16):
        near(gk.torch.matmul(a, b), torch.matmul(a, b))
        assert gk.torch.matmul(a, b.to(BF16), c).dtype == BF16
        near(gk.torch.matmul(a[0], b), torch.matmul(a[0], b))
        y = scaled(a, b, bias)
        near(y, F.silu(F.linear(a, b.mT, bias)))
        near(gk.torch.matmul(a.double(), b.double()), a.double() @ b.double())           # float64 stays
        with pytest.raises(TypeError, match=r"a has dtype torch\.float64 and b has dtype torch\.bfloat16"):
            gk.torch.matmul(a.double(), b)
    y.sum().backward()
    assert {x.grad.dtype for x in (a, b, bias)} == {F32}


def test_autocast_leaves_what_says_its_operator() -> None:
    f = gk.torch.op(name="tests::layers_min_plus", operator=gk.operators.MIN_PLUS)
    a, b = torch.randn(2, 3), torch.randn(3, 2)
    with gk.emulate(), torch.autocast("cpu", dtype=BF16):
        near(f(a, b), (a[:, :, None] + b).amin(1))


def test_autocast_within_a_compiled_model() -> None:
    ours, theirs = layers("cpu")
    x = torch.randn(3, 5)

    def step(layer: Any, x: Any) -> Any:
        with torch.autocast("cpu", dtype=BF16):
            return layer(x)

    with gk.emulate():
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        y = compiled(ours, x)
        near(y, step(theirs, x))
        y.float().sum().backward()
    assert ours.weight.grad.dtype == F32
    torch._dynamo.reset()


# -- pickles --------------------------------------------------------------------------------------------------------------

def saved(layer: Any) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("activation", "bias"), [*itertools.product([None, *gk.torch.layers.ACTIVATIONS], (True, False))])
@pytest.mark.parametrize("way", [saved, lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["save", "pickle", "copy"])
def test_a_layer_is_pickled(way: Callable[[Any], Any], activation: str | None, bias: bool) -> None:
    model = torch.nn.Sequential(Linear(3, 4, bias=bias, activation=activation))
    other, x = way(model), torch.randn(2, 3)
    assert repr(other) == repr(model) and other[0].weight is not model[0].weight
    with gk.emulate(), torch.no_grad():
        assert torch.equal(other(x), model(x))


def computed(layer: Any, x: Any) -> Any:
    with gk.emulate(), torch.no_grad():
        return layer(x).numpy()


def test_a_layer_goes_to_a_new_process() -> None:
    layer, x = Linear(3, 4, activation="relu"), torch.randn(2, 3)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(computed, (layer, x))
    torch.testing.assert_close(torch.from_numpy(found), F.relu(F.linear(x, layer.weight, layer.bias)).detach())


def test_an_operator_is_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(scaled)) is scaled and copy.deepcopy(scaled) is scaled
    unknown = pickle.dumps(scaled).replace(b"tests::layers_silu", b"tests::layers_what")
    with pytest.raises(ValueError, match=r"no operator tests::layers_what; call gemmkit\.torch\.op\(name="):
        pickle.loads(unknown)


# -- what is given --------------------------------------------------------------------------------------------------------

def test_layers_without_features() -> None:
    with gk.emulate(), pytest.warns(UserWarning, match="zero-element"):
        for layer in (Linear(0, 4), Linear(0, 4, activation="relu"), Linear(3, 0)):
            x = torch.randn(2, 3, layer.in_features, requires_grad=True)
            y = layer(x)
            y.sum().backward()
            assert y.shape == (2, 3, layer.out_features) and x.grad.shape == x.shape
        assert layer(torch.randn(0, 3)).shape == (0, 0) and layer(torch.randn(3)).shape == (0,)


@pytest.mark.parametrize("shape", [(2, 10), (4, 6), (), (5, 1)])
def test_a_wrong_width_is_refused_before_anything_runs(shape: tuple[int, ...]) -> None:
    """(No emulation: what ran would be refused otherwise.)"""
    with pytest.raises(ValueError, match=rf"x has shape \({', '.join(map(str, shape))}\); \(\.\.\., 5\) is needed, as in_features=5"):
        Linear(5, 4)(torch.randn(shape))


@pytest.mark.parametrize("layer", [Linear, gk.torch.QuantisedLinear])
def test_values_of_wrong_kinds(layer: Any) -> None:
    for told, words in ((dict(in_features=-128), "in_features=-128: a whole"), (dict(out_features=2.0), r"out_features=2\.0: a whole"),
                        (dict(in_features=2**70), "in_features=1180591620717411303424: a whole"),
                        (dict(in_features=[3]), r"in_features=\[3\]: a whole"), (dict(activation=["relu"]), r"activation=\['relu'\]: None or"),
                        (dict(activation=3), "activation=3: None or")):
        with pytest.raises(ValueError, match=words):
            layer(**{**dict(in_features=128, out_features=2), **told})


def test_dtypes_are_not_mixed() -> None:
    a, b, bias = torch.randn(3, 5), torch.randn(5, 4), torch.randn(4)
    with gk.emulate():
        for call in (lambda: gk.torch.matmul(a.to(BF16), b), lambda: gk.torch.matmul(a, b, torch.ones(3, 4, dtype=F64)),
                     lambda: scaled(a.half(), b, bias), lambda: gk.torch.matmul(a, b.to(torch.complex64)),
                     lambda: Linear(5, 4)(a.to(BF16)), lambda: Linear(5, 4, activation="relu")(a.double())):
            with pytest.raises(TypeError, match=r"has dtype torch\.\w+ and .* under torch\.autocast"):
                call()


# ==========================================================================================================================
# `gemmkit.torch.QuantisedLinear`: what it computes, its gradient, its state, and what it refuses.

QuantisedLinear = gk.torch.QuantisedLinear


@pytest.fixture
def _emulated() -> Iterator[None]:
    torch.manual_seed(0)
    with gk.emulate():
        yield


def layers_quantised(bits: int = 4, symmetric: bool = True, bias: bool = True, activation: Any = None) -> tuple[Any, Any]:
    """A layer, and the weights that it rounds to, in float64."""
    linear = torch.nn.Linear(64, 8, bias=bias)
    made = QuantisedLinear.from_linear(linear, bits, 32, activation=activation, symmetric=symmetric)
    rounded = dequantise(quantise(np.ascontiguousarray(linear.weight.detach().numpy().T), bits, 32, symmetric))
    return made, torch.from_numpy(rounded.astype(np.float16).astype(np.float64))


def expected(layer: Any, weights: Any, x: Any) -> Any:
    found = x @ weights if layer.bias is None else x @ weights + layer.bias.detach().double()
    return found if layer.activation is None else FUNCTIONS[layer.activation](found)


@pytest.mark.sample(8)
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_it_is_the_layer_of_the_rounded_weights(bits: int, symmetric: bool, bias: bool, activation: Any) -> None:
    """Fused where no gradient is wanted; else the function is PyTorch's, and the gradient that of float64."""
    layer, weights = layers_quantised(bits, symmetric, bias, activation)
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


@pytest.mark.sample(8)
@pytest.mark.usefixtures("_emulated")
def test_its_state() -> None:
    layer, weights = layers_quantised(symmetric=False)
    other = QuantisedLinear(64, 8, 4, 32, symmetric=False)
    x = torch.randn(3, 64, dtype=torch.float16)
    assert torch.equal(other(x), torch.zeros(3, 8, dtype=torch.float16))           # a new layer's weights are zero
    assert set(other.state_dict()) == {"words", "scales", "zeros", "bias"}
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)) and "bits=4, group=32" in repr(other)
    assert set(QuantisedLinear(64, 8, 2, 32, bias=False).state_dict()) == {"words", "scales"}


@pytest.mark.sample(8)
@pytest.mark.usefixtures("_emulated")
def test_it_takes_the_activation_of_the_layer_it_is_made_of() -> None:
    linear = gk.torch.Linear(64, 8, activation="relu")
    assert QuantisedLinear.from_linear(linear, group=64).activation == "relu"


@pytest.mark.sample(8)
@pytest.mark.usefixtures("_emulated")
def test_the_operators() -> None:
    layer, _ = layers_quantised(symmetric=False)
    x = torch.randn(3, 64, dtype=torch.float16, requires_grad=True)
    given = layer.words, layer.scales, layer.zeros
    tests = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(torch.ops.gemmkit.quantised_linear, (x, *given, layer.bias, 4, 32, None), test_utils=tests)
    torch.library.opcheck(torch.ops.gemmkit.quantised_linear_gradient,
                          (torch.randn(3, 8, dtype=torch.float16), *given, 4, 32), test_utils=tests)
    with pytest.raises(NotImplementedError, match="activation='relu'"):
        torch.ops.gemmkit.quantised_linear(x, *given, None, 4, 32, "relu").sum().backward()


@pytest.mark.sample(8)
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(("rows", "dtype", "symmetric"), [(3, torch.bfloat16, True), (70, torch.float16, False), (0, torch.float16, True)])
def test_float8(rows: int, dtype: torch.dtype, symmetric: bool) -> None:
    """A row of x is rounded to float8 with a scale of its own; its gradient is that of the product without this."""
    linear = torch.nn.Linear(256, 32)
    layer = QuantisedLinear.from_linear(linear, symmetric=symmetric, activation="relu", float8=True)
    x = torch.randn(rows, 256).to(dtype)
    scale = x.float().abs().amax(1, keepdim=True) / 448
    rounded = (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
    wanted = torch.relu(rounded @ layer.dequantised().T + linear.bias)
    found = layer(x)
    assert found.dtype == dtype and "float8=True" in repr(layer)
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)
    x.requires_grad_()
    QuantisedLinear.from_linear(linear, symmetric=symmetric, float8=True)(x).float().sum().backward()
    torch.testing.assert_close(x.grad.float(), layer.dequantised().sum(0).expand(rows, 256), rtol=2e-2, atol=2e-2)


@pytest.mark.sample(8)
@pytest.mark.usefixtures("_emulated")
def test_a_second_derivative() -> None:
    """Of a linear function: what the gradient is multiplied by has one."""
    layer, weights = layers_quantised(bias=False)
    x, toward = torch.randn(3, 64, dtype=torch.float16, requires_grad=True), torch.ones(3, 8, dtype=torch.float16)
    (grad,) = torch.autograd.grad(layer(x), x, toward.requires_grad_(), create_graph=True)
    (of_toward,) = torch.autograd.grad(grad.sum(), toward)
    assert torch.allclose(of_toward[0].double(), weights.sum(0), atol=1e-2)


@pytest.mark.sample(8)
@pytest.mark.usefixtures("_emulated")
def test_it_compiles_without_a_break() -> None:
    layer, _ = layers_quantised(activation="relu")
    x = torch.randn(3, 64, dtype=torch.float16)
    assert torch._dynamo.explain(layer)(x).graph_break_count == 0


@pytest.mark.sample(8)
@pytest.mark.usefixtures("_emulated")
def test_no_rows() -> None:
    layer, _ = layers_quantised()
    assert layer(torch.empty(0, 64, dtype=torch.float16)).shape == (0, 8)
    assert layer(torch.randn(64, dtype=torch.float16)).shape == (8,)


@pytest.mark.sample(8)
@pytest.mark.usefixtures("_emulated")
def test_what_is_refused() -> None:
    with pytest.raises(gk.ConfigError, match="bits=3"):
        QuantisedLinear(64, 8, bits=3)
    with pytest.raises(ValueError, match="in_features=64.*group=128"):
        QuantisedLinear(64, 8)
    with pytest.raises(ValueError, match="activation='swish'"):
        QuantisedLinear(128, 8, activation="swish")
    with pytest.raises(TypeError, match=r"linear=ReLU"):
        QuantisedLinear.from_linear(torch.nn.ReLU())
    layer, _ = layers_quantised()
    with pytest.raises(TypeError, match=r"x has dtype torch.float32.*x.half\(\)"):
        layer(torch.randn(3, 64))
    with pytest.raises(ValueError, match=r"x has shape \(3, 63\); \(\.\.\., 64\)"):
        layer(torch.randn(3, 63, dtype=torch.float16))


# -- dtypes ---------------------------------------------------------------------------------------------------------------

CONVERSIONS: dict[str, Any] = {
    "bfloat16": lambda x: x.bfloat16(), "half": lambda x: x.half(), "float": lambda x: x.float(), "double": lambda x: x.double(),
    "to": lambda x: x.to(torch.bfloat16), "to a device": lambda x: x.to("cpu", torch.float32), "type": lambda x: x.type(torch.bfloat16)}


@pytest.mark.sample(8)
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_conversions_keep_the_weights(name: str, symmetric: bool) -> None:
    """Of a model with such a layer: `bias` is converted, and buffers, which are bits, are not."""
    layer, weights = layers_quantised(symmetric=symmetric)
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


@pytest.mark.sample(8)
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_bfloat16(bits: int, activation: Any) -> None:
    layer, weights = layers_quantised(bits, False, activation=activation)
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


@pytest.mark.sample(8)
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle", "save"])
def test_round_trips(way: str) -> None:
    layer, _ = layers_quantised(symmetric=False, activation="silu")
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


@pytest.mark.sample(8)
@pytest.mark.usefixtures("_emulated")
def test_autocast_and_batches() -> None:
    layer, weights = layers_quantised()
    x = torch.randn(2, 3, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, layer.bias.grad.dtype) == (torch.bfloat16, torch.float32, torch.float16)
    x16 = x.detach().half()
    assert torch.equal(torch.func.vmap(layer, in_dims=1, out_dims=1)(x16), layer(x16))
    assert torch.allclose(torch.func.grad(lambda x: layer(x).float().sum())(x16).double(), weights.sum(1).expand(2, 3, 64), atol=8e-3)


# ==========================================================================================================================
# `bench.training` without a GPU: both models are the same, and a wrong gradient is no row.


def test_the_same_models() -> None:
    ours, theirs = training.models(4, "cpu", torch.float32)
    x = torch.randn(3, 4)
    with gk.emulate():
        assert training.compared(ours, theirs, x) < 1e-4
        torch.testing.assert_close(training.forward(ours, x)(), training.forward(theirs, x)())
        with torch.no_grad():
            theirs[0].weight += 1.0
        with pytest.raises(ValueError, match="differ by"):
            training.compared(ours, theirs, x)


def test_a_row(replaced: Seeded) -> None:
    times = iter([9.0, 9.0] + [2.0, 1.0] * training.TURNS)
    replaced(turns, "elapsed", lambda call, device, count, before=0: next(times))
    found = training.row("step", lambda: None, lambda: None, 0.0)
    assert (found["ratio"], found["ours_us"], found["peer_us"]) == (0.5, 2.0, 1.0)
