"""``mapping="batch_invariant"`` of `gemmkit.torch`: rows of any batch have the same bits; gradients are as without it."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
import gemmkit.torch  # noqa: E402
from tests.support.machines import on_devices  # noqa: E402

INVARIANT = "batch_invariant"


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products(device: str, dtype: torch.dtype) -> None:
    """Of matrices, stacks of rows, vectors; with a gradient, in a compiled graph, and of a bias."""
    torch.manual_seed(0)
    a, b = torch.randn(6, 40, device=device).to(dtype), torch.randn(40, 24, device=device).to(dtype)
    c = torch.randn(6, 24, device=device).to(dtype)
    whole = gk.torch.matmul(a, b, mapping=INVARIANT)
    assert (whole.double() - a.double() @ b.double()).abs().max() < (1e-4 if dtype == torch.float32 else 0.05)
    for rows in (slice(0, 1), slice(2, 5)):
        assert torch.equal(gk.torch.matmul(a[rows], b, mapping=INVARIANT), whole[rows])
    assert torch.equal(gk.torch.matmul(a.view(2, 3, 40), b, mapping=INVARIANT).view(6, 24), whole)
    assert torch.equal(gk.torch.matmul(a[3], b, mapping=INVARIANT), whole[3])
    assert torch.equal(gk.torch.matmul(a, b, c, mapping=INVARIANT), whole + c)
    x = a.clone().requires_grad_()
    found = gk.torch.matmul(x, b, mapping=INVARIANT)
    assert torch.equal(found, whole)
    found.sum().backward()
    assert torch.allclose(x.grad, b.sum(1).expand(6, 40), rtol=1e-3, atol=1e-2)


@on_devices
@pytest.mark.parametrize(("bias", "activation"), [(True, "gelu"), (False, None), (True, None)])
def test_layers(device: str, bias: bool, activation: str | None) -> None:
    torch.manual_seed(0)
    layer = gk.torch.Linear(40, 24, bias, activation, device, torch.float32, mapping=INVARIANT)
    x = torch.randn(5, 40, device=device)
    plain = gk.torch.Linear(40, 24, bias, activation, device, torch.float32)
    plain.load_state_dict(layer.state_dict())
    for one in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            whole = one(x)
            assert all(torch.equal(one(x[:n]), whole[:n]) for n in (1, 2, 4))
            assert torch.allclose(whole, plain(x), atol=1e-5)
    assert "mapping='batch_invariant'" in repr(layer) and "mapping" not in repr(plain)
    layer(x).sum().backward()
    plain(x).sum().backward()
    assert torch.allclose(layer.weight.grad, plain.weight.grad, atol=1e-4)


def test_what_is_refused() -> None:
    ones = torch.ones(2, 2)
    for refused in (lambda: gk.torch.Linear(4, 4, mapping="rows"), lambda: gk.torch.matmul(ones, ones, mapping="rows")):
        with pytest.raises(ValueError, match="'batch_invariant' is needed"):
            refused()
