"""The cross entropy of a linear layer as an operator: losses, gradients, and what looks at them, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
import gemmkit.torch  # noqa: E402
from gemmkit.torch import losses  # noqa: E402
from tests.support.machines import on_devices  # noqa: E402

F = torch.nn.functional
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 5e-5, torch.float64: 1e-12}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 16 rows."""
    monkeypatch.setattr(losses, "PART_ROWS", 16)
    monkeypatch.setattr(losses, "PART_LOGITS", 1)


def by_pytorch(x: Any, weight: Any, bias: Any, labels: Any, reduction: str, smoothing: float, z: float,
               cap: float | None) -> Any:
    logits = F.linear(x, weight, bias)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    found = F.cross_entropy(logits, labels.long(), reduction="none", label_smoothing=smoothing)
    found = found + torch.where(labels != -100, z * torch.logsumexp(logits, -1) ** 2, 0.0)
    return found if reduction == "none" else found.sum() if reduction == "sum" else found.sum() / (labels != -100).sum()


CASES = {"mean": ("mean", 0.0, 0.0, None, False), "sum": ("sum", 0.1, 1e-3, 5.0, True), "none": ("none", 0.2, 0.0, 3.0, True),
         "mean of all": ("mean", 0.1, 1e-2, 2.0, True)}


@on_devices
@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients(case: str, dtype: Any, device: str, small_parts: None) -> None:
    """Of one part, of some, and of so many that the weight's gradient is added up in float32; of words that fill no line;
    with what a scaler multiplies the loss by, by which float16 gradients stay normal numbers."""
    reduction, smoothing, z, cap, has_bias = CASES[case]
    torch.manual_seed(1201)
    for M, H, V in ((7, 16, 33), (40, 24, 100), (100, 8, 65)):
        x, weight, bias = (torch.randn(shape, dtype=torch.float64) / 2 for shape in ((M, H), (V, H), (V,)))
        labels = torch.randint(0, V, (M,), dtype=torch.int32 if M == 40 else torch.int64)
        labels[::3] = -100
        given = [y.to(device, dtype).requires_grad_() for y in (x, weight, *([bias] if has_bias else []))]
        exact = [y.detach().cpu().double().requires_grad_() for y in given]
        factor = {"mean": 65536.0, "sum": 64.0}.get(reduction, 1.0) if dtype == torch.float16 else 1.0
        found = gk.torch.linear_cross_entropy(
            given[0], given[1], labels.to(device), given[2] if has_bias else None, reduction=reduction,
            label_smoothing=smoothing, z_loss=z, softcap=cap)
        grad = torch.randn(found.shape, dtype=found.dtype)
        ((found * grad.to(device)).sum() * factor).backward()
        wanted = by_pytorch(exact[0], exact[1], exact[2] if has_bias else None, labels, reduction, smoothing, z, cap)
        (wanted * grad.double()).sum().backward()
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        for mine, their in ((found.detach(), wanted.detach()), *((p.grad / factor, q.grad) for p, q in zip(given, exact))):
            mine = mine.detach().cpu().double()
            assert float((mine - their).abs().max()) <= TOLERANCES[dtype] * float(their.abs().max()), (case, M)
        assert all(y.grad.dtype == y.dtype and y.grad.shape == y.shape for y in given)


def test_derivatives() -> None:
    """First and second ones, as PyTorch checks them; by ``torch.func``; of a loss that is recorded for some operands."""
    torch.manual_seed(0)
    labels = torch.tensor([0, 3, -100, 11, 5])
    x, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 8), (12, 8), (12,)))
    with gk.emulate():
        for reduction in ("mean", "none"):
            def loss(x: Any, weight: Any, bias: Any, reduction: str = reduction) -> Any:
                return gk.torch.linear_cross_entropy(x, weight, labels, bias, reduction=reduction, label_smoothing=0.1,
                                                     z_loss=0.01, softcap=4.0)

            assert torch.autograd.gradcheck(loss, (x, weight, bias))
            assert torch.autograd.gradgradcheck(loss, (x, weight, bias))
        y, w = torch.randn(5, 8, requires_grad=True), torch.randn(12, 8)
        gk.torch.linear_cross_entropy(y, w, labels).backward()
        assert torch.equal(torch.func.grad(lambda y: gk.torch.linear_cross_entropy(y, w, labels))(y), y.grad)
        several = torch.vmap(lambda y: gk.torch.linear_cross_entropy(y, w, labels))(torch.stack([y.detach()] * 2))
        assert several.shape == (2,) and several[0] == several[1]


def test_in_graphs_and_under_autocast() -> None:
    torch.manual_seed(0)
    labels = torch.tensor([[0, 3], [-100, 11]])
    x, weight = torch.randn(2, 2, 8, requires_grad=True), torch.randn(12, 8, requires_grad=True)

    def loss(x: Any) -> Any:
        return gk.torch.linear_cross_entropy(2 * x, weight, labels).sin()

    with gk.emulate():
        loss(x).backward()
        plain, x.grad = x.grad, None
        torch.compile(loss, backend="aot_eager", fullgraph=True)(x).backward()
        assert torch.allclose(x.grad, plain)
        for name, options in (("linear_cross_entropy", {}), ("linear_cross_entropy_sum", dict(mean=True, wanted=[True] * 3))):
            torch.library.opcheck(getattr(torch.ops.gemmkit, name), (x.view(4, 8), weight, labels.view(4), torch.zeros(12)),
                                  dict(ignored=-100, smoothing=0.1, z=0.0, cap=0.0, **options))
        with torch.autocast("cpu", torch.bfloat16):
            assert gk.torch.linear_cross_entropy(x, weight, labels).dtype == torch.float32


def test_labels_that_are_none() -> None:
    """A label that is no word has the loss NaN, which PyTorch answers by an error: a GPU's labels are not read by the host.
    Without a row that counts a mean is NaN, as PyTorch's is, and a sum 0; gradients are 0."""
    x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(12, 8, requires_grad=True)
    with gk.emulate():
        found = gk.torch.linear_cross_entropy(x, weight, torch.tensor([0, 12, -1, -100]), reduction="none").detach()
        assert found[0] == pytest.approx(math.log(12), rel=1e-6) and found[1:3].isnan().all() and found[3] == 0
        none = torch.full((4,), -100)
        assert gk.torch.linear_cross_entropy(x, weight, none).isnan()
        total = gk.torch.linear_cross_entropy(x, weight, none, reduction="sum")
        total.backward()
        assert total == 0 and not x.grad.any() and not weight.grad.any()
        empty = gk.torch.linear_cross_entropy(x[:0], weight, none[:0], reduction="sum")
        empty.backward()
        assert empty == 0 and not weight.grad.any()


X, WEIGHT, LABELS = torch.ones(4, 8), torch.ones(12, 8), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(("given", "kind", "message"), [
    (dict(labels=LABELS.float()), TypeError, "labels has dtype torch.float32; int32 or int64 is needed"),
    (dict(labels=LABELS[:3]), ValueError, r"labels \(3,\)"), (dict(weight=WEIGHT[:, :3]), ValueError, r"weight \(12, 3\)"),
    (dict(weight=WEIGHT.half()), TypeError, "weight has dtype torch.float16"), (dict(bias=X[0]), ValueError, r"bias \(8,\)"),
    (dict(weight=WEIGHT[:0]), ValueError, r"weight \(0, 8\)"), (dict(labels=[0] * 4), TypeError, "labels=.*a tensor"),
    (dict(reduction="max"), ValueError, "'mean', 'sum' or 'none'"), (dict(softcap=0.0), ValueError, "softcap=0.0"),
    (dict(label_smoothing=1.5), ValueError, "label_smoothing=1.5"), (dict(z_loss=math.nan), ValueError, "z_loss=nan"),
])
def test_what_is_refused(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    with gk.emulate(), pytest.raises(kind, match=message):
        gk.torch.linear_cross_entropy(**{**dict(x=X, weight=WEIGHT, labels=LABELS), **given})


@pytest.mark.gpu
def test_memory_of_a_large_vocabulary() -> None:
    """A tenth of the logits of all rows at most, beside the gradients."""
    M, V, H = 16384, 65536, 256
    x = torch.randn(M, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, V, (M,), device="cuda")
    for _ in range(2):
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gk.torch.linear_cross_entropy(x, weight, labels).backward()
        taken = torch.cuda.max_memory_allocated() - before
    assert taken < 0.15 * 2 * M * V + 6 * 2 * (M + V) * H
