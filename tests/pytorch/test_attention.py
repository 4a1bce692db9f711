"""`gemmkit.torch.attention`: gradients beside PyTorch's own in float64, compiled, in batches, under autocast; and what is refused."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
import gemmkit.torch  # noqa: E402
from gemmkit.functions import gradients  # noqa: E402
from gemmkit.kernels.masks import ALiBi, Causal, Mask, ScoreFunction, SoftCap, Window  # noqa: E402
from gemmkit.torch import attention as attending  # noqa: E402

MODULE = sys.modules["gemmkit.torch.attention"]
HALF = torch.float16


def drawn(*shape: int, device: str = "cpu", dtype: Any = HALF, grad: bool = True) -> Any:
    random = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=random, dtype=torch.float32).to(dtype).to(device).requires_grad_(grad)


def exact(q: Any, k: Any, v: Any, visible: Any = None, score: Any = None) -> tuple[Any, Any]:
    """The result and the logarithms in float64, by autograd's own functions."""
    q, *of_keys = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in of_keys)
    s = q @ k.mT * q.shape[-1]**-0.5
    m, n = torch.arange(s.shape[-2], device=s.device)[:, None], torch.arange(s.shape[-1], device=s.device)
    s = s if score is None else score(s, m, n)
    s = s if visible is None else s.masked_fill(~visible(m, n), -math.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def close(found: Any, wanted: Any, most: float = 3e-3) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and (one.double() - other).abs().max() <= most * max(1.0, other.abs().max())


def check(device: str, sizes: tuple[int, ...], score: Any = None, formula: Any = None, most: float = 3e-3) -> None:
    """Of a causal call with shared heads: the result, the logarithms, and the gradients through both."""
    queries, keys = sizes
    q, k, v = drawn(1, 2, queries, 16, device=device), drawn(1, 1, keys, 16, device=device), drawn(1, 2, keys, 24, device=device)
    grads = drawn(1, 2, queries, 24, device=device, grad=False), drawn(1, 2, queries, device=device, dtype=torch.float32, grad=False)
    results = exact(q, k, v, lambda m, n: n <= m + keys - queries, formula)
    found = attending(q, k, v, mask=Causal(), score=score, return_lse=True)
    close(found, results, most)
    close(torch.autograd.grad(found, (q, k, v), grads), torch.autograd.grad(results, (q, k, v), grads), most)


SCORES = {"plain": (None, None), "soft cap": (lambda s, m, n: 2.0 * math.tanh(s / 2.0), lambda s, m, n: 2 * torch.tanh(s / 2))}


@pytest.mark.sample(2)
@pytest.mark.parametrize("score", SCORES)
def test_gradients(score: str, in_the_emulator: None) -> None:
    check("cpu", (14, 21), *SCORES[score])


@pytest.mark.gpu
@pytest.mark.parametrize("score", SCORES)
def test_gradients_on_a_gpu(score: str) -> None:
    check("cuda", (300, 411), *SCORES[score])


def test_one_operand_alone(in_the_emulator: None) -> None:
    """No program computes what is not asked for; a gradient of the logarithms alone; one that is broadcast."""
    q, k, v = drawn(1, 1, 9, 16), drawn(1, 1, 12, 16, grad=False), drawn(1, 1, 12, 16, grad=False)
    wanted, logarithms = exact(q, k, v)
    out, lse = attending(q, k, v, return_lse=True)
    close(torch.autograd.grad(out.sum(), (q,), retain_graph=True), torch.autograd.grad(wanted.sum(), (q,), retain_graph=True))
    close(torch.autograd.grad(lse.sum(), (q,)), torch.autograd.grad(logarithms.sum(), (q,)))


@pytest.mark.parametrize("is_asked", [False, True])
def test_any_order(is_asked: bool, in_the_emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager, compiled and by transformers' interface; `torch.use_deterministic_algorithms` is obeyed whatever the call allows."""
    q, k, v = drawn(1, 2, 30, 16), drawn(1, 1, 30, 16), drawn(1, 1, 30, 16)
    grad, wanted = drawn(1, 2, 30, 16, grad=False), exact(q, k, v, lambda m, n: n <= m)[0]
    taken: list[bool] = []
    given = MODULE.gradients

    def counted(rules: Any, *args: Any, **more: Any) -> Any:
        taken.append(rules.deterministic)
        return given(rules, *args, **more)

    monkeypatch.setattr(MODULE, "gradients", counted)
    calls = [lambda: attending(q, k, v, mask=Causal(), deterministic=False),
             lambda: torch.compile(lambda *qkv: attending(*qkv, mask=Causal(), deterministic=False), backend="aot_eager")(q, k, v),
             lambda: MODULE.attention_of_transformers(None, q, k, v, None, is_causal=True, deterministic=False)[0].transpose(1, 2)]
    torch.use_deterministic_algorithms(is_asked)
    try:
        for call in calls:
            close(torch.autograd.grad(call(), (q, k, v), grad), torch.autograd.grad(wanted, (q, k, v), grad, retain_graph=True))
    finally:
        torch.use_deterministic_algorithms(False)
    assert taken == [is_asked] * len(calls)
    taken.clear()
    torch.autograd.grad(attending(q, k, v), (q, k, v), grad)
    assert taken == [True]
    with pytest.raises(TypeError, match="deterministic=0: True or False is needed"):
        attending(q, k, v, deterministic=0)


def test_packed_sequences_and_lengths_of_the_host(in_the_emulator: None) -> None:
    q, k, v = drawn(1, 20, 16), drawn(1, 24, 16), drawn(1, 24, 16)
    grad = drawn(1, 20, 16, grad=False)
    found = torch.autograd.grad(attending(q, k, v, lengths=([0, 7, 20], torch.tensor([0, 10, 24]))), (q, k, v), grad)
    parts = [exact(q[:, a:b], k[:, c:d], v[:, c:d])[0] for (a, b), (c, d) in (((0, 7), (0, 10)), ((7, 20), (10, 24)))]
    close(found, torch.autograd.grad(torch.cat(parts, 1), (q, k, v), grad))
    found = torch.autograd.grad(gk.attention(*(x[None] for x in (q, k, v)), key_lengths=[11]), (q, k, v), grad[None])
    close(found, torch.autograd.grad(exact(q, k[:, :11], v[:, :11])[0], (q, k, v), grad))
    with pytest.raises(ValueError, match="offsets that begin with 0, never fall and end with the 20 rows"):
        attending(q, k, v, lengths=([0, 7, 19], [0, 10, 24]))


def test_attention_of_tensors_is_recorded(in_the_emulator: None) -> None:
    """`gemmkit.attention` is, too, as `gemmkit.matmul` is."""
    q, k, v = drawn(1, 1, 9, 16), drawn(1, 1, 12, 16), drawn(1, 1, 12, 16)
    found = gk.attention(q, k, v)
    assert found.requires_grad
    close(torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(exact(q, k, v)[0].sum(), (q, k, v)))
    with torch.no_grad():
        assert not gk.attention(q, k, v).requires_grad and not attending(q, k, v).requires_grad


def test_what_is_refused(in_the_emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is launched, by the name of what is wrong."""
    q, k, v = drawn(1, 2, 9, 16), drawn(1, 2, 16, 16), drawn(1, 2, 16, 16)
    learnt = torch.ones(2, requires_grad=True)
    monkeypatch.setattr(MODULE.forward, "launch", None)
    monkeypatch.setattr(gradients, "row_sums", None)
    for error, words, more in (
            (ValueError, "pages are given, and a tensor that requires a gradient", dict(pages=torch.zeros(1, 1, dtype=torch.int32))),
            (ValueError, "key_starts are given, and a tensor that requires a gradient", dict(key_starts=torch.zeros(1, dtype=torch.int32))),
            (NotImplementedError, "slopes of ALiBi requires a gradient", dict(score=ALiBi(learnt))),
            (NotImplementedError, "learnt, captured by .* requires a gradient", dict(score=lambda s, m, n, head: s * learnt[head])),
            (TypeError, "score=<lambda>: the derivative of this score is not known: math.gamma", dict(score=lambda s, m, n: math.gamma(s))),
            (TypeError, "mask is a Tensor; a gemmkit.masks.Mask is needed", dict(mask=torch.ones(9, 16))),
            (TypeError, "a real number is needed", dict(scale=torch.tensor(1.0, requires_grad=True))),
            (ValueError, 'layout=\'hbnd\': "bhnd" or "bnhd"', dict(layout="hbnd"))):
        with pytest.raises(error, match=words):
            attending(q, k, v, **more)
    for error, words, more in ((ValueError, "out= is given, and a tensor that requires a gradient", dict(out=torch.empty(1, 2, 9, 16, dtype=HALF))),
                               (ValueError, "stream= is given", dict(stream=0)), (NotImplementedError, "slopes", dict(score=ALiBi(learnt)))):
        with pytest.raises(error, match=words):
            gk.attention(q, k, v, **more)
    wide = drawn(1, 2, 16, 264)
    with pytest.raises(ValueError, match="heads have 264 columns, and a tensor that requires a gradient .* more than 256 have no gradient"):
        attending(wide, wide, v)
    with pytest.raises(TypeError, match="k is a ndarray, and another operand is a tensor that requires a gradient"):
        gk.attention(q, np.zeros((1, 2, 16, 16), np.float16), v)
    with pytest.raises(TypeError, match="k is a list; gemmkit.torch.attention takes tensors"):
        attending(q, [k], v)


@pytest.mark.thorough
def test_the_operator(in_the_emulator: None) -> None:
    """PyTorch's own checks: the schema, autograd, the fake kernel, dynamic shapes."""
    name = MODULE._named(Causal(), None, True)
    q, k, v = drawn(1, 2, 9, 16), drawn(1, 1, 12, 16), drawn(1, 2, 12, 8)
    torch.library.opcheck(torch.ops.gemmkit.attention.default, (q, k, v, None, None, None), dict(kind=name, scale=0.3))
    torch.library.opcheck(torch.ops.gemmkit.attention.default, (q[0], k[0], v[0], torch.tensor([0, 4, 9]), torch.tensor([0, 12, 12]), None),
                          dict(kind=name))


def test_a_function_compiles_without_a_break(in_the_emulator: None) -> None:
    """With masks that are made inside, or given; of another mask it is compiled anew."""
    q, k, v = drawn(1, 1, 9, 16), drawn(1, 1, 12, 16), drawn(1, 1, 12, 16)

    def inside(q: Any, k: Any, v: Any) -> Any:
        return attending(q, k, v, mask=Causal(), score=lambda s, m, n: 0.5 * s).float().square()

    def given(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return attending(q, k, v, mask=mask)

    def gradients(f: Any, *more: Any) -> Any:
        return torch.autograd.grad(f(q, k, v, *more).sum(), (q, k, v))

    torch._dynamo.reset()
    compiled = torch.compile(given, fullgraph=True, backend="aot_eager")
    for mask in (Window(2), Window(5), None):
        for one, other in zip(gradients(compiled, mask), gradients(given, mask)):
            assert torch.equal(one, other)
    for one, other in zip(gradients(torch.compile(inside, fullgraph=True, backend="aot_eager")), gradients(inside)):
        assert torch.equal(one, other)


def test_names_of_masks_and_scores(in_the_emulator: None) -> None:
    """What a graph of another process says is what it says here, or is refused."""
    class Own(Mask):
        """Of the user's, whose text does not say what it does."""

        def visible(self, m: int, n: int) -> bool:
            return n < m

    told = MODULE._named(Causal() & Window(3), SoftCap(2.0), False)
    assert told == MODULE._named(Causal() & Window(3), SoftCap(2.0), True) == "mask Intersection(Causal(), Window(3)), score SoftCap(2.0)"
    assert MODULE._named(None, None, True) == "" and MODULE._named(Window(3), None, False) != MODULE._named(Window(4), None, False)
    names = {MODULE._named(*given, False) for given in ((Own(), None), (Own() & Causal(), None), (None, ALiBi(torch.ones(2))), (None, abs_of),
                                                        (None, ScoreFunction(abs_of)))}
    assert len(names) == 5 and all(name.startswith(MODULE._PROCESS) for name in names)
    q, k, v = drawn(1, 1, 4, 16), drawn(1, 1, 4, 16), drawn(1, 1, 4, 16)
    with pytest.raises(ValueError, match="this process has not called gemmkit.torch.attention with this mask and score"):
        torch.ops.gemmkit.attention(q, k, v, None, None, None, kind="0123456789abcdef 3")


def abs_of(s: Any, m: int, n: int) -> Any:
    return abs(s)


@pytest.mark.thorough
def test_export(in_the_emulator: None) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return attending(q, k, v, mask=Causal())

    given = tuple(drawn(1, 1, rows, 16, grad=False) for rows in (9, 12, 12))
    assert torch.equal(torch.export.export(Layer(), given).module()(*given), attending(*given, mask=Causal()))


def test_transforms(in_the_emulator: None) -> None:
    q, k, v = drawn(2, 1, 1, 9, 16, grad=False), drawn(1, 1, 12, 16, grad=False), drawn(2, 1, 1, 12, 16, grad=False)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return attending(q, k, v, mask=Causal()).float().sum()

    batch = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(0, None, 0))(q, k, v)
    for i in range(2):
        leaves = [x.clone().requires_grad_() for x in (q[i], k, v[i])]
        for one, other in zip(batch, torch.autograd.grad(loss(*leaves), leaves)):
            assert torch.equal(one[i], other)


def test_autocast(in_the_emulator: None) -> None:
    q, k, v = (drawn(1, 1, rows, 16, dtype=torch.float32) for rows in (9, 12, 12))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attending(q, k, v)
        assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.dtype == torch.float32 for x in found)
    close(found, torch.autograd.grad(exact(q, k, v)[0].sum(), (q, k, v)), 3e-2)


def test_a_score_is_derived_once_a_call(in_the_emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def counted(score: Any) -> Any:
        asked.append(score)
        return slope_of(score)

    slope_of = MODULE.slope_of
    monkeypatch.setattr(MODULE, "slope_of", counted)
    q, k, v = drawn(1, 1, 4, 16), drawn(1, 1, 4, 16), drawn(1, 1, 4, 16)
    attending(q, k, v, score=ScoreFunction(lambda s, m, n: s * abs(s))).sum().backward()
    assert len(asked) == 1


@pytest.mark.gpu
def test_drawn_calls_on_a_gpu() -> None:
    """Beside PyTorch's own attention in float32: sizes, shared heads and dtypes; the same bits twice."""
    random = np.random.default_rng(7)
    for _ in range(20):
        queries, keys, heads, share = (int(x) for x in (*random.integers(1, 700, 2), random.integers(1, 4), random.integers(1, 4)))
        dtype, head_dim = (HALF, torch.bfloat16)[random.integers(2)], 8 * int(random.integers(1, 17))
        q, k, v = (drawn(2, count, rows, head_dim, device="cuda", dtype=dtype) for count, rows in (
            (heads * share, queries), (heads, keys), (heads, keys)))
        grad = drawn(2, heads * share, queries, head_dim, device="cuda", dtype=dtype, grad=False)
        wanted = torch.autograd.grad(exact(q, k, v, lambda m, n: n <= m)[0], (q, k, v), grad)
        first, second = (torch.autograd.grad(attending(q, k, v, mask=Causal("upper left")), (q, k, v), grad) for _ in range(2))
        close(first, wanted, 3e-3 if dtype == HALF else 2e-2)
        assert all(torch.equal(one, other) for one, other in zip(first, second))
