"""`torch.compile(backend="gemmkit")`: what is fused of a graph, what is left, and that results are PyTorch's."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._inductor.custom_graph_pass import CustomGraphPass  # noqa: E402
from torch._inductor.decomposition import select_decomp_table  # noqa: E402

import gemmkit as gk  # noqa: E402
import gemmkit.torch  # noqa: E402
from bench.compiled import MLP, TINY, Layer  # noqa: E402
from gemmkit.torch import lowering  # noqa: E402
from gemmkit.torch.lowering import Lowering  # noqa: E402
from tests.support.machines import on_devices  # noqa: E402
from tests.support.markdown import ROOT  # noqa: E402

F = torch.nn.functional
#: (Inductor may pad operands of tiny products on a GPU, by a benchmark of its own; then a sum is no neighbour.)
ALL = {"gemmkit.take": "all", "shape_padding": False}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def known_anew() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


class Passed:
    """Graphs that the pass has gone through and PyTorch interprets, without Inductor: ``entries`` says what was fused."""

    def __init__(self, take: str = "all"):
        self.take, self.entries, self.graphs = take, [], []
        self.backend = aot_autograd(fw_compiler=self._compiled, bw_compiler=self._compiled, decompositions=select_decomp_table())

    def _compiled(self, graph: Any, inputs: Any) -> Any:
        Lowering(self.take, self.entries)(graph.graph)
        graph.graph.lint()
        graph.recompile()
        self.graphs.append(graph.graph)
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    @property
    def fused(self) -> list[str]:
        return [x.epilogue for x in self.entries if not x.why]


def compared(function: Any, *args: Any, take: str = "all", **how: Any) -> Passed:
    """What became of a function's products, whose results are as good as PyTorch's."""
    passed = Passed(take)
    with torch.no_grad():
        found = torch.compile(function, backend=passed.backend, fullgraph=True, **how)(*args)
        wanted = function(*args)
    close(found, wanted)
    return passed


def close(found: Any, wanted: Any) -> None:
    for x, y in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert x.is_cuda or x.stride() == y.stride()                # Inductor pads small products on a GPU, and returns a view
        if not y.is_floating_point():
            assert torch.equal(x, y)
            continue
        scale = max(1.0, float(y.float().abs().nan_to_num(0, 0, 0).max())) if y.numel() else 1.0
        torch.testing.assert_close(x, y, atol=TOLERANCES[y.dtype] * scale, rtol=0, equal_nan=True)


# -- drawn graphs -----------------------------------------------------------------------------------------------------

class Drawn:
    """A function of a product with what follows it, drawn: operations of every kind, operands that lie in every way."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        draw = self.draw.choice
        self.dtype = draw([torch.float64, torch.float64, torch.float32, torch.bfloat16])
        self.stack = draw([(), (), (2,), (3, 2)])
        self.m, self.n, self.k = (self.draw.randint(2, 9) for _ in range(3))   # PyTorch makes sums of a product of 1
        self.kind = draw(["linear", "matmul", "addmm", "bmm", "baddbmm", "gated", "gathered"])
        self.operands: list[Any] = []
        if self.kind in ("bmm", "baddbmm"):
            self.stack = (draw([1, 3]),)
        if self.kind == "addmm":
            self.stack = ()
        self.shape = (*self.stack, self.m, self.n)
        self.first = [self.tensor(*shape) for shape in self.shapes()]
        self.steps = [self.step(draw(STEPS)) for _ in range(self.draw.randint(1, 6))]
        self.end = draw([None, None, None, None, "sum", "amax", "mean"])

    def shapes(self) -> list[tuple[int, ...]]:
        x, w = (*self.stack, self.m, self.k), (self.n, self.k)
        return {"linear": [x, w, (self.n,)], "matmul": [x, (self.k, self.n)], "addmm": [self.like(), x, (self.k, self.n)],
                "bmm": [x, (*self.stack, self.k, self.n)], "baddbmm": [self.shape, x, (*self.stack, self.k, self.n)],
                "gated": [x, w, w], "gathered": [(7, self.k), w]}[self.kind]

    def like(self) -> tuple[int, ...]:
        """A shape that lies along D: a matrix, a column, a row, a number."""
        return self.draw.choice([self.shape, (self.n,), (*self.shape[:-1], 1), (1, 1), ()])

    def tensor(self, *shape: int) -> Any:
        """Drawn numbers, contiguous, transposed, strided, or at an address that is no multiple of 16 bytes."""
        found = torch.randn(shape).to(self.dtype)
        kind = self.draw.choice(["plain", "plain", "transposed", "strided", "offset"])
        if kind == "transposed" and len(shape) > 1:
            return found.mT.contiguous().mT
        if kind == "strided" and shape:
            return found.repeat_interleave(2, -1)[..., ::2]
        if kind == "offset":
            return torch.cat((found.new_zeros(1), found.flatten()))[1:].view(shape)
        return found

    def step(self, what: Any) -> Callable[[Any], Any]:
        if what.__code__.co_argcount == 1:
            return what                                                       # type: ignore[no-any-return]
        self.operands.append(self.tensor(*self.like()))
        return lambda y, at=len(self.operands) - 1: what(y, self.given[at])

    def product(self, first: Any) -> Any:
        if self.kind == "linear":
            return F.linear(*first)
        if self.kind in ("matmul", "addmm", "bmm", "baddbmm"):
            return getattr(torch, self.kind)(*first)
        if self.kind == "gated":
            x, w, v = first
            return F.silu(F.linear(x, w)) * F.linear(x, v)
        index = torch.arange(self.m * max(1, len(self.shape[:-2]) and torch.Size(self.stack).numel())) * 5 % 7
        return F.linear(F.embedding(index.view(self.shape[:-1]), first[0]), first[1])

    def __call__(self, first: list[Any], operands: list[Any]) -> Any:
        self.given = operands
        y = self.product(first)
        for step in self.steps:
            y = step(y)
        return y if self.end is None else getattr(y, self.end)(-1)

    @property
    def args(self) -> tuple[Any, Any]:
        return self.first, self.operands


STEPS: list[Callable[..., Any]] = [
    lambda y: F.relu(y), lambda y: F.gelu(y), lambda y: F.gelu(y, approximate="tanh"), lambda y: F.silu(y), lambda y: torch.tanh(y),
    lambda y: torch.sigmoid(y), lambda y: y * 0.5 - 1, lambda y: -y, lambda y: y.abs() + 0.5, lambda y: 2 - y, lambda y: y * y,
    lambda y: torch.exp(-y.abs()), lambda y: y.clamp(-1, 1), lambda y: y.clamp(min=-0.5), lambda y: torch.where(y > 0.25, y, 0.1 * y),
    lambda y: F.leaky_relu(y, 0.2), lambda y: F.hardswish(y), lambda y: y.float().to(y.dtype) if y.dtype != torch.float64 else y + 1,
    lambda y: torch.sin(y), lambda y: y.square(), lambda y: (y.abs() + 1).rsqrt(), lambda y: (y.abs() + 1).log(), lambda y: y / 3,
    lambda y, p: y + p, lambda y, p: p - y, lambda y, p: y * p, lambda y, p: y * torch.sigmoid(p), lambda y, p: torch.maximum(y, p),
    lambda y, p: torch.where(y < p, y, p), lambda y, p: y / (p.abs() + 1), lambda y, p: torch.add(y, p, alpha=0.5)]


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(120))
def test_drawn_graphs(seed: int, in_the_emulator: None) -> None:
    drawn = Drawn(seed)
    passed = compared(drawn, *drawn.args)
    assert len(passed.fused) >= 1 and not [x for x in passed.entries if x.why], passed.entries
    left = [str(node.target) for node in passed.graphs[0].nodes if node.target in lowering.PRODUCTS]
    assert not left


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(24))
def test_gradients_of_drawn_graphs(seed: int, in_the_emulator: None) -> None:
    drawn = Drawn(1000 + seed)
    drawn.end = None
    passed = Passed()
    compiled = torch.compile(drawn, backend=passed.backend, fullgraph=True)
    found, wanted = [], []
    for function, into in ((compiled, found), (drawn, wanted)):
        leaves = [[x.detach().clone().requires_grad_() for x in part] for part in drawn.args]
        y = function(*leaves)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
        into += [y.detach(), *(x.grad for part in leaves for x in part)]
    for x, y in zip(found, wanted):
        scale = max(1.0, float(y.float().abs().max()))
        torch.testing.assert_close(x, y, atol=4 * TOLERANCES[y.dtype] * scale, rtol=0, equal_nan=True)
    assert passed.fused


# -- what is fused, and what is left ----------------------------------------------------------------------------------

X, W, V, B = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 5, 8), (6, 8), (6, 8), (6,)))
R = torch.randn(2, 5, 6, dtype=torch.float64)


def test_the_code_of_an_epilogue(in_the_emulator: None) -> None:
    """It is what a user would write."""
    passed = compared(lambda x, w, b, r: torch.tanh(F.linear(x, w, b)) * 2 + r, X, W, B, R)
    assert passed.fused == ["def epilogue(p0, p1):\n"
                            "    def f1(y0):\n"
                            "        y1 = math.tanh(y0)\n"
                            "        return y1 * 2\n"
                            "    return Bias(p0) | Elementwise(f1) | Residual(p1)"]


STAGES: dict[str, tuple[Any, str]] = {
    "plain": (lambda x, w, v, b, r: F.linear(x, w), ""),
    "bias": (lambda x, w, v, b, r: F.linear(x, w, b), "Bias(p0)"),
    "gated": (lambda x, w, v, b, r: F.silu(F.linear(x, w)) * F.linear(x, v) + r, "Fold(f0) | Residual(p0)"),
    "one for many": (lambda x, w, v, b, r: F.relu(F.linear(x, w)) * torch.sigmoid(r.sum(0)), "Elementwise(f0)"),
    "another": (lambda x, w, v, b, r: F.linear(x, w) * r, "Binary(p0, f=f0)"),
    "two others": (lambda x, w, v, b, r: (F.linear(x, w) * r - 1) * (r + 1), "Binary(p0, f=f0) | Binary(p1, f=f1)"),
    "a column": (lambda x, w, v, b, r: F.linear(x, w) + r[..., :1], 'Bias(p0, along="M")'),
    "largest": (lambda x, w, v, b, r: F.linear(x, w, b).amax(-1), 'Bias(p0) | RowReduce(rows, "max")'),
    "mean square": (lambda x, w, v, b, r: (y := F.linear(x, w) + r) * y.pow(2).mean(-1, keepdim=True),
                    'Residual(p0) | RowReduce(rows, "sumsq")'),
}


@pytest.mark.parametrize("name", STAGES)
def test_stages(name: str, in_the_emulator: None) -> None:
    function, stages = STAGES[name]
    passed = compared(function, X, W, V, B, R)
    assert len(passed.fused) == 1 and passed.fused[0].rpartition("return ")[2] == stages


def several(x: Any, w: Any, b: Any) -> Any:
    """An intermediate result that is used twice: the product ends there."""
    y = F.linear(x, w, b)
    return y, F.gelu(y)


def cycle(x: Any, w: Any, b: Any) -> Any:
    """An operand that depends on the product."""
    y = F.relu(F.linear(x, w, b))
    return y + (y @ w) @ w.T


def rows_of(x: Any, w: Any, b: Any) -> Any:
    """A softmax needs whole rows: only the largest elements come from the product."""
    return torch.softmax(F.linear(x, w, b), -1)


def turned(x: Any, w: Any, b: Any) -> Any:
    """Another order of dimensions."""
    return F.relu(F.linear(x, w).transpose(-1, -2) + 1)


def integers(x: Any, w: Any, b: Any) -> Any:
    """A mask of the product's elements is no number."""
    return F.linear(x, w, b) > 0, (F.linear(x, w) * 8).to(torch.int32)


def broadcast(x: Any, w: Any, b: Any) -> Any:
    """More elements than the product has."""
    return F.linear(x, w)[None] + torch.zeros(2, 1, 1, 1, dtype=x.dtype)


def cubes(x: Any, w: Any, b: Any) -> Any:
    return F.linear(x, w).abs() ** 1.7


def randomly(x: Any, w: Any, b: Any) -> Any:
    """Dropout of probability 0 draws numbers, which stay PyTorch's."""
    return F.dropout(F.linear(x, w, b), 0.0)


def rounded(x: Any, w: Any, b: Any) -> Any:
    """A number of 8 bits on the way is a rounding that is meant."""
    return F.linear(x, w, b).to(torch.float8_e4m3fn).to(x.dtype) * 2


def truths(x: Any, w: Any, b: Any) -> Any:
    """A truth as a factor."""
    y = F.linear(x, w, b)
    return (y > 0) * y


@pytest.mark.parametrize("function, count, stages", [
    (rounded, 1, "Bias(p0)"), (truths, 1, "Bias(p0)"), (several, 1, "Bias(p0)"), (cycle, 3, "Bias(p0) | Elementwise(f1)"), (rows_of, 1, 'Bias(p0) | RowReduce(rows, "max")'),
    (turned, 1, ""), (integers, 2, "Bias(p0)"), (broadcast, 1, ""), (cubes, 1, "Elementwise(f0)"), (randomly, 1, "Bias(p0)")])
def test_what_cannot_be_fused_stays_pytorchs(function: Any, count: int, stages: str, in_the_emulator: None) -> None:
    passed = compared(function, X, W, B)
    assert len(passed.fused) == count and passed.fused[0].rpartition("return ")[2] == stages


LEFT: dict[str, tuple[Any, str]] = {
    "float32": (lambda: (X.float(), W.float(), B.float()), "operands of torch.float32"),
    "float64": (lambda: (X, W, B), "operands of torch.float64"),
    "empty": (lambda: (X.half()[:0], W.half(), B.half()), "sizes that are 0, or not known"),
    "no inner axis": (lambda: (X.half()[..., :0], W.half()[:, :0], B.half()), "sizes that are 0, or not known"),
}


@pytest.mark.parametrize("name", LEFT)
def test_products_that_are_left(name: str, in_the_emulator: None) -> None:
    make, why = LEFT[name]
    passed = compared(lambda x, w, b: F.relu(F.linear(x, w, b)), *make(), take="faster")
    assert [x.why for x in passed.entries] == [why] and not passed.fused


def test_whole_numbers_are_left(in_the_emulator: None) -> None:
    a = torch.arange(12).view(3, 4)
    passed = compared(lambda a, b: (a @ b).float() * 2, a, a.T.contiguous())
    assert not passed.fused and passed.entries[0].why == "operands of torch.int64"


def test_tensors_that_gemmkit_does_not_compute_are_left() -> None:
    """On the CPU outside of the emulator."""
    passed = compared(lambda x, w, b: F.relu(F.linear(x, w, b)), X, W, B)
    assert [x.why for x in passed.entries] == ["tensors on cpu"]


ALONE = "nothing is fused that cuBLAS does not compute, too"
READ = "a kernel of Inductor's reads the result, and computes this as well"
SMALL = "D of 10 x 6 has too few tiles to hide an epilogue"
FOR_IT = "a kernel of Inductor's computes an operand for it alone, and would compute this as well"
UNKNOWN = "gathered rows and reductions without D have not been measured beside Inductor's"


@pytest.mark.parametrize("name, whys", [
    ("plain", [ALONE]), ("bias", [ALONE]), ("gelu", [SMALL]), ("gated", [SMALL] * 2), ("residual", [SMALL]), ("norm", [READ]),
    ("slope", [FOR_IT]), ("two layers", [SMALL, ALONE]), ("largest", [UNKNOWN]), ("gathered", [UNKNOWN])])
def test_what_is_expected_to_be_faster(name: str, whys: list[str], in_the_emulator: None) -> None:
    """The rule of the how-to page, on a GPU of 132 multiprocessors."""
    function = {
        "plain": lambda x, w, b, r: F.linear(x, w), "bias": lambda x, w, b, r: F.linear(x, w, b),
        "gelu": lambda x, w, b, r: F.gelu(F.linear(x, w, b)), "residual": lambda x, w, b, r: F.linear(x, w) + r,
        "gated": lambda x, w, b, r: F.silu(F.linear(x, w)) * F.linear(x, w + 1),
        "slope": lambda x, w, b, r: F.linear(x, w) * torch.sigmoid(r),
        "norm": lambda x, w, b, r: torch.softmax(F.relu(F.linear(x, w)), -1),
        "two layers": lambda x, w, b, r: F.relu(F.linear(x, w)) @ w, "largest": lambda x, w, b, r: F.linear(x, w).amax(-1),
        "gathered": lambda x, w, b, r: F.relu(F.linear(F.embedding(torch.tensor([2, 1]), x[0]), w)),
    }[name]
    passed = compared(function, X.half(), W.half(), B.half(), R.half(), take="faster")
    assert [x.why for x in passed.entries] == whys


@pytest.mark.parametrize("rows", [1024, 8192])
@pytest.mark.parametrize("function, parts", [(lambda x, w, v, r: (x @ w) + r, 1), (lambda x, w, v, r: torch.tanh(x @ w), 1),
                                             (lambda x, w, v, r: torch.tanh(x @ w) * (x @ v), 2)])
def test_large_products_are_taken(function: Any, parts: int, rows: int, in_the_emulator: None) -> None:
    """Where tiles of the result are two waves of blocks: a graph is enough to know."""
    shapes = (rows, 64), (64, 4096), (64, 4096), (rows, 4096)
    with torch._subclasses.FakeTensorMode():
        graph = torch.fx.experimental.proxy_tensor.make_fx(function)(*(torch.empty(*shape).half() for shape in shapes))
    entries: list[Any] = []
    Lowering("faster", entries)(graph.graph)
    few = SMALL.replace("10 x 6", "1024 x 4096")
    assert [x.why for x in entries] == ([few] * parts if rows * parts < 2500 else [""])


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), 0.0, 1e30])
def test_special_numbers(special: float, in_the_emulator: None) -> None:
    """NaN goes through clamp, maximum and relu, and nothing overflows that does not in PyTorch."""
    x = X.float().clone()
    x[0, 0, 0] = special
    compared(lambda x, w, b: torch.maximum(F.linear(x, w, b).clamp(-2, 2), b), x, W.float(), B.float())
    compared(lambda x, w, b: F.relu(F.linear(x, w, b)), x, W.float(), B.float())
    compared(lambda x, w, b: torch.sigmoid(F.linear(x, w, b)) + F.linear(x, w, b).amax(-1, keepdim=True), x, W.float(), B.float())
    compared(lambda x, w, b: F.relu(torch.addmm(b * special, X[0].float(), w.t(), beta=0, alpha=2)), x, W.float(), B.float())


# -- with Inductor ----------------------------------------------------------------------------------------------------

def test_a_factor_of_what_a_product_left_to_pytorch_is_added_to(in_the_emulator: None) -> None:
    """PyTorch's own pass makes an addmm of them, without the factor."""
    def function(x: Any, y: Any) -> Any:
        return torch.add(x @ W.float().mT, y, alpha=3), torch.add(y, x @ W.float().mT, alpha=-1)

    x, y = X[0].float(), torch.ones(len(X[0]), len(W))
    with torch.no_grad():
        close(torch.compile(function, backend="gemmkit")(x, y), function(x, y))


def test_the_backend_is_known() -> None:
    """By its name once gemmkit.torch is imported, and as an entry point of the package."""
    assert "gemmkit" in torch._dynamo.list_backends()
    tomllib = pytest.importorskip("tomllib")
    module, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"][
        "gemmkit"].split(":")
    assert getattr(importlib.import_module(module), name) is lowering.backend


def test_what_is_explained_depends_on_no_call_before(in_the_emulator: None) -> None:
    """PyTorch compiles a function of sizes that it has seen change for unknown ones, from then on."""
    layer = Layer(TINY).bfloat16()

    def given(batch: int, rows: int) -> list[Any]:
        return [torch.randn(*shape).bfloat16() for shape in ((batch, rows, 64), (rows, 16), (rows, 16))]

    with torch.no_grad():
        first = gk.torch.explain(layer, *given(2, 6), options=ALL)
        for sizes in ((3, 5), (2, 9)):
            torch.compile(layer, backend="eager")(*given(*sizes))
        assert gk.torch.explain(layer, *given(2, 6), options=ALL) == first


@on_devices
def test_a_decoder_layer_is_one_graph(device: str) -> None:
    """Inference, and the gradients of a training step: as near to float32's as eager PyTorch's."""
    layer = Layer(TINY).to(device).bfloat16()
    x, cos, sin = (torch.randn(*shape, device=device).bfloat16() for shape in ((2, 6, 64), (6, 16), (6, 16)))
    explained = torch._dynamo.explain(layer)(x, cos, sin)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    with torch.no_grad():
        wanted = layer(x, cos, sin)
        for options, stages in (({}, ["attention"]), (ALL, [
                "attention", "", "", "", 'Residual(p0) | RowReduce(rows, "sumsq")', "Fold(f0)", "Residual(p0)"])):
            explanation = gk.torch.explain(layer, x, cos, sin, options=options)
            found = torch.compile(layer, backend="gemmkit", fullgraph=True, options=options)(x, cos, sin)
            assert explanation.graphs == 1
            assert [entry.epilogue.rpartition("return ")[2] for entry in explanation.fused] == stages
            assert (found - wanted).abs().max() < 0.05
    _compare_gradients(layer, (x, cos, sin))


def _compare_gradients(module: Any, inputs: tuple[Any, ...]) -> None:
    """With everything taken that can be."""
    wide = copy.deepcopy(module).float()
    results = []
    for function, model, args in ((torch.compile(module, backend="gemmkit", fullgraph=True, options=ALL), module, inputs),
                                  (module, module, inputs), (wide, wide, tuple(x.float() for x in inputs))):
        y = function(*args)
        ones = torch.linspace(-1, 1, y.shape[-1], device=y.device).to(y.dtype).expand_as(y)
        results.append([y.detach(), *torch.autograd.grad(y, list(model.parameters()), ones)])
    for found, eager, exact in zip(*results):
        def off(x: Any, exact: Any = exact) -> float:
            return float((x.float() - exact).norm() / exact.norm())

        assert off(found) <= 1.5 * off(eager) + 0.004


@on_devices
@pytest.mark.kin(2)
def test_a_training_step_of_an_mlp(device: str) -> None:
    model = MLP(16, 24).to(device).bfloat16()
    x = torch.randn(6, 16, device=device).bfloat16()
    explanation = gk.torch.explain(model, x, options=ALL)
    assert explanation.graphs == 1 and any("Residual" in entry.epilogue for entry in explanation.fused)
    _compare_gradients(model, (x,))


@on_devices
@pytest.mark.kin(2)
def test_unknown_sizes(device: str) -> None:
    """One graph for every number of rows; what follows a sum of rows too."""
    w, b = torch.randn(6, 8, device=device).half(), torch.randn(6, device=device).half()
    compiled = torch.compile(lambda x, w, b: F.gelu(F.linear(x, w, b)) * 2, backend="gemmkit", dynamic=True,
                             fullgraph=True, options=ALL)
    with torch.no_grad():
        for rows in (4, 7, 12):
            x = torch.randn(2, rows, 8, device=device).half()
            close(compiled(x, w, b), F.gelu(F.linear(x, w, b)) * 2)


@on_devices
@pytest.mark.kin(2)
def test_autocast(device: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to(device)
    x = torch.randn(5, 8, device=device)

    def step(x: Any) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            return model(x)

    with torch.no_grad():
        explanation = gk.torch.explain(step, x, options=ALL)
        found = torch.compile(step, backend="gemmkit", fullgraph=True, options=ALL)(x)
        assert len(explanation.fused) == 2 and found.dtype == torch.bfloat16
        close(found, step(x))


@on_devices
@pytest.mark.kin(2)
def test_modes(device: str) -> None:
    """CUDA graphs on a GPU; no other results."""
    x, w, r = (torch.randn(*shape, device=device).half() for shape in ((5, 8), (6, 8), (5, 6)))
    options = {**ALL, "triton.cudagraphs": True}           # what the mode "reduce-overhead" says; PyTorch takes one of the two
    compiled = torch.compile(lambda x, w, r: F.relu(F.linear(x, w)) + r, backend="gemmkit", options=options)
    with torch.no_grad():                                  # (and the mode itself)
        close(torch.compile(lambda x, w, r: x @ w.T + r, backend="gemmkit", mode="reduce-overhead")(x, w, r), x @ w.T + r)
    with torch.no_grad():
        for _ in range(4):
            close(compiled(x, w, r).clone(), F.relu(F.linear(x, w)) + r)
            x = torch.randn_like(x)


def test_rows_out_of_range_raise(in_the_emulator: None) -> None:
    table, w = torch.randn(20, 8), torch.randn(6, 8)
    compiled = torch.compile(lambda t, i, w: F.relu(F.linear(F.embedding(i, t), w)), backend="gemmkit", options=ALL)
    with torch.no_grad():
        index = torch.tensor([3, 0, 19])
        close(compiled(table, index, w), F.relu(F.linear(table[index], w)))
        for wrong in (20, -1):
            with pytest.raises(RuntimeError, match="out of bounds"):
                compiled(table, torch.tensor([3, wrong, 19]), w)


@pytest.mark.parametrize("options", [{"gemmkit.take": "most"}, {"gemmkit.other": True}])
def test_options_that_are_none(options: Any) -> None:
    with pytest.raises(Exception, match=r"gemmkit\.take, which is 'faster' or 'all'"):
        torch.compile(lambda x: x @ x, backend="gemmkit", options=options)(torch.ones(2, 2))


class Counted(CustomGraphPass):                                                # type: ignore[misc]
    seen = 0

    def __call__(self, graph: Any) -> None:
        Counted.seen += 1

    def uuid(self) -> Any:
        return "counted"


def test_a_pass_of_the_users_stays(in_the_emulator: None) -> None:
    before = Counted.seen
    options = {**ALL, "post_grad_custom_pre_pass": Counted(), "force_disable_caches": True}
    x = torch.randn(3, 3)
    with torch.no_grad():
        close(torch.compile(lambda x: (x @ x).relu(), backend="gemmkit", options=options)(x), (x @ x).relu())
    assert Counted.seen == before + 1


def test_what_was_fused_is_logged(in_the_emulator: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gemmkit.torch.lowering"):
        compared(lambda x, w, b: F.relu(F.linear(x, w, b)), X, W, B)
    assert "Bias(p0) | Elementwise(f1)" in caplog.text


CACHED = """
import torch, gemmkit as gk, gemmkit.torch
from torch._dynamo.utils import counters
x = torch.linspace(-1, 1, 12).view(3, 4)
with gk.emulate(), torch.no_grad():
    y = torch.compile(lambda x: torch.tanh(x @ x.T), backend="gemmkit", options={"gemmkit.take": "all"})(x)
assert torch.allclose(y, torch.tanh(x @ x.T), atol=1e-6)
print(counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.thorough
def test_a_graph_of_another_process(tmp_path: Any) -> None:
    """PyTorch's cache has it, with its epilogue."""
    def ran() -> str:
        return subprocess.run([sys.executable, "-c", CACHED], check=True, capture_output=True, text=True, cwd=ROOT, env={
            **os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}).stdout.strip()

    assert ran() == "0" and ran() == "1"
