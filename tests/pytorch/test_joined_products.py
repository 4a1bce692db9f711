"""`gemmkit.torch.accelerate`'s part "qkv": queries, keys and values of one product where nothing is recorded, and of three
wherever that product would not serve."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
import gemmkit.torch  # noqa: E402
from gemmkit.torch import accelerate, modules  # noqa: E402
from gemmkit.torch.layers import Unadded, summed  # noqa: E402
from tests.pytorch.test_accelerate import MLP, fates, gradients, near  # noqa: E402
from tests.support.checks import functions_run  # noqa: E402
from tests.support.machines import on_devices  # noqa: E402

nn, F = torch.nn, torch.nn.functional
BF16, F16 = torch.bfloat16, torch.float16


class Attention(nn.Module):
    """As decoders of transformers call their projections."""

    def __init__(self, width: int = 32, keys: int = 16, biased: bool = False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, n, bias=biased) for n in (width, keys, keys))
        self.o_proj = nn.Linear(width, width, bias=False)

    def projected(self, hidden_states: Any) -> tuple[Any, ...]:
        return tuple(m(hidden_states).view(*hidden_states.shape[:-1], -1, 8).transpose(1, 2)
                     for m in (self.q_proj, self.k_proj, self.v_proj))

    def forward(self, hidden_states: Any, mask: Any = None) -> Any:
        q, k, v = self.projected(hidden_states)
        found = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(found.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))


class OtherAttention(Attention):
    """One that changes its input in place between two products."""

    def projected(self, hidden_states: Any) -> tuple[Any, ...]:
        hidden_states = hidden_states.clone() if not torch.is_inference_mode_enabled() else hidden_states
        parts = []
        for m in (self.q_proj, self.k_proj, self.v_proj):
            parts.append(m(hidden_states).view(*hidden_states.shape[:-1], -1, 8).transpose(1, 2))
            hidden_states.mul_(0.5)
        return tuple(parts)


class CrossAttention(Attention):
    def projected(self, hidden_states: Any) -> tuple[Any, ...]:
        of_keys = hidden_states.flip(1)
        return tuple(m(x).view(*x.shape[:-1], -1, 8).transpose(1, 2)
                     for m, x in ((self.q_proj, hidden_states), (self.k_proj, of_keys), (self.v_proj, of_keys)))


def attention(device: str, kind: type = Attention, biased: bool = False) -> tuple[Any, Any, Any]:
    """A model, another with the same parameters, and an input."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(biased=biased)).to(device, BF16).eval()
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1)).to(device, BF16)
    return model, copy.deepcopy(model), x


@on_devices
@pytest.mark.parametrize("biased", [True, False])
def test_queries_keys_and_values_of_one_product(biased: bool, device: str) -> None:
    """Parameters, names, an optimiser, a state that is loaded and a file stay; and all is undone."""
    model, other, x = attention(device, biased=biased)
    parameters, names, before = list(model.parameters()), list(model.state_dict()), io.BytesIO()
    torch.save(model.state_dict(), before)
    report = accelerate(model)
    assert fates(report)["0"] == "gk.torch.Linear, one for q, k and v"
    own = model[0]
    assert all(a is b for a, b in zip(model.parameters(), parameters)) and list(model.state_dict()) == names
    assert own.q_proj.weight.untyped_storage().data_ptr() == own.v_proj.weight.untyped_storage().data_ptr()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for one in (x, x[:, :1], x[:1, :1]):
                near([model(one)], [other(one)], 0.02)
            assert functions_run(lambda: model(x)).count("taken") == 3
    written = io.BytesIO()
    torch.save(model.state_dict(), written)
    assert abs(len(written.getvalue()) - len(before.getvalue())) < 4000
    fresh = Attention(biased=biased).to(device, BF16)
    for m in (own, other[0]):
        m.load_state_dict(fresh.state_dict())
        optimiser = torch.optim.SGD(m.parameters(), lr=0.5)
        m.k_proj.weight.grad = torch.ones_like(m.k_proj.weight)
        optimiser.step()
    with torch.no_grad():
        assert own._gemmkit_joined.is_whole([own.q_proj, own.k_proj, own.v_proj])
        near([model(x)], [other(x)], 0.02)
    near(gradients(model, x), gradients(other, x), 0.03)
    report.undo()
    assert type(own) is Attention and "_gemmkit_joined" not in own.q_proj.__dict__
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(parameters)
    with torch.no_grad():
        assert torch.equal(model(x), other(x)) and all(a is b for a, b in zip(model.parameters(), parameters))


@on_devices
@pytest.mark.parametrize("kind", [OtherAttention, CrossAttention])
def test_a_product_of_another_input_is_computed(kind: type, device: str) -> None:
    model, other, x = attention(device, kind)
    accelerate(model)
    joined = model[0]._gemmkit_joined
    for _ in range(2):
        with torch.no_grad():
            near([model(x)], [other(x)], 0.02)
        assert joined.held is None and joined.linear is None, "the product served not all, and is computed no more"


@on_devices
def test_what_makes_three_products_of_one(device: str) -> None:
    """A gradient, hooks, a compiler, autocast, another dtype and a copy; each is right."""
    model, other, x = attention(device)
    accelerate(model)
    own = model[0]
    assert "taken" not in functions_run(lambda: model(x))                  # parameters that want gradients
    with torch.no_grad():
        copied = copy.deepcopy(model)
        near([copied(x)], [model(x)], 0.02)
        assert "taken" not in functions_run(lambda: copied(x))
        hook = own.k_proj.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        changed = copy.deepcopy(other)
        changed[0].k_proj.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        near([model(x)], [changed(x)], 0.02)
        hook.remove()
        assert "taken" in functions_run(lambda: model(x))
        torch._dynamo.reset()
        near([torch.compile(model, backend="eager", fullgraph=True)(x)], [other(x)], 0.02)
        with torch.autocast(device, dtype=F16):
            near([model(x)], [other(x)], 0.02)
        model.half()
        near([model(x.half())], [other.half()(x.half())], 0.02)
        assert own._gemmkit_joined.linear is None


def packed_attention(device: str, biased: bool = False, symmetric: bool = True) -> tuple[Any, Any, Any]:
    """`attention` with packed layers of 4 bits, and a copy of it."""
    model, _, x = attention(device, biased=biased)
    own = model[0]
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(own, name, gk.torch.QuantisedLinear.from_linear(getattr(own, name), group=32, symmetric=symmetric))
    model.to(BF16)
    return model, copy.deepcopy(model), x


@on_devices
@pytest.mark.parametrize("biased,symmetric", [(False, True), (True, False)])
def test_packed_queries_keys_and_values_of_one_product(biased: bool, symmetric: bool, device: str) -> None:
    """One launch for three; buffers, names, a state that is loaded and copies stay; and all is undone."""
    model, other, x = packed_attention(device, biased, symmetric)
    names, buffers = list(model.state_dict()), list(model.buffers())
    report = accelerate(model)
    assert fates(report)["0"] == "gk.torch.Linear, one for q, k and v"
    own = model[0]
    assert all(a is b for a, b in zip(model.buffers(), buffers)) and list(model.state_dict()) == names
    assert own.q_proj.words.untyped_storage().data_ptr() == own.v_proj.words.untyped_storage().data_ptr()
    with torch.no_grad():
        for one in (x, x[:, :1], x[:1, :1]):
            near([model(one)], [other(one)], 0.02)
        assert functions_run(lambda: model(x)).count("taken") == 3
        fresh, _, _ = packed_attention(device, biased, symmetric)
        with torch.no_grad():
            fresh[0].k_proj.words.random_(-2**31, 2**31 - 1)
        for m in (model, other):
            m.load_state_dict(fresh.state_dict())
        near([model(x)], [other(x)], 0.02)
        assert functions_run(lambda: model(x)).count("taken") == 3
        hook = own.k_proj.register_forward_pre_hook(lambda m, args: (args[0] * 2,))       # each by itself, of its view
        changed = copy.deepcopy(other)
        changed[0].k_proj.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        near([model(x)], [changed(x)], 0.02)
        hook.remove()
        copied = copy.deepcopy(model)
        near([copied(x)], [other(x)], 0.02)
        assert "taken" not in functions_run(lambda: copied(x))
        torch._dynamo.reset()
        near([torch.compile(model, backend="eager", fullgraph=True)(x)], [other(x)], 0.02)
        with torch.autocast(device, dtype=F16):
            near([model(x)], [other(x)], 0.02)
    near(gradients(model, x), gradients(other, x), 0.03)
    report.undo()
    assert type(own) is Attention and "_gemmkit_joined" not in own.q_proj.__dict__
    assert own.k_proj.words.is_contiguous() and torch.equal(own.k_proj.words, other[0].k_proj.words)
    with torch.no_grad():
        assert torch.equal(model(x), other(x))


def test_packed_queries_keys_and_values_that_stay_three(in_the_emulator: None) -> None:
    for changes, why in (({"group": 16}, "several widths, bits, groups"), ({"bits": 2}, "several widths, bits, groups"),
                         ({"activation": "relu"}, "has an activation"), ({"symmetric": False}, "several widths")):
        model, _, _ = packed_attention("cpu")
        layer: dict[str, Any] = {"bits": 4, "group": 32, "bias": False, **changes}
        model[0].v_proj = gk.torch.QuantisedLinear(32, model[0].v_proj.out_features, **layer)
        assert why in fates(accelerate(model))["0"]
    model, _, _ = packed_attention("cpu")
    model[0].v_proj = nn.Linear(32, model[0].v_proj.out_features, bias=False).bfloat16()
    assert "is not gemmkit's" in fates(accelerate(model))["0"]


def test_queries_keys_and_values_that_stay_three(in_the_emulator: None) -> None:
    model, _, _ = attention("cpu")
    assert "in training" in fates(accelerate(model.train()))["0"]
    model, _, _ = attention("cpu")
    model[0].k_proj = nn.Linear(32, 16).bfloat16()
    assert "one of them alone a bias" in fates(accelerate(model))["0"]
    model, _, _ = attention("cpu")
    assert "is not gemmkit's" in fates(accelerate(model, parts=("qkv",)))["0"]
    model, _, _ = attention("cpu")
    assert "of float32" in fates(accelerate(model.float()))["0"]


@on_devices
def test_parameters_that_are_sharded_later(device: str, mesh: Any) -> None:
    """They are no views any more: three products, of results and of gradients."""
    from torch.distributed.fsdp import fully_shard
    model, other, x = attention(device)
    wanted = gradients(other, x)
    accelerate(model)
    for part in (model[0], model):
        fully_shard(part, mesh=mesh, reshard_after_forward=device == "cuda")
    for _ in range(2):
        with torch.no_grad():
            near([model(x)], wanted[:1], 0.02)
    assert model[0]._gemmkit_joined.linear is None
    if device == "cuda":
        model(x).float().sum().backward()
        other.zero_grad()
        other(x).float().sum().backward()
        near([p.grad.full_tensor() for p in model.parameters()], [p.grad for p in other.parameters()], 0.03)


# --------------------------------------------------------------------------------------------------
# The part "residual": the last products of a decoder layer's attention and MLP add its stream.

class PairedAttention(Attention):
    """As transformers has it, with the weights of attention beside the result."""

    def forward(self, hidden_states: Any, mask: Any = None) -> Any:
        return super().forward(hidden_states, mask), None


class Layer(nn.Module):
    def __init__(self, width: int = 32, biased: bool = False):
        super().__init__()
        self.first, self.second = (nn.LayerNorm(width) for _ in range(2))
        self.self_attn, self.mlp = PairedAttention(width), MLP(width, 48, nn.SiLU())
        self.self_attn.o_proj = nn.Linear(width, width, bias=biased)

    def added(self, y: Any, x: Any) -> Any:
        return y + x

    def forward(self, hidden_states: Any) -> Any:
        found, _ = self.self_attn(hidden_states=self.first(hidden_states))
        hidden_states = self.added(hidden_states, found)
        return self.added(hidden_states, self.mlp(self.second(hidden_states)))


class TurnedLayer(Layer):
    def added(self, y: Any, x: Any) -> Any:
        return x + y


class ScaledLayer(Layer):
    def added(self, y: Any, x: Any) -> Any:
        return y + torch.mul(x, 0.5)


class GemmaLayer(Layer):
    """As Gemma 2 has it."""

    def added(self, y: Any, x: Any) -> Any:
        return y + self.first(x)


class TupleLayer(Layer):
    def forward(self, hidden_states: Any) -> Any:
        return super().forward(hidden_states), None


def layer(device: str, kind: type = Layer, **more: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = kind(**more).to(device, BF16).eval()
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1)).to(device, BF16)
    return model, copy.deepcopy(model), x


def sums(call: Any) -> int:
    """Products that a call adds something to."""
    return functions_run(call).count("summed")


@on_devices
@pytest.mark.parametrize("kind", [Layer, TurnedLayer, TupleLayer])
@pytest.mark.parametrize("biased", [True, False])
def test_a_layers_products_add_its_stream(kind: type, biased: bool, device: str) -> None:
    model, other, x = layer(device, kind, biased=biased)
    report = accelerate(model)
    assert fates(report)[""] == "gk.torch.Linear with a residual"
    with torch.no_grad():
        found, wanted = model(x), other(x)
        assert type(found) is type(wanted)
        found, wanted = (y[0] if isinstance(y, tuple) else y for y in (found, wanted))
        exact = copy.deepcopy(other).float()(x.float())
        exact = exact[0] if isinstance(exact, tuple) else exact
        assert (found - exact).abs().max() <= 1.1 * (wanted - exact).abs().max() + 2.0**-9 * exact.abs().max()
        assert sums(lambda: model(x)) == 2
        copied = copy.deepcopy(model)
        assert sums(lambda: copied(x)) == 2
    report.undo()
    assert type(model) is kind and not any("_gemmkit_joined" in m.__dict__ for m in model.modules())
    with torch.no_grad():
        assert torch.equal(model(x)[0], other(x)[0])


@on_devices
def test_what_adds_by_itself(device: str) -> None:
    """A gradient, hooks, a compiler and autocast; each is right."""
    model, other, x = layer(device)
    accelerate(model)
    assert sums(lambda: model(x)) == 0                                     # parameters that want gradients
    near(gradients(model, x), gradients(other, x), 0.03)
    with torch.no_grad():
        for m, count in ((model.mlp.down_proj, 1), (model.self_attn, 0), (model.mlp, 0)):
            hook = m.register_forward_hook(lambda m, args, y: None)
            assert sums(lambda: model(x)) == count
            near([model(x)], [other(x)], 0.02)
            hook.remove()
        torch._dynamo.reset()
        near([torch.compile(model, backend="eager", fullgraph=True)(x)], [other(x)], 0.02)
        with torch.autocast(device, dtype=BF16):
            near([model(x)], [other(x)], 0.02)
            assert sums(lambda: model(x)) == 0
        assert sums(lambda: model(x)) == 2
    with torch.inference_mode():
        near([model(x)], [other(x)], 0.02)


@on_devices
@pytest.mark.parametrize("float8", [True, False])
def test_packed_products_add(float8: bool, device: str) -> None:
    model, _, x = layer(device)
    for parent, name in ((model.self_attn, "o_proj"), (model.mlp, "down_proj")):
        own = getattr(parent, name)
        own = nn.Linear(128, 32, bias=own.bias is not None).to(device, BF16) if float8 else own
        setattr(parent, name, gk.torch.QuantisedLinear.from_linear(own, group=128 if float8 else 16, float8=float8).bfloat16())
    if float8:
        model.mlp.gate_proj, model.mlp.up_proj = (nn.Linear(32, 128, bias=False).to(device, BF16) for _ in range(2))
        model.self_attn.v_proj = nn.Linear(32, 32, bias=False).to(device, BF16)
        y, down = torch.randn(2, 3, 128, device=device).to(BF16), model.mlp.down_proj
        with torch.no_grad():
            near([summed(down, y, x)], [down(y) + x], 0.02)
        return
    other = copy.deepcopy(model)
    accelerate(model, parts=("linear", "residual", "norm"))
    with torch.no_grad():
        for rows, count in ((x, 0), (x[:1, :1], 2)):             # several rows take longer so
            near([model(rows)], [other(rows)], 0.02)
            assert sums(lambda rows=rows: model(rows)) == count  # type: ignore[misc]


def test_layers_that_are_left(in_the_emulator: None) -> None:
    def why(model: Any, **more: Any) -> str:
        report = accelerate(model, **more)
        return next(x.why for x in report.left if "Layer" in x.kind and "Norm" not in x.kind)

    for kind in (ScaledLayer, GemmaLayer):
        assert "its result is not y + mlp(norm(y))" in why(layer("cpu", kind)[0])
    assert "is not gemmkit's" in why(layer("cpu")[0], parts=("residual",))
    assert "parts does not name 'residual'" in why(layer("cpu")[0], parts=("linear",))
    assert "are of float32" in why(layer("cpu")[0].float())


def test_an_unadded_product_is_a_tensor_elsewhere() -> None:
    """Whatever but an addition of tensors of one shape gets the product; the product is computed once."""
    x, given = torch.arange(6.0).view(2, 3), []
    made = Unadded(lambda y: (given.append(y), x if y is None else x + y)[1], (2, 3), x)
    y = torch.ones(2, 3)
    for found in (y + made, made + y, torch.add(y, made), torch.add(made, y)):
        assert torch.equal(found, x + 1)
    assert [z is y for z in given] == [True] * 4
    del given[:]
    for found, wanted in ((made + 1.0, x + 1), (torch.ones(3) + made, x + 1), (y.double() + made, x.double() + 1),
                          (y * made, x), (torch.add(y, made, alpha=2), 2 * x + 1), (F.relu(made), x), (made.sum(), x.sum()),
                          (torch.stack([made, made]), torch.stack([x, x])), (y.requires_grad_() + made, x + 1)):
        assert torch.equal(found, wanted)
    assert given == [None] and made.shape == (2, 3)


def test_a_product_waits_for_its_own_thread_and_for_an_input_that_stays(in_the_emulator: None) -> None:
    own, x, y = gk.torch.Linear(32, 16).to(BF16), torch.randn(3, 32).to(BF16), torch.randn(3, 16).to(BF16)
    waiting, elsewhere = modules.Sums(), []
    waiting.held = threading.get_ident()
    with torch.no_grad():
        near([waiting.taken(own, x, 0) + y], [own(x) + y], 0.02)
        other = threading.Thread(target=lambda: elsewhere.append(waiting.taken(own, x, 0)))
        other.start()
        other.join()
        assert elsewhere == [None]
        made = waiting.taken(own, x, 0)
        x.add_(1)
        with pytest.raises(RuntimeError, match="was changed in place before the product was added"):
            made + y
