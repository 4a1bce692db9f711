"""`gemmkit.torch.grouped_mm`: groups of rows beside products one by one in float64, of all orders of derivatives; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
from gemmkit.torch import grouped_mm  # noqa: E402

HALF, BF16 = torch.float16, torch.bfloat16
ENDS = [0, 20, 20, 150, 151, 280]
ROWS, K, N = 300, 24, 40


def drawn(*shape: int, device: str = "cpu", dtype: Any = HALF) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(dtype).to(device)


def exact(a: Any, b: Any) -> Any:
    """In float64: rows of no group are zeros."""
    a, b, cuts = a.double(), b.double(), [0, *ENDS]
    pairs = [(slice(begin, end), n) for n, (begin, end) in enumerate(zip(cuts, ENDS))]
    if b.dim() == 2:
        return torch.stack([a[:, own] @ b[own] for own, _ in pairs])
    return torch.cat([*(a[own] @ b[n] for own, n in pairs), a.new_zeros(a.shape[0] - ENDS[-1], b.shape[2])])


def close(found: Any, wanted: Any, most: float = 4e-3) -> None:
    assert found.shape == wanted.shape
    with torch.no_grad():
        wanted = torch.cat((wanted.flatten(), wanted.new_zeros(1)))    # of results without elements, too
        found = torch.cat((found.double().flatten(), wanted[-1:]))
        assert (found - wanted).abs().max() <= most * max(1.0, float(wanted.abs().max()))


def operands(form: str, device: str, dtype: Any) -> tuple[Any, Any]:
    """Rows by groups, with matrices of either order; products of groups, of columns of either order."""
    if form.startswith("of"):
        a = drawn(K, ROWS, device=device, dtype=dtype) if form.endswith("lines") else drawn(ROWS, K, device=device, dtype=dtype).mT
        return a, drawn(ROWS, N, device=device, dtype=dtype)
    w = drawn(len(ENDS), N, K, device=device, dtype=dtype).mT if form.endswith("turned") else drawn(len(ENDS), K, N, device=device, dtype=dtype)
    return drawn(ROWS, K, device=device, dtype=dtype), w


def check(form: str, device: str, dtype: Any) -> None:
    a, b = operands(form, device, dtype)
    ends, most = torch.tensor(ENDS, device=device, dtype=torch.int32), 4e-3 if dtype is HALF else 2e-2
    a64, b64 = (x.double().requires_grad_() for x in (a, b))
    wanted = exact(a64, b64)
    grad = drawn(*wanted.shape, device=device, dtype=dtype)
    for x in (a, b, grad):                             # whatever rows of no group hold
        if x.dim() == 2:
            (x if x.shape[0] == ROWS else x.mT)[ENDS[-1]:] = np.inf
        x.requires_grad_(x is not grad)
    found = grouped_mm(a, b, ends)
    close(found, wanted, most)
    held = grad.double().nan_to_num(posinf=0.0)
    for one, other in zip(torch.autograd.grad(found, (a, b), grad), torch.autograd.grad(wanted, (a64, b64), held)):
        close(one, other.nan_to_num(), most)


FORMS = ["by groups", "by groups, turned", "of groups", "of groups, lines"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", FORMS)
def test_gradients(form: str, in_the_emulator: None) -> None:
    check(form, "cpu", HALF if form != "of groups" else BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_on_a_gpu(form: str, dtype: Any) -> None:
    check(form, "cuda", dtype)


@pytest.mark.gpu
def test_it_is_pytorchs_own(rng: np.random.Generator) -> None:
    """Many groups of drawn lengths, of all multiprocessors."""
    for count in (1, 17, 128):
        ends = torch.tensor(np.cumsum(rng.choice([0, 16, 64, 200, 512], count)), device="cuda", dtype=torch.int32)
        rows = max(16, int(ends[-1]))
        x, w = drawn(rows, 256, device="cuda", dtype=BF16), drawn(count, 256, 320, device="cuda", dtype=BF16)
        found, wanted = grouped_mm(x, w, ends), torch._grouped_mm(x, w, offs=ends)
        close(found[:int(ends[-1])], wanted[:int(ends[-1])].double(), 1e-2)


@pytest.mark.gpu
def test_graphs(rng: np.random.Generator) -> None:
    """The host copies nothing and waits for nothing: a graph takes other groups when it runs again."""
    x, w = drawn(300, 64, device="cuda"), drawn(3, 64, 64, device="cuda")
    ends, graph = torch.tensor([10, 20, 300], device="cuda"), torch.cuda.CUDAGraph()
    grouped_mm(x, w, ends)
    with torch.cuda.graph(graph):
        found = grouped_mm(x, w, ends)
    for cuts in ([100, 100, 290], [0, 299, 300]):
        ends.copy_(torch.tensor(cuts))
        graph.replay()
        wanted = torch.cat([x[begin:end].double() @ w[n].double() for n, (begin, end) in enumerate(zip([0, *cuts], cuts))])
        close(found[:cuts[-1]], wanted)
        assert not found[cuts[-1]:].any()


def test_second_derivatives(in_the_emulator: None) -> None:
    """Of a gradient's square: products of groups, and of rows by them, once more."""
    ends, found = torch.tensor(ENDS), []
    for dtype, function in ((HALF, lambda x, w: grouped_mm(x, w, ends)), (torch.float64, exact)):
        x, w = (y.to(dtype).requires_grad_() for y in operands("by groups", "cpu", HALF))
        (of_x,) = torch.autograd.grad((function(x, w) * 0.1).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((of_x * of_x).sum(), w)[0])
    close(*found, 1e-2)


def test_sizes_of_nothing(in_the_emulator: None) -> None:
    ends = torch.tensor([0, 0])
    assert grouped_mm(drawn(0, 8), drawn(2, 8, 8), ends).shape == (0, 8)
    assert grouped_mm(drawn(5, 0), drawn(2, 0, 8), torch.tensor([2, 5])).tolist() == [[0.0] * 8] * 5
    assert grouped_mm(drawn(8, 0), drawn(0, 8), ends).tolist() == [[[0.0] * 8] * 8] * 2
    assert not grouped_mm(drawn(9, 8), drawn(2, 8, 8), ends).any()


def test_transforms(in_the_emulator: None) -> None:
    """A batch is one launch after the other; a tensor without data has a result without."""
    ends, x, w = torch.tensor([3, 9]), drawn(2, 9, 8), drawn(2, 8, 16)
    found = torch.func.vmap(lambda one: grouped_mm(one, w, ends))(x)
    close(found, torch.stack([torch.cat((y[:3].double() @ w[0].double(), y[3:].double() @ w[1].double())) for y in x]))
    assert grouped_mm(x[0].to("meta"), w.to("meta"), ends.to("meta")).shape == (9, 16)
    x = x[0].float().requires_grad_()
    with torch.autocast("cpu", BF16):
        assert grouped_mm(x, w.float(), ends).dtype == BF16


@pytest.mark.parametrize("change,error,words", [
    (dict(a=np.zeros((9, 8), np.float16)), TypeError, "mat_a is a ndarray; gemmkit.torch.grouped_mm takes tensors"),
    (dict(ends=torch.tensor([3.0, 9.0])), ValueError, r"offs has shape \(2,\) and dtype torch.float32; \(groups,\) of int32 or int64"),
    (dict(ends=torch.zeros(0, dtype=torch.int32)), ValueError, "at least one"),
    (dict(ends=torch.tensor([9])), ValueError, "mat_b has 2 matrices and offs has 1 ends"),
    (dict(a=torch.zeros(9, 16).half()), ValueError, "mat_a has 16 columns and mat_b has 8 rows; both must be K"),
    (dict(b=torch.zeros(16, 8).half()), ValueError, "mat_a has 8 columns and mat_b has 16 rows; both must be the rows of all groups"),
    (dict(a=torch.zeros(2, 9, 8).half()), ValueError, r"mat_a has shape \(2, 9, 8\) and .* gemmkit.torch.matmul is the product"),
    (dict(a=torch.zeros(9, 8)), TypeError, "mat_a has dtype torch.float32; float16 or bfloat16 is needed"),
    (dict(b=torch.zeros(2, 8, 8).bfloat16()), TypeError, "mat_b has dtype torch.bfloat16"),
    (dict(a=torch.zeros(9, 7).half(), b=torch.zeros(2, 7, 8).half()), ValueError, "x is an operand of a product, and TMA cannot load it"),
])
def test_what_is_refused(change: dict[str, Any], error: type, words: str, in_the_emulator: None) -> None:
    given = {"a": torch.zeros(9, 8).half(), "b": torch.zeros(2, 8, 8).half(), "ends": torch.tensor([3, 9]), **change}
    with pytest.raises(error, match=words):
        grouped_mm(given["a"], given["b"], given["ends"])


# -- a mixture of experts ----------------------------------------------------------------------------------------------------

TOKENS, EXPERTS, WIDTH, HIDDEN, CHOICES = 60, 4, 24, 40, 3
UNITS = {"silu": torch.nn.functional.silu, "relu": torch.relu}


def exact_experts(x: Any, chosen: Any, weights: Any, gate: Any, up: Any, down: Any, activation: str = "silu") -> Any:
    """In float64, each expert with all tokens: what no expert is chosen for adds nothing."""
    x, weights, gate, up, down = (y.double() for y in (x, weights, gate, up, down))
    y = torch.zeros_like(x)
    for e in range(gate.shape[0]):
        weight = torch.where(chosen == e, weights, 0.0).sum(1)
        y = y + weight[:, None] * ((UNITS[activation](x @ gate[e]) * (x @ up[e])) @ down[e])
    return y


def layer(device: str, dtype: Any, turned: bool, tokens: int = TOKENS, experts: int = EXPERTS, width: int = WIDTH, hidden: int = HIDDEN) -> list[Any]:
    """x, weights and the experts, of either order."""
    def matrices(rows: int, columns: int) -> Any:
        shape = (experts, columns, rows) if turned else (experts, rows, columns)
        w = (drawn(*shape, device=device, dtype=torch.float32) / rows ** 0.5).to(dtype)
        return w.mT if turned else w

    up = matrices(width, hidden)
    return [drawn(tokens, width, device=device, dtype=dtype), drawn(tokens, CHOICES, device=device, dtype=torch.float32),
            matrices(width, hidden), up.flip(0).mT.contiguous().mT if turned else up.flip(0), matrices(hidden, width)]


def choose(rng: np.random.Generator, tokens: int, experts: int, of: Any = np.int64) -> Any:
    """Different experts for each token; some numbers are those of none, and some experts have no token."""
    found = np.argsort(rng.random((tokens, experts)), axis=1)[:, :CHOICES].astype(of)
    found[::7, 0], found[3::11, 1], found[5::9, 2] = -1, experts, np.iinfo(of).max
    found[found == 2] = np.iinfo(of).min
    return torch.from_numpy(found)


def check_experts(rng: np.random.Generator, device: str, dtype: Any, turned: bool, activation: str, **sizes: int) -> None:
    x, weights, *w = layer(device, dtype, turned, **sizes)
    chosen = choose(rng, x.shape[0], w[0].shape[0], np.int32 if turned else np.int64).to(device)
    alone = gk.torch.experts(x, chosen, weights, *w, activation)
    given = [y.requires_grad_() for y in (x, weights, *w)]
    wide = [y.detach().double().requires_grad_() for y in given]
    found, wanted = gk.torch.experts(x, chosen, weights, *w, activation), exact_experts(wide[0], chosen, *wide[1:], activation)
    most = 6e-3 if dtype is HALF else 3e-2
    close(found, wanted, most)
    assert torch.equal(alone, found) and found.dtype == dtype
    grad = drawn(*wanted.shape, device=device, dtype=dtype)
    gradients = torch.autograd.grad(found, given, grad, retain_graph=True)
    for one, other, y in zip(gradients, torch.autograd.grad(wanted, wide, grad.double()), given):
        close(one, other, most)
        assert one.dtype == y.dtype
    if device == "cuda":                               # the same bits every time
        assert all(map(torch.equal, gradients, torch.autograd.grad(found, given, grad)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("turned,dtype,activation", [(False, HALF, "silu"), pytest.param(True, BF16, "silu", marks=pytest.mark.thorough),
                                                     (True, HALF, "relu")], ids=str)
def test_experts(turned: bool, dtype: Any, activation: str, in_the_emulator: None, rng: np.random.Generator) -> None:
    check_experts(rng, "cpu", dtype, turned, activation)


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_experts_on_a_gpu(dtype: Any, turned: bool, rng: np.random.Generator) -> None:
    check_experts(rng, "cuda", dtype, turned, "silu")
    check_experts(rng, "cuda", dtype, turned, "silu", tokens=1500, experts=9, width=264, hidden=392)


@pytest.mark.gpu
def test_experts_in_a_graph(rng: np.random.Generator) -> None:
    """Nothing is synchronised: other tokens choose other experts when it runs again."""
    x, weights, *w = layer("cuda", HALF, True)
    chosen, graph = choose(rng, TOKENS, EXPERTS).cuda(), torch.cuda.CUDAGraph()
    gk.torch.experts(x, chosen, weights, *w)
    with torch.cuda.graph(graph):
        found = gk.torch.experts(x, chosen, weights, *w)
    for _ in range(2):
        chosen.copy_(choose(rng, TOKENS, EXPERTS))
        x.copy_(torch.randn_like(x))
        graph.replay()
        close(found, exact_experts(x, chosen, weights, *w), 6e-3)


def test_experts_of_nothing(in_the_emulator: None, rng: np.random.Generator) -> None:
    """No tokens; no choices; nothing that is chosen; other views; a batch; tensors without data; one by one in autocast."""
    x, weights, *w = layer("cpu", HALF, False)
    chosen = choose(rng, TOKENS, EXPERTS)
    assert gk.torch.experts(x[:0], chosen[:0], weights[:0], *w).shape == (0, WIDTH)
    given = [y.clone().requires_grad_() for y in (x, weights[:, :0], *w)]
    none = gk.torch.experts(given[0], chosen[:, :0], *given[1:])
    assert not none.any() and not any(y.any() for y in torch.autograd.grad(none.sum(), given))
    assert not gk.torch.experts(x, torch.full_like(chosen, -1), weights, *w).any()
    wanted = exact_experts(x, chosen, weights, *w)
    close(gk.torch.experts(x.mT.contiguous().mT, chosen.clamp(-1, 9).int().mT.contiguous().mT, weights.double(), *w), wanted, 6e-3)
    close(torch.func.vmap(lambda one: gk.torch.experts(one, chosen, weights, *w))(x[None])[0], wanted, 6e-3)
    assert gk.torch.experts(*(y.to("meta") for y in (x, chosen, weights, *w))).shape == (TOKENS, WIDTH)
    with torch.autocast("cpu", BF16):
        assert gk.torch.experts(x.float(), chosen, weights, *(y.float() for y in w)).dtype == BF16


@pytest.mark.thorough
def test_experts_in_a_compiled_graph(in_the_emulator: None, rng: np.random.Generator) -> None:
    """One graph, with the gradients; it keeps no tensor of the compiler's for calls behind it."""
    x, weights, *w = layer("cpu", HALF, False, tokens=9)
    given, chosen = [y.requires_grad_() for y in (x, weights, *w)], choose(rng, 9, EXPERTS)
    compiled = torch.compile(lambda x, *more: gk.torch.experts(x, chosen, *more), backend="aot_eager", fullgraph=True)
    found, wanted = compiled(*given), gk.torch.experts(x, chosen, *given[1:])
    assert torch.equal(found, wanted)
    for one, other in zip(*(torch.autograd.grad(y.float().square().sum(), given) for y in (found, wanted))):
        assert torch.equal(one, other)


@pytest.mark.parametrize("change,error,words", [
    (dict(x=np.zeros((6, 8), np.float16)), TypeError, "x is a ndarray; gemmkit.torch.experts takes tensors"),
    (dict(x=torch.zeros(2, 6, 8).half()), ValueError, r"x has shape \(2, 6, 8\) and dtype torch.float16; \(tokens, width\) of float16 or bfloat16"),
    (dict(x=torch.zeros(6, 8)), TypeError, "x has shape .* and dtype torch.float32"),
    (dict(chosen=torch.zeros(6, 2)), ValueError, r"chosen has shape \(6, 2\) and dtype torch.float32; \(6, choices\) of int32 or int64"),
    (dict(chosen=torch.zeros(5, 2).long()), ValueError, r"chosen has shape \(5, 2\)"),
    (dict(weights=torch.zeros(6, 3)), ValueError, r"weights has shape \(6, 3\) .* \(6, 2\) of floating point is needed"),
    (dict(weights=torch.zeros(6, 2).long()), ValueError, "weights has shape .* and dtype torch.int64"),
    (dict(gate=torch.zeros(0, 8, 16).half()), ValueError, r"gate has shape \(0, 8, 16\); \(experts, 8, hidden\) is needed, at least one"),
    (dict(up=torch.zeros(3, 16, 8).half()), ValueError, r"up has shape \(3, 16, 8\); \(3, 8, 16\) is needed, because gate has shape"),
    (dict(down=torch.zeros(3, 8, 16).half()), ValueError, r"down has shape \(3, 8, 16\); \(3, 16, 8\) is needed"),
    (dict(up=torch.zeros(3, 8, 16).bfloat16()), TypeError, "up has dtype torch.bfloat16"),
    (dict(activation="swish"), ValueError, "swish"),
    (dict(gate=torch.zeros(3, 8, 12).half(), up=torch.zeros(3, 8, 12).half(), down=torch.zeros(3, 12, 8).half()), ValueError, "TMA cannot load it"),
])
def test_experts_that_are_refused(change: dict[str, Any], error: type, words: str, in_the_emulator: None) -> None:
    given = dict(x=torch.zeros(6, 8).half(), chosen=torch.zeros(6, 2).long(), weights=torch.zeros(6, 2), gate=torch.zeros(3, 8, 16).half(),
                 up=torch.zeros(3, 8, 16).half(), down=torch.zeros(3, 16, 8).half(), activation="silu") | change
    with pytest.raises(error, match=words):
        gk.torch.experts(*given.values())
