"""`gemmkit.torch.accelerate`: what is replaced computes as before and keeps all else; what would differ is left, with a reason."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import re
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from gemmkit.torch import QuantisedLinear, accelerate, modules, scaled_dot_product_attention  # noqa: E402
from gemmkit.torch.attention import attention_of_transformers, mask_of_transformers  # noqa: E402
from tests.support import checkpoints  # noqa: E402
from tests.support.checks import functions_run  # noqa: E402
from tests.support.machines import on_devices  # noqa: E402

nn, F = torch.nn, torch.nn.functional
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ATTENTION: Any = importlib.import_module("gemmkit.torch.attention")


class LlamaRMSNorm(nn.Module):
    """As transformers has it."""

    def __init__(self, width: int, eps: float = 1e-6, offset: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width) - offset)
        self.variance_epsilon, self.offset = eps, offset

    def forward(self, hidden_states: Any) -> Any:
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.offset:                                            # Gemma's
            return (wide * (self.offset + self.weight.float())).type_as(hidden_states)
        return self.weight * wide.to(hidden_states.dtype)


class OtherRMSNorm(LlamaRMSNorm):
    """With an eps outside of the root: no RMS norm of gemmkit's."""

    def forward(self, hidden_states: Any) -> Any:
        return self.weight * hidden_states / (hidden_states.pow(2).mean(-1, keepdim=True).sqrt() + 1e-2)


class MLP(nn.Module):
    def __init__(self, width: int, inner: int, act: Any, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
                 biased: bool = False):
        super().__init__()
        gate, up, down = names
        setattr(self, gate, nn.Linear(width, inner if up else 2 * inner, bias=biased))
        if up:
            setattr(self, up, nn.Linear(width, inner, bias=biased))
        setattr(self, down, nn.Linear(inner, width))
        self.names, self.act = names, act

    def forward(self, hidden_states: Any) -> Any:
        gate, up, down = self.names
        if up:
            g, u = getattr(self, gate)(hidden_states), getattr(self, up)(hidden_states)
        else:
            g, u = getattr(self, gate)(hidden_states).chunk(2, dim=-1)
        return getattr(self, down)(self.act(g) * u)


class Block(nn.Module):
    """A layer with one of each."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.words = nn.Embedding(11, width)
        self.first, self.second, self.third = nn.LayerNorm(width), LlamaRMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.mlp = MLP(width, 24, nn.SiLU())

    def forward(self, ids: Any) -> Any:
        x = self.words(ids)
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        x = x + self.out(q * k.sigmoid() + v)
        return self.third(x + self.mlp(self.second(x)))


def block(device: str = "cpu", dtype: Any = BF16) -> Any:
    torch.manual_seed(0)
    return Block().to(device, dtype)


def ids(device: str = "cpu", count: int = 5) -> Any:
    return torch.arange(2 * count, device=device).view(2, count) % 11


def fates(report: Any) -> dict[str, str]:
    return {x.name: x.by or x.why for x in report.entries}


def weighed(y: Any) -> Any:
    """A loss that no norm makes a constant."""
    return (y.float().flatten() * torch.linspace(-1, 1, y.numel(), device=y.device)).sum()


def gradients(model: Any, *args: Any) -> list[Any]:
    """The result and the gradients of all parameters."""
    model.zero_grad()
    y = model(*args)
    weighed(y).backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


def near(found: list[Any], wanted: list[Any], most: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert (one.detach().float() - other.float()).norm().item() <= most * other.detach().float().norm().item()


# -- a model --------------------------------------------------------------------------------------------------------------

@on_devices
@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.gpu)])
def test_a_model_computes_as_before(dtype: Any, device: str) -> None:
    """Results and gradients, with a sample and without; names, classes, hooks and an optimiser stay; all is undone."""
    model, seen = block(device, dtype), []
    names, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    parameters = list(model.parameters())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model.qkv.register_forward_hook(lambda *_: seen.append("called"))
    wanted = gradients(model, ids(device))
    seen.clear()
    report = accelerate(model, ids(device))
    assert len(seen) == 2, "of the sample alone: comparisons are not seen"
    assert fates(report) == {
        "words": "gemmkit has no replacement for it", "first": "gk.torch.layernorm", "second": "gk.torch.rmsnorm",
        "third": "gk.torch.rmsnorm", "qkv": "gk.torch.Linear", "out": "gk.torch.Linear", "mlp": "gk.torch.glu",
        **{f"mlp.{name}_proj": "gk.torch.Linear" for name in ("gate", "up", "down")}}
    assert list(model.state_dict()) == names and all(a is b for a, b in zip(model.parameters(), parameters))
    assert isinstance(model.qkv, nn.Linear) and isinstance(model.mlp, MLP) and isinstance(model.second, LlamaRMSNorm)
    assert report.difference is not None and report.difference < 8 * torch.finfo(dtype).eps
    near(gradients(model, ids(device)), wanted, 0.03)
    assert model.training
    optimiser.step()
    with torch.inference_mode():
        after = model(ids(device))
    report.undo()
    report.undo()
    assert [type(m) for m in model.modules()] == classes and not report.replaced
    assert all("gemmkit" not in name and name != "_multiply" for m in model.modules() for name in m.__dict__)
    with torch.no_grad():
        near([after], [model(ids(device))], 0.03)


@on_devices
def test_gemmkit_computes_it(device: str) -> None:
    model = block(device)
    accelerate(model)
    with torch.no_grad():
        run = set(functions_run(lambda: model(ids(device))))
    assert {"rmsnorm", "layernorm", "glu"} <= run and ("matmul" in run or "again" in run)


@on_devices
def test_saved_copied_and_loaded(device: str) -> None:
    model, held = block(device), io.BytesIO()
    accelerate(model)
    with torch.no_grad():
        wanted = model(ids(device))
        torch.save(model, held)
        held.seek(0)
        for other in (torch.load(held, weights_only=False), copy.deepcopy(model)):
            assert isinstance(other.mlp, modules.FastGatedMLP) and isinstance(other.mlp, MLP)
            assert torch.equal(other(ids(device)), wanted)
        plain = block(device)
        plain.load_state_dict(model.state_dict())
        near([plain(ids(device))], [wanted], 0.03)


@on_devices
def test_compiled_and_checkpointed(device: str) -> None:
    """`torch.compile` breaks no graph; gradient checkpointing computes the same."""
    model = block(device)
    accelerate(model)
    wanted = gradients(model, ids(device))
    found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), ids(device))
    near(found, wanted, 0.03)
    again = gradients(model, ids(device))
    model.zero_grad()
    y = torch.utils.checkpoint.checkpoint(model, ids(device), use_reentrant=False)
    weighed(y).backward()
    near([y.detach(), *(p.grad for p in model.parameters())], again, 1e-5)


@on_devices
def test_autocast(device: str) -> None:
    """Of float32: layers compute by gemmkit under autocast alone, results have the dtypes that they had."""
    model = block(device, F32)
    plain = copy.deepcopy(model)
    report = accelerate(model)
    assert {x.why for x in report.replaced if x.by == "gk.torch.Linear"} == {"under autocast"}
    with torch.no_grad():
        assert torch.equal(model.qkv(torch.ones(2, 16, device=device)), plain.qkv(torch.ones(2, 16, device=device)))
    found = []
    for one in (model, plain):
        with torch.autocast(device, dtype=BF16):
            found.append(gradients(one, ids(device)))
    near(*found, 0.03)


@on_devices
def test_products_of_other_dtypes_are_pytorchs(device: str) -> None:
    model = nn.Linear(16, 8).to(device, BF16)
    accelerate(model)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.ones(2, 16, device=device))
    model.float()
    assert model(torch.ones(2, 16, device=device)).dtype == F32
    model.double()
    assert model(torch.ones(2, 16, device=device, dtype=torch.float64)).dtype == torch.float64
    model.bfloat16()
    assert model(input=torch.ones(0, 16, device=device, dtype=BF16)).shape == (0, 8)


# -- what is left, and why --------------------------------------------------------------------------------------------------

class OwnLinear(nn.Linear):
    def forward(self, input: Any) -> Any:
        return super().forward(input) * 2


def with_forward(module: Any) -> Any:
    module.forward = type(module).forward.__get__(module)
    return module


@pytest.mark.parametrize(("make", "why"), [
    (lambda: OwnLinear(16, 8), "its class has a forward of its own"),
    (lambda: nn.LayerNorm((2, 8)), "it norms 2 axes at once"),
    (lambda: nn.LayerNorm(8, elementwise_affine=False), "it has no parameters"),
    (lambda: OtherRMSNorm(16), "its result is not that of an RMS norm"),
    (lambda: MLP(16, 24, nn.Mish()), r"its result is not down\(f\(gate\(x\)\) \* up\(x\)\) with f one of silu"),
    (lambda: MLP(16, 24, nn.SiLU(), biased=True), "its gate or up product adds a bias"),
    (lambda: with_forward(nn.Linear(16, 8)), "its forward was replaced on the object"),
    (lambda: nn.Linear(16, 8, device="meta"), "meta device"),
    (lambda: nn.Linear(16, 8).double(), "its parameters are float64"),
    (lambda: nn.Conv1d(4, 4, 1), "gemmkit has no replacement for it"),
    (lambda: nn.MultiheadAttention(16, 2), "gemmkit has no replacement for it"),
])
def test_what_is_left(make: Callable[[], Any], why: str, in_the_emulator: None) -> None:
    module = make()
    module = module if any(p.is_meta or p.dtype == torch.float64 for p in module.parameters()) else module.bfloat16()
    kind = type(module)
    report = accelerate(module)
    assert type(module) is kind
    (entry,) = [x for x in report.entries if not x.name]
    assert not entry.by
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(entry.why)


def test_without_a_gpu_nothing_is_replaced() -> None:
    report = accelerate(block())
    assert not report.replaced and "its parameters are on cpu; move the model to a GPU first" in str(report)


def test_a_layer_that_differs_is_left(in_the_emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that were wrong: by the result, and by the gradient alone."""
    right = modules.Linear.forward
    for wrong, words in ((lambda self, x: right(self, x) * 1.05, "its result would be off by"),
                         (lambda self, x: right(self, x) + (right(self, x) - right(self, x).detach()), "the gradient of x would be off")):
        monkeypatch.setattr(modules.Linear, "forward", wrong)
        model = block()
        report = accelerate(model)
        assert words in fates(report)["out"] and type(model.out) is nn.Linear and fates(report)["first"] == "gk.torch.layernorm"


def test_a_sample_that_differs_undoes_all(in_the_emulator: None) -> None:
    model = block()
    report = accelerate(model, (ids(),), tolerance=1e-9)
    assert not report.replaced and "tolerance=" in fates(report)["qkv"] and type(model.qkv) is nn.Linear
    assert report.difference > 1e-9 and "differ by" in str(report)
    assert fates(report)["words"] == "gemmkit has no replacement for it"


def test_a_sample_that_fails_changes_nothing(in_the_emulator: None) -> None:
    model = block()
    with pytest.raises(TypeError):
        accelerate(model, {"nothing": ids()})
    assert not any(isinstance(m, modules.Replaced) for m in model.modules())


def test_parts(in_the_emulator: None) -> None:
    model = block()
    report = accelerate(model, parts=("norm",))
    assert {x.by for x in report.replaced} == {"gk.torch.layernorm", "gk.torch.rmsnorm"}
    second = accelerate(model)
    assert fates(second)["first"] == "computes by gemmkit already" and fates(second)["qkv"] == "gk.torch.Linear"
    second.undo()
    assert isinstance(model.first, modules.FastLayerNorm) and type(model.qkv) is nn.Linear


def test_undo_after_another_class(in_the_emulator: None) -> None:
    """As `fully_shard` gives it: nothing is undone by halves."""
    model = block()
    report = accelerate(model)
    now = type(model.qkv)
    model.qkv.__class__ = type("FSDPLinear", (now,), {})
    with pytest.raises(RuntimeError, match="1 modules have another class than accelerate gave them"):
        report.undo()
    assert isinstance(model.out, modules.FastLinear)
    model.qkv.__class__ = now
    report.undo()
    assert type(model.out) is nn.Linear


@on_devices
def test_sharded_parameters(device: str, mesh: Any) -> None:
    """A replaced model is sharded by `fully_shard`, and computes as before; one that is sharded is left."""
    from torch.distributed.fsdp import fully_shard
    model, other = block(device), block(device)
    report = accelerate(model)
    wanted = gradients(model, ids(device))
    for one in (model, other):                         # what the emulator reads of the CPU's memory cannot be freed
        for part in (one.mlp, one.qkv, one):
            fully_shard(part, mesh=mesh, reshard_after_forward=device == "cuda")
    with torch.no_grad():
        assert {"rmsnorm", "layernorm", "glu"} <= set(functions_run(lambda: model(ids(device))))
        near([model(ids(device))], wanted[:1], 0.02)
    if device == "cuda":
        model.zero_grad()
        weighed(model(ids(device))).backward()
        near([p.grad.full_tensor() for p in model.parameters()], wanted[1:], 0.02)
    with pytest.raises(RuntimeError, match="2 modules have another class"):
        report.undo()
    assert not (left := accelerate(other)).replaced and "accelerate before they are sharded" in str(left)


def test_what_its_parent_reads_is_left(in_the_emulator: None) -> None:
    report = accelerate(nn.MultiheadAttention(16, 2).bfloat16())
    assert fates(report)["out_proj"] == "MultiheadAttention reads its weights itself" and not report.replaced


@on_devices
def test_an_eps_of_none_is_that_of_the_version(device: str) -> None:
    """Of small rows it decides, with a sample whose rows are large, too."""
    model = nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16)).to(device, BF16)
    x = torch.logspace(-4, 0, 5, device=device).bfloat16()[:, None] * torch.ones(16, device=device, dtype=BF16)
    with torch.no_grad():
        wanted = model[0](x)
        assert "0" in {y.name for y in accelerate(model, 10 * x[4:]).replaced}
        assert ((model[0](x).float() - wanted.float()).abs() <= 0.01 * wanted.float().abs()).all()


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda: accelerate(3), TypeError, "model is a int"),
    (lambda: accelerate(nn.Identity(), parts="linear"), ValueError, "parts='linear'"),
    (lambda: accelerate(nn.Identity(), parts=("conv",)), ValueError, "a tuple of 'attention'"),
    (lambda: accelerate(nn.Identity(), tolerance=0), ValueError, "a positive number"),
])
def test_refused(call: Callable[[], Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        call()


# -- MLPs and norms of other libraries ------------------------------------------------------------------------------------

@pytest.mark.sample(2)
@on_devices
@pytest.mark.parametrize(("names", "act"), [
    (modules.MLPS[0], nn.GELU(approximate="tanh")), (modules.MLPS[1], nn.SiLU()), (modules.MLPS[2], nn.GELU()),
    (modules.MLPS[0], nn.ReLU()), (modules.MLPS[2], nn.Sigmoid())])
def test_mlps(names: Any, act: Any, device: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(MLP(16, 24, act, names)).to(device, BF16)
    x = torch.randn(3, 16, device=device).bfloat16()
    wanted = gradients(model, x)
    assert fates(accelerate(model))["0"] == "gk.torch.glu"
    near(gradients(model, x), wanted, 0.03)


def test_what_a_module_of_an_mlp_becomes_later(in_the_emulator: None) -> None:
    """An adapter in the gate's place, or a hook on it: the MLP calls it."""
    model = MLP(16, 24, nn.SiLU()).bfloat16()
    accelerate(model)
    x, seen = torch.randn(3, 16).bfloat16(), []
    handle = model.gate_proj.register_forward_hook(lambda *_: seen.append(1))
    model(x)
    assert seen == [1]
    handle.remove()
    before = model(x)
    model.gate_proj = nn.Sequential(model.gate_proj, nn.Hardtanh(-1e-3, 1e-3))
    assert not torch.allclose(model(x), before, atol=1e-3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", [
    lambda m: setattr(m[4], "act", nn.Tanh()), lambda m: setattr(m[0], "act", nn.ReLU()), lambda m: setattr(m[1], "weight", None),
    lambda m: setattr(m[2], "bias", nn.Parameter(torch.ones(24).bfloat16())), lambda m: setattr(m[3], "bias", None),
    lambda m: [setattr(m[2], "weight", nn.Parameter(m[2].weight[:8])), setattr(m[3], "weight", nn.Parameter(m[3].weight[:, :8]))]])
def test_what_a_module_becomes_later(change: Callable[[Any], Any], in_the_emulator: None) -> None:
    """Another activation, a bias more or less, a product of another width: the model computes what it is now."""
    torch.manual_seed(1)
    model = nn.Sequential(MLP(16, 24, nn.SiLU()), nn.LayerNorm(16), nn.Linear(16, 24, bias=False), nn.Linear(24, 16),
                          PlainMLP(nn.GELU(), lambda n, k: nn.Linear(k, n), True)).bfloat16()
    report, x = accelerate(model), torch.randn(2, 3, 16).bfloat16()
    model(x)
    change(model)
    found = model(x)
    report.undo()
    near([found], [model(x)], 0.03)


class Conv1D(nn.Module):
    """As transformers has it."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(0.1 * torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Any) -> Any:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class PlainMLP(nn.Module):
    def __init__(self, act: Any, of: Any, down: bool, dropout: float = 0.0):
        super().__init__()
        self.up, self.act, self.dropout = of(24, 16), act, nn.Dropout(dropout)
        if down:
            self.down = of(16, 24)

    def forward(self, x: Any) -> Any:
        x = self.act(self.up(x))
        return self.dropout(self.down(x)) if hasattr(self, "down") else x


@pytest.mark.sample(2)
@on_devices
@pytest.mark.parametrize(("act", "of", "down", "dropout"), [
    (nn.GELU(), lambda n, k: nn.Linear(k, n), True, 0.0), (nn.ReLU(), lambda n, k: nn.Linear(k, n, bias=False), True, 0.5),
    (nn.GELU("tanh"), Conv1D, True, 0.5), (nn.Tanh(), Conv1D, False, 0.0), (nn.SiLU(), lambda n, k: nn.Linear(k, n), False, 0.0)])
def test_mlps_with_an_activation(act: Any, of: Any, down: bool, dropout: float, device: str) -> None:
    """The activation is the product's; what watches it, dropout in training, another module in a place and a copy are as ever."""
    torch.manual_seed(1)
    model = PlainMLP(act, of, down, dropout).to(device, BF16).eval()
    plain, x, held = copy.deepcopy(model), torch.randn(2, 3, 16, device=device).bfloat16(), io.BytesIO()
    wanted = gradients(plain, x)
    report = accelerate(model)
    assert {"": "gk.torch.Linear with its activation", "up": "gk.torch.Linear"}.items() <= fates(report).items()
    assert list(model.state_dict()) == list(plain.state_dict())
    near(gradients(model, x), wanted, 0.02)
    near(gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), x), wanted, 0.02)
    seen: list[Any] = []
    handle = model.act.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        model(x)
        assert seen == [1]
        handle.remove()
        torch.save(model, held)
        held.seek(0)
        for other in (copy.deepcopy(model), torch.load(held, weights_only=False)):
            assert other.__dict__["_gemmkit_up"]._parameters is other.up._parameters
            near([other(x)], wanted[:1], 0.02)
        if dropout:
            model.train()
            torch.manual_seed(0)
            found = model(x)
            torch.manual_seed(0)
            near([found], [plain.train()(x)], 0.03)
            model.eval()
        model.up = nn.Sequential(model.up, nn.Hardtanh(-1e-3, 1e-3))
        assert not torch.allclose(model(x), wanted[0], atol=1e-3)


class Output(nn.Module):
    """As BERT's."""

    def __init__(self, norm: bool = True):
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = nn.Linear(24, 16), nn.LayerNorm(16, eps=1e-3), nn.Dropout(0.1)
        self.sign = 1 if norm else -1

    def forward(self, x: Any, y: Any) -> Any:
        return self.LayerNorm(self.dropout(self.dense(x)) + self.sign * y)


@on_devices
def test_a_product_a_residual_and_a_norm(device: str) -> None:
    torch.manual_seed(1)
    model, other = Output().to(device, F16).eval(), Output(False).to(device, F16).eval()
    nn.init.normal_(model.LayerNorm.weight)
    x, y = torch.randn(2, 3, 24, device=device).half(), torch.randn(2, 3, 16, device=device).half()
    wanted = gradients(model, x, y)
    assert fates(accelerate(model))[""] == "gk.torch.Linear with a residual"
    assert fates(accelerate(other))[""] == "its result is not norm(product(x) + y)"
    near(gradients(model, x, y), wanted, 0.01)
    with torch.no_grad():
        assert "added" in functions_run(lambda: model(x, y))
        near([model(x, y=y), model(x, y[:1])], [wanted[0], F.layer_norm(model.dense(x) + y[:1], (16,), model.LayerNorm.weight,
                                                                       model.LayerNorm.bias, 1e-3)], 0.01)


@on_devices
def test_norms_with_an_offset(device: str) -> None:
    model = LlamaRMSNorm(16, offset=1.0).to(device, BF16)
    x = torch.randn(3, 16, device=device).bfloat16()
    wanted = gradients(model, x)
    accelerate(model)
    assert isinstance(model, modules.FastOffsetNorm)
    near(gradients(model, x), wanted, 0.02)


# -- layers of packed integers --------------------------------------------------------------------------------------------

class PackedBlock(nn.Module):
    """A decoder's layer of a checkpoint of 4 bits: gate and up share an order of inputs, as one calibration gives it."""

    def __init__(self, form: str, symmetric: bool = True, ordered: bool = False, dtype: Any = F16):
        super().__init__()
        self.words, self.norm = nn.Embedding(11, 32), LlamaRMSNorm(32)
        of = dict(symmetric=symmetric, dtype=dtype)
        self.qkv = checkpoints.module(form, checkpoints.drawn(form, 32, 96, 32, bias=True, ordered=ordered, **of))
        self.mlp = MLP(32, 64, nn.SiLU())
        gate, up, down = (checkpoints.drawn(form, *sizes, 16, seed=n, ordered=ordered, **of)
                          for n, sizes in enumerate(((32, 64), (32, 64), (64, 32))))
        for index in ("g_idx", "weight_g_idx"):
            if index in gate:
                up[index] = gate[index]
        for name, tensors in (("gate", gate), ("up", up), ("down", down)):
            setattr(self.mlp, f"{name}_proj", checkpoints.module(form, tensors))

    def forward(self, ids: Any) -> Any:
        x = self.words(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + q * k.sigmoid() + v
        return x + self.mlp(self.norm(x))


def packed_block(form: str, device: str = "cpu", own: Any = F16, **more: Any) -> Any:
    torch.manual_seed(0)
    model = PackedBlock(form, **more)
    for part in (model.words, model.norm):
        part.to(own)
    return model.to(device).eval()


@on_devices
@pytest.mark.parametrize(("form", "dtype", "ordered"), [("gptq", F16, True), ("gptq_v2", BF16, False), ("awq", BF16, False),
                                                        ("pack-quantized", BF16, True)])
@pytest.mark.parametrize("sampled", [True, False])
def test_layers_of_packed_integers(form: str, dtype: Any, ordered: bool, sampled: bool, device: str) -> None:
    """Of a checkpoint's own modules: replaced, fused in the MLP, as exact as they were, and undone."""
    more = {"dtype": dtype} if form == "pack-quantized" else {}
    model = packed_block(form, device, dtype, symmetric=form == "gptq_v2", ordered=ordered, **more)
    other = copy.deepcopy(model)                                   # (modules of compressed-tensors unpack themselves)
    kinds = [type(m) for m in model.modules()]
    report = accelerate(model, ids(device) if sampled else None)
    by = {"words": "gemmkit has no replacement for it", "norm": "gk.torch.rmsnorm", "mlp": "gk.torch.glu"}
    named = ("qkv", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert fates(report) == {**by, **dict.fromkeys(named, "gk.torch.QuantisedLinear")}
    assert all(isinstance(model.get_submodule(name), QuantisedLinear) for name in named)
    with torch.no_grad():
        near([model(ids(device))], [other(ids(device))], 4 * torch.finfo(dtype).eps)
        run = functions_run(lambda: model.mlp(torch.ones(3, 32, device=device, dtype=dtype)))
    assert run.count("_compute_quantised_glu") == 1 and run.count("_compute_quantised") == 1
    x = torch.ones(2, 32, device=device, dtype=dtype, requires_grad=True)
    model.mlp(x).sum().backward()
    assert x.grad.isfinite().all()
    report.undo()
    assert [type(m) for m in model.modules()] == kinds
    with torch.no_grad():
        assert torch.equal(model(ids(device)), other(ids(device)))


class Shuffled(checkpoints.QuantLinear):
    """As a kernel leaves its words: in an order of its own, of the same shape."""

    def weights(self) -> Any:
        before = self.qweight
        self.qweight = before.flip(0)
        try:
            return super().weights()
        finally:
            self.qweight = before


@pytest.mark.parametrize(("change", "why"), [
    (lambda m: setattr(m, "qkv", Shuffled(dict(m.qkv._buffers.items() - {("wf", m.qkv.wf)}))),
     "its own result is off by .* from that of its tensors"),
    (lambda m: setattr(m.qkv, "qzeros", torch.zeros(1, 24, dtype=torch.int32)), "qzeros has 24 words for 96 integers, 8 bits"),
    (lambda m: m.qkv.register_forward_hook(lambda *_: None), "it has hooks"),
    (lambda m: setattr(m.qkv, "adapter", object()), "it has an adapter"),
    (lambda m: (m.words.float(), m.norm.float()), "its input is float32; convert the model")])
def test_packed_integers_that_are_left(change: Callable[[Any], Any], why: str, in_the_emulator: None) -> None:
    model = packed_block("gptq")
    change(model)
    kind = type(model.qkv)
    report = accelerate(model)
    assert re.search(why, fates(report)["qkv"]) and type(model.qkv) is kind
    assert str(report)


def test_parts_of_packed_integers(in_the_emulator: None) -> None:
    model = packed_block("awq")
    report = accelerate(model, parts=("linear", "mlp"))
    assert fates(report)["qkv"] == "parts does not name 'quantised'"
    assert fates(report)["mlp"] == "a module of it has packed integers that were left"
    assert fates(accelerate(model.qkv))[""] == "it is the model itself, which QuantisedLinear.from_checkpoint replaces"
    report = accelerate(model, parts=("quantised",))
    model.qkv = nn.Linear(32, 96)
    with pytest.raises(RuntimeError, match="1 modules have another class than accelerate gave them, the first of them Linear"):
        report.undo()
    assert isinstance(model.mlp.up_proj, QuantisedLinear)


def test_a_model_on_no_gpu_keeps_its_packed_integers() -> None:
    model = packed_block("awq")
    assert fates(accelerate(model))["qkv"] == "its tensors are on cpu; move the model to a GPU first"


# -- experts --------------------------------------------------------------------------------------------------------------

class Experts(nn.Module):
    """As transformers 5 has them, computed expert by expert."""

    def __init__(self, count: int, width: int, hidden: int, interleaved: bool = False):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * hidden, width) / width ** 0.5)
        self.down_proj = nn.Parameter(torch.randn(count, width, hidden) / hidden ** 0.5)
        self.interleaved = interleaved

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        y = torch.zeros_like(hidden_states)
        for e in range(len(self.gate_up_proj)):
            row, choice = torch.where(top_k_index == e)
            both = F.linear(hidden_states[row], self.gate_up_proj[e])
            gate, up = (both[:, ::2], both[:, 1::2]) if self.interleaved else both.chunk(2, -1)
            found = F.linear(F.silu(gate) * up, self.down_proj[e]) * top_k_weights[row, choice, None]
            y = y.index_add(0, row, found.to(y.dtype))
        return y


@on_devices
def test_experts(device: str) -> None:
    """Tokens go where they are sent, also to no expert; experts that lie otherwise are left."""
    torch.manual_seed(0)
    model = Experts(4, 16, 24).to(device, BF16)
    x, weights = torch.randn(9, 16, device=device).bfloat16(), torch.rand(9, 3, device=device)
    chosen = torch.rand(9, 5, device=device).argsort(1)[:, :3]         # of which 4 is none
    names = ["gate_up_proj", "down_proj"]

    def results() -> list[Any]:
        given = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = model(given[0], chosen, given[1])
        to = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, [*given, *(getattr(model, name) for name in names)], to)]

    wanted = results()
    report = accelerate(model)
    assert [(one.kind, one.by) for one in report.entries] == [("Experts", "gk.torch.experts")]
    near(results(), wanted, 0.03)
    assert list(model.state_dict()) == names and isinstance(model, Experts)
    near([model.eval().float()(x.float(), chosen, weights)], [wanted[0].float()], 0.03)         # float32 stays its own
    model.bfloat16()
    report.undo()
    assert type(model) is Experts
    other = accelerate(Experts(4, 16, 24, interleaved=True).to(device, BF16))
    assert not other.replaced and "is not the sum of weight * down(f(gate(x)) * up(x))" in other.left[0].why


# -- attention ------------------------------------------------------------------------------------------------------------

@on_devices
@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_attention(causal: bool, device: str) -> None:
    """By gemmkit where it can; whatever it cannot take is PyTorch's, with PyTorch's meaning of causal."""
    q = torch.randn(2, 4, 6, 16, device=device).half().requires_grad_()
    k, v = (torch.randn(2, 2, 6, 16, device=device).half().requires_grad_() for _ in range(2))
    found = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, scale=0.3)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*exact, is_causal=causal, enable_gqa=True, scale=0.3)
    near([found.double()], [wanted], 3e-3)
    grad = torch.randn_like(found)
    near([x.double() for x in torch.autograd.grad(found, (q, k, v), grad)], list(torch.autograd.grad(wanted, exact, grad.double())), 5e-3)
    k, v = k.detach().repeat_interleave(2, 1), v.detach().repeat_interleave(2, 1)
    q = q.detach()
    mask = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
    for of_q, of_k, of_v, more in ((q[:, :, :3], k, v, dict(is_causal=True)), (q, k, v, dict(attn_mask=mask)), (q[0], k[0], v[0], {}),
                                   (q[..., :12], k[..., :12], v, {}), (q.float(), k.float(), v.float(), dict(is_causal=causal))):
        near([scaled_dot_product_attention(of_q, of_k, of_v, **more).double()],
             [F.scaled_dot_product_attention(of_q.double(), of_k.double(), of_v.double(), **more)], 3e-3)


@on_devices
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(("begin", "causal"), [(0, True), (3, False)])
def test_attention_in_a_graph(begin: int, causal: bool, recorded: bool, device: str) -> None:
    """No graph breaks, wherever tensors begin: a compiler sees strides, and no address."""
    whole = torch.randn(2, 6, 4, 24, device=device).half()
    grad = torch.randn(2, 4, 6, 16, device=device).half()

    def attend(x: Any) -> Any:
        q = x[..., begin:begin + 16].transpose(1, 2)
        of = scaled_dot_product_attention if x.dtype == F16 else F.scaled_dot_product_attention
        return of(q, q, q, is_causal=causal, scale=0.3)

    def results(function: Any, of: Any) -> list[Any]:
        x = of.clone().requires_grad_(recorded)
        found = function(x)
        return [found.detach()] + ([torch.autograd.grad(found, x, grad.to(x.dtype))[0]] if recorded else [])

    wanted = results(attend, whole.double())
    near([x.double() for x in results(torch.compile(attend, fullgraph=True, backend="aot_eager"), whole)], wanted, 5e-3)
    near([x.double() for x in results(attend, whole)], wanted, 5e-3)


class Interface:
    """What transformers says of a module."""

    is_causal = True
    num_key_value_groups = 2


@on_devices
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (1, 6), (4, 9)])
def test_attention_of_transformers(queries: int, keys: int, device: str) -> None:
    """A prompt, a token, and a prompt in front of an empty static cache: (batch, rows, heads, size), contiguous."""
    q = torch.randn(2, queries, 4, 16, device=device).half().transpose(1, 2)
    k, v = (torch.randn(2, 2, keys, 16, device=device).half() for _ in range(2))
    found, weights = attention_of_transformers(Interface, q, k, v, None, scaling=0.25)
    end = min(queries, keys) if queries > 1 else keys
    wide = [x.double().repeat_interleave(4 // x.shape[1], 1) for x in (q, k[:, :, :end], v[:, :, :end])]
    near([found.double()], [F.scaled_dot_product_attention(*wide, is_causal=queries > 1, scale=0.25).transpose(1, 2)], 3e-3)
    assert weights is None and found.is_contiguous()


@on_devices
@pytest.mark.parametrize("batch", [1, 2])
def test_attention_with_a_bias(batch: int, device: str) -> None:
    """As T5 has it: one for each head is gemmkit's, one for each of a batch is PyTorch's."""
    class Encoder:
        is_causal = False

    q, k, v = (torch.randn(2, 7, 4, 16, device=device).half().transpose(1, 2) for _ in range(3))
    bias = torch.randn(batch, 4, 7, 7, device=device).half()
    run = set(functions_run(lambda: attention_of_transformers(Encoder, q, k, v, None, scaling=1.0, position_bias=bias)))
    assert ("causal_or_plain" in run) == (batch == 1)
    found, _ = attention_of_transformers(Encoder, q, k, v, None, scaling=1.0, position_bias=bias)
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), bias.double(), scale=1.0).transpose(1, 2)
    near([found.double()], [wanted], 3e-3)


@on_devices
@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_padding(causal: bool, device: str) -> None:
    """A mask of "sdpa" that hides padding is gemmkit's: in front, behind, and with a gap. Any other mask is PyTorch's."""
    class Attention:
        is_causal = causal

    masks = pytest.importorskip("transformers").masking_utils
    q, k, v = (torch.randn(3, 70, 2, 16, device=device).half().transpose(1, 2) for _ in range(3))
    padded = torch.ones(3, 70, dtype=torch.long, device=device)
    padded[0, 50:] = padded[1, :9] = padded[2, 20:31] = 0
    function = masks.causal_mask_function if causal else masks.bidirectional_mask_function
    said = dict(batch_size=3, kv_length=70, kv_offset=0, mask_function=function, device=device, attention_mask=padded.bool())
    said |= dict(q_length=70, q_offset=0) if "q_length" in inspect.signature(masks.sdpa_mask).parameters else dict(
        cache_position=torch.arange(70, device=device))
    mask = mask_of_transformers(**said)
    names = set(functions_run(lambda: attention_of_transformers(Attention, q, k, v, mask, scaling=0.25)))
    assert "causal_or_plain" in names
    found, _ = attention_of_transformers(Attention, q, k, v, mask, scaling=0.25)
    other, _ = attention_of_transformers(Attention, q, k, v, mask.clone(), scaling=0.25)          # which says nothing
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, scale=0.25).transpose(1, 2)
    sees = mask.any(-1).transpose(1, 2)[..., None].expand_as(wanted)
    near([found[sees].double(), other[sees].double()], [wanted[sees]] * 2, 3e-3)


# -- transformers ---------------------------------------------------------------------------------------------------------

def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """As transformers has it."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(x * cos + torch.cat((-x[..., x.shape[-1] // 2:], x[..., :x.shape[-1] // 2]), -1) * sin for x in (q, k))


SIZE = 1


def neighbours_turned(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """As GPT-J and Cohere have it."""
    return tuple(x * cos[:, None] + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin[:, None] for x in (q, k))


def drawn_columns(device: str, dtype: Any = BF16, batch: int = 2, rows: int = 5, angles: int = 2) -> tuple[Any, ...]:
    """Queries of 3 heads and keys of 2, columns of one product with values; and angles."""
    heads = torch.randn(batch, rows, 7, 16, device=device).to(dtype).transpose(1, 2)
    return heads[:, :3], heads[:, 3:5], *(torch.randn(angles, rows, 16, device=device).to(dtype) for _ in range(2))


@on_devices
@pytest.mark.parametrize(("dtype", "batch", "rows", "angles"), [(BF16, 2, 5, 2), (F16, 3, 1, 1), (BF16, 1, 40, 1)])
@pytest.mark.parametrize("apart", [False, True])
def test_queries_and_keys_are_turned(dtype: Any, batch: int, rows: int, angles: int, apart: bool, device: str) -> None:
    """By one kernel, or two where they lie apart; rounded once. The model's own function would raise."""
    torch.manual_seed(batch)
    given = drawn_columns(device, dtype, batch, rows, angles)
    if apart:
        q, k, *angles_of = given
        given = q.contiguous(), k.transpose(-1, -2).contiguous().transpose(-1, -2), *angles_of
    with torch.no_grad():
        found = ATTENTION.Rotation(None)(*given)
        assert (ATTENTION._of_both(*given[:2]) is None) == apart
    for one, exact in zip(found, apply_rotary_pos_emb(*(x.double() for x in given))):
        assert one.dtype == dtype and one.shape == exact.shape
        assert ((one.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-5).all()


@on_devices
def test_what_the_models_own_function_turns(device: str) -> None:
    """Of other dtypes and shapes, and with a gradient."""
    q, k, cos, sin = drawn_columns(device)
    wide = drawn_columns(device, F32)
    calls: list[tuple[Any, ...]] = [
        (q, k[:, :, 1:], cos, sin), (q[0], k[0], cos, sin), (q[:, :0], k, cos, sin), (q, k, cos.float(), sin.float()), wide,
        (q, k, cos[:, :3], sin[:, :3]), (q, k, cos, sin, 1), (q[..., :15], k[..., :15], cos[..., :15], sin[..., :15])]
    told: list[Any] = []
    rotation = ATTENTION.Rotation(lambda *args, **how: told.append((args, how)))
    with torch.no_grad():
        for call in calls:
            rotation(*call)
        rotation(q, k, cos, sin, unsqueeze_dim=1)
    rotation(q.requires_grad_(), k, cos, sin)
    assert len(told) == len(calls) + 2
    assert all(one is other for (args, _), call in zip(told, calls) for one, other in zip(args, call))


def test_which_functions_turn(in_the_emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that a method calls is looked at by drawn numbers, and its module's names are those of the call."""
    def forward(self: object, q: Any, k: Any, cos: Any, sin: Any, scale: float = 1.0) -> Any:
        return [scale * SIZE * x for x in apply_rotary_pos_emb(q, k, cos, sin)]

    names = forward.__globals__
    taken = ATTENTION.turning(forward)
    assert taken is not None and ATTENTION.turning(forward) is taken and ATTENTION.turning(lambda self: self) is None
    given = drawn_columns("cpu")
    with torch.no_grad():
        for size in (1, 2):
            monkeypatch.setitem(names, "SIZE", size)
            near(taken(None, *given), forward(None, *given), 0.02)
    for function in (neighbours_turned, None, lambda q, k, cos, sin: (k, q), lambda *args: apply_rotary_pos_emb(*args)[0]):
        monkeypatch.setitem(names, "apply_rotary_pos_emb", function)
        assert ATTENTION.turning(forward) is None


@on_devices
def test_a_llama(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, with padding, in training, with a cache, compiled; and undone."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    conf = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                                    num_key_value_heads=2, vocab_size=40, head_dim=8)
    model = transformers.LlamaForCausalLM(conf).to(device, BF16).eval()
    words = torch.arange(14, device=device).view(2, 7)
    mask = torch.ones_like(words)
    mask[0, :3] = 0
    calls: list[Callable[[], Any]] = [
        lambda: model(words).logits, lambda: model(words, attention_mask=mask).logits[mask.bool()],
        lambda: model(words[:, 6:], past_key_values=model(words[:, :6], use_cache=True).past_key_values).logits]
    with torch.no_grad():
        wanted = [call() for call in calls]
    of_training = gradients(_Loss(model), words)
    report = accelerate(model, {"input_ids": words})
    assert {x.by for x in report.replaced} == {"gk.torch.attention", "gk.torch.Linear", "gk.torch.glu", "gk.torch.rmsnorm",
                                               "gk.torch.Linear, one for q, k and v", "gk.torch.Linear with a residual"}
    assert [x.kind for x in report.left] == ["Embedding"]
    turned: list[Any] = []
    monkeypatch.setattr(ATTENTION, "turned", lambda *args, own=ATTENTION.turned: (turned.append(args), own(*args)))
    with torch.no_grad():
        near([call() for call in calls], wanted, 0.03)
        assert len(turned) == 4
        assert model.generate(words[:1], max_new_tokens=2, do_sample=False).shape == (1, 9)
    near(gradients(_Loss(model), words), of_training, 0.05)
    report.undo()
    assert model.config._attn_implementation == "sdpa"
    eager = transformers.LlamaForCausalLM._from_config(conf, attn_implementation="eager").to(device, BF16)
    assert "load the model with attn_implementation='sdpa'" in str(accelerate(eager))


@pytest.mark.thorough
@on_devices
@pytest.mark.parametrize(("family", "form"), [("Llama", "awq"), ("Qwen2", "pack-quantized")])
def test_a_model_of_packed_integers(family: str, form: str, device: str) -> None:
    """Of transformers, as it loads a checkpoint; with a cache."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    conf = getattr(transformers, f"{family}Config")(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=40)
    model = getattr(transformers, f"{family}ForCausalLM")(conf).to(device, BF16).eval()
    checkpoints.with_packed_layers(model, form, 16, dtype=BF16 if form == "pack-quantized" else F16)
    other, words = copy.deepcopy(model), torch.arange(14, device=device).view(2, 7)
    with torch.no_grad():
        wanted = other(words).logits
    report = accelerate(model, {"input_ids": words})
    assert {x.by for x in report.replaced} == {"gk.torch.attention", "gk.torch.Linear", "gk.torch.QuantisedLinear", "gk.torch.glu",
                                               "gk.torch.rmsnorm"}
    assert [x.kind for x in report.left] == ["Embedding"]
    with torch.no_grad():
        near([model(words).logits], [wanted], 0.03)
        begun = model(words[:, :6], use_cache=True).past_key_values
        near([model(words[:, 6:], past_key_values=begun).logits], [wanted[:, 6:]], 0.05)
    report.undo()
    with torch.no_grad():
        near([model(words).logits], [wanted], 1e-6)


@pytest.mark.thorough
@on_devices
@pytest.mark.parametrize(("family", "more", "parts"), [
    ("Gemma", {}, {"Linear", "glu", "rmsnorm"}), ("Phi3", dict(pad_token_id=0), {"Linear", "glu", "rmsnorm"}),
    ("Qwen3", {}, {"Linear", "glu", "rmsnorm"}), ("Gemma2", {}, {"Linear", "glu", "rmsnorm"}),
    ("OPT", dict(ffn_dim=48, word_embed_proj_dim=32), {"Linear", "layernorm"}),
    ("Qwen3Moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16), {"experts", "Linear", "rmsnorm"})])
def test_families(family: str, more: dict[str, Any], parts: set[str], device: str) -> None:
    """Of transformers: what each has is replaced, and a padded batch computes as before. So is attention, where this
    version of transformers has a family compute it by "sdpa"."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    heads = {} if family == "Phi3" else dict(head_dim=8)
    conf = getattr(transformers, f"{family}Config")(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                                                    num_key_value_heads=2, vocab_size=40, **heads, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(conf).to(device, BF16).eval()
    words = torch.arange(14, device=device).view(2, 7) + 3
    mask = torch.ones_like(words)
    mask[0, :3] = 0
    parts = parts if family == "Phi3" else parts | {"Linear, one for q, k and v"}
    parts = parts if family in ("OPT", "Gemma2", "Qwen3Moe", "Phi3") else parts | {"Linear with a residual"}
    parts = parts | {"attention"} if model.config._attn_implementation == "sdpa" else parts
    assert family == "Gemma2" or "attention" in parts
    with torch.no_grad():
        wanted = model(words, attention_mask=mask).logits[mask.bool()]
        report = accelerate(model, {"input_ids": words})
        assert {x.by.removeprefix("gk.torch.") for x in report.replaced} == parts
        near([model(words, attention_mask=mask).logits[mask.bool()]], [wanted], 0.03)


@pytest.mark.thorough
@on_devices
@pytest.mark.parametrize("name", ["BERT", "RoBERTa", "DistilBERT", "GPT-2", "T5 encoder"])
def test_networks(name: str, device: str) -> None:
    """Of Graphene's Fig. 15, as `bench.models` makes them: all of their products are gemmkit's; with padding; undone."""
    pytest.importorskip("transformers")
    models: Any = importlib.import_module("bench.models")
    words = torch.arange(3, 17, device=device).view(2, 7)
    padded = torch.tensor([[1] * 7, [1] * 4 + [0] * 3], device=device)
    model, wide = models.network(name, True, device), models.network(name, True, device, "eager").float()
    with torch.no_grad():
        wanted = [wide(words).last_hidden_state, wide(words, attention_mask=padded).last_hidden_state[padded.bool()]]
        report = accelerate(model, {"input_ids": words})
        parts = {"gk.torch.attention", "gk.torch.Linear", "gk.torch.Linear with its activation"}
        parts |= set() if name == "GPT-2" else {"gk.torch.Linear, one for q, k and v"}
        parts |= {"gk.torch.Linear with a residual"} if name in ("BERT", "RoBERTa") else set()
        assert {x.by for x in report.replaced} - {"gk.torch.layernorm", "gk.torch.rmsnorm"} == parts
        assert {x.kind.removeprefix(name) for x in report.left} <= {"Embedding", "BertPooler", "RobertaPooler"}
        found = [model(words).last_hidden_state, model(words, attention_mask=padded).last_hidden_state[padded.bool()]]
        near([x.float() for x in found], wanted, 0.01)
        report.undo()
        near([model(words).last_hidden_state.float()], wanted[:1], 0.01)


def test_masks_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One query that sees all keys has none, in a graph either; padding, a window, and a cache that is not full have one."""
    masks = pytest.importorskip("transformers").masking_utils
    said = dict(batch_size=1, kv_length=5, kv_offset=0, mask_function=masks.causal_mask_function, device="cpu")
    said |= dict(q_length=1, q_offset=4) if "q_length" in inspect.signature(masks.sdpa_mask).parameters else dict(
        cache_position=torch.tensor([4]))
    padding = torch.tensor([[False, True, True, True, True]])
    for tracing in (False, True):
        if tracing:
            monkeypatch.setattr(masks, "is_tracing", lambda *_: True, raising=False)
        assert mask_of_transformers(**said) is None
        assert mask_of_transformers(**said, local_size=6) is None
        for more in (dict(attention_mask=padding), dict(allow_is_causal_skip=False), dict(local_size=3)):
            assert torch.equal(mask_of_transformers(**said, **more), masks.sdpa_mask(**said, **more))


class _Loss(nn.Module):
    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, words: Any) -> Any:
        return self.model(words, labels=words).loss
