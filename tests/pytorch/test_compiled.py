"""Operators of `gemmkit.torch` in models: compiled without a break, exported, in batches, trained as PyTorch's are."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
import gemmkit.torch  # noqa: E402
from gemmkit.emulator import machine  # noqa: E402
from gemmkit.epilogues import Bias, Scale, SiLU  # noqa: E402
from gemmkit.runtime.compile import stats  # noqa: E402
from gemmkit.torch.layers import biased  # noqa: E402

F = torch.nn.functional


def models(device: str, sizes: tuple[int, int, int, int]) -> tuple[Any, Any]:
    """Three layers by gemmkit and by PyTorch, with the same parameters."""
    one, two, three, four = sizes
    Linear = gk.torch.Linear
    torch.manual_seed(0)
    ours = torch.nn.Sequential(Linear(one, two, activation="gelu", device=device), Linear(two, three, activation="relu", device=device),
                               Linear(three, four, device=device))
    theirs = torch.nn.Sequential(torch.nn.Linear(one, two, device=device), torch.nn.GELU(),
                                 torch.nn.Linear(two, three, device=device), torch.nn.ReLU(),
                                 torch.nn.Linear(three, four, device=device))
    for layer, other in zip(ours, theirs[::2]):
        other.load_state_dict(layer.state_dict())
    return ours, theirs


def trained(model: Any, parameters: Any, x: Any, y: Any, steps: int, after: Any = lambda: None) -> list[float]:
    optimiser = torch.optim.SGD(parameters, lr=0.05)
    losses = []
    for _ in range(steps):
        loss = (model(x) - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        after()
    return losses


@pytest.mark.kin(2)
def test_a_model_compiles_without_a_break(in_the_emulator: None) -> None:
    ours, theirs = models("cpu", (3, 5, 4, 2))
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    explained = torch._dynamo.explain(ours)(x)
    assert (explained.graph_break_count, explained.graph_count) == (0, 1)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    found = trained(compiled, ours.parameters(), x, y, 3)
    assert found == pytest.approx(trained(theirs, theirs.parameters(), x, y, 3), rel=1e-5)


@pytest.mark.kin(2)
def test_a_compiled_layers_bias(in_the_emulator: None) -> None:
    """Its gradient is an operator, once a layer, behind an activation; and is right where weights, or x, need none."""
    ours, theirs = models("cpu", (3, 5, 4, 2))
    graphs: list[Any] = []

    def seen(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    compiled, plain = (torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
                       for model, keep in ((ours, seen), (theirs, lambda graph, inputs: graph.forward)))
    for needs, anew in itertools.product(((True, True), (False, True), (True, False)), (False, True)):
        if anew:                                               # a process, or a cache, may know these graphs from before
            torch._dynamo.reset()
        x, y = torch.randn(6, 3, requires_grad=True), torch.randn(6, 2)
        for layer, other in zip(ours, theirs[::2]):
            for name, wanted in zip(("weight", "bias"), needs):
                for one in (layer, other):
                    getattr(one, name).requires_grad_(wanted)
                    getattr(one, name).grad = None
        graphs.clear()
        (compiled(x) - y).square().sum().backward()
        found, x.grad = x.grad, None
        (plain(x) - y).square().sum().backward()            # PyTorch 2.11 does not see that parameters need one again
        torch.testing.assert_close(found, x.grad)
        for layer, other in zip(ours, theirs[::2]):
            for name in ("weight", "bias"):
                one, two = getattr(layer, name).grad, getattr(other, name).grad
                assert (one is None) == (two is None)
                if one is not None:
                    torch.testing.assert_close(one, two)
        if anew:
            sums = [node for node in graphs[-1].graph.nodes if "sum_of_rows" in str(node.target)]
            assert len(sums) == (2 if needs[1] else 0)


@pytest.mark.kin(2)
def test_a_graph_calls_what_an_operator_computes(in_the_emulator: None) -> None:
    """Inductor's code has no call that PyTorch's dispatcher takes, forward and backward, for operators of users too."""
    from torch._inductor.utils import run_and_get_code

    doubled = gk.torch.op(name="tests::doubled", epilogue=Scale(2.0))
    x, w, v = (torch.randn(*shape).requires_grad_() for shape in ((3, 4), (4, 5), (5, 2)))

    def function(x: Any, w: Any, v: Any) -> Any:
        return gk.torch.matmul(doubled(x, w), v)

    wanted = [(y := (2 * x @ w) @ v).detach(), *torch.autograd.grad(y.sum(), (x, w, v))]
    def step() -> Any:
        y = torch.compile(function, fullgraph=True)(x, w, v)
        return y.detach(), *torch.autograd.grad(y.sum(), (x, w, v))

    for _ in range(2):                                         # and once more from the caches of this process
        found, codes = run_and_get_code(step)
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted))
        called = re.findall(r"= torch\.ops\.(gemmkit|tests)\.\w+\.default(\.compute)?\(", "".join(codes))
        assert len(called) >= 5 and ("tests", ".compute") in called and all(compute for _, compute in called)


def test_sums_of_rows_are_an_operator() -> None:
    x, bias = torch.randn(3, 4, dtype=torch.double, requires_grad=True), torch.randn(4, dtype=torch.double, requires_grad=True)
    torch.library.opcheck(torch.ops.gemmkit.sum_of_rows, (x,))
    assert torch.autograd.gradcheck(biased, (x, bias)) and torch.autograd.gradgradcheck(biased, (x, bias))
    many = torch.func.vmap(biased, in_dims=(0, None))(x[None].expand(2, 3, 4), bias)
    torch.testing.assert_close(many, (x + bias).expand(2, 3, 4))


@pytest.mark.gpu
def test_a_compiled_model_is_trained_to_the_same_loss() -> None:
    """And no kernel is compiled after the first step."""
    ours, theirs = models("cuda", (64, 256, 128, 32))
    x, y = torch.randn(96, 64, device="cuda"), torch.randn(96, 32, device="cuda")
    counts: list[int] = []
    compiled = torch.compile(ours, fullgraph=True)
    found = trained(compiled, ours.parameters(), x, y, 30, lambda: counts.append(stats.compiled))
    assert found == pytest.approx(trained(theirs, theirs.parameters(), x, y, 30), rel=1e-4)
    assert found[-1] < found[0] and counts[-1] == counts[0]


@pytest.mark.gpu
@pytest.mark.thorough
def test_a_training_step_in_a_cuda_graph() -> None:
    ours, _ = models("cuda", (64, 256, 128, 32))
    x = torch.randn(96, 64, device="cuda")
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            ours(x).sum().backward()
    torch.cuda.current_stream().wait_stream(aside)
    ours.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ours(x)
        y.sum().backward()
    x.copy_(torch.randn_like(x))
    graph.replay()
    found = [y.clone(), *(p.grad.clone() for p in ours.parameters())]
    ours.zero_grad(set_to_none=True)
    expected = ours(x)
    expected.sum().backward()
    for one, other in zip(found, (expected, *(p.grad for p in ours.parameters()))):
        torch.testing.assert_close(one, other)


def test_batches_and_exports(in_the_emulator: None) -> None:
    f = gk.torch.op(name="tests::batched", epilogue=lambda bias: Bias(bias) | SiLU())
    a, b, bias = torch.randn(3, 5, 4), torch.randn(4, 2), torch.randn(3, 2)
    expected = F.silu(a @ b + bias[:, None])
    torch.testing.assert_close(torch.func.vmap(f, in_dims=(0, None, 0))(a, b, bias), expected)
    torch.testing.assert_close(torch.func.vmap(f, in_dims=(2, None, 1))(a.permute(1, 2, 0), b, bias.mT), expected)
    given = a.clone().requires_grad_()
    torch.func.vmap(f, in_dims=(0, None, None))(given, b, bias[0]).sum().backward()
    other = a.clone().requires_grad_()
    F.silu(other @ b + bias[0]).sum().backward()
    torch.testing.assert_close(given.grad, other.grad)

    class Net(torch.nn.Module):                                                # type: ignore[misc]
        def forward(self, a: Any, b: Any, bias: Any) -> Any:
            return f(a, b, bias)

    exported = torch.export.export(Net(), (a[0], b, bias[0]))
    assert any(node.target is torch.ops.tests.batched.default for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(a[0], b, bias[0]), F.silu(a[0] @ b + bias[0]))


def test_a_batch_of_diagonals_is_a_stack(in_the_emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch; the gradient of what all of the stack share is summed over it."""
    launches: list[Any] = []
    launch = machine.launch
    monkeypatch.setattr(machine, "launch", lambda *given, **how: (launches.append(how["grid"]), launch(*given, **how)))
    f = gk.torch.op(name="tests::diagonals", a=gk.layouts.DiagonalMatrix)
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    made = torch.func.vmap(f, in_dims=(0, None))(a, b)
    assert len(launches) == 1
    torch.testing.assert_close(made, a[..., None] * b)
    weight = torch.randn(3, 4, 2)
    torch.testing.assert_close(torch.autograd.grad((made * weight).sum(), (a, b)), ((weight * b).sum(-1), (weight * a[..., None]).sum(0)))
    stack = torch.randn(2, 1, 4, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(f(stack, weight).sum(), stack)[0], weight.sum((0, 2)).expand(2, 1, 4))


@pytest.mark.parametrize("activation", gk.torch.layers.ACTIVATIONS)
def test_a_recorded_layer_stores_one_matrix_by_its_kernel(activation: str, in_the_emulator: None) -> None:
    """The activation is PyTorch's there, in one kernel of the compiler's with the bias. Without a gradient all is one kernel."""
    from torch._dynamo.backends.common import aot_autograd  # an import of torch alone does not load it

    layer = gk.torch.Linear(3, 4, activation=activation)
    x = torch.randn(5, 3)
    graphs: list[Any] = []

    def seen(graph: Any, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=seen))
    found = compiled(x)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), found)
    recorded, plain = ([target for target in graph if target.namespace == "gemmkit"] for graph in graphs)
    assert recorded == [torch.ops.gemmkit.product.default]
    assert plain == [getattr(torch.ops.gemmkit, f"linear_{activation}").default]
    (by_layer,) = torch.autograd.grad(found.square().sum(), layer.weight)
    torch.testing.assert_close(by_layer, torch.autograd.grad(layer(x).square().sum(), layer.weight)[0])


def test_linear(in_the_emulator: None) -> None:
    for activation, reference in ((None, lambda x: x), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")), ("silu", F.silu),
                                  ("tanh", torch.tanh)):
        for bias in (True, False):
            layer = gk.torch.Linear(3, 4, bias=bias, activation=activation)
            x = torch.randn(2, 5, 3)
            expected = reference(F.linear(x, layer.weight, layer.bias))
            torch.testing.assert_close(layer(x), expected)
            with torch.no_grad():
                torch.testing.assert_close(layer(x), expected)
    with pytest.raises(ValueError, match="activation='celu': None or one of 'relu'"):
        gk.torch.Linear(3, 4, activation="celu")
    assert repr(gk.torch.Linear(3, 4)) == "Linear(3, 4, bias=True, activation=None)"
