"""Second derivatives of `gemmkit.torch`'s operators: `gradgradcheck` in float64, and PyTorch's own double backward beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
import gemmkit.torch  # noqa: E402
from gemmkit.epilogues import Bias, Elementwise  # noqa: E402
from gemmkit.kernels.masks import ALiBi, Causal, Documents, Mask, SoftCap, Window  # noqa: E402
from gemmkit.lang.components import dataclass  # noqa: E402
from gemmkit.torch import attention, gated, glu, layernorm, log_softmax, rmsnorm, softmax  # noqa: E402
from gemmkit.torch.rows import UNITS  # noqa: E402
from tests.support.machines import on_devices  # noqa: E402

F = torch.nn.functional
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BOUNDS = {BF16: 1.5e-2, F16: 2e-3, F32: 2e-6, F64: 1e-9}


def drawn(*shape: int, device: str = "cpu", dtype: Any = F64, grad: bool = True, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_(grad)


def many(*shapes: tuple[int, ...], **how: Any) -> list[Any]:
    return [drawn(*shape, seed=1000 * n, **how) for n, shape in enumerate(shapes)]


def second(f: Callable[..., Any], given: list[Any]) -> Any:
    """The gradients of given tensors, and of the gradients of f's results, from drawn ones of first gradients."""
    found = f(*given)
    found = found if isinstance(found, tuple) else (found,)
    grads = [drawn(*y.shape, device=y.device, dtype=F16).to(y.dtype).requires_grad_() for y in found]
    wanted = [x for x in given if x.requires_grad]
    first = torch.autograd.grad(found, wanted, grads, create_graph=True, allow_unused=True, materialize_grads=True)
    toward = [drawn(*y.shape, device=y.device, dtype=F16, grad=False).to(y.dtype) * 0.5 for y in first]
    pairs = [(y, z) for y, z in zip(first, toward) if y.requires_grad]
    results, toward = zip(*pairs)
    return torch.autograd.grad(results, [*wanted, *grads], toward, allow_unused=True, materialize_grads=True)


def check(ours: Callable[..., Any], theirs: Callable[..., Any], *given: Any, times: float = 1.0) -> None:
    """Second derivatives beside PyTorch's in float64."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in given]
    for one, other in zip(second(ours, [*given]), second(theirs, wide), strict=True):
        assert one.shape == other.shape
        bound = times * BOUNDS[given[0].dtype] * max(1.0, float(other.abs().max()))
        assert (one.double() - other).abs().max() <= bound


def check_in_float64(f: Callable[..., Any], *given: Any) -> None:
    assert torch.autograd.gradcheck(f, given, fast_mode=True, check_undefined_grad=False)
    assert torch.autograd.gradgradcheck(f, given, fast_mode=True, check_undefined_grad=False)


# -- rows, products, layers -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("f", "vectors"), [
    (lambda x: softmax(x, scale=0.5), 0), (lambda x: log_softmax(x, scale=-2.0), 0), (layernorm, 0), (layernorm, 1), (layernorm, 2),
    (rmsnorm, 0), (rmsnorm, 1)], ids=["softmax", "log_softmax", "plain layernorm", "layernorm without beta", "layernorm",
                                      "plain rmsnorm", "rmsnorm"])
def test_rows_in_float64(f: Callable[..., Any], vectors: int, in_the_emulator: None) -> None:
    """Of odd lengths, of rows that do not lie at one distance, of one row; some require no gradient."""
    for x in (drawn(3, 7), drawn(2, 5, 3).transpose(0, 1)[..., 1:].detach().requires_grad_(), drawn(5)):
        check_in_float64(f, x, *many(*((x.shape[-1],),) * vectors))
    for n in range(1 + vectors if vectors else 0):
        check_in_float64(f, *(drawn(*shape, grad=n == k) for k, shape in enumerate(((3, 7), (7,), (7,))[:1 + vectors])))


@on_devices
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_rows_beside_pytorch(dtype: Any, device: str) -> None:
    x, gamma, beta, up = many((3, 33), (33,), (33,), (3, 33), device=device, dtype=dtype)
    check(layernorm, lambda x, g, b: F.layer_norm(x, (33,), g, b, 1e-5), x, gamma, beta)
    check(rmsnorm, lambda x, g: F.rms_norm(x, (33,), g, 1e-6), x, gamma)
    check(softmax, lambda x: F.softmax(x, -1), x)
    check(log_softmax, lambda x: F.log_softmax(x, -1), x)
    for activation, unit in UNITS.items():
        check(lambda x, y, a=activation: gated(x, y, a), lambda x, y, u=unit: u.of_tensors(x) * y, x, up)
    check(gated, lambda x, y: F.silu(x) * y, x, up.detach())
    check(lambda x: gated(x, x), lambda x: F.silu(x) * x, x)


@on_devices
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_gated_units(dtype: Any, device: str) -> None:
    x, w, v = many((5, 16), (16, 8), (16, 8), device=device, dtype=dtype)
    check(glu, lambda x, w, v: F.silu(x @ w) * (x @ v), x, w, v, times=4.0)


def cube(x: Any) -> Any:
    return x * x * x if x > 0 else math.tanh(x)


def test_layers(in_the_emulator: None) -> None:
    """A bias and an activation."""
    layer = gk.torch.Linear(3, 2, activation="gelu", dtype=F64)
    check_in_float64(lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,)), drawn(5, 3), drawn(2, 3), drawn(2))


def test_epilogues(in_the_emulator: None) -> None:
    """One of the user's, behind a bias."""
    op = gk.torch.op(name="tests::cubed", epilogue=lambda bias: Bias(bias) | Elementwise(cube))
    check_in_float64(op, drawn(5, 3), drawn(3, 2), drawn(2))


def test_groups_of_rows(in_the_emulator: None) -> None:
    """Both forms; a group without rows."""
    ends, x, w = torch.tensor([3, 3, 9]), drawn(9, 8, dtype=F16), drawn(3, 8, 16, dtype=F16)
    check(lambda x, w: gk.torch.grouped_mm(x, w, ends), lambda x, w: torch.cat((x[:3] @ w[0], x[3:] @ w[2])), x, w)
    y = drawn(9, 16, dtype=F16)
    check(lambda x, y: gk.torch.grouped_mm(x.mT, y, ends),
          lambda x, y: torch.stack((x[:3].mT @ y[:3], 0 * x[:3].mT @ y[:3], x[3:].mT @ y[3:])), x, y)


@pytest.mark.sample(5)
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,)], ids=str)
def test_experts(wanted: tuple[int, ...], in_the_emulator: None) -> None:
    """A number that is no expert's, and an expert without tokens."""
    chosen = torch.tensor([[0, 2], [-1, 7]])
    given = many((2, 8), (2, 2), (3, 8, 8), (3, 8, 8), (3, 8, 8), dtype=BF16)
    given = [(x.detach().float() if n == 1 else x.detach()).requires_grad_(n in wanted) for n, x in enumerate(given)]

    def exact(x: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
        each = (F.sigmoid(x @ gate) * (x @ up)) @ down
        return sum(torch.where(chosen == e, weights, 0.0).sum(1)[:, None] * each[e] for e in range(3))

    check(lambda x, weights, *w: gk.torch.experts(x, chosen, weights, *w, "sigmoid"), exact, *given, times=2.0)


# -- attention ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Odd(Mask):
    """Of the user's, with a branch."""

    def visible(self, m: int, n: int) -> bool:
        return n <= m and ((m + n) % 2 == 1 or m == n)


def plain(s: Any, m: Any, n: Any) -> Any:
    return s


#: mask, whether a query sees a key (queries and keys are 5 and 7), score, and the score by PyTorch.
CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "plain": (None, lambda m, n: n >= 0, None, plain),
    "causal": (Causal(), lambda m, n: n <= m + 2, None, plain),
    "upper left": (Causal("upper left"), lambda m, n: n <= m, None, plain),
    "window, soft cap": (Causal() & Window(1), lambda m, n: (n <= m + 2) & (n > m), SoftCap(2.0), lambda s, m, n: 2 * torch.tanh(s / 2)),
    "own": (Odd(), lambda m, n: (n <= m) & (((m + n) % 2 == 1) | (m == n)),
            lambda s, m, n: math.tanh(s) if n < m else 0.5 * s, lambda s, m, n: torch.where(n < m, torch.tanh(s), 0.5 * s)),
    "ALiBi": (None, lambda m, n: n >= 0, ALiBi(torch.tensor([0.5, 0.25])),
              lambda s, m, n: s - torch.tensor([0.5, 0.25], device=s.device)[:, None, None] * (m - n)),
}


def exact(case: str) -> Callable[..., Any]:
    _, sees, _, score = CASES[case]

    def compute(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        m, n = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        s = score(q @ k.mT * 0.25, m[:, None], n).masked_fill(~sees(m[:, None], n), -math.inf)
        return s.softmax(-1) @ v, s.logsumexp(-1)

    return compute


@on_devices
@pytest.mark.parametrize("case", CASES)
def test_attention(case: str, device: str) -> None:
    """Of shared heads, through the logarithms, too."""
    q, k, v = many((2, 2, 5, 16), (2, 1, 7, 16), (1, 2, 7, 8), device=device, dtype=F16)
    mask, _, score, _ = CASES[case]
    if device == "cuda" and case == "ALiBi":
        score = ALiBi(score.slopes.cuda())
    check(lambda q, k, v: attention(q, k, v, mask=mask, score=score, return_lse=True), exact(case), q, k, v)


def test_attention_with_arrays(in_the_emulator: None) -> None:
    """Of a mask and of a score; where this one is not read there need be no element."""
    table, q, k, v = (torch.linspace(-1, 1, 5).half(), *many(*((1, 1, 5, 16),) * 3, dtype=F16))
    mask = Documents.of([0, 2, 5], torch.from_numpy) & Causal()

    def theirs(q: Any, k: Any, v: Any) -> Any:
        m, n = torch.arange(5)[:, None], torch.arange(5)
        s = q @ k.mT * 0.25 + 3 * table.double()[(m - n).clamp(0)]
        return s.masked_fill((n > m) | ((m >= 2) & (n < 2)), -math.inf).softmax(-1) @ v

    check(lambda *x: attention(*x, mask=mask, score=lambda s, m, n: s + 3 * table[m - n] if m >= n else s), theirs, q, k, v)


def test_attention_of_lengths(in_the_emulator: None) -> None:
    """What lies behind a length is no key; a query that sees none has no gradient; in the other layout, by the operator."""
    q, k, v = many((1, 1, 5, 16), (1, 1, 7, 16), (1, 1, 7, 16), dtype=BF16)
    with torch.no_grad():
        for x in (k, v):
            x[:, :, 3:] = math.nan

    def ours(q: Any, k: Any, v: Any) -> Any:
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return attention(*turned, mask=Causal(), layout="bnhd", key_lengths=torch.tensor([3])).transpose(1, 2)

    def theirs(q: Any, k: Any, v: Any) -> Any:                         # the last three queries see 1, 2 and 3 keys
        m, n = torch.arange(3)[:, None], torch.arange(3)
        s = (q[:, :, 2:] @ k[:, :, :3].mT * 0.25).masked_fill(n > m, -math.inf)
        return torch.cat((0.0 * q[:, :, :2], s.softmax(-1) @ v[:, :, :3]), 2)

    check(ours, theirs, q, k, v)
    q, k, v = many((1, 1, 5, 16), (1, 1, 7, 16), (1, 1, 7, 16), dtype=F16)
    check(lambda *x: torch.ops.gemmkit.attention(*x, None, None, None)[0], lambda *x: exact("plain")(*x)[0], q, k, v)


def test_autocast_leaves_them(in_the_emulator: None) -> None:
    given = many((1, 1, 5, 16), (1, 1, 7, 16), (1, 1, 7, 16), dtype=BF16)
    wanted = second(attention, given)
    with torch.autocast("cpu", dtype=BF16):
        for one, other in zip(second(attention, given), wanted):
            assert torch.equal(one, other)


@dataclass(frozen=True)
class Whole(Mask):
    """Code that does not run on tensors."""

    def visible(self, m: int, n: int) -> bool:
        return int(m) < n


def test_what_is_refused(in_the_emulator: None) -> None:
    """By the name of the component, when the second derivative is asked for."""
    q, k, v = (drawn(1, 1, 4, 16, dtype=F16) for _ in range(3))
    for words, more in ((r"mask=Whole\(\) has no second derivative: float\(x\), int\(x\)", dict(mask=Whole())),
                        ("attention with lengths= has no second derivative", dict(lengths=([0, 4], [0, 4])))):
        given = [x[0] if "lengths" in more else x for x in (q, k, v)]
        (first,) = torch.autograd.grad(attention(*given, **more).sum(), (q,), create_graph=True)
        with pytest.raises(NotImplementedError, match=words):
            first.sum().backward()


# -- all of them ----------------------------------------------------------------------------------------------------------

def test_third_derivatives_and_transforms(in_the_emulator: None) -> None:
    def ours(x: Any) -> Any:
        return rmsnorm(softmax(x) + x).pow(3).sum() + gated(x, x).sum()

    def theirs(x: Any) -> Any:
        return F.rms_norm(F.softmax(x, -1) + x, x.shape[-1:], None, 1e-6).pow(3).sum() + (F.silu(x) * x).sum()

    x = drawn(2, 5, dtype=F32, grad=False)
    for nested in (lambda f: torch.func.jacrev(torch.func.jacrev(f)), lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum())):
        torch.testing.assert_close(nested(ours)(x), nested(theirs)(x), rtol=1e-4, atol=1e-4)
    found = []
    for f in (ours, theirs):
        leaf = x.clone().requires_grad_()
        total = f(leaf)
        for _ in range(3):
            (gradient,) = torch.autograd.grad(total, leaf, create_graph=True)
            total = gradient.square().sum()
        found.append(gradient)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-2)


def test_first_derivatives_keep_nothing(in_the_emulator: None) -> None:
    """Without ``create_graph`` a gradient saves no tensor; a transform's function is pulled back when it has ended."""
    x, kept = drawn(2, 8, dtype=F16), list[Any]()
    q = drawn(1, 1, 4, 16, dtype=F16)
    results = [f(x) for f in (softmax, rmsnorm, lambda x: gated(x, x))] + [attention(q, q, q)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        for y in results:
            y.sum().backward()
    assert not kept
    with torch.no_grad():
        pull = torch.func.vjp(softmax, x.detach())[1]
        torch.testing.assert_close(pull(torch.ones(2, 8).half())[0], torch.zeros(2, 8).half(), rtol=0, atol=1e-3)


def test_a_batch_of_gates(in_the_emulator: None) -> None:
    gates, up = drawn(3, 2, 8, dtype=F32, grad=False), drawn(2, 8, dtype=F32, grad=False)
    assert torch.equal(torch.func.vmap(gated, (0, None))(gates, up), torch.stack([gated(x, up) for x in gates]))
